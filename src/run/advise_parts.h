/* Internal interface of the files that implement `advise`. No other file includes this header. */
#ifndef FDSL_RUN_ADVISE_PARTS_H
#define FDSL_RUN_ADVISE_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

/* One way to get batches, and what was measured. Unknown numbers are NaN. */
struct advice {
    const char *name; /* "shards from memory" */
    bool measured;
    char reason[512];        /* why it was not measured */
    double images_per_s;     /* without a step */
    double stall_share;      /* share of the time that a step waits; measured on a GPU, otherwise computed */
    double disk_bytes;       /* on this machine */
    double memory_bytes;     /* of buffers, on host and device, and of the page cache */
    double joules_per_image; /* of the GPU */
};

/* What is compared. */
struct advice_question {
    double step_s; /* NaN until a step was measured (--compute train) */
    uint64_t batch;
};

/* Returns the images per second that a step consumes. */
double advise_needed(const struct advice_question *question);

/* Returns the images per second that reach the step: at most those that it consumes. */
double advise_reached(const struct advice_question *question, const struct advice *advice);

/* Returns the number of the best advice, or `count` if none was measured. The best has the highest
 * advise_reached(). Among those within ADVISE_MARGIN of it, the one with the least disk and memory is best,
 * and among those with equal sizes the one with the least energy. Unknown sizes count as 0, unknown energy as
 * the most. */
#define ADVISE_MARGIN 0.03
size_t advise_best(const struct advice_question *question, const struct advice *advice, size_t count);

/* Writes the verdict, one to three sentences, to `text`. `best` is the result of advise_best(). */
void advise_verdict(const struct advice_question *question, const struct advice *advice, size_t count,
                    size_t best, char *text, size_t size);

/* A run of this program. */
struct advise_run {
    const char *folder; /* rows are appended to NAME.csv there, NAME being the workload */
    const char *workload;
    const char *const *arguments; /* NULL-terminated, without --out */
};

/* The measures of a run; NaN if unknown. */
struct advise_row {
    double items_per_s, stall_share, step_s, memory_bytes, joules_per_item;
};

/* Runs this program in a child process, and reads the row that it wrote. STATUS_UNAVAILABLE, with the last
 * line that the child printed to stderr, if it failed. STATUS_FAILED if a signal ended it, or if the row
 * cannot be read. */
enum status advise_measure(const struct advise_run *run, struct advise_row *row);

#endif
