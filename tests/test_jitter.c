/* Tests the changes of colour and the blur of images (data/jitter.h). Brightness, contrast, saturation and
 * gray are compared with images that Pillow 13.0 has computed (ImageEnhance, convert("L")); hue and blur with
 * the formulas of torchvision in double precision, computed by NumPy 1.24 and here. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/jitter.h"
#include "must.h"

#define HEIGHT 5
#define WIDTH  7
#define PLANE  (HEIGHT * WIDTH)

/* The pixels of the golden images. */
static void fill(uint8_t *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] = (uint8_t)((uint32_t)i * 2654435761u >> 24);
}

static int byte_at(const char *hex, size_t i)
{
    const char digits[] = {hex[2 * i], hex[2 * i + 1], '\0'};
    return (int)strtol(digits, NULL, 16);
}

/* ---- Golden images ---- */

static const struct {
    enum jitter_step step;
    float factor;
    const char *hex; /* of three planes */
} steps[] = {
    {JITTER_BRIGHTNESS, 0.3f,
     "002f124124063618482a0d3d1f023214442609391b4b2d103f2205341746290c3b1e00"
     "30124225073719492c0e3e2003331545270a391c4b2e114023063518472a0d3c1f0131"
     "14432608381b4a2d0f3f2104331646280b3a1d002f124124073619482b0e3d20033215"},
    {JITTER_BRIGHTNESS, 1.4f,
     "00dd54ffa820fd74ffc840ff940be960ffb42bff80ffd44bffa117f56dffc138ff8d04"
     "e158ffad24ff78ffcd44ff9810ee64ffba31ff85ffda51ffa51dfa71ffc53dff9108e5"
     "5dffb128ff7effd248ff9e15f269ffbe35ff8a01de55ffaa21fe75ffcb41ff950eeb62"},
    {JITTER_CONTRAST, 0.4f,
     "4c8b64a37c55946dac855e9d764f8f67a77f589871b08961a17a53926baa835c9b744d"
     "8c65a57d56956eae875f9f77519069a8815a9972b18a63a27b54936cab845d9d754e8d"
     "67a67f579770af8861a07952916aa9825b9a734c8b64a37d55956dad865f9e77508f68"},
    {JITTER_CONTRAST, 1.7f,
     "00b30dff7300da34ff9a00ff5b00c31cff8200ea43ffa902ff6a00d02bff9100f75200"
     "b812ff7900df39ffa100ff6000c821ff8900ef48ffb009ff6f00d730ff9600fe5700bd"
     "19ff7f00e640ffa600ff6700cd26ff8e00f44f00b50eff7600dc35ff9d00ff5d00c41e"},
    {JITTER_SATURATION, 0.0f,
     "666ea38d497d85baa460947f3a6f77ab96518671c2ad689d88437880b49f5a8f793569"
     "666ea38d497d85baa460947f3a6f77ab96518671c2ad689d88437880b49f5a8f793569"
     "666ea38d497d85baa460947f3a6f77ab96518671c2ad689d88437880b49f5a8f793569"},
    {JITTER_SATURATION, 0.55f,
     "2d886ab762449f81ce795ba954369172c06b4d9b89d78264b25d3f997bc97456a34f30"
     "8654c3832f9d6bda9a46b475208f5dcb8c37a667e2a34ebd7e299866d49540af6f1b89"
     "52ad8f4f8869c4a6669f8041795bb69758907233ae6fa7894a8264bfa061997b3b7455"},
    {JITTER_SATURATION, 2.5f,
     "00e600ffbe00fd00ffd500ffb200ef00ffc900ff00ffe000ffbb00f500ffd200ffad00"
     "f900ff6200ff0fff7900ff5200ff01ff6b00ff44ff8200ff5b00ff0aff7200ff4e00fc"
     "0eff4900ff25ff6000ff3c00ff15ff5300ff2e006a00ff4500ff1eff5c00ff3500ff11"},
    {JITTER_HUE, -0.5f,
     "a182de1d5eb899f53475cf0f4faa8be62666c101fd3d7dd81858b395ef2f6fca0a49a4"
     "00e13c7bbc17f85392d32e6ead08ea4584c41f605c9bdb3677b611f34e8ecd2868a803"
     "5e3f9bda1a7556b2f1318ccc0c6748a3e3237dbebafa3a94d5157051acec2c87c60661"},
    {JITTER_HUE, -0.13f,
     "3a3f77da1a51568ef13168cc0c434880e32359be97fa3a70d5154c5189ec2c63c6063d"
     "a15ede1d3ab875f53451cf0f2baa67e62642c101fd3d59d81834b371ef2f4bca0a25a4"
     "00e13c51bc17f85368d32e44ad08ea455ac41f365c71db364db611f34e64cd283ea803"},
    {JITTER_HUE, 0.0f,
     "009e3cda7817b553f18f2ecc6a08a745e3811fbe5cfa9836d57311af4eec8a28c66503"
     "a13fde7c1ab856f59331cf6d0caa48e68523c15ffd9c3ad87615b351ef8d2cca6806a4"
     "43e17f1dbc5af89634d3710fad4bea8826c463019f3ddb7a18b654f3912fcd6b0aa846"},
    {JITTER_HUE, 0.31f,
     "2ce1681dbc43f87f34d35a0fad34ea7126c44c01883ddb6318b63df37a2fcd540aa82f"
     "00873cda61179e53f1782ecc53089045e36a1fbe5cfa8136d55c11984eec7328c64e03"
     "a13fde611ab856f57931cf520caa48e66a23c144fd823ad85b15b351ef722cca4d06a4"},
};

static const char gray_hex[] = "666ea38d497d85baa460947f3a6f77ab96518671c2ad689d88437880b49f5a8f793569";

static const struct {
    uint32_t radius;
    double sigma;
    const char *hex; /* of one plane */
} blurs[] = {
    {0, 1.0, "009e3cda7817b553f18f2ecc6a08a745e3811fbe5cfa9836d57311af4eec8a28c66503"},
    {1, 0.1, "009e3cda7817b553f18f2ecc6a08a745e3811fbe5cfa9836d57311af4eec8a28c66503"},
    {2, 0.8, "7389848580605784958e7d7d6a59949293816f6f6ba9998685736061aca2827e7c5c50"},
    {4, 2.0, "8c8b867f76706d8d8b867f76706d8f8d877f76706d928f897f766f6c928f897f766e6b"},
};

Test(jitter, steps_are_those_of_pillow_and_torchvision)
{
    const struct shape shape = {3, 1, HEIGHT, WIDTH};
    uint8_t image[3 * PLANE];
    for (size_t k = 0; k < COUNT_OF(steps); k++) {
        fill(image, sizeof image);
        jitter_apply_step(steps[k].step, steps[k].factor * (steps[k].step == JITTER_HUE ? 6 : 1), &shape,
                          image);
        for (size_t i = 0; i < sizeof image; i++)
            cr_assert_leq(abs(image[i] - byte_at(steps[k].hex, i)), steps[k].step == JITTER_HUE,
                          "image %zu, value %zu: %d, not %d", k, i, image[i], byte_at(steps[k].hex, i));
    }
}

Test(jitter, gray_is_that_of_pillow)
{
    const struct shape shape = {3, 1, HEIGHT, WIDTH};
    const struct jitter jitter = {.grayscale = 1};
    uint8_t image[3 * PLANE], other[PLANE];
    fill(image, sizeof image);
    jitter_apply(&jitter, &shape, 1, 2, 3, image, other);
    for (size_t i = 0; i < sizeof image; i++)
        cr_assert_eq(image[i], byte_at(gray_hex, i % PLANE), "value %zu", i);
    for (uint32_t i = 0; i < 1000000; i++) { /* the integers of Pillow's Convert.c */
        const uint32_t word = philox(philox_key(6), i, 0, 0, 0).word[0];
        const uint32_t r = word & 255, g = word >> 8 & 255, b = word >> 16 & 255;
        const struct jitter_pixel pixel = {{(float)r, (float)g, (float)b}};
        cr_assert_eq((uint32_t)jitter_gray(&pixel, 3), (19595 * r + 38470 * g + 7471 * b + 32768) >> 16,
                     "%u %u %u", r, g, b);
    }
}

Test(jitter, blur_is_that_of_torchvision)
{
    uint8_t plane[PLANE], blurred[PLANE];
    fill(plane, sizeof plane);
    for (size_t k = 0; k < COUNT_OF(blurs); k++) {
        jitter_blur(blurs[k].sigma, blurs[k].radius, HEIGHT, WIDTH, plane, blurred);
        for (size_t i = 0; i < PLANE; i++)
            cr_assert_leq(abs(blurred[i] - byte_at(blurs[k].hex, i)), 1, "image %zu, value %zu: %d, not %d",
                          k, i, blurred[i], byte_at(blurs[k].hex, i));
    }
}

/* ---- Definitions ---- */

static uint32_t reflected(int32_t at, int32_t size)
{
    return (uint32_t)(at < 0 ? -at : at >= size ? 2 * size - 2 - at : at);
}

/* The blurred value at (y, x), in double. */
static double blurred_at(double sigma, int32_t radius, int32_t height, int32_t width, const uint8_t *plane,
                         int32_t y, int32_t x)
{
    double sum = 0, total = 0;
    for (int32_t i = -radius; i <= radius; i++)
        for (int32_t j = -radius; j <= radius; j++) {
            const double weight = exp(-0.5 * (i * i + j * j) / (sigma * sigma));
            sum += weight * plane[reflected(y + i, height) * (size_t)width + reflected(x + j, width)];
            total += weight;
        }
    return sum / total;
}

Test(jitter, blur_is_exact_to_one_at_all_sizes)
{
    static const int32_t sizes[][2] = {{1, 1}, {1, 9}, {3, 2}, {17, 13}, {31, 37}, {33, 515}, {40, 1031}};
    static const double sigmas[] = {0.01, 0.1, 0.5, 1.7, 2, 9.5, 100};
    double furthest = 0;
    for (size_t k = 0; k < COUNT_OF(sizes); k++) {
        const int32_t height = sizes[k][0], width = sizes[k][1], side = height < width ? height : width;
        uint8_t *plane = malloc((size_t)(height * width)), *blurred = malloc((size_t)(height * width));
        for (int32_t i = 0; i < height * width; i++)
            plane[i] = (uint8_t)philox(philox_key(5), (uint32_t)i, (uint32_t)k, 0, 0).word[0];
        for (size_t s = 0; s < COUNT_OF(sigmas); s++) {
            const int32_t most = side - 1 < JITTER_RADIUS_MAX ? side - 1 : JITTER_RADIUS_MAX;
            for (int32_t radius = 0; radius <= most; radius += radius < 3 ? 1 : 7) {
                jitter_blur(sigmas[s], (uint32_t)radius, (uint32_t)height, (uint32_t)width, plane, blurred);
                for (int32_t i = 0; i < height * width; i += i < 1500 && width < 500 ? 1 : 97) {
                    const double exact =
                        blurred_at(sigmas[s], radius, height, width, plane, i / width, i % width);
                    furthest = fmax(furthest, fabs(blurred[i] - exact));
                }
            }
        }
        free(plane);
        free(blurred);
    }
    cr_expect(furthest < 0.75, "%g", furthest); /* 0.5 is the rounding */
}

/* A hue of any pixel: its value and saturation remain, and it turns back. */
Test(jitter, hue_keeps_the_value_and_the_range_of_a_pixel)
{
    for (uint32_t i = 0; i < 200000; i++) {
        const struct philox_block block = philox(philox_key(8), i, 0, 0, 0);
        const float values[] = {(float)(block.word[0] % 256), (float)(block.word[1] % 256),
                                (float)(block.word[2] % (i % 5 ? 256 : 2))};
        const float turn = (float)(block.word[3] * 0x1p-32 * 6 - 3);
        struct jitter_pixel pixel = {{values[0], values[1], values[2]}};
        jitter_turn(turn, &pixel);
        const float most = fmaxf(values[0], fmaxf(values[1], values[2]));
        const float least = fminf(values[0], fminf(values[1], values[2]));
        cr_assert_eq(fmaxf(pixel.of[0], fmaxf(pixel.of[1], pixel.of[2])), most, "%u", i);
        cr_assert_eq(fminf(pixel.of[0], fminf(pixel.of[1], pixel.of[2])), least, "%u", i);
        struct jitter_pixel same = {{values[0], values[1], values[2]}};
        jitter_turn(0, &same);
        cr_assert_arr_eq(same.of, values, sizeof values, "%u", i);
    }
}

/* ---- Random numbers ---- */

static struct jitter everything(void)
{
    return (struct jitter){.probability = 0.8f,
                           .low = {0.6f, 0.2f, 0, -0.1f},
                           .high = {1.4f, 1.8f, 3, 0.3f},
                           .grayscale = 0.2f,
                           .blur = 0.5f,
                           .kernel = 7,
                           .sigma_min = 0.1f,
                           .sigma_max = 2};
}

Test(jitter, draws_have_the_given_probabilities_and_ranges)
{
    const struct jitter jitter = everything();
    const uint32_t count = 100000;
    uint32_t adjusted = 0, gray = 0, blurred = 0, orders[24] = {0};
    double sums[JITTER_STEPS] = {0}, sigmas = 0;
    for (uint32_t sample = 0; sample < count; sample++) {
        const struct jitter_drawn drawn = jitter_draw(&jitter, 7, sample % 3, sample);
        cr_assert(drawn.steps == 0 || drawn.steps == JITTER_STEPS);
        gray += drawn.gray;
        blurred += drawn.blurs;
        sigmas += drawn.sigma / count;
        cr_assert(drawn.sigma >= 0.0999 && drawn.sigma <= 2);
        for (uint32_t step = 0; step < JITTER_STEPS; step++) {
            const float factor = drawn.factors[step] / (step == JITTER_HUE ? 6 : 1);
            cr_assert(factor >= jitter.low[step] - 1e-6f && factor <= jitter.high[step] + 1e-6f);
            sums[step] += (double)factor / count;
        }
        if (drawn.steps == 0)
            continue;
        adjusted++;
        uint32_t order = 0, seen = 0;
        for (uint32_t i = 0; i < JITTER_STEPS; i++) {
            uint32_t smaller = 0;
            for (uint32_t k = i + 1; k < JITTER_STEPS; k++)
                smaller += drawn.order[k] < drawn.order[i];
            order = order * (JITTER_STEPS - i) + smaller;
            seen |= 1u << drawn.order[i];
        }
        cr_assert_eq(seen, 15);
        cr_assert_eq(drawn.order[drawn.contrast], JITTER_CONTRAST);
        orders[order]++;
    }
    cr_expect_float_eq(adjusted / (double)count, 0.8, 0.01);
    cr_expect_float_eq(gray / (double)count, 0.2, 0.01);
    cr_expect_float_eq(blurred / (double)count, 0.5, 0.01);
    cr_expect_float_eq(sigmas, 1.05, 0.01);
    for (uint32_t step = 0; step < JITTER_STEPS; step++)
        cr_expect_float_eq(sums[step], ((double)jitter.low[step] + (double)jitter.high[step]) / 2, 0.01);
    for (uint32_t i = 0; i < 24; i++)
        cr_expect_float_eq(orders[i] / (double)adjusted, 1.0 / 24, 0.004, "order %u", i);
}

Test(jitter, steps_without_effect_are_left_out)
{
    struct jitter jitter = everything();
    jitter.low[JITTER_CONTRAST] = jitter.high[JITTER_CONTRAST] = 1;
    jitter.low[JITTER_HUE] = jitter.high[JITTER_HUE] = 0;
    jitter.probability = 1;
    for (uint32_t sample = 0; sample < 100; sample++) {
        const struct jitter_drawn drawn = jitter_draw(&jitter, 7, 0, sample);
        cr_assert_eq(drawn.steps, 2);
        cr_assert_eq(drawn.contrast, 2);
        cr_assert_eq(drawn.order[0] + drawn.order[1], JITTER_BRIGHTNESS + JITTER_SATURATION);
    }
}

/* ---- Images and clips ---- */

/* Each frame of a clip is the image that has the clip's random numbers; its contrast refers to the frame. */
Test(jitter, frames_of_a_clip_are_changed_alike)
{
    static const uint32_t sizes[][2] = {{4, 4}, {7, 5}, {16, 33}};
    const struct jitter jitter = everything();
    for (size_t k = 0; k < COUNT_OF(sizes); k++)
        for (uint32_t channels = 1; channels <= 3; channels += 2) {
            const uint32_t depth = 5, plane = sizes[k][0] * sizes[k][1];
            const struct shape clip = {channels, depth, sizes[k][0], sizes[k][1]};
            const struct shape image = {channels, 1, sizes[k][0], sizes[k][1]};
            uint8_t *values = malloc(shape_values(&clip)), *frame = malloc(shape_values(&image)),
                    *other = malloc(plane);
            for (uint32_t sample = 0; sample < 20; sample++)
                for (uint32_t d = 0; d < depth; d++) {
                    fill(values, shape_values(&clip));
                    for (uint32_t c = 0; c < channels; c++)
                        memcpy(frame + c * plane, values + (c * depth + d) * plane, plane);
                    jitter_apply(&jitter, &image, 3, 1, sample, frame, other);
                    jitter_apply(&jitter, &clip, 3, 1, sample, values, other);
                    for (uint32_t c = 0; c < channels; c++)
                        cr_assert_arr_eq(frame + c * plane, values + (c * depth + d) * plane, plane,
                                         "sample %u, frame %u", sample, d);
                }
            free(values);
            free(frame);
            free(other);
        }
}

/* An image of equal channels has the values of its channel alone, which GPUs compute instead. */
Test(jitter, gray_images_stay_gray)
{
    const struct jitter jitter = everything();
    uint8_t image[3 * PLANE], alone[PLANE], other[PLANE];
    for (uint32_t sample = 0; sample < 200; sample++) {
        fill(alone, PLANE);
        for (uint32_t c = 0; c < 3; c++)
            memcpy(image + c * PLANE, alone, PLANE);
        jitter_apply(&jitter, &(struct shape){1, 1, HEIGHT, WIDTH}, 3, 1, sample, alone, other);
        jitter_apply(&jitter, &(struct shape){3, 1, HEIGHT, WIDTH}, 3, 1, sample, image, other);
        for (uint32_t c = 0; c < 3; c++)
            cr_assert_arr_eq(image + c * PLANE, alone, PLANE, "sample %u, channel %u", sample, c);
    }
}

/* ---- Options ---- */

#define REFUSED(text, member, value, shape_)                                                      \
    do {                                                                                          \
        struct jitter wrong = everything();                                                       \
        wrong.member = value;                                                                     \
        cr_expect_eq(jitter_check(&wrong, &(struct shape)shape_, &jitter_options), STATUS_USAGE); \
        cr_expect(strstr(status_text(), text), "%s", status_text());                              \
    } while (0)
#define RGB        \
    {              \
        3, 1, 8, 9 \
    }
#define GRAY       \
    {              \
        1, 1, 8, 9 \
    }

Test(jitter, values_out_of_range_are_refused)
{
    struct jitter jitter = everything();
    must(jitter_check(&jitter, &(struct shape)RGB, &jitter_options));
    REFUSED("--color-jitter-p: 1.5 is out of range", probability, 1.5f, RGB);
    REFUSED("--color-jitter-p: ", probability, NAN, RGB);
    REFUSED("--color-jitter: -1 to 1.4 is no range", low[JITTER_BRIGHTNESS], -1, RGB);
    REFUSED("--color-jitter: ", low[JITTER_CONTRAST], 2, RGB);
    REFUSED("--color-jitter: ", high[JITTER_HUE], 0.6f, RGB);
    REFUSED("--grayscale: -1 is out of range", grayscale, -1, RGB);
    REFUSED("--blur: ", blur, 2, RGB);
    REFUSED("--blur-kernel: 4 is even; give an odd number of pixels, such as 5", kernel, 4, RGB);
    REFUSED("--blur-kernel: 0 is out of range; it must be 1 to 63", kernel, 0, RGB);
    REFUSED("--blur-kernel: a kernel of 17 pixels is too large for images of 9x8", kernel, 17, RGB);
    REFUSED("--blur-sigma: ", sigma_min, 0, RGB);
    REFUSED("--blur-sigma: ", sigma_max, 0.05f, RGB);
    REFUSED("--color-jitter: images of one channel have neither saturation nor hue", blur, 0, GRAY);
}

Test(jitter, options_are_read)
{
    struct jitter jitter;
    struct jitter_parameters parameters = {"0.4,0.5,2,0.1", "0.1,2", 0.8, 0.2, 0.5, 23};
    must(jitter_read(&parameters, &jitter));
    cr_expect(jitter.low[0] == 0.6f && jitter.high[1] == 1.5f && jitter.low[2] == 0 && jitter.high[2] == 3);
    cr_expect(jitter.low[3] == -0.1f && jitter.high[3] == 0.1f && jitter.probability == 0.8f);
    cr_expect(jitter.sigma_min == 0.1f && jitter.sigma_max == 2 && jitter.kernel == 23);
    parameters.jitter = "0.3";
    must(jitter_read(&parameters, &jitter));
    cr_expect(jitter.low[2] == 0.7f && !jitter_step_on(&jitter, JITTER_HUE));
    static const char *const wrong[] = {"", "1,2", "0.1,0.1,0.1,0.1,0.1", "a", "-1", "0", "0,0,0,0"};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        parameters.jitter = wrong[i];
        cr_expect_eq(jitter_read(&parameters, &jitter), STATUS_USAGE, "%s", wrong[i]);
        cr_expect(strstr(status_text(), "--color-jitter: "), "%s", status_text());
    }
}
