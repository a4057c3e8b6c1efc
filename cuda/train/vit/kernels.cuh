/* The kernels of the engines `vit` and `vit-amp` (engine.cu). T is the 16-bit type of the tensors: bf16 or
 * fp16. Tensors are in C order, and have this type unless a comment says otherwise. A token is a row of
 * `width` values; the rows of a batch are (sample, token). Sums are in fp32, in an order that depends only on
 * the sizes and the GPU model, so repeated runs give the same bits. All functions with a `stream` enqueue
 * their work on it and return.
 *
 * A branch is what a shortcut skips: attention or the two linear layers of a block. The branch's output is
 * multiplied by the sample's factor of stochastic depth, and added to the values of the shortcut. */
#ifndef FDSL_CUDA_TRAIN_VIT_KERNELS_CUH
#define FDSL_CUDA_TRAIN_VIT_KERNELS_CUH

#include "train/network.cuh"

#define VIT_PARTS        528  /* maximum number of partial sums per column; see also vit_*_parts() */
#define VIT_SAMPLE_PARTS 8    /* number of partial sums per column, for sums of tokens over samples */
#define VIT_CLASS_PARTS  32   /* number of partial sums per class */
#define VIT_WIDTH_MAX    1024 /* maximum width of a token */

/* vit_weights_backward() can run at the same time as other kernels of the backward pass. It then has at most
 * VIT_SIDE_BLOCKS blocks, a multiple of 12, for the layers of a block. Other kernels leave so many
 * multiprocessors free: their argument `spared` is this number or 0. On an H200, vit-tiny was fastest with 60
 * of 132. */
#define VIT_SIDE_BLOCKS 60

/* The rows of a batch. */
struct vit_rows {
    uint32_t samples, tokens; /* tokens per sample, including the class token */
    uint32_t width;
};

/* ---- Sums over rows and samples (columns.cu) ---- */

/* A kernel that sums over many rows writes partial sums (part, result, column). One launch adds up those of
 * several kernels, over the parts in order. */
#define VIT_SUMS_MAX   10 /* kernels per launch */
#define VIT_SUMS_SMALL 4  /* of these, kernels that are not vit_weights_backward() */
struct vit_sum {
    const float *partial;
    uint32_t parts, results, columns;
    float *result[3]; /* NULL: not needed */
};
struct vit_sums {
    float *rooms[2]; /* for the partial sums of VIT_SUMS_MAX kernels; the previous sums may still be read from
                        the other room */
    uint32_t turn;   /* index of the current room */
    size_t used;     /* values in the current room */
    size_t size;     /* values of a room */
    uint32_t count;
    struct vit_sum sums[VIT_SUMS_MAX];
};

/* Allocates the rooms. `values`: the largest number of partial sums that a kernel writes; `weights`: the
 * number that all calls of vit_weights_backward() before vit_sums_finish() write. */
enum status vit_sums_open(struct allocations *allocations, size_t values, size_t weights,
                          struct vit_sums *sums);
/* Returns the room for the partial sums of the next kernel. */
static inline float *vit_sums_room(const struct vit_sums *sums)
{
    return sums->rooms[sums->turn] + sums->used;
}
/* Adds the partial sums that a kernel writes to vit_sums_room(); `sum` has all but their address. */
enum status vit_sums_add(struct vit_sums *sums, const struct vit_sum *sum);
/* Computes all sums that were added. The next sums use the other room. */
enum status vit_sums_finish(struct vit_sums *sums, cudaStream_t stream);
/* Sums each column of `values` (rows, width) over the rows. */
template <class T>
enum status vit_column_sums(const T *values, uint32_t rows, uint32_t width, float *result,
                            struct vit_sums *sums, cudaStream_t stream);

/* ---- Matrix products (multiply.cu) ---- */

/* cuBLASLt's state, and plans of the matrix products so far. Not thread safe. */
struct vit_multiplier;

/* STATUS_UNAVAILABLE, with a remedy in the message, if cuBLASLt is missing. */
enum status vit_multiplier_probe(void);
/* `allocations` owns the workspaces in device memory. Without `backward`, vit_linear_weights() does not work.
 * The caller closes the multiplier, even after a failure. */
enum status vit_multiplier_open(struct allocations *allocations, bool backward,
                                struct vit_multiplier **multiplier);
void vit_multiplier_close(struct vit_multiplier *multiplier);

/* A linear layer on `rows` rows: weights (out, in). `apart` is the distance between rows of its outputs or of
 * their gradients, at least `out`. */
struct vit_linear {
    uint32_t rows, in, out, apart;
};

/* T may also be float here: then all matrices are in fp32, and products are not rounded to TF32. */

/* Computes outputs = inputs weights^T + bias. `outputs` and `bias` are in fp32 if `wide` is true. */
template <class T>
enum status vit_linear_forward(struct vit_multiplier *multiplier, const struct vit_linear *linear, bool wide,
                               const T *inputs, const T *weights, const void *bias, void *outputs,
                               cudaStream_t stream);
/* Computes in_deltas = out_deltas weights. */
template <class T>
enum status vit_linear_inputs(struct vit_multiplier *multiplier, const struct vit_linear *linear,
                              uint32_t spared, const T *out_deltas, const T *weights, T *in_deltas,
                              cudaStream_t stream);
/* Computes gradients = out_deltas^T inputs, in fp32. Other products may be computed on another stream. */
template <class T>
enum status vit_linear_weights(struct vit_multiplier *multiplier, const struct vit_linear *linear,
                               const T *out_deltas, const T *inputs, float *gradients, cudaStream_t stream);

/* The gradients of a layer's weights. */
#define VIT_WEIGHTS_MAX 4 /* layers per launch */
/* Room for the partial sums of all layers of a block, and of the layers before and after attention of another
 * one: number of sums times tiles of 192 x 192 weights. With too little room, cuBLASLt would compute the last
 * gradients, with other bits. */
#define VIT_WEIGHTS_ITEMS (2 * VIT_SIDE_BLOCKS)
#define VIT_WEIGHTS_ROOM  ((size_t)VIT_WEIGHTS_ITEMS * 192 * 192)
template <class T> struct vit_weights {
    struct vit_linear linear;
    uint32_t parts; /* maximum number of partial sums, which fixes the order of additions */
    const T *deltas, *inputs;
    float *gradients;
};
/* Computes the gradients of the weights of up to VIT_WEIGHTS_MAX layers. With more than two layers, a block
 * processes one part of one of the first two layers, or several parts of the others. vit_sums_finish()
 * completes the gradients. */
template <class T>
enum status vit_weights_backward(struct vit_multiplier *multiplier, const struct vit_weights<T> *layers,
                                 uint32_t count, struct vit_sums *sums, cudaStream_t stream);

/* ---- Patches, tokens and parameters (tokens.cu) ---- */

/* Gathers a batch as batch_gather() does, but writes patches (sample, patch, channel, y, x) of
 * `patch` x `patch` pixels. */
template <class T>
enum status vit_patches(const struct data *data, const struct device_set *set,
                        const struct device_batch *batch, uint32_t count, uint32_t patch, T *patches,
                        cudaStream_t stream);

/* A layer with stochastic depth. */
struct vit_path {
    uint32_t number; /* number of the layer in the model */
    float rate;
};

/* Writes the factors of stochastic depth (layer, sample); the factors of adjacent layers are `apart` values
 * apart. `numbers` has the numbers of the samples. `layers` and `numbers` are in device memory. */
enum status vit_factors(const struct vit_path *layers, uint32_t layer_count, uint64_t seed, uint32_t epoch,
                        const uint32_t *numbers, uint32_t count, uint32_t apart, float *factors,
                        cudaStream_t stream);

/* Backward pass of LAYER_TOKENS: sums the gradients of the positions over the samples, in fp32;
 * vit_sums_finish() completes them. Those of the first position are also those of the class token. Copies the
 * gradients of the other tokens to `patch_deltas` (sample, patch, width). */
template <class T>
enum status vit_tokens_backward(const struct vit_rows *rows, const T *deltas, float *positions,
                                T *patch_deltas, struct vit_sums *sums, cudaStream_t stream);

/* The last layer. The logits and their gradients are in fp32. With --fp32-layers, all matrices of the layer
 * are in fp32, and `wide_inputs` and `wide_deltas` are room for the inputs and their gradients; else NULL. */
template <class T> struct vit_head {
    struct vit_linear linear;
    uint32_t apart; /* distance between rows of rounded gradients of the logits: a multiple of 8 */
    const T *weights;
    const float *wide_weights, *bias;
    float *wide_inputs, *wide_deltas;
};
template <class T>
enum status vit_head_forward(struct vit_multiplier *multiplier, const struct vit_head<T> *head,
                             const T *inputs, float *logits, cudaStream_t stream);
/* Computes the gradients of the inputs, weights and bias from those of the logits. `rounded` is room for rows
 * of head->apart values. vit_sums_finish() completes `bias`. */
template <class T>
enum status vit_head_backward(struct vit_multiplier *multiplier, const struct vit_head<T> *head,
                              const T *inputs, const float *deltas, T *rounded, T *in_deltas, float *weight,
                              float *bias, struct vit_sums *sums, cudaStream_t stream);

/* Rounds `count` values, a multiple of 2. */
template <class T> enum status vit_round(const float *values, size_t count, T *rounded, cudaStream_t stream);
/* The opposite of vit_round(). */
template <class T> enum status vit_widen(const T *values, size_t count, float *wide, cudaStream_t stream);

/* ---- Layer normalisation with its neighbours (norm.cu) ---- */

/* Mean of a row, and 1 / sqrt(variance + epsilon). */
struct vit_moments {
    float mean, scale;
};

/* The sum at the end of a branch, and the layer normalisation after it. */
template <class T> struct vit_norm {
    struct vit_rows rows;
    bool first_tokens;          /* normalise only the first token of each sample: `sums`, `outputs`, `moments`
                                   and vit_norm_deltas.outputs then have one row per sample */
    const float *factors;       /* per sample; NULL: all factors are 1 */
    const float *weight, *bias; /* fp32 */
    T *sums;                    /* input of the normalisation */
    T *outputs;                 /* output of the normalisation */
    struct vit_moments *moments; /* per row */
};

/* Computes sums = shortcut + factors * branch, and normalises them. If `branch` is NULL, normalises the
 * existing `sums`, which have one row per token. */
template <class T>
enum status vit_add_norm(const struct vit_norm<T> *norm, const T *shortcut, const T *branch,
                         cudaStream_t stream);
/* Computes `sums` and normalises them. The sums are the class token followed by the patches, plus the
 * positions. The class token and the positions are in fp32. */
template <class T>
enum status vit_tokens_norm(const struct vit_norm<T> *norm, const T *patches, const float *class_token,
                            const float *positions, cudaStream_t stream);

/* Gradients at the end of a branch, for struct vit_norm. */
template <class T> struct vit_norm_deltas {
    const T *outputs; /* gradient of norm.outputs; NULL: zero */
    const T *later;   /* gradient of norm.sums that arrives through the next shortcut; NULL: zero */
    T *sums;          /* result: gradient of norm.sums, for all tokens; may be the same array as `later` */
    T *branch;        /* result: factors * sums; NULL if there are no factors */
    float *weight, *bias; /* NULL: not needed */
    float *branch_bias; /* sum of factors * sums over all rows: the gradient of the bias of the branch's last
                           layer; NULL: not needed */
};
template <class T>
enum status vit_add_norm_backward(const struct vit_norm<T> *norm, const struct vit_norm_deltas<T> *deltas,
                                  struct vit_sums *sums, cudaStream_t stream);

/* ---- The two linear layers of a block (columns.cu) ---- */

/* The two linear layers of a block, and the GELU between them. If `fused` is true, one kernel computes the
 * forward pass, and one the backward pass except for the gradients of weights: then nothing is kept between
 * the passes. */
template <class T> struct vit_mlp {
    struct vit_linear first, second;
    bool fused;
    const T *inputs;
    const T *first_weights, *first_bias, *second_weights, *second_bias;
    T *hidden; /* the outputs of the first layer; only if not fused */
    T *active; /* their GELU; if fused, a result of the backward pass */
};
/* Sets `*fits` to whether a fused pass works on the current device. */
enum status vit_mlp_fits(const struct vit_linear *first, bool *fits);
/* Returns the largest number of partial sums per column that vit_mlp_backward() may need. */
uint32_t vit_mlp_parts(uint32_t rows);
/* Computes what the backward pass needs from the forward pass: `hidden` and `active`, if not fused. */
template <class T>
enum status vit_mlp_hidden(struct vit_multiplier *multiplier, const struct vit_mlp<T> *mlp,
                           cudaStream_t stream);
/* Computes the outputs, adds them to the shortcut, and normalises the sums; see vit_add_norm(). `branch` has
 * room for the outputs. */
template <class T>
enum status vit_mlp_forward(struct vit_multiplier *multiplier, const struct vit_mlp<T> *mlp,
                            const struct vit_norm<T> *norm, const T *shortcut, T *branch,
                            cudaStream_t stream);
/* Computes the gradients of the hidden values from those of the outputs, and does what
 * vit_add_norm_backward() does for the normalisation `norm`, whose outputs are the inputs. vit_sums_finish()
 * writes the sums of the gradients of the hidden values over the rows to `bias`. `in_deltas`, which
 * norm_deltas->outputs also is, has room for the gradients of the inputs; not used if fused. */
template <class T>
enum status vit_mlp_backward(struct vit_multiplier *multiplier, const struct vit_mlp<T> *mlp,
                             const T *out_deltas, T *deltas, T *in_deltas, const struct vit_norm<T> *norm,
                             const struct vit_norm_deltas<T> *norm_deltas, float *bias, struct vit_sums *sums,
                             cudaStream_t stream);

/* ---- Linear layers for inference with few rows (columns.cu) ---- */

/* A linear layer, fused with the operations before and after it: outputs = norm(inputs) weights^T + bias +
 * shortcut, or GELU of this. */
template <class T> struct vit_few {
    struct vit_linear linear;
    const T *inputs, *weights, *bias;
    const float *norm_weight, *norm_bias; /* of a layer normalisation of the inputs, in fp32; NULL: none */
    const T *shortcut;                    /* NULL: none */
    bool gelu;                            /* without a shortcut */
    T *outputs;
};
#define VIT_FEW_ROWS \
    1408 /* maximum number of rows: 7 images of vit-tiny, which fill an H200; less if wider */
/* Sets `*fits` to whether vit_few_linear() works, and is fast, for all linear layers of a block with `hidden`
 * hidden values. */
enum status vit_few_fits(const struct vit_rows *rows, uint32_t hidden, bool *fits);
/* `width` is that of a token; the layer has `width` inputs, or 4 times as many and no normalisation. */
template <class T>
enum status vit_few_linear(const struct vit_few<T> *few, uint32_t width, cudaStream_t stream);

/* ---- Attention (attention.cu) ---- */

/* A row of `inputs` has the queries of all heads, then the keys, then the values. For each (sample, head,
 * token), `logs` has the logarithm to base 2 of the sum over all keys of the exponentials of the token's
 * scores. The forward pass writes `outputs` and `logs`, and the backward pass reads them. */
template <class T> struct vit_attention {
    struct vit_rows rows;
    uint32_t heads;
    uint32_t spared; /* only for the backward pass */
    const T *inputs;
    T *outputs;
    float *logs;
};
template <class T>
enum status vit_attention_forward(const struct vit_attention<T> *attention, cudaStream_t stream);
/* Computes the gradients of the inputs from those of the outputs, and writes their sums over the rows to
 * `bias`. */
template <class T>
enum status vit_attention_backward(const struct vit_attention<T> *attention, const T *out_deltas,
                                   T *in_deltas, float *bias, struct vit_sums *sums, cudaStream_t stream);
/* Returns the number of partial sums per column that vit_attention_backward() needs. */
uint32_t vit_attention_parts(const struct vit_rows *rows, uint32_t heads);

/* ---- Compute capability 9.0, with HAVE_HOPPER (*_hopper.cu) ---- */

/* weights_hopper() computes what vit_weights_backward() computes, if weights_hopper_fit() says so. */
template <class T>
enum status weights_hopper_fit(const struct vit_weights<T> *layers, uint32_t count,
                               const struct vit_sums *sums, bool *fit);
template <class T>
enum status weights_hopper(const struct vit_weights<T> *layers, uint32_t count, struct vit_sums *sums,
                           cudaStream_t stream);

/* Sets `*fits` to whether linear_hopper() works for this layer on the current device. It computes what
 * vit_linear_forward() or, with `back`, vit_linear_inputs() computes. */
enum status linear_hopper_fits(const struct vit_linear *linear, bool back, bool *fits);
/* `inputs` and `outputs` are the gradients of the layer's outputs and inputs with `back`. `bias`: NULL with
 * `back`. */
template <class T>
enum status linear_hopper(const struct vit_linear *linear, bool back, uint32_t spared, const T *inputs,
                          const T *weights, const T *bias, T *outputs, cudaStream_t stream);
/* The layer at the end of a branch, with the sum and the normalisation after it: computes norm->sums =
 * shortcut + factors * (inputs weights^T + bias), and normalises them. */
enum status branch_hopper_fits(const struct vit_linear *linear, bool *fits);
template <class T>
enum status branch_hopper(const struct vit_linear *linear, const T *inputs, const T *weights, const T *bias,
                          const struct vit_norm<T> *norm, const T *shortcut, cudaStream_t stream);

/* Sets `*fits` to whether hopper_forward() and hopper_backward() work for this attention on the current
 * device. */
template <class T> enum status hopper_fits(const struct vit_attention<T> *attention, bool *fits);
/* These functions compute what vit_attention_forward() and vit_attention_backward() compute.
 * hopper_backward() writes one partial sum per column and sample to `partial`, and does not add them up. */
template <class T> enum status hopper_forward(const struct vit_attention<T> *attention, cudaStream_t stream);
template <class T>
enum status hopper_backward(const struct vit_attention<T> *attention, const T *out_deltas, T *in_deltas,
                            float *partial, cudaStream_t stream);

/* These functions compute what vit_mlp_fits(), vit_mlp_forward() and vit_mlp_backward() compute, if fused. If
 * `outputs` is not NULL, mlp_hopper_forward() computes only the outputs. */
enum status mlp_hopper_fits(const struct vit_linear *first, bool *fits);
template <class T>
enum status mlp_hopper_forward(const struct vit_mlp<T> *mlp, const struct vit_norm<T> *norm,
                               const T *shortcut, T *outputs, cudaStream_t stream);
template <class T>
enum status mlp_hopper_backward(const struct vit_mlp<T> *mlp, const T *out_deltas, T *deltas,
                                const struct vit_norm<T> *norm, const struct vit_norm_deltas<T> *norm_deltas,
                                float *bias, struct vit_sums *sums, cudaStream_t stream);

/* Sets `*fits` to whether wide_hopper_forward() and wide_hopper_backward() work on the current device. */
enum status wide_hopper_fits(const struct vit_linear *first, bool *fits);
/* Returns the number of partial sums per column that wide_hopper_backward() writes. */
uint32_t wide_hopper_parts(uint32_t rows);
/* Computes what vit_mlp_hidden() computes. */
template <class T> enum status wide_hopper_forward(const struct vit_mlp<T> *mlp, cudaStream_t stream);
/* Computes the gradients of the hidden values from those of the outputs, before the GELU. vit_sums_finish()
 * writes their sums over the rows to `bias`. */
template <class T>
enum status wide_hopper_backward(const struct vit_mlp<T> *mlp, const T *out_deltas, T *deltas, float *bias,
                                 struct vit_sums *sums, cudaStream_t stream);

/* These functions do what vit_few_fits() and vit_few_linear() do. */
enum status few_hopper_fits(const struct vit_rows *rows, uint32_t hidden, bool *fits);
template <class T>
enum status few_hopper_linear(const struct vit_few<T> *few, uint32_t width, cudaStream_t stream);

#endif
