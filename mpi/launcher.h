/* What a launcher (mpirun, srun) leaves in the environment of the processes that it starts. Known without
 * MPI, and before it begins. */
#ifndef FDSL_MPI_LAUNCHER_H
#define FDSL_MPI_LAUNCHER_H

#include <stdbool.h>

struct launcher {
    const char *variable; /* where the number of ranks, or this one's, was found */
    long ranks;           /* 0: not told */
    long rank;
};

/* Whether a launcher started this process, as one rank of `launcher->ranks`. */
bool launcher_find(struct launcher *launcher);

/* The rank that the launcher gave; 0 without one. */
int launcher_rank(void);

/* Starts a thread that watches while this process waits for the other ranks to start. It warns after 30 s,
 * and after `limit_s` (0: 300 s) it ends the process with exit status 1: a rank that has ended early, or that
 * is another program, never starts MPI. Both messages name the first missing rank where all ranks run on this
 * machine. Returns NULL where no thread can be made: then there is no watch. */
struct launcher_watch *launcher_watch_begin(double limit_s);
void launcher_watch_end(struct launcher_watch *watch);

/* To be called before a process ends with a failure. A launcher ends all ranks when the first one fails: the
 * others wait a second, so that rank 0 can say why. */
void launcher_leave_word_to_rank_0(void);

#endif
