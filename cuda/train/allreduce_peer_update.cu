/* The two-shot algorithm of allreduce_peer.cu, combined with the update of the parameters. A rank adds up its
 * own chunks of each piece (train/exchange.h). It updates the parameters of these chunks, and sends the new
 * parameters instead of the sums. */
#include "train/allreduce_peer.cuh"

/* One update of a part of the arena. */
struct part_update {
    struct exchange_update arrays;
    size_t first, vectors; /* start and size of the part, in vectors */
    struct array<wire_f32, float> gradients,
        parameters; /* both from the start of the arena to the end of the part */
};

/* The chunks of one rank in a piece. */
template <int RANKS> struct chunks {
    size_t at, first; /* number of vectors before the piece, in the arena and in the rank's chunks */
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
        static_cast<uint2 *>(part.arrays.rounded)[vector] = {pack<__nv_bfloat16>(values[0], values[1]),
                                                             pack<__nv_bfloat16>(values[2], values[3])};
}

template <int RANKS> struct owned {
    struct of_ranks<RANKS> gradients;
    uint4 parameters, m, v;
};

/* Updates one vector of this rank's chunks, and returns the new parameters. `vector` is its index in the
 * arena, and `own` is its index in the moments. */
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
    each<PEER_THREADS, 1>(0, own.count, load, use);
}

/* Updates vectors `at` to at + count - 1; count <= PEER_ROOM. Returns false if a rank did not answer. */
template <int RANKS>
static __device__ __forceinline__ bool update_piece(const struct peers &peers, const struct part_update &part,
                                                    const struct update &all, size_t at, uint32_t count,
                                                    uint32_t piece)
{
    const int slot = piece % PEER_SLOTS;
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
static __global__ void __launch_bounds__(PEER_THREADS, 2)
    update_kernel(const __grid_constant__ struct peers peers, const __grid_constant__ struct part_update part)
{
    struct room *room = &peers.rooms[peers.rank][blockIdx.x];
    const struct update all = *part.arrays.update;
    size_t at = part.first + part.vectors * blockIdx.x / gridDim.x;
    const size_t end = part.first + part.vectors * (blockIdx.x + 1) / gridDim.x;
    uint32_t piece = room->pieces;
    bool answered = !room->failed;
    for (; answered && at < end; at += PEER_ROOM) {
        const uint32_t count = end - at < PEER_ROOM ? (uint32_t)(end - at) : PEER_ROOM;
        answered = update_piece<RANKS>(peers, part, all, at, count, ++piece);
    }
    __syncthreads(); /* waits until all threads have read the room's members */
    if (threadIdx.x == 0) {
        room->pieces = piece;
        room->failed = !answered;
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
    kernels[self->peers.ranks - 1]<<<peer_blocks(self, vectors), PEER_THREADS, 0, stream>>>(self->peers,
                                                                                            part);
    return CUDA_LAUNCHED("update_kernel");
}
