/* Shards that are compressed by gzip (.tar.gz, .tgz, .mds.gz) or zstd (.tar.zst, .tzst, .mds.zstd). The order
 * of a stream needs samples from many places of a shard at a time, but such a file can only be read from its
 * begin to its end. So each shard is unpacked into an entry of the cache (data/remote_cache.h), which is then
 * read like any shard, also by later runs. Without a cache, it is unpacked into memory. */
#ifndef FDSL_DATA_UNPACK_H
#define FDSL_DATA_UNPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/file.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/remote.h"
#include "data/remote_cache.h"

/* The remedy in messages about compressed shards, if they do not fit into memory. */
#define UNPACK_REMEDY                                                                                   \
    OPTION_OR_FIELD("add --cache-dir DIR, a folder on a disk with room for unpacked copies, or unpack " \
                    "the shards",                                                                       \
                    "set cache_dir to a folder on a disk with room for unpacked copies, or unpack the " \
                    "shards")

FDSL_C_BEGIN

/* Returns whether a file is named like a shard that is compressed. */
bool unpack_is_packed(const char *name);

/* A file to unpack. */
struct unpack_input {
    int fd;               /* an open file, which is read from its begin */
    const uint8_t *bytes; /* the file in memory; NULL: `fd` is read */
    size_t size;          /* of the file in memory */
    bool tar;             /* refuse data that do not begin like a tar file */
};

/* Unpacks a file, and hands the bytes to add(), at most 1 MiB at a time. The first bytes say which format it
 * is; members of gzip and frames of zstd may follow each other. Uses about 2 MiB, and for zstd the window of
 * the file, at most 128 MiB. The data may have 1,032 times the size of the file, or 64 MiB if that is more.
 * STATUS_FAILED with a remedy if the file breaks a rule, is truncated or damaged; STATUS_UNAVAILABLE if this
 * build lacks the library for it. Relays failures of add(). */
enum status unpack_bytes(const struct unpack_input *input,
                         enum status (*add)(void *context, const void *bytes, size_t size), void *context);

/* Opens the unpacked copy of a file in the cache of `options`, and writes it first if there is none: of
 * several processes, one unpacks, and the others wait. `copy` identifies it; its size may be CACHE_UNKNOWN.
 * `packed` is the open file. `identity`, if it is not NULL, is what the file must still have when it has been
 * read. Errors are those of unpack_bytes() and remote_cache.h; also STATUS_USAGE if the copy exceeds the
 * limit, or if there is none and the cache is frozen. */
enum status unpack_open(const struct remote_options *options, const struct cache_stop *stop,
                        const struct cache_entry *copy, const struct unpack_input *packed,
                        const struct file_identity *identity, int *fd);

/* Unpacks a file into an anonymous file in memory, for data sets without a cache, and sets `*fd` to it.
 * `stop`, `packed` and `identity` are those of unpack_open(). Errors are those of unpack_bytes(); also
 * STATUS_EXHAUSTED if memory runs out. */
enum status unpack_to_memory(const struct cache_stop *stop, const struct unpack_input *packed,
                             const struct file_identity *identity, int *fd);

FDSL_C_END

#endif
