#include "data/image.h"

#include <endian.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core/options.h"
#include "data/random_boxes.h"
#include "data/random_draws.h"

#define PIXEL RESAMPLE_PIXEL_BYTES
#define ROWS  16 /* rows that are decoded at a time */

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

typedef enum status png_decoder(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                                struct png_shape *shape, uint32_t *orientation);

static enum status decode_png_by(png_decoder *decode, const uint8_t *data, size_t size,
                                 struct image_scratch *scratch, struct image *image)
{
    struct png_shape shape;
    uint32_t orientation;
    TRY(png_shape(data, size, &shape));
    TRY(image_room(&scratch->pixels, &scratch->pixels_bytes,
                   (size_t)shape.width * shape.height * shape.channels));
    TRY(decode(data, size, scratch->pixels, scratch->pixels_bytes, &shape, &orientation));
    *image = interleaved(shape.channels, shape.height, shape.width, scratch->pixels);
    return make_upright(orientation, scratch, image);
}

static enum status decode_png(const uint8_t *data, size_t size, struct image_scratch *scratch,
                              struct image *image)
{
    return decode_png_by(png_decode, data, size, scratch, image);
}

/* Reads the header of a JPEG file with the decoder of the scratch. */
static enum status begin_jpeg(struct image_scratch *scratch, const uint8_t *data, size_t size,
                              struct jpeg_shape *shape)
{
    if (!scratch->jpeg)
        scratch->jpeg = jpeg_open();
    return jpeg_begin(scratch->jpeg, data, size, shape);
}

/* Decodes the whole image, after begin_jpeg(), as it is stored. */
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
    TRY(begin_jpeg(scratch, data, size, &shape));
    return decode_begun(&shape, JPEG_RGB, scratch, image);
}

static enum status decode_jpeg(const uint8_t *data, size_t size, struct image_scratch *scratch,
                               struct image *image)
{
    struct jpeg_shape shape;
    TRY(begin_jpeg(scratch, data, size, &shape));
    TRY(decode_begun(&shape, (enum jpeg_format)shape.channels, scratch, image));
    return make_upright(shape.orientation, scratch, image);
}

/* Explains why an array with the axes of an image is none: only its bytes are in another order. */
static enum status refuse_order(const struct npy_header *header)
{
    char native[sizeof header->type];
    enum dtype type;
    snprintf(native, sizeof native, "%s", header->type);
    native[0] = native[0] == '>' ? '<' : native[0];
    if (header->axes < 2 || header->axes > 4 || !dtype_from_npy(native, &type))
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its array is %s; images are little-endian and in C order: save it with "
                      "numpy.save(file, numpy.ascontiguousarray(array, '%s'))",
                      header->fortran ? "in Fortran order" : "big-endian", native);
}

/* Parses the header of an array, unless it has the bytes of the latest one. */
static enum status parse_npy(const uint8_t *data, size_t size, struct image_scratch *scratch,
                             struct npy_header *header)
{
    const size_t known = scratch->npy.data;
    if (known > 0 && size >= known && memcmp(data, scratch->npy_bytes, known) == 0) {
        *header = scratch->npy;
        return STATUS_OK;
    }
    TRY(npy_header_parse(data, size, header));
    if (header->data <= sizeof scratch->npy_bytes) {
        memcpy(scratch->npy_bytes, data, header->data);
        scratch->npy = *header;
    }
    return STATUS_OK;
}

static enum status decode_npy(const uint8_t *data, size_t size, struct image_scratch *scratch,
                              struct image *image, bool *is_image)
{
    struct npy_header header;
    enum dtype type;
    TRY(parse_npy(data, size, scratch, &header));
    TRY(npy_header_check(&header, size));
    *is_image = !header.fortran && header.axes >= 2 && header.axes <= 4 && dtype_from_npy(header.type, &type);
    for (uint32_t i = 0; *is_image && i < header.axes; i++)
        *is_image = header.shape[i] > 0 && header.shape[i] <= INT32_MAX;
    if (!*is_image)
        return header.fortran || header.type[0] == '>' ? refuse_order(&header) : STATUS_OK;
    const uint64_t *plane = &header.shape[header.axes - 2];
    *image = (struct image){.channels = header.axes > 2 ? (uint32_t)header.shape[0] : 1,
                            .depth = header.axes > 3 ? (uint32_t)header.shape[1] : 1,
                            .height = (uint32_t)plane[0],
                            .width = (uint32_t)plane[1],
                            .type = type,
                            .pixels = data + header.data};
    return STATUS_OK;
}

static enum status decode_webp(const uint8_t *data, size_t size, struct image_scratch *scratch,
                               struct image *image)
{
    uint32_t width, height, orientation;
    TRY(webp_shape(data, size, &width, &height));
    TRY(image_room(&scratch->pixels, &scratch->pixels_bytes, (size_t)3 * width * height));
    TRY(webp_decode(data, size, scratch->pixels, &orientation));
    *image = interleaved(3, height, width, scratch->pixels);
    return make_upright(orientation, scratch, image);
}

static enum status check_webp(const uint8_t *data, size_t size, struct image_scratch *scratch,
                              struct image *image)
{
    uint32_t width, height;
    (void)scratch;
    TRY(webp_shape(data, size, &width, &height));
    *image = interleaved(3, height, width, NULL);
    return STATUS_OK;
}

static enum status check_png(const uint8_t *data, size_t size, struct image_scratch *scratch,
                             struct image *image)
{
    struct png_shape shape;
    (void)scratch;
    TRY(png_shape(data, size, &shape));
    *image = interleaved(shape.channels, shape.height, shape.width, NULL);
    return STATUS_OK;
}

static enum status check_jpeg(const uint8_t *data, size_t size, struct image_scratch *scratch,
                              struct image *image)
{
    struct jpeg_shape shape;
    TRY(begin_jpeg(scratch, data, size, &shape));
    *image = interleaved(shape.channels, shape.height, shape.width, NULL);
    return STATUS_OK;
}

/* ---- Formats ---- */

/* A format of images. To add one, write check() and decode(), and add a line here; image_format() finds it by
 * its extensions and its first bytes. Formats without decode() are only recognised. */
static const struct codec {
    enum image_format format;
    const char *name;
    const char *extensions[3];
    const char *begin; /* first bytes of a file; '.' stands for any byte; NULL: they are not known */
    size_t begin_bytes;

    /* Reads only the header, and sets the shape in `image`, as stored. */
    enum status (*check)(const uint8_t *data, size_t size, struct image_scratch *scratch,
                         struct image *image);

    /* Decodes the image into `scratch`, upright. */
    enum status (*decode)(const uint8_t *data, size_t size, struct image_scratch *scratch,
                          struct image *image);
} codecs[] = {
    {IMAGE_JPEG, "jpeg", {"jpg", "jpeg"}, "\xff\xd8\xff", 3, check_jpeg, decode_jpeg},
    {IMAGE_PNG, "png", {"png"}, "\x89PNG", 4, check_png, decode_png},
    {IMAGE_READ, "webp", {"webp"}, "RIFF....WEBP", 12, check_webp, decode_webp},
    {IMAGE_FOREIGN, "gif", {NULL}, "GIF8", 4, NULL, NULL},
    {IMAGE_FOREIGN, "bmp", {"bmp"}, "BM....\0\0\0\0", 10, NULL, NULL},
    {IMAGE_FOREIGN, "tiff", {"tif", "tiff"}, "II*\0", 4, NULL, NULL},
    {IMAGE_FOREIGN, "tiff", {NULL}, "MM\0*", 4, NULL, NULL},
    {IMAGE_FOREIGN, "ppm", {"ppm"}, NULL, 0, NULL, NULL},
    {IMAGE_FOREIGN, "pgm", {"pgm"}, NULL, 0, NULL, NULL},
    {IMAGE_FOREIGN, "heic", {NULL}, "....ftyphei", 11, NULL, NULL},
    {IMAGE_FOREIGN, "heic", {NULL}, "....ftyphev", 11, NULL, NULL},
    {IMAGE_FOREIGN, "heic", {NULL}, "....ftypmif", 11, NULL, NULL},
    {IMAGE_FOREIGN, "avif", {NULL}, "....ftypavif", 12, NULL, NULL},
};

/* Returns the format that a file name says, or NULL. */
static const struct codec *codec_named(const char *extension)
{
    for (size_t i = 0; i < COUNT_OF(codecs); i++)
        for (const char *const *name = codecs[i].extensions; *name; name++)
            if (strcasecmp(extension, *name) == 0)
                return &codecs[i];
    return NULL;
}

/* Returns the format that the first bytes of a file say, or NULL. */
static const struct codec *codec_of_content(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < COUNT_OF(codecs); i++) {
        const char *begin = codecs[i].begin;
        bool same = begin && size >= codecs[i].begin_bytes;
        for (size_t b = 0; same && b < codecs[i].begin_bytes; b++)
            same = begin[b] == '.' || data[b] == (uint8_t)begin[b];
        if (same)
            return &codecs[i];
    }
    return NULL;
}

/* Returns the format of a member, or NULL if its extension is not that of an image. The content decides,
 * unless it is of no known format: then the decoder of the named format will report what is wrong. */
static const struct codec *find_codec(const char *extension, const uint8_t *data, size_t size)
{
    const struct codec *named = codec_named(extension), *found = codec_of_content(data, size);
    return !named || !found || (!found->decode && !named->decode) ? named : found;
}

enum image_format image_format(const char *extension, const uint8_t *data, size_t size)
{
    if (strcasecmp(extension, "npy") == 0)
        return IMAGE_NPY;
    const struct codec *codec = find_codec(extension, data, size);
    return codec ? codec->format : IMAGE_NONE;
}

static enum status refuse_foreign(const char *extension, const uint8_t *data, size_t size)
{
    const struct codec *content = codec_of_content(data, size);
    const char *name = content ? content->name : extension;
    char told[80] = "";
    if (codec_named(extension)->decode)
        snprintf(told, sizeof told, "the file is named .%.16s, but its content is %s; ", extension, name);
    return status_set(STATUS_FAILED,
                      "%s%s images cannot be decoded; convert them to PNG or JPEG, for example with mogrify "
                      "-format png, and remove the originals",
                      told, name);
}

enum status image_decode(const char *extension, const uint8_t *data, size_t size,
                         struct image_scratch *scratch, struct image *image, bool *is_image)
{
    const bool array = strcasecmp(extension, "npy") == 0;
    const struct codec *codec = array ? NULL : find_codec(extension, data, size);
    if (array)
        return decode_npy(data, size, scratch, image, is_image);
    *is_image = codec != NULL;
    if (!codec)
        return STATUS_OK;
    return codec->decode ? codec->decode(data, size, scratch, image) : refuse_foreign(extension, data, size);
}

enum status image_check_header(const char *extension, const uint8_t *data, size_t size,
                               struct image_scratch *scratch, struct image *image)
{
    const struct codec *codec = find_codec(extension, data, size);
    *image = (struct image){.channels = 0};
    if (!codec)
        return STATUS_OK;
    if (codec->check)
        return codec->check(data, size, scratch, image);
    /* It may be a valid image, unless its name says otherwise. */
    return codec_named(extension)->decode ? refuse_foreign(extension, data, size) : STATUS_OK;
}

/* ---- Values ---- */

/* Returns the bits of value number `i` of an array, which may be unaligned in a file. */
static uint32_t bits_at(const uint8_t *values, size_t i, bool half)
{
    uint16_t narrow;
    uint32_t bits;
    if (!half) {
        memcpy(&bits, values + 4 * i, sizeof bits);
        return bits;
    }
    memcpy(&narrow, values + 2 * i, sizeof narrow);
    return narrow;
}

enum status image_check_finite(const struct image *image)
{
    const bool half = image->type == DTYPE_F16;
    const uint32_t exponent = half ? 0x7C00 : 0x7F800000, mantissa = half ? 0x03FF : 0x007FFFFF;
    const size_t count = image->type == DTYPE_U8 ? 0 : image_values(image);
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = bits_at(image->pixels, i, half);
        if ((bits & exponent) == exponent)
            return status_set(STATUS_FAILED,
                              "its value number %zu of %zu is %s; remove or correct the sample", i, count,
                              bits & mantissa ? "NaN" : "infinite");
    }
    return STATUS_OK;
}

/* Separates the channels of RGB pixels. CPUs with FMA instructions also have byte shuffles, with which the
 * compiler vectorises the loop. */
FDSL_FMA_CLONES
static void separate(const uint8_t *restrict pixels, size_t count, uint8_t *restrict red)
{
    uint8_t *restrict green = red + count, *restrict blue = red + 2 * count;
    for (size_t i = 0; i < count; i++) {
        red[i] = pixels[3 * i];
        green[i] = pixels[3 * i + 1];
        blue[i] = pixels[3 * i + 2];
    }
}

void image_store(const struct image *image, uint8_t *to)
{
    size_t values = image_values(image);
    if (image->interleaved && image->channels == 3)
        separate(image->pixels, values / 3, to);
    else
        memcpy(to, image->pixels, values * dtype_bytes(image->type));
}

/* ---- The part of the image ---- */

const char *const fit_names[] = {"resize", "crop", "random-resized-crop", NULL};

/* Returns the logarithm of a ratio. Those of 3/4 and 4/3, to four digits, are exact: the bits of the defaults
 * do not depend on the mathematical library. */
static double log_ratio(double *ratio)
{
    if (fabs(*ratio - 4.0 / 3) < 1e-4) {
        *ratio = 4.0 / 3;
        return BOX_RATIO_LOG;
    }
    return *ratio == 3.0 / 4 ? -BOX_RATIO_LOG : log(*ratio);
}

/* STATUS_USAGE unless a range is in order and its ends are between `least` and `most`. */
static enum status check_ends(const char *name, const double *ends, double least, double most)
{
    if (!(ends[0] >= least && ends[0] <= most && ends[1] >= least && ends[1] <= most))
        return status_set(STATUS_USAGE, "%s: %g to %g is out of range; both must be %g to %g", name, ends[0],
                          ends[1], least, most);
    return ends[0] <= ends[1]
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s: %g is larger than %g; give the smaller value first", name,
                            ends[0], ends[1]);
}

enum status crop_range_set(const char *const names[2], const double *scale, const double *ratio,
                           struct crop_range *range)
{
    TRY(check_ends(names[0], scale, CROP_SCALE_MIN, 1));
    TRY(check_ends(names[1], ratio, 1 / CROP_RATIO_MAX, CROP_RATIO_MAX));
    for (int i = 0; i < 2; i++) {
        range->scale[i] = scale[i];
        range->ratio[i] = ratio[i];
        range->log_ratio[i] = log_ratio(&range->ratio[i]);
    }
    return STATUS_OK;
}

enum status crop_read(const struct crop_parameters *parameters, struct crop_range *range)
{
    static const char *const names[] = {"--crop-scale", "--crop-ratio"};
    const char *const texts[] = {parameters->scale, parameters->ratio};
    double ends[2][2];
    memset(range, 0, sizeof *range);
    if (!parameters->scale && !parameters->ratio)
        return STATUS_OK;
    for (int i = 0; i < 2; i++) {
        uint32_t count;
        TRY(parse_reals(names[i], texts[i], 0, 1000, 2, ends[i], &count));
        if (count != 2)
            return status_set(STATUS_USAGE, "%s: '%.80s' is not a range; give MIN,MAX", names[i], texts[i]);
    }
    return crop_range_set(names, ends[0], ends[1], range);
}

struct image_box image_fit_box(const struct image_fit *fit, uint32_t width, uint32_t height, uint32_t epoch,
                               uint32_t sample)
{
    if (fit->how == FIT_RANDOM_RESIZED_CROP)
        return box_random_resized(&fit->range, fit->seed, width, height, epoch, sample);
    if (fit->how != FIT_CROP)
        return (struct image_box){0, 0, width, height};
    struct philox_block block = philox(philox_key(fit->seed), 0, sample, epoch, DRAW_FIT);
    return (struct image_box){philox_below(block.word[2], width - fit->res + 1),
                              philox_below(block.word[3], height - fit->res + 1), fit->res, fit->res};
}

static bool is_bicubic(const struct image_fit *fit, uint32_t epoch, uint32_t sample)
{
    if (fit->how != FIT_RANDOM_RESIZED_CROP)
        return false;
    return fit->filter == RESAMPLE_RANDOM ? box_bicubic(fit->seed, epoch, sample)
                                          : fit->filter == RESAMPLE_BICUBIC;
}

/* The size of the upright output. */
struct output {
    uint32_t width, height;
};

/* Returns a side of an image whose side of `from` pixels gets `to` pixels, rounded, at least 1. */
static uint32_t scaled(uint32_t side, uint32_t to, uint32_t from)
{
    const uint64_t result = ((uint64_t)side * to + from / 2) / from;
    return result ? (uint32_t)result : 1;
}

/* Returns the shorter side of a resized image of FIT_CENTRE. */
static uint32_t centre_side(uint32_t res)
{
    return scaled(res, 256, 224);
}

/* Returns the size of an image after it is resized; FIT_CENTRE cuts the output out of it. */
static struct output output_of(const struct image_fit *fit, uint32_t width, uint32_t height)
{
    const uint32_t longer = width > height ? width : height, shorter = width > height ? height : width;
    const uint32_t side = fit->how == FIT_LONGEST ? longer : shorter;
    if (fit->how == FIT_CENTRE) {
        const uint64_t short_side = centre_side(fit->res), long_side = short_side * longer / shorter;
        const uint32_t most = long_side < UINT32_MAX ? (uint32_t)long_side : UINT32_MAX;
        return (struct output){width < height ? (uint32_t)short_side : most,
                               width < height ? most : (uint32_t)short_side};
    }
    if (fit->how != FIT_LONGEST && fit->how != FIT_SHORTEST)
        return (struct output){fit->res, fit->res};
    if (side <= fit->res)
        return (struct output){width, height};
    return (struct output){scaled(width, fit->res, side), scaled(height, fit->res, side)};
}

/* Computes the part of an image that becomes the output. Fails if the image is too small for FIT_CROP, or too
 * long for FIT_CENTRE. */
static enum status choose_box(const struct image_fit *fit, uint32_t width, uint32_t height, uint32_t epoch,
                              uint32_t sample, struct image_box *box)
{
    if (fit->how == FIT_CROP && (width < fit->res || height < fit->res))
        return status_set(STATUS_FAILED, "an image of %u x %u pixels is too small for a crop of %u x %u; %s",
                          width, height, fit->res, fit->res,
                          OPTION_OR_FIELD("use --fit resize, or lower --out-res",
                                          "set fit to \"resize\", or lower out_res"));
    const struct output resized = output_of(fit, width, height);
    if (fit->how == FIT_CENTRE && (resized.width > FIT_RES_MAX || resized.height > FIT_RES_MAX))
        return status_set(STATUS_FAILED, "an image of %u x %u pixels is too long for %s, or remove the image",
                          width, height,
                          OPTION_OR_FIELD("a test image of random-resized-crop; use --fit resize",
                                          "center-crop; set fit to \"resize\""));
    *box = image_fit_box(fit, width, height, epoch, sample);
    return STATUS_OK;
}

/* ---- Decoding the part ---- */

/* Returns the rectangle of the stored image that contains the pixels of an upright rectangle. */
static struct image_box stored_box(struct image_box box, struct orientation turn, uint32_t width,
                                   uint32_t height)
{
    struct image_box stored = box;
    if (turn.transpose)
        stored = (struct image_box){box.top, box.left, box.height, box.width};
    if (turn.flip_x)
        stored.left = width - stored.left - stored.width;
    if (turn.flip_y)
        stored.top = height - stored.top - stored.height;
    return stored;
}

/* Returns the window that corresponds to the rectangle in an image that is decoded at a fraction of its size.
 * Chooses the smallest fraction at which the rectangle is still larger than the output. The window is in
 * whole pixels of the smaller image, so it can differ from the rectangle by less than one such pixel on each
 * side. */
static struct jpeg_window window_of(struct image_box box, const struct image_fit *fit)
{
    struct jpeg_window window = {.denominator = 1, .whole = fit->whole};
    uint32_t side = box.width < box.height ? box.width : box.height;
    const uint32_t res = fit->how == FIT_CENTRE ? centre_side(fit->res) : fit->res;
    while (!fit->unscaled && window.denominator < 8 && side > 2 * window.denominator * res)
        window.denominator *= 2;
    uint32_t d = window.denominator;
    window.left = (box.left + d / 2) / d;
    window.top = (box.top + d / 2) / d;
    window.width = (box.left + box.width + d / 2) / d - window.left;
    window.height = (box.top + box.height + d / 2) / d - window.top;
    return window;
}

/* Decodes a window and resizes it, a few rows at a time, so that they stay in the cache. */
static enum status resize_window(struct image_scratch *scratch, struct jpeg_window window, uint32_t width,
                                 uint32_t height, bool bicubic)
{
    size_t stride, skip;
    TRY(resample_begin(&scratch->resampler, window.width, window.height, width, height, bicubic));
    TRY(jpeg_start(scratch->jpeg, window, JPEG_RGBX, &stride, &skip));
    TRY(image_room(&scratch->pixels, &scratch->pixels_bytes, ROWS * stride + RESAMPLE_SLACK_BYTES));
    for (uint32_t y = 0; y < window.height; y += ROWS) {
        uint32_t count = window.height - y < ROWS ? window.height - y : ROWS;
        TRY(jpeg_read(scratch->jpeg, scratch->pixels, stride, count));
        resample_rows(&scratch->resampler, y, scratch->pixels + skip, stride, count);
    }
    scratch->jpeg_warnings += jpeg_warnings(scratch->jpeg);
    return STATUS_OK;
}

enum status image_fit_part(const struct image_fit *fit, const struct jpeg_shape *shape, uint32_t epoch,
                           uint32_t sample, struct image_box *stored, struct orientation *turn)
{
    struct image_box box;
    *turn = orientation_of(shape->orientation);
    bool lying = turn->transpose;
    TRY(choose_box(fit, lying ? shape->height : shape->width, lying ? shape->width : shape->height, epoch,
                   sample, &box));
    *stored = stored_box(box, *turn, shape->width, shape->height);
    return STATUS_OK;
}

/* How an image was fitted. */
struct fitted {
    struct output output;
    struct orientation turn; /* turns the resized pixels upright */
    uint32_t channels;       /* of the stored image */
    bool same; /* the image has the size and the channels of the output, so it was not resized */
};

static bool keeps(const struct image_fit *fit, uint32_t channels)
{
    return fit->channels == 0 || fit->channels == channels;
}

static enum status fit_jpeg(const struct image_fit *fit, const uint8_t *data, size_t size, uint32_t epoch,
                            uint32_t sample, bool other, struct image_scratch *scratch, struct fitted *fitted)
{
    struct jpeg_shape shape;
    struct image_box box;
    TRY(begin_jpeg(scratch, data, size, &shape));
    const bool lying = orientation_of(shape.orientation).transpose;
    const uint32_t width = lying ? shape.height : shape.width, height = lying ? shape.width : shape.height;
    const struct output output = fitted->output = output_of(fit, width, height);
    scratch->width = width;
    scratch->height = height;
    fitted->channels = shape.channels;
    fitted->same = other && output.width == width && output.height == height && keeps(fit, shape.channels);
    if (fitted->same)
        return STATUS_OK;
    TRY(image_fit_part(fit, &shape, epoch, sample, &box, &fitted->turn));
    return resize_window(scratch, window_of(box, fit), lying ? output.height : output.width,
                         lying ? output.width : output.height, is_bicubic(fit, epoch, sample));
}

/* Copies `width` pixels of a decoded image, whose values are bytes, to pixels of PIXEL bytes. Of a clip,
 * copies pixels of its first frame. */
static void expand_row(const struct image *image, uint32_t x, uint32_t y, uint32_t width, uint8_t *pixels)
{
    size_t step = image->interleaved ? image->channels : 1;
    size_t plane = image->channels == 1 ? 0
                   : image->interleaved ? 1
                                        : (size_t)image->depth * image->height * image->width;
    const uint8_t *from = image->pixels + ((size_t)y * image->width + x) * step;
    for (uint32_t i = 0; i < width; i++, from += step, pixels += PIXEL)
        for (uint32_t c = 0; c < 3; c++)
            pixels[c] = from[c * plane];
}

/* Fits an image, or the first frame of a clip. */
static enum status fit_whole(const struct image_fit *fit, const struct image *image, uint32_t epoch,
                             uint32_t sample, bool other, struct image_scratch *scratch,
                             struct fitted *fitted)
{
    struct image_box box;
    if (image->type != DTYPE_U8 || (image->depth > 1 && other) ||
        (image->channels != 1 && image->channels != 3))
        return status_set(STATUS_FAILED, "only bytes (|u1) with one or three channels can be resized; %s",
                          OPTION_OR_FIELD("drop --out-res, or prepare the data set with --dtype u8",
                                          "store the samples of the data set as bytes"));
    const struct output output = fitted->output = output_of(fit, image->width, image->height);
    scratch->width = image->width;
    scratch->height = image->height;
    fitted->channels = image->channels;
    fitted->same = other && output.width == image->width && output.height == image->height &&
                   keeps(fit, image->channels);
    if (fitted->same)
        return STATUS_OK;
    TRY(choose_box(fit, image->width, image->height, epoch, sample, &box));
    size_t stride = (size_t)box.width * PIXEL;
    /* The rows cannot be in `turned`, which may hold the image. */
    TRY(image_room(&scratch->resized, &scratch->resized_bytes, 2 * stride + RESAMPLE_SLACK_BYTES));
    memset(scratch->resized, 0, 2 * stride + RESAMPLE_SLACK_BYTES);
    TRY(resample_begin(&scratch->resampler, box.width, box.height, output.width, output.height,
                       is_bicubic(fit, epoch, sample)));
    for (uint32_t y = 0; y < box.height; y += 2) {
        uint32_t count = box.height - y < 2 ? 1 : 2;
        for (uint32_t r = 0; r < count; r++)
            expand_row(image, box.left, box.top + y + r, box.width, scratch->resized + r * stride);
        resample_rows(&scratch->resampler, y, scratch->resized, stride, count);
    }
    return STATUS_OK;
}

/* ---- The output ---- */

/* Converts the first `count` pixels from colour to gray, in place. */
static void make_gray(uint8_t *pixels, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const uint8_t *from = pixels + 3 * i;
        pixels[i] = (uint8_t)((19595 * from[0] + 38470 * from[1] + 7471 * from[2] + 32768) >> 16);
    }
}

/* Returns half of the pixels that are cut off along an axis, rounded to even if it is a half. */
static uint32_t half_cut(uint32_t cut)
{
    return cut / 2 + (cut % 4 == 3);
}

/* FIT_CENTRE: moves the centre of an upright image to the beginning of `pixels`. */
static void cut_centre(uint32_t res, struct output from, uint8_t *pixels)
{
    const size_t left = half_cut(from.width - res), top = half_cut(from.height - res);
    for (uint32_t y = 0; y < res; y++)
        memmove(pixels + (size_t)3 * y * res, pixels + 3 * ((top + y) * from.width + left), (size_t)3 * res);
}

/* Turns the resized pixels upright, and gives them the channels of the output. */
static enum status finish(const struct image_fit *fit, const struct fitted *fitted,
                          struct image_scratch *scratch, struct image *image)
{
    struct output output = fitted->output;
    const struct orientation turn = fitted->turn;
    const uint32_t channels = fit->channels ? fit->channels : fitted->channels;
    const size_t bytes = (size_t)3 * output.width * output.height + RESAMPLE_SLACK_BYTES;
    TRY(image_room(&scratch->resized, &scratch->resized_bytes, bytes));
    resample_end(&scratch->resampler, scratch->resized);
    uint8_t *pixels = scratch->resized;
    if (turn.transpose || turn.flip_x || turn.flip_y) {
        TRY(image_room(&scratch->turned, &scratch->turned_bytes, bytes));
        orientation_turn(turn, scratch->resized, turn.transpose ? output.height : output.width,
                         turn.transpose ? output.width : output.height, 3, scratch->turned);
        pixels = scratch->turned;
    }
    if (fit->how == FIT_CENTRE) {
        cut_centre(fit->res, output, pixels);
        output = (struct output){fit->res, fit->res};
    }
    if (channels == 1)
        make_gray(pixels, (size_t)output.width * output.height);
    *image = (struct image){.channels = channels,
                            .depth = 1,
                            .height = output.height,
                            .width = output.width,
                            .type = DTYPE_U8,
                            .interleaved = true,
                            .pixels = pixels};
    return STATUS_OK;
}

/* Fits each frame of a clip, with the same part. */
static enum status fit_clip(const struct image_fit *fit, uint32_t epoch, uint32_t sample,
                            struct image_scratch *scratch, struct image *image)
{
    const size_t plane = (size_t)image->height * image->width, depth = image->depth;
    struct image from = *image, frame = *image;
    for (size_t d = 0; d < depth; d++) {
        struct fitted fitted = {.same = false};
        from.pixels = image->pixels + d * plane;
        TRY(fit_whole(fit, &from, epoch, sample, false, scratch, &fitted));
        TRY(finish(fit, &fitted, scratch, &frame));
        const size_t pixels = (size_t)frame.height * frame.width;
        if (d == 0) /* an array is not in `pixels` */
            TRY(image_room(&scratch->pixels, &scratch->pixels_bytes, frame.channels * depth * pixels));
        for (uint32_t c = 0; c < frame.channels; c++)
            for (size_t i = 0; i < pixels; i++)
                scratch->pixels[(c * depth + d) * pixels + i] = frame.pixels[i * frame.channels + c];
    }
    *image = frame;
    image->depth = (uint32_t)depth;
    image->interleaved = false;
    image->pixels = scratch->pixels;
    return STATUS_OK;
}

/* Decodes a member, or with fit->raw, describes its values. */
static enum status decode_member(const struct image_fit *fit, const char *extension, const uint8_t *data,
                                 size_t size, struct image_scratch *scratch, struct image *image,
                                 bool *is_image)
{
    if (fit->raw.channels == 0)
        return image_decode(extension, data, size, scratch, image, is_image);
    *image = fit->raw;
    image->pixels = data;
    *is_image = true;
    const size_t bytes = image_values(image) * dtype_bytes(image->type);
    return size == bytes
               ? STATUS_OK
               : status_set(STATUS_FAILED, "an image has %zu bytes, but this one has %zu", bytes, size);
}

/* Fits a member. If `other` is set, leaves out an image that has the size and the channels of the output. */
static enum status fit_member(const struct image_fit *fit, const char *extension, const uint8_t *data,
                              size_t size, uint32_t epoch, uint32_t sample, bool other,
                              struct image_scratch *scratch, struct image *image, bool *is_image, bool *same)
{
    struct fitted fitted = {.same = false};
    *same = false;
    if (fit->raw.channels == 0 && image_format(extension, data, size) == IMAGE_JPEG) {
        *is_image = true;
        TRY(fit_jpeg(fit, data, size, epoch, sample, other, scratch, &fitted));
    } else {
        TRY(decode_member(fit, extension, data, size, scratch, image, is_image));
        if (!*is_image)
            return STATUS_OK;
        if (image->depth > 1 && !other)
            return fit_clip(fit, epoch, sample, scratch, image);
        TRY(fit_whole(fit, image, epoch, sample, other, scratch, &fitted));
    }
    *same = fitted.same;
    return fitted.same ? STATUS_OK : finish(fit, &fitted, scratch, image);
}

enum status image_fit(const struct image_fit *fit, const char *extension, const uint8_t *data, size_t size,
                      uint32_t epoch, uint32_t sample, struct image_scratch *scratch, struct image *image,
                      bool *is_image)
{
    bool same;
    if (fit->res)
        return fit_member(fit, extension, data, size, epoch, sample, false, scratch, image, is_image, &same);
    TRY(decode_member(fit, extension, data, size, scratch, image, is_image));
    if (*is_image) {
        scratch->width = image->width;
        scratch->height = image->height;
    }
    return STATUS_OK;
}

enum status image_fit_other(const struct image_fit *fit, const char *extension, const uint8_t *data,
                            size_t size, uint32_t sample, struct image_scratch *scratch, struct image *image,
                            bool *is_image, bool *same)
{
    return fit_member(fit, extension, data, size, 0, sample, true, scratch, image, is_image, same);
}

/* ---- Images that a device fits ---- */

/* Returns whether a device may fit an image of this size. A JPEG must not be decoded at a smaller size. */
static bool suits_fit(const struct image_fit *fit, uint32_t width, uint32_t height, bool jpeg)
{
    const uint32_t least = width < height ? width : height, most = width < height ? height : width;
    return least > 0 && most <= PICTURE_SIDE_MAX && most <= (uint64_t)PICTURE_SCALE_MAX * fit->res &&
           (uint64_t)width * height <= PICTURE_PIXELS_MAX &&
           !(jpeg && !fit->unscaled && least > 2 * fit->res); /* window_of() */
}

size_t image_whole_bytes(const struct image_fit *fit, const char *extension, const uint8_t *data, size_t size,
                         struct image_scratch *scratch)
{
    struct image image;
    const bool jpeg = image_format(extension, data, size) == IMAGE_JPEG;
    if (fit->raw.channels == 0 && image_check_header(extension, data, size, scratch, &image) != STATUS_OK)
        return 0;
    if (fit->raw.channels || !image.channels) /* an array of bytes, with one or three channels */
        return 3 * size;
    return suits_fit(fit, image.width, image.height, jpeg) ? 3 * (size_t)image.width * image.height : 0;
}

bool image_fit_whole(const struct image_fit *fit, const char *extension, const uint8_t *data, size_t size,
                     struct image_scratch *scratch, struct jpeg_shape *shape, struct image *image)
{
    const bool jpeg = fit->raw.channels == 0 && image_format(extension, data, size) == IMAGE_JPEG;
    bool is_image = true;
    if (jpeg && begin_jpeg(scratch, data, size, shape) != STATUS_OK)
        return false;
    if (!jpeg &&
        (decode_member(fit, extension, data, size, scratch, image, &is_image) != STATUS_OK || !is_image ||
         image->type != DTYPE_U8 || image->depth > 1 || (image->channels != 1 && image->channels != 3)))
        return false;
    if (!jpeg)
        *shape = (struct jpeg_shape){image->width, image->height, image->channels, 1, false};
    if (!suits_fit(fit, shape->width, shape->height, jpeg))
        return false;
    return !jpeg || decode_begun(shape, JPEG_RGB, scratch, image) == STATUS_OK;
}

void image_store_rgb(const struct image *image, uint8_t *to)
{
    const size_t pixels = (size_t)image->width * image->height;
    const size_t step = image->interleaved ? image->channels : 1;
    const size_t plane = image->channels == 1 ? 0 : image->interleaved ? 1 : pixels;
    if (image->interleaved && image->channels == 3)
        memcpy(to, image->pixels, 3 * pixels);
    else
        for (size_t i = 0; i < pixels; i++)
            for (size_t c = 0; c < 3; c++)
                to[3 * i + c] = image->pixels[i * step + c * plane];
}

/* ---- Masks ---- */

/* Where `of` pixels along an axis of a mask become `to` pixels, of which the first `skipped` are left out. */
struct mask_axis {
    uint32_t first, of, to, skipped;
};

static uint32_t nearest(const struct mask_axis *axis, uint32_t j)
{
    return axis->first +
           (uint32_t)((2 * (uint64_t)(axis->skipped + j) + 1) * axis->of / (2 * (uint64_t)axis->to));
}

/* Sets the width and the height of a mask. The header of a PNG file has them at byte 16, the bits per value
 * at byte 24, and then the kind of its pixels: 0 for gray, 3 for a palette. */
static enum status mask_header(const uint8_t *data, size_t size, uint32_t sides[2])
{
    memset(sides, 0, 2 * sizeof *sides);
    if (size < 26 || image_format("png", data, size) != IMAGE_PNG)
        return status_set(STATUS_FAILED, "its mask is not a PNG file");
    memcpy(sides, data + 16, 2 * sizeof *sides);
    for (int i = 0; i < 2; i++)
        sides[i] = be32toh(sides[i]);
    return data[25] == 3 || (data[24] == 8 && data[25] == 0)
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "its mask has %d bits per value and PNG colour type %d, but a mask is 8-bit gray "
                            "(colour type 0) or has a palette (colour type 3), and each pixel is the number "
                            "of a class",
                            data[24], data[25]);
}

enum status image_check_mask(const uint8_t *data, size_t size, uint32_t width, uint32_t height)
{
    uint32_t sides[2];
    TRY(mask_header(data, size, sides));
    return sides[0] == width && sides[1] == height
               ? STATUS_OK
               : status_set(STATUS_FAILED, "its mask has %u x %u pixels, but its image has %u x %u", sides[0],
                            sides[1], width, height);
}

enum status image_check_masked(const char *extension, const uint8_t *data, size_t size, const uint8_t *mask,
                               size_t mask_size, struct image_scratch *scratch)
{
    struct image image = {.channels = 0};
    uint32_t sides[2];
    bool is_image = true;
    TRY(mask_header(mask, mask_size, sides));
    const enum status status = image_format(extension, data, size) == IMAGE_NPY
                                   ? image_decode(extension, data, size, scratch, &image, &is_image)
                                   : image_check_header(extension, data, size, scratch, &image);
    if (status != STATUS_OK || !is_image || image.channels == 0)
        return STATUS_OK;
    const bool rotated = sides[0] == image.height && sides[1] == image.width;
    return rotated ? STATUS_OK : image_check_mask(mask, mask_size, image.width, image.height);
}

/* Reads columns from a table: to compute each anew would take a division per pixel. */
static enum status cut_mask(const struct image *mask, struct mask_axis columns, struct mask_axis rows,
                            uint32_t width, uint32_t height, bool mirrored, struct image_scratch *scratch,
                            uint8_t *to)
{
    TRY(image_room(&scratch->resized, &scratch->resized_bytes, width * sizeof(uint32_t)));
    uint32_t *table = (uint32_t *)(void *)scratch->resized;
    for (uint32_t x = 0; x < width; x++)
        table[mirrored ? width - 1 - x : x] = nearest(&columns, x);
    for (uint32_t y = 0; y < height; y++) {
        const uint8_t *from = mask->pixels + (size_t)nearest(&rows, y) * mask->width;
        for (uint32_t x = 0; x < width; x++)
            *to++ = from[table[x]];
    }
    return STATUS_OK;
}

enum status image_fit_mask(const struct image_fit *fit, const struct image_view *of, const uint8_t *data,
                           size_t size, struct image_scratch *scratch, uint8_t *to)
{
    struct image_box box = {0, 0, of->width, of->height};
    struct output resized = {of->width, of->height}, output = resized;
    struct image mask;
    TRY(status_prefix(decode_png_by(png_decode_indices, data, size, scratch, &mask), "its mask"));
    TRY(image_check_mask(data, size, of->width, of->height));
    if (fit->res) {
        TRY(choose_box(fit, of->width, of->height, of->epoch, of->sample, &box));
        output = resized = output_of(fit, of->width, of->height);
    }
    if (fit->res && fit->how == FIT_CENTRE)
        output = (struct output){fit->res, fit->res};
    const uint32_t left = half_cut(resized.width - output.width),
                   top = half_cut(resized.height - output.height);
    return cut_mask(&mask, (struct mask_axis){box.left, box.width, resized.width, left},
                    (struct mask_axis){box.top, box.height, resized.height, top}, output.width, output.height,
                    of->mirrored, scratch, to);
}

/* ---- JPEG files that a device decodes ---- */

const char *const decoder_names[] = {"auto", "hardware", "hybrid", "cpu", NULL};

bool image_suits_device(const struct jpeg_shape *shape, uint32_t res)
{
    const uint32_t least = shape->width < shape->height ? shape->width : shape->height;
    const uint32_t most = shape->width > shape->height ? shape->width : shape->height;
    return shape->baseline && shape->width >= PICTURE_WIDTH_MIN && least > 0 && most <= PICTURE_SIDE_MAX &&
           (uint64_t)shape->width * shape->height <= PICTURE_PIXELS_MAX &&
           most <= (uint64_t)PICTURE_SCALE_MAX * res;
}

bool image_for_device(const char *extension, const uint8_t *data, size_t size, uint32_t res,
                      struct image_scratch *scratch, struct jpeg_shape *shape)
{
    return image_format(extension, data, size) == IMAGE_JPEG &&
           begin_jpeg(scratch, data, size, shape) == STATUS_OK && image_suits_device(shape, res) &&
           jpeg_intact(data, size, shape->width, shape->height);
}

/* ---- The form in which a stream stores images ---- */

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
