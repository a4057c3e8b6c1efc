#include "load/pictures.h"

#include <inttypes.h>
#include <stdlib.h>

#include "data/plain_reader.h"

enum status pictures_check(const struct pictures *pictures, const struct image *image)
{
    if (image->channels == pictures->channels && image->height == pictures->height &&
        image->width == pictures->width && image->type == pictures->type &&
        image->interleaved == pictures->interleaved)
        return STATUS_OK;
    return status_set(
        STATUS_FAILED,
        "this image (%" PRIu32 "x%" PRIu32 "x%" PRIu32 ") and the first image (%" PRIu32 "x%" PRIu32
        "x%" PRIu32
        ") differ in shape, type or layout; all images of a training set must have the same shape, "
        "type and layout (NHWC in .png, NCHW in .npy)",
        image->channels, image->height, image->width, pictures->channels, pictures->height, pictures->width);
}

static enum status read_label(struct plain *plain, const struct dataset_sample *sample,
                              struct pictures *pictures)
{
    int32_t label;
    enum status status = sample->image == sample->members
                             ? dataset_lacks(plain->dataset, sample, &plain->dataset->choice.image, "image")
                             : plain_label(plain, sample, INT32_MAX, &label);
    if (status != STATUS_OK)
        return status == STATUS_FAILED ? STATUS_USAGE : status;
    if ((uint32_t)label >= pictures->classes)
        pictures->classes = (uint32_t)label + 1;
    return STATUS_OK;
}

/* Takes the shape and type of the training set from the first image. */
static enum status read_picture(struct plain *plain, const struct dataset_member *member,
                                const struct image_fit *fit, struct pictures *pictures)
{
    FREED uint8_t *bytes = malloc(member->size + 1);
    CLOSED_BY(image_scratch_close) struct image_scratch scratch = {0};
    struct image image;
    bool is_image = false;
    TRY(ALLOCATED(bytes, "out of memory for an image"));
    TRY(plain_bytes(plain, member, member->size, bytes));
    TRY(image_fit(fit, members_format(member->extension), bytes, member->size, 0, 0, &scratch, &image,
                  &is_image));
    if (!is_image || image.depth > 1)
        return status_set(STATUS_USAGE, "its array is not an image; an image has shape (height, width) or "
                                        "(channels, height, width) and values of type |u1, <f2 or <f4");
    *pictures =
        (struct pictures){image.channels, image.height, image.width, image.type, image.interleaved, 0};
    return STATUS_OK;
}

enum status pictures_find(const struct dataset *dataset, const struct image_fit *fit,
                          struct pictures *pictures)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    enum status status = STATUS_OK;
    *pictures = (struct pictures){0};
    for (uint32_t i = 0; status == STATUS_OK && i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        status = read_label(&plain, sample, pictures);
        if (status == STATUS_OK && i == 0) {
            uint32_t classes = pictures->classes;
            status = read_picture(&plain, &dataset->members[sample->member + sample->image], fit, pictures);
            pictures->classes = classes;
        }
        if (status != STATUS_OK)
            status_prefix(status, "%s: sample '%s'", dataset->path, sample->key);
    }
    plain_close(&plain);
    return status;
}
