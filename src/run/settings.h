/* Settings of a run: the options that all workloads share, and values derived from them. */
#ifndef FDSL_RUN_SETTINGS_H
#define FDSL_RUN_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "core/options.h"
#include "core/variant.h"
#include "core/workload.h"
#include "machine/nvml.h"
#include "run/bench.h"

#define SETTINGS_RANKS_MAX 1000000 /* more ranks than any machine can run */

enum scaling { SCALING_WEAK, SCALING_STRONG };
enum binding { BINDING_AUTO, BINDING_NONE };

struct settings {
    /* As given */
    const char *topic; /* the argument of --help; NULL: none */
    const char *variant_names, *workload_name, *out, *samples, *prepare, *verify_set, *config;
    const char *table, *task; /* --table runs the rows of a table */
    uint64_t scale;           /* 0: not given */
    const char *baseline;     /* the baseline of speed-ups; NULL: the workload's default */
    const char *rank_device;  /* NULL: not given */
    const char *monitor;      /* FILE[:MS]; after settings_read(), only FILE */
    uint64_t threads, device, loops;
    uint64_t ranks; /* the number of ranks for --dry-run; 0: the actual number */
    double max_error_percent;
    struct bench_limits limits; /* max_median_error is derived; --loops changes min_samples and max_time_s */
    double lock_timeout_s, rank_timeout_s;
    int format, scaling, binding;
    int gpu_others_action; /* enum gpu_others_action */
    bool verify, dry_run, best_gpu, list, columns, environment, help, version, verbose;

    /* Derived */
    char **command; /* the command after "--", which --monitor samples; NULL if variants run instead; not
                       owned */
    const struct workload *workload;
    /* With --variant auto: the candidates, the best first, until the runner has chosen one. Owned. */
    const struct variant_entry **variants;
    size_t variant_count;
    struct options options; /* the common options and the workload's options */
    void *parameters;       /* owned; the workload's parameter struct */
    bool unnamed;           /* --variant all or auto without --workload: the workload is the default */
    struct axes axes;
    size_t combination;   /* index of the current combination of the axes */
    uint64_t skipped[64]; /* hashes of the lines that said which variants were skipped, so that the runner
                             does not repeat them */
    size_t skipped_count;
    struct settings_given {
        void *parameters;
        const struct variant_entry **variants;
        size_t variant_count;
    } given; /* owned; copies from before the first combination, because each combination changes the
                originals */
    struct resources resources;
    struct gpu_others gpu_others; /* set before the first combination */
    int allowed_threads;          /* hardware threads that this process may use */
    char *monitor_file;           /* owned; the text that `monitor` points to */
    uint64_t monitor_period_ms;
};

/* Parses and checks the command line. --help, --version, --list, --columns, --env and --verify-set require no
 * other option. With --table, parses only the options that all workloads share, unless config->is_row: then
 * the options are those of a row, and --table is ignored. With --prepare, only settings->prepare is set, and
 * prepare_run() parses the rest. With
 * --prepare --help, `help` is also set, and `prepare` is "". `config` must outlive the settings. The caller
 * calls settings_free(), even after a failure. STATUS_USAGE if options are wrong; STATUS_UNAVAILABLE if this
 * build or machine lacks what they ask for; STATUS_EXHAUSTED if memory runs out. */
enum status settings_read(struct settings *settings, const struct config *config);
void settings_free(struct settings *settings);

/* Selects combination number `combination` of the axes. The first call saves the variants and parameters as
 * given; each call first restores them. STATUS_EXHAUSTED if memory runs out. */
enum status settings_combine(struct settings *settings, size_t combination);

/* Sets settings->resources.threads to --threads, to OMP_NUM_THREADS, or to the number of hardware threads
 * that this process may currently use, and makes this the number of OpenMP threads. */
void settings_take_threads(struct settings *settings);

/* Returns the training step that consumes every batch (--compute), or NULL. Owned by the parameters. */
const struct compute *settings_compute(const struct settings *settings);

/* Returns "weak" or "strong". */
const char *settings_scaling(const struct settings *settings);

/* Returns whether the options request only work that needs no variant: --help, --version, --list, --columns,
 * --env or
 * --verify-set. */
bool settings_informational(const struct settings *settings);

/* Returns the member of workload->alone that the options request, which need no variant; NULL: none. */
struct workload_alone;
const struct workload_alone *settings_alone(const struct settings *settings);

/* Returns whether an option of the workload has an effect on at least one of settings->variants. */
bool settings_uses(const struct settings *settings, const char *option);

/* Returns option number `index`, counted over the common options and those of all workloads, or NULL after
 * the last one. */
const struct option_spec *settings_option(size_t index);

/* Returns whether `name` is a common option or an option of any workload. */
bool settings_has_option(const char *name);

/* Prints one page of help: on settings->topic if it is set, else on the workload of --workload or --variant,
 * else an overview. With --verbose, describes all options of the workload, or of all workloads. STATUS_USAGE
 * for an unknown topic. */
enum status settings_help(const struct settings *settings, FILE *stream);

/* ---- The choice of devices ---- */

/* --rank-device: which rank uses which GPU, or the CPU. */
enum {
    RANK_DEVICE_AUTO = -1, /* the list does not name the rank */
    RANK_DEVICE_CPU = -2
};

/* Parses a list such as "0:cuda:0,1:cpu" for a run on `ranks` ranks. Sets `*device` to the CUDA device of
 * rank `rank`, or to one of the values above. A NULL list names no rank. STATUS_USAGE with the reason if the
 * list is malformed, names a rank twice, or names a rank that does not exist. A pure function. */
enum status rank_device_find(const char *list, uint64_t ranks, uint64_t rank, int *device);

/* Returns the index of the largest of `count` >= 1 numbers; if several are equal, the first. --best-gpu
 * chooses the device with this index. */
size_t gpu_most_free(const int64_t *free_bytes, size_t count);

#endif
