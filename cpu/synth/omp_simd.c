/* The vector kernels of `omp`. The Makefile compiles this file once per instruction set: with LANES=8 for
 * AVX2 and FMA, and with LANES=16 for AVX-512 F, BW, DQ and VL. Loads and stores may be unaligned.
 *
 * The code repeats the arithmetic of atom.h operation by operation, so results are bit-identical.
 * Only multiplications by powers of two are moved; they are exact, so this changes no result. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "omp_kernel.h"
#include "synth/atom.h"
#include "synth/ifs.h"

#if LANES == 8 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,popcnt"))), apply_to = function)
#elif LANES == 8
#pragma GCC target("avx2,fma,popcnt")
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,popcnt")
#endif

/* ---- Vectors ---- */

#if LANES == 8
typedef __m256i vint;
typedef __m256 vreal;
#define V(operation)      _mm256_##operation
#define V_BITS(operation) _mm256##operation##_si256 /* intrinsics without an element type */
#else
typedef __m512i vint;
typedef __m512 vreal;
#define V(operation)      _mm512_##operation
#define V_BITS(operation) _mm512##operation##_si512
#endif

/* Operations whose intrinsics have the same name in AVX2 and AVX-512, apart from prefix and suffix */
#define v_load(p)             V_BITS(_loadu)((const vint *)(p))
#define v_store(p, a)         V_BITS(_storeu)((vint *)(p), a)
#define v_and(a, b)           V_BITS(_and)(a, b)
#define v_or(a, b)            V_BITS(_or)(a, b)
#define v_xor(a, b)           V_BITS(_xor)(a, b)
#define v_set(n)              V(set1_epi32)((int32_t)(n))
#define v_add(a, b)           V(add_epi32)(a, b)
#define v_sub(a, b)           V(sub_epi32)(a, b)
#define v_multiply(a, b)      V(mullo_epi32)(a, b)
#define v_multiply_wide(a, b) V(mul_epu32)(a, b)
#define v_multiply_add(a, b)  V(madd_epi16)(a, b)
#define v_left(a, n)          V(slli_epi32)(a, n)
#define v_right(a, n)         V(srli_epi32)(a, n)
#define v_abs(a)              V(abs_epi32)(a)
#define v_max(a, b)           V(max_epi32)(a, b)
#define v_min(a, b)           V(min_epi32)(a, b)
#define v_min_unsigned(a, b)  V(min_epu32)(a, b)

#define v_real_load(p)        V(loadu_ps)(p)
#define v_real_store(p, a)    V(storeu_ps)(p, a)
#define v_real_set(x)         V(set1_ps)(x)
#define v_real(a)             V(cvtepi32_ps)(a)
#define v_truncate(x)         V(cvttps_epi32)(x)
#define v_real_sub(x, y)      V(sub_ps)(x, y)
#define v_real_mul(x, y)      V(mul_ps)(x, y)
#define v_real_min(x, y)      V(min_ps)(x, y)
#define v_real_max(x, y)      V(max_ps)(x, y)
#define v_fma(x, y, z)        V(fmadd_ps)(x, y, z)  /* x y + z */
#define v_fms(x, y, z)        V(fmsub_ps)(x, y, z)  /* x y - z */
#define v_fnma(x, y, z)       V(fnmadd_ps)(x, y, z) /* -x y + z */

/* Operations on AVX2 vectors of eight integers. The AVX-512 kernel uses these operations, too. */
#define v8_load(p)            _mm256_loadu_si256((const __m256i *)(p))
#define v8_store(p, a)        _mm256_storeu_si256((__m256i *)(p), a)
#define v8_set(n)             _mm256_set1_epi32((int32_t)(n))
#define v8_add(a, b)          _mm256_add_epi32(a, b)
#define v8_multiply_add(a, b) _mm256_madd_epi16(a, b)

#if LANES == 8
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
#else
#define v_set64(n)      _mm512_set1_epi64((int64_t)(n))
#define v_xor3(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0x96)
#define v_or3(a, b, c)  _mm512_ternarylogic_epi32(a, b, c, 0xFE)
#define v_signs(a)      ((uint32_t)_mm512_movepi32_mask(a))
#define v_greater(a, b) ((uint32_t)_mm512_cmpgt_epi32_mask(a, b))

#define v_inside(x, y, last) \
    ((uint32_t)_mm512_mask_cmple_epu32_mask(_mm512_cmple_epu32_mask(x, last), y, last))

#define v_real_less(x, y)  ((uint32_t)_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ))

#define v_count()          _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)

#define v_high(a)          _mm512_shuffle_epi32(a, (_MM_PERM_ENUM)0xF5)

#define v_lows(even, odd)  _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, (_MM_PERM_ENUM)0xA0)
#define v_highs(even, odd) _mm512_mask_shuffle_epi32(odd, 0x5555, even, (_MM_PERM_ENUM)0xF5)

/* For each lane in `mask`, stores one byte, whose value is `at` + lane. Writes LANES bytes; those after the
 * stored lanes are 0. */
static inline void v_compress_lanes(const struct omp_tables *tables, uint8_t *p, uint32_t mask, uint32_t at)
{
    (void)tables;
    vint lanes = _mm512_maskz_compress_epi32((__mmask16)mask, v_add(v_count(), v_set(at)));
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(lanes));
}

#define v_octant(table, index) \
    _mm512_permutexvar_epi32(index, _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(table))))

/* With AVX-512, v_gradients() takes a third of the time of a gather. */
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
#endif

enum {
    BORDERS = 4,
    ORBITS_SURE = 1 << 16 /* lines are culled only in the last ORBITS_SURE orbits */
};

/* ---- Vertices ---- */

/* Computes the parts of Philox that depend only on the vertex, and stores them in arc->stir.
 *
 * Philox works in 64-bit lanes with one counter word in the low half of each, because the widening
 * multiplication reads only that half. A vector holds LANES / 2 vertices, so LANES vertices take two vectors:
 * `half` 0 has the even vertices, `half` 1 the odd ones.
 *
 * In the counter (vertex, pair, 0, slot) only the second word depends on the pair. Half of the work of the
 * first three rounds therefore depends only on the vertex. With m = M0 vertex, n = M1 (high(m) ^ slot ^ k1 of
 * round 1), and k0 and k1 as the key words of each round:
 *
 *     round 1 gives  (pair ^ k0,  0,  high(m) ^ slot ^ k1,  low(m))
 *     round 2        (high(n) ^ k0,  low(n),  high(M0 (pair ^ k0)) ^ low(m) ^ k1,  low(M0 (pair ^ k0)))
 *
 * Round 3 multiplies the first word of round 2 by M0. stir[1] stores this product. The halves of stir[0]
 * store low(m) and low(n). */
static void begin(struct omp_arc *arc)
{
    const struct philox_key *keys = arc->keys;
    const vint m0 = v_set64(PHILOX_M0), m1 = v_set64(PHILOX_M1), polygon = v_set(arc->vertices);
    for (uint32_t i = 0; i <= arc->count; i += LANES) {
        vint number = v_add(v_count(), v_set(arc->first + i));
        number = v_min_unsigned(number, v_sub(number, polygon)); /* wraps after the last vertex */
        for (uint32_t half = 0; half < 2; half++) {
            vint vertex = half ? v_high(number) : number;
            vint m = v_multiply_wide(vertex, m0);
            vint n = v_multiply_wide(v_xor(v_high(m), v_set(keys[0].word[1] ^ arc->slot)), m1);
            vint product = v_multiply_wide(v_xor(v_high(n), v_set(keys[1].word[0])), m0);
            v_store(arc->stir[0] + i + half * (LANES / 2), v_lows(m, n));
            v_store(arc->stir[1] + i + half * (LANES / 2), product);
        }
    }
}

/* Computes the four random words of LANES / 2 vertices from the values that begin() stored. `high` and `low`
 * are the halves of M0 (pair ^ k0 of round 1), already combined with the keys of rounds 2 and 3. */
static inline void philox_words(const struct philox_key *keys, vint stirred, vint product, vint high,
                                vint low, vint word[4])
{
    const vint m0 = v_set64(PHILOX_M0), m1 = v_set64(PHILOX_M1);
    vint product1 = v_multiply_wide(v_xor(stirred, high), m1);
    word[0] = v_high(v_xor3(product1, stirred, v_set(keys[2].word[0])));
    word[1] = product1;
    word[2] = v_xor(v_high(product), low);
    word[3] = product;
    for (int round = 3; round < PHILOX_ROUNDS; round++) {
        vint product0 = v_multiply_wide(word[0], m0);
        product1 = v_multiply_wide(word[2], m1);
        word[0] = v_xor3(v_high(product1), word[1], v_set(keys[round].word[0]));
        word[1] = product1;
        word[2] = v_xor3(v_high(product0), word[3], v_set(keys[round].word[1]));
        word[3] = product0;
    }
}

/* Computes noise_of_draw() for random words in the low halves of 64-bit lanes. Scales t by 2^24, the
 * gradients by 2^-24 and the polynomial of the fade curve by 2^-72. */
static inline vreal noise_of_draws(const struct omp_tables *tables, vint even, vint odd)
{
    const vint range = v_set64(NOISE_RANGE);
    vint place_even = v_multiply_wide(even, range), place_odd = v_multiply_wide(odd, range);
    vreal left, right;
    v_gradients(tables, v_highs(place_even, place_odd), &left, &right);
    vreal t = v_real(v_right(v_lows(place_even, place_odd), 8));
    vreal polynomial =
        v_fma(v_fma(t, v_real_set(6 * 0x1p-120f), v_real_set(-15 * 0x1p-96f)), t, v_real_set(10 * 0x1p-72f));
    vreal fade = v_real_mul(v_real_mul(v_real_mul(t, t), t), polynomial);
    vreal from_left = v_real_mul(left, t);
    vreal rise = v_fms(right, v_real_sub(t, v_real_set(0x1p24f)), from_left);
    return v_fma(fade, rise, from_left);
}

/* Moves vertices i .. i + LANES - 1 by two orbits, given their random words. */
static inline void move(const struct omp_arc *arc, uint32_t i, vint words[2][4])
{
    const struct omp_tables *tables = arc->tables;
    const vreal p = v_real_set(arc->p);
    vreal x = v_real_load(arc->x + i), y = v_real_load(arc->y + i);
    vreal cosine = v_real_load(arc->cosine + i), sine = v_real_load(arc->sine + i);
    vreal step = v_real_load(arc->advance + i);
    for (int parity = 0; parity < 2; parity++) {
        vreal noise_x = noise_of_draws(tables, words[0][2 * parity], words[1][2 * parity]);
        vreal noise_y = noise_of_draws(tables, words[0][2 * parity + 1], words[1][2 * parity + 1]);
        x = v_fma(cosine, v_fnma(p, noise_x, step), x);
        y = v_fma(sine, v_fnma(p, noise_y, step), y);
        v_store(arc->column[parity] + i, v_truncate(x));
        v_store(arc->row[parity] + i, v_truncate(y));
    }
    v_real_store(arc->x + i, x);
    v_real_store(arc->y + i, y);
}

/* Computes one mask per border of the image. Vertex i + lane is in the mask if it is beyond this border and
 * cannot return within `orbits_left` orbits, whatever the noise. The margins of 1 % cover the rounding of
 * ORBITS_SURE steps. */
static inline void gone(const struct omp_arc *arc, uint32_t i, uint32_t orbits_left, uint32_t masks[BORDERS])
{
    const float res = (float)arc->res;
    const vreal left = v_real_set(1.01f * (float)orbits_left), zero = v_real_set(0);
    const vreal begin = v_real_set(-0.01f * res - 2), end = v_real_set(1.01f * res + 2);
    vreal advance = v_real_load(arc->advance + i);
    vreal step0 = v_real_sub(advance, v_real_set(arc->noise_bounds[0]));
    vreal step1 = v_real_sub(advance, v_real_set(arc->noise_bounds[1]));
    for (int axis = 0; axis < 2; axis++) {
        vreal direction = v_real_load((axis ? arc->sine : arc->cosine) + i);
        vreal place = v_real_load((axis ? arc->y : arc->x) + i);
        vreal a = v_real_mul(direction, step0), b = v_real_mul(direction, step1);
        masks[2 * axis] = v_real_less(v_fma(left, v_real_max(v_real_max(a, b), zero), place), begin);
        masks[2 * axis + 1] = v_real_less(end, v_fma(left, v_real_min(v_real_min(a, b), zero), place));
    }
}

/* Lists the vectors of lines that may still become visible, and the vectors of vertices that must be moved
 * for them. A vector of lines is culled if all ends of its lines are beyond the same border and cannot
 * return. */
static void cull(struct omp_arc *arc, uint32_t orbits_left)
{
    const uint32_t all = (1u << LANES) - 1;
    uint32_t next[BORDERS] = {1, 1, 1, 1}, masks[BORDERS]; /* `next`: masks of the next vector */
    bool next_traced = false;
    arc->traced_count = arc->moved_count = 0;
    for (uint32_t left = arc->count / LANES + 1; left > 0; left--) {
        uint32_t i = (left - 1) * LANES, ends = arc->count - i < LANES ? (2u << (arc->count - i)) - 1 : all;
        bool hidden = i == arc->count;
        gone(arc, i, orbits_left, masks);
        for (int border = 0; border < BORDERS; border++) {
            hidden |= orbits_left <= ORBITS_SURE && (masks[border] & ends) == ends && (next[border] & 1);
            next[border] = masks[border];
        }
        if (!hidden)
            arc->traced[arc->traced_count++] = i;
        if (i + LANES <= arc->count && (!hidden || next_traced))
            arc->moved[arc->moved_count++] = i + LANES;
        next_traced = !hidden;
    }
    if (next_traced)
        arc->moved[arc->moved_count++] = 0;
}

/* Moves the vertices by orbits 2 * pair and 2 * pair + 1. Generates the random words of several vectors
 * before using them. Each of the two inner loops is then so small that two iterations overlap in the core,
 * which hides the latency of the multiplications. */
static void advance(struct omp_arc *arc, uint32_t pair)
{
    enum { GROUP = 4, CULL_PAIRS = 8 };
    const struct philox_key *keys = arc->keys;
    const uint64_t shared = (uint64_t)PHILOX_M0 * (pair ^ keys[0].word[0]);
    const vint high = v_set((uint32_t)(shared >> 32) ^ keys[1].word[1]);
    const vint low = v_set((uint32_t)shared ^ keys[2].word[1]);
    vint words[GROUP][2][4];
    if (pair % CULL_PAIRS == 0)
        cull(arc, arc->orbits - 2 * pair);
    for (uint32_t begin_g = 0; begin_g < arc->moved_count; begin_g += GROUP) {
        const uint32_t *moved = arc->moved + begin_g;
        uint32_t count = arc->moved_count - begin_g < GROUP ? arc->moved_count - begin_g : GROUP;
        for (uint32_t g = 0; g < count; g++)
            for (uint32_t half = 0; half < 2; half++)
                philox_words(keys, v_load(arc->stir[0] + moved[g] + half * (LANES / 2)),
                             v_load(arc->stir[1] + moved[g] + half * (LANES / 2)), high, low, words[g][half]);
        for (uint32_t g = 0; g < count; g++)
            move(arc, moved[g], words[g]);
    }
}

/* ---- Lines ---- */

/* After s steps along the major axis, a line has made m = floor((2 minor s + major) / (2 major)) steps along
 * the minor axis. In 16.16 fixed point, m is the upper half of slope s + bias. The slope is 2^16 minor /
 * major and the bias is 2^16 (1/2 + 1 / (4 major)). Both are computed in float32, and the sum is truncated to
 * an integer.
 *
 * This is exact for major <= OMP_MAJOR_MAX. Before the floor, the true value is a multiple of 1 / (2 major).
 * The bias places the computed value 1 / (4 major) above the true value. The rounding errors of the
 * reciprocal, the slope, the bias and the sum add up to less than (3 major + 2) 2^-24. Up to major = 1181,
 * this is less than 1 / (4 major). */

#define BLOCK 256 /* lines processed at a time; their data fit in the L1 cache */

/* The lines of a block, and lists of the lines to walk. */
struct lines {
    int32_t pixel[BLOCK];  /* address of the first pixel: y * pitch + x */
    int32_t step[BLOCK];   /* result of omp_pack_step(), in pixels */
    int32_t length[BLOCK]; /* in pixels */
    int32_t shape[BLOCK];  /* for short lines: index in tables->patterns, OMP_SHORT * major + minor */
    float slope[BLOCK], bias[BLOCK]; /* for longer lines */

    /* Lists of lines. Lines that need no bounds tests are in four lists by length: up to 8, 16 or OMP_SHORT
     * pixels, and longer. `crossing` has the lines that need bounds tests, and the lines that are too long
     * for vectors. */
    uint8_t up_to_8[BLOCK + LANES], up_to_16[BLOCK + LANES], up_to_32[BLOCK + LANES], longer[BLOCK + LANES],
        crossing[BLOCK + LANES];
    uint32_t up_to_8_count, up_to_16_count, up_to_32_count, longer_count, crossing_count;
};

/* A list of pixels to paint. A longer list would take more cache; a shorter one would be flushed more often,
 * each time with a mispredicted branch. */
struct pixels {
    int32_t list[BLOCK * OMP_SHORT + OMP_SHORT];
    size_t count;
};

/* Scratch memory of trace(): too large for some thread stacks. */
struct room {
    struct lines lines;
    struct pixels pixels;
};

static void flush(struct pixels *pixels, const struct omp_pen *pen)
{
    pen->paint(pen, pixels->list, pixels->count);
    pixels->count = 0;
}

/* Reserves space for `count` pixels, and for OMP_SHORT more, because stores of whole vectors may write beyond
 * the last pixel. */
static inline int32_t *reserve(struct pixels *pixels, size_t count, const struct omp_pen *pen)
{
    if (pixels->count + count + OMP_SHORT > COUNT_OF(pixels->list))
        flush(pixels, pen);
    return pixels->list + pixels->count;
}

/* Returns the mask of possibly visible lines. Some formulas drop lines with both ends outside the image.
 * Others draw them, but a line with both ends beyond the same border is invisible. */
static inline uint32_t visible(const struct line_rules *rules, vint x0, vint y0, vint x1, vint y1, vint last)
{
    if (!rules->outside)
        return v_inside(x0, y0, last) | v_inside(x1, y1, last);
    return ~v_signs(v_or(v_or3(v_and(x0, x1), v_and(y0, y1), v_and(v_sub(last, x0), v_sub(last, x1))),
                         v_and(v_sub(last, y0), v_sub(last, y1))));
}

/* For each lane in `mask`, appends one byte, whose value is `at` + lane, to `list`. Returns the number of
 * bytes appended, but writes LANES bytes. */
static inline uint32_t append(const struct omp_tables *tables, uint8_t *list, uint32_t mask, uint32_t at)
{
    v_compress_lanes(tables, list, mask, at);
    return (uint32_t)__builtin_popcount(mask);
}

_Static_assert(OMP_SHORT == 32 && OMP_GUARD >= OMP_SHORT,
               "lines of up to 32 pixels are walked without a bounds test");

/* `traced` has the first vertex of each of `vectors` vectors. Sets up the lines that begin at the vertices of
 * these vectors, and adds the possibly visible lines to the lists. The ends of a visible line are at most its
 * length away from the image, so short lines stay within the guard. Not inlined, because the function already
 * uses all registers. */
static __attribute__((noinline)) void set_up(const struct omp_arc *arc, const int32_t *column,
                                             const int32_t *row, const uint32_t *traced, uint32_t vectors,
                                             struct lines *lines)
{
    const struct omp_tables *tables = arc->tables;
    const struct line_rules *rules = arc->rules;
    const uint32_t count = arc->count;
    const int32_t ends = (int32_t)rules->ends; /* 1 if the end point is painted */
    const vint last = v_set(arc->res - 1), pitch = v_set(arc->pitch);
    uint32_t n8 = 0, n16 = 0, n32 = 0, longer = 0, crossings = 0;
    for (uint32_t g = 0; g < vectors; g++) {
        uint32_t at = g * LANES, i = traced[g];
        uint32_t valid = count - i < LANES ? (1u << (count - i)) - 1 : (1u << LANES) - 1;
        vint x0 = v_load(column + i), y0 = v_load(row + i), x1 = v_load(column + i + 1),
             y1 = v_load(row + i + 1);
        uint32_t seen = valid & visible(rules, x0, y0, x1, y1, last);
        if (!seen)
            continue;
        vint dx = v_sub(x1, x0), dy = v_sub(y1, y0), width = v_abs(dx), height = v_abs(dy);
        vint major = v_max(width, height), minor = v_min(width, height);
        vint steep = v_sub(v_sub(width, height), v_set(1)); /* negative if height >= width */
        vint octant = v_or3(v_right(dx, 31), v_and(v_right(dy, 30), v_set(OCTANT_UP)),
                            v_and(v_right(steep, 29), v_set(OCTANT_STEEP)));
        v_store(lines->pixel + at, v_add(v_multiply(y0, pitch), x0));
        v_store(lines->step + at, v_octant(tables->step_pixel, octant));
        v_store(lines->length + at, v_add(major, v_set(ends)));
        v_store(lines->shape + at, v_add(v_left(major, OMP_SHORT_BITS), minor));

        uint32_t over_8 = v_greater(major, v_set(8 - ends)), over_16 = v_greater(major, v_set(16 - ends));
        uint32_t over_32 = seen & v_greater(major, v_set(32 - ends));
        n8 += append(tables, lines->up_to_8 + n8, seen & ~over_8, at);
        n16 += append(tables, lines->up_to_16 + n16, seen & over_8 & ~over_16, at);
        n32 += append(tables, lines->up_to_32 + n32, seen & over_16 & ~over_32, at);
        if (over_32) {
            uint32_t inside =
                v_inside(x0, y0, last) & v_inside(x1, y1, last) & ~v_greater(major, v_set(OMP_MAJOR_MAX));
            longer += append(tables, lines->longer + longer, over_32 & inside, at);
            crossings += append(tables, lines->crossing + crossings, over_32 & ~inside, at);
        }
    }
    lines->up_to_8_count = n8;
    lines->up_to_16_count = n16;
    lines->up_to_32_count = n32;
    lines->longer_count = longer;
    lines->crossing_count = crossings;
}

/* Walks lines of at most `most` pixels (8, 16 or OMP_SHORT) with the table of patterns. Writes `most` pixels
 * per line; the pixels beyond the end of a line are overwritten by the next line. */
static inline void walk_short(const struct omp_tables *tables, const struct lines *lines,
                              const uint8_t *numbers, uint32_t count, uint32_t most, struct pixels *pixels,
                              const struct omp_pen *pen)
{
    int32_t *list = reserve(pixels, (size_t)count * most, pen);
    for (uint32_t j = 0; j < count; j++) {
        uint32_t i = numbers[j];
        const int32_t *steps = tables->patterns[lines->shape[i]];
        if (most == 8)
            v8_store(list, v8_add(v8_multiply_add(v8_load(steps), v8_set(lines->step[i])),
                                  v8_set(lines->pixel[i])));
        else
            for (uint32_t s = 0; s < most; s += LANES)
                v_store(list + s, v_add(v_multiply_add(v_load(steps + s), v_set(lines->step[i])),
                                        v_set(lines->pixel[i])));
        list += lines->length[i];
    }
    pixels->count = (size_t)(list - pixels->list);
}

/* Computes the slope and bias of a line. */
static inline void incline(int32_t major, int32_t minor, float *slope, float *bias)
{
    float reciprocal = 0x1p16f / (float)(major > 0 ? major : 1);
    *slope = (float)minor * reciprocal;
    *bias = 0.25f * reciprocal + 0x1p15f;
}

/* Returns s | m << 16 for LANES steps s of a line; m is the number of minor steps after s major steps. */
static inline vint steps_of(float slope, float bias, vint s, vreal s_real)
{
    vint fixed = v_truncate(v_fma(s_real, v_real_set(slope), v_real_set(bias)));
    return v_or(v_and(fixed, v_set(0xFFFF0000u)), s);
}

/* Walks longer lines in passes: each pass takes the next LANES pixels of every unfinished line. */
static inline void walk_longer(const struct omp_arc *arc, struct lines *lines, uint32_t count,
                               struct pixels *pixels, const struct omp_pen *pen)
{
    for (uint32_t j = 0; j < count; j++) {
        uint32_t i = lines->longer[j];
        int32_t major = lines->length[i] - (int32_t)arc->rules->ends;
        incline(major, lines->shape[i] - OMP_SHORT * major, &lines->slope[i], &lines->bias[i]);
    }
    for (int32_t begin_s = 0; count > 0; begin_s += LANES) {
        const vint s = v_add(v_count(), v_set(begin_s));
        const vreal s_real = v_real(s);
        uint32_t going_on = 0;
        int32_t *list = reserve(pixels, (size_t)count * LANES, pen);
        for (uint32_t j = 0; j < count; j++) {
            uint32_t i = lines->longer[j];
            int32_t more = lines->length[i] - begin_s - LANES; /* pixels left after this pass, if positive */
            vint walked = steps_of(lines->slope[i], lines->bias[i], s, s_real);
            v_store(list, v_add(v_multiply_add(walked, v_set(lines->step[i])), v_set(lines->pixel[i])));
            list += LANES + (more < 0 ? more : 0);
            lines->longer[going_on] = (uint8_t)i;
            going_on += more > 0;
        }
        count = going_on;
        pixels->count = (size_t)(list - pixels->list);
    }
}

/* Walks the pixels inside the image of a line whose data have index i in `lines`. Such a line is longer than
 * OMP_SHORT pixels, and at least one of its ends is outside the image, or it is too long for vectors. */
static inline void walk_crossing(const struct omp_arc *arc, const struct line *line,
                                 const struct lines *lines, uint32_t i, struct pixels *pixels,
                                 const struct omp_pen *pen)
{
    if (line->major > OMP_MAJOR_MAX) {
        omp_trace_line(arc, *line, pen);
        return;
    }
    const struct omp_span span = omp_clip(line, (int32_t)arc->res);
    if (span.first >= span.end)
        return;
    const int32_t count = (int32_t)(span.end - span.first);
    const vint pixel = v_set(lines->pixel[i]), step = v_set(lines->step[i]);
    int32_t *list = reserve(pixels, (size_t)count, pen);
    float slope, bias;
    incline(line->major, line->minor, &slope, &bias);
    for (int32_t done = 0; done < count; done += LANES) {
        vint s = v_add(v_count(), v_set((int32_t)span.first + done));
        v_store(list + done, v_add(v_multiply_add(steps_of(slope, bias, s, v_real(s)), step), pixel));
    }
    pixels->count += (size_t)count;
}

static void trace(const struct omp_arc *arc, int parity, const struct omp_pen *pen)
{
    const int32_t *column = arc->column[parity], *row = arc->row[parity];
    struct lines *lines = &((struct room *)arc->room)->lines;
    struct pixels *pixels = &((struct room *)arc->room)->pixels;
    pixels->count = 0;
    for (uint32_t g = 0; g < arc->traced_count; g += BLOCK / LANES) {
        const uint32_t *traced = arc->traced + g;
        uint32_t left = arc->traced_count - g;
        set_up(arc, column, row, traced, left < BLOCK / LANES ? left : BLOCK / LANES, lines);
        walk_short(arc->tables, lines, lines->up_to_8, lines->up_to_8_count, 8, pixels, pen);
        walk_short(arc->tables, lines, lines->up_to_16, lines->up_to_16_count, 16, pixels, pen);
        walk_short(arc->tables, lines, lines->up_to_32, lines->up_to_32_count, 32, pixels, pen);
        walk_longer(arc, lines, lines->longer_count, pixels, pen);
        for (uint32_t j = 0; j < lines->crossing_count; j++) {
            uint32_t at = lines->crossing[j], i = traced[at / LANES] + at % LANES;
            const struct line line = line_begin(arc->rules, column[i], row[i], column[i + 1], row[i + 1]);
            walk_crossing(arc, &line, lines, at, pixels, pen);
        }
    }
    flush(pixels, pen);
}

/* ---- Patches ---- */

/* Computes the masks of LANES / 2 blocks: 16 bits each, those of the even 128-bit lanes of the result in
 * `masks[0]` and of the odd ones in `masks[1]`. Blocks are in 64-bit lanes in the order 0, N, 1, N + 1, ...
 * with N = LANES / 4, so each vector has the masks of consecutive blocks. */
static inline void mask_vectors(const struct philox_key *keys, vint block, vint masks[2])
{
    const vint m0 = v_set64(PHILOX_M0), m1 = v_set64(PHILOX_M1);
    vint word[4] = {block, v_set(0), v_set64(IFS_STREAM_MASK), v_set(0)};
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        vint product0 = v_multiply_wide(word[0], m0), product1 = v_multiply_wide(word[2], m1);
        word[0] = v_xor3(v_high(product1), word[1], v_set(keys[round].word[0]));
        word[1] = product1;
        word[2] = v_xor3(v_high(product0), word[3], v_set(keys[round].word[1]));
        word[3] = product0;
    }
    const vint first = v_lows(word[0], word[1]), second = v_lows(word[2], word[3]);
    const vint factor = V(set1_epi16)(511), one = V(set1_epi16)(1);
    masks[0] = V(add_epi16)(V(mulhi_epu16)(V(unpacklo_epi64)(first, second), factor), one);
    masks[1] = V(add_epi16)(V(mulhi_epu16)(V(unpackhi_epi64)(first, second), factor), one);
}

static void masks(const struct philox_key keys[PHILOX_ROUNDS], uint32_t first, uint32_t count, uint8_t *low,
                  uint8_t *high)
{
    for (uint32_t done = 0; done < count; done += LANES / 2, low += 4 * LANES, high += 4 * LANES) {
        const vint begin = v_set64(first + done);
        vint mask[2];
#if LANES == 8
        const vint bytes = _mm256_set1_epi16(255);
        mask_vectors(keys, _mm256_add_epi64(begin, _mm256_set_epi64x(3, 1, 2, 0)), mask);
        v_store(low, _mm256_permute4x64_epi64(
                         _mm256_packus_epi16(v_and(mask[0], bytes), v_and(mask[1], bytes)), 0xD8));
        v_store(high,
                _mm256_permute4x64_epi64(
                    _mm256_packus_epi16(_mm256_srli_epi16(mask[0], 8), _mm256_srli_epi16(mask[1], 8)), 0xD8));
#else
        mask_vectors(keys, _mm512_add_epi64(begin, _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0)), mask);
        for (int half = 0; half < 2; half++) {
            v8_store(low + 2 * LANES * half, _mm512_cvtepi16_epi8(mask[half]));
            v8_store(high + 2 * LANES * half, _mm512_cvtepi16_epi8(_mm512_srli_epi16(mask[half], 8)));
        }
#endif
    }
}

/* Computes 4 * LANES pixels from pixel x on. Collects the low byte of each owner's mask, selects its bit, and
 * adds bit 8. */
static inline vint patch_vector(const struct omp_patch_row *row, uint32_t x)
{
    const vint gray = V(set1_epi8)(IFS_GRAY);
    vint masks = v_set(0);
#if LANES == 8
    const vint pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(row->owners + x / 2)));
    const vint owners = v_and(v_or(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
    const vint bits =
        _mm256_broadcastsi128_si256(_mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, -128, 64, 32, 16, 8, 4, 2, 1));
#define TAKE(o)                                                               \
    masks = v_or(masks, v_and(_mm256_cmpeq_epi8(owners, _mm256_set1_epi8(o)), \
                              v_load(row->low[(8 - (o)) / 3] + x - 1 - (ptrdiff_t)((8 - (o)) % 3))))
#else
    const vint pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(row->owners + x / 2)));
    const vint owners = v_and(v_or(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(15));
    const vint bits =
        _mm512_broadcast_i32x4(_mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, -128, 64, 32, 16, 8, 4, 2, 1));
#define TAKE(o)                                                                                \
    masks = _mm512_mask_loadu_epi8(masks, _mm512_cmpeq_epi8_mask(owners, _mm512_set1_epi8(o)), \
                                   row->low[(8 - (o)) / 3] + x - 1 - (ptrdiff_t)((8 - (o)) % 3))
#endif
    TAKE(0);
    TAKE(1);
    TAKE(2);
    TAKE(3);
    TAKE(4);
    TAKE(5);
    TAKE(6);
    TAKE(7);
#undef TAKE
    const vint chosen = v_and(masks, V(shuffle_epi8)(bits, owners));
    const vint bit8 = v_load(row->high + x - 1);
#if LANES == 8
    const vint lit8 =
        v_and(_mm256_cmpeq_epi8(owners, _mm256_set1_epi8(8)), _mm256_cmpgt_epi8(bit8, v_set(0)));
    return v_and(v_or(lit8, _mm256_xor_si256(_mm256_cmpeq_epi8(chosen, v_set(0)), _mm256_set1_epi8(-1))),
                 gray);
#else
    const __mmask64 lit8 =
        _mm512_mask_test_epi8_mask(_mm512_cmpeq_epi8_mask(owners, _mm512_set1_epi8(8)), bit8, bit8);
    return _mm512_maskz_mov_epi8(lit8 | _mm512_test_epi8_mask(chosen, chosen), gray);
#endif
}

static void patches(const struct omp_patch_row *row, uint32_t begin, uint32_t end)
{
    for (uint32_t x = begin / OMP_ROW_PIXELS * OMP_ROW_PIXELS; x < end; x += 4 * LANES)
        v_store(row->pixels + x, patch_vector(row, x));
}

const struct omp_kernel
#if LANES == 8
    omp_kernel_avx2
#else
    omp_kernel_avx512
#endif
    = {.room_bytes = sizeof(struct room),
       .begin = begin,
       .advance = advance,
       .trace = trace,
       .masks = masks,
       .patches = patches};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
