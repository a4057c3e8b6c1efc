/* The page cache: counts the resident pages of a file, evicts a file, and reads a file into the cache. */
#ifndef FDSL_LOAD_CACHE_H
#define FDSL_LOAD_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Number of pages, summed over files. */
struct cache_pages {
    uint64_t resident, all;
    bool hidden; /* Linux does not report the pages of at least one file, so `resident` is meaningless */
};

FDSL_C_BEGIN

/* Adds the pages of an open file of `bytes` bytes to `pages`. Uses cachestat(2), or mincore(2) if
 * cachestat(2) fails, as it does before Linux 6.5. Sets `hidden` if Linux does not report the pages, because
 * this process neither owns the file nor may write it. STATUS_FAILED, with the reason, if mincore(2) fails;
 * STATUS_EXHAUSTED if memory runs out. */
enum status cache_count(int fd, uint64_t bytes, struct cache_pages *pages);

/* Evicts an open file: writes its dirty pages, then asks Linux to drop all its pages. Pages that a process
 * has mapped stay resident, without an error; check with cache_count(). */
enum status cache_evict(int fd);

/* Drops all clean pages, directory entries and inodes from the caches of the system. Only root may do this.
 * Returns whether the call succeeded. */
bool cache_drop_all(void);

/* Reads an open file from start to end, so that its pages become resident. Each call of pread(2) fills
 * `buffer`, which has `buffer_bytes` bytes. STATUS_FAILED if a call fails. */
enum status cache_fill(int fd, void *buffer, uint64_t buffer_bytes);

/* Sets `*bytes` to the number of bytes that this process has read from storage devices so far
 * (/proc/self/io). Returns false if Linux does not report it. */
bool cache_device_bytes(uint64_t *bytes);

/* Returns the resident share of all counted pages, from 0 to 1; 0 if none were counted. */
static inline double cache_share(const struct cache_pages *pages)
{
    return pages->all ? (double)pages->resident / (double)pages->all : 0;
}

FDSL_C_END

#endif
