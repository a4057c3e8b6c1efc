/* What is right: checks images against the definition, however they were made. */
#ifndef FDSL_SYNTH_ORACLE_H
#define FDSL_SYNTH_ORACLE_H

#include <stdbool.h>

#include "core/variant.h"
#include "synth/input.h"

/* The noise of one image as a variant with `traits` draws it: (x, y) a vertex, vertices an orbit, orbits an
 * image; 2 * vertices * orbits floats, rounded to half precision where the variant does so. Not for
 * SYNTH_NOISE_XORWOW, which cannot be replayed. */
void oracle_noise(const struct synth *synth, const struct synth_traits *traits, struct synth_image image,
                  float *noise);

/* Draws the image that this noise makes, later orbits over earlier ones. `points` has room for the class's
 * vertices. */
void oracle_draw(const struct synth *synth, struct synth_image image, const float *noise,
                 struct atom_point *points, uint8_t *pixels);

/* Whether `pixels` is an image that this noise can make when orbits are painted in any order: each pixel
 * holds the gray of some orbit that covers it, or 0 where none does. `marks` has room for res * res bytes. */
bool oracle_member(const struct synth *synth, struct synth_image image, const float *noise,
                   struct atom_point *points, uint8_t *marks, const uint8_t *pixels);

/* Counts the images of the latest run that differ from those of run number `run`, or whose labels do. Each is
 * checked.
 * Noise that had to be fetched is also compared with the reference in distribution (Kolmogorov-Smirnov), and
 * no two of its streams may be equal; when either fails, every image counts as wrong and a warning says
 * why. */
enum status oracle_verify(const struct synth *synth, const struct variant *variant, void *state, uint64_t run,
                          uint64_t *wrong);

#endif
