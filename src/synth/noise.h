/* The noise of a vertex: one-dimensional gradient noise at a random place, one definition for host and
 * device.
 *
 * Ken Perlin, "Improving noise", SIGGRAPH 2002: the fade curve and the permutation. The place z is uniform in
 * [0, 10000); an image draws a fresh one for every vertex, orbit and axis, so the noise is white and only its
 * distribution is Perlin's.
 */
#ifndef FDSL_SYNTH_NOISE_H
#define FDSL_SYNTH_NOISE_H

#include <math.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"

#define NOISE_PERIOD      256
#define NOISE_RANGE       10000u /* z is drawn from [0, NOISE_RANGE) */
#define NOISE_SCALE       0.4f   /* brings the noise near [-1, 1] for unit gradients */
#define NOISE_LIMIT       3.2f   /* |noise| never exceeds NOISE_SCALE times the steepest gradient */
#define NOISE_TABLE_COUNT (NOISE_PERIOD + 1) /* one more, so that cell i + 1 needs no wrap */

enum formula {
    FORMULA_UJI,       /* what the paper's CUDA code draws */
    FORMULA_VISUALATOM /* what the released dataset holds */
};

FDSL_C_BEGIN

/* Ken Perlin's permutation. */
extern const uint8_t noise_permutation[NOISE_PERIOD];

/* Fills the table of scaled gradients that noise_at() looks up. A hash h has the magnitude (h & 7) + 1; where
 * h has bit 3 set the gradient is its negative under `uji`, and -1 under `visualatom`. */
void noise_gradients(enum formula formula, float gradients[NOISE_TABLE_COUNT]);

FDSL_C_END

/* Noise at place cell + t: cell in 0 .. NOISE_PERIOD - 1, t in [0, 1). */
FDSL_HD float noise_at(const float *gradients, uint32_t cell, float t)
{
    float fade = t * t * t * fmaf(fmaf(t, 6.0f, -15.0f), t, 10.0f);
    float from_left = gradients[cell] * t;
    float rise = fmaf(gradients[cell + 1], t - 1.0f, -from_left);
    return fmaf(fade, rise, from_left);
}

/* Noise of a 32-bit draw u: the place is u * 10000 / 2^32, its cell the whole part, and t the upper 24 bits
 * of the fraction. All of it exact: a float32 place would leave t only ten bits. */
FDSL_HD float noise_of_draw(const float *gradients, uint32_t draw)
{
    uint64_t place = (uint64_t)draw * NOISE_RANGE;
    uint32_t cell = (uint32_t)(place >> 32) & (NOISE_PERIOD - 1);
    return noise_at(gradients, cell, philox_unit((uint32_t)place));
}

/* Noise of a uniform float in (0, 1], as cuRAND's float generators give it: a float32 place. */
FDSL_HD float noise_of_uniform(const float *gradients, float uniform)
{
    float place = uniform * (float)NOISE_RANGE, whole = floorf(place);
    return noise_at(gradients, (uint32_t)whole & (NOISE_PERIOD - 1), place - whole);
}

/* `value` rounded to the nearest half-precision number, ties to even: what storing the noise in a __half
 * keeps. |value| must be under 65504. */
FDSL_HD float noise_round_half(float value)
{
    /* Adding a power of two whose last bit weighs as much as the half's last bit rounds there. Below 2^-14
     * halves are subnormal and that bit stays at 2^-24. */
    int exponent;
    float magnitude = fabsf(value);
    (void)frexpf(magnitude, &exponent); /* magnitude in [2^(exponent-1), 2^exponent) */
    float shift = ldexpf(1.0f, (exponent < -13 ? -13 : exponent) - 1 + 13);
    return copysignf((magnitude + shift) - shift, value);
}

#endif
