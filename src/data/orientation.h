/* The eight orientations of EXIF: how a stored image is turned or mirrored to be upright. */
#ifndef FDSL_DATA_ORIENTATION_H
#define FDSL_DATA_ORIENTATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"

/* The upright pixel (x, y) is the stored pixel (a, b). If `transpose` is set, (a, b) is (y, x), otherwise (x,
 * y). If `flip_x` is set, a then becomes width - 1 - a. If `flip_y` is set, b becomes height - 1 - b. Width
 * and height are those of the stored image. */
struct orientation {
    bool transpose, flip_x, flip_y;
};

/* Returns the orientation with this EXIF number, 1 to 8 (EXIF 2.32, tag Orientation). */
FDSL_HD struct orientation orientation_of(uint32_t number)
{
    struct orientation turn = {number >= 5, number == 2 || number == 3 || number == 7 || number == 8,
                               number == 3 || number == 4 || number == 6 || number == 7};
    return turn;
}

/* Returns the index of the stored pixel that becomes the upright pixel (x, y). */
FDSL_HD size_t orientation_from(struct orientation turn, uint32_t width, uint32_t height, uint32_t x,
                                uint32_t y)
{
    uint32_t a = turn.transpose ? y : x, b = turn.transpose ? x : y;
    if (turn.flip_x)
        a = width - 1 - a;
    if (turn.flip_y)
        b = height - 1 - b;
    return (size_t)b * width + a;
}

FDSL_C_BEGIN

/* Turns an image of width x height pixels of `channels` bytes each. `out` does not overlap `pixels`. */
void orientation_turn(struct orientation turn, const uint8_t *pixels, uint32_t width, uint32_t height,
                      uint32_t channels, uint8_t *out);

/* Returns the orientation, 1 to 8, from EXIF data, which begin with the header of TIFF ("II" or "MM"): the
 * contents of a PNG's chunk eXIf, or of a JPEG's marker APP1 after "Exif" and two zeros. Returns 0 if the
 * data have no valid orientation, or are damaged. */
uint32_t orientation_in_exif(const uint8_t *tiff, size_t bytes);

FDSL_C_END

#endif
