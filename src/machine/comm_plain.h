/* Implements the parts of machine/comm.h that need no MPI, for one rank or for ranks that can only gather and
 * spread: the only group is that of all ranks, which is NULL, because only the replicas of a pipeline are
 * groups, and ranks pass no messages. Included once, by a file that defines no_messages(), which returns
 * STATUS_UNAVAILABLE with the reason. */
#include "machine/comm.h"

void comm_set_timeout(double seconds)
{
    (void)seconds;
}

double comm_timeout(void)
{
    return 0;
}

enum status comm_check_same(uint64_t mine, const char *what, const char *remedy)
{
    uint64_t first = mine;
    TRY(comm_spread(&first, sizeof first));
    return comm_agree(first == mine
                          ? STATUS_OK
                          : status_set(STATUS_USAGE, "its %s differ from those of rank 0; %s", what, remedy));
}

enum status comm_group_open(uint32_t number, struct comm_group **group)
{
    (void)number;
    *group = NULL;
    return comm_size() > 1 ? no_messages() : STATUS_OK;
}

void comm_group_close(struct comm_group *group)
{
    (void)group;
}

int comm_group_rank(const struct comm_group *group)
{
    (void)group;
    return comm_rank();
}

int comm_group_size(const struct comm_group *group)
{
    (void)group;
    return comm_size();
}

enum status comm_group_agree(const struct comm_group *group, enum status status)
{
    (void)group;
    return comm_agree(status);
}

enum status comm_group_spread(const struct comm_group *group, void *data, size_t bytes)
{
    (void)group;
    return comm_spread(data, bytes);
}

enum status comm_reducer_open_in(const struct comm_group *group, size_t count, struct comm_reducer **reducer)
{
    (void)group;
    return comm_reducer_open(count, reducer);
}

enum status comm_channels_open(const struct comm_channel_spec *specs, size_t count,
                               struct comm_channel **channels)
{
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        any = any || specs[i].bytes > 0;
        channels[i] = NULL;
    }
    return any ? no_messages() : STATUS_OK;
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
    return no_messages();
}

enum status comm_channel_send(struct comm_channel *channel, size_t bytes)
{
    (void)channel, (void)bytes;
    return no_messages();
}

enum status comm_channel_receive(struct comm_channel *channel, void **buffer)
{
    (void)channel, (void)buffer;
    return no_messages();
}
