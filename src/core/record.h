/* Rows of results: typed values over a constant table of columns, and the CSV files that rows are written to.
 *
 * A table of columns is the only place that declares a column. A value keeps its type until a row is written;
 * the text of a value is made then. CSV follows RFC 4180. All rows of a file have the same columns: appending
 * to a file with another header is refused. If rows cannot be written completely, the file is restored,
 * unless its file system has no locks. */
#ifndef FDSL_CORE_RECORD_H
#define FDSL_CORE_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/portable.h"
#include "core/status.h"

/* ---- Columns ---- */

enum value_type {
    VALUE_ABSENT, /* unknown, or does not apply: an empty cell in CSV, null in JSON. Not a type of a column */
    VALUE_INTEGER,
    VALUE_REAL,
    VALUE_WORD,   /* a text */
    VALUE_FLAG,   /* "yes" or "no" */
    VALUE_SWITCH, /* "1" or "0": an option without an argument */
    VALUE_HASH,   /* 16 hexadecimal digits */
};

/* How the row of all ranks together (rank=all) gets its value from the values of the ranks. Except with
 * COMBINE_FIRST, it has no value if the value of any rank is absent. */
enum combine {
    COMBINE_FIRST,  /* the value of rank 0 */
    COMBINE_COMMON, /* the value, if it is the same on all ranks */
    COMBINE_MIN,
    COMBINE_MEAN,
    COMBINE_MAX,
    COMBINE_SUM,      /* of hashes: modulo 2^64 */
    COMBINE_COMPUTED, /* the runner computes it from the samples and the work of all ranks */
    COMBINE_NONE      /* none: the ranks measure it at different times */
};

/* Which values of a column are better, for `fdsl-bench compare`. */
enum better {
    BETTER_BY_UNIT, /* lower for a time (unit "s"), higher for a rate (".../s"), else unknown */
    BETTER_LOWER,
    BETTER_HIGHER
};

struct column {
    const char *name;
    enum value_type type;
    enum combine combine;
    const char *unit;  /* "s", "bytes", ...; "" for a word, a count or a share */
    const char *about; /* one sentence for --columns */
    int digits;        /* of a real: significant digits, or DECIMALS(n); 0: 9 significant digits */
    enum better better;
    bool of_run; /* of several epochs, the value in the last one's row is the value of the whole run */
};

/* The first columns of each file that the program writes. `schema_about` and `time_about` are sentences. */
#define ORIGIN_COLUMNS(schema_about, time_about)                                            \
    {"schema", VALUE_WORD, COMBINE_FIRST, "", .about = schema_about},                       \
        {"time_utc", VALUE_WORD, COMBINE_FIRST, "", .about = time_about},                   \
        {"host", VALUE_WORD, COMBINE_FIRST, "", .about = "name of the machine"},            \
        {"job_id", VALUE_WORD, COMBINE_FIRST, "", .about = "id of the batch system's job"}, \
    {                                                                                       \
        "revision", VALUE_WORD, COMBINE_FIRST, "", .about = "revision of the source code"   \
    }

/* The value of `digits` for a real with N decimals; N > 0 without this macro means N significant digits. */
#define DECIMALS(n) (-(n))

/* The columns that row_memory() sets: memory is allocated once per rank, so the sum over the ranks is the
 * memory of all ranks. */
#define MEMORY_COLUMNS                                                                       \
    {"peak_memory_bytes", VALUE_INTEGER, COMBINE_SUM, "bytes",                               \
     .about = "largest amount of memory that the variant has allocated for data at a time"}, \
    {                                                                                        \
        "memory_efficiency", VALUE_REAL, COMBINE_MIN, "",                                    \
            "share of peak_memory_bytes that holds useful data", .digits = 4                 \
    }

/* ---- Rows ---- */

struct value {
    unsigned char type; /* enum value_type; a word may stand in a column of another type */
    signed char digits; /* of a real: as in struct column */
    union {
        uint64_t integer; /* also a hash */
        double real;
        bool flag;
        size_t word; /* offset in row->words */
    };
};

/* A row. {0} is a row without a table: setting a new column appends it. */
struct row {
    const struct column *columns;
    struct value *values;
    size_t count;
    char *words; /* the texts of the row, each with a terminating zero */
    size_t word_bytes;
    struct column *own; /* owned; the columns of a row without a table, else NULL */
    bool failed;        /* an earlier call on this row failed; see row_check() */
};

FDSL_C_BEGIN

/* Begins a row over a table, which ends with an entry whose name is NULL and must outlive the row. All values
 * are absent. Errors are recorded in the row; row_check() returns them. */
void row_open(struct row *row, const struct column *columns);

/* Set the value of a column. If the row's table lacks the column, they abort the program. Texts are copied;
 * an empty text, NULL, NaN and infinities make the value absent. */
void row_text(struct row *row, const char *column, const char *text);
void row_count(struct row *row, const char *column, unsigned long long value);
void row_real(struct row *row, const char *column, double value);
void row_positive(struct row *row, const char *column, double value); /* absent unless it is above 0 */
void row_flag(struct row *row, const char *column, bool value);
void row_hash(struct row *row, const char *column, uint64_t value);

/* Appends a column to a row without a table. Its text was read from a file, and JSON writes it as a number if
 * it is one. */
void row_number(struct row *row, const char *column, const char *text);

/* Sets the columns MEMORY_COLUMNS: the peak memory that a variant has allocated for data, and the share of it
 * that holds useful data. Both arguments are in bytes. */
void row_memory(struct row *row, double useful, double allocated);

/* Copies the value of column `index` from a row that has the same column there. */
void row_copy(struct row *row, size_t index, const struct row *from);

/* Returns STATUS_EXHAUSTED if an earlier call on this row failed. */
enum status row_check(const struct row *row);

/* Frees the row, which is then empty and can be used again. */
void row_free(struct row *row);

/* Return the index of a column (row->count if there is no such column) and its value (NULL if it is absent).
 */
size_t row_find(const struct row *row, const char *column);
const struct value *row_value(const struct row *row, const char *column);

/* Return the value of a column as a number (NaN if it is absent or no number) or as a word ("" if it is
 * absent or no word). The word belongs to the row. */
double row_get_real(const struct row *row, const char *column);
const char *row_get_word(const struct row *row, const char *column);

/* Returns the text of column `index` as CSV has it, "" if the value is absent. The text is in `buffer` or
 * belongs to the row. */
#define VALUE_TEXT_MAX 32
const char *row_cell(const struct row *row, size_t index, char buffer[VALUE_TEXT_MAX]);

FDSL_C_END

/* ---- CSV ---- */

/* Write the column names or the values of a row as one CSV line with "\n". */
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

/* ---- CSV files in memory ---- */

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
