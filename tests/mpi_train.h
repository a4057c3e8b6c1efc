/* Shared by the suites that train on several ranks. */
#ifndef FDSL_TESTS_MPI_TRAIN_H
#define FDSL_TESTS_MPI_TRAIN_H

#include "mpirun.h"

#ifdef _OPENMP
#define TRAINED "train-omp"
#else
#define TRAINED "train-naive"
#endif
#define LEARN LEARN_ON(TRAINED)
#define LEARN_ON(variant)                                                                                   \
    "--variant " variant " --model lenet --train-size 62 --test-size 20 --batch 12 --epochs 2 --threads 1 " \
    "--format csv "
#define DIVIDE LEARN "--scaling strong --batch 24 "

static inline bool same_files(const char *one, const char *other)
{
    shell("cmp %s %s", one, other);
    return status == 0;
}

/* Starts a long training run on three ranks, and waits for its third checkpoint in the folder k. Sets `ranks`
 * to the process ids of the ranks. Returns mpirun's process id. */
static inline pid_t start_training(const char *options, pid_t ranks[8])
{
    char line[512];
    snprintf(line, sizeof line, "%s--epochs 1000000 --checkpoint k --rank-timeout 6", options);
    drop_repeated_in(line);
    pid_t mpirun = start_ranks(9, "-n 3 $PROGRAM %s", line); /* there is no rank 9, so no rank stops */
    double begin_s = timer_now_s();
    while (timer_now_s() - begin_s < 60 && access("k/epoch-000003.ckpt", F_OK) != 0)
        nap();
    cr_assert_eq(children_of(mpirun, ranks), 3);
    return mpirun;
}

#endif
