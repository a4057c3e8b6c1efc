/* What training does to an image on its way from a file: decoding, then a shift, a flip and a scale. Each is
 * a pure function, so any loader makes the same values. */
#ifndef FDSL_LOAD_AUGMENT_H
#define FDSL_LOAD_AUGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

enum image_type { IMAGE_U8, IMAGE_F16, IMAGE_F32 };

/* An image as a decoder leaves it. */
struct image {
    uint32_t channels, height, width;
    enum image_type type;
    bool interleaved; /* the channels of a pixel stand together */
    const uint8_t *pixels;
};

/* The parameters of augmentation. */
struct augment {
    uint32_t shift;    /* pixels at most, either way along either axis; what comes in from outside is 0 */
    bool flip;         /* every other image, left to right */
    float mean, scale; /* (value - mean) * scale, of values 0 to 1 for bytes */
    uint64_t seed;
};

FDSL_C_BEGIN

/* Decodes a member: "png" through libpng into `room` (grown by realloc, the caller's), "npy" as a view of its
 * data. `*is_image` is false for members that are none. STATUS_FAILED with the reason where one is broken,
 * STATUS_UNAVAILABLE for PNG in a build without libpng. */
enum status image_decode(const char *extension, const uint8_t *data, size_t size, uint8_t **room,
                         size_t *room_bytes, struct image *image, bool *is_image);

/* Augments an image into channels x height x width floats. The draws are those of (seed, epoch, sample). */
void image_augment(const struct augment *augment, const struct image *image, uint64_t epoch, uint32_t sample,
                   float *values);

FDSL_C_END

#endif
