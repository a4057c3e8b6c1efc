/* Schedules of a training step on a pipeline: the order in which a stage computes the forward and backward
 * passes of its micro-batches. All functions are pure; docs/pipeline.md describes the schedules. */
#ifndef FDSL_TRAIN_PIPE_SCHEDULE_H
#define FDSL_TRAIN_PIPE_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"

/* The values of --schedule. GPipe: Huang et al., 2019. 1F1B: Narayanan et al., "PipeDream", 2019. ZB-H1: Qi
 * et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. */
enum pipe_schedule { PIPE_GPIPE, PIPE_1F1B, PIPE_ZB_H1 };

/* The work of a stage on one micro-batch. */
enum pipe_kind {
    PIPE_FORWARD,
    PIPE_INPUTS,  /* backward: the gradients of the stage's inputs, which the previous stage waits for */
    PIPE_WEIGHTS, /* backward: the gradients of the stage's weights */
    PIPE_BOTH,    /* PIPE_INPUTS and PIPE_WEIGHTS in one pass */
    PIPE_KINDS
};

struct pipe_op {
    enum pipe_kind kind;
    uint32_t micro; /* the micro-batch, counted from 0 */
};

FDSL_C_BEGIN

/* The names of --schedule, in the order of enum pipe_schedule, NULL-terminated. */
extern const char *const pipe_schedule_names[];

/* Returns whether the schedule separates the gradients of inputs and weights. If not, its only backward
 * operation is PIPE_BOTH. */
bool pipe_splits(enum pipe_schedule schedule);

/* Writes the operations of stage `stage` < `stages` for `micros` >= 1 micro-batches, in order, to `ops`,
 * which has room for 3 * micros. Returns their number. Each kind visits the micro-batches in ascending order,
 * so all schedules add up gradients in the same order. */
uint32_t pipe_ops(enum pipe_schedule schedule, uint32_t stages, uint32_t micros, uint32_t stage,
                  struct pipe_op *ops);

/* Returns the largest number of micro-batches whose activations the stage must keep at the same time. It must
 * keep them from the forward pass until the weight gradients are computed. */
uint32_t pipe_live(enum pipe_schedule schedule, uint32_t stages, uint32_t micros, uint32_t stage);

/* Returns the share of a step's time in which a stage waits. Assumes that all operations take the same time
 * on all stages (PIPE_BOTH twice as long), and that messages and the update take no time. */
double pipe_bubble(enum pipe_schedule schedule, uint32_t stages, uint32_t micros);

/* Seconds of a stage's operations per micro-batch, by enum pipe_kind, and of its update per step. */
struct pipe_times {
    double of[PIPE_KINDS], update;
};

/* Simulates consecutive steps with these times of each stage; messages take no time. Sets waits[s] to the
 * fraction of time in which stage s waits in the steady state. The time of the update does not count. Returns
 * false if memory runs out. */
bool pipe_simulate(enum pipe_schedule schedule, uint32_t stages, uint32_t micros,
                   const struct pipe_times *times, double *waits);

FDSL_C_END

#endif
