/* Rows of results, and the files that they go to.
 *
 * A row is a list of (column, text). CSV follows RFC 4180. A file holds rows of one schema: appending to a
 * file with another header is refused, and a row that could not be written whole leaves the file as it was.
 */
#ifndef FDSL_RUN_RECORD_H
#define FDSL_RUN_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "core/status.h"

/* What JSON makes of a field's text; CSV writes it as it is. */
enum field_kind {
    FIELD_TEXT,
    FIELD_NUMBER, /* bare, where it reads as a number */
    FIELD_FLAG    /* "0" and "no" are false, others true */
};

struct field {
    char *column, *text; /* owned; text is "" where the value does not apply */
    enum field_kind kind;
};

struct row {
    struct field *fields;
    size_t count, capacity;
    bool failed; /* memory ran out while adding; row_check() tells */
};

/* Adds a field at the end. Text is copied; NULL counts as empty. Reals keep 9 significant digits; NaN and
 * infinities become empty. */
void row_add(struct row *row, const char *column, const char *text, enum field_kind kind);
void row_text(struct row *row, const char *column, const char *text);
void row_number(struct row *row, const char *column, const char *text);
void row_count(struct row *row, const char *column, unsigned long long value);
void row_real(struct row *row, const char *column, double value);
enum status row_check(const struct row *row);
void row_free(struct row *row);

/* Gives a column another text. A column that is not there, or no memory, fails the row. */
void row_set(struct row *row, const char *column, const char *text);

/* The text of a column, or NULL where the row has no such column. */
const char *row_get(const struct row *row, const char *column);

/* Writes the row (or its column names, for the header) as one CSV line with "\n". */
void csv_write_header(FILE *stream, const struct row *row);
void csv_write_row(FILE *stream, const struct row *row);

/* Checks, before any measurement, that rows like `row` can be appended to `path`: the folder can be written,
 * and what exists is a regular file with this header and as many fields in every row. Touches nothing.
 * STATUS_USAGE with the reason (and the line) and a remedy. */
enum status csv_check(const char *path, const struct row *row);

/* Appends `count` >= 1 rows of one schema, all or none of them, after a header when the file is new or empty,
 * under a lock, and syncs. When the write fails half-way (a full disk), the file is cut back to what it was
 * and STATUS_FAILED says so. A last line
 * that a killed process left torn, without its end and with fields missing, is cut off with a warning; one
 * that may be whole is left alone, and both functions refuse the file. Where the file system has no locks the
 * row is appended with a warning, but nothing is ever cut. */
enum status csv_append(const char *path, const struct row *rows, size_t count);

/* A row as text: the header's line and its own. Owned by the caller. */
enum status csv_text(const struct row *row, char **text);

/* Appends a row that csv_text() gave, perhaps in another process, unless the file holds that very line;
 * `like` is any row of the same schema. `*added` tells. STATUS_USAGE where its columns are others. */
enum status csv_complete(const char *path, const struct row *like, const char *text, bool *added);

#endif
