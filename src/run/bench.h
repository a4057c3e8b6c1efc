/* Timing: warm-up, then samples until the median is known well enough. */
#ifndef FDSL_RUN_BENCH_H
#define FDSL_RUN_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/stats.h"
#include "core/status.h"
#include "core/variant.h"

/* Called between runs where ranks take theirs in step, with the status of this rank. Says the same to all: a
 * failure of any, or in `values` the largest of each over the ranks. */
typedef enum status bench_vote(enum status status, double *values, size_t count);

struct bench_limits {
    uint64_t warmups;        /* runs before the first sample, at least */
    double warmup_time_s;    /* and at least this long */
    uint64_t min_samples;    /* never fewer samples */
    double min_time_s;       /* nor less time over them, unless max_time_s says so */
    double max_time_s;       /* stop here even when the median is still uncertain */
    double max_median_error; /* stop once stats.median_error is under this */
};

struct sample {
    double wall_s, device_s; /* device_s < 0 where it does not apply */
};

struct bench {
    struct sample *samples; /* owned; bench_free() */
    size_t count, capacity;
    size_t looked;     /* at so many samples `time` was computed */
    uint64_t warmups;  /* runs done before the first sample */
    bool on_device;    /* `time` is device time */
    bool settled;      /* the median's error went under the limit */
    struct stats time; /* of device_s where the variant gives it, else of wall_s */
    double wall_s;     /* the median wall time */

    /* From the start of the first timed run to the end of the last one, including the time between runs: */
    double span_s;
    double timed_s;     /* the sum of the runs' wall times */
    double cpu_s;       /* CPU time of all threads of this process */
    uint64_t preempted; /* involuntary context switches of these threads */
};

/* The run of ranks that take theirs in step. */
struct bench_together {
    bench_vote *vote;
    struct bench bench; /* filled: a run is over when the slowest rank is, so sample by sample the longest
                         * time of any; the same on all ranks */
};

/* Called after every run, for progress: samples so far, seconds so far, the longest it may take. */
typedef void bench_progress(void *context, size_t samples, double elapsed_s, double max_time_s);

/* Times variant->run(state, n) for n = 1, 2, ... as `limits` say. The first runs warm up. With `together`
 * (NULL: alone) all ranks take as many runs, until the median of together->bench is known, and fail when one
 * does, but for their own statistics after the last run. The caller frees both with bench_free(); nothing is
 * left to free after a failure. */
enum status bench_measure(const struct variant *variant, void *state, const struct bench_limits *limits,
                          bench_progress *progress, void *context, struct bench *bench,
                          struct bench_together *together);
void bench_free(struct bench *bench);

#endif
