#include "train/pipe_schedule.h"

#include <stdlib.h>
#include <string.h>

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
