#include "run/columns.h"

#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/options.h"
#include "core/text.h"
#include "run/formats.h"
#include "machine/monitor.h"
#include "train/epoch_report.h"

/* ---- The columns of all workloads ---- */

static const struct column run_columns[] = {
    ORIGIN_COLUMNS("workload and version of its columns",
                   "start of the run, the same in all its rows; with epochs, the start of the epoch"),
    {"workload", VALUE_WORD, COMBINE_FIRST, "", .about = "the workload"},
    {"variant", VALUE_WORD, COMBINE_FIRST, "", .about = "the variant"},
    {"device", VALUE_WORD, COMBINE_FIRST, "", .about = "the GPU or CPU that the variant runs on"},
    {"driver", VALUE_WORD, COMBINE_FIRST, "", .about = "version of the GPU driver; only for GPU variants"},
    {"cuda", VALUE_WORD, COMBINE_FIRST, "", .about = "version of the CUDA runtime; only for GPU variants"},
    {"ranks", VALUE_INTEGER, COMBINE_FIRST, "", .about = "number of ranks"},
    {"rank", VALUE_INTEGER, COMBINE_COMPUTED, "",
     .about = "the number of the rank, from 0; the word all in the row of all ranks together"},
    {"threads", VALUE_INTEGER, COMBINE_SUM, "", .about = "CPU threads of the variant"},
    {"scaling", VALUE_WORD, COMBINE_FIRST, "", .about = "with several ranks, the value of --scaling"},
    {"ranks_per_device", VALUE_INTEGER, COMBINE_MAX, "", .about = "ranks that share the GPU"},
    {"gpu_others", VALUE_INTEGER, COMBINE_MAX, "",
     .about =
         "other processes on the GPU when the program began; empty if unknown or with --gpu-others ignore"},
};

static const struct column result_columns[] = {
    {"warmups", VALUE_INTEGER, COMBINE_COMPUTED, "", .about = "untimed runs before the samples"},
    {"samples", VALUE_INTEGER, COMBINE_COMPUTED, "", .about = "timed runs"},
    {"settled", VALUE_FLAG, COMBINE_COMPUTED, "",
     .about = "whether the error of the median fell below --max-error"},
    {"median_error", VALUE_REAL, COMBINE_COMPUTED, "",
     .about = "half the width of the median's 95 % confidence interval, relative to the median"},
    {"time_min_s", VALUE_REAL, COMBINE_COMPUTED, "s", .about = "shortest time of a run"},
    {"time_median_s", VALUE_REAL, COMBINE_COMPUTED, "s", .about = "median time of a run"},
    {"time_mean_s", VALUE_REAL, COMBINE_COMPUTED, "s", .about = "mean time of a run"},
    {"time_p95_s", VALUE_REAL, COMBINE_COMPUTED, "s", .about = "95th percentile of the time of a run"},
    {"time_p99_s", VALUE_REAL, COMBINE_COMPUTED, "s", .about = "99th percentile of the time of a run"},
    {"time_sd_s", VALUE_REAL, COMBINE_COMPUTED, "s", .about = "standard deviation of the time of a run"},
    {"wall_s", VALUE_REAL, COMBINE_COMPUTED, "s",
     .about = "median wall time of a run, even if the other columns are GPU time"},
    {"items", VALUE_REAL, COMBINE_COMPUTED, "", .about = "items that a run processes: images, samples, ..."},
    {"items_per_s", VALUE_REAL, COMBINE_COMPUTED, "items/s", .about = "items divided by the median time"},
    {"bytes_per_s", VALUE_REAL, COMBINE_COMPUTED, "bytes/s",
     .about = "bytes of the generated images or delivered samples divided by the median time"},
    {"flops", VALUE_REAL, COMBINE_COMPUTED, "FLOP",
     .about = "floating-point operations that a run needs at least"},
    {"bytes", VALUE_REAL, COMBINE_COMPUTED, "bytes", .about = "bytes that a run must move at least"},
    {"peak_flops_per_s", VALUE_REAL, COMBINE_COMPUTED, "FLOP/s",
     .about = "peak rate of the units that do these operations"},
    {"peak_bytes_per_s", VALUE_REAL, COMBINE_COMPUTED, "bytes/s",
     .about = "peak rate of the memory or bus that moves these bytes"},
    {"bound", VALUE_WORD, COMBINE_COMPUTED, "", .about = "the limit that gives the least time of a run"},
    {"roofline_share", VALUE_REAL, COMBINE_COMPUTED, "",
     .about = "least time of a run by the roofline, divided by the median time", .better = BETTER_HIGHER},
    {"time_cv", VALUE_REAL, COMBINE_COMPUTED, "", .about = "standard deviation divided by the mean time",
     .better = BETTER_LOWER},
    {"outliers", VALUE_INTEGER, COMBINE_COMPUTED, "", .about = "samples that are outliers"},
    {"throttled", VALUE_WORD, COMBINE_COMPUTED, "",
     .about = "why the GPU's clocks were throttled during the timed runs"},
    {"sm_clock_mhz", VALUE_INTEGER, COMBINE_MIN, "MHz",
     .about = "median clock of the multiprocessors during the timed runs"},
    {"memory_clock_mhz", VALUE_INTEGER, COMBINE_MIN, "MHz",
     .about = "median clock of the GPU's memory during the timed runs"},
    {"energy_j_per_item", VALUE_REAL, COMBINE_COMPUTED, "J", .about = "energy of the whole GPU per item",
     .better = BETTER_LOWER},
    {"instruction_set", VALUE_WORD, COMBINE_COMMON, "",
     .about = "instruction set of the variant's arithmetic on the CPU"},
    {"speedup", VALUE_REAL, COMBINE_COMPUTED, "",
     .about = "time per item of the baseline, divided by that of this variant", .better = BETTER_HIGHER},
    {"baseline", VALUE_WORD, COMBINE_COMPUTED, "", .about = "the variant that speedup compares with"},
    {"imbalance", VALUE_REAL, COMBINE_COMPUTED, "",
     .about = "median time of the slowest rank, divided by the mean over the ranks", .better = BETTER_LOWER},
    {"efficiency", VALUE_REAL, COMBINE_COMPUTED, "",
     .about = "parallel efficiency of all ranks relative to rank 0 alone; 1 is ideal",
     .better = BETTER_HIGHER},
};

static const struct column check_columns[] = {
    {"cache", VALUE_WORD, COMBINE_FIRST, "", .about = "state of the page cache at the start of a run"},
    {"verified", VALUE_FLAG, COMBINE_FIRST, "",
     .about = "whether --verify compared the results with the reference"},
    {"wrong", VALUE_INTEGER, COMBINE_SUM, "", .about = "wrong items; empty if they were not checked"},
};

static const struct column sample_columns[] = {
    {"sample", VALUE_INTEGER, COMBINE_FIRST, "", .about = "number of the timed run, from 0"},
    {"wall_s", VALUE_REAL, COMBINE_FIRST, "s", .about = "wall time of the run"},
    {"device_s", VALUE_REAL, COMBINE_FIRST, "s", .about = "time of the run on the GPU"},
};

/* ---- The table of a workload ---- */

#define WORKLOADS_MAX 16 /* more than the number of workloads */

static size_t count_columns(const struct column *columns)
{
    size_t count = 0;
    while (columns[count].name)
        count++;
    return count;
}

static enum status add_columns(struct column **table, size_t *count, const struct column *columns,
                               size_t added)
{
    for (size_t i = 0; i < added; i++) {
        TRY(ALLOCATED(array_grow(table, *count, sizeof **table), "out of memory for the columns"));
        (*table)[(*count)++] = columns[i];
    }
    return STATUS_OK;
}

/* Returns the unit of an option's value, which its placeholder in --help names; "" without a unit. */
static const char *unit_of(const struct option_spec *spec)
{
    static const char *const units[][2] = {
        {"KIB", "KiB"}, {"PIXELS", "pixels"}, {"EPOCHS", "epochs"}, {"PERCENT", "%"}, {"MS", "ms"}};
    if (spec->kind == OPTION_BYTES)
        return "bytes";
    for (size_t i = 0; i < COUNT_OF(units); i++)
        if ((spec->kind == OPTION_COUNT || spec->kind == OPTION_REAL) && spec->argument &&
            strcmp(spec->argument, units[i][0]) == 0)
            return units[i][1];
    return "";
}

static enum status add_option(struct column **table, size_t *count, const struct option_spec *spec)
{
    static const enum value_type types[] = {
        [OPTION_FLAG] = VALUE_SWITCH, [OPTION_COUNT] = VALUE_INTEGER, [OPTION_BYTES] = VALUE_INTEGER,
        [OPTION_REAL] = VALUE_REAL,   [OPTION_CHOICE] = VALUE_WORD,   [OPTION_TEXT] = VALUE_WORD,
        [OPTION_OUTPUT] = VALUE_WORD};
    char name[64], about[1024] = "";
    options_column(spec, name, sizeof name);
    options_describe(spec, about, sizeof about);
    if (spec->kind == OPTION_FLAG)
        text_append(about, sizeof about, " (1: given; 0: not given)");
    const struct column column = {
        .name = strdup(name),
        .type = types[spec->kind],
        .combine = strcmp(name, "batch") == 0 ? COMBINE_SUM : COMBINE_FIRST, /* each rank has its share */
        .unit = unit_of(spec),
        .about = strdup(about)};
    TRY(ALLOCATED(column.name && column.about, "out of memory for the columns"));
    return add_columns(table, count, &column, 1);
}

enum status columns_of(const struct workload *workload, const struct row_columns **columns)
{
    static struct row_columns known[WORKLOADS_MAX]; /* of workloads that were asked for */
    static const struct column end = {0};
    struct row_columns *made = known;
    while (made->workload && made->workload != workload)
        made++;
    *columns = made;
    if (made->workload)
        return STATUS_OK;
    size_t count = 0, sample_count = 0;
    TRY(add_columns(&made->row, &count, run_columns, COUNT_OF(run_columns)));
    for (size_t i = 0; i < workload->option_count; i++)
        if (workload->options[i].column == COLUMN)
            TRY(add_option(&made->row, &count, &workload->options[i]));
    made->shared = count;
    TRY(add_columns(&made->sample, &sample_count, made->row, count));
    TRY(add_columns(&made->sample, &sample_count, sample_columns, COUNT_OF(sample_columns)));
    TRY(add_columns(&made->sample, &sample_count, &end, 1));
    TRY(add_columns(&made->row, &count, result_columns, COUNT_OF(result_columns)));
    TRY(add_columns(&made->row, &count, workload->columns, count_columns(workload->columns)));
    TRY(add_columns(&made->row, &count, check_columns, COUNT_OF(check_columns)));
    TRY(add_columns(&made->row, &count, &end, 1));
    made->workload = workload;
    return STATUS_OK;
}

/* ---- Describing the columns ---- */

static const char *const type_names[] = {
    [VALUE_INTEGER] = "integer", [VALUE_REAL] = "real",   [VALUE_WORD] = "word",
    [VALUE_FLAG] = "flag",       [VALUE_SWITCH] = "flag", [VALUE_HASH] = "hash"};
static const char *const combine_names[] = {
    [COMBINE_FIRST] = "first",       [COMBINE_COMMON] = "common", [COMBINE_MIN] = "min",
    [COMBINE_MEAN] = "mean",         [COMBINE_MAX] = "max",       [COMBINE_SUM] = "sum",
    [COMBINE_COMPUTED] = "computed", [COMBINE_NONE] = "none"};

/* Returns the option whose value a column shows, or NULL. */
static const struct option_spec *option_of(const struct workload *workload, const char *column)
{
    char name[64];
    for (size_t i = 0; i < workload->option_count; i++) {
        options_column(&workload->options[i], name, sizeof name);
        if (workload->options[i].column != COLUMN_NONE && strcmp(name, column) == 0)
            return &workload->options[i];
    }
    return NULL;
}

/* The files that --out does not write, as workloads without a name and without options. */
static const struct workload other_files[] = {
    {.summary = "A row of `--log FILE` (workload `train`) describes the steps since the previous row.",
     .schema = "steps/1",
     .columns = step_columns},
    {.summary = "A row of `--monitor FILE` is a sample of one GPU, or of a process without GPUs, by one "
                "rank; no row combines\nranks. Values of processes are only in the rows of the first GPU "
                "([monitor.md](monitor.md)).",
     .schema = "monitor/2",
     .columns = monitor_columns}};

/* A workload and the defaults of its options. */
struct described {
    const struct workload *workload;
    const struct row_columns *columns;
    void *defaults; /* owned */
};

static void forget(struct described *described)
{
    free(described->defaults);
}

static enum status describe(const struct workload *workload, struct described *described)
{
    char *argv[] = {(char[]){"fdsl-bench"}, NULL};
    *described = (struct described){.workload = workload, .defaults = calloc(1, workload->parameters_bytes)};
    TRY(ALLOCATED(described->defaults, "out of memory for the options"));
    struct options options = {.tables = {{workload->options, workload->option_count, described->defaults}},
                              .table_count = 1};
    enum status status = options_parse(&options, 1, argv);
    options_free(&options);
    TRY(status);
    return columns_of(workload, &described->columns);
}

enum status columns_default(const struct workload *workload, const char *column, char *text, size_t size)
{
    CLOSED_BY(forget) struct described described;
    const struct option_spec *spec = option_of(workload, column);
    TRY(describe(workload, &described));
    *text = '\0';
    if (spec)
        options_text(spec, described.defaults, text, size);
    return STATUS_OK;
}

/* Makes a row that describes a column. */
static void column_row(const struct described *described, const struct column *column, struct row *row)
{
    const struct option_spec *spec = option_of(described->workload, column->name);
    char fallback[256] = "", choices[1024] = "";
    if (spec)
        options_text(spec, described->defaults, fallback, sizeof fallback);
    if (spec && spec->kind == OPTION_CHOICE)
        for (const char *const *choice = spec->choices; *choice; choice++)
            text_join(choices, sizeof choices, " ", "%s", *choice);
    row_text(row, "workload", described->workload->name);
    row_text(row, "schema", described->workload->schema);
    row_text(row, "column", column->name);
    row_text(row, "type", type_names[column->type]);
    row_text(row, "unit", column->unit);
    row_text(row, "ranks", combine_names[column->combine]);
    row_text(row, "option", spec ? spec->name : "");
    row_text(row, "default", fallback);
    row_flag(row, "argument", spec && spec->kind != OPTION_FLAG);
    row_text(row, "choices", choices);
    row_text(row, "about", column->about);
}

/* Returns whether columns of two workloads are described by the same item of a list. */
static bool are_alike(const struct workload *a, const struct column *of_a, const struct workload *b,
                      const struct column *of_b)
{
    char defaults[2][256];
    return strcmp(of_a->name, of_b->name) == 0 && strcmp(of_a->about, of_b->about) == 0 &&
           of_a->type == of_b->type && strcmp(of_a->unit, of_b->unit) == 0 &&
           of_a->combine == of_b->combine &&
           columns_default(a, of_a->name, defaults[0], sizeof defaults[0]) == STATUS_OK &&
           columns_default(b, of_b->name, defaults[1], sizeof defaults[1]) == STATUS_OK &&
           strcmp(defaults[0], defaults[1]) == 0;
}

/* Returns the first workload, before this one, whose rows have the same column, or NULL. */
static const struct workload *described_by(const struct workload *workload, const struct column *column)
{
    for (size_t i = 0; workload_table[i] && workload_table[i] != workload; i++) {
        const struct row_columns *columns;
        if (columns_of(workload_table[i], &columns) != STATUS_OK)
            return NULL;
        for (const struct column *other = columns->row; other->name; other++)
            if (are_alike(workload, column, workload_table[i], other))
                return workload_table[i];
    }
    return NULL;
}

/* Prints a column as an item of a list: name, type, unit, how ranks combine (unless first), and meaning. */
static enum status print_column(const struct described *described, const struct column *column)
{
    CLOSED_BY(row_free) struct row row = {0};
    column_row(described, column, &row);
    TRY(row_check(&row));
    const char *option = row_get_word(&row, "option"), *combine = row_get_word(&row, "ranks");
    const char *fallback = column->type == VALUE_SWITCH ? "" : row_get_word(&row, "default");
    printf("- `%s` (%s", column->name, row_get_word(&row, "type"));
    if (column->unit && *column->unit)
        printf(", %s", column->unit);
    if (column->combine != COMBINE_FIRST)
        printf(", %s", combine);
    printf("): ");
    if (*option) /* --help explains it */
        printf(*fallback ? "`--%s` (%s)\n" : "`--%s`\n", option, fallback);
    else
        puts(column->about);
    return STATUS_OK;
}

/* Prints columns of a workload as a list of Markdown. With `shared`, a column that an earlier workload has
 * too is only named. */
static enum status print_columns(const struct described *described, const struct column *columns,
                                 size_t count, bool shared)
{
    putchar('\n');
    for (size_t i = 0; i < count; i++)
        if (!shared || !described_by(described->workload, &columns[i]))
            TRY(print_column(described, &columns[i]));
    for (size_t w = 0; shared && workload_table[w]; w++) {
        const char *before = "";
        for (size_t i = 0; i < count; i++) {
            if (described_by(described->workload, &columns[i]) != workload_table[w])
                continue;
            if (!*before)
                printf("- as in `%s`: ", workload_table[w]->name);
            printf("%s`%s`", before, columns[i].name);
            before = ", ";
        }
        if (*before)
            putchar('\n');
    }
    return STATUS_OK;
}

/* Prints the columns of one workload in the order of its rows, or with `shared` only those that it does not
 * share with all workloads. */
static enum status print_workload(const struct workload *workload, bool shared)
{
    CLOSED_BY(forget) struct described described;
    TRY(describe(workload, &described));
    const struct row_columns *columns = described.columns;
    size_t first = COUNT_OF(run_columns);
    printf("\n## %s\n\nSchema `%s`. An item is one of the %s.\n", workload->name, workload->schema,
           workload->item);
    if (!shared)
        return print_columns(&described, columns->row, count_columns(columns->row), false);
    printf("\nOptions, after `%s`:\n", run_columns[first - 1].name);
    TRY(print_columns(&described, columns->row + first, columns->shared - first, true));
    printf("\nMeasured, after `%s`:\n", result_columns[COUNT_OF(result_columns) - 1].name);
    return print_columns(&described, workload->columns, count_columns(workload->columns), true);
}

static enum status print_page(const struct workload *only)
{
    static const struct workload none = {0};
    const struct described common = {.workload = &none};
    puts("# Columns\n");
    if (!only)
        puts("`fdsl-bench --columns` prints this page, `--workload NAME` the columns of one workload in the "
             "order of its rows, and\n`--format csv` and `--format json` the same for programs, with the "
             "texts and choices of options. There, `workload` is empty\nfor files of `--log` and "
             "`--monitor`, and `argument` tells whether an option takes a value.\n");
    puts(
        "After a column come its type, its unit, and how the row of all ranks (`rank` = `all`) combines the "
        "values of the ranks:\n`common`, the value that all share; `min`, `mean`, `max` or `sum`, for which "
        "a value of every rank is needed; `computed`, from\nthe samples and the work of all ranks "
        "([ranks.md](ranks.md#time)); `none`, empty; else the value of rank 0. The column of an option\n"
        "names the option, with its default in parentheses; `--help` explains it.\n\n"
        "An empty cell is unknown or does not apply. A `flag` is `yes` or `no`; that of an option is 1 if it "
        "is given, else 0. In\nJSON, all flags are `true` or `false`.");
    if (only)
        return print_workload(only, false);
    puts("\n## All workloads\n\nFirst:");
    TRY(print_columns(&common, run_columns, COUNT_OF(run_columns), false));
    puts("\nAfter the options of the workload:");
    TRY(print_columns(&common, result_columns, COUNT_OF(result_columns), false));
    puts("\nAfter the columns that the workload measures:");
    TRY(print_columns(&common, check_columns, COUNT_OF(check_columns), false));
    puts("\nA row of `--samples-out` has the columns up to the options, and then:");
    TRY(print_columns(&common, sample_columns, COUNT_OF(sample_columns), false));
    for (size_t i = 0; workload_table[i]; i++)
        TRY(print_workload(workload_table[i], true));
    for (size_t i = 0; i < COUNT_OF(other_files); i++) {
        const struct described file = {.workload = &other_files[i]};
        printf("\n## Schema `%s`\n\n%s\n", other_files[i].schema, other_files[i].summary);
        TRY(print_columns(&file, other_files[i].columns, count_columns(other_files[i].columns), false));
    }
    return STATUS_OK;
}

/* Adds rows that describe columns to the output. */
static void add_rows(const struct described *described, const struct column *columns,
                     struct row_printer *printer)
{
    for (; columns->name; columns++) {
        CLOSED_BY(row_free) struct row row = {0};
        column_row(described, columns, &row);
        rows_add(printer, &row);
    }
}

enum status columns_print(const struct workload *only, int format)
{
    struct row_printer printer;
    enum status status = STATUS_OK;
    if (format == FORMAT_TABLE)
        return print_page(only);
    TRY(format_check(format));
    rows_begin(&printer, format);
    for (size_t i = 0; status == STATUS_OK && workload_table[i]; i++) {
        CLOSED_BY(forget) struct described described = {0};
        if (only && only != workload_table[i])
            continue;
        status = describe(workload_table[i], &described);
        if (status == STATUS_OK)
            add_rows(&described, described.columns->row, &printer);
    }
    for (size_t i = 0; status == STATUS_OK && !only && i < COUNT_OF(other_files); i++)
        add_rows(&(struct described){.workload = &other_files[i]}, other_files[i].columns, &printer);
    enum status printed = rows_end(&printer, NULL, NULL);
    return status == STATUS_OK ? printed : status;
}
