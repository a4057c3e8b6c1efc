/* The ranks, joined by MPI. */
#include "comm.h"

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launcher.h"

#define NAP_US_MAX 1000 /* the longest that a waiting rank sleeps at a time */

static int rank, size = 1, local_rank, local_size = 1;
static bool joined, broken; /* broken: an MPI call failed, and who knows what the others wait for */
static MPI_Comm machine = MPI_COMM_NULL;

/* Every rank tells of its own failing call: the others may never hear of it. */
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

/* ---- Joining ---- */

static enum status join(void)
{
    int thread_level;
    MPI_TRY(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &thread_level));
    joined = true;
    if (thread_level < MPI_THREAD_FUNNELED)
        return status_set(STATUS_UNAVAILABLE, "this MPI cannot live with threads; use one that was built for "
                                              "MPI_THREAD_FUNNELED");
    MPI_TRY(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    MPI_TRY(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_TRY(MPI_Comm_size(MPI_COMM_WORLD, &size));
    MPI_TRY(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine));
    MPI_TRY(MPI_Comm_rank(machine, &local_rank));
    MPI_TRY(MPI_Comm_size(machine, &local_size));
    return STATUS_OK;
}

enum status comm_open(void)
{
    struct launcher launcher;
    if (!launcher_find(&launcher) || launcher.ranks == 1)
        return STATUS_OK;
    TRY(join());
    /* A launcher that this MPI cannot talk to starts as many runs of one rank. */
    if (launcher.ranks > 1 && launcher.ranks != size)
        return status_set(
            STATUS_UNAVAILABLE,
            "started as one of %ld ranks (%s), but MPI knows of %d; start it with this MPI's own "
            "mpirun, or with srun --mpi=pmix",
            launcher.ranks, launcher.variable, size);
    if (launcher.rank > 0 && size == 1)
        return status_set(
            STATUS_UNAVAILABLE,
            "started as rank %ld of several (%s), but MPI knows of no other; start it with this "
            "MPI's own mpirun, or with srun --mpi=pmix",
            launcher.rank, launcher.variable);
    status_launched(rank, size); /* a launcher may have told less */
    return STATUS_OK;
}

void comm_close(void)
{
    if (!joined)
        return;
    if (broken)
        (void)MPI_Abort(MPI_COMM_WORLD, STATUS_FAILED);
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

/* ---- Agreeing ---- */

/* Waits without keeping the core busy: other ranks may be timing their runs. */
static int wait_asleep(MPI_Request *request)
{
    useconds_t nap_us = 1;
    for (;;) {
        int done, error = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS || done)
            return error;
        usleep(nap_us);
        nap_us = 2 * nap_us < NAP_US_MAX ? 2 * nap_us : NAP_US_MAX;
    }
}

/* A status and the lowest rank that has it, as MPI_2INT. */
struct verdict {
    int status, rank;
};

/* Makes the message of one rank that of all. */
static enum status share_message(enum status mine, const struct verdict *worst)
{
    char text[1024];
    int failed = (int)mine == worst->status;
    snprintf(text, sizeof text, "%s", status_text());
    MPI_TRY(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
    MPI_TRY(MPI_Bcast(text, sizeof text, MPI_CHAR, worst->rank, MPI_COMM_WORLD));
    status_set(STATUS_FAILED, "%s", text);
    if (failed == size)
        return (enum status)worst->status;
    return status_prefix((enum status)worst->status, "rank %d", worst->rank);
}

enum status comm_agree(enum status status)
{
    if (size == 1 || broken) /* no call would meet its like on the other ranks: comm_close() ends them */
        return broken ? STATUS_FAILED : status;
    struct verdict mine = {(int)status, rank}, worst;
    MPI_Request request;
    MPI_TRY(MPI_Iallreduce(&mine, &worst, 1, MPI_2INT, MPI_MAXLOC, MPI_COMM_WORLD, &request));
    MPI_TRY(wait_asleep(&request));
    return worst.status == STATUS_OK ? STATUS_OK : share_message(status, &worst);
}

enum status comm_vote(enum status status, bool *stop)
{
    if (size == 1)
        return status;
    int votes[2] = {(int)status, !*stop};
    MPI_TRY(MPI_Allreduce(MPI_IN_PLACE, votes, 2, MPI_INT, MPI_MAX, MPI_COMM_WORLD));
    *stop = !votes[1];
    return votes[0] == STATUS_OK ? STATUS_OK : comm_agree(status);
}

/* ---- Data ---- */

/* MPI counts in int. */
static enum status check_count(size_t count)
{
    if (count <= INT_MAX)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "%zu values are too many for a message; take fewer samples", count);
}

enum status comm_sum(uint64_t *values, size_t count)
{
    if (size == 1)
        return STATUS_OK;
    TRY(check_count(count));
    MPI_TRY(MPI_Allreduce(MPI_IN_PLACE, values, (int)count, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
    return STATUS_OK;
}

enum status comm_max(double *values, size_t count)
{
    if (size == 1)
        return STATUS_OK;
    TRY(check_count(count));
    MPI_TRY(MPI_Allreduce(MPI_IN_PLACE, values, (int)count, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD));
    return STATUS_OK;
}

enum status comm_spread(void *data, size_t bytes)
{
    if (size == 1)
        return STATUS_OK;
    TRY(check_count(bytes));
    MPI_TRY(MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD));
    return STATUS_OK;
}

enum status comm_gather(const void *mine, size_t bytes, void *all)
{
    if (size == 1) {
        memcpy(all, mine, bytes);
        return STATUS_OK;
    }
    TRY(check_count(bytes));
    MPI_TRY(MPI_Gather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD));
    return STATUS_OK;
}

enum status comm_gather_local(const void *mine, size_t bytes, void *all)
{
    if (local_size == 1) {
        memcpy(all, mine, bytes);
        return STATUS_OK;
    }
    TRY(check_count(bytes));
    MPI_TRY(MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, machine));
    return STATUS_OK;
}
