/* A hash table with open addressing. An empty slot contains 0, any other slot a row number plus 1. Threads
 * insert rows concurrently. After all insertions, whatever their order, the slot of a hash contains the
 * lowest row with this hash. */
#include "ops/duplicates.h"

#include "core/parallel.h"

#define TASK_ROWS 65536 /* rows or slots per task */

struct job {
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
    const struct job *job = context;
    (void)thread;
    for (uint64_t i = task * TASK_ROWS; i < end_of(task, job->slots); i++)
        job->table[i] = 0;
}

/* A row may replace another row in a slot only if both have the same hash. A search for a hash can therefore
 * stop at the first slot that contains this hash. */
static void insert(const struct job *job, uint64_t row)
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
    const struct job *job = context;
    (void)thread;
    for (uint64_t row = task * TASK_ROWS; row < end_of(task, job->count); row++)
        if (job->kept[row])
            insert(job, row);
}

static void drop_rows(void *context, uint64_t task, int thread)
{
    const struct job *job = context;
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
    struct job job = {hashes, count, duplicates_slots(count), kept, table};
    parallel_for(threads, (job.slots + TASK_ROWS - 1) / TASK_ROWS, clear_slots, &job);
    parallel_for(threads, (count + TASK_ROWS - 1) / TASK_ROWS, insert_rows, &job);
    parallel_for(threads, (count + TASK_ROWS - 1) / TASK_ROWS, drop_rows, &job);
}
