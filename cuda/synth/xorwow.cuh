/* The noise stage of `mem-float2` and `mem`. Each sample has one thread and one XORWOW state, for both x and
 * y. */
#ifndef FDSL_CUDA_SYNTH_XORWOW_CUH
#define FDSL_CUDA_SYNTH_XORWOW_CUH

#include <curand_kernel.h>

#include "synth/ladder.cuh"

template <class Noise>
static __global__ void __launch_bounds__(NOISE_BLOCK) xorwow_noise_kernel(image_work<Noise> work)
{
    uint64_t i = (uint64_t)blockIdx.x * NOISE_BLOCK + threadIdx.x;
    if (i >= work.segments())
        return;
    curandStateXORWOW_t state;
    curand_init(curand_seed(work.input.key), i, 0, &state);
    float x = noise_of_draw(work.input.gradients, curand(&state));
    work.noise.put(i, x, noise_of_draw(work.input.gradients, curand(&state)));
}

template <class Noise> struct xorwow_by_sample {
    using noise = Noise;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        xorwow_noise_kernel<<<blocks_for(work.segments(), NOISE_BLOCK), NOISE_BLOCK, 0, stream>>>(work);
    }
};

#endif
