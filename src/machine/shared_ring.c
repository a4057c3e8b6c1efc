#include "machine/shared_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_BYTES 4096 /* one page, so that the buffers begin at a page boundary */
#define LINE_BYTES   64   /* size of a cache line */

/* The beginning of the shared memory. Each counter is in its own cache line, because only one process writes
 * it. Message n is in buffer n % buffers. */
struct header {
    uint64_t token;
    _Alignas(LINE_BYTES) _Atomic uint64_t sent;
    _Alignas(LINE_BYTES) _Atomic uint64_t freed;
};

struct shared_ring {
    struct header *header;
    size_t stride, size; /* bytes from one buffer to the next, and of the whole mapping */
    uint32_t buffers;
    int file; /* -1: closed */
};

static char *buffer_of(const struct shared_ring *ring, uint64_t message)
{
    return (char *)ring->header + HEADER_BYTES + message % ring->buffers * ring->stride;
}

static enum status map(struct shared_ring *ring)
{
    void *memory = mmap(NULL, ring->size, PROT_READ | PROT_WRITE, MAP_SHARED, ring->file, 0);
    if (memory == MAP_FAILED)
        return status_set(status_of_errno(errno), "cannot map %zu bytes of shared memory: %s", ring->size,
                          strerror(errno));
    ring->header = memory;
    return STATUS_OK;
}

static enum status new_ring(size_t bytes, uint32_t buffers, struct shared_ring **ring)
{
    *ring = calloc(1, sizeof **ring);
    TRY(ALLOCATED(*ring, "out of memory for shared buffers"));
    (*ring)->file = -1;
    (*ring)->buffers = buffers;
    (*ring)->stride = (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    (*ring)->size = HEADER_BYTES + buffers * (*ring)->stride;
    return STATUS_OK;
}

static enum status create(struct shared_ring *ring, struct shared_ring_offer *offer)
{
    ring->file = memfd_create("fdsl-bench", MFD_CLOEXEC);
    if (ring->file < 0)
        return status_set(status_of_errno(errno), "cannot create shared memory: %s", strerror(errno));
    if (ftruncate(ring->file, (off_t)ring->size) != 0)
        return status_set(status_of_errno(errno), "cannot create %zu bytes of shared memory: %s", ring->size,
                          strerror(errno));
    TRY(map(ring));
    *offer = (struct shared_ring_offer){.process = (int32_t)getpid(), .file = ring->file};
    if (getrandom(&offer->token, sizeof offer->token, 0) != (ssize_t)sizeof offer->token)
        return status_set(STATUS_FAILED, "no random numbers: %s", strerror(errno));
    ring->header->token = offer->token;
    return STATUS_OK;
}

enum status shared_ring_create(size_t bytes, uint32_t buffers, struct shared_ring **ring,
                               struct shared_ring_offer *offer)
{
    TRY(new_ring(bytes, buffers, ring));
    enum status status = create(*ring, offer);
    if (status != STATUS_OK) {
        shared_ring_close(*ring);
        *ring = NULL;
    }
    return status;
}

void shared_ring_attached(struct shared_ring *ring)
{
    if (ring->file >= 0)
        (void)close(ring->file);
    ring->file = -1;
}

/* If the writer runs in another container, its process id and file descriptor may mean another file here. The
 * size and the token detect this. O_NONBLOCK prevents blocking if that file is a pipe. */
static enum status attach(struct shared_ring *ring, const struct shared_ring_offer *offer)
{
    char path[64];
    struct stat about;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)offer->process, (int)offer->file);
    ring->file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (ring->file < 0)
        return status_set(STATUS_UNAVAILABLE, "%s: %s", path, strerror(errno));
    if (fstat(ring->file, &about) != 0 || !S_ISREG(about.st_mode) || about.st_size != (off_t)ring->size)
        return status_set(STATUS_UNAVAILABLE, "%s is not the memory of the other rank", path);
    TRY(map(ring));
    return ring->header->token == offer->token
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "%s is not the memory of the other rank", path);
}

enum status shared_ring_attach(const struct shared_ring_offer *offer, size_t bytes, uint32_t buffers,
                               struct shared_ring **ring)
{
    TRY(new_ring(bytes, buffers, ring));
    enum status status = attach(*ring, offer);
    shared_ring_attached(*ring);
    if (status != STATUS_OK) {
        shared_ring_close(*ring);
        *ring = NULL;
    }
    return status;
}

void shared_ring_close(struct shared_ring *ring)
{
    if (!ring)
        return;
    shared_ring_attached(ring);
    if (ring->header)
        (void)munmap(ring->header, ring->size);
    free(ring);
}

void *shared_ring_memory(const struct shared_ring *ring, size_t *size)
{
    *size = ring->size - HEADER_BYTES;
    return buffer_of(ring, 0);
}

/* ---- Messages ---- */

/* The counters use acquire and release order. A reader that sees a new value of `sent` also sees the contents
 * of the buffer. When the writer sees a new value of `freed`, the reader no longer uses the buffer. */

void *shared_ring_room(const struct shared_ring *ring)
{
    uint64_t sent = atomic_load_explicit(&ring->header->sent, memory_order_relaxed);
    uint64_t freed = atomic_load_explicit(&ring->header->freed, memory_order_acquire);
    return sent - freed < ring->buffers ? buffer_of(ring, sent) : NULL;
}

void shared_ring_send(struct shared_ring *ring)
{
    atomic_fetch_add_explicit(&ring->header->sent, 1, memory_order_release);
}

void *shared_ring_message(const struct shared_ring *ring)
{
    uint64_t freed = atomic_load_explicit(&ring->header->freed, memory_order_relaxed);
    uint64_t sent = atomic_load_explicit(&ring->header->sent, memory_order_acquire);
    return freed < sent ? buffer_of(ring, freed) : NULL;
}

void shared_ring_free(struct shared_ring *ring)
{
    atomic_fetch_add_explicit(&ring->header->freed, 1, memory_order_release);
}
