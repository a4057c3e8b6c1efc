/* Shows progress on a terminal while a variant is set up, verified and timed. Also composes the message that
 * is printed if a signal ends the run. */
#include <stdio.h>
#include <string.h>

#include "core/file.h"
#include "core/text.h"
#include "run/runner_parts.h"

/* Writes the prefix of a progress line: "[2/6] " with several combinations, else "". Returns `text`. */
static const char *line_start(const struct runner *runner, char *text, size_t size)
{
    size_t combinations = axes_combinations(&runner->settings->axes);
    text[0] = '\0';
    if (combinations > 1)
        snprintf(text, size, "[%zu/%zu] ", runner->settings->combination + 1, combinations);
    return text;
}

void runner_show_progress(void *context, size_t samples, double elapsed_s, double max_time_s)
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

void runner_show_phase(const struct runner *runner, const char *phase)
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

void runner_say_what_is_kept(const struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    const char *folder = workload->epochs.folder ? workload->epochs.folder(runner->input) : NULL;
    char rows[512], remedy[600];
    if (axes_combinations(&settings->axes) > 1)
        return; /* runner_axes.c sets the message */
    describe_rows(runner, rows, sizeof rows);
    describe_remedy(runner, remedy, sizeof remedy);
    if (folder && runner->checkpointed)
        file_say_on_signal(
            "kept: %s; the latest checkpoint is in %s; to continue, repeat the same command with --resume",
            rows, folder);
    else if (folder)
        file_say_on_signal(
            "kept: %s; this run has not finished an epoch; to continue from the latest checkpoint in "
            "%s, if it has one, repeat the same command with --resume",
            rows, folder);
    else if (workload->epochs.more)
        file_say_on_signal("kept: %s; no epochs, because --checkpoint DIR was not given; to start again, %s",
                           rows, remedy);
    else
        file_say_on_signal("kept: %s; to continue, %s", rows, remedy);
}
