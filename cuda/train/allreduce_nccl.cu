/* The method `nccl`: all-reduces by NCCL. The build needs only NCCL's header. The library is opened at run
 * time, so the program starts without it. */
#include "train/allreduce.cuh"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>

#include "common/check.cuh"
#include "machine/device.h"

#ifdef HAVE_NCCL

#include <nccl.h>

#include "machine/comm.h"
#include "train/allreduce_parts.cuh"

#define NCCL_LIBRARY "libnccl.so.2"

/* ---- The library ---- */

#define FUNCTIONS(X)     \
    X(GetVersion)        \
    X(GetErrorString)    \
    X(GetUniqueId)       \
    X(CommInitRank)      \
    X(CommGetAsyncError) \
    X(CommDestroy)       \
    X(CommAbort)         \
    X(AllReduce)

static struct {
#define MEMBER(name) decltype(&nccl##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
    const char *(*GetLastError)(ncclComm_t); /* NULL in versions before 2.13 */
    char version[32];
} nccl;

static enum status load_functions(void *library)
{
#define FIND(name)                                       \
    *(void **)&nccl.name = dlsym(library, "nccl" #name); \
    if (!nccl.name)                                      \
        return status_set(STATUS_UNAVAILABLE,            \
                          NCCL_LIBRARY " has no nccl" #name "; install a newer version of NCCL");
    FUNCTIONS(FIND)
#undef FIND
    *(void **)&nccl.GetLastError = dlsym(library, "ncclGetLastError");
    return STATUS_OK;
}

static enum status load_library(void)
{
    void *library = dlopen(NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return status_set(STATUS_UNAVAILABLE,
                          "needs NCCL: %s; install it, or add its folder to LD_LIBRARY_PATH", dlerror());
    TRY(load_functions(library));
    int version = 0;
    if (nccl.GetVersion(&version) != ncclSuccess)
        return status_set(STATUS_UNAVAILABLE, NCCL_LIBRARY " does not report its version");
    /* Versions from 2.9 on have two digits for the minor version, earlier ones have one. */
    const int unit = version >= 10000 ? 10000 : 1000;
    snprintf(nccl.version, sizeof nccl.version, "%d.%d.%d", version / unit, version % unit / 100,
             version % 100);
    return STATUS_OK;
}

/* Loads the library once per process. */
static enum status nccl_load(void)
{
    static std::mutex lock;
    static bool tried;
    static enum status status;
    static char reason[512];
    std::lock_guard<std::mutex> guard(lock);
    if (!tried) {
        status = load_library();
        if (status != STATUS_OK)
            snprintf(reason, sizeof reason, "%s", status_text());
    }
    tried = true;
    return status == STATUS_OK ? STATUS_OK : status_set(status, "%s", reason);
}

extern "C" const char *allreduce_nccl_version(void)
{
    return nccl_load() == STATUS_OK ? nccl.version : "";
}

/* ---- State ---- */

struct nccl_state {
    ncclComm_t comm;
    ncclDataType_t type;
    size_t count_max;
    uint64_t memory_bytes;
    bool failed;
};

/* NCCL's own text names the failing system call or the mismatch, if there is one. */
static enum status nccl_status(struct nccl_state *self, ncclResult_t result, const char *call)
{
    if (result == ncclSuccess || result == ncclInProgress)
        return STATUS_OK;
    self->failed = true;
    const char *more = nccl.GetLastError ? nccl.GetLastError(NULL) : NULL;
    const bool has_more = more && *more;
    return status_set(STATUS_FAILED, "%s failed: %s%s%s; NCCL_DEBUG=WARN prints more", call,
                      nccl.GetErrorString(result), has_more ? ": " : "", has_more ? more : "");
}

/* ---- Joining ---- */

static enum status prepare(struct nccl_state *self, const struct allreduce_request *request,
                           struct rank_location *mine, ncclUniqueId *id)
{
    TRY(nccl_load());
    CUDA_TRY(cudaSetDevice(request->device));
    TRY(rank_location_find(request->device, mine));
    return comm_rank() == 0 ? nccl_status(self, nccl.GetUniqueId(id), "ncclGetUniqueId") : STATUS_OK;
}

/* NCCL refuses ranks that share a GPU, with a message that is harder to understand. All ranks have the same
 * locations, so all ranks return the same status. */
static enum status refuse_sharing(const struct rank_location *locations)
{
    for (int a = 0; a < comm_size(); a++)
        for (int b = a + 1; b < comm_size(); b++)
            if (rank_locations_same_gpu(&locations[a], &locations[b]))
                return status_set(STATUS_UNAVAILABLE,
                                  "NCCL needs one GPU per rank, but ranks %d and %d share the GPU %s of %s; "
                                  "start fewer ranks per machine, or use peer or mpi",
                                  a, b, locations[a].bus_id, locations[a].host);
    return STATUS_OK;
}

static enum status check_locations(const struct rank_location *mine)
{
    struct rank_location *locations =
        static_cast<struct rank_location *>(calloc((size_t)comm_size(), sizeof *locations));
    enum status status =
        comm_agree(locations ? STATUS_OK : status_set(STATUS_FAILED, "out of memory for the ranks"));
    if (status == STATUS_OK)
        status = allreduce_gather(mine, sizeof *mine, locations);
    if (status == STATUS_OK)
        status = refuse_sharing(locations);
    free(locations);
    return status;
}

/* NCCL connects the ranks in the first all-reduce, so this one happens here and not in a captured graph. */
static enum status warm_up(struct nccl_state *self)
{
    void *value;
    CUDA_TRY(cudaMalloc(&value, sizeof(float)));
    cudaError_t error = cudaMemset(value, 0, sizeof(float));
    enum status status = cuda_status(error, "cudaMemset", __FILE__, __LINE__);
    if (status == STATUS_OK)
        status = nccl_status(self, nccl.AllReduce(value, value, 1, self->type, ncclSum, self->comm, NULL),
                             "ncclAllReduce");
    error = cudaDeviceSynchronize();
    if (status == STATUS_OK)
        status = cuda_status(error, "cudaDeviceSynchronize", __FILE__, __LINE__);
    (void)cudaFree(value);
    return status;
}

/* Only the difference of free memory shows how much memory NCCL uses. Other processes on the GPU, and
 * buffers that NCCL allocates later, make this number inexact. */
static enum status connect(struct nccl_state *self, const ncclUniqueId *id)
{
    size_t free_before = 0, free_after = 0, total;
    CUDA_TRY(cudaMemGetInfo(&free_before, &total));
    TRY(nccl_status(self, nccl.CommInitRank(&self->comm, comm_size(), *id, comm_rank()), "ncclCommInitRank"));
    TRY(warm_up(self));
    CUDA_TRY(cudaMemGetInfo(&free_after, &total));
    self->memory_bytes = free_before > free_after ? free_before - free_after : 0;
    return STATUS_OK;
}

static struct nccl_state *new_state(const struct allreduce_request *request)
{
    struct nccl_state *self = static_cast<struct nccl_state *>(calloc(1, sizeof *self));
    if (!self)
        return NULL;
    self->type = request->type == ALLREDUCE_BF16 ? ncclBfloat16 : ncclFloat32;
    self->count_max = request->count_max;
    return self;
}

/* The ranks agree before each call of NCCL in which ranks wait for each other. */
static enum status open_nccl(const struct allreduce_request *request, void **state)
{
    if (request->type == ALLREDUCE_F32_AS_BF16)
        return status_set(STATUS_UNAVAILABLE,
                          "NCCL cannot send fp32 values as bf16; use peer, or bf16 or fp32 throughout");
    struct rank_location mine;
    ncclUniqueId id = {};
    struct nccl_state *self = new_state(request);
    *state = self;
    TRY(comm_agree(self ? prepare(self, request, &mine, &id) : status_set(STATUS_FAILED, "out of memory")));
    TRY(check_locations(&mine));
    TRY(comm_spread(&id, sizeof id));
    return comm_agree(connect(self, &id));
}

static void close_nccl(void *state)
{
    struct nccl_state *self = static_cast<struct nccl_state *>(state);
    /* Errors are ignored, because no result depends on them. Destroying would wait for a failed rank. */
    if (self->comm)
        (void)(self->failed ? nccl.CommAbort(self->comm) : nccl.CommDestroy(self->comm));
    free(self);
}

/* ---- Calls ---- */

static enum status enqueue(void *state, void *values, size_t count, cudaStream_t stream)
{
    struct nccl_state *self = static_cast<struct nccl_state *>(state);
    if (count > self->count_max)
        return status_set(STATUS_FAILED, "an all-reduce of %zu values, but at most %zu are allowed", count,
                          self->count_max);
    if (count == 0)
        return STATUS_OK;
    return nccl_status(self, nccl.AllReduce(values, values, count, self->type, ncclSum, self->comm, stream),
                       "ncclAllReduce");
}

static enum status check(void *state)
{
    struct nccl_state *self = static_cast<struct nccl_state *>(state);
    ncclResult_t result = ncclSuccess;
    TRY(nccl_status(self, nccl.CommGetAsyncError(self->comm, &result), "ncclCommGetAsyncError"));
    return nccl_status(self, result, "an all-reduce of NCCL");
}

static uint64_t memory_bytes(const void *state)
{
    return static_cast<const struct nccl_state *>(state)->memory_bytes;
}

static enum status probe(int device)
{
    TRY(device_probe(device));
    return nccl_load();
}

extern "C" const struct allreduce_method allreduce_nccl = {"nccl", probe,      open_nccl,   enqueue,
                                                           check,  close_nccl, memory_bytes};

#else

static enum status missing(void)
{
    return status_set(STATUS_UNAVAILABLE, "built without NCCL: its header nccl.h was not found, or NCCL=0");
}

static enum status probe(int)
{
    return missing();
}

static enum status open_nccl(const struct allreduce_request *, void **)
{
    return missing();
}

extern "C" const struct allreduce_method allreduce_nccl = {"nccl", probe, open_nccl};

extern "C" const char *allreduce_nccl_version(void)
{
    return "";
}

#endif
