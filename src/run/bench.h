/* Timing: warm-up runs, then timed runs until the error of the median is small enough or a limit is
 * reached. */
#ifndef FDSL_RUN_BENCH_H
#define FDSL_RUN_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/stats.h"
#include "core/status.h"
#include "core/variant.h"

/* A collective function, which all ranks call at least once per run, with their own values. Returns the worst
 * status of all ranks. If no rank failed, replaces each value by its maximum over all ranks. comm_vote()
 * implements it. */
typedef enum status bench_vote(enum status status, double *values, size_t count);

struct bench_limits {
    uint64_t warmups;        /* minimum number of warm-up runs */
    double warmup_time_s;    /* minimum total time of the warm-up runs */
    uint64_t min_samples;    /* minimum number of samples */
    double min_time_s;       /* minimum total sampling time, unless max_time_s is shorter */
    double max_time_s;       /* maximum total sampling time, unless min_samples needs more */
    double max_median_error; /* stop when stats.median_error is below this */
};

struct sample {
    double wall_s, device_s; /* device_s is negative if the variant does not measure device time */
};

struct bench {
    struct sample *samples; /* owned; free with bench_free() */
    size_t count;
    size_t looked;     /* number of samples when `time` was last computed */
    uint64_t warmups;  /* number of warm-up runs done */
    bool on_device;    /* `time` is device time */
    bool settled;      /* the error of the median fell below the limit */
    struct stats time; /* statistics of device_s if the variant measures it, else of wall_s */
    double wall_s;     /* median wall time */

    /* The next four values are about the span from the start of the first timed run to the end of the last
     * one. All except timed_s include the time between runs. */
    double span_s;      /* length of the span */
    double timed_s;     /* sum of the wall times of the timed runs */
    double cpu_s;       /* CPU time of all threads of this process */
    uint64_t preempted; /* involuntary context switches of all threads of this process */
};

/* Additional input and output of bench_measure() if several ranks run in lockstep. */
struct bench_together {
    bench_vote *vote;
    struct bench bench; /* output, the same on all ranks: each sample is the time of the slowest rank, because
                           a run ends when the slowest rank has finished */
};

/* Called after every timed run to show progress. */
typedef void bench_progress(void *context, size_t samples, double elapsed_s, double max_time_s);

/* Times variant->run(state, n) for n = 1, 2, ... within `limits`. The first runs are the warm-up. `progress`
 * may be NULL; `context` is its first argument. The caller frees `*bench` and together->bench with
 * bench_free(). After a failure both are empty.
 *
 * `together` is NULL for a single rank. With several ranks, all perform the same number of runs, until the
 * median of together->bench has settled or a limit in `limits` ends sampling. If one rank fails, all fail.
 * The only exception is the final statistics of a rank, which may fail on that rank alone.
 *
 * STATUS_EXHAUSTED if memory runs out; otherwise the status of the run that failed. */
enum status bench_measure(const struct variant *variant, void *state, const struct bench_limits *limits,
                          bench_progress *progress, void *context, struct bench *bench,
                          struct bench_together *together);
void bench_free(struct bench *bench);

#endif
