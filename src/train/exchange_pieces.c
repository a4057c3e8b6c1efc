#include "train/exchange_pieces.h"

#include <stdlib.h>

/* Opens the reducer of a piece, unless an earlier step has opened it. Collective. */
static enum status open_piece(struct exchange_pieces *pieces, size_t index, enum status status, size_t count)
{
    if (index >= pieces->count) {
        struct comm_reducer **longer = realloc(pieces->reducers, (index + 1) * sizeof *longer);
        if (longer) {
            for (; pieces->count <= index; pieces->count++)
                longer[pieces->count] = NULL;
            pieces->reducers = longer;
        } else if (status == STATUS_OK)
            status = status_set(STATUS_EXHAUSTED, "out of memory for the exchange");
    } else if (pieces->reducers[index])
        return STATUS_OK;
    TRY(comm_agree(status));
    return comm_reducer_open(count, &pieces->reducers[index]);
}

enum status exchange_piece_sum(struct exchange_pieces *pieces, size_t index, enum status status,
                               float *values, size_t count)
{
    TRY(open_piece(pieces, index, status, count));
    return comm_reduce(pieces->reducers[index], status, values);
}

enum status exchange_pieces_sum(struct exchange_pieces *pieces, const struct model *model, enum status status,
                                float *gradients)
{
    size_t index = 0, first, end = model->arena_values;
    for (uint32_t i = model->layer_count; i-- > 0;) {
        if (!exchange_is_part(model, &model->layers[i], end, &first))
            continue;
        for (size_t at = first; at < end; at += EXCHANGE_PIECE_VALUES) {
            size_t left = end - at;
            TRY(exchange_piece_sum(pieces, index++, status, gradients + at,
                                   left < EXCHANGE_PIECE_VALUES ? left : EXCHANGE_PIECE_VALUES));
        }
        end = first;
    }
    return STATUS_OK;
}

void exchange_pieces_free(struct exchange_pieces *pieces)
{
    for (size_t i = 0; i < pieces->count; i++)
        comm_reducer_close(pieces->reducers[i]);
    free(pieces->reducers);
    *pieces = (struct exchange_pieces){0};
}
