/* Conversions between float and the bits of fp16 and bfloat16, bit-identical on host and device. */
#ifndef FDSL_CORE_HALF_H
#define FDSL_CORE_HALF_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/portable.h"

FDSL_HD uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

FDSL_HD float float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Returns the bits of the nearest fp16 value, ties to even; magnitudes of at least 65520 become infinity.
 * Equals __float2half_rn(). */
FDSL_HD uint16_t half_from_float(float value)
{
    uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    uint32_t exponent = magnitude >> 23;
    if (magnitude > 0x7F800000) /* NaN */
        return 0x7FFF;
    if (exponent > 142) /* at least 2^16 */
        return (uint16_t)(sign | 0x7C00);
    if (exponent < 102) /* less than half of the smallest subnormal, 2^-24 */
        return (uint16_t)sign;
    /* Below 2^-14 (exponent 113) fp16 is subnormal: its last bit is worth 2^-24. */
    bool normal = exponent > 112;
    uint32_t shift = normal ? 13 : 126 - exponent;
    uint32_t whole = normal ? magnitude - (112u << 23) : (magnitude & 0x7FFFFF) | 0x800000;
    uint32_t rounded = (whole + (1u << (shift - 1)) - 1 + (whole >> shift & 1)) >> shift;
    return (uint16_t)(sign | rounded);
}

/* Returns the bits of the nearest bfloat16 value, ties to even. Equals __float2bfloat16_rn(). */
FDSL_HD uint16_t bf16_from_float(float value)
{
    uint32_t bits = float_bits(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) /* NaN */
        return 0x7FFF;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Converts fp16 to float. The conversion is exact and keeps the payload of NaN. */
FDSL_HD float half_to_float(uint16_t bits)
{
    uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u, sign = (uint32_t)(bits >> 15) << 31;
    if (exponent == 0) /* zeros and subnormals */
        return float_from_bits(float_bits((float)mantissa * 0x1p-24f) | sign);
    return float_from_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

/* Converts bfloat16 to float. The conversion is exact and keeps the payload of NaN. */
FDSL_HD float bf16_to_float(uint16_t bits)
{
    return float_from_bits((uint32_t)bits << 16);
}

#endif
