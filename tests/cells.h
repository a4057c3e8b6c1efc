/* Access to CSV cells, for suites that run the program. */
#ifndef FDSL_TESTS_CELLS_H
#define FDSL_TESTS_CELLS_H

#include <criterion/criterion.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* The variants on the CPU that generate images in this build, in the order in which the program runs them. */
#ifdef _OPENMP
#define VARIANTS      "naive,omp"
#define VARIANT_COUNT 2
#else
#define VARIANTS      "naive"
#define VARIANT_COUNT 1
#endif

/* Counts the occurrences of the words in the text. */
static inline size_t count_of(const char *text, const char *words)
{
    size_t count = 0;
    for (const char *at = text; (at = strstr(at, words)); at += strlen(words))
        count++;
    return count;
}

/* Returns the text of a CSV cell; `row` 0 is the header. Skips lines of stderr between the rows, because a
 * busy machine causes warnings. The next call overwrites the returned text. */
static inline const char *cell(const char *csv, size_t row, size_t column)
{
    static char text[4096];
    size_t r = 0, c = 0, length = 0;
    bool quoted = false;
    for (const char *at = csv; *at && (r < row || (r == row && c <= column)); at++) {
        if (!quoted && (at == csv || at[-1] == '\n') && strncmp(at, "fdsl-bench: ", 12) == 0) {
            at += strcspn(at, "\n");
            if (!*at)
                break;
            continue;
        }
        quoted ^= *at == '"';
        if (!quoted && *at == '\n')
            r++, c = 0;
        else if (!quoted && *at == ',')
            c++;
        else if (r == row && c == column && *at != '"' && length + 1 < sizeof text)
            text[length++] = *at;
    }
    text[length] = '\0';
    return text;
}

/* Returns the text of a CSV cell. Row 1 is the first after the header. The next call of value() or cell()
 * overwrites the text. */
static inline const char *value(const char *csv, size_t row, const char *column)
{
    const char *at = csv;
    while (strncmp(at, "fdsl-bench: ", 12) == 0 && strchr(at, '\n'))
        at = strchr(at, '\n') + 1;
    for (size_t c = 0, length; *at && *at != '\n'; c++, at += length + (at[length] == ',')) {
        length = strcspn(at, ",\n");
        if (length == strlen(column) && strncmp(at, column, length) == 0)
            return cell(csv, row, c);
    }
    cr_assert_fail("no column %s", column);
    return "";
}

/* Expects the texts of some cells of a row. `cells` has them as "column=text;column=text". Row 1 is the first
 * after the header. */
static inline void expect_cells(const char *csv, size_t row, const char *cells)
{
    char copy[1024], *rest = copy, *text;
    cr_assert_lt(strlen(cells), sizeof copy);
    strcpy(copy, cells);
    while ((text = strsep(&rest, ";"))) {
        const char *column = strsep(&text, "=");
        cr_expect_str_eq(value(csv, row, column), text, "row %zu: %s is '%s', not '%s'", row, column,
                         value(csv, row, column), text);
    }
}

/* Returns the number in a CSV cell. Row 1 is the first after the header. */
static inline double number(const char *csv, size_t row, const char *column)
{
    char *end;
    const char *text = value(csv, row, column);
    double result = strtod(text, &end);
    cr_assert(end != text && !*end, "%s is '%s'", column, text);
    return result;
}

#endif
