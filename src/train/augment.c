#include "train/augment.h"

#include <stdlib.h>
#include <string.h>

#include "train/engine.h"

/* ---- The plan ---- */

/* Angles of rotations are positive counterclockwise. Shears leave the top left corner of the image in place.
 */
struct augment_numbers augment_numbers(enum augment_operation operation, bool negative, double magnitude,
                                       const struct shape *shape)
{
    const double share = magnitude / AUGMENT_MAGNITUDE_MAX, sign = negative ? -share : share;
    const double width = shape->width, height = shape->height;
    const double shear = 0.3 * sign, move = -150.0 / 331 * sign, angle = -sign * 30 * acos(-1.0) / 180;
    const double middle_x = (width - 1) / 2, middle_y = (height - 1) / 2;
    struct augment_numbers numbers = {.map = {1, 0, 0, 0, 1, 0},
                                      .factor = (float)(1 + 0.9 * sign),
                                      .mask = 255u << lround(4 * share),
                                      .at_least = (float)(255 * (1 - share))};
    float *map = numbers.map;
    switch (operation) {
    case AUGMENT_SHEAR_X:
        map[1] = (float)shear;
        map[2] = (float)(shear / 2);
        break;
    case AUGMENT_SHEAR_Y:
        map[3] = (float)shear;
        map[5] = (float)(shear / 2);
        break;
    case AUGMENT_TRANSLATE_X:
        map[2] = (float)(move * width);
        break;
    case AUGMENT_TRANSLATE_Y:
        map[5] = (float)(move * height);
        break;
    case AUGMENT_ROTATE:
        map[0] = map[4] = (float)cos(angle);
        map[1] = (float)sin(angle);
        map[3] = (float)-sin(angle);
        map[2] = (float)(middle_x - cos(angle) * middle_x - sin(angle) * middle_y);
        map[5] = (float)(middle_y + sin(angle) * middle_x - cos(angle) * middle_y);
        break;
    default:
        break;
    }
    return numbers;
}

static bool is_image(const struct shape *shape)
{
    return shape->depth == 1 && (shape->channels == 1 || shape->channels == 3);
}

enum status augment_plan(const struct train *train, struct augment_plan *plan)
{
    const struct data *data = train->data;
    const struct augment *augment = &train->augment;
    const struct shape *canvas = data->canvas_bytes ? &data->canvas : &data->shape;
    if (data->type != DTYPE_U8 || !is_image(&data->shape) || !is_image(canvas))
        return status_set(STATUS_USAGE,
                          "8-bit images with one or three channels are needed for --fit random-resized-crop, "
                          "--rand-augment and --repeats; drop these options, or use other --data");
    *plan = (struct augment_plan){.seed = train->seed,
                                  .samples = data->sets[DATA_TRAIN].count,
                                  .canvas = *canvas,
                                  .shape = data->shape,
                                  .crop = augment->crop,
                                  .bicubic = augment->bicubic,
                                  .flip = augment->flip,
                                  .gray = data->gray || canvas->channels < data->shape.channels,
                                  .operations = augment->operations};
    for (int operation = 0; operation < AUGMENT_OPERATIONS; operation++)
        for (int sign = 0; sign < 2; sign++)
            plan->numbers[operation][sign] =
                augment_numbers((enum augment_operation)operation, sign, augment->magnitude, &data->shape);
    return STATUS_OK;
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

/* Crops, resizes and flips an image. A canvas of one channel is resized once and copied to all channels. */
static void resize(const struct augment_plan *plan, const uint8_t *stored, struct image_box box, bool flip,
                   const struct augment_scratch *scratch, uint8_t *image)
{
    const struct shape *canvas = &plan->canvas, *shape = &plan->shape;
    const size_t from = (size_t)canvas->height * canvas->width, to = (size_t)shape->height * shape->width;
    const struct resample_axis across = resample_axis_with(box.width, shape->width, plan->bicubic);
    const struct resample_axis down = resample_axis_with(box.height, shape->height, plan->bicubic);
    for (uint32_t x = 0; x < across.out; x++)
        scratch->count[x] =
            resample_weights(&across, x, &scratch->first[x], scratch->across + (size_t)x * across.taps);
    for (uint32_t c = 0; c < shape->channels; c++) {
        if (c < canvas->channels) {
            resize_rows(scratch, &across, box, stored + c * from, canvas->width);
            resize_columns(scratch, &down, shape->width, flip, image + c * to);
        } else
            memcpy(image + c * to, image, to);
    }
}

/* ---- RandAugment ---- */

/* Counts how often each value occurs in each channel, and computes the statistics of the channels. */
static void count_values(const struct shape *shape, const uint8_t *image, uint32_t counts[][AUGMENT_LEVELS],
                         struct augment_channel *channels)
{
    const uint32_t pixels = shape->height * shape->width;
    uint32_t sums[AUGMENT_CHANNELS_MAX] = {0};
    for (uint32_t c = 0; c < shape->channels; c++) {
        struct augment_channel *channel = &channels[c];
        memset(counts[c], 0, sizeof counts[c]);
        for (uint32_t i = 0; i < pixels; i++)
            counts[c][image[(size_t)c * pixels + i]]++;
        channel->least = AUGMENT_LEVELS;
        for (uint32_t v = 0; v < AUGMENT_LEVELS; v++) {
            if (counts[c][v] == 0)
                continue;
            channel->least = channel->least < v ? channel->least : v;
            channel->most = v;
            sums[c] += v * counts[c][v];
        }
        channel->step = augment_equalize_step(pixels, counts[c][channel->most]);
    }
    for (uint32_t c = 0; c < shape->channels; c++)
        channels[c].mean = augment_mean(sums, shape->channels, pixels);
}

static void apply_table(const struct shape *shape, enum augment_operation operation,
                        const struct augment_numbers *numbers, const uint8_t *from, uint8_t *to)
{
    const uint32_t pixels = shape->height * shape->width;
    uint32_t counts[AUGMENT_CHANNELS_MAX][AUGMENT_LEVELS] = {{0}};
    struct augment_channel channels[AUGMENT_CHANNELS_MAX] = {{0}};
    if (augment_counts(operation))
        count_values(shape, from, counts, channels);
    for (uint32_t c = 0; c < shape->channels; c++) {
        uint8_t table[AUGMENT_LEVELS];
        uint32_t below = 0;
        for (uint32_t v = 0; v < AUGMENT_LEVELS; v++) {
            table[v] = augment_entry(operation, numbers, &channels[c], v, below);
            below += counts[c][v];
        }
        for (uint32_t i = 0; i < pixels; i++)
            to[(size_t)c * pixels + i] = table[from[(size_t)c * pixels + i]];
    }
}

FDSL_FMA_CLONES
void augment_apply(const struct shape *shape, enum augment_operation operation,
                   const struct augment_numbers *numbers, const uint8_t *from, uint8_t *to)
{
    const uint32_t height = shape->height, width = shape->width, plane = height * width;
    if (augment_has_table(operation)) {
        apply_table(shape, operation, numbers, from, to);
        return;
    }
    for (uint32_t c = 0; c < shape->channels; c++)
        for (uint32_t y = 0; y < height; y++)
            for (uint32_t x = 0; x < width; x++) {
                const uint8_t *own = from + (size_t)c * plane;
                uint8_t *out = to + (size_t)c * plane + y * width + x;
                if (augment_warps(operation))
                    *out = augment_warped(own, height, width, y, x, numbers->map);
                else if (operation == AUGMENT_COLOR)
                    *out = augment_color(from, shape, c, y * width + x, numbers->factor);
                else if (operation == AUGMENT_SHARPNESS)
                    *out = augment_sharp(own, height, width, y, x, numbers->factor);
                else
                    *out = own[y * width + x];
            }
}

void augment_image(const struct augment_plan *plan, const uint8_t *stored, uint32_t epoch, uint32_t sample,
                   struct augment_scratch *scratch, uint8_t *image)
{
    resize(plan, stored, augment_box(plan, epoch, sample), augment_flips(plan, epoch, sample), scratch,
           image);
    for (uint32_t i = 0; i < plan->operations; i++) {
        const struct augment_numbers *numbers;
        enum augment_operation operation = augment_draw(plan, epoch, sample, i, &numbers);
        augment_apply(&plan->shape, operation, numbers, image, scratch->other);
        memcpy(image, scratch->other, shape_values(&plan->shape));
    }
}
