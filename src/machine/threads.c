#include "machine/threads.h"

#include <stdlib.h>
#include <string.h>

/* Returns the first of the comma-separated numbers in `text`; 0 if any is not a valid number of threads. */
static uint64_t first_of_list(const char *text)
{
    uint64_t first = 0;
    for (;; text++) {
        text += strspn(text, " \t");
        char *end;
        unsigned long value = *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;
        if (value < 1 || value > THREADS_MAX)
            return 0;
        first = first ? first : value;
        text = end + strspn(end, " \t");
        if (*text != ',')
            return *text ? 0 : first;
    }
}

bool threads_requested(uint64_t *threads)
{
    const char *text = getenv("OMP_NUM_THREADS");
    *threads = text && *text ? first_of_list(text) : 0;
    return *threads > 0 || !text || !*text;
}
