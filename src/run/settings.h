/* What the command line asks for: the options that every workload shares. */
#ifndef FDSL_RUN_SETTINGS_H
#define FDSL_RUN_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "core/config.h"
#include "core/options.h"
#include "core/variant.h"
#include "core/workload.h"
#include "run/bench.h"

enum format { FORMAT_TABLE, FORMAT_CSV, FORMAT_JSON };
enum scaling { SCALING_WEAK, SCALING_STRONG };
enum binding { BINDING_AUTO, BINDING_NONE };

struct settings {
    /* As given */
    const char *variant_names, *workload_name, *out, *samples, *prepare, *config;
    const char *baseline; /* the variant that speed-ups are over; NULL: the workload's */
    const char *monitor;  /* once read, the file alone */
    uint64_t threads, device, warmups, min_samples, loops;
    uint64_t ranks; /* that --dry-run checks for; 0: those that there are */
    double warmup_time_s, min_time_s, max_time_s, max_error_percent;
    double lock_timeout_s, rank_timeout_s;
    int format, scaling, binding;
    bool verify, dry_run, best_gpu, list, environment, help, version, verbose;

    /* Derived */
    const struct workload *workload;
    const struct variant_entry **variants; /* owned */
    size_t variant_count;
    struct options options; /* the core's table and the workload's */
    void *parameters;       /* the workload's struct; owned */
    struct resources resources;
    int allowed_threads; /* hardware threads that this process may use */
    struct bench_limits limits;
    char *monitor_file; /* what `monitor` names; owned */
    uint64_t monitor_period_ms;
};

/* Reads the command line. STATUS_USAGE or STATUS_UNAVAILABLE with one clear line. Where --help, --version,
 * --list or --env is given nothing else need be; where --prepare is, nothing else is read: data/prepare.h
 * does that. The caller frees, also after a failure. */
enum status settings_read(struct settings *settings, const struct config *config);
void settings_free(struct settings *settings);

/* Takes --threads, or as many threads as this process may run on now, into settings->resources. */
void settings_take_threads(struct settings *settings);

/* The training step that consumes every batch (--compute), or NULL. */
const struct compute *settings_compute(const struct settings *settings);

/* The name of a scaling: "weak", "strong". */
const char *settings_scaling(const struct settings *settings);

/* Whether only information was asked for, which needs no variant: --help, --version, --list, --env. */
bool settings_informational(const struct settings *settings);

/* Whether a name is that of an option, of any workload or of none. */
bool settings_has_option(const char *name);

/* Prints the help: of the chosen workload where --workload or --variant was given, else the common one, with
 * --verbose the options of all workloads. */
void settings_help(const struct settings *settings, FILE *stream);

#endif
