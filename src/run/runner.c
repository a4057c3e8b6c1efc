#include "run/runner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/phase.h"
#include "core/text.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/cores.h"
#include "machine/memory.h"
#include "machine/nvml.h"
#include "run/consumed.h"
#include "run/runner_parts.h"

/* ---- One variant ---- */

/* Sets the columns that describe the timed runs, before another run changes the state. With --compute, also
 * sets the columns of the training steps. */
static enum status observe(const struct runner *runner, void *state, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    if (runner->consumer)
        TRY(consumed_end(state, row));
    return workload->observe ? workload->observe(runner->input, runner->entry->variant,
                                                 runner_own_state(runner, state), row)
                             : STATUS_OK;
}

/* Sets the columns that observe() does not set. May perform more runs. */
static enum status measure(const struct runner *runner, void *state, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    phase_enter(PHASE_MEASURE);
    if (runner->consumer)
        consumed_detach(state);
    return workload->measure ? workload->measure(runner->input, runner->entry->variant,
                                                 runner_own_state(runner, state), row)
                             : STATUS_OK;
}

/* After --resume: appends to --out those rows of the checkpoint that the file does not have. */
static enum status complete_rows(struct runner *runner, void *state)
{
    const struct settings *settings = runner->settings;
    const struct row_columns *columns;
    const char *kept = settings->workload->epochs.kept
                           ? settings->workload->epochs.kept(runner_own_state(runner, state))
                           : "";
    size_t added = 0;
    if (!*kept || !settings->out || !runner_leads(runner))
        return STATUS_OK;
    CLOSED_BY(row_free) struct row like = {0};
    TRY(columns_of(settings->workload, &columns));
    row_open(&like, columns->row);
    enum status status = row_check(&like);
    if (status == STATUS_OK)
        status = csv_complete(settings->out, &like, kept, &added);
    if (status == STATUS_USAGE) {
        status_warn("%s: cannot check whether it has the last rows of the resumed run: %s", settings->out,
                    status_text());
        return STATUS_OK;
    }
    if (added)
        status_say("%s: added %zu missing row%s of the resumed run", settings->out, added,
                   added == 1 ? "" : "s");
    return status;
}

/* Sets the roofline, the throttling of the GPU and the energy per run. The energy is unknown if more than a
 * tenth of the sampling time was between runs, or if ranks share the GPU. */
static void describe_machine(const struct runner *runner, struct result *result)
{
    const struct bench *bench = &result->bench;
    bool alone = runner->sharers < 2 && bench->timed_s >= 0.9 * bench->span_s;
    result->roofline = runner_roofline(runner, &result->work);
    result->throttle_reasons = runner->watched.throttle_reasons;
    result->run_j = alone ? runner->watched.power_w * bench->span_s / (double)bench->count : NAN;
}

/* After timing: verifies timed runs if --verify is given, then builds and publishes the rows. With several
 * ranks, `all` has the timing of all ranks combined. */
static enum status record(struct runner *runner, void *state, const struct bench *all, struct result *result)
{
    const struct workload *workload = runner->settings->workload;
    const struct row_columns *columns;
    CLOSED_BY(row_free) struct row row = {0};
    phase_enter(PHASE_MEASURE);
    describe_machine(runner, result);
    TRY(comm_agree(columns_of(workload, &columns)));
    row_open(&row, columns->row);
    TRY(comm_agree(row_check(&row)));
    TRY(comm_agree(observe(runner, state, &row)));
    TRY(runner_verify_timed(runner, state, result));
    enum status status = measure(runner, state, &row);
    if (status == STATUS_OK && workload->rates)
        workload->rates(runner->input, result->bench.time.median, &row);
    if (status == STATUS_OK)
        status = runner_compare(runner, false, result, &row);
    runner_set_run(runner, result, &row);
    runner_set_result(runner, result, &row);
    status = comm_agree(status == STATUS_OK ? row_check(&row) : status);
    const struct rank_facts facts = runner_facts(runner, result);
    if (status == STATUS_OK && runner->partition.ranks > 1)
        status = runner_publish_ranks(runner, state, &row, result, all);
    else if (status == STATUS_OK)
        status = runner_publish(runner, state, result, &row, 1, result->bench.samples, &facts);
    if (status == STATUS_OK)
        runner_warn_of_few_looks(runner, result->bench.wall_s);
    return status;
}

/* Takes the samples. If a GPU is used, samples its clocks and energy at the same time. */
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

/* Takes samples within `limits` and publishes one row. */
static enum status time_row(struct runner *runner, void *state, const struct bench_limits *limits,
                            struct result *result)
{
    struct bench_together together = {.vote = comm_vote};
    bench_free(&result->bench);
    enum status status = comm_agree(take_samples(runner, state, limits, &result->bench, &together));
    /* Use the actual work: the runs may have delivered fewer items than expected. */
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
    TRY(comm_agree(complete_rows(runner, state)));
    uint64_t runs = 0;
    for (; workload->epochs.more(runner->input, state); runs++) {
        if (runs > 0)
            env_time(runner->time_utc);
        TRY(comm_spread(runner->time_utc, sizeof runner->time_utc));
        TRY(comm_agree(time_row(runner, state, &one_run, result))); /* only rank 0 publishes rows */
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

/* Times rank 0 alone while the other ranks sleep, with the work of one rank (weak scaling) or of all ranks
 * (strong scaling). If the setup fails, for example because the work of all ranks does not fit in memory,
 * warns and leaves the efficiency unknown. */
static enum status measure_alone(struct runner *runner, double *alone_s)
{
    const struct variant *variant = runner_variant(runner);
    const struct bench_limits *limits = &runner->settings->limits;
    void *state = NULL;
    enum status status = set_up(runner, &state);
    if (status == STATUS_OK) {
        struct bench bench = {0};
        status = bench_measure(variant, state, limits, runner_show_progress, runner, &bench, NULL);
        *alone_s = bench.time.median;
        bench_free(&bench);
    } else {
        status_caveat("got no efficiency, because rank 0 cannot process the batch alone",
                      "lower the work per run",
                      "%s: efficiency unknown, because rank 0 cannot process the batch alone: %s",
                      runner->entry->name, status_text());
        status = STATUS_OK;
    }
    phase_enter(PHASE_TEARDOWN);
    if (state)
        variant->teardown(state);
    return status;
}

/* Sets runner->alone_s on rank 0. While rank 0 is timed, the input is that of a run with a single rank. */
static enum status time_alone(struct runner *runner)
{
    const struct partition alone = {.ranks = 1};
    runner->alone_s = 0;
    enum status status = STATUS_OK;
    if (runner_leads(runner)) {
        const struct settings *settings = runner->settings;
        const struct workload *workload = settings->workload;
        memory_share(1);
        status = workload->repartition(runner->input, settings->parameters, &alone);
        if (status == STATUS_OK)
            status = measure_alone(runner, &runner->alone_s);
        if (status == STATUS_OK)
            status = workload->repartition(runner->input, settings->parameters, &runner->partition);
        memory_share(comm_local_size());
        phase_enter(PHASE_IDLE);
    }
    return comm_agree(status);
}

typedef enum status variant_job(struct runner *runner, void *state, struct result *result);

/* Sets up the variant, calls `job` and tears the variant down, while the monitor samples. */
static enum status with_state(struct runner *runner, variant_job *job, struct result *result)
{
    void *state = NULL;
    range_push(runner->entry->name);
    enum status status = monitor_begin(runner->monitor, runner->entry->name);
    if (status == STATUS_OK)
        status = set_up(runner, &state);
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = job(runner, state, result);
    if (state) {
        phase_enter(PHASE_TEARDOWN);
        runner_variant(runner)->teardown(state);
    }
    phase_enter(PHASE_IDLE);
    range_pop();
    runner_show_phase(runner, NULL);
    /* After any other failure, the next monitor_end() or monitor_stop() writes the remaining samples. */
    if (status == STATUS_OK || status == STATUS_WRONG)
        TRY(monitor_end(runner->monitor));
    return status;
}

/* Verifies first, because rank 0 need not be timed alone if results are wrong on any rank. All ranks tear
 * down their state before rank 0 is timed, to free memory. */
static enum status run_ranks(struct runner *runner, struct result *result)
{
    TRY(comm_agree(with_state(runner, runner_check, result)));
    result->runs_before = 0; /* the variant is set up again before it is timed */
    TRY(time_alone(runner));
    return with_state(runner, time_variant, result);
}

static enum status run_variant(struct runner *runner, const struct variant_entry *entry)
{
    runner->entry = entry;
    runner->published = runner->checkpointed = false;
    if (runner_leads(runner))
        runner_say_what_is_kept(runner);
    memcpy(runner->time_utc, runner->env.time_utc, sizeof runner->time_utc);
    const struct workload *workload = runner->settings->workload;
    struct result result = {.work = workload->work(runner->input, entry->variant)};
    /* Rank 0 is not timed alone if the workload has epochs, because epochs are not repeated, or if one rank
     * alone cannot process an item. */
    bool times_alone = runner->partition.ranks > 1 && !workload->epochs.more && !workload->ranks.joint;
    enum status status =
        times_alone ? run_ranks(runner, &result) : with_state(runner, check_and_time, &result);
    bench_free(&result.bench);
    return status;
}

/* ---- All variants ---- */

/* Returns STATUS_OK if the variant supports the parameters and can run here. Checks the parameters first,
 * because that result is the same on every machine. */
static enum status can_run(const struct runner *runner, const struct variant_entry *entry)
{
    const struct workload *workload = runner->settings->workload;
    if (entry->variant && workload->accepts)
        TRY(workload->accepts(runner->input, entry->variant));
    return variant_available(entry, &runner->settings->resources);
}

/* Returns the name of a variant of this workload that supports the parameters and can run here, or NULL.
 * Prefers the last CPU variant in the table, which is usually the fastest. */
static const char *alternative(const struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const char *name = NULL;
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        if (strcmp(entry->workload, settings->workload->name) == 0 && can_run(runner, entry) == STATUS_OK &&
            !(name && strcmp(entry->variant->platform, "cuda") == 0))
            name = entry->name;
    }
    return name;
}

/* Sets the error message for a variant that was given by name but cannot run. `status` and the current
 * message are from can_run(). */
static enum status refuse(const struct runner *runner, const struct variant_entry *entry, enum status status)
{
    if (status != STATUS_UNAVAILABLE)
        return status_prefix(status, "variant '%s' cannot run with these options", entry->name);
    char reason[512];
    snprintf(reason, sizeof reason, "%s", status_text());
    const char *other = alternative(runner);
    return status_set(status, "variant '%s' cannot run here: %s%s%s%s", entry->name, reason,
                      other ? "; '" : "", other ? other : "", other ? "' can" : "");
}

/* A variant that --variant all skips. */
struct skipped {
    const char *name;
    char *reason; /* owned; NULL after say_skipped() has named the variant */
};

/* Joins the names of the variants that were skipped for this reason. Frees their copies of the reason. */
static void join_skipped(struct skipped *skipped, size_t count, const char *reason, char *names, size_t size)
{
    for (size_t i = 0; i < count; i++)
        if (skipped[i].reason && strcmp(skipped[i].reason, reason) == 0) {
            text_join(names, size, ", ", "%s", skipped[i].name);
            free(skipped[i].reason);
            skipped[i].reason = NULL;
        }
}

/* Says in one line which variants were skipped, grouped by the reason. Does not repeat a line in later
 * combinations. Frees the reasons. */
static void say_skipped(const struct runner *runner, struct skipped *skipped, size_t count)
{
    struct settings *settings = runner->settings;
    char text[1024] = "";
    for (size_t i = 0; i < count; i++) {
        FREED char *reason = skipped[i].reason;
        char names[512] = "";
        if (!reason)
            continue;
        skipped[i].reason = NULL;
        text_join(names, sizeof names, ", ", "%s", skipped[i].name);
        join_skipped(skipped + i, count - i, reason, names, sizeof names);
        text_join(text, sizeof text, "; ", "%s (%s)", names, reason);
    }
    if (count == 0 || strstr(settings->skipped, text))
        return;
    text_join(settings->skipped, sizeof settings->skipped, "\n", "%s", text);
    if (runner->report) /* a table has begun: keep the line until its end */
        status_warn("skipping %zu variant%s: %s", count, count == 1 ? "" : "s", text);
    else
        status_say("skipping %zu variant%s: %s", count, count == 1 ? "" : "s", text);
}

/* With --variant all, removes the variants that cannot run, and says so. Without --variant all, fails at the
 * first variant that cannot run. */
static enum status keep_runnable(struct runner *runner)
{
    struct settings *settings = runner->settings;
    bool all = strcmp(settings->variant_names, "all") == 0;
    size_t kept = 0, count = 0;
    FREED struct skipped *skipped = calloc(settings->variant_count, sizeof *skipped);
    TRY(comm_agree(ALLOCATED(skipped, "out of memory for the variants")));
    for (size_t i = 0; i < settings->variant_count; i++) {
        const struct variant_entry *entry = settings->variants[i];
        enum status status = comm_agree(can_run(runner, entry)); /* all ranks must keep the same variants */
        if (status == STATUS_OK)
            settings->variants[kept++] = entry;
        else if (!all)
            return refuse(runner, entry, status);
        else
            skipped[count++] = (struct skipped){entry->name, strdup(status_text())};
    }
    say_skipped(runner, skipped, count);
    settings->variant_count = kept;
    return kept ? STATUS_OK : status_set(STATUS_UNAVAILABLE, "no variant can run here; see --list");
}

/* Checks that rows can be appended to the output files. Called before any measurement. */
static enum status check_outputs(const struct settings *settings)
{
    const struct row_columns *columns;
    CLOSED_BY(row_free) struct row row = {0}, sample = {0};
    TRY(columns_of(settings->workload, &columns));
    row_open(&row, columns->row);
    row_open(&sample, columns->sample);
    if (settings->out)
        TRY(csv_check(settings->out, &row));
    if (settings->samples)
        TRY(csv_check(settings->samples, &sample));
    return settings->monitor ? monitor_check(settings->monitor) : STATUS_OK;
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

/* With --variant all, skips variants whose setup returns STATUS_UNAVAILABLE, for example because the GPUs of
 * the ranks cannot access each other's memory. */
static enum status run_variants(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    bool all = strcmp(settings->variant_names, "all") == 0;
    size_t wrong = 0, count = 0;
    FREED struct skipped *skipped = calloc(settings->variant_count, sizeof *skipped);
    enum status status = comm_agree(ALLOCATED(skipped, "out of memory for the variants"));
    for (size_t i = 0; status == STATUS_OK && i < settings->variant_count; i++) {
        status = comm_agree(run_variant(runner, settings->variants[i]));
        if (status == STATUS_WRONG) {
            status_prefix(status, "%s", settings->variants[i]->name);
            status_print();
            wrong++;
            status = STATUS_OK;
        } else if (status == STATUS_UNAVAILABLE && all && count + 1 < settings->variant_count) {
            skipped[count++] = (struct skipped){settings->variants[i]->name, strdup(status_text())};
            status = STATUS_OK;
        }
    }
    if (skipped)
        say_skipped(runner, skipped, count);
    TRY(status);
    return wrong == 0 ? STATUS_OK
                      : status_set(STATUS_WRONG, "%zu of %zu variants gave wrong results", wrong,
                                   settings->variant_count);
}

static enum status run_all(struct runner *runner)
{
    const struct variant_entry *baseline = runner->baseline.entry;
    enum status status = STATUS_OK;
    if (runner_leads(runner) && !runner->report)
        status = report_begin(runner->settings, baseline ? baseline->name : NULL, &runner->report);
    TRY(comm_agree(status));
    return run_variants(runner);
}

/* Runs all variants, with a consumer if --compute is given. */
static enum status run_consumed(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct compute *compute = settings_compute(settings);
    if (!compute)
        return run_all(runner);
    TRY(comm_agree(runner->sharers > 1
                       ? status_set(STATUS_USAGE,
                                    "--compute: %d ranks share a GPU, but each training step needs its "
                                    "own GPU; start one rank per GPU",
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

/* Runs all variants, with the monitor if --monitor is given. */
static enum status run_watched(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct device_info *device = &runner->device;
    if (!settings->monitor)
        return run_consumed(runner);
    const struct monitor_gpu gpu = {settings->resources.device, device->name, device->pci_bus_id};
    const struct monitor_subject subject = {
        .env = &runner->env, .rank = (uint64_t)comm_rank(), .gpus = &gpu, .gpu_count = *device->name != '\0'};
    TRY(comm_agree(monitor_open(settings->monitor, settings->monitor_period_ms, &subject, &runner->monitor)));
    enum status status = run_consumed(runner);
    char failure[1024];
    snprintf(failure, sizeof failure, "%s", status_text());
    enum status written = monitor_stop(runner->monitor), shown = STATUS_OK;
    if (settings->format == FORMAT_TABLE && comm_rank() == 0)
        shown = report_monitor(runner->report, runner->monitor);
    monitor_free(runner->monitor);
    if (status != STATUS_OK)
        return status_set(status, "%s", failure);
    return written == STATUS_OK ? shown : written;
}

/* Checks and preparations before any measurement. */
static enum status prepare(struct runner *runner)
{
    env_capture(&runner->env);
    TRY(comm_agree(runner_leads(runner) ? check_outputs(runner->settings) : STATUS_OK));
    TRY(keep_runnable(runner));
    TRY(runner_choose_baseline(runner));
    return describe_device(runner);
}

/* Collective preparations before the first variant. The caller must close runner->input, even after a
 * failure. */
static enum status begin(struct runner *runner)
{
    struct settings *settings = runner->settings;
    bool first = settings->combination == 0; /* only the first combination divides the cores and warns */
    double cores = CORES_KEPT;
    TRY(comm_agree(runner_take_scaling(runner)));
    /* With --ranks, it is unknown how many ranks will share the memory of a machine. */
    memory_share(settings->ranks ? 0 : comm_local_size());
    if (first)
        TRY(runner_take_cores(settings, &cores));
    TRY(comm_agree(runner_take_device(runner)));
    bool largest = runner_wants_largest(settings); /* open() replaces the value */
    TRY(comm_agree(settings->workload->open(&settings->options, settings->parameters, &runner->partition,
                                            &runner->input)));
    TRY(runner_check_data(runner));
    TRY(comm_agree(prepare(runner)));
    if (largest)
        TRY(runner_find_batch(runner));
    /* All ranks use the start time of rank 0, which identifies the run in all CSV files. */
    TRY(comm_spread(runner->env.time_utc, sizeof runner->env.time_utc));
    if (first)
        runner_warn_about_cores(settings, cores);
    if (first)
        runner_warn_of_options(settings);
    if (first && runner->partition.ranks == 1 && runner->partition.strong &&
        options_given(&settings->options, "scaling"))
        status_warn("--scaling strong has no effect with one rank; start more with: mpirun --bind-to none "
                    "-n N");
    return runner_count_sharers(runner);
}

/* For options_print_defaults(): whether an option has an effect with these settings. */
static bool has_effect(const void *context, const char *option)
{
    const struct settings *settings = context;
    const struct workload *workload = settings->workload;
    return !workload->applies || workload->applies(settings->parameters, NULL, option);
}

/* With --dry-run: the checks of a run that need a variant. */
static enum status check_variants(const struct runner *runner)
{
    const struct settings *settings = runner->settings;
    enum status status = STATUS_OK;
    for (size_t i = 0; i < settings->variant_count && settings->workload->epochs.check; i++)
        if (status == STATUS_OK && comm_rank() == 0)
            status = settings->workload->epochs.check(runner->input, settings->variants[i]->variant,
                                                      &settings->resources);
    return comm_agree(status);
}

enum status runner_combination(struct settings *settings, struct report **report)
{
    struct runner runner = {
        .settings = settings,
        .report = *report,
        .partition = {.rank = (uint64_t)comm_rank(),
                      .ranks = settings->ranks ? settings->ranks : (uint64_t)comm_size()}};
    progress_begin(&runner.progress, false);
    enum status status = begin(&runner);
    if (status == STATUS_OK && !settings->dry_run)
        status = run_watched(&runner);
    if (status == STATUS_OK && settings->dry_run)
        status = check_variants(&runner);
    if (status == STATUS_OK && settings->dry_run && comm_rank() == 0)
        options_print_defaults(stdout, &settings->options, has_effect, settings);
    runner_free_baseline(&runner);
    if (runner.input)
        settings->workload->close(runner.input);
    free(runner.stand_ins);
    *report = runner.report;
    return comm_agree(status);
}
