/* Error reporting for kernels that launch kernels: the device stores the cudaError_t of a failed launch in a
 * word of pinned host memory. Only for files that are compiled with -rdc=true. */
#ifndef FDSL_CUDA_SYNTH_DEVICE_LAUNCH_CUH
#define FDSL_CUDA_SYNTH_DEVICE_LAUNCH_CUH

#include "common/check.cuh"

/* Allocates the word of pinned memory and sets it to cudaSuccess. The caller frees it with
 * device_launch_close(), which accepts NULL. */
static inline enum status device_launch_open(int **failure)
{
    CUDA_TRY(cudaMallocHost(failure, sizeof **failure));
    **failure = cudaSuccess;
    return STATUS_OK;
}

static inline void device_launch_close(int *failure)
{
    (void)cudaFreeHost(failure); /* errors are ignored, because no result depends on them */
}

/* Records the error of the calling thread's last launch, if it failed. */
static __device__ __forceinline__ void device_launch_check(int *failure)
{
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess)
        atomicExch_system(failure, (int)error);
}

/* Returns STATUS_FAILED if a launch failed on the device. Call it after the launching kernels have ended. */
static inline enum status device_launch_status(const int *failure)
{
    return cuda_status((cudaError_t) * (const volatile int *)failure, "a launch on the device", __FILE__,
                       __LINE__);
}

#endif
