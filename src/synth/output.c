#include "synth/output.h"

void output_set_scale(struct synth_output *output, uint32_t res, const double mean[OUTPUT_CHANNELS_MAX],
                      const double deviation[OUTPUT_CHANNELS_MAX])
{
    double white = 255.0 * output_area(output->fit, res);
    for (int c = 0; c < OUTPUT_CHANNELS_MAX; c++) {
        output->scale[c] = (float)(1 / (white * deviation[c]));
        output->bias[c] = (float)(-mean[c] / deviation[c]);
    }
}

/* The canvas, or a square of it. */
static void convert_pixels(const struct synth_output *output, const uint8_t *canvas, size_t pitch,
                           struct output_corner corner, void *image)
{
    for (uint32_t y = 0; y < output->res; y++)
        for (uint32_t x = 0; x < output->res; x++)
            output_store(output, 1, canvas[(corner.y + y) * pitch + corner.x + x], y, x, image);
}

/* First the weighted sums down the columns of the rows that a row of the output covers, then along them. */
static void convert_areas(const struct synth_output *output, uint32_t res, const uint8_t *canvas,
                          size_t pitch, uint32_t *columns, void *image)
{
    const uint32_t area = output_area(OUTPUT_RESIZE, res);
    for (uint32_t y = 0; y < output->res; y++) {
        struct output_span rows = output_span(y, res, output->res);
        memset(columns, 0, res * sizeof *columns);
        for (uint32_t row = rows.first; row <= rows.last; row++) {
            uint32_t weight = output_weight(rows, output->res, row);
            for (uint32_t x = 0; x < res; x++)
                columns[x] += weight * canvas[row * pitch + x];
        }
        for (uint32_t x = 0; x < output->res; x++) {
            struct output_span span = output_span(x, res, output->res);
            uint64_t sum = 0;
            for (uint32_t i = span.first; i <= span.last; i++)
                sum += (uint64_t)output_weight(span, output->res, i) * columns[i];
            output_store(output, area, sum, y, x, image);
        }
    }
}

FDSL_FMA_CLONES void output_convert(const struct synth_output *output, uint32_t res, struct philox_key key,
                                    const uint8_t *canvas, size_t pitch, void *image)
{
    static const struct output_corner whole = {0, 0};
    uint32_t columns[OUTPUT_RES_MAX]; /* 64 KiB */
    if (output->fit == OUTPUT_RESIZE)
        convert_areas(output, res, canvas, pitch, columns, image);
    else
        convert_pixels(output, canvas, pitch,
                       output->fit == OUTPUT_CROP ? output_crop(key, res, output->res) : whole, image);
}
