#include "data/image_formats.h"

#ifdef HAVE_PNG

#include <inttypes.h>
#include <png.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/resample.h"

#ifndef PNG_eXIf_SUPPORTED
#error "This libpng cannot read EXIF data. Install libpng 1.6.32 or newer, or build with PNG=0."
#endif

/* Upper bound of pixels per byte of a PNG file. Deflate expands one byte to at most 1032 bytes, and a byte
 * holds at most 8 pixels. */
#define PIXELS_PER_BYTE_MAX (8 * 1032)

#define HEADER_BYTES        33                  /* the signature and the chunk IHDR */
#define SIDE_MAX            1000000             /* maximum width and height; also libpng's default */
#define CHUNK_BYTES_MAX     (UINT32_C(1) << 23) /* maximum size of a chunk without pixels */

/* ---- Writing ---- */

/* libpng's simplified interface handles errors without longjmp to the caller and frees its memory. The flag
 * COLORSPACE_NOT_sRGB omits the sRGB chunk, so the file holds only the header and the pixels. */
enum status png_encode(const uint8_t *pixels, const struct png_shape *shape, void **bytes, size_t *size)
{
    *bytes = NULL;
    if (shape->width == 0 || shape->height == 0 || shape->width > INT32_MAX ||
        (uint64_t)shape->width * shape->height > PNG_PIXELS_MAX)
        return status_set(STATUS_USAGE,
                          "%" PRIu32 " x %" PRIu32 " pixels: a PNG file must have 1 to 2^28 pixels",
                          shape->width, shape->height);
    png_image image = {.version = PNG_IMAGE_VERSION,
                       .width = shape->width,
                       .height = shape->height,
                       .format = shape->channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY,
                       .flags = PNG_IMAGE_FLAG_COLORSPACE_NOT_sRGB};
    png_alloc_size_t count = PNG_IMAGE_PNG_SIZE_MAX(image);
    *bytes = malloc(count);
    TRY(ALLOCATED(*bytes, "out of memory"));
    if (!png_image_write_to_memory(&image, *bytes, &count, 0, pixels, 0, NULL)) {
        free(*bytes);
        *bytes = NULL;
        return status_set(STATUS_FAILED, "libpng: %s", image.message);
    }
    *size = count;
    return STATUS_OK;
}

/* ---- Reading ---- */

/* State of a reading. It is stored outside the function that calls setjmp(), because longjmp() may lose local
 * variables. */
struct reading {
    png_structp png;
    png_infop info;
    const uint8_t *bytes; /* the part of the file that libpng has not read yet */
    size_t left;
    bool indices;   /* pixels of a palette are numbers of colours, not colours */
    bool exhausted; /* memory ran out */
    bool ended;     /* libpng asked for more bytes than the file has */
    bool complete;  /* all pixels are decoded */
    jmp_buf failed;
    char message[256];
};

/* libpng calls this function to report an error. The function must not return. */
static void fail(png_structp png, const char *message)
{
    struct reading *reading = png_get_error_ptr(png);
    snprintf(reading->message, sizeof reading->message, "%s", message);
    longjmp(reading->failed, 1);
}

/* Warnings concern chunks that are not used. */
static void ignore(png_structp png, const char *message)
{
    (void)png, (void)message;
}

static png_voidp allocate(png_structp png, png_alloc_size_t bytes)
{
    struct reading *reading = png_get_mem_ptr(png);
    void *memory = malloc(bytes);
    reading->exhausted |= !memory;
    return memory;
}

static void release(png_structp png, png_voidp memory)
{
    (void)png;
    free(memory);
}

static void read_bytes(png_structp png, png_bytep bytes, size_t count)
{
    struct reading *reading = png_get_io_ptr(png);
    reading->ended = count > reading->left;
    if (reading->ended)
        png_error(png, "the file was truncated");
    memcpy(bytes, reading->bytes, count);
    reading->bytes += count;
    reading->left -= count;
}

static enum status failure(const struct reading *reading)
{
    return status_set(reading->exhausted ? STATUS_EXHAUSTED : STATUS_FAILED, "libpng: %s", reading->message);
}

/* Returns STATUS_FAILED if an image of this shape cannot be in a file of `size` bytes, or is too large. */
static enum status check_shape(const struct png_shape *shape, size_t size)
{
    uint64_t pixels = (uint64_t)shape->width * shape->height;
    bool fits = pixels / PIXELS_PER_BYTE_MAX <= size;
    if (pixels <= PNG_PIXELS_MAX && fits)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "an image of %" PRIu32 " x %" PRIu32 " pixels %s", shape->width,
                      shape->height,
                      fits ? "is too large" : "does not fit in a file of this size: it was truncated");
}

/* Opens the file and reads its header. Chunks that change neither the pixels nor the orientation are skipped,
 * so they cannot use memory. A chunk with a wrong checksum is an error, even if it is skipped. */
static enum status begin(struct reading *reading, const void *bytes, size_t size, struct png_shape *shape)
{
    static const png_byte used[] = "eXIf";
    TRY(image_check_size("PNG", size, HEADER_BYTES));
    reading->bytes = bytes;
    reading->left = size;
    if (setjmp(reading->failed))
        return failure(reading);
    reading->png =
        png_create_read_struct_2(PNG_LIBPNG_VER_STRING, reading, fail, ignore, reading, allocate, release);
    reading->info = reading->png ? png_create_info_struct(reading->png) : NULL;
    TRY(ALLOCATED(reading->info, "out of memory for a PNG decoder"));
    png_set_read_fn(reading->png, reading, read_bytes);
    png_set_crc_action(reading->png, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
    png_set_benign_errors(reading->png, 1); /* errors in chunks that are not used are warnings */
    png_set_user_limits(reading->png, SIDE_MAX, SIDE_MAX);
    png_set_chunk_malloc_max(reading->png, CHUNK_BYTES_MAX);
    png_set_keep_unknown_chunks(reading->png, PNG_HANDLE_CHUNK_NEVER, NULL, -1);
    png_set_keep_unknown_chunks(reading->png, PNG_HANDLE_CHUNK_AS_DEFAULT, used, 1);
    png_read_info(reading->png, reading->info);
    shape->width = png_get_image_width(reading->png, reading->info);
    shape->height = png_get_image_height(reading->png, reading->info);
    const int type = png_get_color_type(reading->png, reading->info);
    reading->indices &= type == PNG_COLOR_TYPE_PALETTE;
    shape->channels = type & PNG_COLOR_MASK_COLOR && !reading->indices ? 3 : 1;
    return check_shape(shape, size);
}

static void end(struct reading *reading)
{
    if (reading->png)
        png_destroy_read_struct(&reading->png, &reading->info, NULL);
}

/* Sets up the conversion of any kind of image to 8-bit gray or RGB, or of indices to bytes. libpng rounds
 * 16-bit values to the nearest 8-bit value, as the PNG specification recommends:
 * (value * 255 + 32895) >> 16. */
static void choose_pixels(png_structp png, bool indices)
{
    if (indices) {
        png_set_packing(png);
        return;
    }
    png_set_palette_to_rgb(png);
    png_set_expand_gray_1_2_4_to_8(png);
    png_set_scale_16(png);
    png_set_strip_alpha(png);
}

/* Decodes the pixels, and reads the rest of the file, which may contain the chunk eXIf. A file that ends
 * after its pixels is accepted. */
static enum status finish(struct reading *reading, uint8_t *pixels, const struct png_shape *shape,
                          uint32_t *orientation)
{
    const size_t stride = (size_t)shape->width * shape->channels;
    png_structp png = reading->png;
    png_bytep exif;
    png_uint_32 bytes;
    if (setjmp(reading->failed) == 0) {
        choose_pixels(png, reading->indices);
        int passes = png_set_interlace_handling(png);
        png_read_update_info(png, reading->info);
        if (png_get_rowbytes(png, reading->info) != stride)
            png_error(png, "unexpected row size");
        for (; passes > 0; passes--)
            for (uint32_t y = 0; y < shape->height; y++)
                png_read_row(png, pixels + y * stride, NULL);
        reading->complete = true;
        png_read_end(png, reading->info);
    } else if (!reading->complete || !reading->ended)
        return failure(reading);
    *orientation =
        png_get_eXIf_1(reading->png, reading->info, &bytes, &exif) ? orientation_in_exif(exif, bytes) : 0;
    if (*orientation == 0)
        *orientation = 1;
    return STATUS_OK;
}

enum status png_shape(const void *bytes, size_t size, struct png_shape *shape)
{
    struct reading reading = {0};
    enum status status = begin(&reading, bytes, size, shape);
    end(&reading);
    return status;
}

static enum status decode(const void *bytes, size_t size, bool indices, uint8_t *pixels, size_t capacity,
                          struct png_shape *shape, uint32_t *orientation)
{
    struct reading reading = {.indices = indices};
    enum status status = begin(&reading, bytes, size, shape);
    if (status == STATUS_OK && (uint64_t)shape->width * shape->height * shape->channels > capacity)
        status = status_set(STATUS_FAILED,
                            "an image of %" PRIu32 " x %" PRIu32 " x %" PRIu32 " does not fit in %zu bytes",
                            shape->width, shape->height, shape->channels, capacity);
    if (status == STATUS_OK)
        status = finish(&reading, pixels, shape, orientation);
    end(&reading);
    return status;
}

enum status png_decode(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                       struct png_shape *shape, uint32_t *orientation)
{
    return decode(bytes, size, false, pixels, capacity, shape, orientation);
}

enum status png_decode_indices(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                               struct png_shape *shape, uint32_t *orientation)
{
    return decode(bytes, size, true, pixels, capacity, shape, orientation);
}

#else

static enum status unavailable(void)
{
    return status_set(STATUS_UNAVAILABLE,
                      "this build has no PNG support: install libpng (libpng-dev) and build again");
}

enum status png_encode(const uint8_t *pixels, const struct png_shape *shape, void **bytes, size_t *size)
{
    (void)pixels, (void)shape, (void)bytes, (void)size;
    return unavailable();
}

enum status png_shape(const void *bytes, size_t size, struct png_shape *shape)
{
    (void)bytes, (void)size, (void)shape;
    return unavailable();
}

enum status png_decode(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                       struct png_shape *shape, uint32_t *orientation)
{
    (void)pixels, (void)capacity, (void)orientation;
    return png_shape(bytes, size, shape);
}

enum status png_decode_indices(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                               struct png_shape *shape, uint32_t *orientation)
{
    return png_decode(bytes, size, pixels, capacity, shape, orientation);
}

#endif
