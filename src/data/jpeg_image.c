#include "data/image_formats.h"

#include <string.h>

/* ---- Markers (ITU T.81, annex B) ---- */

#define FRAME_BASELINE      0xc0
#define FRAME_EXTENDED      0xc1 /* extended sequential: like baseline, with more tables */
#define FRAME_BYTES         9    /* size of a frame header up to and including the width */
#define HUFFMAN_TABLES      0xc4
#define START_OF_IMAGE      0xd8
#define END_OF_IMAGE        0xd9
#define START_OF_SCAN       0xda
#define QUANTISATION_TABLES 0xdb
#define COMMENT             0xfe
#define RESTART_0           0xd0
#define RESTART_7           0xd7

/* Returns the offset after the header of the scan. Returns 0 if there is no scan, or if no frame of this
 * size, no quantisation table or no Huffman table precedes it. */
static size_t scan_in(const uint8_t *bytes, size_t size, uint32_t width, uint32_t height)
{
    size_t at = 2;
    bool framed = false, quantised = false, coded = false;
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
        quantised |= marker == QUANTISATION_TABLES;
        coded |= marker == HUFFMAN_TABLES;
        at += length + 2;
        if (marker == START_OF_SCAN)
            return framed && quantised && coded ? at : 0;
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
        if (marker == END_OF_IMAGE) /* a single zero before it may belong to a coded byte 0xff */
            return found[-2] != 0 || found[-3] != 0;
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

#include "core/array.h"
#include "data/resample.h"

#ifndef JCS_EXTENSIONS
#error "This libjpeg is not libjpeg-turbo. Install libjpeg-turbo, or build with JPEG=0."
#endif

#define HEADER_BYTES    20  /* SOI and the marker of JFIF, the shortest header in use */
#define EXIF_HEAD_BYTES 6   /* "Exif" and two zeros, before the EXIF data */
#define SEGMENT_LEAST   6   /* size of the shortest segment that changes pixels, the interval of restarts */
#define SCANS_MAX       500 /* a progressive image has about ten scans; many more indicate an attack */

struct jpeg_decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf failed;
    char message[JMSG_LENGTH_MAX];
    enum jpeg_format format;
    uint32_t last_row;    /* the window ends before this row */
    bool whole;           /* the rows below the window are decoded too */
    const uint8_t *bytes; /* the file */
    uint32_t warnings;    /* accepted warnings about the file */
    bool strict;          /* accept no padding */
    const uint8_t *from;  /* the first segment, or the one after the latest accepted extraneous bytes */
    bool odd_adobe;       /* the segment APP14, which says what the colours are, was not understood */
};

/* ---- Errors ---- */

/* libjpeg calls this function to report an error. The function must not return. */
static void fail(j_common_ptr jpeg)
{
    struct jpeg_decoder *decoder = jpeg->client_data;
    jpeg->err->format_message(jpeg, decoder->message);
    longjmp(decoder->failed, 1);
}

static bool is_harmless(const struct jpeg_decoder *decoder);

/* A message with a negative level is a warning. Most warnings mean that libjpeg has replaced lost data, so
 * they are errors here. */
static void warn(j_common_ptr jpeg, int level)
{
    struct jpeg_decoder *decoder = jpeg->client_data;
    decoder->odd_adobe |= jpeg->err->msg_code == JTRC_APP14;
    if (level >= 0)
        return;
    if (!jpeg->is_decompressor || !is_harmless(decoder))
        fail(jpeg);
    if (jpeg->err->msg_code == JWRN_EXTRANEOUS_DATA)
        decoder->from = decoder->jpeg.src->next_input_byte;
    decoder->warnings++;
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

struct jpeg_decoder *jpeg_open(void)
{
    return calloc(1, sizeof(struct jpeg_decoder));
}

void jpeg_close(struct jpeg_decoder *decoder)
{
    if (!decoder)
        return;
    jpeg_destroy_decompress(&decoder->jpeg); /* does nothing if there was no file yet */
    free(decoder);
}

/* Creates libjpeg's decoder anew, because it keeps the tables of a file for the next one: a file without
 * tables would be decoded with those of another file. Leaves with longjmp() if memory runs out. */
static void renew(struct jpeg_decoder *decoder)
{
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    jpeg_destroy_decompress(jpeg);
    jpeg->err = jpeg_std_error(&decoder->errors);
    decoder->errors.error_exit = fail;
    decoder->errors.emit_message = warn;
    jpeg->client_data = decoder;
    decoder->warnings = 0;
    decoder->odd_adobe = false;
    jpeg_create_decompress(jpeg); /* does not change client_data and err */
    decoder->progress.progress_monitor = stop_at_many_scans;
    jpeg->progress = &decoder->progress;
    jpeg_save_markers(jpeg, JPEG_APP0 + 1, 0xffff);
}

/* ---- Header ---- */

static uint32_t orientation(const struct jpeg_decompress_struct *jpeg)
{
    for (jpeg_saved_marker_ptr marker = jpeg->marker_list; marker; marker = marker->next)
        if (marker->data_length >= EXIF_HEAD_BYTES &&
            memcmp(marker->data, "Exif\0\0", EXIF_HEAD_BYTES) == 0) {
            uint32_t found =
                orientation_in_exif(marker->data + EXIF_HEAD_BYTES, marker->data_length - EXIF_HEAD_BYTES);
            if (found)
                return found;
        }
    return 1;
}

/* Returns whether the file has all tables that its scan needs. */
static bool has_tables(const struct jpeg_decompress_struct *jpeg)
{
    for (int c = 0; c < jpeg->num_components; c++) {
        const jpeg_component_info *part = &jpeg->comp_info[c];
        if ((unsigned)part->quant_tbl_no >= NUM_QUANT_TBLS || (unsigned)part->dc_tbl_no >= NUM_HUFF_TBLS ||
            (unsigned)part->ac_tbl_no >= NUM_HUFF_TBLS || !jpeg->quant_tbl_ptrs[part->quant_tbl_no] ||
            !jpeg->dc_huff_tbl_ptrs[part->dc_tbl_no] || !jpeg->ac_huff_tbl_ptrs[part->ac_tbl_no])
            return false;
    }
    return true;
}

static bool is_baseline(const struct jpeg_decoder *decoder)
{
    const struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    const jpeg_component_info *parts = jpeg->comp_info;
    if (jpeg->progressive_mode || jpeg->arith_code || jpeg->data_precision != 8 ||
        jpeg->comps_in_scan != jpeg->num_components)
        return false;
    bool odd = jpeg->Ss != 0 || jpeg->Se != DCTSIZE2 - 1 || jpeg->Ah != 0 || jpeg->Al != 0;
    if (odd || decoder->warnings > 0 || !has_tables(jpeg))
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

static void require(struct jpeg_decompress_struct *jpeg, JHUFF_TBL *const *tables, int number)
{
    if (number < 0 || number >= NUM_HUFF_TBLS || !tables[number])
        ERREXIT1(jpeg, JERR_NO_HUFF_TABLE, number);
}

/* Makes libjpeg refuse any scan that uses this table, unless the file defines it before the scan. */
static void forbid(struct jpeg_decompress_struct *jpeg, JHUFF_TBL **table)
{
    if (*table)
        return;
    *table = jpeg_alloc_huff_table((j_common_ptr)jpeg);
    memset(*table, 0, sizeof **table);
    (*table)->bits[1] = 3; /* at most two codes can have one bit */
}

/* libjpeg sets up standard tables for all that a sequential file does not define. This is right for files
 * without any table. A file that has some has lost the others, and so may have a file with extraneous bytes.
 * Such a file is refused. Leaves with longjmp() if the first scan needs a missing table. */
static void forbid_standard_tables(struct jpeg_decoder *decoder)
{
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    bool some = decoder->from != decoder->bytes + 2;
    if (jpeg->progressive_mode || jpeg->arith_code)
        return;
    for (int i = 0; i < NUM_HUFF_TBLS; i++)
        some |= jpeg->dc_huff_tbl_ptrs[i] || jpeg->ac_huff_tbl_ptrs[i];
    if (!some)
        return;
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        require(jpeg, jpeg->dc_huff_tbl_ptrs, jpeg->cur_comp_info[c]->dc_tbl_no);
        if (jpeg->Se > 0) /* lossless files have no AC tables */
            require(jpeg, jpeg->ac_huff_tbl_ptrs, jpeg->cur_comp_info[c]->ac_tbl_no);
    }
    for (int i = 0; i < NUM_HUFF_TBLS; i++) {
        forbid(jpeg, &jpeg->dc_huff_tbl_ptrs[i]);
        forbid(jpeg, &jpeg->ac_huff_tbl_ptrs[i]);
    }
}

enum status jpeg_begin(struct jpeg_decoder *decoder, const void *bytes, size_t size, struct jpeg_shape *shape)
{
    TRY(ALLOCATED(decoder, "out of memory for a JPEG decoder"));
    TRY(image_check_size("JPEG", size, HEADER_BYTES));
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    if (setjmp(decoder->failed))
        return failure(decoder);
    renew(decoder);
    decoder->bytes = bytes;
    decoder->from = decoder->bytes + 2;
    jpeg_mem_src(jpeg, bytes, size);
    jpeg_read_header(jpeg, TRUE);
    bool gray = jpeg->num_components == 1;
    *shape = (struct jpeg_shape){.width = jpeg->image_width,
                                 .height = jpeg->image_height,
                                 .channels = gray ? 1 : 3,
                                 .orientation = orientation(jpeg),
                                 .baseline = is_baseline(decoder)};
    if ((uint64_t)shape->width * shape->height > JPEG_PIXELS_MAX)
        return status_set(STATUS_FAILED, "an image of %u x %u pixels is too large", shape->width,
                          shape->height);
    forbid_standard_tables(decoder);
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

/* Converts a row of CMYK in place to pixels of `step` bytes: R = (255 - C) (255 - K) / 255. The file stores
 * the complements, 255 - C and 255 - K: Photoshop and most other programs do so, and Pillow assumes it even
 * for files without Adobe's marker. */
static void convert_cmyk(uint8_t *row, uint32_t width, uint32_t step)
{
    for (uint32_t x = 0; x < width; x++) {
        uint32_t key = row[4 * x + 3];
        for (uint32_t c = 0; c < 3; c++)
            row[x * step + c] = (uint8_t)((row[4 * x + c] * key + 127) / 255);
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
    decoder->whole = window.whole;
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

/* Decodes the codes of the rows below the window. libjpeg would not read the codes of skipped rows at the
 * end of the image, so the last row is not skipped. */
static void read_to_end(struct jpeg_decompress_struct *jpeg)
{
    const JDIMENSION left = jpeg->output_height - jpeg->output_scanline;
    JSAMPARRAY row = jpeg->mem->alloc_sarray((j_common_ptr)jpeg, JPOOL_IMAGE,
                                             jpeg->output_width * (JDIMENSION)jpeg->output_components, 1);
    if (left > 1)
        jpeg_skip_scanlines(jpeg, left - 1);
    jpeg_read_scanlines(jpeg, row, 1);
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
            convert_cmyk(row, jpeg->output_width, (uint32_t)decoder->format);
    }
    if (decoder->whole && jpeg->output_scanline == decoder->last_row &&
        decoder->last_row < jpeg->output_height)
        read_to_end(jpeg);
    if (jpeg->output_scanline == jpeg->output_height)
        jpeg_finish_decompress(jpeg); /* warns if the end of the file is missing */
    else if (jpeg->output_scanline == decoder->last_row)
        jpeg_abort_decompress(jpeg);
    return STATUS_OK;
}

uint32_t jpeg_warnings(const struct jpeg_decoder *decoder)
{
    return decoder->warnings;
}

/* ---- Harmless warnings ---- */

static uint32_t round_up(uint32_t value, int multiple)
{
    return (value + (uint32_t)multiple - 1) / (uint32_t)multiple * (uint32_t)multiple;
}

/* Decodes the codes of the file that jpeg_begin() opened, without computing pixels. Sets `*sum` to a checksum
 * of all coefficients, also of blocks outside the image. */
static enum status sum_coefficients(struct jpeg_decoder *decoder, uint64_t *sum)
{
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    if (setjmp(decoder->failed))
        return failure(decoder);
    jvirt_barray_ptr *arrays = jpeg_read_coefficients(jpeg);
    *sum = FNV_BEGIN;
    for (int c = 0; c < jpeg->num_components; c++) {
        const jpeg_component_info *part = &jpeg->comp_info[c];
        uint32_t rows = round_up(part->height_in_blocks, part->v_samp_factor);
        size_t blocks = round_up(part->width_in_blocks, part->h_samp_factor);
        for (uint32_t y = 0; y < rows; y++) {
            JBLOCKARRAY row = jpeg->mem->access_virt_barray((j_common_ptr)jpeg, arrays[c], y, 1, FALSE);
            *sum = fnv_add(*sum, *row, blocks * sizeof(JBLOCK));
        }
    }
    jpeg_finish_decompress(jpeg);
    return STATUS_OK;
}

/* Decodes a file that consists of the first `kept` bytes of another file, with the bits `flip` of the last
 * byte inverted, and of an end. Returns 0 if it has no fault, the code of libjpeg's message if it has one, or
 * -1 for other failures. The segment before the end makes libjpeg report data that are left over in any part
 * of the scan. */
static int fault_of(const uint8_t *bytes, size_t kept, unsigned flip, uint64_t *sum)
{
    static const uint8_t end[] = {0xff, COMMENT, 0, 2, 0xff, END_OF_IMAGE};
    struct jpeg_decoder *decoder = jpeg_open();
    uint8_t *copy = malloc(kept + sizeof end);
    struct jpeg_shape shape;
    enum status status = ALLOCATED(copy && decoder, "out of memory to check the end of a JPEG file");
    if (status == STATUS_OK) {
        memcpy(copy, bytes, kept);
        copy[kept - 1] ^= (uint8_t)flip;
        memcpy(copy + kept, end, sizeof end);
        decoder->strict = true;
        status = jpeg_begin(decoder, copy, kept + sizeof end, &shape);
    }
    if (status == STATUS_OK)
        status = sum_coefficients(decoder, sum);
    int fault = status == STATUS_OK ? 0 : status == STATUS_FAILED ? decoder->errors.msg_code : -1;
    jpeg_close(decoder);
    free(copy);
    return fault;
}

/* Returns whether the coded data of the scan end in the last of the first `kept` bytes, or in the last two if
 * these are a coded byte 0xff and its zero. Encoders fill the unused bits of the last byte with ones. So its
 * lowest zero bit must be used: the result must change with it. */
static bool ends_in(const uint8_t *bytes, size_t kept)
{
    unsigned last = bytes[kept - 2] == 0xff ? 0xff : bytes[kept - 1], zero = ~last & (last + 1) & 0xff;
    uint64_t sum, other;
    if (fault_of(bytes, kept, 0, &sum) != 0 || fault_of(bytes, kept - 1, 0, &other) != JWRN_HIT_MARKER)
        return false;
    int fault = zero ? fault_of(bytes, kept, zero, &other) : JWRN_HIT_MARKER;
    return fault == 0 ? sum != other : fault > 0;
}

/* Returns whether the `count` bytes before `end` are padding after the last code of the image. libjpeg has
 * read up to eight more bytes than it needed, so it does not know where the code ends. A damaged image can
 * also end early, and what is left can be zero. The padding must therefore begin where the code ends. A last
 * coded byte of zero cannot be told from padding, into which the code of a damaged image has run. */
static bool is_padding(const uint8_t *bytes, const uint8_t *end, size_t count)
{
    size_t kept = (size_t)(end - bytes), least = kept - count;
    while (kept > 2 && bytes[kept - 1] == 0)
        kept--;
    if (kept > least)
        return false;
    if (bytes[kept - 1] == 0xff) /* the zero after it belongs to it */
        kept++;
    return ends_in(bytes, kept);
}

/* Returns whether the `count` bytes before `end` are a segment with a damaged marker: a length that fits, and
 * before it two bytes that are no marker, or nothing if the damage made a marker without a length. Such a
 * segment, for example a table, is lost. */
static bool is_segment(const uint8_t *end, size_t count)
{
    const uint8_t *bytes = end - count;
    return (count >= 4 && ((size_t)bytes[2] << 8 | bytes[3]) == count - 2) ||
           (count >= 2 && ((size_t)bytes[0] << 8 | bytes[1]) == count);
}

/* Returns whether the segment before the extraneous bytes from `start` to `end` would end at a marker if one
 * bit of its length were different. `at` is an earlier segment. Then the bytes may be what is left of it, or
 * of another one that it has swallowed. If its own end were only a few bytes later, nothing important is
 * lost. */
static bool has_wrong_length(const uint8_t *at, const uint8_t *start, const uint8_t *end)
{
    const uint8_t *segment = NULL;
    while (at + 4 <= start) {
        if (at[0] != 0xff || at[1] == 0xff || at[1] < FRAME_BASELINE ||
            (at[1] >= RESTART_0 && at[1] <= RESTART_7)) {
            at++;
            continue;
        }
        segment = at;
        size_t length = (size_t)at[2] << 8 | at[3];
        at += length < 2 ? 4 : length + 2;
    }
    for (size_t bit = 1; segment && bit < 1 << 16; bit <<= 1) {
        size_t length = ((size_t)segment[2] << 8 | segment[3]) ^ bit;
        if (length >= 2 && length + 2 <= (size_t)(end - segment) &&
            (segment + length + 2 < end || end - start >= SEGMENT_LEAST) && segment[length + 2] == 0xff &&
            segment[length + 3] >= FRAME_BASELINE)
            return true;
    }
    return false;
}

/* Returns whether the extraneous bytes from `start` to `end` may be what is left of a segment that is lost.
 * Zeros at their beginning may be damage that has reached them from the segment before. */
static bool may_be_lost(const struct jpeg_decoder *decoder, const uint8_t *start, const uint8_t *end)
{
    const uint8_t *first = start + (*start == 0xff);
    return decoder->odd_adobe || (end - start >= SEGMENT_LEAST && *first == 0) ||
           is_segment(end, (size_t)(end - start)) || has_wrong_length(decoder->from, start, end);
}

/* Returns whether the warning that libjpeg is about to report does not mean that data were lost. */
static bool is_harmless(const struct jpeg_decoder *decoder)
{
    const struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    const uint8_t *end = jpeg->src ? jpeg->src->next_input_byte : NULL; /* the marker after skipped bytes */
    size_t count = (size_t)decoder->errors.msg_parm.i[0];
    switch (decoder->errors.msg_code) {
    case JWRN_JFIF_MAJOR:
        return true;
    case JWRN_NOT_SEQUENTIAL: /* more scans would mean that the file was progressive */
        return jpeg->input_scan_number == 1 && jpeg->comps_in_scan == jpeg->num_components;
    case JWRN_EXTRANEOUS_DATA:
        if (count > (size_t)(end - decoder->bytes))
            return false;
        if (jpeg->input_scan_number == 0)
            return !may_be_lost(decoder, end - count, end);
        return !decoder->strict && decoder->errors.msg_parm.i[1] == END_OF_IMAGE &&
               is_padding(decoder->bytes, end, count);
    default:
        return false;
    }
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

uint32_t jpeg_warnings(const struct jpeg_decoder *decoder)
{
    (void)decoder;
    return 0;
}

enum status jpeg_encode(const uint8_t *pixels, const struct jpeg_shape *shape, int quality, void **bytes,
                        size_t *size)
{
    (void)pixels, (void)shape, (void)quality, (void)bytes, (void)size;
    return unavailable();
}

#endif
