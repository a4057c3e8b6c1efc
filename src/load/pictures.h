/* A training set: exactly one image and one label per sample, all images of the same shape and type. */
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

/* Examines the set: decodes the first image and reads every label. STATUS_USAGE, with the sample, if it lacks
 * an image (.npy, .png) or a label (.cls), has several, or its label is not a class. STATUS_FAILED if it
 * cannot be read. */
enum status pictures_find(const struct dataset *dataset, struct pictures *pictures);

/* Checks that an image has the shape and type of the first one. STATUS_FAILED names the difference. */
enum status pictures_check(const struct pictures *pictures, const struct image *image);

bool pictures_is_label(const struct dataset_member *member);

FDSL_C_END

#endif
