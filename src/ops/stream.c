#include "ops/stream.h"

#include <stdlib.h>

#include "core/parallel.h"
#include "core/timer.h"
#include "ops/job.h"

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
