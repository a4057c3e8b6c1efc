/* Backward pass of a convolution: the GEMM that computes the gradient of the weights. Rows are output
 * channels, and columns are (channel, tap). Each sum runs over all positions of the batch. */
#include "train/conv.cuh"

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
