/* The parts of the trainer in which ranks communicate. All public functions except trainer_leave() are
 * collective; with one rank, none of them communicates. */
#include "train/trainer_parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/array.h"
#include "machine/comm.h"

#define SPREAD_BYTES ((size_t)1 << 30) /* maximum size of a broadcast; MPI counts in int */

/* Sets `*mixed` to the model if some ranks have their gradients in host memory and others in device memory,
 * else to NULL. Collective. */
static enum status find_mixture(const struct trainer *trainer, const struct model **mixed)
{
    const struct engine *engine = trainer->engine;
    double any[] = {engine->gradients_in == GRADIENTS_IN_HOST, engine->gradients_in != GRADIENTS_IN_HOST,
                    engine->scales_loss};
    TRY(comm_max(any, COUNT_OF(any)));
    *mixed = any[0] > 0 && any[1] > 0 ? trainer->train.model : NULL;
    return *mixed && any[2] > 0
               ? status_set(STATUS_USAGE,
                            "CPUs cannot train together with a variant that scales the loss; use train-cuda, "
                            "train-tf32 or train-bf16")
           : *mixed && trainer->train.optimizer.clip_norm > 0
               ? status_set(STATUS_USAGE,
                            "--clip-norm: CPUs and GPUs add up the norm in different orders, so "
                            "their parameters would differ; drop --clip-norm or --rank-device")
               : STATUS_OK;
}

/* Sets the bounds to the largest of all ranks, because the gradients of all ranks enter each update. If the
 * exchange rounds gradients to bf16, the bounds are at least those of train-bf16, except for logits, which
 * are compared at the same parameters. Collective. */
static enum status combine_bounds(const struct exchange *exchange, struct engine_bounds *bounds)
{
    const struct engine_bounds bf16 = ENGINE_BOUNDS_BF16;
    double all[] = {bounds->loss, bounds->floor, bounds->drift, bounds->logits};
    if (exchange->method->rounds) {
        all[0] = fmax(all[0], bf16.loss);
        all[1] = fmax(all[1], bf16.floor);
        all[2] = fmax(all[2], bf16.drift);
    }
    TRY(comm_max(all, COUNT_OF(all)));
    *bounds = (struct engine_bounds){.loss = all[0], .floor = all[1], .drift = all[2], .logits = all[3]};
    return STATUS_OK;
}

/* Makes this rank a stage of a pipeline: it computes its layers for all samples of a step. Collective. */
static enum status join_pipeline(struct trainer *trainer)
{
    const struct model *mixed;
    TRY(find_mixture(trainer, &mixed));
    if (mixed)
        return status_set(
            STATUS_USAGE,
            "--rank-device: CPUs and GPUs cannot be stages of one pipeline; use --parallel data");
    trainer->pipeline = trainer->job->pipeline;
    trainer->pipeline.engine = trainer->engine;
    trainer->piped = pipeline_engine(trainer->engine);
    trainer->engine = &trainer->piped;
    trainer->train.pipeline = &trainer->pipeline;
    trainer->train.rank = 0;
    trainer->train.ranks = 1;
    return STATUS_OK;
}

enum status trainer_join(struct trainer *trainer, const struct resources *resources)
{
    struct exchange *exchange = &trainer->exchange;
    trainer->train = trainer->job->train;
    trainer->bounds = trainer->engine->bounds;
    trainer->shares = calloc((size_t)comm_size(), sizeof *trainer->shares);
    TRY(comm_agree(ALLOCATED(trainer->shares, "out of memory")));
    if (trainer->job->pipeline.stages)
        return join_pipeline(trainer);
    if (trainer->train.ranks <= 1)
        return STATUS_OK;
    trainer->train.exchange = exchange;
    exchange->device = resources->device;
    exchange->count = trainer->train.model->arena_values;
    TRY(find_mixture(trainer, &exchange->mixed));
    TRY(exchange_open(trainer->job->sync, trainer->engine, exchange));
    return combine_bounds(exchange, &trainer->bounds);
}

void trainer_leave(struct trainer *trainer)
{
    exchange_close(&trainer->exchange);
    free(trainer->shares);
    free(trainer->next);
    free(trainer->speeds);
}

static enum status spread(void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes; done += SPREAD_BYTES)
        TRY(comm_spread((char *)data + done, bytes - done < SPREAD_BYTES ? bytes - done : SPREAD_BYTES));
    return STATUS_OK;
}

enum status trainer_share_state(struct trainer *trainer)
{
    struct checkpoint *now = &trainer->now;
    const size_t bytes = now->arena_values * sizeof(float);
    if (comm_size() == 1)
        return STATUS_OK;
    TRY(comm_check_same(fnv_add(FNV_BEGIN, trainer->job->initial, bytes), "initial parameters",
                        "give all ranks the same --init file and the same build"));
    TRY(spread(&now->history, sizeof now->history));
    TRY(spread(&now->partial, sizeof now->partial));
    TRY(spread(&now->state.scale, sizeof now->state.scale));
    TRY(spread(now->state.parameters, bytes));
    TRY(spread(now->state.m, bytes));
    TRY(spread(now->state.v, bytes));
    return now->state.ema ? spread(now->state.ema, bytes) : STATUS_OK;
}

/* Handles a failure after an exchange. An exchange in host memory returns the same status on all ranks. In an
 * exchange in device memory, the other ranks may wait inside GPU kernels, where no message reaches them, so
 * this rank aborts all ranks. */
static enum status after_exchange(const struct trainer *trainer, enum status status)
{
    const struct exchange_method *method = trainer->exchange.method;
    return status == STATUS_OK || !method || method->sum ? status : comm_give_up(status);
}

enum status trainer_steps(struct trainer *trainer, uint32_t epoch, uint32_t first, uint32_t count)
{
    return after_exchange(trainer, trainer->engine->steps(trainer->state, epoch, first, count));
}

enum status trainer_set(struct trainer *trainer, const struct train_state *from)
{
    return comm_agree(trainer->engine->set(trainer->state, from));
}

enum status trainer_get(struct trainer *trainer, struct train_state *into)
{
    return comm_agree(trainer->engine->get(trainer->state, into));
}

/* Combines the totals of all ranks. The order of the sums is fixed, so repeated runs are bit-identical. */
static void combine(const struct train_totals *shares, int ranks, struct train_totals *totals)
{
    *totals = shares[0];
    for (int i = 1; i < ranks; i++) {
        totals->loss += shares[i].loss;
        totals->correct += shares[i].correct;
        totals->samples += shares[i].samples;
        totals->skipped = shares[i].skipped > totals->skipped ? shares[i].skipped : totals->skipped;
        totals->bad_step = shares[i].bad_step < totals->bad_step ? shares[i].bad_step : totals->bad_step;
    }
}

enum status trainer_totals(struct trainer *trainer, struct train_totals *totals)
{
    struct train_totals own;
    TRY(comm_agree(after_exchange(trainer, trainer->engine->totals(trainer->state, &own))));
    TRY(comm_gather(&own, sizeof own, trainer->shares));
    combine(trainer->shares, comm_rank() == 0 ? comm_size() : 1, totals);
    TRY(comm_spread(totals, sizeof *totals));
    trainer->own_bad_step = own.bad_step;
    totals->data_s = own.data_s;
    totals->generate_s = own.generate_s;
    return STATUS_OK;
}

enum status trainer_check_parameters(const struct trainer *trainer)
{
    const struct checkpoint *now = &trainer->now;
    char reason[1024];
    if (comm_size() == 1)
        return STATUS_OK;
    enum status status = comm_check_same(
        fnv_add(FNV_BEGIN, now->state.parameters, now->arena_values * sizeof(float)),
        "parameters after the epoch",
        "its machine or network computes or transfers wrong values, or its CPU rounds differently; "
        "run on machines of one type, and leave out this machine if the error repeats");
    if (status != STATUS_USAGE)
        return status;
    snprintf(reason, sizeof reason, "%s", status_text());
    return status_set(STATUS_FAILED, "%s", reason); /* the options are not the cause */
}

enum status trainer_report_stage(const struct trainer *trainer, struct train_epoch *epoch)
{
    const struct pipe_measured *measured = &trainer->piped_epoch;
    if (!trainer->job->pipeline.stages)
        return STATUS_OK;
    pipeline_layers(trainer->state, epoch->layers, sizeof epoch->layers);
    epoch->bubble = measured->waited_s / (measured->waited_s + measured->worked_s);
    return pipeline_ideal(&trainer->pipeline, measured, &epoch->bubble_ideal);
}

enum status trainer_combine_found(struct found *found)
{
    double flags[MODEL_TENSORS_MAX + 1] = {found->wrong_losses};
    for (size_t t = 0; t < MODEL_TENSORS_MAX; t++)
        flags[t + 1] = found->astray[t];
    TRY(comm_max(flags, COUNT_OF(flags)));
    found->wrong_losses = (uint32_t)flags[0];
    for (size_t t = 0; t < MODEL_TENSORS_MAX; t++)
        found->astray[t] = flags[t + 1] > 0;
    return STATUS_OK;
}
