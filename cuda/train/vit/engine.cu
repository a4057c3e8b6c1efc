/* The engine of `train-vit` and `infer-vit`. One buffer holds all activations; activations.cu divides it. A
 * step gathers its samples, replays the CUDA graph of the forward pass, computes the loss, replays the graph
 * of the backward pass, and updates the parameters. Each number of samples needs its own graphs; the last
 * batch of an epoch, for example, can be smaller. */
#include "train/vit/engine_parts.cuh"

#include <stdlib.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"

static struct vit *vit_of(struct device_engine *engine)
{
    return static_cast<struct vit *>(engine);
}

/* ---- Graphs ---- */

/* Captures the forward or the backward pass of `count` samples. The mode is relaxed, because cuBLASLt loads
 * its kernels when they are first used. */
static enum status record(struct vit *vit, uint32_t count, bool back, cudaGraphExec_t *into)
{
    CUDA_TRY(cudaStreamBeginCapture(vit->stream, cudaStreamCaptureModeRelaxed));
    return capture_end(vit->stream, back ? vit_backward(vit, count) : vit_forward(vit, count, true), into);
}

static void graphs_close(struct graphs *graphs)
{
    destroy(graphs->forward, graphs->backward);
    *graphs = {};
}

/* Returns the graphs for `count` samples, and captures them if they do not exist. If all entries are in use,
 * replaces the last one. */
static enum status graphs_for(struct vit *vit, uint32_t count, struct graphs **into)
{
    struct graphs *graphs = vit->graphs, *last = vit->graphs + GRAPHS - 1;
    while (graphs < last && graphs->backward && graphs->count != count)
        graphs++;
    *into = graphs;
    if (graphs->backward && graphs->count == count)
        return STATUS_OK;
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    graphs_close(graphs);
    graphs->count = count;
    if (count > 0)
        TRY(record(vit, count, false, &graphs->forward));
    return record(vit, count, true, &graphs->backward);
}

static enum status launch(struct vit *vit, cudaGraphExec_t graph)
{
    RANGE(GRAPH);
    CUDA_TRY(cudaGraphLaunch(graph, vit->stream));
    return STATUS_OK;
}

/* ---- Steps ---- */

static enum status gather(struct device_engine *engine, const struct device_set *set, uint32_t epoch,
                          bool training, uint32_t count)
{
    struct vit *vit = vit_of(engine);
    const struct train *train = vit->train;
    TRY(vit_patches(train->data, set, vit->batch, count, vit->patch, vit->patches, vit->stream));
    return training && vit->path_count > 0
               ? vit_factors(vit->paths, vit->path_count, train->seed, epoch, vit->batch->numbers, count,
                             vit->capacity, vit->factors, vit->stream)
               : STATUS_OK;
}

static enum status apply(struct device_engine *engine, const struct update *update)
{
    struct vit *vit = vit_of(engine);
    const struct train *train = vit->train;
    const size_t values = train->model->arena_values;
    RANGE(UPDATE);
    TRY(clip_find(&train->optimizer, values, vit->gradients, NULL, vit->clip, vit->losses.totals,
                  vit->stream));
    return vit_update(update, values, vit->groups, vit->clip, vit->gradients, &vit->state, vit->parameters,
                      vit->stream);
}

/* Computes the gradients of a part of a step; see vit_backward(). */
static enum status compute_part(struct vit *vit, uint64_t number, const struct share *part)
{
    struct pass pass = {};
    struct graphs *graphs;
    pass.stream = vit->stream;
    pass.count = (uint32_t)part->count;
    pass.total = (uint32_t)part->total;
    TRY(graphs_for(vit, pass.count, &graphs));
    if (pass.count > 0) {
        TRY(launch(vit, graphs->forward));
        TRY(loss_take(vit->train, vit->logits, vit->batch, &pass, number, vit->logit_deltas, &vit->losses));
    }
    return launch(vit, graphs->backward);
}

/* Computes the gradients of one of several parts of a step, and adds them to those of the parts before it. */
static enum status add_part(struct vit *vit, uint64_t number, const struct share *part, bool first)
{
    const size_t values = vit->train->model->arena_values, bytes = values * sizeof *vit->gradients;
    if (part->count == 0) { /* only part 0 can be empty here */
        CUDA_TRY(cudaMemsetAsync(vit->gradients, 0, bytes, vit->stream));
        return STATUS_OK;
    }
    TRY(compute_part(vit, number, part));
    if (first)
        return arena_copy(vit->train, vit->gradients, vit->added, vit->stream);
    return values_add(vit->added, values, vit->gradients, vit->stream);
}

static enum status learn_part(struct device_engine *engine, uint32_t epoch, uint32_t step,
                              const struct share *part, uint32_t index)
{
    struct vit *vit = vit_of(engine);
    const uint64_t number = (uint64_t)epoch * train_steps(vit->train) + step;
    return train_parts(vit->train) == 1 ? compute_part(vit, number, part)
                                        : add_part(vit, number, part, index == 0);
}

static enum status infer(struct device_engine *engine, uint32_t count, const float **logits)
{
    struct vit *vit = vit_of(engine);
    *logits = vit->logits;
    return vit_forward(vit, count, false);
}

/* ---- The engine ---- */

static enum status vit_open(const struct train *train, const struct resources *resources, void **state)
{
    static const struct device_engine_functions functions = {
        .gather = gather, .learn_part = learn_part, .update = apply, .infer = infer};
    TRY(device_engine_new<struct vit>(train, resources, &functions, state));
    return vit_open_all(device_engine_as<struct vit>(*state));
}

static void vit_close(void *state)
{
    struct vit *vit = device_engine_as<struct vit>(state);
    device_engine_stop(vit);
    for (struct graphs &graphs : vit->graphs)
        graphs_close(&graphs);
    vit_multiplier_close(vit->multiplier);
    device_engine_close(vit);
    free(vit);
}

static enum status vit_set(void *state, const struct train_state *from)
{
    struct vit *vit = device_engine_as<struct vit>(state);
    TRY(device_engine_set(state, from));
    TRY(vit_round(vit->state.parameters, vit->train->model->arena_values, vit->parameters, vit->stream));
    CUDA_TRY(cudaStreamSynchronize(vit->stream));
    return STATUS_OK;
}

extern "C" {
const struct engine engine_vit = {
    .name = "vit",
    /* bf16 has 8 significant bits. docs/train_vit.md explains these bounds and which faults exceed them. */
    .bounds = {.loss = 2e-2, .floor = 1, .drift = 0.3, .logits = 4e-2},
    .feeds = true,
    .recomputes = true,
    .augments = true,
    .gradients_in = GRADIENTS_IN_GRAPH,
    .shares_update = true,
    .unit = UNIT_HALF,
    .accepts = vit_accepts,
    .open = vit_open,
    .close = vit_close,
    .set = vit_set,
    .get = device_engine_get,
    .steps = device_engine_steps,
    .totals = device_engine_totals,
    .progress = device_engine_progress,
    .gradients = device_engine_gradients,
    .evaluate = device_engine_evaluate,
    .memory_bytes = device_engine_memory_bytes,
};
}
