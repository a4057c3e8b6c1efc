/* `train-omp`: networks with batch normalisation. The batch passes through the blocks before FLAT together,
 * block by block. Each sum over the batch has a fixed order: over the positions of a band, then over the
 * bands of all samples. So the results do not depend on the number of threads. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "core/phase.h"
#include "omp_net.h"

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
static void add_backward(const struct net *net, const struct block *block, uint32_t j)
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
        add_backward(net, block, j);
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
