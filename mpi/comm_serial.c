/* Implements machine/comm.h for one rank, in builds without MPI. */
#include "machine/comm.h"

#include <string.h>

#include "launcher.h"

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

void comm_set_timeout(double seconds)
{
    (void)seconds;
}

double comm_timeout(void)
{
    return 0;
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

enum status comm_group_open(uint32_t number, struct comm_group **group)
{
    (void)number;
    *group = NULL;
    return STATUS_OK;
}

void comm_group_close(struct comm_group *group)
{
    (void)group;
}

int comm_group_rank(const struct comm_group *group)
{
    (void)group;
    return 0;
}

int comm_group_size(const struct comm_group *group)
{
    (void)group;
    return 1;
}

enum status comm_group_agree(const struct comm_group *group, enum status status)
{
    (void)group;
    return status;
}

enum status comm_group_spread(const struct comm_group *group, void *data, size_t bytes)
{
    (void)group, (void)data, (void)bytes;
    return STATUS_OK;
}

enum status comm_reducer_open_in(const struct comm_group *group, size_t count, struct comm_reducer **reducer)
{
    (void)group, (void)count;
    *reducer = NULL;
    return STATUS_OK;
}

enum status comm_reducer_open(size_t count, struct comm_reducer **reducer)
{
    return comm_reducer_open_in(NULL, count, reducer);
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

enum status comm_check_same(uint64_t mine, const char *what, const char *remedy)
{
    (void)mine, (void)what, (void)remedy;
    return STATUS_OK;
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

/* One rank has no peer, so nothing opens a channel. */
static enum status no_peer(void)
{
    return status_set(STATUS_UNAVAILABLE, "messages between ranks need a build with MPI");
}

bool comm_shares_memory = true;

enum status comm_channels_open(const struct comm_channel_spec *specs, size_t count,
                               struct comm_channel **channels)
{
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        any = any || specs[i].bytes > 0;
        channels[i] = NULL;
    }
    return any ? no_peer() : STATUS_OK;
}

void comm_channel_close(struct comm_channel *channel)
{
    (void)channel;
}

void *comm_channel_memory(const struct comm_channel *channel, size_t *bytes, size_t *own_bytes)
{
    (void)channel;
    *bytes = *own_bytes = 0;
    return NULL;
}

bool comm_channel_shares(const struct comm_channel *channel)
{
    (void)channel;
    return false;
}

enum status comm_channel_room(struct comm_channel *channel, void **buffer)
{
    (void)channel, (void)buffer;
    return no_peer();
}

enum status comm_channel_send(struct comm_channel *channel, size_t bytes)
{
    (void)channel, (void)bytes;
    return no_peer();
}

enum status comm_channel_receive(struct comm_channel *channel, void **buffer)
{
    (void)channel, (void)buffer;
    return no_peer();
}
