/* Builds the CSV rows of a variant and of its samples. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "machine/nvml.h"
#include "run/runner_parts.h"

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

/* The columns that identify the run and the machine. */
static void identity_fields(const struct runner *runner, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    row_text(row, "schema", workload->schema);
    row_text(row, "time_utc", *runner->time_utc ? runner->time_utc : runner->env.time_utc);
    row_text(row, "host", runner->env.host);
    row_text(row, "job_id", runner->env.job_id);
    row_text(row, "revision", runner->env.revision);
    row_text(row, "workload", workload->name);
    row_text(row, "variant", runner->entry->name);
    row_text(row, "device", runner_on_gpu(runner) ? runner->device.name : runner->env.cpu_model);
    row_text(row, "driver", runner_on_gpu(runner) ? runner->driver : "");
    row_text(row, "cuda", runner_on_gpu(runner) ? runner->device.runtime : "");
    row_count(row, "ranks", runner->partition.ranks);
    row_count(row, "rank", runner->partition.rank);
    row_count(row, "threads", (unsigned long long)runner_threads(runner));
    row_text(row, "scaling",
             runner->partition.ranks > 1 && !workload->ranks.joint ? settings_scaling(runner->settings) : "");
    row_real(row, "ranks_per_device", runner_on_gpu(runner) ? runner->sharers : NAN);
}

static void parameter_fields(const struct runner *runner, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const void *parameters = runner->settings->parameters;
    for (size_t i = 0; i < workload->option_count; i++) {
        const struct option_spec *spec = &workload->options[i];
        char column[64], text[4096] = "";
        if (spec->column != COLUMN)
            continue;
        options_column(spec, column, sizeof column);
        if (!workload->applies || workload->applies(parameters, runner->entry->variant, spec->name))
            options_text(spec, parameters, text, sizeof text);
        row_add(row, column, text,
                spec->kind == OPTION_FLAG ? FIELD_FLAG
                : spec->kind == OPTION_CHOICE || spec->kind == OPTION_TEXT || spec->kind == OPTION_OUTPUT
                    ? FIELD_TEXT
                    : FIELD_NUMBER);
    }
}

/* Adds a number. A value that is not positive is unknown and becomes "". */
static void row_positive(struct row *row, const char *column, double value)
{
    row_real(row, column, value > 0 ? value : NAN);
}

static void roofline_fields(const struct roofline *roofline, double time_s, struct row *row)
{
    row_positive(row, "flops", roofline->flops);
    row_positive(row, "bytes", roofline->bytes);
    row_positive(row, "peak_flops_per_s", roofline->peak_flops);
    row_positive(row, "peak_bytes_per_s", roofline->peak_bytes_per_s);
    row_text(row, "bound", roofline_bound_name(roofline->bound));
    row_positive(row, "roofline_share", roofline->floor_s / time_s);
}

/* The timing columns. With one sample, time_sd_s and time_cv are empty. For workloads with epochs, `settled`
 * is empty, because each run is a row. */
static void time_fields(const struct runner *runner, const struct result *result, struct row *row)
{
    const struct bench *bench = &result->bench;
    const struct stats *time = &bench->time;
    bool repeats = !runner->settings->workload->epochs.more;
    row_count(row, "warmups", result->runs_before + bench->warmups);
    row_count(row, "samples", bench->count);
    row_add(row, "settled", !repeats ? "" : bench->settled ? "yes" : "no", FIELD_FLAG);
    row_real(row, "median_error", time->median_error);
    row_real(row, "time_min_s", time->min);
    row_real(row, "time_median_s", time->median);
    row_real(row, "time_mean_s", time->mean);
    row_real(row, "time_p95_s", time->p95);
    row_real(row, "time_p99_s", time->p99);
    row_real(row, "time_sd_s", bench->count > 1 ? time->sd : NAN);
    row_real(row, "wall_s", bench->wall_s);
    row_real(row, "items", result->work.items);
    row_positive(row, "items_per_s", result_rate(runner->settings, result, result->work.items));
    row_positive(row, "bytes_per_s", result_rate(runner->settings, result, result->work.bytes));
    roofline_fields(&result->roofline, time->median, row);
    row_real(row, "time_cv", bench->count > 1 ? time->cv : NAN);
    row_count(row, "outliers", time->outliers);
}

/* The state of the machine during the timed runs, and the comparisons with other variants and ranks. */
static void machine_fields(const struct result *result, struct row *row)
{
    char throttled[128];
    row_text(row, "throttled", nvml_throttle_words(result->throttle_reasons, throttled, sizeof throttled));
    row_positive(row, "sm_clock_mhz", result->sm_clock_mhz);
    row_positive(row, "memory_clock_mhz", result->mem_clock_mhz);
    row_positive(row, "energy_j_per_item", result->run_j / result->work.items);
    row_text(row, "instruction_set", result->instruction_set);
    row_positive(row, "speedup", result->speedup);
    row_text(row, "baseline", result->baseline);
    row_positive(row, "imbalance", result->imbalance);
    row_positive(row, "efficiency", result->efficiency);
}

/* Callers that need only the header pass a dummy result. */
enum status runner_row(const struct runner *runner, const struct result *result,
                       const struct measures *measures, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    identity_fields(runner, row);
    parameter_fields(runner, row);
    time_fields(runner, result, row);
    machine_fields(result, row);
    for (size_t i = 0; workload->measures[i].column; i++) {
        const struct measure *measure = &workload->measures[i];
        bool text = measure->combine == COMBINE_FIRST || measure->combine == COMBINE_COMMON ||
                    measure->combine == COMBINE_HASHES;
        row_add(row, measure->column, measures ? measures->texts[i] : "", text ? FIELD_TEXT : FIELD_NUMBER);
    }
    row_text(row, "cache", workload->cache ? workload->cache(runner->input) : "");
    row_add(row, "verified", result->verified ? "yes" : "no", FIELD_FLAG);
    if (result->verified || workload->checks.every_run)
        row_count(row, "wrong", result->wrong);
    else
        row_number(row, "wrong", "");
    return row_check(row);
}

/* Copies the identifying columns of the row, so that samples and rows can be joined. */
enum status runner_sample_row(const struct row *whole, const struct sample *sample, size_t number,
                              struct row *row)
{
    for (size_t i = 0; i < whole->count && strcmp(whole->fields[i].column, "warmups") != 0; i++) {
        const struct field *field = &whole->fields[i];
        row_add(row, field->column, field->text, field->kind);
    }
    row_count(row, "sample", number);
    row_real(row, "wall_s", sample->wall_s);
    row_real(row, "device_s", sample->device_s >= 0 ? sample->device_s : NAN);
    return row_check(row);
}

enum status runner_append_samples(const char *path, const struct row *ranks, size_t rank_count,
                                  const struct sample *samples, size_t count)
{
    size_t total = rank_count * count;
    FREED struct row *rows = calloc(total, sizeof *rows);
    TRY(ALLOCATED(rows, "--samples-out: out of memory for %zu samples", total));
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < total; i++)
        status = runner_sample_row(&ranks[i / count], &samples[i], i % count, &rows[i]);
    if (status == STATUS_OK)
        status = csv_append(path, rows, total);
    for (size_t i = 0; i < total; i++)
        row_free(&rows[i]);
    return status;
}
