/* The ranks of one run, and no trace of what joins them: comm_mpi.c is the only file that knows MPI, and
 * comm_serial.c stands in for it in a build without. One thread calls these functions; those that need all
 * ranks are called by all, in the same order. Outside of comm_open() and comm_close() there is one rank.
 *
 * A failure of MPI itself is STATUS_FAILED; then comm_close() ends all ranks. */
#ifndef FDSL_MACHINE_COMM_H
#define FDSL_MACHINE_COMM_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

FDSL_C_BEGIN

/* Joins the ranks that a launcher started; a program that was started alone is one rank, and MPI is left out
 * of it. STATUS_UNAVAILABLE where this build, or this MPI, cannot be one of those ranks: each would do the
 * whole work and all would write the same files. */
enum status comm_open(void);
void comm_close(void);

/* Sets how long a rank waits for others in the calls below, in seconds; 0: without limit.
 * After that time the run ends. Warnings name the rank from 30 s on. Unless a time is set, ranks wait at most
 * 300 s for all to join. Called before comm_open(). */
void comm_set_timeout(double seconds);

int comm_rank(void);
int comm_size(void);

/* This rank among those of its machine. */
int comm_local_rank(void);
int comm_local_size(void);

/* The worst status over the ranks (status_severity()), the same on each, and with it the message of the
 * lowest rank that has it, which begins with "rank N: " unless all ranks have that status. Every phase ends
 * in one, so that no rank goes on to wait for one that failed. Who waits here sleeps: its cores are free. */
enum status comm_agree(enum status status);

/* The same between two timed runs, without sleeping: it is their barrier. Where no rank failed, each of the
 * values, at most COMM_VOTE_MAX, becomes the largest over the ranks. */
#define COMM_VOTE_MAX 3
enum status comm_vote(enum status status, double *values, size_t count);

/* Replaces each value by the sum, or the largest, over the ranks. */
enum status comm_sum(uint64_t *values, size_t count);
enum status comm_max(double *values, size_t count);

/* Gives all ranks the `bytes` bytes that rank 0 has in `data`. */
enum status comm_spread(void *data, size_t bytes);

/* Brings `bytes` bytes of each rank to rank 0, in the order of ranks, into `all` (comm_size() * bytes; not
 * used elsewhere). */
enum status comm_gather(const void *mine, size_t bytes, void *all);

/* Brings those of this machine's ranks to each of them, in order, into `all` (comm_local_size() * bytes). */
enum status comm_gather_local(const void *mine, size_t bytes, void *all);

/* Collective: checks that a hash is the same on all ranks. STATUS_USAGE "its `what` are not those of rank 0;
 * `remedy`" otherwise. */
enum status comm_check_same(uint64_t mine, const char *what, const char *remedy);

FDSL_C_END

#endif
