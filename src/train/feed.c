#include "core/phase.h"
#include "train/feed.h"

#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/timer.h"

static enum status open_augment(const struct train *train, int threads, struct feed *feed)
{
    TRY(augment_plan(train, &feed->augment));
    feed->threads = threads;
    feed->images = malloc(train_generated(train, train_share_max(train)) * train->data->sample_bytes);
    feed->scratch = calloc((size_t)threads, sizeof *feed->scratch);
    TRY(ALLOCATED(feed->images && feed->scratch, "out of memory for a batch of %u samples; lower --batch",
                  train_share_max(train)));
    for (int i = 0; i < threads; i++)
        TRY(augment_scratch_open(&feed->augment, &feed->scratch[i]));
    return STATUS_OK;
}

enum status feed_open(const struct train *train, const struct resources *resources, struct feed *feed)
{
    *feed = (struct feed){.train = train};
    if (augment_computes(&train->augment) && !train->forward_only)
        TRY(open_augment(train, resources->threads > 1 ? resources->threads : 1, feed));
    if (train->data->feed != DATA_LIVE || train->forward_only)
        return STATUS_OK;
    const struct generator_request request = {.resources = *resources,
                                              .batch = train_generated(train, train_share_max(train))};
    feed->numbers = malloc(request.batch * sizeof *feed->numbers);
    feed->samples = malloc(request.batch * data_stored_bytes(train->data, DATA_TRAIN));
    TRY(ALLOCATED(feed->numbers && feed->samples, "out of memory for a batch of %u samples; lower --batch",
                  train_share_max(train)));
    return data_generator(train->data, &request, &feed->generator);
}

void feed_close(struct feed *feed)
{
    generator_close(feed->generator);
    free(feed->numbers);
    free(feed->samples);
    for (int i = 0; feed->scratch && i < feed->threads; i++)
        augment_scratch_close(&feed->scratch[i]);
    free(feed->scratch);
    free(feed->images);
    *feed = (struct feed){0};
}

/* Generates the `count` samples in `numbers`. `count` includes the partners that train_generated() counts. */
static enum status generate(struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count)
{
    const struct data *data = feed->train->data;
    RANGE(GENERATE);
    double begin_s = timer_now_s();
    for (uint32_t j = 0; j < count; j++)
        feed->numbers[j] = data_number(data->fresh, epoch, train_original(data, numbers[j]));
    const struct generator_numbers listed = {.list = feed->numbers};
    enum status status = generator_make(feed->generator, &listed, count, feed->samples, NULL, NULL);
    feed->generate_s += timer_now_s() - begin_s;
    return status;
}

/* Computes the images of the `count` samples in `numbers`. `count` includes the partners that
 * train_generated() counts. Threads take samples in any order, which does not change the images. */
static void compute_images(const struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count)
{
    RANGE(GATHER);
#pragma omp parallel for schedule(dynamic) num_threads(feed->threads)
    for (uint32_t j = 0; j < count; j++) {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        augment_image(&feed->augment, feed_stored(feed, numbers[j], j), epoch, numbers[j],
                      &feed->scratch[thread], feed->images + j * feed->train->data->sample_bytes);
    }
}

enum status feed_step(struct feed *feed, uint32_t epoch, const uint32_t *numbers, uint32_t count)
{
    if (count == 0)
        return STATUS_OK;
    count = train_generated(feed->train, count);
    if (feed->generator)
        TRY(generate(feed, epoch, numbers, count));
    if (feed->images)
        compute_images(feed, epoch, numbers, count);
    return STATUS_OK;
}

/* Gathers sample number `sample`, which has index `j` in feed->samples and feed->images. */
static void gather_alone(const struct feed *feed, uint32_t epoch, uint32_t sample, uint32_t j, float *values)
{
    const struct train *train = feed->train;
    data_gather(train->data, feed_sample(feed, sample, j),
                box_move(&train->augment, train->seed, epoch, sample), values);
}

void feed_gather(const struct feed *feed, const struct mix *mix, uint32_t epoch, const uint32_t *numbers,
                 uint32_t count, uint32_t j, float *partner, float *values)
{
    const struct train *train = feed->train;
    gather_alone(feed, epoch, numbers[j], j, values);
    if (mix->share >= 1)
        return;
    const struct train_held held = {true, train_generated(train, 1) > 1, count, 0};
    gather_alone(feed, epoch, numbers[count + j], train_held_at(&held, count, count + j), partner);
    mix_samples(mix, &train->data->shape, partner, values);
}

uint64_t feed_memory_bytes(const struct feed *feed)
{
    const struct train *train = feed->train;
    const uint64_t images = feed->images ? train_generated(train, train_share_max(train)) : 0;
    uint64_t bytes = images * train->data->sample_bytes;
    if (feed->generator)
        bytes += train_generated(train, train_share_max(train)) *
                     (data_stored_bytes(train->data, DATA_TRAIN) + sizeof *feed->numbers) +
                 generator_memory_bytes(feed->generator);
    return bytes;
}
