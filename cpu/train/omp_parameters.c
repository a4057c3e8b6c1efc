/* `train-omp`: the layouts of parameters and of their gradients, and the update. */
#include <math.h>
#include <string.h>

#include "core/phase.h"
#include "omp_net.h"

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
    return (tap * block->out.channels + o) * block->in_pitch + channel;
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
    memcpy(net->gradients + block->bias, sums + conv->gradient_count, block->out.channels * sizeof *sums);
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
    for (size_t i = 0; i < net->arena_values; i += NET_PART)
        net->squares[i / NET_PART] = sum_squares(
            net->gradients + i, net->arena_values - i < NET_PART ? net->arena_values - i : NET_PART);
    barrier_wait(&net->barrier);
    for (size_t i = 0; i < net->arena_values; i += NET_PART)
        squares += net->squares[i / NET_PART];
#pragma omp master
    {
        net->totals.norms += sqrt(squares);
        net->totals.normed++;
    }
    return (float)optimizer_clip(clip_norm, sqrt(squares));
}

/* Updates `count` parameters from index `i` on. */
static void update_part(struct net *net, const struct update *update, size_t i, size_t count)
{
    net->kernel->update(update, net->gradients + i, net->parameters + i, net->m + i, net->v + i, count);
    for (size_t end = i + count; net->ema && i < end; i++)
        net->ema[i] = optimizer_average(update, net->ema[i], net->parameters[i]);
}

void net_update(struct net *net, uint64_t number)
{
    const struct train *train = net->train;
    struct update update = optimizer_at(&train->optimizer, &train->schedule, number);
    RANGE(UPDATE);
    update.clip = clip(net);
    for (uint32_t s = 0; s < net->span_count; s++) {
        const struct span *span = &net->spans[s];
        const struct update of = optimizer_of(&update, span->how);
        const size_t end = span->first + span->count;
#pragma omp for nowait
        for (size_t i = span->first; i < end; i += NET_PART)
            update_part(net, &of, i, end - i < NET_PART ? end - i : NET_PART);
    }
    barrier_wait(&net->barrier);
    net_prepare_weights(net);
}
