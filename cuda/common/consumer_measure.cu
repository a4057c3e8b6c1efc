/* What a training step takes with nothing beside it, and what it and the bus take from each other. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/consumer_parts.cuh"

/* ---- Alone ---- */

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
            return status_set(STATUS_FAILED, "no step of %g ms can be made on this GPU", 1e3 * wanted_s);
        if (turn + 1 < ROUNDS_MAX || warmed_s < WARM_S)
            product->units = (unsigned)units;
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
    double copies_s, steps_s;                                       /* a group of each alone */
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

/* Steps alone, in the groups that they will run in beside copies: what a group costs, and clocks that have
 * fallen since a step was measured, are in both. */
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
    facts->bus_slowdown = steps_s / bus->steps_s;
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

/* ---- All of it ---- */

#define FILL_BLOCK 256

/* Each gray about as often: the top bits of a hash of the number, by the last mixing of MurmurHash3. */
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
    CUDA_TRY_LAUNCH("fill_kernel");
    return STATUS_OK;
}

/* Random pixels, before there are others: what of a step's length depends on them is little. They are bytes;
 * wider types take longer on their way into the step. */
enum status measure_task(struct cuda_consumer *self, const struct task *task)
{
    size_t sample_bytes = (size_t)task->channels * task->height * task->width;
    size_t bytes = task->share * sample_bytes;
    uint8_t *pixels;
    if (cudaMalloc(&pixels, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return status_set(STATUS_USAGE, "no memory is left on GPU %d for a batch of %.1f MB; lower --batch",
                          self->device, 1e-6 * (double)bytes);
    }
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
    (void)cudaStreamSynchronize(self->steps); /* also after a failure: steps may read the pixels */
    (void)cudaFree(pixels);
    return status;
}

enum status measure_product(struct cuda_consumer *self, double step_s)
{
    self->consumer.facts.length_s = step_s;
    TRY(product_open(self->device, self->steps, &self->product));
    TRY(calibrate(self, step_s));
    return measure_bus(self, nullptr);
}
