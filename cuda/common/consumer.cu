/* The consumer on a GPU: runs a training step for every batch, and times how long each step waits for its
 * batch. A step is a matrix product of calibrated duration. When the consumer opens, it measures the duration
 * of a step alone, and how steps and host-to-device copies slow each other down. */
#include "core/consumer.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/product.cuh"
#include "common/stream.cuh"
#include "machine/device.h"

/* Maximum number of kernels in flight. About a thousand launches can be queued. When the queue is full, a
 * launch blocks, and all other CUDA calls wait for that launch. */
#define KERNELS_AHEAD 512
#define RING          4 /* number of slots, which limits the number of host batches in flight */

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
    unsigned ahead; /* maximum number of steps in flight */
    cudaStream_t steps, copies;
    cudaEvent_t origin; /* start of the span, which lasts from consumer_begin() to consumer_finish() */
    cudaEvent_t begins[CONSUMER_STEPS_AHEAD], ends[CONSUMER_STEPS_AHEAD];
    cudaEvent_t last_end;       /* end of the latest counted step */
    uint64_t enqueued, counted; /* steps enqueued and steps counted since consumer_open() */
    uint64_t span_first;        /* number of the first step of the span */
    struct consumer_times span; /* sums over the counted steps of the span */
    uint64_t tickets;           /* number of host batches received so far */
    struct slot ring[RING];
};

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
static enum status measure(struct cuda_consumer *self, int repeats, double *step_s)
{
    static_assert(REPEATS_MAX < CONSUMER_STEPS_AHEAD, "calibration reuses the events of steps");
    double times_s[REPEATS_MAX];
    cudaEvent_t *events = self->begins;
    CUDA_TRY(cudaEventRecord(events[0], self->steps));
    for (int i = 0; i < repeats; i++) {
        TRY(product_launch(&self->product, self->steps));
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
    double *alone_s = &self->consumer.alone_s, warmed_s = 0;
    for (int turn = 0; turn < ROUNDS_MAX || warmed_s < WARM_S; turn++) {
        int repeats = turn == 0 ? REPEATS_MIN : repeats_of(ROUND_S, wanted_s);
        TRY(measure(self, repeats, alone_s));
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

static enum status make_steps(struct cuda_consumer *self, const struct bus *bus, int group)
{
    CUDA_TRY(cudaEventRecord(bus->step_begins[group], self->steps));
    for (int i = 0; i < bus->steps; i++)
        TRY(product_launch(&self->product, self->steps));
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
static enum status step_alone(struct cuda_consumer *self, struct bus *bus)
{
    for (int group = 0; group < bus->groups; group++)
        TRY(make_steps(self, bus, group));
    CUDA_TRY(cudaStreamSynchronize(self->steps));
    return mean_between(bus->step_begins, bus->step_ends, bus->groups, bus->step_begins[0],
                        bus->step_ends[bus->groups - 1], &bus->steps_s);
}

static enum status run_bus(struct cuda_consumer *self, struct bus *bus)
{
    const double alone_s = self->consumer.alone_s;
    double wanted_s = fmax(BUS_TIME_S, BUS_STEPS * alone_s), steps_s, copies_s;
    bus->groups = (int)fmin(BUS_GROUPS, ceil(wanted_s / alone_s));
    bus->steps = (int)ceil(wanted_s / (bus->groups * alone_s));
    TRY(copy_alone(self, bus, bus->groups * bus->steps * alone_s));
    TRY(step_alone(self, bus));
    /* Alternate between the streams: if the launch queue filled with steps, copies could not be enqueued. */
    for (int group = 0; group < BUS_GROUPS; group++) {
        if (group < bus->groups)
            TRY(make_steps(self, bus, group));
        TRY(make_copies(self, bus, group));
    }
    CUDA_TRY(cudaStreamSynchronize(self->steps));
    CUDA_TRY(cudaStreamSynchronize(self->copies));
    TRY(mean_between(bus->step_begins, bus->step_ends, bus->groups, bus->copy_begins[0],
                     bus->copy_ends[BUS_GROUPS - 1], &steps_s));
    TRY(mean_between(bus->copy_begins, bus->copy_ends, BUS_GROUPS, bus->step_begins[0],
                     bus->step_ends[bus->groups - 1], &copies_s));
    self->consumer.bus_share = bus->copies_s / copies_s;
    self->consumer.bus_slowdown = steps_s / bus->steps_s;
    return STATUS_OK;
}

/* Measures how steps and pinned copies slow each other down. Call before any loader starts. */
static enum status measure_bus(struct cuda_consumer *self)
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
        status = run_bus(self, &bus);
    }
    (void)cudaFreeHost(bus.pinned);
    (void)cudaFree(bus.device);
    return status;
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

/* Enqueues a step. If the event `ready` is not NULL, the step waits for it. Sets `*done` to an event that is
 * recorded after the step. If the maximum number of steps is in flight, first waits for the oldest one. */
static enum status enqueue(struct cuda_consumer *self, cudaEvent_t ready, cudaEvent_t *done)
{
    if (self->enqueued - self->counted == self->ahead)
        TRY(count_step(self));
    uint64_t at = self->enqueued % CONSUMER_STEPS_AHEAD;
    if (ready)
        CUDA_TRY(cudaStreamWaitEvent(self->steps, ready, 0));
    CUDA_TRY(cudaEventRecord(self->begins[at], self->steps));
    TRY(product_launch(&self->product, self->steps));
    CUDA_TRY(cudaEventRecord(self->ends[at], self->steps));
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
    pthread_mutex_unlock(&self->lock);
    return status;
}

static enum status cuda_wait(struct consumer *consumer, void *done_event)
{
    CUDA_TRY(cudaSetDevice(self_of(consumer)->device));
    return CUDA_STATUS(cudaEventSynchronize(static_cast<cudaEvent_t>(done_event)));
}

static enum status cuda_take_device(struct consumer *consumer, void *ready_event, void **done_event)
{
    struct cuda_consumer *self = self_of(consumer);
    cudaEvent_t done = nullptr;
    CUDA_TRY(cudaSetDevice(self->device));
    pthread_mutex_lock(&self->lock);
    enum status status = enqueue(self, static_cast<cudaEvent_t>(ready_event), &done);
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

/* Copies the batch to the device and enqueues its step. The calling thread owns the slot. */
static enum status pass_through(struct cuda_consumer *self, struct slot *slot, const void *values,
                                size_t bytes)
{
    if (slot->done) /* the step on the slot's previous batch may still be running */
        CUDA_TRY(cudaEventSynchronize(slot->done));
    slot->done = nullptr;
    enum status status = grow_slot(slot, bytes);
    if (status != STATUS_OK)
        return status_prefix(
            status, "--compute: cannot allocate %d buffers of %.1f MB each in host and device memory", RING,
            1e-6 * (double)bytes);
    if (bytes)
        memcpy(slot->pinned, values, bytes);
    pthread_mutex_lock(&self->lock);
    status =
        CUDA_STATUS(cudaMemcpyAsync(slot->device, slot->pinned, bytes, cudaMemcpyHostToDevice, self->copies));
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaEventRecord(slot->copied, self->copies));
    if (status == STATUS_OK)
        status = enqueue(self, slot->copied, &slot->done);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static enum status cuda_take_host(struct consumer *consumer, const void *values, size_t bytes)
{
    struct cuda_consumer *self = self_of(consumer);
    CUDA_TRY(cudaSetDevice(self->device));
    struct slot *slot = take_slot(self);
    enum status status = pass_through(self, slot, values, bytes);
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
    destroy(self->copies, self->steps);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

/* Steps have the lowest priority, so that they do not delay kernels that produce the next batch. */
static enum status make_streams(struct cuda_consumer *self)
{
    int lowest, highest;
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
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

/* Returns the maximum number of steps in flight: at least 2, so that a step follows another
 * without a gap. */
static unsigned steps_ahead(const struct product *product)
{
    const unsigned steps = KERNELS_AHEAD / product_kernels(product);
    return steps < 2 ? 2 : steps < CONSUMER_STEPS_AHEAD ? steps : CONSUMER_STEPS_AHEAD;
}

static enum status make(struct cuda_consumer *self, double step_s)
{
    TRY(device_probe(self->device));
    CUDA_TRY(cudaSetDevice(self->device));
    TRY(make_streams(self));
    TRY(product_open(self->device, self->steps, &self->product));
    TRY(calibrate(self, step_s));
    TRY(measure_bus(self));
    self->ahead = steps_ahead(&self->product);
    return begin_span(self);
}

extern "C" enum status consumer_open(int device, double step_s, struct consumer **consumer)
{
    static const struct consumer_type type = {cuda_begin, cuda_take_host, cuda_take_device,
                                              cuda_wait,  cuda_finish,    cuda_close};
    struct cuda_consumer *self = static_cast<struct cuda_consumer *>(calloc(1, sizeof *self));
    *consumer = nullptr;
    TRY(ALLOCATED(self, "out of memory"));
    self->consumer.type = &type;
    self->consumer.length_s = step_s;
    self->device = device;
    pthread_mutex_init(&self->lock, nullptr);
    pthread_cond_init(&self->changed, nullptr);
    enum status status = make(self, step_s);
    if (status != STATUS_OK) {
        cuda_close(&self->consumer);
        return status_prefix(status, "--compute");
    }
    *consumer = &self->consumer;
    return STATUS_OK;
}
