/* The columns of rows, the state of the runner, and the rows that it makes from the results of a variant: of
 * one rank, and of all ranks together. Functions whose comment begins with "Collective" must be called by
 * all ranks in the same order; they fail on all ranks or on none. "Collective, like comm_agree()" means: all
 * ranks call the function, and all return the worst status of any rank. */
#ifndef FDSL_RUN_ROWS_H
#define FDSL_RUN_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/consumer.h"
#include "core/parallel.h"
#include "core/record.h"
#include "core/status.h"
#include "core/workload.h"
#include "machine/device.h"
#include "machine/host.h"
#include "machine/monitor.h"
#include "machine/nvml.h"
#include "run/bench.h"
#include "run/settings.h"

/* ---- Columns: those that all workloads share, the options of a workload, and what it measures ---- */

/* The tables of columns of a workload. They are made once and kept. */
struct row_columns {
    const struct workload *workload;
    struct column *row, *sample; /* of the rows of --out and of --samples-out */
    size_t shared;               /* number of first columns, which identify the run, in both tables */
};
enum status columns_of(const struct workload *workload, const struct row_columns **columns);

/* Copies the default of the option that has a column to `text`, as rows write it: at most `size` - 1 bytes;
 * "" if there is none. */
enum status columns_default(const struct workload *workload, const char *column, char *text, size_t size);

/* --columns: describes the columns of a workload, or if `only` is NULL of all workloads, of --log and of
 * --monitor: as a page of Markdown, or one row per column in CSV or JSON. */
enum status columns_print(const struct workload *only, int format);

/* ---- The state of the runner ---- */

struct report;

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
    size_t candidates, tried; /* --variant auto: number of candidates, and how many of them were considered */

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

/* Returns whether this is rank 0, which prints and writes for all ranks. */
static inline bool runner_leads(const struct runner *runner)
{
    return runner->partition.rank == 0;
}

/* ---- The row of a rank ---- */

/* Returns whether the current variant runs on a GPU. */
bool runner_on_gpu(const struct runner *runner);

/* For a variant that keeps the CPU busy, `*share` becomes the CPU time of its threads, divided by the time of
 * the hardware threads available to them. `*preempted_per_s` becomes the involuntary context switches per
 * second. Both are NaN for other variants, because threads that wait for a GPU or a disk release their core.
 * Both are also NaN if sampling took less than 0.25 s. */
void runner_cpu_use(const struct runner *runner, const struct bench *bench, double *share,
                    double *preempted_per_s);

/* Returns the roofline of the current variant on its device or on the cores that it uses. */
struct roofline runner_roofline(const struct runner *runner, const struct work *work);

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

/* ---- All ranks ---- */

/* Values of one rank that the combined row needs and that the row of the rank does not have. */
struct rank_facts {
    double bytes; /* struct work */
    struct roofline roofline;
    int sharers; /* number of ranks that share its device; 1 on a CPU, where each rank has its own cores */
    uint64_t throttle_reasons;
    double run_j;                      /* energy per run in joules; NaN if unknown */
    double cpu_share, preempted_per_s; /* from runner_cpu_use(), which says when they are NaN */
};

/* Collective: gathers the rows and facts of all ranks. On rank 0, `*rows` and `*facts` become arrays of
 * comm_size() elements in rank order, and `*rows` has room for one more row; on other ranks, they become
 * NULL. All rows must have the same columns. The caller frees `*rows` with ranks_free_rows() and `*facts`
 * with free(). */
enum status ranks_gather(const struct row *mine, const struct rank_facts *my_facts, struct row **rows,
                         struct rank_facts **facts);
void ranks_free_rows(struct row *rows);

/* Collective: gathers the samples of all ranks. On rank 0, `*samples` becomes an array of comm_size() *
 * bench->count elements in rank order; on other ranks, it becomes NULL. The caller frees `*samples`. */
enum status ranks_gather_samples(const struct bench *bench, struct sample **samples);

/* Returns the combined roofline of `count` ranks that run concurrently. */
struct roofline ranks_roofline(const struct rank_facts *facts, uint64_t count);

/* Sets the columns of `total`, an open row over the same table, from the rows of `count` ranks as the table
 * says. Real numbers are combined as the rows show them, with the digits of their columns. */
void ranks_combine(const struct row *rows, int count, struct row *total);

/* Returns the parallel efficiency; 1 is ideal. `together_s` is the time of all ranks; `alone_s` is the time
 * of rank 0 alone, for the work of one rank (weak scaling) or of all ranks (strong scaling). Returns 0
 * (unknown) if `alone_s` is 0. */
double ranks_efficiency(const struct partition *partition, double alone_s, double together_s);

/* ---- Warnings ---- */

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

/* ---- The ranks of a run: their cores, GPUs, scaling and options (ranks.c) ---- */

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
