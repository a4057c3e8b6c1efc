/* Tensors whose values are a pure function of (seed, number of the sample): so what a reader delivers can be
 * checked without a second copy. */
#ifndef FDSL_DATA_COUNTER_H
#define FDSL_DATA_COUNTER_H

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

FDSL_C_BEGIN

/* Fills `values` with the `count` values of sample `number`: bytes from 0 to 255, halves from 1 to 2, floats
 * from 0 to 1, evenly spread. Values come from Philox blocks (key: the seed; counter: block, number's low and
 * high word, 0x4C4F4144), a byte, two bytes or a word each, in order. */
void counter_fill(uint64_t seed, uint64_t number, enum dtype type, size_t count, void *values);

FDSL_C_END

#endif
