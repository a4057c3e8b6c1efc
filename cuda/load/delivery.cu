#include "load/delivery.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <thread>
#include <vector>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/consumer.h"
#include "core/phase.h"

/* ---- Opening ---- */

enum status delivery_begin(struct delivery *delivery, const struct resources *resources,
                           const struct load *load, bool packed, bool keyed, uint32_t workers)
{
    delivery->load = load;
    delivery->device = resources->device;
    delivery->workers = workers;
    delivery->result.number = UINT64_MAX;
    struct order_plan plan = load_plan(load, (int)workers);
    plan.keyed = keyed;
    TRY(verifier_open(&delivery->verifier, load, &plan));
    TRY(arrays_open(load->dataset, packed, &delivery->arrays));
    delivery->convert = convert_make(delivery->arrays.type, load->tensor, load->mean, load->std);
    delivery->slot_bytes = delivery->arrays.values * convert_value_bytes(&delivery->convert);
    delivery->stride = (delivery->slot_bytes + UNPACK_ALIGNMENT - 1) / UNPACK_ALIGNMENT * UNPACK_ALIGNMENT;
    return STATUS_OK;
}

static enum status open_outlet(struct delivery *delivery, struct outlet *outlet)
{
    const struct dataset *dataset = delivery->load->dataset;
    outlet->delivery = delivery;
    outlet->plain.dataset = const_cast<struct dataset *>(dataset);
    outlet->plain.fd = -1;
    TRY(order_open(&delivery->verifier.plan, &outlet->order));
    outlet->held = static_cast<uint32_t *>(malloc(delivery->slots * sizeof *outlet->held));
    outlet->berths = static_cast<struct berth *>(calloc(delivery->berths, sizeof *outlet->berths));
    if (!outlet->held || !outlet->berths)
        return status_set(STATUS_FAILED, "out of memory for %u slots", delivery->slots);
    TRY(stream_open(&outlet->stream));
    CUDA_TRY(cudaMalloc(&outlet->tensor, delivery->slots * delivery->stride));
    CUDA_TRY(cudaMalloc(&outlet->labels, delivery->slots * sizeof *outlet->labels));
    CUDA_TRY(cudaMalloc(&outlet->hashes, delivery->slots * sizeof *outlet->hashes));
    outlet->checksum = &delivery->checksums[outlet->number];
    for (uint32_t b = 0; b < delivery->berths; b++)
        CUDA_TRY(cudaEventCreateWithFlags(&outlet->berths[b].ready, cudaEventDisableTiming));
    return STATUS_OK;
}

static enum status open_all(struct delivery *delivery)
{
    const struct load *load = delivery->load;
    uint64_t bytes = load->dataset->sample_count * sizeof *delivery->samples;
    delivery->outlets = static_cast<struct outlet *>(calloc(delivery->workers, sizeof *delivery->outlets));
    delivery->queues = new (std::nothrow) std::deque<uint32_t>[delivery->workers];
    delivery->left = static_cast<uint64_t *>(calloc(delivery->workers, sizeof *delivery->left));
    if (!delivery->outlets || !delivery->queues || !delivery->left)
        return status_set(STATUS_FAILED, "out of memory");
    CUDA_TRY(cudaMalloc(&delivery->samples, bytes));
    CUDA_TRY(cudaMalloc(&delivery->checksums, delivery->workers * sizeof *delivery->checksums));
    TRY(device_put(delivery->samples, delivery->arrays.samples, bytes));
    for (uint32_t w = 0; w < delivery->workers; w++) {
        delivery->outlets[w].number = w;
        TRY(open_outlet(delivery, &delivery->outlets[w]));
    }
    return STATUS_OK;
}

enum status delivery_open(struct delivery *delivery, uint64_t slots, uint64_t more_bytes)
{
    const struct load *load = delivery->load;
    uint64_t berths = (slots + load->batch - 1) / load->batch, bytes;
    if (berths * load->batch > UINT32_MAX)
        return status_set(STATUS_USAGE, "more than %u slots; lower --batch or --shuffle", UINT32_MAX);
    if (__builtin_mul_overflow(delivery->workers * berths * load->batch, delivery->stride + 12, &bytes) ||
        __builtin_add_overflow(bytes, load->dataset->sample_count * sizeof *delivery->samples + more_bytes,
                               &bytes))
        bytes = UINT64_MAX; /* no device has that */
    TRY(device_check_room(
        delivery->device, bytes, "its buffers and batches need",
        "lower --batch, --shuffle, --threads, --ring or --chunk, or take a shorter --tensor"));
    delivery->berths = (uint32_t)berths;
    delivery->slots = (uint32_t)(berths * load->batch);
    return open_all(delivery);
}

static void close_outlet(const struct delivery *delivery, struct outlet *outlet)
{
    for (uint32_t b = 0; outlet->berths && b < delivery->berths; b++)
        if (outlet->berths[b].ready)
            (void)cudaEventDestroy(outlet->berths[b].ready);
    if (outlet->stream)
        (void)cudaStreamDestroy(outlet->stream);
    (void)cudaFree(outlet->tensor);
    (void)cudaFree(outlet->labels);
    (void)cudaFree(outlet->hashes);
    free(outlet->held);
    free(outlet->berths);
    free(outlet->wanted);
    free(outlet->found);
    free(outlet->read);
    order_close(&outlet->order);
    if (outlet->delivery)
        plain_close(&outlet->plain);
}

void delivery_close(struct delivery *delivery)
{
    for (uint32_t w = 0; delivery->outlets && w < delivery->workers; w++)
        close_outlet(delivery, &delivery->outlets[w]);
    free(delivery->outlets);
    delete[] delivery->queues;
    free(delivery->left);
    (void)cudaFree(delivery->samples);
    (void)cudaFree(delivery->checksums);
    arrays_close(&delivery->arrays);
    verifier_close(&delivery->verifier);
}

/* ---- Handing over ---- */

/* The batch in a berth, as a consumer gets it. */
static struct batch batch_in(const struct outlet *outlet, uint32_t index)
{
    const struct delivery *delivery = outlet->delivery;
    const struct convert *convert = &delivery->convert;
    uint32_t slot = index * delivery->load->batch;
    struct batch batch = {};
    batch.values = outlet->tensor + slot * delivery->stride;
    batch.count = outlet->berths[index].count;
    batch.stride = delivery->stride;
    batch.bytes = batch.count * batch.stride;
    batch.type = convert->tensor == DTYPE_STORED ? convert->source
                 : convert->tensor == DTYPE_F32  ? DTYPE_F32
                 : convert->tensor == DTYPE_F16  ? DTYPE_F16
                                                 : DTYPE_BF16;
    batch.labels = outlet->labels + slot;
    return batch;
}

/* Hands over what is next in turn, as long as it is there. Under the lock. */
static enum status hand_over(struct delivery *delivery)
{
    for (uint32_t passed = 0; passed < delivery->workers;) {
        uint32_t worker = delivery->next;
        std::deque<uint32_t> *queue = &delivery->queues[worker];
        if (delivery->left[worker] > 0 && queue->empty())
            return STATUS_OK;
        delivery->next = (worker + 1) % delivery->workers;
        if (delivery->left[worker] == 0) { /* its share was a batch shorter */
            passed++;
            continue;
        }
        struct berth *berth = &delivery->outlets[worker].berths[queue->front()];
        const struct batch batch = batch_in(&delivery->outlets[worker], queue->front());
        void *done;
        queue->pop_front();
        delivery->left[worker]--;
        passed = 0;
        TRY(consumer_take_device(delivery->load->control->consumer, &batch, berth->ready, &done));
        berth->done = static_cast<cudaEvent_t>(done);
        berth->step = delivery->steps++;
        berth->handed = true;
    }
    return STATUS_OK;
}

static void give_up(struct delivery *delivery)
{
    std::lock_guard<std::mutex> guard(delivery->lock);
    delivery->failed = true;
    delivery->changed.notify_all();
}

enum status outlet_go_on(struct outlet *outlet)
{
    if (!outlet->delivery->failed)
        return STATUS_OK;
    outlet->told_off = true;
    return status_set(STATUS_FAILED, "another reader failed");
}

/* Until the consumer has the batch, so that `done` is recorded. `*ended`: its step has surely ended, for the
 * consumer lets no more than so many be under way; only later does it record the event anew. */
static enum status await_handed(struct outlet *outlet, const struct berth *berth, bool *ended)
{
    struct delivery *delivery = outlet->delivery;
    std::unique_lock<std::mutex> guard(delivery->lock);
    delivery->changed.wait(guard, [&] { return berth->handed || delivery->failed; });
    *ended = delivery->steps - berth->step > CONSUMER_STEPS_AHEAD;
    return berth->handed ? STATUS_OK : outlet_go_on(outlet);
}

/* The host waits for the step on the batch of a berth. With --verify the batch is looked at only then: it
 * must have come right, and have stayed so as long as the step could read it. */
static enum status await_step(struct outlet *outlet, uint32_t index)
{
    const struct load *load = outlet->delivery->load;
    struct berth *berth = &outlet->berths[index];
    bool ended;
    RANGE(WAIT);
    TRY(await_handed(outlet, berth, &ended));
    if (!ended)
        CUDA_TRY(cudaEventSynchronize(berth->done));
    berth->waiting = false;
    return load->control->whole ? outlet_check(outlet, index * load->batch, berth->count) : STATUS_OK;
}

enum status outlet_reserve(struct outlet *outlet, uint32_t slot)
{
    const struct load *load = outlet->delivery->load;
    struct berth *berth = &outlet->berths[slot / load->batch];
    bool ended;
    if (!berth->waiting)
        return STATUS_OK;
    if (load->control->whole)
        return await_step(outlet, slot / load->batch);
    TRY(await_handed(outlet, berth, &ended));
    if (!ended)
        CUDA_TRY(cudaStreamWaitEvent(outlet->stream, berth->done, 0));
    berth->waiting = false;
    return STATUS_OK;
}

/* The end of a run: all its steps have been made. */
static enum status await_steps(struct outlet *outlet)
{
    for (uint32_t b = 0; b < outlet->delivery->berths; b++)
        if (outlet->berths[b].waiting)
            TRY(await_step(outlet, b));
    return STATUS_OK;
}

/* ---- Delivery ---- */

/* Somebody waits for the batch; nobody: an event would cost a microsecond of the stream. */
static bool is_wanted(const struct delivery *delivery)
{
    return delivery->load->control->whole || delivery->load->control->consumer;
}

/* Under the lock, where there is a consumer. */
static enum status deliver(struct outlet *outlet, uint32_t index, uint32_t count)
{
    struct delivery *delivery = outlet->delivery;
    struct berth *berth = &outlet->berths[index];
    CUDA_TRY(cudaEventRecord(berth->ready, outlet->stream));
    if (!delivery->load->control->consumer)
        return outlet_check(outlet, index * delivery->load->batch, count);
    berth->count = count;
    berth->waiting = true;
    berth->handed = false;
    delivery->queues[outlet->number].push_back(index);
    enum status status = hand_over(delivery);
    delivery->changed.notify_all();
    return status;
}

enum status outlet_deliver(struct outlet *outlet, uint32_t slot, uint32_t count)
{
    if (!is_wanted(outlet->delivery))
        return STATUS_OK;
    std::unique_lock<std::mutex> guard = delivery_guard(outlet->delivery);
    return deliver(outlet, slot / outlet->delivery->load->batch, count);
}

/* ---- Streams of samples ---- */

uint64_t delivery_span(const struct load *load, uint64_t target)
{
    uint64_t window = load->window > 1 ? load->window : 1, samples = load->dataset->sample_count;
    uint64_t span = window == 1        ? 4 * target
                    : window >= target ? window
                                       : (target + window - 1) / window * window;
    return span < samples || window > 1 ? span : samples;
}

uint64_t delivery_stream_slots(const struct load *load, uint32_t workers, uint64_t span)
{
    uint64_t all = (uint64_t)load->ranks * workers;
    uint64_t share = (load->dataset->sample_count + all - 1) / all; /* as order_share() has it, at most */
    span = span < share ? span : share;
    uint64_t ahead = span > load->batch ? span : load->batch;
    return load->batch + span + (load->control->consumer ? ahead : 0);
}

static uint64_t batches_of(const struct outlet *outlet)
{
    uint32_t batch = outlet->delivery->load->batch;
    return ((uint64_t)outlet->order.count + batch - 1) / batch;
}

uint64_t outlet_batch(const struct outlet *outlet, uint32_t arrival)
{
    const struct load *load = outlet->delivery->load;
    if (arrival == outlet->order.count)
        return outlet->base + batches_of(outlet);
    return outlet->base + (load->window > 1 ? arrival / load->window * load->window : arrival) / load->batch;
}

uint32_t outlet_slot(const struct outlet *outlet, uint32_t arrival)
{
    uint32_t slots = outlet->delivery->slots;
    uint64_t slot = (uint64_t)outlet->first + outlet->order.places[arrival] % slots;
    return (uint32_t)(slot < slots ? slot : slot - slots);
}

void outlet_fill(struct outlet *outlet, uint32_t arrival, uint32_t count)
{
    const struct delivery *delivery = outlet->delivery;
    if (!is_wanted(delivery))
        return;
    for (uint32_t i = 0; i < count; i++)
        outlet->berths[outlet_slot(outlet, arrival + i) / delivery->load->batch].filled++;
}

enum status outlet_advance(struct outlet *outlet)
{
    const struct delivery *delivery = outlet->delivery;
    const struct load *load = delivery->load;
    while (is_wanted(delivery) && outlet->delivered < outlet->base + batches_of(outlet)) {
        uint32_t index = (uint32_t)(outlet->delivered % delivery->berths);
        uint64_t left = outlet->order.count - (outlet->delivered - outlet->base) * load->batch;
        uint32_t count = left < load->batch ? (uint32_t)left : load->batch;
        if (outlet->berths[index].filled < count)
            break;
        outlet->berths[index].filled = 0;
        outlet->delivered++;
        TRY(deliver(outlet, index, count));
        if (!load->control->consumer)
            outlet->freed++;
    }
    return STATUS_OK;
}

void outlet_next_epoch(struct outlet *outlet)
{
    outlet->base += batches_of(outlet);
    outlet->first = (uint32_t)(outlet->base % outlet->delivery->berths) * outlet->delivery->load->batch;
}

bool outlet_make_room(struct outlet *outlet, uint64_t turns)
{
    const struct delivery *delivery = outlet->delivery;
    uint32_t batch = delivery->load->batch;
    turns = outlet->base * batch + (turns < outlet->order.count ? turns : outlet->order.count);
    while (is_wanted(delivery) && turns > (outlet->freed + delivery->berths) * batch) {
        struct berth *berth = &outlet->berths[outlet->freed % delivery->berths];
        if (delivery->load->control->whole || !outlet_handed(outlet))
            return false;
        if (delivery->steps - berth->step <= CONSUMER_STEPS_AHEAD &&
            cudaEventQuery(berth->done) != cudaSuccess) {
            (void)cudaGetLastError(); /* it has not come yet; whoever waits for it learns of errors */
            return false;
        }
        berth->waiting = false;
        outlet->freed++;
    }
    return true;
}

bool outlet_handed(const struct outlet *outlet)
{
    return outlet->freed < outlet->delivered &&
           outlet->berths[outlet->freed % outlet->delivery->berths].handed;
}

enum status outlet_free(struct outlet *outlet)
{
    TRY(await_step(outlet, (uint32_t)(outlet->freed % outlet->delivery->berths)));
    std::lock_guard<std::mutex> guard(outlet->delivery->lock);
    outlet->freed++;
    return STATUS_OK;
}

enum status outlet_lose(struct outlet *outlet, uint32_t sample, enum status status)
{
    std::unique_lock<std::mutex> guard = delivery_guard(outlet->delivery);
    return verifier_lose(&outlet->delivery->verifier, &outlet->losses, sample, status);
}

struct unpack outlet_job(const struct outlet *outlet)
{
    const struct delivery *delivery = outlet->delivery;
    struct unpack job = {};
    job.samples = delivery->samples;
    job.convert = delivery->convert;
    job.values = delivery->arrays.values;
    job.tensor = outlet->tensor;
    job.stride = delivery->stride;
    job.labels = outlet->labels;
    job.hashes = outlet->hashes;
    job.whole = delivery->load->control->whole;
    job.checksum = outlet->checksum;
    return job;
}

/* ---- A run ---- */

enum status delivery_ready(struct delivery *delivery, uint64_t number)
{
    for (uint32_t w = 0; w < delivery->workers; w++) /* nothing of this run is there yet: DELIVERY_LOST */
        memset(delivery->outlets[w].held, 0xff, delivery->slots * sizeof *delivery->outlets[w].held);
    return verifier_ready(&delivery->verifier, number, &delivery->result.before);
}

void outlet_note(struct outlet *outlet, uint64_t lost)
{
    verifier_note(&outlet->delivery->verifier, &outlet->losses, &outlet->order, lost);
}

enum status outlet_each_epoch(struct outlet *outlet, enum status (*epoch)(struct outlet *outlet))
{
    for (uint32_t i = 0; i < outlet->delivery->load->epochs; i++, outlet->epoch++) {
        uint64_t lost = outlet->losses.checksum.count;
        TRY(epoch(outlet));
        outlet_note(outlet, outlet->losses.checksum.count - lost);
    }
    return STATUS_OK;
}

static enum status read_share(struct outlet *outlet, enum status (*read)(struct outlet *outlet))
{
    CUDA_TRY(cudaSetDevice(outlet->delivery->device));
    TRY(read(outlet));
    TRY(await_steps(outlet));
    CUDA_TRY(cudaStreamSynchronize(outlet->stream));
    return STATUS_OK;
}

/* One worker's part of a run. */
static void work(struct outlet *outlet, enum status (*read)(struct outlet *outlet))
{
    outlet->status = read_share(outlet, read);
    if (outlet->status == STATUS_OK)
        return;
    snprintf(outlet->failure, sizeof outlet->failure, "%s", status_text()); /* the message is this thread's */
    give_up(outlet->delivery);
}

/* Nothing may be under way when the caller frees what it has. */
static enum status stop_after_failure(struct delivery *delivery)
{
    const struct outlet *first = nullptr;
    (void)cudaDeviceSynchronize();
    for (uint32_t w = 0; w < delivery->workers; w++) {
        struct outlet *outlet = &delivery->outlets[w];
        if (outlet->status != STATUS_OK && (!first || (first->told_off && !outlet->told_off)))
            first = outlet;
        for (uint32_t b = 0; b < delivery->berths; b++)
            outlet->berths[b].waiting = false;
    }
    return status_set(first->status, "%s", first->failure);
}

static void begin_share(struct outlet *outlet, uint64_t number)
{
    outlet->epoch = number * outlet->delivery->load->epochs;
    outlet->base = outlet->delivered = outlet->freed = 0;
    outlet->first = 0;
    outlet->order.count = 0;
    for (uint32_t b = 0; b < outlet->delivery->berths; b++)
        outlet->berths[b].filled = 0;
    outlet->losses = {};
    outlet->told_off = false;
    outlet->failure[0] = '\0';
}

/* All shares before any thread: threads may read each other's. */
static enum status begin_run(struct delivery *delivery, uint64_t number)
{
    const struct load *load = delivery->load;
    CUDA_TRY(cudaSetDevice(delivery->device));
    delivery->failed = false;
    delivery->next = 0;
    for (uint32_t w = 0; w < delivery->workers; w++) {
        uint32_t begin, end;
        order_share(&delivery->verifier.plan, load->rank * delivery->workers + w, &begin, &end);
        delivery->left[w] = (uint64_t)load->epochs * ((end - begin + load->batch - 1) / load->batch);
        delivery->queues[w].clear();
        begin_share(&delivery->outlets[w], number);
    }
    cudaStream_t stream = delivery->outlets[0].stream;
    CUDA_TRY(
        cudaMemsetAsync(delivery->checksums, 0, delivery->workers * sizeof *delivery->checksums, stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    return STATUS_OK;
}

static enum status finish_run(struct delivery *delivery, uint64_t number)
{
    struct losses lost = {};
    std::vector<struct checksum> checksums(delivery->workers);
    CUDA_TRY(cudaMemcpy(checksums.data(), delivery->checksums, delivery->workers * sizeof checksums[0],
                        cudaMemcpyDeviceToHost));
    delivery->result.number = number;
    delivery->result.checksum = {};
    for (uint32_t w = 0; w < delivery->workers; w++) {
        checksum_merge(&delivery->result.checksum, &checksums[w]);
        losses_merge(&lost, &delivery->outlets[w].losses);
    }
    delivery->result.skipped = lost.checksum.count;
    return verifier_finish(&delivery->verifier, number, &delivery->result.checksum, &lost);
}

enum status delivery_run(struct delivery *delivery, uint64_t number,
                         enum status (*read)(struct outlet *outlet))
{
    std::vector<std::thread> threads;
    bool started = true;
    TRY(begin_run(delivery, number));
    try {
        for (uint32_t w = 1; w < delivery->workers; w++)
            threads.emplace_back(work, &delivery->outlets[w], read);
    } catch (const std::exception &) { /* C++ tells so that there are no more threads, or no memory */
        started = false;
        give_up(delivery);
    }
    if (started)
        work(&delivery->outlets[0], read);
    for (std::thread &thread : threads)
        thread.join();
    if (!started) {
        (void)cudaDeviceSynchronize();
        return status_set(STATUS_FAILED, "cannot start %u threads; lower --threads", delivery->workers);
    }
    for (uint32_t w = 0; w < delivery->workers; w++)
        if (delivery->outlets[w].status != STATUS_OK)
            return stop_after_failure(delivery);
    return finish_run(delivery, number);
}

enum status delivery_fetch(struct delivery *delivery, struct load_result *result)
{
    delivery->result.device_known =
        verifier_device_bytes(&delivery->verifier, &delivery->result.device_bytes);
    delivery->result.threads = (int)delivery->workers;
    *result = delivery->result;
    return STATUS_OK;
}
