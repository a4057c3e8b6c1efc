/* Adds up gradients over MPI. The gradients become final part by part during the backward pass, and each part
 * is added up in pieces of limited size. CPU and GPU ranks that train together both use this file, so that
 * they exchange the same pieces in the same order. Not thread safe. */
#ifndef FDSL_TRAIN_EXCHANGE_PIECES_H
#define FDSL_TRAIN_EXCHANGE_PIECES_H

#include <stdbool.h>
#include <stddef.h>

#include "core/portable.h"
#include "core/status.h"
#include "machine/comm.h"
#include "train/model.h"

#define EXCHANGE_PART_VALUES  ((size_t)1 << 18) /* minimum values per part; the last may have fewer */
#define EXCHANGE_PIECE_VALUES ((size_t)1 << 18) /* maximum values that are added up at a time: 1 MiB */

/* Call after the backward pass of a layer. In the model's arena, the gradients from this layer's first index
 * to `end` - 1 are final and not yet exchanged; they are the candidate for the next part. Returns true if the
 * candidate is large enough, or if this layer is the last one of the backward pass. Sets `*first` to the
 * index where the candidate begins. */
static inline bool exchange_is_part(const struct model *model, const struct layer *layer, size_t end,
                                    size_t *first)
{
    bool last = layer == model->layers; /* the last one of the backward pass */
    *first = last ? 0 : layer->weight;
    return last || (layer->weight_values && end - *first >= EXCHANGE_PART_VALUES);
}

/* The reducers of all pieces of a step. A zeroed struct has no pieces. */
struct exchange_pieces {
    struct comm_reducer **reducers;
    size_t count;
};

FDSL_C_BEGIN

/* Collective, like comm_reduce(): adds up the `count` values of piece number `index`. All ranks must pass the
 * same pieces in the same order in every step. `status` is the status of this rank so far; if it is a failure
 * on any rank, all ranks return it, and the values are undefined. */
enum status exchange_piece_sum(struct exchange_pieces *pieces, size_t index, enum status status,
                               float *values, size_t count);

/* Collective: adds up all gradients of a step. `gradients` has the layout of the model's arena. Divides this
 * array into the same parts and pieces as an engine on a GPU. */
enum status exchange_pieces_sum(struct exchange_pieces *pieces, const struct model *model, enum status status,
                                float *gradients);

void exchange_pieces_free(struct exchange_pieces *pieces);

FDSL_C_END

#endif
