/* From a result to what people see and keep of it: the row of all ranks, the table's line, the files,
 * warnings. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "core/nvml.h"
#include "core/ranks.h"
#include "core/runner_parts.h"

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

static void warn_about(const struct settings *settings, const struct result *result)
{
    char words[128];
    if (*nvml_throttle_words(result->throttle_reasons, words, sizeof words))
        status_warn("%s: the GPU's clocks were throttled (%s); cool it, raise its power limit or compare "
                    "only with runs like this one",
                    result->variant, words);
    if (settings->workload->more)
        return; /* a run that is not repeated has no spread */
    if (result->bench.count < STATS_INTERVAL_MIN)
        status_warn("%s: too few samples (%zu) to know the median's error; take at least %d with --%s",
                    result->variant, result->bench.count, STATS_INTERVAL_MIN,
                    settings->loops ? "loops" : "min-samples");
    else if (!result->bench.settled)
        status_warn("%s: after %zu samples the median is known to %.1f %% only; give it longer with "
                    "--%s, or quiet the machine",
                    result->variant, result->bench.count, 100 * result->bench.time.median_error,
                    settings->loops ? "loops" : "max-time");
    else if (result->bench.time.outliers * 10 > result->bench.count)
        status_warn("%s: %zu of %zu samples are outliers; something else is using this machine",
                    result->variant, result->bench.time.outliers, result->bench.count);
}

void runner_warn_of_few_looks(const struct runner *runner, double wall_s)
{
    const struct settings *settings = runner->settings;
    size_t looks = monitor_timed_samples(runner->monitor);
    double enough_s = 1e-3 * (double)settings->monitor_period_ms * (MONITOR_SAMPLES_MIN + 1);
    char remedy[64];
    if (!runner->monitor || looks >= MONITOR_SAMPLES_MIN || settings->workload->more)
        return;
    if (settings->loops)
        snprintf(remedy, sizeof remedy, "--loops %.0f", ceil(enough_s / wall_s));
    else
        snprintf(remedy, sizeof remedy, "--min-time %g", enough_s);
    status_warn("%s: only %zu of the samples of --monitor fell within its timed runs, and %d make a figure; "
                "give it longer with %s%s",
                runner->entry->name, looks, MONITOR_SAMPLES_MIN, remedy,
                settings->monitor_period_ms > MONITOR_PERIOD_MIN_MS ? ", or a shorter period" : "");
}

/* Prints rows that could not be appended to a file, so that they can be added to it by hand. */
static void show_unwritten(const char *path, const struct result *result)
{
    status_say("%s: these rows could not be appended:", path);
    csv_write_header(stderr, result->rows);
    for (size_t i = 0; i < result->row_count; i++)
        csv_write_row(stderr, &result->rows[i]);
}

enum status runner_publish(struct runner *runner, const struct result *result, const struct sample *samples)
{
    const struct settings *settings = runner->settings;
    runner_show_phase(runner, NULL);
    enum status recorded = STATUS_OK;
    file_hold_signals(); /* until the rows are on the disk, or at least on a screen */
    if (settings->out)
        recorded = csv_append(settings->out, result->rows, result->row_count);
    if (recorded != STATUS_OK)
        show_unwritten(settings->out, result);
    if (recorded == STATUS_OK && settings->samples)
        recorded = runner_append_samples(settings->samples, result->rows, (size_t)runner->place.ranks,
                                         samples, result->bench.count);
    char reason[1024];
    snprintf(reason, sizeof reason, "%s", status_text());
    enum status shown = report_add(runner->report, result);
    file_release_signals();
    warn_about(settings, result);
    return recorded == STATUS_OK ? shown : status_set(recorded, "%s", reason);
}

/* What all ranks did together, from what each did: `total` comes with their bench. */
static void add_up(const struct runner *runner, const struct rank_facts *facts, struct result *total)
{
    double ranks = (double)runner->place.ranks, slowest_s = 0, mean_s = 0;
    total->work = (struct work){0};
    total->roofline = (struct roofline){0};
    for (uint64_t i = 0; i < runner->place.ranks; i++) {
        total->work.items += facts[i].items;
        total->work.bytes += facts[i].bytes;
        total->throttle_reasons |= facts[i].throttle_reasons;
        slowest_s = fmax(slowest_s, facts[i].median_s);
        mean_s += facts[i].median_s / ranks;
        roofline_add(&total->roofline, &facts[i].roofline, facts[i].sharers);
    }
    double median_s = total->bench.time.median;
    total->roofline_share = total->roofline.floor_s / median_s;
    total->imbalance = slowest_s / mean_s;
    total->efficiency = runner->alone_s / (runner->place.strong ? ranks * median_s : median_s);
}

/* On rank 0: adds the row of all ranks to theirs and publishes them. */
static enum status publish_together(struct runner *runner, const struct row *rows,
                                    const struct rank_facts *facts, const struct sample *samples,
                                    struct result *total)
{
    size_t ranks = (size_t)runner->place.ranks;
    add_up(runner, facts, total);
    struct row all = {0};
    struct row *every = calloc(ranks + 1, sizeof *every); /* borrowed rows, side by side */
    enum status status = runner_row(runner, total, NULL, &all);
    ranks_combine(rows, (int)ranks, runner->settings->workload->measures, &all);
    if (status == STATUS_OK)
        status = row_check(&all);
    if (status == STATUS_OK && runner->settings->workload->check_total)
        status = runner->settings->workload->check_total(runner->input, &all);
    if (status == STATUS_OK && !every)
        status = status_set(STATUS_FAILED, "out of memory for the rows of %zu ranks", ranks);
    if (status == STATUS_OK) {
        memcpy(every, rows, ranks * sizeof *rows);
        every[ranks] = all;
        total->rows = every;
        total->row_count = ranks + 1;
        total->facts = facts;
        status = runner_publish(runner, total, samples);
    }
    free(every);
    row_free(&all);
    return status;
}

enum status runner_publish_ranks(struct runner *runner, const struct row *row, const struct result *result,
                                 const struct bench *all)
{
    const struct rank_facts mine = {result->work.items,        result->work.bytes,
                                    result->roofline,          runner_on_gpu(runner) ? runner->sharers : 1,
                                    result->bench.time.median, result->bench.time.median_error,
                                    result->bench.settled,     result->throttle_reasons};
    struct result total = *result;
    total.bench = *all;
    struct row *rows = NULL;
    struct rank_facts *facts = NULL;
    struct sample *samples = NULL;
    enum status status = ranks_gather(row, &mine, &rows, &facts);
    if (status == STATUS_OK && runner->settings->samples)
        status = ranks_gather_samples(&result->bench, &samples);
    if (status == STATUS_OK && runner_leads(runner))
        status = publish_together(runner, rows, facts, samples, &total);
    ranks_free_rows(rows);
    free(facts);
    free(samples);
    return status;
}
