/* Generated rows: any row can be computed alone. docs/ops.md defines them. */
#ifndef FDSL_OPS_INPUT_H
#define FDSL_OPS_INPUT_H

#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

#define INPUT_ROWS_MAX 4294967295.0 /* the products in input_is_bad() fit into 64 bits */

struct input {
    uint64_t seed;
    uint32_t columns;
    enum dtype dtype;
    uint64_t bad, duplicates; /* shares of the rows, times 2^32 */
};

FDSL_C_BEGIN

/* Returns the definition of the rows. `bad` and `duplicates` are shares of the rows, from 0 to 1. */
struct input input_begin(uint64_t seed, uint32_t columns, enum dtype dtype, double bad, double duplicates);

/* Returns whether a row is bad. Consecutive bad rows are of five kinds in turn: too small, too large, NaN,
 * infinity, zero. */
bool input_is_bad(const struct input *input, uint64_t row);

/* Returns the row that defines the values of `row`: `row` itself, or an earlier row if `row` is a duplicate.
 */
uint64_t input_source(const struct input *input, uint64_t row);

/* Writes the `columns` values of a row, in the type `dtype`. */
void input_fill(const struct input *input, uint64_t row, void *values);

FDSL_C_END

#endif
