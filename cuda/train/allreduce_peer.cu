/* The all-reduces `peer-one-shot` and `peer-two-shot`: kernels that read and write the memory of the other
 * GPUs of this machine, through CUDA IPC. `peer` chooses between them by the size of the array.
 *
 * Block b of every rank processes the same slice of the array, piece by piece. It waits only for block b of
 * the other ranks, never for other blocks. For each piece, a block
 *
 *     copies its values to a slot of its own buffer (`room`) in this rank's memory
 *     raises its flag on all ranks, and waits for the flags of all ranks
 *     one shot:  reads the slots of all ranks, adds them up in rank order, and writes the sums
 *     two shots: reads and adds only its part of the piece, and writes the sums to the rooms of all ranks;
 *                raises its second flag, waits for the second flags, and copies the sums of the other parts
 *
 * For small arrays, one shot uses eager_kernel(), which needs no flags.
 *
 * A flag is the number of the block's latest piece, counted over all calls. A room has two slots, for even
 * and odd pieces. Two slots are enough. When a block has received the flags of piece i, the same block of
 * every rank has completed piece i - 1. The block then writes piece i + 1 to the slot of piece i - 1, which
 * no rank reads any more. A rank writes sums of piece i to another rank's room only after it has received
 * that rank's flag of piece i. By then, that rank has read the sums of piece i - 2. */
#include "train/allreduce_peer.cuh"

#include <cuda_bf16.h>

#include "common/check.cuh"
#include "train/allreduce_peer_device.cuh"
#include "train/allreduce_peer_parts.cuh"

#define TIMEOUT_S           20
#define EAGER_THREADS       256
#define EAGER_BYTES         ((size_t)8 << 20) /* one shot uses eager_kernel() up to this size */
#define EAGER_BLOCK_VECTORS 512 /* vectors per block, until the number of blocks is at its limit */
#define SENT_FOR_EMPTY      UINT32_C(0x7fffffff) /* NaNs that are sent in place of PEER_EMPTY */

struct allreduce_peer_tuning allreduce_peer_tuning = {0, 0, 0, TIMEOUT_S *UINT64_C(1000000000)};

/* ---- One shot and two shots ---- */

/* Each rank adds up one part of a piece of `count` vectors. Returns the index where the part of `rank`
 * begins. */
static __device__ __forceinline__ uint32_t part_begin(uint32_t count, int rank, int ranks)
{
    return count * (uint32_t)rank / (uint32_t)ranks;
}

/* Adds up vectors `at` to at + count - 1 over all ranks; count <= PEER_ROOM. Returns false if a rank did not
 * answer. */
template <class WIRE, class VALUE, int RANKS, bool TWO_SHOTS>
static __device__ __forceinline__ bool exchange_piece(const struct peers &peers,
                                                      const struct array<WIRE, VALUE> &array, size_t at,
                                                      uint32_t count, uint32_t piece)
{
    int slot = piece % PEER_SLOTS;
    struct room *room = &peers.rooms[peers.rank][blockIdx.x];
    uint4 *staged = room->slots[STAGED][slot];
    const uint4 *summed = room->slots[SUMMED][slot];
    each(
        0, count, [&](uint32_t i) { return array.vector(at + i); },
        [&](uint32_t i, const uint4 &wire) { staged[i] = wire; });
    if (!meet(peers, STAGED, piece))
        return false;
    uint32_t begin = TWO_SHOTS ? part_begin(count, peers.rank, RANKS) : 0;
    uint32_t end = TWO_SHOTS ? part_begin(count, peers.rank + 1, RANKS) : count;
    each(
        begin, end, [&](uint32_t i) { return load_all<RANKS>(peers, slot, i); },
        [&](uint32_t i, const struct of_ranks<RANKS> &all) {
            uint4 sum = sum_of<WIRE, RANKS>(all);
            if (TWO_SHOTS)
#pragma unroll
                for (int r = 0; r < RANKS; r++)
                    if (r != peers.rank)
                        peers.rooms[r][blockIdx.x].slots[SUMMED][slot][i] = sum;
            array.set(at + i, sum);
        });
    if (!TWO_SHOTS)
        return true;
    if (!meet(peers, SUMMED, piece))
        return false;
    auto copy = [&](uint32_t first, uint32_t last) {
        each(
            first, last, [&](uint32_t i) { return load_shared(&summed[i]); },
            [&](uint32_t i, const uint4 &sum) { array.set(at + i, sum); });
    };
    copy(0, begin);
    copy(end, count);
    return true;
}

template <class WIRE, class VALUE, int RANKS, bool TWO_SHOTS>
static __global__ void __launch_bounds__(PEER_THREADS)
    allreduce_kernel(const __grid_constant__ struct peers peers, const struct array<WIRE, VALUE> array)
{
    struct room *room = &peers.rooms[peers.rank][blockIdx.x];
    size_t vectors = array.vectors();
    size_t at = vectors * blockIdx.x / gridDim.x, end = vectors * (blockIdx.x + 1) / gridDim.x;
    uint32_t piece = room->pieces;
    bool answered = !room->failed;
    for (; answered && at < end; at += PEER_ROOM) {
        uint32_t count = end - at < PEER_ROOM ? (uint32_t)(end - at) : PEER_ROOM;
        answered = exchange_piece<WIRE, VALUE, RANKS, TWO_SHOTS>(peers, array, at, count, ++piece);
    }
    __syncthreads(); /* waits until all threads have read the room's members */
    if (threadIdx.x == 0) {
        room->pieces = piece;
        room->failed = !answered;
    }
}

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

/* Returns the maximum size, in bytes of wire data, of arrays that `peer` sums in one shot. With two ranks,
 * both algorithms transfer the same number of bytes. With more ranks, two shots transfer fewer bytes, but
 * their second wait for flags takes time. */
static size_t one_shot_bytes(int ranks)
{
    return ranks <= 2 ? SIZE_MAX : (size_t)256 << 10;
}

int peer_blocks(const struct peer *self, size_t vectors)
{
    int most = vectors > ((size_t)1 << 20) ? 2 * self->processors : self->processors;
    if (allreduce_peer_tuning.blocks > 0)
        most = allreduce_peer_tuning.blocks;
    most = most < self->blocks_max ? most : self->blocks_max;
    size_t wanted = (vectors + PEER_THREADS - 1) / PEER_THREADS;
    return wanted < (size_t)most ? (int)wanted : most;
}

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

template <class WIRE, class VALUE, int RANKS>
static enum status launch(struct peer *self, void *values, size_t count, bool two_shots, cudaStream_t stream)
{
    const struct array<WIRE, VALUE> array = {
        static_cast<VALUE *>(values), count
    };
    size_t vectors = (count + WIRE::width - 1) / WIRE::width;
    int blocks = peer_blocks(self, vectors), eager = two_shots ? 0 : eager_blocks(self, vectors);
    if (eager) {
        eager_kernel<WIRE, VALUE, RANKS><<<eager, EAGER_THREADS, 0, stream>>>(self->peers, array);
        CUDA_TRY_LAUNCH("eager_kernel");
        return STATUS_OK;
    }
    if (two_shots)
        allreduce_kernel<WIRE, VALUE, RANKS, true><<<blocks, PEER_THREADS, 0, stream>>>(self->peers, array);
    else
        allreduce_kernel<WIRE, VALUE, RANKS, false><<<blocks, PEER_THREADS, 0, stream>>>(self->peers, array);
    CUDA_TRY_LAUNCH("allreduce_kernel");
    return STATUS_OK;
}

/* Launches the kernel for the number of ranks, which is RANKS or more. */
template <class WIRE, class VALUE, int RANKS = 2>
static enum status launch_for(struct peer *self, void *values, size_t count, bool two_shots,
                              cudaStream_t stream)
{
    if constexpr (RANKS < PEERS_MAX)
        if (self->peers.ranks > RANKS)
            return launch_for<WIRE, VALUE, RANKS + 1>(self, values, count, two_shots, stream);
    return launch<WIRE, VALUE, RANKS>(self, values, count, two_shots, stream);
}

static enum status enqueue(struct peer *self, void *values, size_t count, bool two_shots, cudaStream_t stream)
{
    if (count == 0 || self->peers.ranks == 1)
        return STATUS_OK;
    switch (self->request.type) {
    case ALLREDUCE_BF16:
        return launch_for<struct wire_bf16, __nv_bfloat16>(self, values, count, two_shots, stream);
    case ALLREDUCE_F32_AS_BF16:
        return launch_for<struct wire_bf16, float>(self, values, count, two_shots, stream);
    default:
        return launch_for<struct wire_f32, float>(self, values, count, two_shots, stream);
    }
}

static enum status enqueue_one_shot(void *state, void *values, size_t count, cudaStream_t stream)
{
    return enqueue(static_cast<struct peer *>(state), values, count, false, stream);
}

static enum status enqueue_two_shot(void *state, void *values, size_t count, cudaStream_t stream)
{
    return enqueue(static_cast<struct peer *>(state), values, count, true, stream);
}

static enum status enqueue_faster(void *state, void *values, size_t count, cudaStream_t stream)
{
    struct peer *self = static_cast<struct peer *>(state);
    size_t bytes = count * (self->request.type == ALLREDUCE_F32 ? 4 : 2);
    size_t limit = allreduce_peer_tuning.one_shot_bytes ? allreduce_peer_tuning.one_shot_bytes
                                                        : one_shot_bytes(self->peers.ranks);
    return enqueue(self, values, count, bytes > limit, stream);
}

static enum status peer_check(void *state)
{
    const struct peer *self = static_cast<const struct peer *>(state);
    int missing = *static_cast<volatile int *>(self->peers.missing);
    return missing == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "rank %d did not answer within %.0f s in an exchange between GPUs; look for "
                            "its message, or use --sync nccl if this repeats",
                            missing - 1, 1e-9 * (double)self->peers.timeout_ns);
}

extern "C" {
const struct allreduce_method allreduce_peer = {"peer",     peer_probe, peer_open,        enqueue_faster,
                                                peer_check, peer_close, peer_memory_bytes};
const struct allreduce_method allreduce_peer_one_shot = {
    "peer-one-shot", peer_probe, peer_open, enqueue_one_shot, peer_check, peer_close, peer_memory_bytes};
const struct allreduce_method allreduce_peer_two_shot = {
    "peer-two-shot", peer_probe, peer_open, enqueue_two_shot, peer_check, peer_close, peer_memory_bytes};
}
