/* RandAugment: operations on images of bytes, channels first, with a depth of 1. The host and the device
 * share the functions below. Their arithmetic is in integers, float or double, in a fixed order. The Makefile
 * forbids compilers to contract a * b + c to an FMA, so both give the same bits. */
#ifndef FDSL_DATA_RAND_AUGMENT_H
#define FDSL_DATA_RAND_AUGMENT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"
#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/random_boxes.h"
#include "data/random_draws.h"

#define AUGMENT_CHANNELS_MAX  3
#define AUGMENT_MAGNITUDE_MAX 30
#define AUGMENT_LEVELS        256
#define AUGMENT_ADD_BELOW     128 /* solarize-add changes smaller values */
#define AUGMENT_SINE_TERMS    12
#define AUGMENT_TIMM_MAX                                                              \
    100 /* largest magnitude of timm's operations: rotates by 5.2, see augment_sine() \
         */

/* The operations of RandAugment. AUGMENT_TORCHVISION draws the first AUGMENT_OLD of them, each with the same
 * probability; augment_policy says what the other policies draw. */
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
    AUGMENT_INVERT,
    AUGMENT_SOLARIZE_ADD,
    AUGMENT_OPERATIONS,
    AUGMENT_OLD = AUGMENT_INVERT
};

/* How shears, translations and rotations interpolate, and what a pixel gets that comes from outside. */
enum augment_filter {
    AUGMENT_BLEND,    /* bilinear, with `fill` around the image, as torchvision resamples tensors */
    AUGMENT_NEAREST,  /* the nearest pixel, or `fill` */
    AUGMENT_BILINEAR, /* Pillow: `fill` if the position is outside; the border pixels continue outside */
    AUGMENT_BICUBIC   /* Pillow: the same, with the bicubic filter of a = -1 */
};

/* Whether an operation is applied, and with which sign. */
enum augment_strength { AUGMENT_PLUS, AUGMENT_MINUS, AUGMENT_OFF };

/* The constants of an operation. */
struct augment_numbers {
    float map[6];   /* shear, translate, rotate: output (x, y) is the input at (map[0] x + map[1] y + map[2],
                       map[3] x + map[4] y + map[5]) */
    float factor;   /* brightness, color, contrast, sharpness */
    uint32_t mask;  /* posterize: mask of the bits that are kept */
    float at_least; /* solarize: this and larger values are inverted */
    uint32_t add;   /* solarize-add: this is added to values below AUGMENT_ADD_BELOW */
    enum augment_filter filter;
    uint32_t fill; /* one byte per channel, that of channel 0 lowest; see augment_filter */
};

struct rand_augment {
    uint32_t operations; /* per image; 0: none */
    double magnitude;    /* 0 to 30; AUGMENT_TIMM: 0 to policy.limit */
    struct augment_policy policy;
};

FDSL_HD uint32_t augment_fill(const struct augment_numbers *numbers, uint32_t channel)
{
    return numbers->fill >> 8 * channel & 255u;
}

/* ---- Draws ---- */

/* The sine (`odd`) or the cosine, by its series. The error is below 1e-16 for |x| <= 2, and 2e-8 for |x| <=
 * 5.3. */
FDSL_HD double augment_sine(double x, bool odd)
{
    double sum = 1;
    for (int n = 2 * AUGMENT_SINE_TERMS + odd; n > 1; n -= 2)
        sum = 1 - sum * x * x / (n * (n - 1));
    return odd ? x * sum : sum;
}

/* Sets the map of a shear, translation or rotation. `sign` is the signed share of the largest magnitude.
 * Angles of rotations are positive counterclockwise. Shears leave the top left corner of the image in place.
 */
FDSL_HD void augment_set_map(enum augment_operation operation, enum augment_policy_kind policy, double sign,
                             const struct shape *shape, float map[6])
{
    const double width = shape->width, height = shape->height,
                 side = operation == AUGMENT_TRANSLATE_X ? width : height;
    const double middle_x = (width - 1) / 2, middle_y = (height - 1) / 2;
    const double shear = 0.3 * sign, angle = -sign * 30 * 3.14159265358979323846 / 180;
    const double sine = augment_sine(angle, true), cosine = augment_sine(angle, false);
    double move = policy == AUGMENT_TIMM ? 0.45 * sign * side : -150.0 / 331 * sign * side;
    if (policy == AUGMENT_PDP2026)
        move = (int32_t)move;
    switch (operation) {
    case AUGMENT_SHEAR_X:
        map[1] = (float)shear;
        map[2] = (float)(shear / 2);
        break;
    case AUGMENT_SHEAR_Y:
        map[3] = (float)shear;
        map[5] = (float)(shear / 2);
        break;
    case AUGMENT_TRANSLATE_X:
        map[2] = (float)move;
        break;
    case AUGMENT_TRANSLATE_Y:
        map[5] = (float)move;
        break;
    case AUGMENT_ROTATE:
        map[0] = map[4] = (float)cosine;
        map[1] = (float)sine;
        map[3] = (float)-sine;
        map[2] = (float)(middle_x - cosine * middle_x - sine * middle_y);
        map[5] = (float)(middle_y + sine * middle_x - cosine * middle_y);
        break;
    default:
        break;
    }
}

/* Returns the numbers of timm's levels: `share` is the level divided by 10, `sign` has the sign as well. */
FDSL_HD void augment_set_levels(bool increasing, double share, double sign, struct augment_numbers *numbers)
{
    const int32_t bits = increasing ? 4 - (int32_t)(share * 4) : (int32_t)(share * 4);
    const int32_t above = (int32_t)(share * 256);
    const double factor = increasing ? 1 + 0.9 * sign : 0.1 + 1.8 * share;
    numbers->factor = (float)(factor < 0.1 ? 0.1 : factor);
    numbers->mask = bits < 0 ? 0 : bits > 8 ? 255u : 255u << (8 - bits);
    numbers->at_least = (float)(increasing ? 256 - above : above);
    numbers->add = (uint32_t)(share * 110);
}

/* Computes the numbers of an operation at a magnitude, for images of this shape. At AUGMENT_OFF, posterize
 * and solarize of AUGMENT_PDP2026 get the magnitude 0 of the published class: posterize clears all bits, and
 * solarize inverts all values. */
FDSL_HD struct augment_numbers augment_numbers(const struct augment_policy *policy,
                                               enum augment_operation operation,
                                               enum augment_strength strength, double magnitude,
                                               const struct shape *shape)
{
    const bool timm = policy->kind == AUGMENT_TIMM, off = strength == AUGMENT_OFF;
    const double share = off ? 0 : magnitude / (timm ? AUGMENT_TIMM_UNIT : AUGMENT_MAGNITUDE_MAX);
    const double sign = strength == AUGMENT_MINUS ? -share : share;
    struct augment_numbers numbers = {{1, 0, 0, 0, 1, 0}, (float)(1 + 0.9 * sign), 0, 0, 0, AUGMENT_BLEND, 0};
    if (timm) {
        augment_set_levels(policy->increasing, share, sign, &numbers);
    } else {
        numbers.mask = off && policy->kind == AUGMENT_PDP2026 ? 0 : 255u << (uint32_t)(4 * share + 0.5);
        numbers.at_least = off && policy->kind == AUGMENT_PDP2026 ? 0 : (float)(255 * (1 - share));
    }
    if (policy->kind != AUGMENT_TORCHVISION)
        numbers.filter = timm ? policy->bicubic ? AUGMENT_BICUBIC : AUGMENT_BILINEAR : AUGMENT_NEAREST;
    for (uint32_t c = 0; c < AUGMENT_CHANNELS_MAX; c++)
        numbers.fill |= (uint32_t)policy->fill[c] << 8 * c;
    augment_set_map(operation, policy->kind, sign, shape, numbers.map);
    return numbers;
}

/* Returns the magnitude of an operation. With a deviation, it is normal around rand->magnitude, or uniform
 * from 0 to rand->magnitude if the deviation is infinite, as in timm. */
FDSL_HD double augment_magnitude(const struct rand_augment *rand, uint32_t word)
{
    const struct augment_policy *policy = &rand->policy;
    double magnitude = rand->magnitude;
    if (policy->deviation > AUGMENT_DEVIATION_MAX)
        magnitude *= word * 0x1p-32;
    else if (policy->deviation > 0)
        magnitude += policy->deviation * (double)box_normal(word);
    if (policy->kind != AUGMENT_TIMM)
        return magnitude;
    return magnitude < 0 ? 0 : magnitude > policy->limit ? policy->limit : magnitude;
}

/* Draws operation `i` of a sample, and computes its numbers. The Philox counter is (i, sample, epoch). */
FDSL_HD enum augment_operation rand_augment_draw(const struct rand_augment *rand, const struct shape *shape,
                                                 uint64_t seed, uint32_t epoch, uint32_t sample, uint32_t i,
                                                 struct augment_numbers *numbers)
{
    const struct philox_block block = philox(philox_key(seed), i, sample, epoch, DRAW_CHANGE);
    const enum augment_policy_kind kind = rand->policy.kind;
    const bool off = kind != AUGMENT_TORCHVISION && block.word[2] * 0x1p-32 >= rand->policy.probability;
    const enum augment_strength strength = off                   ? AUGMENT_OFF
                                           : block.word[1] >> 31 ? AUGMENT_MINUS
                                                                 : AUGMENT_PLUS;
    struct augment_policy policy = rand->policy;
    enum augment_operation operation = (enum augment_operation)philox_below(
        block.word[0], kind == AUGMENT_TORCHVISION ? AUGMENT_OLD : AUGMENT_OLD + 1);
    if (kind == AUGMENT_TIMM) /* solarize-add instead of the identity */
        operation = off ? AUGMENT_IDENTITY : operation == AUGMENT_IDENTITY ? AUGMENT_SOLARIZE_ADD : operation;
    if (policy.random_filter)
        policy.bicubic = block.word[1] >> 30 & 1u;
    *numbers = augment_numbers(&policy, operation, strength, augment_magnitude(rand, block.word[3]), shape);
    return operation;
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
    return operation == AUGMENT_CONTRAST || operation == AUGMENT_AUTOCONTRAST ||
           operation == AUGMENT_EQUALIZE;
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
    case AUGMENT_INVERT:
        return (uint8_t)(255 - value);
    case AUGMENT_SOLARIZE_ADD:
        if (value >= AUGMENT_ADD_BELOW)
            return (uint8_t)value;
        return (uint8_t)(value + numbers->add > 255 ? 255 : value + numbers->add);
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

/* Returns the value at (x, y) of a plane whose rows are `pitch` bytes apart, or `fill` outside the plane. */
FDSL_HD uint32_t augment_at(const uint8_t *plane, uint32_t pitch, const struct shape *shape, uint32_t fill,
                            int32_t y, int32_t x)
{
    return (uint32_t)y < shape->height && (uint32_t)x < shape->width
               ? plane[(uint32_t)y * pitch + (uint32_t)x]
               : fill;
}

/* Interpolates between two adjacent values. `share` is the weight of `next`, from 0 to 1. */
FDSL_HD float augment_between(float value, float next, float share)
{
    return fmaf(share, next - value, value);
}

/* Interpolates between the second and the third of four adjacent values by a cubic polynomial, as Pillow
 * does. */
FDSL_HD float augment_cubic(const float value[4], float share)
{
    const float linear = value[2] - value[0];
    const float square = 2 * (value[0] - value[1]) + value[2] - value[3];
    const float cube = value[1] - value[0] + value[3] - value[2];
    return fmaf(share, fmaf(share, fmaf(share, cube, square), linear), value[1]);
}

/* Bilinear interpolation with `fill` around the image. An interpolated value is never outside 0 to 255. */
FDSL_HD uint8_t augment_blended(const uint8_t *plane, uint32_t pitch, const struct shape *shape,
                                uint32_t fill, float from_y, float from_x)
{
    const float left = augment_floor(from_x), top = augment_floor(from_y);
    if (left < -1 || top < -1 || left >= (float)shape->width || top >= (float)shape->height)
        return (uint8_t)fill;
    const int32_t column = augment_nearest(left), row = augment_nearest(top);
    float line[2];
    for (int32_t r = 0; r < 2; r++)
        line[r] = augment_between(augment_float(augment_at(plane, pitch, shape, fill, row + r, column)),
                                  augment_float(augment_at(plane, pitch, shape, fill, row + r, column + 1)),
                                  from_x - left);
    return (uint8_t)augment_nearest(augment_between(line[0], line[1], from_y - top));
}

FDSL_HD uint32_t augment_clamped(int32_t index, uint32_t count)
{
    return index < 0 ? 0 : (uint32_t)index < count ? (uint32_t)index : count - 1;
}

/* Interpolates at a position inside of the image as Pillow does: results are rounded down. */
FDSL_HD uint8_t augment_pillow(const uint8_t *plane, uint32_t pitch, const struct shape *shape, bool bicubic,
                               float from_y, float from_x)
{
    const float left = augment_floor(from_x), top = augment_floor(from_y);
    const int32_t before = bicubic ? 1 : 0, taps = bicubic ? 4 : 2;
    const int32_t column = augment_nearest(left) - before, row = augment_nearest(top) - before;
    float down[4] = {0, 0, 0, 0}, across[4] = {0, 0, 0, 0};
    for (int32_t r = 0; r < taps; r++) {
        const uint8_t *line = plane + augment_clamped(row + r, shape->height) * pitch;
        for (int32_t t = 0; t < taps; t++)
            across[t] = augment_float(line[augment_clamped(column + t, shape->width)]);
        down[r] = bicubic ? augment_cubic(across, from_x - left)
                          : augment_between(across[0], across[1], from_x - left);
    }
    const float value =
        bicubic ? augment_cubic(down, from_y - top) : augment_between(down[0], down[1], from_y - top);
    return (uint8_t)(value <= 0 ? 0 : value >= 255 ? 255 : (uint32_t)value);
}

/* Shears, translations and rotations: returns the new value of one pixel of a plane whose rows are `pitch`
 * bytes apart. */
FDSL_HD uint8_t augment_warped(const uint8_t *plane, uint32_t pitch, const struct shape *shape, uint32_t c,
                               uint32_t y, uint32_t x, const struct augment_numbers *numbers)
{
    const float *map = numbers->map;
    const float from_x = fmaf(map[0], (float)x, fmaf(map[1], (float)y, map[2]));
    const float from_y = fmaf(map[3], (float)x, fmaf(map[4], (float)y, map[5]));
    const uint32_t fill = augment_fill(numbers, c);
    if (numbers->filter == AUGMENT_BLEND)
        return augment_blended(plane, pitch, shape, fill, from_y, from_x);
    if (numbers->filter == AUGMENT_NEAREST)
        return (uint8_t)augment_at(plane, pitch, shape, fill, augment_nearest(from_y),
                                   augment_nearest(from_x));
    if (from_x < -0.5f || from_y < -0.5f || from_x >= (float)shape->width - 0.5f ||
        from_y >= (float)shape->height - 0.5f)
        return (uint8_t)fill;
    return augment_pillow(plane, pitch, shape, numbers->filter == AUGMENT_BICUBIC, from_y, from_x);
}

FDSL_C_BEGIN

/* Applies one operation to the image `from` of this shape. `to` must be another array. */
void augment_apply(const struct shape *shape, enum augment_operation operation,
                   const struct augment_numbers *numbers, const uint8_t *from, uint8_t *to);

/* Parses a policy of RandAugment:
 *
 *     28                              torchvision's operations at this magnitude
 *     pdp2026, pdp2026-m28            those of the class in the PDP 2026 scripts (default: 28)
 *     rand-m9-mstd0.5-inc1            timm's; the parts are m, n, mstd, mmax, inc and p, in any order
 *
 * Sets everything but the fill and the filter of timm's operations. Without n, does not change
 * rand->operations. STATUS_USAGE if the text is no policy; the message begins with `name`. */
enum status rand_augment_parse(const char *name, const char *text, struct rand_augment *rand);

/* Applies the operations that rand_augment_draw() draws to an image. `other` has room for another image. */
void rand_augment_apply(const struct rand_augment *rand, const struct shape *shape, uint64_t seed,
                        uint32_t epoch, uint32_t sample, uint8_t *image, uint8_t *other);

FDSL_C_END

#endif
