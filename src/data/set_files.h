/* The files of a data set, read by several threads at random positions. Shards stay open up to a limit;
 * files of single samples are opened for each read. */
#ifndef FDSL_DATA_SET_FILES_H
#define FDSL_DATA_SET_FILES_H

#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"

struct set_files;

FDSL_C_BEGIN

/* Opens no file yet. `threads` is the largest number of threads that read at the same time. Of shards at
 * a URL without a cache folder, blocks are held in memory (data/remote_blocks.h), or whole shards if the
 * server does not send ranges: together at most `memory_bytes`, above 0, or one shard if it is larger. Open
 * shards of a cache with a maximum size have together at most that size. `dataset` must outlive the reader,
 * which the caller closes. */
enum status set_files_open(const struct dataset *dataset, uint32_t threads, uint64_t memory_bytes,
                           struct set_files **files);

/* Reads the first `size` bytes of a member. The size, inode and time of modification of the file must be
 * those that dataset_check() recorded; they are compared after reading. STATUS_FAILED, with the file and the
 * reason, if they differ or if the file cannot be read. Thread safe. */
enum status set_files_read(struct set_files *files, const struct dataset_member *member, uint64_t size,
                           uint8_t *bytes);

/* Starts to read a member of a shard at a URL, so that it arrives before set_files_read() needs it. Neither
 * waits nor reports errors. Thread safe. */
void set_files_ask(struct set_files *files, const struct dataset_member *member);

/* Returns the size of the blocks or shards that are held in memory. Thread safe. */
uint64_t set_files_held_bytes(struct set_files *files);

/* Closes all files. Ignores NULL. */
void set_files_close(struct set_files *files);

FDSL_C_END

#endif
