/* The engines of `train-vit`, `train-vit-amp` and `infer-vit`. T is the 16-bit type of activations, their
 * gradients, and the weights of matrix products: bf16 or fp16. One buffer holds all activations. A step
 * gathers its samples, replays the CUDA graph of the forward pass, computes the loss, replays the graph of
 * the backward pass, and updates the parameters. Each number of samples needs its own graphs; the last batch
 * of an epoch, for example, can be smaller. `infer-vit` replays a graph of the forward pass; with few rows,
 * each linear layer of a block is one kernel. A stage of a pipeline has some of the blocks, and launches its
 * kernels without graphs. */
#include <stdlib.h>
#include <type_traits>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "train/device_engine.cuh"
#include "train/engines.cuh"
#include "train/vit/kernels.cuh"

#define BLOCK_LAYERS 12 /* layers of a block in the model's table */
#define BLOCKS_MAX   ((MODEL_LAYERS_MAX - 5) / BLOCK_LAYERS)
#define SAMPLES_MAX  32767 /* samples per batch; a grid has 2 blocks per sample along z, at most 65535 */
#define GRAPHS       4     /* enough for full steps and short steps, each with parts of two sizes */

/* The results of a block's forward pass that its backward pass reads: the inputs of its layers, and the
 * values that vit_attention_forward() and the normalisations save. `qkv` has the queries, keys and values. If
 * vit->fused is true, the backward pass computes `hidden` and `active` again. */
template <class T> struct vit_saved {
    T *norms1, *qkv, *mixed, *sums2, *norms2, *hidden, *active;
    struct vit_moments *moments1, *moments2;
    float *logs;
};

template <class T> struct vit_block {
    const struct layer *norm1, *qkv, *proj, *norm2, *fc1, *fc2;
    const float *factors1, *factors2; /* of stochastic depth, per sample; NULL: all factors are 1 */
    T *sums1;                         /* the input of the block */
    struct vit_saved<T> saved;
};

/* The gradients of a block's weights and biases are computed on a stream of their own, because no later
 * kernel of the backward pass needs them. On few multiprocessors, they are limited by tensor cores rather
 * than by memory, and attention's backward pass needs little of the memory's bandwidth. The main stream waits
 * for an event of the latest block before it overwrites what the side stream reads. Kernels of wide layers
 * fill the device: no multiprocessors are spared for this stream, and it is the main stream. */
struct vit_side {
    cudaStream_t stream;
    cudaEvent_t begin;  /* on the main stream: what the next kernels of this stream read is complete */
    cudaEvent_t hidden; /* the gradients of the weights of fc2 and fc1 are complete */
    cudaEvent_t block;  /* all gradients so far are complete */
    /* The gradients of the weights of the layers before and after attention are computed together with those
     * of fc2 and fc1 of the next block. One launch with more work keeps its multiprocessors busy for as long
     * as attention's backward pass takes. */
    bool defers;
};

/* The branches of a block, as indices of vit->deltas and vit->branch_deltas. If work is deferred, odd blocks
 * have an index of their own for the first branch. */
enum branch { BRANCH_HIDDEN, BRANCH_ATTENTION, BRANCH_ATTENTION_ODD, BRANCHES };

/* The CUDA graphs for a step, or a part of a step, with `count` samples. */
struct vit_graphs {
    uint32_t count;
    cudaGraphExec_t forward, backward;
    bool complete;
};

/* The results of a batch's forward pass that its backward pass needs. A stage of a pipeline has one for each
 * micro-batch whose activations it keeps; otherwise there is one. */
template <class T> struct vit_slot {
    struct vit_block<T> blocks[BLOCKS_MAX];
    float *factors; /* of stochastic depth: (layer, sample) */
    /* Activations outside the blocks. A stage without the head has no class_sums, class_norms, class_moments,
     * logits and logit_deltas, and only the first stage has patches. */
    T *patches, *class_sums, *class_norms;
    struct vit_moments *class_moments;
    float *logits, *logit_deltas;
    float *head_inputs, *patch_inputs; /* in fp32, for layers of --fp32-layers; else NULL */
    struct device_batch samples;
};

template <class T>
struct vit : device_engine, vit_slot<T> { /* the current slot; `batch` points to its samples */
    struct vit_multiplier *multiplier;
    struct vit_side side;
    struct vit_slot<T> *slots; /* of a stage of a pipeline; otherwise NULL */

    /* The first two are NULL in the later stages of a pipeline, the last two in all stages but the last. */
    const struct layer *patch_layer, *token_layer, *last_norm, *head;
    struct shape tokens;         /* of the blocks: tokens as channels, and the width of a token */
    uint32_t block_count, patch; /* `patch`: pixels of a patch along an axis */
    uint32_t heads, logit_apart; /* `logit_apart`: distance between rows of logit_rounded */
    bool fused;                  /* the two linear layers after attention: see struct vit_mlp */
    uint32_t spared;             /* see VIT_SIDE_BLOCKS */

    T *parameters; /* rounded to 16 bits */
    /* `added`: the gradients that the backward pass writes. It equals `gradients`, unless a step has several
     * parts. */
    float *added;
    struct vit_sums sums;

    struct vit_path *paths; /* device memory: the layers of stochastic depth */
    uint32_t path_count;

    T *branch;     /* the outputs of the current branch, or of the patch layer */
    T *few_active; /* of few_forward(): the GELU of the hidden values */
    /* A stage without the head: its outputs; and room for their moments, which are not used. */
    T *sums_out;
    struct vit_moments *moments_out;
    /* Gradients of: the sums at the end of a block's second and first branch (deltas), the outputs of these
     * branches (branch_deltas), the hidden values, (q, k, v), the inputs of a linear layer (in_deltas), and
     * class_norms (class_deltas). Blocks take turns with arrays that deferred work reads. */
    T *deltas[BRANCHES], *branch_deltas[BRANCHES], *hidden_deltas, *qkv_deltas[2], *in_deltas, *class_deltas;
    T *active;        /* if fused, the GELU of the hidden values */
    T *logit_rounded; /* logit_deltas in 16 bits */
    /* Copies in fp32 for layers of --fp32-layers: the gradients of the head's inputs; the outputs of the
     * patch layer or their gradients. Else NULL. */
    float *head_deltas, *patch_outputs;

    struct vit_graphs graphs[GRAPHS];
};

template <class T> static struct vit_rows rows_of(const struct vit<T> *vit, uint32_t count)
{
    return {count, vit->tokens.channels, vit->tokens.width};
}

template <class T> static uint32_t hidden_width(const struct vit<T> *vit)
{
    return vit->blocks[0].fc1->out.width;
}

template <class T> static vit<T> *vit_of(struct device_engine *engine)
{
    return static_cast<struct vit<T> *>(engine);
}

template <class T> static vit<T> *vit_at(void *state)
{
    return device_engine_as<struct vit<T>>(state);
}

/* ---- Supported networks ---- */

static bool is_block(const struct layer *layer)
{
    static const enum layer_kind kinds[BLOCK_LAYERS] = {
        LAYER_NORM, LAYER_TOKEN_LINEAR, LAYER_ATTENTION, LAYER_TOKEN_LINEAR, LAYER_DROP_PATH, LAYER_ADD,
        LAYER_NORM, LAYER_TOKEN_LINEAR, LAYER_GELU,      LAYER_TOKEN_LINEAR, LAYER_DROP_PATH, LAYER_ADD};
    for (uint32_t i = 0; i < BLOCK_LAYERS; i++)
        if (layer[i].spec.kind != kinds[i])
            return false;
    return layer[5].spec.back == 6 && layer[11].spec.back == 6;
}

#define LAYERS_BEFORE 2 /* patches and tokens */
#define LAYERS_AFTER  3 /* selection of the first token, norm, head */

/* Return the numbers of layers before and after the blocks. A stage of a pipeline may lack these layers. */
static uint32_t layers_before(const struct train *train)
{
    return train->stage && !train->stage->first ? 0 : LAYERS_BEFORE;
}

static uint32_t layers_after(const struct train *train)
{
    return train->stage && !train->stage->last ? 0 : LAYERS_AFTER;
}

/* Returns whether the layers are those of a vision transformer, or of a stage of one. */
static bool is_vit(const struct train *train)
{
    const struct model *model = train->model;
    const struct layer *layers = model->layers;
    const uint32_t count = model->layer_count, before = layers_before(train), after = layers_after(train);
    if (count < before + after + BLOCK_LAYERS || (count - before - after) % BLOCK_LAYERS)
        return false;
    if (before > 0 && (layers[0].spec.kind != LAYER_PATCHES || layers[1].spec.kind != LAYER_TOKENS))
        return false;
    if (after > 0 &&
        (layers[count - 3].spec.kind != LAYER_SELECT || layers[count - 2].spec.kind != LAYER_NORM ||
         layers[count - 1].spec.kind != LAYER_LINEAR))
        return false;
    for (uint32_t i = before; i + after < count; i += BLOCK_LAYERS)
        if (!is_block(&layers[i]))
            return false;
    return true;
}

/* Returns whether the kernels, which read 8 values at a time, support the sizes of the model. */
static bool has_sizes(const struct train *train)
{
    const struct layer *patches = &train->model->layers[0], *attention = patches + layers_before(train) + 2;
    const uint32_t width = attention->out.width, depth = width / attention->spec.heads;
    const uint32_t taps = patches->spec.kernel[1] * patches->spec.kernel[2] * patches->in.channels;
    const bool has_patches = layers_before(train) > 0;
    return width <= VIT_WIDTH_MAX && width % 8 == 0 && (!has_patches || taps % 8 == 0) &&
           (!has_patches || patches->spec.kernel[1] == patches->spec.kernel[2]) &&
           (depth == 16 || depth == 32 || depth == 64);
}

static enum status vit_accepts(const struct train *train)
{
    const struct model *model = train->model;
    if (!is_vit(train))
        return status_set(
            STATUS_USAGE,
            "it supports only vision transformers (vit-micro, vit-tiny, vit-small, vit-base, vit-large), "
            "but this is %s; use %s",
            model->name, train->forward_only ? "infer-cuda" : "train-cuda");
    if (!has_sizes(train))
        return status_set(
            STATUS_USAGE,
            "it supports only widths up to %d and heads of 16, 32 or 64 values, with patches of "
            "a multiple of 8 values; use %s",
            VIT_WIDTH_MAX, train->forward_only ? "infer-omp" : "train-omp");
    if (train_part_max(train) > SAMPLES_MAX)
        return status_set(STATUS_TOO_LARGE,
                          "it supports at most %d samples per GPU at a time; lower --batch, or raise "
                          "--accumulate",
                          SAMPLES_MAX);
    return STATUS_OK;
}

/* ---- Activations: one buffer is divided among the activations and gradients ---- */

#define PIECE_BYTES 256 /* alignment in the buffer of activations */

/* The division of a buffer into arrays. To measure the size that a buffer needs, set `buffer` to NULL. */
struct pieces {
    char *buffer;
    size_t used; /* bytes */
};

template <class T> static void take(struct pieces *pieces, T **array, size_t count)
{
    *array = pieces->buffer ? reinterpret_cast<T *>(pieces->buffer + pieces->used) : nullptr;
    pieces->used += (count * sizeof(T) + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
}

template <class T>
static void arrange_saved(const struct vit<T> *vit, struct pieces *pieces, struct vit_saved<T> *saved)
{
    const struct vit_rows shape = rows_of<T>(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens, values = rows * shape.width;
    take(pieces, &saved->norms1, values);
    take(pieces, &saved->qkv, 3 * values);
    take(pieces, &saved->mixed, values);
    take(pieces, &saved->sums2, values);
    take(pieces, &saved->norms2, values);
    if (!vit->fused) {
        take(pieces, &saved->hidden, rows * hidden_width<T>(vit));
        take(pieces, &saved->active, rows * hidden_width<T>(vit));
    }
    take(pieces, &saved->moments1, rows);
    take(pieces, &saved->moments2, rows);
    take(pieces, &saved->logs, rows * vit->heads);
}

/* All blocks share the saved arrays of the first block if there is no backward pass, or if the backward pass
 * repeats the forward pass of each block. Without a backward pass, two arrays take turns as the inputs of the
 * blocks. */
template <class T> static void arrange_blocks(struct vit<T> *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of<T>(vit, vit->capacity);
    const bool shared = vit->train->forward_only || vit->train->checkpoint_activations;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        struct vit_block<T> *block = &vit->blocks[i];
        if (vit->train->forward_only && i > 1)
            block->sums1 = block[-2].sums1;
        else
            take(pieces, &block->sums1, (size_t)shape.samples * shape.tokens * shape.width);
        if (shared && i > 0)
            block->saved = block[-1].saved;
        else
            arrange_saved<T>(vit, pieces, &block->saved);
    }
}

template <class T> static void arrange_deltas(struct vit<T> *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of<T>(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens, values = rows * shape.width;
    const uint32_t hidden = hidden_width<T>(vit);
    for (int branch = 0; branch < (vit->side.defers ? BRANCHES : BRANCHES - 1); branch++) {
        take(pieces, &vit->deltas[branch], values);
        if (vit->path_count > 0)
            take(pieces, &vit->branch_deltas[branch], values);
    }
    take(pieces, &vit->in_deltas, values);
    take(pieces, &vit->hidden_deltas, rows * hidden);
    for (int turn = 0; turn <= vit->side.defers; turn++)
        take(pieces, &vit->qkv_deltas[turn], 3 * values);
    if (vit->fused)
        take(pieces, &vit->active, rows * hidden);
    if (vit->head) {
        take(pieces, &vit->class_deltas, (size_t)shape.samples * shape.width);
        take(pieces, &vit->logit_rounded, (size_t)shape.samples * vit->logit_apart);
    }
}

/* Divides the buffer for the current slot. */
template <class T> static void arrange_slot(struct vit<T> *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of<T>(vit, vit->capacity);
    const size_t samples = shape.samples;
    arrange_blocks<T>(vit, pieces);
    if (vit->patch_layer)
        take(pieces, &vit->patches, samples * vit->train->model->input_values);
    if (vit->patch_layer && vit->patch_layer->fp32)
        take(pieces, &vit->patch_inputs, samples * vit->train->model->input_values);
    if (!vit->head)
        return;
    if (vit->head->fp32)
        take(pieces, &vit->head_inputs, samples * shape.width);
    take(pieces, &vit->class_sums, samples * shape.width);
    take(pieces, &vit->class_norms, samples * shape.width);
    take(pieces, &vit->class_moments, samples);
    take(pieces, &vit->logits, samples * vit->train->model->classes);
    if (!vit->train->forward_only)
        take(pieces, &vit->logit_deltas, samples * vit->train->model->classes);
}

template <class T> static void choose_slot(struct vit<T> *vit, uint32_t number)
{
    *static_cast<struct vit_slot<T> *>(vit) = vit->slots[number];
}

/* Divides the buffer of activations and their gradients. */
template <class T> static void arrange(struct vit<T> *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of<T>(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens;
    for (uint32_t i = 0; vit->slots && i < vit->train->stage->slots; i++) {
        choose_slot<T>(vit, i);
        arrange_slot<T>(vit, pieces);
        vit->slots[i] = *vit;
    }
    if (!vit->slots)
        arrange_slot<T>(vit, pieces);
    take(pieces, &vit->branch, rows * shape.width);
    take(pieces, &vit->few_active, (rows < VIT_FEW_ROWS ? rows : VIT_FEW_ROWS) * hidden_width<T>(vit));
    if (!vit->head) {
        take(pieces, &vit->sums_out, rows * shape.width);
        take(pieces, &vit->moments_out, rows);
    }
    if (vit->head && vit->head->fp32)
        take(pieces, &vit->head_deltas, (size_t)shape.samples * shape.width);
    if (vit->patch_layer && vit->patch_layer->fp32)
        take(pieces, &vit->patch_outputs, rows * shape.width);
    if (!vit->train->forward_only)
        arrange_deltas<T>(vit, pieces);
}

/* Allocates one buffer for all activations and their gradients, and sets the pointers to them. */
template <class T> static enum status open_activations(struct vit<T> *vit)
{
    struct pieces pieces = {nullptr, 0};
    arrange<T>(vit, &pieces);
    TRY(allocate(&vit->allocations, &pieces.buffer, pieces.used));
    pieces.used = 0;
    arrange<T>(vit, &pieces);
    return STATUS_OK;
}

/* ---- Opening ---- */

/* Returns the first layer of block `i`. */
template <class T> static const struct layer *block_layers(const struct vit<T> *vit, uint32_t i)
{
    return &vit->train->model->layers[layers_before(vit->train) + i * BLOCK_LAYERS];
}

template <class T> static void find_layers(struct vit<T> *vit)
{
    const struct model *model = vit->train->model;
    const uint32_t before = layers_before(vit->train), after = layers_after(vit->train);
    vit->patch_layer = before > 0 ? &model->layers[0] : nullptr;
    vit->token_layer = before > 0 ? &model->layers[1] : nullptr;
    vit->last_norm = after > 0 ? &model->layers[model->layer_count - 2] : nullptr;
    vit->head = after > 0 ? &model->layers[model->layer_count - 1] : nullptr;
    vit->block_count = (model->layer_count - before - after) / BLOCK_LAYERS;
    vit->tokens = block_layers(vit, 0)->out;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct layer *layers = block_layers(vit, i);
        vit->blocks[i].norm1 = &layers[0];
        vit->blocks[i].qkv = &layers[1];
        vit->blocks[i].proj = &layers[3];
        vit->blocks[i].norm2 = &layers[6];
        vit->blocks[i].fc1 = &layers[7];
        vit->blocks[i].fc2 = &layers[9];
    }
    vit->patch = vit->patch_layer ? vit->patch_layer->spec.kernel[1] : 0;
    vit->heads = block_layers(vit, 0)[2].spec.heads;
    vit->logit_apart = (model->classes + 7) / 8 * 8;
}

/* Returns the matrix product of a linear layer with `rows` rows of inputs. */
static struct vit_linear linear_of(const struct layer *layer, uint32_t rows)
{
    const uint32_t out = (uint32_t)layer->bias_values, in = (uint32_t)(layer->weight_values / out);
    return {rows, in, out, out};
}

/* Adds a layer of stochastic depth to `paths`. Returns the address of the layer's factors. If the layer drops
 * nothing, does not add it, and returns NULL. */
template <class T>
static const float *add_path(struct vit<T> *vit, const struct layer *layer, struct vit_path *paths)
{
    if (layer->spec.rate == 0)
        return nullptr;
    paths[vit->path_count] = {layer->number, layer->spec.rate};
    return vit->factors + (size_t)vit->path_count++ * vit->capacity;
}

/* Allocates the factors of the current slot, and sets `paths` and vit->path_count. */
template <class T> static enum status open_factors(struct vit<T> *vit, struct vit_path *paths)
{
    TRY(allocate(&vit->allocations, &vit->factors, (size_t)2 * vit->block_count * vit->capacity));
    vit->path_count = 0;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct layer *layers = block_layers<T>(vit, i);
        vit->blocks[i].factors1 = add_path<T>(vit, &layers[4], paths);
        vit->blocks[i].factors2 = add_path<T>(vit, &layers[10], paths);
    }
    return STATUS_OK;
}

/* Opens the slots: their samples, and their factors of stochastic depth. */
template <class T> static enum status open_slots(struct vit<T> *vit)
{
    const struct train *train = vit->train;
    const uint32_t count = train->stage ? train->stage->slots : 1;
    struct vit_path paths[2 * BLOCKS_MAX];
    if (train->stage)
        vit->slots = static_cast<struct vit_slot<T> *>(calloc(count, sizeof *vit->slots));
    TRY(ALLOCATED(vit->slots || !train->stage, "cuda: out of memory"));
    for (uint32_t i = 0; i < count; i++) {
        if (!train->forward_only)
            TRY(open_factors<T>(vit, paths));
        TRY(device_batch_allocate(train, vit->capacity, &vit->samples, &vit->allocations));
        if (vit->slots)
            vit->slots[i] = *vit;
    }
    vit->batch = &vit->samples;
    return vit->path_count == 0 ? STATUS_OK
                                : allocate_copy(&vit->allocations, &vit->paths, paths,
                                                vit->path_count * sizeof *paths, vit->stream);
}

/* Returns the largest number of partial sums that a kernel writes. */
template <class T> static size_t partial_values(const struct vit<T> *vit)
{
    const struct vit_rows rows = rows_of<T>(vit, vit->capacity);
    const size_t classes = vit->train->model->classes, tokens = (size_t)rows.tokens * rows.width;
    /* The backward passes of normalisation and of attention write three partial sums per column of a token.
     */
    const size_t mlp_parts = vit->fused ? VIT_PARTS : vit_mlp_parts(rows.samples * rows.tokens);
    const size_t sums[] = {VIT_PARTS * (size_t)3 * rows.width, mlp_parts * hidden_width<T>(vit),
                           VIT_SAMPLE_PARTS * tokens, VIT_CLASS_PARTS * classes,
                           (size_t)vit_attention_parts(&rows, vit->heads) * 3 * rows.width};
    size_t most = 0;
    for (size_t each : sums)
        most = each > most ? each : most;
    return most;
}

template <class T> static enum status side_open(struct vit<T> *vit)
{
    struct vit_side *side = &vit->side;
    side->stream = vit->stream;
    if (vit->spared > 0) /* the priority is above that of the main stream, and below that of exchanges */
        CUDA_TRY(cudaStreamCreateWithPriority(&side->stream, cudaStreamNonBlocking, -1));
    for (cudaEvent_t *event : {&side->begin, &side->hidden, &side->block})
        CUDA_TRY(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    return STATUS_OK;
}

template <class T> static void side_close(struct vit<T> *vit)
{
    const struct vit_side *side = &vit->side;
    destroy(side->begin, side->hidden, side->block, side->stream == vit->stream ? nullptr : side->stream);
}

template <class T> static enum status open_learning(struct vit<T> *vit)
{
    const size_t values = vit->train->model->arena_values;
    TRY(side_open<T>(vit));
    vit->allocations.part = MEMORY_WORKSPACE;
    TRY(vit_sums_open(&vit->allocations, partial_values<T>(vit), vit->fused ? VIT_WEIGHTS_ROOM : 0,
                      &vit->sums));
    vit->shared.rounded = vit->parameters;
    vit->to_fp16 = std::is_same<T, fp16>::value;
    if (vit->to_fp16)
        TRY(scaling_open(vit->train->model, &vit->allocations, &vit->losses.scale, vit->stream));
    vit->tensors.tensor_cores = true;
    TRY(device_engine_open_learning(vit));
    vit->added = vit->gradients;
    vit->allocations.part = MEMORY_GRADIENTS;
    return train_parts(vit->train) > 1 || vit->train->stage
               ? allocate_zeros(&vit->allocations, &vit->added, values, vit->stream)
               : STATUS_OK;
}

/* Opens a state that device_engine_new() has created. The caller closes it, even after a failure. */
template <class T> static enum status vit_open_all(struct vit<T> *vit)
{
    const struct train *train = vit->train;
    TRY(device_probe(vit->device));
    TRY(vit_accepts(train));
    find_layers<T>(vit);
    TRY(device_engine_open(vit));
    vit->allocations.part = MEMORY_WORKSPACE;
    TRY(vit_multiplier_open(&vit->allocations, !train->forward_only, &vit->multiplier));
    vit->allocations.part = MEMORY_ACTIVATIONS;
    TRY(open_slots<T>(vit));
    const struct vit_linear fc1 = linear_of(vit->blocks[0].fc1, 0);
    TRY(vit_mlp_fits(&fc1, &vit->fused));
    vit->spared = vit->fused ? VIT_SIDE_BLOCKS : 0;
    vit->side.defers = vit->fused && !train->checkpoint_activations;
    TRY(open_activations<T>(vit));
    vit->allocations.part = MEMORY_PARAMETERS;
    TRY(allocate_zeros(&vit->allocations, &vit->state.parameters, train->model->arena_values, vit->stream));
    TRY(allocate(&vit->allocations, &vit->parameters, train->model->arena_values));
    TRY(device_engine_open_data(vit));
    if (!train->forward_only)
        TRY(open_learning<T>(vit));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

/* ---- Forward pass ---- */

template <class T>
static enum status linear_forward(struct vit<T> *vit, const struct layer *layer, uint32_t rows,
                                  const T *inputs, T *outputs)
{
    const struct vit_linear linear = linear_of(layer, rows);
    return vit_linear_forward<T>(vit->multiplier, &linear, false, inputs, vit->parameters + layer->weight,
                                 vit->parameters + layer->bias, outputs, vit->stream);
}

template <class T>
static vit_norm<T> norm_of(const struct vit<T> *vit, const struct layer *layer, uint32_t count,
                           const float *factors, T *sums, T *outputs, struct vit_moments *moments)
{
    return {.rows = rows_of<T>(vit, count),
            .first_tokens = false,
            .factors = factors,
            .weight = vit->state.parameters + layer->weight,
            .bias = vit->state.parameters + layer->bias,
            .sums = sums,
            .outputs = outputs,
            .moments = moments};
}

/* norm1_of(), norm2_of() and last_norm_of() return the arguments of the two normalisations of block `i`, and
 * of the last normalisation. The arguments include the factors of stochastic depth of the branch before the
 * normalisation. */
template <class T>
static vit_norm<T> norm1_of(const struct vit<T> *vit, uint32_t i, uint32_t count, bool training)
{
    const struct vit_block<T> *block = &vit->blocks[i];
    return norm_of<T>(vit, block->norm1, count, training && i > 0 ? block[-1].factors2 : nullptr,
                      block->sums1, block->saved.norms1, block->saved.moments1);
}

template <class T>
static vit_norm<T> norm2_of(const struct vit<T> *vit, uint32_t i, uint32_t count, bool training)
{
    const struct vit_block<T> *block = &vit->blocks[i];
    return norm_of<T>(vit, block->norm2, count, training ? block->factors1 : nullptr, block->saved.sums2,
                      block->saved.norms2, block->saved.moments2);
}

template <class T> static vit_norm<T> last_norm_of(const struct vit<T> *vit, uint32_t count, bool training)
{
    const struct vit_block<T> *last = &vit->blocks[vit->block_count - 1];
    const float *factors = training ? last->factors2 : nullptr;
    /* A stage without the head needs only the sums. Its next stage normalises them. */
    if (!vit->head)
        return norm_of<T>(vit, last->norm2, count, factors, vit->sums_out, vit->in_deltas, vit->moments_out);
    struct vit_norm<T> norm = norm_of<T>(vit, vit->last_norm, count, factors, vit->class_sums,
                                         vit->class_norms, vit->class_moments);
    norm.first_tokens = true;
    return norm;
}

template <class T>
static vit_attention<T> attention_of(const struct vit<T> *vit, const struct vit_block<T> *block,
                                     uint32_t count)
{
    return {rows_of<T>(vit, count), vit->heads,         vit->spared,
            block->saved.qkv,       block->saved.mixed, block->saved.logs};
}

template <class T>
static vit_mlp<T> mlp_of(const struct vit<T> *vit, const struct vit_block<T> *block, uint32_t rows)
{
    return {.first = linear_of(block->fc1, rows),
            .second = linear_of(block->fc2, rows),
            .fused = vit->fused,
            .inputs = block->saved.norms2,
            .first_weights = vit->parameters + block->fc1->weight,
            .first_bias = vit->parameters + block->fc1->bias,
            .second_weights = vit->parameters + block->fc2->weight,
            .second_bias = vit->parameters + block->fc2->bias,
            .hidden = block->saved.hidden,
            .active = vit->fused ? vit->active : block->saved.active};
}

/* Computes block `i` up to the normalised input of its second branch, from the normalised input of its first
 * branch. */
template <class T>
static enum status first_forward(struct vit<T> *vit, uint32_t i, uint32_t count, bool training)
{
    const struct vit_block<T> *block = &vit->blocks[i];
    const struct vit_saved<T> *saved = &block->saved;
    const struct vit_norm<T> norm2 = norm2_of<T>(vit, i, count, training);
    const uint32_t rows = count * norm2.rows.tokens;
    TRY(linear_forward<T>(vit, block->qkv, rows, saved->norms1, saved->qkv));
    const struct vit_attention<T> attention = attention_of<T>(vit, block, count);
    TRY(vit_attention_forward<T>(&attention, vit->stream));
#if HAVE_HOPPER
    const struct vit_linear proj = linear_of(block->proj, rows);
    bool fits;
    TRY(branch_hopper_fits(&proj, &fits));
    if (fits)
        return branch_hopper<T>(&proj, saved->mixed, vit->parameters + block->proj->weight,
                                vit->parameters + block->proj->bias, &norm2, block->sums1, vit->stream);
#endif
    TRY(linear_forward<T>(vit, block->proj, rows, saved->mixed, vit->branch));
    return vit_add_norm<T>(&norm2, block->sums1, vit->branch, vit->stream);
}

/* Computes block `i` and the normalisation after it, from its normalised input. */
template <class T>
static enum status block_forward(struct vit<T> *vit, uint32_t i, uint32_t count, bool training)
{
    const struct vit_mlp<T> mlp = mlp_of<T>(vit, &vit->blocks[i], count * vit->tokens.channels);
    const struct vit_norm<T> next = i + 1 < vit->block_count ? norm1_of<T>(vit, i + 1, count, training)
                                                             : last_norm_of<T>(vit, count, training);
    TRY(first_forward<T>(vit, i, count, training));
    return vit_mlp_forward<T>(vit->multiplier, &mlp, &next, vit->blocks[i].saved.sums2, vit->branch,
                              vit->stream);
}

template <class T> static vit_head<T> head_of(const struct vit<T> *vit, uint32_t count)
{
    const float *parameters = vit->state.parameters;
    return {linear_of(vit->head, count),
            vit->logit_apart,
            vit->parameters + vit->head->weight,
            parameters + vit->head->weight,
            parameters + vit->head->bias,
            vit->head_inputs,
            vit->head_deltas};
}

/* Computes the outputs of the patch layer in vit->branch. */
template <class T> static enum status patches_forward(struct vit<T> *vit, uint32_t rows)
{
    const struct vit_linear linear = linear_of(vit->patch_layer, rows);
    const float *parameters = vit->state.parameters;
    if (!vit->patch_layer->fp32)
        return linear_forward<T>(vit, vit->patch_layer, rows, vit->patches, vit->branch);
    TRY(vit_widen<T>(vit->patches, (size_t)rows * linear.in, vit->patch_inputs, vit->stream));
    TRY(vit_linear_forward<float>(vit->multiplier, &linear, true, vit->patch_inputs,
                                  parameters + vit->patch_layer->weight, parameters + vit->patch_layer->bias,
                                  vit->patch_outputs, vit->stream));
    return vit_round<T>(vit->patch_outputs, (size_t)rows * linear.out, vit->branch, vit->stream);
}

/* Computes the normalised input of the first block from vit->patches. In a later stage of a pipeline, its
 * input is there. */
template <class T> static enum status tokens_forward(struct vit<T> *vit, uint32_t count, bool training)
{
    const float *parameters = vit->state.parameters;
    const struct vit_norm<T> first = norm1_of<T>(vit, 0, count, training);
    if (!vit->patch_layer)
        return vit_add_norm<T>(&first, nullptr, nullptr, vit->stream);
    TRY(patches_forward<T>(vit, count * (first.rows.tokens - 1)));
    return vit_tokens_norm<T>(&first, vit->branch, parameters + vit->token_layer->bias,
                              parameters + vit->token_layer->weight, vit->stream);
}

template <class T>
static vit_few<T> few_of(const struct vit<T> *vit, const struct layer *layer, uint32_t rows, const T *inputs,
                         T *outputs)
{
    return {.linear = linear_of(layer, rows),
            .inputs = inputs,
            .weights = vit->parameters + layer->weight,
            .bias = vit->parameters + layer->bias,
            .norm_weight = nullptr,
            .norm_bias = nullptr,
            .shortcut = nullptr,
            .gelu = false,
            .outputs = outputs};
}

/* Does what blocks_forward() does, for inference with few rows. */
template <class T> static enum status few_forward(struct vit<T> *vit, uint32_t count)
{
    const float *parameters = vit->state.parameters;
    const uint32_t width = vit->tokens.width, rows = count * vit->tokens.channels;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct vit_block<T> *block = &vit->blocks[i];
        const struct vit_saved<T> *saved = &block->saved;
        const struct vit_attention<T> attention = attention_of<T>(vit, block, count);
        T *sums = i + 1 < vit->block_count ? block[1].sums1 : vit->branch;
        struct vit_few<T> qkv = few_of<T>(vit, block->qkv, rows, block->sums1, saved->qkv),
                          proj = few_of<T>(vit, block->proj, rows, saved->mixed, saved->sums2),
                          fc1 = few_of<T>(vit, block->fc1, rows, saved->sums2, vit->few_active),
                          fc2 = few_of<T>(vit, block->fc2, rows, vit->few_active, sums);
        qkv.norm_weight = parameters + block->norm1->weight;
        qkv.norm_bias = parameters + block->norm1->bias;
        proj.shortcut = block->sums1;
        fc1.norm_weight = parameters + block->norm2->weight;
        fc1.norm_bias = parameters + block->norm2->bias;
        fc1.gelu = true;
        fc2.shortcut = saved->sums2;
        TRY(vit_few_linear<T>(&qkv, width, vit->stream));
        TRY(vit_attention_forward<T>(&attention, vit->stream));
        TRY(vit_few_linear<T>(&proj, width, vit->stream));
        TRY(vit_few_linear<T>(&fc1, width, vit->stream));
        TRY(vit_few_linear<T>(&fc2, width, vit->stream));
    }
    struct vit_norm<T> last = last_norm_of<T>(vit, count, false);
    last.sums = vit->branch;
    return vit_add_norm<T>(&last, nullptr, nullptr, vit->stream);
}

/* Computes the blocks, and the normalised sum after the last one. */
template <class T> static enum status blocks_forward(struct vit<T> *vit, uint32_t count, bool training)
{
    const struct vit_rows rows = rows_of<T>(vit, count);
    bool few = false;
    if (!training && !vit->train->stage)
        TRY(vit_few_fits(&rows, hidden_width<T>(vit), &few));
    if (few)
        return few_forward<T>(vit, count);
    for (uint32_t i = 0; i < vit->block_count; i++)
        TRY(block_forward<T>(vit, i, count, training));
    return STATUS_OK;
}

/* Computes the logits of `count` samples from vit->patches, or those layers of it that a stage has. */
template <class T> static enum status vit_forward(struct vit<T> *vit, uint32_t count, bool training)
{
    TRY(tokens_forward<T>(vit, count, training));
    TRY(blocks_forward<T>(vit, count, training));
    if (!vit->head)
        return STATUS_OK;
    const struct vit_head<T> head = head_of<T>(vit, count);
    return vit_head_forward<T>(vit->multiplier, &head, vit->class_norms, vit->logits, vit->stream);
}

/* ---- Backward pass ---- */

/* Makes stream `next` wait for the work on `stream` so far. */
static enum status follow(cudaStream_t stream, cudaEvent_t event, cudaStream_t next)
{
    CUDA_TRY(cudaEventRecord(event, stream));
    return CUDA_STATUS(cudaStreamWaitEvent(next, event, 0));
}

/* The next kernels of the side stream may read what the main stream has written so far. */
template <class T> static enum status fork_side(struct vit<T> *vit)
{
    return follow(vit->stream, vit->side.begin, vit->side.stream);
}

/* Enqueues the sums of the kernels so far on the side stream. */
template <class T> static enum status finish_sums(struct vit<T> *vit)
{
    TRY(fork_side<T>(vit));
    return vit_sums_finish(&vit->sums, vit->side.stream);
}

template <class T> static enum status join_side(struct vit<T> *vit)
{
    return follow(vit->side.stream, vit->side.block, vit->stream);
}

template <class T>
static vit_weights<T> weights_of(const struct vit<T> *vit, const struct layer *layer, uint32_t rows,
                                 uint32_t parts, const T *inputs, const T *deltas)
{
    return {linear_of(layer, rows), parts, deltas, inputs, vit->added + layer->weight};
}

template <class T>
static enum status inputs_backward(struct vit<T> *vit, const struct layer *layer, uint32_t rows,
                                   uint32_t spared, const T *deltas)
{
    const struct vit_linear linear = linear_of(layer, rows);
    return vit_linear_inputs<T>(vit->multiplier, &linear, spared, deltas, vit->parameters + layer->weight,
                                vit->in_deltas, vit->stream);
}

/* Returns the index of the first branch of block `i` in vit->deltas. */
template <class T> static enum branch attention_branch(const struct vit<T> *vit, uint32_t i)
{
    return vit->side.defers && i % 2 ? BRANCH_ATTENTION_ODD : BRANCH_ATTENTION;
}

/* Returns the gradients of a branch's outputs. `factors` are those of its stochastic depth, or NULL. */
template <class T> static T *branch_deltas(const struct vit<T> *vit, enum branch branch, const float *factors)
{
    return factors ? vit->branch_deltas[branch] : vit->deltas[branch];
}

/* Returns the gradients at a normalisation and at the sum that it normalises, which is the end of a `branch`.
 * `before` is the last layer of this branch, or NULL if there is no branch. `later` is the gradient of the
 * sum at the end of the next branch; NULL: there is none. */
template <class T>
static vit_norm_deltas<T> norm_deltas(const struct vit<T> *vit, const struct vit_norm<T> *norm,
                                      const struct layer *layer, enum branch branch,
                                      const struct layer *before, const T *later)
{
    return {.outputs = norm->first_tokens ? vit->class_deltas : vit->in_deltas,
            .later = later,
            .sums = vit->deltas[branch],
            .branch = norm->factors ? vit->branch_deltas[branch] : nullptr,
            .weight = vit->added + layer->weight,
            .bias = vit->added + layer->bias,
            .branch_bias = before ? vit->added + before->bias : nullptr};
}

/* Backward pass of a normalisation and of the sum that it normalises; see norm_deltas(). */
template <class T>
static enum status norm_backward(struct vit<T> *vit, const struct vit_norm<T> *norm,
                                 const struct layer *layer, enum branch branch, const struct layer *before,
                                 const T *later)
{
    const struct vit_norm_deltas<T> deltas = norm_deltas<T>(vit, norm, layer, branch, before, later);
    return vit_add_norm_backward<T>(norm, &deltas, &vit->sums, vit->stream);
}

/* The parts of the rows for gradients of weights: with these, all blocks of a launch work equally long. fc1
 * and fc2 have four tiles of weights each, and each part of a tile a block of its own. The layers before and
 * after attention have four tiles together, and half as many blocks as parts. */
#define HIDDEN_PARTS    (VIT_SIDE_BLOCKS / 12)
#define ATTENTION_PARTS (2 * HIDDEN_PARTS)
#define PATCH_PARTS     24

/* Sets `weights` to the gradients of the weights of the layers before and after attention of block `i`. */
template <class T>
static void attention_weights(const struct vit<T> *vit, uint32_t i, uint32_t rows,
                              struct vit_weights<T> weights[2])
{
    const struct vit_block<T> *block = &vit->blocks[i];
    const T *deltas = branch_deltas<T>(vit, attention_branch<T>(vit, i), block->factors1);
    const T *qkv_deltas = vit->qkv_deltas[vit->side.defers ? i % 2 : 0];
    weights[0] = weights_of<T>(vit, block->qkv, rows, ATTENTION_PARTS, block->saved.norms1, qkv_deltas);
    weights[1] = weights_of<T>(vit, block->proj, rows, ATTENTION_PARTS, block->saved.mixed, deltas);
}

/* Enqueues gradients of weights on the side stream. */
template <class T>
static enum status weights_backward(struct vit<T> *vit, const struct vit_weights<T> *weights, uint32_t count)
{
    TRY(fork_side<T>(vit));
    return vit_weights_backward<T>(vit->multiplier, weights, count, &vit->sums, vit->side.stream);
}

/* Backward pass of the second branch of block `i`: a normalisation, and two linear layers with a GELU between
 * them. All work that reads what this overwrites is complete: with deferred work, the main stream has waited
 * for side.hidden in block i + 1, with --checkpoint-activations for side.block; else, there is one stream. */
template <class T>
static enum status hidden_backward(struct vit<T> *vit, uint32_t i, const struct vit_mlp<T> *mlp,
                                   const struct vit_norm<T> *norm2)
{
    const struct vit_block<T> *block = &vit->blocks[i];
    const T *deltas = branch_deltas<T>(vit, BRANCH_HIDDEN, block->factors2);
    const uint32_t rows = mlp->first.rows;
    const bool deferred = vit->side.defers && i + 1 < vit->block_count;
    const struct vit_norm_deltas<T> norm = norm_deltas<T>(
        vit, norm2, block->norm2, attention_branch<T>(vit, i), block->proj, vit->deltas[BRANCH_HIDDEN]);
    TRY(vit_mlp_backward<T>(vit->multiplier, mlp, deltas, vit->hidden_deltas, vit->in_deltas, norm2, &norm,
                            vit->added + block->fc1->bias, &vit->sums, vit->stream));
    struct vit_weights<T> weights[VIT_WEIGHTS_MAX] = {
        weights_of<T>(vit, block->fc2, rows, HIDDEN_PARTS, mlp->active, deltas),
            weights_of<T>(vit, block->fc1, rows, HIDDEN_PARTS, mlp->inputs, vit->hidden_deltas)
    };
    if (deferred)
        attention_weights<T>(vit, i + 1, rows, weights + 2);
    TRY(weights_backward<T>(vit, weights, deferred ? 4 : 2));
    return CUDA_STATUS(cudaEventRecord(vit->side.hidden, vit->side.stream));
}

template <class T> static enum status attention_backward(struct vit<T> *vit, uint32_t i, uint32_t count)
{
    const struct vit_block<T> *block = &vit->blocks[i];
    const struct vit_attention<T> attention = attention_of<T>(vit, block, count);
    const uint32_t rows = count * attention.rows.tokens;
    T *qkv_deltas = vit->qkv_deltas[vit->side.defers ? i % 2 : 0];
    struct vit_weights<T> weights[2];
    TRY(inputs_backward<T>(vit, block->proj, rows, vit->spared,
                           branch_deltas<T>(vit, attention_branch<T>(vit, i), block->factors1)));
    TRY(vit_attention_backward<T>(&attention, vit->in_deltas, qkv_deltas, vit->added + block->qkv->bias,
                                  &vit->sums, vit->stream));
    attention_weights<T>(vit, i, rows, weights);
    if (!vit->side.defers || i == 0)
        TRY(weights_backward<T>(vit, weights, 2));
    return inputs_backward<T>(vit, block->qkv, rows, 0, qkv_deltas);
}

/* With --checkpoint-activations, all blocks share the saved arrays, so the forward pass of the block is
 * computed again. The last block is not computed again, because the arrays still have its results. */
template <class T> static enum status block_backward(struct vit<T> *vit, uint32_t i, uint32_t count)
{
    const struct vit_block<T> *block = &vit->blocks[i];
    const struct vit_norm<T> norm1 = norm1_of<T>(vit, i, count, true),
                             norm2 = norm2_of<T>(vit, i, count, true);
    const struct vit_mlp<T> mlp = mlp_of<T>(vit, block, count * norm1.rows.tokens);
    const bool again = i + 1 < vit->block_count; /* not the first block of the pass */
    if (vit->train->checkpoint_activations && again) {
        CUDA_TRY(cudaStreamWaitEvent(vit->stream, vit->side.block, 0));
        TRY(vit_add_norm<T>(&norm1, nullptr, nullptr, vit->stream));
        TRY(first_forward<T>(vit, i, count, true));
        TRY(vit_mlp_hidden<T>(vit->multiplier, &mlp, vit->stream));
    }
    TRY(hidden_backward<T>(vit, i, &mlp, &norm2));
    TRY(attention_backward<T>(vit, i, count));
    CUDA_TRY(cudaStreamWaitEvent(vit->stream, vit->side.hidden, 0));
    TRY(norm_backward<T>(vit, &norm1, block->norm1, BRANCH_HIDDEN, i > 0 ? block[-1].fc2 : nullptr,
                         vit->deltas[attention_branch<T>(vit, i)]));
    TRY(finish_sums<T>(vit));
    return CUDA_STATUS(cudaEventRecord(vit->side.block, vit->side.stream));
}

/* Backward pass of the last normalisation and the head. */
template <class T> static enum status head_backward(struct vit<T> *vit, uint32_t count)
{
    const struct vit_norm<T> norm = last_norm_of<T>(vit, count, true);
    const struct vit_head<T> head = head_of<T>(vit, count);
    TRY(vit_head_backward<T>(vit->multiplier, &head, vit->class_norms, vit->logit_deltas, vit->logit_rounded,
                             vit->class_deltas, vit->added + vit->head->weight, vit->added + vit->head->bias,
                             &vit->sums, vit->stream));
    TRY(norm_backward<T>(vit, &norm, vit->last_norm, BRANCH_HIDDEN, vit->blocks[vit->block_count - 1].fc2,
                         nullptr));
    return finish_sums<T>(vit);
}

/* Backward pass of the sum at the end of a stage without the head, whose gradient is in vit->deltas[0]. The
 * next stage has the normalisation of the sum. The kernel is that of norm_backward(), so the cuts do not
 * change the bits of the gradients. */
template <class T> static enum status sum_backward(struct vit<T> *vit, uint32_t count)
{
    const struct vit_norm<T> norm = last_norm_of<T>(vit, count, true);
    T *sums = vit->deltas[BRANCH_HIDDEN];
    const struct vit_norm_deltas<T> deltas = {
        .outputs = nullptr, .later = sums, .sums = sums,
        .branch = norm.factors ? vit->branch_deltas[BRANCH_HIDDEN] : nullptr, .weight = nullptr,
        .bias = nullptr, .branch_bias = vit->added + vit->blocks[vit->block_count - 1].fc2->bias
    };
    TRY(vit_add_norm_backward<T>(&norm, &deltas, &vit->sums, vit->stream));
    return finish_sums<T>(vit);
}

/* Backward pass of the first two layers: the patches and the tokens. */
template <class T> static enum status patches_backward(struct vit<T> *vit, uint32_t count)
{
    const struct vit_rows shape = rows_of<T>(vit, count);
    const uint32_t rows = count * (shape.tokens - 1);
    float *positions = vit->added + vit->token_layer->weight;
    TRY(vit_tokens_backward<T>(&shape, vit->deltas[BRANCH_HIDDEN], positions, vit->in_deltas, &vit->sums,
                               vit->stream));
    TRY(vit_column_sums<T>(vit->in_deltas, rows, shape.width, vit->added + vit->patch_layer->bias, &vit->sums,
                           vit->stream));
    if (vit->patch_layer->fp32)
        TRY(vit_widen<T>(vit->in_deltas, (size_t)rows * shape.width, vit->patch_outputs, vit->stream));
    TRY(fork_side<T>(vit));
    const struct vit_weights<T> weights =
        weights_of<T>(vit, vit->patch_layer, rows, PATCH_PARTS, vit->patches, vit->in_deltas);
    TRY(vit->patch_layer->fp32
            ? vit_linear_weights<float>(vit->multiplier, &weights.linear, vit->patch_outputs,
                                        vit->patch_inputs, weights.gradients, vit->side.stream)
            : vit_weights_backward<T>(vit->multiplier, &weights, 1, &vit->sums, vit->side.stream));
    TRY(vit_sums_finish(&vit->sums, vit->side.stream));
    /* The class token and the first position are added, so their gradients are equal. */
    return CUDA_STATUS(cudaMemcpyAsync(vit->added + vit->token_layer->bias, positions,
                                       shape.width * sizeof *positions, cudaMemcpyDeviceToDevice,
                                       vit->side.stream));
}

/* Computes and exchanges the gradients of a step that has only one part. A rank without samples in this step
 * contributes zeros. */
template <class T> static enum status backward_exchange(struct vit<T> *vit, uint32_t count)
{
    const struct model *model = vit->train->model;
    size_t end = model->arena_values;
    uint32_t layer = model->layer_count;
    if (count == 0)
        CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, end * sizeof *vit->gradients, vit->stream));
    else
        TRY(head_backward<T>(vit, count));
    TRY(fork_side<T>(vit)); /* the gradients so far, and the start of the capture */
    TRY(device_engine_exchange(vit, layer - 3, layer, &end, vit->side.stream));
    layer -= 3;
    for (uint32_t i = vit->block_count; i-- > 0;) {
        if (count > 0)
            TRY(block_backward<T>(vit, i, count));
        if (i + 1 == vit->block_count)
            continue;
        /* The gradients of block i + 1 are final: those that were deferred are complete, too. */
        TRY(device_engine_exchange(vit, layer - BLOCK_LAYERS, layer, &end, vit->side.stream));
        layer -= BLOCK_LAYERS;
    }
    if (count > 0)
        TRY(patches_backward<T>(vit, count));
    TRY(device_engine_exchange(vit, 0, layer, &end, vit->side.stream));
    TRY(join_side<T>(vit));
    return device_engine_exchange_end(vit);
}

/* Computes the gradients of one of several parts of a step, or of a micro-batch. */
template <class T> static enum status backward_part(struct vit<T> *vit, uint32_t count)
{
    TRY(vit->head ? head_backward<T>(vit, count) : sum_backward<T>(vit, count));
    for (uint32_t i = vit->block_count; i-- > 0;)
        TRY(block_backward<T>(vit, i, count));
    if (vit->patch_layer)
        TRY(patches_backward<T>(vit, count));
    return join_side<T>(vit);
}

/* Computes the gradients of `count` samples. The kernels overwrite vit->added. If the step has one part, also
 * exchanges the gradients. */
template <class T> static enum status vit_backward(struct vit<T> *vit, uint32_t count)
{
    return train_parts(vit->train) == 1 ? backward_exchange<T>(vit, count) : backward_part<T>(vit, count);
}

/* ---- Graphs ---- */

/* Captures the forward or the backward pass of `count` samples. The mode is relaxed, because cuBLASLt loads
 * its kernels when they are first used. */
template <class T>
static enum status record(struct vit<T> *vit, uint32_t count, bool back, cudaGraphExec_t *into)
{
    const bool training = !vit->train->forward_only;
    CUDA_TRY(cudaStreamBeginCapture(vit->stream, cudaStreamCaptureModeRelaxed));
    return capture_end(vit->stream, back ? vit_backward<T>(vit, count) : vit_forward<T>(vit, count, training),
                       into);
}

static void graphs_close(struct vit_graphs *graphs)
{
    destroy(graphs->forward, graphs->backward);
    *graphs = {};
}

/* Returns the graphs for `count` samples, and captures them if they do not exist. If all entries are in use,
 * replaces the last one. */
template <class T> static enum status graphs_for(struct vit<T> *vit, uint32_t count, struct vit_graphs **into)
{
    struct vit_graphs *graphs = vit->graphs, *last = vit->graphs + GRAPHS - 1;
    while (graphs < last && graphs->complete && graphs->count != count)
        graphs++;
    *into = graphs;
    if (graphs->complete && graphs->count == count)
        return STATUS_OK;
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    graphs_close(graphs);
    graphs->count = count;
    if (count > 0)
        TRY(record<T>(vit, count, false, &graphs->forward));
    if (!vit->train->forward_only)
        TRY(record<T>(vit, count, true, &graphs->backward));
    graphs->complete = true;
    return STATUS_OK;
}

template <class T> static enum status launch(struct vit<T> *vit, cudaGraphExec_t graph)
{
    RANGE(GRAPH);
    return CUDA_STATUS(cudaGraphLaunch(graph, vit->stream));
}

/* ---- Steps ---- */

/* Draws the factors of stochastic depth of the current batch. */
template <class T> static enum status draw_factors(struct vit<T> *vit, uint32_t epoch, uint32_t count)
{
    return vit->path_count > 0
               ? vit_factors(vit->paths, vit->path_count, vit->train->seed, epoch, vit->batch->numbers, count,
                             vit->capacity, vit->factors, vit->stream)
               : STATUS_OK;
}

template <class T>
static enum status gather(struct device_engine *engine, const struct device_set *set, uint32_t epoch,
                          bool training, uint32_t count)
{
    struct vit<T> *vit = vit_of<T>(engine);
    TRY(vit_patches<T>(vit->train->data, set, vit->batch, count, vit->patch, vit->patches, vit->stream));
    return training ? draw_factors<T>(vit, epoch, count) : STATUS_OK;
}

/* Computes the gradients of a part of a step; see vit_backward(). */
template <class T>
static enum status compute_part(struct vit<T> *vit, uint64_t number, const struct share *part)
{
    struct pass pass = {};
    struct vit_graphs *graphs;
    pass.stream = vit->stream;
    pass.count = (uint32_t)part->count;
    pass.total = (uint32_t)part->total;
    TRY(graphs_for<T>(vit, pass.count, &graphs));
    if (pass.count > 0) {
        TRY(launch<T>(vit, graphs->forward));
        TRY(loss_take(vit->train, vit->logits, vit->batch, &pass, number, vit->logit_deltas, &vit->losses));
    }
    return launch<T>(vit, graphs->backward);
}

/* Computes the gradients of one of several parts of a step, and adds them to those of the parts before it. */
template <class T>
static enum status add_part(struct vit<T> *vit, uint64_t number, const struct share *part, bool first)
{
    const size_t values = vit->train->model->arena_values, bytes = values * sizeof *vit->gradients;
    if (part->count == 0) { /* only part 0 can be empty here */
        CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, bytes, vit->stream));
        return STATUS_OK;
    }
    TRY(compute_part<T>(vit, number, part));
    if (first)
        return arena_copy(vit->train, vit->gradients, vit->added, vit->stream);
    return values_add(vit->added, values, vit->gradients, vit->stream);
}

template <class T>
static enum status learn_part(struct device_engine *engine, uint32_t epoch, uint32_t step,
                              const struct share *part, uint32_t index)
{
    struct vit<T> *vit = vit_of<T>(engine);
    const uint64_t number = (uint64_t)epoch * train_steps(vit->train) + step;
    return train_parts(vit->train) == 1 ? compute_part<T>(vit, number, part)
                                        : add_part<T>(vit, number, part, index == 0);
}

template <class T>
static enum status infer(struct device_engine *engine, uint32_t count, const float **logits)
{
    struct vit<T> *vit = vit_of<T>(engine);
    struct vit_graphs *graphs;
    *logits = vit->logits;
    if (!vit->train->forward_only) /* the graphs are those of training, with stochastic depth */
        return vit_forward<T>(vit, count, false);
    TRY(graphs_for<T>(vit, count, &graphs));
    return launch<T>(vit, graphs->forward);
}

/* ---- A stage of a pipeline ---- */

/* Returns the size of the tokens of `count` samples. */
template <class T> static size_t tokens_bytes(const struct vit<T> *vit, uint32_t count)
{
    const struct vit_rows rows = rows_of<T>(vit, count);
    return (size_t)rows.samples * rows.tokens * rows.width * sizeof(T);
}

template <class T>
static enum status stage_forward(void *state, const struct micro *micro, const void *inputs, void *outputs)
{
    struct vit<T> *vit = vit_at<T>(state);
    struct pass pass = {.stream = vit->stream, .count = micro->count, .total = micro->total};
    CUDA_TRY(cudaSetDevice(vit->device));
    choose_slot<T>(vit, micro->slot);
    TRY(device_stage_take(vit, micro));
    vit->slots[micro->slot] = *vit; /* with the mix of its samples */
    if (inputs) {
        TRY(device_stage_copy(vit, vit->blocks[0].sums1, inputs, tokens_bytes<T>(vit, micro->count)));
        if (micro->training)
            TRY(draw_factors<T>(vit, micro->epoch, micro->count));
    }
    TRY(vit_forward<T>(vit, micro->count, micro->training));
    if (outputs && vit->head)
        TRY(device_stage_copy(vit, outputs, vit->logits,
                              micro->count * vit->train->model->classes * sizeof *vit->logits));
    else if (outputs)
        TRY(device_stage_copy(vit, outputs, vit->sums_out, tokens_bytes<T>(vit, micro->count)));
    else
        TRY(loss_take(vit->train, vit->logits, vit->batch, &pass, micro->step, vit->logit_deltas,
                      &vit->losses));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

/* The kernels overwrite vit->added. */
template <class T>
static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of,
                                  const void *deltas, void *in_deltas)
{
    struct vit<T> *vit = vit_at<T>(state);
    CUDA_TRY(cudaSetDevice(vit->device));
    choose_slot<T>(vit, micro->slot);
    if (deltas)
        TRY(device_stage_copy(vit, vit->deltas[BRANCH_HIDDEN], deltas, tokens_bytes<T>(vit, micro->count)));
    TRY(backward_part<T>(vit, micro->count));
    TRY(micro->index == 0
            ? arena_copy(vit->train, vit->gradients, vit->added, vit->stream)
            : values_add(vit->added, vit->train->model->arena_values, vit->gradients, vit->stream));
    if (in_deltas)
        TRY(device_stage_copy(vit, in_deltas, vit->deltas[BRANCH_HIDDEN],
                              tokens_bytes<T>(vit, micro->count)));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

template <class T>
static constexpr struct stage_functions stages = device_stage_functions(sizeof(T), stage_forward<T>,
                                                                        stage_backward<T>);

/* ---- The engine ---- */

template <class T>
static enum status vit_open(const struct train *train, const struct resources *resources, void **state)
{
    static const struct device_engine_functions functions = {
        .gather = gather<T>, .learn_part = learn_part<T>, .update = device_engine_update, .infer = infer<T>};
    TRY(device_engine_new<struct vit<T>>(train, resources, &functions, state));
    return vit_open_all<T>(vit_at<T>(*state));
}

template <class T> static void vit_close(void *state)
{
    struct vit<T> *vit = vit_at<T>(state);
    device_engine_stop(vit);
    if (vit->side.stream) /* a failed stage of a pipeline may not have joined it */
        (void)cudaStreamSynchronize(vit->side.stream);
    for (struct vit_graphs &graphs : vit->graphs)
        graphs_close(&graphs);
    vit_multiplier_close(vit->multiplier);
    side_close<T>(vit);
    device_engine_close(vit);
    free(vit->slots);
    free(vit);
}

template <class T> static enum status vit_set(void *state, const struct train_state *from)
{
    struct vit<T> *vit = vit_at<T>(state);
    TRY(device_engine_set(state, from));
    TRY(vit_round<T>(vit->state.parameters, vit->train->model->arena_values, vit->parameters, vit->stream));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

/* Normalisations, positions and the class token are always in fp32; their results are rounded. */
static enum fp32_layer keeps_fp32(const struct layer *layer)
{
    switch (layer->spec.kind) {
    case LAYER_PATCHES:
    case LAYER_LINEAR:
        return FP32_CHOSEN;
    case LAYER_TOKENS:
    case LAYER_NORM:
        return FP32_ALWAYS;
    default:
        return FP32_NEVER;
    }
}

template <class T>
static constexpr struct engine engine_of(const char *name, const struct engine_bounds &bounds)
{
    struct engine engine = device_engine_table(name, bounds, std::is_same<T, fp16>::value);
    engine.recomputes = true;
    engine.gradients_in = GRADIENTS_IN_GRAPH;
    engine.unit = UNIT_HALF;
    engine.accepts = vit_accepts;
    engine.keeps_fp32 = keeps_fp32;
    engine.stages = &stages<T>;
    engine.open = vit_open<T>;
    engine.close = vit_close<T>;
    engine.set = vit_set<T>;
    return engine;
}

/* bf16 has 8 significant bits. docs/notes/engines.md explains these bounds and which faults exceed them. fp16
 * has as many significant bits as TF32. */
extern "C" {
const struct engine engine_vit =
    engine_of<bf16>("vit", {.loss = 2e-2, .floor = 1, .drift = 0.3, .logits = 4e-2});
const struct engine engine_vit_amp = engine_of<fp16>("vit-amp", ENGINE_BOUNDS_TF32);
}

/* ---- Variants ---- */

static enum status probe_vit(const struct resources *resources)
{
    TRY(vit_multiplier_probe());
    return device_probe(resources->device);
}

extern "C" {
extern const struct variant variant_train_vit, variant_train_vit_amp, variant_infer_vit;
const struct variant variant_train_vit = training_by<&engine_vit>(false, probe_vit);
const struct variant variant_train_vit_amp = training_by<&engine_vit_amp>(false, probe_vit);
const struct variant variant_infer_vit = inferring_by<&engine_vit>(false, probe_vit);
}
