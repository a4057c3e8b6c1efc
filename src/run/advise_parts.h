/* Internal interface of the files that implement `advise`. Only these files and their tests include this
 * header. */
#ifndef FDSL_RUN_ADVISE_PARTS_H
#define FDSL_RUN_ADVISE_PARTS_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/compute.h"
#include "core/status.h"

/* ---- The verdict (advise_verdict.c) ---- */

/* One way to get batches, and what was measured. Unknown numbers are NaN. */
struct advice {
    const char *name, *variant; /* "shards from memory", "shards-omp" */
    bool reads;                 /* reads the data set; false for generators */
    bool measured;
    char reason[512];        /* why it was not measured */
    double images_per_s;     /* delivered without a training step */
    double stall_share;      /* share of the time that a step waits; measured on a GPU, otherwise computed */
    double reached_per_s;    /* images that steps consume per second; measured on a GPU, otherwise computed */
    double disk_bytes;       /* on this machine */
    double memory_bytes;     /* buffers on host and device, and the data in the page cache */
    double joules_per_image; /* energy of the GPU */
};

/* The training step for which the ways are compared. */
struct advice_question {
    double step_s; /* duration of a step alone; NaN until a step was measured (--compute train) */
    uint64_t batch;
    uint32_t res;   /* width and height of the images */
    bool estimated; /* waits are computed, not measured, because there is no GPU */
};

/* Returns the images per second that a step consumes if it never waits. */
double advise_needed(const struct advice_question *question);

/* Computes `stall_share` and `reached_per_s` as if the training step and the production of batches did not
 * slow each other down. */
void advise_compute(const struct advice_question *question, struct advice *advice);

/* Returns the index of the best way, or `count` if no way was measured. Only ways whose `reached_per_s` is
 * within ADVISE_MARGIN of the highest are compared. The way that takes less disk and memory is better. If
 * these sizes differ by at most ADVISE_SMALL_BYTES, the way that uses less energy is better. If an energy is
 * unknown, the faster way is better. Unknown sizes count as 0. */
#define ADVISE_MARGIN      0.03
#define ADVISE_SMALL_BYTES 1e9
size_t advise_best(const struct advice *advice, size_t count);

/* Writes the verdict to `text`, as a few sentences. `best` is the result of advise_best(). */
void advise_verdict(const struct advice_question *question, const struct advice *advice, size_t count,
                    size_t best, char *text, size_t size);

/* ---- Options and the data set (advise.c, advise_set.c) ---- */

struct advise_options {
    const char *data, *out, *image, *label, *member, *cache_dir;
    uint64_t batch, out_res, device, threads, cache_bytes, subset;
    double seconds;
    struct compute compute;
    int fit, on_error, format;
    bool help;
};

/* The facts about a data set that the candidates depend on. */
struct advise_set {
    bool shards, remote; /* a remote set always has shards */
    bool coded;          /* images are JPEG or PNG files */
    uint32_t res;        /* width and height of the images that the step gets */
    uint32_t channels;   /* channels of the images that the step gets */
    uint64_t samples, bytes;
    uint32_t files, measured_files; /* shards, and how many of them are measured */
    uint64_t measured_bytes;
    char folder[PATH_MAX / 2]; /* temporary, for rows; empty if there is none */
    char data[PATH_MAX];       /* what is measured: the set, or a folder with links to some of its shards */
};

/* Opens a data set of images, finds the facts about it, and creates a temporary folder. STATUS_USAGE if the
 * first sample has no image. If local shards have more than --subset bytes, the folder receives links to the
 * first shards. Call advise_set_close(), which removes the folder, even after a failure. Until then, signals
 * that would end the program are held back (file_hold_signals()). */
enum status advise_set_open(const struct advise_options *options, struct advise_set *set);
void advise_set_close(const struct advise_set *set);

/* ---- Measurements (advise_measure.c) ---- */

/* A run of this program. */
struct advise_run {
    const char *folder; /* the run appends its row to WORKLOAD.csv in this folder */
    const char *workload;
    const char *const *arguments; /* NULL-terminated, without --out */
};

/* The measures of a run; NaN if unknown. */
struct advise_row {
    double items_per_s, memory_bytes, joules_per_item;
    double compute_ms, stall_share, step_s, busy_share; /* of the training step */
};

/* Runs this program in a child process, and reads the row that it wrote. STATUS_UNAVAILABLE if the child
 * failed; the message is the last line that the child printed to stderr. STATUS_FAILED if a signal ended the
 * child, if this program received a signal (file_signal_held()), or if the row cannot be read. */
enum status advise_measure(const struct advise_run *run, struct advise_row *row);

/* ---- Output (advise_report.c) ---- */

/* Prints the table and the verdict or, with --format csv or json, rows. STATUS_FAILED if nothing could be
 * measured. */
enum status advise_print(const struct advise_options *options, const struct advise_set *set,
                         const struct advice_question *question, const struct advice *advice, size_t count);

#endif
