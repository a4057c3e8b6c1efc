/* Implements device_images_open() of data/device_batches.h. A generator draws the batches. It has scratch
 * memory for one call, so its calls take turns. fill() draws into the caller's memory, on the caller's
 * stream, and can be captured. next() draws batches ahead into slots, on a stream of its own. */
#include "data/device_batches.h"

#include <new>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/calls.cuh"
#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/parallel.h"
#include "core/phase.h"
#include "data/random_draws.h"
#include "machine/device.h"

#define BLOCK        256
#define LISTED_STEPS 16 /* batches whose image numbers one launch lists */

enum slot_state { SLOT_FREE, SLOT_READY, SLOT_HELD };

/* Room for a batch of next(). */
struct image_slot {
    uint8_t *images; /* device memory */
    int64_t *labels; /* device memory, after the images */
    uint8_t *masks;  /* device memory, after the labels; NULL: the images have none */
    uint32_t *numbers;
    cudaEvent_t ready, done; /* the batch is complete; the consumer no longer uses it */
    enum slot_state state;
    uint64_t position;
    uint32_t count;
};

struct image_batches {
    struct device_batches base; /* must be the first member */
    int device;
    struct generated_stream_request request;
    struct device_order order;
    struct share share; /* of this rank in a full step */
    uint32_t slot_count;
    cudaStream_t own;       /* of next() */
    struct turn turn;       /* of the generator and of `numbers` */
    struct moving moving;   /* the position */
    uint64_t *numbers;      /* device memory: image numbers of LISTED_STEPS batches, and of a captured one */
    uint64_t ahead, steps;  /* `numbers` has those of the `steps` batches from position `ahead` on */
    uint64_t *host_numbers; /* NULL unless the generator needs them */
    uint32_t *listed;       /* room for the numbers of a step; NULL unless the generator needs them */

    pthread_mutex_t lock; /* protects everything below */
    struct image_slot *slots;
    struct image_slot **queue; /* SLOT_READY, in the order of their positions */
    uint32_t queued, held;
    bool cancelled;
    struct stream_stats stats;
    uint64_t calls, ready_sum;
};

static struct image_batches *images_of(struct device_batches *batches)
{
    return reinterpret_cast<struct image_batches *>(batches);
}

static struct image_batches *images_of(struct stream *stream)
{
    return reinterpret_cast<struct image_batches *>(stream);
}

/* Lists the image numbers of the batches of one or several consecutive steps, gridDim.y, `stride` words
 * apart. The first sample of each batch has this offset in its step. `position` NULL: the first batch is at
 * `fixed`. */
static __global__ void __launch_bounds__(BLOCK)
    number_kernel(const __grid_constant__ struct device_order order, const uint64_t *position, uint64_t fixed,
                  uint32_t offset, uint32_t count, uint32_t stride, uint64_t *numbers)
{
    const uint32_t j = blockIdx.x * BLOCK + threadIdx.x;
    if (j >= count)
        return;
    const uint64_t at = (position ? *position : fixed) + blockIdx.y, epoch = at / order.steps;
    const uint32_t step = static_cast<uint32_t>(at - epoch * order.steps),
                   index = step * order.global + offset + j;
    const struct draw_order drawn = draw_order(order.seed, static_cast<uint32_t>(epoch), order.count);
    const uint32_t sample = order.shuffle ? draw_order_at(&drawn, index) : index;
    numbers[static_cast<uint64_t>(blockIdx.y) * stride + j] = sample + epoch * order.fresh;
}

/* Returns the share of this rank in a step. */
static struct share share_at(const struct image_batches *self, uint64_t position)
{
    const struct partition ranks = {.rank = self->order.rank, .ranks = self->order.ranks, .strong = true};
    return partition_step(&ranks, self->order.count, self->order.global,
                          (uint32_t)(position % self->order.steps));
}

/* Lists the image numbers on the host, for generators that need them there. */
static const uint64_t *list_on_host(struct image_batches *self, uint64_t position)
{
    const struct stream_plan *plan = &self->request.plan;
    const struct stream_position at = moving_at(&self->moving, position);
    if (!self->host_numbers)
        return nullptr;
    const uint32_t count = plan->list(plan->context, at.epoch, at.step, self->listed);
    for (uint32_t j = 0; j < count; j++)
        self->host_numbers[j] = self->listed[j] + at.epoch * self->order.fresh;
    return self->host_numbers;
}

/* Enqueues that the numbers of `steps` batches are listed, from this position on, or if `captured` is set,
 * from the one in device memory on. */
static enum status list_on_device(struct image_batches *self, uint64_t position, bool captured,
                                  uint32_t steps, const struct share *share, uint64_t *numbers,
                                  cudaStream_t stream)
{
    const uint32_t count = (uint32_t)share->count;
    number_kernel<<<dim3((count + BLOCK - 1) / BLOCK, steps), BLOCK, 0, stream>>>(
        self->order, captured ? self->moving.position : nullptr, position, (uint32_t)share->first, count,
        self->request.plan.capacity, numbers);
    return CUDA_LAUNCHED("number_kernel");
}

/* Sets `*numbers` to the numbers of the batch at a position. Most of them were listed for an earlier batch: a
 * launch takes more time than a list. */
static enum status find_numbers(struct image_batches *self, uint64_t position, const struct share *share,
                                uint64_t **numbers, cudaStream_t stream)
{
    if (position < self->ahead || position - self->ahead >= self->steps) {
        uint32_t steps = 1;
        for (bool same = true; same && steps < LISTED_STEPS; steps += same) {
            const struct share next = share_at(self, position + steps);
            same = next.first == share->first && next.count == share->count;
        }
        self->steps = 0;
        TRY(list_on_device(self, position, false, steps, share, self->numbers, stream));
        self->ahead = position;
        self->steps = steps;
    }
    *numbers = self->numbers + (position - self->ahead) * self->request.plan.capacity;
    return STATUS_OK;
}

/* Enqueues the generation of the batch at a position, or if `captured` is set, at the one in device memory.
 */
static enum status draw(struct image_batches *self, uint64_t position, bool captured,
                        const struct share *share, const struct device_parts *to, cudaStream_t stream)
{
    uint64_t *numbers = self->numbers + (uint64_t)LISTED_STEPS * self->request.plan.capacity;
    RANGE(GENERATE);
    if (share->count == 0)
        return STATUS_OK;
    TRY(captured ? list_on_device(self, 0, true, 1, share, numbers, stream)
                 : find_numbers(self, position, share, &numbers, stream));
    const struct generator_numbers listed = {numbers, 0, nullptr,
                                             captured ? nullptr : list_on_host(self, position)};
    const struct generator_targets targets = {to->labels, to->masks, nullptr};
    return generator_make(self->request.generator, &listed, (uint32_t)share->count, to->images, &targets,
                          stream);
}

/* As draw(), after the generator's previous work. */
static enum status draw_in_turn(struct image_batches *self, uint64_t position, const struct share *share,
                                const struct device_parts *to, cudaStream_t stream)
{
    if (!self->turn.uses) /* a call has failed, perhaps after it had listed numbers on another stream */
        self->steps = 0;
    TRY(turn_begin(&self->turn, stream));
    TRY(draw(self, position, false, share, to, stream));
    return turn_end(&self->turn, stream);
}

static enum status images_locate(struct device_batches *batches)
{
    return moving_locate(&images_of(batches)->moving);
}

static void describe(const struct image_batches *self, uint64_t position, uint32_t count,
                     struct stream_batch *batch)
{
    const struct stream_position at = moving_at(&self->moving, position);
    *batch = {};
    batch->samples.count = count;
    batch->samples.stride = self->request.sample_bytes;
    batch->samples.bytes = count * self->request.sample_bytes;
    batch->samples.type = self->request.type;
    batch->epoch = at.epoch;
    batch->step = at.step;
    batch->last = at.step + 1 == self->order.steps;
}

static enum status check_cancelled(struct image_batches *self)
{
    pthread_mutex_lock(&self->lock);
    const bool cancelled = self->cancelled;
    pthread_mutex_unlock(&self->lock);
    return cancelled ? status_set(STATUS_FAILED, "the stream was cancelled") : STATUS_OK;
}

/* Removes the first batch of the queue. The caller holds the lock. */
static struct image_slot *pop(struct image_batches *self)
{
    struct image_slot *slot = self->queue[0];
    memmove(self->queue, self->queue + 1, --self->queued * sizeof *self->queue);
    return slot;
}

static void count_batch(struct image_batches *self, uint32_t count)
{
    self->stats.batches++;
    self->stats.samples += count;
}

/* ---- fill() ---- */

static enum status fill_captured(struct image_batches *self, const struct device_parts *to,
                                 cudaStream_t stream, struct stream_batch *batch)
{
    if (!self->order.captures)
        return status_set(STATUS_USAGE,
                          "cuda_stream: it is being captured into a CUDA graph, but the number of images per "
                          "step is not constant, or the generator is gbase or bat; set drop_last, or choose "
                          "the generator fused");
    TRY(moving_begin(&self->moving, &self->turn));
    TRY(draw(self, 0, true, &self->share, to, stream));
    TRY(moving_capture(&self->moving, self->device, stream));
    describe(self, 0, (uint32_t)self->share.count, batch);
    batch->last = false;
    return STATUS_OK;
}

static enum status images_fill(struct device_batches *batches, const struct device_parts *to,
                               void *cuda_stream, struct stream_batch *batch)
{
    struct image_batches *self = images_of(batches);
    const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
    TRY(check_cancelled(self));
    if (device_capturing(-1, cuda_stream))
        return fill_captured(self, to, stream, batch);
    TRY(images_locate(batches));
    const uint64_t position = moving_position(&self->moving);
    const struct share share = share_at(self, position);
    TRY(draw_in_turn(self, position, &share, to, stream));
    TRY(moving_on(&self->moving, stream));
    pthread_mutex_lock(&self->lock);
    while (self->queued > 0 && self->queue[0]->position <= position)
        pop(self)->state = SLOT_FREE;
    count_batch(self, (uint32_t)share.count);
    pthread_mutex_unlock(&self->lock);
    describe(self, position, (uint32_t)share.count, batch);
    return STATUS_OK;
}

/* ---- next() ---- */

static enum status open_image_slot(struct image_batches *self, struct image_slot *slot)
{
    const uint64_t capacity = self->request.plan.capacity;
    const uint64_t bytes = stream_aligned(capacity * self->request.sample_bytes),
                   labels = stream_aligned(capacity * sizeof(int64_t)),
                   masks = capacity * self->request.mask_bytes;
    void *memory;
    CUDA_TRY(cudaMalloc(&memory, bytes + labels + masks));
    slot->images = static_cast<uint8_t *>(memory);
    slot->labels = reinterpret_cast<int64_t *>(slot->images + bytes);
    slot->masks = masks ? slot->images + bytes + labels : nullptr;
    slot->numbers = static_cast<uint32_t *>(malloc(capacity * sizeof *slot->numbers));
    TRY(ALLOCATED(slot->numbers, "out of memory for a batch"));
    pthread_mutex_lock(&self->lock);
    self->stats.memory_bytes += bytes + labels + masks;
    pthread_mutex_unlock(&self->lock);
    CUDA_TRY(cudaEventCreateWithFlags(&slot->ready, cudaEventDisableTiming));
    return CUDA_STATUS(cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming));
}

static void close_image_slot(struct image_slot *slot)
{
    (void)cudaFree(slot->images);
    free(slot->numbers);
    destroy(slot->ready, slot->done);
    *slot = {};
}

/* Allocates the slots at the first call. */
static enum status open_image_slots(struct image_batches *self)
{
    if (self->slots[self->slot_count - 1].done) /* the last one that is opened */
        return STATUS_OK;
    struct relaxed_capture relaxed;
    for (uint32_t i = 0; i < self->slot_count; i++) {
        if (self->slots[i].done)
            continue;
        close_image_slot(&self->slots[i]); /* of an earlier failure */
        TRY(open_image_slot(self, &self->slots[i]));
    }
    return STATUS_OK;
}

/* Returns a free slot, or NULL. */
static struct image_slot *free_slot(struct image_batches *self)
{
    pthread_mutex_lock(&self->lock);
    struct image_slot *slot = nullptr;
    for (uint32_t i = 0; i < self->slot_count && !slot; i++)
        slot = self->slots[i].state == SLOT_FREE ? &self->slots[i] : nullptr;
    pthread_mutex_unlock(&self->lock);
    return slot;
}

/* Enqueues the generation of a batch into a slot, and appends it to the queue. */
static enum status draw_ahead(struct image_batches *self, struct image_slot *slot, uint64_t position)
{
    const struct stream_plan *plan = &self->request.plan;
    const struct stream_position at = moving_at(&self->moving, position);
    const struct share share = share_at(self, position);
    slot->position = position;
    slot->count = plan->list(plan->context, at.epoch, at.step, slot->numbers);
    CUDA_TRY(cudaStreamWaitEvent(self->own, slot->done, 0));
    const struct device_parts to = {slot->images, slot->labels, nullptr, slot->masks};
    TRY(draw_in_turn(self, position, &share, &to, self->own));
    CUDA_TRY(cudaEventRecord(slot->ready, self->own));
    pthread_mutex_lock(&self->lock);
    slot->state = SLOT_READY;
    self->queue[self->queued++] = slot;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static enum status images_next(struct device_batches *batches, void *cuda_stream, struct stream_batch *batch,
                               struct device_parts *parts)
{
    struct image_batches *self = images_of(batches);
    const cudaStream_t consumer = static_cast<cudaStream_t>(cuda_stream);
    struct image_slot *slot;
    TRY(check_cancelled(self));
    TRY(calls_refuse_capture(cuda_stream, "fdsl_stream_next(); use fdsl_stream_fill()"));
    TRY(open_image_slots(self));
    TRY(images_locate(batches));
    const uint64_t position = moving_position(&self->moving);
    pthread_mutex_lock(&self->lock);
    const uint32_t held = self->held;
    self->calls++;
    self->ready_sum += self->queued;
    while (self->queued > 0 && self->queue[0]->position != position) /* replays have moved the position */
        pop(self)->state = SLOT_FREE;
    pthread_mutex_unlock(&self->lock);
    if (held == self->slot_count)
        return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", held);
    /* Replays use the generator, too. They can be ordered with work on `consumer`, but not on `own`. */
    const uint32_t ahead = self->moving.moves ? 0 : self->request.ahead;
    while (self->queued <= ahead && (slot = free_slot(self)))
        TRY(draw_ahead(self, slot, position + self->queued));
    CUDA_TRY(cudaStreamWaitEvent(consumer, self->queue[0]->ready, 0));
    TRY(moving_on(&self->moving, consumer));
    pthread_mutex_lock(&self->lock);
    slot = pop(self);
    slot->state = SLOT_HELD;
    self->held++;
    count_batch(self, slot->count);
    pthread_mutex_unlock(&self->lock);
    describe(self, position, slot->count, batch);
    batch->numbers = slot->numbers;
    batch->slot = (uint32_t)(slot - self->slots);
    *parts = {slot->images, slot->labels, nullptr, slot->masks};
    return STATUS_OK;
}

static enum status images_release(struct device_batches *batches, const struct stream_batch *batch,
                                  void *cuda_stream)
{
    struct image_batches *self = images_of(batches);
    struct image_slot *slot = &self->slots[batch->slot];
    TRY(calls_refuse_capture(cuda_stream, "the release of a batch"));
    CUDA_TRY(cudaEventRecord(slot->done, static_cast<cudaStream_t>(cuda_stream)));
    pthread_mutex_lock(&self->lock);
    slot->state = SLOT_FREE;
    self->held--;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

/* ---- The other functions ---- */

static enum status images_seek(struct stream *stream, struct stream_position to)
{
    struct image_batches *self = images_of(stream);
    TRY(stream_check_position(&self->request.plan, to));
    TRY(moving_seek(&self->moving, to));
    pthread_mutex_lock(&self->lock);
    while (self->queued > 0)
        pop(self)->state = SLOT_FREE;
    self->cancelled = false;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static void images_stats(struct stream *stream, struct stream_stats *stats)
{
    struct image_batches *self = images_of(stream);
    pthread_mutex_lock(&self->lock);
    *stats = self->stats;
    stats->ready = self->calls ? (double)self->ready_sum / (double)self->calls : 0;
    pthread_mutex_unlock(&self->lock);
    stats->memory_bytes += generator_memory_bytes(self->request.generator);
}

static void images_cancel(struct stream *stream)
{
    struct image_batches *self = images_of(stream);
    pthread_mutex_lock(&self->lock);
    self->cancelled = true;
    pthread_mutex_unlock(&self->lock);
}

static void images_close(struct stream *stream)
{
    struct image_batches *self = images_of(stream);
    struct relaxed_capture relaxed;
    (void)cudaSetDevice(self->device);
    moving_close(&self->moving);
    turn_close(&self->turn);
    if (self->own)
        (void)cudaStreamSynchronize(self->own);
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++) {
        if (self->slots[i].done)
            (void)cudaEventSynchronize(self->slots[i].done);
        close_image_slot(&self->slots[i]);
    }
    generator_close(self->request.generator);
    (void)cudaFree(self->numbers);
    destroy(self->own);
    free(self->host_numbers);
    free(self->listed);
    pthread_mutex_destroy(&self->lock);
    delete[] self->queue;
    delete[] self->slots;
    delete self;
}

static const struct stream_type image_stream_functions = {
    nullptr, nullptr, nullptr, images_seek, images_stats, images_cancel, images_close,
};
static const struct device_batches_type image_functions = {images_next, images_fill, images_release,
                                                           images_locate};

static enum status open_images(struct image_batches *self, bool host_numbers)
{
    const size_t capacity = self->request.plan.capacity;
    cudaFuncAttributes attributes;
    void *memory;
    self->slots = new (std::nothrow) image_slot[self->slot_count]{};
    self->queue = new (std::nothrow) image_slot *[self->slot_count] {};
    TRY(ALLOCATED(self->slots && self->queue, "out of memory for a stream"));
    if (host_numbers) {
        self->host_numbers = static_cast<uint64_t *>(malloc(capacity * sizeof *self->host_numbers));
        self->listed = static_cast<uint32_t *>(malloc(capacity * sizeof *self->listed));
        TRY(ALLOCATED(self->host_numbers && self->listed, "out of memory for a stream"));
    }
    const size_t words = (LISTED_STEPS + 1) * capacity;
    CUDA_TRY(cudaMalloc(&memory, words * sizeof *self->numbers));
    self->numbers = static_cast<uint64_t *>(memory);
    self->stats.memory_bytes = (words + 1) * sizeof *self->numbers; /* and the position */
    TRY(stream_open(&self->own, true)); /* the generator's own priority; delays training steps least */
    self->moving.own = self->own;
    TRY(turn_open(&self->turn));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, number_kernel)); /* CUDA must not load it during a capture */
    return moving_open(&self->moving, self->device);
}

enum status device_images_open(int device, const struct generated_stream_request *request,
                               const struct device_order *order, struct device_batches **batches)
{
    *batches = nullptr;
    struct image_batches *self = new (std::nothrow) image_batches{};
    if (!self)
        generator_close(request->generator);
    TRY(ALLOCATED(self, "out of memory for a stream"));
    self->base = {{&image_stream_functions, request->begin}, &image_functions};
    self->device = device;
    self->request = *request;
    self->order = *order;
    self->slot_count = request->ahead + request->held;
    self->share = share_at(self, 0);
    self->moving.at = &self->base.stream.at;
    self->moving.steps = order->steps;
    pthread_mutex_init(&self->lock, NULL);
    const int mode = device_relax_capture();
    const enum status status = open_images(self, order->host_numbers);
    const struct failure failure = status_save(status);
    if (status == STATUS_OK)
        *batches = &self->base;
    else
        images_close(&self->base.stream);
    device_restore_capture(mode);
    return status == STATUS_OK ? STATUS_OK : status_restore(&failure);
}
