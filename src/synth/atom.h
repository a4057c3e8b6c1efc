/* The definition of a VisualAtom image, shared by host and device code.
 *
 * An atom is K closed polygons ("orbits") around a centre. In each orbit, each of the q vertices moves
 * roughly along its own direction, usually outwards. The step is a sum of constants, a wave and noise; the
 * noise of x differs from that of y. Later orbits paint over earlier ones. The formula is from Takashima et
 * al., "Visual Atoms: pre-training vision transformers with sinusoidal waves", CVPR 2023. Released code
 * interprets this formula in two ways, which `enum formula` names. docs/visualatom.md defines both in full.
 *
 * All random numbers of this definition come from Philox, a counter-based generator. For a given formula and
 * resolution, an image is therefore a pure function of (seed, class, instance): it can be generated alone, on
 * any device, in any order. Do not change the streams: the tests compare images with golden hashes. */
#ifndef FDSL_SYNTH_ATOM_H
#define FDSL_SYNTH_ATOM_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"

/* Two programs interpret the formula of an image in different ways; docs/visualatom.md defines both. */
enum formula {
    FORMULA_UJI,       /* the formula of the CUDA code fdsl-gpu-pipeline */
    FORMULA_VISUALATOM /* the formula of the renderer of the published data set */
};

/* ---- Noise ---- */

/* The noise of a vertex: one-dimensional gradient noise at a random position.
 *
 * The fade curve and the permutation are those of Ken Perlin, "Improving noise", SIGGRAPH 2002. The position
 * is uniform in [0, 10000). Each vertex, orbit and axis draws its own position, so the values are
 * independent. They have the distribution of Perlin noise, but not its correlation between neighbours. */
#define NOISE_PERIOD      256
#define NOISE_RANGE       10000u /* positions are drawn from [0, NOISE_RANGE) */
#define NOISE_SCALE       0.4f   /* factor of the noise; |noise| <= 1.6 (`uji`) or 0.96 (`visualatom`) */
#define NOISE_LIMIT       3.2f   /* simple bound of |noise|: 8 * NOISE_SCALE; 8 is the steepest gradient */
#define NOISE_TABLE_COUNT (NOISE_PERIOD + 1) /* one extra entry, so that index cell + 1 needs no wrap */

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

/* ---- Orbits ---- */

/* A class: the parameters that its images share. Lengths are in pixels and do not scale with the
 * resolution. */
struct atom_class {
    uint32_t id; /* the class number; the Philox key of each image depends on it */
    uint32_t vertices,
        orbits; /* q, the number of vertices per orbit, and K, the number of orbits; both at least 1 */
    float oval_x, oval_y;  /* stretch of the start circle along each axis */
    uint32_t freq1, freq2; /* frequencies of the wave, in periods per turn */
    float noise;           /* p: factor of the noise; also a constant part of every outward step */
    uint32_t radius;       /* radius of the start circle, which is not drawn */
    float line_width;      /* radial offset added at each orbit; drawn lines are always one pixel wide */
};

/* Tables of a class with one entry per vertex: the vertex's direction (cosine, sine), and its outward step
 * without noise (advance). */
struct atom_spokes {
    const float *cosine, *sine, *advance;
};

/* A position in pixels. */
struct atom_point {
    float x, y;
};

/* Random streams of an image. The stream is the third word of the Philox counter. Numbers from STREAM_CURAND
 * up belong to variants that use cuRAND's generators. */
enum atom_stream {
    STREAM_NOISE = 0,
    STREAM_GRAY = 1,
    STREAM_CENTRE = 2,
    STREAM_CROP = 3,
    STREAM_CURAND = 16
};

FDSL_C_BEGIN

/* Fills the three tables of `class_`, q = vertices floats each. For vertex i and theta = 2 pi i / q: the
 * cosine and the sine of theta, and advance = noise + line_width + (sin(freq1 theta) + sin(freq2 theta)) / 2.
 * Computes in double and rounds once. */
void atom_spokes_fill(const struct atom_class *class_, float *cosine, float *sine, float *advance);

FDSL_C_END

/* Returns the Philox key of the image with this class number and instance. `seed` is the seed of the run. */
FDSL_HD struct philox_key atom_image_key(uint64_t seed, uint32_t class_id, uint64_t instance)
{
    struct philox_block block =
        philox(philox_key(seed), (uint32_t)instance, (uint32_t)(instance >> 32), class_id, 0);
    struct philox_key key = {{block.word[0], block.word[1]}};
    return key;
}

/* Returns the random words for the noise of a vertex in orbits 2 * pair and 2 * pair + 1. Words 0 and 1 are x
 * and y of the even orbit, words 2 and 3 are x and y of the odd orbit. */
FDSL_HD struct philox_block atom_noise_block(struct philox_key key, uint32_t vertex, uint32_t pair)
{
    return philox(key, vertex, pair, STREAM_NOISE, 0);
}

/* Returns the noise (x, y) of a vertex in an orbit. */
FDSL_HD struct atom_point atom_noise(struct philox_key key, const float *gradients, uint32_t vertex,
                                     uint32_t orbit)
{
    struct philox_block block = atom_noise_block(key, vertex, orbit >> 1);
    struct atom_point noise = {noise_of_draw(gradients, philox_word(block, 2 * orbit)),
                               noise_of_draw(gradients, philox_word(block, 2 * orbit + 1))};
    return noise;
}

/* Converts a random word to a gray value. For `visualatom`, the gray is uniform over 0 .. 255. For `uji`, it
 * is round(255 U) with U uniform in [0, 1), so the grays 0 and 255 are half as likely as the others. */
FDSL_HD uint8_t atom_gray_of_draw(uint32_t draw, enum formula formula)
{
    return formula == FORMULA_UJI ? (uint8_t)(((uint64_t)draw * 255 + 0x80000000u) >> 32)
                                  : (uint8_t)philox_below(draw, 256);
}

/* Returns the random words for the grays of orbits 4 * quad to 4 * quad + 3, one word per orbit. */
FDSL_HD struct philox_block atom_gray_block(struct philox_key key, uint32_t quad)
{
    return philox(key, quad, 0, STREAM_GRAY, 0);
}

/* Returns the gray of an orbit. */
FDSL_HD uint8_t atom_gray(struct philox_key key, enum formula formula, uint32_t orbit)
{
    return atom_gray_of_draw(philox_word(atom_gray_block(key, orbit >> 2), orbit), formula);
}

/* Returns one coordinate of the centre in pixels. For `uji`, it is round(U * res) with U uniform in [0, 1).
 * For `visualatom`, it is (res + u) / 2 with a uniform integer u in -res .. res. */
FDSL_HD float atom_centre_coordinate(uint32_t draw, enum formula formula, uint32_t res)
{
    return formula == FORMULA_UJI ? (float)(uint32_t)(((uint64_t)draw * res + 0x80000000u) >> 32)
                                  : 0.5f * (float)philox_below(draw, 2 * res + 1);
}

/* Returns the centre of all polygons of an image. */
FDSL_HD struct atom_point atom_centre(struct philox_key key, enum formula formula, uint32_t res)
{
    struct philox_block block = philox(key, 0, 0, STREAM_CENTRE, 0);
    struct atom_point centre = {atom_centre_coordinate(block.word[0], formula, res),
                                atom_centre_coordinate(block.word[1], formula, res)};
    return centre;
}

/* Returns the start position of a vertex, on the oval around the centre. */
FDSL_HD struct atom_point atom_start(const struct atom_class *class_, struct atom_point centre, float cosine,
                                     float sine)
{
    struct atom_point point = {fmaf((float)class_->radius * class_->oval_x, cosine, centre.x),
                               fmaf((float)class_->radius * class_->oval_y, sine, centre.y)};
    return point;
}

/* Returns the position of a vertex after one more orbit. The vertex moves along its direction by
 * advance - p * noise. Its x and y coordinates have separate noise. */
FDSL_HD struct atom_point atom_advance(struct atom_point point, float p, float cosine, float sine,
                                       float advance, struct atom_point noise)
{
    struct atom_point next = {fmaf(cosine, fmaf(-p, noise.x, advance), point.x),
                              fmaf(sine, fmaf(-p, noise.y, advance), point.y)};
    return next;
}

/* ---- Lines ---- */

/* Bresenham's line between two integer points.
 *
 * J. E. Bresenham, "Algorithm for computer control of a digital plotter", IBM Systems Journal 4(1), 1965.
 * This reference walks along the line pixel by pixel. Fast variants may compute pixels with a closed form
 * instead; tests compare their images with those of this code. */
/* Iterates over the pixels of a line: for (line = line_begin(...); line.left > 0; line_step(&line)) plot. */
struct line {
    int32_t x, y; /* the pixel to plot */
    int32_t left; /* pixels still to plot, including this one */
    int32_t major, minor, error;
    int32_t major_x, major_y, minor_x, minor_y; /* steps of one pixel along the major and the minor axis */
};

/* Returns whether pixel (x, y) is inside an image of side `res`. */
FDSL_HD bool line_inside(int32_t x, int32_t y, int32_t res)
{
    return (uint32_t)x < (uint32_t)res && (uint32_t)y < (uint32_t)res;
}

/* Returns whether a line is drawn. With the formula `uji`, lines with both ends outside the image are not
 * drawn. With `visualatom`, all lines are drawn. */
FDSL_HD bool line_drawn(enum formula formula, int32_t x0, int32_t y0, int32_t x1, int32_t y1, int32_t res)
{
    return formula == FORMULA_VISUALATOM || line_inside(x0, y0, res) || line_inside(x1, y1, res);
}

/* Begins the line from (x0, y0) to (x1, y1). With the formula `uji`, the end point is not painted, so a line
 * has max(|dx|, |dy|) pixels. With `visualatom`, the end point is painted, so a line has one pixel more. If
 * |dx| equals |dy|, y is the major axis. Coordinates must be within +-2^24. */
FDSL_HD struct line line_begin(enum formula formula, int32_t x0, int32_t y0, int32_t x1, int32_t y1)
{
    int32_t dx = x1 > x0 ? x1 - x0 : x0 - x1, dy = y1 > y0 ? y1 - y0 : y0 - y1;
    int32_t step_x = x1 > x0 ? 1 : -1, step_y = y1 > y0 ? 1 : -1;
    bool steep = dy >= dx;
    struct line line;
    line.x = x0;
    line.y = y0;
    line.major = steep ? dy : dx;
    line.minor = steep ? dx : dy;
    line.left = line.major + (formula == FORMULA_VISUALATOM);
    line.error = 2 * line.minor - line.major;
    line.major_x = steep ? 0 : step_x;
    line.major_y = steep ? step_y : 0;
    line.minor_x = steep ? step_x : 0;
    line.minor_y = steep ? 0 : step_y;
    return line;
}

/* Advances to the next pixel. */
FDSL_HD void line_step(struct line *line)
{
    if (line->error >= 0) {
        line->x += line->minor_x;
        line->y += line->minor_y;
        line->error -= 2 * line->major;
    }
    line->error += 2 * line->minor;
    line->x += line->major_x;
    line->y += line->major_y;
    line->left--;
}

#endif
