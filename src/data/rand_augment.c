#include "data/rand_augment.h"

#include <math.h>
#include <string.h>

/* Angles of rotations are positive counterclockwise. Shears leave the top left corner of the image in place.
 */
struct augment_numbers augment_numbers(enum augment_operation operation, bool negative, double magnitude,
                                       const struct shape *shape)
{
    const double share = magnitude / AUGMENT_MAGNITUDE_MAX, sign = negative ? -share : share;
    const double width = shape->width, height = shape->height;
    const double shear = 0.3 * sign, move = -150.0 / 331 * sign, angle = -sign * 30 * acos(-1.0) / 180;
    const double middle_x = (width - 1) / 2, middle_y = (height - 1) / 2;
    struct augment_numbers numbers = {.map = {1, 0, 0, 0, 1, 0},
                                      .factor = (float)(1 + 0.9 * sign),
                                      .mask = 255u << lround(4 * share),
                                      .at_least = (float)(255 * (1 - share))};
    float *map = numbers.map;
    switch (operation) {
    case AUGMENT_SHEAR_X:
        map[1] = (float)shear;
        map[2] = (float)(shear / 2);
        break;
    case AUGMENT_SHEAR_Y:
        map[3] = (float)shear;
        map[5] = (float)(shear / 2);
        break;
    case AUGMENT_TRANSLATE_X:
        map[2] = (float)(move * width);
        break;
    case AUGMENT_TRANSLATE_Y:
        map[5] = (float)(move * height);
        break;
    case AUGMENT_ROTATE:
        map[0] = map[4] = (float)cos(angle);
        map[1] = (float)sin(angle);
        map[3] = (float)-sin(angle);
        map[2] = (float)(middle_x - cos(angle) * middle_x - sin(angle) * middle_y);
        map[5] = (float)(middle_y + sin(angle) * middle_x - cos(angle) * middle_y);
        break;
    default:
        break;
    }
    return numbers;
}

void rand_augment_set(struct rand_augment *rand, uint32_t operations, double magnitude,
                      const struct shape *shape)
{
    rand->operations = operations;
    for (int operation = 0; operation < AUGMENT_OPERATIONS; operation++)
        for (int sign = 0; sign < 2; sign++)
            rand->numbers[operation][sign] =
                augment_numbers((enum augment_operation)operation, sign, magnitude, shape);
}

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
                    *out = augment_warped(own, height, width, y, x, numbers->map);
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
        const struct augment_numbers *numbers;
        const enum augment_operation operation = rand_augment_draw(rand, seed, epoch, sample, i, &numbers);
        augment_apply(shape, operation, numbers, image, other);
        memcpy(image, other, shape_values(shape));
    }
}
