#include "data/remote_blocks.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "data/remote.h"

/* A block in memory, or one that is being read. */
struct block {
    struct block *older, *newer; /* by the time of the latest use */
    uint64_t number;             /* among the blocks of all shards */
    uint64_t size;
    struct transfer *transfer; /* set until a thread waits for the block */
    bool arrived, failed;      /* seen by the thread that waited for it */
    struct failure failure;    /* why it failed, for all threads that wait for it */
    uint32_t users;            /* threads that copy from the block, or wait for it */
    bool unread;               /* it was asked for, and nobody has used it */
    uint8_t bytes[];
};

struct remote_blocks {
    const struct dataset *dataset;
    uint64_t limit;
    uint64_t *first; /* number of each shard's first block, and one end entry */
    pthread_mutex_t lock;
    pthread_cond_t changed;        /* a block has arrived, has failed, or has lost its last user */
    struct block **at;             /* by number; NULL: not in memory */
    struct block *oldest, *newest; /* all blocks in memory */
    uint64_t held, unread;         /* bytes of all blocks, and of the unread ones */
    bool stopped;                  /* written with `lock` and the lock of remote_stop(), read with either */
};

bool remote_blocks_possible(const struct dataset *dataset)
{
    bool possible = dataset->remote && dataset->shards && !remote_cached(dataset->remote);
    for (uint32_t f = 0; possible && f < dataset->file_count; f++)
        possible = !dataset->files[f].packed && remote_ranged(dataset->remote, dataset->files[f].name);
    return possible;
}

enum status remote_blocks_open(const struct dataset *dataset, uint64_t memory_bytes,
                               struct remote_blocks **blocks)
{
    struct remote_blocks *self = *blocks = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    *self = (struct remote_blocks){.dataset = dataset, .limit = memory_bytes};
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->changed, NULL);
    self->first = calloc((size_t)dataset->file_count + 1, sizeof *self->first);
    for (uint32_t f = 0; self->first && f < dataset->file_count; f++)
        self->first[f + 1] =
            self->first[f] + (dataset->files[f].bytes + REMOTE_BLOCK_BYTES - 1) / REMOTE_BLOCK_BYTES;
    if (self->first)
        self->at = calloc(self->first[dataset->file_count] + 1, sizeof(struct block *));
    if (self->at)
        return STATUS_OK;
    remote_blocks_close(self);
    *blocks = NULL;
    return status_set(STATUS_EXHAUSTED, "out of memory for the list of blocks of %u shards",
                      dataset->file_count);
}

/* ---- The list of blocks in memory. The caller holds the lock, here and below. ---- */

static void unlink_block(struct remote_blocks *blocks, struct block *block)
{
    *(block->older ? &block->older->newer : &blocks->oldest) = block->newer;
    *(block->newer ? &block->newer->older : &blocks->newest) = block->older;
    block->older = block->newer = NULL;
}

static void append(struct remote_blocks *blocks, struct block *block)
{
    block->older = blocks->newest;
    *(blocks->newest ? &blocks->newest->newer : &blocks->oldest) = block;
    blocks->newest = block;
}

/* Frees a block that has arrived and has no users. */
static void drop(struct remote_blocks *blocks, struct block *block)
{
    unlink_block(blocks, block);
    blocks->at[block->number] = NULL;
    blocks->held -= block->size;
    blocks->unread -= block->unread ? block->size : 0;
    free(block);
}

/* Returns the block without users whose latest use is the longest ago: of those that have arrived, or of
 * those that nobody has waited for. NULL if there is none. */
static struct block *find_unused(const struct remote_blocks *blocks, bool arrived)
{
    struct block *block = blocks->oldest;
    while (block && (block->users > 0 || block->arrived != arrived))
        block = block->newer;
    return block;
}

/* Drops blocks that have arrived until one of `size` bytes fits. Returns false if it cannot. */
static bool make_room(struct remote_blocks *blocks, uint64_t size)
{
    while (blocks->held > 0 && blocks->held + size > blocks->limit) {
        struct block *victim = find_unused(blocks, true);
        if (!victim)
            return false;
        drop(blocks, victim);
    }
    return true;
}

static uint64_t size_of(const struct remote_blocks *blocks, uint32_t file, uint64_t number)
{
    const uint64_t begin = (number - blocks->first[file]) * REMOTE_BLOCK_BYTES;
    const uint64_t left = blocks->dataset->files[file].bytes - begin;
    return left < REMOTE_BLOCK_BYTES ? left : REMOTE_BLOCK_BYTES;
}

/* Adds a block, and starts to read it. There must be room. */
static enum status begin(struct remote_blocks *blocks, uint32_t file, uint64_t number, bool unread)
{
    const uint64_t size = size_of(blocks, file, number);
    struct block *block = malloc(sizeof *block + size);
    TRY(ALLOCATED(block, "out of memory for a block of a shard"));
    *block = (struct block){.number = number, .size = size, .unread = unread};
    const enum status status = remote_begin(blocks->dataset->remote, blocks->dataset->files[file].name,
                                            (number - blocks->first[file]) * REMOTE_BLOCK_BYTES, size,
                                            block->bytes, &block->transfer);
    if (status != STATUS_OK) {
        free(block);
        return status;
    }
    append(blocks, block);
    blocks->at[number] = block;
    blocks->held += size;
    blocks->unread += unread ? size : 0;
    return STATUS_OK;
}

/* ---- Reading ---- */

/* Takes a user from a block. The last user of a failed block frees it. */
static void give_back(struct remote_blocks *blocks, struct block *block)
{
    if (--block->users > 0)
        return;
    if (block->failed)
        free(block);
    pthread_cond_broadcast(&blocks->changed);
}

/* Waits until a block has arrived or failed, and releases the lock for that time. The caller is a user of it.
 * If the request fails, removes the block from the list. */
static void receive(struct remote_blocks *blocks, struct block *block)
{
    struct transfer *transfer = block->transfer;
    block->transfer = NULL;
    pthread_mutex_unlock(&blocks->lock);
    const enum status status = remote_await(blocks->dataset->remote, transfer, &blocks->stopped);
    pthread_mutex_lock(&blocks->lock);
    block->arrived = status == STATUS_OK;
    block->failed = status != STATUS_OK;
    if (block->failed) {
        block->failure = status_save(status);
        blocks->unread -= block->unread ? block->size : 0;
        unlink_block(blocks, block);
        blocks->at[block->number] = NULL;
        blocks->held -= block->size;
    }
    pthread_cond_broadcast(&blocks->changed);
}

/* Makes the caller a user of a block that nobody has waited for, waits for it, and drops it, unless other
 * threads use it then. */
static void discard(struct remote_blocks *blocks, struct block *block)
{
    const struct failure latest = status_save(STATUS_FAILED); /* the caller may be about to report it */
    block->users++;
    receive(blocks, block); /* a thread that needs the block later makes another request */
    (void)status_restore(&latest);
    const bool drops = block->users == 1 && block->arrived;
    give_back(blocks, block);
    if (drops)
        drop(blocks, block);
}

/* Waits until there may be room for another block. Releases the lock for that time. */
static void await_room(struct remote_blocks *blocks)
{
    struct block *asked = find_unused(blocks, false);
    if (asked)
        discard(blocks, asked);
    else
        pthread_cond_wait(&blocks->changed, &blocks->lock);
}

static enum status check_running(const struct remote_blocks *blocks)
{
    return blocks->stopped ? status_set(STATUS_FAILED, "%s: reading was stopped", blocks->dataset->path)
                           : STATUS_OK;
}

/* Makes the caller a user of a block in the list. Waits for room if it must be read first. */
static enum status use(struct remote_blocks *blocks, uint32_t file, uint64_t number, struct block **used)
{
    TRY(check_running(blocks));
    while (!blocks->at[number]) {
        if (make_room(blocks, size_of(blocks, file, number)))
            TRY(begin(blocks, file, number, false));
        else
            await_room(blocks);
        TRY(check_running(blocks));
    }
    struct block *block = *used = blocks->at[number];
    block->users++;
    blocks->unread -= block->unread ? block->size : 0;
    block->unread = false;
    unlink_block(blocks, block);
    append(blocks, block);
    return STATUS_OK;
}

/* Makes the caller a user of a block that has arrived. If the request for it fails, all threads that wait for
 * the block return its message; the next call makes another request. */
static enum status take(struct remote_blocks *blocks, uint32_t file, uint64_t number, struct block **taken)
{
    TRY(use(blocks, file, number, taken));
    struct block *block = *taken;
    if (block->transfer)
        receive(blocks, block);
    while (!block->arrived && !block->failed)
        pthread_cond_wait(&blocks->changed, &blocks->lock);
    if (block->arrived)
        return STATUS_OK;
    const enum status status = status_restore(&block->failure);
    give_back(blocks, block);
    return status;
}

enum status remote_blocks_read(struct remote_blocks *blocks, uint32_t file, uint64_t offset, uint64_t size,
                               uint8_t *bytes)
{
    remote_blocks_ask(blocks, file, offset, size);
    while (size > 0) {
        const uint64_t within = offset % REMOTE_BLOCK_BYTES;
        struct block *block;
        pthread_mutex_lock(&blocks->lock);
        const enum status status =
            take(blocks, file, blocks->first[file] + offset / REMOTE_BLOCK_BYTES, &block);
        pthread_mutex_unlock(&blocks->lock);
        TRY(status);
        const uint64_t left = block->size - within, part = size < left ? size : left;
        memcpy(bytes, block->bytes + within, part);
        pthread_mutex_lock(&blocks->lock);
        give_back(blocks, block);
        pthread_mutex_unlock(&blocks->lock);
        bytes += part;
        offset += part;
        size -= part;
    }
    return STATUS_OK;
}

void remote_blocks_ask(struct remote_blocks *blocks, uint32_t file, uint64_t offset, uint64_t size)
{
    const uint64_t end = blocks->dataset->files[file].bytes;
    const uint64_t last = (offset + size < end ? offset + size : end) - 1;
    if (size == 0 || offset >= end)
        return;
    pthread_mutex_lock(&blocks->lock);
    for (uint64_t i = offset / REMOTE_BLOCK_BYTES; !blocks->stopped && i <= last / REMOTE_BLOCK_BYTES; i++) {
        const uint64_t number = blocks->first[file] + i, bytes = size_of(blocks, file, number);
        if (blocks->at[number])
            continue;
        /* The other half of the memory is for blocks that are in use. */
        if (blocks->unread + bytes > blocks->limit / 2 || !make_room(blocks, bytes) ||
            begin(blocks, file, number, true) != STATUS_OK)
            break; /* the thread that needs the block reads it, and reports errors */
    }
    pthread_mutex_unlock(&blocks->lock);
}

uint64_t remote_blocks_held(struct remote_blocks *blocks)
{
    pthread_mutex_lock(&blocks->lock);
    const uint64_t held = blocks->held;
    pthread_mutex_unlock(&blocks->lock);
    return held;
}

void remote_blocks_stop(struct remote_blocks *blocks)
{
    pthread_mutex_lock(&blocks->lock);
    for (struct block *block = blocks->oldest; block; block = block->newer)
        if (block->transfer)
            remote_abandon(blocks->dataset->remote, block->transfer);
    remote_stop(blocks->dataset->remote, &blocks->stopped, true);
    pthread_cond_broadcast(&blocks->changed);
    pthread_mutex_unlock(&blocks->lock);
}

void remote_blocks_resume(struct remote_blocks *blocks)
{
    pthread_mutex_lock(&blocks->lock);
    for (struct block *block; (block = find_unused(blocks, false));)
        discard(blocks, block);
    remote_stop(blocks->dataset->remote, &blocks->stopped, false);
    pthread_mutex_unlock(&blocks->lock);
}

void remote_blocks_close(struct remote_blocks *blocks)
{
    if (!blocks)
        return;
    remote_blocks_stop(blocks);
    remote_blocks_resume(blocks);
    while (blocks->oldest)
        drop(blocks, blocks->oldest);
    pthread_cond_destroy(&blocks->changed);
    pthread_mutex_destroy(&blocks->lock);
    free(blocks->at);
    free(blocks->first);
    free(blocks);
}
