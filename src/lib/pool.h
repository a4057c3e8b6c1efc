/* The CPU threads of a generator: libfdsl's implementation of core/parallel.h.
 *
 * Threads sleep between calls, block all signals, and belong to one generator, so generators do not disturb
 * each other or the OpenMP runtime of the process. */
#ifndef FDSL_LIB_POOL_H
#define FDSL_LIB_POOL_H

#include "core/status.h"

struct pool;

/* Starts threads - 1 threads; the caller of parallel_for() is the remaining thread. The caller closes the
 * pool, in the process that opened it. STATUS_FAILED if threads cannot be started. */
enum status pool_open(int threads, struct pool **pool);

/* Ends the threads; accepts NULL. */
void pool_close(struct pool *pool);

/* Sets the pool that parallel_for() uses in this thread; NULL: none. */
void pool_use(struct pool *pool);

#endif
