/* GELU, and sums of columns. The kernels read each matrix once. In those for bf16 matrices, a thread
 * processes 8 adjacent values at a time. */
#include "common/check.cuh"
#include "train/vit/fragments.cuh"
#include "train/vit/gelu.cuh"
#include "train/vit/kernels.cuh"

#define VALUES 8 /* values per thread: 16 bytes */
#define WARPS  (BLOCK / 32)

/* Eight adjacent values. */
struct eight {
    float value[VALUES];
};

static __device__ __forceinline__ struct eight load8(const bf16 *from)
{
    const uint4 words = *reinterpret_cast<const uint4 *>(from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    struct eight all;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 values = values_of(word[i]);
        all.value[2 * i] = values.x;
        all.value[2 * i + 1] = values.y;
    }
    return all;
}

static __device__ __forceinline__ void store8(bf16 *to, const struct eight &all)
{
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = pack(all.value[2 * i], all.value[2 * i + 1]);
    *reinterpret_cast<uint4 *>(to) = {word[0], word[1], word[2], word[3]};
}

/* ---- GELU ---- */

static __global__ void __launch_bounds__(BLOCK) gelu_kernel(const bf16 *inputs, size_t count, bf16 *outputs)
{
    const size_t at = ((size_t)blockIdx.x * BLOCK + threadIdx.x) * VALUES;
    if (at >= count)
        return;
    struct eight all = load8(inputs + at);
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        all.value[i] = gelu(all.value[i]);
    store8(outputs + at, all);
}

enum status vit_gelu(const bf16 *inputs, size_t count, bf16 *outputs, cudaStream_t stream)
{
    gelu_kernel<<<blocks_for(count / VALUES), BLOCK, 0, stream>>>(inputs, count, outputs);
    CUDA_TRY_LAUNCH("gelu_kernel");
    return STATUS_OK;
}

/* ---- Sums of columns ---- */

/* Warp w of block (column group, part) adds up rows part * WARPS + w, part * WARPS + w + parts * WARPS, ...
 * `parts` is gridDim.y. If GELU is true, the kernel first replaces `values`, the gradients of GELU's outputs,
 * by the gradients of GELU's inputs. */
template <bool GELU>
static __global__ void __launch_bounds__(BLOCK)
    columns_kernel(const bf16 *inputs, uint32_t rows, uint32_t width, bf16 *values, float *partial)
{
    __shared__ float all[WARPS][32][VALUES + 1];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t column = (blockIdx.x * 32 + lane) * VALUES;
    struct eight sums = {};
    for (uint32_t row = blockIdx.y * WARPS + warp; column < width && row < rows; row += gridDim.y * WARPS) {
        const size_t at = (size_t)row * width + column;
        struct eight value = load8(values + at);
        if (GELU) {
            const struct eight x = load8(inputs + at);
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                value.value[i] *= gelu_slope(x.value[i]);
            store8(values + at, value);
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            sums.value[i] += value.value[i];
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        all[warp][lane][i] = sums.value[i];
    __syncthreads();
    const uint32_t own = threadIdx.x, target = blockIdx.x * 32 * VALUES + own; /* one column per thread */
    if (target >= width)
        return;
    float sum = 0;
    for (int other = 0; other < WARPS; other++)
        sum += all[other][own / VALUES][own % VALUES];
    partial[(size_t)blockIdx.y * width + target] = sum;
}

template <bool GELU>
static enum status launch_columns(const bf16 *inputs, uint32_t rows, uint32_t width, bf16 *values,
                                  float *sums, float *partial, cudaStream_t stream)
{
    const uint32_t groups = (width + 32 * VALUES - 1) / (32 * VALUES), needed = (rows + WARPS - 1) / WARPS;
    const uint32_t most = VIT_PARTS / groups, parts = needed < most ? needed : most;
    const struct vit_sums results = {1, width, {sums}};
    columns_kernel<GELU><<<dim3(groups, parts), BLOCK, 0, stream>>>(inputs, rows, width, values, partial);
    CUDA_TRY_LAUNCH("columns_kernel");
    return vit_partial_sums(partial, parts, &results, stream);
}

enum status vit_gelu_backward(const bf16 *inputs, uint32_t rows, uint32_t width, bf16 *deltas, float *sums,
                              float *partial, cudaStream_t stream)
{
    return launch_columns<true>(inputs, rows, width, deltas, sums, partial, stream);
}

enum status vit_column_sums(const bf16 *values, uint32_t rows, uint32_t width, float *sums, float *partial,
                            cudaStream_t stream)
{
    return launch_columns<false>(NULL, rows, width, const_cast<bf16 *>(values), sums, partial, stream);
}

/* A block adds up the partial sums of SUM_COLUMNS columns. There are few columns, so a block takes few of
 * them: more blocks keep more multiprocessors busy. Thread t adds up parts t / SUM_COLUMNS, t / SUM_COLUMNS +
 * BLOCK / SUM_COLUMNS, ... of column t % SUM_COLUMNS. */
#define SUM_COLUMNS 8 /* 32 adjacent bytes, the smallest unit of a read */
static __global__ void __launch_bounds__(BLOCK)
    partial_kernel(const float *partial, uint32_t parts, const struct vit_sums sums)
{
    __shared__ float all[WARPS][SUM_COLUMNS];
    const uint32_t own = threadIdx.x % SUM_COLUMNS, columns = sums.results * sums.columns;
    const uint32_t column = blockIdx.x * SUM_COLUMNS + own;
    float sum = 0;
#pragma unroll 4
    for (uint32_t part = threadIdx.x / SUM_COLUMNS; column < columns && part < parts;
         part += BLOCK / SUM_COLUMNS)
        sum += partial[(size_t)part * columns + column];
    for (int apart = SUM_COLUMNS; apart < 32; apart *= 2)
        sum += __shfl_xor_sync(~0u, sum, apart);
    if (threadIdx.x % 32 < SUM_COLUMNS)
        all[threadIdx.x / 32][own] = sum;
    __syncthreads();
    if (threadIdx.x >= SUM_COLUMNS || column >= columns)
        return;
    for (int other = 1; other < WARPS; other++)
        sum += all[other][own];
    float *result = sums.result[column / sums.columns];
    if (result)
        result[column % sums.columns] = sum;
}

enum status vit_partial_sums(const float *partial, uint32_t parts, const struct vit_sums *sums,
                             cudaStream_t stream)
{
    const uint32_t columns = sums->results * sums->columns;
    partial_kernel<<<(columns + SUM_COLUMNS - 1) / SUM_COLUMNS, BLOCK, 0, stream>>>(partial, parts, *sums);
    CUDA_TRY_LAUNCH("partial_kernel");
    return STATUS_OK;
}
