#include "run/runner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/phase.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/nvml.h"
#include "run/consumed.h"
#include "run/runner_parts.h"

/* ---- One variant ---- */

/* What the timed runs left, before anything else is made of it: with --compute the columns of the steps, and
 * the workload's own. */
static enum status observe(const struct runner *runner, void *state, struct result *result,
                           struct measures *measures)
{
    const struct workload *workload = runner->settings->workload;
    if (runner->consumer)
        TRY(consumed_end(state, measures, &result->wait_share));
    return workload->observe ? workload->observe(runner->input, runner->entry->variant,
                                                 runner_own_state(runner, state), measures)
                             : STATUS_OK;
}

/* The rest of the workload's own columns. */
static enum status measure(const struct runner *runner, void *state, struct measures *measures)
{
    const struct workload *workload = runner->settings->workload;
    phase_enter(PHASE_MEASURE);
    if (runner->consumer)
        consumed_detach(state);
    return workload->measure ? workload->measure(runner->input, runner->entry->variant,
                                                 runner_own_state(runner, state), measures)
                             : STATUS_OK;
}

/* Has the workload keep the run with its row, before that is written: then a kill in between loses neither.
 */
static enum status keep(const struct runner *runner, void *state, const struct row *row)
{
    char *text;
    if (!runner->settings->workload->epochs.keep)
        return STATUS_OK;
    TRY(csv_text(row, &text));
    enum status status =
        runner->settings->workload->epochs.keep(runner->input, runner_own_state(runner, state), text);
    free(text);
    return status;
}

/* Writes the row that was kept with what the state goes on from, where --out lacks it. */
static enum status complete_rows(struct runner *runner, void *state)
{
    const struct settings *settings = runner->settings;
    const struct result none = {.work.items = 1, .bench.time.median = 1, .run_j = NAN};
    const char *kept = settings->workload->epochs.kept
                           ? settings->workload->epochs.kept(runner_own_state(runner, state))
                           : "";
    bool added = false;
    if (!*kept || !settings->out)
        return STATUS_OK;
    struct row like = {0};
    enum status status = runner_row(runner, &none, NULL, &like);
    if (status == STATUS_OK)
        status = csv_complete(settings->out, &like, kept, &added);
    row_free(&like);
    if (status == STATUS_USAGE) {
        status_warn("%s: the last row before this run cannot be looked for: %s", settings->out,
                    status_text());
        return STATUS_OK;
    }
    if (added)
        status_say("%s: the last row before this run was missing and is there now", settings->out);
    return status;
}

/* What the GPU was seen to do during the timed runs, and the instructions that a CPU used. Energy
 * used between runs belongs to no run: where that time is more than a tenth, the energy of a run is unknown.
 */
static void describe_machine(const struct runner *runner, struct result *result)
{
    const struct gpu_watched *watched = &runner->watched;
    const struct bench *bench = &result->bench;
    const struct variant *variant = runner->entry->variant;
    bool alone = runner->sharers < 2 && bench->timed_s >= 0.9 * bench->span_s;
    result->throttle_reasons = watched->throttle_reasons;
    result->sm_clock_mhz = watched->sm_clock_mhz;
    result->mem_clock_mhz = watched->mem_clock_mhz;
    result->run_j = alone ? watched->power_w * bench->span_s / (double)bench->count : NAN;
    result->instruction_set = variant->instruction_set ? variant->instruction_set() : "";
}

/* After the timing: verifies what was timed, then makes the rows and publishes them. `all`: the run of all
 * ranks, where there are several. */
static enum status record(struct runner *runner, void *state, const struct bench *all, struct result *result)
{
    phase_enter(PHASE_MEASURE);
    describe_machine(runner, result);
    result->roofline = runner_roofline(runner, &result->work);
    struct measures measures = {.columns = runner->settings->workload->measures};
    struct row row = {0};
    TRY(comm_agree(observe(runner, state, result, &measures)));
    TRY(runner_verify_timed(runner, state, result));
    enum status status = measure(runner, state, &measures);
    if (status == STATUS_OK)
        status = runner_compare(runner, false, result);
    if (status == STATUS_OK)
        status = runner_row(runner, result, &measures, &row);
    if (status == STATUS_OK)
        status = keep(runner, state, &row);
    status = comm_agree(status);
    if (status == STATUS_OK && runner->partition.ranks > 1)
        status = runner_publish_ranks(runner, &row, result, all);
    else if (status == STATUS_OK) {
        struct result single = *result;
        const struct rank_facts facts = runner_facts(runner, result);
        single.rows = &row;
        single.row_count = 1;
        status = runner_publish(runner, &single, single.bench.samples, &facts);
    }
    row_free(&row);
    if (status == STATUS_OK)
        runner_warn_of_few_looks(runner, result->bench.wall_s);
    return status;
}

/* Takes samples, while the GPU is watched where there is one at work. */
static enum status take_samples(struct runner *runner, void *state, const struct bench_limits *limits,
                                struct bench *bench, struct bench_together *together)
{
    struct gpu_watch *watch;
    bool on_gpu = runner_on_gpu(runner) || runner->consumer;
    TRY(gpu_watch_begin(on_gpu ? runner->device.pci_bus_id : "", &watch));
    enum status status = bench_measure(runner_variant(runner), state, limits,
                                       runner->settings->workload->epochs.more ? NULL : runner_show_progress,
                                       runner, bench, runner->partition.ranks > 1 ? together : NULL);
    gpu_watch_end(watch, &runner->watched);
    return status;
}

/* Takes the samples that `limits` say, and makes a row of them. */
static enum status time_row(struct runner *runner, void *state, const struct bench_limits *limits,
                            struct result *result)
{
    struct bench_together together = {.vote = comm_vote};
    bench_free(&result->bench);
    enum status status = comm_agree(take_samples(runner, state, limits, &result->bench, &together));
    /* Runs may have delivered less than was known before them. */
    result->work = runner->settings->workload->work(runner->input, runner->entry->variant);
    if (status == STATUS_OK)
        status = record(runner, state, &together.bench, result);
    bench_free(&together.bench);
    return status;
}

static enum status time_variant(struct runner *runner, void *state, struct result *result)
{
    static const struct bench_limits one_run = {.min_samples = 1, .max_median_error = HUGE_VAL};
    const struct workload *workload = runner->settings->workload;
    if (!workload->epochs.more)
        return time_row(runner, state, &runner->settings->limits, result);
    TRY(complete_rows(runner, state));
    uint64_t runs = 0;
    for (; workload->epochs.more(runner->input, state); runs++) {
        if (runs > 0)
            env_time(runner->time_utc);
        TRY(time_row(runner, state, &one_run, result));
    }
    return workload->epochs.end ? workload->epochs.end(runner->input, state, runs) : STATUS_OK;
}

static enum status check_and_time(struct runner *runner, void *state, struct result *result)
{
    TRY(runner_check(runner, state, result));
    return time_variant(runner, state, result);
}

static enum status set_up(struct runner *runner, void **state)
{
    runner_show_phase(runner, "setting up");
    phase_enter(PHASE_SETUP);
    const struct consumed_job job = {runner->settings->workload, runner->entry->variant, runner->input,
                                     runner->consumer};
    return runner_variant(runner)->setup(&runner->settings->resources,
                                         runner->consumer ? &job : runner->input, state);
}

/* What rank 0 takes for the work of one rank (weak scaling), or of all (strong), while the others sleep.
 * Memory may be too short for the work of all: then there is a warning, and no efficiency. */
static enum status measure_alone(struct runner *runner, double *alone_s)
{
    const struct variant *variant = runner_variant(runner);
    const struct bench_limits *limits = &runner->settings->limits;
    void *state;
    if (set_up(runner, &state) != STATUS_OK) {
        status_warn("%s: no efficiency, as rank 0 cannot make the batch alone: %s", runner->entry->name,
                    status_text());
        return STATUS_OK;
    }
    struct bench bench = {0};
    enum status status = bench_measure(variant, state, limits, runner_show_progress, runner, &bench, NULL);
    *alone_s = bench.time.median;
    bench_free(&bench);
    phase_enter(PHASE_TEARDOWN);
    variant->teardown(state);
    return status;
}

static enum status time_alone(struct runner *runner)
{
    const struct partition alone = {.ranks = 1};
    runner->alone_s = 0;
    enum status status = STATUS_OK;
    if (runner_leads(runner)) {
        const struct settings *settings = runner->settings;
        const struct workload *workload = settings->workload;
        env_share_memory(1);
        status = workload->repartition(runner->input, settings->parameters, &alone);
        if (status == STATUS_OK)
            status = measure_alone(runner, &runner->alone_s);
        if (status == STATUS_OK)
            status = workload->repartition(runner->input, settings->parameters, &runner->partition);
        env_share_memory(comm_local_size());
        phase_enter(PHASE_IDLE);
    }
    return comm_agree(status);
}

typedef enum status variant_job(struct runner *runner, void *state, struct result *result);

/* Sets the variant up for a job, and has that watched. */
static enum status with_state(struct runner *runner, variant_job *job, struct result *result)
{
    void *state;
    range_push(result->variant);
    enum status watched = monitor_begin(runner->monitor, result->variant);
    enum status own = watched == STATUS_OK ? set_up(runner, &state) : watched, status = comm_agree(own);
    if (status == STATUS_OK)
        status = job(runner, state, result);
    if (own == STATUS_OK) {
        phase_enter(PHASE_TEARDOWN);
        runner_variant(runner)->teardown(state);
    }
    phase_enter(PHASE_IDLE);
    range_pop();
    runner_show_phase(runner, NULL);
    /* After any other failure the runs end, and monitor_stop() writes the rest. */
    if (status == STATUS_OK || status == STATUS_WRONG)
        TRY(monitor_end(runner->monitor));
    return status;
}

/* What is wrong on any rank is not worth the time that rank 0 takes alone, for which all ranks give up what
 * they have set up. */
static enum status run_ranks(struct runner *runner, struct result *result)
{
    TRY(comm_agree(with_state(runner, runner_check, result)));
    result->runs_before = 0; /* in the next state there were none */
    TRY(time_alone(runner));
    return with_state(runner, time_variant, result);
}

static enum status run_variant(struct runner *runner, const struct variant_entry *entry)
{
    runner->entry = entry;
    memcpy(runner->time_utc, runner->env.time_utc, sizeof runner->time_utc);
    const struct workload *workload = runner->settings->workload;
    struct result result = {.variant = entry->name,
                            .cache = workload->cache ? workload->cache(runner->input) : NULL,
                            .wait_share = -1,
                            .work = workload->work(runner->input, entry->variant)};
    enum status status = runner->partition.ranks > 1 ? run_ranks(runner, &result)
                                                     : with_state(runner, check_and_time, &result);
    bench_free(&result.bench);
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
        enum status status = comm_agree(can_run(runner, entry)); /* one list for all ranks */
        if (status == STATUS_OK)
            settings->variants[kept++] = entry;
        else if (!all)
            return refuse(settings, entry, status);
        else if (runner_leads(runner))
            fprintf(stderr, "fdsl-bench: skipping %s: %s\n", entry->name, status_text());
    }
    settings->variant_count = kept;
    return kept ? STATUS_OK : status_set(STATUS_UNAVAILABLE, "no variant can run here; see --list");
}

/* A variant of the workload that this build has, as the columns of all are the same; NULL: none. */
static const struct variant_entry *built_variant(const struct settings *settings)
{
    for (size_t i = 0; i < variant_count; i++)
        if (strcmp(variant_table[i].workload, settings->workload->name) == 0 && variant_table[i].variant)
            return &variant_table[i];
    return NULL;
}

/* Finds out before anything is measured whether the rows can be written where the user wants them. */
static enum status check_outputs(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct result none = {.work.items = 1, .bench.time.median = 1, .run_j = NAN};
    const struct sample no_sample = {0};
    struct row row = {0}, sample_row = {0};
    runner->entry = built_variant(settings);
    if (!runner->entry)
        return STATUS_OK;
    enum status status = runner_row(runner, &none, NULL, &row);
    if (status == STATUS_OK)
        status = runner_sample_row(&row, &no_sample, 0, &sample_row);
    if (status == STATUS_OK && settings->out)
        status = csv_check(settings->out, &row);
    if (status == STATUS_OK && settings->samples)
        status = csv_check(settings->samples, &sample_row);
    if (status == STATUS_OK && settings->monitor)
        status = monitor_check(settings->monitor);
    row_free(&row);
    row_free(&sample_row);
    return status;
}

static enum status describe_device(struct runner *runner)
{
    bool computes = settings_compute(runner->settings);
    if (!runner_any_on_gpu(runner->settings))
        return STATUS_OK;
    nvml_driver_version(runner->driver, sizeof runner->driver);
    enum status status = device_describe(runner->settings->resources.device, &runner->device);
    return status != STATUS_OK && computes ? status_prefix(status, "--compute") : status;
}

static enum status run_variants(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    size_t wrong = 0;
    for (size_t i = 0; i < settings->variant_count; i++) {
        enum status status = comm_agree(run_variant(runner, settings->variants[i]));
        if (status == STATUS_WRONG) {
            status_prefix(status, "%s", settings->variants[i]->name);
            status_print();
            wrong++;
        } else if (status != STATUS_OK)
            return status;
    }
    return wrong == 0 ? STATUS_OK
                      : status_set(STATUS_WRONG, "%zu of %zu variants gave wrong results", wrong,
                                   settings->variant_count);
}

static enum status run_all(struct runner *runner)
{
    const struct variant_entry *baseline = runner->baseline.entry;
    enum status status =
        runner_leads(runner)
            ? report_begin(runner->settings, baseline ? baseline->name : NULL, &runner->report)
            : STATUS_OK;
    TRY(comm_agree(status));
    status = run_variants(runner);
    if (!runner_leads(runner))
        return status;
    char failure[1024];
    snprintf(failure, sizeof failure, "%s", status_text());
    enum status ended = report_end(runner->report);
    return status == STATUS_OK ? ended : status_set(status, "%s", failure);
}

/* All of them, with what consumes their batches where that is wanted. */
static enum status run_consumed(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct compute *compute = settings_compute(settings);
    if (!compute)
        return run_all(runner);
    TRY(comm_agree(runner->sharers > 1
                       ? status_set(STATUS_USAGE,
                                    "--compute: %d ranks share a GPU, so a step would not have it for "
                                    "itself; start one rank a GPU",
                                    runner->sharers)
                       : STATUS_OK));
    enum status status =
        comm_agree(consumer_open(settings->resources.device, compute->step_s,
                                 compute_learns(compute) ? &compute->task : NULL, &runner->consumer));
    if (status == STATUS_OK)
        status = run_all(runner);
    consumer_close(runner->consumer);
    runner->consumer = NULL;
    return status;
}

/* All of them, watched where asked. */
static enum status run_watched(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct device_info *device = &runner->device;
    if (!settings->monitor)
        return run_consumed(runner);
    const struct monitor_subject subject = {.env = &runner->env,
                                            .rank = (uint64_t)comm_rank(),
                                            .device = *device->name ? device->name : runner->env.cpu_model,
                                            .pci_bus_id = device->pci_bus_id};
    TRY(comm_agree(monitor_open(settings->monitor, settings->monitor_period_ms, &subject, &runner->monitor)));
    enum status status = run_consumed(runner);
    char failure[1024];
    snprintf(failure, sizeof failure, "%s", status_text());
    enum status written = monitor_stop(runner->monitor), shown = STATUS_OK;
    if (settings->format == FORMAT_TABLE && comm_rank() == 0)
        shown = report_monitor(runner->monitor);
    monitor_free(runner->monitor);
    if (status != STATUS_OK)
        return status_set(status, "%s", failure);
    return written == STATUS_OK ? shown : written;
}

/* What is found out before anything is measured. */
static enum status prepare(struct runner *runner)
{
    env_capture(&runner->env);
    TRY(comm_agree(runner_leads(runner) ? check_outputs(runner) : STATUS_OK));
    TRY(keep_runnable(runner));
    TRY(runner_choose_baseline(runner));
    return describe_device(runner);
}

/* What needs an agreement before the first variant; runner->input is to be closed, also after a failure. */
static enum status begin(struct runner *runner)
{
    struct settings *settings = runner->settings;
    double cores;
    /* Before the options are compared, as --best-gpu may choose another device on each rank. */
    TRY(comm_agree(runner_check_no_device(settings, runner->partition.ranks)));
    TRY(runner_check_alike(settings));
    TRY(comm_agree(runner_take_scaling(runner)));
    env_share_memory(comm_local_size());
    TRY(runner_take_cores(settings, &cores));
    runner_take_device(settings);
    TRY(comm_agree(settings->workload->open(&settings->options, settings->parameters, &runner->partition,
                                            &runner->input)));
    TRY(runner_check_data(runner));
    TRY(comm_agree(prepare(runner)));
    /* One run has one time, to know its rows by, the monitor's among them. */
    TRY(comm_spread(runner->env.time_utc, sizeof runner->env.time_utc));
    runner_warn_about_cores(settings, cores);
    if (runner->partition.ranks == 1 && runner->partition.strong &&
        options_given(&settings->options, "scaling"))
        status_warn("--scaling strong changes nothing with one rank; start more with: mpirun --bind-to none "
                    "-n N");
    return runner_count_sharers(runner);
}

enum status runner_run(struct settings *settings)
{
    struct runner runner = {.settings = settings,
                            .partition = {.rank = (uint64_t)comm_rank(),
                                          .ranks = settings->ranks ? settings->ranks : (uint64_t)comm_size()},
                            .progress = status_shows_progress()};
    enum status status = begin(&runner);
    if (status == STATUS_OK && !settings->dry_run)
        status = run_watched(&runner);
    runner_free_baseline(&runner);
    if (runner.input)
        settings->workload->close(runner.input);
    return comm_agree(status);
}
