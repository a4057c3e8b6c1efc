/* The variants of the workload `exchange` on GPUs: a run launches a CUDA graph with ALLREDUCE_CALLS calls of
 * a method of allreduce.cuh. */
#include "train/allreduce.cuh"

#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "machine/comm.h"
#include "machine/device.h"
#include "train/allreduce.h"
#include "train/network.cuh"

#define THREADS    256
#define BLOCKS_MAX 4096

/* The method by which a variant exchanges its arrays. */
struct way {
    const struct allreduce_method *method;
    bool updates; /* each call also updates parameters */
    bool fused;   /* the kernel of the exchange updates them; otherwise a separate kernel does */
};

struct allreduce_run {
    const struct allreduce_job *job;
    const struct way *way;
    void *state; /* state of the method */
    void *values;
    struct exchange_update arrays; /* used if way->updates is set; arrays.update has one entry per call */
    size_t moments;                /* number of values in arrays.m and in arrays.v */
    cudaStream_t stream;
    cudaEvent_t begin, end;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    uint64_t number; /* number of the latest run */
};

static __global__ void fill_gradients_kernel(const struct allreduce_job job, uint64_t number, float *values)
{
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += step)
        values[i] = allreduce_gradient(&job, number, job.rank, i);
}

static __global__ void fill_kernel(const struct allreduce_job job, uint64_t number, void *values)
{
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += step)
        allreduce_fill(&job, number, i, values);
}

static enum status enqueue_call(struct allreduce_run *self, int call)
{
    struct exchange_update arrays = self->arrays;
    const size_t count = self->job->count;
    if (self->way->fused) {
        arrays.update += call;
        return allreduce_peer_update(self->state, &arrays, 0, count, self->stream);
    }
    TRY(self->way->method->enqueue(self->state, self->values, count, self->stream));
    const struct update update = allreduce_update(call);
    const struct train_state state = {arrays.parameters, arrays.m, arrays.v, {}};
    const struct update_extras none = {};
    return self->way->updates
               ? parameters_update(&update, count, arrays.gradients, &none, &state, self->stream)
               : STATUS_OK;
}

/* The events are nodes of the graph, so that the time between them does not include the launch of the graph.
 */
static enum status enqueue_calls(struct allreduce_run *self)
{
    CUDA_TRY(cudaEventRecordWithFlags(self->begin, self->stream, cudaEventRecordExternal));
    for (int i = 0; i < ALLREDUCE_CALLS; i++)
        TRY(enqueue_call(self, i));
    return CUDA_STATUS(cudaEventRecordWithFlags(self->end, self->stream, cudaEventRecordExternal));
}

static enum status capture(struct allreduce_run *self)
{
    CUDA_TRY(cudaStreamBeginCapture(self->stream, cudaStreamCaptureModeThreadLocal));
    enum status status = enqueue_calls(self);
    cudaError_t error = cudaStreamEndCapture(self->stream, &self->graph);
    TRY(status);
    TRY(cuda_status(error, "capturing the all-reduces", __FILE__, __LINE__));
    CUDA_TRY(cudaGraphInstantiate(&self->executable, self->graph, 0));
    CUDA_TRY(cudaGraphUpload(self->executable, self->stream));
    return CUDA_STATUS(cudaStreamSynchronize(self->stream));
}

static enum status allocate_array(void **array, size_t bytes)
{
    /* parameters_update() accesses 16 bytes at a time */
    enum status status = CUDA_STATUS(cudaMalloc(array, (bytes + 15) / 16 * 16));
    return status == STATUS_EXHAUSTED
               ? status_set(STATUS_TOO_LARGE, "out of GPU memory for an array of %zu bytes; lower --bytes",
                            bytes)
               : status;
}

static enum status allocate_update(struct allreduce_run *self)
{
    struct exchange_update *arrays = &self->arrays;
    struct update updates[ALLREDUCE_CALLS];
    void *copy;
    for (int call = 0; call < ALLREDUCE_CALLS; call++)
        updates[call] = allreduce_update(call);
    self->moments =
        self->way->fused ? exchange_share_room(self->job->count, self->job->ranks) : self->job->count;
    arrays->gradients = static_cast<float *>(self->values);
    TRY(allocate_array(reinterpret_cast<void **>(&arrays->parameters), self->job->bytes));
    TRY(allocate_array(reinterpret_cast<void **>(&arrays->m), self->moments * sizeof *arrays->m));
    TRY(allocate_array(reinterpret_cast<void **>(&arrays->v), self->moments * sizeof *arrays->v));
    TRY(allocate_array(&copy, sizeof updates));
    arrays->update = static_cast<const struct update *>(copy);
    return CUDA_STATUS(cudaMemcpy(copy, updates, sizeof updates, cudaMemcpyHostToDevice));
}

static enum status allocate_all(struct allreduce_run *self)
{
    TRY(allocate_array(&self->values, self->job->bytes));
    if (self->way->updates)
        TRY(allocate_update(self));
    TRY(stream_open(&self->stream));
    CUDA_TRY(cudaEventCreate(&self->begin));
    return CUDA_STATUS(cudaEventCreate(&self->end));
}

/* The ranks agree before each step in which they wait for each other. These steps are opening the method, and
 * capturing calls, because NCCL connects the ranks in its first call. */
template <const struct way *WAY>
static enum status open_run(const struct resources *resources, const void *input, void **state)
{
    struct allreduce_run *self = static_cast<struct allreduce_run *>(calloc(1, sizeof *self));
    *state = self;
    TRY(comm_agree(ALLOCATED(self, "out of memory")));
    self->job = static_cast<const struct allreduce_job *>(input);
    self->way = WAY;
    self->number = UINT64_MAX;
    const struct allreduce_request request = {.device = resources->device,
                                              .count_max = self->job->count,
                                              .type = self->job->bf16 ? ALLREDUCE_BF16 : ALLREDUCE_F32};
    TRY(comm_agree(CUDA_STATUS(cudaSetDevice(resources->device))));
    TRY(WAY->method->open(&request, &self->state));
    TRY(comm_agree(allocate_all(self)));
    return comm_agree(capture(self));
}

static void close_run(void *state)
{
    struct allreduce_run *self = static_cast<struct allreduce_run *>(state);
    /* Errors are ignored, because no result depends on them. */
    destroy(self->executable, self->graph);
    if (self->state)
        self->way->method->close(self->state);
    destroy(self->begin, self->end, self->stream);
    for (const void *array :
         {static_cast<const void *>(self->arrays.update), static_cast<const void *>(self->arrays.v),
          static_cast<const void *>(self->arrays.m), static_cast<const void *>(self->arrays.parameters),
          static_cast<const void *>(self->values)})
        (void)cudaFree(const_cast<void *>(array));
    free(self);
}

static enum status clear_update(const struct allreduce_run *self)
{
    const size_t bytes = self->moments * sizeof *self->arrays.m;
    CUDA_TRY(cudaMemsetAsync(self->arrays.parameters, 0, self->job->bytes, self->stream));
    CUDA_TRY(cudaMemsetAsync(self->arrays.m, 0, bytes, self->stream));
    return CUDA_STATUS(cudaMemsetAsync(self->arrays.v, 0, bytes, self->stream));
}

static enum status ready(void *state, uint64_t number)
{
    struct allreduce_run *self = static_cast<struct allreduce_run *>(state);
    size_t enough = (self->job->count + THREADS - 1) / THREADS;
    unsigned blocks = enough < BLOCKS_MAX ? (unsigned)enough : BLOCKS_MAX;
    if (self->way->updates) {
        TRY(clear_update(self));
        fill_gradients_kernel<<<blocks, THREADS, 0, self->stream>>>(*self->job, number,
                                                                    self->arrays.gradients);
        CUDA_TRY_LAUNCH("fill_gradients_kernel");
    } else {
        fill_kernel<<<blocks, THREADS, 0, self->stream>>>(*self->job, number, self->values);
        CUDA_TRY_LAUNCH("fill_kernel");
    }
    CUDA_TRY(cudaStreamSynchronize(self->stream));
    self->number = number;
    return STATUS_OK;
}

static enum status run(void *state, uint64_t, struct run_time *time)
{
    struct allreduce_run *self = static_cast<struct allreduce_run *>(state);
    float time_ms = 0;
    CUDA_TRY(cudaGraphLaunch(self->executable, self->stream));
    CUDA_TRY(cudaStreamSynchronize(self->stream));
    TRY(self->way->method->check(self->state));
    CUDA_TRY(cudaEventElapsedTime(&time_ms, self->begin, self->end));
    time->device_s = 1e-3 * time_ms;
    return STATUS_OK;
}

static enum status fetch(void *state, void *result_)
{
    const struct allreduce_run *self = static_cast<const struct allreduce_run *>(state);
    struct allreduce_result *result = static_cast<struct allreduce_result *>(result_);
    CUDA_TRY(cudaMemcpy(result->values, self->way->updates ? self->arrays.parameters : self->values,
                        self->job->bytes, cudaMemcpyDeviceToHost));
    result->number = self->number;
    return STATUS_OK;
}

static uint64_t memory_bytes(const void *state)
{
    const struct allreduce_run *self = static_cast<const struct allreduce_run *>(state);
    return self->way->method->memory_bytes(self->state) + 2 * self->moments * sizeof *self->arrays.m;
}

/* ---- The variants ---- */

template <const struct way *WAY> static enum status probe_by(const struct resources *resources)
{
    TRY(device_probe(resources->device));
    return WAY->method->probe(resources->device);
}

template <const struct way *WAY>
static constexpr struct variant reducing_by(const struct allreduce_traits *traits)
{
    return {.platform = "cuda",
            .traits = traits,
            .probe = probe_by<WAY>,
            .setup = open_run<WAY>,
            .ready = ready,
            .run = run,
            .fetch = fetch,
            .teardown = close_run};
}

static constexpr struct way by_nccl = {&allreduce_nccl, false, false},
                            by_peer = {&allreduce_peer, false, false},
                            by_one_shot = {&allreduce_peer_one_shot, false, false},
                            by_two_shot = {&allreduce_peer_two_shot, false, false},
                            by_two_shot_adam = {&allreduce_peer_two_shot, true, false},
                            by_fused_adam = {&allreduce_peer, true, true};

static const struct allreduce_traits own_traits = {.bf16 = true, .memory_bytes = memory_bytes},
                                     nccl_traits = {.bf16 = true,
                                                    .memory_bytes = memory_bytes,
                                                    .nccl_version = allreduce_nccl_version},
                                     fused_traits = {.updates = true, .memory_bytes = memory_bytes},
                                     two_shot_adam_traits = {
                                         .updates = true, .grows = true, .memory_bytes = memory_bytes};

extern "C" {
extern const struct variant variant_exchange_nccl, variant_exchange_peer, variant_exchange_peer_one_shot,
    variant_exchange_peer_two_shot, variant_exchange_peer_fused_adam, variant_exchange_peer_two_shot_adam;
const struct variant variant_exchange_nccl = reducing_by<&by_nccl>(&nccl_traits);
const struct variant variant_exchange_peer = reducing_by<&by_peer>(&own_traits);
const struct variant variant_exchange_peer_one_shot = reducing_by<&by_one_shot>(&own_traits);
const struct variant variant_exchange_peer_two_shot = reducing_by<&by_two_shot>(&own_traits);
const struct variant variant_exchange_peer_fused_adam = reducing_by<&by_fused_adam>(&fused_traits);
const struct variant variant_exchange_peer_two_shot_adam =
    reducing_by<&by_two_shot_adam>(&two_shot_adam_traits);
}
