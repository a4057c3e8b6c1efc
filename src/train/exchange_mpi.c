/* The exchange `mpi`: gradients in host memory, added up over MPI (machine/comm.h). */
#include "machine/comm.h"
#include "train/engine.h"

static enum status mpi_probe(const struct engine *engine)
{
    return engine->gradients_in == GRADIENTS_IN_HOST
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "the gradients of this variant are not in host memory; use train-naive or "
                            "train-omp");
}

/* The reducer is opened by the first sum(), which knows the number of gradients. */
static enum status mpi_open(struct exchange *exchange)
{
    (void)exchange;
    return STATUS_OK;
}

static void mpi_close(struct exchange *exchange)
{
    comm_reducer_close(exchange->state);
}

static enum status mpi_sum(struct exchange *exchange, enum status status, float *gradients, size_t count)
{
    struct comm_reducer *reducer = exchange->state;
    if (!reducer) {
        TRY(comm_agree(status));
        status = comm_reducer_open(count, &reducer);
        exchange->state = reducer;
        TRY(status);
    }
    return comm_reduce(reducer, status, gradients);
}

const struct exchange_method exchange_mpi = {
    .name = "mpi", .probe = mpi_probe, .open = mpi_open, .close = mpi_close, .sum = mpi_sum};
