/* Resizes 8-bit images and turns them upright. Images are resized with a bilinear or bicubic filter that also
 * averages when it shrinks ("antialiased"), as Pillow and torchvision do. All arithmetic on pixels is in
 * integers, so all implementations give the same bits.
 *
 * Along one axis, output i is a weighted mean of the inputs around (i + 1/2) * in / out. The weights of the
 * bilinear filter are a triangle that reaches `scale` inputs to each side, where scale = max(in / out, 1).
 * The weights of the bicubic filter (Keys, 1981, with a = -1/2) reach 2 * scale inputs. The filter is cut off
 * at the ends of the input. Rows are resized first and rounded to 8 bits, then columns. */
#ifndef FDSL_DATA_RESAMPLE_H
#define FDSL_DATA_RESAMPLE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* The filters of resizes that draw one: RESAMPLE_RANDOM draws bilinear or bicubic for each image. */
enum resample_choice { RESAMPLE_BILINEAR, RESAMPLE_BICUBIC, RESAMPLE_RANDOM };

/* ---- Weights ---- */

/* One axis of a resize. Weights are multiples of 2^-bits. The weights of an output add up to exactly 1, so a
 * flat image stays flat. */
struct resample_axis {
    uint32_t in, out;
    double scale, inverse; /* inputs per unit of the filter, and 1 / scale */
    uint32_t bits;
    uint32_t taps; /* maximum number of inputs per output */
    bool bicubic;
};

/* Returns the number of units that the filter reaches to each side. */
FDSL_HD double resample_reach(bool bicubic)
{
    return bicubic ? 2 : 1;
}

/* Creates the axis from `in` to `out` values. Both must be at least 1. */
FDSL_HD struct resample_axis resample_axis_with(uint32_t in, uint32_t out, bool bicubic)
{
    struct resample_axis axis = {in, out, in > out ? (double)in / out : 1, 1, 14, 0, bicubic};
    axis.inverse = 1 / axis.scale;
    for (double scale = axis.scale; scale >= 2 && axis.bits < 20; scale /= 2)
        axis.bits++; /* a weight is at most 2 / scale and at most 1.2, so as an integer it is below 2^15 */
    axis.taps = (uint32_t)(2 * axis.scale * resample_reach(bicubic)) + 1;
    if (axis.taps > in)
        axis.taps = in;
    return axis;
}

FDSL_HD struct resample_axis resample_axis(uint32_t in, uint32_t out)
{
    return resample_axis_with(in, out, false);
}

/* Returns the value of the filter at input `x`, for an output at `centre`. */
FDSL_HD double resample_filter(const struct resample_axis *axis, uint32_t x, double centre)
{
    double d = (x + 0.5 - centre) * axis->inverse;
    d = d < 0 ? -d : d;
    if (!axis->bicubic)
        return 1 - d;
    return d < 1 ? (1.5 * d - 2.5) * d * d + 1 : d < 2 ? ((2.5 - 0.5 * d) * d - 4) * d + 2 : 0;
}

/* Computes the weights of output `i`, and returns their number, at most axis->taps. Weight t belongs to input
 * *first + t. */
FDSL_HD uint32_t resample_weights(const struct resample_axis *axis, uint32_t i, uint32_t *first,
                                  int16_t *weights)
{
    double centre = (i + 0.5) * axis->in / axis->out, total = 0, sum = 0;
    double reach = axis->scale * resample_reach(axis->bicubic);
    double low = centre - reach + 0.5, high = centre + reach + 0.5;
    uint32_t begin = low > 0 ? (uint32_t)low : 0, end = high < axis->in ? (uint32_t)high : axis->in;
    int32_t done = 0;
    for (uint32_t x = begin; x < end; x++)
        total += resample_filter(axis, x, centre);
    double unit = (1 << axis->bits) / total;
    for (uint32_t x = begin; x < end; x++) {
        sum += resample_filter(axis, x, centre);
        int32_t next = x + 1 < end ? (int32_t)floor(sum * unit + 0.5) : 1 << axis->bits;
        weights[x - begin] = (int16_t)(next - done);
        done = next;
    }
    *first = begin;
    return end - begin;
}

/* ---- Orientation ---- */

/* The upright pixel (x, y) is the stored pixel (a, b). If `transpose` is set, (a, b) is (y, x), otherwise (x,
 * y). If `flip_x` is set, a then becomes width - 1 - a. If `flip_y` is set, b becomes height - 1 - b. Width
 * and height are those of the stored image. */
struct orientation {
    bool transpose, flip_x, flip_y;
};

/* Returns the orientation with this EXIF number, 1 to 8 (EXIF 2.32, tag Orientation). */
FDSL_HD struct orientation orientation_of(uint32_t number)
{
    struct orientation turn = {number >= 5, number == 2 || number == 3 || number == 7 || number == 8,
                               number == 3 || number == 4 || number == 6 || number == 7};
    return turn;
}

/* Returns the index of the stored pixel that becomes the upright pixel (x, y). */
FDSL_HD size_t orientation_from(struct orientation turn, uint32_t width, uint32_t height, uint32_t x,
                                uint32_t y)
{
    uint32_t a = turn.transpose ? y : x, b = turn.transpose ? x : y;
    if (turn.flip_x)
        a = width - 1 - a;
    if (turn.flip_y)
        b = height - 1 - b;
    return (size_t)b * width + a;
}

FDSL_C_BEGIN

/* Turns an image of width x height pixels of `channels` bytes each. `out` does not overlap `pixels`. */
void orientation_turn(struct orientation turn, const uint8_t *pixels, uint32_t width, uint32_t height,
                      uint32_t channels, uint8_t *out);

/* Returns the orientation, 1 to 8, from EXIF data, which begin with the header of TIFF ("II" or "MM"): the
 * contents of a PNG's chunk eXIf, or of a JPEG's marker APP1 after "Exif" and two zeros. Returns 0 if the
 * data have no valid orientation, or are damaged. */
uint32_t orientation_in_exif(const uint8_t *tiff, size_t bytes);

/* ---- Resizing ---- */

#define RESAMPLE_PIXEL_BYTES 4 /* red, green, blue, and a byte that is not used */

/* Tables and scratch memory. Zero it before the first use; the tables are computed again only if an axis
 * changes. One thread at a time can use it. */
struct resampler {
    bool plain; /* use no SIMD instructions; for tests that compare both results */
    struct resample_axis across, down;
    uint32_t taps_across, taps_down; /* row length of `weights_*`, padded with zeros to a multiple of 2 */
    uint32_t *first_across, *first_down;
    int16_t *weights_across, *weights_down;
    size_t across_room, down_room; /* allocated outputs times taps */
    uint8_t *rows;                 /* resized rows */
    size_t rows_bytes;
};

/* Begins an image of in_width x in_height pixels of RESAMPLE_PIXEL_BYTES, which becomes out_width x
 * out_height pixels of 3 bytes, by the bilinear or the bicubic filter. STATUS_EXHAUSTED if memory runs out.
 */
enum status resample_begin(struct resampler *resampler, uint32_t in_width, uint32_t in_height,
                           uint32_t out_width, uint32_t out_height, bool bicubic);

/* Adds `count` rows of the image, the first of which is row `y`. They are `stride` bytes apart. Reads up to
 * RESAMPLE_SLACK_BYTES after the last pixel of each row, which may have any value. */
#define RESAMPLE_SLACK_BYTES 16
void resample_rows(struct resampler *resampler, uint32_t y, const uint8_t *pixels, size_t stride,
                   uint32_t count);

/* Computes the result, after all rows were added: pixels of 3 bytes, without gaps. May write up to
 * RESAMPLE_SLACK_BYTES after the last pixel. */
void resample_end(const struct resampler *resampler, uint8_t *out);

void resampler_close(struct resampler *resampler);

FDSL_C_END

#endif
