/* `files-uring` and `shards-uring`: one thread keeps many requests in flight with io_uring.
 *
 * `files-uring` keeps --iodepth files in flight. Each file is a chain of linked requests (open, advise, read,
 * close) that Linux executes without further system calls. An open file uses an entry of the ring's file
 * table instead of a file descriptor of this process. A file may have been replaced by a pipe. io_uring polls
 * a pipe, even one opened with O_NONBLOCK, so a read would wait as long as some process has the pipe open for
 * writing. The fadvise between open and read prevents this wait. It has no effect on a file, but fails on a
 * pipe (ESPIPE), which cancels the read.
 *
 * `shards-uring` keeps up to --iodepth reads of --block KiB in flight. The buffers are registered with
 * io_uring, if the limit of locked memory permits. Reads bypass the page cache (O_DIRECT), except with
 * --cache warm. They are aligned to 4 KiB. The blocks of a shard are processed in order. Reads of the next
 * shard start before the current shard is complete. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/phase.h"
#include "data/plain_reader.h"
#include "reader.h"

/* ---- Rings ---- */

/* Checks that this process may create a ring and that Linux supports `operations`, which end with -1.
 * STATUS_UNAVAILABLE with the reason otherwise. */
static enum status probe_ring(const int *operations)
{
    struct io_uring ring;
    int failure = io_uring_queue_init(4, &ring, 0);
    if (failure < 0)
        return status_set(
            STATUS_UNAVAILABLE, "io_uring is not available: %s%s", strerror(-failure),
            failure == -EPERM
                ? " (blocked by kernel.io_uring_disabled, or by a seccomp filter, as in many containers)"
            : failure == -ENOMEM ? " (the limit of locked memory is too low: ulimit -l)"
            : failure == -ENOSYS ? " (the Linux kernel is too old, or a seccomp filter blocks it)"
                                 : "");
    struct io_uring_probe *probe = io_uring_get_probe_ring(&ring);
    enum status status = STATUS_OK;
    if (!probe)
        status =
            status_set(STATUS_UNAVAILABLE, "cannot query io_uring's operations: the Linux kernel is too old");
    for (; status == STATUS_OK && *operations >= 0; operations++)
        if (!io_uring_opcode_supported(probe, *operations))
            status = status_set(STATUS_UNAVAILABLE, "the io_uring of this Linux kernel lacks operation %d",
                                *operations);
    io_uring_free_probe(probe);
    io_uring_queue_exit(&ring);
    return status;
}

/* Submits queued requests. Requests that Linux does not accept immediately stay queued until a later call
 * submits them. */
static enum status submit_queued(struct io_uring *ring)
{
    int result = io_uring_submit(ring);
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY)
        return status_set(STATUS_FAILED, "io_uring: %s", strerror(-result));
    return STATUS_OK;
}

/* Submits queued requests and waits for at least one completion. */
static enum status wait_for_one(struct io_uring *ring)
{
    int result;
    RANGE(WAIT);
    do
        result = io_uring_submit_and_wait(ring, 1);
    while (result == -EINTR);
    if (result < 0)
        return status_set(STATUS_FAILED, "io_uring: %s", strerror(-result));
    return STATUS_OK;
}

static enum status create_ring(uint32_t depth, struct io_uring *ring, bool *created)
{
    int failure = io_uring_queue_init(depth, ring, 0);
    *created = failure >= 0;
    return *created ? STATUS_OK
                    : status_set(status_of_errno(-failure),
                                 "io_uring: cannot create a ring of depth %u: %s; lower --iodepth", depth,
                                 strerror(-failure));
}

/* ---- files-uring ---- */

enum call { OPEN, ADVISE, READ, CLOSE, CALLS }; /* steps of a chain */

/* A file in flight. */
struct chain {
    uint32_t sample, member, slot;
    int32_t results[CALLS];
    uint8_t left; /* number of requests that are not complete yet */
};

struct files_uring {
    struct reader reader; /* must be first, because the functions of reader.h cast the state to it */
    struct io_uring ring;
    bool has_ring;
    struct chain *chains; /* `iodepth` chains */
    uint32_t *idle;       /* stack: indices of the free chains */
    uint32_t idle_count;
    uint16_t *pending;           /* per slot: number of members not read yet */
    uint32_t next_index, member; /* the next file to submit */
    uint64_t offset;             /* where the bytes of that file begin in the sample's slot */
    uint32_t slots;              /* number of slots, a multiple of the batch size */
};

/* ---- files-uring: submission ---- */

/* Queues the requests that read member uring->member of a sample. */
static enum status queue_chain(struct worker *worker, struct files_uring *uring, uint32_t sample,
                               uint32_t slot)
{
    const struct dataset *dataset = worker->load->dataset;
    const struct dataset_member *member = &dataset->members[dataset->samples[sample].member + uring->member];
    uint32_t index = uring->idle[--uring->idle_count];
    uint8_t *bytes = worker->slots + slot * worker->reader->stride + uring->offset;
    struct io_uring_sqe *calls[CALLS];
    for (int call = 0; call < CALLS; call++)
        if (!(calls[call] = io_uring_get_sqe(&uring->ring)))
            return status_set(STATUS_FAILED, "io_uring: the submission queue is full");
    uring->chains[index] =
        (struct chain){.sample = sample, .member = uring->member, .slot = slot, .left = CALLS};
    io_uring_prep_openat_direct(calls[OPEN], dataset->directory, dataset->files[member->file].name,
                                O_RDONLY | O_NONBLOCK, 0, index);
    io_uring_prep_fadvise(calls[ADVISE], (int)index, 0, 0, POSIX_FADV_NORMAL);
    /* Read one byte more than expected, to detect a file that grew. The byte may overwrite the first byte of
     * the next member, but the sample is then lost anyway. */
    io_uring_prep_read(calls[READ], (int)index, bytes, (unsigned)member->size + 1, 0);
    io_uring_prep_close_direct(calls[CLOSE], index);
    calls[OPEN]->flags |= IOSQE_IO_LINK;
    /* If the chain breaks at ADVISE, the file stays open until the next open into this table entry. */
    calls[ADVISE]->flags |= IOSQE_FIXED_FILE | IOSQE_IO_LINK;
    calls[READ]->flags |= IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK; /* close even if the read fails */
    for (int call = 0; call < CALLS; call++)
        io_uring_sqe_set_data64(calls[call], (uint64_t)index * CALLS + (uint64_t)call);
    return STATUS_OK;
}

/* Queues files as long as there are free chains and free slots. The slots of delivered samples are free. */
static enum status submit_files(struct worker *worker, struct files_uring *uring)
{
    const struct dataset *dataset = worker->load->dataset;
    while (uring->idle_count && uring->next_index < worker->order.count &&
           uring->next_index < worker->delivered + uring->slots) {
        uint32_t slot = uring->next_index % uring->slots, number = worker->order.samples[uring->next_index];
        const struct dataset_sample *sample = &dataset->samples[number];
        if (uring->member == 0) {
            worker->held[slot] = number;
            uring->pending[slot] = (uint16_t)sample->members;
            uring->offset = 0;
        }
        TRY(queue_chain(worker, uring, number, slot));
        uring->offset += dataset->members[sample->member + uring->member].size;
        if (++uring->member == sample->members) {
            uring->member = 0;
            uring->next_index++;
        }
    }
    return STATUS_OK;
}

/* ---- files-uring: completion ---- */

/* Evaluates the results of a complete chain. */
static enum status chain_done(struct worker *worker, struct files_uring *uring, const struct chain *chain)
{
    const struct dataset *dataset = worker->load->dataset;
    const struct dataset_member *member =
        &dataset->members[dataset->samples[chain->sample].member + chain->member];
    const char *name = dataset->files[member->file].name;
    enum status status = STATUS_OK;
    uring->pending[chain->slot]--;
    if (chain->results[OPEN] < 0)
        status = status_set(status_of_errno(-chain->results[OPEN]), "%s/%s: cannot open: %s", dataset->path,
                            name, strerror(-chain->results[OPEN]));
    else if (chain->results[ADVISE] < 0)
        status = status_set(STATUS_FAILED, "%s/%s: not a regular file", dataset->path, name);
    else if (chain->results[READ] < 0)
        status = status_set(STATUS_FAILED, "%s/%s: cannot read: %s", dataset->path, name,
                            strerror(-chain->results[READ]));
    else if ((uint64_t)chain->results[READ] != member->size)
        status = status_set(STATUS_FAILED,
                            "%s/%s: the file's size has changed: %d bytes were read instead of %llu",
                            dataset->path, name, chain->results[READ], (unsigned long long)member->size);
    if (status == STATUS_OK || worker->held[chain->slot] == READER_LOST) /* count a lost sample once */
        return STATUS_OK;
    worker->held[chain->slot] = READER_LOST;
    return worker_lose(worker, chain->sample, status);
}

static enum status reap_calls(struct worker *worker, struct files_uring *uring)
{
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&uring->ring, &cqe) == 0) {
        uint64_t data = io_uring_cqe_get_data64(cqe);
        uint32_t index = (uint32_t)(data / CALLS);
        struct chain *chain = &uring->chains[index];
        chain->results[data % CALLS] = cqe->res;
        io_uring_cqe_seen(&uring->ring, cqe);
        if (--chain->left > 0)
            continue;
        uring->idle[uring->idle_count++] = index;
        TRY(chain_done(worker, uring, chain));
    }
    return STATUS_OK;
}

/* Delivers the batches that are complete, in order. */
static enum status deliver_files(struct worker *worker, const struct files_uring *uring)
{
    uint32_t batch = worker->load->given->batch, count = worker->order.count;
    while (worker->delivered < uring->next_index) {
        uint32_t left = count - worker->delivered, size = left < batch ? left : batch;
        uint32_t slot = worker->delivered % uring->slots;
        if (uring->next_index - worker->delivered < size)
            return STATUS_OK;
        for (uint32_t i = slot; i < slot + size; i++)
            if (uring->pending[i])
                return STATUS_OK;
        TRY(worker_deliver(worker, slot, size));
        worker->delivered += size;
    }
    return STATUS_OK;
}

static enum status read_files(struct worker *worker, struct files_uring *uring)
{
    while (worker->delivered < worker->order.count) {
        TRY(submit_files(worker, uring));
        TRY(wait_for_one(&uring->ring));
        TRY(reap_calls(worker, uring));
        TRY(deliver_files(worker, uring));
    }
    return STATUS_OK;
}

static enum status files_uring_epoch(struct worker *worker)
{
    struct files_uring *uring = (struct files_uring *)worker->reader;
    uint32_t iodepth = worker->load->given->iodepth;
    uring->next_index = uring->member = 0;
    enum status status = read_files(worker, uring);
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct failure failure = status_save(status);
    while (uring->idle_count < iodepth &&
           wait_for_one(&uring->ring) == STATUS_OK) /* wait for chains in flight */
        while (reap_calls(worker, uring) != STATUS_OK)
            ;
    return status_restore(&failure);
}

static enum status files_uring_probe(const struct resources *resources)
{
    static const int operations[] = {IORING_OP_OPENAT, IORING_OP_FADVISE, IORING_OP_READ, IORING_OP_CLOSE,
                                     -1};
    (void)resources;
    return probe_ring(operations);
}

static void files_uring_teardown(void *state)
{
    struct files_uring *uring = state;
    if (uring->has_ring)
        io_uring_queue_exit(&uring->ring);
    free(uring->chains);
    free(uring->idle);
    free(uring->pending);
    reader_close(&uring->reader);
    free(uring);
}

static enum status open_chains(struct files_uring *uring, const struct load *load)
{
    const uint32_t iodepth = (uint32_t)load->given->iodepth;
    uring->chains = calloc(iodepth, sizeof *uring->chains);
    uring->idle = calloc(iodepth, sizeof *uring->idle);
    uring->pending = calloc(uring->slots, sizeof *uring->pending);
    TRY(ALLOCATED(uring->chains && uring->idle && uring->pending,
                  "out of memory for %u files in flight; lower --iodepth", iodepth));
    for (uint32_t i = 0; i < iodepth; i++)
        uring->idle[uring->idle_count++] = i;
    TRY(create_ring(iodepth * CALLS, &uring->ring, &uring->has_ring));
    int failure = io_uring_register_files_sparse(&uring->ring, iodepth);
    if (failure < 0)
        return status_set(STATUS_UNAVAILABLE,
                          "io_uring: cannot create a table of %u files: %s (requires Linux 5.19)", iodepth,
                          strerror(-failure));
    return STATUS_OK;
}

static enum status files_uring_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    const struct load *load = input;
    struct files_uring *uring = *state = calloc(1, sizeof *uring);
    TRY(ALLOCATED(uring, "out of memory"));
    /* Slots for the samples of `iodepth` files in flight, plus the batch that is being delivered. */
    uring->slots = (load->given->iodepth / load->given->batch + 2) * load->given->batch;
    TRY(reader_open(&uring->reader, load, 1, uring->slots, files_uring_epoch));
    return open_chains(uring, load);
}

static const struct load_traits files_traits = {.files = true,
                                                .timed = "order+open+advise+read+close",
                                                .copy = reader_copy,
                                                .verify_slots = reader_verify_slots};

const struct variant variant_files_uring = {
    READER_VARIANT(files_traits),
    .probe = files_uring_probe,
    .setup = files_uring_setup,
    .teardown = files_uring_teardown,
};

/* ---- shards-uring ---- */

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

/* ---- shards-uring: submission ---- */

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
    enum status status =
        dataset_file_open(load->dataset, segment->shard, load->given->cache == LOAD_WARM ? 0 : O_DIRECT,
                          &uring->fds[uring->segment]);
    *failure = status == STATUS_OK ? 0 : errno ? errno : EIO;
    if (status == STATUS_OK)
        return STATUS_OK;
    if (load->given->cache != LOAD_WARM && *failure == EINVAL)
        return status_prefix(STATUS_UNAVAILABLE, "this file system has no O_DIRECT; use --cache warm");
    return load_skips(load) && status == STATUS_FAILED ? STATUS_OK : status;
}

/* Adds one failed block in place of a segment whose shard cannot be opened. When the block is processed, the
 * samples of the segment are recorded as lost. */
static void submit_failure(struct shards_uring *uring, int failure)
{
    uring->blocks[uring->submitted++ % uring->reader.load->given->iodepth] =
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
static enum status submit_blocks(struct shards_uring *uring, const struct order *order)
{
    const struct load *load = uring->reader.load;
    while (uring->submitted - uring->taken < load->given->iodepth && uring->segment < order->segment_count) {
        int failure = 0;
        if (uring->fds[uring->segment] < 0)
            TRY(open_segment(uring, order, &failure));
        if (failure) {
            submit_failure(uring, failure);
            continue;
        }
        uint32_t index = (uint32_t)(uring->submitted % load->given->iodepth);
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

/* ---- shards-uring: completion ---- */

static void reap_blocks(struct shards_uring *uring)
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
static enum status await_block(struct shards_uring *uring, const struct order *order, struct block **next)
{
    const struct load *load = uring->reader.load;
    uint32_t index = (uint32_t)(uring->taken % load->given->iodepth);
    struct block *block = *next = &uring->blocks[index];
    TRY(submit_blocks(uring, order));
    /* Submit before the reads in flight run out, so that the storage device stays busy while this thread
     * copies. */
    if (io_uring_sq_ready(&uring->ring) > load->given->iodepth / 8)
        TRY(submit_queued(&uring->ring));
    reap_blocks(uring);
    while (!block->done) {
        TRY(wait_for_one(&uring->ring));
        reap_blocks(uring);
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

/* ---- shards-uring: samples ---- */

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
            TRY(await_block(uring, order, &block));
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
        while (!uring->blocks[uring->taken % uring->reader.load->given->iodepth].done) {
            if (wait_for_one(&uring->ring) != STATUS_OK)
                return;
            reap_blocks(uring);
        }
}

static enum status shards_uring_epoch(struct worker *worker)
{
    struct shards_uring *uring = (struct shards_uring *)worker->reader;
    uring->submitted = uring->taken = 0;
    uring->segment = 0;
    enum status status = take_all(worker);
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct failure failure = status_save(status);
    drain(uring);
    for (uint32_t s = 0; s < worker->order.segment_count; s++)
        close_segment(uring, s);
    return status_restore(&failure);
}

static enum status shards_uring_probe(const struct resources *resources)
{
    static const int operations[] = {IORING_OP_READ_FIXED, IORING_OP_READ, -1};
    (void)resources;
    return probe_ring(operations);
}

static void shards_uring_teardown(void *state)
{
    struct shards_uring *uring = state;
    if (uring->has_ring)
        io_uring_queue_exit(&uring->ring);
    if (uring->reader.load)
        buffer_close(uring->buffers,
                     (size_t)uring->reader.load->given->iodepth * uring->reader.load->block_bytes);
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

static enum status open_blocks(struct shards_uring *uring, const struct load *load)
{
    const uint32_t iodepth = (uint32_t)load->given->iodepth;
    size_t bytes = (size_t)iodepth * load->block_bytes;
    struct iovec whole = {.iov_len = bytes};
    uring->buffers = buffer_open(bytes);
    uring->reader.result.memory_bytes += buffer_allocated(bytes);
    uring->blocks = calloc(iodepth, sizeof *uring->blocks);
    uring->fds = malloc(load->dataset->file_count * sizeof *uring->fds);
    TRY(ALLOCATED(uring->buffers && uring->blocks && uring->fds,
                  "out of memory for %u blocks of %u bytes; lower --iodepth or --block", iodepth,
                  load->block_bytes));
    for (uint32_t f = 0; f < load->dataset->file_count; f++)
        uring->fds[f] = -1;
    whole.iov_base = uring->buffers;
    TRY(create_ring(iodepth, &uring->ring, &uring->has_ring));
    int failure = io_uring_register_buffers(&uring->ring, &whole, 1);
    uring->registered = failure >= 0;
    if (failure < 0)
        warn_unregistered(bytes, failure);
    return STATUS_OK;
}

static enum status shards_uring_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    const struct load *load = input;
    struct shards_uring *uring = *state = calloc(1, sizeof *uring);
    TRY(ALLOCATED(uring, "out of memory"));
    TRY(reader_open(&uring->reader, load, 1, reader_stream_slots(load), shards_uring_epoch));
    return open_blocks(uring, load);
}

static const struct load_traits shards_traits = {.shards = true,
                                                 .timed = "order+open+read+copy",
                                                 .copy = reader_copy,
                                                 .verify_slots = reader_verify_slots};

const struct variant variant_shards_uring = {
    READER_VARIANT(shards_traits),
    .probe = shards_uring_probe,
    .setup = shards_uring_setup,
    .teardown = shards_uring_teardown,
};
