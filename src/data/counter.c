/* The source `counter`: tensors filled with Philox values (data/counter.h). */
#include "data/counter.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "core/text.h"
#include "data/npy.h"
#include "data/source.h"

#define STREAM        0x4C4F4144u
#define AXES_MAX      8
#define VALUES_MAX    (UINT64_C(1) << 32)
#define HALF_ONE      0x3C00 /* float16 bit pattern of 1.0 */
#define HALF_FRACTION 0x03FF

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
        values_of_block(
            philox(philox_key(seed), (uint32_t)(at / 16), (uint32_t)number, (uint32_t)(number >> 32), STREAM),
            type, out);
        memcpy((uint8_t *)values + at, out, bytes - at < 16 ? bytes - at : 16);
    }
}

/* ---- The source ---- */

static const char *const types[] = {"u8", "f16", "f32", NULL}; /* in the order of enum dtype */

#define AT(field) offsetof(struct counter_values, field)
static const struct option_spec options[] = {
    {"sample-shape", "N,N,...", OPTION_TEXT, AT(shape), .fallback = "3,8,64,64", .column = COLUMN,
     .help = "shape of each tensor"},
    {"dtype", "TYPE", OPTION_CHOICE, AT(type), .fallback = "f16", .choices = types, .column = COLUMN,
     .help = "type of the values"},
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "seed of the values"},
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
        if (bytes >= sizeof word || axes == AXES_MAX)
            return status_set(STATUS_USAGE, "--sample-shape: '%.80s' is not a list of at most %d lengths",
                              counter->parameters.shape, AXES_MAX);
        TRY(parse_count("--sample-shape", word, 1, 4294967295.0, &length));
        if (length > VALUES_MAX / values)
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

static enum status make_one(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct counter *counter = state;
    enum dtype type = (enum dtype)counter->parameters.type;
    void *values;
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

static const char *const columns[] = {"number", NULL};

const struct source source_counter = {
    .name = "counter",
    .summary = "generated tensors of known content",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct counter_values),
    .columns = columns,
    .open = counter_open,
    .close = free,
    .make_one = make_one,
    .describe = counter_describe,
};
