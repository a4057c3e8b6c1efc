#include "train/exchange.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/text.h"
#include "machine/comm.h"
#include "train/optimizer.h"

/* All methods, in the order of preference of --sync auto. */
#ifdef HAVE_CUDA
#define METHODS(METHOD) \
    METHOD(peer) METHOD(nccl) METHOD(mpi) METHOD(staged) METHOD(peer_bf16) METHOD(peer_fused)
#else
#define METHODS(METHOD) METHOD(mpi)
#endif

#define ADDRESS(name) &exchange_##name,
static const struct exchange_method *const methods[] = {METHODS(ADDRESS)};
const char *const exchange_names[] = {"auto", "mpi", "nccl", "peer", "peer-bf16", "peer-fused", NULL};

static bool is_wanted(int sync, const struct exchange_method *method)
{
    return sync == 0 ? !method->rounds && !method->updates : strcmp(exchange_names[sync], method->name) == 0;
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
    return *reasons
               ? status_set(STATUS_UNAVAILABLE, "it cannot train on several ranks here (--sync %s)", reasons)
               : status_set(STATUS_UNAVAILABLE,
                            "it cannot train on several ranks here (--sync %s needs a build with CUDA and a "
                            "variant on a GPU; use --sync mpi)",
                            exchange_names[sync]);
}

/* Rejects optimizers for a method that updates the parameters of each part as soon as the part is summed. */
static enum status check_updates(const struct exchange_method *method, const struct optimizer *optimizer)
{
    if (method->updates && optimizer->clip_norm > 0)
        return status_set(STATUS_USAGE,
                          "--clip-norm: --sync %s updates parameters before all gradients are known; use "
                          "--sync peer, or drop --clip-norm",
                          method->name);
    if (method->updates && optimizer->average > 0)
        return status_set(STATUS_USAGE,
                          "--ema: --sync %s computes no average of the parameters; use --sync peer, or drop "
                          "--ema",
                          method->name);
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
        return status_set(STATUS_USAGE, "--sync %s: CPUs and GPUs can train together only with --sync mpi",
                          exchange_names[sync]);
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
        enum status status = comm_agree(methods[i]->probe(engine));
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
