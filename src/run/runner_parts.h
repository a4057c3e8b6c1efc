/* What the parts of the runner share: runner.c (the life of a variant), runner_verify.c (whether its results
 * are right), runner_rows.c (what is written of it), runner_publish.c (to whom) and runner_ranks.c (where
 * each rank runs). Nothing else includes this. */
#ifndef FDSL_RUN_RUNNER_PARTS_H
#define FDSL_RUN_RUNNER_PARTS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/consumer.h"
#include "core/partition.h"
#include "machine/device.h"
#include "machine/env.h"
#include "machine/gpu_watch.h"
#include "run/monitor.h"
#include "run/ranks.h"
#include "run/record.h"
#include "run/report.h"
#include "run/settings.h"

/* The variant that speed-ups are over: NULL where none of the call is, and the times per item of its rows so
 * far in ascending order, of this rank and (on rank 0) of all ranks together. */
struct baseline {
    const struct variant_entry *entry;
    struct baseline_times {
        double *item_s; /* owned */
        size_t count;
    } own, all;
};

/* What the rows of one invocation share, and what is under way. */
struct runner {
    struct settings *settings;
    struct env env;
    struct device_info device; /* name is empty without one */
    char driver[64];
    void *input;
    struct report *report;      /* NULL but for rank 0 */
    struct monitor *monitor;    /* NULL where nobody asked for it */
    struct partition partition; /* of this rank */
    struct consumer *consumer;  /* of every batch; NULL without --compute */
    int sharers;                /* ranks on this rank's device, itself among them; 0 without a device */

    /* The variant under way */
    const struct variant_entry *entry;
    struct gpu_watched watched; /* during the timed runs of the row under way */
    struct baseline baseline;
    /* Of the row under way. All rows of an invocation share the program's start, so that they are known to
     * belong together; only where a run is a row of its own (an epoch), those behind the first have their own
     * begin. */
    char time_utc[ENV_TIME_MAX];
    double shown_s;
    double alone_s; /* the time that rank 0 took alone; 0 where it is not known */
    bool progress;
};

/* Rank 0 speaks and writes for all. */
static inline bool runner_leads(const struct runner *runner)
{
    return runner->partition.rank == 0;
}

/* ---- runner_rows.c ---- */

/* Of the variant under way: whether it runs on a GPU, its threads, and the physical cores that they use at
 * most. */
bool runner_on_gpu(const struct runner *runner);
int runner_threads(const struct runner *runner);
int runner_cores(const struct runner *runner);

/* For a variant that computes on the CPU all the time: the CPU time of its threads over the CPU time that
 * their hardware threads offered, and how often they were interrupted. NaN for other variants, because a
 * thread that waits for a GPU or a disk leaves its core, and for timed runs of less than a quarter of a
 * second. */
void runner_cpu_use(const struct runner *runner, const struct bench *bench, double *share,
                    double *preempted_per_s);

/* The whole row of a result, with the workload's measures (NULL: none), the caller's to free, also after a
 * failure. */
enum status runner_row(const struct runner *runner, const struct result *result,
                       const struct measures *measures, struct row *row);

/* A row of --samples-out: what identifies the `whole` row, and the sample. The caller's to free likewise. */
enum status runner_sample_row(const struct row *whole, const struct sample *sample, size_t number,
                              struct row *row);

/* Appends `count` samples of each of the `rank_count` rows, which follow each other. */
enum status runner_append_samples(const char *path, const struct row *ranks, size_t rank_count,
                                  const struct sample *samples, size_t count);

/* ---- runner_progress.c ---- */

/* For bench_measure(), with the runner as its context: shows on a terminal how many samples were taken, and
 * in what time. */
void runner_show_progress(void *context, size_t samples, double elapsed_s, double max_time_s);

/* Shows on a terminal what the current variant is doing; NULL clears the line. */
void runner_show_phase(const struct runner *runner, const char *phase);

/* ---- runner_verify.c ---- */

/* The variant to run, whose state is that of `state` below: the one under way, or with --compute the one that
 * hands its batches to the consumer. And the state of the one under way, with the results of the latest run.
 */
const struct variant *runner_variant(const struct runner *runner);
void *runner_own_state(const struct runner *runner, void *state);

/* Before the timing: makes run 0, verifies it where --verify is given, and hands it to the user. Agrees.
 * STATUS_WRONG, with a line of the report, where it is not right. */
enum status runner_check(struct runner *runner, void *state, struct result *result);

/* After the timing, where --verify is given: verifies the last timed run as it is, and another one, drawn at
 * random from the timed ones, which is made once more. Agrees. STATUS_WRONG as above: its times are not
 * recorded. */
enum status runner_verify_timed(struct runner *runner, void *state, struct result *result);

/* ---- runner_baseline.c ---- */

/* Chooses the baseline, --baseline or the workload's, and moves it to the front of the variants, so that its
 * time is known to the rows of the others. STATUS_USAGE where --baseline names none of them. */
enum status runner_choose_baseline(struct runner *runner);
void runner_free_baseline(struct runner *runner);

/* Fills result->speedup and result->baseline from the baseline's rows: of this rank, or of all ranks together
 * where `all`. A row of the baseline joins them first. STATUS_FAILED where memory runs out. */
enum status runner_compare(struct runner *runner, bool all, struct result *result);

/* ---- runner_warn.c ---- */

/* Warns of what makes a row worth less: throttled clocks, a median that is not known, a busy machine. `facts`
 * are those of the ranks. */
void runner_warn(const struct settings *settings, const struct result *result,
                 const struct rank_facts *facts);

/* Warns where --monitor saw too little of `wall_s`, the time of the timed runs. NVML's readings are averages
 * over up to a second, so a short run is hardly in them. */
void runner_warn_of_few_looks(const struct runner *runner, double wall_s);

/* ---- runner_publish.c ---- */

/* The work of the variant under way over the peaks of its device, or of the cores that it uses. */
struct roofline runner_roofline(const struct runner *runner, const struct work *work);

/* Shows the rows, of each rank and, where there are several, of all together, which `result` is, and appends
 * them where asked, with the samples of the ranks. What was measured is worth keeping: a full disk does not
 * swallow the table's line, nor a full stdout the file's rows. */
enum status runner_publish(struct runner *runner, const struct result *result, const struct sample *samples,
                           const struct rank_facts *facts);

/* This rank's own. */
struct rank_facts runner_facts(const struct runner *runner, const struct result *result);

/* Brings the ranks' rows together on rank 0, which publishes them. `all`: the run of all ranks. */
enum status runner_publish_ranks(struct runner *runner, const struct row *row, const struct result *result,
                                 const struct bench *all);

/* ---- runner_ranks.c; those that agree are called by all ranks ---- */

/* Whether any chosen variant runs on a GPU, or what consumes their batches does. */
bool runner_any_on_gpu(const struct settings *settings);

/* STATUS_USAGE where ranks have been given different options. Agrees. */
enum status runner_check_alike(const struct settings *settings);

/* STATUS_USAGE where the files that the options name hold other data than those of rank 0. Agrees. */
enum status runner_check_data(const struct runner *runner);

/* STATUS_USAGE where several ranks are told which device to take. */
enum status runner_check_no_device(const struct settings *settings, uint64_t ranks);

/* Sets runner->partition.strong by the workload and --scaling. */
enum status runner_take_scaling(struct runner *runner);

/* Shares out the cores of each machine and sets the threads; `*worst` is the outcome on whichever machine has
 * the most to say of, for runner_warn_about_cores(). Agrees. */
enum status runner_take_cores(struct settings *settings, double *worst);
void runner_warn_about_cores(const struct settings *settings, double outcome);

/* Gives this rank its GPU. */
void runner_take_device(struct settings *settings);

/* Counts the ranks on this rank's physical device into runner->sharers, and warns where they are several.
 * Agrees. */
enum status runner_count_sharers(struct runner *runner);

#endif
