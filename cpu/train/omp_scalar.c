/* The kernel of `train-omp` for any machine: vectors of 4 floats, which the compiler maps to available
 * instructions. */
#include <string.h>

#include <stdint.h>

#define LANES      4
#define PANEL_MAX  2
#define SPREAD_MAX 6
typedef float vreal __attribute__((vector_size(16)));
typedef int32_t vint __attribute__((vector_size(16)));

static inline vreal v_load(const float *p)
{
    vreal a;
    memcpy(&a, p, sizeof a);
    return a;
}

static inline void v_store(float *p, vreal a)
{
    memcpy(p, &a, sizeof a);
}

static inline void v_store_whole(uint32_t *p, vint a)
{
    memcpy(p, &a, sizeof a);
}

/* Selects a where the mask is all ones, and b where it is zero. */
static inline vreal v_choose(vint mask, vreal a, vreal b)
{
    return (vreal)((mask & (vint)a) | (~mask & (vint)b));
}

#define v_set(x)        ((vreal){x, x, x, x})
#define v_whole(n)      ((vint){n, n, n, n})
#define v_fma(a, b, c)  ((a) * (b) + (c))
#define v_relu(a)       v_choose((a) <= 0, v_set(0), a)
#define v_greater(a, b) (((a) > (b)) | ((a) != (a)))

#include "omp_simd.h"

NET_KERNEL(net_kernel_scalar);
