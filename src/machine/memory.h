/* The memory that this process can allocate. */
#ifndef FDSL_MACHINE_MEMORY_H
#define FDSL_MACHINE_MEMORY_H

#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* Returns the memory in bytes that this process can still allocate. Takes MemAvailable or the bytes left
 * under the cgroup's limits, whichever is smaller, and divides this number by the number of processes that
 * share the memory (memory_share()). */
uint64_t memory_available_bytes(void);

/* Checks that `bytes` bytes for `what` ("the batch") can be allocated. STATUS_TOO_LARGE names both sizes and
 * the `remedy` ("lower --batch"). STATUS_OK if the available memory is unknown. */
enum status memory_check(uint64_t bytes, const char *what, const char *remedy);

/* Sets how many processes on this machine, including this one, will allocate the same amount of memory. 0:
 * unknown; the available memory is then unknown (0) as well. */
void memory_share(int processes);

/* Returns the smallest headroom in bytes under the memory limits (cgroup v2) of `group` ("/job_7/step_0") and
 * its ancestors, read under `root` (/sys/fs/cgroup). File cache counts as free. UINT64_MAX without limits. */
uint64_t memory_cgroup_headroom_bytes(const char *root, const char *group);

FDSL_C_END

#endif
