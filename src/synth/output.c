#include "synth/output.h"

#include <stdlib.h>

#include "core/array.h"
#include "core/options.h"

#define STRIP 2048 /* columns per strip; their sums take 8 KiB of stack */

void output_set_scale(struct synth_output *output, uint32_t res, const double mean[OUTPUT_CHANNELS_MAX],
                      const double deviation[OUTPUT_CHANNELS_MAX])
{
    double white = 255.0 * output_area(output->fit, res);
    for (int c = 0; c < OUTPUT_CHANNELS_MAX; c++) {
        output->scale[c] = (float)(1 / (white * deviation[c]));
        output->bias[c] = (float)(-mean[c] / deviation[c]);
    }
}

/* Copies `bytes` bytes of a table entry for each gray; the gray is the index of the entry. Entries are
 * `stride` bytes apart. */
static inline void write_entries(const uint8_t *grays, uint32_t count, const uint8_t *table, size_t stride,
                                 size_t bytes, uint8_t *to)
{
    for (uint32_t i = 0; i < count; i++)
        memcpy(to + i * bytes, table + grays[i] * stride, bytes);
}

/* Calls write_entries() with a constant size, so that memcpy() is inlined. The sizes are those of one or
 * three values of each output type. */
static inline void write_row(const uint8_t *grays, uint32_t count, const uint8_t *table, size_t stride,
                             size_t bytes, uint8_t *to)
{
    switch (bytes) {
    case 1:
        return write_entries(grays, count, table, stride, 1, to);
    case 2:
        return write_entries(grays, count, table, stride, 2, to);
    case 3:
        return write_entries(grays, count, table, stride, 3, to);
    case 4:
        return write_entries(grays, count, table, stride, 4, to);
    case 6:
        return write_entries(grays, count, table, stride, 6, to);
    default:
        return write_entries(grays, count, table, stride, 12, to);
    }
}

/* As convert_pixels(), for pixels with three interleaved colours. */
static void convert_colors(const struct synth_output *output, const uint8_t *canvas, size_t plane_bytes,
                           size_t pitch, struct output_corner corner, struct output_rows rows, void *image)
{
    for (uint32_t y = rows.begin; y < rows.end; y++)
        for (uint32_t x = 0; x < output->res; x++)
            for (uint32_t c = 0; c < output->channels; c++)
                output_store_channels(output, 1,
                                      canvas[c * plane_bytes + (corner.y + y) * pitch + corner.x + x], y, x,
                                      c, c + 1, image);
}

/* Converts the whole canvas or a crop of it. Uses a table that holds the output pixel of each of the 256
 * grays, with all its channels. `plane_bytes`: from one plane of a colour canvas to the next. */
static void convert_pixels(const struct synth_output *output, const uint8_t *canvas, size_t plane_bytes,
                           size_t pitch, struct output_corner corner, struct output_rows rows, void *image)
{
    float table[256 * OUTPUT_CHANNELS_MAX]; /* aligned for any type */
    struct synth_output line = *output;
    line.layout = OUTPUT_NHWC;
    for (uint32_t gray = 0; gray < 256; gray++)
        output_store(&line, 1, gray, 0, gray, table);

    size_t pixel_bytes = output->channels * dtype_bytes(output->type);
    uint32_t planes = output->layout == OUTPUT_NCHW ? output->channels : 1;
    size_t bytes = pixel_bytes / planes, row_bytes = output->res * bytes;
    for (uint32_t plane = 0; plane < planes; plane++)
        for (uint32_t y = rows.begin; y < rows.end; y++)
            write_row(canvas + (output->color ? plane * plane_bytes : 0) + (corner.y + y) * pitch + corner.x,
                      output->res, (const uint8_t *)table + plane * bytes, pixel_bytes, bytes,
                      (uint8_t *)image + ((size_t)plane * output->res + y) * row_bytes);
}

/* Converts one output row. First adds up the covered canvas rows in each column, then adds up the columns
 * that each output pixel covers. Works on strips of columns; the sum of an output pixel that spans several
 * strips is carried over. Writes channels `channel` to channel_end - 1. */
static void convert_row(const struct synth_output *output, uint32_t res, const uint8_t *canvas, size_t pitch,
                        uint32_t y, uint32_t channel, uint32_t channel_end, void *image)
{
    const uint32_t area = output_area(OUTPUT_RESIZE, res);
    const struct output_span span_y = output_span(y, res, output->res);
    uint32_t columns[STRIP], x = 0;
    uint64_t sum = 0;
    for (uint32_t begin = 0; begin < res; begin += STRIP) {
        const uint32_t count = res - begin < STRIP ? res - begin : STRIP, end = begin + count;
        memset(columns, 0, count * sizeof *columns);
        for (uint32_t row = span_y.first; row <= span_y.last; row++) {
            const uint32_t weight = output_weight(span_y, output->res, row);
            const uint8_t *grays = canvas + row * pitch + begin;
            for (uint32_t i = 0; i < count; i++)
                columns[i] += weight * grays[i];
        }
        for (; x < output->res; x++) {
            const struct output_span span_x = output_span(x, res, output->res);
            const uint32_t last = span_x.last < end ? span_x.last : end - 1;
            for (uint32_t i = span_x.first > begin ? span_x.first : begin; i <= last; i++)
                sum += (uint64_t)output_weight(span_x, output->res, i) * columns[i - begin];
            if (span_x.last >= end)
                break;
            output_store_channels(output, area, sum, y, x, channel, channel_end, image);
            sum = 0;
        }
    }
}

FDSL_FMA_CLONES void output_convert_rows(const struct synth_output *output, uint32_t res,
                                         struct philox_key key, const uint8_t *canvas, size_t pitch,
                                         struct output_rows rows, void *image)
{
    static const struct output_corner whole = {0, 0};
    const size_t plane_bytes = res * pitch;
    const struct output_corner corner =
        output->fit == OUTPUT_CROP ? output_crop(key, res, output->res) : whole;
    if (output->fit == OUTPUT_RESIZE && output->color)
        for (uint32_t c = 0; c < output->channels; c++)
            for (uint32_t y = rows.begin; y < rows.end; y++)
                convert_row(output, res, canvas + c * plane_bytes, pitch, y, c, c + 1, image);
    else if (output->fit == OUTPUT_RESIZE)
        for (uint32_t y = rows.begin; y < rows.end; y++)
            convert_row(output, res, canvas, pitch, y, 0, output->channels, image);
    else if (output->color && output->layout == OUTPUT_NHWC)
        convert_colors(output, canvas, plane_bytes, pitch, corner, rows, image);
    else
        convert_pixels(output, canvas, plane_bytes, pitch, corner, rows, image);
}

void output_convert(const struct synth_output *output, uint32_t res, struct philox_key key,
                    const uint8_t *canvas, size_t pitch, void *image)
{
    output_convert_rows(output, res, key, canvas, pitch, (struct output_rows){0, output->res}, image);
}

void output_convert_mask(const struct synth_output *output, uint32_t res, struct philox_key key,
                         const uint8_t *canvas, size_t pitch, struct output_rows rows, uint8_t *mask)
{
    struct output_corner corner = {0, 0};
    if (output->fit == OUTPUT_CROP)
        corner = output_crop(key, res, output->res);
    for (uint32_t y = rows.begin; y < rows.end; y++) {
        const uint8_t *row = canvas + output_nearest(output, res, corner.y, y) * pitch;
        uint8_t *to = mask + (size_t)y * output->res;
        if (output->fit != OUTPUT_RESIZE)
            memcpy(to, row + corner.x, output->res);
        else
            for (uint32_t x = 0; x < output->res; x++)
                to[x] = row[output_nearest(output, res, 0, x)];
    }
}

enum status output_interleave(const struct synth_output *output, uint8_t *image)
{
    const size_t plane = (size_t)output->res * output->res;
    if (output->layout == OUTPUT_NHWC || output->channels == 1)
        return STATUS_OK;
    FREED uint8_t *planes = malloc(plane * output->channels);
    TRY(ALLOCATED(planes, "out of memory for a picture"));
    memcpy(planes, image, plane * output->channels);
    for (size_t i = 0; i < plane; i++)
        for (uint32_t c = 0; c < output->channels; c++)
            image[i * output->channels + c] = planes[c * plane + i];
    return STATUS_OK;
}
