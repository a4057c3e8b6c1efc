/* Finds rows with equal hashes. */
#ifndef FDSL_OPS_DUPLICATES_H
#define FDSL_OPS_DUPLICATES_H

#include <stdint.h>

#include "core/portable.h"

/* Returns the number of slots of the hash table for `count` rows: a power of two, at least twice the count.
 */
static inline uint64_t duplicates_slots(uint64_t count)
{
    uint64_t slots = 2;
    while (slots < 2 * count)
        slots *= 2;
    return slots;
}

FDSL_C_BEGIN

/* Sets kept[i] to 0 for every kept row whose hash equals that of an earlier kept row. `table` has
 * duplicates_slots(count) elements and is overwritten. The result does not depend on the number of threads.
 */
void duplicates_drop(int threads, const uint64_t *hashes, uint64_t count, uint8_t *kept, uint64_t *table);

FDSL_C_END

#endif
