/* Rows of results: their columns, the values of a variant on one rank, and the row of all ranks together. */
#include "run/rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/options.h"
#include "core/text.h"
#include "machine/comm.h"
#include "machine/monitor.h"
#include "machine/nvml.h"
#include "run/report.h"
#include "train/trainer.h"

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

/* ---- The row of a rank ---- */

bool runner_on_gpu(const struct runner *runner)
{
    return strcmp(runner->entry->variant->platform, "cuda") == 0;
}

static int runner_threads(const struct runner *runner)
{
    return runner->entry->variant->threaded ? runner->settings->resources.threads : 1;
}

#define CPU_SPAN_MIN_S 0.25 /* a shorter span has too few context switches to judge */

void runner_cpu_use(const struct runner *runner, const struct bench *bench, double *share,
                    double *preempted_per_s)
{
    const struct workload *workload = runner->settings->workload;
    const char *cache = workload->cache ? workload->cache(runner->input) : "warm";
    int threads = runner_threads(runner), allowed = runner->env.allowed_threads;
    *share = *preempted_per_s = NAN;
    if (runner_on_gpu(runner) || runner->consumer || strcmp(cache, "warm") != 0 ||
        bench->span_s < CPU_SPAN_MIN_S)
        return;
    *share = bench->cpu_s / (bench->span_s * (allowed > 0 && allowed < threads ? allowed : threads));
    *preempted_per_s = (double)bench->preempted / bench->span_s;
}

static int runner_cores(const struct runner *runner)
{
    int threads = runner_threads(runner), allowed = runner->env.allowed_cores;
    return allowed > 0 && allowed < threads ? allowed : threads;
}

struct roofline runner_roofline(const struct runner *runner, const struct work *work)
{
    const struct variant *variant = runner->entry->variant;
    if (runner_on_gpu(runner))
        return roofline_of(&work->least, &runner->device.peaks);
    struct machine_peaks peaks = {0};
    if (variant->instruction_set)
        peaks.flops_per_s[UNIT_FP32] = roofline_cpu_flops_per_cycle(variant->instruction_set()) *
                                       runner->env.max_clock_hz * runner_cores(runner);
    return roofline_of(&work->least, &peaks);
}

/* Sets the columns of the options that have an effect on the variant. */
static void set_options(const struct runner *runner, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const void *parameters = runner->settings->parameters;
    for (size_t i = 0; i < workload->option_count; i++) {
        const struct option_spec *spec = &workload->options[i];
        const void *value = (const char *)parameters + spec->offset;
        char column[64], text[4096];
        if (spec->column != COLUMN ||
            (workload->applies && !workload->applies(parameters, runner->entry->variant, spec->name)))
            continue;
        options_column(spec, column, sizeof column);
        options_text(spec, parameters, text, sizeof text);
        if (spec->kind == OPTION_FLAG)
            row_flag(row, column, *(const bool *)value);
        else if (*text && (spec->kind == OPTION_COUNT || spec->kind == OPTION_BYTES))
            row_count(row, column, *(const uint64_t *)value);
        else /* a real number has the digits that were given */
            row_text(row, column, text);
    }
}

void runner_set_run(const struct runner *runner, const struct result *result, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const struct variant *variant = runner->entry->variant;
    bool on_gpu = runner_on_gpu(runner);
    row_text(row, "schema", workload->schema);
    row_text(row, "time_utc", *runner->time_utc ? runner->time_utc : runner->env.time_utc);
    row_text(row, "host", runner->env.host);
    row_text(row, "job_id", runner->env.job_id);
    row_text(row, "revision", runner->env.revision);
    row_text(row, "workload", workload->name);
    row_text(row, "variant", runner->entry->name);
    row_text(row, "device", on_gpu ? runner->device.name : runner->env.cpu_model);
    row_text(row, "driver", on_gpu ? runner->driver : "");
    row_text(row, "cuda", on_gpu ? runner->device.runtime : "");
    row_count(row, "ranks", runner->partition.ranks);
    row_count(row, "rank", runner->partition.rank);
    row_count(row, "threads", (unsigned long long)runner_threads(runner));
    if (runner->partition.ranks > 1 && !workload->ranks.joint)
        row_text(row, "scaling", settings_scaling(runner->settings));
    if (on_gpu)
        row_count(row, "ranks_per_device", (unsigned long long)runner->sharers);
    if (on_gpu && runner->settings->gpu_others.known)
        row_count(row, "gpu_others", (unsigned long long)runner->settings->gpu_others.count);
    set_options(runner, row);
    if (runner->watched.sm_clock_mhz > 0)
        row_count(row, "sm_clock_mhz", (unsigned long long)runner->watched.sm_clock_mhz);
    if (runner->watched.mem_clock_mhz > 0)
        row_count(row, "memory_clock_mhz", (unsigned long long)runner->watched.mem_clock_mhz);
    row_text(row, "instruction_set", variant->instruction_set ? variant->instruction_set() : "");
    row_text(row, "cache", workload->cache ? workload->cache(runner->input) : "");
    row_flag(row, "verified", result->verified);
    if (result->verified || workload->checks.every_run)
        row_count(row, "wrong", result->wrong);
}

void runner_set_result(const struct runner *runner, const struct result *result, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const struct bench *bench = &result->bench;
    const struct stats *time = &bench->time;
    const struct roofline *roofline = &result->roofline;
    char throttled[128];
    row_count(row, "warmups", result->runs_before + bench->warmups);
    row_count(row, "samples", bench->count);
    if (!workload->epochs.more) /* each epoch is a row */
        row_flag(row, "settled", bench->settled);
    row_real(row, "median_error", time->median_error);
    row_real(row, "time_min_s", time->min);
    row_real(row, "time_median_s", time->median);
    row_real(row, "time_mean_s", time->mean);
    row_real(row, "time_p95_s", time->p95);
    row_real(row, "time_p99_s", time->p99);
    row_real(row, "wall_s", bench->wall_s);
    row_real(row, "items", result->work.items);
    if (!workload->ranks.joint || comm_size() > 1) { /* one rank alone has nothing to exchange */
        row_positive(row, "items_per_s", result->work.items / time->median);
        row_positive(row, "bytes_per_s", result->work.bytes / time->median);
    }
    row_positive(row, "flops", roofline->flops);
    row_positive(row, "bytes", roofline->bytes);
    row_positive(row, "peak_flops_per_s", roofline->peak_flops);
    row_positive(row, "peak_bytes_per_s", roofline->peak_bytes_per_s);
    row_text(row, "bound", roofline_bound_name(roofline->bound));
    row_positive(row, "roofline_share", roofline->floor_s / time->median);
    if (bench->count > 1) {
        row_real(row, "time_sd_s", time->sd);
        row_real(row, "time_cv", time->cv);
    }
    row_count(row, "outliers", time->outliers);
    row_text(row, "throttled", nvml_throttle_words(result->throttle_reasons, throttled, sizeof throttled));
    row_positive(row, "energy_j_per_item", result->run_j / result->work.items);
}

/* ---- Samples ---- */

/* Makes the row of a sample. The first columns are those of the row, so that samples and rows can be joined.
 */
static void make_sample(const struct row_columns *columns, const struct row *whole,
                        const struct sample *sample, size_t number, struct row *row)
{
    row_open(row, columns->sample);
    for (size_t i = 0; i < columns->shared; i++)
        row_copy(row, i, whole);
    row_count(row, "sample", number);
    row_real(row, "wall_s", sample->wall_s);
    row_real(row, "device_s", sample->device_s >= 0 ? sample->device_s : NAN);
}

enum status runner_append_samples(const struct workload *workload, const char *path, const struct row *ranks,
                                  size_t rank_count, const struct sample *samples, size_t count)
{
    const struct row_columns *columns;
    size_t total = rank_count * count;
    FREED struct row *rows = calloc(total, sizeof *rows);
    TRY(ALLOCATED(rows, "--samples-out: out of memory for %zu samples", total));
    TRY(columns_of(workload, &columns));
    for (size_t i = 0; i < total; i++)
        make_sample(columns, &ranks[i / count], &samples[i], i % count, &rows[i]);
    enum status status = csv_append(path, rows, total); /* checks the rows first */
    for (size_t i = 0; i < total; i++)
        row_free(&rows[i]);
    return status;
}

/* ---- All ranks ---- */

void ranks_free_rows(struct row *rows)
{
    for (int i = 0; rows && i <= comm_size(); i++)
        row_free(&rows[i]);
    free(rows);
}

/* Gathers `bytes` bytes of each rank on rank 0. On rank 0, `*all` becomes new memory that the caller frees;
 * on other ranks it becomes NULL. */
static enum status gather(const void *mine, size_t bytes, void **all)
{
    bool leads = comm_rank() == 0;
    *all = leads ? malloc((size_t)comm_size() * bytes) : NULL;
    enum status status = STATUS_OK;
    if (leads && !*all)
        status = status_set(STATUS_EXHAUSTED, "out of memory for the results of %d ranks", comm_size());
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = comm_gather(mine, bytes, *all);
    if (status != STATUS_OK) {
        free(*all);
        *all = NULL;
    }
    return status;
}

/* Makes the rows of all ranks from their values and texts. `word_bytes` is the distance between the texts of
 * two ranks. */
static enum status take_rows(const struct row *mine, const struct value *values, const char *words,
                             size_t word_bytes, struct row **rows)
{
    *rows = calloc((size_t)comm_size() + 1, sizeof **rows);
    TRY(ALLOCATED(*rows, "out of memory for the rows of %d ranks", comm_size()));
    for (size_t i = 0; i < (size_t)comm_size(); i++) {
        struct row *row = &(*rows)[i];
        row_open(row, mine->columns);
        row->words = malloc(word_bytes);
        row->failed |= !row->words;
        TRY(row_check(row));
        row->word_bytes = word_bytes;
        memcpy(row->values, values + i * row->count, row->count * sizeof *values);
        memcpy(row->words, words + i * word_bytes, word_bytes);
    }
    return STATUS_OK;
}

static enum status gather_rows(const struct row *mine, struct row **rows)
{
    double longest = (double)mine->word_bytes;
    TRY(comm_max(&longest, 1));
    size_t word_bytes = (size_t)longest;
    FREED void *values = NULL, *words = NULL;
    FREED char *padded = calloc(1, word_bytes);
    TRY(comm_agree(ALLOCATED(padded, "out of memory for a row of %zu bytes", word_bytes)));
    memcpy(padded, mine->words, mine->word_bytes);
    TRY(gather(mine->values, mine->count * sizeof *mine->values, &values));
    TRY(gather(padded, word_bytes, &words));
    return comm_agree(values ? take_rows(mine, values, words, word_bytes, rows) : STATUS_OK);
}

enum status ranks_gather(const struct row *mine, const struct rank_facts *my_facts, struct row **rows,
                         struct rank_facts **facts)
{
    *rows = NULL;
    void *all = NULL;
    enum status status = gather_rows(mine, rows);
    if (status == STATUS_OK)
        status = gather(my_facts, sizeof *my_facts, &all);
    *facts = all;
    if (status != STATUS_OK) {
        ranks_free_rows(*rows);
        *rows = NULL;
    }
    return status;
}

enum status ranks_gather_samples(const struct bench *bench, struct sample **samples)
{
    void *all;
    enum status status = gather(bench->samples, bench->count * sizeof *bench->samples, &all);
    *samples = all;
    return status;
}

struct roofline ranks_roofline(const struct rank_facts *facts, uint64_t count)
{
    struct roofline all = {0};
    for (uint64_t i = 0; i < count; i++)
        roofline_add(&all, &facts[i].roofline, facts[i].sharers);
    return all;
}

/* Returns the number that a row shows. */
static double shown(const struct value *value)
{
    if (value->type == VALUE_INTEGER)
        return (double)value->integer;
    if (value->digits == 0 || value->real == 0)
        return value->real;
    int decimals =
        value->digits < 0 ? -value->digits : value->digits - 1 - (int)floor(log10(fabs(value->real)));
    return rint(value->real * pow(10, decimals)) / pow(10, decimals);
}

static bool is_same(const struct row *a, const struct row *b, size_t column)
{
    char first[VALUE_TEXT_MAX], second[VALUE_TEXT_MAX];
    return strcmp(row_cell(a, column, first), row_cell(b, column, second)) == 0;
}

/* Sets the value of a column that all ranks have. */
static void combine(const struct row *rows, int count, size_t column, enum combine how, struct value *total)
{
    double smallest = INFINITY, largest = -INFINITY, mean = 0, sum = 0;
    *total = rows[0].values[column];
    for (int i = 0; i < count; i++) {
        const struct value *value = &rows[i].values[column];
        double number = shown(value);
        smallest = fmin(smallest, number);
        largest = fmax(largest, number);
        mean += number / count;
        sum += number;
        if (i > 0 && how == COMBINE_SUM && value->type != VALUE_REAL)
            total->integer += value->integer; /* exact, and for hashes modulo 2^64 */
    }
    if (how == COMBINE_SUM && total->type != VALUE_REAL)
        return;
    double real = how == COMBINE_MIN    ? smallest
                  : how == COMBINE_MAX  ? largest
                  : how == COMBINE_MEAN ? mean
                                        : sum;
    *total = (struct value){.type = VALUE_REAL, .real = real};
}

void ranks_combine(const struct row *rows, int count, struct row *total)
{
    for (size_t column = 0; column < total->count; column++) {
        enum combine how = total->columns[column].combine;
        bool known = true, same = true;
        for (int i = 0; i < count; i++) {
            known &= rows[i].values[column].type != VALUE_ABSENT;
            same &= is_same(&rows[0], &rows[i], column);
        }
        if (how == COMBINE_FIRST || (how == COMBINE_COMMON && same))
            row_copy(total, column, &rows[0]);
        else if (how != COMBINE_COMMON && how != COMBINE_COMPUTED && how != COMBINE_NONE && known)
            combine(rows, count, column, how, &total->values[column]);
    }
}

double ranks_efficiency(const struct partition *partition, double alone_s, double together_s)
{
    return alone_s / (partition->strong ? (double)partition->ranks * together_s : together_s);
}

/* ---- Warnings ---- */

#define CPU_SHARE_MIN   0.9  /* warn if threads got less than this share of the CPU time available to them */
#define PREEMPTED_MAX_S 10.0 /* warn above this number of involuntary context switches per second */

static void warn_of_median(const struct settings *settings, const char *variant, const struct bench *bench)
{
    const char *more = settings->loops ? "raise --loops or reduce background load"
                                       : "raise --max-time or reduce background load";
    if (bench->count < STATS_INTERVAL_MIN)
        status_caveat("took too few samples for the error of the median",
                      settings->loops ? "raise --loops" : "raise --min-samples",
                      "%s: too few samples (%zu) for the error of the median; take at least %d with --%s",
                      variant, bench->count, STATS_INTERVAL_MIN, settings->loops ? "loops" : "min-samples");
    else if (!bench->settled && isinf(bench->time.median_error))
        status_caveat("did not settle", more,
                      "%s: the error of the median is unknown: samples are correlated, so %zu of them are "
                      "worth only %.0f independent ones; %s",
                      variant, bench->count, bench->time.effective, more);
    else if (!bench->settled)
        status_caveat("did not settle", more, "%s: median uncertain by +-%.1f %% after %zu samples; %s",
                      variant, 100 * bench->time.median_error, bench->count, more);
    else if (bench->time.outliers * 10 > bench->count)
        status_caveat("had many outliers", "stop other processes on this machine",
                      "%s: %zu of %zu samples are outliers; other processes may be using this machine",
                      variant, bench->time.outliers, bench->count);
}

/* Warns if other processes used the cores, because a median can settle even on a busy machine. Describes the
 * rank that got the smallest share of its cores. */
static void warn_of_busy_cores(const struct runner *runner, const struct rank_facts *facts)
{
    bool one = runner_threads(runner) == 1;
    double share = 1, preempted = 0;
    for (uint64_t i = 0; i < runner->partition.ranks; i++)
        if (facts[i].cpu_share < share && facts[i].preempted_per_s > PREEMPTED_MAX_S) {
            share = facts[i].cpu_share;
            preempted = facts[i].preempted_per_s;
        }
    if (share < CPU_SHARE_MIN)
        status_caveat("lost CPU time to other processes, so times are too long", "stop other processes",
                      "%s: its thread%s got %.0f %% of the CPU time of %s and %s preempted %.0f times per "
                      "second, so times are too long: stop other processes%s",
                      runner->entry->name, one ? "" : "s", 100 * share, one ? "its core" : "their cores",
                      one ? "was" : "were", preempted, one ? "" : ", or lower --threads");
}

void runner_warn(const struct runner *runner, const struct result *result, const struct rank_facts *facts)
{
    const struct settings *settings = runner->settings;
    char words[128];
    if (*nvml_throttle_words(result->throttle_reasons, words, sizeof words))
        status_caveat("ran while the GPU's clocks were throttled",
                      "cool the GPU, raise its power limit, or compare only with throttled runs",
                      "%s: the GPU's clocks were throttled (%s); cool the GPU, raise its power limit, or "
                      "compare only with runs that were throttled too",
                      runner->entry->name, words);
    if (!settings->workload->epochs.more) /* runs that are not repeated have no median error */
        warn_of_median(settings, runner->entry->name, &result->bench);
    warn_of_busy_cores(runner, facts);
}

void runner_warn_of_options(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    for (size_t i = 0; i < workload->option_count; i++) {
        const char *option = workload->options[i].name;
        if (options_given(&settings->options, option) && !settings_uses(settings, option) &&
            workload->applies(settings->parameters, NULL, option))
            status_warn("--%s has no effect with --variant %s and these options; drop it, or choose the "
                        "variant or the options that it needs (--help)",
                        option, settings->variant_names);
    }
}

void runner_warn_of_few_looks(const struct runner *runner, double wall_s)
{
    const struct settings *settings = runner->settings;
    size_t looks = monitor_timed_samples(runner->monitor);
    double enough_s = 1e-3 * (double)settings->monitor_period_ms * (MONITOR_SAMPLES_MIN + 1);
    char remedy[64];
    if (!runner->monitor || looks >= MONITOR_SAMPLES_MIN || settings->workload->epochs.more)
        return;
    if (settings->loops)
        snprintf(remedy, sizeof remedy, "--loops %.0f", ceil(enough_s / wall_s));
    else
        snprintf(remedy, sizeof remedy, "--min-time %g", enough_s);
    status_caveat("got too few samples of --monitor",
                  settings->loops ? "raise --loops" : "raise --min-time or shorten the period",
                  "%s: --monitor took only %zu sample%s during the timed runs, but meaningful statistics "
                  "need %d; sample longer with %s%s",
                  runner->entry->name, looks, looks == 1 ? "" : "s", MONITOR_SAMPLES_MIN, remedy,
                  settings->monitor_period_ms > MONITOR_PERIOD_MIN_MS ? ", or use a shorter period" : "");
}
