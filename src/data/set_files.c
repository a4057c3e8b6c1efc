/* The files of a data set: open shards, blocks of shards on disk and at a URL, and members that stay in
 * memory (resident.h). */
#include "data/set_files.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "data/remote.h"
#include "data/resident.h"
#include "machine/host.h"

/* ---- Files ---- */

#define OPEN_MAX_SHARDS   256 /* at most this many shards are open */
#define NONE              UINT32_MAX

#define BLOCK_MIN         (UINT64_C(16) << 10)
#define BLOCK_MAX         (UINT64_C(1) << 20)
#define LANE_BYTES        (UINT64_C(1) << 20)   /* of blocks per lane */
#define BLOCKS_MAX        (UINT64_C(256) << 20) /* of all blocks */
#define BLOCK_SAMPLES     8 /* a block must serve this many samples, otherwise it costs more than it saves */
#define BLOCK_MEMBER      (UINT64_C(64) << 10) /* larger members are read alone */
#define BLOCK_SPREAD      (UINT64_C(64) << 10) /* blocks are halved to this size while a set has fewer than */
#define BLOCKS_SPREAD     512                  /* this many: threads then seldom need the same block */
#define BLOCK_WAYS        16
#define SEQUENTIAL_BLOCKS 4
#define HUGE_PAGE         (UINT64_C(2) << 20)
#define NO_BLOCK          UINT64_MAX

/* An open shard, or one that a thread is opening. */
struct entry {
    uint32_t file;  /* NONE: the entry is free */
    uint32_t users; /* threads that read it */
    uint64_t used;  /* time of the latest use, by a counter of uses */
    int fd;
    bool opening;
    atomic_bool ready;      /* with keeps_all: the shard is open, and stays open until the end */
    uint64_t device, inode; /* of the open file */
    struct failure failure; /* why it could not be opened, for the threads that waited for that */
};

/* A block of a shard in memory. Threads find blocks in a group of BLOCK_WAYS blocks. */
struct block {
    uint64_t name; /* number of the file, and of the block in the file; NO_BLOCK: the block is free */
    uint64_t used; /* time of the latest use, by the clock of the group */
    bool filled;   /* false: a thread reads it */
    _Atomic uint32_t users; /* threads that read or copy it; incremented under the lock of the group */
};

struct block_group {
    _Alignas(64) pthread_mutex_t lock; /* protects all members */
    uint64_t clock;
    struct block blocks[BLOCK_WAYS];
};

struct set_files {
    const struct dataset *dataset;
    struct remote_blocks *remote; /* blocks of shards at a URL; NULL: whole shards are opened */
    struct block_group *groups;   /* NULL: no blocks are read */
    uint32_t group_count, ways;   /* ways: blocks per group */
    uint64_t block_bytes;
    uint8_t *block_memory;
    _Atomic uint64_t round;     /* from 1 on */
    _Atomic uint64_t *compared; /* per file: a round in which it was compared */
    _Atomic uint64_t passes;    /* number of passes that began */
    _Atomic uint64_t *passed;   /* per file: a pass that has compared it */
    uint64_t *first_block;      /* per file: number of blocks of the files before it */
    bool in_memory;             /* see dataset_in_memory() */
    bool stopped;               /* no shard of a URL is read; for remote_stop() */
    uint64_t limit; /* of the total size of the open shards, if they are in memory or in a bounded cache,
                       where a removed file keeps its room on the disk until it is closed; 0: none */
    pthread_mutex_t lock; /* protects everything below */
    pthread_cond_t changed;
    uint32_t *entry_of; /* by the number of the file; NONE: the file is not open. NULL: no shards */
    struct entry *entries;
    uint32_t capacity, count; /* entries, and those that are not free */
    bool keeps_all;           /* each shard has the entry of its number, and stays open */
    uint64_t bytes, clock;    /* total size of the files in entries; counter of uses */
};

/* ---- Opening and closing ---- */

/* Returns the number of shards that may be open: a quarter of the descriptors of this process, so that its
 * other parts keep theirs, but more than there are threads. */
static uint32_t capacity_of(const struct dataset *dataset, uint32_t threads)
{
    struct rlimit limit;
    uint64_t most = OPEN_MAX_SHARDS;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur / 4 < most)
        most = limit.rlim_cur / 4;
    most = most < dataset->file_count ? most : dataset->file_count;
    return most > threads ? (uint32_t)most : threads + 1;
}

uint64_t set_files_needed(const struct set_files_order *order, double sample_bytes, uint64_t block_bytes)
{
    const double runs = order->window > 0 ? 1 + (double)order->window / order->run : SEQUENTIAL_BLOCKS;
    return (uint64_t)(order->lanes * (order->window * sample_bytes + runs * (double)block_bytes));
}

/* Returns the size of a block: the largest with which the windows of all lanes fit into seven eighths of the
 * memory for blocks, because groups fill unevenly; 0 if blocks would serve too few samples. Larger blocks
 * need fewer reads from a slow disk; in the page cache, the sizes differ little. */
static uint64_t choose_block(const struct dataset *dataset, const struct set_files_order *order,
                             uint64_t limit)
{
    uint64_t total = 0, block = BLOCK_MAX;
    for (uint32_t i = 0; i < dataset->file_count; i++)
        total += dataset->files[i].bytes;
    const double sample_bytes = (double)total / dataset->sample_count;
    while (block > BLOCK_SPREAD && total < BLOCKS_SPREAD * block)
        block /= 2;
    while (block >= BLOCK_MIN && total > limit &&
           set_files_needed(order, sample_bytes, block) > limit / 8 * 7)
        block /= 2;
    return block >= BLOCK_MIN && (double)block * order->share >= BLOCK_SAMPLES * sample_bytes ? block : 0;
}

/* Allocates the blocks. The system provides memory for them when they are used first. */
static enum status open_blocks(struct set_files *self, const struct set_files_order *order)
{
    const struct dataset *dataset = self->dataset;
    const uint64_t lanes_bytes = order->lanes * LANE_BYTES;
    const uint64_t limit = lanes_bytes < BLOCKS_MAX ? lanes_bytes : BLOCKS_MAX;
    if (order->lanes == 0 || dataset->sample_count == 0)
        return STATUS_OK;
    self->block_bytes = choose_block(dataset, order, limit);
    if (self->block_bytes == 0)
        return STATUS_OK;
    self->first_block = malloc(((size_t)dataset->file_count + 1) * sizeof *self->first_block);
    TRY(ALLOCATED(self->first_block, "out of memory for blocks of shards"));
    uint64_t count = 0;
    for (uint32_t i = 0; i < dataset->file_count; i++) {
        self->first_block[i] = count;
        count += (dataset->files[i].bytes + self->block_bytes - 1) / self->block_bytes;
    }
    const uint64_t room = limit / self->block_bytes;
    const uint64_t most = count < room ? count : room;
    self->ways = most < BLOCK_WAYS ? (uint32_t)most : BLOCK_WAYS;
    /* If all blocks fit, each has a place. */
    self->group_count =
        self->ways ? (uint32_t)(count <= room ? (count - 1) / self->ways + 1 : room / self->ways) : 0;
    if (self->group_count == 0)
        return STATUS_OK;
    self->groups = aligned_alloc(64, self->group_count * sizeof *self->groups);
    const uint64_t bytes = (set_files_block_bytes(self) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    self->block_memory = aligned_alloc(HUGE_PAGE, bytes);
    if (self->block_memory) /* samples are copied from all over the memory; a failure changes only the speed
                             */
        (void)madvise(self->block_memory, bytes, MADV_HUGEPAGE);
    for (uint32_t g = 0; self->groups && g < self->group_count; g++) {
        pthread_mutex_init(&self->groups[g].lock, NULL);
        self->groups[g].clock = 0;
        for (uint32_t w = 0; w < BLOCK_WAYS; w++)
            self->groups[g].blocks[w] = (struct block){.name = NO_BLOCK};
    }
    return ALLOCATED(self->groups && self->block_memory, "out of memory for blocks of shards");
}

static void close_blocks(struct set_files *files)
{
    for (uint32_t g = 0; files->groups && g < files->group_count; g++)
        pthread_mutex_destroy(&files->groups[g].lock);
    free(files->groups);
    free(files->first_block);
    free(files->block_memory);
}

/* Allocates the list of open shards. */
static enum status open_entries(struct set_files *self, uint32_t threads)
{
    self->capacity = capacity_of(self->dataset, threads);
    self->keeps_all =
        !self->dataset->remote && !self->in_memory && self->capacity >= self->dataset->file_count;
    self->entries = calloc(self->capacity, sizeof *self->entries);
    self->compared = calloc((size_t)self->dataset->file_count + 1, sizeof *self->compared);
    self->passed = calloc((size_t)self->dataset->file_count + 1, sizeof *self->passed);
    self->entry_of = malloc(((size_t)self->dataset->file_count + 1) * sizeof *self->entry_of);
    TRY(ALLOCATED(self->entries && self->entry_of && self->compared && self->passed,
                  "out of memory for the list of %u shards", self->dataset->file_count));
    memset(self->entry_of, 0xFF, self->dataset->file_count * sizeof *self->entry_of);
    for (uint32_t e = 0; e < self->capacity; e++)
        self->entries[e].file = NONE;
    return STATUS_OK;
}

enum status set_files_open(const struct dataset *dataset, uint32_t threads, uint64_t memory_bytes,
                           const struct set_files_order *order, struct set_files **files)
{
    struct set_files *self = *files = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->dataset = dataset;
    atomic_init(&self->round, 1);
    self->in_memory = dataset_in_memory(dataset);
    self->limit = self->in_memory ? memory_bytes : dataset->remote ? remote_cache_bytes(dataset->remote) : 0;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->changed, NULL);
    if (!dataset->shards)
        return STATUS_OK;
    enum status status = STATUS_OK;
    if (remote_blocks_possible(dataset)) {
        status = remote_blocks_open(dataset, memory_bytes, &self->remote);
    } else {
        status = open_entries(self, threads);
        if (status == STATUS_OK)
            status = open_blocks(self, order);
    }
    if (status != STATUS_OK) {
        set_files_close(self);
        *files = NULL;
    }
    return status;
}

/* Frees an entry that no thread uses. */
static void evict(struct set_files *files, struct entry *entry)
{
    dataset_file_close(files->dataset, entry->fd);
    files->bytes -= files->dataset->files[entry->file].bytes;
    files->entry_of[entry->file] = NONE;
    files->count--;
    entry->file = NONE;
}

void set_files_close(struct set_files *files)
{
    if (!files)
        return;
    for (uint32_t e = 0; files->entries && files->entry_of && e < files->capacity; e++)
        if (files->entries[e].file != NONE)
            evict(files, &files->entries[e]);
    remote_blocks_close(files->remote);
    close_blocks(files);
    pthread_cond_destroy(&files->changed);
    pthread_mutex_destroy(&files->lock);
    free(files->entry_of);
    free(files->entries);
    free(files->compared);
    free(files->passed);
    free(files);
}

/* ---- Shards ---- */

/* Returns a free entry, or NULL. */
static struct entry *find_free(const struct set_files *files)
{
    for (uint32_t e = 0; files->count < files->capacity && e < files->capacity; e++)
        if (files->entries[e].file == NONE)
            return &files->entries[e];
    return NULL;
}

/* Returns the entry whose latest use is the longest ago, or NULL if all are in use. */
static struct entry *find_oldest(const struct set_files *files)
{
    struct entry *oldest = NULL;
    for (uint32_t e = 0; e < files->capacity; e++) {
        struct entry *entry = &files->entries[e];
        if (entry->file != NONE && entry->users == 0 && (!oldest || entry->used < oldest->used))
            oldest = entry;
    }
    return oldest;
}

/* Waits until there is an entry and memory for a shard. Returns NULL if another thread opened the shard in
 * the meantime. Never deadlocks: a thread that waits uses no entry. */
static struct entry *make_room(struct set_files *files, uint32_t file)
{
    const uint64_t bytes = files->dataset->files[file].bytes;
    while (files->entry_of[file] == NONE) {
        const bool fits = !files->limit || files->count == 0 || files->bytes + bytes <= files->limit;
        struct entry *entry = files->keeps_all ? &files->entries[file] : fits ? find_free(files) : NULL;
        struct entry *oldest = entry ? NULL : find_oldest(files);
        if (entry)
            return entry;
        if (oldest)
            evict(files, oldest);
        else
            pthread_cond_wait(&files->changed, &files->lock);
    }
    return NULL;
}

/* Frees an entry whose shard could not be opened, after the last thread that waited for it has seen that. */
static void leave_failed(struct set_files *files, struct entry *entry)
{
    if (--entry->users > 0)
        return;
    entry->file = NONE;
    files->count--;
    pthread_cond_broadcast(&files->changed);
}

/* Opens a shard in a free entry. Releases the lock while it opens the file. After a failure, the shard is not
 * open, and the entry is free when all threads that wait for it have seen the failure. */
static enum status open_shard(struct set_files *files, uint32_t file, struct entry *entry)
{
    struct stat info;
    entry->file = file; /* `ready` stays false: take_shard() reads it without the lock */
    entry->users = 1;
    entry->opening = true;
    entry->failure.status = STATUS_OK;
    files->entry_of[file] = (uint32_t)(entry - files->entries);
    files->bytes += files->dataset->files[file].bytes;
    files->count++;
    pthread_mutex_unlock(&files->lock);
    int fd;
    enum status status = dataset_file_await(files->dataset, file, &files->stopped, &fd);
    const bool known = status == STATUS_OK && fstat(fd, &info) == 0;
    pthread_mutex_lock(&files->lock);
    entry->fd = fd;
    entry->device = known ? info.st_dev : 0;
    entry->inode = known ? info.st_ino : 0;
    entry->opening = false;
    atomic_store(&entry->ready, files->keeps_all && status == STATUS_OK);
    if (status != STATUS_OK) {
        entry->failure = status_save(status);
        files->bytes -= files->dataset->files[file].bytes;
        files->entry_of[file] = NONE;
        leave_failed(files, entry);
    }
    pthread_cond_broadcast(&files->changed);
    return status;
}

/* Opens a shard, unless it is open. If several threads wait until it is open and that fails, all of them
 * return that failure; the next call tries again. The caller returns the entry with release_shard(). */
static enum status take_shard(struct set_files *files, uint32_t file, struct entry **taken)
{
    enum status status = STATUS_OK;
    *taken = files->keeps_all ? &files->entries[file] : NULL;
    if (*taken && atomic_load(&(*taken)->ready))
        return STATUS_OK;
    *taken = NULL;
    pthread_mutex_lock(&files->lock);
    while (!*taken && status == STATUS_OK) {
        const uint32_t at = files->entry_of[file];
        struct entry *entry = at == NONE ? make_room(files, file) : &files->entries[at];
        if (at == NONE && entry) {
            status = open_shard(files, file, entry);
            *taken = entry;
        } else if (at != NONE) {
            entry->users++;
            while (entry->opening)
                pthread_cond_wait(&files->changed, &files->lock);
            if (entry->failure.status != STATUS_OK) {
                status = status_restore(&entry->failure);
                leave_failed(files, entry);
            } else
                *taken = entry;
        }
    }
    if (status == STATUS_OK)
        (*taken)->used = ++files->clock;
    pthread_mutex_unlock(&files->lock);
    return status;
}

static void release_shard(struct set_files *files, struct entry *entry)
{
    if (atomic_load(&entry->ready)) /* it stays open, so its users are not counted */
        return;
    pthread_mutex_lock(&files->lock);
    if (--entry->users == 0)
        pthread_cond_broadcast(&files->changed);
    pthread_mutex_unlock(&files->lock);
}

uint64_t set_files_block_bytes(const struct set_files *files)
{
    return files->group_count * (uint64_t)files->ways * files->block_bytes;
}

uint64_t set_files_held_bytes(struct set_files *files)
{
    if (files->remote)
        return remote_blocks_held(files->remote);
    pthread_mutex_lock(&files->lock);
    const uint64_t bytes = files->in_memory ? files->bytes : 0;
    pthread_mutex_unlock(&files->lock);
    return bytes;
}

/* ---- Reading ---- */

static enum status fail(const struct set_files *files, const struct dataset_member *member,
                        const char *reason)
{
    return status_set(STATUS_FAILED, "%s/%s: offset %llu: %s", files->dataset->path,
                      files->dataset->files[member->file].name, (unsigned long long)member->offset, reason);
}

/* Compares a file with the one that dataset_check() read. `entry` is that of a shard that stays open; NULL:
 * the file was opened for this read. With `by_name`, the file with the name of a local shard must also still
 * be the open one: the old bytes of a shard that was replaced can still be read, but the set has changed. */
static enum status compare_file(struct set_files *files, const struct dataset_member *member, int fd,
                                const struct entry *entry, bool by_name)
{
    const struct dataset_file *file = &files->dataset->files[member->file];
    const bool copied = dataset_copied(files->dataset, member->file);
    struct stat info = {.st_size = -1}; /* for a file that was removed */
    if (by_name ? fstatat(files->dataset->directory, file->name, &info, 0) != 0 && errno != ENOENT
                : fstat(fd, &info) != 0)
        return fail(files, member, strerror(errno));
    const struct file_identity identity = file_identify(&info);
    const bool same =
        copied && !by_name
            ? identity.bytes == file->bytes
            : file_compare(&identity, &file->identity) == 0 &&
                  (copied || !entry || (entry->device == identity.device && entry->inode == identity.inode));
    return same ? STATUS_OK
                : fail(files, member,
                       "the file changed after the data set was opened; start again when it is complete");
}

/* Compares a file after a read: once per round by its name, otherwise by its descriptor. */
static enum status check_unchanged(struct set_files *files, const struct dataset_member *member, int fd,
                                   const struct entry *entry)
{
    const uint64_t round = atomic_load(&files->round);
    const bool by_name = entry && !files->dataset->remote && !files->dataset->files[member->file].unpacked &&
                         atomic_load(&files->compared[member->file]) < round;
    TRY(compare_file(files, member, fd, entry, by_name));
    if (by_name)
        atomic_store(&files->compared[member->file], round);
    return STATUS_OK;
}

/* Reads `size` bytes of a file from the member's offset on. */
static enum status read_at(struct set_files *files, const struct dataset_member *member, int fd,
                           const struct entry *entry, uint64_t size, uint8_t *bytes)
{
    size_t done;
    if (!file_read_at(fd, bytes, size, member->offset, &done))
        return fail(files, member, strerror(errno));
    TRY(check_unchanged(files, member, fd, entry));
    return done == size ? STATUS_OK : fail(files, member, "the file ends inside a member");
}

static enum status read_shard(struct set_files *files, const struct dataset_member *member, uint64_t size,
                              uint8_t *bytes)
{
    struct entry *entry;
    TRY(take_shard(files, member->file, &entry));
    const enum status status = read_at(files, member, entry->fd, entry, size, bytes);
    release_shard(files, entry);
    return status;
}

/* ---- Blocks ---- */

void set_files_next_round(struct set_files *files)
{
    atomic_fetch_add(&files->round, 1);
}

static uint8_t *memory_of(const struct set_files *files, const struct block_group *group, uint32_t way)
{
    return files->block_memory + ((size_t)(group - files->groups) * files->ways + way) * files->block_bytes;
}

/* Returns the group of a block. Blocks that follow each other are in different groups, so a run of blocks
 * fills all groups evenly, and a set that fits into memory stays there. */
static struct block_group *group_of(const struct set_files *files, uint64_t name)
{
    return &files->groups[(files->first_block[name >> 32] + (uint32_t)name) % files->group_count];
}

/* Returns the index of a block in its group. If it is not there, returns that of the block whose latest use
 * is the longest ago, or the number of blocks if threads use all of them. */
static uint32_t find_block(const struct set_files *files, const struct block_group *group, uint64_t name)
{
    uint32_t oldest = files->ways;
    for (uint32_t w = 0; w < files->ways; w++) {
        const struct block *block = &group->blocks[w];
        if (block->name == name)
            return w;
        if (atomic_load(&block->users) == 0 &&
            (oldest == files->ways || block->used < group->blocks[oldest].used))
            oldest = w;
    }
    return oldest;
}

/* Reads a block of the member's file. */
static bool fill_block(struct set_files *files, const struct dataset_member *member, uint64_t number,
                       struct block_group *group, uint32_t way)
{
    struct block *block = &group->blocks[way];
    const uint64_t offset = number * files->block_bytes;
    const uint64_t left = files->dataset->files[member->file].bytes - offset;
    const struct dataset_member part = {.file = member->file, .offset = offset};
    const bool filled = read_shard(files, &part, left < files->block_bytes ? left : files->block_bytes,
                                   memory_of(files, group, way)) == STATUS_OK;
    pthread_mutex_lock(&group->lock);
    block->filled = filled;
    if (!filled) {
        block->name = NO_BLOCK;
        atomic_store(&block->users, 0);
    }
    pthread_mutex_unlock(&group->lock);
    return filled;
}

void set_files_prefetch(struct set_files *files, const struct dataset_member *member)
{
    if (!files->groups || member->size > BLOCK_MEMBER)
        return;
    const uint64_t from = member->offset % files->block_bytes, left = files->block_bytes - from;
    const uint64_t name = (uint64_t)member->file << 32 | member->offset / files->block_bytes;
    struct block_group *group = group_of(files, name);
    pthread_mutex_lock(&group->lock);
    const uint32_t way = find_block(files, group, name);
    const bool there = way < files->ways && group->blocks[way].name == name;
    for (uint64_t i = 0; there && i < member->size && i < left; i += 64)
        __builtin_prefetch(memory_of(files, group, way) + from + i);
    pthread_mutex_unlock(&group->lock);
}

/* Copies bytes of a member from a block. Reads the block if it is not in memory. Returns false without
 * waiting if another thread reads the block, or if threads use all blocks of the group. Also returns false if
 * the block cannot be read. */
static bool copy_from_block(struct set_files *files, const struct dataset_member *member, uint64_t number,
                            uint64_t from, uint64_t size, uint8_t *bytes)
{
    const uint64_t name = (uint64_t)member->file << 32 | number;
    struct block_group *group = group_of(files, name);
    pthread_mutex_lock(&group->lock);
    const uint32_t way = find_block(files, group, name);
    struct block *block = &group->blocks[way];
    const bool there = way < files->ways && block->name == name, found = there && block->filled;
    if (way == files->ways || (there && !found)) {
        pthread_mutex_unlock(&group->lock);
        return false;
    }
    if (!there) {
        block->name = name;
        block->filled = false;
    }
    block->used = ++group->clock;
    atomic_fetch_add(&block->users, 1);
    pthread_mutex_unlock(&group->lock);
    if (!found && !fill_block(files, member, number, group, way))
        return false;
    memcpy(bytes, memory_of(files, group, way) + from, size);
    atomic_fetch_sub(&block->users, 1);
    return true;
}

/* Copies a member from the blocks that it is in. */
static bool copy_from_blocks(struct set_files *files, const struct dataset_member *member, uint64_t size,
                             uint8_t *bytes)
{
    for (uint64_t done = 0, part; done < size; done += part) {
        const uint64_t at = member->offset + done, from = at % files->block_bytes;
        part = files->block_bytes - from < size - done ? files->block_bytes - from : size - done;
        if (!copy_from_block(files, member, at / files->block_bytes, from, part, bytes + done))
            return false;
    }
    return true;
}

/* Copies the needed ranges from blocks. */
static bool copy_ranges(struct set_files *files, uint32_t file, uint64_t offset,
                        const struct set_files_range *ranges, int count)
{
    bool copied = files->groups != NULL;
    for (int r = 0; copied && r < count; offset += ranges[r++].size) {
        const struct dataset_member part = {.file = file, .offset = offset};
        copied = !ranges[r].needed ||
                 (ranges[r].size <= BLOCK_MEMBER && ranges[r].size <= files->block_bytes / 2 &&
                  copy_from_blocks(files, &part, ranges[r].size, ranges[r].bytes));
    }
    return copied;
}

bool set_files_read_ranges(struct set_files *files, uint32_t file, uint64_t offset,
                           const struct set_files_range *ranges, int count)
{
    const struct dataset *dataset = files->dataset;
    struct iovec vectors[SET_FILES_RANGES];
    size_t size = 0;
    ssize_t got;
    struct entry *entry;
    if (dataset->remote || !dataset->shards ||
        (dataset->files[file].unpacked && !dataset->files[file].packed))
        return false;
    if (copy_ranges(files, file, offset, ranges, count))
        return true;
    for (int r = 0; r < count; r++) {
        vectors[r] = (struct iovec){ranges[r].bytes, ranges[r].size};
        size += ranges[r].size;
    }
    if (take_shard(files, file, &entry) != STATUS_OK)
        return false;
    do
        got = preadv(entry->fd, vectors, count, (off_t)offset);
    while (got < 0 && errno == EINTR);
    /* A shard that is closed and opened again may be another file in the meantime. */
    const struct dataset_member first = {.file = file, .offset = offset};
    const bool read = got == (ssize_t)size &&
                      (files->keeps_all || check_unchanged(files, &first, entry->fd, entry) == STATUS_OK);
    release_shard(files, entry);
    return read;
}

uint64_t set_files_begin_pass(struct set_files *files)
{
    return 1 + atomic_fetch_add(&files->passes, 1);
}

bool set_files_compared(const struct set_files *files, uint64_t pass, uint32_t file)
{
    return atomic_load(&files->passed[file]) == pass;
}

enum status set_files_compare(struct set_files *files, uint64_t pass, const struct dataset_member *member)
{
    struct entry *entry;
    if (set_files_compared(files, pass, member->file))
        return STATUS_OK;
    if (files->in_memory) { /* the shard is not unpacked for this */
        TRY(compare_file(files, member, -1, NULL, true));
    } else {
        TRY(take_shard(files, member->file, &entry));
        const enum status status = compare_file(files, member, entry->fd, entry, true);
        release_shard(files, entry);
        TRY(status);
    }
    atomic_store(&files->passed[member->file], pass);
    return STATUS_OK;
}

/* Compares the file of a member that came from a block, once per round. A shard of a URL was compared when
 * its block was read; it may not be open any more. */
static enum status compare_once(struct set_files *files, const struct dataset_member *member)
{
    const uint64_t round = atomic_load(&files->round);
    struct entry *entry;
    if (files->in_memory)
        return set_files_recheck(files, member);
    if (files->dataset->remote || atomic_load(&files->compared[member->file]) >= round)
        return STATUS_OK;
    TRY(take_shard(files, member->file, &entry));
    const enum status status = check_unchanged(files, member, entry->fd, entry);
    release_shard(files, entry);
    return status;
}

enum status set_files_recheck(struct set_files *files, const struct dataset_member *member)
{
    const uint64_t round = atomic_load(&files->round);
    const bool once = files->dataset->shards;
    if (files->dataset->remote || files->dataset->files[member->file].unpacked ||
        (once && atomic_load(&files->compared[member->file]) >= round))
        return STATUS_OK;
    TRY(compare_file(files, member, -1, NULL, true));
    if (once)
        atomic_store(&files->compared[member->file], round);
    return STATUS_OK;
}

enum status set_files_read(struct set_files *files, const struct dataset_member *member, uint64_t size,
                           uint8_t *bytes)
{
    if (files->remote)
        return remote_blocks_read(files->remote, member->file, member->offset, size, bytes);
    if (files->groups && size <= BLOCK_MEMBER && size <= files->block_bytes / 2 &&
        copy_from_blocks(files, member, size, bytes))
        return compare_once(files, member);
    if (files->dataset->shards)
        return read_shard(files, member, size, bytes);
    enum status status;
    int fd;
    TRY(dataset_file_open(files->dataset, member->file, 0, &fd));
    status = read_at(files, member, fd, NULL, size, bytes);
    dataset_file_close(files->dataset, fd);
    return status;
}

void set_files_ask(struct set_files *files, const struct dataset_member *member)
{
    if (files->remote)
        remote_blocks_ask(files->remote, member->file, member->offset, member->size);
}

void set_files_stop(struct set_files *files)
{
    if (files->remote)
        remote_blocks_stop(files->remote);
    else if (files->dataset->remote)
        remote_stop(files->dataset->remote, &files->stopped, true);
}

void set_files_resume(struct set_files *files)
{
    if (files->remote)
        remote_blocks_resume(files->remote);
    else if (files->dataset->remote)
        remote_stop(files->dataset->remote, &files->stopped, false);
}

/* ---- Blocks of shards at a URL ---- */

/* A block in memory, or one that is being read. */
struct remote_block {
    struct remote_block *older, *newer; /* by the time of the latest use */
    uint64_t number;                    /* among the blocks of all shards */
    uint64_t size;
    struct transfer *transfer; /* set until a thread waits for the block */
    bool arrived, failed;      /* seen by the thread that waited for it */
    struct failure failure;    /* why it failed, for all threads that wait for it */
    uint32_t users;            /* threads that copy from the block, or wait for it */
    bool unread;               /* requested, but not used yet */
    uint8_t bytes[];
};

struct remote_blocks {
    const struct dataset *dataset;
    uint64_t limit;
    uint64_t *first; /* number of each shard's first block, and one end entry */
    pthread_mutex_t lock;
    pthread_cond_t changed;               /* a block has arrived, has failed, or has lost its last user */
    struct remote_block **at;             /* by number; NULL: not in memory */
    struct remote_block *oldest, *newest; /* all blocks in memory */
    uint64_t held, unread;                /* bytes of all blocks, and of the unread ones */
    bool stopped; /* written with `lock` and the lock of remote_stop(), read with either */
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
        self->at = calloc(self->first[dataset->file_count] + 1, sizeof(struct remote_block *));
    if (self->at)
        return STATUS_OK;
    remote_blocks_close(self);
    *blocks = NULL;
    return status_set(STATUS_EXHAUSTED, "out of memory for the list of blocks of %u shards",
                      dataset->file_count);
}

/* ---- The list of blocks in memory. The caller holds the lock, here and below. ---- */

static void unlink_block(struct remote_blocks *blocks, struct remote_block *block)
{
    *(block->older ? &block->older->newer : &blocks->oldest) = block->newer;
    *(block->newer ? &block->newer->older : &blocks->newest) = block->older;
    block->older = block->newer = NULL;
}

static void append(struct remote_blocks *blocks, struct remote_block *block)
{
    block->older = blocks->newest;
    *(blocks->newest ? &blocks->newest->newer : &blocks->oldest) = block;
    blocks->newest = block;
}

/* Frees a block that has arrived and has no users. */
static void drop(struct remote_blocks *blocks, struct remote_block *block)
{
    unlink_block(blocks, block);
    blocks->at[block->number] = NULL;
    blocks->held -= block->size;
    blocks->unread -= block->unread ? block->size : 0;
    free(block);
}

/* Returns the block without users whose latest use is the longest ago: of those that have arrived, or of
 * those without users. NULL if there is none. */
static struct remote_block *find_unused(const struct remote_blocks *blocks, bool arrived)
{
    struct remote_block *block = blocks->oldest;
    while (block && (block->users > 0 || block->arrived != arrived))
        block = block->newer;
    return block;
}

/* Drops blocks that have arrived until one of `size` bytes fits. Returns false if it cannot. */
static bool make_room_for_blocks(struct remote_blocks *blocks, uint64_t size)
{
    while (blocks->held > 0 && blocks->held + size > blocks->limit) {
        struct remote_block *victim = find_unused(blocks, true);
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
    struct remote_block *block = malloc(sizeof *block + size);
    TRY(ALLOCATED(block, "out of memory for a block of a shard"));
    *block = (struct remote_block){.number = number, .size = size, .unread = unread};
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

/* ---- Reading these blocks ---- */

/* Takes a user from a block. The last user of a failed block frees it. */
static void give_back(struct remote_blocks *blocks, struct remote_block *block)
{
    if (--block->users > 0)
        return;
    if (block->failed)
        free(block);
    pthread_cond_broadcast(&blocks->changed);
}

/* Waits until a block has arrived or failed, and releases the lock for that time. The caller is a user of it.
 * If the request fails, removes the block from the list. */
static void receive(struct remote_blocks *blocks, struct remote_block *block)
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

/* Makes the caller the user of a block without users, waits for the block, and drops it, unless other threads
 * use it by then. */
static void discard(struct remote_blocks *blocks, struct remote_block *block)
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
    struct remote_block *asked = find_unused(blocks, false);
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
static enum status use(struct remote_blocks *blocks, uint32_t file, uint64_t number,
                       struct remote_block **used)
{
    TRY(check_running(blocks));
    while (!blocks->at[number]) {
        if (make_room_for_blocks(blocks, size_of(blocks, file, number)))
            TRY(begin(blocks, file, number, false));
        else
            await_room(blocks);
        TRY(check_running(blocks));
    }
    struct remote_block *block = *used = blocks->at[number];
    block->users++;
    blocks->unread -= block->unread ? block->size : 0;
    block->unread = false;
    unlink_block(blocks, block);
    append(blocks, block);
    return STATUS_OK;
}

/* Makes the caller a user of a block that has arrived. If the request for it fails, all threads that wait for
 * the block return its message; the next call makes another request. */
static enum status take(struct remote_blocks *blocks, uint32_t file, uint64_t number,
                        struct remote_block **taken)
{
    TRY(use(blocks, file, number, taken));
    struct remote_block *block = *taken;
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
        struct remote_block *block;
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
        if (blocks->unread + bytes > blocks->limit / 2 || !make_room_for_blocks(blocks, bytes) ||
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
    for (struct remote_block *block = blocks->oldest; block; block = block->newer)
        if (block->transfer)
            remote_abandon(blocks->dataset->remote, block->transfer);
    remote_stop(blocks->dataset->remote, &blocks->stopped, true);
    pthread_cond_broadcast(&blocks->changed);
    pthread_mutex_unlock(&blocks->lock);
}

void remote_blocks_resume(struct remote_blocks *blocks)
{
    pthread_mutex_lock(&blocks->lock);
    for (struct remote_block *block; (block = find_unused(blocks, false));)
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

/* ---- Members that stay in memory ---- */

/* A place is a multiple of RESIDENT_ALIGN, so its lowest bits say how far the bytes of the member are. A
 * thread that finds a member being written by another one reads the file itself: no thread waits. */

enum state { EMPTY, WRITTEN, COMPLETE, STATES = RESIDENT_ALIGN };

/* Returns the size of a part of a sample; 0 if the sample does not have it. */
static uint64_t member_size(const struct resident_samples *samples, uint32_t number, enum resident_part part)
{
    const struct dataset *dataset = samples->dataset;
    const struct dataset_sample *sample =
        &dataset->samples[samples->samples ? samples->samples[number] : number];
    const uint32_t member = part == RESIDENT_IMAGE ? sample->image : sample->label;
    return member < sample->members ? dataset->members[sample->member + member].size : 0;
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + RESIDENT_ALIGN - 1) / RESIDENT_ALIGN * RESIDENT_ALIGN;
}

uint32_t resident_fit(const struct resident_samples *samples, uint64_t limit, uint64_t *bytes)
{
    const uint32_t parts = 1 + samples->labels;
    uint32_t count = 0;
    for (*bytes = 0; count < samples->count; count++) {
        uint64_t own = parts * sizeof(uint64_t);
        for (uint32_t part = 0; part < parts; part++)
            own += padded(member_size(samples, count, (enum resident_part)part));
        if (own > limit - *bytes)
            break;
        *bytes += own;
    }
    return count;
}

/* Gives each part of the samples its place. */
static void set_places(const struct resident_samples *samples, struct resident *resident)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < resident->count; i++)
        for (uint32_t part = 0; part < resident->parts; part++) {
            atomic_init(&resident->places[(size_t)i * resident->parts + part], at + EMPTY);
            at += padded(member_size(samples, i, (enum resident_part)part));
        }
}

enum status resident_open(const struct resident_samples *samples, uint64_t limit, struct resident *resident)
{
    *resident = (struct resident){.parts = 1 + samples->labels};
    if (limit == 0)
        return STATUS_OK;
    resident->count = resident_fit(samples, limit, &resident->bytes);
    const uint64_t places = (uint64_t)resident->count * resident->parts * sizeof *resident->places;
    const uint64_t memory = (resident->bytes - places + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    TRY(memory_check(resident->bytes, "the resident samples",
                     OPTION_OR_FIELD("lower --resident-bytes", "lower resident_bytes")));
    resident->places = malloc(places + 1);
    resident->memory = aligned_alloc(HUGE_PAGE, memory ? memory : HUGE_PAGE);
    TRY(ALLOCATED(resident->places && resident->memory, "out of memory for %u resident samples",
                  resident->count));
    (void)madvise(resident->memory, memory, MADV_HUGEPAGE); /* a failure changes only the speed */
    set_places(samples, resident);
    return STATUS_OK;
}

void resident_close(struct resident *resident)
{
    free(resident->places);
    free(resident->memory);
    *resident = (struct resident){0};
}

static _Atomic uint64_t *place_of(const struct resident *resident, uint32_t number, enum resident_part part)
{
    return number < resident->count && (uint32_t)part < resident->parts
               ? &resident->places[(size_t)number * resident->parts + part]
               : NULL;
}

const uint8_t *resident_find(const struct resident *resident, uint32_t number, enum resident_part part)
{
    _Atomic uint64_t *place = place_of(resident, number, part);
    const uint64_t at = place ? atomic_load_explicit(place, memory_order_acquire) : EMPTY;
    return at % STATES == COMPLETE ? resident->memory + (at - COMPLETE) : NULL;
}

uint8_t *resident_begin(const struct resident *resident, uint32_t number, enum resident_part part)
{
    _Atomic uint64_t *place = place_of(resident, number, part);
    uint64_t at = place ? atomic_load(place) : WRITTEN;
    return at % STATES == EMPTY && atomic_compare_exchange_strong(place, &at, at + WRITTEN)
               ? resident->memory + at
               : NULL;
}

void resident_end(const struct resident *resident, uint32_t number, enum resident_part part, bool complete)
{
    _Atomic uint64_t *place = place_of(resident, number, part);
    const uint64_t at = atomic_load(place) - WRITTEN;
    atomic_store_explicit(place, at + (complete ? COMPLETE : EMPTY), memory_order_release);
}
