/* Shows the progress of an epoch on the terminal while it runs. */
#ifndef FDSL_TRAIN_DISPLAY_H
#define FDSL_TRAIN_DISPLAY_H

#include <stdint.h>

#include "train/engine.h"

struct display;

/* Starts a thread that prints the progress of `engine` to stderr every quarter of a second while an epoch
 * runs. Returns NULL if status_shows_progress() is false or no thread can be started. Of the engine's
 * functions, the thread calls only progress(), which only reads memory. Training therefore makes the same
 * calls with and without a display. */
struct display *display_open(const struct engine *engine, const void *state, const struct train *train,
                             uint32_t epochs);

/* Mark the beginning and the end of an epoch; `epoch` counts from 0. These functions neither block nor make
 * system calls. NULL is allowed. */
void display_begin(struct display *display, uint32_t epoch);
void display_end(struct display *display);

/* Call before the first step of an epoch, and after each engine->totals(), which resets the engine's sums.
 * Passes the sums over all earlier steps of the epoch, and the seconds of the epoch so far. `display` may be
 * NULL. */
void display_pass(struct display *display, const struct train_totals *totals, double epoch_s);

/* Waits while a line is being printed. After display_end() and this function, nothing is printed until the
 * next display_begin(). NULL is allowed. */
void display_wait(struct display *display);

/* Stops the thread. Call this function before engine->close(). NULL is allowed. */
void display_close(struct display *display);

#endif
