/* Statistics of a set of samples. */
#ifndef FDSL_CORE_STATS_H
#define FDSL_CORE_STATS_H

#include <stddef.h>

#include "core/status.h"

/* Fewer samples than this have no 95 % interval of the median: even from the least to the largest is less. */
#define STATS_INTERVAL_MIN 6

struct stats {
    size_t count;
    double min, median, mean, p95, p99;
    double sd;           /* with n - 1; 0 for one sample */
    double cv;           /* sd / mean */
    double median_error; /* infinite below STATS_INTERVAL_MIN samples, else half the width of the median's 95
                            % interval, over the median */
    double median_low, median_high; /* that interval: order statistics, no distribution assumed; under 6
                                       samples none is that wide, and it is min .. max */
    size_t outliers; /* farther from the median than 3.5 scaled median absolute deviations (mean
                        ones, where more than half the samples are equal) */
};

/* Statistics of `count` >= 1 samples; their order does not matter and does not change. STATUS_FAILED when
 * memory runs out. Percentiles interpolate linearly between order statistics (Hyndman and Fan's type 7). */
enum status stats_compute(const double *samples, size_t count, struct stats *stats);

/* The p-quantile, p in [0, 1], of `count` >= 1 values in ascending order. */
double stats_quantile(const double *sorted, size_t count, double p);

/* The two-sample Kolmogorov-Smirnov statistic: the largest distance between the empirical distribution
 * functions of a[0..n) and b[0..m), both in ascending order. Ties are taken together. */
double stats_ks(const float *a, size_t n, const float *b, size_t m);

/* Its critical value at significance alpha: sqrt(-ln(alpha/2)/2) * sqrt((n+m)/(n m)). */
double stats_ks_critical(size_t n, size_t m, double alpha);

#endif
