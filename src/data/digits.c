/* The source `digits`: an unlimited number of images of 28 x 28 bytes in ten classes. Each image shows a
 * digit drawn as a stroke, with affine jitter and noise. Sample n shows digit n mod 10 and is a pure function
 * of (seed, n). The code uses no libm function except the square root, so the pixels are bit-identical on
 * every machine. */
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "data/draws.h"
#include "data/npy.h"
#include "data/source.h"

#define SIDE       28
#define CLASSES    10
#define POINTS_MAX 17
#define NOISE      40 /* largest noise added to or subtracted from a pixel */

struct point {
    float x, y; /* rightwards and downwards, from 0 to 1 */
};

/* Each digit is one stroke: the number of points, then x and y of each point in hundredths of the side. */
static const struct {
    uint8_t count, points[2 * POINTS_MAX];
} strokes[CLASSES] = {
    {13, {78, 50, 74, 70, 64, 85, 50, 90, 36, 85, 26, 70, 22,
          50, 26, 30, 36, 15, 50, 10, 64, 15, 74, 30, 78, 50}},
    {3, {35, 28, 52, 10, 52, 90}},
    {9, {25, 30, 32, 15, 50, 10, 68, 16, 73, 32, 64, 50, 42, 70, 24, 90, 77, 90}},
    {11, {27, 17, 45, 10, 66, 15, 72, 30, 63, 44, 44, 48, 65, 53, 75, 68, 68, 84, 48, 91, 25, 83}},
    {4, {62, 90, 62, 10, 22, 65, 80, 65}},
    {9, {72, 10, 33, 10, 29, 46, 50, 41, 69, 50, 75, 67, 67, 84, 47, 91, 25, 83}},
    {11, {66, 12, 45, 25, 30, 48, 26, 68, 34, 86, 52, 91, 69, 83, 73, 66, 63, 52, 46, 50, 30, 60}},
    {4, {24, 10, 77, 10, 58, 45, 45, 90}},
    {17, {50, 48, 33, 40, 29, 26, 37, 13, 50, 10, 63, 13, 71, 26, 67, 40, 50,
          48, 30, 57, 24, 72, 33, 87, 50, 91, 67, 87, 76, 72, 70, 57, 50, 48}},
    {11, {70, 40, 54, 50, 37, 48, 27, 34, 31, 17, 48, 9, 64, 14, 72, 32, 70, 52, 60, 75, 42, 90}},
};

/* The random numbers of a sample come from consecutive Philox blocks. */
struct pen {
    uint64_t seed, number;
    uint32_t next; /* next block */
};

static struct philox_block pen_block(struct pen *pen)
{
    return philox(philox_key(pen->seed), (uint32_t)pen->number, (uint32_t)(pen->number >> 32), pen->next++,
                  DRAW_DIGIT);
}

/* Maps a random word uniformly to [low, high). Rounding can also give `high`. */
static float between(uint32_t word, float low, float high)
{
    return low + philox_unit(word) * (high - low);
}

/* Computes the points of the sample's stroke, with jitter. Returns their number. */
static int place_points(struct pen *pen, struct point points[POINTS_MAX])
{
    int digit = (int)(pen->number % CLASSES), count = strokes[digit].count;
    struct philox_block one = pen_block(pen), two = pen_block(pen);
    float t = between(one.word[0], -0.15f,
                      0.15f); /* tan(angle / 2) of the rotation; the angle is at most 17.1 degrees */
    float cosine = (1 - t * t) / (1 + t * t), sine = 2 * t / (1 + t * t),
          shear = between(one.word[1], -0.25f, 0.25f);
    float width = between(one.word[2], 0.65f, 1.0f), height = between(one.word[3], 0.7f, 1.0f);
    float right = between(two.word[0], -0.1f, 0.1f), down = between(two.word[1], -0.1f, 0.1f);
    for (int i = 0; i < count; i++) {
        struct philox_block wobble = pen_block(pen);
        float x = strokes[digit].points[2 * i] / 100.0f - 0.5f + between(wobble.word[0], -0.03f, 0.03f);
        float y = strokes[digit].points[2 * i + 1] / 100.0f - 0.5f + between(wobble.word[1], -0.03f, 0.03f);
        x = x * width + shear * y;
        y = y * height;
        points[i] = (struct point){0.5f + right + cosine * x - sine * y, 0.5f + down + sine * x + cosine * y};
    }
    return count;
}

/* Returns the squared distance of p from the line segment between a and b. */
static float distance2(struct point p, struct point a, struct point b)
{
    float x = b.x - a.x, y = b.y - a.y, length2 = x * x + y * y;
    float along = length2 > 0 ? ((p.x - a.x) * x + (p.y - a.y) * y) / length2 : 0;
    along = along < 0 ? 0 : along > 1 ? 1 : along;
    float dx = p.x - a.x - along * x, dy = p.y - a.y - along * y;
    return dx * dx + dy * dy;
}

static void draw_digit(uint64_t seed, uint64_t number, uint8_t pixels[SIDE * SIDE])
{
    struct pen pen = {seed, number, 0};
    struct point points[POINTS_MAX];
    int count = place_points(&pen, points);
    struct philox_block ink = pen_block(&pen), noise = {{0}};
    float half_width = between(ink.word[0], 0.025f, 0.06f), level = between(ink.word[1], 150, 255);
    for (uint32_t i = 0; i < SIDE * SIDE; i++) {
        struct point p = {((float)(i % SIDE) + 0.5f) / SIDE, ((float)(i / SIDE) + 0.5f) / SIDE};
        float nearest2 = 4;
        for (int s = 0; s + 1 < count; s++) {
            float d2 = distance2(p, points[s], points[s + 1]);
            nearest2 = d2 < nearest2 ? d2 : nearest2;
        }
        float cover = 0.5f + (half_width - sqrtf(nearest2)) * SIDE;
        cover = cover < 0 ? 0 : cover > 1 ? 1 : cover;
        if (i % 4 == 0)
            noise = pen_block(&pen);
        float value = cover * level + between(philox_word(noise, i % 4), -NOISE, NOISE);
        pixels[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

/* ---- The source ---- */

static uint64_t digits_label(const void *state, uint64_t number)
{
    (void)state;
    return number % CLASSES;
}

static enum status make_one(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct generated_values *parameters = state;
    const struct png_shape shape = {SIDE, SIDE, 1};
    uint8_t pixels[SIDE * SIDE];
    draw_digit(parameters->seed, number, pixels);
    TRY(source_add_label(sample, digits_label(state, number)));
    return parameters->encoding == SOURCE_NPY
               ? source_add_array(sample, "|u1", "28, 28", pixels, sizeof pixels, NULL)
               : source_add_image(sample, parameters->encoding, pixels, &shape);
}

static enum status digits_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes = SIDE * SIDE + NPY_HEADER_MAX;
    struct generated_values *parameters = *state = calloc(1, sizeof *parameters);
    TRY(ALLOCATED(parameters, "out of memory"));
    *parameters = *(const struct generated_values *)request->parameters;
    return STATUS_OK;
}

#define AT(field) offsetof(struct generated_values, field)
static const struct option_spec options[] = {
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "seed of all digits"},
    {"encode", "KIND", OPTION_CHOICE, AT(encoding), .fallback = "png", .choices = source_encodings,
     .column = COLUMN, .help = "file format of an image. jpeg has quality 90. KIND is one of"},
};

const struct source source_digits = {
    .name = "digits",
    .summary = "generated digits, drawn as strokes",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct generated_values),
    .columns = source_label_columns,
    .open = digits_open,
    .close = free,
    .make_one = make_one,
    .label = digits_label,
};
