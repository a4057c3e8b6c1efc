#include "data/jpeg_image.h"

#include <string.h>

/* ---- Markers (ITU T.81, annex B) ---- */

#define FRAME_BASELINE 0xc0
#define FRAME_EXTENDED 0xc1 /* extended sequential: like baseline, with more tables */
#define FRAME_BYTES    9    /* size of a frame header up to and including the width */
#define START_OF_IMAGE 0xd8
#define END_OF_IMAGE   0xd9
#define START_OF_SCAN  0xda
#define RESTART_0      0xd0
#define RESTART_7      0xd7

/* Returns the offset after the header of the scan. Returns 0 if there is no scan, or no frame of this size
 * before the scan. */
static size_t scan_in(const uint8_t *bytes, size_t size, uint32_t width, uint32_t height)
{
    size_t at = 2;
    bool framed = false;
    if (size < 4 || bytes[0] != 0xff || bytes[1] != START_OF_IMAGE)
        return 0;
    while (size - at >= 4 && bytes[at] == 0xff) {
        uint8_t marker = bytes[at + 1];
        size_t length = (size_t)bytes[at + 2] << 8 | bytes[at + 3];
        if (marker == 0xff) { /* a fill byte */
            at++;
            continue;
        }
        if (length < 2 || length + 2 > size - at)
            return 0;
        if ((marker == FRAME_BASELINE || marker == FRAME_EXTENDED) && length + 2 >= FRAME_BYTES)
            framed = (uint32_t)(bytes[at + 5] << 8 | bytes[at + 6]) == height &&
                     (uint32_t)(bytes[at + 7] << 8 | bytes[at + 8]) == width;
        at += length + 2;
        if (marker == START_OF_SCAN)
            return framed ? at : 0;
    }
    return 0;
}

bool jpeg_intact(const uint8_t *bytes, size_t size, uint32_t width, uint32_t height)
{
    uint8_t restart = RESTART_0;
    size_t at = scan_in(bytes, size, width, height);
    const uint8_t *found = at ? memchr(bytes + at, 0xff, size - at) : NULL;
    for (; found && found + 1 < bytes + size; found = memchr(found, 0xff, (size_t)(bytes + size - found))) {
        uint8_t marker = *++found;
        if (marker == END_OF_IMAGE)
            return true;
        if (marker == 0xff || marker == 0) /* a fill byte, or a coded byte 0xff */
            continue;
        if (marker != restart)
            return false;
        restart = restart == RESTART_7 ? RESTART_0 : (uint8_t)(restart + 1);
    }
    return false;
}

#ifdef HAVE_JPEG

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>
/* The message codes. Must follow jpeglib.h. */
#include <jerror.h>

#include "data/image_parts.h"

#ifndef JCS_EXTENSIONS
#error "This libjpeg is not libjpeg-turbo. Install libjpeg-turbo, or build with JPEG=0."
#endif

#define HEADER_BYTES    20    /* SOI and the marker of JFIF, the shortest header in use */
#define EXIF_HEAD_BYTES 14    /* "Exif", two zeros, and the header of the TIFF data */
#define ORIENTATION_TAG 0x112 /* TIFF tag of the orientation */
#define SCANS_MAX       500   /* a progressive image has about ten scans; many more indicate an attack */

struct jpeg_decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf failed;
    char message[JMSG_LENGTH_MAX];
    enum jpeg_format format;
    uint32_t last_row; /* the window ends before this row */
};

/* ---- Errors ---- */

/* libjpeg calls this function to report an error. The function must not return. */
static void fail(j_common_ptr jpeg)
{
    struct jpeg_decoder *decoder = jpeg->client_data;
    jpeg->err->format_message(jpeg, decoder->message);
    longjmp(decoder->failed, 1);
}

/* A message with a negative level is a warning that libjpeg has replaced lost data. Such warnings count as
 * errors here. */
static void warn(j_common_ptr jpeg, int level)
{
    if (level < 0)
        fail(jpeg);
}

static void stop_at_many_scans(j_common_ptr jpeg)
{
    struct jpeg_decoder *decoder = jpeg->client_data;
    if (!jpeg->is_decompressor || decoder->jpeg.input_scan_number <= SCANS_MAX)
        return;
    snprintf(decoder->message, sizeof decoder->message, "more than %d scans", SCANS_MAX);
    longjmp(decoder->failed, 1);
}

static enum status failure(struct jpeg_decoder *decoder)
{
    jpeg_abort_decompress(&decoder->jpeg);
    enum status status = decoder->errors.msg_code == JERR_OUT_OF_MEMORY ? STATUS_EXHAUSTED : STATUS_FAILED;
    return status_set(status, "libjpeg: %s", decoder->message);
}

/* ---- Opening ---- */

/* Returns false if memory runs out. */
static bool create(struct jpeg_decoder *decoder)
{
    decoder->jpeg.err = jpeg_std_error(&decoder->errors);
    decoder->errors.error_exit = fail;
    decoder->errors.emit_message = warn;
    decoder->jpeg.client_data = decoder;
    if (setjmp(decoder->failed))
        return false;
    jpeg_create_decompress(&decoder->jpeg); /* does not change client_data and err */
    decoder->progress.progress_monitor = stop_at_many_scans;
    decoder->jpeg.progress = &decoder->progress;
    jpeg_save_markers(&decoder->jpeg, JPEG_APP0 + 1, 0xffff);
    return true;
}

struct jpeg_decoder *jpeg_open(void)
{
    struct jpeg_decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder || create(decoder))
        return decoder;
    jpeg_close(decoder);
    return NULL;
}

void jpeg_close(struct jpeg_decoder *decoder)
{
    if (!decoder)
        return;
    jpeg_destroy_decompress(&decoder->jpeg);
    free(decoder);
}

/* ---- Header ---- */

static uint32_t number(const uint8_t *bytes, int count, bool big)
{
    uint32_t value = 0;
    for (int i = 0; i < count; i++)
        value = value << 8 | bytes[big ? i : count - 1 - i];
    return value;
}

/* Returns the orientation from an APP1 marker, or 0 if the marker has none. The marker contains TIFF data
 * (EXIF 2.32, section 4.5): byte order, offset of a directory, and entries of 12 bytes there. */
static uint32_t orientation_in(const uint8_t *data, size_t size)
{
    if (size < EXIF_HEAD_BYTES || memcmp(data, "Exif\0\0", 6) != 0)
        return 0;
    const uint8_t *tiff = data + 6;
    size_t bytes = size - 6;
    bool big = tiff[0] == 'M';
    size_t at = number(tiff + 4, 4, big);
    if (at > bytes || bytes - at < 2)
        return 0;
    uint32_t entries = number(tiff + at, 2, big);
    for (at += 2; entries-- > 0 && bytes - at >= 12; at += 12)
        if (number(tiff + at, 2, big) == ORIENTATION_TAG) {
            uint32_t value = number(tiff + at + 8, 2, big);
            return value <= 8 ? value : 0;
        }
    return 0;
}

static uint32_t orientation(const struct jpeg_decompress_struct *jpeg)
{
    for (jpeg_saved_marker_ptr marker = jpeg->marker_list; marker; marker = marker->next) {
        uint32_t found = orientation_in(marker->data, marker->data_length);
        if (found)
            return found;
    }
    return 1;
}

static bool is_baseline(const struct jpeg_decompress_struct *jpeg)
{
    const jpeg_component_info *parts = jpeg->comp_info;
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->data_precision != 8 ||
        jpeg->comps_in_scan != jpeg->num_components)
        return false;
    if (jpeg->jpeg_color_space == JCS_GRAYSCALE)
        return true;
    if (jpeg->jpeg_color_space != JCS_YCbCr)
        return false;
    for (int c = 1; c < 3; c++)
        if (parts[c].h_samp_factor != 1 || parts[c].v_samp_factor != 1)
            return false;
    return parts[0].h_samp_factor <= 2 && parts[0].v_samp_factor <= parts[0].h_samp_factor;
}

enum status jpeg_begin(struct jpeg_decoder *decoder, const void *bytes, size_t size, struct jpeg_shape *shape)
{
    TRY(ALLOCATED(decoder, "out of memory for a JPEG decoder"));
    TRY(image_check_size("JPEG", size, HEADER_BYTES));
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    jpeg_abort_decompress(jpeg); /* the previous file may have been decoded in part only */
    if (setjmp(decoder->failed))
        return failure(decoder);
    jpeg_mem_src(jpeg, bytes, size);
    jpeg_read_header(jpeg, TRUE);
    bool gray = jpeg->num_components == 1;
    *shape = (struct jpeg_shape){.width = jpeg->image_width,
                                 .height = jpeg->image_height,
                                 .channels = gray ? 1 : 3,
                                 .orientation = orientation(jpeg),
                                 .baseline = is_baseline(jpeg)};
    if ((uint64_t)shape->width * shape->height > JPEG_PIXELS_MAX)
        return status_set(STATUS_FAILED, "an image of %u x %u pixels is too large", shape->width,
                          shape->height);
    return STATUS_OK;
}

/* ---- Pixels ---- */

/* Sets the colour space that libjpeg converts to. libjpeg cannot convert CMYK; convert_cmyk() does that. */
static void choose_colours(struct jpeg_decompress_struct *jpeg, enum jpeg_format format)
{
    if (jpeg->jpeg_color_space == JCS_CMYK || jpeg->jpeg_color_space == JCS_YCCK)
        jpeg->out_color_space = JCS_CMYK;
    else
        jpeg->out_color_space = format == JPEG_RGBX  ? JCS_EXT_RGBX
                                : format == JPEG_RGB ? JCS_EXT_RGB
                                                     : JCS_GRAYSCALE;
}

/* Converts a row of CMYK in place to pixels of `step` bytes: R = (255 - C) (255 - K) / 255. Files with an
 * Adobe marker store the complements, 255 - C and 255 - K. */
static void convert_cmyk(uint8_t *row, bool inverted, uint32_t width, uint32_t step)
{
    for (uint32_t x = 0; x < width; x++) {
        uint32_t key = row[4 * x + 3];
        for (uint32_t c = 0; c < 3; c++) {
            uint32_t colour = row[4 * x + c];
            uint32_t product = inverted ? colour * key : (255 - colour) * (255 - key);
            row[x * step + c] = (uint8_t)((product + 127) / 255);
        }
    }
}

/* Skips the columns left and right of the window. Fancy upsampling computes a pixel from a neighbouring
 * chroma sample, which covers two pixels, so two more pixels are decoded on each side. Returns the number of
 * decoded pixels to the left of the window. */
static uint32_t skip_columns(struct jpeg_decompress_struct *jpeg, struct jpeg_window window)
{
    JDIMENSION left = window.left > 2 ? window.left - 2 : 0, right = window.left + window.width + 2;
    JDIMENSION width = (right < jpeg->output_width ? right : jpeg->output_width) - left;
    if (width < jpeg->output_width)
        jpeg_crop_scanline(jpeg, &left, &width); /* rounds `left` down to a whole block */
    return window.left - left;
}

enum status jpeg_start(struct jpeg_decoder *decoder, struct jpeg_window window, enum jpeg_format format,
                       size_t *row_bytes, size_t *skip)
{
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    if (setjmp(decoder->failed))
        return failure(decoder);
    decoder->format = format;
    decoder->last_row = window.top + window.height;
    choose_colours(jpeg, format);
    jpeg->scale_num = 1;
    jpeg->scale_denom = window.denominator;
    jpeg_start_decompress(jpeg);
    *skip = skip_columns(jpeg, window) * (size_t)format;
    *row_bytes = (size_t)jpeg->output_width * (size_t)jpeg->output_components;
    if (window.top > 0)
        jpeg_skip_scanlines(jpeg, window.top);
    return STATUS_OK;
}

enum status jpeg_read(struct jpeg_decoder *decoder, uint8_t *rows, size_t stride, uint32_t count)
{
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    if (setjmp(decoder->failed))
        return failure(decoder);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *row = rows + i * stride;
        if (jpeg_read_scanlines(jpeg, &row, 1) != 1)
            return status_set(STATUS_FAILED, "libjpeg returned no row");
        if (jpeg->out_color_space == JCS_CMYK)
            convert_cmyk(row, jpeg->saw_Adobe_marker, jpeg->output_width, (uint32_t)decoder->format);
    }
    if (jpeg->output_scanline == jpeg->output_height)
        jpeg_finish_decompress(jpeg); /* warns if the end of the file is missing */
    else if (jpeg->output_scanline == decoder->last_row)
        jpeg_abort_decompress(jpeg);
    return STATUS_OK;
}

/* ---- Encoding ---- */

/* State of an encoding. It is stored outside the function that calls setjmp(), because longjmp() may lose
 * local variables. */
struct encoding {
    struct jpeg_compress_struct jpeg;
    struct jpeg_decoder failing; /* only `failed` and `message` are used */
    unsigned char *bytes;
    unsigned long size;
};

static void encode(struct encoding *encoding, const uint8_t *pixels, const struct jpeg_shape *shape,
                   int quality)
{
    struct jpeg_compress_struct *jpeg = &encoding->jpeg;
    jpeg_create_compress(jpeg);
    jpeg_mem_dest(jpeg, &encoding->bytes, &encoding->size);
    jpeg->image_width = shape->width;
    jpeg->image_height = shape->height;
    jpeg->input_components = (int)shape->channels;
    jpeg->in_color_space = shape->channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_set_defaults(jpeg);
    jpeg_set_quality(jpeg, quality, TRUE);
    jpeg_start_compress(jpeg, TRUE);
    for (size_t y = 0; y < shape->height; y++) {
        JSAMPROW row = (JSAMPROW)(pixels + y * shape->width * shape->channels);
        jpeg_write_scanlines(jpeg, &row, 1);
    }
    jpeg_finish_compress(jpeg);
}

enum status jpeg_encode(const uint8_t *pixels, const struct jpeg_shape *shape, int quality, void **bytes,
                        size_t *size)
{
    struct encoding *encoding = calloc(1, sizeof *encoding);
    *bytes = NULL;
    TRY(ALLOCATED(encoding, "out of memory"));
    struct jpeg_decoder *failing = &encoding->failing;
    encoding->jpeg.err = jpeg_std_error(&failing->errors);
    failing->errors.error_exit = fail;
    failing->errors.emit_message = warn;
    encoding->jpeg.client_data = failing;
    enum status status = STATUS_OK;
    if (setjmp(failing->failed) == 0) {
        encode(encoding, pixels, shape, quality);
        *bytes = encoding->bytes;
        *size = encoding->size;
    } else {
        free(encoding->bytes);
        status = status_set(STATUS_USAGE, "libjpeg: %s", failing->message);
    }
    jpeg_destroy_compress(&encoding->jpeg);
    free(encoding);
    return status;
}

#else

static enum status unavailable(void)
{
    return status_set(STATUS_UNAVAILABLE, "this build cannot read or write JPEG files: install libjpeg-turbo "
                                          "(libjpeg-dev) and build again");
}

struct jpeg_decoder *jpeg_open(void)
{
    return NULL;
}

void jpeg_close(struct jpeg_decoder *decoder)
{
    (void)decoder;
}

enum status jpeg_begin(struct jpeg_decoder *decoder, const void *bytes, size_t size, struct jpeg_shape *shape)
{
    (void)decoder, (void)bytes, (void)size, (void)shape;
    return unavailable();
}

enum status jpeg_start(struct jpeg_decoder *decoder, struct jpeg_window window, enum jpeg_format format,
                       size_t *row_bytes, size_t *skip)
{
    (void)decoder, (void)window, (void)format, (void)row_bytes, (void)skip;
    return unavailable();
}

enum status jpeg_read(struct jpeg_decoder *decoder, uint8_t *rows, size_t stride, uint32_t count)
{
    (void)decoder, (void)rows, (void)stride, (void)count;
    return unavailable();
}

enum status jpeg_encode(const uint8_t *pixels, const struct jpeg_shape *shape, int quality, void **bytes,
                        size_t *size)
{
    (void)pixels, (void)shape, (void)quality, (void)bytes, (void)size;
    return unavailable();
}

#endif
