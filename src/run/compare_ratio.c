/* The ratio of two medians with a confidence interval, and the verdict (docs/compare.md). */
#include <math.h>

#include "core/stats.h"
#include "run/compare_parts.h"

#define NORMAL_95 1.959964 /* quantile for the 95 % intervals of rows */

void side_add(struct side *side, double value, double error)
{
    /* log(m (1 - h)) and log(m (1 + h)) are 2 atanh(h) apart. */
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

/* The variance of a mean of logarithms, and how many degrees of freedom it was estimated with. */
struct variance {
    double value, freedom;
};

/* Returns the variance according to the runs' own intervals. NaN if unknown. */
static double variance_within(const struct side *side)
{
    double count = (double)side->count;
    return side->errors / (count * count);
}

/* Returns the variance by the scatter of two or more runs. */
static struct variance variance_between(const struct side *side)
{
    double count = (double)side->count;
    return (struct variance){side->squares / (count - 1) / count, count - 1};
}

/* Returns the variance of a single run, which shows no scatter: it is given that of the repeated runs, plus
 * what its own error exceeds theirs by. NaN if its error is unknown although theirs are known, because then
 * it may be far larger. */
static double variance_alone(const struct side *alone, const struct side *repeated)
{
    double count = (double)repeated->count;
    double scatter = repeated->squares / (count - 1), own = variance_within(alone),
           theirs = repeated->errors / count;
    if (isnan(own) && !isnan(theirs))
        return NAN;
    return fmax(own, scatter + fmax(0, own - theirs));
}

/* Returns the variance of the difference of two means. The sides may scatter differently (Welch). */
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

/* Repeated runs scatter by what differs between runs and by what differs within them. The scatter of few runs
 * can be small by chance, so the interval is never narrower than the runs' own intervals allow. */
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
