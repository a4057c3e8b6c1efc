#include "run/compare.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/text.h"
#include "core/array.h"
#include "core/stats.h"
#include "core/workload.h"
#include "run/rows.h"
#include "run/report.h"

/* ---- The interval of a ratio (docs/compare.md) ---- */

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

/* ---- Types ---- */

#define KEYS_MAX 128 /* at least as many as a workload has parameters */

/* Columns that describe the origin of a row. Rows match even if they differ in these columns, because the
 * comparison may be about two hosts, devices or revisions. */
static const char *const origins[] = {"host", "device", "driver", "cuda", "revision"};
#define ORIGINS COUNT_OF(origins)

enum mark { MARK_UNSETTLED = 1, MARK_THROTTLED = 2, MARK_UNVERIFIED = 4, MARK_WRONG = 8, MARK_MIXED = 16 };

struct measure_choice {
    const char *column;    /* NULL: time_median_s / items */
    const char *name;      /* for output */
    bool higher_is_better; /* true for items_per_s, for example */
    bool is_time;          /* in seconds */
    bool is_speed;  /* a time or a rate: its verdicts are "faster" and "slower", not "better" and "worse" */
    bool is_median; /* the column median_error is also the relative error of this measure */
    bool is_final;  /* only the row of the last epoch counts */
};

/* Columns whose cells are used, apart from those of `names` below. A file may lack FIELD_SETTLED and the
 * columns after it. */
enum row_field {
    FIELD_RANKS,
    FIELD_RANK,
    FIELD_VALUE,
    FIELD_ITEMS,
    FIELD_ERROR,
    FIELD_SETTLED,
    FIELD_THROTTLED,
    FIELD_VERIFIED,
    FIELD_WRONG,
    FIELD_JOB,
    FIELD_EPOCH,
    FIELD_EPOCHS,
    FIELDS
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
    /* Names of columns: first the key_count columns by which rows are matched, then the origins, then the
     * ignored_count columns of --ignore. */
    const char *names[KEYS_MAX + ORIGINS];
    char key_names[KEYS_MAX][64], key_defaults[KEYS_MAX][64]; /* of options; see option_default() */
    size_t key_count, ignored_count;
    size_t named[2][KEYS_MAX + ORIGINS]; /* the numbers of these columns in each file */
    size_t fields[2][FIELDS];
    size_t used[2];                     /* number of rows that are compared */
    size_t without[2], without_line[2]; /* number of rows without a value, and the line of the first */
    size_t unfinished[2];               /* number of runs left out because they lack their last epoch */
    bool mixed[2][KEYS_MAX + ORIGINS];  /* whether pooled rows of a file differ in this column of `names` */
    struct pair *pairs;                 /* owned; in the order of A, then pairs that only B has */
    size_t pair_count;
    size_t verdicts[VERDICTS]; /* number of pairs per verdict */
    double mean_ratio;         /* geometric mean over the pairs that have a ratio; NaN if none has */
};

/* ---- Measures ---- */

/* Fills `measure`. Returns false if it is unknown whether lower or higher values of the column are better. */
static bool find_measure(const struct row_columns *columns, const char *name, struct measure_choice *measure)
{
    const struct column *column = columns->row;
    while (column->name && strcmp(column->name, name) != 0)
        column++;
    if (!column->name)
        return false;
    bool rate = text_ends_in(column->unit, "/s"), time = strcmp(column->unit, "s") == 0;
    *measure = (struct measure_choice){.column = column->name,
                                       .name = column->name,
                                       .higher_is_better = rate || column->better == BETTER_HIGHER,
                                       .is_time = time,
                                       .is_speed = rate || time,
                                       .is_final = column->of_run,
                                       .is_median = strcmp(name, "time_median_s") == 0 ||
                                                    strcmp(name, "items_per_s") == 0 ||
                                                    strcmp(name, "bytes_per_s") == 0};
    return measure->is_speed || column->better != BETTER_BY_UNIT;
}

/* Sets comparison->measure from --measure. STATUS_USAGE if A has no such column, or if it is unknown whether
 * lower or higher values are better. */
static enum status choose_measure(struct comparison *comparison)
{
    const char *name = comparison->measure_name;
    const struct table *table = &comparison->tables[0];
    const struct row_columns *columns;
    struct measure_choice other;
    TRY(columns_of(comparison->workload, &columns));
    comparison->measure = (struct measure_choice){
        .name = "time_per_item", .is_time = true, .is_speed = true, .is_median = true};
    if (strcmp(name, comparison->measure.name) == 0)
        return STATUS_OK;
    if (table_column(table, name) != TABLE_NONE && find_measure(columns, name, &comparison->measure))
        return STATUS_OK;
    if (table_column(table, name) != TABLE_NONE)
        return status_set(STATUS_USAGE,
                          "--measure %s: it is not known whether lower or higher values of this column are "
                          "better; compare --help lists the measures",
                          name);

    FREED const char **names = calloc(table->columns + 1, sizeof *names);
    size_t count = 0;
    TRY(ALLOCATED(names, "out of memory"));
    names[count++] = "time_per_item";
    for (size_t i = 0; i < table->columns; i++)
        if (find_measure(columns, table->cells[i], &other))
            names[count++] = table->cells[i];
    const char *nearest = nearest_word(name, names, count);
    return status_set(STATUS_USAGE, "--measure: %s has no column '%s'%s%s%s", table->path, name,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

/* ---- Columns ---- */

static size_t name_count(const struct comparison *comparison)
{
    return comparison->key_count + ORIGINS + comparison->ignored_count;
}

/* Returns the default of the option that has this column; NULL if the column is not that of an option. */
static const char *option_default(const struct comparison *comparison, const char *name)
{
    for (size_t i = 0; i < KEYS_MAX; i++)
        if (name == comparison->key_names[i])
            return comparison->key_defaults[i];
    return NULL;
}

/* A file that was written before an option existed lacks its column: its rows have the default. */
static enum status find_columns(struct comparison *comparison, size_t side)
{
    static const char *const fields[FIELDS] = {"ranks",        "rank",    "time_median_s", "items",
                                               "median_error", "settled", "throttled",     "verified",
                                               "wrong",        "job_id",  "epoch",         "epochs"};
    const struct table *table = &comparison->tables[side];
    const char *measure = comparison->measure.column, *missing = NULL;
    for (size_t i = 0; i < FIELDS; i++) {
        const char *name = i == FIELD_VALUE && measure ? measure : fields[i];
        comparison->fields[side][i] = table_column(table, name);
        if (comparison->fields[side][i] == TABLE_NONE && i < FIELD_SETTLED && !missing)
            missing = name;
    }
    for (size_t i = 0; i < name_count(comparison); i++) {
        comparison->named[side][i] = table_column(table, comparison->names[i]);
        if (comparison->named[side][i] == TABLE_NONE && i < comparison->key_count && !missing &&
            !option_default(comparison, comparison->names[i]))
            missing = comparison->names[i];
    }
    return missing ? status_set(STATUS_USAGE, "%s has no column '%s'; name a file that --out wrote",
                                table->path, missing)
                   : STATUS_OK;
}

/* Returns the cell of a row in column number `name` of comparison->names. The table owns it. */
static const char *named_cell(const struct comparison *comparison, size_t side, size_t row, size_t name)
{
    const size_t column = comparison->named[side][name];
    const bool lacks = column == TABLE_NONE && comparison->named[1 - side][name] != TABLE_NONE;
    const char *fallback = lacks ? option_default(comparison, comparison->names[name]) : NULL;
    return fallback ? fallback : table_cell(&comparison->tables[side], row, column);
}

/* Returns the text of key column number `key`, which is the same in all rows of the pair. */
static const char *key_text(const struct comparison *comparison, const struct pair *pair, size_t key)
{
    size_t side = pair->first[0] == TABLE_NONE;
    return named_cell(comparison, side, pair->first[side], key);
}

/* ---- Rows ---- */

/* A row that describes a whole run or one epoch of it. */
struct entry {
    uint64_t hash; /* hash of the row's key */
    size_t side, row;
    size_t run;   /* entries of the same run have the same number; runs with the same key have consecutive
                     numbers */
    double epoch; /* from 1; NaN if runs have no epochs */
    double value, error; /* `value` is NaN unless it is positive, because only positive values have a ratio */
    bool newest;         /* no later entry of its run has been found yet */
};

static const char *field(const struct comparison *comparison, const struct entry *entry, enum row_field field)
{
    return table_cell(&comparison->tables[entry->side], entry->row, comparison->fields[entry->side][field]);
}

/* Returns the number in a cell; NaN if the cell is empty or not a finite number. */
static double number(const struct comparison *comparison, const struct entry *entry, enum row_field of)
{
    const char *cell = field(comparison, entry, of);
    char *end;
    double value = strtod(cell, &end);
    return *cell && *end == '\0' && isfinite(value) ? value : NAN;
}

/* Adds to `entries` those rows of one file that cover all ranks: rows of an only rank, and with rank=all. */
static void add_rows(struct comparison *comparison, size_t side, struct entry *entries, size_t *count)
{
    const struct measure_choice *measure = &comparison->measure;
    for (size_t row = 0; row < comparison->tables[side].rows; row++) {
        struct entry entry = {.side = side, .row = row};
        if (strcmp(field(comparison, &entry, FIELD_RANK), "all") != 0 &&
            strcmp(field(comparison, &entry, FIELD_RANKS), "1") != 0)
            continue;
        double value = number(comparison, &entry, FIELD_VALUE);
        if (!measure->column)
            value /= number(comparison, &entry, FIELD_ITEMS);
        entry.value = isfinite(value) && value > 0 ? value : NAN;
        entry.error = measure->is_median ? number(comparison, &entry, FIELD_ERROR) : NAN;
        entry.epoch = number(comparison, &entry, FIELD_EPOCH);
        entry.hash = FNV_BEGIN;
        for (size_t i = 0; i < comparison->key_count; i++) {
            const char *cell = named_cell(comparison, side, row, i);
            entry.hash = fnv_add(entry.hash, cell, strlen(cell) + 1);
        }
        entries[(*count)++] = entry;
    }
}

static const struct comparison *sorted_for; /* for the comparators, because qsort() passes no context */

/* Orders two rows by columns begin to end - 1 of comparison->names. */
static int by_names(const struct entry *a, const struct entry *b, size_t begin, size_t end)
{
    int order = 0;
    for (size_t i = begin; i < end && order == 0; i++)
        order =
            strcmp(named_cell(sorted_for, a->side, a->row, i), named_cell(sorted_for, b->side, b->row, i));
    return order;
}

static int by_key(const struct entry *a, const struct entry *b)
{
    if (a->hash != b->hash)
        return a->hash < b->hash ? -1 : 1;
    return by_names(a, b, 0, sorted_for->key_count);
}

/* Orders rows by their key, their file, and the columns that identify the process that wrote a row: the job,
 * the origins, and the parameters of --ignore. */
static int by_key_and_process(const struct entry *a, const struct entry *b)
{
    int order = by_key(a, b);
    if (order == 0 && a->side != b->side)
        order = a->side < b->side ? -1 : 1;
    if (order == 0)
        order = strcmp(field(sorted_for, a, FIELD_JOB), field(sorted_for, b, FIELD_JOB));
    return order != 0 ? order : by_names(a, b, sorted_for->key_count, name_count(sorted_for));
}

static int by_key_process_and_row(const void *x, const void *y)
{
    const struct entry *a = x, *b = y;
    int order = by_key_and_process(a, b);
    return order != 0 ? order : (a->row > b->row) - (a->row < b->row);
}

static int by_run_and_row(const void *x, const void *y)
{
    const struct entry *a = x, *b = y;
    if (a->run != b->run)
        return a->run < b->run ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

static int by_first_row(const void *x, const void *y)
{
    const struct pair *a = x, *b = y;
    if (a->first[0] != b->first[0]) /* pairs without a row in A come last: TABLE_NONE is the largest number */
        return a->first[0] < b->first[0] ? -1 : 1;
    return (a->first[1] > b->first[1]) - (a->first[1] < b->first[1]);
}

/* ---- Pairs ---- */

static unsigned marks_of(const struct comparison *comparison, const struct entry *entry)
{
    const char *wrong = field(comparison, entry, FIELD_WRONG);
    unsigned marks = 0;
    if (strcmp(field(comparison, entry, FIELD_SETTLED), "no") == 0)
        marks |= MARK_UNSETTLED;
    if (*field(comparison, entry, FIELD_THROTTLED))
        marks |= MARK_THROTTLED;
    if (!*wrong && strcmp(field(comparison, entry, FIELD_VERIFIED), "yes") != 0)
        marks |= MARK_UNVERIFIED;
    if (*wrong && strcmp(wrong, "0") != 0)
        marks |= MARK_WRONG;
    return marks;
}

static void judge(const struct comparison *comparison, struct pair *pair)
{
    pair->ratio = (struct ratio){NAN, NAN, NAN};
    if (!pair->sides[0].count || !pair->sides[1].count) {
        pair->verdict = pair->sides[0].count ? VERDICT_ONLY_A : VERDICT_ONLY_B;
        return;
    }
    if ((pair->marks[0] | pair->marks[1]) & MARK_WRONG) { /* the time of wrong results is meaningless */
        pair->verdict = VERDICT_WRONG;
        return;
    }
    pair->ratio = side_ratio(&pair->sides[0], &pair->sides[1], comparison->confidence);
    pair->verdict = (pair->marks[0] | pair->marks[1]) & MARK_MIXED
                        ? VERDICT_UNDECIDED /* the mean over different parameters is meaningless */
                        : ratio_judge(&pair->ratio, comparison->margin, comparison->measure.higher_is_better);
}

/* Records in which origins and ignored parameters the row of `entry` differs from row number `first` of the
 * same pair. Returns MARK_MIXED if an ignored parameter differs, else 0. */
static unsigned note_mixed(struct comparison *comparison, const struct entry *entry, size_t first)
{
    unsigned marks = 0;
    for (size_t i = comparison->key_count; i < name_count(comparison); i++) {
        if (strcmp(named_cell(comparison, entry->side, entry->row, i),
                   named_cell(comparison, entry->side, first, i)) == 0)
            continue;
        comparison->mixed[entry->side][i] = true;
        if (i >= comparison->key_count + ORIGINS)
            marks = MARK_MIXED;
    }
    return marks;
}

/* Lists those of names[begin] to names[end - 1] in which pooled rows of a file differ. Returns whether there
 * are any. */
static bool list_mixed(const struct comparison *comparison, size_t side, size_t begin, size_t end, char *list,
                       size_t size)
{
    const char *names[KEYS_MAX + ORIGINS];
    size_t count = 0;
    for (size_t i = begin; i < end; i++)
        if (comparison->mixed[side][i])
            names[count++] = comparison->names[i];
    list_words(list, size, names, count);
    return count > 0;
}

/* Warns if pooled rows differ in an origin or in an ignored parameter. The usual cause is that runs of
 * another machine or revision were appended to the file, or that the file contains a sweep over the
 * parameter. */
static void warn_mixed(const struct comparison *comparison, size_t side)
{
    const char *path = comparison->tables[side].path;
    const size_t origin = comparison->key_count, ignored = origin + ORIGINS;
    char list[256];
    if (list_mixed(comparison, side, origin, ignored, list, sizeof list))
        status_warn("%s: rows that differ in %s are pooled as repeated runs; to avoid this, write them to "
                    "separate files",
                    path, list);
    if (list_mixed(comparison, side, ignored, name_count(comparison), list, sizeof list))
        status_warn("%s: rows that differ in %s, which --ignore names, are pooled and not judged; write them "
                    "to separate files, or do not ignore these parameters",
                    path, list);
}

/* ---- Runs ---- */

/* Returns the latest entry of the run to which `entry`, the row of an epoch, belongs. Returns NULL if this
 * epoch begins a run. Chooses the most recent run of the same process whose latest epoch is earlier. Several
 * runs can be unfinished, because the rows of two concurrent training runs may alternate in a file. `group`
 * is the first entry with the same key and process. */
static struct entry *continued(struct entry *group, struct entry *entry)
{
    if (isnan(entry->epoch) || entry->epoch <= 1)
        return NULL;
    for (struct entry *earlier = entry; earlier-- > group;)
        if (earlier->newest && earlier->epoch < entry->epoch)
            return earlier;
    return NULL;
}

/* Numbers the runs of `entries`, which are sorted by key, process and row. Then sorts them by run. */
static void number_runs(struct entry *entries, size_t count)
{
    struct entry *group = entries;
    size_t runs = 0;
    for (struct entry *entry = entries; entry < entries + count; entry++) {
        if (by_key_and_process(group, entry) != 0)
            group = entry;
        struct entry *before = continued(group, entry);
        entry->run = before ? before->run : runs++;
        entry->newest = true;
        if (before)
            before->newest = false;
    }
    qsort(entries, count, sizeof *entries, by_run_and_row);
}

/* Moves the entries of a run that have a value to the front, and counts the others. For a measure that
 * describes a whole training run, only the entry of the last epoch counts. Returns the number of entries with
 * a value. */
static size_t keep_valued(struct comparison *comparison, struct entry *run, size_t count)
{
    size_t kept = 0, side = run->side;
    const struct entry *last = &run[count - 1];
    /* A run is complete if it has no epochs, or if its last row is the row of its last epoch. */
    if (comparison->measure.is_final && !isnan(last->epoch) &&
        !(last->epoch >= number(comparison, last, FIELD_EPOCHS))) {
        comparison->unfinished[side]++;
        return 0;
    }
    for (size_t i = comparison->measure.is_final ? count - 1 : 0; i < count; i++) {
        size_t line = comparison->tables[side].lines[run[i].row];
        if (!isnan(run[i].value))
            run[kept++] = run[i];
        else if (comparison->without[side]++ == 0 || line < comparison->without_line[side])
            comparison->without_line[side] = line;
    }
    return kept;
}

/* Adds a run of `count` >= 1 entries to a pair. Uses `values` as scratch memory. */
static enum status add_run(struct comparison *comparison, struct pair *pair, const struct entry *run,
                           size_t count, double *values)
{
    size_t side = run->side, first = pair->first[side] == TABLE_NONE ? run->row : pair->first[side];
    for (size_t i = 0; i < count; i++) {
        pair->marks[side] |= marks_of(comparison, &run[i]) | note_mixed(comparison, &run[i], first);
        values[i] = run[i].value;
    }
    pair->first[side] = run->row < first ? run->row : first;
    comparison->used[side] += count;
    if (count > 1)
        return side_add_epochs(&pair->sides[side], values, count);
    side_add(&pair->sides[side], run->value, run->error);
    return STATUS_OK;
}

/* Builds one pair per key from all runs with this key. `entries` are sorted by run. */
static enum status collect(struct comparison *comparison, struct entry *entries, size_t count, double *values)
{
    struct entry key = {0}; /* an entry of the latest pair */
    for (size_t i = 0, next; i < count; i = next) {
        for (next = i + 1; next < count && entries[next].run == entries[i].run;)
            next++;
        size_t kept = keep_valued(comparison, &entries[i], next - i);
        if (kept == 0)
            continue;
        if (comparison->pair_count == 0 || by_key(&key, &entries[i]) != 0)
            comparison->pairs[comparison->pair_count++] = (struct pair){.first = {TABLE_NONE, TABLE_NONE}};
        key = entries[i];
        TRY(add_run(comparison, &comparison->pairs[comparison->pair_count - 1], &entries[i], kept, values));
    }
    return STATUS_OK;
}

static void warn_left_out(const struct comparison *comparison, size_t side)
{
    const char *path = comparison->tables[side].path;
    size_t without = comparison->without[side], unfinished = comparison->unfinished[side];
    if (without > 0)
        status_warn("%s: left out %zu row%s without a positive %s (the first: line %zu)", path, without,
                    without == 1 ? "" : "s", comparison->measure.name, comparison->without_line[side]);
    if (unfinished > 0)
        status_warn(
            "%s: left out %zu run%s without the last epoch, because %s describes a whole training run", path,
            unfinished, unfinished == 1 ? "" : "s", comparison->measure.name);
}

/* ---- All pairs ---- */

static void summarise(struct comparison *comparison)
{
    double sum = 0;
    size_t both = 0;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        struct pair *pair = &comparison->pairs[p];
        judge(comparison, pair);
        comparison->verdicts[pair->verdict]++;
        if (!isnan(pair->ratio.value)) {
            sum += log(pair->ratio.value);
            both++;
        }
    }
    comparison->mean_ratio = both ? exp(sum / (double)both) : NAN;
}

/* Sets the error message for two files without matching rows. The message names the parameters in which the
 * first row of A differs from the most similar row of B. */
static enum status no_pairs(const struct comparison *comparison)
{
    const char *differing[KEYS_MAX] = {NULL};
    size_t fewest = SIZE_MAX;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        const char *names[KEYS_MAX];
        size_t count = 0;
        for (size_t k = 0; k < comparison->key_count; k++)
            if (strcmp(key_text(comparison, &comparison->pairs[p], k),
                       key_text(comparison, &comparison->pairs[0], k)) != 0)
                names[count++] = comparison->names[k];
        if (comparison->pairs[p].first[1] != TABLE_NONE && count < fewest) {
            fewest = count;
            memcpy(differing, names, count * sizeof *names);
        }
    }
    char list[256] = "";
    if (fewest < SIZE_MAX)
        list_words(list, sizeof list, differing, fewest);
    return status_set(STATUS_FAILED,
                      "no row of %s has a partner in %s with the same parameters; the most similar rows "
                      "differ in %s; --ignore NAME,... matches rows that differ in NAME",
                      comparison->tables[0].path, comparison->tables[1].path, list);
}

/* Finds the columns, matches the rows into comparison->pairs and judges each pair. Warns about rows that have
 * no value. STATUS_USAGE if a column is missing; STATUS_FAILED if no rows match. */
static enum status match(struct comparison *comparison)
{
    size_t capacity = comparison->tables[0].rows + comparison->tables[1].rows, count = 0;
    FREED struct entry *entries = calloc(capacity + 1, sizeof *entries);
    FREED double *values = calloc(capacity + 1, sizeof *values);
    comparison->pairs = calloc(capacity + 1, sizeof *comparison->pairs);
    TRY(ALLOCATED(entries && values && comparison->pairs, "out of memory for %zu rows", capacity));
    TRY(find_columns(comparison, 0));
    TRY(find_columns(comparison, 1));
    add_rows(comparison, 0, entries, &count);
    add_rows(comparison, 1, entries, &count);
    sorted_for = comparison;
    qsort(entries, count, sizeof *entries, by_key_process_and_row);
    number_runs(entries, count);
    TRY(collect(comparison, entries, count, values));
    qsort(comparison->pairs, comparison->pair_count, sizeof *comparison->pairs, by_first_row);
    summarise(comparison);
    for (size_t side = 0; side < 2; side++) {
        warn_left_out(comparison, side);
        if (comparison->used[side] == 0)
            return status_set(STATUS_FAILED, "%s has no row to compare", comparison->tables[side].path);
        warn_mixed(comparison, side);
    }
    size_t alone = comparison->verdicts[VERDICT_ONLY_A] + comparison->verdicts[VERDICT_ONLY_B];
    return alone == comparison->pair_count ? no_pairs(comparison) : STATUS_OK;
}

/* ---- Output ---- */

#define LABEL_MIN 18
#define CELL_MAX  256

static const struct {
    enum mark mark;
    char letter;
    const char *name, *meaning;
} marks[] = {
    {MARK_UNSETTLED, '*', "unsettled", "not settled: the error of a run's median was above --max-error"},
    {MARK_THROTTLED, 't', "throttled", "throttled: the GPU reduced its clocks"},
    {MARK_UNVERIFIED, 'v', "unverified", "not verified: a run was made without --verify"},
    {MARK_WRONG, 'w', "wrong", "wrong results: the row is not judged"},
    {MARK_MIXED, 'm', "mixed",
     "mixed: runs that differ in a parameter of --ignore were pooled; the row is not judged"},
};

/* Returns "faster", "slower", "same", ... */
static const char *verdict_name(const struct comparison *comparison, enum verdict verdict)
{
    static const char *const names[VERDICTS] = {"better", "worse",     "same",     "undecided",
                                                "wrong",  "only in A", "only in B"};
    if (comparison->measure.is_speed && verdict == VERDICT_BETTER)
        return "faster";
    if (comparison->measure.is_speed && verdict == VERDICT_WORSE)
        return "slower";
    return names[verdict];
}

/* ---- The origin of the rows ---- */

#define VALUES_SHOWN 3

/* Lists the distinct values of a column over all rows of a file: "a, b, c and more". */
static void list_values(const struct table *table, const char *name, char *text, size_t size)
{
    const char *values[VALUES_SHOWN + 1];
    size_t count = 0, column = table_column(table, name);
    for (size_t row = 0; row < table->rows && count <= VALUES_SHOWN; row++) {
        const char *cell = table_cell(table, row, column);
        bool known = !*cell;
        for (size_t i = 0; i < count && !known; i++)
            known = strcmp(values[i], cell) == 0;
        if (!known)
            values[count++] = cell;
    }
    text[0] = '\0';
    for (size_t i = 0; i < count && i < VALUES_SHOWN; i++)
        text_join(text, size, ", ", "%s", values[i]);
    if (count > VALUES_SHOWN)
        text_append(text, size, " and more");
}

static void print_text(const char *label, const char *text)
{
    printf("%s", label);
    text_print(stdout, text);
}

/* Prints one line per origin: its values, or those of A and B if they differ. */
static void print_origins(const struct comparison *comparison)
{
    for (size_t i = 0; i < ORIGINS; i++) {
        char values[2][CELL_MAX];
        for (size_t side = 0; side < 2; side++)
            list_values(&comparison->tables[side], origins[i], values[side], sizeof values[side]);
        bool same = strcmp(values[0], values[1]) == 0;
        if (same && !*values[0])
            continue;
        printf("  %-9s", origins[i]);
        print_text(same ? "" : "A: ", *values[0] ? values[0] : "-");
        if (!same)
            print_text("   B: ", *values[1] ? values[1] : "-");
        putchar('\n');
    }
}

/* ---- Labels of rows ---- */

/* Decides which parameters the labels of the table's rows show, so that no two labels are equal. */
struct labels {
    bool varies[KEYS_MAX];      /* whether the rows differ in this column */
    const char *most[KEYS_MAX]; /* the value of more than half of the rows; NULL if there is none */
    bool empty;                 /* also show empty values, because some labels would otherwise be equal */
};

/* Returns the value of a column for a label. An out_res that equals res becomes "". */
static const char *label_value(const struct comparison *comparison, const struct pair *pair, size_t key)
{
    const char *value = key_text(comparison, pair, key);
    if (strcmp(comparison->names[key], "out_res") == 0)
        for (size_t i = 0; i < comparison->key_count; i++)
            if (strcmp(comparison->names[i], "res") == 0 && strcmp(key_text(comparison, pair, i), value) == 0)
                return "";
    return value;
}

/* Finds whether a column varies, and which value most rows share (Boyer-Moore majority vote). */
static void survey(const struct comparison *comparison, size_t key, struct labels *labels)
{
    const char *most = NULL, *first = label_value(comparison, &comparison->pairs[0], key);
    size_t votes = 0, holders = 0;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        const char *value = label_value(comparison, &comparison->pairs[p], key);
        labels->varies[key] |= strcmp(value, first) != 0;
        if (votes == 0)
            most = value;
        votes = strcmp(value, most) == 0 ? votes + 1 : votes - 1;
    }
    for (size_t p = 0; p < comparison->pair_count; p++)
        holders += strcmp(label_value(comparison, &comparison->pairs[p], key), most) == 0;
    labels->most[key] = 2 * holders > comparison->pair_count ? most : NULL;
}

/* Writes the label of a row: its variant, and the parameters in which it differs from most rows. Returns the
 * length. */
static size_t label_of(const struct comparison *comparison, const struct labels *labels,
                       const struct pair *pair, char *label, size_t size)
{
    char raw[4096] = "";
    bool differs = false;
    for (size_t i = 0; i < comparison->key_count; i++) {
        bool variant = strcmp(comparison->names[i], "variant") == 0;
        const char *value = label_value(comparison, pair, i), *most = labels->most[i];
        const char *shown = key_text(comparison, pair, i);
        differs |= labels->varies[i];
        bool special = labels->varies[i] && !(most && strcmp(value, most) == 0) &&
                       (*value || (*shown && most) || labels->empty);
        if (variant || special)
            text_join(raw, sizeof raw, " ", "%s%s%s", variant ? "" : comparison->names[i], variant ? "" : "=",
                      *shown ? shown : "-");
    }
    return strlen(text_printable(*raw ? raw : differs ? "as most" : "all", label, size));
}

/* Chooses what the labels show, so that no two labels are equal. */
static enum status choose_labels(const struct comparison *comparison, struct labels *labels)
{
    char label[4096];
    FREED uint64_t *hashes = calloc(comparison->pair_count, sizeof *hashes);
    TRY(ALLOCATED(hashes, "out of memory for %zu rows", comparison->pair_count));
    *labels = (struct labels){0};
    for (size_t k = 0; k < comparison->key_count; k++)
        survey(comparison, k, labels);
    for (size_t p = 0; p < comparison->pair_count; p++)
        hashes[p] = fnv_add(FNV_BEGIN, label,
                            label_of(comparison, labels, &comparison->pairs[p], label, sizeof label));
    qsort(hashes, comparison->pair_count, sizeof *hashes, compare_u64);
    for (size_t p = 1; p < comparison->pair_count; p++)
        labels->empty |= hashes[p] == hashes[p - 1];
    return STATUS_OK;
}

/* ---- The table ---- */

/* If `all` is true, prints the parameters that all rows share. Otherwise, prints the parameters that most
 * rows, but not all of them, share. */
static void print_parameters(const struct comparison *comparison, const struct labels *labels, bool all)
{
    bool any = false;
    for (size_t i = 0; i < comparison->key_count; i++) {
        const char *value = labels->most[i];
        bool variant = strcmp(comparison->names[i], "variant") == 0;
        if (labels->varies[i] == all || !value || !*value || (!all && variant))
            continue;
        if (!any)
            printf("  %-9s", all ? "rows with" : "most with");
        any = true;
        printf(" %s ", comparison->names[i]);
        text_print(stdout, value);
    }
    if (any)
        putchar('\n');
}

static void print_caption(const struct comparison *comparison, const struct labels *labels, int width)
{
    printf("%s: ratio B / A of %s, margin %g %%, %g %% confidence intervals\n", comparison->workload->name,
           comparison->measure.name, 100 * comparison->margin, 100 * comparison->confidence);
    for (size_t side = 0; side < 2; side++) {
        print_text(side ? "  B        " : "  A        ", comparison->tables[side].path);
        printf(" (%zu row%s)\n", comparison->used[side], comparison->used[side] == 1 ? "" : "s");
    }
    print_origins(comparison);
    print_parameters(comparison, labels, true);
    print_parameters(comparison, labels, false);
    printf("\n%-*s %12s    %12s    %7s %8s %18s  verdict\n", width, "row", "A", "B", "runs", "B/A",
           "interval");
}

/* Prints the value of one side and the letters of its marks. */
static void print_side(const struct comparison *comparison, const struct pair *pair, size_t side)
{
    char text[32] = "-", letters[COUNT_OF(marks) + 1] = "";
    double value = exp(pair->sides[side].log_mean);
    size_t used = 0;
    if (pair->sides[side].count && comparison->measure.is_time)
        format_time(value, text, sizeof text);
    else if (pair->sides[side].count)
        snprintf(text, sizeof text, "%.5g", value);
    for (size_t i = 0; i < COUNT_OF(marks); i++)
        if (pair->marks[side] & marks[i].mark)
            letters[used++] = marks[i].letter;
    printf(" %12s %-2s", text, letters);
}

/* Writes a ratio in at most 7 characters: 0.9860, 1.2e-05, 111056, 1.1e+06. */
static const char *ratio_text(double ratio, char text[16])
{
    bool plain = ratio == 0 || (ratio >= 0.001 && ratio < 99.99995);
    snprintf(text, 16, plain ? "%.4f" : ratio >= 1 && ratio < 999999.5 ? "%.6g" : "%.1e", ratio);
    return text;
}

static void print_line(const struct comparison *comparison, const struct labels *labels,
                       const struct pair *pair, int width, bool coloured)
{
    char label[4096], runs[48], ratio[16] = "-", low[16], high[16], interval[48] = "-";
    label_of(comparison, labels, pair, label, sizeof label);
    snprintf(runs, sizeof runs, "%zu/%zu", pair->sides[0].count, pair->sides[1].count);
    if (!isnan(pair->ratio.value))
        ratio_text(pair->ratio.value, ratio);
    if (!isnan(pair->ratio.low))
        snprintf(interval, sizeof interval, "%s .. %s", ratio_text(pair->ratio.low, low),
                 ratio_text(pair->ratio.high, high));
    const char *colour = !coloured                         ? ""
                         : pair->verdict == VERDICT_WORSE  ? "\033[31m"
                         : pair->verdict == VERDICT_BETTER ? "\033[32m"
                                                           : "";
    printf("%-*s", width, label);
    print_side(comparison, pair, 0);
    print_side(comparison, pair, 1);
    printf(" %7s %8s %18s  %s%s%s\n", runs, ratio, interval, colour, verdict_name(comparison, pair->verdict),
           *colour ? "\033[0m" : "");
}

/* Prints the number of pairs per verdict, the mean ratio, why pairs are undecided, and the meaning of the
 * marks used. */
static void print_summary(const struct comparison *comparison)
{
    unsigned used = 0;
    const char *separator = "\n";
    for (size_t i = 0; i < VERDICTS; i++)
        if (comparison->verdicts[i]) {
            printf("%s%zu %s", separator, comparison->verdicts[i], verdict_name(comparison, (enum verdict)i));
            separator = ", ";
        }
    if (!isnan(comparison->mean_ratio))
        printf("; geometric mean of B/A: %.4f", comparison->mean_ratio);
    putchar('\n');
    bool wide = false, unknown = false, single = false, lone = false;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        const struct pair *pair = &comparison->pairs[p];
        const unsigned marked = pair->marks[0] | pair->marks[1];
        /* The legend of their mark explains why mixed pairs are undecided. */
        const bool undecided = pair->verdict == VERDICT_UNDECIDED && !(marked & MARK_MIXED);
        const bool both = !isnan(pair->ratio.value);
        const bool one[2] = {pair->sides[0].count == 1, pair->sides[1].count == 1};
        used |= marked;
        wide |= undecided && !isnan(pair->ratio.low);
        unknown |= undecided && isnan(pair->ratio.low);
        single |= both && one[0] && one[1];
        lone |= both && one[0] != one[1];
    }
    if (wide)
        puts("undecided: the interval crosses the margin; measure longer or more often");
    if (unknown)
        puts(comparison->measure.is_median ? "undecided without an interval: a run has no median_error (too "
                                             "few samples or epochs); repeat the runs"
                                           : "undecided without an interval: a single run gives no error for "
                                             "this measure; repeat the runs");
    if (single)
        puts("runs 1/1: one run does not show how much runs differ; measure A and B at least three times "
             "each");
    if (lone)
        puts("one run against several: the single run is assumed to vary as much as the repeated runs; "
             "repeat it too");
    for (size_t i = 0; i < COUNT_OF(marks); i++)
        if (used & marks[i].mark)
            printf("%c %s\n", marks[i].letter, marks[i].meaning);
}

static enum status print_table(const struct comparison *comparison)
{
    char label[4096];
    struct labels labels;
    TRY(choose_labels(comparison, &labels));
    size_t width = LABEL_MIN;
    bool coloured = status_coloured(STDOUT_FILENO);
    for (size_t p = 0; p < comparison->pair_count; p++) {
        size_t length = label_of(comparison, &labels, &comparison->pairs[p], label, sizeof label);
        width = length > width ? length : width;
    }
    print_caption(comparison, &labels, (int)width);
    for (size_t p = 0; p < comparison->pair_count; p++)
        print_line(comparison, &labels, &comparison->pairs[p], (int)width, coloured);
    print_summary(comparison);
    return STATUS_OK;
}

/* ---- CSV and JSON ---- */

static void row_marks(struct row *row, const char *column, unsigned bits)
{
    char text[CELL_MAX] = "";
    for (size_t i = 0; i < COUNT_OF(marks); i++)
        if (bits & marks[i].mark)
            text_join(text, sizeof text, " ", "%s", marks[i].name);
    row_text(row, column, text);
}

static void pair_row(const struct comparison *comparison, const struct pair *pair, struct row *row)
{
    const struct side *a = &pair->sides[0], *b = &pair->sides[1];
    row_text(row, "schema", "compare/1");
    row_text(row, "workload", comparison->workload->name);
    for (size_t i = 0; i < comparison->key_count; i++)
        row_number(row, comparison->names[i], key_text(comparison, pair, i));
    row_text(row, "measure", comparison->measure.name);
    row_count(row, "runs_a", a->count);
    row_count(row, "runs_b", b->count);
    row_real(row, "a", a->count ? exp(a->log_mean) : NAN);
    row_real(row, "b", b->count ? exp(b->log_mean) : NAN);
    row_real(row, "ratio", pair->ratio.value);
    row_real(row, "ratio_low", pair->ratio.low);
    row_real(row, "ratio_high", pair->ratio.high);
    row_text(row, "verdict", verdict_name(comparison, pair->verdict));
    row_marks(row, "marks_a", pair->marks[0]);
    row_marks(row, "marks_b", pair->marks[1]);
}

/* Describes the whole comparison, for JSON. */
static void summary_row(const struct comparison *comparison, struct row *row)
{
    row_text(row, "a", comparison->tables[0].path);
    row_text(row, "b", comparison->tables[1].path);
    row_text(row, "workload", comparison->workload->name);
    row_text(row, "measure", comparison->measure.name);
    row_real(row, "margin", comparison->margin);
    row_real(row, "confidence", comparison->confidence);
    for (size_t i = 0; i < VERDICTS; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s", verdict_name(comparison, (enum verdict)i));
        for (char *c = name; (c = strchr(c, ' '));)
            *c = '_';
        row_count(row, name, comparison->verdicts[i]);
    }
    row_real(row, "mean_ratio", comparison->mean_ratio);
    for (size_t i = 0; i < ORIGINS; i++)
        for (size_t side = 0; side < 2; side++) {
            char name[64], values[CELL_MAX];
            snprintf(name, sizeof name, "%s_%c", origins[i], "ab"[side]);
            list_values(&comparison->tables[side], origins[i], values, sizeof values);
            row_text(row, name, values);
        }
}

static enum status print_rows(const struct comparison *comparison)
{
    struct row_printer printer;
    CLOSED_BY(row_free) struct row summary = {0};
    summary_row(comparison, &summary);
    rows_begin(&printer, comparison->format);
    for (size_t p = 0; p < comparison->pair_count; p++) {
        CLOSED_BY(row_free) struct row row = {0};
        pair_row(comparison, &comparison->pairs[p], &row);
        rows_add(&printer, &row);
    }
    return rows_end(&printer, "comparison", &summary);
}

/* Warns about rows of either file without a partner. */
static void warn_alone(const struct comparison *comparison)
{
    char text[2][PATH_MAX + 64] = {"", ""};
    const char *parts[2];
    size_t count = 0, alone = 0;
    for (size_t side = 0; side < 2; side++) {
        size_t rows = comparison->verdicts[side ? VERDICT_ONLY_B : VERDICT_ONLY_A];
        alone += rows;
        snprintf(text[side], sizeof text[side], count ? "%zu in %s" : "%zu of the rows in %s", rows,
                 comparison->tables[side].path);
        if (rows > 0)
            parts[count++] = text[side];
    }
    char list[2 * sizeof text[0]];
    list_words(list, sizeof list, parts, count);
    if (count > 0)
        status_warn(
            "%s %s no partner with the same parameters; --ignore NAME,... matches rows that differ in NAME",
            list, alone == 1 ? "has" : "have");
}

static enum status report(const struct comparison *comparison)
{
    warn_alone(comparison);
    if (comparison->format == FORMAT_TABLE)
        TRY(print_table(comparison));
    else
        TRY(print_rows(comparison));
    return format_flush();
}

/* ---- Options ---- */

#define AT(field) offsetof(struct comparison, field)
static const struct option_spec specs[] = {
    {"margin", "PERCENT", OPTION_TEXT, AT(margin_text), .fallback = "2",
     .help = "the largest relative difference that counts as no difference. The verdict on a row is same if "
             "its whole confidence interval is inside this margin. It is slower or faster if the whole "
             "interval is outside the margin, otherwise undecided. For columns that are neither times nor "
             "rates, the verdicts are worse and better"},
    {"measure", "COLUMN", OPTION_TEXT, AT(measure_name), .fallback = "time_per_item",
     .help = "the column to compare, such as time_p99_s or energy_j_per_item"},
    {"ignore", "A,B,...", OPTION_TEXT, AT(ignored),
     .help = "match rows even if they differ in these parameters, such as threads or data"},
    {"confidence", "PERCENT", OPTION_TEXT, AT(confidence_text), .fallback = "95",
     .help = "confidence level of the intervals"},
    {"strict", NULL, OPTION_FLAG, AT(strict),
     .help = "also exit with status 3 if a row is undecided, has wrong results in A, or is in only one file"},
    {"format", "FORMAT", OPTION_CHOICE, AT(format), .fallback = "table", .choices = format_names,
     .help = "format of stdout"},
    {"help", NULL, OPTION_FLAG, AT(help), .help = "print this help"},
};

/* Prints the names of all measures that are neither times nor rates. */
static void print_measures(void)
{
    const struct row_columns *columns;
    struct measure_choice measure;
    const char *names[KEYS_MAX + 1] = {NULL};
    size_t count = 0;
    printf("\nmeasures: time_per_item, times, rates, and");
    for (size_t w = 0; workload_table[w]; w++)
        for (size_t i = 0; columns_of(workload_table[w], &columns) == STATUS_OK && columns->row[i].name; i++)
            if (find_measure(columns, columns->row[i].name, &measure) && !measure.is_speed &&
                count < KEYS_MAX && !is_one_of(measure.name, names)) {
                printf("%s%s", count % 5 ? ", " : count ? ",\n  " : "\n  ", measure.name);
                names[count++] = measure.name;
            }
    putchar('\n');
}

static void print_help(void)
{
    puts("fdsl-bench compare - which rows of B are slower or faster than the matching rows of A?\n"
         "\n"
         "usage: fdsl-bench compare A.csv B.csv [options]\n"
         "\n"
         "A and B are files that --out wrote, for example before and after a change, or on two machines.\n"
         "Rows match if they have the same variant and parameters. Repeated runs are pooled.\n"
         "\n"
         "examples:\n"
         "  fdsl-bench compare before.csv after.csv\n"
         "  fdsl-bench compare v1.csv v2.csv --margin 5 --strict           # a release check\n"
         "  fdsl-bench compare a.csv b.csv --measure energy_j_per_item\n"
         "  fdsl-bench compare laptop.csv server.csv --ignore threads --format csv\n"
         "\n"
         "options:");
    options_help(stdout, specs, COUNT_OF(specs), NULL);
    print_measures();
    puts("\nexit status: 0 no row is slower or worse; 1 a file cannot be read, or no rows match;\n"
         "             2 usage, or rows that cannot be compared;\n"
         "             3 a row of B is slower or worse, or has wrong results");
}

/* Parses a percentage into a fraction: "2" or "2%" becomes 0.02. */
static enum status parse_percent(const char *name, const char *text, double minimum, double maximum,
                                 double *share)
{
    char digits[32];
    size_t length = strlen(text);
    length -= length > 0 && text[length - 1] == '%';
    snprintf(digits, sizeof digits, "%.*s", (int)(length < sizeof digits ? length : sizeof digits), text);
    TRY(parse_real(name, digits, minimum, maximum, share));
    *share /= 100;
    return STATUS_OK;
}

/* ---- Key columns: rows match if these are equal ---- */

/* The key columns that all workloads share. The other key columns are those of the workload's options. */
static const char *const common_keys[] = {"variant",          "ranks", "threads", "scaling",
                                          "ranks_per_device", "cache"};

/* Returns the index of a name in comparison->names[begin] to names[end - 1]; `end` if it is not there. */
static size_t find_name(const struct comparison *comparison, const char *name, size_t begin, size_t end)
{
    size_t i = begin;
    while (i < end && strcmp(comparison->names[i], name) != 0)
        i++;
    return i;
}

/* Moves the column `name` of --ignore from the keys to the ignored columns, at the end of comparison->names.
 * Accepts '-' for '_', so the name of the option works too. */
static enum status ignore(struct comparison *comparison, char *name)
{
    const size_t keys = comparison->key_count, end = name_count(comparison);
    for (char *c = name; (c = strchr(c, '-'));)
        *c = '_';
    size_t key = find_name(comparison, name, 0, keys);
    if (key < keys) {
        const char *ignored = comparison->names[key];
        memmove(&comparison->names[key], &comparison->names[key + 1],
                (end - 1 - key) * sizeof *comparison->names);
        comparison->names[end - 1] = ignored;
        comparison->key_count--;
        comparison->ignored_count++;
        return STATUS_OK;
    }
    if (find_name(comparison, name, keys + ORIGINS, end) < end)
        return status_set(STATUS_USAGE, "--ignore: '%.80s' is named twice", name);
    const char *nearest = nearest_word(name, comparison->names, comparison->key_count);
    return status_set(STATUS_USAGE, "--ignore: '%.80s' is not a parameter of %s%s%s%s", name,
                      comparison->workload->name, nearest ? "; did you mean '" : "", nearest ? nearest : "",
                      nearest ? "'?" : "");
}

/* Fills comparison->names. */
static enum status choose_keys(struct comparison *comparison)
{
    const struct workload *workload = comparison->workload;
    for (size_t i = 0; i < COUNT_OF(common_keys); i++)
        comparison->names[comparison->key_count++] = common_keys[i];
    for (size_t i = 0; i < workload->option_count && comparison->key_count < KEYS_MAX; i++) {
        char *name = comparison->key_names[comparison->key_count];
        if (!workload->options[i].column)
            continue;
        options_column(&workload->options[i], name, sizeof comparison->key_names[0]);
        /* The workload `load` has an option --cache, but common_keys already has this column. */
        if (find_name(comparison, name, 0, comparison->key_count) < comparison->key_count)
            continue;
        TRY(columns_default(workload, name, comparison->key_defaults[comparison->key_count],
                            sizeof comparison->key_defaults[0]));
        comparison->names[comparison->key_count++] = name;
    }
    memcpy(&comparison->names[comparison->key_count], origins, sizeof origins);
    if (!comparison->ignored)
        return STATUS_OK;
    FREED char *names = strdup(comparison->ignored);
    char *rest = names, *name;
    TRY(ALLOCATED(names, "out of memory"));
    while ((name = strsep(&rest, ",")))
        TRY(ignore(comparison, name));
    return STATUS_OK;
}

/* ---- Files ---- */

/* Checks that all rows of a file belong to one workload, which must be the same in A and B. Sets
 * comparison->workload. */
static enum status check_schema(struct comparison *comparison, const struct table *table)
{
    size_t column = table_column(table, "schema");
    if (column == TABLE_NONE)
        return status_set(STATUS_USAGE, "%s has no column 'schema'; name a file that --out wrote",
                          table->path);
    if (table->rows == 0)
        return status_set(STATUS_FAILED, "%s has no rows", table->path);
    for (size_t row = 0; row < table->rows; row++) {
        const char *schema = table_cell(table, row, column);
        const struct workload *workload = NULL;
        for (size_t i = 0; workload_table[i]; i++)
            if (strcmp(schema, workload_table[i]->schema) == 0)
                workload = workload_table[i];
        if (!workload)
            return status_set(STATUS_USAGE,
                              "%s, line %zu: rows of schema '%.40s' cannot be compared; name a file that "
                              "--out of this version wrote",
                              table->path, table->lines[row], schema);
        if (comparison->workload && workload != comparison->workload)
            return status_set(STATUS_USAGE,
                              "%s, line %zu: a row of the workload %s cannot be compared with rows of %s",
                              table->path, table->lines[row], workload->name, comparison->workload->name);
        comparison->workload = workload;
    }
    return STATUS_OK;
}

/* Returns STATUS_WRONG if any row of the file has wrong results, even a row that is not compared. */
static enum status refuse_wrong(const struct table *table)
{
    size_t column = table_column(table, "wrong"), count = 0, line = 0;
    for (size_t row = 0; row < table->rows; row++) {
        const char *wrong = table_cell(table, row, column);
        if (*wrong && strcmp(wrong, "0") != 0 && count++ == 0)
            line = table->lines[row];
    }
    return count > 0 ? status_set(STATUS_WRONG, "%s: %zu row%s with wrong results (the first: line %zu)",
                                  table->path, count, count == 1 ? "" : "s", line)
                     : STATUS_OK;
}

/* Returns STATUS_WRONG, with the reason, if a row of B is worse or has wrong results. With --strict, also
 * returns it if a row is undecided, has wrong results in A, or is in only one file. */
static enum status conclude(const struct comparison *comparison)
{
    size_t alone = comparison->verdicts[VERDICT_ONLY_A] + comparison->verdicts[VERDICT_ONLY_B];
    size_t worse = comparison->verdicts[VERDICT_WORSE], undecided = comparison->verdicts[VERDICT_UNDECIDED];
    size_t wrong = comparison->verdicts[VERDICT_WRONG];
    TRY(refuse_wrong(&comparison->tables[1]));
    if (worse > 0)
        return status_set(STATUS_WRONG, "%zu of %zu pairs %s %s by more than %g %%", worse,
                          comparison->pair_count - alone, worse == 1 ? "is" : "are",
                          verdict_name(comparison, VERDICT_WORSE), 100 * comparison->margin);
    if (comparison->strict && undecided + wrong + alone > 0)
        return status_set(STATUS_WRONG, "--strict: %zu undecided, %zu wrong in A, %zu without a partner",
                          undecided, wrong, alone);
    return STATUS_OK;
}

static enum status compare_files(struct comparison *comparison, const char *const paths[2])
{
    for (size_t side = 0; side < 2; side++) {
        TRY(table_read(paths[side], &comparison->tables[side]));
        TRY(check_schema(comparison, &comparison->tables[side]));
    }
    TRY(choose_keys(comparison));
    TRY(choose_measure(comparison));
    TRY(match(comparison));
    TRY(report(comparison));
    return conclude(comparison);
}

enum status compare_run(int argc, char *argv[])
{
    struct comparison comparison = {0};
    const char *paths[2] = {NULL};
    struct options options = {.tables = {{specs, COUNT_OF(specs), &comparison}},
                              .table_count = 1,
                              .operands_max = 2,
                              .operands = paths,
                              .help = "compare --help"};
    enum status status = options_parse(&options, argc, argv);
    options_free(&options);
    TRY(status);
    if (comparison.help) {
        print_help();
        return STATUS_OK;
    }
    if (options.operand_count < 2)
        return status_set(STATUS_USAGE,
                          "compare needs two CSV files: fdsl-bench compare A.csv B.csv; see compare --help");
    TRY(format_check(comparison.format));
    TRY(parse_percent("--margin", comparison.margin_text, 0, 1000, &comparison.margin));
    TRY(parse_percent("--confidence", comparison.confidence_text, 50, 99.99, &comparison.confidence));
    status = compare_files(&comparison, paths);
    table_free(&comparison.tables[0]);
    table_free(&comparison.tables[1]);
    free(comparison.pairs);
    return status;
}
