/* Locks: `lock` protects the queue and the states of the slots. The thread of the stream is the only one that
 * calls the host stream, except for stream_cancel() and stream_stats(). A seek is a request to this thread.
 *
 * CUDA streams: `copies` has the copies and the kernels that write to the slots, in the order of the batches.
 * `decodes` is for nvJPEG: decoding does not wait until a slot is free. `order` has only the events of
 * batches that stream_release() returned. An event of the consumer may be recorded again after this call, so
 * the stream records an event of its own after it. */
#include "common/device_stream.cuh"

#include <atomic>
#include <new>

#include <pthread.h>
#include <string.h>

#include "common/check.cuh"
#include "common/fit.cuh"
#include "common/stream.cuh"
#include "core/parallel.h"
#include "core/phase.h"
#include "core/timer.h"
#include "data/set_stream.h"
#include "machine/device.h"

#define AREAS           2
#define CHUNK_BYTES     (UINT64_C(128) << 20) /* maximum size of the pixels of a chunk of several files */
#define PIXEL_ALIGNMENT 256                   /* alignment of decoded images, in bytes */

enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_READY, SLOT_HELD };

/* Room for a batch on the device. The thread of the stream owns a slot that is SLOT_FILLING. */
struct device_slot {
    uint8_t *values;        /* device memory */
    uint8_t *masks;         /* device memory; NULL: there are none */
    int32_t *device_labels; /* device memory, followed by the next array */
    uint32_t *device_numbers;
    int32_t *labels; /* pinned memory, followed by `numbers` as on the device; `read` is before them */
    uint32_t *numbers;
    uint64_t *read;
    struct fit_move *moves, *device_moves; /* pinned and device memory; NULL: no sample is resident */
    cudaEvent_t ready;                     /* the batch is complete */
    cudaEvent_t done; /* the consumer no longer uses the batch; recorded if `waits` is set */
    bool waits;
    enum slot_state state;
    struct stream_batch batch; /* as it is delivered */
    char *warnings;            /* of the batch, as lines, for the thread that takes it; NULL: none */
};

/* A batch of the host stream that is in use. */
struct host_batch {
    struct stream_batch batch;
    cudaEvent_t copied; /* the batch and its files are no longer needed */
};

/* Room for the pixels of a chunk. */
struct area {
    struct image_batch batch;
    uint8_t *pixels; /* device memory */
    uint64_t bytes;
    struct fit_entry *entries, *device_entries; /* pinned and device memory for request.chunk entries */
    cudaEvent_t decoded, fitted;                /* the pixels are complete; they may be overwritten */
};

/* Device memory for samples: values, or with `crops` the pixels of whole images. */
struct resident {
    bool crops;
    uint8_t *memory;
    uint64_t room, used; /* in samples, with `crops` in bytes */
    uint32_t set, count; /* samples of the set; samples that have a place */
    uint8_t *there;      /* per sample of the set: whether it has a place */
};

struct device_stream {
    struct stream stream; /* must be the first member */
    struct device_stream_request request;
    int device;
    cudaStream_t copies, decodes, order;

    /* Only for the thread of the stream, which is running if `runs` is set. */
    struct stream *host;
    pthread_t thread;
    bool runs;
    bool borrows; /* only for the consumer: device_stream_borrow() takes a batch */
    struct area areas[AREAS];
    uint64_t chunks; /* number of chunks so far */
    struct resident resident;
    struct host_batch hosts[DEVICE_STREAM_HELD];
    uint32_t host_first, host_count; /* the batches in use are those from `host_first` on, in a circle */

    uint32_t slot_count, last; /* `last`: index of the slot that was filled last */
    struct device_slot *slots;

    pthread_mutex_t lock; /* protects everything below, and the states of the slots */
    pthread_cond_t work;  /* for the thread: there may be something to do */
    pthread_cond_t done;  /* for the consumer: a batch is ready, the stream failed, or a seek is complete */
    bool idle, waiting;   /* the thread waits; the consumer waits */
    bool started, cancelled, seeking, closing;
    struct stream_position target; /* of the seek */
    struct failure seek_result;    /* result of the seek */
    struct failure fault;          /* of the batch after those in the queue; STATUS_OK: none */
    uint64_t epochs_open;          /* with by_epoch: batches of epochs below this one may be prepared */
    struct device_slot **queue;    /* `ready` slots from index `first` on, in a circle of `slot_count` */
    uint32_t first, ready, held;
    struct stream_stats stats; /* without those of the host stream */
    uint64_t calls, ready_sum;
    std::atomic<uint64_t> device_bytes;
};

/* ---- Pinned memory ---- */

static std::atomic<int> pinning_device;

void device_stream_use(int device)
{
    pinning_device = device;
}

/* A thread that has not chosen a device would create a context on device 0. */
enum status device_stream_pin(size_t bytes, void **memory)
{
    CUDA_TRY(cudaSetDevice(pinning_device));
    const int mode = device_relax_capture();
    const enum status status = CUDA_STATUS(cudaHostAlloc(memory, bytes, cudaHostAllocPortable));
    device_restore_capture(mode);
    return status;
}

void device_stream_unpin(void *memory)
{
    const int mode = device_relax_capture();
    (void)cudaFreeHost(memory); /* nothing depends on an error here */
    device_restore_capture(mode);
}

/* ---- Memory ---- */

static enum status reserve(struct device_stream *self, size_t bytes, void **memory)
{
    CUDA_TRY(cudaMalloc(memory, bytes));
    self->device_bytes += bytes;
    return STATUS_OK;
}

/* Creates an event for which the host may wait. A waiting thread sleeps, so that it leaves its processor to
 * the threads that decode. */
static enum status open_event(cudaEvent_t *event)
{
    return CUDA_STATUS(cudaEventCreateWithFlags(event, cudaEventDisableTiming | cudaEventBlockingSync));
}

static enum status open_moves(struct device_stream *self, struct device_slot *slot)
{
    const size_t bytes = self->request.capacity * sizeof *slot->moves;
    void *memory;
    if (self->request.resident_bytes == 0)
        return STATUS_OK;
    TRY(reserve(self, bytes, &memory));
    slot->device_moves = static_cast<struct fit_move *>(memory);
    CUDA_TRY(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable));
    slot->moves = static_cast<struct fit_move *>(memory);
    self->stats.memory_bytes += bytes;
    return STATUS_OK;
}

static enum status open_slot(struct device_stream *self, struct device_slot *slot)
{
    const size_t capacity = self->request.capacity;
    void *memory;
    TRY(reserve(self, capacity * self->request.sample_bytes, &memory));
    slot->values = static_cast<uint8_t *>(memory);
    if (self->request.mask_bytes) {
        TRY(reserve(self, capacity * self->request.mask_bytes, &memory));
        slot->masks = static_cast<uint8_t *>(memory);
    }
    TRY(reserve(self, capacity * (sizeof *slot->device_labels + sizeof *slot->device_numbers), &memory));
    slot->device_labels = static_cast<int32_t *>(memory);
    slot->device_numbers = reinterpret_cast<uint32_t *>(slot->device_labels + capacity);
    const size_t bytes = capacity * (sizeof *slot->read + sizeof *slot->labels + sizeof *slot->numbers);
    CUDA_TRY(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable));
    slot->read = static_cast<uint64_t *>(memory);
    slot->labels = reinterpret_cast<int32_t *>(slot->read + capacity);
    slot->numbers = reinterpret_cast<uint32_t *>(slot->labels + capacity);
    self->stats.memory_bytes += bytes;
    TRY(open_moves(self, slot));
    TRY(open_event(&slot->ready));
    /* Only device_stream_close() waits for `done`. Recording it takes less time without an interrupt. */
    return CUDA_STATUS(cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming));
}

static void close_slot(struct device_slot *slot)
{
    free(slot->warnings);
    (void)cudaFree(slot->values);
    (void)cudaFree(slot->masks);
    (void)cudaFree(slot->device_labels);
    (void)cudaFreeHost(slot->read);
    (void)cudaFree(slot->device_moves);
    (void)cudaFreeHost(slot->moves);
    destroy(slot->ready, slot->done);
}

static enum status open_area(struct device_stream *self, struct area *area)
{
    const size_t bytes = self->request.chunk * sizeof(struct fit_entry);
    void *memory;
    TRY(reserve(self, bytes, &memory));
    area->device_entries = static_cast<struct fit_entry *>(memory);
    CUDA_TRY(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable));
    area->entries = static_cast<struct fit_entry *>(memory);
    self->stats.memory_bytes += bytes;
    TRY(open_event(&area->decoded));
    TRY(open_event(&area->fitted));
    if (!self->request.decoder)
        return STATUS_OK;
    return image_batch_open(self->request.decoder, self->request.chunk, &area->batch);
}

static void close_area(struct area *area)
{
    image_batch_close(&area->batch);
    (void)cudaFree(area->pixels);
    (void)cudaFree(area->device_entries);
    (void)cudaFreeHost(area->entries);
    destroy(area->decoded, area->fitted);
}

/* Enlarges an area that is not in use to at least `bytes` bytes: by a quarter more, so that it seldom grows,
 * but not above CHUNK_BYTES without need. */
static enum status grow_area(struct device_stream *self, struct area *area, uint64_t bytes)
{
    uint64_t room = bytes + bytes / 4 < CHUNK_BYTES ? bytes + bytes / 4 : CHUNK_BYTES;
    void *memory;
    room = room < bytes ? bytes : room;
    if (bytes <= area->bytes)
        return STATUS_OK;
    CUDA_TRY(cudaFree(area->pixels));
    self->device_bytes -= area->bytes;
    area->pixels = nullptr;
    area->bytes = 0;
    TRY(reserve(self, room, &memory));
    area->pixels = static_cast<uint8_t *>(memory);
    area->bytes = room;
    return STATUS_OK;
}

/* ---- Resident samples ---- */

/* Allocates memory for as many samples as fit; with random crops, of the size that is given. */
static enum status open_resident(struct device_stream *self)
{
    struct resident *resident = &self->resident;
    const struct set_stream_request *from = set_stream_request_of(self->host);
    const uint64_t given = self->request.resident_bytes;
    const size_t sample = set_stream_crops(&from->fit) ? 1 : self->request.sample_bytes;
    void *memory;
    resident->crops = set_stream_crops(&from->fit);
    resident->set = from->count;
    if (from->device_bytes != given)
        return status_set(STATUS_USAGE,
                          "a stream on a device keeps other samples than its host stream leaves out");
    if (resident->crops && given == UINT64_MAX)
        return status_set(STATUS_USAGE,
                          "%s: the sizes of decoded images are not known in advance; give a number of bytes",
                          OPTION_OR_FIELD("--resident-device-bytes", "resident_device_bytes"));
    resident->room = given / sample;
    if (!resident->crops && resident->room > resident->set)
        resident->room = resident->set;
    if (resident->room == 0)
        return STATUS_OK;
    TRY(device_check_room(self->device, resident->room * sample, "the resident samples need",
                          OPTION_OR_FIELD("lower --resident-device-bytes", "lower resident_device_bytes")));
    TRY(reserve(self, resident->room * sample, &memory));
    resident->memory = static_cast<uint8_t *>(memory);
    resident->there = static_cast<uint8_t *>(calloc(resident->set, 1));
    self->stats.memory_bytes += resident->set;
    return ALLOCATED(resident->there, "out of memory for a list of %u samples", resident->set);
}

/* Enqueues the copies of the samples of a batch that are resident. `places`: set_stream_places(). */
static enum status gather(struct device_stream *self, struct device_slot *slot, const uint64_t *places,
                          uint32_t samples)
{
    uint32_t count = 0;
    for (uint32_t i = 0; places && !self->resident.crops && i < samples; i++)
        if (places[i] != SET_STREAM_LOADED)
            slot->moves[count++] = {places[i], i};
    if (count == 0)
        return STATUS_OK;
    CUDA_TRY(cudaMemcpyAsync(slot->device_moves, slot->moves, count * sizeof *slot->moves,
                             cudaMemcpyHostToDevice, self->copies));
    return fit_move_launch(slot->device_moves, count, self->request.sample_bytes, self->resident.memory,
                           slot->values, self->copies);
}

/* Returns whether a sample of a batch can become resident. */
static bool is_new(const struct device_stream *self, const struct stream_batch *batch, const uint64_t *places,
                   uint32_t i)
{
    const struct resident *resident = &self->resident;
    return i < batch->samples.count && places[i] == SET_STREAM_LOADED && batch->labels[i] != STREAM_MASKED &&
           !resident->there[batch->numbers[i] % resident->set];
}

/* Enqueues that samples of a batch become resident, as many as there is room for. The host stream delivers
 * them no more once their copies are enqueued; a sample whose copy fails is delivered as before. */
static enum status keep_samples(struct device_stream *self, const struct device_slot *slot,
                                const struct stream_batch *batch, const uint64_t *places)
{
    struct resident *resident = &self->resident;
    const size_t bytes = self->request.sample_bytes;
    if (!places || resident->crops)
        return STATUS_OK;
    for (uint32_t i = 0; i < batch->samples.count && resident->used < resident->room; i++) {
        uint32_t end = i;
        while (resident->used + (end - i) < resident->room && is_new(self, batch, places, end))
            resident->there[batch->numbers[end++] % resident->set] = 1;
        if (end == i)
            continue;
        CUDA_TRY(cudaMemcpyAsync(resident->memory + resident->used * bytes, slot->values + i * bytes,
                                 (end - i) * bytes, cudaMemcpyDeviceToDevice, self->copies));
        for (; i < end; i++, resident->count++)
            set_stream_keep(self->host, batch, i, resident->used++, nullptr);
    }
    return STATUS_OK;
}

/* ---- Decoding ---- */

static bool decodes(const struct device_stream *self)
{
    return self->request.decoder && self->request.decoder->kind != DECODER_CPU;
}

/* Returns whether the host stream hands on files. */
static bool fits(const struct device_stream *self)
{
    return decodes(self) || self->resident.crops;
}

/* Returns whether the image of a file is resident. */
static bool is_resident(const struct set_stream_file *file)
{
    return !file->bytes && !file->pixels;
}

/* Returns the room for the pixels of a file in an area. */
static uint64_t pixel_bytes(const struct set_stream_file *file)
{
    const uint64_t bytes = is_resident(file) ? 0 : (uint64_t)3 * file->shape.width * file->shape.height;
    return (bytes + PIXEL_ALIGNMENT - 1) / PIXEL_ALIGNMENT * PIXEL_ALIGNMENT;
}

/* Returns how many of the files, at least one and at most `most`, become a chunk. Sets `*bytes` to the size
 * of their pixels. */
static uint32_t chunk_of(const struct set_stream_file *files, uint32_t count, uint32_t most, uint64_t *bytes)
{
    uint32_t taken = 1;
    *bytes = pixel_bytes(files);
    for (; taken < count && taken < most; taken++) {
        const uint64_t more = pixel_bytes(&files[taken]);
        if (*bytes + more > CHUNK_BYTES)
            break;
        *bytes += more;
    }
    return taken;
}

/* Decodes those files of a chunk that are not decoded yet to an area. The engines do not wait for a CUDA
 * stream, so the host waits until the area is free. */
static enum status decode_chunk(struct device_stream *self, struct area *area,
                                const struct set_stream_file *files, uint32_t count, uint64_t bytes)
{
    uint64_t at = 0;
    CUDA_TRY(cudaEventSynchronize(area->fitted));
    TRY(grow_area(self, area, bytes));
    area->batch.count = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (files[i].bytes)
            image_batch_add(&area->batch, files[i].bytes, files[i].size, area->pixels + at,
                            files[i].shape.width);
        at += pixel_bytes(&files[i]);
    }
    if (area->batch.count == 0)
        return STATUS_OK;
    TRY(image_batch_decode(self->request.decoder, &area->batch, self->decodes));
    CUDA_TRY(cudaEventRecord(area->decoded, self->decodes));
    return CUDA_STATUS(cudaStreamWaitEvent(self->copies, area->decoded, 0));
}

static struct fit_entry entry_of(const struct set_stream_file *file, const uint8_t *pixels)
{
    struct fit_entry entry = {};
    entry.stride = 3 * file->shape.width;
    entry.pixels = pixels + (uint64_t)file->part.top * entry.stride + 3 * file->part.left;
    entry.width = file->part.width;
    entry.height = file->part.height;
    entry.slot = file->index;
    entry.turn = file->turn;
    return entry;
}

/* Marks the sample of a file that nvJPEG refused as broken. */
static enum status break_file(struct device_stream *self, const struct device_slot *slot,
                              struct stream_batch *batch, uint32_t index)
{
    const size_t bytes = self->request.sample_bytes, mask_bytes = self->request.mask_bytes;
    TRY(set_stream_break(self->host, batch, index,
                         status_set(STATUS_FAILED, "nvJPEG cannot decode this image")));
    if (slot->masks)
        CUDA_TRY(cudaMemsetAsync(slot->masks + index * mask_bytes, STREAM_IGNORED, mask_bytes, self->copies));
    return CUDA_STATUS(cudaMemsetAsync(slot->values + index * bytes, 0, bytes, self->copies));
}

/* Enqueues that an image with these pixels on the device becomes resident, if it can and there is room for
 * it.
 */
static enum status keep_image(struct device_stream *self, const struct stream_batch *batch,
                              const uint64_t *places, const struct set_stream_file *file,
                              const uint8_t *pixels)
{
    struct resident *resident = &self->resident;
    const uint64_t bytes = pixel_bytes(file);
    if (!resident->crops || resident->room == 0 || !is_new(self, batch, places, file->index))
        return STATUS_OK;
    if (bytes > resident->room - resident->used) {
        set_stream_keep_no_more(self->host);
        return STATUS_OK;
    }
    CUDA_TRY(cudaMemcpyAsync(resident->memory + resident->used, pixels, bytes, cudaMemcpyDeviceToDevice,
                             self->copies));
    set_stream_keep(self->host, batch, file->index, resident->used, file);
    resident->there[batch->numbers[file->index] % resident->set] = 1;
    resident->used += bytes;
    resident->count++;
    return STATUS_OK;
}

/* Enqueues the kernel that fits the images of a chunk into their samples, after those that are not on the
 * device yet were copied to it. */
static enum status fit_chunk(struct device_stream *self, const struct device_slot *slot, struct area *area,
                             struct stream_batch *batch, const uint64_t *places,
                             const struct set_stream_file *files, uint32_t count)
{
    struct fit fit = {};
    uint64_t at = 0;
    uint32_t decoded = 0;
    for (uint32_t i = 0; i < count; at += pixel_bytes(&files[i]), i++) {
        const struct set_stream_file *file = &files[i];
        const uint8_t *pixels = area->pixels + at;
        if (file->bytes && area->batch.broken[decoded++]) {
            TRY(break_file(self, slot, batch, file->index));
            continue;
        }
        if (file->pixels)
            CUDA_TRY(cudaMemcpyAsync(area->pixels + at, file->pixels, pixel_bytes(file),
                                     cudaMemcpyHostToDevice, self->copies));
        if (is_resident(file))
            pixels = self->resident.memory + places[file->index];
        else
            TRY(keep_image(self, batch, places, file, pixels));
        area->entries[fit.count++] = entry_of(file, pixels);
    }
    fit.entries = area->device_entries;
    fit.res = self->request.res;
    fit.channels = self->request.channels;
    fit.tensor = DTYPE_STORED;
    fit.slots = slot->values;
    fit.stride = self->request.sample_bytes;
    CUDA_TRY(cudaMemcpyAsync(area->device_entries, area->entries, fit.count * sizeof *area->entries,
                             cudaMemcpyHostToDevice, self->copies));
    TRY(fit_launch(&fit, self->copies));
    return CUDA_STATUS(cudaEventRecord(area->fitted, self->copies));
}

/* Decodes and fits the files of a batch of the host stream into a slot. */
static enum status decode_files(struct device_stream *self, const struct device_slot *slot,
                                struct stream_batch *batch, const uint64_t *places,
                                const struct set_stream_file *files, uint32_t count)
{
    uint64_t bytes;
    for (uint32_t first = 0, chunk; first < count; first += chunk) {
        struct area *area = &self->areas[self->chunks++ % AREAS];
        chunk = chunk_of(files + first, count - first, self->request.chunk, &bytes);
        TRY(decode_chunk(self, area, files + first, chunk, bytes));
        TRY(fit_chunk(self, slot, area, batch, places, files + first, chunk));
    }
    return STATUS_OK;
}

/* ---- Batches ---- */

/* Returns batches to the host stream, oldest first, until at most `most` are in use. */
static enum status return_batches(struct device_stream *self, uint32_t most)
{
    while (self->host_count > most) {
        struct host_batch *oldest = &self->hosts[self->host_first];
        CUDA_TRY(cudaEventSynchronize(oldest->copied));
        self->host_first = (self->host_first + 1) % DEVICE_STREAM_HELD;
        self->host_count--;
        TRY(stream_release(self->host, &oldest->batch, NULL));
    }
    return STATUS_OK;
}

/* Describes a batch for the consumer, and enqueues the copy of its labels and numbers. The host stream reuses
 * its memory before the consumer has released the batch, so the slot has copies of the arrays. */
static enum status describe(struct device_stream *self, struct device_slot *slot,
                            const struct stream_batch *from)
{
    const uint32_t count = from->samples.count;
    slot->batch = *from;
    slot->batch.samples.values = slot->values;
    slot->batch.masks = slot->masks;
    slot->batch.samples.labels = from->labels ? slot->device_labels : nullptr;
    slot->batch.labels = from->labels ? slot->labels : nullptr;
    slot->batch.numbers = slot->numbers;
    slot->batch.read = from->read ? slot->read : nullptr;
    slot->batch.ready = slot->ready;
    slot->batch.slot = (uint32_t)(slot - self->slots);
    memcpy(slot->numbers, from->numbers, count * sizeof *slot->numbers);
    if (from->read)
        memcpy(slot->read, from->read, count * sizeof *slot->read);
    if (!from->labels || count == 0)
        return STATUS_OK;
    memcpy(slot->labels, from->labels, count * sizeof *slot->labels);
    const size_t bytes = self->request.capacity * sizeof *slot->labels + count * sizeof *slot->numbers;
    return CUDA_STATUS(
        cudaMemcpyAsync(slot->device_labels, slot->labels, bytes, cudaMemcpyHostToDevice, self->copies));
}

static enum status check_batch(const struct device_stream *self, const struct batch *samples)
{
    return samples->count <= self->request.capacity &&
                   (samples->count == 0 || samples->stride == self->request.sample_bytes)
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "a batch of %u samples of %zu bytes does not fit into a batch on the device",
                            samples->count, samples->stride);
}

/* Enqueues the copies of the samples that the host has decoded: all but those that are resident, and those of
 * `files`, which are in the order of their indices. */
static enum status copy_samples(struct device_stream *self, struct device_slot *slot,
                                const struct batch *samples, const uint64_t *places,
                                const struct set_stream_file *files, uint32_t count)
{
    const uint8_t *values = static_cast<const uint8_t *>(samples->values);
    for (uint32_t i = 0, first = 0, file = 0; i <= samples->count; i++) {
        const bool handed_on = file < count && files[file].index == i;
        file += handed_on;
        if (i < samples->count && !handed_on && (!places || places[i] == SET_STREAM_LOADED))
            continue;
        if (i > first)
            CUDA_TRY(cudaMemcpyAsync(slot->values + first * samples->stride, values + first * samples->stride,
                                     (i - first) * samples->stride, cudaMemcpyHostToDevice, self->copies));
        first = i + 1;
    }
    return STATUS_OK;
}

/* Enqueues all work on a batch. */
static enum status enqueue(struct device_stream *self, struct device_slot *slot, struct host_batch *host)
{
    struct stream_batch *batch = &host->batch;
    const struct batch *samples = &batch->samples;
    const struct set_stream_file *files = nullptr;
    uint32_t count = 0;
    RANGE(COPY);
    TRY(check_batch(self, samples));
    if (fits(self))
        files = set_stream_files(self->host, batch, &count);
    const uint64_t *places = self->request.resident_bytes ? set_stream_places(self->host, batch) : nullptr;
    /* The arrays of the slot may still be copied if its latest batch was discarded. */
    CUDA_TRY(cudaEventSynchronize(slot->ready));
    if (slot->waits)
        CUDA_TRY(cudaStreamWaitEvent(self->copies, slot->done, 0));
    TRY(copy_samples(self, slot, samples, places, files, count));
    if (slot->masks && samples->count > 0)
        CUDA_TRY(cudaMemcpyAsync(slot->masks, batch->masks, samples->count * self->request.mask_bytes,
                                 cudaMemcpyHostToDevice, self->copies));
    TRY(decode_files(self, slot, batch, places, files, count));
    TRY(gather(self, slot, places, samples->count));
    TRY(keep_samples(self, slot, batch, places));
    TRY(describe(self, slot, batch));
    CUDA_TRY(cudaEventRecord(slot->ready, self->copies));
    return CUDA_STATUS(cudaEventRecord(host->copied, self->copies));
}

/* Moves the warnings of this thread to the slot. */
static void keep_warnings(struct device_slot *slot)
{
    free(slot->warnings);
    slot->warnings = *status_warnings() ? strdup(status_warnings()) : nullptr;
    status_forget_warnings();
}

/* Repeats the warnings of a batch in the thread that takes it. */
static void repeat_warnings(struct device_slot *slot)
{
    char *rest, *line = slot->warnings ? strtok_r(slot->warnings, "\n", &rest) : nullptr;
    for (; line; line = strtok_r(nullptr, "\n", &rest))
        status_warn("%s", line);
    free(slot->warnings);
    slot->warnings = nullptr;
}

/* Takes the next batch of the host stream, and enqueues all work on it. Sets `*decode_s` to the time after
 * the host stream has delivered the batch. */
static enum status transfer(struct device_stream *self, struct device_slot *slot, double *decode_s)
{
    CUDA_TRY(cudaSetDevice(self->device)); /* a new thread has device 0 */
    TRY(return_batches(self, DEVICE_STREAM_HELD - 1));
    struct host_batch *host = &self->hosts[(self->host_first + self->host_count) % DEVICE_STREAM_HELD];
    TRY(stream_next(self->host, &host->batch));
    const double begin_s = timer_now_s();
    const enum status status = enqueue(self, slot, host);
    *decode_s = timer_now_s() - begin_s;
    keep_warnings(slot);
    if (status == STATUS_OK) {
        self->host_count++;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    (void)cudaStreamSynchronize(self->decodes); /* the message of the failure says more than another error */
    (void)cudaStreamSynchronize(self->copies);
    (void)stream_release(self->host, &host->batch, NULL);
    return status_restore(&failure);
}

/* ---- The thread ---- */

/* Returns the slot for the next batch, or NULL if the thread must wait. */
static struct device_slot *find_work(struct device_stream *self)
{
    const struct device_stream_request *request = &self->request;
    if (!self->started || self->cancelled || self->fault.status != STATUS_OK ||
        self->ready >= request->ahead || (request->by_epoch && self->host->at.epoch >= self->epochs_open))
        return nullptr;
    for (uint32_t i = 1; i <= self->slot_count; i++) {
        struct device_slot *slot = &self->slots[(self->last + i) % self->slot_count];
        if (slot->state == SLOT_FREE)
            return slot;
    }
    return nullptr;
}

/* Fills a slot and adds it to the queue. Releases the lock while it works. */
static void fill(struct device_stream *self, struct device_slot *slot)
{
    double decode_s = 0;
    slot->state = SLOT_FILLING;
    self->last = (uint32_t)(slot - self->slots);
    pthread_mutex_unlock(&self->lock);
    const enum status status = transfer(self, slot, &decode_s);
    pthread_mutex_lock(&self->lock);
    self->stats.decode_s += decodes(self) ? decode_s : 0;
    self->stats.resident_device = self->resident.count;
    slot->state = status == STATUS_OK ? SLOT_READY : SLOT_FREE;
    if (status == STATUS_OK)
        self->queue[(self->first + self->ready++) % self->slot_count] = slot;
    else if (!self->cancelled && !self->seeking && !self->closing)
        self->fault = status_save(status);
    if (self->waiting)
        pthread_cond_signal(&self->done);
}

/* Moves the host stream. After a failure, it is at the old position again. */
static enum status move_host(struct device_stream *self, struct stream_position to)
{
    TRY(return_batches(self, 0));
    const enum status status = stream_seek(self->host, to);
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct failure failure = status_save(status);
    TRY(stream_seek(self->host, self->stream.at));
    return status_restore(&failure);
}

/* Carries out a seek. Releases the lock while it works. */
static void seek(struct device_stream *self)
{
    pthread_mutex_unlock(&self->lock);
    const enum status status = move_host(self, self->target);
    pthread_mutex_lock(&self->lock);
    self->seek_result.status = STATUS_OK;
    if (status != STATUS_OK)
        self->seek_result = status_save(status);
    for (; self->ready > 0; self->ready--, self->first = (self->first + 1) % self->slot_count) {
        self->queue[self->first]->state = SLOT_FREE;
        self->queue[self->first]->waits = false; /* the copies of this batch are in the order of `copies` */
    }
    self->fault.status = STATUS_OK;
    self->epochs_open = 0;
    self->seeking = false;
    pthread_cond_signal(&self->done);
}

static void *run(void *context)
{
    struct device_stream *self = static_cast<struct device_stream *>(context);
    (void)device_relax_capture(); /* this thread allocates, and must not disturb captures of other threads */
    pthread_mutex_lock(&self->lock);
    while (!self->closing) {
        struct device_slot *slot = self->seeking ? nullptr : find_work(self);
        if (self->seeking)
            seek(self);
        else if (slot)
            fill(self, slot);
        else {
            self->idle = true;
            pthread_cond_wait(&self->work, &self->lock);
            self->idle = false;
        }
    }
    pthread_mutex_unlock(&self->lock);
    (void)return_batches(self, 0); /* the streams are closed next */
    return nullptr;
}

/* ---- The functions of a stream ---- */

static struct device_stream *of(struct stream *stream)
{
    return reinterpret_cast<struct device_stream *>(stream);
}

/* Wakes the thread if it waits. */
static void wake(struct device_stream *self)
{
    if (self->idle)
        pthread_cond_signal(&self->work);
}

/* The thread needs the lock at once, so it is woken after the lock was released. */
static void unlock_and_wake(struct device_stream *self, bool wakes)
{
    wakes = wakes && self->idle;
    pthread_mutex_unlock(&self->lock);
    if (wakes)
        pthread_cond_signal(&self->work);
}

/* Lets the thread prepare batches of the next batch's epoch. */
static void open_epoch(struct device_stream *self)
{
    if (self->started && self->epochs_open > self->stream.at.epoch)
        return;
    self->started = true;
    self->epochs_open = self->stream.at.epoch + 1;
    wake(self);
}

static bool device_stream_wait(struct stream *stream, double seconds)
{
    struct device_stream *self = of(stream);
    const struct timespec until = timer_deadline(seconds);
    const double begin_s = timer_now_s();
    bool returns = false;
    pthread_mutex_lock(&self->lock);
    open_epoch(self);
    for (int error = 0; !returns && error == 0;) {
        returns = self->cancelled || self->held == self->slot_count || self->ready > 0 ||
                  self->fault.status != STATUS_OK;
        self->waiting = !returns;
        if (!returns)
            error = pthread_cond_timedwait(&self->done, &self->lock, &until);
    }
    self->waiting = false;
    self->stats.wait_s += timer_now_s() - begin_s;
    pthread_mutex_unlock(&self->lock);
    return returns;
}

/* Waits until a batch is ready, or returns the failure of the stream. */
static enum status await_batch(struct device_stream *self)
{
    for (double begin_s = 0;; pthread_cond_wait(&self->done, &self->lock)) {
        const bool fails = self->cancelled || self->held == self->slot_count;
        const bool ends = fails || self->ready > 0 || self->fault.status != STATUS_OK;
        if (ends && begin_s > 0)
            self->stats.wait_s += timer_now_s() - begin_s;
        self->waiting = !ends;
        if (self->cancelled)
            return status_set(STATUS_FAILED, "the stream was cancelled");
        if (fails)
            return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", self->held);
        if (ends)
            return self->ready > 0 ? STATUS_OK : status_restore(&self->fault);
        if (begin_s == 0)
            begin_s = timer_now_s();
    }
}

/* Hands the first batch of the queue to the consumer. */
static void take(struct device_stream *self, struct stream_batch *batch)
{
    struct device_slot *slot = self->queue[self->first];
    self->first = (self->first + 1) % self->slot_count;
    self->ready--;
    self->held++;
    slot->state = SLOT_HELD;
    repeat_warnings(slot);
    *batch = slot->batch;
    self->stats.batches++;
    self->stats.samples += batch->samples.count;
    self->stats.masked += batch->masked;
}

static enum status device_stream_next(struct stream *stream, struct stream_batch *batch)
{
    struct device_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    self->calls++;
    self->ready_sum += self->ready;
    open_epoch(self);
    const enum status status = await_batch(self);
    if (status == STATUS_OK)
        take(self, batch);
    /* Waking a thread is a system call, and its calls of CUDA would delay those of the consumer. While
     * batches are ready, the thread sleeps until the consumer returns this one. */
    unlock_and_wake(self, self->ready == 0 && !(self->borrows && status == STATUS_OK));
    return status;
}

enum status device_stream_borrow(struct stream *stream, struct stream_batch *batch)
{
    struct device_stream *self = of(stream);
    self->borrows = true;
    const enum status status = stream_next(stream, batch);
    self->borrows = false;
    return status;
}

/* Returns whether the thread shall work after a batch was returned. Decoding begins at once. Copies are only
 * enqueued, which takes little time: the thread sleeps until less than half of the batches are ready, and
 * then prepares several. At least one is always ready. */
static bool wants_work(const struct device_stream *self)
{
    const uint32_t ahead = self->request.ahead, few = ahead > 4 ? (ahead - 1) / 2 : 1;
    return self->ready < ahead && (decodes(self) || self->ready <= few);
}

/* Makes slot->done follow an event of the consumer. */
static enum status follow(struct device_stream *self, struct device_slot *slot, void *done_event)
{
    if (!done_event)
        return STATUS_OK;
    CUDA_TRY(cudaStreamWaitEvent(self->order, static_cast<cudaEvent_t>(done_event), 0));
    return CUDA_STATUS(cudaEventRecord(slot->done, self->order));
}

/* Returns a batch. `record` enqueues that slot->done is recorded after the consumer's work; `waits`: it does.
 */
template <class Record>
static enum status give_back(struct device_stream *self, const struct stream_batch *batch, bool waits,
                             Record record)
{
    struct device_slot *slot = batch->slot < self->slot_count ? &self->slots[batch->slot] : nullptr;
    pthread_mutex_lock(&self->lock);
    const bool held = slot && slot->state == SLOT_HELD;
    const enum status status = held ? record(slot) : STATUS_OK;
    if (held && status == STATUS_OK) {
        slot->state = SLOT_FREE;
        slot->waits = waits;
        self->held--;
    }
    unlock_and_wake(self, held && wants_work(self));
    return held ? status : status_set(STATUS_USAGE, "the batch was released before");
}

static enum status device_stream_release(struct stream *stream, const struct stream_batch *batch,
                                         void *done_event)
{
    struct device_stream *self = of(stream);
    return give_back(self, batch, done_event != NULL,
                     [&](struct device_slot *slot) { return follow(self, slot, done_event); });
}

enum status device_stream_give_back(struct stream *stream, const struct stream_batch *batch,
                                    cudaStream_t consumer)
{
    return give_back(of(stream), batch, true, [consumer](struct device_slot *slot) {
        return CUDA_STATUS(cudaEventRecord(slot->done, consumer));
    });
}

const uint32_t *device_stream_numbers(struct stream *stream, const struct stream_batch *batch)
{
    return of(stream)->slots[batch->slot].device_numbers;
}

static enum status device_stream_seek(struct stream *stream, struct stream_position to)
{
    struct device_stream *self = of(stream);
    struct failure result = {};
    pthread_mutex_lock(&self->lock);
    const bool stays = !self->cancelled && self->fault.status == STATUS_OK && to.epoch == stream->at.epoch &&
                       to.step == stream->at.step;
    if (!stays) {
        self->cancelled = false;
        self->target = to;
        self->seeking = true;
        stream_cancel(self->host); /* the thread may wait for a batch */
        pthread_cond_signal(&self->work);
        while (self->seeking)
            pthread_cond_wait(&self->done, &self->lock);
        result = self->seek_result;
    }
    pthread_mutex_unlock(&self->lock);
    return result.status == STATUS_OK ? STATUS_OK : status_restore(&result);
}

static void device_stream_stats(struct stream *stream, struct stream_stats *stats)
{
    struct device_stream *self = of(stream);
    stream_stats(self->host, stats);
    pthread_mutex_lock(&self->lock);
    stats->batches = self->stats.batches;
    stats->samples = self->stats.samples;
    stats->masked = self->stats.masked;
    stats->wait_s = self->stats.wait_s;
    stats->decode_s += self->stats.decode_s;
    stats->ready = self->calls ? (double)self->ready_sum / (double)self->calls : 0;
    stats->memory_bytes += self->stats.memory_bytes + self->device_bytes;
    stats->resident_device = self->stats.resident_device;
    pthread_mutex_unlock(&self->lock);
}

static void device_stream_cancel(struct stream *stream)
{
    struct device_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    self->cancelled = true;
    stream_cancel(self->host);
    pthread_cond_signal(&self->done);
    pthread_mutex_unlock(&self->lock);
}

static void stop_thread(struct device_stream *self)
{
    if (!self->runs)
        return;
    pthread_mutex_lock(&self->lock);
    self->closing = true;
    stream_cancel(self->host);
    pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
    pthread_join(self->thread, NULL);
}

static void device_stream_close(struct stream *stream)
{
    struct device_stream *self = of(stream);
    stop_thread(self);
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++)
        if (self->slots[i].done)
            (void)cudaEventSynchronize(self->slots[i].done);
    for (cudaStream_t each : {self->decodes, self->copies, self->order})
        if (each)
            (void)cudaStreamSynchronize(each);
    stream_close(self->host);
    for (struct host_batch &host : self->hosts)
        destroy(host.copied);
    for (struct area &area : self->areas)
        close_area(&area);
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++)
        close_slot(&self->slots[i]);
    (void)cudaFree(self->resident.memory);
    free(self->resident.there);
    destroy(self->copies, self->decodes, self->order);
    pthread_cond_destroy(&self->done);
    pthread_cond_destroy(&self->work);
    pthread_mutex_destroy(&self->lock);
    delete[] self->queue;
    delete[] self->slots;
    delete self;
}

static const struct stream_type device_stream_type = {
    device_stream_next,  device_stream_wait,   device_stream_release, device_stream_seek,
    device_stream_stats, device_stream_cancel, device_stream_close,
};

uint64_t device_stream_memory_bytes(struct stream *stream)
{
    return of(stream)->device_bytes;
}

/* ---- Opening ---- */

static enum status check_request(const struct device_stream_request *request)
{
    if (request->capacity < 1 || request->sample_bytes < 1 || request->ahead < 1 || request->held < 1)
        return status_set(STATUS_USAGE, "a stream on a device needs samples, and batches ahead");
    const struct image_decoder *decoder = request->decoder;
    const size_t bytes = (size_t)request->channels * request->res * request->res;
    if (decoder && decoder->kind != DECODER_CPU &&
        ((request->channels != 1 && request->channels != 3) || bytes != request->sample_bytes))
        return status_set(STATUS_USAGE,
                          "a device decodes images of bytes with 1 or 3 channels, not samples of %zu bytes",
                          request->sample_bytes);
    return STATUS_OK;
}

static enum status open_all(struct device_stream *self)
{
    TRY(check_request(&self->request));
    CUDA_TRY(cudaGetDevice(&self->device));
    for (cudaStream_t *each : {&self->copies, &self->decodes, &self->order})
        TRY(stream_open(each));
    self->slots = new (std::nothrow) device_slot[self->slot_count]{};
    self->queue = new (std::nothrow) device_slot *[self->slot_count] {};
    TRY(ALLOCATED(self->slots && self->queue, "out of memory for a stream"));
    for (uint32_t i = 0; i < self->slot_count; i++)
        TRY(open_slot(self, &self->slots[i]));
    for (struct host_batch &host : self->hosts)
        TRY(open_event(&host.copied));
    if (self->request.resident_bytes)
        TRY(open_resident(self));
    for (uint32_t i = 0; fits(self) && i < AREAS; i++)
        TRY(open_area(self, &self->areas[i]));
    return STATUS_OK;
}

static enum status start_thread(struct device_stream *self)
{
    const int error = parallel_start(&self->thread, run, self);
    self->runs = !error;
    return error ? status_set(STATUS_EXHAUSTED, "cannot start a thread for batches on the device: %s",
                              strerror(error))
                 : STATUS_OK;
}

enum status device_stream_open(struct stream *host, const struct device_stream_request *request,
                               struct stream **stream)
{
    *stream = nullptr;
    struct device_stream *self = new (std::nothrow) device_stream{};
    if (!self)
        stream_close(host);
    TRY(ALLOCATED(self, "out of memory for a stream"));
    self->stream = {&device_stream_type, host->at};
    self->request = *request;
    self->request.chunk = request->chunk ? request->chunk : DEVICE_STREAM_CHUNK;
    self->host = host;
    self->slot_count = request->ahead + request->held;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->work, NULL);
    timer_cond_init(&self->done);
    enum status status = open_all(self);
    if (status == STATUS_OK)
        status = start_thread(self);
    if (status == STATUS_OK) {
        *stream = &self->stream;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    device_stream_close(&self->stream);
    return status_restore(&failure);
}
