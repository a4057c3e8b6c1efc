/* Conversion of sample values to a batch tensor. Host and device share this definition.
 *
 * One fused multiply-add in float32, x * scale + bias, converts a value x. The result is then rounded to the
 * tensor's type. Scale and bias are computed from --mean and --std. For bytes, the scale includes a division
 * by 255. Any NaN becomes the canonical NaN of GPUs, whatever its payload. With --dtype raw, the tensor keeps
 * the bits of the values. */
#ifndef FDSL_LOAD_CONVERT_H
#define FDSL_LOAD_CONVERT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

struct convert {
    enum dtype source; /* type of the stored values */
    enum dtype tensor; /* type of the tensor; DTYPE_STORED for --dtype raw */
    float scale, bias;
};

/* Expresses (x - mean) / std as one multiply-add. For bytes, x is the value divided by 255. */
FDSL_HD struct convert convert_make(enum dtype source, enum dtype tensor, double mean, double std)
{
    struct convert convert = {source, tensor, (float)((source == DTYPE_U8 ? 1.0 / 255 : 1.0) / std),
                              (float)(-mean / std)};
    return convert;
}

/* Bytes per value of the tensor. */
FDSL_HD uint32_t convert_value_bytes(const struct convert *convert)
{
    return (uint32_t)dtype_bytes(convert->tensor == DTYPE_STORED ? convert->source : convert->tensor);
}

/* Computes the tensor's value in float32, before it is rounded to the tensor's type. */
FDSL_HD float convert_scale(float value, float scale, float bias)
{
    float scaled = fmaf(value, scale, bias);
    return scaled == scaled ? scaled : float_from_bits(0x7FFFFFFF);
}

/* Loads value i of a sample as float. `values` may be unaligned. */
FDSL_HD float convert_load(enum dtype source, const uint8_t *values, uint64_t i)
{
    if (source == DTYPE_U8)
        return (float)values[i];
    if (source == DTYPE_F16)
        return half_to_float((uint16_t)(values[2 * i] | values[2 * i + 1] << 8));
    return float_from_bits(values[4 * i] | (uint32_t)values[4 * i + 1] << 8 |
                           (uint32_t)values[4 * i + 2] << 16 | (uint32_t)values[4 * i + 3] << 24);
}

/* Reference conversion: converts value i of a sample and writes it at index i of `slot`. */
FDSL_HD void convert_one(const struct convert *convert, const uint8_t *values, uint64_t i, uint8_t *slot)
{
    uint32_t bytes = convert_value_bytes(convert), word;
    if (convert->tensor == DTYPE_STORED) {
        for (uint32_t b = 0; b < bytes; b++)
            slot[i * bytes + b] = values[i * bytes + b];
        return;
    }
    float value = convert_scale(convert_load(convert->source, values, i), convert->scale, convert->bias);
    word = convert->tensor == DTYPE_F32   ? float_bits(value)
           : convert->tensor == DTYPE_F16 ? half_from_float(value)
                                          : bf16_from_float(value);
    for (uint32_t b = 0; b < bytes; b++)
        slot[i * bytes + b] = (uint8_t)(word >> 8 * b);
}

/* ---- Comparison of images, for --verify; on the host ---- */

#define PIXEL_GUESS_BITS 12

/* The conversions of all bytes, as the bits of the values. Set it with pixel_values_set(). */
struct pixel_values {
    uint32_t value_bytes; /* bytes per value: 1, 2 or 4 */
    uint32_t words[256];  /* by byte */
    /* By hash of a word: a byte with this hash; 0 if there is none. */
    uint8_t guesses[1 << PIXEL_GUESS_BITS];
};

/* A decoded image: interleaved bytes. */
struct pixels {
    const uint8_t *bytes;
    uint64_t channels, height, width;
};

/* The form in which an image is delivered. */
struct pixel_form {
    const struct pixel_values *values; /* one per channel */
    bool interleaved;                  /* true: NHWC; false: NCHW */
    bool mirrored;                     /* horizontally */
};

FDSL_C_BEGIN

/* Sets `values` to the conversions of bytes. convert->source is DTYPE_U8. */
void pixel_values_set(struct pixel_values *values, const struct convert *convert);

/* Returns whether each value of a delivered image is the conversion of a byte that differs from the decoded
 * byte by at most `tolerance`: a device may decode a JPEG to bytes that differ a little from those of
 * libjpeg. `delivered` may be unaligned. Thread safe. */
bool pixels_match(const struct pixels *pixels, const struct pixel_form *form, uint32_t tolerance,
                  const uint8_t *delivered);

FDSL_C_END

#endif
