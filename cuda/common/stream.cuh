/* Opens the streams of producers of batches; destroys streams, events and graphs. Protects captures. */
#ifndef FDSL_CUDA_COMMON_STREAM_CUH
#define FDSL_CUDA_COMMON_STREAM_CUH

#include "common/check.cuh"
#include "machine/device.h"

/* Until the end of a scope, calls of this thread cannot invalidate the capture of any stream. */
struct relaxed_capture {
    int mode;
    relaxed_capture() : mode(device_relax_capture())
    {
    }
    ~relaxed_capture()
    {
        device_restore_capture(mode);
    }
};

/* Creates a stream on the current device; the caller destroys it. With `background`, the stream has the
 * lowest priority. Otherwise it has the highest priority, so that its kernels take precedence over those of a
 * training step (common/consumer.cu). A late batch would delay the next step. */
static inline enum status stream_open(cudaStream_t *stream, bool background = false)
{
    int lowest, highest;
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_TRY(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, background ? lowest : highest));
    return STATUS_OK;
}

static inline cudaError_t destroy_handle(cudaStream_t stream)
{
    return cudaStreamDestroy(stream);
}

static inline cudaError_t destroy_handle(cudaEvent_t event)
{
    return cudaEventDestroy(event);
}

static inline cudaError_t destroy_handle(cudaGraph_t graph)
{
    return cudaGraphDestroy(graph);
}

static inline cudaError_t destroy_handle(cudaGraphExec_t graph)
{
    return cudaGraphExecDestroy(graph);
}

/* Destroys streams, events and graphs in the given order, and skips those that are NULL. Ignores errors:
 * nothing can be done about them, and nothing depends on them. */
template <class... Handle> static inline void destroy(Handle... handles)
{
    ((void)(handles ? destroy_handle(handles) : cudaSuccess), ...);
}

/* ---- Overlapping launches (programmatic dependent launch, sm_90; older devices serialise kernels) ----
 *
 * Code before wait_for_previous() may run concurrently with the previous kernel. It must not read what that
 * kernel writes, or overwrite what that kernel reads. If the previous kernel waited for its own predecessor,
 * it may read what earlier kernels wrote. The blocks of the next kernel may begin when all blocks have called
 * allow_next() or have ended. */

static __device__ __forceinline__ void wait_for_previous(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void allow_next(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
