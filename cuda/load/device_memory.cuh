/* Device memory: whether there is enough, what is put there, and how fast. */
#ifndef FDSL_CUDA_LOAD_DEVICE_MEMORY_CUH
#define FDSL_CUDA_LOAD_DEVICE_MEMORY_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"

/* Bytes a second of copies of `bytes` each, from pinned memory to the device, or within it (then bytes read
 * and bytes written). */
enum status device_copy_rate(int device, uint64_t bytes, enum cudaMemcpyKind kind, double *bytes_per_s);

/* Copies pageable memory to the device, where it is when this returns. cudaMemcpy() alone may return while
 * the last bytes are on their way, and streams that do not block do not wait for them. */
enum status device_put(void *to, const void *from, uint64_t bytes);

/* STATUS_USAGE where `bytes` do not fit the device's free memory: says both, and the remedy. */
enum status device_check_room(int device, uint64_t bytes, const char *what, const char *remedy);

#endif
