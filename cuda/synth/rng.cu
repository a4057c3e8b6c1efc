/* `rng`: RNG of the paper (docs/ladder.md). It is `mem` with Philox instead of XORWOW. Philox is a function
 * of a counter, so threads need not seek to a state. A sample costs one Philox block of ten rounds. */
#include "synth/ladder.cuh"

static __global__ void __launch_bounds__(NOISE_BLOCK) rng_noise_kernel(image_work<noise_half2> work)
{
    noise_by_sample(work);
}

struct rng {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_noise_kernel<<<work.orbits() * blocks_per_orbit(work.vertices(), NOISE_BLOCK), NOISE_BLOCK, 0,
                           stream>>>(work);
    }
};

LADDER_VARIANT(variant_rng, ladder<rng>, SYNTH_NOISE_COUNTER)
