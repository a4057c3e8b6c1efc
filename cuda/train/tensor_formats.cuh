/* The number formats of tensor core operands. Tiles store operands in units of 16 bytes. Sums are fp32 for
 * all formats. */
#ifndef FDSL_CUDA_TRAIN_TENSOR_FORMATS_CUH
#define FDSL_CUDA_TRAIN_TENSOR_FORMATS_CUH

#include "train/mma.cuh"

/* bfloat16: 8 significant bits (including the hidden bit) and the range of fp32. */
struct as_bf16 {
    static constexpr int UNIT = 8; /* values per 16 bytes; one mma is two units deep */

    static __device__ __forceinline__ uint32_t pair(float low, float high)
    {
        __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t *>(&both);
    }
    static __device__ __forceinline__ uint4 pack(const float values[UNIT])
    {
        return make_uint4(pair(values[0], values[1]), pair(values[2], values[3]), pair(values[4], values[5]),
                          pair(values[6], values[7]));
    }
    static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], const uint32_t b[2])
    {
        mma_16816(c, a, b, __nv_bfloat16());
    }
};

/* IEEE half precision: 11 significant bits; values that round to more than 65504 become infinite. */
struct as_fp16 {
    static constexpr int UNIT = 8;

    static __device__ __forceinline__ uint32_t pair(float low, float high)
    {
        __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t *>(&both);
    }
    static __device__ __forceinline__ uint4 pack(const float values[UNIT])
    {
        return make_uint4(pair(values[0], values[1]), pair(values[2], values[3]), pair(values[4], values[5]),
                          pair(values[6], values[7]));
    }
    static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], const uint32_t b[2])
    {
        mma_16816(c, a, b, __half());
    }
};

/* TF32: 11 significant bits and the range of fp32, one value per 32-bit word. */
struct as_tf32 {
    static constexpr int UNIT = 4;

    static __device__ __forceinline__ uint4 pack(const float values[UNIT])
    {
        return make_uint4(mma_tf32(values[0]), mma_tf32(values[1]), mma_tf32(values[2]), mma_tf32(values[3]));
    }
    static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], const uint32_t b[2])
    {
        mma_1688_tf32(c, a, b);
    }
};

#endif
