/* The form in which a stream stores the images and clips of bytes that it decodes: mirrored or not, changed
 * by RandAugment and colour jitter, normalised, partly erased, in any element type and order of axes. With
 * the same seed, the random changes are those of training (train/augment.h). A clip, whose frames are its
 * depth, is changed as a whole. */
#ifndef FDSL_DATA_IMAGE_OUTPUT_H
#define FDSL_DATA_IMAGE_OUTPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/dtype.h"
#include "data/jitter.h"
#include "data/image.h"
#include "data/rand_augment.h"

#define IMAGE_OUTPUT_CHANNELS_MAX 3

/* Set it with image_output_set(). A byte has only 256 values, so each output value is read from a table. */
struct image_output {
    enum dtype type;
    bool interleaved; /* true: NHWC, and frames before rows; false: NCHW */
    bool frames;      /* clips, if not interleaved: frames before channels */
    bool flip;        /* mirror each image horizontally with probability 1/2 (draw_flip()) */
    /* RandAugment after the flip, if rand.operations is not 0. */
    struct rand_augment rand; /* only with a depth of 1 */
    struct jitter color;      /* after RandAugment */
    /* With probability `erasing`, a rectangle becomes noise. Only `erasing`, `height` and `width` are used.
     */
    struct augment erase;
    uint64_t seed; /* of all random changes */
    /* A value is byte * scale + offset, rounded once to float and then to the type. */
    float scale[IMAGE_OUTPUT_CHANNELS_MAX], offset[IMAGE_OUTPUT_CHANNELS_MAX];
    union {
        uint8_t u8[256];
        uint16_t f16[256]; /* also bf16 */
        float f32[256];
    } values[IMAGE_OUTPUT_CHANNELS_MAX]; /* per channel, by byte */
};

/* Returns whether bytes change before they are stored. */
static inline bool image_output_changes(const struct image_output *output)
{
    return output->rand.operations > 0 || jitter_on(&output->color);
}

FDSL_C_BEGIN

/* Sets `type`, `interleaved`, `values`, `scale` and `offset`. Values are (byte / 255 - mean) / deviation,
 * computed as byte * scale + offset in float, as data_gather() does for training, and rounded to the type;
 * with DTYPE_U8, they are the bytes. `mean` and `deviation` have one value per channel. */
void image_output_set(struct image_output *output, enum dtype type, bool interleaved, const double *mean,
                      const double *deviation);

/* Stores an image of bytes with at most IMAGE_OUTPUT_CHANNELS_MAX channels. `to` has room for its values, and
 * is aligned to one of them. `scratch` has room for the bytes of two images; it is only used if
 * image_output_changes(). Thread safe. */
void image_output_store(const struct image_output *output, const struct image *image, uint32_t epoch,
                        uint32_t number, uint8_t *scratch, void *to);

FDSL_C_END

#endif
