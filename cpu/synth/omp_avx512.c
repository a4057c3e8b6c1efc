/* The kernel of `omp` for AVX-512 F, BW, DQ and VL: vectors of 16 lanes. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "omp_kernel.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,popcnt")
#endif

#define LANES 16
typedef __m512i vint;
typedef __m512 vreal;
#define V(operation)      _mm512_##operation
#define V_BITS(operation) _mm512##operation##_si512 /* intrinsics without an element type */

#include "omp_vector.h"

#define v_set64(n)      _mm512_set1_epi64((int64_t)(n))
#define v_xor3(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0x96)
#define v_or3(a, b, c)  _mm512_ternarylogic_epi32(a, b, c, 0xFE)
#define v_signs(a)      ((uint32_t)_mm512_movepi32_mask(a))
#define v_greater(a, b) ((uint32_t)_mm512_cmpgt_epi32_mask(a, b))

/* Returns the mask of the lanes with x and y in 0 .. last. */
#define v_inside(x, y, last) \
    ((uint32_t)_mm512_mask_cmple_epu32_mask(_mm512_cmple_epu32_mask(x, last), y, last))

#define v_real_less(x, y) ((uint32_t)_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ))

/* Returns the vector of lane numbers 0, 1, 2, ... */
#define v_count() _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)

/* Copies the high half of each 64-bit lane to its low half. Callers ignore the high halves of the result. */
#define v_high(a) _mm512_shuffle_epi32(a, (_MM_PERM_ENUM)0xF5)

/* Interleaves the low (or high) halves of the 64-bit lanes of `even` and `odd`. */
#define v_lows(even, odd)  _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, (_MM_PERM_ENUM)0xA0)
#define v_highs(even, odd) _mm512_mask_shuffle_epi32(odd, 0x5555, even, (_MM_PERM_ENUM)0xF5)

/* Stores the lanes in `mask` contiguously. Writes LANES elements; those after the stored lanes are 0. */
#define v_compress(tables, p, mask, a) \
    ((void)(tables), _mm512_storeu_si512(p, _mm512_maskz_compress_epi32((__mmask16)(mask), a)))

/* For each lane in `mask`, stores one byte, whose value is `at` + lane. Writes LANES bytes; those after the
 * stored lanes are 0. */
static inline void v_compress_lanes(const struct omp_tables *tables, uint8_t *p, uint32_t mask, uint32_t at)
{
    (void)tables;
    vint lanes = _mm512_maskz_compress_epi32((__mmask16)mask, v_add(v_count(), v_set(at)));
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(lanes));
}

/* Looks up each lane of `index` (0 .. 7) in a table of eight words. */
#define v_octant(table, index) \
    _mm512_permutexvar_epi32(index, _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(table))))

/* Returns the scaled gradients on both sides of each cell. Looks up first the hash and then its gradient,
 * both with register permutations. This takes a third of the time of a gather. */
static inline void v_gradients(const struct omp_tables *tables, vint cell, vreal *left, vreal *right)
{
    vint shift = v_and(v_right(cell, 3), v_set(28));
    vreal gradients = v_real_load(tables->hash_gradients);
    vint words[2];
    for (int side = 0; side < 2; side++)
        words[side] = _mm512_srlv_epi32(
            _mm512_permutex2var_epi32(v_load(tables->hashes[side]), cell, v_load(tables->hashes[side] + 16)),
            shift);
    *left = _mm512_permutexvar_ps(words[0], gradients);
    *right = _mm512_permutexvar_ps(words[1], gradients);
}

#include "omp_simd.h"

const struct omp_kernel omp_kernel_avx512 = {
    .room_bytes = sizeof(struct room),
    .begin = begin,
    .advance = advance,
    .trace = trace,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
