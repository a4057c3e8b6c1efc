/* `files-uring`: one thread keeps --iodepth files in flight. Each file is a chain of linked requests (open,
 * advise, read, close) that Linux executes without further system calls. An open file uses an entry of the
 * ring's file table instead of a file descriptor of this process.
 *
 * A file may have been replaced by a pipe. io_uring polls a pipe, even one opened with O_NONBLOCK, so a read
 * would wait as long as some process has the pipe open for writing. The fadvise between open and read
 * prevents this wait. It has no effect on a file, but fails on a pipe (ESPIPE), which cancels the read. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "reader.h"
#include "uring.h"

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

/* ---- Submission ---- */

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
static enum status submit(struct worker *worker, struct files_uring *uring)
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

/* ---- Completion ---- */

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

static enum status reap(struct worker *worker, struct files_uring *uring)
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
static enum status deliver(struct worker *worker, const struct files_uring *uring)
{
    uint32_t batch = worker->load->batch, count = worker->order.count;
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

static enum status read_all(struct worker *worker, struct files_uring *uring)
{
    while (worker->delivered < worker->order.count) {
        TRY(submit(worker, uring));
        TRY(uring_wait(&uring->ring));
        TRY(reap(worker, uring));
        TRY(deliver(worker, uring));
    }
    return STATUS_OK;
}

static enum status files_uring_epoch(struct worker *worker)
{
    struct files_uring *uring = (struct files_uring *)worker->reader;
    uint32_t iodepth = worker->load->iodepth;
    uring->next_index = uring->member = 0;
    enum status status = read_all(worker, uring);
    if (status == STATUS_OK)
        return STATUS_OK;
    char reason[1024];
    strncpy(reason, status_text(), sizeof reason - 1);
    reason[sizeof reason - 1] = '\0';
    while (uring->idle_count < iodepth &&
           uring_wait(&uring->ring) == STATUS_OK) /* wait for chains in flight */
        while (reap(worker, uring) != STATUS_OK)
            ;
    return status_set(status, "%s", reason);
}

/* ---- The variant ---- */

static enum status files_uring_probe(const struct resources *resources)
{
    static const int operations[] = {IORING_OP_OPENAT, IORING_OP_FADVISE, IORING_OP_READ, IORING_OP_CLOSE,
                                     -1};
    (void)resources;
    return uring_probe(operations);
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

static enum status open_ring(struct files_uring *uring, const struct load *load)
{
    uring->chains = calloc(load->iodepth, sizeof *uring->chains);
    uring->idle = calloc(load->iodepth, sizeof *uring->idle);
    uring->pending = calloc(uring->slots, sizeof *uring->pending);
    TRY(ALLOCATED(uring->chains && uring->idle && uring->pending,
                  "out of memory for %u files in flight; lower --iodepth", load->iodepth));
    for (uint32_t i = 0; i < load->iodepth; i++)
        uring->idle[uring->idle_count++] = i;
    int failure = io_uring_queue_init(load->iodepth * CALLS, &uring->ring, 0);
    if (failure < 0)
        return status_set(status_of_errno(-failure),
                          "io_uring: cannot create a ring of depth %u: %s; lower --iodepth",
                          load->iodepth * CALLS, strerror(-failure));
    uring->has_ring = true;
    failure = io_uring_register_files_sparse(&uring->ring, load->iodepth);
    if (failure < 0)
        return status_set(STATUS_UNAVAILABLE,
                          "io_uring: cannot create a table of %u files: %s (requires Linux 5.19)",
                          load->iodepth, strerror(-failure));
    return STATUS_OK;
}

static enum status files_uring_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    const struct load *load = input;
    struct files_uring *uring = *state = calloc(1, sizeof *uring);
    TRY(ALLOCATED(uring, "out of memory"));
    /* Slots for the samples of `iodepth` files in flight, plus the batch that is being delivered. */
    uring->slots = (load->iodepth / load->batch + 2) * load->batch;
    TRY(reader_open(&uring->reader, load, 1, uring->slots, files_uring_epoch));
    return open_ring(uring, load);
}

static const struct load_traits traits = {.files = true,
                                          .timed = "order+open+advise+read+close",
                                          .copy = reader_copy,
                                          .verify_slots = reader_verify_slots};

const struct variant variant_files_uring = {
    READER_VARIANT,
    .probe = files_uring_probe,
    .setup = files_uring_setup,
    .teardown = files_uring_teardown,
};
