/* How the threads share the work: batches are listed in order, and their samples are handed out with an
 * atomic counter, one by one, or several small ones at a time. When a batch has no samples left to hand out,
 * a thread continues with the next batch. Threads therefore never wait for each other, not even at the end of
 * an epoch. Which thread decodes a sample has no effect on the result.
 *
 * Files that the consumer may decode are read into memory of the batch. The thread that lists a batch knows
 * their sizes: it gives each one its place, and enlarges the memory if necessary. */
#include "data/set_stream_parts.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "core/parallel.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "data/plain_reader.h"
#include "data/remote.h"
#include "data/remote_cache.h"
#include "data/resident.h"
#include "data/set_files.h"
#include "machine/host.h"

#define NONE        UINT64_MAX
#define ALL         (UINT32_C(1) << 31) /* more than the number of samples in a batch, even if threads add to it */
#define REPORTS_MAX 8                   /* batches with masked samples that are reported */

/* Samples whose files and values have at most SMALL bytes are handed out up to CHUNK_MAX at a time. Arrays
 * that are read directly into the batch need no decoder: as many as have DIRECT_BYTES together. */
#define SMALL        16384
#define CHUNK_MAX    16
#define DIRECT_BYTES (UINT64_C(256) << 10)

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

/* Gives a slot memory for at least `bytes` bytes of files; their content is lost. */
static enum status grow_files(struct set_stream *self, struct slot *slot, size_t bytes)
{
    void *memory = NULL;
    if (bytes <= slot->bytes_room)
        return STATUS_OK;
    if (slot->bytes)
        self->request.deallocate(slot->bytes);
    slot->bytes = NULL;
    slot->bytes_room = 0;
    TRY(self->request.allocate(bytes, &memory));
    slot->bytes = memory;
    slot->bytes_room = bytes;
    return STATUS_OK;
}

/* Takes the memory of decoded images from a slot that is free, if the consumer keeps no further ones. Returns
 * NULL if there is none. */
static uint8_t *take_pixels(struct set_stream *self)
{
    for (uint32_t i = 0; self->pixel_bytes > 0 && !atomic_load(&self->wants) && i < self->slot_count; i++) {
        struct slot *slot = &self->slots[i];
        uint8_t *pixels = slot->pixels;
        if (slot->state != SLOT_FREE || !pixels)
            continue;
        slot->pixels = NULL;
        slot->pixels_room = 0;
        self->stats.memory_bytes -= self->pixel_bytes;
        return pixels;
    }
    return NULL;
}

/* Returns the size of the file that a thread hands on or decodes for a number of the plan, if it may be a
 * JPEG of the device's share; otherwise NO_FILE. */
static size_t file_bytes(const struct set_stream *self, uint32_t number)
{
    const struct set_stream_request *request = &self->request;
    const struct dataset *dataset = request->dataset;
    if (request->fit.raw.channels || !set_stream_on_device(number, request->device_share) ||
        check_number(request, number) != STATUS_OK || kept_of(self, number))
        return NO_FILE;
    const struct dataset_sample *sample = sample_of(request, number);
    const struct dataset_member *member = &dataset->members[sample->member + sample->image];
    return sample->image < sample->members && strcasecmp(members_format(member->extension), "npy") != 0
               ? member->size
               : NO_FILE;
}

/* Gives each file of a batch that the consumer may decode its place in slot->bytes. */
static enum status place_files(struct set_stream *self, struct slot *slot, uint32_t count)
{
    size_t end = 0;
    slot->file_count = 0;
    for (uint32_t i = 0; slot->files && i < count; i++) {
        const size_t bytes = file_bytes(self, slot->numbers[i]);
        slot->file_at[i] = bytes == NO_FILE ? NO_FILE : end;
        end += bytes == NO_FILE ? 0 : stream_aligned(bytes);
    }
    return end <= slot->bytes_room ? STATUS_OK : grow_files(self, slot, stream_aligned(end + end / 4));
}

/* Starts to read the members of a batch that are at a URL, so that several requests run at a time. */
static void ask_members(const struct set_stream *self, const uint32_t *numbers, uint32_t count)
{
    const struct set_stream_request *request = &self->request;
    for (uint32_t i = 0; request->dataset->remote && i < count; i++) {
        const struct dataset_sample *sample = sample_of(request, numbers[i]);
        const struct dataset_member *members = &request->dataset->members[sample->member];
        const uint32_t at = numbers[i] % request->count;
        if (kept_of(self, numbers[i]))
            continue;
        if (sample->image < sample->members && !resident_find(&self->resident, at, RESIDENT_IMAGE))
            set_files_ask(self->files, &members[sample->image]);
        if (!request->labels && sample->label < sample->members &&
            !resident_find(&self->resident, at, RESIDENT_LABEL))
            set_files_ask(self->files, &members[sample->label]);
    }
}

/* Lists the samples of the next batch. */
static enum status list_samples(struct set_stream *self, struct slot *slot)
{
    const struct stream_plan *plan = &self->request.plan;
    slot->count = slot->own = 0;
    const uint32_t count = plan->list(plan->context, slot->at.epoch, slot->at.step, slot->numbers);
    if (count > plan->capacity)
        return status_set(STATUS_USAGE, "a step has %u samples, but batches have room for %u", count,
                          plan->capacity);
    TRY(place_files(self, slot, count));
    atomic_store(&slot->pixels_used, 0);
    slot->own = self->request.own ? self->request.own(plan->context, slot->at.epoch, slot->at.step) : count;
    if (slot->own != count && 2 * (uint64_t)slot->own != count)
        return status_set(STATUS_USAGE, "a step has %u samples, but %u of them are its own", count,
                          slot->own);
    slot->count = count;
    set_mix_begin(self, slot);
    ask_members(self, slot->numbers, count);
    return STATUS_OK;
}

/* Adds the next batch to the queue. Releases the lock while its samples are listed. */
static void list_batch(struct set_stream *self)
{
    struct slot *slot = self->slots;
    uint8_t *pixels = take_pixels(self);
    while (slot->state != SLOT_FREE)
        slot++;
    slot->state = SLOT_LISTING;
    slot->at = self->list_at;
    self->listing = true;
    const size_t room = slot->bytes_room;
    pthread_mutex_unlock(&self->lock);
    if (pixels)
        self->request.deallocate(pixels);
    const enum status status = list_samples(self, slot);
    pthread_mutex_lock(&self->lock);
    self->listing = false;
    self->stats.memory_bytes += slot->bytes_room - room;
    const uint64_t number = self->listed++;
    self->queue[number % self->request.ahead] = slot;
    self->list_at = stream_after(&self->request.plan, slot->at);
    slot->state = SLOT_FILLING;
    slot->masked = slot->fault_at = 0;
    slot->fails = status != STATUS_OK;
    slot->fault.status = STATUS_OK;
    atomic_store(&slot->claimed, halted(self) ? ALL : 0);
    if (slot->fails) {
        slot->fault = status_save(status);
        self->failed = number;
    }
    if (slot->count == 0)
        finish(self, slot, number);
    if (self->draining)
        pthread_cond_signal(&self->done);
    if (self->idle > 0)
        pthread_cond_broadcast(&self->work);
}

/* Counts a masked sample, and keeps its index if it is one of the first of the batch. */
static void count_masked(struct slot *slot, uint32_t i)
{
    uint32_t at = slot->masked < NAMED ? slot->masked : NAMED;
    slot->masked++;
    for (; at > 0 && slot->masked_at[at - 1] > i; at--)
        if (at < NAMED)
            slot->masked_at[at] = slot->masked_at[at - 1];
    if (at < NAMED)
        slot->masked_at[at] = i;
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
    if (!fails && i < slot->own)
        count_masked(slot, i);
    if (fails) {
        const uint64_t number = number_of(self, slot);
        self->failed = number < self->failed ? number : self->failed;
        stop_from(self, number);
    }
    pthread_mutex_unlock(&self->lock);
}

/* Loads a sample. Masks it if it is broken and the request says so. Returns false if the stream fails. */
static bool try_to_load(struct worker *worker, struct slot *slot, uint32_t i)
{
    struct set_stream *self = worker->self;
    const enum status status = set_load_sample(worker, slot, i);
    if (status == STATUS_OK)
        return true;
    const bool masks = worker->broken && self->request.on_error == SET_STREAM_MASK;
    memset(slot->values + i * self->sample_bytes, 0, self->sample_bytes);
    if (slot->masks)
        memset(slot->masks + i * self->mask_bytes, STREAM_IGNORED, self->mask_bytes);
    slot->labels[i] = STREAM_MASKED;
    if (slot->files)
        slot->file_at[i] = NO_FILE;
    keep_fault(self, slot, i, status, !masks);
    return masks;
}

/* Compares the shards from which samples of a filled batch were read directly. The batch fails at the first
 * sample whose shard has changed. */
static void compare_shards(struct set_stream *self, struct slot *slot)
{
    const struct dataset *dataset = self->request.dataset;
    const uint64_t pass = set_files_begin_pass(self->files);
    for (uint32_t i = 0; i < slot->count; i++) {
        if (slot->direct[i] == NO_SHARD || set_files_compared(self->files, pass, slot->direct[i]))
            continue;
        const struct dataset_sample *sample = sample_of(&self->request, slot->numbers[i]);
        const enum status status =
            set_files_compare(self->files, pass, &dataset->members[sample->member + sample->image]);
        if (status != STATUS_OK) {
            keep_fault(self, slot, i, status_prefix(status, "sample '%s'", sample->key), true);
            return;
        }
    }
}

/* Adds what the thread counted to the statistics. */
static void add_counts(struct worker *worker)
{
    struct stream_stats *stats = &worker->self->stats;
    const uint64_t memory = image_scratch_bytes(&worker->scratch);
    stats->bytes += worker->bytes;
    stats->read_s += worker->read_s;
    stats->decode_s += worker->decode_s;
    stats->jpeg_warnings += worker->scratch.jpeg_warnings;
    stats->memory_bytes += memory - worker->memory_bytes;
    worker->memory_bytes = memory;
    worker->bytes = worker->scratch.jpeg_warnings = 0;
    worker->read_s = worker->decode_s = 0;
}

/* Loads samples of a batch until none is left. Releases the lock while it loads them. */
static void fill(struct worker *worker, struct slot *slot)
{
    struct set_stream *self = worker->self;
    const uint32_t count = slot->count;
    slot->users++;
    pthread_mutex_unlock(&self->lock);
    for (uint32_t begin; (begin = atomic_fetch_add(&slot->claimed, self->chunk)) < count;) {
        const uint32_t end = begin + self->chunk < count ? begin + self->chunk : count;
        worker->timed = end - begin;
        if (self->chunk > 1)
            set_load_prefetch(self, slot, begin, end);
        /* After a failure of the stream, the rest of the samples would only fail later ones. A server that
         * does not answer may take minutes for each. */
        for (uint32_t i = begin; i < end && try_to_load(worker, slot, i); i++) {
            if (self->mixes)
                set_mix_sample(self, slot, i);
            worker->timed = 0;
        }
    }
    pthread_mutex_lock(&self->lock);
    add_counts(worker);
    /* All samples are taken, so no other thread begins to fill this batch. */
    if (self->direct && slot->users == 1 && !halted(self) && !slot->fails) {
        pthread_mutex_unlock(&self->lock);
        compare_shards(self, slot);
        pthread_mutex_lock(&self->lock);
    }
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
 * listed. */
static bool is_ready(const struct set_stream *self, struct slot **slot)
{
    const bool listed = self->taken < self->listed;
    *slot = listed ? self->queue[self->taken % self->request.ahead] : NULL;
    return self->cancelled || self->held == self->slot_count || (listed && (*slot)->state == SLOT_READY);
}

/* Waits until is_ready(), or until a time; NULL: without limit. Returns whether it is. */
static bool await_ready(struct set_stream *self, const struct timespec *until, struct slot **slot)
{
    bool ready = is_ready(self, slot);
    const double begin_s = ready ? 0 : timer_now_s();
    for (int error = 0; !ready && error == 0; ready = is_ready(self, slot)) {
        self->waiting = true;
        error = until ? pthread_cond_timedwait(&self->done, &self->lock, until)
                      : pthread_cond_wait(&self->done, &self->lock);
    }
    self->waiting = false;
    self->stats.wait_s += begin_s > 0 ? timer_now_s() - begin_s : 0;
    return ready;
}

static bool set_stream_wait(struct stream *stream, double seconds)
{
    struct set_stream *self = of(stream);
    struct slot *slot;
    const struct timespec until = timer_deadline(seconds);
    pthread_mutex_lock(&self->lock);
    open_epoch(self);
    const bool ready = await_ready(self, &until, &slot);
    pthread_mutex_unlock(&self->lock);
    return ready;
}

/* Waits for the next batch, and sets `*slot`. */
static enum status await_batch(struct set_stream *self, struct slot **slot)
{
    await_ready(self, NULL, slot);
    if (self->cancelled)
        return status_set(STATUS_FAILED, "the stream was cancelled");
    if (self->held == self->slot_count)
        return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one", self->held);
    return (*slot)->fails ? status_restore(&(*slot)->fault) : STATUS_OK;
}

static void describe(const struct set_stream *self, const struct slot *slot, struct stream_batch *batch)
{
    const uint32_t count = self->mixes ? slot->own : slot->count;
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
        .masks = slot->masks,
        .partners = self->mixes ? slot->partners : NULL,
        .share = self->mixes ? slot->mix.share : 1,
        .masked = slot->masked,
        .epoch = slot->at.epoch,
        .step = slot->at.step,
        .last = slot->at.step + 1 == self->request.plan.steps,
        .slot = (uint32_t)(slot - self->slots),
    };
}

/* Removes the gaps between the files of a finished batch. */
static void compact_files(struct slot *slot)
{
    for (uint32_t i = 0; slot->files && i < slot->count; i++)
        if (slot->file_at[i] != NO_FILE)
            slot->files[slot->file_count++] = slot->files[i];
}

/* Hands a finished batch to the consumer. */
static void take(struct set_stream *self, struct slot *slot)
{
    slot->state = SLOT_HELD;
    self->held++;
    self->taken++;
    self->ready--;
    self->take_at = stream_after(&self->request.plan, slot->at);
    set_files_next_round(self->files);
    self->stats.batches++;
    self->stats.samples += slot->own;
    self->stats.masked += slot->masked;
}

/* Warns about the masked samples of a batch: names the first ones, and gives the fault of the first. */
static void report_masked(struct set_stream *self, const struct slot *slot, const char *reason)
{
    char names[256] = "";
    if (self->reported == REPORTS_MAX)
        return;
    self->reported++;
    const uint32_t named = slot->masked < NAMED ? slot->masked : NAMED;
    for (uint32_t i = 0; slot->masked > 1 && i < named; i++) {
        const size_t length = strlen(names);
        snprintf(names + length, sizeof names - length, "%s'%.60s'", i ? ", " : "",
                 sample_of(&self->request, slot->numbers[slot->masked_at[i]])->key);
    }
    if (slot->masked > NAMED)
        snprintf(names + strlen(names), sizeof names - strlen(names), " and %u more", slot->masked - NAMED);
    const unsigned first = OPTION_OR_FIELD(1, 0); /* rows of the program count from 1 */
    status_warn_own("%u broken sample%s of epoch %llu, step %llu%s masked: %s%s%s", slot->masked,
                    slot->masked == 1 ? "" : "s", (unsigned long long)slot->at.epoch + first,
                    (unsigned long long)slot->at.step + first, OPTION_OR_FIELD("", " (counted from 0)"),
                    names, *names ? "; the first: " : "", reason);
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
    compact_files(slot);
    if (self->mixes)
        set_mix_partners(slot);
    describe(self, slot, batch);
    if (slot->masked)
        report_masked(self, slot, slot->fault.text);
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

/* Waits until no thread works on a batch. Threads that wait for a server end their requests. */
static void drain(struct set_stream *self)
{
    self->draining = true;
    stop_from(self, self->taken);
    set_files_stop(self->files);
    for (bool busy = true; busy;) {
        busy = self->listing;
        for (uint32_t i = 0; i < self->slot_count; i++)
            busy |= self->slots[i].users > 0;
        if (busy)
            pthread_cond_wait(&self->done, &self->lock);
    }
    pthread_mutex_unlock(&self->lock);
    set_files_resume(self->files);
    pthread_mutex_lock(&self->lock);
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

static enum status set_stream_seek(struct stream *stream, struct stream_position to)
{
    struct set_stream *self = of(stream);
    TRY(stream_check_position(&self->request.plan, to));
    pthread_mutex_lock(&self->lock);
    const bool stays = !self->cancelled && self->failed == NONE && to.epoch == self->take_at.epoch &&
                       to.step == self->take_at.step;
    if (!stays) {
        self->cancelled = false;
        drain(self);
        begin_at(self, to);
        set_files_next_round(self->files);
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
    set_files_stop(self->files);
    pthread_cond_signal(&self->done);
    pthread_mutex_unlock(&self->lock);
}

static void free_slot(const struct set_stream *self, struct slot *slot)
{
    if (slot->values)
        self->request.deallocate(slot->values);
    if (slot->bytes)
        self->request.deallocate(slot->bytes);
    if (slot->pixels)
        self->request.deallocate(slot->pixels);
    free(slot->direct);
    free(slot->files);
    free(slot->file_at);
    free(slot->complete);
    free(slot->partners);
    free(slot->places);
    free(slot->edges);
}

static void free_all(struct set_stream *self)
{
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++)
        free_slot(self, &self->slots[i]);
    for (int i = 0; self->workers && i < self->request.threads; i++) {
        image_scratch_close(&self->workers[i].scratch);
        free(self->workers[i].image);
        free(self->workers[i].label);
        free(self->workers[i].changed);
    }
    set_files_close(self->files);
    resident_close(&self->resident);
    free(self->kept);
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
    if (self->files)
        set_files_stop(self->files);
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

/* ---- Files that the consumer decodes ---- */

const struct set_stream_file *set_stream_files(const struct stream *stream, const struct stream_batch *batch,
                                               uint32_t *count)
{
    const struct slot *slot = &((const struct set_stream *)stream)->slots[batch->slot];
    *count = slot->file_count;
    return slot->files;
}

enum status set_stream_break(struct stream *stream, struct stream_batch *batch, uint32_t index,
                             enum status why)
{
    struct set_stream *self = of(stream);
    struct slot *slot = batch->slot < self->slot_count ? &self->slots[batch->slot] : NULL;
    if (!slot || slot->state != SLOT_HELD || index >= slot->count)
        return status_set(STATUS_USAGE, "the stream has handed out no batch with sample %u", index);
    const struct dataset *dataset = self->request.dataset;
    const struct dataset_sample *sample = sample_of(&self->request, slot->numbers[index]);
    why = dataset_at(dataset, sample, &dataset->members[sample->member + sample->image], why);
    if (why != STATUS_FAILED || self->request.on_error != SET_STREAM_MASK)
        return why;
    if (slot->labels[index] == STREAM_MASKED)
        return STATUS_OK;
    slot->labels[index] = STREAM_MASKED;
    if (index >= slot->own)
        return STATUS_OK;
    pthread_mutex_lock(&self->lock);
    self->stats.masked++;
    pthread_mutex_unlock(&self->lock);
    count_masked(slot, index);
    batch->masked = slot->masked;
    if (slot->masked == 1) /* stream_next() has reported others */
        report_masked(self, slot, status_text());
    return STATUS_OK;
}

/* ---- Samples that the consumer keeps ---- */

const uint64_t *set_stream_places(const struct stream *stream, const struct stream_batch *batch)
{
    return ((const struct set_stream *)stream)->slots[batch->slot].places;
}

void set_stream_keep(struct stream *stream, const struct stream_batch *batch, uint32_t index, uint64_t place,
                     const struct set_stream_file *file)
{
    struct set_stream *self = of(stream);
    const struct slot *slot = &self->slots[batch->slot];
    struct kept *kept = &self->kept[slot->numbers[index] % self->request.count];
    kept->label = slot->labels[index];
    kept->edges = slot->edges[index];
    kept->device = set_stream_on_device(slot->numbers[index], self->request.device_share);
    if (file)
        kept->shape = file->shape;
    atomic_store_explicit(&kept->place, place, memory_order_release);
    if (++self->kept_count == self->request.count)
        set_stream_keep_no_more(stream);
}

void set_stream_keep_no_more(struct stream *stream)
{
    atomic_store(&of(stream)->wants, false);
}

const struct set_stream_request *set_stream_request_of(const struct stream *stream)
{
    return &((const struct set_stream *)stream)->request;
}

/* ---- Opening ---- */

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

static enum status check_share(const struct set_stream_request *request)
{
    const double share = request->device_share;
    const struct image_fit *fit = &request->fit;
    const bool fits =
        fit->res && (fit->how == FIT_RESIZE || fit->how == FIT_CROP || fit->how == FIT_RANDOM_RESIZED_CROP);
    if (!(share >= 0 && share <= 1))
        return status_set(STATUS_USAGE, "the share of a device is %g, but must be 0 to 1", share);
    return share == 0 || fits ? STATUS_OK
                              : status_set(STATUS_USAGE, "a device decodes only images that are resized or "
                                                         "cropped to one size");
}

/* Refuses to keep samples that the threads change in each epoch. */
static enum status check_kept(const struct set_stream_request *request)
{
    const char *why = request->output               ? OPTION_OR_FIELD("--rand-augment", "rand_augment")
                      : mixing_on(&request->mixing) ? "mixtures in host memory"
                                                    : NULL;
    if (request->device_bytes == 0 || !why)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "%s keeps images that are the same in each epoch, not those of %s; drop one of them",
                      OPTION_OR_FIELD("--resident-device-bytes", "resident_device_bytes: it"), why);
}

static enum status check_request(const struct set_stream_request *request)
{
    const struct image_fit *fit = &request->fit;
    if (request->threads < 1 || request->ahead < 1 || request->plan.steps < 1 || request->plan.capacity < 1 ||
        request->plan.capacity >= ALL || request->channels < 1 || request->depth < 1 || request->height < 1 ||
        request->width < 1 || !request->allocate != !request->deallocate)
        return status_set(STATUS_USAGE, "a stream needs a shape, threads, batches ahead, steps and samples");
    if (fit->res && (request->height != fit->res || request->width != fit->res || request->type != DTYPE_U8 ||
                     (fit->channels && request->channels != fit->channels)))
        return status_set(STATUS_USAGE,
                          "a stream of images of %u x %u pixels with %u channels cannot have another shape",
                          fit->res, fit->res, fit->channels);
    TRY(check_share(request));
    if (fit->filter != RESAMPLE_BILINEAR && (request->device_share > 0 || request->device_bytes > 0))
        return status_set(STATUS_USAGE, "a device crops images by the bilinear filter only; use --decoder "
                                        "cpu, and no --resident-device-bytes, or --interpolation bilinear");
    if (request->output && (request->type != DTYPE_U8 || request->channels > IMAGE_OUTPUT_CHANNELS_MAX ||
                            (request->depth != 1 && request->output->rand.operations > 0)))
        return status_set(STATUS_USAGE, "a stream can only convert images of bytes with up to %d channels",
                          IMAGE_OUTPUT_CHANNELS_MAX);
    if (mixing_on(&request->mixing) &&
        (request->depth != 1 || request->type != DTYPE_U8 || request->device_share > 0))
        return status_set(STATUS_USAGE, "a stream can only mix images of bytes that it decodes itself");
    TRY(check_kept(request));
    if (set_stream_masks(request) && request->device_bytes > 0)
        return status_set(STATUS_USAGE, "%s keeps no %s, and this data set has them; drop it",
                          OPTION_OR_FIELD("--resident-device-bytes", "resident_device_bytes: it"),
                          request->dataset->multi_hot ? "multi-hot labels" : "masks");
    if (set_stream_masks(request) && mixing_on(&request->mixing))
        return status_set(STATUS_USAGE, "a stream cannot mix images that have masks or multi-hot labels; mix "
                                        "their batches in the training loop");
    if (set_stream_masks(request) && !request->dataset->multi_hot &&
        (request->depth != 1 || (request->output && request->output->rand.operations > 0)))
        return status_set(STATUS_USAGE, "a stream cannot distort images that have masks");
    TRY(check_samples(request));
    return stream_check_position(&request->plan, request->begin);
}

/* Finds the largest members that threads read, and the mean size of images. */
static void measure_members(struct set_stream *self)
{
    const struct dataset *dataset = self->request.dataset;
    double sum = 0;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        const struct dataset_member *members = &dataset->members[sample->member];
        const uint64_t image = sample->image < sample->members ? members[sample->image].size : 0;
        self->image_bytes = image > self->image_bytes ? image : self->image_bytes;
        sum += (double)image;
        if (self->request.labels || sample->label >= sample->members)
            continue;
        const uint64_t most = self->mask_bytes       ? UINT64_MAX
                              : *sample->rule->field ? MEMBER_JSON_BYTES_MAX
                                                     : LABEL_BYTES_MAX;
        const uint64_t size = members[sample->label].size < most ? members[sample->label].size : most;
        self->label_bytes = size > self->label_bytes ? size : self->label_bytes;
    }
    self->image_mean = dataset->sample_count ? sum / dataset->sample_count : 0;
}

#define COMPARED 8 /* images that are looked at when a stream opens */

/* Sets self->pixel_bytes to the memory that the decoded images of a batch need: as if all had the size of the
 * largest of some images. Images of a set at a URL, and of shards that would be unpacked for each, are not
 * read for this. */
static enum status measure_pixels(struct set_stream *self)
{
    const struct set_stream_request *request = &self->request;
    const struct dataset *dataset = request->dataset;
    const uint64_t most =
        request->device_bytes < SET_STREAM_PIXEL_BYTES ? request->device_bytes : SET_STREAM_PIXEL_BYTES;
    struct plain plain = {.dataset = dataset, .fd = -1, .stopped = request->stopped};
    struct image_scratch scratch = {0};
    const bool reads = !dataset->remote && !dataset_in_memory(dataset);
    uint64_t largest = reads ? 0 : most;
    if (!self->crops)
        return STATUS_OK;
    FREED uint8_t *bytes = malloc(self->image_bytes + 1);
    TRY(ALLOCATED(bytes, "out of memory for a sample"));
    for (uint32_t i = 0; i <= COMPARED && reads; i++) {
        const struct dataset_sample *sample =
            sample_of(request, (uint32_t)((uint64_t)(request->count - 1) * i / COMPARED));
        const struct dataset_member *image = &dataset->members[sample->member + sample->image];
        if (sample->image == sample->members || plain_bytes(&plain, image, image->size, bytes) != STATUS_OK)
            continue; /* the stream reports it */
        const uint64_t size = stream_aligned(
            image_whole_bytes(&request->fit, members_format(image->extension), bytes, image->size, &scratch));
        largest = size > largest ? size : largest;
    }
    image_scratch_close(&scratch);
    plain_close(&plain);
    const uint64_t needed = largest * request->plan.capacity;
    self->pixel_bytes = stream_aligned(needed < most ? needed : most);
    return STATUS_OK;
}

/* Allocates memory for the files of a batch: a quarter more than the mean. */
static enum status allocate_files(struct set_stream *self, struct slot *slot)
{
    const struct set_stream_request *request = &self->request;
    const uint32_t capacity = request->plan.capacity;
    if (request->device_share == 0 && !self->crops)
        return STATUS_OK;
    slot->files = calloc(capacity, sizeof *slot->files);
    slot->file_at = calloc(capacity, sizeof *slot->file_at);
    TRY(ALLOCATED(slot->files && slot->file_at, "out of memory for the files of a batch"));
    const double mean = request->device_share * (self->image_mean + STREAM_ALIGN / 2) * capacity;
    if (request->device_share > 0)
        TRY(grow_files(self, slot, stream_aligned((size_t)(1.25 * mean) + 1)));
    self->stats.memory_bytes += slot->bytes_room + capacity * (sizeof *slot->files + sizeof *slot->file_at);
    return STATUS_OK;
}

/* Allocates what the threads need to mix the samples of a batch. */
static enum status allocate_mixing(struct set_stream *self, struct slot *slot)
{
    const uint32_t capacity = self->request.plan.capacity;
    if (!self->mixes)
        return STATUS_OK;
    slot->complete = malloc(capacity * sizeof *slot->complete);
    slot->partners = malloc(capacity * sizeof *slot->partners);
    self->stats.memory_bytes += capacity * (sizeof *slot->complete + sizeof *slot->partners);
    return ALLOCATED(slot->complete && slot->partners, "out of memory for a batch");
}

/* Allocates what the threads need for samples that the consumer keeps. */
static enum status allocate_places(struct set_stream *self, struct slot *slot)
{
    const struct set_stream_request *request = &self->request;
    const uint32_t capacity = request->plan.capacity;
    if (request->device_bytes == 0)
        return STATUS_OK;
    if (self->pixel_bytes > 0) {
        void *memory;
        slot->pixels_room = self->pixel_bytes;
        TRY(request->allocate(slot->pixels_room, &memory));
        slot->pixels = memory;
        self->stats.memory_bytes += slot->pixels_room;
    }
    slot->places = malloc(capacity * sizeof *slot->places);
    slot->edges = malloc(capacity * sizeof *slot->edges);
    self->stats.memory_bytes += capacity * (sizeof *slot->places + sizeof *slot->edges);
    return ALLOCATED(slot->places && slot->edges, "out of memory for a batch");
}

static enum status allocate_kept(struct set_stream *self)
{
    const uint32_t count = self->request.count;
    if (self->request.device_bytes == 0)
        return STATUS_OK;
    self->kept = malloc(count * sizeof *self->kept + 1);
    TRY(ALLOCATED(self->kept, "out of memory for a list of %u samples", count));
    for (uint32_t i = 0; i < count; i++)
        atomic_init(&self->kept[i].place, SET_STREAM_LOADED);
    self->stats.memory_bytes += count * sizeof *self->kept;
    return STATUS_OK;
}

/* Returns the number of samples that a thread takes at a time: few enough that all threads have work until
 * the end of a batch. */
static uint32_t choose_chunk(const struct set_stream *self)
{
    const struct set_stream_request *request = &self->request;
    const uint32_t part = request->plan.capacity / (4 * (uint32_t)request->threads);
    const bool small = self->image_bytes <= SMALL && self->sample_bytes <= SMALL;
    const uint64_t most = small ? CHUNK_MAX : self->direct ? DIRECT_BYTES / self->image_bytes : 1;
    const uint64_t chunk = most < CHUNK_MAX ? most : CHUNK_MAX;
    return part < 1 || chunk < 1 ? 1 : part < chunk ? part : (uint32_t)chunk;
}

static enum status allocate_slots(struct set_stream *self)
{
    const struct stream_plan *plan = &self->request.plan;
    const size_t values = stream_aligned(plan->capacity * self->sample_bytes);
    const size_t masks = stream_aligned(plan->capacity * self->mask_bytes);
    const size_t words = stream_aligned(plan->capacity * sizeof(uint32_t));
    char what[64];
    self->slot_bytes = values + masks + 4 * words;
    snprintf(what, sizeof what, "%u batches of %u samples", self->slot_count, plan->capacity);
    TRY(memory_check(self->slot_bytes * self->slot_count, what,
                     OPTION_OR_FIELD("lower --batch", "lower batch_size")));
    for (uint32_t i = 0; i < self->slot_count; i++) {
        struct slot *slot = &self->slots[i];
        void *memory;
        TRY(self->request.allocate(self->slot_bytes, &memory));
        slot->values = memory;
        slot->masks = masks ? slot->values + values : NULL;
        slot->labels = (int32_t *)(slot->values + values + masks);
        slot->numbers = (uint32_t *)(slot->labels + words / sizeof *slot->labels);
        slot->read = (uint64_t *)(slot->numbers + words / sizeof *slot->numbers);
        slot->direct = malloc(plan->capacity * sizeof *slot->direct);
        TRY(ALLOCATED(slot->direct, "out of memory for a batch of %u samples", plan->capacity));
        self->stats.memory_bytes += self->slot_bytes + plan->capacity * sizeof *slot->direct;
        TRY(allocate_files(self, slot));
        TRY(allocate_mixing(self, slot));
        TRY(allocate_places(self, slot));
    }
    return STATUS_OK;
}

static enum status open_files(struct set_stream *self)
{
    const struct set_stream_request *request = &self->request;
    struct set_files_order use = {.lanes = 0};
    if (request->lanes) {
        const struct draw_order order = draw_lanes(0, 0, request->count, request->lanes, request->shuffle);
        const double epoch = (double)request->count * request->copies;
        const double share = (double)request->plan.steps * request->plan.capacity / epoch;
        use = (struct set_files_order){order.lanes, order.window, order.block, share < 1 ? share : 1};
    }
    return set_files_open(request->dataset, (uint32_t)request->threads,
                          request->shard_bytes ? request->shard_bytes : SET_STREAM_SHARD_BYTES, &use,
                          &self->files);
}

static enum status allocate_all(struct set_stream *self)
{
    const struct set_stream_request *request = &self->request;
    const bool changes = request->output && image_output_changes(request->output);
    const size_t changed_bytes =
        changes ? 2 * (size_t)request->channels * request->depth * request->height * request->width : 0;
    self->slots = calloc(self->slot_count, sizeof *self->slots);
    self->queue = calloc(request->ahead, sizeof *self->queue);
    self->workers = calloc((size_t)request->threads, sizeof *self->workers);
    TRY(ALLOCATED(self->slots && self->queue && self->workers, "out of memory for a stream"));
    TRY(open_files(self));
    measure_members(self);
    TRY(measure_pixels(self));
    self->direct = set_load_reads_directly(request);
    self->chunk = choose_chunk(self);
    TRY(allocate_slots(self));
    TRY(allocate_kept(self));
    const struct resident_samples samples = {request->dataset, request->samples, request->count,
                                             !request->labels};
    TRY(resident_open(&samples, request->resident_bytes, &self->resident));
    self->stats.memory_bytes += set_files_block_bytes(self->files) + self->resident.bytes;
    self->stats.resident = self->resident.count;
    for (int i = 0; i < request->threads; i++) {
        struct worker *worker = &self->workers[i];
        worker->self = self;
        worker->image = malloc(self->image_bytes + 1);
        worker->label = malloc(self->label_bytes + 1);
        worker->changed = malloc(changed_bytes + 1);
        TRY(ALLOCATED(worker->image && worker->label && worker->changed,
                      "out of memory for a sample of %zu bytes", self->image_bytes));
        self->stats.memory_bytes += self->image_bytes + self->label_bytes + changed_bytes;
    }
    return STATUS_OK;
}

static enum status start_threads(struct set_stream *self)
{
    int error = 0;
    for (int i = 0; !error && i < self->request.threads; i++) {
        error = parallel_start(&self->workers[i].thread, run, &self->workers[i]);
        self->worker_count += !error;
    }
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
    self->request.fit.raw = request->dataset->raw;
    self->request.fit.whole = true; /* whether a sample is broken must not depend on its crop */
    self->request.fit.unscaled |= request->device_share > 0;
    if (!request->allocate) {
        self->request.allocate = stream_allocate;
        self->request.deallocate = free;
    }
    self->mixes = mixing_on(&request->mixing);
    self->crops = request->device_bytes > 0 && set_stream_crops(&request->fit);
    atomic_init(&self->wants, true);
    self->shape = (struct shape){request->channels, request->depth, request->height, request->width};
    self->mask_bytes = set_stream_mask_bytes(request);
    self->slot_count = request->ahead + (request->held ? request->held : 1);
    self->sample_bytes = (size_t)request->channels * request->depth * request->height * request->width *
                         dtype_bytes(type_of(request));
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->work, NULL);
    timer_cond_init(&self->done);
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

/* ---- The shape of the samples ---- */

static enum status decode_sample(const struct set_stream_request *request, uint32_t number,
                                 struct plain *plain, struct image_scratch *scratch, uint8_t **bytes,
                                 struct image *image)
{
    const struct dataset_sample *sample = &request->dataset->samples[number];
    const struct dataset_member *member = &request->dataset->members[sample->member + sample->image];
    bool is_image = false;
    if (sample->image == sample->members)
        return dataset_lacks(request->dataset, sample, &request->dataset->choice.image, "image");
    free(*bytes);
    *bytes = malloc(member->size + 1);
    TRY(ALLOCATED(*bytes, "out of memory for a sample"));
    TRY(plain_bytes(plain, member, member->size, *bytes));
    enum status status = image_fit(&request->fit, members_format(member->extension), *bytes, member->size, 0,
                                   number, scratch, image, &is_image);
    if (status == STATUS_OK && !is_image)
        status = status_set(STATUS_FAILED, "its %s is neither an image nor an array of an image",
                            member->extension);
    return dataset_at(request->dataset, sample, member, status);
}

/* Compares the shapes of some images with that of the first one, so that a set with several sizes fails
 * early. The samples are evenly distributed; those that cannot be decoded are left to the stream. */
static enum status compare_shapes(const struct set_stream_request *request, struct plain *plain,
                                  struct image_scratch *scratch, uint8_t **bytes)
{
    const struct dataset *dataset = request->dataset;
    const uint32_t count = dataset->sample_count;
    for (uint32_t i = 1; i <= COMPARED && !dataset->remote && !dataset_in_memory(dataset); i++) {
        const uint32_t number = (uint32_t)((uint64_t)(count - 1) * i / COMPARED);
        const struct dataset_sample *sample = &dataset->samples[number];
        struct image image = {.channels = request->fit.channels, .depth = 1, .type = DTYPE_U8};
        if (decode_sample(request, number, plain, scratch, bytes, &image) != STATUS_OK)
            continue;
        const enum status status = set_load_check_shape(request, &image);
        TRY(dataset_at(dataset, sample, &dataset->members[sample->member + sample->image], status));
    }
    return STATUS_OK;
}

/* Returns whether the samples may be clips, of which --out-res does not give the number of frames. */
static bool may_be_clips(const struct set_stream_request *request)
{
    const struct dataset *dataset = request->dataset;
    const struct dataset_sample *sample = &dataset->samples[0];
    const struct dataset_member *members = &dataset->members[sample->member];
    return request->fit.raw.channels
               ? request->fit.raw.depth > 1
               : sample->image < sample->members &&
                     image_format(members_format(members[sample->image].extension), NULL, 0) == IMAGE_NPY;
}

enum status set_stream_find_shape(struct set_stream_request *request)
{
    const struct image_fit *fit = &request->fit;
    request->fit.raw = request->dataset->raw;
    const uint32_t most = request->on_error == SET_STREAM_MASK ? request->dataset->sample_count : 1;
    struct plain plain = {.dataset = request->dataset, .fd = -1, .stopped = request->stopped};
    struct image_scratch scratch = {0};
    struct image image = {
        .channels = fit->channels, .depth = 1, .height = fit->res, .width = fit->res, .type = DTYPE_U8};
    uint8_t *bytes = NULL;
    enum status status = fit->res && !may_be_clips(request) ? STATUS_OK : STATUS_FAILED;
    for (uint32_t i = 0; status == STATUS_FAILED && i < most; i++)
        status = decode_sample(request, i, &plain, &scratch, &bytes, &image);
    request->channels = image.channels;
    request->depth = image.depth;
    request->height = image.height;
    request->width = image.width;
    request->type = image.type;
    if (status == STATUS_OK && !fit->res)
        status = compare_shapes(request, &plain, &scratch, &bytes);
    image_scratch_close(&scratch);
    plain_close(&plain);
    free(bytes);
    return status;
}

/* ---- Shards at a URL ---- */

/* Returns the failure of shards of `bytes` bytes of which only `limit` bytes are kept. */
static enum status refuse_shards(bool cached, uint64_t bytes, uint64_t limit)
{
    return cached
               ? status_set(STATUS_USAGE,
                            "%s is %llu, but the shards of %s have %llu bytes, which are read in random "
                            "order: most would be downloaded again and again; raise %s to at least %llu",
                            REMOTE_CACHE_BYTES, (unsigned long long)limit, OPTION_OR_FIELD("--data", "path"),
                            (unsigned long long)bytes, REMOTE_CACHE_BYTES, (unsigned long long)bytes)
               : status_set(
                     STATUS_USAGE,
                     "%s: the server sends no ranges of the shards, which have %llu bytes, but only %llu "
                     "bytes are held in memory. The shards are read in random order: most would be "
                     "downloaded again and again; %s with room for them",
                     OPTION_OR_FIELD("--data", "path"), (unsigned long long)bytes, (unsigned long long)limit,
                     OPTION_OR_FIELD("add --cache-dir DIR on a disk", "set cache_dir to a folder"));
}

enum status set_stream_plan_shards(const struct dataset *dataset, uint32_t lanes, uint32_t shuffle,
                                   int threads, uint64_t *shard_bytes)
{
    uint64_t bytes = 0;
    const bool unpacked = dataset_in_memory(dataset) && dataset->file_count > 0 && dataset->files[0].packed;
    if ((!dataset->remote && !unpacked) || shuffle == 0)
        return STATUS_OK;
    for (uint32_t i = 0; i < dataset->file_count; i++)
        bytes += dataset->files[i].bytes;
    if (unpacked) { /* otherwise, nearly each sample would unpack its shard again */
        if (bytes <= (*shard_bytes ? *shard_bytes : SET_STREAM_SHARD_BYTES))
            return STATUS_OK;
        *shard_bytes = bytes;
        return memory_check(bytes, "the unpacked shards, which are read in random order", UNPACK_REMEDY);
    }
    if (!remote_blocks_possible(dataset)) {
        const bool cached = remote_cached(dataset->remote);
        const uint64_t memory = *shard_bytes ? *shard_bytes : SET_STREAM_SHARD_BYTES;
        const uint64_t limit = cached ? remote_cache_bytes(dataset->remote) : memory;
        return limit == 0 || bytes <= limit ? STATUS_OK : refuse_shards(cached, bytes, limit);
    }
    if (*shard_bytes)
        return STATUS_OK;
    const struct draw_order order = draw_lanes(0, 0, dataset->sample_count, lanes, shuffle);
    const struct set_files_order use = {order.lanes, order.window, order.block, 1};
    uint64_t windows = set_files_needed(&use, (double)bytes / dataset->sample_count, REMOTE_BLOCK_BYTES) +
                       2 * (uint64_t)threads * REMOTE_BLOCK_BYTES;
    windows = windows < bytes ? windows : bytes;
    if (windows <= SET_STREAM_SHARD_BYTES)
        return STATUS_OK;
    *shard_bytes = windows;
    return memory_check(windows, "the shuffle windows in memory",
                        OPTION_OR_FIELD("lower --shuffle, or add --cache-dir DIR on a disk with room for the "
                                        "shards",
                                        "lower shuffle_buffer, or set cache_dir to a folder with room for "
                                        "the shards"));
}
