/* The GEMMs of layers, in the precision of their pass: multiply.cuh computes fp32, and tensor_multiply.cuh
 * the other precisions. Each of a convolution's three GEMMs instantiates 16 CUDA kernels (with or without
 * padding, for two tile sizes, in four precisions), and a linear layer 12. For short compile times, conv.cu,
 * conv_backward.cu, conv_weights.cu and linear.cu have one GEMM or layer each. */
#ifndef FDSL_CUDA_TRAIN_LAYER_GEMM_CUH
#define FDSL_CUDA_TRAIN_LAYER_GEMM_CUH

#include "train/network.cuh"
#include "train/tensor_multiply.cuh"

/* Launches a GEMM with tiles of 32 * DOWN rows and 64 * ACROSS columns. */
template <int DOWN, int ACROSS, class Left, class Right, class Into>
static enum status multiply_layer(const struct pass *pass, const Left &left, const Right &right,
                                  const Into &into, const struct gemm &size)
{
    constexpr int ROWS = WARP_ROWS * DOWN, COLUMNS = WARP_SUMS * ACROSS;
    switch (pass->precision) {
    case PRECISION_TF32:
        return tensor_multiply<as_tf32, ROWS, COLUMNS>(pass->stream, pass->workspace, left, right, into,
                                                       size);
    case PRECISION_BF16:
        return tensor_multiply<as_bf16, ROWS, COLUMNS>(pass->stream, pass->workspace, left, right, into,
                                                       size);
    case PRECISION_FP16:
        return tensor_multiply<as_fp16, ROWS, COLUMNS>(pass->stream, pass->workspace, left, right, into,
                                                       size);
    case PRECISION_FP32:
        break;
    }
    return multiply<DOWN, ACROSS>(pass->stream, pass->workspace, left, right, into, size);
}

/* The GEMM of the forward pass and of the gradient of the input: rows are channels, columns are (sample,
 * position). */
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

/* Writes the gradient of the weights to pass->gradients, as [out channel][in channel, tap]. */
enum status conv_weights_backward(const struct device_layer *layer, const struct pass *pass);

#endif
