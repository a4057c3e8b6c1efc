/* The page cache: what of a file it holds, and how a file gets out of it and in. */
#ifndef FDSL_LOAD_CACHE_H
#define FDSL_LOAD_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Pages, summed up over files. */
struct cache_pages {
    uint64_t resident, all;
    bool hidden; /* the kernel does not tell of some file, so `resident` says nothing */
};

FDSL_C_BEGIN

/* Adds the pages of an open file of `bytes`: cachestat(2), or mincore(2) over a mapping on kernels
 * before 6.5. Where the kernel tells only those who own a file or may write it, and this process does
 * neither, the pages are hidden. STATUS_FAILED with the reason. */
enum status cache_count(int fd, uint64_t bytes, struct cache_pages *pages);

/* Evicts an open file: writes its dirty pages out, then asks the kernel to drop them. Pages that some process
 * maps stay, which only cache_count() tells. */
enum status cache_evict(int fd);

/* Drops what the kernel holds of all files, names too, which only root may: true where it did. */
bool cache_drop_all(void);

/* Reads an open file through to its end, by way of `buffer`. */
enum status cache_fill(int fd, void *buffer, uint64_t buffer_bytes);

/* Bytes that this process had read from devices so far (/proc/self/io); false where the
 * kernel does not tell. */
bool cache_device_bytes(uint64_t *bytes);

static inline double cache_share(const struct cache_pages *pages)
{
    return pages->all ? (double)pages->resident / (double)pages->all : 0;
}

FDSL_C_END

#endif
