#include "data/resample.h"

#include <stdlib.h>
#include <string.h>

#if defined __x86_64__
#include <immintrin.h>
#endif

#define PIXEL RESAMPLE_PIXEL_BYTES

/* ---- Tables ---- */

/* Computes the weights of output `i`. The row of weights is padded to `taps`. If the padding would reach
 * beyond the last input, the row starts at an earlier input instead, and the padding is before the
 * weights. */
static void make_weights(const struct resample_axis *axis, uint32_t taps, uint32_t i, uint32_t *first,
                         int16_t *weights)
{
    uint32_t count = resample_weights(axis, i, first, weights);
    uint32_t over = *first + taps > axis->in ? *first + taps - axis->in : 0;
    uint32_t shift = over < *first ? over : *first;
    if (shift == 0)
        return;
    memmove(weights + shift, weights, count * sizeof *weights);
    memset(weights, 0, shift * sizeof *weights);
    *first -= shift;
}

/* Allocates and computes the weights of an axis. Does nothing if its lengths and its filter equal those of
 * the latest call. */
static enum status make_table(struct resample_axis wanted, struct resample_axis *axis, uint32_t *taps,
                              uint32_t **first, int16_t **weights, size_t *room)
{
    if (axis->in == wanted.in && axis->out == wanted.out && axis->bicubic == wanted.bicubic)
        return STATUS_OK;
    *axis = (struct resample_axis){0};
    *taps = (wanted.taps + 1) / 2 * 2;
    size_t count = (size_t)wanted.out * *taps;
    if (count > *room) {
        free(*first);
        free(*weights);
        *first = malloc(count * sizeof **first);
        *weights = malloc(count * sizeof **weights);
        *room = *first && *weights ? count : 0;
        TRY(ALLOCATED(*room, "out of memory for the weights of %u pixels", wanted.out));
    }
    memset(*weights, 0, count * sizeof **weights);
    for (uint32_t i = 0; i < wanted.out; i++)
        make_weights(&wanted, *taps, i, &(*first)[i], &(*weights)[(size_t)i * *taps]);
    *axis = wanted;
    return STATUS_OK;
}

enum status resample_begin(struct resampler *resampler, uint32_t in_width, uint32_t in_height,
                           uint32_t out_width, uint32_t out_height, bool bicubic)
{
    struct resample_axis across = resample_axis_with(in_width, out_width, bicubic),
                         down = resample_axis_with(in_height, out_height, bicubic);
    TRY(make_table(across, &resampler->across, &resampler->taps_across, &resampler->first_across,
                   &resampler->weights_across, &resampler->across_room));
    TRY(make_table(down, &resampler->down, &resampler->taps_down, &resampler->first_down,
                   &resampler->weights_down, &resampler->down_room));
    size_t bytes = ((size_t)down.in + 1) * across.out * PIXEL + RESAMPLE_SLACK_BYTES;
    if (bytes <= resampler->rows_bytes)
        return STATUS_OK;
    free(resampler->rows);
    resampler->rows = malloc(bytes);
    resampler->rows_bytes = resampler->rows ? bytes : 0;
    return ALLOCATED(resampler->rows, "out of memory for %u rows", down.in);
}

void resampler_close(struct resampler *resampler)
{
    free(resampler->first_across);
    free(resampler->first_down);
    free(resampler->weights_across);
    free(resampler->weights_down);
    free(resampler->rows);
    *resampler = (struct resampler){0};
}

/* ---- Without SIMD ---- */

/* Rounds a weighted sum to a byte. Weights of the bicubic filter may be negative. */
static uint8_t shifted(int32_t sum, uint32_t bits)
{
    const int32_t value = sum >> bits;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void resize_row(const struct resampler *resampler, const uint8_t *pixels, uint8_t *out)
{
    const struct resample_axis *axis = &resampler->across;
    for (uint32_t i = 0; i < axis->out; i++) {
        const int16_t *weights = &resampler->weights_across[(size_t)i * resampler->taps_across];
        const uint8_t *from = pixels + (size_t)resampler->first_across[i] * PIXEL;
        for (uint32_t c = 0; c < PIXEL; c++) {
            int32_t sum = 1 << (axis->bits - 1);
            for (uint32_t t = 0; t < resampler->taps_across && resampler->first_across[i] + t < axis->in; t++)
                sum += weights[t] * from[t * PIXEL + c];
            out[i * PIXEL + c] = shifted(sum, axis->bits);
        }
    }
}

/* Resizes two rows, which are `stride` bytes apart, to two adjacent rows. */
static void across_ref(const struct resampler *resampler, const uint8_t *pixels, size_t stride, uint8_t *out)
{
    resize_row(resampler, pixels, out);
    resize_row(resampler, pixels + stride, out + (size_t)resampler->across.out * PIXEL);
}

/* Computes row `i` of the result from the resized rows. */
static void down_ref(const struct resampler *resampler, uint32_t i, uint8_t *out)
{
    const struct resample_axis *axis = &resampler->down;
    const int16_t *weights = &resampler->weights_down[(size_t)i * resampler->taps_down];
    size_t bytes = (size_t)resampler->across.out * PIXEL;
    const uint8_t *from = resampler->rows + resampler->first_down[i] * bytes;
    for (size_t x = 0; x < bytes; x++) {
        int32_t sum = 1 << (axis->bits - 1);
        for (uint32_t t = 0; t < resampler->taps_down && resampler->first_down[i] + t < axis->in; t++)
            sum += weights[t] * from[t * bytes + x];
        if (x % PIXEL < 3)
            *out++ = shifted(sum, axis->bits);
    }
}

/* ---- AVX2 ---- */

#if defined __x86_64__

/* Shuffle masks that convert the bytes of two adjacent pixels to 16-bit values, in the order r0 r1 g0 g1 b0
 * b1 x0 x1. The index 128 gives a zero byte. */
#define PAIR(a, b) \
    (a), 128, (b), 128, (a) + 1, 128, (b) + 1, 128, (a) + 2, 128, (b) + 2, 128, (a) + 3, 128, (b) + 3, 128
static const uint8_t pair_low[32] = {PAIR(0, 4), PAIR(0, 4)}, pair_high[32] = {PAIR(8, 12), PAIR(8, 12)};

#define AVX2 __attribute__((target("avx2"), always_inline)) static inline

/* Returns a vector in which each 32 bits hold the same two 16-bit weights. */
AVX2 __m256i two_weights(const int16_t *weights)
{
    int32_t two;
    memcpy(&two, weights, sizeof two);
    return _mm256_set1_epi32(two);
}

/* Returns the weighted sums of one output pixel, 32 bits per channel: row 0 in the lower half, row 1 in the
 * upper half. VPMADDWD multiplies pairs of 16-bit values and adds each pair, so it sums two inputs. */
AVX2 __m256i sums_avx2(const uint8_t *from, size_t stride, const int16_t *weights, uint32_t taps,
                       __m256i sums)
{
    const __m256i low = _mm256_loadu_si256((const __m256i *)pair_low);
    const __m256i high = _mm256_loadu_si256((const __m256i *)pair_high);
    for (uint32_t t = 0; t < taps; t += 4, from += 16) {
        __m256i four = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from));
        four = _mm256_inserti128_si256(four, _mm_loadu_si128((const __m128i *)(from + stride)), 1);
        __m256i two = _mm256_shuffle_epi8(four, low);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(two, two_weights(weights + t)));
        if (t + 2 < taps) {
            two = _mm256_shuffle_epi8(four, high);
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(two, two_weights(weights + t + 2)));
        }
    }
    return sums;
}

/* Four outputs per step. */
AVX2 void across_taps(const struct resampler *resampler, const uint8_t *pixels, size_t stride, uint8_t *out,
                      uint32_t taps)
{
    const __m256i half = _mm256_set1_epi32(1 << (resampler->across.bits - 1));
    const __m128i bits = _mm_cvtsi32_si128((int)resampler->across.bits);
    const uint32_t *first = resampler->first_across;
    const int16_t *weights = resampler->weights_across;
    uint32_t count = resampler->across.out;
    for (uint32_t i = 0; i < count; i += 4) {
        __m256i sums[4];
#pragma GCC unroll 4
        for (uint32_t j = 0; j < 4; j++) {
            size_t k = i + j < count ? i + j : i;
            sums[j] = sums_avx2(pixels + (size_t)first[k] * PIXEL, stride, weights + k * taps, taps, half);
            sums[j] = _mm256_sra_epi32(sums[j], bits);
        }
        __m256i bytes =
            _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        __m128i rows[2] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
        uint32_t left = count - i < 4 ? count - i : 4;
        for (size_t r = 0; r < 2; r++)
            if (left == 4)
                _mm_storeu_si128((__m128i *)(out + (r * count + i) * PIXEL), rows[r]);
            else
                memcpy(out + (r * count + i) * PIXEL, &rows[r], left * PIXEL);
    }
}

/* The loop over the weights is unrolled for the usual numbers of weights. */
__attribute__((target("avx2"))) static void across_avx2(const struct resampler *resampler,
                                                        const uint8_t *pixels, size_t stride, uint8_t *out)
{
    switch (resampler->taps_across) {
    case 4:
        across_taps(resampler, pixels, stride, out, 4);
        break;
    case 6:
        across_taps(resampler, pixels, stride, out, 6);
        break;
    case 8:
        across_taps(resampler, pixels, stride, out, 8);
        break;
    default:
        across_taps(resampler, pixels, stride, out, resampler->taps_across);
    }
}

/* Returns the rounded weighted sums of 16 adjacent bytes over all rows. Interleaves the bytes of two rows for
 * VPMADDWD. */
AVX2 __m128i column_avx2(const uint8_t *from, size_t stride, const int16_t *weights, uint32_t rows,
                         __m256i half, __m128i bits)
{
    const __m128i zero = _mm_setzero_si128();
    __m256i low = half, high = half;
    for (uint32_t t = 0; t < rows; t += 2, from += 2 * stride) {
        __m256i weight = two_weights(weights + t);
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = t + 1 < rows ? _mm_loadu_si128((const __m128i *)(from + stride)) : zero;
        __m256i bytes = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(bytes, weight));
        bytes = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(bytes, weight));
    }
    __m256i words = _mm256_packs_epi32(_mm256_sra_epi32(low, bits), _mm256_sra_epi32(high, bits));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x08);
    return _mm_shuffle_epi32(_mm256_castsi256_si128(packed), 0xd8);
}

__attribute__((target("avx2"))) static void down_avx2(const struct resampler *resampler, uint32_t i,
                                                      uint8_t *out)
{
    const int16_t *weights = &resampler->weights_down[(size_t)i * resampler->taps_down];
    const __m256i half = _mm256_set1_epi32(1 << (resampler->down.bits - 1));
    const __m128i bits = _mm_cvtsi32_si128((int)resampler->down.bits);
    const __m128i three = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    size_t bytes = (size_t)resampler->across.out * PIXEL;
    uint32_t first = resampler->first_down[i], rows = resampler->taps_down;
    rows = rows < resampler->down.in - first ? rows : resampler->down.in - first;
    const uint8_t *from = resampler->rows + first * bytes;
    for (size_t x = 0; x < bytes; x += 16) {
        __m128i result = column_avx2(from + x, bytes, weights, rows, half, bits);
        _mm_storeu_si128((__m128i *)(out + x / PIXEL * 3), _mm_shuffle_epi8(result, three));
    }
}

#endif

/* ---- Both passes ---- */

static bool has_avx2(const struct resampler *resampler)
{
#if defined __x86_64__
    return !resampler->plain && __builtin_cpu_supports("avx2");
#else
    (void)resampler;
    return false;
#endif
}

#if !defined __x86_64__
#define across_avx2 across_ref
#define down_avx2   down_ref
#endif

void resample_rows(struct resampler *resampler, uint32_t y, const uint8_t *pixels, size_t stride,
                   uint32_t count)
{
    size_t bytes = (size_t)resampler->across.out * PIXEL;
    for (uint32_t i = 0; i < count; i += 2) {
        size_t next = i + 1 < count ? stride : 0; /* an odd last row is resized twice */
        (has_avx2(resampler) ? across_avx2 : across_ref)(resampler, pixels + i * stride, next,
                                                         resampler->rows + (y + i) * bytes);
    }
}

void resample_end(const struct resampler *resampler, uint8_t *out)
{
    size_t bytes = (size_t)resampler->across.out * 3;
    for (uint32_t i = 0; i < resampler->down.out; i++)
        (has_avx2(resampler) ? down_avx2 : down_ref)(resampler, i, out + i * bytes);
}

/* ---- Orientation ---- */

void orientation_turn(struct orientation turn, const uint8_t *pixels, uint32_t width, uint32_t height,
                      uint32_t channels, uint8_t *out)
{
    uint32_t rows = turn.transpose ? width : height, columns = turn.transpose ? height : width;
    for (uint32_t y = 0; y < rows; y++)
        for (uint32_t x = 0; x < columns; x++) {
            const uint8_t *from = pixels + orientation_from(turn, width, height, x, y) * channels;
            for (uint32_t c = 0; c < channels; c++)
                *out++ = from[c];
        }
}

/* ---- EXIF data (TIFF 6.0, section 2; EXIF 2.32, section 4.5) ---- */

#define HEADER_BYTES    8  /* byte order, the number 42, and the offset of the first directory */
#define ENTRY_BYTES     12 /* tag, type, number of values, and the value or its offset */
#define TAG_ORIENTATION 0x112
#define TYPE_SHORT      3 /* 16 bits */
#define TYPE_LONG       4 /* 32 bits */

/* Returns the number in `count` bytes. */
static uint32_t number(const uint8_t *bytes, int count, bool big_endian)
{
    uint32_t value = 0;
    for (int i = 0; i < count; i++)
        value = value << 8 | bytes[big_endian ? i : count - 1 - i];
    return value;
}

/* Returns the value of an entry, or 0 if it is not a single number of a type that the standard or a common
 * program uses. A SHORT takes the first two bytes of the field, in either byte order. */
static uint32_t value_of(const uint8_t *entry, bool big_endian)
{
    uint32_t type = number(entry + 2, 2, big_endian);
    if ((type != TYPE_SHORT && type != TYPE_LONG) || number(entry + 4, 4, big_endian) != 1)
        return 0;
    return number(entry + 8, type == TYPE_SHORT ? 2 : 4, big_endian);
}

uint32_t orientation_in_exif(const uint8_t *tiff, size_t bytes)
{
    static const uint8_t little[4] = {'I', 'I', 42, 0}, big[4] = {'M', 'M', 0, 42};
    if (bytes < HEADER_BYTES || (memcmp(tiff, little, 4) != 0 && memcmp(tiff, big, 4) != 0))
        return 0;
    bool big_endian = tiff[0] == 'M';
    size_t at = number(tiff + 4, 4, big_endian);
    if (at > bytes || bytes - at < 2)
        return 0;
    uint32_t entries = number(tiff + at, 2, big_endian);
    for (at += 2; entries-- > 0 && bytes - at >= ENTRY_BYTES; at += ENTRY_BYTES)
        if (number(tiff + at, 2, big_endian) == TAG_ORIENTATION) {
            uint32_t value = value_of(tiff + at, big_endian);
            return value <= 8 ? value : 0;
        }
    return 0;
}
