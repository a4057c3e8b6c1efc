/* The oracle: computes images by their definition (atom.h) and compares the images of a variant with them. */
#ifndef FDSL_SYNTH_ORACLE_H
#define FDSL_SYNTH_ORACLE_H

#include <stdbool.h>

#include "core/variant.h"
#include "synth/input.h"

/* Computes the noise of shape `slot` of an image as a variant with `traits` draws it. `noise` receives 2 *
 * vertices * orbits floats: (x, y) for each vertex of orbit 0, then of orbit 1, and so on. Rounds to half
 * precision if the variant does. Not for SYNTH_NOISE_XORWOW, which cannot be replayed. */
void oracle_noise(const struct synth *synth, const struct synth_traits *traits, struct synth_image image,
                  uint32_t slot, float *noise);

/* The picture that the oracle draws: res * res grays and, unless `mask` is NULL, class numbers. */
struct oracle_picture {
    uint8_t *pixels, *mask;
};

/* Draws shape `slot` of the image for this noise, over the earlier shapes; shape 0 clears the picture first.
 * Later orbits paint over earlier ones. `points` is scratch space for the vertices of the class. */
void oracle_draw(const struct synth *synth, struct synth_image image, uint32_t slot, const float *noise,
                 struct atom_point *points, const struct oracle_picture *picture);

/* Returns whether a racy variant, which paints the orbits of its only shape in any order, can produce
 * `pixels` from this noise. Each pixel must have the gray of an orbit that covers it, or that of the
 * background if no orbit covers it. `marks` is scratch space of res * res bytes, and `points` is scratch
 * space for the vertices of the class. */
bool oracle_member(const struct synth *synth, struct synth_image image, const float *noise,
                   struct atom_point *points, uint8_t *marks, const uint8_t *pixels);

/* Implements verify() of the workload `synth`; `input` is a struct synth. Counts the images of the variant's
 * latest run whose pixels, mask or label differ from the reference for run number `run`. Checks every image.
 * Also tests noise that cannot be replayed on the host: it must have the reference's distribution
 * (Kolmogorov-Smirnov test), and no two of its streams may begin with equal draws. If either test fails, all
 * images count as wrong and a warning gives the reason. */
enum status oracle_verify(const void *input, const struct variant *variant, void *state, uint64_t run,
                          uint64_t *wrong);

#endif
