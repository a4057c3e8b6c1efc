/* Conversions between float and fp8 e4m3fn: 1 sign bit, 4 exponent bits, 3 mantissa bits, no infinity.
 * Bit-identical on host and device. The format is E4M3 of Micikevicius et al., "FP8 formats for deep
 * learning", 2022, and of the OCP 8-bit floating point specification (OFP8) 1.0. */
#ifndef FDSL_CORE_FP8_H
#define FDSL_CORE_FP8_H

#include <stdbool.h>
#include <stdint.h>

#include "core/half.h"
#include "core/portable.h"

#define FP8_MAX 448.0f
#define FP8_NAN 0x7F

/* Returns the bits of the nearest fp8 value, ties to even. Values whose nearest value would be larger than
 * 448 (magnitudes above 464, infinity) become 448 with the same sign if `saturate` is set, else NaN. NaN is
 * always FP8_NAN, without a sign. There are no branches, so that compilers can vectorise loops. */
FDSL_HD uint8_t fp8_from_float(float value, bool saturate)
{
    uint32_t bits = float_bits(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFF;
    /* For magnitudes of at least 2^-6: remove 20 mantissa bits and change the bias from 127 to 7. */
    uint32_t normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    /* For smaller magnitudes: round to a multiple of 2^-9, the distance between floats near 2^14. */
    uint32_t small = float_bits(float_from_bits(magnitude) + 0x1p14f) - 0x46800000;
    uint32_t code = (magnitude < 0x3C800000 ? small : normal) | sign;
    uint32_t above = saturate ? 0x7E | sign : FP8_NAN;
    code = magnitude > 0x43E80000 ? above : code; /* above 464 */
    return (uint8_t)(magnitude > 0x7F800000 ? FP8_NAN : code);
}

/* Converts fp8 to float. The conversion is exact. */
FDSL_HD float fp8_to_float(uint8_t bits)
{
    uint32_t exponent = bits >> 3 & 15u, mantissa = bits & 7u, sign = (uint32_t)(bits >> 7) << 31;
    if ((bits & 0x7F) == FP8_NAN)
        return float_from_bits(sign | 0x7FC00000u);
    if (exponent == 0)
        return float_from_bits(float_bits((float)mantissa * 0x1p-9f) | sign);
    return float_from_bits(sign | (exponent + 120) << 23 | mantissa << 20);
}

#endif
