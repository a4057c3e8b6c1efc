#include "train/exchange_shares.h"

#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"

void exchange_share_take(const float *arena, size_t values, float *own)
{
    const uint32_t rank = (uint32_t)comm_rank(), ranks = (uint32_t)comm_size();
    const size_t count = exchange_share_before(values, rank, ranks);
    memset(own, 0, exchange_share_room(values, ranks) * sizeof *own);
    for (size_t i = 0; i < count; i++)
        own[i] = arena[exchange_share_at(i, rank, ranks)];
}

/* Copies the chunks of a rank to an arena. */
static void put_share(const float *own, uint32_t rank, size_t values, float *arena)
{
    const uint32_t ranks = (uint32_t)comm_size();
    const size_t count = exchange_share_before(values, rank, ranks);
    for (size_t i = 0; i < count; i++)
        arena[exchange_share_at(i, rank, ranks)] = own[i];
}

/* Gathers the chunks of all ranks in `all`, which has `room` values per rank. */
static enum status gather(const float *own, size_t room, float *all, size_t *begins)
{
    for (int i = 0; i <= comm_size(); i++)
        begins[i] = (size_t)i * room;
    memcpy(all + begins[comm_rank()], own, room * sizeof *all);
    return comm_share_parts(all, begins);
}

enum status exchange_share_collect(enum status status, const float *own, size_t values, float *arena)
{
    const size_t ranks = (size_t)comm_size(), room = exchange_share_room(values, (uint32_t)ranks);
    float *all = malloc(ranks * room * sizeof *all);
    size_t *begins = malloc((ranks + 1) * sizeof *begins);
    if (status == STATUS_OK && !(all && begins))
        status = status_set(STATUS_EXHAUSTED, "out of memory for the moments of all ranks");
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = gather(own, room, all, begins);
    for (size_t i = 0; status == STATUS_OK && i < ranks; i++)
        put_share(all + i * room, (uint32_t)i, values, arena);
    free(begins);
    free(all);
    return status;
}
