/* How the threads share the work: batches are listed in order, and their samples are handed out one by one
 * with an atomic counter. When a batch has no samples left to hand out, a thread continues with the next
 * batch. Threads therefore never wait for each other, not even at the end of an epoch. Which thread decodes a
 * sample has no effect on the result. */
#include "data/set_stream.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/timer.h"
#include "data/checksum.h"
#include "data/set_files.h"
#include "machine/host.h"

#define NONE     UINT64_MAX
#define ALL      (UINT32_C(1) << 31) /* more than the number of samples in a batch, even if threads add to it */
#define ALIGN    256                 /* of the values: what DLPack asks for */
#define TOLD_MAX 8                   /* batches with masked samples that are reported */

enum slot_state { SLOT_FREE, SLOT_LISTING, SLOT_FILLING, SLOT_READY, SLOT_HELD };

/* The memory of a batch, and the work on it. All members except `claimed` are protected by the stream's lock,
 * or do not change while threads fill the batch. */
struct slot {
    uint8_t *values;
    int32_t *labels;
    uint32_t *numbers;
    uint64_t *read;
    enum slot_state state;
    struct stream_position at;
    uint32_t count;
    _Atomic uint32_t claimed; /* samples that threads have taken; `count` or more: none is left */
    uint32_t users;           /* threads that fill the batch */
    uint32_t masked;
    uint32_t fault_at;    /* index of the sample that `fault` is about */
    bool fails;           /* `fault` ends the stream; otherwise it is that of a masked sample */
    struct failure fault; /* the first in the order of the samples; status STATUS_OK: none */
};

struct set_stream;

/* A thread, and what it counts while it fills a batch. */
struct worker {
    struct set_stream *self;
    pthread_t thread;
    struct image_scratch scratch;
    uint8_t *image, *label; /* bytes of members */
    bool broken;            /* the latest failure is that of a sample, and may be masked */
    uint64_t bytes, memory_bytes;
    double read_s, decode_s;
};

struct set_stream {
    struct stream stream; /* must be the first member */
    struct set_stream_request request;
    struct set_files *files;
    size_t sample_bytes, slot_bytes, image_bytes, label_bytes;
    uint32_t slot_count;
    struct slot *slots;
    struct worker *workers;
    int worker_count; /* running threads */
    uint32_t told;    /* batches with masked samples that were reported; only for the consumer's thread */

    pthread_mutex_t lock; /* protects everything below, and the slots */
    pthread_cond_t work;  /* for workers: there may be something to do */
    pthread_cond_t done;  /* for the consumer: a batch is finished, or no thread works any more */
    uint32_t idle;        /* waiting workers */
    bool woken;           /* the consumer has woken a worker, which does not run yet */
    bool waiting;         /* the consumer waits */
    bool started;         /* stream_next() was called: threads may list batches */
    bool cancelled, draining, closing, listing;
    /* Batches have sequence numbers since the latest seek. Those from `taken` to `listed` - 1 are in
     * queue[number % ahead]; samples are handed out from number `serving` on. */
    struct slot **queue;
    uint64_t taken, serving, listed;
    uint64_t failed;                         /* the first batch that fails; NONE: no one does */
    struct stream_position take_at, list_at; /* of the batches `taken` and `listed` */
    uint64_t epochs_open; /* with by_epoch: batches of epochs below this one may be prepared */
    uint32_t ready, held; /* finished batches, and batches of the consumer */
    struct stream_stats stats;
    uint64_t calls, ready_sum; /* of stream_next(); the sum of `ready` */
};

/* Returns the element type of the batches. */
static enum dtype type_of(const struct set_stream_request *request)
{
    return request->output ? request->output->type : request->type;
}

/* ---- One sample ---- */

static enum status check_number(const struct set_stream_request *request, uint32_t number)
{
    const uint64_t end = (uint64_t)request->count * request->copies;
    return number < end ? STATUS_OK
                        : status_set(STATUS_USAGE, "the plan names sample %u of %llu", number,
                                     (unsigned long long)end);
}

/* Reads the image of a sample. If the data set has an index, compares the hash of the bytes. */
static enum status read_image(struct worker *worker, const struct dataset_sample *sample,
                              const struct dataset_member *member)
{
    const struct dataset *dataset = worker->self->request.dataset;
    const enum status status = set_files_read(worker->self->files, member, member->size, worker->image);
    if (status != STATUS_OK)
        return status_prefix(status, "sample '%s'", sample->key);
    worker->bytes += member->size;
    worker->broken = dataset->indexed && checksum_whole(worker->image, member->size) != member->whole;
    return worker->broken
               ? dataset_at(dataset, sample, member,
                            status_set(STATUS_FAILED, "the data do not match the hash in the index"))
               : STATUS_OK;
}

static enum status read_label(struct worker *worker, const struct dataset_sample *sample, int32_t *label)
{
    const struct dataset *dataset = worker->self->request.dataset;
    const bool folder = sample->label == sample->members;
    const struct dataset_member *member = &dataset->members[sample->member + (folder ? 0 : sample->label)];
    if (!folder) {
        worker->broken = member->size > worker->self->label_bytes;
        if (worker->broken)
            return dataset_at(dataset, sample, member,
                              status_set(STATUS_FAILED, "its %s has %llu bytes, too many for a label",
                                         member->extension, (unsigned long long)member->size));
        enum status status = set_files_read(worker->self->files, member, member->size, worker->label);
        if (status != STATUS_OK)
            return status_prefix(status, "sample '%s'", sample->key);
        worker->bytes += member->size;
    }
    const enum status status =
        dataset_label(dataset, sample, worker->label, folder ? 0 : member->size, INT32_MAX, label);
    worker->broken = status == STATUS_FAILED;
    return status == STATUS_OK ? STATUS_OK : dataset_at(dataset, sample, member, status);
}

static enum status check_shape(const struct set_stream_request *request, const struct image *image)
{
    if (image->channels == request->channels && image->depth == request->depth &&
        image->height == request->height && image->width == request->width && image->type == request->type)
        return STATUS_OK;
    return status_set(
        STATUS_USAGE,
        "it is %s of %ux%ux%ux%u (channels, depth, height, width), but samples are %s of "
        "%ux%ux%ux%u; to give all images one size, %s",
        dtype_names[image->type], image->channels, image->depth, image->height, image->width,
        dtype_names[request->type], request->channels, request->depth, request->height, request->width,
        OPTION_OR_FIELD("add --out-res PIXELS --channels 3 (or 1)", "set out_res and channels"));
}

/* Decodes the bytes in worker->image to `to`. */
static enum status decode(struct worker *worker, const struct dataset_member *member, uint32_t epoch,
                          uint32_t number, uint8_t *to)
{
    const struct set_stream_request *request = &worker->self->request;
    struct image image;
    bool is_image;
    TRY(image_fit(&request->fit, members_format(member->extension), worker->image, member->size, epoch,
                  number, &worker->scratch, &image, &is_image));
    if (!is_image)
        return status_set(STATUS_FAILED,
                          "its %s is neither an image nor an array of an image; name another member with "
                          "%s",
                          member->extension, OPTION_OR_FIELD("--image", "image"));
    TRY(check_shape(request, &image));
    TRY(image_check_finite(&image));
    if (request->output)
        image_output_store(request->output, &image, epoch, number, to);
    else
        image_store(&image, to);
    return STATUS_OK;
}

/* Reads and decodes the image of a sample. */
static enum status load_image(struct worker *worker, const struct dataset_sample *sample, uint32_t epoch,
                              uint32_t number, uint8_t *to)
{
    const struct dataset *dataset = worker->self->request.dataset;
    const struct dataset_member *member = &dataset->members[sample->member + sample->image];
    const double begin_s = timer_now_s();
    TRY(read_image(worker, sample, member));
    const double read_s = timer_now_s();
    worker->read_s += read_s - begin_s;
    const enum status status = decode(worker, member, epoch, number, to);
    worker->decode_s += timer_now_s() - read_s;
    worker->broken = status == STATUS_FAILED;
    return status == STATUS_OK ? STATUS_OK : dataset_at(dataset, sample, member, status);
}

/* Fills the place of sample `i` of a batch. */
static enum status load_sample(struct worker *worker, struct slot *slot, uint32_t i)
{
    const struct set_stream *self = worker->self;
    const struct set_stream_request *request = &self->request;
    const uint32_t number = slot->numbers[i];
    worker->broken = false;
    TRY(check_number(request, number));
    const uint32_t at = number % request->count;
    const struct dataset_sample *sample =
        &request->dataset->samples[request->samples ? request->samples[at] : at];
    slot->read[i] = set_stream_hash(sample, number);
    if (request->labels && request->labels[at] == (uint32_t)STREAM_MASKED) {
        worker->broken = true;
        return dataset_at(request->dataset, sample, &request->dataset->members[sample->member],
                          status_set(STATUS_FAILED, "its label cannot be read"));
    }
    if (sample->image == sample->members) {
        worker->broken = true;
        return dataset_at(request->dataset, sample, &request->dataset->members[sample->member],
                          dataset_lacks(request->dataset, sample, &request->dataset->choice.image, "image"));
    }
    TRY(load_image(worker, sample, (uint32_t)slot->at.epoch, number, slot->values + i * self->sample_bytes));
    if (!request->labels)
        return read_label(worker, sample, &slot->labels[i]);
    slot->labels[i] = (int32_t)request->labels[at];
    return STATUS_OK;
}

/* ---- The threads ---- */

static bool halted(const struct set_stream *self)
{
    return self->cancelled || self->draining || self->closing;
}

/* Returns whether the next batch may be listed. */
static bool may_list(const struct set_stream *self)
{
    const uint32_t used = self->held + (uint32_t)(self->listed - self->taken);
    return self->started && !halted(self) && !self->listing && self->failed == NONE &&
           self->listed - self->taken < self->request.ahead && used < self->slot_count &&
           (!self->request.plan.by_epoch || self->list_at.epoch < self->epochs_open);
}

/* Returns whether the consumer has to wake a worker, after it has released the lock. Waking a thread is a
 * system call, so workers that have prepared all batches sleep until half of them are taken. */
static bool must_wake(const struct set_stream *self)
{
    return self->idle > 0 && !self->woken && self->listed - self->taken <= self->request.ahead / 2 &&
           may_list(self);
}

/* Releases the lock, and wakes a worker if necessary. */
static void unlock_and_wake(struct set_stream *self)
{
    const bool wakes = must_wake(self);
    self->woken |= wakes;
    pthread_mutex_unlock(&self->lock);
    if (wakes)
        pthread_cond_signal(&self->work);
}

/* Returns the first batch that has samples left to hand out, or NULL. */
static struct slot *find_work(struct set_stream *self)
{
    const uint64_t end = self->listed < self->failed ? self->listed : self->failed;
    if (halted(self))
        return NULL;
    if (self->serving < self->taken)
        self->serving = self->taken;
    for (; self->serving < end; self->serving++) {
        struct slot *slot = self->queue[self->serving % self->request.ahead];
        if (slot->state == SLOT_FILLING && atomic_load(&slot->claimed) < slot->count)
            return slot;
    }
    return NULL;
}

/* Returns the number of the batch in a slot. */
static uint64_t number_of(const struct set_stream *self, const struct slot *slot)
{
    uint64_t number = self->taken;
    while (self->queue[number % self->request.ahead] != slot)
        number++;
    return number;
}

/* Marks a batch as finished. Its place in the queue is `number`. */
static void finish(struct set_stream *self, struct slot *slot, uint64_t number)
{
    slot->state = SLOT_READY;
    self->ready++;
    if (self->waiting && number == self->taken)
        pthread_cond_signal(&self->done);
}

/* Hands out no more samples of any batch from number `from` on. */
static void stop_from(struct set_stream *self, uint64_t from)
{
    for (uint64_t number = from < self->taken ? self->taken : from; number < self->listed; number++)
        atomic_store(&self->queue[number % self->request.ahead]->claimed, ALL);
}

/* Returns the position after `at`. */
static struct stream_position after(const struct stream_plan *plan, struct stream_position at)
{
    return at.step + 1 < plan->steps ? (struct stream_position){at.epoch, at.step + 1}
                                     : (struct stream_position){at.epoch + 1, 0};
}

/* Lists the samples of the next batch. Releases the lock while the plan lists them. */
static void list_batch(struct set_stream *self)
{
    const struct stream_plan *plan = &self->request.plan;
    struct slot *slot = self->slots;
    while (slot->state != SLOT_FREE)
        slot++;
    slot->state = SLOT_LISTING;
    slot->at = self->list_at;
    self->listing = true;
    pthread_mutex_unlock(&self->lock);
    const uint32_t count = plan->list(plan->context, slot->at.epoch, slot->at.step, slot->numbers);
    pthread_mutex_lock(&self->lock);
    self->listing = false;
    const uint64_t number = self->listed++;
    self->queue[number % self->request.ahead] = slot;
    self->list_at = after(plan, slot->at);
    slot->state = SLOT_FILLING;
    slot->masked = slot->fault_at = 0;
    slot->fails = count > plan->capacity;
    slot->count = slot->fails ? 0 : count;
    slot->fault.status = STATUS_OK;
    atomic_store(&slot->claimed, halted(self) ? ALL : 0);
    if (slot->fails) {
        slot->fault = status_save(status_set(
            STATUS_USAGE, "a step has %u samples, but batches have room for %u", count, plan->capacity));
        self->failed = number;
    }
    if (slot->count == 0)
        finish(self, slot, number);
    if (self->draining)
        pthread_cond_signal(&self->done);
    if (self->idle > 0)
        pthread_cond_broadcast(&self->work);
}

/* Keeps a failure of sample `i`, whose message is set, if it is the first one of the batch. A failure that
 * ends the stream takes precedence. */
static void keep_fault(struct set_stream *self, struct slot *slot, uint32_t i, enum status status, bool fails)
{
    pthread_mutex_lock(&self->lock);
    if (slot->fault.status == STATUS_OK || (fails && !slot->fails) ||
        (fails == slot->fails && i < slot->fault_at)) {
        slot->fault = status_save(status);
        slot->fault_at = i;
        slot->fails = fails;
    }
    slot->masked += !fails;
    if (fails) {
        const uint64_t number = number_of(self, slot);
        self->failed = number < self->failed ? number : self->failed;
        stop_from(self, number);
    }
    pthread_mutex_unlock(&self->lock);
}

/* Loads a sample. Masks it if it is broken and the request says so. */
static void try_to_load(struct worker *worker, struct slot *slot, uint32_t i)
{
    struct set_stream *self = worker->self;
    const enum status status = load_sample(worker, slot, i);
    if (status == STATUS_OK)
        return;
    const bool masks = worker->broken && self->request.on_error == SET_STREAM_MASK;
    memset(slot->values + i * self->sample_bytes, 0, self->sample_bytes);
    slot->labels[i] = STREAM_MASKED;
    keep_fault(self, slot, i, status, !masks);
}

/* Adds what the thread counted to the statistics. */
static void add_counts(struct worker *worker)
{
    struct stream_stats *stats = &worker->self->stats;
    const uint64_t memory = image_scratch_bytes(&worker->scratch);
    stats->bytes += worker->bytes;
    stats->read_s += worker->read_s;
    stats->decode_s += worker->decode_s;
    stats->memory_bytes += memory - worker->memory_bytes;
    worker->memory_bytes = memory;
    worker->bytes = 0;
    worker->read_s = worker->decode_s = 0;
}

/* Loads samples of a batch until none is left. Releases the lock while it loads them. */
static void fill(struct worker *worker, struct slot *slot)
{
    struct set_stream *self = worker->self;
    const uint32_t count = slot->count;
    slot->users++;
    pthread_mutex_unlock(&self->lock);
    for (uint32_t i; (i = atomic_fetch_add(&slot->claimed, 1)) < count;)
        try_to_load(worker, slot, i);
    pthread_mutex_lock(&self->lock);
    add_counts(worker);
    slot->users--;
    if (slot->users == 0 && !halted(self))
        finish(self, slot, number_of(self, slot));
    if (self->draining)
        pthread_cond_signal(&self->done);
}

static void *run(void *context)
{
    struct worker *worker = context;
    struct set_stream *self = worker->self;
    pthread_mutex_lock(&self->lock);
    while (!self->closing) {
        struct slot *slot = find_work(self);
        if (slot) {
            fill(worker, slot);
        } else if (may_list(self)) {
            list_batch(self);
        } else {
            self->idle++;
            pthread_cond_wait(&self->work, &self->lock);
            self->idle--;
            self->woken = false;
        }
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

/* ---- The functions of a stream ---- */

static struct set_stream *of(struct stream *stream)
{
    return (struct set_stream *)stream;
}

/* Lets the threads prepare the batches of the epoch of the next batch. Releases the lock, and takes it again.
 */
static void open_epoch(struct set_stream *self)
{
    if (self->started && self->epochs_open > self->take_at.epoch)
        return;
    self->started = true;
    self->epochs_open = self->take_at.epoch + 1;
    unlock_and_wake(self);
    pthread_mutex_lock(&self->lock);
}

/* Returns whether stream_next() would return at once. Sets `*slot` to the next batch, NULL if it is not
 * listed.
 */
static bool is_ready(const struct set_stream *self, struct slot **slot)
{
    const bool listed = self->taken < self->listed;
    *slot = listed ? self->queue[self->taken % self->request.ahead] : NULL;
    return self->cancelled || self->held == self->slot_count || (listed && (*slot)->state == SLOT_READY);
}

static bool set_stream_wait(struct stream *stream, double seconds)
{
    struct set_stream *self = of(stream);
    struct slot *slot;
    const double begin_s = timer_now_s();
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const double end_s = (double)until.tv_nsec * 1e-9 + seconds;
    until.tv_sec += (time_t)end_s;
    until.tv_nsec = (long)((end_s - (double)(time_t)end_s) * 1e9);
    pthread_mutex_lock(&self->lock);
    open_epoch(self);
    bool ready = is_ready(self, &slot);
    for (int error = 0; !ready && error == 0; ready = is_ready(self, &slot)) {
        self->waiting = true;
        error = pthread_cond_timedwait(&self->done, &self->lock, &until);
    }
    self->waiting = false;
    self->stats.wait_s += timer_now_s() - begin_s;
    pthread_mutex_unlock(&self->lock);
    return ready;
}

/* Waits for the next batch, and sets `*slot`. */
static enum status await_batch(struct set_stream *self, struct slot **slot)
{
    for (double begin_s = 0;; pthread_cond_wait(&self->done, &self->lock)) {
        const bool ends = is_ready(self, slot);
        if (ends && begin_s > 0)
            self->stats.wait_s += timer_now_s() - begin_s;
        self->waiting = !ends;
        if (self->cancelled)
            return status_set(STATUS_FAILED, "the stream was cancelled");
        if (self->held == self->slot_count)
            return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", self->held);
        if (ends)
            return (*slot)->fails ? status_restore(&(*slot)->fault) : STATUS_OK;
        if (begin_s == 0)
            begin_s = timer_now_s();
    }
}

static void describe(const struct set_stream *self, const struct slot *slot, struct stream_batch *batch)
{
    const uint32_t count = slot->count;
    *batch = (struct stream_batch){
        .samples = {.values = slot->values,
                    .bytes = count * self->sample_bytes,
                    .stride = self->sample_bytes,
                    .count = count,
                    .type = type_of(&self->request),
                    .interleaved = self->request.output && self->request.output->interleaved,
                    .labels = slot->labels,
                    .first = count ? slot->numbers[0] : 0},
        .numbers = slot->numbers,
        .read = slot->read,
        .masked = slot->masked,
        .epoch = slot->at.epoch,
        .step = slot->at.step,
        .last = slot->at.step + 1 == self->request.plan.steps,
        .slot = (uint32_t)(slot - self->slots),
    };
}

/* Hands a finished batch to the consumer. */
static void take(struct set_stream *self, struct slot *slot)
{
    slot->state = SLOT_HELD;
    self->held++;
    self->taken++;
    self->ready--;
    self->take_at = after(&self->request.plan, slot->at);
    self->stats.batches++;
    self->stats.samples += slot->count;
    self->stats.masked += slot->masked;
}

static enum status set_stream_next(struct stream *stream, struct stream_batch *batch)
{
    struct set_stream *self = of(stream);
    struct slot *slot;
    pthread_mutex_lock(&self->lock);
    self->calls++;
    self->ready_sum += self->ready;
    open_epoch(self);
    const enum status status = await_batch(self, &slot);
    if (status == STATUS_OK)
        take(self, slot);
    unlock_and_wake(self);
    TRY(status);
    describe(self, slot, batch);
    if (slot->masked && self->told < TOLD_MAX) {
        self->told++;
        status_warn("%u broken sample%s of epoch %llu, step %llu masked: %s", slot->masked,
                    slot->masked == 1 ? "" : "s", (unsigned long long)slot->at.epoch + 1,
                    (unsigned long long)slot->at.step + 1, slot->fault.text); /* as rows count */
    }
    return STATUS_OK;
}

static enum status set_stream_release(struct stream *stream, const struct stream_batch *batch,
                                      void *done_event)
{
    struct set_stream *self = of(stream);
    if (done_event)
        return status_set(STATUS_USAGE, "a stream in host memory cannot wait for an event");
    pthread_mutex_lock(&self->lock);
    const bool held = batch->slot < self->slot_count && self->slots[batch->slot].state == SLOT_HELD;
    if (held) {
        self->slots[batch->slot].state = SLOT_FREE;
        self->held--;
    }
    unlock_and_wake(self);
    return held ? STATUS_OK : status_set(STATUS_USAGE, "the batch was released before");
}

/* Waits until no thread works on a batch. */
static void drain(struct set_stream *self)
{
    self->draining = true;
    stop_from(self, self->taken);
    for (bool busy = true; busy;) {
        busy = self->listing;
        for (uint32_t i = 0; i < self->slot_count; i++)
            busy |= self->slots[i].users > 0;
        if (busy)
            pthread_cond_wait(&self->done, &self->lock);
    }
    self->draining = false;
}

static void begin_at(struct set_stream *self, struct stream_position at)
{
    for (uint32_t i = 0; i < self->slot_count; i++)
        if (self->slots[i].state != SLOT_HELD)
            self->slots[i].state = SLOT_FREE;
    self->taken = self->serving = self->listed = 0;
    self->failed = NONE;
    self->ready = 0;
    self->take_at = self->list_at = at;
    self->epochs_open = 0;
}

static enum status check_position(const struct stream_plan *plan, struct stream_position at)
{
    return at.step < plan->steps && at.epoch < UINT32_MAX
               ? STATUS_OK
               : status_set(STATUS_USAGE, "step %llu of epoch %llu does not exist: an epoch has %llu steps",
                            (unsigned long long)at.step, (unsigned long long)at.epoch,
                            (unsigned long long)plan->steps);
}

static enum status set_stream_seek(struct stream *stream, struct stream_position to)
{
    struct set_stream *self = of(stream);
    TRY(check_position(&self->request.plan, to));
    pthread_mutex_lock(&self->lock);
    const bool stays = !self->cancelled && self->failed == NONE && to.epoch == self->take_at.epoch &&
                       to.step == self->take_at.step;
    if (!stays) {
        self->cancelled = false;
        drain(self);
        begin_at(self, to);
        pthread_cond_broadcast(&self->work);
    }
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static void set_stream_stats(struct stream *stream, struct stream_stats *stats)
{
    struct set_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    *stats = self->stats;
    stats->ready = self->calls ? (double)self->ready_sum / (double)self->calls : 0;
    pthread_mutex_unlock(&self->lock);
    stats->shard_bytes = set_files_held_bytes(self->files);
}

static void set_stream_cancel(struct stream *stream)
{
    struct set_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    self->cancelled = true;
    stop_from(self, self->taken);
    pthread_cond_signal(&self->done);
    pthread_mutex_unlock(&self->lock);
}

static void free_all(struct set_stream *self)
{
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++)
        if (self->slots[i].values)
            self->request.deallocate(self->slots[i].values);
    for (int i = 0; self->workers && i < self->request.threads; i++) {
        image_scratch_close(&self->workers[i].scratch);
        free(self->workers[i].image);
        free(self->workers[i].label);
    }
    set_files_close(self->files);
    pthread_cond_destroy(&self->done);
    pthread_cond_destroy(&self->work);
    pthread_mutex_destroy(&self->lock);
    free(self->queue);
    free(self->slots);
    free(self->workers);
    free(self);
}

static void set_stream_close(struct stream *stream)
{
    struct set_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    self->closing = true;
    stop_from(self, self->taken);
    pthread_cond_broadcast(&self->work);
    pthread_mutex_unlock(&self->lock);
    for (int i = 0; i < self->worker_count; i++)
        pthread_join(self->workers[i].thread, NULL);
    free_all(self);
}

static const struct stream_type set_stream_type = {
    .next = set_stream_next,
    .wait = set_stream_wait,
    .release = set_stream_release,
    .seek = set_stream_seek,
    .stats = set_stream_stats,
    .cancel = set_stream_cancel,
    .close = set_stream_close,
};

/* ---- Opening ---- */

static enum status allocate_aligned(size_t bytes, void **memory)
{
    *memory = aligned_alloc(ALIGN, bytes);
    return ALLOCATED(*memory, "out of memory for a batch of %zu bytes", bytes);
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static enum status check_samples(const struct set_stream_request *request)
{
    const uint32_t end = request->dataset->sample_count;
    if (!request->samples && request->count > end)
        return status_set(STATUS_USAGE, "a stream cannot have %u samples of %u", request->count, end);
    for (uint32_t i = 0; request->samples && i < request->count; i++)
        if (request->samples[i] >= end)
            return status_set(STATUS_USAGE, "a stream cannot have sample %u of %u", request->samples[i], end);
    return STATUS_OK;
}

static enum status check_request(const struct set_stream_request *request)
{
    const struct image_fit *fit = &request->fit;
    if (request->threads < 1 || request->ahead < 1 || request->plan.steps < 1 || request->plan.capacity < 1 ||
        request->plan.capacity >= ALL || request->channels < 1 || request->depth < 1 || request->height < 1 ||
        request->width < 1 || !request->allocate != !request->deallocate)
        return status_set(STATUS_USAGE, "a stream needs a shape, threads, batches ahead, steps and samples");
    if (fit->res && (request->height != fit->res || request->width != fit->res || request->depth != 1 ||
                     request->type != DTYPE_U8 || (fit->channels && request->channels != fit->channels)))
        return status_set(STATUS_USAGE,
                          "a stream of images of %u x %u pixels with %u channels cannot have another shape",
                          fit->res, fit->res, fit->channels);
    if (request->output &&
        (request->type != DTYPE_U8 || request->depth != 1 || request->channels > IMAGE_OUTPUT_CHANNELS_MAX))
        return status_set(STATUS_USAGE, "a stream can only convert images of bytes with up to %d channels",
                          IMAGE_OUTPUT_CHANNELS_MAX);
    TRY(check_samples(request));
    return check_position(&request->plan, request->begin);
}

/* Finds the largest members that threads read. */
static void measure_members(struct set_stream *self)
{
    const struct dataset *dataset = self->request.dataset;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        const struct dataset_member *members = &dataset->members[sample->member];
        if (sample->image < sample->members && members[sample->image].size > self->image_bytes)
            self->image_bytes = members[sample->image].size;
        if (self->request.labels || sample->label >= sample->members)
            continue;
        const uint64_t most = *sample->rule->field ? MEMBER_JSON_BYTES_MAX : LABEL_BYTES_MAX;
        const uint64_t size = members[sample->label].size < most ? members[sample->label].size : most;
        self->label_bytes = size > self->label_bytes ? size : self->label_bytes;
    }
}

static enum status allocate_slots(struct set_stream *self)
{
    const struct stream_plan *plan = &self->request.plan;
    const size_t values = aligned(plan->capacity * self->sample_bytes);
    const size_t words = aligned(plan->capacity * sizeof(uint32_t));
    char what[64];
    self->slot_bytes = values + 4 * words;
    snprintf(what, sizeof what, "%u batches of %u samples", self->slot_count, plan->capacity);
    TRY(memory_check(self->slot_bytes * self->slot_count, what,
                     OPTION_OR_FIELD("lower --batch", "lower batch_size")));
    for (uint32_t i = 0; i < self->slot_count; i++) {
        struct slot *slot = &self->slots[i];
        void *memory;
        TRY(self->request.allocate(self->slot_bytes, &memory));
        slot->values = memory;
        slot->labels = (int32_t *)(slot->values + values);
        slot->numbers = (uint32_t *)(slot->values + values + words);
        slot->read = (uint64_t *)(slot->values + values + 2 * words);
    }
    self->stats.memory_bytes = self->slot_bytes * self->slot_count;
    return STATUS_OK;
}

static enum status allocate_all(struct set_stream *self)
{
    const struct set_stream_request *request = &self->request;
    self->slots = calloc(self->slot_count, sizeof *self->slots);
    self->queue = calloc(request->ahead, sizeof *self->queue);
    self->workers = calloc((size_t)request->threads, sizeof *self->workers);
    TRY(ALLOCATED(self->slots && self->queue && self->workers, "out of memory for a stream"));
    TRY(set_files_open(request->dataset, (uint32_t)request->threads,
                       request->shard_bytes ? request->shard_bytes : SET_STREAM_SHARD_BYTES, &self->files));
    measure_members(self);
    TRY(allocate_slots(self));
    for (int i = 0; i < request->threads; i++) {
        struct worker *worker = &self->workers[i];
        worker->self = self;
        worker->image = malloc(self->image_bytes + 1);
        worker->label = malloc(self->label_bytes + 1);
        TRY(ALLOCATED(worker->image && worker->label, "out of memory for a sample of %zu bytes",
                      self->image_bytes));
        self->stats.memory_bytes += self->image_bytes + self->label_bytes;
    }
    return STATUS_OK;
}

static enum status start_threads(struct set_stream *self)
{
    sigset_t every, before;
    int error = 0;
    sigfillset(&every); /* signals are for the main thread */
    pthread_sigmask(SIG_BLOCK, &every, &before);
    for (int i = 0; !error && i < self->request.threads; i++) {
        error = pthread_create(&self->workers[i].thread, NULL, run, &self->workers[i]);
        self->worker_count += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? status_set(STATUS_EXHAUSTED, "cannot start %d threads to decode: %s",
                              self->request.threads, strerror(error))
                 : STATUS_OK;
}

enum status set_stream_open(const struct set_stream_request *request, struct stream **stream)
{
    *stream = NULL;
    TRY(check_request(request));
    struct set_stream *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory for a stream"));
    self->stream = (struct stream){&set_stream_type, request->begin};
    self->request = *request;
    self->request.count = request->count ? request->count : request->dataset->sample_count;
    self->request.copies = request->copies ? request->copies : 1;
    self->request.fit.whole = true; /* whether a sample is broken must not depend on its crop */
    if (!request->allocate) {
        self->request.allocate = allocate_aligned;
        self->request.deallocate = free;
    }
    self->slot_count = request->ahead + (request->held ? request->held : 1);
    self->sample_bytes = (size_t)request->channels * request->depth * request->height * request->width *
                         dtype_bytes(type_of(request));
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->work, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* for set_stream_wait() */
    pthread_cond_init(&self->done, &clock);
    pthread_condattr_destroy(&clock);
    enum status status = allocate_all(self);
    if (status == STATUS_OK) {
        begin_at(self, request->begin);
        status = start_threads(self);
    }
    if (status == STATUS_OK) {
        *stream = &self->stream;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    set_stream_close(&self->stream);
    return status_restore(&failure);
}
