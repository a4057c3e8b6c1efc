/* Streams for producers of batches. */
#ifndef FDSL_CUDA_COMMON_STREAM_CUH
#define FDSL_CUDA_COMMON_STREAM_CUH

#include "common/check.cuh"

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

#endif
