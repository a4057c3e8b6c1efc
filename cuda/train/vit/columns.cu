/* Sums of columns, GELU, and the two linear layers of a block. The kernels read
 * each matrix once. In those for matrices in 16 bits, a thread processes 8 adjacent values at a time. */
#include "common/check.cuh"
#include "train/vit/fragments.cuh"
#include "train/vit/kernels.cuh"

#define VALUES 8 /* values per thread: 16 bytes */
#define WARPS  (BLOCK / 32)

/* Eight adjacent values. */
struct eight {
    float value[VALUES];
};

template <class T> static __device__ __forceinline__ struct eight load8(const T *from)
{
    const uint4 words = *reinterpret_cast<const uint4 *>(from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    struct eight all;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 values = values_of<T>(word[i]);
        all.value[2 * i] = values.x;
        all.value[2 * i + 1] = values.y;
    }
    return all;
}

template <class T> static __device__ __forceinline__ void store8(T *to, const struct eight &all)
{
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = pack<T>(all.value[2 * i], all.value[2 * i + 1]);
    *reinterpret_cast<uint4 *>(to) = {word[0], word[1], word[2], word[3]};
}

/* ---- GELU ---- */

template <class T>
static __global__ void __launch_bounds__(BLOCK) gelu_kernel(const T *inputs, size_t count, T *outputs)
{
    const size_t at = ((size_t)blockIdx.x * BLOCK + threadIdx.x) * VALUES;
    if (at >= count)
        return;
    struct eight all = load8<T>(inputs + at);
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        all.value[i] = gelu(all.value[i]);
    store8<T>(outputs + at, all);
}

/* Computes outputs = GELU(inputs) for `count` values, a multiple of 8. */
template <class T>
static enum status gelu_forward(const T *inputs, size_t count, T *outputs, cudaStream_t stream)
{
    gelu_kernel<T><<<blocks_for(count / VALUES), BLOCK, 0, stream>>>(inputs, count, outputs);
    return CUDA_LAUNCHED("gelu_kernel");
}

/* ---- Sums of columns ---- */

/* Warp w of block (column group, part) adds up rows part * WARPS + w, part * WARPS + w + parts * WARPS, ...
 * `parts` is gridDim.y. If GELU is true, the kernel first replaces `values`, the gradients of GELU's outputs,
 * by the gradients of GELU's inputs. */
template <class T, bool GELU>
static __global__ void __launch_bounds__(BLOCK)
    columns_kernel(const T *inputs, uint32_t rows, uint32_t width, T *values, float *partial)
{
    __shared__ float all[WARPS][32][VALUES + 1];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t column = (blockIdx.x * 32 + lane) * VALUES;
    struct eight sums = {};
    for (uint32_t row = blockIdx.y * WARPS + warp; column < width && row < rows; row += gridDim.y * WARPS) {
        const size_t at = (size_t)row * width + column;
        struct eight value = load8<T>(values + at);
        if (GELU) {
            const struct eight x = load8<T>(inputs + at);
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                value.value[i] *= gelu_both(x.value[i]).slope;
            store8<T>(values + at, value);
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

template <class T, bool GELU>
static enum status launch_columns(const T *inputs, uint32_t rows, uint32_t width, T *values, float *result,
                                  struct vit_sums *sums, cudaStream_t stream)
{
    const uint32_t groups = (width + 32 * VALUES - 1) / (32 * VALUES), needed = (rows + WARPS - 1) / WARPS;
    const uint32_t most = VIT_PARTS / groups, parts = needed < most ? needed : most;
    const struct vit_sum sum = {NULL, parts, 1, width, {result}};
    columns_kernel<T, GELU>
        <<<dim3(groups, parts), BLOCK, 0, stream>>>(inputs, rows, width, values, vit_sums_room(sums));
    CUDA_TRY_LAUNCH("columns_kernel");
    return vit_sums_add(sums, &sum);
}

/* Replaces the gradients of GELU's outputs (rows, width) by those of its inputs, and sums them over the rows.
 * `width` is a multiple of 8. */
template <class T>
static enum status gelu_backward(const T *inputs, uint32_t rows, uint32_t width, T *deltas, float *bias,
                                 struct vit_sums *sums, cudaStream_t stream)
{
    return launch_columns<T, true>(inputs, rows, width, deltas, bias, sums, stream);
}

template <class T>
enum status vit_column_sums(const T *values, uint32_t rows, uint32_t width, float *result,
                            struct vit_sums *sums, cudaStream_t stream)
{
    return launch_columns<T, false>(NULL, rows, width, const_cast<T *>(values), result, sums, stream);
}

/* ---- Sums over the partial sums of several kernels ---- */

#define SUM_COLUMNS 8 /* 32 adjacent bytes, the smallest unit of a read */

#define SUM_LOADS   8 /* parts that a thread may load at a time: the latency of loads limits the speed */

/* With few parts, a thread adds up all parts of 4 adjacent columns. */
static __host__ __device__ __forceinline__ bool has_few(const struct vit_sum &sum)
{
    return sum.parts <= 64 && sum.results == 1 && sum.columns % 4 == 0;
}

static __host__ __device__ __forceinline__ uint32_t blocks_of(const struct vit_sum &sum)
{
    if (has_few(sum))
        return (sum.columns / 4 + BLOCK - 1) / BLOCK;
    return (sum.results * sum.columns + SUM_COLUMNS - 1) / SUM_COLUMNS;
}

/* Adds up columns 4 * `group` to 4 * `group` + 3. */
static __device__ __forceinline__ void add_few(const struct vit_sum &of, uint32_t group)
{
    float4 sum = {0, 0, 0, 0};
    if (4 * group >= of.columns)
        return;
    for (uint32_t first = 0; first < of.parts; first += SUM_LOADS) {
        float4 more[SUM_LOADS] = {};
#pragma unroll
        for (uint32_t i = 0; i < SUM_LOADS; i++)
            if (first + i < of.parts)
                more[i] =
                    reinterpret_cast<const float4 *>(of.partial + (size_t)(first + i) * of.columns)[group];
#pragma unroll
        for (const float4 &part : more)
            sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    if (of.result[0])
        reinterpret_cast<float4 *>(of.result[0])[group] = sum;
}

/* A block adds up the partial sums of SUM_COLUMNS columns. There are few columns, so a block takes few of
 * them: more blocks keep more multiprocessors busy. Thread t adds up parts t / SUM_COLUMNS, t / SUM_COLUMNS +
 * BLOCK / SUM_COLUMNS, ... of column t % SUM_COLUMNS. */
static __global__ void __launch_bounds__(BLOCK) sums_kernel(const struct vit_sums all_sums)
{
    __shared__ float all[WARPS][SUM_COLUMNS];
    uint32_t which = 0, block = blockIdx.x;
    for (; block >= blocks_of(all_sums.sums[which]); which++)
        block -= blocks_of(all_sums.sums[which]);
    const struct vit_sum &of = all_sums.sums[which];
    if (has_few(of)) {
        add_few(of, block * BLOCK + threadIdx.x);
        return;
    }
    const uint32_t own = threadIdx.x % SUM_COLUMNS, columns = of.results * of.columns;
    const uint32_t column = block * SUM_COLUMNS + own;
    float sum = 0;
    constexpr uint32_t APART = BLOCK / SUM_COLUMNS;
    for (uint32_t first = threadIdx.x / SUM_COLUMNS; column < columns && first < of.parts;
         first += SUM_LOADS * APART) {
        float more[SUM_LOADS] = {};
#pragma unroll
        for (uint32_t i = 0; i < SUM_LOADS; i++)
            if (first + i * APART < of.parts)
                more[i] = of.partial[(size_t)(first + i * APART) * columns + column];
#pragma unroll
        for (float part : more)
            sum += part;
    }
    for (int apart = SUM_COLUMNS; apart < 32; apart *= 2)
        sum += __shfl_xor_sync(~0u, sum, apart);
    if (threadIdx.x % 32 < SUM_COLUMNS)
        all[threadIdx.x / 32][own] = sum;
    __syncthreads();
    if (threadIdx.x >= SUM_COLUMNS || column >= columns)
        return;
    for (int other = 1; other < WARPS; other++)
        sum += all[other][own];
    float *result = of.result[column / of.columns];
    if (result)
        result[column % of.columns] = sum;
}

enum status vit_sums_open(struct allocations *allocations, size_t values, size_t weights,
                          struct vit_sums *sums)
{
    sums->size = VIT_SUMS_SMALL * values + weights;
    for (float *&room : sums->rooms)
        TRY(allocate(allocations, &room, sums->size));
    return STATUS_OK;
}

enum status vit_sums_add(struct vit_sums *sums, const struct vit_sum *sum)
{
    if (sums->count == VIT_SUMS_MAX)
        return status_set(STATUS_FAILED,
                          "vit: more than %d kernels write partial sums before they are added up",
                          VIT_SUMS_MAX);
    sums->sums[sums->count] = *sum;
    sums->sums[sums->count++].partial = vit_sums_room(sums);
    sums->used += ((size_t)sum->parts * sum->results * sum->columns + 3) / 4 * 4; /* aligned for a float4 */
    return sums->used <= sums->size ? STATUS_OK
                                    : status_set(STATUS_FAILED, "vit: no room for more partial sums");
}

enum status vit_sums_finish(struct vit_sums *sums, cudaStream_t stream)
{
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < sums->count; i++)
        blocks += blocks_of(sums->sums[i]);
    sums_kernel<<<blocks, BLOCK, 0, stream>>>(*sums);
    CUDA_TRY_LAUNCH("sums_kernel");
    sums->used = sums->count = 0;
    sums->turn ^= 1;
    return STATUS_OK;
}

/* ---- Two linear layers and the GELU between them ---- */

enum status vit_mlp_fits(const struct vit_linear *first, bool *fits)
{
#if HAVE_HOPPER
    return mlp_hopper_fits(first, fits);
#else
    (void)first;
    *fits = false;
    return STATUS_OK;
#endif
}

uint32_t vit_mlp_parts(uint32_t rows)
{
#if HAVE_HOPPER
    const uint32_t parts = wide_hopper_parts(rows);
    return parts > VIT_PARTS ? parts : VIT_PARTS;
#else
    (void)rows;
    return VIT_PARTS;
#endif
}

template <class T>
enum status vit_mlp_hidden(struct vit_multiplier *multiplier, const struct vit_mlp<T> *mlp,
                           cudaStream_t stream)
{
    if (mlp->fused)
        return STATUS_OK;
#if HAVE_HOPPER
    bool wide;
    TRY(wide_hopper_fits(&mlp->first, &wide));
    if (wide)
        return wide_hopper_forward<T>(mlp, stream);
#endif
    TRY(vit_linear_forward<T>(multiplier, &mlp->first, false, mlp->inputs, mlp->first_weights,
                              mlp->first_bias, mlp->hidden, stream));
    return gelu_forward<T>(mlp->hidden, (size_t)mlp->first.rows * mlp->first.out, mlp->active, stream);
}

template <class T>
enum status vit_mlp_forward(struct vit_multiplier *multiplier, const struct vit_mlp<T> *mlp,
                            const struct vit_norm<T> *norm, const T *shortcut, T *branch, cudaStream_t stream)
{
#if HAVE_HOPPER
    if (mlp->fused)
        TRY(mlp_hopper_forward<T>(mlp, norm, shortcut, norm->first_tokens ? branch : nullptr, stream));
    if (mlp->fused && !norm->first_tokens)
        return STATUS_OK;
#endif
    TRY(vit_mlp_hidden<T>(multiplier, mlp, stream));
    if (!mlp->fused)
        TRY(vit_linear_forward<T>(multiplier, &mlp->second, false, mlp->active, mlp->second_weights,
                                  mlp->second_bias, branch, stream));
    return vit_add_norm<T>(norm, shortcut, branch, stream);
}

template <class T>
enum status vit_mlp_backward(struct vit_multiplier *multiplier, const struct vit_mlp<T> *mlp,
                             const T *out_deltas, T *deltas, T *in_deltas, const struct vit_norm<T> *norm,
                             const struct vit_norm_deltas<T> *norm_deltas, float *bias, struct vit_sums *sums,
                             cudaStream_t stream)
{
    bool wide = false;
#if HAVE_HOPPER
    if (mlp->fused)
        return mlp_hopper_backward<T>(mlp, out_deltas, deltas, norm, norm_deltas, bias, sums, stream);
    TRY(wide_hopper_fits(&mlp->first, &wide));
    if (wide)
        TRY(wide_hopper_backward<T>(mlp, out_deltas, deltas, bias, sums, stream));
#endif
    if (!wide) {
        TRY(vit_linear_inputs<T>(multiplier, &mlp->second, 0, out_deltas, mlp->second_weights, deltas,
                                 stream));
        TRY(gelu_backward<T>(mlp->hidden, mlp->first.rows, mlp->first.out, deltas, bias, sums, stream));
    }
    TRY(vit_linear_inputs<T>(multiplier, &mlp->first, 0, deltas, mlp->first_weights, in_deltas, stream));
    return vit_add_norm_backward<T>(norm, norm_deltas, sums, stream);
}

/* ---- Linear layers for inference with few rows ---- */

enum status vit_few_fits(const struct vit_rows *rows, uint32_t hidden, bool *fits)
{
#if HAVE_HOPPER
    return few_hopper_fits(rows, hidden, fits);
#else
    (void)rows, (void)hidden;
    *fits = false;
    return STATUS_OK;
#endif
}

template <class T>
enum status vit_few_linear(const struct vit_few<T> *few, uint32_t width, cudaStream_t stream)
{
#if HAVE_HOPPER
    return few_hopper_linear<T>(few, width, stream);
#else
    (void)few, (void)width, (void)stream;
    return status_set(STATUS_UNAVAILABLE, "vit: no fused kernel for few rows on this device");
#endif
}

EACH_HALF(vit_column_sums)
EACH_HALF(vit_mlp_hidden)
EACH_HALF(vit_mlp_forward)
EACH_HALF(vit_mlp_backward)
EACH_HALF(vit_few_linear)
