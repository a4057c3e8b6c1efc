/* RandAugment: operations on images of bytes, channels first, with a depth of 1. The host and the device
 * share the functions below. Their arithmetic is in integers, float or double, in a fixed order. The Makefile
 * forbids compilers to contract a * b + c to an FMA, so both give the same bits. */
#ifndef FDSL_DATA_RAND_AUGMENT_H
#define FDSL_DATA_RAND_AUGMENT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/batch.h"
#include "core/philox.h"
#include "core/portable.h"
#include "data/random_draws.h"

#define AUGMENT_CHANNELS_MAX  3
#define AUGMENT_MAGNITUDE_MAX 30
#define AUGMENT_LEVELS        256

/* The operations of RandAugment. Each is equally likely. */
enum augment_operation {
    AUGMENT_IDENTITY,
    AUGMENT_SHEAR_X,
    AUGMENT_SHEAR_Y,
    AUGMENT_TRANSLATE_X,
    AUGMENT_TRANSLATE_Y,
    AUGMENT_ROTATE,
    AUGMENT_BRIGHTNESS,
    AUGMENT_COLOR,
    AUGMENT_CONTRAST,
    AUGMENT_SHARPNESS,
    AUGMENT_POSTERIZE,
    AUGMENT_SOLARIZE,
    AUGMENT_AUTOCONTRAST,
    AUGMENT_EQUALIZE,
    AUGMENT_OPERATIONS
};

/* The constants of an operation at the magnitude of a run. */
struct augment_numbers {
    float map[6];   /* shear, translate, rotate: output (x, y) is the input at (map[0] x + map[1] y + map[2],
                       map[3] x + map[4] y + map[5]) */
    float factor;   /* brightness, color, contrast, sharpness */
    uint32_t mask;  /* posterize: mask of the bits that are kept */
    float at_least; /* solarize: this and larger values are inverted */
};

struct rand_augment {
    uint32_t operations;                                   /* per image; 0: none */
    struct augment_numbers numbers[AUGMENT_OPERATIONS][2]; /* per operation and sign */
};

/* Draws operation `i` of a sample and its sign. The Philox counter is (i, sample, epoch). */
FDSL_HD enum augment_operation rand_augment_draw(const struct rand_augment *rand, uint64_t seed,
                                                 uint32_t epoch, uint32_t sample, uint32_t i,
                                                 const struct augment_numbers **numbers)
{
    struct philox_block block = philox(philox_key(seed), i, sample, epoch, DRAW_CHANGE);
    uint32_t operation = philox_below(block.word[0], AUGMENT_OPERATIONS);
    *numbers = &rand->numbers[operation][block.word[1] >> 31];
    return (enum augment_operation)operation;
}

/* ---- Rounding ---- */

/* The floats from 2^23 to 2^24 are exactly the integers in this range. Adding 1.5 * 2^23 to a value below
 * 2^22 therefore rounds it to the nearest integer, ties to even, and leaves this integer in the low bits of
 * the sum. On GPUs, additions have a higher throughput than conversions between floats and integers. */
#define AUGMENT_ROUNDER 12582912.0f

FDSL_HD int32_t augment_nearest(float value)
{
    const float sum = value + AUGMENT_ROUNDER, zero = AUGMENT_ROUNDER;
    int32_t bits, zero_bits;
    memcpy(&bits, &sum, sizeof bits);
    memcpy(&zero_bits, &zero, sizeof zero_bits);
    return bits - zero_bits;
}

/* Returns the largest integer that is not above `value`. */
FDSL_HD float augment_floor(float value)
{
    const float nearest = value + AUGMENT_ROUNDER - AUGMENT_ROUNDER;
    return nearest > value ? nearest - 1 : nearest;
}

/* Converts an integer below 2^23. */
FDSL_HD float augment_float(uint32_t integer)
{
    const uint32_t bits = 0x4b000000u | integer; /* 2^23 + integer */
    float sum;
    memcpy(&sum, &bits, sizeof sum);
    return sum - 8388608.0f;
}

/* Returns the float that is closest to integer / 13: a product with the rounded 1 / 13, then one step of
 * Newton's method. A division would take more instructions. `integer` is at most 13 * 255. */
FDSL_HD float augment_thirteenth(uint32_t integer)
{
    const float value = augment_float(integer), product = value * (1.0f / 13);
    return fmaf(fmaf(-13, product, value), 1.0f / 13, product);
}

FDSL_HD uint8_t augment_rounded(float value)
{
    return (uint8_t)augment_nearest(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* ---- Operations on single values ---- */

/* Moves a value away from `other` (factor > 1) or towards it (factor < 1). */
FDSL_HD uint8_t augment_blend(float factor, float value, float other)
{
    return augment_rounded(fmaf(factor, value - other, other));
}

FDSL_HD float augment_gray(float red, float green, float blue)
{
    return fmaf(0.114f, blue, fmaf(0.587f, green, 0.299f * red));
}

/* Returns whether the operation maps each value of a channel by a table, the same for every pixel. */
FDSL_HD bool augment_has_table(enum augment_operation operation)
{
    return operation == AUGMENT_BRIGHTNESS || operation == AUGMENT_CONTRAST || operation >= AUGMENT_POSTERIZE;
}

/* Returns whether the operation's table depends on how often each value occurs. */
FDSL_HD bool augment_counts(enum augment_operation operation)
{
    return operation == AUGMENT_CONTRAST || operation >= AUGMENT_AUTOCONTRAST;
}

/* Returns whether the operation moves pixels. */
FDSL_HD bool augment_warps(enum augment_operation operation)
{
    return operation >= AUGMENT_SHEAR_X && operation <= AUGMENT_ROTATE;
}

/* Statistics of a channel, from which the table of its values is computed. */
struct augment_channel {
    uint32_t least, most; /* smallest and largest value that occurs */
    uint32_t step;        /* equalize: pixels per output level, see augment_equalize_step() */
    float mean;           /* contrast: mean gray of the image */
};

/* Returns the pixels per output level of equalize, as in Pillow. `most_count` is the number of pixels with
 * the largest value. */
FDSL_HD uint32_t augment_equalize_step(uint32_t pixels, uint32_t most_count)
{
    return (pixels - most_count) / 255;
}

/* Mean gray of an image. `sums` has the sum of the values of each channel. */
FDSL_HD float augment_mean(const uint32_t *sums, uint32_t channels, uint32_t pixels)
{
    double sum = channels == 1 ? sums[0] : 0.299 * sums[0] + 0.587 * sums[1] + 0.114 * sums[2];
    return (float)(sum / pixels);
}

/* Returns entry `value` of the table of a channel. `below` is the number of pixels with a smaller value. */
FDSL_HD uint8_t augment_entry(enum augment_operation operation, const struct augment_numbers *numbers,
                              const struct augment_channel *channel, uint32_t value, uint32_t below)
{
    switch (operation) {
    case AUGMENT_BRIGHTNESS:
        return augment_blend(numbers->factor, (float)value, 0);
    case AUGMENT_CONTRAST:
        return augment_blend(numbers->factor, (float)value, channel->mean);
    case AUGMENT_POSTERIZE:
        return (uint8_t)(value & numbers->mask);
    case AUGMENT_SOLARIZE:
        return (uint8_t)((float)value >= numbers->at_least ? 255 - value : value);
    case AUGMENT_AUTOCONTRAST:
        if (channel->most <= channel->least || value < channel->least || value > channel->most)
            return (uint8_t)value;
        return augment_rounded((float)((value - channel->least) * 255) /
                               (float)(channel->most - channel->least));
    case AUGMENT_EQUALIZE:
        if (channel->step == 0)
            return (uint8_t)value;
        value = (below + channel->step / 2) / channel->step;
        return (uint8_t)(value > 255 ? 255 : value);
    default:
        return (uint8_t)value;
    }
}

/* ---- Operations on planes: height x width values of one channel ---- */

/* The operation color: returns the new value of channel `c` of the pixel at index `i`. */
FDSL_HD uint8_t augment_color(const uint8_t *image, const struct shape *shape, uint32_t c, uint32_t i,
                              float factor)
{
    uint32_t plane = shape->height * shape->width;
    float value = image[c * plane + i];
    if (shape->channels == 1)
        return (uint8_t)value;
    return augment_blend(factor, value, augment_gray(image[i], image[plane + i], image[2 * plane + i]));
}

/* Returns the sharpened value. `sum` is the sum of the values of the 3 x 3 neighbourhood, with weight 5 for
 * the value itself and weight 1 for the others. */
FDSL_HD uint8_t augment_sharpened(float factor, uint32_t value, uint32_t sum)
{
    return augment_blend(factor, augment_float(value), augment_thirteenth(sum));
}

/* The operation sharpness: returns the new value of one pixel. Border pixels do not change. */
FDSL_HD uint8_t augment_sharp(const uint8_t *plane, uint32_t height, uint32_t width, uint32_t y, uint32_t x,
                              float factor)
{
    const uint8_t *at = plane + (size_t)y * width + x;
    if (y == 0 || x == 0 || y + 1 >= height || x + 1 >= width)
        return *at;
    const uint8_t *up = at - width, *down = at + width;
    uint32_t sum =
        up[-1] + up[0] + up[1] + at[-1] + 5u * at[0] + at[1] + (uint32_t)down[-1] + down[0] + down[1];
    return augment_sharpened(factor, *at, sum);
}

/* Returns the value at (x, y) of a plane, or 0 (black) outside the plane. */
FDSL_HD uint32_t augment_at(const uint8_t *plane, uint32_t height, uint32_t width, int32_t y, int32_t x)
{
    return (uint32_t)y < height && (uint32_t)x < width ? plane[(uint32_t)y * width + (uint32_t)x] : 0;
}

/* Interpolates between two adjacent values. `share` is the weight of `next`, from 0 to 1. */
FDSL_HD float augment_between(float value, float next, float share)
{
    return fmaf(share, next - value, value);
}

/* Shears, translations and rotations: returns the new value of one pixel, with bilinear interpolation. An
 * interpolated value is never outside 0 to 255. */
FDSL_HD uint8_t augment_warped(const uint8_t *plane, uint32_t height, uint32_t width, uint32_t y, uint32_t x,
                               const float *map)
{
    float from_x = fmaf(map[0], (float)x, fmaf(map[1], (float)y, map[2]));
    float from_y = fmaf(map[3], (float)x, fmaf(map[4], (float)y, map[5]));
    float left = augment_floor(from_x), top = augment_floor(from_y);
    if (left < -1 || top < -1 || left >= (float)width || top >= (float)height)
        return 0;
    int32_t column = augment_nearest(left), row = augment_nearest(top);
    float above =
        augment_between(augment_float(augment_at(plane, height, width, row, column)),
                        augment_float(augment_at(plane, height, width, row, column + 1)), from_x - left);
    float below =
        augment_between(augment_float(augment_at(plane, height, width, row + 1, column)),
                        augment_float(augment_at(plane, height, width, row + 1, column + 1)), from_x - left);
    return (uint8_t)augment_nearest(augment_between(above, below, from_y - top));
}

FDSL_C_BEGIN

/* Applies one operation to the image `from` of this shape. `to` must be another array. */
void augment_apply(const struct shape *shape, enum augment_operation operation,
                   const struct augment_numbers *numbers, const uint8_t *from, uint8_t *to);

/* Computes the numbers of an operation at a magnitude from 0 to AUGMENT_MAGNITUDE_MAX, for images of this
 * shape. */
struct augment_numbers augment_numbers(enum augment_operation operation, bool negative, double magnitude,
                                       const struct shape *shape);

/* Prepares `operations` operations per image of this shape, with a magnitude as above. */
void rand_augment_set(struct rand_augment *rand, uint32_t operations, double magnitude,
                      const struct shape *shape);

/* Applies the operations that rand_augment_draw() draws to an image. `other` has room for another image. */
void rand_augment_apply(const struct rand_augment *rand, const struct shape *shape, uint64_t seed,
                        uint32_t epoch, uint32_t sample, uint8_t *image, uint8_t *other);

FDSL_C_END

#endif
