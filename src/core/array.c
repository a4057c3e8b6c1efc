#include "core/array.h"

#include <stdlib.h>
#include <string.h>

#define FIRST 16 /* elements of the first allocation; a power of two */

/* The capacity is the smallest power of two that is at least FIRST and at least `count`. An array of at least
 * FIRST elements is therefore full if `count` is a power of two. */
bool array_grow(void *array, size_t count, size_t size)
{
    void *now, *larger;
    if (count > 0 && (count < FIRST || (count & (count - 1)) != 0))
        return true;
    memcpy(&now, array, sizeof now); /* memcpy(), because the type of the pointer is unknown */
    larger = reallocarray(now, count > 0 ? 2 * count : FIRST, size);
    if (!larger)
        return false;
    memcpy(array, &larger, sizeof larger);
    return true; /* cppcheck-suppress memleak */
}
