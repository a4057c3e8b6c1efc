/* The types in which tensors between layers are stored: float, or one of 16 bits if GEMMs round their
 * operands to 16 bits anyway. Kernels compute in fp32; they round a result once, when they store it.
 *
 * A tensor has elements (sample, channel, position), where a position is (depth, height, width) in a sample.
 * The last axis in memory is the position, or with "channels last" the channel. */
#ifndef FDSL_CUDA_TRAIN_STORED_CUH
#define FDSL_CUDA_TRAIN_STORED_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <string.h>

static __device__ __forceinline__ float to_float(float value)
{
    return value;
}

static __device__ __forceinline__ float to_float(__half value)
{
    return __half2float(value);
}

static __device__ __forceinline__ float to_float(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

static __device__ __forceinline__ void store(float *to, float value)
{
    *to = value;
}

static __device__ __forceinline__ void store(__half *to, float value)
{
    *to = __float2half_rn(value);
}

static __device__ __forceinline__ void store(__nv_bfloat16 *to, float value)
{
    *to = __float2bfloat16_rn(value);
}

/* ---- Four adjacent values; addresses are multiples of the size of four values ---- */

static __device__ __forceinline__ float4 load_four(const float *from)
{
    return *reinterpret_cast<const float4 *>(from);
}

template <class T> static __device__ __forceinline__ float4 load_four(const T *from)
{
    const uint2 words = *reinterpret_cast<const uint2 *>(from);
    const T *values = reinterpret_cast<const T *>(&words);
    return make_float4(to_float(values[0]), to_float(values[1]), to_float(values[2]), to_float(values[3]));
}

static __device__ __forceinline__ void store_four(float *to, float4 values)
{
    *reinterpret_cast<float4 *>(to) = values;
}

static __device__ __forceinline__ uint32_t two_of(float low, float high, __half)
{
    const __half2 both = __floats2half2_rn(low, high);
    uint32_t word;
    memcpy(&word, &both, sizeof word);
    return word;
}

static __device__ __forceinline__ uint32_t two_of(float low, float high, __nv_bfloat16)
{
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &both, sizeof word);
    return word;
}

template <class T> static __device__ __forceinline__ void store_four(T *to, float4 values)
{
    *reinterpret_cast<uint2 *>(to) =
        make_uint2(two_of(values.x, values.y, T()), two_of(values.z, values.w, T()));
}

#endif
