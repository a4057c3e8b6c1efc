#include "run/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "run/compare_parts.h"
#include "run/formats.h"

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
    compare_print_measures();
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

static bool is_key(const struct comparison *comparison, const char *name)
{
    for (size_t i = 0; i < comparison->key_count; i++)
        if (strcmp(comparison->keys[i], name) == 0)
            return true;
    return false;
}

static void list_keys(struct comparison *comparison)
{
    const struct workload *workload = comparison->workload;
    for (size_t i = 0; i < COUNT_OF(common_keys); i++)
        comparison->keys[comparison->key_count++] = common_keys[i];
    for (size_t i = 0; i < workload->option_count && comparison->key_count < COMPARE_KEYS_MAX; i++) {
        char *name = comparison->key_names[comparison->key_count];
        if (!workload->options[i].column)
            continue;
        options_column(&workload->options[i], name, sizeof comparison->key_names[0]);
        /* The workload `load` has an option --cache, but common_keys already has this column. */
        if (!is_key(comparison, name))
            comparison->keys[comparison->key_count++] = name;
    }
}

/* Moves the column `name` of --ignore from the keys to the ignored columns, which follow the keys in
 * comparison->keys. Accepts '-' for '_', so the name of the option works too. */
static enum status ignore(struct comparison *comparison, char *name)
{
    for (char *c = name; (c = strchr(c, '-'));)
        *c = '_';
    for (size_t i = 0; i < comparison->key_count; i++)
        if (strcmp(comparison->keys[i], name) == 0) {
            const char *ignored = comparison->keys[i];
            size_t last = comparison->key_count + comparison->ignored_count - 1;
            memmove(&comparison->keys[i], &comparison->keys[i + 1], (last - i) * sizeof *comparison->keys);
            comparison->keys[last] = ignored;
            comparison->key_count--;
            comparison->ignored_count++;
            return STATUS_OK;
        }
    for (size_t i = 0; i < comparison->ignored_count; i++)
        if (strcmp(comparison->keys[comparison->key_count + i], name) == 0)
            return status_set(STATUS_USAGE, "--ignore: '%.80s' is named twice", name);
    const char *nearest = nearest_word(name, comparison->keys, comparison->key_count);
    return status_set(STATUS_USAGE, "--ignore: '%.80s' is not a parameter of %s%s%s%s", name,
                      comparison->workload->name, nearest ? "; did you mean '" : "", nearest ? nearest : "",
                      nearest ? "'?" : "");
}

static enum status choose_keys(struct comparison *comparison)
{
    list_keys(comparison);
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

/* Returns the workload whose current schema is `schema`, or NULL. */
static const struct workload *workload_of(const char *schema)
{
    for (size_t i = 0; workload_table[i]; i++)
        if (strcmp(schema, workload_table[i]->schema) == 0)
            return workload_table[i];
    return NULL;
}

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
        const struct workload *workload = workload_of(schema);
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

static enum status compare_files(struct comparison *comparison, const char *const paths[2])
{
    for (size_t side = 0; side < 2; side++) {
        TRY(table_read(paths[side], &comparison->tables[side]));
        TRY(check_schema(comparison, &comparison->tables[side]));
    }
    TRY(choose_keys(comparison));
    TRY(compare_choose_measure(comparison));
    TRY(compare_match(comparison));
    return compare_report(comparison);
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
                          compare_verdict(comparison, VERDICT_WORSE), 100 * comparison->margin);
    if (comparison->strict && undecided + wrong + alone > 0)
        return status_set(STATUS_WRONG, "--strict: %zu undecided, %zu wrong in A, %zu without a partner",
                          undecided, wrong, alone);
    return STATUS_OK;
}

static void free_comparison(struct comparison *comparison)
{
    table_free(&comparison->tables[0]);
    table_free(&comparison->tables[1]);
    free(comparison->pairs);
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
    if (status == STATUS_OK)
        status = conclude(&comparison);
    free_comparison(&comparison);
    return status;
}
