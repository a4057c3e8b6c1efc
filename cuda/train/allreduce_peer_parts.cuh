/* The types that the files of the `peer` methods share: the memory through which ranks communicate, and the
 * state of a rank. allreduce_peer.cu describes the algorithms. */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_PEER_PARTS_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_PEER_PARTS_CUH

#include "train/allreduce.cuh"
#include "train/allreduce_peer.cuh"

#define PEER_THREADS 512
#define PEER_ROOM    4096 /* vectors per slot: 64 KiB */
#define PEER_SLOTS   2
#define PEER_EMPTY   UINT32_MAX /* marks an empty word of room.arrivals: a NaN in fp32, two NaNs in bf16 */

/* ---- The memory of a rank, which all ranks map ---- */

enum shot { STAGED, SUMMED, SHOTS };

/* The memory through which a block communicates with the same block of other ranks. */
struct room {
    /* slots[STAGED] has this rank's values; all ranks write sums to slots[SUMMED]. */
    uint4 slots[SHOTS][PEER_SLOTS][PEER_ROOM];
    uint4 arrivals[PEER_SLOTS][PEER_ROOM]; /* for eager_kernel(): PEER_ROOM / ranks vectors from each rank */
    uint32_t flags[SHOTS][PEERS_MAX];      /* [shot][rank]: number of the latest piece of that rank */
    uint32_t pieces, eager_pieces;         /* pieces so far; only this rank uses them */
    uint32_t failed;                       /* whether a rank did not answer; only this rank uses it */
    uint32_t unused[13];
};

struct peers {
    struct room *rooms[PEERS_MAX]; /* by rank; rooms[i][b] belongs to block b */
    int rank, ranks;
    uint64_t timeout_ns;
    int *missing; /* host memory: 1 + the rank that did not answer; 0: all answered */
};

struct peer {
    struct allreduce_request request;
    struct peers peers;
    int blocks_max, processors; /* processors: multiprocessors of the smallest GPU of all ranks */
    bool shared;                /* other ranks may map this rank's memory */
    void *mapped[PEERS_MAX];    /* memory of other ranks */
};

/* Returns the number of blocks for an array: at most one thread per vector, rounded up to whole blocks. Large
 * arrays use up to two blocks per multiprocessor: while one waits, the other transfers. */
int peer_blocks(const struct peer *self, size_t vectors);

/* Enqueues an all-reduce of `count` values in `vectors` vectors, in one shot (allreduce_peer_one_shot.cu). */
enum status peer_one_shot(const struct peer *self, void *values, size_t count, size_t vectors,
                          cudaStream_t stream);

/* Functions of struct allreduce_method (allreduce_peer_join.cu). */
enum status peer_probe(int device);
enum status peer_open(const struct allreduce_request *request, void **state);
void peer_close(void *state);
uint64_t peer_memory_bytes(const void *state);

#endif
