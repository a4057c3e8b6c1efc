/* The definition of the steps of `ops` for one row of values, bit-identical on host and device. Rows are
 * stored little-endian as f32, f16 or bf16. docs/ops.md describes the steps. */
#ifndef FDSL_OPS_ROW_H
#define FDSL_OPS_ROW_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"
#include "core/portable.h"

/* Number of accumulators of ops_square_sum(). */
#define OPS_ACCUMULATORS 128

/* Types of output rows, in the order of the option --to. */
enum ops_type { OPS_F32, OPS_F16, OPS_BF16, OPS_FP8, OPS_NVFP4, OPS_MXFP4 };

/* The conversion of rows. */
struct ops_format {
    enum dtype from;
    enum ops_type to;
    uint32_t columns;
    bool saturate;      /* fp8: large values become 448, not NaN */
    float tensor_scale; /* NVFP4 */
};

/* Returns value `i` of a row. The conversion to float is exact. On the host, rows may be unaligned. */
FDSL_HD float ops_value(const void *row, enum dtype type, uint32_t i)
{
#ifdef __CUDA_ARCH__
    if (type == DTYPE_F32)
        return ((const float *)row)[i];
    uint16_t bits = ((const uint16_t *)row)[i];
#else
    float value;
    uint16_t bits;
    if (type == DTYPE_F32) {
        memcpy(&value, (const uint8_t *)row + 4 * (size_t)i, sizeof value);
        return value;
    }
    memcpy(&bits, (const uint8_t *)row + 2 * (size_t)i, sizeof bits);
#endif
    return type == DTYPE_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

/* Returns the sum of the squares of a row. Accumulator j sums the squares of values j, j + 128, j + 256, ...
 * with fmaf; then the accumulators are added in pairs at distances 64, 32, ... 1. No term is negative, and
 * each term passes at most n = ceil(columns / 128) + 7 roundings. To first order, the relative error of a
 * finite sum is therefore at most n * 2^-24. Squares that are too small for float add to this error. */
FDSL_HD float ops_square_sum(const void *row, enum dtype type, uint32_t columns)
{
    float sums[OPS_ACCUMULATORS] = {0};
    for (uint32_t i = 0; i < columns; i++) {
        float value = ops_value(row, type, i);
        sums[i % OPS_ACCUMULATORS] = fmaf(value, value, sums[i % OPS_ACCUMULATORS]);
    }
    for (uint32_t distance = OPS_ACCUMULATORS / 2; distance > 0; distance /= 2)
        for (uint32_t j = 0; j < distance; j++)
            sums[j] += sums[j + distance];
    return sums[0];
}

/* Returns whether a row with this sum of squares is valid: the sum is between the squares of the bounds, both
 * computed in float. NaN and infinity are invalid. */
FDSL_HD bool ops_in_bounds(float square_sum, float norm_min, float norm_max)
{
    return norm_min * norm_min <= square_sum && square_sum <= norm_max * norm_max;
}

/* ---- Conversions ---- */

/* Values per block of a scaled type; 0 for other types. */
FDSL_HD uint32_t ops_block(enum ops_type to)
{
    return to == OPS_NVFP4 ? NVFP4_BLOCK : to == OPS_MXFP4 ? MXFP4_BLOCK : 0;
}

/* Number of scales of an output row, one byte each. */
FDSL_HD size_t ops_scale_bytes(enum ops_type to, uint32_t columns)
{
    uint32_t block = ops_block(to);
    return block ? ((size_t)columns + block - 1) / block : 0;
}

/* Bytes of an output row without its scales. The last block of a scaled type is padded with zeros. */
FDSL_HD size_t ops_value_bytes(enum ops_type to, uint32_t columns)
{
    size_t block = ops_block(to);
    if (block)
        return ops_scale_bytes(to, columns) * (block / 2);
    return (size_t)columns * (to == OPS_F32 ? 4 : to == OPS_FP8 ? 1 : 2);
}

/* Returns whether the conversion copies the stored bytes. */
FDSL_HD bool ops_copies(enum dtype from, enum ops_type to)
{
    return (from == DTYPE_F32 && to == OPS_F32) || (from == DTYPE_F16 && to == OPS_F16) ||
           (from == DTYPE_BF16 && to == OPS_BF16);
}

/* Returns the bits of a float. Every NaN becomes 0x7FFFFFFF; in f16 and bf16, every NaN becomes 0x7FFF. */
FDSL_HD uint32_t ops_f32_bits(float value)
{
    uint32_t bits = float_bits(value);
    return (bits & 0x7FFFFFFF) > FLOAT_INFINITE ? 0x7FFFFFFF : bits;
}

/* Converts one value to a type without blocks, and stores it as element i of `values`. */
FDSL_HD void ops_store(const struct ops_format *format, float value, void *values, uint32_t i)
{
    if (format->to == OPS_F32)
        ((uint32_t *)values)[i] = ops_f32_bits(value);
    else if (format->to == OPS_F16)
        ((uint16_t *)values)[i] = half_from_float(value);
    else if (format->to == OPS_BF16)
        ((uint16_t *)values)[i] = bf16_from_float(value);
    else
        ((uint8_t *)values)[i] = fp8_from_float(value, format->saturate);
}

/* Returns the scale of a block whose largest magnitude is `largest`, and sets the factor by which its values
 * are multiplied. */
FDSL_HD uint8_t ops_block_scale(const struct ops_format *format, uint32_t largest, float *factor)
{
    if (format->to == OPS_MXFP4) {
        uint8_t scale = mxfp4_scale(largest);
        *factor = mxfp4_factor(scale);
        return scale;
    }
    uint8_t scale = nvfp4_scale(largest, format->tensor_scale);
    *factor = nvfp4_factor(scale, format->tensor_scale);
    return scale;
}

/* Converts block `block` of a row to fp4. */
FDSL_HD void ops_convert_block(const struct ops_format *format, const void *row, uint32_t block,
                               uint8_t *values, uint8_t *scales)
{
    uint32_t size = ops_block(format->to), first = block * size, largest = 0;
    uint32_t count = format->columns - first < size ? format->columns - first : size;
    float factor;
    for (uint32_t i = 0; i < count; i++)
        largest = magnitude_max(largest, ops_value(row, format->from, first + i));
    scales[block] = ops_block_scale(format, largest, &factor);
    for (uint32_t i = 0; i < size; i += 2) {
        float even = i < count ? ops_value(row, format->from, first + i) : 0;
        float odd = i + 1 < count ? ops_value(row, format->from, first + i + 1) : 0;
        values[(first + i) / 2] = fp4_pair(even, odd, factor);
    }
}

/* Converts a row. Writes ops_value_bytes() and ops_scale_bytes() bytes; `scales` may be NULL for types
 * without blocks. */
FDSL_HD void ops_convert_row(const struct ops_format *format, const void *row, uint8_t *values,
                             uint8_t *scales)
{
    size_t scale_count = ops_scale_bytes(format->to, format->columns);
    if (ops_copies(format->from, format->to)) {
        memcpy(values, row, ops_value_bytes(format->to, format->columns));
        return;
    }
    for (uint32_t block = 0; scales && block < scale_count; block++)
        ops_convert_block(format, row, block, values, scales);
    for (uint32_t i = 0; !scale_count && i < format->columns; i++)
        ops_store(format, ops_value(row, format->from, i), values, i);
}

/* Returns the larger of `largest` and the largest finite magnitude of a row, as bits. */
FDSL_HD uint32_t ops_largest_finite(const void *row, enum dtype type, uint32_t columns, uint32_t largest)
{
    for (uint32_t i = 0; i < columns; i++) {
        uint32_t magnitude = magnitude_max(0, ops_value(row, type, i));
        if (magnitude < FLOAT_INFINITE && magnitude > largest)
            largest = magnitude;
    }
    return largest;
}

#endif
