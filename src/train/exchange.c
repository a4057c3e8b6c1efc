#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "machine/comm.h"
#include "train/engine.h"
#include "train/exchange.h"

/* ---- Gradients in pieces, over MPI ---- */

/* Opens the reducer of a piece, unless an earlier step has opened it. Collective. */
static enum status open_piece(struct exchange_pieces *pieces, size_t index, enum status status, size_t count)
{
    if (index >= pieces->count) {
        struct comm_reducer **longer = realloc(pieces->reducers, (index + 1) * sizeof *longer);
        if (longer) {
            for (; pieces->count <= index; pieces->count++)
                longer[pieces->count] = NULL;
            pieces->reducers = longer;
        } else if (status == STATUS_OK)
            status = status_set(STATUS_EXHAUSTED, "out of memory for the exchange");
    } else if (pieces->reducers[index])
        return STATUS_OK;
    TRY(comm_group_agree(pieces->group, status));
    return comm_reducer_open_in(pieces->group, count, &pieces->reducers[index]);
}

enum status exchange_piece_sum(struct exchange_pieces *pieces, size_t index, enum status status,
                               float *values, size_t count)
{
    TRY(open_piece(pieces, index, status, count));
    return comm_reduce(pieces->reducers[index], status, values);
}

enum status exchange_pieces_sum(struct exchange_pieces *pieces, const struct model *model, enum status status,
                                float *gradients)
{
    size_t index = 0, first, end = model->arena_values;
    for (uint32_t i = model->layer_count; i-- > 0;) {
        if (!exchange_is_part(model, &model->layers[i], end, &first))
            continue;
        for (size_t at = first; at < end; at += EXCHANGE_PIECE_VALUES) {
            size_t left = end - at;
            TRY(exchange_piece_sum(pieces, index++, status, gradients + at,
                                   left < EXCHANGE_PIECE_VALUES ? left : EXCHANGE_PIECE_VALUES));
        }
        end = first;
    }
    return STATUS_OK;
}

void exchange_pieces_free(struct exchange_pieces *pieces)
{
    for (size_t i = 0; i < pieces->count; i++)
        comm_reducer_close(pieces->reducers[i]);
    free(pieces->reducers);
    *pieces = (struct exchange_pieces){0};
}

/* ---- Shares of the ranks, for methods that update parameters ---- */

void exchange_share_take(const float *arena, size_t values, float *own)
{
    const uint32_t rank = (uint32_t)comm_rank(), ranks = (uint32_t)comm_size();
    const size_t count = exchange_share_before(values, rank, ranks);
    memset(own, 0, exchange_share_room(values, ranks) * sizeof *own);
    for (size_t i = 0; i < count; i++)
        own[i] = arena[exchange_share_at(i, rank, ranks)];
}

/* Copies the chunks of a rank to an arena. */
static void put_share(const float *own, uint32_t rank, size_t values, float *arena)
{
    const uint32_t ranks = (uint32_t)comm_size();
    const size_t count = exchange_share_before(values, rank, ranks);
    for (size_t i = 0; i < count; i++)
        arena[exchange_share_at(i, rank, ranks)] = own[i];
}

/* Gathers the chunks of all ranks in `all`, which has `room` values per rank. */
static enum status gather(const float *own, size_t room, float *all, size_t *begins)
{
    for (int i = 0; i <= comm_size(); i++)
        begins[i] = (size_t)i * room;
    memcpy(all + begins[comm_rank()], own, room * sizeof *all);
    return comm_share_parts(all, begins);
}

enum status exchange_share_collect(enum status status, const float *own, size_t values, float *arena)
{
    const size_t ranks = (size_t)comm_size(), room = exchange_share_room(values, (uint32_t)ranks);
    FREED float *all = malloc(ranks * room * sizeof *all);
    FREED size_t *begins = malloc((ranks + 1) * sizeof *begins);
    if (status == STATUS_OK)
        status = ALLOCATED(all && begins, "out of memory for the moments of all ranks");
    TRY(comm_agree(status));
    TRY(gather(own, room, all, begins));
    for (size_t i = 0; i < ranks; i++)
        put_share(all + i * room, (uint32_t)i, values, arena);
    return STATUS_OK;
}

/* ---- The method mpi: gradients in host memory ---- */

static enum status mpi_probe(const struct engine *engine)
{
    return engine->gradients_in == GRADIENTS_IN_HOST
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE,
                            "the gradients of this variant are not in host memory; use train-naive or "
                            "train-omp");
}

/* The reducers are opened by the first sum(), which knows the number of gradients. */
static enum status mpi_open(struct exchange *exchange)
{
    struct exchange_pieces *pieces = exchange->state = calloc(1, sizeof *pieces);
    if (pieces)
        pieces->group = exchange->group;
    return comm_agree(ALLOCATED(pieces, "out of memory"));
}

static void mpi_close(struct exchange *exchange)
{
    if (exchange->state)
        exchange_pieces_free(exchange->state);
    free(exchange->state);
}

static enum status mpi_sum(struct exchange *exchange, enum status status, float *gradients, size_t count)
{
    return exchange->mixed ? exchange_pieces_sum(exchange->state, exchange->mixed, status, gradients)
                           : exchange_piece_sum(exchange->state, 0, status, gradients, count);
}

/* Piece 0 has the gradients. With exchange->mixed they are in several pieces, and no engine uses this. */
static enum status mpi_sum_part(struct exchange *exchange, size_t index, enum status status, float *values,
                                size_t count)
{
    return exchange_piece_sum(exchange->state, 1 + index, status, values, count);
}

/* Adds up gradients in host memory over MPI. */
static const struct exchange_method exchange_mpi = {.name = "mpi",
                                                    .groups = true,
                                                    .probe = mpi_probe,
                                                    .open = mpi_open,
                                                    .close = mpi_close,
                                                    .sum = mpi_sum,
                                                    .sum_part = mpi_sum_part};

/* ---- Choosing a method ---- */

/* All methods, in the order of preference of --sync auto. */
#ifdef HAVE_CUDA
#define METHODS(METHOD) \
    METHOD(peer) METHOD(nccl) METHOD(mpi) METHOD(staged) METHOD(peer_bf16) METHOD(peer_fused) METHOD(mpi_cuda)
#else
#define METHODS(METHOD) METHOD(mpi)
#endif

#define ADDRESS(name) &exchange_##name,
static const struct exchange_method *const methods[] = {METHODS(ADDRESS)};
const char *const exchange_names[] = {"auto",      "mpi",        "nccl",     "peer",
                                      "peer-bf16", "peer-fused", "mpi-cuda", NULL};

static bool is_wanted(int sync, const struct exchange_method *method)
{
    return sync == 0 ? !method->rounds && !method->updates && !method->named
                     : strcmp(exchange_names[sync], method->name) == 0;
}

bool exchange_changes(int sync)
{
    for (size_t i = 0; sync > 0 && i < COUNT_OF(methods); i++)
        if (is_wanted(sync, methods[i]) && (methods[i]->rounds || methods[i]->updates))
            return true;
    return false;
}

bool exchange_rounds(int sync)
{
    return strcmp(exchange_names[sync], "peer-bf16") == 0;
}

/* Appends "name: " and status_text() to `reasons`. */
static void add_reason(char *reasons, size_t bytes, const char *name)
{
    text_join(reasons, bytes, "; ", "%s: %s", name, status_text());
}

static enum status no_method(int sync, const char *reasons)
{
    return status_value(
        STATUS_UNAVAILABLE, "sync", exchange_names[sync], ": it cannot train on several ranks here (%s)",
        *reasons ? reasons : "this needs a build with CUDA and a variant on a GPU; use --sync mpi");
}

/* Rejects optimizers for a method that updates the parameters of each part as soon as the part is summed. */
static enum status check_updates(const struct exchange_method *method, const struct optimizer *optimizer)
{
    static const char early[] = "updates parameters before all gradients are known";
    const struct {
        bool given;
        const char *option, *why, *remedy;
    } refused[] = {{optimizer->clip_norm > 0, "clip-norm", early, "drop --clip-norm"},
                   {optimizer->clip_adaptive > 0, "clip-adaptive", early, "drop --clip-adaptive"},
                   {optimizer_needs_tensors(optimizer->kind), "optimizer",
                    "updates parts of tensors, but lamb and muon need whole tensors", "another optimizer"},
                   {optimizer->average > 0, "ema", "computes no average of the parameters", "drop --ema"}};
    for (size_t i = 0; method->updates && i < COUNT_OF(refused); i++)
        if (refused[i].given)
            return status_option(STATUS_USAGE, refused[i].option, ": --sync %s %s; use --sync peer, or %s",
                                 method->name, refused[i].why, refused[i].remedy);
    return STATUS_OK;
}

enum status exchange_probe(int sync, const struct engine *engine, const struct optimizer *optimizer)
{
    char reasons[768] = "";
    for (size_t i = 0; i < COUNT_OF(methods); i++) {
        if (!is_wanted(sync, methods[i]))
            continue;
        if (methods[i]->probe(engine) == STATUS_OK)
            return check_updates(methods[i], optimizer);
        add_reason(reasons, sizeof reasons, methods[i]->name);
    }
    return no_method(sync, reasons);
}

/* Opens exchange_mpi or exchange_staged, depending on where the engine of this rank has its gradients.
 * Collective. */
static enum status open_mixed(int sync, const struct engine *engine, struct exchange *exchange)
{
    enum status status = STATUS_UNAVAILABLE;
    if (sync && strcmp(exchange_names[sync], "mpi") != 0)
        return status_value(STATUS_USAGE, "sync", exchange_names[sync],
                            ": CPUs and GPUs can train together only with --sync mpi");
    for (size_t i = 0; status != STATUS_OK && i < COUNT_OF(methods); i++)
        if (strcmp(methods[i]->name, "mpi") == 0 && (status = methods[i]->probe(engine)) == STATUS_OK)
            exchange->method = methods[i];
    TRY(comm_agree(status));
    return exchange->method->open(exchange);
}

enum status exchange_open(int sync, const struct engine *engine, struct exchange *exchange)
{
    char reasons[768] = "";
    if (exchange->mixed)
        return open_mixed(sync, engine, exchange);
    for (size_t i = 0; i < COUNT_OF(methods); i++) {
        if (!is_wanted(sync, methods[i]))
            continue;
        enum status status = comm_agree(
            methods[i]->groups || !exchange->group
                ? methods[i]->probe(engine)
                : status_set(STATUS_UNAVAILABLE, "it adds up over all ranks, not over the replicas of a "
                                                 "stage; use --sync nccl or mpi"));
        if (status == STATUS_OK) {
            exchange->method = methods[i];
            status = methods[i]->open(exchange);
        }
        if (status != STATUS_UNAVAILABLE)
            return status;
        add_reason(reasons, sizeof reasons, methods[i]->name);
        exchange_close(exchange);
    }
    return no_method(sync, reasons);
}

void exchange_close(struct exchange *exchange)
{
    if (exchange->method)
        exchange->method->close(exchange);
    exchange->method = NULL;
    exchange->state = NULL;
}

#ifndef HAVE_CUDA
enum status exchange_nccl_join(int device, const void *id, int rank, int ranks, void **state)
{
    (void)device, (void)id, (void)rank, (void)ranks, (void)state;
    return status_set(STATUS_UNAVAILABLE,
                      "nccl_id: this build has no CUDA; let the ranks meet at an address");
}

enum status exchange_nccl_gather(void *state, const void *mine, size_t bytes, void *all)
{
    (void)mine, (void)bytes, (void)all;
    return exchange_nccl_join(0, NULL, 0, 0, &state);
}

enum status exchange_nccl_spread(void *state, void *data, size_t bytes)
{
    (void)data, (void)bytes;
    return exchange_nccl_join(0, NULL, 0, 0, &state);
}

void exchange_nccl_leave(void *state)
{
    (void)state;
}
#endif
