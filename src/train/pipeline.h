/* Training on a pipeline of ranks (--parallel pipeline). Each rank holds consecutive layers of the network,
 * called a stage. The micro-batches of a step pass through the stages; activations travel forward and their
 * gradients backward over MPI, in host memory. docs/pipeline.md describes pipelines.
 *
 * A pipeline is an engine itself: it drives the stage_functions of another engine in the order of a schedule
 * (pipe_schedule.h). The trainer, checkpoints and --verify therefore treat it as one engine for the whole
 * network. */
#ifndef FDSL_TRAIN_PIPELINE_H
#define FDSL_TRAIN_PIPELINE_H

#include "train/engine.h"
#include "train/pipe_schedule.h"

/* The parameters of training on a pipeline. Stage i is rank i. */
struct pipeline_plan {
    const struct engine *engine; /* computes the stages; set by the trainer */
    enum pipe_schedule schedule;
    uint32_t stages, micros; /* number of stages = number of ranks; micro-batches per step */
};

/* Times that a stage measured in the latest call of steps(). The first step fills the pipeline, so it is left
 * out, unless it is the only one. */
struct pipe_measured {
    double waited_s, worked_s; /* sums: waiting for messages; computing forward and backward passes */
    struct pipe_times times;   /* means */
};

FDSL_C_BEGIN

/* Returns an engine that trains on the pipeline of train->pipeline, with the stages computed by `engine`. Its
 * functions open(), set(), get(), steps(), gradients() and evaluate() are collective. If a step fails on one
 * rank, this rank prints the message and ends all ranks. */
struct engine pipeline_engine(const struct engine *engine);

/* Returns STATUS_OK if the engine can compute a stage with samples of this feed, else STATUS_USAGE with a
 * reason that calls the engine "it". */
enum status pipeline_accepts(const struct engine *engine, enum data_feed feed);

/* Return the measurements of this rank's stage, and the names of its layers, such as "conv1-relu2". `state`
 * is the state of a pipeline_engine(). */
struct pipe_measured pipeline_measured(const void *state);
void pipeline_layers(const void *state, char *text, size_t size);

/* Collective: sets `*bubble` to the share of time in which the stage of this rank would wait if messages took
 * no time. Simulates the pipeline with the measured times of all stages. */
enum status pipeline_ideal(const struct pipeline_plan *plan, const struct pipe_measured *mine,
                           double *bubble);

/* ---- pipe_cut.c ---- */

/* Returns the largest number of stages into which the network can be cut. */
uint32_t pipe_pieces(const struct model *model);

/* Collective: cuts the network into `stages` slices so that the most expensive slice costs as little as
 * possible. Costs are measured on rank 0: seconds of the forward and backward pass of a micro-batch of
 * `capacity` samples. Slice i has the layers begins[i] to begins[i + 1] - 1; `begins` has room for stages
 * + 1. STATUS_USAGE if there are too few layers. */
enum status pipe_cut(const struct train *train, const struct engine *engine,
                     const struct resources *resources, uint32_t stages, uint32_t capacity, uint32_t *begins);

/* Chooses cuts for pieces of known cost: piece i begins with layer starts[i] and costs costs[i];
 * starts[pieces] is the number of layers. stages <= pieces. */
void pipe_choose(const uint32_t *starts, const double *costs, uint32_t pieces, uint32_t stages,
                 uint32_t *begins);

FDSL_C_END

#endif
