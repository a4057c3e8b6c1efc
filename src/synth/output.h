/* The output image that a training loop receives: type, layout, size and scale. Shared by host and device
 * code.
 *
 * An image is drawn on a gray canvas of res * res pixels and then converted to the output. An output pixel is
 * the weighted mean of the grays over an area, computed from an integer sum. A u8 is the rounded mean. For
 * the other types, the sum is converted to float32, scaled by one fused multiply-add, and rounded to the
 * type. All bit-exact variants therefore produce the same bits. docs/synth.md describes the options. */
#ifndef FDSL_SYNTH_OUTPUT_H
#define FDSL_SYNTH_OUTPUT_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"
#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"
#include "synth/atom.h"

#define OUTPUT_RES_MAX      16384u /* pixels per side, of the output and the canvas */
#define OUTPUT_CHANNELS_MAX 3

/* Bounds on means and standard deviations that keep every value finite in float32. */
#define OUTPUT_MEAN_MAX      1e6
#define OUTPUT_DEVIATION_MIN 1e-6
#define OUTPUT_DEVIATION_MAX 1e6

enum output_layout {
    OUTPUT_NCHW, /* one plane per channel */
    OUTPUT_NHWC  /* the channels of a pixel are adjacent */
};

/* The method that brings the canvas to the size of the output. */
enum output_fit {
    OUTPUT_WHOLE,  /* the whole canvas, unscaled; the output has the same side as the canvas */
    OUTPUT_RESIZE, /* the whole canvas, shrunk or enlarged; each output pixel is the mean over the area that
                      it covers */
    OUTPUT_CROP    /* a square of the canvas; each image has its own random but fixed position */
};

struct synth_output {
    enum dtype type;
    enum output_layout layout;
    enum output_fit fit;
    uint32_t res;      /* side of the output image in pixels */
    uint32_t channels; /* 1 or 3; all channels have the same gray before scale and bias, unless `color` */

    /* The value of a channel is sum * scale + bias, with scale = 1 / (255 * area * deviation) and
     * bias = -mean / deviation. Unused by DTYPE_U8. */
    float scale[OUTPUT_CHANNELS_MAX], bias[OUTPUT_CHANNELS_MAX];
    bool color; /* the canvas has three planes, one per channel; channels is 3 */
};

/* Returns whether the output is bit-identical to the canvas. */
FDSL_HD bool output_is_canvas(const struct synth_output *output)
{
    const bool same = output->color ? output->layout == OUTPUT_NCHW : output->channels == 1;
    return output->type == DTYPE_U8 && same && output->fit == OUTPUT_WHOLE;
}

/* Returns the index of value (channel, y, x) in its image. */
FDSL_HD size_t output_index(const struct synth_output *output, uint32_t channel, uint32_t y, uint32_t x)
{
    return output->layout == OUTPUT_NCHW ? ((size_t)channel * output->res + y) * output->res + x
                                         : ((size_t)y * output->res + x) * output->channels + channel;
}

/* ---- The source area of a pixel ---- */

/* The upper left corner of a crop on the canvas. */
struct output_corner {
    uint32_t x, y;
};

/* Returns the corner of the crop for the image with this key, uniform over all positions inside the
 * canvas. */
FDSL_HD struct output_corner output_crop(struct philox_key key, uint32_t res, uint32_t out_res)
{
    struct philox_block block = philox(key, 0, 0, STREAM_CROP, 0);
    struct output_corner corner = {philox_below(block.word[0], res - out_res + 1),
                                   philox_below(block.word[1], res - out_res + 1)};
    return corner;
}

/* The canvas pixels first .. last that an output pixel covers along one axis. The unit of length is
 * 1 / out_res of a canvas pixel, so an output pixel is res units long. Weights: `head` for the first pixel,
 * `tail` for the last, out_res for the pixels in between. If first = last, head = tail = res. */
struct output_span {
    uint32_t first, last, head, tail;
};

/* Returns the span of output pixel j. With both sides at most 16384, no intermediate value exceeds 2^28. */
FDSL_HD struct output_span output_span(uint32_t j, uint32_t res, uint32_t out_res)
{
    uint32_t begin = j * res, end = begin + res;
    uint32_t first = begin / out_res, last = (end - 1) / out_res;
    struct output_span span = {first, last, res, res};
    if (first < last) {
        span.head = (first + 1) * out_res - begin;
        span.tail = end - last * out_res;
    }
    return span;
}

/* Returns the weight of canvas pixel x, which must be in the span. */
FDSL_HD uint32_t output_weight(struct output_span span, uint32_t out_res, uint32_t x)
{
    return x == span.first ? span.head : x == span.last ? span.tail : out_res;
}

/* Returns the total weight of an output pixel: the sum over its area of the products x weight * y weight. */
FDSL_HD uint32_t output_area(enum output_fit fit, uint32_t res)
{
    return fit == OUTPUT_RESIZE ? res * res : 1;
}

/* Returns the canvas column (or row) whose pixel a mask shows at output column (or row) j: the one under the
 * centre of the output pixel. `corner` is that of the crop along the same axis. */
FDSL_HD uint32_t output_nearest(const struct synth_output *output, uint32_t res, uint32_t corner, uint32_t j)
{
    return output->fit == OUTPUT_RESIZE ? (2 * j + 1) * res / (2 * output->res) : corner + j;
}

/* ---- Conversion of a weighted sum of grays; the sum is at most 255 * area, below 2^36 ---- */

/* Returns the mean gray, rounded half up. */
FDSL_HD uint8_t output_value_u8(uint64_t sum, uint32_t area)
{
    uint64_t rest = 2 * sum + area, by = 2 * (uint64_t)area;
#ifdef __CUDA_ARCH__
    /* A 64-bit division calls a function, and the compiler then assumes that the lanes of a warp diverge in
     * the whole kernel. The quotient has eight bits. */
    uint32_t gray = 0;
    for (int bit = 7; bit >= 0; bit--)
        if (rest >= by << bit) {
            rest -= by << bit;
            gray |= 1u << bit;
        }
    return (uint8_t)gray;
#else
    return (uint8_t)(rest / by);
#endif
}

/* Returns the normalised value: (mean gray / 255 - channel mean) / standard deviation, via scale and bias. */
FDSL_HD float output_value(uint64_t sum, float scale, float bias)
{
    return fmaf((float)sum, scale, bias);
}

/* Writes the channels first .. end - 1 of pixel (y, x). */
FDSL_HD void output_store_channels(const struct synth_output *output, uint32_t area, uint64_t sum, uint32_t y,
                                   uint32_t x, uint32_t first, uint32_t end, void *image)
{
    for (uint32_t c = first; c < end; c++) {
        size_t i = output_index(output, c, y, x);
        float value = output_value(sum, output->scale[c], output->bias[c]);
        switch (output->type) {
        case DTYPE_U8:
            ((uint8_t *)image)[i] = output_value_u8(sum, area);
            break;
        case DTYPE_F16:
            ((uint16_t *)image)[i] = half_from_float(value);
            break;
        case DTYPE_STORED: /* not an output type */
        case DTYPE_BF16:
            ((uint16_t *)image)[i] = bf16_from_float(value);
            break;
        case DTYPE_F32:
            ((float *)image)[i] = value;
            break;
        }
    }
}

/* Writes all channels of pixel (y, x). */
FDSL_HD void output_store(const struct synth_output *output, uint32_t area, uint64_t sum, uint32_t y,
                          uint32_t x, void *image)
{
    output_store_channels(output, area, sum, y, x, 0, output->channels, image);
}

FDSL_C_BEGIN

/* Sets scale and bias from the mean and standard deviation of each channel. Means and deviations refer to
 * grays scaled to 0 .. 1. `res` is the side of the canvas. Uses output->fit, which must be set. */
void output_set_scale(struct synth_output *output, uint32_t res, const double mean[OUTPUT_CHANNELS_MAX],
                      const double deviation[OUTPUT_CHANNELS_MAX]);

/* A range of rows of an output image, from `begin` to `end` - 1. */
struct output_rows {
    uint32_t begin, end;
};

/* Convert a canvas to an output image. These are the reference; other implementations must give the same
 * bits. output_convert() writes the whole image, output_convert_rows() only the given rows. `key` is the
 * image's key, which decides the crop. The canvas has `res` pixels per side and `pitch` bytes per row; if
 * output->color is set, it has three such planes.
 * `image` has synth_output_bytes() bytes and is aligned for its type. */
void output_convert(const struct synth_output *output, uint32_t res, struct philox_key key,
                    const uint8_t *canvas, size_t pitch, void *image);
void output_convert_rows(const struct synth_output *output, uint32_t res, struct philox_key key,
                         const uint8_t *canvas, size_t pitch, struct output_rows rows, void *image);

/* Interleaves the channels of a u8 image in place, so that it can become a picture file. STATUS_EXHAUSTED if
 * memory runs out. */
enum status output_interleave(const struct synth_output *output, uint8_t *image);

/* Converts rows of a mask of the size of the canvas to rows of a mask of the size of the output, which has
 * one byte per pixel. Cuts the mask as output_convert() cuts the image; takes the nearest pixel where that
 * takes a mean. */
void output_convert_mask(const struct synth_output *output, uint32_t res, struct philox_key key,
                         const uint8_t *canvas, size_t pitch, struct output_rows rows, uint8_t *mask);

FDSL_C_END

#endif
