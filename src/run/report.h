/* Output on stdout in one format: a table, or CSV or JSON for programs. */
#ifndef FDSL_RUN_REPORT_H
#define FDSL_RUN_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "machine/device.h"
#include "run/bench.h"
#include "run/monitor.h"
#include "core/record.h"
#include "run/settings.h"

/* The result of one variant: of one rank, or of all ranks combined. */
struct result {
    const char *variant;
    struct bench bench; /* owned by the runner; no samples if the variant was not timed */
    struct work work;
    uint64_t runs_before; /* untimed runs before bench_measure(), to verify results or write output files;
                             counted as warm-ups */
    struct roofline roofline;
    uint64_t throttle_reasons;
    int sm_clock_mhz, mem_clock_mhz; /* medians during the timed runs; negative if unknown */
    double run_j;                    /* energy of the whole GPU per run, in joules; NaN if unknown */
    const char *instruction_set;     /* "" if the variant does no arithmetic on the CPU */
    const char *baseline; /* the variant whose time is in the numerator of `speedup`; "" if unknown */
    double speedup;       /* time per item of the baseline, divided by that of this variant; 0 if unknown */
    double imbalance;     /* median time of the slowest rank, divided by the mean over all ranks; 0 with one
                           * rank */
    double efficiency;    /* parallel efficiency (ranks_efficiency()); 0 if unknown */
    bool verified;
    uint64_t wrong;
    double stall_share;     /* share of time that the GPU waited for batches; negative without --compute */
    const struct row *rows; /* one per rank, then one for all ranks if there are several; none if not timed */
    size_t row_count;
};

/* Returns `amount` per second, or NaN if a rate has no meaning: if all ranks together process each item, a
 * single rank has nothing to do. */
double result_rate(const struct settings *settings, const struct result *result, double amount);

struct report;

/* Begins a report on stdout in settings->format. `baseline` is the name of the baseline of speed-ups, or NULL
 * if it is not among the chosen variants. report_end() frees `*report`. STATUS_EXHAUSTED if memory runs out.
 */
enum status report_begin(const struct settings *settings, const char *baseline, struct report **report);

/* Adds a result. Prints it immediately, except for JSON. STATUS_FAILED if stdout cannot be written. */
enum status report_add(struct report *report, const struct result *result);

/* Ends and frees the report. Prints the whole document for JSON, then one warning that summarises the rows
 * that are less reliable. STATUS_FAILED if stdout cannot be written. */
enum status report_end(struct report *report);

/* Prints the means and maxima of the monitor's samples during each variant's timed runs, after the table.
 * STATUS_FAILED if stdout cannot be written. */
enum status report_monitor(struct report *report, const struct monitor *monitor);

/* --list: prints the variants in settings->format, and why a variant cannot run here. Prints the variants of
 * --variant; without --variant, those of --workload; without both options, all variants. --verbose adds the
 * summaries. */
enum status report_list(const struct resources *resources, const struct settings *settings);

/* Warns if the driver must compile this build's CUDA kernels from PTX, because the build has no code for the
 * device. The warning names the variants that are slower for this reason, and the architecture to build
 * for. */
void report_compiled_at_load(const struct device_info *device);

/* --env: prints the environment, one line per property, or as CSV or JSON. */
enum status report_env(int device, int format);

#endif
