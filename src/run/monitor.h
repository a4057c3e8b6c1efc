/* The monitor: a thread that looks at the GPU and at this process at fixed times, while the main thread
 * works.
 *
 * It keeps its samples in memory, and they are written when nothing is being timed: at the end of each
 * variant and at the end. docs/monitor.md says what each column rests on. All functions are the main
 * thread's, and but for monitor_check() and monitor_open() do nothing where the monitor is NULL. */
#ifndef FDSL_RUN_MONITOR_H
#define FDSL_RUN_MONITOR_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "machine/env.h"

/* From so many samples on, a figure that rests on them is worth showing. */
#define MONITOR_SAMPLES_MIN   20

#define MONITOR_PERIOD_MIN_MS 10
#define MONITOR_PERIOD_MAX_MS 60000
#define MONITOR_PERIOD_MS     500 /* unless the user says otherwise; a look at an H200 costs 3 ms */

/* What is sampled: each is a column, in this order. */
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
    MONITOR_VALUES
};

/* Who is watched. All of it must outlive the monitor. */
struct monitor_subject {
    const struct env *env;
    uint64_t rank;
    const char *device;     /* the GPU's name, or the CPU's where there is no GPU */
    const char *pci_bus_id; /* of the GPU; empty: there is none */
};

/* What a variant's timed runs showed. */
struct monitor_summary {
    const char *variant;
    size_t samples;
    struct {
        size_t count; /* of the samples that have this value */
        double sum, max;
    } of[MONITOR_VALUES];
};

struct monitor;

/* Checks, before anything is measured, that samples can be appended to the CSV file at `path`: see
 * csv_check().
 */
enum status monitor_check(const char *path);

/* Starts watching, every `period_ms` from now on, for the file at `path`, which must outlive the monitor.
 * `*monitor` is freed by monitor_free(). STATUS_FAILED where memory or threads run out. */
enum status monitor_open(const char *path, uint64_t period_ms, const struct monitor_subject *subject,
                         struct monitor **monitor);

/* From now on samples belong to this variant, whose name must outlive the monitor. STATUS_FAILED where memory
 * runs out. */
enum status monitor_begin(struct monitor *monitor, const char *variant);

/* How many samples the present variant's timed runs have so far. */
size_t monitor_timed_samples(struct monitor *monitor);

/* Ends the variant and writes the samples so far. STATUS_FAILED where the file cannot be written. */
enum status monitor_end(struct monitor *monitor);

/* Stops watching and writes the rest; warns where watching took more than 1 % of a core, or could not keep
 * its times. STATUS_FAILED as above. */
enum status monitor_stop(struct monitor *monitor);

/* The summaries of the variants so far, owned by the monitor; after monitor_stop(). Returns their number. */
size_t monitor_summaries(const struct monitor *monitor, const struct monitor_summary **summaries);

void monitor_free(struct monitor *monitor);

#endif
