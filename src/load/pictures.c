#include "load/pictures.h"

#include <inttypes.h>
#include <stdlib.h>
#include <strings.h>

#include "data/label.h"
#include "data/plain.h"

#define REMEDY \
    "prepare the data set from labelled images: --prepare DIR --from idx, cifar or synth (with --classes N)"

bool pictures_is_label(const struct dataset_member *member)
{
    return strcasecmp(member->extension, "cls") == 0;
}

static bool is_picture(const struct dataset_member *member)
{
    return strcasecmp(member->extension, "npy") == 0 || strcasecmp(member->extension, "png") == 0;
}

enum status pictures_check(const struct pictures *pictures, const struct image *image)
{
    if (image->channels == pictures->channels && image->height == pictures->height &&
        image->width == pictures->width && image->type == pictures->type &&
        image->interleaved == pictures->interleaved)
        return STATUS_OK;
    return status_set(
        STATUS_FAILED,
        "this image has %" PRIu32 "x%" PRIu32 "x%" PRIu32 " values, but the first image has %" PRIu32
        "x%" PRIu32 "x%" PRIu32
        ", or their types or layouts differ; all images of a training set must have the same shape, type "
        "and layout (NHWC in .png, NCHW in .npy)",
        image->channels, image->height, image->width, pictures->channels, pictures->height, pictures->width);
}

/* Returns the only member of a sample for which `is` is true, or NULL. */
static const struct dataset_member *only_member(const struct dataset *dataset,
                                                const struct dataset_sample *sample,
                                                bool (*is)(const struct dataset_member *))
{
    const struct dataset_member *found = NULL;
    for (uint32_t m = 0; m < sample->members; m++) {
        const struct dataset_member *member = &dataset->members[sample->member + m];
        if (is(member) && found)
            return NULL;
        found = is(member) ? member : found;
    }
    return found;
}

static enum status read_label(struct plain *plain, const struct dataset_sample *sample,
                              struct pictures *pictures)
{
    const struct dataset_member *member = only_member(plain->dataset, sample, pictures_is_label);
    uint8_t text[LABEL_BYTES_MAX];
    int32_t label;
    if (!member)
        return status_set(STATUS_USAGE, "it does not have exactly one label (.cls); " REMEDY);
    if (!only_member(plain->dataset, sample, is_picture))
        return status_set(STATUS_USAGE, "it does not have exactly one image (.npy, .png); " REMEDY);
    TRY(plain_bytes(plain, member, member->size < sizeof text ? member->size : sizeof text, text));
    if (label_read(text, member->size, INT32_MAX, &label) != STATUS_OK)
        return STATUS_USAGE;
    if ((uint32_t)label >= pictures->classes)
        pictures->classes = (uint32_t)label + 1;
    return STATUS_OK;
}

/* Takes the shape and type of the training set from the first image. */
static enum status read_picture(struct plain *plain, const struct dataset_member *member,
                                struct pictures *pictures)
{
    uint8_t *bytes = malloc(member->size + 1);
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image = false;
    enum status status = bytes ? plain_bytes(plain, member, member->size, bytes)
                               : status_set(STATUS_FAILED, "out of memory for an image");
    if (status == STATUS_OK)
        status = image_decode(member->extension, bytes, member->size, &scratch, &image, &is_image);
    if (status == STATUS_OK && (!is_image || image.depth > 1))
        status = status_set(STATUS_USAGE, "its array is not an image; an image has shape (height, width) or "
                                          "(channels, height, width) and values of type |u1, <f2 or <f4");
    if (status == STATUS_OK)
        *pictures =
            (struct pictures){image.channels, image.height, image.width, image.type, image.interleaved, 0};
    image_scratch_close(&scratch);
    free(bytes);
    return status;
}

enum status pictures_find(const struct dataset *dataset, struct pictures *pictures)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    enum status status = STATUS_OK;
    *pictures = (struct pictures){0};
    for (uint32_t i = 0; status == STATUS_OK && i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        status = read_label(&plain, sample, pictures);
        if (status == STATUS_OK && i == 0) {
            uint32_t classes = pictures->classes;
            status = read_picture(&plain, only_member(dataset, sample, is_picture), pictures);
            pictures->classes = classes;
        }
        if (status != STATUS_OK)
            status_prefix(status, "%s: sample '%s'", dataset->path, sample->key);
    }
    plain_close(&plain);
    return status;
}
