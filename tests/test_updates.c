/* Compares optimizers, clipping, the moving average, schedules and losses with values that
 * scripts/check/optimizers.py computes in float64 from the formulas of the papers, and compares with PyTorch
 * and timm. */
#include "core/portable.h"
#include "train_support.h"

#include <stdio.h>

#include "train/host_engine.h"
#include "train/naive_optimizer.h"

#define STEPS      4
#define RATE_STEPS 60

/* The network of the file. */
struct small_tensor {
    const char *name;
    uint64_t shape[4];
    uint32_t axes;
    bool hidden, head;
};
static const struct small_tensor tensors[] = {
    {"stem.weight", {4, 2}, 2, false, false}, {"stem.bias", {4}, 1, false, false},
    {"tall.weight", {5, 3}, 2, true, false},  {"conv.weight", {3, 2, 2, 1}, 4, true, false},
    {"head.weight", {3, 3}, 2, false, true},  {"head.bias", {3}, 1, false, true},
};
#define ARENA (COUNT_OF(tensors) * MODEL_ALIGNMENT)

static const struct {
    const char *name;
    struct optimizer optimizer;
} cases[] = {
    {"sgd", {.kind = OPTIMIZER_SGD}},
    {"adam", {.kind = OPTIMIZER_ADAM}},
    {"adamw", {.kind = OPTIMIZER_ADAMW}},
    {"lamb", {.kind = OPTIMIZER_LAMB}},
    {"lamb-undecayed", {.kind = OPTIMIZER_LAMB, .weight_decay = -1}}, /* negative: 0 */
    {"muon", {.kind = OPTIMIZER_MUON}},
    {"clip-norm", {.kind = OPTIMIZER_ADAMW, .clip_norm = 0.5}},
    {"clip-value", {.kind = OPTIMIZER_ADAMW, .clip_value = 0.3}},
    {"clip-adaptive", {.kind = OPTIMIZER_SGD, .clip_adaptive = 0.05}},
    {"lamb-clip-norm", {.kind = OPTIMIZER_LAMB, .clip_norm = 1}},
    {"muon-clip-adaptive", {.kind = OPTIMIZER_MUON, .clip_adaptive = 0.05}},
    {"ema-warmup", {.kind = OPTIMIZER_ADAMW, .average = 0.55, .average_warms = true}},
};

/* All warm up from 0.001 to 0.1 over 6 steps, and end after 50 steps at 0.002. */
static const struct {
    const char *name;
    struct schedule schedule;
} rates[] = {
    {"cosine", {.kind = SCHEDULE_COSINE}},
    {"cosine-k", {.kind = SCHEDULE_COSINE, .k_decay = 1.5}},
    {"cosine-cycles", {.kind = SCHEDULE_COSINE, .cycles = 2, .cycle_decay = 0.5}},
    {"cosine-mul", {.kind = SCHEDULE_COSINE, .cycles = 2, .cycle_decay = 0.5, .cycle_mul = 3}},
    {"polynomial-mul", {.kind = SCHEDULE_POLYNOMIAL, .power = 2, .k_decay = 1, .cycles = 2, .cycle_mul = 3}},
    {"polynomial-k", {.kind = SCHEDULE_POLYNOMIAL, .power = 2, .k_decay = 0.7}},
    {"tanh", {.kind = SCHEDULE_TANH}},
    {"step", {.kind = SCHEDULE_STEP, .decay_steps = 10.75, .gamma = 0.5}},
};

static const struct {
    const char *name;
    struct binary_loss binary;
} losses[] = {
    {"bce", {0}},
    {"bce-sum", {.sums = true}},
    {"bce-threshold", {.thresholds = true, .threshold = 0.2f}},
    {"bce-pos-weight", {.positive_extra = 2}},
    {"bce-all", {.sums = true, .thresholds = true, .threshold = 0.5f, .positive_extra = -0.5f}},
};

/* ---- The file ---- */

/* The values of a case and a tensor that were compared so far, of all that the file has. */
static uint32_t compared;

/* Reads the `count` values of a case and a tensor. Ends the test unless the file has exactly these. */
static void read_values(const char *name, const char *tensor, size_t count, double *values)
{
    char line[256], prefix[64];
    size_t found = 0;
    FILE *file = fopen("tests/data/train/updates.csv", "r");
    cr_assert_not_null(file);
    const int length = snprintf(prefix, sizeof prefix, "%s,%s,", name, tensor);
    while (fgets(line, sizeof line, file)) {
        unsigned index;
        double value;
        if (strncmp(line, prefix, (size_t)length) != 0)
            continue;
        cr_assert_eq(sscanf(line + length, "%u,%lf", &index, &value), 2, "%s", line);
        cr_assert(index == found && found < count, "%s", line);
        values[found++] = value;
    }
    fclose(file);
    cr_assert_eq(found, count, "%s %s", name, tensor);
    compared += (uint32_t)count;
}

/* ---- Updates ---- */

static size_t values_of(const struct small_tensor *tensor)
{
    size_t values = 1;
    for (uint32_t a = 0; a < tensor->axes; a++)
        values *= tensor->shape[a];
    return values;
}

static void small_model(struct model *model)
{
    *model = (struct model){.tensor_count = COUNT_OF(tensors), .arena_values = ARENA};
    for (uint32_t t = 0; t < COUNT_OF(tensors); t++) {
        struct model_tensor *tensor = &model->tensors[t];
        tensor->first = t * MODEL_ALIGNMENT;
        tensor->values = values_of(&tensors[t]);
        memcpy(tensor->shape, tensors[t].shape, sizeof tensors[t].shape);
        tensor->axes = tensors[t].axes;
        tensor->decays = true;
        tensor->hidden = tensors[t].hidden;
        tensor->head = tensors[t].head;
    }
}

/* Writes the numbers of a step to an arena. The script computes the same ones. */
static void draw(uint32_t step, double scale, float *arena)
{
    for (uint32_t t = 0; t < COUNT_OF(tensors); t++)
        for (uint32_t i = 0; i < values_of(&tensors[t]); i++)
            arena[t * MODEL_ALIGNMENT + i] =
                (float)(scale * ((i * 7919 + step * 104729 + t * 1299709 + 12345) % 2003 / 1001.0 - 1));
}

/* Trains with the gradients of the file. Returns the parameters or their average. */
static void train_case(const struct optimizer *optimizer, const struct model *model, float *result)
{
    static float arenas[6][ARENA], scratch[64];
    struct train train = {.model = model, .optimizer = *optimizer};
    const struct naive_arenas all = {arenas[0], arenas[1], arenas[2], arenas[3], arenas[4], arenas[5]};
    memset(arenas, 0, sizeof arenas);
    train.optimizer.momentum = train.optimizer.beta1 = 0.9;
    train.optimizer.beta2 = 0.99;
    train.optimizer.epsilon = 1e-6;
    train.optimizer.weight_decay = optimizer->weight_decay < 0 ? 0 : 0.05;
    train.optimizer.matrix_rate = 2;
    train.schedule = (struct schedule){.rate = 0.01};
    cr_assert(naive_optimizer_scratch(&train) <= COUNT_OF(scratch));
    draw(0, 0.5, all.parameters);
    memcpy(all.ema, all.parameters, sizeof arenas[0]);
    for (uint32_t step = 0; step < STEPS; step++) {
        struct update update = optimizer_at(&train.optimizer, &train.schedule, step);
        draw(step + 1, 1, all.gradients);
        if (optimizer->clip_norm > 0)
            update.clip =
                (float)optimizer_clip(optimizer->clip_norm, sqrt(naive_squares(all.gradients, ARENA)));
        naive_update(&train, &update, &all, scratch);
    }
    memcpy(result, optimizer->average > 0 ? all.ema : all.parameters, sizeof arenas[0]);
}

Test(updates, are_those_of_the_papers)
{
    struct model model;
    float result[ARENA], begin[ARENA] = {0};
    small_model(&model);
    draw(0, 0.5, begin);
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        train_case(&cases[c].optimizer, &model, result);
        for (uint32_t t = 0; t < COUNT_OF(tensors); t++) {
            double values[MODEL_ALIGNMENT], off = 0, way = 0;
            const size_t first = model.tensors[t].first, count = model.tensors[t].values;
            read_values(cases[c].name, tensors[t].name, count, values);
            for (size_t i = 0; i < count; i++) {
                off += (result[first + i] - values[i]) * (result[first + i] - values[i]);
                way += (values[i] - begin[first + i]) * (values[i] - begin[first + i]);
            }
            cr_expect(sqrt(off) <= 1e-4 * sqrt(way), "%s %s: error %g of a change of %g", cases[c].name,
                      tensors[t].name, sqrt(off), sqrt(way));
        }
    }
    cr_expect_eq(compared, COUNT_OF(cases) * 51, "%u", compared);
}

/* ---- Schedules ---- */

Test(updates, rates_are_those_of_the_formulas)
{
    for (size_t c = 0; c < COUNT_OF(rates); c++) {
        struct schedule schedule = rates[c].schedule;
        double values[RATE_STEPS];
        schedule.rate = 0.1;
        schedule.warmup_steps = 6;
        schedule.warmup_begins = true;
        schedule.warmup_rate = 0.001;
        schedule.total_steps = 50;
        schedule.least = 0.002;
        read_values(rates[c].name, "rate", RATE_STEPS, values);
        for (uint32_t step = 0; step < RATE_STEPS; step++)
            cr_expect(fabs(schedule_rate(&schedule, step) - values[step]) <= 1e-12, "%s step %u: %.15g %.15g",
                      rates[c].name, step, schedule_rate(&schedule, step), values[step]);
    }
}

/* The noise is constant in an epoch, within its limit, and that of the seed. */
Test(updates, noise_changes_the_rate_between_epochs)
{
    struct schedule schedule = {
        .rate = 1, .noise_limit = 0.5, .noise_step = 20, .epoch_steps = 10, .seed = 5};
    double mean = 0, squares = 0;
    cr_expect(schedule_rate(&schedule, 19) == 1);
    for (uint32_t epoch = 2; epoch < 1002; epoch++) {
        const double rate = schedule_rate(&schedule, epoch * 10);
        cr_expect(rate == schedule_rate(&schedule, epoch * 10 + 9) && fabs(rate - 1) < 0.5, "%g", rate);
        cr_expect(rate != schedule_rate(&schedule, epoch * 10 + 10));
        mean += rate / 1000;
        squares += (rate - 1) * (rate - 1) / 1000;
    }
    /* The standard deviation of a normal variable that is cut at +-0.5 is 0.284. */
    cr_expect(fabs(mean - 1) < 0.03 && fabs(sqrt(squares) - 0.284) < 0.02, "%g %g", mean, sqrt(squares));
    const double before = schedule_rate(&schedule, 20);
    schedule.seed++;
    cr_expect(schedule_rate(&schedule, 20) != before);
}

/* ---- Losses ---- */

Test(updates, losses_are_those_of_the_formulas)
{
    static const float logits[3][4] = {{-30, -1.25f, 0.5f, 8}, {2.5f, 40, -0.75f, 0}, {0, 1, -1, 3}};
    static const struct target targets[3] = {{1, 2, 0.75f}, {3, 3, 0.75f}, {0, 1, 0.75f}};
    const struct model model = {.classes = 4};
    struct data data = {.classes = 4}; /* each sample has one class */
    struct train train = {.model = &model, .data = &data, .loss = LOSS_BINARY, .smoothing = 0.1f};
    for (size_t c = 0; c < COUNT_OF(losses); c++) {
        double values[3], slopes[12];
        train.binary = losses[c].binary;
        read_values(losses[c].name, "loss", 3, values);
        read_values(losses[c].name, "delta", 12, slopes);
        for (uint32_t j = 0; j < 3; j++) {
            float deltas[4];
            const float loss = sample_loss(&train, logits[j], &targets[j], 1, deltas);
            cr_expect(fabs(loss - values[j]) <= 1e-5 * fmax(1, values[j]), "%s sample %u: %g %g",
                      losses[c].name, j, loss, values[j]);
            for (uint32_t k = 0; k < 4; k++)
                cr_expect(fabs(deltas[k] - slopes[4 * j + k]) <= 1e-6, "%s sample %u class %u: %g %g",
                          losses[c].name, j, k, deltas[k], slopes[4 * j + k]);
        }
    }
}
