/* The engine as a stage of a pipeline (struct stage_functions). Every function waits for its kernels, because
 * the caller then sends the results to another rank, and measures how long the stage works. */
#include "common/check.cuh"
#include "core/phase.h"
#include "train/engine_parts.cuh"

static enum status copy(const struct network *network, float *to, const float *from, size_t values)
{
    CUDA_TRY(cudaMemcpyAsync(to, from, values * sizeof *to, cudaMemcpyDefault, network->stream));
    return STATUS_OK;
}

static enum status finish(const struct network *network)
{
    CUDA_TRY(cudaStreamSynchronize(network->stream));
    return STATUS_OK;
}

/* Makes the slot of a micro-batch the current one, and returns the pass over its samples. */
static struct pass choose(struct network *network, const struct micro *micro)
{
    const struct share share = {.first = 0, .count = micro->count, .total = micro->total};
    network_choose(network, micro->slot);
    return network_pass(network, &share, micro->training, micro->epoch);
}

/* Copies the inputs of a micro-batch to the device, or gathers its samples there. */
static enum status take_inputs(struct network *network, const struct micro *micro, const float *inputs)
{
    const struct train *train = network->train;
    struct slot *slot = network->slot;
    const struct device_set *set = &network->sets[micro->part];
    CUDA_TRY(cudaMemcpyAsync(network->batch->numbers, micro->numbers, micro->count * sizeof *micro->numbers,
                             cudaMemcpyHostToDevice, network->stream));
    TRY(batch_pick(train, set, network->batch, micro->epoch, micro->training, micro->count, network->stream));
    if (inputs)
        return copy(network, slot->inputs, inputs, micro->count * train->model->input_values);
    RANGE(GATHER);
    return batch_gather(train->data, set, network->batch, micro->count, slot->inputs, network->stream);
}

static enum status stage_forward(void *state, const struct micro *micro, const float *inputs, float *outputs)
{
    struct network *network = network_of(state);
    CUDA_TRY(cudaSetDevice(network->device));
    const struct pass pass = choose(network, micro);
    const struct device_layer *last = network_last_layer(network);
    RANGE(FORWARD);
    TRY(take_inputs(network, micro, inputs));
    TRY(network_forward(network, &pass));
    if (outputs)
        TRY(copy(network, outputs, last->out, micro->count * last->layer->out_values));
    else
        TRY(loss_take(network->train, last->out, network->batch, &pass, micro->step, last->out_delta,
                      &network->losses));
    return finish(network);
}

static enum status backward(struct network *network, const struct pass *pass)
{
    for (uint32_t i = network->train->model->layer_count; i-- > 0;) {
        const struct device_layer *self = &network->layers[i];
        if (pass->of & GRADIENTS_OF_INPUTS)
            TRY(network_backward_layer(network, self, pass));
        else if (self->layer->weight_values > 0)
            TRY(network->passes[self->layer->spec.kind].backward(self, pass));
    }
    return STATUS_OK;
}

/* The kernels overwrite the gradients of the weights. For all micro-batches but the first, they therefore
 * write to network->added, whose values are then added to network->gradients. */
static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of of,
                                  const float *deltas, float *in_deltas)
{
    struct network *network = network_of(state);
    const struct model *model = network->train->model;
    const bool adds = micro->index > 0 && of & GRADIENTS_OF_WEIGHTS;
    CUDA_TRY(cudaSetDevice(network->device));
    struct pass pass = choose(network, micro);
    const struct device_layer *last = network_last_layer(network);
    RANGE(BACKWARD);
    pass.of = of;
    pass.gradients = adds ? network->added : network->gradients;
    if (deltas)
        TRY(copy(network, last->out_delta, deltas, micro->count * last->layer->out_values));
    TRY(backward(network, &pass));
    if (adds)
        TRY(values_add(network->added, model->arena_values, network->gradients, network->stream));
    if (in_deltas)
        TRY(copy(network, in_deltas, network->slot->all[0].out_delta, micro->count * model->input_values));
    return finish(network);
}

static enum status stage_update(void *state, uint64_t step)
{
    struct network *network = network_of(state);
    const struct train *train = network->train;
    const struct update update = optimizer_at(&train->optimizer, &train->schedule, step);
    CUDA_TRY(cudaSetDevice(network->device));
    TRY(network_update(network, &update));
    TRY(device_progress_step(&network->progress, network->losses.totals, 1, network->stream));
    return finish(network);
}

static enum status stage_pin(void *memory, size_t bytes)
{
    CUDA_TRY(cudaHostRegister(memory, bytes, cudaHostRegisterDefault));
    return STATUS_OK;
}

static void stage_unpin(void *memory)
{
    (void)cudaHostUnregister(memory); /* nothing depends on an error here */
}

extern "C" const struct stage_functions cuda_stages = {.live = false,
                                                       .forward = stage_forward,
                                                       .backward = stage_backward,
                                                       .update = stage_update,
                                                       .pin = stage_pin,
                                                       .unpin = stage_unpin};
