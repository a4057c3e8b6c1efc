#include "train/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/options.h"

#define LIMIT_LEAST_BYTES 1024.0
#define LIMIT_MOST_BYTES  0x1p60

/* ---- --memory-limit ---- */

enum status memory_limit_parse(const char *text, uint32_t ranks, uint64_t *limits)
{
    uint32_t count = 0;
    for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char word[32];
        uint64_t bytes;
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        TRY(parse_bytes("--memory-limit", word, LIMIT_LEAST_BYTES, LIMIT_MOST_BYTES, &bytes));
        if (count < ranks)
            limits[count] = bytes;
        count++;
    }
    for (uint32_t i = 1; count == 1 && i < ranks; i++)
        limits[i] = limits[0];
    return count == 1 || count == ranks
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--memory-limit %.80s has %" PRIu32 " sizes, but there %s %" PRIu32
                            " rank%s; give one size, or one per rank",
                            text, count, ranks == 1 ? "is" : "are", ranks, ranks == 1 ? "" : "s");
}
