/* Labels in `.cls` members. */
#ifndef FDSL_DATA_LABEL_H
#define FDSL_DATA_LABEL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define LABEL_BYTES_MAX 64   /* of a `.cls` member */
#define LABEL_NONE      (-1) /* of a sample without one */

/* The label in a `.cls` member: a whole number in decimal, blanks around it. False for anything else, and for
 * what an int32 does not hold. */
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

/* Parses the `size` bytes of a `.cls` member, of which `text` holds at least min(size, LABEL_BYTES_MAX).
 * STATUS_FAILED where they hold no class from 0 to `classes` - 1. Thread safe. */
enum status label_read(const uint8_t *text, uint64_t size, uint32_t classes, int32_t *label);

FDSL_C_END

#endif
