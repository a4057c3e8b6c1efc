/* The progress of a CPU engine. The engine stores it after each step; another thread reads it while steps
 * run. */
#ifndef FDSL_TRAIN_PUBLISHED_H
#define FDSL_TRAIN_PUBLISHED_H

#include <stdatomic.h>

#include "train/engine.h"

/* A zeroed struct means that no step is done yet. */
struct published {
    _Atomic double loss;
    _Atomic uint64_t correct, samples;
};

static inline void published_store(struct published *published, const struct train_totals *totals)
{
    atomic_store_explicit(&published->loss, totals->loss, memory_order_relaxed);
    atomic_store_explicit(&published->correct, totals->correct, memory_order_relaxed);
    atomic_store_explicit(&published->samples, totals->samples, memory_order_relaxed);
}

static inline void published_load(const struct published *published, struct train_progress *progress)
{
    progress->loss = atomic_load_explicit(&published->loss, memory_order_relaxed);
    progress->correct = atomic_load_explicit(&published->correct, memory_order_relaxed);
    progress->samples = atomic_load_explicit(&published->samples, memory_order_relaxed);
}

#endif
