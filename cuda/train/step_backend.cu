/* Trains on batches from other workloads (core/step_backend.h), with the engine of train-bf16. The feed is
 * DATA_CONSTANT: before each step, the incoming batch is converted into the engine's batch buffer. */
#include "core/step_backend.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "core/dtype.h"
#include "common/shared.cuh"
#include "train/engines.cuh"
#include "train/task.h"
#include "train/network.cuh"

#define ENGINE (&engine_bf16)
/* Number of snapshots of the totals: one after each recent step, and one before the first of them. */
#define RECENT       (STEP_BACKEND_RECENT + 1)
#define RATE         0.001 /* Adam's learning rate: PyTorch's default, like Adam's other constants */
#define MOMENT_BLOCK 256
#define MOMENT_PARTS 256 /* blocks per channel */

/* Normalisation of a channel: (v - mean) / deviation, written as v * scale + offset. */
struct normal {
    float scale, offset;
};

/* Partial sums over one channel: of its values, and of their squares. */
struct moment {
    double sum, square;
};

struct step_backend {
    int device;
    struct model model;
    struct data data; /* its training set is the current batch */
    struct train train;
    float *arena; /* host memory: initial parameters, followed by zeros for the optimizer's moments */
    void *engine;
    struct engine_batch batch;
    struct allocations allocations;
    struct normal *normals; /* device memory, per channel */
    struct moment *moments; /* device memory, (channel, part): the sums that `normals` are computed from */
    struct train_totals
        *recent;     /* device memory: entry step % RECENT is the engine's totals after that step */
    bool normalised; /* `normals` are known; they are computed from the first batch */
    uint64_t steps;
};

/* ---- Converting batches ---- */

/* Arguments for reading a batch value by value, in channel-first order. */
struct intake {
    struct batch batch;
    struct divider sample; /* values per sample */
    uint32_t channels, plane, classes;
};

static struct intake intake_of(const struct step_backend *self, const struct batch *batch)
{
    const struct shape *shape = &self->data.shape;
    return {*batch, divider_of((uint32_t)self->data.sample_values), shape->channels,
            shape->height * shape->width, self->data.classes};
}

/* Returns value (channel, position) of sample j. */
static __device__ __forceinline__ float value_at(const struct intake &intake, uint32_t j, uint32_t channel,
                                                 uint32_t position)
{
    const uint8_t *sample = static_cast<const uint8_t *>(intake.batch.values) + j * intake.batch.stride;
    uint32_t i =
        intake.batch.interleaved ? position * intake.channels + channel : channel * intake.plane + position;
    switch (intake.batch.type) {
    case DTYPE_U8:
        return (float)sample[i];
    case DTYPE_F16:
        return half_to_float(reinterpret_cast<const uint16_t *>(sample)[i]);
    case DTYPE_BF16:
        return __uint_as_float((uint32_t) reinterpret_cast<const uint16_t *>(sample)[i] << 16);
    default:
        return reinterpret_cast<const float *>(sample)[i];
    }
}

/* Block (part, channel) sums the values of one channel and their squares in a fixed order, over samples
 * `part`, `part` + MOMENT_PARTS, ... */
static __global__ void __launch_bounds__(MOMENT_BLOCK)
    moment_kernel(const struct intake intake, struct moment *moments)
{
    __shared__ double sums[MOMENT_BLOCK], squares[MOMENT_BLOCK];
    uint32_t channel = blockIdx.y;
    double sum = 0, square = 0;
    for (uint32_t j = blockIdx.x; j < intake.batch.count; j += MOMENT_PARTS)
        for (uint32_t position = threadIdx.x; position < intake.plane; position += MOMENT_BLOCK) {
            float value = value_at(intake, j, channel, position);
            sum += value;
            square += (double)value * value;
        }
    sums[threadIdx.x] = sum;
    squares[threadIdx.x] = square;
    block_sums<MOMENT_BLOCK>(sums, squares);
    if (threadIdx.x == 0)
        moments[channel * MOMENT_PARTS + blockIdx.x] = {sums[0], squares[0]};
}

/* One thread per channel computes mean and deviation over the batch. A constant channel gets a deviation of
 * 1. */
static __global__ void normal_kernel(const struct moment *moments, double count, struct normal *normals)
{
    uint32_t channel = threadIdx.x;
    double sum = 0, square = 0;
    for (uint32_t part = 0; part < MOMENT_PARTS; part++) {
        struct moment moment = moments[channel * MOMENT_PARTS + part];
        sum += moment.sum;
        square += moment.square;
    }
    double mean = sum / count, variance = square / count - mean * mean;
    double deviation = variance > 0 ? sqrt(variance) : 1;
    normals[channel] = {(float)(1 / deviation), (float)(-mean / deviation)};
}

static enum status find_normals(struct step_backend *self, const struct intake &intake)
{
    cudaStream_t stream = self->batch.stream;
    double count = (double)intake.batch.count * intake.plane;
    moment_kernel<<<dim3(MOMENT_PARTS, intake.channels), MOMENT_BLOCK, 0, stream>>>(intake, self->moments);
    CUDA_TRY_LAUNCH("moment_kernel");
    normal_kernel<<<1, intake.channels, 0, stream>>>(self->moments, count, self->normals);
    CUDA_TRY_LAUNCH("normal_kernel");
    self->normalised = true;
    return STATUS_OK;
}

/* Writes the batch in the engine's format: normalised fp16 values, and labels. A label out of range means
 * that the file has changed; the file's checksum will reveal this later. Here such a label becomes 0, because
 * it would be an invalid index. */
static __global__ void intake_kernel(const struct intake intake, const struct normal *normals,
                                     uint16_t *values, uint32_t *labels)
{
    uint32_t i = own_element();
    if (i >= intake.batch.count * intake.sample.by)
        return;
    uint32_t j = intake.sample.quotient(i), element = i - j * intake.sample.by;
    uint32_t channel = element / intake.plane;
    struct normal normal = normals[channel];
    float value = value_at(intake, j, channel, element - channel * intake.plane);
    values[i] = half_from_float(fmaf(value, normal.scale, normal.offset));
    if (element > 0)
        return;
    uint32_t label = intake.batch.labels ? (uint32_t)intake.batch.labels[j]
                                         : (uint32_t)((intake.batch.first + j) % intake.classes);
    labels[j] = label < intake.classes ? label : 0;
}

static enum status take_in(struct step_backend *self, const struct batch *batch)
{
    struct intake intake = intake_of(self, batch);
    cudaStream_t stream = self->batch.stream;
    if (!self->normalised)
        TRY(find_normals(self, intake));
    intake_kernel<<<blocks_for((size_t)batch->count * self->data.sample_values), BLOCK, 0, stream>>>(
        intake, self->normals, static_cast<uint16_t *>(self->batch.values), self->batch.labels);
    return CUDA_LAUNCHED("intake_kernel");
}

/* ---- Steps ---- */

/* Each batch is an epoch of one step. Batches may therefore differ in size. The optimizer's step number and
 * the epoch advance with every batch. The epoch selects the random draws of dropout. */
extern "C" enum status step_backend_step(struct step_backend *self, const struct batch *batch)
{
    if (batch->count == 0 || batch->count > self->train.batch)
        return status_set(STATUS_FAILED, "a batch has %u samples, but the trainer takes 1 to %u",
                          batch->count, self->train.batch);
    if (self->steps >= UINT32_MAX)
        return status_set(STATUS_FAILED, "the trainer supports at most %u steps", UINT32_MAX);
    CUDA_TRY(cudaSetDevice(self->device));
    TRY(take_in(self, batch));
    self->data.sets[DATA_TRAIN].count = batch->count;
    TRY(ENGINE->steps(self->engine, (uint32_t)self->steps, 0, 1));
    CUDA_TRY(cudaMemcpyAsync(&self->recent[self->steps % RECENT], self->batch.totals, sizeof *self->recent,
                             cudaMemcpyDeviceToDevice, self->batch.stream));
    self->steps++;
    return STATUS_OK;
}

extern "C" enum status step_backend_loss(struct step_backend *self, double *loss)
{
    struct train_totals recent[RECENT];
    *loss = NAN;
    if (self->steps == 0)
        return STATUS_OK;
    CUDA_TRY(cudaSetDevice(self->device));
    CUDA_TRY(
        cudaMemcpyAsync(recent, self->recent, sizeof recent, cudaMemcpyDeviceToHost, self->batch.stream));
    CUDA_TRY(cudaStreamSynchronize(self->batch.stream));
    const struct train_totals *newest = &recent[(self->steps - 1) % RECENT];
    const struct train_totals *oldest = &recent[self->steps % RECENT]; /* zeros until it is written */
    if (newest->bad_step != TRAIN_FINE)
        return status_set(STATUS_FAILED,
                          "the loss of training step %llu is not finite; check the samples for "
                          "NaN and infinite values",
                          (unsigned long long)newest->bad_step);
    *loss = (newest->loss - oldest->loss) / (double)(newest->samples - oldest->samples);
    return STATUS_OK;
}

extern "C" enum status step_backend_reset(struct step_backend *self)
{
    struct train_totals unused;
    float *zeros = self->arena + self->model.arena_values;
    const struct train_state state = {.parameters = self->arena, .m = zeros, .v = zeros, .scale = {}};
    CUDA_TRY(cudaSetDevice(self->device));
    TRY(ENGINE->set(self->engine, &state));
    TRY(ENGINE->totals(self->engine, &unused)); /* resets the totals */
    CUDA_TRY(cudaMemsetAsync(self->recent, 0, RECENT * sizeof *self->recent, self->batch.stream));
    self->steps = 0;
    self->normalised = false;
    return STATUS_OK;
}

/* ---- Opening ---- */

extern "C" void *step_backend_stream(const struct step_backend *self)
{
    return self->batch.stream;
}

extern "C" void step_backend_close(struct step_backend *self)
{
    if (!self)
        return;
    if (self->engine)
        ENGINE->close(self->engine);
    allocations_free(&self->allocations);
    data_close(&self->data);
    free(self->arena);
    free(self);
}

/* The engine copies both sets when it opens, before the first batch arrives. The sets contain zeros. */
static enum status make_sets(struct step_backend *self, uint32_t batch)
{
    struct data *data = &self->data;
    const uint32_t counts[DATA_PARTS] = {batch, 1};
    for (int part = 0; part < DATA_PARTS; part++) {
        struct data_set *set = &data->sets[part];
        set->count = counts[part];
        set->values = calloc(set->count, data->sample_bytes);
        set->labels = static_cast<uint32_t *>(calloc(set->count, sizeof *set->labels));
        if (!set->values || !set->labels)
            return status_set(STATUS_EXHAUSTED, "out of memory for a batch of %u samples; lower --batch",
                              batch);
    }
    return STATUS_OK;
}

/* Frees the values in host memory, because the engine has its own batch buffer. Keeps the counts. */
static void forget_values(struct step_backend *self)
{
    for (int part = 0; part < DATA_PARTS; part++) {
        free(self->data.sets[part].values);
        self->data.sets[part].values = nullptr;
    }
}

static void fill_train(struct step_backend *self, const struct task *task)
{
    struct data *data = &self->data;
    data->shape = self->model.input;
    data->type = DTYPE_F16;
    data->classes = task->classes;
    data->sample_values = shape_values(&data->shape);
    data->sample_bytes = data->sample_values * sizeof(uint16_t);
    data->feed = DATA_CONSTANT;
    for (uint32_t c = 0; c < data->shape.channels; c++)
        data->scale[c] = 1; /* the batch is already normalised */
    self->train.model = &self->model;
    self->train.data = data;
    self->train.batch = task->batch;
    self->train.optimizer.kind = OPTIMIZER_ADAM;
    self->train.optimizer.beta1 = 0.9;
    self->train.optimizer.beta2 = 0.999;
    self->train.optimizer.epsilon = 1e-8;
    self->train.schedule.kind = SCHEDULE_CONSTANT;
    self->train.schedule.rate = RATE;
}

static enum status make(struct step_backend *self, const struct task *task)
{
    const struct resources resources = {.threads = 1, .device = self->device};
    TRY(task_build(task, &self->model));
    fill_train(self, task);
    self->arena = static_cast<float *>(calloc(2 * self->model.arena_values, sizeof *self->arena));
    TRY(ALLOCATED(self->arena, "out of memory for the parameters"));
    model_initialise(&self->model, self->train.seed, self->arena);
    TRY(make_sets(self, task->batch));
    TRY(ENGINE->open(&self->train, &resources, &self->engine));
    self->batch = engine_batch(self->engine);
    forget_values(self);
    TRY(allocate(&self->allocations, &self->normals, task->channels));
    TRY(allocate(&self->allocations, &self->moments, (size_t)task->channels * MOMENT_PARTS));
    TRY(allocate(&self->allocations, &self->recent, RECENT));
    return step_backend_reset(self);
}

extern "C" enum status step_backend_open(int device, const struct task *task, struct step_backend **backend)
{
    struct step_backend *self = static_cast<struct step_backend *>(calloc(1, sizeof *self));
    *backend = nullptr;
    TRY(ALLOCATED(self, "out of memory"));
    self->device = device;
    enum status status = make(self, task);
    if (status != STATUS_OK) {
        step_backend_close(self);
        return status;
    }
    *backend = self;
    return STATUS_OK;
}
