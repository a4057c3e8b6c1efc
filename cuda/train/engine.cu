/* The engine of `train-cuda` and `infer-cuda` (fp32), `train-tf32`, `infer-tf32`, `train-bf16`, `infer-bf16`
 * and `train-amp` (other precisions), `train-cudnn` and `train-cudnn-tf32` (convolutions by cuDNN). The test
 * set, the training set (unless it is generated during training), parameters and activations are in device
 * memory. A step is a sequence of asynchronous launches. Sums of losses stay on the device until totals(). */
#include "train/engine.cuh"

#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "train/exchange_pieces.h"
#include "train/cudnn.cuh"
#include "train/engine_parts.cuh"
#include "train/multiply.cuh"

static const struct layer_passes own_passes[LAYER_KINDS] = {
    /* LAYER_CONV */ {conv_prepare, conv_forward, conv_backward, nullptr},
    /* LAYER_RELU */ {nullptr, relu_forward, relu_backward, nullptr},
    /* LAYER_POOL */ {nullptr, pool_forward, pool_backward, nullptr},
    /* LAYER_DROPOUT */ {nullptr, dropout_forward, dropout_backward, nullptr},
    /* LAYER_LINEAR */ {nullptr, linear_forward, linear_backward, nullptr},
    /* LAYER_ADD */ {nullptr, add_forward, add_backward, nullptr},
    /* LAYER_MEAN */ {nullptr, mean_forward, mean_backward, nullptr},
};

/* ---- Memory ---- */

/* Ensures that the list of blocks has room for one more entry. */
static enum status make_room(struct allocations *allocations)
{
    if (allocations->count < allocations->room)
        return STATUS_OK;
    uint32_t room = allocations->room ? 2 * allocations->room : 64;
    void *blocks = realloc(allocations->blocks, room * sizeof *allocations->blocks);
    if (!blocks)
        return status_set(STATUS_FAILED, "cuda: out of memory");
    allocations->blocks = static_cast<void **>(blocks);
    allocations->room = room;
    return STATUS_OK;
}

enum status allocate_bytes(struct allocations *allocations, void **pointer, size_t bytes)
{
    TRY(make_room(allocations));
    cudaError_t error = cudaMalloc(pointer, bytes);
    if (error == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total_bytes = 0;
        (void)cudaGetLastError();
        CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
        return status_set(STATUS_USAGE,
                          "not enough device memory for training: %.2f GB allocated, %.2f GB more needed, "
                          "%.2f GB free; lower --batch",
                          1e-9 * (double)allocations->bytes, 1e-9 * (double)bytes, 1e-9 * (double)free_bytes);
    }
    CUDA_TRY(error);
    allocations->blocks[allocations->count++] = *pointer;
    allocations->bytes += bytes;
    return STATUS_OK;
}

void allocations_free(struct allocations *allocations)
{
    while (allocations->count > 0)
        (void)cudaFree(allocations->blocks[--allocations->count]);
    free(allocations->blocks);
    *allocations = {};
}

/* ---- State ---- */

enum status arena_copy(const struct train *train, float *to, const float *from, cudaStream_t stream)
{
    CUDA_TRY(cudaMemcpyAsync(to, from, train->model->arena_values * sizeof *to, cudaMemcpyDefault, stream));
    return STATUS_OK;
}

enum status state_copy(const struct train *train, const struct train_state *to,
                       const struct train_state *from, cudaStream_t stream)
{
    TRY(arena_copy(train, to->parameters, from->parameters, stream));
    if (train->forward_only)
        return STATUS_OK;
    TRY(arena_copy(train, to->m, from->m, stream));
    TRY(arena_copy(train, to->v, from->v, stream));
    return train_averages(train) && to->ema
               ? arena_copy(train, to->ema, from->ema ? from->ema : from->parameters, stream)
               : STATUS_OK;
}

enum status totals_clear(struct train_totals *totals, cudaStream_t stream)
{
    static const struct train_totals none = {.bad_step = TRAIN_FINE};
    CUDA_TRY(cudaMemcpyAsync(totals, &none, sizeof none, cudaMemcpyHostToDevice, stream));
    return STATUS_OK;
}

/* ---- Opening ---- */

/* Kernels index the elements of a batch with 31 bits, which limits the batch size. */
static enum status check_size(const struct network *network)
{
    const struct train *train = network->train;
    const struct model *model = train->model;
    size_t most = model->input_values;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].out_values > most)
            most = model->layers[i].out_values;
    if (most * network->capacity < UINT64_C(1) << 31)
        return STATUS_OK;
    return status_set(
        STATUS_USAGE,
        "a layer of %s would hold 2^31 values or more for a batch of %u; lower --batch to %llu%s",
        model->name, network->capacity,
        (unsigned long long)(((UINT64_C(1) << 31) - 1) / most * train_parts(train)),
        train->ranks > 1 ? " per rank" : "");
}

static bool in_place(const struct layer *layer)
{
    return layer->spec.kind == LAYER_RELU || layer->spec.kind == LAYER_DROPOUT;
}

static bool has_products(const struct layer *layer)
{
    return layer->spec.kind == LAYER_CONV || layer->spec.kind == LAYER_LINEAR;
}

/* Fuses a ReLU into its neighbours. If a later LAYER_ADD also uses the ReLU's output, the next layer computes
 * only a part of that output's gradient. The ReLU's backward pass then stays separate. */
static void share_relu(struct device_layer *before, struct device_layer *relu, struct device_layer *behind)
{
    if (relu->layer->spec.kind != LAYER_RELU)
        return;
    before->relu = relu->forward_done = has_products(before->layer) || before->layer->spec.kind == LAYER_ADD;
    if (behind && !relu->layer->is_added)
        behind->relu_before = relu->backward_done =
            has_products(behind->layer) || behind->layer->spec.kind == LAYER_POOL;
}

/* Opens layer i; the layers before it must be open. */
static enum status open_layer(struct network *network, uint32_t i)
{
    const struct model *model = network->train->model;
    const struct layer *layer = &model->layers[i];
    struct device_layer *self = &network->layers[i];
    const struct device_layer *before = self - 1;
    uint32_t batch = network->capacity;
    size_t outputs = layer->out_values * batch;
    self->layer = layer;
    self->in = before->out;
    self->in_delta = before->out_delta;
    self->measures = network->train->cudnn_benchmark;
    if (in_place(layer)) {
        self->out = self->in;
        self->out_delta = self->in_delta;
    } else
        TRY(allocate(&network->allocations, &self->out, outputs));
    /* Zeroed, because pool_back_kernel does not write elements that are in no window. */
    if (!self->out_delta && !network->train->forward_only)
        TRY(allocate_zeros(&network->allocations, &self->out_delta, outputs, network->stream));
    if (layer->spec.kind == LAYER_POOL)
        TRY(allocate(&network->allocations, &self->largest, outputs));
    if (layer->spec.kind == LAYER_ADD)
        self->added = self - layer->spec.back;
    const struct layer_passes *by = &network->passes[layer->spec.kind];
    return by->prepare ? by->prepare(self, batch, &network->allocations, network->stream) : STATUS_OK;
}

static enum status open_data(struct network *network)
{
    TRY(device_sets_open(network->train, network->sets, &network->allocations, network->stream));
    TRY(device_augment_open(network->train, &network->allocations, &network->augment));
    const struct resources resources = {.threads = network->threads, .device = network->device};
    return device_feed_open(&network->feed, network->train, &resources, &network->allocations);
}

static enum status open_learning(struct network *network)
{
    size_t values = network->train->model->arena_values, batch = network->capacity;
    TRY(moments_open(network->train, &network->state, &network->allocations, network->stream));
    if (train_averages(network->train))
        TRY(allocate(&network->allocations, &network->state.ema, values));
    TRY(clip_open(network->train, &network->allocations, &network->clip));
    TRY(allocate_zeros(&network->allocations, &network->gradients, values, network->stream));
    if (network->train->stage || train_parts(network->train) > 1)
        TRY(allocate_zeros(&network->allocations, &network->added, values, network->stream));
    network->shared = {.gradients = network->gradients,
                       .parameters = network->state.parameters,
                       .m = network->state.m,
                       .v = network->state.v};
    TRY(shared_update_open(network->train, &network->allocations, &network->shared));
    TRY(allocate(&network->allocations, &network->losses.losses, batch));
    TRY(allocate(&network->allocations, &network->losses.right, batch));
    if (network->precision == PRECISION_FP16)
        TRY(allocate_zeros(&network->allocations, &network->losses.scale, 1, network->stream));
    return allocate(&network->allocations, &network->losses.totals, 1);
}

static enum status clear_totals(struct network *network)
{
    network->steps = 0;
    if (network->losses.scale)
        CUDA_TRY(cudaMemsetAsync(&network->losses.scale->skipped, 0, sizeof network->losses.scale->skipped,
                                 network->stream));
    return totals_clear(network->losses.totals, network->stream);
}

/* Describes the input of the network as the output of a layer, for additions that use it. Only the input of a
 * stage that is not the first needs a gradient. */
static enum status open_input(struct network *network)
{
    const struct model *model = network->train->model;
    const struct stage *stage = network->train->stage;
    struct slot *slot = network->slot;
    network->input = {};
    network->input.out = model->input;
    network->input.out_values = model->input_values;
    for (uint32_t i = 0; i < model->layer_count; i++)
        network->input.is_added |= model->layers[i].spec.kind == LAYER_ADD && model->layers[i].spec.back > i;
    TRY(allocate(&network->allocations, &slot->inputs, network->capacity * model->input_values));
    slot->all[0] = {};
    slot->all[0].layer = &network->input;
    slot->all[0].out = slot->inputs;
    return stage && !stage->first ? allocate_zeros(&network->allocations, &slot->all[0].out_delta,
                                                   network->capacity * model->input_values, network->stream)
                                  : STATUS_OK;
}

/* Opens the memory of the current slot. */
static enum status open_slot(struct network *network)
{
    const struct train *train = network->train;
    const uint32_t layers = train->model->layer_count;
    TRY(device_batch_allocate(train, network->capacity, &network->slot->batch, &network->allocations));
    TRY(open_input(network));
    for (uint32_t i = 0; i < layers; i++)
        TRY(open_layer(network, i));
    for (uint32_t i = 0; i < layers; i++)
        TRY(packed_prepare(&network->layers[i], network->precision, network->capacity, !train->forward_only,
                           &network->allocations));
    for (uint32_t i = 1; i < layers; i++)
        share_relu(&network->layers[i - 1], &network->layers[i],
                   i + 1 < layers ? &network->layers[i + 1] : nullptr);
    return STATUS_OK;
}

void network_choose(struct network *network, uint32_t number)
{
    network->slot = &network->slots[number];
    network->layers = network->slot->all + 1;
}

static enum status open_slots(struct network *network)
{
    const struct stage *stage = network->train->stage;
    const uint32_t count = stage ? stage->slots : 1;
    network->slots = static_cast<struct slot *>(calloc(count, sizeof *network->slots));
    if (!network->slots)
        return status_set(STATUS_FAILED, "cuda: out of memory");
    network->slot_count = count;
    for (uint32_t i = count; i-- > 0;) { /* ends with slot 0 as the current one */
        network_choose(network, i);
        TRY(open_slot(network));
    }
    return STATUS_OK;
}

static enum status open_all(struct network *network)
{
    const struct train *train = network->train;
    TRY(device_probe(network->device));
    TRY(check_size(network));
    CUDA_TRY(cudaSetDevice(network->device));
    CUDA_TRY(cudaStreamCreateWithFlags(&network->stream, cudaStreamNonBlocking));
    CUDA_TRY(cudaEventCreate(&network->gather_begin));
    CUDA_TRY(cudaEventCreate(&network->gather_end));
    TRY(allocate_zeros(&network->allocations, &network->state.parameters, train->model->arena_values,
                       network->stream));
    TRY(allocate(&network->allocations, &network->workspace, WORKSPACE_VALUES));
    TRY(open_data(network));
    if (!train->forward_only) {
        TRY(open_learning(network));
        TRY(device_progress_open(&network->progress));
        TRY(clear_totals(network));
    }
    TRY(open_slots(network));
    CUDA_TRY(cudaStreamSynchronize(network->stream));
    return STATUS_OK;
}

/* Releases the resources, other than device memory, of the current slot's layers. */
static void release_slot(struct network *network)
{
    for (uint32_t i = 0; i < network->train->model->layer_count; i++)
        if (network->passes[network->train->model->layers[i].spec.kind].release)
            network->passes[network->train->model->layers[i].spec.kind].release(&network->layers[i]);
}

static void cuda_close(void *state)
{
    struct network *network = static_cast<struct network *>(state);
    /* Ignores errors: nothing can be done about them, and nothing depends on them. */
    (void)cudaSetDevice(network->device);
    if (network->stream)
        (void)cudaStreamSynchronize(network->stream);
    for (uint32_t i = 0; i < network->slot_count; i++) {
        network_choose(network, i);
        release_slot(network);
    }
    free(network->slots);
    device_feed_close(&network->feed);
    device_progress_close(&network->progress);
    allocations_free(&network->allocations);
    if (network->gather_end)
        (void)cudaEventDestroy(network->gather_end);
    if (network->gather_begin)
        (void)cudaEventDestroy(network->gather_begin);
    if (network->stream)
        (void)cudaStreamDestroy(network->stream);
    free(network);
}

/* Opens a network whose convolutions are computed by CONV, and whose GEMMs have PRECISION. */
template <const struct layer_passes *CONV, enum precision PRECISION>
static enum status cuda_open(const struct train *train, const struct resources *resources, void **state)
{
    struct network *network = static_cast<struct network *>(calloc(1, sizeof *network));
    *state = network;
    if (!network)
        return status_set(STATUS_FAILED, "cuda: out of memory");
    network->train = train;
    network->precision = PRECISION;
    network->capacity = train->stage ? train->stage->capacity : train_part_max(train);
    network->device = resources->device;
    network->threads = resources->threads;
    memcpy(network->passes, own_passes, sizeof network->passes);
    network->passes[LAYER_CONV] = *CONV;
    return open_all(network);
}

/* ---- Copying the state ---- */

/* Copies the loss scale, and waits for the copy. */
static enum status copy_scale(struct network *network, struct loss_scale *to, const struct loss_scale *from)
{
    CUDA_TRY(cudaMemcpyAsync(to, from, sizeof *to, cudaMemcpyDefault, network->stream));
    CUDA_TRY(cudaStreamSynchronize(network->stream));
    return STATUS_OK;
}

static enum status cuda_set(void *state, const struct train_state *from)
{
    struct network *network = static_cast<struct network *>(state);
    CUDA_TRY(cudaSetDevice(network->device));
    TRY(state_set(network->train, &network->state, from, network->stream));
    const struct loss_scale scale = from->scale.scale > 0 ? from->scale : loss_scale_begin();
    return network->losses.scale ? copy_scale(network, &network->losses.scale->now, &scale) : STATUS_OK;
}

static enum status cuda_get(void *state, struct train_state *into)
{
    struct network *network = static_cast<struct network *>(state);
    CUDA_TRY(cudaSetDevice(network->device));
    TRY(state_get(network->train, into, &network->state, network->stream));
    return network->losses.scale ? copy_scale(network, &into->scale, &network->losses.scale->now) : STATUS_OK;
}

static enum status cuda_gradients(void *state, float *gradients)
{
    struct network *network = static_cast<struct network *>(state);
    CUDA_TRY(cudaSetDevice(network->device));
    TRY(arena_copy(network->train, gradients, network->gradients, network->stream));
    CUDA_TRY(cudaStreamSynchronize(network->stream));
    return STATUS_OK;
}

/* ---- Steps ---- */

struct pass network_pass(const struct network *network, const struct share *share, bool training,
                         uint32_t epoch)
{
    return {.stream = network->stream,
            .count = (uint32_t)share->count,
            .total = (uint32_t)share->total,
            .training = training,
            .precision = network->precision,
            .seed = network->train->seed,
            .epoch = epoch,
            .numbers = network->slot->batch.numbers,
            .parameters = network->state.parameters,
            .gradients = network->gradients,
            .workspace = network->workspace,
            .of = GRADIENTS_OF_BOTH};
}

struct device_layer *network_last_layer(const struct network *network)
{
    return &network->layers[network->train->model->layer_count - 1];
}

enum status network_forward(struct network *network, const struct pass *pass)
{
    for (uint32_t i = 0; i < network->train->model->layer_count; i++)
        TRY(network->passes[network->layers[i].layer->spec.kind].forward(&network->layers[i], pass));
    return STATUS_OK;
}

/* Each layer overwrites the gradient of its input. If later LAYER_ADD layers also use that input, their
 * backward passes have already run. Their contributions to the gradient are added after the overwrite. */
enum status network_backward_layer(struct network *network, const struct device_layer *self,
                                   const struct pass *pass)
{
    bool shared = self->in_delta && self[-1].layer->is_added;
    if (shared && self->layer->spec.kind == LAYER_POOL) /* pooling writes nothing outside its windows */
        CUDA_TRY(cudaMemsetAsync(
            self->in_delta, 0, pass->count * self->layer->in_values * sizeof *self->in_delta, pass->stream));
    TRY(network->passes[self->layer->spec.kind].backward(self, pass));
    return shared ? added_backward(self - 1, network_last_layer(network) + 1, pass) : STATUS_OK;
}

/* Call after the backward pass of a layer. The gradients from this layer to `*end` are final and not yet
 * exchanged, because the arena stores the layers in order, and the backward pass begins with the last layer.
 * Passes these gradients to the exchange if they are large enough for a part, or if no layer is left. Then
 * sets `*end` to the first of these gradients. */
static enum status exchange_layer(struct network *network, const struct layer *layer, size_t *end)
{
    struct exchange *exchange = network->train->exchange;
    size_t first;
    if (!exchange || !exchange_is_part(network->train->model, layer, *end, &first))
        return STATUS_OK;
    TRY(exchange->method->begin(exchange, network->gradients + first, *end - first, network->stream));
    *end = first;
    return STATUS_OK;
}

static enum status exchange_end(struct network *network)
{
    struct exchange *exchange = network->train->exchange;
    return exchange ? exchange->method->end(exchange, network->stream) : STATUS_OK;
}

/* Runs the backward pass of all layers. If the step has one part, also exchanges the gradients. A rank
 * without samples in this step has gradients of zero. */
static enum status backward(struct network *network, const struct pass *pass)
{
    const struct model *model = network->train->model;
    const bool exchanges = train_parts(network->train) == 1;
    size_t end = model->arena_values;
    RANGE(BACKWARD);
    if (pass->count == 0)
        CUDA_TRY(cudaMemsetAsync(network->gradients, 0, end * sizeof *network->gradients, network->stream));
    for (uint32_t i = model->layer_count; i-- > 0;) {
        if (pass->count > 0)
            TRY(network_backward_layer(network, &network->layers[i], pass));
        if (exchanges)
            TRY(exchange_layer(network, &model->layers[i], &end));
    }
    return exchanges ? exchange_end(network) : STATUS_OK;
}

/* Exchanges the gradients of a step of several parts. */
static enum status exchange_all(struct network *network)
{
    const struct model *model = network->train->model;
    size_t end = model->arena_values;
    for (uint32_t i = model->layer_count; i-- > 0;)
        TRY(exchange_layer(network, &model->layers[i], &end));
    return exchange_end(network);
}

/* Makes a part of a step the current batch. `set` has the samples of the whole step, or all samples.
 * `skipped`: samples of this rank before this part. */
static enum status gather_part(struct network *network, const struct device_set *set, uint32_t epoch,
                               uint32_t step, const struct share *part, size_t skipped)
{
    const struct train *train = network->train;
    struct device_set after = device_set_after(set, train->data, skipped);
    struct device_batch *batch = &network->slot->batch;
    RANGE(GATHER);
    TRY(batch_draw(train, set, batch, epoch, step, part, network->stream));
    TRY(device_augment_run(&network->augment, epoch, batch->numbers,
                           train_generated(train, (uint32_t)part->count), &after, network->stream));
    return batch_gather(train->data, &after, batch, (uint32_t)part->count, network->slot->inputs,
                        network->stream);
}

/* With loss scaling, the device decides whether to apply the update. */
enum status network_update(struct network *network, uint64_t number)
{
    const struct train *train = network->train;
    const struct update update = optimizer_at(&train->optimizer, &train->schedule, number);
    size_t values = train->model->arena_values;
    struct device_scale *scale = network->losses.scale;
    RANGE(UPDATE);
    if (scale)
        TRY(scaling_unscale(scale, values, network->gradients, network->stream));
    TRY(clip_find(&train->optimizer, values, network->gradients, scale, network->clip, network->losses.totals,
                  network->stream));
    TRY(parameters_update(&update, values, network->gradients, scale, network->clip, &network->state,
                          network->stream));
    return scale ? scaling_step(scale, network->stream) : STATUS_OK;
}

/* Computes the gradients of the current batch. If the step has one part, adds up the gradients of all
 * ranks. */
static enum status compute_gradients(struct network *network, const struct pass *pass, uint64_t number)
{
    const struct device_layer *last = network_last_layer(network);
    if (pass->count > 0) {
        RANGE(FORWARD);
        TRY(network_forward(network, pass));
        TRY(loss_take(network->train, last->out, &network->slot->batch, pass, number, last->out_delta,
                      &network->losses));
    }
    return backward(network, pass);
}

/* Computes the gradients of a part of a step. The kernels overwrite gradients, so those of later parts are
 * computed in network->added. */
static enum status learn_part(struct network *network, uint32_t epoch, uint32_t step,
                              const struct share *part, bool adds)
{
    const struct train *train = network->train;
    struct pass pass = network_pass(network, part, true, epoch);
    pass.gradients = adds ? network->added : network->gradients;
    TRY(compute_gradients(network, &pass, (uint64_t)epoch * train_steps(train) + step));
    return adds ? values_add(network->added, train->model->arena_values, network->gradients, network->stream)
                : STATUS_OK;
}

/* Computes the gradients of the samples of this rank. With `timed`, records the events around the gather of
 * the first part. Live samples are released after the last gather. */
static enum status learn_parts(struct network *network, uint32_t epoch, uint32_t step,
                               const struct share *share, bool timed)
{
    const struct train *train = network->train;
    struct device_set set = network->sets[DATA_TRAIN];
    const bool live = device_feed_is_live(&network->feed) && share->count > 0;
    const uint32_t parts = train_parts(train);
    if (timed)
        CUDA_TRY(cudaEventRecord(network->gather_begin, network->stream));
    if (live)
        TRY(device_feed_take(&network->feed, epoch, step, network->stream, &set));
    for (uint32_t i = 0; i < parts; i++) {
        const struct share part = train_part(train, share, i);
        if (part.count > 0)
            TRY(gather_part(network, &set, epoch, step, &part, part.first - share->first));
        if (live && i == parts - 1)
            TRY(device_feed_release(&network->feed, network->stream));
        if (timed && i == 0)
            CUDA_TRY(cudaEventRecord(network->gather_end, network->stream));
        if (part.count > 0 || i == 0)
            TRY(learn_part(network, epoch, step, &part, i > 0));
    }
    return STATUS_OK;
}

static enum status learn(struct network *network, uint32_t epoch, uint32_t step, bool timed)
{
    const struct train *train = network->train;
    const struct share share = train_share(train, step);
    const uint64_t number = (uint64_t)epoch * train_steps(train) + step;
    const struct update update = optimizer_at(&train->optimizer, &train->schedule, number);
    const bool shared = exchange_updates(train->exchange);
    if (shared)
        TRY(shared_update_begin(&network->shared, &update, network->stream));
    TRY(learn_parts(network, epoch, step, &share, timed));
    if (train_parts(train) > 1)
        TRY(exchange_all(network));
    return shared ? STATUS_OK : network_update(network, number);
}

static enum status cuda_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    struct network *network = static_cast<struct network *>(state);
    CUDA_TRY(cudaSetDevice(network->device));
    uint32_t timed = first + count / 2;
    device_feed_plan_timings(&network->feed, count);
    for (uint32_t step = first; step < first + count; step++) {
        TRY(learn(network, epoch, step, step == timed));
        TRY(device_progress_step(&network->progress, network->losses.totals, 1, network->stream));
    }
    network->steps += count;
    return STATUS_OK;
}

/* `data_s` is the gather time of one step times the number of steps, because events around every step would
 * slow the steps down. It is not known for steps in parts. */
static enum status cuda_totals(void *state, struct train_totals *totals)
{
    struct network *network = static_cast<struct network *>(state);
    float gather_ms = 0;
    uint32_t skipped = 0;
    CUDA_TRY(cudaSetDevice(network->device));
    CUDA_TRY(cudaMemcpyAsync(totals, network->losses.totals, sizeof *totals, cudaMemcpyDeviceToHost,
                             network->stream));
    if (network->losses.scale)
        CUDA_TRY(cudaMemcpyAsync(&skipped, &network->losses.scale->skipped, sizeof skipped,
                                 cudaMemcpyDeviceToHost, network->stream));
    CUDA_TRY(cudaStreamSynchronize(network->stream));
    TRY(exchange_settle(network->train->exchange));
    totals->skipped = skipped;
    if (network->steps > 0)
        CUDA_TRY(cudaEventElapsedTime(&gather_ms, network->gather_begin, network->gather_end));
    totals->data_s = network->train->stage ? -1 : 1e-3 * gather_ms * (double)network->steps;
    if (device_feed_is_live(&network->feed))
        TRY(device_feed_totals(&network->feed, network->steps, totals));
    if (train_parts(network->train) > 1)
        totals->data_s = -1;
    device_progress_clear(&network->progress);
    return clear_totals(network);
}

static void cuda_progress(const void *state, struct train_progress *progress)
{
    device_progress_read(&static_cast<const struct network *>(state)->progress, progress);
}

/* ---- Inference ---- */

static enum status evaluate_batch(struct network *network, enum data_part part, uint32_t first,
                                  uint32_t count, float *logits)
{
    const struct share share = {.first = 0, .count = count, .total = count};
    const struct pass pass = network_pass(network, &share, false, 0);
    TRY(batch_list(&network->sets[part], &network->slot->batch, first, count, network->stream));
    TRY(batch_gather(network->train->data, &network->sets[part], &network->slot->batch, count,
                     network->slot->inputs, network->stream));
    TRY(network_forward(network, &pass));
    CUDA_TRY(cudaMemcpyAsync(logits, network_last_layer(network)->out,
                             (size_t)count * network->train->model->classes * sizeof *logits,
                             cudaMemcpyDeviceToHost, network->stream));
    return STATUS_OK;
}

static enum status cuda_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                 float *logits)
{
    struct network *network = static_cast<struct network *>(state);
    uint32_t batch = network->capacity;
    CUDA_TRY(cudaSetDevice(network->device));
    for (uint32_t done = 0; done < count; done += batch) {
        uint32_t left = count - done;
        TRY(evaluate_batch(network, part, first + done, left < batch ? left : batch,
                           logits + (size_t)done * network->train->model->classes));
    }
    CUDA_TRY(cudaStreamSynchronize(network->stream));
    return STATUS_OK;
}

struct engine_batch engine_batch(const void *state)
{
    const struct network *network = static_cast<const struct network *>(state);
    const struct device_set *set = &network->sets[DATA_TRAIN];
    return {network->stream, const_cast<void *>(set->values), const_cast<uint32_t *>(set->labels),
            network->losses.totals};
}

static uint64_t cuda_memory_bytes(const void *state)
{
    const struct network *network = static_cast<const struct network *>(state);
    return network->allocations.bytes + device_feed_memory_bytes(&network->feed);
}

static enum status cuda_accepts(const struct train *train)
{
    return model_refuse_transformer(train->model);
}

#define OWN_CONV (&own_passes[LAYER_CONV])

/* The hardware unit that computes GEMMs in a precision. */
template <enum precision PRECISION>
static constexpr enum unit unit_of = PRECISION == PRECISION_FP32   ? UNIT_FP32
                                     : PRECISION == PRECISION_TF32 ? UNIT_TF32
                                                                   : UNIT_HALF;

template <const struct layer_passes *CONV, enum precision PRECISION, enum unit UNIT = unit_of<PRECISION>>
static constexpr struct engine engine_of(const char *name, const struct engine_bounds &bounds)
{
    return {.name = name,
            .bounds = bounds,
            .scales_loss = PRECISION == PRECISION_FP16,
            .feeds = true,
            .benchmarks = CONV != OWN_CONV,
            .augments = true,
            .gradients_in = GRADIENTS_IN_DEVICE,
            .shares_update = PRECISION != PRECISION_FP16,
            .unit = UNIT,
            .savings = {.backward = false, .pooled_gradients = false, .convolutions = CONV != OWN_CONV},
            .accepts = cuda_accepts,
            .stages = CONV == OWN_CONV && PRECISION != PRECISION_FP16 ? &cuda_stages : nullptr,
            .open = cuda_open<CONV, PRECISION>,
            .close = cuda_close,
            .set = cuda_set,
            .get = cuda_get,
            .steps = cuda_steps,
            .totals = cuda_totals,
            .progress = cuda_progress,
            .gradients = cuda_gradients,
            .evaluate = cuda_evaluate,
            .memory_bytes = cuda_memory_bytes};
}

/* docs/train_mixed.md explains the bounds. */
extern "C" {
const struct engine engine_cuda = engine_of<OWN_CONV, PRECISION_FP32>("cuda", ENGINE_BOUNDS_FLOAT);
const struct engine engine_tf32 =
    engine_of<OWN_CONV, PRECISION_TF32>("tf32", {.loss = 5e-3, .floor = 1, .drift = 0.3, .logits = 1e-2});
const struct engine engine_bf16 = engine_of<OWN_CONV, PRECISION_BF16>("bf16", ENGINE_BOUNDS_BF16);
const struct engine engine_amp =
    engine_of<OWN_CONV, PRECISION_FP16>("amp", {.loss = 5e-3, .floor = 1, .drift = 0.3, .logits = 1e-2});

#ifdef HAVE_CUDNN
const struct engine engine_cudnn = engine_of<&cudnn_conv_fp32, PRECISION_FP32>("cudnn", ENGINE_BOUNDS_FLOAT);
/* TF32 has 10 mantissa bits. The relative rounding error of each factor is at most 5e-4 (fp32: 6e-8). */
const struct engine engine_cudnn_tf32 = engine_of<&cudnn_conv_tf32, PRECISION_FP32, UNIT_TF32>(
    "cudnn-tf32", {.loss = 1e-2, .floor = 1e-2, .drift = 0.2, .logits = 1e-2});
#endif
}
