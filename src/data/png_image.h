/* Encodes and decodes PNG files in memory: 8-bit images, gray or RGB. */
#ifndef FDSL_DATA_PNG_IMAGE_H
#define FDSL_DATA_PNG_IMAGE_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define PNG_PIXELS_MAX (UINT32_C(1) << 28) /* maximum number of pixels per image */

struct png_shape {
    uint32_t width, height;
    uint32_t channels; /* 1 or 3, interleaved */
};

FDSL_C_BEGIN

/* Encodes pixels as a PNG file in memory. `pixels` has no gaps between rows. The output depends only on the
 * pixels and the versions of libpng and zlib. The caller frees `*bytes`. STATUS_USAGE if a side is 0 or
 * there are more than PNG_PIXELS_MAX pixels; STATUS_UNAVAILABLE in builds without libpng. */
enum status png_encode(const uint8_t *pixels, const struct png_shape *shape, void **bytes, size_t *size);

/* Sets `*shape` to the shape that png_decode() produces. STATUS_FAILED if the bytes are not a PNG file, if
 * the image has more than PNG_PIXELS_MAX pixels, or if its header claims more pixels than the file can
 * contain.
 */
enum status png_shape(const void *bytes, size_t size, struct png_shape *shape);

/* Decodes into `pixels`, which holds `capacity` bytes: 8-bit gray or RGB, for any kind of PNG. Transparency
 * and gamma are ignored, as Pillow's convert("RGB") and torchvision.io do. 16-bit values are rounded to the
 * nearest 8-bit value. Sets `*orientation` to that of the chunk eXIf, 1 to 8, or to 1 if there is none; the
 * pixels are as stored. STATUS_FAILED as for png_shape(), or if the image is larger than `capacity` or
 * damaged; `pixels` is then undefined. Thread safe. */
enum status png_decode(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                       struct png_shape *shape, uint32_t *orientation);

FDSL_C_END

#endif
