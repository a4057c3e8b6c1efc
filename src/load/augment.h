/* Augmentation of a decoded image for training: shift, flip and scale. It is a pure function, so every loader
 * computes identical values. */
#ifndef FDSL_LOAD_AUGMENT_H
#define FDSL_LOAD_AUGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "data/draws.h"
#include "data/image.h"

/* Parameters of augmentation. */
struct augmentation {
    struct augment move;
    float mean, scale; /* (value - mean) * scale, after the shift and flip; bytes count as 0 to 1 */
    uint64_t seed;
};

FDSL_C_BEGIN

/* Augments an image into channels x height x width floats. Random numbers come from draw_move().
 * Thread safe. */
void image_augment(const struct augmentation *augmentation, const struct image *image, uint32_t epoch,
                   uint32_t sample, float *values);

FDSL_C_END

#endif
