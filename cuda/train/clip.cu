#include "train/clip.cuh"

#include "common/check.cuh"
#include "common/shared.cuh"

/* Adds up one value per thread of a block. Only the result of thread 0 is valid. */
static __device__ double block_sum(double own)
{
    __shared__ double sums[BLOCK];
    sums[threadIdx.x] = own;
    block_sums<BLOCK>(sums);
    return sums[0];
}

static __global__ void __launch_bounds__(BLOCK)
    squares_kernel(size_t groups, const float4 *gradients, struct device_clip *clip)
{
    double sum = 0;
    for (size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x; i < groups; i += (size_t)CLIP_PARTS * BLOCK) {
        const float4 gradient = gradients[i];
        sum += (double)gradient.x * gradient.x + (double)gradient.y * gradient.y +
               (double)gradient.z * gradient.z + (double)gradient.w * gradient.w;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        clip->parts[blockIdx.x] = sum;
}

/* One block adds up the parts. */
static __global__ void __launch_bounds__(BLOCK)
    factor_kernel(double clip_norm, const struct device_scale *scale, struct device_clip *clip,
                  struct train_totals *totals)
{
    double sum = 0;
    for (uint32_t i = threadIdx.x; i < CLIP_PARTS; i += BLOCK)
        sum += clip->parts[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0)
        return;
    clip->factor = (float)optimizer_clip(clip_norm, sqrt(sum));
    if (scale && scale->overflowed)
        return;
    totals->norms += sqrt(sum);
    totals->normed++;
}

enum status clip_open(const struct train *train, struct allocations *allocations, struct device_clip **clip)
{
    *clip = nullptr;
    return train->optimizer.clip_norm > 0 ? allocate(allocations, clip, 1) : STATUS_OK;
}

enum status clip_find(const struct optimizer *optimizer, size_t values, const float *gradients,
                      const struct device_scale *scale, struct device_clip *clip, struct train_totals *totals,
                      cudaStream_t stream)
{
    if (!clip)
        return STATUS_OK;
    squares_kernel<<<CLIP_PARTS, BLOCK, 0, stream>>>(values / 4, reinterpret_cast<const float4 *>(gradients),
                                                     clip);
    CUDA_TRY_LAUNCH("squares_kernel");
    factor_kernel<<<1, BLOCK, 0, stream>>>(optimizer->clip_norm, scale, clip, totals);
    CUDA_TRY_LAUNCH("factor_kernel");
    return STATUS_OK;
}
