/* How far an epoch is, shown on a terminal while it runs. */
#ifndef FDSL_TRAIN_DISPLAY_H
#define FDSL_TRAIN_DISPLAY_H

#include <stdint.h>

#include "train/engine.h"

struct display;

/* Starts a thread that shows the progress of `engine` on stderr every quarter of a second while an epoch
 * runs, and returns it: NULL where status_shows_progress() is false, or no thread can be started. The thread
 * calls only engine->progress(), which reads memory, so training makes the same calls with and without a
 * display. */
struct display *display_open(const struct engine *engine, const void *state, const struct train *train,
                             uint32_t epochs);

/* Epoch `epoch`, counted from 0, begins or ends. Neither waits nor makes a system call. NULL is allowed. */
void display_begin(struct display *display, uint32_t epoch);
void display_end(struct display *display);

/* Returns once nothing is being printed: between display_end() and the next display_begin() nothing will be.
 * NULL is allowed. */
void display_wait(struct display *display);

/* Ends the thread; before engine->close(). NULL is allowed. */
void display_close(struct display *display);

#endif
