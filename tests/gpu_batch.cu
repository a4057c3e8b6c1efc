/* Tests two kinds of training steps. The first kind trains a network on batches of load or synth
 * (core/step_backend.h). The same images must give bit-identical losses, for any element type, layout,
 * distance between images, and source of the labels. The losses must agree with those of the trainer on the
 * same images, within 0.5 %. The second kind takes a given time (common/product.cuh).
 * --product tests only the second kind. This program does not calibrate the time of a step, because
 * sanitizers make calibration too slow. make check-gpu runs this program.
 *
 * Prints one line per case. Exit status 2 for invalid arguments, 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include "machine/device.h"
#include "common/product.cuh"
#include "core/dtype.h"
#include "core/step_backend.h"
#include "train/engines.cuh"
#include "train/task.h"

#define STEPS     5
#define SHORT     3     /* index of the step whose batch is one sample short */
#define ROUNDING  0.005 /* bound of a loss's relative error; inputs are rounded to fp16, then to bf16 */
#define GAP_BYTES 36

static int failures;

static void tell(bool well, const char *what, const char *more, double off)
{
    printf("%s  %s%s: %.2g off\n", well ? "ok    " : "FAILED", what, more, off);
    failures += !well;
}

/* ---- Pictures ---- */

/* Pictures of classes 0 to 3 are brighter in one quarter. The class determines the quarter, so a network can
 * learn the classes. */
static uint8_t pixel(const struct task *task, uint32_t j, uint32_t channel, uint32_t y, uint32_t x)
{
    uint32_t quarter = 2 * (2 * y / task->height) + 2 * x / task->width, number = j * 977 + channel * 131;
    uint32_t noise = (number + y * 57 + x * 13) * 2654435761u >> 26;
    return (uint8_t)(noise + (j % task->classes == quarter ? 150 : 20 * channel));
}

static void store(enum dtype type, uint8_t value, uint8_t *at)
{
    float single = value;
    uint16_t half = type == DTYPE_F16 ? half_from_float(single) : bf16_from_float(single);
    if (type == DTYPE_U8)
        *at = value;
    else
        memcpy(at, type == DTYPE_F32 ? (const void *)&single : &half, dtype_bytes(type));
}

struct kind {
    const char *name;
    enum dtype type;
    bool interleaved, gaps, labelled;
};

/* Returns a batch in device memory. The caller frees its values and labels. */
static struct batch make_batch(const struct task *task, const struct kind *kind)
{
    const size_t size = dtype_bytes(kind->type);
    const uint32_t plane = task->height * task->width, values = task->channels * plane;
    struct batch batch = {};
    batch.type = kind->type;
    batch.interleaved = kind->interleaved;
    batch.count = task->batch;
    batch.stride = values * size + (kind->gaps ? GAP_BYTES : 0);
    batch.bytes = batch.count * batch.stride;
    /* Without labels, a multiple of `classes` gives the labels below. With labels, `first` must have no
     * effect. */
    batch.first = kind->labelled ? 1 : 3 * task->classes;
    uint8_t *host = static_cast<uint8_t *>(malloc(batch.bytes)), *device;
    int32_t *labels = static_cast<int32_t *>(malloc(batch.count * sizeof *labels)), *device_labels = nullptr;
    if (!host || !labels)
        must(status_set(STATUS_FAILED, "out of memory"));
    memset(host, 0xaa, batch.bytes);
    for (uint32_t j = 0; j < batch.count; j++) {
        labels[j] = (int32_t)(j % task->classes);
        for (uint32_t i = 0; i < values; i++) {
            uint32_t channel = i / plane, place = i % plane;
            size_t at = kind->interleaved ? (size_t)place * task->channels + channel : i;
            store(kind->type, pixel(task, j, channel, place / task->width, place % task->width),
                  host + j * batch.stride + at * size);
        }
    }
    must(cudaMalloc(&device, batch.bytes));
    must(cudaMemcpy(device, host, batch.bytes, cudaMemcpyHostToDevice));
    if (kind->labelled) {
        must(cudaMalloc(&device_labels, batch.count * sizeof *labels));
        must(cudaMemcpy(device_labels, labels, batch.count * sizeof *labels, cudaMemcpyHostToDevice));
    }
    must(cudaDeviceSynchronize());
    batch.values = device;
    batch.labels = device_labels;
    free(labels);
    free(host);
    return batch;
}

/* ---- Losses ---- */

/* Runs the steps on a new network. The backend reports the mean loss over all steps so far; the loss of each
 * step is computed from these means. */
static void learn(struct step_backend *backend, const struct batch *whole, double *losses)
{
    double sum = 0, samples = 0;
    must(step_backend_reset(backend));
    for (int step = 0; step < STEPS; step++) {
        struct batch batch = *whole;
        double mean;
        batch.count -= step == SHORT && batch.count > 1;
        must(step_backend_step(backend, &batch));
        must(step_backend_loss(backend, &mean));
        samples += batch.count;
        losses[step] = (mean * samples - sum) / batch.count;
        sum = mean * samples;
    }
}

/* Returns the largest relative difference, or NaN if a loss is NaN. A NaN fails every comparison. */
static double worst_off(const double *losses, const double *right, int count)
{
    double worst = 0;
    for (int i = 0; i < count; i++) {
        double off = fabs(losses[i] / right[i] - 1);
        if (isnan(off))
            return NAN;
        worst = fmax(worst, off);
    }
    return worst;
}

/* On the trainer's engine, runs all steps before the step with the short batch. The engine's training set is
 * one batch of the same pictures. */
static void train_on(const struct task *task, double *losses)
{
    struct model model;
    struct data data = {};
    struct train train = {};
    const struct resources resources = {.threads = 1, .device = 0};
    void *engine;
    must(task_build(task, &model));
    data.shape = model.input;
    data.type = DTYPE_U8;
    data.classes = task->classes;
    data.sample_values = data.sample_bytes = shape_values(&data.shape);
    for (int part = 0; part < DATA_PARTS; part++) {
        struct data_set *set = &data.sets[part];
        set->count = part == DATA_TRAIN ? task->batch : 1;
        uint8_t *values = static_cast<uint8_t *>(calloc(set->count, data.sample_bytes));
        set->labels = static_cast<uint32_t *>(calloc(set->count, sizeof *set->labels));
        for (uint32_t j = 0; values && set->labels && j < set->count; j++) {
            set->labels[j] = j % task->classes;
            for (uint32_t i = 0; i < data.sample_values; i++) {
                uint32_t plane = task->height * task->width, place = i % plane;
                values[j * data.sample_bytes + i] =
                    pixel(task, j, i / plane, place / task->width, place % task->width);
            }
        }
        set->values = values;
    }
    data_normalise(&data, true);
    train.model = &model;
    train.data = &data;
    train.batch = task->batch;
    train.optimizer = {.kind = OPTIMIZER_ADAM,
                       .momentum = 0,
                       .beta1 = 0.9,
                       .beta2 = 0.999,
                       .epsilon = 1e-8,
                       .weight_decay = 0};
    train.schedule.kind = SCHEDULE_CONSTANT;
    train.schedule.rate = 0.001;
    struct train_state state;
    if (!train_state_new(model.arena_values, &state))
        must(status_set(STATUS_FAILED, "out of memory"));
    model_initialise(&model, 0, state.parameters);
    must(engine_bf16.open(&train, &resources, &engine));
    must(engine_bf16.set(engine, &state));
    for (int step = 0; step < SHORT; step++) {
        struct train_totals totals;
        must(engine_bf16.steps(engine, (uint32_t)step, 0, 1));
        must(engine_bf16.totals(engine, &totals));
        losses[step] = totals.loss / (double)totals.samples;
    }
    engine_bf16.close(engine);
    train_state_free(&state);
    data_close(&data);
}

/* ---- All cases ---- */

static const struct kind kinds[] = {
    {"u8", DTYPE_U8, false, false, true},
    {"u8, labels from sample numbers", DTYPE_U8, false, false, false},
    {"u8, NHWC, with gaps", DTYPE_U8, true, true, true},
    {"f16", DTYPE_F16, false, false, true},
    {"f16, NHWC, with gaps", DTYPE_F16, true, true, false},
    {"bf16, with gaps", DTYPE_BF16, false, true, true},
    {"f32", DTYPE_F32, false, false, true},
    {"f32, NHWC, with gaps", DTYPE_F32, true, true, true},
};

/* Networks without dropout, because dropout selects values by a sample's index in the epoch, which differs
 * from its index in the batch. */
static const struct task tasks[] = {{"cnn-fdsl", 3, 32, 40, 4, 37, 37},
                                    {"logreg", 1, 28, 28, 3, 1, 1},
                                    {"lenet", 1, 28, 28, 10, 257, 257},
                                    {"logreg", 16, 7, 5, 2, 64, 64}};

static void compare(const struct task *task)
{
    double right[STEPS], trained[STEPS];
    struct step_backend *backend;
    char what[96];
    must(step_backend_open(0, task, &backend));
    snprintf(what, sizeof what, "%s %ux%ux%u, batch %u, ", task->model, task->channels, task->height,
             task->width, task->batch);
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        double losses[STEPS];
        struct batch batch = make_batch(task, &kinds[k]);
        learn(backend, &batch, losses);
        if (k == 0)
            memcpy(right, losses, sizeof right);
        tell(memcmp(losses, right, sizeof right) == 0, what, kinds[k].name, worst_off(losses, right, STEPS));
        must(cudaFree(const_cast<void *>(batch.values)));
        must(cudaFree(const_cast<int32_t *>(batch.labels)));
    }
    step_backend_close(backend);
    train_on(task, trained);
    tell(worst_off(right, trained, SHORT) < ROUNDING, what, "compared with the trainer",
         worst_off(right, trained, SHORT));
    tell(right[STEPS - 1] < right[0], what, "the loss falls", right[STEPS - 1] / right[0] - 1);
}

/* ---- The step of a given length ---- */

#define PRODUCT_ROUNDING \
    4.0 /* bound for the rounding error of a sum, in units of 2^-24 per term; terms are below one */

/* Returns the largest error in a tile of the product, in units of 2^-24 per term. A thread block of the first
 * wave must have computed the tile. */
static double tile_off(const float *matrices, unsigned tile, unsigned depth)
{
    const size_t values = (size_t)PRODUCT_SIDE * PRODUCT_SIDE, tiles = PRODUCT_SIDE / PRODUCT_TILE;
    size_t row = tile / tiles * PRODUCT_TILE, column = tile % tiles * PRODUCT_TILE;
    double worst = 0;
    for (size_t y = row; y < row + PRODUCT_TILE; y++)
        for (size_t x = column; x < column + PRODUCT_TILE; x++) {
            double sum = 0;
            for (size_t d = 0; d < depth; d++)
                sum += (double)matrices[y * PRODUCT_SIDE + d] * matrices[values + d * PRODUCT_SIDE + x];
            double off = fabs(matrices[2 * values + y * PRODUCT_SIDE + x] - sum);
            if (isnan(off))
                return NAN;
            worst = fmax(worst, off);
        }
    return worst / (depth * 0x1p-24);
}

/* Checks the last tile that the first wave of thread blocks computes. With up to 24 units of work there is
 * one wave. If this wave has fewer than two blocks per tile, a single block writes the tile. With more than
 * 24 units, several blocks would write the tile, each with a different part of k, in an unpredictable order.
 */
static void multiply(struct product *product, unsigned units)
{
    const size_t bytes = (size_t)3 * PRODUCT_SIDE * PRODUCT_SIDE * sizeof(float);
    const unsigned tiles = PRODUCT_SIDE / PRODUCT_TILE * (PRODUCT_SIDE / PRODUCT_TILE);
    unsigned tile = (product->wave < tiles ? product->wave : tiles) - 1;
    float *matrices = static_cast<float *>(malloc(bytes));
    char more[32];
    if (!matrices)
        must(status_set(STATUS_FAILED, "out of memory"));
    product->units = units;
    must(product_launch(product, nullptr));
    must(cudaMemcpy(matrices, product->matrices, bytes, cudaMemcpyDeviceToHost));
    double off = tile_off(matrices, tile, units * PRODUCT_DEPTH);
    snprintf(more, sizeof more, ", %u units", units);
    tell(off <= PRODUCT_ROUNDING, "a step of a given length", more, off);
    free(matrices);
}

static void check_product(void)
{
    struct product product = {};
    must(product_open(0, nullptr, &product));
    for (unsigned units : {1, 3, 24})
        multiply(&product, units);
    product_close(&product);
}

int main(int argc, char **argv)
{
    bool product_alone = argc == 2 && strcmp(argv[1], "--product") == 0;
    if (argc > 1 && !product_alone) {
        fprintf(stderr, "usage: gpu_batch [--product]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_batch: %s\n", status_text());
        return 4;
    }
    must(cudaSetDevice(0));
    for (size_t i = 0; !product_alone && i < COUNT_OF(tasks); i++)
        compare(&tasks[i]);
    check_product();
    return failures ? 3 : 0;
}
