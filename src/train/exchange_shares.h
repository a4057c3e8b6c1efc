/* Divides the parameters among the ranks, for an exchange that updates them (exchange_method.updates). A
 * chunk is EXCHANGE_CHUNK_VALUES consecutive values of the arena. With N ranks, rank r updates chunks r, r +
 * N, r + 2 N, ... So any part of the arena is divided about equally among the ranks. Each rank has the
 * moments of its own chunks only, stored consecutively. */
#ifndef FDSL_TRAIN_EXCHANGE_SHARES_H
#define FDSL_TRAIN_EXCHANGE_SHARES_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "train/model.h"
#include "train/optimizer.h"

#define EXCHANGE_CHUNK_VALUES 128             /* 512 bytes: one load of a warp */
#define EXCHANGE_GROUP_VALUES MODEL_ALIGNMENT /* values per entry of exchange_update.groups */

/* The arrays that an exchange updates, in device memory. The engine sets them before its first step. */
struct exchange_update {
    float *gradients, *parameters; /* arenas */
    float *m, *v;                  /* moments of this rank's chunks: exchange_share_room() values each */
    void *rounded; /* the parameters in bf16, as an arena whose size is a multiple of 4; NULL: none */
    /* Update rules: one entry per EXCHANGE_GROUP_VALUES parameters. NULL: the same rule for all tensors, with
     * weight decay. */
    const struct tensor_update *groups;
    const struct update *update; /* update of the current step */
};

/* Returns how many of the first `end` values of an arena belong to a rank. */
FDSL_HD size_t exchange_share_before(size_t end, uint32_t rank, uint32_t ranks)
{
    const size_t chunk = EXCHANGE_CHUNK_VALUES, chunks = end / chunk, rest = end % chunk;
    const size_t own = (chunks + ranks - 1 - rank) / ranks;
    return own * chunk + (chunks % ranks == rank ? rest : 0);
}

/* Returns the index in the arena of a rank's value number `i`. */
FDSL_HD size_t exchange_share_at(size_t i, uint32_t rank, uint32_t ranks)
{
    const size_t chunk = EXCHANGE_CHUNK_VALUES;
    return (i / chunk * ranks + rank) * chunk + i % chunk;
}

/* Returns the length of the arrays `m` and `v` of a rank, in values. The length is the same on all ranks, and
 * a multiple of EXCHANGE_CHUNK_VALUES. */
FDSL_HD size_t exchange_share_room(size_t values, uint32_t ranks)
{
    const size_t chunks = (values + EXCHANGE_CHUNK_VALUES - 1) / EXCHANGE_CHUNK_VALUES;
    return (chunks + ranks - 1) / ranks * EXCHANGE_CHUNK_VALUES;
}

FDSL_C_BEGIN

/* Copies this rank's chunks of an arena to `own`, which has exchange_share_room() values. */
void exchange_share_take(const float *arena, size_t values, float *own);

/* Collective, like comm_agree(): fills `arena` from the chunks of all ranks. `status` is the status of this
 * rank so far. */
enum status exchange_share_collect(enum status status, const float *own, size_t values, float *arena);

FDSL_C_END

#endif
