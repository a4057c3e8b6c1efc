/* `train-omp`: divides a network into blocks, computes their geometry, and allocates all memory; the layouts
 * of parameters and of their gradients, and the update. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/array.h"
#include "core/phase.h"
#include "machine/host.h"
#include "omp_net.h"

#define LINE        16 /* floats per cache line */
#define PAGE_BYTES  (UINT64_C(2) << 20)
#define BAND_VALUES 5120 /* floats of input processed at a time: 20 KB, plus 20 KB of gradients */

/* ---- Memory ---- */

/* Allocates zeroed memory, with huge pages if it is large. If memory runs out, returns NULL and sets
 * net->out_of_memory, or net->refused if the limit of the run is reached. If memory is only counted, large
 * arrays get addresses, but are not touched, so that Linux gives them no memory. */
static void *take(struct net *net, size_t count, size_t size)
{
    uint64_t bytes = count * size + LINE * sizeof(float), alignment = bytes < PAGE_BYTES ? 64 : PAGE_BYTES;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    /* Linux overcommits memory and may kill the process at the first access, so check the available
     * memory. */
    const bool plans = net->train->memory && net->train->memory->plans;
    bool there = plans || bytes < PAGE_BYTES || bytes <= memory_available_bytes();
    void *room = NULL;
    if (net->refused == STATUS_OK)
        net->refused = memory_take(net->train->memory, net->part, bytes);
    if (net->refused != STATUS_OK || !there || !array_grow(&net->held, net->held_count, sizeof *net->held) ||
        !(room = aligned_alloc(alignment, bytes))) {
        net->out_of_memory = true;
        return NULL;
    }
    if (alignment == PAGE_BYTES)
        madvise(room, bytes, MADV_HUGEPAGE); /* advice only: failure costs speed, not correctness */
    if (!plans || alignment < PAGE_BYTES)
        memset(room, 0, bytes);
    net->held[net->held_count++] = room;
    net->bytes += bytes;
    return room;
}

void net_free(struct net *net)
{
    while (net->held_count > 0)
        free(net->held[--net->held_count]);
    free(net->held);
    net->held = NULL;
}

static size_t round_up(size_t count, size_t to)
{
    return (count + to - 1) / to * to;
}

/* Returns the row pitch for `count` floats: an odd number of cache lines, so that elements of one column fall
 * into different cache sets. */
static size_t row_pitch(size_t count)
{
    return (round_up(count, LINE) / LINE | 1) * LINE;
}

/* ---- Blocks ---- */

static bool works_in_place(const struct layer *layer)
{
    return layer->spec.kind == LAYER_RELU || layer->spec.kind == LAYER_DROPOUT ||
           layer->spec.kind == LAYER_DROP_PATH;
}

/* If layer `*i + 1` is of this kind, and no other layer uses the output of layer `*i`, increments `*i` and
 * returns layer `*i`. Otherwise returns NULL. */
static const struct layer *follows(const struct model *model, uint32_t *i, enum layer_kind kind)
{
    if (*i + 1 == model->layer_count || model->layers[*i + 1].spec.kind != kind ||
        model->layers[*i].is_added || model->layers[*i].is_branched)
        return NULL;
    return &model->layers[++*i];
}

/* Appends a block for layer `*i` and the layers fused into it, and advances `*i` past them. The input of the
 * block is the output of `from`. The blocks INPUT and FLAT contain no layer. */
static struct block *add_block(struct net *net, enum block_kind kind, const struct block *from, uint32_t *i)
{
    const struct model *model = net->train->model;
    struct block *block = &net->blocks[net->block_count++];
    block->kind = kind;
    block->from = from;
    block->in = block->out = from ? from->out : model->input;
    if (kind != BLOCK_INPUT && kind != BLOCK_FLAT) {
        block->layer = &model->layers[*i];
        block->out = block->layer->out;
        block->relu = (kind == BLOCK_CONV || kind == BLOCK_LINEAR) && follows(model, i, LAYER_RELU);
        block->pool = kind == BLOCK_CONV && !net->by_layer ? follows(model, i, LAYER_POOL) : NULL;
        block->out = block->pool ? block->pool->out : block->out;
        ++*i;
    }
    return block;
}

/* Returns the number of the last layer that is processed sample by sample; -1 if there is none. */
static int last_spatial_layer(const struct model *model)
{
    int last = -1;
    for (uint32_t i = 0; i < model->layer_count && !model->transformer; i++)
        if (!works_in_place(&model->layers[i]) && model->layers[i].spec.kind != LAYER_LINEAR)
            last = (int)i;
    return last;
}

/* Returns the block whose output, after its in-place layers, is the output of `layer`. `layer` is UINT32_MAX
 * for the input of the network, which an ADD can use in a stage of a pipeline. */
static struct block *block_of(struct net *net, uint32_t layer)
{
    struct block *block = net->blocks + (net->train->model->transformer ? net->flat : 0);
    while (block->after_end != layer + 1)
        block++;
    return block;
}

static enum status make_blocks(struct net *net)
{
    static const enum block_kind kinds[LAYER_KINDS] = {
        [LAYER_CONV] = BLOCK_CONV,           [LAYER_POOL] = BLOCK_POOL,
        [LAYER_LINEAR] = BLOCK_LINEAR,       [LAYER_ADD] = BLOCK_ADD,
        [LAYER_MEAN] = BLOCK_MEAN,           [LAYER_BATCH_NORM] = BLOCK_BATCH_NORM,
        [LAYER_PATCHES] = BLOCK_LINEAR,      [LAYER_TOKENS] = BLOCK_TOKENS,
        [LAYER_NORM] = BLOCK_NORM,           [LAYER_TOKEN_LINEAR] = BLOCK_LINEAR,
        [LAYER_ATTENTION] = BLOCK_ATTENTION, [LAYER_GELU] = BLOCK_GELU,
        [LAYER_SELECT] = BLOCK_SELECT};
    const struct model *model = net->train->model;
    const int last = last_spatial_layer(model);
    uint32_t i = 0;
    struct block *block = add_block(net, BLOCK_INPUT, NULL, &i);
    for (;;) {
        if ((int)i > last && net->flat == 0) {
            net->flat = net->block_count;
            block = add_block(net, BLOCK_FLAT, block, &i);
        }
        block->after = i;
        while (i < model->layer_count && works_in_place(&model->layers[i]))
            i++;
        block->after_end = i;
        if (i == model->layer_count)
            return STATUS_OK;
        const struct layer *layer = &model->layers[i];
        if (layer->spec.kind == LAYER_LINEAR && (int)i < last)
            return status_set(STATUS_UNAVAILABLE, "omp: does not support a linear layer before a "
                                                  "convolution, a pooling, an addition, a mean or a batch "
                                                  "normalisation");
        const uint32_t added = i - layer->spec.back;
        const bool add = layer->spec.kind == LAYER_ADD;
        block = add_block(net, add && model->transformer ? BLOCK_ADD_ROWS : kinds[layer->spec.kind],
                          layer->spec.skipped ? block_of(net, i - 1 - layer->spec.skipped) : block, &i);
        if (add) {
            struct block *other = block_of(net, added);
            other->is_added = true;
            block->added = other;
        }
    }
}

/* Returns whether a network runs layer by layer; see struct net. */
static bool runs_by_layer(const struct model *model)
{
    bool skips = false;
    for (uint32_t i = 0; i < model->layer_count; i++)
        skips |= model->layers[i].spec.skipped > 0;
    return model->normalises || skips;
}

/* Sets the number and the length of the rows of a block. */
static void lay_out_rows(const struct model *model, struct block *block)
{
    block->tokens = 1;
    block->row_values = shape_values(&block->out);
    if (block->kind == BLOCK_FLAT && model->transformer && model->layers[0].spec.kind == LAYER_PATCHES) {
        block->tokens = model->layers[0].out.channels;
        block->row_values = model->layers[0].weight_values / model->layers[0].bias_values;
    } else if (model->transformer && (!block->layer || block->layer->spec.kind != LAYER_LINEAR)) {
        block->tokens = block->out.channels;
        block->row_values = block->out.width;
    }
}

/* Appends a part of the arenas: the tensor that begins at `tensor_first` in the model's arena, whose rows are
 * `pitch` values apart (0: as in the model). If the last span is updated in the same way, extends that span
 * instead. */
static void add_span(struct net *net, size_t first, size_t end, size_t tensor_first, size_t pitch)
{
    const struct model_tensor *tensor = net->train->model->tensors;
    struct span *last = &net->spans[net->span_count];
    while (tensor->first != tensor_first)
        tensor++;
    const struct tensor_update how = train_update_of(net->train, tensor);
    if (net->span_count > 0 && last[-1].how.decays == how.decays && last[-1].how.share == how.share &&
        last[-1].how.statistic == how.statistic && !train_needs_tensors(net->train)) {
        last[-1].count += end - first;
        return;
    }
    const size_t rows = train_rows_of(tensor), columns = tensor->values / rows;
    *last = (struct span){.first = first,
                          .count = end - first,
                          .rows = rows,
                          .columns = columns,
                          .pitch = pitch ? pitch : columns,
                          .how = how,
                          .head = tensor->head,
                          .trust = 1};
    net->span_count++;
}

static void lay_out_parameters(struct net *net, struct block *block)
{
    const struct layer *layer = block->layer;
    size_t values = layer->weight_values;
    if (block->kind == BLOCK_LINEAR)
        values = layer->bias_values * block->in_pitch;
    block->weight = net->arena_values;
    block->bias = block->weight + round_up(values, LINE);
    net->arena_values = block->bias + round_up(layer->bias_values, LINE) + LINE;
    add_span(net, block->weight, layer->bias_values ? block->bias : net->arena_values, layer->weight,
             block->kind == BLOCK_LINEAR ? block->in_pitch : 0);
    if (layer->bias_values)
        add_span(net, block->bias, net->arena_values, layer->bias, 0);
}

/* Gives the running statistics their places after all parameters. */
static void lay_out_statistics(struct net *net)
{
    net->trained_values = net->arena_values;
    for (uint32_t i = 0; i < net->flat; i++) {
        struct block *block = &net->blocks[i];
        const size_t room = block->out_pitch + LINE - block->out_pitch % LINE;
        if (block->kind != BLOCK_BATCH_NORM)
            continue;
        block->mean = net->arena_values;
        block->variance = block->mean + room;
        net->arena_values = block->variance + room;
        add_span(net, block->mean, block->variance, block->layer->mean, 0);
        add_span(net, block->variance, net->arena_values, block->layer->variance, 0);
    }
}

/* Sets pitches and the offsets of parameters and kept data. */
static void lay_out_block(struct net *net, struct block *block)
{
    const uint32_t lanes = net->kernel->lanes;
    bool rows = block->kind >= BLOCK_FLAT, first = block->kind == BLOCK_INPUT;
    block->positions = rows ? 1 : positions_of(&block->out);
    block->in_pitch = first ? 0 : block->from->out_pitch;
    if (rows)
        lay_out_rows(net->train->model, block);
    block->out_pitch = rows ? row_pitch(block->row_values) : round_up(block->out.channels, lanes);
    if (first && block[1].kind == BLOCK_CONV && !block->is_added && net_begins(net))
        block->out_pitch = block->out.channels; /* the next block only broadcasts single input values or loads
                                                   vectors along image rows, so channels need no padding */
    block->values = net->kept_values;
    block->argmax = net->kept_argmax;
    if (rows)
        block->out_vectors = round_up(block->row_values, lanes);
    else
        net->kept_values += round_up(block->positions * block->out_pitch, LINE) + LINE;
    if (block->pool || block->kind == BLOCK_POOL) {
        const struct layer *pool = block->pool ? block->pool : block->layer;
        block->pooling = (struct pool){.in = pool->in,
                                       .out = pool->out,
                                       .kernel = pool->spec.kernel,
                                       .padding = pool->spec.padding,
                                       .pitch = block->out_pitch};
        for (int axis = 0; axis < MODEL_AXES; axis++)
            block->pooling.stride[axis] = layer_stride(pool, axis);
        net->kept_argmax += block->positions * block->out_pitch;
    }
    if (block->kind == BLOCK_ADD && !net->by_layer) {
        block->held = net->held_values;
        net->held_values += round_up(block->positions * block->out_pitch, LINE);
    }
    if (block->kind == BLOCK_CONV && net->train->stage && net->train->stage->splits) {
        block->kept_delta = net->kept_delta_values;
        net->kept_delta_values += round_up(block->positions * block->out_pitch, LINE);
    }
    if (block->layer && block->layer->weight_values > 0)
        lay_out_parameters(net, block);
}

/* ---- Convolutions ---- */

static uint32_t position_at(const struct shape *around, size_t pitch, uint32_t t, uint32_t y, uint32_t x)
{
    return (uint32_t)((((size_t)t * around->height + y) * around->width + x) * pitch);
}

/* The positions first, first + step, ... along each axis. */
struct lattice {
    uint32_t first[MODEL_AXES], step[MODEL_AXES], count[MODEL_AXES];
};

static size_t lattice_size(const struct lattice *lattice)
{
    return (size_t)lattice->count[0] * lattice->count[1] * lattice->count[2];
}

/* Returns the offsets of positions inside a shape. */
static uint32_t *make_positions(struct net *net, const struct lattice *at, const struct shape *around,
                                size_t pitch)
{
    uint32_t *positions = take(net, lattice_size(at), sizeof *positions), *next = positions;
    for (uint32_t t = 0; positions && t < at->count[0]; t++)
        for (uint32_t y = 0; y < at->count[1]; y++)
            for (uint32_t x = 0; x < at->count[2]; x++)
                *next++ = position_at(around, pitch, at->first[0] + t * at->step[0],
                                      at->first[1] + y * at->step[1], at->first[2] + x * at->step[2]);
    return positions;
}

/* Returns the offsets of a convolution kernel's weights inside a window, in the order (t, y, x, channel). If
 * `mirrored` is true, t, y and x run backwards. */
static uint32_t *make_taps(struct net *net, const uint32_t *kernel, uint32_t channels,
                           const struct shape *around, size_t pitch, bool mirrored)
{
    size_t count = (size_t)kernel[0] * kernel[1] * kernel[2];
    uint32_t *taps = take(net, count * channels, sizeof *taps);
    for (size_t i = 0; taps && i < count; i++) {
        size_t at = mirrored ? count - 1 - i : i;
        uint32_t x = (uint32_t)(at % kernel[2]), y = (uint32_t)(at / kernel[2] % kernel[1]);
        uint32_t position = position_at(around, pitch, (uint32_t)(at / kernel[2] / kernel[1]), y, x);
        for (uint32_t c = 0; c < channels; c++)
            taps[i * channels + c] = position + c;
    }
    return taps;
}

/* Lists the vectors of the convolution kernel's window, row by row. In a row, positions and channels are
 * contiguous. */
static void plan_window(struct net *net, struct block *block)
{
    struct conv *conv = &block->conv;
    const uint32_t *kernel = conv->kernel, lanes = net->kernel->lanes;
    conv->run_vectors = (kernel[2] * block->in_pitch + lanes - 1) / lanes;
    conv->vectors = kernel[0] * kernel[1] * conv->run_vectors;
    conv->runs = take(net, conv->vectors, sizeof *conv->runs);
    for (size_t i = 0; conv->runs && i < conv->vectors; i++) {
        size_t row = i / conv->run_vectors;
        conv->runs[i] =
            position_at(&conv->around, block->in_pitch, (uint32_t)(row / kernel[1]), row % kernel[1], 0) +
            (uint32_t)(i % conv->run_vectors * lanes);
    }
    const uint32_t *pool = block->pool->spec.kernel;
    size_t row_values = (size_t)(pool[0] + kernel[0] - 1) * pool[1] * conv->around.width * block->in_pitch;
    size_t rows = BAND_VALUES / row_values;
    conv->band = (rows ? rows : 1) * block->out.width;
    conv->gradient_count = block->out.channels * conv->vectors * lanes;
    conv->backward = take(net, conv->gradient_count, sizeof(float));
}

/* Plans the gradients of the inputs that the taps `rest`, rest + stride, ... of each axis reach. With output
 * o, input i and tap k = rest + j * stride, i + padding = o * stride + k. */
static void plan_phase(struct net *net, struct block *block, const uint32_t *rest, size_t *taps_done,
                       struct conv_phase *phase)
{
    struct conv *conv = &block->conv;
    const uint32_t lengths[MODEL_AXES] = {block->in.depth, block->in.height, block->in.width};
    struct lattice inputs, rows;
    uint32_t taps[MODEL_AXES];
    for (int axis = 0; axis < MODEL_AXES; axis++) {
        const uint32_t stride = layer_stride(block->layer, axis), padding = conv->padding[axis];
        const uint32_t first = (rest[axis] + stride - padding % stride) % stride;
        taps[axis] = rest[axis] < conv->kernel[axis] ? (conv->kernel[axis] - rest[axis] - 1) / stride + 1 : 0;
        inputs.first[axis] = first;
        inputs.step[axis] = stride;
        inputs.count[axis] = rows.count[axis] =
            first < lengths[axis] ? (lengths[axis] - first - 1) / stride + 1 : 0;
        rows.first[axis] = (first + padding - rest[axis]) / stride + conv->wide_before[axis] + 1 -
                           (taps[axis] ? taps[axis] : 1);
        rows.step[axis] = 1;
    }
    phase->first_tap = *taps_done;
    phase->tap_count = (size_t)taps[0] * taps[1] * taps[2];
    phase->row_count = lattice_size(&inputs);
    *taps_done += phase->tap_count;
    if (phase->tap_count == 0 || phase->row_count == 0)
        return;
    phase->rows = make_positions(net, &rows, &conv->wide, block->out_pitch);
    phase->taps = make_taps(net, taps, block->out.channels, &conv->wide, block->out_pitch, true);
    if (conv->phase_count > 1)
        phase->inputs = make_positions(net, &inputs, &block->in, block->in_pitch);
    for (size_t i = 0; conv->order && i < phase->tap_count; i++) {
        const size_t t = i / taps[2] / taps[1], y = i / taps[2] % taps[1], x = i % taps[2];
        const uint32_t stride[2] = {layer_stride(block->layer, 1), layer_stride(block->layer, 2)};
        conv->order[(t * conv->kernel[1] + rest[1] + y * stride[0]) * conv->kernel[2] + rest[2] +
                    x * stride[1]] = (uint32_t)(phase->first_tap + i);
    }
}

static void plan_backward(struct net *net, struct block *block)
{
    struct conv *conv = &block->conv;
    const uint32_t in[MODEL_AXES] = {block->in.depth, block->in.height, block->in.width};
    const uint32_t out[MODEL_AXES] = {block->out.depth, block->out.height, block->out.width};
    uint32_t wide[MODEL_AXES], rest[MODEL_AXES] = {0};
    conv->gradient_count = conv->depth * block->out_pitch;
    if (block == &net->blocks[1] && net_begins(net))
        return; /* no gradient with respect to the input is needed */
    const size_t taps = conv->depth / block->in.channels;
    for (int axis = 0; axis < MODEL_AXES; axis++) {
        const uint32_t stride = layer_stride(block->layer, axis);
        const uint32_t reached = (in[axis] - 1 + conv->padding[axis]) / stride + 1;
        conv->wide_before[axis] = (conv->kernel[axis] - 1) / stride;
        wide[axis] = conv->wide_before[axis] + (reached > out[axis] ? reached : out[axis]);
    }
    conv->wide = (struct shape){0, wide[0], wide[1], wide[2]};
    const uint32_t strides[2] = {layer_stride(block->layer, 1), layer_stride(block->layer, 2)};
    conv->phase_count = (size_t)strides[0] * strides[1];
    conv->phases = take(net, conv->phase_count, sizeof *conv->phases);
    conv->order = take(net, taps, sizeof *conv->order);
    size_t done = 0;
    for (rest[1] = 0; conv->phases && rest[1] < strides[0]; rest[1]++)
        for (rest[2] = 0; rest[2] < strides[1]; rest[2]++)
            plan_phase(net, block, rest, &done, &conv->phases[rest[1] * strides[1] + rest[2]]);
    conv->backward = take(net, taps * block->out.channels * block->in_pitch, sizeof(float));
}

static void plan_conv(struct net *net, struct block *block)
{
    struct conv *conv = &block->conv;
    const struct layer_spec *spec = &block->layer->spec;
    const struct shape *out = &block->layer->out;
    memcpy(conv->kernel, spec->kernel, sizeof conv->kernel);
    memcpy(conv->padding, spec->padding, sizeof conv->padding);
    conv->padded = spec->padding[0] || spec->padding[1] || spec->padding[2];
    conv->around =
        (struct shape){0, block->in.depth + 2 * spec->padding[0], block->in.height + 2 * spec->padding[1],
                       block->in.width + 2 * spec->padding[2]};
    conv->depth = block->layer->weight_values / block->layer->out.channels;
    const struct lattice windows = {
        {0},
        {layer_stride(block->layer, 0), layer_stride(block->layer, 1), layer_stride(block->layer, 2)},
        {out->depth, out->height, out->width}};
    conv->positions = make_positions(net, &windows, &conv->around, block->in_pitch);
    conv->taps = make_taps(net, conv->kernel, block->in.channels, &conv->around, block->in_pitch, false);
    conv->forward = take(net, conv->depth * block->out_pitch, sizeof(float));
    if (net->train->forward_only)
        return;
    if (block->pool)
        plan_window(net, block);
    else
        plan_backward(net, block);
    conv->gradient = net->chunk_values;
    net->chunk_values += round_up(conv->gradient_count, LINE) + block->out_pitch;
}

/* ---- Scratch memory ---- */

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Allocates a thread's scratch memory for attention. */
static void plan_head(struct net *net, struct head *head)
{
    size_t tokens = 0, room = 0, scores = 0;
    for (uint32_t i = net->flat; i < net->block_count; i++) {
        const struct block *block = &net->blocks[i];
        if (block->kind != BLOCK_ATTENTION)
            continue;
        tokens = larger(tokens, block->tokens * block->depth_pitch);
        room = larger(room, block->depth * block->score_pitch);
        scores = larger(scores, block->tokens * block->score_pitch);
    }
    float **const arrays[] = {&head->q, &head->k, &head->v, &head->deltas, &head->result};
    for (size_t i = 0; scores > 0 && i < COUNT_OF(arrays); i++)
        *arrays[i] = take(net, tokens, sizeof(float));
    if (scores > 0) {
        head->room = take(net, room, sizeof(float));
        head->weights = take(net, scores, sizeof(float));
        head->scores = take(net, scores, sizeof(float));
    }
}

/* Allocates a thread's scratch arrays. Each array is large enough for every block. */
static void plan_worker(struct net *net, struct worker *worker)
{
    size_t around = 0, plain = 0, wide = 0, strided = 0, deltas = 0, list = 0, channels = 0;
    for (uint32_t i = 0; i < net->flat; i++) {
        const struct block *block = &net->blocks[i];
        const struct conv *conv = &block->conv;
        deltas = larger(deltas, block->positions * block->out_pitch);
        if (block->kind != BLOCK_CONV)
            continue;
        around = larger(around, positions_of(&conv->around) * block->in_pitch);
        if (block->pool)
            plain = larger(plain, positions_of(&block->layer->out) * block->out_pitch);
        for (size_t k = 0; conv->phase_count > 1 && k < conv->phase_count; k++)
            strided = larger(strided, conv->phases[k].row_count * block->in_pitch);
        wide = larger(wide, positions_of(&conv->wide) * block->out_pitch);
        list = larger(list, block->out.channels * conv->band);
        channels = larger(channels, block->out.channels);
    }
    worker->sample = take(net, net->train->model->input_values, sizeof(float));
    if (train_mixes(net->train))
        worker->partner = take(net, net->train->model->input_values, sizeof(float));
    plan_head(net, &worker->head);
    worker->around = take(net, around, sizeof(float));
    worker->plain = take(net, plain, sizeof(float));
    if (net->train->forward_only)
        return;
    worker->wide = take(net, larger(wide, around), sizeof(float));
    worker->strided = take(net, strided, sizeof(float));
    worker->held = take(net, net->held_values, sizeof(float));
    for (int i = 0; i < 2 && !net->by_layer; i++)
        worker->deltas[i] = take(net, deltas, sizeof(float));
    worker->list_positions = take(net, list, sizeof *worker->list_positions);
    worker->list_deltas = take(net, list, sizeof *worker->list_deltas);
    worker->list_counts = take(net, channels, sizeof *worker->list_counts);
}

/* Returns the offsets of `count` rows. */
static uint32_t *make_rows(struct net *net, size_t count, size_t pitch)
{
    uint32_t *rows = take(net, count, sizeof *rows);
    for (size_t i = 0; rows && i < count; i++)
        rows[i] = (uint32_t)(i * pitch);
    return rows;
}

static void plan_rows(struct net *net, struct block *block)
{
    const size_t rows = (size_t)net->batch * block->tokens;
    const uint32_t lanes = net->kernel->lanes;
    block->rows = take(net, rows * block->out_pitch, sizeof(float));
    block->row_positions = make_rows(net, rows, block->out_pitch);
    if (!net->train->forward_only && !net->train->model->transformer)
        block->deltas = take(net, rows * block->out_pitch, sizeof(float));
    if (block->kind == BLOCK_LINEAR)
        block->transposed = take(net, block[-1].row_values * block->out_vectors, sizeof(float));
    if (block->kind == BLOCK_NORM)
        block->moments = take(net, 2 * rows, sizeof(float));
    if (block->kind == BLOCK_ATTENTION) {
        block->depth = block->row_values / block->layer->spec.heads;
        block->depth_pitch = round_up(block->depth, lanes);
        block->score_pitch = round_up(block->tokens, lanes);
        block->depth_rows = make_rows(net, block->tokens, block->depth_pitch);
        block->score_rows = make_rows(net, block->tokens, block->score_pitch);
    }
}

/* Returns the gradients of a block per sample. */
static size_t delta_values(const struct block *block)
{
    return (block->kind < BLOCK_FLAT ? block->positions : block->tokens) * block->out_pitch;
}

/* Determines which block writes the gradients of `target` first. Assigns memory to these gradients: a new
 * array of `values` per sample, or the array of a block whose backward pass is done. */
static void give_deltas(struct net *net, struct block *target, const struct block *writer, size_t values,
                        float **spare, uint32_t *spares)
{
    if (target->deltas || target->kind == BLOCK_INPUT || (target->kind == BLOCK_FLAT && net_begins(net)))
        return;
    target->writer = writer;
    target->deltas = *spares > 0 ? spare[--*spares] : take(net, net->batch * values, sizeof(float));
}

/* Allocates the gradients of the blocks first + 1 .. end - 1. Blocks whose gradients are never needed at the
 * same time share memory. */
static void plan_deltas(struct net *net, uint32_t first, uint32_t end)
{
    float *spare[NET_BLOCKS_MAX];
    uint32_t spares = 0;
    size_t values = 0;
    for (uint32_t i = first + 1; i < end; i++)
        values = larger(values, delta_values(&net->blocks[i]));
    for (uint32_t i = end - 1; i > first; i--) {
        struct block *block = &net->blocks[i];
        give_deltas(net, block, NULL, values, spare, &spares); /* the last block */
        give_deltas(net, &net->blocks[block->from - net->blocks], block, values, spare, &spares);
        if (block->added)
            give_deltas(net, &net->blocks[block->added - net->blocks], block, values, spare, &spares);
        if (i + 1 < net->block_count || !net->train->stage) /* kept until the micro-batch's backward pass */
            spare[spares++] = block->deltas;
    }
}

/* Positions of which a BATCH_NORM adds up floats; the sums of more positions are added up in double. A band
 * fits in an L2 cache. */
#define BAND_POSITIONS(pitch) ((pitch) < 16384 ? 16384 / (pitch) : 1)

/* Allocates what a net with by_layer needs. */
static void plan_layers(struct net *net)
{
    size_t shared = 0;
    for (uint32_t i = 1; i < net->flat; i++) {
        struct block *block = &net->blocks[i];
        if (block->kind == BLOCK_CONV && block->conv.padded)
            net->around_values =
                larger(net->around_values, positions_of(&block->conv.around) * block->in_pitch);
        if (block->kind != BLOCK_BATCH_NORM)
            continue;
        block->band = BAND_POSITIONS(block->out_pitch);
        block->bands = (block->positions + block->band - 1) / block->band;
        block->moments = take(net, CHANNEL_VALUES * block->out_pitch, sizeof(float));
        net->partial_values = larger(net->partial_values, 2 * block->bands * block->out_pitch);
        shared = larger(shared, 2 * block->out_pitch);
    }
    if (net->train->forward_only)
        return;
    net->partial = take(net, net->batch * net->partial_values, sizeof(float));
    net->arounds = take(net, net->batch * net->around_values, sizeof(float));
    net->shared = take(net, shared, sizeof(float));
    plan_deltas(net, 0, net->flat);
}

/* Returns the values that net->muon needs: two squares, and a matrix. */
static size_t muon_values(const struct net *net)
{
    size_t most = 0;
    for (const struct span *span = net->spans; span < net->spans + net->span_count; span++) {
        const size_t count = span->rows < span->columns ? span->rows : span->columns;
        const size_t values = 2 * count * count + span->rows * span->pitch;
        most = span->how.hidden && values > most ? values : most;
    }
    return most;
}

static void plan_arenas(struct net *net)
{
    float **const arenas[] = {&net->parameters, &net->gradients, &net->m, &net->v};
    static const enum memory_part parts[] = {MEMORY_PARAMETERS, MEMORY_GRADIENTS, MEMORY_OPTIMIZER,
                                             MEMORY_OPTIMIZER};
    size_t count = net->train->forward_only ? 1 : COUNT_OF(arenas);
    for (size_t i = 0; i < count; i++) {
        net->part = parts[i];
        *arenas[i] = take(net, net->arena_values, sizeof(float));
    }
    net->part = MEMORY_GRADIENTS;
    if (!net->train->forward_only)
        net->sums = take(net, net->chunks * net->chunk_values, sizeof(float));
    net->part = MEMORY_OPTIMIZER;
    if (train_averages(net->train))
        net->ema = take(net, net->arena_values, sizeof(float));
    if (!net->train->forward_only && net->train->optimizer.clip_norm > 0)
        net->squares = take(net, net->arena_values / NET_PART + 1, sizeof *net->squares);
    if (train_needs_tensors(net->train))
        net->adjusted = take(net, net->arena_values, sizeof(float));
    if (train_needs_tensors(net->train) && net->train->optimizer.kind == OPTIMIZER_MUON)
        net->muon = take(net, muon_values(net), sizeof(float));
    if (net->train->exchange && net->train->exchange->mixed)
        net->common = take(net, net->train->model->arena_values, sizeof(float));
}

/* Sets the offset of each dropout layer's random bytes. */
static void plan_draws(struct net *net)
{
    const struct model *model = net->train->model;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].spec.kind == LAYER_DROPOUT) {
            net->draws_of[model->layers[i].number] = net->kept_draws;
            net->kept_draws += round_up(model->layers[i].out_values, DRAW_DROPOUT_ELEMENTS);
        }
}

static void plan_batch(struct net *net)
{
    size_t longest = net->batch;
    for (uint32_t i = net->flat; i < net->block_count; i++)
        longest = larger(longest, larger(net->blocks[i].row_values, net->blocks[i].tokens));
    net->iota = take(net, longest, sizeof *net->iota);
    for (size_t i = 0; net->iota && i < longest; i++)
        net->iota[i] = (uint32_t)i;
    net->step_numbers =
        take(net, train_entries(net->train, (uint32_t)larger(net->batch, train_share_max(net->train))),
             sizeof *net->step_numbers);
    net->numbers = net->step_numbers;
    net->losses = take(net, net->batch, sizeof *net->losses);
    net->correct = take(net, net->batch, sizeof *net->correct);
    net->kept = take(net, net->batch * net->kept_values, sizeof(float));
    net->argmax = take(net, net->batch * net->kept_argmax, sizeof *net->argmax);
    net->draws = take(net, net->batch * net->kept_draws, sizeof *net->draws);
    if (net->kept_delta_values > 0)
        net->kept_deltas = take(net, net->batch * net->kept_delta_values, sizeof(float));
    net->workers = take(net, (size_t)net->threads, sizeof *net->workers);
}

/* Checks that the offsets in the outputs of all blocks fit in 32 bits. */
static enum status check_offsets(const struct net *net)
{
    for (uint32_t i = 0; i < net->block_count; i++) {
        const struct block *block = &net->blocks[i];
        size_t rows = block->kind >= BLOCK_FLAT ? (size_t)net->batch * block->tokens : block->positions;
        if (rows > UINT32_MAX / block->out_pitch)
            return status_set(STATUS_TOO_LARGE,
                              "omp: an output of a layer has more than 2^32 values; lower --batch (%" PRIu32
                              "), or use smaller samples",
                              net->batch);
    }
    return STATUS_OK;
}

enum status net_plan(struct net *net)
{
    net->by_layer = runs_by_layer(net->train->model);
    net->chunks = net->by_layer ? 1 : net->chunks;
    TRY(make_blocks(net));
    for (uint32_t i = 0; i < net->block_count; i++)
        lay_out_block(net, &net->blocks[i]);
    lay_out_statistics(net);
    TRY(check_offsets(net));
    for (uint32_t i = 0; i < net->block_count; i++)
        if (net->blocks[i].kind == BLOCK_CONV)
            plan_conv(net, &net->blocks[i]);
        else if (net->blocks[i].kind >= BLOCK_FLAT)
            plan_rows(net, &net->blocks[i]);
    if (net->train->model->transformer && !net->train->forward_only)
        plan_deltas(net, net->flat, net->block_count);
    if (net->by_layer)
        plan_layers(net);
    plan_draws(net);
    plan_batch(net);
    plan_arenas(net);
    net->part = MEMORY_WORKSPACE;
    for (int i = 0; net->workers && i < net->threads; i++)
        plan_worker(net, &net->workers[i]);
    TRY(net->refused);
    if (net->out_of_memory)
        return status_set(STATUS_EXHAUSTED,
                          "omp: out of memory for a batch of %" PRIu32 " samples; lower --batch", net->batch);
    return STATUS_OK;
}

/* ---- Parameters ---- */

/* Copies tensors row by row between the layout of model.h and that of `net`, in which the rows of linear
 * layers are padded. If `back` is true, copies to the layout of model.h. */
static void copy_arena(const struct net *net, const float *from, float *into, bool back)
{
    for (uint32_t i = 1; i < net->block_count; i++) {
        const struct block *block = &net->blocks[i];
        if (!block->layer || block->layer->weight_values == 0)
            continue;
        bool linear = block->kind == BLOCK_LINEAR;
        size_t rows = linear ? block->layer->bias_values : 1, count = block->layer->weight_values / rows;
        for (size_t r = 0; r < rows; r++) {
            size_t ours = block->weight + r * (linear ? block->in_pitch : count);
            size_t theirs = block->layer->weight + r * count;
            memcpy(into + (back ? theirs : ours), from + (back ? ours : theirs), count * sizeof *into);
        }
        memcpy(into + (back ? block->layer->bias : block->bias),
               from + (back ? block->bias : block->layer->bias), block->layer->bias_values * sizeof *into);
        const size_t statistics = block->kind == BLOCK_BATCH_NORM ? block->out.channels : 0;
        memcpy(into + (back ? block->layer->mean : block->mean),
               from + (back ? block->mean : block->layer->mean), statistics * sizeof *into);
        memcpy(into + (back ? block->layer->variance : block->variance),
               from + (back ? block->variance : block->layer->variance), statistics * sizeof *into);
    }
}

void net_take_arena(const struct net *net, const float *from, float *into)
{
    copy_arena(net, from, into, false);
}

void net_give_arena(const struct net *net, const float *from, float *into)
{
    memset(into, 0, net->train->model->arena_values * sizeof *into);
    copy_arena(net, from, into, true);
}

/* Returns the index of the weight (tap, channel) of output channel o in conv->forward. Without pooling, the
 * sums of gradients have the same layout. */
static size_t forward_at(const struct block *block, size_t o, size_t tap, size_t channel)
{
    return (tap * block->in.channels + channel) * block->out_pitch + o;
}

/* Returns the index of the weight (tap, channel) of output channel o in conv->backward of a block without
 * pooling. */
static size_t backward_at(const struct block *block, size_t o, size_t tap, size_t channel)
{
    return (block->conv.order[tap] * (size_t)block->out.channels + o) * block->in_pitch + channel;
}

/* Returns the index of the weight (tap, channel) of output channel o in conv->backward of a block with
 * pooling. The sums of gradients of this block have the same layout. */
static size_t window_at(const struct net *net, const struct block *block, size_t o, size_t tap,
                        size_t channel)
{
    const struct conv *conv = &block->conv;
    size_t row = tap / conv->kernel[2], x = tap % conv->kernel[2], lanes = net->kernel->lanes;
    return (o * conv->vectors + row * conv->run_vectors) * lanes + x * block->in_pitch + channel;
}

static void prepare_conv(const struct net *net, const struct block *block)
{
    const struct conv *conv = &block->conv;
    const float *weight = net->parameters + block->weight;
    size_t taps = conv->depth / block->in.channels;
    for (size_t o = 0; o < block->out.channels; o++)
        for (size_t c = 0; c < block->in.channels; c++)
            for (size_t tap = 0; tap < taps; tap++, weight++) {
                conv->forward[forward_at(block, o, tap, c)] = *weight;
                if (conv->backward && block->pool)
                    conv->backward[window_at(net, block, o, tap, c)] = *weight;
                else if (conv->backward)
                    conv->backward[backward_at(block, o, tap, c)] = *weight;
            }
}

static void prepare_linear(const struct net *net, const struct block *block)
{
    enum { COLUMNS = 64 };
    const float *weight = net->parameters + block->weight;
    size_t columns = block[-1].row_values;
#pragma omp for nowait
    for (size_t j = 0; j < columns; j += COLUMNS)
        net->kernel->transpose(weight + j, block->in_pitch, block->layer->bias_values,
                               columns - j < COLUMNS ? columns - j : COLUMNS,
                               block->transposed + j * block->out_vectors, block->out_vectors);
}

void net_prepare_weights(struct net *net)
{
    for (uint32_t i = 1; i < net->block_count; i++)
        if (net->blocks[i].kind == BLOCK_CONV) {
#pragma omp single nowait
            prepare_conv(net, &net->blocks[i]);
        } else if (net->blocks[i].kind == BLOCK_LINEAR)
            prepare_linear(net, &net->blocks[i]);
    barrier_wait(&net->barrier);
}

static void give_conv(struct net *net, const struct block *block, const float *sums)
{
    const struct conv *conv = &block->conv;
    float *gradient = net->gradients + block->weight;
    size_t taps = conv->depth / block->in.channels;
    for (size_t o = 0; o < block->out.channels; o++)
        for (size_t c = 0; c < block->in.channels; c++)
            for (size_t tap = 0; tap < taps; tap++)
                *gradient++ =
                    sums[block->pool ? window_at(net, block, o, tap, c) : forward_at(block, o, tap, c)];
    memcpy(net->gradients + block->bias, sums + conv->gradient_count,
           block->layer->bias_values * sizeof *sums);
}

void net_clear_sums(struct net *net)
{
#pragma omp for nowait
    for (uint32_t chunk = 0; chunk < net->chunks; chunk++)
        memset(net->sums + chunk * net->chunk_values, 0, net->chunk_values * sizeof *net->sums);
}

void net_gather_sums(struct net *net, uint32_t chunks)
{
    enum { PART = 1024 };
    size_t values = net->chunk_values;
#pragma omp for nowait
    for (size_t first = 0; first < values; first += PART)
        for (uint32_t chunk = 1; chunk < chunks; chunk++)
            net->kernel->add(net->sums + chunk * values + first, net->sums + first,
                             values - first < PART ? values - first : PART);
    barrier_wait(&net->barrier);
    for (uint32_t i = 1; i < net->flat; i++)
        if (net->blocks[i].kind == BLOCK_CONV) {
#pragma omp single nowait
            give_conv(net, &net->blocks[i], net->sums + net->blocks[i].conv.gradient);
        }
    barrier_wait(&net->barrier);
}

/* Returns the sum of the squares of `count` values, with LANES partial sums so that compilers use SIMD. */
static double sum_squares(const float *values, size_t count)
{
    enum { LANES = 16 };
    double sums[LANES] = {0}, sum = 0;
    for (size_t i = 0; i + LANES <= count; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++)
            sums[lane] += (double)values[i + lane] * values[i + lane];
    for (size_t i = count - count % LANES; i < count; i++)
        sum += (double)values[i] * values[i];
    for (size_t lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

/* Returns the factor that clips the gradients. All threads return the same bits, because each adds up the
 * sums of the parts in order. */
static float clip(struct net *net)
{
    const double clip_norm = net->train->optimizer.clip_norm;
    double squares = 0;
    if (!net->squares)
        return 1;
#pragma omp for nowait
    for (size_t i = 0; i < net->trained_values; i += NET_PART)
        net->squares[i / NET_PART] = sum_squares(
            net->gradients + i, net->trained_values - i < NET_PART ? net->trained_values - i : NET_PART);
    barrier_wait(&net->barrier);
    for (size_t i = 0; i < net->trained_values; i += NET_PART)
        squares += net->squares[i / NET_PART];
#pragma omp master
    {
        net->totals.norms += sqrt(squares);
        net->totals.normed++;
    }
    return (float)optimizer_clip(clip_norm, sqrt(squares));
}

/* ---- Updates that need whole tensors. Every value is computed by one thread, so the results do not depend
 * on the number of threads ---- */

/* Copies the gradients of a tensor to net->adjusted, and clips each unit (optimizer_clip_unit()). */
static void adjust_units(struct net *net, const struct span *span)
{
    const double factor = span->head || span->how.statistic > 0 ? 0 : net->train->optimizer.clip_adaptive;
    const size_t pitch = span->pitch;
#pragma omp for nowait
    for (size_t r = 0; r < span->rows; r++) {
        const size_t first = span->first + r * pitch;
        const float clip =
            factor > 0 ? (float)optimizer_clip_unit(factor, sum_squares(net->parameters + first, pitch),
                                                    sum_squares(net->gradients + first, pitch))
                       : 1;
        for (size_t i = first; i < first + pitch; i++)
            net->adjusted[i] = net->gradients[i] * clip;
    }
}

/* LAMB: updates the moments of a tensor, and sets the factor of its step. */
static void find_trust(struct net *net, const struct update *update, struct span *span)
{
    double parameters = 0, directions = 0;
    for (size_t i = span->first; i < span->first + span->count; i++) {
        optimizer_moments_step(update, optimizer_clipped(update, net->adjusted[i]), &net->m[i], &net->v[i]);
        const double at = net->parameters[i],
                     way = optimizer_direction(update, net->parameters[i], net->m[i], net->v[i]);
        parameters += at * at;
        directions += way * way;
    }
    span->trust = (float)optimizer_trust(update->decay, parameters, directions);
}

static float dot(const float *a, const float *b, size_t count)
{
    enum { LANES = 16 };
    float sums[LANES] = {0}, sum = 0;
    for (size_t i = 0; i + LANES <= count; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++)
            sums[lane] += a[i + lane] * b[i + lane];
    for (size_t i = count - count % LANES; i < count; i++)
        sum += a[i] * b[i];
    for (size_t lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

static void add_scaled(float factor, const float *restrict from, float *restrict to, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] += factor * from[i];
}

/* Sets to[0 .. count) to `factor` times these values of `from`. */
static void scale(float factor, const float *restrict from, float *restrict to, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = factor * from[i];
}

/* Sets `gram` to the products of all pairs of rows of the matrix x or, if it is tall, of all pairs of its
 * columns, of which there are `count`. */
static void find_gram(const struct span *span, const float *x, size_t count, float *gram)
{
    const bool tall = span->rows > span->columns;
#pragma omp for nowait
    for (size_t i = 0; i < count; i++) {
        float *row = gram + i * count;
        for (size_t j = 0; !tall && j < count; j++)
            row[j] = dot(x + i * span->pitch, x + j * span->pitch, span->columns);
        for (size_t r = 0; tall && r < span->rows; r++)
            if (r == 0)
                scale(x[i], x, row, count);
            else
                add_scaled(x[r * span->pitch + i], x + r * span->pitch, row, count);
    }
}

/* Muon: replaces the matrix of a span in net->adjusted by the result of the Newton-Schulz iteration. */
static void orthogonalise(struct net *net, const struct span *span)
{
    const size_t pitch = span->pitch, tall = span->rows > span->columns;
    const size_t count = tall ? span->columns : span->rows;
    float *x = net->adjusted + span->first, *gram = net->muon, *factors = gram + count * count,
          *next = factors + count * count;
    const float norm =
        (float)(1 / (sqrt(sum_squares(x, span->rows * pitch)) + MUON_EPSILON)); /* same in all threads */
#pragma omp for nowait
    for (size_t r = 0; r < span->rows; r++)
        scale(norm, x + r * pitch, next + r * pitch, pitch);
    barrier_wait(&net->barrier);
    for (int iteration = 0; iteration < MUON_ITERATIONS; iteration++) {
        const float *from = iteration % 2 ? x : next;
        float *to = iteration % 2 ? next : x;
        find_gram(span, from, count, gram);
        barrier_wait(&net->barrier);
#pragma omp for nowait
        for (size_t i = 0; i < count; i++) {
            scale((float)MUON_B, gram + i * count, factors + i * count, count);
            for (size_t j = 0; j < count; j++)
                add_scaled((float)MUON_C * gram[i * count + j], gram + j * count, factors + i * count, count);
        }
        barrier_wait(&net->barrier);
#pragma omp for nowait
        for (size_t r = 0; r < span->rows; r++) {
            scale((float)MUON_A, from + r * pitch, to + r * pitch, pitch);
            for (size_t j = 0; j < count; j++)
                if (tall)
                    add_scaled(from[r * pitch + j], factors + j * count, to + r * pitch, count);
                else
                    add_scaled(factors[r * count + j], from + j * pitch, to + r * pitch, pitch);
        }
        barrier_wait(&net->barrier);
    }
}
_Static_assert(MUON_ITERATIONS % 2 == 1, "the last iteration of orthogonalise() writes net->adjusted");

/* Muon: the pass over a hidden matrix. */
static void find_matrix(struct net *net, const struct update *update, const struct span *span)
{
#pragma omp for nowait
    for (size_t r = 0; r < span->rows; r++)
        for (size_t i = span->first + r * span->pitch; i < span->first + (r + 1) * span->pitch; i++)
            net->adjusted[i] =
                optimizer_momentum(update, optimizer_clipped(update, net->adjusted[i]), &net->m[i]);
    barrier_wait(&net->barrier);
    orthogonalise(net, span);
}

/* The pass over whole tensors before the update of their parameters. */
static void adjust(struct net *net, const struct update *update)
{
    for (uint32_t s = 0; s < net->span_count; s++)
        adjust_units(net, &net->spans[s]);
    barrier_wait(&net->barrier);
    if (update->kind == OPTIMIZER_LAMB) {
#pragma omp for schedule(dynamic) nowait
        for (uint32_t s = 0; s < net->span_count; s++) {
            const struct update of = optimizer_of(update, net->spans[s].how);
            if (of.kind == OPTIMIZER_LAMB)
                find_trust(net, &of, &net->spans[s]);
        }
        barrier_wait(&net->barrier);
    }
    for (uint32_t s = 0; update->kind == OPTIMIZER_MUON && s < net->span_count; s++)
        if (net->spans[s].how.hidden)
            find_matrix(net, update, &net->spans[s]);
}

/* ---- The update ---- */

/* Updates `count` parameters from index `i` on. */
static void update_part(struct net *net, const struct update *update, size_t i, size_t count)
{
    const float *gradients = net->adjusted ? net->adjusted : net->gradients;
    net->kernel->update(update, gradients + i, net->parameters + i, net->m + i, net->v + i, count);
    for (size_t end = i + count; net->ema && i < end; i++)
        net->ema[i] = optimizer_average(update, net->ema[i], net->parameters[i]);
}

void net_update(struct net *net, uint64_t number)
{
    const struct train *train = net->train;
    struct update update = optimizer_at(&train->optimizer, &train->schedule, number);
    RANGE(UPDATE);
    update.clip = clip(net);
    if (net->adjusted)
        adjust(net, &update);
    for (uint32_t s = 0; s < net->span_count; s++) {
        const struct span *span = &net->spans[s];
        struct update of = optimizer_of(&update, span->how);
        of.trust = of.kind == OPTIMIZER_MUON ? (float)optimizer_matrix_scale(span->rows, span->columns)
                                             : span->trust;
        const size_t end = span->first + span->count;
#pragma omp for nowait
        for (size_t i = span->first; i < end; i += NET_PART)
            update_part(net, &of, i, end - i < NET_PART ? end - i : NET_PART);
    }
    barrier_wait(&net->barrier);
    net_prepare_weights(net);
}
