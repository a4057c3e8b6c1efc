/* Augmentation of a decoded image for training: shift, flip and normalisation. The result is a pure function
 * of the parameters, the image, the epoch and the sample number, so it is the same for all variants on the
 * CPU. Variants on a GPU use load/convert.h instead. */
#ifndef FDSL_LOAD_AUGMENT_H
#define FDSL_LOAD_AUGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "data/random_draws.h"
#include "data/image.h"

#define AUGMENT_CHANNELS_MAX 3

/* Parameters of augmentation. */
struct augmentation {
    struct augment move;
    /* Per channel, after the shift: (value - mean) * scale; bytes are first divided by 255. Channels with an
     * index of at least `channels` use mean[0] and scale[0]. */
    float mean[AUGMENT_CHANNELS_MAX], scale[AUGMENT_CHANNELS_MAX];
    uint32_t channels;
    uint64_t seed;
};

FDSL_C_BEGIN

/* Writes the augmented image to `values`: channels x height x width floats. draw_move() gives the shift and
 * the flip of `sample` in `epoch`. Thread safe. */
void image_augment(const struct augmentation *augmentation, const struct image *image, uint32_t epoch,
                   uint32_t sample, float *values);

FDSL_C_END

#endif
