/* `bat-reuse`, an alternative from the paper: `bat` with the noise kernel of `rng-reuse`. That kernel has
 * little parallelism within an image, but many images of a batch run concurrently. */
#include "synth/bat.cuh"

static __global__ void __launch_bounds__(STREAM_BLOCK)
    bat_reuse_noise_kernel(image_work<noise_half2> work, bat_rest rest)
{
    if (blockIdx.x == 0 && threadIdx.x == 0)
        bat_follow(work, rest, cudaStreamTailLaunch);
    noise_by_orbit(work);
}

struct bat_reuse {
    static __device__ void launch(const image_work<noise_half2> &work, const bat_rest &rest)
    {
        bat_reuse_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0,
                                 cudaStreamFireAndForget>>>(work, rest);
    }
};

BAT_VARIANT(variant_bat_reuse, bat_reuse)
