/* `rng-xorwow-reuse`, an alternative from the paper: XORWOW with one thread and one state per orbit. A thread
 * seeks once per orbit instead of once per sample. */
#include <curand_kernel.h>

#include "synth/ladder.cuh"

static __global__ void __launch_bounds__(STREAM_BLOCK)
    rng_xorwow_reuse_noise_kernel(image_work<noise_half2> work)
{
    uint32_t orbit = blockIdx.x * STREAM_BLOCK + threadIdx.x, q = work.vertices();
    if (orbit >= work.orbits())
        return;
    curandStateXORWOW_t state;
    curand_init(curand_seed(work.input.key), orbit, 0, &state);
    size_t i = (size_t)orbit * q;
    for (uint32_t vertex = 0; vertex < q; vertex++, i++) {
        float x = noise_of_draw(work.input.gradients, curand(&state));
        work.noise.put(i, x, noise_of_draw(work.input.gradients, curand(&state)));
    }
}

struct rng_xorwow_reuse {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_xorwow_reuse_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0, stream>>>(
            work);
    }
};

LADDER_VARIANT(variant_rng_xorwow_reuse, ladder<rng_xorwow_reuse>, SYNTH_NOISE_XORWOW)
