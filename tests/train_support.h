/* Shared by the training suites: small random data sets, and an engine that uses them. */
#ifndef FDSL_TESTS_TRAIN_SUPPORT_H
#define FDSL_TESTS_TRAIN_SUPPORT_H

#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "must.h"
#include "train/engine.h"

/* Defines a model table. */
#define LAYERS(name_, deep, ...)                                     \
    static const struct layer_spec name_##_layers[] = {__VA_ARGS__}; \
    static const struct model_table name_ = {#name_, "", deep, name_##_layers, COUNT_OF(name_##_layers)}

/* Returns the larger value. NaN counts as the largest, whereas fmax() ignores it. */
static inline double worse(double a, double b)
{
    return isnan(a) || a > b ? a : b;
}

/* Returns the norm of the difference of two arrays, divided by the norm of `wanted`. */
static inline double relative_error(const float *mine, const float *wanted, size_t count)
{
    double off = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        off += ((double)mine[i] - wanted[i]) * ((double)mine[i] - wanted[i]);
        norm += (double)wanted[i] * wanted[i];
    }
    return sqrt(off / norm);
}

/* Returns the model table with this name, which must exist. */
static inline const struct model_table *table_of(const char *name)
{
    const struct model_table *table = model_tables;
    while (strcmp(table->name, name) != 0)
        table++;
    return table;
}

/* Returns the tensor with this name. Ends the test if there is none. */
static inline const struct model_tensor *tensor_of(const struct model *model, const char *name)
{
    for (uint32_t t = 0; t < model->tensor_count; t++)
        if (strcmp(model->tensors[t].name, name) == 0)
            return &model->tensors[t];
    cr_assert_fail("no tensor is named %s", name);
    return NULL;
}

/* Returns whether the network is large. Tests of all networks leave out these networks, because vit-micro and
 * resnet-micro have the same kinds of layers. */
static inline bool is_large_network(const struct model_table *table)
{
    return (table->layers[0].kind == LAYER_PATCHES && table->layers[0].channels > 32) ||
           strcmp(table->name, "resnet50") == 0;
}

/* For a transformer, rounds the height and width up to multiples of the patch size. For other networks,
 * returns the shape unchanged. */
static inline struct shape fitted(const struct model_table *table, struct shape shape)
{
    const struct layer_spec *first = &table->layers[0];
    if (first->kind == LAYER_PATCHES) {
        shape.height += (first->kernel[1] - shape.height % first->kernel[1]) % first->kernel[1];
        shape.width += (first->kernel[2] - shape.width % first->kernel[2]) % first->kernel[2];
    }
    return shape;
}

/* Returns whether the network has residual blocks, and therefore many layers. */
static inline bool has_residual_blocks(const struct model_table *table)
{
    return strcmp(table->name, "cnn-fdsl") == 0 || strcmp(table->name, "cnn-deep") == 0;
}

/* Returns an input with an odd and an even size, for tests that run each network many times. */
static inline struct shape small_input(const struct model_table *table)
{
    struct shape input = {1, 1, 13, 12};
    if (table->volumetric)
        input = (struct shape){1, 4, 9, 8};
    else if (has_residual_blocks(table))
        input = (struct shape){1, 1, 9, 8};
    return fitted(table, input);
}

/* An engine, its model and its data. The engine keeps pointers into this struct, so it must not be moved. */
struct net {
    const struct engine *engine;
    struct model model;
    struct data data;
    struct train train;
    void *state;
    float *initial, *zeros; /* initial parameters; zeros for m and v; model.arena_values values each */
};

/* Creates the training set and the test set with random bytes and random labels. */
static inline void data_random(struct data *data, struct shape shape, uint32_t classes, uint32_t train_count,
                               uint32_t test_count)
{
    const uint32_t counts[DATA_PARTS] = {train_count, test_count};
    *data = (struct data){.shape = shape, .type = DTYPE_U8, .classes = classes};
    data->sample_values = data->sample_bytes = shape_values(&shape);
    for (uint32_t part = 0; part < DATA_PARTS; part++) {
        struct data_set *set = &data->sets[part];
        set->count = counts[part];
        set->values = malloc(set->count * data->sample_bytes);
        set->labels = malloc(set->count * sizeof *set->labels);
        for (size_t i = 0; i < set->count * data->sample_bytes; i++)
            ((uint8_t *)set->values)[i] = (uint8_t)philox(philox_key(1), (uint32_t)i, part, 0, 0).word[0];
        for (uint32_t i = 0; i < set->count; i++)
            set->labels[i] = philox_below(philox(philox_key(2), i, part, 0, 0).word[0], classes);
    }
    data_normalise(data, true);
}

/* Replaces the labels by random multi-hot labels, of which some have no class. */
static inline void data_random_multi_hot(struct data *data)
{
    const uint32_t words = multi_hot_words(data->classes);
    data->multi_hot = true;
    for (uint32_t part = 0; part < DATA_PARTS; part++) {
        struct data_set *set = &data->sets[part];
        set->multi_hot = calloc(set->count * words, sizeof *set->multi_hot);
        for (uint32_t i = 0; i < set->count; i++) {
            set->labels[i] = i;
            for (uint32_t k = 0; k < data->classes; k++)
                data_multi_hot(data, set, i)[k / 32] |=
                    (uint32_t)(philox(philox_key(3), i, part, k, 0).word[0] % 3 == 0) << k % 32;
        }
    }
}

/* Replaces the training samples by random gray canvases, from which the samples are cropped. */
static inline void data_add_canvases(struct data *data, uint32_t height, uint32_t width)
{
    struct data_set *set = &data->sets[DATA_TRAIN];
    data->canvas = (struct shape){1, 1, height, width};
    data->canvas_bytes = shape_values(&data->canvas);
    free(set->values);
    set->values = malloc(set->count * data->canvas_bytes);
    for (size_t i = 0; i < set->count * data->canvas_bytes; i++)
        ((uint8_t *)set->values)[i] = (uint8_t)philox(philox_key(8), (uint32_t)i, 0, 0, 1).word[0];
    data_normalise(data, true);
}

/* Opens an engine with the model's initial parameters and `count` random samples. */
static inline void net_open(struct net *net, const struct engine *engine, const struct model_table *table,
                            struct shape input, uint32_t classes, uint32_t count, uint32_t batch,
                            float smoothing)
{
    const struct resources resources = {.threads = 2};
    *net = (struct net){.engine = engine};
    data_random(&net->data, input, classes, count, 5);
    must(model_build(table, input, classes, &net->model));
    net->train = (struct train){.model = &net->model,
                                .data = &net->data,
                                .seed = 7,
                                .batch = batch,
                                .optimizer = {.kind = OPTIMIZER_SGD, .momentum = 0.9},
                                .schedule = {.rate = 0.01},
                                .smoothing = smoothing};
    net->initial = malloc(net->model.arena_values * sizeof(float));
    net->zeros = calloc(net->model.arena_values, sizeof(float));
    model_initialise(&net->model, 3, net->initial);
    must(engine->open(&net->train, &resources, &net->state));
    const struct train_state state = {net->initial, net->zeros, net->zeros, {0, 0}, NULL};
    must(engine->set(net->state, &state));
}

/* Opens an engine again, after the data or the parameters of training have changed. The engine starts with
 * the initial parameters. */
static inline void net_reopen(struct net *net, const struct engine *engine)
{
    const struct resources resources = {.threads = 2};
    net->engine->close(net->state);
    net->engine = engine;
    must(engine->open(&net->train, &resources, &net->state));
    const struct train_state begin = {.parameters = net->initial, .m = net->zeros, .v = net->zeros};
    must(net->engine->set(net->state, &begin));
}

/* Replaces the bytes of all samples by half-precision values from 1 to 2. */
static inline void data_to_halves(struct data *data)
{
    data->type = DTYPE_F16;
    data->sample_bytes = 2 * data->sample_values;
    for (int part = 0; part < DATA_PARTS; part++) {
        struct data_set *set = &data->sets[part];
        size_t count = set->count * data->sample_values;
        uint8_t *bytes = set->values;
        uint16_t *halves = malloc(count * sizeof *halves);
        for (size_t i = 0; i < count; i++)
            halves[i] = (uint16_t)(0x3C00 | bytes[i] << 2);
        free(bytes);
        set->values = halves;
    }
    data_normalise(data, true);
}

/* Returns every augmentation at once, with three copies of each sample, for networks with this input. */
static inline struct augment augment_all(uint32_t height, uint32_t width)
{
    return (struct augment){.shift = 1,
                            .flip = true,
                            .crop = true,
                            .operations = 2,
                            .magnitude = 28,
                            .repeats = 3,
                            .erasing = 0.5f,
                            .height = height,
                            .width = width};
}

static inline void net_close(struct net *net)
{
    net->engine->close(net->state);
    data_close(&net->data);
    free(net->initial);
    free(net->zeros);
}

#endif
