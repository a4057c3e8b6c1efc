/* Tests which pixels image files give: every kind of PNG, EXIF orientations, warnings of libjpeg, and files
 * in tests/data/images, whose pixels other programs decoded (tests/data/images/expected.py). A file must give
 * the same pixels whatever was decoded before it. */
#include <criterion/criterion.h>

#include <glob.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "data/image.h"
#include "data/resample.h"
#include "data/image_formats.h"
#include "image_support.h"
#include "must.h"

TestSuite(image_files, .timeout = 300);

#if defined HAVE_PNG && defined HAVE_ZLIB
#include <zlib.h>

/* ---- A writer of PNG files, which does not use libpng ---- */

struct png_kind {
    uint32_t width, height;
    int type, depth; /* colour type and bits per value, as in IHDR */
    bool interlaced, transparent;
};

/* The passes of Adam7: first column and row, and the steps between columns and rows (PNG specification,
 * section 8.2). */
static const uint32_t adam7[7][4] = {{0, 0, 8, 8}, {4, 0, 8, 8}, {0, 4, 4, 8}, {2, 0, 4, 4},
                                     {0, 2, 2, 4}, {1, 0, 2, 2}, {0, 1, 1, 2}};
static const uint32_t one_pass[1][4] = {{0, 0, 1, 1}};

static void put_number(uint8_t *bytes, uint32_t value)
{
    for (int b = 0; b < 4; b++)
        bytes[b] = (uint8_t)(value >> (24 - 8 * b));
}

/* Appends a chunk to the file. */
static void put_chunk(uint8_t *file, size_t *size, const char *name, const void *data, size_t bytes)
{
    uint8_t *chunk = file + *size;
    put_number(chunk, (uint32_t)bytes);
    memcpy(chunk + 4, name, 4);
    if (bytes)
        memcpy(chunk + 8, data, bytes);
    put_number(chunk + 8 + bytes, (uint32_t)crc32(0, chunk + 4, (uInt)bytes + 4));
    *size += bytes + 12;
}

/* Returns the number of values per pixel. */
static uint32_t values_of(int type)
{
    static const uint32_t values[7] = {1, 0, 3, 1, 2, 0, 4};
    return values[type];
}

/* Applies a filter to a row, in place. `above` is the unfiltered row above, `step` the bytes per pixel. */
static void filter_row(int filter, uint8_t *row, const uint8_t *above, size_t bytes, size_t step)
{
    for (size_t i = bytes; i-- > 0;) {
        int left = i >= step ? row[i - step] : 0, up = above[i], corner = i >= step ? above[i - step] : 0;
        int from_left = abs(up - corner), from_up = abs(left - corner),
            from_corner = abs(left + up - 2 * corner);
        int paeth = from_left <= from_up && from_left <= from_corner ? left
                    : from_up <= from_corner                         ? up
                                                                     : corner;
        const int predicted[5] = {0, left, up, (left + up) / 2, paeth};
        row[i] = (uint8_t)(row[i] - predicted[filter]);
    }
}

/* Packs the values of every pass into rows, filters them, and returns their number of bytes. */
static size_t pack(const struct png_kind *kind, const uint16_t *values, uint8_t *out)
{
    const uint32_t(*passes)[4] = kind->interlaced ? adam7 : one_pass;
    const uint32_t count = values_of(kind->type), depth = (uint32_t)kind->depth;
    uint8_t row[33 * 8], above[33 * 8];
    size_t size = 0;
    for (int p = 0; p < (kind->interlaced ? 7 : 1); p++) {
        memset(above, 0, sizeof above);
        for (uint32_t y = passes[p][1]; y < kind->height; y += passes[p][3]) {
            size_t bit = 0;
            memset(row, 0, sizeof row);
            for (uint32_t x = passes[p][0]; x < kind->width; x += passes[p][2])
                for (uint32_t v = 0; v < count; v++, bit += depth) {
                    uint32_t value = values[(y * kind->width + x) * count + v];
                    if (depth == 16) {
                        row[bit / 8] = (uint8_t)(value >> 8);
                        row[bit / 8 + 1] = (uint8_t)value;
                    } else
                        row[bit / 8] |= (uint8_t)(value << (8 - depth - bit % 8));
                }
            size_t bytes = (bit + 7) / 8, step = count * depth < 8 ? 1 : count * depth / 8;
            if (bytes == 0)
                continue;
            int filter = (int)(next() % 5);
            out[size] = (uint8_t)filter;
            memcpy(out + size + 1, row, bytes);
            filter_row(filter, out + size + 1, above, bytes, step);
            memcpy(above, row, bytes);
            size += bytes + 1;
        }
    }
    return size;
}

/* Writes a file with these values and, if `exif` is not NULL, the chunk eXIf after or before the pixels.
 * The caller frees the result. */
static uint8_t *write_png(const struct png_kind *kind, const uint16_t *values, const uint8_t palette[768],
                          const uint8_t *exif, size_t exif_bytes, bool after, size_t *size)
{
    uint8_t *file = malloc(65536), *packed = malloc(33 * 33 * 8 + 200), *small = malloc(20000),
            header[13] = {0};
    uLongf small_bytes = 20000;
    put_number(header, kind->width);
    put_number(header + 4, kind->height);
    header[8] = (uint8_t)kind->depth;
    header[9] = (uint8_t)kind->type;
    header[12] = kind->interlaced;
    memcpy(file, "\x89PNG\r\n\x1a\n", *size = 8);
    put_chunk(file, size, "IHDR", header, sizeof header);
    put_chunk(file, size, "gAMA", "\0\1\x86\xa0", 4); /* linear light; must be ignored */
    if (kind->type == 3)
        put_chunk(file, size, "PLTE", palette, (size_t)3 << kind->depth);
    if (kind->transparent) /* a transparent colour, or the transparency of two palette entries */
        put_chunk(file, size, "tRNS", "\0\1\0\1\0\1", kind->type == 2 ? 6 : 2);
    if (exif && !after)
        put_chunk(file, size, "eXIf", exif, exif_bytes);
    size_t bytes = pack(kind, values, packed);
    cr_assert_eq(compress(small, &small_bytes, packed, bytes), Z_OK);
    size_t half = small_bytes / 2;
    put_chunk(file, size, "IDAT", small, half);
    put_chunk(file, size, "IDAT", small + half, small_bytes - half);
    if (exif && after)
        put_chunk(file, size, "eXIf", exif, exif_bytes);
    put_chunk(file, size, "IEND", NULL, 0);
    free(packed);
    free(small);
    return file;
}

/* Fills the values of an image at random, and computes the pixels that it must give. Returns their number of
 * channels. */
static uint32_t fill(const struct png_kind *kind, const uint8_t palette[768], uint16_t *values,
                     uint8_t *wanted)
{
    const uint32_t most = (1u << kind->depth) - 1, count = values_of(kind->type);
    const uint32_t channels = kind->type == 0 || kind->type == 4 ? 1 : 3;
    for (uint32_t i = 0; i < kind->width * kind->height; i++)
        for (uint32_t v = 0; v < count; v++) {
            uint32_t value = next() & most;
            values[i * count + v] = (uint16_t)value;
            for (uint32_t c = 0; kind->type == 3 && c < 3; c++)
                wanted[3 * i + c] = palette[3 * value + c];
            if (kind->type != 3 && v < channels) /* the last value of types 4 and 6 is the opacity */
                wanted[i * channels + v] = (uint8_t)lround(value * 255.0 / most);
        }
    return channels;
}

static void check_png(const struct png_kind *kind, struct image_scratch *scratch)
{
    static uint16_t values[33 * 33 * 4];
    static uint8_t wanted[33 * 33 * 3];
    uint8_t palette[768];
    struct image image;
    bool is_image;
    size_t size;
    for (int i = 0; i < 768; i++)
        palette[i] = (uint8_t)next();
    uint32_t channels = fill(kind, palette, values, wanted);
    uint8_t *file = write_png(kind, values, palette, NULL, 0, false, &size);
    cr_assert_eq(image_decode("png", file, size, scratch, &image, &is_image), STATUS_OK, "%s", status_text());
    cr_assert(image.width == kind->width && image.height == kind->height && image.channels == channels);
    cr_assert(memcmp(image.pixels, wanted, (size_t)kind->width * kind->height * channels) == 0,
              "type %d, %d bits, %u x %u, interlaced %d, transparent %d", kind->type, kind->depth,
              kind->width, kind->height, kind->interlaced, kind->transparent);
    free(file);
}

Test(image_files, every_kind_of_png_gives_its_values)
{
    static const uint32_t sides[] = {1, 3, 7, 8, 9, 33};
    static const int types[][2] = {{0, 1}, {0, 2}, {0, 4}, {0, 8}, {0, 16}, {2, 8}, {2, 16}, {3, 1},
                                   {3, 2}, {3, 4}, {3, 8}, {4, 8}, {4, 16}, {6, 8}, {6, 16}};
    struct image_scratch scratch = {0};
    state = 11;
    for (size_t t = 0; t < COUNT_OF(types); t++)
        for (size_t s = 0; s < COUNT_OF(sides) * COUNT_OF(sides); s++)
            for (int variant = 0; variant < 4; variant++) {
                struct png_kind kind = {sides[s / COUNT_OF(sides)],
                                        sides[s % COUNT_OF(sides)],
                                        types[t][0],
                                        types[t][1],
                                        variant & 1,
                                        variant & 2};
                if (!kind.transparent || kind.type < 4)
                    check_png(&kind, &scratch);
            }
    image_scratch_close(&scratch);
}

Test(image_files, damaged_pngs_are_refused)
{
    const struct png_kind kind = {33, 9, 2, 8, false, false};
    static uint16_t values[33 * 33 * 4];
    static uint8_t wanted[33 * 33 * 3], pixels[33 * 33 * 3], palette[768];
    struct png_shape shape;
    uint32_t turn;
    size_t size;
    state = 12;
    fill(&kind, palette, values, wanted);
    uint8_t *file = write_png(&kind, values, palette, NULL, 0, false, &size);
    must(png_decode(file, size, pixels, sizeof pixels, &shape, &turn));
    for (size_t at = 0; at < size;
         at++) { /* every byte is part of a chunk's length, name, data or checksum */
        file[at] ^= 0x10;
        enum status status = png_decode(file, size, pixels, sizeof pixels, &shape, &turn);
        if (at < size - 12)
            cr_assert_eq(status, STATUS_FAILED, "byte %zu", at);
        else /* with another length, the chunk IEND is incomplete, as below */
            cr_assert_eq(status, at < size - 8 ? STATUS_OK : STATUS_FAILED, "byte %zu", at);
        file[at] ^= 0x10;
    }
    for (size_t left = 0; left < size; left++) { /* only the chunk IEND, of 12 bytes, may be missing */
        enum status status = png_decode(file, left, pixels, sizeof pixels, &shape, &turn);
        cr_assert_eq(status, size - left <= 12 ? STATUS_OK : STATUS_FAILED, "%zu of %zu bytes", left, size);
        cr_assert(status != STATUS_OK || memcmp(pixels, wanted, 33 * 9 * 3) == 0);
    }
    free(file);
}

/* ---- Orientation ---- */

/* Writes EXIF data: another entry, and then the orientation, of this type. Returns their size. */
static size_t write_exif(bool big_endian, uint32_t type, uint32_t value, uint8_t exif[40])
{
    const uint32_t numbers[] = {42, 8, 2, 0x10f, 3, 1, 6, 0, 0x112, type, 1, value};
    const int sizes[] = {2, 4, 2, 2, 2, 4, 2, 2, 2, 2, 4, type == 3 || type == 8 ? 2 : 4};
    size_t at = 2;
    memset(exif, 0, 40);
    memcpy(exif, big_endian ? "MM" : "II", 2);
    for (size_t n = 0; n < COUNT_OF(numbers); n++)
        for (int b = 0; b < sizes[n]; b++)
            exif[at++] = (uint8_t)(numbers[n] >> 8 * (big_endian ? sizes[n] - 1 - b : b));
    return 34;
}

Test(image_files, orientations_are_read_in_both_byte_orders_and_types)
{
    uint8_t exif[40], *copy = malloc(40);
    for (int big = 0; big < 2; big++)
        for (uint32_t value = 0; value <= 10; value++) {
            uint32_t wanted = value <= 8 ? value : 0;
            for (uint32_t type = 3; type <= 4; type++) {
                size_t bytes = write_exif(big, type, value, exif);
                cr_expect_eq(orientation_in_exif(exif, bytes), wanted, "type %u, value %u", type, value);
                for (size_t left = 0; left < bytes;
                     left++) { /* ends where the data end, for the sanitizers */
                    memcpy(copy + 40 - left, exif, left);
                    cr_expect_eq(orientation_in_exif(copy + 40 - left, left), 0, "%zu bytes", left);
                }
            }
            cr_expect_eq(orientation_in_exif(exif, write_exif(big, 4, value + 65536, exif)), 0, "%u", value);
            cr_expect_eq(orientation_in_exif(exif, write_exif(big, 2, value, exif)), 0,
                         "a text is no number");
        }
    write_exif(false, 3, 6, exif);
    exif[2] = 43; /* not TIFF */
    cr_expect_eq(orientation_in_exif(exif, 34), 0);
    free(copy);
}

/* Expects that an image with an orientation gives the same pixels as the upright image without one. */
static void compare_upright(const uint8_t *file, size_t size, const uint8_t *upright, size_t upright_size)
{
    struct image_scratch scratch = {0}, other = {0};
    for (int how = -1; how <= FIT_RANDOM_RESIZED_CROP; how++)
        for (uint32_t sample = 0; sample < 3; sample++) {
            const struct image_fit fit = {
                .how = how < 0 ? FIT_RESIZE : (enum fit_how)how, .res = how < 0 ? 0 : 5, .channels = 3};
            struct image image, wanted;
            bool is_image;
            must(image_fit(&fit, "png", file, size, 0, sample, &scratch, &image, &is_image));
            must(image_fit(&fit, "png", upright, upright_size, 0, sample, &other, &wanted, &is_image));
            cr_assert(image.width == wanted.width && image.height == wanted.height);
            cr_assert_arr_eq(image.pixels, wanted.pixels, image_values(&wanted), "fit %d", how);
        }
    image_scratch_close(&scratch);
    image_scratch_close(&other);
}

Test(image_files, pngs_are_turned_upright)
{
    const struct png_kind kind = {9, 7, 2, 8, false, false};
    static uint16_t values[33 * 33 * 4];
    static uint8_t stored[33 * 33 * 3], upright[33 * 33 * 3], palette[768];
    uint8_t exif[40];
    state = 13;
    fill(&kind, palette, values, stored);
    for (uint32_t o = 1; o <= 8; o++)
        for (int variant = 0; variant < 8; variant++) {
            size_t size, upright_size, bytes = write_exif(variant & 1, variant & 2 ? 3 : 4, o, exif);
            uint8_t *file = write_png(&kind, values, palette, exif, bytes, variant & 4, &size);
            const struct png_shape shape = {o < 5 ? 9 : 7, o < 5 ? 7 : 9, 3};
            void *right;
            for (uint32_t y = 0; y < shape.height; y++)
                for (uint32_t x = 0; x < shape.width; x++)
                    memcpy(upright + 3 * (y * shape.width + x),
                           stored + 3 * orientation_from(orientation_of(o), 9, 7, x, y), 3);
            must(png_encode(upright, &shape, &right, &upright_size));
            compare_upright(file, size, right, upright_size);
            free(file);
            free(right);
        }
}
#endif

#ifdef HAVE_JPEG

/* ---- Nothing is kept of an earlier JPEG ---- */

/* Removes all segments with this marker before the scan. */
static void strip(uint8_t *bytes, size_t *size, uint8_t marker)
{
    for (size_t at = 2; bytes[at + 1] != 0xda;) {
        size_t length = 2 + ((size_t)bytes[at + 2] << 8 | bytes[at + 3]);
        if (bytes[at + 1] == marker) {
            memmove(bytes + at, bytes + at + length, *size - at - length);
            *size -= length;
        } else
            at += length;
    }
}

static enum status decode(struct image_scratch *scratch, const uint8_t *bytes, size_t size,
                          struct image *image)
{
    bool is_image;
    return image_decode("jpg", bytes, size, scratch, image, &is_image);
}

Test(image_files, tables_of_one_jpeg_are_not_used_for_the_next)
{
    struct image_scratch scratch = {0}, other = {0};
    struct image image, wanted;
    struct jpeg_shape shape;
    size_t sizes[4];
    uint8_t *files[4];
    struct kind kind = kinds[3];
    state = 21;
    for (int i = 0; i < 4; i++) { /* an ordinary and an optimised file, one without DHT, one without DQT */
        kind.optimised = i == 1;
        files[i] = encode(&kind, 64, 48, 0, &sizes[i]);
    }
    must(decode(&other, files[2], sizes[2], &wanted));
    strip(files[2], &sizes[2], 0xc4);
    strip(files[3], &sizes[3], 0xdb);
    for (int before = 0; before < 4; before++) {
        (void)decode(&scratch, files[before], sizes[before], &image);
        cr_assert_eq(decode(&scratch, files[2], sizes[2], &image), STATUS_OK, "after %d: %s", before,
                     status_text());
        cr_assert_arr_eq(image.pixels, wanted.pixels, image_values(&wanted), "after %d", before);
        (void)decode(&scratch, files[before], sizes[before], &image);
        cr_assert_eq(decode(&scratch, files[3], sizes[3], &image), STATUS_FAILED, "after %d", before);
        cr_assert(strstr(status_text(), "Quantization table 0x00 was not defined"), "%s", status_text());
    }
    for (int i = 0; i < 4; i++) { /* only files with tables go to nvJPEG */
        must(jpeg_begin(scratch.jpeg, files[i], sizes[i], &shape));
        cr_expect_eq(shape.baseline, i < 2);
        cr_expect_eq(jpeg_intact(files[i], sizes[i], 64, 48), i < 2);
        free(files[i]);
    }
    image_scratch_close(&scratch);
    image_scratch_close(&other);
}

Test(image_files, cmyk_without_the_marker_of_adobe_is_inverted_too)
{
    struct image_scratch scratch = {0}, other = {0};
    struct image image, wanted;
    size_t size;
    state = 22;
    uint8_t *bytes = encode(&kinds[7], 40, 30, 0, &size);
    must(decode(&other, bytes, size, &wanted));
    strip(bytes, &size, 0xee);
    must(decode(&scratch, bytes, size, &image));
    cr_expect_arr_eq(image.pixels, wanted.pixels, image_values(&wanted));
    free(bytes);
    image_scratch_close(&scratch);
    image_scratch_close(&other);
}

/* ---- Warnings ---- */

/* Returns a copy with `count` bytes inserted at `at`. If `from` is NULL, they are zero. The caller frees it.
 */
static uint8_t *insert(const uint8_t *bytes, size_t *size, size_t at, const void *from, size_t count)
{
    uint8_t *copy = calloc(1, *size + count);
    memcpy(copy, bytes, at);
    if (from)
        memcpy(copy + at, from, count);
    memcpy(copy + at + count, bytes + at, *size - at);
    *size += count;
    return copy;
}

/* Decodes a file, which this function frees. If `wanted` is not NULL, the file must give its pixels and
 * between `least` and `most` warnings; with a warning, it must not go to nvJPEG. Otherwise it must be
 * refused.
 */
static void expect_harmless(uint8_t *bytes, size_t size, const struct image *wanted, uint64_t least,
                            uint64_t most, const char *what)
{
    struct image_scratch scratch = {0};
    struct image image;
    struct jpeg_shape shape;
    enum status status = decode(&scratch, bytes, size, &image);
    cr_expect_eq(status, wanted ? STATUS_OK : STATUS_FAILED, "%s: %s", what,
                 status == STATUS_OK ? "accepted" : status_text());
    if (wanted && status == STATUS_OK) {
        cr_expect(image_values(&image) == image_values(wanted) &&
                      memcmp(image.pixels, wanted->pixels, image_values(wanted)) == 0,
                  "%s: other pixels", what);
        cr_expect(scratch.jpeg_warnings >= least && scratch.jpeg_warnings <= most, "%s: %" PRIu64 " warnings",
                  what, scratch.jpeg_warnings);
        must(jpeg_begin(scratch.jpeg, bytes, size, &shape));
        cr_expect(least == 0 || !shape.baseline || !jpeg_intact(bytes, size, shape.width, shape.height),
                  "%s: goes to nvJPEG", what);
    }
    free(bytes);
    image_scratch_close(&scratch);
}

Test(image_files, harmless_warnings_are_accepted)
{
    static const uint8_t junk[16] = {0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0x11,
                                     0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99};
    struct image_scratch scratch = {0};
    struct image wanted;
    for (size_t k = 0; k < 7; k++) {
        struct kind kind = kinds[k];
        size_t whole, size;
        state = 23;
        kind.restart = k == 2 ? 3 : 0;
        uint8_t *bytes = encode(&kind, 64, 48, 0, &whole), *copy;
        must(decode(&scratch, bytes, whole, &wanted));
        cr_assert_eq(scratch.jpeg_warnings, 0);
        copy = insert(bytes, (size = whole, &size), 0, NULL, 0);
        copy[11] = 2; /* the major version of JFIF */
        expect_harmless(copy, size, &wanted, 1, 1, "JFIF 2");
        for (size_t at = 2, segments = 0; bytes[at] == 0xff && segments < 20; segments++) {
            copy = insert(bytes, (size = whole, &size), at, junk, 7); /* before a segment of the header */
            expect_harmless(copy, size, &wanted, 1, 1, "junk before the scan");
            copy = insert(bytes, (size = whole, &size), at, NULL, 1);
            expect_harmless(copy, size, &wanted, 1, 1, "a zero before the scan");
            if (bytes[at + 1] == 0xda)
                break;
            at += 2 + ((size_t)bytes[at + 2] << 8 | bytes[at + 3]);
        }
        for (size_t pad = 1; pad <= 40; pad++) {
            copy = insert(bytes, (size = whole, &size), whole - 2, NULL, pad);
            /* libjpeg may have read up to eight bytes with the last codes, and then it does not warn */
            expect_harmless(copy, size, &wanted, pad > 8, 1, "padding");
        }
        copy = insert(bytes, (size = whole, &size), whole - 2, "\xff\xff\xff", 3);
        expect_harmless(copy, size, &wanted, 0, 0, "fill bytes");
        copy = insert(bytes, (size = whole, &size), whole - 2, junk, sizeof junk);
        expect_harmless(copy, size, NULL, 0, 0, "junk after the last code");
        size_t scan = find_marker(bytes, whole, 0, 0xda), restart = find_marker(bytes, whole, scan, 0xd0);
        if (kind.restart) {
            copy = insert(bytes, (size = whole, &size), restart - 1, NULL, 16);
            expect_harmless(copy, size, NULL, 0, 0, "padding before a restart marker");
        }
        if (!kind.progressive)
            for (size_t i = 0; i < 3; i++) { /* Ss, Se, and Ah and Al */
                copy = insert(bytes, (size = whole, &size), 0, NULL, 0);
                copy[scan + 4 + 2 * (size_t)kind.components + i] ^= 0x11;
                expect_harmless(copy, size, &wanted, 1, 1, "parameters of a scan");
            }
        else {
            copy = insert(bytes, (size = whole, &size), 0, NULL, 0);
            copy[find_marker(bytes, whole, 0, 0xc2)] = 0xc0;
            expect_harmless(copy, size, NULL, 0, 0, "a progressive file with the marker of a sequential one");
        }
        free(bytes);
    }
    image_scratch_close(&scratch);
}

/* Padding must be found after any last code, also after one that fills its byte. It is refused after a byte
 * of zero, which images of a single colour often have. In a few files, the last zero bit has no effect on the
 * coefficients, because another code means the same; in some progressive files, it belongs to a run that ends
 * after the image. Padding is then refused, too. */
Test(image_files, padding_is_accepted_after_almost_any_code)
{
    struct image_scratch scratch = {0};
    struct image image;
    uint32_t refused[2][2] = {0}, files[2][2] = {0};
    state = 25;
    for (size_t k = 0; k < COUNT_OF(kinds); k++)
        for (int i = 0; i < 200; i++) {
            struct kind kind = kinds[k];
            size_t size;
            kind.restart = i & 1 && !kind.progressive ? 3 : 0;
            kind.optimised = i & 2;
            kind.flat = i & 4;
            uint8_t *bytes = encode(&kind, 16 + next() % 17, 16 + next() % 17, 0, &size);
            uint8_t *padded = insert(bytes, &size, size - 2, NULL, 30);
            refused[kind.progressive][kind.flat] += decode(&scratch, padded, size, &image) != STATUS_OK;
            files[kind.progressive][kind.flat]++;
            free(bytes);
            free(padded);
        }
    cr_expect_leq(refused[0][0], files[0][0] / 200, "%u", refused[0][0]);
    cr_expect_leq(refused[0][1], files[0][1] / 20, "%u", refused[0][1]);
    cr_expect_leq(refused[1][0] + refused[1][1], (files[1][0] + files[1][1]) / 4, "%u and %u", refused[1][0],
                  refused[1][1]);
    image_scratch_close(&scratch);
}

/* In these files, one bit of the scan is wrong, and the damaged code uses a part of the padding. Without the
 * padding, libjpeg reports that the scan ends too early, so the padding must not be accepted. */
Test(image_files, padding_does_not_hide_that_a_scan_ends_too_early)
{
    struct image_scratch scratch = {0};
    struct image image;
    for (int i = 1; i <= 3; i++) {
        char path[64], *bytes;
        size_t size;
        snprintf(path, sizeof path, "tests/data/images/damaged/padding%d.jpg", i);
        cr_assert_eq(file_read(path, &bytes, &size), STATUS_OK, "%s", status_text());
        cr_expect_eq(decode(&scratch, (uint8_t *)bytes, size, &image), STATUS_FAILED, "%s", path);
        free(bytes);
    }
    image_scratch_close(&scratch);
}

/* Returns the number of libjpeg's warnings, or -1 for an error: the strict rule is that each one is an error.
 */
static void count_only(j_common_ptr jpeg, int level)
{
    jpeg->err->num_warnings += level < 0;
}

static void leave(j_common_ptr jpeg)
{
    longjmp(*(jmp_buf *)jpeg->client_data, 1);
}

static int warnings_of(const uint8_t *bytes, size_t size)
{
    static struct jpeg_decompress_struct jpeg;
    static struct jpeg_error_mgr errors;
    static uint8_t row[64 * 4];
    uint8_t *rows = row;
    jmp_buf failed;
    jpeg.err = jpeg_std_error(&errors);
    errors.emit_message = count_only;
    errors.error_exit = leave;
    jpeg.client_data = &failed;
    int warnings = -1;
    if (setjmp(failed) == 0) {
        jpeg_create_decompress(&jpeg);
        jpeg_mem_src(&jpeg, bytes, size);
        jpeg_read_header(&jpeg, TRUE);
        jpeg_start_decompress(&jpeg);
        while (jpeg.output_scanline < jpeg.output_height)
            jpeg_read_scanlines(&jpeg, &rows, 1);
        jpeg_finish_decompress(&jpeg);
        warnings = (int)errors.num_warnings;
    }
    jpeg_destroy_decompress(&jpeg);
    return warnings;
}

/* Changes the headers of a file, one bit or one range of zeros at a time. A file for which libjpeg has a
 * warning must be refused, or have the pixels of the whole file. Returns the number of refused files. */
static uint32_t damage_headers(const char *name, const uint8_t *bytes, size_t size)
{
    struct image_scratch scratch = {0}, other = {0};
    struct image image, wanted;
    uint8_t *copy = malloc(size);
    size_t end = 2;
    uint32_t refused = 0;
    must(decode(&other, bytes, size, &wanted));
    cr_assert_eq(other.jpeg_warnings, 0);
    while (bytes[end + 1] != 0xda)
        end += 2 + ((size_t)bytes[end + 2] << 8 | bytes[end + 3]);
    end += 2 + ((size_t)bytes[end + 2] << 8 | bytes[end + 3]);
    for (size_t at = 2; at < end; at++)
        for (size_t how = 0; how < 14; how++) { /* bits, and ranges */
            static const size_t ranges[] = {8, 16, 64, 128, 256, 400};
            memcpy(copy, bytes, size);
            if (how < 8)
                copy[at] ^= (uint8_t)(1 << how);
            else
                memset(copy + at, 0, ranges[how - 8] < end - at ? ranges[how - 8] : end - at);
            scratch.jpeg_warnings = 0;
            bool accepted = decode(&scratch, copy, size, &image) == STATUS_OK;
            refused += !accepted;
            cr_expect(!accepted || scratch.jpeg_warnings == 0 ||
                          (image.width == wanted.width && image.height == wanted.height &&
                           image.channels == wanted.channels &&
                           memcmp(image.pixels, wanted.pixels, image_values(&wanted)) == 0),
                      "%s: byte %zu, change %zu", name, at, how);
        }
    free(copy);
    image_scratch_close(&scratch);
    image_scratch_close(&other);
    return refused;
}

Test(image_files, damaged_headers_with_a_warning_give_no_other_pixels)
{
    static const uint8_t rgb[16] = {0xff, 0xee, 0, 14, 'A', 'd', 'o', 'b', 'e', 0, 100};
    uint32_t refused = 0;
    state = 26;
    for (size_t k = 0; k < COUNT_OF(kinds); k++)
        for (int optimised = 0; optimised < 2; optimised++) {
            struct kind kind = kinds[k];
            size_t size;
            kind.optimised = optimised;
            kind.restart = k == 2 ? 3 : 0;
            uint8_t *bytes = encode(&kind, 24, 17, 6, &size); /* with an orientation */
            refused += damage_headers(kind.name, bytes, size);
            if (k == 1) { /* stored as RGB, with zeros at the end of the segment that says so */
                strip(bytes, &size, 0xe0);
                uint8_t *other = insert(bytes, &size, 2, rgb, sizeof rgb);
                refused += damage_headers("RGB", other, size);
                free(other);
            }
            free(bytes);
        }
    cr_expect_geq(refused, 10000, "%u", refused);
}

/* Returns a sequential file with a scan per channel. The tables of the second scan are between the scans. */
static uint8_t *encode_scans(size_t *size)
{
    static const jpeg_scan_info scans[3] = {
        {1, {0}, 0, 63, 0, 0}, {1, {1}, 0, 63, 0, 0}, {1, {2}, 0, 63, 0, 0}};
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    uint8_t *bytes = NULL, pixels[32 * 3];
    unsigned long written = 0;
    JSAMPROW row = pixels;
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    jpeg_mem_dest(&jpeg, &bytes, &written);
    jpeg.image_width = jpeg.image_height = 32;
    jpeg.input_components = 3;
    jpeg.in_color_space = JCS_RGB;
    jpeg_set_defaults(&jpeg);
    jpeg.scan_info = scans;
    jpeg.num_scans = 3;
    jpeg_start_compress(&jpeg, TRUE);
    for (int y = 0; y < 32; y++) {
        for (size_t x = 0; x < sizeof pixels; x++)
            pixels[x] = (uint8_t)next();
        jpeg_write_scanlines(&jpeg, &row, 1);
    }
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    *size = written;
    return bytes;
}

/* libjpeg has no warning if it uses a standard table for one that is lost. A file that has some tables has
 * lost the others. */
Test(image_files, lost_huffman_tables_are_not_replaced)
{
    struct image_scratch scratch = {0};
    struct image image;
    size_t size;
    state = 27;
    for (size_t k = 0; k < COUNT_OF(kinds) + 1; k++) {
        uint8_t *bytes = k < COUNT_OF(kinds) ? encode(&kinds[k], 24, 17, 0, &size) : encode_scans(&size);
        const char *name = k < COUNT_OF(kinds) ? kinds[k].name : "scans";
        must(decode(&scratch, bytes, size, &image));
        size_t tables = 0;
        for (size_t at = 0; at + 4 < size; at++)
            if (bytes[at] == 0xff && bytes[at + 1] == 0xc4) {
                bytes[at + 1] = 0xe4; /* a segment of an application, which libjpeg skips */
                cr_expect_eq(decode(&scratch, bytes, size, &image), STATUS_FAILED, "%s: table at %zu", name,
                             at);
                bytes[at + 1] = 0xc4;
                tables++;
            }
        cr_expect_geq(tables, 2, "%s", name);
        free(bytes);
    }
    image_scratch_close(&scratch);
}

/* Numbers of files with one flipped bit. */
struct flips {
    uint32_t refused;    /* by the strict rule */
    uint32_t extraneous; /* of these, with only the warning that harmless padding gives, too */
    uint32_t padded;     /* of `refused`, accepted with a warning if zeros follow the last code: must be 0 */
};

/* Flips bits of the scan, one at a time. A file that the strict rule refuses must be refused. Flips the same
 * bits in the file with padding after its last code, to which the strict rule does not apply. */
static void flip_bits(const struct kind *kind, size_t step, struct flips *flips)
{
    struct image_scratch scratch = {0};
    struct image image;
    size_t size, padded_size;
    uint8_t *bytes = encode(kind, 64, 64, 0, &size);
    uint8_t *padded = insert(bytes, (padded_size = size, &padded_size), size - 2, NULL, 24);
    cr_assert_eq(warnings_of(bytes, size), 0);
    for (size_t bit = 8 * (find_marker(bytes, size, 0, 0xda) + 13); bit < 8 * (size - 2); bit += step) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        padded[bit / 8] ^= (uint8_t)(1 << bit % 8);
        if (warnings_of(bytes, size) != 0) {
            cr_expect_eq(decode(&scratch, bytes, size, &image), STATUS_FAILED,
                         "%s, restart %u, optimised %d, flat %d: bit %zu", kind->name, kind->restart,
                         kind->optimised, kind->flat, bit);
            flips->extraneous += strstr(status_text(), "extraneous bytes before marker 0xd9") != NULL;
            flips->refused++;
            scratch.jpeg_warnings = 0;
            flips->padded += decode(&scratch, padded, padded_size, &image) == STATUS_OK &&
                             scratch.jpeg_warnings > 0; /* libjpeg can end in the zeros without one */
        }
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        padded[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    free(bytes);
    free(padded);
    image_scratch_close(&scratch);
}

Test(image_files, flipped_bits_that_were_refused_are_not_accepted)
{
    struct flips flips = {0};
    state = 24;
    for (size_t k = 0; k < 7; k++)
        for (int variant = 0; variant < 8; variant++) {
            struct kind kind = kinds[k];
            kind.restart = variant & 1 && !kind.progressive ? 3 : 0;
            kind.optimised = variant & 2;
            kind.flat = variant & 4;
            flip_bits(&kind, kind.flat ? 29 : 53, &flips);
        }
    cr_expect_geq(flips.refused, 4000);
    cr_expect_geq(flips.extraneous, 400, "%u", flips.extraneous);
    cr_expect_eq(flips.padded, 0, "%u", flips.padded);
}

/* ---- Files whose pixels other programs decoded ---- */

#if defined HAVE_PNG && defined HAVE_ZLIB

#define CORPUS_MAX 128
#define TOLERANCE  3 /* versions of libjpeg-turbo may round luma and chroma differently, by 1 each */

struct corpus {
    uint32_t count;
    struct corpus_file {
        const char *extension;
        char name[64];
        void *bytes;
        size_t size;
        enum status status;
        struct image image; /* decoded with nothing before it; `pixels` is a copy */
    } files[CORPUS_MAX];
};

static void add_file(struct corpus *corpus, const char *path)
{
    struct corpus_file *file = &corpus->files[corpus->count++];
    struct image_scratch scratch = {0};
    bool is_image;
    cr_assert_leq(corpus->count, CORPUS_MAX);
    const char *name = strrchr(path, '/') + 1;
    snprintf(file->name, sizeof file->name, "%s", name);
    file->extension = strrchr(file->name, '.') + 1;
    FILE *stream = fopen(path, "rb");
    cr_assert(stream && (file->bytes = malloc(1 << 16)), "%s", path);
    file->size = fread(file->bytes, 1, 1 << 16, stream);
    fclose(stream);
    file->status = image_decode(file->extension, file->bytes, file->size, &scratch, &file->image, &is_image);
    if (file->status == STATUS_OK) {
        uint8_t *copy = malloc(image_values(&file->image));
        memcpy(copy, file->image.pixels, image_values(&file->image));
        file->image.pixels = copy;
    }
    image_scratch_close(&scratch);
}

static void add_files(struct corpus *corpus, const char *pattern)
{
    glob_t found;
    cr_assert_eq(glob(pattern, 0, NULL, &found), 0, "%s", pattern);
    for (size_t i = 0; i < found.gl_pathc; i++)
        add_file(corpus, found.gl_pathv[i]);
    globfree(&found);
}

static void close_corpus(struct corpus *corpus)
{
    for (uint32_t i = 0; i < corpus->count; i++) {
        free(corpus->files[i].bytes);
        free((void *)(uintptr_t)corpus->files[i].image.pixels);
    }
    free(corpus);
}

static uint64_t fnv(const uint8_t *bytes, size_t count)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3;
    return hash;
}

/* The files of PngSuite (tests/data/images/pngsuite/README). pypng, which does not use libpng, decoded the
 * expected values. */
Test(image_files, pngsuite_has_the_pixels_of_another_decoder)
{
    struct corpus *corpus = calloc(1, sizeof *corpus);
    add_files(corpus, "tests/data/images/pngsuite/*.png");
    FILE *table = fopen("tests/data/images/expected.tsv", "r");
    char name[64];
    uint32_t width, height, channels, count = 0;
    uint64_t hash;
    cr_assert_not_null(table);
    while (fscanf(table, "%63s %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNx64, name, &width, &height,
                  &channels, &hash) == 5) {
        const struct corpus_file *file = &corpus->files[count++];
        cr_assert_str_eq(file->name, name);
        cr_assert_eq(file->status, STATUS_OK, "%s", name);
        cr_expect(file->image.width == width && file->image.height == height &&
                      file->image.channels == channels,
                  "%s", name);
        cr_expect_eq(fnv(file->image.pixels, image_values(&file->image)), hash, "%s: other pixels", name);
    }
    cr_expect(count == corpus->count && count == 60, "%u of %u files", count, corpus->count);
    fclose(table);
    close_corpus(corpus);
}

/* Compares files with the pixels of Pillow, which decoded NAME.png from the file NAME. */
static void expect_pixels_of_pillow(const char *files, const char *decoded, uint32_t count, int tolerance)
{
    struct corpus *corpus = calloc(1, sizeof *corpus), *golden = calloc(1, sizeof *golden);
    add_files(corpus, files);
    add_files(golden, decoded);
    cr_assert(corpus->count == golden->count && corpus->count == count);
    for (uint32_t i = 0; i < corpus->count; i++) {
        const struct image *image = &corpus->files[i].image, *wanted = &golden->files[i].image;
        const char *name = corpus->files[i].name;
        cr_assert(strncmp(name, golden->files[i].name, strlen(name)) == 0);
        cr_assert(image->width == wanted->width && image->height == wanted->height &&
                      image->channels == wanted->channels,
                  "%s", name);
        for (size_t v = 0; v < image_values(wanted); v++)
            cr_assert_leq(abs(image->pixels[v] - wanted->pixels[v]), tolerance, "%s: value %zu", name, v);
    }
    close_corpus(corpus);
    close_corpus(golden);
}

Test(image_files, jpegs_have_the_pixels_of_pillow)
{
    expect_pixels_of_pillow("tests/data/images/*.jpg", "tests/data/images/*.jpg.png", 12, TOLERANCE);
}

#ifdef HAVE_WEBP
/* Lossy, lossless, with transparency, which is ignored, and with an EXIF orientation. */
Test(image_files, webp_images_have_the_pixels_of_pillow)
{
    expect_pixels_of_pillow("tests/data/images/*.webp", "tests/data/images/*.webp.png", 4, 0);
}

/* Returns the message about a damaged file. */
static const char *refused(const uint8_t *bytes, size_t size)
{
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image;
    uint8_t *exact = malloc(size + 1); /* so that sanitizers detect a read past the end */
    memcpy(exact, bytes, size);
    enum status status = image_decode("webp", exact, size, &scratch, &image, &is_image);
    image_scratch_close(&scratch);
    free(exact);
    return status == STATUS_FAILED ? status_text() : "accepted";
}

Test(image_files, damaged_webp_images_are_refused)
{
    static const uint8_t animated[] = "RIFF\x36\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\0\0\0\0\0\0"
                                      "ANIM\x06\0\0\0\xff\xff\xff\xff\0\0ANMF\0\0\0\0\0\0\0\0";
    struct corpus *corpus = calloc(1, sizeof *corpus);
    add_files(corpus, "tests/data/images/*ss*.webp"); /* lossless and lossy */
    for (uint32_t i = 0; i < corpus->count; i++) {
        const struct corpus_file *file = &corpus->files[i];
        for (size_t size = 0; size < file->size; size++)
            cr_expect(strcmp(refused(file->bytes, size), "accepted") != 0, "%s: %zu of %zu bytes", file->name,
                      size, file->size);
        cr_expect_str_eq(refused(file->bytes, 0), "the image is empty (0 bytes)");
        cr_expect(strstr(refused(file->bytes, 20), "fewer than the header of a WebP file"), "%s",
                  status_text());
        cr_expect_str_eq(refused(file->bytes, file->size - 9), "libwebp: the file was truncated");
        memset((uint8_t *)file->bytes + 20, 0xff, 10);
        cr_expect(strstr(refused(file->bytes, file->size), "the file is damaged, or is no WebP image"), "%s",
                  status_text());
    }
    cr_expect(strstr(refused(animated, sizeof animated - 1), "animated"), "%s", status_text());
    cr_expect_eq(corpus->count, 2);
    close_corpus(corpus);
}
#endif

/* Decodes every file after every other file with the same scratch, whole and fitted. */
Test(image_files, pixels_do_not_depend_on_the_file_before)
{
    struct corpus *corpus = calloc(1, sizeof *corpus);
    struct image_scratch scratch = {0};
    const struct image_fit fit = {.how = FIT_RANDOM_RESIZED_CROP, .res = 9, .channels = 3};
    static uint8_t fitted[CORPUS_MAX][9 * 9 * 3];
    struct image image;
    bool is_image;
    add_files(corpus, "tests/data/images/*.jpg");
    add_files(corpus, "tests/data/images/pngsuite/*.png");
#ifdef HAVE_WEBP
    add_files(corpus, "tests/data/images/*.webp");
#endif
    for (uint32_t i = 0; i < 12; i++) { /* damaged JPEGs: the second half is missing, or all tables */
        struct corpus_file *from = &corpus->files[i], *cut = &corpus->files[corpus->count++];
        *cut = *from;
        cut->bytes = malloc(from->size);
        memcpy(cut->bytes, from->bytes, from->size);
        if (i % 2)
            cut->size /= 2;
        else
            strip(cut->bytes, &cut->size, 0xdb);
        cut->image = (struct image){0};
        cut->status = STATUS_FAILED;
    }
    for (uint32_t i = 0; i < corpus->count; i++) {
        struct image_scratch own = {0};
        const struct corpus_file *file = &corpus->files[i];
        if (image_fit(&fit, file->extension, file->bytes, file->size, 0, 3, &own, &image, &is_image) ==
            STATUS_OK)
            memcpy(fitted[i], image.pixels, sizeof fitted[i]);
        else
            cr_assert_eq(file->status, STATUS_FAILED, "%s", file->name);
        image_scratch_close(&own);
    }
    for (uint32_t a = 0; a < corpus->count; a++)
        for (uint32_t b = 0; b < 2 * corpus->count; b++) {
            const struct corpus_file *before = &corpus->files[a], *file = &corpus->files[b / 2];
            const struct image_fit none = {0}, *how = b % 2 ? &fit : &none;
            (void)image_fit(&none, before->extension, before->bytes, before->size, 0, 3, &scratch, &image,
                            &is_image);
            enum status status =
                image_fit(how, file->extension, file->bytes, file->size, 0, 3, &scratch, &image, &is_image);
            if (file->status != STATUS_OK) {
                cr_assert(b % 2 || status == STATUS_FAILED, "%s after %s", file->name, before->name);
                continue;
            }
            cr_assert_eq(status, STATUS_OK, "%s after %s: %s", file->name, before->name, status_text());
            cr_assert(
                memcmp(image.pixels, b % 2 ? fitted[b / 2] : file->image.pixels, image_values(&image)) == 0,
                "%s after %s", file->name, before->name);
        }
    image_scratch_close(&scratch);
    close_corpus(corpus);
}
#endif
#endif
