/* Implements machine/comm.h for one rank, in builds without MPI. */
#include <string.h>

#include "core/status.h"
#include "machine/comm.h"

/* One rank has no peer, so nothing opens a channel. */
static enum status no_messages(void)
{
    return status_set(STATUS_UNAVAILABLE, "messages between ranks need a build with MPI");
}

#include "machine/comm_plain.h"

enum status comm_open(void)
{
    static const char remedy[] = "but this build has no MPI: install Open MPI and build again, or start the "
                                 "program without a launcher";
    struct launcher launcher;
    if (!launcher_find(&launcher) || launcher.ranks == 1)
        return STATUS_OK;
    if (launcher.ranks > 1)
        return status_set(STATUS_UNAVAILABLE, "started as one of %ld ranks (%s), %s", launcher.ranks,
                          launcher.variable, remedy);
    if (launcher.rank > 0)
        return status_set(STATUS_UNAVAILABLE, "started as rank %ld of several (%s), %s", launcher.rank,
                          launcher.variable, remedy);
    return STATUS_OK;
}

void comm_close(void)
{
}

int comm_rank(void)
{
    return 0;
}

int comm_size(void)
{
    return 1;
}

int comm_local_rank(void)
{
    return 0;
}

int comm_local_size(void)
{
    return 1;
}

enum status comm_agree(enum status status)
{
    return status;
}

enum status comm_vote(enum status status, double *values, size_t count)
{
    (void)values, (void)count;
    return status;
}

enum status comm_give_up(enum status status)
{
    return status;
}

enum status comm_sum(uint64_t *values, size_t count)
{
    (void)values, (void)count;
    return STATUS_OK;
}

enum status comm_max(double *values, size_t count)
{
    (void)values, (void)count;
    return STATUS_OK;
}

enum status comm_reducer_open(size_t count, struct comm_reducer **reducer)
{
    (void)count;
    *reducer = NULL;
    return STATUS_OK;
}

void comm_reducer_close(struct comm_reducer *reducer)
{
    (void)reducer;
}

enum status comm_reduce(struct comm_reducer *reducer, enum status status, float *values)
{
    (void)reducer, (void)values;
    return status;
}

enum status comm_spread(void *data, size_t bytes)
{
    (void)data, (void)bytes;
    return STATUS_OK;
}

enum status comm_gather(const void *mine, size_t bytes, void *all)
{
    memcpy(all, mine, bytes);
    return STATUS_OK;
}

enum status comm_gather_local(const void *mine, size_t bytes, void *all)
{
    memcpy(all, mine, bytes);
    return STATUS_OK;
}

enum status comm_cuda_probe(void)
{
    return status_set(STATUS_UNAVAILABLE, "this build has no MPI");
}

enum status comm_cuda_sum(enum status status, float *values, size_t count)
{
    (void)values, (void)count;
    return status;
}

enum status comm_share_parts(float *values, const size_t *begins)
{
    (void)values, (void)begins;
    return STATUS_OK;
}

bool comm_shares_memory = true;
