/* Prints a comparison as a table, CSV or JSON. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/array.h"
#include "core/text.h"
#include "run/compare_parts.h"
#include "run/formats.h"

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

const char *compare_verdict(const struct comparison *comparison, enum verdict verdict)
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

/* Prints one line per column of compare_origins: its values, or those of A and B if they differ. */
static void print_origins(const struct comparison *comparison)
{
    for (size_t i = 0; i < COMPARE_ORIGINS; i++) {
        char values[2][CELL_MAX];
        for (size_t side = 0; side < 2; side++)
            list_values(&comparison->tables[side], compare_origins[i], values[side], sizeof values[side]);
        bool same = strcmp(values[0], values[1]) == 0;
        if (same && !*values[0])
            continue;
        printf("  %-9s", compare_origins[i]);
        print_text(same ? "" : "A: ", *values[0] ? values[0] : "-");
        if (!same)
            print_text("   B: ", *values[1] ? values[1] : "-");
        putchar('\n');
    }
}

/* ---- Labels of rows ---- */

/* Decides which parameters the labels of the table's rows show, so that no two labels are equal. */
struct labels {
    bool varies[COMPARE_KEYS_MAX];      /* whether the rows differ in this column */
    const char *most[COMPARE_KEYS_MAX]; /* the value of more than half of the rows; NULL if there is none */
    bool empty; /* also show empty values, because some labels would otherwise be equal */
};

/* Returns the value of a column for a label. An out_res that equals res becomes "". */
static const char *label_value(const struct comparison *comparison, const struct pair *pair, size_t key)
{
    const char *value = compare_key(comparison, pair, key);
    if (strcmp(comparison->keys[key], "out_res") == 0)
        for (size_t i = 0; i < comparison->key_count; i++)
            if (strcmp(comparison->keys[i], "res") == 0 &&
                strcmp(compare_key(comparison, pair, i), value) == 0)
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
        bool variant = strcmp(comparison->keys[i], "variant") == 0;
        const char *value = label_value(comparison, pair, i), *most = labels->most[i];
        const char *shown = compare_key(comparison, pair, i);
        differs |= labels->varies[i];
        bool special = labels->varies[i] && !(most && strcmp(value, most) == 0) &&
                       (*value || (*shown && most) || labels->empty);
        if (variant || special)
            text_join(raw, sizeof raw, " ", "%s%s%s", variant ? "" : comparison->keys[i], variant ? "" : "=",
                      *shown ? shown : "-");
    }
    return strlen(text_printable(*raw ? raw : differs ? "as most" : "all", label, size));
}

static int by_hash(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return (a > b) - (a < b);
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
    qsort(hashes, comparison->pair_count, sizeof *hashes, by_hash);
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
        bool variant = strcmp(comparison->keys[i], "variant") == 0;
        if (labels->varies[i] == all || !value || !*value || (!all && variant))
            continue;
        if (!any)
            printf("  %-9s", all ? "rows with" : "most with");
        any = true;
        printf(" %s ", comparison->keys[i]);
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
    printf(" %7s %8s %18s  %s%s%s\n", runs, ratio, interval, colour,
           compare_verdict(comparison, pair->verdict), *colour ? "\033[0m" : "");
}

/* Prints why pairs are undecided. Skips mixed pairs, because the legend of their mark explains them. */
static void explain_undecided(const struct comparison *comparison)
{
    bool wide = false, unknown = false;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        const struct pair *pair = &comparison->pairs[p];
        if (pair->verdict != VERDICT_UNDECIDED || (pair->marks[0] | pair->marks[1]) & MARK_MIXED)
            continue;
        wide |= !isnan(pair->ratio.low);
        unknown |= isnan(pair->ratio.low);
    }
    if (wide)
        puts("undecided: the interval crosses the margin; measure longer or more often");
    if (unknown && comparison->measure.is_median)
        puts("undecided without an interval: a run has no median_error (too few samples or epochs); repeat "
             "the runs");
    else if (unknown)
        puts("undecided without an interval: a single run gives no error for this measure; repeat the runs");
}

/* Prints the number of pairs per verdict, the mean ratio, and the meaning of the marks used. */
static void print_summary(const struct comparison *comparison)
{
    unsigned used = 0;
    const char *separator = "\n";
    for (size_t i = 0; i < VERDICTS; i++)
        if (comparison->verdicts[i]) {
            printf("%s%zu %s", separator, comparison->verdicts[i],
                   compare_verdict(comparison, (enum verdict)i));
            separator = ", ";
        }
    if (!isnan(comparison->mean_ratio))
        printf("; geometric mean of B/A: %.4f", comparison->mean_ratio);
    putchar('\n');
    explain_undecided(comparison);
    bool single = false, lone = false;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        const struct pair *pair = &comparison->pairs[p];
        used |= pair->marks[0] | pair->marks[1];
        if (isnan(pair->ratio.value))
            continue;
        bool one[2] = {pair->sides[0].count == 1, pair->sides[1].count == 1};
        single |= one[0] && one[1];
        lone |= one[0] != one[1];
    }
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

static enum status pair_row(const struct comparison *comparison, const struct pair *pair, struct row *row)
{
    const struct side *a = &pair->sides[0], *b = &pair->sides[1];
    row_text(row, "schema", "compare/1");
    row_text(row, "workload", comparison->workload->name);
    for (size_t i = 0; i < comparison->key_count; i++)
        row_number(row, comparison->keys[i], compare_key(comparison, pair, i));
    row_text(row, "measure", comparison->measure.name);
    row_count(row, "runs_a", a->count);
    row_count(row, "runs_b", b->count);
    row_real(row, "a", a->count ? exp(a->log_mean) : NAN);
    row_real(row, "b", b->count ? exp(b->log_mean) : NAN);
    row_real(row, "ratio", pair->ratio.value);
    row_real(row, "ratio_low", pair->ratio.low);
    row_real(row, "ratio_high", pair->ratio.high);
    row_text(row, "verdict", compare_verdict(comparison, pair->verdict));
    row_marks(row, "marks_a", pair->marks[0]);
    row_marks(row, "marks_b", pair->marks[1]);
    return row_check(row);
}

/* Describes the whole comparison, for JSON. */
static enum status summary_row(const struct comparison *comparison, struct row *row)
{
    row_text(row, "a", comparison->tables[0].path);
    row_text(row, "b", comparison->tables[1].path);
    row_text(row, "workload", comparison->workload->name);
    row_text(row, "measure", comparison->measure.name);
    row_real(row, "margin", comparison->margin);
    row_real(row, "confidence", comparison->confidence);
    for (size_t i = 0; i < VERDICTS; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s", compare_verdict(comparison, (enum verdict)i));
        for (char *c = name; (c = strchr(c, ' '));)
            *c = '_';
        row_count(row, name, comparison->verdicts[i]);
    }
    row_real(row, "mean_ratio", comparison->mean_ratio);
    for (size_t i = 0; i < COMPARE_ORIGINS; i++)
        for (size_t side = 0; side < 2; side++) {
            char name[64], values[CELL_MAX];
            snprintf(name, sizeof name, "%s_%c", compare_origins[i], "ab"[side]);
            list_values(&comparison->tables[side], compare_origins[i], values, sizeof values);
            row_text(row, name, values);
        }
    return row_check(row);
}

static enum status print_rows(const struct comparison *comparison)
{
    struct row_printer printer;
    CLOSED_BY(row_free) struct row summary = {0};
    enum status status = summary_row(comparison, &summary);
    rows_begin(&printer, comparison->format);
    for (size_t p = 0; p < comparison->pair_count && status == STATUS_OK; p++) {
        CLOSED_BY(row_free) struct row row = {0};
        status = pair_row(comparison, &comparison->pairs[p], &row);
        if (status == STATUS_OK)
            rows_add(&printer, &row);
    }
    enum status printed = rows_end(&printer, "comparison", &summary);
    return status == STATUS_OK ? printed : status;
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

enum status compare_report(const struct comparison *comparison)
{
    warn_alone(comparison);
    if (comparison->format == FORMAT_TABLE)
        TRY(print_table(comparison));
    else
        TRY(print_rows(comparison));
    return format_flush();
}
