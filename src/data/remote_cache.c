#include "data/remote_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "data/checksum.h"
#include "machine/host.h"
#include "data/remote.h"

#define LOCK_NAME    "lock"
#define DRAFT_END    ".part"
#define ENTRY_END    ".data"
#define WAIT_NS      50000000 /* between attempts to reserve room, and the most between those to lock a draft */
#define WAIT_LOCK_NS 5000000 /* the most between attempts to lock the folder, which is soon unlocked */
#define WAIT_MIN_NS  500000  /* after the first attempt to lock; then doubles */
#define WAITS_QUIET  600     /* attempts before a warning */
#define STEP_BYTES   (UINT64_C(64) << 20) /* room that a draft of unknown size reserves in advance */
#define NAME_CHARS   (16 + 1 + 16)        /* two hashes in hex, and a dash */

/* The entries that this process has verified; protected by process_lock(). */
static uint64_t *verified;
static size_t verified_count;

/* Returns whether a file name consists of `hashes` (1 or 2) hashes, as this file writes them, and `end`. The
 * folder may also contain files of the user, which must stay as they are. */
static bool is_name(const char *name, int hashes, const char *end)
{
    for (int i = 0; i < hashes; i++) {
        if (i > 0 && *name++ != '-')
            return false;
        if (strspn(name, "0123456789abcdef") != 16)
            return false;
        name += 16;
    }
    return strcmp(name, end) == 0;
}

/* Returns what to do about a failure of the folder, or "" if nothing is known. */
static const char *remedy(int cause)
{
    if (cause == ENOSPC || cause == EDQUOT)
        return OPTION_OR_FIELD("; limit the cache with --cache-bytes, or name a folder with more space",
                               "; limit the cache with cache_bytes, or name a folder with more space");
    const bool refused = cause == EROFS || cause == EACCES || cause == EPERM;
    return refused
               ? OPTION_OR_FIELD("; name a folder where this user may create files, or drop --cache-dir",
                                 "; name a folder where this user may create files, or do not set cache_dir")
           : cause == ENOENT ? "; create its parent folders first, or name another folder"
           : cause == EISDIR ? "; this name is for a file of the cache: remove or rename the folder"
                             : "";
}

/* Returns STATUS_EXHAUSTED for any errno. STATUS_FAILED would be wrong, because the cause is the folder and
 * not a file of the data set. */
static enum status failed(const char *path, const char *what)
{
    return status_set(STATUS_EXHAUSTED, "%s: cannot %s %s: %s%s", REMOTE_CACHE_DIR, what, path,
                      strerror(errno), remedy(errno));
}

/* Writes a path into `*path`, which the caller frees. Small stacks have no room for paths. */
__attribute__((format(printf, 2, 3))) static enum status make_path(char **path, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = vasprintf(path, format, arguments);
    va_end(arguments);
    if (length < 0)
        *path = NULL;
    return ALLOCATED(*path, "out of memory for a name in the cache");
}

/* ---- Content ---- */

/* Hashes the content of an open file. */
static enum status hash_file(int fd, uint64_t bytes, const char *path, uint64_t *hash)
{
    *hash = bytes;
    if (bytes == 0)
        return STATUS_OK;
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return failed(path, "map");
    *hash = checksum_seeded(map, bytes, 0);
    munmap(map, bytes);
    return STATUS_OK;
}

/* Returns whether this process has verified the entry. If `add` is set, records the entry as verified. */
static bool is_verified(uint64_t source, bool add)
{
    bool found = false;
    process_lock();
    for (size_t i = 0; i < verified_count && !found; i++)
        found = verified[i] == source;
    if (add && !found && array_grow(&verified, verified_count, sizeof *verified))
        verified[verified_count++] = source;
    process_unlock();
    return found;
}

/* ---- Finding ---- */

/* Sets `*path`, which the caller frees, to that of an entry; NULL if there is none. */
static enum status find_path(const char *folder, uint64_t source, char **path)
{
    char begin[32];
    enum status status = STATUS_OK;
    DIR *stream = opendir(folder);
    *path = NULL;
    snprintf(begin, sizeof begin, "%016" PRIx64 "-", source);
    for (struct dirent *entry; status == STATUS_OK && !*path && stream && (entry = readdir(stream));)
        if (strncmp(entry->d_name, begin, strlen(begin)) == 0 && is_name(entry->d_name, 2, ENTRY_END))
            status = make_path(path, "%s/%s", folder, entry->d_name);
    if (stream)
        closedir(stream);
    return status;
}

void cache_remove(const char *folder, const struct cache_entry *entry)
{
    FREED char *path = NULL;
    if (find_path(folder, entry->source, &path) == STATUS_OK && path)
        unlink(path);
}

/* Opens a file of the cache. Neither follows links, nor waits for the other end of a pipe that somebody put
 * in the place of the file: callers check that the file is regular. */
static int open_file(const char *path, int flags)
{
    return open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
}

/* Checks the kind, the size and, once per process, the hash of an entry. If they are wrong, removes
 * it, unless `frozen` is true, and closes `*fd`. Fails if the entry is a folder. `*fd` is -1 for a link. */
static enum status verify(const char *path, const struct cache_entry *entry, bool frozen, int *fd)
{
    struct stat info;
    uint64_t hash, named = 0;
    const char *dash = strrchr(path, '-');
    if (*fd >= 0 && fstat(*fd, &info) != 0)
        return failed(path, "examine");
    if (*fd >= 0 && S_ISDIR(info.st_mode)) {
        errno = EISDIR;
        return failed(path, "read");
    }
    bool right = *fd >= 0 && S_ISREG(info.st_mode) && dash && sscanf(dash + 1, "%16" SCNx64, &named) == 1 &&
                 (entry->bytes == CACHE_UNKNOWN || (uint64_t)info.st_size == entry->bytes);
    if (right && !is_verified(entry->source, false)) {
        TRY(hash_file(*fd, (uint64_t)info.st_size, path, &hash));
        right = hash == named;
    }
    if (right) {
        is_verified(entry->source, true);
        return STATUS_OK;
    }
    if (!frozen && unlink(path) != 0 && errno != ENOENT)
        return failed(path, "remove");
    status_warn(frozen ? "%s is damaged; a run will remove it and read it again"
                       : "%s is damaged; it is removed and read again",
                path);
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    return STATUS_OK;
}

enum status cache_find(const char *folder, const struct cache_entry *entry, bool frozen, int *fd)
{
    FREED char *path = NULL;
    *fd = -1;
    TRY(find_path(folder, entry->source, &path));
    if (!path)
        return STATUS_OK;
    *fd = open_file(path, O_RDONLY);
    if (*fd < 0 && errno != ELOOP && errno != ENXIO)               /* a link, or a socket */
        return errno == ENOENT ? STATUS_OK : failed(path, "open"); /* another process may have removed it */
    if (*fd >= 0 && !frozen)
        futimens(*fd, NULL); /* sets the time of the latest use; if this fails, the entry only looks older */
    enum status status = verify(path, entry, frozen, fd);
    if (status != STATUS_OK && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    return status;
}

/* ---- Removing ---- */

struct old {
    char name[NAME_CHARS + sizeof DRAFT_END];
    struct timespec used;
    uint64_t bytes;
};

static int by_age(const void *a_, const void *b_)
{
    const struct old *a = a_, *b = b_;
    if (a->used.tv_sec != b->used.tv_sec)
        return a->used.tv_sec < b->used.tv_sec ? -1 : 1;
    return (a->used.tv_nsec > b->used.tv_nsec) - (a->used.tv_nsec < b->used.tv_nsec);
}

/* Removes a draft whose process has ended. */
static void remove_stale(int folder, const char *name)
{
    struct stat info;
    int fd = openat(folder, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && flock(fd, LOCK_EX | LOCK_NB) == 0)
        unlinkat(folder, name, 0);
    if (fd >= 0)
        close(fd);
}

/* Lists the entries of the folder and adds up the sizes of entries and drafts. Ignores all other files. */
static enum status list_entries(DIR *stream, struct old **list, size_t *count, uint64_t *bytes)
{
    for (struct dirent *entry; (entry = readdir(stream));) {
        struct stat info;
        const bool draft = is_name(entry->d_name, 1, DRAFT_END);
        if (!draft && !is_name(entry->d_name, 2, ENTRY_END))
            continue;
        if (draft)
            remove_stale(dirfd(stream), entry->d_name);
        if (fstatat(dirfd(stream), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode))
            continue;
        *bytes += (uint64_t)info.st_size; /* another process is writing this draft, if it is one */
        if (draft)
            continue;
        TRY(ALLOCATED(array_grow(list, *count, sizeof **list), "out of memory for the list of the cache"));
        struct old *old = &(*list)[(*count)++];
        strcpy(old->name, entry->d_name);
        old->used = info.st_mtim;
        old->bytes = (uint64_t)info.st_size;
    }
    return STATUS_OK;
}

/* Removes the least recently used entries until `bytes` more fit. Sets `*left` to the room that there is
 * then: less than `bytes` if drafts fill it. The caller holds the lock of the folder. */
static enum status make_room(const char *folder, uint64_t bytes, uint64_t limit, uint64_t *left)
{
    DIR *stream = opendir(folder);
    struct old *list = NULL;
    size_t count = 0;
    uint64_t used = 0;
    if (!stream)
        return failed(folder, "list");
    enum status status = list_entries(stream, &list, &count, &used);
    if (status == STATUS_OK && count)
        qsort(list, count, sizeof *list, by_age);
    for (size_t i = 0; status == STATUS_OK && limit && i < count && used + bytes > limit; i++) {
        if (unlinkat(dirfd(stream), list[i].name, 0) == 0 || errno == ENOENT)
            used -= list[i].bytes;
    }
    *left = !limit ? UINT64_MAX : used < limit ? limit - used : 0;
    free(list);
    closedir(stream);
    return status;
}

/* Waits for `ns`, unless the caller is to stop. */
static enum status wait_for_others(const struct cache_stop *stop, const char *path, long ns)
{
    if (stop && stop->is_set(stop->context))
        return status_set(STATUS_FAILED, "%s: reading was stopped", path);
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    return STATUS_OK;
}

/* Locks an open file. Tries again at intervals of at most `most_ns` while another process holds the lock.
 * Sets `*locked` to false, and errno, if the file system has no locks. */
static enum status lock_file(int fd, const char *path, long most_ns, const struct cache_stop *stop,
                             bool *locked)
{
    for (long ns = WAIT_MIN_NS;; ns = ns < most_ns / 2 ? 2 * ns : most_ns) {
        *locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
        if (*locked || (errno != EWOULDBLOCK && errno != EINTR))
            return STATUS_OK;
        TRY(wait_for_others(stop, path, ns));
    }
}

/* Locks the folder. While a process holds the lock, no other process adds bytes to the folder or renames a
 * file in it. If the file system has no locks, the cache may exceed its limit. close() releases the lock. */
static enum status lock_folder(const char *folder, const struct cache_stop *stop, int *fd)
{
    bool locked;
    FREED char *path = NULL;
    TRY(make_path(&path, "%s/" LOCK_NAME, folder));
    *fd = open_file(path, O_RDWR | O_CREAT);
    if (*fd < 0)
        return failed(path, "create");
    const enum status status = lock_file(*fd, path, WAIT_LOCK_NS, stop, &locked);
    if (status != STATUS_OK)
        close(*fd);
    return status;
}

/* Gives a draft room for `bytes` more bytes than were appended, and for up to `ahead` more for which no entry
 * must go. Waits while the drafts of other processes leave too little room: their sizes count already. */
static enum status reserve(const char *folder, uint64_t bytes, uint64_t ahead, uint64_t limit,
                           const struct cache_stop *stop, struct cache_draft *draft)
{
    const uint64_t from = draft->bytes;
    uint64_t left = 0;
    for (int i = 0; i == 0 || left < bytes; i++) {
        int lock;
        if (i == WAITS_QUIET)
            status_say("%s: waiting for room below %s, which other processes are filling", folder,
                       REMOTE_CACHE_BYTES);
        if (i > 0)
            TRY(wait_for_others(stop, draft->path, WAIT_NS));
        TRY(lock_folder(folder, stop, &lock));
        enum status status = ftruncate(draft->fd, (off_t)from) == 0 ? make_room(folder, bytes, limit, &left)
                                                                    : failed(draft->path, "write");
        draft->room = from + (left - bytes < ahead ? left : bytes + ahead);
        if (status == STATUS_OK && left >= bytes && ftruncate(draft->fd, (off_t)draft->room) != 0)
            status = failed(draft->path, "write");
        close(lock);
        TRY(status);
    }
    const uint64_t room = draft->room;
    const int failure = posix_fallocate(draft->fd, (off_t)from, room > from ? (off_t)(room - from) : 1);
    if (failure != 0)
        errno = failure;
    return failure == 0 && ftruncate(draft->fd, (off_t)room) == 0 ? STATUS_OK : failed(draft->path, "write");
}

enum status cache_open(const char *folder, bool frozen)
{
    struct stat info;
    if (frozen && access(folder, F_OK) != 0 && errno == ENOENT) {
        return status_prefix(file_check_new_folder(folder), "%s", REMOTE_CACHE_DIR);
    }
    if (!frozen && mkdir(folder, 0777) != 0 && errno != EEXIST) {
        const int cause = errno;
        /* File systems that allow no new folders, such as /proc, report ENOENT too. */
        FREED char *parent = NULL;
        TRY(make_path(&parent, "%s", folder));
        const bool forbids = cause == ENOENT && access(dirname(parent), F_OK) == 0;
        return status_set(STATUS_USAGE, "%s %s: cannot create the folder: %s%s", REMOTE_CACHE_DIR, folder,
                          strerror(cause), remedy(forbids ? EPERM : cause));
    }
    if (stat(folder, &info) == 0 && !S_ISDIR(info.st_mode))
        return status_set(STATUS_USAGE, "%s %s: this is a file; name a folder", REMOTE_CACHE_DIR, folder);
    if (access(folder, R_OK | W_OK | X_OK) != 0)
        return status_set(STATUS_USAGE, "%s %s: %s%s", REMOTE_CACHE_DIR, folder, strerror(errno),
                          remedy(errno));
    return STATUS_OK;
}

enum status cache_trim(const char *folder, uint64_t limit, const struct cache_stop *stop)
{
    int lock;
    uint64_t left;
    TRY(lock_folder(folder, stop, &lock));
    enum status status = make_room(folder, 0, limit, &left);
    close(lock);
    return status;
}

/* ---- Writing ---- */

/* Opens and locks the draft. Opens it again if another process renames or removes the file before this
 * process has locked it, and after removing something that is not a regular file. */
static enum status lock_draft(struct cache_draft *draft, const struct cache_stop *stop)
{
    struct stat opened, named;
    bool locked = true;
    for (;;) {
        draft->fd = open_file(draft->path, O_RDWR | O_CREAT);
        const bool odd = draft->fd < 0 ? errno == ELOOP || errno == ENXIO
                                       : fstat(draft->fd, &opened) == 0 && !S_ISREG(opened.st_mode);
        if (draft->fd < 0 && !odd)
            return failed(draft->path, "create");
        const enum status status =
            odd ? STATUS_OK : lock_file(draft->fd, draft->path, WAIT_NS, stop, &locked);
        if (status != STATUS_OK) { /* another process writes this draft: cache_abandon() must not remove it */
            close(draft->fd);
            draft->fd = -1;
            return status;
        }
        if (!locked)
            return failed(draft->path, "lock");
        if (odd && unlink(draft->path) != 0 && errno != ENOENT)
            return failed(draft->path, "remove");
        if (!odd && lstat(draft->path, &named) == 0 && opened.st_ino == named.st_ino)
            return STATUS_OK;
        if (draft->fd >= 0)
            close(draft->fd);
        draft->fd = -1;
    }
}

enum status cache_check_fits(const struct cache_entry *entry, uint64_t limit)
{
    return !limit || entry->bytes <= limit
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "%s %" PRIu64 ": a file of %" PRIu64 " bytes does not fit; raise the limit",
                            REMOTE_CACHE_BYTES, limit, entry->bytes);
}

/* Waits until no other thread or process writes a draft of unknown size. */
static enum status take_turn(const char *folder, const struct cache_stop *stop, int *turn)
{
    bool locked;
    *turn = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *turn >= 0 ? lock_file(*turn, folder, WAIT_NS, stop, &locked) : failed(folder, "open");
}

enum status cache_begin(const char *folder, const struct cache_entry *entry, uint64_t limit,
                        const struct cache_stop *stop, struct cache_draft *draft, int *fd)
{
    *draft = (struct cache_draft){.fd = -1, .turn = -1};
    *fd = -1;
    TRY(make_path(&draft->path, "%s/%016" PRIx64 DRAFT_END, folder, entry->source));
    if (entry->bytes == CACHE_UNKNOWN)
        TRY(take_turn(folder, stop, &draft->turn));
    TRY(lock_draft(draft, stop));
    TRY(cache_find(folder, entry, false, fd));
    if (*fd >= 0) {
        cache_abandon(draft);
        return STATUS_OK;
    }
    return reserve(folder, entry->bytes == CACHE_UNKNOWN ? 0 : entry->bytes, 0, limit, stop, draft);
}

enum status cache_append(const char *folder, uint64_t limit, const struct cache_stop *stop,
                         struct cache_draft *draft, const void *bytes, size_t size)
{
    const uint64_t end = draft->bytes + size;
    if (limit && end > limit)
        return status_set(STATUS_USAGE, "%s %" PRIu64 ": the unpacked data have more bytes; raise the limit",
                          REMOTE_CACHE_BYTES, limit);
    if (end > draft->room)
        TRY(reserve(folder, size, STEP_BYTES, limit, stop, draft));
    for (const char *from = bytes; draft->bytes < end;) {
        const ssize_t count = pwrite(draft->fd, from, end - draft->bytes, (off_t)draft->bytes);
        if (count <= 0 && (count == 0 || errno != EINTR))
            return failed(draft->path, "write");
        draft->bytes += count > 0 ? (size_t)count : 0;
        from += count > 0 ? count : 0;
    }
    return STATUS_OK;
}

enum status cache_complete(const char *folder, const struct cache_entry *entry, const struct cache_stop *stop,
                           struct cache_draft *draft, int *fd)
{
    FREED char *path = NULL;
    uint64_t hash;
    *fd = -1;
    if (ftruncate(draft->fd, (off_t)entry->bytes) != 0) /* room that was reserved in advance */
        return failed(draft->path, "write");
    TRY(hash_file(draft->fd, entry->bytes, draft->path, &hash));
    TRY(make_path(&path, "%s/%016" PRIx64 "-%016" PRIx64 ENTRY_END, folder, entry->source, hash));
    if (fsync(draft->fd) != 0)
        return failed(draft->path, "store");
    int lock;
    TRY(lock_folder(folder, stop, &lock));
    const bool stored = rename(draft->path, path) == 0;
    const int cause = errno;
    close(lock);
    errno = cause;
    if (!stored)
        return failed(draft->path, "store");
    file_sync_folder(path);
    is_verified(entry->source, true);
    flock(draft->fd, LOCK_UN);
    *fd = draft->fd;
    draft->fd = -1;
    cache_abandon(draft);
    return STATUS_OK;
}

void cache_abandon(struct cache_draft *draft)
{
    if (draft->fd >= 0) {
        unlink(draft->path);
        close(draft->fd);
    }
    if (draft->turn >= 0)
        lock_close(draft->turn);
    free(draft->path);
    *draft = (struct cache_draft){.fd = -1, .turn = -1};
}
