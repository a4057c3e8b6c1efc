/* Formats of stdout: rows as CSV or JSON for programs, and values for tables. */
#ifndef FDSL_RUN_FORMATS_H
#define FDSL_RUN_FORMATS_H

#include <stddef.h>

#include "core/status.h"
#include "run/record.h"

enum format { FORMAT_TABLE, FORMAT_CSV, FORMAT_JSON };

extern const char *const format_names[]; /* as enum format, NULL-terminated */

/* Returns STATUS_UNAVAILABLE if this build cannot write the format. */
enum status format_check(int format);

/* Prints one row as CSV (header and line) or as a JSON object. */
enum status format_row(const struct row *row, int format);

/* Rows with the same columns on stdout: CSV lines at once, JSON as one document at the end. */
struct row_printer {
    int format;
    size_t count; /* rows so far */
    void *json;   /* owned; an array */
};

void rows_begin(struct row_printer *printer, int format);
void rows_add(struct row_printer *printer, const struct row *row);

/* Prints the JSON document, if that is the format, and frees the rows. The document is an array, or with
 * `about` an object: `name` with the fields of `about`, and "rows" with the array. */
enum status rows_end(struct row_printer *printer, const char *name, const struct row *about);

/* Flushes stdout. STATUS_FAILED if anything could not be written. */
enum status format_flush(void);

/* Formats a time in the unit that leaves 1 to 999 before the decimal point. Returns `text`. */
const char *format_time(double time_s, char *text, size_t size);

#endif
