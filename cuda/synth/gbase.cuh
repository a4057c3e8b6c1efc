/* The noise stage of `gbase` and `gbase-device`. There is one thread per sample; x and y are separate
 * samples. Each thread seeks to its own XORWOW state. Seeking dominates the cost, because it multiplies
 * matrices of 160 x 160 bits. */
#ifndef FDSL_CUDA_SYNTH_GBASE_CUH
#define FDSL_CUDA_SYNTH_GBASE_CUH

#include <curand_kernel.h>

#include "synth/ladder.cuh"

static __global__ void __launch_bounds__(NOISE_BLOCK) gbase_noise_kernel(image_work<noise_apart> work)
{
    uint64_t i = (uint64_t)blockIdx.x * NOISE_BLOCK + threadIdx.x;
    if (i >= 2 * work.segments())
        return;
    curandStateXORWOW_t state;
    curand_init(curand_seed(work.input.key), i, 0, &state);
    /* Index i covers all x and then all y, because the y array follows the x array in memory. */
    work.noise.x[i] = noise_of_draw(work.input.gradients, curand(&state));
}

static __host__ __device__ __forceinline__ unsigned gbase_noise_grid(const image_work<noise_apart> &work)
{
    return blocks_for(2 * work.segments(), NOISE_BLOCK);
}

#endif
