/* A training set: one image and one label per sample, all images of the same shape, type and layout. */
#ifndef FDSL_LOAD_PICTURES_H
#define FDSL_LOAD_PICTURES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/batch.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/image.h"

struct pictures {
    uint32_t channels, height, width;
    enum dtype type;
    bool interleaved;
    uint32_t classes; /* the largest label plus one */
};

FDSL_C_BEGIN

/* Decodes the first image and reads every label. STATUS_USAGE, with a message that names the sample, in three
 * cases: a sample has no image or no label; its label is negative or not a number; or the array of the first
 * sample is not an image. STATUS_FAILED if reading fails. */
enum status pictures_find(const struct dataset *dataset, const struct image_fit *fit,
                          struct pictures *pictures);

/* Checks that an image has the shape, type and layout of the first image. STATUS_FAILED otherwise. */
enum status pictures_check(const struct pictures *pictures, const struct image *image);

FDSL_C_END

#endif
