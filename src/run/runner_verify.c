/* Verification of a variant's results: run 0 before timing, and two of the timed runs afterwards. */
#include <stdio.h>

#include "core/chance.h"
#include "core/phase.h"
#include "machine/comm.h"
#include "run/consumed.h"
#include "run/runner_parts.h"

const struct variant *runner_variant(const struct runner *runner)
{
    return runner->consumer ? &consumed_variant : runner->entry->variant;
}

void *runner_own_state(const struct runner *runner, void *state)
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
    enum status status = variant_run(runner_variant(runner), state, number, &unused);
    if (status == STATUS_OK)
        status = runner->settings->workload->verify(runner->input, runner->entry->variant,
                                                    runner_own_state(runner, state), number, wrong);
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
    runner_show_phase(runner, NULL);
    result->wrong = wrong;
    if (runner_leads(runner))
        TRY(report_wrong(runner, result));
    char what[128];
    if (workload->checks.item)
        snprintf(what, sizeof what, "%llu %s", (unsigned long long)wrong, workload->checks.item);
    else
        snprintf(what, sizeof what, "%llu of %.0f %s", (unsigned long long)wrong, result->work.items,
                 workload->item);
    if (workload->checks.verdict)
        workload->checks.verdict(runner->input, runner_own_state(runner, state), what, sizeof what);
    return status_set(STATUS_WRONG, "%s%s are wrong; the time is not recorded", which, what);
}

/* ---- Before the timing ---- */

/* Performs run 0. With --verify, performs run 1 first and verifies run 0 afterwards. Verification then
 * detects any result of run 1 that run 0 did not overwrite. For workloads with epochs, performs no run,
 * because each run is a row. */
static enum status make_first(struct runner *runner, void *state, struct result *result)
{
    const struct settings *settings = runner->settings;
    const struct variant *variant = runner_variant(runner);
    struct run_time unused;
    bool repeats = !settings->workload->epochs.more;
    result->runs_before = !repeats ? 0 : settings->verify ? 2 : 1;
    if (!settings->verify)
        return repeats ? variant_run(variant, state, 0, &unused) : STATUS_OK;
    result->verified = true;
    if (repeats)
        TRY(variant_run(variant, state, 1, &unused));
    runner_show_phase(runner, "verifying");
    if (repeats)
        return run_and_verify(runner, state, 0, &result->wrong);
    return settings->workload->verify(runner->input, runner->entry->variant, runner_own_state(runner, state),
                                      0, &result->wrong);
}

enum status runner_check(struct runner *runner, void *state, struct result *result)
{
    const struct settings *settings = runner->settings;
    phase_enter(PHASE_VERIFY);
    enum status status = make_first(runner, state, result);
    if (status == STATUS_OK && settings->workload->deliver)
        status = settings->workload->deliver(runner->input,
                                             settings->variant_count > 1 ? runner->entry->name : NULL,
                                             runner->entry->variant, runner_own_state(runner, state));
    TRY(comm_agree(status));
    return judge(runner, state, result, "");
}

/* ---- After the timing ---- */

/* Draws the number of a timed run other than the last, the same on all ranks. There must be at least two
 * timed runs. */
static enum status draw_run(const struct bench *bench, uint64_t *number)
{
    *number = bench->warmups + 1 + chance_below(bench->count - 1);
    return comm_spread(number, sizeof *number);
}

enum status runner_verify_timed(struct runner *runner, void *state, struct result *result)
{
    const struct bench *bench = &result->bench;
    const struct settings *settings = runner->settings;
    uint64_t last = bench->warmups + bench->count, drawn;
    char which[96];
    if (!settings->verify)
        return STATUS_OK;
    phase_enter(PHASE_VERIFY);
    runner_show_phase(runner, "verifying timed runs");
    TRY(comm_agree(settings->workload->verify(runner->input, runner->entry->variant,
                                              runner_own_state(runner, state), last, &result->wrong)));
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
