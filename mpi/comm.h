/* The ranks of one run, and no trace of what joins them: comm_mpi.c is the only file that knows MPI, and
 * comm_serial.c stands in for it in a build without. Between comm_open() and comm_close() every function
 * may be called, by one thread; barrier and agreement by all ranks in the same order. */
#ifndef FDSL_MPI_COMM_H
#define FDSL_MPI_COMM_H

#include "core/status.h"

FDSL_C_BEGIN

/* Joins the ranks; --help and --list do without. A serial build that a launcher started as one of several
 * ranks refuses with STATUS_UNAVAILABLE: each would do the whole work and all would write the same files. */
enum status comm_open(void);
void comm_close(void);

int comm_rank(void);
int comm_size(void);

/* Returns when all ranks have called it. */
enum status comm_barrier(void);

/* The worst (largest) status over the ranks, the same on each. Every phase ends in one, so that no rank
 * goes on to wait for one that failed. */
enum status comm_agree(enum status status);

FDSL_C_END

#endif
