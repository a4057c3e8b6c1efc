/* The engine of three groups of variants: fp32 (`train-cuda`, `infer-cuda`); other precisions (`train-tf32`,
 * `infer-tf32`, `train-bf16`, `infer-bf16`, `train-amp`); and convolutions by cuDNN (`train-cudnn`,
 * `train-cudnn-tf32`). The test set, the training set (unless it is generated during training), parameters
 * and activations are in device memory. */
#include "train/engine.cuh"

#include <string.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "train/cudnn.cuh"
#include "train/engine_parts.cuh"

/* ---- Passes ---- */

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
            .numbers = network->batch->numbers,
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

/* With loss scaling, the device decides whether to apply the update. */
enum status network_update(struct device_engine *network, const struct update *update)
{
    const struct train *train = network->train;
    size_t values = train->model->arena_values;
    struct device_scale *scale = network->losses.scale;
    RANGE(UPDATE);
    if (scale)
        TRY(scaling_unscale(scale, values, network->gradients, network->stream));
    TRY(clip_find(&train->optimizer, values, network->gradients, scale, network->clip, network->losses.totals,
                  network->stream));
    TRY(parameters_update(update, values, network->gradients, scale, network->clip, &network->state,
                          network->stream));
    return scale ? scaling_step(scale, network->stream) : STATUS_OK;
}

static enum status infer(struct device_engine *engine, uint32_t count, const float **logits)
{
    struct network *network = static_cast<struct network *>(engine);
    const struct share share = {.first = 0, .count = count, .total = count};
    const struct pass pass = network_pass(network, &share, false, 0);
    *logits = network_last_layer(network)->out;
    return network_forward(network, &pass);
}

/* ---- The engines ---- */

static const struct layer_passes own_passes[LAYER_KINDS] = {
    /* LAYER_CONV */ {conv_prepare, conv_forward, conv_backward, nullptr},
    /* LAYER_RELU */ {nullptr, relu_forward, relu_backward, nullptr},
    /* LAYER_POOL */ {nullptr, pool_forward, pool_backward, nullptr},
    /* LAYER_DROPOUT */ {nullptr, dropout_forward, dropout_backward, nullptr},
    /* LAYER_LINEAR */ {nullptr, linear_forward, linear_backward, nullptr},
    /* LAYER_ADD */ {nullptr, add_forward, add_backward, nullptr},
    /* LAYER_MEAN */ {nullptr, mean_forward, mean_backward, nullptr},
};

static const struct device_engine_functions functions = {
    .gather = gather, .learn_part = learn_part, .update = network_update, .infer = infer};

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

struct engine_batch engine_batch(const void *state)
{
    const struct device_engine *engine = static_cast<const struct device_engine *>(state);
    const struct device_set *set = &engine->sets[DATA_TRAIN];
    return {engine->stream, const_cast<void *>(set->values), const_cast<uint32_t *>(set->labels),
            engine->losses.totals};
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
            .close = network_close,
            .set = device_engine_set,
            .get = device_engine_get,
            .steps = device_engine_steps,
            .totals = device_engine_totals,
            .progress = device_engine_progress,
            .gradients = device_engine_gradients,
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
