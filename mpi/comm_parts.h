/* Shared by comm_mpi.c, comm_channel.c and comm_shared.c. */
#ifndef FDSL_MPI_COMM_PARTS_H
#define FDSL_MPI_COMM_PARTS_H

#include <mpi.h>
#include <stdbool.h>
#include <stddef.h>

#include "core/status.h"

/* In an exchange of data, a rank polls for this time before it sleeps, because the data usually arrive
 * sooner. It sleeps only briefly, because MPI may transfer data only while a rank polls. */
#define POLL_S       1e-3
#define BRIEF_NAP_US 50
#define WARN_S       30 /* time until the first warning about a missing rank; each warning doubles it */

/* The tags of messages. */
enum { NOTE_TAG = 1, CHANNEL_TAG, OFFER_TAG, ANSWER_TAG };

/* Converts an MPI error code to a status. Each rank prints its own failing call, because it may be unable to
 * send the error to other ranks. */
enum status comm_mpi_status(int error, const char *call);
#define MPI_TRY(call) TRY(comm_mpi_status((call), #call))

/* Returns whether an MPI call failed or a wait timed out. MPI may then still use the memory of pending
 * messages. */
bool comm_is_broken(void);

/* Checks that ranks can still exchange a message of `count` elements. MPI counts in int, and after a failed
 * call the collective calls of the ranks no longer match. */
enum status comm_check_message(size_t count);

/* Called repeatedly while this rank waits for one other rank. Warns after *warn_s seconds, and doubles this
 * time. Fails after the timeout and marks the communication as broken. */
enum status comm_look_at(int peer, double waited_s, double *warn_s);

/* Sets `*same` to whether rank `peer` runs on this machine. */
enum status comm_on_same_machine(int peer, bool *same);

/* Sums of arrays of `count` floats in shared memory, for comm_reduce(). Collective. If the ranks cannot share
 * memory, `*sum` becomes NULL, and the first such call prints a warning with the reason, unless
 * comm_shares_memory is false. */
struct shared_sum;
enum status shared_sum_open(size_t count, struct shared_sum **sum);
enum status shared_sum_add(struct shared_sum *sum, enum status status, float *values);
void shared_sum_close(struct shared_sum *sum); /* ignores NULL */

#endif
