/* Sums of arrays over the ranks of one machine in shared memory (machine/comm.h, comm_reduce()).
 *
 * The arrays are added up in blocks. Each rank is responsible for one part of a block. It copies its values
 * of the other parts into its slot of the shared memory. When all ranks have copied their values, each rank
 * adds up its part in rank order and stores the sums in the free part of its slot. Each rank then copies the
 * sums of every other part as soon as they are stored. If a block is small, each rank copies all its values
 * to its slot and adds up the whole block itself, which saves the second wait. Consecutive blocks alternate
 * between two slots per rank, so a rank can fill one slot while other ranks still read its previous slot. */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm_parts.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/shared_ring.h"

#define BLOCK_VALUES ((size_t)128 << 10) /* 512 KiB: few waits, and slots of a few ranks fit into caches */
#define SMALL_VALUES ((size_t)1 << 10)   /* up to this size, a rank adds up the whole block itself */
#define LINE_VALUES  16                  /* floats per cache line; parts begin at multiples of this number */
#define LINE_BYTES   64
#define SPINS        1000 /* polls of a waiting rank before it offers its core to other ranks */
#define GRACE_S      5    /* other ranks wait this much longer than the rank that reports a missing rank */

/* The progress of one rank, which the other ranks read. Only this rank writes it. */
struct rank_progress {
    _Alignas(2 * LINE_BYTES) _Atomic uint64_t filled; /* number of blocks of which it has filled a slot */
    _Atomic uint64_t summed;                          /* number of blocks in which it has added up its part */
    int failed[2]; /* whether its step failed, one entry per slot: for the current block and for the previous
                      block */
};

struct shared_sum {
    size_t count, block; /* number of values in an array, and in a block */
    uint64_t blocks;     /* number of blocks added up so far */
    struct shared_ring *memory;
    struct rank_progress *progress; /* one entry per rank */
    float *slots;                   /* two per rank */
};

/* ---- Opening ---- */

/* Opens the memory that rank 0 offers. */
static enum status attach(struct shared_sum *sum, size_t bytes)
{
    struct shared_ring_offer offer = {0};
    enum status status = STATUS_OK;
    if (comm_rank() == 0)
        status = shared_ring_create(bytes, 1, &sum->memory, &offer);
    TRY(comm_agree(status));
    TRY(comm_spread(&offer, sizeof offer));
    if (comm_rank() > 0)
        status = shared_ring_attach(&offer, bytes, 1, &sum->memory);
    status = comm_agree(status);
    if (sum->memory)
        shared_ring_attached(sum->memory);
    return status;
}

static enum status open_memory(struct shared_sum *sum)
{
    size_t ranks = (size_t)comm_size(), size,
           bytes = ranks * (sizeof *sum->progress + 2 * sum->block * sizeof(float));
    if (comm_local_size() != comm_size())
        return comm_agree(status_set(STATUS_UNAVAILABLE, "the ranks are on several machines"));
    if (!comm_shares_memory)
        return comm_agree(status_set(STATUS_UNAVAILABLE, "not wanted"));
    TRY(attach(sum, bytes));
    sum->progress = shared_ring_memory(sum->memory, &size); /* initially zero */
    sum->slots = (float *)(sum->progress + ranks);
    return STATUS_OK;
}

enum status shared_sum_open(size_t count, struct shared_sum **sum)
{
    static bool warned;
    *sum = calloc(1, sizeof **sum);
    TRY(comm_agree(ALLOCATED(*sum, "out of memory for sums")));
    size_t lines = count / LINE_VALUES + 1;
    (*sum)->count = count;
    (*sum)->block = lines * LINE_VALUES < BLOCK_VALUES ? lines * LINE_VALUES : BLOCK_VALUES;
    if (open_memory(*sum) == STATUS_OK)
        return STATUS_OK;
    shared_sum_close(*sum);
    *sum = NULL;
    if (comm_is_broken())
        return STATUS_FAILED;
    if (comm_shares_memory && !warned)
        status_warn("no shared memory for sums, so MPI exchanges the values: %s", status_text());
    warned = true;
    return STATUS_OK;
}

void shared_sum_close(struct shared_sum *sum)
{
    if (sum)
        shared_ring_close(sum->memory);
    free(sum);
}

/* ---- Waiting ---- */

static bool has_come(const struct shared_sum *sum, int rank, bool summed)
{
    const struct rank_progress *progress = &sum->progress[rank];
    return atomic_load_explicit(summed ? &progress->summed : &progress->filled, memory_order_acquire) >
           sum->blocks;
}

/* Waits for one rank. The lowest of the waiting ranks reports a missing rank; the others wait GRACE_S longer.
 */
static enum status wait_for_rank(const struct shared_sum *sum, int peer, bool summed)
{
    for (int i = 0; i < SPINS; i++) {
        if (has_come(sum, peer, summed))
            return STATUS_OK;
#if defined __x86_64__ || defined __i386__
        __builtin_ia32_pause();
#endif
    }
    const double begin_s = timer_now_s();
    double warn_s = WARN_S, never_s = HUGE_VAL;
    while (!has_come(sum, peer, summed)) {
        double waited_s = timer_now_s() - begin_s;
        bool first = true;
        for (int i = 0; waited_s >= POLL_S && i < comm_rank(); i++)
            first = first && !has_come(sum, i, summed);
        TRY(first ? comm_look_at(peer, waited_s, &warn_s) : comm_look_at(peer, waited_s - GRACE_S, &never_s));
        if (waited_s < POLL_S)
            (void)sched_yield();
        else
            usleep(BRIEF_NAP_US);
    }
    return STATUS_OK;
}

static enum status wait_for_ranks(const struct shared_sum *sum, bool summed)
{
    for (int i = 0; i < comm_size(); i++)
        TRY(wait_for_rank(sum, i, summed));
    return STATUS_OK;
}

/* ---- Adding up ---- */

/* A part of a block. */
struct part {
    size_t first, count;
};

static struct part part_of(size_t count, int rank)
{
    size_t lines = (count + LINE_VALUES - 1) / LINE_VALUES, ranks = (size_t)comm_size();
    size_t first = lines * (size_t)rank / ranks * LINE_VALUES,
           end = lines * ((size_t)rank + 1) / ranks * LINE_VALUES;
    first = first < count ? first : count;
    return (struct part){first, (end < count ? end : count) - first};
}

static float *slot_of(const struct shared_sum *sum, int rank)
{
    return sum->slots + (2 * (size_t)rank + sum->blocks % 2) * sum->block;
}

/* Adds up a part of all slots in rank order. `own` has the values of this rank, which it uses instead of its
 * slot. */
static void add_up(const struct shared_sum *sum, struct part part, const float *own, float *restrict sums)
{
    for (int i = 0; i < comm_size(); i++) {
        const float *restrict more = i == comm_rank() ? own : slot_of(sum, i) + part.first;
        if (i == 0)
            memcpy(sums, more, part.count * sizeof *sums);
        else
            for (size_t j = 0; j < part.count; j++)
                sums[j] += more[j];
    }
}

static enum status add_up_part(const struct shared_sum *sum, float *values, size_t count)
{
    struct part mine = part_of(count, comm_rank());
    float *sums = slot_of(sum, comm_rank()) + mine.first;
    add_up(sum, mine, values + mine.first, sums);
    atomic_store_explicit(&sum->progress[comm_rank()].summed, sum->blocks + 1, memory_order_release);
    memcpy(values + mine.first, sums, mine.count * sizeof *values);
    for (int i = 0; i < comm_size(); i++) {
        struct part other = part_of(count, i);
        if (i == comm_rank())
            continue;
        TRY(wait_for_rank(sum, i, true));
        memcpy(values + other.first, slot_of(sum, i) + other.first, other.count * sizeof *values);
    }
    return STATUS_OK;
}

static void fill(const struct shared_sum *sum, bool failed, const float *values, size_t count)
{
    struct rank_progress *progress = &sum->progress[comm_rank()];
    struct part mine = count > SMALL_VALUES ? part_of(count, comm_rank()) : (struct part){0, 0};
    float *slot = slot_of(sum, comm_rank());
    size_t end = mine.first + mine.count;
    memcpy(slot, values, mine.first * sizeof *slot);
    memcpy(slot + end, values + end, (count - end) * sizeof *slot);
    progress->failed[sum->blocks % 2] = failed;
    atomic_store_explicit(&progress->filled, sum->blocks + 1, memory_order_release);
}

enum status shared_sum_add(struct shared_sum *sum, enum status status, float *values)
{
    for (size_t first = 0; first < sum->count || first == 0; first += sum->block) {
        size_t left = sum->count - first, count = left < sum->block ? left : sum->block;
        bool failed = false;
        fill(sum, status != STATUS_OK, values + first, count);
        TRY(wait_for_ranks(sum, false));
        for (int i = 0; i < comm_size(); i++)
            failed = failed || sum->progress[i].failed[sum->blocks % 2];
        if (failed) {
            sum->blocks++;
            return comm_agree(status);
        }
        if (count > SMALL_VALUES)
            TRY(add_up_part(sum, values + first, count));
        else
            add_up(sum, (struct part){0, count}, slot_of(sum, comm_rank()), values + first);
        sum->blocks++;
    }
    return STATUS_OK;
}
