/* The engine of `train-omp` and `infer-omp`, for tests and for the one that multiplies by OpenBLAS. */
#ifndef FDSL_CPU_TRAIN_OMP_ENGINE_H
#define FDSL_CPU_TRAIN_OMP_ENGINE_H

#include <stdbool.h>

#include "omp_kernel.h"
#include "train/engine.h"

extern const struct engine engine_omp;

/* For tests: makes every later open() use the kernel of this name, or the best one again where it is NULL.
 * False where there is none, or this machine cannot run it. */
bool omp_net_force_isa(const char *name);

/* open() of the engine with another way to multiply; NULL: the kernel's own. */
typedef void multiply_function(const struct product *product, size_t first, size_t count);
void omp_net_multiply(const struct product *product, size_t first, size_t count); /* the best kernel's */
enum status omp_net_open(const struct train *train, const struct resources *resources,
                         multiply_function *multiply, void **state);

#endif
