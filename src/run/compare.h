/* Commands that compare: the rows of two files, and a published data set with the images that this program
 * draws. */
#ifndef FDSL_RUN_COMPARE_H
#define FDSL_RUN_COMPARE_H

#include <stdbool.h>
#include <stddef.h>

#include "core/status.h"

/* ---- fdsl-bench compare A.csv B.csv (compare.c) ---- */

/* Finds the rows of B that are slower or faster than the matching rows of A. */

/* Compares two files and prints the result; argv[0] is the word "compare". STATUS_WRONG if a row of B is
 * slower or has wrong results (--strict: in more cases); STATUS_FAILED if a file cannot be read or no rows
 * match; STATUS_USAGE for wrong options, or files whose rows cannot be compared. */
enum status compare_run(int argc, char *argv[]);

/* ---- The interval of a ratio, for `advise` and tests ---- */

/* Statistics of the repeated runs of a pair in one file, A or B. Initialise it with zeros. */
struct side {
    size_t count;    /* number of runs */
    double log_mean; /* mean of the logarithms of the values */
    double squares;  /* sum of squared deviations of the logarithms from their mean */
    double errors;   /* sum of one variance per run: the variance of the value's logarithm, estimated from the
                      * run's confidence interval; NaN if any variance is unknown */
};

/* Adds a run with the positive value `value`. `error` is half the width of the value's 95 % confidence
 * interval, divided by the value; NaN if unknown. */
void side_add(struct side *side, double value, double error);

/* Adds a run of `count` >= 2 epochs, given by their positive values in the order of measurement. The value of
 * the run is the median of the epochs. The error of this median follows from the scatter of the epochs. The
 * error is unknown if the effective sample size of the epochs is below STATS_INTERVAL_MIN. STATUS_EXHAUSTED
 * if memory runs out. */
enum status side_add_epochs(struct side *side, const double *values, size_t count);

struct ratio {
    double value;     /* B / A */
    double low, high; /* confidence interval of the ratio; NaN if unknown */
};

/* Returns the ratio B / A of the geometric means of two sides, each with at least one run. `confidence` is
 * the confidence level of the interval, between 0 and 1. */
struct ratio side_ratio(const struct side *a, const struct side *b, double confidence);

enum verdict {
    VERDICT_BETTER,
    VERDICT_WORSE,
    VERDICT_SAME,
    VERDICT_UNDECIDED,
    VERDICT_WRONG, /* not judged, because a row has wrong results */
    VERDICT_ONLY_A,
    VERDICT_ONLY_B,
    VERDICTS
};

/* Returns the verdict of two one-sided tests, which compare the interval with 1 / (1 + margin) and 1 +
 * margin. The verdict is VERDICT_UNDECIDED if the interval is unknown or contains one of these bounds. */
enum verdict ratio_judge(const struct ratio *ratio, double margin, bool higher_is_better);

/* ---- fdsl-bench verify-published DIR --preset SET (verify_published.c) ---- */

/* Compares a downloaded or self-made copy of a published data set with the images that this program draws. */

struct formula;
struct published_set;

/* Compares and prints the counts; argv[0] is the word "verify-published". Files have the names of the
 * published script; any subset of them may exist. STATUS_USAGE for wrong options, or if the folder has no
 * file of the set; STATUS_WRONG if a file differs, cannot be read, or is not in the set. */
enum status verify_published_run(int argc, char *argv[]);

/* Does the same for any set of a formula, without options. `folder` exists; threads >= 1. `points`: images of
 * a fractal set show points, not patches. */
enum status verify_published(const char *folder, const struct formula *formula,
                             const struct published_set *set, bool points, int threads);

#endif
