/* Training on a pipeline of ranks (--parallel pipeline). Each rank holds consecutive layers of the network,
 * called a stage. The micro-batches of a step pass through the stages; activations travel forward and their
 * gradients backward. docs/distributed.md describes pipelines.
 *
 * A pipeline is an engine itself: it drives the stage_functions of another engine in the order of a schedule
 * (enum pipe_schedule). The trainer, checkpoints and --verify therefore treat it as one engine for the whole
 * network. */
#ifndef FDSL_TRAIN_PIPELINE_H
#define FDSL_TRAIN_PIPELINE_H

#include <stdbool.h>
#include <stdint.h>

#include "train/engine.h"

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

/* Seconds of a stage's operations per micro-batch, by enum pipe_kind, and of its update per step. */
struct pipe_times {
    double of[PIPE_KINDS], update;
};

/* The parameters of training on a pipeline. The number of ranks is a multiple of the number of stages. Each
 * `stages` consecutive ranks are a replica: rank r has stage r % stages of replica r / stages. The replicas
 * divide the samples of a step, and each stage adds up its gradients over the replicas. */
struct pipeline_plan {
    const struct engine *engine; /* computes the stages; set by the trainer */
    enum pipe_schedule schedule;
    uint32_t stages, micros; /* micro-batches per step of a replica */
    int sync;                /* --sync of the exchange of the replicas */
    uint64_t
        limit_bytes; /* memory that the stage of this rank may allocate; 0: no limit; set by the trainer */
};

/* Times that a stage measured in the latest call of steps(). The first step fills the pipeline, so it is left
 * out, unless it is the only one. */
struct pipe_measured {
    double waited_s, worked_s; /* sums: waiting for messages; computing forward and backward passes */
    struct pipe_times times;   /* means */
};

FDSL_C_BEGIN

/* ---- Schedules: the order in which a stage computes its micro-batches. All functions are pure ---- */

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

/* Simulates consecutive steps with these times of each stage; messages take no time. Sets waits[s] to the
 * fraction of time in which stage s waits in the steady state. The time of the update does not count. Returns
 * false if memory runs out. */
bool pipe_simulate(enum pipe_schedule schedule, uint32_t stages, uint32_t micros,
                   const struct pipe_times *times, double *waits);

/* ---- The engine ---- */

/* Returns an engine that trains on the pipeline of train->pipeline, with the stages computed by `engine`. Its
 * functions open(), set(), get(), steps(), gradients() and evaluate() are collective. If a step fails on one
 * rank, this rank prints the message and ends all ranks. */
struct engine pipeline_engine(const struct engine *engine);

/* Returns STATUS_OK if the engine can compute a stage, else STATUS_USAGE with a reason that calls the engine
 * "it". */
enum status pipeline_accepts(const struct engine *engine);

/* Returns the exchange of the replicas; NULL if there is one replica. */
struct exchange *pipeline_exchange(void *state);

/* Return the measurements of this rank's stage, and the names of its layers, such as "conv1-relu2". `state`
 * is the state of a pipeline_engine(). */
struct pipe_measured pipeline_measured(const void *state);
void pipeline_layers(const void *state, char *text, size_t size);

/* Collective: sets `*bubble` to the share of time in which the stage of this rank would wait if messages took
 * no time. Simulates the pipeline with the measured times of all stages. */
enum status pipeline_ideal(const struct pipeline_plan *plan, const struct pipe_measured *mine,
                           double *bubble);

/* ---- Cutting the network into stages ---- */

/* Returns the largest number of stages into which the network can be cut. */
uint32_t pipe_pieces(const struct model *model);

/* Costs of the pieces of a network, in the order of its layers, and limits of the stages. */
struct pipe_costs {
    uint32_t pieces;
    bool limited; /* the stages have limits; otherwise all members after `seconds` are ignored */
    double seconds[MODEL_LAYERS_MAX];    /* forward and backward pass of a micro-batch */
    double bytes[MODEL_LAYERS_MAX];      /* memory of the piece as a stage that keeps one micro-batch */
    double slot_bytes[MODEL_LAYERS_MAX]; /* more memory for each further micro-batch */
    double joint_bytes;                  /* two adjacent pieces need this much less in one stage */
    uint32_t slots[MODEL_LAYERS_MAX];    /* per stage: micro-batches that it keeps */
    double limits[MODEL_LAYERS_MAX];     /* per stage: memory in bytes; HUGE_VAL: no limit */
};

/* Chooses cuts for pieces of known cost: piece i begins with layer starts[i]; starts[pieces] is the number of
 * layers. stages <= pieces. STATUS_TOO_LARGE if nothing fits. */
enum status pipe_choose(const uint32_t *starts, const struct pipe_costs *costs, uint32_t stages,
                        uint32_t *begins);

FDSL_C_END

#endif
