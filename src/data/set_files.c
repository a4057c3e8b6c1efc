#include "data/set_files.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/remote.h"
#include "data/remote_blocks.h"

#define OPEN_MAX_SHARDS 256 /* at most this many shards are open */
#define NONE            UINT32_MAX

/* An open shard, or one that a thread is opening. */
struct entry {
    uint32_t file;  /* NONE: the entry is free */
    uint32_t users; /* threads that read it */
    uint64_t used;  /* time of the latest use, by a counter of uses */
    int fd;
    bool opening;
    uint64_t inode; /* of the open file */
};

struct set_files {
    const struct dataset *dataset;
    struct remote_blocks *blocks; /* of shards at a URL; NULL: whole shards are opened */
    bool in_memory;               /* shards of a URL without a cache folder */
    uint64_t limit; /* of the total size of the open shards, if they are in memory or in a bounded cache,
                       where a removed file keeps its room on the disk until it is closed; 0: none */
    pthread_mutex_t lock; /* protects everything below */
    pthread_cond_t changed;
    uint32_t *entry_of; /* by the number of the file; NONE: the file is not open. NULL: no shards */
    struct entry *entries;
    uint32_t capacity, count; /* entries, and those that are not free */
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

enum status set_files_open(const struct dataset *dataset, uint32_t threads, uint64_t memory_bytes,
                           struct set_files **files)
{
    struct set_files *self = *files = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->dataset = dataset;
    self->in_memory = dataset->remote && !remote_cached(dataset->remote);
    self->limit = self->in_memory ? memory_bytes : dataset->remote ? remote_cache_bytes(dataset->remote) : 0;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->changed, NULL);
    if (!dataset->shards)
        return STATUS_OK;
    if (remote_blocks_possible(dataset)) {
        const enum status status = remote_blocks_open(dataset, memory_bytes, &self->blocks);
        if (status != STATUS_OK) {
            set_files_close(self);
            *files = NULL;
        }
        return status;
    }
    self->capacity = capacity_of(dataset, threads);
    self->entries = calloc(self->capacity, sizeof *self->entries);
    self->entry_of = malloc(((size_t)dataset->file_count + 1) * sizeof *self->entry_of);
    if (self->entries && self->entry_of) {
        memset(self->entry_of, 0xFF, dataset->file_count * sizeof *self->entry_of);
        for (uint32_t e = 0; e < self->capacity; e++)
            self->entries[e].file = NONE;
        return STATUS_OK;
    }
    set_files_close(self);
    *files = NULL;
    return status_set(STATUS_EXHAUSTED, "out of memory for the list of %u shards", dataset->file_count);
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
    remote_blocks_close(files->blocks);
    pthread_cond_destroy(&files->changed);
    pthread_mutex_destroy(&files->lock);
    free(files->entry_of);
    free(files->entries);
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
        struct entry *entry = fits ? find_free(files) : NULL;
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

/* Opens a shard in a free entry. Releases the lock while it opens the file. */
static enum status open_shard(struct set_files *files, uint32_t file, struct entry *entry)
{
    struct stat info;
    *entry = (struct entry){.file = file, .users = 1, .fd = -1, .opening = true};
    files->entry_of[file] = (uint32_t)(entry - files->entries);
    files->bytes += files->dataset->files[file].bytes;
    files->count++;
    pthread_mutex_unlock(&files->lock);
    int fd;
    enum status status = dataset_file_open(files->dataset, file, 0, &fd);
    const uint64_t inode = status == STATUS_OK && fstat(fd, &info) == 0 ? info.st_ino : 0;
    pthread_mutex_lock(&files->lock);
    entry->fd = fd;
    entry->inode = inode;
    entry->opening = false;
    if (status != STATUS_OK) {
        files->bytes -= files->dataset->files[file].bytes;
        files->entry_of[file] = NONE;
        files->count--;
        entry->file = NONE;
    }
    pthread_cond_broadcast(&files->changed);
    return status;
}

/* Opens a shard, unless it is open. The caller returns the entry with release_shard(). */
static enum status take_shard(struct set_files *files, uint32_t file, struct entry **taken)
{
    enum status status = STATUS_OK;
    *taken = NULL;
    pthread_mutex_lock(&files->lock);
    while (!*taken && status == STATUS_OK) {
        const uint32_t at = files->entry_of[file];
        struct entry *entry = at == NONE ? make_room(files, file) : &files->entries[at];
        if (at == NONE && entry) {
            status = open_shard(files, file, entry);
            *taken = entry;
        } else if (at != NONE && entry->opening) {
            pthread_cond_wait(&files->changed, &files->lock);
        } else if (at != NONE) {
            entry->users++;
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
    pthread_mutex_lock(&files->lock);
    if (--entry->users == 0)
        pthread_cond_broadcast(&files->changed);
    pthread_mutex_unlock(&files->lock);
}

uint64_t set_files_held_bytes(struct set_files *files)
{
    if (files->blocks)
        return remote_blocks_held(files->blocks);
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

/* Compares a file with the one that dataset_check() read. `entry` is that of a local shard, which stays open:
 * the file with its name must still be the open one, because the old bytes of a shard that was replaced can
 * still be read, but the set has changed. NULL: the file was opened for this read. */
static enum status check_unchanged(const struct set_files *files, const struct dataset_member *member, int fd,
                                   const struct entry *entry)
{
    const struct dataset_file *file = &files->dataset->files[member->file];
    const bool local = !files->dataset->remote;
    struct stat info = {.st_size = -1}; /* of a file that was removed */
    if (local && entry ? fstatat(files->dataset->directory, file->name, &info, 0) != 0 && errno != ENOENT
                       : fstat(fd, &info) != 0)
        return fail(files, member, strerror(errno));
    bool same = (uint64_t)info.st_size == file->bytes;
    if (local)
        same = same && info.st_ino == file->inode && (!entry || entry->inode == file->inode) &&
               info.st_mtim.tv_sec * INT64_C(1000000000) + info.st_mtim.tv_nsec == file->modified_ns;
    return same ? STATUS_OK
                : fail(files, member,
                       "the file changed after the data set was opened; start again when it is complete");
}

static enum status read_at(const struct set_files *files, const struct dataset_member *member, int fd,
                           const struct entry *entry, uint64_t size, uint8_t *bytes)
{
    for (uint64_t done = 0; done < size;) {
        ssize_t count = pread(fd, bytes + done, size - done, (off_t)(member->offset + done));
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return fail(files, member, strerror(errno));
        if (count == 0) {
            TRY(check_unchanged(files, member, fd, entry));
            return fail(files, member, "the file ends inside a member");
        }
        done += (uint64_t)count;
    }
    return check_unchanged(files, member, fd, entry);
}

enum status set_files_read(struct set_files *files, const struct dataset_member *member, uint64_t size,
                           uint8_t *bytes)
{
    enum status status;
    if (files->blocks)
        return remote_blocks_read(files->blocks, member->file, member->offset, size, bytes);
    if (files->dataset->shards) {
        struct entry *entry;
        TRY(take_shard(files, member->file, &entry));
        status = read_at(files, member, entry->fd, entry, size, bytes);
        release_shard(files, entry);
        return status;
    }
    int fd;
    TRY(dataset_file_open(files->dataset, member->file, 0, &fd));
    status = read_at(files, member, fd, NULL, size, bytes);
    dataset_file_close(files->dataset, fd);
    return status;
}

void set_files_ask(struct set_files *files, const struct dataset_member *member)
{
    if (files->blocks)
        remote_blocks_ask(files->blocks, member->file, member->offset, member->size);
}
