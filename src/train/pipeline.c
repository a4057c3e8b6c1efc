#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/timer.h"
#include "machine/comm.h"
#include "train/pipeline.h"

/* ---- Schedules ---- */

/* Number of simulated steps. The first steps fill the pipeline; the last one is in the steady state. */
#define STEPS 8

const char *const pipe_schedule_names[] = {"gpipe", "1f1b", "zb-h1", NULL};

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

bool pipe_splits(enum pipe_schedule schedule)
{
    return schedule == PIPE_ZB_H1;
}

/* A list of operations that is being written, and the next micro-batch of each kind. */
struct list {
    struct pipe_op *ops;
    uint32_t count, next[PIPE_KINDS];
};

static void append(struct list *list, enum pipe_kind kind)
{
    list->ops[list->count++] = (struct pipe_op){kind, list->next[kind]++};
}

/* After a warm-up of forward passes, a stage alternates one forward and one backward pass. With GPipe, the
 * warm-up has all forward passes. With ZB-H1, the gradients of the weights lag behind by `stage`
 * micro-batches and fill the time in which 1F1B waits. */
uint32_t pipe_ops(enum pipe_schedule schedule, uint32_t stages, uint32_t micros, uint32_t stage,
                  struct pipe_op *ops)
{
    struct list list = {.ops = ops};
    const bool splits = pipe_splits(schedule);
    uint32_t warm_up = schedule == PIPE_GPIPE ? micros : smaller(stages - 1 - stage, micros);
    while (list.next[PIPE_FORWARD] < warm_up)
        append(&list, PIPE_FORWARD);
    for (uint32_t i = 0; i < micros; i++) {
        if (list.next[PIPE_FORWARD] < micros)
            append(&list, PIPE_FORWARD);
        append(&list, splits ? PIPE_INPUTS : PIPE_BOTH);
        if (splits && i >= stage)
            append(&list, PIPE_WEIGHTS);
    }
    while (splits && list.next[PIPE_WEIGHTS] < micros)
        append(&list, PIPE_WEIGHTS);
    return list.count;
}

uint32_t pipe_live(enum pipe_schedule schedule, uint32_t stages, uint32_t micros, uint32_t stage)
{
    if (schedule == PIPE_GPIPE)
        return micros;
    return smaller(micros, schedule == PIPE_1F1B ? stages - stage : stages);
}

/* The unit of time is one operation. With S stages and M micro-batches, each stage computes for 3 M units. A
 * step of GPipe and 1F1B takes 3 (M + S - 1). ZB-H1 takes 3 M + S - 1 (Qi et al., section 2); with M < S, the
 * gradients of the inputs cannot overlap with enough other work, and the step takes 2 M + 2 S - 1. */
double pipe_bubble(enum pipe_schedule schedule, uint32_t stages, uint32_t micros)
{
    double s = stages, m = micros;
    if (schedule != PIPE_ZB_H1)
        return (s - 1) / (m + s - 1);
    return 1 - 3 * m / (2 * m + s - 1 + (m > s ? m : s));
}

/* ---- Simulation ---- */

struct simulation {
    enum pipe_schedule schedule;
    uint32_t stages, micros;
    const struct pipe_times *times;
    double *forward, *backward; /* per stage and micro-batch: when the stage had computed its outputs and the
                                   gradients of its inputs in the current step; negative: not yet */
    double *clock;              /* per stage: when its latest work ended */
    double *busy;               /* per stage: how long it has worked in the current step */
    uint32_t *next;             /* per stage: its next operation in the current step */
    struct pipe_op *ops;
};

/* Returns when the input of an operation arrives; negative if it has not been computed. */
static double arrival(const struct simulation *simulation, uint32_t stage, const struct pipe_op *op)
{
    size_t at = (size_t)stage * simulation->micros + op->micro;
    if (op->kind == PIPE_FORWARD)
        return stage == 0 ? 0 : simulation->forward[at - simulation->micros];
    if (op->kind == PIPE_WEIGHTS || stage + 1 == simulation->stages)
        return 0; /* the stage itself has computed this input earlier in its list */
    return simulation->backward[at + simulation->micros];
}

/* Runs the operations of a stage until one lacks its input. Returns whether any ran. */
static bool advance(struct simulation *simulation, uint32_t stage)
{
    const uint32_t begin = simulation->next[stage];
    uint32_t count =
        pipe_ops(simulation->schedule, simulation->stages, simulation->micros, stage, simulation->ops);
    for (; simulation->next[stage] < count; simulation->next[stage]++) {
        const struct pipe_op *op = &simulation->ops[simulation->next[stage]];
        double ready = arrival(simulation, stage, op), *clock = &simulation->clock[stage];
        if (ready < 0)
            break;
        *clock = (ready > *clock ? ready : *clock) + simulation->times[stage].of[op->kind];
        simulation->busy[stage] += simulation->times[stage].of[op->kind];
        size_t at = (size_t)stage * simulation->micros + op->micro;
        if (op->kind == PIPE_FORWARD)
            simulation->forward[at] = *clock;
        else if (op->kind != PIPE_WEIGHTS)
            simulation->backward[at] = *clock;
    }
    return simulation->next[stage] > begin;
}

/* Each stage begins a step as soon as it has updated its weights. */
static void simulate_step(struct simulation *simulation)
{
    for (size_t i = 0; i < (size_t)simulation->stages * simulation->micros; i++)
        simulation->forward[i] = simulation->backward[i] = -1;
    for (uint32_t s = 0; s < simulation->stages; s++) {
        simulation->next[s] = 0;
        simulation->busy[s] = 0;
    }
    for (bool runs = true; runs;) {
        runs = false;
        for (uint32_t s = 0; s < simulation->stages; s++)
            runs |= advance(simulation, s);
    }
    for (uint32_t s = 0; s < simulation->stages; s++)
        simulation->clock[s] += simulation->times[s].update;
}

static void find_waits(struct simulation *simulation, double *waits)
{
    for (int step = 0; step < STEPS; step++) {
        memcpy(waits, simulation->clock, simulation->stages * sizeof *waits);
        simulate_step(simulation);
    }
    for (uint32_t s = 0; s < simulation->stages; s++) {
        double period = simulation->clock[s] - waits[s] - simulation->times[s].update;
        waits[s] = period > 0 ? 1 - simulation->busy[s] / period : 0;
    }
}

bool pipe_simulate(enum pipe_schedule schedule, uint32_t stages, uint32_t micros,
                   const struct pipe_times *times, double *waits)
{
    size_t cells = (size_t)stages * micros;
    struct simulation simulation = {schedule,
                                    stages,
                                    micros,
                                    times,
                                    .forward = calloc(2 * cells + 2 * stages, sizeof(double)),
                                    .next = calloc(stages, sizeof(uint32_t)),
                                    .ops = calloc(3 * (size_t)micros, sizeof(struct pipe_op))};
    bool room = simulation.forward && simulation.next && simulation.ops;
    if (room) {
        simulation.backward = simulation.forward + cells;
        simulation.clock = simulation.backward + cells;
        simulation.busy = simulation.clock + stages;
        find_waits(&simulation, waits);
    }
    free(simulation.forward);
    free(simulation.next);
    free(simulation.ops);
    return room;
}

/* ---- Cutting the network into stages ---- */

#define TRIALS 4 /* runs per piece: the first one warms up, and the fastest one counts */

/* Divides the network at all possible cuts into pieces. Writes the first layer of each piece to `starts`,
 * followed by the number of layers. Returns the number of pieces. */
static uint32_t find_pieces(const struct model *model, uint32_t *starts)
{
    uint32_t pieces = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (i == 0 || model_may_cut(model, i))
            starts[pieces++] = i;
    starts[pieces] = model->layer_count;
    return pieces;
}

uint32_t pipe_pieces(const struct model *model)
{
    uint32_t starts[MODEL_LAYERS_MAX + 1];
    return find_pieces(model, starts);
}

/* ---- Costs ---- */

/* Host memory and sample numbers for the trial of a piece. */
struct trial {
    float *inputs, *outputs, *deltas, *in_deltas;
    uint32_t *numbers;
};

/* The samples are those of the first micro-batch of the first step. */
static bool trial_new(const struct train *train, struct trial *trial)
{
    const struct model *piece = train->model;
    const struct draw_order order = train_order(train, 0);
    const uint32_t capacity = train->stage->capacity;
    size_t in = piece->input_values * capacity,
           out = piece->layers[piece->layer_count - 1].out_values * capacity;
    trial->inputs = calloc(2 * (in + out), sizeof(float));
    trial->numbers = calloc(train_entries(train, train->batch), sizeof *trial->numbers);
    if (!trial->inputs || !trial->numbers)
        return false;
    trial->outputs = trial->inputs + in;
    trial->deltas = trial->outputs + out;
    trial->in_deltas = trial->deltas + out;
    /* The trial's inputs and gradients are positive, so that ReLU and pooling do not turn them into zeros:
     * zeros would cost less time. */
    for (size_t i = 0; i < in; i++)
        trial->inputs[i] = 0.5f + (float)(i % 7) * 0.125f;
    for (size_t i = 0; i < out; i++)
        trial->deltas[i] = 1e-3f * (1 + (float)(i % 5));
    train_batch(train, &order, 0, trial->numbers);
    return true;
}

static void trial_free(struct trial *trial)
{
    free(trial->inputs);
    free(trial->numbers);
}

static enum status run_trial(const struct train *piece, const struct engine *engine, void *state,
                             const struct trial *trial, double *seconds)
{
    const struct stage *stage = piece->stage;
    const struct micro micro = {
        .training = true, .numbers = trial->numbers, .count = stage->capacity, .total = stage->capacity};
    double begin_s = timer_now_s();
    TRY(engine->stages->forward(state, &micro, stage->first ? NULL : trial->inputs,
                                stage->last ? NULL : trial->outputs));
    TRY(engine->stages->backward(state, &micro, GRADIENTS_OF_BOTH, stage->last ? NULL : trial->deltas,
                                 stage->first ? NULL : trial->in_deltas));
    double took_s = timer_now_s() - begin_s;
    *seconds = took_s < *seconds ? took_s : *seconds;
    return STATUS_OK;
}

/* Measures a piece whose engine is open. Its parameters are initialised from the seed of the training run. */
static enum status run_trials(const struct train *piece, const struct engine *engine, void *state,
                              double *seconds)
{
    CLOSED_BY(train_state_free) struct train_state begin = {0};
    CLOSED_BY(trial_free) struct trial trial = {0};
    bool room = train_state_new(piece->model->arena_values, &begin) && trial_new(piece, &trial);
    *seconds = HUGE_VAL;
    TRY(ALLOCATED(room, "out of memory to measure the layers; lower --batch"));
    model_initialise(piece->model, piece->seed, begin.parameters);
    TRY(engine->set(state, &begin));
    for (int i = 0; i < TRIALS; i++)
        TRY(run_trial(piece, engine, state, &trial, seconds));
    return STATUS_OK;
}

/* Measures the layers first .. end - 1 as a separate stage. */
static enum status measure_piece(const struct train *train, const struct engine *engine,
                                 const struct resources *resources, uint32_t first, uint32_t end,
                                 uint32_t capacity, double *seconds)
{
    const struct stage stage = {.first = first == 0,
                                .last = end == train->model->layer_count,
                                .slots = 1,
                                .micros = (train->batch - 1) / capacity + 1,
                                .capacity = capacity};
    struct model *model = malloc(sizeof *model);
    struct train piece = *train;
    piece.memory = NULL; /* this memory is freed before the stage is opened */
    void *state = NULL;
    TRY(ALLOCATED(model, "out of memory"));
    model_slice(train->model, first, end, model);
    piece.model = model;
    piece.stage = &stage;
    enum status status = engine->open(&piece, resources, &state);
    if (status == STATUS_OK)
        status = run_trials(&piece, engine, state, seconds);
    if (state)
        engine->close(state);
    free(model);
    return status;
}

/* ---- Cuts ---- */

/* Fills `begins` with slices that cost at most `most` each. Each slice has as many pieces as possible, but
 * leaves at least one piece for each later slice. Returns whether `stages` slices suffice. */
static bool fill(const uint32_t *starts, const double *costs, uint32_t pieces, uint32_t stages, double most,
                 uint32_t *begins)
{
    uint32_t piece = 0;
    for (uint32_t s = 0; s < stages; s++) {
        double cost = 0;
        begins[s] = starts[piece];
        do
            cost += costs[piece++];
        while (pieces - piece > stages - 1 - s && cost + costs[piece] <= most);
        if (cost > most)
            return false;
    }
    begins[stages] = starts[pieces];
    return piece == pieces;
}

void pipe_choose(const uint32_t *starts, const double *costs, uint32_t pieces, uint32_t stages,
                 uint32_t *begins)
{
    double best = HUGE_VAL;
    /* The cost of a slice is the sum of the costs of its pieces, which are consecutive. So the sums over
     * consecutive pieces are the only candidates for `most`. */
    for (uint32_t i = 0; i < pieces; i++) {
        double sum = 0;
        for (uint32_t j = i; j < pieces; j++) {
            sum += costs[j];
            double most = sum * (1 + 1e-12); /* sums of the same pieces can differ in their last bit */
            if (most < best && fill(starts, costs, pieces, stages, most, begins))
                best = most;
        }
    }
    (void)fill(starts, costs, pieces, stages, best, begins);
}

enum status pipe_cut(const struct train *train, const struct engine *engine,
                     const struct resources *resources, uint32_t stages, uint32_t capacity, uint32_t *begins)
{
    uint32_t starts[MODEL_LAYERS_MAX + 1], pieces = find_pieces(train->model, starts);
    double costs[MODEL_LAYERS_MAX] = {0};
    enum status status = STATUS_OK;
    if (stages > pieces)
        return status_set(STATUS_USAGE, "%s can be cut into at most %u stages, not %u; use fewer ranks",
                          train->model->name, pieces, stages);
    for (uint32_t i = 0; comm_rank() == 0 && status == STATUS_OK && i < pieces; i++)
        status = measure_piece(train, engine, resources, starts[i], starts[i + 1], capacity, &costs[i]);
    TRY(comm_agree(status));
    TRY(comm_spread(costs, sizeof costs));
    pipe_choose(starts, costs, pieces, stages, begins);
    return STATUS_OK;
}

/* ---- Running ---- */

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
    if (pipeline->own.memory && pipeline->own.memory->plans) /* its buffers do not exist */
        return STATUS_OK;
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
        pipeline->stage.micros = plan->micros;
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
    const struct share share = stage_share(&pipeline->stage, step->total, index);
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
    const struct draw_order order = train_order(train, epoch);
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
    if (feed == DATA_LOAD)
        return status_set(STATUS_USAGE,
                          "a pipeline cannot train on samples that are read by --feed load; use "
                          "--feed stored, or --parallel data");
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
