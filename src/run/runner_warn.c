/* Warnings about results that may be unreliable. */
#include <math.h>
#include <stdio.h>

#include "machine/nvml.h"
#include "run/runner_parts.h"

#define CPU_SHARE_MIN   0.9  /* warn if threads got less than this share of the CPU time available to them */
#define PREEMPTED_MAX_S 10.0 /* warn above this number of involuntary context switches per second */

static void warn_of_median(const struct settings *settings, const char *variant, const struct bench *bench)
{
    const char *more = settings->loops ? "raise --loops or reduce background load"
                                       : "raise --max-time or reduce background load";
    if (bench->count < STATS_INTERVAL_MIN)
        status_caveat("took too few samples for the error of the median",
                      settings->loops ? "raise --loops" : "raise --min-samples",
                      "%s: too few samples (%zu) for the error of the median; take at least %d with --%s",
                      variant, bench->count, STATS_INTERVAL_MIN, settings->loops ? "loops" : "min-samples");
    else if (!bench->settled && isinf(bench->time.median_error))
        status_caveat("did not settle", more,
                      "%s: the error of the median is unknown: samples are correlated, so %zu of them are "
                      "worth only %.0f independent ones; %s",
                      variant, bench->count, bench->time.effective, more);
    else if (!bench->settled)
        status_caveat("did not settle", more, "%s: median uncertain by +-%.1f %% after %zu samples; %s",
                      variant, 100 * bench->time.median_error, bench->count, more);
    else if (bench->time.outliers * 10 > bench->count)
        status_caveat("had many outliers", "stop other processes on this machine",
                      "%s: %zu of %zu samples are outliers; other processes may be using this machine",
                      variant, bench->time.outliers, bench->count);
}

/* Warns if other processes used the cores, because a median can settle even on a busy machine. Describes the
 * rank that got the smallest share of its cores. */
static void warn_of_busy_cores(const struct runner *runner, const struct rank_facts *facts)
{
    bool one = runner_threads(runner) == 1;
    double share = 1, preempted = 0;
    for (uint64_t i = 0; i < runner->partition.ranks; i++)
        if (facts[i].cpu_share < share && facts[i].preempted_per_s > PREEMPTED_MAX_S) {
            share = facts[i].cpu_share;
            preempted = facts[i].preempted_per_s;
        }
    if (share < CPU_SHARE_MIN)
        status_caveat(
            "lost CPU time to other processes, so times are too long", "stop other processes",
            "%s: its thread%s got %.0f %% of the CPU time of %s and %s preempted %.0f times per second, so "
            "times are too long: stop other processes%s",
            runner->entry->name, one ? "" : "s", 100 * share, one ? "its core" : "their cores",
            one ? "was" : "were", preempted, one ? "" : ", or lower --threads");
}

void runner_warn(const struct runner *runner, const struct result *result, const struct rank_facts *facts)
{
    const struct settings *settings = runner->settings;
    char words[128];
    if (*nvml_throttle_words(result->throttle_reasons, words, sizeof words))
        status_caveat("ran while the GPU's clocks were throttled",
                      "cool the GPU, raise its power limit, or compare only with throttled runs",
                      "%s: the GPU's clocks were throttled (%s); cool the GPU, raise its power limit, or "
                      "compare only with runs that were throttled too",
                      runner->entry->name, words);
    if (!settings->workload->epochs.more) /* runs that are not repeated have no median error */
        warn_of_median(settings, runner->entry->name, &result->bench);
    warn_of_busy_cores(runner, facts);
}

void runner_warn_of_options(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    for (size_t i = 0; i < workload->option_count; i++) {
        const char *option = workload->options[i].name;
        if (options_given(&settings->options, option) && !settings_uses(settings, option) &&
            workload->applies(settings->parameters, NULL, option))
            status_warn("--%s has no effect with --variant %s and these options; drop it, or choose the "
                        "variant or the options that it needs (--help)",
                        option, settings->variant_names);
    }
}

void runner_warn_of_few_looks(const struct runner *runner, double wall_s)
{
    const struct settings *settings = runner->settings;
    size_t looks = monitor_timed_samples(runner->monitor);
    double enough_s = 1e-3 * (double)settings->monitor_period_ms * (MONITOR_SAMPLES_MIN + 1);
    char remedy[64];
    if (!runner->monitor || looks >= MONITOR_SAMPLES_MIN || settings->workload->epochs.more)
        return;
    if (settings->loops)
        snprintf(remedy, sizeof remedy, "--loops %.0f", ceil(enough_s / wall_s));
    else
        snprintf(remedy, sizeof remedy, "--min-time %g", enough_s);
    status_caveat(
        "got too few samples of --monitor",
        settings->loops ? "raise --loops" : "raise --min-time or shorten the period",
        "%s: --monitor took only %zu sample%s during the timed runs, but meaningful statistics need "
        "%d; sample longer with %s%s",
        runner->entry->name, looks, looks == 1 ? "" : "s", MONITOR_SAMPLES_MIN, remedy,
        settings->monitor_period_ms > MONITOR_PERIOD_MIN_MS ? ", or use a shorter period" : "");
}
