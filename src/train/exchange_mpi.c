/* The exchange method `mpi` adds up gradients in host memory over MPI (machine/comm.h). */
#include <stdlib.h>

#include "machine/comm.h"
#include "train/engine.h"
#include "train/exchange_pieces.h"

static enum status mpi_probe(const struct engine *engine)
{
    return engine->gradients_in == GRADIENTS_IN_HOST
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "the gradients of this variant are not in host memory; use train-naive or "
                            "train-omp");
}

/* The reducers are opened by the first sum(), which knows the number of gradients. */
static enum status mpi_open(struct exchange *exchange)
{
    exchange->state = calloc(1, sizeof(struct exchange_pieces));
    return comm_agree(ALLOCATED(exchange->state, "out of memory"));
}

static void mpi_close(struct exchange *exchange)
{
    if (exchange->state)
        exchange_pieces_free(exchange->state);
    free(exchange->state);
}

static enum status mpi_sum(struct exchange *exchange, enum status status, float *gradients, size_t count)
{
    return exchange->mixed ? exchange_pieces_sum(exchange->state, exchange->mixed, status, gradients)
                           : exchange_piece_sum(exchange->state, 0, status, gradients, count);
}

const struct exchange_method exchange_mpi = {
    .name = "mpi", .probe = mpi_probe, .open = mpi_open, .close = mpi_close, .sum = mpi_sum};
