/* The variants that read shards with plain system calls: `shards`, `shards-mmap` and `shards-omp`. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "core/phase.h"
#include "data/members.h"
#include "data/tar.h"
#include "machine/guard.h"
#include "reader.h"

/* ---- `shards-mmap` and `shards-omp` ---- */

/* `shards-mmap` and `shards-omp` map shards into memory and copy each sample once, from the page cache into
 * its slot. `shards-mmap` uses one thread. `shards-omp` uses all threads, each with its own share of the
 * samples; threads that have finished theirs help the others.
 *
 * If a mapped file shrinks, access to the lost pages raises SIGBUS. Copies are guarded (machine/guard.h), so
 * such a sample is reported like any other broken sample. */

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

static struct next next_sample(const struct order *order, const struct mapped *mapped, uint32_t index)
{
    const struct dataset *dataset = mapped->reader.load->dataset;
    struct next none = {NULL, 0};
    if (index + 1 >= order->count)
        return none;
    uint32_t number = order->samples[index], following = order->samples[index + 1];
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

static enum status copy_sample(const struct order *order, const struct mapped *mapped, uint32_t index,
                               uint8_t *slot, const uint8_t **end)
{
    const struct dataset *dataset = mapped->reader.load->dataset;
    const struct dataset_sample *sample = &dataset->samples[order->samples[index]];
    struct next next = next_sample(order, mapped, index);
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

/* Copies the samples at indices first .. first + count - 1 of the order into the worker's slots 0 .. count
 * - 1. */
static enum status copy_batch(struct worker *worker, const struct order *order, uint32_t first,
                              uint32_t count, struct position *at)
{
    const struct mapped *mapped = (const struct mapped *)worker->reader;
    RANGE(COPY);
    for (uint32_t slot = 0; slot < count; slot++) {
        uint32_t index = first + slot, number = order->samples[index];
        if (worker->load->given->cache != LOAD_WARM && index >= at->entered)
            read_ahead(worker, mapped, index, &at->asked, &at->current, &at->entered);
        enum status status =
            copy_sample(order, mapped, index, worker->slots + slot * worker->reader->stride, &at->end);
        worker->held[slot] = status == STATUS_OK ? number : READER_LOST;
        if (status != STATUS_OK)
            TRY(worker_lose(worker, number, status));
    }
    return STATUS_OK;
}

/* Reads the share of the worker, then what is left of the others: CPUs that share a core or a clock with
 * others differ in speed by more than half. */
static enum status mapped_epoch(struct worker *worker)
{
    struct reader *reader = worker->reader;
    const int number = (int)(worker - reader->workers), shares = worker_helps(worker) ? reader->threads : 1;
    uint32_t first, count;
    for (int i = 0; i < shares; i++) {
        struct worker *share = &reader->workers[(number + i) % reader->threads];
        struct position at = {.entered = i == 0 ? 0 : UINT32_MAX}; /* the owner of a share reads ahead */
        while (worker_take(share, &first, &count)) {
            TRY(copy_batch(worker, &share->order, first, count, &at));
            TRY(worker_deliver(worker, 0, count));
        }
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

static const struct load_traits mapped_traits = {.shards = true,
                                                 .timed = "order+copy",
                                                 .timed_unless_warm = "order+open+map+copy",
                                                 .copy = reader_copy,
                                                 .verify_slots = reader_verify_slots};

#define MAPPED_VARIANT(setup_)                                                             \
    .platform = "cpu", .traits = &mapped_traits, .setup = (setup_), .ready = mapped_ready, \
    .run = mapped_run, .fetch = reader_fetch, .teardown = mapped_teardown

const struct variant variant_shards_mmap = {MAPPED_VARIANT(mmap_setup)};
const struct variant variant_shards_omp = {MAPPED_VARIANT(omp_setup), .threaded = true};

/* ---- `shards` ---- */

/* `shards`: one thread reads each shard sequentially with read(2) and finds the samples by their tar headers.
 * Offsets come only from these headers, with two exceptions. If the share of a rank starts in the middle of a
 * shard, the thread seeks to the offset in the list of samples. The list also has the offset of the data of a
 * hard link. */

/* State of reading one shard through the buffer. */
struct stream {
    struct reader reader; /* must be first, because the functions of reader.h cast the state to it */
    struct tar_parser parser;
    int fd;
    uint32_t file;
    uint8_t *buffer;
    size_t buffer_bytes;
    uint64_t begin; /* offset of the buffer's first byte within the shard */
    size_t held;    /* number of bytes in the buffer */
    bool at_end;    /* the end of the shard was read */
};

/* Prepends the shard's path to the error message. */
static enum status broken(const struct stream *stream, enum status status)
{
    const struct dataset *dataset = stream->reader.load->dataset;
    return status_prefix(status, "%s/%s", dataset->path, dataset->files[stream->file].name);
}

/* Reads until the buffer holds `need` bytes from offset `from` on, or the shard ends. Discards the bytes
 * before `from`. */
static enum status fill(struct stream *stream, uint64_t from, size_t need)
{
    size_t gone = from - stream->begin < stream->held ? (size_t)(from - stream->begin) : stream->held;
    RANGE(READ);
    if (need > stream->buffer_bytes)
        return status_set(STATUS_FAILED,
                          "offset %llu: a header of %zu bytes does not fit in the buffer; raise --block",
                          (unsigned long long)from, need);
    memmove(stream->buffer, stream->buffer + gone, stream->held - gone);
    stream->held -= gone;
    stream->begin += gone;
    while (!stream->at_end && stream->begin + stream->held < from + need) {
        ssize_t count = read(stream->fd, stream->buffer + stream->held, stream->buffer_bytes - stream->held);
        if (count < 0)
            return status_set(STATUS_FAILED, "offset %llu: cannot read: %s",
                              (unsigned long long)(stream->begin + stream->held), strerror(errno));
        stream->at_end = count == 0;
        stream->held += (size_t)count;
        if (from > stream->begin) { /* skip padding and members that belong to no sample */
            gone = from - stream->begin < stream->held ? (size_t)(from - stream->begin) : stream->held;
            memmove(stream->buffer, stream->buffer + gone, stream->held - gone);
            stream->held -= gone;
            stream->begin += gone;
        }
    }
    return STATUS_OK;
}

/* Finds the next member that belongs to a sample. Sets `*key_length` and `*extension` from the member's
 * name. */
static enum status next_member(struct stream *stream, struct tar_member *member, size_t *key_length,
                               const char **extension)
{
    enum tar_step step = TAR_MORE;
    size_t need = TAR_BLOCK_BYTES;
    for (;;) {
        uint64_t position = stream->parser.position;
        if (position < stream->begin || position + need > stream->begin + stream->held)
            TRY(fill(stream, position, need));
        size_t skip = position > stream->begin ? (size_t)(position - stream->begin) : 0;
        if (skip > stream->held)
            skip = stream->held;
        TRY(tar_next(&stream->parser, stream->buffer + skip, stream->held - skip, stream->at_end, member,
                     &step, &need));
        if (step == TAR_END)
            return status_set(STATUS_FAILED, "offset %llu: the shard ends before its last sample",
                              (unsigned long long)position);
        if (step == TAR_MEMBER) {
            if (key_split(member->name, key_length, extension))
                return STATUS_OK;
            need = TAR_BLOCK_BYTES;
        }
    }
}

/* Reads the data of a hard link, which an earlier member has. Does not move the position in the file. */
static enum status take_linked(const struct stream *stream, const struct dataset_member *member,
                               uint8_t *slot)
{
    size_t done;
    const bool read = file_read_at(stream->fd, slot, member->size, member->offset, &done);
    if (read && done == member->size)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "offset %llu: %s", (unsigned long long)(member->offset + done),
                      read ? "the shard ends inside a member" : strerror(errno));
}

/* Copies a member's data into the slot: first the bytes in the buffer, then the rest from the file. */
static enum status take_data(struct stream *stream, const struct tar_member *member, uint8_t *slot)
{
    uint64_t from = member->data;
    size_t left = member->size;
    if (from < stream->begin + stream->held) {
        size_t ready = (size_t)(stream->begin + stream->held - from);
        if (ready > left)
            ready = left;
        memcpy(slot, stream->buffer + (from - stream->begin), ready);
        slot += ready;
        from += ready;
        left -= ready;
    }
    if (left > 0 &&
        left < stream->buffer_bytes / 4) { /* small: read it with the data that follows, through the buffer */
        TRY(fill(stream, from, left));
        if (from + left > stream->begin + stream->held)
            return status_set(STATUS_FAILED, "offset %llu: the shard ends inside a member",
                              (unsigned long long)(stream->begin + stream->held));
        memcpy(slot, stream->buffer + (from - stream->begin), left);
        return STATUS_OK;
    }
    while (left > 0) {
        ssize_t count = read(stream->fd, slot, left);
        if (count <= 0)
            return status_set(STATUS_FAILED, "offset %llu: %s", (unsigned long long)from,
                              count < 0 ? strerror(errno) : "the shard ends inside a member");
        slot += count;
        from += (uint64_t)count;
        left -= (size_t)count;
        stream->begin = from;
        stream->held = 0;
    }
    return STATUS_OK;
}

static enum status read_sample(struct stream *stream, const struct dataset_sample *sample, uint8_t *slot)
{
    const struct dataset_member *members = &stream->reader.load->dataset->members[sample->member];
    for (uint32_t m = 0; m < sample->members; m++) {
        struct tar_member member;
        size_t length;
        const char *extension;
        do /* skip samples that are not in the list, or belong to another share */
            TRY(next_member(stream, &member, &length, &extension));
        while (member.data < (members[m].linked ? members[m].headers : members[m].offset));
        if (!key_same(sample->key, member.name, length) || strcasecmp(extension, members[m].extension) != 0 ||
            (member.kind == TAR_LINK) != members[m].linked ||
            (member.kind == TAR_FILE && member.size != members[m].size))
            return status_set(STATUS_FAILED,
                              "offset %llu: found '%s' of %llu bytes, expected '%s.%s' of %llu bytes",
                              (unsigned long long)member.header, member.name, (unsigned long long)member.size,
                              sample->key, members[m].extension, (unsigned long long)members[m].size);
        if (members[m].linked)
            TRY(take_linked(stream, &members[m], slot));
        else
            TRY(take_data(stream, &member, slot));
        slot += members[m].size;
    }
    return STATUS_OK;
}

/* Opens the shard of a segment. If the segment starts inside the shard, seeks to the end of the sample before
 * it. If the shard may contain global pax headers, always starts at its first byte, because the parser must
 * see these headers. */
static enum status begin_segment(struct stream *stream, const struct order_segment *segment)
{
    const struct dataset *dataset = stream->reader.load->dataset;
    uint64_t position = 0;
    stream->file = segment->shard;
    if (segment->first > dataset->shard_first[segment->shard] && !dataset->files[segment->shard].global) {
        const struct dataset_sample *before = &dataset->samples[segment->first - 1];
        const struct dataset_member *last = &dataset->members[before->member + before->members - 1];
        position = last->linked ? last->headers : last->offset + last->size + tar_padding(last->size);
    }
    TRY(dataset_file_open(dataset, segment->shard, 0, &stream->fd));
    posix_fadvise(stream->fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* only a hint */
    if (position && lseek(stream->fd, (off_t)position, SEEK_SET) < 0)
        return status_set(STATUS_FAILED, "%s/%s: cannot seek: %s", dataset->path,
                          dataset->files[segment->shard].name, strerror(errno));
    tar_open(&stream->parser, dataset->files[segment->shard].bytes);
    stream->parser.position = stream->begin = position;
    stream->held = 0;
    stream->at_end = false;
    return STATUS_OK;
}

/* Reads the samples of a segment. After a broken header the rest of the shard cannot be parsed, so all later
 * samples of the segment are lost. */
static enum status read_segment(struct worker *worker, struct stream *stream,
                                const struct order_segment *segment, uint32_t arrival)
{
    const struct dataset *dataset = stream->reader.load->dataset;
    RANGE(COPY);
    enum status status = begin_segment(stream, segment);
    bool lost = status != STATUS_OK;
    for (uint32_t i = 0; i < segment->count; i++, arrival++) {
        uint32_t number = segment->first + i;
        if (!lost) {
            status = read_sample(stream, &dataset->samples[number], worker_slot(worker, arrival));
            if (status != STATUS_OK)
                broken(stream, status);
            lost = status != STATUS_OK;
        }
        if (lost)
            TRY(worker_lose(worker, number, status));
        TRY(worker_arrived(worker, arrival, number, lost));
    }
    return STATUS_OK;
}

static enum status stream_epoch(struct worker *worker)
{
    struct stream *stream = (struct stream *)worker->reader;
    const struct order *order = &worker->order;
    uint32_t arrival = 0, asked = 1,
             readahead = worker->load->given->cache == LOAD_WARM ? 0 : worker->load->given->readahead;
    for (uint32_t s = 0; s < order->segment_count; s++) {
        for (; asked < order->segment_count && asked <= s + readahead; asked++)
            dataset_file_ask(stream->reader.load->dataset, order->segments[asked].shard);
        enum status status = read_segment(worker, stream, &order->segments[s], arrival);
        if (stream->fd >= 0)
            dataset_file_close(worker->load->dataset, stream->fd);
        stream->fd = -1;
        TRY(status);
        arrival += order->segments[s].count;
    }
    return STATUS_OK;
}

static void stream_teardown(void *state)
{
    struct stream *stream = state;
    buffer_close(stream->buffer, stream->buffer_bytes);
    reader_close(&stream->reader);
    free(stream);
}

static enum status stream_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    const struct load *load = input;
    struct stream *stream = *state = calloc(1, sizeof *stream);
    TRY(ALLOCATED(stream, "out of memory"));
    stream->fd = -1;
    stream->buffer_bytes = load->block_bytes;
    stream->buffer = buffer_open(stream->buffer_bytes);
    TRY(reader_open(&stream->reader, load, 1, reader_stream_slots(load), stream_epoch));
    stream->reader.result.memory_bytes += buffer_allocated(stream->buffer_bytes);
    return ALLOCATED(stream->buffer, "out of memory for a buffer of %zu bytes; lower --block",
                     stream->buffer_bytes);
}

static enum status stream_accepts(const struct load *load)
{
    return load->dataset->columns
               ? status_set(STATUS_USAGE,
                            "finds samples by tar headers, which the MDS shards of %s do not "
                            "have; use shards-mmap, shards-omp, shards-uring or stream",
                            load->dataset->path)
               : STATUS_OK;
}

static const struct load_traits stream_traits = {.shards = true,
                                                 .accepts = stream_accepts,
                                                 .timed = "order+open+read+parse+copy",
                                                 .copy = reader_copy,
                                                 .verify_slots = reader_verify_slots};

const struct variant variant_shards = {
    READER_VARIANT(stream_traits),
    .setup = stream_setup,
    .teardown = stream_teardown,
};
