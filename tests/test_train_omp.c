/* Compares `train-omp` with the oracle, the reference that computes the same steps in double precision.
 * Covers every kind of layer, every network, and every instruction set of this machine. */
#include <criterion/criterion.h>

#ifdef _OPENMP

#include <math.h>
#include <stdlib.h>

#include "../cpu/train/omp_kernel.h"
#include "core/portable.h"
#include "machine/host.h"
#include "train_support.h"
#include "train_transformers.h"

/* Returns the norm of the difference of two tensors, divided by the norm of `wanted`. */
static double distance(const float *tensor, const float *wanted, size_t count)
{
    double off = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        off += ((double)tensor[i] - wanted[i]) * ((double)tensor[i] - wanted[i]);
        norm += (double)wanted[i] * wanted[i];
    }
    return norm > 0 ? sqrt(off / norm) : sqrt(off);
}

/* Results of an engine after a few steps. */
struct result {
    double loss;
    uint64_t correct;
    float *gradients, *parameters, *logits;
};

struct sizes {
    struct shape input;
    uint32_t classes, count, batch;
};

#define STEPS 3

/* Changes a net to half-precision samples, shifts and flips, and AdamW with weight decay and a falling
 * learning rate. A large epsilon limits the effect of rounding on gradients near zero. */
static void vary(struct net *net)
{
    data_to_halves(&net->data);
    net->train.augment = (struct augment){.shift = 2, .flip = true};
    net->train.optimizer = (struct optimizer){
        .kind = OPTIMIZER_ADAMW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 0.01, .weight_decay = 0.1};
    net->train.schedule =
        (struct schedule){.kind = SCHEDULE_STEP, .rate = 0.01, .decay_steps = 2, .gamma = 0.5};
}

static bool varied; /* whether run() calls vary() */
static struct mixing mixing;
static enum loss_kind loss_kind;

static void run(const struct engine *engine, const struct model_table *table, const struct sizes *sizes,
                struct net *net, struct result *result)
{
    struct train_totals totals;
    net_open(net, engine, table, fitted(table, sizes->input), sizes->classes, sizes->count, sizes->batch,
             0.1f);
    net->train.mixing = mixing;
    net->train.loss = loss_kind;
    if (varied)
        vary(net);
    if (varied || train_mixes(&net->train) || loss_kind)
        net_reopen(net, net->engine);
    size_t values = net->model.arena_values;
    result->gradients = malloc(values * sizeof(float));
    result->parameters = malloc(3 * values * sizeof(float));
    result->logits = malloc(5 * sizes->classes * sizeof(float));
    must(engine->evaluate(net->state, DATA_TEST, 0, 5, result->logits));
    must(engine->steps(net->state, 0, 0, 1));
    must(engine->gradients(net->state, result->gradients));
    uint32_t last =
        train_steps(&net->train) - 1; /* a short batch, unless the batch size divides the number of samples */
    for (uint32_t i = 1; i < STEPS; i++)
        must(engine->steps(net->state, i, i % 2 ? last : 0, 1));
    must(engine->totals(net->state, &totals));
    const struct train_state state = {
        result->parameters, result->parameters + values, result->parameters + 2 * values, {0, 0}, NULL};
    must(engine->get(net->state, (struct train_state *)&state));
    result->loss = totals.loss / (double)totals.samples;
    result->correct = totals.correct;
}

static void discard(struct result *result)
{
    free(result->gradients);
    free(result->parameters);
    free(result->logits);
}

/* Tolerance for float sums in another order. Each addition has a relative rounding error of at most 2^-24,
 * and the errors of n independent additions grow as sqrt(n). For the longest sum here, 10^4 terms, this gives
 * a relative error of about 6e-6. If a value is closer than this to 0 (ReLU) or to its neighbour
 * (max-pooling), its gradient may take another path. This changes about one of the 10^4 terms of a tensor's
 * gradient, so the tolerance is 1e-4 of the norm. */
#define TOLERANCE 1e-4

/* Returns the largest relative error: of the loss, the logits, and each tensor's gradients and parameters. */
static double worst_of(const struct model *model, const struct sizes *sizes, const struct result *one,
                       const struct result *wanted)
{
    double worst = fabs(one->loss - wanted->loss) / fmax(fabs(wanted->loss), 1e-3);
    worst = worse(worst, distance(one->logits, wanted->logits, 5 * sizes->classes));
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        size_t first = model->tensors[t].first, count = model->tensors[t].values;
        worst = worse(worst, distance(one->gradients + first, wanted->gradients + first, count));
        worst = worse(worst, distance(one->parameters + first, wanted->parameters + first, count));
    }
    return worst;
}

/* Compares an engine with the results of the oracle. */
static double compare_with(const struct result *wanted, const struct engine *engine,
                           const struct model_table *table, const struct sizes *sizes)
{
    struct net net;
    struct result result;
    run(engine, table, sizes, &net, &result);
    double worst = worst_of(&net.model, sizes, &result, wanted);
    discard(&result);
    net_close(&net);
    return worst;
}

static double compare(const struct engine *engine, const struct model_table *table, const struct sizes *sizes)
{
    struct net oracle;
    struct result wanted;
    run(&engine_oracle, table, sizes, &oracle, &wanted);
    double worst = compare_with(&wanted, engine, table, sizes);
    discard(&wanted);
    net_close(&oracle);
    return worst;
}

static const char *const isas[] = {"avx512", "avx2", "scalar"};

static void check(const struct model_table *table, const struct sizes *sizes)
{
    struct net oracle;
    struct result wanted;
    run(&engine_oracle, table, sizes, &oracle, &wanted);
    for (size_t i = 0; i < COUNT_OF(isas); i++) {
        if (!isa_force(isas[i]))
            continue;
        cr_expect_str_eq(isa_best_name(), isas[i]);
        double worst = compare_with(&wanted, &engine_omp, table, sizes);
        cr_expect_leq(worst, TOLERANCE, "%s, %s, %u channels, batch %u: off by %g", table->name, isas[i],
                      sizes->input.channels, sizes->batch, worst);
    }
    isa_force(NULL);
    discard(&wanted);
    net_close(&oracle);
}

#define CONV(out, d, h, w, pd, ph, pw)                                                      \
    {                                                                                       \
        .kind = LAYER_CONV, .channels = out, .kernel = {d, h, w}, .padding = { pd, ph, pw } \
    }
#define POOL(d, h, w)                             \
    {                                             \
        .kind = LAYER_POOL, .kernel = { d, h, w } \
    }
#define RELU               \
    {                      \
        .kind = LAYER_RELU \
    }
#define DROPOUT                              \
    {                                        \
        .kind = LAYER_DROPOUT, .rate = 0.25f \
    }
#define LINEAR(out)                           \
    {                                         \
        .kind = LAYER_LINEAR, .channels = out \
    }

#define ADD(layers)                         \
    {                                       \
        .kind = LAYER_ADD, .back = (layers) \
    }
#define MEAN               \
    {                      \
        .kind = LAYER_MEAN \
    }

LAYERS(linear, false, LINEAR(37), LINEAR(0));
LAYERS(relu, false, LINEAR(9), RELU, DROPOUT, LINEAR(0), RELU);
LAYERS(conv, false, CONV(3, 1, 3, 2, 0, 1, 0), CONV(17, 1, 2, 3, 0, 0, 2), RELU, CONV(2, 1, 1, 1, 0, 1, 0),
       LINEAR(0));
LAYERS(conv_pool, false, CONV(19, 1, 3, 3, 0, 0, 1), RELU, POOL(1, 1, 2), CONV(5, 1, 2, 2, 0, 1, 1),
       POOL(1, 2, 2), RELU, LINEAR(0));
LAYERS(in_place, false, DROPOUT, CONV(7, 1, 3, 3, 0, 1, 1), RELU, DROPOUT, CONV(4, 1, 2, 2, 0, 0, 0), DROPOUT,
       RELU, LINEAR(0));
LAYERS(pools, false, POOL(1, 1, 2), CONV(6, 1, 2, 2, 0, 1, 1), POOL(1, 2, 1), POOL(1, 1, 2), RELU, LINEAR(11),
       DROPOUT, LINEAR(0));
LAYERS(mean, false, CONV(19, 1, 3, 3, 0, 1, 1), MEAN, RELU, LINEAR(0));
/* Adds outputs of a ReLU, a convolution, an addition and a pooling; one output is added twice. */
LAYERS(add, false, CONV(18, 1, 3, 3, 0, 1, 1), RELU, CONV(18, 1, 3, 3, 0, 1, 1), DROPOUT, ADD(3),
       CONV(18, 1, 3, 3, 0, 1, 1), ADD(2), ADD(3), ADD(3), RELU, POOL(1, 2, 1), CONV(18, 1, 3, 3, 0, 1, 1),
       ADD(2), RELU, LINEAR(0));
LAYERS(add_mean, false, RELU, CONV(15, 1, 3, 3, 0, 1, 1), ADD(2), MEAN, LINEAR(0));
/* The pooling must not be fused with the first convolution, because a later layer also adds the convolution's
 * output. */
LAYERS(add_pool, false, CONV(2, 1, 3, 3, 0, 1, 1), RELU, POOL(1, 2, 1), CONV(2, 1, 1, 1, 0, 2, 0), ADD(3),
       LINEAR(0));
/* Windows that overlap, leave out inputs, or reach into the padding. */
#define STRIDED(out, size, pad, step)                                                             \
    {                                                                                             \
        .kind = LAYER_CONV, .channels = out, .kernel = {1, size, size}, .padding = {0, pad, pad}, \
        .stride = step                                                                            \
    }
#define POOL_STRIDED(size, pad, step)                                                           \
    {                                                                                           \
        .kind = LAYER_POOL, .kernel = {1, size, size}, .padding = {0, pad, pad}, .stride = step \
    }
LAYERS(strides, false, STRIDED(17, 3, 1, 2), RELU, STRIDED(5, 1, 0, 2), STRIDED(3, 2, 1, 3),
       POOL_STRIDED(2, 1, 1), LINEAR(0));
LAYERS(pool_strides, false, STRIDED(18, 3, 2, 1), RELU, POOL_STRIDED(3, 1, 2), POOL_STRIDED(2, 0, 1),
       LINEAR(0));

/* Batch normalisation of a convolution with a bias and of a pooling, a branch, an addition and dropout. */
#define BATCH_NORM               \
    {                            \
        .kind = LAYER_BATCH_NORM \
    }
#define BRANCH(out, size, back)                                                  \
    {                                                                            \
        .kind = LAYER_CONV, .channels = out, .kernel = {1, size, size},          \
        .padding = {0, (size) / 2, (size) / 2}, .no_bias = true, .skipped = back \
    }
LAYERS(normed, false, BRANCH(7, 3, 0), BATCH_NORM, RELU, DROPOUT, POOL_STRIDED(3, 1, 2), BRANCH(18, 3, 0),
       BATCH_NORM, RELU, BRANCH(5, 3, 0), BATCH_NORM, BRANCH(5, 1, 5), BATCH_NORM, ADD(3), RELU, MEAN,
       LINEAR(0));
LAYERS(norm_first, false, BATCH_NORM, CONV(3, 1, 3, 3, 0, 1, 1), RELU, LINEAR(0));
LAYERS(residual, false, BRANCH(17, 7, 0), BATCH_NORM, RELU, POOL_STRIDED(3, 1, 2), BRANCH(9, 1, 0),
       BATCH_NORM, RELU,
       {.kind = LAYER_CONV,
        .channels = 9,
        .kernel = {1, 3, 3},
        .padding = {0, 1, 1},
        .stride = 2,
        .no_bias = true},
       BATCH_NORM, RELU, BRANCH(33, 1, 0), BATCH_NORM,
       {.kind = LAYER_CONV, .channels = 33, .kernel = {1, 1, 1}, .stride = 2, .no_bias = true, .skipped = 8},
       BATCH_NORM, ADD(3), RELU, MEAN, LINEAR(0));

LAYERS(conv_only, false, CONV(0, 1, 7, 5, 0, 0, 0));
LAYERS(deep, true, CONV(2, 3, 3, 3, 1, 1, 1), CONV(3, 2, 1, 2, 1, 0, 0), RELU, POOL(2, 2, 1), LINEAR(0));

Test(train_omp, each_layer_matches_the_oracle, .timeout = 120)
{
    static const struct model_table *const tables[] = {&linear,   &relu,  &conv, &conv_pool,
                                                       &in_place, &pools, &mean, &add};
    static const struct sizes sizes[] = {
        {{3, 1, 7, 5}, 4, 9, 7}, {{1, 1, 13, 11}, 1, 3, 1}, {{15, 1, 8, 9}, 18, 9, 5}};
    for (size_t i = 0; i < COUNT_OF(tables); i++)
        for (size_t j = 0; j < COUNT_OF(sizes); j++)
            check(tables[i], &sizes[j]);
    check(&conv_only, &sizes[0]);
    check(&add_pool, &sizes[0]);
    check(&add_mean, &sizes[2]);
    check(&deep, &(struct sizes){{2, 4, 5, 3}, 3, 7, 7});
    check(&deep, &(struct sizes){{1, 3, 9, 8}, 2, 20, 19});
}

Test(train_omp, strides_and_batch_normalisation_match_the_oracle, .timeout = 120)
{
    static const struct model_table *const tables[] = {&strides, &pool_strides, &normed, &norm_first,
                                                       &residual};
    static const struct sizes sizes[] = {
        {{3, 1, 13, 11}, 4, 9, 3}, {{1, 1, 19, 23}, 3, 3, 1}, {{7, 1, 12, 13}, 18, 19, 17}};
    for (size_t i = 0; i < COUNT_OF(tables); i++)
        for (size_t j = 0; j < COUNT_OF(sizes); j++)
            check(tables[i], &sizes[j]);
}

/* One batch size is prime, one is 1, and one is one less than the number of samples. */
Test(train_omp, each_layer_of_transformers_matches_the_oracle)
{
    static const struct sizes sizes[] = {
        {{3, 1, 7, 5}, 4, 9, 7}, {{1, 1, 7, 5}, 1, 3, 1}, {{1, 1, 14, 15}, 18, 20, 19}};
    for (size_t i = 0; i < COUNT_OF(transformers); i++)
        for (size_t j = 0; j < COUNT_OF(sizes); j++)
            check(transformers[i], &sizes[j]);
}

LAYERS(add_rows, false, LINEAR(9), LINEAR(9), ADD(2), LINEAR(0));

/* train-omp cannot add the output of an earlier layer after a linear layer. train-naive and the engine of
 * cuda/train/engine.cu can. */
Test(train_omp, rejects_unsupported_networks)
{
    const struct resources resources = {.threads = 2};
    struct net net;
    void *state;
    net_open(&net, &engine_naive, &add_rows, (struct shape){1, 1, 4, 4}, 3, 5, 2, 0);
    cr_expect_eq(engine_omp.open(&net.train, &resources, &state), STATUS_UNAVAILABLE);
    cr_expect(strstr(status_text(), "a linear layer before"), "%s", status_text());
    net_close(&net);
}

Test(train_omp, each_network_matches_the_oracle, .timeout = 120)
{
    for (size_t i = 0; model_tables[i].name; i++) {
        if (is_large_network(&model_tables[i]))
            continue;
        bool volumes = model_tables[i].volumetric;
        check(&model_tables[i],
              &(struct sizes){volumes ? (struct shape){1, 5, 8, 7} : (struct shape){1, 1, 17, 15}, 10, 9, 7});
        if (!model_has_batch_norm(&model_tables[i])) /* of one sample, gradients of biases are zero */
            check(&model_tables[i],
                  &(struct sizes){volumes ? (struct shape){3, 4, 4, 9} : (struct shape){3, 1, 16, 18}, 3, 2,
                                  1});
    }
    check(&model_tables[1], &(struct sizes){{1, 1, 16, 16}, 1, 300, 257});
}

/* Tests the network cnn with a prime batch size, which no number of threads, SIMD lanes or chunks divides. A
 * short batch follows. */
Test(train_omp, cnn_with_a_batch_of_257_matches_the_oracle, .timeout = 120)
{
    check(&model_tables[2], &(struct sizes){{1, 1, 10, 11}, 10, 260, 257});
}

Test(train_omp, half_precision_shifts_and_adamw_match_the_oracle, .timeout = 120)
{
    varied = true;
    check(&model_tables[1], &(struct sizes){{3, 1, 17, 15}, 10, 20, 7});
    check(&model_tables[3], &(struct sizes){{1, 5, 8, 7}, 10, 9, 7});
    check(&add_tokens, &(struct sizes){{3, 1, 7, 10}, 10, 20, 7});
}

/* ---- Planted faults ---- */

static enum status get_nan(void *state, struct train_state *into)
{
    enum status status = engine_omp.get(state, into);
    into->parameters[3] = NAN;
    return status;
}

/* Tests mixed samples in batches of odd size, in batches of one sample, and in short batches. */
Test(train_omp, mixed_samples_and_both_losses_match_the_oracle, .timeout = 120)
{
    static const struct mixing mixings[] = {{0, 0}, {0.8, 0}, {0, 1}, {0.8, 1}};
    varied = true;
    for (size_t i = 0; i < COUNT_OF(mixings); i++)
        for (int loss = 0; loss < 2; loss++) {
            mixing = mixings[i];
            loss_kind = (enum loss_kind)loss;
            check(&conv_pool, &(struct sizes){{3, 1, 7, 5}, 4, 9, 7});
            check(&linear, &(struct sizes){{1, 1, 13, 11}, 3, 3, 1});
            check(&deep, &(struct sizes){{2, 4, 5, 3}, 3, 20, 19});
            check(transformers[0], &(struct sizes){{3, 1, 7, 5}, 4, 9, 7});
        }
}

Test(train_omp, detects_a_planted_nan)
{
    struct engine engine = engine_omp;
    engine.get = get_nan;
    double worst = compare(&engine, &model_tables[1], &(struct sizes){{1, 1, 16, 16}, 10, 9, 7});
    cr_expect(!(worst <= TOLERANCE), "a NaN counts as an error of only %g", worst);
}

/* A GEMM with a planted fault: in the range of tiles that begins with tile 0, it omits the last term of each
 * sum. */
static void forgetful(const struct gemm *gemm, size_t first, size_t count)
{
    struct gemm less = *gemm;
    less.step_count -= first == 0 && gemm->step_count > 1;
    omp_net_gemm_kernels().multiply(&less, first, count);
}

static enum status open_forgetful(const struct train *train, const struct resources *resources, void **state)
{
    struct gemm_kernels gemm = omp_net_gemm_kernels();
    gemm.multiply = forgetful;
    return omp_net_open(train, resources, gemm, state);
}

Test(train_omp, detects_a_planted_fault)
{
    struct engine engine = engine_omp;
    engine.open = open_forgetful;
    for (size_t i = 0; model_tables[i].name; i++) {
        if (is_large_network(&model_tables[i]))
            continue;
        const struct sizes sizes = {{1, 1, 17, 15}, 10, 9, 7}, deep_sizes = {{1, 5, 8, 7}, 10, 9, 7};
        double worst = compare(&engine, &model_tables[i], model_tables[i].volumetric ? &deep_sizes : &sizes);
        cr_expect_gt(worst, 10 * TOLERANCE, "%s: a missing term causes an error of only %g",
                     model_tables[i].name, worst);
    }
}

/* ---- Longer runs ---- */

#ifdef FDSL_SANITIZED
#define FOLLOWED 5 /* sanitizers check memory, not losses */
#else
#define FOLLOWED 50
#endif

/* Runs `followed` steps on an engine and on train-naive, with the same initial parameters and batches. The
 * relative error of each loss must be at most 1e-4. */
static void follow(const struct engine *engine, const struct model_table *table, struct shape input,
                   uint32_t batch, uint32_t count, uint32_t followed)
{
    struct net net, naive;
    net_open(&net, engine, table, fitted(table, input), 10, count, batch, 0);
    net_open(&naive, &engine_naive, table, fitted(table, input), 10, count, batch, 0);
    uint32_t steps = train_steps(&net.train);
    for (uint32_t i = 0; i < followed; i++) {
        struct train_totals totals, wanted;
        must(engine->steps(net.state, i / steps, i % steps, 1));
        must(engine_naive.steps(naive.state, i / steps, i % steps, 1));
        must(engine->totals(net.state, &totals));
        must(engine_naive.totals(naive.state, &wanted));
        cr_expect_float_eq(totals.loss, wanted.loss, 1e-4 * wanted.loss, "%s, step %u: %.9g, not %.9g",
                           table->name, i, totals.loss, wanted.loss);
        cr_expect_eq(totals.samples, wanted.samples);
    }
    net_close(&net);
    net_close(&naive);
}

static void follow_all(const struct engine *engine)
{
    for (size_t i = 0; model_tables[i].name; i++) {
        if (is_large_network(&model_tables[i]))
            continue;
        follow(engine, &model_tables[i], small_input(&model_tables[i]), 7, 40,
               has_residual_blocks(&model_tables[i]) || model_has_batch_norm(&model_tables[i]) ? FOLLOWED / 5
                                                                                               : FOLLOWED);
    }
    follow(engine, &model_tables[1], (struct shape){3, 1, 16, 16}, 257, 300, FOLLOWED / 5);
}

Test(train_omp, losses_of_fifty_steps_match_train_naive, .timeout = 120)
{
    follow_all(&engine_omp);
}

/* Trains two epochs with `threads` threads. Returns the parameters and moments, which the caller frees. */
static float *learnt(const struct model_table *table, struct shape input, int threads, struct model *model)
{
    struct net net;
    const struct resources resources = {.threads = threads};
    net_open(&net, &engine_omp, table, fitted(table, input), 10, 83, 33, 0.1f);
    engine_omp.close(net.state);
    must(engine_omp.open(&net.train, &resources, &net.state));
    const struct train_state begin = {net.initial, net.zeros, net.zeros, {0, 0}, NULL};
    must(engine_omp.set(net.state, &begin));
    for (uint32_t epoch = 0; epoch < 2; epoch++)
        must(engine_omp.steps(net.state, epoch, 0, train_steps(&net.train)));
    float *arenas = malloc(3 * net.model.arena_values * sizeof *arenas);
    struct train_state state = {
        arenas, arenas + net.model.arena_values, arenas + 2 * net.model.arena_values, {0, 0}, NULL};
    must(engine_omp.get(net.state, &state));
    *model = net.model;
    net_close(&net);
    return arenas;
}

Test(train_omp, any_number_of_threads_gives_the_same_bits, .timeout = 120)
{
    static const int threads[] = {2, 3, 65};
    for (size_t i = 0; model_tables[i].name; i++) {
        if (is_large_network(&model_tables[i]))
            continue;
        struct shape input =
            model_tables[i].volumetric ? (struct shape){1, 4, 9, 8} : (struct shape){1, 1, 17, 16};
        struct model model;
        float *one = learnt(&model_tables[i], input, 1, &model);
        for (size_t t = 0; t < COUNT_OF(threads); t++) {
            float *more = learnt(&model_tables[i], input, threads[t], &model);
            cr_expect_eq(memcmp(one, more, 3 * model.arena_values * sizeof *one), 0, "%s: %d threads differ",
                         model_tables[i].name, threads[t]);
            free(more);
        }
        free(one);
    }
}

/* Tests inference with a batch size that does not divide the number of samples. */
Test(train_omp, inference_matches_the_oracle)
{
    for (size_t i = 0; model_tables[i].name; i++) {
        if (is_large_network(&model_tables[i]))
            continue;
        struct shape input =
            model_tables[i].volumetric ? (struct shape){2, 4, 9, 8} : (struct shape){1, 1, 17, 16};
        const struct resources resources = {.threads = 2};
        struct net net;
        void *state;
        float logits[29 * 10], wanted[29 * 10];
        net_open(&net, &engine_oracle, &model_tables[i], fitted(&model_tables[i], input), 10, 29, 7, 0);
        must(engine_oracle.evaluate(net.state, DATA_TRAIN, 0, 29, wanted));
        net.train.forward_only = true;
        must(engine_omp.open(&net.train, &resources, &state));
        const struct train_state parameters = {.parameters = net.initial};
        must(engine_omp.set(state, &parameters));
        must(engine_omp.evaluate(state, DATA_TRAIN, 0, 29, logits));
        cr_expect_leq(distance(logits, wanted, 290), 1e-5, "%s: off by %g", model_tables[i].name,
                      distance(logits, wanted, 290));
        cr_expect_gt(engine_omp.memory_bytes(state), 4 * net.model.parameters);
        engine_omp.close(state);
        net_close(&net);
    }
}

/* ---- With OpenBLAS ---- */

/* Returns the engine with OpenBLAS. Skips the test if OpenBLAS is missing. */
static const struct engine *openblas(void)
{
    const struct variant_entry *entry = variant_find("train-omp-blas");
    const struct resources resources = {.threads = 2};
    if (variant_available(entry, &resources) != STATUS_OK)
        cr_skip_test("%s", status_text());
    return entry->variant->traits;
}

Test(train_omp, each_network_with_openblas_matches_the_oracle, .timeout = 60)
{
    const struct engine *engine = openblas();
    for (size_t i = 0; model_tables[i].name; i++) {
        if (is_large_network(&model_tables[i]))
            continue;
        const struct sizes sizes = {{1, 1, 17, 15}, 10, 9, 7}, deep_sizes = {{1, 5, 8, 7}, 10, 9, 7};
        double worst = compare(engine, &model_tables[i], model_tables[i].volumetric ? &deep_sizes : &sizes);
        cr_expect_leq(worst, TOLERANCE, "%s: off by %g", model_tables[i].name, worst);
    }
}

Test(train_omp, losses_of_fifty_steps_with_openblas_match_train_naive, .timeout = 120)
{
    follow_all(openblas());
}

/* ---- Learning ---- */

/* Trains on generated digits. Returns the accuracy on the test set. */
static double learn(const struct model_table *table, uint32_t samples, uint32_t epochs, double rate)
{
    const struct data_request request = {
        .name = "digits", .train_size = samples, .resources = {.threads = 2}};
    struct data data = {0};
    struct model model;
    void *state;
    uint32_t right = 0;
    must(data_open(&request, &data));
    data_normalise(&data, true);
    must(model_build(table, data.shape, data.classes, &model));
    const struct train train = {
        .model = &model,
        .data = &data,
        .batch = 16,
        .optimizer = {.kind = OPTIMIZER_ADAM, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8},
        .schedule = {.rate = rate}};
    float *arenas = calloc(2 * model.arena_values, sizeof *arenas);
    uint32_t tests = data.sets[DATA_TEST].count, classes = data.classes;
    float *logits = malloc((size_t)tests * classes * sizeof *logits);
    model_initialise(&model, 0, arenas);
    const struct train_state begin = {
        arenas, arenas + model.arena_values, arenas + model.arena_values, {0, 0}, NULL};
    must(engine_omp.open(&train, &request.resources, &state));
    must(engine_omp.set(state, &begin));
    for (uint32_t epoch = 0; epoch < epochs; epoch++)
        must(engine_omp.steps(state, epoch, 0, train_steps(&train)));
    must(engine_omp.evaluate(state, DATA_TEST, 0, tests, logits));
    for (uint32_t i = 0; i < tests; i++) {
        uint32_t best = 0;
        for (uint32_t k = 1; k < classes; k++)
            best = logits[i * classes + k] > logits[i * classes + best] ? k : best;
        right += best == data.sets[DATA_TEST].labels[i];
    }
    engine_omp.close(state);
    data_close(&data);
    free(arenas);
    free(logits);
    return (double)right / tests;
}

Test(train_omp, learns_digits_in_an_epoch, .timeout = 60)
{
    double right = learn(&model_tables[1], 0, 1, 0.001);
    cr_expect_geq(right, 0.97, "%g right", right);
}

#ifndef FDSL_SANITIZED
/* Guessing gives 10 %; four epochs gave 33 %. */
Test(train_omp, a_transformer_learns_digits, .timeout = 120)
{
    double right = learn(table_of("vit-micro"), 1250, 4, 0.003);
    cr_expect_geq(right, 0.25, "%g right", right);
}
#endif

#endif
