/* Delivers the samples of a step in host memory, from any feed (enum data_feed). For engines on the CPU. */
#ifndef FDSL_TRAIN_FEED_H
#define FDSL_TRAIN_FEED_H

#include "train/augment.h"
#include "train/engine.h"

/* A zeroed struct is a closed feed. */
struct feed {
    const struct train *train;
    struct generator *generator; /* DATA_LIVE only */
    uint64_t *numbers;
    uint8_t *samples; /* DATA_LIVE: stored samples of the latest step, by index in the batch; then those
                         that they are mixed with, if train_generated() counts them */
    /* Only if augment_computes(): */
    struct augment_plan augment;
    uint8_t *images; /* computed from the samples of the latest step; same indices as `samples` */
    int threads;
    struct augment_scratch *scratch; /* one per thread */
    double generate_s;               /* seconds spent generating samples; callers reset it to 0 */
};

FDSL_C_BEGIN

/* Opens the feed of train->data, which must outlive the feed. A generator uses resources->threads threads.
 * The caller closes the feed, even after a failure. */
enum status feed_open(const struct train *train, const struct resources *resources, struct feed *feed);
void feed_close(struct feed *feed);

/* Returns whether the samples of a step are generated or augmented. If so, feed_step() must be called before
 * each step. */
static inline bool feed_computes(const struct feed *feed)
{
    return feed->generator || feed->images;
}

/* Prepares the `count` samples of a step and their partners, whose numbers come from train_batch(). Call it
 * outside parallel regions, because generators open their own. */
enum status feed_step(struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count);

/* Returns the address of the stored values of training sample `sample`, which has index `j` in the step. */
static inline const void *feed_stored(const struct feed *feed, uint32_t sample, uint32_t j)
{
    const struct data *data = feed->train->data;
    return feed->generator ? feed->samples + j * data_stored_bytes(data, DATA_TRAIN)
                           : data_sample(data, DATA_TRAIN, train_original(data, sample));
}

/* Returns the address of training sample `sample` for data_gather(); the sample has index `j` in the step.
 * The address is valid until the next feed_step(). */
static inline const void *feed_sample(const struct feed *feed, uint32_t sample, uint32_t j)
{
    return feed->images ? feed->images + j * feed->train->data->sample_bytes : feed_stored(feed, sample, j);
}

/* Computes the values that the network sees of the sample at index `j` of a step: augmented, normalised,
 * erased and mixed. The numbers of the step's `count` samples and of their partners come from train_batch();
 * if a step has several parts, each part passes the numbers of the whole step. `partner` has room for a
 * sample; it is used only if samples are mixed. */
void feed_gather(const struct feed *feed, const struct mix *mix, uint32_t epoch, const uint32_t *numbers,
                 uint32_t count, uint32_t j, float *partner, float *values);

/* Returns the bytes of memory that the feed uses. */
uint64_t feed_memory_bytes(const struct feed *feed);

FDSL_C_END

#endif
