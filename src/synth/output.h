/* What a trainer gets of an image: its type, layout, size and scale, one definition for host and device.
 *
 * An image is drawn on a canvas, res * res pixels of gray; the output is made from it. An output pixel is a
 * weighted sum of grays over an area, in whole numbers, and then at most one fused multiply-add and one
 * rounding to the type: so every exact variant makes the same bits.
 * docs/output.md gives the definition. */
#ifndef FDSL_SYNTH_OUTPUT_H
#define FDSL_SYNTH_OUTPUT_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"
#include "core/half.h"
#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"
#include "synth/atom.h"

#define OUTPUT_RES_MAX      16384u /* pixels a side, of the canvas too */
#define OUTPUT_CHANNELS_MAX 3

enum output_layout {
    OUTPUT_NCHW, /* channel by channel */
    OUTPUT_NHWC  /* the channels of a pixel together */
};

/* How the canvas becomes an image of another side. */
enum output_fit {
    OUTPUT_WHOLE,  /* the canvas as it is: output.res is res */
    OUTPUT_RESIZE, /* the mean over the area that a pixel covers; to smaller or larger */
    OUTPUT_CROP    /* a square at a random place that is the image's own; output.res < res */
};

struct synth_output {
    enum dtype type;
    enum output_layout layout;
    enum output_fit fit;
    uint32_t res;      /* side of the output image in pixels */
    uint32_t channels; /* 1 or 3, all with the same gray */

    /* A value is sum * scale + bias, by channel; 1 / (255 area deviation) and -mean / deviation. Unused by
     * DTYPE_U8. */
    float scale[OUTPUT_CHANNELS_MAX], bias[OUTPUT_CHANNELS_MAX];
};

/* Whether the output is the canvas, byte by byte. */
FDSL_HD bool output_is_canvas(const struct synth_output *output)
{
    return output->type == DTYPE_U8 && output->channels == 1 && output->fit == OUTPUT_WHOLE;
}

/* Where value (channel, y, x) stands in its image, counted in values. */
FDSL_HD size_t output_index(const struct synth_output *output, uint32_t channel, uint32_t y, uint32_t x)
{
    return output->layout == OUTPUT_NCHW ? ((size_t)channel * output->res + y) * output->res + x
                                         : ((size_t)y * output->res + x) * output->channels + channel;
}

/* ---- Where a pixel comes from ---- */

/* The upper left corner of a crop on the canvas. */
struct output_corner {
    uint32_t x, y;
};

/* Of the image with this key; every place where the crop lies inside is as likely. */
FDSL_HD struct output_corner output_crop(struct philox_key key, uint32_t res, uint32_t out_res)
{
    struct philox_block block = philox(key, 0, 0, STREAM_CROP, 0);
    struct output_corner corner = {philox_below(block.word[0], res - out_res + 1),
                                   philox_below(block.word[1], res - out_res + 1)};
    return corner;
}

/* Along one axis, the canvas pixels that a pixel of a resized image covers: first .. last. Lengths are
 * counted in parts of a canvas pixel, of which it has out_res: so an output pixel is res long. The first
 * pixel counts with the weight `head`, the last with `tail`, those between with out_res, and one that is both
 * with head = tail = res. */
struct output_span {
    uint32_t first, last, head, tail;
};

/* Of output pixel j. Both sides up to 16384: then nothing here exceeds 2^28. */
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

/* The weight of canvas pixel x, which is in the span. */
FDSL_HD uint32_t output_weight(struct output_span span, uint32_t out_res, uint32_t x)
{
    return x == span.first ? span.head : x == span.last ? span.tail : out_res;
}

/* What the weights of a pixel, those along x times those along y, add up to. */
FDSL_HD uint32_t output_area(enum output_fit fit, uint32_t res)
{
    return fit == OUTPUT_RESIZE ? res * res : 1;
}

/* ---- What becomes of a sum of weighted grays, at most 255 area < 2^36 ---- */

/* The mean, rounded half up. */
FDSL_HD uint8_t output_value_u8(uint64_t sum, uint32_t area)
{
    return (uint8_t)((2 * sum + area) / (2 * (uint64_t)area));
}

/* The mean from 0 to 1, less the channel's mean, over its standard deviation. */
FDSL_HD float output_value(uint64_t sum, float scale, float bias)
{
    return fmaf((float)sum, scale, bias);
}

/* Writes pixel (y, x) of an image, all its channels. */
FDSL_HD void output_store(const struct synth_output *output, uint32_t area, uint64_t sum, uint32_t y,
                          uint32_t x, void *image)
{
    for (uint32_t c = 0; c < output->channels; c++) {
        size_t i = output_index(output, c, y, x);
        float value = output_value(sum, output->scale[c], output->bias[c]);
        switch (output->type) {
        case DTYPE_U8:
            ((uint8_t *)image)[i] = output_value_u8(sum, area);
            break;
        case DTYPE_F16:
            ((uint16_t *)image)[i] = half_from_float(value);
            break;
        case DTYPE_STORED: /* no output has it */
        case DTYPE_BF16:
            ((uint16_t *)image)[i] = bf16_from_float(value);
            break;
        case DTYPE_F32:
            ((float *)image)[i] = value;
            break;
        }
    }
}

FDSL_C_BEGIN

/* Reads "V", one value for all channels, or "V,V,V", one a channel. Each must lie in [minimum, maximum].
 * STATUS_USAGE with a message that begins with `name`. */
enum status output_parse_values(const char *name, const char *text, uint32_t channels, double minimum,
                                double maximum, double values[OUTPUT_CHANNELS_MAX]);

/* Sets scale and bias from the means and the standard deviations of the channels, both for grays from 0 to 1,
 * and from type, fit and the canvas' side. */
void output_set_scale(struct synth_output *output, uint32_t res, const double mean[OUTPUT_CHANNELS_MAX],
                      const double deviation[OUTPUT_CHANNELS_MAX]);

/* The rows of an output image from `begin` up to `end`. */
struct output_rows {
    uint32_t begin, end;
};

/* The reference: makes the output `image`, or some rows of it, of the canvas of the image with this key. The
 * canvas has a side of `res` pixels and `pitch` bytes from row to row; `image` is as large as
 * synth_output_bytes() says and aligned for its type. */
void output_convert(const struct synth_output *output, uint32_t res, struct philox_key key,
                    const uint8_t *canvas, size_t pitch, void *image);
void output_convert_rows(const struct synth_output *output, uint32_t res, struct philox_key key,
                         const uint8_t *canvas, size_t pitch, struct output_rows rows, void *image);

FDSL_C_END

#endif
