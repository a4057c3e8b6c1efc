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

#include "core/half.h"
#include "core/portable.h"
#include "load/augment.h"

enum tensor_type { TENSOR_RAW, TENSOR_F32, TENSOR_F16, TENSOR_BF16 };

struct convert {
    enum image_type source;
    enum tensor_type tensor;
    float scale, bias;
};

#define LABEL_NONE (-1) /* of a sample without one */

/* (x - mean) / std as one multiply-add: of bytes, which are 0 to 255, and of floats. */
FDSL_HD struct convert convert_make(enum image_type source, enum tensor_type tensor, double mean, double std)
{
    struct convert convert = {source, tensor, (float)((source == IMAGE_U8 ? 1.0 / 255 : 1.0) / std),
                              (float)(-mean / std)};
    return convert;
}

FDSL_HD uint32_t convert_source_bytes(enum image_type source)
{
    return source == IMAGE_U8 ? 1 : source == IMAGE_F16 ? 2 : 4;
}

FDSL_HD uint32_t convert_value_bytes(const struct convert *convert)
{
    return convert->tensor == TENSOR_RAW   ? convert_source_bytes(convert->source)
           : convert->tensor == TENSOR_F32 ? 4
                                           : 2;
}

/* The value in the tensor, before it is rounded. */
FDSL_HD float convert_scale(float value, float scale, float bias)
{
    float scaled = fmaf(value, scale, bias);
    return scaled == scaled ? scaled : float_from_bits(0x7FFFFFFF);
}

/* Value number i of a sample, from its bytes, which need not be aligned. */
FDSL_HD float convert_load(enum image_type source, const uint8_t *values, uint64_t i)
{
    if (source == IMAGE_U8)
        return (float)values[i];
    if (source == IMAGE_F16)
        return half_to_float((uint16_t)(values[2 * i] | values[2 * i + 1] << 8));
    return float_from_bits(values[4 * i] | (uint32_t)values[4 * i + 1] << 8 |
                           (uint32_t)values[4 * i + 2] << 16 | (uint32_t)values[4 * i + 3] << 24);
}

/* Writes value number i of a sample to its place in the slot: the reference, value by value. */
FDSL_HD void convert_one(const struct convert *convert, const uint8_t *values, uint64_t i, uint8_t *slot)
{
    uint32_t bytes = convert_value_bytes(convert), word;
    if (convert->tensor == TENSOR_RAW) {
        for (uint32_t b = 0; b < bytes; b++)
            slot[i * bytes + b] = values[i * bytes + b];
        return;
    }
    float value = convert_scale(convert_load(convert->source, values, i), convert->scale, convert->bias);
    word = convert->tensor == TENSOR_F32   ? float_bits(value)
           : convert->tensor == TENSOR_F16 ? half_from_float(value)
                                           : bf16_from_float(value);
    for (uint32_t b = 0; b < bytes; b++)
        slot[i * bytes + b] = (uint8_t)(word >> 8 * b);
}

/* The label in a `.cls` member: a whole number in decimal, blanks around it. False for anything else, and for
 * what an int32 does not hold. */
FDSL_HD bool convert_label(const uint8_t *text, uint64_t size, int32_t *label)
{
    uint64_t i = 0, digits = 0;
    int64_t value = 0;
    while (i < size && (text[i] == ' ' || text[i] == '\n' || text[i] == '\r' || text[i] == '\t'))
        i++;
    bool negative = i < size && text[i] == '-';
    for (i += negative; i < size && text[i] >= '0' && text[i] <= '9'; i++, digits++) {
        value = 10 * value + (text[i] - '0');
        if (value > (int64_t)INT32_MAX + negative)
            return false;
    }
    while (i < size && (text[i] == ' ' || text[i] == '\n' || text[i] == '\r' || text[i] == '\t'))
        i++;
    *label = (int32_t)(negative ? -value : value);
    return digits > 0 && i == size;
}

#endif
