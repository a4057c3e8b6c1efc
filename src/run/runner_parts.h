/* Declarations shared by the files of the runner. Only these files and their tests include this header.
 * "Collective, like comm_agree()" means: all ranks call the function, and all return the worst status of any
 * rank.
 *
 * runner.c           the sequence of steps per variant
 * runner_axes.c      all combinations of lists and ranges
 * runner_verify.c    verification
 * runner_rows.c      CSV rows
 * runner_publish.c   output
 * runner_baseline.c  speed-ups
 * runner_progress.c  progress and the message after a signal
 * runner_warn.c      warnings
 * runner_batch.c     --batch max
 * runner_ranks.c     cores and devices of the ranks */
#ifndef FDSL_RUN_RUNNER_PARTS_H
#define FDSL_RUN_RUNNER_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/consumer.h"
#include "core/partition.h"
#include "core/progress.h"
#include "machine/device.h"
#include "machine/env.h"
#include "machine/gpu_watch.h"
#include "run/columns.h"
#include "run/monitor.h"
#include "run/ranks.h"
#include "core/record.h"
#include "run/report.h"
#include "run/settings.h"

/* The baseline of speed-ups, and the times per item of its rows so far, in ascending order. `own` has the
 * times of this rank. `all` has, on rank 0, the times of all ranks combined. */
struct baseline {
    const struct variant_entry *entry; /* NULL if none of the chosen variants is a baseline */
    struct baseline_times {
        double *item_s; /* owned */
        size_t count;
    } own, all;
};

/* What the runs of a variant gave, on one rank or on all ranks together, until it is in a row. */
struct result {
    struct bench bench; /* owned by the runner; no samples if the variant was not timed */
    struct work work;
    struct roofline roofline;
    uint64_t runs_before; /* untimed runs before bench_measure(), to verify results or write output files;
                             counted as warm-ups */
    uint64_t throttle_reasons; /* of the GPU during the timed runs */
    double run_j;              /* energy of the whole GPU per run, in joules; NaN if unknown */
    bool verified;
    uint64_t wrong;
};

/* The state of the runner: values that all rows of a combination share, and the current variant. */
struct runner {
    struct settings *settings;
    struct env env;
    struct device_info device; /* its name is "" without a device */
    char driver[64];
    void *input;
    struct report *report;      /* the report on all combinations; NULL on ranks other than 0 */
    struct monitor *monitor;    /* NULL without --monitor */
    struct partition partition; /* of this rank */
    struct consumer *consumer;  /* NULL without --compute */
    int sharers;                /* ranks on this rank's device, including this rank; 0 without a device */

    struct variant_entry *stand_ins; /* on a rank that --rank-device assigns to the CPU: entries with the
                                      * name of a GPU variant and the implementation of a CPU variant; NULL
                                      * on other ranks */

    /* The current variant */
    const struct variant_entry *entry;
    struct gpu_watched watched; /* clocks and power of the GPU during the timed runs of the current row */
    struct baseline baseline;
    /* The column time_utc of the current row: the start time of the combination, env.time_utc. In workloads
     * with epochs, however, each row after the first has the start time of its epoch. */
    char time_utc[ENV_TIME_MAX];
    double alone_s;           /* the median time of rank 0 alone; 0 if unknown */
    struct progress progress; /* shown only on a terminal */
    size_t rows_kept;         /* number of rows of this combination that were appended to --out */
    bool published;           /* the row of the current variant has been written */
    bool checkpointed;        /* the current variant has saved a state for --resume */
};

/* ---- runner.c ---- */

/* Runs all variants with the current values of the options. Rank 0 adds the results to `*report`. If
 * `*report` is NULL, rank 0 creates it with report_begin(). The caller calls report_end(), even after a
 * failure. Collective, like comm_agree(). */
enum status runner_combination(struct settings *settings, struct report **report);

/* Returns whether this is rank 0, which prints and writes for all ranks. */
static inline bool runner_leads(const struct runner *runner)
{
    return runner->partition.rank == 0;
}

/* ---- runner_rows.c ---- */

/* These functions describe the current variant: whether it runs on a GPU, its number of CPU threads, and the
 * maximum number of physical cores that these threads can use. */
bool runner_on_gpu(const struct runner *runner);
int runner_threads(const struct runner *runner);
int runner_cores(const struct runner *runner);

/* For a variant that keeps the CPU busy, `*share` becomes the CPU time of its threads, divided by the time of
 * the hardware threads available to them. `*preempted_per_s` becomes the involuntary context switches per
 * second. Both are NaN for other variants, because threads that wait for a GPU or a disk release their core.
 * Both are also NaN if sampling took less than 0.25 s. */
void runner_cpu_use(const struct runner *runner, const struct bench *bench, double *share,
                    double *preempted_per_s);

/* Sets the columns that the row of all ranks gets from those of the ranks: they describe the run, the
 * options, the machine and the verification. */
void runner_set_run(const struct runner *runner, const struct result *result, struct row *row);

/* Sets the columns of the time, the work, the roofline, the throttling and the energy, of one rank or of all.
 */
void runner_set_result(const struct runner *runner, const struct result *result, struct row *row);

/* Appends the samples of `rank_count` ranks to the CSV file at `path`. `ranks` has one row per rank.
 * `samples` has `count` samples per rank, in rank order. */
enum status runner_append_samples(const struct workload *workload, const char *path, const struct row *ranks,
                                  size_t rank_count, const struct sample *samples, size_t count);

/* ---- runner_progress.c ---- */

/* Shows the number of samples and the elapsed time on a terminal. bench_measure() calls this function;
 * `context` is the runner. */
void runner_show_progress(void *context, size_t samples, double elapsed_s, double max_time_s);

/* Shows on a terminal what the current variant is doing; NULL clears the line. */
void runner_show_phase(const struct runner *runner, const char *phase);

/* Sets the message that is printed if a signal ends the run: which rows and checkpoints are kept, and how to
 * continue. Call on rank 0 whenever this message changes. */
void runner_say_what_is_kept(const struct runner *runner);

/* Returns whether all rows are lost if a signal ends the run: without --out, JSON is printed only at the end.
 */
static inline bool runner_loses_rows(const struct settings *settings)
{
    return !settings->out && settings->format == FORMAT_JSON;
}

/* ---- runner_batch.c ---- */

/* Returns whether the user gave --batch max. Call before the workload is opened. */
bool runner_wants_largest(const struct settings *settings);

/* Replaces --batch max by the largest batch that fits into memory. With --dry-run, only checks the options.
 * STATUS_USAGE for several variants. Collective, like comm_agree(). */
enum status runner_find_batch(struct runner *runner);

/* ---- runner_verify.c ---- */

/* Returns the variant to run. Without --compute this is the current variant; with --compute it is
 * consumed_variant, which wraps the current variant. The parameter `state` of the functions below is the
 * state of the returned variant. runner_own_state() returns the state of the current variant itself, with the
 * results of the latest run. */
const struct variant *runner_variant(const struct runner *runner);
void *runner_own_state(const struct runner *runner, void *state);

/* Before timing: performs run 0, verifies it if --verify is given, and writes the output files that the user
 * requested. Does not perform run 0 for workloads with epochs. Collective, like comm_agree(). If results are
 * wrong, adds a line without a time to the report and returns STATUS_WRONG. */
enum status runner_check(struct runner *runner, void *state, struct result *result);

/* After timing, with --verify: verifies the last timed run, then repeats and verifies another timed run,
 * chosen at random. Collective, like comm_agree(). If results are wrong, adds a line without a time to the
 * report and returns STATUS_WRONG. */
enum status runner_verify_timed(struct runner *runner, void *state, struct result *result);

/* ---- runner_baseline.c ---- */

/* Chooses the baseline: --baseline or the workload's default. Moves it to the front of the variants, so that
 * its time is known when the rows of the other variants are written. STATUS_USAGE if --baseline is not a
 * chosen variant. */
enum status runner_choose_baseline(struct runner *runner);
void runner_free_baseline(struct runner *runner);

/* Sets the columns `speedup` and `baseline` from the times of the baseline on this rank, or on all ranks
 * combined if `all` is true. If the current variant is the baseline, first adds the time of `result` to these
 * times. STATUS_EXHAUSTED if memory runs out. */
enum status runner_compare(struct runner *runner, bool all, const struct result *result, struct row *row);

/* ---- runner_warn.c ---- */

/* Counts conditions that make a result less reliable (status_caveat()): throttled clocks, an uncertain
 * median, a busy machine. `facts` has one entry per rank. */
void runner_warn(const struct runner *runner, const struct result *result, const struct rank_facts *facts);

/* Warns about each option that was given and has an effect on some variants of the workload, but on none of
 * those that run. */
void runner_warn_of_options(const struct settings *settings);

/* Counts the row (status_caveat()) if --monitor took too few samples during the timed runs; `wall_s` is the
 * median wall time of a run. NVML averages its readings over up to one second, so short runs are hardly
 * visible in them. Does not warn in workloads with epochs. */
void runner_warn_of_few_looks(const struct runner *runner, double wall_s);

/* ---- runner_publish.c ---- */

/* Returns the roofline of the current variant on its device or on the cores that it uses. */
struct roofline runner_roofline(const struct runner *runner, const struct work *work);

/* Lets the workload save `state` with the `count` rows of `result`. Then appends the rows to --out and the
 * samples to
 * --samples-out, adds the result to the report, and prints warnings. If the rows cannot be appended, prints
 * them to stderr and omits the samples, but still adds the result to the report. */
enum status runner_publish(struct runner *runner, void *state, const struct result *result,
                           const struct row *rows, size_t count, const struct sample *samples,
                           const struct rank_facts *facts);

/* Returns the facts of this rank for ranks_gather(). */
struct rank_facts runner_facts(const struct runner *runner, const struct result *result);

/* Gathers the rows of all ranks on rank 0, which publishes them. `all` has the timing of all ranks
 * combined. */
enum status runner_publish_ranks(struct runner *runner, void *state, const struct row *row,
                                 const struct result *result, const struct bench *all);

/* ---- runner_ranks.c ---- */

/* Returns whether the run needs a GPU, for a chosen variant or for --compute. */
bool runner_any_on_gpu(const struct settings *settings);

/* STATUS_USAGE if ranks have different options, or run different builds. Collective, like comm_agree(). */
enum status runner_check_alike(const struct settings *settings);

/* STATUS_USAGE if the input files of a rank differ from those of rank 0. Collective, like comm_agree(). */
enum status runner_check_data(const struct runner *runner);

/* STATUS_USAGE if --device or --best-gpu is given to several ranks or together with --rank-device, or if the
 * list of --rank-device is invalid. */
enum status runner_check_no_device(const struct settings *settings, uint64_t ranks);

/* Sets runner->partition.strong from the workload and --scaling. STATUS_USAGE for --scaling weak if the
 * workload does not support it. */
enum status runner_take_scaling(struct runner *runner);

/* Divides the cores of each machine among its ranks (--bind) and sets the number of threads. `*worst` becomes
 * the worst enum cores_outcome of all machines, for runner_warn_about_cores(). Collective, like
 * comm_agree(). */
enum status runner_take_cores(struct settings *settings, double *worst);
void runner_warn_about_cores(const struct settings *settings, double outcome);

/* Returns whether --threads lists 0 and also the number of threads that 0 means. */
bool runner_repeats_threads(const struct settings *settings);

/* Selects the GPU that --rank-device names for this rank. If --rank-device does not name this rank, rank i of
 * a machine uses GPU i modulo the number of GPUs. On a rank that --rank-device assigns to the CPU, replaces
 * GPU variants by the CPU variant of the workload. Not collective. STATUS_USAGE if the GPU does not exist, or
 * if the workload has no CPU variant; STATUS_UNAVAILABLE if the build lacks this variant. The caller frees
 * runner->stand_ins. */
enum status runner_take_device(struct runner *runner);

/* Sets runner->sharers to the number of ranks on this rank's physical device. Warns if ranks share a device.
 * Collective, like comm_agree(). */
enum status runner_count_sharers(struct runner *runner);

#endif
