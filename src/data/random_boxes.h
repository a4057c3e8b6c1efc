/* Random rectangles of images: random-resized-crop cuts them out, and random erasing fills them with noise.
 * All functions give the same bits on host and device: the only functions of a mathematical library that they
 * use are square roots, rounding and fmaf(), which IEEE 754 defines exactly. */
#ifndef FDSL_DATA_RANDOM_BOXES_H
#define FDSL_DATA_RANDOM_BOXES_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/philox.h"
#include "core/portable.h"
#include "data/random_draws.h"

#define BOX_ATTEMPTS      10
#define BOX_AREA_MIN      0.08
#define BOX_RATIO_LOG     0.28768207245178093 /* log(4/3) */
#define BOX_ERASED_MIN    0.02
#define BOX_ERASED_MAX    (1.0 / 3)
#define BOX_ERASED_LOG    1.2039728043259361 /* log(1/0.3) */
#define BOX_EXP_TERMS     24
#define BOX_NOISE_SCALE   0x1p-24f
#define BOX_LOG2          0.693147181f
#define BOX_SQRT_HALF_INT 0x3f3504f3u /* the bits of sqrt(1/2) as a float */

/* ---- Rectangles ---- */

/* The exponential function for |x| <= 2, by its series. */
FDSL_HD double box_exp(double x)
{
    double sum = 1;
    for (int n = BOX_EXP_TERMS; n > 0; n--)
        sum = 1 + sum * x / n;
    return sum;
}

FDSL_HD double box_between(uint32_t word, double low, double high)
{
    return low + (high - low) * (word * 0x1p-32);
}

/* Draws a rectangle in an image of width x height pixels. Its area, divided by the area of the image, is
 * uniform in range->scale, and the logarithm of its width / height is uniform in range->log_ratio. Returns
 * false if the rectangle does not fit. */
FDSL_HD bool box_draw(struct philox_block block, const struct crop_range *range, uint32_t width,
                      uint32_t height, struct image_box *box)
{
    double area = (double)width * height * box_between(block.word[0], range->scale[0], range->scale[1]);
    double ratio = box_exp(box_between(block.word[1], range->log_ratio[0], range->log_ratio[1]));
    double w = rint(sqrt(area * ratio)), h = rint(sqrt(area / ratio));
    if (!(w >= 1 && h >= 1 && w <= width && h <= height))
        return false;
    box->width = (uint32_t)w;
    box->height = (uint32_t)h;
    box->left = philox_below(block.word[2], width - box->width + 1);
    box->top = philox_below(block.word[3], height - box->height + 1);
    return true;
}

/* Returns the largest rectangle at the centre whose width / height is in `ratio`. */
FDSL_HD struct image_box box_central(const double *ratio, uint32_t width, uint32_t height)
{
    struct image_box box = {0, 0, width, height};
    const double widest = height * ratio[1] + 0.5, highest = width / ratio[0] + 0.5;
    if (widest < width)
        box.width = widest < 1 ? 1 : (uint32_t)widest;
    else if (highest < height)
        box.height = highest < 1 ? 1 : (uint32_t)highest;
    box.left = (width - box.width) / 2;
    box.top = (height - box.height) / 2;
    return box;
}

/* Returns the rectangle of random-resized-crop (image_fit_box() in data/image.h). Philox counter of each
 * attempt: attempt, sample, epoch. */
FDSL_HD struct image_box box_random_resized(const struct crop_range *range, uint64_t seed, uint32_t width,
                                            uint32_t height, uint32_t epoch, uint32_t sample)
{
    const struct crop_range plain = {{BOX_AREA_MIN, 1}, {3.0 / 4, 4.0 / 3}, {-BOX_RATIO_LOG, BOX_RATIO_LOG}};
    const struct crop_range *of = range->scale[1] > 0 ? range : &plain;
    struct image_box box;
    for (uint32_t attempt = 0; attempt < BOX_ATTEMPTS; attempt++) {
        struct philox_block block = philox(philox_key(seed), attempt, sample, epoch, DRAW_FIT);
        if (box_draw(block, of, width, height, &box))
            return box;
    }
    return box_central(of->ratio, width, height);
}

/* Draws the filter of a crop: returns whether it is bicubic. Counter: BOX_ATTEMPTS, sample, epoch. */
FDSL_HD bool box_bicubic(uint64_t seed, uint32_t epoch, uint32_t sample)
{
    return philox(philox_key(seed), BOX_ATTEMPTS, sample, epoch, DRAW_FIT).word[0] >> 31;
}

/* ---- Random erasing ---- */

/* Draws the rectangle that is erased, as timm does. Its area is between 2 % and a third of the image, the
 * ratio of its sides is between 0.3 and 1 / 0.3, and it is smaller than the image in both directions.
 * Counters: 0 to 9, sample, epoch for the attempts; 10, sample, epoch for the probability. */
FDSL_HD struct draw_erase box_erase(const struct augment *augment, uint64_t seed, uint32_t epoch,
                                    uint32_t sample)
{
    const struct crop_range range = {
        {BOX_ERASED_MIN, BOX_ERASED_MAX}, {0, 0}, {-BOX_ERASED_LOG, BOX_ERASED_LOG}};
    struct draw_erase erase = {{0, 0, 0, 0}, sample, epoch, seed};
    if (augment->erasing <= 0)
        return erase;
    struct philox_block block = philox(philox_key(seed), BOX_ATTEMPTS, sample, epoch, DRAW_ERASE);
    if (philox_unit(block.word[0]) >= augment->erasing)
        return erase;
    for (uint32_t attempt = 0; attempt < BOX_ATTEMPTS; attempt++) {
        struct image_box box;
        block = philox(philox_key(seed), attempt, sample, epoch, DRAW_ERASE);
        if (box_draw(block, &range, augment->width, augment->height, &box) && box.width < augment->width &&
            box.height < augment->height) {
            erase.box = box;
            return erase;
        }
    }
    return erase;
}

/* The natural logarithm of a positive normal number. */
FDSL_HD float box_log(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t exponent = (int32_t)(bits - BOX_SQRT_HALF_INT) >> 23;
    bits -= (uint32_t)exponent << 23; /* between sqrt(1/2) and sqrt(2) */
    memcpy(&x, &bits, sizeof x);
    float s = (x - 1) / (x + 1), z = s * s;
    float series = fmaf(z, fmaf(z, fmaf(z, fmaf(z, 1.0f / 9, 1.0f / 7), 1.0f / 5), 1.0f / 3), 1);
    return fmaf((float)exponent, BOX_LOG2, 2 * s * series);
}

/* Converts a random word to a value of the normal distribution with mean 0 and standard deviation 1: the
 * inverse of its distribution function, by Giles, "Approximating the erfinv function", 2010. */
FDSL_HD float box_normal(uint32_t word)
{
    float x = (float)((int32_t)(2 * (word >> 8) + 1) - (1 << 24)) * BOX_NOISE_SCALE; /* -1 < x < 1 */
    float w = -box_log((1 - x) * (1 + x)), p;
    if (w < 5) {
        w -= 2.5f;
        p = fmaf(2.81022636e-08f, w, 3.43273939e-07f);
        p = fmaf(p, w, -3.5233877e-06f);
        p = fmaf(p, w, -4.39150654e-06f);
        p = fmaf(p, w, 0.00021858087f);
        p = fmaf(p, w, -0.00125372503f);
        p = fmaf(p, w, -0.00417768164f);
        p = fmaf(p, w, 0.246640727f);
        p = fmaf(p, w, 1.50140941f);
    } else {
        w = sqrtf(w) - 3;
        p = fmaf(-0.000200214257f, w, 0.000100950558f);
        p = fmaf(p, w, 0.00134934322f);
        p = fmaf(p, w, -0.00367342844f);
        p = fmaf(p, w, 0.00573950773f);
        p = fmaf(p, w, -0.0076224613f);
        p = fmaf(p, w, 0.00943887047f);
        p = fmaf(p, w, 1.00167406f);
        p = fmaf(p, w, 2.83297682f);
    }
    return 1.41421356f * (p * x);
}

/* Draws the noise of elements i / 4 * 4 to i / 4 * 4 + 3 of a sample. Counter: i / 4, sample, epoch. */
FDSL_HD struct philox_block box_noise(const struct draw_erase *erase, uint32_t i)
{
    return philox(philox_key(erase->seed), i / 4, erase->sample, erase->epoch, DRAW_NOISE);
}

/* Returns the normalised value of element `i` of a sample, which is at (y, x), after random erasing. */
FDSL_HD float box_erased(const struct draw_erase *erase, uint32_t y, uint32_t x, uint32_t i, float value)
{
    if (y - erase->box.top >= erase->box.height || x - erase->box.left >= erase->box.width)
        return value;
    return box_normal(philox_word(box_noise(erase, i), i % 4));
}

/* Returns how a sample is shifted and mirrored, and its rectangle of random erasing. */
FDSL_HD struct draw_move box_move(const struct augment *augment, uint64_t seed, uint32_t epoch,
                                  uint32_t sample)
{
    struct draw_move move = draw_move(augment, seed, epoch, sample);
    move.erase = box_erase(augment, seed, epoch, sample);
    return move;
}

#endif
