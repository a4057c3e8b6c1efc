/* Gradients of the weights of convolutions (conv.cu), and of the biases of all layers with GEMMs. */
#include "common/shared.cuh"
#include "train/layer_gemm.cuh"

/* ---- Biases ---- */

/* Block (channel, z) sums slice z of its channel's gradients. Thread i sums elements i, i + BLOCK, ...; a
 * tree reduction adds these sums. */
static __global__ void bias_kernel(const float *deltas, uint32_t channels, const struct divider positions,
                                   const struct gemm size, float *slices)
{
    __shared__ float sums[BLOCK];
    float sum = 0;
    uint32_t begin = blockIdx.y * size.slice, end = min(begin + size.slice, size.depth);
    for (uint32_t i = begin + threadIdx.x; i < end; i += BLOCK)
        sum += deltas[(size_t)(positions.quotient(i) * (channels - 1) + blockIdx.x) * positions.by + i];
    sums[threadIdx.x] = sum;
    block_sums<BLOCK>(sums);
    if (threadIdx.x == 0)
        slices[blockIdx.y * channels + blockIdx.x] = sums[0];
}

/* Minimum number of elements per block. bias_slice() doubles it until there are few enough slices. */
#define BIAS_SLICE (8 * BLOCK)

/* Returns the number of terms per slice. At most SLICES_MAX slices are needed, and they fit into the
 * workspace. */
static uint32_t bias_slice(uint32_t channels, uint32_t depth)
{
    uint64_t most = WORKSPACE_VALUES / channels, slice = BIAS_SLICE;
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
    size.slice = bias_slice(channels, size.depth);
    uint32_t slices = (size.depth - 1) / size.slice + 1;
    float *gradient = pass->gradients + layer->layer->bias;
    bias_kernel<<<dim3(channels, slices), BLOCK, 0, pass->stream>>>(
        layer->out_delta, channels, divider_of(positions), size, slices == 1 ? gradient : pass->workspace);
    CUDA_TRY_LAUNCH("bias_kernel");
    if (slices == 1)
        return STATUS_OK;
    const struct matrix_out into = {
        .values = gradient, .bias = nullptr, .stride = channels, .relu = false, .above = nullptr};
    return add_slices(pass->stream, pass->workspace, slices, into, size);
}

/* ---- Weights ---- */

/* A tensor of activations: a line is a channel, a point is (sample, position). */
struct channel_lines {
    static constexpr bool ALONG_DEPTH = true;
    typedef const float *line;
    typedef uint32_t point;
    const float *values;
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
        return __ldg(from + at);
    }
};

/* The transpose of window_rows: a line is a weight, a point is (sample, position). */
template <bool PADDED> struct window_columns {
    static constexpr bool ALONG_DEPTH = true;
    typedef struct window_part line;
    typedef struct window_position point;
    const float *values;
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
        return window_value<PADDED>(position, tap);
    }
};

/* Rows are output channels, and columns are (channel, tap). Each sum runs over all positions of the batch. */
template <bool PADDED>
static enum status weights_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    const struct windows &windows = layer->forward;
    const struct channel_lines deltas = {layer->out_delta, conv->out.channels, windows.position_count};
    const window_columns<PADDED> matrix = {layer->in, windows};
    const struct matrix_out into = {.values = pass->gradients + conv->weight, .stride = windows.tap_count};
    const struct gemm size = {.rows = conv->out.channels,
                              .columns = windows.tap_count,
                              .depth = pass->count * windows.position_count.by};
    if (size.rows > WARP_ROWS)
        return multiply_layer<2, 1>(pass, deltas, matrix, into, size);
    return multiply_layer<1, 1>(pass, deltas, matrix, into, size);
}

enum status conv_weights_backward(const struct device_layer *layer, const struct pass *pass)
{
    return layer->forward.padded ? weights_backward<true>(layer, pass) : weights_backward<false>(layer, pass);
}
