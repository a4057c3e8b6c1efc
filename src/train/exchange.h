/* An exchange adds up the gradients of all ranks of a training run. Engines call it between the backward pass
 * and the update; they know nothing else of ranks. docs/distributed.md describes the methods.
 *
 * A new method is one file and one word of METHODS (exchange.c). */
#ifndef FDSL_TRAIN_EXCHANGE_H
#define FDSL_TRAIN_EXCHANGE_H

#include <stddef.h>

#include "core/phase.h"
#include "core/portable.h"
#include "core/status.h"
#include "core/timer.h"

struct engine;
struct exchange;

struct exchange_method {
    const char *name; /* as in --sync and in the column `exchange` */

    /* Returns STATUS_OK if the method works here with this engine, else STATUS_UNAVAILABLE with the reason.
     */
    enum status (*probe)(const struct engine *engine);

    /* Prepares `exchange`, whose state is NULL. The caller closes it, also after a failure. */
    enum status (*open)(struct exchange *exchange);
    void (*close)(struct exchange *exchange);

    /* Collective: replaces `gradients` by the sums over all ranks. All ranks get the same bits, and repeated
     * runs get the same bits. `count` must be the same on all ranks and in all calls. `status` is the status
     * of this rank's step so far: if the step failed on any rank, sum() returns the same failure on all
     * ranks, and the gradients are undefined. Only the thread that called the engine may call sum(). */
    enum status (*sum)(struct exchange *exchange, enum status status, float *gradients, size_t count);
};

struct exchange {
    const struct exchange_method *method;
    void *state;    /* of the method */
    double spent_s; /* seconds in sum(), including waiting for other ranks; callers reset it to 0 */
};

/* Completes the gradients of a step. Without an exchange (one rank), returns `status`. */
static inline enum status exchange_sum(struct exchange *exchange, enum status status, float *gradients,
                                       size_t count)
{
    if (!exchange)
        return status;
    range_push(RANGE_EXCHANGE);
    double begin_s = timer_now_s();
    status = exchange->method->sum(exchange, status, gradients, count);
    exchange->spent_s += timer_now_s() - begin_s;
    range_pop();
    return status;
}

FDSL_C_BEGIN

/* The names of --sync: "auto" and all methods, NULL-terminated. */
extern const char *const exchange_names[];

/* Finds the method number `sync` of exchange_names; number 0, "auto", means the first method that works here
 * with this engine. STATUS_UNAVAILABLE with the reason of each method if there is none. */
enum status exchange_find(int sync, const struct engine *engine, const struct exchange_method **method);

/* Adds up in host memory over MPI (exchange_mpi.c). */
extern const struct exchange_method exchange_mpi;

FDSL_C_END

#endif
