/* The noise of a vertex: one-dimensional gradient noise at a random position, shared by host and device
 * code.
 *
 * The fade curve and the permutation are those of Ken Perlin, "Improving noise", SIGGRAPH 2002. The position
 * is uniform in [0, 10000). Each vertex, orbit and axis draws its own position, so the values are
 * independent. They have the distribution of Perlin noise, but not its correlation between neighbours. */
#ifndef FDSL_SYNTH_NOISE_H
#define FDSL_SYNTH_NOISE_H

#include <math.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"

#define NOISE_PERIOD      256
#define NOISE_RANGE       10000u /* positions are drawn from [0, NOISE_RANGE) */
#define NOISE_SCALE       0.4f   /* factor of the noise; |noise| <= 1.6 (`uji`) or 0.96 (`visualatom`) */
#define NOISE_LIMIT       3.2f   /* simple bound of |noise|: 8 * NOISE_SCALE; 8 is the steepest gradient */
#define NOISE_TABLE_COUNT (NOISE_PERIOD + 1) /* one extra entry, so that index cell + 1 needs no wrap */

/* Two programs interpret the formula of an image in different ways; docs/visualatom.md defines both. */
enum formula {
    FORMULA_UJI,       /* the formula of the CUDA code fdsl-gpu-pipeline */
    FORMULA_VISUALATOM /* the formula of the renderer of the published data set */
};

FDSL_C_BEGIN

/* Ken Perlin's permutation. */
extern const uint8_t noise_permutation[NOISE_PERIOD];

/* Fills the table of scaled gradients for noise_at(). The gradient of hash h is (h & 7) + 1. If bit 3 of h is
 * set, the gradient is negated (`uji`) or replaced by -1 (`visualatom`). */
void noise_gradients(enum formula formula, float gradients[NOISE_TABLE_COUNT]);

FDSL_C_END

/* Returns the noise at position cell + t: cell in 0 .. NOISE_PERIOD - 1, t in [0, 1). */
FDSL_HD float noise_at(const float *gradients, uint32_t cell, float t)
{
    float fade = t * t * t * fmaf(fmaf(t, 6.0f, -15.0f), t, 10.0f);
    float from_left = gradients[cell] * t;
    float rise = fmaf(gradients[cell + 1], t - 1.0f, -from_left);
    return fmaf(fade, rise, from_left);
}

/* Returns the noise of a 32-bit random word. The position is draw * 10000 / 2^32. The cell is its integer
 * part modulo 256; t is the upper 24 bits of its fraction. Integer arithmetic keeps cell and t exact: a
 * float32 position would leave only ten bits for t. */
FDSL_HD float noise_of_draw(const float *gradients, uint32_t draw)
{
    uint64_t place = (uint64_t)draw * NOISE_RANGE;
    uint32_t cell = (uint32_t)(place >> 32) & (NOISE_PERIOD - 1);
    return noise_at(gradients, cell, philox_unit((uint32_t)place));
}

/* Returns the noise of a uniform float in (0, 1], the range of cuRAND's float generators. Computes the
 * position in float32. */
FDSL_HD float noise_of_uniform(const float *gradients, float uniform)
{
    float place = uniform * (float)NOISE_RANGE, whole = floorf(place);
    return noise_at(gradients, (uint32_t)whole & (NOISE_PERIOD - 1), place - whole);
}

/* Rounds `value` to the nearest half-precision number, ties to even, as a conversion to __half does. |value|
 * must be under 65504. */
FDSL_HD float noise_round_half(float value)
{
    /* `shift` is a power of two. The last bit of the float32 `shift` has the same weight as the last bit of
     * the half-precision number nearest to `magnitude`. Adding `shift` therefore rounds `magnitude` to this
     * bit. Half-precision numbers below 2^-14 are subnormal: the weight of their last bit is 2^-24. */
    int exponent;
    float magnitude = fabsf(value);
    (void)frexpf(magnitude, &exponent); /* magnitude in [2^(exponent-1), 2^exponent) */
    float shift = ldexpf(1.0f, (exponent < -13 ? -13 : exponent) - 1 + 13);
    return copysignf((magnitude + shift) - shift, value);
}

#endif
