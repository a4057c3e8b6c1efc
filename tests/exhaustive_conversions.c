/* Compares the conversions from float to f16, bf16 and fp8 (both modes) with an independent definition, for
 * all 2^32 floats. Started by scripts/check/conversions.sh. Prints one line per conversion. Exit status 1 if
 * any value differs. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>

#include "conversions.h"
#include "core/dtype.h"

enum { F16, BF16, FP8_SATURATE, FP8_NAN_MODE, CONVERSIONS };
static const char *const names[CONVERSIONS] = {"f16", "bf16", "fp8 saturate", "fp8 nan"};
static struct small_type types[CONVERSIONS];

static int expected(int conversion, float value)
{
    static const int nans[] = {0x7FFF, 0x7FFF, 0x7F, 0x7F}, infinities[] = {0x7C00, 0x7F80, 0x7E, 0x7F};
    static const int sign_bits[] = {0x8000, 0x8000, 0x80, 0x80};
    const struct small_type *type = &types[conversion];
    if (isnan(value))
        return nans[conversion];
    int code = isinf(value) ? type->largest + 1 : small_nearest(type, fabs((double)value));
    if (code > type->largest)
        code = infinities[conversion];
    return conversion == FP8_NAN_MODE && code == 0x7F ? code
                                                      : code | (signbit(value) ? sign_bits[conversion] : 0);
}

static int actual(int conversion, float value)
{
    return conversion == F16    ? half_from_float(value)
           : conversion == BF16 ? bf16_from_float(value)
                                : fp8_from_float(value, conversion == FP8_SATURATE);
}

int main(void)
{
    bool failed = false;
    types[F16] = small_open(5, 10, 0x7BFF);
    types[BF16] = small_open(8, 7, 0x7F7F);
    types[FP8_SATURATE] = types[FP8_NAN_MODE] = small_open(4, 3, 0x7E);
    for (int conversion = 0; conversion < CONVERSIONS; conversion++) {
        uint64_t wrong = 0;
#pragma omp parallel for reduction(+ : wrong) schedule(dynamic)
        for (uint32_t high = 0; high < 1 << 16; high++)
            for (uint32_t low = 0; low < 1 << 16; low++) {
                float value = float_from_bits(high << 16 | low);
                wrong += actual(conversion, value) != expected(conversion, value);
            }
        printf("%-12s %" PRIu64 " of 4294967296 floats differ\n", names[conversion], wrong);
        failed |= wrong > 0;
    }
    return failed;
}
