/* Matches the rows of two files by their parameters. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/text.h"
#include "run/compare_parts.h"

const char *const compare_origins[COMPARE_ORIGINS] = {"host", "device", "driver", "cuda", "revision"};

/* ---- Measures ---- */

const struct direction compare_directions[] = {
    {"roofline_share", true, false},
    {"speedup", true, false},
    {"efficiency", true, false},
    {"busy_share", true, false},
    {"train_acc", true, true},
    {"test_acc", true, true},
    {"imbalance", false, false},
    {"stall_share", false, false},
    {"slowdown", false, false},
    {"bus_slowdown", false, false},
    {"loss", false, false},
    {"train_loss", false, true},
    {"test_loss", false, true},
    {"memory_bytes", false, false},
    {"storage_read_bytes", false, false},
    {"time_cv", false, false},
    {"energy_j_per_item", false, false},
    {"trained_s", false, true},
    {"to_98_s", false, true},
    {"to_99_s", false, true},
    {NULL, false, false},
};

void compare_print_measures(void)
{
    size_t count = 0;
    printf("\nmeasures: time_per_item, columns that end with _s or _per_s, and");
    for (const struct direction *known = compare_directions; known->column; known++)
        if (!text_ends_in(known->column, "_s")) {
            printf("%s%s", count == 0 ? "\n  " : count % 5 == 0 ? ",\n  " : ", ", known->column);
            count++;
        }
    putchar('\n');
}

/* Fills `measure`. Returns false if it is unknown whether lower or higher values of the column are better. */
static bool find_measure(const char *column, struct measure_choice *measure)
{
    bool rate = text_ends_in(column, "_per_s"), time = !rate && text_ends_in(column, "_s");
    *measure = (struct measure_choice){.column = column, .name = column, .higher_is_better = rate};
    measure->is_time = time;
    measure->is_speed = rate || time;
    measure->is_median = strcmp(column, "time_median_s") == 0 || strcmp(column, "items_per_s") == 0 ||
                         strcmp(column, "bytes_per_s") == 0;
    for (const struct direction *known = compare_directions; known->column; known++)
        if (strcmp(column, known->column) == 0) {
            measure->higher_is_better = known->higher_is_better;
            measure->is_final = known->is_final;
            return true;
        }
    return measure->is_speed;
}

enum status compare_choose_measure(struct comparison *comparison)
{
    const char *name = comparison->measure_name;
    const struct table *table = &comparison->tables[0];
    struct measure_choice other;
    comparison->measure = (struct measure_choice){
        .name = "time_per_item", .is_time = true, .is_speed = true, .is_median = true};
    if (strcmp(name, comparison->measure.name) == 0)
        return STATUS_OK;
    if (table_column(table, name) != TABLE_NONE && find_measure(name, &comparison->measure))
        return STATUS_OK;
    if (table_column(table, name) != TABLE_NONE)
        return status_set(
            STATUS_USAGE,
            "--measure %s: it is not known whether lower or higher values of this column are better; "
            "compare --help lists the measures",
            name);

    FREED const char **names = calloc(table->columns + 1, sizeof *names);
    size_t count = 0;
    TRY(ALLOCATED(names, "out of memory"));
    names[count++] = "time_per_item";
    for (size_t i = 0; i < table->columns; i++)
        if (find_measure(table->cells[i], &other))
            names[count++] = table->cells[i];
    const char *nearest = nearest_word(name, names, count);
    return status_set(STATUS_USAGE, "--measure: %s has no column '%s'%s%s%s", table->path, name,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

/* ---- Columns ---- */

static enum status find_columns(struct comparison *comparison, size_t side)
{
    const struct table *table = &comparison->tables[side];
    struct columns *columns = &comparison->columns[side];
    const struct measure_choice *measure = &comparison->measure;
    const struct {
        const char *name;
        size_t *column;
        bool optional;
    } wanted[] = {{"ranks", &columns->ranks, false},
                  {"rank", &columns->rank, false},
                  {measure->column ? measure->column : "time_median_s", &columns->value, false},
                  {"items", &columns->items, false},
                  {"median_error", &columns->error, false},
                  {"settled", &columns->settled, true},
                  {"throttled", &columns->throttled, true},
                  {"verified", &columns->verified, true},
                  {"wrong", &columns->wrong, true},
                  {"job_id", &columns->job, true},
                  {"epoch", &columns->epoch, true},
                  {"epochs", &columns->epochs, true}};
    const char *missing = NULL;
    for (size_t i = 0; i < COUNT_OF(wanted); i++) {
        *wanted[i].column = table_column(table, wanted[i].name);
        if (*wanted[i].column == TABLE_NONE && !wanted[i].optional && !missing)
            missing = wanted[i].name;
    }
    for (size_t i = 0; i < comparison->key_count + comparison->ignored_count; i++) {
        columns->keys[i] = table_column(table, comparison->keys[i]);
        if (i < comparison->key_count && columns->keys[i] == TABLE_NONE && !missing)
            missing = comparison->keys[i];
    }
    for (size_t i = 0; i < COMPARE_ORIGINS; i++)
        columns->origins[i] = table_column(table, compare_origins[i]);
    return missing ? status_set(STATUS_USAGE, "%s has no column '%s'; name a file that --out wrote",
                                table->path, missing)
                   : STATUS_OK;
}

const char *compare_key(const struct comparison *comparison, const struct pair *pair, size_t key)
{
    size_t side = pair->first[0] == TABLE_NONE;
    return table_cell(&comparison->tables[side], pair->first[side], comparison->columns[side].keys[key]);
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

/* Returns the number in a cell; NaN if the cell is empty or not a finite number. */
static double number_of(const char *cell)
{
    char *end;
    double number = strtod(cell, &end);
    return *cell && *end == '\0' && isfinite(number) ? number : NAN;
}

static void take_value(const struct comparison *comparison, struct entry *entry)
{
    const struct table *table = &comparison->tables[entry->side];
    const struct columns *columns = &comparison->columns[entry->side];
    double value = number_of(table_cell(table, entry->row, columns->value));
    if (!comparison->measure.column)
        value /= number_of(table_cell(table, entry->row, columns->items));
    entry->value = isfinite(value) && value > 0 ? value : NAN;
    entry->error =
        comparison->measure.is_median ? number_of(table_cell(table, entry->row, columns->error)) : NAN;
    entry->epoch = number_of(table_cell(table, entry->row, columns->epoch));
}

static uint64_t hash_of(const struct comparison *comparison, const struct entry *entry)
{
    uint64_t hash = FNV_BEGIN;
    for (size_t i = 0; i < comparison->key_count; i++) {
        const char *cell = table_cell(&comparison->tables[entry->side], entry->row,
                                      comparison->columns[entry->side].keys[i]);
        hash = fnv_add(hash, cell, strlen(cell) + 1);
    }
    return hash;
}

/* Returns whether a row covers all ranks of its run: the row of the only rank, or the row with rank=all. */
static bool is_whole(const struct table *table, const struct columns *columns, size_t row)
{
    return strcmp(table_cell(table, row, columns->rank), "all") == 0 ||
           strcmp(table_cell(table, row, columns->ranks), "1") == 0;
}

/* Adds to `entries` those rows of one file that cover all ranks. */
static void add_rows(struct comparison *comparison, size_t side, struct entry *entries, size_t *count)
{
    const struct table *table = &comparison->tables[side];
    for (size_t row = 0; row < table->rows; row++) {
        struct entry entry = {.side = side, .row = row};
        if (!is_whole(table, &comparison->columns[side], row))
            continue;
        take_value(comparison, &entry);
        entry.hash = hash_of(comparison, &entry);
        entries[(*count)++] = entry;
    }
}

static const struct comparison *sorted_for; /* for the comparators, because qsort() passes no context */

static int by_key(const struct entry *a, const struct entry *b)
{
    if (a->hash != b->hash)
        return a->hash < b->hash ? -1 : 1;
    for (size_t i = 0; i < sorted_for->key_count; i++) {
        int order =
            strcmp(table_cell(&sorted_for->tables[a->side], a->row, sorted_for->columns[a->side].keys[i]),
                   table_cell(&sorted_for->tables[b->side], b->row, sorted_for->columns[b->side].keys[i]));
        if (order != 0)
            return order;
    }
    return 0;
}

/* Orders two rows of the same file by the columns that identify the process that wrote a row: the job, the
 * columns of compare_origins, and the parameters of --ignore. */
static int by_process(const struct entry *a, const struct entry *b)
{
    const struct columns *columns = &sorted_for->columns[a->side];
    const struct table *table = &sorted_for->tables[a->side];
    int order = strcmp(table_cell(table, a->row, columns->job), table_cell(table, b->row, columns->job));
    for (size_t i = 0; i < COMPARE_ORIGINS && order == 0; i++)
        order = strcmp(table_cell(table, a->row, columns->origins[i]),
                       table_cell(table, b->row, columns->origins[i]));
    for (size_t i = 0; i < sorted_for->ignored_count && order == 0; i++) {
        size_t key = columns->keys[sorted_for->key_count + i];
        order = strcmp(table_cell(table, a->row, key), table_cell(table, b->row, key));
    }
    return order;
}

static int by_key_and_process(const struct entry *a, const struct entry *b)
{
    int order = by_key(a, b);
    if (order == 0 && a->side != b->side)
        order = a->side < b->side ? -1 : 1;
    return order != 0 ? order : by_process(a, b);
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
    const struct table *table = &comparison->tables[entry->side];
    const struct columns *columns = &comparison->columns[entry->side];
    const char *wrong = table_cell(table, entry->row, columns->wrong);
    unsigned marks = 0;
    if (strcmp(table_cell(table, entry->row, columns->settled), "no") == 0)
        marks |= MARK_UNSETTLED;
    if (*table_cell(table, entry->row, columns->throttled))
        marks |= MARK_THROTTLED;
    if (!*wrong && strcmp(table_cell(table, entry->row, columns->verified), "yes") != 0)
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

/* Records which columns of compare_origins differ between the row of `entry` and row number `first`, which
 * belongs to the same pair. */
static void note_origins(struct comparison *comparison, const struct entry *entry, size_t first)
{
    const struct table *table = &comparison->tables[entry->side];
    for (size_t i = 0; i < COMPARE_ORIGINS; i++) {
        size_t column = comparison->columns[entry->side].origins[i];
        comparison->mixed[entry->side][i] |=
            strcmp(table_cell(table, entry->row, column), table_cell(table, first, column)) != 0;
    }
}

/* Records which columns of --ignore differ between the row of `entry` and row number `first`, which belongs
 * to the same pair. Returns MARK_MIXED if any column differs, else 0. */
static unsigned note_ignored(struct comparison *comparison, const struct entry *entry, size_t first)
{
    const struct table *table = &comparison->tables[entry->side];
    unsigned marks = 0;
    for (size_t i = comparison->key_count; i < comparison->key_count + comparison->ignored_count; i++) {
        size_t column = comparison->columns[entry->side].keys[i];
        if (strcmp(table_cell(table, entry->row, column), table_cell(table, first, column)) != 0) {
            comparison->mixed_ignored[entry->side][i] = true;
            marks = MARK_MIXED;
        }
    }
    return marks;
}

/* Warns if pooled rows differ in a column of compare_origins or in an ignored parameter. The usual cause is
 * that runs of another machine or revision were appended to the file, or that the file contains a sweep over
 * the parameter. */
static void warn_mixed(const struct comparison *comparison, size_t side)
{
    const char *names[COMPARE_KEYS_MAX];
    char list[256];
    size_t count = 0;
    for (size_t i = 0; i < COMPARE_ORIGINS; i++)
        if (comparison->mixed[side][i])
            names[count++] = compare_origins[i];
    list_words(list, sizeof list, names, count);
    if (count > 0)
        status_warn("%s: rows that differ in %s are pooled as repeated runs; to avoid this, write them to "
                    "separate files",
                    comparison->tables[side].path, list);
    count = 0;
    for (size_t i = comparison->key_count; i < comparison->key_count + comparison->ignored_count; i++)
        if (comparison->mixed_ignored[side][i])
            names[count++] = comparison->keys[i];
    list_words(list, sizeof list, names, count);
    if (count > 0)
        status_warn("%s: rows that differ in %s, which --ignore names, are pooled and not judged; write them "
                    "to separate files, or do not ignore these parameters",
                    comparison->tables[side].path, list);
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

/* Returns whether a run is complete: it has no epochs, or its last row is the row of its last epoch. */
static bool is_finished(const struct comparison *comparison, const struct entry *last)
{
    const struct table *table = &comparison->tables[last->side];
    return isnan(last->epoch) ||
           last->epoch >= number_of(table_cell(table, last->row, comparison->columns[last->side].epochs));
}

/* Moves the entries of a run that have a value to the front, and counts the others. For a measure that
 * describes a whole training run, only the entry of the last epoch counts. Returns the number of entries with
 * a value. */
static size_t keep_valued(struct comparison *comparison, struct entry *run, size_t count)
{
    size_t kept = 0, side = run->side;
    if (comparison->measure.is_final && !is_finished(comparison, &run[count - 1])) {
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
        note_origins(comparison, &run[i], first);
        pair->marks[side] |= marks_of(comparison, &run[i]) | note_ignored(comparison, &run[i], first);
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
    const char *differing[COMPARE_KEYS_MAX] = {NULL};
    size_t fewest = SIZE_MAX;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        const char *names[COMPARE_KEYS_MAX];
        size_t count = 0;
        for (size_t k = 0; k < comparison->key_count; k++)
            if (strcmp(compare_key(comparison, &comparison->pairs[p], k),
                       compare_key(comparison, &comparison->pairs[0], k)) != 0)
                names[count++] = comparison->keys[k];
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

/* Builds the pairs from the rows of both files. */
static enum status make_pairs(struct comparison *comparison, struct entry *entries, double *values)
{
    size_t count = 0;
    add_rows(comparison, 0, entries, &count);
    add_rows(comparison, 1, entries, &count);
    sorted_for = comparison;
    qsort(entries, count, sizeof *entries, by_key_process_and_row);
    number_runs(entries, count);
    TRY(collect(comparison, entries, count, values));
    qsort(comparison->pairs, comparison->pair_count, sizeof *comparison->pairs, by_first_row);
    return STATUS_OK;
}

enum status compare_match(struct comparison *comparison)
{
    size_t capacity = comparison->tables[0].rows + comparison->tables[1].rows;
    TRY(find_columns(comparison, 0));
    TRY(find_columns(comparison, 1));
    struct entry *entries = calloc(capacity + 1, sizeof *entries);
    double *values = calloc(capacity + 1, sizeof *values);
    comparison->pairs = calloc(capacity + 1, sizeof *comparison->pairs);
    enum status status = entries && values && comparison->pairs
                             ? make_pairs(comparison, entries, values)
                             : status_set(STATUS_EXHAUSTED, "out of memory for %zu rows", capacity);
    free(entries);
    free(values);
    TRY(status);
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
