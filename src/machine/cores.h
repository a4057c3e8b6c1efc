/* Which cores the ranks of one machine have: none that another rank has too, as far as there are enough. */
#ifndef FDSL_MACHINE_CORES_H
#define FDSL_MACHINE_CORES_H

#include <stdbool.h>

#include "core/status.h"

#define CORES_MAX       8192 /* the most hardware threads that Linux can be configured for on x86-64 */
#define CORES_WORD_BITS (8 * sizeof(unsigned long))

/* A set of hardware threads, laid out as the kernel's affinity masks. */
struct cores_mask {
    unsigned long words[CORES_MAX / 8 / sizeof(unsigned long)];
};

/* What was found, and done; the larger, the more there is to say of it. */
enum cores_outcome {
    CORES_KEPT,   /* the launcher gave each rank its own, and none is left over; or there is one rank */
    CORES_SPLIT,  /* ranks had cores in common: these were shared out evenly */
    CORES_IDLE,   /* the launcher gave each rank its own, and left some to nobody */
    CORES_CROWDED /* there are more ranks than cores: some share one */
};

/* How the ranks of a machine share its cores. */
struct cores_plan {
    enum cores_outcome outcome;
    struct cores_mask mine; /* what this rank is to run on */
};

/* The plan of rank `rank` of `count`, given what each may run on now, all that the machine allows, and the
 * hardware threads of each core: `cores`, `core_count` >= 1 of them, in an order that keeps neighbours
 * together. Only cores that some rank may run on are shared out. Pure. */
struct cores_plan cores_share_out(const struct cores_mask *ranks, int count, int rank,
                                  const struct cores_mask *allowed, const struct cores_mask *cores,
                                  int core_count);

/* Whether the environment had OpenMP bind threads (OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY): the first
 * one is bound before main() begins, and what a launcher gave this process can no longer be told. */
bool cores_bound_by_openmp(void);

/* Finds out the above of this process and its neighbours, and moves the calling thread, and all that it will
 * start, to its cores: for a process that has no other threads at work yet. All ranks call it. */
enum status cores_take(enum cores_outcome *outcome);

#endif
