/* Linear layers on few rows, for inference on a batch of one or some images, on compute capability 9.0. With
 * few rows, the latency of kernels limits the speed. A block of the network therefore takes five kernels
 * instead of seven, and their parts that do not depend on each other overlap: a kernel starts before the one
 * before it ends (programmatic dependent launch), and loads its weights until then.
 *
 * A block computes BLOCK_ROWS rows and COLUMNS columns of the outputs. It has all its inputs and weights in
 * shared memory at the same time. If the layer has more inputs than `width`, the SPLIT blocks of a cluster
 * have a part of the inputs each, and add up their sums in a fixed order. The two warpgroups of a block have
 * half of its inputs each. */
#include <cooperative_groups.h>

#include "common/check.cuh"
#include "train/vit/hopper.cuh"
#include "train/vit/kernels.cuh"

#define THREADS    256 /* two warpgroups */
#define BLOCK_ROWS HEIGHT
#define COLUMNS    32
#define APART      40 /* distance between rows of sums, so that a warp's stores are in different banks */
#define SPLIT_MAX  4
#define FEW_WIDTH  768 /* maximum width: 170 KB of shared memory */
#define TINY_WIDTH 192 /* of vit-tiny */

/* Shared memory: inputs and weights (tiles), sums (warpgroup, row, column), and the weight and bias of the
 * normalisation. */
struct few_memory {
    tile_row *inputs, *weights;
    float *sums, *norm_weight, *norm_bias;
};

static __device__ __forceinline__ struct few_memory divide(unsigned char *shared, uint32_t width)
{
    const uint32_t tiles = width / TILE_WIDTH;
    struct few_memory memory;
    memory.inputs = reinterpret_cast<tile_row *>(shared);
    memory.weights = memory.inputs + tiles * BLOCK_ROWS;
    memory.sums = reinterpret_cast<float *>(memory.weights + tiles * COLUMNS);
    memory.norm_weight = memory.sums + 2 * BLOCK_ROWS * APART;
    memory.norm_bias = memory.norm_weight + width;
    return memory;
}

static uint32_t memory_bytes(uint32_t width)
{
    return width * (BLOCK_ROWS + COLUMNS) * (uint32_t)sizeof(uint16_t) +
           (2 * BLOCK_ROWS * APART + 2 * width) * (uint32_t)sizeof(float);
}

/* Returns the sum over the lanes that have the same row in normalise(). */
static __device__ __forceinline__ float sum_of_row(float value)
{
    value += __shfl_xor_sync(~0u, value, 8);
    return value + __shfl_xor_sync(~0u, value, 16);
}

template <class T> static __device__ __forceinline__ void unpack8(const uint4 &words, float values[8])
{
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = values_of<T>(word[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

/* Normalises the rows of the inputs in place. A row belongs to four lanes of a warp, which are 8 apart, so
 * that 8 adjacent lanes access 8 rows, in different banks. */
template <class T>
static __device__ __forceinline__ void normalise(const struct few_memory &memory, uint32_t width)
{
    const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 * 8 + lane % 8, parts = width / 8;
    auto words = [&](uint32_t part) {
        return reinterpret_cast<uint4 *>(
            part_at(memory.inputs + part / PARTS * BLOCK_ROWS, row, part % PARTS));
    };
    float sum = 0, squares = 0, x[8];
    for (uint32_t part = lane / 8; part < parts; part += 4) {
        unpack8<T>(*words(part), x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum += x[i];
    }
    const float mean = sum_of_row(sum) / (float)width;
    for (uint32_t part = lane / 8; part < parts; part += 4) {
        unpack8<T>(*words(part), x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            squares = fmaf(x[i] - mean, x[i] - mean, squares);
    }
    const float scale = 1 / sqrtf(sum_of_row(squares) / (float)width + (float)LAYER_NORM_EPSILON);
    for (uint32_t part = lane / 8; part < parts; part += 4) {
        const float *weight = memory.norm_weight + 8 * part, *bias = memory.norm_bias + 8 * part;
        unpack8<T>(*words(part), x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = fmaf((x[i] - mean) * scale, weight[i], bias[i]);
        *words(part) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
    }
}

/* Computes the warpgroup's sums, and stores them in shared memory. */
template <class T>
static __device__ __forceinline__ void multiply(const struct few_memory &memory, uint32_t width)
{
    const uint32_t group = threadIdx.x / 128, steps = width / 16 / 2, lane = threadIdx.x % 32;
    const uint32_t row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    float sums[COLUMNS / 2], *into = memory.sums + group * BLOCK_ROWS * APART;
    auto inputs = [&](uint32_t step) {
        return wgmma_tile(memory.inputs + step / 4 * BLOCK_ROWS) + step % 4 * WGMMA_NEXT;
    };
    auto weights = [&](uint32_t step) {
        return wgmma_tile(memory.weights + step / 4 * COLUMNS) + step % 4 * WGMMA_NEXT;
    };
    wgmma_fence();
    wgmma<T, COLUMNS, 0, 0>(sums, inputs(group * steps), weights(group * steps), false);
    for (uint32_t i = 1; i < steps; i++)
        wgmma<T, COLUMNS, 0, 0>(sums, inputs(group * steps + i), weights(group * steps + i), true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_ended(sums);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<float2 *>(into + (row + 8 * half) * APART + 8 * n +
                                        column) = {sums[4 * n + 2 * half], sums[4 * n + 2 * half + 1]};
}

/* Block (part, columns, rows): `part` is its part of the inputs, and its rank in the cluster. In the end,
 * each block of a cluster writes a part of the rows. */
template <class T, bool NORM, bool GELU, int SPLIT>
static __global__ void __launch_bounds__(THREADS)
    few_kernel(const __grid_constant__ struct vit_few<T> plan, uint32_t width)
{
    constexpr uint32_t ROWS = BLOCK_ROWS / SPLIT, PAIRS = COLUMNS / 2, EACH = ROWS * PAIRS / THREADS;
    extern __shared__ __align__(1024) unsigned char shared[];
    const struct few_memory memory = divide(shared, width);
    const uint32_t warp = threadIdx.x / 32, tiles = width / TILE_WIDTH, in = plan.linear.in;
    const uint32_t first_column = blockIdx.y * COLUMNS, first = blockIdx.z * BLOCK_ROWS;
    const uint32_t column = threadIdx.x % PAIRS * 2, row = blockIdx.x * ROWS + threadIdx.x / PAIRS;
    const uint32_t count = plan.linear.rows - first; /* may exceed BLOCK_ROWS */
    const T *weights = plan.weights + (size_t)first_column * in + blockIdx.x * width;
    for (uint32_t i = warp; i < tiles * (COLUMNS / 16); i += THREADS / 32)
        copy_rows16(memory.weights + i / 2 * COLUMNS, i % 2 * 16, COLUMNS, weights + i / 2 * TILE_WIDTH, in);
    for (uint32_t i = threadIdx.x; NORM && i < width; i += THREADS) {
        memory.norm_weight[i] = plan.norm_weight[i];
        memory.norm_bias[i] = plan.norm_bias[i];
    }
    const float2 bias = values_of<T>(*reinterpret_cast<const uint32_t *>(plan.bias + first_column + column));

    wait_for_previous();
    allow_next();
    const T *inputs = plan.inputs + (size_t)first * in + blockIdx.x * width;
    for (uint32_t i = warp; i < tiles * (BLOCK_ROWS / 16); i += THREADS / 32)
        copy_rows16(memory.inputs + i / 4 * BLOCK_ROWS, i % 4 * 16, count, inputs + i / 4 * TILE_WIDTH, in);
    uint32_t shortcut[EACH];
    size_t at = (size_t)(first + row) * plan.linear.out + first_column + column;
    const size_t apart = (size_t)(THREADS / PAIRS) * plan.linear.out;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        shortcut[i] = plan.shortcut && row + i * (THREADS / PAIRS) < count
                          ? *reinterpret_cast<const uint32_t *>(plan.shortcut + at + i * apart)
                          : 0;
    copy_commit();
    copy_wait<0>();
    if (NORM) {
        __syncthreads();
        normalise<T>(memory, width);
    }
    wgmma_publish();
    __syncthreads();
    multiply<T>(memory, width);
    if (SPLIT > 1)
        cooperative_groups::this_cluster().sync();
    else
        __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const uint32_t own = row + i * (THREADS / PAIRS);
        float2 sum = bias;
#pragma unroll
        for (int part = 0; part < SPLIT; part++) {
            const float *sums = SPLIT > 1
                                    ? cooperative_groups::this_cluster().map_shared_rank(memory.sums, part)
                                    : memory.sums;
            for (int group = 0; group < 2; group++) {
                const float2 more =
                    *reinterpret_cast<const float2 *>(sums + (group * BLOCK_ROWS + own) * APART + column);
                sum = {sum.x + more.x, sum.y + more.y};
            }
        }
        const float2 add = values_of<T>(shortcut[i]);
        if (own < count)
            *reinterpret_cast<uint32_t *>(plan.outputs + at + i * apart) =
                GELU ? pack<T>(gelu(sum.x), gelu(sum.y)) : pack<T>(sum.x + add.x, sum.y + add.y);
    }
    if (SPLIT > 1) /* other blocks read this block's sums until here */
        cooperative_groups::this_cluster().sync();
}

enum status few_hopper_fits(const struct vit_rows *rows, uint32_t hidden, bool *fits)
{
    uint32_t processors;
    TRY(processors_of(&processors));
    TRY(on_hopper(fits));
    const uint32_t width = rows->width, count = rows->samples * rows->tokens,
                   parts = (count - 1) / BLOCK_ROWS + 1;
    /* Gemms of cuBLASLt are faster if a layer has more work than the most rows of vit-tiny. */
    *fits = *fits && width % TILE_WIDTH == 0 && width <= FEW_WIDTH && hidden == SPLIT_MAX * width &&
            count <= VIT_FEW_ROWS &&
            (uint64_t)count * width * width <= (uint64_t)VIT_FEW_ROWS * TINY_WIDTH * TINY_WIDTH &&
            (uint64_t)parts * (width / COLUMNS) <= processors;
    return STATUS_OK;
}

template <class T, bool NORM, bool GELU, int SPLIT>
static enum status launch(const struct vit_few<T> *few, uint32_t width, cudaStream_t stream)
{
    const struct vit_linear *linear = &few->linear;
    const struct early_launch launch = {
        dim3(SPLIT, linear->out / COLUMNS, (linear->rows - 1) / BLOCK_ROWS + 1), THREADS, memory_bytes(width),
        SPLIT};
    return launch_early(few_kernel<T, NORM, GELU, SPLIT>, &launch, stream, *few, width);
}

template <class T>
enum status few_hopper_linear(const struct vit_few<T> *few, uint32_t width, cudaStream_t stream)
{
    if (few->linear.in > width)
        return launch<T, false, false, SPLIT_MAX>(few, width, stream);
    if (!few->norm_weight)
        return launch<T, false, false, 1>(few, width, stream);
    return few->gelu ? launch<T, true, true, 1>(few, width, stream)
                     : launch<T, true, false, 1>(few, width, stream);
}

EACH_HALF(few_hopper_linear)
