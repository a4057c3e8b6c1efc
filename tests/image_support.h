/* Random numbers and JPEG files for the tests of images. */
#ifndef FDSL_TESTS_IMAGE_SUPPORT_H
#define FDSL_TESTS_IMAGE_SUPPORT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

static uint32_t state;

static inline uint32_t next(void) /* xorshift32 */
{
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

#ifdef HAVE_JPEG
#include <stdio.h>

#include <jpeglib.h>

struct kind {
    const char *name;
    int components, h, v;
    bool progressive, ycck;
    unsigned restart;     /* blocks between restart markers; 0: none */
    bool optimised, flat; /* Huffman tables of its own; a lower half of one colour */
};

static const struct kind kinds[] = {
    {"gray", 1, 1, 1, false, false, 0, false, false},       {"4:4:4", 3, 1, 1, false, false, 0, false, false},
    {"4:2:2", 3, 2, 1, false, false, 0, false, false},      {"4:2:0", 3, 2, 2, false, false, 0, false, false},
    {"4:4:0", 3, 1, 2, false, false, 0, false, false},      {"4:1:1", 3, 4, 1, false, false, 0, false, false},
    {"progressive", 3, 2, 2, true, false, 0, false, false}, {"cmyk", 4, 1, 1, false, false, 0, false, false},
    {"ycck", 4, 2, 2, false, true, 0, false, false}};

/* Encodes a smooth image with noise. If `exif` is not 0, adds an EXIF header with this orientation. The
 * caller frees the result. */
static inline uint8_t *encode(const struct kind *kind, uint32_t width, uint32_t height, uint32_t exif,
                              size_t *size)
{
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    unsigned char *bytes = NULL;
    unsigned long count = 0;
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    jpeg_mem_dest(&jpeg, &bytes, &count);
    jpeg.image_width = width;
    jpeg.image_height = height;
    jpeg.input_components = kind->components;
    jpeg.in_color_space = kind->components == 1 ? JCS_GRAYSCALE : kind->components == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&jpeg);
    if (kind->ycck)
        jpeg_set_colorspace(&jpeg, JCS_YCCK);
    jpeg_set_quality(&jpeg, 90, TRUE);
    jpeg.comp_info[0].h_samp_factor = kind->h;
    jpeg.comp_info[0].v_samp_factor = kind->v;
    jpeg.restart_interval = kind->restart;
    jpeg.optimize_coding = kind->optimised;
    if (kind->progressive)
        jpeg_simple_progression(&jpeg);
    jpeg_start_compress(&jpeg, TRUE);
    if (exif) {
        uint8_t marker[32] = "Exif\0\0II*\0\10\0\0\0\1\0\x12\1\3\0\1\0\0\0";
        marker[24] = (uint8_t)exif;
        jpeg_write_marker(&jpeg, JPEG_APP0 + 1, marker, sizeof marker);
    }
    uint8_t *row = malloc((size_t)width * (size_t)kind->components);
    for (uint32_t y = 0; y < height; y++) {
        for (uint32_t x = 0; x < width; x++)
            for (int c = 0; c < kind->components; c++)
                row[x * (uint32_t)kind->components + (uint32_t)c] =
                    kind->flat && y >= height / 2
                        ? 255
                        : (uint8_t)(128 + 80 * sin(x * 0.11 + c) * cos(y * 0.07 + 2 * c) + next() % 40);
        jpeg_write_scanlines(&jpeg, &row, 1);
    }
    free(row);
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    *size = count;
    return bytes;
}

/* Decodes a whole image with libjpeg alone. */
static inline uint8_t *decode_plainly(const uint8_t *bytes, size_t size, J_COLOR_SPACE space,
                                      uint32_t denominator, uint32_t *width, uint32_t *height)
{
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&jpeg);
    jpeg_mem_src(&jpeg, bytes, size);
    jpeg_read_header(&jpeg, TRUE);
    jpeg.out_color_space = space;
    jpeg.scale_num = 1;
    jpeg.scale_denom = denominator;
    jpeg_start_decompress(&jpeg);
    *width = jpeg.output_width;
    *height = jpeg.output_height;
    size_t stride = (size_t)*width * (size_t)jpeg.output_components;
    uint8_t *pixels = malloc(stride * *height);
    while (jpeg.output_scanline < *height) {
        uint8_t *row = pixels + jpeg.output_scanline * stride;
        jpeg_read_scanlines(&jpeg, &row, 1);
    }
    jpeg_finish_decompress(&jpeg);
    jpeg_destroy_decompress(&jpeg);
    return pixels;
}

/* Returns the offset of the second byte of the first such marker from offset `from` on, or 0. */
static inline size_t find_marker(const uint8_t *bytes, size_t size, size_t from, uint8_t marker)
{
    for (size_t i = from; i + 1 < size; i++)
        if (bytes[i] == 0xff && bytes[i + 1] == marker)
            return i + 1;
    return 0;
}

#endif

#endif
