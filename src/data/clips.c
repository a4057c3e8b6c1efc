/* The source `clips`: a blob moves across eight frames of 16 x 16 float16 values. The class is one of eight
 * directions. A single frame shows the position of the blob, but not its movement. Sample n moves in
 * direction n mod 8. Each sample is a pure function of (seed, n), bit-identical on every machine. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "data/draws.h"
#include "data/npy.h"
#include "data/source.h"

#define FRAMES   8
#define SIDE     16
#define WAYS     8
#define RADIUS   2.5f
#define HALF_ONE 0x3C00 /* float16 bit pattern of 1.0; adding i < 1024 gives 1 + i / 1024 */

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
    static const float steps[WAYS][2] = {{1, 0},  {0.7f, 0.7f},   {0, 1},  {-0.7f, 0.7f},
                                         {-1, 0}, {-0.7f, -0.7f}, {0, -1}, {0.7f, -0.7f}};
    struct philox_block block = draw_clip(seed, number, 0);
    float speed = 0.6f + 0.5f * philox_unit(block.word[2]);
    const float *step = steps[number % WAYS];
    return (struct way){SIDE * (0.35f + 0.3f * philox_unit(block.word[0])),
                        SIDE * (0.35f + 0.3f * philox_unit(block.word[1])), speed * step[0], speed * step[1]};
}

/* Draws the blob on top of noise. Values are multiples of 1/1024 in [1, 2). */
static void draw_frames(uint64_t seed, uint64_t number, uint16_t *halves)
{
    struct way way = way_of(seed, number);
    struct philox_block noise = {{0}};
    for (uint32_t i = 0; i < FRAMES * SIDE * SIDE; i++) {
        float t = (float)(i / (SIDE * SIDE)) - 0.5f * (FRAMES - 1);
        float x = (float)(i % SIDE) + 0.5f - way.x - t * way.right;
        float y = (float)(i / SIDE % SIDE) + 0.5f - way.y - t * way.down;
        float level = 1 - (x * x + y * y) / (RADIUS * RADIUS);
        if (i % 4 == 0)
            noise = draw_clip(seed, number, 1 + i / 4);
        float value = (level > 0 ? 0.6f * level : 0) + 0.3f * philox_unit(philox_word(noise, i % 4));
        halves[i] = (uint16_t)(HALF_ONE + (uint16_t)(value * 1024));
    }
}

/* ---- The source ---- */

static uint64_t clips_label(const void *state, uint64_t number)
{
    (void)state;
    return number % WAYS;
}

static enum status make_one(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct generated_values *parameters = state;
    uint16_t halves[FRAMES * SIDE * SIDE];
    draw_frames(parameters->seed, number, halves);
    TRY(source_add_label(sample, clips_label(state, number)));
    return source_add_array(sample, "<f2", "1, 8, 16, 16", halves, sizeof halves, NULL);
}

static enum status clips_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes = 2 * FRAMES * SIDE * SIDE + NPY_HEADER_MAX;
    struct generated_values *parameters = *state = calloc(1, sizeof *parameters);
    TRY(ALLOCATED(parameters, "out of memory"));
    *parameters = *(const struct generated_values *)request->parameters;
    return STATUS_OK;
}

static const struct option_spec options[] = {
    {"seed", "N", OPTION_COUNT, offsetof(struct generated_values, seed), .fallback = "0",
     .maximum = 18446744073709551615.0, .column = COLUMN, .help = "seed of all clips"},
};

const struct source source_clips = {
    .name = "clips",
    .summary = "clips of a blob that moves in one of eight directions, f16 (1, 8, 16, 16)",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct generated_values),
    .columns = source_label_columns,
    .open = clips_open,
    .close = free,
    .make_one = make_one,
    .label = clips_label,
};
