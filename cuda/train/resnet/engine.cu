/* The engine of `train-resnet` and `infer-resnet`: residual networks with batch normalisation. A step gathers
 * its samples, replays the CUDA graph of the forward pass, computes the loss, replays the graph of the
 * backward pass, and updates the parameters. Each number of samples needs its own graphs.
 *
 * Backward, every block begins with the gradient of its output after the ReLU's mask, and with the sums that
 * its last normalisation needs. The convolution that computes this gradient also applies the mask and adds
 * up. */
#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "train/device_engine.cuh"
#include "train/engines.cuh"
#include "train/resnet/kernels.cuh"
#include "train/vit/kernels.cuh"

#define BLOCKS_MAX 32
#define UNITS      3 /* convolutions of a block, without that of the shortcut */
#define GRAPHS     4 /* enough for full steps and short steps */
#define STEM       4 /* layers before the first block */

/* A convolution and the normalisation after it. `active` is the output after ReLU; NULL if the output is only
 * a summand of the block's output. */
struct conv_norm {
    const struct layer *conv, *layer; /* `layer`: of the normalisation */
    struct conv_shape shape;
    struct resnet_norm norm;
    bf16 *weights, *opposite;
    bf16 *raw, *active; /* output of the convolution, and of the ReLU */
};

struct block {
    struct conv_norm units[UNITS];
    struct conv_norm shortcut; /* without a convolution, shortcut.conv is NULL */
    uint32_t first, end;       /* its layers in the model's table */
    const bf16 *inputs;
    bf16 *outputs;
};

/* The CUDA graphs for steps with `count` samples on this rank and `total` on all ranks. */
struct resnet_graphs {
    uint32_t count, total;
    cudaGraphExec_t forward, backward;
};

struct resnet : device_engine {
    struct vit_multiplier *multiplier; /* of the last layer */

    struct conv_norm stem;
    struct resnet_pool pool;
    struct block blocks[BLOCKS_MAX];
    uint32_t block_count;
    const struct layer *mean, *head;
    uint32_t logit_apart; /* distance between rows of logit_rounded */

    bf16 *parameters; /* rounded to bf16 */
    struct resnet_pack *packs;
    uint32_t pack_count, pack_blocks;
    struct vit_sums sums;
    float *partial[2]; /* partial sums of a block's last normalisation and of its shortcut's */
    float *room;       /* of resnet_weights() */
    float *norm_sums;  /* of struct resnet_shared; NULL: each rank normalises over its own samples */

    bf16 *images, *pooled, *means;
    uint8_t *largest;
    float *logits, *logit_deltas;
    bf16 *logit_rounded, *mean_deltas;
    /* Gradients, each with room for the largest tensor: of a block's outputs and inputs, and inside a block.
     */
    bf16 *out_deltas, *in_deltas, *last_deltas, *mid_deltas, *first_deltas;

    struct device_batch samples; /* `batch` points to it */
    struct resnet_graphs graphs[GRAPHS];
};

static struct resnet *resnet_of(struct device_engine *engine)
{
    return static_cast<struct resnet *>(engine);
}

/* ---- Supported networks ---- */

/* Sets `*unit` to the layers from `layer` on, if they are a convolution of this kernel with padding kernel /
 * 2 and a normalisation. */
static bool find_unit(const struct layer *layer, uint32_t kernel, uint32_t skipped, struct conv_norm *unit)
{
    const struct layer_spec *spec = &layer[0].spec;
    unit->conv = &layer[0];
    unit->layer = &layer[1];
    return spec->kind == LAYER_CONV && layer[1].spec.kind == LAYER_BATCH_NORM && spec->no_bias &&
           spec->skipped == skipped && spec->kernel[0] == 1 && spec->kernel[1] == kernel &&
           spec->kernel[2] == kernel && spec->padding[0] == 0 && spec->padding[1] == kernel / 2 &&
           spec->padding[2] == kernel / 2 && layer_stride(layer, 1) <= 2 && layer->in.depth == 1;
}

static bool is_pool(const struct layer *layer)
{
    const struct layer_spec *spec = &layer->spec;
    return spec->kind == LAYER_POOL && spec->kernel[0] == 1 && spec->kernel[1] == 3 && spec->kernel[2] == 3 &&
           spec->padding[1] == 1 && spec->padding[2] == 1 && layer_stride(layer, 1) == 2;
}

/* Sets `*block` to the layers from `first` on: convolutions 1 x 1, 3 x 3 and 1 x 1, perhaps one on the
 * shortcut, addition and ReLU. The layers end with a mean and a linear layer, so all reads are inside the
 * table. */
static bool find_block(const struct model *model, uint32_t first, struct block *block)
{
    const struct layer *layers = &model->layers[first];
    static const uint32_t kernels[UNITS] = {1, 3, 1};
    if (first + 10 >= model->layer_count)
        return false;
    for (uint32_t i = 0; i < UNITS; i++)
        if (!find_unit(&layers[3 * i], kernels[i], 0, &block->units[i]) ||
            (i < UNITS - 1 && layers[3 * i + 2].spec.kind != LAYER_RELU))
            return false;
    uint32_t end = 8;
    block->shortcut.conv = nullptr;
    if (layers[end].spec.kind == LAYER_CONV) {
        if (!find_unit(&layers[end], 1, 8, &block->shortcut))
            return false;
        end += 2;
    }
    block->first = first;
    block->end = first + end + 2;
    return block->end + 2 <= model->layer_count && layers[end].spec.kind == LAYER_ADD &&
           layers[end].spec.back == (block->shortcut.conv ? 3 : 9) && layers[end + 1].spec.kind == LAYER_RELU;
}

/* Sets the layers of the engine. Returns whether the network is a residual network of the supported kind. */
static bool find_layers(const struct model *model, struct resnet *resnet)
{
    const struct layer *layers = model->layers;
    uint32_t at = STEM;
    if (model->layer_count < STEM + 2 || !find_unit(layers, STEM_KERNEL, 0, &resnet->stem) ||
        layer_stride(layers, 1) != 2 || layers[2].spec.kind != LAYER_RELU || !is_pool(&layers[3]))
        return false;
    resnet->block_count = 0;
    while (at + 2 < model->layer_count) {
        if (resnet->block_count == BLOCKS_MAX || !find_block(model, at, &resnet->blocks[resnet->block_count]))
            return false;
        at = resnet->blocks[resnet->block_count++].end;
    }
    resnet->mean = &layers[at];
    resnet->head = &layers[at + 1];
    return resnet->block_count > 0 && layers[at].spec.kind == LAYER_MEAN &&
           layers[at + 1].spec.kind == LAYER_LINEAR;
}

/* Returns whether the kernels, which read 8 values at a time, support the numbers of channels. */
static bool has_channels(const struct model *model)
{
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        if (layer->spec.kind == LAYER_BATCH_NORM &&
            (layer->in.channels % 8 || layer->in.channels > RESNET_CHANNELS_MAX))
            return false;
    }
    return model->input.channels <= IMAGE_CHANNELS;
}

static enum status resnet_accepts(const struct train *train)
{
    const struct model *model = train->model;
    struct resnet *found = static_cast<struct resnet *>(calloc(1, sizeof *found));
    TRY(ALLOCATED(found, "resnet: out of memory"));
    const bool supported = find_layers(model, found);
    free(found);
    if (!supported)
        return status_set(
            STATUS_USAGE,
            "it supports only residual networks (resnet-micro, resnet50), but this is %s; use %s",
            model->name, train->forward_only ? "infer-cuda" : "train-cuda");
    if (!has_channels(model))
        return status_set(
            STATUS_USAGE,
            "it supports only images of up to %d channels, and up to %d channels in a multiple of 8 "
            "per layer; use %s",
            IMAGE_CHANNELS, RESNET_CHANNELS_MAX, train->forward_only ? "infer-naive" : "train-naive");
    const uint64_t pixels = (uint64_t)model->input.height * model->input.width;
    if (train_part_max(train) * pixels > INT32_MAX)
        return status_set(STATUS_TOO_LARGE,
                          "it supports at most %llu samples of this size per GPU; lower --batch",
                          (unsigned long long)(INT32_MAX / pixels));
    return STATUS_OK;
}

/* ---- Opening ---- */

static size_t rows_of(const struct conv_norm *unit, uint32_t count)
{
    return (size_t)count * unit->shape.out_height * unit->shape.out_width;
}

/* Calls visit(unit) for every convolution; ends at the first failure. */
template <class VISIT> static enum status each_unit(struct resnet *resnet, VISIT visit)
{
    TRY(visit(&resnet->stem));
    for (uint32_t i = 0; i < resnet->block_count; i++) {
        struct block *block = &resnet->blocks[i];
        for (struct conv_norm &unit : block->units)
            TRY(visit(&unit));
        if (block->shortcut.conv)
            TRY(visit(&block->shortcut));
    }
    return STATUS_OK;
}

/* Sets shape and normalisation of a unit, and allocates its weights. */
static enum status open_unit(struct resnet *resnet, struct conv_norm *unit, float *partial)
{
    const struct layer *conv = unit->conv;
    const bool stem = unit == &resnet->stem;
    const uint32_t channels = conv->out.channels;
    struct allocations *allocations = &resnet->allocations;
    unit->shape = stem ? stem_shape_of(conv->in.height, conv->in.width, channels)
                       : conv_shape_of(conv->in.height, conv->in.width, conv->in.channels, channels,
                                       conv->spec.kernel[1], layer_stride(conv, 1));
    const struct conv_shape *shape = &unit->shape;
    const size_t weights = (size_t)shape->kernel_y * shape->kernel_x * shape->channels * channels;
    unit->norm = {channels, resnet->state.parameters + unit->layer->weight,
                  resnet->state.parameters + unit->layer->bias, nullptr, partial};
    TRY(allocate_zeros(allocations, &unit->norm.values, (size_t)NORM_VALUES * channels, resnet->stream));
    TRY(allocate_zeros(allocations, &unit->weights, weights,
                       resnet->stream)); /* the stem has weights of zero */
    return stem || resnet->train->forward_only ? STATUS_OK : allocate(allocations, &unit->opposite, weights);
}

/* Returns the number of values of the largest tensor. */
static size_t most_values(struct resnet *resnet)
{
    size_t most = 0;
    (void)each_unit(resnet, [&](struct conv_norm *unit) {
        const size_t values = rows_of(unit, resnet->capacity) * unit->shape.outputs;
        most = values > most ? values : most;
        return STATUS_OK;
    });
    return most;
}

/* Allocates the outputs of a unit. For inference, all units share the arrays of `shared`. */
static enum status open_outputs(struct resnet *resnet, struct conv_norm *unit, bool active,
                                bf16 *const shared[2])
{
    const size_t values = rows_of(unit, resnet->capacity) * unit->shape.outputs;
    unit->raw = shared[0];
    unit->active = active ? shared[1] : nullptr;
    if (shared[0])
        return STATUS_OK;
    TRY(allocate(&resnet->allocations, &unit->raw, values));
    return active ? allocate(&resnet->allocations, &unit->active, values) : STATUS_OK;
}

/* For inference, the outputs of the blocks take turns in two arrays, and everything else is in four arrays.
 */
static enum status open_activations(struct resnet *resnet)
{
    const bool shared = resnet->train->forward_only;
    const size_t most = most_values(resnet);
    bf16 *arrays[6] = {};
    for (int i = 0; shared && i < 6; i++)
        TRY(allocate(&resnet->allocations, &arrays[i], most));
    bf16 *const of_stem[2] = {arrays[0], nullptr}, *const of_shortcut[2] = {arrays[1], nullptr};
    TRY(open_outputs(resnet, &resnet->stem, false, of_stem));
    const bf16 *inputs = resnet->pooled;
    for (uint32_t i = 0; i < resnet->block_count; i++) {
        struct block *block = &resnet->blocks[i];
        const struct conv_norm *last = &block->units[UNITS - 1];
        block->inputs = inputs;
        for (uint32_t u = 0; u < UNITS; u++) {
            bf16 *const own[2] = {arrays[0], arrays[2 + u % 2]};
            TRY(open_outputs(resnet, &block->units[u], u < UNITS - 1, own));
        }
        if (block->shortcut.conv)
            TRY(open_outputs(resnet, &block->shortcut, false, of_shortcut));
        block->outputs = arrays[4 + i % 2];
        if (!shared)
            TRY(allocate(&resnet->allocations, &block->outputs,
                         rows_of(last, resnet->capacity) * last->shape.outputs));
        inputs = block->outputs;
    }
    return STATUS_OK;
}

static enum status open_packs(struct resnet *resnet)
{
    struct resnet_pack packs[1 + BLOCKS_MAX * (UNITS + 1)];
    (void)each_unit(resnet, [&](struct conv_norm *unit) {
        const struct layer *conv = unit->conv;
        packs[resnet->pack_count++] = {
            conv->weight,          conv->out.channels, conv->in.channels, conv->spec.kernel[1], 0,
            unit == &resnet->stem, unit->weights,      unit->opposite};
        return STATUS_OK;
    });
    resnet->pack_blocks = resnet_pack_blocks(packs, resnet->pack_count);
    TRY(allocate_copy(&resnet->allocations, &resnet->packs, packs, resnet->pack_count * sizeof *packs,
                      resnet->stream));
    return CUDA_STATUS(cudaStreamSynchronize(resnet->stream));
}

/* Returns the largest number of partial sums that a kernel writes for a normalisation, times its channels. */
static size_t most_partial(struct resnet *resnet)
{
    size_t most = 0;
    (void)each_unit(resnet, [&](struct conv_norm *unit) {
        /* A convolution that reads the outputs of this unit has stride 1 or 2, hence up to three parts more.
         */
        const size_t parts = resnet_parts(rows_of(unit, resnet->capacity)) + 3;
        const size_t values = (parts > RESNET_PARTS ? parts : RESNET_PARTS) * 2 * unit->shape.outputs;
        most = values > most ? values : most;
        return STATUS_OK;
    });
    return most;
}

static enum status open_units(struct resnet *resnet)
{
    struct allocations *allocations = &resnet->allocations;
    const struct layer *pool = &resnet->train->model->layers[STEM - 1];
    TRY(each_unit(resnet, [&](struct conv_norm *unit) { return open_unit(resnet, unit, nullptr); }));
    for (float *&partial : resnet->partial)
        TRY(allocate(allocations, &partial, most_partial(resnet)));
    TRY(each_unit(resnet, [&](struct conv_norm *unit) {
        unit->norm.partial = resnet->partial[0];
        return STATUS_OK;
    }));
    for (uint32_t i = 0; i < resnet->block_count; i++)
        resnet->blocks[i].shortcut.norm.partial = resnet->partial[1];
    resnet->pool = {pool->in.height, pool->in.width, pool->out.height, pool->out.width, resnet->stem.norm};
    TRY(allocate_zeros(allocations, &resnet->images, (size_t)resnet->capacity * resnet->stem.shape.image,
                       resnet->stream));
    const size_t pooled = (size_t)resnet->capacity * pool->out_values;
    TRY(allocate(allocations, &resnet->pooled, pooled));
    TRY(allocate(allocations, &resnet->largest, pooled));
    TRY(allocate(allocations, &resnet->means, (size_t)resnet->capacity * resnet->mean->out_values));
    TRY(allocate(allocations, &resnet->logits, (size_t)resnet->capacity * resnet->train->model->classes));
    TRY(open_packs(resnet));
    return open_activations(resnet);
}

static enum status open_learning(struct resnet *resnet)
{
    const struct train *train = resnet->train;
    struct allocations *allocations = &resnet->allocations;
    const size_t most = most_values(resnet), classes = train->model->classes;
    size_t room = 0;
    (void)each_unit(resnet, [&](struct conv_norm *unit) {
        /* Short batches may have fewer pixels per part, but not more parts. */
        const size_t values = resnet_room(&unit->shape, resnet->capacity);
        room = values > room ? values : room;
        return STATUS_OK;
    });
    allocations->part = MEMORY_WORKSPACE;
    TRY(allocate(allocations, &resnet->room, room));
    if (train->sync_batch_norm && train->exchange)
        TRY(allocate(allocations, &resnet->norm_sums, (size_t)2 * RESNET_CHANNELS_MAX));
    allocations->part = MEMORY_ACTIVATIONS;
    for (bf16 **each : {&resnet->out_deltas, &resnet->in_deltas, &resnet->last_deltas, &resnet->mid_deltas,
                        &resnet->first_deltas})
        TRY(allocate(allocations, each, most));
    TRY(allocate(allocations, &resnet->sums.room, VIT_SUMS_MAX * VIT_SAMPLE_PARTS * classes));
    TRY(allocate(allocations, &resnet->logit_deltas, resnet->capacity * classes));
    TRY(allocate(allocations, &resnet->logit_rounded, (size_t)resnet->capacity * resnet->logit_apart));
    TRY(allocate(allocations, &resnet->mean_deltas, (size_t)resnet->capacity * resnet->mean->out_values));
    resnet->shared.rounded = resnet->parameters;
    resnet->tensors.tensor_cores = true;
    return device_engine_open_learning(resnet);
}

/* Opens a state that device_engine_new() has created. The caller closes it, even after a failure. */
static enum status resnet_open_all(struct resnet *resnet)
{
    const struct train *train = resnet->train;
    const size_t values = train->model->arena_values;
    TRY(device_probe(resnet->device));
    TRY(resnet_accepts(train));
    (void)find_layers(train->model, resnet);
    resnet->logit_apart = (train->model->classes + 7) / 8 * 8;
    TRY(device_engine_open(resnet));
    resnet->allocations.part = MEMORY_WORKSPACE;
    TRY(vit_multiplier_open(&resnet->allocations, &resnet->multiplier));
    resnet->allocations.part = MEMORY_PARAMETERS;
    TRY(allocate_zeros(&resnet->allocations, &resnet->state.parameters, values, resnet->stream));
    TRY(allocate(&resnet->allocations, &resnet->parameters, values));
    resnet->allocations.part = MEMORY_ACTIVATIONS;
    TRY(open_units(resnet));
    TRY(device_batch_allocate(train, resnet->capacity, &resnet->samples, &resnet->allocations));
    resnet->batch = &resnet->samples;
    TRY(device_engine_open_data(resnet));
    if (!train->forward_only)
        TRY(open_learning(resnet));
    return CUDA_STATUS(cudaStreamSynchronize(resnet->stream));
}

/* ---- Forward pass ---- */

/* The step that a pass computes. */
struct batch_of {
    uint32_t count, total; /* samples of this rank, and of all ranks */
    bool training;
};

/* Adds up the sums of a normalisation over all ranks. Work that is enqueued afterwards may use them. */
static enum status add_up_shared(struct resnet *resnet, const struct conv_norm *unit)
{
    struct exchange *exchange = resnet->train->exchange;
    TRY(exchange->method->begin(exchange, resnet->norm_sums, 2 * (size_t)unit->norm.channels,
                                resnet->stream));
    return exchange->method->end(exchange, resnet->stream);
}

static struct resnet_shared shared_of(const struct resnet *resnet, const struct conv_norm *unit,
                                      const struct batch_of *of)
{
    return {rows_of(unit, of->count), rows_of(unit, of->total), resnet->norm_sums};
}

/* Computes the statistics of a normalisation over the samples of all ranks. */
static enum status moments_shared(struct resnet *resnet, const struct conv_norm *unit,
                                  const struct batch_of *of)
{
    const struct layer *layer = unit->layer;
    const struct resnet_shared shared = shared_of(resnet, unit, of);
    const float *shift = resnet->state.parameters + layer->mean;
    TRY(resnet_shared_moments_begin(&unit->norm, &shared, resnet_parts(shared.rows), shift, resnet->stream));
    TRY(add_up_shared(resnet, unit));
    return resnet_shared_moments_end(&unit->norm, &shared, shift, resnet->gradients + layer->mean,
                                     resnet->gradients + layer->variance, resnet->stream);
}

/* Computes a convolution and what its normalisation needs. */
static enum status unit_forward(struct resnet *resnet, const struct conv_norm *unit, const bf16 *inputs,
                                const struct batch_of *of)
{
    const struct layer *layer = unit->layer;
    const size_t rows = rows_of(unit, of->count);
    TRY(resnet_forward(&unit->shape, of->count, inputs, unit->weights, unit->raw,
                       of->training ? unit->norm.partial : nullptr, resnet->stream));
    if (!of->training)
        return resnet_running(&unit->norm, resnet->state.parameters + layer->mean,
                              resnet->state.parameters + layer->variance, resnet->stream);
    if (resnet->norm_sums)
        return moments_shared(resnet, unit, of);
    return resnet_moments(&unit->norm, resnet_parts(rows), rows, (float)of->count / (float)of->total,
                          resnet->gradients + layer->mean, resnet->gradients + layer->variance,
                          resnet->stream);
}

static enum status block_forward(struct resnet *resnet, const struct block *block, const struct batch_of *of)
{
    const struct conv_norm *last = &block->units[UNITS - 1];
    const bf16 *inputs = block->inputs;
    for (const struct conv_norm &unit : block->units) {
        TRY(unit_forward(resnet, &unit, inputs, of));
        if (unit.active)
            TRY(resnet_apply(&unit.norm, rows_of(&unit, of->count), unit.raw, nullptr, nullptr, unit.active,
                             resnet->stream));
        inputs = unit.active;
    }
    if (block->shortcut.conv)
        TRY(unit_forward(resnet, &block->shortcut, block->inputs, of));
    return resnet_apply(&last->norm, rows_of(last, of->count), last->raw,
                        block->shortcut.conv ? &block->shortcut.norm : nullptr,
                        block->shortcut.conv ? block->shortcut.raw : block->inputs, block->outputs,
                        resnet->stream);
}

static uint32_t mean_pixels(const struct resnet *resnet)
{
    return resnet->mean->in.height * resnet->mean->in.width;
}

static struct vit_linear head_of(const struct resnet *resnet, uint32_t count, uint32_t apart)
{
    return {count, (uint32_t)resnet->head->in_values, resnet->head->out.channels, apart};
}

/* Adds up the sums of all normalisations, in the order of forward_pass(), on a rank without samples. */
static enum status forward_idle(struct resnet *resnet, const struct batch_of *of)
{
    return each_unit(resnet, [&](const struct conv_norm *unit) { return moments_shared(resnet, unit, of); });
}

/* Computes the logits of the samples in resnet->images. */
static enum status forward_pass(struct resnet *resnet, const struct batch_of *of)
{
    const struct block *last = &resnet->blocks[resnet->block_count - 1];
    const struct vit_linear head = head_of(resnet, of->count, resnet->head->out.channels);
    if (of->count == 0)
        return forward_idle(resnet, of);
    TRY(resnet_pack(resnet->packs, resnet->pack_count, resnet->pack_blocks, resnet->parameters,
                    resnet->stream));
    TRY(unit_forward(resnet, &resnet->stem, resnet->images, of));
    TRY(resnet_pool_forward(&resnet->pool, of->count, resnet->stem.raw, resnet->pooled, resnet->largest,
                            resnet->stream));
    for (uint32_t i = 0; i < resnet->block_count; i++)
        TRY(block_forward(resnet, &resnet->blocks[i], of));
    TRY(resnet_mean(of->count, mean_pixels(resnet), resnet->mean->in.channels, last->outputs, resnet->means,
                    resnet->stream));
    return vit_linear_forward(resnet->multiplier, &head, true, resnet->means,
                              resnet->parameters + resnet->head->weight,
                              resnet->state.parameters + resnet->head->bias, resnet->logits, resnet->stream);
}

/* ---- Backward pass ---- */

/* Replaces the gradients of a normalisation's outputs by those of its inputs, whose sums are in `parts`
 * parts. Computes the gradients of its parameters. */
static enum status norm_backward(struct resnet *resnet, const struct conv_norm *unit, uint32_t parts,
                                 const struct batch_of *of, const bf16 *deltas, bf16 *in_deltas)
{
    const size_t rows = rows_of(unit, of->count);
    float *weight = resnet->gradients + unit->layer->weight, *bias = resnet->gradients + unit->layer->bias;
    if (resnet->norm_sums) {
        const struct resnet_shared shared = shared_of(resnet, unit, of);
        TRY(resnet_shared_slopes_begin(&unit->norm, &shared, parts, weight, bias, resnet->stream));
        TRY(add_up_shared(resnet, unit));
        TRY(resnet_shared_slopes_end(&unit->norm, &shared, resnet->stream));
    } else
        TRY(resnet_slopes(&unit->norm, parts, rows, weight, bias, resnet->stream));
    if (of->count == 0)
        return STATUS_OK;
    return resnet_norm_backward(&unit->norm, rows, deltas, unit->raw, in_deltas, resnet->stream);
}

static enum status weights_backward(struct resnet *resnet, const struct conv_norm *unit, uint32_t count,
                                    const bf16 *inputs, const bf16 *deltas)
{
    const bool stem = unit == &resnet->stem;
    return resnet_weights(&unit->shape, count, inputs, deltas,
                          stem ? resnet->train->model->input.channels : 0, resnet->room,
                          resnet->gradients + unit->conv->weight, resnet->stream);
}

/* Returns what happens to the gradient of the outputs of a block: the mask of its ReLU, and the sums of the
 * normalisations before the addition. */
static struct resnet_after after_block(const struct block *block, const bf16 *added)
{
    const struct conv_norm *last = &block->units[UNITS - 1], *shortcut = &block->shortcut;
    struct resnet_after after = {added, block->outputs, {{&last->norm, last->raw}, {}}};
    if (shortcut->conv)
        after.summed[1] = {&shortcut->norm, shortcut->raw};
    return after;
}

/* Adds up the sums of the normalisations of a block, in the order of block_backward(), on a rank without
 * samples. */
static enum status block_idle(struct resnet *resnet, const struct block *block, const struct batch_of *of)
{
    for (uint32_t u = UNITS; u-- > 0;)
        TRY(norm_backward(resnet, &block->units[u], 0, of, nullptr, nullptr));
    return block->shortcut.conv ? norm_backward(resnet, &block->shortcut, 0, of, nullptr, nullptr)
                                : STATUS_OK;
}

/* Backward pass of a block. Replaces resnet->out_deltas, the gradients of its outputs, by those of the
 * outputs of the block before it. `*parts` is the number of partial sums that belong to these gradients. */
static enum status block_backward(struct resnet *resnet, uint32_t index, const struct batch_of *of,
                                  uint32_t *parts)
{
    struct block *block = &resnet->blocks[index];
    const struct conv_norm *units = block->units, *shortcut = &block->shortcut;
    const struct resnet_after nothing = {};
    const bf16 *added = resnet->out_deltas;
    const uint32_t count = of->count;
    uint32_t ignored, out_parts = *parts;
    TRY(norm_backward(resnet, &units[2], out_parts, of, resnet->out_deltas, resnet->last_deltas));
    TRY(weights_backward(resnet, &units[2], count, units[1].active, resnet->last_deltas));
    const struct resnet_after second = {nullptr, units[1].active, {{&units[1].norm, units[1].raw}, {}}};
    TRY(resnet_inputs(&units[2].shape, count, resnet->last_deltas, units[2].opposite, &second,
                      resnet->mid_deltas, parts, resnet->stream));
    TRY(norm_backward(resnet, &units[1], *parts, of, resnet->mid_deltas, resnet->mid_deltas));
    TRY(weights_backward(resnet, &units[1], count, units[0].active, resnet->mid_deltas));
    const struct resnet_after first = {nullptr, units[0].active, {{&units[0].norm, units[0].raw}, {}}};
    TRY(resnet_inputs(&units[1].shape, count, resnet->mid_deltas, units[1].opposite, &first,
                      resnet->first_deltas, parts, resnet->stream));
    TRY(norm_backward(resnet, &units[0], *parts, of, resnet->first_deltas, resnet->first_deltas));
    TRY(weights_backward(resnet, &units[0], count, block->inputs, resnet->first_deltas));
    if (shortcut->conv) {
        TRY(norm_backward(resnet, shortcut, out_parts, of, resnet->out_deltas, resnet->last_deltas));
        TRY(weights_backward(resnet, shortcut, count, block->inputs, resnet->last_deltas));
        TRY(resnet_inputs(&shortcut->shape, count, resnet->last_deltas, shortcut->opposite, &nothing,
                          resnet->in_deltas, &ignored, resnet->stream));
        bf16 *const deltas = resnet->in_deltas;
        resnet->in_deltas = resnet->out_deltas;
        resnet->out_deltas = deltas;
        added = deltas;
    }
    struct resnet_after before = {added, nullptr, {}};
    if (index > 0)
        before = after_block(&resnet->blocks[index - 1], added);
    return resnet_inputs(&units[0].shape, count, resnet->first_deltas, units[0].opposite, &before,
                         resnet->out_deltas, parts, resnet->stream);
}

/* Backward pass of the mean and the head. */
static enum status head_backward(struct resnet *resnet, uint32_t count, uint32_t *parts)
{
    const struct layer *head = resnet->head;
    const struct vit_linear linear = head_of(resnet, count, resnet->logit_apart);
    const struct resnet_after after = after_block(&resnet->blocks[resnet->block_count - 1], nullptr);
    TRY(vit_logits_backward(resnet->logit_deltas, count, head->out.channels, resnet->logit_apart,
                            resnet->logit_rounded, resnet->gradients + head->bias, &resnet->sums,
                            resnet->stream));
    TRY(vit_sums_finish(&resnet->sums, resnet->stream));
    TRY(vit_linear_weights(resnet->multiplier, &linear, resnet->logit_rounded, resnet->means,
                           resnet->gradients + head->weight, resnet->stream));
    TRY(vit_linear_inputs(resnet->multiplier, &linear, resnet->logit_rounded,
                          resnet->parameters + head->weight, resnet->mean_deltas, resnet->stream));
    return resnet_mean_backward(count, mean_pixels(resnet), resnet->mean->in.channels, resnet->mean_deltas,
                                &after, resnet->out_deltas, parts, resnet->stream);
}

/* Backward pass of the pooling and the first convolution. */
static enum status stem_backward(struct resnet *resnet, const struct batch_of *of)
{
    const uint32_t count = of->count;
    uint32_t parts;
    TRY(resnet_pool_backward(&resnet->pool, count, resnet->out_deltas, resnet->largest, resnet->stem.raw,
                             resnet->last_deltas, &parts, resnet->stream));
    TRY(norm_backward(resnet, &resnet->stem, parts, of, resnet->last_deltas, resnet->last_deltas));
    return weights_backward(resnet, &resnet->stem, count, resnet->images, resnet->last_deltas);
}

/* Computes and exchanges the gradients of a step. A rank without samples contributes zeros. */
static enum status backward_pass(struct resnet *resnet, const struct batch_of *of)
{
    const struct model *model = resnet->train->model;
    const bool idle = of->count == 0;
    size_t end = model->arena_values;
    uint32_t parts = 0;
    if (idle)
        CUDA_TRY(cudaMemsetAsync(resnet->gradients, 0, end * sizeof *resnet->gradients, resnet->stream));
    else
        TRY(head_backward(resnet, of->count, &parts));
    TRY(device_engine_exchange(resnet, model->layer_count - 2, model->layer_count, &end));
    for (uint32_t i = resnet->block_count; i-- > 0;) {
        if (!idle)
            TRY(block_backward(resnet, i, of, &parts));
        else if (resnet->norm_sums)
            TRY(block_idle(resnet, &resnet->blocks[i], of));
        TRY(device_engine_exchange(resnet, resnet->blocks[i].first, resnet->blocks[i].end, &end));
    }
    if (!idle)
        TRY(stem_backward(resnet, of));
    else if (resnet->norm_sums)
        TRY(norm_backward(resnet, &resnet->stem, 0, of, nullptr, nullptr));
    TRY(device_engine_exchange(resnet, 0, STEM, &end));
    return device_engine_exchange_end(resnet);
}

/* ---- Graphs ---- */

/* Captures the forward or the backward pass. The mode is relaxed, because cuBLASLt loads its kernels when
 * they are first used. */
static enum status record(struct resnet *resnet, const struct batch_of *of, bool back, cudaGraphExec_t *into)
{
    CUDA_TRY(cudaStreamBeginCapture(resnet->stream, cudaStreamCaptureModeRelaxed));
    return capture_end(resnet->stream, back ? backward_pass(resnet, of) : forward_pass(resnet, of), into);
}

static void graphs_close(struct resnet_graphs *graphs)
{
    destroy(graphs->forward, graphs->backward);
    *graphs = {};
}

/* Returns the graphs for a step, and captures them if they do not exist. If all entries are in use, replaces
 * the last one. */
static enum status graphs_for(struct resnet *resnet, const struct batch_of *of, struct resnet_graphs **into)
{
    struct resnet_graphs *graphs = resnet->graphs, *last = resnet->graphs + GRAPHS - 1;
    while (graphs < last && graphs->backward && (graphs->count != of->count || graphs->total != of->total))
        graphs++;
    *into = graphs;
    if (graphs->backward && graphs->count == of->count && graphs->total == of->total)
        return STATUS_OK;
    CUDA_TRY(cudaStreamSynchronize(resnet->stream));
    graphs_close(graphs);
    graphs->count = of->count;
    graphs->total = of->total;
    if (of->count > 0 || resnet->norm_sums)
        TRY(record(resnet, of, false, &graphs->forward));
    return record(resnet, of, true, &graphs->backward);
}

static enum status launch(struct resnet *resnet, cudaGraphExec_t graph)
{
    RANGE(GRAPH);
    return CUDA_STATUS(cudaGraphLaunch(graph, resnet->stream));
}

/* ---- Steps ---- */

static enum status gather(struct device_engine *engine, const struct device_set *set, uint32_t epoch,
                          bool training, uint32_t count)
{
    struct resnet *resnet = resnet_of(engine);
    (void)epoch, (void)training;
    return resnet_gather(resnet->train->data, set, resnet->batch, count, &resnet->stem.shape, resnet->images,
                         resnet->stream);
}

static enum status apply(struct device_engine *engine, const struct update *update)
{
    RANGE(UPDATE);
    return device_engine_update(engine, update, resnet_of(engine)->parameters);
}

/* Computes the gradients of a step, which has one part; see struct device_engine_functions. */
static enum status learn_part(struct device_engine *engine, uint32_t epoch, uint32_t step,
                              const struct share *part, uint32_t index)
{
    struct resnet *resnet = resnet_of(engine);
    const struct batch_of of = {(uint32_t)part->count, (uint32_t)part->total, true};
    const uint64_t number = (uint64_t)epoch * train_steps(resnet->train) + step;
    struct pass pass = {};
    struct resnet_graphs *graphs;
    (void)index;
    pass.stream = resnet->stream;
    pass.count = of.count;
    pass.total = of.total;
    TRY(graphs_for(resnet, &of, &graphs));
    if (graphs->forward)
        TRY(launch(resnet, graphs->forward));
    if (of.count > 0)
        TRY(loss_take(resnet->train, resnet->logits, resnet->batch, &pass, number, resnet->logit_deltas,
                      &resnet->losses));
    return launch(resnet, graphs->backward);
}

static enum status infer(struct device_engine *engine, uint32_t count, const float **logits)
{
    struct resnet *resnet = resnet_of(engine);
    const struct batch_of of = {count, count, false};
    *logits = resnet->logits;
    return forward_pass(resnet, &of);
}

/* ---- The engine ---- */

static enum status resnet_open(const struct train *train, const struct resources *resources, void **state)
{
    static const struct device_engine_functions functions = {
        .gather = gather, .learn_part = learn_part, .update = apply, .infer = infer};
    TRY(device_engine_new<struct resnet>(train, resources, &functions, state));
    return resnet_open_all(device_engine_as<struct resnet>(*state));
}

static void resnet_close(void *state)
{
    struct resnet *resnet = device_engine_as<struct resnet>(state);
    device_engine_stop(resnet);
    for (struct resnet_graphs &graphs : resnet->graphs)
        graphs_close(&graphs);
    vit_multiplier_close(resnet->multiplier);
    device_engine_close(resnet);
    free(resnet);
}

/* Returns the stored output of a layer in NHWC order; NULL if there is none. */
static const bf16 *stored_output(struct resnet *resnet, uint32_t layer)
{
    const bf16 *found = layer == STEM - 1               ? resnet->pooled
                        : layer == resnet->mean->number ? resnet->means
                                                        : nullptr;
    (void)each_unit(resnet, [&](const struct conv_norm *unit) {
        if (layer == unit->conv->number)
            found = unit->raw;
        if (unit->active && layer == unit->conv->number + 2)
            found = unit->active;
        return STATUS_OK;
    });
    for (uint32_t i = 0; i < resnet->block_count; i++)
        if (layer == resnet->blocks[i].end - 1)
            found = resnet->blocks[i].outputs;
    return found;
}

enum status resnet_output(void *state, uint32_t layer, uint32_t count, float *values)
{
    struct resnet *resnet = device_engine_as<struct resnet>(state);
    const struct layer *of = &resnet->train->model->layers[layer];
    const size_t all = count * of->out_values, channels = of->out.channels,
                 pixels = of->out_values / channels;
    CUDA_TRY(cudaStreamSynchronize(resnet->stream));
    if (of == resnet->head)
        return CUDA_STATUS(cudaMemcpy(values, resnet->logits, all * sizeof *values, cudaMemcpyDeviceToHost));
    const bf16 *stored = stored_output(resnet, layer);
    if (!stored)
        return status_set(STATUS_UNAVAILABLE, "resnet: the output of %s is not stored", of->name);
    bf16 *copy = static_cast<bf16 *>(malloc(all * sizeof *copy));
    TRY(ALLOCATED(copy, "resnet: out of memory"));
    const enum status status =
        CUDA_STATUS(cudaMemcpy(copy, stored, all * sizeof *copy, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < all; i++) { /* i: (sample, channel, pixel) */
        const size_t sample = i / of->out_values, channel = i / pixels % channels, pixel = i % pixels;
        values[i] = __bfloat162float(copy[(sample * pixels + pixel) * channels + channel]);
    }
    free(copy);
    return status;
}

static enum status resnet_set(void *state, const struct train_state *from)
{
    struct resnet *resnet = device_engine_as<struct resnet>(state);
    TRY(device_engine_set(state, from));
    TRY(vit_round(resnet->state.parameters, resnet->train->model->arena_values, resnet->parameters,
                  resnet->stream));
    return CUDA_STATUS(cudaStreamSynchronize(resnet->stream));
}

extern "C" {
const struct engine engine_resnet = {
    .name = "resnet",
    /* Rounding to bf16 changes the sign of inputs of ReLU and the maxima of the pooling. The changed masks
     * make most of the error of the gradients, which grows from layer to layer on the way back. With fp16,
     * which has three bits more, the errors are a third: they are in proportion to the root of the rounding.
     */
    .bounds = {.loss = 5e-2, .floor = 1, .drift = 0.9, .logits = 5e-2},
    .feeds = true,
    .augments = true,
    .gradients_in = GRADIENTS_IN_GRAPH,
    .shares_update = true,
    .unit = UNIT_HALF,
    .accepts = resnet_accepts,
    .open = resnet_open,
    .close = resnet_close,
    .set = resnet_set,
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

static enum status probe_resnet(const struct resources *resources)
{
    TRY(vit_multiplier_probe());
    return device_probe(resources->device);
}

extern "C" {
extern const struct variant variant_train_resnet, variant_infer_resnet;
const struct variant variant_train_resnet = training_by<&engine_resnet>(false, probe_resnet);
const struct variant variant_infer_resnet = inferring_by<&engine_resnet>(false, probe_resnet);
}
