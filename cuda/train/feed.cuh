/* Live training samples on the device: generated on a stream of their own, a batch ahead of the steps, into
 * one of two buffers. Events order both streams; the host waits for nothing.
 *
 *     training     take 0 ─ gather 0 ─ release ─ learn 0 ────── take 1 ─ gather 1 ─ release ─ learn 1 ──
 *     generating   make 0 ┘            └ make 1 (other buffer) ┘                    └ make 2 ...
 *
 * Making batch i + 1 waits for the gathering of batch i - 1, whose buffer it takes, so it has all of step i,
 * and what is left of step i - 1, to be done in. Batches are pure functions of their step: a buffer that
 * holds the step that is asked for is right whoever asked for it before, so steps may be repeated and resumed
 * anywhere. */
#ifndef FDSL_CUDA_TRAIN_FEED_CUH
#define FDSL_CUDA_TRAIN_FEED_CUH

#include "core/generator.h"
#include "train/network.cuh"

#define FEED_BUFFERS 2
/* Steps that are timed between two totals: events around all would cost more than they tell. */
#define FEED_TIMINGS 16

/* A batch, or room for one. */
struct feed_buffer {
    uint8_t *samples;
    uint64_t *numbers;
    cudaEvent_t made, taken; /* on the generating stream, on the training one */
    uint64_t step;           /* that it holds, or will: epoch * steps + step; FEED_EMPTY: none */
};

/* Around what one step waited for and gathered, and around the making of the next one. */
struct feed_timing {
    cudaEvent_t wait_begin, wait_end, make_begin, make_end;
};

struct device_feed {
    const struct train *train;
    struct generator *generator; /* NULL: the training set is not live */
    cudaStream_t stream;
    struct feed_buffer buffers[FEED_BUFFERS];
    uint32_t turn; /* the buffer taken last */
    struct feed_timing timings[FEED_TIMINGS];
    uint32_t timing_count, stride, since; /* one of `stride` steps is looked at; steps since the last */
};

#define FEED_EMPTY UINT64_MAX

/* Opens the feed of train->data, where that is live and will be learnt from; `allocations` owns its buffers.
 * The caller closes, also after a failure; a zeroed one may be closed. */
enum status device_feed_open(struct device_feed *feed, const struct train *train, int device,
                             struct allocations *allocations);
void device_feed_close(struct device_feed *feed);

static inline bool device_feed_is_live(const struct device_feed *feed)
{
    return feed->generator;
}

/* What is enqueued on `stream` from here on finds the samples of a step in `set`; its labels stay. */
enum status device_feed_take(struct device_feed *feed, uint32_t epoch, uint32_t step, cudaStream_t stream,
                             struct device_set *set);

/* What is enqueued on `stream` from here on needs them no more: the step behind it is generated next. */
enum status device_feed_release(struct device_feed *feed, cudaStream_t stream);

/* So many steps are to come: spreads the timings over them. */
void device_feed_plan_timings(struct device_feed *feed, uint32_t steps);

/* Fills data_s and generate_s of `steps` steps since the last time, from those that were looked at. All must
 * have ended. */
enum status device_feed_totals(struct device_feed *feed, uint64_t steps, struct train_totals *totals);

/* What it holds beside its buffers. */
uint64_t device_feed_memory_bytes(const struct device_feed *feed);

#endif
