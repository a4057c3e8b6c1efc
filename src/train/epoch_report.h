/* What a training run reports while an epoch runs: a line on the terminal, and the rows of --log. */
#ifndef FDSL_TRAIN_EPOCH_REPORT_H
#define FDSL_TRAIN_EPOCH_REPORT_H

#include <stdint.h>

#include "core/record.h"
#include "core/status.h"
#include "core/variant.h"
#include "train/engine.h"

/* ---- The line on the terminal ---- */

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

/* ---- --log: a separate CSV file ---- */

extern const struct column step_columns[]; /* ends with an entry whose name is NULL */

/* The values of a row. */
struct step_row {
    uint32_t epoch;                  /* counted from 1 */
    uint64_t step;                   /* steps done, counted over all epochs; at least 1 */
    uint64_t samples_seen;           /* in these steps, by all ranks */
    struct train_totals totals;      /* of all ranks, since the previous row */
    double steps_s;                  /* seconds of the steps since the previous row */
    double test_loss, test_accuracy; /* NaN: not tested */
};

struct step_log;

/* Checks that rows can be appended to the CSV file at `path`. Fails like csv_check(). Call before training.
 */
enum status step_log_check(const char *path);

/* Opens a log of an engine that trains `train`; `path` and `train` must stay valid as long as the log.
 * `ranks` is the number of ranks. Unless the run `resumes`, warns if the file has rows that readers
 * cannot tell apart from the rows of this run. STATUS_EXHAUSTED if memory runs out; for engines on a device,
 * fails like device_describe(). The caller closes the log, even after a failure. */
enum status step_log_open(const char *path, const struct engine *engine, const struct train *train,
                          const struct resources *resources, int ranks, bool resumes, struct step_log **log);

/* Appends a row; fails like csv_append(). */
enum status step_log_add(struct step_log *log, const struct step_row *step);

/* Closes a log; NULL is allowed. */
void step_log_close(struct step_log *log);

#endif
