/* Implements ops/row_batches.h. One kernel gathers a batch on the caller's stream: next() into memory of a
 * slot, fill() into the caller's memory. A second kernel widens the labels.
 *
 * A captured fill() reads its step from device memory and moves it on. The host then no longer knows the
 * position: `moves` is set, and locate() waits for the latest replay and reads it. cudaDeviceSynchronize()
 * would end captures of other threads, so the event `moved` follows all work that writes the position. */
#include "ops/row_batches.h"

#include <new>

#include <pthread.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/parallel.h"
#include "machine/device.h"

#define BLOCK 256

/* Room for a batch of next(), in device memory. */
struct row_slot {
    uint8_t *rows;
    int64_t *labels;  /* after the rows; NULL without labels */
    int32_t *narrow;  /* the labels as they are gathered */
    cudaEvent_t done; /* the consumer no longer uses the batch */
    bool held;
};

struct row_batches {
    struct device_batches base; /* must be the first member */
    struct row_batches_request request;
    struct rows_device_info info;
    uint64_t row_bytes;      /* of a row in a batch */
    int32_t *narrow;         /* device memory: the labels of fill() as they are gathered */
    cudaEvent_t used;        /* the latest work that uses `narrow` */
    unsigned long long user; /* number of the CUDA stream of this work; valid if `uses` is set */
    bool uses;
    uint64_t *step;    /* device memory: the step of captured calls, over all epochs */
    cudaStream_t own;  /* copies `step` */
    cudaEvent_t moved; /* the latest work that writes `step`, also in graphs */
    bool moves;        /* fill() was captured: replays move `step`, and other calls set it */

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

static __global__ void __launch_bounds__(BLOCK)
    widen_kernel(const int32_t *from, uint32_t count, int64_t *labels)
{
    const uint32_t i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < count)
        labels[i] = from[i];
}

static __global__ void set_kernel(uint64_t *word, uint64_t value)
{
    *word = value;
}

/* ---- Positions ---- */

static uint64_t step_of(const struct row_batches *self, struct stream_position at)
{
    return at.epoch * self->request.steps + at.step;
}

static struct stream_position at_step(const struct row_batches *self, uint64_t step)
{
    return {step / self->request.steps, step % self->request.steps};
}

static enum status write_step(struct row_batches *self, uint64_t step)
{
    CUDA_TRY(cudaMemcpyAsync(self->step, &step, sizeof step, cudaMemcpyHostToDevice, self->own));
    return CUDA_STATUS(cudaStreamSynchronize(self->own));
}

/* Waits for replays, and gets the position that they have reached. */
static enum status rows_locate(struct device_batches *batches)
{
    struct row_batches *self = of(batches);
    uint64_t step;
    if (!self->moves)
        return STATUS_OK;
    struct relaxed_capture relaxed;
    CUDA_TRY(cudaEventSynchronize(self->moved));
    CUDA_TRY(cudaMemcpyAsync(&step, self->step, sizeof step, cudaMemcpyDeviceToHost, self->own));
    CUDA_TRY(cudaStreamSynchronize(self->own));
    self->base.stream.at = at_step(self, step);
    return STATUS_OK;
}

/* Moves the position after a batch was delivered. */
static enum status move_on(struct row_batches *self, cudaStream_t stream)
{
    const uint64_t next = step_of(self, self->base.stream.at) + 1;
    self->base.stream.at = at_step(self, next);
    if (!self->moves)
        return STATUS_OK;
    set_kernel<<<1, 1, 0, stream>>>(self->step, next);
    TRY(CUDA_LAUNCHED("set_kernel"));
    return CUDA_STATUS(cudaEventRecord(self->moved, stream));
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
static enum status gather(struct row_batches *self, const struct share *share, void *rows, int32_t *narrow,
                          cudaStream_t stream)
{
    const struct row_batches_request *request = &self->request;
    const struct stream_position at = self->base.stream.at, next = at_step(self, step_of(self, at) + 1);
    const struct share following = share_at(self, next);
    TRY(rows_device_gather(request->rows, request->shuffle, request->seed, at.epoch, share->first,
                           share->count, rows, narrow, stream));
    rows_device_ahead(request->rows, request->shuffle, request->seed, next.epoch, following.first,
                      following.count);
    return STATUS_OK;
}

/* Enqueues the conversion of labels; `labels` NULL: not wanted. */
static enum status widen(const int32_t *narrow, uint64_t count, int64_t *labels, cudaStream_t stream)
{
    if (!labels || count == 0)
        return STATUS_OK;
    widen_kernel<<<(unsigned)((count + BLOCK - 1) / BLOCK), BLOCK, 0, stream>>>(narrow, (uint32_t)count,
                                                                                labels);
    return CUDA_LAUNCHED("widen_kernel");
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

/* The device is current. */
static enum status refuse_capture(void *cuda_stream, const char *what)
{
    return device_capturing(-1, cuda_stream)
               ? status_set(STATUS_USAGE,
                            "cuda_stream: it is being captured into a CUDA graph, which cannot "
                            "contain %s",
                            what)
               : STATUS_OK;
}

/* ---- fill() ---- */

static bool captures(const struct row_batches *self)
{
    const struct row_batches_request *request = &self->request;
    return request->ranks == 1 && self->info.resident_rows == self->info.rows &&
           self->info.rows / request->global == request->steps;
}

/* Before the first captured call: writes the position to the device. */
static enum status begin_moving(struct row_batches *self)
{
    CUDA_TRY(cudaEventSynchronize(self->used)); /* replays do not wait for it */
    TRY(write_step(self, step_of(self, self->base.stream.at)));
    self->moves = true;
    return STATUS_OK;
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
    if (!self->moves) {
        struct relaxed_capture relaxed;
        TRY(begin_moving(self));
    }
    TRY(rows_device_gather_step(self->request.rows, self->request.shuffle, self->request.seed, self->step,
                                count, rows, labels ? self->narrow : nullptr, stream));
    TRY(widen(self->narrow, count, labels, stream));
    TRY(device_add(self->info.device, self->step, 1, stream));
    CUDA_TRY(cudaEventRecordWithFlags(self->moved, stream, cudaEventRecordExternal));
    describe(self, count, batch);
    batch->last = false;
    return STATUS_OK;
}

/* Lets a stream wait for the work that uses `narrow`, unless that work is on the same stream. */
static enum status begin_use(struct row_batches *self, cudaStream_t stream)
{
    unsigned long long user;
    CUDA_TRY(cudaStreamGetId(stream, &user));
    const bool waits = !self->uses || user != self->user;
    self->uses = false;
    if (waits)
        CUDA_TRY(cudaStreamWaitEvent(stream, self->used, 0));
    self->user = user;
    return STATUS_OK;
}

static enum status end_use(struct row_batches *self, cudaStream_t stream)
{
    CUDA_TRY(cudaEventRecord(self->used, stream));
    self->uses = true;
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
    if (labels)
        TRY(begin_use(self, stream));
    TRY(gather(self, &share, rows, labels ? self->narrow : nullptr, stream));
    TRY(widen(self->narrow, share.count, labels, stream));
    if (labels)
        TRY(end_use(self, stream));
    describe(self, share.count, batch);
    count_batch(self, share.count);
    return move_on(self, stream);
}

/* ---- next() ---- */

static enum status open_slot(struct row_batches *self, struct row_slot *slot)
{
    const uint64_t capacity = self->request.capacity, rows = stream_aligned(capacity * self->row_bytes);
    const uint64_t labels = self->request.labels ? capacity * (sizeof(int64_t) + sizeof(int32_t)) : 0;
    void *memory;
    CUDA_TRY(cudaMalloc(&memory, rows + labels));
    slot->rows = static_cast<uint8_t *>(memory);
    if (labels) {
        slot->labels = reinterpret_cast<int64_t *>(slot->rows + rows);
        slot->narrow = reinterpret_cast<int32_t *>(slot->labels + capacity);
    }
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
    TRY(refuse_capture(cuda_stream, "fdsl_stream_next(); use fdsl_stream_fill()"));
    TRY(rows_locate(batches));
    TRY(take_slot(self, &slot));
    const struct share share = share_at(self, self->base.stream.at);
    CUDA_TRY(cudaStreamWaitEvent(stream, slot->done, 0));
    TRY(gather(self, &share, slot->rows, slot->narrow, stream));
    TRY(widen(slot->narrow, share.count, slot->labels, stream));
    describe(self, share.count, batch);
    batch->slot = (uint32_t)(slot - self->slots);
    *parts = {slot->rows, slot->labels, nullptr};
    TRY(move_on(self, stream));
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
    TRY(refuse_capture(cuda_stream, "the release of a batch"));
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
    if (self->moves) {
        struct relaxed_capture relaxed;
        TRY(rows_locate(&self->base)); /* waits for replays */
        TRY(write_step(self, step_of(self, to)));
    }
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
    for (cudaEvent_t each : {self->moved, self->used}) /* on streams of the caller */
        if (each)
            (void)cudaEventSynchronize(each);
    for (uint32_t i = 0; self->slots && i < self->request.slots; i++) {
        if (self->slots[i].done)
            (void)cudaEventSynchronize(self->slots[i].done);
        (void)cudaFree(self->slots[i].rows);
        destroy(self->slots[i].done);
    }
    (void)cudaFree(self->narrow);
    (void)cudaFree(self->step);
    destroy(self->own, self->used, self->moved);
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
    cudaFuncAttributes attributes;
    self->slots = new (std::nothrow) row_slot[request->slots]{};
    TRY(ALLOCATED(self->slots, "out of memory for a stream"));
    CUDA_TRY(cudaSetDevice(self->info.device));
    if (request->labels)
        CUDA_TRY(cudaMalloc(&self->narrow, request->capacity * sizeof *self->narrow));
    CUDA_TRY(cudaMalloc(&self->step, sizeof *self->step));
    TRY(stream_open(&self->own));
    CUDA_TRY(cudaEventCreateWithFlags(&self->used, cudaEventDisableTiming));
    CUDA_TRY(cudaEventCreateWithFlags(&self->moved, cudaEventDisableTiming));
    /* CUDA loads kernels at their first launch, and must not do so during a capture. */
    CUDA_TRY(cudaFuncGetAttributes(&attributes, widen_kernel));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, set_kernel));
    TRY(rows_device_reserve(request->rows, request->capacity));
    return device_load(self->info.device);
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
