/* Blocks of the shards of a data set at a URL, held in memory up to a limit. A reader of small members at
 * random positions then needs neither whole shards nor one request per member. */
#ifndef FDSL_DATA_REMOTE_BLOCKS_H
#define FDSL_DATA_REMOTE_BLOCKS_H

#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"

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
