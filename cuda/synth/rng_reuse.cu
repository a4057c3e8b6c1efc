/* `rng-reuse`, an alternative from the paper: `rng` with one thread per orbit, which computes the noise
 * of all vertices. Philox is a function of a counter and has no state to set up. Computing several samples
 * per thread therefore saves nothing; it only reduces parallelism. */
#include "synth/ladder.cuh"

static __global__ void __launch_bounds__(STREAM_BLOCK) rng_reuse_noise_kernel(image_work<noise_half2> work)
{
    noise_by_orbit(work);
}

struct rng_reuse {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_reuse_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0, stream>>>(work);
    }
};

LADDER_VARIANT(variant_rng_reuse, ladder<rng_reuse>, SYNTH_NOISE_COUNTER)
