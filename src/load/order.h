/* The samples that a worker reads in an epoch, and their order. A worker is a thread of a rank. The samples
 * and their order are pure functions of the seed, the epoch, the worker's number and the number of workers.
 * They do not depend on earlier epochs. With the same number of workers, all variants that use the same kind
 * of order read in the same order. There are four kinds:
 *
 * Files: one permutation of all samples, divided into one share per worker.
 *
 * Shards: a permutation of the shards, with their samples in sequence, divided into one share per worker.
 * Therefore each epoch distributes the shards differently over all workers of all ranks. The sizes of the
 * shares differ by at most one sample. If a shard straddles a boundary between shares, the worker of each
 * share reads a part of it. Within a share, each group of shuffle_buffer consecutive samples is shuffled, so
 * a stream reader needs a buffer for only one group.
 *
 * Keyed: one permutation of all samples, for files and shards. It is defined by sorting random keys, because
 * a GPU sorts faster than a CPU shuffles.
 *
 * Streamed: the order of train --feed load, for files and shards. A batch is `batch` consecutive samples of
 * one order of all samples. It is divided among the workers, and here a worker is a whole rank. */
#ifndef FDSL_LOAD_ORDER_H
#define FDSL_LOAD_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/parallel.h"
#include "core/portable.h"
#include "core/status.h"

/* Parameters common to the orders of all epochs. */
struct order_plan {
    uint64_t seed;
    uint32_t samples;            /* in the whole data set */
    uint32_t shards;             /* 0 if the samples are single files */
    const uint32_t *shard_first; /* first sample of each shard, plus one end entry; owned by the caller */
    uint32_t shuffle_buffer;     /* shards only: number of samples shuffled together; 0 or 1: none */
    uint32_t workers;            /* number of workers of all ranks */
    uint32_t lanes; /* above 0: the order of a stream, draw_lanes() (data/random_draws.h); shuffle_buffer is
                       its argument `shuffle` */
    uint32_t batch; /* with `lanes`: samples per batch of all workers */
    bool keyed; /* a keyed order, for readers with random access to all samples; it does not depend on shards
                   or shuffle_buffer */
};

/* Consecutive samples of one shard. */
struct order_segment {
    uint32_t shard, first, count; /* `first` is a sample number; count >= 1 */
};

/* One worker's share of an epoch. */
struct order {
    uint32_t count;
    uint32_t *samples; /* sample numbers in the order of delivery */
    /* Only for shards: the i-th sample read from the segments is delivered at index indices[i]. */
    uint32_t *indices;
    struct order_segment *segments; /* in the order of reading */
    uint32_t segment_count;
    uint32_t *deck;         /* scratch memory for a permutation */
    struct order_key *keys; /* scratch memory for keyed orders */
};

/* A keyed order sorts the samples by key, and samples with equal keys by number. */
struct order_key {
    uint64_t key;
    uint32_t sample;
};

#define ORDER_KEY_BITS 40 /* five passes of an 8-bit radix sort; few of a million samples share a key */

/* Returns the sort key of a sample in an epoch: ORDER_KEY_BITS random bits. */
FDSL_HD uint64_t order_key(uint64_t seed, uint64_t epoch, uint32_t sample)
{
    struct philox_block block =
        philox(philox_key(seed), sample, (uint32_t)epoch, (uint32_t)(epoch >> 32), 0x10ad0003u);
    return (uint64_t)(block.word[1] & 0xFFu) << 32 | block.word[0];
}

FDSL_C_BEGIN

/* Sets the share of worker `worker`: indices [*begin, *end) of the epoch. Not for streamed orders. */
void order_share(const struct order_plan *plan, uint32_t worker, uint32_t *begin, uint32_t *end);

/* Returns the sum of the batch sizes of `workers` workers, the first of which is worker `first`. The batch of
 * a worker has `batch` samples, or its whole share if the share is smaller. */
uint64_t order_batch_samples(const struct order_plan *plan, uint32_t first, uint32_t workers, uint32_t batch);

/* Returns the number of samples of a worker in an epoch. */
uint32_t order_count(const struct order_plan *plan, uint32_t worker);

/* Streamed orders only: the number of batches of an epoch; a worker's share of a batch; and the numbers of
 * the samples in this share, of which the last function returns the number. `samples` has room for them. */
uint32_t order_steps(const struct order_plan *plan);
struct share order_step_share(const struct order_plan *plan, uint32_t step, uint32_t worker);
uint32_t order_step(const struct order_plan *plan, uint32_t epoch, uint32_t step, uint32_t worker,
                    uint32_t *samples);

/* Allocates an order that can hold any epoch of any worker of the plan. STATUS_EXHAUSTED if memory runs out;
 * nothing is then allocated. */
enum status order_open(const struct order_plan *plan, struct order *order);
void order_close(struct order *order);

/* Computes the order of `worker` in `epoch`. `order` must come from order_open() with this plan. Threads need
 * separate orders. */
void order_make(const struct order_plan *plan, uint64_t epoch, uint32_t worker, struct order *order);

/* Two measures of how well an order mixes the samples. */
struct order_quality {
    /* Mean distance between a sample's index in the order and its index in the share sorted by sample number.
     * The mean is divided by the size of the share. 1/3 for a random permutation. */
    double displacement;
    double shards; /* mean number of distinct shards in a full batch; 0 without shards or full batches */
};

/* Measures the quality of an order for batches of `batch` samples. STATUS_EXHAUSTED if memory runs out. */
enum status order_measure(const struct order_plan *plan, const struct order *order, uint32_t batch,
                          struct order_quality *quality);

FDSL_C_END

#endif
