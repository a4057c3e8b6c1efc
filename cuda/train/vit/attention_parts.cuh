/* Shared by the files of attention: the forward pass (attention.cu), the backward pass
 * (attention_backward.cu), and both for compute capability 9.0 (attention_hopper.cu). The matrix of scores is
 * never stored in global memory. In the first two files, a warp has 16 rows (queries or keys) in registers,
 * and reads the rows that it multiplies by them from shared memory. For queries q, keys k and values v of
 * length d, and f = 1 / sqrt(d):
 *
 *     scores       s[i][j] = f q[i] . k[j]
 *     weights      p[i][j] = exp(s[i][j]) / sum over j of exp(s[i][j])
 *     outputs      o[i]    = sum over j of p[i][j] v[j]
 */
#ifndef FDSL_CUDA_TRAIN_VIT_ATTENTION_PARTS_CUH
#define FDSL_CUDA_TRAIN_VIT_ATTENTION_PARTS_CUH

#include "train/mma.cuh"
#include "train/vit/fragments.cuh"
#include "train/vit/kernels.cuh"

#define WARPS_MIN 4 /* minimum warps per block */
#define WARPS_MAX 7
#define GROUP     16  /* rows (queries or keys) that a warp has in registers */
#define SPAN      224 /* maximum number of rows that are in shared memory at a time */
#define TILE      32  /* keys whose scores the forward pass computes at a time */
#define LOG2E     1.44269504088896340736f

/* A row in shared memory. It has 8 values of padding, so that ldmatrix reads 8 rows from different banks. */
template <int DEPTH> struct line {
    bf16 value[DEPTH + 8];
};

/* One head of one sample. `q`, `k` and `v` point to the queries, keys and values of the first token. */
struct head {
    const bf16 *q, *k, *v;
    uint32_t tokens;
    size_t apart; /* distance between tokens, in values */
};

static __device__ __forceinline__ float exp2_of(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns the sum over the 4 lanes that hold a row. */
static __device__ __forceinline__ float row_sum(float value)
{
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

/* Returns the number of rows that are in shared memory at a time: `tokens` rounded up to a multiple of
 * `unit`, but at most SPAN. */
static __host__ __device__ __forceinline__ uint32_t span_of(uint32_t tokens, uint32_t unit)
{
    const uint32_t rows = (tokens + unit - 1) / unit * unit;
    return rows < SPAN ? rows : SPAN;
}

static __device__ struct head head_of(const bf16 *rows, uint32_t tokens, uint32_t width, uint32_t sample,
                                      uint32_t depth, uint32_t number)
{
    const bf16 *first = rows + (size_t)sample * tokens * 3 * width + number * depth;
    return {first, first + width, first + 2 * width, tokens, (size_t)3 * width};
}

/* Starts copying up to SPAN of the `count` rows, from row `first` on, to `lines`. If fewer than SPAN rows
 * remain, pads `lines` with zeros to a multiple of UNIT rows. */
template <int DEPTH, int UNIT = GROUP>
static __device__ __forceinline__ void copy_rows(struct line<DEPTH> *lines, const bf16 *from, size_t apart,
                                                 uint32_t first, uint32_t count)
{
    constexpr int CHUNKS = DEPTH / 8;
    const uint32_t rows = span_of(count - first, UNIT);
    for (uint32_t i = threadIdx.x; i < rows * CHUNKS; i += blockDim.x) {
        uint32_t row = i / CHUNKS, column = i % CHUNKS * 8;
        bool inside = first + row < count;
        copy_async16(&lines[row].value[column], from + (inside ? first + row : 0) * apart + column, inside);
    }
}

/* Loads the 16 rows starting at `first` as the left operand of mma_16816(), one fragment per 16 columns. Rows
 * from `count` on are zeros. */
template <int DEPTH>
static __device__ __forceinline__ void load_rows(uint32_t rows[DEPTH / 16][4], const bf16 *from, size_t apart,
                                                 uint32_t first, uint32_t count)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
        bool inside = row + 8 * half < count;
        const bf16 *values = from + (inside ? row + 8 * half : 0) * apart + column;
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++)
            for (int part = 0; part < 2; part++)
                rows[step][half + 2 * part] =
                    inside ? *reinterpret_cast<const uint32_t *>(values + 16 * step + 8 * part) : 0;
    }
}

/* Adds rows * lines^T to `sums`, for the 16 lines from `first` on. */
template <int DEPTH>
static __device__ __forceinline__ void add_scores(float sums[2][4], const uint32_t rows[DEPTH / 16][4],
                                                  const struct line<DEPTH> *lines, uint32_t first)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        mma_load4(word, &lines[row].value[16 * step + column]);
        mma_16816(sums[0], rows[step], word, bf16());
        mma_16816(sums[1], rows[step], word + 2, bf16());
    }
}

/* Converts results of add_scores() to the left operand of mma_16816(). */
static __device__ __forceinline__ void pack_weights(const float weights[2][4], uint32_t left[4])
{
    for (int i = 0; i < 4; i++)
        left[i] = pack(weights[i / 2][2 * (i % 2)], weights[i / 2][2 * (i % 2) + 1]);
}

/* Adds left * lines to `sums`, for the 16 lines from `first` on. */
template <int DEPTH>
static __device__ __forceinline__ void add_weighted(float sums[DEPTH / 8][4], const uint32_t left[4],
                                                    const struct line<DEPTH> *lines, uint32_t first)
{
    uint32_t lane = threadIdx.x % 32, row = first + lane % 16, column = lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        uint32_t word[4];
        mma_load4_transposed(word, &lines[row].value[16 * step + column]);
        mma_16816(sums[2 * step], left, word, bf16());
        mma_16816(sums[2 * step + 1], left, word + 2, bf16());
    }
}

/* Writes 16 rows of sums from row `first` on, without rows from `count` on. Multiplies the upper 8 rows by
 * factor[0] and the lower 8 by factor[1]. */
template <int DEPTH>
static __device__ __forceinline__ void store_rows(bf16 *to, size_t apart, uint32_t first, uint32_t count,
                                                  const float sums[DEPTH / 8][4], const float factor[2])
{
    uint32_t lane = threadIdx.x % 32, row = first + lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= count)
            return;
        bf16 *values = to + (row + 8 * half) * apart + column;
#pragma unroll
        for (int step = 0; step < DEPTH / 8; step++)
            *reinterpret_cast<uint32_t *>(values + 8 * step) =
                pack(sums[step][2 * half] * factor[half], sums[step][2 * half + 1] * factor[half]);
    }
}

/* ---- Softmax ---- */

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

/* ---- Launches ---- */

/* Returns the number of warps per block for which the fewest warps have no rows. */
static inline uint32_t warps_for(uint32_t tokens)
{
    const uint32_t groups = (tokens + GROUP - 1) / GROUP;
    uint32_t best = WARPS_MIN, least = UINT32_MAX;
    for (uint32_t warps = WARPS_MIN; warps <= WARPS_MAX; warps++) {
        const uint32_t idle = (groups + warps - 1) / warps * warps - groups;
        if (idle < least) {
            best = warps;
            least = idle;
        }
    }
    return best;
}

/* The launch configuration of a kernel. */
struct launch {
    dim3 grid;
    uint32_t threads, bytes; /* threads per block; shared memory per block */
};

/* `halves` is the number of blocks along z per sample. In the backward pass it is 2: one half of the blocks
 * computes the gradients of queries, the other half those of keys and values. */
static inline struct launch launch_of(const struct vit_rows *rows, uint32_t heads, uint32_t halves)
{
    const uint32_t warps = warps_for(rows->tokens), depth = rows->width / heads;
    const uint32_t row_bytes = 2 * (depth + 8) * (uint32_t)sizeof(bf16) + 2 * (uint32_t)sizeof(float);
    return {dim3((rows->tokens + warps * GROUP - 1) / (warps * GROUP), heads, halves * rows->samples),
            32 * warps, span_of(rows->tokens, TILE) * row_bytes};
}

/* Allows a kernel to use launch->bytes bytes of shared memory. */
template <class KERNEL> static enum status allow(KERNEL *kernel, const struct launch *launch)
{
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)launch->bytes));
    return STATUS_OK;
}

/* ---- Compute capability 9.0 (attention_hopper.cu) ---- */

/* Sets `*fits` to whether the functions below can compute this attention on the current device. */
enum status hopper_fits(const struct vit_rows *rows, uint32_t heads, bool *fits);
/* These functions compute what vit_attention() and vit_attention_backward() compute. hopper_backward() writes
 * `rows->samples` partial sums per column to `partial`, and does not add them up. */
enum status hopper_forward(const struct vit_rows *rows, uint32_t heads, const bf16 *inputs, bf16 *outputs,
                           float *logs, cudaStream_t stream);
enum status hopper_backward(const struct vit_rows *rows, uint32_t heads, const bf16 *inputs,
                            const bf16 *outputs, const float *logs, const bf16 *out_deltas, bf16 *in_deltas,
                            float *partial, cudaStream_t stream);

static inline enum status refuse_depth(uint32_t depth)
{
    return status_set(STATUS_FAILED, "vit: there is no kernel for heads of %u values; use 16, 32 or 64",
                      depth);
}

#endif
