#include "load/convert.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Loads the bits of a value of 1, 2 or 4 bytes. */
static inline uint32_t load_word(const uint8_t *value, uint32_t bytes)
{
    uint32_t word;
    uint16_t half;
    if (bytes == 1)
        return *value;
    if (bytes == 2) {
        memcpy(&half, value, sizeof half);
        return half;
    }
    memcpy(&word, value, sizeof word);
    return word;
}

/* Multiplicative hashing. The factor is 2^32 divided by the golden ratio. */
static inline uint32_t hash(uint32_t word)
{
    return word * 0x9E3779B1u >> (32 - PIXEL_GUESS_BITS);
}

void pixel_values_set(struct pixel_values *values, const struct convert *convert)
{
    memset(values->guesses, 0, sizeof values->guesses);
    values->value_bytes = convert_value_bytes(convert);
    for (uint32_t byte = 0; byte < 256; byte++) {
        const uint8_t stored[sizeof(float)] = {(uint8_t)byte}; /* convert_one() is for all types */
        uint8_t converted[sizeof(float)];
        convert_one(convert, stored, 0, converted);
        values->words[byte] = load_word(converted, values->value_bytes);
        values->guesses[hash(values->words[byte])] = stored[0];
    }
}

/* Returns whether `word` is the conversion of a byte that differs from `byte` by at most `tolerance`. */
static bool is_near(const struct pixel_values *values, uint32_t word, uint32_t byte, uint32_t tolerance)
{
    uint32_t from = byte > tolerance ? byte - tolerance : 0;
    const uint32_t to = tolerance < 255 - byte ? byte + tolerance : 255;
    while (from < to && values->words[from] != word)
        from++;
    return values->words[from] == word;
}

/* A row of one channel. Steps are in bytes, from one value or pixel to the next. */
struct row {
    const uint8_t *delivered, *pixels;
    ptrdiff_t delivered_step, pixel_step, count;
};

/* Inlined, so that `value_bytes` is a constant. The guess makes the usual case free of branches that depend
 * on the data. It may be another byte, because words share hashes and bytes share words; then is_near()
 * decides. */
static inline __attribute__((always_inline)) bool
match_values(const struct pixel_values *values, struct row row, uint32_t tolerance, uint32_t value_bytes)
{
    for (ptrdiff_t i = 0; i < row.count; i++) {
        const int byte = row.pixels[i * row.pixel_step];
        const uint32_t word = load_word(row.delivered + i * row.delivered_step, value_bytes);
        const uint8_t guess = values->guesses[hash(word)];
        const bool found = (uint32_t)abs(guess - byte) <= tolerance && values->words[guess] == word;
        if (!found && !is_near(values, word, (uint32_t)byte, tolerance))
            return false;
    }
    return true;
}

static bool match_row(const struct pixel_values *values, struct row row, uint32_t tolerance)
{
    return values->value_bytes == 1   ? match_values(values, row, tolerance, 1)
           : values->value_bytes == 2 ? match_values(values, row, tolerance, 2)
                                      : match_values(values, row, tolerance, 4);
}

bool pixels_match(const struct pixels *pixels, const struct pixel_form *form, uint32_t tolerance,
                  const uint8_t *delivered)
{
    const uint64_t channels = pixels->channels, height = pixels->height, width = pixels->width;
    const uint64_t bytes = form->values->value_bytes;
    bool match = true;
    for (uint64_t y = 0; match && y < height; y++)
        for (uint64_t c = 0; match && c < channels; c++) {
            const uint64_t first =
                form->interleaved ? y * width * channels + c : (c * height + y) * width; /* value */
            const uint64_t pixel = y * width + (form->mirrored ? width - 1 : 0);
            const struct row row = {.delivered = delivered + first * bytes,
                                    .delivered_step =
                                        (ptrdiff_t)(form->interleaved ? channels * bytes : bytes),
                                    .pixels = pixels->bytes + pixel * channels + c,
                                    .pixel_step = (form->mirrored ? -1 : 1) * (ptrdiff_t)channels,
                                    .count = (ptrdiff_t)width};
            match = match_row(&form->values[c], row, tolerance);
        }
    return match;
}
