/* The columns of a workload's rows, and the rows of a variant and of its samples. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "machine/comm.h"
#include "machine/nvml.h"
#include "run/runner_parts.h"

/* ---- Columns ---- */

#define WORKLOADS_MAX 16 /* more than the number of workloads */

static const struct column run_columns[] = {
    {"schema", VALUE_WORD, COMBINE_FIRST, "", .about = "workload and version of its columns"},
    {"time_utc", VALUE_WORD, COMBINE_FIRST, "",
     .about = "start of the run, the same in all its rows; with epochs, the start of the epoch"},
    {"host", VALUE_WORD, COMBINE_FIRST, "", .about = "name of the machine"},
    {"job_id", VALUE_WORD, COMBINE_FIRST, "", .about = "id of the batch system's job"},
    {"revision", VALUE_WORD, COMBINE_FIRST, "", .about = "revision of the source code"},
    {"workload", VALUE_WORD, COMBINE_FIRST, "", .about = "the workload"},
    {"variant", VALUE_WORD, COMBINE_FIRST, "", .about = "the variant"},
    {"device", VALUE_WORD, COMBINE_FIRST, "", .about = "the GPU or CPU that the variant runs on"},
    {"driver", VALUE_WORD, COMBINE_FIRST, "", .about = "version of the GPU driver; only for GPU variants"},
    {"cuda", VALUE_WORD, COMBINE_FIRST, "", .about = "version of the CUDA runtime; only for GPU variants"},
    {"ranks", VALUE_INTEGER, COMBINE_FIRST, "", .about = "number of ranks"},
    {"rank", VALUE_INTEGER, COMBINE_NONE, "", .about = "the rank, or all for the row of all ranks together"},
    {"threads", VALUE_INTEGER, COMBINE_SUM, "", .about = "CPU threads of the variant"},
    {"scaling", VALUE_WORD, COMBINE_FIRST, "", .about = "with several ranks, the value of --scaling"},
    {"ranks_per_device", VALUE_INTEGER, COMBINE_MAX, "", .about = "ranks that share the GPU"},
};

static const struct column result_columns[] = {
    {"warmups", VALUE_INTEGER, COMBINE_NONE, "", .about = "untimed runs before the samples"},
    {"samples", VALUE_INTEGER, COMBINE_NONE, "", .about = "timed runs"},
    {"settled", VALUE_FLAG, COMBINE_NONE, "",
     .about = "whether the error of the median fell below --max-error"},
    {"median_error", VALUE_REAL, COMBINE_NONE, "",
     .about = "half the width of the median's 95 % confidence interval, relative to the median"},
    {"time_min_s", VALUE_REAL, COMBINE_NONE, "s", .about = "shortest time of a run"},
    {"time_median_s", VALUE_REAL, COMBINE_NONE, "s", .about = "median time of a run"},
    {"time_mean_s", VALUE_REAL, COMBINE_NONE, "s", .about = "mean time of a run"},
    {"time_p95_s", VALUE_REAL, COMBINE_NONE, "s", .about = "95th percentile of the time of a run"},
    {"time_p99_s", VALUE_REAL, COMBINE_NONE, "s", .about = "99th percentile of the time of a run"},
    {"time_sd_s", VALUE_REAL, COMBINE_NONE, "s", .about = "standard deviation of the time of a run"},
    {"wall_s", VALUE_REAL, COMBINE_NONE, "s",
     .about = "median wall time of a run, even if the other columns are GPU time"},
    {"items", VALUE_REAL, COMBINE_NONE, "", .about = "items that a run processes: images, samples, ..."},
    {"items_per_s", VALUE_REAL, COMBINE_NONE, "items/s", .about = "items divided by the median time"},
    {"bytes_per_s", VALUE_REAL, COMBINE_NONE, "bytes/s",
     .about = "bytes of the generated images or delivered samples divided by the median time"},
    {"flops", VALUE_REAL, COMBINE_NONE, "FLOP",
     .about = "floating-point operations that a run needs at least"},
    {"bytes", VALUE_REAL, COMBINE_NONE, "bytes", .about = "bytes that a run must move at least"},
    {"peak_flops_per_s", VALUE_REAL, COMBINE_NONE, "FLOP/s",
     .about = "peak rate of the units that do these operations"},
    {"peak_bytes_per_s", VALUE_REAL, COMBINE_NONE, "bytes/s",
     .about = "peak rate of the memory or bus that moves these bytes"},
    {"bound", VALUE_WORD, COMBINE_NONE, "", .about = "the limit that gives the least time of a run"},
    {"roofline_share", VALUE_REAL, COMBINE_NONE, "",
     .about = "least time of a run by the roofline, divided by the median time"},
    {"time_cv", VALUE_REAL, COMBINE_NONE, "", .about = "standard deviation divided by the mean time"},
    {"outliers", VALUE_INTEGER, COMBINE_NONE, "", .about = "samples that are outliers"},
    {"throttled", VALUE_WORD, COMBINE_NONE, "",
     .about = "why the GPU's clocks were throttled during the timed runs"},
    {"sm_clock_mhz", VALUE_INTEGER, COMBINE_MIN, "MHz",
     .about = "median clock of the multiprocessors during the timed runs"},
    {"memory_clock_mhz", VALUE_INTEGER, COMBINE_MIN, "MHz",
     .about = "median clock of the GPU's memory during the timed runs"},
    {"energy_j_per_item", VALUE_REAL, COMBINE_NONE, "J", .about = "energy of the whole GPU per item"},
    {"instruction_set", VALUE_WORD, COMBINE_COMMON, "",
     .about = "instruction set of the variant's arithmetic on the CPU"},
    {"speedup", VALUE_REAL, COMBINE_NONE, "",
     .about = "time per item of the baseline, divided by that of this variant"},
    {"baseline", VALUE_WORD, COMBINE_NONE, "", .about = "the variant that speedup compares with"},
    {"imbalance", VALUE_REAL, COMBINE_NONE, "",
     .about = "median time of the slowest rank, divided by the mean over the ranks"},
    {"efficiency", VALUE_REAL, COMBINE_NONE, "",
     .about = "parallel efficiency of all ranks relative to rank 0 alone; 1 is ideal"},
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

static enum status add_columns(struct column **table, size_t *count, const struct column *columns,
                               size_t added)
{
    for (size_t i = 0; i < added; i++) {
        TRY(ALLOCATED(array_grow(table, *count, sizeof **table), "out of memory for the columns"));
        (*table)[(*count)++] = columns[i];
    }
    return STATUS_OK;
}

static enum status add_option(struct column **table, size_t *count, const struct option_spec *spec)
{
    static const enum value_type types[] = {
        [OPTION_FLAG] = VALUE_SWITCH, [OPTION_COUNT] = VALUE_INTEGER, [OPTION_BYTES] = VALUE_INTEGER,
        [OPTION_REAL] = VALUE_REAL,   [OPTION_CHOICE] = VALUE_WORD,   [OPTION_TEXT] = VALUE_WORD,
        [OPTION_OUTPUT] = VALUE_WORD};
    char name[64];
    options_column(spec, name, sizeof name);
    const struct column column = {
        .name = strdup(name),
        .type = types[spec->kind],
        .combine = strcmp(name, "batch") == 0 ? COMBINE_SUM : COMBINE_FIRST, /* each rank has its share */
        .unit = "",
        .about = spec->help};
    TRY(ALLOCATED(column.name, "out of memory for the columns"));
    return add_columns(table, count, &column, 1);
}

enum status runner_columns(const struct workload *workload, const struct row_columns **columns)
{
    static struct row_columns known[WORKLOADS_MAX]; /* of workloads that were asked for */
    static const struct column end = {0};
    struct row_columns *made = known;
    while (made->workload && made->workload != workload)
        made++;
    *columns = made;
    if (made->workload)
        return STATUS_OK;
    size_t count = 0, own = 0, sample_count = 0;
    while (workload->columns[own].name)
        own++;
    TRY(add_columns(&made->row, &count, run_columns, COUNT_OF(run_columns)));
    for (size_t i = 0; i < workload->option_count; i++)
        if (workload->options[i].column == COLUMN)
            TRY(add_option(&made->row, &count, &workload->options[i]));
    made->shared = count;
    TRY(add_columns(&made->sample, &sample_count, made->row, count));
    TRY(add_columns(&made->sample, &sample_count, sample_columns, COUNT_OF(sample_columns)));
    TRY(add_columns(&made->sample, &sample_count, &end, 1));
    TRY(add_columns(&made->row, &count, result_columns, COUNT_OF(result_columns)));
    TRY(add_columns(&made->row, &count, workload->columns, own));
    TRY(add_columns(&made->row, &count, check_columns, COUNT_OF(check_columns)));
    TRY(add_columns(&made->row, &count, &end, 1));
    made->workload = workload;
    return STATUS_OK;
}

/* ---- Values ---- */

bool runner_on_gpu(const struct runner *runner)
{
    return strcmp(runner->entry->variant->platform, "cuda") == 0;
}

int runner_threads(const struct runner *runner)
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

int runner_cores(const struct runner *runner)
{
    int threads = runner_threads(runner), allowed = runner->env.allowed_cores;
    return allowed > 0 && allowed < threads ? allowed : threads;
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
    TRY(runner_columns(workload, &columns));
    for (size_t i = 0; i < total; i++)
        make_sample(columns, &ranks[i / count], &samples[i], i % count, &rows[i]);
    enum status status = csv_append(path, rows, total); /* checks the rows first */
    for (size_t i = 0; i < total; i++)
        row_free(&rows[i]);
    return status;
}
