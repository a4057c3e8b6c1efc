#include "core/progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/status.h"
#include "core/timer.h"

#define TERMINAL_S 0.1
#define LINES_S    10

/* Returns the time between two lines in a log, in seconds. */
static double lines_s(void)
{
    const char *text = getenv("FDSL_PROGRESS_S");
    char *end;
    double seconds = text && *text ? strtod(text, &end) : LINES_S;
    return text && *text && (*end || !(seconds >= 0)) ? LINES_S : seconds;
}

void progress_begin(struct progress *progress, bool lines)
{
    bool terminal = status_shows_progress();
    *progress = (struct progress){.shown = terminal || lines,
                                  .terminal = terminal,
                                  .period_s = terminal ? TERMINAL_S : lines_s(),
                                  .shown_s = terminal ? -HUGE_VAL : timer_now_s()};
}

bool progress_due(const struct progress *progress)
{
    return progress->shown && timer_now_s() - progress->shown_s >= progress->period_s;
}

void progress_show(struct progress *progress, const char *format, ...)
{
    va_list arguments;
    char text[512];
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    progress->shown_s = timer_now_s();
    if (progress->terminal)
        fprintf(stderr, "\r\033[K%s", text);
    else
        fprintf(stderr, "fdsl-bench: %s\n", text);
    fflush(stderr);
}

void progress_clear(const struct progress *progress)
{
    if (progress->terminal)
        fputs("\r\033[K", stderr);
}

const char *progress_duration(double seconds, char *text, size_t size)
{
    double whole = round(seconds), minutes = floor(whole / 60);
    if (whole < 60)
        snprintf(text, size, "%.0f s", whole);
    else if (minutes < 60)
        snprintf(text, size, "%.0f min %02.0f s", minutes, whole - 60 * minutes);
    else
        snprintf(text, size, "%.0f h %02.0f min", floor(minutes / 60), fmod(minutes, 60));
    return text;
}
