/* Rows and tables as text: formats of stdout for people and programs, and CSV files that are read into
 * memory. */
#ifndef FDSL_RUN_FORMATS_H
#define FDSL_RUN_FORMATS_H

#include <stddef.h>
#include <stdint.h>

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
    void *json;   /* owned; an array */
};

void rows_begin(struct row_printer *printer, int format);
void rows_add(struct row_printer *printer, const struct row *row);

/* For FORMAT_JSON, prints the document. Frees the rows. The document is the array of rows if `about` is NULL.
 * Otherwise it is an object with two members: `name` has the fields of `about`, and "rows" has the array. */
enum status rows_end(struct row_printer *printer, const char *name, const struct row *about);

/* Flushes stdout. STATUS_FAILED if this or any earlier write to stdout failed. */
enum status format_flush(void);

/* Formats a time in s, ms, us or ns: the largest of these units in which it is at least 1. Returns `text`. */
const char *format_time(double time_s, char *text, size_t size);

/* ---- CSV files ---- */

#define TABLE_NONE SIZE_MAX /* no such column */

/* A CSV file in memory: a header, and rows with the same number of cells. */
struct table {
    const char *path; /* as given; for messages */
    size_t rows, columns;
    char *text;         /* owned; the cells, decoded in place */
    const char **cells; /* owned; (rows + 1) * columns strings, the header first */
    size_t *lines;      /* owned; the line number of each row */
    size_t header_line;
};

/* Reads a regular file in the format of RFC 4180. Takes a shared lock, because a run may be appending to the
 * file. Skips empty lines. The caller calls table_free(), even after a failure. `path` must outlive the
 * table. STATUS_FAILED if the file cannot be read or is malformed: a wrong number of cells, invalid quoting,
 * a NUL byte, or a last line without a line end, which may be incomplete. The message names the line and a
 * remedy. */
enum status table_read(const char *path, struct table *table);
void table_free(struct table *table);

/* Parses `text`: `bytes` bytes, followed by a zero byte. The table takes ownership of `text`, even after a
 * failure. STATUS_FAILED as from table_read(). */
enum status table_parse(const char *path, char *text, size_t bytes, struct table *table);

/* Reads a table that a person wrote. Its cells are separated by tabs if the header contains a tab, and
 * otherwise by commas as for table_read(). Also skips blank lines and lines that begin with '#', and the last
 * line needs no line end. Takes no lock. STATUS_USAGE for the faults that table_read() names. */
enum status table_read_by_hand(const char *path, struct table *table);

/* Returns the number of a column, counted from 0, or TABLE_NONE. */
size_t table_column(const struct table *table, const char *name);

/* Returns a cell, owned by the table; "" for the column TABLE_NONE. Rows are counted from 0, without the
 * header. */
const char *table_cell(const struct table *table, size_t row, size_t column);

#endif
