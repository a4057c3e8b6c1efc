/* An exchange adds up the gradients of all ranks of a training run. Engines pass it their gradients during or
 * after the backward pass, before the update. Otherwise, an engine only knows its share of each batch
 * (train_share()). docs/distributed.md describes the methods.
 *
 * To add a method, write one file and add its name to METHODS (exchange.c). */
#ifndef FDSL_TRAIN_EXCHANGE_H
#define FDSL_TRAIN_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>

#include "core/phase.h"
#include "core/portable.h"
#include "core/status.h"
#include "core/timer.h"

struct engine;
struct exchange;
struct exchange_update;
struct model;
struct optimizer;

/* A method implements either sum(), for gradients in host memory, or begin(), end() and settle(), for
 * gradients in device memory. The functions of the other group are NULL. */
struct exchange_method {
    const char *name; /* as in --sync and in the column `exchange` */
    bool rounds;      /* sends gradients as bf16. --sync auto never selects such a method */
    bool updates;     /* also updates the parameters. --sync auto never selects such a method */

    /* Returns STATUS_OK if the method can work with this engine in this build, else STATUS_UNAVAILABLE with
     * the reason. Not collective. */
    enum status (*probe)(const struct engine *engine);

    /* Collective: prepares `exchange`, whose state is NULL. All ranks return the same status.
     * STATUS_UNAVAILABLE with the reason if these ranks cannot use the method together. The caller closes the
     * exchange, even after a failure. */
    enum status (*open)(struct exchange *exchange);
    void (*close)(struct exchange *exchange);

    /* Collective: replaces `gradients` by the sums over all ranks. All ranks get the same bits, and repeated
     * runs get the same bits. `count` must be the same on all ranks and in all calls. `status` is the status
     * of this rank's step so far. If the step failed on any rank, sum() returns the same failure on all
     * ranks, and the gradients are undefined. Only the thread that called the engine may call sum(). */
    enum status (*sum)(struct exchange *exchange, enum status status, float *gradients, size_t count);

    /* The gradients of a step become final part by part, and each part is exchanged while the engine computes
     * the others. begin() passes a part, which is final when the work that is enqueued on `stream` (a
     * cudaStream_t) is done. end() makes `stream` wait for the sums of all parts so far. All ranks must pass
     * the same parts in the same order. The address of each part is a multiple of 16 bytes. For an engine
     * with GRADIENTS_IN_GRAPH, `stream` may be in capture. A method that updates parameters updates those of
     * the part, and leaves the gradients of this rank unchanged. Work that is enqueued after begin() must not
     * use the old parameters of the part. */
    enum status (*begin)(struct exchange *exchange, float *gradients, size_t count, void *stream);
    enum status (*end)(struct exchange *exchange, void *stream);

    /* Call when all enqueued work is done. Adds the waiting time of the steps since the last call to spent_s.
     * STATUS_FAILED with the rank if a rank did not answer. */
    enum status (*settle)(struct exchange *exchange);
};

struct exchange {
    const struct exchange_method *method;
    void *state;  /* state of the method */
    int device;   /* CUDA device, for gradients in device memory */
    size_t count; /* maximum number of gradients per step; 0 if it is known only when sum() is called */
    const struct exchange_update *update; /* set by the engine, for a method that updates parameters */
    /* The model, if some ranks have their gradients in host memory and others in device memory; otherwise
     * NULL. If it is set, all engines pass gradients in the layout of the model's arena. */
    const struct model *mixed;
    /* Seconds in which training waited for the exchange, including waiting for other ranks; NaN: not
     * known. Callers reset it to 0. */
    double spent_s;
};

/* Returns whether the exchange updates the parameters and holds the moments of this rank's share only
 * (exchange_shares.h). False without an exchange. */
static inline bool exchange_updates(const struct exchange *exchange)
{
    return exchange && exchange->method->updates;
}

/* Replaces the gradients of a step by their sums over all ranks. Without an exchange (one rank), only returns
 * `status`. */
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

/* Calls method->settle(). Does nothing if `exchange` is NULL. */
static inline enum status exchange_settle(struct exchange *exchange)
{
    return exchange ? exchange->method->settle(exchange) : STATUS_OK;
}

FDSL_C_BEGIN

/* The names of --sync: "auto" and all methods, NULL-terminated. */
extern const char *const exchange_names[];

/* Returns STATUS_OK if method number `sync` of exchange_names can work with this engine in this build; "auto"
 * means any method. STATUS_UNAVAILABLE with the reason of each method if none can. STATUS_USAGE if the method
 * can work, but not with this optimizer. Not collective. */
enum status exchange_probe(int sync, const struct engine *engine, const struct optimizer *optimizer);

/* Returns whether method number `sync` of exchange_names sends gradients as bf16. */
bool exchange_rounds(int sync);

/* Collective: opens method number `sync`, or, with "auto", the first method that works with this engine on
 * these ranks. The caller has set the members device, count and mixed of `exchange`. If `mixed` is not NULL,
 * only mpi works. The caller closes the exchange, even after a failure. */
enum status exchange_open(int sync, const struct engine *engine, struct exchange *exchange);

/* Closes an exchange. Does nothing if it was not opened. */
void exchange_close(struct exchange *exchange);

/* Adds up gradients in host memory over MPI (exchange_mpi.c). */
extern const struct exchange_method exchange_mpi;

/* Add up gradients that are in device memory (cuda/train/exchange.cu). exchange_staged is also named `mpi`;
 * it copies the gradients through pinned host memory. */
extern const struct exchange_method exchange_peer, exchange_peer_bf16, exchange_peer_fused, exchange_nccl,
    exchange_staged;

FDSL_C_END

#endif
