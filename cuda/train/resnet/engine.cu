/* The engines of `train-resnet`, `train-resnet-amp` and `infer-resnet`: residual networks with batch
 * normalisation. A step gathers its samples, replays the CUDA graph of the forward pass, computes the loss,
 * replays the graph of the backward pass, and updates the parameters. Each number of samples needs its own
 * graphs. `infer-resnet` also replays a graph.
 *
 * Backward, every block begins with the gradient of its output after the ReLU's mask, and with the sums that
 * its last normalisation needs. The convolution that computes this gradient also applies the mask and adds
 * up. */
#include <stdlib.h>
#include <type_traits>

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
template <class T> struct conv_norm {
    const struct layer *conv, *layer; /* `layer`: of the normalisation */
    struct conv_shape shape;
    struct resnet_norm norm;
    T *weights, *opposite;
    T *raw, *active; /* output of the convolution, and of the ReLU */
};

template <class T> struct block {
    struct conv_norm<T> units[UNITS];
    struct conv_norm<T> shortcut; /* without a convolution, shortcut.conv is NULL */
    uint32_t first, end;          /* its layers in the model's table */
    const T *inputs;
    T *outputs;
};

/* The CUDA graphs for steps with `count` samples on this rank and `total` on all ranks. */
struct resnet_graphs {
    uint32_t count, total;
    cudaGraphExec_t forward, backward;
    bool complete;
};

template <class T> struct resnet : device_engine {
    struct vit_multiplier *multiplier; /* of the last layer */

    struct conv_norm<T> stem;
    struct resnet_pool pool;
    struct block<T> blocks[BLOCKS_MAX];
    uint32_t block_count;
    const struct layer *mean, *head;
    uint32_t logit_apart; /* distance between rows of logit_rounded */

    T *parameters; /* rounded to 16 bits */
    struct resnet_packing<T> *packs;
    uint32_t pack_count, pack_blocks;
    struct vit_sums sums;
    float *partial[2]; /* partial sums of a block's last normalisation and of its shortcut's */
    float *room;       /* of resnet_weights() */
    float *norm_sums;  /* of struct resnet_shared; NULL: each rank normalises over its own samples */

    T *images, *pooled, *means;
    uint8_t *largest;
    float *logits, *logit_deltas;
    T *logit_rounded, *mean_deltas;
    float *head_inputs, *head_deltas; /* see struct vit_head */
    /* Gradients, each with room for the largest tensor: of a block's outputs and inputs, and inside a block.
     */
    T *out_deltas, *in_deltas, *last_deltas, *mid_deltas, *first_deltas;

    struct device_batch samples; /* `batch` points to it */
    struct resnet_graphs graphs[GRAPHS];
};

template <class T> static resnet<T> *resnet_of(struct device_engine *engine)
{
    return static_cast<struct resnet<T> *>(engine);
}

template <class T> static resnet<T> *resnet_at(void *state)
{
    return device_engine_as<struct resnet<T>>(state);
}

/* ---- Supported networks ---- */

/* Sets `*unit` to the layers from `layer` on, if they are a convolution of this kernel with padding kernel /
 * 2 and a normalisation. */
template <class T>
static bool find_unit(const struct layer *layer, uint32_t kernel, uint32_t skipped, struct conv_norm<T> *unit)
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
template <class T> static bool find_block(const struct model *model, uint32_t first, struct block<T> *block)
{
    const struct layer *layers = &model->layers[first];
    static const uint32_t kernels[UNITS] = {1, 3, 1};
    if (first + 10 >= model->layer_count)
        return false;
    for (uint32_t i = 0; i < UNITS; i++)
        if (!find_unit<T>(&layers[3 * i], kernels[i], 0, &block->units[i]) ||
            (i < UNITS - 1 && layers[3 * i + 2].spec.kind != LAYER_RELU))
            return false;
    uint32_t end = 8;
    block->shortcut.conv = nullptr;
    if (layers[end].spec.kind == LAYER_CONV) {
        if (!find_unit<T>(&layers[end], 1, 8, &block->shortcut))
            return false;
        end += 2;
    }
    block->first = first;
    block->end = first + end + 2;
    return block->end + 2 <= model->layer_count && layers[end].spec.kind == LAYER_ADD &&
           layers[end].spec.back == (block->shortcut.conv ? 3 : 9) && layers[end + 1].spec.kind == LAYER_RELU;
}

/* Sets the layers of the engine. Returns whether the network is a residual network of the supported kind. */
template <class T> static bool find_layers(const struct model *model, struct resnet<T> *resnet)
{
    const struct layer *layers = model->layers;
    uint32_t at = STEM;
    if (model->layer_count < STEM + 2 || !find_unit<T>(layers, STEM_KERNEL, 0, &resnet->stem) ||
        layer_stride(layers, 1) != 2 || layers[2].spec.kind != LAYER_RELU || !is_pool(&layers[3]))
        return false;
    resnet->block_count = 0;
    while (at + 2 < model->layer_count) {
        if (resnet->block_count == BLOCKS_MAX ||
            !find_block<T>(model, at, &resnet->blocks[resnet->block_count]))
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

template <class T> static enum status resnet_accepts(const struct train *train)
{
    const struct model *model = train->model;
    struct resnet<T> *found = static_cast<struct resnet<T> *>(calloc(1, sizeof *found));
    TRY(ALLOCATED(found, "resnet: out of memory"));
    const bool supported = find_layers<T>(model, found);
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

template <class T> static size_t rows_of(const struct conv_norm<T> *unit, uint32_t count)
{
    return (size_t)count * unit->shape.out_height * unit->shape.out_width;
}

/* Calls visit(unit) for every convolution; ends at the first failure. */
template <class T, class VISIT> static enum status each_unit(struct resnet<T> *resnet, VISIT visit)
{
    TRY(visit(&resnet->stem));
    for (uint32_t i = 0; i < resnet->block_count; i++) {
        struct block<T> *block = &resnet->blocks[i];
        for (struct conv_norm<T> &unit : block->units)
            TRY(visit(&unit));
        if (block->shortcut.conv)
            TRY(visit(&block->shortcut));
    }
    return STATUS_OK;
}

/* Sets shape and normalisation of a unit, and allocates its weights. */
template <class T>
static enum status open_unit(struct resnet<T> *resnet, struct conv_norm<T> *unit, float *partial)
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
template <class T> static size_t most_values(struct resnet<T> *resnet)
{
    size_t most = 0;
    (void)each_unit<T>(resnet, [&](struct conv_norm<T> *unit) {
        const size_t values = rows_of<T>(unit, resnet->capacity) * unit->shape.outputs;
        most = values > most ? values : most;
        return STATUS_OK;
    });
    return most;
}

/* Allocates the outputs of a unit. For inference, all units share the arrays of `shared`. */
template <class T>
static enum status open_outputs(struct resnet<T> *resnet, struct conv_norm<T> *unit, bool active,
                                T *const shared[2])
{
    const size_t values = rows_of<T>(unit, resnet->capacity) * unit->shape.outputs;
    unit->raw = shared[0];
    unit->active = active ? shared[1] : nullptr;
    if (shared[0])
        return STATUS_OK;
    TRY(allocate(&resnet->allocations, &unit->raw, values));
    return active ? allocate(&resnet->allocations, &unit->active, values) : STATUS_OK;
}

/* For inference, the outputs of the blocks take turns in two arrays, and everything else is in four arrays.
 */
template <class T> static enum status open_activations(struct resnet<T> *resnet)
{
    const bool shared = resnet->train->forward_only;
    const size_t most = most_values<T>(resnet);
    T *arrays[6] = {};
    for (int i = 0; shared && i < 6; i++)
        TRY(allocate(&resnet->allocations, &arrays[i], most));
    T *const of_stem[2] = {arrays[0], nullptr}, *const of_shortcut[2] = {arrays[1], nullptr};
    TRY(open_outputs<T>(resnet, &resnet->stem, false, of_stem));
    const T *inputs = resnet->pooled;
    for (uint32_t i = 0; i < resnet->block_count; i++) {
        struct block<T> *block = &resnet->blocks[i];
        const struct conv_norm<T> *last = &block->units[UNITS - 1];
        block->inputs = inputs;
        for (uint32_t u = 0; u < UNITS; u++) {
            T *const own[2] = {arrays[0], arrays[2 + u % 2]};
            TRY(open_outputs<T>(resnet, &block->units[u], u < UNITS - 1, own));
        }
        if (block->shortcut.conv)
            TRY(open_outputs<T>(resnet, &block->shortcut, false, of_shortcut));
        block->outputs = arrays[4 + i % 2];
        if (!shared)
            TRY(allocate(&resnet->allocations, &block->outputs,
                         rows_of<T>(last, resnet->capacity) * last->shape.outputs));
        inputs = block->outputs;
    }
    return STATUS_OK;
}

template <class T> static enum status open_packs(struct resnet<T> *resnet)
{
    struct resnet_packing<T> packs[1 + BLOCKS_MAX * (UNITS + 1)];
    (void)each_unit<T>(resnet, [&](struct conv_norm<T> *unit) {
        const struct layer *conv = unit->conv;
        packs[resnet->pack_count++] = {
            conv->weight,          conv->out.channels, conv->in.channels, conv->spec.kernel[1], 0,
            unit == &resnet->stem, unit->weights,      unit->opposite};
        return STATUS_OK;
    });
    resnet->pack_blocks = resnet_pack_blocks<T>(packs, resnet->pack_count);
    TRY(allocate_copy(&resnet->allocations, &resnet->packs, packs, resnet->pack_count * sizeof *packs,
                      resnet->stream));
    return CUDA_STATUS(cudaStreamSynchronize(resnet->stream));
}

/* Returns the largest number of partial sums that a kernel writes for a normalisation, times its channels. */
template <class T> static size_t most_partial(struct resnet<T> *resnet)
{
    size_t most = 0;
    (void)each_unit<T>(resnet, [&](struct conv_norm<T> *unit) {
        /* A convolution that reads the outputs of this unit has stride 1 or 2, hence up to three parts more.
         */
        const size_t parts = resnet_parts(rows_of<T>(unit, resnet->capacity)) + 3;
        const size_t values = (parts > RESNET_PARTS ? parts : RESNET_PARTS) * 2 * unit->shape.outputs;
        most = values > most ? values : most;
        return STATUS_OK;
    });
    return most;
}

template <class T> static enum status open_units(struct resnet<T> *resnet)
{
    struct allocations *allocations = &resnet->allocations;
    const struct layer *pool = &resnet->train->model->layers[STEM - 1];
    TRY(each_unit<T>(resnet, [&](struct conv_norm<T> *unit) { return open_unit<T>(resnet, unit, nullptr); }));
    for (float *&partial : resnet->partial)
        TRY(allocate(allocations, &partial, most_partial<T>(resnet)));
    TRY(each_unit<T>(resnet, [&](struct conv_norm<T> *unit) {
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
    if (resnet->head->fp32) {
        TRY(allocate(allocations, &resnet->head_inputs, (size_t)resnet->capacity * resnet->mean->out_values));
        TRY(allocate(allocations, &resnet->head_deltas, (size_t)resnet->capacity * resnet->mean->out_values));
    }
    TRY(open_packs<T>(resnet));
    return open_activations<T>(resnet);
}

template <class T> static enum status open_learning(struct resnet<T> *resnet)
{
    const struct train *train = resnet->train;
    struct allocations *allocations = &resnet->allocations;
    const size_t most = most_values<T>(resnet), classes = train->model->classes;
    size_t room = 0;
    (void)each_unit<T>(resnet, [&](struct conv_norm<T> *unit) {
        /* Short batches may have fewer pixels per part, but not more parts. */
        const size_t values = resnet_room(&unit->shape, resnet->capacity);
        room = values > room ? values : room;
        return STATUS_OK;
    });
    allocations->part = MEMORY_WORKSPACE;
    TRY(allocate(allocations, &resnet->room, room));
    if (train->sync_batch_norm && train->exchange)
        TRY(allocate(allocations, &resnet->norm_sums, (size_t)2 * RESNET_CHANNELS_MAX));
    resnet->to_fp16 = std::is_same<T, fp16>::value;
    if (resnet->to_fp16)
        TRY(scaling_open(train->model, allocations, &resnet->losses.scale, resnet->stream));
    allocations->part = MEMORY_ACTIVATIONS;
    for (T **each : {&resnet->out_deltas, &resnet->in_deltas, &resnet->last_deltas, &resnet->mid_deltas,
                     &resnet->first_deltas})
        TRY(allocate(allocations, each, most));
    TRY(vit_sums_open(allocations, VIT_CLASS_PARTS * classes, 0, &resnet->sums));
    TRY(allocate(allocations, &resnet->logit_deltas, resnet->capacity * classes));
    TRY(allocate(allocations, &resnet->logit_rounded, (size_t)resnet->capacity * resnet->logit_apart));
    TRY(allocate(allocations, &resnet->mean_deltas, (size_t)resnet->capacity * resnet->mean->out_values));
    resnet->shared.rounded = resnet->parameters;
    resnet->tensors.tensor_cores = true;
    return device_engine_open_learning(resnet);
}

/* Opens a state that device_engine_new() has created. The caller closes it, even after a failure. */
template <class T> static enum status resnet_open_all(struct resnet<T> *resnet)
{
    const struct train *train = resnet->train;
    const size_t values = train->model->arena_values;
    TRY(device_probe(resnet->device));
    TRY(resnet_accepts<T>(train));
    (void)find_layers<T>(train->model, resnet);
    resnet->logit_apart = (train->model->classes + 7) / 8 * 8;
    TRY(device_engine_open(resnet));
    resnet->allocations.part = MEMORY_WORKSPACE;
    TRY(vit_multiplier_open(&resnet->allocations, !train->forward_only, &resnet->multiplier));
    resnet->allocations.part = MEMORY_PARAMETERS;
    TRY(allocate_zeros(&resnet->allocations, &resnet->state.parameters, values, resnet->stream));
    TRY(allocate(&resnet->allocations, &resnet->parameters, values));
    resnet->allocations.part = MEMORY_ACTIVATIONS;
    TRY(open_units<T>(resnet));
    TRY(device_batch_allocate(train, resnet->capacity, &resnet->samples, &resnet->allocations));
    resnet->batch = &resnet->samples;
    TRY(device_engine_open_data(resnet));
    if (!train->forward_only)
        TRY(open_learning<T>(resnet));
    return CUDA_STATUS(cudaStreamSynchronize(resnet->stream));
}

/* ---- Forward pass ---- */

/* The step that a pass computes. */
struct batch_of {
    uint32_t count, total; /* samples of this rank, and of all ranks */
    bool training;
};

/* Adds up the sums of a normalisation over all ranks. Work that is enqueued afterwards may use them. */
template <class T> static enum status add_up_shared(struct resnet<T> *resnet, const struct conv_norm<T> *unit)
{
    struct exchange *exchange = resnet->train->exchange;
    TRY(exchange->method->begin(exchange, resnet->norm_sums, 2 * (size_t)unit->norm.channels,
                                resnet->stream));
    return exchange->method->end(exchange, resnet->stream);
}

template <class T>
static struct resnet_shared shared_of(const struct resnet<T> *resnet, const struct conv_norm<T> *unit,
                                      const struct batch_of *of)
{
    return {rows_of<T>(unit, of->count), rows_of<T>(unit, of->total), resnet->norm_sums};
}

/* Computes the statistics of a normalisation over the samples of all ranks. */
template <class T>
static enum status moments_shared(struct resnet<T> *resnet, const struct conv_norm<T> *unit,
                                  const struct batch_of *of)
{
    const struct layer *layer = unit->layer;
    const struct resnet_shared shared = shared_of<T>(resnet, unit, of);
    const float *shift = resnet->state.parameters + layer->mean;
    TRY(resnet_shared_moments_begin(&unit->norm, &shared, resnet_parts(shared.rows), shift, resnet->stream));
    TRY(add_up_shared<T>(resnet, unit));
    return resnet_shared_moments_end(&unit->norm, &shared, shift, resnet->gradients + layer->mean,
                                     resnet->gradients + layer->variance, resnet->stream);
}

/* Computes a convolution and what its normalisation needs. */
template <class T>
static enum status unit_forward(struct resnet<T> *resnet, const struct conv_norm<T> *unit, const T *inputs,
                                const struct batch_of *of)
{
    const struct layer *layer = unit->layer;
    const size_t rows = rows_of<T>(unit, of->count);
    TRY(resnet_forward<T>(&unit->shape, of->count, inputs, unit->weights, unit->raw,
                          of->training ? unit->norm.partial : nullptr, resnet->stream));
    if (!of->training)
        return resnet_running(&unit->norm, resnet->state.parameters + layer->mean,
                              resnet->state.parameters + layer->variance, resnet->stream);
    if (resnet->norm_sums)
        return moments_shared<T>(resnet, unit, of);
    return resnet_moments(&unit->norm, resnet_parts(rows), rows, (float)of->count / (float)of->total,
                          resnet->gradients + layer->mean, resnet->gradients + layer->variance,
                          resnet->stream);
}

template <class T>
static enum status block_forward(struct resnet<T> *resnet, const struct block<T> *block,
                                 const struct batch_of *of)
{
    const struct conv_norm<T> *last = &block->units[UNITS - 1];
    const T *inputs = block->inputs;
    for (const struct conv_norm<T> &unit : block->units) {
        TRY(unit_forward<T>(resnet, &unit, inputs, of));
        if (unit.active)
            TRY(resnet_apply<T>(&unit.norm, rows_of<T>(&unit, of->count), unit.raw, nullptr, nullptr,
                                unit.active, resnet->stream));
        inputs = unit.active;
    }
    if (block->shortcut.conv)
        TRY(unit_forward<T>(resnet, &block->shortcut, block->inputs, of));
    return resnet_apply<T>(&last->norm, rows_of<T>(last, of->count), last->raw,
                           block->shortcut.conv ? &block->shortcut.norm : nullptr,
                           block->shortcut.conv ? block->shortcut.raw : block->inputs, block->outputs,
                           resnet->stream);
}

template <class T> static uint32_t mean_pixels(const struct resnet<T> *resnet)
{
    return resnet->mean->in.height * resnet->mean->in.width;
}

template <class T> static vit_head<T> head_of(const struct resnet<T> *resnet, uint32_t count)
{
    const struct layer *head = resnet->head;
    const float *parameters = resnet->state.parameters;
    return {{count, (uint32_t)head->in_values, head->out.channels, head->out.channels},
            resnet->logit_apart,
            resnet->parameters + head->weight,
            parameters + head->weight,
            parameters + head->bias,
            resnet->head_inputs,
            resnet->head_deltas};
}

/* Adds up the sums of all normalisations, in the order of forward_pass(), on a rank without samples. */
template <class T> static enum status forward_idle(struct resnet<T> *resnet, const struct batch_of *of)
{
    return each_unit<T>(resnet,
                        [&](const struct conv_norm<T> *unit) { return moments_shared<T>(resnet, unit, of); });
}

/* Writes the weights of all convolutions in the orders that the kernels read. */
template <class T> static enum status pack_weights(struct resnet<T> *resnet)
{
    return resnet_pack<T>(resnet->packs, resnet->pack_count, resnet->pack_blocks, resnet->parameters,
                          resnet->stream);
}

/* Computes the logits of the samples in resnet->images. */
template <class T> static enum status forward_pass(struct resnet<T> *resnet, const struct batch_of *of)
{
    const struct block<T> *last = &resnet->blocks[resnet->block_count - 1];
    const struct vit_head<T> head = head_of<T>(resnet, of->count);
    if (of->count == 0)
        return forward_idle<T>(resnet, of);
    if (!resnet->train->forward_only) /* else resnet_set() has done this */
        TRY(pack_weights<T>(resnet));
    TRY(unit_forward<T>(resnet, &resnet->stem, resnet->images, of));
    TRY(resnet_pool_forward<T>(&resnet->pool, of->count, resnet->stem.raw, resnet->pooled, resnet->largest,
                               resnet->stream));
    for (uint32_t i = 0; i < resnet->block_count; i++)
        TRY(block_forward<T>(resnet, &resnet->blocks[i], of));
    TRY(resnet_mean<T>(of->count, mean_pixels<T>(resnet), resnet->mean->in.channels, last->outputs,
                       resnet->means, resnet->stream));
    return vit_head_forward<T>(resnet->multiplier, &head, resnet->means, resnet->logits, resnet->stream);
}

/* ---- Backward pass ---- */

/* Replaces the gradients of a normalisation's outputs by those of its inputs, whose sums are in `parts`
 * parts. Computes the gradients of its parameters. */
template <class T>
static enum status norm_backward(struct resnet<T> *resnet, const struct conv_norm<T> *unit, uint32_t parts,
                                 const struct batch_of *of, const T *deltas, T *in_deltas)
{
    const size_t rows = rows_of<T>(unit, of->count);
    float *weight = resnet->gradients + unit->layer->weight, *bias = resnet->gradients + unit->layer->bias;
    if (resnet->norm_sums) {
        const struct resnet_shared shared = shared_of<T>(resnet, unit, of);
        TRY(resnet_shared_slopes_begin(&unit->norm, &shared, parts, weight, bias, resnet->stream));
        TRY(add_up_shared<T>(resnet, unit));
        TRY(resnet_shared_slopes_end(&unit->norm, &shared, resnet->stream));
    } else
        TRY(resnet_slopes(&unit->norm, parts, rows, weight, bias, resnet->stream));
    if (of->count == 0)
        return STATUS_OK;
    return resnet_norm_backward<T>(&unit->norm, rows, deltas, unit->raw, in_deltas, resnet->stream);
}

template <class T>
static enum status weights_backward(struct resnet<T> *resnet, const struct conv_norm<T> *unit, uint32_t count,
                                    const T *inputs, const T *deltas)
{
    const bool stem = unit == &resnet->stem;
    return resnet_weights<T>(&unit->shape, count, inputs, deltas,
                             stem ? resnet->train->model->input.channels : 0, resnet->room,
                             resnet->gradients + unit->conv->weight, resnet->stream);
}

/* Returns what happens to the gradient of the outputs of a block: the mask of its ReLU, and the sums of the
 * normalisations before the addition. */
template <class T> static resnet_after<T> after_block(const struct block<T> *block, const T *added)
{
    const struct conv_norm<T> *last = &block->units[UNITS - 1], *shortcut = &block->shortcut;
    struct resnet_after<T> after = {
        added, block->outputs,
        {
            {&last->norm, last->raw},
            {
            }
        }
    };
    if (shortcut->conv)
        after.summed[1] = {&shortcut->norm, shortcut->raw};
    return after;
}

/* Adds up the sums of the normalisations of a block, in the order of block_backward(), on a rank without
 * samples. */
template <class T>
static enum status block_idle(struct resnet<T> *resnet, const struct block<T> *block,
                              const struct batch_of *of)
{
    for (uint32_t u = UNITS; u-- > 0;)
        TRY(norm_backward<T>(resnet, &block->units[u], 0, of, nullptr, nullptr));
    return block->shortcut.conv ? norm_backward<T>(resnet, &block->shortcut, 0, of, nullptr, nullptr)
                                : STATUS_OK;
}

/* Backward pass of a block. Replaces resnet->out_deltas, the gradients of its outputs, by those of the
 * outputs of the block before it. `*parts` is the number of partial sums that belong to these gradients. */
template <class T>
static enum status block_backward(struct resnet<T> *resnet, uint32_t index, const struct batch_of *of,
                                  uint32_t *parts)
{
    struct block<T> *block = &resnet->blocks[index];
    const struct conv_norm<T> *units = block->units, *shortcut = &block->shortcut;
    const struct resnet_after<T> nothing = {
    };
    const T *added = resnet->out_deltas;
    const uint32_t count = of->count;
    uint32_t ignored, out_parts = *parts;
    TRY(norm_backward<T>(resnet, &units[2], out_parts, of, resnet->out_deltas, resnet->last_deltas));
    TRY(weights_backward<T>(resnet, &units[2], count, units[1].active, resnet->last_deltas));
    const struct resnet_after<T> second = {
        nullptr, units[1].active,
        {
            {&units[1].norm, units[1].raw},
            {
            }
        }
    };
    TRY(resnet_inputs<T>(&units[2].shape, count, resnet->last_deltas, units[2].opposite, &second,
                         resnet->mid_deltas, parts, resnet->stream));
    TRY(norm_backward<T>(resnet, &units[1], *parts, of, resnet->mid_deltas, resnet->mid_deltas));
    TRY(weights_backward<T>(resnet, &units[1], count, units[0].active, resnet->mid_deltas));
    const struct resnet_after<T> first = {
        nullptr, units[0].active,
        {
            {&units[0].norm, units[0].raw},
            {
            }
        }
    };
    TRY(resnet_inputs<T>(&units[1].shape, count, resnet->mid_deltas, units[1].opposite, &first,
                         resnet->first_deltas, parts, resnet->stream));
    TRY(norm_backward<T>(resnet, &units[0], *parts, of, resnet->first_deltas, resnet->first_deltas));
    TRY(weights_backward<T>(resnet, &units[0], count, block->inputs, resnet->first_deltas));
    if (shortcut->conv) {
        TRY(norm_backward<T>(resnet, shortcut, out_parts, of, resnet->out_deltas, resnet->last_deltas));
        TRY(weights_backward<T>(resnet, shortcut, count, block->inputs, resnet->last_deltas));
        TRY(resnet_inputs<T>(&shortcut->shape, count, resnet->last_deltas, shortcut->opposite, &nothing,
                             resnet->in_deltas, &ignored, resnet->stream));
        T *const deltas = resnet->in_deltas;
        resnet->in_deltas = resnet->out_deltas;
        resnet->out_deltas = deltas;
        added = deltas;
    }
    struct resnet_after<T> before = {
        added, nullptr,
        {
        }
    };
    if (index > 0)
        before = after_block<T>(&resnet->blocks[index - 1], added);
    return resnet_inputs<T>(&units[0].shape, count, resnet->first_deltas, units[0].opposite, &before,
                            resnet->out_deltas, parts, resnet->stream);
}

/* Backward pass of the mean and the head. */
template <class T> static enum status head_backward(struct resnet<T> *resnet, uint32_t count, uint32_t *parts)
{
    const struct layer *layer = resnet->head;
    const struct vit_head<T> head = head_of<T>(resnet, count);
    const struct resnet_after<T> after = after_block<T>(&resnet->blocks[resnet->block_count - 1], nullptr);
    TRY(vit_head_backward<T>(resnet->multiplier, &head, resnet->means, resnet->logit_deltas,
                             resnet->logit_rounded, resnet->mean_deltas, resnet->gradients + layer->weight,
                             resnet->gradients + layer->bias, &resnet->sums, resnet->stream));
    TRY(vit_sums_finish(&resnet->sums, resnet->stream));
    return resnet_mean_backward<T>(count, mean_pixels<T>(resnet), resnet->mean->in.channels,
                                   resnet->mean_deltas, &after, resnet->out_deltas, parts, resnet->stream);
}

/* Backward pass of the pooling and the first convolution. */
template <class T> static enum status stem_backward(struct resnet<T> *resnet, const struct batch_of *of)
{
    const uint32_t count = of->count;
    uint32_t parts;
    TRY(resnet_pool_backward<T>(&resnet->pool, count, resnet->out_deltas, resnet->largest, resnet->stem.raw,
                                resnet->last_deltas, &parts, resnet->stream));
    TRY(norm_backward<T>(resnet, &resnet->stem, parts, of, resnet->last_deltas, resnet->last_deltas));
    return weights_backward<T>(resnet, &resnet->stem, count, resnet->images, resnet->last_deltas);
}

/* Computes and exchanges the gradients of a step. A rank without samples contributes zeros. */
template <class T> static enum status backward_pass(struct resnet<T> *resnet, const struct batch_of *of)
{
    const struct model *model = resnet->train->model;
    const bool idle = of->count == 0;
    size_t end = model->arena_values;
    uint32_t parts = 0;
    if (idle)
        CUDA_TRY(cudaMemsetAsync(resnet->gradients, 0, end * sizeof *resnet->gradients, resnet->stream));
    else
        TRY(head_backward<T>(resnet, of->count, &parts));
    TRY(device_engine_exchange(resnet, model->layer_count - 2, model->layer_count, &end, resnet->stream));
    for (uint32_t i = resnet->block_count; i-- > 0;) {
        if (!idle)
            TRY(block_backward<T>(resnet, i, of, &parts));
        else if (resnet->norm_sums)
            TRY(block_idle<T>(resnet, &resnet->blocks[i], of));
        TRY(device_engine_exchange(resnet, resnet->blocks[i].first, resnet->blocks[i].end, &end,
                                   resnet->stream));
    }
    if (!idle)
        TRY(stem_backward<T>(resnet, of));
    else if (resnet->norm_sums)
        TRY(norm_backward<T>(resnet, &resnet->stem, 0, of, nullptr, nullptr));
    TRY(device_engine_exchange(resnet, 0, STEM, &end, resnet->stream));
    return device_engine_exchange_end(resnet);
}

/* ---- Graphs ---- */

/* Captures the forward or the backward pass. The mode is relaxed, because cuBLASLt loads its kernels when
 * they are first used. */
template <class T>
static enum status record(struct resnet<T> *resnet, const struct batch_of *of, bool back,
                          cudaGraphExec_t *into)
{
    CUDA_TRY(cudaStreamBeginCapture(resnet->stream, cudaStreamCaptureModeRelaxed));
    return capture_end(resnet->stream, back ? backward_pass<T>(resnet, of) : forward_pass<T>(resnet, of),
                       into);
}

static void graphs_close(struct resnet_graphs *graphs)
{
    destroy(graphs->forward, graphs->backward);
    *graphs = {};
}

/* Returns the graphs for a step, and captures them if they do not exist. If all entries are in use, replaces
 * the last one. */
template <class T>
static enum status graphs_for(struct resnet<T> *resnet, const struct batch_of *of,
                              struct resnet_graphs **into)
{
    struct resnet_graphs *graphs = resnet->graphs, *last = resnet->graphs + GRAPHS - 1;
    while (graphs < last && graphs->complete && (graphs->count != of->count || graphs->total != of->total))
        graphs++;
    *into = graphs;
    if (graphs->complete && graphs->count == of->count && graphs->total == of->total)
        return STATUS_OK;
    CUDA_TRY(cudaStreamSynchronize(resnet->stream));
    graphs_close(graphs);
    graphs->count = of->count;
    graphs->total = of->total;
    if (of->count > 0 || resnet->norm_sums)
        TRY(record<T>(resnet, of, false, &graphs->forward));
    if (!resnet->train->forward_only)
        TRY(record<T>(resnet, of, true, &graphs->backward));
    graphs->complete = true;
    return STATUS_OK;
}

template <class T> static enum status launch(struct resnet<T> *resnet, cudaGraphExec_t graph)
{
    RANGE(GRAPH);
    return CUDA_STATUS(cudaGraphLaunch(graph, resnet->stream));
}

/* ---- Steps ---- */

template <class T>
static enum status gather(struct device_engine *engine, const struct device_set *set, uint32_t epoch,
                          bool training, uint32_t count)
{
    struct resnet<T> *resnet = resnet_of<T>(engine);
    (void)epoch, (void)training;
    return resnet_gather<T>(resnet->train->data, set, resnet->batch, count, &resnet->stem.shape,
                            resnet->images, resnet->stream);
}

/* Computes the gradients of a step, which has one part; see struct device_engine_functions. */
template <class T>
static enum status learn_part(struct device_engine *engine, uint32_t epoch, uint32_t step,
                              const struct share *part, uint32_t index)
{
    struct resnet<T> *resnet = resnet_of<T>(engine);
    const struct batch_of of = {(uint32_t)part->count, (uint32_t)part->total, true};
    const uint64_t number = (uint64_t)epoch * train_steps(resnet->train) + step;
    struct pass pass = {};
    struct resnet_graphs *graphs;
    (void)index;
    pass.stream = resnet->stream;
    pass.count = of.count;
    pass.total = of.total;
    TRY(graphs_for<T>(resnet, &of, &graphs));
    if (graphs->forward)
        TRY(launch<T>(resnet, graphs->forward));
    if (of.count > 0)
        TRY(loss_take(resnet->train, resnet->logits, resnet->batch, &pass, number, resnet->logit_deltas,
                      &resnet->losses));
    return launch<T>(resnet, graphs->backward);
}

template <class T>
static enum status infer(struct device_engine *engine, uint32_t count, const float **logits)
{
    struct resnet<T> *resnet = resnet_of<T>(engine);
    const struct batch_of of = {count, count, false};
    struct resnet_graphs *graphs;
    *logits = resnet->logits;
    if (!resnet->train->forward_only) /* the graphs are those of training */
        return forward_pass<T>(resnet, &of);
    TRY(graphs_for<T>(resnet, &of, &graphs));
    return launch<T>(resnet, graphs->forward);
}

/* ---- The engine ---- */

template <class T>
static enum status resnet_open(const struct train *train, const struct resources *resources, void **state)
{
    static const struct device_engine_functions functions = {
        .gather = gather<T>, .learn_part = learn_part<T>, .update = device_engine_update, .infer = infer<T>};
    TRY(device_engine_new<struct resnet<T>>(train, resources, &functions, state));
    return resnet_open_all<T>(resnet_at<T>(*state));
}

template <class T> static void resnet_close(void *state)
{
    struct resnet<T> *resnet = resnet_at<T>(state);
    device_engine_stop(resnet);
    for (struct resnet_graphs &graphs : resnet->graphs)
        graphs_close(&graphs);
    vit_multiplier_close(resnet->multiplier);
    device_engine_close(resnet);
    free(resnet);
}

/* Returns the stored output of a layer in NHWC order; NULL if there is none. */
template <class T> static const T *stored_output(struct resnet<T> *resnet, uint32_t layer)
{
    const T *found = layer == STEM - 1               ? resnet->pooled
                     : layer == resnet->mean->number ? resnet->means
                                                     : nullptr;
    (void)each_unit<T>(resnet, [&](const struct conv_norm<T> *unit) {
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

template <class T>
static enum status output_of(struct resnet<T> *resnet, uint32_t layer, uint32_t count, float *values)
{
    const struct layer *of = &resnet->train->model->layers[layer];
    const size_t all = count * of->out_values, channels = of->out.channels,
                 pixels = of->out_values / channels;
    CUDA_TRY(cudaStreamSynchronize(resnet->stream));
    if (of == resnet->head)
        return CUDA_STATUS(cudaMemcpy(values, resnet->logits, all * sizeof *values, cudaMemcpyDeviceToHost));
    const T *stored = stored_output<T>(resnet, layer);
    if (!stored)
        return status_set(STATUS_UNAVAILABLE, "resnet: the output of %s is not stored", of->name);
    T *copy = static_cast<T *>(malloc(all * sizeof *copy));
    TRY(ALLOCATED(copy, "resnet: out of memory"));
    const enum status status =
        CUDA_STATUS(cudaMemcpy(copy, stored, all * sizeof *copy, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < all; i++) { /* i: (sample, channel, pixel) */
        const size_t sample = i / of->out_values, channel = i / pixels % channels, pixel = i % pixels;
        values[i] = (float)copy[(sample * pixels + pixel) * channels + channel];
    }
    free(copy);
    return status;
}

enum status resnet_output(void *state, uint32_t layer, uint32_t count, float *values)
{
    return static_cast<struct device_engine *>(state)->to_fp16
               ? output_of<fp16>(resnet_at<fp16>(state), layer, count, values)
               : output_of<bf16>(resnet_at<bf16>(state), layer, count, values);
}

template <class T> static enum status resnet_set(void *state, const struct train_state *from)
{
    struct resnet<T> *resnet = resnet_at<T>(state);
    TRY(device_engine_set(state, from));
    TRY(vit_round<T>(resnet->state.parameters, resnet->train->model->arena_values, resnet->parameters,
                     resnet->stream));
    if (resnet->train->forward_only)
        TRY(pack_weights<T>(resnet));
    return CUDA_STATUS(cudaStreamSynchronize(resnet->stream));
}

/* Batch normalisation is always in fp32; its results are rounded. */
static enum fp32_layer keeps_fp32(const struct layer *layer)
{
    return layer->spec.kind == LAYER_LINEAR       ? FP32_CHOSEN
           : layer->spec.kind == LAYER_BATCH_NORM ? FP32_ALWAYS
                                                  : FP32_NEVER;
}

/* Rounding to 16 bits changes the sign of inputs of ReLU and the maxima of the pooling. The changed masks
 * make most of the error of the gradients, which grows from layer to layer on the way back. With fp16, which
 * has three bits more than bf16, the errors are a third: they are in proportion to the root of the rounding.
 */
template <class T>
static constexpr struct engine engine_of(const char *name, const struct engine_bounds &bounds)
{
    struct engine engine = device_engine_table(name, bounds, std::is_same<T, fp16>::value);
    engine.gradients_in = GRADIENTS_IN_GRAPH;
    engine.unit = UNIT_HALF;
    engine.accepts = resnet_accepts<T>;
    engine.keeps_fp32 = keeps_fp32;
    engine.open = resnet_open<T>;
    engine.close = resnet_close<T>;
    engine.set = resnet_set<T>;
    return engine;
}

extern "C" {
const struct engine engine_resnet =
    engine_of<bf16>("resnet", {.loss = 5e-2, .floor = 1, .drift = 0.9, .logits = 5e-2});
const struct engine engine_resnet_amp =
    engine_of<fp16>("resnet-amp", {.loss = 1.5e-2, .floor = 1, .drift = 0.5, .logits = 1.5e-2});
}

/* ---- Variants ---- */

static enum status probe_resnet(const struct resources *resources)
{
    TRY(vit_multiplier_probe());
    return device_probe(resources->device);
}

extern "C" {
extern const struct variant variant_train_resnet, variant_train_resnet_amp, variant_infer_resnet;
const struct variant variant_train_resnet = training_by<&engine_resnet>(false, probe_resnet);
const struct variant variant_train_resnet_amp = training_by<&engine_resnet_amp>(false, probe_resnet);
const struct variant variant_infer_resnet = inferring_by<&engine_resnet>(false, probe_resnet);
}
