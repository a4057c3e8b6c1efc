#include "load/device_memory.cuh"

#include <string.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/timer.h"

enum status device_check_room(int device, uint64_t bytes, const char *what, const char *remedy)
{
    size_t free_bytes, total_bytes;
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (bytes <= free_bytes)
        return STATUS_OK;
    return status_set(STATUS_TOO_LARGE, "%s %.2f GB of device memory, but %.2f GB are free; %s", what,
                      1e-9 * (double)bytes, 1e-9 * (double)free_bytes, remedy);
}

enum status device_put(void *to, const void *from, uint64_t bytes)
{
    CUDA_TRY(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    CUDA_TRY(cudaStreamSynchronize(nullptr));
    return STATUS_OK;
}

#define COPIES 16

enum status device_copy_rate(int device, uint64_t bytes, enum cudaMemcpyKind kind, double *bytes_per_s)
{
    void *from = NULL, *to = NULL;
    cudaStream_t stream = NULL;
    bool host = kind == cudaMemcpyHostToDevice;
    CUDA_TRY(cudaSetDevice(device));
    cudaError_t error = host ? cudaMallocHost(&from, bytes) : cudaMalloc(&from, bytes);
    if (error == cudaSuccess)
        error = cudaMalloc(&to, bytes);
    if (error == cudaSuccess)
        error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess && host)
        memset(from, 1, bytes);
    if (error == cudaSuccess && !host)
        error = cudaMemsetAsync(from, 1, bytes, stream);
    double begin_s = 0;
    for (int i = 0; error == cudaSuccess && i <= COPIES; i++) {
        error = cudaMemcpyAsync(to, from, bytes, kind, stream);
        if (error == cudaSuccess && (i == 0 || i == COPIES))
            error = cudaStreamSynchronize(stream);
        begin_s = i == 0 ? timer_now_s() : begin_s; /* the first copy warms up */
    }
    *bytes_per_s = (host ? 1 : 2) * (double)COPIES * (double)bytes / (timer_now_s() - begin_s);
    destroy(stream);
    (void)cudaFree(to);
    (void)(host ? cudaFreeHost(from) : cudaFree(from));
    CUDA_TRY(error);
    return STATUS_OK;
}
