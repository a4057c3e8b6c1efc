/* Backward pass of a convolution: the GEMM that computes the gradient of the input. */
#include "train/conv.cuh"

enum status conv_input_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *conv = layer->layer;
    const struct windows &windows = layer->backward;
    const struct opposite_weights weights = {.values = pass->parameters + conv->weight,
                                             .taps = divider_of(windows.tap_count / conv->out.channels),
                                             .in_channels = conv->in.channels};
    const struct channel_out into = {.values = layer->in_delta,
                                     .channels = conv->in.channels,
                                     .positions = windows.position_count,
                                     .above = layer->relu_before ? layer->in : nullptr};
    return windows.padded ? convolve<true>(pass, weights, layer->out_delta, windows, into)
                          : convolve<false>(pass, weights, layer->out_delta, windows, into);
}
