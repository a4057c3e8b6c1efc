/* Output on stdout in one format: a table, or CSV or JSON for programs. */
#ifndef FDSL_RUN_REPORT_H
#define FDSL_RUN_REPORT_H

#include "core/status.h"
#include "machine/device.h"
#include "machine/monitor.h"
#include "core/record.h"
#include "run/settings.h"

struct report;

/* Begins a report on stdout in settings->format. `baseline` is the name of the baseline of speed-ups, or NULL
 * if it is not among the chosen variants. report_end() frees `*report`. STATUS_EXHAUSTED if memory runs out.
 */
enum status report_begin(const struct settings *settings, const char *baseline, struct report **report);

/* Adds the result of a variant: one row per rank, then one for all ranks if there are several. Prints it
 * immediately, except for JSON. The table has one line per result, from the last row. A row without a time,
 * whose results are wrong, has only that line. STATUS_FAILED if stdout cannot be written. */
enum status report_add(struct report *report, const struct row *rows, size_t count);

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
