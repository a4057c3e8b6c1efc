/* Selection of a GPU for --best-gpu. */
#ifndef FDSL_MACHINE_GPU_H
#define FDSL_MACHINE_GPU_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

/* Sets `*device` to the visible CUDA device with the most free memory; with equal amounts, the first. Queries
 * NVML, because CUDA would create a context on each device, which takes memory. Prints the choice on a
 * terminal. STATUS_UNAVAILABLE with the reason if there is no device or NVML does not report the free memory
 * of every device. */
enum status gpu_best(uint64_t *device);

/* Returns the index of the largest of `count` >= 1 numbers; if several are equal, the first. */
size_t gpu_most_free(const int64_t *free_bytes, size_t count);

#endif
