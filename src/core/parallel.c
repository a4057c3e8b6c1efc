#include "core/parallel.h"

#ifdef _OPENMP
#include <omp.h>

void parallel_for(int threads, uint64_t count, parallel_task *task, void *context)
{
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (uint64_t i = 0; i < count; i++)
        task(context, i, omp_get_thread_num());
}

#else

void parallel_for(int threads, uint64_t count, parallel_task *task, void *context)
{
    (void)threads;
    for (uint64_t i = 0; i < count; i++)
        task(context, i, 0);
}

#endif
