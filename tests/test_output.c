/* Tests output conversion: compares every combination of options with a second, simple implementation of the
 * definition. */
#include <criterion/criterion.h>

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/portable.h"
#include "synth/synth.h"
#include "core/options.h"
#include "synth/output.h"

TestSuite(output, .timeout = 120);

static const struct philox_key key = {{0x1234567, 0x89abcdef}};

/* ---- Conversions ---- */

/* Decodes a half-precision number by its definition. */
static double half_value(uint32_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31  ? (fraction ? NAN : INFINITY)
                   : exponent == 0 ? ldexp(fraction, -24)
                                   : ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -value : value;
}

static double bf16_value(uint32_t bits)
{
    int exponent = bits >> 7 & 255, fraction = bits & 127;
    double value = exponent == 255 ? (fraction ? NAN : INFINITY)
                   : exponent == 0 ? ldexp(fraction, -133)
                                   : ldexp(128 + fraction, exponent - 134);
    return bits & 0x8000 ? -value : value;
}

struct conversion {
    const char *name;
    uint16_t (*convert)(float value);
    double (*value)(uint32_t bits);
    uint32_t infinity;
    double beyond; /* the number that would follow the largest finite one */
};

static uint16_t to_half(float value)
{
    return half_from_float(value);
}

static uint16_t to_bf16(float value)
{
    return bf16_from_float(value);
}

static const struct conversion conversions[] = {{"half", to_half, half_value, 0x7C00, 65536},
                                                {"bfloat16", to_bf16, bf16_value, 0x7F80, 0x1p128}};

/* Every 16-bit number except NaN must convert to itself, with both signs. Midpoints must go to the even
 * neighbour, other values to the nearest number. */
static void expect_nearest(const struct conversion *c)
{
    for (uint32_t bits = 0; bits <= c->infinity; bits++) {
        float value = (float)c->value(bits);
        cr_assert_eq(c->convert(value), bits, "%s %04x", c->name, bits);
        cr_assert_eq(c->convert(-value), bits | 0x8000, "%s -%04x", c->name, bits);
        if (bits == c->infinity)
            break;
        double next = bits + 1 == c->infinity ? c->beyond : c->value(bits + 1);
        float middle = (float)((c->value(bits) + next) / 2);
        cr_assert_eq((double)middle, (c->value(bits) + next) / 2, "the midpoint must be exact in float");
        cr_assert_eq(c->convert(middle), bits + (bits & 1), "%s %04x and a half", c->name, bits);
        cr_assert_eq(c->convert(-middle), (bits + (bits & 1)) | 0x8000, "%s -%04x", c->name, bits);
        cr_assert_eq(c->convert(nextafterf(middle, 0)), bits, "%s below %04x and a half", c->name, bits);
        cr_assert_eq(c->convert(nextafterf(middle, INFINITY)), bits + 1, "%s above %04x", c->name, bits);
    }
}

Test(output, conversions_give_the_nearest_number)
{
    for (size_t i = 0; i < COUNT_OF(conversions); i++)
        expect_nearest(&conversions[i]);
}

Test(output, very_large_and_small_floats_are_converted)
{
    cr_expect_eq(half_from_float(65519.996f), 0x7BFF);
    cr_expect_eq(half_from_float(65520), 0x7C00);
    cr_expect_eq(half_from_float(-1e30f), 0xFC00);
    cr_expect_eq(half_from_float(0x1p-25f), 0, "a tie between 0 and the smallest number must go to 0");
    cr_expect_eq(half_from_float(0x1.000002p-25f), 1);
    cr_expect_eq(half_from_float(-0x1p-149f), 0x8000);
    cr_expect_eq(bf16_from_float(0x1.fffffep127f), 0x7F80);
    cr_expect_eq(bf16_from_float(0x1p-149f), 0);
    for (size_t i = 0; i < COUNT_OF(conversions); i++)
        cr_expect(isnan(conversions[i].value(conversions[i].convert(NAN))), "%s", conversions[i].name);
}

/* Converts floats of all magnitudes. No neighbour of the result may be nearer to the float. */
Test(output, floats_of_all_magnitudes_are_rounded_to_nearest)
{
    for (size_t i = 0; i < COUNT_OF(conversions); i++) {
        const struct conversion *c = &conversions[i];
        for (uint32_t n = 0; n < 200000; n++) {
            uint32_t bits = philox(key, n, 0, 0, 0).word[0] & 0x7FFFFFFF;
            float value;
            memcpy(&value, &bits, sizeof value);
            uint32_t result = c->convert(value);
            if (isnan(value) || result == c->infinity)
                continue;
            double error = fabs(c->value(result) - value);
            cr_assert(result == 0 || error <= fabs(c->value(result - 1) - value), "%s %a", c->name, value);
            cr_assert(result + 1 == c->infinity || error <= fabs(c->value(result + 1) - value), "%s %a",
                      c->name, value);
        }
    }
}

Test(output, means_of_grays_round_half_up)
{
    static const struct {
        uint64_t sum;
        uint32_t area;
        int mean;
    } known[] = {{0, 1, 0},
                 {255, 1, 255},
                 {1, 2, 1},
                 {1, 3, 0},
                 {2, 3, 1},
                 {4, 9, 0},
                 {5, 9, 1},
                 {509, 2, 255},
                 {507, 2, 254},
                 {0, 1u << 28, 0},
                 {UINT64_C(255) << 28, 1u << 28, 255},
                 {1u << 27, 1u << 28, 1},
                 {(1u << 27) - 1, 1u << 28, 0},
                 {(UINT64_C(255) << 28) - (1u << 27) - 1, 1u << 28, 254}};
    for (size_t i = 0; i < COUNT_OF(known); i++)
        cr_expect_eq(output_value_u8(known[i].sum, known[i].area), known[i].mean, "%llu / %u",
                     (unsigned long long)known[i].sum, known[i].area);
}

/* ---- Spans ---- */

/* Returns the length of the overlap of [a, b) and [c, d). */
static int64_t overlap(int64_t a, int64_t b, int64_t c, int64_t d)
{
    int64_t begin = a > c ? a : c, end = b < d ? b : d;
    return end > begin ? end - begin : 0;
}

static int64_t weight_of(int64_t j, int64_t x, int64_t res, int64_t out_res)
{
    return overlap(j * res, (j + 1) * res, x * out_res, (x + 1) * out_res);
}

static void expect_span(uint32_t j, uint32_t res, uint32_t out_res)
{
    struct output_span span = output_span(j, res, out_res);
    uint64_t sum = 0;
    cr_assert(span.first <= span.last && span.last < res, "%u of %u to %u", j, res, out_res);
    for (uint32_t x = span.first; x <= span.last; x++) {
        uint32_t weight = output_weight(span, out_res, x);
        cr_assert_eq(weight, weight_of(j, x, res, out_res), "%u, %u of %u to %u", j, x, res, out_res);
        cr_assert_gt(weight, 0);
        sum += weight;
    }
    cr_assert_eq(sum, res, "%u of %u to %u", j, res, out_res);
}

Test(output, spans_are_overlaps)
{
    static const uint32_t sides[] = {1, 2, 3, 7, 16, 31, 97, 127, 512, 1021, 16381, 16383, 16384};
    for (size_t a = 0; a < COUNT_OF(sides); a++)
        for (size_t b = 0; b < COUNT_OF(sides); b++) {
            uint32_t res = sides[a], out_res = sides[b];
            uint32_t step = out_res > 1000 ? 61 : 1;
            for (uint32_t j = 0; j < out_res; j += step)
                expect_span(j, res, out_res);
            expect_span(out_res - 1, res, out_res);
            cr_assert_eq(output_span(0, res, out_res).first, 0);
            cr_assert_eq(output_span(out_res - 1, res, out_res).last, res - 1);
        }
}

Test(output, resizing_gives_the_values_computed_by_hand)
{
    static const uint8_t canvas[] = {10, 20, 30, 40, 50, 60, 70, 80, 90};
    static const uint8_t small[] = {23, 37, 63, 77}; /* 210, 330, 570 and 690, divided by 9 */
    const struct synth_output halved = {.fit = OUTPUT_RESIZE, .res = 2, .channels = 1};
    const struct synth_output enlarged = {.fit = OUTPUT_RESIZE, .res = 6, .channels = 1};
    uint8_t image[36];
    output_convert(&halved, 3, key, canvas, 3, image);
    cr_expect_arr_eq(image, small, sizeof small);
    output_convert(&enlarged, 3, key, canvas, 3, image);
    for (int i = 0; i < 36; i++)
        cr_expect_eq(image[i], canvas[i / 12 * 3 + i % 6 / 2], "pixel %d", i);
}

/* ---- Crops ---- */

Test(output, crops_follow_their_stream)
{
    for (uint32_t n = 0; n < 1000; n++) {
        struct philox_key own = {{n, 7 * n}};
        struct philox_block block = philox(own, 0, 0, 3, 0);
        uint32_t res = 1 + n * 16 + n % 16, out_res = 1 + (uint32_t)((uint64_t)n * n % res);
        struct output_corner corner = output_crop(own, res, out_res);
        uint64_t places = res - out_res + 1;
        cr_assert_eq(corner.x, (uint64_t)((double)block.word[0] / 0x1p32 * (double)places));
        cr_assert_eq(corner.y, (uint64_t)((double)block.word[1] / 0x1p32 * (double)places));
        cr_assert(corner.x + out_res <= res && corner.y + out_res <= res);
    }
    cr_expect_eq(output_crop(key, 16384, 16384).x, 0);
}

Test(output, crops_reach_every_position_equally)
{
    enum { PLACES = 5, DRAWS = 20000 };
    int counts[PLACES][PLACES] = {{0}};
    for (uint32_t n = 0; n < DRAWS; n++) {
        struct output_corner corner =
            output_crop(atom_image_key(&(struct line_rules){.shapes = 1}, 3, 0, n), 11, 11 - PLACES + 1);
        counts[corner.y][corner.x]++;
    }
    for (int y = 0; y < PLACES; y++)
        for (int x = 0; x < PLACES; x++) /* 800 expected, with a standard deviation of 28 */
            cr_expect(counts[y][x] > 650 && counts[y][x] < 950, "(%d, %d): %d", x, y, counts[y][x]);
}

/* ---- Whole images ---- */

static uint8_t *noisy_canvas(uint32_t res, size_t pitch)
{
    uint8_t *canvas = malloc(res * pitch);
    cr_assert_not_null(canvas);
    for (size_t i = 0; i < res * pitch; i++) {
        uint32_t word = philox(key, (uint32_t)i, 1, 0, 0).word[0];
        /* A quarter of the pixels are black or white. */
        canvas[i] = word & 3 ? (uint8_t)(word >> 8) : word & 4 ? 255 : 0;
    }
    return canvas;
}

/* The definition of a value: a weighted sum over all pixels of the canvas. */
static uint64_t slow_sum(const struct synth_output *output, uint32_t res, const uint8_t *canvas, size_t pitch,
                         uint32_t y, uint32_t x)
{
    struct output_corner corner = {0, 0};
    if (output->fit == OUTPUT_CROP)
        corner = output_crop(key, res, output->res);
    if (output->fit != OUTPUT_RESIZE)
        return canvas[(corner.y + y) * pitch + corner.x + x];
    uint64_t sum = 0;
    for (uint32_t row = 0; row < res; row++)
        for (uint32_t column = 0; column < res; column++)
            sum += (uint64_t)(weight_of(y, row, res, output->res) * weight_of(x, column, res, output->res)) *
                   canvas[row * pitch + column];
    return sum;
}

/* Checks value (c, y, x) of an image whose sum of grays is known. */
static void expect_value(const struct synth_output *output, uint32_t res, uint64_t sum, uint32_t c,
                         uint32_t y, uint32_t x, const double *mean, const double *deviation,
                         const uint8_t *image)
{
    size_t side = output->res, channels = output->channels, bytes = dtype_bytes(output->type);
    size_t i = output->layout == OUTPUT_NCHW ? c * side * side + y * side + x : (y * side + x) * channels + c;
    double area = output->fit == OUTPUT_RESIZE ? (double)res * res : 1, gray = (double)sum / area;
    double exact = (gray / 255 - mean[c]) / deviation[c];
    float scale = (float)(1 / (255 * area * deviation[c])), bias = (float)(-mean[c] / deviation[c]);
    float value = (float)((long double)(float)sum * scale + bias), stored;
    uint16_t word;
    memcpy(&word, image + i * bytes, bytes == 2 ? 2 : 0);
    memcpy(&stored, image + i * bytes, bytes == 4 ? 4 : 0);
    cr_assert(fabs(value - exact) < 1e-6 * (1 + fabs(mean[c])) / deviation[c], "%g is not %g", value, exact);
    switch (output->type) {
    case DTYPE_U8:
        cr_assert_eq(image[i], (int)floor(gray + 0.5));
        break;
    case DTYPE_F16:
        cr_assert_eq(word, half_from_float(value));
        break;
    case DTYPE_BF16:
        cr_assert_eq(word, bf16_from_float(value));
        break;
    case DTYPE_F32:
        cr_assert_eq(stored, value, "%a is not %a", (double)stored, (double)value);
        break;
    case DTYPE_STORED:
        cr_assert_fail("no output has this type");
    }
}

/* Checks every value of a converted image, and that nothing is written after its end. */
static void expect_conversion(const struct synth_output *like, uint32_t res)
{
    static const double mean[] = {0.485, 0.25, -3}, deviation[] = {0.229, 1, 0.01};
    struct synth_output output = *like;
    size_t pitch = res + 5;
    size_t values = (size_t)output.res * output.res * output.channels;
    size_t bytes = values * dtype_bytes(output.type);
    uint8_t *canvas = noisy_canvas(res, pitch), *image = malloc(bytes + 1);
    output_set_scale(&output, res, mean, deviation);
    memset(image, 0xA5, bytes + 1);
    output_convert(&output, res, key, canvas, pitch, image);
    for (uint32_t y = 0; y < output.res; y++)
        for (uint32_t x = 0; x < output.res; x++) {
            uint64_t sum = slow_sum(&output, res, canvas, pitch, y, x);
            for (uint32_t c = 0; c < output.channels; c++)
                expect_value(&output, res, sum, c, y, x, mean, deviation, image);
        }
    cr_assert_eq(image[bytes], 0xA5);
    free(canvas);
    free(image);
}

static void expect_conversions(enum output_fit fit, uint32_t res, uint32_t out_res)
{
    for (int type = DTYPE_U8; type <= DTYPE_F32; type++)
        for (int layout = OUTPUT_NCHW; layout <= OUTPUT_NHWC; layout++)
            for (uint32_t channels = 1; channels <= 3; channels += 2) {
                const struct synth_output output = {.type = (enum dtype)type,
                                                    .layout = (enum output_layout)layout,
                                                    .fit = fit,
                                                    .res = out_res,
                                                    .channels = channels};
                expect_conversion(&output, res);
            }
}

static const uint32_t sides[] = {1, 2, 3, 5, 13, 16, 31, 37};

Test(output, whole_images_follow_the_definition)
{
    for (size_t i = 0; i < COUNT_OF(sides); i++)
        expect_conversions(OUTPUT_WHOLE, sides[i], sides[i]);
    expect_conversions(OUTPUT_WHOLE, 257, 257);
}

Test(output, resized_images_follow_the_definition)
{
    for (size_t a = 0; a < COUNT_OF(sides); a++)
        for (size_t b = 0; b < COUNT_OF(sides); b++)
            expect_conversions(OUTPUT_RESIZE, sides[a], sides[b]);
}

Test(output, cropped_images_follow_the_definition)
{
    for (size_t a = 0; a < COUNT_OF(sides); a++)
        for (size_t b = 0; b <= a; b++)
            expect_conversions(OUTPUT_CROP, sides[a], sides[b]);
}

/* The largest possible sums, 255 * 2^28, need more than 32 bits. */
Test(output, sums_of_the_largest_canvas_do_not_overflow)
{
    enum { SIDE = 16384 };
    static const double mean[] = {0, 0, 0}, deviation[] = {1, 1, 1};
    struct synth_output output = {.type = DTYPE_F32, .fit = OUTPUT_RESIZE, .res = 1, .channels = 1};
    uint8_t *canvas = malloc((size_t)SIDE * SIDE), grays[9];
    float value;
    cr_assert_not_null(canvas);
    memset(canvas, 255, (size_t)SIDE * SIDE);
    output_set_scale(&output, SIDE, mean, deviation);
    output_convert(&output, SIDE, key, canvas, SIDE, &value);
    cr_expect_float_eq(value, 1, 1e-7);
    output.type = DTYPE_U8;
    output.res = 3;
    output_convert(&output, SIDE, key, canvas, SIDE, grays);
    for (int i = 0; i < 9; i++)
        cr_expect_eq(grays[i], 255);
    free(canvas);
}

/* The products of the weights with the sums of a column need more than 32 bits. */
Test(output, products_with_large_weights_do_not_overflow)
{
    enum { SIDE = 5000 };
    const struct synth_output output = {.fit = OUTPUT_RESIZE, .res = SIDE - 1, .channels = 1};
    uint8_t *canvas = malloc((size_t)SIDE * SIDE), *image = malloc((size_t)SIDE * SIDE);
    cr_assert(canvas && image);
    memset(canvas, 255, (size_t)SIDE * SIDE);
    output_convert(&output, SIDE, key, canvas, SIDE, image);
    for (size_t i = 0; i < (size_t)(SIDE - 1) * (SIDE - 1); i++)
        cr_assert_eq(image[i], 255, "value %zu", i);
    free(canvas);
    free(image);
}

/* Enlarges an image of 2 x 2 pixels to 16384 x 16384. */
Test(output, two_pixels_per_side_are_enlarged_to_16384)
{
    enum { SIDE = 16384 };
    static const uint8_t canvas[] = {0, 64, 128, 255};
    const struct synth_output output = {.fit = OUTPUT_RESIZE, .res = SIDE, .channels = 1};
    uint8_t *image = malloc((size_t)SIDE * SIDE);
    cr_assert_not_null(image);
    output_convert(&output, 2, key, canvas, 2, image);
    for (size_t y = 0; y < SIDE; y += SIDE / 2 - 1)
        for (size_t x = 0; x < SIDE; x++)
            cr_assert_eq(image[y * SIDE + x], canvas[y / (SIDE / 2) * 2 + x / (SIDE / 2)]);
    free(image);
}

/* ---- Values of the options ---- */

Test(output, one_value_or_one_per_channel_is_accepted)
{
    double values[3];
    cr_assert_eq(parse_channels("--mean", "0.5", 3, -1, 1, values), STATUS_OK);
    cr_expect(values[0] == 0.5 && values[1] == 0.5 && values[2] == 0.5);
    cr_assert_eq(parse_channels("--mean", "0.5,-0.25,1e-1", 3, -1, 1, values), STATUS_OK);
    cr_expect(values[0] == 0.5 && values[1] == -0.25 && values[2] == 0.1);
    cr_assert_eq(parse_channels("--mean", "1", 1, -1, 1, values), STATUS_OK);
    static const char *const wrong[] = {"",     ",", "0.5,0.5", "0.5,0.5,", "0.5,0.5,0.5,0.5",
                                        "0.5 ", "x", "0,2,0",   "nan"};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        cr_expect_eq(parse_channels("--mean", wrong[i], 3, -1, 1, values), STATUS_USAGE, "%s", wrong[i]);
        cr_expect(strncmp(status_text(), "--mean: ", 8) == 0, "%s", status_text());
    }
    cr_expect_eq(parse_channels("--std", "1,1,1", 1, 0, 1, values), STATUS_USAGE);
    cr_expect(strstr(status_text(), "3 values for 1 channel; give one"), "%s", status_text());
    char digits[200] = "0.";
    memset(digits + 2, '1', sizeof digits - 3);
    cr_expect_eq(parse_channels("--std", digits, 1, 0, 1, values), STATUS_USAGE);
}

Test(output, labels_files_are_named_after_their_images)
{
    char path[PATH_MAX];
    static const char *const names[][2] = {{"a.npy", "a.labels.npy"},
                                           {"b/a.npy", "b/a.labels.npy"},
                                           {"a", "a.labels.npy"},
                                           {"a.npy.gz", "a.npy.gz.labels.npy"},
                                           {".npy", ".npy.labels.npy"}};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        cr_assert_eq(npy_target_path(names[i][0], "labels", path), STATUS_OK);
        cr_expect_str_eq(path, names[i][1]);
    }
    char long_name[PATH_MAX];
    memset(long_name, 'a', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    cr_expect_eq(npy_target_path(long_name, "labels", path), STATUS_USAGE);
}
