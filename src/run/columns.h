/* The columns of rows: those that all workloads share, the options of a workload, and what it measures. */
#ifndef FDSL_RUN_COLUMNS_H
#define FDSL_RUN_COLUMNS_H

#include <stddef.h>

#include "core/record.h"
#include "core/status.h"
#include "core/workload.h"

/* The tables of columns of a workload. They are made once and kept. */
struct row_columns {
    const struct workload *workload;
    struct column *row, *sample; /* of the rows of --out and of --samples-out */
    size_t shared;               /* number of first columns, which identify the run, in both tables */
};
enum status columns_of(const struct workload *workload, const struct row_columns **columns);

/* Copies the default of the option that has a column to `text`, as rows write it: at most `size` - 1 bytes;
 * "" if there is none. */
enum status columns_default(const struct workload *workload, const char *column, char *text, size_t size);

/* --columns: describes the columns of a workload, or if `only` is NULL of all workloads, of --log and of
 * --monitor: as a page of Markdown, or one row per column in CSV or JSON. */
enum status columns_print(const struct workload *only, int format);

#endif
