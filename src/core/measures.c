#include "core/measures.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t find(const struct measures *measures, const char *column)
{
    size_t i = 0;
    while (measures->columns[i].column && strcmp(measures->columns[i].column, column) != 0)
        i++;
    if (measures->columns[i].column)
        return i;
    fprintf(stderr, "fdsl-bench: internal error: no measure is named '%s'\n", column);
    abort();
}

void measures_put(struct measures *measures, const char *column, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(measures->texts[find(measures, column)], MEASURE_TEXT_MAX, format, arguments);
    va_end(arguments);
}

void measures_real(struct measures *measures, const char *column, double value, int digits)
{
    if (isfinite(value))
        measures_put(measures, column, "%.*g", digits, value);
}

void measures_memory(struct measures *measures, double useful, double allocated)
{
    measures_put(measures, "peak_memory_bytes", "%.0f", allocated);
    if (allocated > 0)
        measures_real(measures, "memory_efficiency", useful / allocated, 4);
}

const char *measures_get(const struct measures *measures, const char *column)
{
    return measures->texts[find(measures, column)];
}
