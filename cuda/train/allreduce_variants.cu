/* The variants of the workload `exchange` on GPUs: one CUDA graph per run, with ALLREDUCE_CALLS calls of a
 * method of allreduce.cuh. */
#include "train/allreduce.cuh"

#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "machine/comm.h"
#include "machine/device.h"
#include "train/allreduce.h"

#define THREADS    256
#define BLOCKS_MAX 4096

struct allreduce_run {
    const struct allreduce_job *job;
    const struct allreduce_method *method;
    void *state; /* of the method */
    void *values;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    uint64_t number; /* of the latest run */
};

static __global__ void fill_kernel(const struct allreduce_job job, uint64_t number, void *values)
{
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += step)
        allreduce_fill(&job, number, i, values);
}

/* The events are nodes of the graph, so that the time between them does not include the launch of the graph.
 */
static enum status enqueue_calls(struct allreduce_run *self)
{
    CUDA_TRY(cudaEventRecordWithFlags(self->begin, self->stream, cudaEventRecordExternal));
    for (int i = 0; i < ALLREDUCE_CALLS; i++)
        TRY(self->method->enqueue(self->state, self->values, self->job->count, self->stream));
    CUDA_TRY(cudaEventRecordWithFlags(self->end, self->stream, cudaEventRecordExternal));
    return STATUS_OK;
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
    CUDA_TRY(cudaStreamSynchronize(self->stream));
    return STATUS_OK;
}

static enum status allocate(struct allreduce_run *self)
{
    cudaError_t error = cudaMalloc(&self->values, self->job->bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
        return status_set(STATUS_USAGE, "out of GPU memory for an array of %zu bytes; lower --bytes",
                          self->job->bytes);
    }
    TRY(cuda_status(error, "cudaMalloc", __FILE__, __LINE__));
    TRY(stream_open(&self->stream));
    CUDA_TRY(cudaEventCreate(&self->begin));
    CUDA_TRY(cudaEventCreate(&self->end));
    return STATUS_OK;
}

/* The ranks agree before each step in which they wait for each other. These steps are opening the method, and
 * capturing calls, because NCCL connects the ranks in its first call. */
static enum status open_run(const struct allreduce_method *method, const struct resources *resources,
                            const void *input, void **state)
{
    struct allreduce_run *self = static_cast<struct allreduce_run *>(calloc(1, sizeof *self));
    *state = self;
    TRY(comm_agree(self ? STATUS_OK : status_set(STATUS_FAILED, "out of memory")));
    self->job = static_cast<const struct allreduce_job *>(input);
    self->method = method;
    self->number = UINT64_MAX;
    const struct allreduce_request request = {.device = resources->device,
                                              .count_max = self->job->count,
                                              .type = self->job->bf16 ? ALLREDUCE_BF16 : ALLREDUCE_F32};
    TRY(comm_agree(cuda_status(cudaSetDevice(resources->device), "cudaSetDevice", __FILE__, __LINE__)));
    TRY(method->open(&request, &self->state));
    TRY(comm_agree(allocate(self)));
    return comm_agree(capture(self));
}

static void close_run(void *state)
{
    struct allreduce_run *self = static_cast<struct allreduce_run *>(state);
    /* Errors are ignored, because no result depends on them. */
    if (self->executable)
        (void)cudaGraphExecDestroy(self->executable);
    if (self->graph)
        (void)cudaGraphDestroy(self->graph);
    if (self->state)
        self->method->close(self->state);
    if (self->begin)
        (void)cudaEventDestroy(self->begin);
    if (self->end)
        (void)cudaEventDestroy(self->end);
    if (self->stream)
        (void)cudaStreamDestroy(self->stream);
    (void)cudaFree(self->values);
    free(self);
}

static enum status ready(void *state, uint64_t number)
{
    struct allreduce_run *self = static_cast<struct allreduce_run *>(state);
    size_t enough = (self->job->count + THREADS - 1) / THREADS;
    unsigned blocks = enough < BLOCKS_MAX ? (unsigned)enough : BLOCKS_MAX;
    fill_kernel<<<blocks, THREADS, 0, self->stream>>>(*self->job, number, self->values);
    CUDA_TRY_LAUNCH("fill_kernel");
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
    TRY(self->method->check(self->state));
    CUDA_TRY(cudaEventElapsedTime(&time_ms, self->begin, self->end));
    time->device_s = 1e-3 * time_ms;
    return STATUS_OK;
}

static enum status fetch(void *state, void *result_)
{
    const struct allreduce_run *self = static_cast<const struct allreduce_run *>(state);
    struct allreduce_result *result = static_cast<struct allreduce_result *>(result_);
    CUDA_TRY(cudaMemcpy(result->values, self->values, self->job->bytes, cudaMemcpyDeviceToHost));
    result->number = self->number;
    return STATUS_OK;
}

static uint64_t memory_bytes(const void *state)
{
    const struct allreduce_run *self = static_cast<const struct allreduce_run *>(state);
    return self->method->memory_bytes(self->state);
}

/* ---- The variants ---- */

template <const struct allreduce_method *METHOD>
static enum status probe_by(const struct resources *resources)
{
    TRY(device_probe(resources->device));
    return METHOD->probe(resources->device);
}

template <const struct allreduce_method *METHOD>
static enum status open_by(const struct resources *resources, const void *input, void **state)
{
    return open_run(METHOD, resources, input, state);
}

template <const struct allreduce_method *METHOD>
static constexpr struct variant reducing_by(const struct allreduce_traits *traits)
{
    return {.platform = "cuda",
            .traits = traits,
            .probe = probe_by<METHOD>,
            .setup = open_by<METHOD>,
            .ready = ready,
            .run = run,
            .fetch = fetch,
            .teardown = close_run};
}

static const struct allreduce_traits own_traits = {.bf16 = true, .memory_bytes = memory_bytes},
                                     nccl_traits = {.bf16 = true,
                                                    .memory_bytes = memory_bytes,
                                                    .nccl_version = allreduce_nccl_version};

extern "C" {
extern const struct variant variant_exchange_nccl, variant_exchange_peer, variant_exchange_peer_one_shot,
    variant_exchange_peer_two_shot;
const struct variant variant_exchange_nccl = reducing_by<&allreduce_nccl>(&nccl_traits);
const struct variant variant_exchange_peer = reducing_by<&allreduce_peer>(&own_traits);
const struct variant variant_exchange_peer_one_shot = reducing_by<&allreduce_peer_one_shot>(&own_traits);
const struct variant variant_exchange_peer_two_shot = reducing_by<&allreduce_peer_two_shot>(&own_traits);
}
