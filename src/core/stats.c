#include "core/stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define OUTLIER_CUTOFF 3.5      /* in robust standard deviations; Iglewicz and Hoaglin, 1993 */
#define MEDIAN_TO_SD   1.4826   /* scale a median absolute deviation, */
#define MEAN_TO_SD     1.253314 /* or a mean one, to the sd of a normal distribution */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
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

/* A spread relative to a centre; no spread is 0 even around 0. */
static double relative(double spread, double centre)
{
    return spread == 0 ? 0 : spread / fabs(centre);
}

/* The 95 % interval of the median. The number of samples under the true median is binomial (n, 1/2), close
 * to a normal distribution of mean n/2 and sd sqrt(n)/2, so the interval reaches from rank l to rank
 * n + 1 - l with l = floor(n/2 + 1/2 - 0.98 sqrt(n)): 0.98 is 1.96 / 2, and 1/2 corrects for continuity.
 * Under 6 samples even the extremes hold the median less often than that; then they are the interval. */
static void median_interval(const double *sorted, size_t count, double *low, double *high)
{
    double n = (double)count, rank = floor(n / 2 + 0.5 - 0.98 * sqrt(n));
    size_t below = rank > 1 ? (size_t)rank - 1 : 0;
    *low = sorted[below];
    *high = sorted[count - 1 - below];
}

/* Counts outliers; turns `sorted` into the sorted distances from the median.
 *
 * Where more than half the samples are equal, which a coarse clock makes likely, the median distance is 0
 * and would damn every other sample. The mean distance is 0 only when all are equal, so it stands in: a
 * tick more or less passes where ticks are common, and a lone spike still counts. */
static size_t count_outliers(double *sorted, size_t count, double median)
{
    for (size_t i = 0; i < count; i++)
        sorted[i] = fabs(sorted[i] - median);
    qsort(sorted, count, sizeof *sorted, ascending);
    double robust_sd = MEDIAN_TO_SD * stats_quantile(sorted, count, 0.5);
    if (robust_sd == 0)
        robust_sd = MEAN_TO_SD * mean_of(sorted, count);

    size_t outliers = 0;
    for (size_t i = 0; i < count; i++)
        outliers += sorted[i] > OUTLIER_CUTOFF * robust_sd;
    return outliers;
}

enum status stats_compute(const double *samples, size_t count, struct stats *stats)
{
    double *sorted = reallocarray(NULL, count, sizeof *sorted);
    if (!sorted)
        return status_set(STATUS_FAILED, "out of memory for the statistics of %zu samples", count);
    memcpy(sorted, samples, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, ascending);

    stats->count = count;
    stats->min = sorted[0];
    stats->median = stats_quantile(sorted, count, 0.5);
    stats->p95 = stats_quantile(sorted, count, 0.95);
    stats->p99 = stats_quantile(sorted, count, 0.99);
    stats->mean = mean_of(sorted, count);
    stats->sd = sd_of(sorted, count, stats->mean);
    stats->cv = relative(stats->sd, stats->mean);
    median_interval(sorted, count, &stats->median_low, &stats->median_high);
    stats->median_error = count < STATS_INTERVAL_MIN
                              ? INFINITY
                              : relative((stats->median_high - stats->median_low) / 2, stats->median);
    stats->outliers = count_outliers(sorted, count, stats->median);
    free(sorted);
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

double stats_ks(const float *a, size_t n, const float *b, size_t m)
{
    double distance = 0;
    for (size_t i = 0, j = 0; i < n && j < m;) {
        float x = a[i] < b[j] ? a[i] : b[j];
        /* "not above" rather than "equal": a NaN from broken device code must not stop the walk. */
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
