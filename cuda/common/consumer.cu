/* The consumer on a GPU: passes batches to a training step, and times how long each step waits for its batch.
 * A step is a matrix product of calibrated duration, or the trainer's own step. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/consumer_parts.cuh"
#include "common/stream.cuh"
#include "machine/device.h"

/* Maximum number of the trainer's steps in flight. A step launches dozens of kernels, and about a thousand
 * launches can be queued. When the queue is full, a launch blocks, and all other CUDA calls wait for that
 * launch. */
#define TRAINING_STEPS_AHEAD 8

static struct cuda_consumer *self_of(struct consumer *consumer)
{
    return reinterpret_cast<struct cuda_consumer *>(consumer);
}

/* ---- Steps and their waiting times ---- */

/* Waits for the oldest uncounted step. Adds its duration and the wait before it to self->span. Then swaps the
 * step's end event with last_end, because the wait before the next step is measured from last_end. */
static enum status count_step(struct cuda_consumer *self)
{
    uint64_t at = self->counted % CONSUMER_STEPS_AHEAD;
    bool first = self->counted == self->span_first;
    float wait_ms, step_ms;
    CUDA_TRY(cudaEventSynchronize(self->ends[at]));
    CUDA_TRY(cudaEventElapsedTime(&wait_ms, first ? self->origin : self->last_end, self->begins[at]));
    CUDA_TRY(cudaEventElapsedTime(&step_ms, self->begins[at], self->ends[at]));
    struct consumer_times *span = &self->span;
    *(first ? &span->first_wait_s : &span->wait_s) += 1e-3 * wait_ms;
    span->busy_s += 1e-3 * step_ms;
    span->steps++;
    if (self->whole[at]) {
        span->whole_s += 1e-3 * step_ms;
        span->whole_steps++;
    }
    cudaEvent_t spare = self->last_end;
    self->last_end = self->ends[at];
    self->ends[at] = spare;
    self->counted++;
    return STATUS_OK;
}

static enum status count_all(struct cuda_consumer *self)
{
    while (self->counted < self->enqueued)
        TRY(count_step(self));
    return STATUS_OK;
}

/* Enqueues a step on a batch in device memory. If the event `ready` is not NULL, the step waits for it. Sets
 * `*done` to an event that is recorded after the step. If the maximum number of steps is in flight, first
 * waits for the oldest one. */
static enum status enqueue(struct cuda_consumer *self, const struct batch *batch, cudaEvent_t ready,
                           cudaEvent_t *done)
{
    if (self->enqueued - self->counted == self->ahead)
        TRY(count_step(self));
    uint64_t at = self->enqueued % CONSUMER_STEPS_AHEAD;
    if (ready)
        CUDA_TRY(cudaStreamWaitEvent(self->steps, ready, 0));
    CUDA_TRY(cudaEventRecord(self->begins[at], self->steps));
    TRY(make_step(self, batch));
    CUDA_TRY(cudaEventRecord(self->ends[at], self->steps));
    self->whole[at] = self->share == 0 || batch->count == self->share;
    self->enqueued++;
    *done = self->ends[at];
    return STATUS_OK;
}

static enum status begin_span(struct cuda_consumer *self)
{
    TRY(count_all(self));
    self->span_first = self->counted;
    self->span = {};
    CUDA_TRY(cudaEventRecord(self->origin, self->steps));
    return STATUS_OK;
}

static enum status cuda_renew(struct consumer *consumer)
{
    struct cuda_consumer *self = self_of(consumer);
    CUDA_TRY(cudaSetDevice(self->device));
    pthread_mutex_lock(&self->lock);
    enum status status = count_all(self);
    if (status == STATUS_OK && self->backend)
        status = step_backend_reset(self->backend);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static enum status cuda_begin(struct consumer *consumer)
{
    struct cuda_consumer *self = self_of(consumer);
    CUDA_TRY(cudaSetDevice(self->device));
    pthread_mutex_lock(&self->lock);
    enum status status = begin_span(self);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static enum status cuda_finish(struct consumer *consumer, struct consumer_times *times)
{
    struct cuda_consumer *self = self_of(consumer);
    *times = {};
    CUDA_TRY(cudaSetDevice(self->device));
    pthread_mutex_lock(&self->lock);
    enum status status = count_all(self);
    *times = self->span;
    times->span_s = times->first_wait_s + times->wait_s + times->busy_s;
    times->loss = NAN;
    if (status == STATUS_OK && self->backend)
        status = step_backend_loss(self->backend, &times->loss);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static enum status cuda_wait(struct consumer *consumer, void *done_event)
{
    CUDA_TRY(cudaSetDevice(self_of(consumer)->device));
    CUDA_TRY(cudaEventSynchronize(static_cast<cudaEvent_t>(done_event)));
    return STATUS_OK;
}

static enum status cuda_take_device(struct consumer *consumer, const struct batch *batch, void *ready_event,
                                    void **done_event)
{
    struct cuda_consumer *self = self_of(consumer);
    cudaEvent_t done = nullptr;
    CUDA_TRY(cudaSetDevice(self->device));
    pthread_mutex_lock(&self->lock);
    enum status status = enqueue(self, batch, static_cast<cudaEvent_t>(ready_event), &done);
    pthread_mutex_unlock(&self->lock);
    if (status == STATUS_OK && done_event)
        *done_event = done;
    return status;
}

/* ---- Batches from the host ---- */

static void empty_slot(struct slot *slot)
{
    (void)cudaFreeHost(slot->pinned);
    (void)cudaFree(slot->device);
    slot->pinned = slot->device = nullptr;
    slot->bytes = 0;
}

static enum status grow_slot(struct slot *slot, size_t bytes)
{
    if (bytes <= slot->bytes)
        return STATUS_OK;
    empty_slot(slot);
    CUDA_TRY(cudaMallocHost(&slot->pinned, bytes));
    CUDA_TRY(cudaMalloc(&slot->device, bytes));
    slot->bytes = bytes;
    return STATUS_OK;
}

/* Returns the next slot of the ring. Waits until the thread that passed the slot's previous batch has
 * released the slot. */
static struct slot *take_slot(struct cuda_consumer *self)
{
    pthread_mutex_lock(&self->lock);
    uint64_t ticket = self->tickets++;
    struct slot *slot = &self->ring[ticket % RING];
    while (slot->turn < ticket / RING)
        pthread_cond_wait(&self->changed, &self->lock);
    pthread_mutex_unlock(&self->lock);
    return slot;
}

/* Releases a slot. This function must be called even after a failure: otherwise the next thread to use this
 * slot would wait forever. */
static void leave_slot(struct cuda_consumer *self, struct slot *slot)
{
    pthread_mutex_lock(&self->lock);
    slot->turn++;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

/* Alignment of the labels in a slot, in bytes. */
#define SLOT_ALIGNMENT ((size_t)16)

/* Copies the batch to the slot's pinned memory: values, followed by labels. Sets `*there` to a description of
 * the batch in the slot's device memory, and `*bytes` to the number of bytes to copy to that memory. */
static enum status fill_slot(struct slot *slot, const struct batch *batch, struct batch *there, size_t *bytes)
{
    size_t labels_at = (batch->bytes + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
    size_t labels_bytes = batch->labels ? batch->count * sizeof *batch->labels : 0;
    *bytes = labels_bytes ? labels_at + labels_bytes : batch->bytes;
    enum status status = grow_slot(slot, *bytes);
    if (status != STATUS_OK)
        return status_prefix(
            status, "--compute: cannot allocate %d buffers of %.1f MB each in host and device memory", RING,
            1e-6 * (double)*bytes);
    if (batch->bytes)
        memcpy(slot->pinned, batch->values, batch->bytes);
    if (labels_bytes)
        memcpy(static_cast<uint8_t *>(slot->pinned) + labels_at, batch->labels, labels_bytes);
    *there = *batch;
    there->values = slot->device;
    if (labels_bytes)
        there->labels = reinterpret_cast<const int32_t *>(static_cast<uint8_t *>(slot->device) + labels_at);
    return STATUS_OK;
}

/* Copies the batch to the device and enqueues its step. The calling thread owns the slot. */
static enum status pass_through(struct cuda_consumer *self, struct slot *slot, const struct batch *batch)
{
    struct batch there;
    size_t bytes;
    if (slot->done) /* the step on the slot's previous batch may still be running */
        CUDA_TRY(cudaEventSynchronize(slot->done));
    slot->done = nullptr;
    TRY(fill_slot(slot, batch, &there, &bytes));
    pthread_mutex_lock(&self->lock);
    enum status status =
        cuda_status(cudaMemcpyAsync(slot->device, slot->pinned, bytes, cudaMemcpyHostToDevice, self->copies),
                    "cudaMemcpyAsync of a batch", __FILE__, __LINE__);
    if (status == STATUS_OK)
        status =
            cuda_status(cudaEventRecord(slot->copied, self->copies), "cudaEventRecord", __FILE__, __LINE__);
    if (status == STATUS_OK)
        status = enqueue(self, &there, slot->copied, &slot->done);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static enum status cuda_take_host(struct consumer *consumer, const struct batch *batch)
{
    struct cuda_consumer *self = self_of(consumer);
    CUDA_TRY(cudaSetDevice(self->device));
    struct slot *slot = take_slot(self);
    enum status status = pass_through(self, slot, batch);
    leave_slot(self, slot);
    return status;
}

/* ---- Opening ---- */

/* Waits for all steps and frees everything. Ignores errors, because no result depends on them. */
static void cuda_close(struct consumer *consumer)
{
    struct cuda_consumer *self = self_of(consumer);
    (void)cudaSetDevice(self->device);
    if (self->steps)
        (void)cudaStreamSynchronize(self->steps);
    for (int i = 0; i < RING; i++) {
        empty_slot(&self->ring[i]);
        destroy(self->ring[i].copied);
    }
    for (int i = 0; i < CONSUMER_STEPS_AHEAD; i++)
        destroy(self->begins[i], self->ends[i]);
    destroy(self->last_end, self->origin);
    product_close(&self->product);
    destroy(self->copies);
    if (!self->backend)
        destroy(self->steps);
    step_backend_close(self->backend);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

/* Steps have the lowest priority, so that they do not delay kernels that produce the next batch. */
static enum status make_streams(struct cuda_consumer *self)
{
    int lowest, highest;
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    if (self->backend)
        self->steps = static_cast<cudaStream_t>(step_backend_stream(self->backend));
    else
        CUDA_TRY(cudaStreamCreateWithPriority(&self->steps, cudaStreamNonBlocking, lowest));
    CUDA_TRY(cudaStreamCreateWithFlags(&self->copies, cudaStreamNonBlocking));
    for (int i = 0; i < CONSUMER_STEPS_AHEAD; i++) {
        CUDA_TRY(cudaEventCreate(&self->begins[i]));
        /* A thread that waits for this event sleeps, so threads that load data can use its core. */
        CUDA_TRY(cudaEventCreateWithFlags(&self->ends[i], cudaEventBlockingSync));
    }
    CUDA_TRY(cudaEventCreateWithFlags(&self->last_end, cudaEventBlockingSync));
    CUDA_TRY(cudaEventCreate(&self->origin));
    for (int i = 0; i < RING; i++)
        CUDA_TRY(cudaEventCreateWithFlags(&self->ring[i].copied, cudaEventDisableTiming));
    return STATUS_OK;
}

static enum status make(struct cuda_consumer *self, double step_s, const struct task *task)
{
    TRY(device_probe(self->device));
    CUDA_TRY(cudaSetDevice(self->device));
    self->ahead = task ? TRAINING_STEPS_AHEAD : CONSUMER_STEPS_AHEAD;
    self->share = task ? task->share : 0;
    if (task)
        TRY(step_backend_open(self->device, task, &self->backend));
    TRY(make_streams(self));
    TRY(task ? measure_task(self, task) : measure_product(self, step_s));
    TRY(cuda_renew(&self->consumer));
    return begin_span(self);
}

extern "C" enum status consumer_open(int device, double step_s, const struct task *task,
                                     struct consumer **consumer)
{
    static const struct consumer_type type = {cuda_renew, cuda_begin,  cuda_take_host, cuda_take_device,
                                              cuda_wait,  cuda_finish, cuda_close};
    struct cuda_consumer *self = static_cast<struct cuda_consumer *>(calloc(1, sizeof *self));
    *consumer = nullptr;
    TRY(ALLOCATED(self, "out of memory"));
    self->consumer.type = &type;
    self->device = device;
    pthread_mutex_init(&self->lock, nullptr);
    pthread_cond_init(&self->changed, nullptr);
    enum status status = make(self, step_s, task);
    if (status != STATUS_OK) {
        cuda_close(&self->consumer);
        return status_prefix(status, "--compute");
    }
    *consumer = &self->consumer;
    return STATUS_OK;
}
