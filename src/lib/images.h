/* Generated images as a source of streams (images.c). */
#ifndef FDSL_LIB_IMAGES_H
#define FDSL_LIB_IMAGES_H

#include "data/device_batches.h"
#include "data/image_output.h"
#include "lib/call.h"
#include "synth/input.h"

struct images {
    struct synth synth;
    int generator; /* index of lib_find_generator() */
    uint32_t count;
    uint64_t fresh; /* increment of image numbers per epoch */
    uint64_t hash;  /* of everything that determines the pixels, but not of the output format */
};

/* Opens the images of fdsl_images_open(). The caller closes them with images_free(), even after an error. */
enum status images_open(const struct fdsl_config *config, uint64_t count, int fresh, struct images *images);
void images_free(struct images *images);

/* Returns the largest label plus 1. */
static inline uint32_t images_classes(const struct images *images)
{
    const struct synth *synth = &images->synth;
    uint32_t classes = 0;
    for (uint32_t c = 0; c < synth->class_count; c++)
        classes = synth->rows[c].id >= classes ? synth->rows[c].id + 1 : classes;
    return classes;
}

/* Sets the type and the layout of `output`, and `*transform` to the hash of the output format. */
void images_get_format(const struct images *images, struct image_output *output, uint64_t *transform);

/* Opens what a mixture needs of generated images on config->device: the generator, for `batch` images. */
enum status images_mixed_source(const struct images *images, const struct fdsl_stream_config *config,
                                uint32_t batch, struct device_mixed_source *source);

/* A source of generated images. */
struct images_plan {
    struct stream_plan plan;
    struct device_order order; /* lists the same samples as `plan`; `fresh`, `host_numbers` and `captures` are
                                  not set */
    uint64_t (*number)(const void *context, uint64_t epoch, uint32_t number); /* as in struct
                                  generated_stream_request; NULL: none */
    bool even; /* all steps have the same number of samples on this rank */
};

/* Opens a stream in host memory (`*stream`) or on config->device (`*batches`; `*stream` is its stream). The
 * images must outlive the stream. */
enum status images_stream_open(const struct images *images, const struct fdsl_stream_config *config,
                               const struct images_plan *plan, struct stream **stream,
                               struct device_batches **batches);

#endif
