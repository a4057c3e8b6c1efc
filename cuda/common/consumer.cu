/* The accelerator at work: a training step, as a matrix product of a calibrated length or the trainer's own,
 * and the events around each step that tell what it waited for. */
#include "core/consumer.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/device.h"
#include "core/learner.h"

/* ---- The step of a given length ---- */

/* Products of float32 matrices, A and B of SIDE x SIDE values: a block multiplies a strip of A by a strip of
 * B, of a part of their depth, into a tile of C. Strips are short, so that a block takes some tens of
 * microseconds and blocks of other kernels get in between, as they do between the kernels of a network. The
 * length of a step is a number of units, each a wave of blocks going DEPTH deeper. */
#define SIDE       2048
#define TILE       64
#define DEPTH      8
#define BLOCK      256 /* threads: 16 x 16, each 4 x 4 values of the tile */
#define WAVE_UNITS 24  /* of a block, about */
#define TILES      (SIDE / TILE * (SIDE / TILE))

struct step {
    float *matrices; /* A, B, C */
    unsigned wave;   /* blocks that the device runs at a time */
    unsigned units;  /* of a step; the length in time is proportional to it */
};

static __global__ void __launch_bounds__(BLOCK) fill_kernel(float *values, size_t count)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < count) /* in [-1, 1), with bits that switch as those of weights do: zeros would draw less power */
        values[i] = (float)(int32_t)((uint32_t)i * 2654435761u) * 0x1p-31f;
}

/* The first `deep` blocks are a unit deeper than `units`. */
static __global__ void __launch_bounds__(BLOCK)
    product_kernel(const float *a, const float *b, float *c, unsigned units, unsigned deep)
{
    __shared__ float rows[DEPTH][TILE + 4], columns[DEPTH][TILE];
    unsigned tile = blockIdx.x % TILES, x = threadIdx.x % 16, y = threadIdx.x / 16;
    unsigned row = tile / (SIDE / TILE) * TILE, column = tile % (SIDE / TILE) * TILE;
    unsigned begin = blockIdx.x / TILES * WAVE_UNITS; /* each time round another part of the depth */
    float sums[4][4] = {};
    if (blockIdx.x < deep)
        units++;
    for (unsigned unit = 0; unit < units; unit++) {
        unsigned depth = (begin + unit) * DEPTH % SIDE;
        for (unsigned i = threadIdx.x; i < TILE * DEPTH; i += BLOCK) {
            rows[i % DEPTH][i / DEPTH] = a[(size_t)(row + i / DEPTH) * SIDE + depth + i % DEPTH];
            columns[i / TILE][i % TILE] = b[(size_t)(depth + i / TILE) * SIDE + column + i % TILE];
        }
        __syncthreads();
        for (unsigned d = 0; d < DEPTH; d++)
            for (unsigned i = 0; i < 4; i++)
                for (unsigned j = 0; j < 4; j++)
                    sums[i][j] = fmaf(rows[d][4 * y + i], columns[d][4 * x + j], sums[i][j]);
        __syncthreads();
    }
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 4; j++)
            c[(size_t)(row + 4 * y + i) * SIDE + column + 4 * x + j] = sums[i][j];
}

static enum status launch_product(const struct step *step, cudaStream_t stream)
{
    const size_t values = (size_t)SIDE * SIDE;
    unsigned waves = (step->units + WAVE_UNITS - 1) / WAVE_UNITS;
    product_kernel<<<step->wave * waves, BLOCK, 0, stream>>>(step->matrices, step->matrices + values,
                                                             step->matrices + 2 * values, step->units / waves,
                                                             step->units % waves * step->wave);
    CUDA_TRY_LAUNCH("product_kernel");
    return STATUS_OK;
}

static enum status make_matrices(int device, struct step *step, cudaStream_t stream)
{
    const size_t values = (size_t)3 * SIDE * SIDE;
    int multiprocessors, blocks;
    CUDA_TRY(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, product_kernel, BLOCK, 0));
    step->wave = (unsigned)(multiprocessors * blocks);
    if (cudaMalloc(&step->matrices, values * sizeof(float)) != cudaSuccess) {
        (void)cudaGetLastError(); /* the next call must not see it again */
        return status_set(
            STATUS_FAILED,
            "GPU %d has no %.0f MB of memory left for the step's matrices; free some, or take another "
            "GPU with --device",
            device, 1e-6 * (double)(values * sizeof(float)));
    }
    fill_kernel<<<(unsigned)((values + BLOCK - 1) / BLOCK), BLOCK, 0, stream>>>(step->matrices, values);
    CUDA_TRY_LAUNCH("fill_kernel");
    return STATUS_OK;
}

/* ---- The consumer ---- */

/* A step of the trainer's is dozens of launches, of which a device takes some thousand: who made more would
 * wait within one, and every other call with it. */
#define LESSONS_AHEAD 8

#define RING          4 /* host batches under way */

struct slot {
    void *pinned, *device;
    size_t bytes;
    uint64_t turn;      /* batches that have been through it */
    cudaEvent_t copied; /* the batch is on the device */
    cudaEvent_t done;   /* behind the step on it; NULL before the first */
};

struct cuda_consumer {
    struct consumer consumer; /* first */
    int device;
    pthread_mutex_t lock;   /* over all below, but for what a slot's own thread fills */
    pthread_cond_t changed; /* a slot's turn */
    struct step step;
    struct learner *learner; /* makes the steps; NULL: `step` does */
    unsigned ahead;          /* steps under way, at most */
    cudaStream_t steps, copies;
    cudaEvent_t origin; /* where the span begins */
    cudaEvent_t begins[CONSUMER_STEPS_AHEAD], ends[CONSUMER_STEPS_AHEAD];
    cudaEvent_t last_end;                /* of the latest step that was counted */
    uint64_t enqueued, counted;          /* steps since the opening */
    uint64_t span_first;                 /* the first step of the span */
    double wait_s, first_wait_s, busy_s; /* of its steps that were counted */
    uint64_t tickets;                    /* host batches so far */
    struct slot ring[RING];
};

static struct cuda_consumer *self_of(struct consumer *consumer)
{
    return reinterpret_cast<struct cuda_consumer *>(consumer);
}

/* One step, enqueued: on `batch`, which a product does not look at. */
static enum status make_step(struct cuda_consumer *self, const struct batch *batch)
{
    return self->learner ? learner_step(self->learner, batch) : launch_product(&self->step, self->steps);
}

/* ---- Calibration ---- */

#define UNITS_MAX     (1u << 26)
#define WARM_S        0.3  /* clocks rise under load, and fall as it heats up */
#define ROUND_S       0.05 /* of a measurement, at least */
#define REPEATS_MIN   5
#define REPEATS_MAX   64
#define ROUNDS_MAX    12
#define ERROR_WANTED  0.003
#define ERROR_SILENT  0.02
#define ERROR_ALLOWED 0.1

static int by_value(const void *a, const void *b)
{
    double left = *static_cast<const double *>(a), right = *static_cast<const double *>(b);
    return (left > right) - (left < right);
}

/* The median time of `repeats` steps that follow each other. */
static enum status measure(struct cuda_consumer *self, const struct batch *batch, int repeats, double *step_s)
{
    static_assert(REPEATS_MAX < CONSUMER_STEPS_AHEAD, "calibration borrows the events of steps");
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

/* Changes the product's units until a step takes wanted_s. */
static enum status calibrate(struct cuda_consumer *self, double wanted_s)
{
    struct step *step = &self->step;
    double *alone_s = &self->consumer.facts.alone_s, warmed_s = 0;
    step->units = WAVE_UNITS;
    for (int turn = 0; turn < ROUNDS_MAX || warmed_s < WARM_S; turn++) {
        int repeats = turn == 0 ? REPEATS_MIN : repeats_of(ROUND_S, wanted_s);
        TRY(measure(self, nullptr, repeats, alone_s));
        warmed_s += repeats * *alone_s;
        if (warmed_s >= WARM_S && fabs(*alone_s / wanted_s - 1) < ERROR_WANTED)
            return STATUS_OK;
        double units = round(step->units * (wanted_s / *alone_s));
        if (units < 1 || units > UNITS_MAX)
            return status_set(STATUS_FAILED, "no step of %g ms can be made on this GPU", 1e3 * wanted_s);
        if (turn + 1 < ROUNDS_MAX || warmed_s < WARM_S)
            step->units = (unsigned)units;
    }
    double error = fabs(*alone_s / wanted_s - 1);
    if (error > ERROR_SILENT && error < ERROR_ALLOWED)
        status_warn(
            "--compute: a step of %g ms takes %.4g ms, as the GPU's clocks change or something else is "
            "using it; quiet it, or take a longer step",
            1e3 * wanted_s, 1e3 * *alone_s);
    if (error < ERROR_ALLOWED)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "a step of %g ms took %.4g ms after %d rounds of calibration: the GPU's clocks change "
                      "or something else is using it; quiet it, or take a longer step",
                      1e3 * wanted_s, 1e3 * *alone_s, ROUNDS_MAX);
}

/* The same of the trainer's own, which takes as long as it takes. */
static enum status measure_alone(struct cuda_consumer *self, const struct batch *batch)
{
    double *alone_s = &self->consumer.facts.alone_s;
    TRY(measure(self, batch, REPEATS_MIN, alone_s)); /* the first ones load kernels */
    for (double warmed_s = 0; warmed_s < WARM_S;) {
        int repeats = repeats_of(ROUND_S, *alone_s);
        TRY(measure(self, batch, repeats, alone_s));
        warmed_s += repeats * *alone_s;
    }
    return STATUS_OK;
}

/* ---- The bus ---- */

/* Steps and pinned copies to the device, each in groups that follow each other without a gap. Copies are
 * there for about twice as long as steps, and of both only groups count beside which the other was at work
 * from begin to end. */
#define BUS_BYTES  ((size_t)64 << 20) /* of a copy */
#define BUS_GROUPS 32
#define BUS_TIME_S 0.15 /* of steps, at least */
#define BUS_STEPS  3    /* groups of them, at least */

struct bus {
    void *pinned, *device;
    cudaEvent_t *step_begins, *step_ends, *copy_begins, *copy_ends; /* BUS_GROUPS each */
    int steps, groups;                                              /* of a group; groups of steps */
    int copies;                                                     /* of a group; there are BUS_GROUPS */
    double copies_s;                                                /* a group of them alone */
};

static enum status make_copies(struct cuda_consumer *self, const struct bus *bus, int group)
{
    CUDA_TRY(cudaEventRecord(bus->copy_begins[group], self->copies));
    for (int i = 0; i < bus->copies; i++)
        CUDA_TRY(cudaMemcpyAsync(bus->device, bus->pinned, BUS_BYTES, cudaMemcpyHostToDevice, self->copies));
    CUDA_TRY(cudaEventRecord(bus->copy_ends[group], self->copies));
    return STATUS_OK;
}

static enum status make_steps(struct cuda_consumer *self, const struct batch *batch, const struct bus *bus,
                              int group)
{
    CUDA_TRY(cudaEventRecord(bus->step_begins[group], self->steps));
    for (int i = 0; i < bus->steps; i++)
        TRY(make_step(self, batch));
    CUDA_TRY(cudaEventRecord(bus->step_ends[group], self->steps));
    return STATUS_OK;
}

/* The mean time of those groups that began after `after` and ended before `before`; NaN where there is none.
 */
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

/* Copies alone; then how many make a group. */
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

static enum status run_bus(struct cuda_consumer *self, const struct batch *batch, struct bus *bus)
{
    struct consumer_facts *facts = &self->consumer.facts;
    double wanted_s = fmax(BUS_TIME_S, BUS_STEPS * facts->alone_s), steps_s, copies_s;
    bus->groups = (int)fmin(BUS_GROUPS, ceil(wanted_s / facts->alone_s));
    bus->steps = (int)ceil(wanted_s / (bus->groups * facts->alone_s));
    TRY(copy_alone(self, bus, bus->groups * bus->steps * facts->alone_s));
    for (int group = 0; group < BUS_GROUPS; group++) { /* in turns, as a full queue would hold up the other */
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
    facts->bus_slowdown = steps_s / (bus->steps * facts->alone_s);
    return STATUS_OK;
}

/* What a step and pinned copies take from each other, before any loader is there. */
static enum status measure_bus(struct cuda_consumer *self, const struct batch *batch)
{
    static_assert(2 * BUS_GROUPS <= CONSUMER_STEPS_AHEAD, "it borrows the events of steps");
    struct bus bus = {};
    bus.step_begins = self->begins;
    bus.step_ends = self->begins + BUS_GROUPS;
    bus.copy_begins = self->ends;
    bus.copy_ends = self->ends + BUS_GROUPS;
    enum status status =
        cuda_status(cudaMallocHost(&bus.pinned, BUS_BYTES), "cudaMallocHost", __FILE__, __LINE__);
    if (status == STATUS_OK)
        status = cuda_status(cudaMalloc(&bus.device, BUS_BYTES), "cudaMalloc", __FILE__, __LINE__);
    if (status == STATUS_OK) {
        memset(bus.pinned, 1, BUS_BYTES);
        status = run_bus(self, batch, &bus);
    }
    (void)cudaFreeHost(bus.pinned);
    (void)cudaFree(bus.device);
    return status;
}

/* ---- Steps, and what they waited for ---- */

/* Waits for the oldest step that was not counted yet, and counts it. Its end stands in last_end until the
 * next one is counted, which asks for it; the event that was there takes its place in the ring. */
static enum status count_step(struct cuda_consumer *self)
{
    uint64_t at = self->counted % CONSUMER_STEPS_AHEAD;
    bool first = self->counted == self->span_first;
    float wait_ms, step_ms;
    CUDA_TRY(cudaEventSynchronize(self->ends[at]));
    CUDA_TRY(cudaEventElapsedTime(&wait_ms, first ? self->origin : self->last_end, self->begins[at]));
    CUDA_TRY(cudaEventElapsedTime(&step_ms, self->begins[at], self->ends[at]));
    *(first ? &self->first_wait_s : &self->wait_s) += 1e-3 * wait_ms;
    self->busy_s += 1e-3 * step_ms;
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

/* A step on a batch on the device, behind `ready` (NULL: at once). */
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
    self->enqueued++;
    *done = self->ends[at];
    return STATUS_OK;
}

static enum status begin_span(struct cuda_consumer *self)
{
    TRY(count_all(self));
    self->span_first = self->counted;
    self->wait_s = self->first_wait_s = self->busy_s = 0;
    CUDA_TRY(cudaEventRecord(self->origin, self->steps));
    return STATUS_OK;
}

static enum status cuda_renew(struct consumer *consumer)
{
    struct cuda_consumer *self = self_of(consumer);
    CUDA_TRY(cudaSetDevice(self->device));
    pthread_mutex_lock(&self->lock);
    enum status status = count_all(self);
    if (status == STATUS_OK && self->learner)
        status = learner_begin(self->learner);
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
    times->steps = self->counted - self->span_first;
    times->loss = NAN;
    if (status == STATUS_OK && self->learner)
        status = learner_loss(self->learner, &times->loss);
    if (times->steps) {
        times->first_wait_s = self->first_wait_s;
        times->wait_s = self->wait_s;
        times->step_s = self->busy_s / (double)times->steps;
        times->span_s = self->first_wait_s + self->wait_s + self->busy_s;
    }
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

/* The next slot of the ring, once the batch before in it has been handed over. */
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

/* The next in turn may have it, also after a failure: nobody waits for good. */
static void leave_slot(struct cuda_consumer *self, struct slot *slot)
{
    pthread_mutex_lock(&self->lock);
    slot->turn++;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

/* Values in a slot end, and labels begin, at a multiple of this. */
#define SLOT_ALIGNMENT ((size_t)16)

/* Copies the batch into the slot's pinned memory: values, and labels behind them. `*there` is the batch as it
 * will be on the device, `*bytes` what of the slot is to be copied. */
static enum status fill_slot(struct slot *slot, const struct batch *batch, struct batch *there, size_t *bytes)
{
    size_t labels_at = (batch->bytes + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
    size_t labels_bytes = batch->labels ? batch->count * sizeof *batch->labels : 0;
    *bytes = labels_bytes ? labels_at + labels_bytes : batch->bytes;
    if (grow_slot(slot, *bytes) != STATUS_OK)
        return status_prefix(STATUS_FAILED,
                             "--compute: no memory for %d batches of %.1f MB on their way to the GPU", RING,
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

/* Copies the batch and enqueues its step. The slot is this thread's alone. */
static enum status pass_through(struct cuda_consumer *self, struct slot *slot, const struct batch *batch)
{
    struct batch there;
    size_t bytes;
    if (slot->done) /* the ring is full */
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

static void destroy(cudaEvent_t event)
{
    if (event)
        (void)cudaEventDestroy(event);
}

/* Nothing can be done about an error here, and nothing depends on it. */
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
    for (int i = 0; i < CONSUMER_STEPS_AHEAD; i++) {
        destroy(self->begins[i]);
        destroy(self->ends[i]);
    }
    destroy(self->last_end);
    destroy(self->origin);
    (void)cudaFree(self->step.matrices);
    if (self->copies)
        (void)cudaStreamDestroy(self->copies);
    if (self->steps && !self->learner)
        (void)cudaStreamDestroy(self->steps);
    learner_close(self->learner);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

/* Steps give way to whoever makes the next batch; copies do not wait for kernels anyway. */
static enum status make_streams(struct cuda_consumer *self)
{
    int lowest, highest;
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    if (self->learner)
        self->steps = static_cast<cudaStream_t>(self->learner->stream);
    else
        CUDA_TRY(cudaStreamCreateWithPriority(&self->steps, cudaStreamNonBlocking, lowest));
    CUDA_TRY(cudaStreamCreateWithFlags(&self->copies, cudaStreamNonBlocking));
    for (int i = 0; i < CONSUMER_STEPS_AHEAD; i++) {
        CUDA_TRY(cudaEventCreate(&self->begins[i]));
        /* Threads that wait leave their core to those that load. */
        CUDA_TRY(cudaEventCreateWithFlags(&self->ends[i], cudaEventBlockingSync));
    }
    CUDA_TRY(cudaEventCreateWithFlags(&self->last_end, cudaEventBlockingSync));
    CUDA_TRY(cudaEventCreate(&self->origin));
    for (int i = 0; i < RING; i++)
        CUDA_TRY(cudaEventCreateWithFlags(&self->ring[i].copied, cudaEventDisableTiming));
    return STATUS_OK;
}

/* Random pixels, before there are others: what of a step's length depends on them is little. */
static enum status measure_lesson(struct cuda_consumer *self, const struct lesson *lesson)
{
    size_t sample_bytes = (size_t)lesson->channels * lesson->height * lesson->width;
    size_t floats = (lesson->batch * sample_bytes + sizeof(float) - 1) / sizeof(float);
    float *pixels;
    if (cudaMalloc(&pixels, floats * sizeof *pixels) != cudaSuccess) {
        (void)cudaGetLastError();
        return status_set(STATUS_USAGE, "no memory is left on GPU %d for a batch of %.1f MB; lower --batch",
                          self->device, 1e-6 * (double)(lesson->batch * sample_bytes));
    }
    struct batch batch = {};
    batch.values = pixels;
    batch.stride = sample_bytes;
    batch.bytes = lesson->batch * sample_bytes;
    batch.count = lesson->batch;
    fill_kernel<<<(unsigned)((floats + BLOCK - 1) / BLOCK), BLOCK, 0, self->steps>>>(pixels, floats);
    enum status status = cuda_status(cudaGetLastError(), "launch of fill_kernel", __FILE__, __LINE__);
    if (status == STATUS_OK)
        status = measure_alone(self, &batch);
    if (status == STATUS_OK)
        status = measure_bus(self, &batch);
    self->consumer.facts.length_s = self->consumer.facts.alone_s;
    (void)cudaStreamSynchronize(self->steps); /* also after a failure: steps may read the pixels */
    (void)cudaFree(pixels);
    return status;
}

static enum status measure_product(struct cuda_consumer *self, double step_s)
{
    self->consumer.facts.length_s = step_s;
    TRY(make_matrices(self->device, &self->step, self->steps));
    TRY(calibrate(self, step_s));
    return measure_bus(self, nullptr);
}

static enum status make(struct cuda_consumer *self, double step_s, const struct lesson *lesson)
{
    TRY(device_probe(self->device));
    CUDA_TRY(cudaSetDevice(self->device));
    self->ahead = lesson ? LESSONS_AHEAD : CONSUMER_STEPS_AHEAD;
    if (lesson)
        TRY(learner_open(self->device, lesson, &self->learner));
    TRY(make_streams(self));
    TRY(lesson ? measure_lesson(self, lesson) : measure_product(self, step_s));
    TRY(cuda_renew(&self->consumer));
    return begin_span(self);
}

extern "C" enum status consumer_open(int device, double step_s, const struct lesson *lesson,
                                     struct consumer **consumer)
{
    static const struct consumer_type type = {cuda_renew, cuda_begin,  cuda_take_host, cuda_take_device,
                                              cuda_wait,  cuda_finish, cuda_close};
    struct cuda_consumer *self = static_cast<struct cuda_consumer *>(calloc(1, sizeof *self));
    *consumer = nullptr;
    if (!self)
        return status_set(STATUS_FAILED, "out of memory");
    self->consumer.type = &type;
    self->device = device;
    pthread_mutex_init(&self->lock, nullptr);
    pthread_cond_init(&self->changed, nullptr);
    enum status status = make(self, step_s, lesson);
    if (status != STATUS_OK) {
        cuda_close(&self->consumer);
        return status_prefix(status, "--compute");
    }
    *consumer = &self->consumer;
    return STATUS_OK;
}
