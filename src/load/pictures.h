/* A set as a trainer sees it: one picture and one label in every sample, all pictures alike. */
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
    uint32_t classes; /* the largest label and one */
};

FDSL_C_BEGIN

/* Looks the set through: the first picture, and every label. STATUS_USAGE where a sample has no picture
 * (.npy, .png) or no label (.cls) or several, or a label that is no class, with the sample; STATUS_FAILED
 * where it cannot be read. */
enum status pictures_find(const struct dataset *dataset, struct pictures *pictures);

/* Whether a picture is like the first one; STATUS_FAILED says how not. */
enum status pictures_check(const struct pictures *pictures, const struct image *image);

bool pictures_is_label(const struct dataset_member *member);

FDSL_C_END

#endif
