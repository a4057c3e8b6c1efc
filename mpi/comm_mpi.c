/* Implements machine/comm.h with MPI. */
#include "machine/comm.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/partition.h"
#include "core/text.h"
#include "core/timer.h"
#include "comm_parts.h"
#include "launcher.h"

#define NAP_US_MAX 1000 /* the longest sleep of a waiting rank between two polls */
#define NOTE_S     1    /* after this time a waiting rank sends rank 0 a note that it is waiting */
#define GRACE_S    5    /* other ranks wait this much longer than rank 0, whose report has more detail */

static double timeout_s; /* 0: none */
static int rank, size = 1, local_rank, local_size = 1;
static bool joined, broken; /* broken: an MPI call failed or a wait timed out, so the ranks' collective calls
                               may no longer match */
static MPI_Comm machine = MPI_COMM_NULL;

/* `collective` is the number of the latest collective call. Ranks that wait long send this number to rank 0
 * in a note. On rank 0, noted[i] is the latest number from rank i. On other ranks `noted` is NULL. */
static uint64_t collective, *noted;

enum status comm_mpi_status(int error, const char *call)
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

enum status comm_look_at(int peer, double waited_s, double *warn_s)
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
    TRY(comm_mpi_status(error, "MPI_Init_thread"));
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

bool comm_is_broken(void)
{
    return broken;
}

enum status comm_on_same_machine(int peer, bool *same)
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

enum status comm_check_message(size_t count)
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
    TRY(comm_check_message(count));
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

enum status comm_spread(void *data, size_t bytes)
{
    MPI_Request request;
    if (size == 1)
        return STATUS_OK;
    TRY(comm_check_message(bytes));
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
    TRY(comm_check_message(bytes));
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
    TRY(comm_check_message(bytes));
    MPI_TRY(MPI_Iallgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, machine, &request));
    /* A rank that is alone on its machine also waits here: wait_for() increments `collective`, which must be
     * equal on all ranks. */
    return wait_for(&request, true);
}

/* ---- Sums of arrays ---- */

struct comm_reducer {
    struct shared_sum *shared; /* NULL: MPI exchanges the values, with the members below */
    int *counts, *offsets;     /* count and offset of each rank's part of the array */
    int *mine, *mine_at;       /* per sending rank: size and offset in `received` of this rank's part */
    float *received;           /* this rank's part of each rank's array, in rank order */
    int failed;                /* whether the step of any rank failed */
};

/* Divides the array among the ranks. Returns false if memory runs out. */
static bool divide(struct comm_reducer *reducer, size_t count)
{
    size_t ranks = (size_t)size;
    int *lists = malloc(4 * ranks * sizeof *lists);
    if (!lists)
        return false;
    reducer->counts = lists;
    reducer->offsets = lists + ranks;
    reducer->mine = lists + 2 * ranks;
    reducer->mine_at = lists + 3 * ranks;
    for (int i = 0; i < size; i++) {
        const struct partition of_all = {(uint64_t)i, ranks, .strong = true};
        const struct share share = partition_share(&of_all, count);
        reducer->counts[i] = (int)share.count;
        reducer->offsets[i] = (int)share.first;
    }
    for (int i = 0; i < size; i++) {
        reducer->mine[i] = reducer->counts[rank];
        reducer->mine_at[i] = i * reducer->counts[rank];
    }
    reducer->received = malloc((ranks * (size_t)reducer->counts[rank] + 1) * sizeof *reducer->received);
    return reducer->received;
}

enum status comm_reducer_open(size_t count, struct comm_reducer **reducer)
{
    *reducer = NULL;
    TRY(comm_check_same(count, "numbers of gradients",
                        "they are padded for the CPU's instruction set, so use machines with the same CPU"));
    *reducer = calloc(1, sizeof **reducer);
    TRY(comm_agree(ALLOCATED(*reducer, "out of memory for sums")));
    if (size == 1)
        return STATUS_OK;
    TRY(shared_sum_open(count, &(*reducer)->shared));
    if ((*reducer)->shared)
        return STATUS_OK;
    /* A rank receives its part of the array from each rank. If the parts differ in size, it may receive up to
     * ranks - 1 values more than `count`. */
    TRY(comm_agree(comm_check_message(count + (size_t)size)));
    return comm_agree(
        ALLOCATED(divide(*reducer, count), "out of memory for the sums of %zu gradients", count));
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
    size_t count = (size_t)reducer->counts[rank];
    memcpy(sums, reducer->received, count * sizeof *sums);
    for (int i = 1; i < size; i++) {
        const float *restrict more = reducer->received + (size_t)i * count;
        for (size_t j = 0; j < count; j++)
            sums[j] += more[j];
    }
}

enum status comm_reduce(struct comm_reducer *reducer, enum status status, float *values)
{
    if (size == 1 || broken)
        return broken ? STATUS_FAILED : status;
    if (reducer->shared)
        return shared_sum_add(reducer->shared, status, values);
    MPI_Request statuses, request;
    reducer->failed = status != STATUS_OK;
    MPI_TRY(MPI_Iallreduce(MPI_IN_PLACE, &reducer->failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &statuses));
    MPI_TRY(MPI_Ialltoallv(values, reducer->counts, reducer->offsets, MPI_FLOAT, reducer->received,
                           reducer->mine, reducer->mine_at, MPI_FLOAT, MPI_COMM_WORLD, &request));
    TRY(wait_briefly(&statuses));
    TRY(wait_briefly(&request));
    if (reducer->failed)
        return comm_agree(status);
    add_up(reducer, values + reducer->offsets[rank]);
    MPI_TRY(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, values, reducer->counts, reducer->offsets, MPI_FLOAT,
                            MPI_COMM_WORLD, &request));
    return wait_briefly(&request);
}

enum status comm_share_parts(float *values, const size_t *begins)
{
    MPI_Request request;
    if (size == 1)
        return STATUS_OK;
    TRY(comm_check_message(begins[size]));
    int *counts = malloc(2 * (size_t)size * sizeof *counts), *offsets = counts + size;
    enum status status = comm_agree(ALLOCATED(counts, "out of memory for %d ranks", size));
    for (int i = 0; status == STATUS_OK && i < size; i++) {
        counts[i] = (int)(begins[i + 1] - begins[i]);
        offsets[i] = (int)begins[i];
    }
    if (status == STATUS_OK)
        status = comm_mpi_status(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, values, counts, offsets,
                                                 MPI_FLOAT, MPI_COMM_WORLD, &request),
                                 "MPI_Iallgatherv");
    if (status == STATUS_OK)
        status = wait_for(&request, true);
    if (!broken) /* otherwise MPI may still read the lists; comm_close() ends the process */
        free(counts);
    return status;
}
