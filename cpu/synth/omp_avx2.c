/* The kernel of `omp` for AVX2 and FMA: vectors of 8 lanes. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "omp_kernel.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,popcnt")
#endif

#define LANES 8
typedef __m256i vint;
typedef __m256 vreal;
#define V(operation)      _mm256_##operation
#define V_BITS(operation) _mm256##operation##_si256 /* intrinsics without an element type */

#include "omp_vector.h"

#define v_set64(n)      _mm256_set1_epi64x((int64_t)(n))
#define v_xor3(a, b, c) v_xor(v_xor(b, c), a)
#define v_or3(a, b, c)  v_or(v_or(b, c), a)
#define v_signs(a)      ((uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(a)))
#define v_greater(a, b) ((uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b))))

/* Returns the mask of the lanes with x and y in 0 .. last. */
#define v_inside(x, y, last) (0xFF & ~v_signs(v_or(v_or3(x, y, v_sub(last, x)), v_sub(last, y))))

#define v_real_less(x, y)    ((uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ)))

/* Returns the vector of lane numbers 0, 1, 2, ... */
#define v_count() _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0)

/* Copies the high half of each 64-bit lane to its low half. Callers ignore the high halves of the result. */
#define v_high(a) _mm256_shuffle_epi32(a, 0xF5)

/* Interleaves the low (or high) halves of the 64-bit lanes of `even` and `odd`. */
#define v_lows(even, odd)  _mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, 0xA0), 0xAA)
#define v_highs(even, odd) _mm256_blend_epi32(odd, _mm256_shuffle_epi32(even, 0xF5), 0x55)

/* Stores the lanes in `mask` contiguously. Writes LANES elements; those after the stored lanes are
 * undefined. */
static inline void v_compress(const struct omp_tables *tables, void *p, uint32_t mask, vint a)
{
    __m128i lanes = _mm_loadl_epi64((const __m128i *)&tables->compress[mask]);
    v_store(p, _mm256_permutevar8x32_epi32(a, _mm256_cvtepu8_epi32(lanes)));
}

/* For each lane in `mask`, stores one byte, whose value is `at` + lane. Writes LANES bytes; those after the
 * stored lanes are undefined. */
static inline void v_compress_lanes(const struct omp_tables *tables, uint8_t *p, uint32_t mask, uint32_t at)
{
    uint64_t lanes = tables->compress[mask] + at * 0x0101010101010101u;
    memcpy(p, &lanes, sizeof lanes);
}

/* Looks up each lane of `index` (0 .. 7) in a table of eight words. */
#define v_octant(table, index) _mm256_permutevar8x32_epi32(v_load(table), index)

/* Selects b where bit `bit` of `selector` is set, else a. */
#define SELECT(a, b, selector, bit) \
    _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(selector, 31 - (bit))))

/* Returns the scaled gradients on both sides of each cell. Looks up first the hash and then its gradient,
 * both with register permutations. The hash table has 32 words, and one instruction indexes 8 of them, so
 * four lookups are combined. With gather instructions, moving the vertices would take 1.8 times as long. */
static inline void v_gradients(const struct omp_tables *tables, vint cell, vreal *left, vreal *right)
{
    vint shift = v_and(v_right(cell, 3), v_set(28));
    vreal *const gradient[2] = {left, right};
    for (int side = 0; side < 2; side++) {
        vreal words[4];
        for (int i = 0; i < 4; i++)
            words[i] =
                _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(v_load(tables->hashes[side] + 8 * i), cell));
        vreal word =
            SELECT(SELECT(words[0], words[1], cell, 3), SELECT(words[2], words[3], cell, 3), cell, 4);
        vint hash = _mm256_srlv_epi32(_mm256_castps_si256(word), shift);
        *gradient[side] =
            SELECT(_mm256_permutevar8x32_ps(v_real_load(tables->hash_gradients), hash),
                   _mm256_permutevar8x32_ps(v_real_load(tables->hash_gradients + 8), hash), hash, 3);
    }
}

#include "omp_simd.h"

const struct omp_kernel omp_kernel_avx2 = {
    .room_bytes = sizeof(struct room),
    .begin = begin,
    .advance = advance,
    .trace = trace,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
