/* The sources of generated samples: `counter`, tensors of known content; `digits`, pictures of strokes; and
 * `clips`, moving blobs. Each sample is a pure function of (seed, number), bit-identical on every machine. */
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "core/text.h"
#include "data/npy.h"
#include "data/random_draws.h"
#include "data/source.h"

/* ---- counter ---- */

#define COUNTER_STREAM     0x4C4F4144u
#define COUNTER_AXES_MAX   8
#define COUNTER_VALUES_MAX (UINT64_C(1) << 32)
#define HALF_ONE           0x3C00 /* float16 bit pattern of 1.0 */
#define HALF_FRACTION      0x03FF

/* Computes the values of one block: 16 bytes, 8 float16 or 4 float32. */
static void values_of_block(struct philox_block block, enum dtype type, uint8_t out[16])
{
    for (int i = 0; i < 4; i++) {
        uint32_t word = block.word[i];
        float real = philox_unit(word);
        uint16_t halves[2] = {(uint16_t)(HALF_ONE | (word & HALF_FRACTION)),
                              (uint16_t)(HALF_ONE | (word >> 16 & HALF_FRACTION))};
        if (type == DTYPE_F16)
            memcpy(out + 4 * i, halves, sizeof halves);
        else if (type == DTYPE_F32)
            memcpy(out + 4 * i, &real, sizeof real);
        else
            memcpy(out + 4 * i, &word, sizeof word);
    }
}

void counter_fill(uint64_t seed, uint64_t number, enum dtype type, size_t count, void *values)
{
    size_t bytes = count * dtype_bytes(type);
    for (size_t at = 0; at < bytes; at += 16) {
        uint8_t out[16];
        values_of_block(philox(philox_key(seed), (uint32_t)(at / 16), (uint32_t)number,
                               (uint32_t)(number >> 32), COUNTER_STREAM),
                        type, out);
        memcpy((uint8_t *)values + at, out, bytes - at < 16 ? bytes - at : 16);
    }
}

static const char *const counter_types[] = {"u8", "f16", "f32", NULL}; /* in the order of enum dtype */

static const struct option_spec counter_options[] = {
    {"sample-shape", "N,N,...", OPTION_TEXT, offsetof(struct counter_values, shape), .fallback = "3,8,64,64",
     .column = COLUMN, .help = "shape of each tensor"},
    {"dtype", "TYPE", OPTION_CHOICE, offsetof(struct counter_values, type), .fallback = "f16",
     .choices = counter_types, .column = COLUMN, .help = "type of the values"},
    {"seed", "N", OPTION_COUNT, offsetof(struct counter_values, seed), .fallback = "0",
     .maximum = 18446744073709551615.0, .column = COLUMN, .help = "seed of the values"},
    {"classes", "N", OPTION_COUNT, offsetof(struct counter_values, classes), .fallback = "10",
     .maximum = 2147483647, .column = COLUMN,
     .help = "number of labels: sample n has the label n mod N, so that the set can also be trained on. 0: "
             "no labels"},
};

struct counter {
    struct counter_values parameters;
    size_t values;
    char shape[NPY_SHAPE_MAX]; /* formatted for a .npy header */
};

/* Parses a shape such as "3,8,64,64". */
static enum status read_shape(struct counter *counter)
{
    const char *text = counter->parameters.shape;
    size_t axes = 0;
    uint64_t values = 1;
    while (*text) {
        char word[24] = "";
        uint64_t length;
        size_t bytes = strcspn(text, ",");
        snprintf(word, sizeof word, "%.*s", (int)bytes, text);
        if (bytes >= sizeof word || axes == COUNTER_AXES_MAX)
            return status_set(STATUS_USAGE, "--sample-shape: '%.80s' is not a list of at most %d lengths",
                              counter->parameters.shape, COUNTER_AXES_MAX);
        TRY(parse_count("--sample-shape", word, 1, 4294967295.0, &length));
        if (length > COUNTER_VALUES_MAX / values)
            return status_set(STATUS_USAGE, "--sample-shape %.80s: more than 2^32 values",
                              counter->parameters.shape);
        values *= length;
        text_join(counter->shape, sizeof counter->shape, ", ", "%" PRIu64, length);
        axes++;
        text += bytes;
        if (*text == ',' && *++text == '\0')
            return status_set(STATUS_USAGE,
                              "--sample-shape: '%.80s': a length is missing after the last comma",
                              counter->parameters.shape);
    }
    if (axes == 1)
        text_append(counter->shape, sizeof counter->shape, ",");
    counter->values = (size_t)values;
    return STATUS_OK;
}

static enum status counter_open(const struct source_request *request, struct source_facts *facts,
                                void **state)
{
    struct counter *counter = *state = calloc(1, sizeof *counter);
    TRY(ALLOCATED(counter, "out of memory"));
    counter->parameters = *(const struct counter_values *)request->parameters;
    TRY(read_shape(counter));
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes =
        NPY_HEADER_MAX + counter->values * dtype_bytes((enum dtype)counter->parameters.type);
    return STATUS_OK;
}

static enum status make_counter(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct counter *counter = state;
    enum dtype type = (enum dtype)counter->parameters.type;
    void *values;
    if (counter->parameters.classes)
        TRY(source_add_label(sample, number % counter->parameters.classes));
    TRY(source_add_array(sample, dtype_npy(type), counter->shape, NULL, counter->values * dtype_bytes(type),
                         &values));
    counter_fill(counter->parameters.seed, number, type, counter->values, values);
    return STATUS_OK;
}

static void counter_describe(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX])
{
    (void)state;
    snprintf(texts[0], SOURCE_TEXT_MAX, "%" PRIu64, number);
}

static const char *const counter_columns[] = {"number", NULL};

const struct source source_counter = {
    .name = "counter",
    .summary = "generated tensors of known content",
    .options = counter_options,
    .option_count = COUNT_OF(counter_options),
    .parameters_bytes = sizeof(struct counter_values),
    .columns = counter_columns,
    .open = counter_open,
    .close = free,
    .make_one = make_counter,
    .describe = counter_describe,
};

/* ---- digits and clips ---- */

#define GENERATED_SOURCE(word, about, which)                                                            \
    {                                                                                                   \
        .name = word, .summary = about, .options = which##_options,                                     \
        .option_count = COUNT_OF(which##_options), .parameters_bytes = sizeof(struct generated_values), \
        .columns = source_label_columns, .open = which##_open, .close = free, .make_one = which##_make, \
        .label = which##_label                                                                          \
    }

/* ---- digits ----
 * The source `digits`: an unlimited number of images of 28 x 28 bytes in ten classes. Each image shows a
 * digit drawn as a stroke, with affine jitter and noise. Sample n shows digit n mod 10 and is a pure function
 * of (seed, n). The code uses no libm function except the square root, so the pixels are bit-identical on
 * every machine. */

#define DIGIT_SIDE    28
#define DIGIT_CLASSES 10
#define POINTS_MAX    17
#define DIGIT_NOISE   40 /* largest noise added to or subtracted from a pixel */

struct point {
    float x, y; /* rightwards and downwards, from 0 to 1 */
};

/* Each digit is one stroke: the number of points, then x and y of each point in hundredths of the side. */
static const struct {
    uint8_t count, points[2 * POINTS_MAX];
} strokes[DIGIT_CLASSES] = {
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
    int digit = (int)(pen->number % DIGIT_CLASSES), count = strokes[digit].count;
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

static void draw_digit(uint64_t seed, uint64_t number, uint8_t pixels[DIGIT_SIDE * DIGIT_SIDE])
{
    struct pen pen = {seed, number, 0};
    struct point points[POINTS_MAX];
    int count = place_points(&pen, points);
    struct philox_block ink = pen_block(&pen), noise = {{0}};
    float half_width = between(ink.word[0], 0.025f, 0.06f), level = between(ink.word[1], 150, 255);
    for (uint32_t i = 0; i < DIGIT_SIDE * DIGIT_SIDE; i++) {
        struct point p = {((float)(i % DIGIT_SIDE) + 0.5f) / DIGIT_SIDE,
                          ((float)(i / DIGIT_SIDE) + 0.5f) / DIGIT_SIDE};
        float nearest2 = 4;
        for (int s = 0; s + 1 < count; s++) {
            float d2 = distance2(p, points[s], points[s + 1]);
            nearest2 = d2 < nearest2 ? d2 : nearest2;
        }
        float cover = 0.5f + (half_width - sqrtf(nearest2)) * DIGIT_SIDE;
        cover = cover < 0 ? 0 : cover > 1 ? 1 : cover;
        if (i % 4 == 0)
            noise = pen_block(&pen);
        float value = cover * level + between(philox_word(noise, i % 4), -DIGIT_NOISE, DIGIT_NOISE);
        pixels[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

static uint64_t digits_label(const void *state, uint64_t number)
{
    (void)state;
    return number % DIGIT_CLASSES;
}

static enum status digits_make(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct generated_values *parameters = state;
    const struct png_shape shape = {DIGIT_SIDE, DIGIT_SIDE, 1};
    uint8_t pixels[DIGIT_SIDE * DIGIT_SIDE];
    draw_digit(parameters->seed, number, pixels);
    TRY(source_add_label(sample, digits_label(state, number)));
    return parameters->encoding == SOURCE_NPY
               ? source_add_array(sample, "|u1", "28, 28", pixels, sizeof pixels, NULL)
               : source_add_image(sample, parameters->encoding, pixels, &shape);
}

static enum status digits_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes = DIGIT_SIDE * DIGIT_SIDE + NPY_HEADER_MAX;
    struct generated_values *parameters = *state = calloc(1, sizeof *parameters);
    TRY(ALLOCATED(parameters, "out of memory"));
    *parameters = *(const struct generated_values *)request->parameters;
    return STATUS_OK;
}

static const struct option_spec digits_options[] = {
    {"seed", "N", OPTION_COUNT, offsetof(struct generated_values, seed), .fallback = "0",
     .maximum = 18446744073709551615.0, .column = COLUMN, .help = "seed of all digits"},
    {"encode", "KIND", OPTION_CHOICE, offsetof(struct generated_values, encoding), .fallback = "png",
     .choices = source_encodings, .column = COLUMN,
     .help = "file format of an image. jpeg has quality 90. KIND is one of"},
};

const struct source source_digits = GENERATED_SOURCE("digits", "generated digits, drawn as strokes", digits);

/* ---- clips ----
 * The source `clips`: a blob moves across eight frames of 16 x 16 float16 values. The class is one of eight
 * directions. A single frame shows the position of the blob, but not its movement. Sample n moves in
 * direction n mod 8. Each sample is a pure function of (seed, n), bit-identical on every machine. */

#define CLIP_FRAMES 8
#define CLIP_SIDE   16
#define CLIP_WAYS   8
#define BLOB_RADIUS 2.5f
#define HALF_ONE    0x3C00 /* float16 bit pattern of 1.0; adding i < 1024 gives 1 + i / 1024 */

static struct philox_block draw_clip(uint64_t seed, uint64_t number, uint32_t block)
{
    return philox(philox_key(seed), (uint32_t)number, (uint32_t)(number >> 32), block, DRAW_CLIP);
}

/* The blob's position halfway through the clip, and its movement per frame. */
struct way {
    float x, y, right, down;
};

static struct way way_of(uint64_t seed, uint64_t number)
{
    static const float steps[CLIP_WAYS][2] = {{1, 0},  {0.7f, 0.7f},   {0, 1},  {-0.7f, 0.7f},
                                              {-1, 0}, {-0.7f, -0.7f}, {0, -1}, {0.7f, -0.7f}};
    struct philox_block block = draw_clip(seed, number, 0);
    float speed = 0.6f + 0.5f * philox_unit(block.word[2]);
    const float *step = steps[number % CLIP_WAYS];
    return (struct way){CLIP_SIDE * (0.35f + 0.3f * philox_unit(block.word[0])),
                        CLIP_SIDE * (0.35f + 0.3f * philox_unit(block.word[1])), speed * step[0],
                        speed * step[1]};
}

/* Draws the blob on top of noise. Values are multiples of 1/1024 in [1, 2). */
static void draw_frames(uint64_t seed, uint64_t number, uint16_t *halves)
{
    struct way way = way_of(seed, number);
    struct philox_block noise = {{0}};
    for (uint32_t i = 0; i < CLIP_FRAMES * CLIP_SIDE * CLIP_SIDE; i++) {
        float t = (float)(i / (CLIP_SIDE * CLIP_SIDE)) - 0.5f * (CLIP_FRAMES - 1);
        float x = (float)(i % CLIP_SIDE) + 0.5f - way.x - t * way.right;
        float y = (float)(i / CLIP_SIDE % CLIP_SIDE) + 0.5f - way.y - t * way.down;
        float level = 1 - (x * x + y * y) / (BLOB_RADIUS * BLOB_RADIUS);
        if (i % 4 == 0)
            noise = draw_clip(seed, number, 1 + i / 4);
        float value = (level > 0 ? 0.6f * level : 0) + 0.3f * philox_unit(philox_word(noise, i % 4));
        halves[i] = (uint16_t)(HALF_ONE + (uint16_t)(value * 1024));
    }
}

static uint64_t clips_label(const void *state, uint64_t number)
{
    (void)state;
    return number % CLIP_WAYS;
}

static enum status clips_make(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct generated_values *parameters = state;
    uint16_t halves[CLIP_FRAMES * CLIP_SIDE * CLIP_SIDE];
    draw_frames(parameters->seed, number, halves);
    TRY(source_add_label(sample, clips_label(state, number)));
    return source_add_array(sample, "<f2", "1, 8, 16, 16", halves, sizeof halves, NULL);
}

static enum status clips_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes = 2 * CLIP_FRAMES * CLIP_SIDE * CLIP_SIDE + NPY_HEADER_MAX;
    struct generated_values *parameters = *state = calloc(1, sizeof *parameters);
    TRY(ALLOCATED(parameters, "out of memory"));
    *parameters = *(const struct generated_values *)request->parameters;
    return STATUS_OK;
}

static const struct option_spec clips_options[] = {
    {"seed", "N", OPTION_COUNT, offsetof(struct generated_values, seed), .fallback = "0",
     .maximum = 18446744073709551615.0, .column = COLUMN, .help = "seed of all clips"},
};

const struct source source_clips = GENERATED_SOURCE(
    "clips", "clips of a blob that moves in one of eight directions, f16 (1, 8, 16, 16)", clips);
