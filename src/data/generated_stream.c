/* Each batch is in a slot. Without a thread, stream_next() fills the slot. With a thread, the thread fills
 * slots and appends them to a queue. If samples come from memory, a slot that has those of its next batch
 * already is not filled again, so a constant batch is copied only once. */
#include "data/generated_stream.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/phase.h"
#include "core/timer.h"
#include "machine/host.h"

enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_READY, SLOT_HELD };

struct slot {
    uint8_t *values, *masks; /* `masks`: NULL if the samples have none */
    int32_t *labels;
    uint32_t *numbers;
    uint64_t *read;
    uint64_t *samples; /* numbers of the generator, or of samples in memory */
    enum slot_state state;
    struct stream_position at;
    uint32_t count;       /* number of samples in the slot's memory; stays after a release; 0: none */
    struct failure fault; /* status STATUS_OK: none */
};

struct generated_stream {
    struct stream stream; /* must be the first member */
    struct generated_stream_request request;
    uint32_t slot_count;
    struct slot *slots;
    uint64_t *wanted;          /* room for the samples of the batch that is listed */
    int64_t *generated_labels; /* of the generator; NULL: not needed */
    pthread_t thread;
    bool threaded;

    pthread_mutex_t lock; /* protects everything below, and the states of the slots */
    pthread_cond_t work;  /* for the thread: there may be something to do */
    pthread_cond_t done;  /* for the consumer: a batch is finished, or the thread waits */
    struct slot **queue;  /* finished batches, oldest first */
    uint32_t queued, held;
    bool started, cancelled, closing, filling, draining;
    bool failed;                                 /* the latest batch has a fault; none is begun after it */
    struct stream_position take_at, generate_at; /* the next batch of the consumer, and of the thread */
    uint64_t epochs_open; /* with by_epoch: batches of epochs below this one may be begun */
    struct stream_stats stats;
    uint64_t calls, queued_sum; /* of stream_next(); the sum of `queued` */
};

static struct generated_stream *of(struct stream *stream)
{
    return (struct generated_stream *)stream;
}

/* ---- One batch ---- */

/* Computes which samples a batch has, in self->wanted, from slot->numbers. */
static enum status find_samples(struct generated_stream *self, const struct slot *slot, uint32_t count)
{
    const struct generated_stream_request *request = &self->request;
    for (uint32_t j = 0; j < count; j++) {
        const uint32_t sample = slot->numbers[j] % request->count;
        if (!request->generator && sample >= request->in_memory)
            return status_set(STATUS_USAGE, "the plan names sample %u, but only %u samples are in memory",
                              slot->numbers[j], request->in_memory);
        self->wanted[j] = request->number
                              ? request->number(request->plan.context, slot->at.epoch, slot->numbers[j])
                              : sample + (request->generator ? slot->at.epoch * request->fresh : 0);
    }
    return STATUS_OK;
}

/* Generates or copies the values of slot->samples. */
static enum status fill_values(struct generated_stream *self, const struct slot *slot)
{
    const struct generated_stream_request *request = &self->request;
    if (!request->generator) {
        for (uint32_t j = 0; j < slot->count; j++)
            memcpy(slot->values + j * request->sample_bytes,
                   (const uint8_t *)request->values + slot->samples[j] * request->sample_bytes,
                   request->sample_bytes);
        return STATUS_OK;
    }
    RANGE(GENERATE);
    const struct generator_numbers listed = {.list = slot->samples};
    const struct generator_targets targets = {.labels = self->generated_labels, .masks = slot->masks};
    return generator_make(request->generator, &listed, slot->count, slot->values, &targets, NULL);
}

static enum status fill_slot(struct generated_stream *self, struct slot *slot)
{
    const struct generated_stream_request *request = &self->request;
    const struct stream_plan *plan = &request->plan;
    const uint32_t count = plan->list(plan->context, slot->at.epoch, slot->at.step, slot->numbers);
    if (count > plan->capacity)
        return status_set(STATUS_USAGE, "a step has %u samples, but batches have room for %u", count,
                          plan->capacity);
    TRY(find_samples(self, slot, count));
    const size_t bytes = count * sizeof *self->wanted;
    const bool there =
        !request->generator && count == slot->count && memcmp(slot->samples, self->wanted, bytes) == 0;
    slot->count = count;
    if (!there && count > 0) {
        memcpy(slot->samples, self->wanted, bytes);
        const enum status status = fill_values(self, slot);
        slot->count = status == STATUS_OK ? count : 0;
        TRY(status);
        for (uint32_t j = 0; j < count; j++)
            slot->labels[j] = request->labels ? (int32_t)request->labels[slot->numbers[j] % request->count]
                                              : (int32_t)self->generated_labels[j];
    }
    for (uint32_t j = 0; j < count; j++)
        slot->read[j] = generated_stream_hash(slot->samples[j], slot->numbers[j]);
    return STATUS_OK;
}

/* Fills a free slot with the batch at generate_at, and appends it to the queue. Releases the lock while it
 * fills the slot. */
static void make_batch(struct generated_stream *self)
{
    struct slot *slot = self->slots;
    while (slot->state != SLOT_FREE)
        slot++;
    slot->state = SLOT_FILLING;
    slot->at = self->generate_at;
    self->filling = true;
    pthread_mutex_unlock(&self->lock);
    const double begin_s = timer_now_s();
    const struct failure fault = status_save(fill_slot(self, slot));
    const double took_s = self->request.generator ? timer_now_s() - begin_s : 0;
    pthread_mutex_lock(&self->lock);
    self->filling = false;
    self->stats.generate_s += took_s;
    slot->fault = fault;
    self->failed = fault.status != STATUS_OK;
    slot->state = SLOT_READY;
    self->queue[self->queued++] = slot;
    self->generate_at = stream_after(&self->request.plan, slot->at);
}

/* ---- The thread ---- */

static bool may_make(const struct generated_stream *self)
{
    return self->started && !self->cancelled && !self->draining && !self->failed &&
           self->queued < self->request.ahead && self->queued + self->held < self->slot_count &&
           (!self->request.plan.by_epoch || self->generate_at.epoch < self->epochs_open);
}

static void *run(void *context)
{
    struct generated_stream *self = context;
    pthread_mutex_lock(&self->lock);
    while (!self->closing) {
        if (may_make(self))
            make_batch(self);
        else
            pthread_cond_wait(&self->work, &self->lock);
        pthread_cond_signal(&self->done);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

static enum status start_thread(struct generated_stream *self)
{
    const int error = parallel_start(&self->thread, run, self);
    self->threaded = !error;
    return error ? status_set(STATUS_EXHAUSTED, "cannot start a thread to generate: %s", strerror(error))
                 : STATUS_OK;
}

/* ---- The functions of a stream ---- */

/* Lets the thread generate the batches of the next batch's epoch. */
static void open_epoch(struct generated_stream *self)
{
    self->started = true;
    self->epochs_open = self->take_at.epoch + 1;
    if (self->threaded)
        pthread_cond_signal(&self->work);
}

/* Without a thread, stream_next() generates the batch itself, so there is nothing to wait for. */
static bool generated_wait(struct stream *stream, double seconds)
{
    struct generated_stream *self = of(stream);
    const struct timespec until = timer_deadline(seconds);
    const double begin_s = timer_now_s();
    bool returns = false;
    pthread_mutex_lock(&self->lock);
    open_epoch(self);
    for (int error = 0; !returns && error == 0;) {
        returns = !self->threaded || self->cancelled || self->held == self->slot_count || self->queued > 0;
        if (!returns)
            error = pthread_cond_timedwait(&self->done, &self->lock, &until);
    }
    self->stats.wait_s += timer_now_s() - begin_s;
    pthread_mutex_unlock(&self->lock);
    return returns;
}

/* Waits until the next batch is finished, or makes it. */
static enum status await_batch(struct generated_stream *self)
{
    const double begin_s = timer_now_s();
    while (!self->cancelled && self->queued == 0) {
        if (self->threaded)
            pthread_cond_wait(&self->done, &self->lock);
        else
            make_batch(self);
    }
    self->stats.wait_s += timer_now_s() - begin_s;
    if (self->cancelled)
        return status_set(STATUS_FAILED, "the stream was cancelled");
    const struct failure *fault = &self->queue[0]->fault;
    return fault->status == STATUS_OK ? STATUS_OK : status_restore(fault);
}

static void describe(const struct generated_stream *self, const struct slot *slot, struct stream_batch *batch)
{
    const struct generated_stream_request *request = &self->request;
    *batch = (struct stream_batch){
        .samples = {.values = slot->values,
                    .bytes = slot->count * request->sample_bytes,
                    .stride = request->sample_bytes,
                    .count = slot->count,
                    .type = request->type,
                    .labels = slot->labels,
                    .first = slot->count ? slot->numbers[0] : 0},
        .numbers = slot->numbers,
        .read = slot->read,
        .masks = slot->masks,
        .epoch = slot->at.epoch,
        .step = slot->at.step,
        .last = slot->at.step + 1 == request->plan.steps,
        .slot = (uint32_t)(slot - self->slots),
    };
}

/* Hands the oldest batch of the queue to the consumer. */
static const struct slot *take(struct generated_stream *self)
{
    struct slot *slot = self->queue[0];
    memmove(self->queue, self->queue + 1, --self->queued * sizeof *self->queue);
    slot->state = SLOT_HELD;
    self->held++;
    self->take_at = stream_after(&self->request.plan, slot->at);
    self->stats.batches++;
    self->stats.samples += slot->count;
    return slot;
}

static enum status generated_next(struct stream *stream, struct stream_batch *batch)
{
    struct generated_stream *self = of(stream);
    enum status status = STATUS_OK;
    pthread_mutex_lock(&self->lock);
    self->calls++;
    self->queued_sum += self->queued;
    open_epoch(self);
    if (self->held == self->slot_count && !self->cancelled)
        status = status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", self->held);
    if (status == STATUS_OK)
        status = await_batch(self);
    if (status == STATUS_OK)
        describe(self, take(self), batch);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static enum status generated_release(struct stream *stream, const struct stream_batch *batch,
                                     void *done_event)
{
    struct generated_stream *self = of(stream);
    if (done_event)
        return status_set(STATUS_USAGE, "a stream in host memory cannot wait for an event");
    pthread_mutex_lock(&self->lock);
    const bool held = batch->slot < self->slot_count && self->slots[batch->slot].state == SLOT_HELD;
    if (held) {
        self->slots[batch->slot].state = SLOT_FREE;
        self->held--;
        pthread_cond_signal(&self->work);
    }
    pthread_mutex_unlock(&self->lock);
    return held ? STATUS_OK : status_set(STATUS_USAGE, "the batch was released before");
}

/* Discards the batches in the queue. The consumer keeps those that it holds. */
static void move_to(struct generated_stream *self, struct stream_position to)
{
    self->draining = true;
    while (self->filling)
        pthread_cond_wait(&self->done, &self->lock);
    self->draining = self->cancelled = self->failed = false;
    for (uint32_t i = 0; i < self->slot_count; i++)
        if (self->slots[i].state != SLOT_HELD)
            self->slots[i].state = SLOT_FREE;
    self->queued = 0;
    self->take_at = self->generate_at = to;
    self->epochs_open = 0;
    self->started = false;
}

static enum status generated_seek(struct stream *stream, struct stream_position to)
{
    struct generated_stream *self = of(stream);
    TRY(stream_check_position(&self->request.plan, to));
    pthread_mutex_lock(&self->lock);
    const bool stays =
        !self->cancelled && !self->failed && to.epoch == self->take_at.epoch && to.step == self->take_at.step;
    if (!stays)
        move_to(self, to);
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static void generated_stats(struct stream *stream, struct stream_stats *stats)
{
    struct generated_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    *stats = self->stats;
    stats->ready = self->calls ? (double)self->queued_sum / (double)self->calls : 0;
    pthread_mutex_unlock(&self->lock);
}

static void generated_cancel(struct stream *stream)
{
    struct generated_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    self->cancelled = true;
    pthread_cond_signal(&self->done);
    pthread_mutex_unlock(&self->lock);
}

static void generated_close(struct stream *stream)
{
    struct generated_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    self->closing = true;
    pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
    if (self->threaded)
        pthread_join(self->thread, NULL);
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++)
        if (self->slots[i].values)
            self->request.deallocate(self->slots[i].values);
    generator_close(self->request.generator);
    pthread_cond_destroy(&self->done);
    pthread_cond_destroy(&self->work);
    pthread_mutex_destroy(&self->lock);
    free(self->queue);
    free(self->slots);
    free(self->wanted);
    free(self->generated_labels);
    free(self);
}

static const struct stream_type generated_type = {
    .next = generated_next,
    .wait = generated_wait,
    .release = generated_release,
    .seek = generated_seek,
    .stats = generated_stats,
    .cancel = generated_cancel,
    .close = generated_close,
};

/* ---- Opening ---- */

static enum status check_request(const struct generated_stream_request *request)
{
    if (request->plan.steps < 1 || request->plan.capacity < 1 || request->count < 1 ||
        request->sample_bytes < 1 || !request->generator != (request->values != NULL) ||
        (!request->generator && (!request->labels || request->mask_bytes || request->number)) ||
        !request->allocate != !request->deallocate)
        return status_set(
            STATUS_USAGE,
            "a stream needs a generator, or samples in memory with labels and without masks; and steps");
    return stream_check_position(&request->plan, request->begin);
}

static enum status allocate_slots(struct generated_stream *self)
{
    const struct generated_stream_request *request = &self->request;
    const size_t capacity = request->plan.capacity,
                 samples = stream_aligned(capacity * request->sample_bytes),
                 values = samples + stream_aligned(capacity * request->mask_bytes),
                 words = stream_aligned(capacity * sizeof(uint32_t)), bytes = values + 6 * words;
    char what[64];
    snprintf(what, sizeof what, "%u batches of %u samples", self->slot_count, request->plan.capacity);
    TRY(memory_check(bytes * self->slot_count, what, "lower --batch"));
    for (uint32_t i = 0; i < self->slot_count; i++) {
        struct slot *slot = &self->slots[i];
        void *memory;
        TRY(self->request.allocate(bytes, &memory));
        slot->values = memory;
        slot->masks = request->mask_bytes ? slot->values + samples : NULL;
        slot->labels = (int32_t *)(slot->values + values);
        slot->numbers = (uint32_t *)(slot->values + values + words);
        slot->read = (uint64_t *)(slot->values + values + 2 * words);
        slot->samples = (uint64_t *)(slot->values + values + 4 * words);
        slot->fault.status = STATUS_OK;
    }
    self->stats.memory_bytes = bytes * self->slot_count;
    if (request->generator)
        self->stats.memory_bytes += generator_memory_bytes(request->generator);
    return STATUS_OK;
}

static enum status allocate_all(struct generated_stream *self)
{
    const uint32_t capacity = self->request.plan.capacity;
    self->slots = calloc(self->slot_count, sizeof *self->slots);
    self->queue = calloc(self->slot_count, sizeof *self->queue);
    self->wanted = calloc(capacity, sizeof *self->wanted);
    self->generated_labels = self->request.labels ? NULL : calloc(capacity, sizeof *self->generated_labels);
    TRY(ALLOCATED(self->slots && self->queue && self->wanted &&
                      (self->generated_labels || self->request.labels),
                  "out of memory for a stream"));
    return allocate_slots(self);
}

enum status generated_stream_open(const struct generated_stream_request *request, struct stream **stream)
{
    *stream = NULL;
    enum status status = check_request(request);
    struct generated_stream *self = status == STATUS_OK ? calloc(1, sizeof *self) : NULL;
    if (status == STATUS_OK)
        status = ALLOCATED(self, "out of memory for a stream");
    if (status != STATUS_OK) {
        generator_close(request->generator);
        return status;
    }
    self->stream = (struct stream){&generated_type, request->begin};
    self->request = *request;
    self->request.ahead = request->generator ? request->ahead : 0;
    if (!request->allocate) {
        self->request.allocate = stream_allocate;
        self->request.deallocate = free;
    }
    self->slot_count = self->request.ahead + (request->held ? request->held : 1);
    self->take_at = self->generate_at = request->begin;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->work, NULL);
    timer_cond_init(&self->done);
    status = allocate_all(self);
    if (status == STATUS_OK && self->request.ahead > 0)
        status = start_thread(self);
    if (status == STATUS_OK) {
        *stream = &self->stream;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    generated_close(&self->stream);
    return status_restore(&failure);
}
