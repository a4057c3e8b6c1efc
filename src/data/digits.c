/* The source `digits`: digits drawn as strokes, with affine jitter and noise, 28 x 28 bytes, ten classes,
 * unlimited. Sample n shows digit n mod 10 and is a pure function of (seed, n). It uses no libm function
 * except the square root, so it is bit-identical on every machine. */
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
#define NOISE      40 /* maximum noise level, in either direction */

struct point {
    float x, y; /* right and down, from 0 to 1 */
};

/* Each digit as a single stroke. */
static const struct {
    struct point points[POINTS_MAX];
    int count;
} strokes[CLASSES] = {
    {{{.78f, .5f},
      {.74f, .7f},
      {.64f, .85f},
      {.5f, .9f},
      {.36f, .85f},
      {.26f, .7f},
      {.22f, .5f},
      {.26f, .3f},
      {.36f, .15f},
      {.5f, .1f},
      {.64f, .15f},
      {.74f, .3f},
      {.78f, .5f}},
     13},
    {{{.35f, .28f}, {.52f, .1f}, {.52f, .9f}}, 3},
    {{{.25f, .3f},
      {.32f, .15f},
      {.5f, .1f},
      {.68f, .16f},
      {.73f, .32f},
      {.64f, .5f},
      {.42f, .7f},
      {.24f, .9f},
      {.77f, .9f}},
     9},
    {{{.27f, .17f},
      {.45f, .1f},
      {.66f, .15f},
      {.72f, .3f},
      {.63f, .44f},
      {.44f, .48f},
      {.65f, .53f},
      {.75f, .68f},
      {.68f, .84f},
      {.48f, .91f},
      {.25f, .83f}},
     11},
    {{{.62f, .9f}, {.62f, .1f}, {.22f, .65f}, {.8f, .65f}}, 4},
    {{{.72f, .1f},
      {.33f, .1f},
      {.29f, .46f},
      {.5f, .41f},
      {.69f, .5f},
      {.75f, .67f},
      {.67f, .84f},
      {.47f, .91f},
      {.25f, .83f}},
     9},
    {{{.66f, .12f},
      {.45f, .25f},
      {.3f, .48f},
      {.26f, .68f},
      {.34f, .86f},
      {.52f, .91f},
      {.69f, .83f},
      {.73f, .66f},
      {.63f, .52f},
      {.46f, .5f},
      {.3f, .6f}},
     11},
    {{{.24f, .1f}, {.77f, .1f}, {.58f, .45f}, {.45f, .9f}}, 4},
    {{{.5f, .48f},
      {.33f, .4f},
      {.29f, .26f},
      {.37f, .13f},
      {.5f, .1f},
      {.63f, .13f},
      {.71f, .26f},
      {.67f, .4f},
      {.5f, .48f},
      {.3f, .57f},
      {.24f, .72f},
      {.33f, .87f},
      {.5f, .91f},
      {.67f, .87f},
      {.76f, .72f},
      {.7f, .57f},
      {.5f, .48f}},
     17},
    {{{.7f, .4f},
      {.54f, .5f},
      {.37f, .48f},
      {.27f, .34f},
      {.31f, .17f},
      {.48f, .09f},
      {.64f, .14f},
      {.72f, .32f},
      {.7f, .52f},
      {.6f, .75f},
      {.42f, .9f}},
     11},
};

/* Random numbers of a sample: consecutive Philox blocks. */
struct pen {
    uint64_t seed, number;
    uint32_t next; /* next block */
};

static struct philox_block pen_block(struct pen *pen)
{
    return philox(philox_key(pen->seed), (uint32_t)pen->number, (uint32_t)(pen->number >> 32), pen->next++,
                  DRAW_DIGIT);
}

/* Maps a random word uniformly to [low, high). */
static float between(uint32_t word, float low, float high)
{
    return low + philox_unit(word) * (high - low);
}

/* Computes the points of the sample's stroke after jitter. */
static int place_points(struct pen *pen, struct point points[POINTS_MAX])
{
    int digit = (int)(pen->number % CLASSES), count = strokes[digit].count;
    struct philox_block one = pen_block(pen), two = pen_block(pen);
    float t = between(one.word[0], -0.15f, 0.15f); /* tangent of half the angle; at most 17 degrees */
    float cosine = (1 - t * t) / (1 + t * t), sine = 2 * t / (1 + t * t),
          shear = between(one.word[1], -0.25f, 0.25f);
    float width = between(one.word[2], 0.65f, 1.0f), height = between(one.word[3], 0.7f, 1.0f);
    float right = between(two.word[0], -0.1f, 0.1f), down = between(two.word[1], -0.1f, 0.1f);
    for (int i = 0; i < count; i++) {
        struct philox_block wobble = pen_block(pen);
        float x = strokes[digit].points[i].x - 0.5f + between(wobble.word[0], -0.03f, 0.03f);
        float y = strokes[digit].points[i].y - 0.5f + between(wobble.word[1], -0.03f, 0.03f);
        x = x * width + shear * y;
        y = y * height;
        points[i] = (struct point){0.5f + right + cosine * x - sine * y, 0.5f + down + sine * x + cosine * y};
    }
    return count;
}

/* Squared distance of p from the line segment between a and b. */
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

struct parameters {
    uint64_t seed;
    int encoding;
};

static uint64_t digits_label(const void *state, uint64_t number)
{
    (void)state;
    return number % CLASSES;
}

static enum status make_one(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct parameters *parameters = state;
    const struct png_shape shape = {SIDE, SIDE, 1};
    uint8_t pixels[SIDE * SIDE];
    draw_digit(parameters->seed, number, pixels);
    TRY(source_add_label(sample, digits_label(state, number)));
    return parameters->encoding == SOURCE_PNG
               ? source_add_png(sample, pixels, &shape)
               : source_add_array(sample, "|u1", "28, 28", pixels, sizeof pixels, NULL);
}

static enum status digits_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes = SIDE * SIDE + NPY_HEADER_MAX;
    *state = request->parameters;
    return STATUS_OK;
}

#define AT(field) offsetof(struct parameters, field)
static const struct option_spec options[] = {
    {"seed", "N", OPTION_COUNT, AT(seed), "0", 0, 18446744073709551615.0, NULL, true, "seed of all digits"},
    {"encode", "KIND", OPTION_CHOICE, AT(encoding), "png", 0, 0, source_encodings, true,
     "encoding of the image"},
};

const struct source source_digits = {
    .name = "digits",
    .summary = "digits drawn as strokes, a training set",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct parameters),
    .columns = source_label_columns,
    .open = digits_open,
    .make_one = make_one,
    .label = digits_label,
};
