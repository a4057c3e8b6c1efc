/* The vector kernels of `train-omp`. The Makefile compiles this file once per instruction set: with LANES=4
 * for any machine, where the compiler maps vectors of 4 floats to available instructions, with LANES=8 for
 * AVX2 and FMA, and with LANES=16 for AVX-512 F, BW, DQ and VL. */
#if LANES == 4 || defined(__x86_64__)
#if LANES > 4
#include <immintrin.h>
#endif

#if LANES == 8 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#elif LANES == 8
#pragma GCC target("avx2,fma")
#elif LANES == 16 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#elif LANES == 16
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "data/random_draws.h"
#include "omp_kernel.h"

/* ---- Vectors ---- */

#if LANES == 4
#define PANEL_MAX  2
#define SPREAD_MAX 6
typedef float vreal __attribute__((vector_size(16)));
typedef int32_t vint __attribute__((vector_size(16)));

static inline vreal v_load(const float *p)
{
    vreal a;
    memcpy(&a, p, sizeof a);
    return a;
}

static inline void v_store(float *p, vreal a)
{
    memcpy(p, &a, sizeof a);
}

static inline void v_store_whole(uint32_t *p, vint a)
{
    memcpy(p, &a, sizeof a);
}

/* Selects a where the mask is all ones, and b where it is zero. */
static inline vreal v_choose(vint mask, vreal a, vreal b)
{
    return (vreal)((mask & (vint)a) | (~mask & (vint)b));
}

#define v_set(x)        ((vreal){x, x, x, x})
#define v_whole(n)      ((vint){n, n, n, n})
#define v_fma(a, b, c)  ((a) * (b) + (c))
#define v_relu(a)       v_choose((a) <= 0, v_set(0), a)
#define v_greater(a, b) (((a) > (b)) | ((a) != (a)))
#elif LANES == 8
#define PANEL_MAX           2 /* takes 15 of 16 registers: 6 x 2 sums, 2 vectors of b, 1 factor */
#define SPREAD_MAX          6 /* takes 13 registers: 6 sums, 6 weights, 1 factor */
typedef __m256 vreal;
typedef __m256i vint;

#define v_load(p)           _mm256_loadu_ps(p)
#define v_store(p, a)       _mm256_storeu_ps(p, a)
#define v_set(x)            _mm256_set1_ps(x)
#define v_fma(a, b, c)      _mm256_fmadd_ps(a, b, c)
/* _mm256_max_ps() returns its second operand if either operand is NaN, so v_relu() keeps NaN. */
#define v_relu(a)           _mm256_max_ps(_mm256_setzero_ps(), a)
#define v_whole(n)          _mm256_set1_epi32(n)
#define v_store_whole(p, a) _mm256_storeu_si256((__m256i *)(p), a)
#define v_greater(a, b) \
    _mm256_castps_si256(_mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), _mm256_cmp_ps(a, a, _CMP_UNORD_Q)))
#define v_choose(mask, a, b) _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask))
#else
#define PANEL_MAX           4 /* takes 29 of 32 registers: 6 x 4 sums, 4 vectors of b, 1 factor */
#define SPREAD_MAX          9 /* takes 19 registers: 9 sums, 9 weights, 1 factor */
typedef __m512 vreal;
typedef __m512i vint;

#define v_load(p)           _mm512_loadu_ps(p)
#define v_store(p, a)       _mm512_storeu_ps(p, a)
#define v_set(x)            _mm512_set1_ps(x)
#define v_fma(a, b, c)      _mm512_fmadd_ps(a, b, c)
/* _mm512_max_ps() returns its second operand if either operand is NaN, so v_relu() keeps NaN. */
#define v_relu(a)           _mm512_max_ps(_mm512_setzero_ps(), a)
#define v_whole(n)          _mm512_set1_epi32(n)
#define v_store_whole(p, a) _mm512_storeu_si512(p, a)
#define v_greater(a, b) \
    _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q))
#define v_choose(mask, a, b) _mm512_mask_blend_ps(_mm512_movepi32_mask(mask), b, a)
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- GEMM ----
 *
 * A tile of c, ROWS rows of PANEL vectors, stays in registers during the loop over s. Each step loads PANEL
 * vectors of b and broadcasts ROWS elements of a, for ROWS * PANEL multiply-adds. Panels of b are split every
 * STEPS steps. A part of a panel (at most 36 KB) therefore stays in an L1 cache of 48 KB while one column of
 * tiles uses it. */

#define ROWS_MAX 8
#define STEPS    144

INLINE void tile(const struct gemm *gemm, size_t row, size_t column, size_t begin, size_t end, const int ROWS,
                 const int PANEL)
{
    const size_t rows = least(gemm->row_count - row, (size_t)ROWS);
    const bool first = begin == 0, last = end == gemm->step_count;
    const float *a[ROWS_MAX];
    vreal sum[ROWS_MAX][PANEL_MAX];
    float *c = gemm->c + row * gemm->c_pitch + column;
    UNROLL for (int r = 0; r < ROWS; r++)
    {
        size_t at = least((size_t)r, rows - 1); /* rows past the end repeat the last row */
        a[r] = gemm->a + gemm->rows[row + at];
        UNROLL for (int v = 0; v < PANEL; v++)
        {
            if (!first || gemm->add)
                sum[r][v] = v_load(c + at * gemm->c_pitch + v * LANES);
            else
                sum[r][v] = gemm->bias ? v_load(gemm->bias + column + v * LANES) : v_set(0);
        }
    }
    const float *b = gemm->b + begin * gemm->b_pitch + column;
    for (size_t s = begin; s < end; s++, b += gemm->b_pitch) {
        size_t step = gemm->steps[s];
        vreal panel[PANEL_MAX];
        UNROLL for (int v = 0; v < PANEL; v++) panel[v] = v_load(b + v * LANES);
        UNROLL for (int r = 0; r < ROWS; r++)
        {
            vreal factor = v_set(a[r][step]);
            UNROLL for (int v = 0; v < PANEL; v++) sum[r][v] = v_fma(factor, panel[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
    {
        if ((size_t)r < rows)
            UNROLL for (int v = 0; v < PANEL; v++)
                v_store(c + (size_t)r * gemm->c_pitch + v * LANES,
                        last && gemm->relu ? v_relu(sum[r][v]) : sum[r][v]);
    }
}

typedef void tile_function(const struct gemm *gemm, size_t row, size_t column, size_t begin, size_t end);
#define TILE(name, rows, panel)                                                                    \
    static void name(const struct gemm *gemm, size_t row, size_t column, size_t begin, size_t end) \
    {                                                                                              \
        tile(gemm, row, column, begin, end, rows, panel);                                          \
    }

/* tile_of[wide][n - 1] computes tiles of n vectors. `wide` is 1 if c has at least PANEL_MAX vectors per row;
 * a tile then has ROWS_WIDE rows. Otherwise a tile has ROWS_NARROW rows. */
#define ROWS_WIDE   6
#define ROWS_NARROW 8
TILE(wide_1, ROWS_WIDE, 1)
TILE(wide_2, ROWS_WIDE, 2)
TILE(narrow_1, ROWS_NARROW, 1)
#if PANEL_MAX == 4
TILE(wide_3, ROWS_WIDE, 3)
TILE(wide_4, ROWS_WIDE, 4)
TILE(narrow_2, ROWS_NARROW, 2)
TILE(narrow_3, ROWS_NARROW, 3)
static tile_function *const tile_of[2][PANEL_MAX] = {{narrow_1, narrow_2, narrow_3},
                                                     {wide_1, wide_2, wide_3, wide_4}};
#else
static tile_function *const tile_of[2][PANEL_MAX] = {{narrow_1}, {wide_1, wide_2}};
#endif

/* Returns the width of c in vectors. */
static size_t columns_of(const struct gemm *gemm)
{
    return gemm->columns / LANES;
}

static size_t tile_rows(const struct gemm *gemm)
{
    return columns_of(gemm) >= PANEL_MAX ? ROWS_WIDE : ROWS_NARROW;
}

static size_t tiles_down(const struct gemm *gemm)
{
    return (gemm->row_count + tile_rows(gemm) - 1) / tile_rows(gemm);
}

static size_t tiles(const struct gemm *gemm)
{
    return tiles_down(gemm) * ((columns_of(gemm) + PANEL_MAX - 1) / PANEL_MAX);
}

/* Tiles are numbered down the first panel, then down the next one. */
static void multiply(const struct gemm *gemm, size_t first, size_t count)
{
    const size_t down = tiles_down(gemm), rows = tile_rows(gemm), end = first + count;
    while (first < end) {
        size_t panel = first / down * PANEL_MAX, begin = first % down;
        size_t stop = least(down, begin + end - first);
        tile_function *run =
            tile_of[columns_of(gemm) >= PANEL_MAX][least(columns_of(gemm) - panel, PANEL_MAX) - 1];
        for (size_t s = 0; s < gemm->step_count; s += STEPS)
            for (size_t t = begin; t < stop; t++)
                run(gemm, t * rows, panel * LANES, s, least(s + STEPS, gemm->step_count));
        first += stop - begin;
    }
}

/* ---- Max-pooling ---- */

/* The inputs along each axis, begin <= i < end, in a window of the pooling. */
struct window {
    size_t begin[MODEL_AXES], end[MODEL_AXES];
};

static void find_window(const struct pool *pool, const uint32_t *at, struct window *window)
{
    const uint32_t lengths[MODEL_AXES] = {pool->in.depth, pool->in.height, pool->in.width};
    for (int axis = 0; axis < MODEL_AXES; axis++) {
        const size_t first = (size_t)at[axis] * pool->stride[axis], before = pool->padding[axis];
        window->begin[axis] = first > before ? first - before : 0;
        window->end[axis] = least(first + pool->kernel[axis] - before, lengths[axis]);
    }
}

/* Pools one window for all channels. Selects the first of equal values. A NaN takes precedence over any
 * number. */
static void pool_window(const struct pool *pool, const struct window *window, const float *in, float *out,
                        uint32_t *positions)
{
    const size_t corner =
        (window->begin[0] * pool->in.height + window->begin[1]) * pool->in.width + window->begin[2];
    for (size_t i = 0; i < pool->pitch; i += LANES) {
        vreal best = v_load(in + corner * pool->pitch + i);
        vint where = v_whole((int32_t)corner);
        for (size_t t = window->begin[0]; t < window->end[0]; t++)
            for (size_t y = window->begin[1]; y < window->end[1]; y++)
                for (size_t x = window->begin[2]; x < window->end[2]; x++) {
                    const size_t position = (t * pool->in.height + y) * pool->in.width + x;
                    vreal value = v_load(in + position * pool->pitch + i);
                    vint better = v_greater(value, best);
                    best = v_choose(better, value, best);
                    where = (vint)v_choose(better, (vreal)v_whole((int32_t)position), (vreal)where);
                }
        v_store(out + i, best);
        v_store_whole(positions + i, where);
    }
}

static void pool(const struct pool *pool, const float *in, float *out, uint32_t *positions)
{
    uint32_t at[MODEL_AXES];
    for (at[0] = 0; at[0] < pool->out.depth; at[0]++)
        for (at[1] = 0; at[1] < pool->out.height; at[1]++)
            for (at[2] = 0; at[2] < pool->out.width; at[2]++) {
                struct window window;
                find_window(pool, at, &window);
                pool_window(pool, &window, in, out, positions);
                out += pool->pitch;
                positions += pool->pitch;
            }
}

/* ---- Backward through a convolution and its max-pooling ----
 *
 * A group of vectors of the weights and of their gradient stays in registers during the loop over the
 * list. */

INLINE void spread_group(const struct argmax_list *argmax, const uint32_t *runs, const float *in,
                         float *weight_delta, const float *weight, float *in_delta, const int GROUP,
                         const bool weights, const bool inputs)
{
    vreal sum[SPREAD_MAX], factor[SPREAD_MAX];
    size_t run[SPREAD_MAX];
    UNROLL for (int v = 0; v < GROUP; v++)
    {
        /* cppcheck-suppress nullPointerArithmetic ; NULL only without `weights` */
        sum[v] = weights ? v_load(weight_delta + v * LANES) : v_set(0);
        factor[v] = inputs ? v_load(weight + v * LANES) : v_set(0);
        run[v] = runs[v];
    }
    for (size_t i = 0; i < argmax->count; i++) {
        vreal delta = v_set(argmax->deltas[i]);
        const size_t position = argmax->positions[i];
        UNROLL for (int v = 0; v < GROUP; v++)
        {
            if (weights)
                sum[v] = v_fma(delta, v_load(in + position + run[v]), sum[v]);
            if (inputs) {
                float *to = in_delta + position + run[v];
                v_store(to, v_fma(delta, factor[v], v_load(to)));
            }
        }
    }
    /* cppcheck-suppress nullPointerArithmetic ; NULL only without `weights` */
    UNROLL for (int v = 0; weights && v < GROUP; v++) v_store(weight_delta + v * LANES, sum[v]);
}

typedef void spread_function(const struct argmax_list *argmax, const uint32_t *runs, const float *in,
                             float *weight_delta, const float *weight, float *in_delta);
#define SPREAD(n)                                                                                   \
    static void spread_##n(const struct argmax_list *argmax, const uint32_t *runs, const float *in, \
                           float *weight_delta, const float *weight, float *in_delta)               \
    {                                                                                               \
        if (!weight_delta)                                                                          \
            spread_group(argmax, runs, in, NULL, weight, in_delta, n, false, true);                 \
        else if (in_delta)                                                                          \
            spread_group(argmax, runs, in, weight_delta, weight, in_delta, n, true, true);          \
        else                                                                                        \
            spread_group(argmax, runs, in, weight_delta, weight, in_delta, n, true, false);         \
    }
SPREAD(1)
SPREAD(2)
SPREAD(3)
SPREAD(4)
SPREAD(5)
SPREAD(6)
#if SPREAD_MAX == 9
SPREAD(7)
SPREAD(8)
SPREAD(9)
#endif

static void spread(const struct argmax_list *argmax, const uint32_t *runs, size_t vectors, const float *in,
                   float *weight_delta, const float *weight, float *in_delta)
{
    static spread_function *const groups[SPREAD_MAX] = {
        spread_1,
        spread_2,
        spread_3,
        spread_4,
        spread_5,
        spread_6,
#if SPREAD_MAX == 9
        spread_7,
        spread_8,
        spread_9,
#endif
    };
    size_t parts = (vectors + SPREAD_MAX - 1) / SPREAD_MAX;
    for (size_t p = 0; p < parts; p++) {
        size_t begin = vectors * p / parts, end = vectors * (p + 1) / parts;
        groups[end - begin - 1](argmax, runs + begin, in, weight_delta ? weight_delta + begin * LANES : NULL,
                                weight ? weight + begin * LANES : NULL, in_delta);
    }
}

/* ---- Elementwise: plain loops that the compiler vectorises ---- */

static void add(const float *restrict from, float *restrict to, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] += from[i];
}

static void relu(float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] = values[i] <= 0 ? 0 : values[i];
}

static void relu_backward(const float *restrict values, float *restrict deltas, size_t count)
{
    for (size_t i = 0; i < count; i++)
        deltas[i] = values[i] <= 0 ? 0 : deltas[i];
}

/* Copies the words of each Philox block in little-endian byte order, because draw_kept() uses the lowest byte
 * of a word first. */
static void draw(uint64_t seed, uint32_t epoch, uint32_t sample, uint32_t layer, size_t count, uint8_t *bytes)
{
    for (size_t i = 0; i < count; i += DRAW_DROPOUT_ELEMENTS) {
        struct philox_block block = draw_dropout(seed, epoch, sample, layer, (uint32_t)i);
        memcpy(bytes + i, &block, DRAW_DROPOUT_ELEMENTS);
    }
}
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "draw() needs a little-endian machine"
#endif

static void drop(const uint8_t *restrict bytes, uint32_t threshold, float *restrict values, size_t count)
{
    const float scale = 256.0f / (float)(256 - threshold);
    for (size_t i = 0; i < count; i++)
        values[i] *= bytes[i] >= threshold ? scale : 0;
}

/* Transposes BLOCK x BLOCK floats, with AVX in registers. */
#if LANES > 4
#define BLOCK 8
static inline void transpose_block(const float *from, size_t from_pitch, float *to, size_t to_pitch)
{
    __m256 row[BLOCK], pair[BLOCK], four[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        row[i] = _mm256_loadu_ps(from + (size_t)i * from_pitch);
    for (int i = 0; i < BLOCK; i += 2) {
        pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
    for (int i = 0; i < BLOCK; i += 4) {
        four[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
        four[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xEE);
        four[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
        four[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xEE);
    }
    for (int i = 0; i < BLOCK / 2; i++) {
        _mm256_storeu_ps(to + (size_t)i * to_pitch, _mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
        _mm256_storeu_ps(to + (size_t)(i + 4) * to_pitch, _mm256_permute2f128_ps(four[i], four[i + 4], 0x31));
    }
}
#else
#define BLOCK 4
static inline void transpose_block(const float *from, size_t from_pitch, float *to, size_t to_pitch)
{
    for (size_t i = 0; i < BLOCK; i++)
        for (size_t j = 0; j < BLOCK; j++)
            to[j * to_pitch + i] = from[i * from_pitch + j];
}
#endif

/* Transposes whole blocks, then the remaining rows and columns element by element. */
static void transpose(const float *restrict from, size_t from_pitch, size_t rows, size_t columns,
                      float *restrict to, size_t to_pitch)
{
    size_t whole_rows = rows - rows % BLOCK, whole_columns = columns - columns % BLOCK;
    for (size_t j = 0; j < whole_columns; j += BLOCK)
        for (size_t i = 0; i < whole_rows; i += BLOCK)
            transpose_block(from + i * from_pitch + j, from_pitch, to + j * to_pitch + i, to_pitch);
    for (size_t j = 0; j < columns; j++)
        for (size_t i = j < whole_columns ? whole_rows : 0; i < rows; i++)
            to[j * to_pitch + i] = from[i * from_pitch + j];
}

/* There is one loop per kind of optimizer, so that the kind is not tested for every parameter. */
static void update(const struct update *update, const float *restrict gradients, float *restrict parameters,
                   float *restrict m, float *restrict v, size_t count)
{
    struct update of = *update;
#define UPDATE(which, ...)                                                    \
    case OPTIMIZER_##which:                                                   \
        of.kind = OPTIMIZER_##which;                                          \
        for (size_t i = 0; i < count; i++)                                    \
            optimizer_apply(&of, gradients[i], &parameters[i], &m[i], &v[i]); \
        return;
    switch (update->kind) {
        OPTIMIZERS(UPDATE)
    default:
        return;
    }
#undef UPDATE
}

/* ---- Transformers: one token, or one row of scores ----
 *
 * A sum is computed as one partial sum per lane, so that the order of the additions does not depend on the
 * alignment. */

/* Returns exp(x) for x <= 0, with a relative error of about 1e-7; below -87, returns exp(-87). Writes x as n
 * log(2) + r with an integer n, computes exp(r) by its Taylor polynomial, and assembles the bits of 2^n.
 * Adding 1.5 * 2^23 rounds a float to an integer and leaves that integer in its low bits. NaN stays NaN. */
INLINE float exp_of(float x)
{
    const float rounder = 12582912.0f;
    x = x < -87 ? -87 : x;
    const float shifted = x * 1.44269504f + rounder, n = shifted - rounder;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* log(2) in two parts */
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1;
    sum = sum * r + 1;
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

INLINE float sum_lanes(vreal sum)
{
    float lanes[LANES], total = 0;
    v_store(lanes, sum);
    for (int i = 0; i < LANES; i++)
        total += lanes[i];
    return total;
}

INLINE float total_of(const float *values, size_t count)
{
    const size_t whole = count - count % LANES;
    vreal sum = v_set(0);
    for (size_t i = 0; i < whole; i += LANES)
        sum = v_fma(v_set(1), v_load(values + i), sum);
    float total = sum_lanes(sum);
    for (size_t i = whole; i < count; i++)
        total += values[i];
    return total;
}

INLINE float dot_of(const float *a, const float *b, size_t count)
{
    const size_t whole = count - count % LANES;
    vreal sum = v_set(0);
    for (size_t i = 0; i < whole; i += LANES)
        sum = v_fma(v_load(a + i), v_load(b + i), sum);
    float total = sum_lanes(sum);
    for (size_t i = whole; i < count; i++)
        total += a[i] * b[i];
    return total;
}

/* ---- Softmax ---- */

static void softmax(float *scores, size_t count, float factor)
{
    float most = scores[0];
    for (size_t i = 1; i < count; i++)
        most = scores[i] > most ? scores[i] : most;
    for (size_t i = 0; i < count; i++)
        scores[i] = exp_of((scores[i] - most) * factor);
    const float scale = 1 / total_of(scores, count);
    for (size_t i = 0; i < count; i++)
        scores[i] *= scale;
}

static void softmax_backward(const float *restrict weights, float *restrict deltas, size_t count,
                             float factor)
{
    const float along = dot_of(weights, deltas, count);
    for (size_t i = 0; i < count; i++)
        deltas[i] = weights[i] * (deltas[i] - along) * factor;
}

/* ---- Layer normalisation ---- */

static void norm(const float *restrict in, const float *restrict weight, const float *restrict bias,
                 float *restrict out, size_t count, float *restrict moments)
{
    const float mean = total_of(in, count) / (float)count;
    for (size_t i = 0; i < count; i++)
        out[i] = in[i] - mean;
    const float scale = 1 / sqrtf(dot_of(out, out, count) / (float)count + (float)LAYER_NORM_EPSILON);
    for (size_t i = 0; i < count; i++)
        out[i] = out[i] * scale * weight[i] + bias[i];
    moments[0] = mean;
    moments[1] = scale;
}

static void norm_backward(const float *restrict in, const float *restrict moments,
                          const float *restrict weight, const float *restrict deltas,
                          float *restrict in_deltas, size_t count, bool adds)
{
    const float mean = moments[0], scale = moments[1];
    vreal sum = v_set(0), sum_along = v_set(0);
    const size_t whole = count - count % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        vreal gradient = v_load(deltas + i) * v_load(weight + i);
        sum = v_fma(v_set(1), gradient, sum);
        sum_along = v_fma(gradient, v_load(in + i) - v_set(mean), sum_along);
    }
    float total = sum_lanes(sum), along = sum_lanes(sum_along);
    for (size_t i = whole; i < count; i++) {
        total += deltas[i] * weight[i];
        along += deltas[i] * weight[i] * (in[i] - mean);
    }
    total /= (float)count;
    along *= scale * scale / (float)count;
    for (size_t i = 0; i < count; i++)
        in_deltas[i] =
            (adds ? in_deltas[i] : 0) + scale * (deltas[i] * weight[i] - total - (in[i] - mean) * along);
}

static void norm_weights(const float *restrict in, const float *restrict moments,
                         const float *restrict deltas, float *restrict weights, float *restrict biases,
                         size_t count)
{
    for (size_t i = 0; i < count; i++) {
        weights[i] += deltas[i] * ((in[i] - moments[0]) * moments[1]);
        biases[i] += deltas[i];
    }
}

/* ---- Batch normalisation: the compiler vectorises the loops over the channels ---- */

static void channel_moments(const float *restrict in, size_t count, size_t pitch, float *restrict means,
                            float *restrict squares)
{
    const float share = 1 / (float)count;
    memset(means, 0, pitch * sizeof *means);
    memset(squares, 0, pitch * sizeof *squares);
    for (size_t p = 0; p < count; p++)
        for (size_t c = 0; c < pitch; c++)
            means[c] += in[p * pitch + c];
    for (size_t c = 0; c < pitch; c++)
        means[c] *= share;
    for (size_t p = 0; p < count; p++)
        for (size_t c = 0; c < pitch; c++) {
            const float off = in[p * pitch + c] - means[c];
            squares[c] += off * off;
        }
}

static void channel_apply(const float *restrict in, size_t count, size_t pitch, const float *restrict means,
                          const float *restrict scales, const float *restrict shifts, float *restrict out)
{
    for (size_t p = 0; p < count; p++)
        for (size_t c = 0; c < pitch; c++)
            out[p * pitch + c] = (in[p * pitch + c] - means[c]) * scales[c] + shifts[c];
}

static void channel_sums(const float *restrict in, const float *restrict deltas, size_t count, size_t pitch,
                         const float *restrict means, float *restrict sums, float *restrict products)
{
    memset(sums, 0, pitch * sizeof *sums);
    memset(products, 0, pitch * sizeof *products);
    for (size_t p = 0; p < count; p++)
        for (size_t c = 0; c < pitch; c++) {
            const float delta = deltas[p * pitch + c];
            sums[c] += delta;
            products[c] += delta * (in[p * pitch + c] - means[c]);
        }
}

static void channel_backward(const float *restrict in, const float *restrict deltas, size_t count,
                             size_t pitch, const float *restrict means, const float *restrict scales,
                             const float *restrict falls, const float *restrict slopes,
                             float *restrict in_deltas, bool adds)
{
    for (size_t p = 0; p < count; p++)
        for (size_t c = 0; c < pitch; c++) {
            const size_t i = p * pitch + c;
            const float delta = scales[c] * (deltas[i] - falls[c] - (in[i] - means[c]) * slopes[c]);
            in_deltas[i] = (adds ? in_deltas[i] : 0) + delta;
        }
}

/* ---- GELU ---- */

/* Returns the normal distribution function of x; `density` receives exp(-x^2 / 2). The formula for erf(),
 * with an error of at most 1.5e-7, is 7.1.26 of Abramowitz and Stegun, "Handbook of mathematical functions".
 */
INLINE float normal_below(float x, float *density)
{
    const float z = fabsf(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z);
    float sum = 1.061405429f;
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    *density = exp_of(-0.5f * x * x);
    const float tail = 0.5f * sum * t * *density;
    return x < 0 ? tail : 1 - tail;
}

static void gelu(const float *restrict in, float *restrict out, size_t count)
{
    float density;
    for (size_t i = 0; i < count; i++)
        out[i] = in[i] * normal_below(in[i], &density);
}

static void gelu_backward(const float *restrict in, const float *restrict deltas, float *restrict in_deltas,
                          size_t count, bool adds)
{
    for (size_t i = 0; i < count; i++) {
        float density, below = normal_below(in[i], &density);
        float delta = deltas[i] * (below + in[i] * 0.39894228f * density);
        in_deltas[i] = (adds ? in_deltas[i] : 0) + delta;
    }
}

#if LANES == 4
const struct net_kernel net_kernel_scalar
#elif LANES == 8
const struct net_kernel net_kernel_avx2
#else
const struct net_kernel net_kernel_avx512
#endif
    = {
        .lanes = LANES,
        .tiles = tiles,
        .multiply = multiply,
        .pool = pool,
        .spread = spread,
        .add = add,
        .relu = relu,
        .relu_backward = relu_backward,
        .draw = draw,
        .drop = drop,
        .transpose = transpose,
        .softmax = softmax,
        .softmax_backward = softmax_backward,
        .norm = norm,
        .norm_backward = norm_backward,
        .norm_weights = norm_weights,
        .gelu = gelu,
        .gelu_backward = gelu_backward,
        .channel_moments = channel_moments,
        .channel_apply = channel_apply,
        .channel_sums = channel_sums,
        .channel_backward = channel_backward,
        .update = update,
};

#if LANES > 4 && defined(__clang__)
#pragma clang attribute pop
#endif
#endif
