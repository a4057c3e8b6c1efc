/* The engine of `train-omp` and `infer-omp`, for tests and for the variant that uses OpenBLAS. */
#ifndef FDSL_CPU_TRAIN_OMP_ENGINE_H
#define FDSL_CPU_TRAIN_OMP_ENGINE_H

#include "omp_kernel.h"
#include "train/engine.h"

extern const struct engine engine_omp, engine_omp_blas;

/* A GEMM implementation; members as in struct net_kernel. */
struct gemm_kernels {
    size_t (*tiles)(const struct gemm *gemm);
    void (*multiply)(const struct gemm *gemm, size_t first, size_t count);
};

/* Returns the GEMM of the kernel that open() will use. Tests wrap it to inject a fault. */
struct gemm_kernels omp_net_gemm_kernels(void);

/* Implements open() of an engine that uses the given GEMM. */
enum status omp_net_open(const struct train *train, const struct resources *resources,
                         struct gemm_kernels gemm, void **state);

/* Implements open() of engine_omp_blas (omp_blas.c). STATUS_UNAVAILABLE if OpenBLAS is missing. */
enum status omp_blas_open(const struct train *train, const struct resources *resources, void **state);

#endif
