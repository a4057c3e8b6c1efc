#include "data/rand_augment.h"

#include <stdlib.h>

#include "core/options.h"

/* ---- Policies ---- */

#define PDP_MAGNITUDE  28
#define PDP_FILL       128
#define OPERATIONS_MAX 16

/* A part of a policy: its key, the range of its number, and where the number goes. */
struct part {
    const char *key;
    double minimum, maximum;
    double *value;
};

/* Reads one part, such as "mstd0.5". `*seen` has a bit for each part that was read. */
static enum status read_part(const char *name, const char *text, const char *part, const struct part *parts,
                             uint32_t *seen)
{
    const size_t length = strcspn(part, "0123456789.-");
    for (uint32_t bit = 1; parts->key; parts++, bit <<= 1) {
        if (strlen(parts->key) != length || strncmp(part, parts->key, length) != 0)
            continue;
        if (*seen & bit)
            return status_set(STATUS_USAGE, "%s: '%.80s' has the part '%s' twice; drop one", name, text,
                              parts->key);
        *seen |= bit;
        return parse_real(name, part + length, parts->minimum, parts->maximum, parts->value);
    }
    return status_set(STATUS_USAGE,
                      "%s: '%.80s' has the part '%.40s'; the parts of timm that are known here are m, n, "
                      "mstd, mmax, inc and p",
                      name, text, part);
}

/* Reads the parts after the first '-'. */
static enum status read_parts(const char *name, const char *text, const struct part *parts)
{
    char copy[64], *rest = copy, *part;
    uint32_t seen = 0;
    if (strlen(text) >= sizeof copy)
        return status_set(STATUS_USAGE, "%s: '%.40s...' is too long for a policy", name, text);
    strcpy(copy, text);
    strsep(&rest, "-");
    while ((part = strsep(&rest, "-")))
        TRY(read_part(name, text, part, parts, &seen));
    return STATUS_OK;
}

static bool begins_with(const char *text, const char *word)
{
    const size_t length = strlen(word);
    return strncmp(text, word, length) == 0 && (text[length] == '\0' || text[length] == '-');
}

enum status rand_augment_parse(const char *name, const char *text, struct rand_augment *rand)
{
    double magnitude = AUGMENT_TIMM_UNIT, layers = rand->operations, increasing = -1;
    struct augment_policy policy = {.kind = AUGMENT_TIMM, .probability = 0.5, .limit = AUGMENT_TIMM_UNIT};
    if (begins_with(text, "pdp2026")) {
        magnitude = PDP_MAGNITUDE;
        const struct part parts[] = {{"m", 0, AUGMENT_MAGNITUDE_MAX, &magnitude}, {NULL, 0, 0, NULL}};
        policy = (struct augment_policy){
            .kind = AUGMENT_PDP2026, .fill = {PDP_FILL, PDP_FILL, PDP_FILL}, .probability = 0.5};
        TRY(read_parts(name, text, parts));
    } else if (begins_with(text, "rand")) {
        const struct part parts[] = {{"m", 0, 1000, &magnitude},
                                     {"n", 1, OPERATIONS_MAX, &layers},
                                     {"mstd", 0, 1e9, &policy.deviation},
                                     {"mmax", 1, AUGMENT_TIMM_MAX, &policy.limit},
                                     {"inc", 0, 1, &increasing},
                                     {"p", 0, 1, &policy.probability},
                                     {NULL, 0, 0, NULL}};
        TRY(read_parts(name, text, parts));
        policy.increasing = increasing > 0;
        if (increasing == 0)
            return status_set(STATUS_USAGE, "%s: '%s' has inc0, which timm reads as inc1; leave inc out",
                              name, text);
        if (layers != (double)(uint32_t)layers)
            return status_set(STATUS_USAGE, "%s: '%s' has no whole number of operations", name, text);
    } else {
        char *end;
        policy = (struct augment_policy){.kind = AUGMENT_TORCHVISION};
        (void)strtod(text, &end);
        if (*end)
            return status_set(STATUS_USAGE,
                              "%s: '%.80s' is neither a magnitude from 0 to %d nor a policy; write 28, "
                              "pdp2026-m28 or rand-m9-mstd0.5-inc1",
                              name, text, AUGMENT_MAGNITUDE_MAX);
        TRY(parse_real(name, text, 0, AUGMENT_MAGNITUDE_MAX, &magnitude));
    }
    *rand = (struct rand_augment){(uint32_t)layers, magnitude, policy};
    return STATUS_OK;
}

/* ---- Images ---- */

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
