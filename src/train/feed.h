/* Delivers the samples of a step in host memory, from any feed (enum data_feed). For engines on the CPU. */
#ifndef FDSL_TRAIN_FEED_H
#define FDSL_TRAIN_FEED_H

#include "train/engine.h"

/* A zeroed struct is a closed feed. */
struct feed {
    const struct train *train;
    struct generator *generator; /* DATA_LIVE only */
    uint64_t *numbers;
    uint8_t *samples;  /* samples of the latest step, by index in the batch; then train_generated() */
    uint32_t count;    /* of the samples of the latest step */
    double generate_s; /* seconds spent in feed_step(); callers reset it to 0 */
};

/* Opens the feed of train->data, which must outlive the feed. A generator uses resources->threads threads.
 * The caller closes the feed, also after a failure. */
enum status feed_open(const struct train *train, const struct resources *resources, struct feed *feed);
void feed_close(struct feed *feed);

/* Returns whether samples are generated during training. */
static inline bool feed_is_live(const struct feed *feed)
{
    return feed->generator;
}

/* Prepares the `count` samples of a step and their partners, whose numbers come from train_batch(). Call it
 * outside parallel regions, because generators open their own. */
enum status feed_step(struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count);

/* Returns the address of training sample `sample`, which has index `j` in the step. The address is valid
 * until the next feed_step(). */
static inline const void *feed_sample(const struct feed *feed, uint32_t sample, uint32_t j)
{
    const struct data *data = feed->train->data;
    return feed_is_live(feed) ? feed->samples + j * data->sample_bytes
                              : data_sample(data, DATA_TRAIN, sample);
}

/* Returns the address of the partner of the sample at index `j` of the step; `sample` is the partner's
 * number. */
static inline const void *feed_partner(const struct feed *feed, uint32_t sample, uint32_t j)
{
    return feed_sample(feed, sample, feed->train->ranks > 1 ? feed->count + j : feed->count - 1 - j);
}

/* Returns the bytes of memory that the feed uses. */
uint64_t feed_memory_bytes(const struct feed *feed);

#endif
