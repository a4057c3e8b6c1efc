/* Encodes and decodes image files in memory: PNG with libpng and JPEG with libjpeg-turbo; decodes WebP with
 * libwebp. data/image.h decodes any format. */
#ifndef FDSL_DATA_IMAGE_FORMATS_H
#define FDSL_DATA_IMAGE_FORMATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Returns STATUS_FAILED if an image of `size` bytes is shorter than a header of its format, which has at
 * least `least` bytes. The messages of the libraries do not say so. */
static inline enum status image_check_size(const char *format, size_t size, size_t least)
{
    if (size == 0)
        return status_set(STATUS_FAILED, "the image is empty (0 bytes)");
    return size < least
               ? status_set(STATUS_FAILED,
                            "the image has %zu bytes, fewer than the header of a %s file (%zu bytes)", size,
                            format, least)
               : STATUS_OK;
}

/* ---- PNG ----
 * 8-bit images, gray or RGB. */

#define PNG_PIXELS_MAX (UINT32_C(1) << 28) /* maximum number of pixels per image */

struct png_shape {
    uint32_t width, height;
    uint32_t channels; /* 1 or 3, interleaved */
};

FDSL_C_BEGIN

/* Encodes pixels as a PNG file in memory. `pixels` has no gaps between rows. The output depends only on the
 * pixels and the versions of libpng and zlib. The caller frees `*bytes`. STATUS_USAGE if a side is 0 or
 * there are more than PNG_PIXELS_MAX pixels; STATUS_UNAVAILABLE in builds without libpng. */
enum status png_encode(const uint8_t *pixels, const struct png_shape *shape, void **bytes, size_t *size);

/* Sets `*shape` to the shape that png_decode() produces. STATUS_FAILED if the bytes are not a PNG file, if
 * the image has more than PNG_PIXELS_MAX pixels, or if its header claims more pixels than the file can
 * contain. */
enum status png_shape(const void *bytes, size_t size, struct png_shape *shape);

/* Decodes into `pixels`, which holds `capacity` bytes: 8-bit gray or RGB, for any kind of PNG. Transparency
 * and gamma are ignored, as Pillow's convert("RGB") and torchvision.io do. 16-bit values are rounded to the
 * nearest 8-bit value. Sets `*orientation` to that of the chunk eXIf, 1 to 8, or to 1 if there is none; the
 * pixels are as stored. STATUS_FAILED as for png_shape(), or if the image is larger than `capacity` or
 * damaged; `pixels` is then undefined. Thread safe. */
enum status png_decode(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                       struct png_shape *shape, uint32_t *orientation);

/* Does the same as png_decode(), except for images with a palette: their pixels become the numbers of the
 * colours, in one byte each, as masks of classes are stored. `capacity` needs the size of png_shape(), or a
 * third of it for such images. */
enum status png_decode_indices(const void *bytes, size_t size, uint8_t *pixels, size_t capacity,
                               struct png_shape *shape, uint32_t *orientation);

FDSL_C_END

/* ---- WebP ----
 * Lossy and lossless images of at most 16383 x 16383 pixels; no animations. */

FDSL_C_BEGIN

/* Sets the size of the image. STATUS_FAILED if the header is broken; STATUS_UNAVAILABLE in builds without
 * libwebp. */
enum status webp_shape(const uint8_t *bytes, size_t size, uint32_t *width, uint32_t *height);

/* Decodes into `pixels`, which holds the size of webp_shape(): 8-bit RGB. Transparency is ignored, as
 * png_decode() does. Sets `*orientation` to that of the chunk EXIF, 1 to 8, or to 1 if there is none; the
 * pixels are as stored. STATUS_FAILED also if the image is damaged; `pixels` is then undefined. Thread
 * safe. */
enum status webp_decode(const uint8_t *bytes, size_t size, uint8_t *pixels, uint32_t *orientation);

FDSL_C_END

/* ---- JPEG ---- */

#define JPEG_PIXELS_MAX (UINT32_C(1) << 28) /* maximum number of pixels per image */

/* Size of an image as stored, before the orientation of its EXIF header is applied. */
struct jpeg_shape {
    uint32_t width, height;
    uint32_t channels;    /* 1 for gray, 3 for colour */
    uint32_t orientation; /* 1 to 8, as in EXIF; 1 is upright */
    bool baseline; /* hardware decoders can decode it: one scan, 8 bits, Huffman codes, and either gray or
                    * YCbCr with 4:4:4, 4:2:2 or 4:2:0 chroma; the file has its own tables, and libjpeg has no
                    * warning about its header */
};

/* Part of an image. The numbers are in pixels of the stored image after it is scaled by 1/denominator. */
struct jpeg_window {
    uint32_t left, top, width, height;
    uint32_t denominator; /* 1, 2, 4 or 8: the image is decoded at 1/denominator of its size */
    bool whole; /* the codes of the rows below the window are decoded too: whether the file is accepted then
                   does not depend on the window */
};

enum jpeg_format {
    JPEG_GRAY = 1, /* one byte per pixel */
    JPEG_RGB = 3,  /* three bytes per pixel */
    JPEG_RGBX = 4  /* red, green, blue and an undefined byte */
};

FDSL_C_BEGIN

/* Returns a decoder, or NULL if memory runs out or this build has no libjpeg-turbo. One thread at a time can
 * use a decoder. The caller closes it. */
struct jpeg_decoder *jpeg_open(void);
void jpeg_close(struct jpeg_decoder *decoder);

/* Reads the header of a file. Nothing is kept of the file before it. A file without any Huffman table is
 * decoded with the standard tables (ITU T.81, annex K.3), as frames of motion JPEG require. If only some are
 * missing, it is broken. `bytes` must stay valid until the image is decoded. STATUS_FAILED if the file is
 * broken, has more than JPEG_PIXELS_MAX pixels, or is of a kind that libjpeg cannot convert to gray or RGB.
 * STATUS_UNAVAILABLE in builds without libjpeg-turbo; `decoder` may then be NULL. */
enum status jpeg_begin(struct jpeg_decoder *decoder, const void *bytes, size_t size,
                       struct jpeg_shape *shape);

/* Starts to decode a window of the file that the latest jpeg_begin() read. The pixels are identical to those
 * of the whole image, decoded with libjpeg's default settings. Rows and columns outside the window are
 * skipped where possible. Sets `*row_bytes` to the size of the rows that jpeg_read() writes, and `*skip` to
 * the number of bytes before the window in each. STATUS_FAILED if the data are damaged. */
enum status jpeg_start(struct jpeg_decoder *decoder, struct jpeg_window window, enum jpeg_format format,
                       size_t *row_bytes, size_t *skip);

/* Decodes the next `count` rows of the window to `rows`, `stride` bytes apart. Writes `*row_bytes` bytes (see
 * jpeg_start()) per row. If `stride` is smaller than that, each row overwrites the end of the previous row,
 * so this end must be outside the window. STATUS_FAILED if the data are damaged: warnings of libjpeg count
 * as damage, except for those that jpeg_warnings() counts. Data after the last row of the window are not
 * examined. */
enum status jpeg_read(struct jpeg_decoder *decoder, uint8_t *rows, size_t stride, uint32_t count);

/* Returns the number of warnings of libjpeg that were accepted since the latest jpeg_begin(), because no data
 * are lost: an unknown version of JFIF, odd parameters of a sequential scan, extraneous bytes before the
 * first scan unless they may be what is left of a lost segment, and zero bytes after the last code of the
 * image. */
uint32_t jpeg_warnings(const struct jpeg_decoder *decoder);

/* Returns whether a baseline file has this size in pixels, its own tables, and complete markers in the right
 * order: segments up to the scan, restart markers in sequence, and the end of the image, without padding
 * before it. Reads the whole image, but decodes nothing. If the result is false, the file is damaged or
 * unusual, and libjpeg must decide. If it is true, the file can still have wrong coefficients. */
bool jpeg_intact(const uint8_t *bytes, size_t size, uint32_t width, uint32_t height);

/* Encodes 8-bit pixels, interleaved, with 1 or 3 channels. `quality` is 1 to 100. Chroma is stored at half
 * the resolution (4:2:0). The caller frees `*bytes`. STATUS_USAGE if a side is 0 or larger than 65,500;
 * STATUS_UNAVAILABLE in builds without libjpeg-turbo. */
enum status jpeg_encode(const uint8_t *pixels, const struct jpeg_shape *shape, int quality, void **bytes,
                        size_t *size);

FDSL_C_END

#endif
