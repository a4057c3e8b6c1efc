/* The optimizer, and the parameters in bf16. */
#include "common/check.cuh"
#include "train/vit/kernels.cuh"

#define VALUES 4 /* values per thread: 16 bytes of fp32 */

static __global__ void __launch_bounds__(BLOCK)
    update_kernel(struct update all, size_t count, const struct tensor_update *groups,
                  const struct device_clip *clip, const float4 *gradients, float4 *parameters, float4 *m,
                  float4 *v, float4 *averages, uint2 *rounded)
{
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= count)
        return;
    if (clip)
        all.clip = clip->factor;
    const float4 gradient = gradients[i];
    float4 parameter = parameters[i], first = m[i], second = v[i];
    const struct update update = optimizer_of(&all, groups[i * VALUES / VIT_GROUP_VALUES]);
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
    const __nv_bfloat162 low = __floats2bfloat162_rn(parameter.x, parameter.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(parameter.z, parameter.w);
    rounded[i] = {*reinterpret_cast<const uint32_t *>(&low), *reinterpret_cast<const uint32_t *>(&high)};
}

enum status vit_update(const struct update *update, size_t values, const struct tensor_update *groups,
                       const struct device_clip *clip, const float *gradients,
                       const struct train_state *state, bf16 *rounded, cudaStream_t stream)
{
    const size_t count = values / VALUES; /* exact: arenas are multiples of VIT_GROUP_VALUES values */
    update_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(
        *update, count, groups, clip, reinterpret_cast<const float4 *>(gradients),
        reinterpret_cast<float4 *>(state->parameters), reinterpret_cast<float4 *>(state->m),
        reinterpret_cast<float4 *>(state->v), reinterpret_cast<float4 *>(state->ema),
        reinterpret_cast<uint2 *>(rounded));
    return CUDA_LAUNCHED("update_kernel");
}

static __global__ void round_kernel(const float2 *values, size_t pairs, __nv_bfloat162 *rounded)
{
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < pairs)
        rounded[i] = __float22bfloat162_rn(values[i]);
}

enum status vit_round(const float *values, size_t count, bf16 *rounded, cudaStream_t stream)
{
    round_kernel<<<blocks_for(count / 2), BLOCK, 0, stream>>>(
        reinterpret_cast<const float2 *>(values), count / 2, reinterpret_cast<__nv_bfloat162 *>(rounded));
    return CUDA_LAUNCHED("round_kernel");
}
