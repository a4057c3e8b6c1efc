/* Environment variables that a launcher (mpirun, srun) sets for the processes it starts. They can be read
 * without MPI and before MPI_Init(). */
#ifndef FDSL_MPI_LAUNCHER_H
#define FDSL_MPI_LAUNCHER_H

#include <stdbool.h>

struct launcher {
    const char *variable; /* variable with the number of ranks, or (PMIx) with this rank; NULL: no launcher */
    long ranks;           /* 0: unknown */
    long rank;
};

/* Returns whether a launcher started this process, and fills `launcher`. */
bool launcher_find(struct launcher *launcher);

/* Returns the rank that the launcher assigned; 0 without a launcher. */
int launcher_rank(void);

/* Removes the variables, so that each program that this process starts is a run of one rank. */
void launcher_forget(void);

/* Starts a thread that limits how long MPI_Init() may block. MPI_Init() waits for all ranks to call it; a
 * rank that has ended early, or that runs another program, never does. The thread warns after 30 s; after
 * `limit_s` (0: 300 s) it ends the process with exit status 1. If all ranks run on this machine under Open
 * MPI, both messages name the first missing rank. Returns NULL if no thread can be started. */
struct launcher_watch *launcher_watch_begin(double limit_s);

/* Stops the thread and frees the watch; NULL is allowed. */
void launcher_watch_end(struct launcher_watch *watch);

/* Sleeps one second on all ranks except rank 0. Call before a process exits with a failure: a launcher ends
 * all ranks when the first one fails, and rank 0 must have time to print the reason. */
void launcher_let_rank_0_print(void);

#endif
