/* `gds`: cuFile reads chunks of shards into device buffers. If GPUDirect Storage's Linux driver (nvidia-fs)
 * is loaded and compatibility mode is disabled, data is transferred directly from the disk to the GPU. Files
 * are then opened with O_DIRECT and read in whole blocks, because other reads may go through host memory.
 * Without the driver, or with compatibility mode enabled, cuFile may read through host memory. The column
 * `gds` is then `compat`.
 *
 * If the library supports batches, each chunk is one cuFile batch, and a worker's reads into all its buffers
 * are in flight together. Otherwise, a worker reads one chunk at a time. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "load/cufile.h"
#include "machine/device.h"
#include "load/ring.cuh"

#define BLOCK_BYTES 4096 /* alignment that O_DIRECT and the driver nvidia-fs need */

struct gds {
    struct ring ring;      /* must be first */
    struct ring_type type; /* gds_type, with the alignment that `direct` needs */
    const struct cufile *library;
    bool direct, batches;
    uint32_t registered; /* number of workers whose buffers are registered with cuFile */
};

/* The cuFile batches of a worker, one per buffer of its ring. */
struct gds_worker {
    void **batches;
    struct cufile_request *requests;
};

static struct gds *gds_of(const struct ring_worker *worker)
{
    return reinterpret_cast<struct gds *>(worker->ring);
}

/* A shard registered with cuFile. */
struct gds_file {
    int fd;
    void *file;
};

/* Registers a shard. STATUS_UNAVAILABLE if the file system does not support O_DIRECT, or if cuFile refuses
 * the file. */
static enum status register_shard(const struct cufile *library, const struct dataset *dataset, uint32_t shard,
                                  bool direct, struct gds_file *file)
{
    struct cufile_descriptor descriptor = {};
    enum status status = dataset_file_open(dataset, shard, direct ? O_DIRECT : 0, &file->fd);
    if (status != STATUS_OK)
        return direct && errno == EINVAL
                   ? status_set(STATUS_UNAVAILABLE,
                                "%s/%s: this file system does not support O_DIRECT, which GPUDirect Storage "
                                "needs: keep the shards on one that does (ext4, xfs, ...), or use shards-gpu",
                                dataset->path, dataset->files[shard].name)
                   : status;
    descriptor.type = CUFILE_OPAQUE_FD;
    descriptor.handle.fd = file->fd;
    struct cufile_error error = library->register_file(&file->file, &descriptor);
    if (error.error == 0)
        return STATUS_OK;
    close(file->fd);
    TRY(cufile_memory(error));
    return status_set(STATUS_UNAVAILABLE,
                      "%s/%s: cuFile refuses the file (error %d; details in cufile.log): keep the shards on "
                      "a supported file system (ext4, xfs, ...), or use shards-gpu",
                      dataset->path, dataset->files[shard].name, error.error);
}

static void deregister_shard(const struct cufile *library, const struct gds_file *file)
{
    library->deregister_file(file->file);
    close(file->fd);
}

static enum status gds_open(struct ring_worker *worker, struct piece *piece)
{
    struct gds_file *file = static_cast<struct gds_file *>(malloc(sizeof *file));
    TRY(ALLOCATED(file, "out of memory"));
    const struct gds *gds = gds_of(worker);
    enum status status =
        register_shard(gds->library, worker->queue->delivery->load->dataset, piece->shard, gds->direct, file);
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
    deregister_shard(gds_of(worker)->library, static_cast<struct gds_file *>(handle));
    free(handle);
}

/* Checks that the library can read the shards, by registering the first one. */
static enum status gds_accepts(const struct load *load)
{
    const struct cufile *library;
    struct gds_file file;
    bool direct, batches;
    if (device_count() == 0) /* device_probe() reports why */
        return device_probe(0);
    TRY(cufile_open(&library));
    TRY(cufile_way(library, &direct, &batches));
    TRY(register_shard(library, load->dataset, 0, direct, &file));
    deregister_shard(library, &file);
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
        take(piece, gds->library->read(file, worker->device, piece->bytes, (off_t)piece->offset,
                                       (off_t)(index * worker->ring->buffer_bytes)));
        return STATUS_OK;
    }
    struct cufile_request *request = &own->requests[index];
    *request = {};
    request->mode = CUFILE_BATCH;
    request->u.batch.base = worker->device;
    request->u.batch.file_offset = (off_t)piece->offset;
    request->u.batch.base_offset = (off_t)(index * worker->ring->buffer_bytes);
    request->u.batch.bytes = piece->bytes;
    request->file = file;
    request->operation = CUFILE_READ;
    request->cookie = piece;
    struct cufile_error submitted = gds->library->batch_submit(own->batches[index], 1, request, 0);
    TRY(cufile_memory(submitted));
    if (submitted.error != 0)
        return status_set(STATUS_FAILED, "cuFile refuses a batch of reads (error %d); see cufile.log",
                          submitted.error);
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
        struct cufile_event event = {};
        unsigned count = 1;
        struct cufile_error got =
            gds_of(worker)->library->batch_status(own->batches[index], 1, &count, &event, NULL);
        TRY(cufile_memory(got));
        if (got.error != 0)
            return status_set(STATUS_FAILED,
                              "cannot query a cuFile batch of reads (error %d); see cufile.log", got.error);
        if (count == 1 && !(event.status & (CUFILE_STATUS_WAITING | CUFILE_STATUS_PENDING)))
            take(piece, event.status == CUFILE_STATUS_COMPLETE ? (ssize_t)event.bytes : -2);
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
    const struct cufile *library;
    TRY(device_probe(resources->device));
    return cufile_open(&library);
}

static void close_batches(const struct gds *gds, struct ring_worker *worker)
{
    struct gds_worker *own = static_cast<struct gds_worker *>(worker->own);
    if (!own)
        return;
    for (uint32_t b = 0; own->batches && b < gds->ring.buffers; b++)
        if (own->batches[b])
            gds->library->batch_close(own->batches[b]);
    free(own->batches);
    free(own->requests);
    free(own);
}

static void gds_teardown(void *state)
{
    struct gds *gds = static_cast<struct gds *>(state);
    for (uint32_t w = 0; w < gds->registered; w++)
        (void)gds->library->deregister_buffer(gds->ring.workers[w].device);
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
        own->batches = static_cast<void **>(calloc(buffers, sizeof *own->batches));
        own->requests = static_cast<struct cufile_request *>(calloc(buffers, sizeof *own->requests));
    }
    TRY(ALLOCATED(own && own->batches && own->requests, "out of memory"));
    for (uint32_t b = 0; gds->batches && b < buffers; b++) {
        struct cufile_error opened = gds->library->batch_open(&own->batches[b], 1);
        if (opened.error != 0) { /* fall back to one read at a time */
            own->batches[b] = NULL;
            gds->batches = false;
        }
    }
    return STATUS_OK;
}

static enum status open_gds(struct gds *gds, const struct resources *resources, const struct load *load)
{
    TRY(cufile_open(&gds->library));
    TRY(cufile_way(gds->library, &gds->direct, &gds->batches));
    gds->type = gds_type;
    gds->type.alignment = gds->direct ? BLOCK_BYTES : 1;
    TRY(ring_open(&gds->ring, resources, load, &gds->type));
    for (uint32_t w = 0; w < gds->ring.delivery.workers; w++) {
        struct ring_worker *worker = &gds->ring.workers[w];
        TRY(open_batches(gds, worker));
        /* A buffer that cannot be registered also works: the library then copies through its own buffers. */
        if (gds->registered == w &&
            gds->library->register_buffer(worker->device, gds->ring.buffers * gds->ring.buffer_bytes, 0)
                    .error == 0)
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
