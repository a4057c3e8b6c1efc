/* The methods `peer`, `peer-one-shot` and `peer-two-shot`; allreduce_peer.cuh has their kernels. Each rank
 * allocates one area with its flags, inbox and results. CUDA IPC maps it into the other processes. */
#include "train/allreduce_peer.cuh"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "machine/comm.h"
#include "machine/device.h"
#include "train/allreduce.cuh"
#include "train/allreduce_parts.cuh"

#define TIMEOUT_S       20
#define BYTES_PER_BLOCK ((size_t)16 << 10) /* below the largest number of blocks */
#define ALIGNMENT       16

enum peer_kind { PEER_AUTO, PEER_ONE_SHOT, PEER_TWO_SHOT };

typedef void peer_kernel(struct peer_links, struct peer_call);
typedef void peer_step_kernel(struct peer_links, struct peer_call, struct peer_consume_nothing);

/* Kernels of one format and number of ranks. */
struct peer_kernels {
    peer_kernel *one_shot;
    peer_step_kernel *two_shot;
    uint32_t values_per_unit;
};

/* What each rank sends to all others when it joins. */
struct peer_member {
    struct rank_location location;
    cudaIpcMemHandle_t area;
    uint32_t blocks_resident; /* blocks that run on this GPU at the same time */
};

struct peer_state {
    enum peer_kind kind;
    size_t count_max;
    struct peer_kernels kernels;
    struct peer_links links;
    uint32_t ranks, channels;
    unsigned char *areas[PEER_RANKS_MAX]; /* the own one, and those of other ranks; NULL: not mapped */
    uint32_t *own;                        /* steps, failed; other ranks do not access it */
    uint32_t *late_on_host;
    uint64_t memory_bytes;
    bool joined;
    struct peer_member members[PEER_RANKS_MAX];
};

struct allreduce_peer_tuning allreduce_peer_tuning = {TIMEOUT_S, 0, -1};

/* ---- Kernels ---- */

template <class Format, int RANKS>
static constexpr struct peer_kernels kernels_of = {
    one_shot_kernel<Format, RANKS>, two_shot_kernel<Format, RANKS, peer_consume_nothing>, Format::UNIT};

template <class Format> static struct peer_kernels kernels_for(uint32_t ranks)
{
    static const struct peer_kernels kernels[PEER_RANKS_MAX] = {
        kernels_of<Format, 1>, kernels_of<Format, 2>, kernels_of<Format, 3>, kernels_of<Format, 4>,
        kernels_of<Format, 5>, kernels_of<Format, 6>, kernels_of<Format, 7>, kernels_of<Format, 8>};
    return kernels[ranks - 1];
}

static struct peer_kernels find_kernels(enum allreduce_type type, uint32_t ranks)
{
    return type == ALLREDUCE_F32    ? kernels_for<peer_format_f32>(ranks)
           : type == ALLREDUCE_BF16 ? kernels_for<peer_format_bf16>(ranks)
                                    : kernels_for<peer_format_f32_as_bf16>(ranks);
}

/* Queries how many blocks of either kernel run at the same time. This also loads the kernels, which would
 * otherwise happen during the first call. */
static enum status count_resident(const struct peer_kernels *kernels, int device, uint32_t *blocks)
{
    int multiprocessors, one_shot, two_shot;
    CUDA_TRY(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&one_shot, kernels->one_shot, PEER_THREADS, 0));
    CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&two_shot, kernels->two_shot, PEER_THREADS, 0));
    *blocks = (uint32_t)(multiprocessors * (one_shot < two_shot ? one_shot : two_shot));
    return *blocks > 0 ? STATUS_OK : status_set(STATUS_FAILED, "no block of the all-reduce fits on the GPU");
}

/* ---- Memory ---- */

/* The layout of an area: flags, inbox, results. */
#define FLAG_BYTES ((size_t)PEER_STAGES * PEER_CHANNELS_MAX * PEER_RANKS_MAX * sizeof(uint32_t))

static size_t slots_bytes(const struct peer_state *self)
{
    return (size_t)PEER_CHANNELS_MAX * 2 * self->ranks * self->links.slot_units * PEER_UNIT_BYTES;
}

static void place_area(struct peer_state *self, uint32_t rank)
{
    unsigned char *area = self->areas[rank];
    self->links.flags[rank] = reinterpret_cast<uint32_t *>(area);
    self->links.inbox[rank] = reinterpret_cast<uint4 *>(area + FLAG_BYTES);
    self->links.results[rank] = reinterpret_cast<uint4 *>(area + FLAG_BYTES + slots_bytes(self));
}

static enum status allocate(void **memory, size_t bytes)
{
    cudaError_t error = cudaMalloc(memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
        return status_set(STATUS_USAGE, "out of GPU memory for an all-reduce, which needs %.0f MB",
                          1e-6 * (double)bytes);
    }
    return cuda_status(error, "cudaMalloc", __FILE__, __LINE__);
}

static enum status allocate_all(struct peer_state *self)
{
    const size_t area_bytes = FLAG_BYTES + 2 * slots_bytes(self);
    const size_t own_bytes = (PEER_CHANNELS_MAX + 1) * sizeof(uint32_t);
    void *area, *own, *late;
    TRY(allocate(&area, area_bytes));
    self->areas[self->links.rank] = static_cast<unsigned char *>(area);
    TRY(allocate(&own, own_bytes));
    self->own = static_cast<uint32_t *>(own);
    self->memory_bytes = area_bytes + own_bytes;
    CUDA_TRY(cudaHostAlloc(reinterpret_cast<void **>(&self->late_on_host), sizeof *self->late_on_host,
                           cudaHostAllocMapped));
    *self->late_on_host = 0;
    CUDA_TRY(cudaHostGetDevicePointer(&late, self->late_on_host, 0));
    CUDA_TRY(cudaMemset(area, 0, FLAG_BYTES));
    CUDA_TRY(cudaMemset(own, 0, own_bytes));
    CUDA_TRY(cudaDeviceSynchronize()); /* other ranks may write flags as soon as the ranks have joined */
    self->links.steps = self->own;
    self->links.failed = self->own + PEER_CHANNELS_MAX;
    self->links.late = static_cast<uint32_t *>(late);
    place_area(self, self->links.rank);
    return STATUS_OK;
}

/* ---- Joining ---- */

static enum status prepare(struct peer_state *self, const struct allreduce_request *request)
{
    struct peer_member *mine = &self->members[self->links.rank];
    if (!(allreduce_peer_tuning.timeout_s > 0))
        return status_set(STATUS_USAGE, "the timeout of an all-reduce must be positive");
    CUDA_TRY(cudaSetDevice(request->device));
    TRY(rank_location_find(request->device, &mine->location));
    TRY(count_resident(&self->kernels, request->device, &mine->blocks_resident));
    TRY(allocate_all(self));
    cudaError_t error =
        self->ranks == 1 ? cudaSuccess : cudaIpcGetMemHandle(&mine->area, self->areas[self->links.rank]);
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    return error == cudaSuccess
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "this GPU or system cannot share GPU memory between processes (CUDA IPC): %s",
                            cudaGetErrorString(error));
}

/* Checks that this rank's GPU can access the memory of another rank's GPU. Sets `*visible` to false if
 * CUDA_VISIBLE_DEVICES hides that GPU, in which case only mapping the memory shows whether it works. */
static enum status check_access(int device, const struct peer_member *other, uint32_t rank, bool *visible)
{
    int other_device, possible = 0;
    cudaError_t error = cudaDeviceGetByPCIBusId(&other_device, other->location.bus_id);
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    *visible = error == cudaSuccess;
    if (!*visible || other_device == device)
        return STATUS_OK;
    CUDA_TRY(cudaDeviceCanAccessPeer(&possible, device, other_device));
    return possible ? STATUS_OK
                    : status_set(STATUS_UNAVAILABLE,
                                 "its GPU cannot access the memory of the GPU of rank %u (neither NVLink nor "
                                 "PCIe peer access); use nccl or mpi",
                                 rank);
}

static enum status map_area(struct peer_state *self, int device, uint32_t rank)
{
    bool visible;
    TRY(check_access(device, &self->members[rank], rank, &visible));
    void *area;
    cudaError_t error = cudaIpcOpenMemHandle(&area, self->members[rank].area, cudaIpcMemLazyEnablePeerAccess);
    if (error == cudaSuccess) {
        self->areas[rank] = static_cast<unsigned char *>(area);
        place_area(self, rank);
        return STATUS_OK;
    }
    (void)cudaGetLastError(); /* clear the error, so that the next check does not see it */
    return status_set(STATUS_UNAVAILABLE, "it cannot map the GPU memory of rank %u: %s; %s", rank,
                      cudaGetErrorString(error),
                      visible ? "if the ranks are in containers, start these with --ipc=host --pid=host"
                              : "CUDA_VISIBLE_DEVICES hides that rank's GPU, so make all GPUs visible to all "
                                "ranks");
}

static void unmap_areas(struct peer_state *self)
{
    for (uint32_t rank = 0; rank < self->ranks; rank++) {
        if (rank == self->links.rank || !self->areas[rank])
            continue;
        (void)cudaIpcCloseMemHandle(self->areas[rank]); /* no result depends on it */
        self->areas[rank] = NULL;
    }
}

static void warn_of_sharing(const struct peer_state *self)
{
    static bool warned; /* a sweep opens the method once per size */
    bool shared = false;
    for (uint32_t a = 0; a < self->ranks; a++)
        for (uint32_t b = a + 1; b < self->ranks; b++)
            shared |= rank_locations_same_gpu(&self->members[a].location, &self->members[b].location);
    if (shared && !warned)
        status_warn("ranks share a GPU: their kernels take turns, so all-reduces are slow");
    warned |= shared;
}

/* All ranks have the same members, so all ranks return the same status. */
static enum status check_members(struct peer_state *self)
{
    const struct rank_location *first = &self->members[0].location;
    self->channels = PEER_CHANNELS_MAX;
    for (uint32_t i = 0; i < self->ranks; i++) {
        const struct peer_member *member = &self->members[i];
        if (!rank_locations_same_machine(first, &member->location))
            return status_set(STATUS_UNAVAILABLE,
                              "all ranks must be on one machine, but rank 0 is on %s and rank %u on %s; use "
                              "nccl or mpi",
                              first->host, i, member->location.host);
        if (self->channels > member->blocks_resident)
            self->channels = member->blocks_resident;
    }
    return STATUS_OK;
}

static enum status map_all(struct peer_state *self, int device)
{
    if (comm_local_size() != comm_size())
        return status_set(STATUS_UNAVAILABLE,
                          "all ranks must be on one machine, but %d of %d are; use nccl or mpi",
                          comm_local_size(), comm_size());
    for (uint32_t rank = 0; rank < self->ranks; rank++)
        if (rank != self->links.rank)
            TRY(map_area(self, device, rank));
    return STATUS_OK;
}

static enum status join(struct peer_state *self, const struct allreduce_request *request)
{
    const struct peer_member mine = self->members[self->links.rank];
    TRY(allreduce_gather(&mine, sizeof mine, self->members));
    TRY(check_members(self));
    enum status status = comm_agree(map_all(self, request->device));
    if (status == STATUS_OK) {
        self->joined = true;
        warn_of_sharing(self);
        return STATUS_OK;
    }
    /* No rank frees its area, in close_peer(), while another rank maps it. */
    unmap_areas(self);
    TRY(comm_agree(STATUS_OK));
    return status;
}

static struct peer_state *new_state(const struct allreduce_request *request, enum peer_kind kind)
{
    struct peer_state *self = static_cast<struct peer_state *>(calloc(1, sizeof *self));
    if (!self)
        return NULL;
    self->kind = kind;
    self->count_max = request->count_max;
    self->ranks = (uint32_t)comm_size();
    self->kernels = find_kernels(request->type, self->ranks);
    self->links.rank = (uint32_t)comm_rank();
    self->links.slot_units = PEER_HALF_UNITS / self->ranks / PEER_LINE_UNITS * PEER_LINE_UNITS;
    self->links.timeout_ns = (uint64_t)(1e9 * allreduce_peer_tuning.timeout_s);
    return self;
}

template <enum peer_kind KIND>
static enum status open_peer(const struct allreduce_request *request, void **state)
{
    if (comm_size() > PEER_RANKS_MAX)
        return status_set(STATUS_UNAVAILABLE, "supports at most %d ranks, but there are %d; use nccl or mpi",
                          PEER_RANKS_MAX, comm_size());
    struct peer_state *self = new_state(request, KIND);
    *state = self;
    TRY(comm_agree(self ? prepare(self, request) : status_set(STATUS_FAILED, "out of memory")));
    return join(self, request);
}

static void close_peer(void *state)
{
    struct peer_state *self = static_cast<struct peer_state *>(state);
    /* Errors are ignored, because no result depends on them. */
    unmap_areas(self);
    if (self->joined)
        (void)comm_agree(STATUS_OK); /* the other ranks have unmapped this rank's area */
    (void)cudaFree(self->areas[self->links.rank]);
    (void)cudaFree(self->own);
    (void)cudaFreeHost(self->late_on_host);
    (void)cudaGetLastError();
    free(self);
}

/* ---- Calls ---- */

static size_t divide_up(size_t dividend, size_t divisor)
{
    return (dividend + divisor - 1) / divisor;
}

/* Returns up to how many bytes one-shot is used by `peer`. One-shot waits once instead of twice, but sends
 * (ranks - 1) times the array instead of 2 (ranks - 1) / ranks times; on 2 ranks that is the same. */
static size_t one_shot_bytes_max(uint32_t ranks)
{
    if (allreduce_peer_tuning.one_shot_bytes_max >= 0)
        return (size_t)allreduce_peer_tuning.one_shot_bytes_max;
    return ranks <= 2 ? SIZE_MAX : ranks <= 4 ? (size_t)512 << 10 : (size_t)256 << 10;
}

/* Returns the number of blocks for data of `bytes` bytes. A few blocks have less to start, and many blocks
 * keep more data in flight. */
static uint32_t choose_blocks(const struct peer_state *self, size_t bytes)
{
    size_t blocks = allreduce_peer_tuning.blocks > 0 ? (size_t)allreduce_peer_tuning.blocks
                                                     : divide_up(bytes, BYTES_PER_BLOCK);
    return blocks < self->channels ? (uint32_t)blocks : self->channels;
}

static enum status enqueue(void *state, void *values, size_t count, cudaStream_t stream)
{
    const struct peer_state *self = static_cast<const struct peer_state *>(state);
    if (count == 0)
        return STATUS_OK;
    if (count > self->count_max || reinterpret_cast<uintptr_t>(values) % ALIGNMENT)
        return status_set(STATUS_FAILED,
                          "an all-reduce of %zu values at %p: at most %zu, aligned to %d bytes", count,
                          values, self->count_max, ALIGNMENT);
    const size_t units = divide_up(count, self->kernels.values_per_unit), bytes = units * PEER_UNIT_BYTES;
    const bool one_shot = self->kind == PEER_ONE_SHOT || self->ranks == 1 ||
                          (self->kind == PEER_AUTO && bytes <= one_shot_bytes_max(self->ranks));
    /* Of the numbers of units per part that fit into a slot and need the fewest steps, the least. Then all
     * blocks have the same number of steps. */
    const size_t parts = one_shot ? 1 : self->ranks, blocks = choose_blocks(self, bytes);
    const size_t steps = divide_up(units, blocks * parts * self->links.slot_units);
    const size_t part_lines = divide_up(units, blocks * parts * steps * PEER_LINE_UNITS);
    const struct peer_call call = {values, count, (uint32_t)part_lines * PEER_LINE_UNITS};
    const size_t chunks = divide_up(units, parts * call.part_units);
    const uint32_t grid = (uint32_t)(chunks < blocks ? chunks : blocks);
    if (one_shot)
        self->kernels.one_shot<<<grid, PEER_THREADS, 0, stream>>>(self->links, call);
    else
        self->kernels.two_shot<<<grid, PEER_THREADS, 0, stream>>>(self->links, call, peer_consume_nothing());
    CUDA_TRY_LAUNCH("an all-reduce");
    return STATUS_OK;
}

static enum status check(void *state)
{
    const struct peer_state *self = static_cast<const struct peer_state *>(state);
    const uint32_t late = *static_cast<volatile uint32_t *>(self->late_on_host);
    if (late == 0)
        return STATUS_OK;
    return status_set(
        STATUS_FAILED,
        "rank %u did not answer within %g s in an all-reduce; it may have failed, be stopped, or "
        "have made fewer calls",
        late - 1, 1e-9 * (double)self->links.timeout_ns);
}

static uint64_t memory_bytes(const void *state)
{
    return static_cast<const struct peer_state *>(state)->memory_bytes;
}

extern "C" {
const struct allreduce_method allreduce_peer = {"peer", device_probe, open_peer<PEER_AUTO>, enqueue,
                                                check,  close_peer,   memory_bytes};
const struct allreduce_method allreduce_peer_one_shot = {
    "peer-one-shot", device_probe, open_peer<PEER_ONE_SHOT>, enqueue, check, close_peer, memory_bytes};
const struct allreduce_method allreduce_peer_two_shot = {
    "peer-two-shot", device_probe, open_peer<PEER_TWO_SHOT>, enqueue, check, close_peer, memory_bytes};
}
