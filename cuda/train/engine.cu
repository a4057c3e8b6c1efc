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
    float *inputs;
    struct device_batch batch;
    /* all[0] describes the input; all[1 + i] describes layer i. */
    struct device_layer all[1 + MODEL_LAYERS_MAX];
};

struct network : device_engine {
    enum precision precision;
    float *workspace;
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

/* Returns the precision of a layer's GEMMs (--fp32-layers). */
static enum precision precision_of(const struct layer *layer, enum precision precision)
{
    return layer->fp32 ? PRECISION_FP32 : precision;
}

/* Returns the pass of a layer. */
static struct pass pass_of(const struct layer *layer, const struct pass *pass)
{
    struct pass own = *pass;
    own.precision = precision_of(layer, pass->precision);
    return own;
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
    return by->prepare ? by->prepare(self, precision_of(layer, network->precision), batch,
                                     &network->allocations, network->stream)
                       : STATUS_OK;
}

/* ---- Slots ---- */

/* Describes the input of the network as the output of a layer, for additions that use it. The input needs a
 * gradient only in a pipeline stage after the first. */
static enum status open_input(struct network *network)
{
    const struct model *model = network->train->model;
    const struct stage *stage = network->train->stage;
    struct network_slot *slot = network->slot;
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
    for (uint32_t i = 1; i < layers; i++)
        share_relu(&network->layers[i - 1], &network->layers[i],
                   i + 1 < layers ? &network->layers[i + 1] : nullptr);
    return STATUS_OK;
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
    TRY(allocate_zeros(&network->allocations, &network->state.parameters, train->model->arena_values,
                       network->stream));
    TRY(allocate(&network->allocations, &network->workspace, WORKSPACE_VALUES));
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

static struct device_layer *network_last_layer(const struct network *network)
{
    return &network->layers[network->train->model->layer_count - 1];
}

static enum status network_forward(struct network *network, const struct pass *pass)
{
    for (uint32_t i = 0; i < network->train->model->layer_count; i++) {
        const struct device_layer *self = &network->layers[i];
        const struct pass own = pass_of(self->layer, pass);
        TRY(network->passes[self->layer->spec.kind].forward(self, &own));
    }
    return STATUS_OK;
}

/* Runs the backward pass of one layer. The backward passes of all later layers must have run before. Each
 * layer overwrites the gradient of its input. If later LAYER_ADD layers also use that input, their
 * backward passes have already run. Their contributions to the gradient are added after the overwrite. */
static enum status network_backward_layer(struct network *network, const struct device_layer *self,
                                          const struct pass *pass)
{
    bool shared = self->in_delta && self[-1].layer->is_added;
    if (shared && self->layer->spec.kind == LAYER_POOL) /* pooling writes nothing outside its windows */
        CUDA_TRY(cudaMemsetAsync(
            self->in_delta, 0, pass->count * self->layer->in_values * sizeof *self->in_delta, pass->stream));
    const struct pass own = pass_of(self->layer, pass);
    TRY(network->passes[self->layer->spec.kind].backward(self, &own));
    return shared ? added_backward(self - 1, network_last_layer(network) + 1, pass) : STATUS_OK;
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
            TRY(device_engine_exchange(network, i, i + 1, &end));
    }
    return exchanges ? device_engine_exchange_end(network) : STATUS_OK;
}

/* ---- Steps ---- */

static enum status gather(struct device_engine *engine, const struct device_set *set, uint32_t, bool,
                          uint32_t count)
{
    float *inputs = static_cast<struct network *>(engine)->slot->inputs;
    return batch_gather(engine->train->data, set, engine->batch, count, inputs, engine->stream);
}

/* Computes the gradients of the current batch. If the step has one part, adds up the gradients of all
 * ranks. */
static enum status compute_gradients(struct network *network, const struct pass *pass, uint64_t number)
{
    const struct device_layer *last = network_last_layer(network);
    if (pass->count > 0) {
        RANGE(FORWARD);
        TRY(network_forward(network, pass));
        TRY(loss_take(network->train, last->out, network->batch, pass, number, last->out_delta,
                      &network->losses));
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
    *logits = network_last_layer(network)->out;
    return network_forward(network, &pass);
}

/* ---- A stage of a pipeline ---- */

/* Every function of struct stage_functions waits for its kernels, because the caller then sends the results
 * to another rank, and measures how long the stage works. */

static enum status copy(const struct network *network, float *to, const float *from, size_t values)
{
    return CUDA_STATUS(cudaMemcpyAsync(to, from, values * sizeof *to, cudaMemcpyDefault, network->stream));
}

static enum status finish(const struct network *network)
{
    return CUDA_STATUS(cudaStreamSynchronize(network->stream));
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
    struct network_slot *slot = network->slot;
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

static enum status stage_gradients(struct network *network, const struct pass *pass)
{
    for (uint32_t i = network->train->model->layer_count; i-- > 0;) {
        const struct device_layer *self = &network->layers[i];
        if (pass->of & GRADIENTS_OF_INPUTS)
            TRY(network_backward_layer(network, self, pass));
        else if (self->layer->weight_values > 0) {
            const struct pass own = pass_of(self->layer, pass);
            TRY(network->passes[self->layer->spec.kind].backward(self, &own));
        }
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
    TRY(stage_gradients(network, &pass));
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
    TRY(device_engine_update(network, &update));
    TRY(device_progress_step(&network->progress, network->losses.totals, 1, network->stream));
    return finish(network);
}

static enum status stage_pin(void *memory, size_t bytes)
{
    return CUDA_STATUS(cudaHostRegister(memory, bytes, cudaHostRegisterDefault));
}

static void stage_unpin(void *memory)
{
    (void)cudaHostUnregister(memory); /* nothing depends on an error here */
}

static const struct stage_functions cuda_stages = {.live = false,
                                                   .forward = stage_forward,
                                                   .backward = stage_backward,
                                                   .update = stage_update,
                                                   .pin = stage_pin,
                                                   .unpin = stage_unpin};

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
            .keeps_fp32 = PRECISION == PRECISION_FP32 ? nullptr : keeps_fp32,
            .stages = CONV == OWN_CONV && PRECISION != PRECISION_FP16 ? &cuda_stages : nullptr,
            .open = cuda_open<CONV, PRECISION>,
            .close = network_close,
            .set = device_engine_set,
            .get = device_engine_get,
            .steps = device_engine_steps,
            .totals = device_engine_totals,
            .progress = device_engine_progress,
            .gradients = device_engine_gradients,
            .overflows = PRECISION == PRECISION_FP16 ? device_engine_overflows : nullptr,
            .evaluate = device_engine_evaluate,
            .memory_bytes = device_engine_memory_bytes};
}

/* docs/train_mixed.md explains the bounds. */
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
