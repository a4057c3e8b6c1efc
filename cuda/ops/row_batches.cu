/* Implements ops/row_batches.h. One kernel gathers a batch on the caller's stream: next() into memory of a
 * slot, fill() into the caller's memory, also as a captured call. */
#include "ops/row_batches.h"

#include <new>

#include <pthread.h>

#include "common/calls.cuh"
#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/parallel.h"
#include "machine/device.h"

/* Room for a batch of next(), in device memory. */
struct row_slot {
    uint8_t *rows;
    int64_t *labels;  /* after the rows; NULL without labels */
    cudaEvent_t done; /* the consumer no longer uses the batch */
    bool held;
};

struct row_batches {
    struct device_batches base; /* must be the first member */
    struct row_batches_request request;
    struct rows_device_info info;
    uint64_t row_bytes;   /* of a row in a batch */
    cudaStream_t own;     /* copies the position */
    struct moving moving; /* the position */

    pthread_mutex_t lock; /* protects everything below */
    struct row_slot *slots;
    uint32_t held;
    bool cancelled;
    struct stream_stats stats;
};

static struct row_batches *of(struct device_batches *batches)
{
    return reinterpret_cast<struct row_batches *>(batches);
}

static struct row_batches *of(struct stream *stream)
{
    return reinterpret_cast<struct row_batches *>(stream);
}

static enum status rows_locate(struct device_batches *batches)
{
    return moving_locate(&of(batches)->moving);
}

/* ---- One batch ---- */

static enum status check_cancelled(struct row_batches *self)
{
    pthread_mutex_lock(&self->lock);
    const bool cancelled = self->cancelled;
    pthread_mutex_unlock(&self->lock);
    return cancelled ? status_set(STATUS_FAILED, "the stream was cancelled") : STATUS_OK;
}

/* Returns the rows of this rank in a step, counted from the beginning of the epoch. */
static struct share share_at(const struct row_batches *self, struct stream_position at)
{
    const struct row_batches_request *request = &self->request;
    const struct partition ranks = {.rank = request->rank, .ranks = request->ranks, .strong = true};
    struct share share =
        partition_step(&ranks, (uint32_t)self->info.rows, request->global, (uint32_t)at.step);
    share.first += at.step * request->global;
    return share;
}

/* Enqueues the gathering of the batch at the position. Begins to copy rows of the next batch that are not on
 * the device. */
static enum status gather(struct row_batches *self, const struct share *share, void *rows, int64_t *labels,
                          cudaStream_t stream)
{
    const struct row_batches_request *request = &self->request;
    const struct stream_position at = self->base.stream.at,
                                 next = moving_at(&self->moving, moving_position(&self->moving) + 1);
    const struct share following = share_at(self, next);
    TRY(rows_device_gather(request->rows, request->shuffle, request->seed, at.epoch, share->first,
                           share->count, rows, labels, stream));
    rows_device_ahead(request->rows, request->shuffle, request->seed, next.epoch, following.first,
                      following.count);
    return STATUS_OK;
}

static void describe(const struct row_batches *self, uint64_t count, struct stream_batch *batch)
{
    const struct stream_position at = self->base.stream.at;
    *batch = {};
    batch->samples.count = (uint32_t)count;
    batch->samples.stride = self->row_bytes;
    batch->samples.bytes = count * self->row_bytes;
    batch->samples.type = self->info.dtype;
    batch->epoch = at.epoch;
    batch->step = at.step;
    batch->last = at.step + 1 == self->request.steps;
}

static void count_batch(struct row_batches *self, uint64_t count)
{
    pthread_mutex_lock(&self->lock);
    self->stats.batches++;
    self->stats.samples += count;
    pthread_mutex_unlock(&self->lock);
}

/* ---- fill() ---- */

static bool captures(const struct row_batches *self)
{
    const struct row_batches_request *request = &self->request;
    return request->ranks == 1 && self->info.resident_rows == self->info.rows &&
           self->info.rows / request->global == request->steps;
}

static enum status fill_captured(struct row_batches *self, void *rows, int64_t *labels, cudaStream_t stream,
                                 struct stream_batch *batch)
{
    const uint32_t count = self->request.global;
    if (!captures(self))
        return status_set(STATUS_USAGE,
                          "cuda_stream: it is being captured into a CUDA graph, which needs one rank, "
                          "rows that are all on the device, and steps with equal numbers of rows; "
                          "set resident and drop_last");
    TRY(moving_begin(&self->moving, nullptr));
    TRY(rows_device_gather_step(self->request.rows, self->request.shuffle, self->request.seed,
                                self->moving.position, count, rows, labels, stream));
    TRY(moving_capture(&self->moving, self->info.device, stream));
    describe(self, count, batch);
    batch->last = false;
    return STATUS_OK;
}

static enum status rows_fill(struct device_batches *batches, const struct device_parts *to, void *cuda_stream,
                             struct stream_batch *batch)
{
    void *const rows = to->images;
    int64_t *const labels = to->labels;
    struct row_batches *self = of(batches);
    const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
    TRY(check_cancelled(self));
    if (device_capturing(-1, cuda_stream))
        return fill_captured(self, rows, labels, stream, batch);
    TRY(rows_locate(batches));
    const struct share share = share_at(self, self->base.stream.at);
    TRY(gather(self, &share, rows, labels, stream));
    describe(self, share.count, batch);
    count_batch(self, share.count);
    return moving_on(&self->moving, stream);
}

/* ---- next() ---- */

static enum status open_slot(struct row_batches *self, struct row_slot *slot)
{
    const uint64_t capacity = self->request.capacity, rows = stream_aligned(capacity * self->row_bytes);
    const uint64_t labels = self->request.labels ? capacity * sizeof(int64_t) : 0;
    void *memory;
    CUDA_TRY(cudaMalloc(&memory, rows + labels));
    slot->rows = static_cast<uint8_t *>(memory);
    slot->labels = labels ? reinterpret_cast<int64_t *>(slot->rows + rows) : nullptr;
    pthread_mutex_lock(&self->lock);
    self->stats.memory_bytes += rows + labels;
    pthread_mutex_unlock(&self->lock);
    return CUDA_STATUS(cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming));
}

/* Returns a free slot, whose memory is allocated at its first use. The consumer holds fewer than all. */
static enum status take_slot(struct row_batches *self, struct row_slot **taken)
{
    struct row_slot *slot = self->slots;
    pthread_mutex_lock(&self->lock);
    const uint32_t held = self->held;
    while (held < self->request.slots && slot->held)
        slot++;
    pthread_mutex_unlock(&self->lock);
    if (held == self->request.slots)
        return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", held);
    *taken = slot;
    if (slot->done)
        return STATUS_OK;
    struct relaxed_capture relaxed;
    (void)cudaFree(slot->rows); /* of an earlier failure */
    *slot = {};
    return open_slot(self, slot);
}

static enum status rows_next(struct device_batches *batches, void *cuda_stream, struct stream_batch *batch,
                             struct device_parts *parts)
{
    struct row_batches *self = of(batches);
    const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
    struct row_slot *slot = nullptr;
    TRY(check_cancelled(self));
    TRY(calls_refuse_capture(cuda_stream, "fdsl_stream_next(); use fdsl_stream_fill()"));
    TRY(rows_locate(batches));
    TRY(take_slot(self, &slot));
    const struct share share = share_at(self, self->base.stream.at);
    CUDA_TRY(cudaStreamWaitEvent(stream, slot->done, 0));
    TRY(gather(self, &share, slot->rows, slot->labels, stream));
    describe(self, share.count, batch);
    batch->slot = (uint32_t)(slot - self->slots);
    *parts = {slot->rows, slot->labels, nullptr, nullptr};
    TRY(moving_on(&self->moving, stream));
    count_batch(self, share.count);
    pthread_mutex_lock(&self->lock);
    slot->held = true;
    self->held++;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static enum status rows_release(struct device_batches *batches, const struct stream_batch *batch,
                                void *cuda_stream)
{
    struct row_batches *self = of(batches);
    struct row_slot *slot = &self->slots[batch->slot];
    TRY(calls_refuse_capture(cuda_stream, "the release of a batch"));
    CUDA_TRY(cudaEventRecord(slot->done, static_cast<cudaStream_t>(cuda_stream)));
    pthread_mutex_lock(&self->lock);
    slot->held = false;
    self->held--;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

/* ---- The other functions ---- */

static enum status rows_seek(struct stream *stream, struct stream_position to)
{
    struct row_batches *self = of(stream);
    const struct stream_plan plan = {.steps = self->request.steps};
    TRY(stream_check_position(&plan, to));
    TRY(moving_seek(&self->moving, to));
    pthread_mutex_lock(&self->lock);
    self->cancelled = false;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static void rows_stats(struct stream *stream, struct stream_stats *stats)
{
    struct row_batches *self = of(stream);
    const struct rows_device_info info = rows_device_info(self->request.rows);
    pthread_mutex_lock(&self->lock);
    *stats = self->stats;
    pthread_mutex_unlock(&self->lock);
    stats->memory_bytes += info.memory_bytes + info.pinned_bytes;
}

static void rows_cancel(struct stream *stream)
{
    struct row_batches *self = of(stream);
    pthread_mutex_lock(&self->lock);
    self->cancelled = true;
    pthread_mutex_unlock(&self->lock);
}

static void rows_close(struct stream *stream)
{
    struct row_batches *self = of(stream);
    struct relaxed_capture relaxed;
    (void)cudaSetDevice(self->info.device);
    moving_close(&self->moving); /* waits for work on streams of the caller */
    for (uint32_t i = 0; self->slots && i < self->request.slots; i++) {
        if (self->slots[i].done)
            (void)cudaEventSynchronize(self->slots[i].done);
        (void)cudaFree(self->slots[i].rows);
        destroy(self->slots[i].done);
    }
    destroy(self->own);
    if (self->request.owned)
        rows_device_close(self->request.rows);
    pthread_mutex_destroy(&self->lock);
    delete[] self->slots;
    delete self;
}

static const struct stream_type row_stream_functions = {
    nullptr, nullptr, nullptr, rows_seek, rows_stats, rows_cancel, rows_close,
};
static const struct device_batches_type row_functions = {rows_next, rows_fill, rows_release, rows_locate};

static enum status open_batches(struct row_batches *self)
{
    const struct row_batches_request *request = &self->request;
    self->slots = new (std::nothrow) row_slot[request->slots]{};
    TRY(ALLOCATED(self->slots, "out of memory for a stream"));
    CUDA_TRY(cudaSetDevice(self->info.device));
    TRY(stream_open(&self->own));
    self->moving.own = self->own;
    TRY(rows_device_reserve(request->rows, request->capacity));
    return moving_open(&self->moving, self->info.device);
}

enum status row_batches_open(const struct row_batches_request *request, struct device_batches **batches)
{
    *batches = nullptr;
    struct row_batches *self = new (std::nothrow) row_batches{};
    if (!self) {
        if (request->owned)
            rows_device_close(request->rows);
        return status_set(STATUS_EXHAUSTED, "out of memory for a stream");
    }
    self->base = {{&row_stream_functions, {0, 0}}, &row_functions};
    self->request = *request;
    self->info = rows_device_info(request->rows);
    self->moving.at = &self->base.stream.at;
    self->moving.steps = request->steps;
    self->row_bytes = self->info.padded_width * dtype_bytes(self->info.dtype);
    pthread_mutex_init(&self->lock, NULL);
    const int mode = device_relax_capture();
    enum status status = open_batches(self);
    if (status == STATUS_OK) {
        *batches = &self->base;
    } else {
        const struct failure failure = status_save(status);
        rows_close(&self->base.stream);
        status = status_restore(&failure);
    }
    device_restore_capture(mode);
    return status;
}
