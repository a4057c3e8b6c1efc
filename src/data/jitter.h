/* Colour jitter, random grayscale and Gaussian blur of images of bytes, channels first. Clips have the same
 * changes in all frames. The order of the changes is: jitter, grayscale, blur.
 *
 * Brightness, contrast, saturation and grayscale have the values of Pillow's ImageEnhance and convert("L"),
 * which torchvision uses for PIL images. Hue has the formulas of torchvision for tensors. The blur is that of
 * torchvision, with weights of 14 bits and borders that are reflected; its values differ by at most 1 from
 * those of exact arithmetic. Images of one channel have no saturation and hue.
 *
 * Host and device share the functions below. Their arithmetic is in integers, float or double, in a fixed
 * order, without contraction to an FMA, so both give the same bits. */
#ifndef FDSL_DATA_JITTER_H
#define FDSL_DATA_JITTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/philox.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/rand_augment.h"
#include "data/random_boxes.h"
#include "data/random_draws.h"

#define JITTER_FACTOR_MAX 10.0
#define JITTER_HUE_MAX    0.5
#define JITTER_SIGMA_MIN  0.01
#define JITTER_SIGMA_MAX  100.0
#define JITTER_RADIUS_MAX 31
#define JITTER_KERNEL_MAX (2 * JITTER_RADIUS_MAX + 1)

enum jitter_step { JITTER_BRIGHTNESS, JITTER_CONTRAST, JITTER_SATURATION, JITTER_HUE };

/* The changes of one image. */
struct jitter_drawn {
    uint8_t order[JITTER_STEPS]; /* enum jitter_step of the first `steps` entries */
    uint8_t steps;
    uint8_t contrast; /* index of JITTER_CONTRAST in `order`; `steps`: it is not there */
    bool gray, blurs;
    float factors[JITTER_STEPS]; /* per enum jitter_step; of the hue in sixths of a turn */
    double sigma;
};

/* ---- Random numbers ---- */

/* Draws the changes of a sample. Counters: 0, sample, epoch for the probabilities and sigma; 1, sample, epoch
 * for the factors; 2, sample, epoch for the order. */
FDSL_HD struct jitter_drawn jitter_draw(const struct jitter *jitter, uint64_t seed, uint32_t epoch,
                                        uint32_t sample)
{
    const struct philox_block first = philox(philox_key(seed), 0, sample, epoch, DRAW_JITTER);
    const struct philox_block second = philox(philox_key(seed), 1, sample, epoch, DRAW_JITTER);
    const struct philox_block third = philox(philox_key(seed), 2, sample, epoch, DRAW_JITTER);
    struct jitter_drawn drawn = {{0}, 0, 0, false, false, {0}, 0};
    const bool adjusts = philox_unit(first.word[0]) < jitter->probability;
    uint32_t rest = philox_below(third.word[0], 24), left[JITTER_STEPS] = {0, 1, 2, 3};
    for (uint32_t i = 0; i < JITTER_STEPS; i++) { /* a digit of the factorial number system per step */
        const uint32_t at = rest % (JITTER_STEPS - i), step = left[at];
        rest /= JITTER_STEPS - i;
        for (uint32_t k = at; k + 1 < JITTER_STEPS - i; k++)
            left[k] = left[k + 1];
        if (adjusts && jitter_step_on(jitter, step))
            drawn.order[drawn.steps++] = (uint8_t)step;
    }
    drawn.contrast = drawn.steps;
    for (uint32_t i = 0; i < drawn.steps; i++)
        if (drawn.order[i] == JITTER_CONTRAST)
            drawn.contrast = (uint8_t)i;
    for (uint32_t step = 0; step < JITTER_STEPS; step++)
        drawn.factors[step] = (float)(box_between(second.word[step], jitter->low[step], jitter->high[step]) *
                                      (step == JITTER_HUE ? 6 : 1));
    drawn.gray = philox_unit(first.word[1]) < jitter->grayscale;
    drawn.blurs = philox_unit(first.word[2]) < jitter->blur;
    drawn.sigma = box_between(first.word[3], jitter->sigma_min, jitter->sigma_max);
    return drawn;
}

/* ---- Pixels ---- */

/* A pixel; its values are integers. Images of one channel use only of[0]. */
struct jitter_pixel {
    float of[3];
};

/* Moves a value away from `other` (factor > 1) or towards it (factor < 1), and rounds it down. */
FDSL_HD float jitter_blend(float factor, float value, float other)
{
    const float blended = other + factor * (value - other);
    return augment_floor(blended < 0 ? 0 : blended > 255 ? 255 : blended);
}

/* Returns the gray of a pixel: its luma, rounded to the nearest integer. All sums are below 2^24, so they are
 * exact. */
FDSL_HD float jitter_gray(const struct jitter_pixel *pixel, uint32_t channels)
{
    if (channels == 1)
        return pixel->of[0];
    return augment_floor((19595 * pixel->of[0] + 38470 * pixel->of[1] + 7471 * pixel->of[2] + 32768) *
                         (1.0f / 65536));
}

/* Returns the mean gray of an image, rounded to the nearest integer. */
FDSL_HD float jitter_mean(uint64_t sum, uint32_t pixels)
{
    return augment_float((uint32_t)((2 * sum + pixels) / (2 * (uint64_t)pixels)));
}

/* Turns the hue of a pixel, with the same value and saturation in HSV. torchvision converts a share of 1 to a
 * byte by multiplication with 255.999. */
FDSL_HD void jitter_turn(float sixths, struct jitter_pixel *pixel)
{
    const float red = pixel->of[0], green = pixel->of[1], blue = pixel->of[2];
    const float larger = green > blue ? green : blue, smaller = green > blue ? blue : green;
    const float most = red > larger ? red : larger, least = red < smaller ? red : smaller;
    const float range = most - least, scale = 255.999f / 255;
    if (range == 0)
        return;
    const float difference = most == red ? green - blue : most == green ? blue - red : red - green;
    float hue = difference / range + (most == red ? 0.0f : most == green ? 2.0f : 4.0f) + sixths;
    hue = hue < 0 ? hue + 6 : hue >= 6 ? hue - 6 : hue;
    const float sector = augment_floor(hue), share = hue - sector;
    const float falling = augment_floor((most - range * share) * scale);
    const float rising = augment_floor((most - range * (1 - share)) * scale);
    const int32_t at = augment_nearest(sector); /* 0 to 6; 6 is 0, if an addition above was rounded */
    pixel->of[0] = at == 1 ? falling : at == 2 || at == 3 ? least : at == 4 ? rising : most;
    pixel->of[1] = at == 0 || at == 6 ? rising : at == 1 || at == 2 ? most : at == 3 ? falling : least;
    pixel->of[2] = at == 2 ? rising : at == 3 || at == 4 ? most : at == 5 ? falling : least;
}

/* Applies one step to a pixel. `mean`: jitter_mean() of the image before its contrast is changed. */
FDSL_HD void jitter_change(enum jitter_step step, float factor, uint32_t channels, float mean,
                           struct jitter_pixel *pixel)
{
    if (channels == 1 && step >= JITTER_SATURATION)
        return;
    if (step == JITTER_HUE) {
        jitter_turn(factor, pixel);
        return;
    }
    const float other = step == JITTER_BRIGHTNESS ? 0
                        : step == JITTER_CONTRAST ? mean
                                                  : jitter_gray(pixel, channels);
    for (uint32_t c = 0; c < channels; c++)
        pixel->of[c] = jitter_blend(factor, pixel->of[c], other);
}

/* ---- Blur ---- */

#define JITTER_WEIGHT_BITS 14 /* the weights of a kernel add up to 2^14 */
#define JITTER_KEPT_BITS   7  /* of a value between both passes, after the point */

/* Returns the weight of the pixel at distance `d`, not normalised. box_exp() needs a small argument, so the
 * function computes its 32nd power. Weights below exp(-60) are 0. */
FDSL_HD double jitter_gauss(double sigma, uint32_t d)
{
    const double exponent = -0.5 * ((double)d / sigma) * ((double)d / sigma);
    if (exponent < -60)
        return 0;
    double power = box_exp(exponent / 32);
    for (int i = 0; i < 5; i++)
        power *= power;
    return power;
}

/* Normalises the weights of the distances 0 to `radius`, and rounds them. */
FDSL_HD void jitter_round_weights(const double *gauss, uint32_t radius, uint16_t *weights)
{
    double total = gauss[0];
    uint32_t sides = 0;
    for (uint32_t d = 1; d <= radius; d++)
        total += 2 * gauss[d];
    for (uint32_t d = 1; d <= radius; d++) {
        weights[d] = (uint16_t)(gauss[d] / total * (1 << JITTER_WEIGHT_BITS) + 0.5);
        sides += 2u * weights[d];
    }
    weights[0] = (uint16_t)((1u << JITTER_WEIGHT_BITS) - sides);
}

/* Rounds the sum of a column of bytes, and then that of a row of such values. */
FDSL_HD uint16_t jitter_column(uint32_t sum)
{
    const uint32_t shift = JITTER_WEIGHT_BITS - JITTER_KEPT_BITS;
    return (uint16_t)((sum + (1u << (shift - 1))) >> shift);
}

FDSL_HD uint8_t jitter_row(uint32_t sum)
{
    const uint32_t shift = JITTER_WEIGHT_BITS + JITTER_KEPT_BITS;
    return (uint8_t)((sum + (1u << (shift - 1))) >> shift);
}

/* Returns the index of the pixel that is at index `at` of a reflected row of `size` pixels. Indices that are
 * further outside than a row become that of a pixel. */
FDSL_HD uint32_t jitter_reflected(int32_t at, uint32_t size)
{
    const int32_t last = (int32_t)size - 1;
    const int32_t inside = at < 0 ? -at : at > last ? 2 * last - at : at;
    return (uint32_t)(inside < 0 ? 0 : inside > last ? last : inside);
}

FDSL_C_BEGIN

/* The names of the values of struct jitter, as a user knows them. */
struct jitter_names {
    const char *probability, *steps[JITTER_STEPS], *grayscale, *blur, *kernel, *sigma;
};

/* STATUS_USAGE if a value is out of range, or if images of this shape are too small for the kernel, or have
 * one channel and would lose their colours. The message begins with the name of the value. */
enum status jitter_check(const struct jitter *jitter, const struct shape *shape,
                         const struct jitter_names *names);

/* Applies the changes that jitter_draw() draws to an image or a clip. `other` has room for a plane. */
void jitter_apply(const struct jitter *jitter, const struct shape *shape, uint64_t seed, uint32_t epoch,
                  uint32_t sample, uint8_t *image, uint8_t *other);

/* The values of the options below. */
struct jitter_parameters {
    const char *jitter, *sigma; /* jitter: NULL: not given */
    double probability, grayscale, blur;
    uint64_t kernel;
};

/* Reads the texts. STATUS_USAGE with the name of the option. The caller then calls jitter_check() with
 * jitter_options. */
enum status jitter_read(const struct jitter_parameters *parameters, struct jitter *jitter);
extern const struct jitter_names jitter_options;

/* For tests: one step, and the blur of a plane from one array to another. */
void jitter_apply_step(enum jitter_step step, float factor, const struct shape *shape, uint8_t *image);
void jitter_blur(double sigma, uint32_t radius, uint32_t height, uint32_t width, const uint8_t *from,
                 uint8_t *to);

FDSL_C_END

/* Rows of the option tables of workloads that change colours. `at`: offset of the struct jitter_parameters in
 * the workload's parameters. `what`: the samples that are changed. */
#define JITTER_OPTIONS(at, what)                                                                             \
    OPTION_ROW(                                                                                              \
        "color-jitter", "B,C,S,H", OPTION_TEXT, (at) + offsetof(struct jitter_parameters, jitter),           \
        .column = COLUMN,                                                                                    \
        .help =                                                                                              \
            "change brightness, contrast, saturation and hue of " what                                       \
            " in random order, as ColorJitter of torchvision does: factors from 1 - B to 1 + B, and a turn " \
            "of the hue by up to H, at most 0.5; one value: B, C and S, without hue (default: none)"),       \
        OPTION_ROW("color-jitter-p", "P", OPTION_REAL,                                                       \
                   (at) + offsetof(struct jitter_parameters, probability), .fallback = "1", .maximum = 1,    \
                   .column = COLUMN, .help = "probability of --color-jitter"),                               \
        OPTION_ROW("grayscale", "P", OPTION_REAL, (at) + offsetof(struct jitter_parameters, grayscale),      \
                   .fallback = "0", .maximum = 1, .column = COLUMN,                                          \
                   .help = "probability with which the colours of " what " become gray"),                    \
        OPTION_ROW("blur", "P", OPTION_REAL, (at) + offsetof(struct jitter_parameters, blur),                \
                   .fallback = "0", .maximum = 1, .column = COLUMN,                                          \
                   .help = "probability of Gaussian blur of " what),                                         \
        OPTION_ROW("blur-kernel", "PIXELS", OPTION_COUNT, (at) + offsetof(struct jitter_parameters, kernel), \
                   .fallback = "23", .minimum = 1, .maximum = JITTER_KERNEL_MAX, .column = COLUMN,           \
                   .help = "side of the kernel of --blur, odd"),                                             \
        OPTION_ROW("blur-sigma", "S[,S]", OPTION_TEXT, (at) + offsetof(struct jitter_parameters, sigma),     \
                   .fallback = "0.1,2", .column = COLUMN,                                                    \
                   .help =                                                                                   \
                       "standard deviation of --blur in pixels: a value, or a range from which it is drawn")

#endif
