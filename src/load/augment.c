#include "load/augment.h"

#include <string.h>

#include "core/half.h"

/* Converts part of a row of one channel to float. The `count` values start at index `first` and are `step`
 * values apart. */
static void row_values(const struct image *image, size_t first, size_t step, uint32_t count, float *values)
{
    if (image->type == DTYPE_U8)
        for (uint32_t x = 0; x < count; x++)
            values[x] = (float)image->pixels[first + x * step] * (1.0f / 255);
    for (uint32_t x = 0; image->type == DTYPE_F16 && x < count; x++) {
        uint16_t bits;
        memcpy(&bits, image->pixels + 2 * (first + x * step), sizeof bits);
        values[x] = half_to_float(bits);
    }
    if (image->type == DTYPE_F32)
        for (uint32_t x = 0; x < count; x++)
            memcpy(&values[x], image->pixels + 4 * (first + x * step), sizeof *values);
}

static void reverse(float *values, uint32_t count)
{
    for (uint32_t x = 0; x < count / 2; x++) {
        float value = values[x];
        values[x] = values[count - 1 - x];
        values[count - 1 - x] = value;
    }
}

/* Computes row `y` of one channel of the result, from row `y` + move.down of the image. */
static void augment_row(const struct augmentation *augmentation, const struct image *image,
                        struct draw_move move, uint32_t channel, int64_t y, float *row)
{
    int64_t source = y + move.down, width = image->width;
    int64_t begin = move.right < 0 ? -(int64_t)move.right : 0,
            end = move.right > 0 ? width - move.right : width;
    bool outside = source < 0 || source >= image->height || begin >= end;
    if (outside)
        begin = end = 0;
    for (int64_t x = 0; x < begin; x++)
        row[x] = 0;
    for (int64_t x = end; x < width; x++)
        row[x] = 0;
    if (!outside) {
        size_t step = image->interleaved ? image->channels : 1;
        size_t plane = image->interleaved ? channel : (size_t)channel * image->height * image->width;
        size_t first = plane + ((size_t)source * image->width + (size_t)(begin + move.right)) * step;
        row_values(image, first, step, (uint32_t)(end - begin), row + begin);
    }
    for (int64_t x = 0; x < width; x++)
        row[x] = (row[x] - augmentation->mean) * augmentation->scale;
    if (move.flip)
        reverse(row, image->width);
}

void image_augment(const struct augmentation *augmentation, const struct image *image, uint32_t epoch,
                   uint32_t sample, float *values)
{
    struct draw_move move = draw_move(&augmentation->move, augmentation->seed, epoch, sample);
    for (uint32_t c = 0; c < image->channels; c++)
        for (uint32_t y = 0; y < image->height; y++)
            augment_row(augmentation, image, move, c, y,
                        values + ((size_t)c * image->height + y) * image->width);
}
