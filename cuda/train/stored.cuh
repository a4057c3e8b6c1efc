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
#include <type_traits>

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

/* ---- Words of two 16-bit values ---- */

/* Converts two floats to a 16-bit type. `low` goes to the lower half of the word. Arrays of words stay in
 * registers; arrays of __nv_bfloat162 can end up in local memory. A value beyond the range of fp16 becomes
 * infinite. */
template <class T> static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "no 16-bit type");
    uint32_t word;
    if constexpr (std::is_same<T, __nv_bfloat16>::value) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        memcpy(&word, &both, sizeof word);
    } else {
        const __half2 both = __floats2half2_rn(low, high);
        memcpy(&word, &both, sizeof word);
    }
    return word;
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

template <class T> static __device__ __forceinline__ void store_four(T *to, float4 values)
{
    *reinterpret_cast<uint2 *>(to) = make_uint2(pack<T>(values.x, values.y), pack<T>(values.z, values.w));
}

#endif
