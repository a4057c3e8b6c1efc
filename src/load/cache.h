/* The page cache: counts the resident pages of a file, evicts a file, and loads it. */
#ifndef FDSL_LOAD_CACHE_H
#define FDSL_LOAD_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Page counts, summed over files. */
struct cache_pages {
    uint64_t resident, all;
    bool hidden; /* the kernel does not report the pages of some file, so `resident` is meaningless */
};

FDSL_C_BEGIN

/* Adds the pages of an open file of `bytes` bytes. Uses cachestat(2), or mincore(2) on a mapping for kernels
 * before 6.5. Some kernels report pages only to processes that own the file or may write it; otherwise sets
 * `hidden`. STATUS_FAILED with the reason. */
enum status cache_count(int fd, uint64_t bytes, struct cache_pages *pages);

/* Evicts an open file: writes its dirty pages, then asks the kernel to drop all of them. Pages mapped by a
 * process stay, without an error; check with cache_count(). */
enum status cache_evict(int fd);

/* Drops all clean pages, directory entries and inodes of the system. Only root may do this. Returns whether
 * it succeeded. */
bool cache_drop_all(void);

/* Reads an open file to its end, using `buffer`. */
enum status cache_fill(int fd, void *buffer, uint64_t buffer_bytes);

/* Bytes that this process has read from devices so far (/proc/self/io). False if the kernel does not report
 * it. */
bool cache_device_bytes(uint64_t *bytes);

static inline double cache_share(const struct cache_pages *pages)
{
    return pages->all ? (double)pages->resident / (double)pages->all : 0;
}

FDSL_C_END

#endif
