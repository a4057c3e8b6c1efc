/* `shards-uring`: one thread keeps up to --iodepth reads of --block KiB in flight. The buffers are registered
 * with io_uring, if the limit of locked memory permits. Reads bypass the page cache (O_DIRECT), except with
 * --cache warm. They are aligned to 4 KiB. The blocks of a shard are processed in order. Reads of the next
 * shard start before the current shard is complete. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/phase.h"
#include "data/plain_reader.h"
#include "reader.h"
#include "uring.h"

#define ALIGNMENT 4096u /* alignment of offsets, lengths and buffers for O_DIRECT, in bytes */

/* A read that is in flight, or complete but not processed yet. */
struct block {
    uint64_t offset;
    uint64_t wanted; /* number of bytes needed; the read is rounded up to a multiple of ALIGNMENT */
    uint32_t segment;
    int32_t result;
    bool done;
};

struct shards_uring {
    struct reader reader; /* must be first, because the functions of reader.h cast the state to it */
    struct io_uring ring;
    bool has_ring;
    bool registered;           /* the buffers are registered with io_uring */
    uint8_t *buffers;          /* `iodepth` buffers of block_bytes each */
    struct block *blocks;      /* a ring: block n is blocks[n % iodepth] */
    int *fds;                  /* file descriptor per segment of the epoch */
    uint64_t submitted, taken; /* number of blocks submitted and processed in this epoch */

    /* The next block to submit: its segment, its offset in the shard, and the end of the segment. */
    uint32_t segment;
    uint64_t offset, end;
};

/* ---- Submission ---- */

/* Computes the range of a segment in its shard. The start is rounded down to a multiple of ALIGNMENT. */
static void segment_range(const struct dataset *dataset, const struct order_segment *segment, uint64_t *begin,
                          uint64_t *end)
{
    dataset_range(dataset, segment->first, segment->count, begin, end);
    *begin = *begin / ALIGNMENT * ALIGNMENT;
}

/* Opens the shard of the next segment. Sets `*failure` to the errno, or 0. If the shard cannot be opened,
 * returns STATUS_OK if --on-error skip is given, else the error. A failure whose cause is not the shard, such
 * as too many open files or a missing O_DIRECT, is always an error. */
static enum status open_segment(struct shards_uring *uring, const struct order *order, int *failure)
{
    const struct load *load = uring->reader.load;
    const struct order_segment *segment = &order->segments[uring->segment];
    segment_range(load->dataset, segment, &uring->offset, &uring->end);
    enum status status = dataset_file_open(
        load->dataset, segment->shard, load->cache == LOAD_WARM ? 0 : O_DIRECT, &uring->fds[uring->segment]);
    *failure = status == STATUS_OK ? 0 : errno ? errno : EIO;
    if (status == STATUS_OK)
        return STATUS_OK;
    if (load->cache != LOAD_WARM && *failure == EINVAL)
        return status_prefix(STATUS_UNAVAILABLE, "this file system has no O_DIRECT; use --cache warm");
    return load->skip && status == STATUS_FAILED ? STATUS_OK : status;
}

/* Adds one failed block in place of a segment whose shard cannot be opened. When the block is processed, the
 * samples of the segment are recorded as lost. */
static void submit_failure(struct shards_uring *uring, int failure)
{
    uring->blocks[uring->submitted++ % uring->reader.load->iodepth] =
        (struct block){.offset = uring->offset,
                       .wanted = uring->end - uring->offset,
                       .segment = uring->segment++,
                       .result = -failure,
                       .done = true};
}

static void close_segment(struct shards_uring *uring, uint32_t segment)
{
    if (uring->fds[segment] >= 0)
        dataset_file_close(uring->reader.load->dataset, uring->fds[segment]);
    uring->fds[segment] = -1;
}

static void prepare_read(const struct shards_uring *uring, struct io_uring_sqe *sqe, uint8_t *buffer,
                         uint32_t wanted)
{
    uint32_t aligned = (wanted + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    int fd = uring->fds[uring->segment];
    if (uring->registered)
        io_uring_prep_read_fixed(sqe, fd, buffer, aligned, uring->offset, 0);
    else
        io_uring_prep_read(sqe, fd, buffer, aligned, uring->offset);
}

/* Queues reads until `iodepth` blocks are in flight or waiting to be processed. */
static enum status submit(struct shards_uring *uring, const struct order *order)
{
    const struct load *load = uring->reader.load;
    while (uring->submitted - uring->taken < load->iodepth && uring->segment < order->segment_count) {
        int failure = 0;
        if (uring->fds[uring->segment] < 0)
            TRY(open_segment(uring, order, &failure));
        if (failure) {
            submit_failure(uring, failure);
            continue;
        }
        uint32_t index = (uint32_t)(uring->submitted % load->iodepth);
        uint64_t left = uring->end - uring->offset;
        uint32_t wanted = left < load->block_bytes ? (uint32_t)left : load->block_bytes;
        struct io_uring_sqe *sqe =
            io_uring_get_sqe(&uring->ring); /* the ring has room for `iodepth` entries */
        if (!sqe)
            return status_set(STATUS_FAILED, "io_uring: the submission queue is full");
        uring->blocks[index] =
            (struct block){.offset = uring->offset, .segment = uring->segment, .wanted = wanted};
        prepare_read(uring, sqe, uring->buffers + (size_t)index * load->block_bytes, wanted);
        io_uring_sqe_set_data64(sqe, index);
        uring->submitted++;
        uring->offset += wanted;
        if (uring->offset == uring->end)
            uring->segment++;
    }
    return STATUS_OK;
}

/* ---- Completion ---- */

static void reap(struct shards_uring *uring)
{
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&uring->ring, &cqe) == 0) {
        struct block *block = &uring->blocks[io_uring_cqe_get_data64(cqe)];
        block->result = cqe->res;
        block->done = true;
        io_uring_cqe_seen(&uring->ring, cqe);
    }
}

/* Waits for the next block in order. If the read was short and the file has more data, reads the rest with
 * pread(). */
static enum status await(struct shards_uring *uring, const struct order *order, struct block **next)
{
    const struct load *load = uring->reader.load;
    uint32_t index = (uint32_t)(uring->taken % load->iodepth);
    struct block *block = *next = &uring->blocks[index];
    TRY(submit(uring, order));
    /* Submit before the reads in flight run out, so that the storage device stays busy while this thread
     * copies. */
    if (io_uring_sq_ready(&uring->ring) > load->iodepth / 8)
        TRY(uring_submit(&uring->ring));
    reap(uring);
    while (!block->done) {
        TRY(uring_wait(&uring->ring));
        reap(uring);
    }
    uint8_t *buffer = uring->buffers + (size_t)index * load->block_bytes;
    while (block->result >= 0 && (uint64_t)block->result < block->wanted) {
        uint32_t have = (uint32_t)block->result / ALIGNMENT * ALIGNMENT;
        ssize_t count = pread(uring->fds[block->segment], buffer + have, load->block_bytes - have,
                              (off_t)(block->offset + have));
        if (count < 0)
            block->result = -errno;
        else if (have + (uint32_t)count <= (uint32_t)block->result)
            break; /* end of the file */
        else
            block->result = (int32_t)(have + (uint32_t)count);
    }
    return STATUS_OK;
}

/* ---- Samples ---- */

/* The sample that is being copied, and the position in it. */
struct cursor {
    uint32_t arrival, sample, member;
    uint64_t done; /* bytes of the member already copied */
    uint8_t *to;   /* destination of the next byte; NULL before the first byte of the sample */
    bool lost;
};

static enum status block_fault(const struct shards_uring *uring, const struct order *order,
                               const struct block *block, const struct cursor *cursor)
{
    const struct dataset *dataset = uring->reader.load->dataset;
    int32_t result = block->result;
    uint64_t offset = block->offset + (result > 0 ? (uint64_t)result : 0);
    return status_set(STATUS_FAILED, "%s/%s: offset %llu: sample '%s': %s", dataset->path,
                      dataset->files[order->segments[block->segment].shard].name, (unsigned long long)offset,
                      dataset->samples[cursor->sample].key,
                      result < 0 ? strerror(-result) : "the file ends inside this sample");
}

/* Reads the data of a hard link through the page cache: an earlier part of the shard holds them, and no block
 * of the segment. */
static enum status take_linked(const struct dataset *dataset, const struct dataset_member *member,
                               uint8_t *to)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    enum status status = plain_bytes(&plain, member, member->size, to);
    plain_close(&plain);
    return status;
}

/* Counts the sample under the cursor as lost, once. `status` is the fault. */
static enum status lose(struct worker *worker, struct cursor *cursor, enum status status)
{
    if (!cursor->lost)
        TRY(worker_lose(worker, cursor->sample, status));
    cursor->lost = true;
    return STATUS_OK;
}

/* Copies the parts of samples that a block holds, up to sample number `end` (exclusive). */
static enum status take_block(struct worker *worker, const struct block *block, const uint8_t *bytes,
                              uint32_t end, struct cursor *cursor)
{
    struct shards_uring *uring = (struct shards_uring *)worker->reader;
    const struct dataset *dataset = worker->load->dataset;
    uint64_t have = block->result < 0 ? 0 : (uint64_t)block->result;
    uint64_t stop = block->offset + block->wanted; /* later blocks hold the rest */
    RANGE(COPY);
    while (cursor->sample < end) {
        const struct dataset_sample *sample = &dataset->samples[cursor->sample];
        const struct dataset_member *member = &dataset->members[sample->member + cursor->member];
        uint64_t from = member->offset + cursor->done, left = member->size - cursor->done;
        /* Even an empty member waits for the block that reaches its offset. Otherwise, a segment that ends
         * with an empty member could leave a block unprocessed. */
        if (!member->linked && (from > stop || (left > 0 && from == stop)))
            return STATUS_OK;
        if (!cursor->to)
            cursor->to = worker_slot(worker, cursor->arrival);
        size_t count = (size_t)(member->linked || left < stop - from ? left : stop - from);
        if (member->linked) {
            enum status status = take_linked(dataset, member, cursor->to);
            if (status != STATUS_OK)
                TRY(lose(worker, cursor, status));
        } else if (count > 0 && from + count > block->offset + have)
            TRY(lose(worker, cursor, block_fault(uring, &worker->order, block, cursor)));
        else if (count > 0)
            memcpy(cursor->to, bytes + (from - block->offset), count);
        cursor->to += count;
        cursor->done += count;
        if (cursor->done < member->size)
            return STATUS_OK;
        cursor->done = 0;
        if (++cursor->member < sample->members)
            continue;
        TRY(worker_arrived(worker, cursor->arrival, cursor->sample, cursor->lost));
        *cursor = (struct cursor){.arrival = cursor->arrival + 1, .sample = cursor->sample + 1};
    }
    return STATUS_OK;
}

static enum status take_all(struct worker *worker)
{
    struct shards_uring *uring = (struct shards_uring *)worker->reader;
    const struct order *order = &worker->order;
    struct cursor cursor = {0};
    for (uint32_t s = 0; s < order->segment_count; s++) {
        uint32_t end = order->segments[s].first + order->segments[s].count;
        cursor = (struct cursor){.arrival = cursor.arrival, .sample = order->segments[s].first};
        while (cursor.sample < end) {
            struct block *block;
            TRY(await(uring, order, &block));
            const uint8_t *bytes =
                uring->buffers + (size_t)(block - uring->blocks) * worker->load->block_bytes;
            TRY(take_block(worker, block, bytes, end, &cursor));
            uring->taken++;
        }
        close_segment(uring, s);
    }
    return STATUS_OK;
}

/* After a failure, waits for the reads in flight, because they write to the buffers. */
static void drain(struct shards_uring *uring)
{
    for (; uring->taken < uring->submitted; uring->taken++)
        while (!uring->blocks[uring->taken % uring->reader.load->iodepth].done) {
            if (uring_wait(&uring->ring) != STATUS_OK)
                return;
            reap(uring);
        }
}

static enum status uring_epoch(struct worker *worker)
{
    struct shards_uring *uring = (struct shards_uring *)worker->reader;
    uring->submitted = uring->taken = 0;
    uring->segment = 0;
    enum status status = take_all(worker);
    if (status == STATUS_OK)
        return STATUS_OK;
    char reason[1024];
    strncpy(reason, status_text(), sizeof reason - 1);
    reason[sizeof reason - 1] = '\0';
    drain(uring);
    for (uint32_t s = 0; s < worker->order.segment_count; s++)
        close_segment(uring, s);
    return status_set(status, "%s", reason);
}

/* ---- The variant ---- */

static enum status uring_variant_probe(const struct resources *resources)
{
    static const int operations[] = {IORING_OP_READ_FIXED, IORING_OP_READ, -1};
    (void)resources;
    return uring_probe(operations);
}

static void uring_teardown(void *state)
{
    struct shards_uring *uring = state;
    if (uring->has_ring)
        io_uring_queue_exit(&uring->ring);
    if (uring->reader.load)
        buffer_close(uring->buffers, (size_t)uring->reader.load->iodepth * uring->reader.load->block_bytes);
    free(uring->blocks);
    free(uring->fds);
    reader_close(&uring->reader);
    free(uring);
}

/* Warns once that the buffers are not registered, so Linux must pin their pages for every direct read. */
static void warn_unregistered(size_t bytes, int failure)
{
    static bool said;
    if (!said)
        status_warn("shards-uring: reads use unregistered buffers and are slower, because %zu bytes cannot "
                    "be registered: %s%s",
                    bytes, strerror(-failure),
                    failure == -ENOMEM ? "; raise ulimit -l, or lower --iodepth or --block" : "");
    said = true;
}

static enum status open_ring(struct shards_uring *uring, const struct load *load)
{
    size_t bytes = (size_t)load->iodepth * load->block_bytes;
    struct iovec whole = {.iov_len = bytes};
    uring->buffers = buffer_open(bytes);
    uring->reader.result.memory_bytes += buffer_allocated(bytes);
    uring->blocks = calloc(load->iodepth, sizeof *uring->blocks);
    uring->fds = malloc(load->dataset->file_count * sizeof *uring->fds);
    TRY(ALLOCATED(uring->buffers && uring->blocks && uring->fds,
                  "out of memory for %u blocks of %u bytes; lower --iodepth or --block", load->iodepth,
                  load->block_bytes));
    for (uint32_t f = 0; f < load->dataset->file_count; f++)
        uring->fds[f] = -1;
    whole.iov_base = uring->buffers;
    int failure = io_uring_queue_init(load->iodepth, &uring->ring, 0);
    if (failure < 0)
        return status_set(status_of_errno(-failure),
                          "io_uring: cannot create a ring of depth %u: %s; lower --iodepth", load->iodepth,
                          strerror(-failure));
    uring->has_ring = true;
    failure = io_uring_register_buffers(&uring->ring, &whole, 1);
    uring->registered = failure >= 0;
    if (failure < 0)
        warn_unregistered(bytes, failure);
    return STATUS_OK;
}

static enum status uring_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    const struct load *load = input;
    struct shards_uring *uring = *state = calloc(1, sizeof *uring);
    TRY(ALLOCATED(uring, "out of memory"));
    TRY(reader_open(&uring->reader, load, 1, reader_stream_slots(load), uring_epoch));
    return open_ring(uring, load);
}

static const struct load_traits traits = {.shards = true,
                                          .timed = "order+open+read+copy",
                                          .copy = reader_copy,
                                          .verify_slots = reader_verify_slots};

const struct variant variant_shards_uring = {
    READER_VARIANT,
    .probe = uring_variant_probe,
    .setup = uring_setup,
    .teardown = uring_teardown,
};
