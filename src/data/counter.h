/* Tensors whose values are a pure function of (seed, sample number), so that a reader's output can be checked
 * without a second copy of the data. */
#ifndef FDSL_DATA_COUNTER_H
#define FDSL_DATA_COUNTER_H

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

FDSL_C_BEGIN

/* Fills `values` with the `count` values of sample `number`. They are uniformly distributed: bytes from 0 to
 * 255, float16 in [1, 2), float32 in [0, 1). The values are computed from consecutive Philox blocks. A byte
 * uses one byte of a block, a float16 uses two bytes, and a float32 uses four. The Philox key is the seed.
 * The counter is (block, low word of `number`, high word of `number`, 0x4C4F4144). */
void counter_fill(uint64_t seed, uint64_t number, enum dtype type, size_t count, void *values);

FDSL_C_END

#endif
