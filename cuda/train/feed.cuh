/* Training samples that arrive on the device batch by batch: generated ones (DATA_LIVE), or samples that are
 * read (DATA_LOAD). Events order them with the CUDA stream of the training steps.
 *
 * Live samples are generated one batch ahead, in two buffers that alternate, on a separate CUDA stream; the
 * host does not wait. With train->generator "omp", that stream calls a host function that draws a batch into
 * pinned memory, and then copies it.
 *
 *     training     take 0 ─ gather 0 ─ release ─ train 0 ────── take 1 ─ gather 1 ─ release ─ train 1 ──
 *     generating   gen 0  ┘            └ gen 1 (other buffer)  ┘                    └ gen 2 ...
 *
 * Batch i + 1 uses the buffer of batch i - 1, so its generation waits until batch i - 1 has been gathered.
 * The generation can overlap the rest of step i - 1 and all of step i. A batch is a pure function of its step
 * number and of this rank's share of the step. A buffer with the batch of the requested step and share is
 * therefore always valid, so training can repeat steps or continue at any step.
 *
 * Loaded samples come from a device stream (common/device_stream.cuh). The host waits for a batch only if its
 * work is not enqueued yet. It is at most FEED_AHEAD + DEVICE_STREAM_HELD + 1 steps ahead of the device, and
 * the device always has steps to compute. */
#ifndef FDSL_CUDA_TRAIN_FEED_CUH
#define FDSL_CUDA_TRAIN_FEED_CUH

#include "common/image_decoder.cuh"
#include "core/generator.h"
#include "core/stream.h"
#include "train/feed.h"
#include "train/network.cuh"

#define FEED_BUFFERS 2
#define FEED_AHEAD   2 /* batches of a stream that are prepared on the device, besides that of the step */
/* As FEED_AHEAD, of a mixture: its steps should not wait when reading, of which there is enough on average,
 * is delayed for some milliseconds. */
#define FEED_AHEAD_MIXED 4
/* Maximum number of timed steps between two calls of totals(), of live and of loaded samples. Timing every
 * step would cost too much time. The times that a step waits for a stream vary more. */
#define FEED_TIMINGS_LIVE 16
#define FEED_TIMINGS      64

/* A buffer for a generated batch. */
struct feed_buffer {
    uint8_t *samples,
        *multi_hot; /* multi_hot: one byte per class of each sample; NULL: samples have one class */
    uint64_t *numbers;
    cudaEvent_t made, taken; /* batch complete; batch gathered, so the buffer may be overwritten */
    uint64_t step;           /* number of the batch's step over all epochs; FEED_EMPTY: no batch */
    struct share share;      /* the part of the step that is in the buffer */
};

/* Events of one timed step. From wait_begin to arrived, the step waits for its batch; until wait_end, it
 * gathers the batch. From make_begin to make_end, the next batch is generated (DATA_LIVE only). */
struct feed_timing {
    cudaEvent_t wait_begin, arrived, wait_end, make_begin, make_end;
};

struct device_feed {
    const struct train *train;
    struct generator *generator; /* NULL: the training set is not live */
    /* DATA_LOAD only: */
    struct feed_stream loading;    /* closed: the training set is not loaded */
    bool mixes;                    /* its stream is that of a mixture (common/device_mix.cuh) */
    bool given;                    /* its stream is that of train/given.h */
    struct image_decoder *decoder; /* owned */
    uint32_t *wrong;   /* host memory that kernels write: labels that are no classes (train/given.h) */
    uint32_t *numbers; /* room for train_batch() */
    struct stream_batch batch; /* of the current step */
    cudaEvent_t taken;         /* this batch has been gathered */
    /* DATA_LIVE only, except for the timings: */
    uint64_t
        *host_numbers; /* sample numbers of a batch; NULL if the generator does not need them on the host */
    /* Pinned memory for a batch that the host draws, and for its multi-hot labels; NULL: the device draws. */
    uint8_t *staging, *staged_multi_hot;
    enum status drawn;      /* first failure of draw_on_host(), or STATUS_OK; written by a thread of CUDA */
    struct failure failure; /* its failure; valid if `drawn` is not STATUS_OK */
    cudaStream_t stream;
    struct feed_buffer buffers[FEED_BUFFERS];
    uint32_t turn; /* index of the buffer taken last */
    struct feed_timing timings[FEED_TIMINGS];
    uint32_t timing_count;  /* number of timings in use */
    uint32_t stride, since; /* one in `stride` steps is timed; `since`: step index modulo `stride` */
};

#define FEED_EMPTY UINT64_MAX

/* Opens the feed of train->data if its samples are live or loaded, and used for training, except in the later
 * stages of a pipeline. In a pipeline, the steps below are deliveries (feed_micro()). `allocations` owns its
 * buffers. The caller closes the feed, even after a failure; closing a zeroed feed is allowed. */
enum status device_feed_open(struct device_feed *feed, const struct train *train,
                             const struct resources *resources, struct allocations *allocations);
void device_feed_close(struct device_feed *feed);

/* Returns whether the samples of a step come from this feed. */
static inline bool device_feed_delivers(const struct device_feed *feed)
{
    return feed->generator || feed->loading.stream;
}

/* Sets set->values and set->held to the batch of a step. Work that is enqueued on `stream` between this call
 * and device_feed_release() may read the values. With DATA_LOAD, waits until the work on the batch has been
 * enqueued, sets the labels of broken samples in set->labels to DATA_MASKED, and returns the failure of the
 * stream if a sample cannot be read. With DATA_LIVE, sets the rows of set->multi_hot, because new samples
 * have new ones. Otherwise leaves the labels unchanged. */
enum status device_feed_take(struct device_feed *feed, uint32_t epoch, uint32_t step, cudaStream_t stream,
                             struct device_set *set);

/* Call after all work that reads the batch has been enqueued on `stream`. Enqueues the generation of the next
 * step's batch (DATA_LIVE only). */
enum status device_feed_release(struct device_feed *feed, cudaStream_t stream);

/* Call before enqueuing `steps` steps. Chooses some of them, evenly spaced, to be timed. */
void device_feed_plan_timings(struct device_feed *feed, uint32_t steps);

/* Sets totals->data_s and totals->generate_s (0 for DATA_LOAD) for the `steps` steps since the last call.
 * Both are extrapolated from the timed steps. With DATA_LOAD, also sets the members that feed_stream_totals()
 * sets; stall_s is the time that the device, not the host, waited. All training steps must have finished. */
enum status device_feed_totals(struct device_feed *feed, uint64_t steps, struct train_totals *totals);

/* Returns the memory of the feed's generator, or of its stream and decoder, in bytes. Memory that
 * `allocations` owns is not included. */
uint64_t device_feed_memory_bytes(const struct device_feed *feed);

#endif
