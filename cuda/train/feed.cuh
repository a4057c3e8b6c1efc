/* Live training samples on the device. A separate stream generates them, one batch ahead of the steps, into
 * one of two buffers. Events order both streams; the host does not wait.
 *
 *     training     take 0 ─ gather 0 ─ release ─ train 0 ────── take 1 ─ gather 1 ─ release ─ train 1 ──
 *     generating   gen 0  ┘            └ gen 1 (other buffer)  ┘                    └ gen 2 ...
 *
 * Generating batch i + 1 waits until batch i - 1 has been gathered, because it reuses that buffer. It can
 * overlap the rest of step i - 1 and all of step i. Batches are pure functions of their step. A buffer that
 * holds the requested step is therefore valid whatever came before, so steps can be repeated and resumed
 * anywhere. */
#ifndef FDSL_CUDA_TRAIN_FEED_CUH
#define FDSL_CUDA_TRAIN_FEED_CUH

#include "core/generator.h"
#include "train/network.cuh"

#define FEED_BUFFERS 2
/* Number of steps that are timed between two totals(); events around every step would cost too much. */
#define FEED_TIMINGS 16

/* One batch buffer. */
struct feed_buffer {
    uint8_t *samples;
    uint64_t *numbers;
    cudaEvent_t made, taken; /* batch generated; batch gathered, so the buffer may be overwritten */
    uint64_t step;           /* step that it holds or will hold, epoch * steps + step; FEED_EMPTY: none */
};

/* Events of one timed step: around waiting and gathering, and around generating the next batch. */
struct feed_timing {
    cudaEvent_t wait_begin, wait_end, make_begin, make_end;
};

struct device_feed {
    const struct train *train;
    struct generator *generator; /* NULL: the training set is not live */
    cudaStream_t stream;
    struct feed_buffer buffers[FEED_BUFFERS];
    uint32_t turn; /* index of the buffer taken last */
    struct feed_timing timings[FEED_TIMINGS];
    uint32_t timing_count, stride, since; /* one in `stride` steps is timed; steps since the last timed one */
};

#define FEED_EMPTY UINT64_MAX

/* Opens the feed of train->data if it is live and used for training; `allocations` owns its buffers. The
 * caller closes the feed, also after a failure; closing a zeroed feed is allowed. */
enum status device_feed_open(struct device_feed *feed, const struct train *train, int device,
                             struct allocations *allocations);
void device_feed_close(struct device_feed *feed);

static inline bool device_feed_is_live(const struct device_feed *feed)
{
    return feed->generator;
}

/* Makes the samples of a step available in `set` to work enqueued on `stream` from now on; set->labels stays
 * unchanged. */
enum status device_feed_take(struct device_feed *feed, uint32_t epoch, uint32_t step, cudaStream_t stream,
                             struct device_set *set);

/* Work enqueued on `stream` from now on no longer needs the samples. Starts generating the next step. */
enum status device_feed_release(struct device_feed *feed, cudaStream_t stream);

/* Announces `steps` steps; spreads the timed ones over them. */
void device_feed_plan_timings(struct device_feed *feed, uint32_t steps);

/* Sets data_s and generate_s for the `steps` steps since the last call, extrapolated from the timed ones. All
 * steps must have finished. */
enum status device_feed_totals(struct device_feed *feed, uint64_t steps, struct train_totals *totals);

/* Returns the bytes of device memory that the feed uses in addition to its buffers. */
uint64_t device_feed_memory_bytes(const struct device_feed *feed);

#endif
