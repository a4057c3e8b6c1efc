/* What a sample becomes in a batch tensor: one definition for host and device.
 *
 * A value x becomes one fused multiply-add, x * scale + bias, and one rounding to the tensor's type: bytes
 * count as 0 to 1, floats as they are, and scale and bias come from --mean and --std. What is no number
 * becomes the one NaN that GPUs make, whatever its payload. A raw tensor holds the values' own bits. */
#ifndef FDSL_LOAD_CONVERT_H
#define FDSL_LOAD_CONVERT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"
#include "core/half.h"
#include "core/portable.h"

struct convert {
    enum dtype source;
    enum dtype tensor;
    float scale, bias;
};

/* (x - mean) / std as one multiply-add: of bytes, which are 0 to 255, and of floats. */
FDSL_HD struct convert convert_make(enum dtype source, enum dtype tensor, double mean, double std)
{
    struct convert convert = {source, tensor, (float)((source == DTYPE_U8 ? 1.0 / 255 : 1.0) / std),
                              (float)(-mean / std)};
    return convert;
}

FDSL_HD uint32_t convert_value_bytes(const struct convert *convert)
{
    return (uint32_t)dtype_bytes(convert->tensor == DTYPE_STORED ? convert->source : convert->tensor);
}

/* The value in the tensor, before it is rounded. */
FDSL_HD float convert_scale(float value, float scale, float bias)
{
    float scaled = fmaf(value, scale, bias);
    return scaled == scaled ? scaled : float_from_bits(0x7FFFFFFF);
}

/* Value number i of a sample, from its bytes, which need not be aligned. */
FDSL_HD float convert_load(enum dtype source, const uint8_t *values, uint64_t i)
{
    if (source == DTYPE_U8)
        return (float)values[i];
    if (source == DTYPE_F16)
        return half_to_float((uint16_t)(values[2 * i] | values[2 * i + 1] << 8));
    return float_from_bits(values[4 * i] | (uint32_t)values[4 * i + 1] << 8 |
                           (uint32_t)values[4 * i + 2] << 16 | (uint32_t)values[4 * i + 3] << 24);
}

/* Writes value number i of a sample to its place in the slot: the reference, value by value. */
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

#endif
