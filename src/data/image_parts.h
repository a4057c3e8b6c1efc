/* Internal interface of the files that decode images: image.c (whole images) and image_fit.c (parts of
 * images, resized). No other file includes this header. */
#ifndef FDSL_DATA_IMAGE_PARTS_H
#define FDSL_DATA_IMAGE_PARTS_H

#include "data/image.h"

/* Reads the header of a JPEG file with the decoder of the scratch. */
enum status image_begin_jpeg(struct image_scratch *scratch, const uint8_t *data, size_t size,
                             struct jpeg_shape *shape);

#endif
