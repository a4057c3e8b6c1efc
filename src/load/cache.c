/* The page cache: counts the resident pages of files, evicts files and reads files into the cache. Brings the
 * page cache into the requested state before a run of `load`. Decides which shards are pinned. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for O_NOATIME */
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "load/input.h"
#include "machine/host.h"

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

/* Evicts an open file: writes its dirty pages, then asks Linux to drop all its pages. Pages that a process
 * has mapped stay resident, without an error; check with cache_count(). */
static enum status evict_file(void *context, int fd, uint64_t bytes)
{
    (void)context, (void)bytes;
    if (fdatasync(fd) != 0 && errno != EINVAL && errno != EROFS)
        return status_set(STATUS_FAILED, "cannot write dirty pages: %s", strerror(errno));
    int failure = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (failure)
        return status_set(STATUS_FAILED, "cannot evict from the page cache: %s", strerror(failure));
    return STATUS_OK;
}

/* Drops all clean pages, directory entries and inodes from the caches of the system. Only root may do this.
 * Returns whether the call succeeded. */
static bool cache_drop_all(void)
{
    int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool dropped = write(fd, "3\n", 2) == 2;
    close(fd);
    return dropped;
}

#define FILL_BYTES ((uint64_t)1 << 20)

/* Reads an open file from start to end, so that its pages become resident. `buffer` has FILL_BYTES bytes. */
static enum status fill_file(void *buffer, int fd, uint64_t bytes)
{
    ssize_t count;
    off_t offset = 0;
    (void)bytes;
    while ((count = pread(fd, buffer, FILL_BYTES, offset)) > 0)
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

/* ---- The files of a data set ---- */

/* Opens every file and calls `act` with it. With load_skips(load), skips files that cannot be opened. */
static enum status each_file(const struct load *load,
                             enum status (*act)(void *context, int fd, uint64_t bytes), void *context)
{
    const struct dataset *dataset = load->dataset;
    for (uint32_t f = 0; f < dataset->file_count; f++) {
        int fd;
        if (dataset->files[f].dangling)
            continue;
        enum status status = dataset_file_open(dataset, f, 0, &fd);
        if (status == STATUS_FAILED && load_skips(load))
            continue;
        TRY(status);
        status = act(context, fd, dataset->files[f].bytes);
        close(fd);
        TRY(status_prefix(status, "%s/%s", dataset->path, dataset->files[f].name));
    }
    return STATUS_OK;
}

static enum status count_file(void *context, int fd, uint64_t bytes)
{
    return cache_count(fd, bytes, context);
}

enum status load_resident(const struct load *load, struct cache_pages *pages)
{
    *pages = (struct cache_pages){.hidden = dataset_in_memory(load->dataset)};
    return pages->hidden ? STATUS_OK : each_file(load, count_file, pages);
}

bool load_pages_hidden(const struct dataset *dataset)
{
    struct cache_pages pages = {0};
    int fd;
    for (uint32_t f = 0; pages.all == 0 && !pages.hidden && f < dataset->file_count; f++)
        if (dataset->files[f].bytes > 0 && dataset_file_open(dataset, f, 0, &fd) == STATUS_OK) {
            pages.hidden = cache_count(fd, 1, &pages) == STATUS_OK && pages.hidden;
            close(fd);
        }
    return pages.hidden;
}

#define COLD_SHARE_MAX 0.01
#define WARM_READS     3 /* maximum number of passes over all files; other processes may evict pages */

/* Reads all files, up to WARM_READS times, until their pages stay in the page cache. */
static enum status warm_up(const struct load *load, struct cache_pages *pages)
{
    FREED void *buffer = malloc(FILL_BYTES);
    TRY(ALLOCATED(buffer, "out of memory"));
    for (int i = 0; i < WARM_READS; i++) {
        TRY(each_file(load, fill_file, buffer));
        TRY(load_resident(load, pages));
        if (pages->hidden || cache_share(pages) >= WARM_SHARE_MIN)
            break;
    }
    return STATUS_OK;
}

enum status load_settle_cache(const struct load *load, struct cache_pages *pages)
{
    if (load->given->cache == LOAD_COLD) {
        TRY(each_file(load, evict_file, NULL));
        if (!load->given
                 ->rates_only) /* with it, other files stay cached, because runs alternate with warm ones */
            cache_drop_all();
    }
    TRY(load->given->cache == LOAD_WARM ? warm_up(load, pages) : load_resident(load, pages));
    if (load->given->cache == LOAD_COLD && !load->given->rates_only)
        cache_drop_all(); /* drop the directory entries and inodes that were cached when files were opened to
                           * count pages */
    double share = cache_share(pages);
    if (load->given->cache != LOAD_ANY && pages->hidden)
        return status_value(STATUS_FAILED, "cache", load->given->cache == LOAD_COLD ? "cold" : "warm",
                            ": Linux reports resident pages only to processes that own the "
                            "files or may write them; use --cache any");
    if (load->given->cache == LOAD_COLD && share > COLD_SHARE_MAX)
        return status_value(STATUS_FAILED, "cache", "cold",
                            ": %.1f %% of the data set stays in the page cache (the file system is in "
                            "memory, or another process uses the files); use --cache any",
                            100 * share);
    if (load->given->cache == LOAD_WARM && share < WARM_SHARE_MIN)
        return status_value(STATUS_FAILED, "cache", "warm",
                            ": only %.1f %% of the data set is in the page cache after reading it "
                            "%d times (too little memory, or another process evicts pages); use --cache any",
                            100 * share, WARM_READS);
    return STATUS_OK;
}

/* ---- Pinned shards ---- */

#define SHARE_CHUNKS 4 /* chunks per thread, at least, so that copies and kernels overlap */

bool load_should_pin(const struct load *load)
{
    const struct dataset *dataset = load->dataset;
    uint64_t bytes = 0;
    for (uint32_t f = 0; f < dataset->file_count; f++) {
        bytes += dataset->files[f].bytes;
        if (dataset_copied(dataset, f))
            return false;
    }
    return load->given->cache == LOAD_WARM && !load->given->decode && bytes <= memory_available_bytes() / 2;
}

uint64_t load_large_chunk(const struct load *load, int threads, uint64_t most_bytes)
{
    uint64_t chunk = load->dataset->bytes / load->ranks / (uint64_t)threads / SHARE_CHUNKS >> 12 << 12;
    chunk = chunk < most_bytes ? chunk : most_bytes;
    return chunk < load->chunk_bytes || !load->given->default_chunk ? load->chunk_bytes : chunk;
}
