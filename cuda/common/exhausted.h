/* Tells from the error code of CUDA or of one of its libraries whether memory ran out. Plain C without the
 * headers of the libraries, so that a test can check every code. The files that call a library compare the
 * codes with its header, if they include it. */
#ifndef FDSL_CUDA_COMMON_EXHAUSTED_H
#define FDSL_CUDA_COMMON_EXHAUSTED_H

#include <errno.h>

#include "core/status.h"

enum gpu_library {
    LIBRARY_CUDA,
    LIBRARY_CUBLAS,
    LIBRARY_CUDNN,
    LIBRARY_NCCL,
    LIBRARY_NVJPEG,
    LIBRARY_CUFILE
};

/* Codes of the libraries. 0 is success in all of them. */
enum {
    CUDA_CODE_MEMORY = 2, /* cudaErrorMemoryAllocation; also CUDA_ERROR_OUT_OF_MEMORY of the driver */
    CUBLAS_CODE_MEMORY = 3,
    CUDNN_CODE_HOST_MEMORY = 4003,
    CUDNN_CODE_DEVICE_MEMORY = 4004,
    NCCL_CODE_SYSTEM = 2, /* a system call failed; errno says which error */
    NVJPEG_CODE_MEMORY = 5
};

/* Returns STATUS_OK for 0, STATUS_EXHAUSTED if memory ran out, else STATUS_FAILED. `cuda` is CUDA's last
 * error after the call of the library, because several libraries have only general codes for CUDA's failures,
 * such as "not initialized". `cause` is the errno after the call. */
static inline enum status gpu_status_of(enum gpu_library library, int code, int cuda, int cause)
{
    bool exhausted = cuda == CUDA_CODE_MEMORY;
    switch (library) {
    case LIBRARY_CUDA:
        exhausted |= code == CUDA_CODE_MEMORY;
        break;
    case LIBRARY_CUBLAS:
        exhausted |= code == CUBLAS_CODE_MEMORY;
        break;
    case LIBRARY_CUDNN:
        exhausted |= code == CUDNN_CODE_HOST_MEMORY || code == CUDNN_CODE_DEVICE_MEMORY;
        break;
    case LIBRARY_NCCL:
        exhausted |= code == NCCL_CODE_SYSTEM && status_of_errno(cause) == STATUS_EXHAUSTED;
        break;
    case LIBRARY_NVJPEG:
        exhausted |= code == NVJPEG_CODE_MEMORY;
        break;
    case LIBRARY_CUFILE: /* codes below 5001 are errors of system calls */
        exhausted |= status_of_errno(code < 0 ? -code : code) == STATUS_EXHAUSTED;
        break;
    }
    return code == 0 ? STATUS_OK : exhausted ? STATUS_EXHAUSTED : STATUS_FAILED;
}

#endif
