/* What training does to a decoded image: a shift, a flip and a scale. A pure function, so every loader
 * computes the same values. */
#ifndef FDSL_LOAD_AUGMENT_H
#define FDSL_LOAD_AUGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "data/draws.h"
#include "data/image.h"

/* The parameters of augmentation. */
struct augmentation {
    struct augment move;
    float mean, scale; /* (value - mean) * scale, after the move; bytes are 0 to 1 */
    uint64_t seed;
};

FDSL_C_BEGIN

/* Augments an image into channels x height x width floats. The random numbers are those of draw_move(). */
void image_augment(const struct augmentation *augmentation, const struct image *image, uint32_t epoch,
                   uint32_t sample, float *values);

FDSL_C_END

#endif
