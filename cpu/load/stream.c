/* `shards`: one thread reads each shard sequentially with read(2) and finds the samples by their tar headers.
 * Offsets come only from these headers, with two exceptions. If the share of a rank starts in the middle of a
 * shard, the thread seeks to the offset in the list of samples. The list also has the offset of the data of a
 * hard link. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/types.h>
#include <unistd.h>

#include "core/phase.h"
#include "data/members.h"
#include "data/tar.h"
#include "reader.h"

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

static const struct load_traits traits = {.shards = true,
                                          .accepts = stream_accepts,
                                          .timed = "order+open+read+parse+copy",
                                          .copy = reader_copy,
                                          .verify_slots = reader_verify_slots};

const struct variant variant_shards = {
    READER_VARIANT(traits),
    .setup = stream_setup,
    .teardown = stream_teardown,
};
