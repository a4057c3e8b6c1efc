/* The samples of a step in host memory, wherever they come from: for engines on the CPU. */
#ifndef FDSL_TRAIN_FEED_H
#define FDSL_TRAIN_FEED_H

#include "train/engine.h"

/* Zeroed: closed. */
struct feed {
    const struct train *train;
    struct generator *generator; /* of DATA_LIVE */
    uint64_t *numbers;
    uint8_t *samples;  /* of the latest step, by their place in the batch */
    double generate_s; /* that feed_step() took since somebody cleared it */
};

/* Opens the feed of train->data, which outlives it; generators use resources->threads threads. The caller
 * closes, also after a failure. */
enum status feed_open(const struct train *train, const struct resources *resources, struct feed *feed);
void feed_close(struct feed *feed);

/* Whether samples must be generated before they can be used. */
static inline bool feed_is_live(const struct feed *feed)
{
    return feed->generator;
}

/* Makes the samples of a step ready: `count` of these numbers, as train_batch() gives them. Outside of any
 * parallel region: generators have their own. */
enum status feed_step(struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count);

/* Where training sample `sample` lies, which is at place `j` of the step. */
static inline const void *feed_sample(const struct feed *feed, uint32_t sample, uint32_t j)
{
    const struct data *data = feed->train->data;
    return feed_is_live(feed) ? feed->samples + j * data->sample_bytes
                              : data_sample(data, DATA_TRAIN, sample);
}

/* The memory that it holds. */
uint64_t feed_memory_bytes(const struct feed *feed);

#endif
