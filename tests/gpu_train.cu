/* The engine of train-cuda against the oracle, layer by layer and net by net, over odd sizes: gradients of a
 * step, losses of 50, logits of the test set; and whether the same seed gives the same bits, also where
 * another engine goes on in the middle. make check-gpu runs it.
 *
 *   gpu_train [--short] [NAME ...]   networks to try, all without a name; --short: small batches, two steps
 *
 * A line a case; exit status 3 when one finds a difference, 4 without a GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/device.h"
#include "core/philox.h"
#include "train/engine.cuh"

#define OFF_MAX    1e-4 /* of losses; of gradients and logits, norm by norm */
#define LOSS_FLOOR 1e-2 /* a smaller loss is what is left of logits that are not small */

/* ---- Networks ---- */

#define LAYERS(name, ...) static const struct layer_spec name##_layers[] = {__VA_ARGS__}
#define CONV(out, t, y, x, pad_t, pad_y, pad_x)                                                       \
    {                                                                                                 \
        .kind = LAYER_CONV, .channels = (out), .kernel = {t, y, x}, .padding = {pad_t, pad_y, pad_x}, \
        .rate = 0                                                                                     \
    }
#define POOL(t, y, x)                                                                    \
    {                                                                                    \
        .kind = LAYER_POOL, .channels = 0, .kernel = {t, y, x}, .padding = {}, .rate = 0 \
    }
#define RELU                                                                      \
    {                                                                             \
        .kind = LAYER_RELU, .channels = 0, .kernel = {}, .padding = {}, .rate = 0 \
    }
#define DROPOUT(share)                                                                     \
    {                                                                                      \
        .kind = LAYER_DROPOUT, .channels = 0, .kernel = {}, .padding = {}, .rate = (share) \
    }
#define LINEAR(out)                                                                     \
    {                                                                                   \
        .kind = LAYER_LINEAR, .channels = (out), .kernel = {}, .padding = {}, .rate = 0 \
    }
#define ADD(layers)                                                                                \
    {                                                                                              \
        .kind = LAYER_ADD, .channels = 0, .kernel = {}, .padding = {}, .rate = 0, .back = (layers) \
    }
#define MEAN                                                                      \
    {                                                                             \
        .kind = LAYER_MEAN, .channels = 0, .kernel = {}, .padding = {}, .rate = 0 \
    }

LAYERS(linear, LINEAR(67), LINEAR(0));
LAYERS(relu, LINEAR(65), RELU, LINEAR(33), RELU, DROPOUT(0.5f), LINEAR(0));
LAYERS(conv, CONV(3, 1, 3, 2, 0, 1, 0), CONV(37, 1, 2, 3, 0, 0, 2), CONV(2, 1, 1, 1, 0, 1, 0), LINEAR(0));
LAYERS(conv_deep, CONV(5, 3, 3, 3, 1, 1, 1), RELU, CONV(70, 2, 1, 2, 1, 0, 0), LINEAR(0));
LAYERS(pool, CONV(3, 1, 3, 3, 0, 1, 1), POOL(1, 2, 3), RELU, LINEAR(0));
LAYERS(pool_deep, CONV(4, 1, 1, 1, 0, 0, 0), RELU, POOL(2, 3, 2), LINEAR(0));
LAYERS(dropout, LINEAR(41), DROPOUT(0.25f), CONV(3, 1, 1, 1, 0, 0, 0), DROPOUT(0.5f), LINEAR(0));

LAYERS(mean, CONV(37, 1, 3, 3, 0, 1, 1), MEAN, RELU, LINEAR(0));
/* Outputs that come from a convolution, a ReLU, a pooling and an addition, and one that is taken twice. */
LAYERS(add, CONV(5, 1, 3, 3, 0, 1, 1), RELU, CONV(5, 1, 3, 3, 0, 1, 1), DROPOUT(0.25f), ADD(3),
       CONV(5, 1, 3, 3, 0, 1, 1), ADD(2), ADD(3), ADD(3), RELU, POOL(1, 2, 1), CONV(5, 1, 3, 3, 0, 1, 1),
       ADD(2), LINEAR(0));
/* The pooling leaves a row of what is added to its own output, widened by zeros: for heights of 7. */
LAYERS(add_pool, CONV(3, 1, 3, 3, 0, 1, 1), RELU, POOL(1, 2, 1), CONV(3, 1, 1, 1, 0, 2, 0), ADD(3),
       LINEAR(0));
LAYERS(add_rows, LINEAR(67), LINEAR(67), RELU, ADD(3), LINEAR(0));

#define TABLE(name, deep)                                       \
    {                                                           \
#name, "", deep, name##_layers, COUNT_OF(name##_layers) \
    }
static const struct model_table tables[] = {
    TABLE(linear, false), TABLE(relu, false),     TABLE(conv, false),     TABLE(conv_deep, true),
    TABLE(pool, false),   TABLE(pool_deep, true), TABLE(dropout, false),  TABLE(mean, false),
    TABLE(add, false),    TABLE(add_pool, false), TABLE(add_rows, false),
};

static const struct model_table *find_table(const char *name)
{
    for (const struct model_table *table = model_tables; table->name; table++)
        if (strcmp(table->name, name) == 0)
            return table;
    for (const struct model_table &table : tables)
        if (strcmp(table.name, name) == 0)
            return &table;
    return NULL;
}

/* ---- Cases ---- */

struct trial {
    const char *table;
    struct shape shape;
    uint32_t classes, batch, count, steps; /* `count` samples to learn from */
    enum optimizer_kind optimizer;
    enum data_type type;
    float smoothing;
    struct augment augment;
};

static const struct shape small = {3, 1, 7, 5}, gray = {1, 1, 13, 11}, volume = {2, 4, 5, 3},
                          picture = {1, 1, 28, 28}, colour = {3, 1, 17, 15}, clip = {3, 5, 9, 8};
static const struct augment still = {0, false}, moved = {2, true};

#define SHORT_BATCH 64
#define SHORT_STEPS 2

static const struct trial trials[] = {
    {"linear", small, 4, 1, 3, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"linear", gray, 1000, 257, 600, 50, OPTIMIZER_ADAM, DATA_U8, 0.1f, still},
    {"relu", small, 4, 7, 17, 50, OPTIMIZER_SGD, DATA_F16, 0, moved},
    {"relu", gray, 1, 3, 5, 10, OPTIMIZER_SGD, DATA_U8, 0.1f, moved},
    {"conv", small, 4, 1, 1, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"conv", gray, 3, 7, 17, 50, OPTIMIZER_ADAMW, DATA_U8, 0.1f, moved},
    {"conv", small, 5, 257, 600, 5, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"conv_deep", volume, 3, 7, 17, 50, OPTIMIZER_SGD, DATA_F16, 0, moved},
    {"conv_deep", clip, 2, 1, 3, 20, OPTIMIZER_ADAM, DATA_U8, 0, still},
    {"pool", small, 4, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"pool", gray, 2, 257, 300, 10, OPTIMIZER_SGD, DATA_U8, 0, moved},
    {"pool_deep", volume, 2, 13, 30, 50, OPTIMIZER_SGD, DATA_F16, 0, still},
    {"dropout", small, 4, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"logreg", picture, 10, 257, 600, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"logreg", colour, 1, 1, 3, 50, OPTIMIZER_ADAM, DATA_U8, 0, still},
    {"lenet", picture, 10, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0, moved},
    {"lenet", colour, 3, 1, 3, 50, OPTIMIZER_ADAM, DATA_U8, 0.1f, still},
    {"lenet", picture, 10, 257, 600, 3, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"cnn", colour, 3, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0.1f, moved},
    {"cnn", {1, 1, 16, 16}, 10, 1, 3, 50, OPTIMIZER_ADAMW, DATA_U8, 0, still},
    {"cnn", picture, 10, 65, 100, 2, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"cnn3d", clip, 2, 7, 17, 50, OPTIMIZER_SGD, DATA_F16, 0, moved},
    {"cnn3d", {1, 4, 8, 8}, 1, 1, 3, 10, OPTIMIZER_ADAM, DATA_F16, 0, still},
    {"mean", small, 4, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"mean", picture, 3, 257, 300, 5, OPTIMIZER_SGD, DATA_U8, 0, moved},
    {"add", small, 4, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"add", gray, 3, 257, 300, 10, OPTIMIZER_ADAMW, DATA_U8, 0.1f, moved},
    {"add_pool", small, 4, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"add_rows", small, 4, 7, 17, 50, OPTIMIZER_SGD, DATA_F16, 0, moved},
    {"cnn-fdsl", {1, 1, 8, 8}, 1000, 7, 17, 50, OPTIMIZER_SGD, DATA_U8, 0.1f, moved},
    {"cnn-fdsl", {3, 1, 17, 15}, 10, 1, 3, 50, OPTIMIZER_ADAM, DATA_U8, 0, still},
    {"cnn-fdsl", picture, 10, 3, 50, 20, OPTIMIZER_SGD, DATA_U8, 0, still},
    {"cnn-fdsl", {1, 1, 64, 65}, 100, 1, 9, 5, OPTIMIZER_SGD, DATA_U8, 0, still},
};

/* ---- Data and engines ---- */

#define SEED        7
#define HALF_OF_ONE 0x3c00u

static void *must_have(void *memory)
{
    if (!memory) {
        fprintf(stderr, "gpu_train: out of memory\n");
        exit(1);
    }
    return memory;
}

static void must(enum status status)
{
    if (status != STATUS_OK) {
        printf("FAILED  %s\n", status_text());
        exit(1);
    }
}

/* Random bytes, or halves from -1.998 to 1.998, with random labels. */
static void fill_set(const struct data *data, uint32_t stream, uint32_t count, struct data_set *set)
{
    set->count = count;
    set->values = must_have(malloc(count * data->sample_bytes));
    set->labels = static_cast<uint32_t *>(must_have(malloc(count * sizeof *set->labels)));
    for (size_t i = 0; i < count * data->sample_values; i++) {
        uint32_t word = philox(philox_key(1), (uint32_t)i, stream, 0, 0).word[0];
        if (data->type == DATA_U8)
            static_cast<uint8_t *>(set->values)[i] = (uint8_t)word;
        else
            static_cast<uint16_t *>(set->values)[i] = (uint16_t)((word & 0x83ffu) | HALF_OF_ONE);
    }
    for (uint32_t i = 0; i < count; i++)
        set->labels[i] = philox_below(philox(philox_key(2), i, stream, 0, 0).word[0], data->classes);
}

static void data_random(const struct trial *trial, struct data *data)
{
    *data = {};
    data->shape = trial->shape;
    data->type = trial->type;
    data->classes = trial->classes;
    data->sample_values = shape_values(&trial->shape);
    data->sample_bytes = data->sample_values * (trial->type == DATA_U8 ? 1 : 2);
    fill_set(data, DATA_TRAIN, trial->count, &data->sets[DATA_TRAIN]);
    fill_set(data, DATA_TEST, trial->batch + 3, &data->sets[DATA_TEST]);
    data_normalise(data, true);
}

/* An engine in a place of its training. */
struct learner {
    const struct engine *engine;
    void *state;
};

static struct learner learner_open(const struct engine *engine, const struct train *train,
                                   const struct train_state *from)
{
    struct learner learner = {engine, NULL};
    const struct resources resources = {.threads = 1, .device = 0};
    must(engine->open(train, &resources, &learner.state));
    must(engine->set(learner.state, from));
    return learner;
}

static struct train_totals take_steps(const struct learner *learner, const struct train *train,
                                      uint32_t first, uint32_t count)
{
    struct train_totals totals;
    uint32_t steps = train_steps(train);
    for (uint32_t i = first; i < first + count; i++)
        must(learner->engine->steps(learner->state, i / steps, i % steps, 1));
    must(learner->engine->totals(learner->state, &totals));
    return totals;
}

static struct train_state state_of(const struct learner *learner, size_t values)
{
    struct train_state state;
    if (!train_state_new(values, &state))
        must_have(NULL);
    must(learner->engine->get(learner->state, &state));
    return state;
}

/* ---- Comparisons ---- */

/* The norm of what differs over the norm of what is right; of two zeros 0. */
static double off_by(const float *mine, const float *right, size_t count)
{
    double off = 0, all = 0;
    for (size_t i = 0; i < count; i++) {
        off += ((double)mine[i] - right[i]) * ((double)mine[i] - right[i]);
        all += (double)right[i] * right[i];
    }
    return off == 0 ? 0 : sqrt(off / all);
}

static double worst_of(double a, double b)
{
    return isnan(a) || a > b ? a : b; /* a NaN is the worst, on either side */
}

static double compare_gradients(const struct learner *mine, const struct learner *oracle,
                                const struct model *model)
{
    size_t bytes = model->arena_values * sizeof(float);
    float *ours = static_cast<float *>(must_have(malloc(bytes)));
    float *right = static_cast<float *>(must_have(malloc(bytes)));
    must(mine->engine->gradients(mine->state, ours));
    must(oracle->engine->gradients(oracle->state, right));
    double worst = 0;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        worst = worst_of(off_by(ours + tensor->first, right + tensor->first, tensor->values), worst);
    }
    free(ours);
    free(right);
    return worst;
}

static double compare_losses(const struct train_totals *mine, const struct train_totals *right)
{
    double least = LOSS_FLOOR * (double)right->samples;
    if (mine->samples != right->samples)
        return INFINITY;
    return fabs(mine->loss - right->loss) / (right->loss > least ? right->loss : least);
}

static double compare_logits(const struct learner *mine, const struct learner *oracle,
                             const struct train *train)
{
    uint32_t count = train->data->sets[DATA_TEST].count - 1; /* from the second on */
    size_t values = (size_t)count * train->model->classes;
    float *ours = static_cast<float *>(must_have(malloc(values * sizeof *ours)));
    float *right = static_cast<float *>(must_have(malloc(values * sizeof *right)));
    must(mine->engine->evaluate(mine->state, DATA_TEST, 1, count, ours));
    must(oracle->engine->evaluate(oracle->state, DATA_TEST, 1, count, right));
    double off = off_by(ours, right, values);
    free(ours);
    free(right);
    return off;
}

/* Whether another engine that goes on behind half of the steps comes to the same bits as `end`. */
static bool goes_on(const struct train *train, const struct train_state *begin, uint32_t steps,
                    const struct train_state *end)
{
    size_t values = train->model->arena_values;
    struct learner one = learner_open(&engine_cuda, train, begin);
    take_steps(&one, train, 0, steps / 2);
    struct train_state middle = state_of(&one, values);
    struct learner two = learner_open(&engine_cuda, train, &middle);
    take_steps(&two, train, steps / 2, steps - steps / 2);
    struct train_state last = state_of(&two, values);
    bool same = memcmp(last.parameters, end->parameters, values * sizeof(float)) == 0 &&
                memcmp(last.first, end->first, values * sizeof(float)) == 0 &&
                memcmp(last.second, end->second, values * sizeof(float)) == 0;
    engine_cuda.close(one.state);
    engine_cuda.close(two.state);
    train_state_free(&middle);
    train_state_free(&last);
    return same;
}

/* Prints a line; whether all is well. */
static bool compare(const struct trial *trial, const struct train *train, const struct train_state *begin)
{
    struct learner mine = learner_open(&engine_cuda, train, begin);
    struct learner oracle = learner_open(&engine_oracle, train, begin);
    double gradients = 0, losses = 0;
    for (uint32_t i = 0; i < trial->steps; i++) {
        struct train_totals ours = take_steps(&mine, train, i, 1), right = take_steps(&oracle, train, i, 1);
        losses = worst_of(compare_losses(&ours, &right), losses);
        if (i == 0)
            gradients = compare_gradients(&mine, &oracle, train->model);
    }
    double logits = compare_logits(&mine, &oracle, train);
    struct train_state end = state_of(&mine, train->model->arena_values);
    bool same = goes_on(train, begin, trial->steps, &end);
    bool well = gradients <= OFF_MAX && losses <= OFF_MAX && logits <= OFF_MAX * trial->steps && same;
    printf("%s  %-9s %ux%ux%ux%u, %u classes, batch %u, %u steps: off by %.1e in gradients, %.1e in losses, "
           "%.1e in logits%s\n",
           well ? "ok    " : "FAILED", trial->table, trial->shape.channels, trial->shape.depth,
           trial->shape.height, trial->shape.width, trial->classes, trial->batch, trial->steps, gradients,
           losses, logits, same ? "" : "; not the same bits twice");
    engine_cuda.close(mine.state);
    engine_oracle.close(oracle.state);
    train_state_free(&end);
    return well;
}

static bool run(const struct trial *trial)
{
    struct model model;
    struct data data;
    struct train_state begin;
    must(model_build(find_table(trial->table), trial->shape, trial->classes, &model));
    data_random(trial, &data);
    if (!train_state_new(model.arena_values, &begin))
        must_have(NULL);
    model_initialise(&model, SEED, begin.parameters);
    struct train train = {};
    train.model = &model;
    train.data = &data;
    train.seed = SEED;
    train.batch = trial->batch;
    train.augment = trial->augment;
    train.optimizer = {trial->optimizer, 0.9, 0.9, 0.999, 1e-8, 1e-3};
    train.schedule = {SCHEDULE_COSINE, trial->optimizer == OPTIMIZER_SGD ? 0.01 : 0.001, 5, 1000, 0, 0};
    train.smoothing = trial->smoothing;
    bool well = compare(trial, &train, &begin);
    train_state_free(&begin);
    data_close(&data);
    return well;
}

/* Whether the network is one of those named. */
static bool asked_for(const char *name, int count, char **names)
{
    for (int i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return count == 0;
}

int main(int argc, char **argv)
{
    int failures = 0;
    bool brief = argc > 1 && strcmp(argv[1], "--short") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0); /* a line as soon as it is known */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_train: %s\n", status_text());
        return 4;
    }
    argv += brief ? 2 : 1;
    argc -= brief ? 2 : 1;
    for (int i = 0; i < argc; i++)
        if (!find_table(argv[i])) {
            fprintf(stderr, "gpu_train: unknown network '%s'\n", argv[i]);
            return 2;
        }
    for (struct trial trial : trials) {
        if (!asked_for(trial.table, argc, argv) || (brief && trial.batch > SHORT_BATCH))
            continue;
        if (brief && trial.steps > SHORT_STEPS)
            trial.steps = SHORT_STEPS;
        failures += !run(&trial);
    }
    return failures ? 3 : 0;
}
