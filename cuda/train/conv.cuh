/* Declarations shared by the source files of the convolution GEMMs. conv.cu describes these GEMMs. */
#ifndef FDSL_CUDA_TRAIN_CONV_CUH
#define FDSL_CUDA_TRAIN_CONV_CUH

#include "train/product.cuh"

/* The two GEMMs of the backward pass. Each of a convolution's three GEMMs instantiates 16 CUDA kernels (with
 * or without padding, for two tile sizes, in four precisions). For short compile times, each GEMM therefore
 * has its own source file. */

/* Writes the gradient of the weights to pass->gradients, as [out channel][in channel, tap]. */
enum status conv_weights_backward(const struct device_layer *layer, const struct pass *pass);

/* Writes the gradient of the input to layer->in_delta, as [sample][in channel][position]. */
enum status conv_input_backward(const struct device_layer *layer, const struct pass *pass);

/* The GEMM of conv_forward() and conv_input_backward(): rows are channels, columns are (sample, position). */
template <bool PADDED, class Weights>
static enum status convolve(const struct pass *pass, const Weights &weights, const float *from,
                            const struct windows &windows, const struct channel_out &into)
{
    const struct gemm size = {.rows = into.channels,
                              .columns = pass->count * windows.position_count.by,
                              .depth = windows.tap_count};
    const window_rows<PADDED> matrix = {from, windows};
    if (into.channels > WARP_ROWS)
        return multiply_layer<2, 2>(pass, weights, matrix, into, size);
    return multiply_layer<1, 2>(pass, weights, matrix, into, size);
}

#endif
