/* The part that the engines of engine.cu, vit/engine.cu and graph/engine.cu share: device memory, data, the
 * exchange, and steps in parts (which engine_graph does not use). The state of each of these engines derives
 * from struct device_engine. The `void *state` of its struct engine points to a struct device_engine. */
#ifndef FDSL_CUDA_TRAIN_DEVICE_ENGINE_CUH
#define FDSL_CUDA_TRAIN_DEVICE_ENGINE_CUH

#include <stdlib.h>

#include "train/augment.cuh"
#include "train/feed.cuh"
#include "train/exchange.h"
#include "train/network.cuh"

struct device_engine;

/* The functions that each engine supplies. They all enqueue their work on engine->stream. */
struct device_engine_functions {
    /* Writes the inputs of the `count` samples in engine->batch, whose values are in `set`. */
    enum status (*gather)(struct device_engine *engine, const struct device_set *set, uint32_t epoch,
                          bool training, uint32_t count);
    /* Computes the gradients of part `index` of a step; its samples are in engine->batch. Part 0 sets
     * engine->gradients, and the others add to them. Part 0 may have no samples. If the step has one part,
     * also exchanges the gradients. */
    enum status (*learn_part)(struct device_engine *engine, uint32_t epoch, uint32_t step,
                              const struct share *part, uint32_t index);
    /* Applies the update of a step to the parameters. */
    enum status (*update)(struct device_engine *engine, const struct update *update);
    /* Enqueues the forward pass of the `count` samples in engine->batch. Sets `*logits` to the address of
     * their logits in device memory. */
    enum status (*infer)(struct device_engine *engine, uint32_t count, const float **logits);
};

/* Augments the samples of the next step on a stream of its own, while the current step runs. Augmentation
 * alone cannot fill the GPU at the end of its kernels, nor can training. */
struct device_ahead {
    cudaStream_t stream; /* of the lowest priority; NULL: each step augments its own samples */
    cudaEvent_t ready;   /* the samples are in `set` */
    cudaEvent_t taken;   /* they have been gathered, so `set` may be overwritten */
    struct device_batch batch;
    struct device_set set;
    bool prepared; /* the samples of the next step were enqueued */
};

struct device_engine {
    const struct train *train;
    const struct device_engine_functions *functions;
    int device, threads; /* `threads`: CPU threads that draw or decode samples */
    uint32_t capacity;   /* maximum number of samples of a batch */
    cudaStream_t stream;
    struct allocations allocations;
    struct train_state state; /* device memory */
    float *gradients;
    /* For an exchange that updates the parameters. `shared.rounded`: also for device_engine_update(). */
    struct exchange_update shared;
    bool to_fp16; /* shared.rounded is in fp16 instead of bf16 */
    struct device_set sets[DATA_PARTS];
    struct device_feed feed; /* training samples that are live or loaded */
    struct device_augment augment;
    struct device_ahead ahead;
    struct device_batch *batch; /* the current batch */
    struct device_losses losses;
    struct device_clip *clip; /* NULL: gradients are not scaled to a norm */
    /* Per MODEL_ALIGNMENT parameters: how to update them. NULL: all in the same way. */
    struct tensor_update *groups;
    struct device_tensors tensors;
    struct device_progress progress;
    float *results; /* pinned memory for the logits of a batch, if train->forward_only; else NULL */
    /* Events before and after the gather of one step: the middle step of the latest call of steps(). By then,
     * launches are queued, so the measured time contains no launch latency. */
    cudaEvent_t gather_begin, gather_end;
    uint64_t steps; /* since the last totals() */
};

/* ---- Opening and closing ---- */

/* Creates a zeroed state of type ENGINE, which derives from struct device_engine. `functions` is NULL if the
 * engine does not call device_engine_steps() and device_engine_evaluate(). */
template <class ENGINE>
static inline enum status device_engine_new(const struct train *train, const struct resources *resources,
                                            const struct device_engine_functions *functions, void **state)
{
    struct device_engine *engine = static_cast<ENGINE *>(calloc(1, sizeof(ENGINE)));
    *state = engine;
    TRY(ALLOCATED(engine, "cuda: out of memory"));
    engine->train = train;
    engine->functions = functions;
    engine->device = resources->device;
    engine->threads = resources->threads;
    engine->capacity = train_part_max(train);
    engine->allocations.account = train->memory;
    return STATUS_OK;
}

/* Returns the state of type ENGINE that device_engine_new() created. */
template <class ENGINE> static inline ENGINE *device_engine_as(void *state)
{
    return static_cast<ENGINE *>(static_cast<struct device_engine *>(state));
}

/* Makes the device current, and creates the stream and the events. */
enum status device_engine_open(struct device_engine *engine);
/* Opens the samples: the data sets in device memory, the augmentation, and the feed. */
enum status device_engine_open_data(struct device_engine *engine);
/* Opens the arrays for training, the progress and the totals. The parameters must be allocated. The engine
 * may have set shared.rounded, to_fp16, losses.scale and tensors.tensor_cores. */
enum status device_engine_open_learning(struct device_engine *engine);

/* Clips the gradients and updates the parameters, and engine->shared.rounded unless it is NULL. With loss
 * scaling, divides the gradients by the scale before, and the device decides whether to apply the update. */
enum status device_engine_update(struct device_engine *engine, const struct update *update);

/* device_engine_stop() makes the device current and waits for the engine's streams. The engine then releases
 * its own resources, and calls device_engine_close(), which does not free the state. Both functions ignore
 * errors, because nothing depends on them. */
void device_engine_stop(struct device_engine *engine);
void device_engine_close(struct device_engine *engine);

/* ---- Steps ---- */

/* Call device_engine_exchange() when the gradients of layers `first` to `end_layer` - 1 are final after the
 * work on `stream` so far. This function passes the gradients to the exchange in parts. Gradients that are
 * too few for a part wait for a later call; layer 0 completes the last part. The arena stores the layers in
 * order, and the backward pass begins with the last layer. Before the first call of a step, the caller sets
 * `*end` to the number of values in the arena. Each call lowers `*end` to the offset of the gradients passed
 * so far.
 *
 * device_engine_exchange_end() makes the engine's stream wait for all sums of the step. Both functions do
 * nothing without an exchange. */
enum status device_engine_exchange(struct device_engine *engine, uint32_t first, uint32_t end_layer,
                                   size_t *end, cudaStream_t stream);
enum status device_engine_exchange_end(struct device_engine *engine);

/* ---- Stages of pipelines ----
 *
 * Functions for struct stage_functions, and for its forward() and backward(). Those of struct stage_functions
 * wait for their kernels, because the caller then sends the results to another rank, and measures how long
 * the stage works. */

/* Makes a micro-batch the current batch, engine->batch. The first stage also gathers its samples. */
enum status device_stage_take(struct device_engine *engine, const struct micro *micro);
/* Enqueues a copy of `bytes` bytes between the device and a message. */
enum status device_stage_copy(const struct device_engine *engine, void *to, const void *from, size_t bytes);
enum status device_stage_clear(void *state);
enum status device_stage_sum(void *state, bool *overflowed);
enum status device_stage_update(void *state, uint64_t step, bool overflowed);
enum status device_stage_pin(void *memory, size_t bytes);
void device_stage_unpin(void *memory);
enum status device_stage_share(size_t bytes, void **memory, struct stage_handle *handle);
enum status device_stage_map(const struct stage_handle *handle, void **memory);
void device_stage_release(void *memory, bool mapped);

/* Returns the functions of a stage that has its own passes. `value_bytes`: of a value of a message. */
constexpr struct stage_functions device_stage_functions(size_t value_bytes,
                                                        decltype(stage_functions::forward) forward,
                                                        decltype(stage_functions::backward) backward)
{
    return {.value_bytes = value_bytes,
            .forward = forward,
            .backward = backward,
            .clear = device_stage_clear,
            .sum = device_stage_sum,
            .update = device_stage_update,
            .pin = device_stage_pin,
            .unpin = device_stage_unpin,
            .share = device_stage_share,
            .map = device_stage_map,
            .release = device_stage_release};
}

/* ---- Functions of struct engine ---- */

enum status device_engine_set(void *state, const struct train_state *from);
enum status device_engine_get(void *state, struct train_state *into);
enum status device_engine_gradients(void *state, float *gradients);
enum status device_engine_overflows(void *state, uint32_t *steps);
enum status device_engine_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count);
enum status device_engine_totals(void *state, struct train_totals *totals);
void device_engine_progress(const void *state, struct train_progress *progress);
enum status device_engine_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                   float *logits);
uint64_t device_engine_memory_bytes(const void *state);
void *device_engine_test_samples(const void *state);

/* Returns what all engines of this kind share. The engine adds gradients_in, unit, accepts, open, close, and
 * what it can do besides. `scales`: it scales the loss. */
constexpr struct engine device_engine_table(const char *name, const struct engine_bounds &bounds, bool scales)
{
    return {.name = name,
            .bounds = bounds,
            .scales_loss = scales,
            .feeds = true,
            .augments = true,
            .shares_update = !scales,
            .set = device_engine_set,
            .get = device_engine_get,
            .steps = device_engine_steps,
            .totals = device_engine_totals,
            .progress = device_engine_progress,
            .gradients = device_engine_gradients,
            .overflows = scales ? device_engine_overflows : nullptr,
            .evaluate = device_engine_evaluate,
            .memory_bytes = device_engine_memory_bytes,
            .test_samples = device_engine_test_samples};
}

#endif
