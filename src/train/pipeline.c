#include "train/pipeline.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/timer.h"
#include "machine/comm.h"

/* The channels of a stage: from and to the previous stage, from and to the next one. */
enum { INPUTS, IN_DELTAS, DELTAS, OUTPUTS, CHANNELS };

struct pipeline {
    const struct engine *engine;
    const struct pipeline_plan *plan;
    const struct train *train; /* the whole network */
    struct train own;          /* as `train`, with the slice of this stage */
    struct model slice;
    struct stage stage;
    uint32_t number; /* of this stage */
    size_t *arenas;  /* offset of each stage's arena in the whole network's arena; then the end of the last */
    void *state;     /* of the engine */
    uint32_t *numbers; /* the samples of the current step */
    struct pipe_op *ops;
    uint32_t op_count;
    struct comm_channel *channels[CHANNELS]; /* NULL at the ends of the pipeline */
    bool pinned[CHANNELS];                   /* whether the engine has pinned the channel's memory */
    struct pipe_measured measured;
    uint32_t measured_ops[PIPE_KINDS], measured_steps;
};

/* ---- Opening ---- */

static void pipeline_close(void *state)
{
    struct pipeline *pipeline = state;
    for (int i = 0; i < CHANNELS; i++) {
        size_t bytes, own_bytes;
        if (pipeline->pinned[i])
            pipeline->engine->stages->unpin(comm_channel_memory(pipeline->channels[i], &bytes, &own_bytes));
        comm_channel_close(pipeline->channels[i]);
    }
    if (pipeline->state)
        pipeline->engine->close(pipeline->state);
    free(pipeline->arenas);
    free(pipeline->numbers);
    free(pipeline->ops);
    free(pipeline);
}

/* Opens the channels to the neighbouring stages. A sender has a buffer for each micro-batch that can be in
 * transit, so it never waits for a neighbour that works on an earlier micro-batch. */
static enum status open_channels(struct pipeline *pipeline)
{
    const struct model *slice = &pipeline->slice;
    const struct stage *stage = &pipeline->stage;
    const size_t micro_bytes = stage->capacity * sizeof(float),
                 in = stage->first ? 0 : slice->input_values * micro_bytes,
                 out = stage->last ? 0 : slice->layers[slice->layer_count - 1].out_values * micro_bytes;
    const int rank = (int)pipeline->number;
    const uint32_t buffers =
        pipe_live(pipeline->plan->schedule, pipeline->plan->stages, pipeline->plan->micros, 0);
    const struct comm_channel_spec specs[CHANNELS] = {[INPUTS] = {rank - 1, false, in, buffers},
                                                      [IN_DELTAS] = {rank - 1, true, in, buffers},
                                                      [DELTAS] = {rank + 1, false, out, buffers},
                                                      [OUTPUTS] = {rank + 1, true, out, buffers}};
    return comm_channels_open(specs, CHANNELS, pipeline->channels);
}

static enum status pin_channels(struct pipeline *pipeline)
{
    for (int i = 0; pipeline->engine->stages->pin && i < CHANNELS; i++) {
        size_t bytes, own_bytes;
        if (!pipeline->channels[i])
            continue;
        void *memory = comm_channel_memory(pipeline->channels[i], &bytes, &own_bytes);
        TRY(pipeline->engine->stages->pin(memory, bytes));
        pipeline->pinned[i] = true;
    }
    return STATUS_OK;
}

/* Sets the slice, and where the arenas of all stages begin. */
static void take_slice(struct pipeline *pipeline, const uint32_t *begins)
{
    const struct model *whole = pipeline->train->model;
    struct model *slice = &pipeline->slice;
    for (uint32_t s = 0; s < pipeline->plan->stages; s++) {
        model_slice(whole, begins[s], begins[s + 1], slice);
        pipeline->arenas[s] = slice->arena_first;
    }
    pipeline->arenas[pipeline->plan->stages] = whole->arena_values;
    model_slice(whole, begins[pipeline->number], begins[pipeline->number + 1], slice);
}

static enum status allocate(struct pipeline *pipeline)
{
    const struct pipeline_plan *plan = pipeline->plan;
    pipeline->arenas = calloc(plan->stages + 1, sizeof *pipeline->arenas);
    pipeline->numbers = calloc(pipeline->train->batch, sizeof *pipeline->numbers);
    pipeline->ops = calloc(3 * (size_t)plan->micros, sizeof *pipeline->ops);
    return ALLOCATED(pipeline->arenas && pipeline->numbers && pipeline->ops, "out of memory for a pipeline");
}

static enum status open_stage(struct pipeline *pipeline, const struct resources *resources,
                              const uint32_t *begins)
{
    const struct pipeline_plan *plan = pipeline->plan;
    take_slice(pipeline, begins);
    pipeline->stage.slots = pipe_live(plan->schedule, plan->stages, plan->micros, pipeline->number);
    pipeline->stage.first = pipeline->number == 0;
    pipeline->stage.last = pipeline->number + 1 == plan->stages;
    pipeline->stage.splits = pipe_splits(plan->schedule);
    pipeline->own.model = &pipeline->slice;
    pipeline->own.stage = &pipeline->stage;
    pipeline->op_count =
        pipe_ops(plan->schedule, plan->stages, plan->micros, pipeline->number, pipeline->ops);
    TRY(comm_agree(pipeline->engine->open(&pipeline->own, resources, &pipeline->state)));
    TRY(open_channels(pipeline));
    return comm_agree(pin_channels(pipeline));
}

static enum status pipeline_open(const struct train *train, const struct resources *resources, void **state)
{
    const struct pipeline_plan *plan = train->pipeline;
    struct pipeline *pipeline = *state = calloc(1, sizeof *pipeline);
    uint32_t begins[MODEL_LAYERS_MAX + 1];
    if (pipeline) {
        pipeline->engine = plan->engine;
        pipeline->plan = plan;
        pipeline->train = train;
        pipeline->own = *train;
        pipeline->own.pipeline = NULL;
        pipeline->number = (uint32_t)comm_rank();
        pipeline->stage.capacity = train->batch / plan->micros + (train->batch % plan->micros != 0);
    }
    TRY(comm_agree(pipeline ? allocate(pipeline) : status_set(STATUS_EXHAUSTED, "out of memory")));
    TRY(pipe_cut(&pipeline->own, plan->engine, resources, plan->stages, pipeline->stage.capacity, begins));
    return open_stage(pipeline, resources, begins);
}

/* ---- A step ---- */

/* A step's samples, which all stages know. */
struct step {
    uint32_t epoch, total;
    uint64_t number;
    bool measured;
};

static struct micro micro_of(const struct pipeline *pipeline, const struct step *step, uint32_t index)
{
    const struct partition partition = {.rank = index, .ranks = pipeline->plan->micros, .strong = true};
    const struct share share = partition_share(&partition, step->total);
    return (struct micro){.slot = index % pipeline->stage.slots,
                          .index = index,
                          .epoch = step->epoch,
                          .step = step->number,
                          .part = DATA_TRAIN,
                          .training = true,
                          .numbers = pipeline->numbers + share.first,
                          .count = (uint32_t)share.count,
                          .total = step->total};
}

/* Waits for the next message of `from`, and for a free buffer of `to`; either may be NULL. */
static enum status wait_for(struct comm_channel *from, struct comm_channel *to, void **received, void **room)
{
    *received = *room = NULL;
    if (from)
        TRY(comm_channel_receive(from, received));
    return to ? comm_channel_room(to, room) : STATUS_OK;
}

static enum status forward(struct pipeline *pipeline, const struct micro *micro, float *logits)
{
    const size_t values = pipeline->slice.layers[pipeline->slice.layer_count - 1].out_values;
    void *inputs, *outputs;
    TRY(wait_for(pipeline->channels[INPUTS], pipeline->channels[OUTPUTS], &inputs, &outputs));
    double begin_s = timer_now_s();
    TRY(pipeline->engine->stages->forward(pipeline->state, micro, inputs, outputs ? outputs : logits));
    pipeline->measured.times.of[PIPE_FORWARD] += timer_now_s() - begin_s;
    return outputs ? comm_channel_send(pipeline->channels[OUTPUTS], micro->count * values * sizeof(float))
                   : STATUS_OK;
}

static enum status backward(struct pipeline *pipeline, const struct micro *micro, enum pipe_kind kind)
{
    static const enum gradients_of gradients[PIPE_KINDS] = {[PIPE_INPUTS] = GRADIENTS_OF_INPUTS,
                                                            [PIPE_WEIGHTS] = GRADIENTS_OF_WEIGHTS,
                                                            [PIPE_BOTH] = GRADIENTS_OF_BOTH};
    const bool travels = kind != PIPE_WEIGHTS;
    void *deltas, *in_deltas;
    TRY(wait_for(travels ? pipeline->channels[DELTAS] : NULL, travels ? pipeline->channels[IN_DELTAS] : NULL,
                 &deltas, &in_deltas));
    double begin_s = timer_now_s();
    TRY(pipeline->engine->stages->backward(pipeline->state, micro, gradients[kind], deltas, in_deltas));
    pipeline->measured.times.of[kind] += timer_now_s() - begin_s;
    return in_deltas ? comm_channel_send(pipeline->channels[IN_DELTAS],
                                         micro->count * pipeline->slice.input_values * sizeof(float))
                     : STATUS_OK;
}

static enum status update(struct pipeline *pipeline, uint64_t step)
{
    double begin_s = timer_now_s();
    TRY(pipeline->engine->stages->update(pipeline->state, step));
    pipeline->measured.times.update += timer_now_s() - begin_s;
    return STATUS_OK;
}

/* A short last step may have fewer samples than micro-batches. All stages skip the empty micro-batches. */
static enum status make_step(struct pipeline *pipeline, const struct step *step)
{
    struct pipe_measured *measured = &pipeline->measured;
    double begin_s = timer_now_s(), updated_s = measured->times.update;
    for (uint32_t i = 0; i < pipeline->op_count; i++) {
        const struct pipe_op *op = &pipeline->ops[i];
        const struct micro micro = micro_of(pipeline, step, op->micro);
        if (micro.count == 0)
            continue;
        TRY(op->kind == PIPE_FORWARD ? forward(pipeline, &micro, NULL)
                                     : backward(pipeline, &micro, op->kind));
        pipeline->measured_ops[op->kind]++;
    }
    TRY(update(pipeline, step->number));
    pipeline->measured_steps++;
    measured->waited_s += timer_now_s() - begin_s - (measured->times.update - updated_s);
    return STATUS_OK;
}

static void restart_measuring(struct pipeline *pipeline)
{
    pipeline->measured = (struct pipe_measured){0};
    memset(pipeline->measured_ops, 0, sizeof pipeline->measured_ops);
    pipeline->measured_steps = 0;
}

/* Turns sums into means, and subtracts the time of the operations from waited_s, which included it so far. */
static void end_measuring(struct pipeline *pipeline)
{
    struct pipe_measured *measured = &pipeline->measured;
    for (int kind = 0; kind < PIPE_KINDS; kind++) {
        measured->worked_s += measured->times.of[kind];
        measured->times.of[kind] /= pipeline->measured_ops[kind] ? pipeline->measured_ops[kind] : 1;
    }
    measured->waited_s -= measured->worked_s;
    measured->times.update /= pipeline->measured_steps;
}

static enum status make_steps(struct pipeline *pipeline, uint32_t epoch, uint32_t first, uint32_t count)
{
    const struct train *train = pipeline->train;
    const struct draw_order order = draw_order(train->seed, epoch, train->data->sets[DATA_TRAIN].count);
    restart_measuring(pipeline);
    for (uint32_t i = first; i < first + count; i++) {
        const struct step step = {.epoch = epoch,
                                  .number = (uint64_t)epoch * train_steps(train) + i,
                                  .total = train_batch(train, &order, i, pipeline->numbers)};
        if (i == first + 1)
            restart_measuring(pipeline);
        TRY(make_step(pipeline, &step));
    }
    end_measuring(pipeline);
    return STATUS_OK;
}

/* ---- The engine ---- */

/* If a step fails on one rank, its neighbours may wait forever for messages, so that rank ends all ranks. */
static enum status or_give_up(enum status status)
{
    return status == STATUS_OK ? status : comm_give_up(status);
}

static enum status pipeline_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    return or_give_up(make_steps(state, epoch, first, count));
}

/* Returns the part of the whole network's state that belongs to this stage. */
static struct train_state own_part(const struct pipeline *pipeline, const struct train_state *whole)
{
    size_t first = pipeline->slice.arena_first;
    return (struct train_state){whole->parameters + first, whole->m + first, whole->v + first, whole->scale,
                                NULL};
}

static enum status pipeline_set(void *state, const struct train_state *from)
{
    struct pipeline *pipeline = state;
    const struct train_state part = own_part(pipeline, from);
    return comm_agree(pipeline->engine->set(pipeline->state, &part));
}

static enum status pipeline_get(void *state, struct train_state *into)
{
    struct pipeline *pipeline = state;
    struct train_state part = own_part(pipeline, into);
    TRY(comm_agree(pipeline->engine->get(pipeline->state, &part)));
    TRY(comm_share_parts(into->parameters, pipeline->arenas));
    TRY(comm_share_parts(into->m, pipeline->arenas));
    return comm_share_parts(into->v, pipeline->arenas);
}

static enum status pipeline_gradients(void *state, float *gradients)
{
    struct pipeline *pipeline = state;
    TRY(comm_agree(pipeline->engine->gradients(pipeline->state, gradients + pipeline->slice.arena_first)));
    return comm_share_parts(gradients, pipeline->arenas);
}

/* Only the last stage has losses, so the sums over all ranks are those of the step. */
static enum status pipeline_totals(void *state, struct train_totals *totals)
{
    struct pipeline *pipeline = state;
    return pipeline->engine->totals(pipeline->state, totals);
}

static void pipeline_progress(const void *state, struct train_progress *progress)
{
    const struct pipeline *pipeline = state;
    pipeline->engine->progress(pipeline->state, progress);
}

static enum status evaluate(struct pipeline *pipeline, enum data_part part, uint32_t first, uint32_t count,
                            float *logits)
{
    const uint32_t capacity = pipeline->stage.capacity;
    for (uint32_t done = 0; done < count; done += capacity) {
        const struct micro micro = {.part = part,
                                    .numbers = pipeline->numbers,
                                    .count = count - done < capacity ? count - done : capacity};
        for (uint32_t j = 0; j < micro.count; j++)
            pipeline->numbers[j] = first + done + j;
        TRY(forward(pipeline, &micro, logits + (size_t)done * pipeline->train->model->classes));
    }
    return STATUS_OK;
}

/* The last stage computes the logits and sends them to all ranks. */
static enum status pipeline_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                     float *logits)
{
    struct pipeline *pipeline = state;
    const uint32_t stages = pipeline->plan->stages;
    FREED size_t *begins = calloc(stages + 1, sizeof *begins);
    TRY(comm_agree(ALLOCATED(begins, "out of memory for %u stages", stages)));
    TRY(or_give_up(evaluate(pipeline, part, first, count, logits)));
    begins[stages] = (size_t)count * pipeline->train->model->classes;
    return comm_share_parts(logits, begins);
}

static uint64_t pipeline_memory_bytes(const void *state)
{
    const struct pipeline *pipeline = state;
    uint64_t total = pipeline->engine->memory_bytes(pipeline->state);
    for (int i = 0; i < CHANNELS; i++) {
        size_t bytes, own_bytes = 0;
        if (pipeline->channels[i])
            (void)comm_channel_memory(pipeline->channels[i], &bytes, &own_bytes);
        total += own_bytes;
    }
    return total;
}

struct engine pipeline_engine(const struct engine *engine)
{
    struct engine piped = *engine;
    piped.open = pipeline_open;
    piped.close = pipeline_close;
    piped.set = pipeline_set;
    piped.get = pipeline_get;
    piped.steps = pipeline_steps;
    piped.totals = pipeline_totals;
    piped.progress = pipeline_progress;
    piped.gradients = pipeline_gradients;
    piped.evaluate = pipeline_evaluate;
    piped.memory_bytes = pipeline_memory_bytes;
    return piped;
}

enum status pipeline_accepts(const struct engine *engine, enum data_feed feed)
{
    if (!engine->stages)
        return status_set(STATUS_USAGE, "it cannot train a part of a network; use train-naive, train-omp, "
                                        "train-cuda, train-tf32 or train-bf16, or --parallel data");
    return engine->stages->live || feed != DATA_LIVE
               ? STATUS_OK
               : status_set(STATUS_USAGE, "it cannot generate the samples of a pipeline; use --feed stored");
}

/* ---- Measurements ---- */

struct pipe_measured pipeline_measured(const void *state)
{
    return ((const struct pipeline *)state)->measured;
}

void pipeline_layers(const void *state, char *text, size_t size)
{
    const struct model *slice = &((const struct pipeline *)state)->slice;
    const char *first = slice->layers[0].name, *last = slice->layers[slice->layer_count - 1].name;
    if (slice->layer_count > 1)
        snprintf(text, size, "%s-%s", first, last);
    else
        snprintf(text, size, "%s", first);
}

enum status pipeline_ideal(const struct pipeline_plan *plan, const struct pipe_measured *mine, double *bubble)
{
    FREED struct pipe_times *times = calloc(plan->stages, sizeof *times);
    FREED double *waits = calloc(plan->stages, sizeof *waits);
    TRY(comm_agree(ALLOCATED(times && waits, "out of memory for the times")));
    TRY(comm_gather(&mine->times, sizeof *times, times));
    TRY(comm_spread(times, plan->stages * sizeof *times));
    TRY(comm_agree(ALLOCATED(pipe_simulate(plan->schedule, plan->stages, plan->micros, times, waits),
                             "out of memory for the simulation")));
    *bubble = waits[comm_rank()];
    return STATUS_OK;
}
