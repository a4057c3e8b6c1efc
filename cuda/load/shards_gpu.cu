/* `shards-gpu`: all threads read chunks of shards into pinned buffers, which are copied to the device and
 * unpacked there. Chunks are read, not mapped: pread() copies as fast as a mapping's pages are walked, and a
 * file that shrinks is an error code, not a signal (docs/load_gpu.md has both times). */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include <new>

#include "common/device.h"
#include "load/ring.cuh"

static void read_piece(const struct ring_worker *worker, uint32_t index, struct piece *piece)
{
    uint8_t *to = ring_host(worker, index) + piece->at;
    while (piece->fd >= 0 && piece->got < piece->bytes) {
        ssize_t count =
            pread(piece->fd, to + piece->got, piece->bytes - piece->got, (off_t)(piece->offset + piece->got));
        if (count < 0 && errno == EINTR)
            continue;
        piece->error = count < 0 ? errno : 0;
        if (count <= 0)
            return;
        piece->got += (uint64_t)count;
    }
}

static enum status shards_gpu_start(struct ring_worker *worker, uint32_t index)
{
    struct chunk *chunk = &worker->chunks[index];
    for (uint32_t p = 0; p < chunk->piece_count; p++)
        read_piece(worker, index, &chunk->pieces[p]);
    return STATUS_OK;
}

static enum status shards_gpu_complete(struct ring_worker *worker, uint32_t index)
{
    (void)worker, (void)index; /* start() has read it */
    return STATUS_OK;
}

static const struct ring_type shards_gpu_type = {.on_device = false,
                                                 .pieces_max = PIECES_MAX,
                                                 .open = NULL,
                                                 .close = NULL,
                                                 .start = shards_gpu_start,
                                                 .complete = shards_gpu_complete};

static enum status shards_gpu_probe(const struct resources *resources)
{
    return device_probe(resources->device);
}

static void shards_gpu_teardown(void *state)
{
    struct ring *ring = static_cast<struct ring *>(state);
    ring_close(ring);
    delete ring;
}

static enum status shards_gpu_setup(const struct resources *resources, const void *input, void **state)
{
    struct ring *ring = new (std::nothrow) struct ring();
    if (!ring)
        return status_set(STATUS_FAILED, "out of memory");
    enum status status =
        ring_open(ring, resources, static_cast<const struct load *>(input), &shards_gpu_type);
    if (status != STATUS_OK)
        shards_gpu_teardown(ring);
    else
        *state = ring;
    return status;
}

static enum status shards_gpu_ready(void *state, uint64_t number)
{
    return delivery_ready(&static_cast<struct ring *>(state)->delivery, number);
}

static enum status shards_gpu_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    return ring_run(static_cast<struct ring *>(state), number);
}

static enum status shards_gpu_fetch(void *state, void *result)
{
    return delivery_fetch(&static_cast<struct ring *>(state)->delivery,
                          static_cast<struct load_result *>(result));
}

static const struct load_traits traits = {.shards = true,
                                          .files = false,
                                          .device = true,
                                          .ring = true,
                                          .keyed = false,
                                          .calls = false,
                                          .timed = "order+open+read+copy+unpack",
                                          .timed_unless_warm = NULL,
                                          .copy = ring_copy};

extern "C" const struct variant variant_shards_gpu = {.platform = "cuda",
                                                      .threaded = true,
                                                      .traits = &traits,
                                                      .probe = shards_gpu_probe,
                                                      .setup = shards_gpu_setup,
                                                      .ready = shards_gpu_ready,
                                                      .run = shards_gpu_run,
                                                      .fetch = shards_gpu_fetch,
                                                      .teardown = shards_gpu_teardown};
