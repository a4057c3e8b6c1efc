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
static void show_unwritten(const char *path, const struct result *result)
{
    status_say("%s: these rows could not be appended:", path);
    csv_write_header(stderr, result->rows);
    for (size_t i = 0; i < result->row_count; i++)
        csv_write_row(stderr, &result->rows[i]);
}

/* Lets the workload save its state together with the rows, before the rows are written. If the program is
 * killed in between, --resume restores both. */
static enum status keep(struct runner *runner, void *state, const struct result *result)
{
    char *text;
    if (!runner->settings->workload->epochs.keep)
        return STATUS_OK;
    TRY(csv_text(result->rows, result->row_count, &text));
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
                           const struct sample *samples, const struct rank_facts *facts)
{
    const struct settings *settings = runner->settings;
    runner_show_phase(runner, NULL);
    TRY(keep(runner, state, result));
    enum status recorded = STATUS_OK;
    file_hold_signals(); /* a signal now would lose the rows */
    if (settings->out)
        recorded = csv_append(settings->out, result->rows, result->row_count);
    if (recorded != STATUS_OK)
        show_unwritten(settings->out, result);
    else {
        runner->rows_kept += settings->out ? result->row_count : 0;
        runner->published = !settings->workload->epochs.more;
        runner_say_what_is_kept(runner);
    }
    if (recorded == STATUS_OK && settings->samples)
        recorded = runner_append_samples(settings->samples, result->rows, (size_t)runner->partition.ranks,
                                         samples, result->bench.count);
    char reason[1024];
    snprintf(reason, sizeof reason, "%s", status_text());
    enum status shown = report_add(runner->report, result);
    file_release_signals();
    runner_warn(runner, result, facts);
    return recorded == STATUS_OK ? shown : status_set(recorded, "%s", reason);
}

struct rank_facts runner_facts(const struct runner *runner, const struct result *result)
{
    struct rank_facts facts = {.items = result->work.items,
                               .bytes = result->work.bytes,
                               .roofline = result->roofline,
                               .sharers = runner_on_gpu(runner) ? runner->sharers : 1,
                               .median_s = result->bench.time.median,
                               .throttle_reasons = result->throttle_reasons,
                               .run_j = result->run_j};
    runner_cpu_use(runner, &result->bench, &facts.cpu_share, &facts.preempted_per_s);
    return facts;
}

/* Adds up the facts of all ranks into `total`, which already has the timing of all ranks. */
static void add_up(const struct runner *runner, const struct rank_facts *facts, struct result *total)
{
    double ranks = (double)runner->partition.ranks, slowest_s = 0, mean_s = 0;
    total->work = (struct work){0};
    total->roofline = ranks_roofline(facts, runner->partition.ranks);
    total->sm_clock_mhz = total->mem_clock_mhz = -1; /* unknown; ranks_combine() sets these columns */
    total->run_j = 0;
    for (uint64_t i = 0; i < runner->partition.ranks; i++) {
        total->work.items += facts[i].items;
        total->work.bytes += facts[i].bytes;
        total->throttle_reasons |= facts[i].throttle_reasons;
        total->run_j += facts[i].run_j;
        slowest_s = fmax(slowest_s, facts[i].median_s);
        mean_s += facts[i].median_s / ranks;
    }
    if (runner->settings->workload->ranks.joint) {
        total->work.items = facts[0].items;
        total->work.bytes = facts[0].bytes;
    }
    double median_s = total->bench.time.median;
    total->imbalance = slowest_s / mean_s;
    total->efficiency = ranks_efficiency(&runner->partition, runner->alone_s, median_s);
}

/* Sets the measures of the combined row that follow from its median time. */
static void set_rates(const struct runner *runner, const struct result *total, struct row *all)
{
    const struct workload *workload = runner->settings->workload;
    struct measures rates = {.columns = workload->measures};
    workload->rates(runner->input, total->bench.time.median, &rates);
    for (size_t i = 0; workload->measures[i].column; i++)
        if (*rates.texts[i])
            row_set(all, workload->measures[i].column, rates.texts[i]);
}

/* Lets the workload check the measures of the combined row. */
static enum status check_total(const struct runner *runner, const struct row *all)
{
    const struct workload *workload = runner->settings->workload;
    struct measures total = {.columns = workload->measures};
    for (size_t i = 0; workload->measures[i].column; i++)
        measures_put(&total, workload->measures[i].column, "%s", row_get(all, workload->measures[i].column));
    return workload->ranks.check_total(runner->input, &total);
}

/* On rank 0: adds the combined row (rank=all) to the rows of the ranks and publishes them. */
static enum status publish_together(struct runner *runner, void *state, const struct row *rows,
                                    const struct rank_facts *facts, const struct sample *samples,
                                    struct result *total)
{
    size_t ranks = (size_t)runner->partition.ranks;
    add_up(runner, facts, total);
    CLOSED_BY(row_free) struct row all = {0};
    FREED struct row *every = calloc(ranks + 1, sizeof *every); /* shallow copies of the rows, in one array */
    TRY(runner_compare(runner, true, total));
    TRY(runner_row(runner, total, NULL, &all));
    ranks_combine(rows, (int)ranks, runner->settings->workload->measures, &all);
    if (runner->settings->workload->rates)
        set_rates(runner, total, &all);
    TRY(row_check(&all));
    if (runner->settings->workload->ranks.check_total)
        TRY(check_total(runner, &all));
    TRY(ALLOCATED(every, "out of memory for the rows of %zu ranks", ranks));
    memcpy(every, rows, ranks * sizeof *rows);
    every[ranks] = all;
    total->rows = every;
    total->row_count = ranks + 1;
    return runner_publish(runner, state, total, samples, facts);
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
