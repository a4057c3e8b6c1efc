/* Tensors whose values are a pure function of (seed, number of the sample): so what a reader delivers can be
 * checked without a second copy. */
#ifndef FDSL_LOAD_COUNTER_H
#define FDSL_LOAD_COUNTER_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"

enum counter_type { COUNTER_F16, COUNTER_U8, COUNTER_F32 };

FDSL_C_BEGIN

/* Bytes of one value. */
size_t counter_value_bytes(enum counter_type type);

/* Fills `values` with the `count` values of sample `number`: bytes from 0 to 255, halves from 1 to 2, floats
 * from 0 to 1, evenly spread. Values come from Philox blocks (key: the seed; counter: block, number's low and
 * high word, 0x4C4F4144), a byte, two bytes or a word each, in order. */
void counter_fill(uint64_t seed, uint64_t number, enum counter_type type, size_t count, void *values);

FDSL_C_END

#endif
