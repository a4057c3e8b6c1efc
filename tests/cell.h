/* Reads the text of a row's cell, for the tests. */
#ifndef FDSL_TESTS_CELL_H
#define FDSL_TESTS_CELL_H

#include "core/record.h"

/* Returns the text of a column as CSV has it, or NULL if there is no such column. The text is
 * valid until the fourth next call. */
static inline const char *cell(const struct row *row, const char *column)
{
    static char buffers[4][VALUE_TEXT_MAX];
    static unsigned turn;
    size_t at = row_find(row, column);
    return at < row->count ? row_cell(row, at, buffers[turn++ % 4]) : NULL;
}

#endif
