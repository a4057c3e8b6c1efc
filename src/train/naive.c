/* The reference engine: plain loops, one sample and one layer at a time. It defines a training step; all
 * other engines are compared with it. Do not optimise it. It is compiled twice: in float for `train-naive`
 * and `infer-naive`, which use one thread, and as naive.double.c.o in double for --verify. The latter, the
 * oracle, uses several threads, but adds up in the same order: its results do not depend on the number of
 * threads. */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/phase.h"
#include "core/timer.h"
#include "machine/host.h"
#include "train/engine.h"
#include "train/feed.h"
#include "train/host_engine.h"
#include "train/trainer.h"

typedef train_real real;

#include "train/naive_layers.h"
#include "train/naive_optimizer.h"

/* The number of samples that are computed at the same time: all samples of a step in the oracle, else one. */
#ifdef FDSL_DOUBLE
#define AT_ONCE(naive) ((naive)->batch)
#else
#define AT_ONCE(naive) 1u
#endif

struct naive {
    const struct train *train;
    int threads;    /* of the oracle */
    uint32_t batch; /* capacity in samples: maximum per step or, in a pipeline, maximum kept at a time */
    real *parameters, *gradients, *m, *v;
    real *ema;                /* moving average of the parameters; NULL: none */
    real *adjusted, *squares; /* for naive_update(); NULL unless train_needs_tensors() */
    real *inputs;             /* batch x input_values */
    real *outputs; /* outputs of all layers: batch x out_values each, at the offsets layer->output * batch */
    real *deltas;  /* gradients of `outputs` */
    float *sample, *partner; /* scratch: one gathered sample, and the sample that is mixed into it */
    real *moments;           /* of LAYER_BATCH_NORM, see struct passing: an arena. NULL: no such layer */
    real *sums;              /* of all ranks, an arena; NULL unless the ranks normalise together */
    double *channels;        /* of LAYER_BATCH_NORM: two values per channel */
    float *shared;           /* `channels`, for exchange_part_sum() */
    enum status normalised;  /* of the sums over all ranks in the step */
    real *scratch;           /* of LAYER_ATTENTION: AT_ONCE x scratch_values, two values per token */
    size_t scratch_values;
    uint32_t *numbers; /* of the samples of the step, and of their partners */
    uint32_t count;    /* number of samples of the step, without partners */
    uint32_t normed;   /* number of samples over which LAYER_BATCH_NORM normalises */
    struct mix mix;    /* of the step */
    struct feed feed;
    struct train_totals totals;
    double slopes;              /* see oracle_slopes() */
    struct oracle_given *given; /* see oracle_give(); NULL: nothing */
    struct published published; /* copy of `totals` after the latest step, for progress() */
    uint64_t bytes, parts[MEMORY_PARTS];
    enum memory_part part; /* of the next allocations */
};

/* ---- The network ---- */

/* Returns the output of a layer for the sample at index `j` of the batch if `arena` is naive->outputs.
 * Returns the gradient of this output if `arena` is naive->deltas. */
static real *output_of(const struct naive *naive, real *arena, uint32_t layer, uint32_t j)
{
    const struct layer *of = &naive->train->model->layers[layer];
    return arena + of->output * naive->batch + j * of->out_values;
}

/* Returns the number of the layer whose output is the input of `layer`, which is not the first layer. */
static uint32_t before(const struct naive *naive, uint32_t layer)
{
    return layer - 1 - naive->train->model->layers[layer].spec.skipped;
}

/* Returns the input of a layer: an earlier layer's output, or the sample itself. */
static real *input_of(const struct naive *naive, uint32_t layer, uint32_t j)
{
    return layer ? output_of(naive, naive->outputs, before(naive, layer), j)
                 : naive->inputs + j * naive->train->model->input_values;
}

/* Returns a copy of `passing` for layer i, with scratch memory. For a LAYER_ADD, sets the pointers to the
 * earlier output and to its gradient. In a stage of a pipeline, the earlier output may be the stage's input,
 * whose gradient is `in_delta`. */
static struct passing passing_at(const struct naive *naive, const struct passing *passing, uint32_t i,
                                 uint32_t j, real *in_delta)
{
    const struct layer_spec *spec = &naive->train->model->layers[i].spec;
    struct passing at = *passing;
    at.scratch = naive->scratch + j % AT_ONCE(naive) * naive->scratch_values;
    if (spec->kind != LAYER_ADD)
        return at;
    bool inside = i >= spec->back;
    at.added = inside ? output_of(naive, naive->outputs, i - spec->back, j) : input_of(naive, 0, j);
    if (!naive->train->forward_only)
        at.added_delta = inside ? output_of(naive, naive->deltas, i - spec->back, j) : in_delta;
    return at;
}

/* Replaces the output of a layer by a given one, and adds up their difference. */
static void take_given(struct naive *naive, uint32_t layer, uint32_t j)
{
    struct oracle_given *given = naive->given;
    const size_t values = naive->train->model->layers[layer].out_values;
    real *own = output_of(naive, naive->outputs, layer, j);
    if (j == 0)
        given->off[layer] = given->all[layer] = 0;
    for (size_t i = 0; given->outputs[layer] && i < values; i++) {
        const double value = given->outputs[layer][j * values + i];
        given->off[layer] += (own[i] - value) * (own[i] - value);
        given->all[layer] += (double)own[i] * own[i];
        own[i] = (real)value;
    }
}

/* Runs the layers begin .. end - 1. */
static void forward_layers(struct naive *naive, const struct passing *passing, uint32_t j, uint32_t begin,
                           uint32_t end)
{
    const struct model *model = naive->train->model;
    RANGE(FORWARD);
    for (uint32_t i = begin; i < end; i++) {
        const struct passing at = passing_at(naive, passing, i, j, NULL);
        kinds[model->layers[i].spec.kind].forward(&model->layers[i], &at, naive->parameters,
                                                  input_of(naive, i, j),
                                                  output_of(naive, naive->outputs, i, j));
        if (naive->given)
            take_given(naive, i, j);
    }
}

static void forward(struct naive *naive, const struct passing *passing, uint32_t j)
{
    forward_layers(naive, passing, j, 0, naive->train->model->layer_count);
}

/* Runs the backward pass of the layers begin .. end - 1. */
static void backward_layers(struct naive *naive, const struct passing *passing, uint32_t j, uint32_t begin,
                            uint32_t end, real *in_delta)
{
    RANGE(BACKWARD);
    const struct model *model = naive->train->model;
    for (uint32_t i = 0; end == model->layer_count && i + 1 < end; i++)
        memset(output_of(naive, naive->deltas, i, j), 0, model->layers[i].out_values * sizeof(real));
    for (uint32_t i = end; i-- > begin;) {
        const struct passing at = passing_at(naive, passing, i, j, in_delta);
        real *to = i ? output_of(naive, naive->deltas, before(naive, i), j) : in_delta;
        if (to)
            kinds[model->layers[i].spec.kind].backward(&model->layers[i], &at, naive->parameters,
                                                       input_of(naive, i, j),
                                                       output_of(naive, naive->deltas, i, j), to);
    }
}

/* Computes the gradients of all outputs but the last and, unless in_delta is NULL, of the input. The gradient
 * of an output is the sum over all layers that use it, so the gradients start at zero. */
static void backward_inputs(struct naive *naive, const struct passing *passing, uint32_t j, real *in_delta)
{
    backward_layers(naive, passing, j, 0, naive->train->model->layer_count, in_delta);
}

/* Copies naive->sample into index `j` of the batch. */
static void put(struct naive *naive, uint32_t j)
{
    const size_t values = naive->train->data->sample_values;
    for (size_t i = 0; i < values; i++)
        naive->inputs[j * values + i] = naive->sample[i];
}

/* Gathers a sample into index `j` of the batch, without augmentation. */
static void take(struct naive *naive, const void *stored, uint32_t j)
{
    data_gather(naive->train->data, stored, (struct draw_move){0}, naive->sample);
    put(naive, j);
}

/* Gathers the training sample that has index `fed` in the latest feed_step() into index `j` of the batch. */
static void take_to_learn(struct naive *naive, uint32_t epoch, const uint32_t *numbers, uint32_t fed,
                          uint32_t j)
{
    feed_gather(&naive->feed, &naive->mix, epoch, numbers, naive->count, fed, naive->partner, naive->sample);
    put(naive, j);
}

/* ---- The engine ---- */

static void naive_close(void *state)
{
    struct naive *naive = state;
    real *const arenas[] = {naive->parameters, naive->gradients, naive->m,       naive->v,
                            naive->ema,        naive->inputs,    naive->outputs, naive->deltas,
                            naive->adjusted,   naive->squares,   naive->moments, naive->sums};
    for (size_t i = 0; i < COUNT_OF(arenas); i++)
        free(arenas[i]);
    free(naive->channels);
    free(naive->shared);
    free(naive->sample);
    free(naive->partner);
    free(naive->scratch);
    free(naive->numbers);
    feed_close(&naive->feed);
    free(naive);
}

/* Returns whether open() only counts the memory. */
static bool plans(const struct naive *naive)
{
    return naive->train->memory && naive->train->memory->plans;
}

/* Allocates zeroed memory of a part (enum memory_part), and counts it. If memory is only counted, allocates a
 * single element. */
static void *zeros(struct naive *naive, size_t count, size_t size)
{
    naive->bytes += count * size;
    naive->parts[naive->part] += count * size;
    return calloc(plans(naive) ? 1 : count, size);
}

/* Adds what allocate() counted to the account of the run. */
static enum status account(const struct naive *naive)
{
    for (int part = 0; part < MEMORY_PARTS; part++)
        TRY(memory_take(naive->train->memory, (enum memory_part)part, naive->parts[part]));
    return STATUS_OK;
}

/* Returns the largest number of tokens; at least 1. */
static size_t most_tokens(const struct model *model)
{
    size_t most = 1;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].spec.kind == LAYER_ATTENTION && model->layers[i].in.channels > most)
            most = model->layers[i].in.channels;
    return most;
}

/* Returns whether LAYER_BATCH_NORM normalises over the samples of several ranks. */
static bool shares_norms(const struct naive *naive)
{
    return naive->train->sync_batch_norm && naive->train->exchange;
}

/* Returns the largest number of channels of a LAYER_BATCH_NORM. */
static size_t most_channels(const struct model *model)
{
    size_t most = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].spec.kind == LAYER_BATCH_NORM && model->layers[i].out.channels > most)
            most = model->layers[i].out.channels;
    return most;
}

/* Allocates the arrays of LAYER_BATCH_NORM. Returns false if memory runs out. */
static bool allocate_norms(struct naive *naive)
{
    const struct model *model = naive->train->model;
    if (!model->normalises)
        return true;
    naive->part = MEMORY_WORKSPACE;
    naive->moments = zeros(naive, model->arena_values, sizeof(real));
    naive->channels = zeros(naive, 2 * most_channels(model), sizeof *naive->channels);
    if (shares_norms(naive)) {
        naive->sums = zeros(naive, model->arena_values, sizeof(real));
        naive->shared = zeros(naive, 2 * most_channels(model), sizeof *naive->shared);
    }
    return naive->moments && naive->channels && ((naive->sums && naive->shared) || !shares_norms(naive));
}

/* Allocates all arrays of the engine. Returns false if memory runs out. */
static bool allocate(struct naive *naive)
{
    const struct model *model = naive->train->model;
    size_t batch = naive->batch, learning = naive->train->forward_only ? 1 : model->arena_values;
    naive->part = MEMORY_PARAMETERS;
    naive->parameters = zeros(naive, model->arena_values, sizeof(real));
    naive->part = MEMORY_GRADIENTS;
    naive->gradients = zeros(naive, learning, sizeof(real));
    naive->part = MEMORY_OPTIMIZER;
    naive->m = zeros(naive, learning, sizeof(real));
    naive->v = zeros(naive, learning, sizeof(real));
    if (train_averages(naive->train))
        naive->ema = zeros(naive, model->arena_values, sizeof(real));
    if (train_needs_tensors(naive->train)) {
        naive->adjusted = zeros(naive, model->arena_values, sizeof(real));
        naive->squares = zeros(naive, naive_optimizer_scratch(naive->train) + 1, sizeof(real));
    }
    naive->part = MEMORY_ACTIVATIONS;
    naive->inputs = zeros(naive, batch * model->input_values, sizeof(real));
    naive->outputs = zeros(naive, batch * model->output_values, sizeof(real));
    naive->deltas = zeros(naive, naive->train->forward_only ? 1 : batch * model->output_values, sizeof(real));
    naive->sample = zeros(naive, model->input_values, sizeof(float));
    naive->partner = zeros(naive, model->input_values, sizeof(float));
    naive->scratch_values = 2 * most_tokens(model);
    naive->scratch = zeros(naive, AT_ONCE(naive) * naive->scratch_values, sizeof(real));
    naive->numbers = zeros(naive, train_entries(naive->train, naive->batch), sizeof *naive->numbers);
    return naive->parameters && naive->gradients && naive->m && naive->v && naive->inputs && naive->outputs &&
           naive->deltas && naive->sample && naive->partner && naive->scratch && naive->numbers &&
           (naive->ema || !train_averages(naive->train)) &&
           ((naive->adjusted && naive->squares) || !train_needs_tensors(naive->train)) &&
           allocate_norms(naive);
}

static enum status naive_open(const struct train *train, const struct resources *resources, void **state)
{
    struct naive *naive = *state = calloc(1, sizeof *naive);
    TRY(ALLOCATED(naive, "naive: out of memory"));
    naive->train = train;
    naive->threads = resources->threads > 1 ? resources->threads : 1;
    naive->batch = train->stage ? train->stage->slots * train->stage->capacity : train_share_max(train);
    naive->totals.bad_step = TRAIN_FINE;
    naive->mix.share = 1;
    /* calloc() may succeed even if memory is short (overcommit), so compare the total with the available
     * memory. */
    bool allocated = allocate(naive);
    if (!plans(naive))
        TRY(memory_check(naive->bytes, "naive: the network and its batch", "lower --batch"));
    TRY(account(naive));
    return allocated ? feed_open(train, resources, &naive->feed)
                     : status_set(STATUS_EXHAUSTED, "naive: out of memory for %.1f GB; lower --batch",
                                  1e-9 * (double)naive->bytes);
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
    copy_in(naive->m, from->m, values);
    copy_in(naive->v, from->v, values);
    if (naive->ema)
        copy_in(naive->ema, from->ema ? from->ema : from->parameters, values);
    return STATUS_OK;
}

static enum status naive_get(void *state, struct train_state *into)
{
    const struct naive *naive = state;
    size_t values = naive->train->model->arena_values;
    copy_out(into->parameters, naive->parameters, values);
    copy_out(into->m, naive->m, values);
    copy_out(into->v, naive->v, values);
    if (naive->ema && into->ema)
        copy_out(into->ema, naive->ema, values);
    return STATUS_OK;
}

/* Adds the loss of the sample at index `j` to `*loss`, and computes the gradient of its logits. The step has
 * `total` samples on all ranks. */
static void take_loss(struct naive *naive, const struct target *target, uint32_t j, uint32_t total,
                      double *loss)
{
    const struct train *train = naive->train;
    const uint32_t last = train->model->layer_count - 1;
    const real *logits = output_of(naive, naive->outputs, last, j);
    real *deltas = output_of(naive, naive->deltas, last, j);
    double squares = 0;
    *loss += sample_loss(train, logits, target, total, deltas);
    for (uint32_t k = 0; k < train->model->classes; k++)
        squares += (double)deltas[k] * deltas[k];
    naive->slopes += sqrt(squares);
    naive->totals.samples += target->label != DATA_MASKED;
    naive->totals.correct += sample_correct(train, logits, target);
}

/* Adds the sum of the losses of samples of step `step` to the totals. */
static void add_totals(struct naive *naive, uint64_t step, double loss)
{
    naive->totals.loss += loss;
    if (!isfinite(loss) && naive->totals.bad_step == TRAIN_FINE)
        naive->totals.bad_step = step;
}

/* Returns what the layers need to know about the sample at index `j` of a training step. */
static struct passing passing_of(const struct naive *naive, uint32_t epoch, uint32_t j)
{
    return (struct passing){.seed = naive->train->seed,
                            .epoch = epoch,
                            .sample = naive->numbers[j],
                            .training = true,
                            .moments = naive->moments,
                            .sums = naive->sums ? naive->sums : naive->gradients,
                            .batch = naive->normed};
}

/* ---- A step of the oracle on several threads, and of networks with LAYER_BATCH_NORM. Each value is the sum
 * of the same terms in the same order. ---- */

#define SHARED_MIN 8 /* with fewer samples, starting threads takes longer than it saves */

static int threads_for(const struct naive *naive, uint32_t samples)
{
    return AT_ONCE(naive) == 1 || samples < SHARED_MIN ? 1 : naive->threads;
}

struct lesson {
    struct naive *naive;
    uint32_t epoch, count, total; /* `count`: samples of the step on this rank; `total`: on all ranks */
    uint32_t begin, end;          /* the layers to compute */
};

static void sample_forward(void *context, uint64_t j, int thread)
{
    const struct lesson *lesson = context;
    const struct passing passing = passing_of(lesson->naive, lesson->epoch, (uint32_t)j);
    (void)thread;
    forward_layers(lesson->naive, &passing, (uint32_t)j, lesson->begin, lesson->end);
}

static void sample_backward(void *context, uint64_t j, int thread)
{
    const struct lesson *lesson = context;
    const struct passing passing = passing_of(lesson->naive, lesson->epoch, (uint32_t)j);
    (void)thread;
    backward_layers(lesson->naive, &passing, (uint32_t)j, lesson->begin, lesson->end, NULL);
}

/* ---- The statistics of the LAYER_BATCH_NORM lesson->begin: for each channel, first this rank's part of the
 * mean, then its part of the mean square of the distances from the mean, then what follows from both. The
 * running variance takes the unbiased variance, as in PyTorch. ---- */

/* Returns the number of values of a channel of `layer` over which it normalises. */
static double normed_values(const struct naive *naive, const struct layer *layer)
{
    return (double)(layer->out_values / layer->out.channels) * naive->normed;
}

static void channel_mean(void *context, uint64_t channel, int thread)
{
    const struct lesson *lesson = context;
    struct naive *naive = lesson->naive;
    const struct layer *layer = &naive->train->model->layers[lesson->begin];
    const size_t plane = layer->out_values / layer->out.channels, first = channel * plane;
    double sum = 0;
    (void)thread;
    for (uint32_t j = 0; j < lesson->count; j++)
        for (size_t i = first; i < first + plane; i++)
            sum += input_of(naive, lesson->begin, j)[i];
    naive->channels[channel] = sum / normed_values(naive, layer);
}

static void channel_variance(void *context, uint64_t channel, int thread)
{
    const struct lesson *lesson = context;
    struct naive *naive = lesson->naive;
    const struct layer *layer = &naive->train->model->layers[lesson->begin];
    const size_t plane = layer->out_values / layer->out.channels, first = channel * plane;
    const double mean = naive->channels[channel], share = (double)lesson->count / lesson->total;
    double squares = 0;
    (void)thread;
    for (uint32_t j = 0; j < lesson->count; j++)
        for (size_t i = first; i < first + plane; i++)
            squares +=
                (input_of(naive, lesson->begin, j)[i] - mean) * (input_of(naive, lesson->begin, j)[i] - mean);
    naive->moments[layer->mean + channel] = (real)mean;
    if (!naive->train->forward_only)
        naive->gradients[layer->mean + channel] = (real)(share * mean);
    naive->channels[channel] = squares / normed_values(naive, layer);
}

static void channel_moments(void *context, uint64_t channel, int thread)
{
    const struct lesson *lesson = context;
    struct naive *naive = lesson->naive;
    const struct layer *layer = &naive->train->model->layers[lesson->begin];
    const double values = normed_values(naive, layer), share = (double)lesson->count / lesson->total;
    const double variance = naive->channels[channel];
    (void)thread;
    naive->moments[layer->variance + channel] = (real)(1 / sqrt(variance + BATCH_NORM_EPSILON));
    if (!naive->train->forward_only)
        naive->gradients[layer->variance + channel] =
            (real)(share * variance * values / (values > 1 ? values - 1 : 1));
}

/* Adds up the first `count` values of naive->channels over the ranks that normalise together. `which` numbers
 * the sums of a layer in a step. A failure is the same on all ranks. */
static void sum_channels(struct naive *naive, uint32_t layer, uint32_t which, size_t count)
{
    if (!shares_norms(naive) || naive->normalised != STATUS_OK)
        return;
    for (size_t i = 0; i < count; i++)
        naive->shared[i] = (float)naive->channels[i];
    naive->normalised =
        exchange_part_sum(naive->train->exchange, 3 * (size_t)layer + which, STATUS_OK, naive->shared, count);
    for (size_t i = 0; i < count; i++)
        naive->channels[i] = naive->shared[i];
}

/* Passes the failure of this rank to all ranks, which wait in the first sum of a step. */
static enum status fail_norms(struct naive *naive, enum status status)
{
    uint32_t layer = 0;
    while (naive->train->model->layers[layer].spec.kind != LAYER_BATCH_NORM)
        layer++;
    return exchange_part_sum(naive->train->exchange, 3 * (size_t)layer, status, naive->shared,
                             naive->train->model->layers[layer].out.channels);
}

/* Without samples to normalise over, nothing uses the statistics. */
static void find_moments(struct lesson *lesson, int threads)
{
    struct naive *naive = lesson->naive;
    const uint32_t channels = naive->train->model->layers[lesson->begin].out.channels;
    if (naive->normed == 0)
        return;
    parallel_for(threads, channels, channel_mean, lesson);
    sum_channels(naive, lesson->begin, 0, channels);
    parallel_for(threads, channels, channel_variance, lesson);
    sum_channels(naive, lesson->begin, 1, channels);
    parallel_for(threads, channels, channel_moments, lesson);
}

/* Computes the gradients of weight and bias of a channel of the LAYER_BATCH_NORM lesson->end - 1. */
static void channel_sums(void *context, uint64_t channel, int thread)
{
    const struct lesson *lesson = context;
    struct naive *naive = lesson->naive;
    const uint32_t i = lesson->end - 1;
    const struct layer *layer = &naive->train->model->layers[i];
    const size_t plane = layer->out_values / layer->out.channels, first = channel * plane;
    const real mean = naive->moments[layer->mean + channel],
               inverse = naive->moments[layer->variance + channel];
    double sum = 0, products = 0;
    (void)thread;
    for (uint32_t j = 0; j < lesson->count; j++)
        for (size_t v = first; v < first + plane; v++) {
            const double delta = output_of(naive, naive->deltas, i, j)[v];
            sum += delta;
            products += delta * (input_of(naive, i, j)[v] - mean) * inverse;
        }
    naive->gradients[layer->bias + channel] = (real)sum;
    naive->gradients[layer->weight + channel] = (real)products;
    naive->channels[channel] = sum;
    naive->channels[layer->out.channels + channel] = products;
}

/* Computes the gradients of the LAYER_BATCH_NORM lesson->end - 1, and the sums over all ranks. */
static void find_slopes(struct lesson *lesson, int threads)
{
    struct naive *naive = lesson->naive;
    const struct layer *layer = &naive->train->model->layers[lesson->end - 1];
    const uint32_t channels = layer->out.channels;
    parallel_for(threads, channels, channel_sums, lesson);
    sum_channels(naive, lesson->end - 1, 2, 2 * (size_t)channels);
    for (uint32_t c = 0; naive->sums && c < channels; c++) {
        naive->sums[layer->bias + c] = (real)naive->channels[c];
        naive->sums[layer->weight + c] = (real)naive->channels[channels + c];
    }
}

static bool is_batch_norm(const struct model *model, uint32_t layer)
{
    return model->layers[layer].spec.kind == LAYER_BATCH_NORM;
}

/* Runs the forward pass of a batch: all samples up to a LAYER_BATCH_NORM, then its statistics, and so on. */
static void batch_forward(struct lesson *lesson)
{
    struct naive *naive = lesson->naive;
    const struct model *model = naive->train->model;
    const int threads = threads_for(naive, lesson->count);
    for (lesson->begin = 0; lesson->begin < model->layer_count; lesson->begin = lesson->end) {
        lesson->end = lesson->begin + 1;
        while (lesson->end < model->layer_count && !is_batch_norm(model, lesson->end))
            lesson->end++;
        if (is_batch_norm(model, lesson->begin))
            find_moments(lesson, threads);
        parallel_for(threads, lesson->count, sample_forward, lesson);
    }
}

/* Computes the gradients of all outputs, and of the parameters of LAYER_BATCH_NORM. */
static void batch_backward(struct lesson *lesson)
{
    struct naive *naive = lesson->naive;
    const struct model *model = naive->train->model;
    const int threads = threads_for(naive, lesson->count);
    for (lesson->end = model->layer_count; lesson->end > 0; lesson->end = lesson->begin) {
        lesson->begin = lesson->end - 1;
        while (lesson->begin > 0 && !is_batch_norm(model, lesson->begin - 1))
            lesson->begin--;
        if (is_batch_norm(model, lesson->end - 1))
            find_slopes(lesson, threads);
        parallel_for(threads, lesson->count, sample_backward, lesson);
    }
}

/* Returns the number of parts of a layer that share no weight: the output channels of a convolution, the
 * outputs of a linear layer that is applied to the whole sample, otherwise 1; 0 if there are no weights. */
static uint32_t parts_of(const struct layer *layer)
{
    if (!kinds[layer->spec.kind].weights)
        return 0;
    return layer->spec.kind == LAYER_CONV     ? layer->out.channels
           : layer->spec.kind == LAYER_LINEAR ? (uint32_t)layer->bias_values
                                              : 1;
}

/* Adds the gradients of one part's weights, sample by sample. `task` counts the parts of all layers. */
static void part_weights(void *context, uint64_t task, int thread)
{
    const struct lesson *lesson = context;
    struct naive *naive = lesson->naive;
    const struct layer *layers = naive->train->model->layers;
    uint32_t i = 0;
    (void)thread;
    for (; task >= parts_of(&layers[i]); i++)
        task -= parts_of(&layers[i]);
    const uint32_t parts = parts_of(&layers[i]);
    struct layer part = layers[i];
    part.out.channels /= parts;
    part.out_values /= parts;
    part.weight_values /= parts;
    part.bias_values /= parts;
    part.weight += task * part.weight_values;
    part.bias += task * part.bias_values;
    for (uint32_t j = 0; j < lesson->count; j++)
        kinds[part.spec.kind].weights(&part, input_of(naive, i, j),
                                      output_of(naive, naive->deltas, i, j) + task * part.out_values,
                                      naive->gradients);
}

static double learn_batch(struct naive *naive, uint32_t epoch, uint32_t count, uint32_t total)
{
    struct lesson lesson = {.naive = naive, .epoch = epoch, .count = count, .total = total};
    const struct model *model = naive->train->model;
    const int threads = threads_for(naive, count);
    double loss = 0;
    uint64_t parts = 0;
    naive->normed = shares_norms(naive) ? total : count;
    naive->normalised = STATUS_OK;
    for (uint32_t i = 0; i < model->layer_count; i++)
        parts += parts_of(&model->layers[i]);
    batch_forward(&lesson);
    for (uint32_t j = 0; j < count; j++) {
        const struct target target = train_target(naive->train, &naive->mix, naive->numbers, count, j);
        take_loss(naive, &target, j, total, &loss);
    }
    batch_backward(&lesson);
    parallel_for(threads, parts, part_weights, &lesson);
    return loss;
}

#ifdef FDSL_DOUBLE
#define LEARNS_BATCHES(model) ((void)(model), true)
#else
#define LEARNS_BATCHES(model) ((model)->normalises)
#endif

/* Adds the gradients of the weights. Call backward_inputs() first. */
static void backward_weights(struct naive *naive, uint32_t j)
{
    RANGE(BACKWARD);
    const struct model *model = naive->train->model;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (kinds[model->layers[i].spec.kind].weights)
            kinds[model->layers[i].spec.kind].weights(&model->layers[i], input_of(naive, i, j),
                                                      output_of(naive, naive->deltas, i, j),
                                                      naive->gradients);
}

static double learn_samples(struct naive *naive, uint32_t epoch, uint32_t count, uint32_t total)
{
    double loss = 0;
    if (LEARNS_BATCHES(naive->train->model))
        return learn_batch(naive, epoch, count, total);
    for (uint32_t j = 0; j < count; j++) {
        const struct passing passing = passing_of(naive, epoch, j);
        const struct target target = train_target(naive->train, &naive->mix, naive->numbers, count, j);
        forward(naive, &passing, j);
        take_loss(naive, &target, j, total, &loss);
        backward_inputs(naive, &passing, j, NULL);
        backward_weights(naive, j);
    }
    return loss;
}

/* Runs forward pass, loss and backward pass on the `count` gathered samples of a step that has `total`
 * samples on all ranks. Returns the sum of the losses. */
static double learn(struct naive *naive, uint32_t epoch, uint32_t count, uint32_t total)
{
    memset(naive->gradients, 0, naive->train->model->arena_values * sizeof *naive->gradients);
    return learn_samples(naive, epoch, count, total);
}

/* Adds up the gradients of all ranks. `status` is the status of this rank's step so far. */
static enum status add_up(struct naive *naive, enum status status)
{
#ifdef FDSL_DOUBLE /* exchanges add up floats, and the oracle computes the steps of all ranks itself */
    (void)naive;
    return status;
#else
    return exchange_sum(naive->train->exchange, status, naive->gradients, naive->train->model->arena_values);
#endif
}

/* Returns the factor that clips the gradients, and adds their norm to the totals. */
static real clip(struct naive *naive)
{
    const struct train *train = naive->train;
    double squares = 0;
    if (train->optimizer.clip_norm == 0)
        return 1;
    for (size_t i = 0; i < train->model->trained_values; i++)
        squares += (double)naive->gradients[i] * naive->gradients[i];
    naive->totals.norms += sqrt(squares);
    naive->totals.normed++;
    return (real)optimizer_clip(train->optimizer.clip_norm, sqrt(squares));
}

static void update_parameters(struct naive *naive, uint64_t step)
{
    const struct train *train = naive->train;
    RANGE(UPDATE);
    struct update update = optimizer_at(&train->optimizer, &train->schedule, step);
    update.clip = clip(naive);
    const struct naive_arenas arenas = {.parameters = naive->parameters,
                                        .gradients = naive->gradients,
                                        .m = naive->m,
                                        .v = naive->v,
                                        .ema = naive->ema,
                                        .adjusted = naive->adjusted};
    naive_update(train, &update, &arenas, naive->squares);
}

static void take_batch(struct naive *naive, uint32_t epoch, uint32_t count)
{
    RANGE(GATHER);
    for (uint32_t j = 0; j < count; j++)
        take_to_learn(naive, epoch, naive->numbers, j, j);
}

static void choose_samples(struct naive *naive, const struct draw_order *order, uint32_t epoch, uint32_t step)
{
    naive->count = train_batch(naive->train, order, step, naive->numbers);
    naive->mix = train_mix(naive->train, epoch, step);
}

static enum status make_step(struct naive *naive, const struct draw_order *order, uint32_t epoch,
                             uint32_t step)
{
    const struct train *train = naive->train;
    double begin_s = timer_now_s();
    choose_samples(naive, order, epoch, step);
    const uint32_t count = naive->count;
    enum status status = feed_step(&naive->feed, epoch, step, naive->numbers, count);
    if (status != STATUS_OK)
        return shares_norms(naive) ? fail_norms(naive, status) : add_up(naive, status);
    take_batch(naive, epoch, count);
    naive->totals.data_s += timer_now_s() - begin_s;
    uint64_t number = (uint64_t)epoch * train_steps(train) + step;
    double loss = learn(naive, epoch, count, (uint32_t)train_share(train, step).total);
    TRY(naive->normalised);
    add_totals(naive, number, loss);
    TRY(add_up(naive, STATUS_OK));
    update_parameters(naive, number);
    published_store(&naive->published, &naive->totals);
    return STATUS_OK;
}

static enum status naive_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    struct naive *naive = state;
    const struct train *train = naive->train;
    struct draw_order order = train_order(train, epoch);
    for (uint32_t i = 0; i < count; i++)
        TRY(make_step(naive, &order, epoch, first + i));
    return STATUS_OK;
}

static enum status naive_totals(void *state, struct train_totals *totals)
{
    struct naive *naive = state;
    *totals = naive->totals;
    feed_totals(&naive->feed, totals);
    naive->totals = (struct train_totals){.bad_step = TRAIN_FINE};
    published_store(&naive->published, &naive->totals);
    return STATUS_OK;
}

static void naive_progress(const void *state, struct train_progress *progress)
{
    published_load(&((const struct naive *)state)->published, progress);
}

static enum status naive_gradients(void *state, float *gradients)
{
    const struct naive *naive = state;
    copy_out(gradients, naive->gradients, naive->train->model->arena_values);
    return STATUS_OK;
}

static void evaluate_at(void *context, uint64_t j, int thread)
{
    const struct passing passing = {.training = false};
    (void)thread;
    forward(context, &passing, (uint32_t)j);
}

/* Evaluates AT_ONCE samples at a time, from index 0 of the batch. */
static enum status naive_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                  float *logits)
{
    struct naive *naive = state;
    const struct model *model = naive->train->model;
    for (uint32_t i = 0, some; i < count; i += some) {
        some = count - i < AT_ONCE(naive) ? count - i : AT_ONCE(naive);
        for (uint32_t j = 0; j < some; j++)
            take(naive, data_sample(naive->train->data, part, first + i + j), j);
#ifdef FDSL_DOUBLE
        parallel_for(threads_for(naive, some), some, evaluate_at, naive);
#else
        evaluate_at(naive, 0, 0);
#endif
        for (uint32_t j = 0; j < some; j++)
            copy_out(logits + (size_t)(i + j) * model->classes,
                     output_of(naive, naive->outputs, model->layer_count - 1, j), model->classes);
    }
    return STATUS_OK;
}

#ifndef FDSL_DOUBLE /* the oracle is never a stage of a pipeline */

/* ---- A stage of a pipeline ---- */

static struct passing micro_passing(const struct naive *naive, const struct micro *micro, uint32_t j)
{
    return (struct passing){.seed = naive->train->seed,
                            .epoch = micro->epoch,
                            .sample = micro->numbers[j],
                            .training = micro->training};
}

/* Returns the index in the batch of a micro-batch's first sample. */
static uint32_t micro_begin(const struct naive *naive, const struct micro *micro)
{
    return micro->slot * naive->train->stage->capacity;
}

/* Gathers the samples of a micro-batch in the first stage. */
static enum status take_micro(struct naive *naive, const struct micro *micro)
{
    const struct data *data = naive->train->data;
    const uint32_t begin = micro_begin(naive, micro);
    double begin_s = timer_now_s();
    if (micro->training)
        TRY(feed_step(&naive->feed, micro->epoch, feed_micro(naive->train, micro), micro->numbers,
                      micro->count));
    for (uint32_t j = 0; j < micro->count; j++)
        if (micro->training)
            take_to_learn(naive, micro->epoch, micro->numbers, j, begin + j);
        else
            take(naive, data_sample(data, micro->part, micro->numbers[j]), begin + j);
    naive->totals.data_s += micro->training ? timer_now_s() - begin_s : 0;
    return STATUS_OK;
}

static enum status stage_forward(void *state, const struct micro *micro, const void *inputs, void *outputs_)
{
    struct naive *naive = state;
    float *outputs = outputs_;
    const struct model *model = naive->train->model;
    const uint32_t begin = micro_begin(naive, micro), last = model->layer_count - 1;
    const size_t values = model->layers[last].out_values;
    double loss = 0;
    naive->count = micro->count;
    if (micro->training)
        naive->mix =
            train_mix(naive->train, micro->epoch, (uint32_t)(micro->step % train_steps(naive->train)));
    if (inputs)
        copy_in(naive->inputs + begin * model->input_values, inputs, micro->count * model->input_values);
    else
        TRY(take_micro(naive, micro));
    for (uint32_t j = 0; j < micro->count; j++) {
        const struct passing passing = micro_passing(naive, micro, j);
        forward(naive, &passing, begin + j);
        if (outputs)
            copy_out(outputs + j * values, output_of(naive, naive->outputs, last, begin + j), values);
        else {
            const struct target target =
                train_target(naive->train, &naive->mix, micro->numbers, micro->count, j);
            take_loss(naive, &target, begin + j, micro->total, &loss);
        }
    }
    if (!outputs)
        add_totals(naive, micro->step, loss);
    return STATUS_OK;
}

static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of of,
                                  const void *deltas_, void *in_deltas_)
{
    struct naive *naive = state;
    const float *deltas = deltas_;
    float *in_deltas = in_deltas_;
    const struct model *model = naive->train->model;
    const uint32_t begin = micro_begin(naive, micro), last = model->layer_count - 1;
    const size_t values = model->layers[last].out_values;
    if (micro->index == 0 && of & GRADIENTS_OF_WEIGHTS)
        memset(naive->gradients, 0, model->arena_values * sizeof *naive->gradients);
    for (uint32_t j = 0; j < micro->count; j++) {
        const struct passing passing = micro_passing(naive, micro, j);
        float *in_delta = in_deltas ? in_deltas + j * model->input_values : NULL;
        if (deltas)
            copy_in(output_of(naive, naive->deltas, last, begin + j), deltas + j * values, values);
        if (in_delta)
            memset(in_delta, 0, model->input_values * sizeof *in_delta);
        if (of & GRADIENTS_OF_INPUTS)
            backward_inputs(naive, &passing, begin + j, in_delta);
        if (of & GRADIENTS_OF_WEIGHTS)
            backward_weights(naive, begin + j);
    }
    return STATUS_OK;
}

static enum status stage_clear(void *state)
{
    struct naive *naive = state;
    memset(naive->gradients, 0, naive->train->model->arena_values * sizeof *naive->gradients);
    return STATUS_OK;
}

static enum status stage_sum(void *state, bool *overflowed)
{
    (void)overflowed;
    return add_up(state, STATUS_OK);
}

static enum status stage_update(void *state, uint64_t step, bool overflowed)
{
    struct naive *naive = state;
    (void)overflowed;
    update_parameters(naive, step);
    published_store(&naive->published, &naive->totals);
    return STATUS_OK;
}

static const struct stage_functions stages = {.value_bytes = sizeof(float),
                                              .forward = stage_forward,
                                              .backward = stage_backward,
                                              .clear = stage_clear,
                                              .sum = stage_sum,
                                              .update = stage_update};

#endif

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
        .gradients_in = GRADIENTS_IN_HOST,
        .stages = &stages,
#endif
        .feeds = true,
        .augments = true,
        .open = naive_open,
        .close = naive_close,
        .set = naive_set,
        .get = naive_get,
        .steps = naive_steps,
        .totals = naive_totals,
        .progress = naive_progress,
        .gradients = naive_gradients,
        .evaluate = naive_evaluate,
        .memory_bytes = naive_memory_bytes,
};

#ifdef FDSL_DOUBLE

void oracle_give(void *oracle, struct oracle_given *given)
{
    struct naive *naive = oracle;
    naive->given = given;
    naive->threads = 1; /* take_given() adds up over the samples */
}

void oracle_output(const void *oracle, uint32_t layer, uint32_t count, float *values)
{
    const struct naive *naive = oracle;
    copy_out(values, output_of(naive, naive->outputs, layer, 0),
             count * naive->train->model->layers[layer].out_values);
}

double oracle_slopes(void *oracle)
{
    struct naive *naive = oracle;
    const double slopes = naive->slopes;
    naive->slopes = 0;
    return slopes;
}

/* Returns the norm of mine - right, without what rounding to floats adds to it, divided by the norm of
 * right - begin. */
static double relative_drift(const real *right, const float *begin, const float *mine, size_t count)
{
    double off = 0, way = 0;
    for (size_t i = 0; i < count; i++) {
        off += (mine[i] - right[i]) * (mine[i] - right[i]);
        way += (right[i] - begin[i]) * (right[i] - begin[i]);
    }
    const double error = sqrt(off) - FLT_EPSILON * sqrt(naive_squares(right, count));
    return error <= 0 ? 0 : error / sqrt(way);
}

/* The direction that enters the iteration follows from the momenta before and after the step:
 * (1 + momentum) * after - momentum * before. */
double oracle_matrix_drift(const struct train *train, const struct model_tensor *tensor, uint64_t step,
                           const struct train_state *begin, const struct train_state *end)
{
    const struct update all = optimizer_at(&train->optimizer, &train->schedule, step);
    struct update of = optimizer_of(&all, train_update_of(train, tensor));
    const size_t first = tensor->first, count = tensor->values, rows = train_rows_of(tensor);
    real *right = malloc((count + naive_optimizer_scratch(train)) * sizeof *right);
    if (!right)
        return NAN;
    for (size_t i = 0; i < count; i++)
        right[i] = (1 + of.momentum) * end->m[first + i] - of.momentum * begin->m[first + i];
    naive_orthogonalise(right, rows, count / rows, right + count);
    of.trust = optimizer_matrix_scale(rows, count / rows);
    for (size_t i = 0; i < count; i++) {
        real value = begin->parameters[first + i];
        optimizer_apply(&of, right[i], &value, NULL, NULL);
        right[i] = value;
    }
    const double drift = relative_drift(right, begin->parameters + first, end->parameters + first, count);
    for (size_t i = 0; end->ema && i < count; i++)
        right[i] = optimizer_average(&of, begin->ema[first + i], right[i]);
    const double average = end->ema ? relative_drift(right, begin->ema + first, end->ema + first, count) : 0;
    free(right);
    return average <= drift || isnan(drift) ? drift : average; /* NaN if one of them is */
}

#else

/* ---- Non-finite values ---- */

/* Returns the first layer with a non-finite output for any sample; layer_count if there is none. */
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
    struct train alone = *train;
    struct draw_order order = train_order(train, epoch);
    void *state = NULL;
    alone.memory = NULL;   /* the memory of the engine of the run does not include this one */
    alone.exchange = NULL; /* other ranks do not take part */
    enum status status = naive_open(&alone, &one, &state);
    struct naive *naive = state;
    if (status != STATUS_OK) {
        if (naive)
            naive_close(naive);
        return status;
    }
    status = naive_set(naive, from);
    choose_samples(naive, &order, epoch, step);
    const uint32_t count = naive->count;
    if (status == STATUS_OK)
        status = feed_step(&naive->feed, epoch, step, naive->numbers, count);
    if (status == STATUS_OK) {
        struct lesson lesson = {.naive = naive, .epoch = epoch, .count = count, .total = count};
        take_batch(naive, epoch, count);
        naive->normed = count;
        batch_forward(&lesson);
    }
    uint32_t bad = bad_layer(naive, count); /* meaningless after a failure; callers check the status */
    *layer = bad < train->model->layer_count ? train->model->layers[bad].name : "the loss";
    naive_close(naive);
    return status;
}

/* ---- The variants ---- */

TRAINING_BY(variant_train_naive, engine_naive, .instruction_set = isa_scalar_name);
INFERRING_BY(variant_infer_naive, engine_naive, .instruction_set = isa_scalar_name);
#endif
