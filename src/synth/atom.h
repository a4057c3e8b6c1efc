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

#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"
#include "synth/noise.h"

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

#endif
