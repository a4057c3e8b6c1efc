/* Communication between the ranks of a run. The callers need no MPI: only mpi/comm_mpi.c calls it. In a build
 * without MPI, mpi/comm_serial.c replaces this file. Only one thread may call these functions. All ranks must
 * call collective functions in the same order. Before comm_open() and after comm_close() there is one rank.
 *
 * If MPI itself fails or a wait takes too long (comm_set_timeout()), functions return STATUS_FAILED, and
 * comm_close() then aborts all ranks. */
#ifndef FDSL_MACHINE_COMM_H
#define FDSL_MACHINE_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

FDSL_C_BEGIN

/* Joins the ranks that a launcher started. A program started without a launcher is one rank and does not
 * initialize MPI. STATUS_UNAVAILABLE if a launcher started several ranks but this build or this MPI cannot
 * join them: otherwise each rank would do the whole work, and all would write the same files. */
enum status comm_open(void);

/* Finalizes MPI, or aborts all ranks if a call failed. */
void comm_close(void);

/* comm_set_timeout() sets how long a rank waits for other ranks, in seconds; 0: no limit. After that time the
 * run fails. From 30 s on, warnings name the missing ranks. Even without a limit, ranks wait at most 300 s
 * for all ranks to join. Call before comm_open(). comm_timeout() returns the time, or 0 in builds without
 * MPI. */
void comm_set_timeout(double seconds);
double comm_timeout(void);

/* The index of this rank, and the number of ranks. */
int comm_rank(void);
int comm_size(void);

/* The index of this rank on its machine, and the number of ranks there. */
int comm_local_rank(void);
int comm_local_size(void);

/* Collective: returns the most severe status of all ranks (status_severity()) on every rank. The message
 * becomes that of the lowest rank with this status, prefixed with "rank N: " unless all ranks have the
 * status. Every phase of a run ends with this call, so that no rank waits for a rank that failed. Waiting
 * ranks sleep, which leaves their cores free. */
enum status comm_agree(enum status status);

/* Not collective. A rank calls this function after a failure if other ranks may be waiting for it outside of
 * this interface, for example in GPU kernels. Prints status_text() and aborts all ranks. With one rank,
 * returns `status`. */
enum status comm_give_up(enum status status);

/* Collective: agrees on a status like comm_agree(), but polls without sleeping. Serves as the barrier between
 * two timed runs. If no rank failed, each of the `count` <= COMM_VOTE_MAX values becomes its maximum over all
 * ranks. */
#define COMM_VOTE_MAX 3
enum status comm_vote(enum status status, double *values, size_t count);

/* Collective: comm_sum() replaces each value by its sum over all ranks, comm_max() by its maximum. */
enum status comm_sum(uint64_t *values, size_t count);
enum status comm_max(double *values, size_t count);

/* Collective: broadcasts `bytes` bytes of `data` from rank 0 to all ranks. */
enum status comm_spread(void *data, size_t bytes);

/* Collective: gathers `bytes` bytes from each rank, in rank order, into `all` of rank 0. `all` has room for
 * comm_size() * bytes bytes; other ranks ignore it. */
enum status comm_gather(const void *mine, size_t bytes, void *all);

/* Collective: gathers `bytes` bytes from each rank of this machine, in rank order, into `all` of every rank
 * of this machine. `all` has room for comm_local_size() * bytes bytes. */
enum status comm_gather_local(const void *mine, size_t bytes, void *all);

/* A group has all ranks that gave the same number. */
struct comm_group;

/* Collective: opens the group of this rank. comm_group_close() ignores NULL. */
enum status comm_group_open(uint32_t number, struct comm_group **group);
void comm_group_close(struct comm_group *group);

/* The index of this rank in its group, in the order of the ranks, and the number of ranks in the group. If
 * `group` is NULL, these are those of all ranks. */
int comm_group_rank(const struct comm_group *group);
int comm_group_size(const struct comm_group *group);

/* Collective in the group: comm_group_agree() fails on all ranks of the group if one of them failed.
 * comm_group_spread() broadcasts `bytes` bytes of `data` from the first rank. If `group` is NULL, these are
 * comm_agree() and comm_spread(). */
enum status comm_group_agree(const struct comm_group *group, enum status status);
enum status comm_group_spread(const struct comm_group *group, void *data, size_t bytes);

/* Adds up arrays of `count` floats over all ranks, many times. Each rank adds up one contiguous part of the
 * array in rank order and sends the sums to all ranks, so all ranks get the same bits, and repeated sums get
 * the same bits. If all ranks can share memory, they exchange the values through this memory, else over MPI;
 * both ways give the same bits. Over MPI, each rank sends 2 (N - 1) / N times the array's bytes, for N ranks.
 */
struct comm_reducer;

/* Collective: allocates memory for comm_reduce(). STATUS_USAGE if the ranks give different counts. The caller
 * closes the reducer, even after a failure; comm_reducer_close() ignores NULL. comm_reducer_open_in() is
 * collective in `group` and adds up over its ranks, over MPI; close the reducer before the group. If `group`
 * is NULL, it is comm_reducer_open(). */
enum status comm_reducer_open(size_t count, struct comm_reducer **reducer);
enum status comm_reducer_open_in(const struct comm_group *group, size_t count, struct comm_reducer **reducer);
void comm_reducer_close(struct comm_reducer *reducer);

/* Collective in the group of the reducer: agrees on a status like comm_agree(). If no rank failed, replaces
 * the values by their sums over its ranks. */
enum status comm_reduce(struct comm_reducer *reducer, enum status status, float *values);

/* Returns STATUS_OK if MPI says at run time that it takes pointers to the memory of CUDA devices;
 * STATUS_UNAVAILABLE with the reason if not. Not collective. */
enum status comm_cuda_probe(void);

/* Collective, like comm_reduce(), for `count` values in the memory of a CUDA device: passes the pointer to
 * MPI_Allreduce(). MPI chooses the order of the sums. The caller has synchronized the work that writes the
 * values. Needs comm_cuda_probe(). */
enum status comm_cuda_sum(enum status status, float *values, size_t count);

/* Collective: sends the parts of an array to all ranks. Rank i provides the values begins[i] to begins[i + 1]
 * - 1. `begins` has comm_size() + 1 entries, which are the same on all ranks. */
enum status comm_share_parts(float *values, const size_t *begins);

/* For tests. If false, ranks of one machine also exchange messages and sums over MPI. */
extern bool comm_shares_memory;

/* A channel passes messages from one rank to another, in order, through a ring of buffers in host memory. The
 * ranks of one machine share the buffers, so nothing is copied; between machines, MPI copies the messages. */
struct comm_channel;

/* One end of a channel whose messages have at most `bytes` bytes each. The sender can continue while
 * `buffers` messages are in flight, not counting the message that the receiver uses. Both ends must give the
 * same sizes. */
struct comm_channel_spec {
    int peer;
    bool sends;   /* the sender's end */
    size_t bytes; /* 0: no channel */
    uint32_t buffers;
};

/* Collective: opens this rank's ends of all channels. `channels` receives one channel per entry of `specs`,
 * or NULL for an entry with no channel. There is at most one channel per direction and pair of ranks; both
 * ends must close it before another one opens. The caller closes all channels, even after a failure, and
 * before comm_close(); comm_channel_close() ignores NULL. */
#define COMM_CHANNELS_MAX 4 /* entries of `specs` */
enum status comm_channels_open(const struct comm_channel_spec *specs, size_t count,
                               struct comm_channel **channels);
void comm_channel_close(struct comm_channel *channel);

/* Returns the memory of all buffers, for example to pin it, and their size in `*bytes`. `*own_bytes` is the
 * part that this rank allocated: 0 for the receiver of shared buffers. */
void *comm_channel_memory(const struct comm_channel *channel, size_t *bytes, size_t *own_bytes);

/* Returns whether both ends of the channel share its buffers. */
bool comm_channel_shares(const struct comm_channel *channel);

/* Sender: room() sets `*buffer` to the next buffer, after waiting until the earlier message in this buffer
 * has been sent. send() sends the first `bytes` bytes of this buffer. */
enum status comm_channel_room(struct comm_channel *channel, void **buffer);
enum status comm_channel_send(struct comm_channel *channel, size_t bytes);

/* Receiver: waits for the next message. `*buffer` is valid until the next call. */
enum status comm_channel_receive(struct comm_channel *channel, void **buffer);

/* Collective: checks that a hash is the same on all ranks. If not, STATUS_USAGE with "its `what` differ from
 * those of rank 0; `remedy`". */
enum status comm_check_same(uint64_t mine, const char *what, const char *remedy);

FDSL_C_END

/* ---- The launcher (mpi/launcher.c) ---- */

/* Environment variables that a launcher (mpirun, srun) sets for the processes it starts. They can be read
 * without MPI and before MPI_Init(). */

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

/* ---- A ring of messages in shared memory (shared_memory.c) ---- */

/* A ring of message buffers in memory that two processes of one machine share: one process writes the
 * messages, the other one reads them in place. The memory has no name in any file system, so it is freed when
 * both processes have ended, even if they are killed. No function blocks. Each end may be used by one thread
 * at a time. */

struct shared_ring;

/* Identifies a ring to the reader's process. */
struct shared_ring_offer {
    int32_t process, file; /* process id of the writer, and its file descriptor */
    uint64_t token;        /* random; also at the beginning of the memory */
};

/* Writer: creates a ring of `buffers` messages of at most `bytes` bytes. The caller sends `*offer` to the
 * reader. After the reader's answer, the caller calls shared_ring_attached(), which closes the file
 * descriptor; no reader can attach afterwards. STATUS_FAILED with the reason. */
enum status shared_ring_create(size_t bytes, uint32_t buffers, struct shared_ring **ring,
                               struct shared_ring_offer *offer);
void shared_ring_attached(struct shared_ring *ring);

/* Reader: attaches to an offered ring of the same size. STATUS_UNAVAILABLE with the reason if this process
 * cannot open the memory, for example because the processes run in different containers. */
enum status shared_ring_attach(const struct shared_ring_offer *offer, size_t bytes, uint32_t buffers,
                               struct shared_ring **ring);

/* Unmaps the memory; the other end may still use it. Ignores NULL. */
void shared_ring_close(struct shared_ring *ring);

/* Returns the memory of all buffers, for example to pin it, and its size in `*size`. The memory is initially
 * zero. More than two processes can attach to a ring that passes no messages and serves only as shared
 * memory. */
void *shared_ring_memory(const struct shared_ring *ring, size_t *size);

/* Writer: returns the buffer of the next message; NULL while the reader has not freed it. */
void *shared_ring_room(const struct shared_ring *ring);

/* Writer: passes the buffer that shared_ring_room() returned to the reader. */
void shared_ring_send(struct shared_ring *ring);

/* Reader: returns the oldest message that it has not freed; NULL if there is none. */
void *shared_ring_message(const struct shared_ring *ring);

/* Reader: frees the buffer of the message that shared_ring_message() returned. */
void shared_ring_free(struct shared_ring *ring);

#endif
