/* --log: a separate CSV file, with rows about the steps within the epochs. docs/train_recipe.md describes the
 * columns. */
#ifndef FDSL_TRAIN_STEP_LOG_H
#define FDSL_TRAIN_STEP_LOG_H

#include <stdint.h>

#include "core/status.h"
#include "core/variant.h"
#include "train/engine.h"

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
