/* Unpacked copies of shards that are compressed by gzip (.tar.gz, .tgz). The order of a stream needs samples
 * from many places of a shard at a time, which a gzip file does not allow. So each shard is unpacked once,
 * from its begin to its end with a fixed amount of memory, into a copy in a cache folder. The copy is then
 * read like any shard, also by later runs. It belongs to the path, the size and the times of the shard: a
 * shard that was changed gets another copy. */
#ifndef FDSL_DATA_UNPACK_H
#define FDSL_DATA_UNPACK_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Ends unpack_shard() early: it then returns STATUS_FAILED. NULL in place of the struct: nothing does. */
struct unpack_stop {
    enum status (*check)(const void *context); /* fails with a message if unpacking shall end */
    const void *context;
};

FDSL_C_BEGIN

/* Returns whether a file is named like a shard that is compressed by gzip. */
bool unpack_is_packed(const char *name);

/* Returns whether a local path is such a file, or a folder that has one. */
bool unpack_is_place(const char *path);

/* Sets `*copy` (PATH_MAX bytes) to the path of the unpacked copy of the file `path` in `folder`, and `*bytes`
 * to its size. Writes the copy if there is none, which other processes may do at the same time: one of them
 * unpacks, the others wait. `limit`: maximum size of the copy; 0: none. `frozen`: writes nothing;
 * STATUS_USAGE if there is no copy. STATUS_FAILED if the file cannot be read, is no gzip file, is truncated
 * or damaged, or changes while it is read; STATUS_USAGE if `folder` cannot be used or the copy exceeds the
 * limit; STATUS_UNAVAILABLE in a build without zlib. The message begins with `path`, unless `folder` is to
 * blame. */
enum status unpack_shard(const char *path, const char *folder, uint64_t limit, bool frozen,
                         const struct unpack_stop *stop, char *copy, uint64_t *bytes);

FDSL_C_END

#endif
