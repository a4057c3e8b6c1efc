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
 * For small arrays, one shot uses eager_kernel(), which needs no flags. The kernels of one shot are in
 * allreduce_peer_one_shot.cu, because compiling all 63 kernels in one file takes half a minute.
 *
 * A flag is the number of the block's latest piece, counted over all calls. A room has two slots, for even
 * and odd pieces. Two slots are enough. When a block has received the flags of piece i, the same block of
 * every rank has completed piece i - 1. The block then writes piece i + 1 to the slot of piece i - 1, which
 * no rank reads any more. A rank writes sums of piece i to another rank's room only after it has received
 * that rank's flag of piece i. By then, that rank has read the sums of piece i - 2. */
#include "train/allreduce_peer.cuh"

#include <stdlib.h>
#include <string.h>

#include "core/portable.h"
#include "machine/comm.h"

#define TIMEOUT_S 20

struct allreduce_peer_tuning allreduce_peer_tuning = {0, 0, 0, TIMEOUT_S *UINT64_C(1000000000)};

/* ---- Joining: each rank allocates its memory, and maps that of the other ranks ---- */

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
    return supported
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "device %d has no unified addressing, so it cannot share its memory", device);
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
    enum status allocated = CUDA_STATUS(cudaMalloc(&memory, bytes));
    if (allocated == STATUS_EXHAUSTED)
        return status_set(STATUS_EXHAUSTED,
                          "it needs %zu MB of free GPU memory for the exchange; free memory on this GPU",
                          bytes / 1000000);
    TRY(allocated);
    self->peers.rooms[self->peers.rank] = static_cast<struct room *>(memory);
    CUDA_TRY(cudaMemset(memory, 0, bytes));
    static_assert(PEER_EMPTY == 0xffffffff, "0xff in each byte");
    CUDA_TRY(cudaMemset2D(self->peers.rooms[self->peers.rank]->arrivals, sizeof(struct room), 0xff,
                          sizeof self->peers.rooms[0]->arrivals, self->blocks_max));
    CUDA_TRY(cudaDeviceSynchronize());
    CUDA_TRY(cudaHostAlloc(&self->peers.missing, sizeof *self->peers.missing, cudaHostAllocMapped));
    *self->peers.missing = 0;
    const cudaError_t error = cudaIpcGetMemHandle(&card->memory, memory);
    (void)cudaGetLastError();
    return error == cudaSuccess ? STATUS_OK
                                : status_set(STATUS_UNAVAILABLE, "this GPU cannot share its memory (%s)",
                                             cudaGetErrorString(error));
}

static enum status map_peer(struct peer *self, int rank, const struct card *card)
{
    cudaError_t error =
        cudaIpcOpenMemHandle(&self->mapped[rank], card->memory, cudaIpcMemLazyEnablePeerAccess);
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
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
    TRY(comm_agree(ALLOCATED(self, "out of memory")));
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
    (void)cudaFreeHost(self->peers.missing);
    free(self);
}

static uint64_t peer_memory_bytes(const void *state)
{
    const struct peer *self = static_cast<const struct peer *>(state);
    return (uint64_t)self->blocks_max * sizeof(struct room);
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

struct in_two_shots {
    template <class WIRE, class VALUE, int RANKS>
    static void launch(const struct peer *self, const struct array<WIRE, VALUE> &array, int blocks,
                       cudaStream_t stream)
    {
        allreduce_kernel<WIRE, VALUE, RANKS, true><<<blocks, PEER_THREADS, 0, stream>>>(self->peers, array);
    }
};

static enum status enqueue(struct peer *self, void *values, size_t count, bool two_shots, cudaStream_t stream)
{
    const size_t width = self->request.type == ALLREDUCE_F32 ? wire_f32::width : wire_bf16::width;
    const size_t vectors = (count + width - 1) / width;
    if (count == 0 || self->peers.ranks == 1)
        return STATUS_OK;
    if (!two_shots)
        return peer_one_shot(self, values, count, vectors, stream);
    launch_for<in_two_shots>(self, values, count, peer_blocks(self, vectors), stream);
    return CUDA_LAUNCHED("allreduce_kernel");
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
