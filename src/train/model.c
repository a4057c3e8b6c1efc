#include "train/model.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/parallel.h"
#include "core/text.h"
#include "data/random_draws.h"
#include "train/layer_precision.h"

#define VALUES_MAX (UINT64_C(1) << 31) /* limit for a layer's output and for its weights */

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

uint32_t layer_stride(const struct layer *layer, int axis)
{
    const struct layer_spec *spec = &layer->spec;
    return spec->stride == 0 ? (spec->kind == LAYER_POOL ? spec->kernel[axis] : 1)
           : axis == 0       ? 1
                             : spec->stride;
}

/* Returns the output length along an axis; 0 if the kernel does not fit. */
static uint32_t windows(const struct layer *layer, uint32_t length, int axis)
{
    const uint32_t kernel = layer->spec.kernel[axis];
    const uint64_t padded = length + 2 * (uint64_t)layer->spec.padding[axis];
    return padded < kernel ? 0 : (uint32_t)((padded - kernel) / layer_stride(layer, axis) + 1);
}

/* Sets the output shape of a layer of a transformer. */
static enum status find_tokens(struct layer *layer)
{
    const struct layer_spec *spec = &layer->spec;
    const struct shape *in = &layer->in;
    const uint32_t height = spec->kernel[1], width = spec->kernel[2], heads = spec->heads;
    if (spec->kind == LAYER_PATCHES && (in->height % height || in->width % width))
        return status_set(STATUS_USAGE,
                          "its patches are %" PRIu32 " x %" PRIu32 " pixels, which do not divide samples of "
                          "%" PRIu32 " x %" PRIu32
                          "; use samples of another size (for synth, --res; for data "
                          "sets of images, --out-res) or another network",
                          height, width, in->height, in->width);
    if (spec->kind == LAYER_ATTENTION && (heads == 0 || in->width % 3 || in->width / 3 % heads))
        return status_set(STATUS_FAILED, "%s: its heads do not divide tokens of %" PRIu32, layer->name,
                          in->width);
    if (spec->kind == LAYER_PATCHES)
        layer->out = (struct shape){in->height / height * (in->width / width), 1, 1, spec->channels};
    if (spec->kind == LAYER_TOKENS)
        layer->out.channels++;
    if (spec->kind == LAYER_TOKEN_LINEAR)
        layer->out.width = spec->channels;
    if (spec->kind == LAYER_ATTENTION)
        layer->out.width = in->width / 3;
    if (spec->kind == LAYER_SELECT)
        layer->out.channels = 1;
    return STATUS_OK;
}

/* Checks that the layer is in the right kind of network, and that a linear layer of a transformer gets only
 * one token. */
static enum status check_kind(const struct model *model, const struct layer *layer)
{
    enum layer_kind kind = layer->spec.kind;
    bool either = kind == LAYER_LINEAR || kind == LAYER_ADD;
    bool first = kind == LAYER_PATCHES; /* the kind of the first layer of a transformer, and of no other */
    if ((!either && (kind >= LAYER_PATCHES) != model->transformer) ||
        first != (model->transformer && layer->number == 0))
        return status_set(STATUS_FAILED, "%s: a network cannot have such a layer here", layer->name);
    if (kind == LAYER_LINEAR && model->transformer && layer->in.channels > 1 && layer->in.width > 1)
        return status_set(STATUS_FAILED, "%s: its input has several tokens, but must have one", layer->name);
    return STATUS_OK;
}

static enum status find_output(struct layer *layer, uint32_t classes)
{
    const struct layer_spec *spec = &layer->spec;
    uint32_t channels = spec->channels ? spec->channels : classes;
    layer->out = layer->in;
    if (spec->kind >= LAYER_PATCHES)
        TRY(find_tokens(layer));
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
        return status_set(STATUS_USAGE,
                          "%s: its output would have more than 2^31 values; use smaller samples",
                          layer->name);
    return STATUS_OK;
}

/* Sets the input of a layer that does not use the output of the previous layer. Marks the layer whose output
 * it uses. */
static enum status branch(struct model *model, struct layer *layer)
{
    const uint32_t skipped = layer->spec.skipped;
    if (skipped == 0)
        return STATUS_OK;
    if (skipped >= layer->number)
        return status_set(STATUS_FAILED, "%s: its input is not the output of an earlier layer", layer->name);
    struct layer *from = &model->layers[layer->number - 1 - skipped];
    from->is_branched = true;
    layer->in = from->out;
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
    if (next == LAYER_RELU || next == LAYER_DROPOUT || next == LAYER_DROP_PATH)
        return status_set(STATUS_FAILED, "%s: it adds the output of %s, which %s changes in place", add->name,
                          other->name, other[1].name);
    return memcmp(&other->out, &add->in, sizeof add->in) == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "%s: it adds the output of %s, which has another shape", add->name,
                            other->name);
}

/* ---- Parameters ---- */

/* Returns the number of blocks among the first `end` layers. The layers of a block of a transformer are named
 * "blocks.0.norm1" and so on. */
static uint32_t count_blocks(const struct model *model, uint32_t end)
{
    uint32_t block, count = 0;
    for (uint32_t i = 0; i < end; i++)
        if (sscanf(model->layers[i].name, "blocks.%" SCNu32 ".", &block) == 1)
            count = block + 1;
    return count;
}

static size_t aligned(size_t values)
{
    return (values + MODEL_ALIGNMENT - 1) / MODEL_ALIGNMENT * MODEL_ALIGNMENT;
}

/* Appends a tensor to the table and returns it. Its place in the arena follows the parameters so far. */
static struct model_tensor *add_tensor(struct model *model, const struct layer *layer, const char *what,
                                       size_t values)
{
    struct model_tensor *tensor = &model->tensors[model->tensor_count];
    *tensor = (struct model_tensor){
        .first = model->trained_values, .values = values, .stream = model->tensor_count, .decays = true};
    char name[sizeof tensor->name] = "";
    if (layer->spec.kind == LAYER_TOKENS)
        snprintf(name, sizeof name, "%s", what);
    else
        snprintf(name, sizeof name, "%s.%s", layer->name, what);
    memcpy(tensor->name, name, sizeof name);
    bool head = model->transformer && layer->spec.kind == LAYER_LINEAR;
    tensor->depth = model->depth = count_blocks(model, model->layer_count) + head;
    model->tensor_count++;
    return tensor;
}

/* Appends a parameter tensor to the arena and returns it. */
static struct model_tensor *add_parameter(struct model *model, const struct layer *layer, const char *what,
                                          size_t values)
{
    struct model_tensor *tensor = add_tensor(model, layer, what, values);
    model->parameters += values;
    model->trained_values += aligned(values);
    return tensor;
}

static void add_axis(struct model_tensor *tensor, uint64_t length)
{
    tensor->shape[tensor->axes++] = length;
}

/* Sets the axes of a weight tensor as in PyTorch. */
static void shape_weight(const struct model *model, const struct layer *layer, struct model_tensor *tensor)
{
    enum layer_kind kind = layer->spec.kind;
    if (kind == LAYER_TOKENS) {
        add_axis(tensor, 1);
        add_axis(tensor, layer->out.channels);
        add_axis(tensor, layer->out.width);
        return;
    }
    add_axis(tensor, kind == LAYER_CONV ? layer->out.channels : layer->bias_values);
    if (kind == LAYER_LINEAR || kind == LAYER_TOKEN_LINEAR)
        add_axis(tensor, layer->weight_values / layer->bias_values);
    if (kind != LAYER_CONV && kind != LAYER_PATCHES)
        return;
    add_axis(tensor, layer->in.channels);
    for (int i = model->volumetric ? 0 : 1; i < MODEL_AXES; i++)
        add_axis(tensor, layer->spec.kernel[i]);
}

/* Describes the parameters of a network with LAYER_BATCH_NORM; see model_initialise(). */
static void describe_normalised(const struct layer *layer, struct model_tensor *weight,
                                struct model_tensor *bias)
{
    if (layer->spec.kind == LAYER_CONV) {
        weight->initial = INITIAL_NORMAL;
        weight->spread = sqrtf(2 / ((float)layer->weight_values / (float)layer->in.channels));
    } else if (layer->spec.kind == LAYER_BATCH_NORM) {
        weight->initial = INITIAL_ONES;
        bias->initial = INITIAL_ZEROS;
    }
}

/* Sets the initial distribution of a layer's parameters, and whether weight decay applies to them. `bias` is
 * not in the table if the layer has none. */
static void describe_values(const struct model *model, const struct layer *layer, uint64_t fan_in,
                            struct model_tensor *weight, struct model_tensor *bias)
{
    enum layer_kind kind = layer->spec.kind;
    weight->spread = bias->spread = 1 / sqrtf((float)fan_in);
    if (model->normalises)
        describe_normalised(layer, weight, bias);
    if (!model->transformer)
        return;
    bias->decays = false;
    weight->decays = kind != LAYER_NORM && kind != LAYER_TOKENS;
    if (kind == LAYER_PATCHES)
        return;
    weight->initial = kind == LAYER_NORM ? INITIAL_ONES : INITIAL_NORMAL;
    weight->spread = 0.02f;
    bias->initial = kind == LAYER_TOKENS ? INITIAL_NORMAL : INITIAL_ZEROS;
    bias->spread = 1e-6f; /* of the class token */
}

/* Returns the number of weights per bias of a layer; 0 if it has no parameters. */
static uint64_t weights_per_bias(const struct layer *layer)
{
    const struct layer_spec *spec = &layer->spec;
    switch (spec->kind) {
    case LAYER_CONV:
    case LAYER_PATCHES:
        return (uint64_t)layer->in.channels * spec->kernel[0] * spec->kernel[1] * spec->kernel[2];
    case LAYER_LINEAR:
        return layer->in_values;
    case LAYER_TOKEN_LINEAR:
        return layer->in.width;
    case LAYER_TOKENS:
        return layer->out.channels;
    case LAYER_NORM:
    case LAYER_BATCH_NORM:
        return 1;
    default:
        return 0;
    }
}

/* Adds the running statistics of a layer. Their places in the arena are after all parameters; see
 * place_statistics(). */
static void add_statistics(struct model *model, const struct layer *layer)
{
    static const char *const names[] = {"running_mean", "running_var"};
    for (int i = 0; i < 2; i++) {
        struct model_tensor *tensor = add_tensor(model, layer, names[i], layer->out.channels);
        tensor->initial = i == 0 ? INITIAL_ZEROS : INITIAL_ONES;
        tensor->is_statistic = true;
        tensor->decays = false;
        add_axis(tensor, tensor->values);
    }
}

static enum status add_parameters(struct model *model, struct layer *layer)
{
    uint64_t fan_in = weights_per_bias(layer);
    bool norm = layer->spec.kind == LAYER_BATCH_NORM;
    bool spatial = layer->spec.kind == LAYER_CONV || layer->spec.kind == LAYER_LINEAR || norm;
    bool tokens = layer->spec.kind == LAYER_TOKENS;
    if (fan_in == 0)
        return STATUS_OK;
    const size_t outputs = spatial ? layer->out.channels : layer->out.width;
    layer->bias_values = layer->spec.no_bias ? 0 : outputs;
    if (fan_in > VALUES_MAX / outputs)
        return status_set(STATUS_USAGE,
                          "%s: it would have more than 2^31 weights; use smaller samples, or lower --classes",
                          layer->name);
    layer->weight_values = outputs * fan_in;
    struct model_tensor none = {0}, *bias = &none;
    struct model_tensor *weight =
        add_parameter(model, layer, tokens ? "pos_embed" : "weight", layer->weight_values);
    shape_weight(model, layer, weight);
    weight->hidden =
        weight != model->tensors && (layer->spec.kind == LAYER_CONV || layer->spec.kind == LAYER_LINEAR ||
                                     layer->spec.kind == LAYER_TOKEN_LINEAR);
    if (!layer->spec.no_bias) {
        bias = add_parameter(model, layer, tokens ? "cls_token" : "bias", layer->bias_values);
        for (int i = 0; tokens && i < 2; i++)
            add_axis(bias, 1);
        add_axis(bias, layer->bias_values);
    }
    describe_values(model, layer, fan_in, weight, bias);
    layer->weight = weight->first;
    layer->bias = bias->first;
    if (norm)
        add_statistics(model, layer);
    return STATUS_OK;
}

/* Gives the running statistics their places in the arena, after all parameters. */
static void place_statistics(struct model *model)
{
    uint32_t t = 0;
    model->arena_values = model->trained_values;
    for (uint32_t i = 0; i < model->layer_count; i++) {
        struct layer *layer = &model->layers[i];
        if (layer->spec.kind != LAYER_BATCH_NORM)
            continue;
        while (!model->tensors[t].is_statistic)
            t++;
        layer->mean = model->arena_values;
        layer->variance = layer->mean + aligned(layer->out.channels);
        model->tensors[t++].first = layer->mean;
        model->tensors[t++].first = layer->variance;
        model->arena_values = layer->variance + aligned(layer->out.channels);
    }
}

/* Marks the biases of the keys of an attention layer as idle values (model.h), unless another layer also uses
 * the keys. */
static void mark_idle(struct model *model, const struct layer *attention)
{
    const struct layer *before = attention - 1;
    if (attention->spec.kind != LAYER_ATTENTION || before->spec.kind != LAYER_TOKEN_LINEAR ||
        before->is_added)
        return;
    struct model_tensor *bias = model->tensors;
    while (bias->first != before->bias)
        bias++;
    bias->idle_first = attention->out.width;
    bias->idle_values = attention->out.width;
}

/* Marks the tensors of the last layer, which Muon does not update as matrices. */
static void mark_head(struct model *model)
{
    const size_t first = model->layers[model->layer_count - 1].weight;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        struct model_tensor *tensor = &model->tensors[t];
        tensor->head = tensor->first >= first && !tensor->is_statistic;
        tensor->hidden &= !tensor->head;
    }
}

/* ---- FLOP counts ---- */

/* Returns the number of pairs (output position, kernel tap) along an axis that read inside the image. The
 * other pairs multiply by padding zeros, which does not count as work. */
static double inner_taps(const struct layer *layer, uint32_t in, uint32_t out, int axis)
{
    double taps = 0;
    for (uint32_t tap = 0; tap < layer->spec.kernel[axis]; tap++)
        for (uint32_t position = 0; position < out; position++)
            taps += position * layer_stride(layer, axis) + tap >= layer->spec.padding[axis] &&
                    position * layer_stride(layer, axis) + tap - layer->spec.padding[axis] < in;
    return taps;
}

/* Returns the number of multiply-adds of a layer's forward pass. */
static double products_of(const struct layer *layer)
{
    const struct shape *in = &layer->in, *out = &layer->out;
    if (layer->spec.kind == LAYER_LINEAR)
        return (double)layer->in_values * (double)layer->out_values;
    if (layer->spec.kind == LAYER_PATCHES || layer->spec.kind == LAYER_TOKEN_LINEAR)
        return (double)layer->weight_values * layer_rows(layer);
    if (layer->spec.kind == LAYER_ATTENTION) /* q k^T and its product with v */
        return 2.0 * in->channels * (double)layer->out_values;
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

/* Names a layer. Without a name in its table, the name is its kind and its number among the layers of this
 * kind, as usual for PyTorch modules: "conv1", "conv2", "relu1". */
static void name_layer(struct layer *layer, uint32_t counts[LAYER_KINDS])
{
    static const char *const kinds[LAYER_KINDS] = {
        "conv",    "relu",   "pool", "dropout", "fc",        "add",  "mean",      "bn",
        "patches", "tokens", "norm", "linear",  "attention", "gelu", "drop_path", "select"};
    if (layer->spec.name)
        snprintf(layer->name, sizeof layer->name, "%s", layer->spec.name);
    else
        snprintf(layer->name, sizeof layer->name, "%s%" PRIu32, kinds[layer->spec.kind],
                 ++counts[layer->spec.kind]);
}

static uint32_t count_tensors(const struct model_table *table)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < table->layer_count; i++) {
        enum layer_kind kind = table->layers[i].kind;
        count += kind == LAYER_BATCH_NORM ? 4
                 : kind == LAYER_CONV || kind == LAYER_LINEAR || kind == LAYER_PATCHES ||
                         kind == LAYER_TOKENS || kind == LAYER_NORM || kind == LAYER_TOKEN_LINEAR
                     ? 2 - table->layers[i].no_bias
                     : 0;
    }
    return count;
}

enum status model_build(const struct model_table *table, struct shape input, uint32_t classes,
                        struct model *model)
{
    uint32_t counts[LAYER_KINDS] = {0};
    *model = (struct model){.name = table->name,
                            .summary = table->summary,
                            .volumetric = table->volumetric,
                            .transformer = table->layers[0].kind == LAYER_PATCHES,
                            .input = input,
                            .classes = classes,
                            .input_values = shape_values(&input)};
    if (!table->volumetric && input.depth != 1)
        return status_set(STATUS_USAGE,
                          "%s takes images, but these samples have a depth of %" PRIu32 "; use cnn3d",
                          table->name, input.depth);
    if (table->layer_count > MODEL_LAYERS_MAX || count_tensors(table) > MODEL_TENSORS_MAX || classes == 0 ||
        model->input_values == 0)
        return status_set(STATUS_FAILED,
                          "%s: cannot build a model of %" PRIu32 " layers for %" PRIu32 " classes",
                          table->name, table->layer_count, classes);
    struct shape shape = input;
    for (uint32_t i = 0; i < table->layer_count; i++)
        model->normalises |= table->layers[i].kind == LAYER_BATCH_NORM;
    for (uint32_t i = 0; i < table->layer_count; i++) {
        struct layer *layer = &model->layers[model->layer_count++];
        *layer = (struct layer){
            .spec = table->layers[i], .number = i, .in = shape, .output = model->output_values};
        name_layer(layer, counts);
        enum status status = branch(model, layer);
        if (status == STATUS_OK)
            status = check_kind(model, layer);
        if (status == STATUS_OK)
            status = find_output(layer, classes);
        TRY(status_prefix(status, "%s", table->name));
        if (layer->spec.kind == LAYER_ADD)
            TRY(join(model, layer));
        TRY(add_parameters(model, layer));
        model->multiplications += products_of(layer);
        model->output_values += layer->out_values;
        shape = layer->out;
    }
    place_statistics(model);
    for (uint32_t i = 0; i < model->layer_count; i++)
        mark_idle(model, &model->layers[i]);
    mark_head(model);
    if (shape_values(&shape) != classes)
        return status_set(STATUS_FAILED, "%s: its last layer does not output one value per class",
                          table->name);
    return STATUS_OK;
}

enum status model_set_drop_path(struct model *model, double rate)
{
    const uint32_t blocks = count_blocks(model, model->layer_count);
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].spec.kind == LAYER_DROP_PATH && blocks > 1)
            model->layers[i].spec.rate = (float)(rate * (count_blocks(model, i + 1) - 1) / (blocks - 1));
    return blocks > 1 ? STATUS_OK
                      : status_option(STATUS_USAGE, "drop-path",
                                      ": %s has no blocks with stochastic depth; use one of the "
                                      "networks vit-*, or drop --drop-path",
                                      model->name);
}

enum status model_set_dropout(struct model *model, double rate)
{
    bool any = false;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].spec.kind == LAYER_DROPOUT) {
            model->layers[i].spec.rate = (float)(round(256 * rate) / 256);
            any = true;
        }
    return any ? STATUS_OK
               : status_option(STATUS_USAGE, "dropout",
                               ": %s has no dropout layers; use --model cnn or cnn3d, or drop --dropout",
                               model->name);
}

/* ---- Slices ---- */

bool model_may_cut(const struct model *model, uint32_t layer)
{
    enum layer_kind kind = model->layers[layer].spec.kind;
    const bool block = layer > 0 && model->transformer && kind == LAYER_NORM &&
                       layer + 2 < model->layer_count &&
                       model->layers[layer + 2].spec.kind == LAYER_ATTENTION &&
                       model->layers[layer - 1].spec.kind == LAYER_ADD;
    bool may = layer > 0 && !model->normalises &&
               (block || (!model->transformer && (kind == LAYER_CONV || kind == LAYER_LINEAR)));
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
        slice->parameters += tensor.is_statistic ? 0 : tensor.values;
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

enum status model_refuse_transformer(const struct model *model)
{
    return model->transformer
               ? status_set(STATUS_USAGE,
                            "it cannot train or run %s, a transformer; use train-vit, infer-vit, train-omp, "
                            "infer-omp, train-naive or infer-naive, or another --model",
                            model->name)
               : STATUS_OK;
}

enum status model_refuse_batch_norm(const struct model *model)
{
    return model->normalises
               ? status_set(
                     STATUS_USAGE,
                     "it cannot train or run %s, a network with batch normalisation; use train-resnet, "
                     "infer-resnet, train-omp or infer-omp, or another --model",
                     model->name)
               : STATUS_OK;
}

static float initial_value(const struct model_tensor *tensor, uint64_t seed, size_t i)
{
    switch (tensor->initial) {
    case INITIAL_ZEROS:
        return 0;
    case INITIAL_ONES:
        return 1;
    case INITIAL_NORMAL:
        return draw_initial_normal(seed, tensor->stream, i, tensor->spread);
    default:
        return draw_initial(seed, tensor->stream, i, tensor->spread);
    }
}

/* Initial values are independent, and millions of normal ones would take one thread seconds. */
#define INITIALISED 65536 /* values per task; small tensors are not worth starting threads */

struct initial_values {
    const struct model_tensor *tensor;
    uint64_t seed;
    float *values;
};

static void initialise_some(void *context, uint64_t task, int thread)
{
    const struct initial_values *initial = context;
    const size_t first = task * INITIALISED, left = initial->tensor->values - first,
                 end = first + (left < INITIALISED ? left : INITIALISED);
    (void)thread;
    for (size_t i = first; i < end; i++)
        initial->values[i] = initial_value(initial->tensor, initial->seed, i);
}

void model_initialise(const struct model *model, uint64_t seed, float *parameters)
{
    memset(parameters, 0, model->arena_values * sizeof *parameters);
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        struct initial_values initial = {&model->tensors[t], seed, parameters + model->tensors[t].first};
        const uint64_t tasks = (initial.tensor->values + INITIALISED - 1) / INITIALISED;
        if (tasks > 1)
            parallel_for(parallel_threads(), tasks, initialise_some, &initial);
        else
            initialise_some(&initial, 0, 0);
    }
}

void model_initialise_head(const struct model *model, double scale, double bias, float *parameters)
{
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        const bool constant = !isnan(bias) && tensor->axes == 1;
        for (size_t i = tensor->first; tensor->head && i < tensor->first + tensor->values; i++)
            parameters[i] = constant       ? (float)bias
                            : isnan(scale) ? parameters[i]
                                           : (float)(scale * parameters[i]);
    }
}

bool model_has_batch_norm(const struct model_table *table)
{
    for (uint32_t i = 0; i < table->layer_count; i++)
        if (table->layers[i].kind == LAYER_BATCH_NORM)
            return true;
    return false;
}

/* Where a convolution is on the shortcut, the branch ends with the earlier summand. */
void model_zero_last_gamma(const struct model *model, float *parameters)
{
    for (uint32_t i = 1; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        if (layer->spec.kind != LAYER_ADD || layer->spec.back > i)
            continue;
        const struct layer *last = layer - layer->spec.back;
        last = last->spec.kind == LAYER_BATCH_NORM ? last : layer - 1;
        if (last->spec.kind == LAYER_BATCH_NORM)
            memset(parameters + last->weight, 0, last->weight_values * sizeof *parameters);
    }
}

/* ---- The networks ---- */

#define LAYER(type, ...)                  \
    {                                     \
        .kind = LAYER_##type, __VA_ARGS__ \
    }

/* CONV and POOL are for images and have square kernels. CONV3D and POOL3D are for volumes and have cubic
 * kernels. */
#define CONV(out, size, pad) \
    LAYER(CONV, .channels = (out), .kernel = {1, size, size}, .padding = {0, pad, pad})
#define CONV3D(out, size, pad) \
    LAYER(CONV, .channels = (out), .kernel = {size, size, size}, .padding = {pad, pad, pad})
#define POOL(size)     LAYER(POOL, .kernel = {1, size, size})
#define POOL3D(size)   LAYER(POOL, .kernel = {size, size, size})
#define RELU           LAYER(RELU)
#define DROPOUT(share) LAYER(DROPOUT, .rate = (share))
#define LINEAR(out)    LAYER(LINEAR, .channels = (out))
#define ADD(layers)    LAYER(ADD, .back = (layers))
#define MEAN           LAYER(MEAN)
#define CLASSES        0

/* Layers of a transformer; `layer` is the name of the layer in timm. */
#define PATCHES(layer, out, size) \
    LAYER(PATCHES, .channels = (out), .kernel = {1, size, size}, .name = (layer))
#define TOKENS(layer)            LAYER(TOKENS, .name = (layer))
#define NORM(layer)              LAYER(NORM, .name = (layer))
#define TOKEN_LINEAR(layer, out) LAYER(TOKEN_LINEAR, .channels = (out), .name = (layer))
#define ATTENTION(layer, count)  LAYER(ATTENTION, .heads = (count), .name = (layer))
#define GELU(layer)              LAYER(GELU, .name = (layer))
#define DROP_PATH(layer, share)  LAYER(DROP_PATH, .rate = (share), .name = (layer))
#define NAMED_ADD(layer, layers) LAYER(ADD, .back = (layers), .name = (layer))
#define SELECT                   LAYER(SELECT)
#define HEAD                     LAYER(LINEAR, .channels = CLASSES, .name = "head")

/* Layers of a residual network; `layer` is the name of the layer in torchvision. NORMED is a convolution
 * without bias and the batch normalisation after it. */
#define NORMED(conv, norm, out, size, step, back)                                                     \
    LAYER(CONV, .channels = (out), .kernel = {1, size, size}, .padding = {0, (size) / 2, (size) / 2}, \
          .stride = (step), .no_bias = true, .skipped = (back), .name = (conv)),                      \
        LAYER(BATCH_NORM, .name = (norm))
#define POOL_STRIDED(size, step) \
    LAYER(POOL, .kernel = {1, size, size}, .padding = {0, (size) / 2, (size) / 2}, .stride = (step))

static const struct layer_spec logreg[] = {LINEAR(CLASSES)};

static const struct layer_spec mlp[] = {LINEAR(512), RELU, LINEAR(CLASSES)};

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

/* Vision transformers (Dosovitskiy et al., "An image is worth 16x16 words", 2021), with the shapes of
 * deit_*_patch16_224 in timm (Touvron et al., "Training data-efficient image transformers & distillation
 * through attention", 2021) and of its vit_large_patch16_224: layer normalisation before attention and before
 * the two linear layers of a block, and a shortcut around both. VIT_BLOCK has 12 layers. With `drop`, the
 * rate of stochastic depth rises linearly from 0 in the first of 12 blocks to `drop` in the last. timm
 * normalises all tokens before it selects the class token; here the class token is selected first, which
 * gives the same logits. */
#define VIT_BLOCK(n, width, heads, rate)                                                        \
    NORM("blocks." #n ".norm1"), TOKEN_LINEAR("blocks." #n ".attn.qkv", 3 * (width)),           \
        ATTENTION("blocks." #n ".attn", heads), TOKEN_LINEAR("blocks." #n ".attn.proj", width), \
        DROP_PATH("blocks." #n ".drop_path1", rate), NAMED_ADD("blocks." #n ".add1", 6),        \
        NORM("blocks." #n ".norm2"), TOKEN_LINEAR("blocks." #n ".mlp.fc1", 4 * (width)),        \
        GELU("blocks." #n ".mlp.act"), TOKEN_LINEAR("blocks." #n ".mlp.fc2", width),            \
        DROP_PATH("blocks." #n ".drop_path2", rate), NAMED_ADD("blocks." #n ".add2", 6)
#define VIT_BEGIN(width, patch) PATCHES("patch_embed.proj", width, patch), TOKENS("tokens")
#define VIT_END                 SELECT, NORM("norm"), HEAD
#define VIT_12(width, heads, drop)                                                                \
    VIT_BEGIN(width, 16), VIT_BLOCK(0, width, heads, 0), VIT_BLOCK(1, width, heads, (drop) / 11), \
        VIT_BLOCK(2, width, heads, (drop)*2 / 11), VIT_BLOCK(3, width, heads, (drop)*3 / 11),     \
        VIT_BLOCK(4, width, heads, (drop)*4 / 11), VIT_BLOCK(5, width, heads, (drop)*5 / 11),     \
        VIT_BLOCK(6, width, heads, (drop)*6 / 11), VIT_BLOCK(7, width, heads, (drop)*7 / 11),     \
        VIT_BLOCK(8, width, heads, (drop)*8 / 11), VIT_BLOCK(9, width, heads, (drop)*9 / 11),     \
        VIT_BLOCK(10, width, heads, (drop)*10 / 11), VIT_BLOCK(11, width, heads, drop), VIT_END

/* Three blocks without stochastic depth. */
#define VIT_3(a, b, c, width, heads) \
    VIT_BLOCK(a, width, heads, 0), VIT_BLOCK(b, width, heads, 0), VIT_BLOCK(c, width, heads, 0)

static const struct layer_spec vit_micro[] = {
    VIT_BEGIN(32, 4),
    VIT_BLOCK(0, 32, 2, 0),
    VIT_BLOCK(1, 32, 2, 0.0625f),
    VIT_END,
};
static const struct layer_spec vit_tiny[] = {VIT_12(192, 3, 0.0f)};
static const struct layer_spec vit_small[] = {VIT_12(384, 6, 0.0f)};
static const struct layer_spec vit_base[] = {VIT_12(768, 12, 0.1f)};
static const struct layer_spec vit_large[] = {
    VIT_BEGIN(1024, 16),         VIT_3(0, 1, 2, 1024, 16),
    VIT_3(3, 4, 5, 1024, 16),    VIT_3(6, 7, 8, 1024, 16),
    VIT_3(9, 10, 11, 1024, 16),  VIT_3(12, 13, 14, 1024, 16),
    VIT_3(15, 16, 17, 1024, 16), VIT_3(18, 19, 20, 1024, 16),
    VIT_3(21, 22, 23, 1024, 16), VIT_END,
};

/* Residual networks with bottlenecks (He et al., "Deep residual learning for image recognition", 2016), with
 * the stride in the 3 x 3 convolution, as torchvision's resnet50 ("ResNet v1.5"). RESIDUAL is a block with
 * 10 layers. RESIDUAL_FIRST, the first block of a stage, has a convolution on its shortcut. */
#define RESIDUAL(n, width)                                                                                  \
    NORMED(n ".conv1", n ".bn1", width, 1, 1, 0), RELU, NORMED(n ".conv2", n ".bn2", width, 3, 1, 0), RELU, \
        NORMED(n ".conv3", n ".bn3", 4 * (width), 1, 1, 0), ADD(9), RELU
#define RESIDUAL_FIRST(n, width, step)                                                                   \
    NORMED(n ".conv1", n ".bn1", width, 1, 1, 0), RELU, NORMED(n ".conv2", n ".bn2", width, 3, step, 0), \
        RELU, NORMED(n ".conv3", n ".bn3", 4 * (width), 1, 1, 0),                                        \
        NORMED(n ".downsample.0", n ".downsample.1", 4 * (width), 1, step, 8), ADD(3), RELU
#define RESNET_BEGIN(width) NORMED("conv1", "bn1", width, 7, 2, 0), RELU, POOL_STRIDED(3, 2)
#define RESNET_END          MEAN, LAYER(LINEAR, .channels = CLASSES, .name = "fc")

static const struct layer_spec resnet_micro[] = {
    RESNET_BEGIN(8),
    RESIDUAL_FIRST("layer1.0", 8, 1),
    RESIDUAL("layer1.1", 8),
    RESIDUAL_FIRST("layer2.0", 16, 2),
    RESNET_END,
};
static const struct layer_spec resnet50[] = {
    RESNET_BEGIN(64),          RESIDUAL_FIRST("layer1.0", 64, 1),  RESIDUAL("layer1.1", 64),
    RESIDUAL("layer1.2", 64),  RESIDUAL_FIRST("layer2.0", 128, 2), RESIDUAL("layer2.1", 128),
    RESIDUAL("layer2.2", 128), RESIDUAL("layer2.3", 128),          RESIDUAL_FIRST("layer3.0", 256, 2),
    RESIDUAL("layer3.1", 256), RESIDUAL("layer3.2", 256),          RESIDUAL("layer3.3", 256),
    RESIDUAL("layer3.4", 256), RESIDUAL("layer3.5", 256),          RESIDUAL_FIRST("layer4.0", 512, 2),
    RESIDUAL("layer4.1", 512), RESIDUAL("layer4.2", 512),          RESNET_END,
};

#define NAMED(name, symbol, deep, text)            \
    {                                              \
        name, text, deep, symbol, COUNT_OF(symbol) \
    }
#define TABLE(symbol, deep, text) NAMED(#symbol, symbol, deep, text)
const struct model_table model_tables[] = {
    TABLE(logreg, false, "one linear layer: softmax regression; also for rows of embeddings"),
    TABLE(lenet, false, "two convolutions 5 x 5, three linear layers"),
    TABLE(cnn, false, "two convolutions 3 x 3, dropout, two linear layers: PyTorch's MNIST example"),
    TABLE(cnn3d, true, "two convolutions 3 x 3 x 3, two linear layers"),
    NAMED("cnn-fdsl", cnn_fdsl, false,
          "three residual blocks, global average pooling, one linear layer; images of any size"),
    NAMED("cnn-deep", cnn_deep, false,
          "eight equal residual blocks, global average pooling, one linear layer: for pipelines; images of "
          "any size"),
    TABLE(mlp, false, "two linear layers with ReLU between them; also for rows of embeddings"),
    NAMED("vit-micro", vit_micro, false,
          "vision transformer: patches 4 x 4, two blocks of width 32, two heads; for tests and CPUs"),
    NAMED("vit-tiny", vit_tiny, false, "DeiT-Tiny: patches 16 x 16, twelve blocks of width 192, three heads"),
    NAMED("vit-small", vit_small, false, "DeiT-Small: as vit-tiny, with width 384 and six heads"),
    NAMED("vit-base", vit_base, false,
          "DeiT-Base: as vit-tiny, with width 768, twelve heads and stochastic depth"),
    NAMED("vit-large", vit_large, false, "ViT-Large: patches 16 x 16, 24 blocks of width 1024, 16 heads"),
    NAMED("resnet-micro", resnet_micro, false,
          "residual network with batch normalisation: three bottlenecks of 8 and 16 channels; for tests"),
    NAMED("resnet50", resnet50, false, "ResNet-50 v1.5, as in torchvision: 25.6 million parameters"),
    {0},
};

const char *const model_names[] = {"logreg",   "lenet",     "cnn",          "cnn3d",    "cnn-fdsl",
                                   "cnn-deep", "mlp",       "vit-micro",    "vit-tiny", "vit-small",
                                   "vit-base", "vit-large", "resnet-micro", "resnet50", NULL};

const struct model_table *model_find(const char *name)
{
    for (const struct model_table *table = model_tables; table->name; table++)
        if (strcmp(table->name, name) == 0)
            return table;
    return NULL;
}

/* ---- Layers that are computed in fp32 ---- */

#define NAMES_SHOWN 12 /* names of layers in a message */
#define NAMES_TEXT  (NAMES_SHOWN * (LAYER_NAME_MAX + 2) + 24)

static bool has_parameters(const struct layer *layer)
{
    return layer->weight_values > 0;
}

/* Writes the names of the layers that have parameters and, unless `engine` is NULL, that the engine can
 * compute in fp32. */
static void list_names(const struct engine *engine, const struct model *model, char text[NAMES_TEXT])
{
    uint32_t count = 0;
    *text = '\0';
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        if (!has_parameters(layer) || (engine && engine->keeps_fp32(layer) != FP32_CHOSEN))
            continue;
        if (count++ < NAMES_SHOWN)
            text_join(text, NAMES_TEXT, ", ", "%s", layer->name);
    }
    if (count > NAMES_SHOWN)
        text_join(text, NAMES_TEXT, " ", "and %u more", count - NAMES_SHOWN);
}

/* Marks the layers that match the pattern of `bytes` bytes. */
static enum status choose(const char *pattern, size_t bytes, struct model *model)
{
    char own[TENSOR_NAME_MAX], names[NAMES_TEXT];
    bool matched = false;
    snprintf(own, sizeof own, "%.*s", (int)bytes, pattern);
    for (uint32_t i = 0; bytes < sizeof own && i < model->layer_count; i++)
        if (has_parameters(&model->layers[i]) && fnmatch(own, model->layers[i].name, 0) == 0)
            matched = model->layers[i].fp32 = true;
    if (matched)
        return STATUS_OK;
    list_names(NULL, model, names);
    return status_option(STATUS_USAGE, "fp32-layers",
                         ": no layer of %s with parameters matches \"%.*s\"; its layers are %s", model->name,
                         (int)(bytes < sizeof own ? bytes : sizeof own), pattern, names);
}

enum status layer_precision_choose(const char *patterns, struct model *model)
{
    for (const char *pattern = patterns;; pattern++) {
        const size_t bytes = strcspn(pattern, ",");
        TRY(choose(pattern, bytes, model));
        pattern += bytes;
        if (*pattern == '\0')
            return STATUS_OK;
    }
}

enum status layer_precision_accepts(const struct engine *engine, const struct model *model)
{
    const struct layer *first = NULL;
    bool changes = false;
    char names[NAMES_TEXT];
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        if (!layer->fp32)
            continue;
        if (!engine->keeps_fp32)
            return status_set(STATUS_USAGE,
                              "it has one precision for all layers; drop --fp32-layers, or use train-bf16, "
                              "train-amp or train-tf32 (for vit-* train-vit or train-vit-amp, for resnet* "
                              "train-resnet or train-resnet-amp)");
        first = first ? first : layer;
        changes |= engine->keeps_fp32(layer) == FP32_CHOSEN;
        if (engine->keeps_fp32(layer) == FP32_NEVER) {
            list_names(engine, model, names);
            return status_set(STATUS_USAGE,
                              "it cannot compute the layer %s in fp32; --fp32-layers may name %s",
                              layer->name, names);
        }
    }
    if (!first || changes)
        return STATUS_OK;
    list_names(engine, model, names);
    return status_set(STATUS_USAGE,
                      "it always computes the layer %s in fp32; drop --fp32-layers, or name one of %s",
                      first->name, names);
}

void layer_overflows_text(const struct model *model, const uint32_t *steps, char *text)
{
    bool written[MODEL_LAYERS_MAX] = {false};
    *text = '\0';
    for (uint32_t k = 0; k < LAYER_OVERFLOWS_MAX; k++) {
        uint32_t most = model->layer_count;
        for (uint32_t i = 0; i < model->layer_count; i++)
            if (!written[i] && steps[i] > 0 && (most == model->layer_count || steps[i] > steps[most]))
                most = i;
        if (most == model->layer_count)
            return;
        written[most] = true;
        text_join(text, LAYER_OVERFLOWS_TEXT, " ", "%s=%u", model->layers[most].name, steps[most]);
    }
}

void layer_overflows_say(const struct model *model, const uint32_t *steps)
{
    char text[LAYER_OVERFLOWS_TEXT];
    uint32_t all = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        all += steps[i];
    layer_overflows_text(model, steps, text);
    if (all > 0)
        status_say("%u step%s skipped because gradients overflowed; skipped steps per layer in which the "
                   "overflow began: %s (if this goes on, compute such a layer in fp32: --fp32-layers)",
                   all, all == 1 ? " was" : "s were", text);
}
