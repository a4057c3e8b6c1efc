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

/* The variance of a mean of logarithms, and the degrees of freedom of its estimate. */
struct variance {
    double value, freedom;
};

/* Returns the variance that follows from the rows' own intervals. NaN if unknown. */
static double variance_within(const struct side *side)
{
    double count = (double)side->count;
    return side->errors / (count * count);
}

/* Returns the variance that follows from the scatter of the rows; for a single row, from its interval. */
static struct variance variance_between(const struct side *side)
{
    double count = (double)side->count;
    if (side->count == 1)
        return (struct variance){variance_within(side), INFINITY};
    return (struct variance){side->squares / (count - 1) / count, count - 1};
}

/* Returns half the width of the interval by Welch's method, which allows different variances of the sides. */
static double welch(struct variance a, struct variance b, double confidence)
{
    double sum = a.value + b.value;
    double freedom = sum * sum / (a.value * a.value / a.freedom + b.value * b.value / b.freedom);
    return sum > 0 ? stats_student(confidence, freedom) * sqrt(sum) : sum;
}

/* The scatter of repeated rows includes differences between runs and noise within runs. The scatter of few
 * rows can be small by chance, so the interval is never narrower than the rows' own intervals imply. */
struct ratio side_ratio(const struct side *a, const struct side *b, double confidence)
{
    double centre = b->log_mean - a->log_mean;
    double half = welch(variance_between(a), variance_between(b), confidence);
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
