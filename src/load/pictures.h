/* A set as a trainer sees it: one picture and one label in every sample, all pictures alike. */
#ifndef FDSL_LOAD_PICTURES_H
#define FDSL_LOAD_PICTURES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/batch.h"
#include "core/portable.h"
#include "core/status.h"
#include "load/augment.h"
#include "load/dataset.h"

struct pictures {
    uint32_t channels, height, width;
    enum image_type type;
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

/* The label in the bytes of a `.cls`. STATUS_FAILED where they hold no class of the set. */
enum status pictures_label(const struct pictures *pictures, const uint8_t *text, uint64_t size,
                           int32_t *label);

bool pictures_is_label(const struct dataset_member *member);

/* The type of values in a batch. */
static inline enum batch_type pictures_batch_type(enum image_type type)
{
    return type == IMAGE_U8 ? BATCH_U8 : type == IMAGE_F16 ? BATCH_F16 : BATCH_F32;
}

FDSL_C_END

#endif
