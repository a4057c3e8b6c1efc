#include "data/unpack.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef HAVE_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

#include "core/array.h"
#include "core/text.h"
#include "data/tar.h"
#include "machine/host.h"

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
