/* Tests the augmentation of an image (train/augment.h, data/random_boxes.h). Compares each step with a
 * definition in double precision, or with values computed by hand. */
#include "train_support.h"

#include "data/random_boxes.h"
#include "train/augment.h"
#include "train/feed.h"

/* Sizes (height, width) of images. */
static const uint32_t sizes[][2] = {{1, 1}, {3, 5}, {17, 17}, {2, 9}, {40, 64}};

/* Fills an image with smooth values, noise and some black. */
static void fill(uint8_t *image, size_t values, uint64_t seed)
{
    for (size_t i = 0; i < values; i++) {
        uint32_t word = philox(philox_key(seed), (uint32_t)i, 0, 0, 1).word[0];
        image[i] = (uint8_t)(word % 5 == 0 ? 0 : (i * 3 + word % 64) % 256);
    }
}

static int clamp(double value)
{
    return value < 0 ? 0 : value > 255 ? 255 : (int)value;
}

/* ---- Rounding ---- */

Test(augment, rounding_by_addition_equals_the_functions_of_the_library)
{
    for (uint32_t i = 0; i <= 13 * 255; i++)
        cr_assert(augment_float(i) == (float)i && augment_thirteenth(i) == (float)i / 13, "%u", i);
    for (uint32_t i = 0; i < 1000000; i++) {
        const uint32_t word = philox(philox_key(4), i, 0, 0, 0).word[0];
        const float value = ldexpf((float)(int32_t)word, -9 - (int)(i % 24)), nearest = rintf(value);
        cr_assert_eq(augment_floor(value), floorf(value), "%a", (double)value);
        cr_assert_eq(augment_nearest(value), (int32_t)nearest, "%a", (double)value);
        cr_assert_eq(augment_rounded(value),
                     nearest < 0     ? 0
                     : nearest > 255 ? 255
                                     : nearest,
                     "%a", (double)value);
    }
    cr_expect(augment_nearest(0.5f) == 0 && augment_nearest(1.5f) == 2 && augment_floor(-0.25f) == -1);
}

/* ---- Random numbers ---- */

Test(augment, the_exponential_function_and_the_logarithm_are_accurate)
{
    for (double x = -2; x <= 2; x += 0.001)
        cr_assert_float_eq(box_exp(x), exp(x), 1e-14 * exp(x), "%g", x);
    for (float x = 1e-7f; x < 4; x *= 1.01f)
        cr_assert_float_eq(box_log(x), log((double)x), 2e-7 * (1 + fabs(log((double)x))), "%g", (double)x);
}

/* The distribution function of the normal distribution must map each normal number back to the uniform number
 * that it was computed from. */
Test(augment, noise_is_normal)
{
    double sum = 0, squares = 0, largest = 0;
    const uint32_t count = 100000;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t word = philox(philox_key(3), i, 0, 0, 0).word[0];
        double value = box_normal(word), p = ((word >> 8) + 0.5) * 0x1p-24;
        cr_assert_float_eq(0.5 * erfc(-value / sqrt(2)), p, 2e-6);
        sum += value;
        squares += value * value;
        largest = fmax(largest, fabs(value));
    }
    cr_expect_float_eq(sum / count, 0, 0.015);
    cr_expect_float_eq(squares / count, 1, 0.02);
    cr_expect(largest > 3.8 && largest < 5.8);
    cr_expect_eq(box_normal(0), -box_normal(UINT32_MAX));
}

Test(augment, erased_boxes_have_the_areas_and_aspect_ratios_of_timm)
{
    const struct augment augment = {.erasing = 0.25f, .height = 60, .width = 80};
    uint32_t erased = 0, edges = 0;
    for (uint32_t sample = 0; sample < 20000; sample++) {
        struct draw_erase erase = box_erase(&augment, 1, sample % 3, sample);
        const struct image_box *box = &erase.box;
        if (box->height == 0)
            continue;
        erased++;
        double share = box->width * box->height / 4800.0, ratio = (double)box->width / box->height;
        cr_assert(share > 0.017 && share < 0.34, "%g", share);
        cr_assert(ratio > 0.27 && ratio < 3.7, "%g", ratio);
        cr_assert(box->left + box->width <= 80 && box->top + box->height <= 60);
        cr_assert(box->width < 80 && box->height < 60);
        edges += box->left == 0 || box->left + box->width == 80;
    }
    cr_expect(erased > 4700 && erased < 5300, "%u", erased);
    cr_expect(edges > 50);
}

Test(augment, only_the_erased_box_is_filled_with_noise)
{
    struct data data;
    data_random(&data, (struct shape){3, 1, 8, 6}, 2, 4, 4);
    struct draw_move move = {.erase = {{1, 2, 3, 4}, 9, 2, 7}};
    float values[144], before[144];
    data_gather(&data, data_sample(&data, DATA_TRAIN, 0), (struct draw_move){0}, before);
    data_gather(&data, data_sample(&data, DATA_TRAIN, 0), move, values);
    for (uint32_t i = 0; i < 144; i++) {
        uint32_t y = i / 6 % 8, x = i % 6;
        bool inside = x >= 1 && x < 4 && y >= 2 && y < 6;
        struct philox_block block = philox(philox_key(7), i / 4, 9, 2, DRAW_NOISE);
        cr_expect_eq(values[i], inside ? box_normal(block.word[i % 4]) : before[i], "%u", i);
    }
    data_close(&data);
}

/* ---- Crop and resize ---- */

/* A plan for canvases of one size and images of another size. */
static struct augment_plan plan_of(struct shape canvas, struct shape shape, bool crop, bool bicubic)
{
    struct augment_plan plan = {.seed = 5, .samples = 1000, .canvas = canvas, .shape = shape, .crop = crop};
    plan.bicubic = bicubic;
    plan.flip = true;
    return plan;
}

static double filter(bool bicubic, double x)
{
    x = fabs(x);
    if (!bicubic)
        return x < 1 ? 1 - x : 0;
    return x < 1 ? 1.5 * x * x * x - 2.5 * x * x + 1 : x < 2 ? -0.5 * x * x * x + 2.5 * x * x - 4 * x + 2 : 0;
}

/* Resizes one line of values in double precision, and rounds the results. `stride` and `out_stride` are the
 * distances between consecutive values in `from` and `to`. */
static void resize_line(const uint8_t *from, uint32_t in, size_t stride, uint8_t *to, uint32_t out,
                        size_t out_stride, bool bicubic)
{
    double scale = in > out ? (double)in / out : 1, reach = (bicubic ? 2 : 1) * scale;
    for (uint32_t i = 0; i < out; i++) {
        double centre = (i + 0.5) * in / out, total = 0, sum = 0;
        for (uint32_t x = 0; x < in; x++) {
            if ((double)x < floor(centre - reach + 0.5) || (double)x >= floor(centre + reach + 0.5))
                continue; /* Pillow sums only between these limits */
            double weight = filter(bicubic, (x + 0.5 - centre) / scale);
            total += weight;
            sum += weight * from[x * stride];
        }
        to[i * out_stride] = (uint8_t)clamp(floor(sum / total + 0.5));
    }
}

static void resize_right(const struct augment_plan *plan, const uint8_t *stored, struct image_box box,
                         bool flip, uint8_t *image)
{
    const struct shape *canvas = &plan->canvas, *shape = &plan->shape;
    uint8_t *rows = malloc((size_t)box.height * shape->width), *line = malloc(shape->height);
    for (uint32_t c = 0; c < shape->channels; c++) {
        const uint8_t *plane =
            stored + (size_t)(canvas->channels == 1 ? 0 : c) * canvas->height * canvas->width;
        for (uint32_t y = 0; y < box.height; y++)
            resize_line(plane + (box.top + y) * canvas->width + box.left, box.width, 1,
                        rows + (size_t)y * shape->width, shape->width, 1, plan->bicubic);
        for (uint32_t x = 0; x < shape->width; x++) {
            uint32_t to = flip ? shape->width - 1 - x : x;
            resize_line(rows + x, box.height, shape->width,
                        image + (size_t)c * shape->height * shape->width + to, shape->height, shape->width,
                        plan->bicubic);
        }
    }
    free(rows);
    free(line);
}

/* The passes along both axes round, and ties are frequent. So the rounded weights of augment_image() may
 * change a value by one. */
static void check_resize(const struct augment_plan *plan)
{
    size_t values = shape_values(&plan->shape);
    uint8_t *stored = malloc(shape_values(&plan->canvas)), *mine = malloc(values), *right = malloc(values);
    struct augment_scratch scratch = {0};
    fill(stored, shape_values(&plan->canvas), 1);
    must(augment_scratch_open(plan, &scratch));
    size_t differ = 0, all = 0;
    for (uint32_t sample = 0; sample < 8; sample++) {
        augment_image(plan, stored, 2, sample, &scratch, mine);
        resize_right(plan, stored, augment_box(plan, 2, sample), augment_flips(plan, 2, sample), right);
        for (size_t i = 0; i < values; i++, all++) {
            differ += mine[i] != right[i];
            cr_assert(abs(mine[i] - right[i]) <= 1, "%ux%u to %ux%u, value %zu: %d, not %d",
                      plan->canvas.height, plan->canvas.width, plan->shape.height, plan->shape.width, i,
                      mine[i], right[i]);
        }
    }
    cr_expect(differ <= all / 20 + 1, "%zu of %zu differ", differ, all);
    augment_scratch_close(&scratch);
    free(stored);
    free(mine);
    free(right);
}

Test(augment, crops_are_resized_by_both_filters_at_any_size)
{
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        for (size_t o = 0; o < COUNT_OF(sizes); o++)
            for (int kind = 0; kind < 4; kind++) {
                struct shape canvas = {kind & 1 ? 3 : 1, 1, sizes[i][0], sizes[i][1]};
                struct shape shape = {3, 1, sizes[o][0], sizes[o][1]};
                struct augment_plan plan = plan_of(canvas, shape, true, kind & 2);
                check_resize(&plan);
            }
}

/* augment_image() must be bit-identical to the resizer of --out-res (data/resample.h). */
static void compare_with_resizer(bool bicubic)
{
    struct augment_plan plan =
        plan_of((struct shape){1, 1, 90, 75}, (struct shape){1, 1, 40, 41}, true, bicubic);
    uint8_t stored[90 * 75], mine[40 * 41], right[3 * 40 * 41 + RESAMPLE_SLACK_BYTES];
    uint8_t row[75 * RESAMPLE_PIXEL_BYTES + RESAMPLE_SLACK_BYTES] = {0};
    struct augment_scratch scratch = {0};
    struct resampler resampler = {0};
    fill(stored, sizeof stored, 1);
    plan.flip = false;
    must(augment_scratch_open(&plan, &scratch));
    for (uint32_t sample = 0; sample < 20; sample++) {
        struct image_box box = augment_box(&plan, 0, sample);
        augment_image(&plan, stored, 0, sample, &scratch, mine);
        must(resample_begin(&resampler, box.width, box.height, 41, 40, bicubic));
        for (uint32_t y = 0; y < box.height; y++) {
            for (uint32_t x = 0; x < box.width; x++)
                memset(row + x * RESAMPLE_PIXEL_BYTES, stored[(box.top + y) * 75 + box.left + x], 3);
            resample_rows(&resampler, y, row, 0, 1);
        }
        resample_end(&resampler, right);
        for (uint32_t i = 0; i < sizeof mine; i++)
            cr_assert_eq(mine[i], right[3 * i]);
    }
    augment_scratch_close(&scratch);
    resampler_close(&resampler);
}

Test(augment, both_filters_are_bit_identical_to_those_of_streams)
{
    compare_with_resizer(false);
    compare_with_resizer(true);
}

/* The cropped boxes of a sample differ between epochs and between copies, except for a few coincidences. */
Test(augment, crops_differ_and_have_the_expected_mean_area_and_centre)
{
    struct augment_plan plan = plan_of((struct shape){1, 1, 64, 64}, (struct shape){1, 1, 8, 8}, true, false);
    uint32_t same = 0, flips = 0;
    double area = 0, x = 0;
    for (uint32_t sample = 0; sample < 4000; sample++) {
        struct image_box box = augment_box(&plan, 1, sample), other = augment_box(&plan, 2, sample),
                         copy = augment_box(&plan, 1, sample + plan.samples * 4);
        cr_assert(box.left + box.width <= 64 && box.top + box.height <= 64);
        same += memcmp(&box, &other, sizeof box) == 0;
        same += memcmp(&box, &copy, sizeof box) == 0;
        area += box.width * box.height / (4000 * 4096.0);
        x += (box.left + box.width / 2.0) / 4000;
        flips += augment_flips(&plan, 1, sample);
    }
    cr_expect(same < 8, "%u", same);
    cr_expect(area > 0.45 && area < 0.6, "%g", area);
    cr_expect_float_eq(x, 32, 0.5);
    cr_expect(flips > 1850 && flips < 2150, "%u", flips);
}

/* ---- RandAugment ---- */

static const struct augment_policy torchvision = {.kind = AUGMENT_TORCHVISION};

static double gray_of(const struct shape *shape, const uint8_t *image, uint32_t i)
{
    uint32_t plane = shape->height * shape->width;
    return shape->channels == 1 ? image[i]
                                : 0.299 * image[i] + 0.587 * image[plane + i] + 0.114 * image[2 * plane + i];
}

/* Returns the value of a plane at (x, y), or 0 (black) outside the plane. */
static double at(const uint8_t *plane, const struct shape *shape, double y, double x)
{
    return y < 0 || x < 0 || y >= shape->height || x >= shape->width
               ? 0
               : plane[(uint32_t)y * shape->width + (uint32_t)x];
}

static double interpolated(const uint8_t *plane, const struct shape *shape, double y, double x)
{
    double top = floor(y), left = floor(x), low = y - top, right = x - left;
    return (1 - low) * ((1 - right) * at(plane, shape, top, left) + right * at(plane, shape, top, left + 1)) +
           low *
               ((1 - right) * at(plane, shape, top + 1, left) + right * at(plane, shape, top + 1, left + 1));
}

/* Replaces the position (x, y) in the output by its position in the input. Shears do not move the top left
 * corner of the image, which is at (-1/2, -1/2). */
static void source_of(enum augment_operation operation, double m, const struct shape *shape, double *y,
                      double *x)
{
    double middle_x = (shape->width - 1) / 2.0, middle_y = (shape->height - 1) / 2.0;
    double angle = -30 * m * acos(-1) / 180, dx = *x - middle_x, dy = *y - middle_y;
    if (operation == AUGMENT_SHEAR_X)
        *x += 0.3 * m * (*y + 0.5);
    if (operation == AUGMENT_SHEAR_Y)
        *y += 0.3 * m * (*x + 0.5);
    if (operation == AUGMENT_TRANSLATE_X)
        *x -= 150 / 331.0 * m * shape->width;
    if (operation == AUGMENT_TRANSLATE_Y)
        *y -= 150 / 331.0 * m * shape->height;
    if (operation == AUGMENT_ROTATE) {
        *x = middle_x + cos(angle) * dx + sin(angle) * dy;
        *y = middle_y - sin(angle) * dx + cos(angle) * dy;
    }
}

static double smoothed(const uint8_t *plane, const struct shape *shape, uint32_t y, uint32_t x)
{
    double sum = 4.0 * plane[y * shape->width + x];
    if (y == 0 || x == 0 || y + 1 == shape->height || x + 1 == shape->width)
        return plane[y * shape->width + x];
    for (int i = 0; i < 9; i++)
        sum += plane[(y + (uint32_t)(i / 3) - 1) * shape->width + x + (uint32_t)(i % 3) - 1];
    return sum / 13;
}

/* Returns the value that equalize maps `value` to, as defined by the PyTorch version of the recipe. */
static double equalized(const uint8_t *plane, uint32_t pixels, uint32_t value)
{
    uint32_t below = 0, largest = 0, count = 0;
    for (uint32_t i = 0; i < pixels; i++) {
        below += plane[i] < value;
        largest = plane[i] > largest ? plane[i] : largest;
    }
    for (uint32_t i = 0; i < pixels; i++)
        count += plane[i] == largest;
    double step = floor((pixels - count) / 255.0);
    return step == 0 ? value : fmin(255, floor((below + floor(step / 2)) / step));
}

/* Returns the value that autocontrast maps `value` to, before rounding. */
static double contrasted(const uint8_t *plane, uint32_t pixels, uint32_t value)
{
    double low = 255, high = 0;
    for (uint32_t i = 0; i < pixels; i++) {
        low = fmin(low, plane[i]);
        high = fmax(high, plane[i]);
    }
    return high > low ? (value - low) * 255 / (high - low) : value;
}

/* Returns the result of an operation before rounding; `m` is the signed magnitude from -1 to 1. */
static double changed(enum augment_operation operation, double m, const struct shape *shape,
                      const uint8_t *image, uint32_t c, uint32_t y, uint32_t x)
{
    uint32_t pixels = shape->height * shape->width, i = y * shape->width + x;
    const uint8_t *plane = image + (size_t)c * pixels;
    double value = plane[i], other = 0, from_y = y, from_x = x, mean = 0;
    switch (operation) {
    case AUGMENT_POSTERIZE: {
        double unit = pow(2, rint(4 * fabs(m)));
        return floor(value / unit) * unit;
    }
    case AUGMENT_SOLARIZE:
        return value >= 255 * (1 - fabs(m)) ? 255 - value : value;
    case AUGMENT_AUTOCONTRAST:
        return contrasted(plane, pixels, plane[i]);
    case AUGMENT_EQUALIZE:
        return equalized(plane, pixels, plane[i]);
    case AUGMENT_IDENTITY:
        return value;
    case AUGMENT_BRIGHTNESS:
        break;
    case AUGMENT_COLOR:
        other = gray_of(shape, image, i);
        break;
    case AUGMENT_CONTRAST:
        for (uint32_t k = 0; k < pixels; k++)
            mean += gray_of(shape, image, k) / pixels;
        other = mean;
        break;
    case AUGMENT_SHARPNESS:
        other = smoothed(plane, shape, y, x);
        break;
    default:
        source_of(operation, m, shape, &from_y, &from_x);
        return interpolated(plane, shape, from_y, from_x);
    }
    return other + (1 + 0.9 * m) * (value - other);
}

/* Compares an operation with its definition. The tolerance is 0.501, because a value near a tie may be
 * rounded up or down. */
static void check_operation(enum augment_operation operation, bool negative, double magnitude,
                            const struct shape *shape)
{
    size_t values = shape_values(shape);
    uint8_t *image = malloc(values), *mine = malloc(values);
    struct augment_numbers numbers =
        augment_numbers(&torchvision, operation, negative ? AUGMENT_MINUS : AUGMENT_PLUS, magnitude, shape);
    fill(image, values, 2);
    augment_apply(shape, operation, &numbers, image, mine);
    for (uint32_t i = 0; i < values; i++) {
        uint32_t plane = shape->height * shape->width, c = i / plane, y = i % plane / shape->width;
        double right =
            changed(operation, (negative ? -1 : 1) * magnitude / 30, shape, image, c, y, i % shape->width);
        right = right < 0 ? 0 : right > 255 ? 255 : right;
        cr_assert(fabs(mine[i] - right) <= 0.501,
                  "operation %d, magnitude %g, %ux%ux%u, value %u: %d, not %g", (int)operation,
                  negative ? -magnitude : magnitude, shape->channels, shape->height, shape->width, i, mine[i],
                  right);
    }
    free(image);
    free(mine);
}

Test(augment, operations_follow_their_definitions_at_any_size)
{
    static const double magnitudes[] = {0, 9, 15.5, 28, 30};
    for (int operation = 0; operation < AUGMENT_OLD; operation++)
        for (size_t m = 0; m < COUNT_OF(magnitudes); m++)
            for (size_t s = 0; s < COUNT_OF(sizes); s++)
                for (int kind = 0; kind < 4; kind++)
                    check_operation((enum augment_operation)operation, kind & 1, magnitudes[m],
                                    &(struct shape){kind & 2 ? 3 : 1, 1, sizes[s][0], sizes[s][1]});
}

/* Autocontrast and equalize have no magnitude, so they are not tested here. */
Test(augment, operations_of_magnitude_0_change_nothing)
{
    const struct shape shape = {3, 1, 17, 13};
    uint8_t image[3 * 17 * 13], mine[sizeof image];
    fill(image, sizeof image, 4);
    /* At magnitude 0, solarize still inverts the value 255. */
    for (size_t i = 0; i < sizeof image; i++)
        image[i] = image[i] == 255 ? 254 : image[i];
    for (int operation = 0; operation < AUGMENT_AUTOCONTRAST; operation++) {
        struct augment_numbers numbers =
            augment_numbers(&torchvision, (enum augment_operation)operation, AUGMENT_PLUS, 0, &shape);
        augment_apply(&shape, (enum augment_operation)operation, &numbers, image, mine);
        cr_expect_eq(memcmp(image, mine, sizeof image), 0, "%d", operation);
    }
}

static void expect_values(enum augment_operation operation, double magnitude, uint32_t width,
                          const uint8_t *image, const uint8_t *right)
{
    const struct shape shape = {1, 1, 1, width};
    const struct augment_numbers numbers =
        augment_numbers(&torchvision, operation, AUGMENT_PLUS, magnitude, &shape);
    uint8_t mine[8];
    augment_apply(&shape, operation, &numbers, image, mine);
    for (uint32_t i = 0; i < width; i++)
        cr_expect_eq(mine[i], right[i], "operation %d, %u: %d, not %d", (int)operation, i, mine[i], right[i]);
}

Test(augment, operations_give_the_values_computed_by_hand)
{
    expect_values(AUGMENT_POSTERIZE, 30, 4, (const uint8_t[]){0, 15, 16, 255},
                  (const uint8_t[]){0, 0, 16, 240});
    expect_values(AUGMENT_POSTERIZE, 10, 3, (const uint8_t[]){1, 2, 255}, (const uint8_t[]){0, 2, 254});
    expect_values(AUGMENT_SOLARIZE, 15, 4, (const uint8_t[]){0, 127, 128, 255},
                  (const uint8_t[]){0, 127, 127, 0});
    expect_values(AUGMENT_AUTOCONTRAST, 0, 3, (const uint8_t[]){10, 20, 30}, (const uint8_t[]){0, 128, 255});
    expect_values(AUGMENT_AUTOCONTRAST, 0, 2, (const uint8_t[]){7, 7}, (const uint8_t[]){7, 7});
    expect_values(AUGMENT_BRIGHTNESS, 30, 3, (const uint8_t[]){0, 100, 200}, (const uint8_t[]){0, 190, 255});
    expect_values(AUGMENT_TRANSLATE_X, 30 * 331 / 300.0 * 2 / 4, 4, (const uint8_t[]){1, 2, 3, 4},
                  (const uint8_t[]){0, 1, 2, 3});
    expect_values(AUGMENT_EQUALIZE, 0, 2, (const uint8_t[]){3, 9}, (const uint8_t[]){3, 9});
    expect_values(AUGMENT_INVERT, 0, 3, (const uint8_t[]){0, 100, 255}, (const uint8_t[]){255, 155, 0});
}

/* At magnitude 0, the published class clears all bits, and inverts all values; it moves by whole pixels, and
 * fills with 128. */
Test(augment, the_class_of_pdp2026_gives_the_values_computed_by_hand)
{
    static const struct {
        enum augment_operation operation;
        enum augment_strength strength;
        double magnitude;
        uint8_t right[4];
    } cases[] = {
        {AUGMENT_POSTERIZE, AUGMENT_OFF, 28, {0, 0, 0, 0}},
        {AUGMENT_SOLARIZE, AUGMENT_OFF, 28, {254, 155, 55, 0}},
        {AUGMENT_BRIGHTNESS, AUGMENT_OFF, 28, {1, 100, 200, 255}},
        {AUGMENT_INVERT, AUGMENT_OFF, 28, {254, 155, 55, 0}},
        {AUGMENT_POSTERIZE, AUGMENT_PLUS, 28, {0, 96, 192, 240}},
        {AUGMENT_TRANSLATE_X, AUGMENT_PLUS, 30, {128, 1, 100, 200}}, /* 1.81 pixels, rounded to 1 */
        {AUGMENT_TRANSLATE_X, AUGMENT_MINUS, 30, {100, 200, 255, 128}},
        {AUGMENT_TRANSLATE_X, AUGMENT_OFF, 30, {1, 100, 200, 255}},
        {AUGMENT_TRANSLATE_Y, AUGMENT_PLUS, 30, {1, 100, 200, 255}}, /* 0.45 pixels, rounded to 0 */
    };
    const struct augment_policy policy = {
        .kind = AUGMENT_PDP2026, .fill = {128, 128, 128}, .probability = 0.5};
    const struct shape shape = {1, 1, 1, 4};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct augment_numbers numbers =
            augment_numbers(&policy, cases[i].operation, cases[i].strength, cases[i].magnitude, &shape);
        uint8_t mine[4];
        augment_apply(&shape, cases[i].operation, &numbers, (const uint8_t[]){1, 100, 200, 255}, mine);
        cr_expect_arr_eq(mine, cases[i].right, 4, "case %zu: %d %d %d %d", i, mine[0], mine[1], mine[2],
                         mine[3]);
    }
}

/* The image has 512 values of 0 and 256 of 100, so the step of equalize is (768 - 256) / 255, rounded down to
 * 2. */
Test(augment, equalize_gives_the_values_computed_by_hand)
{
    const struct shape shape = {1, 1, 3, 256};
    const struct augment_numbers numbers =
        augment_numbers(&torchvision, AUGMENT_EQUALIZE, AUGMENT_PLUS, 0, &shape);
    uint8_t image[768] = {0}, mine[768];
    memset(image + 512, 100, 256);
    augment_apply(&shape, AUGMENT_EQUALIZE, &numbers, image, mine);
    cr_expect(mine[0] == 0 && mine[767] == 255, "%d %d", mine[0], mine[767]);
}

/* Counts how often a policy draws each operation, and with which strength. */
static void count_draws(const struct rand_augment *rand, uint32_t drawn[AUGMENT_OPERATIONS][3])
{
    const struct shape shape = {3, 1, 40, 40};
    for (uint32_t sample = 0; sample < 3000; sample++)
        for (uint32_t i = 0; i < 2; i++) {
            struct augment_numbers numbers;
            const enum augment_operation operation =
                rand_augment_draw(rand, &shape, 1, 3, sample, i, &numbers);
            drawn[operation][numbers.factor > 1   ? AUGMENT_PLUS
                             : numbers.factor < 1 ? AUGMENT_MINUS
                                                  : AUGMENT_OFF]++;
        }
}

/* torchvision: 14 operations with two signs. PDP 2026: also invert, and half of them with the magnitude 0.
 * timm: no identity but solarize-add; half of all are not applied. */
Test(augment, policies_draw_their_operations_with_their_probabilities)
{
    uint32_t drawn[3][AUGMENT_OPERATIONS][3] = {{{0}}};
    for (int kind = 0; kind < 3; kind++) {
        const struct augment_policy policy = {
            .kind = (enum augment_policy_kind)kind, .probability = 0.5, .increasing = true, .limit = 10};
        count_draws(&(struct rand_augment){2, 9, policy}, drawn[kind]);
    }
    for (int i = 0; i < AUGMENT_OPERATIONS; i++) {
        const uint32_t *old = drawn[AUGMENT_TORCHVISION][i], *pdp = drawn[AUGMENT_PDP2026][i],
                       *timm = drawn[AUGMENT_TIMM][i];
        for (int sign = 0; sign < 2; sign++)
            cr_expect(i < AUGMENT_OLD ? old[sign] > 160 && old[sign] < 270 : old[sign] == 0, "%d: %u", i,
                      old[sign]);
        cr_expect(i == AUGMENT_SOLARIZE_ADD ? pdp[2] + pdp[0] == 0 : pdp[2] > 150 && pdp[2] < 250, "%d: %u",
                  i, pdp[2]);
        cr_expect(i == AUGMENT_SOLARIZE_ADD || (pdp[0] > 60 && pdp[0] < 145 && pdp[1] > 60), "%d", i);
        cr_expect(i == AUGMENT_IDENTITY ? timm[0] + timm[1] == 0 : timm[0] > 60 && timm[1] < 145, "%d", i);
        cr_expect(i == AUGMENT_IDENTITY ? timm[2] > 2800 && timm[2] < 3200 : timm[2] == 0, "%d", i);
    }
}

/* The magnitudes of rand-m9-mstd0.5 are normal and cut off at 10; those of an infinite deviation are uniform.
 * The factor of brightness has the magnitude: 1 + 0.09 times it. */
Test(augment, magnitudes_have_the_distribution_of_timm)
{
    struct augment_policy policy = {
        .kind = AUGMENT_TIMM, .probability = 1, .deviation = 0.5, .limit = 10, .increasing = true};
    double sum = 0, squares = 0, uniform = 0;
    uint32_t above = 0, cut = 0;
    for (uint32_t i = 0; i < 20000; i++) {
        const uint32_t word = philox(philox_key(9), i, 0, 0, 0).word[0];
        const double level = augment_magnitude(&(struct rand_augment){2, 9, policy}, word);
        sum += level;
        squares += (level - 9) * (level - 9);
        above += level > 9.5;
        cut += level == 10;
        policy.deviation = 101;
        uniform += augment_magnitude(&(struct rand_augment){2, 9, policy}, word);
        policy.deviation = 0.5;
    }
    cr_expect_float_eq(sum / 20000, 9, 0.02);
    cr_expect_float_eq(sqrt(squares / 20000), 0.5, 0.02);
    cr_expect_float_eq(above / 20000.0, 0.1587, 0.01);
    cr_expect_float_eq(cut / 20000.0, 0.0228, 0.005);
    cr_expect_float_eq(uniform / 20000, 4.5, 0.05);
}

/* torchvision: RandomResizedCrop draws an area and an aspect ratio up to ten times, then takes the largest
 * box at the centre. Compares the distribution with that algorithm, in double, with its own random numbers.
 */
Test(augment, boxes_have_the_distribution_of_torchvision)
{
    static const uint32_t canvases[][2] = {{224, 224}, {60, 97}, {31, 200}, {5, 3}, {224, 190}, {33, 300}};
    static const double scale[] = {0.2, 0.7}, shape[] = {0.5, 1.25};
    static const char *const names[] = {"scale", "ratio"};
    struct crop_range ranges[2] = {0};
    must(crop_range_set(names, scale, shape, &ranges[1]));
    for (size_t k = 0; k < COUNT_OF(canvases); k++) {
        const size_t r = k / 4;
        const double areas[] = {r ? scale[0] : 0.08, r ? scale[1] : 1};
        const double ratios[] = {r ? shape[0] : 3.0 / 4, r ? shape[1] : 4.0 / 3};
        const uint32_t height = canvases[k][0], width = canvases[k][1], count = 20000;
        double mine[4] = {0}, theirs[4] = {0};
        uint64_t state = 7;
        for (uint32_t i = 0; i < count; i++) {
            const struct image_box box = box_random_resized(&ranges[r], 3, width, height, 0, i);
            double w = 0, h = 0, left = 0;
            for (int attempt = 0; attempt < 10 && w == 0; attempt++) {
                double u[3];
                for (int j = 0; j < 3; j++) { /* Knuth's linear congruential generator */
                    state = state * 6364136223846793005u + 1442695040888963407u;
                    u[j] = (double)(state >> 11) * 0x1p-53;
                }
                const double area = height * width * (areas[0] + (areas[1] - areas[0]) * u[0]);
                const double ratio = exp(log(ratios[0]) + u[1] * (log(ratios[1]) - log(ratios[0])));
                const double wide = rint(sqrt(area * ratio)), tall = rint(sqrt(area / ratio));
                if (wide > 0 && wide <= width && tall > 0 && tall <= height) {
                    w = wide;
                    h = tall;
                    left = floor(u[2] * (width - w + 1));
                }
            }
            if (w == 0) {
                const double ratio = (double)width / height;
                w = ratio > ratios[1] ? rint(height * ratios[1]) : width;
                h = ratio < ratios[0] ? rint(width / ratios[0]) : height;
                left = floor((width - w) / 2);
            }
            const double own[] = {box.width, box.height, (double)box.width * box.height, box.left};
            const double other[] = {w, h, w * h, left};
            for (int j = 0; j < 4; j++) {
                mine[j] += own[j] / count;
                theirs[j] += other[j] / count;
            }
        }
        for (int j = 0; j < 4; j++)
            cr_expect(fabs(mine[j] - theirs[j]) < 0.02 * theirs[j] + 0.02, "%ux%u, %d: %g, not %g", height,
                      width, j, mine[j], theirs[j]);
    }
}

Test(augment, a_gray_canvas_becomes_three_equal_channels_before_its_operations)
{
    struct augment_plan plan =
        plan_of((struct shape){1, 1, 33, 31}, (struct shape){3, 1, 12, 12}, true, true);
    uint8_t stored[33 * 31], image[3 * 144];
    struct augment_scratch scratch = {0};
    fill(stored, sizeof stored, 1);
    must(augment_scratch_open(&plan, &scratch));
    augment_image(&plan, stored, 0, 1, &scratch, image);
    cr_expect(memcmp(image, image + 144, 144) == 0 && memcmp(image, image + 288, 144) == 0);
    augment_scratch_close(&scratch);
}
