/* An independent definition of rounding to a small floating-point type: the nearest value, found by searching
 * a table of all values of the type in double precision. */
#ifndef FDSL_TESTS_CONVERSIONS_H
#define FDSL_TESTS_CONVERSIONS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

/* A floating-point type with one sign bit. Larger positive values have larger codes. */
struct small_type {
    int exponent_bits, mantissa_bits;
    int largest;     /* code of the largest finite value */
    double *values;  /* values of the codes 0 to `largest` */
    double overflow; /* the value after the largest one, if the exponent were unlimited */
};

static inline double small_value(const struct small_type *type, int code)
{
    int bias = (1 << (type->exponent_bits - 1)) - 1;
    int exponent = code >> type->mantissa_bits, mantissa = code & ((1 << type->mantissa_bits) - 1);
    double fraction = mantissa / (double)(1 << type->mantissa_bits);
    return exponent == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, exponent - bias);
}

static inline struct small_type small_open(int exponent_bits, int mantissa_bits, int largest)
{
    struct small_type type = {exponent_bits, mantissa_bits, largest, NULL, 0};
    type.values = malloc(((size_t)largest + 1) * sizeof *type.values);
    for (int code = 0; type.values && code <= largest; code++)
        type.values[code] = small_value(&type, code);
    type.overflow = small_value(&type, largest + 1);
    return type;
}

/* Returns the code of the value nearest to `magnitude`, which must be finite and at least 0. If two values
 * are equally near, returns the even code. If the nearest value is `overflow`, returns largest + 1. */
static inline int small_nearest(const struct small_type *type, double magnitude)
{
    int low = 0, high = type->largest;
    if (magnitude >= type->values[high]) {
        double below = magnitude - type->values[high], above = type->overflow - magnitude;
        return below < above || (below == above && high % 2 == 0) ? high : high + 1;
    }
    while (high - low > 1) { /* values[low] <= magnitude < values[high] */
        int middle = (low + high) / 2;
        if (type->values[middle] <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double below = magnitude - type->values[low], above = type->values[high] - magnitude;
    return below < above || (below == above && low % 2 == 0) ? low : high;
}

#endif
