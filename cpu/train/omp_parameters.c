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
