/* The host side of the `peer` methods: each rank allocates its memory, and maps that of the other ranks. */
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "core/portable.h"
#include "machine/comm.h"
#include "train/allreduce_peer_parts.cuh"

/* The data that a rank sends to all others when it joins. */
struct card {
    cudaIpcMemHandle_t memory;
    cudaUUID_t gpu;
    int processors;
};

enum status peer_probe(int device)
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
    cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
        return status_set(STATUS_EXHAUSTED,
                          "it needs %zu MB of free GPU memory for the exchange; free memory on this GPU",
                          bytes / 1000000);
    }
    CUDA_TRY(error);
    self->peers.rooms[self->peers.rank] = static_cast<struct room *>(memory);
    CUDA_TRY(cudaMemset(memory, 0, bytes));
    static_assert(PEER_EMPTY == 0xffffffff, "0xff in each byte");
    CUDA_TRY(cudaMemset2D(self->peers.rooms[self->peers.rank]->arrivals, sizeof(struct room), 0xff,
                          sizeof self->peers.rooms[0]->arrivals, self->blocks_max));
    CUDA_TRY(cudaDeviceSynchronize());
    CUDA_TRY(cudaHostAlloc(&self->peers.missing, sizeof *self->peers.missing, cudaHostAllocMapped));
    *self->peers.missing = 0;
    error = cudaIpcGetMemHandle(&card->memory, memory);
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

enum status peer_open(const struct allreduce_request *request, void **state)
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

void peer_close(void *state)
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

uint64_t peer_memory_bytes(const void *state)
{
    const struct peer *self = static_cast<const struct peer *>(state);
    return (uint64_t)self->blocks_max * sizeof(struct room);
}
