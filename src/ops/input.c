#include "ops/input.h"

#include <math.h>

#include "core/dtype.h"
#include "core/philox.h"

/* The last word of the Philox counter. Streams with different last words are independent. */
enum { STREAM_VALUES = 0x76616c73, STREAM_COLUMN = 0x636f6c73, STREAM_SOURCE = 0x64757073 };

enum { SOURCE_DRAWS = 64 };
enum kind { TOO_SMALL, TOO_LARGE, WITH_NAN, WITH_INFINITY, ZERO, KINDS };

static uint64_t fixed_share(double share)
{
    return (uint64_t)(share * 0x1p32 + 0.5);
}

struct input input_begin(uint64_t seed, uint32_t columns, enum dtype dtype, double bad, double duplicates)
{
    return (struct input){seed, columns, dtype, fixed_share(bad), fixed_share(duplicates)};
}

/* If rows are chosen at equal distances, and `share` is the chosen share of all rows in units of 2^-32,
 * returns how many of the rows 0 to row - 1 are chosen. */
static uint64_t chosen_before(uint64_t share, uint64_t row)
{
    return row * share >> 32;
}

bool input_is_bad(const struct input *input, uint64_t row)
{
    return chosen_before(input->bad, row + 1) > chosen_before(input->bad, row);
}

/* Bad rows are not duplicates, so that the share of bad rows is exact. */
static bool wants_source(const struct input *input, uint64_t row)
{
    return chosen_before(input->duplicates, row + 1) > chosen_before(input->duplicates, row) &&
           !input_is_bad(input, row);
}

/* Draws earlier rows until one is neither bad nor a duplicate. If none of SOURCE_DRAWS draws finds such a
 * row, `row` is not a duplicate. */
uint64_t input_source(const struct input *input, uint64_t row)
{
    if (row == 0 || !wants_source(input, row))
        return row;
    for (uint32_t draw = 0; draw < SOURCE_DRAWS; draw++) {
        struct philox_block block =
            philox(philox_key(input->seed), draw, (uint32_t)row, (uint32_t)(row >> 32), STREAM_SOURCE);
        uint64_t source = philox_below(block.word[0], (uint32_t)row);
        if (!input_is_bad(input, source) && !wants_source(input, source))
            return source;
    }
    return row;
}

static void store(const struct input *input, void *values, uint32_t column, float value)
{
    if (input->dtype == DTYPE_F32)
        ((float *)values)[column] = value;
    else
        ((uint16_t *)values)[column] =
            input->dtype == DTYPE_F16 ? half_from_float(value) : bf16_from_float(value);
}

/* Writes uniform values with a variance of 1 / columns, times `scale`, so the norm is near `scale`. In
 * each row, the magnitude of one value is drawn from the upper half of the range, so that the norm of a row
 * with few columns is not too small by chance. */
static void fill_values(const struct input *input, uint64_t row, float scale, void *values)
{
    float largest = scale * (float)sqrt(3.0 / input->columns);
    uint32_t raised = (uint32_t)(row % input->columns);
    for (uint32_t first = 0; first < input->columns; first += 4) {
        struct philox_block block =
            philox(philox_key(input->seed), first / 4, (uint32_t)row, (uint32_t)(row >> 32), STREAM_VALUES);
        for (uint32_t i = 0; i < 4 && first + i < input->columns; i++) {
            float value = 2 * philox_unit(block.word[i]) - 1;
            if (first + i == raised)
                value = copysignf(0.5f + 0.5f * fabsf(value), value);
            store(input, values, first + i, value * largest);
        }
    }
}

void input_fill(const struct input *input, uint64_t row, void *values)
{
    uint64_t source = input_source(input, row);
    enum kind kind = (enum kind)(chosen_before(input->bad, source) % KINDS);
    if (!input_is_bad(input, source)) {
        fill_values(input, source, 1, values);
        return;
    }
    fill_values(input, source,
                kind == TOO_SMALL   ? 1e-3f
                : kind == TOO_LARGE ? 1e3f
                : kind == ZERO      ? 0
                                    : 1,
                values);
    if (kind == WITH_NAN || kind == WITH_INFINITY) {
        struct philox_block block =
            philox(philox_key(input->seed), 0, (uint32_t)source, (uint32_t)(source >> 32), STREAM_COLUMN);
        store(input, values, philox_below(block.word[0], input->columns),
              kind == WITH_NAN    ? NAN
              : block.word[1] & 1 ? INFINITY
                                  : -INFINITY);
    }
}
