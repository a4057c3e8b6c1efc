/* Error checking of CUDA calls. The message of a failure has the call, CUDA's error text, file and line. */
#ifndef FDSL_CUDA_COMMON_CHECK_CUH
#define FDSL_CUDA_COMMON_CHECK_CUH

#include <cuda_runtime.h>
#include <errno.h>
#include <mutex>

#include "common/exhausted.h"
#include "core/status.h"

/* Converts the result of a CUDA call: STATUS_OK, or a failure with a message that begins with `call`. The
 * failure is STATUS_EXHAUSTED if memory ran out, else STATUS_FAILED. */
static inline enum status cuda_status(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess)
        return STATUS_OK;
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    return status_set(gpu_status_of(LIBRARY_CUDA, error, cudaSuccess, 0), "%s failed: %s (%s:%d)", call,
                      cudaGetErrorString(error), file, line);
}

static_assert(cudaErrorMemoryAllocation == (int)CUDA_CODE_MEMORY, "exhausted.h has another code");

/* Returns the status of a library's call, without a message: call directly after the library. Clears CUDA's
 * last error, so that the next check does not see it. */
static inline enum status library_status(enum gpu_library library, int code)
{
    int cause = errno;
    return code == 0 ? STATUS_OK : gpu_status_of(library, code, cudaGetLastError(), cause);
}

/* The status of a CUDA call, and of the preceding kernel launch. */
#define CUDA_STATUS(call)     cuda_status((call), #call, __FILE__, __LINE__)
#define CUDA_LAUNCHED(kernel) cuda_status(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__)

/* Return the failure from the calling function if the CUDA call or the preceding kernel launch failed. */
#define CUDA_TRY(call)          TRY(CUDA_STATUS(call))
#define CUDA_TRY_LAUNCH(kernel) TRY(CUDA_LAUNCHED(kernel))

/* Allows launches of a kernel with `bytes` of dynamic shared memory on the current device. The limit belongs
 * to the kernel, which other objects of this process may launch with more. So it is only raised. Loads the
 * kernel. Thread-safe. */
template <typename Kernel> static enum status allow_shared(Kernel *kernel, size_t bytes)
{
    static std::mutex lock;
    const std::lock_guard<std::mutex> held(lock);
    const void *function = reinterpret_cast<const void *>(kernel);
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, function));
    if ((size_t)attributes.maxDynamicSharedSizeBytes >= bytes)
        return STATUS_OK;
    return CUDA_STATUS(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

#endif
