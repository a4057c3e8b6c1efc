/* The definition of the images of line formulas, shared by host and device code.
 *
 * An image is an ordered list of shapes. A shape is K closed polygons ("orbits") around a centre. In each
 * orbit, each of the q vertices moves roughly along its own direction, usually outwards. The step is a sum of
 * constants, a wave and noise; the noise of x differs from that of y. Later orbits paint over earlier ones,
 * and later shapes over earlier shapes. formulas.def lists the formulas, each with the rules in which it
 * differs from the others. This file, lines.c and class.c define the images;
 * docs/visualatom.md and docs/formulas.md say how to use them.
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

/* ---- Formulas ---- */

/* The formulas: FORMULA_UJI, ... */
enum formula_id {
#define FORMULA(symbol, name, ...) FORMULA_##symbol,
#include "synth/formulas.def"
#undef FORMULA
    FORMULA_COUNT
};

/* The rules in which line formulas differ. The members have the order of the columns of formulas.def. */
struct line_rules {
    uint32_t domain;                 /* last word of the counter that gives the image key */
    uint32_t background;             /* gray of a pixel that no line covers */
    uint32_t gray_factor, gray_bias; /* a word v becomes the gray min(255, floor((factor v + bias) / 2^32)) */
    uint32_t centre_span;  /* range of centres, in 512ths of the canvas; 0: round(U res) (line_centre()) */
    uint32_t steep;        /* 1: bit 3 of a hash negates the gradient; 0: it makes the gradient -1 */
    float noise_factor;    /* the noise of a step has the factor noise_factor * p */
    uint32_t ends;         /* 1: the end point of a line is painted */
    uint32_t outside;      /* 1: lines with both ends outside the image are drawn */
    uint32_t start_radius; /* maximum radius of a start circle that every shape draws; 0: as in the class */
    uint32_t shapes;       /* shapes per image. If there are several, each draws its own class */
    uint32_t masked;       /* 1: the formula defines masks: the class number of the line that a pixel shows */
};

#ifdef __cplusplus
#define LINE_CONSTANT constexpr
#else
#define LINE_CONSTANT
#endif

/* Returns the rules of a formula. In C++, the result is a constant expression if `formula` is one, so a
 * kernel can have the formula as a template argument. */
LINE_CONSTANT FDSL_HD struct line_rules line_rules_of(enum formula_id formula)
{
    switch (formula) {
#define FORMULA(symbol, name, family, ...)             \
    case FORMULA_##symbol: {                           \
        const struct line_rules rules = {__VA_ARGS__}; \
        return rules;                                  \
    }
#include "synth/formulas.def"
#undef FORMULA
    case FORMULA_COUNT:
        break;
    }
    const struct line_rules none = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    return none;
}

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
 * set, the gradient is negated (rules->steep) or replaced by -1. */
void noise_gradients(const struct line_rules *rules, float gradients[NOISE_TABLE_COUNT]);

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

/* A class of a line formula, as drawing needs it: the parameters that its shapes share. Lengths are in pixels
 * and do not scale with the resolution. */
struct atom_class {
    uint32_t id; /* the class number; the Philox key of each image depends on it */
    uint32_t vertices,
        orbits; /* q, the number of vertices per orbit, and K, the number of orbits; both at least 1 */
    float oval_x, oval_y;  /* stretch of the start circle along each axis */
    uint32_t freq1, freq2; /* frequencies of the wave, in periods per turn */
    float noise;           /* factor of the noise in a step: the rules' noise_factor times p */
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
    STREAM_SHAPE = 4, /* class and centre of each of several shapes; start circle of a shape */
    STREAM_CURAND = 16
};

FDSL_C_BEGIN

/* Fills the three tables of `class_`, q = vertices floats each. For vertex i and theta = 2 pi i / q: the
 * cosine and the sine of theta, and advance = p + line_width + (sin(freq1 theta) + sin(freq2 theta)) / 2,
 * where p = noise / rules->noise_factor. Computes in double and rounds once. */
void atom_spokes_fill(const struct line_rules *rules, const struct atom_class *class_, float *cosine,
                      float *sine, float *advance);

FDSL_C_END

/* Returns the Philox key of the image with this class number and instance. `seed` is the seed of the run. The
 * class number of an image of several shapes counts as 0. */
FDSL_HD struct philox_key atom_image_key(const struct line_rules *rules, uint64_t seed, uint32_t class_id,
                                         uint64_t instance)
{
    struct philox_block block = philox(philox_key(seed), (uint32_t)instance, (uint32_t)(instance >> 32),
                                       rules->shapes > 1 ? 0 : class_id, rules->domain);
    struct philox_key key = {{block.word[0], block.word[1]}};
    return key;
}

/* Returns the random words for the noise of a vertex in orbits 2 * pair and 2 * pair + 1 of shape `slot`.
 * Words 0 and 1 are x and y of the even orbit, words 2 and 3 are x and y of the odd orbit. */
FDSL_HD struct philox_block atom_noise_block(struct philox_key key, uint32_t slot, uint32_t vertex,
                                             uint32_t pair)
{
    return philox(key, vertex, pair, STREAM_NOISE, slot);
}

/* Returns the noise (x, y) of a vertex in an orbit of shape `slot`. */
FDSL_HD struct atom_point atom_noise(struct philox_key key, uint32_t slot, const float *gradients,
                                     uint32_t vertex, uint32_t orbit)
{
    struct philox_block block = atom_noise_block(key, slot, vertex, orbit >> 1);
    struct atom_point noise = {noise_of_draw(gradients, philox_word(block, 2 * orbit)),
                               noise_of_draw(gradients, philox_word(block, 2 * orbit + 1))};
    return noise;
}

/* Converts a random word to a gray value. */
FDSL_HD uint8_t atom_gray_of_draw(const struct line_rules *rules, uint32_t draw)
{
    uint32_t gray = (uint32_t)(((uint64_t)draw * rules->gray_factor + rules->gray_bias) >> 32);
    return (uint8_t)(gray < 255 ? gray : 255);
}

/* Returns the random words for the grays of orbits 4 * quad to 4 * quad + 3 of shape `slot`, one word per
 * orbit. */
FDSL_HD struct philox_block atom_gray_block(struct philox_key key, uint32_t slot, uint32_t quad)
{
    return philox(key, quad, 0, STREAM_GRAY, slot);
}

/* Returns the gray of an orbit of shape `slot`. */
FDSL_HD uint8_t atom_gray(const struct line_rules *rules, struct philox_key key, uint32_t slot,
                          uint32_t orbit)
{
    return atom_gray_of_draw(rules, philox_word(atom_gray_block(key, slot, orbit >> 2), orbit));
}

/* Returns one coordinate of a centre in pixels. If the rules' span is 0, it is round(U * res) with U uniform
 * in [0, 1). Otherwise it is (res + u) / 2 with a uniform integer u in -a .. a, where a = floor(res * span /
 * 512). */
FDSL_HD float line_centre(const struct line_rules *rules, uint32_t draw, uint32_t res)
{
    if (rules->centre_span == 0)
        return (float)(uint32_t)(((uint64_t)draw * res + 0x80000000u) >> 32);
    uint32_t most = res * rules->centre_span / 512;
    return 0.5f * (float)(res - most + philox_below(draw, 2 * most + 1));
}

/* A shape of an image. */
struct line_shape {
    uint32_t class_index;
    struct atom_point centre;
    float radius_x, radius_y; /* semi-axes of the ellipse on which the vertices start */
};

/* Returns shape `slot` of an image, 0 <= slot < rules->shapes. The class of the only shape is classes[index];
 * one of several shapes draws its class from all `count` classes. `res` is the side of the canvas. */
FDSL_HD struct line_shape line_shape(const struct line_rules *rules, struct philox_key key, uint32_t slot,
                                     const struct atom_class *classes, uint32_t index, uint32_t count,
                                     uint32_t res)
{
    struct line_shape shape;
    struct philox_block block = philox(key, slot, 0, rules->shapes > 1 ? STREAM_SHAPE : STREAM_CENTRE, 0);
    shape.class_index = index;
    if (rules->shapes > 1) {
        shape.class_index = philox_below(block.word[0], count);
        shape.centre.y = line_centre(rules, block.word[1], res);
        shape.centre.x = line_centre(rules, block.word[2], res);
    } else {
        shape.centre.x = line_centre(rules, block.word[0], res);
        shape.centre.y = line_centre(rules, block.word[1], res);
    }
    if (rules->start_radius > 0) {
        block = philox(key, rules->shapes > 1 ? rules->shapes + slot : 0, 0, STREAM_SHAPE, 0);
        float radius = (float)philox_below(block.word[0], rules->start_radius + 1);
        shape.radius_x = radius * (1 + philox_unit(block.word[1]));
        shape.radius_y = radius * (1 + philox_unit(block.word[2]));
    } else {
        const struct atom_class *class_ = &classes[shape.class_index];
        shape.radius_x = (float)class_->radius * class_->oval_x;
        shape.radius_y = (float)class_->radius * class_->oval_y;
    }
    return shape;
}

/* Returns the start position of a vertex, on the ellipse around the centre. */
FDSL_HD struct atom_point line_start(const struct line_shape *shape, float cosine, float sine)
{
    struct atom_point point = {fmaf(shape->radius_x, cosine, shape->centre.x),
                               fmaf(shape->radius_y, sine, shape->centre.y)};
    return point;
}

/* Returns the position of a vertex after one more orbit. The vertex moves along its direction by advance - p
 * * noise, where p is the noise factor of the class. Its x and y coordinates have separate noise. */
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

/* Returns whether a line is drawn. Some formulas do not draw lines with both ends outside the image. */
FDSL_HD bool line_drawn(const struct line_rules *rules, int32_t x0, int32_t y0, int32_t x1, int32_t y1,
                        int32_t res)
{
    return rules->outside || line_inside(x0, y0, res) || line_inside(x1, y1, res);
}

/* Begins the line from (x0, y0) to (x1, y1). A line has max(|dx|, |dy|) pixels, and one more if the end point
 * is painted. If |dx| equals |dy|, y is the major axis. Coordinates must be within +-2^24. */
FDSL_HD struct line line_begin(const struct line_rules *rules, int32_t x0, int32_t y0, int32_t x1, int32_t y1)
{
    int32_t dx = x1 > x0 ? x1 - x0 : x0 - x1, dy = y1 > y0 ? y1 - y0 : y0 - y1;
    int32_t step_x = x1 > x0 ? 1 : -1, step_y = y1 > y0 ? 1 : -1;
    bool steep = dy >= dx;
    struct line line;
    line.x = x0;
    line.y = y0;
    line.major = steep ? dy : dx;
    line.minor = steep ? dx : dy;
    line.left = line.major + (int32_t)rules->ends;
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
