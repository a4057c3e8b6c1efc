#include "train/augment.h"

#include <stdlib.h>
#include <string.h>

#include "train/engine.h"

/* ---- The plan ---- */

static bool is_image(const struct shape *shape)
{
    return shape->channels == 1 || shape->channels == 3;
}

/* Returns whether pixels from outside have equal channels. */
static bool fills_gray(const struct augment_policy *policy)
{
    return policy->fill[0] == policy->fill[1] && policy->fill[0] == policy->fill[2];
}

enum status augment_plan(const struct train *train, struct augment_plan *plan)
{
    const struct data *data = train->data;
    const struct augment *augment = &train->augment;
    const struct shape *canvas = data->canvas_bytes ? &data->canvas : &data->shape;
    if (data->type != DTYPE_U8 || !is_image(&data->shape) || !is_image(canvas))
        return status_set(STATUS_USAGE,
                          "8-bit images with one or three channels are needed for --fit random-resized-crop, "
                          "--rand-augment, --color-jitter, --grayscale, --blur and --repeats; drop these "
                          "options, or use other --data");
    if (augment->operations > 0 && data->shape.depth > 1)
        return status_set(STATUS_USAGE,
                          "--rand-augment changes images, but these samples are clips of %u frames; "
                          "drop it, or use --color-jitter",
                          data->shape.depth);
    *plan = (struct augment_plan){.seed = train->seed,
                                  .samples = data->sets[DATA_TRAIN].count,
                                  .canvas = *canvas,
                                  .shape = data->shape,
                                  .crop = augment->crop,
                                  .range = augment->range,
                                  .bicubic = augment->bicubic || augment->random_filter,
                                  .random_filter = augment->random_filter,
                                  .flip = augment->flip,
                                  .color = augment->color,
                                  .gray = (data->gray || canvas->channels < data->shape.channels) &&
                                          (augment->operations == 0 || fills_gray(&augment->policy)),
                                  .rand = {augment->operations, augment->magnitude, augment->policy}};
    return jitter_check(&plan->color, &data->shape, &jitter_options);
}

/* ---- Crop, resize, flip ---- */

/* Returns the maximum number of input values from which one output value along an axis is computed. */
static uint32_t taps_of(const struct augment_plan *plan, uint32_t in, uint32_t out)
{
    return resample_axis_with(in, out, plan->bicubic).taps;
}

enum status augment_scratch_open(const struct augment_plan *plan, struct augment_scratch *scratch)
{
    const struct shape *canvas = &plan->canvas, *shape = &plan->shape;
    scratch->rows = malloc((size_t)canvas->height * shape->width);
    scratch->other = malloc(shape_values(shape));
    scratch->weights = malloc(taps_of(plan, canvas->height, shape->height) * sizeof *scratch->weights);
    scratch->first = malloc(shape->width * sizeof *scratch->first);
    scratch->count = malloc(shape->width * sizeof *scratch->count);
    scratch->across =
        malloc((size_t)taps_of(plan, canvas->width, shape->width) * shape->width * sizeof *scratch->across);
    return ALLOCATED(scratch->rows && scratch->other && scratch->weights && scratch->first &&
                         scratch->count && scratch->across,
                     "out of memory to augment samples");
}

void augment_scratch_close(struct augment_scratch *scratch)
{
    free(scratch->rows);
    free(scratch->other);
    free(scratch->weights);
    free(scratch->first);
    free(scratch->count);
    free(scratch->across);
    *scratch = (struct augment_scratch){0};
}

/* Resizes the rows of a box of a plane along x. */
static void resize_rows(const struct augment_scratch *scratch, const struct resample_axis *axis,
                        struct image_box box, const uint8_t *plane, uint32_t pitch)
{
    for (uint32_t y = 0; y < box.height; y++) {
        const uint8_t *row = plane + (size_t)(box.top + y) * pitch + box.left;
        for (uint32_t x = 0; x < axis->out; x++) {
            const int16_t *weights = scratch->across + (size_t)x * axis->taps;
            int32_t sum = 0;
            for (uint32_t t = 0; t < scratch->count[x]; t++)
                sum += weights[t] * row[scratch->first[x] + t];
            scratch->rows[(size_t)y * axis->out + x] = augment_shifted(sum, axis->bits);
        }
    }
}

/* Resizes scratch->rows, which resize_rows() has computed, along y. */
static void resize_columns(const struct augment_scratch *scratch, const struct resample_axis *axis,
                           uint32_t width, bool flip, uint8_t *plane)
{
    for (uint32_t y = 0; y < axis->out; y++) {
        uint32_t first, count = resample_weights(axis, y, &first, scratch->weights);
        for (uint32_t x = 0; x < width; x++) {
            int32_t sum = 0;
            for (uint32_t t = 0; t < count; t++)
                sum += scratch->weights[t] * scratch->rows[(size_t)(first + t) * width + x];
            plane[(size_t)y * width + (flip ? width - 1 - x : x)] = augment_shifted(sum, axis->bits);
        }
    }
}

/* Crops, resizes and flips each plane of an image. A canvas of one channel is resized once and copied to all
 * channels. */
static void resize(const struct augment_plan *plan, const uint8_t *stored, struct image_box box, bool bicubic,
                   bool flip, const struct augment_scratch *scratch, uint8_t *image)
{
    const struct shape *canvas = &plan->canvas, *shape = &plan->shape;
    const uint32_t there = canvas->channels * canvas->depth, planes = shape->channels * shape->depth;
    const size_t from = (size_t)canvas->height * canvas->width, to = (size_t)shape->height * shape->width;
    const struct resample_axis across = resample_axis_with(box.width, shape->width, bicubic);
    const struct resample_axis down = resample_axis_with(box.height, shape->height, bicubic);
    for (uint32_t x = 0; x < across.out; x++)
        scratch->count[x] =
            resample_weights(&across, x, &scratch->first[x], scratch->across + (size_t)x * across.taps);
    for (uint32_t k = 0; k < planes; k++) {
        if (k < there) {
            resize_rows(scratch, &across, box, stored + k * from, canvas->width);
            resize_columns(scratch, &down, shape->width, flip, image + k * to);
        } else
            memcpy(image + k * to, image + k % there * to, to);
    }
}

void augment_image(const struct augment_plan *plan, const uint8_t *stored, uint32_t epoch, uint32_t sample,
                   struct augment_scratch *scratch, uint8_t *image)
{
    resize(plan, stored, augment_box(plan, epoch, sample), augment_bicubic(plan, epoch, sample),
           augment_flips(plan, epoch, sample), scratch, image);
    rand_augment_apply(&plan->rand, &plan->shape, plan->seed, epoch, sample, image, scratch->other);
    jitter_apply(&plan->color, &plan->shape, plan->seed, epoch, sample, image, scratch->other);
}
