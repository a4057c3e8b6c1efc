/* Implements machine/comm.h with MPI. */
#include "machine/comm.h"

#include <dlfcn.h>
#include <limits.h>
#include <math.h>
#include <mpi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/parallel.h"
#include "core/text.h"
#include "core/timer.h"

/* In an exchange of data, a rank polls for this time before it sleeps, because the data usually arrive
 * sooner. It sleeps only briefly, because MPI may transfer data only while a rank polls. */
#define POLL_S       1e-3
#define BRIEF_NAP_US 50
#define WARN_S       30 /* time until the first warning about a missing rank; each warning doubles it */

/* The tags of messages. */
enum { NOTE_TAG = 1, CHANNEL_TAG, OFFER_TAG, ANSWER_TAG };

#define NAP_US_MAX 1000 /* the longest sleep of a waiting rank between two polls */
#define NOTE_S     1    /* after this time a waiting rank sends rank 0 a note that it is waiting */
#define GRACE_S    5    /* other ranks wait this much longer than the rank whose report has more detail */

bool comm_shares_memory = true;

static double timeout_s; /* 0: none */
static int rank, size = 1, local_rank, local_size = 1;
static bool joined, broken; /* broken: an MPI call failed or a wait timed out, so the ranks' collective calls
                               may no longer match */
static MPI_Comm machine = MPI_COMM_NULL;

/* `collective` is the number of the latest collective call. Ranks that wait long send this number to rank 0
 * in a note. On rank 0, noted[i] is the latest number from rank i. On other ranks `noted` is NULL. */
static uint64_t collective, *noted;

/* Converts an MPI error code to a status. Each rank prints its own failing call, because it may be unable to
 * send the error to other ranks. */
static enum status mpi_status(int error, const char *call)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    if (error == MPI_SUCCESS)
        return STATUS_OK;
    (void)MPI_Error_string(error, text, &length);
    broken = true;
    status_warn_own("%s: %s", call, text);
    return status_set(STATUS_FAILED, "%s: %s", call, text);
}
#define MPI_TRY(call) TRY(mpi_status((call), #call))

/* ---- Waiting ---- */

/* On rank 0: receives the notes of waiting ranks. */
static int take_notes(void)
{
    int error = MPI_SUCCESS, found = rank == 0 && noted;
    while (error == MPI_SUCCESS && found) {
        MPI_Status from;
        uint64_t number;
        error = MPI_Iprobe(MPI_ANY_SOURCE, NOTE_TAG, MPI_COMM_WORLD, &found, &from);
        if (error == MPI_SUCCESS && found)
            error = MPI_Recv(&number, 1, MPI_UINT64_T, from.MPI_SOURCE, NOTE_TAG, MPI_COMM_WORLD,
                             MPI_STATUS_IGNORE);
        if (error == MPI_SUCCESS && found)
            noted[from.MPI_SOURCE] = number;
    }
    return error;
}

/* Writes the ranks that have not sent a note for this collective call: "rank 3", "ranks 3, 5". Names
 * at most eight, and counts the others ("and 6 more"). */
static void name_missing(char *text, size_t bytes)
{
    int missing = 0, shown = 0;
    for (int i = 1; i < size; i++)
        missing += noted[i] != collective;
    snprintf(text, bytes, missing == 1 ? "rank" : "ranks");
    for (int i = 1; i < size && shown < 8; i++)
        if (noted[i] != collective)
            text_append(text, bytes, "%s %d", shown++ ? "," : "", i);
    if (missing > shown)
        text_append(text, bytes, " and %d more", missing - shown);
}

/* The state of waiting in one collective call. */
struct wait {
    double begin_s, warn_s; /* warn_s: seconds from begin_s to the next warning */
    bool noted;
};

/* Called repeatedly during a wait. After NOTE_S, each rank except rank 0 sends one note to rank 0. After
 * WARN_S, rank 0 warns about missing ranks. After the timeout, fails and marks the communication as broken.
 */
static enum status look_around(struct wait *wait)
{
    char names[128] = "rank 0";
    double waited_s = timer_now_s() - wait->begin_s;
    if (waited_s >= NOTE_S && rank > 0 && !wait->noted) {
        wait->noted = true;
        MPI_TRY(MPI_Send(&collective, 1, MPI_UINT64_T, 0, NOTE_TAG, MPI_COMM_WORLD));
    }
    bool over = timeout_s > 0 && waited_s >= timeout_s + (rank > 0 ? GRACE_S : 0);
    bool warns = rank == 0 && waited_s >= wait->warn_s;
    if (!over && !warns)
        return STATUS_OK;
    MPI_TRY(take_notes());
    if (rank == 0)
        name_missing(names, sizeof names);
    if (warns && !over) {
        status_warn("waiting for %s for %.0f s", names, waited_s);
        wait->warn_s *= 2;
    }
    if (!over)
        return STATUS_OK;
    broken = true;
    if (rank > 0)
        status_warn_own("gave up waiting for rank 0 after %.0f s", waited_s);
    return status_set(
        STATUS_FAILED,
        "gave up waiting for %s after %.0f s; find out what causes the delay, or wait longer with "
        "--rank-timeout",
        names, waited_s);
}

/* Waits for a collective call to complete: polls for `poll_s` seconds, then sleeps between polls, at most
 * `nap_us_max` microseconds at a time. */
static enum status wait_while(MPI_Request *request, double poll_s, useconds_t nap_us_max)
{
    struct wait wait = {.begin_s = timer_now_s(), .warn_s = WARN_S};
    useconds_t nap_us = 1;
    collective++;
    for (;;) {
        int done;
        MPI_TRY(MPI_Test(request, &done, MPI_STATUS_IGNORE));
        if (done)
            return STATUS_OK;
        TRY(look_around(&wait));
        if (timer_now_s() - wait.begin_s >= poll_s) {
            usleep(nap_us);
            nap_us = 2 * nap_us < nap_us_max ? 2 * nap_us : nap_us_max;
        }
    }
}

/* Waits for a collective call. If `asleep` is set, the wait sleeps from the beginning, which leaves the core
 * free for ranks that time their runs. Otherwise it never sleeps. */
static enum status wait_for(MPI_Request *request, bool asleep)
{
    return wait_while(request, asleep ? 0 : HUGE_VAL, NAP_US_MAX);
}

/* Waits for an exchange of data in a timed run: polls for POLL_S, then sleeps briefly between polls. */
static enum status wait_briefly(MPI_Request *request)
{
    return wait_while(request, POLL_S, BRIEF_NAP_US);
}

/* Called repeatedly while this rank waits for one other rank. Warns after *warn_s seconds, and doubles this
 * time. Fails after the timeout and marks the communication as broken. */
static enum status look_at(int peer, double waited_s, double *warn_s)
{
    if (timeout_s > 0 && waited_s >= timeout_s) {
        broken = true;
        status_warn_own("gave up waiting for rank %d after %.0f s", peer, waited_s);
        return status_set(STATUS_FAILED,
                          "gave up waiting for rank %d after %.0f s; find out what causes the delay, or wait "
                          "longer with --rank-timeout",
                          peer, waited_s);
    }
    if (waited_s >= *warn_s) {
        status_warn_own("waiting for rank %d for %.0f s", peer, waited_s);
        *warn_s *= 2;
    }
    return STATUS_OK;
}

/* ---- Joining ---- */

void comm_set_timeout(double seconds)
{
    timeout_s = seconds;
}

double comm_timeout(void)
{
    return timeout_s;
}

static enum status join(void)
{
    int thread_level;
    struct launcher_watch *watch = launcher_watch_begin(timeout_s);
    int error = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &thread_level);
    launcher_watch_end(watch);
    TRY(mpi_status(error, "MPI_Init_thread"));
    joined = true;
    if (thread_level < MPI_THREAD_FUNNELED)
        return status_set(STATUS_UNAVAILABLE, "this MPI does not support threads; use one that was built "
                                              "with MPI_THREAD_FUNNELED");
    MPI_TRY(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    MPI_TRY(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_TRY(MPI_Comm_size(MPI_COMM_WORLD, &size));
    MPI_TRY(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine));
    MPI_TRY(MPI_Comm_rank(machine, &local_rank));
    MPI_TRY(MPI_Comm_size(machine, &local_size));
    if (rank == 0 && !(noted = calloc((size_t)size, sizeof *noted)))
        return status_set(STATUS_EXHAUSTED, "out of memory for %d ranks", size);
    return STATUS_OK;
}

enum status comm_open(void)
{
    struct launcher launcher;
    if (!launcher_find(&launcher) || launcher.ranks == 1)
        return STATUS_OK;
    TRY(join());
    /* If this MPI does not support the launcher, each process is a separate run of one rank. */
    if (launcher.ranks > 1 && launcher.ranks != size)
        return status_set(
            STATUS_UNAVAILABLE,
            "started as one of %ld ranks (%s), but MPI knows of %d; start the program with this MPI's own "
            "mpirun, or with srun --mpi=pmix",
            launcher.ranks, launcher.variable, size);
    if (launcher.rank > 0 && size == 1)
        return status_set(STATUS_UNAVAILABLE,
                          "started as rank %ld of several (%s), but MPI knows of no other rank; start the "
                          "program with this MPI's own mpirun, or with srun --mpi=pmix",
                          launcher.rank, launcher.variable);
    status_joined(rank, size);
    return STATUS_OK;
}

void comm_close(void)
{
    if (!joined)
        return;
    if (broken)
        (void)MPI_Abort(MPI_COMM_WORLD, STATUS_FAILED);
    (void)take_notes();
    free(noted);
    noted = NULL;
    if (machine != MPI_COMM_NULL)
        (void)MPI_Comm_free(&machine);
    (void)MPI_Finalize();
    joined = false;
    rank = local_rank = 0;
    size = local_size = 1;
}

int comm_rank(void)
{
    return rank;
}

int comm_size(void)
{
    return size;
}

int comm_local_rank(void)
{
    return local_rank;
}

int comm_local_size(void)
{
    return local_size;
}

/* Sets `*same` to whether rank `peer` runs on this machine. */
static enum status on_same_machine(int peer, bool *same)
{
    MPI_Group all, local;
    int number;
    MPI_TRY(MPI_Comm_group(MPI_COMM_WORLD, &all));
    MPI_TRY(MPI_Comm_group(machine, &local));
    MPI_TRY(MPI_Group_translate_ranks(all, 1, &peer, local, &number));
    MPI_TRY(MPI_Group_free(&local));
    MPI_TRY(MPI_Group_free(&all));
    *same = number != MPI_UNDEFINED;
    return STATUS_OK;
}

/* ---- Agreeing ---- */

/* The severity of a status, and the lowest rank that has it; the layout of MPI_2INT. */
struct verdict {
    int severity, rank;
};

/* Broadcasts the status and message of the rank with the worst status. */
static enum status share_failure(enum status mine, const struct verdict *worst)
{
    struct failure failure = status_save(mine);
    int failed = status_severity(mine) == worst->severity;
    MPI_Request request;
    MPI_TRY(MPI_Iallreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &request));
    TRY(wait_for(&request, true));
    MPI_TRY(MPI_Ibcast(&failure, sizeof failure, MPI_BYTE, worst->rank, MPI_COMM_WORLD, &request));
    TRY(wait_for(&request, true));
    (void)status_restore(&failure);
    return failed == size ? failure.status : status_prefix(failure.status, "rank %d", worst->rank);
}

enum status comm_agree(enum status status)
{
    if (size == 1 || broken) /* broken: collective calls would not match; comm_close() aborts all ranks */
        return broken ? STATUS_FAILED : status;
    struct verdict mine = {status_severity(status), rank}, worst;
    MPI_Request request;
    MPI_TRY(MPI_Iallreduce(&mine, &worst, 1, MPI_2INT, MPI_MAXLOC, MPI_COMM_WORLD, &request));
    TRY(wait_for(&request, true));
    return worst.severity == 0 ? STATUS_OK : share_failure(status, &worst);
}

enum status comm_give_up(enum status status)
{
    if (size == 1 || broken)
        return status;
    broken = true;
    status_warn_own("%s", status_text());
    (void)MPI_Abort(MPI_COMM_WORLD, STATUS_FAILED); /* do not close first: closing may wait for other ranks */
    return status;
}

enum status comm_vote(enum status status, double *values, size_t count)
{
    if (size == 1 || broken)
        return broken ? STATUS_FAILED : status;
    MPI_Request request;
    double votes[COMM_VOTE_MAX + 1] = {status != STATUS_OK};
    memcpy(votes + 1, values, count * sizeof *values);
    MPI_TRY(
        MPI_Iallreduce(MPI_IN_PLACE, votes, 1 + (int)count, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD, &request));
    TRY(wait_for(&request, false));
    memcpy(values, votes + 1, count * sizeof *values);
    return votes[0] == 0 ? STATUS_OK : comm_agree(status);
}

/* ---- Data ---- */

/* Checks that ranks can still exchange a message of `count` elements. MPI counts in int, and after a failed
 * call the collective calls of the ranks no longer match. */
static enum status check_message(size_t count)
{
    if (broken)
        return STATUS_FAILED;
    if (count <= INT_MAX)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "an MPI message has at most %d elements, not %zu; use a smaller array, batch or model",
                      INT_MAX, count);
}

static enum status reduce(void *values, size_t count, MPI_Datatype type, MPI_Op operation)
{
    MPI_Request request;
    if (size == 1)
        return STATUS_OK;
    TRY(check_message(count));
    MPI_TRY(MPI_Iallreduce(MPI_IN_PLACE, values, (int)count, type, operation, MPI_COMM_WORLD, &request));
    return wait_for(&request, true);
}

enum status comm_sum(uint64_t *values, size_t count)
{
    return reduce(values, count, MPI_UINT64_T, MPI_SUM);
}

enum status comm_max(double *values, size_t count)
{
    return reduce(values, count, MPI_DOUBLE, MPI_MAX);
}

/* If this check were missing, ranks with different options could deadlock, and the program would combine
 * results from different data. */
enum status comm_check_same(uint64_t mine, const char *what, const char *remedy)
{
    uint64_t first = mine;
    TRY(comm_spread(&first, sizeof first));
    return comm_agree(mine == first
                          ? STATUS_OK
                          : status_set(STATUS_USAGE, "its %s differ from those of rank 0; %s", what, remedy));
}

enum status comm_spread(void *data, size_t bytes)
{
    MPI_Request request;
    if (size == 1)
        return STATUS_OK;
    TRY(check_message(bytes));
    MPI_TRY(MPI_Ibcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD, &request));
    return wait_for(&request, true);
}

enum status comm_gather(const void *mine, size_t bytes, void *all)
{
    MPI_Request request;
    if (size == 1) {
        memcpy(all, mine, bytes);
        return STATUS_OK;
    }
    TRY(check_message(bytes));
    MPI_TRY(MPI_Igather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD, &request));
    return wait_for(&request, true);
}

enum status comm_gather_local(const void *mine, size_t bytes, void *all)
{
    MPI_Request request;
    if (size == 1) {
        memcpy(all, mine, bytes);
        return STATUS_OK;
    }
    TRY(check_message(bytes));
    MPI_TRY(MPI_Iallgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, machine, &request));
    /* A rank that is alone on its machine also waits here: wait_for() increments `collective`, which must be
     * equal on all ranks. */
    return wait_for(&request, true);
}

/* ---- Sums of arrays in shared memory ---- */

/* comm_reduce() on one machine. The arrays are added up in blocks. Each rank is responsible for one part of a
 * block. It copies its values of the other parts into its slot of the shared memory. When all ranks have
 * copied their values, each rank adds up its part in rank order and stores the sums in the free part of its
 * slot. Each rank then copies the sums of every other part as soon as they are stored. If a block is small,
 * each rank copies all its values to its slot and adds up the whole block itself, which saves the second
 * wait. Consecutive blocks alternate between two slots per rank, so a rank can fill one slot while other
 * ranks still read its previous slot. */

#define BLOCK_VALUES ((size_t)128 << 10) /* 512 KiB: few waits, and slots of a few ranks fit into caches */
#define SMALL_VALUES ((size_t)1 << 10)   /* up to this size, a rank adds up the whole block itself */
#define LINE_VALUES  16                  /* floats per cache line; parts begin at multiples of this number */
#define LINE_BYTES   64
#define SPINS        1000 /* polls of a waiting rank before it offers its core to other ranks */

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

/* Opens the memory that rank 0 offers. */
static enum status attach_sum(struct shared_sum *sum, size_t bytes)
{
    struct shared_ring_offer offer = {0};
    enum status status = STATUS_OK;
    if (rank == 0)
        status = shared_ring_create(bytes, 1, &sum->memory, &offer);
    TRY(comm_agree(status));
    TRY(comm_spread(&offer, sizeof offer));
    if (rank > 0)
        status = shared_ring_attach(&offer, bytes, 1, &sum->memory);
    status = comm_agree(status);
    if (sum->memory)
        shared_ring_attached(sum->memory);
    return status;
}

static enum status open_sum_memory(struct shared_sum *sum)
{
    size_t ranks = (size_t)size, given_bytes,
           bytes = ranks * (sizeof *sum->progress + 2 * sum->block * sizeof(float));
    if (local_size != size)
        return comm_agree(status_set(STATUS_UNAVAILABLE, "the ranks are on several machines"));
    if (!comm_shares_memory)
        return comm_agree(status_set(STATUS_UNAVAILABLE, "not wanted"));
    TRY(attach_sum(sum, bytes));
    sum->progress = shared_ring_memory(sum->memory, &given_bytes); /* initially zero */
    sum->slots = (float *)(sum->progress + ranks);
    return STATUS_OK;
}

static void shared_sum_close(struct shared_sum *sum)
{
    if (sum)
        shared_ring_close(sum->memory);
    free(sum);
}

/* Collective. If the ranks cannot share memory, `*sum` becomes NULL, and the first such call prints a warning
 * with the reason, unless comm_shares_memory is false. */
static enum status shared_sum_open(size_t count, struct shared_sum **sum)
{
    static bool warned;
    *sum = calloc(1, sizeof **sum);
    TRY(comm_agree(ALLOCATED(*sum, "out of memory for sums")));
    size_t lines = count / LINE_VALUES + 1;
    (*sum)->count = count;
    (*sum)->block = lines * LINE_VALUES < BLOCK_VALUES ? lines * LINE_VALUES : BLOCK_VALUES;
    if (open_sum_memory(*sum) == STATUS_OK)
        return STATUS_OK;
    shared_sum_close(*sum);
    *sum = NULL;
    if (broken)
        return STATUS_FAILED;
    if (comm_shares_memory && !warned)
        status_warn("no shared memory for sums, so MPI exchanges the values: %s", status_text());
    warned = true;
    return STATUS_OK;
}

static bool has_come(const struct shared_sum *sum, int peer, bool summed)
{
    const struct rank_progress *progress = &sum->progress[peer];
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
        for (int i = 0; waited_s >= POLL_S && i < rank; i++)
            first = first && !has_come(sum, i, summed);
        TRY(first ? look_at(peer, waited_s, &warn_s) : look_at(peer, waited_s - GRACE_S, &never_s));
        if (waited_s < POLL_S)
            (void)sched_yield();
        else
            usleep(BRIEF_NAP_US);
    }
    return STATUS_OK;
}

static enum status wait_for_ranks(const struct shared_sum *sum, bool summed)
{
    for (int i = 0; i < size; i++)
        TRY(wait_for_rank(sum, i, summed));
    return STATUS_OK;
}

/* A part of a block. */
struct part {
    size_t first, count;
};

static struct part part_of(size_t count, int owner)
{
    size_t lines = (count + LINE_VALUES - 1) / LINE_VALUES, ranks = (size_t)size;
    size_t first = lines * (size_t)owner / ranks * LINE_VALUES,
           end = lines * ((size_t)owner + 1) / ranks * LINE_VALUES;
    first = first < count ? first : count;
    return (struct part){first, (end < count ? end : count) - first};
}

static float *slot_of(const struct shared_sum *sum, int owner)
{
    return sum->slots + (2 * (size_t)owner + sum->blocks % 2) * sum->block;
}

/* Adds up a part of all slots in rank order. `own` has the values of this rank, which it uses instead of its
 * slot. */
static void add_up_shared(const struct shared_sum *sum, struct part part, const float *own,
                          float *restrict sums)
{
    for (int i = 0; i < size; i++) {
        const float *restrict more = i == rank ? own : slot_of(sum, i) + part.first;
        if (i == 0)
            memcpy(sums, more, part.count * sizeof *sums);
        else
            for (size_t j = 0; j < part.count; j++)
                sums[j] += more[j];
    }
}

static enum status add_up_part(const struct shared_sum *sum, float *values, size_t count)
{
    struct part mine = part_of(count, rank);
    float *sums = slot_of(sum, rank) + mine.first;
    add_up_shared(sum, mine, values + mine.first, sums);
    atomic_store_explicit(&sum->progress[rank].summed, sum->blocks + 1, memory_order_release);
    memcpy(values + mine.first, sums, mine.count * sizeof *values);
    for (int i = 0; i < size; i++) {
        struct part other = part_of(count, i);
        if (i == rank)
            continue;
        TRY(wait_for_rank(sum, i, true));
        memcpy(values + other.first, slot_of(sum, i) + other.first, other.count * sizeof *values);
    }
    return STATUS_OK;
}

static void fill_slot(const struct shared_sum *sum, bool failed, const float *values, size_t count)
{
    struct rank_progress *progress = &sum->progress[rank];
    struct part mine = count > SMALL_VALUES ? part_of(count, rank) : (struct part){0, 0};
    float *slot = slot_of(sum, rank);
    size_t end = mine.first + mine.count;
    memcpy(slot, values, mine.first * sizeof *slot);
    memcpy(slot + end, values + end, (count - end) * sizeof *slot);
    progress->failed[sum->blocks % 2] = failed;
    atomic_store_explicit(&progress->filled, sum->blocks + 1, memory_order_release);
}

static enum status shared_sum_add(struct shared_sum *sum, enum status status, float *values)
{
    for (size_t first = 0; first < sum->count || first == 0; first += sum->block) {
        size_t left = sum->count - first, count = left < sum->block ? left : sum->block;
        bool failed = false;
        fill_slot(sum, status != STATUS_OK, values + first, count);
        TRY(wait_for_ranks(sum, false));
        for (int i = 0; i < size; i++)
            failed = failed || sum->progress[i].failed[sum->blocks % 2];
        if (failed) {
            sum->blocks++;
            return comm_agree(status);
        }
        if (count > SMALL_VALUES)
            TRY(add_up_part(sum, values + first, count));
        else
            add_up_shared(sum, (struct part){0, count}, slot_of(sum, rank), values + first);
        sum->blocks++;
    }
    return STATUS_OK;
}

/* ---- Groups of ranks ---- */

struct comm_group {
    MPI_Comm comm;
    int rank, size;
    int other; /* for messages: the lowest other rank of the group */
};

int comm_group_rank(const struct comm_group *group)
{
    return group ? group->rank : rank;
}

int comm_group_size(const struct comm_group *group)
{
    return group ? group->size : size;
}

static MPI_Comm comm_of(const struct comm_group *group)
{
    return group ? group->comm : MPI_COMM_WORLD;
}

static enum status join_group(uint32_t number, struct comm_group *group)
{
    MPI_Group all, own;
    int ranks[2] = {0, 1};
    MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, (int)number, rank, &group->comm));
    MPI_TRY(MPI_Comm_set_errhandler(group->comm, MPI_ERRORS_RETURN));
    MPI_TRY(MPI_Comm_rank(group->comm, &group->rank));
    MPI_TRY(MPI_Comm_size(group->comm, &group->size));
    MPI_TRY(MPI_Comm_group(MPI_COMM_WORLD, &all));
    MPI_TRY(MPI_Comm_group(group->comm, &own));
    if (group->size > 1)
        MPI_TRY(MPI_Group_translate_ranks(own, 1, &ranks[group->rank == 0], all, &group->other));
    MPI_TRY(MPI_Group_free(&own));
    return mpi_status(MPI_Group_free(&all), "MPI_Group_free");
}

enum status comm_group_open(uint32_t number, struct comm_group **group)
{
    *group = calloc(1, sizeof **group);
    TRY(comm_agree(ALLOCATED(*group, "out of memory for a group of ranks")));
    (*group)->comm = MPI_COMM_NULL;
    (*group)->rank = rank;
    (*group)->size = size;
    return size == 1 ? STATUS_OK : comm_agree(join_group(number, *group));
}

void comm_group_close(struct comm_group *group)
{
    if (!group || broken) /* broken: MPI may still use the communicator; comm_close() ends the process */
        return;
    if (group->comm != MPI_COMM_NULL)
        (void)MPI_Comm_free(&group->comm);
    free(group);
}

/* Waits for an exchange of data among the ranks of a group. */
static enum status wait_in(const struct comm_group *group, MPI_Request *request)
{
    const double begin_s = timer_now_s();
    double warn_s = WARN_S;
    if (!group)
        return wait_briefly(request);
    for (int done = 0;;) {
        MPI_TRY(MPI_Test(request, &done, MPI_STATUS_IGNORE));
        if (done)
            return STATUS_OK;
        const double waited_s = timer_now_s() - begin_s;
        TRY(look_at(group->other, waited_s, &warn_s));
        if (waited_s >= POLL_S)
            usleep(BRIEF_NAP_US);
    }
}

enum status comm_group_agree(const struct comm_group *group, enum status status)
{
    int failed = status != STATUS_OK;
    MPI_Request request;
    if (!group)
        return comm_agree(status);
    if (group->size == 1 || broken)
        return broken ? STATUS_FAILED : status;
    MPI_TRY(MPI_Iallreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, group->comm, &request));
    TRY(wait_in(group, &request));
    return status != STATUS_OK || !failed
               ? status
               : status_set(STATUS_FAILED, "another rank of the group of rank %d failed", group->other);
}

enum status comm_group_spread(const struct comm_group *group, void *data, size_t bytes)
{
    MPI_Request request;
    if (!group)
        return comm_spread(data, bytes);
    if (group->size == 1)
        return STATUS_OK;
    TRY(check_message(bytes));
    MPI_TRY(MPI_Ibcast(data, (int)bytes, MPI_BYTE, 0, group->comm, &request));
    return wait_in(group, &request);
}

/* ---- Sums of arrays ---- */

struct comm_reducer {
    struct shared_sum *shared;      /* NULL: MPI exchanges the values, with the members below */
    int *counts, *offsets;          /* count and offset of each rank's part of the array */
    int *mine, *mine_at;            /* per sending rank: size and offset in `received` of this rank's part */
    float *received;                /* this rank's part of each rank's array, in rank order */
    const struct comm_group *group; /* NULL: all ranks */
    int rank, size;                 /* of the group */
    int failed;                     /* whether the step of any rank failed */
};

/* Divides the array among the ranks. Returns false if memory runs out. */
static bool divide(struct comm_reducer *reducer, size_t count)
{
    size_t ranks = (size_t)reducer->size;
    int *lists = malloc(4 * ranks * sizeof *lists);
    if (!lists)
        return false;
    reducer->counts = lists;
    reducer->offsets = lists + ranks;
    reducer->mine = lists + 2 * ranks;
    reducer->mine_at = lists + 3 * ranks;
    for (int i = 0; i < reducer->size; i++) {
        const struct partition of_all = {(uint64_t)i, ranks, .strong = true};
        const struct share share = partition_share(&of_all, count);
        reducer->counts[i] = (int)share.count;
        reducer->offsets[i] = (int)share.first;
    }
    for (int i = 0; i < reducer->size; i++) {
        reducer->mine[i] = reducer->counts[reducer->rank];
        reducer->mine_at[i] = i * reducer->counts[reducer->rank];
    }
    reducer->received =
        malloc((ranks * (size_t)reducer->counts[reducer->rank] + 1) * sizeof *reducer->received);
    return reducer->received;
}

/* Collective in the group: checks that all ranks give the same count. */
static enum status check_count(const struct comm_group *group, size_t count)
{
    uint64_t first = count;
    if (!group)
        return comm_check_same(
            count, "numbers of gradients",
            "they are padded for the CPU's instruction set, so use machines with the same CPU");
    TRY(comm_group_spread(group, &first, sizeof first));
    return comm_group_agree(group, first == count
                                       ? STATUS_OK
                                       : status_set(STATUS_USAGE,
                                                    "the numbers of gradients differ from those of "
                                                    "rank %d; use machines with the same CPU",
                                                    group->other));
}

enum status comm_reducer_open_in(const struct comm_group *group, size_t count, struct comm_reducer **reducer)
{
    *reducer = NULL;
    TRY(check_count(group, count));
    *reducer = calloc(1, sizeof **reducer);
    TRY(comm_group_agree(group, ALLOCATED(*reducer, "out of memory for sums")));
    (*reducer)->group = group;
    (*reducer)->rank = comm_group_rank(group);
    (*reducer)->size = comm_group_size(group);
    if ((*reducer)->size == 1)
        return STATUS_OK;
    if (!group)
        TRY(shared_sum_open(count, &(*reducer)->shared));
    if ((*reducer)->shared)
        return STATUS_OK;
    /* A rank receives its part of the array from each rank. If the parts differ in size, it may receive up to
     * ranks - 1 values more than `count`. */
    TRY(comm_group_agree(group, check_message(count + (size_t)(*reducer)->size)));
    return comm_group_agree(
        group, ALLOCATED(divide(*reducer, count), "out of memory for the sums of %zu gradients", count));
}

enum status comm_reducer_open(size_t count, struct comm_reducer **reducer)
{
    return comm_reducer_open_in(NULL, count, reducer);
}

void comm_reducer_close(struct comm_reducer *reducer)
{
    if (!reducer || broken) /* broken: MPI may still write to the memory; comm_close() ends the process */
        return;
    shared_sum_close(reducer->shared);
    free(reducer->counts);
    free(reducer->received);
    free(reducer);
}

/* Adds up the received parts in rank order. */
static void add_up(const struct comm_reducer *reducer, float *restrict sums)
{
    size_t count = (size_t)reducer->counts[reducer->rank];
    memcpy(sums, reducer->received, count * sizeof *sums);
    for (int i = 1; i < reducer->size; i++) {
        const float *restrict more = reducer->received + (size_t)i * count;
        for (size_t j = 0; j < count; j++)
            sums[j] += more[j];
    }
}

enum status comm_reduce(struct comm_reducer *reducer, enum status status, float *values)
{
    if (size == 1 || broken || reducer->size == 1)
        return broken ? STATUS_FAILED : status;
    if (reducer->shared)
        return shared_sum_add(reducer->shared, status, values);
    const MPI_Comm comm = comm_of(reducer->group);
    MPI_Request statuses, request;
    reducer->failed = status != STATUS_OK;
    MPI_TRY(MPI_Iallreduce(MPI_IN_PLACE, &reducer->failed, 1, MPI_INT, MPI_MAX, comm, &statuses));
    MPI_TRY(MPI_Ialltoallv(values, reducer->counts, reducer->offsets, MPI_FLOAT, reducer->received,
                           reducer->mine, reducer->mine_at, MPI_FLOAT, comm, &request));
    TRY(wait_in(reducer->group, &statuses));
    TRY(wait_in(reducer->group, &request));
    if (reducer->failed)
        return comm_group_agree(reducer->group, status);
    add_up(reducer, values + reducer->offsets[reducer->rank]);
    MPI_TRY(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, values, reducer->counts, reducer->offsets, MPI_FLOAT,
                            comm, &request));
    return wait_in(reducer->group, &request);
}

/* Returns whether a variable of the environment is "1", which enables CUDA in some builds of MPI. */
static bool is_enabled(const char *variable)
{
    const char *value = getenv(variable);
    return value && strcmp(value, "1") == 0;
}

/* Open MPI, MPICH and MVAPICH 3 have one or both functions, depending on their version and build, so they are
 * looked up at run time. MVAPICH2 and Cray MPICH document the variables. */
enum status comm_cuda_probe(void)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length, supported = 0;
    int (*cuda)(void) = (int (*)(void))(uintptr_t)dlsym(RTLD_DEFAULT, "MPIX_Query_cuda_support");
    int (*gpu)(int, int *) = (int (*)(int, int *))(uintptr_t)dlsym(RTLD_DEFAULT, "MPIX_GPU_query_support");
    if (cuda)
        supported = cuda();
    if (joined && !supported && gpu && gpu(0 /* MPIX_GPU_SUPPORT_CUDA */, &supported) != MPI_SUCCESS)
        supported = 0;
    (void)MPI_Get_library_version(version, &length);
    if ((strstr(version, "MVAPICH2") && is_enabled("MV2_USE_CUDA")) ||
        (strstr(version, "CRAY MPICH") && is_enabled("MPICH_GPU_SUPPORT_ENABLED")))
        supported = 1;
    version[strcspn(version, ",\n")] = '\0';
    return supported
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "%s does not take pointers to GPU memory; use --sync mpi, or an MPI with CUDA "
                            "support that is enabled",
                            *version ? version : "this MPI");
}

/* The agreement on the status waits for all ranks, and notices one that does not answer. The sum is blocking,
 * because Open MPI does not add up device memory in MPI_Iallreduce(). */
enum status comm_cuda_sum(enum status status, float *values, size_t count)
{
    static int failed; /* MPI may still write to it after a failure */
    MPI_Request statuses;
    if (size == 1 || broken)
        return broken ? STATUS_FAILED : status;
    TRY(check_message(count));
    failed = status != STATUS_OK;
    MPI_TRY(MPI_Iallreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &statuses));
    TRY(wait_briefly(&statuses));
    if (failed)
        return comm_agree(status);
    return mpi_status(MPI_Allreduce(MPI_IN_PLACE, values, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
                      "MPI_Allreduce");
}

enum status comm_share_parts(float *values, const size_t *begins)
{
    MPI_Request request;
    if (size == 1)
        return STATUS_OK;
    TRY(check_message(begins[size]));
    int *counts = malloc(2 * (size_t)size * sizeof *counts), *offsets = counts + size;
    enum status status = comm_agree(ALLOCATED(counts, "out of memory for %d ranks", size));
    for (int i = 0; status == STATUS_OK && i < size; i++) {
        counts[i] = (int)(begins[i + 1] - begins[i]);
        offsets[i] = (int)begins[i];
    }
    if (status == STATUS_OK)
        status = mpi_status(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, values, counts, offsets, MPI_FLOAT,
                                            MPI_COMM_WORLD, &request),
                            "MPI_Iallgatherv");
    if (status == STATUS_OK)
        status = wait_for(&request, true);
    if (!broken) /* otherwise MPI may still read the lists; comm_close() ends the process */
        free(counts);
    return status;
}

/* ---- Channels ---- */

/* Messages from one rank to another. Two ranks of one machine share the buffers if
 * they can share memory; messages are then not copied. Otherwise, MPI copies the messages. */

struct comm_channel {
    struct comm_channel_spec spec;
    bool holds; /* the caller uses the message of the latest receive() */

    struct shared_ring *ring; /* NULL: MPI transfers the messages, with the members below */
    uint64_t next;            /* number of the next message; message n is in buffer n % buffers */
    MPI_Request *requests;    /* one per buffer */
    char *memory;
};

/* Sets `*ready` to true if `request` is complete. If `request` is NULL, checks the ring instead: the sender
 * is ready if the ring has room for a message, the receiver if the ring contains a message. */
static enum status is_ready(const struct comm_channel *channel, MPI_Request *request, bool *ready)
{
    int done;
    if (request)
        MPI_TRY(MPI_Test(request, &done, MPI_STATUS_IGNORE));
    else
        done = (channel->spec.sends ? shared_ring_room(channel->ring) : shared_ring_message(channel->ring)) !=
               NULL;
    *ready = done;
    return STATUS_OK;
}

static enum status wait_for_channel(const struct comm_channel *channel, MPI_Request *request)
{
    const double begin_s = timer_now_s();
    double warn_s = WARN_S;
    useconds_t nap_us = 1;
    if (broken)
        return STATUS_FAILED;
    for (;;) {
        bool ready;
        TRY(is_ready(channel, request, &ready));
        if (ready)
            return STATUS_OK;
        double waited_s = timer_now_s() - begin_s;
        TRY(look_at(channel->spec.peer, waited_s, &warn_s));
        if (waited_s >= POLL_S) {
            usleep(nap_us);
            nap_us = 2 * nap_us < BRIEF_NAP_US ? 2 * nap_us : BRIEF_NAP_US;
        }
    }
}

/* The data that the two ends of a channel exchange before the first message. */
struct handshake {
    struct shared_ring_offer offer; /* if `process` is 0, there is no shared memory */
    int attached;
    MPI_Request offered, answered;
};

/* Offers shared memory to the receiver, or none if the receiver runs on another machine or comm_shares_memory
 * is false. If shared memory cannot be created, warns and offers none; MPI then transfers the messages. */
static enum status make_offer(struct comm_channel *channel, struct handshake *handshake)
{
    const struct comm_channel_spec *spec = &channel->spec;
    bool near;
    TRY(on_same_machine(spec->peer, &near));
    if (near && comm_shares_memory &&
        shared_ring_create(spec->bytes, spec->buffers + 1, &channel->ring, &handshake->offer) != STATUS_OK)
        status_warn_own("no shared memory for messages to rank %d, so MPI copies them: %s", spec->peer,
                        status_text());
    MPI_TRY(MPI_Isend(&handshake->offer, (int)sizeof handshake->offer, MPI_BYTE, spec->peer, OFFER_TAG,
                      MPI_COMM_WORLD, &handshake->offered));
    return STATUS_OK;
}

static enum status answer_offer(struct comm_channel *channel, struct handshake *handshake)
{
    const struct comm_channel_spec *spec = &channel->spec;
    MPI_TRY(MPI_Irecv(&handshake->offer, (int)sizeof handshake->offer, MPI_BYTE, spec->peer, OFFER_TAG,
                      MPI_COMM_WORLD, &handshake->offered));
    TRY(wait_for_channel(channel, &handshake->offered));
    if (handshake->offer.process != 0 &&
        shared_ring_attach(&handshake->offer, spec->bytes, spec->buffers + 1, &channel->ring) != STATUS_OK)
        status_warn_own("cannot share memory with rank %d, so MPI copies its messages: %s", spec->peer,
                        status_text());
    handshake->attached = channel->ring != NULL;
    MPI_TRY(MPI_Isend(&handshake->attached, 1, MPI_INT, spec->peer, ANSWER_TAG, MPI_COMM_WORLD,
                      &handshake->answered));
    return STATUS_OK;
}

static enum status take_answer(struct comm_channel *channel, struct handshake *handshake)
{
    MPI_TRY(MPI_Irecv(&handshake->attached, 1, MPI_INT, channel->spec.peer, ANSWER_TAG, MPI_COMM_WORLD,
                      &handshake->answered));
    TRY(wait_for_channel(channel, &handshake->answered));
    if (handshake->attached)
        shared_ring_attached(channel->ring);
    else {
        shared_ring_close(channel->ring);
        channel->ring = NULL;
    }
    return STATUS_OK;
}

/* Each rank sends all its offers before it waits for a message, so the ranks cannot deadlock. */
static enum status shake_hands(struct comm_channel **channels, size_t count)
{
    struct handshake handshakes[COMM_CHANNELS_MAX] = {{.attached = 0}};
    for (size_t i = 0; i < count; i++)
        if (channels[i] && channels[i]->spec.sends)
            TRY(make_offer(channels[i], &handshakes[i]));
    for (size_t i = 0; i < count; i++)
        if (channels[i] && !channels[i]->spec.sends)
            TRY(answer_offer(channels[i], &handshakes[i]));
    for (size_t i = 0; i < count; i++)
        if (channels[i] && channels[i]->spec.sends)
            TRY(take_answer(channels[i], &handshakes[i]));
    for (size_t i = 0; i < count; i++)
        if (channels[i])
            TRY(wait_for_channel(channels[i],
                                 channels[i]->spec.sends ? &handshakes[i].offered : &handshakes[i].answered));
    return STATUS_OK;
}

static char *buffer_of(const struct comm_channel *channel, uint64_t message)
{
    return channel->memory + message % channel->spec.buffers * channel->spec.bytes;
}

static enum status expect_message(struct comm_channel *channel, uint64_t message)
{
    MPI_TRY(MPI_Irecv(buffer_of(channel, message), (int)channel->spec.bytes, MPI_BYTE, channel->spec.peer,
                      CHANNEL_TAG, MPI_COMM_WORLD, &channel->requests[message % channel->spec.buffers]));
    return STATUS_OK;
}

static enum status prepare_mpi(struct comm_channel *channel)
{
    struct comm_channel_spec *spec = &channel->spec;
    if (!spec->sends)
        spec->buffers = 2; /* a message can arrive in one buffer while the caller reads the other */
    TRY(check_message(spec->bytes));
    channel->requests = malloc(spec->buffers * sizeof *channel->requests);
    channel->memory = calloc(spec->buffers, spec->bytes);
    TRY(ALLOCATED(channel->requests && channel->memory,
                  "out of memory for %u messages of %zu bytes to or from rank %d", spec->buffers, spec->bytes,
                  spec->peer));
    for (uint32_t i = 0; i < spec->buffers; i++)
        channel->requests[i] = MPI_REQUEST_NULL;
    for (uint32_t i = 0; !spec->sends && i < spec->buffers; i++)
        TRY(expect_message(channel, i));
    return STATUS_OK;
}

static enum status allocate_channels(const struct comm_channel_spec *specs, size_t count,
                                     struct comm_channel **channels)
{
    for (size_t i = 0; i < count; i++)
        channels[i] = NULL;
    for (size_t i = 0; i < count; i++) {
        if (specs[i].bytes == 0)
            continue;
        channels[i] = calloc(1, sizeof *channels[i]);
        TRY(ALLOCATED(channels[i], "out of memory for a channel to rank %d", specs[i].peer));
        channels[i]->spec = specs[i];
    }
    return STATUS_OK;
}

enum status comm_channels_open(const struct comm_channel_spec *specs, size_t count,
                               struct comm_channel **channels)
{
    TRY(comm_agree(allocate_channels(specs, count, channels)));
    enum status status = shake_hands(channels, count);
    for (size_t i = 0; status == STATUS_OK && i < count; i++)
        if (channels[i] && !channels[i]->ring)
            status = prepare_mpi(channels[i]);
    return comm_agree(status);
}

void comm_channel_close(struct comm_channel *channel)
{
    if (!channel || broken) /* MPI may still use the memory; comm_close() ends the process */
        return;
    for (uint32_t i = 0; channel->requests && channel->memory && i < channel->spec.buffers; i++) {
        if (channel->requests[i] == MPI_REQUEST_NULL)
            continue;
        if (!channel->spec.sends)
            (void)MPI_Cancel(&channel->requests[i]);
        (void)MPI_Wait(&channel->requests[i], MPI_STATUS_IGNORE);
    }
    shared_ring_close(channel->ring);
    free(channel->requests);
    free(channel->memory);
    free(channel);
}

void *comm_channel_memory(const struct comm_channel *channel, size_t *bytes, size_t *own_bytes)
{
    *bytes = channel->spec.buffers * channel->spec.bytes;
    void *memory = channel->ring ? shared_ring_memory(channel->ring, bytes) : channel->memory;
    *own_bytes = channel->ring && !channel->spec.sends ? 0 : *bytes;
    return memory;
}

bool comm_channel_shares(const struct comm_channel *channel)
{
    return channel->ring != NULL;
}

static MPI_Request *request_of(const struct comm_channel *channel)
{
    return channel->ring ? NULL : &channel->requests[channel->next % channel->spec.buffers];
}

enum status comm_channel_room(struct comm_channel *channel, void **buffer)
{
    TRY(wait_for_channel(channel, request_of(channel)));
    *buffer = channel->ring ? shared_ring_room(channel->ring) : buffer_of(channel, channel->next);
    return STATUS_OK;
}

enum status comm_channel_send(struct comm_channel *channel, size_t bytes)
{
    if (channel->ring)
        shared_ring_send(channel->ring);
    else
        MPI_TRY(MPI_Isend(buffer_of(channel, channel->next), (int)bytes, MPI_BYTE, channel->spec.peer,
                          CHANNEL_TAG, MPI_COMM_WORLD, request_of(channel)));
    channel->next++;
    return STATUS_OK;
}

static enum status free_message(struct comm_channel *channel)
{
    channel->holds = false;
    if (!channel->ring)
        return expect_message(channel, channel->next - 1 + channel->spec.buffers);
    shared_ring_free(channel->ring);
    return STATUS_OK;
}

enum status comm_channel_receive(struct comm_channel *channel, void **buffer)
{
    if (channel->holds)
        TRY(free_message(channel));
    TRY(wait_for_channel(channel, request_of(channel)));
    *buffer = channel->ring ? shared_ring_message(channel->ring) : buffer_of(channel, channel->next);
    channel->next++;
    channel->holds = true;
    return STATUS_OK;
}
