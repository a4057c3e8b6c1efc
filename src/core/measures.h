/* The values of a workload's own CSV columns in one row, by name. */
#ifndef FDSL_CORE_MEASURES_H
#define FDSL_CORE_MEASURES_H

#include "core/portable.h"

#define MEASURES_MAX     64 /* columns of a workload's own */
#define MEASURE_TEXT_MAX 64 /* bytes of a value's text, with its zero */

/* How the row of all ranks combines a column's values, which also tells whether it holds words, a hash or a
 * number. */
enum combine {
    COMBINE_FIRST,  /* rank 0's words, which are the same on all */
    COMBINE_SAME,   /* rank 0's number, which is the same on all */
    COMBINE_COMMON, /* rank 0's words where all ranks have the same, else nothing */
    COMBINE_NONE,   /* nothing: it is defined for one rank alone */
    COMBINE_MIN,    /* the smallest number */
    COMBINE_MEAN,
    COMBINE_MAX,    /* the largest number: the slowest rank's */
    COMBINE_SUM,    /* the sum of whole numbers */
    COMBINE_HASHES, /* the sum of 16 hexadecimal digits modulo 2^64 */
};

struct measure {
    const char *column;
    enum combine combine;
};

struct measures {
    const struct measure *columns; /* the last one's name is NULL */
    char texts[MEASURES_MAX][MEASURE_TEXT_MAX];
};

FDSL_C_BEGIN

/* Sets the text of a column, "" at first, as printf() does. The column must exist: a wrong name ends the
 * program. */
void measures_put(struct measures *measures, const char *column, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Sets a number with that many significant digits; the text stays empty where it is not finite. */
void measures_real(struct measures *measures, const char *column, double value, int digits);

/* The text of a column; "" where it was not set. */
const char *measures_get(const struct measures *measures, const char *column);

FDSL_C_END

#endif
