/* Publishes results: the row of all ranks, the report on stdout, the CSV files and warnings. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "machine/nvml.h"
#include "run/ranks.h"
#include "run/runner_parts.h"

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
        runner->settings->workload->epochs.keep(runner->input, runner_own_state(runner, state), text);
    free(text);
    if (status == STATUS_OK) {
        runner->checkpointed = true;
        runner_say_what_is_kept(runner);
    }
    return status;
}

enum status runner_publish(struct runner *runner, void *state, const struct result *result,
                           const struct row *rows, size_t count, const struct sample *samples,
                           const struct rank_facts *facts)
{
    const struct settings *settings = runner->settings;
    runner_show_phase(runner, NULL);
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
        runner_say_what_is_kept(runner);
    }
    if (recorded == STATUS_OK && settings->samples)
        recorded = runner_append_samples(settings->workload, settings->samples, rows,
                                         (size_t)runner->partition.ranks, samples, result->bench.count);
    char reason[1024];
    snprintf(reason, sizeof reason, "%s", status_text());
    enum status shown = report_add(runner->report, rows, count);
    file_release_signals();
    runner_warn(runner, result, facts);
    return recorded == STATUS_OK ? shown : status_set(recorded, "%s", reason);
}

struct rank_facts runner_facts(const struct runner *runner, const struct result *result)
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
    TRY(runner_compare(runner, true, total, all));
    if (workload->rates)
        workload->rates(runner->input, total->bench.time.median, all);
    TRY(row_check(all));
    if (workload->ranks.check_total)
        TRY(workload->ranks.check_total(runner->input, all));
    return runner_publish(runner, state, total, rows, ranks + 1, samples, facts);
}

enum status runner_publish_ranks(struct runner *runner, void *state, const struct row *row,
                                 const struct result *result, const struct bench *all)
{
    const struct rank_facts mine = runner_facts(runner, result);
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
