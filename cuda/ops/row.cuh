/* The steps of src/ops/row.h for one row, computed by a warp. The results are bit-identical to those of
 * row.h. All 32 lanes call these functions with the same arguments, and all of them get the result.
 *
 * FAST selects loads of 16 bytes (8 bytes for quads of 16-bit values). It requires that rows have a multiple
 * of 16 bytes and begin at such an address. Otherwise, loads have the size of a value. */
#ifndef FDSL_CUDA_OPS_ROW_CUH
#define FDSL_CUDA_OPS_ROW_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/xxh3.cuh"
#include "ops/row.h"

#define WARP_LANES 32
#define ALL_LANES  0xFFFFFFFFu

/* ---- Loads ---- */

/* Returns values 4 * quad .. 4 * quad + 3 of a row. */
template <enum dtype TYPE>
static __device__ __forceinline__ float4 load_quad(const uint8_t *row, uint32_t quad)
{
    if constexpr (TYPE == DTYPE_F32)
        return reinterpret_cast<const float4 *>(row)[quad];
    uint2 bits = reinterpret_cast<const uint2 *>(row)[quad];
    if constexpr (TYPE == DTYPE_BF16)
        return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
                           __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u));
    float2 low = __half22float2(*reinterpret_cast<__half2 *>(&bits.x));
    float2 high = __half22float2(*reinterpret_cast<__half2 *>(&bits.y));
    return make_float4(low.x, low.y, high.x, high.y);
}

template <enum dtype TYPE> static __device__ __forceinline__ float load_value(const uint8_t *row, uint32_t i)
{
    if constexpr (TYPE == DTYPE_F32)
        return reinterpret_cast<const float *>(row)[i];
    uint16_t bits = reinterpret_cast<const uint16_t *>(row)[i];
    return TYPE == DTYPE_F16 ? __half2float(__ushort_as_half(bits)) : bf16_to_float(bits);
}

/* Loads the quads `first` + lane, `first` + lane + 32, ... of a row; zeros after the end of the row. */
template <enum dtype TYPE, int COUNT>
static __device__ __forceinline__ void load_quads(const uint8_t *row, uint32_t first, uint32_t quads,
                                                  float4 (&values)[COUNT])
{
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        uint32_t quad = first + k * WARP_LANES + threadIdx.x % WARP_LANES;
        values[k] = quad < quads ? load_quad<TYPE>(row, quad) : make_float4(0, 0, 0, 0);
    }
}

/* Returns 16 bytes of a row as two words. Loads with FAST are aligned; otherwise values are. */
template <enum dtype TYPE, bool FAST>
static __device__ __forceinline__ ulonglong2 load_words(const uint8_t *bytes)
{
    if constexpr (FAST)
        return *reinterpret_cast<const ulonglong2 *>(bytes);
    constexpr uint32_t parts = TYPE == DTYPE_F32 ? 2 : 4; /* per word */
    uint64_t words[2] = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < 2 * parts; i++) {
        uint64_t part = TYPE == DTYPE_F32 ? reinterpret_cast<const uint32_t *>(bytes)[i]
                                          : reinterpret_cast<const uint16_t *>(bytes)[i];
        words[i / parts] |= part << 64 / parts * (i % parts);
    }
    return make_ulonglong2(words[0], words[1]);
}

/* ---- Norm ---- */

static __device__ __forceinline__ float add_across(float value, int distance)
{
    return value + __shfl_xor_sync(ALL_LANES, value, distance);
}

/* Adds the accumulators in pairs at distances 64, 32, ... 1. Lane l has accumulators 4 * l .. 4 * l + 3. In
 * the first two steps, partners exchange halves of their accumulators, so that no lane computes sums twice.
 */
static __device__ __forceinline__ float sum_of_quads(float4 sums)
{
    bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    float first = upper ? sums.z : sums.x, second = upper ? sums.w : sums.y;
    first += __shfl_xor_sync(ALL_LANES, upper ? sums.x : sums.z, 16);
    second += __shfl_xor_sync(ALL_LANES, upper ? sums.y : sums.w, 16);
    float sum = (odd ? second : first) + __shfl_xor_sync(ALL_LANES, odd ? first : second, 8);
    sum = add_across(add_across(add_across(sum, 4), 2), 1);
    /* Lanes 0, 8, 16 and 24 have the sums of elements 0, 1, 2 and 3 of all quads. */
    return add_across(add_across(sum, 16), 8);
}

/* Computes ops_square_sum(). A lane loads COUNT quads before it uses the first one. */
template <enum dtype TYPE, bool FAST, int COUNT>
static __device__ __forceinline__ float warp_square_sum(const uint8_t *row, uint32_t columns)
{
    if constexpr (FAST) {
        float4 sums = make_float4(0, 0, 0, 0);
        for (uint32_t first = 0; first < columns / 4; first += COUNT * WARP_LANES) {
            float4 values[COUNT];
            load_quads<TYPE>(row, first, columns / 4, values);
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                sums = make_float4(
                    fmaf(values[k].x, values[k].x, sums.x), fmaf(values[k].y, values[k].y, sums.y),
                    fmaf(values[k].z, values[k].z, sums.z), fmaf(values[k].w, values[k].w, sums.w));
        }
        return sum_of_quads(sums);
    }
    /* Lane l has accumulators l, l + 32, l + 64 and l + 96. */
    float sum[4] = {0, 0, 0, 0};
    for (uint32_t first = 0; first < columns; first += OPS_ACCUMULATORS)
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t i = first + k * WARP_LANES + threadIdx.x % WARP_LANES;
            float value = i < columns ? load_value<TYPE>(row, i) : 0;
            sum[k] = fmaf(value, value, sum[k]);
        }
    float total = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    for (int distance = 16; distance > 0; distance /= 2)
        total = add_across(total, distance);
    return total;
}

/* Returns the largest finite magnitude of a row, as bits. */
template <enum dtype TYPE>
static __device__ __forceinline__ uint32_t warp_largest(const uint8_t *row, uint32_t columns)
{
    uint32_t largest = 0;
    for (uint32_t i = threadIdx.x % WARP_LANES; i < columns; i += WARP_LANES) {
        uint32_t magnitude = magnitude_max(0, load_value<TYPE>(row, i));
        largest = magnitude < FLOAT_INFINITE ? max(largest, magnitude) : largest;
    }
    return __reduce_max_sync(ALL_LANES, largest);
}

/* ---- Hash ---- */

/* Constants of XXH3-64 by lane, in shared memory. Within a block of 16 stripes, lane l adds 16 bytes of
 * stripe l / 4 and 16 bytes of stripe 8 + l / 4: words 2 * (l % 4) and 2 * (l % 4) + 1. After the lanes are
 * added up, each lane has one accumulator of XXH3: number 2 * (l % 4) + l / 16. */
struct hash_keys {
    uint64_t block[2][2][WARP_LANES]; /* by half of the block, by word */
    uint64_t last[2][WARP_LANES];     /* for the last 64 bytes, by word; only lanes 0 to 3 use these */
    uint64_t initial[WARP_LANES], scramble[WARP_LANES], merge[WARP_LANES];
};

/* Called by one warp. Barriers order it before warp_hash(). */
static __device__ void hash_keys_begin(struct hash_keys &keys)
{
    const uint64_t initial[XXH3_LANES] = {XXH3_PRIME32_3, XXH3_PRIME64_1, XXH3_PRIME64_2, XXH3_PRIME64_3,
                                          XXH3_PRIME64_4, XXH3_PRIME32_2, XXH3_PRIME64_5, XXH3_PRIME32_1};
    uint32_t lane = threadIdx.x % WARP_LANES, word = 2 * (lane % 4), accumulator = word + lane / 16;
    for (uint32_t i = 0; i < 2; i++) {
        keys.block[0][i][lane] = xxh3_secret_word(lane / 4 + word + i);
        keys.block[1][i][lane] = xxh3_secret_word(8 + lane / 4 + word + i);
        keys.last[i][lane] = xxh3_key(XXH3_LAST_KEY - 7 + 8 * (word + i), 0);
    }
    for (uint32_t i = 0; i < XXH3_LANES; i++)
        if (i == accumulator)
            keys.initial[lane] = initial[i];
    keys.scramble[lane] = xxh3_key(XXH3_LAST_KEY + 8 * accumulator, 0);
    keys.merge[lane] = xxh3_key(11 + 8 * accumulator, 0);
}

/* Adds two words to their accumulators; each word is also added to the accumulator of the other one. */
static __device__ __forceinline__ void hash_add(ulonglong2 words, const uint64_t keys[2][WARP_LANES],
                                                uint64_t sums[2])
{
    uint32_t lane = threadIdx.x % WARP_LANES;
    uint64_t first = words.x ^ keys[0][lane], second = words.y ^ keys[1][lane];
    sums[0] += words.y + (first & 0xFFFFFFFFu) * (first >> 32);
    sums[1] += words.x + (second & 0xFFFFFFFFu) * (second >> 32);
}

static __device__ __noinline__ uint64_t hash_short(const uint8_t *row, uint32_t bytes)
{
    return xxh3_64(row, bytes, 0);
}

/* Computes XXH3-64 of a row, with seed 0. */
template <enum dtype TYPE, bool FAST>
static __device__ __forceinline__ uint64_t warp_hash(const struct hash_keys &keys, const uint8_t *row,
                                                     uint32_t bytes)
{
    uint32_t lane = threadIdx.x % WARP_LANES, stripes = (bytes - 1) / XXH3_STRIPE;
    bool upper = lane & 16;
    uint64_t accumulator = keys.initial[lane];
    if (bytes <= 240)
        return hash_short(row, bytes);
    for (uint32_t first = 0;; first += 16) {
        uint64_t sums[2] = {0, 0};
        bool ends = stripes - first < 16;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t stripe = first + 8 * half + lane / 4;
            if (stripe < stripes)
                hash_add(load_words<TYPE, FAST>(row + stripe * XXH3_STRIPE + lane % 4 * 16), keys.block[half],
                         sums);
        }
        if (ends && lane < 4)
            hash_add(load_words<TYPE, FAST>(row + bytes - XXH3_STRIPE + lane * 16), keys.last, sums);
        uint64_t sum =
            (upper ? sums[1] : sums[0]) + __shfl_xor_sync(ALL_LANES, upper ? sums[0] : sums[1], 16);
        sum += __shfl_xor_sync(ALL_LANES, sum, 8);
        accumulator += sum + __shfl_xor_sync(ALL_LANES, sum, 4);
        if (ends)
            break;
        accumulator = (accumulator ^ accumulator >> 47 ^ keys.scramble[lane]) * XXH3_PRIME32_1;
    }
    uint64_t merged = accumulator ^ keys.merge[lane];
    merged = xxh3_fold(merged, __shfl_xor_sync(ALL_LANES, merged, 16));
    merged += __shfl_xor_sync(ALL_LANES, merged, 1);
    merged += __shfl_xor_sync(ALL_LANES, merged, 2);
    return xxh3_avalanche(bytes * XXH3_PRIME64_1 + merged);
}

/* ---- Conversion ---- */

static __device__ __forceinline__ uint32_t f16_pair(float low, float high)
{
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

/* Converts four values to fp8. Hardware can only saturate; the other mode replaces large values by NaN. */
static __device__ __forceinline__ uint32_t fp8_quad(float4 quad, bool saturate)
{
#if __CUDA_ARCH__ >= 890
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(quad.y), "f"(quad.x));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(quad.w), "f"(quad.z));
    uint32_t bits = low | (uint32_t)high << 16;
    if (!saturate) {
        const float values[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            bits = fabsf(values[i]) > 464 ? (bits & ~(0xFFu << 8 * i)) | FP8_NAN << 8 * i : bits;
    }
    return bits;
#else
    return fp8_from_float(quad.x, saturate) | fp8_from_float(quad.y, saturate) << 8 |
           fp8_from_float(quad.z, saturate) << 16 | (uint32_t)fp8_from_float(quad.w, saturate) << 24;
#endif
}

/* Converts four values to fp4. The lanes that have the values of a block are consecutive. */
template <enum ops_type TO>
static __device__ __forceinline__ uint16_t fp4_quad(const struct ops_format &format, float4 quad,
                                                    uint32_t block, bool stored, uint8_t *scales)
{
    constexpr uint32_t lanes = (TO == OPS_NVFP4 ? NVFP4_BLOCK : MXFP4_BLOCK) / 4;
    uint32_t largest =
        magnitude_max(magnitude_max(magnitude_max(magnitude_max(0, quad.x), quad.y), quad.z), quad.w);
    float factor;
#pragma unroll
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    uint8_t scale;
    if constexpr (TO == OPS_NVFP4) {
        scale = nvfp4_scale(largest, format.tensor_scale);
        factor = nvfp4_factor(scale, format.tensor_scale);
    } else {
        scale = mxfp4_scale(largest);
        factor = mxfp4_factor(scale);
    }
    if (stored && threadIdx.x % lanes == 0)
        scales[block] = scale;
    return (uint16_t)(fp4_pair(quad.x, quad.y, factor) | fp4_pair(quad.z, quad.w, factor) << 8);
}

/* Converts quad number `quad` of a row and stores it if `stored` is set. */
template <enum ops_type TO>
static __device__ __forceinline__ void store_quad(const struct ops_format &format, float4 value,
                                                  uint32_t quad, bool stored, uint8_t *values,
                                                  uint8_t *scales)
{
    if constexpr (TO == OPS_NVFP4 || TO == OPS_MXFP4) {
        constexpr uint32_t block = TO == OPS_NVFP4 ? NVFP4_BLOCK : MXFP4_BLOCK;
        uint16_t bits = fp4_quad<TO>(format, value, quad / (block / 4), stored, scales);
        if (stored)
            reinterpret_cast<uint16_t *>(values)[quad] = bits;
    } else if (stored) {
        if constexpr (TO == OPS_F32)
            reinterpret_cast<uint4 *>(values)[quad] = make_uint4(
                ops_f32_bits(value.x), ops_f32_bits(value.y), ops_f32_bits(value.z), ops_f32_bits(value.w));
        else if constexpr (TO == OPS_F16)
            reinterpret_cast<uint2 *>(values)[quad] =
                make_uint2(f16_pair(value.x, value.y), f16_pair(value.z, value.w));
        else if constexpr (TO == OPS_BF16)
            reinterpret_cast<uint2 *>(values)[quad] =
                make_uint2(bf16_pair(value.x, value.y), bf16_pair(value.z, value.w));
        else
            reinterpret_cast<uint32_t *>(values)[quad] = fp8_quad(value, format.saturate);
    }
}

template <enum dtype TYPE, enum ops_type TO, int COUNT>
static __device__ __forceinline__ void convert_quads(const struct ops_format &format, const uint8_t *row,
                                                     uint8_t *values, uint8_t *scales)
{
    uint32_t quads = format.columns / 4, padded = quads;
    if constexpr (TO == OPS_NVFP4 || TO == OPS_MXFP4)
        padded = (uint32_t)ops_value_bytes(TO, format.columns) / 2;
    for (uint32_t first = 0; first < padded; first += COUNT * WARP_LANES) {
        float4 quad[COUNT];
        load_quads<TYPE>(row, first, quads, quad);
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            uint32_t at = first + k * WARP_LANES + threadIdx.x % WARP_LANES;
            store_quad<TO>(format, quad[k], at, at < padded, values, scales);
        }
    }
}

/* Not inlined, so that the registers that fp4 needs do not limit kernels that convert to other types. */
template <enum dtype TYPE, int COUNT>
static __device__ __noinline__ void convert_fp4(const struct ops_format &format, const uint8_t *row,
                                                uint8_t *values, uint8_t *scales)
{
    if (format.to == OPS_NVFP4)
        convert_quads<TYPE, OPS_NVFP4, COUNT>(format, row, values, scales);
    else
        convert_quads<TYPE, OPS_MXFP4, COUNT>(format, row, values, scales);
}

/* Copies a row of a multiple of 16 bytes. */
template <int COUNT>
static __device__ __forceinline__ void copy_row(const uint8_t *row, uint8_t *values, uint32_t bytes)
{
    const uint4 *from = reinterpret_cast<const uint4 *>(row);
    uint4 *to = reinterpret_cast<uint4 *>(values);
    for (uint32_t first = threadIdx.x % WARP_LANES; first < bytes / 16; first += COUNT * WARP_LANES) {
        uint4 words[COUNT];
#pragma unroll
        for (uint32_t k = 0; k < COUNT; k++)
            if (first + k * WARP_LANES < bytes / 16)
                words[k] = from[first + k * WARP_LANES];
#pragma unroll
        for (uint32_t k = 0; k < COUNT; k++)
            if (first + k * WARP_LANES < bytes / 16)
                to[first + k * WARP_LANES] = words[k];
    }
}

/* Converts a row of any size and alignment. */
template <enum dtype TYPE>
static __device__ __forceinline__ void convert_values(const struct ops_format &format, const uint8_t *row,
                                                      uint8_t *values, uint8_t *scales)
{
    uint32_t lane = threadIdx.x % WARP_LANES, blocks = (uint32_t)ops_scale_bytes(format.to, format.columns);
    if (ops_copies(TYPE, format.to)) {
        for (uint32_t i = lane; i < format.columns; i += WARP_LANES)
            if (TYPE == DTYPE_F32)
                reinterpret_cast<uint32_t *>(values)[i] = reinterpret_cast<const uint32_t *>(row)[i];
            else
                reinterpret_cast<uint16_t *>(values)[i] = reinterpret_cast<const uint16_t *>(row)[i];
    } else if (blocks) {
        for (uint32_t block = lane; block < blocks; block += WARP_LANES)
            ops_convert_block(&format, row, block, values, scales);
    } else {
        for (uint32_t i = lane; i < format.columns; i += WARP_LANES)
            ops_store(&format, load_value<TYPE>(row, i), values, i);
    }
}

/* Converts a row. `scales` is used only by types with scales. A lane loads COUNT quads, or 2 * COUNT that are
 * only copied, before it uses the first one. */
template <enum dtype TYPE, bool FAST, int COUNT>
static __device__ __forceinline__ void warp_convert(const struct ops_format &format, const uint8_t *row,
                                                    uint8_t *values, uint8_t *scales)
{
    if constexpr (!FAST)
        convert_values<TYPE>(format, row, values, scales);
    else if (ops_copies(TYPE, format.to))
        copy_row<2 * COUNT>(row, values, format.columns * (uint32_t)dtype_bytes(TYPE));
    else if (TYPE != DTYPE_F32 && format.to == OPS_F32)
        convert_quads<TYPE, OPS_F32, COUNT>(format, row, values, scales);
    else if (format.to == OPS_F16)
        convert_quads<TYPE, OPS_F16, COUNT>(format, row, values, scales);
    else if (format.to == OPS_BF16)
        convert_quads<TYPE, OPS_BF16, COUNT>(format, row, values, scales);
    else if (format.to == OPS_FP8)
        convert_quads<TYPE, OPS_FP8, COUNT>(format, row, values, scales);
    else
        convert_fp4<TYPE, COUNT>(format, row, values, scales);
}

#endif
