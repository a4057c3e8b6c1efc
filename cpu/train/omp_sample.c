/* `train-omp`: the blocks before FLAT. Without batch normalisation, one thread passes one sample through all
 * of them, forward and backward. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "core/phase.h"
#include "core/timer.h"
#include "omp_net.h"

/* Returns the data that a block keeps for a sample. */
static float *values_of(const struct net *net, const struct block *block, const struct passing *passing)
{
    return net->kept + passing->index * net->kept_values + block->values;
}

static uint32_t *argmax_of(const struct net *net, const struct block *block, const struct passing *passing)
{
    return net->argmax + passing->index * net->kept_argmax + block->argmax;
}

static size_t values_count(const struct block *block)
{
    return block->kind >= BLOCK_FLAT ? shape_values(&block->out) : block->positions * block->out_pitch;
}

/* ---- In-place layers ---- */

/* Applies dropout to values that are stored position by position. `bytes` has one random byte
 * per value, in the order (channel, position). */
static void drop_positions(const struct block *block, const uint8_t *bytes, uint32_t threshold, float *values)
{
    const float scale = 256.0f / (float)(256 - threshold);
    for (uint32_t c = 0; c < block->out.channels; c++)
        for (size_t p = 0; p < block->positions; p++)
            values[p * block->out_pitch + c] *= *bytes++ >= threshold ? scale : 0;
}

static void drop(const struct net *net, const struct block *block, const struct layer *layer,
                 const uint8_t *bytes, float *values)
{
    uint32_t threshold = (uint32_t)(layer->spec.rate * 256);
    if (block->kind >= BLOCK_FLAT)
        net->kernel->drop(bytes, threshold, values, layer->out_values);
    else
        drop_positions(block, bytes, threshold, values);
}

static uint8_t *draws_of(const struct net *net, const struct layer *layer, const struct passing *passing)
{
    return net->draws + passing->index * net->kept_draws + net->draws_of[layer->number];
}

void net_after(const struct net *net, const struct block *block, const struct passing *passing, float *values)
{
    for (uint32_t i = block->after; i < block->after_end; i++) {
        const struct layer *layer = &net->train->model->layers[i];
        if (layer->spec.kind == LAYER_RELU) {
            net->kernel->relu(values, values_count(block));
        } else if (passing->training) {
            uint8_t *bytes = draws_of(net, layer, passing);
            net->kernel->draw(net->train->seed, passing->epoch, passing->sample, layer->number,
                              layer->out_values, bytes);
            drop(net, block, layer, bytes, values);
        }
    }
}

void net_after_backward(const struct net *net, const struct block *block, const struct passing *passing,
                        const float *values, float *deltas)
{
    for (uint32_t i = block->after_end; i-- > block->after;) {
        const struct layer *layer = &net->train->model->layers[i];
        if (layer->spec.kind == LAYER_RELU)
            net->kernel->relu_backward(values, deltas, values_count(block));
        else
            drop(net, block, layer, draws_of(net, layer, passing), deltas);
    }
    if (block->relu)
        net->kernel->relu_backward(values, deltas, values_count(block));
}

/* ---- Zero padding ---- */

/* Copies `small` into the middle of `large`, `before` positions from its corner. If `back` is true, copies
 * from `large` to `small` instead. */
static void copy_inner(const struct shape *inner, const struct shape *outer, const uint32_t *before,
                       size_t pitch, float *small, float *large, bool back)
{
    size_t row = (size_t)inner->width * pitch;
    for (uint32_t t = 0; t < inner->depth; t++)
        for (uint32_t y = 0; y < inner->height; y++, small += row) {
            size_t above = ((size_t)t + before[0]) * outer->height + y + before[1];
            float *middle = large + (above * outer->width + before[2]) * pitch;
            memcpy(back ? small : middle, back ? middle : small, row * sizeof *small);
        }
}

/* Returns the zero-padded input of a convolution, built in `room`, or the input itself if the convolution has
 * no padding. */
static const float *net_with_zeros(const struct block *block, const float *in, float *room)
{
    const struct conv *conv = &block->conv;
    if (!conv->padded)
        return in;
    memset(room, 0, positions_of(&conv->around) * block->in_pitch * sizeof *room);
    copy_inner(&block->in, &conv->around, conv->padding, block->in_pitch, (float *)in, room, false);
    return room;
}

/* ---- Forward ---- */

static void conv_forward(const struct net *net, struct worker *worker, const struct block *block,
                         const float *in, float *out, uint32_t *argmax)
{
    const struct conv *conv = &block->conv;
    const struct gemm gemm = {
        .a = net_with_zeros(block, in, worker->around),
        .rows = conv->positions,
        .steps = conv->taps,
        .row_count = positions_of(&block->layer->out),
        .step_count = conv->depth,
        .b = conv->forward,
        .b_pitch = block->out_pitch,
        .c = block->pool ? worker->plain : out,
        .c_pitch = block->out_pitch,
        .columns = block->out_pitch,
        .bias = block->layer->bias_values ? net->parameters + block->bias : NULL,
        .relu = block->relu,
    };
    net->gemm.multiply(&gemm, 0, net->gemm.tiles(&gemm));
    if (block->pool)
        net->kernel->pool(&block->pooling, worker->plain, out, argmax);
}

static void add_forward(const struct net *net, const struct block *block, const float *in, const float *added,
                        float *out)
{
    size_t count = values_count(block);
    memcpy(out, in, count * sizeof *out);
    net->kernel->add(added, out, count);
}

static void mean_forward(const struct net *net, const struct block *block, const float *in, float *out)
{
    size_t positions = positions_of(&block->in);
    memset(out, 0, block->out_pitch * sizeof *out);
    for (size_t p = 0; p < positions; p++)
        net->kernel->add(in + p * block->in_pitch, out, block->out_pitch);
    for (size_t c = 0; c < block->out_pitch; c++)
        out[c] /= (float)positions;
}

/* Gathers the sample in C order. */
static const float *gather(const struct net *net, struct worker *worker, const struct passing *passing)
{
    const struct data *data = net->train->data;
    RANGE(GATHER);
    double begin_s = timer_now_s();
    if (passing->training)
        feed_gather(&net->feed, &net->mix, passing->epoch, net->step_numbers, net->step_count,
                    net->fed + passing->index - net->begin, worker->partner, worker->sample);
    else
        data_gather(data, data_sample(data, passing->part, passing->sample), (struct draw_move){0},
                    worker->sample);
    worker->data_s += timer_now_s() - begin_s;
    return worker->sample;
}

/* Gathers a sample and stores it as the output of block INPUT. */
static void net_take_input(const struct net *net, struct worker *worker, const struct passing *passing)
{
    const struct block *input = &net->blocks[0];
    const size_t at = (passing->index - net->begin) * net->train->model->input_values;
    const float *from = net->inputs ? net->inputs + at : gather(net, worker, passing);
    /* Transposes from C order, so that the channels are innermost. */
    net->kernel->transpose(from, input->positions, input->out.channels, input->positions,
                           values_of(net, input, passing), input->out_pitch);
    net_after(net, input, passing, values_of(net, input, passing));
}

/* Cuts a sample in C order into patches: one row per patch. */
static void cut_patches(const struct layer *layer, const float *sample, const struct block *flat, float *rows)
{
    const struct shape *in = &layer->in;
    const uint32_t height = layer->spec.kernel[1], width = layer->spec.kernel[2], across = in->width / width;
    for (uint32_t token = 0; token < flat->tokens; token++) {
        float *to = rows + token * flat->out_pitch;
        for (uint32_t c = 0; c < in->channels; c++)
            for (uint32_t y = 0; y < height; y++, to += width) {
                size_t line = (size_t)c * in->height + token / across * height + y;
                memcpy(to, sample + line * in->width + token % across * width, width * sizeof *to);
            }
    }
}

/* Normalises with the values that the engine has computed for all samples. */
static void channels_forward(const struct net *net, const struct block *block, const float *in, float *out)
{
    const size_t pitch = block->out_pitch;
    const float *of = block->moments;
    net->kernel->channel_apply(in, block->positions, pitch, of + CHANNEL_MEAN * pitch,
                               of + CHANNEL_SCALE * pitch, of + CHANNEL_SHIFT * pitch, out);
}

/* Computes a block before FLAT, with its in-place layers, for one sample. */
static void net_block_forward(const struct net *net, struct worker *worker, const struct block *block,
                              const struct passing *passing)
{
    const float *in = values_of(net, block->from, passing);
    float *out = values_of(net, block, passing);
    if (block->kind == BLOCK_CONV)
        conv_forward(net, worker, block, in, out, argmax_of(net, block, passing));
    else if (block->kind == BLOCK_ADD)
        add_forward(net, block, in, values_of(net, block->added, passing), out);
    else if (block->kind == BLOCK_MEAN)
        mean_forward(net, block, in, out);
    else if (block->kind == BLOCK_BATCH_NORM)
        channels_forward(net, block, in, out);
    else
        net->kernel->pool(&block->pooling, in, out, argmax_of(net, block, passing));
    net_after(net, block, passing, out);
}

/* Copies the output of the block before FLAT to the row of a sample. net_flat_backward() copies the gradient
 * of this row to `deltas`. */
static void net_flat_forward(const struct net *net, const struct passing *passing)
{
    const struct block *flat = &net->blocks[net->flat];
    float *row = flat->rows + passing->index * flat->out_pitch;
    net->kernel->transpose(values_of(net, flat - 1, passing), flat->in_pitch, flat[-1].positions,
                           flat->in.channels, row, flat[-1].positions);
    net_after(net, flat, passing, row);
}

void net_sample_forward(const struct net *net, struct worker *worker, const struct passing *passing)
{
    const struct model *model = net->train->model;
    if (model->transformer) {
        const struct block *patches = &net->blocks[net->flat];
        if (net->inputs) {
            for (size_t row = 0; row < patches->tokens; row++)
                memcpy(net_row(net, patches, passing->index - net->begin) + row * patches->out_pitch,
                       net->inputs + (passing->index - net->begin) * model->input_values +
                           row * patches->row_values,
                       patches->row_values * sizeof(float));
            return;
        }
        cut_patches(&model->layers[0], gather(net, worker, passing), patches,
                    patches->rows + (size_t)passing->index * patches->tokens * patches->out_pitch);
        return;
    }
    net_take_input(net, worker, passing);
    for (uint32_t i = 1; i < net->flat; i++)
        net_block_forward(net, worker, &net->blocks[i], passing);
    net_flat_forward(net, passing);
}

/* ---- Backward ---- */

static void sum_positions(const struct net *net, const struct block *block, const float *deltas, float *sums)
{
    for (size_t p = 0; p < block->positions; p++)
        net->kernel->add(deltas + p * block->out_pitch, sums, block->out_pitch);
}

/* Computes the gradient of the input: convolves the zero-padded output gradient with the mirrored kernel.
 * With a stride, does so for each phase of the inputs, and adds the results up in in_deltas. */
static void conv_backward_input(const struct net *net, struct worker *worker, const struct block *block,
                                const float *deltas, float *in_deltas, bool adds)
{
    const struct conv *conv = &block->conv;
    const bool strided = conv->phase_count > 1;
    memset(worker->wide, 0, positions_of(&conv->wide) * block->out_pitch * sizeof *worker->wide);
    copy_inner(&block->out, &conv->wide, conv->wide_before, block->out_pitch, (float *)deltas, worker->wide,
               false);
    if (strided && !adds)
        memset(in_deltas, 0, positions_of(&block->in) * block->in_pitch * sizeof *in_deltas);
    for (size_t i = 0; i < conv->phase_count; i++) {
        const struct conv_phase *phase = &conv->phases[i];
        const struct gemm gemm = {
            .a = worker->wide,
            .rows = phase->rows,
            .steps = phase->taps,
            .row_count = phase->row_count,
            .step_count = phase->tap_count * block->out.channels,
            .b = conv->backward + phase->first_tap * block->out.channels * block->in_pitch,
            .b_pitch = block->in_pitch,
            .c = strided ? worker->strided : in_deltas,
            .c_pitch = block->in_pitch,
            .columns = block->in_pitch,
            .add = !strided && adds,
        };
        if (gemm.row_count == 0 || gemm.step_count == 0)
            continue;
        net->gemm.multiply(&gemm, 0, net->gemm.tiles(&gemm));
        for (size_t r = 0; strided && r < phase->row_count; r++)
            net->kernel->add(worker->strided + r * block->in_pitch, in_deltas + phase->inputs[r],
                             block->in_pitch);
    }
}

/* Runs the backward pass of a convolution without pooling. `sums` and `in_deltas` are NULL if they are not
 * needed. */
static void conv_backward(const struct net *net, struct worker *worker, const struct block *block,
                          const float *in, const float *deltas, float *in_deltas, bool adds, float *sums)
{
    const struct conv *conv = &block->conv;
    if (in_deltas)
        conv_backward_input(net, worker, block, deltas, in_deltas, adds);
    if (!sums)
        return;
    const struct gemm gemm = {
        .a = net_with_zeros(block, in, worker->around),
        .rows = conv->taps,
        .steps = conv->positions,
        .row_count = conv->depth,
        .step_count = block->positions,
        .b = deltas,
        .b_pitch = block->out_pitch,
        .c = sums,
        .c_pitch = block->out_pitch,
        .columns = block->out_pitch,
        .add = true,
    };
    net->gemm.multiply(&gemm, 0, net->gemm.tiles(&gemm));
}

/* Lists the argmax offsets and non-zero gradients of pooling windows first .. first + count - 1. There is one
 * list per output channel, with room for `count` entries. */
static void list_argmax(const struct block *block, struct worker *worker, const uint32_t *argmax,
                        const float *deltas, size_t first, size_t count)
{
    const uint32_t *positions = block->conv.positions;
    uint32_t *counts = worker->list_counts;
    memset(counts, 0, block->out.channels * sizeof *counts);
    for (size_t window = first; window < first + count; window++)
        for (uint32_t o = 0; o < block->out.channels; o++) {
            size_t at = window * block->out_pitch + o, end = o * count + counts[o];
            worker->list_positions[end] = positions[argmax[at]];
            worker->list_deltas[end] = deltas[at];
            /* The next entry overwrites a zero gradient. This avoids a branch that mispredicts. */
            counts[o] += deltas[at] != 0;
        }
}

/* Runs the backward pass of a convolution and its max-pooling. Only the maximum of each window can have a
 * non-zero gradient, so this is far less work than a dense GEMM. */
static void argmax_backward(const struct net *net, struct worker *worker, const struct block *block,
                            const float *in, const uint32_t *argmax, const float *deltas, float *in_deltas,
                            float *sums)
{
    const struct conv *conv = &block->conv;
    const float *from = net_with_zeros(block, in, worker->around);
    float *to = in_deltas && conv->padded ? worker->wide : in_deltas;
    size_t window = conv->vectors * net->kernel->lanes;
    if (to)
        memset(to, 0, positions_of(&conv->around) * block->in_pitch * sizeof *to);
    for (size_t first = 0; first < block->positions; first += conv->band) {
        size_t left = block->positions - first, count = left < conv->band ? left : conv->band;
        list_argmax(block, worker, argmax, deltas, first, count);
        for (uint32_t o = 0; o < block->out.channels; o++) {
            const struct argmax_list list = {worker->list_positions + o * count,
                                             worker->list_deltas + o * count, worker->list_counts[o]};
            net->kernel->spread(&list, conv->runs, conv->vectors, from, sums ? sums + o * window : NULL,
                                conv->backward + o * window, to);
        }
    }
    if (to != in_deltas)
        copy_inner(&block->in, &conv->around, conv->padding, block->in_pitch, in_deltas, to, true);
}

static void pool_backward(const struct block *block, const uint32_t *argmax, const float *deltas,
                          float *in_deltas, bool adds)
{
    if (!adds)
        memset(in_deltas, 0, positions_of(&block->in) * block->in_pitch * sizeof *in_deltas);
    for (size_t p = 0; p < block->positions; p++)
        for (size_t c = 0; c < block->out_pitch; c++) {
            size_t at = p * block->out_pitch + c;
            in_deltas[argmax[at] * block->in_pitch + c] += deltas[at];
        }
}

/* Both inputs of an ADD have the same gradient. The backward pass reaches the earlier block later, so a copy
 * of the gradient waits in worker->held. */
static void add_backward(const struct worker *worker, const struct block *block, const float *deltas,
                         float *in_deltas)
{
    size_t bytes = values_count(block) * sizeof *deltas;
    memcpy(worker->held + block->held, deltas, bytes);
    if (in_deltas)
        memcpy(in_deltas, deltas, bytes);
}

/* Adds the gradients that wait for `block` in worker->held, in the order of the ADD blocks. */
static void take_held(const struct net *net, const struct worker *worker, const struct block *block,
                      float *deltas)
{
    for (const struct block *add = block + 1; add < &net->blocks[net->flat]; add++)
        if (add->added == block)
            net->kernel->add(worker->held + add->held, deltas, values_count(block));
}

static void mean_backward(const struct block *block, const float *deltas, float *in_deltas, bool adds)
{
    size_t positions = positions_of(&block->in);
    for (size_t p = 0; p < positions; p++)
        for (size_t c = 0; c < block->out_pitch; c++)
            in_deltas[p * block->in_pitch + c] =
                (adds ? in_deltas[p * block->in_pitch + c] : 0) + deltas[c] / (float)positions;
}

/* Runs the backward pass of a convolution. `sums` and `in_deltas` are NULL if they are not needed. */
static void conv_block_backward(const struct net *net, struct worker *worker, const struct block *block,
                                const struct passing *passing, const float *deltas, float *in_deltas,
                                bool adds, float *sums)
{
    const float *in = values_of(net, block->from, passing);
    if (sums) {
        sums += block->conv.gradient;
        sum_positions(net, block, deltas, sums + block->conv.gradient_count);
    }
    if (block->pool && (sums || in_deltas))
        argmax_backward(net, worker, block, in, argmax_of(net, block, passing), deltas, in_deltas, sums);
    else if (!block->pool)
        conv_backward(net, worker, block, in, deltas, in_deltas, adds, sums);
}

/* Runs the backward pass of a block other than INPUT and BATCH_NORM for one sample, without its in-place
 * layers. `in_deltas` are overwritten or, if `adds` is true, added to. `sums` and `in_deltas` are NULL if
 * they are not needed. */
static void net_block_backward(const struct net *net, struct worker *worker, const struct block *block,
                               const struct passing *passing, const float *deltas, float *in_deltas,
                               bool adds, float *sums)
{
    if (block->kind == BLOCK_CONV)
        conv_block_backward(net, worker, block, passing, deltas, in_deltas, adds, sums);
    else if (block->kind == BLOCK_ADD)
        add_backward(worker, block, deltas, in_deltas);
    else if (in_deltas && block->kind == BLOCK_POOL)
        pool_backward(block, argmax_of(net, block, passing), deltas, in_deltas, adds);
    else if (in_deltas)
        mean_backward(block, deltas, in_deltas, adds);
}

static float *kept_deltas_of(const struct net *net, const struct block *block, const struct passing *passing)
{
    return net->kept_deltas + passing->index * net->kept_delta_values + block->kept_delta;
}

/* Computes the gradients of the weights from the gradients that an earlier pass kept. */
static void sample_weights(const struct net *net, struct worker *worker, const struct passing *passing,
                           float *sums)
{
    for (uint32_t i = net->flat - 1; i > 0; i--)
        if (net->blocks[i].kind == BLOCK_CONV)
            conv_block_backward(net, worker, &net->blocks[i], passing,
                                kept_deltas_of(net, &net->blocks[i], passing), NULL, false, sums);
}

/* Writes the gradient of the stage's input in C order. */
static void give_in_deltas(const struct net *net, const struct worker *worker, const struct passing *passing,
                           float *deltas)
{
    const struct block *input = &net->blocks[0];
    float *to = net->in_deltas + (passing->index - net->begin) * net->train->model->input_values;
    if (input->is_added)
        take_held(net, worker, input, deltas);
    net->kernel->transpose(deltas, input->out_pitch, input->positions, input->out.channels, to,
                           input->positions);
}

static void net_flat_backward(const struct net *net, const struct passing *passing, float *deltas)
{
    const struct block *flat = &net->blocks[net->flat];
    if (flat->in.channels != flat->in_pitch)
        memset(deltas, 0, flat[-1].positions * flat->in_pitch * sizeof *deltas);
    net->kernel->transpose(flat->deltas + passing->index * flat->out_pitch, flat[-1].positions,
                           flat->in.channels, flat[-1].positions, deltas, flat->in_pitch);
}

void net_sample_backward(const struct net *net, struct worker *worker, const struct passing *passing,
                         enum gradients_of of, float *sums)
{
    float *deltas = worker->deltas[0], *in_deltas = worker->deltas[1];
    if (of == GRADIENTS_OF_WEIGHTS)
        return sample_weights(net, worker, passing, sums);
    net_flat_backward(net, passing, deltas);
    for (uint32_t i = net->flat - 1; i > 0; i--) {
        const struct block *block = &net->blocks[i];
        if (block->is_added)
            take_held(net, worker, block, deltas);
        net_after_backward(net, block, passing, values_of(net, block, passing), deltas);
        if (of == GRADIENTS_OF_INPUTS && block->kind == BLOCK_CONV)
            memcpy(kept_deltas_of(net, block, passing), deltas, values_count(block) * sizeof *deltas);
        net_block_backward(net, worker, block, passing, deltas, i > 1 || net->in_deltas ? in_deltas : NULL,
                           false, of & GRADIENTS_OF_WEIGHTS ? sums : NULL);
        float *done = deltas;
        deltas = in_deltas;
        in_deltas = done;
    }
    if (net->in_deltas)
        give_in_deltas(net, worker, passing, deltas);
}

/* ---- Networks with batch normalisation ---- */

/* The batch passes through the blocks together, block by block. Each sum over the batch has a fixed order:
 * over the positions of a band, then over the bands of all samples. So the results do not depend on the
 * number of threads. */

#define SHARE_TILES \
    128            /* tiles of a gradient that one thread computes for all samples: they fit in its cache */
#define COLUMNS 16 /* channels whose sums one thread adds up at a time */

static float *values_at(const struct block *block, enum channel_values which)
{
    return block->moments + which * block->out_pitch;
}

/* ---- Sums over the batch ---- */

/* Returns the partial sums of a band of a sample: two arrays of out_pitch floats. */
static float *partial_of(const struct net *net, const struct block *block, uint32_t j, size_t band)
{
    return net->partial + j * net->partial_values + 2 * band * block->out_pitch;
}

/* Returns the number of positions of a band. */
static size_t band_count(const struct block *block, size_t band)
{
    const size_t left = block->positions - band * block->band;
    return left < block->band ? left : block->band;
}

/* Returns whether the sums are over all ranks. */
static bool is_shared(const struct net *net)
{
    return net->train->sync_batch_norm && net->train->exchange;
}

/* Adds up `count` values of this block over all ranks. `which` numbers the sums of a block in a step. */
static void add_up(struct net *net, const struct block *block, size_t which, size_t count)
{
    const size_t index = 3 * (size_t)(block - net->blocks) + which;
#pragma omp master
    if (net->exchanged == STATUS_OK)
        net->exchanged = exchange_part_sum(net->train->exchange, index, STATUS_OK, net->shared, count);
    barrier_wait(&net->barrier);
}

enum status net_layers_fail(struct net *net, enum status status)
{
    const struct block *block = net->blocks;
    while (block->kind != BLOCK_BATCH_NORM)
        block++;
    return exchange_part_sum(net->train->exchange, 3 * (size_t)(block - net->blocks), status, net->shared,
                             block->out_pitch);
}

/* The mean of a channel over this rank's samples, and the sum of the squares of the distances from it. */
struct moments {
    double mean, squares;
};

/* Combines the moments of all bands (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
 * computing sample variances", 1979). */
static struct moments moments_of(const struct net *net, const struct block *block, size_t channel)
{
    struct moments all = {0, 0};
    double count = 0;
    for (uint32_t j = 0; j < net->count; j++)
        for (size_t band = 0; band < block->bands; band++) {
            const float *partial = partial_of(net, block, j, band);
            const double own = (double)band_count(block, band), off = partial[channel] - all.mean;
            all.mean += off * own / (count + own);
            all.squares += partial[block->out_pitch + channel] + off * off * count * own / (count + own);
            count += own;
        }
    return all;
}

/* Sets what the block needs from the mean of a channel and the mean square of the distances from it, and the
 * gradients of the running statistics. The running variance takes the unbiased variance. */
static void set_channel(struct net *net, const struct block *block, size_t channel, double mean,
                        double variance)
{
    const double values = (double)block->positions * (is_shared(net) ? net->total : net->count);
    const float share = (float)net->count / (float)net->total;
    const double inverse = 1 / sqrt(variance + BATCH_NORM_EPSILON);
    values_at(block, CHANNEL_MEAN)[channel] = (float)mean;
    values_at(block, CHANNEL_INVERSE)[channel] = (float)inverse;
    values_at(block, CHANNEL_SCALE)[channel] = (float)(inverse * net->parameters[block->weight + channel]);
    values_at(block, CHANNEL_SHIFT)[channel] = net->parameters[block->bias + channel];
    net->gradients[block->mean + channel] = share * (float)mean;
    net->gradients[block->variance + channel] =
        share * (float)(variance * values / (values > 1 ? values - 1 : 1));
}

/* Computes the statistics of a block over the batch from those of the bands. With sums over all ranks, first
 * adds up the means, then the squares of the distances from the mean of all ranks. */
static void find_moments(struct net *net, const struct block *block)
{
    const size_t pitch = block->out_pitch;
    const double here = (double)block->positions * net->count, all = (double)block->positions * net->total;
    if (!is_shared(net)) {
#pragma omp for nowait
        for (size_t c = 0; c < pitch; c++) {
            const struct moments own = moments_of(net, block, c);
            set_channel(net, block, c, own.mean, own.squares / here);
        }
        barrier_wait(&net->barrier);
        return;
    }
#pragma omp for nowait
    for (size_t c = 0; c < pitch; c++)
        net->shared[c] = (float)(moments_of(net, block, c).mean * here / all);
    barrier_wait(&net->barrier);
    add_up(net, block, 0, pitch);
#pragma omp for nowait
    for (size_t c = 0; c < pitch; c++) {
        const struct moments own = moments_of(net, block, c);
        const double mean = net->shared[c], off = own.mean - mean;
        values_at(block, CHANNEL_MEAN)[c] = (float)mean;
        net->shared[c] = (float)((own.squares + here * off * off) / all);
    }
    barrier_wait(&net->barrier);
    add_up(net, block, 1, pitch);
#pragma omp for nowait
    for (size_t c = 0; c < pitch; c++)
        set_channel(net, block, c, values_at(block, CHANNEL_MEAN)[c], net->shared[c]);
    barrier_wait(&net->barrier);
}

/* Computes the gradients of weight and bias, and what the gradients of the inputs need. */
static void find_slopes(struct net *net, const struct block *block)
{
    const size_t pitch = block->out_pitch;
    const double values = (double)block->positions * (is_shared(net) ? net->total : net->count);
    float *falls = is_shared(net) ? net->shared : values_at(block, CHANNEL_FALL);
    float *slopes = is_shared(net) ? net->shared + pitch : values_at(block, CHANNEL_SLOPE);
    const float *inverses = values_at(block, CHANNEL_INVERSE);
#pragma omp for nowait
    for (size_t c = 0; c < pitch; c++) {
        double sum = 0, products = 0;
        for (uint32_t j = 0; j < net->count; j++)
            for (size_t band = 0; band < block->bands; band++) {
                const float *partial = partial_of(net, block, j, band);
                sum += partial[c];
                products += partial[pitch + c];
            }
        net->gradients[block->bias + c] = (float)sum;
        net->gradients[block->weight + c] = (float)(products * inverses[c]);
        falls[c] = (float)(sum / values);
        slopes[c] = (float)(products / values * inverses[c] * inverses[c]);
    }
    barrier_wait(&net->barrier);
    if (!is_shared(net))
        return;
    add_up(net, block, 2, 2 * pitch);
#pragma omp for nowait
    for (size_t c = 0; c < 2 * pitch; c++)
        values_at(block, c < pitch ? CHANNEL_FALL : CHANNEL_SLOPE)[c % pitch] = net->shared[c];
    barrier_wait(&net->barrier);
}

void net_layers_idle(struct net *net)
{
    for (uint32_t i = 1; i < net->flat; i++)
        if (net->blocks[i].kind == BLOCK_BATCH_NORM)
            find_moments(net, &net->blocks[i]);
    for (uint32_t i = net->flat - 1; i > 0; i--)
        if (net->blocks[i].kind == BLOCK_BATCH_NORM)
            find_slopes(net, &net->blocks[i]);
}

/* ---- Forward ---- */

/* Prepares a BATCH_NORM for inference: its running statistics. */
static void use_running(struct net *net, const struct block *block)
{
#pragma omp for nowait
    for (size_t c = 0; c < block->out_pitch; c++) {
        const float inverse = 1 / sqrtf(net->parameters[block->variance + c] + (float)BATCH_NORM_EPSILON);
        values_at(block, CHANNEL_MEAN)[c] = net->parameters[block->mean + c];
        values_at(block, CHANNEL_SCALE)[c] = inverse * net->parameters[block->weight + c];
        values_at(block, CHANNEL_SHIFT)[c] = net->parameters[block->bias + c];
    }
    barrier_wait(&net->barrier);
}

static void prepare_norm(struct net *net, const struct block *block, bool training)
{
    const size_t pitch = block->out_pitch;
    if (!training) {
        use_running(net, block);
        return;
    }
#pragma omp for schedule(dynamic) nowait
    for (uint32_t j = 0; j < net->count; j++)
        for (size_t band = 0; band < block->bands; band++) {
            float *partial = partial_of(net, block, j, band);
            net->kernel->channel_moments(net_values(net, block->from, j) + band * block->band * pitch,
                                         band_count(block, band), pitch, partial, partial + pitch);
        }
    barrier_wait(&net->barrier);
    find_moments(net, block);
}

void net_layers_forward(struct net *net, uint32_t epoch, enum data_part part, bool training)
{
    RANGE(FORWARD);
#pragma omp for schedule(dynamic) nowait
    for (uint32_t j = 0; j < net->count; j++) {
        const struct passing passing = net_passing(net, j, epoch, part, training);
        net_take_input(net, &net->workers[omp_get_thread_num()], &passing);
    }
    barrier_wait(&net->barrier);
    for (uint32_t i = 1; i < net->flat; i++) {
        const struct block *block = &net->blocks[i];
        if (block->kind == BLOCK_BATCH_NORM)
            prepare_norm(net, block, training);
#pragma omp for schedule(dynamic) nowait
        for (uint32_t j = 0; j < net->count; j++) {
            const struct passing passing = net_passing(net, j, epoch, part, training);
            net_block_forward(net, &net->workers[omp_get_thread_num()], block, &passing);
        }
        barrier_wait(&net->barrier);
    }
#pragma omp for nowait
    for (uint32_t j = 0; j < net->count; j++) {
        const struct passing passing = net_passing(net, j, epoch, part, training);
        net_flat_forward(net, &passing);
    }
    barrier_wait(&net->barrier);
}

/* ---- Backward ---- */

/* Adds up the partial sums of the gradients of a BATCH_NORM. */
static void norm_sums(const struct net *net, const struct block *block, uint32_t j)
{
    const size_t pitch = block->out_pitch;
    for (size_t band = 0; band < block->bands; band++) {
        const size_t first = band * block->band * pitch;
        float *partial = partial_of(net, block, j, band);
        net->kernel->channel_sums(net_values(net, block->from, j) + first, net_layer_deltas(block, j) + first,
                                  band_count(block, band), pitch, values_at(block, CHANNEL_MEAN), partial,
                                  partial + pitch);
    }
}

static void norm_backward(struct net *net, const struct block *block)
{
    find_slopes(net, block);
    if (block->from->kind == BLOCK_INPUT)
        return;
#pragma omp for schedule(dynamic) nowait
    for (uint32_t j = 0; j < net->count; j++)
        net->kernel->channel_backward(net_values(net, block->from, j), net_layer_deltas(block, j),
                                      block->positions, block->out_pitch, values_at(block, CHANNEL_MEAN),
                                      values_at(block, CHANNEL_SCALE), values_at(block, CHANNEL_FALL),
                                      values_at(block, CHANNEL_SLOPE), net_layer_deltas(block->from, j),
                                      net_adds_to(block, block->from));
    barrier_wait(&net->barrier);
}

/* Returns the padded input of a convolution for sample `j`. */
static float *around_of(const struct net *net, uint32_t j)
{
    return net->arounds + j * net->around_values;
}

/* Computes the gradients of the weights of a convolution: a thread computes some tiles for all samples. */
static void conv_weights(struct net *net, const struct block *block)
{
    const struct conv *conv = &block->conv;
    struct gemm gemm = {
        .rows = conv->taps,
        .steps = conv->positions,
        .row_count = conv->depth,
        .step_count = block->positions,
        .b_pitch = block->out_pitch,
        .c = net->sums + conv->gradient,
        .c_pitch = block->out_pitch,
        .columns = block->out_pitch,
    };
    const size_t tiles = net->gemm.tiles(&gemm), few = (tiles + SHARE_TILES - 1) / SHARE_TILES;
    const size_t least = 4 * (size_t)net->threads, some = few > least ? few : least;
    const size_t shares = some < tiles ? some : tiles;
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < shares; i++) {
        const size_t begin = tiles * i / shares, end = tiles * (i + 1) / shares;
        for (uint32_t j = 0; j < net->count; j++) {
            gemm.a = conv->padded ? around_of(net, j) : net_values(net, block->from, j);
            gemm.b = net_layer_deltas(block, j);
            gemm.add = j > 0;
            net->gemm.multiply(&gemm, begin, end - begin);
        }
    }
    float *biases = net->sums + conv->gradient + conv->gradient_count;
#pragma omp for nowait
    for (size_t c = 0; c < block->layer->bias_values; c += COLUMNS) {
        const size_t left = block->out_pitch - c, count = left < COLUMNS ? left : COLUMNS;
        memset(biases + c, 0, count * sizeof *biases);
        for (uint32_t j = 0; j < net->count; j++)
            for (size_t p = 0; p < block->positions; p++)
                net->kernel->add(net_layer_deltas(block, j) + p * block->out_pitch + c, biases + c, count);
    }
    barrier_wait(&net->barrier);
}

/* Gives the gradient of a sum to both summands. */
static void add_backward_over_batch(const struct net *net, const struct block *block, uint32_t j)
{
    const struct block *const summands[] = {block->from, block->added};
    const size_t count = block->positions * block->out_pitch;
    for (int i = 0; i < 2; i++) {
        if (summands[i]->kind == BLOCK_INPUT)
            continue;
        float *into = net_layer_deltas(summands[i], j);
        if (net_adds_to(block, summands[i]))
            net->kernel->add(net_layer_deltas(block, j), into, count);
        else
            memcpy(into, net_layer_deltas(block, j), count * sizeof *into);
    }
}

/* Runs the backward pass of a block for one sample, as far as it does not depend on other samples. */
static void sample_backward(const struct net *net, struct worker *worker, const struct block *block,
                            const struct passing *passing)
{
    const uint32_t j = passing->index - net->begin;
    const struct block *from = block->from;
    float *deltas = net_layer_deltas(block, j);
    net_after_backward(net, block, passing, net_values(net, block, j), deltas);
    if (block->kind == BLOCK_CONV && block->conv.padded)
        (void)net_with_zeros(block, net_values(net, from, j), around_of(net, j));
    if (block->kind == BLOCK_BATCH_NORM)
        norm_sums(net, block, j);
    else if (block->kind == BLOCK_ADD)
        add_backward_over_batch(net, block, j);
    else if (from->kind != BLOCK_INPUT)
        net_block_backward(net, worker, block, passing, deltas, net_layer_deltas(from, j),
                           net_adds_to(block, from), NULL);
}

void net_layers_backward(struct net *net, uint32_t epoch)
{
#pragma omp for nowait
    for (uint32_t j = 0; j < net->count; j++) {
        const struct passing passing = net_passing(net, j, epoch, DATA_TRAIN, true);
        net_flat_backward(net, &passing, net_layer_deltas(&net->blocks[net->flat - 1], j));
    }
    barrier_wait(&net->barrier);
    for (uint32_t i = net->flat - 1; i > 0; i--) {
        const struct block *block = &net->blocks[i];
#pragma omp for schedule(dynamic) nowait
        for (uint32_t j = 0; j < net->count; j++) {
            const struct passing passing = net_passing(net, j, epoch, DATA_TRAIN, true);
            sample_backward(net, &net->workers[omp_get_thread_num()], block, &passing);
        }
        barrier_wait(&net->barrier);
        if (block->kind == BLOCK_BATCH_NORM)
            norm_backward(net, block);
        else if (block->kind == BLOCK_CONV)
            conv_weights(net, block);
    }
    net_gather_sums(net, 1);
}
