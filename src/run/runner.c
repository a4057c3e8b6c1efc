/* The sequence of a run: every chosen variant is set up, verified, timed, recorded and reported. */
#include "run/runner.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/array.h"
#include "core/timer.h"
#include "core/file.h"
#include "core/phase.h"
#include "core/text.h"
#include "machine/comm.h"
#include "machine/cores.h"
#include "machine/host.h"
#include "machine/nvml.h"
#include "run/bench.h"
#include "run/report.h"
#include "run/rows.h"

/* ---- Progress, and the message after a signal ---- */

/* Writes the prefix of a progress line: "[2/6] " with several combinations, else "". Returns `text`. */
static const char *line_start(const struct runner *runner, char *text, size_t size)
{
    size_t combinations = axes_combinations(&runner->settings->axes);
    text[0] = '\0';
    if (combinations > 1)
        snprintf(text, size, "[%zu/%zu] ", runner->settings->combination + 1, combinations);
    return text;
}

/* Shows the number of samples and the elapsed time on a terminal. bench_measure() calls this function;
 * `context` is the runner. */
static void show_progress(void *context, size_t samples, double elapsed_s, double max_time_s)
{
    struct runner *runner = context;
    char limit[64], start[64];
    if (!progress_due(&runner->progress))
        return;
    if (runner->settings->loops)
        snprintf(limit, sizeof limit, " of %llu, %.1f s", (unsigned long long)runner->settings->loops,
                 elapsed_s);
    else
        snprintf(limit, sizeof limit, ", %.1f s of at most %g s", elapsed_s, max_time_s);
    progress_show(&runner->progress, "%s%s: sample %zu%s", line_start(runner, start, sizeof start),
                  runner->entry->name, samples, limit);
}

/* Shows on a terminal what the current variant is doing; NULL clears the line. */
static void show_phase(const struct runner *runner, const char *phase)
{
    char start[64];
    if (runner->progress.shown && phase)
        fprintf(stderr, "\r\033[K%s%s: %s", line_start(runner, start, sizeof start), runner->entry->name,
                phase);
    else
        progress_clear(&runner->progress);
}

/* Returns the index of the first variant that has no row yet. */
static size_t rest_begins(const struct runner *runner)
{
    size_t first = 0;
    while (runner->settings->variants[first] != runner->entry)
        first++;
    return first + runner->published;
}

/* Lists the variants from index `first` on. If the baseline has a row but other variants have none, also
 * lists the baseline and returns true: a speed-up requires both variants in the same run. The baseline is the
 * first variant. */
static bool list_rest(const struct runner *runner, size_t first, char *text, size_t size)
{
    const struct settings *settings = runner->settings;
    bool again = runner->baseline.entry && first > 0 && first < settings->variant_count;
    text[0] = '\0';
    if (again)
        text_join(text, size, ",", "%s", runner->baseline.entry->name);
    for (size_t i = first; i < settings->variant_count; i++)
        text_join(text, size, ",", "%s", settings->variants[i]->name);
    return again;
}

/* Writes a hint: which command measures the remaining variants. */
static void describe_remedy(const struct runner *runner, char *text, size_t size)
{
    char rest[512];
    size_t first = rest_begins(runner);
    bool again = list_rest(runner, first, rest, sizeof rest);
    if (runner_loses_rows(runner->settings))
        snprintf(text, size, "repeat the same command with --out FILE");
    else if (first == 0)
        snprintf(text, size, "repeat the same command");
    else if (*rest)
        snprintf(text, size, "repeat the same command with --variant %s%s%s%s", rest, again ? " (" : "",
                 again ? runner->baseline.entry->name : "", again ? " again, for the speed-up)" : "");
    else
        snprintf(text, size, "nothing is left to measure");
}

/* Writes how many rows are kept, and where. */
static void describe_rows(const struct runner *runner, char *text, size_t size)
{
    const struct settings *settings = runner->settings;
    if (settings->out)
        snprintf(text, size, "%zu new row%s in %s", runner->rows_kept, runner->rows_kept == 1 ? "" : "s",
                 settings->out);
    else if (runner_loses_rows(settings))
        snprintf(text, size, "no rows, because --format json prints them at the end");
    else
        snprintf(text, size, "no rows except those on stdout, because --out FILE was not given");
}

/* Sets the message that is printed if a signal ends the run: which rows and checkpoints are kept, and how to
 * continue. Call on rank 0 whenever this message changes. */
static void say_what_is_kept(const struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    const char *folder = workload->epochs.folder ? workload->epochs.folder(runner->input) : NULL;
    char rows[512], remedy[600];
    if (axes_combinations(&settings->axes) > 1)
        return; /* sweep.c sets the message */
    describe_rows(runner, rows, sizeof rows);
    describe_remedy(runner, remedy, sizeof remedy);
    if (settings->options.config->is_row)
        file_say_on_signal("kept: %s; the task starts again from its beginning", rows);
    else if (folder && runner->checkpointed)
        file_say_on_signal(
            "kept: %s; the latest checkpoint is in %s; to continue, repeat the same command with --resume",
            rows, folder);
    else if (folder)
        file_say_on_signal("kept: %s; this run has not finished an epoch; to continue from the latest "
                           "checkpoint in %s, if it has one, repeat the same command with --resume",
                           rows, folder);
    else if (workload->epochs.more)
        file_say_on_signal("kept: %s; no epochs, because --checkpoint DIR was not given; to start again, %s",
                           rows, remedy);
    else
        file_say_on_signal("kept: %s; to continue, %s", rows, remedy);
}

/* ---- Verification ---- */

/* Returns the variant to run. Without --compute this is the current variant; with --compute it is
 * consumed_variant, which wraps the current variant. `state` below is the state of the returned variant. */
static const struct variant *variant_to_run(const struct runner *runner)
{
    return runner->consumer ? &consumed_variant : runner->entry->variant;
}

/* Returns the state of the current variant itself, with the results of the latest run. */
static void *own_state(const struct runner *runner, void *state)
{
    return runner->consumer ? consumed_latest(state) : state;
}

/* Switches the workload's checks of each delivered item on or off, if the workload has such checks. */
static enum status check_closely(const struct runner *runner, bool closely)
{
    const struct workload *workload = runner->settings->workload;
    return workload->checks.closely ? workload->checks.closely(runner->input, closely) : STATUS_OK;
}

/* Performs run `number` and counts its wrong items. */
static enum status run_and_verify(struct runner *runner, void *state, uint64_t number, uint64_t *wrong)
{
    struct run_time unused;
    TRY(check_closely(runner, true));
    enum status status = variant_run(variant_to_run(runner), state, number, &unused);
    if (status == STATUS_OK)
        status = runner->settings->workload->verify(runner->input, runner->entry->variant,
                                                    own_state(runner, state), number, wrong);
    enum status ended = check_closely(runner, false);
    return status == STATUS_OK ? ended : status;
}

/* Adds a line without a time to the report. */
static enum status report_wrong(const struct runner *runner, const struct result *result)
{
    const struct row_columns *columns;
    CLOSED_BY(row_free) struct row row = {0};
    TRY(columns_of(runner->settings->workload, &columns));
    row_open(&row, columns->row);
    row_text(&row, "variant", runner->entry->name);
    row_count(&row, "samples", result->bench.count);
    row_real(&row, "items", result->work.items);
    row_count(&row, "wrong", result->wrong);
    TRY(row_check(&row));
    return report_add(runner->report, &row, 1);
}

/* Adds up the wrong items of all ranks. If there are any, adds a line without a time to the report and
 * returns STATUS_WRONG. The message begins with `which`, the name of the run ("" for run 0). */
static enum status judge(struct runner *runner, void *state, struct result *result, const char *which)
{
    const struct workload *workload = runner->settings->workload;
    uint64_t wrong = result->wrong;
    TRY(comm_sum(&wrong, 1));
    if (wrong == 0)
        return STATUS_OK;
    show_phase(runner, NULL);
    result->wrong = wrong;
    if (runner_leads(runner))
        TRY(report_wrong(runner, result));
    char what[1024];
    if (workload->checks.item)
        snprintf(what, sizeof what, "%llu %s", (unsigned long long)wrong, workload->checks.item);
    else
        snprintf(what, sizeof what, "%llu of %.0f %s", (unsigned long long)wrong, result->work.items,
                 workload->item);
    if (workload->checks.verdict)
        workload->checks.verdict(runner->input, own_state(runner, state), what, sizeof what);
    return status_set(STATUS_WRONG, "%s%s are wrong; the time is not recorded", which, what);
}

/* Performs run 0. With --verify, performs run 1 first and verifies run 0 afterwards. Verification then
 * detects any result of run 1 that run 0 did not overwrite. For workloads with epochs, performs no run,
 * because each run is a row. */
static enum status make_first(struct runner *runner, void *state, struct result *result)
{
    const struct settings *settings = runner->settings;
    const struct variant *variant = variant_to_run(runner);
    struct run_time unused;
    bool repeats = !settings->workload->epochs.more;
    result->runs_before = !repeats ? 0 : settings->verify ? 2 : 1;
    if (!settings->verify)
        return repeats ? variant_run(variant, state, 0, &unused) : STATUS_OK;
    result->verified = true;
    if (repeats)
        TRY(variant_run(variant, state, 1, &unused));
    show_phase(runner, "verifying");
    if (repeats)
        return run_and_verify(runner, state, 0, &result->wrong);
    return settings->workload->verify(runner->input, runner->entry->variant, own_state(runner, state), 0,
                                      &result->wrong);
}

/* Before timing: performs run 0, verifies it if --verify is given, and writes the output files that the user
 * requested. Does not perform run 0 for workloads with epochs. Collective, like comm_agree(). If results are
 * wrong, adds a line without a time to the report and returns STATUS_WRONG. */
static enum status check_before(struct runner *runner, void *state, struct result *result)
{
    const struct settings *settings = runner->settings;
    phase_enter(PHASE_VERIFY);
    enum status status = make_first(runner, state, result);
    if (status == STATUS_OK && settings->workload->deliver)
        status = settings->workload->deliver(runner->input,
                                             settings->variant_count > 1 ? runner->entry->name : NULL,
                                             runner->entry->variant, own_state(runner, state));
    TRY(comm_agree(status));
    return judge(runner, state, result, "");
}

/* Draws the number of a timed run other than the last, the same on all ranks. There must be at least two
 * timed runs. */
static enum status draw_run(const struct bench *bench, uint64_t *number)
{
    *number = bench->warmups + 1 + unpredictable_below(bench->count - 1);
    return comm_spread(number, sizeof *number);
}

/* After timing, with --verify: verifies the last timed run, then repeats and verifies another timed run,
 * chosen at random. Collective, like comm_agree(). If results are wrong, adds a line without a time to the
 * report and returns STATUS_WRONG. */
static enum status verify_timed(struct runner *runner, void *state, struct result *result)
{
    const struct bench *bench = &result->bench;
    const struct settings *settings = runner->settings;
    uint64_t last = bench->warmups + bench->count, drawn;
    char which[96];
    if (!settings->verify)
        return STATUS_OK;
    phase_enter(PHASE_VERIFY);
    show_phase(runner, "verifying timed runs");
    TRY(comm_agree(settings->workload->verify(runner->input, runner->entry->variant, own_state(runner, state),
                                              last, &result->wrong)));
    snprintf(which, sizeof which, "the last timed run, number %llu: ", (unsigned long long)last);
    TRY(judge(runner, state, result, settings->workload->epochs.more ? "the timed epoch: " : which));
    if (bench->count == 1)
        return STATUS_OK;
    TRY(draw_run(bench, &drawn));
    TRY(comm_agree(run_and_verify(runner, state, drawn, &result->wrong)));
    snprintf(which, sizeof which,
             "run %llu, drawn at random from the timed runs: ", (unsigned long long)drawn);
    return judge(runner, state, result, which);
}

/* ---- Speed-ups over the baseline ---- */

/* Returns the index of the variant with this name among the chosen variants, or settings->variant_count if it
 * is not chosen. */
static size_t find_chosen(const struct settings *settings, const char *name)
{
    size_t i = 0;
    while (i < settings->variant_count && strcmp(settings->variants[i]->name, name) != 0)
        i++;
    return i;
}

/* Chooses the baseline: --baseline or the workload's default. Moves it to the front of the variants, so that
 * its time is known when the rows of the other variants are written. STATUS_USAGE if --baseline is not a
 * chosen variant. */
static enum status choose_baseline(struct runner *runner)
{
    struct settings *settings = runner->settings;
    const char *const *names = settings->workload->baselines;
    size_t place = settings->variant_count;
    if (settings->baseline)
        place = find_chosen(settings, settings->baseline);
    for (; !settings->baseline && place == settings->variant_count && *names; names++)
        place = find_chosen(settings, *names);
    if (settings->baseline && place == settings->variant_count && !variant_find(settings->baseline))
        return variant_unknown("--baseline: ", settings->baseline);
    if (settings->baseline && place == settings->variant_count)
        return status_set(STATUS_USAGE,
                          "--baseline %s: it is not among the variants that run; add it to --variant",
                          settings->baseline);
    if (place == settings->variant_count)
        return STATUS_OK;
    const struct variant_entry *entry = settings->variants[place];
    memmove(&settings->variants[1], &settings->variants[0], place * sizeof *settings->variants);
    settings->variants[0] = runner->baseline.entry = entry;
    return STATUS_OK;
}

static void free_baseline(struct runner *runner)
{
    free(runner->baseline.own.item_s);
    free(runner->baseline.all.item_s);
}

/* Inserts a time in ascending order. */
static enum status add_time(struct baseline_times *times, double item_s)
{
    size_t i = times->count;
    TRY(ALLOCATED(array_grow(&times->item_s, times->count, sizeof *times->item_s),
                  "out of memory for the times of the baseline"));
    for (; i > 0 && times->item_s[i - 1] > item_s; i--)
        times->item_s[i] = times->item_s[i - 1];
    times->item_s[i] = item_s;
    times->count++;
    return STATUS_OK;
}

/* Sets the columns `speedup` and `baseline` from the times of the baseline on this rank, or on all ranks
 * combined if `all` is true. If the current variant is the baseline, first adds the time of `result` to these
 * times. STATUS_EXHAUSTED if memory runs out. */
static enum status compare_with_baseline(struct runner *runner, bool all, const struct result *result,
                                         struct row *row)
{
    struct baseline *baseline = &runner->baseline;
    struct baseline_times *times = all ? &baseline->all : &baseline->own;
    double item_s = result->bench.time.median / result->work.items;
    bool itself = baseline->entry == runner->entry;
    if (itself)
        TRY(add_time(times, item_s));
    if (times->count == 0)
        return STATUS_OK;
    /* The median over the baseline's rows; there may be one row per epoch. */
    row_positive(row, "speedup", itself ? 1 : stats_quantile(times->item_s, times->count, 0.5) / item_s);
    if (row_value(row, "speedup"))
        row_text(row, "baseline", baseline->entry->name);
    return STATUS_OK;
}

/* ---- --batch max ---- */

#define FIRST_BATCH 64 /* the first batch size tried, if the limits allow it */
#define BATCH_PRECISION \
    32 /* steps are 1/32 of the batch; the search ends when the interval is below two steps */
#define MEMORY_KEPT   16   /* on a CPU, 1/16 of the memory that was free before the search must stay free */
#define PLANS         3    /* of batches; the memory need not grow quite linearly */
#define PLANNED_SHARE 0.99 /* of the room: the first batch size tried, where the memory can be planned */

struct search {
    struct runner *runner;
    uint64_t kept_bytes;
    uint32_t probes;
    struct failure reason; /* of the smallest batch size that did not fit */
};

/* Returns whether the user gave --batch max. Call before the workload is opened. */
static bool wants_largest(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    return workload->largest.given && workload->largest.given(settings->parameters) == OPTION_MAX;
}

/* Returns STATUS_OK if the variant supports the input and the options. */
static enum status supports(const struct runner *runner, const struct variant *variant)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    if (workload->accepts && runner->input)
        TRY(workload->accepts(runner->input, variant));
    return workload->suits ? workload->suits(&settings->options, settings->parameters, variant) : STATUS_OK;
}

/* Tears the variant down, if it was set up. */
static void tear_down(const struct variant *variant, void *state)
{
    if (state) {
        phase_enter(PHASE_TEARDOWN);
        variant->teardown(state);
    }
    phase_enter(PHASE_IDLE);
}

/* Sets up the variant, runs one step, and tears the variant down. */
static enum status probe_batch(const struct search *search)
{
    struct runner *runner = search->runner;
    const struct workload *workload = runner->settings->workload;
    const struct variant *variant = runner->entry->variant;
    void *state = NULL;
    TRY(comm_agree(supports(runner, variant)));
    phase_enter(PHASE_SETUP);
    enum status status = comm_agree(variant->setup(&runner->settings->resources, runner->input, &state));
    if (status == STATUS_OK)
        status = workload->largest.probe(state);
    if (status == STATUS_OK && !runner_on_gpu(runner))
        status = memory_check(search->kept_bytes, "--batch max: a reserve", "lower --batch");
    status = comm_agree(status);
    tear_down(variant, state);
    return status;
}

/* Tries a batch size. The batch does not fit if memory ran out, or if the variant refuses work of this size.
 * All ranks have the same status, so all ranks decide alike. */
static enum status try_batch(struct search *search, uint64_t batch, bool *fits)
{
    struct runner *runner = search->runner;
    const struct settings *settings = runner->settings;
    char phase[96];
    snprintf(phase, sizeof phase, "--batch max: trying %" PRIu64, batch);
    show_phase(runner, phase);
    search->probes++;
    TRY(comm_agree(
        settings->workload->largest.set(runner->input, settings->parameters, &runner->partition, batch, 0)));
    enum status status = probe_batch(search);
    *fits = status == STATUS_OK;
    if (*fits)
        return STATUS_OK;
    if (status != STATUS_EXHAUSTED && status != STATUS_TOO_LARGE)
        return status_prefix(status, "--batch max, trying %" PRIu64, batch);
    search->reason = status_save(status);
    return STATUS_OK;
}

/* Plans the memory of a batch size. */
static enum status plan_batch(const struct search *search, uint64_t batch, uint64_t *needed, uint64_t *room)
{
    struct runner *runner = search->runner;
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    TRY(comm_agree(workload->largest.set(runner->input, settings->parameters, &runner->partition, batch, 0)));
    TRY(comm_agree(supports(runner, runner->entry->variant)));
    return workload->largest.plan(runner->input, runner->entry->variant, &settings->resources, needed, room);
}

/* Sets `*batch` to the batch size that fits by the plan of the memory, which grows linearly with the batch;
 * to FIRST_BATCH if the memory cannot be planned, for example because even a plan is refused. */
static enum status guess_batch(const struct search *search, uint64_t least, uint64_t most, uint64_t *batch)
{
    const uint64_t small = least > FIRST_BATCH ? least : FIRST_BATCH;
    uint64_t small_bytes, large_bytes, room;
    *batch = small;
    if (!search->runner->settings->workload->largest.plan || 2 * small > most)
        return STATUS_OK;
    uint64_t low = small, high = 2 * small;
    enum status status = plan_batch(search, low, &small_bytes, &room);
    for (int i = 0; status == STATUS_OK && i < PLANS && high != low; i++) {
        status = plan_batch(search, high, &large_bytes, &room);
        room = runner_on_gpu(search->runner) || room < search->kept_bytes ? room : room - search->kept_bytes;
        const double each = ((double)large_bytes - (double)small_bytes) / ((double)high - (double)low),
                     next = (double)high + (PLANNED_SHARE * (double)room - (double)large_bytes) / each;
        if (status != STATUS_OK || !(each > 0))
            break;
        low = high;
        small_bytes = large_bytes;
        *batch = high = next < (double)least ? least : next > (double)most ? most : (uint64_t)next;
    }
    /* If a plan is refused, the probes find the reason. */
    return status == STATUS_TOO_LARGE || status == STATUS_EXHAUSTED ? STATUS_OK : status;
}

/* Begins with the batch size of the plan, or with FIRST_BATCH. Steps up or down from there, by steps that
 * double, until a size that fits and one that does not are known; then bisects the interval. `*batch` becomes
 * the largest size that fits, or 0 if none fits. `*above` becomes the smallest size that was too large, or 0
 * if no size was too large. */
static enum status search_batch(struct search *search, uint64_t least, uint64_t most, uint64_t *batch,
                                uint64_t *above)
{
    uint64_t next, step;
    TRY(guess_batch(search, least, most, &next));
    step = next > FIRST_BATCH && next > least ? next / BATCH_PRECISION + 1 : next;
    *batch = *above = 0;
    while (*batch < most && *above != least && !(*batch && *above)) {
        bool fits;
        next = next < most ? next : most;
        TRY(try_batch(search, next, &fits));
        *(fits ? batch : above) = next;
        next = fits ? next + step : next > least + step ? next - step : least;
        step *= 2;
    }
    while (*above > 0 && *above > least) {
        uint64_t low = *batch ? *batch : least - 1,
                 unit = *batch > BATCH_PRECISION ? *batch / BATCH_PRECISION : 1;
        uint64_t steps = (*above - low) / 2 / unit;
        bool fits;
        if (steps == 0)
            break;
        TRY(try_batch(search, low + steps * unit, &fits));
        *(fits ? batch : above) = low + steps * unit;
    }
    return STATUS_OK;
}

/* Replaces --batch max by the largest batch that fits into memory. With --dry-run, only checks the options.
 * STATUS_USAGE for several variants. Collective, like comm_agree(). */
static enum status find_batch(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    struct search search = {.runner = runner, .kept_bytes = memory_available_bytes() / MEMORY_KEPT};
    uint64_t least, most, batch, above;
    if (settings->variant_count > 1)
        return status_value(STATUS_USAGE, "batch", "max",
                            ": each variant needs a different amount of memory; name one with --variant, or "
                            "give --batch a number");
    if (settings->dry_run)
        return STATUS_OK;
    workload->largest.range(runner->input, settings->parameters, &runner->partition, &least, &most);
    runner->entry = settings->variants[0];
    enum status status = search_batch(&search, least, most, &batch, &above);
    show_phase(runner, NULL);
    TRY(status);
    if (batch == 0) {
        (void)status_restore(&search.reason);
        return status_prefix(STATUS_TOO_LARGE, "--batch max: not even a batch of %" PRIu64 " fits", least);
    }
    if (above)
        status_say("largest batch: %" PRIu64 " fits, %" PRIu64 " does not (%" PRIu32 " tried)", batch, above,
                   search.probes);
    else
        status_say("largest batch: %" PRIu64 " fits; the data set is too small for more (%" PRIu32 " tried)",
                   batch, search.probes);
    return comm_agree(
        workload->largest.set(runner->input, settings->parameters, &runner->partition, batch, search.probes));
}

/* ---- --mix synth:auto ---- */

/* Measures training steps with a share of the samples that are read. */
static enum status try_share(struct runner *runner, uint32_t share, double *stall, double *step_s)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    const struct variant *variant = runner->entry->variant;
    void *state = NULL;
    char phase[96];
    snprintf(phase, sizeof phase, "--mix: trying a share of %g", (double)share / (double)workload->mix.parts);
    show_phase(runner, phase);
    TRY(comm_agree(workload->mix.set(runner->input, settings->parameters, &runner->partition, share, false)));
    TRY(comm_agree(supports(runner, variant)));
    phase_enter(PHASE_SETUP);
    enum status status = comm_agree(variant->setup(&settings->resources, runner->input, &state));
    if (status == STATUS_OK)
        status = workload->mix.probe(state, stall, step_s);
    status = comm_agree(status);
    tear_down(variant, state);
    return status;
}

/* Once a share is found, no other one is measured if that would probably take longer; until then, twice as
 * long. */
#define SHARE_SEARCH_S 25.0

/* Chooses the largest share of the samples that are read with which the steps do not wait for them, as far as
 * the time permits. All ranks have the same share, that of the slowest one, and it stays for the whole
 * training. With --dry-run, nothing is chosen. Collective. */
static enum status find_share(struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    struct share_search search = {.parts = workload->mix.parts};
    if (settings->variant_count > 1)
        return status_option(
            STATUS_USAGE, "mix",
            ": synth:auto chooses a share for one variant; name it with --variant, or give synth a weight");
    if (settings->dry_run)
        return STATUS_OK;
    runner->entry = settings->variants[0];
    const double begin_s = timer_now_s();
    double took_s = 0, last_s = 0; /* of all tries, of the last one; the same on all ranks */
    for (uint32_t share; (share = share_search_next(&search)) > 0;) {
        double stall, step_s;
        if (took_s + last_s > (share_search_found(&search) ? 1 : 2) * SHARE_SEARCH_S)
            break;
        TRY(try_share(runner, share, &stall, &step_s));
        share_search_add(&search, share, stall, step_s);
        last_s = -took_s;
        took_s = timer_now_s() - begin_s;
        TRY(comm_max(&took_s, 1));
        last_s += took_s;
        search.hurried = took_s > SHARE_SEARCH_S / 2;
    }
    show_phase(runner, NULL);
    const struct share_probe *best = share_search_best(&search);
    char other[96] = "";
    if (share_search_floor(&search) > 0)
        snprintf(other, sizeof other, "; they wait %.2g %% of it even if few samples are read",
                 100 * share_search_floor(&search));
    const uint32_t share = share_search_choice(&search);
    status_say("--mix: the share of the samples that are read is %g (%" PRIu32
               " tried; with a share of %g, steps wait for them %.2g %% of their time%s)",
               share / (double)search.parts, search.tries, best->share / (double)search.parts,
               100 * share_search_wait(&search, best), other);
    return comm_agree(
        workload->mix.set(runner->input, settings->parameters, &runner->partition, share, true));
}

/* ---- Options that the workload chooses ---- */

/* Lets the workload choose values of its options. With --dry-run, nothing is chosen. Collective. */
static enum status choose_options(struct runner *runner)
{
    struct settings *settings = runner->settings;
    const struct variant_entry *entry = settings->variants[0];
    if (settings->variant_count > 1)
        return status_set(STATUS_USAGE, "--parallel auto chooses for one variant; name it with --variant");
    if (settings->dry_run)
        return STATUS_OK;
    runner->entry = entry;
    show_phase(runner, "--parallel auto: measuring steps");
    enum status status =
        settings->workload->choice.choose(&settings->options, runner->input, settings->parameters,
                                          &runner->partition, entry->variant, &settings->resources);
    show_phase(runner, NULL);
    return status;
}

/* ---- Publishing ---- */

/* Prints rows that could not be appended to a file, so that the user can add them by hand. */
static void show_unwritten(const char *path, const struct row *rows, size_t count)
{
    status_say("%s: these rows could not be appended:", path);
    csv_write_header(stderr, rows);
    for (size_t i = 0; i < count; i++)
        csv_write_row(stderr, &rows[i]);
}

/* Lets the workload save its state together with the rows, before the rows are written. If the program is
 * killed in between, --resume restores both. */
static enum status keep(struct runner *runner, void *state, const struct row *rows, size_t count)
{
    char *text;
    if (!runner->settings->workload->epochs.keep)
        return STATUS_OK;
    TRY(csv_text(rows, count, &text));
    enum status status =
        runner->settings->workload->epochs.keep(runner->input, own_state(runner, state), text);
    free(text);
    if (status == STATUS_OK) {
        runner->checkpointed = true;
        say_what_is_kept(runner);
    }
    return status;
}

/* Lets the workload save `state` with the `count` rows of `result`. Then appends the rows to --out and the
 * samples to --samples-out, adds the result to the report, and prints warnings. If the rows cannot be
 * appended, prints them to stderr and omits the samples, but still adds the result to the report. */
static enum status publish(struct runner *runner, void *state, const struct result *result,
                           const struct row *rows, size_t count, const struct sample *samples,
                           const struct rank_facts *facts)
{
    const struct settings *settings = runner->settings;
    show_phase(runner, NULL);
    TRY(keep(runner, state, rows, count));
    enum status recorded = STATUS_OK;
    file_hold_signals(); /* a signal now would lose the rows */
    if (settings->out)
        recorded = csv_append(settings->out, rows, count);
    if (recorded != STATUS_OK)
        show_unwritten(settings->out, rows, count);
    else {
        runner->rows_kept += settings->out ? count : 0;
        runner->published = !settings->workload->epochs.more;
        say_what_is_kept(runner);
    }
    if (recorded == STATUS_OK && settings->samples)
        recorded = runner_append_samples(settings->workload, settings->samples, rows,
                                         (size_t)runner->partition.ranks, samples, result->bench.count);
    const struct failure failure = status_save(recorded);
    enum status shown = report_add(runner->report, rows, count);
    file_release_signals();
    runner_warn(runner, result, facts);
    return recorded == STATUS_OK ? shown : status_restore(&failure);
}

/* Returns the facts of this rank for ranks_gather(). */
static struct rank_facts facts_of(const struct runner *runner, const struct result *result)
{
    struct rank_facts facts = {.bytes = result->work.bytes,
                               .roofline = result->roofline,
                               .sharers = runner_on_gpu(runner) ? runner->sharers : 1,
                               .throttle_reasons = result->throttle_reasons,
                               .run_j = result->run_j};
    runner_cpu_use(runner, &result->bench, &facts.cpu_share, &facts.preempted_per_s);
    return facts;
}

/* Adds up the rows and facts of all ranks into `total`, which already has the timing of all ranks, and sets
 * the imbalance and the efficiency. */
static void add_up(const struct runner *runner, const struct row *rows, const struct rank_facts *facts,
                   struct result *total, struct row *all)
{
    uint64_t ranks = runner->partition.ranks;
    double slowest_s = 0, mean_s = 0;
    total->work = (struct work){0};
    total->roofline = ranks_roofline(facts, ranks);
    total->run_j = 0;
    for (uint64_t i = 0; i < ranks; i++) {
        double median_s = row_get_real(&rows[i], "time_median_s");
        if (i == 0 || !runner->settings->workload->ranks.joint) {
            total->work.items += row_get_real(&rows[i], "items");
            total->work.bytes += facts[i].bytes;
        }
        total->throttle_reasons |= facts[i].throttle_reasons;
        total->run_j += facts[i].run_j;
        slowest_s = fmax(slowest_s, median_s);
        mean_s += median_s / (double)ranks;
    }
    row_positive(all, "imbalance", slowest_s / mean_s);
    row_positive(all, "efficiency",
                 ranks_efficiency(&runner->partition, runner->alone_s, total->bench.time.median));
}

/* On rank 0: adds the combined row (rank=all) after the rows of the ranks and publishes them. `rows` has room
 * for it. */
static enum status publish_together(struct runner *runner, void *state, struct row *rows,
                                    const struct rank_facts *facts, const struct sample *samples,
                                    struct result *total)
{
    const struct workload *workload = runner->settings->workload;
    size_t ranks = (size_t)runner->partition.ranks;
    struct row *all = &rows[ranks];
    row_open(all, rows->columns);
    TRY(row_check(all));
    ranks_combine(rows, (int)ranks, all);
    row_text(all, "rank", "all");
    add_up(runner, rows, facts, total, all);
    runner_set_result(runner, total, all);
    TRY(compare_with_baseline(runner, true, total, all));
    if (workload->rates)
        workload->rates(runner->input, total->bench.time.median, all);
    TRY(row_check(all));
    if (workload->ranks.check_total)
        TRY(workload->ranks.check_total(runner->input, all));
    return publish(runner, state, total, rows, ranks + 1, samples, facts);
}

/* Gathers the rows of all ranks on rank 0, which publishes them. `all` has the timing of all ranks combined.
 */
static enum status publish_ranks(struct runner *runner, void *state, const struct row *row,
                                 const struct result *result, const struct bench *all)
{
    const struct rank_facts mine = facts_of(runner, result);
    struct result total = *result;
    total.bench = *all;
    struct row *rows = NULL;
    FREED struct rank_facts *facts = NULL;
    FREED struct sample *samples = NULL;
    enum status status = ranks_gather(row, &mine, &rows, &facts);
    if (status == STATUS_OK && runner->settings->samples)
        status = ranks_gather_samples(&result->bench, &samples);
    if (status == STATUS_OK && runner_leads(runner))
        status = publish_together(runner, state, rows, facts, samples, &total);
    ranks_free_rows(rows);
    return status;
}

/* ---- One variant ---- */

/* Sets the columns that describe the timed runs, before another run changes the state. With --compute, also
 * sets the columns of the training steps. */
static enum status observe(const struct runner *runner, void *state, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    if (runner->consumer)
        TRY(consumed_end(state, row));
    return workload->observe
               ? workload->observe(runner->input, runner->entry->variant, own_state(runner, state), row)
               : STATUS_OK;
}

/* Sets the columns that observe() does not set. May perform more runs. */
static enum status measure(const struct runner *runner, void *state, struct row *row)
{
    const struct workload *workload = runner->settings->workload;
    phase_enter(PHASE_MEASURE);
    if (runner->consumer)
        consumed_detach(state);
    return workload->measure
               ? workload->measure(runner->input, runner->entry->variant, own_state(runner, state), row)
               : STATUS_OK;
}

/* After --resume: appends to --out those rows of the checkpoint that the file does not have. */
static enum status complete_rows(struct runner *runner, void *state)
{
    const struct settings *settings = runner->settings;
    const struct row_columns *columns;
    const char *kept =
        settings->workload->epochs.kept ? settings->workload->epochs.kept(own_state(runner, state)) : "";
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
    TRY(verify_timed(runner, state, result));
    enum status status = measure(runner, state, &row);
    if (status == STATUS_OK && workload->rates)
        workload->rates(runner->input, result->bench.time.median, &row);
    if (status == STATUS_OK)
        status = compare_with_baseline(runner, false, result, &row);
    runner_set_run(runner, result, &row);
    runner_set_result(runner, result, &row);
    status = comm_agree(status == STATUS_OK ? row_check(&row) : status);
    const struct rank_facts facts = facts_of(runner, result);
    if (status == STATUS_OK && runner->partition.ranks > 1)
        status = publish_ranks(runner, state, &row, result, all);
    else if (status == STATUS_OK)
        status = publish(runner, state, result, &row, 1, result->bench.samples, &facts);
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
    enum status status = bench_measure(variant_to_run(runner), state, limits,
                                       runner->settings->workload->epochs.more ? NULL : show_progress, runner,
                                       bench, runner->partition.ranks > 1 ? together : NULL);
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

/* Waits for the next turn (RUNNER_TURNS). Returns false if there is none. */
static bool awaits_turn(void)
{
    const char *socket = getenv(RUNNER_TURNS);
    char turn = 0;
    ssize_t moved;
    if (!socket)
        return true;
    const int fd = atoi(socket);
    while ((moved = send(fd, &turn, 1, MSG_NOSIGNAL)) < 0 && errno == EINTR)
        ;
    if (moved < 0 && (errno == ENOTSOCK || errno == EBADF))
        return true; /* the variable is not from `advise` */
    while (moved == 1 && (moved = recv(fd, &turn, 1, 0)) < 0 && errno == EINTR)
        moved = 1;
    return moved == 1;
}

static enum status time_variant(struct runner *runner, void *state, struct result *result)
{
    static const struct bench_limits one_run = {.min_samples = 1, .max_median_error = HUGE_VAL};
    const struct workload *workload = runner->settings->workload;
    if (!workload->epochs.more)
        return time_row(runner, state, &runner->settings->limits, result);
    TRY(comm_agree(complete_rows(runner, state)));
    uint64_t runs = 0;
    for (; workload->epochs.more(runner->input, state) && (runs == 0 || awaits_turn()); runs++) {
        if (runs > 0)
            env_time(runner->time_utc);
        TRY(comm_spread(runner->time_utc, sizeof runner->time_utc));
        TRY(comm_agree(time_row(runner, state, &one_run, result))); /* only rank 0 publishes rows */
    }
    return workload->epochs.end ? workload->epochs.end(runner->input, state, runs) : STATUS_OK;
}

static enum status check_and_time(struct runner *runner, void *state, struct result *result)
{
    TRY(check_before(runner, state, result));
    return time_variant(runner, state, result);
}

static enum status set_up(struct runner *runner, void **state)
{
    show_phase(runner, "setting up");
    phase_enter(PHASE_SETUP);
    const struct consumed_job job = {runner->settings->workload, runner->entry->variant, runner->input,
                                     runner->consumer};
    return variant_to_run(runner)->setup(&runner->settings->resources,
                                         runner->consumer ? &job : runner->input, state);
}

/* Times rank 0 alone while the other ranks sleep, with the work of one rank (weak scaling) or of all ranks
 * (strong scaling). If the setup fails, for example because the work of all ranks does not fit in memory,
 * warns and leaves the efficiency unknown. */
static enum status measure_alone(struct runner *runner, double *alone_s)
{
    const struct variant *variant = variant_to_run(runner);
    const struct bench_limits *limits = &runner->settings->limits;
    void *state = NULL;
    enum status status = set_up(runner, &state);
    if (status == STATUS_OK) {
        struct bench bench = {0};
        status = bench_measure(variant, state, limits, show_progress, runner, &bench, NULL);
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
    tear_down(variant_to_run(runner), state);
    range_pop();
    show_phase(runner, NULL);
    /* After any other failure, the next monitor_end() or monitor_stop() writes the remaining samples. */
    if (status == STATUS_OK || status == STATUS_WRONG)
        TRY(monitor_end(runner->monitor));
    return status;
}

/* Verifies first, because rank 0 need not be timed alone if results are wrong on any rank. All ranks tear
 * down their state before rank 0 is timed, to free memory. */
static enum status run_ranks(struct runner *runner, struct result *result)
{
    TRY(comm_agree(with_state(runner, check_before, result)));
    result->runs_before = 0; /* the variant is set up again before it is timed */
    TRY(time_alone(runner));
    return with_state(runner, time_variant, result);
}

static enum status run_variant(struct runner *runner, const struct variant_entry *entry)
{
    runner->entry = entry;
    runner->published = runner->checkpointed = false;
    if (runner_leads(runner))
        say_what_is_kept(runner);
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
    if (entry->variant)
        TRY(supports(runner, entry->variant));
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
    const struct failure reason = status_save(status);
    const char *other = alternative(runner);
    (void)status_restore(&reason);
    status_prefix(status, "variant '%s' cannot run here", entry->name);
    return other ? status_append(status, "; '%s' can", other) : status;
}

/* A variant that --variant all skips. */
struct skipped {
    const char *name; /* NULL after say_skipped() has named the variant */
    struct failure reason;
};

/* Says in one line which variants were skipped, grouped by the reason, and with --variant auto, which one was
 * `chosen` instead (NULL: none). Does not repeat a line in later combinations. */
static void say_skipped(const struct runner *runner, struct skipped *skipped, size_t count,
                        const char *chosen)
{
    struct settings *settings = runner->settings;
    char text[1024] = "", head[128];
    if (chosen)
        snprintf(head, sizeof head, "--variant auto chose %s%s", chosen,
                 count ? "; better variants cannot run here: " : "");
    else
        snprintf(head, sizeof head, "skipping %zu variant%s: ", count, count == 1 ? "" : "s");
    for (size_t i = 0; i < count; i++) {
        char names[512] = "";
        if (!skipped[i].name)
            continue;
        for (size_t j = i; j < count; j++)
            if (skipped[j].name && failure_same(&skipped[j].reason, &skipped[i].reason)) {
                text_join(names, sizeof names, ", ", "%s", skipped[j].name);
                skipped[j].name = NULL;
            }
        text_join(text, sizeof text, "; ", "%s (%s)", names, skipped[i].reason.text);
    }
    uint64_t hash = fnv_add(fnv_add(FNV_BEGIN, head, strlen(head)), text, strlen(text));
    for (size_t i = 0; i < settings->skipped_count; i++)
        if (settings->skipped[i] == hash)
            return;
    if (count == 0 && !chosen)
        return;
    if (settings->skipped_count < COUNT_OF(settings->skipped))
        settings->skipped[settings->skipped_count++] = hash;
    if (runner->report) /* a table has begun: keep the line until its end */
        status_warn("%s%s", head, text);
    else
        status_say("%s%s", head, text);
}

/* Collective, like comm_agree(): STATUS_UNAVAILABLE if --rank-device lets a CPU variant stand in for this
 * variant on every rank. The CPU variant itself is a candidate, and has its own name in the rows. */
static enum status check_genuine(const struct runner *runner, const struct variant_entry *entry)
{
    const struct variant_entry *stand_ins = runner->stand_ins;
    double genuine = !(stand_ins && entry >= stand_ins && entry < stand_ins + runner->candidates);
    if (!runner->settings->rank_device)
        return STATUS_OK;
    TRY(comm_max(&genuine, 1));
    return genuine > 0 ? STATUS_OK : status_set(STATUS_UNAVAILABLE, "--rank-device gives a GPU to no rank");
}

/* With --variant auto: makes the first remaining candidate that can run on all ranks the only variant, and
 * says why better ones cannot. `failed` is NULL, or a better one that could not be set up. */
static enum status choose_best(struct runner *runner, const struct skipped *failed)
{
    struct settings *settings = runner->settings;
    const struct variant_entry *best = NULL;
    size_t count = 0;
    FREED struct skipped *skipped = calloc(runner->candidates + 1, sizeof *skipped);
    TRY(comm_agree(ALLOCATED(skipped, "out of memory for the variants")));
    if (failed)
        skipped[count++] = *failed;
    while (!best && runner->tried < runner->candidates) {
        const struct variant_entry *entry = settings->variants[runner->tried++];
        enum status status = comm_agree(can_run(runner, entry));
        if (status == STATUS_OK)
            status = check_genuine(runner, entry);
        if (status == STATUS_OK)
            best = entry;
        else
            skipped[count++] = (struct skipped){entry->name, status_save(status)};
    }
    say_skipped(runner, skipped, count, best ? best->name : NULL);
    settings->variants[0] = best;
    settings->variant_count = best ? 1 : 0;
    return best ? STATUS_OK : status_set(STATUS_UNAVAILABLE, "no variant can run here; see --list");
}

/* With --variant all, removes the variants that cannot run, and says so. With --variant auto, keeps only the
 * best one that can run. Otherwise fails at the first variant that cannot run. */
static enum status keep_runnable(struct runner *runner)
{
    struct settings *settings = runner->settings;
    bool all = strcmp(settings->variant_names, "all") == 0;
    if (variant_is_auto(settings->variant_names)) {
        runner->candidates = settings->variant_count;
        return choose_best(runner, NULL);
    }
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
            skipped[count++] = (struct skipped){entry->name, status_save(status)};
    }
    say_skipped(runner, skipped, count, NULL);
    settings->variant_count = kept;
    return kept ? STATUS_OK : status_set(STATUS_UNAVAILABLE, "no variant can run here; see --list");
}

/* Refuses variants that were given by name and do not support the options, before the data are read. */
static enum status refuse_unsuitable(const struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    const bool named =
        strcmp(settings->variant_names, "all") != 0 && !variant_is_auto(settings->variant_names);
    if (named && workload->suits && workload->validate)
        TRY(workload->validate(&settings->options, settings->parameters, &runner->partition));
    for (size_t i = 0; named && workload->suits && i < settings->variant_count; i++) {
        const struct variant_entry *entry = settings->variants[i];
        const enum status status =
            entry->variant ? workload->suits(&settings->options, settings->parameters, entry->variant)
                           : STATUS_OK;
        if (status != STATUS_OK)
            return refuse(runner, entry, status);
    }
    return STATUS_OK;
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
 * the ranks cannot access each other's memory. With --variant auto, runs the next best one instead. */
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
            skipped[count++] = (struct skipped){settings->variants[i]->name, status_save(status)};
            status = STATUS_OK;
        } else if (status == STATUS_UNAVAILABLE && runner->tried < runner->candidates) {
            const struct skipped failed = {settings->variants[i]->name, status_save(status)};
            status = choose_best(runner, &failed);
            i--; /* there is a new variant at this index */
        }
    }
    if (skipped)
        say_skipped(runner, skipped, count, NULL);
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
    TRY(comm_agree(runner->sharers > 1 ? status_set(STATUS_USAGE,
                                                    "--compute: %d ranks share a GPU, but each training step "
                                                    "needs its own GPU; start one rank per GPU",
                                                    runner->sharers)
                                       : STATUS_OK));
    enum status status =
        comm_agree(consumer_open(settings->resources.device, compute->step_s, &runner->consumer));
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
    const struct failure failure = status_save(status);
    enum status written = monitor_stop(runner->monitor), shown = STATUS_OK;
    if (settings->format == FORMAT_TABLE && comm_rank() == 0)
        shown = report_monitor(runner->report, runner->monitor);
    monitor_free(runner->monitor);
    if (status != STATUS_OK)
        return status_restore(&failure);
    return written == STATUS_OK ? shown : written;
}

/* Checks and preparations before any measurement. */
static enum status prepare(struct runner *runner)
{
    env_capture(&runner->env);
    TRY(comm_agree(runner_leads(runner) ? check_outputs(runner->settings) : STATUS_OK));
    TRY(keep_runnable(runner));
    TRY(choose_baseline(runner));
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
    if (first)
        TRY(gpu_others_look(
            runner_any_on_gpu(settings) || settings_compute(settings) ? settings->resources.device : -1,
            (enum gpu_others_action)settings->gpu_others_action, &settings->gpu_others));
    bool largest = wants_largest(settings); /* open() replaces the value */
    TRY(comm_agree(refuse_unsuitable(runner)));
    TRY(comm_agree(settings->workload->open(&settings->options, settings->parameters, &runner->partition,
                                            &runner->input)));
    TRY(runner_check_data(runner));
    TRY(comm_agree(prepare(runner)));
    if (largest)
        TRY(find_batch(runner));
    if (settings->workload->mix.open && settings->workload->mix.open(runner->input))
        TRY(find_share(runner));
    if (settings->workload->choice.open && settings->workload->choice.open(settings->parameters))
        TRY(choose_options(runner));
    /* All ranks use the start time of rank 0, which identifies the run in all CSV files. */
    TRY(comm_spread(runner->env.time_utc, sizeof runner->env.time_utc));
    if (first)
        runner_warn_about_cores(settings, cores);
    if (first)
        runner_warn_of_options(settings);
    if (first && runner->partition.ranks == 1 && runner->partition.strong &&
        options_given(&settings->options, "scaling"))
        status_warn(
            "--scaling strong has no effect with one rank; start more with: mpirun --bind-to none -n N");
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
    free_baseline(&runner);
    if (runner.input)
        settings->workload->close(runner.input);
    free(runner.stand_ins);
    *report = runner.report;
    return comm_agree(status);
}
