/* Conversions to fp4 e2m1 with one scale per block of values, bit-identical on host and device. The values of
 * e2m1 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; two of them share a byte, the first one in the low
 * four bits.
 *
 * MXFP4: blocks of 32 values with a scale that is a power of two (e8m0), as the "OCP Microscaling Formats
 * (MX) Specification" 1.0 defines in sections 5.3.3, 5.4.1 and 6.3. NVFP4: blocks of 16 values with a scale
 * in fp8 e4m3fn, and one float scale per tensor, as in NVIDIA, "Pretraining large language models with
 * NVFP4", 2025, appendix B.
 *
 * If a block contains NaN or infinity, its scale is NaN and its values are zeros. */
#ifndef FDSL_CORE_FP4_H
#define FDSL_CORE_FP4_H

#include <stdint.h>

#include "core/fp8.h"
#include "core/half.h"
#include "core/portable.h"

#define MXFP4_BLOCK     32
#define NVFP4_BLOCK     16
#define MXFP4_SCALE_NAN 0xFF
#define FP4_MAX         6.0f
#define FLOAT_INFINITE  0x7F800000u /* the bits of infinity; those of a NaN magnitude are larger */

/* Returns the four bits of the nearest e2m1 value, ties to the even code; magnitudes above 6 become 6, NaN
 * becomes 0. */
FDSL_HD uint8_t fp4_from_float(float value)
{
    uint32_t bits = float_bits(value);
    float magnitude = float_from_bits(bits & 0x7FFFFFFF);
    int code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
               (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
    return (uint8_t)((uint32_t)code | (bits >> 28 & 8));
}

/* Converts the low four bits of `bits` to float. The conversion is exact. */
FDSL_HD float fp4_to_float(uint8_t bits)
{
    uint32_t exponent = bits >> 1 & 3u, mantissa = bits & 1u;
    float magnitude =
        exponent == 0 ? 0.5f * (float)mantissa : (float)(1u << (exponent - 1)) * (1 + 0.5f * (float)mantissa);
    return bits & 8 ? -magnitude : magnitude;
}

/* Returns the scale of an MXFP4 block as an exponent with bias 127. The exponent is floor(log2(m)) - 2, where
 * m is the block's largest magnitude, because FP4_MAX has the exponent 2. `largest` contains the bits of
 * m. */
FDSL_HD uint8_t mxfp4_scale(uint32_t largest)
{
    uint32_t exponent = largest >> 23; /* 0 for zero and subnormal values; the smallest scale is 2^-127 */
    if (largest >= FLOAT_INFINITE)
        return MXFP4_SCALE_NAN;
    return (uint8_t)(exponent > 2 ? exponent - 2 : 0);
}

/* Returns the factor by which the values of an MXFP4 block are multiplied: the exact reciprocal of the scale;
 * 0 if the scale is NaN. */
FDSL_HD float mxfp4_factor(uint8_t scale)
{
    return scale == MXFP4_SCALE_NAN ? 0 : float_from_bits((254u - scale) << 23);
}

/* Returns the scale of an NVFP4 tensor. It maps the largest finite magnitude of the tensor, whose bits are
 * `largest`, to 6 * 448. */
FDSL_HD float nvfp4_tensor_scale(uint32_t largest)
{
    return float_from_bits(largest) / (FP4_MAX * FP8_MAX);
}

/* Returns the scale of an NVFP4 block. `largest` contains the bits of the block's largest magnitude. */
FDSL_HD uint8_t nvfp4_scale(uint32_t largest, float tensor_scale)
{
    if (largest >= FLOAT_INFINITE)
        return FP8_NAN;
    return tensor_scale > 0 ? fp8_from_float(float_from_bits(largest) / FP4_MAX / tensor_scale, true) : 0;
}

/* Returns the factor by which the values of an NVFP4 block are multiplied; 0 if the scale is NaN, 0 or so
 * small that its reciprocal is infinite. */
FDSL_HD float nvfp4_factor(uint8_t scale, float tensor_scale)
{
    float product = scale == FP8_NAN ? 0 : fp8_to_float(scale) * tensor_scale;
    return product >= 0x1p-127f ? 1 / product : 0;
}

/* Returns the larger of `largest` and the magnitude of `value`, as bits. NaN is larger than infinity. */
FDSL_HD uint32_t magnitude_max(uint32_t largest, float value)
{
    uint32_t magnitude = float_bits(value) & 0x7FFFFFFF;
    return magnitude > largest ? magnitude : largest;
}

/* Converts two values to one byte. A factor of 0 gives zeros, even for values that are not finite. */
FDSL_HD uint8_t fp4_pair(float first, float second, float factor)
{
    uint8_t pair = (uint8_t)(fp4_from_float(first * factor) | fp4_from_float(second * factor) << 4);
    return factor > 0 ? pair : 0;
}

#endif
