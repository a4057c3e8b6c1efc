#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/remote_parts.h"
#include "machine/host.h"

#define PIECE_BYTES_MIN (UINT64_C(1) << 20)
#define PIECE_BYTES_MAX (UINT64_C(8) << 20)

void remote_close_transfer(struct transfer *transfer, bool keep_file)
{
    if (!keep_file && transfer->fd >= 0)
        close(transfer->fd);
    free(transfer);
}

/* Takes the next piece of the first transfer in the queue. */
static struct transfer *take_piece(struct remote *remote, uint64_t *first, uint64_t *bytes)
{
    struct transfer *transfer = remote->queue;
    uint64_t left = transfer->file->version.bytes - transfer->next;
    *first = transfer->next;
    *bytes = left < transfer->piece_bytes ? left : transfer->piece_bytes;
    transfer->next += *bytes;
    if (*bytes == left)
        remote->queue = transfer->later;
    return transfer;
}

/* Reads a piece. */
static enum status read_piece(struct remote *remote, struct http *http, const struct transfer *transfer,
                              uint64_t first, uint64_t bytes)
{
    const struct file *file = transfer->file;
    char url[REMOTE_URL_MAX], shown[REMOTE_URL_MAX];
    struct http_reply reply;
    snprintf(shown, sizeof shown, "%s/%s", remote->shown, file->name);
    TRY(remote_url_of(remote, file->name, url));
    struct http_request request = remote_request(remote, url, shown);
    request.first = first;
    request.wanted = bytes;
    request.whole = !file->ranged;
    request.fd = transfer->fd;
    request.version = &file->version;
    TRY(http_get(http, &request, REMOTE_TRIES, &reply));
    if (reply.got != bytes)
        return status_set(STATUS_FAILED,
                          "%s: the file has %" PRIu64 " bytes, not %" PRIu64 ": it changed while it was read",
                          shown, reply.got, bytes);
    return STATUS_OK;
}

/* Reads the next piece of a transfer. `http` is NULL if it could not be opened, for the reason `opened`. The
 * caller holds the lock, which is released during requests. */
static void serve_piece(struct remote *remote, struct http *http, enum status opened)
{
    uint64_t first, bytes;
    struct transfer *transfer = take_piece(remote, &first, &bytes);
    bool failed = transfer->status != STATUS_OK; /* another piece has failed, so this piece is not needed */
    pthread_mutex_unlock(&remote->lock);
    enum status status = failed                ? STATUS_OK
                         : opened != STATUS_OK ? opened
                                               : read_piece(remote, http, transfer, first, bytes);
    pthread_mutex_lock(&remote->lock);
    if (status != STATUS_OK && transfer->status == STATUS_OK) {
        transfer->status = status;
        snprintf(transfer->failure, sizeof transfer->failure, "%s", status_text());
    }
    transfer->left -= bytes;
    if (transfer->left == 0)
        pthread_cond_broadcast(&remote->done);
}

void remote_start_examining(struct remote *remote, struct file *file)
{
    if (file->known || file->examining)
        return;
    file->examining = true;
    struct file **last = &remote->unknown;
    while (*last)
        last = &(*last)->later;
    *last = file;
    pthread_cond_broadcast(&remote->work);
}

/* Examines the first file in the queue. If it is wanted in memory, starts its transfer. */
static void serve_examination(struct remote *remote, struct http *http)
{
    struct file *file = remote->unknown;
    remote->unknown = file->later;
    file->later = NULL;
    pthread_mutex_unlock(&remote->lock);
    if (http)
        (void)remote_examine(remote, http, file,
                             REMOTE_TRIES); /* the thread that opens the file reports errors */
    pthread_mutex_lock(&remote->lock);
    file->examining = false;
    if (file->known && file->asked)
        (void)remote_start_in_memory(remote, file);
    pthread_cond_broadcast(&remote->done);
}

/* A connection: examines files and reads pieces until the data set is closed. Examines first, because no
 * connection can read a file whose size is unknown. */
static void *serve(void *context)
{
    struct remote *remote = context;
    struct http *http = NULL;
    enum status opened = http_open(&http);
    pthread_mutex_lock(&remote->lock);
    while (!remote->stopping) {
        if (remote->unknown)
            serve_examination(remote, http);
        else if (remote->queue)
            serve_piece(remote, http, opened);
        else
            pthread_cond_wait(&remote->work, &remote->lock);
    }
    pthread_mutex_unlock(&remote->lock);
    http_close(http);
    return NULL;
}

enum status remote_start_transfer(struct remote *remote, struct file *file, int fd, struct transfer **started)
{
    struct transfer *transfer = *started = calloc(1, sizeof *transfer);
    uint64_t bytes = file->version.bytes;
    if (!transfer) {
        close(fd);
        return remote_out_of_memory();
    }
    *transfer = (struct transfer){.file = file, .fd = fd, .left = bytes};
    if (bytes == 0)
        return STATUS_OK;
    transfer->piece_bytes = bytes / remote->thread_count;
    if (transfer->piece_bytes < PIECE_BYTES_MIN)
        transfer->piece_bytes = PIECE_BYTES_MIN;
    if (transfer->piece_bytes > PIECE_BYTES_MAX)
        transfer->piece_bytes = PIECE_BYTES_MAX;
    if (!file->ranged)
        transfer->piece_bytes = bytes;
    struct transfer **last = &remote->queue;
    while (*last)
        last = &(*last)->later;
    *last = transfer;
    pthread_cond_broadcast(&remote->work);
    return STATUS_OK;
}

enum status remote_await(struct remote *remote, const struct transfer *transfer)
{
    while (transfer->left > 0)
        pthread_cond_wait(&remote->done, &remote->lock);
    return transfer->status == STATUS_OK ? STATUS_OK : status_set(transfer->status, "%s", transfer->failure);
}

/* Returns an anonymous file in memory that has the size of `file`. Reuses an earlier one if possible, because
 * Linux needs longer to allocate memory than a fast server needs to fill it. STATUS_EXHAUSTED if there is
 * too little memory. The caller holds the lock. */
static enum status memory_file(struct remote *remote, const struct file *file, int *fd)
{
    bool reused = remote->spare_count > 0;
    if (!reused && memory_check(file->version.bytes, "a remote file",
                                "store the data set in smaller shards, or use --cache-dir") != STATUS_OK)
        return STATUS_EXHAUSTED;
    *fd = reused ? remote->spare[--remote->spare_count] : memfd_create("fdsl-remote", MFD_CLOEXEC);
    if (*fd >= 0 && ftruncate(*fd, (off_t)file->version.bytes) == 0 && lseek(*fd, 0, SEEK_SET) == 0)
        return STATUS_OK;
    status_set(STATUS_EXHAUSTED, "%s/%s: cannot create a file in memory: %s", remote->shown, file->name,
               strerror(errno));
    if (*fd >= 0)
        close(*fd);
    return STATUS_EXHAUSTED;
}

void remote_done(struct remote *remote, int fd)
{
    pthread_mutex_lock(&remote->lock);
    if (!remote_cached(remote) && remote->spare_count < REMOTE_SPARE_MAX) {
        remote->spare[remote->spare_count++] = fd;
        fd = -1;
    }
    pthread_mutex_unlock(&remote->lock);
    if (fd >= 0)
        close(fd);
}

enum status remote_start_in_memory(struct remote *remote, struct file *file)
{
    if (file->transfer)
        return STATUS_OK;
    int fd;
    TRY(memory_file(remote, file, &fd));
    return remote_start_transfer(remote, file, fd, &file->transfer);
}

enum status remote_read_to_memory(struct remote *remote, struct file *file, int *fd)
{
    pthread_mutex_lock(&remote->lock);
    enum status status = remote_start_in_memory(remote, file);
    struct transfer *transfer = file->transfer;
    file->transfer = NULL; /* another thread that opens the file starts its own transfer */
    if (status == STATUS_OK)
        status = remote_await(remote, transfer);
    pthread_mutex_unlock(&remote->lock);
    if (transfer) {
        *fd = status == STATUS_OK ? transfer->fd : -1;
        remote_close_transfer(transfer, status == STATUS_OK);
    }
    return status;
}

enum status remote_start_threads(struct remote *remote)
{
    uint32_t wanted = remote->options.connections ? remote->options.connections : REMOTE_CONNECTIONS;
    remote->threads = calloc(wanted, sizeof *remote->threads);
    if (!remote->threads)
        return remote_out_of_memory();
    sigset_t every, before;
    sigfillset(&every); /* signals are for the main thread */
    pthread_sigmask(SIG_BLOCK, &every, &before);
    while (remote->thread_count < wanted &&
           pthread_create(&remote->threads[remote->thread_count], NULL, serve, remote) == 0)
        remote->thread_count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return remote->thread_count == wanted
               ? STATUS_OK
               : status_set(STATUS_FAILED, "cannot start a thread for a connection; lower --iodepth");
}
