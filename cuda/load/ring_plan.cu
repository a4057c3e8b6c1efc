#include "load/ring_plan.cuh"

#include <stdio.h>
#include <stdlib.h>

#include "load/ring_decode.cuh"

/* Asks the operating system to read the shards of the next segments into the page cache. */
static void read_ahead(const struct ring_worker *worker, struct ring_share *share)
{
    const struct load *load = share->queue->delivery->load;
    const struct order *order = &share->queue->order;
    if (load->cache == LOAD_WARM || worker->ring->type->on_device)
        return; /* the shards are in the page cache, or cuFile reads them, which may bypass the page cache */
    for (; share->asked < order->segment_count && share->asked <= share->segment + load->prefetch;
         share->asked++)
        dataset_file_ask(load->dataset, order->segments[share->asked].shard);
}

void ring_release(struct ring_worker *worker, struct open_shard *opened)
{
    if (!opened || __atomic_sub_fetch(&opened->users, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    if (opened->handle && worker->ring->type->close)
        worker->ring->type->close(worker, opened->handle);
    free(opened);
}

/* Opens the shard of a new segment. If load->skip is set and opening fails with STATUS_FAILED, this is not an
 * error: the shard's samples are counted as lost. */
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
    snprintf(opened->failure, sizeof opened->failure, "%s", status_text());
    return share->queue->delivery->load->skip && status == STATUS_FAILED ? STATUS_OK : status;
}

/* Fits as many samples of the current segment as possible into the rest of the chunk, as one piece. The piece
 * is empty if not even one sample fits. */
static void fit_piece(const struct ring *ring, const struct ring_share *share, const struct chunk *chunk,
                      struct piece *piece)
{
    const struct order_segment *segment = &share->queue->order.segments[share->segment];
    uint64_t begin = UINT64_MAX, end = 0, room = ring->span - share->arrival % ring->span;
    uint32_t left = segment->count - share->within, table = ring->table_max - chunk->samples;
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
        if (ring->delivery.load->decode && !ring_decode_fits(ring, piece->first + piece->count, &pictures))
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

enum status ring_plan_chunk(struct ring_worker *worker, struct ring_share *share, struct chunk *chunk)
{
    const struct ring *ring = worker->ring;
    const struct order *order = &share->queue->order;
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
