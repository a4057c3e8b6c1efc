#include "machine/memory.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "machine/system_file.h"

static bool read_group(const char *directory, const char *file, const char *key, uint64_t *number)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", directory, file);
    return length < (int)sizeof path && system_number(path, key, number);
}

/* Returns the bytes that can still be allocated under the limit of one cgroup, ignoring its ancestors.
 * memory.current includes the file cache, which a program fills by reading a large data set. Linux drops this
 * cache before it refuses an allocation, so the cache counts as free. */
static uint64_t group_headroom_bytes(const char *directory)
{
    uint64_t limit, used = 0, active = 0, inactive = 0;
    if (!read_group(directory, "memory.max", "", &limit))
        return UINT64_MAX;
    read_group(directory, "memory.current", "", &used);
    read_group(directory, "memory.stat", "active_file", &active);
    read_group(directory, "memory.stat", "inactive_file", &inactive);
    uint64_t cache = active + inactive;
    used = used > cache ? used - cache : 0;
    return limit > used ? limit - used : 0;
}

uint64_t memory_cgroup_headroom_bytes(const char *root, const char *group)
{
    char directory[PATH_MAX];
    uint64_t least = UINT64_MAX;
    if (snprintf(directory, sizeof directory, "%s%s", root, group) >= (int)sizeof directory)
        return least;
    for (;;) {
        uint64_t headroom = group_headroom_bytes(directory);
        least = headroom < least ? headroom : least;
        char *last = strrchr(directory + strlen(root), '/');
        if (!last)
            return least;
        *last = '\0';
    }
}

static int memory_sharers = 1;

void memory_share(int processes)
{
    memory_sharers = processes;
}

uint64_t memory_available_bytes(void)
{
    char group[PATH_MAX];
    uint64_t available = system_memory_bytes("MemAvailable:");
    uint64_t headroom = UINT64_MAX;
    if (system_field("/proc/self/cgroup", "0::", group, sizeof group))
        headroom = memory_cgroup_headroom_bytes("/sys/fs/cgroup", group);
    if (memory_sharers == 0)
        return 0;
    return (headroom < available ? headroom : available) / (uint64_t)memory_sharers;
}

enum status memory_check(uint64_t bytes, const char *what, const char *remedy)
{
    uint64_t available = memory_available_bytes();
    if (available == 0 || bytes <= available)
        return STATUS_OK;
    return status_set(STATUS_TOO_LARGE, "%s: %.2f GB of memory needed, %.2f GB available; %s", what,
                      1e-9 * (double)bytes, 1e-9 * (double)available, remedy);
}
