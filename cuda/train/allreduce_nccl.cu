/* The all-reduce `nccl`: NVIDIA's library, opened at run time. Only its header is needed to build. */
#include "train/allreduce.cuh"

#include <stdio.h>

#include "common/check.cuh"
#include "machine/comm.h"

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
    DO(GetUniqueId) DO(CommInitRank) DO(AllReduce) DO(CommGetAsyncError) DO(CommDestroy) DO(CommAbort)

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
#endif
