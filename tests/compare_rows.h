/* Writes files of rows for the tests of fdsl-bench compare. */
#ifndef FDSL_TESTS_COMPARE_ROWS_H
#define FDSL_TESTS_COMPARE_ROWS_H

#include "program.h"

/* Default values of columns, for rows that do not set them. `schema`, which is not listed, defaults to the
 * schema of synth. A column with neither a value nor a default is empty. */
#define DEFAULTS                                                                                          \
    "time_utc=2026-01-01T00:00:00Z;host=vm;revision=aaa;workload=synth;variant=naive;device=CPU;ranks=1;" \
    "rank=0;threads=1;batch=32;res=512;samples=100;settled=yes;median_error=0.01;time_median_s=0.032;"    \
    "items=32;verified=yes;wrong=0"

/* Finds "column=value" in a list separated by ';'. Sets `text` to the value and returns its length, or
 * returns -1. */
static int find_value(const char *list, const char *column, size_t length, const char **text)
{
    while (*list) {
        if (strncmp(list, column, length) == 0 && list[length] == '=') {
            *text = list + length + 1;
            return (int)strcspn(*text, ";");
        }
        list += strcspn(list, ";");
        list += *list == ';';
    }
    return -1;
}

static void write_row(FILE *file, const char *row)
{
    for (const char *column = header; *column;) {
        const char *text = "";
        size_t length = strcspn(column, ",");
        int bytes = find_value(row, column, length, &text);
        if (bytes < 0 && strncmp(column, "schema", length) == 0)
            bytes = (int)strlen(text = workload_find("synth")->schema);
        if (bytes < 0)
            bytes = find_value(DEFAULTS, column, length, &text);
        column += length;
        fprintf(file, "%.*s%s", bytes < 0 ? 0 : bytes, text, *column ? "," : "\n");
        column += *column == ',';
    }
}

/* Writes a file of rows. Each further argument is one row, as "column=value;..."; NULL ends the list. */
static void put_rows(const char *path, ...)
{
    FILE *file = fopen(path, "w");
    va_list rows;
    cr_assert_not_null(file);
    fprintf(file, "%s\n", header);
    va_start(rows, path);
    for (const char *row; (row = va_arg(rows, const char *));)
        write_row(file, row);
    va_end(rows);
    cr_assert(fclose(file) == 0);
}

/* Runs `compare a.csv b.csv` with `arguments` and expects the exit status `expected`. */
static void compare(int expected, const char *arguments)
{
    run("compare a.csv b.csv %s", arguments);
    cr_expect(status == expected, "%s: exit %d, not %d: %s", arguments, status, expected, err);
}

static inline void expect_verdict(size_t row, const char *verdict)
{
    cr_expect_str_eq(value(out, row, "verdict"), verdict, "row %zu of\n%s", row, out);
}

static inline void expect_number(size_t row, const char *column, double expected)
{
    cr_expect(fabs(number(out, row, column) - expected) < 1e-6 * expected, "%s is %g, not %g", column,
              number(out, row, column), expected);
}

#endif
