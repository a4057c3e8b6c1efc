/* The engine of `train-vit` and `infer-vit`. One buffer holds all activations; arrange() divides it. A step
 * gathers its samples, replays the CUDA graph of the forward pass, computes the loss, replays the graph of
 * the backward pass, and updates the parameters. There are graphs for each number of samples, for example for
 * the short last batch of an epoch. */
#include "train/vit/engine.cuh"

#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "train/augment.cuh"
#include "train/clip.cuh"
#include "train/exchange_pieces.h"
#include "train/feed.cuh"
#include "train/shared_update.cuh"
#include "train/progress.cuh"
#include "train/vit/kernels.cuh"

#define BLOCK_LAYERS 12 /* layers of a block in the model's table */
#define BLOCKS_MAX   ((MODEL_LAYERS_MAX - 5) / BLOCK_LAYERS)
#define GRAPHS       4     /* a step of several parts has two numbers of samples, and so has the last step */
#define SAMPLES_MAX  32767 /* of a batch: two blocks per sample along an axis of the grid */
#define PIECE_BYTES  256   /* alignment in the buffer of activations */

/* What the forward pass of a block saves: the inputs of its layers, and what vit_attention() and the
 * normalisations save. `qkv` has the queries, keys and values. */
struct saved {
    bf16 *norms1, *qkv, *mixed, *sums2, *norms2, *hidden, *active;
    struct vit_moments *moments1, *moments2;
    float *logs;
};

struct block {
    const struct layer *norm1, *qkv, *proj, *norm2, *fc1, *fc2;
    const float *factors1, *factors2; /* of stochastic depth, per sample; NULL: 1 */
    bf16 *sums1;                      /* the input of the block */
    struct saved saved;
};

/* A step's work for `count` samples. */
struct graphs {
    uint32_t count;
    cudaGraphExec_t forward, backward;
};

struct vit {
    const struct train *train;
    int device, threads; /* threads: of the host, for live samples that the host draws */
    uint32_t capacity;   /* maximum number of samples of a batch */
    cudaStream_t stream;
    struct allocations allocations;
    struct vit_multiplier *multiplier;

    const struct layer *patch_layer, *token_layer, *last_norm, *head;
    struct block blocks[BLOCKS_MAX];
    uint32_t block_count, patch; /* `patch`: pixels of a patch along an axis */
    uint32_t heads, logit_apart; /* distance between rows of logit_rounded */

    struct train_state state; /* device memory */
    bf16 *parameters;         /* rounded */
    /* `added`: what the backward pass writes. It is `gradients` unless a step has several parts. */
    float *gradients, *added, *partial;
    struct tensor_update *groups;  /* how to update VIT_GROUP_VALUES parameters each */
    struct device_clip *clip;      /* NULL: gradients are not clipped */
    struct exchange_update shared; /* for an exchange that updates the parameters */

    struct vit_path *paths; /* device memory: the layers of stochastic depth */
    uint32_t path_count;
    float *factors; /* (layer, sample) */

    /* Activations besides those of the blocks. `branch` has the outputs of a branch, or of the patches. */
    bf16 *patches, *branch, *class_sums, *class_norms;
    struct vit_moments *class_moments;
    float *logits;
    /* Gradients: of the sums, of a branch, of (q, k, v) or hidden values, and of the inputs of linear
     * layers. */
    bf16 *deltas, *branch_deltas, *wide_deltas, *in_deltas, *class_deltas, *logit_rounded;
    float *logit_deltas;

    struct device_set sets[DATA_PARTS];
    struct device_batch batch;
    struct device_feed feed;
    struct device_augment augment;
    struct device_losses losses;
    struct device_progress progress;
    struct graphs graphs[GRAPHS];
    cudaEvent_t gather_begin, gather_end; /* around the gather of the middle step of a call of steps() */
    uint64_t steps;                       /* since the last totals() */
};

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

/* Returns whether the model is: patches, tokens, blocks, the first token, norm, head. */
static bool is_vit(const struct model *model)
{
    const struct layer *layers = model->layers;
    const uint32_t count = model->layer_count;
    if (count < 5 + BLOCK_LAYERS || (count - 5) % BLOCK_LAYERS || layers[0].spec.kind != LAYER_PATCHES ||
        layers[1].spec.kind != LAYER_TOKENS || layers[count - 3].spec.kind != LAYER_SELECT ||
        layers[count - 2].spec.kind != LAYER_NORM || layers[count - 1].spec.kind != LAYER_LINEAR)
        return false;
    for (uint32_t i = 2; i + 3 < count; i += BLOCK_LAYERS)
        if (!is_block(&layers[i]))
            return false;
    return true;
}

/* Whether the kernels support these sizes: they read 8 values at a time. */
static bool has_sizes(const struct model *model)
{
    const struct layer *patches = &model->layers[0], *attention = &model->layers[4];
    const uint32_t width = attention->out.width, depth = width / attention->spec.heads;
    const uint32_t taps = patches->spec.kernel[1] * patches->spec.kernel[2] * patches->in.channels;
    return width <= VIT_WIDTH_MAX && width % 8 == 0 && taps % 8 == 0 &&
           patches->spec.kernel[1] == patches->spec.kernel[2] && (depth == 16 || depth == 32 || depth == 64);
}

static enum status vit_accepts(const struct train *train)
{
    const struct model *model = train->model;
    if (!is_vit(model))
        return status_set(
            STATUS_USAGE,
            "it supports only vision transformers (vit-micro, vit-tiny, vit-small, vit-base), but "
            "this is %s; use %s",
            model->name, train->forward_only ? "infer-cuda" : "train-cuda");
    if (!has_sizes(model))
        return status_set(
            STATUS_USAGE,
            "it supports only widths up to %d and heads of 16, 32 or 64 values, with patches of "
            "a multiple of 8 values; use train-omp",
            VIT_WIDTH_MAX);
    if (train_part_max(train) > SAMPLES_MAX)
        return status_set(STATUS_USAGE,
                          "it supports at most %d samples per GPU at a time; lower --batch, or raise "
                          "--accumulate",
                          SAMPLES_MAX);
    return STATUS_OK;
}

/* ---- Memory ---- */

static struct vit_rows rows_of(const struct vit *vit, uint32_t count)
{
    return {count, vit->token_layer->out.channels, vit->token_layer->out.width};
}

/* Divides a buffer into arrays. Without a buffer, only measures. */
struct pieces {
    char *buffer;
    size_t used;
};

template <class T> static void take(struct pieces *pieces, T **array, size_t count)
{
    *array = pieces->buffer ? reinterpret_cast<T *>(pieces->buffer + pieces->used) : nullptr;
    pieces->used += (count * sizeof(T) + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
}

static uint32_t hidden_width(const struct vit *vit)
{
    return vit->blocks[0].fc1->out.width;
}

static void arrange_saved(const struct vit *vit, struct pieces *pieces, struct saved *saved)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens, values = rows * shape.width;
    take(pieces, &saved->norms1, values);
    take(pieces, &saved->qkv, 3 * values);
    take(pieces, &saved->mixed, values);
    take(pieces, &saved->sums2, values);
    take(pieces, &saved->norms2, values);
    take(pieces, &saved->hidden, rows * hidden_width(vit));
    take(pieces, &saved->active, rows * hidden_width(vit));
    take(pieces, &saved->moments1, rows);
    take(pieces, &saved->moments2, rows);
    take(pieces, &saved->logs, rows * vit->heads);
}

/* All blocks share the saved arrays of the first block if the backward pass computes the forward pass of each
 * block again, or if there is no backward pass. Without a backward pass, two arrays take turns as the inputs
 * of the blocks. */
static void arrange_blocks(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const bool shared = vit->train->forward_only || vit->train->checkpoint_activations;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        struct block *block = &vit->blocks[i];
        if (vit->train->forward_only && i > 1)
            block->sums1 = block[-2].sums1;
        else
            take(pieces, &block->sums1, (size_t)shape.samples * shape.tokens * shape.width);
        if (shared && i > 0)
            block->saved = block[-1].saved;
        else
            arrange_saved(vit, pieces, &block->saved);
    }
}

static void arrange_deltas(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens, values = rows * shape.width;
    const uint32_t hidden = hidden_width(vit), wide = hidden > 3 * shape.width ? hidden : 3 * shape.width;
    take(pieces, &vit->deltas, values);
    take(pieces, &vit->in_deltas, values);
    take(pieces, &vit->wide_deltas, rows * wide);
    if (vit->path_count > 0)
        take(pieces, &vit->branch_deltas, values);
    take(pieces, &vit->class_deltas, (size_t)shape.samples * shape.width);
    take(pieces, &vit->logit_deltas, (size_t)shape.samples * vit->train->model->classes);
    take(pieces, &vit->logit_rounded, (size_t)shape.samples * vit->logit_apart);
}

/* Divides the buffer of activations and their gradients. */
static void arrange(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t samples = shape.samples;
    arrange_blocks(vit, pieces);
    take(pieces, &vit->patches, samples * vit->train->model->input_values);
    take(pieces, &vit->branch, samples * shape.tokens * shape.width);
    take(pieces, &vit->class_sums, samples * shape.width);
    take(pieces, &vit->class_norms, samples * shape.width);
    take(pieces, &vit->class_moments, samples);
    take(pieces, &vit->logits, samples * vit->train->model->classes);
    if (!vit->train->forward_only)
        arrange_deltas(vit, pieces);
}

static enum status open_activations(struct vit *vit)
{
    struct pieces pieces = {nullptr, 0};
    arrange(vit, &pieces);
    TRY(allocate(&vit->allocations, &pieces.buffer, pieces.used));
    pieces.used = 0;
    arrange(vit, &pieces);
    return STATUS_OK;
}

/* ---- Opening ---- */

static void find_layers(struct vit *vit)
{
    const struct model *model = vit->train->model;
    vit->patch_layer = &model->layers[0];
    vit->token_layer = &model->layers[1];
    vit->last_norm = &model->layers[model->layer_count - 2];
    vit->head = &model->layers[model->layer_count - 1];
    vit->block_count = (model->layer_count - 5) / BLOCK_LAYERS;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct layer *layers = &model->layers[2 + i * BLOCK_LAYERS];
        vit->blocks[i].norm1 = &layers[0];
        vit->blocks[i].qkv = &layers[1];
        vit->blocks[i].proj = &layers[3];
        vit->blocks[i].norm2 = &layers[6];
        vit->blocks[i].fc1 = &layers[7];
        vit->blocks[i].fc2 = &layers[9];
    }
    vit->patch = vit->patch_layer->spec.kernel[1];
    vit->heads = model->layers[4].spec.heads;
    vit->logit_apart = (model->classes + 7) / 8 * 8;
}

/* Adds a layer of stochastic depth to `paths`, unless it drops nothing. Returns where its factors will be. */
static const float *add_path(struct vit *vit, const struct layer *layer, struct vit_path *paths)
{
    if (layer->spec.rate == 0)
        return nullptr;
    paths[vit->path_count] = {layer->number, layer->spec.rate};
    return vit->factors + (size_t)vit->path_count++ * vit->capacity;
}

static enum status open_paths(struct vit *vit)
{
    struct vit_path paths[2 * BLOCKS_MAX];
    if (vit->train->forward_only)
        return STATUS_OK;
    TRY(allocate(&vit->allocations, &vit->factors, (size_t)2 * vit->block_count * vit->capacity));
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct layer *layers = &vit->train->model->layers[2 + i * BLOCK_LAYERS];
        vit->blocks[i].factors1 = add_path(vit, &layers[4], paths);
        vit->blocks[i].factors2 = add_path(vit, &layers[10], paths);
    }
    return vit->path_count == 0 ? STATUS_OK
                                : allocate_copy(&vit->allocations, &vit->paths, paths,
                                                vit->path_count * sizeof *paths, vit->stream);
}

/* Writes how to update the parameters: an entry per VIT_GROUP_VALUES values, because tensors begin at
 * multiples of this number. */
static enum status open_groups(struct vit *vit)
{
    const struct model *model = vit->train->model;
    const size_t entries = model->arena_values / VIT_GROUP_VALUES, bytes = entries * sizeof *vit->groups;
    struct tensor_update *groups = static_cast<struct tensor_update *>(calloc(1, bytes));
    if (!groups)
        return status_set(STATUS_FAILED, "vit: out of memory");
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const struct model_tensor *tensor = &model->tensors[i];
        const size_t end = (tensor->first + tensor->values + VIT_GROUP_VALUES - 1) / VIT_GROUP_VALUES;
        for (size_t entry = tensor->first / VIT_GROUP_VALUES; entry < end; entry++)
            groups[entry] = train_update_of(vit->train, tensor);
    }
    enum status status = allocate_copy(&vit->allocations, &vit->groups, groups, bytes, vit->stream);
    if (status == STATUS_OK)
        status = cuda_status(cudaStreamSynchronize(vit->stream), "cudaStreamSynchronize", __FILE__, __LINE__);
    free(groups);
    return status;
}

/* Returns the largest number of partial sums of a kernel. */
static size_t partial_values(const struct vit *vit)
{
    const struct vit_rows rows = rows_of(vit, vit->capacity);
    const size_t hidden = hidden_width(vit), classes = vit->train->model->classes;
    const size_t columns = hidden > 3 * rows.width ? hidden : 3 * rows.width; /* norms have three sums */
    const size_t tokens = (size_t)rows.tokens * rows.width, samples = tokens > classes ? tokens : classes;
    const size_t by_row = VIT_PARTS * columns, by_sample = VIT_SAMPLE_PARTS * samples;
    return by_row > by_sample ? by_row : by_sample;
}

static enum status open_learning(struct vit *vit)
{
    const struct model *model = vit->train->model;
    TRY(moments_open(vit->train, &vit->state, &vit->allocations, vit->stream));
    TRY(allocate_zeros(&vit->allocations, &vit->gradients, model->arena_values, vit->stream));
    vit->added = vit->gradients;
    if (train_parts(vit->train) > 1)
        TRY(allocate_zeros(&vit->allocations, &vit->added, model->arena_values, vit->stream));
    TRY(allocate(&vit->allocations, &vit->partial, partial_values(vit)));
    TRY(allocate(&vit->allocations, &vit->losses.losses, vit->capacity));
    TRY(allocate(&vit->allocations, &vit->losses.right, vit->capacity));
    TRY(allocate(&vit->allocations, &vit->losses.totals, 1));
    TRY(open_groups(vit));
    if (train_averages(vit->train))
        TRY(allocate(&vit->allocations, &vit->state.ema, model->arena_values));
    TRY(clip_open(vit->train, &vit->allocations, &vit->clip));
    vit->shared = {.gradients = vit->gradients,
                   .parameters = vit->state.parameters,
                   .m = vit->state.m,
                   .v = vit->state.v,
                   .rounded = vit->parameters,
                   .groups = vit->groups};
    TRY(shared_update_open(vit->train, &vit->allocations, &vit->shared));
    TRY(device_progress_open(&vit->progress));
    return totals_clear(vit->losses.totals, vit->stream);
}

static enum status open_all(struct vit *vit)
{
    const struct train *train = vit->train;
    TRY(device_probe(vit->device));
    TRY(vit_accepts(train));
    find_layers(vit);
    CUDA_TRY(cudaSetDevice(vit->device));
    CUDA_TRY(cudaStreamCreateWithFlags(&vit->stream, cudaStreamNonBlocking));
    CUDA_TRY(cudaEventCreate(&vit->gather_begin));
    CUDA_TRY(cudaEventCreate(&vit->gather_end));
    TRY(vit_multiplier_open(&vit->allocations, &vit->multiplier));
    TRY(open_paths(vit));
    TRY(open_activations(vit));
    TRY(allocate_zeros(&vit->allocations, &vit->state.parameters, train->model->arena_values, vit->stream));
    TRY(allocate(&vit->allocations, &vit->parameters, train->model->arena_values));
    TRY(device_batch_allocate(train, vit->capacity, &vit->batch, &vit->allocations));
    TRY(device_sets_open(train, vit->sets, &vit->allocations, vit->stream));
    const struct resources resources = {.threads = vit->threads, .device = vit->device};
    TRY(device_feed_open(&vit->feed, train, &resources, &vit->allocations));
    TRY(device_augment_open(train, &vit->allocations, &vit->augment));
    if (!train->forward_only)
        TRY(open_learning(vit));
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    return STATUS_OK;
}

static void graphs_close(struct graphs *graphs)
{
    for (cudaGraphExec_t each : {graphs->forward, graphs->backward})
        if (each)
            (void)cudaGraphExecDestroy(each);
    *graphs = {};
}

static void vit_close(void *state)
{
    struct vit *vit = static_cast<struct vit *>(state);
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    (void)cudaSetDevice(vit->device);
    if (vit->stream)
        (void)cudaStreamSynchronize(vit->stream);
    for (struct graphs &graphs : vit->graphs)
        graphs_close(&graphs);
    device_feed_close(&vit->feed);
    device_progress_close(&vit->progress);
    vit_multiplier_close(vit->multiplier);
    allocations_free(&vit->allocations);
    for (cudaEvent_t event : {vit->gather_begin, vit->gather_end})
        if (event)
            (void)cudaEventDestroy(event);
    if (vit->stream)
        (void)cudaStreamDestroy(vit->stream);
    free(vit);
}

static enum status vit_open(const struct train *train, const struct resources *resources, void **state)
{
    struct vit *vit = static_cast<struct vit *>(calloc(1, sizeof *vit));
    *state = vit;
    if (!vit)
        return status_set(STATUS_FAILED, "vit: out of memory");
    vit->train = train;
    vit->device = resources->device;
    vit->threads = resources->threads;
    vit->capacity = train_part_max(train);
    return open_all(vit);
}

/* ---- Copying the state ---- */

static enum status vit_set(void *state, const struct train_state *from)
{
    struct vit *vit = static_cast<struct vit *>(state);
    CUDA_TRY(cudaSetDevice(vit->device));
    TRY(state_set(vit->train, &vit->state, from, vit->stream));
    TRY(vit_round(vit->state.parameters, vit->train->model->arena_values, vit->parameters, vit->stream));
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    return STATUS_OK;
}

static enum status vit_get(void *state, struct train_state *into)
{
    struct vit *vit = static_cast<struct vit *>(state);
    CUDA_TRY(cudaSetDevice(vit->device));
    return state_get(vit->train, into, &vit->state, vit->stream);
}

static enum status vit_gradients(void *state, float *gradients)
{
    struct vit *vit = static_cast<struct vit *>(state);
    CUDA_TRY(cudaSetDevice(vit->device));
    TRY(arena_copy(vit->train, gradients, vit->gradients, vit->stream));
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    return STATUS_OK;
}

/* ---- Linear layers ---- */

/* The product of a layer that computes each of `rows` rows. */
static struct vit_linear linear_of(const struct layer *layer, uint32_t rows)
{
    const uint32_t out = (uint32_t)layer->bias_values, in = (uint32_t)(layer->weight_values / out);
    return {rows, in, out, out};
}

static enum status linear_forward(struct vit *vit, const struct layer *layer, uint32_t rows,
                                  const bf16 *inputs, bf16 *outputs)
{
    const struct vit_linear linear = linear_of(layer, rows);
    return vit_linear_forward(vit->multiplier, &linear, false, inputs, vit->parameters + layer->weight,
                              vit->parameters + layer->bias, outputs, vit->stream);
}

/* Computes the gradients of a layer's weights and inputs. */
static enum status linear_backward(struct vit *vit, const struct layer *layer, uint32_t rows,
                                   const bf16 *inputs, const bf16 *deltas, bf16 *in_deltas)
{
    struct vit_linear linear = linear_of(layer, rows);
    if (layer == vit->head)
        linear.apart = vit->logit_apart;
    TRY(vit_linear_weights(vit->multiplier, &linear, deltas, inputs, vit->added + layer->weight,
                           vit->stream));
    return in_deltas ? vit_linear_inputs(vit->multiplier, &linear, deltas, vit->parameters + layer->weight,
                                         in_deltas, vit->stream)
                     : STATUS_OK;
}

/* ---- Forward ---- */

static struct vit_norm norm_of(const struct vit *vit, const struct layer *layer, uint32_t count,
                               const float *factors, bf16 *sums, bf16 *outputs, struct vit_moments *moments)
{
    return {.rows = rows_of(vit, count),
            .first_tokens = false,
            .factors = factors,
            .weight = vit->state.parameters + layer->weight,
            .bias = vit->state.parameters + layer->bias,
            .sums = sums,
            .outputs = outputs,
            .moments = moments};
}

/* The normalisations of a block, and the last one, each with the factors of the branch before it. */
static struct vit_norm norm1_of(const struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct block *block = &vit->blocks[i];
    return norm_of(vit, block->norm1, count, training && i > 0 ? block[-1].factors2 : nullptr, block->sums1,
                   block->saved.norms1, block->saved.moments1);
}

static struct vit_norm norm2_of(const struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct block *block = &vit->blocks[i];
    return norm_of(vit, block->norm2, count, training ? block->factors1 : nullptr, block->saved.sums2,
                   block->saved.norms2, block->saved.moments2);
}

static struct vit_norm last_norm_of(const struct vit *vit, uint32_t count, bool training)
{
    const struct block *last = &vit->blocks[vit->block_count - 1];
    struct vit_norm norm = norm_of(vit, vit->last_norm, count, training ? last->factors2 : nullptr,
                                   vit->class_sums, vit->class_norms, vit->class_moments);
    norm.first_tokens = true;
    return norm;
}

/* Computes a block up to the end of its second branch, from its normalised input. */
static enum status block_forward(struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct block *block = &vit->blocks[i];
    const struct saved *saved = &block->saved;
    const struct vit_rows shape = rows_of(vit, count);
    const struct vit_norm norm2 = norm2_of(vit, i, count, training);
    const uint32_t rows = count * shape.tokens;
    TRY(linear_forward(vit, block->qkv, rows, saved->norms1, saved->qkv));
    TRY(vit_attention(&shape, vit->heads, saved->qkv, saved->mixed, saved->logs, vit->stream));
    TRY(linear_forward(vit, block->proj, rows, saved->mixed, vit->branch));
    TRY(vit_add_norm(&norm2, block->sums1, vit->branch, vit->stream));
    TRY(linear_forward(vit, block->fc1, rows, saved->norms2, saved->hidden));
    TRY(vit_gelu(saved->hidden, (size_t)rows * hidden_width(vit), saved->active, vit->stream));
    return linear_forward(vit, block->fc2, rows, saved->active, vit->branch);
}

/* Computes the logits of the patches. */
static enum status forward(struct vit *vit, uint32_t count, bool training)
{
    const float *parameters = vit->state.parameters;
    const struct vit_norm first = norm1_of(vit, 0, count, training);
    const uint32_t patches = first.rows.tokens - 1;
    TRY(linear_forward(vit, vit->patch_layer, count * patches, vit->patches, vit->branch));
    TRY(vit_tokens_norm(&first, vit->branch, parameters + vit->token_layer->bias,
                        parameters + vit->token_layer->weight, vit->stream));
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct vit_norm next = i + 1 < vit->block_count ? norm1_of(vit, i + 1, count, training)
                                                              : last_norm_of(vit, count, training);
        TRY(block_forward(vit, i, count, training));
        TRY(vit_add_norm(&next, vit->blocks[i].saved.sums2, vit->branch, vit->stream));
    }
    const struct vit_linear head = linear_of(vit->head, count);
    return vit_linear_forward(vit->multiplier, &head, true, vit->class_norms,
                              vit->parameters + vit->head->weight, parameters + vit->head->bias, vit->logits,
                              vit->stream);
}

/* ---- Backward ---- */

/* The gradients of the outputs of a branch with these factors. */
static bf16 *branch_deltas(const struct vit *vit, const float *factors)
{
    return factors ? vit->branch_deltas : vit->deltas;
}

/* Backward pass of a normalisation and of the sum before it. `before` is the last layer of the branch before
 * it, or NULL. Adds the gradient of the normalisation's input to vit->deltas, unless this is the last
 * normalisation, which sets vit->deltas. */
static enum status norm_backward(struct vit *vit, const struct vit_norm *norm, const struct layer *layer,
                                 const struct layer *before)
{
    const struct vit_norm_deltas deltas = {.outputs = norm->first_tokens ? vit->class_deltas : vit->in_deltas,
                                           .later = norm->first_tokens ? nullptr : vit->deltas,
                                           .sums = vit->deltas,
                                           .branch = norm->factors ? vit->branch_deltas : nullptr,
                                           .weight = vit->added + layer->weight,
                                           .bias = vit->added + layer->bias,
                                           .branch_bias = before ? vit->added + before->bias : nullptr};
    return vit_add_norm_backward(norm, &deltas, vit->partial, vit->stream);
}

/* The two linear layers. */
static enum status hidden_backward(struct vit *vit, const struct block *block, uint32_t rows)
{
    const struct saved *saved = &block->saved;
    TRY(linear_backward(vit, block->fc2, rows, saved->active, branch_deltas(vit, block->factors2),
                        vit->wide_deltas));
    TRY(vit_gelu_backward(saved->hidden, rows, hidden_width(vit), vit->wide_deltas,
                          vit->added + block->fc1->bias, vit->partial, vit->stream));
    return linear_backward(vit, block->fc1, rows, saved->norms2, vit->wide_deltas, vit->in_deltas);
}

static enum status attention_backward(struct vit *vit, const struct block *block, uint32_t count)
{
    const struct saved *saved = &block->saved;
    const struct vit_rows shape = rows_of(vit, count);
    const uint32_t rows = count * shape.tokens;
    TRY(linear_backward(vit, block->proj, rows, saved->mixed, branch_deltas(vit, block->factors1),
                        vit->in_deltas));
    TRY(vit_attention_backward(&shape, vit->heads, saved->qkv, saved->mixed, saved->logs, vit->in_deltas,
                               vit->wide_deltas, vit->stream));
    TRY(vit_column_sums(vit->wide_deltas, rows, 3 * shape.width, vit->added + block->qkv->bias, vit->partial,
                        vit->stream));
    return linear_backward(vit, block->qkv, rows, saved->norms1, vit->wide_deltas, vit->in_deltas);
}

/* With --checkpoint-activations, computes the forward pass of the block again. The arrays still have the
 * results of the last block. */
static enum status block_backward(struct vit *vit, uint32_t i, uint32_t count)
{
    const struct block *block = &vit->blocks[i];
    const struct vit_norm norm1 = norm1_of(vit, i, count, true), norm2 = norm2_of(vit, i, count, true);
    if (vit->train->checkpoint_activations && i + 1 < vit->block_count) {
        TRY(vit_add_norm(&norm1, nullptr, nullptr, vit->stream));
        TRY(block_forward(vit, i, count, true));
    }
    TRY(hidden_backward(vit, block, count * norm1.rows.tokens));
    TRY(norm_backward(vit, &norm2, block->norm2, block->proj));
    TRY(attention_backward(vit, block, count));
    return norm_backward(vit, &norm1, block->norm1, i > 0 ? block[-1].fc2 : nullptr);
}

/* The last normalisation and the head. */
static enum status head_backward(struct vit *vit, uint32_t count)
{
    const struct vit_norm norm = last_norm_of(vit, count, true);
    TRY(vit_logits_backward(vit->logit_deltas, count, vit->train->model->classes, vit->logit_apart,
                            vit->logit_rounded, vit->added + vit->head->bias, vit->partial, vit->stream));
    TRY(linear_backward(vit, vit->head, count, vit->class_norms, vit->logit_rounded, vit->class_deltas));
    return norm_backward(vit, &norm, vit->last_norm, vit->blocks[vit->block_count - 1].fc2);
}

/* The first two layers. */
static enum status patches_backward(struct vit *vit, uint32_t count)
{
    const struct vit_rows shape = rows_of(vit, count);
    const uint32_t rows = count * (shape.tokens - 1);
    TRY(vit_tokens_backward(&shape, vit->deltas, vit->added + vit->token_layer->weight,
                            vit->added + vit->token_layer->bias, vit->in_deltas, vit->partial, vit->stream));
    TRY(vit_column_sums(vit->in_deltas, rows, shape.width, vit->added + vit->patch_layer->bias, vit->partial,
                        vit->stream));
    return linear_backward(vit, vit->patch_layer, rows, vit->patches, vit->in_deltas, nullptr);
}

/* Passes the final gradients of all layers from layer `first` on to the exchange, as far as they are large
 * enough for a part. `*end` is the begin of the gradients that were passed before. */
static enum status exchange_layers(struct vit *vit, uint32_t first, uint32_t end_layer, size_t *end)
{
    const struct model *model = vit->train->model;
    struct exchange *exchange = vit->train->exchange;
    size_t begin;
    for (uint32_t i = end_layer; exchange && i-- > first;) {
        if (!exchange_is_part(model, &model->layers[i], *end, &begin))
            continue;
        TRY(exchange->method->begin(exchange, vit->gradients + begin, *end - begin, vit->stream));
        *end = begin;
    }
    return STATUS_OK;
}

static enum status exchange_end(struct vit *vit)
{
    struct exchange *exchange = vit->train->exchange;
    return exchange ? exchange->method->end(exchange, vit->stream) : STATUS_OK;
}

/* Computes and exchanges the gradients of a step of one part. A rank without samples in this step has
 * gradients of zero. */
static enum status backward_exchange(struct vit *vit, uint32_t count)
{
    const struct model *model = vit->train->model;
    size_t end = model->arena_values;
    uint32_t layer = model->layer_count;
    if (count == 0)
        CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, end * sizeof *vit->gradients, vit->stream));
    else
        TRY(head_backward(vit, count));
    TRY(exchange_layers(vit, layer - 3, layer, &end));
    layer -= 3;
    for (uint32_t i = vit->block_count; i-- > 0; layer -= BLOCK_LAYERS) {
        if (count > 0)
            TRY(block_backward(vit, i, count));
        TRY(exchange_layers(vit, layer - BLOCK_LAYERS, layer, &end));
    }
    if (count > 0)
        TRY(patches_backward(vit, count));
    TRY(exchange_layers(vit, 0, layer, &end));
    return exchange_end(vit);
}

/* Computes the gradients of one of several parts of a step. The kernels overwrite vit->added. */
static enum status backward_part(struct vit *vit, uint32_t count)
{
    TRY(head_backward(vit, count));
    for (uint32_t i = vit->block_count; i-- > 0;)
        TRY(block_backward(vit, i, count));
    return patches_backward(vit, count);
}

static enum status backward(struct vit *vit, uint32_t count)
{
    return train_parts(vit->train) == 1 ? backward_exchange(vit, count) : backward_part(vit, count);
}

/* ---- Graphs ---- */

/* Captures the forward or the backward pass of `count` samples. The mode is relaxed, because cuBLASLt loads
 * its kernels when they are first used. */
static enum status record(struct vit *vit, uint32_t count, bool back, cudaGraphExec_t *into)
{
    cudaGraph_t made = NULL;
    CUDA_TRY(cudaStreamBeginCapture(vit->stream, cudaStreamCaptureModeRelaxed));
    enum status status = back ? backward(vit, count) : forward(vit, count, true);
    cudaError_t error = cudaStreamEndCapture(vit->stream, &made);
    if (status == STATUS_OK)
        status = cuda_status(error, "cudaStreamEndCapture", __FILE__, __LINE__);
    if (status == STATUS_OK)
        status = cuda_status(cudaGraphInstantiate(into, made, 0), "cudaGraphInstantiate", __FILE__, __LINE__);
    if (made)
        (void)cudaGraphDestroy(made);
    return status;
}

/* Returns the graphs for `count` samples, after capturing them if necessary. If all places are taken,
 * replaces the graphs in the last one. */
static enum status graphs_for(struct vit *vit, uint32_t count, struct graphs **into)
{
    struct graphs *graphs = vit->graphs, *last = vit->graphs + GRAPHS - 1;
    while (graphs < last && graphs->backward && graphs->count != count)
        graphs++;
    *into = graphs;
    if (graphs->backward && graphs->count == count)
        return STATUS_OK;
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    graphs_close(graphs);
    graphs->count = count;
    if (count > 0)
        TRY(record(vit, count, false, &graphs->forward));
    return record(vit, count, true, &graphs->backward);
}

static enum status launch(struct vit *vit, cudaGraphExec_t graph)
{
    RANGE(GRAPH);
    CUDA_TRY(cudaGraphLaunch(graph, vit->stream));
    return STATUS_OK;
}

/* ---- Steps ---- */

/* Makes a part of a step the current batch. `set` has the samples of the whole step, or all samples.
 * `skipped`: samples of this rank before this part. */
static enum status gather_part(struct vit *vit, const struct device_set *set, uint32_t epoch, uint32_t step,
                               const struct share *part, size_t skipped)
{
    const struct train *train = vit->train;
    struct device_set after = device_set_after(set, train->data, skipped);
    const uint32_t count = (uint32_t)part->count;
    RANGE(GATHER);
    TRY(batch_draw(train, set, &vit->batch, epoch, step, part, vit->stream));
    TRY(device_augment_run(&vit->augment, epoch, vit->batch.numbers, train_generated(train, count), &after,
                           vit->stream));
    TRY(vit_patches(train->data, &after, &vit->batch, count, vit->patch, vit->patches, vit->stream));
    return vit->path_count == 0
               ? STATUS_OK
               : vit_factors(vit->paths, vit->path_count, train->seed, epoch, vit->batch.numbers, count,
                             vit->capacity, vit->factors, vit->stream);
}

static enum status update(struct vit *vit, const struct update *update)
{
    const struct train *train = vit->train;
    const size_t values = train->model->arena_values;
    RANGE(UPDATE);
    TRY(clip_find(&train->optimizer, values, vit->gradients, NULL, vit->clip, vit->losses.totals,
                  vit->stream));
    return vit_update(update, values, vit->groups, vit->clip, vit->gradients, &vit->state, vit->parameters,
                      vit->stream);
}

/* Computes the gradients of a part of a step; see backward(). */
static enum status learn_part(struct vit *vit, uint64_t number, const struct share *part)
{
    struct pass pass = {};
    struct graphs *graphs;
    pass.stream = vit->stream;
    pass.count = (uint32_t)part->count;
    pass.total = (uint32_t)part->total;
    TRY(graphs_for(vit, pass.count, &graphs));
    if (pass.count > 0) {
        TRY(launch(vit, graphs->forward));
        TRY(loss_take(vit->train, vit->logits, &vit->batch, &pass, number, vit->logit_deltas, &vit->losses));
    }
    return launch(vit, graphs->backward);
}

/* Computes the gradients of one of several parts of a step, and adds them to those of the parts before it. */
static enum status add_part(struct vit *vit, uint64_t number, const struct share *part, bool first)
{
    const size_t values = vit->train->model->arena_values, bytes = values * sizeof *vit->gradients;
    if (part->count == 0) {
        if (first)
            CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, bytes, vit->stream));
        return STATUS_OK;
    }
    TRY(learn_part(vit, number, part));
    if (first)
        return arena_copy(vit->train, vit->gradients, vit->added, vit->stream);
    return values_add(vit->added, values, vit->gradients, vit->stream);
}

/* Computes the gradients of the samples of this rank. With `timed`, records the events around the gather of
 * the first part. Live samples are released after the last gather. */
static enum status learn_parts(struct vit *vit, uint32_t epoch, uint32_t step, const struct share *share,
                               bool timed)
{
    const struct train *train = vit->train;
    const uint64_t number = (uint64_t)epoch * train_steps(train) + step;
    const bool live = device_feed_is_live(&vit->feed) && share->count > 0;
    const uint32_t parts = train_parts(train);
    struct device_set set = vit->sets[DATA_TRAIN];
    if (timed)
        CUDA_TRY(cudaEventRecord(vit->gather_begin, vit->stream));
    if (live)
        TRY(device_feed_take(&vit->feed, epoch, step, vit->stream, &set));
    for (uint32_t i = 0; i < parts; i++) {
        const struct share part = train_part(train, share, i);
        if (part.count > 0)
            TRY(gather_part(vit, &set, epoch, step, &part, part.first - share->first));
        if (live && i == parts - 1)
            TRY(device_feed_release(&vit->feed, vit->stream));
        if (timed && i == 0)
            CUDA_TRY(cudaEventRecord(vit->gather_end, vit->stream));
        TRY(parts == 1 ? learn_part(vit, number, &part) : add_part(vit, number, &part, i == 0));
    }
    return STATUS_OK;
}

static enum status learn(struct vit *vit, uint32_t epoch, uint32_t step, bool timed)
{
    const struct train *train = vit->train;
    const struct share share = train_share(train, step);
    const uint64_t number = (uint64_t)epoch * train_steps(train) + step;
    const struct update at = optimizer_at(&train->optimizer, &train->schedule, number);
    const bool shared = exchange_updates(train->exchange);
    size_t end = train->model->arena_values;
    if (shared)
        TRY(shared_update_begin(&vit->shared, &at, vit->stream));
    TRY(learn_parts(vit, epoch, step, &share, timed));
    if (train_parts(train) > 1) {
        TRY(exchange_layers(vit, 0, train->model->layer_count, &end));
        TRY(exchange_end(vit));
    }
    return shared ? STATUS_OK : update(vit, &at);
}

static enum status vit_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    struct vit *vit = static_cast<struct vit *>(state);
    const uint32_t timed = first + count / 2;
    CUDA_TRY(cudaSetDevice(vit->device));
    device_feed_plan_timings(&vit->feed, count);
    for (uint32_t step = first; step < first + count; step++) {
        TRY(learn(vit, epoch, step, step == timed));
        TRY(device_progress_step(&vit->progress, vit->losses.totals, 1, vit->stream));
    }
    vit->steps += count;
    return STATUS_OK;
}

/* `data_s` is the gather time of one step times the number of steps, because events around every step would
 * slow the steps down. It is not known for steps in parts. */
static enum status vit_totals(void *state, struct train_totals *totals)
{
    struct vit *vit = static_cast<struct vit *>(state);
    float gather_ms = 0;
    CUDA_TRY(cudaSetDevice(vit->device));
    CUDA_TRY(
        cudaMemcpyAsync(totals, vit->losses.totals, sizeof *totals, cudaMemcpyDeviceToHost, vit->stream));
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    TRY(exchange_settle(vit->train->exchange));
    if (vit->steps > 0)
        CUDA_TRY(cudaEventElapsedTime(&gather_ms, vit->gather_begin, vit->gather_end));
    totals->data_s = 1e-3 * gather_ms * (double)vit->steps;
    if (device_feed_is_live(&vit->feed))
        TRY(device_feed_totals(&vit->feed, vit->steps, totals));
    if (train_parts(vit->train) > 1)
        totals->data_s = -1;
    device_progress_clear(&vit->progress);
    vit->steps = 0;
    return totals_clear(vit->losses.totals, vit->stream);
}

static void vit_progress(const void *state, struct train_progress *progress)
{
    device_progress_read(&static_cast<const struct vit *>(state)->progress, progress);
}

/* ---- Inference ---- */

static enum status evaluate_batch(struct vit *vit, enum data_part part, uint32_t first, uint32_t count,
                                  float *logits)
{
    TRY(batch_list(&vit->sets[part], &vit->batch, first, count, vit->stream));
    TRY(vit_patches(vit->train->data, &vit->sets[part], &vit->batch, count, vit->patch, vit->patches,
                    vit->stream));
    TRY(forward(vit, count, false));
    CUDA_TRY(cudaMemcpyAsync(logits, vit->logits, (size_t)count * vit->train->model->classes * sizeof *logits,
                             cudaMemcpyDeviceToHost, vit->stream));
    return STATUS_OK;
}

static enum status vit_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                float *logits)
{
    struct vit *vit = static_cast<struct vit *>(state);
    const uint32_t batch = vit->capacity;
    CUDA_TRY(cudaSetDevice(vit->device));
    for (uint32_t done = 0; done < count; done += batch) {
        const uint32_t left = count - done;
        TRY(evaluate_batch(vit, part, first + done, left < batch ? left : batch,
                           logits + (size_t)done * vit->train->model->classes));
    }
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    return STATUS_OK;
}

static uint64_t vit_memory_bytes(const void *state)
{
    const struct vit *vit = static_cast<const struct vit *>(state);
    return vit->allocations.bytes + device_feed_memory_bytes(&vit->feed);
}

extern "C" {
extern const struct engine engine_vit;
const struct engine engine_vit = {
    .name = "vit",
    /* bf16 has 8 significant bits. docs/train_vit.md explains these bounds and which faults exceed them. */
    .bounds = {.loss = 2e-2, .floor = 1, .drift = 0.3, .logits = 3e-2},
    .feeds = true,
    .recomputes = true,
    .augments = true,
    .gradients_in = GRADIENTS_IN_GRAPH,
    .shares_update = true,
    .unit = UNIT_HALF,
    .accepts = vit_accepts,
    .open = vit_open,
    .close = vit_close,
    .set = vit_set,
    .get = vit_get,
    .steps = vit_steps,
    .totals = vit_totals,
    .progress = vit_progress,
    .gradients = vit_gradients,
    .evaluate = vit_evaluate,
    .memory_bytes = vit_memory_bytes,
};
}
