#include "core/phase.h"
#include "train/feed.h"

#include <stdlib.h>

#include "core/timer.h"

enum status feed_open(const struct train *train, const struct resources *resources, struct feed *feed)
{
    *feed = (struct feed){.train = train};
    if (train->data->feed != DATA_LIVE || train->forward_only)
        return STATUS_OK;
    const struct generator_request request = {.resources = *resources,
                                              .batch = train_generated(train, train_share_max(train))};
    feed->numbers = malloc(request.batch * sizeof *feed->numbers);
    feed->samples = malloc(request.batch * train->data->sample_bytes);
    if (!feed->numbers || !feed->samples)
        return status_set(STATUS_FAILED, "out of memory for a batch of %u samples; lower --batch",
                          train_share_max(train));
    return data_generator(train->data, &request, &feed->generator);
}

void feed_close(struct feed *feed)
{
    generator_close(feed->generator);
    free(feed->numbers);
    free(feed->samples);
    *feed = (struct feed){0};
}

enum status feed_step(struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count)
{
    feed->count = count;
    if (!feed_is_live(feed) || count == 0)
        return STATUS_OK;
    count = train_generated(feed->train, count);
    RANGE(GENERATE);
    double begin_s = timer_now_s();
    for (uint32_t j = 0; j < count; j++)
        feed->numbers[j] = data_number(feed->train->data->fresh, epoch, numbers[j]);
    const struct generator_numbers listed = {.list = feed->numbers};
    enum status status = generator_make(feed->generator, &listed, count, feed->samples, NULL, NULL);
    feed->generate_s += timer_now_s() - begin_s;
    return status;
}

uint64_t feed_memory_bytes(const struct feed *feed)
{
    const struct train *train = feed->train;
    return !feed_is_live(feed) ? 0
                               : train_generated(train, train_share_max(train)) *
                                         (train->data->sample_bytes + sizeof *feed->numbers) +
                                     generator_memory_bytes(feed->generator);
}
