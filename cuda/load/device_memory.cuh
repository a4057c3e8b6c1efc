/* Device memory: checks free memory, uploads data, and measures copy rates. */
#ifndef FDSL_CUDA_LOAD_DEVICE_MEMORY_CUH
#define FDSL_CUDA_LOAD_DEVICE_MEMORY_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"

/* Measures the rate of copies of `bytes` each, in bytes per second. With cudaMemcpyHostToDevice, copies from
 * pinned memory to the device. With cudaMemcpyDeviceToDevice, copies within the device and counts bytes read
 * plus bytes written. */
enum status device_copy_rate(int device, uint64_t bytes, enum cudaMemcpyKind kind, double *bytes_per_s);

/* Copies pageable host memory to the current device and waits until all bytes have arrived. cudaMemcpy()
 * alone may return while the last bytes are in flight. Non-blocking streams do not wait for these bytes. */
enum status device_put(void *to, const void *from, uint64_t bytes);

/* Makes the device current. Returns STATUS_TOO_LARGE if it has less than `bytes` bytes of free memory. The
 * message begins with `what` ("the batches need"), gives both sizes, and ends with `remedy`. */
enum status device_check_room(int device, uint64_t bytes, const char *what, const char *remedy);

#endif
