/* `shards-mmap` and `shards-omp` map shards into memory and copy each sample once, from the page cache into
 * its slot. `shards-mmap` uses one thread. `shards-omp` uses all threads, each with its own share of the
 * samples.
 *
 * If a mapped file shrinks, access to the lost pages raises SIGBUS. Copies are guarded (machine/guard.h), so
 * such a sample is reported like any other broken sample. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/phase.h"
#include "machine/guard.h"
#include "reader.h"

struct mapped {
    struct reader reader; /* must be first, because the functions of reader.h cast the state to it */
    uint8_t **shards;     /* mapping per file; NULL: not mapped yet, or mapping failed with --on-error skip */
    struct guard guard;
};

/* ---- Mappings ---- */

static void unmap(struct mapped *mapped)
{
    const struct dataset *dataset = mapped->reader.load->dataset;
    for (uint32_t f = 0; f < dataset->file_count; f++)
        if (mapped->shards[f]) {
            munmap(mapped->shards[f], dataset->files[f].bytes);
            mapped->shards[f] = NULL;
        }
}

static enum status map_shard(struct mapped *mapped, uint32_t file)
{
    const struct load *load = mapped->reader.load;
    const struct dataset_file *shard = &load->dataset->files[file];
    int fd;
    TRY(dataset_file_open(load->dataset, file, 0, &fd));
    int populate = load->given->cache == LOAD_WARM ? MAP_POPULATE : 0;
    void *mapping = mmap(NULL, shard->bytes, PROT_READ, MAP_SHARED | populate, fd, 0);
    int failure = errno;
    close(fd);
    if (mapping == MAP_FAILED)
        return status_set(status_of_errno(failure), "%s/%s: cannot map %llu bytes: %s", load->dataset->path,
                          shard->name, (unsigned long long)shard->bytes, strerror(failure));
    mapped->shards[file] = mapping;
    return STATUS_OK;
}

/* Maps all shards that hold samples and are not mapped yet. With --cache warm this happens before the first
 * run, otherwise inside each run. */
static enum status map_all(struct mapped *mapped)
{
    const struct dataset *dataset = mapped->reader.load->dataset;
    for (uint32_t f = 0; dataset->remote && f < dataset->file_count; f++)
        if (!mapped->shards[f])
            dataset_file_ask(dataset, f);
    for (uint32_t f = 0; f < dataset->file_count; f++)
        if (!mapped->shards[f] && dataset->shard_first[f] < dataset->shard_first[f + 1]) {
            enum status status = map_shard(mapped, f);
            if (status != STATUS_FAILED || !load_skips(mapped->reader.load))
                TRY(status);
        }
    return STATUS_OK;
}

/* Asks Linux to read the pages of a segment into the page cache. */
static void ask_for(const struct mapped *mapped, const struct order_segment *segment)
{
    const struct dataset *dataset = mapped->reader.load->dataset;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), begin, end;
    if (!mapped->shards[segment->shard])
        return;
    dataset_range(dataset, segment->first, segment->count, &begin, &end);
    begin = begin / page * page;
    if (end > begin)
        madvise(mapped->shards[segment->shard] + begin, end - begin, MADV_WILLNEED);
}

/* Asks Linux to read the segment that contains `index`, and the next `readahead` segments. Keeps its state in
 * `*asked` (the next segment to ask for), `*current` (the next segment to enter) and `*entered` (the index
 * where that segment begins). */
static void read_ahead(const struct worker *worker, const struct mapped *mapped, uint32_t index,
                       uint32_t *asked, uint32_t *current, uint32_t *entered)
{
    const struct order *order = &worker->order;
    while (*current < order->segment_count && index >= *entered)
        *entered += order->segments[(*current)++].count;
    while (*asked < order->segment_count && *asked < *current + worker->load->given->readahead)
        ask_for(mapped, &order->segments[(*asked)++]);
}

/* ---- Reading ---- */

/* The hardware prefetcher follows a stream, but it stops at a tar header and does not know the next sample of
 * a shuffled order. So copy_member() prefetches the cache lines of the header. The next sample may not be
 * adjacent, or may be too small for the hardware to detect. copy_member() then also prefetches the first
 * member of that sample, piece by piece, while it copies the current sample. On one core of an EPYC 9005 this
 * made streams of 16 KiB samples a third faster. */
#define PIECE_BYTES 4096
#define LINE_BYTES  64

/* Prefetches cache lines. The function must be inlined, because the compiler removes calls of a function
 * whose only effect is prefetching. */
static inline __attribute__((always_inline)) void ask_for_lines(const uint8_t *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        __builtin_prefetch(from + at);
}

/* The bytes of the next sample's first member that are not prefetched yet. */
struct next {
    /* NULL: there is no next sample, its shard is not mapped, or the hardware prefetches it. */
    const uint8_t *data;
    size_t bytes;
};

static struct next next_sample(const struct worker *worker, const struct mapped *mapped, uint32_t index)
{
    const struct dataset *dataset = worker->load->dataset;
    struct next none = {NULL, 0};
    if (index + 1 >= worker->order.count)
        return none;
    uint32_t number = worker->order.samples[index], following = worker->order.samples[index + 1];
    const struct dataset_member *member = &dataset->members[dataset->samples[following].member];
    const uint8_t *shard = mapped->shards[member->file];
    if (!shard || (following == number + 1 && member->size > PIECE_BYTES))
        return none;
    return (struct next){shard + member->offset, member->size};
}

/* Copies one member into its slot and prefetches part of the next sample. `*end` is the end of the previous
 * member in the mapping. Returns false if a page no longer exists. */
static bool copy_member(uint8_t *slot, const uint8_t *data, size_t bytes, struct next *next,
                        const uint8_t **end)
{
    if (bytes > PIECE_BYTES && data > *end && data - *end <= PIECE_BYTES)
        ask_for_lines(*end, (size_t)(data - *end));
    *end = data + bytes;
    for (size_t at = 0; next->data && at < bytes; at += PIECE_BYTES) {
        size_t left = bytes - at, piece = left < PIECE_BYTES ? left : PIECE_BYTES;
        size_t ahead = next->bytes < piece ? next->bytes : piece;
        ask_for_lines(next->data, ahead);
        next->data += ahead;
        next->bytes -= ahead;
        if (!guard_copy(slot + at, data + at, piece))
            return false;
    }
    return next->data || guard_copy(slot, data, bytes);
}

static enum status copy_sample(const struct worker *worker, const struct mapped *mapped, uint32_t index,
                               uint8_t *slot, const uint8_t **end)
{
    const struct dataset *dataset = worker->load->dataset;
    const struct dataset_sample *sample = &dataset->samples[worker->order.samples[index]];
    struct next next = next_sample(worker, mapped, index);
    for (uint32_t m = 0; m < sample->members; m++) {
        const struct dataset_member *member = &dataset->members[sample->member + m];
        const uint8_t *shard = mapped->shards[member->file];
        if (!shard || !copy_member(slot, shard + member->offset, member->size, &next, end))
            return status_set(
                STATUS_FAILED, "%s/%s: offset %llu: sample '%s' cannot be read from the mapping: %s",
                dataset->path, dataset->files[member->file].name, (unsigned long long)member->offset,
                sample->key,
                shard ? "the file was truncated, or its device failed" : "the shard can no longer be opened");
        slot += member->size;
    }
    return STATUS_OK;
}

/* State of reading an epoch. */
struct position {
    uint32_t asked, current, entered; /* used by read_ahead() */
    const uint8_t *end;               /* used by copy_member() */
};

/* Copies the samples at indices first .. first + count - 1 of the order into slots 0 .. count - 1. */
static enum status copy_batch(struct worker *worker, uint32_t first, uint32_t count, struct position *at)
{
    const struct mapped *mapped = (const struct mapped *)worker->reader;
    RANGE(COPY);
    for (uint32_t slot = 0; slot < count; slot++) {
        uint32_t index = first + slot, number = worker->order.samples[index];
        if (worker->load->given->cache != LOAD_WARM && index >= at->entered)
            read_ahead(worker, mapped, index, &at->asked, &at->current, &at->entered);
        enum status status =
            copy_sample(worker, mapped, index, worker->slots + slot * worker->reader->stride, &at->end);
        worker->held[slot] = status == STATUS_OK ? number : READER_LOST;
        if (status != STATUS_OK)
            TRY(worker_lose(worker, number, status));
    }
    return STATUS_OK;
}

static enum status mapped_epoch(struct worker *worker)
{
    struct position at = {0};
    uint32_t batch = worker->load->given->batch, count = worker->order.count;
    for (uint32_t first = 0, size; first < count; first += size) {
        size = count - first < batch ? count - first : batch;
        TRY(copy_batch(worker, first, size, &at));
        TRY(worker_deliver(worker, 0, size));
    }
    return STATUS_OK;
}

static void mapped_teardown(void *state)
{
    struct mapped *mapped = state;
    guard_close(&mapped->guard);
    if (mapped->shards)
        unmap(mapped);
    free(mapped->shards);
    reader_close(&mapped->reader);
    free(mapped);
}

static enum status setup_with(const struct load *load, int threads, void **state)
{
    struct mapped *mapped = *state = calloc(1, sizeof *mapped);
    TRY(ALLOCATED(mapped, "out of memory"));
    TRY(reader_open(&mapped->reader, load, threads, load->given->batch, mapped_epoch));
    mapped->shards = calloc(load->dataset->file_count, sizeof *mapped->shards);
    TRY(ALLOCATED(mapped->shards, "out of memory for %u shards", load->dataset->file_count));
    return guard_open(&mapped->guard);
}

static enum status mmap_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    return setup_with(input, 1, state);
}

static enum status omp_setup(const struct resources *resources, const void *input, void **state)
{
    return setup_with(input, resources->threads, state);
}

static enum status mapped_ready(void *state, uint64_t number)
{
    struct mapped *mapped = state;
    if (mapped->reader.load->given->cache != LOAD_WARM)
        unmap(mapped); /* because mapped pages cannot be evicted, and the timed run must include mmap() */
    TRY(reader_ready(mapped, number));
    return mapped->reader.load->given->cache == LOAD_WARM ? map_all(mapped) : STATUS_OK;
}

static enum status mapped_run(void *state, uint64_t number, struct run_time *time)
{
    TRY(map_all(state));
    return reader_run(state, number, time);
}

static const struct load_traits traits = {.shards = true,
                                          .timed = "order+copy",
                                          .timed_unless_warm = "order+open+map+copy",
                                          .copy = reader_copy,
                                          .verify_slots = reader_verify_slots};

#define MAPPED_VARIANT(setup_)                                                                         \
    .platform = "cpu", .traits = &traits, .setup = (setup_), .ready = mapped_ready, .run = mapped_run, \
    .fetch = reader_fetch, .teardown = mapped_teardown

const struct variant variant_shards_mmap = {MAPPED_VARIANT(mmap_setup)};
const struct variant variant_shards_omp = {MAPPED_VARIANT(omp_setup), .threaded = true};
