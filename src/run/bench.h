/* Timing: warm-up runs, then timed runs until the error of the median is small enough or a limit is
 * reached. */
#ifndef FDSL_RUN_BENCH_H
#define FDSL_RUN_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/consumer.h"
#include "core/stats.h"
#include "core/status.h"
#include "core/variant.h"
#include "core/workload.h"

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

/* ---- A training step for every batch (--compute) ---- */

/* The input of consumed_variant.setup(), which copies this struct. All pointers must stay valid as long as
 * the state. */
struct consumed_job {
    const struct workload *workload;
    const struct variant *variant; /* the variant that produces the batches */
    void *input;                   /* the workload's input for that variant */
    struct consumer *consumer;
};

/* The wrapping variant. The time of a run is wall time and includes the waits for training steps.
 *
 * If a run produces one batch (workload->batches.hand_over), batches on the device alternate between two
 * states of the wrapped variant. Run n waits for the training step on batch n - 2, and overwrites that batch
 * while the training step on batch n - 1 runs. Then it passes the new batch to the consumer. A batch in host
 * memory is copied when it is passed on, so one state is enough.
 *
 * If a run delivers many batches (workload->batches.set_consumer), the wrapped variant passes them to the
 * consumer itself, and the run ends when the last step has ended. */
extern const struct variant consumed_variant;

/* Returns the state of the wrapped variant that produced the latest batch, for the workload's verify(),
 * deliver() and measure(). */
void *consumed_latest(void *state);

/* Call after the timed runs: waits for their last steps and sets the columns COMPUTE_COLUMNS.
 * STATUS_FAILED if a step fails or none ran. */
enum status consumed_end(void *state, struct row *row);

/* Detaches the consumer from the wrapped variant. Later runs pass no batches to the consumer. */
void consumed_detach(void *state);

/* ---- The search for a share (--mix synth:auto) ---- */

/* The search for the largest share of read samples in a mixture with which training steps do not wait for
 * them (--mix synth:auto). The runner measures steps with the share that share_search_next() returns, adds
 * the result with share_search_add(), and repeats this until the function returns 0.
 *
 * The model: a step without waiting takes b(s) seconds, which is linear in the share s, because generating a
 * sample takes time, too. Reading delivers at most R shares per second. Steps wait if s / R > b(s). A probe
 * with which steps wait gives R and b(s); the next share is the solution of s / R = b(s). Every solution is
 * measured, so an error of the model costs probes, but does not decide. If steps wait much longer than the
 * model says, the share is measured again, because another process may have delayed them. */

#define SHARE_PROBES 9
#define SHARE_STALL  0.02 /* steps that wait for at most this share of their time do not count as waiting */

/* The measurement of a share. */
struct share_probe {
    uint32_t share;
    double stall;  /* share of the time in which steps waited for samples */
    double step_s; /* duration of a step, including waiting */
    bool twice;    /* it was measured twice; this is the measurement with fewer stalls */
};

struct share_search {
    uint32_t parts; /* shares are from 1 to this number */
    uint32_t count; /* of probes, which have different shares */
    uint32_t tries; /* measurements */
    bool hurried;   /* no share is measured again, and one with which steps wait is halved */
    struct share_probe probes[SHARE_PROBES];
};

/* Returns the share to measure next: that of the latest probe once again, or one that no probe has. 0: the
 * search is complete. The first two probes read all samples, and few of them for comparison. The search is
 * complete if a share with which steps do not wait and one with which they wait differ by at most 5 %, or
 * after SHARE_PROBES probes. Pure. */
uint32_t share_search_next(const struct share_search *search);

/* Adds a measurement with this share. */
void share_search_add(struct share_search *search, uint32_t share, double stall, double step_s);

/* Returns whether a share was found with which steps do not wait, besides the one that is only measured for
 * comparison. Pure. */
bool share_search_found(const struct share_search *search);

/* Returns the probe with the largest share with which steps do not wait; if they wait with all shares, the
 * one with the smallest share. There is at least one probe. Pure. */
const struct share_probe *share_search_best(const struct share_search *search);

/* Returns the share to train with: that of share_search_best() if it is all samples, otherwise two thirds of
 * it. On hosts that are shared, reading is slower by a third for seconds, and a probe takes four. There is at
 * least one probe. Pure. */
uint32_t share_search_choice(const struct share_search *search);

/* Returns the share of the time in which steps wait however few samples are read, which counts as not
 * waiting: the stalls of the smallest share that was measured, if it was read at less than half of the rate
 * that reading has reached. 0 if that is not known. Pure. */
double share_search_floor(const struct share_search *search);

/* Returns the share of a probe's time in which a step waits for samples that are read: its stalls above that
 * floor, but at most the time by which the step is longer than expected. The expected duration is linear in
 * the share, between that of the smallest share and that of the largest one without its stalls. Pure. */
double share_search_wait(const struct share_search *search, const struct share_probe *probe);

#endif
