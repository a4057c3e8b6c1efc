#include "train/feed.cuh"

#include <new>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/device_mix.cuh"
#include "common/device_stream.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "train/data_mixture.h"
#include "train/given.h"

/* ---- Opening ---- */

static enum status open_buffer(struct feed_buffer *buffer, const struct train *train,
                               struct allocations *allocations)
{
    buffer->step = FEED_EMPTY;
    const uint32_t samples = train_generated(train, feed_share_max(train));
    TRY(allocate(allocations, &buffer->samples, samples * data_stored_bytes(train->data, DATA_TRAIN)));
    TRY(allocate(allocations, &buffer->numbers, samples));
    if (train->data->multi_hot)
        TRY(allocate(allocations, &buffer->multi_hot, samples * (size_t)train->data->classes));
    CUDA_TRY(cudaEventCreateWithFlags(&buffer->made, cudaEventDisableTiming));
    return CUDA_STATUS(cudaEventCreateWithFlags(&buffer->taken, cudaEventDisableTiming));
}

static enum status open_timing(struct feed_timing *timing)
{
    CUDA_TRY(cudaEventCreate(&timing->wait_begin));
    CUDA_TRY(cudaEventCreate(&timing->arrived));
    CUDA_TRY(cudaEventCreate(&timing->wait_end));
    CUDA_TRY(cudaEventCreate(&timing->make_begin));
    return CUDA_STATUS(cudaEventCreate(&timing->make_end));
}

/* Opens the generator and two batch buffers. Allocates the host memory that the generator needs for sample
 * numbers and samples. */
static enum status open_generator(struct device_feed *feed, const struct resources *resources,
                                  struct allocations *allocations)
{
    const struct train *train = feed->train;
    const char *name = train->generator ? train->generator : "fused";
    const size_t batch = train_generated(train, feed_share_max(train));
    const bool on_device = strcmp(name, "omp") != 0;
    for (struct feed_buffer &buffer : feed->buffers)
        TRY(open_buffer(&buffer, train, allocations));
    /* This stream has the highest priority. With the lowest priority, training steps would take just as long.
     * However, generating a batch would take most of a step, and generate_s would contain that time. */
    TRY(stream_open(&feed->stream));
    if (strcmp(name, "fused") != 0) {
        feed->host_numbers = static_cast<uint64_t *>(malloc(batch * sizeof *feed->host_numbers));
        TRY(ALLOCATED(feed->host_numbers, "cuda: out of memory"));
    }
    if (!on_device)
        CUDA_TRY(cudaMallocHost(&feed->staging, batch * data_stored_bytes(train->data, DATA_TRAIN)));
    if (!on_device && train->data->multi_hot)
        CUDA_TRY(cudaMallocHost(&feed->staged_multi_hot, batch * train->data->classes));
    const struct generator_request request = {
        .on_device = on_device, .resources = *resources, .batch = (uint32_t)batch, .variant = name};
    return data_generator(train->data, &request, &feed->generator);
}

/* Opens the device stream of a source of a mixture that is read. The source that ends an epoch has the
 * decoder; those of the other sources are decoded by the CPU, at full size if the device decodes some. */
static enum status open_read(struct device_feed *feed, uint32_t source, const struct stream_plan *plan,
                             const struct data_stream_request *request, struct stream **stream)
{
    const struct data *data = feed->train->data;
    const bool named = source == data->mixture->mix.named, decodes = request->device_share > 0;
    struct data_stream_request own = *request;
    struct stream *host;
    own.device_share = named ? request->device_share : 0;
    own.device_bytes = named ? request->device_bytes : 0;
    own.unscaled = decodes;
    TRY(data_mixture_source(data, source, plan, &own, &host));
    const struct device_stream_request with = {.decoder = named && decodes ? feed->decoder : nullptr,
                                               .res = data->shape.height,
                                               .channels = data->shape.channels,
                                               .capacity = plan->capacity,
                                               .sample_bytes = data->sample_bytes,
                                               .by_epoch = plan->by_epoch,
                                               .ahead = FEED_AHEAD_MIXED,
                                               .held = 1,
                                               .resident_bytes = own.device_bytes};
    return device_stream_open(host, &with, stream);
}

/* Opens the stream of the source of a mixture that is generated. */
static enum status open_generated(const struct device_feed *feed, uint32_t source,
                                  const struct stream_plan *plan, const struct resources *resources,
                                  struct stream **stream)
{
    const struct data *data = &feed->train->data->mixture->sources[source];
    const struct generator_request from = {
        .on_device = true, .resources = *resources, .batch = plan->capacity, .variant = "fused"};
    struct device_generated_request request = {.number = mixture_sample,
                                               .label = data_generated_label,
                                               .label_state = data,
                                               .sample_bytes = data->sample_bytes,
                                               .type = data->type,
                                               .plan = *plan};
    TRY(data_generator(data, &from, &request.generator));
    return device_generated_open(&request, stream);
}

/* Opens the streams of all sources of a mixture, and joins them. */
static enum status open_mixture(struct device_feed *feed, const struct resources *resources)
{
    const struct train *train = feed->train;
    const struct data_mixture *mixture = train->data->mixture;
    struct data_stream_request request = {.threads = resources->threads,
                                          .held = DEVICE_STREAM_HELD,
                                          .allocate = device_stream_pin,
                                          .deallocate = device_stream_unpin};
    struct device_mix_request with = {
        .mixture = &mixture->plan, .sample_bytes = train->data->sample_bytes, .held = 1};
    TRY(feed_stream_begin(train, feed->decoder->kind, &request, &feed->loading));
    with.capacity = request.plan.capacity;
    enum status status = mixture_plans_open(&mixture->plan, &request.plan, &with.plans);
    for (uint32_t k = 0; status == STATUS_OK && k < mixture->mix.count; k++) {
        const struct stream_plan plan = mixture_plan_of(with.plans, k);
        status = k == mixture->mix.generated ? open_generated(feed, k, &plan, resources, &with.streams[k])
                                             : open_read(feed, k, &plan, &request, &with.streams[k]);
    }
    if (status == STATUS_OK)
        return device_mix_open(&with, &feed->loading.stream);
    const struct failure failure = status_save(status);
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++)
        stream_close(with.streams[k]);
    mixture_plans_close(with.plans);
    return status_restore(&failure);
}

/* Opens the stream that delivers the samples of this rank on the device. */
static enum status open_loading(struct device_feed *feed, const struct resources *resources)
{
    const struct train *train = feed->train;
    const struct data *data = train->data;
    feed->numbers =
        static_cast<uint32_t *>(malloc(train_entries(train, feed_share_max(train)) * sizeof *feed->numbers));
    feed->decoder = new (std::nothrow) image_decoder{};
    TRY(ALLOCATED(feed->numbers && feed->decoder, "cuda: out of memory"));
    TRY(image_decoder_open(feed->decoder, feed_decoder_wanted(train)));
    device_stream_use(resources->device);
    CUDA_TRY(cudaEventCreateWithFlags(&feed->taken, cudaEventDisableTiming));
    feed->mixes = data->mixture != nullptr;
    feed->given = data->given != nullptr;
    if (feed->mixes)
        return open_mixture(feed, resources);
    TRY(feed_stream_open(train, resources->threads, DEVICE_STREAM_HELD, feed->decoder->kind,
                         device_stream_pin, device_stream_unpin, &feed->loading));
    if (feed->given) { /* its batches are in device memory */
        CUDA_TRY(cudaHostAlloc(&feed->wrong, sizeof *feed->wrong, cudaHostAllocMapped));
        *feed->wrong = 0;
        return STATUS_OK;
    }
    const bool decodes = train->decoding && train->decoding->share > 0;
    const struct device_stream_request request = {.decoder = decodes ? feed->decoder : nullptr,
                                                  .res = data->shape.height,
                                                  .channels = data->shape.channels,
                                                  .capacity = train_generated(train, feed_share_max(train)),
                                                  .sample_bytes = data->sample_bytes,
                                                  .by_epoch = train->shares != nullptr,
                                                  .ahead = FEED_AHEAD,
                                                  .held = 1,
                                                  .resident_bytes = data->resident_device_bytes};
    return device_stream_open(feed->loading.stream, &request, &feed->loading.stream);
}

enum status device_feed_open(struct device_feed *feed, const struct train *train,
                             const struct resources *resources, struct allocations *allocations)
{
    const enum data_feed source = train->data->feed;
    *feed = {};
    feed->train = train;
    feed->stride = 1;
    allocations->part = MEMORY_STREAM;
    if ((source != DATA_LIVE && source != DATA_LOAD) || train->forward_only ||
        (train->stage && !train->stage->first))
        return STATUS_OK;
    for (struct feed_timing &timing : feed->timings)
        TRY(open_timing(&timing));
    TRY(source == DATA_LOAD ? open_loading(feed, resources) : open_generator(feed, resources, allocations));
    return memory_take(allocations->account, MEMORY_STREAM, device_feed_memory_bytes(feed));
}

void device_feed_close(struct device_feed *feed)
{
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    if (feed->stream)
        (void)cudaStreamSynchronize(feed->stream);
    generator_close(feed->generator);
    feed_stream_close(&feed->loading);
    if (feed->decoder)
        image_decoder_close(feed->decoder);
    delete feed->decoder;
    (void)cudaFreeHost(feed->wrong);
    (void)cudaFreeHost(feed->staging);
    (void)cudaFreeHost(feed->staged_multi_hot);
    free(feed->host_numbers);
    free(feed->numbers);
    for (struct feed_timing &timing : feed->timings)
        destroy(timing.wait_begin, timing.arrived, timing.wait_end, timing.make_begin, timing.make_end);
    for (struct feed_buffer &buffer : feed->buffers)
        destroy(buffer.made, buffer.taken);
    destroy(feed->taken, feed->stream);
    *feed = {};
}

uint64_t device_feed_memory_bytes(const struct device_feed *feed)
{
    if (feed->given)
        return 0;
    if (feed->loading.stream && feed->mixes)
        return device_mix_memory_bytes(feed->loading.stream) + feed->decoder->bytes;
    if (feed->loading.stream)
        return device_stream_memory_bytes(feed->loading.stream) + feed->decoder->bytes;
    return feed->generator && !feed->staging ? generator_memory_bytes(feed->generator) : 0;
}

/* ---- Generating ---- */

/* Returns the number of the sample that is generated for entry `j` of the list of a rank's samples. Copies of
 * a sample have the same number. */
FDSL_HD uint64_t generated_number(const struct train_pick *pick, const struct share *share, uint64_t fresh,
                                  uint32_t epoch, uint32_t j)
{
    return data_number(fresh, epoch, train_picked(pick, train_entry(share, j)) % pick->order.count);
}

static __global__ void number_kernel(const struct train_pick pick, const struct share share, uint32_t count,
                                     uint64_t fresh, uint32_t epoch, uint64_t *numbers)
{
    uint32_t j = own_element();
    if (j < count)
        numbers[j] = generated_number(&pick, &share, fresh, epoch, j);
}

/* The `count` samples that a rank generates for a step: its own and, if samples are mixed on several ranks,
 * also their partners. */
struct drawn_batch {
    struct device_feed *feed;
    struct train_pick pick;
    uint32_t epoch, count;
    struct share share;
};

static void list_on_host(const struct drawn_batch *batch)
{
    const uint64_t fresh = batch->feed->train->data->fresh;
    for (uint32_t j = 0; j < batch->count; j++)
        batch->feed->host_numbers[j] = generated_number(&batch->pick, &batch->share, fresh, batch->epoch, j);
}

/* Draws a batch into feed->staging, and frees the argument. CUDA calls this function on a thread of its own,
 * in the order of the stream. */
static void CUDART_CB draw_on_host(void *argument)
{
    struct drawn_batch *batch = static_cast<struct drawn_batch *>(argument);
    struct device_feed *feed = batch->feed;
    list_on_host(batch);
    const struct generator_numbers listed = {feed->host_numbers, 0, nullptr, nullptr};
    const struct generator_targets targets = {nullptr, feed->staged_multi_hot, nullptr};
    enum status status =
        generator_make(feed->generator, &listed, batch->count, feed->staging, &targets, nullptr);
    if (status != STATUS_OK && feed->drawn == STATUS_OK) {
        feed->failure = status_save(status);
        __atomic_store_n(&feed->drawn, status, __ATOMIC_RELEASE);
    }
    free(batch);
}

/* Returns the first failure of draw_on_host(), if there is one. */
static enum status check_drawn(const struct device_feed *feed)
{
    const enum status drawn = __atomic_load_n(&feed->drawn, __ATOMIC_ACQUIRE);
    return drawn == STATUS_OK ? STATUS_OK : status_restore(&feed->failure);
}

/* The host may be many steps ahead of the stream, so each batch has its own argument. */
static enum status enqueue_host_draw(const struct drawn_batch *batch, const struct feed_buffer *buffer)
{
    struct device_feed *feed = batch->feed;
    struct drawn_batch *argument = static_cast<struct drawn_batch *>(malloc(sizeof *argument));
    TRY(ALLOCATED(argument, "cuda: out of memory"));
    *argument = *batch;
    cudaError_t error = cudaLaunchHostFunc(feed->stream, draw_on_host, argument);
    if (error != cudaSuccess)
        free(argument);
    CUDA_TRY(error);
    const size_t bytes = data_stored_bytes(feed->train->data, DATA_TRAIN);
    if (buffer->multi_hot)
        CUDA_TRY(cudaMemcpyAsync(buffer->multi_hot, feed->staged_multi_hot,
                                 batch->count * (size_t)feed->train->data->classes, cudaMemcpyHostToDevice,
                                 feed->stream));
    return CUDA_STATUS(cudaMemcpyAsync(buffer->samples, feed->staging, batch->count * bytes,
                                       cudaMemcpyHostToDevice, feed->stream));
}

static enum status enqueue_draw(const struct drawn_batch *batch, const struct feed_buffer *buffer)
{
    struct device_feed *feed = batch->feed;
    if (feed->staging)
        return enqueue_host_draw(batch, buffer);
    number_kernel<<<blocks_for(batch->count), BLOCK, 0, feed->stream>>>(
        batch->pick, batch->share, batch->count, feed->train->data->fresh, batch->epoch, buffer->numbers);
    CUDA_TRY_LAUNCH("number_kernel");
    if (feed->host_numbers)
        list_on_host(batch);
    const struct generator_numbers listed = {buffer->numbers, 0, nullptr, feed->host_numbers};
    const struct generator_targets targets = {nullptr, buffer->multi_hot, nullptr};
    return generator_make(feed->generator, &listed, batch->count, buffer->samples, &targets, feed->stream);
}

/* Enqueues the generation of the batch of a step. */
static enum status generate(struct device_feed *feed, const struct feed_buffer *buffer, uint32_t epoch,
                            uint32_t step, const struct share *share)
{
    const struct train *train = feed->train;
    const struct draw_order order = train_order(train, epoch);
    const struct drawn_batch batch = {feed, train_pick(train, &order, step / feed_per_step(train)), epoch,
                                      train_generated(train, (uint32_t)share->count), *share};
    RANGE(GENERATE);
    TRY(check_drawn(feed));
    return batch.count > 0 ? enqueue_draw(&batch, buffer) : STATUS_OK;
}

/* ---- Loading ---- */

/* Enqueues setting the labels of broken samples to DATA_MASKED. Whether a file is broken does not change, so
 * earlier steps have these labels already. */
static enum status mask_labels(const struct device_feed *feed, uint32_t *labels, cudaStream_t stream)
{
    const struct stream_batch *batch = &feed->batch;
    static_assert(DATA_MASKED == UINT32_MAX, "all bytes are equal");
    for (uint32_t j = 0; batch->masked > 0 && j < batch->samples.count; j++)
        if (batch->labels[j] == STREAM_MASKED)
            CUDA_TRY(cudaMemsetAsync(labels + train_original(feed->train->data, batch->numbers[j]), 0xff,
                                     sizeof *labels, stream));
    return STATUS_OK;
}

static __global__ void label_kernel(const uint32_t *numbers, const int32_t *batch_labels, uint32_t count,
                                    uint32_t *labels)
{
    uint32_t j = own_element();
    if (j < count)
        labels[numbers[j]] = (uint32_t)batch_labels[j]; /* STREAM_MASKED becomes DATA_MASKED */
}

/* Enqueues setting the labels of the samples of a mixture, whose numbers are positions. */
static enum status set_labels(const struct device_feed *feed, uint32_t *labels, cudaStream_t stream)
{
    const struct batch *samples = &feed->batch.samples;
    static_assert((uint32_t)STREAM_MASKED == DATA_MASKED, "a masked sample");
    if (samples->count == 0)
        return STATUS_OK;
    label_kernel<<<blocks_for(samples->count), BLOCK, 0, stream>>>(
        device_mix_numbers(feed->loading.stream, &feed->batch), samples->labels, samples->count, labels);
    return CUDA_LAUNCHED("label_kernel");
}

/* Converts labels of the caller. Label -1 becomes DATA_MASKED; counts labels that are no classes. */
static __global__ void given_label_kernel(const int64_t *from, uint32_t count, uint32_t classes,
                                          uint32_t *labels, uint32_t *wrong)
{
    const uint32_t j = own_element();
    if (j >= count)
        return;
    const int64_t label = from[j];
    const bool known = label >= 0 && label < classes;
    labels[j] = known ? (uint32_t)label : DATA_MASKED;
    if (!known && label != STREAM_MASKED)
        atomicAdd_system(wrong, 1);
}

/* Enqueues setting the labels of samples that the caller hands over. given_open() makes their numbers
 * consecutive; otherwise labels would go to other samples. Those of the data are in host memory, and change
 * in the next epoch only. */
static enum status copy_labels(const struct device_feed *feed, const struct device_set *set,
                               cudaStream_t stream)
{
    const struct data *data = feed->train->data;
    const struct data_set *from = &data->sets[DATA_TRAIN];
    const uint32_t count = feed->batch.samples.count, first = count ? feed->batch.numbers[0] : 0;
    const size_t words = multi_hot_words(data->classes);
    if (count == 0)
        return STATUS_OK;
    for (uint32_t j = 1; j < count; j++)
        if (feed->batch.numbers[j] != first + j)
            return status_set(STATUS_FAILED, "the numbers of samples that are handed over have a gap");
    if (data->given->device_labels) {
        given_label_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(
            data->given->device_labels, count, data->classes, set->labels + first, feed->wrong);
        return CUDA_LAUNCHED("given_label_kernel");
    }
    if (data->multi_hot)
        CUDA_TRY(cudaMemcpyAsync(set->multi_hot + first * words, from->multi_hot + first * words,
                                 count * words * sizeof *set->multi_hot, cudaMemcpyDefault, stream));
    return CUDA_STATUS(cudaMemcpyAsync(set->labels + first, from->labels + first, count * sizeof *set->labels,
                                       cudaMemcpyDefault, stream));
}

/* Takes the batch of a step from the stream. `stream` waits until it is complete. */
static enum status take_loaded(struct device_feed *feed, uint32_t epoch, uint32_t step, cudaStream_t stream,
                               struct device_set *set)
{
    const struct train *train = feed->train;
    const uint32_t own = feed_stream_list(&feed->loading, epoch, step, feed->numbers);
    RANGE(WAIT);
    TRY(feed_stream_next(&feed->loading, epoch, step, feed->numbers, train_generated(train, own),
                         &feed->batch));
    CUDA_TRY(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(feed->batch.ready), 0));
    TRY(feed->given   ? copy_labels(feed, set, stream)
        : feed->mixes ? set_labels(feed, set->labels, stream)
                      : mask_labels(feed, set->labels, stream));
    set->values = feed->batch.samples.values;
    set->held = {true, train_generated(train, 1) > 1, own, 0};
    return STATUS_OK;
}

/* ---- Batches ---- */

/* Returns the maximum number of timed steps between two calls of totals(). */
static uint32_t timings_max(const struct device_feed *feed)
{
    return feed->generator ? FEED_TIMINGS_LIVE : FEED_TIMINGS;
}

/* Returns the events that time the current step, or NULL if it is not timed. */
static struct feed_timing *current_timing(struct device_feed *feed)
{
    return feed->since == feed->stride / 2 && feed->timing_count < timings_max(feed)
               ? &feed->timings[feed->timing_count]
               : nullptr;
}

/* Enqueues the generation of the batch of step `number` into a buffer. On the device, this work waits until
 * the buffer's previous batch has been gathered. */
static enum status make(struct device_feed *feed, struct feed_buffer *buffer, uint64_t number,
                        const struct feed_timing *timing)
{
    const uint32_t steps = feed_steps(feed->train), epoch = (uint32_t)(number / steps);
    const uint32_t step = (uint32_t)(number % steps);
    const struct share share = feed_share(feed->train, step);
    buffer->step = FEED_EMPTY; /* stays so if an error prevents the batch from being enqueued */
    CUDA_TRY(cudaStreamWaitEvent(feed->stream, buffer->taken, 0));
    if (timing)
        CUDA_TRY(cudaEventRecord(timing->make_begin, feed->stream));
    TRY(generate(feed, buffer, epoch, step, &share));
    if (timing)
        CUDA_TRY(cudaEventRecord(timing->make_end, feed->stream));
    CUDA_TRY(cudaEventRecord(buffer->made, feed->stream));
    buffer->step = number;
    buffer->share = share;
    return STATUS_OK;
}

/* Returns whether the buffer has this rank's part of a step. The shares of the ranks may have changed since
 * the batch was generated: the first batch of an epoch is generated in the previous epoch. */
static bool holds(const struct device_feed *feed, const struct feed_buffer *buffer, uint64_t number,
                  uint32_t step)
{
    const struct share share = feed_share(feed->train, step);
    return buffer->step == number && buffer->share.first == share.first && buffer->share.count == share.count;
}

/* Packs the multi-hot labels of a generated batch into the rows of its samples. Copies of a sample write the
 * same words. A thread writes a word. */
static __global__ void multi_hot_kernel(const struct train_pick pick, const struct share share,
                                        uint32_t count, uint32_t classes, const uint8_t *labels,
                                        uint32_t *rows)
{
    const uint32_t words = multi_hot_words(classes), i = own_element(), j = i / words, w = i % words;
    if (j < count)
        rows[(size_t)(train_picked(&pick, train_entry(&share, j)) % pick.order.count) * words + w] =
            multi_hot_pack(labels + (size_t)j * classes, classes, w);
}

/* Enqueues setting the rows of the samples in `buffer`, which is complete. The steps before this one, which
 * read other labels of the same samples, are on `stream`. */
static enum status set_multi_hot(const struct device_feed *feed, const struct feed_buffer *buffer,
                                 cudaStream_t stream, uint32_t *rows)
{
    const struct train *train = feed->train;
    const uint32_t steps = feed_steps(train), count = train_generated(train, (uint32_t)buffer->share.count);
    const struct draw_order order = train_order(train, (uint32_t)(buffer->step / steps));
    if (!buffer->multi_hot || count == 0)
        return STATUS_OK;
    multi_hot_kernel<<<blocks_for((size_t)count * multi_hot_words(train->data->classes)), BLOCK, 0, stream>>>(
        train_pick(train, &order, (uint32_t)(buffer->step % steps) / feed_per_step(train)), buffer->share,
        count, train->data->classes, buffer->multi_hot, rows);
    return CUDA_LAUNCHED("multi_hot_kernel");
}

/* Takes the generated batch of step `number` over all epochs. `stream` waits until it is complete. */
static enum status take_generated(struct device_feed *feed, uint64_t number, cudaStream_t stream,
                                  struct device_set *set)
{
    feed->turn = (feed->turn + 1) % FEED_BUFFERS;
    struct feed_buffer *buffer = &feed->buffers[feed->turn];
    /* The batch is missing at the first step, for example, and after a jump. */
    if (!holds(feed, buffer, number, (uint32_t)(number % feed_steps(feed->train))))
        TRY(make(feed, buffer, number, nullptr));
    CUDA_TRY(cudaStreamWaitEvent(stream, buffer->made, 0));
    set->values = buffer->samples;
    set->held = {true, train_generated(feed->train, 1) > 1, (uint32_t)buffer->share.count, 0};
    return set_multi_hot(feed, buffer, stream, set->multi_hot);
}

enum status device_feed_take(struct device_feed *feed, uint32_t epoch, uint32_t step, cudaStream_t stream,
                             struct device_set *set)
{
    const uint64_t number = (uint64_t)epoch * feed_steps(feed->train) + step;
    const struct feed_timing *timing = current_timing(feed);
    if (timing)
        CUDA_TRY(cudaEventRecord(timing->wait_begin, stream));
    TRY(feed->generator ? take_generated(feed, number, stream, set)
                        : take_loaded(feed, epoch, step, stream, set));
    return timing ? CUDA_STATUS(cudaEventRecord(timing->arrived, stream)) : STATUS_OK;
}

/* Enqueues the generation of the next batch, after the current one has been gathered on `stream`. */
static enum status release_generated(struct device_feed *feed, cudaStream_t stream,
                                     const struct feed_timing *timing)
{
    struct feed_buffer *buffer = &feed->buffers[feed->turn];
    struct feed_buffer *other = &feed->buffers[(feed->turn + 1) % FEED_BUFFERS];
    CUDA_TRY(cudaEventRecord(buffer->taken, stream));
    return make(feed, other, buffer->step + 1, timing);
}

static enum status release_loaded(struct device_feed *feed, cudaStream_t stream)
{
    CUDA_TRY(cudaEventRecord(feed->taken, stream));
    return stream_release(feed->loading.stream, &feed->batch, feed->taken);
}

enum status device_feed_release(struct device_feed *feed, cudaStream_t stream)
{
    const struct feed_timing *timing = current_timing(feed);
    if (timing)
        CUDA_TRY(cudaEventRecord(timing->wait_end, stream));
    TRY(feed->generator ? release_generated(feed, stream, timing) : release_loaded(feed, stream));
    feed->timing_count += timing != nullptr;
    feed->since = (feed->since + 1) % feed->stride;
    return STATUS_OK;
}

/* ---- Times ---- */

void device_feed_plan_timings(struct device_feed *feed, uint32_t steps)
{
    feed->stride = (steps + timings_max(feed) - 1) / timings_max(feed);
    feed->since = 0;
}

/* Adds the milliseconds from one event to another, which has finished. */
static enum status add_ms(cudaEvent_t begin, cudaEvent_t end, double *ms)
{
    float one_ms;
    CUDA_TRY(cudaEventElapsedTime(&one_ms, begin, end));
    *ms += one_ms;
    return STATUS_OK;
}

enum status device_feed_totals(struct device_feed *feed, uint64_t steps, struct train_totals *totals)
{
    double stall_ms = 0, wait_ms = 0, make_ms = 0;
    TRY(check_drawn(feed));
    for (uint32_t i = 0; i < feed->timing_count; i++) {
        const struct feed_timing *timing = &feed->timings[i];
        TRY(add_ms(timing->wait_begin, timing->arrived, &stall_ms));
        TRY(add_ms(timing->wait_begin, timing->wait_end, &wait_ms));
        if (!feed->generator)
            continue;
        /* The generator may still be working on the batch of the next step. */
        CUDA_TRY(cudaEventSynchronize(timing->make_end));
        TRY(add_ms(timing->make_begin, timing->make_end, &make_ms));
    }
    const double scale = feed->timing_count ? 1e-3 * (double)steps / feed->timing_count : 0;
    totals->data_s = wait_ms * scale;
    totals->generate_s = make_ms * scale;
    feed->timing_count = 0;
    if (!feed->loading.stream)
        return STATUS_OK;
    if (feed->wrong && *feed->wrong > 0)
        return status_set(STATUS_USAGE,
                          "labels: %u samples have labels that are not below the number of classes, %u",
                          *feed->wrong, feed->train->data->classes);
    feed_stream_totals(&feed->loading, totals);
    totals->stall_s = stall_ms * scale;
    return STATUS_OK;
}
