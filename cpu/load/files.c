/* `files` and `files-omp` read the samples in random order. They open, read and close one file per member.
 * `files` uses one thread, `files-omp` all threads. Many loaders work this way, but do more per file than
 * these three system calls. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/phase.h"
#include "reader.h"

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Records the latency of a call that began at `*begin_ns`, and starts timing the next call. */
static void lap(struct worker *worker, enum load_call call, uint64_t *begin_ns)
{
    if (!worker->load->control->timed_calls)
        return;
    uint64_t now = now_ns();
    if (*begin_ns)
        latency_add(&worker->latency[call], now - *begin_ns);
    *begin_ns = now;
}

static enum status read_member(struct worker *worker, const struct dataset_member *member, uint8_t *bytes)
{
    const struct dataset *dataset = worker->load->dataset;
    const char *name = dataset->files[member->file].name;
    uint64_t begin_ns = 0;
    lap(worker, LOAD_OPEN, &begin_ns);
    /* With O_NONBLOCK, openat() does not wait if the file was replaced by a pipe. */
    int fd = openat(dataset->directory, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return status_set(status_of_errno(errno), "%s/%s: cannot open: %s", dataset->path, name,
                          strerror(errno));
    lap(worker, LOAD_OPEN, &begin_ns);
    /* Read one byte more than expected, to detect a file that grew. pread() fails on a pipe. */
    ssize_t count = pread(fd, bytes, member->size + 1, 0);
    lap(worker, LOAD_READ, &begin_ns);
    int failure = count < 0 ? errno : 0;
    close(fd);
    lap(worker, LOAD_CLOSE, &begin_ns);
    if (failure)
        return status_set(STATUS_FAILED, "%s/%s: cannot read: %s", dataset->path, name,
                          failure == ESPIPE ? "not a regular file" : strerror(failure));
    if ((uint64_t)count != member->size)
        return status_set(STATUS_FAILED,
                          "%s/%s: the file's size has changed: %llu bytes were read instead of %llu",
                          dataset->path, name, (unsigned long long)count, (unsigned long long)member->size);
    return STATUS_OK;
}

static enum status read_sample(struct worker *worker, uint32_t number, uint8_t *slot)
{
    const struct dataset *dataset = worker->load->dataset;
    const struct dataset_sample *sample = &dataset->samples[number];
    for (uint32_t m = 0; m < sample->members; m++) {
        const struct dataset_member *member = &dataset->members[sample->member + m];
        TRY(read_member(worker, member, slot));
        slot += member->size;
    }
    return STATUS_OK;
}

/* Reads the samples at indices first .. first + count - 1 of the order into slots 0 .. count - 1. */
static enum status read_batch(struct worker *worker, uint32_t first, uint32_t count)
{
    RANGE(READ);
    for (uint32_t slot = 0; slot < count; slot++) {
        uint32_t number = worker->order.samples[first + slot];
        enum status status = read_sample(worker, number, worker->slots + slot * worker->reader->stride);
        worker->held[slot] = status == STATUS_OK ? number : READER_LOST;
        if (status != STATUS_OK)
            TRY(worker_lose(worker, number, status));
    }
    return STATUS_OK;
}

static enum status files_epoch(struct worker *worker)
{
    uint32_t batch = worker->load->given->batch, count = worker->order.count;
    for (uint32_t first = 0, size; first < count; first += size) {
        size = count - first < batch ? count - first : batch;
        TRY(read_batch(worker, first, size));
        TRY(worker_deliver(worker, 0, size));
    }
    return STATUS_OK;
}

static enum status open_with(const void *input, int threads, void **state)
{
    struct reader *reader = *state = calloc(1, sizeof *reader);
    return reader
               ? reader_open(reader, input, threads, ((const struct load *)input)->given->batch, files_epoch)
               : status_set(STATUS_EXHAUSTED, "out of memory");
}

static enum status files_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    return open_with(input, 1, state);
}

static enum status files_omp_setup(const struct resources *resources, const void *input, void **state)
{
    return open_with(input, resources->threads, state);
}

static void files_teardown(void *state)
{
    reader_close(state);
    free(state);
}

static const struct load_traits traits = {.files = true,
                                          .calls = true,
                                          .timed = "order+open+read+close",
                                          .copy = reader_copy,
                                          .verify_slots = reader_verify_slots};

const struct variant variant_files = {
    READER_VARIANT(traits),
    .setup = files_setup,
    .teardown = files_teardown,
};

const struct variant variant_files_omp = {
    READER_VARIANT(traits),
    .threaded = true,
    .setup = files_omp_setup,
    .teardown = files_teardown,
};
