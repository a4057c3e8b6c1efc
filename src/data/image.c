#include "data/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "data/image_parts.h"
#include "data/npy.h"
#include "data/orientation.h"
#include "data/png_image.h"

/* ---- Scratch memory ---- */

enum status image_room(uint8_t **room, size_t *room_bytes, size_t bytes)
{
    if (bytes <= *room_bytes)
        return STATUS_OK;
    free(*room);
    *room = malloc(bytes);
    *room_bytes = *room ? bytes : 0;
    return ALLOCATED(*room, "out of memory for an image of %zu bytes", bytes);
}

void image_scratch_close(struct image_scratch *scratch)
{
    free(scratch->pixels);
    free(scratch->turned);
    free(scratch->resized);
    jpeg_close(scratch->jpeg);
    resampler_close(&scratch->resampler);
    *scratch = (struct image_scratch){0};
}

uint64_t image_scratch_bytes(const struct image_scratch *scratch)
{
    return scratch->pixels_bytes + scratch->turned_bytes + scratch->resized_bytes +
           scratch->resampler.rows_bytes;
}

/* ---- Formats ---- */

/* Returns the name of a format that cannot be decoded, from the first bytes of a file; otherwise NULL. */
static const char *foreign_content(const uint8_t *data, size_t size)
{
    static const struct {
        const char *name, *begin; /* '.' stands for any byte */
        size_t length;
    } formats[] = {
        {"webp", "RIFF....WEBP", 12}, {"gif", "GIF8", 4},          {"bmp", "BM....\0\0\0\0", 10},
        {"tiff", "II*\0", 4},         {"tiff", "MM\0*", 4},        {"heic", "....ftyphei", 11},
        {"heic", "....ftyphev", 11},  {"heic", "....ftypmif", 11}, {"avif", "....ftypavif", 12},
    };
    for (size_t i = 0; i < COUNT_OF(formats); i++) {
        bool same = size >= formats[i].length;
        for (size_t b = 0; same && b < formats[i].length; b++)
            same = formats[i].begin[b] == '.' || data[b] == (uint8_t)formats[i].begin[b];
        if (same)
            return formats[i].name;
    }
    return NULL;
}

static bool is_foreign_extension(const char *extension)
{
    static const char *const foreign[] = {"ppm", "bmp", "pgm", "tif", "tiff", "webp"};
    bool found = false;
    for (size_t i = 0; i < COUNT_OF(foreign); i++)
        found |= strcasecmp(extension, foreign[i]) == 0;
    return found;
}

enum image_format image_format(const char *extension, const uint8_t *data, size_t size)
{
    static const uint8_t jpeg[] = {0xff, 0xd8, 0xff}, png[] = {0x89, 'P', 'N', 'G'};
    if (strcasecmp(extension, "npy") == 0)
        return IMAGE_NPY;
    bool is_png = strcasecmp(extension, "png") == 0, is_foreign = is_foreign_extension(extension);
    if (!is_png && !is_foreign && strcasecmp(extension, "jpg") != 0 && strcasecmp(extension, "jpeg") != 0)
        return IMAGE_NONE;
    if (size >= sizeof jpeg && memcmp(data, jpeg, sizeof jpeg) == 0)
        return IMAGE_JPEG;
    if (size >= sizeof png && memcmp(data, png, sizeof png) == 0)
        return IMAGE_PNG;
    if (is_foreign || foreign_content(data, size))
        return IMAGE_FOREIGN;
    return is_png ? IMAGE_PNG : IMAGE_JPEG; /* the decoder will report what is wrong */
}

static enum status refuse_foreign(const char *extension, const uint8_t *data, size_t size)
{
    const char *content = foreign_content(data, size), *name = content ? content : extension;
    char told[80] = "";
    if (!is_foreign_extension(extension))
        snprintf(told, sizeof told, "the file is named .%.16s, but its content is %s; ", extension, name);
    return status_set(STATUS_FAILED,
                      "%s%s images cannot be decoded; convert them to PNG or JPEG, for example with mogrify "
                      "-format png, and remove the originals",
                      told, name);
}

/* ---- Decoding ---- */

/* Describes an image of interleaved bytes. */
static struct image interleaved(uint32_t channels, uint32_t height, uint32_t width, const uint8_t *pixels)
{
    return (struct image){.channels = channels,
                          .depth = 1,
                          .height = height,
                          .width = width,
                          .type = DTYPE_U8,
                          .interleaved = true,
                          .pixels = pixels};
}

/* Turns a decoded image upright, according to its EXIF orientation. */
static enum status make_upright(uint32_t orientation, struct image_scratch *scratch, struct image *image)
{
    struct orientation turn = orientation_of(orientation);
    if (orientation == 1)
        return STATUS_OK;
    TRY(image_room(&scratch->turned, &scratch->turned_bytes, image_values(image)));
    orientation_turn(turn, image->pixels, image->width, image->height, image->channels, scratch->turned);
    *image = interleaved(image->channels, turn.transpose ? image->width : image->height,
                         turn.transpose ? image->height : image->width, scratch->turned);
    return STATUS_OK;
}

static enum status decode_png(const uint8_t *data, size_t size, struct image_scratch *scratch,
                              struct image *image)
{
    struct png_shape shape;
    uint32_t orientation;
    TRY(png_shape(data, size, &shape));
    TRY(image_room(&scratch->pixels, &scratch->pixels_bytes,
                   (size_t)shape.width * shape.height * shape.channels));
    TRY(png_decode(data, size, scratch->pixels, scratch->pixels_bytes, &shape, &orientation));
    *image = interleaved(shape.channels, shape.height, shape.width, scratch->pixels);
    return make_upright(orientation, scratch, image);
}

enum status image_begin_jpeg(struct image_scratch *scratch, const uint8_t *data, size_t size,
                             struct jpeg_shape *shape)
{
    if (!scratch->jpeg)
        scratch->jpeg = jpeg_open();
    return jpeg_begin(scratch->jpeg, data, size, shape);
}

/* Decodes the whole image, after image_begin_jpeg(), as it is stored. */
static enum status decode_begun(const struct jpeg_shape *shape, enum jpeg_format format,
                                struct image_scratch *scratch, struct image *image)
{
    struct jpeg_window whole = {.width = shape->width, .height = shape->height, .denominator = 1};
    size_t row_bytes, skip, stride = (size_t)shape->width * format;
    TRY(jpeg_start(scratch->jpeg, whole, format, &row_bytes, &skip));
    TRY(image_room(&scratch->pixels, &scratch->pixels_bytes, (shape->height - 1) * stride + row_bytes));
    TRY(jpeg_read(scratch->jpeg, scratch->pixels, stride, shape->height));
    scratch->jpeg_warnings += jpeg_warnings(scratch->jpeg);
    *image = interleaved(format, shape->height, shape->width, scratch->pixels);
    return STATUS_OK;
}

enum status image_decode_stored(const uint8_t *data, size_t size, struct image_scratch *scratch,
                                struct image *image)
{
    struct jpeg_shape shape;
    TRY(image_begin_jpeg(scratch, data, size, &shape));
    return decode_begun(&shape, JPEG_RGB, scratch, image);
}

static enum status decode_jpeg(const uint8_t *data, size_t size, struct image_scratch *scratch,
                               struct image *image)
{
    struct jpeg_shape shape;
    TRY(image_begin_jpeg(scratch, data, size, &shape));
    TRY(decode_begun(&shape, (enum jpeg_format)shape.channels, scratch, image));
    return make_upright(shape.orientation, scratch, image);
}

static enum status decode_npy(const uint8_t *data, size_t size, struct image *image, bool *is_image)
{
    struct npy_header header;
    enum dtype type;
    TRY(npy_header_parse(data, size, &header));
    TRY(npy_header_check(&header, size));
    *is_image = !header.fortran && header.axes >= 2 && header.axes <= 4 && dtype_from_npy(header.type, &type);
    for (uint32_t i = 0; *is_image && i < header.axes; i++)
        *is_image = header.shape[i] > 0 && header.shape[i] <= INT32_MAX;
    if (!*is_image)
        return STATUS_OK;
    const uint64_t *plane = &header.shape[header.axes - 2];
    *image = (struct image){.channels = header.axes > 2 ? (uint32_t)header.shape[0] : 1,
                            .depth = header.axes > 3 ? (uint32_t)header.shape[1] : 1,
                            .height = (uint32_t)plane[0],
                            .width = (uint32_t)plane[1],
                            .type = type,
                            .pixels = data + header.data};
    return STATUS_OK;
}

enum status image_decode(const char *extension, const uint8_t *data, size_t size,
                         struct image_scratch *scratch, struct image *image, bool *is_image)
{
    enum image_format format = image_format(extension, data, size);
    *is_image = format != IMAGE_NONE;
    switch (format) {
    case IMAGE_PNG:
        return decode_png(data, size, scratch, image);
    case IMAGE_JPEG:
        return decode_jpeg(data, size, scratch, image);
    case IMAGE_NPY:
        return decode_npy(data, size, image, is_image);
    case IMAGE_FOREIGN:
        return refuse_foreign(extension, data, size);
    case IMAGE_NONE:
        break;
    }
    return STATUS_OK;
}

enum status image_check_header(const char *extension, const uint8_t *data, size_t size,
                               struct image_scratch *scratch, struct image *image)
{
    struct png_shape png;
    struct jpeg_shape jpeg;
    *image = (struct image){.channels = 0};
    switch (image_format(extension, data, size)) {
    case IMAGE_PNG:
        TRY(png_shape(data, size, &png));
        *image = interleaved(png.channels, png.height, png.width, NULL);
        break;
    case IMAGE_JPEG:
        TRY(image_begin_jpeg(scratch, data, size, &jpeg));
        *image = interleaved(jpeg.channels, jpeg.height, jpeg.width, NULL);
        break;
    case IMAGE_FOREIGN: /* may be a valid image, unless its name says otherwise */
        return is_foreign_extension(extension) ? STATUS_OK : refuse_foreign(extension, data, size);
    case IMAGE_NPY: /* may be a valid array of a type that is not read here */
    case IMAGE_NONE:
        break;
    }
    return STATUS_OK;
}
