/* A layer's GEMM in the precision of its pass: by multiply.cuh for fp32, by tensor_multiply.cuh otherwise. */
#ifndef FDSL_CUDA_TRAIN_PRODUCT_CUH
#define FDSL_CUDA_TRAIN_PRODUCT_CUH

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

#endif
