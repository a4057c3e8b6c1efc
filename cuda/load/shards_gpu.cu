/* `shards-gpu`: all threads read chunks of shards into pinned buffers, which are copied to the device and
 * unpacked there.
 *
 * With a warm page cache, shards are mapped once. Mappings are pinned if possible, and copied to the device
 * directly. Other data is copied from the mappings to the buffers (machine/guard.h). Without a warm cache,
 * data is read with pread(), because page faults on missing pages are slower than reads. docs/notes/load.md
 * has measurements. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/check.cuh"
#include "core/file.h"
#include "core/phase.h"
#include "core/timer.h"
#include "machine/guard.h"
#include "machine/device.h"
#include "load/ring.cuh"

struct mapping {
    uint8_t *bytes; /* NULL: not mapped */
    bool pinned;    /* copies to the device may read the mapping */
    bool copied;    /* copies of the current run read it */
};

struct shards_gpu {
    struct ring ring; /* must be first */
    const struct dataset *dataset;
    struct mapping *mappings; /* per shard; only with a warm page cache */
    bool pins;                /* mappings are pinned */
    struct guard guard;
};

/* ---- Bytes into buffers ---- */

/* Returns the handle of a shard that is read with pread(): the descriptor plus one, because NULL means no
 * handle. */
static void *handle_of(int fd)
{
    return reinterpret_cast<void *>(static_cast<intptr_t>(fd) + 1);
}

static int descriptor_of(const void *handle)
{
    return static_cast<int>(reinterpret_cast<intptr_t>(handle) - 1);
}

static const struct shards_gpu *shards_of(const struct ring_worker *worker)
{
    return reinterpret_cast<const struct shards_gpu *>(worker->ring);
}

static enum status shards_gpu_open(struct ring_worker *worker, struct piece *piece)
{
    const struct load *load = worker->queue->delivery->load;
    if (load->given->cache == LOAD_WARM)
        return STATUS_OK; /* already mapped */
    int fd;
    TRY(dataset_file_open(load->dataset, piece->shard, 0, &fd));
    piece->handle = handle_of(fd);
    return STATUS_OK;
}

static void shards_gpu_close(struct ring_worker *worker, void *handle)
{
    (void)worker;
    close(descriptor_of(handle));
}

static void read_piece(uint8_t *to, struct piece *piece)
{
    RANGE(READ);
    while (piece->got < piece->bytes) {
        ssize_t count = pread(descriptor_of(piece->handle), to + piece->got, piece->bytes - piece->got,
                              (off_t)(piece->offset + piece->got));
        if (count < 0 && errno == EINTR)
            continue;
        piece->error = count < 0 ? errno : 0;
        if (count <= 0)
            return;
        piece->got += (uint64_t)count;
    }
}

/* Returns whether the pages of a pinned mapping are those of its file. A file that was truncated and written
 * again has other pages. */
static bool has_its_pages(const struct shards_gpu *shards, uint32_t shard)
{
    const struct dataset_file *file = &shards->dataset->files[shard];
    struct stat info;
    if (!shards->mappings[shard].pinned || fstatat(shards->dataset->directory, file->name, &info, 0) != 0)
        return false;
    struct file_identity now = file_identify(&info);
    return file_compare(&file->identity, &now) == 0;
}

/* Copies a piece from its mapping, unless the device can copy it from there. If the file was truncated, some
 * pages no longer exist. In that case, copies sample by sample, so that the samples before the first missing
 * page are not lost. */
static void copy_piece(const struct ring_worker *worker, uint8_t *to, struct piece *piece)
{
    RANGE(COPY);
    const struct array_extent *extents = worker->ring->delivery.arrays.extents + piece->first;
    const uint8_t *from = shards_of(worker)->mappings[piece->shard].bytes + piece->offset;
    piece->got = piece->bytes;
    if (piece->bytes >= LOAD_PINNED_MIN_BYTES && has_its_pages(shards_of(worker), piece->shard)) {
        piece->pinned = from;
        __atomic_store_n(&shards_of(worker)->mappings[piece->shard].copied, true, __ATOMIC_RELAXED);
        return;
    }
    if (guard_copy(to, from, piece->bytes))
        return;
    piece->got = 0;
    for (uint32_t i = 0; i < piece->count; i++) {
        uint64_t at = extents[i].begin - piece->offset;
        if (!guard_copy(to + at, from + at, extents[i].bytes))
            return;
        piece->got = at + extents[i].bytes > piece->got ? at + extents[i].bytes : piece->got;
    }
}

static enum status shards_gpu_start(struct ring_worker *worker, uint32_t index)
{
    struct chunk *chunk = &worker->chunks[index];
    for (uint32_t p = 0; p < chunk->piece_count; p++) {
        struct piece *piece = &chunk->pieces[p];
        uint8_t *to = ring_host(worker, index) + piece->at;
        if (piece->handle)
            read_piece(to, piece);
        else if (!piece->broken)
            copy_piece(worker, to, piece);
    }
    return STATUS_OK;
}

static enum status shards_gpu_complete(struct ring_worker *worker, uint32_t index)
{
    (void)worker, (void)index; /* start() has already read the chunk */
    return STATUS_OK;
}

static const struct ring_type shards_gpu_type = {.on_device = false,
                                                 .pieces_max = PIECES_MAX,
                                                 .alignment = 1,
                                                 .open = shards_gpu_open,
                                                 .close = shards_gpu_close,
                                                 .start = shards_gpu_start,
                                                 .complete = shards_gpu_complete};

/* ---- Mappings ---- */

static bool can_pin(int device)
{
    int supported = 0;
    return cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, device) ==
               cudaSuccess &&
           supported;
}

/* Pins a mapping, unless it is too small. If the driver cannot pin it, pins no more mappings. */
static void pin(struct shards_gpu *shards, struct mapping *mapping, uint64_t bytes)
{
    if (!shards->pins || bytes < LOAD_PINNED_MIN_BYTES)
        return;
    mapping->pinned = cudaHostRegister(mapping->bytes, bytes, cudaHostRegisterReadOnly) == cudaSuccess;
    shards->pins = mapping->pinned;
    if (!mapping->pinned)
        (void)cudaGetLastError(); /* later calls would report it again */
}

static enum status map_shard(struct shards_gpu *shards, uint32_t shard)
{
    const struct dataset *dataset = shards->dataset;
    const struct dataset_file *file = &dataset->files[shard];
    int fd;
    TRY(dataset_file_open(dataset, shard, 0, &fd));
    void *mapping = mmap(NULL, file->bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    int failure = errno;
    close(fd);
    if (mapping == MAP_FAILED)
        return status_set(status_of_errno(failure), "%s/%s: cannot map %llu bytes: %s", dataset->path,
                          file->name, (unsigned long long)file->bytes, strerror(failure));
    shards->mappings[shard].bytes = static_cast<uint8_t *>(mapping);
    pin(shards, &shards->mappings[shard], file->bytes);
    return STATUS_OK;
}

/* Maps all shards that have samples and are not mapped yet. */
static enum status map_all(struct shards_gpu *shards)
{
    const struct dataset *dataset = shards->dataset;
    for (uint32_t f = 0; f < dataset->file_count; f++)
        if (!shards->mappings[f].bytes && dataset->shard_first[f] < dataset->shard_first[f + 1])
            TRY(map_shard(shards, f));
    return STATUS_OK;
}

/* ---- The variant ---- */

/* Fails if a pinned shard changed while it was copied: if it is truncated, Linux writes zeros to the end of
 * its last page, which a copy may read. */
static enum status shards_gpu_run(void *state, uint64_t number, struct run_time *time)
{
    const struct shards_gpu *shards = static_cast<const struct shards_gpu *>(state);
    const struct dataset *dataset = shards->dataset;
    for (uint32_t f = 0; shards->pins && f < dataset->file_count; f++)
        shards->mappings[f].copied = false;
    TRY(ring_run(state, number, time));
    for (uint32_t f = 0; shards->pins && f < dataset->file_count; f++)
        if (shards->mappings[f].copied && !has_its_pages(shards, f))
            return status_set(STATUS_FAILED, "%s/%s: the file was changed while it was copied to the GPU",
                              dataset->path, dataset->files[f].name);
    return STATUS_OK;
}

/* No copy is in flight: delivery_run() waits for all of them, also after a failure. */
static void shards_gpu_teardown(void *state)
{
    struct shards_gpu *shards = static_cast<struct shards_gpu *>(state);
    guard_close(&shards->guard);
    for (uint32_t f = 0; shards->mappings && f < shards->dataset->file_count; f++) {
        if (shards->mappings[f].pinned)
            (void)cudaHostUnregister(shards->mappings[f].bytes);
        if (shards->mappings[f].bytes)
            munmap(shards->mappings[f].bytes, shards->dataset->files[f].bytes);
    }
    free(shards->mappings);
    ring_close(&shards->ring);
    delete shards;
}

/* Pins the shards before the rings are opened, because the size of their chunks depends on whether they can
 * be pinned. */
static enum status open_shards(struct shards_gpu *shards, const struct resources *resources,
                               const struct load *load)
{
    double pin_s = 0;
    shards->dataset = load->dataset;
    shards->mappings =
        static_cast<struct mapping *>(calloc(load->dataset->file_count, sizeof *shards->mappings));
    TRY(ALLOCATED(shards->mappings, "out of memory for %u shards", load->dataset->file_count));
    shards->pins = load_should_pin(load) && can_pin(resources->device);
    if (shards->pins) {
        double begin_s = timer_now_s();
        CUDA_TRY(cudaSetDevice(resources->device));
        TRY(map_all(shards));
        pin_s = timer_now_s() - begin_s;
    }
    bool pinned = false; /* small shards are not pinned */
    for (uint32_t f = 0; shards->pins && f < load->dataset->file_count; f++)
        pinned |= shards->mappings[f].pinned;
    uint64_t chunk_bytes =
        pinned ? load_large_chunk(load, resources->threads, LOAD_PINNED_CHUNK_BYTES) : load->chunk_bytes;
    TRY(ring_open(&shards->ring, resources, load, chunk_bytes, &shards_gpu_type));
    shards->ring.delivery.result.pin_s = pin_s;
    return guard_open(&shards->guard);
}

static enum status shards_gpu_ready(void *state, uint64_t number)
{
    struct shards_gpu *shards = static_cast<struct shards_gpu *>(state);
    TRY(delivery_ready(&shards->ring.delivery, number));
    return shards->ring.delivery.load->given->cache == LOAD_WARM ? map_all(shards) : STATUS_OK;
}

static const struct load_traits traits = {.shards = true,
                                          .device = true,
                                          .ring = true,
                                          .decodes = true,
                                          .timed = "order+copy+transfer+unpack",
                                          .timed_unless_warm = "order+open+read+transfer+unpack",
                                          .copy = ring_copy,
                                          .verify_slots = delivery_verify_slots};

extern "C" const struct variant variant_shards_gpu = {.platform = "cuda",
                                                      .threaded = true,
                                                      .traits = &traits,
                                                      .probe = device_probe_variant,
                                                      .setup = delivery_setup<struct shards_gpu, open_shards>,
                                                      .ready = shards_gpu_ready,
                                                      .run = shards_gpu_run,
                                                      .fetch = delivery_fetch,
                                                      .teardown = shards_gpu_teardown};
