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

/* GELU is x P(x), where P is the cumulative distribution function of the standard normal distribution. For a
 * value of size |x|, `tail` is 1 - P(|x|), and `density` is the density. P is computed by formula 26.2.17 of
 * Abramowitz and Stegun, "Handbook of Mathematical Functions". Its absolute error is below 7.5e-8, far less
 * than the rounding of bf16 or fp16. */
struct normal {
    float tail, density;
};

static __device__ __forceinline__ struct normal normal_at(float x)
{
    float t, density;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(fabsf(x), 0.2316419f, 1.0f)));
    /* exp(-x^2 / 2) / sqrt(2 pi), as a power of 2 */
    asm("ex2.approx.ftz.f32 %0, %1;"
        : "=f"(density)
        : "f"(fmaf(x * x, -0.72134752044448170368f, -1.3257480647361592f)));
    float tail = fmaf(t, 1.330274429f, -1.821255978f);
    tail = fmaf(tail, t, 1.781477937f);
    tail = fmaf(tail, t, -0.356563782f);
    tail = fmaf(tail, t, 0.319381530f);
    return {tail * t * density, density};
}

static __device__ __forceinline__ float gelu(float x)
{
    return fmaf(-fabsf(x), normal_at(x).tail, fmaxf(x, 0));
}

/* GELU and its derivative: P(x) + x times the density at x. */
struct gelu_pair {
    float value, slope;
};

static __device__ __forceinline__ struct gelu_pair gelu_both(float x)
{
    const struct normal normal = normal_at(x);
    const float below = x > 0 ? 1 - normal.tail : normal.tail;
    return {x * below, fmaf(x, normal.density, below)};
}

#endif
