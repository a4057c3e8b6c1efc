/* Which samples a worker gets in an epoch, and in what order: a pure function of the seed, the epoch and the
 * worker's number, the same for every variant and for any history.
 *
 * Files: one permutation of all samples, cut into shares.
 * Shards: a permutation of the shards, their samples one after the other, cut into shares; so every epoch
 * deals the shards out anew over all workers of all ranks. Shares differ by at most one sample however many
 * samples the shards hold: a shard on a border is read by two workers, each its part. Within a share, samples
 * are shuffled in windows: of `buffer` consecutive ones at a time, so a reader of a stream needs no more
 * room.
 * Keyed: one permutation of all samples, whatever holds them, by random keys: a device sorts them faster than
 * a host shuffles. */
#ifndef FDSL_LOAD_ORDER_H
#define FDSL_LOAD_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"

/* What the orders of all epochs have in common. */
struct order_plan {
    uint64_t seed;
    uint32_t samples;            /* of the whole data set */
    uint32_t shards;             /* 0: samples are files of their own */
    const uint32_t *shard_first; /* the first sample of each shard, and behind the last; the caller's */
    uint32_t shuffle_buffer;     /* samples that are shuffled together; 0 and 1: none. Shards only */
    uint32_t workers;            /* over all ranks */
    bool keyed;                  /* for readers that have all samples at hand; shards and buffer are unused */
};

/* Consecutive samples of one shard. */
struct order_segment {
    uint32_t shard, first, count; /* count >= 1 */
};

/* One worker's part of an epoch. */
struct order {
    uint32_t count;
    uint32_t *samples; /* by turn: the numbers of the samples */
    uint32_t *indices; /* shards: the turn of the i-th sample as the segments give them; else NULL */
    struct order_segment *segments;
    uint32_t segment_count;
    uint32_t *deck; /* room for a permutation */
    struct order_key *keys;
};

/* Keyed orders: samples in the order of their keys, and of their numbers where keys are equal. */
struct order_key {
    uint64_t key;
    uint32_t sample;
};

#define ORDER_KEY_BITS 40 /* a sort takes them 8 at a time; few samples of a million share a key */
FDSL_HD uint64_t order_key(uint64_t seed, uint64_t epoch, uint32_t sample)
{
    struct philox_block block =
        philox(philox_key(seed), sample, (uint32_t)epoch, (uint32_t)(epoch >> 32), 0x10ad0003u);
    return (uint64_t)(block.word[1] & 0xFFu) << 32 | block.word[0];
}

FDSL_C_BEGIN

/* Positions [*begin, *end) of an epoch that worker `worker` takes. */
void order_share(const struct order_plan *plan, uint32_t worker, uint32_t *begin, uint32_t *end);

/* Makes room for any epoch of any worker of the plan. STATUS_FAILED when memory runs out, with nothing left
 * allocated. */
enum status order_open(const struct order_plan *plan, struct order *order);
void order_close(struct order *order);

/* Fills the order. */
void order_make(const struct order_plan *plan, uint64_t epoch, uint32_t worker, struct order *order);

/* How well an order mixes. */
struct order_quality {
    double displacement; /* mean distance between a sample's turn and its rank among the share's sample
                            numbers, over the share's size; a random permutation has 1/3 */
    double shards;       /* mean number of shards that a full batch has samples of; 0 without shards */
};

/* Measures an order in batches of `batch`. STATUS_FAILED when memory runs out. */
enum status order_measure(const struct order_plan *plan, const struct order *order, uint32_t batch,
                          struct order_quality *quality);

FDSL_C_END

#endif
