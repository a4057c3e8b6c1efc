#include "load/resident_stream.cuh"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/parallel.h"
#include "core/phase.h"

#define STAGE_BYTES ((uint64_t)32 << 20)
#define ENTRIES_MAX 65536 /* maximum entries per buffer */

/* ---- Reading ---- */

static enum status read_member(const struct dataset *dataset, const struct dataset_member *member, int fd,
                               uint8_t *bytes)
{
    for (uint64_t got = 0; got < member->size;) {
        ssize_t count = pread(fd, bytes + got, member->size - got, (off_t)(member->offset + got));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return status_set(STATUS_FAILED, "%s/%s: offset %llu: %s", dataset->path,
                              dataset->files[member->file].name, (unsigned long long)(member->offset + got),
                              count < 0 ? strerror(errno) : "the file ends inside a member");
        got += (uint64_t)count;
    }
    return STATUS_OK;
}

enum status resident_read_sample(const struct delivery *delivery, uint32_t number, int *fd, uint32_t *file,
                                 uint8_t *bytes, uint64_t first)
{
    const struct dataset *dataset = delivery->load->dataset;
    const struct array_sample *array = &delivery->arrays.samples[number];
    for (uint32_t m = 0; m < array->members; m++) {
        const struct dataset_member *member = &dataset->members[dataset->samples[number].member + m];
        if (*fd < 0 || *file != member->file) {
            if (*fd >= 0)
                close(*fd);
            *file = member->file;
            TRY(dataset_file_open(dataset, member->file, 0, fd));
        }
        TRY(read_member(dataset, member, *fd, bytes + (array->at[m] - first)));
    }
    return STATUS_OK;
}

/* ---- Opening ---- */

uint64_t resident_stream_plan(struct resident_stream *stream, struct delivery *delivery, int threads)
{
    uint64_t largest = array_align(delivery->arrays.bytes_max);
    stream->delivery = delivery;
    stream->threads = threads;
    stream->entries_max = ENTRIES_MAX;
    stream->stage_bytes =
        ENTRIES_MAX * sizeof(struct unpack_entry) + (largest > STAGE_BYTES ? largest : STAGE_BYTES);
    return COUNT_OF(stream->stages) * stream->stage_bytes;
}

enum status resident_stream_open(struct resident_stream *stream, const uint8_t *bytes, uint32_t kept)
{
    stream->bytes = bytes;
    stream->kept = kept;
    stream->failed = static_cast<bool *>(calloc(stream->entries_max, sizeof *stream->failed));
    TRY(ALLOCATED(stream->failed, "out of memory"));
    for (struct resident_stage &stage : stream->stages) {
        CUDA_TRY(cudaMallocHost(&stage.host, stream->stage_bytes));
        CUDA_TRY(cudaMalloc(&stage.device, stream->stage_bytes));
        CUDA_TRY(cudaEventCreateWithFlags(&stage.unpacked, cudaEventDisableTiming));
        memset(stage.host, 0, stream->stage_bytes); /* the gaps between members are copied but never used */
    }
    return STATUS_OK;
}

void resident_stream_close(struct resident_stream *stream)
{
    for (struct resident_stage &stage : stream->stages) {
        destroy(stage.unpacked);
        (void)cudaFreeHost(stage.host);
        (void)cudaFree(stage.device);
    }
    free(stream->failed);
}

/* ---- One buffer ---- */

/* The entries of a buffer: first those of resident samples, then those of samples to read. */
struct filling {
    const struct resident_stream *stream;
    struct resident_stage *stage;
    struct unpack_entry *entries;
    uint32_t resident, streamed;
    uint64_t end; /* offset of the first byte after the buffer's samples */
};

/* Takes samples, starting at samples[*taken], until the buffer is full. Entries of samples to read are first
 * stored backwards from the end of the table, because the number of resident samples is not known yet. They
 * are moved to their final position when it is known. */
static void choose(struct filling *filling, const uint32_t *samples, uint32_t count, uint32_t slot,
                   uint32_t *taken)
{
    const struct resident_stream *stream = filling->stream;
    const struct array_extent *extents = stream->delivery->arrays.extents;
    uint32_t most = stream->entries_max;
    for (; *taken < count && filling->resident + filling->streamed < most; ++*taken) {
        uint32_t number = samples[*taken];
        if (number < stream->kept) {
            filling->entries[filling->resident++] = {0, number, slot + *taken};
            continue;
        }
        uint64_t bytes = array_align(extents[number].bytes);
        if (filling->end + bytes > stream->stage_bytes)
            break;
        filling->entries[most - ++filling->streamed] = {filling->end, number, slot + *taken};
        filling->end += bytes;
    }
    memmove(filling->entries + filling->resident, filling->entries + most - filling->streamed,
            filling->streamed * sizeof *filling->entries);
}

static enum status read_one(const struct filling *filling, uint64_t i)
{
    const struct unpack_entry *entry = &filling->entries[filling->resident + i];
    int fd = -1;
    uint32_t file = 0;
    enum status status = resident_read_sample(filling->stream->delivery, entry->sample, &fd, &file,
                                              filling->stage->host + entry->at, 0);
    if (fd >= 0)
        close(fd);
    return status;
}

static void read_task(void *context, uint64_t i, int thread)
{
    const struct filling *filling = static_cast<const struct filling *>(context);
    (void)thread;
    filling->stream->failed[i] = read_one(filling, i) != STATUS_OK;
}

/* Reads the samples. If a worker thread could not read a sample, the calling thread reads the sample again,
 * because each thread has its own error message. Removes the entries of samples that are lost. */
static enum status read_all(struct filling *filling, struct output_queue *queue)
{
    const struct resident_stream *stream = filling->stream;
    struct unpack_entry *entries = filling->entries + filling->resident;
    uint32_t kept = 0;
    RANGE(READ);
    parallel_for(stream->threads, filling->streamed, read_task, filling);
    for (uint32_t i = 0; i < filling->streamed; i++) {
        enum status status = stream->failed[i] ? read_one(filling, i) : STATUS_OK;
        if (status != STATUS_OK) {
            queue->held[entries[i].slot] = DELIVERY_LOST;
            TRY(queue_lose(queue, entries[i].sample, status));
            continue;
        }
        entries[kept++] = entries[i];
    }
    filling->streamed = kept;
    return STATUS_OK;
}

/* Copies the buffer and unpacks its samples. */
static enum status unpack(struct filling *filling, struct output_queue *queue)
{
    struct resident_stage *stage = filling->stage;
    struct unpack job = queue_job(queue);
    {
        RANGE(COPY);
        CUDA_TRY(
            cudaMemcpyAsync(stage->device, stage->host, filling->end, cudaMemcpyHostToDevice, queue->stream));
    }
    job.entries = reinterpret_cast<const struct unpack_entry *>(stage->device);
    job.bytes = filling->stream->bytes;
    job.count = filling->resident;
    TRY(unpack_launch(&job, queue->stream));
    job.entries += filling->resident;
    job.bytes = stage->device;
    job.count = filling->streamed;
    TRY(unpack_launch(&job, queue->stream));
    CUDA_TRY(cudaEventRecord(stage->unpacked, queue->stream));
    return STATUS_OK;
}

enum status resident_stream_gather(struct resident_stream *stream, struct output_queue *queue,
                                   const uint32_t *samples, uint32_t count, uint32_t slot)
{
    for (uint32_t i = 0; i < count; i++)
        queue->held[slot + i] = samples[i];
    for (uint32_t taken = 0; taken < count;) {
        struct resident_stage *stage = &stream->stages[stream->next++ % COUNT_OF(stream->stages)];
        struct filling filling = {stream, stage, reinterpret_cast<struct unpack_entry *>(stage->host)};
        filling.end = stream->entries_max * sizeof *filling.entries;
        CUDA_TRY(cudaEventSynchronize(stage->unpacked));
        choose(&filling, samples, count, slot, &taken);
        TRY(read_all(&filling, queue));
        TRY(unpack(&filling, queue));
        stream->moved_bytes += filling.end;
    }
    return STATUS_OK;
}
