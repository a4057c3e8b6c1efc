/* `gbase`: GBASE of the paper (docs/ladder.md). The host launches three kernels per image, in sequence. */
#include "synth/gbase.cuh"

struct gbase {
    using noise = noise_apart;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        gbase_noise_kernel<<<gbase_noise_grid(work), NOISE_BLOCK, 0, stream>>>(work);
    }
};

LADDER_VARIANT(variant_gbase, ladder<gbase>, SYNTH_NOISE_XORWOW)
