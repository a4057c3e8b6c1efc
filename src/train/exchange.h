/* An exchange adds up the gradients of all ranks of a training run. Engines pass it their gradients during or
 * after the backward pass, before the update. Otherwise, an engine only knows its share of each batch
 * (train_share()). docs/distributed.md describes the methods.
 *
 * To add a method, define it in one file and add its name to METHODS (exchange.c). */
#ifndef FDSL_TRAIN_EXCHANGE_H
#define FDSL_TRAIN_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/phase.h"
#include "core/portable.h"
#include "core/status.h"
#include "core/timer.h"
#include "train/model.h"
#include "train/optimizer.h"

struct comm_group;
struct comm_reducer;
struct engine;
struct exchange;
struct exchange_update;

/* A method implements either sum(), for gradients in host memory, or begin(), end() and settle(), for
 * gradients in device memory. The functions of the other group are NULL. */
struct exchange_method {
    const char *name; /* as in --sync and in the column `exchange` */
    bool rounds;      /* sends gradients as bf16. --sync auto never selects such a method */
    bool updates;     /* also updates the parameters. --sync auto never selects such a method */
    bool named;       /* --sync auto never selects it */
    bool groups;      /* works in a group of ranks (exchange.group) */

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

    /* Collective, like sum(), for other values that the engine needs during a step: array number `index` of
     * the step, which has the same number of values on all ranks and in all steps. For gradients in device
     * memory, use begin() and end(). */
    enum status (*sum_part)(struct exchange *exchange, size_t index, enum status status, float *values,
                            size_t count);

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
    const struct comm_group *group;       /* the ranks that exchange; NULL: all ranks */
    const struct exchange_update *update; /* set by the engine, for a method that updates parameters */
    /* The model, if some ranks have their gradients in host memory and others in device memory; otherwise
     * NULL. If it is set, all engines pass gradients in the layout of the model's arena. */
    const struct model *mixed;
    /* Seconds in which training waited for the exchange, including waiting for other ranks; NaN: not
     * known. Callers reset it to 0. */
    double spent_s;
};

/* Returns whether the exchange updates the parameters and holds the moments of this rank's share only
 * (exchange_share_at()). False without an exchange. */
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

/* Calls method->sum_part() and measures its time. */
static inline enum status exchange_part_sum(struct exchange *exchange, size_t index, enum status status,
                                            float *values, size_t count)
{
    range_push(RANGE_EXCHANGE);
    double begin_s = timer_now_s();
    status = exchange->method->sum_part(exchange, index, status, values, count);
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

/* Returns whether the method rounds what it adds up, or updates parameters: it cannot add up other values. */
bool exchange_changes(int sync);

/* Collective: opens method number `sync`, or, with "auto", the first method that works with this engine on
 * these ranks. The caller has set the members device, count, group and mixed of `exchange`. If `mixed` is not
 * NULL, only mpi works. The caller closes the exchange, even after a failure. */
enum status exchange_open(int sync, const struct engine *engine, struct exchange *exchange);

/* Closes an exchange. Does nothing if it was not opened. */
void exchange_close(struct exchange *exchange);

/* Add up gradients that are in device memory (cuda/train/exchange.cu). exchange_staged is also named `mpi`;
 * it copies the gradients through pinned host memory; exchange_mpi_cuda passes their addresses to MPI. */
extern const struct exchange_method exchange_peer, exchange_peer_bf16, exchange_peer_fused, exchange_nccl,
    exchange_staged, exchange_mpi_cuda;

FDSL_C_END

/* ---- Gradients in pieces, over MPI ----
 *
 * Adds up gradients over MPI. The gradients become final part by part during the backward pass, and each part
 * is added up in pieces of limited size. CPU and GPU ranks that train together both use this file, so that
 * they exchange the same pieces in the same order. Not thread safe. */

#define EXCHANGE_PART_VALUES  ((size_t)1 << 18) /* minimum values per part; the last may have fewer */
#define EXCHANGE_PIECE_VALUES ((size_t)1 << 18) /* maximum values that are added up at a time: 1 MiB */

/* Call after the backward pass of a layer. In the model's arena, the gradients from this layer's first index
 * to `end` - 1 are final and not yet exchanged; they are the candidate for the next part. Returns true if the
 * candidate is large enough, or if this layer is the last one of the backward pass. Sets `*first` to the
 * index where the candidate begins. */
static inline bool exchange_is_part(const struct model *model, const struct layer *layer, size_t end,
                                    size_t *first)
{
    bool last = layer == model->layers; /* the last one of the backward pass */
    *first = last ? 0 : layer->weight;
    return last || (layer->weight_values && end - *first >= EXCHANGE_PART_VALUES);
}

/* The reducers of all pieces of a step. A zeroed struct has no pieces. */
struct exchange_pieces {
    struct comm_reducer **reducers;
    size_t count;
    const struct comm_group *group; /* the ranks that exchange; NULL: all ranks */
};

FDSL_C_BEGIN

/* Collective, like comm_reduce(): adds up the `count` values of piece number `index`. All ranks must pass the
 * same pieces in the same order in every step. `status` is the status of this rank so far; if it is a failure
 * on any rank, all ranks return it, and the values are undefined. */
enum status exchange_piece_sum(struct exchange_pieces *pieces, size_t index, enum status status,
                               float *values, size_t count);

/* Collective: adds up all gradients of a step. `gradients` has the layout of the model's arena. Divides this
 * array into the same parts and pieces as an engine on a GPU. */
enum status exchange_pieces_sum(struct exchange_pieces *pieces, const struct model *model, enum status status,
                                float *gradients);

void exchange_pieces_free(struct exchange_pieces *pieces);

FDSL_C_END

/* ---- Shares of the ranks, for methods that update parameters ----
 *
 * Divides the parameters among the ranks, for an exchange that updates them (exchange_method.updates). A
 * chunk is EXCHANGE_CHUNK_VALUES consecutive values of the arena. With N ranks, rank r updates chunks r, r +
 * N, r + 2 N, ... So any part of the arena is divided about equally among the ranks. Each rank has the
 * moments of its own chunks only, stored consecutively. */

#define EXCHANGE_CHUNK_VALUES 128             /* 512 bytes: one load of a warp */
#define EXCHANGE_GROUP_VALUES MODEL_ALIGNMENT /* values per entry of exchange_update.groups */

/* The arrays that an exchange updates, in device memory. The engine sets them before its first step. */
struct exchange_update {
    float *gradients, *parameters; /* arenas */
    float *m, *v;                  /* moments of this rank's chunks: exchange_share_room() values each */
    void *rounded; /* the parameters in bf16, as an arena whose size is a multiple of 4; NULL: none */
    /* Update rules: one entry per EXCHANGE_GROUP_VALUES parameters. NULL: the same rule for all tensors, with
     * weight decay. */
    const struct tensor_update *groups;
    const struct update *update; /* update of the current step */
};

/* Returns how many of the first `end` values of an arena belong to a rank. */
FDSL_HD size_t exchange_share_before(size_t end, uint32_t rank, uint32_t ranks)
{
    const size_t chunk = EXCHANGE_CHUNK_VALUES, chunks = end / chunk, rest = end % chunk;
    const size_t own = (chunks + ranks - 1 - rank) / ranks;
    return own * chunk + (chunks % ranks == rank ? rest : 0);
}

/* Returns the index in the arena of a rank's value number `i`. */
FDSL_HD size_t exchange_share_at(size_t i, uint32_t rank, uint32_t ranks)
{
    const size_t chunk = EXCHANGE_CHUNK_VALUES;
    return (i / chunk * ranks + rank) * chunk + i % chunk;
}

/* Returns the length of the arrays `m` and `v` of a rank, in values. The length is the same on all ranks, and
 * a multiple of EXCHANGE_CHUNK_VALUES. */
FDSL_HD size_t exchange_share_room(size_t values, uint32_t ranks)
{
    const size_t chunks = (values + EXCHANGE_CHUNK_VALUES - 1) / EXCHANGE_CHUNK_VALUES;
    return (chunks + ranks - 1) / ranks * EXCHANGE_CHUNK_VALUES;
}

FDSL_C_BEGIN

/* Copies this rank's chunks of an arena to `own`, which has exchange_share_room() values. */
void exchange_share_take(const float *arena, size_t values, float *own);

/* Collective, like comm_agree(): fills `arena` from the chunks of all ranks. `status` is the status of this
 * rank so far. */
enum status exchange_share_collect(enum status status, const float *own, size_t values, float *arena);

/* ---- Ranks that meet by an ncclUniqueId (src/lib/ranks.c) ---- */

/* Joins the ranks that have the same id, of 128 bytes. exchange_nccl_gather() gathers `bytes` bytes of each
 * rank in `all` of rank 0; exchange_nccl_spread() copies those of rank 0 to all ranks. All are collective,
 * and wait. The caller leaves, even after a failure, which leave() allows with NULL. STATUS_UNAVAILABLE
 * without NCCL. */
enum status exchange_nccl_join(int device, const void *id, int rank, int ranks, void **state);
enum status exchange_nccl_gather(void *state, const void *mine, size_t bytes, void *all);
enum status exchange_nccl_spread(void *state, void *data, size_t bytes);
void exchange_nccl_leave(void *state);

FDSL_C_END

#endif
