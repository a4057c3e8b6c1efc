/* Tests how images are decoded and resized: data/image_formats.h, data/image.h, data/resample.h. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/image.h"
#include "data/resample.h"
#include "data/image_formats.h"
#include "image_support.h"
#include "must.h"

/* ---- Resampling ---- */

/* Returns memory that ends where no page is mapped, so that reading beyond it ends the test. */
static uint8_t *before_a_gap(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page * page;
    uint8_t *memory = mmap(NULL, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert(memory != MAP_FAILED && mprotect(memory + pages, page, PROT_NONE) == 0);
    return memory + pages - bytes;
}

static void resample(struct resampler *resampler, const uint8_t *pixels, const uint32_t n[4], bool bicubic,
                     uint8_t *out)
{
    must(resample_begin(resampler, n[0], n[1], n[2], n[3], bicubic));
    uint32_t half = n[1] / 2;
    resample_rows(resampler, 0, pixels, n[0] * 4, half);
    resample_rows(resampler, half, pixels + (size_t)half * n[0] * 4, n[0] * 4, n[1] - half);
    resample_end(resampler, out);
}

/* The definition in double precision, without rounding between the passes. */
static double exact(const uint8_t *pixels, uint32_t width, uint32_t height, uint32_t out_width,
                    uint32_t out_height, uint32_t x, uint32_t y, uint32_t c)
{
    double scale_x = fmax((double)width / out_width, 1), scale_y = fmax((double)height / out_height, 1);
    double at_x = (x + 0.5) * width / out_width, at_y = (y + 0.5) * height / out_height;
    double sum = 0, total = 0;
    for (uint32_t j = 0; j < height; j++)
        for (uint32_t i = 0; i < width; i++) {
            double weight = fmax(1 - fabs(i + 0.5 - at_x) / scale_x, 0);
            weight *= fmax(1 - fabs(j + 0.5 - at_y) / scale_y, 0);
            total += weight;
            sum += weight * pixels[((size_t)j * width + i) * 4 + c];
        }
    return sum / total;
}

static const uint32_t sizes[][4] = {{1, 1, 1, 1},    {1, 1, 7, 5},     {2, 3, 1, 1},     {5, 7, 5, 7},
                                    {13, 11, 3, 4},  {31, 17, 32, 19}, {64, 48, 33, 31}, {97, 89, 8, 7},
                                    {101, 3, 12, 9}, {3, 101, 9, 12}};

Test(image, resampling_is_within_one_and_a_half_of_the_definition)
{
    state = 1;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const uint32_t *n = sizes[s];
        struct resampler resampler = {0};
        uint8_t *pixels = before_a_gap((size_t)n[0] * n[1] * 4 + RESAMPLE_SLACK_BYTES),
                *out = malloc((size_t)n[2] * n[3] * 3 + RESAMPLE_SLACK_BYTES);
        for (size_t i = 0; i < (size_t)n[0] * n[1] * 4; i++)
            pixels[i] = (uint8_t)next();
        resample(&resampler, pixels, n, false, out);
        for (uint32_t y = 0; y < n[3]; y++)
            for (uint32_t x = 0; x < n[2]; x++)
                for (uint32_t c = 0; c < 3; c++) {
                    double wanted = exact(pixels, n[0], n[1], n[2], n[3], x, y, c);
                    cr_assert_lt(fabs(out[(y * n[2] + x) * 3 + c] - wanted), 1.5,
                                 "%ux%u to %ux%u: (%u, %u, %u)", n[0], n[1], n[2], n[3], x, y, c);
                }
        resampler_close(&resampler);
        free(out);
    }
}

Test(image, resampling_with_simd_is_bit_identical_to_the_reference)
{
    struct resampler fast = {0}, slow = {.plain = true};
    state = 2;
    for (int i = 0; i < 300; i++) {
        uint32_t n[4] = {1 + next() % 120, 1 + next() % 120, 1 + next() % 60, 1 + next() % 60};
        size_t in = (size_t)n[0] * n[1] * 4 + RESAMPLE_SLACK_BYTES, bytes = (size_t)n[2] * n[3] * 3;
        uint8_t *pixels = malloc(in), *a = calloc(1, bytes + RESAMPLE_SLACK_BYTES),
                *b = calloc(1, bytes + RESAMPLE_SLACK_BYTES);
        for (size_t j = 0; j < in; j++)
            pixels[j] = (uint8_t)(i % 3 ? next() : 255);
        resample(&fast, pixels, n, i & 1, a);
        resample(&slow, pixels, n, i & 1, b);
        cr_assert_arr_eq(a, b, bytes, "%ux%u to %ux%u", n[0], n[1], n[2], n[3]);
        for (size_t j = 0; i % 3 == 0 && j < bytes; j++)
            cr_assert_eq(a[j], 255, "a flat image changed");
        free(pixels), free(a), free(b);
    }
    resampler_close(&fast);
    resampler_close(&slow);
}

Test(image, weights_fit_16_bits_and_add_up_to_one)
{
    static int16_t weights[2 * 65536 + 3];
    const uint32_t ins[] = {1, 2, 3, 7, 223, 224, 225, 447, 448, 449, 500, 896, 1793, 7168, 65500};
    const uint32_t outs[] = {1, 2, 7, 224};
    for (size_t i = 0; i < sizeof ins / sizeof *ins; i++)
        for (size_t o = 0; o < sizeof outs / sizeof *outs; o++) {
            struct resample_axis axis = resample_axis(ins[i], outs[o]);
            for (uint32_t x = 0; x < axis.out; x++) {
                uint32_t first, count = resample_weights(&axis, x, &first, weights);
                int64_t sum = 0;
                cr_assert(count >= 1 && count <= axis.taps && first + count <= axis.in, "%u to %u: %u of %u",
                          axis.in, axis.out, count, axis.taps);
                for (uint32_t t = 0; t < count; t++) {
                    cr_assert_geq(weights[t], 0);
                    sum += weights[t];
                }
                cr_assert_eq(sum, 1 << axis.bits);
            }
        }
}

/* ---- Orientation ---- */

/* The stored image has 3 x 2 pixels. For each orientation, `wanted` says where the EXIF standard puts the
 * stored pixels (0, 0), (2, 0) and (0, 1) in the upright image. */
Test(image, orientations_are_those_of_exif)
{
    static const uint32_t wanted[8][3][2] = {{{0, 0}, {2, 0}, {0, 1}}, {{2, 0}, {0, 0}, {2, 1}},
                                             {{2, 1}, {0, 1}, {2, 0}}, {{0, 1}, {2, 1}, {0, 0}},
                                             {{0, 0}, {0, 2}, {1, 0}}, {{1, 0}, {1, 2}, {0, 0}},
                                             {{1, 2}, {1, 0}, {0, 2}}, {{0, 2}, {0, 0}, {1, 2}}};
    static const size_t stored[3] = {0, 2, 3};
    for (uint32_t o = 1; o <= 8; o++)
        for (int p = 0; p < 3; p++)
            cr_expect_eq(orientation_from(orientation_of(o), 3, 2, wanted[o - 1][p][0], wanted[o - 1][p][1]),
                         stored[p], "orientation %u, point %d", o, p);
}

/* ---- Crops ---- */

Test(image, random_crops_follow_the_rule_and_repeat)
{
    const struct image_fit fit = {.how = FIT_RANDOM_RESIZED_CROP, .res = 224, .channels = 3, .seed = 5};
    double area = 0, log_ratio = 0;
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t i = 0; i < 20000; i++) {
        struct image_box box = image_fit_box(&fit, 500, 375, i % 3, i),
                         again = image_fit_box(&fit, 500, 375, i % 3, i);
        cr_assert(memcmp(&box, &again, sizeof box) == 0);
        cr_assert(box.left + box.width <= 500 && box.top + box.height <= 375);
        double ratio = (double)box.width / box.height;
        cr_assert(ratio > 0.74 && ratio < 1.35, "%u x %u", box.width, box.height);
        area += (double)box.width * box.height / (500 * 375) / 20000;
        log_ratio += log(ratio) / 20000;
        least = box.width * box.height < least ? box.width * box.height : least;
        most = box.width * box.height > most ? box.width * box.height : most;
    }
    /* The means of a million draws by the rule, computed in Python with another generator. Crops that are
     * larger than the image are drawn again, so the mean area is not 0.54. */
    cr_expect(fabs(area - 0.433) < 0.01, "mean area %g", area);
    cr_expect(fabs(log_ratio - 0.031) < 0.006, "mean log ratio %g", log_ratio);
    cr_expect(least < 0.085 * 500 * 375 && least > 0.079 * 500 * 375 && most > 0.95 * 500 * 375);
}

Test(image, the_crop_of_a_very_long_image_is_central)
{
    const struct image_fit fit = {.how = FIT_RANDOM_RESIZED_CROP, .res = 8, .channels = 3};
    struct image_box wide = image_fit_box(&fit, 10000, 3, 0, 0), high = image_fit_box(&fit, 3, 10000, 0, 0);
    cr_expect(wide.width == 4 && wide.height == 3 && wide.left == 4998, "%u %u", wide.width, wide.left);
    cr_expect(high.width == 3 && high.height == 4 && high.top == 4998, "%u %u", high.height, high.top);
}

#ifdef HAVE_JPEG

/* ---- JPEG ---- */

/* Compares a window with the same pixels of the whole image. */
static void compare_window(struct jpeg_decoder *decoder, const struct kind *kind, const uint8_t *bytes,
                           size_t size, const uint8_t *whole, uint32_t stride, struct jpeg_window window)
{
    struct jpeg_shape shape;
    size_t row_bytes, skip;
    must(jpeg_begin(decoder, bytes, size, &shape));
    must(jpeg_start(decoder, window, JPEG_RGBX, &row_bytes, &skip));
    uint8_t *pixels = malloc(row_bytes * window.height);
    uint32_t half = window.height / 2;
    must(jpeg_read(decoder, pixels, row_bytes, half));
    cr_assert_eq(jpeg_read(decoder, pixels + half * row_bytes, row_bytes, window.height - half), STATUS_OK,
                 "%s: %s", kind->name, status_text());
    for (uint32_t y = 0; y < window.height; y++)
        for (uint32_t x = 0; x < window.width; x++)
            cr_assert(memcmp(pixels + y * row_bytes + skip + 4 * x,
                             whole + ((size_t)(window.top + y) * stride + window.left + x) * 4, 3) == 0,
                      "%s, 1/%u: pixel (%u, %u) of the window at (%u, %u) of %u x %u", kind->name,
                      window.denominator, x, y, window.left, window.top, window.width, window.height);
    free(pixels);
}

static void compare_windows(const struct kind *kind, uint32_t width, uint32_t height, uint32_t denominator)
{
    struct jpeg_decoder *decoder = jpeg_open();
    uint32_t columns, lines;
    size_t size;
    uint8_t *bytes = encode(kind, width, height, 0, &size);
    uint8_t *whole = decode_plainly(bytes, size, JCS_EXT_RGBX, denominator, &columns, &lines);
    cr_assert(columns == (width + denominator - 1) / denominator &&
              lines == (height + denominator - 1) / denominator);
    for (int i = 0; i < 12; i++) {
        struct jpeg_window window = {.denominator = denominator};
        window.left = i ? next() % columns : 0;
        window.top = i ? next() % lines : 0;
        window.width = i ? 1 + next() % (columns - window.left) : columns;
        window.height = i ? 1 + next() % (lines - window.top) : lines;
        compare_window(decoder, kind, bytes, size, whole, columns, window);
    }
    free(bytes);
    free(whole);
    jpeg_close(decoder);
}

Test(image, a_window_of_a_jpeg_has_the_pixels_of_the_whole)
{
    state = 3;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (uint32_t d = 1; d <= 8 && kinds[k].components < 4; d *= 2) {
            compare_windows(&kinds[k], 1, 1, d);
            compare_windows(&kinds[k], 97, 83, d);
            compare_windows(&kinds[k], 256, 64, d);
        }
}

Test(image, cmyk_becomes_rgb)
{
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct image_scratch scratch = {0};
        struct image image;
        uint32_t width, height;
        bool is_image;
        size_t size;
        if (kinds[k].components < 4)
            continue;
        state = 4;
        uint8_t *bytes = encode(&kinds[k], 40, 30, 0, &size);
        uint8_t *cmyk = decode_plainly(bytes, size, JCS_CMYK, 1, &width, &height);
        must(image_decode("jpg", bytes, size, &scratch, &image, &is_image));
        cr_assert(image.channels == 3 && image.width == 40 && image.height == 30);
        for (uint32_t i = 0; i < 40 * 30; i++)
            for (uint32_t c = 0; c < 3;
                 c++) /* libjpeg writes an Adobe marker, so the values are complements */
                cr_assert_eq(image.pixels[3 * i + c], (int)lround(cmyk[4 * i + c] * cmyk[4 * i + 3] / 255.0));
        free(bytes);
        free(cmyk);
        image_scratch_close(&scratch);
    }
}

static void decode_or_fail(const char *extension, const uint8_t *bytes, size_t size, const char *words)
{
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image;
    enum status status = image_decode(extension, bytes, size, &scratch, &image, &is_image);
    if (words) {
        cr_expect_eq(status, STATUS_FAILED, "%zu bytes: decoded", size);
        cr_expect(strstr(status_text(), words), "'%s' is not in '%s'", words, status_text());
    } else
        cr_expect_eq(status, STATUS_OK, "%s", status_text());
    image_scratch_close(&scratch);
}

#ifdef HAVE_PNG
Test(image, short_pngs_are_refused)
{
    const uint8_t bytes[32] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
    decode_or_fail("png", bytes, 0, "the image is empty (0 bytes)");
    decode_or_fail("png", bytes, sizeof bytes,
                   "the image has 32 bytes, fewer than the header of a PNG file (33 bytes)");
}
#endif

Test(image, broken_jpegs_are_refused)
{
    size_t size;
    state = 5;
    uint8_t *bytes = encode(&kinds[3], 64, 64, 0, &size);
    decode_or_fail("jpg", bytes, size, NULL);
    decode_or_fail("jpg", bytes, 0, "the image is empty (0 bytes)");
    decode_or_fail("jpg", bytes, 19,
                   "the image has 19 bytes, fewer than the header of a JPEG file (20 bytes)");
    for (size_t cut = 1; size - cut >= 20; cut += 37)
        decode_or_fail("jpg", bytes, size - cut, "libjpeg: ");
    decode_or_fail("jpg", bytes, size - 2, "libjpeg: Premature end of JPEG file");
    size_t frame = 0; /* the frame header: its height and width are bytes 5 to 8 */
    while (frame + 9 < size && !(bytes[frame] == 0xff && bytes[frame + 1] == 0xc0))
        frame++;
    memset(bytes + frame + 5, 0xff, 4);
    decode_or_fail("jpg", bytes, size, "65500 pixels"); /* libjpeg's limit */
    memcpy(bytes + frame + 5, (uint8_t[]){0xff, 0x00, 0xff, 0x00}, 4);
    decode_or_fail("jpg", bytes, size, "65280 x 65280 pixels is too large");
    free(bytes);
}

Test(image, baseline_files_are_those_that_hardware_decodes)
{
    static const bool wanted[] = {true, true, true, true, false, false, false, false, false};
    struct jpeg_decoder *decoder = jpeg_open();
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        struct jpeg_shape shape;
        size_t size;
        uint8_t *bytes = encode(&kinds[k], 33, 17, 0, &size);
        must(jpeg_begin(decoder, bytes, size, &shape));
        cr_expect_eq(shape.baseline, wanted[k], "%s", kinds[k].name);
        free(bytes);
    }
    jpeg_close(decoder);
}

Test(image, damaged_markers_are_found)
{
    struct kind kind = kinds[3];
    kind.restart = 2;
    size_t size;
    uint8_t *bytes = encode(&kind, 200, 64, 1, &size), *copy = malloc(size + 10);
    cr_expect(jpeg_intact(bytes, size, 200, 64));
    cr_expect(!jpeg_intact(bytes, size, 199, 64) && !jpeg_intact(bytes, size, 200, 65));
    for (size_t left = 0; left < size; left++)
        cr_assert_not(jpeg_intact(bytes, left, 200, 64), "%zu of %zu bytes", left, size);
    memcpy(copy, bytes, size);
    memset(copy + size, 0x55, 10); /* bytes after the end of the image do not matter */
    cr_expect(jpeg_intact(copy, size + 10, 200, 64));
    size_t scan = find_marker(bytes, size, 0, 0xda), restart = find_marker(bytes, size, scan, 0xd3);
    cr_assert(scan > 0 && restart > 0);
    copy[restart] = 0xd4; /* out of order */
    cr_expect_not(jpeg_intact(copy, size, 200, 64));
    copy[restart] = 0xc4; /* a table between coded data */
    cr_expect_not(jpeg_intact(copy, size, 200, 64));
    copy[restart] = 0; /* without this restart marker, the next one is out of order */
    cr_expect_not(jpeg_intact(copy, size, 200, 64));
    copy[restart] = 0xd3;
    cr_expect(jpeg_intact(copy, size, 200, 64));
    copy[scan] = 0xdb; /* no scan */
    cr_expect_not(jpeg_intact(copy, size, 200, 64));
    copy[scan] = 0xda;
    for (size_t at = 0; at < scan;) { /* each header begins with 0xff; the first one also has a fixed code */
        copy[at] = 0xfe;
        cr_expect_not(jpeg_intact(copy, size, 200, 64), "byte %zu", at);
        copy[at] = 0xff;
        at += at == 0 ? 2 : 2 + (size_t)(bytes[at + 2] << 8 | bytes[at + 3]);
    }
    copy[1] = 0xd9;
    cr_expect_not(jpeg_intact(copy, size, 200, 64));
    free(copy);
    free(bytes);
}

#ifndef FDSL_SANITIZED /* ASan ends the process if an allocation is that large */
Test(image, too_little_memory_is_no_fault_of_the_image)
{
    uint8_t *room = NULL;
    size_t bytes = 0;
    cr_expect_eq(image_room(&room, &bytes, SIZE_MAX / 2), STATUS_EXHAUSTED);
}
#endif

/* Arrays in another order of bytes or axes are refused with the remedy; arrays that cannot be images are
 * none. */
Test(image, arrays_in_another_order_are_named)
{
    static const struct {
        const char *type, *order, *shape, *words; /* words: NULL: the array is no image */
    } arrays[] = {
        {"|u1", "True", "(4, 6)", "its array is in Fortran order"},
        {"<f4", "True", "(3, 4, 6)", "numpy.ascontiguousarray(array, '<f4')"},
        {">f4", "False", "(4, 6)", "its array is big-endian"},
        {">f2", "False", "(1, 4, 6)", "numpy.ascontiguousarray(array, '<f2')"},
        {">i4", "False", "(4, 6)", NULL},
        {">f4", "False", "(24,)", NULL},
    };
    for (size_t i = 0; i < COUNT_OF(arrays); i++) {
        uint8_t file[128 + 72 * 4] = "\x93NUMPY\x01\x00\x76";
        struct image_scratch scratch = {0};
        struct image image;
        bool is_image = true;
        struct npy_header header;
        const int length =
            snprintf((char *)file + 10, 118, "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }",
                     arrays[i].type, arrays[i].order, arrays[i].shape);
        memset(file + 10 + length, ' ', 117 - (size_t)length);
        file[127] = '\n';
        must(npy_header_parse(file, sizeof file, &header));
        const enum status status =
            image_decode("npy", file, 128 + header.values * header.value_bytes, &scratch, &image, &is_image);
        cr_expect_eq(status, arrays[i].words ? STATUS_FAILED : STATUS_OK, "%zu", i);
        cr_expect(arrays[i].words ? strstr(status_text(), arrays[i].words) != NULL : !is_image, "%zu: %s", i,
                  status_text());
        image_scratch_close(&scratch);
    }
}

Test(image, the_content_of_a_file_decides_its_format)
{
    static const uint8_t pixels[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    struct image_scratch scratch = {0};
    struct image image;
    void *bytes;
    size_t size;
    bool is_image;
    must(
        jpeg_encode(pixels, &(struct jpeg_shape){.width = 2, .height = 2, .channels = 3}, 90, &bytes, &size));
    cr_expect_eq(image_decode("PNG", bytes, size, &scratch, &image, &is_image), STATUS_OK, "%s",
                 status_text());
    cr_expect(is_image && image.width == 2 && image.channels == 3);
    cr_expect_eq(image_decode("json", bytes, size, &scratch, &image, &is_image), STATUS_OK);
    cr_expect_not(is_image);
    free(bytes);
    must(png_encode(pixels, &(struct png_shape){2, 2, 3}, &bytes, &size));
    cr_expect_eq(image_decode("JpG", bytes, size, &scratch, &image, &is_image), STATUS_OK, "%s",
                 status_text());
    cr_expect_arr_eq(image.pixels, pixels, sizeof pixels);
    free(bytes);
    cr_expect_eq(
        jpeg_encode(pixels, &(struct jpeg_shape){.width = 0, .height = 2, .channels = 3}, 90, &bytes, &size),
        STATUS_USAGE);
    image_scratch_close(&scratch);
}

/* ---- Fitting ---- */

/* Decodes the whole image, crops it and resizes the crop. */
static void fit_slowly(const struct image_fit *fit, const uint8_t *bytes, size_t size, uint32_t sample,
                       uint8_t *out)
{
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image;
    must(image_decode("jpg", bytes, size, &scratch, &image, &is_image));
    struct image_box box = image_fit_box(fit, image.width, image.height, 1, sample);
    uint8_t *part = malloc((size_t)box.width * box.height * 4 + RESAMPLE_SLACK_BYTES), *at = part;
    uint8_t *resized = malloc((size_t)fit->res * fit->res * 4);
    for (uint32_t y = 0; y < box.height; y++)
        for (uint32_t x = 0; x < box.width; x++)
            for (uint32_t c = 0; c < 4; c++)
                *at++ = image.pixels[((size_t)(box.top + y) * image.width + box.left + x) * image.channels +
                                     (image.channels == 1 ? 0 : c % 3)];
    scratch.resampler.plain = true;
    resample(&scratch.resampler, part, (const uint32_t[]){box.width, box.height, fit->res, fit->res}, false,
             resized);
    memcpy(out, resized, (size_t)fit->res * fit->res * 3);
    free(part);
    free(resized);
    image_scratch_close(&scratch);
}

/* Compares image_fit() with fit_slowly(). Values may differ by at most `most`. If the image is turned by 90
 * degrees, image_fit() swaps the passes over rows and columns, so rounding differs. */
static void compare_fit(const struct image_fit *fit, const uint8_t *bytes, size_t size, uint32_t sample,
                        int most)
{
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image;
    uint8_t wanted[3 * 32 * 32];
    must(image_fit(fit, "jpg", bytes, size, 1, sample, &scratch, &image, &is_image));
    cr_assert(is_image && image.width == fit->res && image.height == fit->res && image.channels == 3);
    fit_slowly(fit, bytes, size, sample, wanted);
    for (uint32_t i = 0; i < 3 * fit->res * fit->res; i++)
        cr_assert_leq(abs(image.pixels[i] - wanted[i]), most, "sample %u, byte %u: %u, not %u", sample, i,
                      image.pixels[i], wanted[i]);
    image_scratch_close(&scratch);
}

/* ---- Fitting for --prepare ---- */

/* Pillow 12 resized the image below with BILINEAR to 9 x 6 and to 5 x 5 pixels. */
static const uint8_t pillow_longest[] = {
    68,  105, 130, 141, 145, 132, 140, 126, 114, 129, 124, 127, 119, 123, 140, 123, 109, 99,  121, 110, 125,
    133, 119, 133, 148, 103, 133, 118, 134, 118, 132, 136, 122, 147, 116, 134, 122, 121, 120, 125, 124, 124,
    146, 128, 121, 130, 124, 130, 148, 123, 128, 134, 129, 125, 120, 120, 124, 126, 126, 133, 124, 130, 132,
    128, 113, 126, 109, 114, 165, 105, 89,  160, 127, 133, 112, 127, 117, 119, 140, 124, 133, 124, 137, 132,
    132, 140, 132, 136, 140, 144, 136, 125, 114, 107, 98,  152, 110, 107, 128, 139, 114, 131, 119, 120, 133,
    131, 124, 136, 131, 130, 119, 131, 125, 113, 127, 130, 126, 124, 124, 123, 115, 91,  137, 116, 130, 120,
    136, 122, 143, 121, 115, 120, 129, 129, 131, 129, 130, 110, 121, 113, 103, 113, 125, 122, 120, 121, 115,
    107, 110, 128, 117, 127, 119, 124, 120, 136, 131, 132, 132, 118, 130, 149};
static const uint8_t pillow_square[] = {
    110, 127, 130, 138, 128, 121, 124, 124, 124, 127, 115, 118, 140, 113, 132, 122, 129, 121, 133,
    122, 127, 126, 114, 134, 134, 120, 126, 139, 124, 128, 127, 130, 133, 133, 129, 135, 107, 110,
    151, 121, 116, 129, 127, 123, 130, 132, 133, 120, 127, 132, 126, 117, 107, 130, 129, 118, 131,
    127, 120, 128, 125, 121, 109, 119, 123, 119, 114, 114, 124, 123, 125, 129, 125, 132, 141};

/* Pillow 13 resized the image to 7 x 5 pixels, and kept the 4 x 4 pixels that torchvision's CenterCrop keeps.
 * Did the same with the image after Image.transpose(ROTATE_90). */
static const uint8_t pillow_centre[] = {133, 125, 120, 121, 125, 130, 126, 116, 107, 131, 116, 131,
                                        129, 118, 124, 124, 114, 136, 134, 116, 134, 138, 122, 119,
                                        133, 123, 125, 104, 110, 160, 113, 104, 136, 125, 127, 123,
                                        126, 130, 124, 116, 98,  134, 126, 123, 125, 128, 111, 135};
static const uint8_t pillow_centre_tall[] = {126, 116, 107, 134, 116, 134, 113, 103, 136, 126, 123, 125,
                                             121, 125, 130, 124, 114, 137, 104, 110, 160, 116, 98,  134,
                                             133, 125, 120, 129, 118, 124, 133, 123, 125, 126, 130, 124,
                                             143, 135, 124, 135, 129, 128, 132, 136, 144, 130, 133, 125};

/* Encodes an image of 30 x 20 pixels as PNG, or rotated by 90 degrees. The caller frees the result. */
static void *turned_png(bool tall, size_t *size)
{
    const uint32_t width = tall ? 20 : 30, height = 50 - width;
    uint8_t pixels[20 * 30 * 3];
    void *bytes;
    for (uint32_t i = 0; i < sizeof pixels; i++) {
        const uint32_t column = i / 3 % width, row = i / 3 / width, c = i % 3;
        const uint32_t x = tall ? 29 - row : column, y = tall ? column : row;
        pixels[i] = (uint8_t)(x * x * 7 + y * y * 11 + x * y * (3 + c) + 40 * c);
    }
    must(png_encode(pixels, &(struct png_shape){width, height, 3}, &bytes, size));
    return bytes;
}

static void *formula_png(size_t *size)
{
    return turned_png(false, size);
}

static void expect_pillow(const struct image_fit *fit, uint32_t width, uint32_t height, const uint8_t *wanted)
{
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image, same;
    size_t size;
    void *bytes = formula_png(&size);
    must(image_fit_other(fit, "png", bytes, size, 0, &scratch, &image, &is_image, &same));
    cr_assert(is_image && !same && image.width == width && image.height == height && image.channels == 3);
    for (uint32_t i = 0; i < 3 * width * height; i++)
        cr_expect_leq(abs(image.pixels[i] - wanted[i]), 1, "byte %u: %u, not %u", i, image.pixels[i],
                      wanted[i]);
    free(bytes);
    image_scratch_close(&scratch);
}

Test(image, images_are_resized_as_by_pillow)
{
    expect_pillow(&(struct image_fit){.how = FIT_LONGEST, .res = 9}, 9, 6, pillow_longest);
    expect_pillow(&(struct image_fit){.how = FIT_SHORTEST, .res = 6}, 9, 6, pillow_longest);
    expect_pillow(&(struct image_fit){.how = FIT_RESIZE, .res = 5}, 5, 5, pillow_square);
}

static void expect_centre(bool tall, const uint8_t *wanted)
{
    const struct image_fit fit = {.how = FIT_CENTRE, .res = 4};
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image;
    size_t size;
    void *bytes = turned_png(tall, &size);
    must(image_fit(&fit, "png", bytes, size, 0, 0, &scratch, &image, &is_image));
    cr_assert(is_image && image.width == 4 && image.height == 4 && image.channels == 3);
    for (uint32_t i = 0; i < 48; i++)
        cr_expect_leq(abs(image.pixels[i] - wanted[i]), 1, "byte %u: %u, not %u", i, image.pixels[i],
                      wanted[i]);
    free(bytes);
    image_scratch_close(&scratch);
}

Test(image, the_centre_of_a_resized_image_is_that_of_torchvision)
{
    expect_centre(false, pillow_centre);
    expect_centre(true, pillow_centre_tall);
}

/* An image of 1 x 100 pixels would have a side of 65 * 100 pixels: that is allowed; 1 x 1000 pixels are not.
 */
Test(image, an_image_that_is_too_long_for_its_centre_is_refused)
{
    const struct image_fit fit = {.how = FIT_CENTRE, .res = 57};
    for (uint32_t width = 100; width <= 1000; width *= 10) {
        struct image_scratch scratch = {0};
        struct image image;
        bool is_image;
        size_t size;
        void *bytes, *pixels = calloc(width, 1);
        must(png_encode(pixels, &(struct png_shape){width, 1, 1}, &bytes, &size));
        const enum status status = image_fit(&fit, "png", bytes, size, 0, 0, &scratch, &image, &is_image);
        cr_expect_eq(status, width == 100 ? STATUS_OK : STATUS_FAILED, "%u: %s", width, status_text());
        free(bytes);
        free(pixels);
        image_scratch_close(&scratch);
    }
}

/* Only an image that has the size and the channels of the output remains as it is. */
Test(image, small_images_remain_as_they_are)
{
    static const struct {
        struct image_fit fit;
        bool same;
        uint32_t width, height;
    } cases[] = {{{.how = FIT_LONGEST, .res = 30}, true, 30, 20},
                 {{.how = FIT_LONGEST, .res = 29}, false, 29, 19},
                 {{.how = FIT_LONGEST, .res = 31}, true, 30, 20},
                 {{.how = FIT_LONGEST, .res = 4000}, true, 30, 20},
                 {{.how = FIT_LONGEST, .res = 1}, false, 1, 1},
                 {{.how = FIT_LONGEST, .res = 30, .channels = 3}, true, 30, 20},
                 {{.how = FIT_LONGEST, .res = 30, .channels = 1}, false, 30, 20},
                 {{.how = FIT_SHORTEST, .res = 20}, true, 30, 20},
                 {{.how = FIT_SHORTEST, .res = 19}, false, 29, 19},
                 {{.how = FIT_RESIZE, .res = 30}, false, 30, 30},
                 {{.how = FIT_CROP, .res = 20}, false, 20, 20}};
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image, same;
    size_t size;
    void *bytes = formula_png(&size);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        must(image_fit_other(&cases[i].fit, "png", bytes, size, 0, &scratch, &image, &is_image, &same));
        cr_expect(is_image && same == cases[i].same, "case %zu", i);
        must(image_fit(&cases[i].fit, "png", bytes, size, 0, 0, &scratch, &image, &is_image));
        cr_expect(image.width == cases[i].width && image.height == cases[i].height, "case %zu: %u x %u", i,
                  image.width, image.height);
    }
    free(bytes);
    image_scratch_close(&scratch);
}

/* A JPEG that is stored turned has the pixels of its upright copy. */
Test(image, turned_jpegs_are_fitted_upright)
{
    struct image_scratch scratch = {0}, other = {0};
    struct image image, wanted;
    bool is_image, same;
    for (uint32_t exif = 1; exif <= 8; exif++)
        for (int how = FIT_LONGEST; how <= FIT_SHORTEST; how++) {
            const struct image_fit fit = {.how = (enum fit_how)how, .res = 17, .unscaled = true};
            size_t size, png_size;
            void *png;
            uint8_t *bytes = encode(&kinds[exif % 4], 55, 41, exif, &size);
            must(image_decode("jpg", bytes, size, &scratch, &image, &is_image));
            must(png_encode(image.pixels, &(struct png_shape){image.width, image.height, image.channels},
                            &png, &png_size));
            must(image_fit_other(&fit, "jpg", bytes, size, 0, &scratch, &image, &is_image, &same));
            must(image_fit_other(&fit, "png", png, png_size, 0, &other, &wanted, &is_image, &same));
            cr_assert(!same && image.width == wanted.width && image.height == wanted.height &&
                      image.channels == wanted.channels);
            for (size_t i = 0; i < image_values(&image); i++)
                cr_assert_leq(abs(image.pixels[i] - wanted.pixels[i]), 1, "orientation %u, byte %zu", exif,
                              i);
            free(bytes);
            free(png);
        }
    image_scratch_close(&scratch);
    image_scratch_close(&other);
}

Test(image, a_fitted_image_is_the_resized_crop_of_the_whole)
{
    state = 6;
    for (uint32_t exif = 0; exif <= 8; exif++)
        for (int k = 0; k < 4; k++)
            for (int how = FIT_RESIZE; how <= FIT_RANDOM_RESIZED_CROP; how++) {
                const struct image_fit fit = {
                    .how = (enum fit_how)how, .res = 31, .channels = 3, .seed = exif};
                size_t size;
                uint8_t *bytes = encode(&kinds[k], 55, 41, exif, &size);
                for (uint32_t sample = 0; sample < 4; sample++)
                    compare_fit(&fit, bytes, size, sample, exif >= 5 && how != FIT_CROP ? 1 : 0);
                free(bytes);
            }
}

Test(image, a_jpeg_decoded_at_a_smaller_scale_is_close_to_the_whole)
{
    const struct image_fit fit = {.how = FIT_RESIZE, .res = 16, .channels = 3};
    size_t size;
    state = 7;
    uint8_t *bytes = encode(&kinds[3], 333, 271, 0, &size);
    compare_fit(&fit, bytes, size, 0, 20);
    struct image_fit unscaled = fit;
    unscaled.unscaled = true;
    compare_fit(&unscaled, bytes, size, 0, 0);
    free(bytes);
}

Test(image, gray_and_colour_are_converted)
{
    struct image_scratch scratch = {0};
    struct image image;
    void *bytes;
    size_t size;
    bool is_image;
    static const uint8_t pixels[12] = {255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 20, 30};
    struct image_fit fit = {.how = FIT_RESIZE, .res = 2, .channels = 1};
    must(png_encode(pixels, &(struct png_shape){2, 2, 3}, &bytes, &size));
    must(image_fit(&fit, "png", bytes, size, 0, 0, &scratch, &image, &is_image));
    cr_expect_arr_eq(image.pixels, ((uint8_t[]){76, 150, 29, 18}), 4); /* as Pillow's convert("L") */
    free(bytes);
    fit.channels = 3;
    must(png_encode(pixels, &(struct png_shape){2, 2, 1}, &bytes, &size));
    must(image_fit(&fit, "png", bytes, size, 0, 0, &scratch, &image, &is_image));
    cr_expect_arr_eq(image.pixels, ((uint8_t[]){255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0, 0}), 12);
    fit = (struct image_fit){.how = FIT_CROP, .res = 3, .channels = 3};
    cr_expect_eq(image_fit(&fit, "png", bytes, size, 0, 0, &scratch, &image, &is_image), STATUS_FAILED);
    cr_expect(strstr(status_text(), "2 x 2 pixels is too small for a crop of 3 x 3"), "%s", status_text());
    free(bytes);
    image_scratch_close(&scratch);
}

#endif

/* ---- Clips ---- */

/* Each frame of a clip must be what the frame is as an image: all have the same part. */
Test(image, frames_of_a_clip_are_fitted_alike)
{
    static const enum fit_how hows[] = {FIT_RESIZE, FIT_CROP, FIT_RANDOM_RESIZED_CROP, FIT_CENTRE};
    const uint32_t depth = 3, height = 23, width = 19, res = 11, plane = height * width;
    uint8_t clip[3 * 3 * 23 * 19], frame[3 * 23 * 19], fitted[3 * 3 * 11 * 11], alone[3 * 11 * 11];
    for (size_t i = 0; i < sizeof clip; i++)
        clip[i] = (uint8_t)(i * 2654435761u >> 20);
    for (size_t h = 0; h < COUNT_OF(hows); h++)
        for (uint32_t stored = 1; stored <= 3; stored += 2)
            for (uint32_t channels = 1; channels <= 3; channels += 2)
                for (uint32_t d = 0; d < depth; d++) {
                    struct image_fit fit = {.how = hows[h], .res = res, .channels = channels, .seed = 5};
                    struct image_scratch scratch = {0};
                    struct image image;
                    bool is_image;
                    fit.raw = (struct image){.channels = stored,
                                             .depth = depth,
                                             .height = height,
                                             .width = width,
                                             .type = DTYPE_U8};
                    must(image_fit(&fit, "u8", clip, stored * depth * plane, 1, 7, &scratch, &image,
                                   &is_image));
                    cr_assert(image.channels == channels && image.depth == depth && image.height == res &&
                              image.width == res);
                    image_store(&image, fitted);
                    for (uint32_t c = 0; c < stored; c++)
                        memcpy(frame + c * plane, clip + (c * depth + d) * plane, plane);
                    fit.raw.depth = 1;
                    must(image_fit(&fit, "u8", frame, stored * plane, 1, 7, &scratch, &image, &is_image));
                    image_store(&image, alone);
                    for (uint32_t c = 0; c < channels; c++)
                        cr_assert_arr_eq(fitted + (c * depth + d) * res * res, alone + c * res * res,
                                         res * res, "fit %zu, %u to %u channels, frame %u", h, stored,
                                         channels, d);
                    image_scratch_close(&scratch);
                }
}
