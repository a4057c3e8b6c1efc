/* Tests features of training recipes: clipping, layer decay, the option for stochastic depth, the moving
 * average of the parameters, and steps in parts (--accumulate). Tests every engine of this machine. */
#ifdef _OPENMP
#include "../cpu/train/omp_kernel.h"
#endif
#include "core/portable.h"
#include "core/variant.h"
#include "train_support.h"

TestSuite(train_optim, .timeout = 120);

/* Calls `check` for the oracle and for each engine of this machine that can train the network. */
static void for_engines(const char *name, void (*check)(struct net *net, const struct engine *engine))
{
    const struct resources resources = {.threads = 2};
    struct net net;
    net_open(&net, &engine_oracle, table_of(name), (struct shape){1, 1, 16, 16}, 5, 27, 11, 0.1f);
    check(&net, &engine_oracle);
    for (const struct variant_entry *entry = variant_table; entry < variant_table + variant_count; entry++) {
        if (strcmp(entry->workload, "train") != 0 || variant_available(entry, &resources) != STATUS_OK)
            continue;
        const struct engine *engine = entry->variant->traits;
        net.train.optimizer = (struct optimizer){.clip_norm = 1, .average = 0.5};
        if (!engine->accepts || engine->accepts(&net.train) == STATUS_OK)
            check(&net, engine);
    }
    net_close(&net);
}

static void for_networks(void (*check)(struct net *net, const struct engine *engine))
{
    for_engines("lenet", check);
#ifndef FDSL_SANITIZED /* with sanitizers, its many layers take minutes */
    for_engines("cnn-fdsl", check);
#endif
    for_engines("vit-micro", check);
}

static struct train_state new_state(const struct net *net)
{
    struct train_state state;
    cr_assert(train_state_for(&net->train, &state));
    return state;
}

/* Trains the first `count` steps of epoch 0, and returns the state after them. The loss scale, if the engine
 * has one, is too small for an overflow. */
static struct train_state train_steps_of(struct net *net, const struct engine *engine, uint32_t count)
{
    struct train_state end = new_state(net);
    const struct train_state begin = {
        .parameters = net->initial, .m = net->zeros, .v = net->zeros, .scale = {1024, 0}};
    net_reopen(net, engine);
    must(engine->set(net->state, &begin));
    must(engine->steps(net->state, 0, 0, count));
    must(engine->get(net->state, &end));
    return end;
}

/* Returns the Euclidean norm of one[i] - other[i]; `other` may be NULL. */
static double distance(const float *one, const float *other, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += pow((double)one[i] - (other ? other[i] : 0), 2);
    return sqrt(sum);
}

/* ---- Clipping ---- */

Test(train_optim, clip_factors_equal_those_computed_by_hand)
{
    cr_expect_float_eq(optimizer_clip(1, 4), 1 / 4.000001, 1e-15);
    cr_expect_eq(optimizer_clip(1, 0.5), 1);
    cr_expect_eq(optimizer_clip(1, 1), 1 / 1.000001);
    cr_expect_eq(optimizer_clip(1, 0), 1);
    cr_expect_eq(optimizer_clip(1, INFINITY), 0);
}

/* With plain SGD and a rate of 1, the parameters change by the clipped gradients. */
static void check_clip(struct net *net, const struct engine *engine)
{
    const size_t values = net->model.arena_values;
    float *gradients = malloc(values * sizeof *gradients);
    struct train_totals totals;
    net->train.schedule.rate = 1;
    net->train.optimizer = (struct optimizer){.clip_norm = 0.01};
    struct train_state end = train_steps_of(net, engine, 1);
    must(engine->gradients(net->state, gradients));
    must(engine->totals(net->state, &totals));
    const double norm = distance(gradients, NULL, values);
    cr_expect_eq(totals.normed, 1);
    cr_expect_float_eq(totals.norms, norm, 1e-6 * norm, "%s: %g, not %g", engine->name, totals.norms, norm);
    cr_expect_gt(norm, 0.02, "%s", engine->name);
    cr_expect_float_eq(distance(end.parameters, net->initial, values), 0.01, 1e-5, "%s", engine->name);
    for (size_t i = 0; i < values; i++)
        cr_assert_float_eq(net->initial[i] - end.parameters[i], gradients[i] * 0.01 / (norm + 1e-6), 3e-7,
                           "%s: %zu", engine->name, i);
    train_state_free(&end);
    free(gradients);
}

Test(train_optim, gradients_are_clipped_to_the_norm)
{
    for_networks(check_clip);
}

/* Expects that a step of plain SGD with a rate of 1 changes the values of a unit by their gradients, times
 * `clip`, within +-`most`. Counts values that clipping changes. */
static uint32_t expect_unit(const struct net *net, const struct engine *engine, const struct train_state *end,
                            const float *gradients, size_t first, size_t count, double clip, double most)
{
    uint32_t changed = 0;
    for (size_t i = first; i < first + count; i++) {
        const double clipped = fmax(-most, fmin(most, gradients[i] * clip));
        cr_assert_float_eq(net->initial[i] - end->parameters[i], clipped, 3e-7, "%s: %zu", engine->name, i);
        changed += clipped != gradients[i];
    }
    return changed;
}

/* Clips in another way, and compares each unit. engine->gradients() are those before clipping. */
static void check_units(struct net *net, const struct engine *engine, const struct optimizer *optimizer)
{
    const size_t values = net->model.arena_values;
    const double most = optimizer->clip_value > 0 ? optimizer->clip_value : INFINITY;
    float *gradients = malloc(values * sizeof *gradients);
    uint32_t changed = 0;
    net->train.schedule.rate = 1;
    net->train.optimizer = *optimizer;
    struct train_state end = train_steps_of(net, engine, 1);
    must(engine->gradients(net->state, gradients));
    for (uint32_t t = 0; t < net->model.tensor_count; t++) {
        const struct model_tensor *tensor = &net->model.tensors[t];
        const size_t rows = train_rows_of(tensor), columns = tensor->values / rows;
        for (size_t r = 0; r < rows; r++) {
            const size_t first = tensor->first + r * columns;
            const double of = pow(distance(net->initial + first, NULL, columns), 2),
                         norm = pow(distance(gradients + first, NULL, columns), 2);
            const double clip = optimizer->clip_adaptive > 0 && !tensor->head
                                    ? optimizer_clip_unit(optimizer->clip_adaptive, of, norm)
                                    : 1;
            changed += expect_unit(net, engine, &end, gradients, first, columns, clip, most);
        }
    }
    cr_expect_gt(changed, 100, "%s: clipping changed %u values", engine->name, changed);
    train_state_free(&end);
    free(gradients);
}

static void check_adaptive(struct net *net, const struct engine *engine)
{
    check_units(net, engine, &(struct optimizer){.clip_adaptive = 0.001});
}

static void check_value(struct net *net, const struct engine *engine)
{
    check_units(net, engine, &(struct optimizer){.clip_value = 0.0003});
}

Test(train_optim, gradients_are_clipped_per_unit)
{
    for_networks(check_adaptive);
}

Test(train_optim, gradients_are_clipped_to_the_value)
{
    for_networks(check_value);
}

/* The second step of Muon must be that which follows from the momenta, in any precision of the gradients. A
 * change that is 5 % too large must be found. */
static void check_matrices(struct net *net, const struct engine *engine)
{
    net->train.schedule = (struct schedule){.rate = 0.001};
    net->train.optimizer = (struct optimizer){.kind = OPTIMIZER_MUON,
                                              .momentum = 0.9,
                                              .beta1 = 0.9,
                                              .beta2 = 0.99,
                                              .epsilon = 1e-8,
                                              .weight_decay = 0.1,
                                              .matrix_rate = 20,
                                              .average = 0.5};
    struct train_state begin = train_steps_of(net, engine, 1), end = train_steps_of(net, engine, 2);
    uint32_t matrices = 0;
    for (uint32_t t = 0; t < net->model.tensor_count; t++) {
        const struct model_tensor *tensor = &net->model.tensors[t];
        if (!tensor->hidden)
            continue;
        const double drift = oracle_matrix_drift(&net->train, tensor, 1, &begin, &end);
        cr_expect(drift <= engine->bounds.drift, "%s: %s: %g", engine->name, tensor->name, drift);
        for (size_t i = tensor->first; i < tensor->first + tensor->values; i++)
            end.parameters[i] += 0.05f * (end.parameters[i] - begin.parameters[i]);
        const double wrong = oracle_matrix_drift(&net->train, tensor, 1, &begin, &end);
        cr_expect(wrong > 0.03 && wrong > drift, "%s: %s: %g", engine->name, tensor->name, wrong);
        matrices++;
    }
    cr_expect_gt(matrices, 2);
    train_state_free(&begin);
    train_state_free(&end);
}

Test(train_optim, matrices_follow_their_momenta)
{
    for_networks(check_matrices);
}

/* Clipping to a norm that no gradient reaches must not change a bit. Without clipping, no norm is
 * computed. */
static void check_no_clip(struct net *net, const struct engine *engine)
{
    struct train_state ends[2];
    struct train_totals totals[2];
    for (int i = 0; i < 2; i++) {
        net->train.optimizer =
            (struct optimizer){.kind = OPTIMIZER_SGD, .momentum = 0.9, .clip_norm = i ? 1e6 : 0};
        ends[i] = train_steps_of(net, engine, 2);
        must(engine->totals(net->state, &totals[i]));
    }
    cr_expect_eq(memcmp(ends[0].parameters, ends[1].parameters, net->model.arena_values * sizeof(float)), 0,
                 "%s", engine->name);
    cr_expect(totals[0].normed == 0 && totals[1].normed == 2, "%s", engine->name);
    for (int i = 0; i < 2; i++)
        train_state_free(&ends[i]);
}

Test(train_optim, large_norms_change_nothing)
{
    for_networks(check_no_clip);
}

/* ---- Layer decay and stochastic depth ---- */

/* Powers of the factor, as timm's param_groups_layer_decay() has them for a ViT with two blocks. */
static const struct {
    const char *tensor;
    uint32_t power;
} powers[] = {
    {"patch_embed.proj.weight", 3},
    {"patch_embed.proj.bias", 3},
    {"cls_token", 3},
    {"pos_embed", 3},
    {"blocks.0.norm1.weight", 2},
    {"blocks.0.attn.qkv.bias", 2},
    {"blocks.0.mlp.fc2.weight", 2},
    {"blocks.1.norm1.weight", 1},
    {"blocks.1.attn.proj.weight", 1},
    {"blocks.1.mlp.fc2.bias", 1},
    {"norm.weight", 1},
    {"norm.bias", 1},
    {"head.weight", 0},
    {"head.bias", 0},
};

Test(train_optim, layer_decay_counts_layers_as_timm)
{
    struct model model;
    must(model_build(table_of("vit-micro"), (struct shape){1, 1, 16, 16}, 5, &model));
    const struct train train = {.model = &model, .optimizer = {.layer_decay = 0.5}};
    for (size_t i = 0; i < COUNT_OF(powers); i++) {
        const struct tensor_update of = train_update_of(&train, tensor_of(&model, powers[i].tensor));
        cr_expect_eq(of.share, powf(0.5f, (float)powers[i].power), "%s: %g", powers[i].tensor,
                     (double)of.share);
    }
    must(model_build(table_of("vit-base"), (struct shape){3, 1, 224, 224}, 10, &model));
    cr_expect_eq(model.depth, 13);
    cr_expect_eq(tensor_of(&model, "blocks.10.mlp.fc1.weight")->depth, 11);
}

/* In one step of plain SGD, each tensor must change by its factor times the change without layer decay. */
static void check_layer_decay(struct net *net, const struct engine *engine)
{
    struct train_state ends[2];
    net->train.schedule.rate = 1;
    for (int i = 0; i < 2; i++) {
        net->train.optimizer = (struct optimizer){.layer_decay = i ? 0.5 : 0};
        ends[i] = train_steps_of(net, engine, 1);
    }
    for (uint32_t t = 0; t < net->model.tensor_count; t++) {
        const struct model_tensor *tensor = &net->model.tensors[t];
        const float *begin = net->initial + tensor->first;
        const double plain = distance(ends[0].parameters + tensor->first, begin, tensor->values);
        const double decayed = distance(ends[1].parameters + tensor->first, begin, tensor->values);
        const double share = pow(0.5, net->model.depth - tensor->depth);
        cr_expect_float_eq(decayed, share * plain, 1e-3 * plain, "%s: %s", engine->name, tensor->name);
    }
    for (int i = 0; i < 2; i++)
        train_state_free(&ends[i]);
}

Test(train_optim, layer_decay_scales_the_rates)
{
    for_engines("vit-micro", check_layer_decay);
}

Test(train_optim, stochastic_depth_rises_linearly)
{
    struct model model;
    must(model_build(table_of("vit-tiny"), (struct shape){3, 1, 224, 224}, 10, &model));
    must(model_set_drop_path(&model, 0.22));
    for (uint32_t i = 0; i < 12; i++)
        for (uint32_t j = 4; j <= 10; j += 6) { /* the layers of stochastic depth of a block */
            const struct layer *layer = &model.layers[2 + 12 * i + j];
            cr_expect_eq(layer->spec.kind, LAYER_DROP_PATH);
            cr_expect_float_eq(layer->spec.rate, 0.02f * (float)i, 1e-7f, "%u: %g", i,
                               (double)layer->spec.rate);
        }
    must(model_build(table_of("lenet"), (struct shape){1, 1, 28, 28}, 10, &model));
    cr_expect_eq(model_set_drop_path(&model, 0.1), STATUS_USAGE);
}

/* ---- The moving average ---- */

/* Compares the average after each of two steps with one that is computed here from the parameters. */
static void check_average(struct net *net, const struct engine *engine)
{
    const size_t values = net->model.arena_values;
    net->train.schedule.rate = 0.05;
    net->train.optimizer = (struct optimizer){.momentum = 0.9, .average = 0.75};
    net_reopen(net, engine);
    struct train_state now = new_state(net), whole = train_steps_of(net, engine, 2);
    double *expected = malloc(values * sizeof *expected);
    for (size_t i = 0; i < values; i++)
        expected[i] = net->initial[i];
    net_reopen(net, engine);
    for (uint32_t step = 0; step < 2; step++) {
        must(engine->steps(net->state, 0, step, 1));
        must(engine->get(net->state, &now));
        must(engine->set(net->state, &now)); /* set() of the same state must change nothing */
        for (size_t i = 0; i < values; i++) {
            expected[i] = 0.75 * expected[i] + 0.25 * now.parameters[i];
            cr_assert_float_eq(now.ema[i], expected[i], 1e-6, "%s: %zu", engine->name, i);
        }
    }
    cr_expect(engine == &engine_oracle /* get() of the oracle rounds doubles */ ||
                  memcmp(now.ema, whole.ema, values * sizeof(float)) == 0,
              "%s", engine->name);
    cr_expect_gt(distance(now.ema, net->initial, values), 0);
    free(expected);
    train_state_free(&now);
    train_state_free(&whole);
}

Test(train_optim, averages_follow_their_definition)
{
    for_networks(check_average);
}

/* A caller without room for the average must get the rest of the state. */
Test(train_optim, a_state_without_an_average_has_the_parameters)
{
    struct net net;
    struct train_state state;
    net_open(&net, &engine_naive, table_of("lenet"), (struct shape){1, 1, 16, 16}, 5, 22, 11, 0);
    net.train.optimizer.average = 0.5;
    net_reopen(&net, &engine_naive);
    cr_assert(train_state_new(net.model.arena_values, &state));
    must(engine_naive.get(net.state, &state));
    cr_expect_null(state.ema);
    cr_expect_eq(memcmp(state.parameters, net.initial, net.model.arena_values * sizeof(float)), 0);
    train_state_free(&state);
    net_close(&net);
}

/* ---- Steps in parts ---- */

/* Returns the largest relative error of the change of a tensor. */
static double largest_drift(const struct net *net, const float *mine, const float *right)
{
    double most = 0;
    for (uint32_t t = 0; t < net->model.tensor_count; t++) {
        const struct model_tensor *tensor = &net->model.tensors[t];
        const float *begin = net->initial + tensor->first, *end = right + tensor->first;
        most = worse(most, distance(mine + tensor->first, end, tensor->values) /
                               (distance(end, begin, tensor->values) + 1e-12));
    }
    return most;
}

/* Compares an epoch, whose steps have 11, 11 and 5 samples, for several numbers of parts. */
static void check_parts(struct net *net, const struct engine *engine)
{
    static const uint32_t parts[] = {1, 3, 11, 13};
    struct train_totals exact, totals;
    net->train.optimizer = (struct optimizer){.momentum = 0.9, .clip_norm = 0.5, .average = 0.5};
    net->train.schedule.rate = 0.1;
    net->train.accumulate = 0;
    struct train_state right = train_steps_of(net, &engine_oracle, 3);
    must(engine_oracle.totals(net->state, &exact));
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        net->train.accumulate = parts[i];
        struct train_state mine = train_steps_of(net, engine, 3);
        must(engine->totals(net->state, &totals));
        const double drift = worse(largest_drift(net, mine.parameters, right.parameters),
                                   largest_drift(net, mine.ema, right.ema));
        cr_expect_leq(drift, engine->bounds.drift, "%s, %s, %u parts: %g", engine->name, net->model.name,
                      parts[i], drift);
        cr_expect(totals.samples == 27 && totals.normed == 3 && totals.correct <= 27);
        cr_expect_float_eq(totals.loss, exact.loss, engine->bounds.loss * exact.loss, "%s, %u parts",
                           engine->name, parts[i]);
        train_state_free(&mine);
    }
    train_state_free(&right);
    net->train.accumulate = 0;
}

Test(train_optim, parts_add_up_to_the_step)
{
    for_networks(check_parts);
    for_engines("cnn", check_parts); /* a network with dropout */
}

/* The test set must be evaluated in batches of a part's size. */
static void check_evaluation(struct net *net, const struct engine *engine)
{
    float logits[2][5 * 5];
    net->train.optimizer = (struct optimizer){.momentum = 0.9};
    for (uint32_t i = 0; i < 2; i++) {
        net->train.accumulate = 1 + 5 * i; /* at most two samples at a time */
        net_reopen(net, engine);
        must(engine->steps(net->state, 0, 0, 1)); /* the current part must not affect the evaluation */
        must(engine->evaluate(net->state, DATA_TEST, 0, 5, logits[i]));
    }
    for (size_t i = 0; i < COUNT_OF(logits[0]); i++)
        cr_expect_float_eq(logits[1][i], logits[0][i], 2 * engine->bounds.logits, "%s", engine->name);
    net->train.accumulate = 0;
}

Test(train_optim, the_test_set_is_evaluated_in_batches_of_a_part)
{
    for_networks(check_evaluation);
}

Test(train_optim, parts_cover_the_share)
{
    for (uint32_t parts = 1; parts < 9; parts++)
        for (uint64_t count = 0; count < 20; count++) {
            const struct train train = {.batch = 20, .accumulate = parts};
            const struct share share = {3, count, 40};
            uint64_t done = 3;
            for (uint32_t i = 0; i < parts; i++) {
                const struct share part = train_part(&train, &share, i);
                cr_expect(part.first == done && part.total == 40 && part.count <= train_part_max(&train));
                done += part.count;
            }
            cr_expect_eq(done, 3 + count);
        }
}

#ifdef _OPENMP
Test(train_optim, parts_save_memory)
{
    uint64_t bytes[2];
    struct net net;
    net_open(&net, &engine_omp, table_of("cnn-fdsl"), (struct shape){1, 1, 32, 32}, 5, 64, 64, 0);
    bytes[0] = engine_omp.memory_bytes(net.state);
    net.train.accumulate = 8;
    net_reopen(&net, &engine_omp);
    bytes[1] = engine_omp.memory_bytes(net.state);
    cr_expect_lt(bytes[1], bytes[0] / 2, "%llu, %llu", (unsigned long long)bytes[0],
                 (unsigned long long)bytes[1]);
    net_close(&net);
}
#endif
