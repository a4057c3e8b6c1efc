/* PNG in memory: 8-bit pictures, gray or RGB. */
#ifndef FDSL_DATA_PNG_IMAGE_H
#define FDSL_DATA_PNG_IMAGE_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define PNG_PIXELS_MAX (UINT32_C(1) << 28) /* of one picture */

struct png_shape {
    uint32_t width, height;
    uint32_t channels; /* 1 or 3, the channels of a pixel together */
};

FDSL_C_BEGIN

/* Makes the PNG file of these pixels, row by row without gaps; the same bytes for the same pixels and
 * libpng. The caller frees `*bytes`. STATUS_USAGE for a shape that no PNG file has, STATUS_UNAVAILABLE where
 * the build has no libpng. */
enum status png_encode(const uint8_t *pixels, const struct png_shape *shape, void **bytes, size_t *size);

/* The shape that png_decode() will give: other kinds of PNG become 8-bit gray or RGB, without transparency.
 * STATUS_FAILED for bytes that are no PNG file, one of more than PNG_PIXELS_MAX pixels, or of more than so
 * few bytes can hold. */
enum status png_shape(const void *bytes, size_t size, struct png_shape *shape);

/* Decodes into `pixels`, which has room for `capacity` bytes. Where STATUS_FAILED comes from damaged bytes
 * the pixels are undefined. May be called by several threads at a time. */
enum status png_decode(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                       struct png_shape *shape);

FDSL_C_END

#endif
