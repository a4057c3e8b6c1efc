#include "ops/stage.cuh"

#include <string.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "machine/host.h"

#define SLOTS      3 /* one is filled, one is read by a kernel, and one is between both */
#define SLICE_ROWS 64

/* ---- Threads ---- */

struct spread {
    parallel_task *task;
    void *context;
    uint64_t count;
    std::atomic<uint64_t> next;
    std::atomic<int> threads; /* threads that have begun */
};

static void *spread_run(void *argument)
{
    struct spread *spread = static_cast<struct spread *>(argument);
    int thread = spread->threads.fetch_add(1);
    for (uint64_t i; (i = spread->next.fetch_add(1)) < spread->count;)
        spread->task(spread->context, i, thread);
    return NULL;
}

/* If a thread cannot be started, the others do its work. */
void stage_spread(int threads, uint64_t count, parallel_task *task, void *context)
{
    struct spread spread = {task, context, count, {0}, {0}};
    int others = (uint64_t)threads < count ? threads - 1 : (int)count - 1, started = 0;
    std::unique_ptr<pthread_t[]> started_threads(new (std::nothrow) pthread_t[others > 0 ? others : 1]);
    while (started_threads && started < others &&
           parallel_start(&started_threads[started], spread_run, &spread) == 0)
        started++;
    (void)spread_run(&spread);
    for (int i = 0; i < started; i++)
        (void)pthread_join(started_threads[i], NULL);
}

/* ---- Slots ---- */

struct slot {
    uint8_t *memory; /* capacity * stride bytes of rows, then `capacity` numbers */
    cudaEvent_t done;
    bool used;  /* `done` has been recorded */
    bool ahead; /* filled by stage_ahead() for `batch` */
    struct stage_batch batch;
    enum status status;
    struct failure failure;
};

struct stage {
    struct stage_source source;
    struct slot slots[SLOTS];
    uint64_t capacity; /* rows per slot */
    std::atomic<uint64_t> bytes;
    uint32_t next; /* the next slot to fill */
    pthread_t thread;
    bool started;
    std::mutex lock; /* protects `job` and `stops` */
    std::condition_variable changed;
    struct slot *job; /* the slot that the thread fills; NULL: none */
    bool stops;
};

static uint64_t slot_bytes(const struct stage *stage, uint64_t capacity)
{
    return capacity * ((stage->source.streams ? stage->source.stride : 0) + sizeof(uint32_t));
}

static uint32_t *numbers_of(const struct stage *stage, const struct slot *slot)
{
    return reinterpret_cast<uint32_t *>(slot->memory + slot_bytes(stage, stage->capacity) -
                                        stage->capacity * sizeof(uint32_t));
}

static void free_slots(struct stage *stage)
{
    for (struct slot &slot : stage->slots) {
        if (slot.used)
            (void)cudaEventSynchronize(slot.done);
        (void)cudaFreeHost(slot.memory);
        slot.memory = NULL;
        slot.used = slot.ahead = false;
    }
    stage->capacity = 0;
    stage->bytes = 0;
}

/* Makes room for `count` rows per slot. */
static enum status reserve(struct stage *stage, uint64_t count)
{
    uint64_t bytes = slot_bytes(stage, count);
    if (count <= stage->capacity)
        return STATUS_OK;
    free_slots(stage);
    TRY(memory_check(SLOTS * bytes, "pinned memory for batches", "gather fewer rows at a time"));
    for (struct slot &slot : stage->slots) {
        if (!slot.done)
            CUDA_TRY(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
        CUDA_TRY(cudaHostAlloc(&slot.memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
        stage->bytes += bytes;
    }
    stage->capacity = count;
    return STATUS_OK;
}

/* ---- Filling a slot ---- */

struct fill {
    const struct stage_source *source;
    const struct stage_batch *batch;
    struct permutation permutation;
    uint8_t *rows;
    std::atomic<bool> failed;
    std::mutex lock; /* protects `failure` */
    struct failure failure;
};

static uint64_t number_of(const struct stage_source *source, uint64_t k)
{
    return source->kept ? source->kept[k] : k;
}

/* Copies `count` rows from row `k` on, which are consecutive in the input; without source->copy, one row. */
static enum status copy_rows(const struct stage_source *source, uint64_t k, uint64_t count, uint8_t *to)
{
    if (source->copy)
        return source->copy(source->context, number_of(source, k), count, to);
    memcpy(to, ops_row(source->ops, number_of(source, k)), source->row_bytes);
    return STATUS_OK;
}

/* Returns the row that is element `j` of a batch. */
static uint64_t element(const struct fill *fill, uint64_t j)
{
    const struct stage_batch *batch = fill->batch;
    return batch->numbers       ? batch->numbers[j]
           : batch->consecutive ? batch->first + j
                                : permutation_at(&fill->permutation, batch->first + j);
}

/* Returns how many elements from `j` on, row `k`, can be copied at once. */
static uint64_t run_of(const struct fill *fill, uint64_t k, uint64_t j, uint64_t end)
{
    const struct stage_source *source = fill->source;
    const uint64_t number = number_of(source, k);
    uint64_t run = 1;
    if (!source->copy || source->stride != source->row_bytes)
        return 1;
    while (j + run < end && element(fill, j + run) == k + run && number_of(source, k + run) == number + run)
        run++;
    return run;
}

static enum status fill_slice(const struct fill *fill, uint64_t begin, uint64_t end)
{
    const struct stage_source *source = fill->source;
    for (uint64_t j = begin, run; j < end; j += run) {
        const uint64_t k = element(fill, j);
        run = k >= source->resident ? run_of(fill, k, j, end) : 1;
        if (k >= source->resident)
            TRY(copy_rows(source, k, run, fill->rows + j * source->stride));
    }
    return STATUS_OK;
}

static void fill_task(void *context, uint64_t task, int thread)
{
    struct fill *fill = static_cast<struct fill *>(context);
    uint64_t begin = task * SLICE_ROWS, left = fill->batch->count - begin;
    (void)thread;
    if (fill->failed)
        return;
    enum status status = fill_slice(fill, begin, begin + (left < SLICE_ROWS ? left : SLICE_ROWS));
    if (status == STATUS_OK)
        return;
    std::lock_guard<std::mutex> guard(fill->lock);
    if (!fill->failed)
        fill->failure = status_save(status);
    fill->failed = true;
}

static enum status fill_slot(const struct stage *stage, struct slot *slot, const struct stage_batch *batch)
{
    const struct stage_source *source = &stage->source;
    if (slot->used)
        CUDA_TRY(cudaEventSynchronize(slot->done));
    slot->used = false;
    if (batch->numbers)
        memcpy(numbers_of(stage, slot), batch->numbers, batch->count * sizeof *batch->numbers);
    if (!source->streams)
        return STATUS_OK;
    struct fill fill = {
        source, batch, permutation_begin(batch->seed + batch->epoch, batch->rows), slot->memory, {false},
        {},     {}};
    stage_spread(source->threads, (batch->count + SLICE_ROWS - 1) / SLICE_ROWS, fill_task, &fill);
    if (fill.failed)
        return status_restore(&fill.failure);
    if (source->copy)
        return source->check ? source->check(source->context) : STATUS_OK;
    return ops_check_rows(source->ops);
}

/* ---- The thread that fills ahead ---- */

static void *run_ahead(void *context)
{
    struct stage *stage = static_cast<struct stage *>(context);
    struct relaxed_capture relaxed;
    std::unique_lock<std::mutex> guard(stage->lock);
    (void)cudaSetDevice(stage->source.device); /* an error is ignored; the next CUDA call would report it */
    for (;;) {
        stage->changed.wait(guard, [&] { return stage->stops || stage->job; });
        if (stage->stops)
            return NULL;
        struct slot *slot = stage->job;
        guard.unlock();
        slot->status = fill_slot(stage, slot, &slot->batch);
        if (slot->status != STATUS_OK)
            slot->failure = status_save(slot->status);
        guard.lock();
        stage->job = NULL;
        stage->changed.notify_all();
    }
}

static void wait_for_thread(struct stage *stage)
{
    std::unique_lock<std::mutex> guard(stage->lock);
    stage->changed.wait(guard, [&] { return !stage->job; });
}

void stage_ahead(struct stage *stage, const struct stage_batch *batch)
{
    if (!stage->started)
        stage->started = parallel_start(&stage->thread, run_ahead, stage) == 0;
    if (!stage->started || batch->count > stage->capacity)
        return;
    wait_for_thread(stage);
    struct slot *slot = &stage->slots[stage->next];
    stage->next = (stage->next + 1) % SLOTS;
    slot->batch = *batch;
    slot->ahead = true;
    std::lock_guard<std::mutex> guard(stage->lock);
    stage->job = slot;
    stage->changed.notify_all();
}

/* ---- The interface ---- */

enum status stage_reserve(struct stage *stage, uint64_t count)
{
    wait_for_thread(stage);
    return reserve(stage, count);
}

static bool same(const struct stage_batch *a, const struct stage_batch *b)
{
    return !b->numbers && a->rows == b->rows && a->seed == b->seed && a->epoch == b->epoch &&
           a->first == b->first && a->count == b->count && a->consecutive == b->consecutive;
}

/* Sets `*found` to the slot that has been filled ahead for `batch`, or to NULL. Forgets the other ones. */
static void find_ahead(struct stage *stage, const struct stage_batch *batch, struct slot **found)
{
    *found = NULL;
    for (struct slot &slot : stage->slots) {
        if (slot.ahead && same(&slot.batch, batch))
            *found = &slot;
        slot.ahead = false;
    }
}

enum status stage_take(struct stage *stage, const struct stage_batch *batch, struct stage_slot *taken)
{
    struct slot *slot;
    TRY(stage_reserve(stage, batch->count));
    find_ahead(stage, batch, &slot);
    if (slot) {
        if (slot->status != STATUS_OK)
            return status_restore(&slot->failure);
    } else {
        slot = &stage->slots[stage->next];
        stage->next = (stage->next + 1) % SLOTS;
        TRY(fill_slot(stage, slot, batch));
    }
    taken->rows = stage->source.streams ? slot->memory : NULL;
    taken->numbers = batch->numbers ? numbers_of(stage, slot) : NULL;
    taken->index = (uint32_t)(slot - stage->slots);
    return STATUS_OK;
}

enum status stage_done(struct stage *stage, const struct stage_slot *taken, cudaStream_t stream)
{
    struct slot *slot = &stage->slots[taken->index];
    CUDA_TRY(cudaEventRecord(slot->done, stream));
    slot->used = true;
    return STATUS_OK;
}

uint64_t stage_bytes(const struct stage *stage)
{
    return stage->bytes;
}

enum status stage_open(const struct stage_source *source, struct stage **stage)
{
    *stage = new (std::nothrow) struct stage();
    TRY(ALLOCATED(*stage, "out of memory"));
    (*stage)->source = *source;
    return STATUS_OK;
}

void stage_close(struct stage *stage)
{
    if (!stage)
        return;
    if (stage->started) {
        wait_for_thread(stage);
        stage->lock.lock();
        stage->stops = true;
        stage->changed.notify_all();
        stage->lock.unlock();
        (void)pthread_join(stage->thread, NULL);
    }
    free_slots(stage);
    for (struct slot &slot : stage->slots)
        destroy(slot.done);
    delete stage;
}
