/* Sums over the fragments of mma.cuh, and GELU. */
#ifndef FDSL_CUDA_TRAIN_VIT_FRAGMENTS_CUH
#define FDSL_CUDA_TRAIN_VIT_FRAGMENTS_CUH

#include "train/mma.cuh"

/* Returns the sum over the 4 lanes that hold a row. */
static __device__ __forceinline__ float row_sum(float value)
{
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

/* Returns the sum over the 8 lanes that hold a column. */
static __device__ __forceinline__ float column_sum(float value)
{
    for (int apart = 4; apart < 32; apart *= 2)
        value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

/* Writes the sums of the columns of a warp's 16 rows to `columns`, times `factor`. Leaves out rows from
 * `count` on. */
template <int N>
static __device__ __forceinline__ void sum_columns(const float sums[N / 2], float factor, uint32_t first,
                                                   uint32_t count, float columns[N])
{
    const uint32_t lane = threadIdx.x % 32, row = first + lane / 4;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
        for (int i = 0; i < 2; i++) {
            const float sum =
                column_sum((row < count ? sums[4 * n + i] : 0) + (row + 8 < count ? sums[4 * n + 2 + i] : 0));
            if (lane < 4)
                columns[8 * n + 2 * lane + i] = factor * sum;
        }
}

/* ---- GELU ---- */

/* GELU is x P(x), where P is the cumulative distribution function of the standard normal distribution. The
 * tail at a = |x| is 1 - P(a) = 2^p(a), and the tail minus a times the density is 2^p(a) r(a). The
 * polynomials p and r have the least maximum error for a up to 5, weighted with about the tail (found by
 * linear programming). GELU has an absolute error below 3.2e-6, and a relative one below 2.5e-4 down to -3,
 * and 1.5e-3 down to -5: less than half a unit in the last place of fp16 down to -3, and of bf16 down to -5.
 * Its derivative has an absolute error below 4e-5. If x is NaN, only GELU is NaN. Beyond 5, p falls faster
 * than the logarithm of the tail, so both tend to 0. */
static __device__ __forceinline__ float normal_tail(float a)
{
    float tail = fmaf(a, -3.6854556e-4f, 6.3569657e-3f);
    tail = fmaf(tail, a, -5.0145648e-2f);
    tail = fmaf(tail, a, -0.46151119f);
    tail = fmaf(tail, a, -1.1503395f);
    tail = fmaf(tail, a, -1.0000426f);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(tail) : "f"(tail));
    return tail;
}

static __device__ __forceinline__ float gelu(float x)
{
    return fmaf(-fabsf(x), normal_tail(fabsf(x)), fmaxf(x, 0));
}

/* GELU and its derivative. */
struct gelu_pair {
    float value, slope;
};

static __device__ __forceinline__ struct gelu_pair gelu_both(float x)
{
    const float a = fminf(fabsf(x), 16); /* the tail is 0 there; r would overflow later */
    const float tail = normal_tail(a);
    float r = fmaf(a, 1.1346414e-2f, -9.4142526e-2f);
    r = fmaf(r, a, -0.64601988f);
    r = fmaf(r, a, -0.79609716f);
    r = fmaf(r, a, 0.99995935f);
    return {fmaf(-fabsf(x), tail, fmaxf(x, 0)), 0.5f + copysignf(fmaf(-tail, r, 0.5f), x)};
}

#endif
