#include "run/rank_device.h"

#include <stdio.h>
#include <string.h>

#include "core/options.h"

#define DEVICE_MAX 1024
#define RANK_MAX   1e6

struct entry {
    uint64_t rank;
    int device;
};

/* Parses "0:cuda:1" or "0:cpu". */
static enum status parse_entry(const char *text, struct entry *entry)
{
    char rank[32];
    uint64_t device;
    size_t length = strcspn(text, ":");
    snprintf(rank, sizeof rank, "%.*s", (int)length, text);
    const char *name = text + length;
    if (parse_count("", rank, 0, RANK_MAX, &entry->rank) == STATUS_OK) {
        entry->device = RANK_DEVICE_CPU;
        if (strcmp(name, ":cpu") == 0)
            return STATUS_OK;
        if (strncmp(name, ":cuda:", 6) == 0 &&
            parse_count("", name + 6, 0, DEVICE_MAX, &device) == STATUS_OK) {
            entry->device = (int)device;
            return STATUS_OK;
        }
    }
    return status_set(STATUS_USAGE,
                      "--rank-device: '%.80s' is not RANK:cuda:N or RANK:cpu, such as 0:cuda:0 or 1:cpu",
                      text);
}

/* Parses the entry at `*at` and moves `*at` to the next one, or to NULL after the last one. */
static enum status next_entry(const char **at, struct entry *entry)
{
    char text[128];
    size_t length = strcspn(*at, ",");
    snprintf(text, sizeof text, "%.*s", (int)length, *at);
    *at = (*at)[length] == ',' ? *at + length + 1 : NULL;
    return parse_entry(text, entry);
}

enum status rank_device_find(const char *list, uint64_t ranks, uint64_t rank, int *device)
{
    struct entry entry, later;
    *device = RANK_DEVICE_AUTO;
    while (list) {
        TRY(next_entry(&list, &entry));
        if (entry.rank >= ranks)
            return status_set(
                STATUS_USAGE, "--rank-device names rank %llu, but the run has %llu rank%s, counted from 0",
                (unsigned long long)entry.rank, (unsigned long long)ranks, ranks == 1 ? "" : "s");
        for (const char *rest = list; rest;) {
            TRY(next_entry(&rest, &later));
            if (later.rank == entry.rank)
                return status_set(STATUS_USAGE, "--rank-device names rank %llu twice; drop one",
                                  (unsigned long long)entry.rank);
        }
        if (entry.rank == rank)
            *device = entry.device;
    }
    return STATUS_OK;
}
