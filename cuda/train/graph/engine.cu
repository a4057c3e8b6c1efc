/* The engine of `train-graph` and `infer-graph`. It supports only `cnn`, in bf16 on tensor cores. A step is
 * six kernels, and more with several ranks; a CUDA graph replays many steps. The position in the training run
 * is stored on the device, so one graph serves all epochs.
 *
 * Loaded samples (DATA_LOAD) arrive through a feed. Before a launch, the host takes the batches of its steps,
 * and a stream of its own copies them to a ring in device memory. The kernels find the batch of a step by the
 * number of the step, so the same graphs serve the whole ring:
 *
 *     host        take 0..7 - launch A - take 8..15 - launch B - ...
 *     copying     ring 0..7 ────────── ring 8..15 ─────────── ...   ring 32..39 after launch A has ended
 *     training                launch A (steps 0..7) ─ launch B (steps 8..15) ─ ...
 */
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "common/stream.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "train/device_engine.cuh"
#include "train/engines.cuh"
#include "train/graph/kernels.cuh"

/* Number of steps in the CUDA graph `many`. With loaded samples, the graph has fewer steps, because the first
 * step waits for the samples of all of them. */
#define GRAPH_STEPS  32
#define GRAPH_LOADED 8
#define GRAPH_GROUPS (GRAPH_RING / GRAPH_LOADED) /* launches whose samples are in the ring */
#define GRAPH_WAITS  64 /* maximum number of timed launches between two calls of totals() */
static_assert(GRAPH_RING % GRAPH_LOADED == 0, "whole launches");

bool graph_overlaps = true, graph_hopper = true;

struct graph_state : device_engine {
    bool colour;
    /* With several ranks: the stream that updates fc1's weights, and the event after the update. */
    cudaStream_t beside;
    cudaEvent_t applied;
    struct graph_plan plan;
    /* `one` runs 1 step and stores all gradients. `many` runs `many_steps` steps, and stores the gradient of
     * fc1's weights only with several ranks or with plan.hopper. */
    cudaGraphExec_t one, many;
    uint32_t many_steps;
    cudaGraphExec_t inference;
    uint32_t epoch; /* epoch whose order is on the device, if `ordered` */
    bool ordered;
    struct {                  /* DATA_LOAD only */
        uint8_t *samples;     /* the ring: plan.values[DATA_TRAIN] */
        cudaStream_t copying; /* copies batches to the ring */
        cudaEvent_t copied;
        cudaEvent_t computed[GRAPH_GROUPS]; /* launch n has ended, at index n modulo GRAPH_GROUPS */
        uint64_t launches, next;            /* `next`: number of the step after the latest launch */
        /* Events before and after the time that a launch waited for its samples. One in `stride` launches is
         * timed. */
        cudaEvent_t waits[GRAPH_WAITS][2];
        uint32_t wait_count, stride;
        uint64_t since; /* launches since the last totals() */
    } ring;
    struct { /* pinned memory: input and output of the inference graph */
        struct graph_step step;
        float logits[]; /* logits of one batch */
    } * page;
};

static struct graph_state *graph_of(void *state)
{
    return device_engine_as<struct graph_state>(state);
}

/* ---- Supported networks and devices ---- */

static bool same_layer(const struct layer_spec *mine, const struct layer_spec *other)
{
    return mine->kind == other->kind && mine->channels == other->channels && mine->rate == other->rate &&
           memcmp(mine->kernel, other->kernel, sizeof mine->kernel) == 0 &&
           memcmp(mine->padding, other->padding, sizeof mine->padding) == 0;
}

/* Returns whether the model has the layers that the kernels are written for. */
static bool is_cnn(const struct model *model)
{
    static const struct layer_spec layers[] = {
        {LAYER_CONV, CONV1_CHANNELS, {1, 3, 3}, {}, 0},
        {LAYER_RELU, 0, {}, {}, 0},
        {LAYER_CONV, CONV2_CHANNELS, {1, 3, 3}, {}, 0},
        {LAYER_RELU, 0, {}, {}, 0},
        {LAYER_POOL, 0, {1, 2, 2}, {}, 0},
        {LAYER_DROPOUT, 0, {}, {}, DROPOUT1_THRESHOLD / 256.0f},
        {LAYER_LINEAR, HIDDEN, {}, {}, 0},
        {LAYER_RELU, 0, {}, {}, 0},
        {LAYER_DROPOUT, 0, {}, {}, DROPOUT2_THRESHOLD / 256.0f},
        {LAYER_LINEAR, 0, {}, {}, 0},
    };
    if (model->layer_count != COUNT_OF(layers))
        return false;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (!same_layer(&layers[i], &model->layers[i].spec))
            return false;
    return true;
}

template <class NET> static bool has_shape(const struct shape *shape)
{
    return shape->channels == NET::channels && shape->depth == 1 && shape->height == NET::height &&
           shape->width == NET::width;
}

/* Returns the variant to suggest for networks that this engine does not support. */
static const char *other_variant(const struct train *train)
{
    return train->forward_only ? "infer-cuda" : "train-cuda";
}

/* Refuses options that do not work with kernels that update parameters while they compute gradients. */
static enum status accepts_recipe(const struct train *train)
{
    const char *option = train->optimizer.clip_norm > 0       ? "--clip-norm"
                         : train->optimizer.average > 0       ? "--ema"
                         : train->optimizer.clip_adaptive > 0 ? "--clip-adaptive"
                         : train_needs_tensors(train)         ? "--optimizer lamb or muon"
                         : train_parts(train) > 1             ? "--accumulate"
                                                              : NULL;
    return option ? status_set(STATUS_USAGE,
                               "it updates the parameters while it computes the gradients, so it "
                               "does not support %s; use train-bf16, or drop %s",
                               option, option)
                  : STATUS_OK;
}

static enum status graph_accepts(const struct train *train)
{
    const struct model *model = train->model;
    bool shape = has_shape<graph_gray>(&model->input) || has_shape<graph_colour>(&model->input);
    if (train_mixes(train) || train->loss != LOSS_CROSS_ENTROPY)
        return status_set(STATUS_USAGE, "it supports neither --mixup nor --cutmix nor --loss bce; drop "
                                        "these options, or use train-bf16");
    if (is_cnn(model) && shape && train->data->type == DTYPE_U8 && model->classes <= GRAPH_CLASSES)
        return accepts_recipe(train);
    return status_set(STATUS_USAGE,
                      "supports only cnn with its own dropout rates on bytes of 1x28x28 or 3x32x32 with at "
                      "most %d classes, "
                      "but this is %s on "
                      "%s of %ux%ux%u with %u classes; %s supports all models and shapes",
                      GRAPH_CLASSES, model->name, train->data->type == DTYPE_U8 ? "bytes" : "halves",
                      model->input.channels, model->input.height, model->input.width, model->classes,
                      other_variant(train));
}

/* Checks that the device has bf16 tensor cores and enough shared memory. Sets plan.overlap. */
static enum status check_device(const struct train *train, struct graph_state *graph)
{
    int major, minor, shared, architecture;
    bool at_load;
    CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, graph->device));
    CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, graph->device));
    CUDA_TRY(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, graph->device));
    TRY(device_code(graph->device, &architecture, &at_load));
    graph->plan.overlap =
        graph_overlaps &&
        architecture >= 90; /* device code for older architectures cannot wait for the previous kernel */
#ifdef HAVE_HOPPER
    graph->plan.hopper = graph_hopper && major == 9 && minor == 0 && !graph->colour;
#endif
    if (major < 8 || shared < graph_shared_bytes(graph->colour))
        return status_set(STATUS_UNAVAILABLE,
                          "graph: needs tensor cores for bf16 (sm_80 or later) and %d KB of shared memory "
                          "per block, but this device is sm_%d%d with %d KB; use %s",
                          graph_shared_bytes(graph->colour) / 1024, major, minor, shared / 1024,
                          other_variant(train));
    return STATUS_OK;
}

/* ---- Memory ---- */

template <class T> static enum status zeros(struct graph_state *graph, T **pointer, size_t count)
{
    return allocate_zeros(&graph->allocations, pointer, count, graph->stream);
}

/* Opens the feed and the ring of loaded samples. */
static enum status open_ring(struct graph_state *graph)
{
    const struct resources resources = {.threads = graph->threads, .device = graph->device};
    const size_t batch_bytes = graph->plan.batch * graph->train->data->sample_bytes;
    TRY(device_feed_open(&graph->feed, graph->train, &resources, &graph->allocations));
    graph->plan.ring = device_feed_delivers(&graph->feed);
    if (!graph->plan.ring)
        return STATUS_OK;
    device_feed_plan_timings(&graph->feed, UINT32_MAX / 2); /* practically none: the launches are timed */
    TRY(allocate(&graph->allocations, &graph->ring.samples, GRAPH_RING * batch_bytes));
    graph->plan.values[DATA_TRAIN] = graph->ring.samples;
    TRY(stream_open(&graph->ring.copying));
    CUDA_TRY(cudaEventCreateWithFlags(&graph->ring.copied, cudaEventDisableTiming));
    for (cudaEvent_t &computed : graph->ring.computed)
        CUDA_TRY(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
    for (cudaEvent_t(&wait)[2] : graph->ring.waits) {
        CUDA_TRY(cudaEventCreate(&wait[0]));
        CUDA_TRY(cudaEventCreate(&wait[1]));
    }
    return STATUS_OK;
}

static void close_ring(struct graph_state *graph)
{
    if (graph->ring.copying)
        (void)cudaStreamSynchronize(graph->ring.copying); /* nothing depends on an error here */
    for (cudaEvent_t(&wait)[2] : graph->ring.waits)
        destroy(wait[0], wait[1]);
    for (cudaEvent_t computed : graph->ring.computed)
        destroy(computed);
    destroy(graph->ring.copied, graph->ring.copying);
}

static enum status open_data(struct graph_state *graph)
{
    const struct data *data = graph->train->data;
    TRY(device_sets_open(graph->train, graph->sets, &graph->allocations, graph->stream));
    for (int part = 0; part < DATA_PARTS; part++)
        graph->plan.values[part] = static_cast<const uint8_t *>(graph->sets[part].values);
    TRY(open_ring(graph));
    graph->plan.labels = graph->sets[DATA_TRAIN].labels;
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        graph->plan.scale[c] = data->scale[c];
        graph->plan.offset[c] = data->offset[c];
    }
    return STATUS_OK;
}

/* Allocates the arrays that both training and inference need. */
static enum status open_forward(struct graph_state *graph)
{
    struct graph_plan *plan = &graph->plan;
    const struct model *model = graph->train->model;
    size_t features = model->layers[DROPOUT1_NUMBER].out_values;
    size_t splits = graph->colour ? graph_colour::splits : graph_gray::splits;
    for (uint32_t t = 0; t < GRAPH_TENSORS; t++)
        plan->tensors[t] = (uint32_t)model->tensors[t].first;
    graph->allocations.part = MEMORY_PARAMETERS;
    TRY(zeros(graph, &plan->state.parameters, model->arena_values));
    graph->allocations.part = MEMORY_ACTIVATIONS;
    TRY(zeros(graph, &plan->step, 1));
    TRY(zeros(graph, &plan->conv2_weight, CONV2_BYTES / sizeof *plan->conv2_weight));
    TRY(zeros(graph, &plan->fc1_weight, HIDDEN * features));
    TRY(zeros(graph, &plan->pooled, plan->rows * features));
    TRY(zeros(graph, &plan->split_sums, splits * plan->rows * HIDDEN));
    return zeros(graph, &plan->logits, (size_t)plan->rows * plan->classes);
}

static enum status open_backward(struct graph_state *graph)
{
    struct graph_plan *plan = &graph->plan;
    const struct model *model = graph->train->model;
    size_t features = model->layers[DROPOUT1_NUMBER].out_values;
    size_t conv = graph->colour ? graph_colour::conv_parameters : graph_gray::conv_parameters;
    graph->allocations.part = MEMORY_OPTIMIZER;
    TRY(zeros(graph, &plan->state.m, model->arena_values));
    TRY(zeros(graph, &plan->state.v, model->arena_values));
    graph->allocations.part = MEMORY_GRADIENTS;
    TRY(zeros(graph, &plan->gradients, model->arena_values));
    graph->allocations.part = MEMORY_ACTIVATIONS;
    TRY(zeros(graph, &plan->order, plan->samples));
    TRY(zeros(graph, &plan->position, 1));
    TRY(zeros(graph, &plan->updates, plan->steps));
    if (plan->hopper) {
        TRY(zeros(graph, &plan->conv1, plan->rows * graph_gray::pixels1 * 4));
        TRY(zeros(graph, &plan->images, plan->rows * graph_gray::values / 8));
    }
    TRY(zeros(graph, &plan->argmax, plan->rows * features));
    TRY(zeros(graph, &plan->hidden, (size_t)plan->rows * HIDDEN));
    TRY(zeros(graph, &plan->hidden_delta, (size_t)plan->rows * HIDDEN));
    TRY(zeros(graph, &plan->logit_delta, (size_t)plan->rows * plan->classes));
    TRY(zeros(graph, &plan->losses, plan->rows));
    TRY(zeros(graph, &plan->right, plan->rows));
    TRY(zeros(graph, &plan->pooled_delta, plan->rows * features));
    TRY(zeros(graph, &plan->conv_sums, plan->parts * conv));
    return zeros(graph, &plan->totals, 1);
}

static struct graph_share share_of(const struct train *train, uint32_t step)
{
    const struct share share = train_share(train, step);
    return {(uint32_t)share.first, (uint32_t)share.count, (uint32_t)share.total};
}

static void open_plan(struct graph_state *graph)
{
    const struct train *train = graph->train;
    struct graph_plan *plan = &graph->plan;
    plan->seed = train->seed;
    plan->batch = train_share_max(train);
    plan->rows = (plan->batch + GRAPH_ROWS - 1) / GRAPH_ROWS * GRAPH_ROWS;
    plan->steps = train_steps(train);
    plan->stride = train->batch;
    plan->share = share_of(train, 0);
    plan->last = share_of(train, plan->steps - 1);
    plan->arena_values = (uint32_t)train->model->arena_values;
    plan->apart = train->exchange;
    plan->samples = train->data->sets[DATA_TRAIN].count;
    plan->classes = train->model->classes;
    /* The number of parts does not depend on the GPU, so all GPUs give bit-identical sums. */
    plan->parts = plan->batch < GRAPH_PARTS_MAX ? plan->batch : GRAPH_PARTS_MAX;
    plan->augment = train->augment;
    plan->optimizer = train->optimizer;
    plan->schedule = train->schedule;
    plan->smoothing = train->smoothing;
}

/* ---- Graphs ---- */

/* Passes the gradients from index `first` of gradient_place() to index `end` to the exchange. */
static enum status exchange_part(struct graph_state *graph, uint32_t first, uint32_t end)
{
    struct exchange *exchange = graph->train->exchange;
    return exchange->method->begin(exchange, graph->plan.gradients + first, end - first, graph->stream);
}

/* Enqueues the exchange of the gradients of fc1's weights (98 to 99 % of all gradients), and the update of
 * these weights. Both run concurrently with the backward pass through the convolutions. */
static enum status exchange_fc1(struct graph_state *graph, uint32_t fc1)
{
    struct exchange *exchange = graph->train->exchange;
    if (!exchange)
        return STATUS_OK;
    TRY(exchange_part(graph, fc1, graph->plan.arena_values));
    TRY(exchange->method->end(exchange, graph->beside));
    TRY(graph_apply(&graph->plan, fc1, graph->plan.arena_values, graph->beside));
    return CUDA_STATUS(cudaEventRecord(graph->applied, graph->beside));
}

/* Enqueues the exchange of the other gradients, and the update of their parameters. */
static enum status exchange_others(struct graph_state *graph, uint32_t fc1)
{
    struct exchange *exchange = graph->train->exchange;
    if (!exchange)
        return STATUS_OK;
    TRY(exchange_part(graph, 0, fc1));
    CUDA_TRY(cudaStreamWaitEvent(graph->stream, graph->applied, 0));
    TRY(exchange->method->end(exchange, graph->stream));
    return graph_apply(&graph->plan, 0, fc1, graph->stream);
}

static enum status enqueue_step(struct graph_state *graph)
{
    const struct graph_plan *plan = &graph->plan;
    uint32_t fc1 = gradient_place(plan->arena_values, plan->tensors[FC1_B], plan->tensors[FC1_W]);
    TRY(graph_forward(plan, graph->colour, true, graph->stream));
    TRY(graph_dense(plan, graph->colour, true, graph->stream));
    TRY(graph_dense_back(plan, graph->colour, graph->stream));
    TRY(exchange_fc1(graph, fc1));
    TRY(graph_conv_back(plan, graph->colour, graph->stream));
    TRY(graph_update(plan, graph->colour, graph->stream));
    return exchange_others(graph, fc1);
}

static enum status enqueue_steps(struct graph_state *graph, uint32_t steps)
{
    for (uint32_t i = 0; i < steps; i++)
        TRY(enqueue_step(graph));
    return STATUS_OK;
}

static enum status enqueue_inference(struct graph_state *graph)
{
    const struct graph_plan *plan = &graph->plan;
    CUDA_TRY(cudaMemcpyAsync(plan->step, &graph->page->step, sizeof *plan->step, cudaMemcpyHostToDevice,
                             graph->stream));
    TRY(graph_forward(plan, graph->colour, false, graph->stream));
    TRY(graph_dense(plan, graph->colour, false, graph->stream));
    return CUDA_STATUS(cudaMemcpyAsync(graph->page->logits, plan->logits,
                                       (size_t)plan->batch * plan->classes * sizeof(float),
                                       cudaMemcpyDeviceToHost, graph->stream));
}

/* Captures `steps` training steps as a graph, or the inference of one batch if `steps` is 0. */
static enum status record(struct graph_state *graph, uint32_t steps, cudaGraphExec_t *into)
{
    CUDA_TRY(cudaStreamBeginCapture(graph->stream, cudaStreamCaptureModeThreadLocal));
    TRY(capture_end(graph->stream, steps ? enqueue_steps(graph, steps) : enqueue_inference(graph), into));
    return CUDA_STATUS(cudaGraphUpload(*into, graph->stream));
}

static enum status open_graphs(struct graph_state *graph)
{
    TRY(record(graph, 0, &graph->inference));
    if (graph->train->forward_only)
        return STATUS_OK;
    graph->plan.keep_gradients = false;
    graph->many_steps = graph->plan.ring ? GRAPH_LOADED : GRAPH_STEPS;
    TRY(record(graph, graph->many_steps, &graph->many));
    graph->plan.keep_gradients = true;
    return record(graph, 1, &graph->one);
}

/* ---- Opening and closing ---- */

static enum status open_all(struct graph_state *graph)
{
    const struct train *train = graph->train;
    TRY(device_probe(graph->device));
    TRY(graph_accepts(train));
    graph->colour = has_shape<graph_colour>(&train->model->input);
    TRY(check_device(train, graph));
    TRY(device_engine_open(graph));
    CUDA_TRY(cudaStreamCreateWithFlags(&graph->beside, cudaStreamNonBlocking));
    CUDA_TRY(cudaEventCreateWithFlags(&graph->applied, cudaEventDisableTiming));
    open_plan(graph);
    CUDA_TRY(cudaHostAlloc(
        &graph->page, sizeof *graph->page + (size_t)graph->plan.batch * train->model->classes * sizeof(float),
        cudaHostAllocDefault));
    memset(&graph->page->step, 0, sizeof graph->page->step);
    TRY(open_data(graph));
    TRY(open_forward(graph));
    if (!train->forward_only) {
        TRY(open_backward(graph));
        TRY(device_progress_open(&graph->progress));
        graph->losses.totals = graph->plan.totals;
    }
    graph->state = graph->plan.state;
    if (allocations_plan(&graph->allocations))
        return STATUS_OK;
    if (!train->forward_only)
        TRY(totals_clear(graph->plan.totals, graph->stream));
    TRY(open_graphs(graph));
    return CUDA_STATUS(cudaStreamSynchronize(graph->stream));
}

static void graph_close(void *state)
{
    struct graph_state *graph = graph_of(state);
    device_engine_stop(graph);
    close_ring(graph);
    destroy(graph->one, graph->many, graph->inference);
    (void)cudaFreeHost(graph->page); /* nothing depends on an error here */
    destroy(graph->applied, graph->beside);
    device_engine_close(graph);
    free(graph);
}

static enum status graph_open(const struct train *train, const struct resources *resources, void **state)
{
    TRY(device_engine_new<struct graph_state>(train, resources, nullptr, state));
    return open_all(graph_of(*state));
}

/* ---- Copying the state ---- */

static enum status graph_set(void *state, const struct train_state *from)
{
    struct graph_state *graph = graph_of(state);
    TRY(device_engine_set(state, from));
    TRY(graph_refresh(&graph->plan, graph->colour, graph->stream));
    return CUDA_STATUS(cudaStreamSynchronize(graph->stream));
}

static enum status graph_gradients(void *state, float *gradients)
{
    struct graph_state *graph = graph_of(state);
    CUDA_TRY(cudaSetDevice(graph->device));
    const struct graph_plan *plan = &graph->plan;
    uint32_t begin = plan->tensors[FC1_B], behind = plan->arena_values - begin; /* see gradient_place() */
    CUDA_TRY(cudaMemcpyAsync(gradients + begin, plan->gradients, behind * sizeof *gradients,
                             cudaMemcpyDeviceToHost, graph->stream));
    CUDA_TRY(cudaMemcpyAsync(gradients, plan->gradients + behind, begin * sizeof *gradients,
                             cudaMemcpyDeviceToHost, graph->stream));
    return CUDA_STATUS(cudaStreamSynchronize(graph->stream));
}

/* ---- Steps ---- */

/* Enqueues the copy of the batch of a step to the ring. Waits until the batch has been decoded. */
static enum status copy_batch(struct graph_state *graph, uint32_t epoch, uint32_t step)
{
    const size_t bytes = graph->train->data->sample_bytes;
    const uint64_t number = (uint64_t)epoch * train_steps(graph->train) + step;
    struct device_set set = graph->sets[DATA_TRAIN];
    TRY(device_feed_take(&graph->feed, epoch, step, graph->ring.copying, &set));
    CUDA_TRY(cudaMemcpyAsync(graph->ring.samples + number % GRAPH_RING * graph->plan.batch * bytes,
                             set.values, set.held.count * bytes, cudaMemcpyDeviceToDevice,
                             graph->ring.copying));
    return device_feed_release(&graph->feed, graph->ring.copying);
}

/* Makes the stream of the steps wait for the copies. Times the wait of some launches. */
static enum status wait_for_copies(struct graph_state *graph)
{
    const bool timed = graph->ring.since % graph->ring.stride == 0 && graph->ring.wait_count < GRAPH_WAITS;
    cudaEvent_t *wait = graph->ring.waits[graph->ring.wait_count];
    CUDA_TRY(cudaEventRecord(graph->ring.copied, graph->ring.copying));
    if (timed)
        CUDA_TRY(cudaEventRecord(wait[0], graph->stream));
    CUDA_TRY(cudaStreamWaitEvent(graph->stream, graph->ring.copied, 0));
    if (timed)
        CUDA_TRY(cudaEventRecord(wait[1], graph->stream));
    graph->ring.wait_count += timed;
    graph->ring.since++;
    return STATUS_OK;
}

/* Enqueues copies of the batches of `count` steps, at most GRAPH_LOADED, to the ring. The launches whose
 * batches they replace must have ended. These are all but the latest GRAPH_GROUPS - 1 launches if the steps
 * follow those of the latest launch; after a jump, all launches. */
static enum status copy_batches(struct graph_state *graph, uint32_t epoch, uint32_t first, uint32_t count)
{
    const uint64_t number = (uint64_t)epoch * train_steps(graph->train) + first;
    const uint64_t last = graph->ring.launches - (number == graph->ring.next ? GRAPH_GROUPS : 1);
    if (!graph->plan.ring)
        return STATUS_OK;
    CUDA_TRY(cudaStreamWaitEvent(graph->ring.copying, graph->ring.computed[last % GRAPH_GROUPS], 0));
    for (uint32_t i = 0; i < count; i++)
        TRY(copy_batch(graph, epoch, first + i));
    graph->ring.next = number + count;
    return wait_for_copies(graph);
}

/* Runs `count` steps of an epoch in one launch of a graph. */
static enum status launch(struct graph_state *graph, uint32_t epoch, uint32_t first, uint32_t count)
{
    TRY(copy_batches(graph, epoch, first, count));
    {
        RANGE(GRAPH);
        CUDA_TRY(cudaGraphLaunch(count == 1 ? graph->one : graph->many, graph->stream));
    }
    if (graph->plan.ring)
        CUDA_TRY(cudaEventRecord(graph->ring.computed[graph->ring.launches++ % GRAPH_GROUPS], graph->stream));
    return device_progress_step(&graph->progress, graph->plan.totals, count, graph->stream);
}

/* Launches the graph `many` while more than `many_steps` steps are left, and then the graph `one` for each
 * remaining step. The graph `one` always runs the last step, because that step's gradients may be requested.
 */
static enum status graph_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    struct graph_state *graph = graph_of(state);
    const struct graph_position position = {
        .epoch = epoch, .step = first, .number = (uint64_t)epoch * train_steps(graph->train) + first};
    CUDA_TRY(cudaSetDevice(graph->device));
    if (!graph->ordered || graph->epoch != epoch) {
        const struct draw_order order = train_order(graph->train, epoch);
        TRY(graph_order(&graph->plan, &order, epoch, graph->stream));
        graph->ordered = true;
        graph->epoch = epoch;
    }
    TRY(graph_go_to(&graph->plan, &position, graph->stream));
    graph->ring.stride = count / GRAPH_WAITS + 1;
    for (uint32_t end = first + count; first < end;) {
        const uint32_t steps = end - first > graph->many_steps ? graph->many_steps : 1;
        TRY(launch(graph, epoch, first, steps));
        first += steps;
    }
    return STATUS_OK;
}

/* Sets `*stall_s` to the time that steps waited for their samples, extrapolated from the timed launches. All
 * steps have ended. */
static enum status total_waits(struct graph_state *graph, double *stall_s)
{
    double ms = 0;
    for (uint32_t i = 0; i < graph->ring.wait_count; i++) {
        float one_ms;
        CUDA_TRY(cudaEventElapsedTime(&one_ms, graph->ring.waits[i][0], graph->ring.waits[i][1]));
        ms += one_ms;
    }
    *stall_s = graph->ring.wait_count ? 1e-3 * ms * (double)graph->ring.since / graph->ring.wait_count : 0;
    graph->ring.wait_count = 0;
    graph->ring.since = 0;
    return STATUS_OK;
}

/* The first kernel of a step gathers the samples itself, so the time for data cannot be measured
 * separately. */
static enum status graph_totals(void *state, struct train_totals *totals)
{
    struct graph_state *graph = graph_of(state);
    TRY(device_engine_totals(state, totals));
    totals->data_s = -1;
    return graph->plan.ring ? total_waits(graph, &totals->stall_s) : STATUS_OK;
}

/* ---- Inference ---- */

static enum status graph_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                  float *logits)
{
    struct graph_state *graph = graph_of(state);
    uint32_t batch = graph->plan.batch, classes = graph->train->model->classes;
    CUDA_TRY(cudaSetDevice(graph->device));
    for (uint32_t done = 0; done < count; done += batch) {
        uint32_t now = count - done < batch ? count - done : batch;
        graph->page->step.part = part;
        graph->page->step.first = first + done;
        graph->page->step.count = now;
        {
            RANGE(GRAPH);
            CUDA_TRY(cudaGraphLaunch(graph->inference, graph->stream));
        }
        CUDA_TRY(cudaStreamSynchronize(graph->stream));
        memcpy(logits + (size_t)done * classes, graph->page->logits, (size_t)now * classes * sizeof *logits);
    }
    return STATUS_OK;
}

extern "C" {
const struct engine engine_graph = {
    .name = "graph",
    /* bf16 has 8 significant bits. docs/notes/engines.md explains the bounds and which faults exceed them. */
    .bounds = {.loss = 1.5e-2, .floor = 1, .drift = 0.4, .logits = 2e-2},
    .loads = true,
    .gradients_in = GRADIENTS_IN_GRAPH,
    .unit = UNIT_HALF,
    .accepts = graph_accepts,
    .open = graph_open,
    .close = graph_close,
    .set = graph_set,
    .get = device_engine_get,
    .steps = graph_steps,
    .totals = graph_totals,
    .progress = device_engine_progress,
    .gradients = graph_gradients,
    .evaluate = graph_evaluate,
    .memory_bytes = device_engine_memory_bytes,
    .test_samples = device_engine_test_samples,
};
}

/* ---- Variants ---- */

extern "C" {
extern const struct variant variant_train_graph, variant_infer_graph;
const struct variant variant_train_graph = training_by<&engine_graph>(true);
const struct variant variant_infer_graph = inferring_by<&engine_graph>(true);
}
