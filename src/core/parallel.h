/* Runs independent tasks on several CPU threads.
 *
 * The program uses OpenMP (core/parallel.c). libfdsl replaces parallel.c with lib/fdsl.c, which starts its
 * own threads. libfdsl therefore needs no OpenMP runtime, and works in processes that use any OpenMP runtime.
 */
#ifndef FDSL_CORE_PARALLEL_H
#define FDSL_CORE_PARALLEL_H

#include <stdint.h>

#include "core/portable.h"

FDSL_C_BEGIN

/* One task. `thread` is 0 to threads - 1; tasks with the same `thread` never run at the same time, so
 * `thread` can select a buffer. */
typedef void parallel_task(void *context, uint64_t task, int thread);

/* Calls task(context, 0 .. count - 1, ...) on up to `threads` threads, in any order, and returns when all
 * calls have returned. Not reentrant: a task must not call parallel_for(). */
void parallel_for(int threads, uint64_t count, parallel_task *task, void *context);

FDSL_C_END

#endif
