#include "common/device_mix.cuh"

#include <pthread.h>
#include <stdlib.h>

#include "common/calls.cuh"
#include "common/check.cuh"
#include "common/stream.cuh"
#include "data/device_batches.h"
#include "data/generated_stream.h"

#define COPIERS 256 /* threads of a block, which copies one sample */
#define FLYING  4   /* units that a thread reads before it writes them */

/* ---- What both streams share: slots on the device ---- */

/* Room for a batch. */
struct mix_slot {
    uint8_t *values; /* device memory */
    uint64_t *words; /* pinned memory: for generated samples, their numbers */
    uint64_t *device_words;
    uint32_t *entries, *device_entries; /* of a mixture, pinned and device memory: three arrays of `capacity`:
                                           positions, labels, and where each sample is */
    uint8_t *sources;
    uint32_t *numbers; /* host memory, like the next two */
    int32_t *labels;
    uint64_t *read;
    cudaEvent_t ready, done; /* the batch is complete; the consumer no longer uses it */
    bool held, waits;        /* waits: `done` is recorded */
};

/* Places of a sample in the batch of its source: the source in the upper bits. */
#define MIX_AT_BITS 24

struct mix_slots {
    struct mix_slot *of;
    uint32_t count, last;
    uint64_t device_bytes, host_bytes;
    pthread_mutex_t lock; /* protects `held`, `waits` and `stats` */
    struct stream_stats stats;
    cudaStream_t work, order; /* `order` has only the events of released batches */
};

/* `sample_bytes` 0: without room for samples. */
static enum status open_slot(struct mix_slots *slots, struct mix_slot *slot, uint32_t capacity,
                             size_t sample_bytes)
{
    const size_t words = capacity * sizeof *slot->words, entries = 3 * capacity * sizeof *slot->entries;
    if (sample_bytes)
        CUDA_TRY(cudaMalloc(&slot->values, capacity * sample_bytes));
    CUDA_TRY(cudaMalloc(&slot->device_words, words));
    CUDA_TRY(cudaMalloc(&slot->device_entries, entries));
    CUDA_TRY(cudaHostAlloc(&slot->words, words, cudaHostAllocPortable));
    CUDA_TRY(cudaHostAlloc(&slot->entries, entries, cudaHostAllocPortable));
    slots->device_bytes += capacity * sample_bytes + words + entries;
    slots->host_bytes += words + entries;
    slot->sources = static_cast<uint8_t *>(malloc(capacity));
    slot->numbers = static_cast<uint32_t *>(malloc(capacity * sizeof *slot->numbers));
    slot->labels = static_cast<int32_t *>(malloc(capacity * sizeof *slot->labels));
    slot->read = static_cast<uint64_t *>(malloc(capacity * sizeof *slot->read));
    TRY(ALLOCATED(slot->sources && slot->numbers && slot->labels && slot->read,
                  "cuda: out of memory for a batch"));
    CUDA_TRY(cudaEventCreateWithFlags(&slot->ready, cudaEventDisableTiming | cudaEventBlockingSync));
    return CUDA_STATUS(cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming));
}

static enum status open_slots(struct mix_slots *slots, uint32_t count, uint32_t capacity, size_t sample_bytes)
{
    slots->of = static_cast<struct mix_slot *>(calloc(count, sizeof *slots->of));
    TRY(ALLOCATED(slots->of, "cuda: out of memory"));
    slots->count = count;
    TRY(stream_open(&slots->work));
    TRY(stream_open(&slots->order));
    for (uint32_t i = 0; i < count; i++)
        TRY(open_slot(slots, &slots->of[i], capacity, sample_bytes));
    slots->stats.memory_bytes = slots->host_bytes;
    return STATUS_OK;
}

/* Waits for all work. Ignores errors: nothing can be done about them, and nothing depends on them. */
static void close_slots(struct mix_slots *slots)
{
    if (slots->work)
        (void)cudaStreamSynchronize(slots->work);
    for (uint32_t i = 0; slots->of && i < slots->count; i++) {
        struct mix_slot *slot = &slots->of[i];
        if (slot->waits)
            (void)cudaEventSynchronize(slot->done);
        (void)cudaFree(slot->values);
        (void)cudaFree(slot->device_words);
        (void)cudaFree(slot->device_entries);
        (void)cudaFreeHost(slot->words);
        (void)cudaFreeHost(slot->entries);
        free(slot->sources);
        free(slot->numbers);
        free(slot->labels);
        free(slot->read);
        destroy(slot->ready, slot->done);
    }
    destroy(slots->work, slots->order);
    pthread_mutex_destroy(&slots->lock);
    free(slots->of);
}

/* Chooses a slot that the consumer does not hold, the one that was used longest ago. Enqueues that the work
 * on it begins after the consumer's. NULL if all are held. */
static enum status take_slot(struct mix_slots *slots, struct mix_slot **free_slot, cudaStream_t stream)
{
    struct mix_slot *slot = nullptr;
    pthread_mutex_lock(&slots->lock);
    for (uint32_t i = 1; i <= slots->count && !slot; i++) {
        struct mix_slot *next = &slots->of[(slots->last + i) % slots->count];
        slot = next->held ? nullptr : next;
    }
    const bool waits = slot && slot->waits;
    if (slot)
        slots->last = (uint32_t)(slot - slots->of);
    pthread_mutex_unlock(&slots->lock);
    *free_slot = slot;
    if (!slot)
        return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", slots->count);
    CUDA_TRY(cudaEventSynchronize(slot->ready)); /* the pinned memory is written next */
    return waits ? CUDA_STATUS(cudaStreamWaitEvent(stream, slot->done, 0)) : STATUS_OK;
}

/* Marks a slot as held by the consumer. */
static void hold_slot(struct mix_slots *slots, struct mix_slot *slot, uint32_t samples)
{
    pthread_mutex_lock(&slots->lock);
    slot->held = true;
    slots->stats.batches++;
    slots->stats.samples += samples;
    pthread_mutex_unlock(&slots->lock);
}

/* Implements stream_type.release. The consumer may record its event again, so `done` is recorded after it. */
static enum status release_slot(struct mix_slots *slots, const struct stream_batch *batch, void *done_event)
{
    enum status status = STATUS_OK;
    pthread_mutex_lock(&slots->lock);
    struct mix_slot *slot = batch->slot < slots->count ? &slots->of[batch->slot] : nullptr;
    const bool held = slot && slot->held;
    if (held && done_event) {
        cudaError_t error = cudaStreamWaitEvent(slots->order, static_cast<cudaEvent_t>(done_event), 0);
        if (error == cudaSuccess)
            error = cudaEventRecord(slot->done, slots->order);
        status = CUDA_STATUS(error);
    }
    if (held) {
        slot->held = false;
        slot->waits = done_event != nullptr;
    }
    pthread_mutex_unlock(&slots->lock);
    return held ? status : status_set(STATUS_USAGE, "the batch was released before");
}

/* ---- The stream of a mixture ---- */

struct device_mix {
    struct stream stream; /* must be the first member */
    struct device_mix_request request;
    uint32_t count;
    struct mix_slots slots;
    struct stream_batch taken[MIXTURE_SOURCES];
    struct failure fault; /* status STATUS_OK: none */
};

static struct device_mix *mix_of(struct stream *stream)
{
    return reinterpret_cast<struct device_mix *>(stream);
}

const uint32_t *device_mix_numbers(struct stream *stream, const struct stream_batch *batch)
{
    return mix_of(stream)->slots.of[batch->slot].device_entries;
}

uint64_t device_mix_memory_bytes(struct stream *stream)
{
    return mix_of(stream)->slots.device_bytes;
}

/* The batches of the sources on the device. */
struct mix_batches {
    const uint8_t *values[MIXTURE_SOURCES];
};

/* Copies one sample per block, and its label if `to_labels` is not NULL. UNIT divides the size of a sample
 * and the alignment of all batches. */
template <class UNIT>
static __global__ void mix_kernel(const struct mix_batches from, const uint32_t *places,
                                  const int32_t *labels, uint64_t units, UNIT *to, int64_t *to_labels)
{
    const uint32_t place = places[blockIdx.x];
    const UNIT *sample = reinterpret_cast<const UNIT *>(from.values[place >> MIX_AT_BITS]) +
                         (place & ((UINT32_C(1) << MIX_AT_BITS) - 1)) * units;
    if (to_labels && threadIdx.x == 0)
        to_labels[blockIdx.x] = labels[blockIdx.x]; /* STREAM_MASKED is -1 */
    for (uint64_t first = threadIdx.x; first < units; first += FLYING * COPIERS) {
        UNIT read[FLYING];
#pragma unroll
        for (int k = 0; k < FLYING; k++)
            if (first + k * COPIERS < units)
                read[k] = sample[first + k * COPIERS];
#pragma unroll
        for (int k = 0; k < FLYING; k++)
            if (first + k * COPIERS < units)
                to[blockIdx.x * units + first + k * COPIERS] = read[k];
    }
}

/* Enqueues the upload of a slot's entries, and the copies of all samples. */
static enum status enqueue_copies(const struct mix_slot *slot, const struct mix_batches *from,
                                  uint32_t capacity, uint32_t count, size_t bytes, uint8_t *to,
                                  int64_t *to_labels, cudaStream_t stream)
{
    const uint32_t *places = slot->device_entries + 2 * (size_t)capacity;
    const int32_t *labels = reinterpret_cast<const int32_t *>(slot->device_entries + capacity);
    if (count == 0)
        return STATUS_OK;
    CUDA_TRY(cudaMemcpyAsync(slot->device_entries, slot->entries,
                             3 * (size_t)capacity * sizeof *slot->entries, cudaMemcpyHostToDevice, stream));
    if (bytes % sizeof(uint4) == 0)
        mix_kernel<<<count, COPIERS, 0, stream>>>(*from, places, labels, bytes / sizeof(uint4),
                                                  reinterpret_cast<uint4 *>(to), to_labels);
    else
        mix_kernel<<<count, COPIERS, 0, stream>>>(*from, places, labels, bytes, to, to_labels);
    return CUDA_LAUNCHED("mix_kernel");
}

/* A step, as both streams of mixtures know it. */
struct mix_step {
    const struct mixture *mixture;
    const struct mixture_plans *plans;
    struct stream_position at;
    const struct stream_batch *taken; /* one per source */
    uint32_t capacity;
    uint32_t count; /* of the samples; set by describe_samples() */
};

/* Fills the host arrays of a slot: where each sample comes from, and its label and hash. */
static enum status describe_samples(struct mix_step *step, struct mix_slot *slot)
{
    uint32_t used[MIXTURE_SOURCES] = {};
    const uint32_t capacity = step->capacity;
    const uint32_t count = mixture_list(step->plans, step->at, slot->numbers, slot->sources);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t k = slot->sources[i], j = used[k]++;
        const struct stream_batch *batch = &step->taken[k];
        if (j >= batch->samples.count)
            break;
        slot->labels[i] = mixture_label(step->mixture, k, batch->labels[j]);
        slot->read[i] = batch->read[j];
        slot->entries[i] = slot->numbers[i];
        slot->entries[capacity + i] = (uint32_t)slot->labels[i];
        slot->entries[2 * (size_t)capacity + i] = k << MIX_AT_BITS | j;
    }
    for (uint32_t k = 0; k < step->mixture->request.count; k++) {
        const struct stream_batch *batch = &step->taken[k];
        if (batch->epoch != step->at.epoch || batch->step != step->at.step || batch->samples.count != used[k])
            return status_set(STATUS_FAILED, "the source '%s' delivered another batch than that of the step",
                              step->mixture->request.sources[k].name);
    }
    step->count = count;
    return STATUS_OK;
}

/* Describes the mixed batch of a slot, without its values and its labels on the device. */
static struct stream_batch describe_mix(const struct mix_step *step, const struct mix_slot *slot,
                                        size_t sample_bytes, uint32_t index)
{
    struct stream_batch batch = {};
    batch.samples.bytes = step->count * sample_bytes;
    batch.samples.stride = sample_bytes;
    batch.samples.count = step->count;
    batch.samples.first = step->count ? slot->numbers[0] : 0;
    batch.numbers = slot->numbers;
    batch.labels = slot->labels;
    batch.read = slot->read;
    batch.epoch = step->at.epoch;
    batch.step = step->at.step;
    batch.last = step->taken[0].last;
    batch.ready = slot->ready;
    batch.slot = index;
    for (uint32_t k = 0; k < step->mixture->request.count; k++) {
        batch.masked += step->taken[k].masked;
        if (step->taken[k].samples.count > 0)
            batch.samples.type = step->taken[k].samples.type;
    }
    return batch;
}

/* Enqueues the mixed batch, and describes it. */
static enum status enqueue_mix(struct device_mix *self, struct mix_slot *slot, struct stream_batch *batch)
{
    const size_t bytes = self->request.sample_bytes;
    struct mix_step step = {self->request.mixture, self->request.plans,    self->stream.at,
                            self->taken,           self->request.capacity, 0};
    struct mix_batches from = {};
    TRY(describe_samples(&step, slot));
    for (uint32_t k = 0; k < self->count; k++) {
        from.values[k] = static_cast<const uint8_t *>(self->taken[k].samples.values);
        if (self->taken[k].samples.count > 0 && self->taken[k].samples.stride != bytes)
            return status_set(STATUS_FAILED, "the samples of a source have another size");
        if (self->taken[k].ready)
            CUDA_TRY(
                cudaStreamWaitEvent(self->slots.work, static_cast<cudaEvent_t>(self->taken[k].ready), 0));
    }
    TRY(enqueue_copies(slot, &from, self->request.capacity, step.count, bytes, slot->values, nullptr,
                       self->slots.work));
    CUDA_TRY(cudaEventRecord(slot->ready, self->slots.work));
    *batch = describe_mix(&step, slot, bytes, (uint32_t)(slot - self->slots.of));
    batch->samples.values = slot->values;
    batch->samples.labels = reinterpret_cast<int32_t *>(slot->device_entries + self->request.capacity);
    return STATUS_OK;
}

/* Returns the first `count` batches of the sources to them; their memory is used after `event`. */
static enum status return_taken(struct device_mix *self, uint32_t count, cudaEvent_t event)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < count; k++) {
        const enum status one = stream_release(self->request.streams[k], &self->taken[k], event);
        status = status == STATUS_OK ? one : status;
    }
    return status;
}

static enum status take_and_mix(struct device_mix *self, struct mix_slot *slot, struct stream_batch *batch)
{
    for (uint32_t k = 0; k < self->count; k++) {
        const enum status status = stream_next(self->request.streams[k], &self->taken[k]);
        if (status == STATUS_OK)
            continue;
        const struct failure failure = status_save(status_prefix(
            status, "source '%s' of the mixture", self->request.mixture->request.sources[k].name));
        (void)return_taken(self, k, nullptr); /* no work of this stream uses them */
        return status_restore(&failure);
    }
    const enum status status = enqueue_mix(self, slot, batch);
    if (status == STATUS_OK)
        return return_taken(self, self->count, slot->ready);
    const struct failure failure = status_save(status);
    (void)cudaStreamSynchronize(self->slots.work); /* the first failure says more than another one */
    (void)return_taken(self, self->count, nullptr);
    return status_restore(&failure);
}

static enum status mix_next(struct stream *stream, struct stream_batch *batch)
{
    struct device_mix *self = mix_of(stream);
    struct mix_slot *slot;
    if (self->fault.status != STATUS_OK)
        return status_restore(&self->fault);
    TRY(take_slot(&self->slots, &slot, self->slots.work));
    const enum status status = take_and_mix(self, slot, batch);
    if (status != STATUS_OK) {
        self->fault = status_save(status);
        return status;
    }
    hold_slot(&self->slots, slot, batch->samples.count);
    return STATUS_OK;
}

static bool mix_wait(struct stream *stream, double seconds)
{
    const struct device_mix *self = mix_of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        if (!stream_wait(self->request.streams[k], seconds / self->count))
            return false;
    return true;
}

static enum status mix_release(struct stream *stream, const struct stream_batch *batch, void *done_event)
{
    return release_slot(&mix_of(stream)->slots, batch, done_event);
}

static enum status mix_seek(struct stream *stream, struct stream_position to)
{
    struct device_mix *self = mix_of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        TRY(stream_seek(self->request.streams[k], to));
    self->fault.status = STATUS_OK;
    return STATUS_OK;
}

static void mix_stats(struct stream *stream, struct stream_stats *stats)
{
    struct device_mix *self = mix_of(stream);
    pthread_mutex_lock(&self->slots.lock);
    *stats = self->slots.stats;
    pthread_mutex_unlock(&self->slots.lock);
    for (uint32_t k = 0; k < self->count; k++) {
        struct stream_stats own;
        stream_stats(self->request.streams[k], &own);
        mixture_add_stats(&own, k == 0, stats);
    }
}

static void mix_cancel(struct stream *stream)
{
    const struct device_mix *self = mix_of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        stream_cancel(self->request.streams[k]);
}

/* Closes what a request passes on. */
static void close_parts(const struct device_mix_request *request)
{
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++)
        stream_close(request->streams[k]);
    mixture_plans_close(request->plans);
}

static void mix_close(struct stream *stream)
{
    struct device_mix *self = mix_of(stream);
    if (self->slots.work)
        (void)cudaStreamSynchronize(self->slots.work); /* it reads the batches of the sources */
    close_parts(&self->request);
    close_slots(&self->slots);
    free(self);
}

static const struct stream_type mix_type = {
    mix_next, mix_wait, mix_release, mix_seek, mix_stats, mix_cancel, mix_close,
};

enum status device_mix_open(const struct device_mix_request *request, struct stream **stream)
{
    *stream = nullptr;
    enum status status =
        request->capacity >> MIX_AT_BITS
            ? status_set(STATUS_USAGE, "a batch of a mixture has fewer than 2^%d samples", MIX_AT_BITS)
            : STATUS_OK;
    struct device_mix *self = static_cast<struct device_mix *>(calloc(1, sizeof *self));
    if (status == STATUS_OK)
        status = ALLOCATED(self, "cuda: out of memory");
    if (status != STATUS_OK) {
        free(self);
        close_parts(request);
        return status;
    }
    self->stream.type = &mix_type;
    self->stream.at = request->streams[0]->at;
    self->request = *request;
    self->count = request->mixture->request.count;
    pthread_mutex_init(&self->slots.lock, nullptr);
    status = open_slots(&self->slots, request->held + 2, request->capacity, request->sample_bytes);
    if (status == STATUS_OK) {
        *stream = &self->stream;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    mix_close(&self->stream);
    return status_restore(&failure);
}

/* ---- Generated samples ---- */

struct device_generated {
    struct stream stream; /* must be the first member */
    struct device_generated_request request;
    struct mix_slots slots;
    struct mix_slot *next; /* the batch at `stream.at`; NULL: it is not enqueued */
    uint32_t next_count;
    struct failure fault; /* of the batch after those that were delivered; status STATUS_OK: none */
    bool cancelled;
};

static struct device_generated *generated_of(struct stream *stream)
{
    return reinterpret_cast<struct device_generated *>(stream);
}

/* Enqueues the generation of the batch at a position. */
static enum status make_batch(struct device_generated *self, struct stream_position at)
{
    const struct device_generated_request *request = &self->request;
    const struct stream_plan *plan = &request->plan;
    struct mix_slot *slot;
    TRY(take_slot(&self->slots, &slot, self->slots.work));
    const uint32_t count = plan->list(plan->context, at.epoch, at.step, slot->numbers);
    for (uint32_t i = 0; i < count; i++) {
        slot->words[i] = request->number(plan->context, at.epoch, slot->numbers[i]);
        slot->labels[i] = (int32_t)request->label(request->label_state, slot->words[i]);
        slot->read[i] = generated_stream_hash(slot->words[i], slot->numbers[i]);
    }
    if (count > 0) {
        CUDA_TRY(cudaMemcpyAsync(slot->device_words, slot->words, count * sizeof *slot->words,
                                 cudaMemcpyHostToDevice, self->slots.work));
        const struct generator_numbers listed = {slot->device_words, 0, nullptr,
                                                 request->host_numbers ? slot->words : nullptr};
        TRY(generator_make(request->generator, &listed, count, slot->values, nullptr, self->slots.work));
    }
    CUDA_TRY(cudaEventRecord(slot->ready, self->slots.work));
    self->next = slot;
    self->next_count = count;
    return STATUS_OK;
}

static enum status generated_next(struct stream *stream, struct stream_batch *batch)
{
    struct device_generated *self = generated_of(stream);
    const struct stream_plan *plan = &self->request.plan;
    if (__atomic_load_n(&self->cancelled, __ATOMIC_ACQUIRE))
        return status_set(STATUS_FAILED, "the stream was cancelled");
    if (self->fault.status != STATUS_OK)
        return status_restore(&self->fault);
    if (!self->next)
        TRY(make_batch(self, stream->at));
    struct mix_slot *slot = self->next;
    *batch = {};
    batch->samples.values = slot->values;
    batch->samples.bytes = self->next_count * self->request.sample_bytes;
    batch->samples.stride = self->request.sample_bytes;
    batch->samples.count = self->next_count;
    batch->samples.type = self->request.type;
    batch->samples.first = self->next_count ? slot->numbers[0] : 0;
    batch->numbers = slot->numbers;
    batch->labels = slot->labels;
    batch->read = slot->read;
    batch->epoch = stream->at.epoch;
    batch->step = stream->at.step;
    batch->last = stream->at.step + 1 == plan->steps;
    batch->ready = slot->ready;
    batch->slot = (uint32_t)(slot - self->slots.of);
    hold_slot(&self->slots, slot, self->next_count);
    self->next = nullptr;
    /* With by_epoch, the plan of the next epoch is not known yet. */
    const enum status status =
        batch->last && plan->by_epoch ? STATUS_OK : make_batch(self, stream_after(plan, stream->at));
    if (status != STATUS_OK)
        self->fault = status_save(status);
    return STATUS_OK;
}

static enum status generated_release(struct stream *stream, const struct stream_batch *batch,
                                     void *done_event)
{
    return release_slot(&generated_of(stream)->slots, batch, done_event);
}

static enum status generated_seek(struct stream *stream, struct stream_position to)
{
    struct device_generated *self = generated_of(stream);
    TRY(stream_check_position(&self->request.plan, to));
    if (to.epoch != stream->at.epoch || to.step != stream->at.step)
        self->next = nullptr;
    self->fault.status = STATUS_OK;
    __atomic_store_n(&self->cancelled, false, __ATOMIC_RELEASE);
    return STATUS_OK;
}

static void generated_stats(struct stream *stream, struct stream_stats *stats)
{
    struct device_generated *self = generated_of(stream);
    pthread_mutex_lock(&self->slots.lock);
    *stats = self->slots.stats;
    pthread_mutex_unlock(&self->slots.lock);
    stats->ready = 1;
}

static void generated_cancel(struct stream *stream)
{
    __atomic_store_n(&generated_of(stream)->cancelled, true, __ATOMIC_RELEASE);
}

static void generated_close(struct stream *stream)
{
    struct device_generated *self = generated_of(stream);
    close_slots(&self->slots);
    generator_close(self->request.generator);
    free(self);
}

static const struct stream_type generated_type = {
    generated_next,  nullptr,          generated_release, generated_seek,
    generated_stats, generated_cancel, generated_close,
};

enum status device_generated_open(const struct device_generated_request *request, struct stream **stream)
{
    *stream = nullptr;
    struct device_generated *self = static_cast<struct device_generated *>(calloc(1, sizeof *self));
    if (!self) {
        generator_close(request->generator);
        return ALLOCATED(self, "cuda: out of memory");
    }
    self->stream.type = &generated_type;
    self->request = *request;
    pthread_mutex_init(&self->slots.lock, nullptr);
    const enum status status = open_slots(&self->slots, 3, request->plan.capacity, request->sample_bytes);
    if (status == STATUS_OK) {
        *stream = &self->stream;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    generated_close(&self->stream);
    return status_restore(&failure);
}

/* ---- Mixtures of libfdsl ---- */

struct mixed_batches {
    struct device_batches base; /* must be the first member */
    int device;
    const struct mixture *mixture;
    struct mixture_plans *plans;
    struct device_batches *sets[MIXTURE_SOURCES]; /* one per source; NULL: generated */
    struct stream *generated[MIXTURE_SOURCES];
    struct stream_batch taken[MIXTURE_SOURCES];
    uint32_t count, capacity;
    uint64_t sample_bytes;
    enum dtype type;
    struct mix_slots slots; /* their samples are allocated at the first next() */
};

static struct mixed_batches *mixed_of(struct device_batches *batches)
{
    return reinterpret_cast<struct mixed_batches *>(batches);
}

static struct mixed_batches *mixed_of(struct stream *stream)
{
    return reinterpret_cast<struct mixed_batches *>(stream);
}

static struct stream *source_of(const struct mixed_batches *self, uint32_t k)
{
    return self->sets[k] ? &self->sets[k]->stream : self->generated[k];
}

/* Takes the next batch of a source. `consumer` waits until it is complete. */
static enum status take_source(struct mixed_batches *self, uint32_t k, cudaStream_t consumer,
                               struct mix_batches *from)
{
    struct device_parts parts = {nullptr, nullptr, nullptr, nullptr};
    if (self->sets[k]) {
        TRY(device_batches_next(self->sets[k], consumer, &self->taken[k], &parts));
        from->values[k] = static_cast<const uint8_t *>(parts.images);
        return STATUS_OK;
    }
    TRY(stream_next(self->generated[k], &self->taken[k]));
    from->values[k] = static_cast<const uint8_t *>(self->taken[k].samples.values);
    return CUDA_STATUS(cudaStreamWaitEvent(consumer, static_cast<cudaEvent_t>(self->taken[k].ready), 0));
}

/* Returns the first `count` batches; their memory is used after `event`, which `consumer` has recorded. */
static enum status return_sources(struct mixed_batches *self, uint32_t count, cudaEvent_t event,
                                  cudaStream_t consumer)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < count; k++) {
        const enum status one = self->sets[k]
                                    ? device_batches_release(self->sets[k], &self->taken[k], consumer)
                                    : stream_release(self->generated[k], &self->taken[k], event);
        status = status == STATUS_OK ? one : status;
    }
    return status;
}

/* Enqueues on `consumer` that the next batch is stored at `images` and `labels` (NULL: not wanted). */
static enum status mix_into(struct mixed_batches *self, struct mix_slot *slot, uint8_t *images,
                            int64_t *labels, cudaStream_t consumer, struct stream_batch *batch)
{
    struct mix_step step = {self->mixture, self->plans, self->base.stream.at, self->taken, self->capacity, 0};
    struct mix_batches from = {};
    enum status status = STATUS_OK;
    uint32_t taken = 0;
    while (taken < self->count && status == STATUS_OK) {
        status = take_source(self, taken, consumer, &from);
        if (status != STATUS_OK)
            status = status_prefix(status, "source %u of the mixture", taken);
        else
            taken++;
    }
    if (status == STATUS_OK)
        status = describe_samples(&step, slot);
    if (status == STATUS_OK)
        status = enqueue_copies(slot, &from, self->capacity, step.count, self->sample_bytes, images, labels,
                                consumer);
    if (status == STATUS_OK)
        status = CUDA_STATUS(cudaEventRecord(slot->ready, consumer));
    if (status == STATUS_OK) {
        *batch = describe_mix(&step, slot, self->sample_bytes, (uint32_t)(slot - self->slots.of));
        batch->samples.type = self->type;
        TRY(return_sources(self, taken, slot->ready, consumer));
        self->base.stream.at = stream_after(mixture_plan(self->plans), self->base.stream.at);
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    (void)cudaStreamSynchronize(consumer); /* the first failure says more than another one */
    (void)return_sources(self, taken, nullptr, consumer);
    for (uint32_t k = 0; k < self->count; k++) /* the next call fails again, or continues with this batch */
        (void)stream_seek(source_of(self, k), self->base.stream.at);
    return status_restore(&failure);
}

static enum status mixed_fill(struct device_batches *batches, const struct device_parts *to,
                              void *cuda_stream, struct stream_batch *batch)
{
    struct mixed_batches *self = mixed_of(batches);
    struct mix_slot *slot;
    TRY(calls_refuse_capture(cuda_stream, "batches of mixtures"));
    TRY(take_slot(&self->slots, &slot, static_cast<cudaStream_t>(cuda_stream)));
    TRY(mix_into(self, slot, static_cast<uint8_t *>(to->images), to->labels,
                 static_cast<cudaStream_t>(cuda_stream), batch));
    pthread_mutex_lock(&self->slots.lock);
    self->slots.stats.batches++;
    self->slots.stats.samples += batch->samples.count;
    pthread_mutex_unlock(&self->slots.lock);
    return STATUS_OK;
}

static enum status mixed_next(struct device_batches *batches, void *cuda_stream, struct stream_batch *batch,
                              struct device_parts *parts)
{
    struct mixed_batches *self = mixed_of(batches);
    const cudaStream_t consumer = static_cast<cudaStream_t>(cuda_stream);
    struct mix_slot *slot;
    TRY(calls_refuse_capture(cuda_stream, "batches of mixtures"));
    TRY(take_slot(&self->slots, &slot, consumer));
    if (!slot->values) {
        struct relaxed_capture relaxed;
        CUDA_TRY(cudaMalloc(&slot->values, self->capacity * self->sample_bytes));
        pthread_mutex_lock(&self->slots.lock);
        self->slots.stats.memory_bytes += self->capacity * self->sample_bytes;
        pthread_mutex_unlock(&self->slots.lock);
    }
    int64_t *labels = reinterpret_cast<int64_t *>(slot->device_words);
    TRY(mix_into(self, slot, slot->values, labels, consumer, batch));
    hold_slot(&self->slots, slot, batch->samples.count);
    *parts = {slot->values, labels, nullptr, nullptr};
    return STATUS_OK;
}

static enum status mixed_release(struct device_batches *batches, const struct stream_batch *batch,
                                 void *cuda_stream)
{
    struct mixed_batches *self = mixed_of(batches);
    struct mix_slot *slot = batch->slot < self->slots.count ? &self->slots.of[batch->slot] : nullptr;
    enum status status = STATUS_OK;
    TRY(calls_refuse_capture(cuda_stream, "the release of a batch"));
    pthread_mutex_lock(&self->slots.lock);
    const bool held = slot && slot->held;
    if (held) {
        status = CUDA_STATUS(cudaEventRecord(slot->done, static_cast<cudaStream_t>(cuda_stream)));
        slot->held = false;
        slot->waits = true;
    }
    pthread_mutex_unlock(&self->slots.lock);
    return held ? status : status_set(STATUS_USAGE, "the batch was released before");
}

static bool mixed_wait(struct stream *stream, double seconds)
{
    const struct mixed_batches *self = mixed_of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        if (!stream_wait(source_of(self, k), seconds / self->count))
            return false;
    return true;
}

static enum status mixed_seek(struct stream *stream, struct stream_position to)
{
    const struct mixed_batches *self = mixed_of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        TRY(stream_seek(source_of(self, k), to));
    return STATUS_OK;
}

static void mixed_stats(struct stream *stream, struct stream_stats *stats)
{
    struct mixed_batches *self = mixed_of(stream);
    pthread_mutex_lock(&self->slots.lock);
    *stats = self->slots.stats;
    pthread_mutex_unlock(&self->slots.lock);
    for (uint32_t k = 0; k < self->count; k++) {
        struct stream_stats own;
        stream_stats(source_of(self, k), &own);
        mixture_add_stats(&own, k == 0, stats);
    }
}

static void mixed_cancel(struct stream *stream)
{
    const struct mixed_batches *self = mixed_of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        stream_cancel(source_of(self, k));
}

static void mixed_close(struct stream *stream)
{
    struct mixed_batches *self = mixed_of(stream);
    struct relaxed_capture relaxed;
    (void)cudaSetDevice(self->device);
    for (uint32_t i = 0; self->slots.of && i < self->slots.count; i++)
        if (self->slots.of[i].ready)
            (void)cudaEventSynchronize(self->slots.of[i].ready); /* the sources' memory is read until then */
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++) {
        stream_close(self->sets[k] ? &self->sets[k]->stream : nullptr);
        stream_close(self->generated[k]);
    }
    mixture_plans_close(self->plans);
    close_slots(&self->slots);
    free(self);
}

static const struct stream_type mixed_stream_functions = {
    nullptr, mixed_wait, nullptr, mixed_seek, mixed_stats, mixed_cancel, mixed_close,
};
static const struct device_batches_type mixed_functions = {mixed_next, mixed_fill, mixed_release, nullptr};

/* Opens the sources that are generated, and the slots. Closes the generators that it does not use. */
static enum status open_mixed(struct mixed_batches *self, const struct device_mixed_source *sources,
                              uint32_t held)
{
    enum status status = CUDA_STATUS(cudaSetDevice(self->device));
    if (status == STATUS_OK && self->capacity >> MIX_AT_BITS)
        status = status_set(STATUS_USAGE, "batch_size: a batch of a mixture has fewer than 2^%d samples",
                            MIX_AT_BITS);
    for (uint32_t k = 0; k < self->count; k++) {
        const struct device_mixed_source *source = &sources[k];
        const struct device_generated_request request = {
            source->generator, source->host_numbers, mixture_sample, source->label,
            source->state,     self->sample_bytes,   self->type,     mixture_plan_of(self->plans, k)};
        if (source->set)
            continue;
        if (status == STATUS_OK)
            status = device_generated_open(&request, &self->generated[k]);
        else
            generator_close(source->generator);
    }
    TRY(status);
    cudaFuncAttributes attributes; /* CUDA must not load the kernels during a capture */
    CUDA_TRY(cudaFuncGetAttributes(&attributes, mix_kernel<uint4>));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, mix_kernel<uint8_t>));
    return open_slots(&self->slots, held + 1, self->capacity, 0);
}

enum status device_mixed_open(int device, const struct mixture *mixture, struct mixture_plans *plans,
                              const struct device_mixed_source *sources, uint64_t sample_bytes,
                              enum dtype type, uint32_t held, struct device_batches **batches)
{
    *batches = nullptr;
    struct mixed_batches *self = static_cast<struct mixed_batches *>(calloc(1, sizeof *self));
    if (!self) {
        for (uint32_t k = 0; k < mixture->request.count; k++) {
            stream_close(sources[k].set ? &sources[k].set->stream : nullptr);
            generator_close(sources[k].generator);
        }
        mixture_plans_close(plans);
        return ALLOCATED(self, "out of memory for a stream");
    }
    self->base = {{&mixed_stream_functions, {0, 0}}, &mixed_functions};
    self->device = device;
    self->mixture = mixture;
    self->plans = plans;
    self->count = mixture->request.count;
    self->capacity = mixture_plan(plans)->capacity;
    self->sample_bytes = sample_bytes;
    self->type = type;
    for (uint32_t k = 0; k < self->count; k++)
        self->sets[k] = sources[k].set;
    pthread_mutex_init(&self->slots.lock, nullptr);
    const int mode = device_relax_capture();
    const struct failure failure = status_save(open_mixed(self, sources, held));
    if (failure.status == STATUS_OK)
        *batches = &self->base;
    else
        mixed_close(&self->base.stream);
    device_restore_capture(mode);
    return failure.status == STATUS_OK ? STATUS_OK : status_restore(&failure);
}
