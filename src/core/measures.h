/* Measures: the values of a workload's own CSV columns in one row, accessed by name. */
#ifndef FDSL_CORE_MEASURES_H
#define FDSL_CORE_MEASURES_H

#include "core/portable.h"

#define MEASURES_MAX     64 /* maximum number of columns per workload */
#define MEASURE_TEXT_MAX 64 /* bytes per value, including the terminating zero */

/* The rule by which the row of all ranks together (rank=all) combines the values of the ranks. The rule also
 * defines whether the column contains text, numbers or hashes. */
enum combine {
    COMBINE_FIRST,    /* text that is the same on all ranks */
    COMBINE_SAME,     /* a number that is the same on all ranks */
    COMBINE_COMMON,   /* text: kept if it is the same on all ranks, else empty */
    COMBINE_NONE,     /* empty: the ranks measure this value at different times, so it cannot be combined */
    COMBINE_MIN,      /* the minimum */
    COMBINE_MEAN,     /* the mean */
    COMBINE_MAX,      /* the maximum */
    COMBINE_SUM,      /* the sum of integers */
    COMBINE_SUM_REAL, /* the sum of real numbers */
    COMBINE_HASHES,   /* the sum of 16-digit hexadecimal hashes modulo 2^64 */
};

struct measure {
    const char *column;
    enum combine combine;
};

/* The columns that measures_memory() sets: memory is allocated once per rank, so the sum over the ranks is
 * the memory of all ranks. */
#define MEMORY_MEASURES                  \
    {"peak_memory_bytes", COMBINE_SUM},  \
    {                                    \
        "memory_efficiency", COMBINE_MIN \
    }

struct measures {
    const struct measure *columns; /* ends with an entry whose column is NULL */
    char texts[MEASURES_MAX][MEASURE_TEXT_MAX];
};

FDSL_C_BEGIN

/* Formats the text of a column as printf() does. Columns are "" until set. An unknown column aborts the
 * program. */
void measures_put(struct measures *measures, const char *column, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Sets a column to `value` with `digits` significant digits. Does nothing if `value` is not finite. */
void measures_real(struct measures *measures, const char *column, double value, int digits);

/* Sets the columns MEMORY_MEASURES: the peak memory that a variant has allocated for data, and the fraction
 * of that memory that holds useful data. Both arguments are in bytes. */
void measures_memory(struct measures *measures, double useful, double allocated);

/* Returns the text of a column, "" if it was not set. Owned by `measures`. */
const char *measures_get(const struct measures *measures, const char *column);

FDSL_C_END

#endif
