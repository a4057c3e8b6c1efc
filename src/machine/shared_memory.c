/* Memory that processes of one machine share: a ring of messages (comm.h), and the heartbeat of ranks
 * (heartbeat.h). */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/parallel.h"
#include "machine/comm.h"
#include "machine/heartbeat.h"

/* ---- The ring ---- */

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

/* ---- The heartbeat ---- */

#define BEATS_PER_S 10
#define LEFT        UINT64_MAX /* the count of a rank that has closed its heartbeat */

/* The data that each rank sends to the other ranks of its machine. */
struct card {
    struct shared_ring_offer offer; /* only of local rank 0 */
    int rank;
};

struct heartbeat {
    struct shared_ring *memory;
    _Atomic uint64_t *counts; /* shared, one per rank of this machine */
    struct card *cards;
    uint64_t *seen;   /* the counts at the last check */
    uint32_t *silent; /* number of checks since each count changed */
    uint32_t limit;   /* checks, not seconds, so that time in which this process is stopped does not count */
    struct ticker *ticker; /* NULL: not started */
};

/* ---- Watching ---- */

static void look_at(struct heartbeat *self, int i)
{
    const uint64_t count = atomic_load(&self->counts[i]);
    self->silent[i] = count == self->seen[i] && count != LEFT ? self->silent[i] + 1 : 0;
    self->seen[i] = count;
    if (self->silent[i] < self->limit)
        return;
    status_warn_own("rank %d did not answer for %u s; its process is stopped or gets no time on a core. "
                    "Find out why, or wait longer with --rank-timeout",
                    self->cards[i].rank, self->limit / BEATS_PER_S);
    _exit(STATUS_FAILED); /* the other threads may be blocked; the launcher ends the other ranks */
}

static void beat(void *context, uint64_t missed)
{
    struct heartbeat *self = context;
    const int own = comm_local_rank();
    (void)missed;
    atomic_fetch_add(&self->counts[own], 1);
    for (int i = 0; i < comm_local_size(); i++)
        if (i != own)
            look_at(self, i);
}

/* ---- Opening ---- */

static enum status allocate(struct heartbeat *self)
{
    const size_t ranks = (size_t)comm_local_size();
    self->cards = calloc(ranks, sizeof *self->cards);
    self->seen = calloc(ranks, sizeof *self->seen);
    self->silent = calloc(ranks, sizeof *self->silent);
    return ALLOCATED(self->cards && self->seen && self->silent, "out of memory to watch the ranks");
}

/* Opens the memory that local rank 0 offers. */
static enum status share_memory(struct heartbeat *self)
{
    const size_t bytes = (size_t)comm_local_size() * sizeof *self->counts;
    struct card own = {.rank = comm_rank()};
    enum status status = STATUS_OK;
    size_t size;
    if (comm_local_rank() == 0)
        status = shared_ring_create(bytes, 1, &self->memory, &own.offer);
    TRY(comm_agree(status));
    TRY(comm_gather_local(&own, sizeof own, self->cards));
    if (comm_local_rank() > 0)
        status = shared_ring_attach(&self->cards[0].offer, bytes, 1, &self->memory);
    status = comm_agree(status);
    if (!self->memory)
        return status;
    shared_ring_attached(self->memory);
    self->counts = shared_ring_memory(self->memory, &size);
    return status;
}

static enum status start(struct heartbeat *self, double limit_s)
{
    self->limit = (uint32_t)(limit_s * BEATS_PER_S) + 1;
    return ticker_open(1.0 / BEATS_PER_S, beat, self, &self->ticker) == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "cannot start a thread");
}

enum status heartbeat_open(double limit_s, struct heartbeat **heartbeat)
{
    if (comm_size() == 1)
        return STATUS_OK;
    struct heartbeat *self = *heartbeat = calloc(1, sizeof *self);
    TRY(comm_agree(self ? allocate(self) : status_set(STATUS_EXHAUSTED, "out of memory")));
    if (share_memory(self) == STATUS_OK)
        return comm_agree(start(self, limit_s));
    status_warn("stopped ranks cannot be detected, because the ranks cannot share memory: %s", status_text());
    heartbeat_close(self);
    *heartbeat = NULL;
    return STATUS_OK;
}

void heartbeat_close(struct heartbeat *heartbeat)
{
    if (!heartbeat)
        return;
    if (heartbeat->ticker) {
        ticker_close(heartbeat->ticker);
        atomic_store(&heartbeat->counts[comm_local_rank()], LEFT);
    }
    shared_ring_close(heartbeat->memory);
    free(heartbeat->cards);
    free(heartbeat->seen);
    free(heartbeat->silent);
    free(heartbeat);
}
