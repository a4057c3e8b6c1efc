/* Which GPU to take where there are several. */
#ifndef FDSL_MACHINE_GPU_H
#define FDSL_MACHINE_GPU_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

/* The number of the CUDA device, among those that this process sees, with the most free memory as NVML counts
 * it: asking CUDA would take memory on each. Of equal ones the first; says which on a terminal.
 * STATUS_UNAVAILABLE with the reason where there is none, or where NVML does not know one of them. */
enum status gpu_best(uint64_t *device);

/* The place of the largest of `count` >= 1 numbers; of equal ones the first. */
size_t gpu_most_free(const int64_t *free_bytes, size_t count);

#endif
