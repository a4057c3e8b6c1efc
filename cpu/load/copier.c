#include "reader.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/timer.h"
#include "machine/guard.h"

#define COPY_MAX_BYTES ((size_t)2 << 30) /* largest working set that copier_measure() copies */

void copier_forget(struct copier *copier)
{
    if (copier->set)
        munmap(copier->set, copier->set_bytes);
    copier->set = NULL;
}

/* Returns the bytes of a file that are in the working set: the size of a single file, a shard's size in whole
 * pages, or 0 for a shard without samples. */
static size_t set_bytes_of(const struct dataset *dataset, uint32_t file)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = dataset->files[file].bytes;
    if (!dataset->shards)
        return bytes;
    bool read = dataset->shard_first[file] < dataset->shard_first[file + 1];
    return read ? (bytes + page - 1) / page * page : 0;
}

/* Maps up to `bytes` bytes of a file at `memory`, in whole pages. Sets `*mapped` to the number of bytes
 * mapped, which is smaller if the file was truncated. With --on-error skip, a file that cannot be opened
 * counts as empty. */
static enum status map_over(const struct load *load, uint32_t file, uint8_t *memory, size_t bytes,
                            size_t *mapped)
{
    struct stat info;
    int fd;
    enum status status = dataset_file_open(load->dataset, file, 0, &fd);
    *mapped = 0;
    if (status != STATUS_OK)
        return load_skips(load) && status == STATUS_FAILED ? STATUS_OK : status;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t there = fstat(fd, &info) == 0 ? ((size_t)info.st_size + page - 1) / page * page : 0;
    size_t length = there < bytes ? there : bytes;
    void *mapping =
        length ? mmap(memory, length, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) : memory;
    int failure = errno;
    close(fd);
    if (mapping == MAP_FAILED)
        return status_set(status_of_errno(failure), "%s/%s: cannot map %zu bytes: %s", load->dataset->path,
                          load->dataset->files[file].name, length, strerror(failure));
    *mapped = length;
    return STATUS_OK;
}

/* Maps shards consecutively until `*bytes` are filled. Sets `*bytes` to the number mapped. */
static enum status map_shards(const struct load *load, uint8_t *memory, size_t *bytes)
{
    size_t at = 0;
    for (uint32_t f = 0; f < load->dataset->file_count && at < *bytes; f++) {
        size_t length = set_bytes_of(load->dataset, f), left = *bytes - at, mapped;
        TRY(map_over(load, f, memory + at, length < left ? length : left, &mapped));
        at += mapped;
    }
    *bytes = at;
    return STATUS_OK;
}

/* Creates the working set that copier_measure() copies. For local shards, it is their consecutive mappings.
 * For files and remote shards, it is anonymous memory of the same size. */
static enum status open_set(struct copier *copier)
{
    const struct dataset *dataset = copier->load->dataset;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), wanted = 0;
    for (uint32_t f = 0; f < dataset->file_count && wanted < COPY_MAX_BYTES; f++)
        wanted += set_bytes_of(dataset, f);
    wanted = wanted < COPY_MAX_BYTES ? (wanted + page - 1) / page * page : COPY_MAX_BYTES;
    uint8_t *memory = mmap(NULL, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return status_set(STATUS_EXHAUSTED, "out of memory for %zu bytes to measure the copy bandwidth",
                          wanted);
    copier->set = memory;
    copier->set_bytes = copier->copied_bytes = wanted;
    if (dataset->shards && !dataset->remote)
        return map_shards(copier->load, memory, &copier->copied_bytes);
    madvise(memory, wanted, MADV_NOHUGEPAGE);
    memset(memory, 1, wanted);
    return STATUS_OK;
}

/* Copies worker w's part of the working set in pieces of `piece` bytes. Each piece goes to the next slot of a
 * batch; a piece larger than a slot always starts at slot 0. Returns false if a page no longer exists. */
static bool copy_part(const struct copier *copier, uint8_t *buffer, int w, size_t piece)
{
    size_t threads = (size_t)copier->threads, slots = piece > copier->stride ? 1 : copier->load->given->batch;
    size_t begin = copier->copied_bytes * (size_t)w / threads,
           end = copier->copied_bytes * ((size_t)w + 1) / threads, slot = 0;
    for (size_t at = begin; at < end; at += piece) {
        uint8_t *to = buffer + slot * copier->stride;
        if (!guard_copy(to, copier->set + at, end - at < piece ? end - at : piece))
            return false;
        __asm__ volatile("" : : "r"(to) : "memory");
        slot = slot + 1 < slots ? slot + 1 : 0;
    }
    return true;
}

/* Copies the whole working set once. Returns bytes per second, or 0 if a page no longer exists. */
static double copy_all(const struct copier *copier, uint8_t *const *buffers, size_t piece)
{
    int threads = copier->threads, torn = 0;
    double begin_s = timer_now_s();
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : torn) if (threads > 1)
    for (int w = 0; w < threads; w++)
        torn += !copy_part(copier, buffers[w], w, piece);
    return torn ? 0 : (double)copier->copied_bytes / (timer_now_s() - begin_s);
}

enum status copier_measure(struct copier *copier, uint8_t *const *buffers, double *bytes_per_s)
{
    struct guard guard = {0};
    if (!copier->set)
        TRY(open_set(copier));
    TRY(guard_open(&guard));
    size_t sample = copier->copied_bytes / copier->load->dataset->sample_count + 1; /* with tar headers */
    double by_sample = copy_all(copier, buffers, sample < copier->stride ? sample : copier->stride);
    double by_batch = copy_all(copier, buffers, copier->load->given->batch * copier->stride);
    guard_close(&guard);
    *bytes_per_s = by_sample > by_batch ? by_sample : by_batch;
    if (by_sample <= 0 || by_batch <= 0)
        return status_set(
            STATUS_FAILED,
            "%s: a shard was truncated while measuring the copy bandwidth; repair the data set and run again",
            copier->load->dataset->path);
    return STATUS_OK;
}
