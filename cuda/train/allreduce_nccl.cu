/* The all-reduce `nccl`: NVIDIA's library, opened at run time. Only its header is needed to build. */
#include "train/allreduce.cuh"

#include <stdio.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "machine/comm.h"
#include "train/exchange.h"

#ifdef HAVE_NCCL
#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

#include "core/portable.h"
#include "machine/heartbeat.h"

#define STOPPED_S    10 /* a rank's process may be suspended this long, unless --rank-timeout is given */
#define NCCL_LIBRARY "libnccl.so.2"
#define FUNCTIONS(DO)  \
    DO(GetVersion)     \
    DO(GetErrorString) \
    DO(GetUniqueId)    \
    DO(CommInitRank)   \
    DO(AllReduce) DO(AllGather) DO(Broadcast) DO(CommGetAsyncError) DO(CommDestroy) DO(CommAbort)

/* The library, loaded once. */
static struct {
    bool there;
    char version[32];
#define MEMBER(name) decltype(&nccl##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} nccl;

static enum status nccl_status(ncclResult_t result, const char *call)
{
    static_assert(ncclSystemError == (int)NCCL_CODE_SYSTEM, "exhausted.h has another code");
    enum status status = library_status(LIBRARY_NCCL, result);
    return status == STATUS_OK
               ? STATUS_OK
               : status_set(status, "%s: %s; NCCL_DEBUG=WARN prints more", call, nccl.GetErrorString(result));
}

static enum status nccl_load(void)
{
    int version;
    if (nccl.there)
        return STATUS_OK;
    void *library = dlopen(NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return status_set(STATUS_UNAVAILABLE,
                          "needs NCCL: %s; install it, or add its folder to LD_LIBRARY_PATH", dlerror());
#define FIND(name)                                       \
    *(void **)&nccl.name = dlsym(library, "nccl" #name); \
    if (!nccl.name)                                      \
        return status_set(STATUS_UNAVAILABLE, "needs NCCL: " NCCL_LIBRARY " has no nccl" #name);
    FUNCTIONS(FIND)
#undef FIND
    TRY(nccl_status(nccl.GetVersion(&version), "ncclGetVersion"));
    snprintf(nccl.version, sizeof nccl.version, "%d.%d.%d", version / 10000, version / 100 % 100,
             version % 100);
    nccl.there = true;
    return STATUS_OK;
}

struct library_call {
    struct allreduce_request request;
    ncclComm_t communicator; /* NULL until this rank has joined the others */
    bool failed;
    struct heartbeat *heartbeat; /* NCCL's kernels wait for the other ranks without a limit */
};

static enum status nccl_probe(int device)
{
    (void)device;
    return nccl_load();
}

/* Collective: checks that no ranks of one machine share a GPU, because NCCL does not support that. */
static enum status check_gpus(int device)
{
    cudaDeviceProp properties;
    enum status status = CUDA_STATUS(cudaGetDeviceProperties(&properties, device));
    TRY(comm_agree(status));
    cudaUUID_t *all = static_cast<cudaUUID_t *>(calloc((size_t)comm_local_size(), sizeof *all));
    status = comm_agree(ALLOCATED(all, "out of memory"));
    if (status == STATUS_OK)
        status = comm_gather_local(&properties.uuid, sizeof *all, all);
    int other = -1;
    for (int i = 0; status == STATUS_OK && i < comm_local_size(); i++)
        if (i != comm_local_rank() && memcmp(&all[i], &properties.uuid, sizeof *all) == 0)
            other = i;
    free(all);
    TRY(status);
    return comm_agree(other < 0
                          ? STATUS_OK
                          : status_set(STATUS_UNAVAILABLE,
                                       "NCCL needs one GPU per rank, but ranks share GPU %d; start as many "
                                       "ranks per machine as it has GPUs",
                                       device));
}

static enum status join(struct library_call *self)
{
    ncclUniqueId id = {};
    enum status status = STATUS_OK;
    TRY(check_gpus(self->request.device));
    const struct comm_group *group = self->request.group;
    if (comm_group_rank(group) == 0)
        status = nccl_status(nccl.GetUniqueId(&id), "ncclGetUniqueId");
    TRY(comm_agree(status));
    TRY(comm_agree(comm_group_spread(group, &id, sizeof id)));
    TRY(comm_agree(CUDA_STATUS(cudaSetDevice(self->request.device))));
    TRY(heartbeat_open(comm_timeout() > 0 ? comm_timeout() : STOPPED_S, &self->heartbeat));
    return comm_agree(nccl_status(
        nccl.CommInitRank(&self->communicator, comm_group_size(group), id, comm_group_rank(group)),
        "ncclCommInitRank"));
}

static enum status nccl_open(const struct allreduce_request *request, void **state)
{
    struct library_call *self = static_cast<struct library_call *>(calloc(1, sizeof *self));
    *state = self;
    TRY(comm_agree(!self ? status_set(STATUS_EXHAUSTED, "out of memory")
                   : request->type == ALLREDUCE_F32_AS_BF16
                       ? status_set(STATUS_UNAVAILABLE, "NCCL cannot send float values as bf16")
                       : nccl_load()));
    self->request = *request;
    return join(self);
}

static enum status nccl_enqueue(void *state, void *values, size_t count, cudaStream_t stream)
{
    struct library_call *self = static_cast<struct library_call *>(state);
    enum status status = nccl_status(
        nccl.AllReduce(values, values, count, self->request.type == ALLREDUCE_BF16 ? ncclBfloat16 : ncclFloat,
                       ncclSum, self->communicator, stream),
        "ncclAllReduce");
    self->failed |= status != STATUS_OK;
    return status;
}

static enum status nccl_check(void *state)
{
    struct library_call *self = static_cast<struct library_call *>(state);
    ncclResult_t result = ncclSuccess;
    TRY(nccl_status(nccl.CommGetAsyncError(self->communicator, &result), "ncclCommGetAsyncError"));
    self->failed |= result != ncclSuccess;
    return nccl_status(result, "NCCL reports an asynchronous error");
}

static void nccl_close(void *state)
{
    struct library_call *self = static_cast<struct library_call *>(state);
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    if (self->communicator)
        (void)(self->failed ? nccl.CommAbort : nccl.CommDestroy)(self->communicator);
    heartbeat_close(self->heartbeat);
    free(self);
}

const char *allreduce_nccl_version(void)
{
    return nccl.version;
}

static uint64_t nccl_memory_bytes(const void *state)
{
    (void)state;
    return 0; /* NCCL does not report its memory */
}

extern "C" const struct allreduce_method allreduce_nccl = {
    "nccl", nccl_probe, nccl_open, nccl_enqueue, nccl_check, nccl_close, nccl_memory_bytes};

/* ---- Ranks that meet by an ncclUniqueId ---- */

#define MESSAGE_BYTES ((size_t)1 << 26) /* longer arrays are spread in parts */

struct meeting {
    int device, rank, ranks;
    ncclComm_t communicator;
    cudaStream_t stream;
    uint8_t *memory; /* of the device: `bytes` of this rank, then those of all ranks */
    size_t bytes;
};

/* Makes room for `bytes` bytes per rank. */
static enum status meeting_room(struct meeting *self, size_t bytes)
{
    CUDA_TRY(cudaSetDevice(self->device));
    if (bytes <= self->bytes)
        return STATUS_OK;
    (void)cudaFree(self->memory);
    self->memory = nullptr;
    self->bytes = 0;
    CUDA_TRY(cudaMalloc(&self->memory, bytes * (size_t)(self->ranks + 1)));
    self->bytes = bytes;
    return STATUS_OK;
}

enum status exchange_nccl_join(int device, const void *id, int rank, int ranks, void **state)
{
    struct meeting *self = static_cast<struct meeting *>(calloc(1, sizeof *self));
    ncclUniqueId own;
    *state = self;
    TRY(ALLOCATED(self, "out of memory"));
    self->device = device;
    self->rank = rank;
    self->ranks = ranks;
    memcpy(&own, id, sizeof own);
    TRY(nccl_load());
    CUDA_TRY(cudaSetDevice(device));
    CUDA_TRY(cudaStreamCreateWithFlags(&self->stream, cudaStreamNonBlocking));
    return nccl_status(nccl.CommInitRank(&self->communicator, ranks, own, rank), "ncclCommInitRank");
}

enum status exchange_nccl_gather(void *state, const void *mine, size_t bytes, void *all)
{
    struct meeting *self = static_cast<struct meeting *>(state);
    const size_t whole = bytes * (size_t)self->ranks;
    TRY(meeting_room(self, bytes));
    CUDA_TRY(cudaMemcpyAsync(self->memory, mine, bytes, cudaMemcpyHostToDevice, self->stream));
    TRY(nccl_status(nccl.AllGather(self->memory, self->memory + self->bytes, bytes, ncclUint8,
                                   self->communicator, self->stream),
                    "ncclAllGather"));
    if (self->rank == 0)
        CUDA_TRY(
            cudaMemcpyAsync(all, self->memory + self->bytes, whole, cudaMemcpyDeviceToHost, self->stream));
    return CUDA_STATUS(cudaStreamSynchronize(self->stream));
}

enum status exchange_nccl_spread(void *state, void *data, size_t bytes)
{
    struct meeting *self = static_cast<struct meeting *>(state);
    for (size_t done = 0; done < bytes; done += MESSAGE_BYTES) {
        const size_t part = bytes - done < MESSAGE_BYTES ? bytes - done : MESSAGE_BYTES;
        uint8_t *at = static_cast<uint8_t *>(data) + done;
        TRY(meeting_room(self, part));
        if (self->rank == 0)
            CUDA_TRY(cudaMemcpyAsync(self->memory, at, part, cudaMemcpyHostToDevice, self->stream));
        TRY(nccl_status(
            nccl.Broadcast(self->memory, self->memory, part, ncclUint8, 0, self->communicator, self->stream),
            "ncclBroadcast"));
        if (self->rank > 0)
            CUDA_TRY(cudaMemcpyAsync(at, self->memory, part, cudaMemcpyDeviceToHost, self->stream));
        CUDA_TRY(cudaStreamSynchronize(self->stream));
    }
    return STATUS_OK;
}

void exchange_nccl_leave(void *state)
{
    struct meeting *self = static_cast<struct meeting *>(state);
    if (!self)
        return;
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    if (self->communicator)
        (void)nccl.CommDestroy(self->communicator);
    (void)cudaFree(self->memory);
    destroy(self->stream);
    free(self);
}
#else
static enum status nccl_probe(int device)
{
    (void)device;
    return status_set(STATUS_UNAVAILABLE, "this build has no NCCL (nccl.h)");
}

static enum status nccl_open(const struct allreduce_request *request, void **state)
{
    (void)state;
    return comm_agree(nccl_probe(request->device));
}

const char *allreduce_nccl_version(void)
{
    return "";
}

extern "C" const struct allreduce_method allreduce_nccl = {
    .name = "nccl", .probe = nccl_probe, .open = nccl_open};

enum status exchange_nccl_join(int device, const void *id, int rank, int ranks, void **state)
{
    (void)id, (void)rank, (void)ranks, (void)state;
    return nccl_probe(device);
}

enum status exchange_nccl_gather(void *state, const void *mine, size_t bytes, void *all)
{
    (void)state, (void)mine, (void)bytes, (void)all;
    return nccl_probe(0);
}

enum status exchange_nccl_spread(void *state, void *data, size_t bytes)
{
    (void)state, (void)data, (void)bytes;
    return nccl_probe(0);
}

void exchange_nccl_leave(void *state)
{
    (void)state;
}
#endif
