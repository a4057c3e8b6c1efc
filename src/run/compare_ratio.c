/* The ratio B / A with its confidence interval, and the verdict (docs/compare.md). */
#include <math.h>

#include "core/stats.h"
#include "run/compare_parts.h"

#define NORMAL_95 1.959964 /* normal quantile of the 95 % intervals in the rows */

void side_add(struct side *side, double value, double error)
{
    /* From value * (1 - error) to value * (1 + error), the logarithm grows by 2 * atanh(error). */
    double logarithm = log(value), before = logarithm - side->log_mean;
    double deviation = error >= 0 && error < 1 ? atanh(error) / NORMAL_95 : NAN;
    side->count++;
    side->log_mean += before / (double)side->count;
    side->squares += before * (logarithm - side->log_mean);
    side->errors += deviation * deviation;
}

enum status side_add_epochs(struct side *side, const double *values, size_t count)
{
    struct stats stats;
    TRY(stats_compute(values, count, &stats));
    side_add(side, stats.median, stats.median_error);
    return STATUS_OK;
}

/* The estimated variance of a mean of logarithms, and the degrees of freedom of the estimate. */
struct variance {
    double value, freedom;
};

/* Returns the variance of the mean of a side, estimated from the runs' own intervals; NaN if unknown. */
static double variance_within(const struct side *side)
{
    double count = (double)side->count;
    return side->errors / (count * count);
}

/* Returns the variance of the mean of a side, estimated from the scatter of its two or more runs. */
static struct variance variance_between(const struct side *side)
{
    double count = (double)side->count;
    return (struct variance){side->squares / (count - 1) / count, count - 1};
}

/* Returns the variance of the side `alone`. A single run shows no scatter between runs, so the function
 * assumes the scatter of the runs of `repeated`. If the variance within the single run is larger than the
 * mean variance within the repeated runs, the function adds the difference. The result is at least the
 * variance within the single run. If only the variance within the single run is unknown, returns NaN, because
 * that variance may be far larger than the one within the repeated runs. */
static double variance_alone(const struct side *alone, const struct side *repeated)
{
    double count = (double)repeated->count;
    double scatter = repeated->squares / (count - 1), own = variance_within(alone),
           theirs = repeated->errors / count;
    if (isnan(own) && !isnan(theirs))
        return NAN;
    return fmax(own, scatter + fmax(0, own - theirs));
}

/* Returns the variance of the difference of two means. The two sides may have different variances (Welch). */
static struct variance variance_of_difference(const struct side *a, const struct side *b)
{
    if (a->count == 1 && b->count == 1)
        return (struct variance){variance_within(a) + variance_within(b), INFINITY};
    if (a->count == 1 || b->count == 1) {
        const struct side *alone = a->count == 1 ? a : b, *repeated = a->count == 1 ? b : a;
        struct variance mean = variance_between(repeated);
        return (struct variance){mean.value + variance_alone(alone, repeated), mean.freedom};
    }
    struct variance x = variance_between(a), y = variance_between(b);
    double sum = x.value + y.value;
    return (struct variance){sum,
                             sum * sum / (x.value * x.value / x.freedom + y.value * y.value / y.freedom)};
}

/* The scatter of repeated runs has two parts: differences between runs and the error within each run. A few
 * runs can scatter little by chance, so the interval is at least as wide as the runs' own intervals imply. */
struct ratio side_ratio(const struct side *a, const struct side *b, double confidence)
{
    double centre = b->log_mean - a->log_mean;
    struct variance variance = variance_of_difference(a, b);
    double half = variance.value > 0 ? stats_student(confidence, variance.freedom) * sqrt(variance.value)
                                     : variance.value;
    double within = variance_within(a) + variance_within(b);
    if (!isnan(half) && !isnan(within))
        half = fmax(half, stats_student(confidence, INFINITY) * sqrt(within));
    return (struct ratio){exp(centre), exp(centre - half), exp(centre + half)};
}

enum verdict ratio_judge(const struct ratio *ratio, double margin, bool higher_is_better)
{
    double low = 1 / (1 + margin), high = 1 + margin;
    if (isnan(ratio->low) || isnan(ratio->high))
        return VERDICT_UNDECIDED;
    if (ratio->low >= low && ratio->high <= high)
        return VERDICT_SAME;
    if (ratio->low > high)
        return higher_is_better ? VERDICT_BETTER : VERDICT_WORSE;
    if (ratio->high < low)
        return higher_is_better ? VERDICT_WORSE : VERDICT_BETTER;
    return VERDICT_UNDECIDED;
}
