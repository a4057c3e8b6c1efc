/* Tests residual networks with batch normalisation: parameters and names of torchvision, running statistics,
 * steps of train-naive, resumed runs, parameters of other programs, and refusals. Their gradients are tested
 * by test_train_net.c, train-omp by test_train_omp.c, sums over ranks by test_mpi_train.c, and train-resnet
 * by gpu_resnet and gpu_train. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include "../cpu/train/omp_kernel.h"
#endif
#include "train_support.h"
#include "train_cli.h"

TestSuite(train_resnet, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

static const struct shape picture = {3, 1, 224, 224};

/* The numbers of torchvision's resnet50. Multiplications by padding zeros do not count here, so there are a
 * few less than the 4.09e9 that torchvision names. */
Test(train_resnet, parameters_are_those_of_torchvision)
{
    struct model model;
    must(model_build(table_of("resnet50"), picture, 1000, &model));
    cr_expect_eq(model.parameters, 25557032, "%zu", model.parameters);
    cr_expect_eq(model.tensor_count, 161 + 106);
    cr_expect(model.multiplications > 3.9e9 && model.multiplications < 4.09e9, "%g", model.multiplications);
}

Test(train_resnet, tensors_have_names_and_shapes_of_torchvision)
{
    static const struct {
        const char *name;
        uint32_t axes;
        uint64_t shape[4];
        bool is_statistic;
    } known[] = {{"conv1.weight", 4, {64, 3, 7, 7}, false},
                 {"bn1.weight", 1, {64}, false},
                 {"bn1.running_mean", 1, {64}, true},
                 {"layer1.0.conv1.weight", 4, {64, 64, 1, 1}, false},
                 {"layer1.0.downsample.0.weight", 4, {256, 64, 1, 1}, false},
                 {"layer1.0.downsample.1.running_mean", 1, {256}, true},
                 {"layer2.0.conv2.weight", 4, {128, 128, 3, 3}, false},
                 {"layer2.3.bn3.bias", 1, {512}, false},
                 {"layer4.0.downsample.0.weight", 4, {2048, 1024, 1, 1}, false},
                 {"layer4.2.bn3.running_var", 1, {2048}, true},
                 {"fc.weight", 2, {10, 2048}, false},
                 {"fc.bias", 1, {10}, false}};
    struct model model;
    must(model_build(table_of("resnet50"), picture, 10, &model));
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        const struct model_tensor *tensor = tensor_of(&model, known[i].name);
        cr_expect_eq(tensor->axes, known[i].axes, "%s", known[i].name);
        cr_expect_eq(memcmp(tensor->shape, known[i].shape, known[i].axes * sizeof(uint64_t)), 0, "%s",
                     known[i].name);
        cr_expect_eq(tensor->is_statistic, known[i].is_statistic, "%s", known[i].name);
        cr_expect_eq(tensor->decays, !known[i].is_statistic, "%s", known[i].name);
        cr_expect_eq(tensor->first >= model.trained_values, known[i].is_statistic, "%s", known[i].name);
    }
}

/* Sizes after each stage, also for images whose size is no multiple of 32. */
Test(train_resnet, stages_halve_the_image)
{
    static const uint32_t sizes[][3] = {{224, 56, 7}, {225, 57, 8}, {33, 9, 2}, {1, 1, 1}};
    struct model model;
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        must(model_build(table_of("resnet50"), (struct shape){3, 1, sizes[i][0], sizes[i][0]}, 10, &model));
        cr_expect_eq(model.layers[3].out.height, sizes[i][1], "%u: %u", sizes[i][0],
                     model.layers[3].out.height);
        const struct layer *mean = &model.layers[model.layer_count - 2];
        cr_expect_eq(mean->in.height, sizes[i][2], "%u: %u", sizes[i][0], mean->in.height);
        cr_expect_eq(mean->in.channels, 2048);
    }
}

static const struct layer_spec norm_layers[] = {{.kind = LAYER_BATCH_NORM}, {.kind = LAYER_LINEAR}};
static const struct model_table norm_only = {"norm", "", false, norm_layers, 2};

/* One channel has the values 1 to 6 in three samples: the mean is 3.5, and the unbiased variance is 3.5.
 * After a step, the running statistics are 0.1 * 3.5 and 0.9 * 1 + 0.1 * 3.5. Inference uses them. */
Test(train_resnet, running_statistics_match_hand_computed_values)
{
    const struct engine *const engines[] = {&engine_naive, &engine_oracle};
    for (size_t e = 0; e < COUNT_OF(engines); e++) {
        struct net net;
        float logit;
        net_open(&net, engines[e], &norm_only, (struct shape){1, 1, 1, 2}, 1, 3, 3, 0);
        data_normalise(&net.data, false);
        net.data.scale[0] = 1; /* raw bytes */
        for (int i = 0; i < 6; i++)
            ((uint8_t *)net.data.sets[DATA_TRAIN].values)[i] = (uint8_t)(i + 1);
        ((uint8_t *)net.data.sets[DATA_TEST].values)[0] = 2;
        ((uint8_t *)net.data.sets[DATA_TEST].values)[1] = 5;
        struct train_state end;
        cr_assert(train_state_for(&net.train, &end));
        must(engines[e]->steps(net.state, 0, 0, 1));
        must(engines[e]->get(net.state, &end));
        const struct layer *norm = &net.model.layers[0], *linear = &net.model.layers[1];
        cr_expect_float_eq(end.parameters[norm->mean], 0.35f, 1e-6f, "%g", end.parameters[norm->mean]);
        cr_expect_float_eq(end.parameters[norm->variance], 1.25f, 1e-6f, "%g",
                           end.parameters[norm->variance]);
        must(engines[e]->evaluate(net.state, DATA_TEST, 0, 1, &logit));
        const double factor = end.parameters[norm->weight] / sqrt(1.25 + 1e-5);
        double wanted = end.parameters[linear->bias];
        for (int i = 0; i < 2; i++)
            wanted += end.parameters[linear->weight + (size_t)i] *
                      (((i ? 5 : 2) - 0.35) * factor + end.parameters[norm->bias]);
        cr_expect_float_eq(logit, wanted, 1e-5, "%g, not %g", logit, wanted);
        train_state_free(&end);
        net_close(&net);
    }
}

/* The reference in float against the reference in double, over full and short batches. */
Test(train_resnet, float_and_double_take_the_same_steps)
{
    struct net net;
    net_open(&net, &engine_oracle, table_of("resnet-micro"), (struct shape){3, 1, 33, 30}, 5, 40, 16, 0.1f);
    net.train.optimizer.weight_decay = 1e-2;
    net.train.optimizer.clip_norm = 0.5;
    struct train_state ends[2];
    for (int i = 0; i < 2; i++) {
        cr_assert(train_state_for(&net.train, &ends[i]));
        net_reopen(&net, i ? &engine_naive : &engine_oracle);
        must(net.engine->steps(net.state, 0, 0, 3));
        must(net.engine->get(net.state, &ends[i]));
    }
    for (uint32_t t = 0; t < net.model.tensor_count; t++) {
        const struct model_tensor *tensor = &net.model.tensors[t];
        double off = 0, way = 0;
        for (size_t i = tensor->first; i < tensor->first + tensor->values; i++) {
            off += pow((double)ends[1].parameters[i] - ends[0].parameters[i], 2);
            way += pow((double)ends[0].parameters[i] - net.initial[i], 2);
        }
        cr_expect(way > 0 && sqrt(off / way) < 1e-3, "%s: off by %g", tensor->name, sqrt(off / way));
    }
    for (int i = 0; i < 2; i++)
        train_state_free(&ends[i]);
    net_close(&net);
}

/* The reference with given outputs: its own ones change nothing. Of a changed output, it reports the error of
 * this layer alone, and the gradients of all layers follow from it. */
Test(train_resnet, given_outputs_replace_those_of_the_reference)
{
    enum { COUNT = 5, CHANGED = 3 };
    struct net net;
    net_open(&net, &engine_oracle, table_of("resnet-micro"), (struct shape){3, 1, 17, 19}, 5, COUNT, COUNT,
             0);
    static struct oracle_given given;
    const struct train_state begin = {net.initial, net.zeros, net.zeros, {0, 0}, NULL};
    float *values[MODEL_LAYERS_MAX], *gradients = calloc(2 * net.model.arena_values, sizeof *gradients);
    must(engine_oracle.steps(net.state, 0, 0, 1));
    must(engine_oracle.gradients(net.state, gradients));
    for (uint32_t i = 0; i < net.model.layer_count; i++) {
        given.outputs[i] = values[i] = malloc(COUNT * net.model.layers[i].out_values * sizeof(float));
        oracle_output(net.state, i, COUNT, values[i]);
    }
    for (int changed = 0; changed < 2; changed++) {
        float *other = gradients + net.model.arena_values;
        double off = 0, all = 0;
        for (size_t v = 0; changed && v < COUNT * net.model.layers[CHANGED].out_values; v++)
            values[CHANGED][v] *= 1.25f;
        must(engine_oracle.set(net.state, &begin));
        oracle_give(net.state, &given);
        must(engine_oracle.steps(net.state, 0, 0, 1));
        must(engine_oracle.gradients(net.state, other));
        for (uint32_t i = 0; i < net.model.layer_count; i++) {
            const double error = sqrt(given.off[i] / given.all[i]);
            if (changed && i == CHANGED)
                cr_expect_float_eq(error, 0.25, 1e-4, "%s: %g", net.model.layers[i].name, error);
            else if (!changed || i - 1 - net.model.layers[i].spec.skipped != CHANGED) /* reads it */
                cr_expect_lt(error, 1e-6, "%s: %g", net.model.layers[i].name, error);
        }
        for (size_t i = 0; i < net.model.trained_values; i++) {
            off += pow((double)other[i] - gradients[i], 2);
            all += pow((double)gradients[i], 2);
        }
        cr_expect(changed ? off > 1e-4 * all : off < 1e-8 * all, "%d: %g of %g", changed, off, all);
    }
    for (uint32_t i = 0; i < net.model.layer_count; i++)
        free(values[i]);
    free(gradients);
    net_close(&net);
}

/* Muon updates the convolutions between the first and the last layer as matrices. Running statistics belong
 * to no layer, so options of the last layer do not change them. */
Test(train_resnet, tensors_have_the_roles_of_their_layers)
{
    struct model model;
    uint32_t hidden = 0, head = 0;
    must(model_build(table_of("resnet50"), picture, 10, &model));
    for (uint32_t t = 0; t < model.tensor_count; t++) {
        const struct model_tensor *tensor = &model.tensors[t];
        cr_expect_eq(tensor->hidden, t > 0 && tensor->axes == 4, "%s", tensor->name);
        cr_expect_eq(tensor->head, strncmp(tensor->name, "fc.", 3) == 0, "%s", tensor->name);
        hidden += tensor->hidden;
        head += tensor->head;
    }
    cr_expect_eq(hidden, 52);
    cr_expect_eq(head, 2);
    float *values = malloc(model.arena_values * sizeof *values);
    model_initialise(&model, 0, values);
    model_initialise_head(&model, 0, -3, values);
    const struct model_tensor *mean = tensor_of(&model, "layer4.2.bn3.running_mean"),
                              *variance = tensor_of(&model, "layer4.2.bn3.running_var");
    cr_expect_eq(values[mean->first], 0);
    cr_expect_eq(values[variance->first], 1);
    cr_expect_eq(values[tensor_of(&model, "fc.bias")->first], -3);
    cr_expect_eq(values[tensor_of(&model, "fc.weight")->first], 0);
    free(values);
}

/* torchvision: zero_init_residual sets the weights of bn3 in every block, and nothing else. */
Test(train_resnet, last_norms_begin_with_zeros)
{
    struct model model;
    uint32_t zeros = 0;
    must(model_build(table_of("resnet50"), picture, 10, &model));
    float *values = malloc(2 * model.arena_values * sizeof *values), *changed = values + model.arena_values;
    for (size_t i = 0; i < 2 * model.arena_values; i++)
        values[i] = 1;
    model_zero_last_gamma(&model, changed);
    for (uint32_t t = 0; t < model.tensor_count; t++) {
        const struct model_tensor *tensor = &model.tensors[t];
        const bool last = strstr(tensor->name, ".bn3.weight") != NULL;
        for (size_t i = tensor->first; i < tensor->first + tensor->values; i++)
            cr_assert_eq(changed[i], last ? 0 : values[i], "%s", tensor->name);
        zeros += last;
    }
    cr_expect_eq(zeros, 16);
    free(values);
}

/* Whatever changes the parameters, running statistics move to those of the step by their momentum. Their
 * moving average follows that of parameters. */
static void check_rules(const struct engine *engine)
{
    static const struct optimizer others[] = {
        {.kind = OPTIMIZER_SGD},
        {.kind = OPTIMIZER_SGD, .momentum = 0.9, .weight_decay = 0.1, .clip_norm = 1e-3},
        {.kind = OPTIMIZER_SGD, .clip_value = 1e-5},
        {.kind = OPTIMIZER_SGD, .clip_adaptive = 1e-3},
        {.kind = OPTIMIZER_ADAMW, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1},
        {.kind = OPTIMIZER_LAMB, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1},
        {.kind = OPTIMIZER_MUON,
         .momentum = 0.9,
         .beta1 = 0.9,
         .beta2 = 0.99,
         .epsilon = 1e-8,
         .weight_decay = 0.1,
         .matrix_rate = 20}};
    struct net net;
    struct train_state ends[COUNT_OF(others)];
    net_open(&net, engine, table_of("resnet-micro"), (struct shape){1, 1, 17, 19}, 3, 8, 8, 0);
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        net.train.optimizer = others[i];
        net.train.optimizer.average = 0.75;
        cr_assert(train_state_for(&net.train, &ends[i]));
        net_reopen(&net, engine);
        must(net.engine->steps(net.state, 0, 0, 1));
        must(net.engine->get(net.state, &ends[i]));
        for (size_t k = net.model.trained_values; k < net.model.arena_values; k++) {
            cr_assert_eq(ends[i].parameters[k], ends[0].parameters[k], "optimizer %zu: %zu", i, k);
            cr_assert_float_eq(ends[i].ema[k], 0.75 * net.initial[k] + 0.25 * ends[i].parameters[k], 1e-6,
                               "optimizer %zu: %zu", i, k);
            cr_assert_eq(ends[i].m[k], 0);
            cr_assert_eq(ends[i].v[k], 0);
        }
        const struct model_tensor *weight = tensor_of(&net.model, "layer1.0.conv2.weight");
        cr_expect_neq(ends[i].parameters[weight->first], net.initial[weight->first]);
    }
    for (size_t i = 0; i < COUNT_OF(others); i++)
        train_state_free(&ends[i]);
    net_close(&net);
}

Test(train_resnet, rules_and_clipping_leave_running_statistics_alone)
{
    check_rules(&engine_naive);
#ifdef _OPENMP
    check_rules(&engine_omp);
#endif
}

/* ---- The program ---- */

#define MICRO  "$P --variant train-naive --model resnet-micro --train-size 60 --test-size 9 --batch 20 "

#define VALUES "41000" /* bytes of the values in a file, at most */

Test(train_resnet, resumed_runs_are_bit_identical)
{
    EXPECT(0, MICRO "--epochs 3 --ema 0.9 --export whole");
    EXPECT(0, MICRO "--epochs 1 --ema 0.9 --checkpoint c");
    EXPECT(0, MICRO "--epochs 3 --ema 0.9 --checkpoint c --resume --export parts");
    EXPECT(0, "tail -c " VALUES " whole >v && tail -c " VALUES " parts | cmp v -");
    EXPECT(0,
           MICRO "--epochs 3 --ema 0.9 --seed 2 --export other && ! tail -c " VALUES " other | cmp -s v -");
    static const char *const rules[] = {"--optimizer muon --ema 0.9 --ema-warmup",
                                        "--optimizer lamb --clip-adaptive 0.01"};
    for (size_t i = 0; i < COUNT_OF(rules); i++) {
        EXPECT(0, MICRO "--epochs 2 %s --export whole", rules[i]);
        EXPECT(0, MICRO "--epochs 1 %s --checkpoint k%zu", rules[i], i);
        EXPECT(0, MICRO "--epochs 2 %s --checkpoint k%zu --resume --export parts", rules[i], i);
        EXPECT(0, "tail -c " VALUES " whole >v && tail -c " VALUES " parts | cmp v -");
    }
}

Test(train_resnet, steps_equal_those_of_the_reference)
{
    EXPECT(0, MICRO "--epochs 2 --verify --verify-steps 7");
    EXPECT(0, MICRO "--epochs 1 --optimizer muon --verify --verify-steps 3");
    /* In small batches, normalisation amplifies rounding: after five steps, the bounds would be exceeded. */
    static const char *const seeds[] = {"1", "8", "11"};
    for (size_t i = 0; i < COUNT_OF(seeds); i++)
        EXPECT(
            0,
            "$P --variant train-omp --model resnet-micro --train-size 40 --test-size 8 --batch 5 --epochs 1 "
            "--threads 1 --verify --seed %s",
            seeds[i]);
}

#ifdef HAVE_JANSSON
/* PyTorch saves the number of batches of each normalisation, which has no effect with a momentum. */
Test(train_resnet, starts_from_tensors_with_numbers_of_batches)
{
    EXPECT(0, MICRO "--epochs 1 --export a.safetensors");
    EXPECT_PRINTS(0, "--init: 62 of 62 tensors taken from a.safetensors\n",
                  MICRO "--epochs 1 --optimizer sgd --lr 0 --init a.safetensors");
    EXPECT(0, "python3 - <<'END'\n"
              "import json\n"
              "raw = open('a.safetensors', 'rb').read()\n"
              "size = int.from_bytes(raw[:8], 'little')\n"
              "header, values = json.loads(raw[8:8 + size]), raw[8 + size:]\n"
              "header['bn1.num_batches_tracked'] = {'dtype': 'I64', 'shape': [],\n"
              "                                     'data_offsets': [len(values), len(values) + 8]}\n"
              "header['other'] = {'dtype': 'I64', 'shape': [], 'data_offsets': [len(values) + 8, len(values) "
              "+ 16]}\n"
              "for name in 'bc':\n"
              "    text = json.dumps(header).encode()\n"
              "    open(name + '.safetensors', 'wb').write(len(text).to_bytes(8, 'little') + text + values + "
              "bytes(8 if name == 'c' else 16))\n"
              "    header.pop('other', None)\n"
              "END");
    EXPECT_PRINTS(0, "--init: 62 of 62 tensors taken from c.safetensors\n",
                  MICRO "--epochs 1 --init c.safetensors");
    EXPECT_PRINTS(2, "it also has a tensor other", MICRO "--epochs 1 --init b.safetensors");
}
#endif

Test(train_resnet, what_it_cannot_do_is_refused)
{
    EXPECT_PRINTS(2, "--accumulate: resnet-micro normalises over the samples of a batch",
                  MICRO "--accumulate 2");
    EXPECT_PRINTS(2, "--sync-batch-norm needs a network with batch normalisation, such as --model resnet50",
                  "$P --variant train-naive --model lenet --sync-batch-norm");
    EXPECT_PRINTS(2, "--zero-init-last-gamma needs a network with batch normalisation",
                  "$P --variant train-naive --model lenet --zero-init-last-gamma");
    EXPECT_PRINTS(2, "--zero-init-last-gamma needs a run without --init",
                  MICRO "--zero-init-last-gamma --init a.safetensors");
}

#ifdef _OPENMP
/* train-omp resumes bit for bit, and its parameters are those of the reference: infer-naive and infer-omp
 * classify alike. */
Test(train_resnet, the_fast_engine_trains_resumes_and_infers)
{
    static const char fast[] = "$P --variant train-omp --model resnet-micro --train-size 60 --test-size 40 "
                               "--batch 20 --zero-init-last-gamma ";
    EXPECT(0, "%s--epochs 3 --export whole", fast);
    EXPECT(0, "%s--epochs 1 --checkpoint c", fast);
    EXPECT(0, "%s--epochs 3 --checkpoint c --resume --export parts", fast);
    EXPECT(0, "tail -c " VALUES " whole >v && tail -c " VALUES " parts | cmp v -");
    EXPECT(0,
           "$P --variant infer-omp,infer-naive --checkpoint c --batch 7 --verify --warmups 1 --warmup-time 0 "
           "--min-samples 3 --min-time 0 --max-time 0");
}
#endif
