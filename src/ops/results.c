/* What variants share: access to the rows, the results of a run (sizes, and arrays in host memory), rows with
 * equal hashes, and the memory bandwidth. libfdsl links this file, too. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "machine/guard.h"
#include "machine/host.h"
#include "core/parallel.h"
#include "core/timer.h"
#include "ops/job.h"

/* ---- The rows ---- */

const uint8_t *ops_span(const struct ops *ops, uint64_t position, uint64_t *count)
{
    size_t low = 0, high = ops->part_count; /* invariant: parts[low].first <= position < parts[high].first */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        *(ops->parts[middle].first <= position ? &low : &high) = middle;
    }
    uint64_t at = position - ops->parts[low].first;
    *count = ops->parts[low].count - at;
    return ops->parts[low].rows + at * ops->row_bytes;
}

enum status ops_check_rows(const struct ops *ops)
{
    if (!ops->set || !guard_filled())
        return STATUS_OK;
    TRY(embeddings_check_files(ops->set));
    return status_set(STATUS_FAILED, "a file of the set could not be read: input/output error");
}

/* ---- Sizes ---- */

size_t ops_array_bytes(const struct ops *ops, enum ops_array array)
{
    const bool *steps = ops->steps;
    bool values = steps[OPS_COMPACT] || steps[OPS_CONVERT] || ops->sample;
    switch (array) {
    case OPS_KEPT:
        return steps[OPS_MASK] || steps[OPS_DEDUP];
    case OPS_ORDER:
        return steps[OPS_COMPACT] || steps[OPS_PERMUTE] ? sizeof(uint64_t) : 0;
    case OPS_VALUES:
        return values ? ops_value_bytes(ops->format.to, ops->format.columns) : 0;
    case OPS_SCALES:
        return values ? ops_scale_bytes(ops->format.to, ops->format.columns) : 0;
    default:
        return steps[OPS_HASH] ? sizeof(uint64_t) : 0;
    }
}

uint64_t ops_outputs(const struct ops *ops, uint64_t kept)
{
    uint64_t outputs = ops->steps[OPS_COMPACT] ? kept : ops->count;
    return ops->sample && ops->sample < outputs ? ops->sample : outputs;
}

struct ops_draw ops_draw(const struct ops *ops, uint64_t number, uint64_t kept)
{
    uint64_t rows = ops->steps[OPS_COMPACT] ? kept : ops->count;
    uint64_t batches = ops->sample && ops->sample <= rows ? rows / ops->sample : 1;
    return (struct ops_draw){permutation_begin(ops->seed + number / batches, rows),
                             number % batches * ops->sample};
}

double ops_least_bytes(const struct ops *ops, uint64_t kept)
{
    uint64_t outputs = ops_outputs(ops, kept);
    bool all = ops->steps[OPS_MASK] || ops->steps[OPS_DEDUP];
    bool some = ops_array_bytes(ops, OPS_VALUES) || ops->steps[OPS_HASH];
    double bytes = (double)(all ? ops->count : some ? outputs : 0) * (double)ops->row_bytes;
    for (int array = 0; array < OPS_ARRAYS; array++)
        bytes += (double)(array == OPS_KEPT ? ops->count : outputs) *
                 (double)ops_array_bytes(ops, (enum ops_array)array);
    return bytes;
}

/* ---- Arrays in host memory ---- */

#define HUGE_PAGE ((size_t)2 << 20)

void *ops_allocate(size_t bytes)
{
    bool large = bytes >= HUGE_PAGE;
    size_t unit = large ? HUGE_PAGE : OPS_ALIGNMENT;
    if (bytes > SIZE_MAX - unit)
        return NULL;
    bytes = bytes ? (bytes + unit - 1) / unit * unit : unit;
    void *memory = aligned_alloc(unit, bytes);
    if (memory && large)
        madvise(memory, bytes, MADV_HUGEPAGE); /* only a hint */
    return memory;
}

/* Returns the bytes of all arrays. If `results` is not NULL, also allocates the arrays, and returns
 * UINT64_MAX if memory runs out. */
static uint64_t each_array(const struct ops *ops, struct ops_results *results)
{
    uint64_t outputs = ops_outputs(ops, ops->count), count = ops->count;
    bool dedup = ops->steps[OPS_DEDUP];
    const uint64_t bytes[] = {
        count * ops_array_bytes(ops, OPS_KEPT),
        outputs * ops_array_bytes(ops, OPS_ORDER),
        outputs * ops_array_bytes(ops, OPS_VALUES),
        outputs * ops_array_bytes(ops, OPS_SCALES),
        outputs * ops_array_bytes(ops, OPS_HASHES),
        ops->steps[OPS_COMPACT] ? count * sizeof(uint64_t) : 0,
        dedup ? duplicates_slots(count) * sizeof(uint64_t) : 0,
        dedup ? count * sizeof(uint64_t) : 0,
    };
    void *arrays[COUNT_OF(bytes)] = {NULL};
    uint64_t sum = 0;
    bool complete = true;
    for (size_t i = 0; i < COUNT_OF(bytes); i++) {
        if (results && bytes[i])
            complete &= (arrays[i] = ops_allocate(bytes[i])) != NULL;
        sum += bytes[i];
    }
    if (results)
        *results = (struct ops_results){.kept = arrays[0],
                                        .order = arrays[1],
                                        .values = arrays[2],
                                        .scales = arrays[3],
                                        .hashes = arrays[4],
                                        .rows = arrays[5],
                                        .table = arrays[6],
                                        .row_hashes = arrays[7]};
    return complete ? sum : UINT64_MAX;
}

enum status ops_results_open(const struct ops *ops, struct ops_results *results)
{
    TRY(memory_check(each_array(ops, NULL), "the results", "use fewer or shorter rows"));
    uint64_t bytes = each_array(ops, results);
    if (bytes == UINT64_MAX)
        return status_set(STATUS_EXHAUSTED, "out of memory for the results; use fewer or shorter rows");
    results->summary.number = UINT64_MAX;
    results->summary.memory_bytes = bytes;
    return STATUS_OK;
}

void ops_results_free(struct ops_results *results)
{
    free(results->kept);
    free(results->order);
    free(results->values);
    free(results->scales);
    free(results->hashes);
    free(results->rows);
    free(results->table);
    free(results->row_hashes);
}

enum status ops_results_fetch(const struct ops *ops, const struct ops_results *results,
                              struct ops_fetch *fetch)
{
    const void *const arrays[OPS_ARRAYS] = {results->kept, results->order, results->values, results->scales,
                                            results->hashes};
    size_t bytes = ops_array_bytes(ops, fetch->array);
    fetch->summary = results->summary;
    if (fetch->to && bytes && fetch->count)
        memcpy(fetch->to, (const uint8_t *)arrays[fetch->array] + fetch->first * bytes, fetch->count * bytes);
    return STATUS_OK;
}

/* ---- Duplicates ---- */

/* A hash table with open addressing. An empty slot contains 0, any other slot a row number plus 1. Threads
 * insert rows concurrently. After all insertions, whatever their order, the slot of a hash contains the
 * lowest row with this hash. */
#define TASK_ROWS 65536 /* rows or slots per task */

struct duplicates_job {
    const uint64_t *hashes;
    uint64_t count, slots;
    uint8_t *kept;
    uint64_t *table;
};

static uint64_t end_of(uint64_t task, uint64_t count)
{
    return (task + 1) * TASK_ROWS < count ? (task + 1) * TASK_ROWS : count;
}

static void clear_slots(void *context, uint64_t task, int thread)
{
    const struct duplicates_job *job = context;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < end_of(task, job->slots); i++)
        job->table[i] = 0;
}

/* A row may replace another row in a slot only if both have the same hash. A search for a hash can therefore
 * stop at the first slot that contains this hash. */
static void insert(const struct duplicates_job *job, uint64_t row)
{
    uint64_t mine = row + 1, hash = job->hashes[row];
    for (uint64_t slot = hash & (job->slots - 1);; slot = (slot + 1) & (job->slots - 1)) {
        uint64_t found = 0;
        if (__atomic_compare_exchange_n(&job->table[slot], &found, mine, 0, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
            return;
        if (job->hashes[found - 1] != hash)
            continue;
        while (mine < found && !__atomic_compare_exchange_n(&job->table[slot], &found, mine, 0,
                                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        return;
    }
}

static void insert_rows(void *context, uint64_t task, int thread)
{
    const struct duplicates_job *job = context;
    (void)thread;
    for (uint64_t row = task * TASK_ROWS; row < end_of(task, job->count); row++)
        if (job->kept[row])
            insert(job, row);
}

static void drop_rows(void *context, uint64_t task, int thread)
{
    const struct duplicates_job *job = context;
    (void)thread;
    for (uint64_t row = task * TASK_ROWS; row < end_of(task, job->count); row++) {
        uint64_t slot = job->hashes[row] & (job->slots - 1);
        if (!job->kept[row])
            continue;
        while (job->hashes[job->table[slot] - 1] != job->hashes[row])
            slot = (slot + 1) & (job->slots - 1);
        job->kept[row] = job->table[slot] == row + 1;
    }
}

void duplicates_drop(int threads, const uint64_t *hashes, uint64_t count, uint8_t *kept, uint64_t *table)
{
    struct duplicates_job job = {hashes, count, duplicates_slots(count), kept, table};
    parallel_for(threads, (job.slots + TASK_ROWS - 1) / TASK_ROWS, clear_slots, &job);
    parallel_for(threads, (count + TASK_ROWS - 1) / TASK_ROWS, insert_rows, &job);
    parallel_for(threads, (count + TASK_ROWS - 1) / TASK_ROWS, drop_rows, &job);
}

/* ---- Memory bandwidth ---- */

enum { REPETITIONS = 4, ARRAYS = 3 };
#define ARRAY_MIN ((uint64_t)1 << 13) /* elements */
#define ARRAY_MAX ((uint64_t)1 << 24)

struct triad {
    double *arrays[ARRAYS];
    uint64_t count, tasks;
};

static void fill(void *context, uint64_t task, int thread)
{
    const struct triad *triad = context;
    (void)thread;
    for (uint64_t i = triad->count * task / triad->tasks; i < triad->count * (task + 1) / triad->tasks; i++)
        for (int array = 0; array < ARRAYS; array++)
            triad->arrays[array][i] = array;
}

static void add(void *context, uint64_t task, int thread)
{
    const struct triad *triad = context;
    double *restrict a = triad->arrays[0];
    const double *restrict b = triad->arrays[1], *restrict c = triad->arrays[2];
    (void)thread;
    for (uint64_t i = triad->count * task / triad->tasks; i < triad->count * (task + 1) / triad->tasks; i++)
        a[i] = b[i] + 3 * c[i];
}

enum status stream_triad(int threads, uint64_t bytes, double *bytes_per_s)
{
    struct triad triad = {.count = bytes / (ARRAYS * sizeof(double)), .tasks = (uint64_t)threads};
    triad.count = triad.count < ARRAY_MIN ? ARRAY_MIN : triad.count > ARRAY_MAX ? ARRAY_MAX : triad.count;
    size_t all_bytes = triad.count * ARRAYS * sizeof(double);
    FREED double *memory = ops_allocate(all_bytes);
    TRY(ALLOCATED(memory, "out of memory to measure the memory bandwidth"));
    for (int array = 0; array < ARRAYS; array++)
        triad.arrays[array] = memory + (uint64_t)array * triad.count;
    parallel_for(threads, triad.tasks, fill, &triad);
    *bytes_per_s = 0;
    for (int i = 0; i < REPETITIONS; i++) {
        double begin_s = timer_now_s();
        parallel_for(threads, triad.tasks, add, &triad);
        double rate = (double)all_bytes / (timer_now_s() - begin_s);
        *bytes_per_s = rate > *bytes_per_s ? rate : *bytes_per_s;
    }
    return STATUS_OK;
}
