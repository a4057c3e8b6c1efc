/* Streams of those who make batches. */
#ifndef FDSL_CUDA_COMMON_STREAM_CUH
#define FDSL_CUDA_COMMON_STREAM_CUH

#include "common/check.cuh"

/* Makes a stream on the present device whose kernels go before those of others wherever both wait for a
 * multiprocessor: before a training step above all (common/consumer.cu), which would else hold up the batch
 * that the next one waits for. The caller destroys it. */
static inline enum status stream_open(cudaStream_t *stream)
{
    int lowest, highest;
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_TRY(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest));
    return STATUS_OK;
}

#endif
