/* Element types of images, tensors and batches, and conversions between them; shapes and batches of samples.
 */
#ifndef FDSL_CORE_DTYPE_H
#define FDSL_CORE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/portable.h"

/* Images and arrays in .npy files have one of the first three types. Embeddings (data/embeddings.h) and
 * output may also have the type DTYPE_BF16. */
enum dtype {
    DTYPE_U8,
    DTYPE_F16,
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_STORED /* a request to keep the type of the file, byte for byte */
};

/* Returns the bytes per element; `type` must not be DTYPE_STORED. */
FDSL_HD size_t dtype_bytes(enum dtype type)
{
    return type == DTYPE_U8 ? 1 : type == DTYPE_F32 ? 4 : 2;
}

/* The names of the types, indexed by enum dtype; NULL-terminated, for option_spec.choices. */
static const char *const dtype_names[] __attribute__((unused)) = {"u8", "f16", "f32", "bf16", NULL};

/* Returns the type string of a NumPy header, such as "<f2". NumPy has no bf16, so its bits are stored as
 * "<u2". */
static inline const char *dtype_npy(enum dtype type)
{
    static const char *const types[] = {"|u1", "<f2", "<f4", "<u2"};
    return types[type];
}

/* Converts the NumPy type string "|u1", "<f2" or "<f4". Returns false for all others. */
static inline bool dtype_from_npy(const char *npy, enum dtype *type)
{
    for (int i = DTYPE_U8; i <= DTYPE_F32; i++)
        if (strcmp(npy, dtype_npy((enum dtype)i)) == 0) {
            *type = (enum dtype)i;
            return true;
        }
    return false;
}

/* ---- fp16 and bfloat16 ---- */

/* Conversions between float and the bits of fp16 and bfloat16, bit-identical on host and device. */

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

/* ---- fp8 ---- */

/* Conversions between float and fp8 e4m3fn: 1 sign bit, 4 exponent bits, 3 mantissa bits, no infinity.
 * Bit-identical on host and device. The format is E4M3 of Micikevicius et al., "FP8 formats for deep
 * learning", 2022, and of the OCP 8-bit floating point specification (OFP8) 1.0. */

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

/* ---- fp4 ---- */

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

/* Returns the value of the scale of an MXFP4 block, an exponent with bias 127; NaN for MXFP4_SCALE_NAN. The
 * value is exact. */
FDSL_HD float mxfp4_scale_value(uint8_t scale)
{
    return float_from_bits(scale == MXFP4_SCALE_NAN ? 0x7FFFFFFFu
                           : scale == 0             ? 1u << 22
                                                    : scale * (1u << 23));
}

/* Returns the value of an FP4 code in an MXFP4 block: code times scale. The value is exact in float and in
 * bfloat16, except that magnitudes of at least 2^128 are infinite. */
FDSL_HD float mxfp4_value(uint8_t code, uint8_t scale)
{
    return scale == MXFP4_SCALE_NAN ? mxfp4_scale_value(scale)
                                    : fp4_to_float(code) * mxfp4_scale_value(scale);
}

/* Returns the value of an FP4 code in an NVFP4 block: code times scale, which is exact, times the scale of
 * the tensor, rounded to the nearest float. NaN if the scale is NaN. */
FDSL_HD float nvfp4_value(uint8_t code, uint8_t scale, float tensor_scale)
{
    if ((scale & 0x7F) == FP8_NAN)
        return float_from_bits(0x7FFFFFFFu);
    return fp4_to_float(code) * fp8_to_float(scale) * tensor_scale;
}

/* Converts float64 to float: rounds to nearest, ties to even; magnitudes above the largest float become
 * infinite, and every NaN becomes 0x7FFFFFFF. */
FDSL_HD float float_from_double(double value)
{
    return value != value ? float_from_bits(0x7FFFFFFFu) : (float)value;
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

/* ---- Batches ---- */

/* A batch of samples is in host or device memory: the address, layout and type of its values, and its
 * labels. */

/* The shape of a sample. */
struct shape {
    uint32_t channels, depth, height, width; /* after a linear layer: features, 1, 1, 1; of tokens: tokens, 1,
                                                1, width */
};

/* Returns the number of values of a shape. */
static inline size_t shape_values(const struct shape *shape)
{
    return (size_t)shape->channels * shape->depth * shape->height * shape->width;
}

struct batch {
    const void *values;
    size_t bytes;  /* size of all samples, including the padding after the last one */
    size_t stride; /* bytes from one sample to the next */
    uint32_t count;
    enum dtype type;
    bool interleaved;      /* true: NHWC; false: NCHW */
    const int32_t *labels; /* in the same memory (host or device) as `values`; NULL: none */
    uint64_t first;        /* number of the first sample */
};

#endif
