/* The files of a data set, read by several threads at random positions. Shards stay open up to a limit;
 * files of single samples are opened for each read. If the samples of shards are small, shards are read in
 * aligned blocks, which stay in memory while they serve their samples. Which members come from a block has no
 * effect on their bytes or on failures: if a block cannot be read, its members are read one by one. */
#ifndef FDSL_DATA_SET_FILES_H
#define FDSL_DATA_SET_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"

struct set_files;

FDSL_C_BEGIN

/* The order in which samples are read: from `lanes` windows at the same time. A window has `window` samples,
 * in runs of `run` consecutive samples of the set. 0 lanes: unknown, no blocks are read. */
struct set_files_order {
    uint32_t lanes, window, run;
    double share; /* of the samples that are read in an epoch, above 0 */
};

/* Returns the memory that blocks of a size need, if the windows of all lanes are to stay in memory. A run
 * covers one block more than its bytes fill, because it begins and ends within blocks. In the order of the
 * set, the threads read within a few blocks. `sample_bytes` is the mean size of a sample. */
uint64_t set_files_needed(const struct set_files_order *order, double sample_bytes, uint64_t block_bytes);

/* Opens no file yet. `threads` is the largest number of threads that read at the same time. Of shards at a
 * URL without a cache folder, blocks are held in memory (remote_blocks_open()), or whole shards if the server
 * does not send ranges: together at most `memory_bytes`, above 0, or one shard if it is larger. Open shards
 * of a cache with a maximum size have together at most that size. Blocks of other shards use at most one MiB
 * per lane. `dataset` must outlive the reader, which the caller closes. */
enum status set_files_open(const struct dataset *dataset, uint32_t threads, uint64_t memory_bytes,
                           const struct set_files_order *order, struct set_files **files);

/* Begins a new round of comparisons. Call it once per batch. Thread safe. */
void set_files_next_round(struct set_files *files);

/* Reads the first `size` bytes of a member. The identity of the file (core/file.h) must be the one that
 * dataset_check() recorded. It is compared after the bytes are read from the file, and if the
 * bytes come from a block of a file on a disk, once per file and round. STATUS_FAILED, with the file and the
 * reason, if they differ or if the file cannot be read. Thread safe. */
enum status set_files_read(struct set_files *files, const struct dataset_member *member, uint64_t size,
                           uint8_t *bytes);

/* Compares the file of a member that the caller has in memory, as set_files_read() does: a shard once per
 * round. A file at a URL is not compared. STATUS_FAILED, with the file, if it has changed. Thread safe. */
enum status set_files_recheck(struct set_files *files, const struct dataset_member *member);

/* Reads consecutive ranges of a local shard, from offset `offset` of its file `file` on: range r has
 * ranges[r].size bytes. Ranges that the caller does not need have room, too, but may be left unread. Does
 * not compare the identity of the file: the caller calls set_files_compare() after its last read. Returns
 * false, without a message, if the ranges cannot be read at once; set_files_read() then reads each member or
 * reports why it cannot. `count` is at most SET_FILES_RANGES. Thread safe. */
#define SET_FILES_RANGES 4 /* header, values, gap and label, or label first */
struct set_files_range {
    uint8_t *bytes;
    size_t size;
    bool needed;
};
bool set_files_read_ranges(struct set_files *files, uint32_t file, uint64_t offset,
                           const struct set_files_range *ranges, int count);

/* Begins a pass of comparisons: set_files_compare() compares each file once per pass. Thread safe. */
uint64_t set_files_begin_pass(struct set_files *files);

/* Compares the file that has the name of the member's shard now with the one that dataset_check() recorded,
 * unless set_files_compared() says that this pass has compared it. STATUS_FAILED, with the file, if they
 * differ. Each pass belongs to one thread. Thread safe. */
bool set_files_compared(const struct set_files *files, uint64_t pass, uint32_t file);
enum status set_files_compare(struct set_files *files, uint64_t pass, const struct dataset_member *member);

/* Fetches the bytes of a member into the cache of the processor if they are in a block in memory. Threads
 * that will read several members call this first for all of them. Changes only the speed. Thread safe. */
void set_files_prefetch(struct set_files *files, const struct dataset_member *member);

/* Returns the size of the memory for blocks. Thread safe. */
uint64_t set_files_block_bytes(const struct set_files *files);

/* Starts to read a member of a shard at a URL, so that it arrives before set_files_read() needs it. Neither
 * waits nor reports errors. Thread safe. */
void set_files_ask(struct set_files *files, const struct dataset_member *member);

/* Stops reading from a URL, or, after all threads have returned from set_files_read(), allows it again. While
 * it is stopped, set_files_read() fails, also in threads that wait for a server: within about a second. Does
 * not wait. Files on a disk are not affected. Thread safe. */
void set_files_stop(struct set_files *files);
void set_files_resume(struct set_files *files);

/* Returns the size of the blocks or shards that are held in memory. Thread safe. */
uint64_t set_files_held_bytes(struct set_files *files);

/* Closes all files. Ignores NULL. */
void set_files_close(struct set_files *files);

FDSL_C_END

/* ---- Blocks of shards at a URL ---- */

/* Blocks of the shards of a data set at a URL, held in memory up to a limit. A reader of small members at
 * random positions then needs neither whole shards nor one request per member. */

#define REMOTE_BLOCK_BYTES (UINT64_C(1) << 20)

struct remote_blocks;

FDSL_C_BEGIN

/* Returns whether all shards of a data set can be read in blocks: it is at a URL, has no cache folder, and
 * the server sends ranges of each shard together with its version. */
bool remote_blocks_possible(const struct dataset *dataset);

/* Reads nothing yet. The blocks have together at most `memory_bytes`, or one block per reading thread.
 * `dataset` must outlive the blocks, which the caller closes. */
enum status remote_blocks_open(const struct dataset *dataset, uint64_t memory_bytes,
                               struct remote_blocks **blocks);

/* The functions below are thread safe. */

/* Starts to read the blocks of a range of a shard, unless they are in memory or there is no room. Neither
 * waits nor reports errors. */
void remote_blocks_ask(struct remote_blocks *blocks, uint32_t file, uint64_t offset, uint64_t size);

/* Copies a range of a shard to `bytes`. Reads the blocks that are not in memory. STATUS_FAILED, with the
 * address, if the server does not send them, or if the shard has changed. */
enum status remote_blocks_read(struct remote_blocks *blocks, uint32_t file, uint64_t offset, uint64_t size,
                               uint8_t *bytes);

/* Returns the size of the blocks in memory. */
uint64_t remote_blocks_held(struct remote_blocks *blocks);

/* Abandons all requests. Until remote_blocks_resume(), remote_blocks_read() fails, also in threads that wait
 * for a request: within about a second. Does not wait. */
void remote_blocks_stop(struct remote_blocks *blocks);

/* Allows reading again after all threads have returned from remote_blocks_read(). Drops the blocks that were
 * asked for and not read. */
void remote_blocks_resume(struct remote_blocks *blocks);

/* Abandons all requests, and frees all blocks. Ignores NULL. */
void remote_blocks_close(struct remote_blocks *blocks);

FDSL_C_END

#endif
