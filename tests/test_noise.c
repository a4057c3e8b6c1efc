/* Tests the noise of a vertex: published values, both rules for gradients, random draws, half precision. */
#include <criterion/criterion.h>

#include <math.h>
#include <string.h>

#include "synth/atom.h"

TestSuite(noise, .timeout = 60);

static void fill_gradients(enum formula_id formula, float gradients[NOISE_TABLE_COUNT])
{
    const struct line_rules rules = line_rules_of(formula);
    noise_gradients(&rules, gradients);
}

static float noise_at_place(const float *gradients, float place)
{
    float whole = floorf(place);
    return noise_at(gradients, (uint32_t)whole % NOISE_PERIOD, place - whole);
}

/* Values that the noise package of the published data set computes for float32 positions. */
Test(noise, visualatom_matches_the_published_table)
{
    static const struct {
        float place, noise;
    } published[] = {{0.25f, 0.68613285f},   {0.5f, 0.69999999f},      {3.75f, 0.05859375f},
                     {15.9f, 0.04582105f},   {16.125f, -0.07728882f},  {100.3f, 0.24652521f},
                     {255.5f, -0.30000001f}, {256.5f, 0.69999999f},    {1023.9f, -0.30178776f},
                     {1024.1f, 0.31410572f}, {5000.625f, 0.04673767f}, {9999.99f, 0.00391350f}};
    float gradients[NOISE_TABLE_COUNT];
    fill_gradients(FORMULA_VISUALATOM, gradients);
    for (size_t i = 0; i < COUNT_OF(published); i++)
        cr_assert_float_eq(noise_at_place(gradients, published[i].place), published[i].noise, 2e-6,
                           "at %.9g: %.9g", published[i].place,
                           noise_at_place(gradients, published[i].place));
}

/* In the middle of cell i, the weight (fade) is 1/2. So the noise is (G(i) - G(i+1)) / 10, where G(i) is the
 * gradient of cell i. The hashes of cells 0 to 4 are 151, 160, 137, 91, 90. Gradients are 8, 1, -2, -4, -3
 * with `uji`, and 8, 1, -1, -1, -1 with `visualatom`. */
Test(noise, both_rules_give_the_values_computed_by_hand)
{
    float uji[NOISE_TABLE_COUNT], visualatom[NOISE_TABLE_COUNT];
    fill_gradients(FORMULA_UJI, uji);
    fill_gradients(FORMULA_VISUALATOM, visualatom);
    static const float uji_half[] = {0.7f, 0.3f, 0.2f, -0.1f}, visualatom_half[] = {0.7f, 0.2f, 0, 0};
    for (uint32_t cell = 0; cell < 4; cell++) {
        cr_assert_float_eq(noise_at(uji, cell, 0.5f), uji_half[cell], 1e-6, "cell %u", cell);
        cr_assert_float_eq(noise_at(visualatom, cell, 0.5f), visualatom_half[cell], 1e-6, "cell %u", cell);
    }
    /* Cell 3, t = 1/4, with `uji`: the fade is 0.103515625. The left gradient gives -4 t = -1, the right
     * gradient gives -3 (t - 1) = 2.25. */
    cr_assert_float_eq(noise_at(uji, 3, 0.25f), 0.4 * (-1 + 0.103515625 * 3.25), 1e-6);
    /* Cell 3, t = 1/4, with `visualatom`: the gradients give -t = -0.25 and 1 - t = 0.75. */
    cr_assert_float_eq(noise_at(visualatom, 3, 0.25f), 0.4 * (-0.25 + 0.103515625), 1e-6);
    /* The last cell has hash 180 and gradient 5. The first cell, with gradient 8, follows it. */
    cr_assert_float_eq(noise_at(uji, 255, 0.5f), -0.3, 1e-6);
}

Test(noise, the_table_is_a_permutation)
{
    int seen[NOISE_PERIOD] = {0};
    for (int i = 0; i < NOISE_PERIOD; i++)
        seen[noise_permutation[i]]++;
    for (int i = 0; i < NOISE_PERIOD; i++)
        cr_assert_eq(seen[i], 1, "%d", i);
}

/* Near the right end of a cell, the weight (fade) differs from 1 by a few units in the last place. The noise
 * is about this difference times a factor of up to 3.2. */
Test(noise, is_zero_at_every_border_and_continuous)
{
    for (int formula = FORMULA_UJI; formula <= FORMULA_VISUALATOM; formula++) {
        float gradients[NOISE_TABLE_COUNT];
        fill_gradients((enum formula_id)formula, gradients);
        for (uint32_t cell = 0; cell < NOISE_PERIOD; cell++) {
            cr_assert_eq(noise_at(gradients, cell, 0), 0, "cell %u", cell);
            cr_assert_float_eq(noise_at(gradients, cell, 1 - 0x1p-24f), 0, 2e-6, "cell %u", cell);
            cr_assert_float_eq(noise_at(gradients, cell, 0x1p-24f), 0, 1e-6, "cell %u", cell);
        }
    }
}

Test(noise, draws_at_borders_of_cells_have_the_expected_noise)
{
    float gradients[NOISE_TABLE_COUNT];
    fill_gradients(FORMULA_UJI, gradients);
    cr_assert_eq(noise_of_draw(gradients, 0), 0);
    /* 2^31 is exactly position 5000, the border of a cell. */
    cr_assert_eq(noise_of_draw(gradients, UINT32_C(1) << 31), 0);
    /* The last draw is position 10000 - 10000/2^32. Its cell is 9999 & 255 = 15, and its fraction, rounded
     * down to 24 bits, is t = (2^24 - 40) / 2^24. */
    cr_assert_eq(noise_of_draw(gradients, UINT32_MAX), noise_at(gradients, 15, 16777176.0f / 16777216.0f));
    /* 2^31 + 2^29 is position 6250, at the start of cell 106. Adding 107374, about 2^32/40000, moves it by
     * a quarter of a cell (t = 0.2499996). */
    cr_assert_float_eq(noise_of_draw(gradients, 0xA0000000u + 107374u), noise_at(gradients, 106, 0.25f),
                       2e-6);
    cr_assert_neq(noise_at(gradients, 106, 0.25f), 0);
}

Test(noise, never_exceeds_its_limit)
{
    for (int formula = FORMULA_UJI; formula <= FORMULA_VISUALATOM; formula++) {
        float gradients[NOISE_TABLE_COUNT], largest = 0;
        fill_gradients((enum formula_id)formula, gradients);
        for (uint32_t cell = 0; cell < NOISE_PERIOD; cell++)
            for (int step = 0; step < 4096; step++)
                largest = fmaxf(largest, fabsf(noise_at(gradients, cell, (float)step / 4096)));
        cr_assert(largest > 0.9f && largest <= NOISE_LIMIT, "%.9g", largest);
    }
}

/* Returns the standard deviation of the noise, and sets `mean`. The draws are spread evenly over all 2^32
 * values. */
static double deviation(enum formula_id formula, double *mean)
{
    float gradients[NOISE_TABLE_COUNT];
    fill_gradients(formula, gradients);
    const int count = 1 << 22;
    double sum = 0, squares = 0;
    for (int i = 0; i < count; i++) {
        double noise = noise_of_draw(gradients, (uint32_t)i * 1024u + 511u);
        sum += noise;
        squares += noise * noise;
    }
    *mean = sum / count;
    return sqrt(squares / count - *mean * *mean);
}

Test(noise, has_the_expected_mean_and_standard_deviation)
{
    double uji_mean, visualatom_mean;
    double uji = deviation(FORMULA_UJI, &uji_mean),
           visualatom = deviation(FORMULA_VISUALATOM, &visualatom_mean);
    cr_assert_float_eq(uji, 0.513, 0.00513, "%.6f", uji);
    cr_assert_float_eq(visualatom, 0.329, 0.00329, "%.6f", visualatom);
    cr_assert(fabs(uji_mean) < 0.05 && fabs(visualatom_mean) < 0.05, "%.6f %.6f", uji_mean, visualatom_mean);
}

#ifdef __FLT16_MANT_DIG__ /* compares with the compiler's half-precision type */

static void expect_half(float value)
{
    float expected = (float)(_Float16)value, rounded = noise_round_half(value);
    cr_assert_eq(memcmp(&expected, &rounded, sizeof rounded), 0, "%a gives %a, not %a", value, rounded,
                 expected);
}

static float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Checks every half-precision number below 65504, the midpoint to the next one, and the floats next to both,
 * with both signs. */
Test(noise, half_rounding_is_right_at_every_number_and_midpoint)
{
    for (uint32_t half = 0; half < 0x7BFF; half++) {
        uint16_t low_bits = (uint16_t)half, high_bits = (uint16_t)(half + 1);
        _Float16 low, high;
        memcpy(&low, &low_bits, sizeof low);
        memcpy(&high, &high_bits, sizeof high);
        float places[] = {(float)low, ((float)low + (float)high) / 2};
        for (int i = 0; i < 2; i++) {
            float near[] = {places[i], nextafterf(places[i], INFINITY), nextafterf(places[i], -INFINITY)};
            for (int j = 0; j < 3; j++) {
                expect_half(near[j]);
                expect_half(-near[j]);
            }
        }
    }
}

Test(noise, half_rounding_is_right_over_all_magnitudes)
{
    for (uint32_t bits = 0; float_of_bits(bits) < 65504; bits += 1009) {
        expect_half(float_of_bits(bits));
        expect_half(-float_of_bits(bits));
    }
}

#endif

Test(noise, half_rounding_gives_the_values_computed_by_hand)
{
    cr_assert_eq(noise_round_half(1 + 0x1p-11f), 1);           /* a tie goes to the even neighbour: down */
    cr_assert_eq(noise_round_half(1 + 0x3p-11f), 1 + 0x1p-9f); /* a tie goes to the even neighbour: up */
    cr_assert_eq(noise_round_half(1 + 0x1.002p-11f), 1 + 0x1p-10f); /* slightly more than a tie */
    cr_assert_eq(noise_round_half(0x1p-25f), 0);                    /* half the smallest subnormal, a tie */
    cr_assert_eq(noise_round_half(-0x1.8p-25f), -0x1p-24f);
    cr_assert(signbit(noise_round_half(-0.0f)) && noise_round_half(-0.0f) == 0);
}
