/* Compares the engine of train-graph with the oracle, the reference in double precision, for odd and large
 * batch sizes. Compares the gradients of the first step and of an epoch's short last batch, the losses and
 * updates of several steps, and the logits of the test set. Every five steps, the engine continues from the
 * oracle's state. Each planted fault must exceed one of the error bounds. In some cases, samples are masked,
 * or both engines load their samples from files (--feed load).
 *
 * Also checks that the same seed gives the same bits in all of these cases: single steps; long graphs; other
 * calls between steps; kernels that do not overlap; an engine that has already run and gets another state.
 * make check-gpu runs this program.
 *
 *     gpu_graph [--short] [NUMBER ...]   runs these cases (default: all)
 *     gpu_graph --count                  prints the number of cases
 *
 * --short leaves out large batches and planted faults, and runs at most two steps per case. The oracle is
 * slow, so run the cases in parallel.
 *
 * Prints one line per case. Exit status 2 if there is no case to run, 3 if a case fails, 4 without a GPU. */
#include <filesystem>
#include <string>

#include "gpu_learner.cuh"

#include "core/philox.h"
#include "machine/device.h"
#include "train/engines.cuh"

/* Bounds for the relative error of a gradient: the norm of the error divided by the norm of the gradient. */
#define EXACT_MAX    0.01 /* if pooling selects the same pixels as the oracle */
#define GRADIENT_MAX 0.15 /* otherwise: with bf16, some pooling windows select another pixel */
#define SEED         7
#define SHORT_BATCH  16
#define SHORT_STEPS  2

/* ---- Cases ---- */

struct trial {
    struct shape shape;
    uint32_t classes, batch, count, steps; /* `count`: training samples */
    enum optimizer_kind optimizer;
    float smoothing;
    struct augment augment;
    enum fault fault;
    bool exact;
    bool loaded;     /* DATA_LOAD */
    uint32_t masked; /* every `masked`-th sample is masked; 0: none */
    bool generic;    /* with the kernels for all devices, also on compute capability 9.0 */
};

static const struct shape gray = {1, 1, 28, 28}, colour = {3, 1, 32, 32};
static const struct augment still = {0, false}, moved = {3, true};

static const struct trial trials[] = {
    /* One to three steps. All layers up to the pooling are exact. */
    {gray, 10, 1, 3, 1, OPTIMIZER_SGD, 0, still, FAULT_NONE, true},
    {gray, 10, 2, 5, 1, OPTIMIZER_ADAM, 0, moved, FAULT_NONE, true},
    {gray, 1, 3, 8, 1, OPTIMIZER_SGD, 0, still, FAULT_NONE, true},
    {gray, 10, 7, 17, 1, OPTIMIZER_ADAMW, 0.3f, moved, FAULT_NONE, true},
    {gray, 10, 129, 300, 3, OPTIMIZER_SGD, 0.3f, still, FAULT_NONE, true},
    {gray, 10, 256, 600, 1, OPTIMIZER_SGD, 0, moved, FAULT_NONE, true},
    {gray, 32, 257, 300, 1, OPTIMIZER_SGD, 0, still, FAULT_NONE, true},
    {colour, 10, 1, 3, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_NONE, true},
    {colour, 3, 7, 17, 1, OPTIMIZER_SGD, 0, moved, FAULT_NONE, true},
    {colour, 10, 129, 140, 1, OPTIMIZER_SGD, 0, moved, FAULT_NONE, true},
    /* One step with planted faults. */
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_TAP, true},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_BIAS, true},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_CHANNEL, true},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_MOVE, true},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_LABEL, true},
    /* Fifty steps from ordinary initial parameters, without and with planted faults. */
    {gray, 10, 1, 60, 50, OPTIMIZER_SGD, 0.1f, still, FAULT_NONE, false},
    {gray, 10, 7, 117, 50, OPTIMIZER_ADAM, 0.1f, moved, FAULT_NONE, false},
    {gray, 10, 7, 117, 50, OPTIMIZER_ADAMW, 0, moved, FAULT_NONE, false},
    {colour, 10, 2, 101, 50, OPTIMIZER_SGD, 0.1f, moved, FAULT_NONE, false},
    {gray, 10, 7, 117, 50, OPTIMIZER_ADAM, 0.1f, moved, FAULT_TAP, false},
    {gray, 10, 7, 117, 50, OPTIMIZER_ADAM, 0.1f, moved, FAULT_CHANNEL, false},
    /* Masked samples. */
    {gray, 10, 7, 117, 50, OPTIMIZER_ADAM, 0.1f, moved, FAULT_NONE, false, false, 3},
    {colour, 10, 129, 140, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_NONE, true, false, 2},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0, moved, FAULT_MASK, true, false, 3},
    {gray, 10, 7, 17, 1, OPTIMIZER_SGD, 0, still, FAULT_NONE, true, false, 1},
    /* Loaded samples. With 51 and 60 steps per epoch, a call of 40 steps uses the ring more than once. */
    {gray, 10, 7, 117, 50, OPTIMIZER_ADAM, 0.1f, moved, FAULT_NONE, false, true},
    {colour, 3, 2, 101, 50, OPTIMIZER_SGD, 0.1f, moved, FAULT_NONE, false, true},
    {gray, 4, 1, 60, 50, OPTIMIZER_SGD, 0.1f, still, FAULT_NONE, false, true},
    {gray, 10, 129, 300, 3, OPTIMIZER_SGD, 0.3f, still, FAULT_NONE, true, true},
    {colour, 3, 7, 17, 1, OPTIMIZER_SGD, 0, moved, FAULT_NONE, true, true},
    {gray, 10, 7, 117, 50, OPTIMIZER_SGD, 0.1f, moved, FAULT_NONE, false, true, 5},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_PIXELS, true, true},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0, moved, FAULT_PIXELS, true, true, 3},
    /* Kernels for all devices. */
    {gray, 10, 7, 17, 1, OPTIMIZER_ADAMW, 0.3f, moved, FAULT_NONE, true, false, 0, true},
    {gray, 10, 257, 300, 1, OPTIMIZER_SGD, 0.3f, still, FAULT_NONE, true, false, 0, true},
    {gray, 10, 64, 200, 1, OPTIMIZER_SGD, 0.3f, moved, FAULT_TAP, true, false, 0, true},
};

/* ---- Data and engines ---- */

/* Fills the set with random labels and images of random squares. Half of the squares are black, so the values
 * in some pooling windows are equal. With `exact`, all bytes are 0 or 1. */
static void fill_set(const struct data *data, bool exact, uint32_t stream, uint32_t count,
                     struct data_set *set)
{
    uint32_t width = data->shape.width;
    uint8_t *values = static_cast<uint8_t *>(must_have(malloc(count * data->sample_bytes)));
    set->count = count;
    set->values = values;
    set->labels = static_cast<uint32_t *>(must_have(malloc(count * sizeof *set->labels)));
    for (size_t i = 0; i < count * data->sample_values; i++) {
        uint32_t square = (uint32_t)(i / width / 3 * width + i % width / 3);
        uint32_t word = philox(philox_key(1), square, stream, 0, 0).word[0];
        uint32_t noise = philox(philox_key(3), (uint32_t)i, stream, 0, 0).word[0];
        values[i] = word & 1 ? 0 : exact ? noise >> 30 != 0 : (uint8_t)((word >> 8 & 127) + (noise & 127));
    }
    for (uint32_t i = 0; i < count; i++)
        set->labels[i] = philox_below(philox(philox_key(2), i, stream, 0, 0).word[0], data->classes);
}

static bool is_masked(const struct trial *trial, uint32_t number)
{
    return trial->masked > 0 && number % trial->masked == trial->masked - 1;
}

static void data_random(const struct trial *trial, struct data *data)
{
    struct data_set *set = &data->sets[DATA_TRAIN];
    *data = {};
    data->shape = trial->shape;
    data->type = DTYPE_U8;
    data->classes = trial->classes;
    data->sample_bytes = data->sample_values = shape_values(&trial->shape);
    fill_set(data, trial->exact, DATA_TRAIN, trial->count, set);
    fill_set(data, trial->exact, DATA_TEST, trial->batch + 3, &data->sets[DATA_TEST]);
    for (uint32_t i = 0; i < set->count; i++)
        if (is_masked(trial, i))
            set->labels[i] = DATA_MASKED;
}

static std::string folder; /* with a folder per data set; removed at the end */

/* Writes a sample as an array of NumPy. Leaves out the second half of a masked one. */
static void write_sample(const std::string &path, const struct shape *shape, const uint8_t *values,
                         bool masked)
{
    char header[129] = "\x93NUMPY\x01", text[120];
    const size_t count = shape_values(shape);
    snprintf(text, sizeof text, "{'descr': '|u1', 'fortran_order': False, 'shape': (%u, %u, %u), }",
             shape->channels, shape->height, shape->width);
    header[7] = 0;
    header[8] = 118; /* bytes after the first ten, in two bytes */
    header[9] = 0;
    snprintf(header + 10, sizeof header - 10, "%-117.117s\n", text);
    FILE *file = static_cast<FILE *>(must_have(fopen(path.c_str(), "wb")));
    const bool written =
        fwrite(header, 128, 1, file) == 1 && fwrite(values, masked ? count / 2 : count, 1, file) == 1;
    must_have(fclose(file) == 0 && written ? header : NULL);
}

/* Writes the random sets of a trial as class folders. Sample n is the n-th file in the order of the set. A
 * training sample has the pixels of sample n + `shift`, modulo the size of the set. Returns the path of the
 * data set. */
static std::string write_sets(const struct trial *trial, uint32_t shift)
{
    static int sets;
    const std::string path = folder + "/" + std::to_string(sets++);
    struct data data;
    data_random(trial, &data);
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *set = &data.sets[part];
        const auto *values = static_cast<const uint8_t *>(set->values);
        for (uint32_t n = 0; n < set->count; n++) {
            const auto label = (uint32_t)((uint64_t)n * trial->classes / set->count);
            const uint32_t from = part == DATA_TRAIN ? (n + shift) % set->count : n;
            char name[64];
            snprintf(name, sizeof name, "/%s/%03u", part == DATA_TRAIN ? "train" : "test", label);
            std::filesystem::create_directories(path + name);
            snprintf(name + strlen(name), sizeof name - strlen(name), "/%06u.npy", n);
            write_sample(path + name, &data.shape, values + from * data.sample_bytes,
                         part == DATA_TRAIN && is_masked(trial, n));
        }
    }
    data_close(&data);
    return path;
}

/* Opens the data of a trial. With `shift`, loaded samples have the pixels of the next ones. */
static void open_data(const struct trial *trial, bool shift, struct data *data)
{
    struct data_request request = {};
    if (trial->loaded) {
        const std::string path = write_sets(trial, shift);
        request.name = path.c_str();
        request.classes = trial->classes;
        request.batch = trial->batch;
        request.feed = DATA_LOAD;
        request.mask = trial->masked > 0;
        request.lanes = 8;
        request.shuffle = 64;
        request.ahead = 3;
        request.resources = {.threads = 2, .device = 0};
        must(data_open(&request, data));
    } else
        data_random(trial, data);
    data_normalise(data, true);
    for (uint32_t c = 0; trial->exact && c < data->shape.channels; c++) {
        data->scale[c] = 1;
        data->offset[c] = c == 1 ? 0 : -0.5f;
    }
}

/* Opens the data of the engine with a planted fault. For FAULT_MASK, they must be stored. */
static void open_planted(const struct trial *trial, struct data *data)
{
    open_data(trial, trial->fault == FAULT_PIXELS, data);
    for (uint32_t i = 0; trial->fault == FAULT_MASK && i < trial->count; i++)
        if (is_masked(trial, i))
            data->sets[DATA_TRAIN].labels[i] = 0;
}

/* Replaces the parameters of conv1 and the weights of conv2 by random values of a few bits. Then the output
 * of conv1 has 8 bits, and the sums of conv2 are exact in fp32. So pooling selects the same pixels as in the
 * oracle, even if pixels are equal. The remaining error comes from rounding pooled values and gradients. The
 * biases of fc1 keep its sums away from 0, so that ReLU passes the same values. With other parameters, bf16
 * selects other pixels in some windows, which changes the gradients by a few per cent of their norms. */
static void make_exact(const struct model *model, struct train_state *state)
{
    const struct layer *conv1 = &model->layers[0], *conv2 = &model->layers[2], *fc1 = &model->layers[6];
    for (size_t i = 0; i < conv1->weight_values + conv1->bias_values;
         i++) /* the bias follows the weights without a gap */
        state->parameters[i] =
            (float)(int32_t)(philox(philox_key(4), (uint32_t)i, 0, 0, 0).word[0] % 7) / 8 - 0.375f;
    for (size_t i = 0; i < conv2->weight_values; i++)
        state->parameters[conv2->weight + i] =
            (float)(int32_t)(philox(philox_key(5), (uint32_t)i, 0, 0, 0).word[0] % 15) / 128 - 7 / 128.0f;
    for (size_t i = 0; i < fc1->bias_values; i++)
        state->parameters[fc1->bias + i] = i % 4 == 0 ? -4 : 4;
}

/* Runs `count` steps, beginning with step `first`. Each call of the engine runs one step or, with `at_once`,
 * all of these steps that belong to the same epoch. Returns the totals of these steps. */
static struct train_totals take_steps(const struct learner *learner, const struct train *train,
                                      uint32_t first, uint32_t count, bool at_once)
{
    struct train_totals totals;
    uint32_t steps = train_steps(train), now;
    for (uint32_t i = first; i < first + count; i += now) {
        uint32_t left = steps - i % steps;
        now = !at_once ? 1 : left < first + count - i ? left : first + count - i;
        must(learner->engine->steps(learner->state, i / steps, i % steps, now));
    }
    must(learner->engine->totals(learner->state, &totals));
    return totals;
}

/* ---- Comparisons ---- */

static double compare_logits(const struct learner *mine, const struct learner *oracle,
                             const struct train *train)
{
    uint32_t count = train->data->sets[DATA_TEST].count - 1; /* all samples except the first */
    size_t values = (size_t)count * train->model->classes;
    float *ours = static_cast<float *>(must_have(malloc(values * sizeof *ours)));
    float *right = static_cast<float *>(must_have(malloc(values * sizeof *right)));
    must(mine->engine->evaluate(mine->state, DATA_TEST, 1, count, ours));
    must(oracle->engine->evaluate(oracle->state, DATA_TEST, 1, count, right));
    double largest = 0, off = 0;
    for (size_t i = 0; i < values; i++) {
        off = worst_of(fabs((double)ours[i] - right[i]), off);
        largest = worst_of(fabs(right[i]), largest);
    }
    free(ours);
    free(right);
    return off / largest;
}

/* Makes the calls that a trainer may make between steps, and ignores their results: evaluates the test set,
 * whose last batch may be short, and reads the state. */
static void disturb(const struct learner *learner, const struct train *train)
{
    uint32_t count = train->data->sets[DATA_TEST].count;
    float *logits = static_cast<float *>(must_have(malloc(sizeof *logits * count * train->model->classes)));
    must(learner->engine->evaluate(learner->state, DATA_TEST, 0, count, logits));
    struct train_state state = state_of(learner, train->model->arena_values);
    train_state_free(&state);
    free(logits);
}

/* Runs `steps` steps from the state `begin` on two engines. Returns whether the final state is bit-identical
 * to `end`. First, a new engine, with or without overlapping kernels, runs four fifths of the steps, with one
 * call per epoch. Four fifths of 50 steps are 40, more than the 32 steps of a long graph. Then the engine
 * `used`, which had another state, runs the remaining steps. */
static bool goes_on(const struct learner *used, const struct train *train, const struct train_state *begin,
                    uint32_t steps, const struct train_state *end, bool overlaps)
{
    size_t values = train->model->arena_values;
    uint32_t most = (4 * steps + 2) / 5; /* 1 of 1, 40 of 50 */
    graph_overlaps = overlaps;
    struct learner other = learner_open(&engine_graph, train, begin);
    graph_overlaps = true;
    take_steps(&other, train, 0, most, true);
    struct train_state middle = state_of(&other, values);
    must(used->engine->set(used->state, &middle));
    take_steps(used, train, most, steps - most, true);
    struct train_state last = state_of(used, values);
    bool same = same_arenas(&last, end, values);
    engine_graph.close(other.state);
    train_state_free(&middle);
    train_state_free(&last);
    return same;
}

/* Returns the relative error of the gradients of the epoch's last batch, which may be a short one. */
static double compare_last(const struct learner *mine, const struct learner *oracle,
                           const struct train *train, const struct train_state *planted,
                           const struct train_state *begin)
{
    double each[MODEL_TENSORS_MAX];
    must(mine->engine->set(mine->state, planted));
    must(oracle->engine->set(oracle->state, begin));
    take_steps(mine, train, train_steps(train) - 1, 1, false);
    take_steps(oracle, train, train_steps(train) - 1, 1, false);
    return compare_gradients(mine, oracle, train->model, each);
}

/* ---- Running a case ---- */

struct verdict {
    struct distance off;
    double last, logits;
    bool same;
};

/* Runs the steps one by one, with disturb() after each. Returns the final state, which the caller frees. */
static struct train_state disturbed(const struct learner *learner, const struct train *train, uint32_t steps,
                                    const struct train_state *begin)
{
    must(learner->engine->set(learner->state, begin));
    for (uint32_t i = 0; i < steps; i++) {
        take_steps(learner, train, i, 1, false);
        disturb(learner, train);
    }
    return state_of(learner, train->model->arena_values);
}

static struct verdict compare(const struct trial *trial, const struct train *train,
                              const struct train_state *begin)
{
    struct verdict verdict = {};
    struct train ours = *train;
    struct data data;
    struct train_state planted = copy_of(begin, train->model->arena_values);
    open_planted(trial, &data);
    memcpy(data.scale, train->data->scale, sizeof data.scale);
    memcpy(data.offset, train->data->offset, sizeof data.offset);
    ours.data = &data;
    plant(trial->fault, &ours);
    plant(trial->fault, train->model, planted.parameters);
    struct learner mine = learner_open(&engine_graph, &ours, &planted);
    struct learner oracle = learner_open(&engine_oracle, train, begin);
    verdict.logits = compare_logits(&mine, &oracle, train);
    verdict.off = compare_steps(&mine, &oracle, train, trial->fault, trial->steps, begin);
    if (trial->exact) /* otherwise one pooling window could change the gradients of a short batch too much */
        verdict.last = compare_last(&mine, &oracle, train, &planted, begin);
    struct train_state end = disturbed(&mine, train, trial->steps, &planted);
    verdict.same = true;
    for (bool overlaps : {true, false})
        verdict.same &= goes_on(&mine, &ours, &planted, trial->steps, &end, overlaps);
    engine_graph.close(mine.state);
    engine_oracle.close(oracle.state);
    train_state_free(&planted);
    train_state_free(&end);
    data_close(&data);
    return verdict;
}

/* Prints the errors of a case. Returns whether it passed: repeated runs give the same bits, and all errors
 * are within the bounds or, with a planted fault, at least one exceeds its bound. */
static bool judge(const struct trial *trial, const struct model *model, const struct verdict *verdict)
{
    static const char *const optimizers[] = {OPTIMIZERS(OPTIMIZER_NAME)};
    const struct engine_bounds *bounds = &engine_graph.bounds;
    bool near = verdict->off.gradients <= (trial->exact ? EXACT_MAX : GRADIENT_MAX) &&
                verdict->last <= EXACT_MAX && verdict->off.losses <= bounds->loss &&
                verdict->off.updates <= bounds->drift && verdict->logits <= bounds->logits;
    bool well = verdict->same && near == (trial->fault == FAULT_NONE);
    printf("%s  %ux%ux%u, %u classes, batch %u of %u, %u steps, %s%s%s%s: errors: gradients %.1e, "
           "gradients of the last batch %.1e, losses %.1e, updates %.1e, logits %.1e%s%s\n       ",
           well ? "ok    " : "FAILED", trial->shape.channels, trial->shape.height, trial->shape.width,
           trial->classes, trial->batch, trial->count, trial->steps, optimizers[trial->optimizer],
           trial->exact ? ", exact" : "", trial->fault ? ", planted: " : "", fault_names[trial->fault],
           verdict->off.gradients, verdict->last, verdict->off.losses, verdict->off.updates, verdict->logits,
           trial->masked    ? trial->loaded ? "; loaded, some masked" : "; some masked"
           : trial->loaded  ? "; loaded"
           : trial->generic ? "; kernels for all devices"
                            : "",
           verdict->same ? "" : "; bits differ between runs");
    for (uint32_t t = 0; t < model->tensor_count; t++)
        printf(" %s %.1e", model->tensors[t].name, verdict->off.tensors[t]);
    printf("\n");
    return well;
}

static bool run(const struct trial *trial)
{
    struct model model;
    struct data data;
    struct train_state begin;
    const struct model_table *table = model_tables;
    while (strcmp(table->name, "cnn") != 0)
        table++;
    must(model_build(table, trial->shape, trial->classes, &model));
    open_data(trial, false, &data);
    if (!train_state_new(model.arena_values, &begin))
        must_have(NULL);
    model_initialise(&model, SEED, begin.parameters);
    if (trial->exact)
        make_exact(&model, &begin);
    struct train train = {};
    train.model = &model;
    train.data = &data;
    train.seed = SEED;
    train.batch = trial->batch;
    train.augment = trial->augment;
    train.optimizer = {trial->optimizer, 0.9, 0.9, 0.999, 1e-8, 1e-3};
    train.schedule = {SCHEDULE_COSINE, trial->optimizer == OPTIMIZER_SGD ? 0.002 : 0.0002, 5, 1000, 0, 0};
    train.smoothing = trial->smoothing;
    struct verdict verdict = compare(trial, &train, &begin);
    bool well = judge(trial, &model, &verdict);
    train_state_free(&begin);
    data_close(&data);
    return well;
}

/* Returns whether case `number`, counted from 1, is selected on the command line. */
static bool asked_for(uint32_t number, int count, char **numbers)
{
    for (int i = 0; i < count; i++)
        if (strtoul(numbers[i], NULL, 10) == number)
            return true;
    return count == 0;
}

int main(int argc, char **argv)
{
    int tried = 0, failures = 0;
    bool brief = argc > 1 && strcmp(argv[1], "--short") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (argc == 2 && strcmp(argv[1], "--count") == 0) {
        printf("%zu\n", COUNT_OF(trials));
        return 0;
    }
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_graph: %s\n", status_text());
        return 4;
    }
    char name[] = "/tmp/gpu_graph-XXXXXX";
    folder = static_cast<char *>(must_have(mkdtemp(name)));
    argv += brief ? 2 : 1;
    argc -= brief ? 2 : 1;
    for (uint32_t i = 0; i < COUNT_OF(trials); i++) {
        struct trial trial = trials[i];
        if (!asked_for(i + 1, argc, argv) || (brief && (trial.batch > SHORT_BATCH || trial.fault)))
            continue;
        if (brief && trial.steps > SHORT_STEPS)
            trial.steps = SHORT_STEPS;
        tried++;
        graph_hopper = !trial.generic;
        failures += !run(&trial);
    }
    std::filesystem::remove_all(folder);
    if (tried == 0) {
        fprintf(stderr, "gpu_graph: none of the %zu cases is selected\n", COUNT_OF(trials));
        return 2;
    }
    return failures ? 3 : 0;
}
