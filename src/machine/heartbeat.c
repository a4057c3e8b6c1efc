#include "machine/heartbeat.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/parallel.h"
#include "machine/comm.h"
#include "machine/shared_ring.h"

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
