/* Tensors whose values are a pure function of (seed, sample number), so a reader's output can be checked
 * without a second copy. */
#ifndef FDSL_DATA_COUNTER_H
#define FDSL_DATA_COUNTER_H

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

FDSL_C_BEGIN

/* Fills `values` with the `count` values of sample `number`, uniformly distributed: bytes from 0 to 255,
 * halves from 1 to 2, floats from 0 to 1. Values come from Philox blocks (key: the seed; counter: block, low
 * and high word of the number, 0x4C4F4144). Each value takes one byte, two bytes or one word of a block, in
 * order. */
void counter_fill(uint64_t seed, uint64_t number, enum dtype type, size_t count, void *values);

FDSL_C_END

#endif
