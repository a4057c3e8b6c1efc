/* Decoder of images and volumes, shared by all workloads. */
#ifndef FDSL_DATA_IMAGE_H
#define FDSL_DATA_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"

struct image {
    uint32_t channels, depth, height, width; /* depth is 1 except for volumes */
    enum dtype type;                         /* DTYPE_U8, DTYPE_F16 or DTYPE_F32 */
    bool interleaved; /* the channels of a pixel are adjacent; otherwise each channel is stored as a plane */
    const uint8_t *pixels; /* may be unaligned */
};

/* Number of values. */
static inline size_t image_values(const struct image *image)
{
    return (size_t)image->channels * image->depth * image->height * image->width;
}

FDSL_C_BEGIN

/* Decodes a member according to its extension. "png" is decoded with libpng into `*room`, a buffer of the
 * caller that grows by realloc(). "npy" becomes a view of `data`, with axes (height, width), (channels,
 * height, width) or (channels, depth, height, width). `*is_image` is false for all other members and arrays.
 * STATUS_FAILED, with the reason, for a broken member; STATUS_UNAVAILABLE for PNG in a build without libpng.
 * Thread safe. */
enum status image_decode(const char *extension, const uint8_t *data, size_t size, uint8_t **room,
                         size_t *room_bytes, struct image *image, bool *is_image);

FDSL_C_END

#endif
