/* Tests the definitions of the steps of `ops`: norms, bounds, and conversions at every boundary. For f16,
 * bf16 and fp8, scripts/check/conversions.sh checks all floats. */
#include <criterion/criterion.h>

#include <string.h>

#include "conversions.h"
#include "ops/row.h"

/* ---- Norms ---- */

Test(ops_row, square_sum_follows_its_definition)
{
    static const uint32_t sizes[] = {1, 2, 3, 127, 128, 129, 131, 255, 256, 257, 768, 4096};
    for (size_t s = 0; s < COUNT_OF(sizes); s++) {
        static float row[4096];
        double exact = 0;
        for (uint32_t i = 0; i < sizes[s]; i++) {
            row[i] = (float)sin(i * 0.7 + 1);
            exact += (double)row[i] * row[i];
        }
        double bound = (ceil(sizes[s] / 128.0) + 7) * 0x1p-24 * exact;
        cr_expect(fabs(ops_square_sum(row, DTYPE_F32, sizes[s]) - exact) <= bound, "%u columns", sizes[s]);
    }
    /* Values 0 and 128 share an accumulator, so fmaf() keeps 2^-24 only if 1 is added after it. */
    float row[129] = {[0] = 0x1p-12f, [128] = 1};
    cr_expect_eq(ops_square_sum(row, DTYPE_F32, 129), 1); /* the sum is a tie, which is rounded to even */
    row[0] = 1, row[128] = 0x1.000002p-12f;
    cr_expect_eq(ops_square_sum(row, DTYPE_F32, 129), 0x1.000002p0f);
}

Test(ops_row, square_sum_reads_every_type)
{
    float wide[5] = {1, -0.5f, 2, 0.25f, -3}, sum = ops_square_sum(wide, DTYPE_F32, 5);
    uint16_t half[5], bf16[5];
    for (int i = 0; i < 5; i++) {
        half[i] = half_from_float(wide[i]);
        bf16[i] = bf16_from_float(wide[i]);
    }
    cr_expect_eq(sum, 14.3125f);
    cr_expect_eq(ops_square_sum(half, DTYPE_F16, 5), sum);
    cr_expect_eq(ops_square_sum(bf16, DTYPE_BF16, 5), sum);
}

Test(ops_row, bounds_are_inclusive)
{
    float low = 0.1f * 0.1f, high = 100.0f * 100.0f;
    cr_expect(ops_in_bounds(low, 0.1f, 100) && ops_in_bounds(high, 0.1f, 100));
    cr_expect(!ops_in_bounds(nextafterf(low, 0), 0.1f, 100) &&
              !ops_in_bounds(nextafterf(high, 1e9f), 0.1f, 100));
    cr_expect(!ops_in_bounds(NAN, 0, 1e19f) && !ops_in_bounds(INFINITY, 0, 1e19f) &&
              ops_in_bounds(0, 0, 1e19f));
    cr_expect(1e-15f * 1e-15f > 0 && isfinite(1e19f * 1e19f), "the extreme bounds must have normal squares");
}

/* ---- Conversions ---- */

/* Checks each value of a type, each midpoint between two values, and the floats next to these numbers. */
static void expect_boundaries(const struct small_type *type, uint32_t (*convert)(float),
                              uint32_t after_largest, const char *name)
{
    for (int code = 0; code <= type->largest; code++) {
        double next = code < type->largest ? type->values[code + 1] : type->overflow;
        const double points[] = {type->values[code], (type->values[code] + next) / 2};
        for (int p = 0; p < 2; p++)
            for (int step = -1; step <= 1; step++) {
                float value = (float)points[p];
                if (step)
                    value = nextafterf(value, step < 0 ? -INFINITY : INFINITY);
                if (value < 0 || isinf(value))
                    continue;
                int nearest = small_nearest(type, value);
                uint32_t expected = nearest > type->largest ? after_largest : (uint32_t)nearest;
                cr_assert_eq(convert(value), expected, "%s: %a gives %#x, not %#x", name, (double)value,
                             convert(value), expected);
            }
    }
}

static uint32_t to_f16(float value)
{
    return half_from_float(value);
}
static uint32_t to_bf16(float value)
{
    return bf16_from_float(value);
}
static uint32_t to_fp8_saturate(float value)
{
    return fp8_from_float(value, true);
}
static uint32_t to_fp8_nan(float value)
{
    return fp8_from_float(value, false);
}
static uint32_t to_fp4(float value)
{
    return fp4_from_float(value);
}

Test(ops_row, conversions_round_to_nearest_even)
{
    struct small_type f16 = small_open(5, 10, 0x7BFF), bf16 = small_open(8, 7, 0x7F7F),
                      fp8 = small_open(4, 3, 0x7E), fp4 = small_open(2, 1, 7);
    cr_assert(f16.values && bf16.values && fp8.values && fp4.values);
    expect_boundaries(&f16, to_f16, 0x7C00, "f16");
    expect_boundaries(&bf16, to_bf16, 0x7F80, "bf16");
    expect_boundaries(&fp8, to_fp8_saturate, 0x7E, "fp8 saturate");
    expect_boundaries(&fp8, to_fp8_nan, 0x7F, "fp8 nan");
    expect_boundaries(&fp4, to_fp4, 7, "fp4");
    for (int code = 0; code < 256; code++) {
        cr_expect((code & 0x7F) == 0x7F || fp8_from_float(fp8_to_float((uint8_t)code), false) == code, "%#x",
                  code);
        cr_expect_eq(fp4_from_float(fp4_to_float((uint8_t)code)), code & 15);
    }
    cr_expect_eq(fabs((double)fp8_to_float(0x7E)), 448);
    free(f16.values);
    free(bf16.values);
    free(fp8.values);
    free(fp4.values);
}

Test(ops_row, special_values_have_the_expected_codes)
{
    cr_expect_eq(fp8_from_float(NAN, true), 0x7F);
    cr_expect_eq(fp8_from_float(-NAN, false), 0x7F);
    cr_expect_eq(fp8_from_float(-INFINITY, true), 0xFE);
    cr_expect_eq(fp8_from_float(-INFINITY, false), 0x7F);
    cr_expect_eq(fp8_from_float(-464, false), 0xFE);
    cr_expect_eq(fp8_from_float(nextafterf(464, 500), false), 0x7F);
    cr_expect_eq(fp8_from_float(nextafterf(464, 500), true), 0x7E);
    cr_expect_eq(fp8_from_float(-0.0f, true), 0x80);
    cr_expect(isnan(fp8_to_float(0x7F)) && isnan(fp8_to_float(0xFF)));
    cr_expect_eq(fp4_from_float(-0.0f), 8);
    cr_expect_eq(fp4_from_float(-INFINITY), 15);
    cr_expect_eq(ops_f32_bits(-NAN), 0x7FFFFFFF);
    cr_expect_eq(ops_f32_bits(-1), 0xBF800000);
}

/* ---- Blocks ---- */

Test(ops_row, output_rows_have_the_expected_sizes)
{
    cr_expect_eq(ops_value_bytes(OPS_F32, 3), 12);
    cr_expect_eq(ops_value_bytes(OPS_BF16, 3), 6);
    cr_expect_eq(ops_value_bytes(OPS_FP8, 3), 3);
    cr_expect_eq(ops_value_bytes(OPS_NVFP4, 17), 16);
    cr_expect_eq(ops_scale_bytes(OPS_NVFP4, 17), 2);
    cr_expect_eq(ops_value_bytes(OPS_MXFP4, 33), 32);
    cr_expect_eq(ops_scale_bytes(OPS_MXFP4, 32), 1);
    cr_expect_eq(ops_scale_bytes(OPS_F16, 32), 0);
}

Test(ops_row, mxfp4_blocks_have_the_expected_codes_and_scales)
{
    float row[33] = {6, -4, 0.26f, 0.75f, [32] = 0.01f};
    uint8_t values[32], scales[2];
    struct ops_format format = {.from = DTYPE_F32, .to = OPS_MXFP4, .columns = 33};
    ops_convert_block(&format, row, 0, values, scales);
    ops_convert_block(&format, row, 1, values, scales);
    cr_expect_eq(scales[0], 127); /* floor(log2 6) - 2 = 0 */
    cr_expect_eq(values[0], 0xE7);
    cr_expect_eq(values[1], 0x21); /* 0.75 is halfway between 0.5 and 1, so it gets the even code */
    cr_expect_eq(values[2], 0);
    cr_expect_eq(scales[1], 127 - 7 - 2);
    cr_expect_eq(values[16], 0x07 & 0xF); /* 0.01 * 2^9 = 5.12 is above the midpoint 5, so it gets 6 */
    cr_expect_eq(values[17], 0, "padding must be 0");
    /* Scales of the largest float, the smallest normal float, zero and infinity. */
    cr_expect_eq(mxfp4_scale(float_bits(0x1.fffffep127f)), 252);
    cr_expect_eq(mxfp4_scale(float_bits(0x1p-126f)), 0);
    cr_expect_eq(mxfp4_scale(0), 0);
    cr_expect_eq(mxfp4_scale(float_bits(INFINITY)), 0xFF);
    cr_expect_eq(mxfp4_factor(127), 1);
    cr_expect_eq(mxfp4_factor(0), 0x1p127f);
    row[5] = NAN;
    ops_convert_block(&format, row, 0, values, scales);
    cr_expect(scales[0] == 0xFF && values[0] == 0 && values[2] == 0);
}

Test(ops_row, nvfp4_blocks_have_the_expected_codes_and_scales)
{
    float row[16] = {6 * 448, -3 * 448, 448};
    uint8_t values[8], scale;
    struct ops_format format = {.from = DTYPE_F32, .to = OPS_NVFP4, .columns = 16};
    format.tensor_scale = nvfp4_tensor_scale(float_bits(row[0]));
    cr_expect_eq(format.tensor_scale, 1);
    ops_convert_block(&format, row, 0, values, &scale);
    cr_expect_eq(scale, 0x7E);
    cr_expect(values[0] == (0x7 | 0xD << 4) && values[1] == 0x2);
    /* If all values of a block are far below the largest value of the tensor, the scale of the block is the
     * smallest fp8 value, or 0. */
    row[0] = 6 * 0x1p-9f, row[1] = row[2] = 0;
    ops_convert_block(&format, row, 0, values, &scale);
    cr_expect(scale == 1 && values[0] == 7);
    row[0] = 6 * 0x1p-11f;
    ops_convert_block(&format, row, 0, values, &scale);
    cr_expect(scale == 0 && values[0] == 0);
    row[0] = INFINITY;
    ops_convert_block(&format, row, 0, values, &scale);
    cr_expect(scale == FP8_NAN && values[0] == 0);
    /* A tensor of zeros and a tensor of subnormal floats must not give NaN or infinity. */
    memset(row, 0, sizeof row);
    format.tensor_scale = nvfp4_tensor_scale(0);
    ops_convert_block(&format, row, 0, values, &scale);
    cr_expect(scale == 0 && values[0] == 0);
    row[0] = 0x1p-140f;
    format.tensor_scale = nvfp4_tensor_scale(float_bits(row[0]));
    ops_convert_block(&format, row, 0, values, &scale);
    cr_expect_eq(values[0], 0);
}

/* A converted value must be near the original value. Neighbouring e2m1 values differ by at most 2, so the
 * rounding error of a value is at most the scale. In MXFP4, scaled values may be almost 8 and are limited to
 * 6, so the error may be 2 times the scale. NVFP4 also rounds the scale, so its bound is 1.3 times. */
Test(ops_row, blocks_approximate_values)
{
    static float row[320];
    uint8_t values[160], scales[20];
    uint32_t largest = 0;
    for (int i = 0; i < 320; i++)
        row[i] = (float)(sin(i * 1.3) * exp(-i * 0.01));
    largest = ops_largest_finite(row, DTYPE_F32, 320, 0);
    for (int to = OPS_NVFP4; to <= OPS_MXFP4; to++) {
        struct ops_format format = {.from = DTYPE_F32,
                                    .to = (enum ops_type)to,
                                    .columns = 320,
                                    .tensor_scale = nvfp4_tensor_scale(largest)};
        uint32_t block = ops_block(format.to);
        for (uint32_t b = 0; b < 320 / block; b++)
            ops_convert_block(&format, row, b, values, scales);
        for (uint32_t i = 0; i < 320; i++) {
            double scale = to == OPS_MXFP4 ? ldexp(1, scales[i / block] - 127)
                                           : (double)fp8_to_float(scales[i / block]) * format.tensor_scale;
            double value = scale * fp4_to_float((uint8_t)(values[i / 2] >> 4 * (i % 2)));
            double bound = scale * (to == OPS_MXFP4 ? 2 : 1.3);
            cr_expect(fabs(value - row[i]) <= bound, "type %d, value %u: %g for %g", to, i, value,
                      (double)row[i]);
        }
    }
}
