#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for O_NOATIME */
#endif
#include "load/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_cachestat
#define SYS_cachestat 451 /* the same number on x86 and Arm */
#endif

struct cachestat_range_ {
    uint64_t offset, length;
};
struct cachestat_ {
    uint64_t cache, dirty, writeback, evicted, recently_evicted;
};

static uint64_t page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Returns whether mincore(2) reports correct results. For files that the process neither owns nor may write,
 * mincore(2) reports every page as resident. Only owners may set O_NOATIME, so setting this flag tests
 * ownership. */
static bool may_ask(int fd)
{
    char path[32];
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && fcntl(fd, F_SETFL, flags | O_NOATIME) == 0) {
        fcntl(fd, F_SETFL, flags);
        return true;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) == 0;
}

static enum status count_by_mincore(int fd, uint64_t bytes, uint64_t all, struct cache_pages *pages)
{
    unsigned char *states = malloc(all);
    void *mapping = states ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    enum status status = STATUS_OK;
    if (!states)
        status = status_set(STATUS_EXHAUSTED, "out of memory for the states of %llu pages",
                            (unsigned long long)all);
    else if (mapping == MAP_FAILED || mincore(mapping, bytes, states) != 0)
        status = status_set(status_of_errno(errno), "cannot query the page cache: %s", strerror(errno));
    for (uint64_t i = 0; status == STATUS_OK && i < all; i++)
        pages->resident += states[i] & 1;
    if (mapping != MAP_FAILED)
        munmap(mapping, bytes);
    free(states);
    return status;
}

enum status cache_count(int fd, uint64_t bytes, struct cache_pages *pages)
{
    uint64_t all = (bytes + page_bytes() - 1) / page_bytes();
    struct cachestat_range_ range = {0, bytes};
    struct cachestat_ stat = {0};
    if (bytes == 0)
        return STATUS_OK;
    if (syscall(SYS_cachestat, fd, &range, &stat, 0) == 0)
        pages->resident += stat.cache < all ? stat.cache : all;
    else if (!may_ask(fd))
        pages->hidden = true;
    else
        TRY(count_by_mincore(fd, bytes, all, pages));
    pages->all += all;
    return STATUS_OK;
}

enum status cache_evict(int fd)
{
    if (fdatasync(fd) != 0 && errno != EINVAL && errno != EROFS)
        return status_set(STATUS_FAILED, "cannot write dirty pages: %s", strerror(errno));
    int failure = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (failure)
        return status_set(STATUS_FAILED, "cannot evict from the page cache: %s", strerror(failure));
    return STATUS_OK;
}

bool cache_drop_all(void)
{
    int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool dropped = write(fd, "3\n", 2) == 2;
    close(fd);
    return dropped;
}

enum status cache_fill(int fd, void *buffer, uint64_t buffer_bytes)
{
    ssize_t count;
    off_t offset = 0;
    while ((count = pread(fd, buffer, buffer_bytes, offset)) > 0)
        offset += count;
    if (count < 0)
        return status_set(STATUS_FAILED, "cannot read at offset %lld: %s", (long long)offset,
                          strerror(errno));
    return STATUS_OK;
}

bool cache_device_bytes(uint64_t *bytes)
{
    unsigned long long found = 0;
    char line[128];
    bool known = false;
    FILE *stream = fopen("/proc/self/io", "re");
    while (stream && !known && fgets(line, sizeof line, stream))
        known = sscanf(line, "read_bytes: %llu", &found) == 1;
    if (stream)
        fclose(stream);
    *bytes = found;
    return known;
}
