/* Progress on a terminal while a variant is verified, warmed up and timed, and the last words of an
 * interrupted run.
 */
#include <stdio.h>
#include <string.h>

#include "core/file.h"
#include "run/runner_parts.h"

/* Writes what a line of progress begins with: with several combinations, "[2/6] ". Returns `text`. */
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

/* Lists the variants without a row. Those of --baseline are measured again, because --baseline must name one.
 */
static void list_rest(const struct runner *runner, char *text, size_t size)
{
    const struct settings *settings = runner->settings;
    bool reached = false;
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < settings->variant_count && used < size; i++) {
        const char *name = settings->variants[i]->name;
        bool current = settings->variants[i] == runner->entry;
        reached |= current;
        if ((reached && !(current && runner->published)) ||
            (settings->baseline && strcmp(name, settings->baseline) == 0))
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? "," : "", name);
    }
}

void runner_say_what_is_kept(const struct runner *runner)
{
    const struct settings *settings = runner->settings;
    const struct workload *workload = settings->workload;
    const char *folder = workload->epochs.folder ? workload->epochs.folder(runner->input) : NULL;
    if (axes_combinations(&settings->axes) > 1) /* runner_axes.c says it */
        return;
    char rows[512] = "no rows, which need --out FILE", rest[512], remedy[600];
    if (settings->out)
        snprintf(rows, sizeof rows, "%zu new row%s in %s", runner->rows_kept,
                 runner->rows_kept == 1 ? "" : "s", settings->out);
    if (folder) {
        file_say_on_signal("kept: %s, %s in %s; to go on, repeat the same command with --resume", rows,
                           runner->checkpointed ? "and the latest epoch" : "and earlier epochs, if any,",
                           folder);
        return;
    }
    list_rest(runner, rest, sizeof rest);
    snprintf(remedy, sizeof remedy,
             *rest ? "repeat the same command with --variant %s" : "nothing is left to measure", rest);
    if (workload->epochs.more)
        file_say_on_signal("kept: %s, and no epochs, which need --checkpoint DIR; to begin again, %s", rows,
                           remedy);
    else
        file_say_on_signal("kept: %s; to go on, %s", rows, remedy);
}
