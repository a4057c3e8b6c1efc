#include "load/ring.cuh"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "core/timer.h"
#include "machine/host.h"

/* ---- Plans of chunks: which samples a chunk contains. Its pieces have samples of a single shard each ----
 */

/* Asks the operating system to read the shards of the next segments into the page cache. */
static void read_ahead(const struct ring_worker *worker, struct ring_share *share)
{
    const struct load *load = share->queue->delivery->load;
    const struct order *order = &share->queue->order;
    if (load->given->cache == LOAD_WARM || worker->ring->type->on_device)
        return; /* the shards are in the page cache, or cuFile reads them, which may bypass the page cache */
    for (; share->asked < order->segment_count && share->asked <= share->segment + load->given->readahead;
         share->asked++)
        dataset_file_ask(load->dataset, order->segments[share->asked].shard);
}

/* Drops one reference to an open shard, which may be NULL. Closes the shard if that was the last reference.
 */
static void ring_release(struct ring_worker *worker, struct open_shard *opened)
{
    if (!opened || __atomic_sub_fetch(&opened->users, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    if (opened->handle && worker->ring->type->close)
        worker->ring->type->close(worker, opened->handle);
    free(opened);
}

/* Opens the shard of a new segment. If load_skips(load) is set and opening fails with STATUS_FAILED, this is
 * not an error: the shard's samples are counted as lost. */
static enum status open_segment(struct ring_worker *worker, struct ring_share *share, uint32_t shard)
{
    struct piece piece = {};
    read_ahead(worker, share);
    piece.shard = shard;
    enum status status = worker->ring->type->open(worker, &piece);
    share->broken = status != STATUS_OK;
    if (!share->broken && !piece.handle)
        return STATUS_OK;
    struct open_shard *opened = static_cast<struct open_shard *>(calloc(1, sizeof *opened));
    if (!opened) {
        if (piece.handle && worker->ring->type->close)
            worker->ring->type->close(worker, piece.handle);
        return status_set(STATUS_EXHAUSTED, "out of memory for an open shard");
    }
    opened->handle = piece.handle;
    opened->users = 1;
    share->opened = opened;
    if (!share->broken)
        return STATUS_OK;
    opened->failure = status_save(status);
    return load_skips(share->queue->delivery->load) && status == STATUS_FAILED ? STATUS_OK : status;
}

/* Fits as many samples of the current segment as possible into the rest of the chunk, as one piece. The piece
 * is empty if not even one sample fits. */
static void fit_piece(const struct ring *ring, const struct ring_share *share, const struct chunk *chunk,
                      struct piece *piece)
{
    const struct order_segment *segment = &share->queue->order.segments[share->segment];
    uint64_t begin = UINT64_MAX, end = 0, room = ring->span - share->arrival % ring->span;
    uint32_t left = segment->count - share->within, table = chunk->samples_max - chunk->samples;
    uint32_t most = left < table ? left : table, alignment = ring->type->alignment;
    *piece = {};
    piece->shard = segment->shard;
    piece->first = segment->first + share->within;
    piece->arrival = share->arrival;
    piece->at = align_to(chunk->bytes, PIECE_ALIGNMENT);
    piece->room = chunk->room;
    for (; piece->count < most && piece->count < room; piece->count++) {
        const struct array_extent *extent = &ring->delivery.arrays.extents[piece->first + piece->count];
        struct picture_room pictures = piece->room;
        uint64_t lower = extent->begin / alignment * alignment;
        uint64_t upper = align_to(extent->begin + extent->bytes, alignment);
        lower = lower < begin ? lower : begin;
        upper = upper > end ? upper : end;
        if (piece->at + (upper - lower) > ring->data_bytes)
            break;
        if (ring->delivery.load->given->decode &&
            !ring_decode_fits(ring, piece->first + piece->count, &pictures))
            break;
        piece->room = pictures;
        begin = lower;
        end = upper;
    }
    piece->offset = piece->count ? begin : 0;
    piece->bytes = piece->count ? end - begin : 0;
}

/* Adds the piece to the chunk and advances the share past it. */
static void take_piece(struct ring_worker *worker, struct ring_share *share, struct chunk *chunk,
                       struct piece *piece)
{
    piece->opened = share->opened;
    piece->handle = share->opened ? share->opened->handle : NULL;
    piece->broken = share->broken;
    if (piece->opened)
        __atomic_add_fetch(&piece->opened->users, 1, __ATOMIC_RELAXED);
    chunk->piece_count++;
    chunk->samples += piece->count;
    chunk->bytes = piece->at + piece->bytes;
    chunk->room = piece->room;
    share->arrival += piece->count;
    share->within += piece->count;
    if (share->within < share->queue->order.segments[share->segment].count)
        return;
    ring_release(worker, share->opened);
    share->opened = NULL;
    share->segment++;
    share->within = 0;
}

#define FIRST_SAMPLES 32 /* of the first chunk, if the device decodes */

/* Returns how many samples the next chunk of a share may have. If the device decodes, the first chunks of a
 * run are small, so that decoding starts early, and the chunks of a span have equal sizes. */
static uint32_t samples_max(const struct ring *ring, const struct ring_share *share)
{
    uint64_t most = ring->table_max, left = share->queue->order.count - share->arrival;
    if (ring->room.pixels == 0)
        return ring->table_max;
    if (share->epochs == 1 && share->arrival < most)
        most = share->arrival > FIRST_SAMPLES ? share->arrival : FIRST_SAMPLES;
    most = most < ring->table_max ? most : ring->table_max;
    left = left < ring->span - share->arrival % ring->span ? left : ring->span - share->arrival % ring->span;
    const uint64_t chunks = (left + most - 1) / most;
    return (uint32_t)((left + chunks - 1) / chunks);
}

/* Plans the next chunk of a share that the worker has claimed. The chunk gets the next samples in reading
 * order, until the buffer, its table or the list of pieces is full, or the span ends. Opens the shards. */
static enum status ring_plan_chunk(struct ring_worker *worker, struct ring_share *share, struct chunk *chunk)
{
    const struct ring *ring = worker->ring;
    const struct order *order = &share->queue->order;
    chunk->samples_max = samples_max(ring, share);
    while (share->segment < order->segment_count && chunk->piece_count < ring->type->pieces_max) {
        struct piece *piece = &chunk->pieces[chunk->piece_count];
        fit_piece(ring, share, chunk, piece);
        if (piece->count == 0)
            break;
        if (share->within == 0)
            TRY(open_segment(worker, share, piece->shard));
        take_piece(worker, share, chunk, piece);
        if (share->arrival % ring->span == 0)
            break;
    }
    return STATUS_OK;
}

#define COPY_MIN_BYTES ((uint64_t)1 << 30)
#define COPY_MAX_BYTES ((uint64_t)4 << 30)

/* ---- Choosing a chunk ---- */

static bool is_at_end(const struct ring_share *share)
{
    return share->arrival == share->queue->order.count;
}

static bool is_over(const struct ring_share *share)
{
    return share->epochs == share->queue->delivery->load->epochs && is_at_end(share);
}

/* Chooses among the shares that this worker may continue now. Returns the one whose next samples are needed
 * first, or NULL if there is none. Sets `*over` to whether all shares that this worker may read have been
 * read completely. */
static struct ring_share *most_urgent(const struct ring_worker *worker, bool *over)
{
    const struct delivery *delivery = &worker->ring->delivery;
    bool all = delivery->load->control->consumer;
    uint32_t first = all ? 0 : worker->queue->number, behind = all ? delivery->workers : first + 1;
    struct ring_share *urgent = NULL;
    uint64_t wanted = UINT64_MAX;
    *over = true;
    for (uint32_t w = first; w < behind; w++) {
        struct ring_share *share = &worker->ring->shares[w];
        if (!share->claimed && is_over(share))
            continue;
        *over = false;
        if (share->claimed || (is_at_end(share) && share->in_flight > 0))
            continue;
        uint64_t turn = queue_batch(share->queue, share->arrival) * delivery->workers + w;
        if (turn >= wanted)
            continue;
        wanted = turn;
        urgent = share;
    }
    return urgent;
}

static void end_epoch(struct ring_share *share)
{
    uint64_t lost = share->queue->losses.checksum.count;
    if (share->epochs == 0)
        return;
    queue_note(share->queue, lost - share->lost);
    queue_next_epoch(share->queue);
    share->lost = lost;
}

static void begin_epoch(struct ring_share *share)
{
    struct output_queue *queue = share->queue;
    const struct verifier *verifier = &queue->delivery->verifier;
    end_epoch(share);
    order_make(&verifier->plan, queue->epoch + share->epochs,
               verifier->load->rank * queue->delivery->workers + queue->number, &queue->order);
    share->segment = share->within = share->arrival = share->asked = 0;
    share->epochs++;
}

/* Returns whether the slots of the next chunk may be written: all slots up to the end of its span (see
 * delivery_span()). */
static bool has_room(const struct ring *ring, const struct ring_share *share)
{
    return queue_make_room(share->queue, (share->arrival / ring->span + 1) * ring->span);
}

/* Waits for a share whose next chunk has free slots, claims the share, and sets `*claimed` to it. Sets
 * `*claimed` to NULL if no samples are left to read. If the worker still has chunks to complete, sets NULL
 * instead of waiting, because other workers may wait for these chunks. */
static enum status claim(struct ring_worker *worker, struct ring_share **claimed)
{
    struct delivery *delivery = &worker->ring->delivery;
    std::unique_lock<std::mutex> guard = delivery_guard(delivery);
    for (;;) {
        bool over;
        TRY(queue_check_failed(worker->queue));
        struct ring_share *share = most_urgent(worker, &over);
        bool begins = share && is_at_end(share);
        bool fits = share && (begins || has_room(worker->ring, share));
        *claimed = NULL;
        if (over || (!fits && worker->completed < worker->started))
            return STATUS_OK;
        if (!fits && !(share && queue_handed(share->queue))) {
            /* Reached only with a consumer, so `guard` holds the lock. Without a consumer, no other worker
             * reads this share. Its next chunk then always has free slots once all chunks of this worker are
             * complete. */
            RANGE(WAIT);
            delivery->changed.wait(guard);
            continue;
        }
        share->claimed = true;
        if (fits && !begins) {
            share->in_flight++;
            *claimed = share;
            return STATUS_OK;
        }
        bool locked = guard.owns_lock();
        if (locked)
            guard.unlock();
        if (begins)
            begin_epoch(share);
        else
            TRY(queue_free(share->queue));
        if (locked)
            guard.lock();
        share->claimed = false;
        delivery->changed.notify_all();
    }
}

static void unclaim(struct ring_share *share)
{
    struct delivery *delivery = share->queue->delivery;
    std::unique_lock<std::mutex> guard = delivery_guard(delivery);
    share->claimed = false;
    delivery->changed.notify_all();
}

/* ---- Completing a chunk ---- */

static enum status piece_fault(const struct output_queue *queue, const struct piece *piece, uint32_t sample)
{
    const struct dataset *dataset = queue->delivery->load->dataset;
    if (piece->broken)
        return status_restore(&piece->opened->failure);
    return status_set(STATUS_FAILED, "%s/%s: offset %llu: sample '%s': %s", dataset->path,
                      dataset->files[piece->shard].name, (unsigned long long)(piece->offset + piece->got),
                      dataset->samples[sample].key,
                      piece->error ? strerror(piece->error) : "the file ends inside this sample");
}

/* Adds the samples of a piece to the chunk's table. Records samples that could not be read as lost. */
static enum status tabulate(struct output_queue *queue, const struct piece *piece, uint32_t epoch,
                            struct unpack_entry *table, uint32_t *count)
{
    for (uint32_t i = 0; i < piece->count; i++) {
        const struct array_extent *extent = &queue->delivery->arrays.extents[piece->first + i];
        uint32_t sample = piece->first + i, slot = queue_slot(queue, piece->arrival + i);
        uint64_t within = extent->begin - piece->offset;
        bool came = !piece->broken && within + extent->bytes <= piece->got;
        queue->held[slot] = came ? sample : DELIVERY_LOST;
        queue->held_epoch[slot] = epoch;
        if (came)
            table[(*count)++] = {piece->at + within, sample, slot};
        else
            TRY(queue_lose(queue, sample, piece_fault(queue, piece, sample)));
    }
    return STATUS_OK;
}

/* The tables of a chunk, which follow its samples in the buffer. */
struct tables {
    uint64_t unpack, fits, end; /* offsets of the first unpack entry, the first fit entry, and the end */
    uint32_t count;
};

static cudaError_t to_device(uint8_t *to, const uint8_t *from, uint64_t bytes, cudaStream_t stream)
{
    return bytes > 0 ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream) : cudaSuccess;
}

/* Copies the chunk to the device. If the chunk was read into a device buffer, copies only its tables. Pieces
 * that are in other pinned memory are copied from there. */
static enum status copy_chunk(struct ring_worker *worker, uint32_t index, const struct tables *tables)
{
    const struct chunk *chunk = &worker->chunks[index];
    uint8_t *device = ring_device(worker, index);
    const uint8_t *host = ring_host(worker, index);
    uint64_t from = worker->ring->type->on_device ? tables->unpack : 0; /* where the next copy begins */
    RANGE(COPY);
    for (uint32_t p = 0; p < chunk->piece_count; p++) {
        const struct piece *piece = &chunk->pieces[p];
        worker->piece_bytes += piece->bytes;
        if (!piece->pinned)
            continue;
        CUDA_TRY(to_device(device + from, host + from, piece->at - from, worker->copies));
        CUDA_TRY(to_device(device + piece->at, piece->pinned, piece->bytes, worker->copies));
        worker->pinned_bytes += piece->bytes;
        from = p + 1 < chunk->piece_count ? piece[1].at : tables->unpack;
    }
    CUDA_TRY(to_device(device + from, host + from, tables->end - from, worker->copies));
    return STATUS_OK;
}

/* Copies the chunk to the device, and launches the kernels that unpack it. */
static enum status launch(struct ring_worker *worker, uint32_t index, const struct tables *tables)
{
    struct chunk *chunk = &worker->chunks[index];
    struct output_queue *queue = chunk->share->queue;
    TRY(copy_chunk(worker, index, tables));
    CUDA_TRY(cudaEventRecord(worker->copied[index], worker->copies));
    CUDA_TRY(cudaStreamWaitEvent(queue->stream, worker->copied[index], 0));
    struct unpack job = queue_job(queue);
    job.bytes = ring_device(worker, index);
    job.entries = reinterpret_cast<const struct unpack_entry *>(job.bytes + tables->unpack);
    job.count = tables->count;
    TRY(worker->decoding ? unpack_checksums_launch(&job, queue->stream) : unpack_launch(&job, queue->stream));
    if (worker->decoding)
        TRY(ring_decode_launch(worker, index, tables->fits, tables->count, queue->stream));
    CUDA_TRY(cudaEventRecord(worker->unpacked[index], queue->stream));
    worker->unpacked_latest = worker->unpacked[index];
    chunk->launched = true;
    return STATUS_OK;
}

/* Records that the chunk's samples are lost or being unpacked. Delivers the batches that are now complete. */
static enum status deliver(struct chunk *chunk)
{
    struct ring_share *share = chunk->share;
    struct delivery *delivery = share->queue->delivery;
    std::unique_lock<std::mutex> guard = delivery_guard(delivery);
    for (uint32_t p = 0; p < chunk->piece_count; p++)
        queue_fill(share->queue, chunk->pieces[p].arrival, chunk->pieces[p].count);
    TRY(queue_advance(share->queue));
    if (--share->in_flight == 0)
        delivery->changed.notify_all();
    return STATUS_OK;
}

/* Completes the oldest chunk that was started. */
static enum status complete(struct ring_worker *worker)
{
    uint32_t index = (uint32_t)(worker->completed % worker->ring->buffers);
    struct chunk *chunk = &worker->chunks[index];
    struct tables tables = {};
    tables.unpack = align_to(chunk->bytes, sizeof(struct unpack_entry));
    struct unpack_entry *entries =
        reinterpret_cast<struct unpack_entry *>(ring_host(worker, index) + tables.unpack);
    TRY(worker->ring->type->complete(worker, index));
    for (uint32_t p = 0; p < chunk->piece_count; p++) {
        TRY(tabulate(chunk->share->queue, &chunk->pieces[p], chunk->epoch, entries, &tables.count));
        ring_release(worker, chunk->pieces[p].opened);
        chunk->pieces[p].opened = NULL; /* after a failure, abandon() must not release it again */
    }
    worker->completed++;
    tables.end = tables.unpack + tables.count * sizeof *entries;
    if (worker->decoding)
        TRY(ring_decode(worker, index, entries, &tables.count, &tables.fits, &tables.end));
    if (tables.count > 0)
        TRY(launch(worker, index, &tables));
    return deliver(chunk);
}

/* ---- Reading ---- */

/* Waits on the host until the previous chunk in the next buffer has been unpacked. The next copy into this
 * buffer then never waits for a kernel on the device, so copies follow each other without a gap. */
static enum status await_buffer(struct ring_worker *worker)
{
    uint32_t index = (uint32_t)(worker->started % worker->ring->buffers);
    RANGE(WAIT);
    if (worker->chunks[index].launched)
        CUDA_TRY(cudaEventSynchronize(worker->unpacked[index]));
    return STATUS_OK;
}

/* Plans the next chunk of the share, releases the claim, and starts reading the chunk. */
static enum status start(struct ring_worker *worker, struct ring_share *share)
{
    uint32_t index = (uint32_t)(worker->started % worker->ring->buffers);
    struct chunk *chunk = &worker->chunks[index];
    chunk->share = share;
    chunk->piece_count = chunk->samples = 0;
    chunk->bytes = 0;
    chunk->room = {};
    chunk->epoch = (uint32_t)(share->queue->epoch + share->epochs - 1);
    worker->started++;
    TRY(ring_plan_chunk(worker, share, chunk));
    unclaim(share);
    return worker->ring->type->start(worker, index);
}

static enum status read_all(struct ring_worker *worker)
{
    const struct ring *ring = worker->ring;
    uint32_t ahead = ring->type->on_device ? ring->buffers : 1;
    for (;;) {
        struct ring_share *share = NULL;
        TRY(queue_check_failed(worker->queue));
        if (worker->started - worker->completed < ahead) {
            TRY(await_buffer(worker));
            TRY(claim(worker, &share));
        }
        if (share)
            TRY(start(worker, share));
        else if (worker->completed < worker->started)
            TRY(complete(worker));
        else
            return STATUS_OK;
    }
}

/* Call after a failure. Waits for reads in flight and closes their shards. */
static void abandon(struct ring_worker *worker)
{
    for (; worker->completed < worker->started; worker->completed++) {
        uint32_t index = (uint32_t)(worker->completed % worker->ring->buffers);
        struct chunk *chunk = &worker->chunks[index];
        (void)worker->ring->type->complete(worker, index);
        for (uint32_t p = 0; p < chunk->piece_count; p++)
            ring_release(worker, chunk->pieces[p].opened);
    }
}

/* Waits until other workers have finished reading from this worker's share. */
static enum status end_share(struct ring_worker *worker, struct ring_share *share)
{
    struct delivery *delivery = &worker->ring->delivery;
    if (delivery->load->control->consumer) {
        std::unique_lock<std::mutex> guard(delivery->lock);
        delivery->changed.wait(
            guard, [&] { return (share->in_flight == 0 && !share->claimed) || delivery_failed(delivery); });
        TRY(queue_check_failed(worker->queue));
    }
    end_epoch(share);
    return STATUS_OK;
}

static enum status ring_read(struct output_queue *queue)
{
    struct ring_worker *worker = static_cast<struct ring_worker *>(queue->own);
    enum status status = read_all(worker);
    if (status == STATUS_OK)
        return end_share(worker, &worker->ring->shares[queue->number]);
    const struct failure failure = status_save(status);
    abandon(worker);
    return status_restore(&failure);
}

enum status ring_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct ring *ring = static_cast<struct ring *>(state);
    for (uint32_t w = 0; w < ring->delivery.workers; w++) {
        ring->shares[w] = {.queue = &ring->delivery.queues[w]};
        ring->workers[w].piece_bytes = ring->workers[w].pinned_bytes = 0;
        if (ring->workers[w].decoding)
            ring->workers[w].decoding->time_s = 0;
    }
    enum status status = delivery_run(&ring->delivery, number, ring_read);
    uint64_t bytes = 0, pinned_bytes = 0;
    ring->delivery.result.decode_s = 0;
    ring->delivery.result.memory_bytes = ring->memory_bytes + ring->decoder.bytes;
    for (uint32_t w = 0; w < ring->delivery.workers; w++) {
        ring_release(&ring->workers[w], ring->shares[w].opened); /* a failure may leave shards open */
        bytes += ring->workers[w].piece_bytes;
        pinned_bytes += ring->workers[w].pinned_bytes;
        if (ring->workers[w].decoding)
            ring->delivery.result.decode_s += ring->workers[w].decoding->time_s / ring->delivery.workers;
    }
    ring->delivery.result.pinned_share = bytes ? (double)pinned_bytes / (double)bytes : 0;
    return status;
}

/* ---- Opening ---- */

static enum status open_worker(struct ring *ring, struct ring_worker *worker)
{
    worker->copied = static_cast<cudaEvent_t *>(calloc(ring->buffers, sizeof *worker->copied));
    worker->unpacked = static_cast<cudaEvent_t *>(calloc(ring->buffers, sizeof *worker->unpacked));
    worker->chunks = static_cast<struct chunk *>(calloc(ring->buffers, sizeof *worker->chunks));
    TRY(ALLOCATED(worker->copied && worker->unpacked && worker->chunks,
                  "out of memory for a ring of %u buffers", ring->buffers));
    TRY(stream_open(&worker->copies)); /* has a high priority, because nvJPEG launches kernels on it */
    CUDA_TRY(cudaMallocHost(&worker->host, ring->buffers * ring->buffer_bytes));
    CUDA_TRY(cudaMalloc(&worker->device, ring->buffers * ring->buffer_bytes));
    for (uint32_t b = 0; b < ring->buffers; b++) {
        worker->chunks[b].pieces =
            static_cast<struct piece *>(calloc(ring->type->pieces_max, sizeof(struct piece)));
        TRY(ALLOCATED(worker->chunks[b].pieces, "out of memory for a ring of %u buffers", ring->buffers));
        CUDA_TRY(cudaEventCreateWithFlags(&worker->copied[b], cudaEventDisableTiming));
        CUDA_TRY(cudaEventCreateWithFlags(&worker->unpacked[b], cudaEventDisableTiming));
    }
    return ring->delivery.load->given->decode ? ring_decode_open(worker) : STATUS_OK;
}

/* Computes the sizes of buffers and tables. A buffer has room for `chunk_bytes` bytes of samples, or for
 * the largest sample if that sample is larger than a chunk. The chunk's table follows the samples. A table
 * has one entry for each sample that could fit in a buffer; see also ring_decode_size(). */
static void size_buffers(struct ring *ring, const struct load *load, uint64_t chunk_bytes)
{
    const struct arrays *arrays = &ring->delivery.arrays;
    uint64_t least = UINT64_MAX;
    uint64_t largest = align_to(arrays->bytes_max + 2 * (ring->type->alignment - 1), PIECE_ALIGNMENT);
    for (uint32_t i = 0; i < load->dataset->sample_count; i++)
        least = arrays->extents[i].bytes < least ? arrays->extents[i].bytes : least;
    least = least > 0 ? least : 1; /* an empty file */
    ring->data_bytes = chunk_bytes > largest ? chunk_bytes : largest;
    ring->table_max = (uint32_t)(ring->data_bytes / align_to(least, PIECE_ALIGNMENT));
    if (load->given->decode)
        ring_decode_size(ring, load);
    ring->buffer_bytes = align_to(ring->data_bytes + ring->table_max * sizeof(struct unpack_entry), 4096);
    if (load->given->decode)
        ring->buffer_bytes += align_to(ring->table_max * sizeof(struct fit_entry) + 4096, 4096);
    ring->span = delivery_span(load, ring->table_max);
}

enum status ring_open(struct ring *ring, const struct resources *resources, const struct load *load,
                      uint64_t chunk_bytes, const struct ring_type *type)
{
    uint32_t workers = (uint32_t)resources->threads;
    ring->type = type;
    ring->buffers = load->given->ring;
    TRY(delivery_begin(&ring->delivery, resources, load, false, false, workers));
    if (load->given->decode)
        TRY(ring_decode_begin(ring, load, &chunk_bytes));
    size_buffers(ring, load, chunk_bytes);
    ring->delivery.result.chunk_bytes = chunk_bytes;
    ring->buffer_bytes += align_to(ring->room.fitted, 4096);
    uint64_t bytes = (uint64_t)workers * ring->buffers * ring->buffer_bytes;
    TRY(memory_check(bytes, "the pinned buffers", "lower --ring, --chunk or --threads"));
    TRY(delivery_open(&ring->delivery, delivery_stream_slots(load, workers, ring->span),
                      bytes + workers * ring->room.pixels));
    ring->memory_bytes = ring->delivery.result.memory_bytes + bytes; /* including the pinned buffers */
    ring->delivery.result.memory_bytes = ring->memory_bytes;
    ring->workers = static_cast<struct ring_worker *>(calloc(workers, sizeof *ring->workers));
    ring->shares = static_cast<struct ring_share *>(calloc(workers, sizeof *ring->shares));
    TRY(ALLOCATED(ring->workers && ring->shares, "out of memory"));
    for (uint32_t w = 0; w < workers; w++) {
        struct ring_worker *worker = &ring->workers[w];
        worker->ring = ring;
        worker->queue = &ring->delivery.queues[w];
        worker->queue->own = worker;
        TRY(open_worker(ring, worker));
    }
    return STATUS_OK;
}

static void close_worker(const struct ring *ring, struct ring_worker *worker)
{
    for (uint32_t b = 0; b < ring->buffers; b++) {
        if (worker->copied)
            destroy(worker->copied[b]);
        if (worker->unpacked)
            destroy(worker->unpacked[b]);
        if (worker->chunks)
            free(worker->chunks[b].pieces);
    }
    destroy(worker->copies);
    ring_decode_close(worker);
    (void)cudaFreeHost(worker->host);
    (void)cudaFree(worker->device);
    free(worker->copied);
    free(worker->unpacked);
    free(worker->chunks);
}

void ring_close(struct ring *ring)
{
    for (uint32_t w = 0; ring->workers && w < ring->delivery.workers; w++)
        close_worker(ring, &ring->workers[w]);
    ring_decode_end(ring);
    free(ring->workers);
    free(ring->shares);
    delivery_close(&ring->delivery);
}

/* ---- Copy bandwidth ---- */

static cudaError_t copy_share(const struct ring_worker *worker, uint64_t bytes)
{
    const struct ring *ring = worker->ring;
    cudaError_t error = cudaSetDevice(ring->delivery.device);
    uint32_t index = 0;
    for (uint64_t at = 0; error == cudaSuccess && at < bytes; at += ring->data_bytes) {
        uint64_t left = bytes - at;
        error = cudaMemcpyAsync(ring_device(worker, index), ring_host(worker, index),
                                left < ring->data_bytes ? left : ring->data_bytes, cudaMemcpyHostToDevice,
                                worker->copies);
        index = (index + 1) % ring->buffers;
    }
    return error == cudaSuccess ? cudaStreamSynchronize(worker->copies) : error;
}

enum status ring_copy(void *state, double *bytes_per_s)
{
    struct ring *ring = static_cast<struct ring *>(state);
    if (ring->room.pixels > 0)
        return ring_decode_rate(ring, bytes_per_s);
    uint32_t workers = ring->delivery.workers;
    uint64_t bytes = ring->delivery.load->dataset->bytes;
    bytes = bytes < COPY_MIN_BYTES ? COPY_MIN_BYTES : bytes < COPY_MAX_BYTES ? bytes : COPY_MAX_BYTES;
    std::vector<cudaError_t> errors(workers, cudaSuccess);
    std::vector<std::thread> threads;
    bool started = true;
    double begin_s = timer_now_s();
    try {
        for (uint32_t w = 1; w < workers; w++)
            threads.emplace_back([&, w] { errors[w] = copy_share(&ring->workers[w], bytes / workers); });
    } catch (const std::exception &) { /* thrown if threads or memory run out */
        started = false;
    }
    errors[0] = copy_share(&ring->workers[0], bytes / workers);
    for (std::thread &thread : threads)
        thread.join();
    if (!started)
        return status_set(STATUS_FAILED, "cannot start %u threads; lower --threads", workers);
    *bytes_per_s = (double)(bytes / workers * workers) / (timer_now_s() - begin_s);
    for (cudaError_t error : errors)
        CUDA_TRY(error);
    return STATUS_OK;
}
