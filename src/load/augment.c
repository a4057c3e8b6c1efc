#include "load/augment.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core/half.h"
#include "core/philox.h"
#include "core/png_image.h"
#include "core/npy_header.h"

/* ---- Decoding ---- */

static enum status decode_png(const uint8_t *data, size_t size, uint8_t **room, size_t *room_bytes,
                              struct image *image)
{
    struct png_shape shape;
    TRY(png_shape(data, size, &shape));
    size_t bytes = (size_t)shape.width * shape.height * shape.channels;
    if (bytes > *room_bytes) {
        uint8_t *larger = realloc(*room, bytes);
        if (!larger)
            return status_set(STATUS_FAILED, "out of memory for an image of %u x %u", shape.width,
                              shape.height);
        *room = larger;
        *room_bytes = bytes;
    }
    TRY(png_decode(data, size, *room, *room_bytes, &shape));
    *image = (struct image){.channels = shape.channels,
                            .height = shape.height,
                            .width = shape.width,
                            .type = IMAGE_U8,
                            .interleaved = true,
                            .pixels = *room};
    return STATUS_OK;
}

static bool image_type_of(const char *type, enum image_type *found)
{
    static const char *const types[] = {"|u1", "<f2", "<f4"}; /* as enum image_type */
    for (size_t i = 0; i < COUNT_OF(types); i++)
        if (strcmp(types[i], type) == 0) {
            *found = (enum image_type)i;
            return true;
        }
    return false;
}

/* Arrays of (height, width), (channels, height, width) or (1 or 3, ...) values that images have. Others are
 * no images, and not touched. */
static enum status decode_npy(const uint8_t *data, size_t size, struct image *image, bool *is_image)
{
    struct npy_header header;
    enum image_type type;
    TRY(npy_header_parse(data, size, &header));
    TRY(npy_header_check(&header, size));
    *is_image =
        !header.fortran && (header.axes == 2 || header.axes == 3) && image_type_of(header.type, &type);
    for (uint32_t i = 0; *is_image && i < header.axes; i++)
        *is_image = header.shape[i] > 0 && header.shape[i] <= INT32_MAX;
    if (!*is_image)
        return STATUS_OK;
    const uint64_t *plane = &header.shape[header.axes - 2];
    *image = (struct image){.channels = header.axes == 3 ? (uint32_t)header.shape[0] : 1,
                            .height = (uint32_t)plane[0],
                            .width = (uint32_t)plane[1],
                            .type = type,
                            .pixels = data + header.data};
    return STATUS_OK;
}

enum status image_decode(const char *extension, const uint8_t *data, size_t size, uint8_t **room,
                         size_t *room_bytes, struct image *image, bool *is_image)
{
    *is_image = strcasecmp(extension, "png") == 0;
    if (*is_image)
        return decode_png(data, size, room, room_bytes, image);
    if (strcasecmp(extension, "npy") == 0)
        return decode_npy(data, size, image, is_image);
    return STATUS_OK;
}

/* ---- Augmentation ---- */

/* One row of one channel as floats: `count` values, `step` values apart from `first` on. */
static void row_values(const struct image *image, size_t first, size_t step, uint32_t count, float *values)
{
    if (image->type == IMAGE_U8)
        for (uint32_t x = 0; x < count; x++)
            values[x] = (float)image->pixels[first + x * step] * (1.0f / 255);
    for (uint32_t x = 0; image->type == IMAGE_F16 && x < count; x++) {
        uint16_t bits;
        memcpy(&bits, image->pixels + 2 * (first + x * step), sizeof bits);
        values[x] = half_to_float(bits);
    }
    if (image->type == IMAGE_F32)
        for (uint32_t x = 0; x < count; x++)
            memcpy(&values[x], image->pixels + 4 * (first + x * step), sizeof *values);
}

static void reverse(float *values, uint32_t count)
{
    for (uint32_t x = 0; x < count / 2; x++) {
        float value = values[x];
        values[x] = values[count - 1 - x];
        values[count - 1 - x] = value;
    }
}

/* What the draws of an image come to. */
struct move {
    int32_t down, right; /* what is at (y + down, x + right) comes to (y, x) */
    bool flip;           /* after that */
};

static struct move draw_move(const struct augment *augment, uint64_t epoch, uint32_t sample)
{
    struct philox_block block =
        philox(philox_key(augment->seed), sample, (uint32_t)epoch, (uint32_t)(epoch >> 32), 0x10ada06u);
    uint32_t span = 2 * augment->shift + 1;
    struct move move = {(int32_t)philox_below(block.word[0], span) - (int32_t)augment->shift,
                        (int32_t)philox_below(block.word[1], span) - (int32_t)augment->shift,
                        augment->flip && (block.word[2] >> 31)};
    return move;
}

/* One row of the result from row `y` + down of the image. */
static void augment_row(const struct augment *augment, const struct image *image, struct move move,
                        uint32_t channel, int64_t y, float *row)
{
    int64_t source = y + move.down, width = image->width;
    int64_t begin = move.right < 0 ? -(int64_t)move.right : 0,
            end = move.right > 0 ? width - move.right : width;
    bool outside = source < 0 || source >= image->height || begin >= end;
    if (outside)
        begin = end = 0;
    for (int64_t x = 0; x < begin; x++)
        row[x] = 0;
    for (int64_t x = end; x < width; x++)
        row[x] = 0;
    if (!outside) {
        size_t step = image->interleaved ? image->channels : 1;
        size_t plane = image->interleaved ? channel : (size_t)channel * image->height * image->width;
        size_t first = plane + ((size_t)source * image->width + (size_t)(begin + move.right)) * step;
        row_values(image, first, step, (uint32_t)(end - begin), row + begin);
    }
    for (int64_t x = 0; x < width; x++)
        row[x] = (row[x] - augment->mean) * augment->scale;
    if (move.flip)
        reverse(row, image->width);
}

void image_augment(const struct augment *augment, const struct image *image, uint64_t epoch, uint32_t sample,
                   float *values)
{
    struct move move = draw_move(augment, epoch, sample);
    for (uint32_t c = 0; c < image->channels; c++)
        for (uint32_t y = 0; y < image->height; y++)
            augment_row(augment, image, move, c, y, values + ((size_t)c * image->height + y) * image->width);
}
