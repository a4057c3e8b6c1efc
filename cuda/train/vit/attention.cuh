/* Shared by attention.cu and attention_hopper.cu. The matrix of scores is never stored in global memory. For
 * queries q, keys k and values v of length d, and f = 1 / sqrt(d):
 *
 *     scores       s[i][j] = f q[i] . k[j]
 *     weights      p[i][j] = exp(s[i][j]) / sum over j of exp(s[i][j])
 *     outputs      o[i]    = sum over j of p[i][j] v[j]
 *
 * The forward pass keeps the largest score of each row so far, and rescales the row's sums when it finds a
 * larger score (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). It saves the
 * logarithm of each row's sum of exponentials. The backward pass computes the weights again from these
 * logarithms (Dao, "FlashAttention-2", 2023). With gradients g[i] of the outputs o[i]:
 *
 *     e[i]        = g[i] . o[i]
 *     ds[i][j]    = p[i][j] (g[i] . v[j] - e[i])
 *     dv[j]       = sum over i of p[i][j] g[i]
 *     dk[j]       = f sum over i of ds[i][j] q[i]
 *     dq[i]       = f sum over j of ds[i][j] k[j]
 *
 * No kernel uses atomic additions, so repeated runs give the same bits. */
#ifndef FDSL_CUDA_TRAIN_VIT_ATTENTION_CUH
#define FDSL_CUDA_TRAIN_VIT_ATTENTION_CUH

#include "train/mma.cuh"
#include "train/vit/fragments.cuh"
#include "train/vit/kernels.cuh"

#define GROUP 16 /* rows (queries or keys) that a warp has in registers */
#define LOG2E 1.44269504088896340736f

/* One head of one sample. `q`, `k` and `v` point to the queries, keys and values of the first token. */
template <class T> struct head {
    const T *q, *k, *v;
    uint32_t tokens;
    size_t apart; /* distance between tokens, in values */
};

static __device__ __forceinline__ float exp2_of(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <class T>
static __device__ head<T> head_of(const T *rows, uint32_t tokens, uint32_t width, uint32_t sample,
                                  uint32_t depth, uint32_t number)
{
    const T *first = rows + (size_t)sample * tokens * 3 * width + number * depth;
    return {first, first + width, first + 2 * width, tokens, (size_t)3 * width};
}

/* Returns the maximum over the 4 lanes that hold a row. */
static __device__ __forceinline__ float row_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

/* The softmax of a lane's two rows so far. Index 0 is for the row among the upper 8 rows of the warp, index 1
 * for the row among the lower 8. `most` has the largest scores. `sum` has this lane's parts of the sums of
 * exponentials. */
struct softmax {
    float most[2], sum[2];
};

/* Replaces the scores of KEYS keys by exponentials relative to the largest score so far. Rescales the sums.
 * Only the first `valid` keys exist; the exponentials of the others are 0. Values 4 * n to 4 * n + 3 of
 * `scores` and of `sums` are the fragment of columns 8 * n to 8 * n + 7. */
template <int DEPTH, int KEYS>
static __device__ __forceinline__ void take_scores(struct softmax *softmax, float scores[KEYS / 2],
                                                   float factor, uint32_t valid, float sums[DEPTH / 2])
{
    const uint32_t column = threadIdx.x % 4 * 2;
    if (valid < KEYS) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            scores[i] = i / 4 * 8 + column + i % 2 < valid ? scores[i] : -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = scores[2 * half], sum = 0;
#pragma unroll
        for (int n = 2 * half; n < KEYS / 2; n += 4)
            most = fmaxf(most, fmaxf(scores[n], scores[n + 1]));
        most = fmaxf(softmax->most[half], factor * row_max(most));
        const float shrink = exp2_of(softmax->most[half] - most);
#pragma unroll
        for (int n = 2 * half; n < KEYS / 2; n += 4)
            for (int i = n; i < n + 2; i++) {
                scores[i] = exp2_of(fmaf(scores[i], factor, -most));
                sum += scores[i];
            }
        softmax->sum[half] = softmax->sum[half] * shrink + sum;
        softmax->most[half] = most;
#pragma unroll
        for (int n = 2 * half; n < DEPTH / 2; n += 4)
            for (int i = n; i < n + 2; i++)
                sums[i] *= shrink;
    }
}

/* The launch configuration of a kernel. */
struct launch {
    dim3 grid;
    uint32_t threads, bytes; /* threads per block; shared memory per block */
};

/* Allows a kernel to use launch->bytes bytes of shared memory. */
template <class KERNEL> static enum status allow(KERNEL *kernel, const struct launch *launch)
{
    return CUDA_STATUS(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)launch->bytes));
}

#endif
