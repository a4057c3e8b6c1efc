/* The engine of `train-omp` and `infer-omp`, for tests and for the one that multiplies by OpenBLAS. */
#ifndef FDSL_CPU_TRAIN_OMP_ENGINE_H
#define FDSL_CPU_TRAIN_OMP_ENGINE_H

#include <stdbool.h>

#include "omp_kernel.h"
#include "train/engine.h"

extern const struct engine engine_omp, engine_omp_blas;

/* For tests: makes every later open() use the kernel of this name, or the best one again where it is NULL.
 * False where there is none, or this machine cannot run it. */
bool omp_net_force_isa(const char *name);

/* The name of the kernel that a later open() uses. */
const char *omp_net_instruction_set(void);

/* How products are computed: as net_kernel has it. */
struct multiplier {
    size_t (*tiles)(const struct product *product);
    void (*multiply)(const struct product *product, size_t first, size_t count);
};

/* That of the best kernel; for open(), and for tests that plant a fault in it. */
struct multiplier omp_net_multiplier(void);

/* open() of the engine with products by this. */
enum status omp_net_open(const struct train *train, const struct resources *resources, struct multiplier by,
                         void **state);

/* open() of engine_omp_blas (omp_blas.c): STATUS_UNAVAILABLE without the library. */
enum status omp_blas_open(const struct train *train, const struct resources *resources, void **state);

#endif
