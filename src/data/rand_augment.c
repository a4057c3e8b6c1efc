#include "data/rand_augment.h"

#include <string.h>

/* Counts how often each value occurs in each channel, and computes the statistics of the channels. */
static void count_values(const struct shape *shape, const uint8_t *image, uint32_t counts[][AUGMENT_LEVELS],
                         struct augment_channel *channels)
{
    const uint32_t pixels = shape->height * shape->width;
    uint32_t sums[AUGMENT_CHANNELS_MAX] = {0};
    for (uint32_t c = 0; c < shape->channels; c++) {
        struct augment_channel *channel = &channels[c];
        memset(counts[c], 0, sizeof counts[c]);
        for (uint32_t i = 0; i < pixels; i++)
            counts[c][image[(size_t)c * pixels + i]]++;
        channel->least = AUGMENT_LEVELS;
        for (uint32_t v = 0; v < AUGMENT_LEVELS; v++) {
            if (counts[c][v] == 0)
                continue;
            channel->least = channel->least < v ? channel->least : v;
            channel->most = v;
            sums[c] += v * counts[c][v];
        }
        channel->step = augment_equalize_step(pixels, counts[c][channel->most]);
    }
    for (uint32_t c = 0; c < shape->channels; c++)
        channels[c].mean = augment_mean(sums, shape->channels, pixels);
}

static void apply_table(const struct shape *shape, enum augment_operation operation,
                        const struct augment_numbers *numbers, const uint8_t *from, uint8_t *to)
{
    const uint32_t pixels = shape->height * shape->width;
    uint32_t counts[AUGMENT_CHANNELS_MAX][AUGMENT_LEVELS] = {{0}};
    struct augment_channel channels[AUGMENT_CHANNELS_MAX] = {{0}};
    if (augment_counts(operation))
        count_values(shape, from, counts, channels);
    for (uint32_t c = 0; c < shape->channels; c++) {
        uint8_t table[AUGMENT_LEVELS];
        uint32_t below = 0;
        for (uint32_t v = 0; v < AUGMENT_LEVELS; v++) {
            table[v] = augment_entry(operation, numbers, &channels[c], v, below);
            below += counts[c][v];
        }
        for (uint32_t i = 0; i < pixels; i++)
            to[(size_t)c * pixels + i] = table[from[(size_t)c * pixels + i]];
    }
}

FDSL_FMA_CLONES
void augment_apply(const struct shape *shape, enum augment_operation operation,
                   const struct augment_numbers *numbers, const uint8_t *from, uint8_t *to)
{
    const uint32_t height = shape->height, width = shape->width, plane = height * width;
    if (augment_has_table(operation)) {
        apply_table(shape, operation, numbers, from, to);
        return;
    }
    for (uint32_t c = 0; c < shape->channels; c++)
        for (uint32_t y = 0; y < height; y++)
            for (uint32_t x = 0; x < width; x++) {
                const uint8_t *own = from + (size_t)c * plane;
                uint8_t *out = to + (size_t)c * plane + y * width + x;
                if (augment_warps(operation))
                    *out = augment_warped(own, width, shape, c, y, x, numbers);
                else if (operation == AUGMENT_COLOR)
                    *out = augment_color(from, shape, c, y * width + x, numbers->factor);
                else if (operation == AUGMENT_SHARPNESS)
                    *out = augment_sharp(own, height, width, y, x, numbers->factor);
                else
                    *out = own[y * width + x];
            }
}

void rand_augment_apply(const struct rand_augment *rand, const struct shape *shape, uint64_t seed,
                        uint32_t epoch, uint32_t sample, uint8_t *image, uint8_t *other)
{
    for (uint32_t i = 0; i < rand->operations; i++) {
        struct augment_numbers numbers;
        const enum augment_operation operation =
            rand_augment_draw(rand, shape, seed, epoch, sample, i, &numbers);
        augment_apply(shape, operation, &numbers, image, other);
        memcpy(image, other, shape_values(shape));
    }
}
