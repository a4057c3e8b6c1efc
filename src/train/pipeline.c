#include "train/pipeline.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "train/engine.h"

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
    char *inputs, *outputs, *deltas, *in_deltas;
    uint32_t *numbers;
    struct share share;
};

/* Writes a value of `bytes` bytes (stage_functions.value_bytes), in float or bf16. */
static void put_value(char *values, size_t i, size_t bytes, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t rounded = (uint16_t)(bits >> 16);
    memcpy(values + i * bytes, bytes == sizeof rounded ? (const void *)&rounded : &bits, bytes);
}

/* The samples are those of the first micro-batch of the first step. */
static bool trial_new(const struct train *train, size_t bytes, struct trial *trial)
{
    const struct model *piece = train->model;
    const struct draw_order order = train_order(train, 0);
    trial->share = feed_share(train, 0);
    size_t in = piece->input_values * train->stage->capacity,
           out = piece->layers[piece->layer_count - 1].out_values * train->stage->capacity;
    trial->inputs = calloc(2 * (in + out), bytes);
    trial->numbers = calloc(train_entries(train, train->stage->capacity), sizeof *trial->numbers);
    if (!trial->inputs || !trial->numbers)
        return false;
    trial->outputs = trial->inputs + in * bytes;
    trial->deltas = trial->outputs + out * bytes;
    trial->in_deltas = trial->deltas + out * bytes;
    /* The trial's inputs and gradients are positive, so that ReLU and pooling do not turn them into zeros:
     * zeros would cost less time. */
    for (size_t i = 0; i < in; i++)
        put_value(trial->inputs, i, bytes, 0.5f + (float)(i % 7) * 0.125f);
    for (size_t i = 0; i < out; i++)
        put_value(trial->deltas, i, bytes, 1e-3f * (1 + (float)(i % 5)));
    train_list(train, &order, 0, &trial->share, trial->numbers);
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
    const struct micro micro = {.training = true,
                                .numbers = trial->numbers,
                                .first = (uint32_t)trial->share.first,
                                .count = (uint32_t)trial->share.count,
                                .total = (uint32_t)trial->share.total};
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
    bool room = train_state_new(piece->model->arena_values, &begin) &&
                trial_new(piece, engine->stages->value_bytes, &trial);
    *seconds = HUGE_VAL;
    TRY(ALLOCATED(room, "out of memory to measure the layers; lower --batch"));
    model_initialise(piece->model, piece->seed, begin.parameters);
    TRY(engine->set(state, &begin));
    for (int i = 0; i < TRIALS; i++)
        TRY(run_trial(piece, engine, state, &trial, seconds));
    return STATUS_OK;
}

/* Opens a stage. Sets `*bytes` to its memory and, unless `seconds` is NULL, measures its time. */
static enum status measure_stage(const struct train *piece, const struct engine *engine,
                                 const struct resources *resources, double *bytes, double *seconds)
{
    void *state = NULL;
    enum status status = engine->open(piece, resources, &state);
    if (status == STATUS_OK && seconds)
        status = run_trials(piece, engine, state, seconds);
    if (status == STATUS_OK)
        *bytes = (double)engine->memory_bytes(state);
    if (state)
        engine->close(state);
    return status;
}

/* Measures the layers first .. end - 1 as a separate stage that keeps `slots` micro-batches. */
static enum status measure_piece(const struct train *train, const struct engine *engine,
                                 const struct resources *resources, uint32_t first, uint32_t end,
                                 uint32_t capacity, uint32_t slots, double *bytes, double *seconds)
{
    const struct stage stage = {.first = first == 0,
                                .last = end == train->model->layer_count,
                                .slots = slots,
                                .micros = (train_share_max(train) - 1) / capacity + 1,
                                .capacity = capacity};
    FREED struct model *model = malloc(sizeof *model);
    struct train piece = *train;
    piece.memory = NULL; /* this memory is freed before the stage is opened */
    TRY(ALLOCATED(model, "out of memory"));
    model_slice(train->model, first, end, model);
    piece.model = model;
    piece.stage = &stage;
    return measure_stage(&piece, engine, resources, bytes, seconds);
}

/* Measures all pieces and, if memory is limited, how their memory depends on the number of slots, and how
 * much less two pieces need in one stage. Not collective. */
static enum status measure_pieces(const struct train *train, const struct engine *engine,
                                  const struct resources *resources, uint32_t capacity,
                                  const uint32_t *starts, struct pipe_costs *costs)
{
    double bytes;
    for (uint32_t i = 0; i < costs->pieces; i++) {
        TRY(measure_piece(train, engine, resources, starts[i], starts[i + 1], capacity, 1, &costs->bytes[i],
                          &costs->seconds[i]));
        if (!costs->limited)
            continue;
        TRY(measure_piece(train, engine, resources, starts[i], starts[i + 1], capacity, 2, &bytes, NULL));
        costs->slot_bytes[i] = bytes - costs->bytes[i];
    }
    if (costs->limited && costs->pieces > 1) {
        TRY(measure_piece(train, engine, resources, starts[0], starts[2], capacity, 1, &bytes, NULL));
        costs->joint_bytes = costs->bytes[0] + costs->bytes[1] - bytes;
    }
    return STATUS_OK;
}

/* ---- Cuts ---- */

/* Returns the memory of pieces first .. end - 1 as stage `stage`. */
static double stage_bytes(const struct pipe_costs *costs, uint32_t stage, uint32_t first, uint32_t end)
{
    double bytes = -costs->joint_bytes * (end - first - 1);
    for (uint32_t i = first; i < end; i++)
        bytes += costs->bytes[i] + (costs->slots[stage] - 1) * costs->slot_bytes[i];
    return bytes;
}

/* Return what pieces first .. end - 1 cost as stage `stage`: their time, or HUGE_VAL if they exceed the
 * memory of the stage; and their memory relative to the limit. */
static double stage_time(const struct pipe_costs *costs, uint32_t stage, uint32_t first, uint32_t end)
{
    double seconds = 0;
    for (uint32_t i = first; i < end; i++)
        seconds += costs->seconds[i];
    return costs->limited && stage_bytes(costs, stage, first, end) > costs->limits[stage] ? HUGE_VAL
                                                                                          : seconds;
}

static double stage_fill(const struct pipe_costs *costs, uint32_t stage, uint32_t first, uint32_t end)
{
    return stage_bytes(costs, stage, first, end) / costs->limits[stage];
}

typedef double stage_cost(const struct pipe_costs *costs, uint32_t stage, uint32_t first, uint32_t end);

/* Fills `best`: entry stage * (pieces + 1) + p is the least cost of the most expensive stage, if the stages
 * from `stage` on divide the pieces from p on. Returns this cost of the whole network. */
static double find_best(const struct pipe_costs *costs, uint32_t stages, stage_cost *cost, double *best)
{
    const uint32_t pieces = costs->pieces;
    for (uint32_t stage = stages; stage-- > 0;)
        for (uint32_t p = 0; p <= pieces; p++) {
            double *least = &best[stage * (pieces + 1) + p];
            *least = stage + 1 == stages && p < pieces ? cost(costs, stage, p, pieces) : HUGE_VAL;
            for (uint32_t end = p + 1; stage + 1 < stages && end < pieces; end++)
                *least =
                    fmin(*least, fmax(cost(costs, stage, p, end), best[(stage + 1) * (pieces + 1) + end]));
        }
    return best[0];
}

/* Takes a cut with the least cost: the one in which the first stages have as many pieces as possible. */
static enum status choose(const struct pipe_costs *costs, const uint32_t *starts, uint32_t stages,
                          double *best, uint32_t *begins)
{
    const uint32_t pieces = costs->pieces;
    uint32_t piece = 0;
    const double least = find_best(costs, stages, stage_time, best);
    if (isinf(least))
        return status_set(STATUS_TOO_LARGE,
                          "the network does not fit into the memory of %u stages: with the best cut, one "
                          "needs %.3g times the memory that it has for the network; start more ranks, lower "
                          "--batch, or raise --microbatches or --memory-limit",
                          stages, find_best(costs, stages, stage_fill, best));
    const double most = least * (1 + 1e-12); /* sums of the same pieces can differ in their last bit */
    for (uint32_t stage = 0; stage < stages; stage++) {
        begins[stage] = starts[piece];
        uint32_t end = stage + 1 == stages ? pieces : pieces - 1;
        while (stage + 1 < stages &&
               (stage_time(costs, stage, piece, end) > most || best[(stage + 1) * (pieces + 1) + end] > most))
            end--;
        piece = end;
    }
    begins[stages] = starts[pieces];
    return STATUS_OK;
}

enum status pipe_choose(const uint32_t *starts, const struct pipe_costs *costs, uint32_t stages,
                        uint32_t *begins)
{
    FREED double *best = calloc((size_t)stages * (costs->pieces + 1), sizeof *best);
    TRY(ALLOCATED(best, "out of memory to cut the network"));
    return choose(costs, starts, stages, best, begins);
}

/* Collective: sets the limits of the stages to the least of their replicas, if any rank has a limit. */
static enum status find_limits(const struct pipeline_plan *plan, struct pipe_costs *costs)
{
    const size_t ranks = (size_t)comm_size();
    const double own = (double)plan->limit_bytes;
    FREED double *all = calloc(ranks, sizeof *all);
    TRY(comm_agree(ALLOCATED(all, "out of memory for the limits")));
    TRY(comm_gather(&own, sizeof own, all));
    TRY(comm_spread(all, ranks * sizeof *all));
    for (uint32_t s = 0; s < plan->stages; s++) {
        costs->limits[s] = HUGE_VAL;
        costs->slots[s] = pipe_live(plan->schedule, plan->stages, plan->micros, s);
    }
    for (size_t i = 0; i < ranks; i++)
        if (all[i] > 0) {
            costs->limited = true;
            costs->limits[i % plan->stages] = fmin(costs->limits[i % plan->stages], all[i]);
        }
    return STATUS_OK;
}

/* Collective: cuts the network into slices so that the slowest slice takes as little time as possible and
 * every slice stays within the memory of its ranks (pipeline_plan.limit_bytes). Costs are measured on rank 0,
 * with micro-batches of `capacity` samples. Slice i has the layers begins[i] to begins[i + 1] - 1; `begins`
 * has room for stages + 1. STATUS_USAGE if there are too few layers, STATUS_TOO_LARGE if nothing fits. */
static enum status pipe_cut(const struct train *train, const struct pipeline_plan *plan,
                            const struct resources *resources, uint32_t capacity, uint32_t *begins)
{
    uint32_t starts[MODEL_LAYERS_MAX + 1], pieces = find_pieces(train->model, starts);
    if (plan->stages > pieces)
        return status_set(STATUS_USAGE, "%s can be cut into at most %u stages, not %u; lower --stages",
                          train->model->name, pieces, plan->stages);
    FREED struct pipe_costs *costs = calloc(1, sizeof *costs);
    TRY(comm_agree(ALLOCATED(costs, "out of memory to cut the network")));
    costs->pieces = pieces;
    TRY(find_limits(plan, costs));
    TRY(comm_agree(comm_rank() == 0 ? measure_pieces(train, plan->engine, resources, capacity, starts, costs)
                                    : STATUS_OK));
    TRY(comm_spread(costs, sizeof *costs));
    return comm_agree(pipe_choose(starts, costs, plan->stages, begins));
}

/* ---- The messages between stages ---- */

/* The messages between the stages of a pipeline: activations to the next stage, their gradients to the
 * previous one. A message has values and, after activations, labels. If all ranks run on one machine and
 * their engine can share device memory, the values stay in device memory: the receiver reads them from the
 * memory of the sender's device. Otherwise, messages are in host memory (comm_channels_open()). Not thread
 * safe. */

/* The directions: from and to the previous stage, from and to the next one. */
enum stage_link { INPUTS, IN_DELTAS, DELTAS, OUTPUTS, STAGE_LINKS };

struct stage_message {
    void *values; /* in host or device memory */
    void *labels; /* in host memory */
};

/* A zeroed struct is closed. */
struct stage_messages {
    const struct stage_functions *functions;
    size_t value_bytes[STAGE_LINKS], label_bytes[STAGE_LINKS]; /* maximum per message; 0: no such messages */
    uint32_t buffers; /* messages that a sender may be ahead of the receiver */
    struct comm_channel *channels[STAGE_LINKS];
    bool pinned[STAGE_LINKS]; /* the engine has pinned the channel's memory */
    bool on_device;           /* the values are in device memory: */
    char *memory[STAGE_LINKS];
    uint64_t next[STAGE_LINKS]; /* number of the next message */
};

#define LEAST_BYTES \
    8 /* of a message in host memory: its values are on the device, and it may have no labels */

static bool sends(enum stage_link link)
{
    return link == IN_DELTAS || link == OUTPUTS;
}

/* ---- Device memory ---- */

/* The message of a rank to all others. */
struct card {
    struct stage_handle handles[STAGE_LINKS]; /* of the links on which it sends */
    bool failed;
};

/* The sender's ring has as many buffers as a channel in shared memory, so a buffer of the ring is free
 * whenever that of the channel is. */
static size_t ring_bytes(const struct stage_messages *messages, enum stage_link link)
{
    return (messages->buffers + 1) * messages->value_bytes[link];
}

static void release(struct stage_messages *messages, bool mapped)
{
    for (int i = 0; i < STAGE_LINKS; i++)
        if (messages->memory[i] && sends(i) != mapped) {
            messages->functions->release(messages->memory[i], mapped);
            messages->memory[i] = NULL;
        }
}

/* Collective: no rank frees memory that another rank has mapped. */
static void close_device(struct stage_messages *messages)
{
    release(messages, true);
    (void)comm_agree(STATUS_OK); /* a barrier; after a failure, the ranks end anyway */
    release(messages, false);
    messages->on_device = false;
}

static enum status share(struct stage_messages *messages, struct card *card)
{
    for (int i = 0; i < STAGE_LINKS; i++)
        if (sends(i) && messages->value_bytes[i] > 0)
            TRY(messages->functions->share(ring_bytes(messages, i), (void **)&messages->memory[i],
                                           &card->handles[i]));
    return STATUS_OK;
}

/* Maps the memory of the neighbours. `cards` has one card per rank. */
static enum status map(struct stage_messages *messages, const struct card *cards)
{
    const int rank = comm_rank();
    if (messages->value_bytes[INPUTS] > 0)
        TRY(messages->functions->map(&cards[rank - 1].handles[OUTPUTS], (void **)&messages->memory[INPUTS]));
    if (messages->value_bytes[DELTAS] > 0)
        TRY(messages->functions->map(&cards[rank + 1].handles[IN_DELTAS],
                                     (void **)&messages->memory[DELTAS]));
    return STATUS_OK;
}

/* Collective: sets messages->on_device if the values can be in device memory. */
static enum status open_device(struct stage_messages *messages)
{
    const size_t ranks = (size_t)comm_size();
    struct card own = {.failed = false};
    FREED struct card *cards = calloc(ranks, sizeof *cards);
    TRY(comm_agree(ALLOCATED(cards, "out of memory for the messages")));
    own.failed = share(messages, &own) != STATUS_OK;
    TRY(comm_gather(&own, sizeof own, cards));
    TRY(comm_spread(cards, ranks * sizeof *cards));
    double failed = 0;
    for (size_t i = 0; i < ranks; i++)
        failed += cards[i].failed;
    if (failed == 0)
        failed = map(messages, cards) != STATUS_OK;
    TRY(comm_max(&failed, 1));
    messages->on_device = failed == 0;
    if (failed > 0 && comm_rank() == 0)
        status_warn(
            "stages cannot read each other's GPU memory, so messages pass through host memory; let all "
            "ranks see all GPUs (CUDA_VISIBLE_DEVICES)");
    return STATUS_OK;
}

/* ---- Channels ---- */

static void close_channels(struct stage_messages *messages)
{
    for (int i = 0; i < STAGE_LINKS; i++) {
        size_t bytes, own_bytes;
        if (messages->pinned[i])
            messages->functions->unpin(comm_channel_memory(messages->channels[i], &bytes, &own_bytes));
        messages->pinned[i] = false;
        comm_channel_close(messages->channels[i]);
        messages->channels[i] = NULL;
    }
}

static enum status open_channels(struct stage_messages *messages)
{
    const int rank = comm_rank();
    struct comm_channel_spec specs[STAGE_LINKS];
    for (int i = 0; i < STAGE_LINKS; i++) {
        const size_t bytes =
            (messages->on_device ? LEAST_BYTES : messages->value_bytes[i]) + messages->label_bytes[i];
        specs[i] = (struct comm_channel_spec){i == INPUTS || i == IN_DELTAS ? rank - 1 : rank + 1, sends(i),
                                              messages->value_bytes[i] > 0 ? bytes : 0, messages->buffers};
    }
    return comm_channels_open(specs, STAGE_LINKS, messages->channels);
}

static enum status pin_channels(struct stage_messages *messages)
{
    for (int i = 0; messages->functions->pin && !messages->on_device && i < STAGE_LINKS; i++) {
        size_t bytes, own_bytes;
        if (!messages->channels[i])
            continue;
        void *memory = comm_channel_memory(messages->channels[i], &bytes, &own_bytes);
        TRY(messages->functions->pin(memory, bytes));
        messages->pinned[i] = true;
    }
    return STATUS_OK;
}

/* Collective: opens the links of this rank's stage, whose neighbours are the ranks before and after it. The
 * caller has set the members up to `buffers`, and closes the messages, even after a failure. Closing is
 * collective after stage_messages_open() was called. */
static enum status stage_messages_open(struct stage_messages *messages)
{
    if (messages->functions->share && comm_local_size() == comm_size()) {
        TRY(open_device(messages));
        if (!messages->on_device)
            close_device(messages);
    }
    TRY(open_channels(messages));
    double copied = 0;
    for (int i = 0; messages->on_device && i < STAGE_LINKS; i++)
        copied += messages->channels[i] && !comm_channel_shares(messages->channels[i]);
    TRY(comm_max(&copied, 1));
    if (copied > 0) { /* a channel over MPI reuses a buffer before the receiver has read the ring */
        close_channels(messages);
        close_device(messages);
        TRY(open_channels(messages));
    }
    return comm_agree(pin_channels(messages));
}

static void stage_messages_close(struct stage_messages *messages)
{
    close_channels(messages);
    if (messages->on_device)
        close_device(messages);
}

/* ---- Messages ---- */

/* Sets `*message` to the message in the buffer that `find` returns; empty if the stage has no such link. */
static enum status find_message(struct stage_messages *messages, enum stage_link link,
                                enum status (*find)(struct comm_channel *channel, void **buffer),
                                struct stage_message *message)
{
    void *buffer;
    *message = (struct stage_message){NULL, NULL};
    if (!messages->channels[link])
        return STATUS_OK;
    TRY(find(messages->channels[link], &buffer));
    const uint64_t number = messages->next[link]++;
    *message = (struct stage_message){buffer, (char *)buffer + messages->value_bytes[link]};
    if (messages->on_device) {
        message->values =
            messages->memory[link] + number % (messages->buffers + 1) * messages->value_bytes[link];
        message->labels = (char *)buffer + LEAST_BYTES;
    }
    return STATUS_OK;
}

/* Sender: stage_room() waits for a free message, and stage_send() sends it. Without this link, stage_room()
 * sets the members of the message to NULL. */
static enum status stage_room(struct stage_messages *messages, enum stage_link link,
                              struct stage_message *message)
{
    return find_message(messages, link, comm_channel_room, message);
}

/* Receiver: waits for the next message, which is valid until the next call. Without this link, sets the
 * members of the message to NULL. */
static enum status stage_receive(struct stage_messages *messages, enum stage_link link,
                                 struct stage_message *message)
{
    return find_message(messages, link, comm_channel_receive, message);
}

static enum status stage_send(struct stage_messages *messages, enum stage_link link)
{
    const size_t values = messages->on_device ? LEAST_BYTES : messages->value_bytes[link];
    return comm_channel_send(messages->channels[link], values + messages->label_bytes[link]);
}

/* Returns the memory of the messages that this rank has allocated. */
static uint64_t stage_messages_bytes(const struct stage_messages *messages)
{
    uint64_t total = 0;
    for (int i = 0; i < STAGE_LINKS; i++) {
        size_t bytes, own_bytes = 0;
        if (messages->channels[i])
            (void)comm_channel_memory(messages->channels[i], &bytes, &own_bytes);
        total += own_bytes + (messages->on_device && sends(i) ? ring_bytes(messages, i) : 0);
    }
    return total;
}

/* ---- Running ---- */

struct pipeline {
    const struct engine *engine;
    const struct pipeline_plan *plan;
    const struct train *train; /* the whole network */
    struct train own;          /* as `train`, with the slice of this stage */
    struct model slice;
    struct stage stage;
    uint32_t number;            /* of this stage */
    uint32_t replica, replicas; /* each replica of the pipeline trains on its share of the samples */
    struct comm_group *group;   /* the ranks with this stage; NULL: one */
    struct exchange exchange;   /* adds up the gradients of the group */
    size_t *arenas;    /* per rank: where its part begins in the whole network's arena; then the end */
    void *state;       /* of the engine */
    uint32_t *numbers; /* the samples of the micro-batches of the current step, each with their partners */
    struct pipe_op *ops;
    uint32_t op_count;
    struct stage_messages messages;
    struct pipe_measured measured;
    uint32_t measured_ops[PIPE_KINDS], measured_steps;
};

/* ---- Opening ---- */

static void pipeline_close(void *state)
{
    struct pipeline *pipeline = state;
    stage_messages_close(&pipeline->messages);
    if (pipeline->state)
        pipeline->engine->close(pipeline->state);
    exchange_close(&pipeline->exchange);
    comm_group_close(pipeline->group);
    free(pipeline->arenas);
    free(pipeline->numbers);
    free(pipeline->ops);
    free(pipeline);
}

/* Returns the size of the values that `samples` samples have at the input or at the output of this stage. */
static size_t values_bytes(const struct pipeline *pipeline, bool output, uint32_t samples)
{
    const struct model *slice = &pipeline->slice;
    return samples * pipeline->engine->stages->value_bytes *
           (output ? slice->layers[slice->layer_count - 1].out_values : slice->input_values);
}

/* Returns the size of the labels that follow the activations of a micro-batch in a message. Only the first
 * stage reads samples, and thereby learns which are broken and which classes a mixture has. */
static size_t labels_bytes(const struct pipeline *pipeline, uint32_t samples)
{
    const struct train *train = pipeline->train;
    return train->data->feed == DATA_LOAD ? train_entries(train, samples) * sizeof(uint32_t) : 0;
}

/* Opens the messages to the neighbouring stages. A sender has a buffer for each micro-batch that can be in
 * transit, so it never waits for a neighbour that works on an earlier micro-batch. */
static enum status open_messages(struct pipeline *pipeline)
{
    const struct stage *stage = &pipeline->stage;
    const size_t in = stage->first ? 0 : values_bytes(pipeline, false, stage->capacity),
                 out = stage->last ? 0 : values_bytes(pipeline, true, stage->capacity),
                 labels = labels_bytes(pipeline, stage->capacity);
    pipeline->messages = (struct stage_messages){
        .functions = pipeline->engine->stages,
        .value_bytes = {[INPUTS] = in, [IN_DELTAS] = in, [DELTAS] = out, [OUTPUTS] = out},
        .label_bytes = {[INPUTS] = labels, [OUTPUTS] = labels},
        .buffers = pipe_live(pipeline->plan->schedule, pipeline->plan->stages, pipeline->plan->micros, 0)};
    return stage_messages_open(&pipeline->messages);
}

/* Opens the exchange with the same stage of the other replicas. */
static enum status open_exchange(struct pipeline *pipeline, const struct resources *resources)
{
    struct exchange *exchange = &pipeline->exchange;
    struct engine engine = *pipeline->engine;
    if (pipeline->replicas == 1)
        return STATUS_OK;
    if (engine.gradients_in == GRADIENTS_IN_GRAPH)
        engine.gradients_in = GRADIENTS_IN_DEVICE; /* a stage captures no exchange */
    TRY(comm_group_open(pipeline->number, &pipeline->group));
    exchange->device = resources->device;
    exchange->count = pipeline->slice.arena_values;
    exchange->group = pipeline->group;
    pipeline->own.exchange = exchange;
    return exchange_open(pipeline->plan->sync, &engine, exchange);
}

/* Sets the slice, and where the part of each rank begins in the arena. The first replica has all parts. */
static void take_slice(struct pipeline *pipeline, const uint32_t *begins)
{
    const struct model *whole = pipeline->train->model;
    struct model *slice = &pipeline->slice;
    for (uint32_t s = 0; s < pipeline->plan->stages; s++) {
        model_slice(whole, begins[s], begins[s + 1], slice);
        pipeline->arenas[s] = slice->arena_first;
    }
    for (uint32_t i = pipeline->plan->stages; i <= pipeline->plan->stages * pipeline->replicas; i++)
        pipeline->arenas[i] = whole->arena_values;
    model_slice(whole, begins[pipeline->number], begins[pipeline->number + 1], slice);
}

static enum status allocate(struct pipeline *pipeline)
{
    const struct pipeline_plan *plan = pipeline->plan;
    pipeline->arenas = calloc((size_t)plan->stages * pipeline->replicas + 1, sizeof *pipeline->arenas);
    pipeline->numbers =
        calloc(train_entries(pipeline->train, train_share_max(pipeline->train)), sizeof *pipeline->numbers);
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
    TRY(open_exchange(pipeline, resources));
    TRY(comm_agree(pipeline->engine->open(&pipeline->own, resources, &pipeline->state)));
    if (pipeline->own.memory && pipeline->own.memory->plans) /* its buffers do not exist */
        return STATUS_OK;
    return open_messages(pipeline);
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
        pipeline->number = (uint32_t)comm_rank() % plan->stages;
        pipeline->replica = (uint32_t)comm_rank() / plan->stages;
        pipeline->replicas = (uint32_t)comm_size() / plan->stages;
        pipeline->stage.micros = plan->micros;
        pipeline->stage.capacity = (train_share_max(train) - 1) / plan->micros + 1;
    }
    TRY(comm_agree(pipeline ? allocate(pipeline) : status_set(STATUS_EXHAUSTED, "out of memory")));
    TRY(pipe_cut(&pipeline->own, plan, resources, pipeline->stage.capacity, begins));
    return open_stage(pipeline, resources, begins);
}

/* ---- A step ---- */

static struct micro micro_of(const struct pipeline *pipeline, uint32_t epoch, uint32_t step, uint32_t index)
{
    const struct train *own = &pipeline->own;
    const struct share share = feed_share(own, step * pipeline->stage.micros + index);
    const uint32_t before = (uint32_t)(share.first - train_share(own, step).first);
    return (struct micro){.slot = index % pipeline->stage.slots,
                          .index = index,
                          .epoch = epoch,
                          .step = (uint64_t)epoch * train_steps(own) + step,
                          .part = DATA_TRAIN,
                          .training = true,
                          .numbers = pipeline->numbers + train_entries(own, before),
                          .first = (uint32_t)share.first,
                          .count = (uint32_t)share.count,
                          .total = (uint32_t)share.total};
}

/* Lists the samples of all micro-batches of a step. */
static void list_samples(struct pipeline *pipeline, const struct draw_order *order, uint32_t step)
{
    uint32_t *numbers = pipeline->numbers;
    for (uint32_t i = 0; i < pipeline->stage.micros; i++) {
        const struct share share = feed_share(&pipeline->own, step * pipeline->stage.micros + i);
        train_list(&pipeline->own, order, step, &share, numbers);
        numbers += train_entries(&pipeline->own, (uint32_t)share.count);
    }
}

/* Copies the labels of a micro-batch between the data and a message. */
static void copy_labels(const struct pipeline *pipeline, const struct micro *micro, void *message, bool out)
{
    const struct data *data = pipeline->train->data;
    const size_t count = labels_bytes(pipeline, micro->count) / sizeof(uint32_t);
    uint32_t *labels = message;
    for (size_t j = 0; labels && micro->training && j < count; j++) {
        uint32_t *label = &data->sets[DATA_TRAIN].labels[train_original(data, micro->numbers[j])];
        *(out ? &labels[j] : label) = out ? *label : labels[j];
    }
}

static enum status forward(struct pipeline *pipeline, const struct micro *micro, float *logits)
{
    struct stage_message inputs, outputs;
    TRY(stage_receive(&pipeline->messages, INPUTS, &inputs));
    TRY(stage_room(&pipeline->messages, OUTPUTS, &outputs));
    double begin_s = timer_now_s();
    copy_labels(pipeline, micro, inputs.labels, false);
    TRY(pipeline->engine->stages->forward(pipeline->state, micro, inputs.values,
                                          outputs.values ? outputs.values : logits));
    copy_labels(pipeline, micro, outputs.labels, true);
    pipeline->measured.times.of[PIPE_FORWARD] += timer_now_s() - begin_s;
    return outputs.values ? stage_send(&pipeline->messages, OUTPUTS) : STATUS_OK;
}

static enum status backward(struct pipeline *pipeline, const struct micro *micro, enum pipe_kind kind)
{
    static const enum gradients_of gradients[PIPE_KINDS] = {[PIPE_INPUTS] = GRADIENTS_OF_INPUTS,
                                                            [PIPE_WEIGHTS] = GRADIENTS_OF_WEIGHTS,
                                                            [PIPE_BOTH] = GRADIENTS_OF_BOTH};
    struct stage_message deltas = {NULL, NULL}, in_deltas = {NULL, NULL};
    if (kind != PIPE_WEIGHTS) {
        TRY(stage_receive(&pipeline->messages, DELTAS, &deltas));
        TRY(stage_room(&pipeline->messages, IN_DELTAS, &in_deltas));
    }
    double begin_s = timer_now_s();
    TRY(pipeline->engine->stages->backward(pipeline->state, micro, gradients[kind], deltas.values,
                                           in_deltas.values));
    pipeline->measured.times.of[kind] += timer_now_s() - begin_s;
    return in_deltas.values ? stage_send(&pipeline->messages, IN_DELTAS) : STATUS_OK;
}

static enum status update(struct pipeline *pipeline, uint64_t step)
{
    double begin_s = timer_now_s();
    bool overflowed = false;
    TRY(pipeline->engine->stages->sum(pipeline->state, &overflowed));
    if (pipeline->engine->scales_loss) {
        double any = overflowed;
        TRY(comm_max(&any, 1));
        overflowed = any > 0;
    }
    TRY(pipeline->engine->stages->update(pipeline->state, step, overflowed));
    pipeline->measured.times.update += timer_now_s() - begin_s;
    return STATUS_OK;
}

/* A short last step may have fewer samples than micro-batches. All stages skip the empty micro-batches. */
static enum status make_step(struct pipeline *pipeline, uint32_t epoch, uint32_t step)
{
    struct pipe_measured *measured = &pipeline->measured;
    double begin_s = timer_now_s(), updated_s = measured->times.update;
    for (uint32_t i = 0; i < pipeline->op_count; i++) {
        const struct pipe_op *op = &pipeline->ops[i];
        const struct micro micro = micro_of(pipeline, epoch, step, op->micro);
        if (micro.count == 0 && i == 0)
            TRY(pipeline->engine->stages->clear(pipeline->state));
        if (micro.count == 0)
            continue;
        TRY(op->kind == PIPE_FORWARD ? forward(pipeline, &micro, NULL)
                                     : backward(pipeline, &micro, op->kind));
        pipeline->measured_ops[op->kind]++;
    }
    TRY(update(pipeline, (uint64_t)epoch * train_steps(pipeline->train) + step));
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
        list_samples(pipeline, &order, i);
        if (i == first + 1)
            restart_measuring(pipeline);
        TRY(make_step(pipeline, epoch, i));
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

/* Fails if the replicas of a stage, which make the same updates, have different parameters. */
static enum status check_replicas(const struct pipeline *pipeline, const float *parameters)
{
    const size_t stages = pipeline->plan->stages, ranks = stages * pipeline->replicas;
    const uint64_t own = fnv_add(FNV_BEGIN, parameters + pipeline->slice.arena_first,
                                 pipeline->slice.arena_values * sizeof *parameters);
    FREED uint64_t *all = calloc(ranks, sizeof *all);
    TRY(comm_agree(ALLOCATED(all, "out of memory for %zu ranks", ranks)));
    TRY(comm_gather(&own, sizeof own, all));
    enum status status = STATUS_OK;
    for (size_t i = 0; comm_rank() == 0 && status == STATUS_OK && i < ranks; i++)
        if (all[i] != all[i % stages])
            status = status_set(STATUS_FAILED,
                                "the parameters of rank %zu differ from those of rank %zu, which trains the "
                                "same stage: a machine or network computes or transfers wrong values, or "
                                "CPUs round differently; run on machines of one type",
                                i, i % stages);
    return comm_agree(status);
}

static enum status pipeline_get(void *state, struct train_state *into)
{
    struct pipeline *pipeline = state;
    struct train_state part = own_part(pipeline, into);
    TRY(comm_agree(pipeline->engine->get(pipeline->state, &part)));
    into->scale = part.scale;
    TRY(check_replicas(pipeline, into->parameters));
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
                                    .first = first + done,
                                    .count = count - done < capacity ? count - done : capacity};
        for (uint32_t j = 0; j < micro.count; j++)
            pipeline->numbers[j] = first + done + j;
        TRY(forward(pipeline, &micro, logits + (size_t)done * pipeline->train->model->classes));
    }
    return STATUS_OK;
}

/* The replicas divide the samples. The last stages compute the logits and send them to all ranks. */
static enum status pipeline_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                     float *logits)
{
    struct pipeline *pipeline = state;
    const uint32_t stages = pipeline->plan->stages, ranks = stages * pipeline->replicas;
    const size_t classes = pipeline->train->model->classes;
    FREED size_t *begins = calloc((size_t)ranks + 1, sizeof *begins);
    TRY(comm_agree(ALLOCATED(begins, "out of memory for %u ranks", ranks)));
    for (uint32_t i = 0; i < ranks; i++) {
        const struct partition replicas = {.rank = i / stages, .ranks = pipeline->replicas, .strong = true};
        const struct share own = partition_share(&replicas, count);
        begins[i + 1] = (own.first + (i % stages + 1 == stages ? own.count : 0)) * classes;
    }
    const struct partition mine = {.rank = pipeline->replica, .ranks = pipeline->replicas, .strong = true};
    const struct share own = partition_share(&mine, count);
    TRY(or_give_up(evaluate(pipeline, part, first + (uint32_t)own.first, (uint32_t)own.count,
                            logits + own.first * classes)));
    return comm_share_parts(logits, begins);
}

static uint64_t pipeline_memory_bytes(const void *state)
{
    const struct pipeline *pipeline = state;
    return pipeline->engine->memory_bytes(pipeline->state) + stage_messages_bytes(&pipeline->messages);
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
    piped.overflows = NULL; /* these functions of the engine need its own state */
    piped.test_samples = NULL;
    return piped;
}

enum status pipeline_accepts(const struct engine *engine)
{
    return engine->stages
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "it cannot train a part of a network; use train-naive, train-omp, train-omp-blas, "
                     "train-cuda, train-tf32, train-bf16, train-amp, train-vit or train-vit-amp, or "
                     "--parallel data");
}

/* ---- Measurements ---- */

struct exchange *pipeline_exchange(void *state)
{
    struct pipeline *pipeline = state;
    return pipeline->replicas > 1 ? &pipeline->exchange : NULL;
}

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
    const uint32_t number = (uint32_t)comm_rank() % plan->stages, first = (uint32_t)comm_rank() - number;
    const size_t ranks = (size_t)comm_size();
    FREED struct pipe_times *times = calloc(ranks, sizeof *times);
    FREED double *waits = calloc(plan->stages, sizeof *waits);
    TRY(comm_agree(ALLOCATED(times && waits, "out of memory for the times")));
    TRY(comm_gather(&mine->times, sizeof *times, times));
    TRY(comm_spread(times, ranks * sizeof *times));
    TRY(comm_agree(ALLOCATED(pipe_simulate(plan->schedule, plan->stages, plan->micros, times + first, waits),
                             "out of memory for the simulation")));
    *bubble = waits[number];
    return STATUS_OK;
}
