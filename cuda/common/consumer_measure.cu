/* Measures the duration of a training step alone, and how steps and host-to-device copies slow each other
 * down. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/consumer_parts.cuh"

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

/* ---- Both measurements ---- */

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
    CUDA_TRY_LAUNCH("fill_kernel");
    return STATUS_OK;
}

/* Measures steps on random u8 pixels, because no batch has been loaded yet. The pixels hardly influence the
 * duration of a step. If the real batches have a wider type than u8, their steps take longer than measured,
 * because more bytes are converted. */
enum status measure_task(struct cuda_consumer *self, const struct task *task)
{
    size_t sample_bytes = (size_t)task->channels * task->height * task->width;
    size_t bytes = task->share * sample_bytes;
    uint8_t *pixels;
    cudaError_t error = cudaMalloc(&pixels, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
        return status_set(STATUS_TOO_LARGE, "GPU %d has no memory left for a batch of %.1f MB; lower --batch",
                          self->device, 1e-6 * (double)bytes);
    }
    CUDA_TRY(error);
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

enum status measure_product(struct cuda_consumer *self, double step_s)
{
    self->consumer.facts.length_s = step_s;
    TRY(product_open(self->device, self->steps, &self->product));
    TRY(calibrate(self, step_s));
    return measure_bus(self, nullptr);
}
