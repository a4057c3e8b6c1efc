/* `rng-uniform4`, an alternative from the paper: `rng-reuse` with cuRAND's Philox state. curand_uniform4()
 * returns four floats: x and y of two vertices. The reference on the host generates the same random
 * numbers. */
#include <curand_kernel.h>

#include "synth/ladder.cuh"

static __global__ void __launch_bounds__(STREAM_BLOCK) rng_uniform4_noise_kernel(image_work<noise_half2> work)
{
    uint32_t orbit = blockIdx.x * STREAM_BLOCK + threadIdx.x, q = work.vertices();
    if (orbit >= work.orbits())
        return;
    const float *gradients = work.input.gradients;
    curandStatePhilox4_32_10_t state;
    curand_init(curand_seed(work.input.key), STREAM_CURAND + orbit, 0, &state);
    size_t i = (size_t)orbit * q;
    for (uint32_t vertex = 0; vertex < q; vertex += 2, i += 2) {
        float4 uniform = curand_uniform4(&state);
        work.noise.put(i, noise_of_uniform(gradients, uniform.x), noise_of_uniform(gradients, uniform.y));
        if (vertex + 1 < q)
            work.noise.put(i + 1, noise_of_uniform(gradients, uniform.z),
                           noise_of_uniform(gradients, uniform.w));
    }
}

struct rng_uniform4 {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_uniform4_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0, stream>>>(work);
    }
};

LADDER_VARIANT(variant_rng_uniform4, ladder<rng_uniform4>, SYNTH_NOISE_UNIFORM4)
