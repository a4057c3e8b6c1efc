/* The steps of src/ops/row.h for one row, computed by a warp. The results are bit-identical to those of
 * row.h. All 32 lanes call the functions whose names begin with `warp_` for the same row, and all lanes get
 * the result.
 *
 * KIND says how a row can be read:
 * - ROW_ANY: one value at a time.
 * - ROW_ALIGNED: four values (a quad) at a time. The addresses and sizes of rows are multiples of 16 bytes.
 * - ROW_WHOLE: rows also have a multiple of 256 values, so that all lanes have equally many quads. */
#ifndef FDSL_CUDA_OPS_ROW_CUH
#define FDSL_CUDA_OPS_ROW_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/xxh3.cuh"
#include "ops/fused_plan.h"
#include "ops/row.h"

#define ALL_LANES 0xFFFFFFFFu

/* ---- Loads ---- */

/* The type of a quad in its stored format. */
template <enum dtype TYPE> struct stored_quad {
    using type = uint2;
};
template <> struct stored_quad<DTYPE_F32> {
    using type = uint4;
};

/* The part of a row that the lanes have in registers. Each lane has quads first + lane, first + lane + 32,
 * ...; quads after the end of the row are zero. A row that fits into a window is loaded into it once; norm,
 * conversion and, for f32, the hash use the loaded values. */
template <enum dtype TYPE, int COUNT> struct window {
    typename stored_quad<TYPE>::type quads[COUNT];
    uint32_t first = UINT32_MAX;
};

/* Returns whether quad number k of this lane's window is within a row of `quads` quads. */
template <enum row_kind KIND>
static __device__ __forceinline__ bool has_quad(uint32_t first, int k, uint32_t quads)
{
    if (KIND == ROW_WHOLE)
        return first + (k & ~1) * WARP_LANES < quads; /* the same for all lanes */
    return first + k * WARP_LANES + threadIdx.x % WARP_LANES < quads;
}

/* Moves a window to quad `first` of a row of `quads` quads. All loads are in flight together. */
template <enum row_kind KIND, enum dtype TYPE, int COUNT>
static __device__ __forceinline__ void window_move(struct window<TYPE, COUNT> &window, const uint8_t *row,
                                                   uint32_t first, uint32_t quads)
{
    if (window.first == first)
        return;
    window.first = first;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        uint32_t quad = first + k * WARP_LANES + threadIdx.x % WARP_LANES;
        window.quads[k] = {};
        if (has_quad<KIND>(first, k, quads))
            window.quads[k] = reinterpret_cast<const typename stored_quad<TYPE>::type *>(row)[quad];
    }
}

static __device__ __forceinline__ float4 quad_values(uint4 quad, enum dtype)
{
    return make_float4(__uint_as_float(quad.x), __uint_as_float(quad.y), __uint_as_float(quad.z),
                       __uint_as_float(quad.w));
}

static __device__ __forceinline__ float4 quad_values(uint2 quad, enum dtype type)
{
    if (type == DTYPE_BF16)
        return make_float4(__uint_as_float(quad.x << 16), __uint_as_float(quad.x & 0xFFFF0000u),
                           __uint_as_float(quad.y << 16), __uint_as_float(quad.y & 0xFFFF0000u));
    float2 low = __half22float2(*reinterpret_cast<__half2 *>(&quad.x));
    float2 high = __half22float2(*reinterpret_cast<__half2 *>(&quad.y));
    return make_float4(low.x, low.y, high.x, high.y);
}

template <enum dtype TYPE> static __device__ __forceinline__ float load_value(const uint8_t *row, uint32_t i)
{
    if constexpr (TYPE == DTYPE_F32)
        return reinterpret_cast<const float *>(row)[i];
    uint16_t bits = reinterpret_cast<const uint16_t *>(row)[i];
    return TYPE == DTYPE_F16 ? __half2float(__ushort_as_half(bits)) : bf16_to_float(bits);
}

static __device__ __forceinline__ ulonglong2 quad_words(uint4 quad)
{
    return make_ulonglong2(quad.x | (uint64_t)quad.y << 32, quad.z | (uint64_t)quad.w << 32);
}

/* Returns 16 bytes of a row as two words. If KIND is ROW_ANY, `bytes` is aligned only to the size of a value.
 */
template <enum dtype TYPE, enum row_kind KIND>
static __device__ __forceinline__ ulonglong2 load_words(const uint8_t *bytes)
{
    if constexpr (KIND != ROW_ANY)
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
 * the first two steps, partners exchange halves of their accumulators, so that they do not compute the same
 * sums. */
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

/* Computes ops_square_sum(). */
template <enum row_kind KIND, enum dtype TYPE, int COUNT>
static __device__ __forceinline__ float warp_square_sum(struct window<TYPE, COUNT> &window,
                                                        const uint8_t *row, uint32_t columns)
{
    if constexpr (KIND != ROW_ANY) {
        float4 sums = make_float4(0, 0, 0, 0);
        for (uint32_t first = 0; first < columns / 4; first += COUNT * WARP_LANES) {
            window_move<KIND>(window, row, first, columns / 4);
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                if (KIND == ROW_WHOLE && !has_quad<KIND>(first, k, columns / 4))
                    break;
                float4 quad = quad_values(window.quads[k], TYPE);
                sums = make_float4(fmaf(quad.x, quad.x, sums.x), fmaf(quad.y, quad.y, sums.y),
                                   fmaf(quad.z, quad.z, sums.z), fmaf(quad.w, quad.w, sums.w));
            }
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

/* Constants of XXH3-64 per lane, in shared memory. Within a block of 16 stripes, lane l adds 16 bytes of
 * stripe l / 4 and 16 bytes of stripe 8 + l / 4. These bytes are words 2 * (l % 4) and 2 * (l % 4) + 1 of the
 * stripe. After hash_collect(), lane l has accumulator 2 * (l % 4) + l / 16 of XXH3. */
struct hash_keys {
    uint64_t block[2][2][WARP_LANES]; /* by half of the block, by word */
    uint64_t last[2][WARP_LANES];     /* for the last 64 bytes, by word */
    uint64_t initial[WARP_LANES], scramble[WARP_LANES], merge[WARP_LANES];
};

/* Fills `keys`. One warp calls this function. A block barrier must separate it from warp_hash(). */
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

/* Adds two words to their accumulators. Each word is also added to the other word's accumulator. */
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

/* Adds the sums of all lanes to the accumulators. */
static __device__ __forceinline__ uint64_t hash_collect(uint64_t accumulator, const uint64_t sums[2])
{
    bool upper = threadIdx.x & 16;
    uint64_t sum = (upper ? sums[1] : sums[0]) + __shfl_xor_sync(ALL_LANES, upper ? sums[0] : sums[1], 16);
    sum += __shfl_xor_sync(ALL_LANES, sum, 8);
    return accumulator + sum + __shfl_xor_sync(ALL_LANES, sum, 4);
}

static __device__ __forceinline__ uint64_t hash_end(const struct hash_keys &keys, uint64_t accumulator,
                                                    uint32_t bytes)
{
    uint64_t merged = accumulator ^ keys.merge[threadIdx.x % WARP_LANES];
    merged = xxh3_fold(merged, __shfl_xor_sync(ALL_LANES, merged, 16));
    merged += __shfl_xor_sync(ALL_LANES, merged, 1);
    merged += __shfl_xor_sync(ALL_LANES, merged, 2);
    return xxh3_avalanche(bytes * XXH3_PRIME64_1 + merged);
}

/* Computes XXH3-64 of a row, with seed 0. Lane l adds the 16-byte parts l, l + 32, l + 64, ... A part is a
 * quad if values have 4 bytes. The last 64 bytes are added with the keys `keys.last`. */
template <enum row_kind KIND, enum dtype TYPE, int COUNT>
static __device__ __forceinline__ uint64_t warp_hash(const struct hash_keys &keys,
                                                     struct window<TYPE, COUNT> &window, const uint8_t *row,
                                                     uint32_t bytes)
{
    constexpr bool held = KIND != ROW_ANY && TYPE == DTYPE_F32, simple = held && KIND == ROW_WHOLE;
    uint32_t lane = threadIdx.x % WARP_LANES, stripes = (bytes - 1) / XXH3_STRIPE;
    bool whole = bytes % XXH3_STRIPE == 0; /* the last 64 bytes are a stripe */
    uint64_t accumulator = keys.initial[lane];
    if (KIND == ROW_ANY && bytes <= XXH3_SHORT_MAX)
        return hash_short(row, bytes);
    for (uint32_t first = 0;; first += COUNT * WARP_LANES) {
        if constexpr (held)
            window_move<KIND>(window, row, first, bytes / 16);
#pragma unroll
        for (uint32_t block = 0; block < COUNT / 2; block++) {
            uint32_t part = first + 2 * block * WARP_LANES + lane;
            bool ends = stripes - (part - lane) / 4 < 16;
            uint64_t sums[2] = {0, 0};
#pragma unroll
            for (uint32_t half = 0; half < 2; half++, part += WARP_LANES) {
                bool last = simple ? half == 1 && ends && lane >= 28 : part / 4 == stripes && whole;
                if (!simple && part / 4 >= stripes && !last)
                    continue;
                ulonglong2 words;
                if constexpr (held)
                    words = quad_words(window.quads[2 * block + half]);
                else
                    words = load_words<TYPE, KIND>(row + part * 16);
                hash_add(words, last ? keys.last : keys.block[half], sums);
            }
            if (!simple && ends && !whole && lane < 4)
                hash_add(load_words<TYPE, KIND>(row + bytes - XXH3_STRIPE + lane * 16), keys.last, sums);
            accumulator = hash_collect(accumulator, sums);
            if (ends)
                return hash_end(keys, accumulator, bytes);
            accumulator = (accumulator ^ accumulator >> 47 ^ keys.scramble[lane]) * XXH3_PRIME32_1;
        }
    }
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

/* Converts four values to fp8. The hardware can only saturate. If `saturate` is false, the code replaces
 * values that are too large by NaN. */
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

/* Converts four values to fp4. Consecutive lanes have the values of a block. */
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

template <enum ops_type TO, enum row_kind KIND, enum dtype TYPE, int COUNT>
static __device__ __forceinline__ void convert_quads(const struct ops_format &format,
                                                     struct window<TYPE, COUNT> &window, const uint8_t *row,
                                                     uint8_t *values, uint8_t *scales)
{
    uint32_t quads = format.columns / 4, padded = quads;
    if constexpr (TO == OPS_NVFP4 || TO == OPS_MXFP4)
        padded = (uint32_t)ops_value_bytes(TO, format.columns) / 2;
    for (uint32_t first = 0; first < padded; first += COUNT * WARP_LANES) {
        window_move<KIND>(window, row, first, quads);
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            uint32_t at = first + k * WARP_LANES + threadIdx.x % WARP_LANES;
            store_quad<TO>(format, quad_values(window.quads[k], TYPE), at, has_quad<KIND>(first, k, padded),
                           values, scales);
        }
    }
}

template <enum row_kind KIND, enum dtype TYPE, int COUNT>
static __device__ __forceinline__ void copy_quads(struct window<TYPE, COUNT> &window, const uint8_t *row,
                                                  uint8_t *values, uint32_t quads)
{
    for (uint32_t first = 0; first < quads; first += COUNT * WARP_LANES) {
        window_move<KIND>(window, row, first, quads);
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            uint32_t at = first + k * WARP_LANES + threadIdx.x % WARP_LANES;
            if (has_quad<KIND>(first, k, quads))
                reinterpret_cast<typename stored_quad<TYPE>::type *>(values)[at] = window.quads[k];
        }
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

/* Converts a row. FP4 is true for the two fp4 types, except with ROW_ANY. Their conversion needs so many
 * registers that it would slow down a kernel that also contains the other conversions. Only fp4 types use
 * `scales`. */
template <enum row_kind KIND, bool FP4, enum dtype TYPE, int COUNT>
static __device__ __forceinline__ void warp_convert(const struct ops_format &format,
                                                    struct window<TYPE, COUNT> &window, const uint8_t *row,
                                                    uint8_t *values, uint8_t *scales)
{
    if constexpr (KIND == ROW_ANY)
        convert_values<TYPE>(format, row, values, scales);
    else if (FP4 && format.to == OPS_NVFP4)
        convert_quads<OPS_NVFP4, KIND>(format, window, row, values, scales);
    else if (FP4)
        convert_quads<OPS_MXFP4, KIND>(format, window, row, values, scales);
    else if (ops_copies(TYPE, format.to))
        copy_quads<KIND>(window, row, values, format.columns / 4);
    else if (TYPE != DTYPE_F32 && format.to == OPS_F32)
        convert_quads<OPS_F32, KIND>(format, window, row, values, scales);
    else if (format.to == OPS_F16)
        convert_quads<OPS_F16, KIND>(format, window, row, values, scales);
    else if (format.to == OPS_BF16)
        convert_quads<OPS_BF16, KIND>(format, window, row, values, scales);
    else
        convert_quads<OPS_FP8, KIND>(format, window, row, values, scales);
}

#endif
