#include "train/job.h"
#include "train/trainer.h"

#include <float.h>
#include <inttypes.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/timer.h"
#include "core/array.h"
#include "core/parallel.h"
#include "core/text.h"
#include "data/embeddings.h"
#include "machine/comm.h"
#include "machine/device.h"
#include "machine/host.h"
#include "train/checkpoint.h"

/* Results of a verification: the number of losses compared, the number of wrong losses, and one flag per
 * parameter tensor, set if the tensor is wrong. */
struct found {
    uint32_t losses, wrong_losses;
    bool astray[MODEL_TENSORS_MAX];
    bool misread; /* DATA_LOAD: samples of the epoch were missing or repeated */
    /* For messages, of wrong tensors: the largest error of the change, and the error of the optimizer's first
     * moments in that comparison. Both are relative to the oracle's change. */
    double drift[MODEL_TENSORS_MAX], moment_drift[MODEL_TENSORS_MAX];
    double most; /* the bound that the last of them exceeded */
};

struct trainer {
    const struct train_job *job;
    struct train train;             /* job->train, with the exchange and the decoding of this run */
    struct train_decoding decoding; /* DATA_LOAD only: as the engine decodes, after it was opened */
    struct exchange exchange;       /* its method is NULL with one rank */
    const struct engine *engine;
    struct engine_bounds bounds; /* the largest of all ranks, whose engines may differ */
    /* job->pipeline, with the engine of the stages. In a pipeline, `engine` points to `piped`. */
    struct pipeline_plan pipeline;
    struct engine piped;
    struct pipe_measured piped_epoch; /* measurements of the latest call of steps() */
    void *state;                      /* state of the engine */
    struct display *display;          /* NULL: no display */
    struct step_log *log;             /* on rank 0; NULL: no log */
    struct checkpoint now; /* state after the latest epoch that trainer_finish() saw, or the state with which
                            * this run began */
    struct train_partial done;   /* the current epoch so far; after trainer_run(), the whole epoch */
    bool begun;                  /* whether `done` is of the epoch after trainer->now */
    uint32_t enqueued;           /* steps after `done` that were passed to the engine */
    double part_begin_s;         /* time at which the first of them was */
    struct train_totals unread;  /* of the steps since trainer_read() */
    struct train_totals part;    /* of all ranks, since the latest stop within the epoch */
    double part_s;               /* seconds of these steps */
    double cpu_s, cpu_span_s;    /* CPU time and duration of the epoch's steps that this process trained */
    struct train_state within;   /* room for the state within an epoch, for --checkpoint-steps */
    struct train_totals *shares; /* room for the totals of each rank */
    uint64_t own_bad_step;       /* as totals.bad_step, but only for the samples of this rank */
    float *logits;               /* logits of the test set */
    uint32_t *next;              /* shares of the next epoch; NULL with one rank */
    double *speeds;              /* room for one number per rank */
    bool reported;               /* whether a straggler was reported */
    /* Engines that scale the loss: per layer, the skipped steps of the epoch whose overflow began there, and
     * those of all epochs of this process. */
    uint32_t overflows[MODEL_LAYERS_MAX], all_overflows[MODEL_LAYERS_MAX];
    int lock;                              /* lock of the checkpoint folder; negative: none */
    struct memory_account planned, memory; /* of train_plans_memory(): before and after allocating */
    uint64_t used_bytes;                   /* after the latest epoch: memory_used() */
    int device;

    struct found found; /* results of trainer_verify() */
    uint32_t drawn;     /* step drawn at random to verify an epoch; UINT32_MAX: no epoch was verified */
};

/* ---- Communication of the ranks. With one rank, these functions do not communicate ---- */

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
           : *mixed && train_needs_tensors(&trainer->train)
               ? status_set(
                     STATUS_USAGE,
                     "CPUs and GPUs add up the values of a tensor in different orders, so their parameters "
                     "would differ with --optimizer lamb and muon and --clip-adaptive; use another "
                     "optimizer, or drop --rank-device")
           : *mixed && trainer->train.sync_batch_norm
               ? status_option(STATUS_USAGE, "sync-batch-norm",
                               ": CPUs and GPUs cannot normalise together; drop it or --rank-device")
           : *mixed && trainer->train.optimizer.clip_norm > 0
               ? status_option(STATUS_USAGE, "clip-norm",
                               ": CPUs and GPUs add up the norm in different orders, so "
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

/* Returns whether the engine computes on a device. */
static bool on_device(const struct engine *engine)
{
    return engine->gradients_in == GRADIENTS_IN_DEVICE || engine->gradients_in == GRADIENTS_IN_GRAPH;
}

/* Returns the free memory in bytes of the device or the host on which the engine trains; 0: unknown. */
static uint64_t free_bytes(const struct engine *engine, const struct resources *resources)
{
    struct device_info info;
    if (!on_device(engine))
        return memory_available_bytes();
    return device_describe(resources->device, &info) == STATUS_OK ? info.memory_free_bytes : 0;
}

/* Sets `*used_bytes` to the memory in use: on a device by all processes, on a CPU by this process. Sets
 * `*room_bytes` to the most that can be in use. */
static enum status memory_used(const struct trainer *trainer, int device, uint64_t *used_bytes,
                               uint64_t *room_bytes)
{
    struct device_info info;
    uint64_t resident_kib = 0;
    if (on_device(trainer->engine)) {
        TRY(device_describe(device, &info));
        *used_bytes = info.memory_bytes - info.memory_free_bytes;
        *room_bytes = info.memory_bytes;
        return STATUS_OK;
    }
#ifdef __GLIBC__
    (void)malloc_trim(0); /* memory that was freed does not count */
#endif
    if (!system_number("/proc/self/status", "VmRSS", &resident_kib))
        return status_set(STATUS_UNAVAILABLE, "--memory: /proc/self/status does not say how much memory this "
                                              "process uses");
    *used_bytes = resident_kib * 1024;
    *room_bytes = *used_bytes + memory_available_bytes();
    return STATUS_OK;
}

/* Sets `*bytes` to the memory in use without the engine: enum memory_part, MEMORY_CONTEXT. */
static enum status memory_context(const struct trainer *trainer, int device, uint64_t *bytes)
{
    static uint64_t rest_bytes; /* of this process before its first plan; later, freed memory may remain */
    uint64_t unused;
    TRY(memory_used(trainer, device, bytes, &unused));
    if (!on_device(trainer->engine))
        *bytes = rest_bytes = rest_bytes ? rest_bytes : *bytes;
    return STATUS_OK;
}

/* Makes this rank a stage of a pipeline: it computes its layers for all samples of a step. Collective. */
static enum status join_pipeline(struct trainer *trainer, const struct resources *resources)
{
    const uint64_t *limits = trainer->train.memory_limit_bytes, limit = limits ? limits[comm_rank()] : 0;
    const struct model *mixed;
    uint64_t context = 0;
    TRY(find_mixture(trainer, &mixed));
    if (mixed)
        return status_set(
            STATUS_USAGE,
            "--rank-device: CPUs and GPUs cannot be stages of one pipeline; use --parallel data");
    trainer->pipeline = trainer->job->pipeline;
    trainer->pipeline.engine = trainer->engine;
    if (limit)
        TRY(memory_context(trainer, resources->device, &context));
    TRY(comm_agree(
        limit == 0 || limit > context
            ? STATUS_OK
            : status_set(STATUS_TOO_LARGE,
                         "--memory-limit: before the network is allocated, %.3f GB are in use, but the limit "
                         "is %.3f GB; raise it",
                         1e-9 * (double)context, 1e-9 * (double)limit)));
    trainer->pipeline.limit_bytes = limit ? limit - context
                                    : trainer->job->balance == BALANCE_MEMORY
                                        ? free_bytes(trainer->engine, resources)
                                        : 0;
    trainer->piped = pipeline_engine(trainer->engine);
    trainer->engine = &trainer->piped;
    trainer->train.pipeline = &trainer->pipeline;
    trainer->train.rank = (uint32_t)comm_rank() / trainer->pipeline.stages;
    trainer->train.ranks = (uint32_t)comm_size() / trainer->pipeline.stages;
    return STATUS_OK;
}

/* Sets trainer->train, and opens the exchange if there are several ranks. */
static enum status trainer_join(struct trainer *trainer, const struct resources *resources)
{
    struct exchange *exchange = &trainer->exchange;
    trainer->train = trainer->job->train;
    if (trainer->train.decoding) {
        trainer->decoding = *trainer->train.decoding;
        trainer->train.decoding = &trainer->decoding;
    }
    trainer->bounds = trainer->engine->bounds;
    trainer->shares = calloc((size_t)comm_size(), sizeof *trainer->shares);
    TRY(comm_agree(ALLOCATED(trainer->shares, "out of memory")));
    if (trainer->job->pipeline.stages)
        return join_pipeline(trainer, resources);
    if (trainer->train.ranks <= 1)
        return STATUS_OK;
    trainer->train.exchange = exchange;
    exchange->device = resources->device;
    exchange->count = trainer->train.model->arena_values;
    TRY(find_mixture(trainer, &exchange->mixed));
    TRY(exchange_open(trainer->job->sync, trainer->engine, exchange));
    return combine_bounds(exchange, &trainer->bounds);
}

/* Returns the exchange of this rank; NULL if there is none. The state must be open. */
static struct exchange *exchange_of(const struct trainer *trainer)
{
    return trainer->job->pipeline.stages ? pipeline_exchange(trainer->state) : trainer->train.exchange;
}

static void trainer_leave(struct trainer *trainer)
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

/* Copies the state of rank 0, with which training begins, to all ranks. STATUS_USAGE if the initial
 * parameters that the ranks computed or read differ. */
static enum status trainer_share_state(struct trainer *trainer)
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

/* Call engine->steps(), set() and get(). If one of them fails on one rank, it fails on all. */
static enum status trainer_steps(struct trainer *trainer, uint32_t epoch, uint32_t first, uint32_t count)
{
    return after_exchange(trainer, trainer->engine->steps(trainer->state, epoch, first, count));
}

static enum status trainer_set(struct trainer *trainer, const struct train_state *from)
{
    return comm_agree(trainer->engine->set(trainer->state, from));
}

static enum status trainer_get(struct trainer *trainer, struct train_state *into)
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
        totals->masked += shares[i].masked;
        totals->delivered += shares[i].delivered;
        totals->skipped = shares[i].skipped > totals->skipped ? shares[i].skipped : totals->skipped;
        totals->bad_step = shares[i].bad_step < totals->bad_step ? shares[i].bad_step : totals->bad_step;
    }
}

/* Gets the engine's totals, added up over all ranks. The members data_s and generate_s are those of this
 * rank, and so are those of the stream, except `masked` and `delivered`. */
static enum status trainer_totals(struct trainer *trainer, struct train_totals *totals)
{
    struct train_totals own;
    TRY(comm_agree(after_exchange(trainer, trainer->engine->totals(trainer->state, &own))));
    TRY(comm_gather(&own, sizeof own, trainer->shares));
    combine(trainer->shares, comm_rank() == 0 ? comm_size() : 1, totals);
    TRY(comm_spread(totals, sizeof *totals));
    trainer->own_bad_step = own.bad_step;
    totals->data_s = own.data_s;
    totals->generate_s = own.generate_s;
    totals->read_bytes = own.read_bytes;
    totals->resident = own.resident;
    totals->resident_device = own.resident_device;
    totals->stall_s = own.stall_s;
    totals->decode_s = own.decode_s;
    return STATUS_OK;
}

/* Fails on all ranks if the parameters in trainer->now differ between ranks. */
static enum status trainer_check_parameters(const struct trainer *trainer)
{
    const struct checkpoint *now = &trainer->now;
    if (comm_size() == 1)
        return STATUS_OK;
    enum status status = comm_check_same(
        fnv_add(FNV_BEGIN, now->state.parameters, now->arena_values * sizeof(float)),
        "parameters after the epoch",
        "its machine or network computes or transfers wrong values, or its CPU rounds differently; "
        "run on machines of one type, and leave out this machine if the error repeats");
    return status == STATUS_USAGE ? STATUS_FAILED : status; /* the options are not the cause */
}

/* Pipelines only: describes the stage of this rank and its latest epoch. */
static enum status trainer_report_stage(const struct trainer *trainer, struct train_epoch *epoch)
{
    const struct pipe_measured *measured = &trainer->piped_epoch;
    if (!trainer->job->pipeline.stages)
        return STATUS_OK;
    pipeline_layers(trainer->state, epoch->layers, sizeof epoch->layers);
    epoch->bubble = measured->waited_s / (measured->waited_s + measured->worked_s);
    return pipeline_ideal(&trainer->pipeline, measured, &epoch->bubble_ideal);
}

/* Combines the verification results of all ranks, so that all ranks make the same decisions. */
static enum status trainer_combine_found(struct found *found)
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

/* ---- --balance: the shares of the ranks. Rank 0 computes them, so that all ranks have the same shares ----
 */

/* Free memory is rounded to multiples of 1/64 of the largest value, so equal machines get equal weights. */
#define MEMORY_STEPS 64
#define REPORT_GAIN  0.1  /* report a straggler if other shares would save a larger part of a step's time */
#define REPORT_MIN_S 0.25 /* after a shorter epoch, the measured speeds are too uncertain for a report */

/* Collective: on rank 0, sets the weights to the free memory of the ranks, as multiples of 1/64 of the
 * largest value. */
static enum status weigh_memory(const struct trainer *trainer, const struct resources *resources,
                                double *weights)
{
    double mine = (double)free_bytes(trainer->engine, resources), largest = 0;
    TRY(comm_agree(mine > 0 ? STATUS_OK
                            : status_set(STATUS_UNAVAILABLE,
                                         "--balance memory: the free memory is not known here; give each "
                                         "rank a number, such as --balance 3:1")));
    TRY(comm_gather(&mine, sizeof mine, weights));
    if (comm_rank() > 0)
        return STATUS_OK;
    for (int i = 0; i < comm_size(); i++)
        largest = fmax(largest, weights[i]);
    for (int i = 0; i < comm_size(); i++)
        weights[i] = fmax(1, round(MEMORY_STEPS * weights[i] / largest));
    return STATUS_OK;
}

/* Returns whether the shares depend on measurements. A resumed run then needs the shares of the
 * checkpoint. */
static bool depends_on_measurements(const struct train_job *job)
{
    return job->balance == BALANCE_MEASURED || job->balance == BALANCE_MEMORY;
}

/* On rank 0: sets trainer->next to the shares in the checkpoint if they depend on measurements. Otherwise, or
 * if the checkpoint has no shares for this job, divides the samples of a step in proportion to `weights`. */
static void divide(struct trainer *trainer, const double *weights)
{
    const struct train_job *job = trainer->job;
    const struct train *train = &job->train;
    const struct checkpoint *now = &trainer->now;
    if (depends_on_measurements(job) && balance_continues(now, job->balance, train->ranks, train->batch))
        memcpy(trainer->next, now->shares, train->ranks * sizeof *trainer->next);
    else
        partition_divide(weights, train->ranks, train->batch, job->balance == BALANCE_FIXED ? 0 : 1,
                         trainer->next);
}

/* Makes trainer->next the shares of the ranks. Call only between epochs. */
static void trainer_use_shares(struct trainer *trainer)
{
    if (trainer->next)
        memcpy(trainer->job->shares, trainer->next, trainer->train.ranks * sizeof *trainer->next);
}

/* Collective: sets the shares of the first epoch and trainer->train.share_max, before the engine is opened.
 * On rank 0, trainer->now has the checkpoint to resume. STATUS_UNAVAILABLE if the free memory is unknown. */
static enum status trainer_take_shares(struct trainer *trainer, const struct resources *resources)
{
    const struct train_job *job = trainer->job;
    const size_t ranks = job->train.ranks;
    if (!job->shares)
        return STATUS_OK;
    trainer->next = malloc(ranks * sizeof *trainer->next);
    trainer->speeds = malloc(ranks * sizeof *trainer->speeds);
    TRY(comm_agree(ALLOCATED(trainer->next && trainer->speeds, "out of memory")));
    memcpy(trainer->speeds, job->weights, ranks * sizeof *trainer->speeds);
    if (job->balance == BALANCE_MEMORY)
        TRY(weigh_memory(trainer, resources, trainer->speeds));
    if (comm_rank() == 0)
        divide(trainer, trainer->speeds);
    TRY(comm_spread(trainer->next, ranks * sizeof *trainer->next));
    trainer_use_shares(trainer);
    trainer->train.share_max = train_room(&trainer->train, job->balance == BALANCE_MEASURED);
    return STATUS_OK;
}

/* Returns the speed of this rank in samples per second, in the steps of the epoch that this process ran. The
 * time in which it waits for the exchange does not count. NaN if the exchange is not timed. */
static double own_speed(const struct trainer *trainer)
{
    const struct train_partial *done = &trainer->done, *before = &trainer->now.partial;
    const uint64_t samples = train_share_of_epoch(&trainer->train) -
                             (uint64_t)before->steps * train_share(&trainer->train, 0).count;
    return (double)samples / (done->epoch_s - before->epoch_s - (done->exchange_s - before->exchange_s));
}

/* On rank 0: warns once if other shares would save much time. */
static void report_straggler(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    const uint32_t *shares = job->shares;
    const double *speeds = trainer->speeds;
    uint32_t slow = 0, fast = 0;
    if (trainer->reported || trainer->done.epoch_s < REPORT_MIN_S)
        return;
    double gain = balance_improve(speeds, job->train.ranks, REPORT_GAIN, shares, trainer->next);
    memcpy(trainer->next, shares, job->train.ranks * sizeof *shares);
    if (gain == 0)
        return;
    for (uint32_t i = 1; i < job->train.ranks; i++) {
        slow = shares[i] / speeds[i] > shares[slow] / speeds[slow] ? i : slow;
        fast = shares[i] / speeds[i] < shares[fast] / speeds[fast] ? i : fast;
    }
    trainer->reported = true;
    status_warn("the ranks are uneven: rank %" PRIu32 " computes %" PRIu32 " samples of each step at %.0f "
                "samples/s, rank %" PRIu32 " computes %" PRIu32
                " at %.0f, and all ranks wait for the slowest; "
                "--balance measured divides the samples by speed, and would save about %.0f %% of the time",
                slow, shares[slow], speeds[slow], fast, shares[fast], speeds[fast], 100 * gain);
}

/* Collective, after an epoch: computes trainer->next from the speeds of the ranks in this epoch (--balance
 * measured), or warns once on rank 0 if the ranks are uneven. */
static enum status trainer_rebalance(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    if (!job->shares)
        return STATUS_OK;
    double speed = own_speed(trainer);
    TRY(comm_gather(&speed, sizeof speed, trainer->speeds));
    if (job->balance == BALANCE_MEASURED) {
        if (comm_rank() == 0)
            (void)balance_improve(trainer->speeds, job->train.ranks, BALANCE_GAIN_MIN, job->shares,
                                  trainer->next);
        return comm_spread(trainer->next, job->train.ranks * sizeof *trainer->next);
    }
    if (comm_rank() == 0)
        report_straggler(trainer);
    return STATUS_OK;
}

/* Writes trainer->next to trainer->now, if a resumed run would need it. */
static enum status trainer_note_shares(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    struct checkpoint *now = &trainer->now;
    const uint32_t ranks = job->train.ranks;
    if (!job->shares || !depends_on_measurements(job))
        return STATUS_OK;
    uint32_t *shares = realloc(now->shares, ranks * sizeof *shares);
    TRY(ALLOCATED(shares, "out of memory for the shares"));
    memcpy(shares, trainer->next, ranks * sizeof *shares);
    now->shares = shares;
    now->share_count = ranks;
    now->balance = job->balance;
    return STATUS_OK;
}

/* ---- Opening and closing ---- */

void trainer_close(void *state)
{
    struct trainer *trainer = state;
    display_close(trainer->display);
    if (trainer->state)
        trainer->engine->close(trainer->state);
    step_log_close(trainer->log);
    train_state_free(&trainer->within);
    checkpoint_free(&trainer->now);
    free(trainer->logits);
    checkpoint_unlock(trainer->lock);
    trainer_leave(trainer);
    free(trainer);
}

static enum status resume(struct trainer *trainer, const struct train_job *job)
{
    struct checkpoint latest;
    bool found = false;
    TRY(resume_read(job, true, &latest, &found));
    if (!found)
        return STATUS_OK;
    /* Keep this run's --data: the same samples may have moved to another path. */
    free(latest.data);
    option_values_free(&latest.samples);
    latest.data = trainer->now.data;
    latest.samples = trainer->now.samples;
    trainer->now.data = NULL;
    trainer->now.samples = (struct option_values){0};
    checkpoint_free(&trainer->now);
    trainer->now = latest;
    if (latest.history.epochs < job->epochs && latest.partial.steps)
        status_say("%u of %u epochs and %u of %u steps are done: continuing", latest.history.epochs,
                   job->epochs, latest.partial.steps, train_steps(&job->train));
    else if (latest.history.epochs < job->epochs)
        status_say("%u of %u epochs are done: continuing", latest.history.epochs, job->epochs);
    return STATUS_OK;
}

/* On rank 0: locks the folder of --checkpoint. With --resume, sets trainer->now to the latest checkpoint, if
 * there is one; otherwise checks that the folder has no checkpoints. */
static enum status trainer_take_folder(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    if (!job->checkpoints || comm_rank() > 0)
        return STATUS_OK;
    TRY(checkpoint_lock(job->checkpoints, true, &trainer->lock));
    return job->resume ? resume(trainer, job) : resume_refuse_full(job);
}

/* Sets trainer->now to the initial parameters, or to the checkpoint to resume. */
static enum status take_beginning(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    const struct model *model = job->train.model;
    struct checkpoint *now = &trainer->now;
    checkpoint_describe(model, now);
    memcpy(now->scale, job->train.data->scale, sizeof now->scale);
    memcpy(now->offset, job->train.data->offset, sizeof now->offset);
    now->history = (struct train_history){.to_98_s = -1, .to_99_s = -1};
    resume_skip(job, &now->history, &now->partial);
    if (job->begin && comm_rank() == 0)
        status_say("training begins with step %" PRIu32 " of epoch %" PRIu32 ", as --init-state says",
                   now->partial.steps + 1, now->history.epochs + 1);
    memcpy(now->hashes, job->train.data->hashes, sizeof now->hashes);
    now->data = strdup(job->data ? job->data : "");
    now->row = strdup("");
    trainer->logits = malloc((size_t)job->train.data->sets[DATA_TEST].count * model->classes * sizeof(float));
    bool room = train_state_for(&job->train, &now->state);
    if (job->checkpoints && job->checkpoint_steps)
        room &= train_state_for(&job->train, &trainer->within);
    TRY(ALLOCATED(room && now->data && now->row && trainer->logits, "out of memory for the parameters"));
    TRY(option_values_copy(&job->identity, &now->identity));
    TRY(option_values_copy(&job->samples, &now->samples));
    memcpy(now->state.parameters, job->initial, model->arena_values * sizeof *job->initial);
    if (now->state.ema)
        memcpy(now->state.ema, job->initial, model->arena_values * sizeof *job->initial);
    return trainer_take_folder(trainer);
}

/* Collective, after the engine was opened: settles how the samples of a stream are decoded. An engine that
 * has not decided leaves it to the CPU. All ranks must decode alike, because a sample must not depend on the
 * rank that has it; so must the run that a checkpoint is from. */
static enum status trainer_take_decoding(struct trainer *trainer)
{
    struct train_decoding *decoding = &trainer->decoding, first;
    const struct train_partial *partial = &trainer->now.partial;
    const bool resumed = trainer->now.history.epochs > 0 || partial->steps > 0;
    enum status status = STATUS_OK;
    if (!trainer->train.decoding)
        return STATUS_OK;
    const uint32_t stages = trainer->job->pipeline.stages;
    const bool by_cpu = decoding->decoder == DECODER_AUTO || decoding->decoder == DECODER_CPU;
    if (by_cpu && decoding->share <= 0)
        *decoding = (struct train_decoding){DECODER_CPU, 0};
    first = *decoding;
    TRY(comm_spread(&first, sizeof first));
    if (stages && (uint32_t)comm_rank() % stages > 0)
        *decoding = first; /* only first stages decode */
    if (decoding->decoder == DECODER_AUTO || decoding->share < 0)
        status = status_set(STATUS_USAGE, "this variant decodes with the CPU only; drop --decoder and "
                                          "--device-share");
    else if (first.decoder != decoding->decoder || first.share != decoding->share)
        status = status_set(STATUS_USAGE,
                            "this rank decodes with --decoder %s --device-share %g, and rank 0 with %s and "
                            "%g; use --decoder cpu",
                            decoder_names[decoding->decoder], decoding->share, decoder_names[first.decoder],
                            first.share);
    else if (comm_rank() == 0)
        status = resume_take_decoding(trainer->job, decoding, resumed, &trainer->now.identity);
    return comm_agree(status);
}

/* ---- --memory, --memory-limit, and plans for --batch max and --parallel auto ---- */

#define RESERVE 64 /* 1/64 of a limit: the context may grow between a trial and the run */

/* Returns the limit of this rank; 0: none. */
static uint64_t limit_of(const struct trainer *trainer)
{
    const uint64_t *limits = trainer->job->train.memory_limit_bytes;
    const uint64_t limit = limits ? limits[trainer->job->train.rank] : 0;
    return trainer->job->tries ? limit - limit / RESERVE : limit;
}

#define REHEARSED 8 /* samples per part of a step */

/* On one device: runs a step of a few samples, so that the memory of the context includes kernels and
 * libraries, which CUDA loads when they are first used. Does nothing from the second call on. */
static enum status rehearse(const struct trainer *trainer, const struct resources *resources)
{
    static bool rehearsed;
    struct train train = trainer->train;
    struct train_decoding decoding = trainer->decoding;
    struct train_totals unused;
    const uint32_t repeats = train.augment.repeats ? train.augment.repeats : 1,
                   few = REHEARSED * train_parts(&train) * repeats;
    void *state = NULL;
    if (rehearsed || !on_device(trainer->engine) || train.ranks > 1 || train.pipeline ||
        train.data->mixture || train.data->given)
        return STATUS_OK;
    rehearsed = true;
    train.batch = few < train.batch ? few : train.batch;
    train.shares = NULL;
    train.share_max = 0;
    if (train.decoding)
        train.decoding = &decoding;
    enum status status = trainer->engine->open(&train, resources, &state);
    if (status == STATUS_OK)
        status = trainer->engine->set(state, &trainer->now.state);
    if (status == STATUS_OK)
        status = trainer->engine->steps(state, 0, 0, 1);
    if (status == STATUS_OK)
        status = trainer->engine->totals(state, &unused);
    if (state)
        trainer->engine->close(state);
    return status;
}

/* Sets `*planned` to the memory of the engine with `of`, which may differ from trainer->train. Allocates
 * nothing large. */
static enum status plan_memory(const struct trainer *trainer, const struct train *of,
                               const struct resources *resources, struct memory_account *planned)
{
    struct train_decoding decoding = trainer->decoding;
    struct train train = *of;
    void *state = NULL;
    *planned = (struct memory_account){.plans = true};
    train.memory = planned;
    if (train.decoding)
        train.decoding = &decoding;
    const enum status status = trainer->engine->open(&train, resources, &state);
    if (state)
        trainer->engine->close(state);
    TRY(status);
    return memory_context(trainer, resources->device, &planned->bytes[MEMORY_CONTEXT]);
}

/* Returns STATUS_TOO_LARGE with what would fit, because the planned memory exceeds the limit. */
static enum status refuse_memory(struct trainer *trainer, const struct resources *resources)
{
    const uint64_t limit = limit_of(trainer), needed = memory_total(&trainer->planned);
    const uint32_t ranks = trainer->train.ranks ? trainer->train.ranks : 1;
    struct train other = trainer->train;
    struct memory_account smaller;
    char remedy[192] = "lower --batch";
    if (trainer->job->pipeline.stages || trainer->train.data->mixture) /* other plans are not possible */
        return status_set(STATUS_TOO_LARGE,
                          "--memory-limit: this rank needs %.3f GB, but the limit is %.3f GB; lower --batch, "
                          "or start more ranks",
                          1e-9 * (double)needed, 1e-9 * (double)limit);
    other.batch =
        other.batch / 2 > ranks * train_parts(&other) ? other.batch / 2 : ranks * train_parts(&other);
    other.shares = NULL;
    other.share_max = 0;
    TRY(plan_memory(trainer, &other, resources, &smaller));
    const uint64_t fits = memory_largest_batch(train_part_max(&other), memory_total(&smaller),
                                               train_part_max(&trainer->train), needed, limit) *
                          train_parts(&trainer->train);
    if (fits > 0)
        snprintf(remedy, sizeof remedy, "--batch %" PRIu64 " would fit%s", fits,
                 ranks > 1 ? " (samples per rank)" : "");
    if (trainer->engine->recomputes && !trainer->train.checkpoint_activations) {
        other = trainer->train;
        other.checkpoint_activations = true;
        TRY(plan_memory(trainer, &other, resources, &smaller));
        if (memory_total(&smaller) <= limit) {
            snprintf(remedy, sizeof remedy, "--checkpoint-activations would fit");
            if (fits > 0)
                text_append(remedy, sizeof remedy, ", or --batch %" PRIu64, fits);
        }
    }
    return status_set(STATUS_TOO_LARGE,
                      "--memory-limit: this run needs %.3f GB, but the limit is %.3f GB; %s",
                      1e-9 * (double)needed, 1e-9 * (double)limit, remedy);
}

/* Before the engine is opened: plans its memory if an option needs that, and refuses what exceeds the limit.
 * Collective. */
static enum status trainer_plan(struct trainer *trainer, const struct resources *resources)
{
    const struct train_job *job = trainer->job;
    const uint64_t limit = limit_of(trainer);
    if (!job->shows_memory && !job->plans && !job->choice && !job->train.memory_limit_bytes)
        return STATUS_OK;
    TRY(comm_agree(rehearse(trainer, resources)));
    TRY(comm_agree(plan_memory(trainer, &trainer->train, resources, &trainer->planned)));
    if (job->shows_memory && !job->plans)
        memory_print("memory, before it is allocated:", &trainer->planned, NULL, 0);
    const bool fits = job->plans || !limit || memory_total(&trainer->planned) <= limit;
    TRY(comm_agree(fits ? STATUS_OK : refuse_memory(trainer, resources)));
    trainer->memory.limit_bytes = limit;
    trainer->memory.bytes[MEMORY_CONTEXT] = trainer->planned.bytes[MEMORY_CONTEXT];
    trainer->train.memory = &trainer->memory;
    return STATUS_OK;
}

enum status trainer_planned(const void *state, const struct resources *resources, uint64_t *needed_bytes,
                            uint64_t *room_bytes, uint64_t *context_bytes)
{
    const struct trainer *trainer = state;
    uint64_t unused;
    *needed_bytes = memory_total(&trainer->planned);
    *context_bytes = trainer->planned.bytes[MEMORY_CONTEXT];
    TRY(memory_used(trainer, resources->device, &unused, room_bytes));
    const uint64_t limit = limit_of(trainer);
    *room_bytes = limit && limit < *room_bytes ? limit : *room_bytes;
    return STATUS_OK;
}

/* Opens the engine, and sets its state to the state of rank 0, with which training begins. */
static enum status begin(struct trainer *trainer, const struct resources *resources)
{
    enum status status = trainer_join(trainer, resources);
    if (status == STATUS_OK)
        status = take_beginning(trainer);
    TRY(comm_agree(status));
    TRY(trainer_take_shares(trainer, resources));
    TRY(trainer_plan(trainer, resources));
    if (trainer->job->plans)
        return STATUS_OK;
    TRY(comm_agree(trainer->engine->open(&trainer->train, resources, &trainer->state)));
    TRY(trainer_take_decoding(trainer));
    TRY(comm_agree(comm_rank() > 0 ? STATUS_OK : resume_note_choice(trainer->job, &trainer->now.identity)));
    TRY(trainer_share_state(trainer));
    TRY(trainer_set(trainer, &trainer->now.state));
    if (trainer->job->log_path && comm_rank() == 0)
        status = step_log_open(trainer->job->log_path, trainer->engine, &trainer->job->train, resources,
                               comm_size(), trainer->job->resume, &trainer->log);
    return comm_agree(status);
}

/* Warns once if tensor cores multiply rows of embeddings whose width they cannot fill. */
static void warn_of_width(const struct engine *engine, const struct data *data)
{
    static bool told;
    if (told || !data->rows || (engine->unit != UNIT_TF32 && engine->unit != UNIT_HALF))
        return;
    told = true;
    embeddings_warn_idle(data->sample_values, "pad them with zeros to a multiple of 8 values");
}

enum status trainer_open(const struct engine *engine, const struct resources *resources, const void *job,
                         void **state)
{
    struct trainer *trainer = *state = calloc(1, sizeof *trainer);
    TRY(comm_agree(ALLOCATED(trainer, "out of memory")));
    trainer->job = job;
    trainer->engine = engine;
    trainer->lock = -1;
    warn_of_width(engine, trainer->job->train.data);
    TRY(begin(trainer, resources));
    if (trainer->job->plans)
        return STATUS_OK;
    trainer->device = resources->device;
    TRY(resume_check_first_step(trainer->job, &trainer->now));
    if (trainer->job->step_path) {
        TRY(export_step(&trainer->train, engine, trainer->state, &trainer->now.state,
                        trainer->now.history.epochs, trainer->now.partial.steps, &trainer->job->identity,
                        trainer->job->step_path));
        status_say("the first step was written to %s", trainer->job->step_path);
    }
    trainer->display = display_open(engine, trainer->state, &trainer->train, trainer->job->epochs);
    return STATUS_OK;
}

/* ---- Stops within an epoch and at its end: tests, rows of --log, and checkpoints ---- */

/* A sample in the order of its logits for one class. */
struct ranked {
    float logit;
    bool shows;
};

static int by_logit(const void *a, const void *b)
{
    const float left = ((const struct ranked *)a)->logit, right = ((const struct ranked *)b)->logit;
    return (left < right) - (left > right);
}

/* Returns the average precision of class `k`; NaN if no sample shows it. `ranked` has room for all samples.
 */
static double average_precision(const float *logits, const struct data_set *set, uint32_t classes, uint32_t k,
                                struct ranked *ranked)
{
    uint32_t positives = 0, found = 0, before = 0;
    double sum = 0;
    for (uint32_t i = 0; i < set->count; i++) {
        const float logit = logits[(size_t)i * classes + k];
        ranked[i] = (struct ranked){isnan(logit) ? -INFINITY : logit,
                                    target_has(set->multi_hot, classes, set->labels[i], k)};
        positives += ranked[i].shows;
    }
    if (positives == 0)
        return NAN;
    qsort(ranked, set->count, sizeof *ranked, by_logit);
    for (uint32_t i = 0; i < set->count; i++) {
        found += ranked[i].shows;
        if (i + 1 < set->count && ranked[i + 1].logit == ranked[i].logit)
            continue;
        sum += (double)(found - before) * found / (i + 1);
        before = found;
    }
    return sum / positives;
}

/* Returns the mean average precision. */
static double mean_precision(const float *logits, const struct data_set *set, uint32_t classes,
                             struct ranked *ranked)
{
    double sum = 0;
    uint32_t shown = 0;
    for (uint32_t k = 0; k < classes; k++) {
        const double precision = average_precision(logits, set, classes, k, ranked);
        sum += isnan(precision) ? 0 : precision;
        shown += !isnan(precision);
    }
    return sum / shown;
}

/* Returns the mean binary cross-entropy of a sample. */
static double binary_loss(const float *logits, const struct data_set *set, uint32_t classes, uint32_t i)
{
    double sum = 0;
    for (uint32_t k = 0; k < classes; k++) {
        const double x = logits[k];
        sum += (x > 0 ? x : 0) - (target_has(set->multi_hot, classes, set->labels[i], k) ? x : 0) +
               log1p(exp(-fabs(x)));
    }
    return sum / classes;
}

enum status logits_judge(const float *logits, const struct data_set *set, uint32_t classes,
                         struct judgement *judged)
{
    uint32_t right = 0;
    *judged = (struct judgement){.precision = NAN};
    for (uint32_t i = 0; i < set->count; i++) {
        const float *of = logits + (size_t)i * classes;
        const uint32_t best = largest_logit(of, classes);
        double sum = 1; /* exp(0), for the largest logit */
        for (uint32_t k = 0; k < classes; k++)
            sum += k == best ? 0 : exp((double)of[k] - of[best]);
        judged->loss +=
            set->multi_hot ? binary_loss(of, set, classes, i) : log(sum) + of[best] - of[set->labels[i]];
        right += target_has(set->multi_hot, classes, set->labels[i], best) &&
                 !isnan(sum + of[best]); /* a NaN counts as wrong */
    }
    judged->loss /= set->count;
    judged->accuracy = (double)right / set->count;
    if (!set->multi_hot)
        return STATUS_OK;
    FREED struct ranked *ranked = malloc(set->count * sizeof *ranked);
    TRY(ALLOCATED(ranked, "out of memory to judge %u samples", set->count));
    judged->precision = mean_precision(logits, set, classes, ranked);
    return STATUS_OK;
}

/* Judges the test set. */
static enum status trainer_test(struct trainer *trainer, struct judgement *judged)
{
    const struct train *train = &trainer->train;
    const struct data_set *set = &train->data->sets[DATA_TEST];
    *judged = (struct judgement){NAN, NAN, NAN};
    if (train->data->given) /* there is no test set */
        return STATUS_OK;
    TRY(trainer->engine->evaluate(trainer->state, DATA_TEST, 0, set->count, trainer->logits));
    return logits_judge(trainer->logits, set, train->model->classes, judged);
}

/* Appends a row about the steps since the latest stop to the log, with the test results in `tested`. */
static enum status trainer_log_part(struct trainer *trainer, const struct judgement *tested)
{
    const struct train *train = &trainer->train;
    const uint64_t epochs = trainer->now.history.epochs, steps = train_steps(train),
                   samples = train->data->sets[DATA_TRAIN].count, full = steps * train->batch,
                   each = full < samples ? full : samples,
                   done = (uint64_t)trainer->done.steps * train->batch;
    if (!trainer->log)
        return STATUS_OK;
    const struct step_row row = {.epoch = (uint32_t)epochs + 1,
                                 .step = epochs * steps + trainer->done.steps,
                                 .samples_seen = epochs * each + (done < each ? done : each),
                                 .totals = trainer->part,
                                 .steps_s = trainer->part_s,
                                 .test_loss = tested->loss,
                                 .test_accuracy = tested->accuracy};
    return step_log_add(trainer->log, &row);
}

/* Writes a checkpoint within the epoch to a folder. trainer->now keeps the state with which the epoch began,
 * which --verify and the search for a bad layer need. */
static enum status keep_within(struct trainer *trainer, const char *folder)
{
    const struct train_job *job = trainer->job;
    trainer->within.scale =
        trainer->now.state.scale; /* engines that do not scale the loss leave it unchanged */
    TRY(trainer_get(trainer, &trainer->within));
    if (comm_rank() > 0)
        return STATUS_OK;
    TRY(trainer_note_shares(trainer));
    struct checkpoint within = trainer->now;
    within.partial = trainer->done;
    within.state = trainer->within;
    TRY(checkpoint_write(folder, job->keep, &within));
    return resume_write_state(job, within.history.epochs, within.partial.steps);
}

static bool is_due(uint32_t every, uint64_t step)
{
    return every > 0 && step % every == 0;
}

/* Collective, within an epoch: tests the network if a test is due after `step` steps, appends a row about the
 * steps since the previous stop, and writes a checkpoint if one is due. A checkpoint always ends a row, so
 * that a resumed run has the same rows as an uninterrupted run. */
static enum status trainer_stop(struct trainer *trainer, uint64_t step)
{
    const struct train_job *job = trainer->job;
    struct judgement tested = {.loss = NAN, .accuracy = NAN};
    enum status status = STATUS_OK;
    if (is_due(job->test_steps, step))
        status = trainer_test(trainer, &tested);
    TRY(comm_agree(status == STATUS_OK ? trainer_log_part(trainer, &tested) : status));
    return job->checkpoints && is_due(job->checkpoint_steps, step)
               ? comm_agree(keep_within(trainer, job->checkpoints))
               : STATUS_OK;
}

/* Returns the next step after `step` at which training stops: a multiple of an option, or `end`. */
static uint64_t trainer_next_stop(const struct train_job *job, uint64_t step, uint64_t end)
{
    const uint32_t every[] = {job->checkpoint_steps, job->test_steps, job->log_steps};
    for (size_t i = 0; i < COUNT_OF(every); i++)
        if (every[i] && (step / every[i] + 1) * every[i] < end)
            end = (step / every[i] + 1) * every[i];
    return end;
}

/* ---- Running an epoch ---- */

bool trainer_more(const void *input, void *state)
{
    (void)input;
    const struct trainer *trainer = state;
    return trainer->now.history.epochs < trainer->job->epochs;
}

/* Repeats the steps that this run trained in this epoch before `step`. Engines are deterministic, so the
 * state before `step` is the same again. Collective. */
static enum status go_before(struct trainer *trainer, uint32_t epoch, uint32_t step,
                             struct train_state *before)
{
    struct train_totals unused;
    enum status status = ALLOCATED(train_state_new(trainer->train.model->arena_values, before),
                                   "out of memory to find the non-finite values");
    TRY(comm_agree(status));
    TRY(trainer_set(trainer, &trainer->now.state));
    const uint32_t begin = trainer->now.partial.steps;
    if (step > begin)
        TRY(trainer_steps(trainer, epoch, begin, step - begin));
    TRY(trainer->engine->totals(trainer->state, &unused));
    return trainer->engine->get(trainer->state, before);
}

/* Returns whether the reference trains on the same images as the engine. Images of the generators bat and
 * gbase differ from those of the reference; those that a caller hands over are gone. */
static bool has_images_of_reference(const struct train *train)
{
    const char *generator = train->generator ? train->generator : "";
    return !train->data->given && strcmp(generator, "bat") != 0 && strcmp(generator, "gbase") != 0;
}

/* Finds the layer that made the loss non-finite. Restores the state before `bad_step`, then uses the
 * reference to find the first layer with a non-finite output. Writes what it found, or why it found nothing,
 * to `found`. Collective. */
static enum status find_bad_layer(struct trainer *trainer, uint64_t bad_step, char *found, size_t size)
{
    const uint32_t steps = train_steps(&trainer->train), epoch = (uint32_t)(bad_step / steps),
                   step = (uint32_t)(bad_step % steps);
    const char *layer = "the loss";
    struct train_state before = {0};
    enum status status = go_before(trainer, epoch, step, &before);
    if (status == STATUS_OK && trainer->own_bad_step == bad_step)
        status = naive_find_bad_layer(&trainer->train, &before, epoch, step, &layer);
    train_state_free(&before);
    if (status == STATUS_OK)
        snprintf(found, size, "first non-finite result: %s; ", layer);
    else
        snprintf(found, size, "the first layer with a non-finite result could not be found (%.400s); ",
                 status_text());
    return status;
}

/* Reports the step whose loss was not finite and, if the reference has the same images, the layer. Returns an
 * error on a rank whose own samples had this loss, or whose search for the layer failed. */
static enum status explain_bad_loss(struct trainer *trainer, uint64_t bad_step)
{
    const struct train *train = &trainer->train;
    const uint32_t steps = train_steps(train);
    enum status status = STATUS_OK;
    char found[512] = "";
    if (has_images_of_reference(train))
        status = find_bad_layer(trainer, bad_step, found, sizeof found);
    if (status == STATUS_OK && trainer->own_bad_step != bad_step)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "epoch %u, step %u of %u: the loss is not finite; %slower --lr, or continue with "
                      "--allow-nan",
                      (uint32_t)(bad_step / steps) + 1, (uint32_t)(bad_step % steps) + 1, steps, found);
}

/* Adds the steps of one call of the engine to the current epoch. */
static void add_part(struct train_partial *done, const struct train_totals *part, uint32_t steps)
{
    struct train_totals *sums = &done->totals;
    if (done->steps == 0) {
        *sums = *part;
    } else {
        sums->loss += part->loss;
        sums->correct += part->correct;
        sums->samples += part->samples;
        sums->skipped += part->skipped;
        sums->norms += part->norms;
        sums->normed += part->normed;
        sums->data_s = sums->data_s < 0 || part->data_s < 0 ? -1 : sums->data_s + part->data_s;
        sums->generate_s += part->generate_s;
        sums->masked += part->masked;
        sums->delivered += part->delivered;
        sums->read_bytes += part->read_bytes;
        sums->resident = part->resident;
        sums->resident_device = part->resident_device;
        sums->stall_s += part->stall_s;
        sums->decode_s += part->decode_s;
        sums->bad_step = part->bad_step < sums->bad_step ? part->bad_step : sums->bad_step;
    }
    done->steps += steps;
}

/* Adds the layers in which the overflows of the latest steps began. */
static enum status add_overflows(struct trainer *trainer)
{
    uint32_t steps[MODEL_LAYERS_MAX];
    TRY(trainer->engine->overflows(trainer->state, steps));
    for (uint32_t i = 0; i < trainer->train.model->layer_count; i++) {
        trainer->overflows[i] += steps[i];
        trainer->all_overflows[i] += steps[i];
    }
    return STATUS_OK;
}

/* Passes `count` steps of the current epoch to the engine. An engine on a device may still compute them when
 * this function returns; collect() waits for them. */
static enum status enqueue(struct trainer *trainer, uint32_t count)
{
    struct exchange *exchange = exchange_of(trainer);
    const double cpu_begin_s = timer_cpu_s();
    if (trainer->enqueued == 0) {
        trainer->part_begin_s = timer_now_s();
        if (exchange)
            exchange->spent_s = 0;
    }
    TRY(trainer_steps(trainer, trainer->now.history.epochs, trainer->done.steps + trainer->enqueued, count));
    trainer->enqueued += count;
    trainer->cpu_s += timer_cpu_s() - cpu_begin_s;
    return STATUS_OK;
}

/* Waits for the steps since the latest call, and adds their totals to the current epoch. Collective. */
static enum status collect(struct trainer *trainer)
{
    struct train_partial *done = &trainer->done;
    const struct exchange *exchange = exchange_of(trainer);
    const double cpu_begin_s = timer_cpu_s();
    if (trainer->enqueued == 0)
        return STATUS_OK;
    TRY(trainer_totals(trainer, &trainer->part));
    trainer->part_s = timer_now_s() - trainer->part_begin_s;
    if (trainer->part.skipped > 0 && trainer->engine->overflows) /* not that of a pipeline */
        TRY(comm_agree(add_overflows(trainer)));
    trainer->cpu_s += timer_cpu_s() - cpu_begin_s;
    trainer->cpu_span_s += trainer->part_s;
    add_part(done, &trainer->part, trainer->enqueued);
    trainer->unread.loss += trainer->part.loss;
    trainer->unread.correct += trainer->part.correct;
    trainer->unread.samples += trainer->part.samples;
    trainer->enqueued = 0;
    done->epoch_s += trainer->part_s;
    display_pass(trainer->display, &done->totals, done->epoch_s);
    done->exchange_s += exchange ? exchange->spent_s : 0;
    if (trainer->part.bad_step != TRAIN_FINE && !trainer->job->allow_nan)
        return comm_agree(explain_bad_loss(trainer, trainer->part.bad_step));
    return STATUS_OK;
}

/* Begins the next epoch, or continues the one that a checkpoint is within. */
static void begin_epoch(struct trainer *trainer)
{
    trainer->begun = true;
    trainer->done = trainer->now.partial;
    trainer->enqueued = 0;
    memset(trainer->overflows, 0, sizeof trainer->overflows);
    trainer->cpu_s = trainer->cpu_span_s = 0;
    if (trainer->job->skipped)
        *trainer->job->skipped = resume_skipped(trainer->job, trainer->now.history.epochs);
    trainer_use_shares(trainer);
    display_begin(trainer->display, trainer->now.history.epochs);
    display_pass(trainer->display, &trainer->done.totals, trainer->done.epoch_s);
}

uint32_t trainer_left(const void *state)
{
    const struct trainer *trainer = state;
    const struct train_partial *done = trainer->begun ? &trainer->done : &trainer->now.partial;
    return train_steps(&trainer->train) - done->steps - (trainer->begun ? trainer->enqueued : 0);
}

/* Without stops, the steps are one call of the engine. */
enum status trainer_advance(void *state, uint32_t count)
{
    struct trainer *trainer = state;
    const uint64_t steps = train_steps(&trainer->train);
    if (!trainer->begun)
        begin_epoch(trainer);
    const uint64_t begin = trainer->now.history.epochs * steps, end = begin + steps;
    while (count > 0) {
        const uint64_t step = begin + trainer->done.steps + trainer->enqueued,
                       stop = trainer_next_stop(trainer->job, step, end);
        const uint32_t part = stop - step < count ? (uint32_t)(stop - step) : count;
        TRY(enqueue(trainer, part));
        count -= part;
        if (step + part == stop)
            TRY(collect(trainer));
        if (step + part == stop && stop < end)
            TRY(trainer_stop(trainer, stop));
    }
    return STATUS_OK;
}

enum status trainer_run(void *state, uint64_t number, struct run_time *time)
{
    struct trainer *trainer = state;
    (void)number;
    double begin_s = timer_now_s();
    trainer->begun = false; /* also after an epoch that failed */
    enum status status = trainer_advance(trainer, trainer_left(trainer));
    display_end(trainer->display);
    if (trainer->job->pipeline.stages)
        trainer->piped_epoch = pipeline_measured(trainer->state);
    time->other_s = trainer->done.epoch_s - (timer_now_s() - begin_s);
    return status;
}

/* ---- Between two steps, for callers of trainer_advance() ---- */

enum status trainer_read(void *state, struct train_totals *totals)
{
    struct trainer *trainer = state;
    TRY(collect(trainer));
    *totals = trainer->unread;
    trainer->unread = (struct train_totals){0};
    return STATUS_OK;
}

/* Waits for the steps, and makes room for the state between two of them. Returns whether there is one in
 * `*within`. Collective. */
static enum status settle(struct trainer *trainer, bool *within)
{
    enum status status = STATUS_OK;
    TRY(collect(trainer));
    *within = trainer->begun && trainer->done.steps > 0;
    if (*within && !trainer->within.parameters)
        status = ALLOCATED(train_state_for(&trainer->job->train, &trainer->within),
                           "out of memory for the parameters");
    return comm_agree(status);
}

enum status trainer_save(void *state, const char *folder)
{
    struct trainer *trainer = state;
    enum status status = STATUS_OK;
    bool within;
    TRY(settle(trainer, &within));
    if (comm_rank() == 0)
        status = checkpoint_check_folder(folder, true);
    if (comm_rank() == 0 && status == STATUS_OK)
        status =
            checkpoint_refuse_later(folder, trainer->now.history.epochs, within ? trainer->done.steps : 0);
    TRY(comm_agree(status));
    if (within)
        return comm_agree(keep_within(trainer, folder));
    if (comm_rank() == 0)
        status = trainer_note_shares(trainer);
    if (comm_rank() == 0 && status == STATUS_OK)
        status = checkpoint_write(folder, trainer->job->keep, &trainer->now);
    return comm_agree(status);
}

enum status trainer_load(void *state, const char *folder)
{
    struct trainer *trainer = state;
    struct train_job from = *trainer->job;
    enum status status = STATUS_OK;
    bool within, found = true;
    TRY(settle(trainer, &within));
    from.checkpoints = folder;
    if (comm_rank() == 0)
        status = checkpoint_exists(folder, &found);
    if (status == STATUS_OK && !found)
        status = status_set(STATUS_USAGE, "there is no checkpoint in %s", folder);
    if (comm_rank() == 0 && status == STATUS_OK)
        status = resume(trainer, &from);
    TRY(comm_agree(status));
    trainer->begun = false;
    trainer->unread = (struct train_totals){0};
    TRY(trainer_share_state(trainer));
    return trainer_set(trainer, &trainer->now.state);
}

enum status trainer_evaluate(void *state, struct judgement *judged)
{
    struct trainer *trainer = state;
    TRY(collect(trainer));
    return comm_agree(trainer_test(trainer, judged));
}

enum status trainer_evaluate_given(void *state, const struct data_set *batch, float *logits,
                                   struct judgement *judged)
{
    const struct trainer *trainer = state;
    TRY(trainer->engine->evaluate(trainer->state, DATA_TEST, 0, batch->count, logits));
    return logits_judge(logits, batch, trainer->train.model->classes, judged);
}

void *trainer_test_samples(void *state)
{
    const struct trainer *trainer = state;
    const struct engine *engine = trainer->engine;
    return engine->test_samples ? engine->test_samples(trainer->state)
                                : trainer->train.data->sets[DATA_TEST].values;
}

enum status trainer_export(void *state, const char *path)
{
    struct trainer *trainer = state;
    bool within;
    TRY(settle(trainer, &within));
    if (within)
        TRY(trainer_get(trainer, &trainer->within));
    const struct train_state *now = within ? &trainer->within : &trainer->now.state;
    return comm_agree(comm_rank() > 0
                          ? STATUS_OK
                          : export_parameters(&trainer->job->train, now->ema ? now->ema : now->parameters,
                                              &trainer->job->identity, path));
}

enum status trainer_import(void *state, const char *path)
{
    struct trainer *trainer = state;
    const struct init_request from = {"path", path, INIT_EMA_AUTO};
    const size_t bytes = trainer->now.arena_values * sizeof(float);
    struct checkpoint *now = &trainer->now;
    uint64_t hash;
    bool within;
    TRY(settle(trainer, &within));
    if (within)
        return comm_agree(
            status_set(STATUS_USAGE, "path: parameters can be replaced only between two epochs"));
    TRY(comm_agree(init_take(&from, trainer->job->train.model, now->state.parameters, &hash)));
    memset(now->state.m, 0, bytes);
    memset(now->state.v, 0, bytes);
    if (now->state.ema)
        memcpy(now->state.ema, now->state.parameters, bytes);
    TRY(trainer_share_state(trainer));
    return trainer_set(trainer, &now->state);
}

void trainer_position(const void *state, struct trainer_position *position)
{
    const struct trainer *trainer = state;
    const struct train_history *history = &trainer->now.history;
    *position = (struct trainer_position){.epoch = history->epochs,
                                          .epochs = trainer->job->epochs,
                                          .steps = train_steps(&trainer->train),
                                          .memory_bytes = trainer->engine->memory_bytes(trainer->state)};
    position->step = position->steps - trainer_left(state);
    position->samples = (uint32_t)train_share(&trainer->train, position->step % position->steps).count;
}

enum status trainer_probe(void *state)
{
    struct trainer *trainer = state;
    struct train_totals unused;
    TRY(trainer_steps(trainer, 0, 0, 1));
    return trainer_totals(trainer, &unused);
}

/* Before the measurement, the first steps wait because no batch is prepared. The JPEG engines of a GPU take
 * about two seconds and a hundred steps to reach their rate; slow steps end this after PROBE_WARM_MOST_S. */
#define PROBE_WARM_S      0.6
#define PROBE_WARM_LEAST  4 /* steps */
#define PROBE_WARM_GPU_S  2.0
#define PROBE_WARM_STEPS  100
#define PROBE_WARM_MOST_S 3.0
#define PROBE_PARTS       4   /* measured parts */
#define PROBE_DROPPED     1   /* parts that do not count */
#define PROBE_PART_S      0.6 /* duration of a part at least: the device idles before each */

/* The steps of a probe. */
struct probe {
    struct trainer *trainer;
    uint64_t next;    /* step of all epochs */
    uint32_t stretch; /* steps of a call of the engine */
};

/* A measurement of some steps. */
struct probed {
    double took_s, stall_s;
    uint32_t steps;
};

/* Runs at least `count` steps that take at least `seconds` together. Goes on after the last epoch, because a
 * stream that has to seek begins with an empty queue. All ranks run the same steps. */
static enum status probe_steps(struct probe *probe, double seconds, uint32_t count, struct probed *sum)
{
    struct trainer *trainer = probe->trainer;
    const uint32_t steps = train_steps(&trainer->train);
    *sum = (struct probed){0};
    while (sum->took_s < seconds || sum->steps < count) {
        const uint32_t at = (uint32_t)(probe->next % steps),
                       call = probe->stretch < steps - at ? probe->stretch : steps - at;
        struct train_totals totals;
        const double begin_s = timer_now_s();
        TRY(trainer_steps(trainer, (uint32_t)(probe->next / steps), at, call));
        TRY(comm_agree(trainer->engine->totals(trainer->state, &totals)));
        double both[] = {timer_now_s() - begin_s, totals.stall_s};
        TRY(comm_max(both, 2));
        sum->took_s += both[0];
        sum->stall_s += both[1];
        sum->steps += call;
        probe->next += call;
        if (call == probe->stretch &&
            2 * both[0] < fmin(seconds, PROBE_PART_S)) /* the device idles between two calls */
            probe->stretch *= 2;
    }
    return STATUS_OK;
}

static enum status probe_warm(struct probe *probe)
{
    const struct train_decoding *decoding = probe->trainer->train.decoding;
    double decodes = decoding && decoding->share > 0; /* on a GPU of a rank */
    struct probed part;
    uint32_t steps = 0;
    TRY(comm_max(&decodes, 1));
    for (double took_s = 0; took_s < PROBE_WARM_S || steps < PROBE_WARM_LEAST ||
                            (decodes > 0 && took_s < PROBE_WARM_MOST_S &&
                             (took_s < PROBE_WARM_GPU_S || steps < PROBE_WARM_STEPS));) {
        TRY(probe_steps(probe, PROBE_PART_S, 1, &part));
        took_s += part.took_s;
        steps += part.steps;
    }
    return STATUS_OK;
}

static int compare_stalls(const void *left, const void *right)
{
    const struct probed *a = left, *b = right;
    const double difference = a->stall_s * b->took_s - b->stall_s * a->took_s;
    return (difference > 0) - (difference < 0);
}

/* Leaves out the part in which the steps waited most: another process may have interrupted it. */
enum status trainer_probe_stalls(void *state, double *stall, double *step_s)
{
    struct probe probe = {.trainer = state, .stretch = 1};
    struct probed parts[PROBE_PARTS], sum = {0};
    TRY(probe_warm(&probe));
    for (int i = 0; i < PROBE_PARTS; i++)
        TRY(probe_steps(&probe, PROBE_PART_S, 1, &parts[i]));
    qsort(parts, PROBE_PARTS, sizeof parts[0], compare_stalls);
    for (int i = 0; i < PROBE_PARTS - PROBE_DROPPED; i++) {
        sum.took_s += parts[i].took_s;
        sum.stall_s += parts[i].stall_s;
        sum.steps += parts[i].steps;
    }
    *stall = sum.stall_s < sum.took_s ? sum.stall_s / sum.took_s : 1;
    *step_s = sum.took_s / sum.steps;
    return STATUS_OK;
}

#define PROBE_STEP_S     0.15 /* of a measured part, and of the steps before */
#define PROBE_STEP_PARTS 3

/* The fastest part counts: other processes only slow steps down. */
enum status trainer_probe_step(void *state, double *step_s)
{
    struct probe probe = {.trainer = state, .stretch = 1};
    struct probed part;
    *step_s = INFINITY;
    TRY(probe_steps(&probe, PROBE_STEP_S, 2, &part));
    for (int i = 0; i < PROBE_STEP_PARTS; i++) {
        TRY(probe_steps(&probe, PROBE_STEP_S, 1, &part));
        *step_s = fmin(*step_s, part.took_s / part.steps);
    }
    return STATUS_OK;
}

enum status trainer_fetch(void *state, void *result)
{
    (void)state, (void)result;
    return STATUS_OK;
}

/* ---- After an epoch ---- */

/* Tests the averaged parameters: passes them to the engine as its parameters, and afterwards restores the
 * engine's state. */
static enum status test_average(struct trainer *trainer, struct train_epoch *epoch)
{
    struct train_state averaged = trainer->now.state;
    averaged.parameters = averaged.ema;
    TRY(trainer->engine->set(trainer->state, &averaged));
    TRY(trainer_test(trainer, &epoch->ema));
    return trainer->engine->set(trainer->state, &trainer->now.state);
}

void train_note_epoch(struct train_history *history, double epoch_s, double accuracy)
{
    history->epochs++;
    history->trained_s += epoch_s;
    if (history->to_98_s < 0 && accuracy >= 0.98)
        history->to_98_s = history->trained_s;
    if (history->to_99_s < 0 && accuracy >= 0.99)
        history->to_99_s = history->trained_s;
}

enum status trainer_finish(void *state, struct train_epoch *epoch)
{
    struct trainer *trainer = state;
    const struct train_job *job = trainer->job;
    const struct train_totals *totals = &trainer->done.totals;
    const struct exchange *exchange = exchange_of(trainer);
    struct train_history *history = &trainer->now.history;
    uint64_t room_bytes;
    uint32_t steps = train_steps(&job->train);
    uint64_t last = ((uint64_t)history->epochs + 1) * steps - 1;
    display_wait(trainer->display);
    if (totals->samples == 0) /* the same on all ranks */
        return status_set(STATUS_FAILED,
                          "all samples of epoch %" PRIu32 " are broken, so nothing was learned",
                          history->epochs + 1);
    if (totals->masked > 0)
        status_say("epoch %" PRIu32 ": %" PRIu64 " broken training sample%s masked", history->epochs + 1,
                   totals->masked, totals->masked == 1 ? " was" : "s were");
    *epoch = (struct train_epoch){.steps = steps,
                                  .totals = *totals,
                                  .loss = totals->loss / (double)totals->samples,
                                  .train_accuracy = (double)totals->correct / (double)totals->samples,
                                  .gradient_norm = totals->norms / (double)totals->normed,
                                  .ema = {NAN, NAN, NAN},
                                  .rate = schedule_rate(&job->train.schedule, last),
                                  .scales_loss = trainer->engine->scales_loss,
                                  .decoding = trainer->decoding,
                                  .cpu_s = trainer->cpu_s,
                                  .cpu_span_s = trainer->cpu_span_s,
                                  .epoch_s = trainer->done.epoch_s,
                                  .exchange = exchange ? exchange->method->name : "",
                                  .exchange_s = trainer->done.exchange_s,
                                  .memory_bytes = trainer->engine->memory_bytes(trainer->state)};
    double slowest_s = trainer->done.epoch_s;
    enum status status = trainer_test(trainer, &epoch->test);
    if (trainer->train.memory && status == STATUS_OK)
        status = memory_used(trainer, trainer->device, &trainer->used_bytes, &room_bytes);
    epoch->planned_bytes = trainer->train.memory ? memory_total(&trainer->planned) : 0;
    epoch->used_bytes = trainer->used_bytes;
    TRY(comm_agree(status == STATUS_OK ? trainer_log_part(trainer, &epoch->test) : status));
    TRY(trainer_get(trainer, &trainer->now.state));
    if (trainer->now.state.ema)
        TRY(comm_agree(test_average(trainer, epoch)));
    TRY(trainer_check_parameters(trainer));
    TRY(trainer_rebalance(trainer));
    TRY(trainer_report_stage(trainer, epoch));
    TRY(comm_max(&slowest_s, 1));
    epoch->loss_scale = trainer->now.state.scale.scale;
    layer_overflows_text(job->train.model, trainer->overflows, epoch->overflows);
    if (history->epochs + 1 == job->epochs)
        layer_overflows_say(job->train.model, trainer->all_overflows);
    train_note_epoch(history, slowest_s, epoch->test.accuracy);
    trainer->now.partial = (struct train_partial){0};
    trainer->begun = false;
    epoch->history = *history;
    return STATUS_OK;
}

enum status trainer_keep(const void *input, void *state, const char *rows)
{
    (void)input;
    struct trainer *trainer = state;
    const struct train_job *job = trainer->job;
    if (!job->checkpoints)
        return STATUS_OK;
    char *copy = strdup(rows);
    TRY(ALLOCATED(copy, "out of memory for the rows"));
    free(trainer->now.row);
    trainer->now.row = copy;
    TRY(trainer_note_shares(trainer));
    TRY(checkpoint_write(job->checkpoints, job->keep, &trainer->now));
    return resume_write_state(job, trainer->now.history.epochs, 0);
}

const char *trainer_kept(const void *state)
{
    return ((const struct trainer *)state)->now.row;
}

enum status trainer_end(const void *input, void *state, uint64_t runs)
{
    (void)input;
    const struct trainer *trainer = state;
    const struct train_job *job = trainer->job;
    if (job->shows_memory && runs > 0)
        memory_print("memory, after the last epoch:", &trainer->planned, &trainer->memory,
                     trainer->used_bytes);
    if (job->export_path && comm_rank() == 0)
        TRY(export_parameters(&job->train, checkpoint_parameters(&trainer->now), &job->identity,
                              job->export_path));
    if (comm_rank() == 0)
        TRY(resume_write_state(job, trainer->now.history.epochs, trainer->now.partial.steps));
    if (runs == 0 && trainer->now.history.epochs > job->epochs)
        status_say("the checkpoint already has %u epoch%s, but --epochs is %u%s%s",
                   trainer->now.history.epochs, trainer->now.history.epochs == 1 ? "" : "s", job->epochs,
                   job->export_path ? ": exported to " : ": nothing to do",
                   job->export_path ? job->export_path : "");
    else if (runs == 0)
        status_say("%u of %u epochs are done%s%s", trainer->now.history.epochs, job->epochs,
                   job->export_path ? ": exported to " : ": nothing to do",
                   job->export_path ? job->export_path : "");
    return STATUS_OK;
}

/* ---- Verification: an engine trains as the oracle (engine_oracle) does ---- */

/* Number of steps compared before the oracle's state is copied to the engine; docs/train.md explains why.
 * With Muon, it is 1: oracle_matrix_drift() compares single steps. With batch normalisation, it is 1, too:
 * statistics of small batches amplify rounding, so that after five steps plain loops in floats exceed the
 * bound as well. */
#define STRETCH 5
/* Maximum number of attempts at a step that overflows. More than enough: the loss scale reaches its minimum
 * sooner, also with the largest --loss-scale-backoff. */
#define VERIFY_TRIES  160
#define HALF_ULP      (FLT_EPSILON / 2) /* largest relative error of rounding to a float */
#define ASTRAY_LISTED 8                 /* maximum number of wrong tensors in a warning */

static uint32_t count_astray(const struct found *found)
{
    uint32_t count = 0;
    for (size_t t = 0; t < MODEL_TENSORS_MAX; t++)
        count += found->astray[t];
    return count;
}

static uint64_t found_wrong(const struct found *found)
{
    return (uint64_t)found->wrong_losses + count_astray(found) + found->misread;
}

/* Arrays of the same values at the beginning of a stretch, in the engine and in the oracle. */
struct compared {
    const float *begin, *mine, *theirs;
};

/* Returns the Euclidean norm of the error of a tensor's change, relative to the norm of the oracle's change;
 * NaN if a value is NaN. First subtracts from the error what `steps` steps that store floats may round: where
 * gradients vanish, the changes are smaller than that. With `skips`, leaves out idle values. Leaves out
 * values for which the error of `moments` is as large as the moment, unless `moments` is NULL. */
static double drift_of(const struct model_tensor *tensor, uint32_t steps, bool skips,
                       const struct compared *of, const struct compared *moments)
{
    const size_t idle = tensor->first + tensor->idle_first;
    double off = 0, way = 0, norm = 0;
    for (size_t i = tensor->first; i < tensor->first + tensor->values; i++) {
        if (skips && i >= idle && i < idle + tensor->idle_values)
            continue;
        if (moments &&
            !(fabs((double)moments->mine[i] - moments->theirs[i]) < fabs((double)moments->theirs[i])))
            continue;
        off += ((double)of->mine[i] - of->theirs[i]) * ((double)of->mine[i] - of->theirs[i]);
        way += ((double)of->theirs[i] - of->begin[i]) * ((double)of->theirs[i] - of->begin[i]);
        norm += (double)of->theirs[i] * of->theirs[i];
    }
    /* Each step of the engine rounds once, and so does the oracle's final state. */
    const double error = sqrt(off) - (steps + 1) * HALF_ULP * sqrt(norm);
    return error <= 0 ? 0 : error / sqrt(way);
}

/* Marks the parameter tensors whose change from `begin` differs too much from the oracle's. Adam and AdamW
 * move idle values by whole steps in a direction that only rounding determines.
 *
 * From moments that are zero, Adam's first step moves each value by the learning rate in the direction of its
 * gradient's sign. Where rounding is larger than a gradient, the sign may differ, and the error is two steps.
 * One such value among the n values of a tensor gives a drift of 2 / sqrt(n): 0.25 for a bias of 64 values,
 * although its gradients may differ by only 1 %. The moments are linear in the gradients, so their error
 * shows whether the gradients are right. If it is within the bound, the values of which not even the sign of
 * the moment is certain do not count. A wrong gradient exceeds the bound of the moments; a wrong update
 * exceeds that of the remaining values.
 *
 * Muon makes all singular values of a matrix equal, so rounding decides the direction of those that would be
 * zero. If the moments are within the bound, the change is compared with that which follows from the engine's
 * own moments. `number` is the number of the step, the first of `steps`. */
static void note_astray(struct trainer *trainer, uint64_t number, uint32_t steps, double most,
                        const struct train_state *begin, const struct train_state *mine,
                        const struct train_state *theirs)
{
    const struct train *train = &trainer->job->train;
    const bool skips = optimizer_moments(train->optimizer.kind) > 1;
    const struct compared parameters = {begin->parameters, mine->parameters, theirs->parameters};
    const struct compared moments = {begin->m, mine->m, theirs->m};
    const struct compared averages = {begin->ema, mine->ema, theirs->ema};
    struct found *found = &trainer->found;
    for (uint32_t t = 0; t < train->model->tensor_count; t++) {
        const struct model_tensor *tensor = &train->model->tensors[t];
        const double drift = drift_of(tensor, steps, skips, &parameters, NULL);
        const double moved = drift_of(tensor, steps, skips, &moments, NULL);
        const bool matrix = train->optimizer.kind == OPTIMIZER_MUON && tensor->hidden && steps == 1;
        bool astray = !(drift <= most);
        if (matrix && (astray || mine->ema))
            astray = !(moved <= most) || !(oracle_matrix_drift(train, tensor, number, begin, mine) <= most);
        else if (astray && skips)
            astray = !(moved <= most) || !(drift_of(tensor, steps, skips, &parameters, &moments) <= most);
        if (!astray && mine->ema && !matrix)
            astray = !(drift_of(tensor, steps, skips, &averages, NULL) <= most);
        if (astray && !(found->drift[t] > drift)) {
            found->drift[t] = drift;
            found->moment_drift[t] = moved;
            found->most = most;
        }
        found->astray[t] |= astray;
    }
}

static void compare_losses(struct trainer *trainer, const struct train_totals *mine,
                           const struct train_totals *exact)
{
    const struct engine_bounds *bounds = &trainer->bounds;
    double scale = fmax(exact->loss, bounds->floor * (double)exact->samples);
    trainer->found.losses++;
    trainer->found.wrong_losses +=
        mine->samples != exact->samples || !(fabs(mine->loss - exact->loss) <= bounds->loss * scale);
}

/* Returns the bound of the error of a tensor's change in `steps` steps, relative to the oracle's change. It
 * is bounds.drift, plus what floats lose where the losses are near 0. The derivative of a sample's loss by
 * the logit of its class is p - 1, divided by the samples of the step. In floats, p is a quotient whose
 * divisor adds up terms of all classes, so near 1 it has an error of up to classes + 1 half ulps, whatever
 * the size of 1 - p. Gradients and changes are linear in these derivatives: they have the same relative
 * error. `slopes` is from oracle_slopes(). */
static double drift_bound(const struct trainer *trainer, uint32_t steps, double slopes)
{
    const double lost = (trainer->train.model->classes + 1.0) * HALF_ULP * steps;
    return trainer->bounds.drift + lost / fmax(slopes, DBL_MIN);
}

/* Runs one step of the engine. If the engine skipped the step because of overflow, runs it again with the
 * reduced loss scale, because a skipped step cannot be compared. At the minimum scale, the step stays
 * skipped. */
static enum status take_step(struct trainer *trainer, uint32_t epoch, uint32_t step,
                             struct train_totals *totals)
{
    for (int tries = 0; tries < VERIFY_TRIES; tries++) {
        TRY(trainer_steps(trainer, epoch, step, 1));
        TRY(trainer_totals(trainer, totals));
        if (totals->skipped == 0)
            break;
    }
    return STATUS_OK;
}

/* Runs one step of the oracle, which trains on the samples of all ranks. Its loss must be finite. */
static enum status take_exact_step(void *oracle, uint32_t epoch, uint32_t step, uint32_t number,
                                   struct train_totals *totals)
{
    TRY(engine_oracle.steps(oracle, epoch, step, 1));
    TRY(engine_oracle.totals(oracle, totals));
    if (!isfinite(totals->loss))
        return status_set(STATUS_FAILED,
                          "--verify: the reference's own loss at step %" PRIu32
                          " is not finite, so nothing can be compared; lower --lr, or use fewer "
                          "--verify-steps",
                          number);
    return STATUS_OK;
}

/* Runs the same steps on both engines, starting from state `begin`. Compares the losses, marks the tensors
 * that differ, and returns both final states in `mine` and `theirs`. */
static enum status compare_stretch(struct trainer *trainer, void *oracle, uint32_t first, uint32_t count,
                                   const struct train_state *begin, struct train_state *mine,
                                   struct train_state *theirs)
{
    uint32_t steps = train_steps(&trainer->train), epoch = trainer->now.history.epochs;
    TRY(engine_oracle.set(oracle, begin));
    TRY(trainer_set(trainer, begin));
    for (uint32_t i = first; i < first + count; i++) {
        struct train_totals own, exact;
        TRY(take_step(trainer, epoch + i / steps, i % steps, &own));
        TRY(comm_agree(take_exact_step(oracle, epoch + i / steps, i % steps, i + 1, &exact)));
        compare_losses(trainer, &own, &exact);
    }
    TRY(trainer_get(trainer, mine));
    TRY(engine_oracle.get(oracle, theirs));
    note_astray(trainer, (uint64_t)epoch * steps + first, count,
                drift_bound(trainer, count, oracle_slopes(oracle)), begin, mine, theirs);
    return trainer_combine_found(&trainer->found);
}

/* Before the first epoch: compares both engines step by step, in stretches. Each stretch starts with the
 * oracle's state at the end of the previous one. Without these restarts, the comparison would measure how
 * training amplifies rounding (docs/train.md), which is not an error of the engine. With batch normalisation,
 * a single activation whose sign rounding decides can exceed the bound of a step. Then the same samples from
 * other parameters decide: a fault of the engine would show there as well. */
static enum status compare_steps(struct trainer *trainer, void *oracle, struct train_state *states)
{
    const uint32_t count = trainer->job->verify_steps, done = trainer->now.partial.steps;
    const bool alone = trainer->train.optimizer.kind == OPTIMIZER_MUON || trainer->train.model->normalises;
    const uint32_t stretch = alone ? 1 : STRETCH;
    const struct train_state *begin = &trainer->now.state;
    for (uint32_t first = 0; first < count; first += stretch) {
        uint32_t left = count - first;
        struct train_state *theirs = &states[1 + first / stretch % 2];
        const struct found before = trainer->found;
        TRY(compare_stretch(trainer, oracle, done + first, left < stretch ? left : stretch, begin, &states[0],
                            theirs));
        if (trainer->train.model->normalises && found_wrong(&trainer->found) > found_wrong(&before)) {
            trainer->found = before;
            TRY(compare_stretch(trainer, oracle, done + first, 1, theirs, &states[0], &states[3]));
        }
        begin = theirs;
    }
    return trainer_set(trainer, &trainer->now.state);
}

/* The repeated epoch: steps done, their totals, and the state after them. */
struct replay {
    uint32_t step;
    struct train_totals totals;
    struct train_state *at;
};

/* Returns the beginning of the repetition: the epoch's first step, or the step at which this run resumed. */
static struct replay begin_replay(const struct trainer *trainer, struct train_state *at)
{
    const struct train_partial *begin = &trainer->now.partial;
    return (struct replay){.step = begin->steps, .totals = begin->totals, .at = at};
}

/* Advances the repeated epoch to the state before `step`. If the epoch is already past `step`, restarts it
 * first. Passes at most STRETCH steps to the engine per call. The timed epoch may have run more steps per
 * call; the results must be the same. */
static enum status go_to(struct trainer *trainer, struct replay *replay, uint32_t step)
{
    const struct train_partial *begin = &trainer->now.partial;
    if (step < replay->step)
        *replay = begin_replay(trainer, replay->at);
    TRY(trainer_set(trainer, replay->step > begin->steps ? replay->at : &trainer->now.state));
    while (replay->step < step) {
        struct train_totals more;
        uint32_t left = step - replay->step, count = left < STRETCH ? left : STRETCH;
        TRY(trainer_steps(trainer, trainer->now.history.epochs, replay->step, count));
        TRY(trainer_totals(trainer, &more));
        replay->step += count;
        replay->totals.loss += more.loss;
        replay->totals.samples += more.samples;
    }
    return trainer_get(trainer, replay->at);
}

/* Compares one step with the oracle, starting from the state that the epoch had before this step. After many
 * training steps, rounding occasionally changes a step by more than the bounds (docs/train.md). In that case
 * the neighbouring step decides, because a real fault would show there as well. */
static enum status compare_step(struct trainer *trainer, void *oracle, struct replay *replay, uint32_t step,
                                struct train_state *scratch)
{
    uint32_t steps = train_steps(&trainer->train);
    uint32_t neighbour = step > trainer->now.partial.steps ? step - 1 : step + 1 < steps ? step + 1 : step;
    struct found before = trainer->found;
    TRY(go_to(trainer, replay, step));
    TRY(compare_stretch(trainer, oracle, step, 1, replay->at, &scratch[0], &scratch[1]));
    if (found_wrong(&trainer->found) == found_wrong(&before))
        return STATUS_OK;
    trainer->found = before;
    TRY(go_to(trainer, replay, neighbour));
    return compare_stretch(trainer, oracle, neighbour, 1, replay->at, &scratch[0], &scratch[1]);
}

/* Marks the tensors that are not bit-identical. */
static void note_different(struct trainer *trainer, const struct train_state *one,
                           const struct train_state *other)
{
    const struct model *model = trainer->job->train.model;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        trainer->found.astray[t] |= memcmp(one->parameters + tensor->first, other->parameters + tensor->first,
                                           tensor->values * sizeof *one->parameters) != 0 ||
                                    (one->ema && memcmp(one->ema + tensor->first, other->ema + tensor->first,
                                                        tensor->values * sizeof *one->ema) != 0);
    }
}

/* Returns the sum of the hashes of the samples that an epoch must have: all samples once. With drop_last or
 * repeated augmentation, an epoch does not have all samples, but those of its steps. */
static uint64_t expected_numbers(const struct train *train, uint32_t epoch)
{
    return train->drop_last || train->augment.repeats > 1 ? resume_delivered(train, epoch, train_steps(train))
                                                          : data_epoch_hash(train->data);
}

/* Repeats the timed epoch. Engines are deterministic, so the final parameters must be bit-identical. The loss
 * must be the same within bounds.loss, because the replay sums it in other groups of steps. Also compares two
 * steps with the oracle: one drawn at random, and the last one, whose batch may be short. */
static enum status compare_epoch(struct trainer *trainer, void *oracle, struct train_state *states)
{
    const uint32_t steps = train_steps(&trainer->train);
    const uint32_t begin = trainer->now.partial.steps;
    struct replay replay = begin_replay(trainer, &states[1]);
    trainer->drawn = begin + (uint32_t)unpredictable_below(steps - begin);
    TRY(comm_spread(&trainer->drawn, sizeof trainer->drawn));
    display_wait(trainer->display);
    TRY(trainer_get(trainer, &states[0]));
    TRY(compare_step(trainer, oracle, &replay, trainer->drawn, &states[2]));
    TRY(compare_step(trainer, oracle, &replay, steps - 1, &states[2]));
    TRY(go_to(trainer, &replay, steps));
    note_different(trainer, &states[0], replay.at);
    compare_losses(trainer, &trainer->done.totals, &replay.totals);
    if (trainer->train.data->feed == DATA_LOAD)
        trainer->found.misread =
            trainer->done.totals.delivered != expected_numbers(&trainer->train, trainer->now.history.epochs);
    TRY(trainer_combine_found(&trainer->found));
    return trainer_set(trainer, &states[0]);
}

enum status trainer_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                           uint64_t *wrong)
{
    (void)input, (void)variant;
    struct trainer *trainer = state;
    const struct train *train = &trainer->train;
    struct train alone = *train; /* the oracle trains on the samples of all ranks */
    const struct resources all = job_all_threads();
    struct train_state states[4] = {{0}};
    bool room = true;
    void *oracle = NULL;
    if (train->model->normalises && train->ranks > 1 && !train->sync_batch_norm)
        return status_set(
            STATUS_USAGE,
            "--verify: the ranks normalise over their own samples, but the reference over those of "
            "all ranks; verify on one rank, add --sync-batch-norm, or drop --verify");
    trainer->found = (struct found){0};
    trainer->drawn = UINT32_MAX;
    alone.rank = alone.ranks = alone.share_max = 0;
    alone.shares = NULL;
    alone.exchange = NULL;
    alone.memory = NULL;
    enum status status = engine_oracle.open(&alone, &all, &oracle);
    for (size_t i = 0; i < COUNT_OF(states); i++)
        room &= train_state_for(train, &states[i]);
    if (status == STATUS_OK && !room)
        status = status_set(STATUS_EXHAUSTED, "out of memory to verify");
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = (number > 0 ? compare_epoch : compare_steps)(trainer, oracle, states);
    *wrong = found_wrong(&trainer->found);
    for (size_t i = 0; i < COUNT_OF(states); i++)
        train_state_free(&states[i]);
    if (oracle)
        engine_oracle.close(oracle);
    return status;
}

/* Warns about the first few tensors whose change was wrong, with their errors. */
static void warn_astray(const struct trainer *trainer)
{
    const struct found *found = &trainer->found;
    char text[512] = "";
    for (uint32_t t = 0, listed = 0; t < trainer->job->train.model->tensor_count && listed < ASTRAY_LISTED;
         t++)
        if (found->astray[t] && found->drift[t] != 0) {
            text_join(text, sizeof text, "; ", "%s %.3g (moments %.3g)",
                      trainer->job->train.model->tensors[t].name, found->drift[t], found->moment_drift[t]);
            listed++;
        }
    if (*text)
        status_warn("--verify: errors of these tensors' changes, relative to the reference's changes, exceed "
                    "%.3g: %s",
                    found->most, text);
}

void trainer_verdict(const void *input, void *state, char *text, size_t size)
{
    (void)input;
    const struct trainer *trainer = state;
    const struct found *found = &trainer->found;
    char where[80] = "";
    warn_astray(trainer);
    if (trainer->drawn != UINT32_MAX)
        snprintf(where, sizeof where,
                 " of epoch %" PRIu32 " (step %" PRIu32 ", drawn at random, and the last step)",
                 trainer->now.history.epochs + 1, trainer->drawn + 1);
    snprintf(text, size, "%" PRIu32 " of %" PRIu32 " losses and %" PRIu32 " of %" PRIu32 " tensors%s%s",
             found->wrong_losses, found->losses, count_astray(found), trainer->job->train.model->tensor_count,
             where, found->misread ? ", samples missing" : "");
}

/* ---- --dry-run ---- */

/* Writes the file of --export-step by setting up the variant, with all other files turned off. */
static enum status write_first_step(const struct train_job *job, const struct variant *variant,
                                    const struct resources *resources)
{
    struct train_job alone = *job;
    void *state = NULL;
    alone.checkpoints = alone.log_path = NULL;
    alone.resume = false;
    if (job->largest)
        return status_set(STATUS_USAGE,
                          "--export-step with --dry-run needs a known batch; give --batch a number");
    enum status status = variant->setup(resources, &alone, &state);
    if (state)
        variant->teardown(state);
    return status;
}

/* Checks --memory-limit, and prints the planned memory with --memory, without training. The plan of several
 * ranks and the largest batch need the ranks and runs that --dry-run does not start. */
static enum status check_plan(const struct train_job *job, const struct variant *variant,
                              const struct resources *resources)
{
    struct train_job alone = *job;
    void *state = NULL;
    alone.checkpoints = alone.log_path = alone.step_path = NULL;
    alone.resume = false;
    alone.plans = true;
    if (job->train.ranks > 1 || job->largest)
        return !job->shows_memory
                   ? STATUS_OK
                   : status_set(STATUS_USAGE, "--memory with --dry-run plans one rank and a known "
                                              "batch; start without mpirun, and give --batch a "
                                              "number");
    enum status status = variant->setup(resources, &alone, &state);
    struct trainer *trainer = state;
    if (status == STATUS_OK && job->shows_memory)
        memory_print("memory, as planned:", &trainer->planned, NULL, 0);
    if (status == STATUS_OK && limit_of(trainer) && memory_total(&trainer->planned) > limit_of(trainer))
        status = refuse_memory(trainer, resources);
    if (state)
        variant->teardown(state);
    return status;
}

enum status trainer_check(const void *input, const struct variant *variant, const struct resources *resources)
{
    const struct train_job *job = input;
    int lock = -1;
    if (job->checkpoints) {
        TRY(checkpoint_lock(job->checkpoints, false, &lock));
        enum status status = resume_check_folder(job);
        checkpoint_unlock(lock);
        TRY(status);
    }
    if (job->shows_memory || job->train.memory_limit_bytes)
        TRY(check_plan(job, variant, resources));
    return job->step_path ? write_first_step(job, variant, resources) : STATUS_OK;
}
