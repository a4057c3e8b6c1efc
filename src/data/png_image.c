#include "data/png_image.h"

#ifdef HAVE_PNG

#include <inttypes.h>
#include <png.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "data/image_parts.h"

/* Upper bound of pixels per byte of a PNG file. Deflate expands one byte to at most 1032 bytes, and a byte
 * holds at most 8 pixels. */
#define PIXELS_PER_BYTE_MAX (8 * 1032)

#define HEADER_BYTES        33 /* the signature and the chunk IHDR */

/* Returns the status for the message of libpng, which has no error codes. */
static enum status failed(const png_image *image)
{
    bool exhausted =
        strcasestr(image->message, "out of memory") || strstr(image->message, "insufficient memory");
    return status_set(exhausted ? STATUS_EXHAUSTED : STATUS_FAILED, "libpng: %s", image->message);
}

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
        return failed(&image);
    }
    *size = count;
    return STATUS_OK;
}

/* Reads the header and checks the size. After success, the caller frees the image. */
static enum status begin(png_image *image, const void *bytes, size_t size, struct png_shape *shape)
{
    *image = (png_image){.version = PNG_IMAGE_VERSION};
    TRY(image_check_size("PNG", size, HEADER_BYTES));
    if (!png_image_begin_read_from_memory(image, bytes, size))
        return failed(image);
    /* Without this flag, libpng takes 16-bit values for linear light, and brightens them for 8 bits. */
    image->flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
    image->format = image->format & PNG_FORMAT_FLAG_COLOR ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY;
    *shape = (struct png_shape){image->width, image->height, image->format == PNG_FORMAT_RGB ? 3 : 1};
    uint64_t pixels = (uint64_t)image->width * image->height;
    bool fits = pixels / PIXELS_PER_BYTE_MAX <= size;
    if (pixels <= PNG_PIXELS_MAX && fits)
        return STATUS_OK;
    png_image_free(image);
    return status_set(STATUS_FAILED, "an image of %" PRIu32 " x %" PRIu32 " pixels %s", shape->width,
                      shape->height,
                      fits ? "is too large" : "does not fit in a file of this size: it was truncated");
}

enum status png_shape(const void *bytes, size_t size, struct png_shape *shape)
{
    png_image image;
    TRY(begin(&image, bytes, size, shape));
    png_image_free(&image);
    return STATUS_OK;
}

enum status png_decode(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                       struct png_shape *shape)
{
    png_image image;
    const png_color black = {0, 0, 0}; /* background for transparent pixels */
    TRY(begin(&image, bytes, size, shape));
    uint64_t need = (uint64_t)shape->width * shape->height * shape->channels;
    if (need > capacity) {
        png_image_free(&image);
        return status_set(STATUS_FAILED,
                          "an image of %" PRIu32 " x %" PRIu32 " x %" PRIu32 " does not fit in %zu bytes",
                          shape->width, shape->height, shape->channels, capacity);
    }
    return png_image_finish_read(&image, &black, pixels, 0, NULL) ? STATUS_OK : failed(&image);
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
                       struct png_shape *shape)
{
    (void)pixels, (void)capacity;
    return png_shape(bytes, size, shape);
}

#endif
