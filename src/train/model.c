#include "train/model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/draws.h"

#define VALUES_MAX (UINT64_C(1) << 31) /* limit for a layer's output and for its weights */

/* ---- The models ---- */

/* CONV and POOL are for images and have square kernels. CONV3D and POOL3D are for volumes and have cubic
 * kernels. */
#define CONV(out, size, pad)                                                                         \
    {                                                                                                \
        .kind = LAYER_CONV, .channels = (out), .kernel = {1, size, size}, .padding = { 0, pad, pad } \
    }
#define CONV3D(out, size, pad)                                                                            \
    {                                                                                                     \
        .kind = LAYER_CONV, .channels = (out), .kernel = {size, size, size}, .padding = { pad, pad, pad } \
    }
#define POOL(size)                                      \
    {                                                   \
        .kind = LAYER_POOL, .kernel = { 1, size, size } \
    }
#define POOL3D(size)                                       \
    {                                                      \
        .kind = LAYER_POOL, .kernel = { size, size, size } \
    }
#define RELU               \
    {                      \
        .kind = LAYER_RELU \
    }
#define DROPOUT(share)                         \
    {                                          \
        .kind = LAYER_DROPOUT, .rate = (share) \
    }
#define LINEAR(out)                             \
    {                                           \
        .kind = LAYER_LINEAR, .channels = (out) \
    }
#define ADD(layers)                         \
    {                                       \
        .kind = LAYER_ADD, .back = (layers) \
    }
#define MEAN               \
    {                      \
        .kind = LAYER_MEAN \
    }
#define CLASSES 0

static const struct layer_spec logreg[] = {LINEAR(CLASSES)};

/* LeCun et al., "Gradient-based learning applied to document recognition", 1998, with ReLU and
 * max-pooling. */
static const struct layer_spec lenet[] = {
    CONV(6, 5, 2), RELU,       POOL(2), CONV(16, 5, 0),  RELU, POOL(2), LINEAR(120),
    RELU,          LINEAR(84), RELU,    LINEAR(CLASSES),
};

/* The network of PyTorch's MNIST example: 1,199,882 parameters for 28 x 28 pixels and 10 classes. */
static const struct layer_spec cnn[] = {
    CONV(32, 3, 0), RELU,        CONV(64, 3, 0), RELU,          POOL(2),
    DROPOUT(0.25f), LINEAR(128), RELU,           DROPOUT(0.5f), LINEAR(CLASSES),
};

static const struct layer_spec cnn3d[] = {
    CONV3D(16, 3, 1), RELU,       POOL3D(2), CONV3D(32, 3, 1), RELU,
    POOL3D(2),        LINEAR(64), RELU,      DROPOUT(0.5f),    LINEAR(CLASSES),
};

/* STAGE: a convolution, then pooling that halves the image. BLOCK: a residual block of two convolutions (He
 * et al., "Deep residual learning for image recognition", 2016). */
#define STAGE(out) CONV(out, 3, 1), RELU, POOL(2)
#define BLOCK(out) CONV(out, 3, 1), RELU, CONV(out, 3, 1), ADD(4), RELU

/* Accepts images of any size from 8 x 8 up, because the mean reduces each channel to one number. The network
 * trains without normalisation layers, because it has only three convolutions without a shortcut around
 * them. */
static const struct layer_spec cnn_fdsl[] = {
    STAGE(32), BLOCK(32), STAGE(64), BLOCK(64), STAGE(128), BLOCK(128), MEAN, LINEAR(CLASSES),
};

/* Eight residual blocks of equal cost, for pipelines. */
static const struct layer_spec cnn_deep[] = {
    STAGE(32), BLOCK(32), BLOCK(32), BLOCK(32), BLOCK(32),       BLOCK(32),
    BLOCK(32), BLOCK(32), BLOCK(32), MEAN,      LINEAR(CLASSES),
};

#define NAMED(name, symbol, deep, text)            \
    {                                              \
        name, text, deep, symbol, COUNT_OF(symbol) \
    }
#define TABLE(symbol, deep, text) NAMED(#symbol, symbol, deep, text)
const struct model_table model_tables[] = {
    TABLE(logreg, false, "one linear layer"),
    TABLE(lenet, false, "two convolutions 5 x 5, three linear layers"),
    TABLE(cnn, false, "two convolutions 3 x 3, dropout, two linear layers: PyTorch's MNIST example"),
    TABLE(cnn3d, true, "two convolutions 3 x 3 x 3, two linear layers"),
    NAMED("cnn-fdsl", cnn_fdsl, false,
          "three residual blocks, global average pooling, one linear layer; images of any size"),
    NAMED("cnn-deep", cnn_deep, false,
          "eight equal residual blocks, global average pooling, one linear layer: for pipelines; images of "
          "any size"),
    {0},
};

const char *const model_names[] = {"logreg", "lenet", "cnn", "cnn3d", "cnn-fdsl", "cnn-deep", NULL};

/* ---- Shapes ---- */

static enum status too_small(const struct layer *layer)
{
    return status_set(
        STATUS_USAGE,
        "its %s gets an input of %" PRIu32 " x %" PRIu32 " x %" PRIu32
        " (depth, height, width), which is too small; use larger samples (for synth, raise --res) or "
        "another network",
        layer->name, layer->in.depth, layer->in.height, layer->in.width);
}

/* Returns the output length along an axis; 0 if the kernel does not fit. */
static uint32_t windows(const struct layer *layer, uint32_t length, int axis)
{
    uint32_t kernel = layer->spec.kernel[axis];
    if (layer->spec.kind == LAYER_POOL)
        return length / kernel;
    uint64_t padded = length + 2 * (uint64_t)layer->spec.padding[axis];
    return padded < kernel ? 0 : (uint32_t)(padded - kernel + 1);
}

static enum status find_output(struct layer *layer, uint32_t classes)
{
    const struct layer_spec *spec = &layer->spec;
    uint32_t channels = spec->channels ? spec->channels : classes;
    layer->out = layer->in;
    if (spec->kind == LAYER_LINEAR)
        layer->out = (struct shape){channels, 1, 1, 1};
    if (spec->kind == LAYER_MEAN)
        layer->out = (struct shape){layer->in.channels, 1, 1, 1};
    if (spec->kind == LAYER_CONV)
        layer->out.channels = channels;
    if (spec->kind == LAYER_CONV || spec->kind == LAYER_POOL) {
        layer->out.depth = windows(layer, layer->in.depth, 0);
        layer->out.height = windows(layer, layer->in.height, 1);
        layer->out.width = windows(layer, layer->in.width, 2);
        if (shape_values(&layer->out) == 0)
            return too_small(layer);
    }
    if (spec->kind == LAYER_DROPOUT && spec->rate * 256 != floorf(spec->rate * 256))
        return status_set(STATUS_FAILED, "%s: its rate is not a multiple of 1/256", layer->name);
    layer->in_values = shape_values(&layer->in);
    layer->out_values = shape_values(&layer->out);
    if (layer->out_values > VALUES_MAX)
        return status_set(STATUS_USAGE, "%s: its output would have more than 2^31 values", layer->name);
    return STATUS_OK;
}

/* Marks the earlier layer whose output the layer `add` uses. Checks that the addition is possible. */
static enum status join(struct model *model, const struct layer *add)
{
    uint32_t back = add->spec.back, from = add->number - back;
    if (back < 2 || back > add->number)
        return status_set(STATUS_FAILED, "%s: it does not add the output of an earlier layer", add->name);
    struct layer *other = &model->layers[from];
    enum layer_kind next = other[1].spec.kind;
    other->is_added = true;
    if (next == LAYER_RELU || next == LAYER_DROPOUT)
        return status_set(STATUS_FAILED, "%s: it adds the output of %s, which %s changes in place", add->name,
                          other->name, other[1].name);
    return memcmp(&other->out, &add->in, sizeof add->in) == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "%s: it adds the output of %s, which has another shape", add->name,
                            other->name);
}

/* ---- Parameters ---- */

/* Appends a tensor to the arena and returns its offset. */
static size_t add_tensor(struct model *model, const struct layer *layer, const char *what, size_t values,
                         uint32_t fan_in)
{
    struct model_tensor *tensor = &model->tensors[model->tensor_count];
    *tensor = (struct model_tensor){
        .first = model->arena_values, .values = values, .fan_in = fan_in, .stream = model->tensor_count};
    char name[sizeof tensor->name] = "";
    snprintf(name, sizeof name, "%s.%s", layer->name, what);
    memcpy(tensor->name, name, sizeof name);
    model->tensor_count++;
    model->parameters += values;
    model->arena_values += (values + MODEL_ALIGNMENT - 1) / MODEL_ALIGNMENT * MODEL_ALIGNMENT;
    return tensor->first;
}

/* Sets the axes of a weight tensor as in PyTorch. */
static void shape_weight(const struct model *model, const struct layer *layer, struct model_tensor *tensor)
{
    tensor->shape[tensor->axes++] = layer->out.channels;
    if (layer->spec.kind == LAYER_LINEAR) {
        tensor->shape[tensor->axes++] = layer->in_values;
        return;
    }
    tensor->shape[tensor->axes++] = layer->in.channels;
    for (int i = model->volumetric ? 0 : 1; i < MODEL_AXES; i++)
        tensor->shape[tensor->axes++] = layer->spec.kernel[i];
}

static enum status add_parameters(struct model *model, struct layer *layer)
{
    const struct layer_spec *spec = &layer->spec;
    if (spec->kind != LAYER_CONV && spec->kind != LAYER_LINEAR)
        return STATUS_OK;
    uint64_t fan_in = layer->in_values;
    if (spec->kind == LAYER_CONV)
        fan_in = (uint64_t)layer->in.channels * spec->kernel[0] * spec->kernel[1] * spec->kernel[2];
    layer->bias_values = layer->out.channels;
    if (fan_in > VALUES_MAX / layer->bias_values)
        return status_set(STATUS_USAGE, "%s: it would have more than 2^31 weights", layer->name);
    layer->weight_values = layer->bias_values * fan_in;
    layer->weight = add_tensor(model, layer, "weight", layer->weight_values, (uint32_t)fan_in);
    shape_weight(model, layer, &model->tensors[model->tensor_count - 1]);
    layer->bias = add_tensor(model, layer, "bias", layer->bias_values, (uint32_t)fan_in);
    struct model_tensor *bias = &model->tensors[model->tensor_count - 1];
    bias->shape[bias->axes++] = layer->bias_values;
    return STATUS_OK;
}

/* ---- FLOP counts ---- */

/* Returns the number of pairs (output position, kernel tap) along an axis that read inside the image. The
 * other pairs multiply by padding zeros, which does not count as work. */
static double inner_taps(const struct layer *layer, uint32_t in, uint32_t out, int axis)
{
    double taps = 0;
    for (uint32_t tap = 0; tap < layer->spec.kernel[axis]; tap++)
        for (uint32_t position = 0; position < out; position++)
            taps += position + tap >= layer->spec.padding[axis] &&
                    position + tap - layer->spec.padding[axis] < in;
    return taps;
}

/* Returns the number of multiply-adds of a layer's forward pass. */
static double products_of(const struct layer *layer)
{
    const struct shape *in = &layer->in, *out = &layer->out;
    if (layer->spec.kind == LAYER_LINEAR)
        return (double)layer->in_values * (double)layer->out_values;
    if (layer->spec.kind != LAYER_CONV)
        return 0;
    return (double)in->channels * out->channels * inner_taps(layer, in->depth, out->depth, 0) *
           inner_taps(layer, in->height, out->height, 1) * inner_taps(layer, in->width, out->width, 2);
}

/* Returns whether layer i is a convolution followed by pooling, with at most ReLU between them, and no
 * addition uses the outputs before the pooling. Such a convolution has at most one non-zero output gradient
 * per pooling window. */
static bool is_pooled(const struct model *model, uint32_t i)
{
    if (model->layers[i].spec.kind != LAYER_CONV)
        return false;
    bool is_added = false; /* if an addition also uses an output, all gradients may be non-zero */
    do
        is_added |= model->layers[i].is_added;
    while (++i < model->layer_count && model->layers[i].spec.kind == LAYER_RELU);
    return i < model->layer_count && model->layers[i].spec.kind == LAYER_POOL && !is_added;
}

double model_flops(const struct model *model, const struct model_savings *savings)
{
    double multiply_adds = 0;
    /* The input of the whole network is the sample, which needs no gradient. */
    bool first = model->first_layer == 0;
    for (uint32_t i = 0; i < model->layer_count; i++) {
        double products = products_of(&model->layers[i]);
        if (products == 0)
            continue;
        double passes = 1;
        if (!savings->backward && !(savings->pooled_gradients && is_pooled(model, i)))
            passes += first ? 1 : 2;
        if (!(savings->convolutions && model->layers[i].spec.kind == LAYER_CONV))
            multiply_adds += passes * products;
        first = false;
    }
    return 2 * multiply_adds;
}

/* ---- Building a model ---- */

/* Names a layer by its kind and its number among the layers of this kind, as PyTorch modules usually are:
 * "conv1", "conv2", "relu1". */
static void name_layer(struct layer *layer, uint32_t counts[LAYER_KINDS])
{
    static const char *const kinds[LAYER_KINDS] = {"conv", "relu", "pool", "dropout", "fc", "add", "mean"};
    snprintf(layer->name, sizeof layer->name, "%s%" PRIu32, kinds[layer->spec.kind],
             ++counts[layer->spec.kind]);
}

enum status model_build(const struct model_table *table, struct shape input, uint32_t classes,
                        struct model *model)
{
    uint32_t counts[LAYER_KINDS] = {0};
    *model = (struct model){.name = table->name,
                            .summary = table->summary,
                            .volumetric = table->volumetric,
                            .input = input,
                            .classes = classes,
                            .input_values = shape_values(&input)};
    if (!table->volumetric && input.depth != 1)
        return status_set(STATUS_USAGE,
                          "%s takes images, but these samples have a depth of %" PRIu32 "; use cnn3d",
                          table->name, input.depth);
    if (table->layer_count > MODEL_LAYERS_MAX || classes == 0 || model->input_values == 0)
        return status_set(STATUS_FAILED,
                          "%s: cannot build a model of %" PRIu32 " layers for %" PRIu32 " classes",
                          table->name, table->layer_count, classes);
    struct shape shape = input;
    for (uint32_t i = 0; i < table->layer_count; i++) {
        struct layer *layer = &model->layers[model->layer_count++];
        *layer = (struct layer){
            .spec = table->layers[i], .number = i, .in = shape, .output = model->output_values};
        name_layer(layer, counts);
        enum status status = find_output(layer, classes);
        if (status != STATUS_OK)
            return status_prefix(status, "%s", table->name);
        if (layer->spec.kind == LAYER_ADD)
            TRY(join(model, layer));
        TRY(add_parameters(model, layer));
        model->multiplications += products_of(layer);
        model->output_values += layer->out_values;
        shape = layer->out;
    }
    if (shape_values(&shape) != classes)
        return status_set(STATUS_FAILED, "%s: its last layer does not output one value per class",
                          table->name);
    return STATUS_OK;
}

/* ---- Slices ---- */

bool model_may_cut(const struct model *model, uint32_t layer)
{
    enum layer_kind kind = model->layers[layer].spec.kind;
    bool may = layer > 0 && (kind == LAYER_CONV || kind == LAYER_LINEAR);
    for (uint32_t i = layer; i < model->layer_count; i++)
        may &= model->layers[i].spec.kind != LAYER_ADD || i - model->layers[i].spec.back + 1 >= layer;
    return may;
}

/* Copies the tensors of the slice. Tensors are in the order of their layers, so the tensors of a slice are
 * consecutive. */
static void take_tensors(const struct model *whole, struct model *slice)
{
    slice->tensor_count = 0;
    for (uint32_t t = 0; t < whole->tensor_count; t++) {
        struct model_tensor tensor = whole->tensors[t];
        if (tensor.first < slice->arena_first || tensor.first >= slice->arena_first + slice->arena_values)
            continue;
        tensor.first -= slice->arena_first;
        slice->parameters += tensor.values;
        slice->tensors[slice->tensor_count++] = tensor;
    }
}

/* Returns the offset of the first tensor that belongs to `layer` or a later one. */
static size_t arena_at(const struct model *model, uint32_t layer)
{
    while (layer < model->layer_count && model->layers[layer].weight_values == 0)
        layer++;
    return layer < model->layer_count ? model->layers[layer].weight : model->arena_values;
}

void model_slice(const struct model *whole, uint32_t first, uint32_t end, struct model *slice)
{
    *slice = *whole;
    slice->first_layer = first;
    slice->arena_first = arena_at(whole, first);
    slice->arena_values = arena_at(whole, end) - slice->arena_first;
    slice->input = whole->layers[first].in;
    slice->input_values = whole->layers[first].in_values;
    slice->layer_count = end - first;
    slice->output_values = slice->parameters = 0;
    slice->multiplications = 0;
    for (uint32_t i = 0; i < slice->layer_count; i++) {
        struct layer *layer = &slice->layers[i];
        *layer = whole->layers[first + i];
        layer->weight -= layer->weight_values ? slice->arena_first : 0;
        layer->bias -= layer->weight_values ? slice->arena_first : 0;
        layer->output = slice->output_values;
        slice->output_values += layer->out_values;
        slice->multiplications += products_of(layer);
    }
    take_tensors(whole, slice);
}

void model_initialise(const struct model *model, uint64_t seed, float *parameters)
{
    memset(parameters, 0, model->arena_values * sizeof *parameters);
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        float bound = 1 / sqrtf((float)tensor->fan_in);
        for (size_t i = 0; i < tensor->values; i++)
            parameters[tensor->first + i] = draw_initial(seed, tensor->stream, i, bound);
    }
}
