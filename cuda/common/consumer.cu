/* The consumer on a GPU: passes batches to a training step, and times how long each step waits for its batch.
 * A step is a matrix product of calibrated duration, or the trainer's own step. When the consumer opens, it
 * measures the duration of a step alone, and how steps and host-to-device copies slow each other down. */
#include "core/consumer.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/product.cuh"
#include "common/stream.cuh"
#include "core/step_backend.h"
#include "machine/device.h"

/* Maximum number of the trainer's steps in flight. A step launches dozens of kernels, and about a thousand
 * launches can be queued. When the queue is full, a launch blocks, and all other CUDA calls wait for that
 * launch. */
#define TRAINING_STEPS_AHEAD 8
#define KERNELS_AHEAD        512 /* maximum number of kernels of --compute MS in flight */

#define RING                 4 /* number of slots, which limits the number of host batches in flight */

/* The buffers of one host batch. */
struct slot {
    void *pinned, *device;
    size_t bytes;
    uint64_t turn;      /* number of times that this slot has been released */
    cudaEvent_t copied; /* recorded after the copy to the device */
    cudaEvent_t done;   /* recorded after the step on the slot's latest batch; NULL before the first batch */
};

struct cuda_consumer {
    struct consumer
        consumer; /* must be first: self_of() converts its address to the address of this struct */
    int device;
    pthread_mutex_t lock;   /* protects everything below, except the buffers of a slot that a thread owns */
    pthread_cond_t changed; /* signals that a slot's turn has changed */
    struct product product;
    struct step_backend *backend; /* runs the steps; if NULL, `product` runs them */
    unsigned ahead;               /* maximum number of steps in flight */
    uint32_t share; /* samples in a full batch; 0: the duration of a step does not depend on the batch */
    cudaStream_t steps, copies;
    cudaEvent_t origin; /* start of the span, which lasts from consumer_begin() to consumer_finish() */
    cudaEvent_t begins[CONSUMER_STEPS_AHEAD], ends[CONSUMER_STEPS_AHEAD];
    bool whole[CONSUMER_STEPS_AHEAD]; /* whether the step from begins[i] to ends[i] has a full batch */
    cudaEvent_t last_end;             /* end of the latest counted step */
    uint64_t enqueued, counted;       /* steps enqueued and steps counted since consumer_open() */
    uint64_t span_first;              /* number of the first step of the span */
    struct consumer_times span; /* sums over the counted steps of the span; span_s and loss are unused */
    uint64_t tickets;           /* number of host batches received so far */
    struct slot ring[RING];
};

/* Enqueues one step on `batch`. The matrix product ignores the batch. */
static enum status make_step(struct cuda_consumer *self, const struct batch *batch)
{
    return self->backend ? step_backend_step(self->backend, batch)
                         : product_launch(&self->product, self->steps);
}

/* ---- A step alone ---- */

#define UNITS_MAX     (1u << 26) /* maximum number of units per step (product.cuh) */
#define WARM_S        0.3        /* minimum warm-up: clocks rise under load, then fall as the GPU heats up */
#define ROUND_S       0.05       /* intended duration of a measurement */
#define REPEATS_MIN   5          /* minimum number of steps per measurement */
#define REPEATS_MAX   64         /* maximum number of steps per measurement */
#define ROUNDS_MAX    12
#define ERROR_WANTED  0.003 /* calibration stops below this relative error */
#define ERROR_SILENT  0.02  /* maximum relative error without a warning */
#define ERROR_ALLOWED 0.1   /* maximum relative error with a warning */

static int by_value(const void *a, const void *b)
{
    double left = *static_cast<const double *>(a), right = *static_cast<const double *>(b);
    return (left > right) - (left < right);
}

/* Measures the median time per step over `repeats` consecutive steps. */
static enum status measure(struct cuda_consumer *self, const struct batch *batch, int repeats, double *step_s)
{
    static_assert(REPEATS_MAX < CONSUMER_STEPS_AHEAD, "calibration reuses the events of steps");
    double times_s[REPEATS_MAX];
    cudaEvent_t *events = self->begins;
    CUDA_TRY(cudaEventRecord(events[0], self->steps));
    for (int i = 0; i < repeats; i++) {
        TRY(make_step(self, batch));
        CUDA_TRY(cudaEventRecord(events[i + 1], self->steps));
    }
    CUDA_TRY(cudaStreamSynchronize(self->steps));
    for (int i = 0; i < repeats; i++) {
        float elapsed_ms;
        CUDA_TRY(cudaEventElapsedTime(&elapsed_ms, events[i], events[i + 1]));
        times_s[i] = 1e-3 * elapsed_ms;
    }
    qsort(times_s, (size_t)repeats, sizeof *times_s, by_value);
    *step_s = times_s[repeats / 2];
    return STATUS_OK;
}

static int repeats_of(double seconds, double step_s)
{
    double repeats = ceil(seconds / step_s);
    return repeats < REPEATS_MIN ? REPEATS_MIN : repeats > REPEATS_MAX ? REPEATS_MAX : (int)repeats;
}

/* Adjusts the product's number of units until a step takes wanted_s seconds. */
static enum status calibrate(struct cuda_consumer *self, double wanted_s)
{
    struct product *product = &self->product;
    double *alone_s = &self->consumer.facts.alone_s, warmed_s = 0;
    for (int turn = 0; turn < ROUNDS_MAX || warmed_s < WARM_S; turn++) {
        int repeats = turn == 0 ? REPEATS_MIN : repeats_of(ROUND_S, wanted_s);
        TRY(measure(self, nullptr, repeats, alone_s));
        warmed_s += repeats * *alone_s;
        if (warmed_s >= WARM_S && fabs(*alone_s / wanted_s - 1) < ERROR_WANTED)
            return STATUS_OK;
        double units = round(product->units * (wanted_s / *alone_s));
        if (units < 1 || units > UNITS_MAX)
            return status_set(STATUS_FAILED,
                              "a step of %g ms is too short or too long for this GPU; use another duration",
                              1e3 * wanted_s);
        if (turn + 1 < ROUNDS_MAX || warmed_s < WARM_S)
            product->units = (unsigned)units;
    }
    double error = fabs(*alone_s / wanted_s - 1);
    if (error > ERROR_SILENT && error < ERROR_ALLOWED)
        status_warn(
            "--compute: the requested step of %g ms takes %.4g ms: GPU clocks vary, or another process "
            "is using the GPU; stop other processes, or use a longer step",
            1e3 * wanted_s, 1e3 * *alone_s);
    if (error < ERROR_ALLOWED)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "the requested step of %g ms takes %.4g ms even after calibration: GPU clocks vary, or "
                      "another process is using the GPU; stop other processes, or use a longer step",
                      1e3 * wanted_s, 1e3 * *alone_s);
}

/* Measures the duration of a step of --compute train (self->backend). This duration cannot be adjusted. */
static enum status measure_alone(struct cuda_consumer *self, const struct batch *batch)
{
    double *alone_s = &self->consumer.facts.alone_s;
    TRY(measure(self, batch, REPEATS_MIN, alone_s)); /* warm-up: the first steps load kernels */
    for (double warmed_s = 0; warmed_s < WARM_S;) {
        int repeats = repeats_of(ROUND_S, *alone_s);
        TRY(measure(self, batch, repeats, alone_s));
        warmed_s += repeats * *alone_s;
    }
    return STATUS_OK;
}

/* ---- The bus ---- */

/* One stream runs training steps while another runs pinned copies to the device. Each stream runs its work in
 * groups, without gaps. All copies together take about twice as long as all steps, so that copies run during
 * every step. A group counts only if the other stream was busy during the whole group. */
#define BUS_BYTES  ((size_t)64 << 20) /* bytes per copy */
#define BUS_GROUPS 32
#define BUS_TIME_S 0.15 /* minimum duration of all steps */
#define BUS_STEPS  3    /* minimum number of steps */

struct bus {
    void *pinned, *device;
    cudaEvent_t *step_begins, *step_ends, *copy_begins, *copy_ends; /* BUS_GROUPS elements per array */
    int steps, groups;        /* steps per group; number of groups of steps */
    int copies;               /* copies per group; there are BUS_GROUPS groups of copies */
    double copies_s, steps_s; /* duration of a group of copies and of a group of steps, each measured alone */
};

static enum status make_copies(struct cuda_consumer *self, const struct bus *bus, int group)
{
    CUDA_TRY(cudaEventRecord(bus->copy_begins[group], self->copies));
    for (int i = 0; i < bus->copies; i++)
        CUDA_TRY(cudaMemcpyAsync(bus->device, bus->pinned, BUS_BYTES, cudaMemcpyHostToDevice, self->copies));
    return CUDA_STATUS(cudaEventRecord(bus->copy_ends[group], self->copies));
}

static enum status make_steps(struct cuda_consumer *self, const struct batch *batch, const struct bus *bus,
                              int group)
{
    CUDA_TRY(cudaEventRecord(bus->step_begins[group], self->steps));
    for (int i = 0; i < bus->steps; i++)
        TRY(make_step(self, batch));
    return CUDA_STATUS(cudaEventRecord(bus->step_ends[group], self->steps));
}

/* Computes the mean duration of the groups that began after the event `after` and ended before the event
 * `before`. Sets NaN if there are none. */
static enum status mean_between(const cudaEvent_t *begins, const cudaEvent_t *ends, int groups,
                                cudaEvent_t after, cudaEvent_t before, double *mean_s)
{
    double sum_s = 0;
    int counted = 0;
    for (int i = 0; i < groups; i++) {
        float since_ms, until_ms, group_ms;
        CUDA_TRY(cudaEventElapsedTime(&since_ms, after, begins[i]));
        CUDA_TRY(cudaEventElapsedTime(&until_ms, ends[i], before));
        CUDA_TRY(cudaEventElapsedTime(&group_ms, begins[i], ends[i]));
        if (since_ms < 0 || until_ms < 0)
            continue;
        sum_s += 1e-3 * group_ms;
        counted++;
    }
    *mean_s = counted ? sum_s / counted : NAN;
    return STATUS_OK;
}

/* Measures copies alone. Then chooses the number of copies per group, such that all groups of copies take
 * about twice `steps_s`, the time of all steps. */
static enum status copy_alone(struct cuda_consumer *self, struct bus *bus, double steps_s)
{
    bus->copies = 1;
    for (int group = 0; group < BUS_GROUPS; group++)
        TRY(make_copies(self, bus, group));
    CUDA_TRY(cudaStreamSynchronize(self->copies));
    TRY(mean_between(bus->copy_begins + 1, bus->copy_ends + 1, BUS_GROUPS - 1, bus->copy_begins[1],
                     bus->copy_ends[BUS_GROUPS - 1], &bus->copies_s));
    bus->copies = (int)ceil(2 * steps_s / (BUS_GROUPS * bus->copies_s));
    bus->copies_s *= bus->copies;
    return STATUS_OK;
}

/* Measures steps alone, in the same groups that later run concurrently with copies. The times with and
 * without copies therefore both include the overhead of a group and any drop in clocks since the
 * calibration. */
static enum status step_alone(struct cuda_consumer *self, const struct batch *batch, struct bus *bus)
{
    for (int group = 0; group < bus->groups; group++)
        TRY(make_steps(self, batch, bus, group));
    CUDA_TRY(cudaStreamSynchronize(self->steps));
    return mean_between(bus->step_begins, bus->step_ends, bus->groups, bus->step_begins[0],
                        bus->step_ends[bus->groups - 1], &bus->steps_s);
}

static enum status run_bus(struct cuda_consumer *self, const struct batch *batch, struct bus *bus)
{
    struct consumer_facts *facts = &self->consumer.facts;
    double wanted_s = fmax(BUS_TIME_S, BUS_STEPS * facts->alone_s), steps_s, copies_s;
    bus->groups = (int)fmin(BUS_GROUPS, ceil(wanted_s / facts->alone_s));
    bus->steps = (int)ceil(wanted_s / (bus->groups * facts->alone_s));
    TRY(copy_alone(self, bus, bus->groups * bus->steps * facts->alone_s));
    TRY(step_alone(self, batch, bus));
    /* Alternate between the streams: if the launch queue filled with steps, copies could not be enqueued. */
    for (int group = 0; group < BUS_GROUPS; group++) {
        if (group < bus->groups)
            TRY(make_steps(self, batch, bus, group));
        TRY(make_copies(self, bus, group));
    }
    CUDA_TRY(cudaStreamSynchronize(self->steps));
    CUDA_TRY(cudaStreamSynchronize(self->copies));
    TRY(mean_between(bus->step_begins, bus->step_ends, bus->groups, bus->copy_begins[0],
                     bus->copy_ends[BUS_GROUPS - 1], &steps_s));
    TRY(mean_between(bus->copy_begins, bus->copy_ends, BUS_GROUPS, bus->step_begins[0],
                     bus->step_ends[bus->groups - 1], &copies_s));
    facts->bus_share = bus->copies_s / copies_s;
    facts->bus_slowdown = steps_s / bus->steps_s;
    return STATUS_OK;
}

/* Measures how steps and pinned copies slow each other down. Call before any loader starts. */
static enum status measure_bus(struct cuda_consumer *self, const struct batch *batch)
{
    static_assert(2 * BUS_GROUPS <= CONSUMER_STEPS_AHEAD, "the measurement reuses the events of steps");
    struct bus bus = {};
    bus.step_begins = self->begins;
    bus.step_ends = self->begins + BUS_GROUPS;
    bus.copy_begins = self->ends;
    bus.copy_ends = self->ends + BUS_GROUPS;
    enum status status = CUDA_STATUS(cudaMallocHost(&bus.pinned, BUS_BYTES));
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaMalloc(&bus.device, BUS_BYTES));
    if (status == STATUS_OK) {
        memset(bus.pinned, 1, BUS_BYTES);
        status = run_bus(self, batch, &bus);
    }
    (void)cudaFreeHost(bus.pinned);
    (void)cudaFree(bus.device);
    return status;
}

/* ---- Both measurements, before the first batch ---- */

#define FILL_BLOCK 256

/* Fills `pixels` with uniformly distributed gray values. Each value is the top byte of a hash of its index.
 * The hash is the finaliser of MurmurHash3 without its last step, which does not change the top byte. */
static __global__ void fill_kernel(uint8_t *pixels, size_t count)
{
    size_t i = (size_t)blockIdx.x * FILL_BLOCK + threadIdx.x;
    if (i >= count)
        return;
    uint32_t hash = (uint32_t)i;
    hash = (hash ^ hash >> 16) * 0x85ebca6bu;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
    pixels[i] = (uint8_t)(hash >> 24);
}

static enum status fill_pixels(uint8_t *pixels, size_t count, cudaStream_t stream)
{
    fill_kernel<<<(unsigned)((count + FILL_BLOCK - 1) / FILL_BLOCK), FILL_BLOCK, 0, stream>>>(pixels, count);
    return CUDA_LAUNCHED("fill_kernel");
}

/* Measures steps on random u8 pixels, because no batch has been loaded yet. The pixels hardly influence the
 * duration of a step. If the real batches have a wider type than u8, their steps take longer than measured,
 * because more bytes are converted. Fills self->consumer.facts. */
static enum status measure_task(struct cuda_consumer *self, const struct task *task)
{
    size_t sample_bytes = (size_t)task->channels * task->height * task->width;
    size_t bytes = task->share * sample_bytes;
    uint8_t *pixels;
    enum status allocated = CUDA_STATUS(cudaMalloc(&pixels, bytes));
    if (allocated == STATUS_EXHAUSTED)
        return status_set(STATUS_TOO_LARGE, "GPU %d has no memory left for a batch of %.1f MB; lower --batch",
                          self->device, 1e-6 * (double)bytes);
    TRY(allocated);
    struct batch batch = {};
    batch.values = pixels;
    batch.stride = sample_bytes;
    batch.bytes = bytes;
    batch.count = task->share;
    enum status status = fill_pixels(pixels, bytes, self->steps);
    if (status == STATUS_OK)
        status = measure_alone(self, &batch);
    if (status == STATUS_OK)
        status = measure_bus(self, &batch);
    self->consumer.facts.length_s = self->consumer.facts.alone_s;
    (void)cudaStreamSynchronize(self->steps); /* even after a failure: steps may still read the pixels */
    (void)cudaFree(pixels);
    return status;
}

/* Opens a matrix product and calibrates it to take `step_s` seconds. Fills self->consumer.facts. */
static enum status measure_product(struct cuda_consumer *self, double step_s)
{
    self->consumer.facts.length_s = step_s;
    TRY(product_open(self->device, self->steps, &self->product));
    TRY(calibrate(self, step_s));
    return measure_bus(self, nullptr);
}

/* ---- Steps and their waiting times ---- */

static struct cuda_consumer *self_of(struct consumer *consumer)
{
    return reinterpret_cast<struct cuda_consumer *>(consumer);
}

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
    return CUDA_STATUS(cudaEventRecord(self->origin, self->steps));
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
    return CUDA_STATUS(cudaEventSynchronize(static_cast<cudaEvent_t>(done_event)));
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
        CUDA_STATUS(cudaMemcpyAsync(slot->device, slot->pinned, bytes, cudaMemcpyHostToDevice, self->copies));
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaEventRecord(slot->copied, self->copies));
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

/* Returns the maximum number of steps of --compute MS in flight: at least 2, so that a step follows another
 * without a gap. */
static unsigned steps_ahead(const struct product *product)
{
    const unsigned steps = KERNELS_AHEAD / product_kernels(product);
    return steps < 2 ? 2 : steps < CONSUMER_STEPS_AHEAD ? steps : CONSUMER_STEPS_AHEAD;
}

static enum status make(struct cuda_consumer *self, double step_s, const struct task *task)
{
    TRY(device_probe(self->device));
    CUDA_TRY(cudaSetDevice(self->device));
    self->ahead = TRAINING_STEPS_AHEAD;
    self->share = task ? task->share : 0;
    if (task)
        TRY(step_backend_open(self->device, task, &self->backend));
    TRY(make_streams(self));
    TRY(task ? measure_task(self, task) : measure_product(self, step_s));
    if (!task)
        self->ahead = steps_ahead(&self->product);
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
