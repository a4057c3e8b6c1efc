/* Prints a comparison as a table, CSV or JSON. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    {MARK_UNSETTLED, '*', "unsettled",
     "not settled: the median is less certain than --max-error of that run"},
    {MARK_THROTTLED, 't', "throttled", "throttled: the GPU reduced its clocks"},
    {MARK_UNVERIFIED, 'v', "unverified", "not verified: that run had no --verify"},
    {MARK_WRONG, 'w', "wrong", "wrong results: not judged"},
};

const char *compare_verdict(const struct comparison *comparison, enum verdict verdict)
{
    static const char *const names[VERDICTS] = {"better",    "worse",     "same",
                                                "undecided", "only in A", "only in B"};
    if (comparison->measure.is_speed && verdict == VERDICT_BETTER)
        return "faster";
    if (comparison->measure.is_speed && verdict == VERDICT_WORSE)
        return "slower";
    return names[verdict];
}

/* ---- Where rows come from ---- */

#define VALUES_SHOWN 3

/* Lists the different values of a column over all rows of a file: "a, b, c and more". */
static void list_values(const struct table *table, const char *name, char *text, size_t size)
{
    const char *values[VALUES_SHOWN + 1];
    size_t count = 0, used = 0, column = table_column(table, name);
    for (size_t row = 0; row < table->rows && count <= VALUES_SHOWN; row++) {
        const char *cell = table_cell(table, row, column);
        bool known = !*cell;
        for (size_t i = 0; i < count && !known; i++)
            known = strcmp(values[i], cell) == 0;
        if (!known)
            values[count++] = cell;
    }
    text[0] = '\0';
    for (size_t i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s",
                                 i == 0              ? ""
                                 : i == VALUES_SHOWN ? " and "
                                                     : ", ",
                                 i == VALUES_SHOWN ? "more" : values[i]);
}

static void print_text(const char *label, const char *text)
{
    printf("%s", label);
    text_print(stdout, text);
}

/* Prints one line per origin: its value, or those of A and B if they differ. */
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

/* ---- The table ---- */

/* Writes the variant and the parameters in which the rows differ. Returns the length. */
static size_t label_of(const struct comparison *comparison, const struct pair *pair, char *label, size_t size)
{
    char raw[4096];
    size_t used = 0;
    raw[0] = '\0';
    for (size_t i = 0; i < comparison->key_count && used < sizeof raw; i++) {
        bool variant = strcmp(comparison->keys[i], "variant") == 0;
        const char *value = compare_key(comparison, pair, i);
        if (variant || comparison->varies[i])
            used += (size_t)snprintf(raw + used, sizeof raw - used, "%s%s%s%s", used ? " " : "",
                                     variant ? "" : comparison->keys[i], variant ? "" : "=",
                                     *value ? value : "-");
    }
    return strlen(text_printable(used ? raw : "all", label, size));
}

/* Prints the parameters that all rows share. */
static void print_parameters(const struct comparison *comparison)
{
    printf("  %-9s", "rows with");
    for (size_t i = 0; i < comparison->key_count; i++) {
        const char *value = compare_key(comparison, &comparison->pairs[0], i);
        if (!comparison->varies[i] && *value) {
            printf(" %s ", comparison->keys[i]);
            text_print(stdout, value);
        }
    }
    putchar('\n');
}

static void print_caption(const struct comparison *comparison, int width)
{
    printf("%s: %s of B / A, margin %g %%, %g %% intervals\n", comparison->workload->name,
           comparison->measure.name, 100 * comparison->margin, 100 * comparison->confidence);
    for (size_t side = 0; side < 2; side++) {
        print_text(side ? "  B        " : "  A        ", comparison->tables[side].path);
        printf(" (%zu row%s)\n", comparison->used[side], comparison->used[side] == 1 ? "" : "s");
    }
    print_origins(comparison);
    print_parameters(comparison);
    printf("\n%-*s %12s    %12s    %7s %8s %18s  verdict\n", width, "row", "A", "B", "rows", "B/A",
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

static void print_line(const struct comparison *comparison, const struct pair *pair, int width, bool coloured)
{
    char label[4096], rows[48], ratio[32] = "-", interval[48] = "-";
    label_of(comparison, pair, label, sizeof label);
    snprintf(rows, sizeof rows, "%zu/%zu", pair->sides[0].count, pair->sides[1].count);
    if (!isnan(pair->ratio.value))
        snprintf(ratio, sizeof ratio, "%.4f", pair->ratio.value);
    if (!isnan(pair->ratio.low))
        snprintf(interval, sizeof interval, "%.4f .. %.4f", pair->ratio.low, pair->ratio.high);
    const char *colour = !coloured                         ? ""
                         : pair->verdict == VERDICT_WORSE  ? "\033[31m"
                         : pair->verdict == VERDICT_BETTER ? "\033[32m"
                                                           : "";
    printf("%-*s", width, label);
    print_side(comparison, pair, 0);
    print_side(comparison, pair, 1);
    printf(" %7s %8s %18s  %s%s%s\n", rows, ratio, interval, colour,
           compare_verdict(comparison, pair->verdict), *colour ? "\033[0m" : "");
}

/* Prints the number of rows per verdict, the mean ratio, and the meaning of the marks used. */
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
    printf("; geometric mean of B/A: %.4f\n", comparison->mean_ratio);
    if (comparison->verdicts[VERDICT_UNDECIDED])
        puts("undecided: the interval crosses the margin, or is unknown; measure longer or more often");
    bool single = false;
    for (size_t p = 0; p < comparison->pair_count; p++) {
        const struct pair *pair = &comparison->pairs[p];
        used |= pair->marks[0] | pair->marks[1];
        single |= pair->sides[0].count == 1 && pair->sides[1].count == 1;
    }
    if (single)
        puts("rows 1/1: one run does not show how much runs differ; measure A and B three times or more");
    for (size_t i = 0; i < COUNT_OF(marks); i++)
        if (used & marks[i].mark)
            printf("%c %s\n", marks[i].letter, marks[i].meaning);
}

static void print_table(const struct comparison *comparison)
{
    char label[4096];
    size_t width = LABEL_MIN;
    bool coloured = status_coloured(STDOUT_FILENO);
    for (size_t p = 0; p < comparison->pair_count; p++) {
        size_t length = label_of(comparison, &comparison->pairs[p], label, sizeof label);
        width = length > width ? length : width;
    }
    print_caption(comparison, (int)width);
    for (size_t p = 0; p < comparison->pair_count; p++)
        print_line(comparison, &comparison->pairs[p], (int)width, coloured);
    print_summary(comparison);
}

/* ---- CSV and JSON ---- */

static void row_marks(struct row *row, const char *column, unsigned bits)
{
    char text[CELL_MAX] = "";
    size_t used = 0;
    for (size_t i = 0; i < COUNT_OF(marks); i++)
        if (bits & marks[i].mark)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", used ? " " : "", marks[i].name);
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
    row_count(row, "rows_a", a->count);
    row_count(row, "rows_b", b->count);
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
    struct row summary = {0};
    enum status status = summary_row(comparison, &summary);
    rows_begin(&printer, comparison->format);
    for (size_t p = 0; p < comparison->pair_count && status == STATUS_OK; p++) {
        struct row row = {0};
        status = pair_row(comparison, &comparison->pairs[p], &row);
        if (status == STATUS_OK)
            rows_add(&printer, &row);
        row_free(&row);
    }
    enum status printed = rows_end(&printer, "comparison", &summary);
    row_free(&summary);
    return status == STATUS_OK ? printed : status;
}

enum status compare_report(const struct comparison *comparison)
{
    size_t alone[2] = {comparison->verdicts[VERDICT_ONLY_A], comparison->verdicts[VERDICT_ONLY_B]};
    if (alone[0] + alone[1] > 0)
        status_warn(
            "%zu of the rows in %s and %zu in %s have no partner with the same parameters; --ignore A,B,... "
            "matches rows that differ in the parameters A, B, ...",
            alone[0], comparison->tables[0].path, alone[1], comparison->tables[1].path);
    if (comparison->format == FORMAT_TABLE)
        print_table(comparison);
    else
        TRY(print_rows(comparison));
    return format_flush();
}
