#include "core/runner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"
#include "common/device.h"
#include "core/env.h"
#include "core/range.h"
#include "core/record.h"
#include "core/report.h"
#include "core/timer.h"

#define THROTTLE_POLL_S 0.05 /* NVML answers in microseconds, but knows nothing new sooner than this */
#define PROGRESS_S      0.1

/* What the rows of one invocation share, and what is under way. */
struct runner {
    struct settings *settings;
    struct env env;
    struct device_info device; /* name is empty without one */
    char driver[64];
    void *input;
    struct report *report;

    /* The variant under way */
    const struct variant_entry *entry;
    uint64_t throttle_reasons;
    double polled_s, shown_s;
    bool progress; /* stderr is a terminal */
};

/* ---- Rows ---- */

static bool on_gpu(const struct runner *runner)
{
    return strcmp(runner->entry->variant->platform, "cuda") == 0;
}

static int threads_of(const struct runner *runner)
{
    return runner->entry->variant->threaded ? runner->settings->resources.threads : 1;
}

/* The cores that those threads have. */
static int cores_of(const struct runner *runner)
{
    int threads = threads_of(runner), allowed = runner->env.allowed_threads;
    return allowed > 0 && allowed < threads ? allowed : threads;
}

/* The columns that say what was run, where and on what. */
static void identity_fields(const struct runner *runner, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    char schema[64];
    snprintf(schema, sizeof schema, "%s/2", workload->name);
    row_text(row, "schema", schema);
    row_text(row, "time_utc", runner->env.time_utc);
    row_text(row, "host", runner->env.host);
    row_text(row, "job_id", runner->env.job_id);
    row_text(row, "revision", runner->env.revision);
    row_text(row, "workload", workload->name);
    row_text(row, "variant", runner->entry->name);
    row_text(row, "device", on_gpu(runner) ? runner->device.name : runner->env.cpu_model);
    row_text(row, "driver", on_gpu(runner) ? runner->driver : "");
    row_text(row, "cuda", on_gpu(runner) ? runner->device.runtime : "");
    row_count(row, "ranks", (unsigned long long)comm_size());
    row_count(row, "rank", (unsigned long long)comm_rank());
    row_count(row, "threads", (unsigned long long)threads_of(runner));
}

static void parameter_fields(const struct runner *runner, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    const void *parameters = runner->settings->parameters;
    for (size_t i = 0; i < workload->option_count; i++) {
        const struct option_spec *spec = &workload->options[i];
        char column[64], text[4096] = "";
        if (!spec->column)
            continue;
        snprintf(column, sizeof column, "%s", spec->name);
        for (char *c = column; (c = strchr(c, '-'));)
            *c = '_';
        if (!workload->applies || workload->applies(parameters, spec->name))
            options_text(spec, parameters, text, sizeof text);
        bool number = spec->kind == OPTION_COUNT || spec->kind == OPTION_REAL;
        (number ? row_number : row_text)(row, column, text);
    }
}

static void time_fields(const struct runner *runner, const struct result *result, struct row *row)
{
    const struct bench *bench = &result->bench;
    const struct stats *time = &bench->time;
    char throttled[128];
    row_count(row, "warmups", result->runs_before + bench->warmups);
    row_count(row, "samples", bench->count);
    row_real(row, "time_min_s", time->min);
    row_real(row, "time_median_s", time->median);
    row_real(row, "time_mean_s", time->mean);
    row_real(row, "time_p95_s", time->p95);
    row_real(row, "time_p99_s", time->p99);
    row_real(row, "time_sd_s", time->sd);
    row_real(row, "wall_s", bench->wall_s);
    row_real(row, "items", result->work.items);
    row_real(row, "items_per_s", result->work.items / time->median);
    row_real(row, "bytes_per_s", result->work.bytes / time->median);
    row_real(row, "roofline_share", result->roofline_share > 0 ? result->roofline_share : NAN);
    row_real(row, "time_cv", time->cv);
    row_count(row, "outliers", time->outliers);
    row_text(row, "throttled", nvml_throttle_words(runner->throttle_reasons, throttled, sizeof throttled));
}

/* The whole row. Without a result the values of the timing columns mean nothing: only the header is used. */
static enum status make_row(const struct runner *runner, const struct result *result, char measures[][64],
                            struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    identity_fields(runner, row);
    parameter_fields(runner, row);
    time_fields(runner, result, row);
    for (size_t i = 0; workload->measures[i]; i++)
        row_text(row, workload->measures[i], measures ? measures[i] : "");
    row_text(row, "cache", workload->cache ? workload->cache(runner->input) : "");
    row_text(row, "verified", result->verified ? "yes" : "no");
    if (result->verified || workload->checks_runs)
        row_count(row, "wrong", result->wrong);
    else
        row_number(row, "wrong", "");
    return row_check(row);
}

/* The columns of --samples: enough to join them with their row. */
static enum status make_sample_row(const struct runner *runner, const struct sample *sample, size_t number,
                                   struct row *row)
{
    identity_fields(runner, row);
    parameter_fields(runner, row);
    row_count(row, "sample", number);
    row_real(row, "wall_s", sample->wall_s);
    row_real(row, "device_s", sample->device_s >= 0 ? sample->device_s : NAN);
    return row_check(row);
}

static enum status append_samples(const struct runner *runner, const struct bench *bench)
{
    struct row *rows = calloc(bench->count, sizeof *rows);
    if (!rows)
        return status_set(STATUS_FAILED, "--samples: out of memory for %zu samples", bench->count);
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < bench->count; i++)
        status = make_sample_row(runner, &bench->samples[i], i, &rows[i]);
    if (status == STATUS_OK)
        status = csv_append(runner->settings->samples, rows, bench->count);
    for (size_t i = 0; i < bench->count; i++)
        row_free(&rows[i]);
    free(rows);
    return status;
}

/* ---- Progress ---- */

static void poll_throttling(struct runner *runner, double now_s)
{
    struct gpu_state state;
    if (!on_gpu(runner) || now_s - runner->polled_s < THROTTLE_POLL_S)
        return;
    runner->polled_s = now_s;
    if (nvml_gpu_state(runner->device.pci_bus_id, &state) == STATUS_OK)
        runner->throttle_reasons |= state.throttle_reasons;
}

static void show_progress(void *context, size_t samples, double elapsed_s, double max_time_s)
{
    struct runner *runner = context;
    double now_s = timer_now_s();
    poll_throttling(runner, now_s);
    if (!runner->progress || now_s - runner->shown_s < PROGRESS_S)
        return;
    runner->shown_s = now_s;
    fprintf(stderr, "\r\033[K%s: %zu samples, %.1f s of at most %.0f s", runner->entry->name, samples,
            elapsed_s, max_time_s);
    fflush(stderr);
}

static void show_phase(const struct runner *runner, const char *phase)
{
    if (runner->progress)
        fprintf(stderr, "\r\033[K%s%s%s", phase ? runner->entry->name : "", phase ? ": " : "",
                phase ? phase : "");
}

/* ---- One variant ---- */

/* The share of the roofline: the time that the work must take at the device's peak rates, over the median. */
static double roofline_share(const struct runner *runner, const struct result *result)
{
    struct peak peak = {0};
    if (on_gpu(runner))
        peak = (struct peak){runner->device.peak_bytes_per_s, runner->device.peak_operations_per_s};
    else
        peak.operations_per_s = env_cpu_peak_operations_per_s(&runner->env, cores_of(runner));
    double bytes_s = peak.bytes_per_s > 0 ? result->work.bytes / peak.bytes_per_s : 0;
    double operations_s = peak.operations_per_s > 0 ? result->work.operations / peak.operations_per_s : 0;
    return fmax(bytes_s, operations_s) / result->bench.time.median;
}

/* Makes run 0, after another run, so that a result which run 0 failed to overwrite is caught; then checks it
 * where asked and hands it to the user. */
static enum status make_and_verify(struct runner *runner, void *state, struct result *result)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    const struct variant *variant = runner->entry->variant;
    struct run_time unused;
    if (settings->verify)
        TRY(variant_run(variant, state, 1, &unused));
    TRY(variant_run(variant, state, 0, &unused));
    result->runs_before = settings->verify ? 2 : 1;
    if (settings->verify) {
        show_phase(runner, "verifying");
        range_push("verify");
        enum status status = workload->verify(runner->input, variant, state, &result->wrong);
        range_pop();
        TRY(status);
        result->verified = true;
    }
    if (!workload->deliver)
        return STATUS_OK;
    return workload->deliver(runner->input, settings->variant_count > 1 ? runner->entry->name : NULL, variant,
                             state);
}

static void warn_about(const struct runner *runner, const struct result *result)
{
    char words[128];
    if (*nvml_throttle_words(runner->throttle_reasons, words, sizeof words))
        status_warn("%s: the GPU's clocks were throttled (%s); cool it, raise its power limit or compare "
                    "only with runs like this one",
                    result->variant, words);
    if (result->bench.count < STATS_INTERVAL_MIN)
        status_warn("%s: %zu samples tell nothing of the median's error; take at least %d with --min-samples",
                    result->variant, result->bench.count, STATS_INTERVAL_MIN);
    else if (!result->bench.settled)
        status_warn("%s: after %zu samples the median is known to %.1f %% only; give it longer with "
                    "--max-time, or quiet the machine",
                    result->variant, result->bench.count, 100 * result->bench.time.median_error);
    else if (result->bench.time.outliers * 10 > result->bench.count)
        status_warn("%s: %zu of %zu samples are outliers; something else is using this machine",
                    result->variant, result->bench.time.outliers, result->bench.count);
}

/* Shows the row and appends it where asked. What was measured is worth keeping: a full disk does not swallow
 * the table's line, nor a full stdout the file's row. */
static enum status publish(struct runner *runner, const struct row *row, struct result *result)
{
    const struct settings *settings = runner->settings;
    show_phase(runner, NULL);
    enum status recorded = STATUS_OK;
    if (settings->out)
        recorded = csv_append(settings->out, row, 1);
    if (recorded == STATUS_OK && settings->samples)
        recorded = append_samples(runner, &result->bench);
    char reason[1024];
    snprintf(reason, sizeof reason, "%s", status_text());
    result->row = row;
    enum status shown = report_add(runner->report, result);
    result->row = NULL;
    warn_about(runner, result);
    return recorded == STATUS_OK ? shown : status_set(recorded, "%s", reason);
}

static enum status time_variant(struct runner *runner, void *state, struct result *result)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    const struct variant *variant = runner->entry->variant;
    TRY(comm_barrier());
    TRY(bench_measure(variant, state, &settings->limits, show_progress, runner, &result->bench));
    poll_throttling(runner, timer_now_s() + THROTTLE_POLL_S);
    result->roofline_share = roofline_share(runner, result);
    char measures[32][64] = {{0}};
    if (workload->measure)
        TRY(workload->measure(runner->input, variant, state, measures));
    struct row row = {0};
    enum status status = make_row(runner, result, measures, &row);
    if (status == STATUS_OK)
        status = publish(runner, &row, result);
    row_free(&row);
    return status;
}

static enum status run_state(struct runner *runner, void *state, struct result *result)
{
    TRY(make_and_verify(runner, state, result));
    if (result->wrong == 0)
        return time_variant(runner, state, result);
    show_phase(runner, NULL);
    TRY(report_add(runner->report, result));
    return status_set(STATUS_WRONG, "%s: %llu of %.0f %s are wrong; its time is not recorded",
                      result->variant, (unsigned long long)result->wrong, result->work.items,
                      runner->settings->workload->item);
}

static enum status run_variant(struct runner *runner, const struct variant_entry *entry)
{
    const struct workload *workload = runner->settings->workload;
    runner->entry = entry;
    runner->throttle_reasons = 0;
    struct result result = {.variant = entry->name, .work = workload->work(runner->input, entry->variant)};
    void *state;
    show_phase(runner, "setting up");
    range_push(entry->name);
    range_push("setup");
    enum status status = entry->variant->setup(&runner->settings->resources, runner->input, &state);
    range_pop();
    if (status == STATUS_OK) {
        status = run_state(runner, state, &result);
        entry->variant->teardown(state);
        bench_free(&result.bench);
    }
    range_pop();
    show_phase(runner, NULL);
    return status;
}

/* ---- All of them ---- */

/* The name of a variant of the same workload that can run here, or NULL; the last on a CPU is the fastest. */
static const char *alternative(const struct settings *settings)
{
    const char *name = NULL;
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        if (strcmp(entry->workload, settings->workload->name) == 0 &&
            variant_available(entry, &settings->resources) == STATUS_OK &&
            !(name && strcmp(entry->variant->platform, "cuda") == 0))
            name = entry->name;
    }
    return name;
}

/* Whether the variant can make what the parameters ask for, and run here: what no machine would change is
 * said first. */
static enum status can_run(const struct runner *runner, const struct variant_entry *entry)
{
    const struct workload *workload = runner->settings->workload;
    if (entry->variant && workload->accepts)
        TRY(workload->accepts(runner->input, entry->variant));
    return variant_available(entry, &runner->settings->resources);
}

/* Why a variant that was asked for by name is refused: `status` and the reason are can_run()'s. */
static enum status refuse(const struct settings *settings, const struct variant_entry *entry,
                          enum status status)
{
    if (status != STATUS_UNAVAILABLE)
        return status_prefix(status, "variant '%s' cannot do this", entry->name);
    char reason[512];
    snprintf(reason, sizeof reason, "%s", status_text());
    const char *other = alternative(settings);
    return status_set(status, "variant '%s' cannot run here: %s%s%s%s", entry->name, reason,
                      other ? "; '" : "", other ? other : "", other ? "' would" : "");
}

/* Drops what cannot run from "all", with a note each; anything asked for by name must be able to. */
static enum status keep_runnable(struct runner *runner)
{
    struct settings *settings = runner->settings;
    bool all = strcmp(settings->variant_names, "all") == 0;
    size_t kept = 0;
    for (size_t i = 0; i < settings->variant_count; i++) {
        const struct variant_entry *entry = settings->variants[i];
        enum status status = can_run(runner, entry);
        if (status == STATUS_OK)
            settings->variants[kept++] = entry;
        else if (all)
            fprintf(stderr, "fdsl-bench: skipping %s: %s\n", entry->name, status_text());
        else
            return refuse(settings, entry, status);
    }
    settings->variant_count = kept;
    return kept ? STATUS_OK : status_set(STATUS_UNAVAILABLE, "no variant can run here; see --list");
}

/* Finds out before anything is measured whether the rows can be written where the user wants them. */
static enum status check_outputs(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct result none = {.work.items = 1, .bench.time.median = 1};
    const struct sample no_sample = {0};
    struct row row = {0}, sample_row = {0};
    runner->entry = settings->variants[0];
    enum status status = make_row(runner, &none, NULL, &row);
    if (status == STATUS_OK)
        status = make_sample_row(runner, &no_sample, 0, &sample_row);
    if (status == STATUS_OK && settings->out)
        status = csv_check(settings->out, &row);
    if (status == STATUS_OK && settings->samples)
        status = csv_check(settings->samples, &sample_row);
    row_free(&row);
    row_free(&sample_row);
    return status;
}

/* Describes the device where a chosen variant uses one. */
static enum status describe_device(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    for (size_t i = 0; i < settings->variant_count; i++) {
        if (strcmp(settings->variants[i]->variant->platform, "cuda") != 0)
            continue;
        nvml_driver_version(runner->driver, sizeof runner->driver);
        return device_describe(settings->resources.device, &runner->device);
    }
    return STATUS_OK;
}

static enum status run_all(struct runner *runner)
{
    struct settings *settings = runner->settings;
    size_t wrong = 0;
    TRY(report_begin(settings, &runner->report));
    enum status status = STATUS_OK;
    for (size_t i = 0; i < settings->variant_count && status == STATUS_OK; i++) {
        status = comm_agree(run_variant(runner, settings->variants[i]));
        if (status == STATUS_WRONG) {
            status_print();
            status = STATUS_OK;
            wrong++;
        }
    }
    char failure[1024];
    snprintf(failure, sizeof failure, "%s", status_text());
    enum status ended = report_end(runner->report);
    if (status != STATUS_OK)
        return status_set(status, "%s", failure);
    if (wrong)
        return status_set(STATUS_WRONG, "%zu of %zu variants gave wrong results", wrong,
                          settings->variant_count);
    return ended;
}

/* What is found out before anything is measured. */
static enum status prepare(struct runner *runner)
{
    TRY(keep_runnable(runner));
    env_capture(&runner->env);
    TRY(describe_device(runner));
    return check_outputs(runner);
}

enum status runner_run(struct settings *settings)
{
    struct runner runner = {.settings = settings, .progress = isatty(STDERR_FILENO)};
    TRY(settings->workload->open(&settings->options, settings->parameters, &runner.input));
    enum status status = comm_agree(prepare(&runner));
    if (status == STATUS_OK)
        status = run_all(&runner);
    settings->workload->close(runner.input);
    return status;
}
