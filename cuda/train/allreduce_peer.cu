/* The all-reduces `peer-one-shot` and `peer-two-shot`: kernels that read and write the memory of the other
 * GPUs of this machine, through CUDA IPC. `peer` uses whichever is faster for the size of the array.
 *
 * Block b of every rank processes the same slice of the array, piece by piece. It waits only for block b of
 * the other ranks, never for other blocks. For each piece, a block
 *
 *     copies its values to a slot of its own room in this rank's memory
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
#include "train/allreduce.cuh"

#include <cuda_bf16.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "core/portable.h"
#include "machine/comm.h"
#include "train/allreduce_peer.cuh"

#define THREADS             512
#define UNROLL              4    /* vectors that a thread loads before it uses the first */
#define ROOM                4096 /* vectors per slot: 64 KiB */
#define SLOTS               2
#define POLLS               1024 /* between two reads of the clock */
#define TIMEOUT_S           20

#define EAGER_THREADS       256
#define EAGER_BYTES         ((size_t)8 << 20) /* one shot is eager up to this size */
#define EAGER_BLOCK_VECTORS 512        /* vectors per block, until the number of blocks is at its limit */
#define EMPTY               UINT32_MAX /* a NaN in fp32, two NaNs in bf16 */
#define SENT_FOR_EMPTY      UINT32_C(0x7fffffff)

struct allreduce_peer_tuning allreduce_peer_tuning = {0, 0, 0, TIMEOUT_S *UINT64_C(1000000000)};

/* ---- The memory of a rank, which all ranks map ---- */

enum shot { STAGED, SUMMED, SHOTS };

/* The memory through which a block communicates with the same block of other ranks. */
struct room {
    uint4 slots[SHOTS][SLOTS][ROOM];  /* STAGED: this rank's values; SUMMED: sums, written by all ranks */
    uint4 arrivals[SLOTS][ROOM];      /* for eager_kernel(): ROOM / ranks vectors from each rank */
    uint32_t flags[SHOTS][PEERS_MAX]; /* [shot][rank]: number of the latest piece of that rank */
    uint32_t pieces, eager_pieces;    /* pieces so far; only this rank uses them */
    uint32_t failed;                  /* whether a rank did not answer; only this rank uses it */
    uint32_t unused[13];
};

struct peers {
    struct room *rooms[PEERS_MAX]; /* by rank; rooms[i][b] belongs to block b */
    int rank, ranks;
    uint64_t timeout_ns;
    int *missing; /* host memory: 1 + the rank that did not answer; 0: all answered */
};

/* ---- Formats: 16 bytes of wire data, called a vector, hold `width` values ---- */

static __device__ __forceinline__ float low(uint32_t word)
{
    return __uint_as_float(word << 16);
}

static __device__ __forceinline__ float high(uint32_t word)
{
    return __uint_as_float(word & 0xffff0000u);
}

static __device__ __forceinline__ uint32_t pack(float first, float second)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t *>(&both);
}

struct wire_f32 {
    static constexpr int width = 4;
    static __device__ __forceinline__ void unpack(const uint4 &wire, float values[width])
    {
        values[0] = __uint_as_float(wire.x), values[1] = __uint_as_float(wire.y);
        values[2] = __uint_as_float(wire.z), values[3] = __uint_as_float(wire.w);
    }
    static __device__ __forceinline__ uint4 packed(const float values[width])
    {
        return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                          __float_as_uint(values[3]));
    }
};

struct wire_bf16 {
    static constexpr int width = 8;
    static __device__ __forceinline__ void unpack(const uint4 &wire, float values[width])
    {
        values[0] = low(wire.x), values[1] = high(wire.x), values[2] = low(wire.y), values[3] = high(wire.y);
        values[4] = low(wire.z), values[5] = high(wire.z), values[6] = low(wire.w), values[7] = high(wire.w);
    }
    static __device__ __forceinline__ uint4 packed(const float values[width])
    {
        return make_uint4(pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
                          pack(values[6], values[7]));
    }
};

/* The array of a call. Its values have type VALUE; vector() and set() convert them to and from wire data. */
template <class WIRE, class VALUE> struct array {
    VALUE *values;
    size_t count;

    static constexpr bool same = sizeof(VALUE) * WIRE::width == 16; /* vectors need no conversion */

    __device__ __forceinline__ size_t vectors() const
    {
        return (count + WIRE::width - 1) / WIRE::width;
    }
    __device__ __forceinline__ bool whole(size_t i) const
    {
        return (i + 1) * WIRE::width <= count;
    }
    /* Values past the end are 0. */
    __device__ __forceinline__ uint4 vector(size_t i) const
    {
        float own[WIRE::width];
        const VALUE *from = values + i * WIRE::width;
        if (same && whole(i))
            return *reinterpret_cast<const uint4 *>(from);
        if (!same && whole(i)) {
            *reinterpret_cast<float4 *>(own) = reinterpret_cast<const float4 *>(from)[0];
            *reinterpret_cast<float4 *>(own + 4) = reinterpret_cast<const float4 *>(from)[1];
        } else
#pragma unroll
            for (int k = 0; k < WIRE::width; k++)
                own[k] = i * WIRE::width + k < count ? static_cast<float>(from[k]) : 0;
        return WIRE::packed(own);
    }
    __device__ __forceinline__ void set(size_t i, const uint4 &wire) const
    {
        float own[WIRE::width];
        VALUE *to = values + i * WIRE::width;
        if (same && whole(i)) {
            *reinterpret_cast<uint4 *>(to) = wire;
            return;
        }
        WIRE::unpack(wire, own);
        if (!same && whole(i)) {
            reinterpret_cast<float4 *>(to)[0] = *reinterpret_cast<const float4 *>(own);
            reinterpret_cast<float4 *>(to)[1] = *reinterpret_cast<const float4 *>(own + 4);
            return;
        }
#pragma unroll
        for (int k = 0; k < WIRE::width; k++)
            if (i * WIRE::width + k < count)
                to[k] = static_cast<VALUE>(own[k]);
    }
};

/* ---- Flags ---- */

static __device__ __forceinline__ void raise(uint32_t *flag, uint32_t piece)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(piece) : "memory");
}

static __device__ __forceinline__ uint32_t look(const uint32_t *flag)
{
    uint32_t piece;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(piece) : "l"(flag) : "memory");
    return piece;
}

/* Loads from memory that other GPUs write, bypassing the L1 cache. */
static __device__ __forceinline__ uint4 load_shared(const uint4 *from)
{
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

static __device__ __forceinline__ void store_shared(uint4 *to, const uint4 &value)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

static __device__ __forceinline__ uint64_t now_ns(void)
{
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

/* Waits until a flag reaches `piece`; it may already have the number of the next piece. Returns false after
 * the timeout. */
static __device__ bool wait_for(const uint32_t *flag, uint32_t piece, uint64_t timeout_ns)
{
    uint64_t begin_ns = 0;
    for (;;) {
        for (int i = 0; i < POLLS; i++)
            if ((int32_t)(look(flag) - piece) >= 0)
                return true;
        if (begin_ns == 0)
            begin_ns = now_ns();
        else if (now_ns() - begin_ns > timeout_ns)
            return false;
    }
}

/* Raises this block's flag on all ranks, after all threads' writes, and waits for the flags of all ranks. The
 * barriers extend the order of the flags to all threads of the block. Returns false if a rank did not
 * answer. */
static __device__ __forceinline__ bool meet(const struct peers &peers, enum shot shot, uint32_t piece)
{
    int peer = threadIdx.x;
    bool answered = true;
    __syncthreads();
    if (peer < peers.ranks && peer != peers.rank) {
        raise(&peers.rooms[peer][blockIdx.x].flags[shot][peers.rank], piece);
        answered = wait_for(&peers.rooms[peers.rank][blockIdx.x].flags[shot][peer], piece, peers.timeout_ns);
        if (!answered)
            *peers.missing = 1 + peer;
    }
    return __syncthreads_and(answered);
}

/* ---- A piece ---- */

/* Processes the indices i = first + threadIdx.x, first + threadIdx.x + STRIDE, ... below `end`, DEPTH at a
 * time: calls load(i) for all of them, then use(i, loaded). */
template <int STRIDE = THREADS, int DEPTH = UNROLL, class LOAD, class USE>
static __device__ __forceinline__ void each(uint32_t first, uint32_t end, LOAD load, USE use)
{
    uint32_t i = first + threadIdx.x;
    for (; i + (DEPTH - 1) * STRIDE < end; i += DEPTH * STRIDE) {
        decltype(load(i)) loaded[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
            loaded[k] = load(i + k * STRIDE);
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
            use(i + k * STRIDE, loaded[k]);
    }
    for (; i < end; i += STRIDE)
        use(i, load(i));
}

template <int RANKS> struct of_ranks {
    uint4 wire[RANKS];
};

/* Adds up one vector of all ranks in rank order. */
template <class WIRE, int RANKS>
static __device__ __forceinline__ uint4 sum_of(const struct of_ranks<RANKS> &all)
{
    float sum[WIRE::width], next[WIRE::width];
    WIRE::unpack(all.wire[0], sum);
#pragma unroll
    for (int r = 1; r < RANKS; r++) {
        WIRE::unpack(all.wire[r], next);
#pragma unroll
        for (int k = 0; k < WIRE::width; k++)
            sum[k] += next[k];
    }
    return WIRE::packed(sum);
}

template <int RANKS>
static __device__ __forceinline__ struct of_ranks<RANKS> load_all(const struct peers &peers, int slot,
                                                                  uint32_t i) {
    struct of_ranks<RANKS> all;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
        all.wire[r] = load_shared(&peers.rooms[r][blockIdx.x].slots[STAGED][slot][i]);
    return all;
}

/* Returns where the part that `rank` adds up begins in a piece of `count` vectors. */
static __device__ __forceinline__ uint32_t
part_begin(uint32_t count, int rank, int ranks)
{
    return count * (uint32_t)rank / (uint32_t)ranks;
}

/* Adds up vectors `at` to at + count - 1 over all ranks; count <= ROOM. Returns false if a rank did not
 * answer. */
template <class WIRE, class VALUE, int RANKS, bool TWO_SHOTS>
static __device__ __forceinline__ bool exchange_piece(const struct peers &peers,
                                                      const struct array<WIRE, VALUE> &array, size_t at,
                                                      uint32_t count, uint32_t piece)
{
    int slot = piece % SLOTS;
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
static __global__ void __launch_bounds__(THREADS)
    allreduce_kernel(const __grid_constant__ struct peers peers, const struct array<WIRE, VALUE> array)
{
    struct room *room = &peers.rooms[peers.rank][blockIdx.x];
    size_t vectors = array.vectors();
    size_t at = vectors * blockIdx.x / gridDim.x, end = vectors * (blockIdx.x + 1) / gridDim.x;
    uint32_t piece = room->pieces;
    bool answered = !room->failed;
    for (; answered && at < end; at += ROOM) {
        uint32_t count = end - at < ROOM ? (uint32_t)(end - at) : ROOM;
        answered = exchange_piece<WIRE, VALUE, RANKS, TWO_SHOTS>(peers, array, at, count, ++piece);
    }
    __syncthreads(); /* until all threads have read the room's members */
    if (threadIdx.x == 0) {
        room->pieces = piece;
        room->failed = !answered;
    }
}

/* ---- Eager: one shot without flags ----
 *
 * Each rank stores its values into the rooms of all other ranks. The values themselves show that they have
 * arrived: outside of the kernel, all words of `arrivals` are EMPTY, a NaN that no rank sends. A reader polls
 * a word until it is not EMPTY, and then sets it to EMPTY again. This saves the time in which a block waits
 * for its stores before it raises a flag, but polling and clearing take bandwidth.
 *
 * Each call is one piece of each block, and arrivals has two slots, for even and odd pieces. They are enough,
 * because a kernel begins after the previous kernel of this state has ended:
 *   1. A rank stores values of piece i after its kernel of piece i - 1, which received values of piece i - 1
 *      from every rank.
 *   2. A rank sends values of piece i - 1 after its kernel of piece i - 2 has ended. That kernel read and
 *      cleared the slot that piece i uses again.
 * The end of a kernel orders its accesses before those of the next one, on this GPU and, through the values
 * that arrive, on the others. Therefore the kernels of one state must not overlap, not even by programmatic
 * dependent launch. */

static __device__ __forceinline__ uint32_t not_empty(uint32_t word)
{
    return word == EMPTY ? SENT_FOR_EMPTY : word;
}

static __device__ __forceinline__ uint4 filled(const uint4 &wire)
{
    return make_uint4(not_empty(wire.x), not_empty(wire.y), not_empty(wire.z), not_empty(wire.w));
}

static __device__ __forceinline__ bool is_missing(const uint4 &wire)
{
    return wire.x == EMPTY || wire.y == EMPTY || wire.z == EMPTY || wire.w == EMPTY;
}

/* Returns the memory of rank `reader` for the values of rank `writer`. */
template <int RANKS>
static __device__ __forceinline__ uint4 *arrivals_of(const struct peers &peers, int reader, uint32_t piece,
                                                     int writer)
{
    return peers.rooms[reader][blockIdx.x].arrivals[piece % SLOTS] + writer * (ROOM / RANKS);
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

/* Number of vectors that a thread receives at a time. It decreases with the number of ranks, to limit the use
 * of registers. */
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

/* Receives vectors first, first + EAGER_THREADS, ... below `count` of all other ranks, and clears their
 * memory. Returns false if a rank did not answer. */
template <int RANKS>
static __device__ __forceinline__ bool receive(const struct peers &peers, uint32_t piece, uint32_t first,
                                               uint32_t count, struct received<RANKS> *received)
{
    const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY), zero = make_uint4(0, 0, 0, 0);
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

/* Adds up vectors `at` to at + count - 1 over all ranks without flags; count <= ROOM / RANKS. Returns false
 * if a rank did not answer. */
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
    answered = __syncthreads_and(answered); /* until all threads have read the room's members */
    if (threadIdx.x == 0) {
        room->eager_pieces = piece;
        room->failed = !answered;
    }
}

/* ---- Two shots with the update of the parameters ----
 *
 * Like two shots, but the part of a piece that a rank adds up is its chunks (exchange_shares.h). It updates
 * their parameters, and sends the new parameters in place of the sums. */

/* One update of a part of the arena. */
struct part_update {
    struct exchange_update arrays;
    size_t first, vectors; /* in vectors: begin of the part, and its size */
    struct array<wire_f32, float> gradients,
        parameters; /* from the begin of the arena to the end of the part */
};

/* The chunks of one rank in a piece. */
template <int RANKS> struct chunks {
    size_t at, first; /* vectors before the piece: of the arena, and of this rank's chunks */
    uint32_t count, rank;

    __device__ __forceinline__ chunks(size_t at, uint32_t piece_count, uint32_t rank) : at(at), rank(rank)
    {
        first = exchange_share_before(4 * at, rank, RANKS) / 4;
        count = (uint32_t)(exchange_share_before(4 * (at + piece_count), rank, RANKS) / 4 - first);
    }
    /* Returns the index in the piece of vector number `i` of the chunks. */
    __device__ __forceinline__ uint32_t in_piece(uint32_t i) const
    {
        return (uint32_t)(exchange_share_at(4 * (first + i), rank, RANKS) / 4 - at);
    }
};

static __device__ __forceinline__ void set_parameters(const struct part_update &part, size_t vector,
                                                      const uint4 &wire)
{
    float values[wire_f32::width];
    wire_f32::unpack(wire, values);
    part.parameters.set(vector, wire);
    if (part.arrays.rounded)
        static_cast<uint2 *>(part.arrays.rounded)[vector] = {pack(values[0], values[1]),
                                                             pack(values[2], values[3])};
}

template <int RANKS> struct owned {
    struct of_ranks<RANKS> gradients;
    uint4 parameters, m, v;
};

/* Updates one vector of this rank's chunks, and returns the new parameters. `own` is its index in the
 * moments. */
template <int RANKS>
static __device__ __forceinline__ uint4 step_vector(const struct part_update &part, const struct update &all,
                                                    size_t vector, size_t own, const struct owned<RANKS> &old)
{
    const struct tensor_update *groups = part.arrays.groups;
    const struct update update =
        groups ? optimizer_of(&all, groups[4 * vector / EXCHANGE_GROUP_VALUES]) : all;
    float sum[4], parameter[4], m[4], v[4];
    wire_f32::unpack(sum_of<wire_f32, RANKS>(old.gradients), sum);
    wire_f32::unpack(old.parameters, parameter);
    wire_f32::unpack(old.m, m);
    wire_f32::unpack(old.v, v);
#pragma unroll
    for (int k = 0; k < 4; k++)
        optimizer_step(&update, sum[k], &parameter[k], &m[k], &v[k]);
    reinterpret_cast<uint4 *>(part.arrays.m)[own] = wire_f32::packed(m);
    reinterpret_cast<uint4 *>(part.arrays.v)[own] = wire_f32::packed(v);
    return wire_f32::packed(parameter);
}

/* Updates this rank's chunks of a piece, and sends the new parameters to all ranks. Loads one vector at a
 * time, so that two blocks fit on a multiprocessor. */
template <int RANKS>
static __device__ __forceinline__ void update_own(const struct peers &peers, const struct part_update &part,
                                                  const struct update &all, const struct chunks<RANKS> &own,
                                                  int slot)
{
    auto load = [&](uint32_t i) {
        const uint32_t in_piece = own.in_piece(i);
        return owned<RANKS>{load_all<RANKS>(peers, slot, in_piece), part.parameters.vector(own.at + in_piece),
                            reinterpret_cast<const uint4 *>(part.arrays.m)[own.first + i],
                            reinterpret_cast<const uint4 *>(part.arrays.v)[own.first + i]};
    };
    auto use = [&](uint32_t i, const struct owned<RANKS> &old) {
        const uint32_t in_piece = own.in_piece(i);
        const uint4 wire = step_vector(part, all, own.at + in_piece, own.first + i, old);
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            if (r != peers.rank)
                peers.rooms[r][blockIdx.x].slots[SUMMED][slot][in_piece] = wire;
        set_parameters(part, own.at + in_piece, wire);
    };
    each<THREADS, 1>(0, own.count, load, use);
}

/* Updates vectors `at` to at + count - 1; count <= ROOM. Returns false if a rank did not answer. */
template <int RANKS>
static __device__ __forceinline__ bool update_piece(const struct peers &peers, const struct part_update &part,
                                                    const struct update &all, size_t at, uint32_t count,
                                                    uint32_t piece)
{
    const int slot = piece % SLOTS;
    struct room *room = &peers.rooms[peers.rank][blockIdx.x];
    uint4 *staged = room->slots[STAGED][slot];
    const uint4 *updated = room->slots[SUMMED][slot];
    each(
        0, count, [&](uint32_t i) { return part.gradients.vector(at + i); },
        [&](uint32_t i, const uint4 &wire) { staged[i] = wire; });
    if (!meet(peers, STAGED, piece))
        return false;
    update_own<RANKS>(peers, part, all, chunks<RANKS>(at, count, peers.rank), slot);
    if (!meet(peers, SUMMED, piece))
        return false;
    for (int r = 1; r < RANKS; r++) {
        const struct chunks<RANKS> others(at, count, (peers.rank + r) % RANKS);
        each(
            0, others.count, [&](uint32_t i) { return load_shared(&updated[others.in_piece(i)]); },
            [&](uint32_t i, const uint4 &wire) { set_parameters(part, at + others.in_piece(i), wire); });
    }
    return true;
}

template <int RANKS>
static __global__ void __launch_bounds__(THREADS, 2)
    update_kernel(const __grid_constant__ struct peers peers, const __grid_constant__ struct part_update part)
{
    struct room *room = &peers.rooms[peers.rank][blockIdx.x];
    const struct update all = *part.arrays.update;
    size_t at = part.first + part.vectors * blockIdx.x / gridDim.x;
    const size_t end = part.first + part.vectors * (blockIdx.x + 1) / gridDim.x;
    uint32_t piece = room->pieces;
    bool answered = !room->failed;
    for (; answered && at < end; at += ROOM) {
        const uint32_t count = end - at < ROOM ? (uint32_t)(end - at) : ROOM;
        answered = update_piece<RANKS>(peers, part, all, at, count, ++piece);
    }
    __syncthreads(); /* until all threads have read the room's members */
    if (threadIdx.x == 0) {
        room->pieces = piece;
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

struct peer {
    struct allreduce_request request;
    struct peers peers;
    int blocks_max, processors;
    bool shared;             /* other ranks may map this rank's memory */
    void *mapped[PEERS_MAX]; /* memory of other ranks */
};

/* Returns the number of blocks, so that each thread has at least one vector. Large arrays use two blocks per
 * multiprocessor: while one waits, the other transfers. */
static int blocks_for_vectors(const struct peer *self, size_t vectors)
{
    int most = vectors > ((size_t)1 << 20) ? 2 * self->processors : self->processors;
    if (allreduce_peer_tuning.blocks > 0)
        most = allreduce_peer_tuning.blocks;
    most = most < self->blocks_max ? most : self->blocks_max;
    size_t wanted = (vectors + THREADS - 1) / THREADS;
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
    bool fits = vectors * sizeof(uint4) <= limit && vectors <= blocks * (ROOM / self->peers.ranks);
    return fits ? (int)blocks : 0;
}

template <class WIRE, class VALUE, int RANKS>
static enum status launch(struct peer *self, void *values, size_t count, bool two_shots, cudaStream_t stream)
{
    const struct array<WIRE, VALUE> array = {
        static_cast<VALUE *>(values), count
    };
    size_t vectors = (count + WIRE::width - 1) / WIRE::width;
    int blocks = blocks_for_vectors(self, vectors), eager = two_shots ? 0 : eager_blocks(self, vectors);
    if (eager)
        eager_kernel<WIRE, VALUE, RANKS><<<eager, EAGER_THREADS, 0, stream>>>(self->peers, array);
    else if (two_shots)
        allreduce_kernel<WIRE, VALUE, RANKS, true><<<blocks, THREADS, 0, stream>>>(self->peers, array);
    else
        allreduce_kernel<WIRE, VALUE, RANKS, false><<<blocks, THREADS, 0, stream>>>(self->peers, array);
    CUDA_TRY_LAUNCH("allreduce_kernel");
    return STATUS_OK;
}

template <class WIRE, class VALUE>
static enum status launch_for(struct peer *self, void *values, size_t count, bool two_shots,
                              cudaStream_t stream)
{
    switch (self->peers.ranks) {
    case 1:
        return STATUS_OK;
    case 2:
        return launch<WIRE, VALUE, 2>(self, values, count, two_shots, stream);
    case 3:
        return launch<WIRE, VALUE, 3>(self, values, count, two_shots, stream);
    case 4:
        return launch<WIRE, VALUE, 4>(self, values, count, two_shots, stream);
    case 5:
        return launch<WIRE, VALUE, 5>(self, values, count, two_shots, stream);
    case 6:
        return launch<WIRE, VALUE, 6>(self, values, count, two_shots, stream);
    case 7:
        return launch<WIRE, VALUE, 7>(self, values, count, two_shots, stream);
    default:
        return launch<WIRE, VALUE, 8>(self, values, count, two_shots, stream);
    }
}

static enum status enqueue(struct peer *self, void *values, size_t count, bool two_shots, cudaStream_t stream)
{
    if (count == 0)
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

enum status allreduce_peer_update(void *state, const struct exchange_update *arrays, size_t first,
                                  size_t count, cudaStream_t stream)
{
    static void (*const kernels[])(const struct peers, const struct part_update) = {
        update_kernel<1>, update_kernel<2>, update_kernel<3>, update_kernel<4>,
        update_kernel<5>, update_kernel<6>, update_kernel<7>, update_kernel<8>};
    const struct peer *self = static_cast<const struct peer *>(state);
    const size_t vectors = (count + 3) / 4, end = first + count;
    const struct part_update part = {
        *arrays, first / 4, vectors, {arrays->gradients, end}, {arrays->parameters, end}};
    if (count == 0)
        return STATUS_OK;
    kernels[self->peers.ranks - 1]<<<blocks_for_vectors(self, vectors), THREADS, 0, stream>>>(self->peers,
                                                                                              part);
    CUDA_TRY_LAUNCH("update_kernel");
    return STATUS_OK;
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

/* ---- Joining ---- */

/* The data that a rank sends to all others when it joins. */
struct card {
    cudaIpcMemHandle_t memory;
    cudaUUID_t gpu;
    int processors;
};

static enum status peer_probe(int device)
{
    int supported;
    CUDA_TRY(cudaDeviceGetAttribute(&supported, cudaDevAttrUnifiedAddressing, device));
    return supported ? STATUS_OK
                     : status_set(STATUS_UNAVAILABLE, "device %d cannot share its memory", device);
}

static enum status open_memory(struct peer *self, struct card *card)
{
    cudaDeviceProp properties;
    CUDA_TRY(cudaSetDevice(self->request.device));
    CUDA_TRY(cudaGetDeviceProperties(&properties, self->request.device));
    self->processors = properties.multiProcessorCount;
    self->blocks_max = 2 * self->processors;
    card->gpu = properties.uuid;
    card->processors = self->processors;
    void *memory;
    size_t bytes = self->blocks_max * sizeof(struct room);
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        (void)cudaGetLastError(); /* so that the next check does not see it */
        return status_set(STATUS_UNAVAILABLE, "it needs %zu MB of GPU memory for the exchange",
                          bytes / 1000000);
    }
    self->peers.rooms[self->peers.rank] = static_cast<struct room *>(memory);
    CUDA_TRY(cudaMemset(memory, 0, bytes));
    static_assert(EMPTY == 0xffffffff, "0xff in each byte");
    CUDA_TRY(cudaMemset2D(self->peers.rooms[self->peers.rank]->arrivals, sizeof(struct room), 0xff,
                          sizeof self->peers.rooms[0]->arrivals, self->blocks_max));
    CUDA_TRY(cudaDeviceSynchronize());
    CUDA_TRY(cudaHostAlloc(&self->peers.missing, sizeof *self->peers.missing, cudaHostAllocMapped));
    *self->peers.missing = 0;
    cudaError_t error = cudaIpcGetMemHandle(&card->memory, memory);
    (void)cudaGetLastError();
    return error == cudaSuccess ? STATUS_OK
                                : status_set(STATUS_UNAVAILABLE, "this GPU cannot share its memory (%s)",
                                             cudaGetErrorString(error));
}

static enum status map_peer(struct peer *self, int rank, const struct card *card)
{
    cudaError_t error =
        cudaIpcOpenMemHandle(&self->mapped[rank], card->memory, cudaIpcMemLazyEnablePeerAccess);
    (void)cudaGetLastError(); /* so that the next check does not see it */
    self->peers.rooms[rank] = static_cast<struct room *>(self->mapped[rank]);
    return error == cudaSuccess
               ? STATUS_OK
               : status_set(
                     STATUS_UNAVAILABLE,
                     "it cannot map the memory of the GPU of rank %d (%s); all ranks must see all GPUs "
                     "(CUDA_VISIBLE_DEVICES), which must be connected by NVLink or PCIe peer access",
                     rank, cudaGetErrorString(error));
}

static enum status map_peers(struct peer *self, const struct card *cards)
{
    bool shared = false;
    for (int i = 0; i < self->peers.ranks; i++) {
        if (cards[i].processors < self->processors) /* all ranks must launch the same number of blocks */
            self->processors = cards[i].processors;
        self->blocks_max = 2 * self->processors;
        if (i == self->peers.rank)
            continue;
        TRY(map_peer(self, i, &cards[i]));
        shared |= memcmp(&cards[i].gpu, &cards[self->peers.rank].gpu, sizeof cards[i].gpu) == 0;
    }
    if (shared)
        status_warn(
            "ranks share a GPU, so their kernels take turns, and every exchange waits for a turn of each "
            "rank; start one rank per GPU");
    return STATUS_OK;
}

static enum status join(struct peer *self)
{
    struct card own = {}, cards[PEERS_MAX] = {};
    if (self->peers.ranks > PEERS_MAX)
        return status_set(STATUS_UNAVAILABLE, "it supports at most %d ranks; use --sync nccl", PEERS_MAX);
    TRY(comm_agree(
        comm_local_size() == comm_size()
            ? STATUS_OK
            : status_set(STATUS_UNAVAILABLE, "the ranks are on several machines; use --sync nccl")));
    TRY(comm_agree(open_memory(self, &own)));
    self->shared = true;
    TRY(comm_gather(&own, sizeof own, cards));
    TRY(comm_spread(cards, sizeof cards));
    return comm_agree(map_peers(self, cards));
}

static enum status peer_open(const struct allreduce_request *request, void **state)
{
    struct peer *self = static_cast<struct peer *>(calloc(1, sizeof *self));
    *state = self;
    TRY(comm_agree(self ? STATUS_OK : status_set(STATUS_FAILED, "out of memory")));
    self->request = *request;
    self->peers.rank = comm_rank();
    self->peers.ranks = comm_size();
    self->peers.timeout_ns = allreduce_peer_tuning.timeout_ns;
    return join(self);
}

static void peer_close(void *state)
{
    struct peer *self = static_cast<struct peer *>(state);
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    for (void *memory : self->mapped)
        if (memory)
            (void)cudaIpcCloseMemHandle(memory);
    if (self->shared)
        (void)comm_agree(STATUS_OK); /* from here on, no rank maps this memory */
    if (self->peers.ranks <= PEERS_MAX)
        (void)cudaFree(self->peers.rooms[self->peers.rank]);
    if (self->peers.missing)
        (void)cudaFreeHost(self->peers.missing);
    free(self);
}

static uint64_t peer_memory_bytes(const void *state)
{
    const struct peer *self = static_cast<const struct peer *>(state);
    return (uint64_t)self->blocks_max * sizeof(struct room);
}

extern "C" {
const struct allreduce_method allreduce_peer = {"peer",     peer_probe, peer_open,        enqueue_faster,
                                                peer_check, peer_close, peer_memory_bytes};
const struct allreduce_method allreduce_peer_one_shot = {
    "peer-one-shot", peer_probe, peer_open, enqueue_one_shot, peer_check, peer_close, peer_memory_bytes};
const struct allreduce_method allreduce_peer_two_shot = {
    "peer-two-shot", peer_probe, peer_open, enqueue_two_shot, peer_check, peer_close, peer_memory_bytes};
}
