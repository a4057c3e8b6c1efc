/* A folder of files that were read from a URL, and of unpacked copies of shards. Several processes may use it
 * at the same time, and each of them may be killed at any time. Unless stated otherwise, functions return
 * STATUS_EXHAUSTED if the folder has no room or fails. */
#ifndef FDSL_DATA_REMOTE_CACHE_H
#define FDSL_DATA_REMOTE_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/file.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/remote.h"

/* A file of the cache. Its name consists of a hash of its source and a hash of its content. */
struct cache_entry {
    uint64_t source; /* hash of the URL or the path, the version and the size */
    uint64_t bytes;  /* CACHE_UNKNOWN: found out when the entry is written, by cache_append() */
};

#define CACHE_UNKNOWN UINT64_MAX

/* A file that is being written, under a temporary name that is locked. */
struct cache_draft {
    int fd; /* readable and writable; -1 if there is none */
    char *path;
    int turn;             /* the locked folder, if the size is unknown; otherwise -1 */
    uint64_t bytes, room; /* that were appended, and that are reserved, if the size is unknown */
};

/* Ends the waits of a function: it then returns STATUS_FAILED within 50 ms. is_set() is called while the
 * function waits for another process. NULL in place of the struct: waits until the other process is ready. */
struct cache_stop {
    bool (*is_set)(void *context);
    void *context;
};

/* Creates the folder if it does not exist. If `frozen` is true, only checks the folder. STATUS_USAGE if the
 * folder cannot be created or used. */
enum status cache_open(const char *folder, bool frozen);

/* Removes the least recently used entries until the rest fits into `limit` bytes (0: unlimited). */
enum status cache_trim(const char *folder, uint64_t limit, const struct cache_stop *stop);

/* STATUS_USAGE if `entry` alone exceeds the limit (0: unlimited). Removes nothing. */
enum status cache_check_fits(const struct cache_entry *entry, uint64_t limit);

/* Removes an entry, if it exists. */
void cache_remove(const char *folder, const struct cache_entry *entry);

/* Opens an entry for reading and marks it as used. The first time that this process opens the entry, compares
 * the content with the hash in the name, and removes the entry if they differ, or if it is not a regular
 * file. If `frozen` is true, neither marks nor removes it. Sets `*fd` to -1 if there is no such entry. */
enum status cache_find(const char *folder, const struct cache_entry *entry, bool frozen, int *fd);

/* Begins to write an entry. Waits while another process writes the same entry; if that process completed it,
 * sets `*fd` to the entry and leaves the draft without a file. Removes the least recently used entries until
 * `entry` fits into `limit` bytes (0: unlimited), and waits while the drafts of other processes leave too
 * little room. cache_check_fits() has accepted `entry`. One draft of unknown size at a time is written: with
 * two, each could wait for the room of the other. */
enum status cache_begin(const char *folder, const struct cache_entry *entry, uint64_t limit,
                        const struct cache_stop *stop, struct cache_draft *draft, int *fd);

/* Appends bytes to a draft of unknown size, after making room for them. STATUS_USAGE if they exceed the
 * limit. */
enum status cache_append(const char *folder, uint64_t limit, const struct cache_stop *stop,
                         struct cache_draft *draft, const void *bytes, size_t size);

/* Completes the draft: hashes, syncs and renames it. Sets `*fd` to the entry, opened for reading. */
enum status cache_complete(const char *folder, const struct cache_entry *entry, const struct cache_stop *stop,
                           struct cache_draft *draft, int *fd);

/* Removes the draft. */
void cache_abandon(struct cache_draft *draft);

/* ---- Compressed shards ---- */

/* Shards that are compressed by gzip (.tar.gz, .tgz, .mds.gz) or zstd (.tar.zst, .tzst, .mds.zstd). The order
 * of a stream needs samples from many places of a shard at a time, but such a file can only be read from its
 * begin to its end. So each shard is unpacked into an entry of the cache (data/remote_cache.h), which is then
 * read like any shard, also by later runs. Without a cache, it is unpacked into memory. */

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
