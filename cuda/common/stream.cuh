/* Streams for producers of batches. */
#ifndef FDSL_CUDA_COMMON_STREAM_CUH
#define FDSL_CUDA_COMMON_STREAM_CUH

#include "common/check.cuh"

/* Creates a stream with the highest priority on the current device. Its kernels run before those of a
 * training step (common/consumer.cu), which would otherwise delay the batch that the next step needs. The
 * caller destroys it. */
static inline enum status stream_open(cudaStream_t *stream)
{
    int lowest, highest;
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_TRY(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest));
    return STATUS_OK;
}

#endif
