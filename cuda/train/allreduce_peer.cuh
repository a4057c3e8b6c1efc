/* Shared by the files of the `peer` methods, which compute all-reduces through the memory of other GPUs:
 * allreduce_peer.cu (which describes the algorithms), allreduce_peer_one_shot.cu and
 * allreduce_peer_update.cu. Types, formats of the data on the wire, flags, and sums over the ranks. */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH

#include <cuda_bf16.h>

#include "train/exchange.h"
#include "common/check.cuh"
#include "train/allreduce.cuh"
#include "train/mma.cuh"

#define PEERS_MAX    8 /* maximum number of ranks */
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

#define UNROLL 4    /* vectors that a thread loads before it uses the first */
#define POLLS  1024 /* polls between two reads of the clock */

/* ---- Formats: 16 bytes of wire data, called a vector, hold `width` values ---- */

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
        values[0] = bf16_low(wire.x), values[1] = bf16_high(wire.x), values[2] = bf16_low(wire.y),
        values[3] = bf16_high(wire.y);
        values[4] = bf16_low(wire.z), values[5] = bf16_high(wire.z), values[6] = bf16_low(wire.w),
        values[7] = bf16_high(wire.w);
    }
    static __device__ __forceinline__ uint4 packed(const float values[width])
    {
        return make_uint4(
            pack<__nv_bfloat16>(values[0], values[1]), pack<__nv_bfloat16>(values[2], values[3]),
            pack<__nv_bfloat16>(values[4], values[5]), pack<__nv_bfloat16>(values[6], values[7]));
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
template <int STRIDE = PEER_THREADS, int DEPTH = UNROLL, class LOAD, class USE>
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

/* ---- One shot and two shots ---- */

/* Each rank adds up one part of a piece of `count` vectors. Returns the index where the part of `rank`
 * begins. */
static __device__ __forceinline__ uint32_t
part_begin(uint32_t count, int rank, int ranks)
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

/* ---- Choosing the kernel ---- */

/* Calls Kernels::launch<WIRE, VALUE, ranks>(). The number of ranks is RANKS or more. */
template <class Kernels, class WIRE, class VALUE, int RANKS = 2, class... More>
static void launch_for_ranks(const struct peer *self, const struct array<WIRE, VALUE> &array, More... more)
{
    if constexpr (RANKS < PEERS_MAX)
        if (self->peers.ranks > RANKS)
            return launch_for_ranks<Kernels, WIRE, VALUE, RANKS + 1>(self, array, more...);
    Kernels::template launch<WIRE, VALUE, RANKS>(self, array, more...);
}

/* Launches the kernel of `Kernels` for the types of the request and the number of ranks. */
template <class Kernels, class... More>
static void launch_for(const struct peer *self, void *values, size_t count, More... more)
{
    __nv_bfloat16 *halves = static_cast<__nv_bfloat16 *>(values);
    float *floats = static_cast<float *>(values);
    if (self->request.type == ALLREDUCE_BF16)
        launch_for_ranks<Kernels, wire_bf16, __nv_bfloat16>(self, {halves, count}, more...);
    else if (self->request.type == ALLREDUCE_F32_AS_BF16)
        launch_for_ranks<Kernels, wire_bf16, float>(self, {floats, count}, more...);
    else
        launch_for_ranks<Kernels, wire_f32, float>(self, {floats, count}, more...);
}

#endif
