/* Streams for producers of batches. */
#ifndef FDSL_CUDA_COMMON_STREAM_CUH
#define FDSL_CUDA_COMMON_STREAM_CUH

#include "common/check.cuh"

/* Creates a stream with the highest priority on the current device. Its kernels take precedence over those of
 * a training step (common/consumer.cu), because a late batch would delay the next step. The caller destroys
 * the stream. */
static inline enum status stream_open(cudaStream_t *stream)
{
    int lowest, highest;
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_TRY(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest));
    return STATUS_OK;
}

#endif
