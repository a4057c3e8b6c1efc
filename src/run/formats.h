/* Rows as text: formats of stdout for people and programs. */
#ifndef FDSL_RUN_FORMATS_H
#define FDSL_RUN_FORMATS_H

#include <stdbool.h>
#include <stddef.h>

#include "core/record.h"
#include "core/status.h"

enum format { FORMAT_TABLE, FORMAT_CSV, FORMAT_JSON };

extern const char *const format_names[]; /* indexed by enum format, NULL-terminated */

/* Returns STATUS_UNAVAILABLE if this build cannot write the format. */
enum status format_check(int format);

/* Prints one row as CSV (header and line) or as a JSON object. */
enum status format_row(const struct row *row, int format);

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

#endif
