/* The variants of the paper's ladder whose kernels launch kernels (dynamic parallelism): `bat`, `bat-reuse`
 * and `gbase-device`. They need relocatable device code. */
#include "core/phase.h"
#include "synth/bat.cuh"
#include "synth/gbase.cuh"

/* `bat`: BAT of the paper. The host launches one kernel per batch, or several for a large
 * batch. The device launches the stages of `rng` for each image. */

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

/* `bat-reuse`, an alternative from the paper: `bat` with the noise kernel of `rng-reuse`. That kernel has
 * little parallelism within an image, but many images of a batch run concurrently. */

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

/* `gbase-device`: `gbase`, but the host launches only one kernel per image. This parent kernel has one
 * thread, which launches the three kernels of the image (dynamic parallelism). As in `gbase`, each image
 * waits for the previous one. */

/* Launches `stages` of an image. Tail launches run in launch order, and each waits until the previous one has
 * ended. The parent kernel completes when all its tail launches have completed. */
static __global__ void gbase_parent_kernel(image_work<noise_apart> work, unsigned stages, int *failure)
{
    if (stages & STAGE_NOISE) {
        gbase_noise_kernel<<<gbase_noise_grid(work), NOISE_BLOCK, 0, cudaStreamTailLaunch>>>(work);
        device_launch_check(failure);
    }
    if (stages & STAGE_VERTICES) {
        vertex_kernel<<<blocks_for(work.vertices(), VERTEX_BLOCK), VERTEX_BLOCK, 0, cudaStreamTailLaunch>>>(
            work);
        device_launch_check(failure);
    }
    if (stages & STAGE_PAINTING) {
        paint_kernel<<<paint_grid(work.vertices(), work.orbits()), PAINT_BLOCK, 0, cudaStreamTailLaunch>>>(
            work);
        device_launch_check(failure);
    }
}

struct gbase_parent {
    using noise = noise_apart;
    int *failure;

    enum status open()
    {
        return device_launch_open(&failure);
    }
    void close()
    {
        device_launch_close(failure);
    }
    enum status launch(const image_work<noise> &work, unsigned stages, cudaStream_t stream) const
    {
        RANGE(DRAW);
        gbase_parent_kernel<<<1, 1, 0, stream>>>(work, stages, failure);
        CUDA_TRY_LAUNCH("gbase_parent_kernel");
        return STATUS_OK;
    }
    enum status finish() const
    {
        return device_launch_status(failure);
    }
};

using state = ladder_by<gbase_parent>;

LADDER_VARIANT(variant_gbase_device, state, SYNTH_NOISE_XORWOW)
