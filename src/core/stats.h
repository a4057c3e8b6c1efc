/* Statistics of a series of samples. */
#ifndef FDSL_CORE_STATS_H
#define FDSL_CORE_STATS_H

#include <stddef.h>

#include "core/status.h"

/* Below this many independent samples there is no 95 % interval of the median: even the range from the
 * smallest to the largest covers it less often than that. */
#define STATS_INTERVAL_MIN 6

struct stats {
    size_t count;
    double min, median, mean, p95, p99;
    double sd;        /* with n - 1; 0 for one sample */
    double cv;        /* sd / mean */
    double effective; /* how many independent samples the series is worth: 1 to count; fewer than count where
                         neighbouring samples are alike */
    double median_error; /* half the width of the median's 95 % interval over the median; infinite where
                            `effective` is below STATS_INTERVAL_MIN */
    double median_low, median_high; /* that interval: order statistics, no distribution assumed; min .. max
                                       where `effective` is below STATS_INTERVAL_MIN */
    size_t outliers; /* farther from the median than 3.5 scaled median absolute deviations (mean
                        ones, where more than half the samples are equal) */
};

/* Statistics of `count` >= 1 samples in the order in which they were taken: neighbours that are alike widen
 * the interval of the median. The array does not change. STATUS_FAILED when memory runs out. Percentiles
 * interpolate linearly between order statistics (Hyndman and Fan's type 7). */
enum status stats_compute(const double *samples, size_t count, struct stats *stats);

/* The p-quantile, p in [0, 1], of `count` >= 1 values in ascending order. */
double stats_quantile(const double *sorted, size_t count, double p);

/* The two-sample Kolmogorov-Smirnov statistic: the largest distance between the empirical distribution
 * functions of a[0..n) and b[0..m), both in ascending order. Ties are taken together. */
double stats_ks(const float *a, size_t n, const float *b, size_t m);

/* Its critical value at significance alpha: sqrt(-ln(alpha/2)/2) * sqrt((n+m)/(n m)). */
double stats_ks_critical(size_t n, size_t m, double alpha);

#endif
