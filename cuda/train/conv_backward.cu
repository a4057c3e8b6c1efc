/* Backward pass of a convolution, with the GEMM that computes the gradient of its input (conv.cu). */
#include "train/layer_gemm.cuh"

/* The weights of a convolution for its backward pass. A line is an input channel c, a point is (o, tap). The
 * value is the weight from channel c to output channel o at the opposite tap. */
struct opposite_weights {
    static constexpr bool ALONG_DEPTH = true;
    typedef const float *line;
    typedef uint32_t point;
    const float *values;
    struct divider taps; /* per kernel */
    uint32_t in_channels;

    __device__ line line_at(uint32_t c) const
    {
        return values + c * taps.by;
    }
    __device__ point point_at(uint32_t k) const
    {
        uint32_t o = taps.quotient(k), tap = k - o * taps.by;
        return o * in_channels * taps.by + taps.by - 1 - tap;
    }
    static __device__ float value(line from, point at)
    {
        return __ldg(from + at);
    }
};

static enum status input_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    const struct opposite_weights weights = {.values = pass->parameters + conv->weight,
                                             .taps =
                                                 divider_of(layer->backward.tap_count / conv->out.channels),
                                             .in_channels = conv->in.channels};
    const struct convolution convolution = {.from = layer->out_delta,
                                            .windows = layer->backward,
                                            .into = layer->in_delta,
                                            .bias = nullptr,
                                            .channels = conv->in.channels,
                                            .relu = false,
                                            .above = layer->relu_before ? layer->in : nullptr,
                                            .last = layer->in_last};
    return convolve(pass, weights, convolution);
}

/* The gradients of the parameters come first, because in_delta may have the memory of `in`. */
enum status conv_backward(const struct device_layer *layer, const struct pass *pass)
{
    const bool weights = pass->of & GRADIENTS_OF_WEIGHTS;
    if (weights)
        TRY(bias_backward(layer, pass));
    if (layer->packed.weights)
        return packed_backward(layer, pass);
    if (weights)
        TRY(conv_weights_backward(layer, pass));
    return layer->in_delta && pass->of & GRADIENTS_OF_INPUTS ? input_backward(layer, pass) : STATUS_OK;
}
