/* Progress on a terminal while a variant is verified, warmed up and timed. */
#include <stdio.h>

#include "core/timer.h"
#include "run/runner_parts.h"

#define PROGRESS_S 0.1 /* minimum time between two updates */

/* Begins a new line of progress: with several combinations, "[2/6] ". */
static void begin_line(const struct runner *runner)
{
    size_t combinations = axes_combinations(&runner->settings->axes);
    fputs("\r\033[K", stderr);
    if (combinations > 1)
        fprintf(stderr, "[%zu/%zu] ", runner->settings->combination + 1, combinations);
}

void runner_show_progress(void *context, size_t samples, double elapsed_s, double max_time_s)
{
    struct runner *runner = context;
    double now_s = timer_now_s();
    if (!runner->progress || now_s - runner->shown_s < PROGRESS_S)
        return;
    runner->shown_s = now_s;
    begin_line(runner);
    fprintf(stderr, "%s: sample %zu", runner->entry->name, samples);
    if (runner->settings->loops)
        fprintf(stderr, " of %llu, %.1f s", (unsigned long long)runner->settings->loops, elapsed_s);
    else
        fprintf(stderr, ", %.1f s of at most %g s", elapsed_s, max_time_s);
    fflush(stderr);
}

void runner_show_phase(const struct runner *runner, const char *phase)
{
    if (runner->progress && phase) {
        begin_line(runner);
        fprintf(stderr, "%s: %s", runner->entry->name, phase);
    } else if (runner->progress)
        fputs("\r\033[K", stderr);
}
