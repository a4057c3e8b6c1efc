/* Tests statistics of times: the median and its confidence interval, outliers, quantiles, and distances of
 * distributions. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdint.h>

#include "core/portable.h"
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

Test(stats, one_sample_has_no_interval)
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
    cr_expect(isinf(stats.median_error), "a single sample must have no interval");
    cr_expect_eq(stats.outliers, 0);
}

Test(stats, an_interval_needs_six_samples)
{
    cr_expect(isinf(compute((double[]){1, 2, 3, 4, 5}, 5).median_error));
    expect_near("error", compute((double[]){1, 6, 2, 5, 3, 4}, 6).median_error, 2.5 / 3.5);
}

Test(stats, two_samples_have_the_expected_statistics)
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

Test(stats, three_samples_have_the_expected_statistics)
{
    struct stats stats = compute((double[]){6, 1, 2}, 3);
    expect_near("median", stats.median, 2);
    expect_near("mean", stats.mean, 3);
    expect_near("p95", stats.p95, 2 + 0.9 * 4);
    expect_near("p99", stats.p99, 2 + 0.98 * 4);
    expect_near("sd", stats.sd, sqrt((9 + 4 + 1) / 2.0));
    cr_expect(isinf(stats.median_error));
    cr_expect_eq(stats.outliers, 0, "a distance of 4 is below the cutoff, 3.5 * 1.4826 * 1");
}

Test(stats, four_samples_have_the_expected_statistics)
{
    struct stats stats = compute((double[]){4, 1, 3, 2}, 4);
    expect_near("median", stats.median, 2.5);
    expect_near("p95", stats.p95, 3.85);
    expect_near("p99", stats.p99, 3.97);
    expect_near("sd", stats.sd, sqrt(5.0 / 3));
    expect_near("low", stats.median_low, 1);
    expect_near("high", stats.median_high, 4);
}

Test(stats, one_of_five_samples_is_an_outlier)
{
    struct stats stats = compute((double[]){10, 30, 11, 9, 10.5}, 5);
    expect_near("median", stats.median, 10.5);
    expect_near("mean", stats.mean, 14.1);
    expect_near("p95", stats.p95, 11 + 0.8 * 19);
    expect_near("sd", stats.sd, sqrt((16.81 + 252.81 + 9.61 + 26.01 + 12.96) / 4));
    cr_expect_eq(stats.outliers, 1,
                 "the distances from the median are 0, 0.5, 0.5, 1.5 and 19.5, so the cutoff is 2.59");
}

Test(stats, outliers_begin_at_the_cutoff)
{
    /* The median is 11, and the distances from it are 0, 0, 1, 2 and x. Their median is 1, so the cutoff is
     * 3.5 * 1.4826 = 5.1891. */
    cr_expect_eq(compute((double[]){9, 10, 11, 11, 16.18}, 5).outliers, 0);
    cr_expect_eq(compute((double[]){9, 10, 11, 11, 16.20}, 5).outliers, 1);
    cr_expect_eq(compute((double[]){13, 12, 11, 11, 5.82}, 5).outliers, 0);
    cr_expect_eq(compute((double[]){13, 12, 11, 11, 5.80}, 5).outliers, 1);
    /* The median is 11, and the distances from it are 0, 1, 1, 2, 2, 3 and x. Their median is 2, so the
     * cutoff is 10.3782. */
    cr_expect_eq(compute((double[]){8, 9, 10, 11, 12, 13, 21.37}, 7).outliers, 0);
    cr_expect_eq(compute((double[]){8, 9, 10, 11, 12, 13, 21.38}, 7).outliers, 1);
    cr_expect_eq(compute((double[]){-20, 8, 9, 10, 11, 12, 13, 14, 40}, 9).outliers, 2);
}

Test(stats, equal_samples_have_no_spread)
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

Test(stats, a_coarse_clock_gives_no_outliers)
{
    /* The median absolute deviation is 0, so the mean absolute deviation, 2.5 / 11, is used. The cutoff is
     * 3.5 * 1.2533 * 2.5 / 11 = 0.997. */
    double ticks[] = {10, 10, 10, 10, 10, 10, 10.5, 10.5, 10.5, 9.5, 9.5};
    cr_expect_eq(compute(ticks, 11).outliers, 0);
    ticks[10] = 100;
    cr_expect_eq(compute(ticks, 11).outliers, 1);
}

Test(stats, samples_are_not_changed)
{
    double samples[] = {5, 3, 9, 1, 7, 2, 8};
    struct stats stats = compute(samples, 7);
    expect_near("median", stats.median, 5);
    cr_expect_eq(samples[0], 5);
    cr_expect_eq(samples[3], 1);
    cr_expect_eq(samples[6], 8);
}

/* ---- The interval of the median ---- */

/* Fills `samples` with 1 to n, ordered so that neighbours differ as much as possible: 1, n, 2, n - 1, ... */
static void fill_zigzag(double *samples, size_t n)
{
    for (size_t i = 0; i < n; i++)
        samples[i] = (double)(i % 2 ? n - i / 2 : i / 2 + 1);
}

/* Returns the probability that a binomial (n, 1/2) variable is at least `low` and less than `high`. This is
 * the probability that the interval between the order statistics `low` and `high` contains the median. */
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
        fill_zigzag(samples, n); /* each sample equals its rank */
        struct stats stats = compute(samples, n);
        size_t low = (size_t)stats.median_low, high = (size_t)stats.median_high;
        cr_assert_eq(low + high, n + 1, "n = %zu: %zu .. %zu", n, low, high);
        double chance = coverage(n, low, high);
        if (n < 6)
            cr_assert(low == 1, "n = %zu", n);
        else
            cr_assert(chance >= 0.949, "n = %zu: %g", n, chance);
        /* An interval that is narrower by one rank at each end would be too narrow for 95 %. */
        if (n >= 6)
            cr_assert(coverage(n, low + 1, high - 1) < 0.952, "n = %zu is too wide", n);
    }
}

/* Returns a standard normal sample (Box-Muller) from a generator with a fixed seed. */
static double normal(uint64_t *state)
{
    double uniform[2];
    for (int i = 0; i < 2; i++) {
        *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        uniform[i] = ((double)(*state >> 11) + 0.5) * 0x1p-53;
    }
    return sqrt(-2 * log(uniform[0])) * cos(2 * M_PI * uniform[1]);
}

/* Fills `samples` with an autoregressive series of times: the deviation of each time from the median is
 * `memory` times the previous deviation, plus noise. The median is 100, and the standard deviation is 1. */
static void fill_series(double *samples, size_t n, double memory, uint64_t *state)
{
    double value = normal(state);
    for (size_t i = 0; i < n; i++) {
        samples[i] = 100 + value;
        value = memory * value + sqrt(1 - memory * memory) * normal(state);
    }
}

/* Results of `SERIES` simulated series. `known` is the share of the series that have an interval. `covered`
 * is the share of these intervals that contain the true median. `width` is the mean median_error of the
 * series that have an interval. */
enum { SERIES = 1000, LONGEST = 1000 };
struct simulated {
    double known, covered, width;
};

static struct simulated simulate(size_t n, double memory)
{
    static double samples[LONGEST];
    uint64_t state = 17;
    double known = 0, covered = 0, width = 0;
    for (int i = 0; i < SERIES; i++) {
        fill_series(samples, n, memory, &state);
        struct stats stats = compute(samples, n);
        if (isinf(stats.median_error))
            continue;
        known++;
        covered += stats.median_low <= 100 && 100 <= stats.median_high;
        width += stats.median_error;
    }
    struct simulated simulated = {known / SERIES, known > 0 ? covered / known : 1, width / known};
    /* --verbose prints the table of docs/notes/measuring.md. */
    cr_log_info("n %5zu  memory %.2f: %5.1f %% have an interval, %5.1f %% of which cover; +-%.3f\n", n,
                memory, 100 * simulated.known, 100 * simulated.covered, 100 * simulated.width);
    return simulated;
}

static const double memories[] = {0, 0.3, 0.5, 0.7, 0.8, 0.9};

Test(stats, the_interval_covers_the_median_of_series_with_memory)
{
    static const size_t counts[] = {200, 500, 1000};
    for (size_t c = 0; c < COUNT_OF(counts); c++)
        for (size_t m = 0; m < COUNT_OF(memories); m++) {
            struct simulated simulated = simulate(counts[c], memories[m]);
            cr_expect(simulated.covered >= 0.9, "n = %zu, memory %g: %g", counts[c], memories[m],
                      simulated.covered);
            cr_expect(simulated.known >= (memories[m] < 0.9 ? 0.99 : 0.8), "n = %zu, memory %g: %g known",
                      counts[c], memories[m], simulated.known);
        }
}

/* Short series with autocorrelation. At most one in ten may have an interval that misses the median. With
 * 20 samples and strong autocorrelation, fewer than a quarter of the series may have an interval. */
Test(stats, short_series_with_memory_rarely_have_a_wrong_interval)
{
    static const size_t counts[] = {10, 20, 50, 100};
    for (size_t c = 0; c < COUNT_OF(counts); c++)
        for (size_t m = 0; m < COUNT_OF(memories); m++) {
            struct simulated simulated = simulate(counts[c], memories[m]);
            double misled = simulated.known * (1 - simulated.covered);
            cr_expect(misled <= 0.1, "n = %zu, memory %g: %g", counts[c], memories[m], misled);
        }
    cr_expect(simulate(20, 0.9).known < 0.25);
}

Test(stats, independent_samples_keep_their_interval)
{
    struct simulated simulated = simulate(500, 0);
    cr_expect(simulated.width < 1.1 * 1.96 * sqrt(M_PI / 2 / 500) / 100, "%g", simulated.width);
    simulated = simulate(10, 0);
    cr_expect(simulated.known > 0.5, "%g", simulated.known);
}

/* Tests the number of effective samples of different series: slow changes between two states, a slow drift,
 * and autoregressive series. */
Test(stats, correlated_samples_count_as_fewer_effective_samples)
{
    enum { MOST = 100000 };
    static double samples[MOST];
    uint64_t state = 5;
    for (size_t i = 0; i < 1000; i++)
        samples[i] = (double)(i / 100 % 2);
    cr_expect(compute(samples, 1000).effective < 20, "%g", compute(samples, 1000).effective);
    for (size_t i = 0; i < 1000; i++)
        samples[i] = (double)i;
    cr_expect(isinf(compute(samples, 1000).median_error));
    fill_series(samples, MOST, 0, &state);
    cr_expect(compute(samples, MOST).effective > 0.85 * MOST);
    fill_series(samples, MOST, 0.99, &state); /* effective share: (1 - 0.99) / (1 + 0.99) */
    double effective = compute(samples, MOST).effective;
    cr_expect(effective > MOST / 199.0 / 2 && effective < MOST / 199.0 * 2, "%g", effective);
    fill_zigzag(samples, 9);
    cr_expect(compute(samples, 9).effective == 9, "more effective samples than samples");
    for (size_t i = 0; i < 7; i++)
        samples[i] = 3;
    cr_expect(compute(samples, 7).effective == 7);
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

Test(stats, ks_handles_ties)
{
    /* At 1, the distribution functions of a and b are 1/4 and 2/3, which gives the largest distance. At 2,
     * they are 3/4 and 2/3. At 3, both are 1. */
    float a[] = {1, 2, 2, 3}, b[] = {1, 1, 3};
    expect_near("ks", stats_ks(a, 4, b, 3), 5.0 / 12);
    expect_near("swapped", stats_ks(b, 3, a, 4), 5.0 / 12);
    /* All values are equal except one. Code that steps through equal values one by one would find a larger
     * distance. */
    expect_near("ties", stats_ks((float[]){5, 5, 5, 5}, 4, (float[]){5, 5, 5, 6}, 4), 0.25);
}

Test(stats, ks_ends_on_nan)
{
    float a[] = {1, NAN, 2}, b[] = {NAN, NAN};
    double distance = stats_ks(a, 3, b, 2) + stats_ks(b, 2, a, 3) + stats_ks(b, 2, b, 2);
    cr_expect(distance >= 0);
}

Test(stats, ks_critical_values_equal_published_ones)
{
    /* The published critical values are 1.3581 at 5 % and 1.6276 at 1 %, times sqrt((n + m) / nm). */
    cr_expect_float_eq(stats_ks_critical(100, 100, 0.05), 1.3581 * sqrt(0.02), 1e-5);
    cr_expect_float_eq(stats_ks_critical(1000, 250, 0.01), 1.6276 * sqrt(0.005), 1e-5);
}
