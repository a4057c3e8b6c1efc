/* The all-reduces of allreduce_peer.cu in one shot: with flags, and for small arrays without. */
#include "train/allreduce_peer.cuh"

#define EAGER_THREADS       256
#define EAGER_BYTES         ((size_t)8 << 20) /* one shot uses eager_kernel() up to this size */
#define EAGER_BLOCK_VECTORS 512 /* vectors per block, until the number of blocks is at its limit */
#define SENT_FOR_EMPTY      UINT32_C(0x7fffffff) /* NaNs that are sent in place of PEER_EMPTY */

/* ---- Eager: one shot without flags ----
 *
 * Each rank stores its values into the rooms of all other ranks. The values themselves show that they have
 * arrived: outside of the kernel, all words of `arrivals` are PEER_EMPTY, a NaN that no rank sends. A reader
 * polls a word until it is not PEER_EMPTY, and then sets it to PEER_EMPTY again. This saves the time in which
 * a block waits for its stores before it raises a flag, but polling and clearing take bandwidth.
 *
 * In each call, a block processes one piece. `arrivals` has two slots, for even and odd pieces. Two slots are
 * enough, because a kernel begins after the previous kernel of this state has ended:
 *   1. A rank stores values of piece i after its kernel of piece i - 1, which received values of piece i - 1
 *      from every rank.
 *   2. A rank sends values of piece i - 1 after its kernel of piece i - 2 has ended. That kernel read and
 *      cleared the slot that piece i uses again.
 * The end of a kernel orders its accesses before those of the next kernel. This also orders them on the other
 * GPUs, through the values that arrive there. Therefore the kernels of one state must not overlap, not even
 * by programmatic dependent launch. */

static __device__ __forceinline__ uint32_t not_empty(uint32_t word)
{
    return word == PEER_EMPTY ? SENT_FOR_EMPTY : word;
}

static __device__ __forceinline__ uint4 filled(const uint4 &wire)
{
    return make_uint4(not_empty(wire.x), not_empty(wire.y), not_empty(wire.z), not_empty(wire.w));
}

static __device__ __forceinline__ bool is_missing(const uint4 &wire)
{
    return wire.x == PEER_EMPTY || wire.y == PEER_EMPTY || wire.z == PEER_EMPTY || wire.w == PEER_EMPTY;
}

/* Returns the memory of rank `reader` for the values of rank `writer`. */
template <int RANKS>
static __device__ __forceinline__ uint4 *arrivals_of(const struct peers &peers, int reader, uint32_t piece,
                                                     int writer)
{
    return peers.rooms[reader][blockIdx.x].arrivals[piece % PEER_SLOTS] + writer * (PEER_ROOM / RANKS);
}

/* Stores a vector into the rooms of all other ranks. Each rank begins with a different reader, so that no
 * rank is the first target of all others. */
template <int RANKS>
static __device__ __forceinline__ void send(const struct peers &peers, uint32_t piece, uint32_t i,
                                            const uint4 &wire)
{
    const uint4 sent = filled(wire);
#pragma unroll
    for (int r = 1; r < RANKS; r++)
        store_shared(arrivals_of<RANKS>(peers, (peers.rank + r) % RANKS, piece, peers.rank) + i, sent);
}

/* Number of vectors that a thread receives at a time. It is smaller for more ranks, to limit the use of
 * registers. */
template <int RANKS> static constexpr int receive_count = RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1;

template <int RANKS> struct received {
    uint4 own[receive_count<RANKS>];
    struct of_ranks<RANKS> vectors[receive_count<RANKS>]; /* including those of this rank */
};

/* Loads the vectors that have not arrived yet. Returns a rank whose values are still missing, or -1. */
template <int RANKS>
static __device__ __forceinline__ int poll(const struct peers &peers, uint32_t piece, uint32_t first,
                                           struct received<RANKS> *received)
{
    int late = -1;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
#pragma unroll
        for (int k = 0; k < receive_count<RANKS>; k++)
            if (is_missing(received->vectors[k].wire[r]))
                received->vectors[k].wire[r] =
                    load_shared(arrivals_of<RANKS>(peers, peers.rank, piece, r) + first + k * EAGER_THREADS);
#pragma unroll
    for (int r = 0; r < RANKS; r++)
#pragma unroll
        for (int k = 0; k < receive_count<RANKS>; k++)
            if (is_missing(received->vectors[k].wire[r]))
                late = r;
    return late;
}

/* Receives up to receive_count vectors of each other rank (first, first + EAGER_THREADS, ... below `count`),
 * and clears their memory. Returns false if a rank did not answer. */
template <int RANKS>
static __device__ __forceinline__ bool receive(const struct peers &peers, uint32_t piece, uint32_t first,
                                               uint32_t count, struct received<RANKS> *received)
{
    const uint4 empty = make_uint4(PEER_EMPTY, PEER_EMPTY, PEER_EMPTY, PEER_EMPTY),
                zero = make_uint4(0, 0, 0, 0);
    uint64_t begin_ns = 0;
    int late;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
#pragma unroll
        for (int k = 0; k < receive_count<RANKS>; k++)
            received->vectors[k].wire[r] = r == peers.rank                     ? received->own[k]
                                           : first + k * EAGER_THREADS < count ? empty
                                                                               : zero;
    for (uint32_t polls = 1; (late = poll<RANKS>(peers, piece, first, received)) >= 0; polls++) {
        if (polls % POLLS != 0)
            continue;
        if (begin_ns == 0)
            begin_ns = now_ns();
        else if (now_ns() - begin_ns > peers.timeout_ns) {
            *peers.missing = 1 + late;
            return false;
        }
    }
#pragma unroll
    for (int r = 0; r < RANKS; r++)
#pragma unroll
        for (int k = 0; k < receive_count<RANKS>; k++)
            if (r != peers.rank && first + k * EAGER_THREADS < count)
                arrivals_of<RANKS>(peers, peers.rank, piece, r)[first + k * EAGER_THREADS] = empty;
    return true;
}

/* Adds up vectors `at` to at + count - 1 over all ranks without flags; count <= PEER_ROOM / RANKS. Returns
 * false if a rank did not answer. */
template <class WIRE, class VALUE, int RANKS>
static __device__ __forceinline__ bool exchange_eagerly(const struct peers &peers,
                                                        const struct array<WIRE, VALUE> &array, size_t at,
                                                        uint32_t count, uint32_t piece)
{
    each<EAGER_THREADS>(
        0, count, [&](uint32_t i) { return array.vector(at + i); },
        [&](uint32_t i, const uint4 &wire) { send<RANKS>(peers, piece, i, wire); });
    for (uint32_t first = threadIdx.x; first < count; first += receive_count<RANKS> * EAGER_THREADS) {
        struct received<RANKS> received;
#pragma unroll
        for (int k = 0; k < receive_count<RANKS>; k++) {
            const uint32_t i = first + k * EAGER_THREADS;
            received.own[k] = i < count ? filled(array.vector(at + i)) : make_uint4(0, 0, 0, 0);
        }
        if (!receive<RANKS>(peers, piece, first, count, &received))
            return false;
#pragma unroll
        for (int k = 0; k < receive_count<RANKS>; k++)
            if (first + k * EAGER_THREADS < count)
                array.set(at + first + k * EAGER_THREADS, sum_of<WIRE, RANKS>(received.vectors[k]));
    }
    return true;
}

template <class WIRE, class VALUE, int RANKS>
static __global__ void __launch_bounds__(EAGER_THREADS, 2)
    eager_kernel(const __grid_constant__ struct peers peers, const struct array<WIRE, VALUE> array)
{
    struct room *room = &peers.rooms[peers.rank][blockIdx.x];
    size_t vectors = array.vectors();
    size_t at = vectors * blockIdx.x / gridDim.x, end = vectors * (blockIdx.x + 1) / gridDim.x;
    uint32_t piece = room->eager_pieces + 1;
    bool answered =
        !room->failed && exchange_eagerly<WIRE, VALUE, RANKS>(peers, array, at, (uint32_t)(end - at), piece);
    answered = __syncthreads_and(answered); /* also waits until all threads have read the room's members */
    if (threadIdx.x == 0) {
        room->eager_pieces = piece;
        room->failed = !answered;
    }
}

/* ---- Calls ---- */

/* Returns the number of blocks of eager_kernel(), or 0 if the array is too large for it. */
static int eager_blocks(const struct peer *self, size_t vectors)
{
    size_t limit = allreduce_peer_tuning.eager_bytes ? allreduce_peer_tuning.eager_bytes : EAGER_BYTES;
    size_t most = allreduce_peer_tuning.blocks > 0 && allreduce_peer_tuning.blocks < self->blocks_max
                      ? allreduce_peer_tuning.blocks
                      : self->blocks_max;
    size_t wanted = (vectors + EAGER_BLOCK_VECTORS - 1) / EAGER_BLOCK_VECTORS;
    size_t blocks = wanted < most ? wanted : most;
    bool fits = vectors * sizeof(uint4) <= limit && vectors <= blocks * (PEER_ROOM / self->peers.ranks);
    return fits ? (int)blocks : 0;
}

struct eagerly {
    template <class WIRE, class VALUE, int RANKS>
    static void launch(const struct peer *self, const struct array<WIRE, VALUE> &array, int blocks,
                       cudaStream_t stream)
    {
        eager_kernel<WIRE, VALUE, RANKS><<<blocks, EAGER_THREADS, 0, stream>>>(self->peers, array);
    }
};

struct with_flags {
    template <class WIRE, class VALUE, int RANKS>
    static void launch(const struct peer *self, const struct array<WIRE, VALUE> &array, int blocks,
                       cudaStream_t stream)
    {
        allreduce_kernel<WIRE, VALUE, RANKS, false><<<blocks, PEER_THREADS, 0, stream>>>(self->peers, array);
    }
};

enum status peer_one_shot(const struct peer *self, void *values, size_t count, size_t vectors,
                          cudaStream_t stream)
{
    int eager = eager_blocks(self, vectors);
    if (eager) {
        launch_for<eagerly>(self, values, count, eager, stream);
        CUDA_TRY_LAUNCH("eager_kernel");
        return STATUS_OK;
    }
    launch_for<with_flags>(self, values, count, peer_blocks(self, vectors), stream);
    return CUDA_LAUNCHED("allreduce_kernel");
}
