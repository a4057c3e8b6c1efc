/* Shared by the suites that train on several ranks. */
#ifndef FDSL_TESTS_MPI_TRAIN_H
#define FDSL_TESTS_MPI_TRAIN_H

#include "mpirun.h"

#ifdef _OPENMP
#define TRAINED "train-omp"
#else
#define TRAINED "train-naive"
#endif
#define LEARN                                                                                               \
    "--variant " TRAINED " --model lenet --train-size 62 --test-size 20 --batch 12 --epochs 2 --threads 1 " \
    "--format csv "
#define DIVIDE LEARN "--scaling strong --batch 24 "

static inline bool same_files(const char *one, const char *other)
{
    shell("cmp %s %s", one, other);
    return status == 0;
}

#endif
