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
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef HAVE_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/remote.h"
#include "data/tar.h"
#include "machine/host.h"

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
    /* Without the lock, the draft must not grow, not even for a moment. */
    const int failure =
        draft->room == from ? 0 : posix_fallocate(draft->fd, (off_t)from, (off_t)(draft->room - from));
    if (failure != 0)
        errno = failure;
    return failure == 0 ? STATUS_OK : failed(draft->path, "write");
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

/* ---- Compressed shards ---- */

bool unpack_is_packed(const char *name)
{
    static const char *const ends[] = {".tar.gz", ".tgz",     ".tar.zst", ".tzst",
                                       ".mds.gz", ".mds.zst", ".mds.zstd"};
    bool packed = false;
    for (size_t i = 0; i < COUNT_OF(ends); i++)
        packed |= text_ends_in(name, ends[i]);
    return packed;
}

#define PIECE       ((size_t)1 << 20)    /* bytes that are read, or unpacked, at a time */
#define RATIO_MAX   1032                 /* bytes that gzip can store in one byte */
#define RATIO_FROM  ((uint64_t)64 << 20) /* a smaller file may have any ratio */
#define GZIP_BIT    16                   /* of the argument of inflateInit2(): the gzip format */
#define WINDOW_BITS 27                   /* of zstd: the largest window that its own program accepts */
#define AGAIN       "; copy or download the file again"

/* State of unpacking a file of consecutive members or frames. */
struct unpacking {
    const struct unpack_input *input;
    const char *format;
    uint8_t *buffer, *out; /* PIECE bytes each */
    const uint8_t *in;     /* the packed bytes: in the buffer, or in the caller's memory */
    size_t given, used;    /* bytes in `in`, and how many of them were unpacked */
    uint64_t packed, bytes;
    bool ended;  /* a member or frame has ended and the next has not begun */
    bool padded; /* zeros follow the last member of gzip */
    uint8_t head[TAR_BLOCK_BYTES];
    struct tar_parser parser;
#ifdef HAVE_ZLIB
    z_stream gzip;
#endif
#ifdef HAVE_ZSTD
    ZSTD_DCtx *zstd;
#endif
    /* Unpacks up to PIECE bytes, and sets `*got` to their number. Leaves input while the end of a member or
     * frame has not been handed out. */
    enum status (*step)(struct unpacking *self, size_t *got);
};

static inline enum status damaged(const struct unpacking *self, const char *reason)
{
    return status_set(STATUS_FAILED, "damaged %s data after %llu unpacked bytes: %s" AGAIN, self->format,
                      (unsigned long long)self->bytes, reason);
}

#ifdef HAVE_ZLIB
/* Skips zeros after the last member. Tools that write to tapes pad files to whole blocks, and gzip ignores
 * such zeros. */
static enum status skip_padding(struct unpacking *self)
{
    while (self->used < self->given && self->in[self->used] == 0)
        self->used++;
    return self->used == self->given ? STATUS_OK : damaged(self, "zeros and then other data follow its end");
}

/* Implements step(). zlib reads the check sum at the end of a member after its last byte was unpacked. */
static enum status step_gzip(struct unpacking *self, size_t *got)
{
    z_stream *stream = &self->gzip;
    *got = 0;
    self->padded |= self->ended && self->in[self->used] == 0;
    if (self->padded)
        return skip_padding(self);
    if (self->ended)
        inflateReset(stream);
    stream->next_in = (Bytef *)(uintptr_t)(self->in + self->used); /* zlib does not write to it */
    stream->avail_in = (uInt)(self->given - self->used);
    stream->next_out = self->out;
    stream->avail_out = (uInt)PIECE;
    const int result = inflate(stream, Z_NO_FLUSH);
    self->ended = result == Z_STREAM_END;
    self->used = self->given - stream->avail_in;
    *got = PIECE - stream->avail_out;
    return result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR
               ? STATUS_OK
               : damaged(self, stream->msg ? stream->msg : "it cannot be unpacked");
}
#endif

#ifdef HAVE_ZSTD
/* Implements step(). zstd holds the last byte of a frame back until all of it was unpacked. */
static enum status step_zstd(struct unpacking *self, size_t *got)
{
    ZSTD_inBuffer in = {self->in, self->given, self->used};
    ZSTD_outBuffer out = {self->out, PIECE, 0};
    const size_t left = ZSTD_decompressStream(self->zstd, &out, &in);
    self->ended = left == 0;
    self->used = in.pos;
    *got = out.pos;
    if (!ZSTD_isError(left))
        return STATUS_OK;
    const ZSTD_ErrorCode code = ZSTD_getErrorCode(left);
    if (code == ZSTD_error_memory_allocation)
        return status_set(STATUS_EXHAUSTED, "out of memory for zstd");
    if (code == ZSTD_error_frameParameter_windowTooLarge)
        return status_set(STATUS_FAILED, "the zstd data need a window of more than 128 MiB; compress the "
                                         "shard with zstd --long=27 or less");
    if (code == ZSTD_error_dictionary_wrong)
        return status_set(STATUS_FAILED, "the zstd data need a dictionary; compress the shard without one");
    return damaged(self, ZSTD_getErrorName(left));
}
#endif

/* Finds out the format from the first bytes, which were read, and opens its library. */
static enum status begin(struct unpacking *self)
{
    static const uint8_t gzip[] = {0x1f, 0x8b}, zstd[] = {0x28, 0xb5, 0x2f, 0xfd},
                         skipped[] = {0x2a, 0x4d, 0x18};
    const uint8_t *in = self->in;
    if (self->given >= sizeof gzip && memcmp(in, gzip, sizeof gzip) == 0) {
        self->format = "gzip";
#ifdef HAVE_ZLIB
        self->step = step_gzip;
        return ALLOCATED(inflateInit2(&self->gzip, MAX_WBITS + GZIP_BIT) == Z_OK, "out of memory for zlib");
#else
        return status_set(STATUS_UNAVAILABLE, "the file is gzipped, but this build has no zlib: unpack it "
                                              "with gunzip, or install zlib (zlib1g-dev) and build again");
#endif
    }
    if (self->given >= sizeof zstd && (memcmp(in, zstd, sizeof zstd) == 0 ||
                                       (*in >> 4 == 5 && memcmp(in + 1, skipped, sizeof skipped) == 0))) {
        self->format = "zstd";
#ifdef HAVE_ZSTD
        self->step = step_zstd;
        self->zstd = ZSTD_createDCtx();
        return ALLOCATED(
            self->zstd && !ZSTD_isError(ZSTD_DCtx_setParameter(self->zstd, ZSTD_d_windowLogMax, WINDOW_BITS)),
            "out of memory for zstd");
#else
        return status_set(STATUS_UNAVAILABLE,
                          "the file is compressed by zstd, but this build has no libzstd: unpack it with "
                          "zstd -d, or install libzstd (libzstd-dev) and build again");
#endif
    }
    if (self->given == 0)
        return status_set(STATUS_FAILED, "the file is empty" AGAIN);
    TRY(file_refuse_pointer(in, self->given));
    TRY(tar_refuse_other(in, self->given));
    return status_set(STATUS_FAILED, "this is neither gzip nor zstd data; if it is a tar file, name it .tar");
}

/* Checks the bytes in `out`: whether the data begin like a tar file, and how many they are. */
static enum status check(struct unpacking *self, size_t got)
{
    const uint64_t before = self->bytes;
    self->bytes += got;
    if (self->bytes > RATIO_FROM && self->bytes / RATIO_MAX > self->packed)
        return status_set(STATUS_FAILED,
                          "the data unpack to more than %d times their size, as made to fill a disk; if they "
                          "are right, unpack the shard yourself",
                          RATIO_MAX);
    if (!self->input->tar || before >= TAR_BLOCK_BYTES)
        return STATUS_OK;
    const size_t room = (size_t)(TAR_BLOCK_BYTES - before);
    memcpy(self->head + before, self->out, got < room ? got : room);
    if (self->bytes < TAR_BLOCK_BYTES)
        return STATUS_OK;
    struct tar_member member;
    enum tar_step step;
    size_t need;
    tar_open(&self->parser, TAR_SIZE_UNKNOWN);
    TRY(tar_refuse_other(self->head, TAR_BLOCK_BYTES));
    return tar_next(&self->parser, self->head, TAR_BLOCK_BYTES, false, &member, &step, &need);
}

/* Reads the next packed bytes; none at the end of the file. */
static enum status read_packed(struct unpacking *self)
{
    const struct unpack_input *input = self->input;
    const size_t left = input->bytes ? input->size - self->packed : 0;
    ssize_t count = left < PIECE ? (ssize_t)left : (ssize_t)PIECE;
    self->in = input->bytes ? input->bytes + self->packed : self->buffer;
    do
        count = input->bytes ? count : pread(input->fd, self->buffer, PIECE, (off_t)self->packed);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        return status_set(STATUS_FAILED, "cannot read: %s", strerror(errno));
    self->given = (size_t)count;
    self->used = 0;
    self->packed += self->given;
    return STATUS_OK;
}

static enum status unpack_all(struct unpacking *self,
                              enum status (*add)(void *context, const void *bytes, size_t size),
                              void *context)
{
    TRY(read_packed(self));
    TRY(begin(self));
    while (self->given > 0) {
        size_t got = 0;
        do {
            TRY(self->step(self, &got));
            TRY(check(self, got));
            if (got > 0)
                TRY(add(context, self->out, got));
        } while (self->used < self->given);
        TRY(read_packed(self));
    }
    return self->ended ? STATUS_OK
                       : status_set(STATUS_FAILED, "the %s data are truncated" AGAIN, self->format);
}

enum status unpack_bytes(const struct unpack_input *input,
                         enum status (*add)(void *context, const void *bytes, size_t size), void *context)
{
    struct unpacking *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory to unpack a file"));
    self->input = input;
    self->buffer = malloc(PIECE);
    self->out = malloc(PIECE);
    enum status status = ALLOCATED(self->buffer && self->out, "out of memory to unpack a file");
    if (status == STATUS_OK)
        status = unpack_all(self, add, context);
#ifdef HAVE_ZLIB
    inflateEnd(&self->gzip);
#endif
#ifdef HAVE_ZSTD
    ZSTD_freeDCtx(self->zstd);
#endif
    free(self->buffer);
    free(self->out);
    free(self);
    return status;
}

/* ---- Where the bytes go ---- */

/* Memory is checked each time that a file in memory has grown by this. */
#define CHECK_BYTES ((uint64_t)64 << 20)

/* The cache, or a file in memory. */
struct writing {
    const struct remote_options *options; /* NULL: `memory` is written */
    const struct cache_stop *stop;
    struct cache_draft draft;
    int memory;
    uint64_t bytes; /* in `memory` */
};

static enum status append_to_memory(struct writing *writing, const void *bytes, size_t size)
{
    if (writing->bytes / CHECK_BYTES != (writing->bytes + size) / CHECK_BYTES)
        TRY(memory_check(CHECK_BYTES, "a shard that is unpacked in memory", UNPACK_REMEDY));
    if (!file_write_all(writing->memory, bytes, size))
        return status_set(STATUS_EXHAUSTED, "cannot unpack into memory: %s; %s", strerror(errno),
                          UNPACK_REMEDY);
    writing->bytes += size;
    return STATUS_OK;
}

/* Implements add() of unpack_bytes(). */
static enum status append(void *context, const void *bytes, size_t size)
{
    struct writing *writing = context;
    const struct remote_options *options = writing->options;
    if (writing->stop && writing->stop->is_set(writing->stop->context))
        return status_set(STATUS_FAILED, "reading was stopped");
    return options ? cache_append(options->cache_dir, options->cache_bytes, writing->stop, &writing->draft,
                                  bytes, size)
                   : append_to_memory(writing, bytes, size);
}

/* Unpacks all bytes. */
static enum status fill(struct writing *writing, const struct unpack_input *packed,
                        const struct file_identity *identity)
{
    struct stat info = {.st_size = -1};
    TRY(unpack_bytes(packed, append, writing));
    if (!identity)
        return STATUS_OK;
    const bool known = fstat(packed->fd, &info) == 0;
    const struct file_identity now = file_identify(&info);
    return known && file_compare(identity, &now) == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "the file changed while it was unpacked");
}

enum status unpack_to_memory(const struct cache_stop *stop, const struct unpack_input *packed,
                             const struct file_identity *identity, int *fd)
{
    struct writing writing = {.stop = stop, .memory = memfd_create("fdsl-unpacked", MFD_CLOEXEC)};
    *fd = -1;
    if (writing.memory < 0)
        return status_set(STATUS_EXHAUSTED, "cannot create a file in memory: %s", strerror(errno));
    enum status status = fill(&writing, packed, identity);
    if (status == STATUS_OK && lseek(writing.memory, 0, SEEK_SET) != 0)
        status = status_set(STATUS_FAILED, "a file in memory: %s", strerror(errno));
    if (status == STATUS_OK)
        *fd = writing.memory;
    else
        close(writing.memory);
    return status;
}

enum status unpack_open(const struct remote_options *options, const struct cache_stop *stop,
                        const struct cache_entry *copy, const struct unpack_input *packed,
                        const struct file_identity *identity, int *fd)
{
    const char *folder = options->cache_dir;
    struct cache_entry entry = {.source = copy->source, .bytes = CACHE_UNKNOWN};
    struct writing writing = {.options = options, .stop = stop};
    TRY(cache_open(folder, options->frozen));
    TRY(cache_find(folder, copy, options->frozen, fd));
    if (*fd < 0 && options->frozen)
        return status_set(STATUS_USAGE, "it has no unpacked copy in %s yet, and a dry run writes none",
                          folder);
    if (*fd >= 0)
        return STATUS_OK;
    enum status status = cache_begin(folder, &entry, options->cache_bytes, stop, &writing.draft, fd);
    const bool writes = status == STATUS_OK && *fd < 0; /* otherwise, another process has written it */
    if (writes)
        status = fill(&writing, packed, identity);
    entry.bytes = writing.draft.bytes;
    if (writes && status == STATUS_OK)
        status = cache_complete(folder, &entry, stop, &writing.draft, fd);
    const struct failure failure = status_save(status);
    cache_abandon(&writing.draft);
    return status == STATUS_OK ? STATUS_OK : status_restore(&failure);
}
