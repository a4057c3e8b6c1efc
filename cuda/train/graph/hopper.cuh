/* Shared by the kernels of train-graph for compute capability 9.0, which multiply with wgmma.
 *
 * Tensors in shared memory consist of matrices of 8 pixels by 8 channels, with 16 contiguous bytes per pixel.
 * A product of wgmma may begin at any pixel of them. Every tap of a convolution is therefore a constant
 * offset, and the same data serve as rows, as columns and as the summed dimension. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_HOPPER_CUH
#define FDSL_CUDA_TRAIN_GRAPH_HOPPER_CUH

#include "train/graph/kernels.cuh"
#include "train/vit/hopper.cuh"

typedef graph_gray net;

/* Returns the index of a 16-byte piece of conv1's output. A row of pixels has four pieces per pixel: all
 * first pieces of the row are stored first, then all second ones. */
FDSL_HD uint32_t kept_piece(uint32_t pixel, uint32_t piece)
{
    return (pixel / net::columns1 * 4 + piece) * net::columns1 + pixel % net::columns1;
}

static __device__ __forceinline__ uint32_t kept_place(uint32_t pixel, uint32_t piece)
{
    return 16 * kept_piece(pixel, piece);
}

#define ROW_PIECES   (4 * net::columns1) /* distance between rows of conv1's output, in pieces */
#define CONV1_PIECES (4 * net::pixels1)
#define IMAGE_PIECES (net::values / 8)
#define WEIGHT_BYTES (CONV2_CHANNELS * CONV2_DEPTH * 2)

/* Starts copying conv2's weights, to (9 taps, 4 groups of inputs, 64 outputs, 8 inputs). */
template <int THREADS>
static __device__ __forceinline__ void take_weight(const struct graph_plan &plan, uint8_t *to)
{
#pragma unroll 6
    for (uint32_t i = threadIdx.x; i < WEIGHT_BYTES / 16; i += THREADS) {
        uint32_t output = i % CONV2_CHANNELS, group = i / CONV2_CHANNELS;
        copy_async16(to + 16 * i, plan.conv2_weight + output * (CONV2_PITCH / 2) + 8 * group);
    }
}

#endif
