#include "launcher.h"

#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/portable.h"

static const struct {
    const char *ranks, *rank;
    long least; /* minimum number of ranks; a smaller number does not prove that a launcher started the
                 * process */
} launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", 1}, /* Open MPI */
    {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", 1},   /* MVAPICH */
    {"PMI_SIZE", "PMI_RANK", 1},                         /* MPICH, Intel MPI, srun --mpi=pmi2 */
    /* srun. With one task, the process may be an interactive shell. SLURM_NTASKS is not used, because Slurm
     * also sets it for a batch script, which is one process. */
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", 2},
};

/* Returns the non-negative integer in an environment variable, or -1. */
static long number_in(const char *variable)
{
    const char *text = getenv(variable);
    char *end;
    if (!text || !*text)
        return -1;
    long number = strtol(text, &end, 10);
    return *end || number < 0 ? -1 : number;
}

bool launcher_find(struct launcher *launcher)
{
    for (size_t i = 0; i < COUNT_OF(launchers); i++) {
        long ranks = number_in(launchers[i].ranks), rank = number_in(launchers[i].rank);
        if (ranks < launchers[i].least || (launchers[i].least > 1 && rank < 0))
            continue;
        *launcher = (struct launcher){launchers[i].ranks, ranks, rank < 0 ? 0 : rank};
        return true;
    }
    /* PMIx gives each process its rank, but not the number of ranks. */
    long rank = number_in("PMIX_RANK");
    *launcher = (struct launcher){rank >= 0 ? "PMIX_RANK" : NULL, 0, rank >= 0 ? rank : 0};
    return rank >= 0;
}

int launcher_rank(void)
{
    struct launcher launcher;
    return launcher_find(&launcher) ? (int)launcher.rank : 0;
}

void launcher_forget(void)
{
    for (size_t i = 0; i < COUNT_OF(launchers); i++)
        unsetenv(launchers[i].ranks);
    unsetenv("PMIX_RANK");
}

void launcher_let_rank_0_print(void)
{
    if (launcher_rank() > 0)
        sleep(1);
}
