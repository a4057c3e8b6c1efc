#include "data/image_output.h"

#include <math.h>

#include "data/random_boxes.h"
#include "data/random_draws.h"

void image_output_set(struct image_output *output, enum dtype type, bool interleaved, const double *mean,
                      const double *deviation)
{
    output->type = type;
    output->interleaved = interleaved;
    for (int c = 0; c < IMAGE_OUTPUT_CHANNELS_MAX; c++) {
        output->scale[c] = (float)(1 / (255 * deviation[c]));
        output->offset[c] = (float)(-mean[c] / deviation[c]);
        for (int byte = 0; byte < 256; byte++) {
            const float value = fmaf((float)byte, output->scale[c], output->offset[c]);
            switch (type) {
            case DTYPE_F16:
                output->values[c].f16[byte] = half_from_float(value);
                break;
            case DTYPE_BF16:
                output->values[c].f16[byte] = bf16_from_float(value);
                break;
            case DTYPE_F32:
                output->values[c].f32[byte] = value;
                break;
            default:
                output->values[c].u8[byte] = (uint8_t)byte;
            }
        }
    }
}

/* The steps between adjacent columns, rows, frames and channels, in elements. */
struct steps {
    ptrdiff_t column, row, frame, channel;
};

static struct steps steps_of(const struct image *image, bool interleaved, bool frames)
{
    const ptrdiff_t width = image->width, channels = image->channels,
                    plane = width * (ptrdiff_t)image->height;
    if (interleaved)
        return (struct steps){channels, channels * width, channels * plane, 1};
    return frames ? (struct steps){1, width, channels * plane, plane}
                  : (struct steps){1, width, plane, plane * (ptrdiff_t)image->depth};
}

/* Defines a function that stores the values of a plane, as elements of one type. */
#define DEFINE_STORE(name, element)                                                                         \
    static void name(const uint8_t *from, struct steps in, const struct image *image, const element *value, \
                     element *to, struct steps out)                                                         \
    {                                                                                                       \
        for (uint32_t y = 0; y < image->height; y++, from += in.row, to += out.row)                         \
            for (ptrdiff_t x = 0; x < (ptrdiff_t)image->width; x++)                                         \
                to[x * out.column] = value[from[x * in.column]];                                            \
    }
DEFINE_STORE(store_8, uint8_t)
DEFINE_STORE(store_16, uint16_t)
DEFINE_STORE(store_32, float)

/* Copies an image to `scratch`, channels first, mirrored or not, and changes it there. Returns the changed
 * image. */
static struct image change(const struct image_output *output, const struct image *image, bool mirrored,
                           uint32_t epoch, uint32_t number, uint8_t *scratch)
{
    const struct shape shape = {image->channels, image->depth, image->height, image->width};
    const struct steps in = steps_of(image, image->interleaved, false);
    uint8_t *to = scratch;
    for (uint32_t c = 0; c < shape.channels; c++)
        for (uint32_t d = 0; d < shape.depth; d++)
            for (uint32_t y = 0; y < shape.height; y++)
                for (uint32_t x = 0; x < shape.width; x++)
                    *to++ = image->pixels[c * in.channel + d * in.frame + y * in.row +
                                          (mirrored ? shape.width - 1 - x : x) * in.column];
    rand_augment_apply(&output->rand, &shape, output->seed, epoch, number, scratch, to);
    jitter_apply(&output->color, &shape, output->seed, epoch, number, scratch, to);
    struct image changed = *image;
    changed.pixels = scratch;
    changed.interleaved = false;
    return changed;
}

/* Fills a random rectangle of a stored image with noise, with a probability. */
FDSL_FMA_CLONES
static void erase(const struct image_output *output, const struct image *image, uint32_t epoch,
                  uint32_t number, void *to)
{
    const struct draw_erase drawn = box_erase(&output->erase, output->seed, epoch, number);
    const struct image_box box = drawn.box;
    const struct steps out = steps_of(image, output->interleaved, output->frames);
    for (uint32_t k = 0; k < image->channels * image->depth; k++) {
        const uint32_t c = k / image->depth, d = k % image->depth;
        for (uint32_t y = box.top; y < box.top + box.height; y++)
            for (uint32_t x = box.left; x < box.left + box.width; x++) {
                const float noise = box_erased(&drawn, y, x, (k * image->height + y) * image->width + x, 0);
                const ptrdiff_t at = c * out.channel + d * out.frame + y * out.row + x * out.column;
                if (output->type == DTYPE_F32)
                    ((float *)to)[at] = noise;
                else
                    ((uint16_t *)to)[at] =
                        output->type == DTYPE_F16 ? half_from_float(noise) : bf16_from_float(noise);
            }
    }
}

void image_output_store(const struct image_output *output, const struct image *image, uint32_t epoch,
                        uint32_t number, uint8_t *scratch, void *to)
{
    const struct steps out = steps_of(image, output->interleaved, output->frames);
    bool mirrored = output->flip && draw_flip(output->seed, epoch, number);
    struct image changed;
    if (image_output_changes(output)) {
        changed = change(output, image, mirrored, epoch, number, scratch);
        image = &changed;
        mirrored = false;
    }
    const bool stored = !output->interleaved && !(output->frames && image->depth > 1);
    if (output->type == DTYPE_U8 && stored && !mirrored) { /* the values are the bytes */
        image_store(image, to);
        return;
    }
    struct steps in = steps_of(image, image->interleaved, false);
    const ptrdiff_t first = mirrored ? in.column * ((ptrdiff_t)image->width - 1) : 0;
    in.column = mirrored ? -in.column : in.column;
    for (uint32_t k = 0; k < image->channels * image->depth; k++) {
        const uint32_t c = k / image->depth, d = k % image->depth;
        const uint8_t *from = image->pixels + first + c * in.channel + d * in.frame;
        const ptrdiff_t at = c * out.channel + d * out.frame;
        if (dtype_bytes(output->type) == 1)
            store_8(from, in, image, output->values[c].u8, (uint8_t *)to + at, out);
        else if (dtype_bytes(output->type) == 2)
            store_16(from, in, image, output->values[c].f16, (uint16_t *)to + at, out);
        else
            store_32(from, in, image, output->values[c].f32, (float *)to + at, out);
    }
    if (output->type != DTYPE_U8) /* the noise is normalised */
        erase(output, image, epoch, number, to);
}
