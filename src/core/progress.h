/* Shows the progress of long work on stderr: on a terminal as one line that is overwritten, in a log as new
 * lines, by default every ten seconds. */
#ifndef FDSL_CORE_PROGRESS_H
#define FDSL_CORE_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>

/* Not thread-safe. With all fields zero, nothing is shown. */
struct progress {
    bool shown, terminal;
    double period_s, shown_s; /* time between two updates; time of the latest update */
};

/* Begins to show progress. On a terminal (status_shows_progress()) updates are due every 0.1 s. In a log, if
 * `lines` is set, they are due every 10 s, or every FDSL_PROGRESS_S seconds if that environment variable is a
 * number of at least 0. Otherwise nothing is shown. */
void progress_begin(struct progress *progress, bool lines);

/* Returns whether the next update is due. */
bool progress_due(const struct progress *progress);

/* Shows a text without a line end. Call it when progress_due() returns true. */
void progress_show(struct progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Clears the line on a terminal. */
void progress_clear(const struct progress *progress);

/* Writes a duration: "48 s", "3 min 20 s", "2 h 05 min". Returns `text`. */
const char *progress_duration(double seconds, char *text, size_t size);

#endif
