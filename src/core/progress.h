/* Shows the progress of long work on stderr: on a terminal a line that is overwritten, in a log a new line
 * every ten seconds. */
#ifndef FDSL_CORE_PROGRESS_H
#define FDSL_CORE_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>

/* Not thread-safe. With all fields zero, nothing is shown. */
struct progress {
    bool shown, terminal;
    double period_s, shown_s; /* time between two updates; time of the latest update */
};

/* Begins to show progress: every 0.1 s if status_shows_progress(). Otherwise, if `lines` is set, shows a line
 * every 10 s, or every FDSL_PROGRESS_S seconds if that environment variable is a number. Otherwise shows
 * nothing. */
void progress_begin(struct progress *progress, bool lines);

/* Whether the next update is due. */
bool progress_due(const struct progress *progress);

/* Shows a text without a line end. Call it when progress_due(). */
void progress_show(struct progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Clears the line on a terminal. */
void progress_clear(const struct progress *progress);

/* Writes a duration: "48 s", "3 min 20 s", "2 h 05 min". Returns `text`. */
const char *progress_duration(double seconds, char *text, size_t size);

#endif
