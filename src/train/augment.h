/* Augmentation that computes new images from the stored samples in every epoch: random-resized-crop, flip,
 * RandAugment, changes of colour and blur. The stored sample is called the canvas. All steps work on bytes.
 * Afterwards the samples are gathered: shifted, normalised and erased (data_gather()). All frames of a clip,
 * whose depth is above 1, are changed alike.
 *
 *     stored canvas ─ crop, resize, flip ─ RandAugment ─ colour, blur ─ gather
 *
 * An image is a pure function of the seed, the epoch and the number of the sample, with the same bits on host
 * and device (data/rand_augment.h, data/jitter.h). */
#ifndef FDSL_TRAIN_AUGMENT_H
#define FDSL_TRAIN_AUGMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/jitter.h"
#include "data/rand_augment.h"
#include "data/random_boxes.h"
#include "data/resample.h"
#include "train/model.h"

struct augment_plan {
    uint64_t seed;
    uint32_t samples; /* size of the training set; sample numbers >= samples are copies (train_picked()) */
    struct shape canvas, shape; /* of a stored sample, and of a sample of the network, with the same depth */
    bool crop, bicubic, random_filter, flip;
    bool gray; /* all channels of an image are equal, and operations keep them equal */
    struct rand_augment rand;
    struct jitter color;
    struct crop_range range; /* of `crop` */
};

/* ---- Draws ---- */

/* Returns the part of the canvas that becomes the image. */
FDSL_HD struct image_box augment_box(const struct augment_plan *plan, uint32_t epoch, uint32_t sample)
{
    struct image_box whole = {0, 0, plan->canvas.width, plan->canvas.height};
    return plan->crop ? box_random_resized(&plan->range, plan->seed, whole.width, whole.height, epoch, sample)
                      : whole;
}

FDSL_HD bool augment_flips(const struct augment_plan *plan, uint32_t epoch, uint32_t sample)
{
    return plan->flip && draw_flip(plan->seed, epoch, sample);
}

/* Returns whether a crop is resized by the bicubic filter. */
FDSL_HD bool augment_bicubic(const struct augment_plan *plan, uint32_t epoch, uint32_t sample)
{
    return plan->random_filter ? box_bicubic(plan->seed, epoch, sample) : plan->bicubic;
}

/* Draws operation `i` of a sample, and computes its numbers. */
FDSL_HD enum augment_operation augment_draw(const struct augment_plan *plan, uint32_t epoch, uint32_t sample,
                                            uint32_t i, struct augment_numbers *numbers)
{
    return rand_augment_draw(&plan->rand, &plan->shape, plan->seed, epoch, sample, i, numbers);
}

/* ---- Resizing ---- */

/* Rounds a weighted sum of resample_weights() to a byte. */
FDSL_HD uint8_t augment_shifted(int32_t sum, uint32_t bits)
{
    int32_t value = (sum + (1 << (bits - 1))) >> bits;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

FDSL_C_BEGIN

struct train;

/* Prepares the augmentation of a training run for which augment_computes() is true. STATUS_USAGE if the
 * samples are not 8-bit images with one or three channels. */
enum status augment_plan(const struct train *train, struct augment_plan *plan);

/* Memory of a thread that computes images. Zero it before the first use. */
struct augment_scratch {
    uint8_t *rows, *other; /* resized rows of a channel; the output of an operation */
    int16_t *weights;      /* of one output */
    uint32_t *first, *count;
    int16_t *across; /* weights of all outputs along a row */
};

/* Allocates the scratch for a plan. The caller closes it, even after a failure. */
enum status augment_scratch_open(const struct augment_plan *plan, struct augment_scratch *scratch);
void augment_scratch_close(struct augment_scratch *scratch);

/* Computes the image of a sample from its stored values. `image` has room for the values of plan->shape. */
void augment_image(const struct augment_plan *plan, const uint8_t *stored, uint32_t epoch, uint32_t sample,
                   struct augment_scratch *scratch, uint8_t *image);

FDSL_C_END

#endif
