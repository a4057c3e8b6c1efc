/* Tests the random permutations of core/philox.h. Every permutation must be a bijection, and the
 * statistics must agree with those of uniformly random permutations. Permutations are pure functions of
 * seeds, so the counts in these tests never change. docs/notes/ops.md says which networks fail. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>

#include "core/philox.h"
#include "core/portable.h"

/* Limit for chi-square statistics in units of their standard deviation. A normal variable exceeds it with a
 * probability of 3 in 100,000; no test computes more than a few dozen statistics. */
#define DEVIATIONS_MAX 4.0

/* Returns the deviation of chi-square from its mean `freedom`, in units of its standard deviation. Chi-square
 * is computed from `count` counts, whose expected value is `expected`. */
static double deviation(const unsigned *counts, size_t count, double expected, double freedom)
{
    double chi_square = 0;
    for (size_t i = 0; i < count; i++)
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    return (chi_square - freedom) / sqrt(2 * freedom);
}

static void expect_bijection(uint64_t seed, uint64_t count)
{
    struct permutation permutation = permutation_begin(seed, count);
    unsigned char *seen = calloc(count, 1);
    cr_assert_not_null(seen);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = permutation_at(&permutation, i);
        cr_assert(at < count && !seen[at], "%llu elements: element %llu", (unsigned long long)count,
                  (unsigned long long)i);
        cr_assert_eq(permutation_inverse(&permutation, at), i, "%llu elements: inverse of element %llu",
                     (unsigned long long)count, (unsigned long long)i);
        seen[at] = 1;
    }
    free(seen);
}

Test(permutation, is_a_bijection)
{
    for (uint64_t bits = 0; bits <= 17; bits++)
        for (int64_t off = -1; off <= 1; off++)
            for (uint64_t seed = 0; seed < 4; seed++)
                if ((int64_t)(UINT64_C(1) << bits) + off > 0)
                    expect_bijection(seed, (UINT64_C(1) << bits) + (uint64_t)off);
    expect_bijection(UINT64_MAX, 5);
    expect_bijection(7, 1000001);
}

/* These values must be the same on every machine and device. */
Test(permutation, known_values_never_change)
{
    static const struct {
        uint64_t seed, count, i, at;
    } known[] = {
        {0, 10, 0, UINT64_C(1)},
        {1, 1000001, 12345, UINT64_C(913037)},
        {UINT64_MAX, UINT64_C(1) << 40, 3, UINT64_C(429962130736)},
        {5, UINT64_MAX, UINT64_MAX - 1, UINT64_C(15811353715829933285)},
    };
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        struct permutation permutation = permutation_begin(known[i].seed, known[i].count);
        cr_expect_eq(permutation_at(&permutation, known[i].i), known[i].at, "case %zu: %llu", i,
                     (unsigned long long)permutation_at(&permutation, known[i].i));
    }
}

/* All permutations of 3 to 6 elements are equally likely. */
Test(permutation, small_permutations_are_equally_likely)
{
    static const uint64_t first_seeds[] = {0, UINT64_C(1) << 20, UINT64_C(1) << 40, UINT64_MAX - (1 << 20)};
    enum { EXPECTED = 100 };
    for (uint64_t n = 3, all = 6; n <= 6; n++, all *= n)
        for (size_t s = 0; s < COUNT_OF(first_seeds); s++) {
            unsigned counts[720] = {0};
            for (uint64_t draw = 0; draw < all * EXPECTED; draw++) {
                struct permutation permutation = permutation_begin(first_seeds[s] + draw, n);
                uint64_t elements[6], number = 0;
                for (uint64_t i = 0; i < n; i++)
                    elements[i] = permutation_at(&permutation, i);
                for (uint64_t i = 0; i < n; i++) {
                    uint64_t smaller = 0;
                    for (uint64_t j = i + 1; j < n; j++)
                        smaller += elements[j] < elements[i];
                    number = number * (n - i) + smaller;
                }
                counts[number]++;
            }
            double off = deviation(counts, all, EXPECTED, (double)all - 1);
            cr_expect(fabs(off) < DEVIATIONS_MAX, "%llu elements, seeds %zu: %g standard deviations",
                      (unsigned long long)n, s, off);
        }
}

/* Each element must be equally likely at each position. All differences of consecutive elements (modulo n)
 * must be equally frequent. A permutation must have one fixed point on average. */
Test(permutation, positions_differences_and_fixed_points_are_uniform)
{
    static const unsigned sizes[] = {16, 17, 63, 256, 257};
    enum { EXPECTED = 100 };
    for (size_t s = 0; s < COUNT_OF(sizes); s++) {
        unsigned n = sizes[s], fixed = 0, draws = EXPECTED * n;
        unsigned *positions = calloc((size_t)n * n, sizeof *positions),
                 *distances = calloc(n, sizeof *distances);
        cr_assert(positions && distances);
        for (unsigned draw = 0; draw < draws; draw++) {
            struct permutation permutation = permutation_begin(draw, n);
            unsigned before = 0;
            for (unsigned i = 0; i < n; i++) {
                unsigned at = (unsigned)permutation_at(&permutation, i);
                positions[i * n + at]++;
                fixed += at == i;
                if (i)
                    distances[(at + n - before) % n]++;
                before = at;
            }
        }
        double off = deviation(positions, (size_t)n * n, EXPECTED, (double)(n - 1) * (n - 1));
        cr_expect(fabs(off) < DEVIATIONS_MAX, "positions of %u elements: %g", n, off);
        off = deviation(distances + 1, n - 1, draws, n - 2);
        cr_expect(fabs(off) < DEVIATIONS_MAX, "distances of %u elements: %g", n, off);
        off = ((double)fixed - draws) / sqrt(draws); /* the variance of the number of fixed points is 1 */
        cr_expect(fabs(off) < DEVIATIONS_MAX, "fixed points of %u elements: %g", n, off);
        free(positions);
        free(distances);
    }
}

/* A large permutation must spread the elements of each of 64 equal ranges evenly over the 64 ranges. */
Test(permutation, large_permutations_spread_elements_evenly)
{
    enum { PARTS = 64 };
    static const uint64_t sizes[] = {1 << 20, 1000001};
    for (uint64_t seed = 0; seed < 4; seed++)
        for (size_t s = 0; s < COUNT_OF(sizes); s++) {
            static unsigned counts[PARTS * PARTS];
            struct permutation permutation = permutation_begin(seed, sizes[s]);
            for (size_t i = 0; i < PARTS * PARTS; i++)
                counts[i] = 0;
            for (uint64_t i = 0; i < sizes[s]; i++)
                counts[i * PARTS / sizes[s] * PARTS + permutation_at(&permutation, i) * PARTS / sizes[s]]++;
            double off = deviation(counts, PARTS * PARTS, (double)sizes[s] / (PARTS * PARTS),
                                   (PARTS - 1) * (PARTS - 1));
            cr_expect(fabs(off) < DEVIATIONS_MAX, "seed %llu: %g", (unsigned long long)seed, off);
        }
}
