/* The variant `mpi` of the workload `exchange`. It adds up arrays in host memory over MPI (machine/comm.h),
 * as `--sync mpi` does in training. */
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "machine/host.h"
#include "train/allreduce.h"

struct allreduce_mpi {
    const struct allreduce_job *job;
    struct comm_reducer *reducer;
    float *values;
    uint64_t number; /* of the latest run */
};

static void mpi_teardown(void *state)
{
    struct allreduce_mpi *mpi = state;
    comm_reducer_close(mpi->reducer);
    free(mpi->values);
    free(mpi);
}

/* The reducer needs memory for a second array, and verification for a third. */
static enum status mpi_setup(const struct resources *resources, const void *input, void **state)
{
    const struct allreduce_job *job = input;
    struct allreduce_mpi *mpi = *state = calloc(1, sizeof *mpi);
    (void)resources;
    enum status status = memory_check(3 * job->bytes, "the arrays", "lower --bytes");
    if (status == STATUS_OK && !(mpi && (mpi->values = malloc(job->bytes))))
        status = status_set(STATUS_EXHAUSTED, "out of memory for an array of %zu bytes", job->bytes);
    TRY(comm_agree(status));
    mpi->job = job;
    mpi->number = UINT64_MAX;
    return comm_reducer_open(job->count, &mpi->reducer);
}

static enum status mpi_ready(void *state, uint64_t number)
{
    struct allreduce_mpi *mpi = state;
    for (size_t i = 0; i < mpi->job->count; i++)
        allreduce_fill(mpi->job, number, i, mpi->values);
    mpi->number = number;
    return STATUS_OK;
}

static enum status mpi_run(void *state, uint64_t number, struct run_time *time)
{
    struct allreduce_mpi *mpi = state;
    (void)number, (void)time;
    for (int i = 0; i < ALLREDUCE_CALLS; i++)
        TRY(comm_reduce(mpi->reducer, STATUS_OK, mpi->values));
    return STATUS_OK;
}

static enum status mpi_fetch(void *state, void *result_)
{
    const struct allreduce_mpi *mpi = state;
    struct allreduce_result *result = result_;
    memcpy(result->values, mpi->values, mpi->job->bytes);
    result->number = mpi->number;
    return STATUS_OK;
}

static const struct allreduce_traits traits = {0};
const struct variant variant_exchange_mpi = {.platform = "cpu",
                                             .instruction_set = isa_scalar_name, /* sums are plain loops */
                                             .traits = &traits,
                                             .setup = mpi_setup,
                                             .ready = mpi_ready,
                                             .run = mpi_run,
                                             .fetch = mpi_fetch,
                                             .teardown = mpi_teardown};
