/* Gradients of the weights of convolutions (conv.cu), and of the biases of all layers with GEMMs. */
#include "common/shared.cuh"
#include "train/layer_gemm.cuh"

/* ---- Biases ---- */

/* Block (channel, z) sums slice z of its channel's gradients. Thread i sums elements i, i + BLOCK, ...; a
 * tree reduction adds these sums. */
template <class T>
static __global__ void bias_kernel(const T *deltas, uint32_t channels, const struct divider positions,
                                   const struct gemm size, float *slices)
{
    __shared__ float sums[BLOCK];
    float sum = 0;
    uint32_t begin = blockIdx.y * size.slice, end = min(begin + size.slice, size.depth);
    for (uint32_t i = begin + threadIdx.x; i < end; i += BLOCK)
        sum += to_float(
            deltas[(size_t)(positions.quotient(i) * (channels - 1) + blockIdx.x) * positions.by + i]);
    sums[threadIdx.x] = sum;
    block_sums<BLOCK>(sums);
    if (threadIdx.x == 0)
        slices[blockIdx.y * channels + blockIdx.x] = sums[0];
}

#define BIAS_CHANNELS 32 /* per block, if channels are last: adjacent lanes read adjacent channels */

/* Block (group of channels, z) sums slice z of the (sample, position) of its channels. Warp i sums rows i, i
 * + BLOCK / 32, ...; one thread per channel adds these sums in order. */
template <class T>
static __global__ void bias_last_kernel(const T *deltas, uint32_t channels, const struct gemm size,
                                        float *slices)
{
    __shared__ float sums[BLOCK / BIAS_CHANNELS][BIAS_CHANNELS];
    const uint32_t lane = threadIdx.x % BIAS_CHANNELS, warp = threadIdx.x / BIAS_CHANNELS;
    const uint32_t channel = blockIdx.x * BIAS_CHANNELS + lane;
    uint32_t begin = blockIdx.y * size.slice, end = min(begin + size.slice, size.depth);
    float sum = 0;
    if (channel < channels)
#pragma unroll 8
        for (uint32_t i = begin + warp; i < end; i += BLOCK / BIAS_CHANNELS)
            sum += to_float(deltas[(size_t)i * channels + channel]);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || channel >= channels)
        return;
    for (uint32_t i = 1; i < BLOCK / BIAS_CHANNELS; i++)
        sum += sums[i][lane];
    slices[blockIdx.y * channels + channel] = sum;
}

/* Minimum numbers of terms per sum of a block. bias_slice() doubles them until there are few enough slices.
 */
#define BIAS_SLICE      (8 * BLOCK)
#define BIAS_SLICE_LAST (2 * BLOCK)

/* Returns the number of terms per slice. At most SLICES_MAX slices are needed, and they fit into the
 * workspace. */
static uint32_t bias_slice(uint64_t slice, uint32_t channels, uint32_t depth)
{
    uint64_t most = WORKSPACE_VALUES / channels;
    if (most > SLICES_MAX)
        most = SLICES_MAX;
    while ((depth - 1) / slice + 1 > most && slice < depth)
        slice *= 2;
    return (uint32_t)slice;
}

enum status bias_backward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t channels = layer->layer->out.channels;
    uint32_t positions = (uint32_t)(layer->layer->out_values / channels);
    struct gemm size = {.rows = 1, .columns = channels, .depth = pass->count * positions, .slice = 0};
    size.slice = bias_slice(layer->out_last ? BIAS_SLICE_LAST : BIAS_SLICE, channels, size.depth);
    uint32_t slices = (size.depth - 1) / size.slice + 1;
    float *gradient = pass->gradients + layer->layer->bias, *sums = slices == 1 ? gradient : pass->workspace;
    TRY(with_stored(pass->precision, [&](auto type) {
        const decltype(type) *deltas = static_cast<const decltype(type) *>(layer->out_delta);
        if (layer->out_last)
            bias_last_kernel<<<dim3((channels - 1) / BIAS_CHANNELS + 1, slices), BLOCK, 0, pass->stream>>>(
                deltas, channels, size, sums);
        else
            bias_kernel<<<dim3(channels, slices), BLOCK, 0, pass->stream>>>(
                deltas, channels, divider_of(positions), size, sums);
        return CUDA_LAUNCHED("bias_kernel");
    }));
    if (slices == 1)
        return STATUS_OK;
    const struct matrix_out<float> into = {
        .values = gradient, .bias = nullptr, .stride = channels, .relu = false, .above = nullptr
    };
    return add_slices(pass->stream, pass->workspace, slices, into, size);
}

/* ---- Weights ---- */

/* A tensor of activations: a line is a channel, a point is (sample, position). */
template <class T> struct channel_lines {
    static constexpr bool ALONG_DEPTH = true;
    typedef const T *line;
    typedef uint32_t point;
    const T *values;
    uint32_t channels;
    struct divider positions;

    __device__ line line_at(uint32_t channel) const
    {
        return values + channel * positions.by;
    }
    __device__ point point_at(uint32_t k) const
    {
        return k + positions.quotient(k) * (channels - 1) * positions.by;
    }
    static __device__ float value(line from, point at)
    {
        return to_float(__ldg(from + at));
    }
};

/* The transpose of window_rows: a line is a weight, a point is (sample, position). */
template <bool PADDED, class T> struct window_columns {
    static constexpr bool ALONG_DEPTH = true;
    typedef struct window_part line;
    typedef struct window_position<T> point;
    const T *values;
    struct windows windows;

    __device__ line line_at(uint32_t i) const
    {
        return read_part(&windows.taps[i]);
    }
    __device__ point point_at(uint32_t k) const
    {
        return position_at(windows, values, k);
    }
    static __device__ float value(const line &tap, const point &position)
    {
        return window_value<PADDED, T>(position, tap);
    }
};

/* Rows are output channels, and columns are (channel, tap). Each sum runs over all positions of the batch. */
template <class T, bool PADDED, class Deltas>
static enum status multiply_deltas(const struct device_layer *layer, const struct pass *pass,
                                   const Deltas &deltas)
{
    const struct windows &windows = layer->forward;
    const window_columns<PADDED, T> matrix = {static_cast<const T *>(layer->in), windows};
    const struct matrix_out<float> into = {
        .values = pass->gradients + layer->layer->weight, .bias = nullptr, .stride = windows.tap_count,
        .relu = false, .above = nullptr
    };
    const struct gemm size = {.rows = layer->layer->out.channels,
                              .columns = windows.tap_count,
                              .depth = pass->count * windows.position_count.by};
    if (size.rows > WARP_ROWS)
        return multiply_layer<T, 2, 1>(pass, deltas, matrix, into, size);
    return multiply_layer<T, 1, 1>(pass, deltas, matrix, into, size);
}

template <class T, bool PADDED>
static enum status weights_backward(const struct device_layer *layer, const struct pass *pass)
{
    const T *values = static_cast<const T *>(layer->out_delta);
    const uint32_t channels = layer->layer->out.channels;
    if constexpr (sizeof(T) < sizeof(float))
        if (layer->out_last)
            return multiply_deltas<T, PADDED>(layer, pass, matrix<false, T>{values, channels});
    return multiply_deltas<T, PADDED>(layer, pass,
                                      channel_lines<T>{values, channels, layer->forward.position_count});
}

enum status conv_weights_backward(const struct device_layer *layer, const struct pass *pass)
{
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        return layer->forward.padded ? weights_backward<T, true>(layer, pass)
                                     : weights_backward<T, false>(layer, pass);
    });
}
