/* The kernel of `ops-omp` for any machine. It uses the definitions in ops/row.h. */
#include <string.h>

#include "core/portable.h"
#include "omp_kernel.h"

FDSL_FMA_CLONES static float square_sum(const void *row, enum dtype type, uint32_t columns)
{
    return ops_square_sum(row, type, columns);
}

static uint32_t largest_finite(const void *row, enum dtype type, uint32_t columns, uint32_t largest)
{
    return ops_largest_finite(row, type, columns, largest);
}

static void convert(const struct ops_format *format, const void *row, uint8_t *values, uint8_t *scales)
{
    ops_convert_row(format, row, values, scales);
}

const struct ops_kernel ops_kernel_scalar = {square_sum, largest_finite, convert};
