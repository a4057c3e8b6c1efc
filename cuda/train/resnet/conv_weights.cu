/* The gradients of a convolution's weights: a matrix product over all pixels of a batch. A block computes a
 * tile of the weights for a part of the pixels and stores fp32 sums. A second kernel adds up the parts in
 * order. */
#include "common/check.cuh"
#include "train/resnet/kernels.cuh"

#define DEPTH      32 /* pixels per stage */
#define STAGES     4
#define THREADS    256
#define BLOCKS     (2 * 264)   /* blocks that fill an H200 twice, with two blocks per multiprocessor */
#define PIXELS_MIN (8 * DEPTH) /* per part */

struct weights_plan {
    struct conv_pass pass; /* the forward pass */
    struct divider sample, line;
    uint32_t rows, rows_each; /* pixels of the batch, and of a part */
    uint32_t outputs, columns, column_tiles;
    const bf16 *inputs, *deltas;
    float *parts; /* (part, output, column) */
};

/* Rows and columns of a tile: outputs, and (tap, channel). A warp computes 32 columns. */
template <int ROWS, int COLUMNS> struct weights_tile {
    static constexpr int WARP_ROWS = ROWS * COLUMNS / 32 / (THREADS / 32), ROW_MMAS = WARP_ROWS / 16;
    static constexpr int ACROSS = COLUMNS / 32;
    static constexpr int ROW_UNITS = ROWS / 8, COLUMN_UNITS = COLUMNS / 8;
    static constexpr int STAGE = DEPTH * (ROW_UNITS + COLUMN_UNITS);
    static constexpr size_t BYTES = (size_t)STAGES * STAGE * sizeof(uint4);
};

/* Returns where a stage stores a unit of a pixel, which has UNITS units. The order avoids bank conflicts. */
template <int UNITS> static __device__ __forceinline__ int unit_at(int pixel, int unit)
{
    return pixel * UNITS + (unit ^ (pixel & 7));
}

/* Copies a stage: DEPTH pixels, from `first` on, of the gradients and of the windows. A thread always copies
 * the same unit of different pixels; `tap` is the tap of its unit of the windows. */
template <int ROWS, int COLUMNS> struct weights_copier {
    typedef weights_tile<ROWS, COLUMNS> tile;
    static constexpr int ROW_STEP = THREADS / tile::ROW_UNITS, COLUMN_STEP = THREADS / tile::COLUMN_UNITS;
    const bf16 *deltas;
    uint32_t channel;
    int32_t y, x; /* of the tap, in the window of pixel (0, 0) */
    bool has_output, has_column;

    __device__ __forceinline__ weights_copier(const struct weights_plan &plan, uint32_t first_row,
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

    __device__ __forceinline__ void copy(const struct weights_plan &plan, uint32_t first, uint32_t end,
                                         uint4 *stage) const
    {
#pragma unroll
        for (int i = 0; i < DEPTH / ROW_STEP; i++) {
            const int pixel = (int)threadIdx.x / tile::ROW_UNITS + i * ROW_STEP;
            const bool inside = has_output && first + pixel < end;
            copy_async16(stage + unit_at<tile::ROW_UNITS>(pixel, threadIdx.x % tile::ROW_UNITS),
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
            const bf16 *from = plan.inputs + n * plan.pass.image + (size_t)(uint32_t)at_y * plan.pass.line +
                               (size_t)(uint32_t)at_x * plan.pass.pixel + channel;
            copy_async16(stage + unit_at<tile::COLUMN_UNITS>(pixel, threadIdx.x % tile::COLUMN_UNITS),
                         inside ? from : plan.inputs, inside);
        }
    }
};

template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void multiply_stage(const uint4 *stage, float (*sums)[4][4])
{
    typedef weights_tile<ROWS, COLUMNS> tile;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = lane / 8;
    const int row = warp / tile::ACROSS * tile::WARP_ROWS, column = warp % tile::ACROSS * 32;
    const uint4 *windows = stage + DEPTH * tile::ROW_UNITS;
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        uint32_t a[tile::ROW_MMAS][4], b[2][4];
#pragma unroll
        for (int m = 0; m < tile::ROW_MMAS; m++)
            mma_load4_transposed(a[m], stage + unit_at<tile::ROW_UNITS>(16 * k + part / 2 * 8 + lane % 8,
                                                                        row / 8 + 2 * m + part % 2));
#pragma unroll
        for (int n = 0; n < 2; n++)
            mma_load4_transposed(b[n], windows + unit_at<tile::COLUMN_UNITS>(16 * k + part % 2 * 8 + lane % 8,
                                                                             column / 8 + 2 * n + part / 2));
#pragma unroll
        for (int m = 0; m < tile::ROW_MMAS; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                mma_16816(sums[m][n], a[m], &b[n / 2][n % 2 * 2], bf16());
    }
}

template <int ROWS, int COLUMNS>
static __global__ void __launch_bounds__(THREADS, 2)
    weights_kernel(const __grid_constant__ struct weights_plan plan)
{
    typedef weights_tile<ROWS, COLUMNS> tile;
    extern __shared__ uint4 shared[];
    const uint32_t row_tile = blockIdx.x / plan.column_tiles;
    const uint32_t first_row = row_tile * ROWS;
    const uint32_t first_column = (blockIdx.x - row_tile * plan.column_tiles) * COLUMNS;
    const uint32_t begin = blockIdx.y * plan.rows_each;
    const uint32_t end = begin + plan.rows_each < plan.rows ? begin + plan.rows_each : plan.rows;
    const uint32_t steps = end > begin ? (end - begin + DEPTH - 1) / DEPTH : 0;
    float sums[tile::ROW_MMAS][4][4] = {};
    const weights_copier<ROWS, COLUMNS> copier(plan, first_row, first_column);
#pragma unroll
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < steps)
            copier.copy(plan, begin + s * DEPTH, end, shared + s * tile::STAGE);
        copy_commit();
    }
    for (uint32_t s = 0; s < steps; s++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (s + STAGES - 1 < steps)
            copier.copy(plan, begin + (s + STAGES - 1) * DEPTH, end,
                        shared + (s + STAGES - 1) % STAGES * tile::STAGE);
        copy_commit();
        multiply_stage<ROWS, COLUMNS>(shared + s % STAGES * tile::STAGE, sums);
    }
    copy_wait<0>();
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row = first_row + warp / tile::ACROSS * tile::WARP_ROWS + lane / 4;
    const uint32_t column = first_column + warp % tile::ACROSS * 32 + lane % 4 * 2;
    float *to = plan.parts + (size_t)blockIdx.y * plan.outputs * plan.columns;
#pragma unroll
    for (int m = 0; m < tile::ROW_MMAS; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t r = row + 16 * m + 8 * half, c = column + 8 * n;
                if (r < plan.outputs && c < plan.columns)
                    *reinterpret_cast<float2 *>(to + (size_t)r * plan.columns +
                                                c) = {sums[m][n][2 * half], sums[m][n][2 * half + 1]};
            }
}

/* ---- Sums of the parts ---- */

/* How the columns of a tile map to the weights (out, in, tap). */
struct weights_order {
    uint32_t outputs, columns, parts;
    uint32_t channels, taps; /* columns are (tap, channel) */
    uint32_t image_channels; /* of the first convolution, whose columns are (tap y, tap x, channel); else 0 */
};

static __global__ void __launch_bounds__(BLOCK)
    weights_sum_kernel(const struct weights_order order, const float *parts, float *gradients)
{
    const uint32_t i = own_element(), count = order.outputs * order.columns;
    if (i >= count)
        return;
    const uint32_t output = i / order.columns, column = i - output * order.columns;
    const uint32_t tap = column / order.channels, channel = column - tap * order.channels;
    float sum = 0;
#pragma unroll 8
    for (uint32_t part = 0; part < order.parts; part++)
        sum += parts[(size_t)part * count + i];
    if (order.image_channels == 0) {
        gradients[((size_t)output * order.channels + channel) * order.taps + tap] = sum;
        return;
    }
    const uint32_t x = channel / IMAGE_CHANNELS, from = channel % IMAGE_CHANNELS;
    if (x < STEM_KERNEL && from < order.image_channels)
        gradients[((output * order.image_channels + from) * STEM_KERNEL + tap) * STEM_KERNEL + x] = sum;
}

/* ---- Launches ---- */

static uint32_t rows_of(const struct conv_shape *shape, uint32_t samples)
{
    return samples * shape->out_height * shape->out_width;
}

static uint32_t columns_of(const struct conv_shape *shape)
{
    return shape->kernel_y * shape->kernel_x * shape->channels;
}

/* Returns the edge of a tile for `count` rows or columns. */
static uint32_t edge(uint32_t count)
{
    return count > 64 ? 128 : 64;
}

/* Returns the number of parts of the pixels. */
static uint32_t parts_of(const struct conv_shape *shape, uint32_t samples)
{
    const uint32_t rows = rows_of(shape, samples), columns = columns_of(shape);
    const uint32_t tiles = ((shape->outputs + edge(shape->outputs) - 1) / edge(shape->outputs)) *
                           ((columns + edge(columns) - 1) / edge(columns));
    const uint32_t most = (rows + PIXELS_MIN - 1) / PIXELS_MIN, wanted = BLOCKS / tiles;
    return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

size_t resnet_room(const struct conv_shape *shape, uint32_t samples)
{
    return (size_t)parts_of(shape, samples) * shape->outputs * columns_of(shape);
}

template <int ROWS, int COLUMNS>
static enum status launch(struct weights_plan *plan, uint32_t parts, cudaStream_t stream)
{
    typedef weights_tile<ROWS, COLUMNS> tile;
    plan->column_tiles = (plan->columns + COLUMNS - 1) / COLUMNS;
    CUDA_TRY(cudaFuncSetAttribute(weights_kernel<ROWS, COLUMNS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)tile::BYTES));
    const uint32_t tiles = (plan->outputs + ROWS - 1) / ROWS * plan->column_tiles;
    weights_kernel<ROWS, COLUMNS><<<dim3(tiles, parts), THREADS, tile::BYTES, stream>>>(*plan);
    return CUDA_LAUNCHED("weights_kernel");
}

enum status resnet_weights(const struct conv_shape *shape, uint32_t samples, const bf16 *inputs,
                           const bf16 *deltas, uint32_t image_channels, float *room, float *gradients,
                           cudaStream_t stream)
{
    const uint32_t parts = parts_of(shape, samples), steps = (rows_of(shape, samples) + DEPTH - 1) / DEPTH;
    struct weights_plan plan = {};
    plan.pass = conv_forward_pass(shape);
    plan.sample = divider_of(shape->out_height * shape->out_width);
    plan.line = divider_of(shape->out_width);
    plan.rows = rows_of(shape, samples);
    plan.rows_each = (steps + parts - 1) / parts * DEPTH;
    plan.outputs = shape->outputs;
    plan.columns = columns_of(shape);
    plan.inputs = inputs;
    plan.deltas = deltas;
    plan.parts = room;
    const bool wide = edge(plan.columns) == 128;
    TRY((edge(plan.outputs) == 128
             ? wide ? launch<128, 128>(&plan, parts, stream) : launch<128, 64>(&plan, parts, stream)
         : wide ? launch<64, 128>(&plan, parts, stream)
                : launch<64, 64>(&plan, parts, stream)));
    const struct weights_order order = {
        plan.outputs,  plan.columns, parts, shape->channels, shape->kernel_y * shape->kernel_x,
        image_channels};
    weights_sum_kernel<<<blocks_for((size_t)plan.outputs * plan.columns), BLOCK, 0, stream>>>(order, room,
                                                                                              gradients);
    return CUDA_LAUNCHED("weights_sum_kernel");
}
