#include "data/unpack.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/remote_cache.h"

bool unpack_is_packed(const char *name)
{
    return text_ends_in(name, ".tar.gz") || text_ends_in(name, ".tgz");
}

bool unpack_is_place(const char *path)
{
    DIR *folder = opendir(path);
    bool found = !folder && unpack_is_packed(path);
    for (struct dirent *entry; folder && !found && (entry = readdir(folder));)
        found = *entry->d_name != '.' && unpack_is_packed(entry->d_name);
    if (folder)
        closedir(folder);
    return found;
}

#ifdef HAVE_ZLIB

#define PIECE    ((size_t)1 << 20) /* bytes that are read, or unpacked, at a time */
#define GZIP_BIT 16                /* of the argument of inflateInit2(): the gzip format */
#define WAIT_NS  50000000          /* between two attempts to take the lock */

/* State of unpacking a file of consecutive gzip members. */
struct unpacking {
    z_stream stream;
    int fd;
    uint64_t bytes, limit;
    uint8_t *in, *out; /* PIECE bytes each */
    bool ended;        /* a member has ended and the next has not begun */
    const struct unpack_stop *stop;
    struct file_writer writer;
};

static enum status check_stop(const struct unpack_stop *stop)
{
    return stop ? stop->check(stop->context) : STATUS_OK;
}

/* Reads the next packed bytes. Sets `*more` to false at the end of the file. */
static enum status read_packed(struct unpacking *self, bool *more)
{
    ssize_t count;
    do
        count = read(self->fd, self->in, PIECE);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        return status_set(STATUS_FAILED, "cannot read: %s", strerror(errno));
    *more = count > 0;
    self->stream.next_in = self->in;
    self->stream.avail_in = (uInt)count;
    return STATUS_OK;
}

/* Unpacks the bytes that were read, and appends them to the copy. zlib reads the check sum at the end of a
 * member after its last byte was unpacked, so no output is left when the input ends. */
static enum status unpack_piece(struct unpacking *self)
{
    z_stream *stream = &self->stream;
    while (stream->avail_in > 0) {
        if (self->ended)
            inflateReset(stream);
        stream->next_out = self->out;
        stream->avail_out = (uInt)PIECE;
        const int result = inflate(stream, Z_NO_FLUSH);
        self->ended = result == Z_STREAM_END;
        if (result != Z_OK && result != Z_STREAM_END)
            return status_set(STATUS_FAILED, "damaged gzip file: %s",
                              stream->msg ? stream->msg : "it cannot be unpacked");
        const size_t count = PIECE - stream->avail_out;
        self->bytes += count;
        if (self->limit && self->bytes > self->limit)
            return status_set(STATUS_USAGE,
                              "the unpacked shards have more than %llu bytes, the maximum size of "
                              "the cache folder; raise %s",
                              (unsigned long long)self->limit,
                              OPTION_OR_FIELD("--cache-bytes", "cache_bytes"));
        TRY(file_add(&self->writer, self->out, count));
    }
    return STATUS_OK;
}

static enum status unpack_all(struct unpacking *self)
{
    for (bool more = true; more;) {
        TRY(check_stop(self->stop));
        TRY(read_packed(self, &more));
        TRY(unpack_piece(self));
    }
    return self->ended ? STATUS_OK : status_set(STATUS_FAILED, "the gzip file is truncated");
}

/* Writes the copy. `info` describes the packed file, which must still be the same afterwards. */
static enum status write_copy(struct unpacking *self, const struct stat *info, const char *copy)
{
    struct stat after;
    self->in = malloc(PIECE);
    self->out = malloc(PIECE);
    TRY(ALLOCATED(self->in && self->out, "out of memory to unpack a shard"));
    TRY(ALLOCATED(inflateInit2(&self->stream, MAX_WBITS + GZIP_BIT) == Z_OK, "out of memory for zlib"));
    enum status status = file_begin(&self->writer, copy);
    if (status == STATUS_OK) {
        status = unpack_all(self);
        const struct file_identity before = file_identify(info);
        struct file_identity now = before;
        if (status == STATUS_OK && fstat(self->fd, &after) == 0)
            now = file_identify(&after);
        if (status == STATUS_OK && file_compare(&before, &now) != 0)
            status = status_set(STATUS_FAILED, "the file changed while it was unpacked");
        if (status == STATUS_OK)
            status = file_end(&self->writer);
        if (status != STATUS_OK) {
            const struct failure failure = status_save(status);
            file_abandon(&self->writer);
            (void)status_restore(&failure);
        }
    }
    inflateEnd(&self->stream);
    return status;
}

/* Locks the folder, so that one process unpacks at a time. File systems without locks give none: `*locked` is
 * then false. */
static enum status lock_folder(int folder, const struct unpack_stop *stop, bool *locked)
{
    const struct timespec pause = {0, WAIT_NS};
    while (!(*locked = flock(folder, LOCK_EX | LOCK_NB) == 0) && (errno == EWOULDBLOCK || errno == EINTR)) {
        TRY(check_stop(stop));
        nanosleep(&pause, NULL);
    }
    return STATUS_OK;
}

/* Removes the temporary files of this copy, which processes that were killed have left. The caller has the
 * lock, so no other process writes the copy. */
static void remove_left(int folder, const char *copy)
{
    const char *name = strrchr(copy, '/') + 1;
    const size_t length = strlen(name);
    const int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = again >= 0 ? fdopendir(again) : NULL;
    if (!stream && again >= 0)
        close(again);
    for (struct dirent *entry; stream && (entry = readdir(stream));)
        if (strncmp(entry->d_name, name, length) == 0 && entry->d_name[length] == '.' &&
            text_ends_in(entry->d_name, ".tmp"))
            (void)unlinkat(folder, entry->d_name, 0);
    if (stream)
        closedir(stream);
}

/* Sets `*bytes` to the size of the copy, if it is there and not larger than the limit. */
static bool find_copy(const char *copy, uint64_t limit, uint64_t *bytes)
{
    struct stat info;
    if (stat(copy, &info) != 0 || !S_ISREG(info.st_mode))
        return false;
    *bytes = (uint64_t)info.st_size;
    return !limit || *bytes <= limit;
}

/* Sets the path of the copy: hashes of the path and of the identity of the file, without what depends on the
 * computer that reads it. The path is absolute, because a program may change its working folder while it
 * reads. */
static enum status name_copy(const char *path, const struct stat *info, const char *folder, char *copy)
{
    char *real = realpath(path, NULL);
    if (!real)
        return status_set(STATUS_FAILED, "%s", strerror(errno));
    const struct file_identity identity = file_identify(info);
    const uint64_t words[] = {identity.bytes, (uint64_t)identity.modified_ns, (uint64_t)identity.changed_ns};
    const uint64_t source = checksum_seeded(real, strlen(real), 0);
    free(real);
    real = realpath(folder, NULL); /* NULL: a dry run creates no folder */
    const int length =
        snprintf(copy, PATH_MAX, "%s/unpacked-%016llx-%016llx.tar", real ? real : folder,
                 (unsigned long long)source, (unsigned long long)checksum_seeded(words, sizeof words, 1));
    free(real);
    return length < PATH_MAX ? STATUS_OK : status_set(STATUS_USAGE, "%s: the path is too long", folder);
}

/* Unpacks a file, unless another process has done it while this one waited for the lock. */
static enum status unpack_once(int fd, const struct stat *info, const char *copy, int folder, uint64_t limit,
                               const struct unpack_stop *stop, uint64_t *bytes)
{
    bool locked;
    TRY(lock_folder(folder, stop, &locked));
    if (find_copy(copy, limit, bytes))
        return STATUS_OK;
    if (locked)
        remove_left(folder, copy);
    struct unpacking *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory to unpack a shard"));
    self->fd = fd;
    self->limit = limit;
    self->stop = stop;
    const enum status status = write_copy(self, info, copy);
    *bytes = self->bytes;
    free(self->in);
    free(self->out);
    free(self);
    return status;
}

/* Finds the copy of a file in a folder that can be used, or writes it. */
static enum status find_or_unpack(const char *path, const char *folder, uint64_t limit, bool frozen,
                                  const struct unpack_stop *stop, char *copy, uint64_t *bytes)
{
    struct stat info;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    enum status status = STATUS_OK;
    if (fd < 0 || fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        status = status_set(STATUS_FAILED, "%s", fd < 0 ? strerror(errno) : "not a regular file");
    if (status == STATUS_OK)
        status = name_copy(path, &info, folder, copy);
    const bool found = status == STATUS_OK && find_copy(copy, limit, bytes);
    if (status == STATUS_OK && !found && frozen)
        status =
            status_set(STATUS_USAGE, "it has no unpacked copy in %s yet, and a dry run writes none", folder);
    if (status == STATUS_OK && !found) {
        const int directory = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        status = directory >= 0 ? unpack_once(fd, &info, copy, directory, limit, stop, bytes)
                                : status_set(STATUS_USAGE, "%s: %s", folder, strerror(errno));
        if (directory >= 0)
            lock_close(directory);
    }
    if (fd >= 0)
        close(fd);
    return status;
}

enum status unpack_shard(const char *path, const char *folder, uint64_t limit, bool frozen,
                         const struct unpack_stop *stop, char *copy, uint64_t *bytes)
{
    TRY(cache_open(folder, frozen));
    const enum status status = find_or_unpack(path, folder, limit, frozen, stop, copy, bytes);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}

#else

enum status unpack_shard(const char *path, const char *folder, uint64_t limit, bool frozen,
                         const struct unpack_stop *stop, char *copy, uint64_t *bytes)
{
    (void)path, (void)folder, (void)limit, (void)frozen, (void)stop, (void)copy, (void)bytes;
    return status_set(STATUS_UNAVAILABLE, "the shard is gzipped, but this build has no zlib: unpack it with "
                                          "gunzip, or install zlib (zlib1g-dev) and build again");
}

#endif
