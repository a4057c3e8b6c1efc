/* Divides work among the threads of a process and among ranks; a thread that calls a function at fixed
 * intervals. */
#ifndef FDSL_CORE_PARALLEL_H
#define FDSL_CORE_PARALLEL_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"

/* ---- Threads ---- */

/* Runs independent tasks on several CPU threads.
 *
 * The program uses OpenMP (parallel.c). libfdsl replaces parallel.c with lib/fdsl.c, which starts its own
 * threads. libfdsl therefore needs no OpenMP runtime, and works in processes that use any OpenMP runtime. */

FDSL_C_BEGIN

/* One task. `thread` is 0 to threads - 1; tasks with the same `thread` never run at the same time, so
 * `thread` can select a buffer. */
typedef void parallel_task(void *context, uint64_t task, int thread);

/* Calls task(context, 0 .. count - 1, ...) on up to `threads` threads, in any order, and returns when all
 * calls have returned. Not reentrant: a task must not call parallel_for(). */
void parallel_for(int threads, uint64_t count, parallel_task *task, void *context);

/* Returns the number of threads for work that no variant does, such as reading classes: --threads. In
 * libfdsl, those of lib_on_threads(), or 1 outside of it. */
int parallel_threads(void);

FDSL_C_END

/* Starts a thread in which all signals are blocked, because they are for the main thread. Only SIGBUS is not:
 * the thread itself raises it by reading a mapped file that has shrunk (machine/guard.h). Returns 0, or the
 * errno if the thread cannot be started. */
static inline int parallel_start(pthread_t *thread, void *(*run)(void *context), void *context)
{
    sigset_t every, before;
    sigfillset(&every);
    sigdelset(&every, SIGBUS);
    pthread_sigmask(SIG_BLOCK, &every, &before);
    const int error = pthread_create(thread, NULL, run, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* ---- Ranks ---- */

struct partition {
    uint64_t rank, ranks; /* ranks >= 1 */
    bool strong;          /* strong scaling: the ranks divide one batch; weak: each rank has a whole batch */
    const uint32_t *weights; /* strong scaling: one weight per rank; NULL: equal weights */
};

/* Items [first, first + count) of `total`. */
struct share {
    uint64_t first, count, total;
};

/* Returns the number of items of all ranks below `rank`, if the ranks divide `batch` < 2^32 items by weight.
 * The sum of the weights must be below 2^32. If this sum is 0, the result is 0. */
static inline uint64_t partition_before(const struct partition *partition, uint64_t rank, uint64_t batch)
{
    uint64_t before = 0, all = 0;
    for (uint64_t i = 0; i < partition->ranks; i++) {
        before += i < rank ? partition->weights[i] : 0;
        all += partition->weights[i];
    }
    return all ? batch * before / all : 0;
}

/* Returns the rank's share of a batch. Weak scaling: `batch` items per rank. Strong scaling: batch / ranks
 * items. If there is a remainder, each of the lowest ranks gets one more item. With more ranks than items,
 * the last ranks get 0 items.
 *
 * With weights, rank i gets the items from batch * W[i] / W[ranks] to batch * W[i + 1] / W[ranks], rounded
 * down, where W[i] is the sum of the weights of the ranks below i. If `batch` is the sum of the weights, each
 * rank gets as many items as its weight. If `batch` is smaller than that sum, no rank gets more items than
 * its weight. */
static inline struct share partition_share(const struct partition *partition, uint64_t batch)
{
    if (!partition->strong)
        return (struct share){partition->rank * batch, batch, partition->ranks * batch};
    if (partition->weights) {
        uint64_t first = partition_before(partition, partition->rank, batch);
        return (struct share){first, partition_before(partition, partition->rank + 1, batch) - first, batch};
    }
    uint64_t least = batch / partition->ranks, larger = batch % partition->ranks;
    uint64_t before = partition->rank < larger ? partition->rank : larger;
    return (struct share){partition->rank * least + before, least + (partition->rank < larger), batch};
}

/* Returns the rank's share of a step of an epoch of `count` items. A step has `batch` items, the last one may
 * have fewer. The share counts from the beginning of the step. */
static inline struct share partition_step(const struct partition *partition, uint32_t count, uint32_t batch,
                                          uint32_t step)
{
    const uint32_t left = count - step * batch;
    return partition_share(partition, left < batch ? left : batch);
}

FDSL_C_BEGIN

/* Divides `total` items among `count` ranks in proportion to `weights`, which are finite, at least 0, and not
 * all 0. Writes the number of items of each rank to `shares`; their sum is `total`. Each rank gets its exact
 * part, rounded down. The remaining items go to the ranks with the largest fractional parts; ties go to the
 * lowest rank. A rank with a larger weight therefore never gets fewer items. Then each rank that has fewer
 * than `least` items gets the missing items from the rank that has the most. `total` >= count * least. A pure
 * function. */
void partition_divide(const double *weights, uint32_t count, uint32_t total, uint32_t least,
                      uint32_t *shares);

FDSL_C_END

/* ---- A thread that ticks ---- */

/* Calls a function at fixed intervals while the main thread works. All signals are blocked in the thread, so
 * that the main thread handles them. */

struct ticker;

/* A function that the thread calls. If a call takes longer than the period, the next call starts at the next
 * multiple of the period. `missed` is the number of skipped calls. */
typedef void ticker_tick(void *context, uint64_t missed);

/* Starts a thread that calls `tick` immediately and then every `period_s` seconds. Returns 0, or the errno if
 * the thread cannot be started; `*ticker` is then NULL. */
int ticker_open(double period_s, ticker_tick *tick, void *context, struct ticker **ticker);

/* Stops the thread after the current call. Ignores NULL. */
void ticker_close(struct ticker *ticker);

#endif
