/* The vector kernels of `ops-omp`. The Makefile compiles this file once per instruction set: with LANES=8 for
 * AVX2, FMA and F16C, and with LANES=16 for AVX-512 F, BW, DQ and VL. Loads and stores may be unaligned.
 *
 * Types are constant arguments of functions that are always inlined. The compiler therefore generates one
 * loop per pair of types. It vectorises the conversions of core/dtype.h, because they have no branches. */
#if defined(__x86_64__)
#include <immintrin.h>

#if LANES == 8 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif LANES == 8
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,prefer-vector-width=512")
#endif

#include <string.h>

#include "omp_kernel.h"

#define INLINE static inline __attribute__((always_inline))

/* ---- Vectors ---- */

#if LANES == 8
typedef __m256 vreal;

#define v_load(p)      _mm256_loadu_ps((const float *)(p))
#define v_store(p, a)  _mm256_storeu_ps(p, a)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_load_half(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define v_load_bf16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))

/* Converts to f16; NaN becomes 0x7FFF. */
static inline void v_store_half(void *p, __m256 a)
{
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    __m128i nans = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    __m128i bits = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)p, _mm_blendv_epi8(bits, _mm_set1_epi16(0x7FFF), nans));
}
#else
typedef __m512 vreal;

#define v_load(p)      _mm512_loadu_ps(p)
#define v_store(p, a)  _mm512_storeu_ps(p, a)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_load_half(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define v_load_bf16(p)   \
    _mm512_castsi512_ps( \
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))

static inline void v_store_half(void *p, __m512 a)
{
    __m256i bits = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    _mm256_storeu_si256((__m256i *)p, _mm256_mask_mov_epi16(bits, nan, _mm256_set1_epi16(0x7FFF)));
}
#endif

/* ---- Norms ---- */

enum {
    GROUP = 8,   /* vectors of sums at a time; with AVX2, 16 would leave no registers for values */
    LINE = 64,   /* bytes of a cache line */
    AHEAD = 2048 /* distance in bytes from a value that is read to the values that are prefetched */
};

INLINE vreal load(const void *row, enum dtype type, uint32_t i)
{
    const void *at = (const uint8_t *)row + (size_t)i * (type == DTYPE_F32 ? 4 : 2);
    return type == DTYPE_F32 ? v_load(at) : type == DTYPE_F16 ? v_load_half(at) : v_load_bf16(at);
}

/* Prefetches values that follow in memory, usually of the next rows. Processors prefetch by themselves, but
 * stop at the end of a page. */
INLINE void prefetch_ahead(const void *row, enum dtype type, uint32_t first)
{
    const uint32_t bytes = type == DTYPE_F32 ? 4 : 2;
    uintptr_t at = (uintptr_t)row + (size_t)first * bytes + AHEAD;
    for (uint32_t line = 0; line < OPS_ACCUMULATORS * bytes; line += LINE)
        __builtin_prefetch((const void *)(at + line));
}

/* Adds the squares of `count` values, a multiple of OPS_ACCUMULATORS, to the accumulators. */
INLINE void add_squares(float *sums, const void *row, enum dtype type, uint32_t count)
{
    for (uint32_t first = 0; first < OPS_ACCUMULATORS; first += GROUP * LANES) {
        vreal group[GROUP];
        for (uint32_t v = 0; v < GROUP; v++)
            group[v] = v_load(sums + first + v * LANES);
        for (uint32_t i = first; i < count; i += OPS_ACCUMULATORS) {
            if (first == 0)
                prefetch_ahead(row, type, i);
            for (uint32_t v = 0; v < GROUP; v++) {
                vreal values = load(row, type, i + v * LANES);
                group[v] = v_fma(values, values, group[v]);
            }
        }
        for (uint32_t v = 0; v < GROUP; v++)
            v_store(sums + first + v * LANES, group[v]);
    }
}

/* Returns the sum of the squares of a row. The values after the last multiple of OPS_ACCUMULATORS are padded
 * with zeros, which change no sum. */
INLINE float sum_of(const void *row, enum dtype type, uint32_t columns)
{
    float sums[OPS_ACCUMULATORS] = {0};
    uint32_t whole = columns / OPS_ACCUMULATORS * OPS_ACCUMULATORS;
    add_squares(sums, row, type, whole);
    if (whole < columns) {
        float rest[OPS_ACCUMULATORS] = {0};
        for (uint32_t i = whole; i < columns; i++)
            rest[i - whole] = ops_value(row, type, i);
        add_squares(sums, rest, DTYPE_F32, OPS_ACCUMULATORS);
    }
    for (uint32_t distance = OPS_ACCUMULATORS / 2; distance > 0; distance /= 2)
        for (uint32_t j = 0; j < distance; j++)
            sums[j] += sums[j + distance];
    return sums[0];
}

static float square_sum(const void *row, enum dtype type, uint32_t columns)
{
    return type == DTYPE_F32   ? sum_of(row, DTYPE_F32, columns)
           : type == DTYPE_F16 ? sum_of(row, DTYPE_F16, columns)
                               : sum_of(row, DTYPE_BF16, columns);
}

INLINE uint32_t largest_of(const void *row, enum dtype type, uint32_t columns, uint32_t largest)
{
    for (uint32_t i = 0; i < columns; i++) {
        uint32_t magnitude = magnitude_max(0, ops_value(row, type, i));
        magnitude = magnitude < FLOAT_INFINITE ? magnitude : 0;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static uint32_t largest_finite(const void *row, enum dtype type, uint32_t columns, uint32_t largest)
{
    return type == DTYPE_F32   ? largest_of(row, DTYPE_F32, columns, largest)
           : type == DTYPE_F16 ? largest_of(row, DTYPE_F16, columns, largest)
                               : largest_of(row, DTYPE_BF16, columns, largest);
}

/* ---- Conversions ---- */

/* Converts values to types without blocks. The conversion to f16 is an instruction. For the other types, the
 * compiler vectorises ops_store(). */
INLINE void convert_values(const struct ops_format *format, const void *row, enum dtype from,
                           enum ops_type to, uint8_t *values)
{
    const struct ops_format known = {from, to, format->columns, format->saturate, 0};
    uint32_t first = 0;
    if (to == OPS_F16)
        for (; first + LANES <= known.columns; first += LANES)
            v_store_half(values + 2 * (size_t)first, load(row, from, first));
    for (uint32_t i = first; i < known.columns; i++)
        ops_store(&known, ops_value(row, from, i), values, i);
}

/* Converts all blocks of a row, with the same results as ops_convert_block(). */
INLINE void convert_blocks(const struct ops_format *format, const void *row, enum dtype from,
                           enum ops_type to, uint8_t *values, uint8_t *scales)
{
    const struct ops_format known = {from, to, format->columns, false, format->tensor_scale};
    const uint32_t size = ops_block(to);
    for (uint32_t first = 0, block = 0; first < known.columns; first += size, block++) {
        float in[MXFP4_BLOCK] = {0}, factor;
        uint8_t codes[MXFP4_BLOCK];
        uint32_t count = known.columns - first < size ? known.columns - first : size, largest = 0;
        if (count == size)
            for (uint32_t i = 0; i < size; i++)
                in[i] = ops_value(row, from, first + i);
        else
            for (uint32_t i = 0; i < count; i++)
                in[i] = ops_value(row, from, first + i);
        for (uint32_t i = 0; i < size; i++)
            largest = magnitude_max(largest, in[i]);
        scales[block] = ops_block_scale(&known, largest, &factor);
        for (uint32_t i = 0; i < size; i++)
            codes[i] = factor > 0 ? fp4_from_float(in[i] * factor) : 0;
        for (uint32_t i = 0; i < size / 2; i++)
            values[first / 2 + i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

INLINE void convert_from(const struct ops_format *format, const void *row, enum dtype from, uint8_t *values,
                         uint8_t *scales)
{
    switch (format->to) {
    case OPS_F32:
        return convert_values(format, row, from, OPS_F32, values);
    case OPS_F16:
        return convert_values(format, row, from, OPS_F16, values);
    case OPS_BF16:
        return convert_values(format, row, from, OPS_BF16, values);
    case OPS_FP8:
        return convert_values(format, row, from, OPS_FP8, values);
    case OPS_NVFP4:
        return convert_blocks(format, row, from, OPS_NVFP4, values, scales);
    case OPS_MXFP4:
        return convert_blocks(format, row, from, OPS_MXFP4, values, scales);
    }
}

static void convert(const struct ops_format *format, const void *row, uint8_t *values, uint8_t *scales)
{
    if (ops_copies(format->from, format->to))
        memcpy(values, row, ops_value_bytes(format->to, format->columns));
    else if (format->from == DTYPE_F32)
        convert_from(format, row, DTYPE_F32, values, scales);
    else if (format->from == DTYPE_F16)
        convert_from(format, row, DTYPE_F16, values, scales);
    else
        convert_from(format, row, DTYPE_BF16, values, scales);
}

const struct ops_kernel
#if LANES == 8
    ops_kernel_avx2
#else
    ops_kernel_avx512
#endif
    = {square_sum, largest_finite, convert};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
