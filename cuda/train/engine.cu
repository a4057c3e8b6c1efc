/* The engine of three groups of variants: fp32 (`train-cuda`, `infer-cuda`); other precisions (`train-tf32`,
 * `infer-tf32`, `train-bf16`, `infer-bf16`, `train-amp`); and convolutions by cuDNN (`train-cudnn`,
 * `train-cudnn-tf32`). The test set, the training set (unless it is generated during training), parameters
 * and activations are in device memory. */
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "machine/device.h"
#include "train/device_engine.cuh"
#include "train/engines.cuh"
#include "train/multiply.cuh"

/* The samples of a batch, and the layers' activations and gradients for them. A stage of a pipeline has a
 * slot for each micro-batch whose activations it keeps; otherwise there is one slot. */
struct network_slot {
    struct device_batch batch;
    /* all[0] describes the input; all[1 + i] describes layer i. */
    struct device_layer all[1 + MODEL_LAYERS_MAX];
};

struct network : device_engine {
    enum precision precision;
    float *workspace;
    /* In 16 bits: fp32 values in C order of a tensor that enters or leaves the network. It is the workspace
     * if that is large enough. */
    float *staging;
    /* The tensors of a layer in fp32 between layers in 16 bits, as fp32 values in C order. They have room for
     * the largest of these layers. NULL if there are none. */
    struct {
        float *in, *out;
    } wide;
    /* Gradients of one micro-batch or part, before they are added to `gradients`. NULL if a step has only
     * one.
     */
    float *added;
    struct network_slot *slots;
    uint32_t slot_count;
    struct network_slot *slot;   /* the current slot; `batch` is its batch */
    struct device_layer *layers; /* slot->all + 1: the layers of the current slot */
    struct layer input;          /* describes the input as the output of a layer */
    struct layer_passes passes[LAYER_KINDS];
};

static struct network *network_of(void *state)
{
    return device_engine_as<struct network>(state);
}

static struct device_layer *network_last_layer(const struct network *network)
{
    return &network->layers[network->train->model->layer_count - 1];
}

/* ---- Opening: the layers, their activations and gradients, arrays for training ---- */

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

/* Returns the first layer after layer i that does not run in place; NULL if there is none. */
static struct device_layer *next_reader(const struct network *network, uint32_t i)
{
    const struct model *model = network->train->model;
    do
        i++;
    while (i < model->layer_count && in_place(&model->layers[i]));
    return i < model->layer_count ? &network->layers[i] : nullptr;
}

/* Fuses the ReLUs into their neighbours. A dropout may follow a ReLU in place: relu_kernel() explains why
 * this does not change the mask. */
static void share_relus(struct network *network)
{
    for (uint32_t i = 1; i < network->train->model->layer_count; i++) {
        struct device_layer *relu = &network->layers[i], *before = relu - 1, *after = next_reader(network, i);
        if (relu->layer->spec.kind != LAYER_RELU)
            continue;
        before->relu = relu->forward_done = has_gemm(before->layer) || before->layer->spec.kind == LAYER_ADD;
        if (after)
            after->relu_before = relu->backward_done = after->layer->spec.kind != LAYER_ADD;
    }
}

/* ---- Layers in fp32 (--fp32-layers) ---- */

/* Returns the precision of a layer's GEMMs. */
static enum precision precision_of(const struct network *network, const struct layer *layer)
{
    return layer->fp32 && has_gemm(layer) ? PRECISION_FP32 : network->precision;
}

/* Returns whether the tensors of a layer are converted for its passes: the layer is in fp32, and tensors
 * between layers have 16 bits. */
static bool is_wide(const struct network *network, const struct layer *layer)
{
    return stored_bytes(precision_of(network, layer)) != stored_bytes(network->precision);
}

/* Returns such a layer with its tensors in network->wide. As elsewhere, gradients have the memory of their
 * tensors. The last layer has its outputs, and then their gradients, in `logits`: they are never rounded. */
static struct device_layer widened(const struct network *network, const struct device_layer *self)
{
    struct device_layer own = *self;
    own.in = network->wide.in;
    own.in_delta = self->in_delta ? network->wide.in : nullptr;
    own.out = own.out_delta = self->logits ? self->logits : network->wide.out;
    own.in_last = own.out_last = false;
    return own;
}

/* ---- The order of axes ---- */

/* Returns whether a layer needs the gradient of its input: the network's input needs none, except in a
 * pipeline stage after the first. */
static bool has_in_delta(const struct train *train, uint32_t i)
{
    return i > 0 || (train->stage && !train->stage->first);
}

/* Two tensors get the same order of axes. Returns whether that changed one of them. */
static bool agree(bool *one, bool *other)
{
    const bool differ = *one != *other;
    *one = *other = *one && *other;
    return differ;
}

/* Applies the restrictions of layer i to last[i], its input, and last[i + 1], its output. Returns whether
 * that changed a tensor. */
static bool restrict_order(const struct network *network, uint32_t i, bool *last)
{
    const struct train *train = network->train;
    const struct layer_spec *spec = &train->model->layers[i].spec;
    bool *in = &last[i], *out = &last[i + 1], none = false;
    if (is_wide(network, &train->model->layers[i])) /* the conversions change the order */
        return false;
    if (spec->kind == LAYER_LINEAR) /* its weights are in C order */
        return agree(in, &none);
    if (spec->kind == LAYER_CONV && has_in_delta(train, i) && !*in)
        return agree(out, &none); /* layer_gemm.cuh reads windows over the gradients at adjacent positions */
    const bool changed = (in_place(&train->model->layers[i]) || spec->kind == LAYER_ADD) && agree(in, out);
    return spec->kind == LAYER_ADD ? agree(out - spec->back, out) || changed : changed;
}

/* In 16 bits, tensors with a multiple of 8 channels are channels last where possible, for packed_conv.cu. */
static void choose_orders(struct network *network)
{
    const struct model *model = network->train->model;
    bool last[1 + MODEL_LAYERS_MAX], changed = true;
    for (uint32_t i = 0; i <= model->layer_count; i++)
        last[i] = stored_bytes(network->precision) < sizeof(float) &&
                  (i > 0 ? model->layers[i - 1].out : model->input).channels % 8 == 0;
    while (changed) {
        changed = false;
        for (uint32_t i = 0; i < model->layer_count; i++)
            changed |= restrict_order(network, i, last);
    }
    for (uint32_t i = 0; i < model->layer_count; i++) {
        network->layers[i].in_last = last[i];
        network->layers[i].out_last = last[i + 1];
    }
}

/* ---- Memory of tensors ---- */

/* Returns whether the gradient of the output of layer i (of the input of the network: -1) may overwrite this
 * output. The next layer that does not run in place stores the gradient. Before, or at the same element, it
 * reads the tensor for the gradient of its weights and for the mask of a ReLU. No later layer of the backward
 * pass reads the tensor, unless a ReLU has a pass of its own, or gradients of weights are computed later.
 * cuDNN masks gradients after it has stored them. */
static bool overwrites(const struct network *network, int64_t i)
{
    const struct train *train = network->train;
    if (network->passes[LAYER_CONV].forward != own_passes[LAYER_CONV].forward ||
        (train->stage && train->stage->splits))
        return false;
    while (++i < train->model->layer_count && in_place(&train->model->layers[i]))
        if (train->model->layers[i].spec.kind == LAYER_RELU && !network->layers[i].backward_done)
            return false;
    return true;
}

/* Opens the output of layer i (-1: the input of the network) and, when training, its gradient. */
static enum status open_tensor(struct network *network, int64_t i, size_t sample_values)
{
    struct device_layer *self = &network->slot->all[1 + i];
    const size_t bytes = network->capacity * sample_values * stored_bytes(network->precision);
    TRY(allocate_bytes(&network->allocations, &self->out, bytes));
    if (network->train->forward_only || !has_in_delta(network->train, (uint32_t)(1 + i)))
        return STATUS_OK;
    if (!overwrites(network, i))
        return allocate_bytes(&network->allocations, &self->out_delta, bytes);
    self->out_delta = self->out;
    return STATUS_OK;
}

/* `prepare` of a layer with a GEMM has its results in the windows, or in the state of cuDNN, which never
 * stores 16 bits. */
static enum status prepare_layer(struct network *network, struct device_layer *self)
{
    const struct layer_passes *by = &network->passes[self->layer->spec.kind];
    const enum precision precision = precision_of(network, self->layer);
    if (!by->prepare)
        return STATUS_OK;
    if (!is_wide(network, self->layer))
        return by->prepare(self, precision, network->capacity, &network->allocations, network->stream);
    struct device_layer own = widened(network, self);
    TRY(by->prepare(&own, precision, network->capacity, &network->allocations, network->stream));
    self->forward = own.forward;
    self->backward = own.backward;
    return STATUS_OK;
}

/* Opens layer i; the layers before it must be open. */
static enum status open_layer(struct network *network, uint32_t i)
{
    struct device_layer *self = &network->layers[i];
    const struct device_layer *before = self - 1;
    self->in = before->out;
    self->in_delta = before->out_delta;
    self->measures = network->train->cudnn_benchmark && !allocations_plan(&network->allocations);
    if (in_place(self->layer)) {
        self->out = self->in;
        self->out_delta = self->in_delta;
    } else
        TRY(open_tensor(network, i, self->layer->out_values));
    if (self->layer->spec.kind == LAYER_ADD)
        self->added = self - self->layer->spec.back;
    return prepare_layer(network, self);
}

/* The logits of the last layer are in fp32. */
static enum status open_logits(struct network *network)
{
    const struct train *train = network->train;
    struct device_layer *last = network_last_layer(network);
    if (train->stage && !train->stage->last)
        return STATUS_OK;
    if (stored_bytes(network->precision) < sizeof(float))
        return allocate(&network->allocations, &last->logits, network->capacity * last->layer->out_values);
    last->logits = static_cast<float *>(last->out);
    return STATUS_OK;
}

/* ---- Slots ---- */

/* Describes the input of the network as the output of a layer, for additions that use it. */
static enum status open_input(struct network *network)
{
    const struct model *model = network->train->model;
    network->input = {};
    network->input.out = model->input;
    network->input.out_values = model->input_values;
    for (uint32_t i = 0; i < model->layer_count; i++)
        network->input.is_added |= model->layers[i].spec.kind == LAYER_ADD && model->layers[i].spec.back > i;
    network->slot->all[0].layer = &network->input;
    return open_tensor(network, -1, model->input_values);
}

/* Opens the memory of the current slot. */
static enum status open_slot(struct network *network)
{
    const struct train *train = network->train;
    const uint32_t layers = train->model->layer_count;
    TRY(device_batch_allocate(train, network->capacity, &network->slot->batch, &network->allocations));
    for (uint32_t i = 0; i < layers; i++)
        network->layers[i].layer = &train->model->layers[i];
    share_relus(network);
    choose_orders(network);
    TRY(open_input(network));
    for (uint32_t i = 0; i < layers; i++)
        TRY(open_layer(network, i));
    return open_logits(network);
}

/* Makes slot `number` and its batch the current ones. */
static void network_choose(struct network *network, uint32_t number)
{
    network->slot = &network->slots[number];
    network->layers = network->slot->all + 1;
    network->batch = &network->slot->batch;
}

static enum status open_slots(struct network *network)
{
    const struct stage *stage = network->train->stage;
    const uint32_t count = stage ? stage->slots : 1;
    network->slots = static_cast<struct network_slot *>(calloc(count, sizeof *network->slots));
    TRY(ALLOCATED(network->slots, "cuda: out of memory"));
    network->slot_count = count;
    network->allocations.part = MEMORY_ACTIVATIONS;
    for (uint32_t i = count; i-- > 0;) { /* ends with slot 0 as the current one */
        network_choose(network, i);
        TRY(open_slot(network));
    }
    return STATUS_OK;
}

/* ---- The network ---- */

static enum status open_staging(struct network *network)
{
    const struct train *train = network->train;
    const struct model *model = train->model;
    const size_t in = model->input_values, out = model->layers[model->layer_count - 1].out_values;
    const size_t values = network->capacity * (train->stage && !train->stage->last && out > in ? out : in);
    if (stored_bytes(network->precision) == sizeof(float))
        return STATUS_OK;
    network->staging = network->workspace;
    return values <= WORKSPACE_VALUES ? STATUS_OK
                                      : allocate(&network->allocations, &network->staging, values);
}

static enum status open_wide(struct network *network)
{
    const struct model *model = network->train->model;
    size_t in = 0, out = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (is_wide(network, &model->layers[i])) {
            in = model->layers[i].in_values > in ? model->layers[i].in_values : in;
            out = model->layers[i].out_values > out ? model->layers[i].out_values : out;
        }
    if (in == 0)
        return STATUS_OK;
    TRY(allocate(&network->allocations, &network->wide.in, network->capacity * in));
    return allocate(&network->allocations, &network->wide.out, network->capacity * out);
}

static enum status open_learning(struct network *network)
{
    const struct train *train = network->train;
    network->allocations.part = MEMORY_GRADIENTS;
    if (train->stage || train_parts(train) > 1)
        TRY(allocate_zeros(&network->allocations, &network->added, train->model->arena_values,
                           network->stream));
    if (network->precision == PRECISION_FP16)
        TRY(scaling_open(train->model, &network->allocations, &network->losses.scale, network->stream));
    network->tensors.tensor_cores = network->precision != PRECISION_FP32;
    return device_engine_open_learning(network);
}

/* Opens a state that device_engine_new() has created. The caller has set `precision` and `passes`. The caller
 * calls network_close(), even after a failure. */
static enum status network_open(struct network *network)
{
    const struct train *train = network->train;
    TRY(device_probe(network->device));
    TRY(check_size(network));
    TRY(device_engine_open(network));
    network->allocations.part = MEMORY_PARAMETERS;
    TRY(allocate_zeros(&network->allocations, &network->state.parameters, train->model->arena_values,
                       network->stream));
    network->allocations.part = MEMORY_WORKSPACE;
    TRY(allocate(&network->allocations, &network->workspace, WORKSPACE_VALUES));
    TRY(open_staging(network));
    TRY(open_wide(network));
    TRY(device_engine_open_data(network));
    if (!train->forward_only)
        TRY(open_learning(network));
    TRY(open_slots(network));
    return CUDA_STATUS(cudaStreamSynchronize(network->stream));
}

/* Releases the resources, other than device memory, of the current slot's layers. */
static void release_slot(struct network *network)
{
    for (uint32_t i = 0; i < network->train->model->layer_count; i++)
        if (network->passes[network->train->model->layers[i].spec.kind].release)
            network->passes[network->train->model->layers[i].spec.kind].release(&network->layers[i]);
}

static void network_close(void *state)
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

/* ---- Passes ---- */

/* Returns the pass over the samples of the current slot. */
static struct pass network_pass(const struct network *network, const struct share *share, bool training,
                                uint32_t epoch)
{
    return {.stream = network->stream,
            .count = (uint32_t)share->count,
            .total = (uint32_t)share->total,
            .training = training,
            .precision = network->precision,
            .seed = network->train->seed,
            .epoch = epoch,
            .numbers = network->batch->numbers,
            .parameters = network->state.parameters,
            .gradients = network->gradients,
            .workspace = network->workspace,
            .of = GRADIENTS_OF_BOTH};
}

/* Copies `values` floats between host and device memory, or in device memory. */
static enum status copy(const struct network *network, float *to, const float *from, size_t values)
{
    return CUDA_STATUS(cudaMemcpyAsync(to, from, values * sizeof *to, cudaMemcpyDefault, network->stream));
}

/* Copies fp32 values in C order, which may be in memory of the host or of another device, to a stored tensor
 * of `count` samples. */
static enum status put_tensor(const struct network *network, const struct shape *shape, bool last,
                              uint32_t count, const float *from, void *to)
{
    if (!network->staging)
        return copy(network, static_cast<float *>(to), from, count * shape_values(shape));
    if (from != network->staging)
        TRY(copy(network, network->staging, from, count * shape_values(shape)));
    return stored_from(network->precision, shape, last, count, network->staging, to, network->stream);
}

/* Copies a stored tensor of `count` samples, as fp32 values in C order, to memory of the host or a device. */
static enum status get_tensor(const struct network *network, const struct shape *shape, bool last,
                              uint32_t count, const void *from, float *to)
{
    if (!network->staging)
        return copy(network, to, static_cast<const float *>(from), count * shape_values(shape));
    TRY(stored_into(network->precision, shape, last, count, from, network->staging, network->stream));
    return copy(network, to, network->staging, count * shape_values(shape));
}

/* Gathers the inputs of the `count` samples in network->batch. */
static enum status gather_inputs(struct network *network, const struct device_set *set, uint32_t count)
{
    const struct train *train = network->train;
    void *inputs = network->slot->all[0].out;
    float *values = network->staging ? network->staging : static_cast<float *>(inputs);
    TRY(batch_gather(train->data, set, network->batch, count, values, network->stream));
    return network->staging
               ? put_tensor(network, &train->model->input, network->layers[0].in_last, count, values, inputs)
               : STATUS_OK;
}

/* Returns the pass of a layer. */
static struct pass pass_of(const struct network *network, const struct layer *layer, const struct pass *pass)
{
    struct pass own = *pass;
    own.precision = precision_of(network, layer);
    return own;
}

static enum status forward_layer(const struct network *network, const struct device_layer *self,
                                 const struct pass *pass)
{
    const struct layer *layer = self->layer;
    const struct layer_passes *by = &network->passes[layer->spec.kind];
    const struct pass own_pass = pass_of(network, layer, pass);
    if (!is_wide(network, layer))
        return by->forward(self, &own_pass);
    const struct device_layer own = widened(network, self);
    TRY(stored_into(pass->precision, &layer->in, self->in_last, pass->count, self->in, network->wide.in,
                    pass->stream));
    TRY(by->forward(&own, &own_pass));
    return self->logits ? STATUS_OK
                        : stored_from(pass->precision, &layer->out, self->out_last, pass->count,
                                      network->wide.out, self->out, pass->stream);
}

/* The input is converted before its gradient may overwrite it. */
static enum status backward_layer(const struct network *network, const struct device_layer *self,
                                  const struct pass *pass)
{
    const struct layer *layer = self->layer;
    const struct layer_passes *by = &network->passes[layer->spec.kind];
    const struct pass own_pass = pass_of(network, layer, pass);
    if (!is_wide(network, layer))
        return by->backward(self, &own_pass);
    const struct device_layer own = widened(network, self);
    TRY(stored_into(pass->precision, &layer->in, self->in_last, pass->count, self->in, network->wide.in,
                    pass->stream));
    if (!self->logits)
        TRY(stored_into(pass->precision, &layer->out, self->out_last, pass->count, self->out_delta,
                        network->wide.out, pass->stream));
    TRY(by->backward(&own, &own_pass));
    return self->in_delta && pass->of & GRADIENTS_OF_INPUTS
               ? stored_from(pass->precision, &layer->in, self->in_last, pass->count, network->wide.in,
                             self->in_delta, pass->stream)
               : STATUS_OK;
}

/* Afterwards, the logits of the last layer are complete. */
static enum status network_forward(struct network *network, const struct pass *pass)
{
    const struct device_layer *last = network_last_layer(network);
    for (uint32_t i = 0; i < network->train->model->layer_count; i++)
        TRY(forward_layer(network, &network->layers[i], pass));
    return last->logits && last->logits != last->out && last->layer->spec.kind != LAYER_LINEAR &&
                   !is_wide(network, last->layer)
               ? stored_into(pass->precision, &last->layer->out, last->out_last, pass->count, last->out,
                             last->logits, pass->stream)
               : STATUS_OK;
}

/* Computes the loss and the gradient of the logits. In 16 bits, the logits make room for their gradient in
 * fp32, which is then rounded, unless the last layer is in fp32: backward_layer() takes it from there. */
static enum status network_loss(struct network *network, const struct pass *pass, uint64_t step)
{
    const struct device_layer *last = network_last_layer(network);
    float *deltas = network->staging ? last->logits : static_cast<float *>(last->out_delta);
    TRY(loss_take(network->train, last->logits, network->batch, pass, step, deltas, &network->losses));
    return network->staging && !is_wide(network, last->layer)
               ? stored_from(pass->precision, &last->layer->out, last->out_last, pass->count, deltas,
                             last->out_delta, pass->stream)
               : STATUS_OK;
}

/* Runs the backward pass of one layer. The backward passes of all later layers must have run before. Each
 * layer overwrites the gradient of its input. If later LAYER_ADD layers also use that input, their
 * backward passes have already run. Their contributions to the gradient are added after the overwrite. If the
 * layer applies the mask of a ReLU, its own values are masked as it stores them, and the contributions
 * before, as long as the outputs of the ReLU exist. */
static enum status network_backward_layer(struct network *network, const struct device_layer *self,
                                          const struct pass *pass)
{
    const struct device_layer *before = self - 1, *end = network_last_layer(network) + 1;
    const uint32_t count = pass->count * (uint32_t)self->layer->in_values;
    const bool shared = self->in_delta && before->layer->is_added;
    if (shared && self->relu_before)
        TRY(visit_adds(before, end, [&](const struct device_layer *add) {
            return relu_mask(pass, self->in, add->out_delta, count);
        }));
    TRY(backward_layer(network, self, pass));
    return shared ? visit_adds(before, end,
                               [&](const struct device_layer *add) {
                                   return stored_add(pass, add->out_delta, count, self->in_delta);
                               })
                  : STATUS_OK;
}

/* Runs the backward pass of all layers. If the step has one part, also exchanges the gradients. A rank
 * without samples in this step contributes zeros. */
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
            TRY(device_engine_exchange(network, i, i + 1, &end, network->stream));
    }
    return exchanges ? device_engine_exchange_end(network) : STATUS_OK;
}

/* ---- Steps ---- */

static enum status gather(struct device_engine *engine, const struct device_set *set, uint32_t, bool,
                          uint32_t count)
{
    return gather_inputs(static_cast<struct network *>(engine), set, count);
}

/* Computes the gradients of the current batch. If the step has one part, adds up the gradients of all
 * ranks. */
static enum status compute_gradients(struct network *network, const struct pass *pass, uint64_t number)
{
    if (pass->count > 0) {
        RANGE(FORWARD);
        TRY(network_forward(network, pass));
        TRY(network_loss(network, pass, number));
    }
    return backward(network, pass);
}

/* The kernels overwrite gradients, so those of parts after the first are computed in network->added. */
static enum status learn_part(struct device_engine *engine, uint32_t epoch, uint32_t step,
                              const struct share *part, uint32_t index)
{
    struct network *network = static_cast<struct network *>(engine);
    const struct train *train = network->train;
    struct pass pass = network_pass(network, part, true, epoch);
    pass.gradients = index > 0 ? network->added : network->gradients;
    TRY(compute_gradients(network, &pass, (uint64_t)epoch * train_steps(train) + step));
    return index > 0
               ? values_add(network->added, train->model->arena_values, network->gradients, network->stream)
               : STATUS_OK;
}

static enum status infer(struct device_engine *engine, uint32_t count, const float **logits)
{
    struct network *network = static_cast<struct network *>(engine);
    const struct share share = {.first = 0, .count = count, .total = count};
    const struct pass pass = network_pass(network, &share, false, 0);
    *logits = network_last_layer(network)->logits;
    return network_forward(network, &pass);
}

/* ---- A stage of a pipeline ---- */

/* Makes the slot of a micro-batch the current one, and returns the pass over its samples. */
static struct pass choose(struct network *network, const struct micro *micro)
{
    const struct share share = {.first = 0, .count = micro->count, .total = micro->total};
    network_choose(network, micro->slot);
    return network_pass(network, &share, micro->training, micro->epoch);
}

static enum status finish(const struct network *network)
{
    return CUDA_STATUS(cudaStreamSynchronize(network->stream));
}

static enum status stage_forward(void *state, const struct micro *micro, const void *inputs, void *outputs)
{
    struct network *network = network_of(state);
    CUDA_TRY(cudaSetDevice(network->device));
    const struct pass pass = choose(network, micro);
    const struct device_layer *last = network_last_layer(network);
    RANGE(FORWARD);
    TRY(device_stage_take(network, micro));
    if (inputs)
        TRY(put_tensor(network, &network->train->model->input, network->layers[0].in_last, micro->count,
                       static_cast<const float *>(inputs), network->slot->all[0].out));
    TRY(network_forward(network, &pass));
    if (outputs && last->logits)
        TRY(copy(network, static_cast<float *>(outputs), last->logits,
                 micro->count * last->layer->out_values));
    else if (outputs)
        TRY(get_tensor(network, &last->layer->out, last->out_last, micro->count, last->out,
                       static_cast<float *>(outputs)));
    else
        TRY(network_loss(network, &pass, micro->step));
    return finish(network);
}

static enum status stage_gradients(struct network *network, const struct pass *pass)
{
    for (uint32_t i = network->train->model->layer_count; i-- > 0;) {
        const struct device_layer *self = &network->layers[i];
        if (pass->of & GRADIENTS_OF_INPUTS)
            TRY(network_backward_layer(network, self, pass));
        else if (self->layer->weight_values > 0)
            TRY(backward_layer(network, self, pass));
    }
    return STATUS_OK;
}

/* The kernels overwrite the gradients of the weights. For all micro-batches but the first, they therefore
 * write to network->added, whose values are then added to network->gradients. */
static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of of,
                                  const void *deltas, void *in_deltas)
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
        TRY(put_tensor(network, &last->layer->out, last->out_last, micro->count,
                       static_cast<const float *>(deltas), last->out_delta));
    TRY(stage_gradients(network, &pass));
    if (adds)
        TRY(values_add(network->added, model->arena_values, network->gradients, network->stream));
    if (in_deltas)
        TRY(get_tensor(network, &model->input, network->layers[0].in_last, micro->count,
                       network->slot->all[0].out_delta, static_cast<float *>(in_deltas)));
    return finish(network);
}

static constexpr struct stage_functions cuda_stages =
    device_stage_functions(sizeof(float), stage_forward, stage_backward);

/* ---- The engines ---- */

static const struct device_engine_functions functions = {
    .gather = gather, .learn_part = learn_part, .update = device_engine_update, .infer = infer};

/* Opens a network whose convolutions are computed by CONV, and whose GEMMs have PRECISION. */
template <const struct layer_passes *CONV, enum precision PRECISION>
static enum status cuda_open(const struct train *train, const struct resources *resources, void **state)
{
    TRY(device_engine_new<struct network>(train, resources, &functions, state));
    struct network *network = network_of(*state);
    network->precision = PRECISION;
    memcpy(network->passes, own_passes, sizeof network->passes);
    network->passes[LAYER_CONV] = *CONV;
    return network_open(network);
}

static enum status cuda_accepts(const struct train *train)
{
    TRY(model_refuse_batch_norm(train->model));
    return model_refuse_transformer(train->model);
}

static enum fp32_layer keeps_fp32(const struct layer *layer)
{
    return has_gemm(layer) ? FP32_CHOSEN : FP32_ALWAYS;
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
    struct engine engine = device_engine_table(name, bounds, PRECISION == PRECISION_FP16);
    engine.benchmarks = engine.savings.convolutions = CONV != OWN_CONV;
    engine.gradients_in = GRADIENTS_IN_DEVICE;
    engine.unit = UNIT;
    engine.accepts = cuda_accepts;
    engine.keeps_fp32 = PRECISION == PRECISION_FP32 ? nullptr : keeps_fp32;
    engine.stages = CONV == OWN_CONV ? &cuda_stages : nullptr;
    engine.open = cuda_open<CONV, PRECISION>;
    engine.close = network_close;
    return engine;
}

/* docs/notes/engines.md explains the bounds. */
extern "C" {
const struct engine engine_cuda = engine_of<OWN_CONV, PRECISION_FP32>("cuda", ENGINE_BOUNDS_FLOAT);
const struct engine engine_tf32 = engine_of<OWN_CONV, PRECISION_TF32>("tf32", ENGINE_BOUNDS_TF32);
const struct engine engine_bf16 = engine_of<OWN_CONV, PRECISION_BF16>("bf16", ENGINE_BOUNDS_BF16);
const struct engine engine_amp = engine_of<OWN_CONV, PRECISION_FP16>("amp", ENGINE_BOUNDS_TF32);

#ifdef HAVE_CUDNN
const struct engine engine_cudnn = engine_of<&cudnn_conv_fp32, PRECISION_FP32>("cudnn", ENGINE_BOUNDS_FLOAT);
const struct engine engine_cudnn_tf32 =
    engine_of<&cudnn_conv_tf32, PRECISION_FP32, UNIT_TF32>("cudnn-tf32", ENGINE_BOUNDS_TF32);
#endif
}

/* ---- Variants ---- */

extern "C" {
extern const struct variant variant_train_cuda, variant_train_tf32, variant_train_bf16, variant_train_amp;
extern const struct variant variant_infer_cuda, variant_infer_tf32, variant_infer_bf16;
const struct variant variant_train_cuda = training_by<&engine_cuda>();
const struct variant variant_train_tf32 = training_by<&engine_tf32>();
const struct variant variant_train_bf16 = training_by<&engine_bf16>();
const struct variant variant_train_amp = training_by<&engine_amp>();
const struct variant variant_infer_cuda = inferring_by<&engine_cuda>();
const struct variant variant_infer_tf32 = inferring_by<&engine_tf32>();
const struct variant variant_infer_bf16 = inferring_by<&engine_bf16>();
}

#ifdef HAVE_CUDNN
static enum status probe_cudnn(const struct resources *resources)
{
    TRY(cudnn_probe());
    return device_probe(resources->device);
}

extern "C" {
extern const struct variant variant_train_cudnn, variant_train_cudnn_tf32;
const struct variant variant_train_cudnn = training_by<&engine_cudnn>(false, probe_cudnn);
const struct variant variant_train_cudnn_tf32 = training_by<&engine_cudnn_tf32>(false, probe_cudnn);
}
#endif
