/* Statistics of a time series of samples. */
#ifndef FDSL_CORE_STATS_H
#define FDSL_CORE_STATS_H

#include <stddef.h>

#include "core/status.h"

/* The fewest independent samples that give a 95 % confidence interval of the median. With fewer, even the
 * range from minimum to maximum covers the median with less than 95 % probability. */
#define STATS_INTERVAL_MIN 6

struct stats {
    size_t count;
    double min, median, mean, p95, p99;
    double sd;           /* sample standard deviation, with n - 1; 0 for one sample */
    double cv;           /* sd / mean */
    double effective;    /* effective sample size, 1 to count; below count if samples are autocorrelated */
    double median_error; /* half the width of the median's 95 % confidence interval, relative to the median;
                            infinite if `effective` is below STATS_INTERVAL_MIN */
    double median_low, median_high; /* the median's 95 % confidence interval, from order statistics without
                                       assuming a distribution; min .. max if `effective` is below
                                       STATS_INTERVAL_MIN */
    size_t outliers; /* samples farther from the median than 3.5 scaled median absolute deviations (mean
                        absolute deviations if more than half the samples are equal) */
};

/* Computes the statistics of `count` >= 1 samples. They must be in the order of measurement, because
 * autocorrelation widens the interval of the median. Percentiles interpolate linearly between order
 * statistics (Hyndman and Fan's type 7). STATUS_EXHAUSTED if memory runs out. */
enum status stats_compute(const double *samples, size_t count, struct stats *stats);

/* Sorts `count` >= 1 values and returns the middle one; for an even count, the upper of the middle two. */
double stats_middle(double *values, size_t count);

/* Returns the p-quantile, p in [0, 1], of `count` >= 1 values in ascending order. */
double stats_quantile(const double *sorted, size_t count, double p);

/* Returns t such that a variable with Student's t distribution is within [-t, t] with the probability
 * `confidence`, in (0, 1). `freedom` >= 1 is the number of degrees of freedom, not necessarily a whole
 * number; infinity selects the normal distribution. */
double stats_student(double confidence, double freedom);

/* Returns the two-sample Kolmogorov-Smirnov statistic: the largest distance between the empirical
 * distribution functions of a[0..n) and b[0..m), both in ascending order. Handles ties. */
double stats_ks(const float *a, size_t n, const float *b, size_t m);

/* Returns the critical value of stats_ks() at significance alpha:
 * sqrt(-ln(alpha/2)/2) * sqrt((n+m)/(n m)). */
double stats_ks_critical(size_t n, size_t m, double alpha);

#endif
