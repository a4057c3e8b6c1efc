/* Output on stdout in one format: a table for people, or CSV or JSON for programs. */
#ifndef FDSL_RUN_REPORT_H
#define FDSL_RUN_REPORT_H

#include <stdbool.h>
#include <stddef.h>

#include "core/record.h"
#include "core/status.h"
#include "machine/device.h"
#include "machine/monitor.h"
#include "run/settings.h"

/* ---- Formats of rows ---- */

enum format { FORMAT_TABLE, FORMAT_CSV, FORMAT_JSON };

extern const char *const format_names[]; /* indexed by enum format, NULL-terminated */

/* Returns STATUS_UNAVAILABLE if this build cannot write the format. */
enum status format_check(int format);

/* Prints rows with the same columns to stdout: CSV lines immediately, JSON as one document at the end. Prints
 * nothing for FORMAT_TABLE. */
struct row_printer {
    int format;
    size_t count; /* number of rows so far */
    bool failed;  /* memory ran out for a row, which was not printed */
    void *json;   /* owned; an array */
};

void rows_begin(struct row_printer *printer, int format);
void rows_add(struct row_printer *printer, const struct row *row);

/* For FORMAT_JSON, prints the document. Frees the rows. The document is the array of rows if `about` is NULL.
 * Otherwise it is an object with two members: `name` has the fields of `about`, and "rows" has the array.
 * STATUS_EXHAUSTED if row_check() fails for `about` or for a row that was added. */
enum status rows_end(struct row_printer *printer, const char *name, const struct row *about);

/* Flushes stdout. STATUS_FAILED if this or any earlier write to stdout failed. */
enum status format_flush(void);

/* Formats a time in s, ms, us or ns: the largest of these units in which it is at least 1. Returns `text`. */
const char *format_time(double time_s, char *text, size_t size);

/* ---- The report of a run ---- */

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
