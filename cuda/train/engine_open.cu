/* Opens and closes the engines of engine.cu: the layers, their activations and gradients, arrays for
 * training. */
#include <stdlib.h>

#include "common/check.cuh"
#include "machine/device.h"
#include "train/engine_parts.cuh"
#include "train/multiply.cuh"

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
        STATUS_TOO_LARGE,
        "a layer of %s would hold 2^31 values or more for a batch of %u; lower --batch to %llu%s",
        model->name, network->capacity,
        (unsigned long long)(((UINT64_C(1) << 31) - 1) / most * train_parts(train)),
        train->ranks > 1 ? " per rank" : "");
}

static bool in_place(const struct layer *layer)
{
    return layer->spec.kind == LAYER_RELU || layer->spec.kind == LAYER_DROPOUT;
}

static bool has_gemm(const struct layer *layer)
{
    return layer->spec.kind == LAYER_CONV || layer->spec.kind == LAYER_LINEAR;
}

/* Fuses a ReLU into its neighbours. If a later LAYER_ADD also uses the ReLU's output, the next layer computes
 * only a part of that output's gradient. The ReLU's backward pass then stays separate. */
static void share_relu(struct device_layer *before, struct device_layer *relu, struct device_layer *after)
{
    if (relu->layer->spec.kind != LAYER_RELU)
        return;
    before->relu = relu->forward_done = has_gemm(before->layer) || before->layer->spec.kind == LAYER_ADD;
    if (after && !relu->layer->is_added)
        after->relu_before = relu->backward_done =
            has_gemm(after->layer) || after->layer->spec.kind == LAYER_POOL;
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

/* ---- Slots ---- */

/* Describes the input of the network as the output of a layer, for additions that use it. The input needs a
 * gradient only in a pipeline stage after the first. */
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
    network->batch = &network->slot->batch;
}

static enum status open_slots(struct network *network)
{
    const struct stage *stage = network->train->stage;
    const uint32_t count = stage ? stage->slots : 1;
    network->slots = static_cast<struct slot *>(calloc(count, sizeof *network->slots));
    TRY(ALLOCATED(network->slots, "cuda: out of memory"));
    network->slot_count = count;
    for (uint32_t i = count; i-- > 0;) { /* ends with slot 0 as the current one */
        network_choose(network, i);
        TRY(open_slot(network));
    }
    return STATUS_OK;
}

/* ---- The network ---- */

static enum status open_learning(struct network *network)
{
    const struct train *train = network->train;
    if (train->stage || train_parts(train) > 1)
        TRY(allocate_zeros(&network->allocations, &network->added, train->model->arena_values,
                           network->stream));
    if (network->precision == PRECISION_FP16)
        TRY(allocate_zeros(&network->allocations, &network->losses.scale, 1, network->stream));
    return device_engine_open_learning(network);
}

enum status network_open(struct network *network)
{
    const struct train *train = network->train;
    TRY(device_probe(network->device));
    TRY(check_size(network));
    TRY(device_engine_open(network));
    TRY(allocate_zeros(&network->allocations, &network->state.parameters, train->model->arena_values,
                       network->stream));
    TRY(allocate(&network->allocations, &network->workspace, WORKSPACE_VALUES));
    TRY(device_engine_open_data(network));
    if (!train->forward_only)
        TRY(open_learning(network));
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

void network_close(void *state)
{
    struct network *network = network_of(state);
    device_engine_stop(network);
    for (uint32_t i = 0; i < network->slot_count; i++) {
        network_choose(network, i);
        release_slot(network);
    }
    free(network->slots);
    device_engine_close(network);
    free(network);
}
