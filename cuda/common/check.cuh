/* Error checking of CUDA calls. The message of a failure has the call, CUDA's error text, file and line. */
#ifndef FDSL_CUDA_COMMON_CHECK_CUH
#define FDSL_CUDA_COMMON_CHECK_CUH

#include <cuda_runtime.h>

#include "core/status.h"

/* Converts the result of a CUDA call: STATUS_OK, or STATUS_FAILED with a message that begins with `call`. */
static inline enum status cuda_status(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess)
        return STATUS_OK;
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    return status_set(STATUS_FAILED, "%s failed: %s (%s:%d)", call, cudaGetErrorString(error), file, line);
}

/* Returns STATUS_FAILED from the calling function if the CUDA call fails. */
#define CUDA_TRY(call) TRY(cuda_status((call), #call, __FILE__, __LINE__))

/* Returns STATUS_FAILED from the calling function if the preceding kernel launch failed. */
#define CUDA_TRY_LAUNCH(kernel) TRY(cuda_status(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__))

#endif
