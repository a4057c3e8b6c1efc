#include "load/delivery.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/consumer.h"
#include "core/phase.h"
#include "core/timer.h"
#include "data/random_draws.h"
#include "data/members.h"
#include "machine/device.h"
#include "machine/nvml.h"

/* Copies pageable host memory to the current device and waits until all bytes have arrived. cudaMemcpy()
 * alone may return while the last bytes are in flight. Non-blocking streams do not wait for these bytes. */
static enum status device_put(void *to, const void *from, uint64_t bytes)
{
    CUDA_TRY(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    CUDA_TRY(cudaStreamSynchronize(nullptr));
    return STATUS_OK;
}

#define COPIES 16

enum status device_copy_rate(int device, uint64_t bytes, enum cudaMemcpyKind kind, double *bytes_per_s)
{
    void *from = NULL, *to = NULL;
    cudaStream_t stream = NULL;
    bool host = kind == cudaMemcpyHostToDevice;
    CUDA_TRY(cudaSetDevice(device));
    cudaError_t error = host ? cudaMallocHost(&from, bytes) : cudaMalloc(&from, bytes);
    if (error == cudaSuccess)
        error = cudaMalloc(&to, bytes);
    if (error == cudaSuccess)
        error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess && host)
        memset(from, 1, bytes);
    if (error == cudaSuccess && !host)
        error = cudaMemsetAsync(from, 1, bytes, stream);
    double begin_s = 0;
    for (int i = 0; error == cudaSuccess && i <= COPIES; i++) {
        error = cudaMemcpyAsync(to, from, bytes, kind, stream);
        if (error == cudaSuccess && (i == 0 || i == COPIES))
            error = cudaStreamSynchronize(stream);
        begin_s = i == 0 ? timer_now_s() : begin_s; /* the first copy warms up */
    }
    *bytes_per_s = (host ? 1 : 2) * (double)COPIES * (double)bytes / (timer_now_s() - begin_s);
    destroy(stream);
    (void)cudaFree(to);
    (void)(host ? cudaFreeHost(from) : cudaFree(from));
    CUDA_TRY(error);
    return STATUS_OK;
}

/* ---- Opening ---- */

struct convert delivery_convert(const struct delivery *delivery, uint32_t channel)
{
    const struct load *load = delivery->load;
    return convert_make(delivery->arrays.type, load->dtype, load->given->mean[channel],
                        load->given->std[channel]);
}

enum status delivery_begin(struct delivery *delivery, const struct resources *resources,
                           const struct load *load, bool packed, bool keyed, uint32_t workers)
{
    delivery->load = load;
    delivery->device = resources->device;
    CUDA_TRY(cudaSetDevice(delivery->device));
    delivery->failed = delivery->workers = workers;
    delivery->result.number = UINT64_MAX;
    struct order_plan plan = load_plan(load, (int)workers);
    plan.keyed = keyed;
    TRY(verifier_open(&delivery->verifier, load, &plan));
    delivery->fit = load->fit;
    delivery->fit.unscaled = true;
    TRY(arrays_open(load->dataset, load->given->decode ? &load->fit : NULL, packed, &delivery->arrays));
    delivery->convert = delivery_convert(delivery, 0);
    for (uint32_t c = 0; load->given->decode && c < delivery->fit.channels; c++) {
        const struct convert convert = delivery_convert(delivery, c);
        pixel_values_set(&delivery->pixel_values[c], &convert);
    }
    delivery->slot_bytes = delivery->arrays.value_count * convert_value_bytes(&delivery->convert);
    delivery->stride = (delivery->slot_bytes + UNPACK_ALIGNMENT - 1) / UNPACK_ALIGNMENT * UNPACK_ALIGNMENT;
    return STATUS_OK;
}

static enum status open_queue(struct delivery *delivery, struct output_queue *queue)
{
    const struct dataset *dataset = delivery->load->dataset;
    queue->delivery = delivery;
    queue->plain.dataset = dataset;
    queue->plain.fd = -1;
    TRY(order_open(&delivery->verifier.plan, &queue->order));
    queue->held = static_cast<uint32_t *>(malloc(delivery->slots * sizeof *queue->held));
    queue->held_epoch = static_cast<uint32_t *>(calloc(delivery->slots, sizeof *queue->held_epoch));
    queue->buffers = static_cast<struct batch_buffer *>(calloc(delivery->buffers, sizeof *queue->buffers));
    TRY(ALLOCATED(queue->held && queue->held_epoch && queue->buffers, "out of memory for %u slots",
                  delivery->slots));
    TRY(stream_open(&queue->stream));
    CUDA_TRY(cudaMalloc(&queue->tensor, delivery->slots * delivery->stride));
    CUDA_TRY(cudaMalloc(&queue->labels, delivery->slots * sizeof *queue->labels));
    CUDA_TRY(cudaMalloc(&queue->hashes, delivery->slots * sizeof *queue->hashes));
    queue->checksum = &delivery->checksums[queue->number];
    for (uint32_t b = 0; b < delivery->buffers; b++)
        CUDA_TRY(cudaEventCreateWithFlags(&queue->buffers[b].ready, cudaEventDisableTiming));
    return STATUS_OK;
}

static enum status open_all(struct delivery *delivery)
{
    const struct load *load = delivery->load;
    uint64_t bytes = load->dataset->sample_count * sizeof *delivery->samples;
    delivery->queues =
        static_cast<struct output_queue *>(calloc(delivery->workers, sizeof *delivery->queues));
    delivery->ready = new (std::nothrow) std::deque<uint32_t>[delivery->workers];
    delivery->left = static_cast<uint64_t *>(calloc(delivery->workers, sizeof *delivery->left));
    TRY(ALLOCATED(delivery->queues && delivery->ready && delivery->left, "out of memory"));
    CUDA_TRY(cudaMalloc(&delivery->samples, bytes));
    CUDA_TRY(cudaMalloc(&delivery->checksums, delivery->workers * sizeof *delivery->checksums));
    TRY(device_put(delivery->samples, delivery->arrays.samples, bytes));
    for (uint32_t w = 0; w < delivery->workers; w++) {
        delivery->queues[w].number = w;
        TRY(open_queue(delivery, &delivery->queues[w]));
    }
    return STATUS_OK;
}

/* Sets result.memory_bytes to `device_bytes`, all memory allocated on the device. Sets result.useful_bytes to
 * the size of the values and labels of one batch per worker. */
static void count_memory(struct delivery *delivery, uint64_t device_bytes)
{
    const struct load *load = delivery->load;
    uint64_t samples = order_batch_samples(&delivery->verifier.plan, load->rank * delivery->workers,
                                           delivery->workers, load->given->batch);
    delivery->result.memory_bytes = device_bytes;
    delivery->result.useful_bytes = (double)samples * (double)(delivery->slot_bytes + sizeof(int32_t));
}

enum status delivery_open(struct delivery *delivery, uint64_t slots, uint64_t more_bytes)
{
    const struct load *load = delivery->load;
    uint64_t buffers = (slots + load->given->batch - 1) / load->given->batch, bytes;
    if (buffers * load->given->batch > UINT32_MAX)
        return status_set(STATUS_USAGE,
                          "a thread would need room for more than %u samples; lower --batch or --shuffle",
                          UINT32_MAX);
    if (__builtin_mul_overflow(delivery->workers * buffers * load->given->batch, delivery->stride + 12,
                               &bytes) ||
        __builtin_add_overflow(bytes, load->dataset->sample_count * sizeof *delivery->samples + more_bytes,
                               &bytes))
        bytes = UINT64_MAX; /* more than any device has */
    TRY(device_check_room(
        delivery->device, bytes, "the buffers and batches need",
        "lower --batch, --shuffle, --threads, --ring or --chunk, or use a smaller --dtype"));
    count_memory(delivery, bytes);
    delivery->buffers = (uint32_t)buffers;
    delivery->slots = (uint32_t)(buffers * load->given->batch);
    return open_all(delivery);
}

static void close_queue(const struct delivery *delivery, struct output_queue *queue)
{
    for (uint32_t b = 0; queue->buffers && b < delivery->buffers; b++)
        destroy(queue->buffers[b].ready);
    destroy(queue->stream);
    (void)cudaFree(queue->tensor);
    (void)cudaFree(queue->labels);
    (void)cudaFree(queue->hashes);
    free(queue->held);
    free(queue->held_epoch);
    free(queue->buffers);
    delivery_check_free(&queue->check);
    order_close(&queue->order);
    if (queue->delivery)
        plain_close(&queue->plain);
}

static void end_threads(struct delivery *delivery)
{
    {
        std::lock_guard<std::mutex> guard(delivery->lock);
        delivery->closing = true;
    }
    delivery->begins.notify_all();
    for (std::thread &thread : delivery->threads)
        thread.join();
}

void delivery_close(struct delivery *delivery)
{
    end_threads(delivery);
    for (uint32_t w = 0; delivery->queues && w < delivery->workers; w++)
        close_queue(delivery, &delivery->queues[w]);
    free(delivery->queues);
    delete[] delivery->ready;
    free(delivery->left);
    (void)cudaFree(delivery->samples);
    (void)cudaFree(delivery->checksums);
    arrays_close(&delivery->arrays);
    verifier_close(&delivery->verifier);
}

/* ---- Passing batches to the consumer ---- */

/* Passes batches to the consumer, one per worker in turn. Stops when the batch of the next worker is not
 * ready. The caller holds the lock. */
static enum status hand_over(struct delivery *delivery)
{
    for (uint32_t passed = 0; passed < delivery->workers;) {
        uint32_t worker = delivery->next;
        std::deque<uint32_t> *ready = &delivery->ready[worker];
        if (delivery->left[worker] > 0 && ready->empty())
            return STATUS_OK;
        delivery->next = (worker + 1) % delivery->workers;
        if (delivery->left[worker] == 0) { /* all batches of this worker's share have been passed on */
            passed++;
            continue;
        }
        struct batch_buffer *buffer = &delivery->queues[worker].buffers[ready->front()];
        void *done;
        ready->pop_front();
        delivery->left[worker]--;
        passed = 0;
        TRY(consumer_take_device(delivery->load->control->consumer, buffer->ready, &done));
        buffer->done = static_cast<cudaEvent_t>(done);
        buffer->step = delivery->steps++;
        buffer->handed = true;
    }
    return STATUS_OK;
}

/* Stops the other workers. */
static void give_up(const struct output_queue *queue)
{
    struct delivery *delivery = queue->delivery;
    std::lock_guard<std::mutex> guard(delivery->lock);
    if (!queue->stopped && queue->number < delivery->failed)
        delivery->failed = queue->number;
    delivery->changed.notify_all();
}

enum status queue_check_failed(struct output_queue *queue)
{
    if (!delivery_failed(queue->delivery))
        return STATUS_OK;
    queue->stopped = true;
    return status_set(STATUS_FAILED, "another thread failed to read its samples");
}

/* Waits until the consumer has received the batch, so that `done` is valid. Sets `*ended` if at least
 * CONSUMER_STEPS_AHEAD steps were enqueued after the batch's step. The consumer limits the steps in flight,
 * so the batch's step has then ended. `done` may already belong to a later step. */
static enum status await_handed(struct output_queue *queue, const struct batch_buffer *buffer, bool *ended)
{
    struct delivery *delivery = queue->delivery;
    std::unique_lock<std::mutex> guard(delivery->lock);
    delivery->changed.wait(guard, [&] { return buffer->handed || delivery_failed(delivery); });
    *ended = delivery->steps - buffer->step > CONSUMER_STEPS_AHEAD;
    return buffer->handed ? STATUS_OK : queue_check_failed(queue);
}

/* Waits on the host for the step that consumes a buffer. With load->control->whole, checks the batch after
 * the step, which proves that the batch was not overwritten while the step could read it. */
static enum status await_step(struct output_queue *queue, uint32_t index)
{
    const struct load *load = queue->delivery->load;
    struct batch_buffer *buffer = &queue->buffers[index];
    bool ended;
    RANGE(WAIT);
    TRY(await_handed(queue, buffer, &ended));
    if (!ended)
        CUDA_TRY(cudaEventSynchronize(buffer->done));
    buffer->waiting = false;
    return load->control->whole ? queue_check(queue, index * load->given->batch, buffer->count) : STATUS_OK;
}

enum status queue_reserve(struct output_queue *queue, uint32_t slot)
{
    const struct load *load = queue->delivery->load;
    struct batch_buffer *buffer = &queue->buffers[slot / load->given->batch];
    bool ended;
    if (!buffer->waiting)
        return STATUS_OK;
    if (load->control->whole)
        return await_step(queue, slot / load->given->batch);
    TRY(await_handed(queue, buffer, &ended));
    if (!ended)
        CUDA_TRY(cudaStreamWaitEvent(queue->stream, buffer->done, 0));
    buffer->waiting = false;
    return STATUS_OK;
}

/* Called at the end of a run: waits for the steps on all batches that were delivered. */
static enum status await_steps(struct output_queue *queue)
{
    for (uint32_t b = 0; b < queue->delivery->buffers; b++)
        if (queue->buffers[b].waiting)
            TRY(await_step(queue, b));
    return STATUS_OK;
}

/* ---- Delivery ---- */

/* Returns whether batches are passed to a consumer or checked (load->control->whole). If not, no events are
 * recorded, which saves about 1 µs of the stream's time per batch. */
static bool is_wanted(const struct delivery *delivery)
{
    return delivery->load->control->whole || delivery->load->control->consumer;
}

/* Delivers the batch in buffer `index`. The caller holds the lock if there is a consumer. */
static enum status deliver(struct output_queue *queue, uint32_t index, uint32_t count)
{
    struct delivery *delivery = queue->delivery;
    struct batch_buffer *buffer = &queue->buffers[index];
    CUDA_TRY(cudaEventRecord(buffer->ready, queue->stream));
    if (!delivery->load->control->consumer)
        return queue_check(queue, index * delivery->load->given->batch, count);
    buffer->count = count;
    buffer->waiting = true;
    buffer->handed = false;
    delivery->ready[queue->number].push_back(index);
    enum status status = hand_over(delivery);
    delivery->changed.notify_all();
    return status;
}

enum status queue_deliver(struct output_queue *queue, uint32_t slot, uint32_t count)
{
    if (!is_wanted(queue->delivery))
        return STATUS_OK;
    std::unique_lock<std::mutex> guard = delivery_guard(queue->delivery);
    return deliver(queue, slot / queue->delivery->load->given->batch, count);
}

/* ---- Streams of samples ---- */

uint64_t delivery_span(const struct load *load, uint64_t target)
{
    uint64_t shuffle = load->given->shuffle > 1 ? load->given->shuffle : 1,
             samples = load->dataset->sample_count;
    uint64_t span = shuffle == 1        ? 4 * target
                    : shuffle >= target ? shuffle
                                        : (target + shuffle - 1) / shuffle * shuffle;
    return span < samples || shuffle > 1 ? span : samples;
}

uint64_t delivery_stream_slots(const struct load *load, uint32_t workers, uint64_t span)
{
    uint64_t all = (uint64_t)load->ranks * workers;
    uint64_t share = (load->dataset->sample_count + all - 1) / all; /* upper bound on the size of a share */
    span = span < share ? span : share;
    uint64_t ahead = span > load->given->batch ? span : load->given->batch;
    return load->given->batch + span + (load->control->consumer ? ahead : 0);
}

static uint64_t batches_of(const struct output_queue *queue)
{
    uint32_t batch = queue->delivery->load->given->batch;
    return ((uint64_t)queue->order.count + batch - 1) / batch;
}

uint64_t queue_batch(const struct output_queue *queue, uint32_t arrival)
{
    const struct load *load = queue->delivery->load;
    if (arrival == queue->order.count)
        return queue->base + batches_of(queue);
    return queue->base +
           (load->given->shuffle > 1 ? arrival / load->given->shuffle * load->given->shuffle : arrival) /
               load->given->batch;
}

uint32_t queue_slot(const struct output_queue *queue, uint32_t arrival)
{
    uint32_t slots = queue->delivery->slots;
    uint64_t slot = (uint64_t)queue->first + queue->order.indices[arrival] % slots;
    return (uint32_t)(slot < slots ? slot : slot - slots);
}

void queue_fill(struct output_queue *queue, uint32_t arrival, uint32_t count)
{
    const struct delivery *delivery = queue->delivery;
    if (!is_wanted(delivery))
        return;
    for (uint32_t i = 0; i < count; i++)
        queue->buffers[queue_slot(queue, arrival + i) / delivery->load->given->batch].filled++;
}

enum status queue_advance(struct output_queue *queue)
{
    const struct delivery *delivery = queue->delivery;
    const struct load *load = delivery->load;
    while (is_wanted(delivery) && queue->delivered < queue->base + batches_of(queue)) {
        uint32_t index = (uint32_t)(queue->delivered % delivery->buffers);
        uint64_t left = queue->order.count - (queue->delivered - queue->base) * load->given->batch;
        uint32_t count = left < load->given->batch ? (uint32_t)left : load->given->batch;
        if (queue->buffers[index].filled < count)
            break;
        queue->buffers[index].filled = 0;
        queue->delivered++;
        TRY(deliver(queue, index, count));
        if (!load->control->consumer)
            queue->freed++;
    }
    return STATUS_OK;
}

void queue_next_epoch(struct output_queue *queue)
{
    queue->base += batches_of(queue);
    queue->first = (uint32_t)(queue->base % queue->delivery->buffers) * queue->delivery->load->given->batch;
}

bool queue_make_room(struct output_queue *queue, uint64_t end)
{
    const struct delivery *delivery = queue->delivery;
    uint32_t batch = delivery->load->given->batch;
    end = queue->base * batch + (end < queue->order.count ? end : queue->order.count);
    while (is_wanted(delivery) && end > (queue->freed + delivery->buffers) * batch) {
        struct batch_buffer *buffer = &queue->buffers[queue->freed % delivery->buffers];
        if (delivery->load->control->whole || !queue_handed(queue))
            return false;
        if (delivery->steps - buffer->step <= CONSUMER_STEPS_AHEAD &&
            cudaEventQuery(buffer->done) != cudaSuccess) {
            /* The step has not ended, or an error occurred. queue_free() waits for the event and reports
             * errors. */
            (void)cudaGetLastError();
            return false;
        }
        buffer->waiting = false;
        queue->freed++;
    }
    return true;
}

bool queue_handed(const struct output_queue *queue)
{
    return queue->freed < queue->delivered && queue->buffers[queue->freed % queue->delivery->buffers].handed;
}

enum status queue_free(struct output_queue *queue)
{
    TRY(await_step(queue, (uint32_t)(queue->freed % queue->delivery->buffers)));
    std::lock_guard<std::mutex> guard(queue->delivery->lock);
    queue->freed++;
    return STATUS_OK;
}

enum status queue_lose(struct output_queue *queue, uint32_t sample, enum status status)
{
    std::unique_lock<std::mutex> guard = delivery_guard(queue->delivery);
    return verifier_lose(&queue->delivery->verifier, &queue->losses, sample, status);
}

struct unpack queue_job(const struct output_queue *queue)
{
    const struct delivery *delivery = queue->delivery;
    struct unpack job = {};
    job.samples = delivery->samples;
    job.convert = delivery->convert;
    job.values = delivery->arrays.value_count;
    job.tensor = queue->tensor;
    job.stride = delivery->stride;
    job.labels = queue->labels;
    job.hashes = queue->hashes;
    job.whole = delivery->load->control->whole;
    job.checksum = queue->checksum;
    return job;
}

/* ---- Runs ---- */

enum status delivery_ready(void *state, uint64_t number)
{
    struct delivery *delivery = static_cast<struct delivery *>(state);
    for (uint32_t w = 0; w < delivery->workers; w++) /* sets DELIVERY_LOST in all slots */
        memset(delivery->queues[w].held, 0xff, delivery->slots * sizeof *delivery->queues[w].held);
    return verifier_ready(&delivery->verifier, number, &delivery->result.before);
}

void queue_note(struct output_queue *queue, uint64_t lost)
{
    verifier_note(&queue->delivery->verifier, &queue->losses, &queue->order, lost);
}

enum status queue_each_epoch(struct output_queue *queue, enum status (*epoch)(struct output_queue *queue))
{
    for (uint32_t i = 0; i < queue->delivery->load->epochs; i++, queue->epoch++) {
        uint64_t lost = queue->losses.checksum.count;
        TRY(epoch(queue));
        queue_note(queue, queue->losses.checksum.count - lost);
    }
    return STATUS_OK;
}

static enum status read_share(struct output_queue *queue, enum status (*read)(struct output_queue *queue))
{
    CUDA_TRY(cudaSetDevice(queue->delivery->device));
    TRY(read(queue));
    TRY(await_steps(queue));
    CUDA_TRY(cudaStreamSynchronize(queue->stream));
    return STATUS_OK;
}

/* Reads the worker's share and stores a failure in the queue. */
static void work(struct output_queue *queue, enum status (*read)(struct output_queue *queue))
{
    enum status status = read_share(queue, read);
    if (status == STATUS_OK)
        return;
    queue->failure = status_save(status); /* messages are per thread */
    give_up(queue);
}

/* Waits until the device is idle, because the caller will free the memory. Returns the failure of one worker.
 * Prefers a worker that failed by itself over workers that stopped because another one failed. */
static enum status stop_after_failure(struct delivery *delivery)
{
    const struct output_queue *first = nullptr;
    (void)cudaDeviceSynchronize();
    for (uint32_t w = 0; w < delivery->workers; w++) {
        struct output_queue *queue = &delivery->queues[w];
        if (queue->failure.status != STATUS_OK && (!first || (first->stopped && !queue->stopped)))
            first = queue;
        for (uint32_t b = 0; b < delivery->buffers; b++)
            queue->buffers[b].waiting = false;
    }
    return status_restore(&first->failure);
}

static void begin_share(struct output_queue *queue, uint64_t number)
{
    queue->epoch = number * queue->delivery->load->epochs;
    queue->base = queue->delivered = queue->freed = 0;
    queue->first = 0;
    queue->order.count = 0;
    for (uint32_t b = 0; b < queue->delivery->buffers; b++)
        queue->buffers[b].filled = 0;
    losses_clear(&queue->losses);
    queue->jpeg_warnings = 0;
}

/* Initialises all shares before any thread runs, because threads may read from each other's shares. */
static enum status begin_run(struct delivery *delivery, uint64_t number)
{
    const struct load *load = delivery->load;
    CUDA_TRY(cudaSetDevice(delivery->device));
    delivery->next = 0;
    for (uint32_t w = 0; w < delivery->workers; w++) {
        uint32_t begin, end;
        order_share(&delivery->verifier.plan, load->rank * delivery->workers + w, &begin, &end);
        delivery->left[w] =
            (uint64_t)load->epochs * ((end - begin + load->given->batch - 1) / load->given->batch);
        delivery->ready[w].clear();
        begin_share(&delivery->queues[w], number);
    }
    cudaStream_t stream = delivery->queues[0].stream;
    CUDA_TRY(
        cudaMemsetAsync(delivery->checksums, 0, delivery->workers * sizeof *delivery->checksums, stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    return STATUS_OK;
}

static enum status finish_run(struct delivery *delivery, uint64_t number)
{
    struct losses lost;
    losses_clear(&lost);
    std::vector<struct checksum> checksums(delivery->workers);
    CUDA_TRY(cudaMemcpy(checksums.data(), delivery->checksums, delivery->workers * sizeof checksums[0],
                        cudaMemcpyDeviceToHost));
    delivery->result.number = number;
    delivery->result.checksum = {};
    delivery->result.jpeg_warnings = 0;
    for (uint32_t w = 0; w < delivery->workers; w++) {
        checksum_merge(&delivery->result.checksum, &checksums[w]);
        losses_merge(&lost, &delivery->queues[w].losses);
        delivery->result.jpeg_warnings += delivery->queues[w].jpeg_warnings;
    }
    delivery->result.skipped = lost.checksum.count;
    return verifier_finish(&delivery->verifier, number, &delivery->result.checksum, &lost);
}

/* The thread of a worker: does its work in each run. */
static void serve(struct delivery *delivery, uint32_t worker)
{
    std::unique_lock<std::mutex> guard(delivery->lock);
    for (uint64_t runs = 0;; runs = delivery->runs) {
        delivery->begins.wait(guard, [&] { return delivery->runs > runs || delivery->closing; });
        if (delivery->closing)
            return;
        guard.unlock();
        work(&delivery->queues[worker], delivery->read);
        guard.lock();
        if (--delivery->working == 0)
            delivery->ends.notify_one();
    }
}

static enum status start_threads(struct delivery *delivery)
{
    try {
        while (delivery->threads.size() + 1 < delivery->workers)
            delivery->threads.emplace_back(serve, delivery, (uint32_t)delivery->threads.size() + 1);
    } catch (const std::exception &) { /* thrown if threads or memory run out */
        return status_set(STATUS_FAILED, "cannot start %u threads; lower --threads", delivery->workers);
    }
    return STATUS_OK;
}

/* Calls work() once per worker, each in its own thread. */
static void work_all(struct delivery *delivery, enum status (*read)(struct output_queue *queue))
{
    {
        std::lock_guard<std::mutex> guard(delivery->lock);
        delivery->read = read;
        delivery->working = delivery->workers - 1;
        delivery->runs++;
    }
    delivery->begins.notify_all();
    work(&delivery->queues[0], read);
    std::unique_lock<std::mutex> guard(delivery->lock);
    delivery->ends.wait(guard, [&] { return delivery->working == 0; });
}

enum status delivery_each(struct delivery *delivery, enum status (*work)(struct output_queue *queue))
{
    TRY(start_threads(delivery));
    delivery->failed = delivery->workers;
    for (uint32_t w = 0; w < delivery->workers; w++) {
        delivery->queues[w].stopped = false;
        delivery->queues[w].failure.status = STATUS_OK;
    }
    work_all(delivery, work);
    for (uint32_t w = 0; w < delivery->workers; w++)
        if (delivery->queues[w].failure.status != STATUS_OK)
            return stop_after_failure(delivery);
    return STATUS_OK;
}

enum status delivery_run(struct delivery *delivery, uint64_t number,
                         enum status (*read)(struct output_queue *queue))
{
    TRY(begin_run(delivery, number));
    TRY(delivery_each(delivery, read));
    return finish_run(delivery, number);
}

enum status delivery_fetch(void *state, void *result)
{
    struct delivery *delivery = static_cast<struct delivery *>(state);
    delivery->result.device_known =
        verifier_device_bytes(&delivery->verifier, &delivery->result.device_bytes);
    delivery->result.threads = (int)delivery->workers;
    char pci_bus_id[32];
    if (delivery->result.decoder) {
        TRY(device_pci_bus_id(delivery->device, pci_bus_id, sizeof pci_bus_id));
        delivery->result.jpeg_engine_share = nvml_jpeg_engine_share(pci_bus_id);
    }
    *static_cast<struct load_result *>(result) = delivery->result;
    return STATUS_OK;
}

/* ---- Checks of batches ---- */

/* For --verify: compares batches on the device with the data set. The plain reader (data/plain_reader.h)
 * reads the samples again, and the host converts them. */

/* Slots are copied in groups of about this size, because even a small copy takes 10 to 20 µs. */
#define GROUP_BYTES (4u << 20)

/* Returns the number of slots in a group: at least 1, and at most the batch size. */
static uint32_t group_slots(const struct delivery *delivery)
{
    uint64_t slots = GROUP_BYTES / delivery->stride;
    return slots < 1                              ? 1
           : slots < delivery->load->given->batch ? (uint32_t)slots
                                                  : delivery->load->given->batch;
}

/* Allocates a queue's buffers for the check, unless they exist. If memory runs out, frees all of them. */
static enum status room_to_verify(struct output_queue *queue)
{
    const struct delivery *delivery = queue->delivery;
    struct delivery_check *check = &queue->check;
    if (check->read)
        return STATUS_OK;
    const size_t slots = group_slots(delivery);
    check->wanted = static_cast<uint8_t *>(malloc(delivery->slot_bytes));
    check->tensor = static_cast<uint8_t *>(malloc(slots * delivery->stride));
    check->labels = static_cast<int32_t *>(malloc(slots * sizeof *check->labels));
    check->hashes = static_cast<uint64_t *>(malloc(slots * sizeof *check->hashes));
    check->read = static_cast<uint8_t *>(malloc(delivery->arrays.bytes_max));
    if (check->wanted && check->tensor && check->labels && check->hashes && check->read)
        return STATUS_OK;
    delivery_check_free(check);
    return status_set(STATUS_EXHAUSTED, "out of memory to verify");
}

void delivery_check_free(struct delivery_check *check)
{
    free(check->wanted);
    free(check->tensor);
    free(check->labels);
    free(check->hashes);
    free(check->read);
    image_scratch_close(&check->scratch);
    *check = {};
}

/* Reads the image file of a sample to check.read. Sets `*image` to the file's entry in the data set. */
static enum status read_image(struct output_queue *queue, uint32_t number,
                              const struct dataset_member **image)
{
    const struct dataset *dataset = queue->delivery->load->dataset;
    const struct dataset_sample *sample = &dataset->samples[number];
    *image = &dataset->members[sample->member + sample->image];
    return plain_bytes(&queue->plain, *image, (*image)->size, queue->check.read);
}

/* Compares a slot with the converted values of an array. */
static enum status check_array(struct output_queue *queue, uint32_t number, const uint8_t *slot, bool *right)
{
    const struct delivery *delivery = queue->delivery;
    const struct array_sample *array = &delivery->arrays.samples[number];
    const struct dataset_member *image;
    TRY(read_image(queue, number, &image));
    const uint8_t *values = queue->check.read + (array->values_offset -
                                                 array->at[delivery->load->dataset->samples[number].image]);
    for (uint64_t i = 0; i < delivery->arrays.value_count; i++)
        convert_one(&delivery->convert, values, i, queue->check.wanted);
    *right = memcmp(slot, queue->check.wanted, delivery->slot_bytes) == 0;
    return STATUS_OK;
}

/* Compares a slot with an image that the CPU decodes. */
static enum status check_picture(struct output_queue *queue, uint32_t number, uint32_t epoch,
                                 const uint8_t *slot, bool *right)
{
    const struct delivery *delivery = queue->delivery;
    const struct load *load = delivery->load;
    uint32_t tolerance = delivery->arrays.pictures[number].on_device ? delivery->tolerance : 0;
    const struct dataset_member *member;
    struct image image;
    bool is_image;
    TRY(read_image(queue, number, &member));
    enum status status = image_fit(&delivery->fit, members_format(member->extension), queue->check.read,
                                   member->size, epoch, number, &queue->check.scratch, &image, &is_image);
    if (status != STATUS_OK)
        return status_prefix(status, "--verify: %s/%s: offset %llu: sample '%s'", load->dataset->path,
                             load->dataset->files[member->file].name, (unsigned long long)member->offset,
                             load->dataset->samples[number].key);
    bool flip = load->given->augment &&
                draw_move(&load->augmentation.move, load->augmentation.seed, epoch, number).flip;
    const struct pixels pixels = {image.pixels, delivery->fit.channels, delivery->fit.res, delivery->fit.res};
    const struct pixel_form form = {delivery->pixel_values, load->given->interleaved != 0, flip};
    *right = pixels_match(&pixels, &form, tolerance, slot);
    return STATUS_OK;
}

/* Copies a group of consecutive slots from the device. */
static enum status copy_group(struct output_queue *queue, uint32_t first, uint32_t count)
{
    const uint64_t stride = queue->delivery->stride;
    struct delivery_check *check = &queue->check;
    CUDA_TRY(cudaMemcpy(check->tensor, queue->tensor + first * stride,
                        (count - 1) * stride + queue->delivery->slot_bytes, cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(check->labels, &queue->labels[first], count * sizeof *check->labels,
                        cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(check->hashes, &queue->hashes[first], count * sizeof *check->hashes,
                        cudaMemcpyDeviceToHost));
    return STATUS_OK;
}

/* Checks slot `first + i`, which is slot i of the copied group. Its values, its label, and the hash that the
 * kernel computed must equal the expected ones. */
static enum status check_slot(struct output_queue *queue, uint32_t first, uint32_t i, bool *right)
{
    const struct delivery *delivery = queue->delivery;
    const struct delivery_check *check = &queue->check;
    const uint32_t number = queue->held[first + i];
    const struct dataset_sample *sample = &delivery->load->dataset->samples[number];
    const uint8_t *slot = check->tensor + i * delivery->stride;
    int32_t label = LABEL_NONE;
    if (sample->rule)
        TRY(plain_label(&queue->plain, sample, 0, &label));
    TRY(delivery->load->given->decode
            ? check_picture(queue, number, queue->held_epoch[first + i], slot, right)
            : check_array(queue, number, slot, right));
    *right &= check->hashes[i] == (delivery->load->control->whole ? sample->whole : sample->edges) &&
              check->labels[i] == label;
    return STATUS_OK;
}

/* Checks a group of slots. Adds the number of wrong ones to check.wrong. Counts correct samples in
 * load->control->seen, if it is set. */
static enum status check_group(struct output_queue *queue, uint32_t first, uint32_t count)
{
    uint8_t *seen = queue->delivery->load->control->seen;
    TRY(copy_group(queue, first, count));
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t number = queue->held[first + i];
        bool right = false;
        if (number == DELIVERY_LOST)
            continue;
        TRY(check_slot(queue, first, i, &right));
        if (!right) {
            queue->check.wrong++;
            load_note_wrong(queue->delivery->load->control, number);
        } else if (seen && __atomic_load_n(&seen[number], __ATOMIC_RELAXED) < 255)
            __atomic_fetch_add(&seen[number], 1, __ATOMIC_RELAXED);
    }
    return STATUS_OK;
}

enum status queue_check(struct output_queue *queue, uint32_t slot, uint32_t count)
{
    TRY(room_to_verify(queue));
    CUDA_TRY(cudaEventSynchronize(queue->buffers[slot / queue->delivery->load->given->batch].ready));
    const uint32_t group = group_slots(queue->delivery);
    for (uint32_t done = 0; done < count; done += group)
        TRY(check_group(queue, slot + done, group < count - done ? group : count - done));
    return STATUS_OK;
}

#define LOOKED_AT    4096 /* approximate maximum number of slots to check per worker */
#define LOOKED_GROUP 16   /* these slots are in groups of this size: fewer copies, but still spread */

/* Checks the slots from `first` to `end` - 1 that hold samples. Does not copy the others, which may be
 * uninitialised. */
static enum status check_held(struct output_queue *queue, uint32_t first, uint32_t end)
{
    for (uint32_t next; first < end; first = next) {
        const bool lost = queue->held[first] == DELIVERY_LOST;
        for (next = first + 1; next < end && (queue->held[next] == DELIVERY_LOST) == lost;)
            next++;
        if (!lost)
            TRY(check_group(queue, first, next - first));
    }
    return STATUS_OK;
}

/* Checks groups of a worker's slots, evenly spaced if not all slots are checked. A failure stops the workers
 * with higher numbers only, so that which failure is reported does not depend on timing. */
static enum status verify_slots(struct output_queue *queue)
{
    const struct delivery *delivery = queue->delivery;
    const uint32_t slots = delivery->slots, most = group_slots(delivery);
    const uint32_t group = most < LOOKED_GROUP ? most : LOOKED_GROUP;
    const uint64_t step = (uint64_t)group * ((slots + LOOKED_AT - 1) / LOOKED_AT);
    TRY(room_to_verify(queue));
    queue->check.wrong = 0;
    for (uint64_t first = 0; first < slots; first += step) {
        const uint64_t end = first + group;
        if (delivery->failed < queue->number)
            return queue_check_failed(queue);
        TRY(check_held(queue, (uint32_t)first, end < slots ? (uint32_t)end : slots));
    }
    return STATUS_OK;
}

enum status delivery_verify_slots(void *state, uint64_t *wrong)
{
    struct delivery *delivery = static_cast<struct delivery *>(state);
    *wrong = 0;
    CUDA_TRY(cudaSetDevice(delivery->device));
    TRY(delivery_each(delivery, verify_slots));
    for (uint32_t w = 0; w < delivery->workers; w++)
        *wrong += delivery->queues[w].check.wrong;
    return STATUS_OK;
}
