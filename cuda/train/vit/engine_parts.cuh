/* Shared by the files of the engine `vit`: engine.cu (graphs and steps), engine_open.cu, activations.cu
 * (memory), forward.cu and backward.cu. No other file includes this header. */
#ifndef FDSL_CUDA_TRAIN_VIT_ENGINE_PARTS_CUH
#define FDSL_CUDA_TRAIN_VIT_ENGINE_PARTS_CUH

#include "train/device_engine.cuh"
#include "train/vit/engine.cuh"
#include "train/vit/kernels.cuh"

#define BLOCK_LAYERS 12 /* layers of a block in the model's table */
#define BLOCKS_MAX   ((MODEL_LAYERS_MAX - 5) / BLOCK_LAYERS)
#define GRAPHS       4 /* enough for full steps and short steps, each with parts of two sizes */

/* The results of a block's forward pass that its backward pass reads: the inputs of its layers, and the
 * values that vit_attention() and the normalisations save. `qkv` has the queries, keys and values. */
struct saved {
    bf16 *norms1, *qkv, *mixed, *sums2, *norms2, *hidden, *active;
    struct vit_moments *moments1, *moments2;
    float *logs;
};

struct block {
    const struct layer *norm1, *qkv, *proj, *norm2, *fc1, *fc2;
    const float *factors1, *factors2; /* of stochastic depth, per sample; NULL: all factors are 1 */
    bf16 *sums1;                      /* the input of the block */
    struct saved saved;
};

/* The CUDA graphs for a step, or a part of a step, with `count` samples. */
struct graphs {
    uint32_t count;
    cudaGraphExec_t forward, backward;
};

struct vit : device_engine {
    struct vit_multiplier *multiplier;

    const struct layer *patch_layer, *token_layer, *last_norm, *head;
    struct block blocks[BLOCKS_MAX];
    uint32_t block_count, patch; /* `patch`: pixels of a patch along an axis */
    uint32_t heads, logit_apart; /* `logit_apart`: distance between rows of logit_rounded */

    bf16 *parameters; /* rounded to bf16 */
    /* `added`: the gradients that the backward pass writes. It equals `gradients`, unless a step has several
     * parts. */
    float *added;
    struct vit_sums sums;
    struct tensor_update *groups; /* per VIT_GROUP_VALUES parameters: how to update them */

    struct vit_path *paths; /* device memory: the layers of stochastic depth */
    uint32_t path_count;
    float *factors; /* (layer, sample) */

    /* Activations outside the blocks. `branch` has the outputs of the current branch, or of the patch layer.
     */
    bf16 *patches, *branch, *class_sums, *class_norms;
    struct vit_moments *class_moments;
    float *logits;
    /* Gradients of: the sums (deltas), the outputs of a branch (branch_deltas), (q, k, v) or the hidden
     * values (wide_deltas), the inputs of a linear layer (in_deltas), and class_norms (class_deltas). */
    bf16 *deltas, *branch_deltas, *wide_deltas, *in_deltas, *class_deltas;
    bf16 *logit_rounded; /* logit_deltas in bf16 */
    float *logit_deltas;

    struct device_batch samples; /* `batch` points to it */
    struct graphs graphs[GRAPHS];
};

static inline struct vit_rows rows_of(const struct vit *vit, uint32_t count)
{
    return {count, vit->token_layer->out.channels, vit->token_layer->out.width};
}

static inline uint32_t hidden_width(const struct vit *vit)
{
    return vit->blocks[0].fc1->out.width;
}

/* ---- Opening (engine_open.cu, activations.cu) ---- */

/* Implements accepts() of struct engine. */
enum status vit_accepts(const struct train *train);
/* Opens a state that device_engine_new() has created. The caller closes it, even after a failure. */
enum status vit_open_all(struct vit *vit);
/* Allocates one buffer for all activations and their gradients, and sets the pointers to them. */
enum status vit_open_activations(struct vit *vit);

/* ---- Passes (forward.cu, backward.cu) ---- */

/* Returns the matrix product of a linear layer with `rows` rows of inputs. */
struct vit_linear vit_linear_of(const struct layer *layer, uint32_t rows);

/* These functions return the arguments of the two normalisations of block `i`, and of the last normalisation.
 * The arguments include the factors of stochastic depth of the branch before the normalisation. */
struct vit_norm vit_norm1_of(const struct vit *vit, uint32_t i, uint32_t count, bool training);
struct vit_norm vit_norm2_of(const struct vit *vit, uint32_t i, uint32_t count, bool training);
struct vit_norm vit_last_norm_of(const struct vit *vit, uint32_t count, bool training);

/* Computes block `i` up to the end of its second branch, from its normalised input. */
enum status vit_block_forward(struct vit *vit, uint32_t i, uint32_t count, bool training);

/* Computes the logits of `count` samples from vit->patches. */
enum status vit_forward(struct vit *vit, uint32_t count, bool training);

/* Computes the gradients of `count` samples. The kernels overwrite vit->added. If the step has one part, also
 * exchanges the gradients. */
enum status vit_backward(struct vit *vit, uint32_t count);

#endif
