/* Divides the cores of a machine among its ranks, so that no two ranks share a hardware thread if there
 * are enough cores. */
#ifndef FDSL_MACHINE_CORES_H
#define FDSL_MACHINE_CORES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"

#define CORES_MAX       8192 /* maximum number of hardware threads that Linux supports on x86-64 */
#define CORES_WORD_BITS (8 * sizeof(unsigned long))

/* A set of hardware threads, in the layout of Linux affinity masks. */
struct cores_mask {
    unsigned long words[CORES_MAX / 8 / sizeof(unsigned long)];
};

/* The result of cores_take(), in ascending order of severity. */
enum cores_outcome {
    CORES_KEPT,   /* the launcher gave each rank its own hardware threads and left none unused, or there is
                   * only one rank */
    CORES_SPLIT,  /* ranks had cores in common, so the cores were divided among the ranks */
    CORES_IDLE,   /* the launcher gave each rank its own hardware threads, but some are unused */
    CORES_CROWDED /* there are more ranks than cores, so some ranks share a core */
};

/* The division of a machine's cores among its ranks, as seen by one rank. */
struct cores_plan {
    enum cores_outcome outcome;
    struct cores_mask mine; /* the hardware threads for this rank */
};

/* Plans the cores of rank number `rank` of the `count` ranks on a machine. `ranks` has the current mask of
 * each rank. `allowed` has all hardware threads that this job may use. `cores` has the hardware threads of
 * each of the `core_count` >= 1 cores, ordered so that neighbours share caches. If no two ranks have a
 * hardware thread in common, each rank keeps its mask. Otherwise divides the cores that at least one rank may
 * run on. If `extra` is NULL, the numbers of cores of the ranks differ by at most one. Otherwise each rank
 * gets one core, and the remaining cores are divided in proportion to `extra`. `extra` has one number per
 * rank; the numbers must not all be 0. A pure function. */
struct cores_plan cores_share_out(const struct cores_mask *ranks, const uint32_t *extra, int count, int rank,
                                  const struct cores_mask *allowed, const struct cores_mask *cores,
                                  int core_count);

/* Returns whether the environment makes OpenMP bind threads (OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY).
 * OpenMP then binds the first thread before main(), so the launcher's mask can no longer be read. */
bool cores_bound_by_openmp(void);

/* Collective: plans the cores of all ranks of this machine. Binds the calling thread, and all threads that it
 * starts later, to the cores of this rank. `threads` is the number of threads that the user chose for this
 * rank; 0: none. If all ranks have a chosen number and these numbers differ, the cores are divided in
 * proportion. For example, ranks with 12 and 4 threads get 12 and 4 of 16 cores. Call before other threads
 * are started. STATUS_FAILED if affinity masks cannot be read or set. */
enum status cores_take(uint32_t threads, enum cores_outcome *outcome);

#endif
