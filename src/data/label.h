/* Labels of samples. */
#ifndef FDSL_DATA_LABEL_H
#define FDSL_DATA_LABEL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define LABEL_BYTES_MAX 64   /* maximum size of a member that is a label in decimal digits */
#define LABEL_NONE      (-1) /* value for a sample without a label */

/* Parses a label: a decimal integer, optionally surrounded by blanks, tabs and line breaks. Returns false for
 * any other text and for values outside int32. */
FDSL_HD bool label_parse(const uint8_t *text, uint64_t size, int32_t *label)
{
    uint64_t i = 0, digits = 0;
    int64_t value = 0;
    while (i < size && (text[i] == ' ' || text[i] == '\n' || text[i] == '\r' || text[i] == '\t'))
        i++;
    bool negative = i < size && text[i] == '-';
    for (i += negative; i < size && text[i] >= '0' && text[i] <= '9'; i++, digits++) {
        value = 10 * value + (text[i] - '0');
        if (value > (int64_t)INT32_MAX + negative)
            return false;
    }
    while (i < size && (text[i] == ' ' || text[i] == '\n' || text[i] == '\r' || text[i] == '\t'))
        i++;
    *label = (int32_t)(negative ? -value : value);
    return digits > 0 && i == size;
}

FDSL_C_BEGIN

/* STATUS_FAILED if the label is not a class from 0 to `classes` - 1. Thread safe. */
enum status label_check(int32_t label, uint32_t classes);

FDSL_C_END

#endif
