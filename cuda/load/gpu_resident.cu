/* `gpu-resident`: the data set is read into device memory once, before any timing. Each epoch sorts the
 * sample numbers by random keys. A kernel gathers and converts several batches at a time in that order. If
 * the whole set is in device memory, no samples cross the bus during a run. Otherwise, the samples that did
 * not fit are read again in every epoch, in the order of that epoch (struct resident_stream). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/check.cuh"
#include "common/cub.cuh"
#include "common/stream.cuh"
#include "core/parallel.h"
#include "core/phase.h"
#include "machine/device.h"
#include "load/delivery.cuh"

/* ---- Samples that do not fit in device memory ---- */

/* Streams the part of a data set that does not fit in device memory. Threads read the samples of this part
 * into two pinned buffers in turn. While the threads fill one buffer, the other is copied and unpacked. */
/* A buffer: a table of struct unpack_entry, and the samples. */
struct resident_stage {
    uint8_t *host, *device;
    cudaEvent_t unpacked; /* recorded after the kernels that read the buffer */
};

struct resident_stream {
    struct delivery *delivery;
    const uint8_t *bytes; /* the resident samples, in device memory */
    uint32_t kept; /* samples 0 to kept - 1 are resident. The order of an epoch is a random permutation,
                    * so about the same share of each batch is resident. */
    int threads;
    uint32_t entries_max;
    uint64_t stage_bytes; /* size of a buffer, including the table */
    struct resident_stage stages[2];
    uint32_t next;        /* the buffer to fill next */
    bool *failed;         /* per sample of a buffer: whether it could not be read */
    uint64_t moved_bytes; /* bytes copied to the device in this run */
};

#define STREAM_STAGE_BYTES ((uint64_t)32 << 20)
#define ENTRIES_MAX        65536 /* maximum entries per buffer */

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

/* Reads all members of a sample to `bytes`, each at its offset array->at[] minus `first`. Keeps the latest
 * file open in `*fd` and its number in `*file`. STATUS_FAILED with file and offset. */
static enum status resident_read_sample(const struct delivery *delivery, uint32_t number, int *fd,
                                        uint32_t *file, uint8_t *bytes, uint64_t first)
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

/* Sets the sizes of the buffers. Returns the total size of both buffers in bytes, which is needed once in
 * pinned memory and once in device memory. arrays.bytes_max must be set before the call. */
static uint64_t resident_stream_plan(struct resident_stream *stream, struct delivery *delivery, int threads)
{
    uint64_t largest = array_align(delivery->arrays.bytes_max);
    stream->delivery = delivery;
    stream->threads = threads;
    stream->entries_max = ENTRIES_MAX;
    stream->stage_bytes = ENTRIES_MAX * sizeof(struct unpack_entry) +
                          (largest > STREAM_STAGE_BYTES ? largest : STREAM_STAGE_BYTES);
    return COUNT_OF(stream->stages) * stream->stage_bytes;
}

/* Allocates the buffers. Samples 0 to kept - 1 are at `bytes`. */
static enum status resident_stream_open(struct resident_stream *stream, const uint8_t *bytes, uint32_t kept)
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

static void resident_stream_close(struct resident_stream *stream)
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
static void choose_entries(struct filling *filling, const uint32_t *samples, uint32_t count, uint32_t slot,
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
static enum status read_streamed(struct filling *filling, struct output_queue *queue)
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
static enum status unpack_stage(struct filling *filling, struct output_queue *queue)
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

/* Unpacks `count` samples into consecutive slots from `slot` on. Records in queue->held which sample is in
 * which slot. */
static enum status resident_stream_gather(struct resident_stream *stream, struct output_queue *queue,
                                          const uint32_t *samples, uint32_t count, uint32_t slot)
{
    for (uint32_t i = 0; i < count; i++)
        queue->held[slot + i] = samples[i];
    for (uint32_t taken = 0; taken < count;) {
        struct resident_stage *stage = &stream->stages[stream->next++ % COUNT_OF(stream->stages)];
        struct filling filling = {stream, stage, reinterpret_cast<struct unpack_entry *>(stage->host)};
        filling.end = stream->entries_max * sizeof *filling.entries;
        CUDA_TRY(cudaEventSynchronize(stage->unpacked));
        choose_entries(&filling, samples, count, slot, &taken);
        TRY(read_streamed(&filling, queue));
        TRY(unpack_stage(&filling, queue));
        stream->moved_bytes += filling.end;
    }
    return STATUS_OK;
}

/* ---- The set in device memory ---- */

/* Tensor bytes per launch. Launches are large, because the start and end of a launch take about 5 µs. */
#define LAUNCH_BYTES ((uint64_t)256 << 20)
#define LAUNCHES     2 /* there are slots for this many launches */
/* Tensor bytes per launch if samples are streamed. These launches are smaller, because a batch is delivered
 * only when all samples of its launch have been read. */
#define STREAM_LAUNCH_BYTES ((uint64_t)32 << 20)
#define MARGIN_BYTES        ((uint64_t)512 << 20) /* device memory to leave free if the set does not fit */
#define STAGE_BYTES         ((uint64_t)16 << 20)  /* pinned buffer for the upload */
#define COPY_BYTES          ((uint64_t)1 << 30)   /* size of a copy that measures the bandwidth */
#define KEY_THREADS         256

struct resident {
    struct delivery delivery;
    uint8_t *bytes; /* samples 0 to kept - 1, consecutive */
    uint32_t kept;
    struct resident_stream stream; /* only if kept is smaller than the number of samples */
    uint64_t *keys[2];
    uint32_t *order[2]; /* sample numbers: [0] ascending, [1] sorted by key; keys[i] belongs to order[i] */
    void *scratch;      /* scratch memory of the sort */
    size_t scratch_bytes;
    cudaGraphExec_t sorting;
    uint32_t launch_slots;
};

/* Returns whether some samples did not fit into device memory and are therefore read again in every epoch. */
static bool is_streamed(const struct resident *resident)
{
    return resident->kept < resident->delivery.load->dataset->sample_count;
}

/* ---- The order ---- */

static __global__ void make_keys(uint64_t seed, uint64_t epoch, uint32_t count, uint64_t *keys,
                                 uint32_t *samples)
{
    uint32_t i = blockIdx.x * KEY_THREADS + threadIdx.x;
    if (i >= count)
        return;
    keys[i] = order_key(seed, epoch, i);
    samples[i] = i;
}

static cudaError_t sort(struct resident *resident, void *scratch, size_t *scratch_bytes, cudaStream_t stream)
{
    return sort_pairs(
        scratch, scratch_bytes, resident->keys[0], resident->keys[1], resident->order[0], resident->order[1],
        static_cast<int64_t>(resident->delivery.load->dataset->sample_count), ORDER_KEY_BITS, stream);
}

/* Records the sort as a CUDA graph, because launching its kernels takes longer than running them. */
static enum status record_sort(struct resident *resident)
{
    cudaStream_t stream = resident->delivery.queues[0].stream;
    cudaGraph_t graph = NULL;
    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaError_t error = sort(resident, resident->scratch, &resident->scratch_bytes, stream);
    cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    error = error == cudaSuccess ? ended : error;
    if (error == cudaSuccess)
        error = cudaGraphInstantiate(&resident->sorting, graph, 0);
    destroy(graph);
    return cuda_status(error, "recording the sort", __FILE__, __LINE__);
}

/* Computes the order of the epoch. The sort is stable: equal keys stay in order of sample number, as in
 * order_make(). */
static enum status make_order(struct resident *resident, const struct output_queue *queue)
{
    const struct load *load = resident->delivery.load;
    uint32_t count = load->dataset->sample_count;
    make_keys<<<(count + KEY_THREADS - 1) / KEY_THREADS, KEY_THREADS, 0, queue->stream>>>(
        load->given->seed, queue->epoch, count, resident->keys[0], resident->order[0]);
    CUDA_TRY_LAUNCH("make_keys");
    CUDA_TRY(cudaGraphLaunch(resident->sorting, queue->stream));
    return STATUS_OK;
}

/* ---- An epoch ---- */

/* Copies `count` sample numbers of the order to the host, which needs them to know which sample is in which
 * slot. */
static enum status fetch_order(struct resident *resident, struct output_queue *queue, uint32_t begin,
                               uint32_t count)
{
    CUDA_TRY(cudaMemcpyAsync(queue->order.samples, resident->order[1] + begin, count * sizeof(uint32_t),
                             cudaMemcpyDeviceToHost, queue->stream));
    CUDA_TRY(cudaStreamSynchronize(queue->stream));
    return STATUS_OK;
}

/* This rank's share of the order starts at `begin`. Gathers samples [index, index + count) of the share into
 * consecutive slots, and delivers them in batches. */
static enum status gather(struct resident *resident, struct output_queue *queue, uint32_t begin,
                          uint32_t index, uint32_t count)
{
    const struct load *load = resident->delivery.load;
    uint32_t slot = index % resident->delivery.slots;
    struct unpack job = queue_job(queue);
    job.bytes = resident->bytes;
    job.order = resident->order[1] + begin + index;
    job.slot = slot;
    job.count = count;
    for (uint32_t i = 0; i < count; i += load->given->batch)
        TRY(queue_reserve(queue, slot + i));
    if (is_streamed(resident))
        TRY(resident_stream_gather(&resident->stream, queue, queue->order.samples + index, count, slot));
    else
        TRY(unpack_launch(&job, queue->stream));
    for (uint32_t i = 0; !is_streamed(resident) && load->control->whole && i < count; i++)
        queue->held[slot + i] = queue->order.samples[index + i];
    for (uint32_t i = 0; i < count; i += load->given->batch)
        TRY(queue_deliver(queue, slot + i, count - i < load->given->batch ? count - i : load->given->batch));
    return STATUS_OK;
}

static enum status resident_epoch(struct output_queue *queue)
{
    struct resident *resident = static_cast<struct resident *>(queue->own);
    const struct load *load = resident->delivery.load;
    uint32_t begin, end, step = resident->launch_slots;
    order_share(&resident->delivery.verifier.plan, load->rank, &begin, &end);
    TRY(make_order(resident, queue));
    if (load->control->whole || is_streamed(resident))
        TRY(fetch_order(resident, queue, begin, end - begin));
    for (uint32_t index = 0; index < end - begin; index += step)
        TRY(gather(resident, queue, begin, index, end - begin - index < step ? end - begin - index : step));
    return STATUS_OK;
}

static enum status resident_read(struct output_queue *queue)
{
    return queue_each_epoch(queue, resident_epoch);
}

/* ---- Loading the set ---- */

/* Returns the size of the whole set: one sample after another, each packed as load/arrays.h describes. */
static uint64_t set_size(const struct arrays *arrays, uint32_t count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += array_align(arrays->extents[i].bytes);
    return bytes;
}

/* Chooses the samples that stay in device memory: as many as fit in `most` bytes, from sample 0 on. Makes
 * their offsets relative to the first byte of the set, so that a kernel needs only the sample's number.
 * Offsets of the remaining samples stay relative to the start of each sample. Sets resident->kept, and
 * returns the size of the chosen samples in bytes. */
static uint64_t lay_out(struct resident *resident, uint64_t most)
{
    struct arrays *arrays = &resident->delivery.arrays;
    uint32_t count = resident->delivery.load->dataset->sample_count, i = 0;
    uint64_t set_bytes = 0;
    for (; i < count && array_align(arrays->extents[i].bytes) <= most - set_bytes; i++) {
        struct array_sample *sample = &arrays->samples[i];
        for (uint32_t m = 0; m < sample->members; m++)
            sample->at[m] += set_bytes;
        sample->values_offset += set_bytes;
        arrays->extents[i].begin = set_bytes;
        set_bytes += array_align(arrays->extents[i].bytes);
    }
    resident->kept = i;
    return set_bytes;
}

/* Uploads the set to resident->bytes, through the pinned buffer `stage` of `stage_bytes` bytes. */
static enum status fill(struct resident *resident, uint8_t *stage, uint64_t stage_bytes)
{
    const struct array_extent *extents = resident->delivery.arrays.extents;
    int fd = -1;
    uint32_t file = 0, number = 0;
    enum status status = STATUS_OK;
    while (status == STATUS_OK && number < resident->kept) {
        uint64_t begin = extents[number].begin, held = 0;
        for (; status == STATUS_OK && number < resident->kept; number++) {
            uint64_t end = extents[number].begin + extents[number].bytes - begin;
            if (end > stage_bytes)
                break;
            status = resident_read_sample(&resident->delivery, number, &fd, &file, stage, begin);
            held = end;
        }
        if (status == STATUS_OK)
            status = cuda_status(cudaMemcpy(resident->bytes + begin, stage, held, cudaMemcpyHostToDevice),
                                 "cudaMemcpy of the set", __FILE__, __LINE__);
    }
    if (fd >= 0)
        close(fd);
    return status;
}

static enum status bring_in(struct resident *resident, uint64_t set_bytes, uint64_t stage_bytes)
{
    uint8_t *stage;
    CUDA_TRY(cudaMalloc(&resident->bytes, set_bytes > 0 ? set_bytes : 1));
    CUDA_TRY(cudaMallocHost(&stage, stage_bytes));
    memset(stage, 0, stage_bytes); /* the gaps between samples are copied but never used */
    enum status status = fill(resident, stage, stage_bytes);
    (void)cudaFreeHost(stage);
    return status;
}

/* ---- The variant ---- */

static void resident_teardown(void *state)
{
    struct resident *resident = static_cast<struct resident *>(state);
    resident_stream_close(&resident->stream);
    (void)cudaFree(resident->bytes);
    for (int i = 0; i < 2; i++) {
        (void)cudaFree(resident->keys[i]);
        (void)cudaFree(resident->order[i]);
    }
    (void)cudaFree(resident->scratch);
    destroy(resident->sorting);
    delivery_close(&resident->delivery);
    delete resident;
}

static enum status open_order(struct resident *resident)
{
    uint32_t count = resident->delivery.load->dataset->sample_count;
    for (int i = 0; i < 2; i++) {
        CUDA_TRY(cudaMalloc(&resident->keys[i], count * sizeof *resident->keys[i]));
        CUDA_TRY(cudaMalloc(&resident->order[i], count * sizeof *resident->order[i]));
    }
    CUDA_TRY(cudaMalloc(&resident->scratch, resident->scratch_bytes));
    return record_sort(resident);
}

/* Adds the resident samples to the useful bytes. Adds the pinned buffer of the upload to the memory. This
 * buffer is freed before the memory for the order is allocated, so only the larger of the two counts. */
static void count_memory(struct delivery *delivery, uint64_t kept_bytes, uint64_t stage_bytes,
                         uint64_t order_bytes)
{
    delivery->result.useful_bytes += (double)kept_bytes;
    delivery->result.memory_bytes += stage_bytes > order_bytes ? stage_bytes - order_bytes : 0;
}

/* Computes the number of batches per launch. */
static uint64_t launch_batches(const struct delivery *delivery, uint64_t launch_bytes)
{
    const struct load *load = delivery->load;
    uint64_t batches = launch_bytes / (load->given->batch * delivery->stride);
    uint64_t all = ((uint64_t)load->dataset->sample_count + load->given->batch - 1) / load->given->batch;
    return batches < 1 ? 1 : batches < all ? batches : all;
}

/* Chooses the samples that stay in device memory. All samples stay if they and `other_bytes` fit. Otherwise,
 * the function reserves `stream_bytes` and a margin, and as many samples stay as fit in the rest. Their size
 * never exceeds --resident-bytes. Sets `*kept_bytes` to the size of the chosen samples. */
static enum status choose_resident(struct resident *resident, uint64_t other_bytes, uint64_t stream_bytes,
                                   uint64_t *kept_bytes)
{
    const struct load *load = resident->delivery.load;
    size_t free_bytes, total_bytes;
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    uint64_t set_bytes = set_size(&resident->delivery.arrays, load->dataset->sample_count);
    uint64_t beside = stream_bytes + MARGIN_BYTES, most = load->given->resident_bytes;
    if (most && most < set_bytes)
        TRY(device_check_room(resident->delivery.device, most + beside,
                              "--resident-bytes and the buffers need", "lower --resident-bytes"));
    else if (set_bytes + other_bytes > free_bytes)
        most = free_bytes > beside ? free_bytes - beside : 0;
    else
        most = set_bytes;
    *kept_bytes = lay_out(resident, most);
    load->control->resident_share = set_bytes > 0 ? (double)*kept_bytes / (double)set_bytes : 1;
    return STATUS_OK;
}

static enum status open_resident(struct resident *resident, const struct resources *resources,
                                 const struct load *load)
{
    struct delivery *delivery = &resident->delivery;
    uint32_t count = load->dataset->sample_count;
    uint64_t kept_bytes, batches, largest, streaming;
    TRY(delivery_begin(delivery, resources, load, true, true, 1));
    CUDA_TRY(sort(resident, NULL, &resident->scratch_bytes, NULL)); /* only computes scratch_bytes */
    uint64_t order_bytes = resident->scratch_bytes +                /* keys and numbers: see open_order() */
                           count * (2 * sizeof *resident->keys[0] + 2 * sizeof *resident->order[0]);
    uint64_t slot_bytes = LAUNCHES * load->given->batch * delivery->stride;
    streaming = resident_stream_plan(&resident->stream, delivery, resources->threads);
    TRY(choose_resident(resident, order_bytes + slot_bytes * launch_batches(delivery, LAUNCH_BYTES),
                        order_bytes + slot_bytes * launch_batches(delivery, STREAM_LAUNCH_BYTES) + streaming,
                        &kept_bytes));
    streaming = is_streamed(resident) ? streaming : 0;
    batches = launch_batches(delivery, streaming ? STREAM_LAUNCH_BYTES : LAUNCH_BYTES);
    TRY(delivery_open(delivery, LAUNCHES * batches * load->given->batch,
                      kept_bytes + order_bytes + streaming));
    largest = delivery->arrays.bytes_max > STAGE_BYTES ? delivery->arrays.bytes_max : STAGE_BYTES;
    count_memory(delivery, kept_bytes, largest, order_bytes);
    delivery->result.memory_bytes += streaming; /* the pinned buffers */
    TRY(bring_in(resident, kept_bytes, largest));
    if (streaming)
        TRY(resident_stream_open(&resident->stream, resident->bytes, resident->kept));
    resident->launch_slots = (uint32_t)(batches * load->given->batch);
    delivery->queues[0].own = resident;
    return open_order(resident);
}

static enum status resident_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct resident *resident = static_cast<struct resident *>(state);
    struct delivery *delivery = &resident->delivery;
    resident->stream.moved_bytes = 0;
    TRY(delivery_run(delivery, number, resident_read));
    const struct checksum *checksum = &delivery->result.checksum;
    /* If samples are streamed, counts the bytes copied over the bus. Otherwise, counts the bytes read plus
     * the bytes written in device memory. */
    delivery->result.moved_bytes = is_streamed(resident)
                                       ? resident->stream.moved_bytes
                                       : checksum->bytes + checksum->count * delivery->slot_bytes;
    return STATUS_OK;
}

/* Unless samples are streamed, timed runs do not copy the order to the host. The order of the last epoch is
 * still on the device; this function fetches it to learn which sample is in which slot. */
static enum status resident_verify_slots(void *state, uint64_t *wrong)
{
    struct resident *resident = static_cast<struct resident *>(state);
    struct delivery *delivery = &resident->delivery;
    struct output_queue *queue = &delivery->queues[0];
    uint32_t begin, end, slots = delivery->slots;
    CUDA_TRY(cudaSetDevice(delivery->device));
    if (is_streamed(resident))
        return delivery_verify_slots(delivery, wrong);
    order_share(&delivery->verifier.plan, delivery->load->rank, &begin, &end);
    TRY(fetch_order(resident, queue, begin, end - begin));
    for (uint32_t i = 0; i < slots; i++)
        queue->held[i] = DELIVERY_LOST;
    for (uint32_t index = end - begin > slots ? end - begin - slots : 0; index < end - begin; index++)
        queue->held[index % slots] = queue->order.samples[index];
    return delivery_verify_slots(delivery, wrong);
}

/* Measures a copy within device memory. Counts bytes read plus bytes written, like result.moved_bytes. If
 * samples are streamed, measures copies from pinned memory to the device. */
static enum status resident_copy(void *state, double *bytes_per_s)
{
    const struct resident *resident = static_cast<struct resident *>(state);
    const struct delivery *delivery = &resident->delivery;
    size_t free_bytes, total_bytes;
    if (is_streamed(resident))
        return device_copy_rate(delivery->device, resident->stream.stage_bytes, cudaMemcpyHostToDevice,
                                bytes_per_s);
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    uint64_t bytes = free_bytes / 4 < COPY_BYTES ? free_bytes / 4 : COPY_BYTES;
    return device_copy_rate(delivery->device, bytes, cudaMemcpyDeviceToDevice, bytes_per_s);
}

static const struct load_traits traits = {.shards = true,
                                          .files = true,
                                          .device = true,
                                          .resident = true,
                                          .keyed = true,
                                          .timed = "order+gather",
                                          .timed_unless_resident = "order+read+transfer+gather",
                                          .copy = resident_copy,
                                          .verify_slots = resident_verify_slots};

extern "C" const struct variant variant_gpu_resident = {.platform = "cuda",
                                                        .threaded = true,
                                                        .traits = &traits,
                                                        .probe = device_probe_variant,
                                                        .setup =
                                                            delivery_setup<struct resident, open_resident>,
                                                        .ready = delivery_ready,
                                                        .run = resident_run,
                                                        .fetch = delivery_fetch,
                                                        .teardown = resident_teardown};
