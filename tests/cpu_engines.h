/* The CPU engines of this build, for tests that run each of them. */
#ifndef FDSL_TESTS_CPU_ENGINES_H
#define FDSL_TESTS_CPU_ENGINES_H

#ifdef _OPENMP
#include "../cpu/train/omp_kernel.h"
#endif
#include "train/engine.h"

static const struct engine *const cpu_engines[] = {
    &engine_naive,
#ifdef _OPENMP
    &engine_omp,
#endif
};

#endif
