/* `train-naive`, `infer-naive`: one thread, plain loops, sample by sample, layer by layer. The reference that
 * every other engine is measured against: it says what a step is, and is never optimised. Compiled twice, in
 * float and, by naive_double.c, in double: the oracle. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/env.h"
#include "core/timer.h"
#include "train/engine.h"
#include "train/feed.h"
#include "train/trainer.h"

typedef train_real real;

#ifdef FDSL_DOUBLE
#define REAL_EXP exp
#define REAL_LOG log
#else
#define REAL_EXP expf
#define REAL_LOG logf
#endif

struct naive {
    const struct train *train;
    uint32_t batch; /* samples that there is room for */
    real *parameters, *gradients, *first, *second;
    real *inputs;  /* batch x input_values */
    real *outputs; /* of every layer: batch x out_values each, behind each other as layer->output says */
    real *deltas;  /* the gradients of these */
    float *sample; /* on its way to `inputs` */
    uint32_t *numbers, *labels;
    struct feed feed;
    struct train_totals totals;
    uint64_t bytes;
};

/* What a layer must know of the sample that passes. */
struct passing {
    uint64_t seed;
    uint32_t epoch, sample;
    bool training;
};

/* ---- Convolution: stride 1, zeros around ---- */

/* The outputs along an axis that a kernel's offset reaches from inside the input: begin <= i < end. */
struct reach {
    int64_t begin, end, shift; /* output i takes input i + shift */
};

static struct reach reach(const struct layer *layer, int axis, uint32_t offset, uint32_t in, uint32_t out)
{
    int64_t shift = (int64_t)offset - layer->spec.padding[axis];
    int64_t begin = shift < 0 ? -shift : 0, end = (int64_t)in - shift;
    return (struct reach){begin, end < out ? end : out, shift};
}

/* What one weight of a convolution joins: rows of an input's and of an output's channel. */
struct tap {
    struct reach depth, height, width;
};

static struct tap tap(const struct layer *layer, uint32_t t, uint32_t y, uint32_t x)
{
    return (struct tap){reach(layer, 0, t, layer->in.depth, layer->out.depth),
                        reach(layer, 1, y, layer->in.height, layer->out.height),
                        reach(layer, 2, x, layer->in.width, layer->out.width)};
}

/* The row of a channel at depth t and height y. */
static size_t row_at(const struct shape *shape, uint32_t channel, int64_t t, int64_t y)
{
    return (((size_t)channel * shape->depth + (size_t)t) * shape->height + (size_t)y) * shape->width;
}

static void tap_forward(const struct layer *layer, const struct tap *tap, uint32_t o, uint32_t c, real weight,
                        const real *in, real *out)
{
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *from = in + row_at(&layer->in, c, t + tap->depth.shift, y + tap->height.shift);
            real *to = out + row_at(&layer->out, o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                to[x] += weight * from[x + tap->width.shift];
        }
}

/* The gradient of the weight; that of the input, where it is wanted, grows. */
static real tap_backward(const struct layer *layer, const struct tap *tap, uint32_t o, uint32_t c,
                         real weight, const real *in, const real *out_delta, real *in_delta)
{
    double sum = 0; /* long: in float, what rounding leaves grows over the steps */
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            size_t from = row_at(&layer->in, c, t + tap->depth.shift, y + tap->height.shift);
            const real *delta = out_delta + row_at(&layer->out, o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                sum += (double)delta[x] * in[from + (size_t)(x + tap->width.shift)];
            for (int64_t x = tap->width.begin; in_delta && x < tap->width.end; x++)
                in_delta[from + (size_t)(x + tap->width.shift)] += weight * delta[x];
        }
    return (real)sum;
}

static void conv_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    const uint32_t *kernel = layer->spec.kernel;
    const real *weight = parameters + layer->weight;
    size_t plane = layer->out_values / layer->out.channels;
    (void)passing;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = parameters[layer->bias + i / plane];
    for (uint32_t o = 0; o < layer->out.channels; o++)
        for (uint32_t c = 0; c < layer->in.channels; c++)
            for (uint32_t t = 0; t < kernel[0]; t++)
                for (uint32_t y = 0; y < kernel[1]; y++)
                    for (uint32_t x = 0; x < kernel[2]; x++) {
                        struct tap at = tap(layer, t, y, x);
                        tap_forward(layer, &at, o, c, *weight++, in, out);
                    }
}

static void conv_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta, real *gradients)
{
    const uint32_t *kernel = layer->spec.kernel;
    const real *weight = parameters + layer->weight;
    real *gradient = gradients + layer->weight;
    size_t plane = layer->out_values / layer->out.channels;
    (void)passing;
    for (size_t i = 0; i < layer->out_values; i++)
        gradients[layer->bias + i / plane] += out_delta[i];
    for (uint32_t o = 0; o < layer->out.channels; o++)
        for (uint32_t c = 0; c < layer->in.channels; c++)
            for (uint32_t t = 0; t < kernel[0]; t++)
                for (uint32_t y = 0; y < kernel[1]; y++)
                    for (uint32_t x = 0; x < kernel[2]; x++) {
                        struct tap at = tap(layer, t, y, x);
                        *gradient++ += tap_backward(layer, &at, o, c, *weight++, in, out_delta, in_delta);
                    }
}

/* ---- Linear ---- */

static void linear_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                           const real *in, real *out)
{
    const real *weight = parameters + layer->weight, *bias = parameters + layer->bias;
    (void)passing;
    for (size_t o = 0; o < layer->out_values; o++) {
        double sum = bias[o]; /* long, as above */
        for (size_t i = 0; i < layer->in_values; i++)
            sum += (double)weight[o * layer->in_values + i] * in[i];
        out[o] = (real)sum;
    }
}

static void linear_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                            const real *in, const real *out_delta, real *in_delta, real *gradients)
{
    (void)passing;
    for (size_t o = 0; o < layer->out_values; o++) {
        const real *weight = parameters + layer->weight + o * layer->in_values;
        real *gradient = gradients + layer->weight + o * layer->in_values;
        gradients[layer->bias + o] += out_delta[o];
        for (size_t i = 0; i < layer->in_values; i++)
            gradient[i] += out_delta[o] * in[i];
        for (size_t i = 0; in_delta && i < layer->in_values; i++)
            in_delta[i] += out_delta[o] * weight[i];
    }
}

/* ---- ReLU: a NaN goes through, as in PyTorch ---- */

static void relu_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[i] <= 0 ? 0 : in[i];
}

static void relu_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta, real *gradients)
{
    (void)passing, (void)parameters, (void)gradients;
    for (size_t i = 0; in_delta && i < layer->in_values; i++)
        in_delta[i] += in[i] <= 0 ? 0 : out_delta[i];
}

/* ---- Max-pooling: what is left over at the end of an axis is left out; of equal values the first counts
 * ----
 */

/* The element of the input that output `at` takes: the largest of its window. */
static size_t largest(const struct layer *layer, const real *in, size_t at)
{
    const uint32_t *kernel = layer->spec.kernel;
    uint32_t x = (uint32_t)(at % layer->out.width), y = (uint32_t)(at / layer->out.width % layer->out.height);
    size_t plane = at / layer->out.width / layer->out.height; /* channel * depth + t */
    uint32_t t = (uint32_t)(plane % layer->out.depth), c = (uint32_t)(plane / layer->out.depth);
    size_t best = row_at(&layer->in, c, t * kernel[0], y * kernel[1]) + x * kernel[2];
    for (uint32_t i = 0; i < kernel[0]; i++)
        for (uint32_t j = 0; j < kernel[1]; j++)
            for (uint32_t k = 0; k < kernel[2]; k++) {
                size_t from = row_at(&layer->in, c, t * kernel[0] + i, y * kernel[1] + j) + x * kernel[2] + k;
                if (in[from] > in[best] || isnan(in[from]))
                    best = from;
            }
    return best;
}

static void pool_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[largest(layer, in, i)];
}

static void pool_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta, real *gradients)
{
    (void)passing, (void)parameters, (void)gradients;
    for (size_t i = 0; in_delta && i < layer->out_values; i++)
        in_delta[largest(layer, in, i)] += out_delta[i];
}

/* ---- Dropout ---- */

/* What an element is multiplied by: 0, or what keeps the mean. */
static real kept(const struct layer *layer, const struct passing *passing, uint32_t element)
{
    uint32_t threshold = (uint32_t)(layer->spec.rate * 256);
    if (!passing->training)
        return 1;
    struct philox_block block =
        draw_dropout(passing->seed, passing->epoch, passing->sample, layer->number, element);
    return draw_kept(block, element, threshold) ? (real)256 / (real)(256 - threshold) : 0;
}

static void dropout_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                            const real *in, real *out)
{
    (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[i] * kept(layer, passing, (uint32_t)i);
}

static void dropout_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                             const real *in, const real *out_delta, real *in_delta, real *gradients)
{
    (void)parameters, (void)in, (void)gradients;
    for (size_t i = 0; in_delta && i < layer->in_values; i++)
        in_delta[i] += out_delta[i] * kept(layer, passing, (uint32_t)i);
}

/* ---- The network ---- */

/* One sample forward, and backward: `gradients` and, unless it is NULL, `in_delta` grow. */
static const struct {
    void (*forward)(const struct layer *layer, const struct passing *passing, const real *parameters,
                    const real *in, real *out);
    void (*backward)(const struct layer *layer, const struct passing *passing, const real *parameters,
                     const real *in, const real *out_delta, real *in_delta, real *gradients);
} kinds[LAYER_KINDS] = {
    [LAYER_CONV] = {conv_forward, conv_backward},       [LAYER_RELU] = {relu_forward, relu_backward},
    [LAYER_POOL] = {pool_forward, pool_backward},       [LAYER_DROPOUT] = {dropout_forward, dropout_backward},
    [LAYER_LINEAR] = {linear_forward, linear_backward},
};

/* The output of a layer, or its gradient, for place `j` of the batch. */
static real *output_of(const struct naive *naive, real *arena, uint32_t layer, uint32_t j)
{
    const struct layer *of = &naive->train->model->layers[layer];
    return arena + of->output * naive->batch + j * of->out_values;
}

/* What a layer is given: an output, or the sample itself. */
static real *input_of(const struct naive *naive, uint32_t layer, uint32_t j)
{
    return layer ? output_of(naive, naive->outputs, layer - 1, j)
                 : naive->inputs + j * naive->train->model->input_values;
}

static void forward(struct naive *naive, const struct passing *passing, uint32_t j)
{
    const struct model *model = naive->train->model;
    for (uint32_t i = 0; i < model->layer_count; i++)
        kinds[model->layers[i].spec.kind].forward(&model->layers[i], passing, naive->parameters,
                                                  input_of(naive, i, j),
                                                  output_of(naive, naive->outputs, i, j));
}

static void backward(struct naive *naive, const struct passing *passing, uint32_t j)
{
    const struct model *model = naive->train->model;
    for (uint32_t i = model->layer_count; i-- > 0;) {
        real *in_delta = i ? output_of(naive, naive->deltas, i - 1, j) : NULL;
        if (in_delta)
            memset(in_delta, 0, model->layers[i].in_values * sizeof *in_delta);
        kinds[model->layers[i].spec.kind].backward(
            &model->layers[i], passing, naive->parameters, input_of(naive, i, j),
            output_of(naive, naive->deltas, i, j), in_delta, naive->gradients);
    }
}

/* Softmax and cross-entropy with smoothing; fills the gradient of the logits for a mean over `count`. */
static real loss_of(const struct train *train, const real *logits, uint32_t label, uint32_t count,
                    real *delta)
{
    uint32_t classes = train->model->classes;
    real most = logits[0], sum = 0, loss = 0;
    for (uint32_t k = 1; k < classes; k++)
        most = logits[k] > most ? logits[k] : most;
    for (uint32_t k = 0; k < classes; k++)
        sum += REAL_EXP(logits[k] - most);
    for (uint32_t k = 0; k < classes; k++) {
        real log_p = logits[k] - most - REAL_LOG(sum);
        real wanted = (real)train->smoothing / (real)classes + (k == label ? 1 - (real)train->smoothing : 0);
        loss -= wanted * log_p;
        delta[k] = (REAL_EXP(log_p) - wanted) / (real)count;
    }
    return loss;
}

/* The first of the largest. */
static uint32_t guess(const real *logits, uint32_t classes)
{
    uint32_t best = 0;
    for (uint32_t k = 1; k < classes; k++)
        if (logits[k] > logits[best])
            best = k;
    return best;
}

/* Puts a sample at place `j` of the batch. */
static void take(struct naive *naive, const void *stored, struct draw_move move, uint32_t j)
{
    const struct data *data = naive->train->data;
    real *to = naive->inputs + j * data->sample_values;
    data_gather(data, stored, move, naive->sample);
    for (size_t i = 0; i < data->sample_values; i++)
        to[i] = naive->sample[i];
}

/* The one that belongs there in a step whose samples are ready. */
static void take_to_learn(struct naive *naive, uint32_t epoch, uint32_t j)
{
    const struct train *train = naive->train;
    uint32_t sample = naive->numbers[j];
    take(naive, feed_sample(&naive->feed, sample, j), draw_move(&train->augment, train->seed, epoch, sample),
         j);
    naive->labels[j] = train->data->sets[DATA_TRAIN].labels[sample];
}

/* ---- The engine ---- */

static void naive_close(void *state)
{
    struct naive *naive = state;
    real *const arenas[] = {naive->parameters, naive->gradients, naive->first, naive->second,
                            naive->inputs,     naive->outputs,   naive->deltas};
    for (size_t i = 0; i < COUNT_OF(arenas); i++)
        free(arenas[i]);
    free(naive->sample);
    free(naive->numbers);
    free(naive->labels);
    feed_close(&naive->feed);
    free(naive);
}

/* Zeros; adds their bytes to what is held. */
static void *zeros(struct naive *naive, size_t count, size_t size)
{
    naive->bytes += count * size;
    return calloc(count, size);
}

/* False where memory is out. */
static bool allocate(struct naive *naive)
{
    const struct model *model = naive->train->model;
    size_t batch = naive->batch, learning = naive->train->forward_only ? 1 : model->arena_values;
    naive->parameters = zeros(naive, model->arena_values, sizeof(real));
    naive->gradients = zeros(naive, learning, sizeof(real));
    naive->first = zeros(naive, learning, sizeof(real));
    naive->second = zeros(naive, learning, sizeof(real));
    naive->inputs = zeros(naive, batch * model->input_values, sizeof(real));
    naive->outputs = zeros(naive, batch * model->output_values, sizeof(real));
    naive->deltas = zeros(naive, naive->train->forward_only ? 1 : batch * model->output_values, sizeof(real));
    naive->sample = zeros(naive, model->input_values, sizeof(float));
    naive->numbers = zeros(naive, batch, sizeof *naive->numbers);
    naive->labels = zeros(naive, batch, sizeof *naive->labels);
    return naive->parameters && naive->gradients && naive->first && naive->second && naive->inputs &&
           naive->outputs && naive->deltas && naive->sample && naive->numbers && naive->labels;
}

static enum status naive_open(const struct train *train, const struct resources *resources, void **state)
{
    struct naive *naive = calloc(1, sizeof *naive);
    if (!naive)
        return status_set(STATUS_FAILED, "naive: out of memory");
    naive->train = train;
    naive->batch = train->batch;
    naive->totals.bad_step = TRAIN_FINE;
    /* The kernel hands out more than there is, so what it gave is compared with what is free. */
    if (!allocate(naive) || naive->bytes > env_memory_available_bytes()) {
        enum status status = status_set(
            STATUS_FAILED, "naive: a batch of %u samples takes %.1f GB, which memory has not; lower --batch",
            train->batch, (double)naive->bytes / 1e9);
        naive_close(naive);
        return status;
    }
    enum status status = feed_open(train, resources, &naive->feed);
    if (status != STATUS_OK) {
        naive_close(naive);
        return status;
    }
    *state = naive;
    return STATUS_OK;
}

static void copy_in(real *to, const float *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = from[i];
}

static void copy_out(float *to, const real *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = (float)from[i];
}

static enum status naive_set(void *state, const struct train_state *from)
{
    struct naive *naive = state;
    size_t values = naive->train->model->arena_values;
    copy_in(naive->parameters, from->parameters, values);
    if (naive->train->forward_only)
        return STATUS_OK;
    copy_in(naive->first, from->first, values);
    copy_in(naive->second, from->second, values);
    return STATUS_OK;
}

static enum status naive_get(void *state, struct train_state *into)
{
    const struct naive *naive = state;
    size_t values = naive->train->model->arena_values;
    copy_out(into->parameters, naive->parameters, values);
    copy_out(into->first, naive->first, values);
    copy_out(into->second, naive->second, values);
    return STATUS_OK;
}

/* The batch in place: forward, loss, backward. Returns the sum of the losses. */
static double learn(struct naive *naive, uint32_t epoch, uint32_t count)
{
    const struct train *train = naive->train;
    uint32_t last = train->model->layer_count - 1;
    double loss = 0;
    memset(naive->gradients, 0, train->model->arena_values * sizeof *naive->gradients);
    for (uint32_t j = 0; j < count; j++) {
        const struct passing passing = {train->seed, epoch, naive->numbers[j], true};
        forward(naive, &passing, j);
        const real *logits = output_of(naive, naive->outputs, last, j);
        loss += loss_of(train, logits, naive->labels[j], count, output_of(naive, naive->deltas, last, j));
        naive->totals.correct += guess(logits, train->model->classes) == naive->labels[j];
        backward(naive, &passing, j);
    }
    return loss;
}

static void update_parameters(struct naive *naive, uint64_t step)
{
    const struct train *train = naive->train;
    struct update update = optimizer_at(&train->optimizer, &train->schedule, step);
    for (size_t i = 0; i < train->model->arena_values; i++)
        optimizer_step(&update, naive->gradients[i], &naive->parameters[i], &naive->first[i],
                       &naive->second[i]);
}

static enum status make_step(struct naive *naive, const struct draw_order *order, uint32_t epoch,
                             uint32_t step)
{
    const struct train *train = naive->train;
    double begin_s = timer_now_s();
    uint32_t count = train_batch(train, order, step, naive->numbers);
    TRY(feed_step(&naive->feed, epoch, naive->numbers, count));
    for (uint32_t j = 0; j < count; j++)
        take_to_learn(naive, epoch, j);
    naive->totals.data_s += timer_now_s() - begin_s;
    uint64_t number = (uint64_t)epoch * train_steps(train) + step;
    double loss = learn(naive, epoch, count);
    naive->totals.loss += loss;
    naive->totals.samples += count;
    if (!isfinite(loss) && naive->totals.bad_step == TRAIN_FINE)
        naive->totals.bad_step = number;
    update_parameters(naive, number);
    return STATUS_OK;
}

static enum status naive_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    struct naive *naive = state;
    const struct train *train = naive->train;
    struct draw_order order = draw_order(train->seed, epoch, train->data->sets[DATA_TRAIN].count);
    for (uint32_t i = 0; i < count; i++)
        TRY(make_step(naive, &order, epoch, first + i));
    return STATUS_OK;
}

static enum status naive_totals(void *state, struct train_totals *totals)
{
    struct naive *naive = state;
    *totals = naive->totals;
    totals->generate_s = naive->feed.generate_s;
    naive->feed.generate_s = 0;
    naive->totals = (struct train_totals){.bad_step = TRAIN_FINE};
    return STATUS_OK;
}

static enum status naive_gradients(void *state, float *gradients)
{
    const struct naive *naive = state;
    copy_out(gradients, naive->gradients, naive->train->model->arena_values);
    return STATUS_OK;
}

/* Sample by sample, at place 0 of the batch. */
static enum status naive_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                  float *logits)
{
    struct naive *naive = state;
    const struct model *model = naive->train->model;
    const struct passing passing = {.training = false};
    for (uint32_t i = 0; i < count; i++) {
        take(naive, data_sample(naive->train->data, part, first + i), (struct draw_move){0}, 0);
        forward(naive, &passing, 0);
        copy_out(logits + (size_t)i * model->classes,
                 output_of(naive, naive->outputs, model->layer_count - 1, 0), model->classes);
    }
    return STATUS_OK;
}

static uint64_t naive_memory_bytes(const void *state)
{
    const struct naive *naive = state;
    return naive->bytes + feed_memory_bytes(&naive->feed);
}

const struct engine
#ifdef FDSL_DOUBLE
    engine_oracle
#else
    engine_naive
#endif
    = {
#ifdef FDSL_DOUBLE
        .name = "the oracle",
        .bounds = ENGINE_BOUNDS_FLOAT,
#else
        .name = "naive",
        .bounds = ENGINE_BOUNDS_FLOAT,
#endif
        .feeds = true,
        .open = naive_open,
        .close = naive_close,
        .set = naive_set,
        .get = naive_get,
        .steps = naive_steps,
        .totals = naive_totals,
        .gradients = naive_gradients,
        .evaluate = naive_evaluate,
        .memory_bytes = naive_memory_bytes,
};

/* ---- What is no number ---- */

#ifndef FDSL_DOUBLE
/* The first layer of which any sample's output is no finite number; the number of layers: none. */
static uint32_t bad_layer(const struct naive *naive, uint32_t count)
{
    const struct model *model = naive->train->model;
    for (uint32_t i = 0; i < model->layer_count; i++)
        for (uint32_t j = 0; j < count; j++)
            for (size_t v = 0; v < model->layers[i].out_values; v++)
                if (!isfinite(output_of(naive, naive->outputs, i, j)[v]))
                    return i;
    return model->layer_count;
}

enum status naive_find_bad_layer(const struct train *train, const struct train_state *from, uint32_t epoch,
                                 uint32_t step, const char **layer)
{
    const struct resources one = {.threads = 1};
    struct draw_order order = draw_order(train->seed, epoch, train->data->sets[DATA_TRAIN].count);
    void *state;
    TRY(naive_open(train, &one, &state));
    struct naive *naive = state;
    enum status status = naive_set(naive, from);
    uint32_t count = train_batch(train, &order, step, naive->numbers);
    if (status == STATUS_OK)
        status = feed_step(&naive->feed, epoch, naive->numbers, count);
    for (uint32_t j = 0; status == STATUS_OK && j < count; j++) {
        const struct passing passing = {train->seed, epoch, naive->numbers[j], true};
        take_to_learn(naive, epoch, j);
        forward(naive, &passing, j);
    }
    uint32_t bad = bad_layer(naive, count); /* of no use after a failure */
    *layer = bad < train->model->layer_count ? train->model->layers[bad].name : "the loss";
    naive_close(naive);
    return status;
}
#endif

/* ---- The variants ---- */

#ifndef FDSL_DOUBLE
static enum status train_setup(const struct resources *resources, const void *input, void **state)
{
    return trainer_open(&engine_naive, resources, input, state);
}

static enum status infer_setup(const struct resources *resources, const void *input, void **state)
{
    return inferrer_open(&engine_naive, resources, input, state);
}

const struct variant variant_train_naive = {
    .platform = "cpu",
    .traits = &engine_naive,
    .setup = train_setup,
    .run = trainer_run,
    .fetch = trainer_fetch,
    .teardown = trainer_close,
};

const struct variant variant_infer_naive = {
    .platform = "cpu",
    .traits = &engine_naive,
    .setup = infer_setup,
    .run = inferrer_run,
    .fetch = inferrer_fetch,
    .teardown = inferrer_close,
};
#endif
