/* One rank: what the program links without MPI. */
#include "comm.h"

#include <stddef.h>
#include <stdlib.h>

/* Where launchers leave the number of ranks that they started. */
static const struct {
    const char *size;
    const char *rank; /* counts only beside this one; NULL: always */
} launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", NULL},           /* Open MPI */
    {"MV2_COMM_WORLD_SIZE", NULL},            /* MVAPICH */
    {"PMI_SIZE", NULL},                       /* MPICH, Intel MPI, srun --mpi=pmi2 */
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}, /* srun; a batch script has SLURM_NTASKS, but starts one */
};

static long number_in(const char *variable)
{
    const char *text = getenv(variable);
    return text ? strtol(text, NULL, 10) : 0;
}

enum status comm_open(void)
{
    static const char remedy[] =
        "but this build has no MPI: install Open MPI and build again, or start it alone";
    for (size_t i = 0; i < COUNT_OF(launchers); i++) {
        long ranks = number_in(launchers[i].size);
        if (ranks > 1 && (!launchers[i].rank || getenv(launchers[i].rank)))
            return status_set(STATUS_UNAVAILABLE, "started as one of %ld ranks (%s), %s", ranks,
                              launchers[i].size, remedy);
    }
    /* PMIx tells its processes their rank alone. */
    if (number_in("PMIX_RANK") > 0)
        return status_set(STATUS_UNAVAILABLE, "started as rank %ld of several (PMIX_RANK), %s",
                          number_in("PMIX_RANK"), remedy);
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

enum status comm_barrier(void)
{
    return STATUS_OK;
}

enum status comm_agree(enum status status)
{
    return status;
}
