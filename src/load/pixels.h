/* Compares delivered images with images that the CPU decodes, for --verify. A device may decode a JPEG to
 * bytes that differ a little from those of libjpeg, so the comparison has a tolerance. It is in bytes, before
 * they are converted to values. */
#ifndef FDSL_LOAD_PIXELS_H
#define FDSL_LOAD_PIXELS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "load/convert.h"

#define PIXEL_GUESS_BITS 12

/* The conversions of all bytes, as the bits of the values. Set it with pixel_values_set(). */
struct pixel_values {
    uint32_t value_bytes; /* bytes per value: 1, 2 or 4 */
    uint32_t words[256];  /* by byte */
    /* By hash of a word: a byte with this hash; 0 if there is none. */
    uint8_t guesses[1 << PIXEL_GUESS_BITS];
};

/* A decoded image: interleaved bytes. */
struct pixels {
    const uint8_t *bytes;
    uint64_t channels, height, width;
};

/* The form in which an image is delivered. */
struct pixel_form {
    const struct pixel_values *values; /* one per channel */
    bool interleaved;                  /* true: NHWC; false: NCHW */
    bool mirrored;                     /* horizontally */
};

FDSL_C_BEGIN

/* Sets `values` to the conversions of bytes. convert->source is DTYPE_U8. */
void pixel_values_set(struct pixel_values *values, const struct convert *convert);

/* Returns whether each value of a delivered image is the conversion of a byte that differs from the decoded
 * byte by at most `tolerance`. `delivered` may be unaligned. Thread safe. */
bool pixels_match(const struct pixels *pixels, const struct pixel_form *form, uint32_t tolerance,
                  const uint8_t *delivered);

FDSL_C_END

#endif
