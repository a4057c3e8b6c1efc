#include "train/scaling.cuh"

#include "common/check.cuh"
#include "train/network.cuh"

/* Several threads may set `overflowed`; all write the same value. */
static __global__ void unscale_kernel(struct device_scale *scale, size_t values, float *gradients)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= values)
        return;
    float gradient = gradients[i];
    if (!isfinite(gradient))
        scale->overflowed = true;
    gradients[i] = gradient / scale->now.scale;
}

enum status scaling_unscale(struct device_scale *scale, size_t values, float *gradients, cudaStream_t stream)
{
    unscale_kernel<<<blocks_for(values), BLOCK, 0, stream>>>(scale, values, gradients);
    CUDA_TRY_LAUNCH("unscale_kernel");
    return STATUS_OK;
}

static __global__ void scale_kernel(struct device_scale *scale)
{
    scale->skipped += scale->overflowed;
    loss_scale_step(&scale->now, scale->overflowed);
    scale->overflowed = false;
}

enum status scaling_step(struct device_scale *scale, cudaStream_t stream)
{
    scale_kernel<<<1, 1, 0, stream>>>(scale);
    CUDA_TRY_LAUNCH("scale_kernel");
    return STATUS_OK;
}
