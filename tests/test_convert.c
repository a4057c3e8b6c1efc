/* Tests the comparison of delivered images with decoded ones (load/convert.h) against its definition, which
 * converts each byte that is near the decoded one. */
#include <criterion/criterion.h>

#include <string.h>

#include "core/philox.h"
#include "load/convert.h"

TestSuite(convert, .timeout = 120);

/* ---- The definition ---- */

static bool near_by_definition(const struct convert *convert, const uint8_t *value, uint8_t byte,
                               uint32_t tolerance)
{
    const uint32_t bytes = convert_value_bytes(convert);
    const int from = (int)byte - (int)tolerance, to = (int)byte + (int)tolerance;
    for (int near = from < 0 ? 0 : from; near <= (to > 255 ? 255 : to); near++) {
        const uint8_t stored[sizeof(float)] = {(uint8_t)near};
        uint8_t converted[sizeof(float)];
        convert_one(convert, stored, 0, converted);
        if (memcmp(value, converted, bytes) == 0)
            return true;
    }
    return false;
}

/* How images are delivered. */
struct how {
    struct convert converts[3]; /* per channel */
    uint64_t channels, height, width;
    bool interleaved, mirrored;
};

/* Returns the index of a delivered value. */
static uint64_t value_at(const struct how *how, uint64_t c, uint64_t y, uint64_t x)
{
    return how->interleaved ? (y * how->width + x) * how->channels + c
                            : (c * how->height + y) * how->width + x;
}

static uint8_t byte_at(const struct how *how, const uint8_t *bytes, uint64_t c, uint64_t y, uint64_t x)
{
    return bytes[(y * how->width + (how->mirrored ? how->width - 1 - x : x)) * how->channels + c];
}

static bool match_by_definition(const struct how *how, const uint8_t *bytes, uint32_t tolerance,
                                const uint8_t *delivered)
{
    bool match = true;
    for (uint64_t c = 0; c < how->channels; c++)
        for (uint64_t y = 0; y < how->height; y++)
            for (uint64_t x = 0; x < how->width; x++)
                match &= near_by_definition(&how->converts[c],
                                            delivered + value_at(how, c, y, x) *
                                                            convert_value_bytes(&how->converts[c]),
                                            byte_at(how, bytes, c, y, x), tolerance);
    return match;
}

static bool match(const struct how *how, const uint8_t *bytes, uint32_t tolerance, const uint8_t *delivered)
{
    struct pixel_values values[3];
    for (uint64_t c = 0; c < how->channels; c++)
        pixel_values_set(&values[c], &how->converts[c]);
    const struct pixels pixels = {bytes, how->channels, how->height, how->width};
    const struct pixel_form form = {values, how->interleaved, how->mirrored};
    return pixels_match(&pixels, &form, tolerance, delivered);
}

static uint32_t random_word(uint32_t number)
{
    return philox(philox_key(5), number, 0, 0, 0).word[0];
}

static void store_word(uint32_t word, uint32_t bytes, uint8_t *to)
{
    for (uint32_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)(word >> 8 * i);
}

/* ---- Single values ---- */

static const enum dtype tensors[] = {DTYPE_STORED, DTYPE_F16, DTYPE_BF16, DTYPE_F32};

/* Some of these make bytes share a conversion, others make values infinite or NaN, or let them fall as bytes
 * grow. */
static const double means[][2] = {{0, 1},    {0.456, 0.224}, {0.5, 1e-6},   {0.5, 1e6},  {1e4, 1},
                                  {0.3, -2}, {0, -1},        {1e30, 1e-30}, {0, 1e-300}, {-1e300, 1e-300}};

/* Counts the verdicts on `word` that differ from the definition, for decoded bytes from byte - 6 to byte + 6
 * and for a distant one. */
static uint64_t count_different(const struct convert *convert, const struct pixel_values *set, uint32_t word,
                                uint32_t byte)
{
    static const uint32_t tolerances[] = {0, 1, 2, 3, 4, 255, 300};
    const struct pixel_form form = {.values = set};
    uint64_t different = 0;
    uint8_t value[sizeof word];
    store_word(word, sizeof word, value);
    for (uint32_t i = 0; i < 14; i++)
        for (size_t t = 0; t < COUNT_OF(tolerances) - (byte % 16 ? 2 : 0); t++) {
            const uint8_t pixel = (uint8_t)(byte - 6 + (i < 13 ? i : 128));
            const struct pixels pixels = {&pixel, 1, 1, 1};
            different += pixels_match(&pixels, &form, tolerances[t], value) !=
                         near_by_definition(convert, value, pixel, tolerances[t]);
        }
    return different;
}

/* The values of all bytes, the words next to them, and random words, most of which are the value of no
 * byte. */
Test(convert, every_conversion_is_compared_as_defined)
{
    for (size_t t = 0; t < COUNT_OF(tensors); t++)
        for (size_t m = 0; m < COUNT_OF(means); m++) {
            const struct convert convert = convert_make(DTYPE_U8, tensors[t], means[m][0], means[m][1]);
            struct pixel_values set;
            uint64_t different = 0;
            pixel_values_set(&set, &convert);
            for (uint32_t byte = 0; byte < 256; byte++) {
                for (uint32_t i = 0; i < 3; i++)
                    different += count_different(&convert, &set, set.words[byte] + i - 1, byte);
                different += count_different(&convert, &set, random_word(byte), byte);
            }
            cr_expect_eq(different, 0, "%s, mean %g, std %g: %llu verdicts differ",
                         t ? dtype_names[tensors[t]] : "raw", means[m][0], means[m][1],
                         (unsigned long long)different);
        }
}

/* ---- Images ---- */

/* Faults of a delivered image. */
enum fault {
    FAULT_NONE,
    FAULT_VALUE,   /* a byte is off by tolerance + 1 */
    FAULT_BITS,    /* a value is the conversion of no byte near the decoded one */
    FAULT_CHANNEL, /* two channels are swapped */
    FAULT_FLIP,    /* the image is not mirrored, or is mirrored */
    FAULTS
};

/* Delivers an image: converts its bytes, each changed by up to `tolerance`, except for the fault. */
static void deliver(const struct how *how, const uint8_t *bytes, uint32_t tolerance, enum fault fault,
                    uint32_t number, uint8_t *delivered)
{
    struct how wrong = *how;
    const uint64_t planted = random_word(number) % (how->channels * how->height * how->width);
    wrong.mirrored ^= fault == FAULT_FLIP;
    for (uint64_t c = 0; c < how->channels; c++)
        for (uint64_t y = 0; y < how->height; y++)
            for (uint64_t x = 0; x < how->width; x++) {
                const uint64_t i = value_at(how, c, y, x);
                const uint64_t from = fault == FAULT_CHANNEL && c < 2 ? 1 - c : c;
                const int byte = byte_at(&wrong, bytes, from, y, x);
                const int off =
                    fault == FAULT_VALUE && i == planted
                        ? (byte < 128 ? 1 : -1) * (int)(tolerance + 1)
                        : (int)(random_word(number + (uint32_t)i) % (2 * tolerance + 1)) - (int)tolerance;
                const uint8_t stored[sizeof(float)] = {(uint8_t)(byte + off < 0     ? 0
                                                                 : byte + off > 255 ? 255
                                                                                    : byte + off)};
                uint8_t *to = delivered + i * convert_value_bytes(&how->converts[c]);
                uint8_t converted[sizeof(float)];
                convert_one(&how->converts[c], stored, 0, converted);
                if (fault == FAULT_BITS && i == planted)
                    converted[0] ^= 0x40;
                memcpy(to, converted, convert_value_bytes(&how->converts[c]));
            }
}

/* Images of random sizes, in all forms, also at odd addresses. */
Test(convert, faults_of_images_are_found)
{
    uint32_t found[FAULTS] = {0}, tried = 0;
    for (uint32_t n = 0; n < 4 * 2 * 2 * 2 * 5 * 3; n++) {
        const uint32_t tolerance = n / 32 % 5;
        struct how how = {.channels = n / 4 % 2 ? 3 : 1,
                          .height = 1 + random_word(n) % 9,
                          .width = 2 + random_word(n) / 9 % 40,
                          .interleaved = n / 8 % 2,
                          .mirrored = n / 16 % 2};
        const uint64_t count = how.channels * how.height * how.width;
        uint8_t bytes[3 * 9 * 42], delivered[sizeof bytes * sizeof(float) + 1];
        for (uint64_t c = 0; c < how.channels; c++)
            how.converts[c] =
                convert_make(DTYPE_U8, tensors[n % 4], 0.4 + 0.03 * (double)c, 0.2 + 0.1 * (double)c);
        for (uint64_t i = 0; i < count; i++)
            bytes[i] = (uint8_t)random_word((uint32_t)i + 1000 * n);
        for (enum fault fault = FAULT_NONE; fault < FAULTS; fault++) {
            uint8_t *to = delivered + n % 2;
            deliver(&how, bytes, tolerance, fault, n, to);
            const bool right = match(&how, bytes, tolerance, to);
            cr_expect_eq(right, match_by_definition(&how, bytes, tolerance, to), "image %u, fault %d", n,
                         fault);
            if (fault == FAULT_NONE)
                cr_expect(right, "image %u", n);
            found[fault] += !right;
        }
        tried++;
    }
    /* Gray images have no channels to swap. Narrow images may look alike when they are mirrored. */
    cr_expect(found[FAULT_CHANNEL] >= tried / 2 - 2 && found[FAULT_FLIP] >= tried - 10, "%u, %u of %u",
              found[FAULT_CHANNEL], found[FAULT_FLIP], tried);
    cr_expect(found[FAULT_VALUE] >= tried - 2 && found[FAULT_BITS] >= tried - tried / 4, "%u, %u of %u",
              found[FAULT_VALUE], found[FAULT_BITS], tried);
}
