/* Tests the vision transformers: parameters, names, initial values, work, weight decay, stochastic depth.
 * Their gradients are tested by test_train_net.c, and train-omp by test_train_omp.c. */
#include "core/variant.h"
#include "train_support.h"

static const struct shape picture = {3, 1, 224, 224};

static void build(const char *name, struct shape input, uint32_t classes, struct model *model)
{
    must(model_build(table_of(name), input, classes, model));
}

/* The numbers of timm's deit_tiny_patch16_224, deit_small_patch16_224, deit_base_patch16_224 and
 * vit_large_patch16_224. */
Test(train_vit, parameters_are_those_of_timm)
{
    struct model model;
    build("vit-tiny", picture, 1000, &model);
    cr_expect_eq(model.parameters, 5717416);
    build("vit-small", picture, 1000, &model);
    cr_expect_eq(model.parameters, 22050664);
    build("vit-base", picture, 1000, &model);
    cr_expect_eq(model.parameters, 86567656);
    cr_expect_eq(model.tensor_count, 152);
    build("vit-large", picture, 1000, &model);
    cr_expect_eq(model.parameters, 304326632);
    cr_expect_eq(model.tensor_count, 296);
    cr_expect_str_eq(model.tensors[291].name, "blocks.23.mlp.fc2.bias");
}

Test(train_vit, tensors_have_names_and_shapes_of_timm)
{
    static const struct {
        const char *name;
        uint32_t axes;
        uint64_t shape[4];
        bool decays;
    } known[] = {{"cls_token", 3, {1, 1, 192}, false},
                 {"pos_embed", 3, {1, 197, 192}, false},
                 {"patch_embed.proj.weight", 4, {192, 3, 16, 16}, true},
                 {"patch_embed.proj.bias", 1, {192}, false},
                 {"blocks.0.norm1.weight", 1, {192}, false},
                 {"blocks.0.norm1.bias", 1, {192}, false},
                 {"blocks.3.attn.qkv.weight", 2, {576, 192}, true},
                 {"blocks.3.attn.qkv.bias", 1, {576}, false},
                 {"blocks.11.attn.proj.weight", 2, {192, 192}, true},
                 {"blocks.11.norm2.bias", 1, {192}, false},
                 {"blocks.11.mlp.fc1.weight", 2, {768, 192}, true},
                 {"blocks.11.mlp.fc2.weight", 2, {192, 768}, true},
                 {"norm.weight", 1, {192}, false},
                 {"head.weight", 2, {1000, 192}, true},
                 {"head.bias", 1, {1000}, false}};
    struct model model;
    build("vit-tiny", picture, 1000, &model);
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        const struct model_tensor *tensor = tensor_of(&model, known[i].name);
        cr_expect_eq(tensor->axes, known[i].axes, "%s", known[i].name);
        cr_expect_eq(memcmp(tensor->shape, known[i].shape, known[i].axes * sizeof(uint64_t)), 0, "%s",
                     known[i].name);
        cr_expect_eq(tensor->decays, known[i].decays, "%s", known[i].name);
    }
    build("cnn", (struct shape){1, 1, 28, 28}, 10, &model);
    for (uint32_t t = 0; t < model.tensor_count; t++)
        cr_expect(model.tensors[t].decays, "%s", model.tensors[t].name);
}

/* Sets `mean` and `deviation` to those of a tensor's initial values. */
static void measure(const struct model *model, const float *parameters, const char *name, double *mean,
                    double *deviation)
{
    const struct model_tensor *tensor = tensor_of(model, name);
    double sum = 0, squares = 0;
    for (size_t i = 0; i < tensor->values; i++) {
        double value = parameters[tensor->first + i];
        sum += value;
        squares += value * value;
    }
    *mean = sum / (double)tensor->values;
    *deviation = sqrt(squares / (double)tensor->values - *mean * *mean);
}

/* The mean and the standard deviation of n values differ from those of the distribution by about
 * deviation / sqrt(n). */
Test(train_vit, initial_values_have_the_distributions_of_timm)
{
    static const struct {
        const char *name;
        double mean, deviation;
    } known[] = {{"pos_embed", 0, 0.02},
                 {"cls_token", 0, 1e-6},
                 {"patch_embed.proj.weight", 0, 1 / sqrt(3.0 * 768)}, /* uniform in +-1 / sqrt(768) */
                 {"blocks.0.attn.qkv.weight", 0, 0.02},
                 {"blocks.7.mlp.fc2.weight", 0, 0.02},
                 {"blocks.7.mlp.fc2.bias", 0, 0},
                 {"blocks.7.norm1.weight", 1, 0},
                 {"blocks.7.norm1.bias", 0, 0},
                 {"head.weight", 0, 0.02},
                 {"head.bias", 0, 0}};
    struct model model;
    build("vit-tiny", picture, 1000, &model);
    float *parameters = malloc(model.arena_values * sizeof *parameters);
    model_initialise(&model, 0, parameters);
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        double mean, deviation, error = 4 / sqrt((double)tensor_of(&model, known[i].name)->values);
        measure(&model, parameters, known[i].name, &mean, &deviation);
        cr_expect_leq(fabs(mean - known[i].mean), error * known[i].deviation, "%s: %g", known[i].name, mean);
        cr_expect_leq(fabs(deviation - known[i].deviation), error * known[i].deviation, "%s: %g",
                      known[i].name, deviation);
    }
    free(parameters);
}

/* Multiply-adds of the forward pass: patches, twelve blocks, head. */
Test(train_vit, flops_count_attention)
{
    const double tokens = 197, width = 192;
    const double forward =
        196 * 768 * width + 12 * (tokens * 12 * width * width + 2 * tokens * tokens * width) + width * 1000;
    struct model model;
    build("vit-tiny", picture, 1000, &model);
    cr_expect_eq(model.multiplications, forward);
    cr_expect_eq(model_flops(&model, &(struct model_savings){.backward = true}), 2 * forward);
    cr_expect_eq(model_flops(&model, &(struct model_savings){0}), 2 * (3 * forward - 196 * 768 * width));
}

Test(train_vit, rejects_sizes_that_patches_do_not_divide)
{
    struct model model;
    cr_expect_eq(model_build(table_of("vit-micro"), (struct shape){1, 1, 28, 30}, 10, &model), STATUS_USAGE);
    cr_expect(strstr(status_text(), "patches are 4 x 4 pixels, which do not divide samples of 28 x 30"), "%s",
              status_text());
}

/* Trains one step with and without weight decay. Exactly the tensors that decay must differ. */
static void check_decay(const struct engine *engine, const char *name, enum optimizer_kind kind)
{
    struct train_state ends[2];
    struct net net;
    net_open(&net, engine, table_of(name), (struct shape){1, 1, 8, 12}, 5, 7, 7, 0);
    net.train.optimizer =
        (struct optimizer){.kind = kind, .momentum = 0.9, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
    for (size_t i = 0; i < net.model.arena_values; i++) /* so that decay changes every parameter */
        net.initial[i] += 0.25f;
    for (int i = 0; i < 2; i++) {
        net.train.optimizer.weight_decay = 0.5 * i;
        net_reopen(&net, engine);
        cr_assert(train_state_new(net.model.arena_values, &ends[i]));
        must(engine->steps(net.state, 0, 0, 1));
        must(engine->get(net.state, &ends[i]));
    }
    for (uint32_t t = 0; t < net.model.tensor_count; t++) {
        const struct model_tensor *tensor = &net.model.tensors[t];
        bool same = memcmp(ends[0].parameters + tensor->first, ends[1].parameters + tensor->first,
                           tensor->values * sizeof(float)) == 0;
        cr_expect_eq(same, !tensor->decays, "%s, %s, %s", engine->name, name, tensor->name);
    }
    for (int i = 0; i < 2; i++)
        train_state_free(&ends[i]);
    net_close(&net);
}

/* Tests the reference and every engine of this machine that trains transformers. */
Test(train_vit, norms_biases_and_positions_do_not_decay)
{
    const struct resources resources = {.threads = 2};
    for (const struct variant_entry *entry = variant_table; entry < variant_table + variant_count; entry++) {
        struct model model;
        struct data data = {.shape = {1, 1, 8, 12}};
        const struct train train = {.model = &model, .data = &data};
        build("vit-micro", data.shape, 5, &model);
        if (strcmp(entry->workload, "train") != 0 || variant_available(entry, &resources) != STATUS_OK)
            continue;
        const struct engine *engine = entry->variant->traits;
        if (engine->accepts && engine->accepts(&train) != STATUS_OK)
            continue;
        check_decay(engine, "vit-micro", OPTIMIZER_ADAMW);
        check_decay(engine, "vit-micro", OPTIMIZER_SGD);
        check_decay(engine, "logreg", OPTIMIZER_ADAMW);
    }
    check_decay(&engine_oracle, "vit-micro", OPTIMIZER_ADAM);
}

/* The share of dropped samples must be the rate, the factors must keep the mean, and a rate of 0 must drop
 * nothing. */
Test(train_vit, stochastic_depth_drops_the_expected_share)
{
    static const float rates[] = {0, 0.0625f, 0.1f, 0.5f};
    for (size_t r = 0; r < COUNT_OF(rates); r++) {
        const uint32_t count = 100000;
        uint32_t dropped = 0;
        for (uint32_t sample = 0; sample < count; sample++) {
            float factor = draw_path(3, 1, sample, 5, rates[r]);
            dropped += factor == 0;
            cr_assert(factor == 0 || factor == 1 / (1 - rates[r]));
        }
        double error = 4 * sqrt(rates[r] * (1 - rates[r]) / count);
        cr_expect_leq(fabs((double)dropped / count - rates[r]), error, "%g: %u", (double)rates[r], dropped);
    }
}
