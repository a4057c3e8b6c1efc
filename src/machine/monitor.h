/* The monitor: a thread that samples GPUs and this process, or the processes of a command, at fixed intervals
 * while other threads work. Used by the program (--monitor) and by libfdsl.
 *
 * Samples stay in memory until monitor_flush(), monitor_try_flush(), monitor_end() or monitor_stop() writes
 * them. The runner calls monitor_end() after each variant and monitor_stop() after the run, while nothing is
 * timed. Calls on one monitor must not overlap, except those of monitor_phase().
 * All except monitor_check() and monitor_open() accept a NULL monitor and then do nothing. */
#ifndef FDSL_MACHINE_MONITOR_H
#define FDSL_MACHINE_MONITOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/record.h"
#include "core/status.h"
#include "machine/host.h"

/* ---- Processes: their CPU time, memory and storage traffic, read from /proc ---- */

/* Counters of the resources that processes have used so far. A counter is negative if it is unknown. */
enum process_counter {
    PROCESS_CPU_S,
    PROCESS_READ_BYTES,    /* from storage, not from the page cache */
    PROCESS_WRITTEN_BYTES, /* to storage, counted when they are written to the page cache */
    PROCESS_COUNTERS
};
struct process_use {
    double counters[PROCESS_COUNTERS];
    double rss_bytes; /* resident memory now; a shared memory page counts once per process */
};

/* All descendants of this process, including those whose parents have ended. The counters include those of
 * descendants that have ended. */
struct process_tree;

/* Makes this process the parent of orphaned descendants (PR_SET_CHILD_SUBREAPER). The caller frees `*tree`
 * with process_tree_free(). STATUS_FAILED if /proc cannot be read, STATUS_EXHAUSTED if memory runs out. */
enum status process_tree_open(struct process_tree **tree);
void process_tree_free(struct process_tree *tree);

/* Reads what the tree has used so far; counters never decrease. Returns false if memory runs out, or if
 * processes end faster than they can be read; then all fields of `use` are negative. The first call reads all
 * of /proc; later calls read only new processes and the tree. Thread safe. */
bool process_tree_use(struct process_tree *tree, struct process_use *use);

/* Returns the number of processes that were running at the latest successful process_tree_use(). Thread safe.
 */
size_t process_tree_running(struct process_tree *tree);

/* Collects all children of this process that have ended. If `child` is one of them, returns true and sets
 * `*wait_status` as waitpid() does. No other function may wait for children, and SIGCHLD must not be ignored;
 * otherwise the status of `child` may be lost. If no children are left and `child` was not found, the
 * function warns, returns true, and sets the status of exit(1). Thread safe. */
bool process_tree_collect(struct process_tree *tree, pid_t child, int *wait_status);

/* ---- The monitor ---- */

/* The minimum number of samples for meaningful statistics. */
#define MONITOR_SAMPLES_MIN   20

#define MONITOR_PERIOD_MIN_MS 10
#define MONITOR_PERIOD_MAX_MS 60000
#define MONITOR_PERIOD_MS     500 /* the default; with one H200, a sample takes 3 ms of CPU time */

extern const struct column monitor_columns[]; /* ends with an entry whose name is NULL */

/* The sampled values, one column each, in this order. */
enum monitor_value {
    MONITOR_GPU_UTILISATION_PERCENT,
    MONITOR_GPU_MEMORY_BYTES,
    MONITOR_TEMPERATURE_C,
    MONITOR_POWER_W,
    MONITOR_SM_CLOCK_MHZ,
    MONITOR_MEMORY_CLOCK_MHZ,
    MONITOR_PCIE_RX_BYTES_PER_S,
    MONITOR_PCIE_TX_BYTES_PER_S,
    MONITOR_CPU_CORES,
    MONITOR_RSS_BYTES,
    MONITOR_READ_BYTES_PER_S,
    MONITOR_WRITE_BYTES_PER_S,
    MONITOR_VALUES
};

struct monitor_gpu {
    int number;             /* of the CUDA device, counted from 0 */
    const char *name;       /* name of the model */
    const char *pci_bus_id; /* in the form that NVML accepts */
};

/* GPUs to sample, and the memory of their names. Must not be moved, because `list` points into `texts`. */
#define MONITOR_GPUS_MAX 64
struct monitor_gpus {
    size_t count;
    struct monitor_gpu list[MONITOR_GPUS_MAX];
    struct {
        char name[256], pci_bus_id[32];
    } texts[MONITOR_GPUS_MAX];
};

/* The GPUs and processes to sample. All pointers must stay valid as long as the monitor. */
struct monitor_subject {
    const struct env *env;
    uint64_t rank;
    const struct monitor_gpu
        *gpus; /* one row per GPU and sample; the row of the first GPU also has the values of the processes */
    size_t gpu_count;          /* if 0, the rows name the CPU instead */
    struct process_tree *tree; /* the processes to sample; NULL: this process */
    const char *variant;       /* variant of the first samples; NULL: none until monitor_begin() */
};

/* Summary of the samples taken during a variant's timed runs (PHASE_TIMED). GPU values are pooled over all
 * sampled GPUs. */
struct monitor_summary {
    const char *variant;
    size_t samples;
    struct {
        size_t count; /* number of samples that have this value */
        double sum, max;
    } of[MONITOR_VALUES];
};

struct monitor;

/* Finds CUDA device `device`, or all devices that this process can use (CUDA_VISIBLE_DEVICES) if it is
 * negative. Creates no CUDA context, because a context would take device memory. Warns about a device whose
 * PCI bus id is unknown, and leaves it out. */
void monitor_find_gpus(int device, struct monitor_gpus *gpus);

/* Checks that samples can be appended to the CSV file at `path`. Returns the errors of csv_check(). Call
 * before measuring. */
enum status monitor_check(const char *path);

/* Starts a thread that samples every `period_ms` milliseconds. The samples are for the CSV file at `path`, a
 * text that must stay valid as long as the monitor. The caller frees `*monitor` with monitor_free().
 * STATUS_EXHAUSTED if memory runs out, STATUS_FAILED if the thread cannot be started. */
enum status monitor_open(const char *path, uint64_t period_ms, const struct monitor_subject *subject,
                         struct monitor **monitor);

/* Assigns all following samples to this variant, whose name must stay valid as long as the monitor.
 * STATUS_EXHAUSTED if memory runs out. */
enum status monitor_begin(struct monitor *monitor, const char *variant);

/* Gives all following samples this phase, instead of phase_now(). Copies the name, and keeps one copy of each
 * different name until monitor_free(). STATUS_EXHAUSTED if memory runs out; the phase then does not change.
 * Thread-safe. */
enum status monitor_phase(struct monitor *monitor, const char *name);

/* Returns the number of samples taken so far in the timed runs of the current variant. */
size_t monitor_timed_samples(struct monitor *monitor);

/* Writes the samples so far; sampling continues. STATUS_FAILED if the file cannot be written; the next call
 * then writes the remaining samples. */
enum status monitor_flush(struct monitor *monitor);

/* Writes the samples so far, as monitor_flush() does, but waits at most 1 s for the lock on the file. */
enum status monitor_try_flush(struct monitor *monitor);

/* Ends the current variant and writes the samples so far. STATUS_FAILED if the file cannot be written. */
enum status monitor_end(struct monitor *monitor);

/* Stops sampling, after a last sample if a process tree is sampled. Writes the remaining samples. Warns if
 * the monitor used more than 1 % of a core or missed more than 10 % of at least MONITOR_SAMPLES_MIN samples.
 * STATUS_FAILED if the file cannot be written. */
enum status monitor_stop(struct monitor *monitor);

/* Gets the summaries of all variants so far, owned by the monitor. Call after monitor_stop(). Returns their
 * number. */
size_t monitor_summaries(const struct monitor *monitor, const struct monitor_summary **summaries);

/* Frees the monitor after monitor_stop(). */
void monitor_free(struct monitor *monitor);

#endif
