/* The functions of `ops-omp` that are compiled once per instruction set, from omp_simd.c. Results are
 * bit-identical to the definitions in ops/row.h. All functions are single-threaded and have no state. */
#ifndef FDSL_CPU_OPS_OMP_KERNEL_H
#define FDSL_CPU_OPS_OMP_KERNEL_H

#include <stdint.h>

#include "ops/row.h"

struct ops_kernel {
    /* Implement ops_square_sum() and ops_largest_finite(). Rows may be unaligned. */
    float (*square_sum)(const void *row, enum dtype type, uint32_t columns);
    uint32_t (*largest_finite)(const void *row, enum dtype type, uint32_t columns, uint32_t largest);

    /* Converts a row to format->to. Writes ops_value_bytes() and ops_scale_bytes() bytes. */
    void (*convert)(const struct ops_format *format, const void *row, uint8_t *values, uint8_t *scales);
};

extern const struct ops_kernel ops_kernel_scalar;
#if defined(__x86_64__)
extern const struct ops_kernel ops_kernel_avx2, ops_kernel_avx512;
#endif

#endif
