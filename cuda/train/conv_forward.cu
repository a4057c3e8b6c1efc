/* Forward pass of a convolution: one GEMM per layer. */
#include "train/conv.cuh"

enum status conv_forward(const struct device_layer *layer, const struct pass *pass)
{
    if (layer->packed.in)
        return packed_forward(layer, pass);
    const struct layer *conv = layer->layer;
    const struct windows &windows = layer->forward;
    const matrix<true> weights = {pass->parameters + conv->weight, windows.tap_count};
    const struct channel_out into = {.values = layer->out,
                                     .bias = pass->parameters + conv->bias,
                                     .channels = conv->out.channels,
                                     .positions = windows.position_count,
                                     .relu = layer->relu};
    return windows.padded ? convolve<true>(pass, weights, layer->in, windows, into)
                          : convolve<false>(pass, weights, layer->in, windows, into);
}
