/* Between the gradients and the new parameters: loss scaling, clipping, and the optimizer. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/network.cuh"

/* ---- Loss scaling ---- */

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
    return CUDA_LAUNCHED("unscale_kernel");
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
    return CUDA_LAUNCHED("scale_kernel");
}

/* ---- Clipping ---- */

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
    return CUDA_LAUNCHED("factor_kernel");
}

/* ---- The parameter update ---- */

static __global__ void update_kernel(struct update update, size_t values, const float *gradients,
                                     const struct device_scale *scale, const struct device_clip *clip,
                                     const struct train_state state)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= values || (scale && scale->overflowed))
        return;
    if (clip)
        update.clip = clip->factor;
    optimizer_step(&update, gradients[i], &state.parameters[i], &state.m[i], &state.v[i]);
    if (state.ema)
        state.ema[i] = optimizer_average(&update, state.ema[i], state.parameters[i]);
}

enum status parameters_update(const struct update *update, size_t values, const float *gradients,
                              const struct device_scale *scale, const struct device_clip *clip,
                              const struct train_state *state, cudaStream_t stream)
{
    update_kernel<<<blocks_for(values), BLOCK, 0, stream>>>(*update, values, gradients, scale, clip, *state);
    return CUDA_LAUNCHED("update_kernel");
}
