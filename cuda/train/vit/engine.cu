/* The engine of `train-vit` and `infer-vit`. One buffer holds all activations. A step gathers its samples,
 * replays the CUDA graph of the forward pass, computes the loss, replays the graph of the backward pass, and
 * updates the parameters. Each number of samples needs its own graphs; the last batch of an epoch, for
 * example, can be smaller. A stage of a pipeline has some of the blocks, and launches its kernels without
 * graphs. */
#include <stdlib.h>

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
 * values that vit_attention_forward() and the normalisations save. `qkv` has the queries, keys and values. */
struct vit_saved {
    bf16 *norms1, *qkv, *mixed, *sums2, *norms2, *hidden, *active;
    struct vit_moments *moments1, *moments2;
    float *logs;
};

struct vit_block {
    const struct layer *norm1, *qkv, *proj, *norm2, *fc1, *fc2;
    const float *factors1, *factors2; /* of stochastic depth, per sample; NULL: all factors are 1 */
    bf16 *sums1;                      /* the input of the block */
    struct vit_saved saved;
};

/* The CUDA graphs for a step, or a part of a step, with `count` samples. */
struct vit_graphs {
    uint32_t count;
    cudaGraphExec_t forward, backward;
};

/* What the forward pass of a batch leaves for its backward pass. A stage of a pipeline has one for each
 * micro-batch whose activations it keeps; otherwise there is one. */
struct vit_slot {
    struct vit_block blocks[BLOCKS_MAX];
    float *factors; /* of stochastic depth: (layer, sample) */
    /* Activations outside the blocks. A stage without the head has no class_sums, class_norms, class_moments,
     * logits and logit_deltas, and only the first stage has patches. */
    bf16 *patches, *class_sums, *class_norms;
    struct vit_moments *class_moments;
    float *logits, *logit_deltas;
    struct device_batch samples;
};

struct vit : device_engine, vit_slot { /* the current slot; `batch` points to its samples */
    struct vit_multiplier *multiplier;
    struct vit_slot *slots; /* of a stage of a pipeline; otherwise NULL */

    /* The first two are NULL in the later stages of a pipeline, the last two in all stages but the last. */
    const struct layer *patch_layer, *token_layer, *last_norm, *head;
    struct shape tokens;         /* of the blocks: tokens as channels, and the width of a token */
    uint32_t block_count, patch; /* `patch`: pixels of a patch along an axis */
    uint32_t heads, logit_apart; /* `logit_apart`: distance between rows of logit_rounded */

    bf16 *parameters; /* rounded to bf16 */
    /* `added`: the gradients that the backward pass writes. It equals `gradients`, unless a step has several
     * parts. */
    float *added;
    struct vit_sums sums;

    struct vit_path *paths; /* device memory: the layers of stochastic depth */
    uint32_t path_count;

    bf16 *branch; /* the outputs of the current branch, or of the patch layer */
    /* A stage without the head: its outputs; and room for their moments, which are not used. */
    bf16 *sums_out;
    struct vit_moments *moments_out;
    /* Gradients of: the sums (deltas), the outputs of a branch (branch_deltas), (q, k, v) or the hidden
     * values (wide_deltas), the inputs of a linear layer (in_deltas), and class_norms (class_deltas). */
    bf16 *deltas, *branch_deltas, *wide_deltas, *in_deltas, *class_deltas;
    bf16 *logit_rounded; /* logit_deltas in bf16 */

    struct vit_graphs graphs[GRAPHS];
};

static struct vit_rows rows_of(const struct vit *vit, uint32_t count)
{
    return {count, vit->tokens.channels, vit->tokens.width};
}

static uint32_t hidden_width(const struct vit *vit)
{
    return vit->blocks[0].fc1->out.width;
}

static struct vit *vit_of(struct device_engine *engine)
{
    return static_cast<struct vit *>(engine);
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

static void arrange_saved(const struct vit *vit, struct pieces *pieces, struct vit_saved *saved)
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

/* All blocks share the saved arrays of the first block if there is no backward pass, or if the backward pass
 * repeats the forward pass of each block. Without a backward pass, two arrays take turns as the inputs of the
 * blocks. */
static void arrange_blocks(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const bool shared = vit->train->forward_only || vit->train->checkpoint_activations;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        struct vit_block *block = &vit->blocks[i];
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
    if (vit->head) {
        take(pieces, &vit->class_deltas, (size_t)shape.samples * shape.width);
        take(pieces, &vit->logit_rounded, (size_t)shape.samples * vit->logit_apart);
    }
}

/* Divides the buffer for the current slot. */
static void arrange_slot(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t samples = shape.samples;
    arrange_blocks(vit, pieces);
    if (vit->patch_layer)
        take(pieces, &vit->patches, samples * vit->train->model->input_values);
    if (!vit->head)
        return;
    take(pieces, &vit->class_sums, samples * shape.width);
    take(pieces, &vit->class_norms, samples * shape.width);
    take(pieces, &vit->class_moments, samples);
    take(pieces, &vit->logits, samples * vit->train->model->classes);
    if (!vit->train->forward_only)
        take(pieces, &vit->logit_deltas, samples * vit->train->model->classes);
}

static void choose_slot(struct vit *vit, uint32_t number)
{
    *static_cast<struct vit_slot *>(vit) = vit->slots[number];
}

/* Divides the buffer of activations and their gradients. */
static void arrange(struct vit *vit, struct pieces *pieces)
{
    const struct vit_rows shape = rows_of(vit, vit->capacity);
    const size_t rows = (size_t)shape.samples * shape.tokens;
    for (uint32_t i = 0; vit->slots && i < vit->train->stage->slots; i++) {
        choose_slot(vit, i);
        arrange_slot(vit, pieces);
        vit->slots[i] = *vit;
    }
    if (!vit->slots)
        arrange_slot(vit, pieces);
    take(pieces, &vit->branch, rows * shape.width);
    if (!vit->head) {
        take(pieces, &vit->sums_out, rows * shape.width);
        take(pieces, &vit->moments_out, rows);
    }
    if (!vit->train->forward_only)
        arrange_deltas(vit, pieces);
}

/* Allocates one buffer for all activations and their gradients, and sets the pointers to them. */
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

/* Returns the first layer of block `i`. */
static const struct layer *block_layers(const struct vit *vit, uint32_t i)
{
    return &vit->train->model->layers[layers_before(vit->train) + i * BLOCK_LAYERS];
}

static void find_layers(struct vit *vit)
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

/* Adds a layer of stochastic depth to `paths`. Returns the address of the layer's factors. If the layer drops
 * nothing, does not add it, and returns NULL. */
static const float *add_path(struct vit *vit, const struct layer *layer, struct vit_path *paths)
{
    if (layer->spec.rate == 0)
        return nullptr;
    paths[vit->path_count] = {layer->number, layer->spec.rate};
    return vit->factors + (size_t)vit->path_count++ * vit->capacity;
}

/* Allocates the factors of the current slot, and sets `paths` and vit->path_count. */
static enum status open_factors(struct vit *vit, struct vit_path *paths)
{
    TRY(allocate(&vit->allocations, &vit->factors, (size_t)2 * vit->block_count * vit->capacity));
    vit->path_count = 0;
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct layer *layers = block_layers(vit, i);
        vit->blocks[i].factors1 = add_path(vit, &layers[4], paths);
        vit->blocks[i].factors2 = add_path(vit, &layers[10], paths);
    }
    return STATUS_OK;
}

/* Opens the slots: their samples, and their factors of stochastic depth. */
static enum status open_slots(struct vit *vit)
{
    const struct train *train = vit->train;
    const uint32_t count = train->stage ? train->stage->slots : 1;
    struct vit_path paths[2 * BLOCKS_MAX];
    if (train->stage)
        vit->slots = static_cast<struct vit_slot *>(calloc(count, sizeof *vit->slots));
    TRY(ALLOCATED(vit->slots || !train->stage, "cuda: out of memory"));
    for (uint32_t i = 0; i < count; i++) {
        if (!train->forward_only)
            TRY(open_factors(vit, paths));
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
static size_t partial_values(const struct vit *vit)
{
    const struct vit_rows rows = rows_of(vit, vit->capacity);
    const size_t classes = vit->train->model->classes, tokens = (size_t)rows.tokens * rows.width;
    const size_t hidden_parts = ((size_t)rows.samples * rows.tokens + VIT_HIDDEN_ROWS - 1) / VIT_HIDDEN_ROWS;
    /* The backward passes of normalisation and of attention write three partial sums per column of a token.
     */
    const size_t sums[] = {
        VIT_PARTS * (size_t)3 * rows.width, VIT_PARTS * (size_t)hidden_width(vit),
        hidden_parts * hidden_width(vit),   VIT_SAMPLE_PARTS * tokens,
        VIT_SAMPLE_PARTS * classes,         (size_t)vit_attention_parts(&rows, vit->heads) * 3 * rows.width};
    size_t most = 0;
    for (size_t each : sums)
        most = each > most ? each : most;
    return most;
}

static enum status open_learning(struct vit *vit)
{
    const size_t values = vit->train->model->arena_values;
    vit->allocations.part = MEMORY_WORKSPACE;
    TRY(allocate(&vit->allocations, &vit->sums.room, VIT_SUMS_MAX * partial_values(vit)));
    vit->shared.rounded = vit->parameters;
    vit->tensors.tensor_cores = true;
    TRY(device_engine_open_learning(vit));
    vit->added = vit->gradients;
    vit->allocations.part = MEMORY_GRADIENTS;
    return train_parts(vit->train) > 1 || vit->train->stage
               ? allocate_zeros(&vit->allocations, &vit->added, values, vit->stream)
               : STATUS_OK;
}

/* Opens a state that device_engine_new() has created. The caller closes it, even after a failure. */
static enum status vit_open_all(struct vit *vit)
{
    const struct train *train = vit->train;
    TRY(device_probe(vit->device));
    TRY(vit_accepts(train));
    find_layers(vit);
    TRY(device_engine_open(vit));
    vit->allocations.part = MEMORY_WORKSPACE;
    TRY(vit_multiplier_open(&vit->allocations, &vit->multiplier));
    vit->allocations.part = MEMORY_ACTIVATIONS;
    TRY(open_slots(vit));
    TRY(open_activations(vit));
    vit->allocations.part = MEMORY_PARAMETERS;
    TRY(allocate_zeros(&vit->allocations, &vit->state.parameters, train->model->arena_values, vit->stream));
    TRY(allocate(&vit->allocations, &vit->parameters, train->model->arena_values));
    TRY(device_engine_open_data(vit));
    if (!train->forward_only)
        TRY(open_learning(vit));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

/* ---- Forward pass ---- */

/* Returns the matrix product of a linear layer with `rows` rows of inputs. */
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

/* norm1_of(), norm2_of() and last_norm_of() return the arguments of the two normalisations of block `i`, and
 * of the last normalisation. The arguments include the factors of stochastic depth of the branch before the
 * normalisation. */
static struct vit_norm norm1_of(const struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct vit_block *block = &vit->blocks[i];
    return norm_of(vit, block->norm1, count, training && i > 0 ? block[-1].factors2 : nullptr, block->sums1,
                   block->saved.norms1, block->saved.moments1);
}

static struct vit_norm norm2_of(const struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct vit_block *block = &vit->blocks[i];
    return norm_of(vit, block->norm2, count, training ? block->factors1 : nullptr, block->saved.sums2,
                   block->saved.norms2, block->saved.moments2);
}

static struct vit_norm last_norm_of(const struct vit *vit, uint32_t count, bool training)
{
    const struct vit_block *last = &vit->blocks[vit->block_count - 1];
    const float *factors = training ? last->factors2 : nullptr;
    /* A stage without the head needs only the sums. Its next stage normalises them. */
    if (!vit->head)
        return norm_of(vit, last->norm2, count, factors, vit->sums_out, vit->in_deltas, vit->moments_out);
    struct vit_norm norm =
        norm_of(vit, vit->last_norm, count, factors, vit->class_sums, vit->class_norms, vit->class_moments);
    norm.first_tokens = true;
    return norm;
}

static struct vit_attention attention_of(const struct vit *vit, const struct vit_block *block, uint32_t count)
{
    return {rows_of(vit, count), vit->heads, block->saved.qkv, block->saved.mixed, block->saved.logs};
}

/* Computes block `i` up to the end of its second branch, from its normalised input. */
static enum status block_forward(struct vit *vit, uint32_t i, uint32_t count, bool training)
{
    const struct vit_block *block = &vit->blocks[i];
    const struct vit_saved *saved = &block->saved;
    const struct vit_norm norm2 = norm2_of(vit, i, count, training);
    const uint32_t rows = count * norm2.rows.tokens;
    TRY(linear_forward(vit, block->qkv, rows, saved->norms1, saved->qkv));
    const struct vit_attention attention = attention_of(vit, block, count);
    TRY(vit_attention_forward(&attention, vit->stream));
    TRY(linear_forward(vit, block->proj, rows, saved->mixed, vit->branch));
    TRY(vit_add_norm(&norm2, block->sums1, vit->branch, vit->stream));
    const struct vit_linear fc1 = linear_of(block->fc1, rows);
    TRY(vit_hidden(vit->multiplier, &fc1, saved->norms2, vit->parameters + block->fc1->weight,
                   vit->parameters + block->fc1->bias, saved->hidden, saved->active, vit->stream));
    return linear_forward(vit, block->fc2, rows, saved->active, vit->branch);
}

/* Computes the normalised input of the first block from vit->patches. In a later stage of a pipeline, its
 * input is there. */
static enum status tokens_forward(struct vit *vit, uint32_t count, bool training)
{
    const float *parameters = vit->state.parameters;
    const struct vit_norm first = norm1_of(vit, 0, count, training);
    if (!vit->patch_layer)
        return vit_add_norm(&first, nullptr, nullptr, vit->stream);
    TRY(linear_forward(vit, vit->patch_layer, count * (first.rows.tokens - 1), vit->patches, vit->branch));
    return vit_tokens_norm(&first, vit->branch, parameters + vit->token_layer->bias,
                           parameters + vit->token_layer->weight, vit->stream);
}

/* Computes the logits of `count` samples from vit->patches, or those layers of it that a stage has. */
static enum status vit_forward(struct vit *vit, uint32_t count, bool training)
{
    TRY(tokens_forward(vit, count, training));
    for (uint32_t i = 0; i < vit->block_count; i++) {
        const struct vit_norm next = i + 1 < vit->block_count ? norm1_of(vit, i + 1, count, training)
                                                              : last_norm_of(vit, count, training);
        TRY(block_forward(vit, i, count, training));
        TRY(vit_add_norm(&next, vit->blocks[i].saved.sums2, vit->branch, vit->stream));
    }
    if (!vit->head)
        return STATUS_OK;
    const struct vit_linear head = linear_of(vit->head, count);
    return vit_linear_forward(vit->multiplier, &head, true, vit->class_norms,
                              vit->parameters + vit->head->weight, vit->state.parameters + vit->head->bias,
                              vit->logits, vit->stream);
}

/* ---- Backward pass ---- */

/* Computes the gradients of a layer's weights and, unless `in_deltas` is NULL, of its inputs. */
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

/* Returns the gradients of a branch's outputs. `factors` are those of its stochastic depth, or NULL. */
static bf16 *branch_deltas(const struct vit *vit, const float *factors)
{
    return factors ? vit->branch_deltas : vit->deltas;
}

/* Backward pass of a normalisation and of the sum that it normalises. `before` is the last layer of the
 * branch whose output is part of this sum, or NULL if there is no branch. Adds the gradient of the sum to
 * vit->deltas. The last normalisation of the network overwrites vit->deltas instead. */
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
    return vit_add_norm_backward(norm, &deltas, &vit->sums, vit->stream);
}

/* Backward pass of the second branch of a block: two linear layers with a GELU between them. */
static enum status hidden_backward(struct vit *vit, const struct vit_block *block, uint32_t rows)
{
    const struct vit_saved *saved = &block->saved;
    const struct vit_linear fc2 = linear_of(block->fc2, rows);
    const bf16 *deltas = branch_deltas(vit, block->factors2);
    TRY(linear_backward(vit, block->fc2, rows, saved->active, deltas, nullptr));
    TRY(vit_hidden_backward(vit->multiplier, &fc2, deltas, vit->parameters + block->fc2->weight,
                            saved->hidden, vit->wide_deltas, vit->added + block->fc1->bias, &vit->sums,
                            vit->stream));
    return linear_backward(vit, block->fc1, rows, saved->norms2, vit->wide_deltas, vit->in_deltas);
}

static enum status attention_backward(struct vit *vit, const struct vit_block *block, uint32_t count)
{
    const struct vit_saved *saved = &block->saved;
    const struct vit_attention attention = attention_of(vit, block, count);
    const uint32_t rows = count * attention.rows.tokens;
    TRY(linear_backward(vit, block->proj, rows, saved->mixed, branch_deltas(vit, block->factors1),
                        vit->in_deltas));
    TRY(vit_attention_backward(&attention, vit->in_deltas, vit->wide_deltas, vit->added + block->qkv->bias,
                               &vit->sums, vit->stream));
    return linear_backward(vit, block->qkv, rows, saved->norms1, vit->wide_deltas, vit->in_deltas);
}

/* With --checkpoint-activations, all blocks share the saved arrays, so the forward pass of the block is
 * computed again. The last block is not computed again, because the arrays still have its results. */
static enum status block_backward(struct vit *vit, uint32_t i, uint32_t count)
{
    const struct vit_block *block = &vit->blocks[i];
    const struct vit_norm norm1 = norm1_of(vit, i, count, true), norm2 = norm2_of(vit, i, count, true);
    if (vit->train->checkpoint_activations && i + 1 < vit->block_count) {
        TRY(vit_add_norm(&norm1, nullptr, nullptr, vit->stream));
        TRY(block_forward(vit, i, count, true));
    }
    TRY(hidden_backward(vit, block, count * norm1.rows.tokens));
    TRY(norm_backward(vit, &norm2, block->norm2, block->proj));
    TRY(attention_backward(vit, block, count));
    TRY(norm_backward(vit, &norm1, block->norm1, i > 0 ? block[-1].fc2 : nullptr));
    return vit_sums_finish(&vit->sums, vit->stream);
}

/* Backward pass of the last normalisation and the head. */
static enum status head_backward(struct vit *vit, uint32_t count)
{
    const struct vit_norm norm = last_norm_of(vit, count, true);
    TRY(vit_logits_backward(vit->logit_deltas, count, vit->train->model->classes, vit->logit_apart,
                            vit->logit_rounded, vit->added + vit->head->bias, &vit->sums, vit->stream));
    TRY(linear_backward(vit, vit->head, count, vit->class_norms, vit->logit_rounded, vit->class_deltas));
    TRY(norm_backward(vit, &norm, vit->last_norm, vit->blocks[vit->block_count - 1].fc2));
    return vit_sums_finish(&vit->sums, vit->stream);
}

/* Backward pass of the sum at the end of a stage without the head, whose gradient is in vit->deltas. The next
 * stage has the normalisation of the sum. The kernel is that of norm_backward(), so the cuts do not change
 * the bits of the gradients. */
static enum status sum_backward(struct vit *vit, uint32_t count)
{
    const struct vit_norm norm = last_norm_of(vit, count, true);
    const struct vit_norm_deltas deltas = {.outputs = nullptr,
                                           .later = vit->deltas,
                                           .sums = vit->deltas,
                                           .branch = norm.factors ? vit->branch_deltas : nullptr,
                                           .weight = nullptr,
                                           .bias = nullptr,
                                           .branch_bias =
                                               vit->added + vit->blocks[vit->block_count - 1].fc2->bias};
    TRY(vit_add_norm_backward(&norm, &deltas, &vit->sums, vit->stream));
    return vit_sums_finish(&vit->sums, vit->stream);
}

/* Backward pass of the first two layers: the patches and the tokens. */
static enum status patches_backward(struct vit *vit, uint32_t count)
{
    const struct vit_rows shape = rows_of(vit, count);
    const uint32_t rows = count * (shape.tokens - 1);
    TRY(vit_tokens_backward(&shape, vit->deltas, vit->added + vit->token_layer->weight,
                            vit->added + vit->token_layer->bias, vit->in_deltas, &vit->sums, vit->stream));
    TRY(vit_column_sums(vit->in_deltas, rows, shape.width, vit->added + vit->patch_layer->bias, &vit->sums,
                        vit->stream));
    TRY(vit_sums_finish(&vit->sums, vit->stream));
    return linear_backward(vit, vit->patch_layer, rows, vit->patches, vit->in_deltas, nullptr);
}

/* Computes and exchanges the gradients of a step that has only one part. A rank without samples in this step
 * contributes zeros. */
static enum status backward_exchange(struct vit *vit, uint32_t count)
{
    const struct model *model = vit->train->model;
    size_t end = model->arena_values;
    uint32_t layer = model->layer_count;
    if (count == 0)
        CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, end * sizeof *vit->gradients, vit->stream));
    else
        TRY(head_backward(vit, count));
    TRY(device_engine_exchange(vit, layer - 3, layer, &end));
    layer -= 3;
    for (uint32_t i = vit->block_count; i-- > 0; layer -= BLOCK_LAYERS) {
        if (count > 0)
            TRY(block_backward(vit, i, count));
        TRY(device_engine_exchange(vit, layer - BLOCK_LAYERS, layer, &end));
    }
    if (count > 0)
        TRY(patches_backward(vit, count));
    TRY(device_engine_exchange(vit, 0, layer, &end));
    return device_engine_exchange_end(vit);
}

/* Computes the gradients of one of several parts of a step, or of a micro-batch. */
static enum status backward_part(struct vit *vit, uint32_t count)
{
    TRY(vit->head ? head_backward(vit, count) : sum_backward(vit, count));
    for (uint32_t i = vit->block_count; i-- > 0;)
        TRY(block_backward(vit, i, count));
    return vit->patch_layer ? patches_backward(vit, count) : STATUS_OK;
}

/* Computes the gradients of `count` samples. The kernels overwrite vit->added. If the step has one part, also
 * exchanges the gradients. */
static enum status vit_backward(struct vit *vit, uint32_t count)
{
    return train_parts(vit->train) == 1 ? backward_exchange(vit, count) : backward_part(vit, count);
}

/* ---- Graphs ---- */

/* Captures the forward or the backward pass of `count` samples. The mode is relaxed, because cuBLASLt loads
 * its kernels when they are first used. */
static enum status record(struct vit *vit, uint32_t count, bool back, cudaGraphExec_t *into)
{
    CUDA_TRY(cudaStreamBeginCapture(vit->stream, cudaStreamCaptureModeRelaxed));
    return capture_end(vit->stream, back ? vit_backward(vit, count) : vit_forward(vit, count, true), into);
}

static void graphs_close(struct vit_graphs *graphs)
{
    destroy(graphs->forward, graphs->backward);
    *graphs = {};
}

/* Returns the graphs for `count` samples, and captures them if they do not exist. If all entries are in use,
 * replaces the last one. */
static enum status graphs_for(struct vit *vit, uint32_t count, struct vit_graphs **into)
{
    struct vit_graphs *graphs = vit->graphs, *last = vit->graphs + GRAPHS - 1;
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
    return CUDA_STATUS(cudaGraphLaunch(graph, vit->stream));
}

/* ---- Steps ---- */

/* Draws the factors of stochastic depth of the current batch. */
static enum status draw_factors(struct vit *vit, uint32_t epoch, uint32_t count)
{
    return vit->path_count > 0
               ? vit_factors(vit->paths, vit->path_count, vit->train->seed, epoch, vit->batch->numbers, count,
                             vit->capacity, vit->factors, vit->stream)
               : STATUS_OK;
}

static enum status gather(struct device_engine *engine, const struct device_set *set, uint32_t epoch,
                          bool training, uint32_t count)
{
    struct vit *vit = vit_of(engine);
    TRY(vit_patches(vit->train->data, set, vit->batch, count, vit->patch, vit->patches, vit->stream));
    return training ? draw_factors(vit, epoch, count) : STATUS_OK;
}

static enum status apply(struct device_engine *engine, const struct update *update)
{
    struct vit *vit = vit_of(engine);
    RANGE(UPDATE);
    return device_engine_update(vit, update, vit->parameters);
}

/* Computes the gradients of a part of a step; see vit_backward(). */
static enum status compute_part(struct vit *vit, uint64_t number, const struct share *part)
{
    struct pass pass = {};
    struct vit_graphs *graphs;
    pass.stream = vit->stream;
    pass.count = (uint32_t)part->count;
    pass.total = (uint32_t)part->total;
    TRY(graphs_for(vit, pass.count, &graphs));
    if (pass.count > 0) {
        TRY(launch(vit, graphs->forward));
        TRY(loss_take(vit->train, vit->logits, vit->batch, &pass, number, vit->logit_deltas, &vit->losses));
    }
    return launch(vit, graphs->backward);
}

/* Computes the gradients of one of several parts of a step, and adds them to those of the parts before it. */
static enum status add_part(struct vit *vit, uint64_t number, const struct share *part, bool first)
{
    const size_t values = vit->train->model->arena_values, bytes = values * sizeof *vit->gradients;
    if (part->count == 0) { /* only part 0 can be empty here */
        CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, bytes, vit->stream));
        return STATUS_OK;
    }
    TRY(compute_part(vit, number, part));
    if (first)
        return arena_copy(vit->train, vit->gradients, vit->added, vit->stream);
    return values_add(vit->added, values, vit->gradients, vit->stream);
}

static enum status learn_part(struct device_engine *engine, uint32_t epoch, uint32_t step,
                              const struct share *part, uint32_t index)
{
    struct vit *vit = vit_of(engine);
    const uint64_t number = (uint64_t)epoch * train_steps(vit->train) + step;
    return train_parts(vit->train) == 1 ? compute_part(vit, number, part)
                                        : add_part(vit, number, part, index == 0);
}

static enum status infer(struct device_engine *engine, uint32_t count, const float **logits)
{
    struct vit *vit = vit_of(engine);
    *logits = vit->logits;
    return vit_forward(vit, count, false);
}

/* ---- A stage of a pipeline ---- */

/* Returns the size of the tokens of `count` samples. */
static size_t tokens_bytes(const struct vit *vit, uint32_t count)
{
    const struct vit_rows rows = rows_of(vit, count);
    return (size_t)rows.samples * rows.tokens * rows.width * sizeof(bf16);
}

static enum status stage_forward(void *state, const struct micro *micro, const void *inputs, void *outputs)
{
    struct vit *vit = device_engine_as<struct vit>(state);
    struct pass pass = {.stream = vit->stream, .count = micro->count, .total = micro->total};
    CUDA_TRY(cudaSetDevice(vit->device));
    choose_slot(vit, micro->slot);
    TRY(device_stage_take(vit, micro));
    vit->slots[micro->slot] = *vit; /* with the mix of its samples */
    if (inputs) {
        TRY(device_stage_copy(vit, vit->blocks[0].sums1, inputs, tokens_bytes(vit, micro->count)));
        if (micro->training)
            TRY(draw_factors(vit, micro->epoch, micro->count));
    }
    TRY(vit_forward(vit, micro->count, micro->training));
    if (outputs && vit->head)
        TRY(device_stage_copy(vit, outputs, vit->logits,
                              micro->count * vit->train->model->classes * sizeof *vit->logits));
    else if (outputs)
        TRY(device_stage_copy(vit, outputs, vit->sums_out, tokens_bytes(vit, micro->count)));
    else
        TRY(loss_take(vit->train, vit->logits, vit->batch, &pass, micro->step, vit->logit_deltas,
                      &vit->losses));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

/* The kernels overwrite vit->added. */
static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of,
                                  const void *deltas, void *in_deltas)
{
    struct vit *vit = device_engine_as<struct vit>(state);
    CUDA_TRY(cudaSetDevice(vit->device));
    choose_slot(vit, micro->slot);
    if (deltas)
        TRY(device_stage_copy(vit, vit->deltas, deltas, tokens_bytes(vit, micro->count)));
    TRY(backward_part(vit, micro->count));
    TRY(micro->index == 0
            ? arena_copy(vit->train, vit->gradients, vit->added, vit->stream)
            : values_add(vit->added, vit->train->model->arena_values, vit->gradients, vit->stream));
    if (in_deltas)
        TRY(device_stage_copy(vit, in_deltas, vit->deltas, tokens_bytes(vit, micro->count)));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

static const struct stage_functions stages = {.value_bytes = sizeof(bf16),
                                              .forward = stage_forward,
                                              .backward = stage_backward,
                                              .clear = device_stage_clear,
                                              .sum = device_stage_sum,
                                              .update = device_stage_update,
                                              .pin = device_stage_pin,
                                              .unpin = device_stage_unpin,
                                              .share = device_stage_share,
                                              .map = device_stage_map,
                                              .release = device_stage_release};

/* ---- The engine ---- */

static enum status vit_open(const struct train *train, const struct resources *resources, void **state)
{
    static const struct device_engine_functions functions = {
        .gather = gather, .learn_part = learn_part, .update = apply, .infer = infer};
    TRY(device_engine_new<struct vit>(train, resources, &functions, state));
    return vit_open_all(device_engine_as<struct vit>(*state));
}

static void vit_close(void *state)
{
    struct vit *vit = device_engine_as<struct vit>(state);
    device_engine_stop(vit);
    for (struct vit_graphs &graphs : vit->graphs)
        graphs_close(&graphs);
    vit_multiplier_close(vit->multiplier);
    device_engine_close(vit);
    free(vit->slots);
    free(vit);
}

static enum status vit_set(void *state, const struct train_state *from)
{
    struct vit *vit = device_engine_as<struct vit>(state);
    TRY(device_engine_set(state, from));
    TRY(vit_round(vit->state.parameters, vit->train->model->arena_values, vit->parameters, vit->stream));
    return CUDA_STATUS(cudaStreamSynchronize(vit->stream));
}

extern "C" {
const struct engine engine_vit = {
    .name = "vit",
    /* bf16 has 8 significant bits. docs/train_vit.md explains these bounds and which faults exceed them. */
    .bounds = {.loss = 2e-2, .floor = 1, .drift = 0.3, .logits = 4e-2},
    .feeds = true,
    .recomputes = true,
    .augments = true,
    .gradients_in = GRADIENTS_IN_GRAPH,
    .shares_update = true,
    .unit = UNIT_HALF,
    .accepts = vit_accepts,
    .stages = &stages,
    .open = vit_open,
    .close = vit_close,
    .set = vit_set,
    .get = device_engine_get,
    .steps = device_engine_steps,
    .totals = device_engine_totals,
    .progress = device_engine_progress,
    .gradients = device_engine_gradients,
    .evaluate = device_engine_evaluate,
    .memory_bytes = device_engine_memory_bytes,
    .test_samples = device_engine_test_samples,
};
}

/* ---- Variants ---- */

static enum status probe_vit(const struct resources *resources)
{
    TRY(vit_multiplier_probe());
    return device_probe(resources->device);
}

extern "C" {
extern const struct variant variant_train_vit, variant_infer_vit;
const struct variant variant_train_vit = training_by<&engine_vit>(false, probe_vit);
const struct variant variant_infer_vit = inferring_by<&engine_vit>(false, probe_vit);
}
