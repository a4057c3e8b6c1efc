/* `gds`: cuFile reads chunks of shards into device buffers. If GPUDirect Storage's Linux driver (nvidia-fs)
 * is loaded and compatibility mode is disabled, data is transferred directly from the disk to the GPU. Files
 * are then opened with O_DIRECT and read in whole blocks, because other reads may go through host memory.
 * Without the driver, or with compatibility mode enabled, cuFile may read through host memory. The column
 * `gds` is then `compat`.
 *
 * If the library supports batches, each chunk is one cuFile batch, and a worker's reads into all its buffers
 * are in flight together. Otherwise, a worker reads one chunk at a time. */
#include <cufile.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <mutex>

#include "common/check.cuh"
#include "common/exhausted.h"
#include "core/phase.h"
#include "machine/device.h"
#include "load/ring.cuh"

/* ---- cuFile ---- */

#define FUNCTIONS(X)       \
    X(DriverOpen)          \
    X(DriverGetProperties) \
    X(HandleRegister)      \
    X(HandleDeregister)    \
    X(BufRegister)         \
    X(BufDeregister)       \
    X(Read)                \
    X(BatchIOSetUp)        \
    X(BatchIOSubmit)       \
    X(BatchIOGetStatus)    \
    X(BatchIODestroy)

static struct {
    bool there;
#define MEMBER(name) decltype(&cuFile##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} cufile;

/* Returns STATUS_EXHAUSTED, with a message, if the call that returned `error` failed for lack of memory, else
 * STATUS_OK. */
static enum status cufile_memory(CUfileError_t error)
{
    return gpu_status_of(LIBRARY_CUFILE, error.err, error.cu_err, 0) == STATUS_EXHAUSTED
               ? status_set(STATUS_EXHAUSTED, "out of memory for cuFile (error %d)", (int)error.err)
               : STATUS_OK;
}

/* Loads the library and opens its driver, once per process. The program starts without the library. If this
 * fails, returns STATUS_UNAVAILABLE with the reason. */
static enum status cufile_open(void)
{
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    if (cufile.there)
        return STATUS_OK;
    void *handle = dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return status_set(STATUS_UNAVAILABLE,
                          "cuFile not found; install libcufile.so.0, which is part of the CUDA toolkit: %s",
                          dlerror());
#define FIND(name)                                          \
    *(void **)&cufile.name = dlsym(handle, "cuFile" #name); \
    if (!cufile.name)                                       \
        return status_set(STATUS_UNAVAILABLE,               \
                          "the cuFile library has no cuFile" #name "; install a newer version");
    FUNCTIONS(FIND)
#undef FIND
    CUfileError_t opened = cufile.DriverOpen();
    cufile.there = opened.err == CU_FILE_SUCCESS;
    if (cufile.there)
        return STATUS_OK;
    TRY(cufile_memory(opened));
    return status_set(STATUS_UNAVAILABLE,
                      "cannot open cuFile's driver (error %d): set up GPUDirect Storage, or enable "
                      "compatibility mode (allow_compat_mode in cufile.json)",
                      (int)opened.err);
}

/* Queries how cuFile reads. Sets `*direct` to whether the Linux driver nvidia-fs is loaded and reads through
 * host memory are disabled (allow_compat_mode is false in cufile.json). If `*direct` is true, cuFile refuses
 * files that it cannot read directly. cuFile then transfers whole blocks of a file opened with O_DIRECT
 * directly from the disk. Sets `*batches` to whether the library supports batches of reads. Returns
 * STATUS_FAILED if the library does not report its properties. */
static enum status cufile_way(bool *direct, bool *batches)
{
    CUfileDrvProps_t properties = {};
    CUfileError_t got = cufile.DriverGetProperties(&properties);
    if (got.err != CU_FILE_SUCCESS)
        return status_set(STATUS_FAILED, "cannot query cuFile's properties (error %d)", (int)got.err);
    bool driver = properties.nvfs.major_version > 0 && properties.nvfs.dstatusflags != 0;
    *direct = driver && !(properties.nvfs.dcontrolflags >> CU_FILE_ALLOW_COMPAT_MODE & 1);
    *batches = properties.fflags >> CU_FILE_BATCH_IO_SUPPORTED & 1;
    return STATUS_OK;
}

/* ---- Chunks ---- */

#define BLOCK_BYTES 4096 /* alignment that O_DIRECT and the driver nvidia-fs need */

struct gds {
    struct ring ring;      /* must be first */
    struct ring_type type; /* gds_type, with the alignment that `direct` needs */
    bool direct, batches;
    uint32_t registered; /* number of workers whose buffers are registered with cuFile */
};

/* The cuFile batches of a worker, one per buffer of its ring. */
struct gds_worker {
    CUfileBatchHandle_t *batches;
    CUfileIOParams_t *requests;
};

static struct gds *gds_of(const struct ring_worker *worker)
{
    return reinterpret_cast<struct gds *>(worker->ring);
}

/* A shard registered with cuFile. */
struct gds_file {
    int fd;
    CUfileHandle_t file;
};

/* Registers a shard. STATUS_UNAVAILABLE if the file system does not support O_DIRECT, or if cuFile refuses
 * the file. */
static enum status register_shard(const struct dataset *dataset, uint32_t shard, bool direct,
                                  struct gds_file *file)
{
    CUfileDescr_t descriptor = {};
    enum status status = dataset_file_open(dataset, shard, direct ? O_DIRECT : 0, &file->fd);
    if (status != STATUS_OK)
        return direct && errno == EINVAL
                   ? status_set(STATUS_UNAVAILABLE,
                                "%s/%s: this file system does not support O_DIRECT, which GPUDirect Storage "
                                "needs: keep the shards on one that does (ext4, xfs, ...), or use shards-gpu",
                                dataset->path, dataset->files[shard].name)
                   : status;
    descriptor.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
    descriptor.handle.fd = file->fd;
    CUfileError_t error = cufile.HandleRegister(&file->file, &descriptor);
    if (error.err == CU_FILE_SUCCESS)
        return STATUS_OK;
    close(file->fd);
    TRY(cufile_memory(error));
    return status_set(STATUS_UNAVAILABLE,
                      "%s/%s: cuFile refuses the file (error %d; details in cufile.log): keep the shards on "
                      "a supported file system (ext4, xfs, ...), or use shards-gpu",
                      dataset->path, dataset->files[shard].name, (int)error.err);
}

static void deregister_shard(const struct gds_file *file)
{
    cufile.HandleDeregister(file->file);
    close(file->fd);
}

static enum status gds_open(struct ring_worker *worker, struct piece *piece)
{
    struct gds_file *file = static_cast<struct gds_file *>(malloc(sizeof *file));
    TRY(ALLOCATED(file, "out of memory"));
    const struct gds *gds = gds_of(worker);
    enum status status =
        register_shard(worker->queue->delivery->load->dataset, piece->shard, gds->direct, file);
    if (status == STATUS_OK)
        piece->handle = file;
    else
        free(file);
    /* gds_accepts() has registered the first shard, so the variant is available. A failure of this
     * shard is therefore an error. */
    return status == STATUS_UNAVAILABLE ? STATUS_FAILED : status;
}

static void gds_close(struct ring_worker *worker, void *handle)
{
    (void)worker;
    deregister_shard(static_cast<struct gds_file *>(handle));
    free(handle);
}

/* Checks that the library can read the shards, by registering the first one. */
static enum status gds_accepts(const struct load *load)
{
    struct gds_file file;
    bool direct = false, batches;
    if (device_count() == 0) /* device_probe() reports why */
        return device_probe(0);
    TRY(cufile_open());
    TRY(cufile_way(&direct, &batches));
    TRY(register_shard(load->dataset, 0, direct, &file));
    deregister_shard(&file);
    return STATUS_OK;
}

/* Stores cuFile's result of a read: the number of bytes, -1 for an error in errno, or another negative number
 * for an error of cuFile. */
static void take(struct piece *piece, ssize_t result)
{
    piece->got = result > 0 ? (uint64_t)result : 0;
    piece->error = result == -1 ? errno : result < 0 ? EIO : 0;
    piece->read = false;
}

static enum status gds_start(struct ring_worker *worker, uint32_t index)
{
    struct gds *gds = gds_of(worker);
    struct gds_worker *own = static_cast<struct gds_worker *>(worker->own);
    struct chunk *chunk = &worker->chunks[index];
    struct piece *piece = &chunk->pieces[0];
    void *file = piece->handle ? static_cast<struct gds_file *>(piece->handle)->file : NULL;
    if (chunk->piece_count == 0 || piece->broken)
        return STATUS_OK;
    RANGE(READ);
    if (!gds->batches) {
        take(piece, cufile.Read(file, worker->device, piece->bytes, (off_t)piece->offset,
                                (off_t)(index * worker->ring->buffer_bytes)));
        return STATUS_OK;
    }
    CUfileIOParams_t *request = &own->requests[index];
    *request = {};
    request->mode = CUFILE_BATCH;
    request->u.batch.devPtr_base = worker->device;
    request->u.batch.file_offset = (off_t)piece->offset;
    request->u.batch.devPtr_offset = (off_t)(index * worker->ring->buffer_bytes);
    request->u.batch.size = piece->bytes;
    request->fh = file;
    request->opcode = CUFILE_READ;
    request->cookie = piece;
    CUfileError_t submitted = cufile.BatchIOSubmit(own->batches[index], 1, request, 0);
    TRY(cufile_memory(submitted));
    if (submitted.err != CU_FILE_SUCCESS)
        return status_set(STATUS_FAILED, "cuFile refuses a batch of reads (error %d); see cufile.log",
                          (int)submitted.err);
    piece->read = true;
    return STATUS_OK;
}

static enum status gds_complete(struct ring_worker *worker, uint32_t index)
{
    struct gds_worker *own = static_cast<struct gds_worker *>(worker->own);
    struct chunk *chunk = &worker->chunks[index];
    struct piece *piece = &chunk->pieces[0];
    RANGE(WAIT);
    while (chunk->piece_count > 0 && piece->read) {
        CUfileIOEvents_t event = {};
        unsigned count = 1;
        CUfileError_t got = cufile.BatchIOGetStatus(own->batches[index], 1, &count, &event, NULL);
        TRY(cufile_memory(got));
        if (got.err != CU_FILE_SUCCESS)
            return status_set(STATUS_FAILED,
                              "cannot query a cuFile batch of reads (error %d); see cufile.log",
                              (int)got.err);
        if (count == 1 && !(event.status & (CUFILE_WAITING | CUFILE_PENDING)))
            take(piece, event.status == CUFILE_COMPLETE ? (ssize_t)event.ret : -2);
    }
    return STATUS_OK;
}

static const struct ring_type gds_type = {.on_device = true,
                                          .pieces_max = 1,
                                          .alignment = 1,
                                          .open = gds_open,
                                          .close = gds_close,
                                          .start = gds_start,
                                          .complete = gds_complete};

/* ---- The variant ---- */

static enum status gds_probe(const struct resources *resources)
{
    TRY(device_probe(resources->device));
    return cufile_open();
}

static void close_batches(const struct gds *gds, struct ring_worker *worker)
{
    struct gds_worker *own = static_cast<struct gds_worker *>(worker->own);
    if (!own)
        return;
    for (uint32_t b = 0; own->batches && b < gds->ring.buffers; b++)
        if (own->batches[b])
            cufile.BatchIODestroy(own->batches[b]);
    free(own->batches);
    free(own->requests);
    free(own);
}

static void gds_teardown(void *state)
{
    struct gds *gds = static_cast<struct gds *>(state);
    for (uint32_t w = 0; w < gds->registered; w++)
        (void)cufile.BufDeregister(gds->ring.workers[w].device);
    for (uint32_t w = 0; gds->ring.workers && w < gds->ring.delivery.workers; w++)
        close_batches(gds, &gds->ring.workers[w]);
    ring_close(&gds->ring);
    delete gds;
}

static enum status open_batches(struct gds *gds, struct ring_worker *worker)
{
    uint32_t buffers = gds->ring.buffers;
    struct gds_worker *own = static_cast<struct gds_worker *>(calloc(1, sizeof *own));
    worker->own = own;
    if (own) {
        own->batches = static_cast<CUfileBatchHandle_t *>(calloc(buffers, sizeof *own->batches));
        own->requests = static_cast<CUfileIOParams_t *>(calloc(buffers, sizeof *own->requests));
    }
    TRY(ALLOCATED(own && own->batches && own->requests, "out of memory"));
    for (uint32_t b = 0; gds->batches && b < buffers; b++) {
        CUfileError_t opened = cufile.BatchIOSetUp(&own->batches[b], 1);
        if (opened.err != CU_FILE_SUCCESS) { /* fall back to one read at a time */
            own->batches[b] = NULL;
            gds->batches = false;
        }
    }
    return STATUS_OK;
}

static enum status open_gds(struct gds *gds, const struct resources *resources, const struct load *load)
{
    TRY(cufile_open());
    TRY(cufile_way(&gds->direct, &gds->batches));
    gds->type = gds_type;
    gds->type.alignment = gds->direct ? BLOCK_BYTES : 1;
    TRY(ring_open(&gds->ring, resources, load, load->chunk_bytes, &gds->type));
    for (uint32_t w = 0; w < gds->ring.delivery.workers; w++) {
        struct ring_worker *worker = &gds->ring.workers[w];
        TRY(open_batches(gds, worker));
        /* A buffer that cannot be registered also works: the library then copies through its own buffers. */
        if (gds->registered == w &&
            cufile.BufRegister(worker->device, gds->ring.buffers * gds->ring.buffer_bytes, 0).err ==
                CU_FILE_SUCCESS)
            gds->registered++;
    }
    gds->ring.delivery.result.gds = gds->direct ? "gds" : "compat";
    return STATUS_OK;
}

static const struct load_traits traits = {.shards = true,
                                          .device = true,
                                          .ring = true,
                                          .accepts = gds_accepts,
                                          .timed = "order+open+read+unpack",
                                          .copy = ring_copy,
                                          .verify_slots = delivery_verify_slots};

extern "C" const struct variant variant_gds = {.platform = "cuda",
                                               .threaded = true,
                                               .traits = &traits,
                                               .probe = gds_probe,
                                               .setup = delivery_setup<struct gds, open_gds>,
                                               .ready = delivery_ready,
                                               .run = ring_run,
                                               .fetch = delivery_fetch,
                                               .teardown = gds_teardown};
