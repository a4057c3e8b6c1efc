/* The kernel of the gradients of a convolution's weights, for any kind of tensor core: a matrix product over
 * all pixels of a batch. A block computes a tile of the weights for a part of the pixels and stores fp32
 * sums. */
#ifndef FDSL_CUDA_TRAIN_RESNET_WEIGHTS_CUH
#define FDSL_CUDA_TRAIN_RESNET_WEIGHTS_CUH

#include "common/check.cuh"
#include "train/resnet/kernels.cuh"

#define DEPTH   64 /* pixels per stage */
#define STAGES  3
#define THREADS 256

template <class T> struct weights_plan {
    struct conv_pass pass; /* the forward pass */
    struct divider sample, line;
    uint32_t rows, rows_each; /* pixels of the batch, and of a part */
    uint32_t outputs, columns, column_tiles;
    const T *inputs, *deltas;
    float *parts; /* (part, output, column) */
};

/* Rows and columns of a tile: outputs, and (tap, channel). */
template <int ROWS, int COLUMNS> struct weights_tile {
    static constexpr int ROW_UNITS = ROWS / 8, COLUMN_UNITS = COLUMNS / 8;
    static constexpr int STAGE = DEPTH * (ROW_UNITS + COLUMN_UNITS);
    static constexpr size_t BYTES = (size_t)STAGES * STAGE * sizeof(uint4);
};

/* Returns where a stage stores a unit of a pixel: in tiles of 8 units per pixel. The order avoids bank
 * conflicts. */
static __device__ __forceinline__ int pixel_at(int pixel, int unit)
{
    return (unit / 8 * DEPTH + pixel) * 8 + (unit % 8 ^ pixel % 8);
}

/* Copies a stage: DEPTH pixels, from `first` on, of the gradients and of the windows. A thread always copies
 * the same unit of different pixels; `tap` is the tap of its unit of the windows. */
template <class T, int ROWS, int COLUMNS> struct weights_copier {
    typedef weights_tile<ROWS, COLUMNS> tile;
    static constexpr int ROW_STEP = THREADS / tile::ROW_UNITS, COLUMN_STEP = THREADS / tile::COLUMN_UNITS;
    const T *deltas;
    uint32_t channel;
    int32_t y, x; /* of the tap, in the window of pixel (0, 0) */
    bool has_output, has_column;

    __device__ __forceinline__ weights_copier(const struct weights_plan<T> &plan, uint32_t first_row,
                                              uint32_t first_column)
    {
        const uint32_t output = first_row + threadIdx.x % tile::ROW_UNITS * 8;
        const uint32_t column = first_column + threadIdx.x % tile::COLUMN_UNITS * 8;
        has_output = output < plan.outputs;
        has_column = column < plan.columns;
        deltas = plan.deltas + (has_output ? output : 0);
        const uint32_t tap = has_column ? column / plan.pass.channels : 0;
        const uint32_t i = tap / plan.pass.taps_x;
        channel = has_column ? column - tap * plan.pass.channels : 0;
        y = plan.pass.first_y + (int32_t)i;
        x = plan.pass.first_x + (int32_t)(tap - i * plan.pass.taps_x);
    }

    __device__ __forceinline__ void copy(const struct weights_plan<T> &plan, uint32_t first, uint32_t end,
                                         uint4 *stage) const
    {
#pragma unroll
        for (int i = 0; i < DEPTH / ROW_STEP; i++) {
            const int pixel = (int)threadIdx.x / tile::ROW_UNITS + i * ROW_STEP;
            const bool inside = has_output && first + pixel < end;
            copy_async16(stage + pixel_at(pixel, threadIdx.x % tile::ROW_UNITS),
                         inside ? deltas + (size_t)(first + pixel) * plan.outputs : plan.deltas, inside);
        }
        stage += DEPTH * tile::ROW_UNITS;
#pragma unroll
        for (int i = 0; i < DEPTH / COLUMN_STEP; i++) {
            const int pixel = (int)threadIdx.x / tile::COLUMN_UNITS + i * COLUMN_STEP;
            const uint32_t row = first + pixel, n = plan.sample.quotient(row), at = row - n * plan.sample.by;
            const uint32_t p = plan.line.quotient(at), q = at - p * plan.line.by;
            const int32_t at_y = (int32_t)p * plan.pass.scale + y, at_x = (int32_t)q * plan.pass.scale + x;
            const bool inside = has_column && row < end && is_inside(&plan.pass, at_y, at_x);
            const T *from = plan.inputs + n * plan.pass.image + (size_t)(uint32_t)at_y * plan.pass.line +
                            (size_t)(uint32_t)at_x * plan.pass.pixel + channel;
            copy_async16(stage + pixel_at(pixel, threadIdx.x % tile::COLUMN_UNITS),
                         inside ? from : plan.inputs, inside);
        }
    }
};

/* MULTIPLIER multiplies the stages, and holds the sums of a thread: start() begins with a stage, end() waits
 * for it, and store() writes the sums to the tile of the weights. */
template <class T, class MULTIPLIER, int ROWS, int COLUMNS>
static __global__ void __launch_bounds__(THREADS, 2)
    weights_kernel(const __grid_constant__ struct weights_plan<T> plan)
{
    typedef weights_tile<ROWS, COLUMNS> tile;
    extern __shared__ __align__(1024) uint4 shared[];
    const uint32_t row_tile = blockIdx.x / plan.column_tiles;
    const uint32_t first_row = row_tile * ROWS;
    const uint32_t first_column = (blockIdx.x - row_tile * plan.column_tiles) * COLUMNS;
    const uint32_t begin = blockIdx.y * plan.rows_each;
    const uint32_t end = begin + plan.rows_each < plan.rows ? begin + plan.rows_each : plan.rows;
    const uint32_t steps = end > begin ? (end - begin + DEPTH - 1) / DEPTH : 0;
    MULTIPLIER multiplier = {};
    const weights_copier<T, ROWS, COLUMNS> copier(plan, first_row, first_column);
#pragma unroll
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < steps)
            copier.copy(plan, begin + s * DEPTH, end, shared + s * tile::STAGE);
        copy_commit();
    }
    for (uint32_t s = 0; s < steps; s++) {
        copy_wait<STAGES - 2>();
        MULTIPLIER::publish();
        __syncthreads(); /* the stage is in shared memory, and all warps have finished the previous one */
        multiplier.start(shared + s % STAGES * tile::STAGE);
        if (s + STAGES - 1 < steps)
            copier.copy(plan, begin + (s + STAGES - 1) * DEPTH, end,
                        shared + (s + STAGES - 1) % STAGES * tile::STAGE);
        copy_commit();
        multiplier.end();
    }
    copy_wait<0>();
    multiplier.store(plan, first_row, first_column,
                     plan.parts + (size_t)blockIdx.y * plan.outputs * plan.columns);
}

/* Stores two adjacent sums of the weights. */
template <class T>
static __device__ __forceinline__ void store_pair(const struct weights_plan<T> &plan, uint32_t row,
                                                  uint32_t column, float low, float high, float *to)
{
    if (row < plan.outputs && column < plan.columns)
        *reinterpret_cast<float2 *>(to + (size_t)row * plan.columns + column) = {low, high};
}

template <class T, class MULTIPLIER, int ROWS, int COLUMNS>
static enum status weights_launch(struct weights_plan<T> *plan, uint32_t parts, cudaStream_t stream)
{
    typedef weights_tile<ROWS, COLUMNS> tile;
    plan->column_tiles = (plan->columns + COLUMNS - 1) / COLUMNS;
    CUDA_TRY((cudaFuncSetAttribute(weights_kernel<T, MULTIPLIER, ROWS, COLUMNS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)tile::BYTES)));
    const uint32_t tiles = (plan->outputs + ROWS - 1) / ROWS * plan->column_tiles;
    weights_kernel<T, MULTIPLIER, ROWS, COLUMNS><<<dim3(tiles, parts), THREADS, tile::BYTES, stream>>>(*plan);
    return CUDA_LAUNCHED("weights_kernel");
}

/* Returns the edge of a tile for `count` rows or columns. */
static inline uint32_t weights_edge(uint32_t count)
{
    return count > 64 ? 128 : 64;
}

/* Launches the kernel for these outputs and columns, with a multiplier of the template MULTIPLIER. */
template <class T, template <class, int, int> class MULTIPLIER>
static enum status weights_launch_any(struct weights_plan<T> *plan, uint32_t parts, cudaStream_t stream)
{
    const bool wide = weights_edge(plan->columns) == 128;
    if (weights_edge(plan->outputs) == 128)
        return wide ? weights_launch<T, MULTIPLIER<T, 128, 128>, 128, 128>(plan, parts, stream)
                    : weights_launch<T, MULTIPLIER<T, 128, 64>, 128, 64>(plan, parts, stream);
    return wide ? weights_launch<T, MULTIPLIER<T, 64, 128>, 64, 128>(plan, parts, stream)
                : weights_launch<T, MULTIPLIER<T, 64, 64>, 64, 64>(plan, parts, stream);
}

/* Compute capability 9.0, with HAVE_HOPPER (weights_hopper.cu). */
template <class T>
enum status weights_hopper_launch(struct weights_plan<T> *plan, uint32_t parts, cudaStream_t stream);

#endif
