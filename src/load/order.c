#include "load/order.h"

#include <stdlib.h>
#include <string.h>

#include "data/random_draws.h"

/* Purpose of a random number. Each purpose has its own Philox stream per epoch. */
enum purpose { DEAL_FILES, DEAL_SHARDS, SHUFFLE_BUFFER }; /* order_key() uses stream 3 */

/* Shuffles items[0 .. count) (Fisher-Yates). Exchange i uses random number `from` + i of the epoch's stream.
 * One Philox block holds four random numbers. */
static void shuffle(const struct order_plan *plan, uint64_t epoch, enum purpose purpose, uint32_t from,
                    uint32_t *items, uint32_t count)
{
    struct philox_key key = philox_key(plan->seed);
    struct philox_block block = {{0}};
    for (uint32_t i = count; i-- > 1;) {
        uint32_t draw = from + i;
        if (i == count - 1 || draw % 4 == 3)
            block = philox(key, draw / 4, (uint32_t)epoch, (uint32_t)(epoch >> 32), 0x10ad0000u + purpose);
        uint32_t j = philox_below(philox_word(block, draw), i + 1), item = items[i];
        items[i] = items[j];
        items[j] = item;
    }
}

static void count_up(uint32_t *items, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        items[i] = i;
}

void order_share(const struct order_plan *plan, uint32_t worker, uint32_t *begin, uint32_t *end)
{
    *begin = (uint32_t)((uint64_t)plan->samples * worker / plan->workers);
    *end = (uint32_t)((uint64_t)plan->samples * (worker + 1) / plan->workers);
}

uint64_t order_batch_samples(const struct order_plan *plan, uint32_t first, uint32_t workers, uint32_t batch)
{
    uint64_t samples = 0;
    for (uint32_t w = first; w < first + workers; w++) {
        uint32_t begin, end;
        order_share(plan, w, &begin, &end);
        samples += end - begin < batch ? end - begin : batch;
    }
    return samples;
}

uint32_t order_steps(const struct order_plan *plan)
{
    return (plan->samples - 1) / plan->batch + 1;
}

struct share order_step_share(const struct order_plan *plan, uint32_t step, uint32_t worker)
{
    const struct partition partition = {.rank = worker, .ranks = plan->workers, .strong = true};
    return partition_step(&partition, plan->samples, plan->batch, step);
}

uint32_t order_step(const struct order_plan *plan, uint32_t epoch, uint32_t step, uint32_t worker,
                    uint32_t *samples)
{
    struct draw_memo memo = {0};
    struct draw_order order = draw_lanes(plan->seed, epoch, plan->samples, plan->lanes, plan->shuffle_buffer);
    const struct share share = order_step_share(plan, step, worker);
    order.memo = &memo;
    for (uint32_t i = 0; i < share.count; i++)
        samples[i] = draw_order_at(&order, step * plan->batch + (uint32_t)share.first + i);
    return (uint32_t)share.count;
}

uint32_t order_count(const struct order_plan *plan, uint32_t worker)
{
    uint32_t begin, end;
    if (plan->lanes) {
        const uint32_t last = order_steps(plan) - 1;
        const struct share whole = order_step_share(plan, 0, worker);
        return last * (uint32_t)whole.count + (uint32_t)order_step_share(plan, last, worker).count;
    }
    order_share(plan, worker, &begin, &end);
    return end - begin;
}

enum status order_open(const struct order_plan *plan, struct order *order)
{
    const bool segments = plan->shards && !plan->lanes;
    size_t share = plan->lanes ? order_count(plan, 0) + (size_t)1 : plan->samples / plan->workers + 1;
    size_t deck = plan->shards ? (plan->shards > plan->shuffle_buffer ? plan->shards : plan->shuffle_buffer)
                               : plan->samples;
    *order = (struct order){0};
    order->samples = malloc(share * sizeof *order->samples);
    order->deck = malloc((deck + 1) * sizeof *order->deck);
    if (plan->keyed)
        order->keys = malloc(((size_t)plan->samples + 1) * sizeof *order->keys);
    if (segments) {
        order->indices = malloc(share * sizeof *order->indices);
        order->segments = malloc(plan->shards * sizeof *order->segments);
    }
    if (order->samples && order->deck && (!segments || (order->indices && order->segments)) &&
        (!plan->keyed || order->keys))
        return STATUS_OK;
    order_close(order);
    return status_set(STATUS_EXHAUSTED, "out of memory for the order of %u samples", plan->samples);
}

void order_close(struct order *order)
{
    free(order->samples);
    free(order->indices);
    free(order->segments);
    free(order->deck);
    free(order->keys);
    *order = (struct order){0};
}

/* Computes the segments of a worker's share from the epoch's permutation of the shards. The share is the
 * samples [begin, end) of the epoch. */
static void deal_shards(const struct order_plan *plan, uint64_t epoch, uint32_t begin, uint32_t end,
                        struct order *order)
{
    uint32_t position = 0; /* index of the current shard's first sample within the epoch */
    count_up(order->deck, plan->shards);
    shuffle(plan, epoch, DEAL_SHARDS, 0, order->deck, plan->shards);
    order->segment_count = 0;
    for (uint32_t i = 0; i < plan->shards && position < end; i++) {
        uint32_t shard = order->deck[i], first = plan->shard_first[shard];
        uint32_t past = position + (plan->shard_first[shard + 1] - first);
        uint32_t from = position > begin ? position : begin, to = past < end ? past : end;
        if (from < to)
            order->segments[order->segment_count++] =
                (struct order_segment){shard, first + (from - position), to - from};
        position = past;
    }
}

/* Computes the order of the share's samples. Each group of shuffle_buffer consecutive samples is shuffled. */
static void fill_indices(const struct order_plan *plan, uint64_t epoch, uint32_t begin, struct order *order)
{
    uint32_t buffer = plan->shuffle_buffer > 1 ? plan->shuffle_buffer : 1;
    if (buffer == 1) {
        count_up(order->indices, order->count);
        return;
    }
    for (uint32_t first = 0; first < order->count; first += buffer) {
        uint32_t count = order->count - first < buffer ? order->count - first : buffer;
        count_up(order->deck, count);
        shuffle(plan, epoch, SHUFFLE_BUFFER, begin + first, order->deck, count);
        for (uint32_t i = 0; i < count; i++)
            order->indices[first + i] = first + order->deck[i];
    }
}

static int by_order_key(const void *a, const void *b)
{
    const struct order_key *left = a, *right = b;
    int order = (left->key > right->key) - (left->key < right->key);
    return order ? order : (left->sample > right->sample) - (left->sample < right->sample);
}

static void sort_by_keys(const struct order_plan *plan, uint64_t epoch, uint32_t begin, struct order *order)
{
    for (uint32_t i = 0; i < plan->samples; i++)
        order->keys[i] = (struct order_key){order_key(plan->seed, epoch, i), i};
    qsort(order->keys, plan->samples, sizeof *order->keys, by_order_key);
    for (uint32_t i = 0; i < order->count; i++)
        order->samples[i] = order->keys[begin + i].sample;
}

void order_make(const struct order_plan *plan, uint64_t epoch, uint32_t worker, struct order *order)
{
    uint32_t begin, end;
    if (plan->lanes) {
        order->count = 0;
        for (uint32_t step = 0; step < order_steps(plan); step++)
            order->count += order_step(plan, (uint32_t)epoch, step, worker, order->samples + order->count);
        return;
    }
    order_share(plan, worker, &begin, &end);
    order->count = end - begin;
    if (plan->keyed) {
        sort_by_keys(plan, epoch, begin, order);
        return;
    }
    if (!plan->shards) {
        count_up(order->deck, plan->samples);
        shuffle(plan, epoch, DEAL_FILES, 0, order->deck, plan->samples);
        memcpy(order->samples, order->deck + begin, order->count * sizeof *order->samples);
        return;
    }
    deal_shards(plan, epoch, begin, end, order);
    fill_indices(plan, epoch, begin, order);
    uint32_t arrival = 0;
    for (uint32_t s = 0; s < order->segment_count; s++)
        for (uint32_t i = 0; i < order->segments[s].count; i++)
            order->samples[order->indices[arrival++]] = order->segments[s].first + i;
}

/* ---- Quality ---- */

static int by_number(const void *a, const void *b)
{
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return (left > right) - (left < right);
}

static uint32_t shard_of(const struct order_plan *plan, uint32_t sample)
{
    uint32_t low = 0, high = plan->shards; /* invariant: shard_first[low] <= sample < shard_first[high] */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        *(plan->shard_first[middle] <= sample ? &low : &high) = middle;
    }
    return low;
}

static double mean_displacement(const uint32_t *sorted, const struct order *order)
{
    double sum = 0;
    for (uint32_t index = 0; index < order->count; index++) {
        const uint32_t *found =
            bsearch(&order->samples[index], sorted, order->count, sizeof *sorted, by_number);
        double rank = (double)(found - sorted);
        sum += rank > index ? rank - index : index - rank;
    }
    return order->count ? sum / order->count / order->count : 0;
}

/* Returns the mean number of shards in a full batch. `seen` has one element per shard, all 0. */
static double shards_in_batch(const struct order_plan *plan, const struct order *order, uint32_t batch,
                              uint32_t *seen)
{
    uint32_t batches = order->count / batch;
    double sum = 0;
    for (uint32_t b = 0; b < batches; b++)
        for (uint32_t i = 0; i < batch; i++) {
            uint32_t *mark = &seen[shard_of(plan, order->samples[(size_t)b * batch + i])];
            sum += *mark != b + 1;
            *mark = b + 1;
        }
    return batches ? sum / batches : 0;
}

enum status order_measure(const struct order_plan *plan, const struct order *order, uint32_t batch,
                          struct order_quality *quality)
{
    FREED uint32_t *sorted = malloc((order->count + 1) * sizeof *sorted);
    FREED uint32_t *seen = calloc(plan->shards + 1, sizeof *seen);
    TRY(ALLOCATED(sorted && seen, "out of memory to measure the order of %u samples", order->count));
    memcpy(sorted, order->samples, order->count * sizeof *sorted);
    qsort(sorted, order->count, sizeof *sorted, by_number);
    quality->displacement = mean_displacement(sorted, order);
    quality->shards = plan->shards ? shards_in_batch(plan, order, batch, seen) : 0;
    return STATUS_OK;
}
