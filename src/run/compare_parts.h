/* Declarations shared by the files compare*.c and by their tests. `advise` uses the interval of a ratio. */
#ifndef FDSL_RUN_COMPARE_PARTS_H
#define FDSL_RUN_COMPARE_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/options.h"
#include "core/workload.h"
#include "run/formats.h"

/* ---- The interval of a ratio (compare_ratio.c) ---- */

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

/* ---- Options and rows (compare.c, compare_match.c) ---- */

#define COMPARE_KEYS_MAX 128 /* at least as many as a workload has parameters */

/* Columns that describe the origin of a row, such as its host and revision. Rows match even if they differ in
 * these columns, because the comparison may be about two hosts, devices or revisions. */
#define COMPARE_ORIGINS 5
extern const char *const compare_origins[COMPARE_ORIGINS];

enum mark { MARK_UNSETTLED = 1, MARK_THROTTLED = 2, MARK_UNVERIFIED = 4, MARK_WRONG = 8, MARK_MIXED = 16 };

/* A column whose suffix does not tell whether higher is better, or whose value describes a whole training
 * run. Other columns that end with _s (lower is better) or _per_s (higher is better) need no entry. */
struct direction {
    const char *column;
    bool higher_is_better;
    bool is_final; /* describes a whole training run: the value in the last epoch's row is the value of the
                      run */
};
extern const struct direction compare_directions[]; /* ends with an entry whose column is NULL */

struct measure_choice {
    const char *column;    /* NULL: time_median_s / items */
    const char *name;      /* for output */
    bool higher_is_better; /* true for items_per_s, for example */
    bool is_time;          /* in seconds */
    bool is_speed;  /* a time or a rate: its verdicts are "faster" and "slower", not "better" and "worse" */
    bool is_median; /* the column median_error is also the relative error of this measure */
    bool is_final;  /* only the row of the last epoch counts */
};

/* Column numbers of a table, by purpose; TABLE_NONE for an optional column that the file lacks. */
struct columns {
    size_t keys[COMPARE_KEYS_MAX], origins[COMPARE_ORIGINS];
    size_t ranks, rank, value, items, error, settled, throttled, verified, wrong;
    size_t job, epoch, epochs;
};

/* Rows of both files with the same key; a side is empty if only the other file has the key. */
struct pair {
    size_t first[2]; /* the first row with this key in each file; TABLE_NONE if there is none */
    struct side sides[2];
    unsigned marks[2];
    struct ratio ratio;
    enum verdict verdict;
};

struct comparison {
    /* Values of the options */
    const char *margin_text, *confidence_text, *measure_name, *ignored;
    int format;
    bool strict, help;

    /* Derived from the options and the files */
    double margin, confidence; /* fractions, not percentages */
    struct measure_choice measure;
    const struct workload *workload;
    struct table tables[2];
    struct columns columns[2];
    const char *keys[COMPARE_KEYS_MAX]; /* names of columns: first the key_count columns by which rows are
                                           matched, then the ignored_count columns of --ignore */
    char key_names[COMPARE_KEYS_MAX][64];
    size_t key_count, ignored_count;
    size_t used[2];                     /* number of rows that are compared */
    size_t without[2], without_line[2]; /* number of rows without a value, and the line of the first */
    size_t unfinished[2];               /* number of runs left out because they lack their last epoch */
    bool mixed[2]
              [COMPARE_ORIGINS]; /* whether pooled rows of a file differ in this column of compare_origins */
    bool mixed_ignored[2][COMPARE_KEYS_MAX]; /* whether pooled rows differ in this column of --ignore; same
                                                index as `keys` */
    struct pair *pairs;                      /* owned; in the order of A, then pairs that only B has */
    size_t pair_count;
    size_t verdicts[VERDICTS]; /* number of pairs per verdict */
    double mean_ratio;         /* geometric mean over the pairs that have a ratio; NaN if none has */
};

/* Sets comparison->measure from --measure. Call it after both tables are read. STATUS_USAGE if A has no such
 * column, or if it is unknown whether lower or higher values are better. */
enum status compare_choose_measure(struct comparison *comparison);

/* Prints, for --help, which columns --measure accepts. */
void compare_print_measures(void);

/* Finds the columns, matches the rows into comparison->pairs and judges each pair. Warns about rows that have
 * no value. STATUS_USAGE if a column is missing; STATUS_FAILED if no rows match, STATUS_EXHAUSTED if memory
 * runs out. */
enum status compare_match(struct comparison *comparison);

/* Returns the text of key column number `key`, which is the same in all rows of the pair. The text is owned
 * by the table. */
const char *compare_key(const struct comparison *comparison, const struct pair *pair, size_t key);

/* ---- Output (compare_report.c) ---- */

/* Returns "faster", "slower", "same", ... */
const char *compare_verdict(const struct comparison *comparison, enum verdict verdict);

/* Prints the comparison in comparison->format. */
enum status compare_report(const struct comparison *comparison);

#endif
