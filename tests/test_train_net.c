/* Tests the reference of training, called oracle. Compares the gradients of every layer and every network
 * with central differences. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/variant.h"
#include "train/trainer.h"
#include "train_support.h"
#include "train_transformers.h"

/* Central differences change a parameter by 2^-20 in both directions. Parameters are multiples of 2^-20, so
 * float represents the changed values exactly. The oracle computes in double precision. The truncation error
 * is about 1e-12, and the rounding error about 1e-10. */
#define REACH     0x1p-20f
#define TOLERANCE 1e-6

/* The minimum number of parameters to check per tensor. It is smaller for networks, because they have many
 * tensors, and because each kind of layer has its own test. */
static uint32_t checked = 12;
#define CHECKED_IN_NETS 4

/* Runs step 0 from these parameters. Returns its mean loss. */
static double loss_at(const struct net *net, float *parameters)
{
    struct train_totals totals;
    const struct train_state state = {parameters, net->zeros, net->zeros, {0, 0}, NULL};
    must(engine_oracle.set(net->state, &state));
    must(engine_oracle.steps(net->state, 0, 0, 1));
    must(engine_oracle.totals(net->state, &totals));
    cr_assert(isfinite(totals.loss));
    return totals.loss / (double)totals.samples;
}

static struct mixing mixing; /* mixing in the steps whose gradients are compared */
static enum loss_kind loss_kind;
static bool several; /* whether labels are multi-hot */

/* Compares the gradients of a step with central differences, for at least `checked` parameters of each
 * tensor. Compares all parameters of smaller tensors. */
static void check_gradients(const struct model_table *table, struct shape input, uint32_t classes,
                            uint32_t count, float smoothing)
{
    struct net net;
    net_open(&net, &engine_oracle, table, input, classes, count, count, smoothing);
    net.train.mixing = mixing;
    net.train.loss = loss_kind;
    if (several)
        data_random_multi_hot(&net.data);
    net_reopen(&net, &engine_oracle);
    const struct model *model = &net.model;
    float *parameters = net.initial, *gradients = calloc(model->arena_values, sizeof *gradients);
    /* With normally distributed initial values, the gradients would be too small to compare. */
    for (uint32_t t = 0; t < model->tensor_count; t++)
        for (size_t i = 0; model->tensors[t].initial == INITIAL_NORMAL && i < model->tensors[t].values; i++)
            parameters[model->tensors[t].first + i] *= 8;
    for (size_t i = 0; i < model->arena_values; i++)
        parameters[i] = roundf(parameters[i] / REACH) * REACH;
    loss_at(&net, parameters);
    must(engine_oracle.gradients(net.state, gradients));
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        double largest = 0, worst = 0;
        if (tensor->is_statistic) /* no parameter: test_train_resnet.c tests its values */
            continue;
        for (size_t i = 0; i < tensor->values; i++)
            largest = fmax(largest, fabs(gradients[tensor->first + i]));
        size_t stride = tensor->values < checked ? 1 : tensor->values / checked;
        for (size_t i = 0; i < tensor->values; i += stride) {
            float *parameter = &parameters[tensor->first + i], before = *parameter;
            *parameter = before + REACH;
            double above = loss_at(&net, parameters);
            *parameter = before - REACH;
            double below = loss_at(&net, parameters);
            *parameter = before;
            double difference = (above - below) / (2.0 * REACH);
            worst = worse(worst, fabs(difference - gradients[tensor->first + i]));
        }
        cr_expect_leq(worst, TOLERANCE * largest, "%s, %s: off by %g of %g", table->name, tensor->name, worst,
                      largest);
        cr_expect(classes == 1 || largest > 0, "%s, %s: no gradient", table->name, tensor->name);
    }
    free(gradients);
    net_close(&net);
}

LAYERS(linear, false, {.kind = LAYER_LINEAR, .channels = 5}, {.kind = LAYER_LINEAR});
LAYERS(relu, false, {.kind = LAYER_LINEAR, .channels = 9}, {.kind = LAYER_RELU}, {.kind = LAYER_LINEAR});
LAYERS(conv, false, {.kind = LAYER_CONV, .channels = 3, .kernel = {1, 3, 2}, .padding = {0, 1, 0}},
       {.kind = LAYER_CONV, .channels = 2, .kernel = {1, 2, 3}, .padding = {0, 0, 2}},
       {.kind = LAYER_LINEAR});
LAYERS(conv_deep, true, {.kind = LAYER_CONV, .channels = 2, .kernel = {3, 3, 3}, .padding = {1, 1, 1}},
       {.kind = LAYER_CONV, .channels = 3, .kernel = {2, 1, 2}, .padding = {1, 0, 0}},
       {.kind = LAYER_LINEAR});
LAYERS(pool, false, {.kind = LAYER_CONV, .channels = 3, .kernel = {1, 3, 3}, .padding = {0, 1, 1}},
       {.kind = LAYER_POOL, .kernel = {1, 2, 3}}, {.kind = LAYER_LINEAR});
LAYERS(dropout, false, {.kind = LAYER_LINEAR, .channels = 40}, {.kind = LAYER_DROPOUT, .rate = 0.25f},
       {.kind = LAYER_LINEAR});

LAYERS(mean, false, {.kind = LAYER_CONV, .channels = 3, .kernel = {1, 3, 3}, .padding = {0, 1, 1}},
       {.kind = LAYER_MEAN}, {.kind = LAYER_RELU}, {.kind = LAYER_LINEAR});
/* Adds outputs of a convolution, a ReLU, a pooling and an addition; one output is added twice. */
#define PLAIN(out)                                                                       \
    {                                                                                    \
        .kind = LAYER_CONV, .channels = out, .kernel = {1, 3, 3}, .padding = { 0, 1, 1 } \
    }
LAYERS(add, false, PLAIN(4), {.kind = LAYER_RELU}, PLAIN(4), {.kind = LAYER_DROPOUT, .rate = 0.25f},
       {.kind = LAYER_ADD, .back = 3}, PLAIN(4), {.kind = LAYER_ADD, .back = 2},
       {.kind = LAYER_ADD, .back = 3}, {.kind = LAYER_ADD, .back = 3}, {.kind = LAYER_RELU},
       {.kind = LAYER_POOL, .kernel = {1, 2, 1}}, PLAIN(4), {.kind = LAYER_ADD, .back = 2},
       {.kind = LAYER_LINEAR});
/* The pooling drops the last row of its input. This input is also added to the output of the next
 * convolution, which restores the height by padding. */
LAYERS(add_pool, false, PLAIN(2), {.kind = LAYER_RELU}, {.kind = LAYER_POOL, .kernel = {1, 2, 1}},
       {.kind = LAYER_CONV, .channels = 2, .kernel = {1, 1, 1}, .padding = {0, 2, 0}},
       {.kind = LAYER_ADD, .back = 3}, {.kind = LAYER_LINEAR});
/* Strides, convolutions without bias (a bias before a normalisation has no effect), overlapping windows with
 * padding, and a branch. */
LAYERS(batch_norm, false,
       {.kind = LAYER_CONV,
        .channels = 4,
        .kernel = {1, 3, 3},
        .padding = {0, 1, 1},
        .stride = 2,
        .no_bias = true},
       {.kind = LAYER_BATCH_NORM},
       {.kind = LAYER_POOL, .kernel = {1, 3, 3}, .padding = {0, 1, 1}, .stride = 2},
       {.kind = LAYER_CONV, .channels = 3, .kernel = {1, 3, 3}, .padding = {0, 1, 1}, .no_bias = true},
       {.kind = LAYER_BATCH_NORM},
       {.kind = LAYER_CONV, .channels = 3, .kernel = {1, 1, 1}, .no_bias = true, .skipped = 2},
       {.kind = LAYER_BATCH_NORM}, {.kind = LAYER_ADD, .back = 3}, {.kind = LAYER_MEAN},
       {.kind = LAYER_LINEAR});
LAYERS(add_rows, false, {.kind = LAYER_LINEAR, .channels = 9}, {.kind = LAYER_LINEAR, .channels = 9},
       {.kind = LAYER_ADD, .back = 2}, {.kind = LAYER_LINEAR});

static const struct shape small = {3, 1, 7, 5}, gray = {1, 1, 13, 11}, volume = {2, 4, 5, 3};

Test(train_net, gradients_of_layers_equal_central_differences)
{
    static const struct model_table *const tables[] = {&linear,  &relu, &conv, &pool,
                                                       &dropout, &mean, &add,  &add_rows};
    for (size_t i = 0; i < COUNT_OF(tables); i++)
        for (uint32_t count = 1; count <= 7; count += 6) {
            check_gradients(tables[i], small, 4, count, 0);
            check_gradients(tables[i], gray, 2, count, 0.1f);
        }
    for (size_t i = 0; i < COUNT_OF(transformers); i++)
        for (uint32_t count = 1; count <= 7; count += 6)
            check_gradients(transformers[i], small, 4, count, 0.1f);
    check_gradients(&conv_deep, volume, 3, 7, 0);
    check_gradients(&add_pool, small, 4, 7, 0);
}

Test(train_net, gradients_of_residual_networks_equal_central_differences, .timeout = 300)
{
    checked = CHECKED_IN_NETS;
    for (size_t i = 0; model_tables[i].name; i++)
        if (has_residual_blocks(&model_tables[i]))
            check_gradients(&model_tables[i], (struct shape){1, 1, 8, 9}, 3, 1, 0.1f);
}

/* Small batches, in which a sample changes the statistics of the others. */
Test(train_net, gradients_of_batch_normalisation_equal_central_differences, .timeout = 300)
{
    checked = CHECKED_IN_NETS;
    check_gradients(&batch_norm, small, 4, 7, 0);
    check_gradients(&batch_norm, gray, 2, 2, 0.1f);
    check_gradients(table_of("resnet-micro"), (struct shape){3, 1, 20, 17}, 3, 5, 0.1f);
}

Test(train_net, gradients_of_networks_equal_central_differences)
{
    checked = CHECKED_IN_NETS;
    for (size_t i = 0; model_tables[i].name; i++) {
        if (has_residual_blocks(&model_tables[i]) || is_large_network(&model_tables[i]) ||
            strcmp(model_tables[i].name, "resnet-micro") == 0)
            continue;
        bool deep = model_tables[i].volumetric;
        check_gradients(&model_tables[i], deep ? (struct shape){3, 4, 8, 8} : (struct shape){1, 1, 16, 16},
                        10, 3, 0);
        check_gradients(
            &model_tables[i],
            fitted(&model_tables[i], deep ? (struct shape){1, 5, 6, 7} : (struct shape){3, 1, 17, 15}), 3, 1,
            0.1f);
    }
}

LAYERS(norm_of_images, false, NORM, LAST);
LAYERS(patches_of_tokens, false, PATCHES(4, 1, 1), PATCHES(4, 1, 1), SELECT, LAST);
LAYERS(relu_of_tokens, false, PATCHES(4, 1, 1), {.kind = LAYER_RELU}, SELECT, LAST);
LAYERS(linear_of_tokens, false, PATCHES(4, 7, 1), LAST);
LAYERS(odd_heads, false, PATCHES(9, 7, 1), ATTENTION(2), SELECT, LAST);
LAYERS(adds_nothing, false, {.kind = LAYER_LINEAR}, {.kind = LAYER_ADD, .back = 2});
LAYERS(adds_itself, false, {.kind = LAYER_LINEAR}, {.kind = LAYER_LINEAR}, {.kind = LAYER_ADD, .back = 1});
LAYERS(adds_relu_in_place, false, {.kind = LAYER_LINEAR}, {.kind = LAYER_RELU}, {.kind = LAYER_LINEAR},
       {.kind = LAYER_ADD, .back = 3});
LAYERS(adds_another_shape, false, {.kind = LAYER_LINEAR, .channels = 3}, {.kind = LAYER_LINEAR},
       {.kind = LAYER_ADD, .back = 2});

/* Tables that no engine can compute must be rejected. */
Test(train_net, rejects_impossible_tables)
{
    static const struct {
        const struct model_table *table;
        const char *words;
    } faults[] = {{&adds_nothing, "add1: it does not add the output of an earlier layer"},
                  {&adds_itself, "add1: it does not add the output of an earlier layer"},
                  {&adds_relu_in_place, "add1: it adds the output of fc1, which relu1 changes in place"},
                  {&norm_of_images, "norm1: a network cannot have such a layer here"},
                  {&patches_of_tokens, "patches2: a network cannot have such a layer here"},
                  {&relu_of_tokens, "relu1: a network cannot have such a layer here"},
                  {&linear_of_tokens, "fc1: its input has several tokens, but must have one"},
                  {&odd_heads, "attention1: its heads do not divide tokens of 9"},
                  {&adds_another_shape, "add1: it adds the output of fc1, which has another shape"}};
    struct model model;
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        cr_expect_eq(model_build(faults[i].table, small, 4, &model), STATUS_FAILED);
        cr_expect(strstr(status_text(), faults[i].words), "%s", status_text());
    }
}

/* With one class, the loss and all gradients are 0 for any network. */
Test(train_net, with_one_class_loss_and_gradients_are_0)
{
    struct net net;
    net_open(&net, &engine_oracle, &model_tables[1], (struct shape){1, 1, 16, 16}, 1, 5, 2, 0);
    cr_expect_eq(loss_at(&net, net.initial), 0);
    net_close(&net);
    check_gradients(&linear, small, 1, 3, 0);
}

Test(train_net, models_have_the_expected_number_of_parameters)
{
    static const struct {
        const char *name;
        struct shape input;
        size_t parameters;
    } known[] = {{"logreg", {1, 1, 28, 28}, 7850},     {"lenet", {1, 1, 28, 28}, 61706},
                 {"cnn", {1, 1, 28, 28}, 1199882},     {"cnn", {3, 1, 32, 32}, 1626442},
                 {"cnn-fdsl", {1, 1, 28, 28}, 481482}, {"cnn-fdsl", {1, 1, 224, 224}, 481482},
                 {"cnn-deep", {1, 1, 28, 28}, 148618}};
    for (size_t i = 0; i < COUNT_OF(known); i++)
        for (size_t t = 0; model_tables[t].name; t++)
            if (strcmp(model_tables[t].name, known[i].name) == 0) {
                struct model model;
                must(model_build(&model_tables[t], known[i].input, 10, &model));
                cr_expect_eq(model.parameters, known[i].parameters, "%s: %zu", known[i].name,
                             model.parameters);
            }
}

LAYERS(known, false, {.kind = LAYER_CONV, .channels = 1, .kernel = {1, 2, 2}}, {.kind = LAYER_RELU},
       {.kind = LAYER_POOL, .kernel = {1, 2, 2}}, {.kind = LAYER_LINEAR});

/* A convolution of the inputs 1 to 9 with the weights 1, 10, 100 and 1000 gives 5421, 6532, 8754 and 9865.
 * Max-pooling selects the largest value x, and the linear layer computes 2 x - 1. With negative weights, ReLU
 * gives x = 0. */
Test(train_net, forward_matches_hand_computed_values)
{
    struct net net;
    float logits[2];
    net_open(&net, &engine_naive, &known, (struct shape){1, 1, 3, 3}, 1, 5, 1, 0);
    data_normalise(&net.data, false);
    net.data.scale[0] = 1; /* raw bytes */
    for (int i = 0; i < 9; i++)
        ((uint8_t *)net.data.sets[DATA_TEST].values)[i] = (uint8_t)(i + 1);
    for (int sign = 1; sign >= -1; sign -= 2) {
        float *parameters = net.initial;
        for (int i = 0; i < 4; i++)
            parameters[net.model.layers[0].weight + (size_t)i] = (float)sign * powf(10, (float)i);
        parameters[net.model.layers[0].bias] = 0;
        parameters[net.model.layers[3].weight] = 2;
        parameters[net.model.layers[3].bias] = -1;
        const struct train_state state = {parameters, net.zeros, net.zeros, {0, 0}, NULL};
        must(engine_naive.set(net.state, &state));
        must(engine_naive.evaluate(net.state, DATA_TEST, 0, 1, logits));
        cr_expect_eq(logits[0], sign > 0 ? 2 * 9865 - 1 : -1, "%g", logits[0]);
    }
    net_close(&net);
}

/* With a batch of 1, a sample is mixed with itself. */
Test(train_net, gradients_of_both_losses_equal_central_differences)
{
    static const struct mixing mixings[] = {{0, 0}, {0.8, 0}, {0, 1}};
    for (size_t i = 0; i < COUNT_OF(mixings); i++)
        for (int kind = 0; kind < 3; kind++) {
            mixing = mixings[i];
            loss_kind = kind ? LOSS_BINARY : LOSS_CROSS_ENTROPY;
            several = kind == 2;
            check_gradients(&conv, small, 4, 7, 0);
            check_gradients(&conv_deep, volume, 3, 5, 0.1f);
            check_gradients(&relu, gray, 2, 1, 0.1f);
        }
}

/* ---- Non-finite values ---- */

/* Each test of a tensor runs the network. So tests of networks with many tensors use only every third
 * tensor. */
#define LARGE_STRIDE 3

/* Runs the first step from net->initial. Expects a loss that is not finite, and this step reported as the bad
 * step. The reference must name the layer in which the NaN first appears. */
static void expect_bad(struct net *net, const char *what, const char *layer)
{
    struct train_totals totals;
    const char *found = NULL;
    const struct train_state begin = {.parameters = net->initial, .m = net->zeros, .v = net->zeros};
    must(net->engine->set(net->state, &begin));
    must(net->engine->steps(net->state, 0, 0, 1));
    must(net->engine->totals(net->state, &totals));
    cr_expect(!isfinite(totals.loss), "%s, %s: a NaN in %s leaves a loss of %g", net->engine->name,
              net->model.name, what, totals.loss);
    cr_expect_eq(totals.bad_step, 0, "%s, %s: a NaN in %s is not detected", net->engine->name,
                 net->model.name, what);
    must(naive_find_bad_layer(&net->train, &begin, 0, 0, &found));
    cr_expect_str_eq(found, layer, "%s: a NaN in %s is reported in layer %s", net->model.name, what, found);
}

/* Plants a NaN in a sample, then in each parameter tensor, one at a time. Does nothing if the engine rejects
 * the network. */
static void plant_nans(const struct engine *engine, const struct model_table *table)
{
    struct net net;
    net_open(&net, &engine_naive, table, small_input(table), 10, 7, 7, 0);
    data_to_halves(&net.data);
    if (engine->accepts && engine->accepts(&net.train) != STATUS_OK) {
        net_close(&net);
        return;
    }
    uint16_t *middle = (uint16_t *)net.data.sets[DATA_TRAIN].values + 9 * net.data.sample_values / 2,
             before = *middle;
    *middle = 0x7E00; /* a NaN in the fifth sample, after the normalisation was computed */
    net_reopen(&net, engine);
    expect_bad(&net, "a sample", net.model.layers[0].name);
    *middle = before;
    net_reopen(&net, engine);
    for (uint32_t t = 0; t < net.model.tensor_count; t += has_residual_blocks(table) ? LARGE_STRIDE : 1) {
        const struct model_tensor *tensor = &net.model.tensors[t];
        const struct layer *layer = net.model.layers;
        if (tensor->is_statistic) /* no step reads it */
            continue;
        float *last = &net.initial[tensor->first + tensor->values - 1], fine = *last;
        while (layer->weight_values == 0 || (tensor->first != layer->weight && tensor->first != layer->bias))
            layer++;
        *last = NAN;
        expect_bad(&net, tensor->name, layer->name);
        *last = fine;
    }
    net_close(&net);
}

/* Tests the oracle and every engine that runs on this machine. */
Test(train_net, nan_is_a_bad_loss_and_its_layer_is_named, .timeout = 300)
{
    const struct resources resources = {.threads = 2};
    for (size_t i = 0; model_tables[i].name; i++) {
        if (is_large_network(&model_tables[i]))
            continue;
        plant_nans(&engine_oracle, &model_tables[i]);
        for (const struct variant_entry *entry = variant_table; entry < variant_table + variant_count;
             entry++)
            if (strcmp(entry->workload, "train") == 0 && variant_available(entry, &resources) == STATUS_OK)
                plant_nans(entry->variant->traits, &model_tables[i]);
    }
}

/* Trains with a NaN among the parameters; sets `message` to the error. */
static void fail_with(const char *generator, char *message, size_t size)
{
    struct net net;
    struct run_time unused;
    void *trainer;
    const struct resources resources = {.threads = 1};
    net_open(&net, &engine_naive, &model_tables[0], (struct shape){1, 1, 8, 8}, 4, 12, 4, 0);
    net.initial[0] = NAN;
    struct train_job job = {.train = net.train, .initial = net.initial, .epochs = 1, .keep = 1};
    job.train.generator = generator;
    must(trainer_open(&engine_naive, &resources, &job, &trainer));
    cr_assert_eq(trainer_run(trainer, 0, &unused), STATUS_FAILED);
    snprintf(message, size, "%s", status_text());
    trainer_close(trainer);
    net_close(&net);
}

/* If only the engine can generate the images, the reference cannot find the layer, and the message names
 * none.
 */
Test(train_net, bad_layers_are_searched_only_on_the_same_images)
{
    static const char *const generators[] = {NULL, "fused", "omp", "bat", "gbase"};
    const char *wanted = "epoch 1, step 1 of 3: the loss is not finite; ";
    char message[1024];
    for (size_t i = 0; i < COUNT_OF(generators); i++) {
        fail_with(generators[i], message, sizeof message);
        const char *found = strstr(message, wanted);
        cr_assert_not_null(found, "%s", message);
        found += strlen(wanted);
        const char *next =
            i < 3 ? "first non-finite result: fc1; lower --lr" : "lower --lr, or continue with";
        cr_expect(strncmp(found, next, strlen(next)) == 0, "%s", message);
    }
}

/* ---- Properties that differences cannot test ---- */

/* Sets the first layer's parameters to 0, so its outputs are exactly 0. They must pass no gradient back,
 * because ReLU's gradient at 0 is defined as 0. */
static void expect_no_gradient_at_zero(const struct engine *engine)
{
    struct net net;
    net_open(&net, &engine_oracle, &relu, small, 4, 7, 7, 0);
    float *gradients = malloc(net.model.arena_values * sizeof *gradients);
    for (uint32_t t = 0; t < 2; t++)
        memset(net.initial + net.model.tensors[t].first, 0,
               net.model.tensors[t].values * sizeof *net.initial);
    net_reopen(&net, engine);
    must(engine->steps(net.state, 0, 0, 1));
    must(engine->gradients(net.state, gradients));
    for (uint32_t t = 0; t < 2; t++)
        for (size_t i = 0; i < net.model.tensors[t].values; i++)
            cr_assert_eq(gradients[net.model.tensors[t].first + i], 0, "%s: tensor %u", engine->name, t);
    double last = 0;
    for (size_t i = 0; i < net.model.tensors[3].values; i++)
        last += fabs(gradients[net.model.tensors[3].first + i]);
    cr_assert_gt(last, 0, "%s: the last layer has no gradient", engine->name);
    free(gradients);
    net_close(&net);
}

Test(train_net, relu_has_no_gradient_at_zero)
{
    const struct resources resources = {.threads = 2};
    expect_no_gradient_at_zero(&engine_oracle);
    for (const struct variant_entry *entry = variant_table; entry < variant_table + variant_count; entry++)
        if (strcmp(entry->workload, "train") == 0 && strncmp(entry->name, "train-omp", 9) == 0 &&
            variant_available(entry, &resources) == STATUS_OK)
            expect_no_gradient_at_zero(entry->variant->traits);
}

/* The oracle computes samples, and parts of layers, on several threads. Two steps and an evaluation must give
 * the same bits on one thread and on more threads than a layer has channels. */
Test(train_net, the_oracle_does_not_depend_on_the_number_of_threads)
{
    for (size_t i = 0; model_tables[i].name; i++) {
        float logits[2][23 * 3];
        struct train_state states[2] = {{0}};
        struct train_totals totals[2];
        struct net net;
        if (is_large_network(&model_tables[i]))
            continue;
        net_open(&net, &engine_oracle, &model_tables[i], small_input(&model_tables[i]), 3, 23, 12, 0.1f);
        const struct train_state begin = {net.initial, net.zeros, net.zeros, {0, 0}, NULL};
        for (int way = 0; way < 2; way++) {
            const struct resources resources = {.threads = way ? 19 : 1};
            void *state = NULL;
            cr_assert(train_state_for(&net.train, &states[way]));
            must(engine_oracle.open(&net.train, &resources, &state));
            must(engine_oracle.set(state, &begin));
            must(engine_oracle.steps(state, 0, 0, 2));
            must(engine_oracle.totals(state, &totals[way]));
            must(engine_oracle.get(state, &states[way]));
            must(engine_oracle.evaluate(state, DATA_TRAIN, 0, 23, logits[way]));
            engine_oracle.close(state);
        }
        size_t bytes = net.model.arena_values * sizeof(float);
        cr_expect(memcmp(states[0].parameters, states[1].parameters, bytes) == 0, "%s", model_tables[i].name);
        cr_expect(memcmp(states[0].m, states[1].m, bytes) == 0, "%s", model_tables[i].name);
        cr_expect(memcmp(logits[0], logits[1], sizeof logits[0]) == 0, "%s", model_tables[i].name);
        cr_expect(totals[0].loss == totals[1].loss && totals[0].correct == totals[1].correct, "%s",
                  model_tables[i].name);
        train_state_free(&states[0]);
        train_state_free(&states[1]);
        net_close(&net);
    }
}

/* Run n of inference evaluates batch n mod (number of full batches). Here, 5 samples give two full batches of
 * 2. */
Test(train_net, inference_runs_evaluate_consecutive_batches)
{
    const struct resources resources = {.threads = 2};
    float wanted[5 * 4], logits[2 * 4];
    struct run_time unused;
    struct net net;
    void *state;
    net_open(&net, &engine_oracle, &relu, small, 4, 7, 2, 0);
    must(engine_oracle.evaluate(net.state, DATA_TEST, 0, 5, wanted));
    net.train.forward_only = true;
    const struct infer_job job = {net.train, net.initial};
    must(inferrer_open(&engine_oracle, &resources, &job, &state));
    for (uint64_t number = 0; number < 5; number++) {
        struct infer_result result = {.logits = logits};
        must(inferrer_run(state, number, &unused));
        must(inferrer_fetch(state, &result));
        cr_expect_eq(result.number, number);
        for (int i = 0; i < 8; i++)
            cr_expect_eq(logits[i], wanted[number % 2 * 8 + (uint64_t)i], "run %d, logit %d", (int)number, i);
    }
    inferrer_close(state);
    net_close(&net);
}
