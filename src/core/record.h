/* Rows of results, and the CSV files they are written to.
 *
 * A row is a list of (column, text) pairs. CSV follows RFC 4180. All rows of a file have the same columns:
 * appending to a file with another header is refused. If rows cannot be written completely, the file is
 * restored, unless its file system has no locks. */
#ifndef FDSL_CORE_RECORD_H
#define FDSL_CORE_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "core/status.h"

/* The JSON type of a field. CSV writes the text unchanged. */
enum field_kind {
    FIELD_TEXT,
    FIELD_NUMBER, /* a number if the text is one, else a string */
    FIELD_FLAG    /* "" is null, "0" and "no" are false, all other strings are true */
};

struct field {
    char *column, *text; /* owned; text is "" if the value does not apply */
    enum field_kind kind;
};

struct row {
    struct field *fields;
    size_t count;
    bool failed; /* an earlier call on this row failed; see row_check() */
};

/* Append a field. Texts are copied; NULL means "". Reals keep 9 significant digits; NaN and infinities become
 * "". Errors are recorded in the row; row_check() returns them. */
void row_add(struct row *row, const char *column, const char *text, enum field_kind kind);
void row_text(struct row *row, const char *column, const char *text);
void row_number(struct row *row, const char *column, const char *text);
void row_count(struct row *row, const char *column, unsigned long long value);
void row_real(struct row *row, const char *column, double value);

/* Returns STATUS_EXHAUSTED if an earlier call on this row failed. */
enum status row_check(const struct row *row);

/* Frees the fields; the row is empty afterwards and can be reused. */
void row_free(struct row *row);

/* Replaces the text of a column. If the column does not exist or memory runs out, the row is marked as
 * failed. */
void row_set(struct row *row, const char *column, const char *text);

/* Returns the text of a column, owned by the row, or NULL if there is no such column. */
const char *row_get(const struct row *row, const char *column);

/* Write the column names or the fields of a row as one CSV line with "\n". */
void csv_write_header(FILE *stream, const struct row *row);
void csv_write_row(FILE *stream, const struct row *row);

/* Checks that rows with the columns of `row` can be appended to `path`. The folder of a new file must be
 * writable. An existing file must be a regular file. Unless it is empty, it must have this header and the
 * right number of fields in every row; csv_append() can cut off an incomplete last line. Changes nothing.
 * Call before measuring. If rows cannot be appended, returns STATUS_USAGE with the reason, the line and a
 * remedy. */
enum status csv_check(const char *path, const struct row *row);

/* Appends `count` >= 1 rows with the same columns to a file, under a lock, and syncs the file. Writes a
 * header first if the file is new or empty. If the write fails, for example on a full disk, removes what it
 * has written and returns STATUS_FAILED. A killed process can leave an incomplete last line. If the last line
 * has no line end and too few fields, it is cut off with a warning. If it has no line end but may be
 * complete, csv_check() and csv_append() refuse the file. On a file system without locks, rows are appended
 * with a warning and nothing is ever cut off. */
enum status csv_append(const char *path, const struct row *rows, size_t count);

/* Formats `count` >= 1 rows with the same columns as CSV lines, after a header. The caller frees `*text`. */
enum status csv_text(const struct row *rows, size_t count, char **text);

/* Appends those rows of `text` that the file does not contain. `text` is the result of csv_text(), perhaps in
 * an earlier process; no two of its rows are the same. `like` is any row with the same columns. `*added`
 * becomes the number of rows that were appended. STATUS_USAGE if the columns differ. */
enum status csv_complete(const char *path, const struct row *like, const char *text, size_t *added);

#endif
