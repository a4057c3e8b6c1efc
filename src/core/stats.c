#include "core/stats.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"

#define OUTLIER_CUTOFF 3.5      /* in robust standard deviations; Iglewicz and Hoaglin, 1993 */
#define MEDIAN_TO_SD   1.4826   /* sd / median absolute deviation of a normal distribution */
#define MEAN_TO_SD     1.253314 /* sd / mean absolute deviation of a normal distribution */

double stats_middle(double *values, size_t count)
{
    qsort(values, count, sizeof *values, compare_reals);
    return values[count / 2];
}

static double mean_of(const double *values, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += values[i];
    return sum / (double)count;
}

static double sd_of(const double *values, size_t count, double mean)
{
    if (count < 2)
        return 0;
    double squares = 0;
    for (size_t i = 0; i < count; i++)
        squares += (values[i] - mean) * (values[i] - mean);
    return sqrt(squares / (double)(count - 1));
}

/* Returns spread / |centre|, and 0 for a spread of 0 even if the centre is 0. */
static double relative(double spread, double centre)
{
    return spread == 0 ? 0 : spread / fabs(centre);
}

/* Returns how many of the `count` sorted values are below `value`. With `equal_too`, also counts the values
 * that equal it. */
static size_t count_below(const double *sorted, size_t count, double value, bool equal_too)
{
    size_t low = 0;
    for (size_t high = count; low < high;) {
        size_t middle = low + (high - low) / 2;
        if (sorted[middle] < value || (equal_too && sorted[middle] == value))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns the rank of a sample in the sorted array, from 0; equal samples get their mean rank. */
static double rank_of(double sample, const double *sorted, size_t count)
{
    return 0.5 *
           (double)(count_below(sorted, count, sample, false) + count_below(sorted, count, sample, true) - 1);
}

/* Returns the autocorrelation at `lag` of `count` values with mean 0 and sum of squares `square`. Corrects,
 * to first order, the bias that comes from using the sample mean instead of the true mean. */
static double correlation(const double *values, size_t count, double square, size_t lag)
{
    double sum = 0;
    for (size_t i = lag; i < count; i++)
        sum += values[i - lag] * values[i];
    return sum / square + (1 + sum / square) / (double)count;
}

/* Returns the variance of the mean divided by the variance that independent values would give, at least 1.
 * Adds the autocorrelations of neighbouring lags in pairs, limits each pair to the previous pair, and stops
 * at the first pair that is not positive (Geyer's initial monotone sequence). For a series that spans few
 * correlation times, this estimate is too small; the function's last line corrects it
 * (docs/notes/measuring.md). */
static double inflation(const double *values, size_t count)
{
    double square = 0, sum = 0, before = HUGE_VAL;
    for (size_t i = 0; i < count; i++)
        square += values[i] * values[i];
    if (square == 0)
        return 1;
    for (size_t lag = 0; lag < count / 2; lag += 2) {
        double pair =
            (lag ? correlation(values, count, square, lag) : 1) + correlation(values, count, square, lag + 1);
        if (pair <= 0)
            break;
        before = fmin(pair, before);
        sum += before;
    }
    double factor = fmax(1, 2 * sum - 1);
    return factor * (1 + 6 * (factor - 1) / (double)count);
}

#define BLOCKS_MAX 2048 /* limits the time for a long, slowly changing series to milliseconds */

/* Returns the effective sample size. Uses the ranks of the samples, so outliers have little influence.
 * Divides a long series into blocks, and multiplies the inflation() of the block means by the inflation
 * within blocks. */
static double effective_count(const double *samples, const double *sorted, size_t count, double *blocks)
{
    size_t length = (count + BLOCKS_MAX - 1) / BLOCKS_MAX, block_count = count / length;
    double centre = (double)(count - 1) / 2, square = 0, block_square = 0;
    for (size_t b = 0; b < block_count; b++) {
        blocks[b] = 0;
        for (size_t i = b * length; i < (b + 1) * length; i++) {
            double rank = rank_of(samples[i], sorted, count) - centre;
            square += rank * rank;
            blocks[b] += rank;
        }
        block_square += blocks[b] * blocks[b];
    }
    if (square == 0) /* all samples are equal */
        return (double)count;
    double within = fmax(1, block_square / square);
    return fmax(1, (double)count / (within * inflation(blocks, block_count)));
}

/* Computes the 95 % confidence interval of the median. Among n independent samples, the number below the true
 * median is binomial (n, 1/2), close to a normal distribution with mean n/2 and sd sqrt(n)/2. If n samples
 * have an effective sample size m, the sd is larger by the factor sqrt(n/m). The interval is from rank l to
 * rank n + 1 - l with l = floor(n/2 + 1/2 - 0.98 n/sqrt(m)): 0.98 is 1.96 / 2, and 1/2 is the continuity
 * correction. */
static void median_interval(const double *sorted, size_t count, double effective, double *low, double *high)
{
    double n = (double)count, rank = floor(n / 2 + 0.5 - 0.98 * n / sqrt(effective));
    size_t below = rank > 1 && effective >= STATS_INTERVAL_MIN ? (size_t)rank - 1 : 0;
    *low = sorted[below];
    *high = sorted[count - 1 - below];
}

/* Counts outliers. Overwrites `sorted` with the sorted distances from the median.
 *
 * With a coarse clock, more than half of the samples are often equal. The median distance is then 0, and
 * every sample that differs would be an outlier. In this case, the function uses the mean distance, which is
 * 0 only if all samples are equal. With the mean distance, many samples that differ by one clock tick are not
 * outliers, but a single spike is. */
static size_t count_outliers(double *sorted, size_t count, double median)
{
    for (size_t i = 0; i < count; i++)
        sorted[i] = fabs(sorted[i] - median);
    qsort(sorted, count, sizeof *sorted, compare_reals);
    double robust_sd = MEDIAN_TO_SD * stats_quantile(sorted, count, 0.5);
    if (robust_sd == 0)
        robust_sd = MEAN_TO_SD * mean_of(sorted, count);

    size_t outliers = 0;
    for (size_t i = 0; i < count; i++)
        outliers += sorted[i] > OUTLIER_CUTOFF * robust_sd;
    return outliers;
}

static void fill(const double *samples, size_t count, double *sorted, double *blocks, struct stats *stats)
{
    stats->count = count;
    stats->min = sorted[0];
    stats->median = stats_quantile(sorted, count, 0.5);
    stats->p95 = stats_quantile(sorted, count, 0.95);
    stats->p99 = stats_quantile(sorted, count, 0.99);
    stats->mean = mean_of(sorted, count);
    stats->sd = sd_of(sorted, count, stats->mean);
    stats->cv = relative(stats->sd, stats->mean);
    stats->effective = effective_count(samples, sorted, count, blocks);
    median_interval(sorted, count, stats->effective, &stats->median_low, &stats->median_high);
    stats->median_error = stats->effective < STATS_INTERVAL_MIN
                              ? INFINITY
                              : relative((stats->median_high - stats->median_low) / 2, stats->median);
    stats->outliers = count_outliers(sorted, count, stats->median);
}

enum status stats_compute(const double *samples, size_t count, struct stats *stats)
{
    FREED double *sorted = reallocarray(NULL, count + BLOCKS_MAX, sizeof *sorted);
    TRY(ALLOCATED(sorted, "out of memory for the statistics of %zu samples", count));
    memcpy(sorted, samples, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_reals);
    fill(samples, count, sorted, sorted + count, stats);
    return STATUS_OK;
}

double stats_quantile(const double *sorted, size_t count, double p)
{
    double position = p * (double)(count - 1);
    size_t below = (size_t)position;
    if (below + 1 >= count)
        return sorted[count - 1];
    return sorted[below] + (position - (double)below) * (sorted[below + 1] - sorted[below]);
}

#define FREEDOM_MAX   1e6 /* with more degrees of freedom, t differs from the normal quantile by under 1e-5 */
#define FRACTIONS_MAX 300
#define BISECTIONS    48
#define STUDENT_T_MAX 1e12

/* Returns the continued fraction of the incomplete beta function, by the modified Lentz method (Numerical
 * Recipes, 3rd ed., 6.4). Converges fast for x < (a + 1) / (a + b + 2). */
static double beta_fraction(double a, double b, double x)
{
    double c = 1, d = 1 / (1 - (a + b) * x / (a + 1)), product = d;
    for (int m = 1; m <= FRACTIONS_MAX; m++) {
        double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
        double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        d = 1 / (1 + even * d);
        c = 1 + even / c;
        product *= c * d;
        d = 1 / (1 + odd * d);
        c = 1 + odd / c;
        product *= c * d;
        if (fabs(c * d - 1) < 1e-14)
            break;
    }
    return product;
}

/* Returns the regularised incomplete beta function I_x(a, b); `rest` is 1 - x. */
static double beta_share(double a, double b, double x, double rest)
{
    double front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(rest));
    if (x < (a + 1) / (a + b + 2))
        return front * beta_fraction(a, b, x) / a;
    return 1 - front * beta_fraction(b, a, rest) / b;
}

/* Returns the probability that |T| > t, for t > 0 and T with Student's t distribution. */
static double student_tails(double t, double freedom)
{
    if (freedom > FREEDOM_MAX)
        return erfc(t * M_SQRT1_2);
    double square = t * t, x = freedom / (freedom + square);
    return beta_share(freedom / 2, 0.5, x, square / (freedom + square));
}

double stats_student(double confidence, double freedom)
{
    double low = 1e-6, high = STUDENT_T_MAX;
    for (int i = 0; i < BISECTIONS; i++) {
        double middle = sqrt(low * high);
        *(student_tails(middle, freedom) > 1 - confidence ? &low : &high) = middle;
    }
    return sqrt(low * high);
}

double stats_ks(const float *a, size_t n, const float *b, size_t m)
{
    double distance = 0;
    for (size_t i = 0, j = 0; i < n && j < m;) {
        float x = a[i] < b[j] ? a[i] : b[j];
        /* The test is "not above" instead of "equal", so that a NaN from broken device code cannot cause an
         * endless loop. */
        while (i < n && !(a[i] > x))
            i++;
        while (j < m && !(b[j] > x))
            j++;
        distance = fmax(distance, fabs((double)i / (double)n - (double)j / (double)m));
    }
    return distance;
}

double stats_ks_critical(size_t n, size_t m, double alpha)
{
    double a = (double)n, b = (double)m;
    return sqrt(-log(alpha / 2) / 2) * sqrt((a + b) / (a * b));
}
