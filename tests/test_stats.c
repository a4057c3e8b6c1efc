#include <criterion/criterion.h>

#include <math.h>

#include "core/stats.h"

TestSuite(stats, .timeout = 60);

static struct stats compute(const double *samples, size_t count)
{
    struct stats stats;
    cr_assert_eq(stats_compute(samples, count, &stats), STATUS_OK);
    cr_assert_eq(stats.count, count);
    return stats;
}

static void expect_near(const char *what, double value, double expected)
{
    cr_expect(fabs(value - expected) <= 1e-12 * fmax(1, fabs(expected)), "%s is %.17g, not %.17g", what,
              value, expected);
}

Test(stats, one_sample)
{
    struct stats stats = compute((double[]){7}, 1);
    expect_near("min", stats.min, 7);
    expect_near("median", stats.median, 7);
    expect_near("mean", stats.mean, 7);
    expect_near("p95", stats.p95, 7);
    expect_near("p99", stats.p99, 7);
    expect_near("sd", stats.sd, 0);
    expect_near("cv", stats.cv, 0);
    expect_near("low", stats.median_low, 7);
    expect_near("high", stats.median_high, 7);
    cr_expect(isinf(stats.median_error), "a sample alone has no interval");
    cr_expect_eq(stats.outliers, 0);
}

Test(stats, an_interval_takes_six_samples)
{
    cr_expect(isinf(compute((double[]){1, 2, 3, 4, 5}, 5).median_error));
    expect_near("error", compute((double[]){1, 2, 3, 4, 5, 6}, 6).median_error, 2.5 / 3.5);
}

Test(stats, two_samples)
{
    struct stats stats = compute((double[]){3, 1}, 2);
    expect_near("min", stats.min, 1);
    expect_near("median", stats.median, 2);
    expect_near("mean", stats.mean, 2);
    expect_near("p95", stats.p95, 1 + 0.95 * 2);
    expect_near("p99", stats.p99, 1 + 0.99 * 2);
    expect_near("sd", stats.sd, sqrt(2));
    expect_near("cv", stats.cv, sqrt(2) / 2);
    expect_near("low", stats.median_low, 1);
    expect_near("high", stats.median_high, 3);
    cr_expect(isinf(stats.median_error));
    cr_expect_eq(stats.outliers, 0);
}

Test(stats, three_samples)
{
    struct stats stats = compute((double[]){6, 1, 2}, 3);
    expect_near("median", stats.median, 2);
    expect_near("mean", stats.mean, 3);
    expect_near("p95", stats.p95, 2 + 0.9 * 4);
    expect_near("p99", stats.p99, 2 + 0.98 * 4);
    expect_near("sd", stats.sd, sqrt((9 + 4 + 1) / 2.0));
    cr_expect(isinf(stats.median_error));
    cr_expect_eq(stats.outliers, 0, "4 is less than 3.5 * 1.4826 * 1 from the median");
}

Test(stats, four_samples)
{
    struct stats stats = compute((double[]){4, 1, 3, 2}, 4);
    expect_near("median", stats.median, 2.5);
    expect_near("p95", stats.p95, 3.85);
    expect_near("p99", stats.p99, 3.97);
    expect_near("sd", stats.sd, sqrt(5.0 / 3));
    expect_near("low", stats.median_low, 1);
    expect_near("high", stats.median_high, 4);
}

Test(stats, five_samples_with_an_outlier)
{
    struct stats stats = compute((double[]){10, 30, 11, 9, 10.5}, 5);
    expect_near("median", stats.median, 10.5);
    expect_near("mean", stats.mean, 14.1);
    expect_near("p95", stats.p95, 11 + 0.8 * 19);
    expect_near("sd", stats.sd, sqrt((16.81 + 252.81 + 9.61 + 26.01 + 12.96) / 4));
    cr_expect_eq(stats.outliers, 1, "the distances are 0 0.5 0.5 1.5 19.5: the cutoff is 2.59");
}

Test(stats, outliers_count_from_the_cutoff_on)
{
    /* Median 11, distances 0 0 1 2 x: their median is 1, the cutoff 3.5 * 1.4826 = 5.1891. */
    cr_expect_eq(compute((double[]){9, 10, 11, 11, 16.18}, 5).outliers, 0);
    cr_expect_eq(compute((double[]){9, 10, 11, 11, 16.20}, 5).outliers, 1);
    cr_expect_eq(compute((double[]){13, 12, 11, 11, 5.82}, 5).outliers, 0);
    cr_expect_eq(compute((double[]){13, 12, 11, 11, 5.80}, 5).outliers, 1);
    /* Median 11, distances 0 1 1 2 2 3 x: the cutoff is twice that, 10.3782. */
    cr_expect_eq(compute((double[]){8, 9, 10, 11, 12, 13, 21.37}, 7).outliers, 0);
    cr_expect_eq(compute((double[]){8, 9, 10, 11, 12, 13, 21.38}, 7).outliers, 1);
    cr_expect_eq(compute((double[]){-20, 8, 9, 10, 11, 12, 13, 14, 40}, 9).outliers, 2);
}

Test(stats, all_equal)
{
    struct stats stats = compute((double[]){4, 4, 4, 4, 4, 4, 4, 4}, 8);
    expect_near("sd", stats.sd, 0);
    expect_near("error", stats.median_error, 0);
    cr_expect_eq(stats.outliers, 0);
}

Test(stats, all_zero_has_no_relative_error)
{
    struct stats stats = compute((double[]){0, 0, 0, 0, 0, 0}, 6);
    expect_near("cv", stats.cv, 0);
    expect_near("error", stats.median_error, 0);
}

Test(stats, spread_around_zero_is_infinite)
{
    struct stats stats = compute((double[]){-1, 0, 1}, 3);
    cr_expect(isinf(stats.cv) && isinf(stats.median_error));
}

Test(stats, coarse_clock_makes_no_outliers)
{
    /* The median absolute deviation is 0; the mean one 2.5 / 11, and the cutoff 3.5 * 1.2533
     * * that = 0.997. */
    double ticks[] = {10, 10, 10, 10, 10, 10, 10.5, 10.5, 10.5, 9.5, 9.5};
    cr_expect_eq(compute(ticks, 11).outliers, 0);
    ticks[10] = 100;
    cr_expect_eq(compute(ticks, 11).outliers, 1);
}

Test(stats, order_neither_matters_nor_changes)
{
    double samples[] = {5, 3, 9, 1, 7, 2, 8};
    struct stats stats = compute(samples, 7);
    expect_near("median", stats.median, 5);
    cr_expect_eq(samples[0], 5);
    cr_expect_eq(samples[3], 1);
    cr_expect_eq(samples[6], 8);
}

/* The chance that the binomial (n, 1/2) lies in low .. high - 1: that of the interval between the order
 * statistics `low` and `high` to hold the median. */
static double coverage(size_t n, size_t low, size_t high)
{
    double sum = 0;
    for (size_t k = low; k < high; k++) {
        double kk = (double)k, nn = (double)n;
        sum += exp(lgamma(nn + 1) - lgamma(kk + 1) - lgamma(nn - kk + 1) - nn * log(2));
    }
    return sum;
}

Test(stats, median_interval_covers_95_percent)
{
    enum { MOST = 1000 };
    double samples[MOST];
    for (size_t n = 1; n <= MOST; n++) {
        samples[n - 1] = (double)n; /* so that a sample is its own rank */
        struct stats stats = compute(samples, n);
        size_t low = (size_t)stats.median_low, high = (size_t)stats.median_high;
        cr_assert_eq(low + high, n + 1, "n = %zu: %zu .. %zu", n, low, high);
        double chance = coverage(n, low, high);
        if (n < 6)
            cr_assert(low == 1, "n = %zu", n);
        else
            cr_assert(chance >= 0.949, "n = %zu: %g", n, chance);
        /* One rank narrower would not do. */
        if (n >= 6)
            cr_assert(coverage(n, low + 1, high - 1) < 0.952, "n = %zu is too wide", n);
    }
}

Test(stats, quantiles_interpolate)
{
    double sorted[] = {10, 20, 40, 80};
    expect_near("p0", stats_quantile(sorted, 4, 0), 10);
    expect_near("p25", stats_quantile(sorted, 4, 0.25), 17.5);
    expect_near("p50", stats_quantile(sorted, 4, 0.5), 30);
    expect_near("p75", stats_quantile(sorted, 4, 0.75), 50);
    expect_near("p100", stats_quantile(sorted, 4, 1), 80);
    expect_near("p 1/3", stats_quantile(sorted, 4, 1.0 / 3), 20);
    expect_near("one", stats_quantile(sorted, 1, 0.7), 10);
}

Test(stats, ks_of_equal_sets_is_0)
{
    float a[] = {1, 2, 2, 3};
    expect_near("ks", stats_ks(a, 4, a, 4), 0);
    expect_near("doubled", stats_ks(a, 4, (float[]){1, 1, 2, 2, 2, 2, 3, 3}, 8), 0);
}

Test(stats, ks_of_disjoint_sets_is_1)
{
    expect_near("below", stats_ks((float[]){1, 2}, 2, (float[]){3, 4, 5}, 3), 1);
    expect_near("above", stats_ks((float[]){3, 4, 5}, 3, (float[]){1, 2}, 2), 1);
}

Test(stats, ks_takes_ties_together)
{
    /* After 1: 1/4 and 2/3, the largest distance; after 2: 3/4 and 2/3; after 3: 1 and 1. */
    float a[] = {1, 2, 2, 3}, b[] = {1, 1, 3};
    expect_near("ks", stats_ks(a, 4, b, 3), 5.0 / 12);
    expect_near("swapped", stats_ks(b, 3, a, 4), 5.0 / 12);
    /* All tied but one: stepping through the ties one by one would find 3/4. */
    expect_near("ties", stats_ks((float[]){5, 5, 5, 5}, 4, (float[]){5, 5, 5, 6}, 4), 0.25);
}

Test(stats, ks_ends_on_nan)
{
    float a[] = {1, NAN, 2}, b[] = {NAN, NAN};
    double distance = stats_ks(a, 3, b, 2) + stats_ks(b, 2, a, 3) + stats_ks(b, 2, b, 2);
    cr_expect(distance >= 0);
}

Test(stats, ks_critical_value)
{
    /* The tables of the statistic: 1.3581 at 5 %, 1.6276 at 1 %, times sqrt((n + m) / nm). */
    cr_expect_float_eq(stats_ks_critical(100, 100, 0.05), 1.3581 * sqrt(0.02), 1e-5);
    cr_expect_float_eq(stats_ks_critical(1000, 250, 0.01), 1.6276 * sqrt(0.005), 1e-5);
}
