/* What stdout shows: a table for people, or CSV or JSON for programs, never both. */
#ifndef FDSL_RUN_REPORT_H
#define FDSL_RUN_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "machine/device.h"
#include "run/bench.h"
#include "run/monitor.h"
#include "run/record.h"
#include "run/settings.h"

/* One variant's line: what one rank found, or all of them together. */
struct result {
    const char *variant;
    const char *cache;  /* the state of the page cache that runs begin with; NULL where it does not matter */
    struct bench bench; /* owned by the runner; no samples where the variant was not timed */
    struct work work;
    uint64_t
        runs_before; /* runs before the timing began: to verify, to deliver, and to warm up all the same */
    struct roofline roofline;
    uint64_t throttle_reasons;
    int sm_clock_mhz, mem_clock_mhz; /* medians during the timed runs; negative where unknown */
    double run_j;                    /* energy of a run, of the GPU as a whole; NaN where unknown */
    const char *instruction_set;     /* "" where the variant does no arithmetic on the CPU */
    const char *baseline;            /* the variant that `speedup` compares with; "" where that is unknown */
    double speedup;                  /* the baseline's time per item over this one's; 0 where unknown */
    double imbalance;  /* the slowest rank's median time over the mean of all; 0 with one rank */
    double efficiency; /* of what as many ranks would do, each as fast as one alone; 0 where unknown */
    bool verified;
    uint64_t wrong;
    double wait_share;      /* of the accelerator (--compute); negative where nothing consumed the batches */
    const struct row *rows; /* of each rank, and of all where there are several; none where not timed */
    size_t row_count;
};

struct report;

/* Begins a report on stdout in settings->format. `baseline` names the variant that speed-ups are over, NULL
 * where it is not among those of the call. `*report` is freed by report_end(). */
enum status report_begin(const struct settings *settings, const char *baseline, struct report **report);

/* Adds a result: printed at once, but for JSON. */
enum status report_add(struct report *report, const struct result *result);

/* Ends the report: the whole of it for JSON. STATUS_FAILED when stdout could not be written. */
enum status report_end(struct report *report);

/* Prints, below the table, what the monitor saw of each variant's timed runs: means and maxima. STATUS_FAILED
 * when stdout could not be written. */
enum status report_monitor(const struct monitor *monitor);

/* Prints every variant of a workload (`only`; NULL: of all), and why one cannot run here (--list), or what it
 * does as well (-v). */
enum status report_list(const struct resources *resources, const char *only, bool verbose, int format);

/* Warns where the driver compiles this build's kernels for the device, with the names of the variants that
 * are slower then and with the architecture to build for. */
void report_compiled_at_load(const struct device_info *device);

/* Prints the environment (--env), a line a fact, or as JSON. */
enum status report_env(int device, int format);

#endif
