/* `fused` as a CUDA graph. Its first kernel copies the arguments of the run (struct fused_call) from a
 * kernel parameter to device memory, where the other kernels read them. Only this parameter changes between
 * launches. */
#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "synth/fused.h"

struct fused_graph {
    struct fused_call *stored; /* device memory */
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaGraphNode_t first;
};

static __global__ void store_call_kernel(const struct fused_call call, struct fused_call *stored)
{
    *stored = call;
}

static enum status record(const struct fused_plan *plan, const struct fused_graph *self, uint64_t count,
                          cudaStream_t stream)
{
    store_call_kernel<<<1, 1, 0, stream>>>(fused_call(), self->stored);
    CUDA_TRY_LAUNCH("store_call_kernel");
    return fused_enqueue_stored(plan, self->stored, count, stream);
}

static enum status capture(const struct fused_plan *plan, struct fused_graph *self, uint64_t count,
                           cudaStream_t stream)
{
    cudaFuncAttributes attributes; /* loads the kernel, which CUDA must not do during a capture */
    size_t roots = 1;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, store_call_kernel));
    CUDA_TRY(cudaMalloc(&self->stored, sizeof *self->stored));
    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enum status status = record(plan, self, count, stream);
    cudaError_t error = cudaStreamEndCapture(stream, &self->graph);
    TRY(status);
    TRY(cuda_status(error, "capturing a run", __FILE__, __LINE__));
    CUDA_TRY(cudaGraphGetRootNodes(self->graph, &self->first, &roots));
    CUDA_TRY(cudaGraphInstantiate(&self->executable, self->graph, 0));
    CUDA_TRY(cudaGraphUpload(self->executable, stream));
    CUDA_TRY(cudaStreamSynchronize(stream)); /* the upload must end first: launches may use other streams */
    return STATUS_OK;
}

enum status fused_graph_open(const struct fused_plan *plan, uint64_t count, cudaStream_t stream,
                             struct fused_graph **graph)
{
    struct fused_graph *self = static_cast<struct fused_graph *>(calloc(1, sizeof *self));
    TRY(ALLOCATED(self, "out of memory"));
    enum status status = capture(plan, self, count, stream);
    if (status != STATUS_OK)
        fused_graph_close(self);
    else
        *graph = self;
    return status;
}

enum status fused_graph_launch(struct fused_graph *graph, const struct fused_call *call, cudaStream_t stream)
{
    RANGE(GRAPH);
    struct fused_call copy = *call;
    void *parameters[] = {&copy, &graph->stored};
    cudaKernelNodeParams node = {};
    node.func = reinterpret_cast<void *>(store_call_kernel);
    node.gridDim = node.blockDim = dim3(1);
    node.kernelParams = parameters;
    CUDA_TRY(cudaGraphExecKernelNodeSetParams(graph->executable, graph->first, &node));
    CUDA_TRY(cudaGraphLaunch(graph->executable, stream));
    return STATUS_OK;
}

void fused_graph_close(struct fused_graph *graph)
{
    if (!graph)
        return;
    /* Errors are ignored, because no result depends on them. */
    destroy(graph->executable, graph->graph);
    (void)cudaFree(graph->stored);
    free(graph);
}
