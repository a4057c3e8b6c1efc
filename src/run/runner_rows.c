/* The rows of a variant and of its samples. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "machine/nvml.h"
#include "run/runner_parts.h"

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
    TRY(columns_of(workload, &columns));
    for (size_t i = 0; i < total; i++)
        make_sample(columns, &ranks[i / count], &samples[i], i % count, &rows[i]);
    enum status status = csv_append(path, rows, total); /* checks the rows first */
    for (size_t i = 0; i < total; i++)
        row_free(&rows[i]);
    return status;
}
