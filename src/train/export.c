#include "train/export.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "data/tensor_file.h"
#include "train/feed.h"

/* ---- The tensors of an arena ---- */

/* Fills model->tensor_count entries of `tensors`, one for each tensor of a model whose values are in `arena`.
 * Each name begins with `prefix`. The entries point into `arena`. */
static void describe_arena(const struct model *model, const char *prefix, const float *arena,
                           struct safetensor *tensors)
{
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *of = &model->tensors[t];
        tensors[t] = (struct safetensor){.type = "F32",
                                         .axes = of->axes,
                                         .values = arena + of->first,
                                         .bytes = of->values * sizeof *arena};
        snprintf(tensors[t].name, sizeof tensors[t].name, "%.15s%.31s", prefix, of->name);
        memcpy(tensors[t].shape, of->shape, sizeof of->shape);
    }
}

/* ---- One step ---- */

#define STEP_TENSORS (3 * MODEL_TENSORS_MAX + MODEL_LAYERS_MAX + 4)

/* Returns the factors by which a dropout layer multiplies its inputs in step 0 of epoch 0. The caller frees
 * the array; NULL if memory runs out. */
static float *dropout_factors(const struct train *train, const struct layer *layer, const uint32_t *numbers,
                              uint32_t count)
{
    uint32_t threshold = (uint32_t)(layer->spec.rate * 256);
    float *factors = malloc(count * layer->out_values * sizeof *factors);
    for (uint32_t j = 0; factors && j < count; j++)
        for (uint32_t i = 0; i < layer->out_values; i++) {
            struct philox_block block = draw_dropout(train->seed, 0, numbers[j], layer->number, i);
            factors[j * layer->out_values + i] =
                draw_kept(block, i, threshold) ? 256.0f / (float)(256 - threshold) : 0;
        }
    return factors;
}

/* Returns the factors that stochastic depth applies in step 0 of epoch 0, one per sample. The caller frees
 * the array; NULL if memory runs out. */
static float *path_factors(const struct train *train, const struct layer *layer, const uint32_t *numbers,
                           uint32_t count)
{
    float *factors = malloc(count * sizeof *factors);
    for (uint32_t j = 0; factors && j < count; j++)
        factors[j] = draw_path(train->seed, 0, numbers[j], layer->number, layer->spec.rate);
    return factors;
}

/* Contents of the --export-step file; owned. */
struct step_parts {
    uint32_t *numbers, count;
    float *inputs, *partner, *targets, *gradients, *factors[MODEL_LAYERS_MAX]; /* partner: one sample */
    int64_t *labels;
    double loss;
    struct train_state after;
    struct feed feed;
    struct safetensor tensors[STEP_TENSORS];
    size_t tensor_count;
};

static void step_free(struct step_parts *parts)
{
    free(parts->numbers);
    free(parts->inputs);
    free(parts->partner);
    free(parts->targets);
    free(parts->gradients);
    free(parts->labels);
    for (size_t i = 0; i < MODEL_LAYERS_MAX; i++)
        free(parts->factors[i]);
    train_state_free(&parts->after);
    feed_close(&parts->feed);
    free(parts);
}

/* Writes the samples of the step as the network sees them, and their targets. */
static void step_fill(const struct train *train, struct step_parts *parts)
{
    const struct data *data = train->data;
    const struct mix mix = train_mix(train, 0, 0);
    const uint32_t *numbers = parts->numbers;
    for (uint32_t j = 0; j < parts->count; j++) {
        const struct target target = train_target(train, &mix, numbers, parts->count, j);
        feed_gather(&parts->feed, &mix, 0, numbers, parts->count, j, parts->partner,
                    parts->inputs + j * data->sample_values);
        parts->labels[j] = target.label;
        for (uint32_t k = 0; k < data->classes; k++)
            parts->targets[(size_t)j * data->classes + k] =
                target_of(&target, train->smoothing, data->classes, k);
    }
}

/* Collects the samples of the step. */
static enum status step_samples(const struct train *train, struct step_parts *parts)
{
    const struct data *data = train->data;
    struct draw_order order = draw_order(train->seed, 0, data->sets[DATA_TRAIN].count);
    parts->numbers = malloc(train_entries(train, train->batch) * sizeof *parts->numbers);
    parts->inputs = malloc(train->batch * data->sample_values * sizeof *parts->inputs);
    parts->partner = malloc(data->sample_values * sizeof *parts->partner);
    parts->labels = malloc(train->batch * sizeof *parts->labels);
    parts->targets = malloc((size_t)train->batch * data->classes * sizeof *parts->targets);
    parts->gradients = malloc(train->model->arena_values * sizeof *parts->gradients);
    TRY(ALLOCATED(parts->numbers && parts->inputs && parts->partner && parts->labels && parts->targets &&
                      parts->gradients && train_state_new(train->model->arena_values, &parts->after),
                  "--export-step: out of memory"));
    parts->count = train_batch(train, &order, 0, parts->numbers);
    TRY(feed_open(train, &(struct resources){.threads = 1}, &parts->feed));
    TRY(feed_step(&parts->feed, 0, parts->numbers, parts->count));
    step_fill(train, parts);
    for (uint32_t i = 0; i < train->model->layer_count; i++) {
        const struct layer *layer = &train->model->layers[i];
        const bool path = layer->spec.kind == LAYER_DROP_PATH;
        if (!path && layer->spec.kind != LAYER_DROPOUT)
            continue;
        parts->factors[i] =
            (path ? path_factors : dropout_factors)(train, layer, parts->numbers, parts->count);
        TRY(ALLOCATED(parts->factors[i], "--export-step: out of memory"));
    }
    return STATUS_OK;
}

static void step_add(struct step_parts *parts, const char *name, const char *type, const void *values,
                     size_t value_bytes, uint32_t axes, const uint64_t *shape)
{
    struct safetensor *tensor = &parts->tensors[parts->tensor_count++];
    *tensor = (struct safetensor){.type = type, .axes = axes, .values = values, .bytes = value_bytes};
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    for (uint32_t i = 0; i < axes; i++) {
        tensor->shape[i] = shape[i];
        tensor->bytes *= shape[i];
    }
}

/* Describes the tensors: inputs, labels, targets, loss, dropout factors, parameters before and after,
 * gradients. */
static void step_describe(const struct model *model, const struct train_state *before,
                          struct step_parts *parts)
{
    const struct shape *in = &model->input;
    const uint64_t volume[] = {parts->count, in->channels, in->depth, in->height, in->width};
    const uint64_t picture[] = {parts->count, in->channels, in->height, in->width};
    step_add(parts, "inputs", "F32", parts->inputs, sizeof(float), model->volumetric ? 5 : 4,
             model->volumetric ? volume : picture);
    step_add(parts, "labels", "I64", parts->labels, sizeof(int64_t), 1, volume);
    step_add(parts, "targets", "F32", parts->targets, sizeof(float), 2,
             (const uint64_t[]){parts->count, model->classes});
    step_add(parts, "loss", "F64", &parts->loss, sizeof parts->loss, 0, NULL);
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (parts->factors[i]) {
            char name[48];
            const uint64_t shape[] = {parts->count, model->layers[i].out_values};
            const bool path = model->layers[i].spec.kind == LAYER_DROP_PATH;
            snprintf(name, sizeof name, "factor.%s", model->layers[i].name);
            step_add(parts, name, "F32", parts->factors[i], sizeof(float), path ? 1 : 2, shape);
        }
    const struct {
        const char *prefix;
        const float *arena;
    } arenas[] = {{"before.", before->parameters},
                  {"gradient.", parts->gradients},
                  {"after.", parts->after.parameters}};
    for (size_t i = 0; i < COUNT_OF(arenas); i++) {
        describe_arena(model, arenas[i].prefix, arenas[i].arena, parts->tensors + parts->tensor_count);
        parts->tensor_count += model->tensor_count;
    }
}

enum status export_step(const struct train *train, const struct engine *engine, void *state,
                        const struct train_state *before, const char *identity, const char *path)
{
    struct train_totals totals;
    struct step_parts *parts = calloc(1, sizeof *parts);
    TRY(ALLOCATED(parts, "--export-step: out of memory"));
    enum status status = step_samples(train, parts);
    if (status == STATUS_OK)
        status = engine->steps(state, 0, 0, 1);
    if (status == STATUS_OK)
        status = engine->totals(state, &totals);
    if (status == STATUS_OK)
        status = engine->gradients(state, parts->gradients);
    if (status == STATUS_OK)
        status = engine->get(state, &parts->after);
    if (status == STATUS_OK) {
        parts->loss = totals.loss / (double)totals.samples;
        step_describe(train->model, before, parts);
        const char *const about[] = {"fdsl-bench", identity, NULL};
        status = safetensors_write(path, about, parts->tensors, parts->tensor_count);
    }
    step_free(parts);
    return status == STATUS_OK ? engine->set(state, before) : status;
}

/* ---- The data ---- */

/* Describes the values and labels of one set. Returns the number of tensors. */
static size_t describe_set(const struct data *data, const struct model *model, const char *name,
                           const struct data_set *set, struct safetensor *tensors)
{
    const struct shape *in = &data->shape;
    const uint64_t volume[] = {set->count, in->channels, in->depth, in->height, in->width};
    const uint64_t picture[] = {set->count, in->channels, in->height, in->width};
    uint32_t axes = model->volumetric ? 5 : 4;
    tensors[0] = (struct safetensor){.type = data->type == DTYPE_F16 ? "F16" : "U8",
                                     .axes = axes,
                                     .values = set->values,
                                     .bytes = set->count * data->sample_bytes};
    tensors[1] = (struct safetensor){.type = "I32",
                                     .axes = 1,
                                     .shape = {set->count},
                                     .values = set->labels,
                                     .bytes = set->count * sizeof *set->labels};
    memcpy(tensors[0].shape, model->volumetric ? volume : picture, axes * sizeof *volume);
    snprintf(tensors[0].name, sizeof tensors[0].name, "%s.values", name);
    snprintf(tensors[1].name, sizeof tensors[1].name, "%s.labels", name);
    return 2;
}

enum status export_data(const struct train *train, const float *initial, const char *identity,
                        const char *path)
{
    const struct data *data = train->data;
    const struct model *model = train->model;
    struct safetensor tensors[MODEL_TENSORS_MAX + 6];
    size_t count = 0;
    if (data->feed != DATA_STORED) /* other feeds may keep only part of the training set in memory */
        return status_set(STATUS_USAGE, "--export-data writes only stored samples; add --feed stored");
    if (data->canvas_bytes) /* the sets have samples of different sizes */
        return status_set(STATUS_USAGE,
                          "--export-data cannot write the samples of --fit random-resized-crop; "
                          "use --fit resize or crop");
    count += describe_set(data, model, "train", &data->sets[DATA_TRAIN], tensors);
    count += describe_set(data, model, "test", &data->sets[DATA_TEST], tensors + count);
    const float *const lines[] = {data->scale, data->offset};
    for (size_t i = 0; i < COUNT_OF(lines); i++, count++) {
        tensors[count] = (struct safetensor){.type = "F32",
                                             .axes = 1,
                                             .shape = {data->shape.channels},
                                             .values = lines[i],
                                             .bytes = data->shape.channels * sizeof(float)};
        snprintf(tensors[count].name, sizeof tensors[count].name, "%s", i ? "offset" : "scale");
    }
    describe_arena(model, "initial.", initial, tensors + count);
    const char *const about[] = {"fdsl-bench", identity, NULL};
    return safetensors_write(path, about, tensors, count + model->tensor_count);
}

/* ---- The parameters ---- */

#define LIST_MAX (24 * (DATA_CHANNELS_MAX + 1))

/* Formats values as a JSON array: "[0.0127, 0.0131]". */
static void list(const float *values, uint32_t count, char text[LIST_MAX])
{
    *text = '\0';
    for (uint32_t i = 0; i < count; i++)
        text_append(text, LIST_MAX, "%s%.9g", i ? ", " : "[", (double)values[i]);
    text_append(text, LIST_MAX, "]");
}

enum status export_parameters(const struct train *train, const float *parameters, const char *identity,
                              const char *path)
{
    const struct model *model = train->model;
    const struct shape *in = &model->input;
    struct safetensor tensors[MODEL_TENSORS_MAX];
    char input[64], classes[16], scale[LIST_MAX], offset[LIST_MAX], depth[16] = "";
    if (model->volumetric)
        snprintf(depth, sizeof depth, "%" PRIu32 ", ", in->depth);
    snprintf(input, sizeof input, "[%" PRIu32 ", %s%" PRIu32 ", %" PRIu32 "]", in->channels, depth,
             in->height, in->width);
    snprintf(classes, sizeof classes, "%" PRIu32, model->classes);
    list(train->data->scale, in->channels, scale);
    list(train->data->offset, in->channels, offset);
    const char *const about[] = {"fdsl-bench", identity, "input",  input,  "classes", classes,
                                 "scale",      scale,    "offset", offset, NULL};
    describe_arena(model, "", parameters, tensors);
    return safetensors_write(path, about, tensors, model->tensor_count);
}
