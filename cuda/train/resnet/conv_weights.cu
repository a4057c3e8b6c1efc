/* The gradients of a convolution's weights, with mma: see weights.cuh. On GPUs that have it, wgmma is faster
 * (weights_hopper.cu). A second kernel adds up the parts in order. */
#include "train/resnet/weights.cuh"
#ifdef HAVE_HOPPER
#include "train/vit/hopper.cuh"
#endif

#define BLOCKS     (2 * 264)   /* blocks that fill an H200 twice, with two blocks per multiprocessor */
#define PIXELS_MIN (4 * DEPTH) /* per part */

/* A warp multiplies 32 columns, and the rows that 8 warps leave. */
template <class T, int ROWS, int COLUMNS> struct weights_mma {
    typedef weights_tile<ROWS, COLUMNS> tile;
    static constexpr int WARP_ROWS = ROWS * COLUMNS / 32 / (THREADS / 32), ROW_MMAS = WARP_ROWS / 16;
    static constexpr int ACROSS = COLUMNS / 32;
    float sums[ROW_MMAS][4][4];

    static __device__ __forceinline__ void publish(void)
    {
    }

    __device__ __forceinline__ void start(const uint4 *stage)
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = lane / 8;
        const int row = warp / ACROSS * WARP_ROWS, column = warp % ACROSS * 32;
        const uint4 *windows = stage + DEPTH * tile::ROW_UNITS;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32_t a[ROW_MMAS][4], b[2][4];
#pragma unroll
            for (int m = 0; m < ROW_MMAS; m++)
                mma_load4_transposed(
                    a[m], stage + pixel_at(16 * k + part / 2 * 8 + lane % 8, row / 8 + 2 * m + part % 2));
#pragma unroll
            for (int n = 0; n < 2; n++)
                mma_load4_transposed(b[n], windows + pixel_at(16 * k + part % 2 * 8 + lane % 8,
                                                              column / 8 + 2 * n + part / 2));
#pragma unroll
            for (int m = 0; m < ROW_MMAS; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    mma_16816(sums[m][n], a[m], &b[n / 2][n % 2 * 2], T());
        }
    }

    __device__ __forceinline__ void end(void)
    {
    }

    __device__ __forceinline__ void store(const struct weights_plan<T> &plan, uint32_t first_row,
                                          uint32_t first_column, float *to)
    {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t row = first_row + warp / ACROSS * WARP_ROWS + lane / 4;
        const uint32_t column = first_column + warp % ACROSS * 32 + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < ROW_MMAS; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *of = sums[m][n];
                store_pair<T>(plan, row + 16 * m, column + 8 * n, of[0], of[1], to);
                store_pair<T>(plan, row + 16 * m + 8, column + 8 * n, of[2], of[3], to);
            }
    }
};

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

/* Returns the number of parts of the pixels. */
static uint32_t parts_of(const struct conv_shape *shape, uint32_t samples)
{
    const uint32_t rows = rows_of(shape, samples), columns = columns_of(shape);
    const uint32_t tiles =
        ((shape->outputs + weights_edge(shape->outputs) - 1) / weights_edge(shape->outputs)) *
        ((columns + weights_edge(columns) - 1) / weights_edge(columns));
    const uint32_t most = (rows + PIXELS_MIN - 1) / PIXELS_MIN, wanted = BLOCKS / tiles;
    return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

size_t resnet_room(const struct conv_shape *shape, uint32_t samples)
{
    return (size_t)parts_of(shape, samples) * shape->outputs * columns_of(shape);
}

template <class T>
static enum status launch(struct weights_plan<T> *plan, uint32_t parts, cudaStream_t stream)
{
#ifdef HAVE_HOPPER
    bool hopper;
    TRY(on_hopper(&hopper));
    if (hopper)
        return weights_hopper_launch<T>(plan, parts, stream);
#endif
    return weights_launch_any<T, weights_mma>(plan, parts, stream);
}

template <class T>
enum status resnet_weights(const struct conv_shape *shape, uint32_t samples, const T *inputs, const T *deltas,
                           uint32_t image_channels, float *room, float *gradients, cudaStream_t stream)
{
    const uint32_t parts = parts_of(shape, samples), steps = (rows_of(shape, samples) + DEPTH - 1) / DEPTH;
    struct weights_plan<T> plan = {
    };
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
    TRY(launch<T>(&plan, parts, stream));
    const struct weights_order order = {
        plan.outputs,  plan.columns, parts, shape->channels, shape->kernel_y * shape->kernel_x,
        image_channels};
    weights_sum_kernel<<<blocks_for((size_t)plan.outputs * plan.columns), BLOCK, 0, stream>>>(order, room,
                                                                                              gradients);
    return CUDA_LAUNCHED("weights_sum_kernel");
}

EACH_HALF(resnet_weights)
