#include "machine/ticker.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "core/parallel.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/shared_ring.h"

/* ---- A thread that calls a function at fixed intervals ---- */

struct ticker {
    double begin_s, period_s;
    ticker_tick *tick;
    void *context;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* signalled to stop the thread */
    bool stopping;
};

/* Sleeps until the next multiple of the period. Returns false if the thread must stop. */
static bool wait_for_next(struct ticker *ticker, double *number, uint64_t *missed)
{
    double next = fmax(*number + 1, floor((timer_now_s() - ticker->begin_s) / ticker->period_s) + 1);
    double whole_s, part_s = modf(ticker->begin_s + next * ticker->period_s, &whole_s);
    struct timespec at = {(time_t)whole_s, (long)(1e9 * part_s)};
    int waited = 0;
    *missed = (uint64_t)(next - *number - 1);
    *number = next;
    pthread_mutex_lock(&ticker->lock);
    while (!ticker->stopping && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&ticker->wake, &ticker->lock, &at);
    bool stopping = ticker->stopping;
    pthread_mutex_unlock(&ticker->lock);
    return !stopping;
}

static void *run(void *argument)
{
    struct ticker *ticker = argument;
    double number = 0;
    uint64_t missed = 0;
    do
        ticker->tick(ticker->context, missed);
    while (wait_for_next(ticker, &number, &missed));
    return NULL;
}

int ticker_open(double period_s, ticker_tick *tick, void *context, struct ticker **ticker)
{
    pthread_condattr_t clock;
    struct ticker *self = *ticker = calloc(1, sizeof *self);
    if (!self)
        return ENOMEM;
    *self = (struct ticker){.begin_s = timer_now_s(), .period_s = period_s, .tick = tick, .context = context};
    pthread_mutex_init(&self->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* the clock of timer_now_s() */
    pthread_cond_init(&self->wake, &clock);
    pthread_condattr_destroy(&clock);
    int error = parallel_start(&self->thread, run, self);
    if (!error)
        return 0;
    pthread_cond_destroy(&self->wake);
    pthread_mutex_destroy(&self->lock);
    free(self);
    *ticker = NULL;
    return error;
}

void ticker_close(struct ticker *ticker)
{
    if (!ticker)
        return;
    pthread_mutex_lock(&ticker->lock);
    ticker->stopping = true;
    pthread_cond_signal(&ticker->wake);
    pthread_mutex_unlock(&ticker->lock);
    pthread_join(ticker->thread, NULL);
    pthread_cond_destroy(&ticker->wake);
    pthread_mutex_destroy(&ticker->lock);
    free(ticker);
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
