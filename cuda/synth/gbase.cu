/* `gbase`: the paper's GBASE. Three kernels an image; a thread a sample, each of which seeks to its own
 * XORWOW state, with x and y as samples apart. Seeking is what costs: a state's start is found by multiplying
 * 160 x 160 bit matrices. */
#include <curand_kernel.h>

#include "synth/ladder.cuh"

static __global__ void __launch_bounds__(NOISE_BLOCK) gbase_noise_kernel(image_work<noise_apart> work)
{
    uint64_t i = (uint64_t)blockIdx.x * NOISE_BLOCK + threadIdx.x;
    if (i >= 2 * work.segments())
        return;
    curandStateXORWOW_t state;
    curand_init(curand_seed(work.input.key), i, 0, &state);
    /* All of x, then all of y: the arrays lie one behind the other. */
    work.noise.x[i] = noise_of_draw(work.input.gradients, curand(&state));
}

struct gbase {
    using noise = noise_apart;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        gbase_noise_kernel<<<blocks_for(2 * work.segments(), NOISE_BLOCK), NOISE_BLOCK, 0, stream>>>(work);
    }
};

static const struct synth_traits traits = {.noise = SYNTH_NOISE_XORWOW,
                                           .half = false,
                                           .racy = true,
                                           .outputs = false,
                                           .timed = "clear+draw",
                                           .fetch_noise = ladder<gbase>::fetch_noise,
                                           .images = ladder<gbase>::images,
                                           .stages = ladder<gbase>::stages};

LADDER_VARIANT(variant_gbase, gbase, traits)
