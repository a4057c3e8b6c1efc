/* `bat`: BAT of the paper (docs/ladder.md). The host launches one kernel per batch, or several for a large
 * batch. The device launches the stages of `rng` for each image. */
#include "synth/bat.cuh"

static __global__ void __launch_bounds__(NOISE_BLOCK)
    bat_noise_kernel(image_work<noise_half2> work, bat_rest rest)
{
    if (blockIdx.x == 0 && threadIdx.x == 0)
        bat_follow(work, rest, cudaStreamTailLaunch);
    noise_by_sample(work);
}

struct bat {
    static __device__ void launch(const image_work<noise_half2> &work, const bat_rest &rest)
    {
        bat_noise_kernel<<<work.orbits() * blocks_per_orbit(work.vertices(), NOISE_BLOCK), NOISE_BLOCK, 0,
                           cudaStreamFireAndForget>>>(work, rest);
    }
};

BAT_VARIANT(variant_bat, bat)
