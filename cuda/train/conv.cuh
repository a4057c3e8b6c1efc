/* Parts of a convolution as products: see conv.cu. */
#ifndef FDSL_CUDA_TRAIN_CONV_CUH
#define FDSL_CUDA_TRAIN_CONV_CUH

#include "train/product.cuh"

/* The two products of the backward pass. Each product of a convolution has a source file of its own, as each
 * instantiates 16 kernels: padded or not, two tile sizes, four precisions. */

/* pass->gradients: the gradient of the weights, [out channel][in channel, tap]. */
enum status conv_weights_backward(const struct device_layer *layer, const struct pass *pass);

/* layer->in_delta, [sample][in channel][position]. */
enum status conv_input_backward(const struct device_layer *layer, const struct pass *pass);

/* The product of forward and of conv_input_backward(): rows are channels, columns (sample, position). */
template <bool PADDED, class Weights>
static enum status convolve(const struct pass *pass, const Weights &weights, const float *from,
                            const struct windows &windows, const struct channel_out &into)
{
    const struct gemm size = {.rows = into.channels,
                              .columns = pass->count * windows.position_count.by,
                              .depth = windows.tap_count,
                              .slice = 0};
    const window_rows<PADDED> matrix = {from, windows};
    if (into.channels > WARP_ROWS)
        return multiply_layer<2, 2>(pass, weights, matrix, into, size);
    return multiply_layer<1, 2>(pass, weights, matrix, into, size);
}

#endif
