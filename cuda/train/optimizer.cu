/* Between the gradients and the new parameters: loss scaling, clipping, and the optimizer. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/mma.cuh"
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

#define CLIP_PARTS 1024 /* blocks, each of which adds up a part of the squares */

struct device_clip {
    float factor;             /* multiplies the gradients of the current step */
    double parts[CLIP_PARTS]; /* sums of squares */
};

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

#define STEP_VALUES 4 /* values per thread: 16 bytes of fp32 */

static __global__ void __launch_bounds__(BLOCK)
    update_kernel(struct update all, size_t count, const float4 *gradients, const struct update_extras extras,
                  float4 *parameters, float4 *m, float4 *v, float4 *averages)
{
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= count || (extras.scale && extras.scale->overflowed))
        return;
    if (extras.clip)
        all.clip = extras.clip->factor;
    const float4 gradient = gradients[i];
    float4 parameter = parameters[i], first = m[i], second = v[i];
    const struct update update =
        extras.groups ? optimizer_of(&all, extras.groups[i * STEP_VALUES / MODEL_ALIGNMENT]) : all;
    optimizer_step(&update, gradient.x, &parameter.x, &first.x, &second.x);
    optimizer_step(&update, gradient.y, &parameter.y, &first.y, &second.y);
    optimizer_step(&update, gradient.z, &parameter.z, &first.z, &second.z);
    optimizer_step(&update, gradient.w, &parameter.w, &first.w, &second.w);
    parameters[i] = parameter;
    m[i] = first;
    v[i] = second;
    if (averages) {
        float4 average = averages[i];
        average.x = optimizer_average(&update, average.x, parameter.x);
        average.y = optimizer_average(&update, average.y, parameter.y);
        average.z = optimizer_average(&update, average.z, parameter.z);
        average.w = optimizer_average(&update, average.w, parameter.w);
        averages[i] = average;
    }
    if (extras.rounded)
        reinterpret_cast<uint2 *>(extras.rounded)[i] = {pack(parameter.x, parameter.y),
                                                        pack(parameter.z, parameter.w)};
}

enum status parameters_update(const struct update *update, size_t values, const float *gradients,
                              const struct update_extras *extras, const struct train_state *state,
                              cudaStream_t stream)
{
    const size_t count = (values + STEP_VALUES - 1) / STEP_VALUES;
    update_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(
        *update, count, reinterpret_cast<const float4 *>(gradients), *extras,
        reinterpret_cast<float4 *>(state->parameters), reinterpret_cast<float4 *>(state->m),
        reinterpret_cast<float4 *>(state->v), reinterpret_cast<float4 *>(state->ema));
    return CUDA_LAUNCHED("update_kernel");
}
