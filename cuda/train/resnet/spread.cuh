/* How the kernels that visit each value of a tensor once divide its rows: a thread has one group of 8
 * channels, whose values per channel it keeps in registers, and every LANES-th row of its block's share. */
#ifndef FDSL_CUDA_TRAIN_RESNET_SPREAD_CUH
#define FDSL_CUDA_TRAIN_RESNET_SPREAD_CUH

#include "train/resnet/kernels.cuh"

/* The rows `first`, `first` + `step`, ... below `end` of a thread, and its first channel. */
struct spread {
    size_t first, end, step;
    uint32_t channel, lane, lanes;
    bool idle; /* the thread has no channels */
};

static __device__ __forceinline__ struct spread spread_of(size_t rows, uint32_t channels)
{
    const uint32_t groups = channels / 8, lanes = BLOCK / groups, lane = threadIdx.x / groups;
    struct spread own;
    own.channel = (threadIdx.x - lane * groups) * 8;
    own.lane = lane;
    own.lanes = lanes;
    own.idle = lane >= lanes;
    own.first = own.idle ? rows : (size_t)blockIdx.x * lanes + lane;
    own.end = rows;
    own.step = (size_t)gridDim.x * lanes;
    return own;
}

/* Returns the number of blocks: `each` rows per thread, but at most `most` blocks. */
static inline uint32_t spread_blocks(size_t rows, uint32_t channels, uint32_t each, uint32_t most)
{
    const size_t lanes = BLOCK / (channels / 8), blocks = (rows + lanes * each - 1) / (lanes * each);
    return (uint32_t)(blocks < most ? blocks : most);
}

/* Adds up 8 sums of each thread over the lanes of the block, in order, and writes those of each channel to
 * `to`. All threads of the block call it. `scratch` has 8 * BLOCK values. */
static __device__ __forceinline__ void spread_sums(const struct spread &own, const float (&sums)[8],
                                                   uint32_t channels, float *scratch, float *to)
{
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (!own.idle)
            scratch[own.lane * channels + own.channel + i] = sums[i];
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < channels; c += BLOCK) {
        float sum = 0;
        for (uint32_t l = 0; l < own.lanes; l++)
            sum += scratch[l * channels + c];
        to[c] = sum;
    }
}

#endif
