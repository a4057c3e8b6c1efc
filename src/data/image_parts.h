/* Internal interface of the files that decode images: image.c (whole images), image_fit.c (parts of images,
 * resized), png_image.c and jpeg_image.c. No other file includes this header. */
#ifndef FDSL_DATA_IMAGE_PARTS_H
#define FDSL_DATA_IMAGE_PARTS_H

#include "data/image.h"

/* Reads the header of a JPEG file with the decoder of the scratch. */
enum status image_begin_jpeg(struct image_scratch *scratch, const uint8_t *data, size_t size,
                             struct jpeg_shape *shape);

/* Returns STATUS_FAILED if an image of `size` bytes is shorter than a header of its format, which has at
 * least `least` bytes. The messages of the libraries do not say so. */
static inline enum status image_check_size(const char *format, size_t size, size_t least)
{
    if (size == 0)
        return status_set(STATUS_FAILED, "the image is empty (0 bytes)");
    return size < least
               ? status_set(STATUS_FAILED,
                            "the image has %zu bytes, fewer than the header of a %s file (%zu bytes)", size,
                            format, least)
               : STATUS_OK;
}

#endif
