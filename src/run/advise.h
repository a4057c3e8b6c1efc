/* fdsl-bench advise --data DIR --compute MS: measures several ways to get images, and names the best one. The
 * ways are to generate images, to read the data set from a URL, from disk or from memory, and to keep it in
 * GPU memory. With --compute train:MODEL, the trainer first measures the time of a step of the network. */
#ifndef FDSL_RUN_ADVISE_H
#define FDSL_RUN_ADVISE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "run/compare.h"

/* Measures and prints the advice; argv[0] is the word "advise". Each measurement is a run of this program in
 * a child process; if a run reports an error, the other ways are still measured. After a signal, prints the
 * advice of the finished rounds if there are at least ADVISE_ROUNDS_MIN, before the signal ends the program.
 * STATUS_USAGE for wrong options or if there is no such data set; STATUS_UNAVAILABLE if an option needs a GPU
 * that does not exist; STATUS_FAILED if no way could be measured. */
enum status advise_run(int argc, char *argv[]);

/* ---- The decision and the output, for tests ---- */

/* Where images come from, in ascending order of what a place needs on this machine: nothing is stored, the
 * set on disk, the set also in the page cache, the set also in GPU memory. */
enum advise_place { ADVISE_GENERATED, ADVISE_REMOTE, ADVISE_DISK, ADVISE_MEMORY, ADVISE_GPU_MEMORY };

#define ADVISE_ROUNDS_MIN 3 /* no decision after fewer rounds */
#define ADVISE_ROUNDS_MAX 100

/* One way to get batches, and what was measured. Unknown numbers are NaN. */
struct advice {
    const char *name, *variant; /* "shards from memory", "shards-omp" */
    enum advise_place place;
    bool measured;
    bool dropped;                            /* was clearly slower, and was not repeated */
    struct failure reason;                   /* why it was not measured */
    size_t rounds;                           /* number of measurements */
    double images_per_s[ADVISE_ROUNDS_MAX];  /* per round: delivered without a training step */
    double reached_per_s[ADVISE_ROUNDS_MAX]; /* per round: images that steps consume per second; measured on a
                                                GPU, otherwise computed */
    double stall_share;      /* share of the time that a step waits; measured on a GPU, otherwise computed */
    double disk_bytes;       /* on this machine */
    double memory_bytes;     /* buffers on host and device, and the data in the page cache */
    double joules_per_image; /* energy of the GPU */
};

/* The training step for which the ways are compared. */
struct advice_question {
    double step_s;     /* duration of a step alone */
    uint64_t batch;    /* images per step */
    uint32_t res;      /* width and height of the images */
    bool estimated;    /* waits are computed, not measured, because there is no GPU */
    double margin;     /* ways whose rates differ by at most this share are equally fast */
    double time_s;     /* the maximum time that was announced */
    double took_s;     /* the time that all rounds took */
    double load;       /* average number of busy threads of the machine, before the first round */
    int threads;       /* that this process may use */
    uint64_t samples;  /* of the data set */
    uint64_t measured; /* samples that were read */
    double bytes, measured_bytes;
    const char *model,
        *engine;         /* the network, and the variant that measured step_s; NULL: step_s was given */
    const char *command; /* trains the network on images that come in the best way; NULL if unknown */
};

/* Returns the images per second that a step consumes if it never waits. */
double advise_needed(const struct advice_question *question);

/* Adds a round. If waits are computed, `reached_per_s` and `stall_share` are ignored, and computed as if the
 * training step and the production of batches did not slow each other down. */
void advise_add(const struct advice_question *question, struct advice *advice, double images_per_s,
                double reached_per_s, double stall_share);

/* Adds a round in which the way could not be measured. */
void advise_miss(struct advice *advice);

/* Returns the geometric mean of the known values, with its confidence interval. All NaN if none is known. The
 * interval is NaN if fewer than ADVISE_ROUNDS_MIN are known: rates that are capped at what the step consumes
 * are equal after two lucky rounds, and such an interval would have no width. */
struct ratio advise_mean(const double *values, size_t count, double confidence);

/* Returns the ratio of `b` to `a`, of images that steps consume. Compares values of the same round, so slow
 * changes of the machine's load do not matter. */
struct ratio advise_ratio(const struct advice *a, const struct advice *b);

struct advice_decision {
    bool decided;
    size_t best;        /* decided: the best way. Otherwise: the way that needs least and may be the best.
                           The number of ways if none was measured */
    size_t rival;       /* undecided: another way that may be more than the margin faster, or the number of
                           ways if no way that reads the set was measured */
    struct ratio ratio; /* undecided: of `rival` to `best` */
};

/* Decides between ways, which are in ascending order of their needs. The best way is the first to which no
 * other way is superior. B is superior to A if the whole interval of the ratio B / A is above 1 + margin, and
 * not superior if the whole interval is at or below 1 + margin; otherwise the decision is open. So as long as
 * the intervals contain the true ratios, two decisions on the same machine cannot contradict each other.
 * Reading with the same variant from disk, or from a URL, is never superior to reading from memory: the
 * same bytes cannot come faster from there. */
struct advice_decision advise_decide(const struct advice_question *question, const struct advice *advice,
                                     size_t count);

/* Sets `dropped` of the ways to which another way is superior. */
void advise_drop(const struct advice_question *question, struct advice *advice, size_t count);

/* Writes the details of the verdict, and the verdict itself: one sentence, which starts with "Best here: " or
 * "Undecided: ". Both are empty if no way was measured. */
void advise_details(const struct advice_question *question, const struct advice *advice, size_t count,
                    const struct advice_decision *decision, char *text, size_t size);
void advise_verdict(const struct advice_question *question, const struct advice *advice, size_t count,
                    const struct advice_decision *decision, char *text, size_t size);

/* Prints the table, details and verdict or, with --format csv or json, rows. `data` is the name of the data
 * set. STATUS_FAILED if nothing could be measured. */
enum status advise_print(const char *data, int format, const struct advice_question *question,
                         const struct advice *advice, size_t count);

#endif
