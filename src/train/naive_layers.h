/* The layers of naive.c, which defines `real` as float, or as double for the oracle, and includes this file.
 * Each function handles one sample, forward or backward. Backward functions add to the gradients. */
#ifndef FDSL_TRAIN_NAIVE_LAYERS_H
#define FDSL_TRAIN_NAIVE_LAYERS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "data/random_draws.h"
#include "train/model.h"

/* The pass of a sample through a layer. */
struct passing {
    const struct layer *layer;
    const real *parameters, *in; /* arena; input of the layer */
    real *out;                   /* forward: receives the output */
    const real *out_delta;       /* backward: the gradient of the output */
    real *in_delta, *gradients;  /* backward: what is added to, the gradient of the input or an arena */
    uint64_t seed;
    uint32_t epoch, sample;
    bool training;
    const real *added; /* LAYER_ADD only: the output of the earlier layer, and the gradient of that output */
    real *added_delta;
    real *scratch; /* LAYER_ATTENTION only: two values per token */
    /* LAYER_BATCH_NORM only, in training. `moments`, at the offsets of the running statistics: mean of the
     * batch, and 1 / sqrt(variance + epsilon). `sums`, at the offsets of weight and bias: sums over the batch
     * of the gradients of the outputs times the normalised inputs, and of these gradients alone. */
    const real *moments, *sums;
    uint32_t batch; /* samples of the batch */
};

/* ---- Convolution: zero padding ---- */

/* The range of outputs along one axis, begin <= i < end, for which a kernel tap reads inside the input. */
struct reach {
    int64_t begin, end, stride, shift; /* output i reads input i * stride + shift */
};

static struct reach reach(const struct layer *layer, int axis, uint32_t offset, uint32_t in, uint32_t out)
{
    int64_t shift = (int64_t)offset - layer->spec.padding[axis];
    int64_t stride = layer_stride(layer, axis);
    int64_t begin = shift < 0 ? (-shift + stride - 1) / stride : 0;
    int64_t end = in > shift ? (in - shift + stride - 1) / stride : 0;
    return (struct reach){begin, end < out ? end : out, stride, shift};
}

/* Returns the input that output `i` reads. */
static int64_t reached(const struct reach *reach, int64_t i)
{
    return i * reach->stride + reach->shift;
}

/* A weight: its index, its output and input channel, and the outputs that it contributes to, per axis. */
struct tap {
    size_t weight;
    uint32_t o, c;
    struct reach depth, height, width;
};

/* Calls `use` for all weights, in their order. */
static void each_tap(const struct passing *at, void (*use)(const struct passing *at, const struct tap *tap))
{
    const struct layer *layer = at->layer;
    const uint32_t *kernel = layer->spec.kernel;
    struct tap tap = {.weight = layer->weight};
    for (tap.o = 0; tap.o < layer->out.channels; tap.o++)
        for (tap.c = 0; tap.c < layer->in.channels; tap.c++)
            for (uint32_t t = 0; t < kernel[0]; t++) {
                tap.depth = reach(layer, 0, t, layer->in.depth, layer->out.depth);
                for (uint32_t y = 0; y < kernel[1]; y++) {
                    tap.height = reach(layer, 1, y, layer->in.height, layer->out.height);
                    for (uint32_t x = 0; x < kernel[2]; x++, tap.weight++) {
                        tap.width = reach(layer, 2, x, layer->in.width, layer->out.width);
                        use(at, &tap);
                    }
                }
            }
}

/* Returns the start offset of a channel's row at depth t and height y. */
static size_t row_at(const struct shape *shape, uint32_t channel, int64_t t, int64_t y)
{
    return (((size_t)channel * shape->depth + (size_t)t) * shape->height + (size_t)y) * shape->width;
}

/* Returns the start offset of the row of inputs that the outputs at depth t and height y read. */
static size_t row_reached(const struct layer *layer, const struct tap *tap, int64_t t, int64_t y)
{
    return row_at(&layer->in, tap->c, reached(&tap->depth, t), reached(&tap->height, y));
}

static void tap_forward(const struct passing *at, const struct tap *tap)
{
    const real weight = at->parameters[tap->weight];
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *from = at->in + row_reached(at->layer, tap, t, y);
            real *to = at->out + row_at(&at->layer->out, tap->o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                to[x] += weight * from[reached(&tap->width, x)];
        }
}

static void tap_weight(const struct passing *at, const struct tap *tap)
{
    double sum = 0; /* double, because rounding errors of a long float sum would accumulate over the steps */
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *from = at->in + row_reached(at->layer, tap, t, y);
            const real *delta = at->out_delta + row_at(&at->layer->out, tap->o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                sum += (double)delta[x] * from[reached(&tap->width, x)];
        }
    at->gradients[tap->weight] += (real)sum;
}

static void tap_backward(const struct passing *at, const struct tap *tap)
{
    const real weight = at->parameters[tap->weight];
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *delta = at->out_delta + row_at(&at->layer->out, tap->o, t, y);
            real *to = at->in_delta + row_reached(at->layer, tap, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                to[reached(&tap->width, x)] += weight * delta[x];
        }
}

static void conv_forward(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t plane = layer->out_values / layer->out.channels;
    for (size_t i = 0; i < layer->out_values; i++)
        at->out[i] = layer->spec.no_bias ? 0 : at->parameters[layer->bias + i / plane];
    each_tap(at, tap_forward);
}

static void conv_backward(const struct passing *at)
{
    each_tap(at, tap_backward);
}

static void conv_weights(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t plane = layer->out_values / layer->out.channels;
    for (size_t i = 0; i < layer->out_values && !layer->spec.no_bias; i++)
        at->gradients[layer->bias + i / plane] += at->out_delta[i];
    each_tap(at, tap_weight);
}

/* ---- Linear layers: applied to the whole sample, or to each token ---- */

static void linear_forward(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const real *weight = at->parameters + layer->weight, *bias = at->parameters + layer->bias;
    const size_t rows = layer_rows(layer), inputs = layer->in_values / rows, outputs = layer->bias_values;
    for (size_t row = 0; row < rows; row++)
        for (size_t o = 0; o < outputs; o++) {
            double sum = bias[o]; /* double, because the sum is long */
            for (size_t i = 0; i < inputs; i++)
                sum += (double)weight[o * inputs + i] * at->in[row * inputs + i];
            at->out[row * outputs + o] = (real)sum;
        }
}

static void linear_backward(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t rows = layer_rows(layer), inputs = layer->in_values / rows, outputs = layer->bias_values;
    for (size_t row = 0; row < rows; row++)
        for (size_t o = 0; o < outputs; o++) {
            const real *weight = at->parameters + layer->weight + o * inputs;
            for (size_t i = 0; i < inputs; i++)
                at->in_delta[row * inputs + i] += at->out_delta[row * outputs + o] * weight[i];
        }
}

static void linear_weights(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t rows = layer_rows(layer), inputs = layer->in_values / rows, outputs = layer->bias_values;
    for (size_t row = 0; row < rows; row++)
        for (size_t o = 0; o < outputs; o++) {
            real *gradient = at->gradients + layer->weight + o * inputs;
            at->gradients[layer->bias + o] += at->out_delta[row * outputs + o];
            for (size_t i = 0; i < inputs; i++)
                gradient[i] += at->out_delta[row * outputs + o] * at->in[row * inputs + i];
        }
}

/* ---- ReLU: passes NaN through, as in PyTorch ---- */

static void relu_forward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = at->in[i] <= 0 ? 0 : at->in[i];
}

static void relu_backward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->in_values; i++)
        at->in_delta[i] += at->in[i] <= 0 ? 0 : at->out_delta[i];
}

/* ---- Max-pooling: drops incomplete windows at the end of an axis; the first of equal values wins ---- */

/* Returns the inputs along an axis, begin <= i < end, in the window of an output. */
static struct reach window(const struct layer *layer, int axis, uint32_t output, uint32_t in)
{
    const int64_t first = (int64_t)output * layer_stride(layer, axis) - layer->spec.padding[axis];
    const int64_t end = first + layer->spec.kernel[axis];
    return (struct reach){first < 0 ? 0 : first, end < in ? end : in, 1, 0};
}

/* Returns the index of the input element that pooling copies to output `at`: the maximum of the output's
 * window. */
static size_t largest(const struct layer *layer, const real *in, size_t at)
{
    uint32_t x = (uint32_t)(at % layer->out.width), y = (uint32_t)(at / layer->out.width % layer->out.height);
    size_t plane = at / layer->out.width / layer->out.height; /* channel * depth + t */
    uint32_t t = (uint32_t)(plane % layer->out.depth), c = (uint32_t)(plane / layer->out.depth);
    const struct reach depth = window(layer, 0, t, layer->in.depth);
    const struct reach height = window(layer, 1, y, layer->in.height);
    const struct reach width = window(layer, 2, x, layer->in.width);
    size_t best = row_at(&layer->in, c, depth.begin, height.begin) + (size_t)width.begin;
    for (int64_t i = depth.begin; i < depth.end; i++)
        for (int64_t j = height.begin; j < height.end; j++)
            for (int64_t k = width.begin; k < width.end; k++) {
                size_t from = row_at(&layer->in, c, i, j) + (size_t)k;
                if (in[from] > in[best] || isnan(in[from]))
                    best = from;
            }
    return best;
}

static void pool_forward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = at->in[largest(at->layer, at->in, i)];
}

static void pool_backward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->in_delta[largest(at->layer, at->in, i)] += at->out_delta[i];
}

/* ---- Dropout ---- */

/* Returns the factor for one element: 0 if it is dropped, otherwise the factor that preserves the mean. */
static real kept(const struct passing *at, uint32_t element)
{
    uint32_t threshold = (uint32_t)(at->layer->spec.rate * 256);
    if (!at->training)
        return 1;
    struct philox_block block = draw_dropout(at->seed, at->epoch, at->sample, at->layer->number, element);
    return draw_kept(block, element, threshold) ? (real)256 / (real)(256 - threshold) : 0;
}

static void dropout_forward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = at->in[i] * kept(at, (uint32_t)i);
}

static void dropout_backward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->in_values; i++)
        at->in_delta[i] += at->out_delta[i] * kept(at, (uint32_t)i);
}

/* ---- Addition ---- */

static void add_forward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = at->in[i] + at->added[i];
}

static void add_backward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++) {
        at->in_delta[i] += at->out_delta[i];
        at->added_delta[i] += at->out_delta[i];
    }
}

/* ---- The mean of each channel ---- */

static void mean_forward(const struct passing *at)
{
    const size_t positions = at->layer->in_values / at->layer->out_values;
    for (size_t c = 0; c < at->layer->out_values; c++) {
        double sum = 0; /* double, because the sum is long */
        for (size_t i = 0; i < positions; i++)
            sum += at->in[c * positions + i];
        at->out[c] = (real)(sum / (double)positions);
    }
}

static void mean_backward(const struct passing *at)
{
    const size_t positions = at->layer->in_values / at->layer->out_values;
    for (size_t i = 0; i < at->layer->in_values; i++)
        at->in_delta[i] += at->out_delta[i / positions] / (real)positions;
}

/* ---- Batch normalisation. The engine computes what depends on the whole batch ---- */

/* The factor and the summand of a channel: the output is factor * (input - mean) + summand. */
struct channel_norm {
    real mean, inverse; /* `inverse`: 1 / sqrt(variance + epsilon) */
    real factor, summand;
};

static struct channel_norm channel_norm(const struct passing *at, uint32_t channel)
{
    const struct layer *layer = at->layer;
    const size_t mean = layer->mean + channel, variance = layer->variance + channel;
    struct channel_norm norm;
    norm.mean = at->training ? at->moments[mean] : at->parameters[mean];
    norm.inverse = at->training ? at->moments[variance]
                                : 1 / TRAIN_SQRT(at->parameters[variance] + (real)BATCH_NORM_EPSILON);
    norm.factor = norm.inverse * at->parameters[layer->weight + channel];
    norm.summand = at->parameters[layer->bias + channel];
    return norm;
}

static void batch_norm_forward(const struct passing *at)
{
    const size_t plane = at->layer->out_values / at->layer->out.channels;
    for (uint32_t c = 0; c < at->layer->out.channels; c++) {
        const struct channel_norm norm = channel_norm(at, c);
        for (size_t i = c * plane; i < (c + 1) * plane; i++)
            at->out[i] = (at->in[i] - norm.mean) * norm.factor + norm.summand;
    }
}

/* With the normalised input x, the gradient of an input is factor * (delta - mean(delta) - x *
 * mean(delta * x)), with means over a channel of the batch (Ioffe and Szegedy, 2015, section 3). */
static void batch_norm_backward(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t plane = layer->out_values / layer->out.channels;
    const real count = (real)plane * (real)at->batch;
    for (uint32_t c = 0; c < layer->out.channels; c++) {
        const struct channel_norm norm = channel_norm(at, c);
        const real mean = at->sums[layer->bias + c] / count;
        const real slope = at->sums[layer->weight + c] / count * norm.inverse;
        for (size_t i = c * plane; i < (c + 1) * plane; i++)
            at->in_delta[i] += norm.factor * (at->out_delta[i] - mean - (at->in[i] - norm.mean) * slope);
    }
}

/* ---- Transformers. Tokens are rows of `width` values ---- */

#ifdef FDSL_DOUBLE
#define REAL_ERF erf
#else
#define REAL_ERF erff
#endif

/* ---- Patches: a convolution whose stride is its kernel ---- */

/* Returns the index of the input element that weight `tap` of an output channel reads for token `token`. */
static size_t patch_at(const struct layer *layer, size_t token, size_t tap)
{
    const uint32_t height = layer->spec.kernel[1], width = layer->spec.kernel[2];
    const uint32_t across = layer->in.width / width;
    uint32_t channel = (uint32_t)(tap / width / height);
    size_t y = token / across * height + tap / width % height, x = token % across * width + tap % width;
    return row_at(&layer->in, channel, 0, (int64_t)y) + x;
}

static void patches_forward(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t width = layer->out.width, taps = layer->weight_values / width;
    const real *weight = at->parameters + layer->weight;
    for (size_t token = 0; token < layer->out.channels; token++)
        for (size_t o = 0; o < width; o++) {
            double sum = at->parameters[layer->bias + o]; /* double, because the sum is long */
            for (size_t tap = 0; tap < taps; tap++)
                sum += (double)weight[o * taps + tap] * at->in[patch_at(layer, token, tap)];
            at->out[token * width + o] = (real)sum;
        }
}

static void patches_backward(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t width = layer->out.width, taps = layer->weight_values / width;
    for (size_t token = 0; token < layer->out.channels; token++)
        for (size_t o = 0; o < width; o++)
            for (size_t tap = 0; tap < taps; tap++)
                at->in_delta[patch_at(layer, token, tap)] +=
                    at->out_delta[token * width + o] * at->parameters[layer->weight + o * taps + tap];
}

static void patches_weights(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t width = layer->out.width, taps = layer->weight_values / width;
    for (size_t token = 0; token < layer->out.channels; token++)
        for (size_t o = 0; o < width; o++) {
            const real delta = at->out_delta[token * width + o];
            at->gradients[layer->bias + o] += delta;
            for (size_t tap = 0; tap < taps; tap++)
                at->gradients[layer->weight + o * taps + tap] += delta * at->in[patch_at(layer, token, tap)];
        }
}

/* ---- The class token and the positions ---- */

static void tokens_forward(const struct passing *at)
{
    const size_t width = at->layer->out.width;
    const real *positions = at->parameters + at->layer->weight, *token = at->parameters + at->layer->bias;
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = positions[i] + (i < width ? token[i] : at->in[i - width]);
}

static void tokens_backward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->in_values; i++)
        at->in_delta[i] += at->out_delta[at->layer->out.width + i];
}

static void tokens_weights(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->gradients[at->layer->weight + i] += at->out_delta[i];
    for (size_t i = 0; i < at->layer->out.width; i++)
        at->gradients[at->layer->bias + i] += at->out_delta[i];
}

/* ---- Layer normalisation: y = (x - mean) / sqrt(variance + epsilon) * weight + bias for each token ---- */

/* The mean of a token, and 1 / sqrt(variance + epsilon), in double, because the sums are long. */
struct moments {
    double mean, scale;
};

static struct moments moments_of(const real *token, size_t width)
{
    double sum = 0, squares = 0;
    for (size_t i = 0; i < width; i++)
        sum += token[i];
    const double mean = sum / (double)width;
    for (size_t i = 0; i < width; i++)
        squares += (token[i] - mean) * (token[i] - mean);
    return (struct moments){mean, 1 / sqrt(squares / (double)width + LAYER_NORM_EPSILON)};
}

static void norm_forward(const struct passing *at)
{
    const size_t width = at->layer->in.width;
    const real *weight = at->parameters + at->layer->weight, *bias = at->parameters + at->layer->bias;
    for (size_t first = 0; first < at->layer->in_values; first += width) {
        const struct moments moments = moments_of(at->in + first, width);
        for (size_t i = 0; i < width; i++)
            at->out[first + i] =
                (real)((at->in[first + i] - moments.mean) * moments.scale) * weight[i] + bias[i];
    }
}

/* With x' = (x - mean) * scale and g = weight * out_delta, the gradient of x is scale * (g - mean of g - x' *
 * mean of g x'). */
static void norm_backward(const struct passing *at)
{
    const size_t width = at->layer->in.width;
    const real *weight = at->parameters + at->layer->weight;
    for (size_t first = 0; first < at->layer->in_values; first += width) {
        const struct moments moments = moments_of(at->in + first, width);
        double mean = 0, along = 0;
        for (size_t i = 0; i < width; i++) {
            double gradient = (double)weight[i] * at->out_delta[first + i];
            mean += gradient / (double)width;
            along += gradient * (at->in[first + i] - moments.mean) * moments.scale / (double)width;
        }
        for (size_t i = 0; i < width; i++) {
            double gradient = (double)weight[i] * at->out_delta[first + i];
            double normalised = (at->in[first + i] - moments.mean) * moments.scale;
            at->in_delta[first + i] += (real)(moments.scale * (gradient - mean - normalised * along));
        }
    }
}

static void norm_weights(const struct passing *at)
{
    const size_t width = at->layer->in.width;
    for (size_t first = 0; first < at->layer->in_values; first += width) {
        const struct moments moments = moments_of(at->in + first, width);
        for (size_t i = 0; i < width; i++) {
            double normalised = (at->in[first + i] - moments.mean) * moments.scale;
            at->gradients[at->layer->weight + i] += (real)(at->out_delta[first + i] * normalised);
            at->gradients[at->layer->bias + i] += at->out_delta[first + i];
        }
    }
}

/* ---- Attention ---- */

/* Returns the offset of a head's values in a token: those of q (`which` = 0), k (1) or v (2). */
static size_t head_at(const struct layer *layer, size_t token, size_t head, size_t which)
{
    const size_t width = layer->out.width;
    return token * 3 * width + which * width + head * (width / layer->spec.heads);
}

/* Writes the attention weights of all tokens for the output of `token`: softmax(q k^T / sqrt(d)). */
static void attend(const struct layer *layer, const real *in, size_t token, size_t head, real *weights)
{
    const size_t tokens = layer->in.channels, depth = layer->out.width / layer->spec.heads;
    const double factor = 1 / sqrt((double)depth);
    real most = 0;
    double sum = 0;
    for (size_t j = 0; j < tokens; j++) {
        double score = 0;
        for (size_t i = 0; i < depth; i++)
            score += (double)in[head_at(layer, token, head, 0) + i] * in[head_at(layer, j, head, 1) + i];
        weights[j] = (real)(score * factor);
        most = j == 0 || weights[j] > most ? weights[j] : most;
    }
    for (size_t j = 0; j < tokens; j++) {
        weights[j] = TRAIN_EXP(weights[j] - most);
        sum += weights[j];
    }
    for (size_t j = 0; j < tokens; j++)
        weights[j] = (real)(weights[j] / sum);
}

static void attention_forward(const struct passing *at)
{
    const struct layer *layer = at->layer;
    const size_t tokens = layer->in.channels, width = layer->out.width, depth = width / layer->spec.heads;
    for (size_t token = 0; token < tokens; token++)
        for (size_t head = 0; head < layer->spec.heads; head++) {
            attend(layer, at->in, token, head, at->scratch);
            for (size_t i = 0; i < depth; i++) {
                double sum = 0;
                for (size_t j = 0; j < tokens; j++)
                    sum += (double)at->scratch[j] * at->in[head_at(layer, j, head, 2) + i];
                at->out[token * width + head * depth + i] = (real)sum;
            }
        }
}

/* The backward pass of one token's output in one head. With weights p and their gradients g, the gradient of
 * score j is p[j] * (g[j] - sum of p g). */
static void attend_backward(const struct passing *at, size_t token, size_t head)
{
    const struct layer *layer = at->layer;
    const size_t tokens = layer->in.channels, width = layer->out.width, depth = width / layer->spec.heads;
    const size_t query = head_at(layer, token, head, 0);
    const double factor = 1 / sqrt((double)depth);
    const real *in = at->in, *out_delta = at->out_delta + token * width + head * depth;
    real *weights = at->scratch, *deltas = at->scratch + tokens, *in_delta = at->in_delta;
    double along = 0;
    attend(layer, in, token, head, weights);
    for (size_t j = 0; j < tokens; j++) {
        const size_t value = head_at(layer, j, head, 2);
        double sum = 0;
        for (size_t i = 0; i < depth; i++) {
            sum += (double)out_delta[i] * in[value + i];
            in_delta[value + i] += weights[j] * out_delta[i];
        }
        deltas[j] = (real)sum;
        along += weights[j] * sum;
    }
    for (size_t j = 0; j < tokens; j++) {
        const size_t key = head_at(layer, j, head, 1);
        const real delta = (real)(weights[j] * (deltas[j] - along) * factor);
        for (size_t i = 0; i < depth; i++) {
            in_delta[query + i] += delta * in[key + i];
            in_delta[key + i] += delta * in[query + i];
        }
    }
}

static void attention_backward(const struct passing *at)
{
    for (size_t token = 0; token < at->layer->in.channels; token++)
        for (size_t head = 0; head < at->layer->spec.heads; head++)
            attend_backward(at, token, head);
}

/* ---- GELU: x P(x), where P is the normal distribution function ---- */

static real normal_below(real x)
{
    return (1 + REAL_ERF(x * (real)0.70710678118654752440)) / 2;
}

static void gelu_forward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = at->in[i] * normal_below(at->in[i]);
}

static void gelu_backward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->in_values; i++) {
        const real x = at->in[i], density = TRAIN_EXP(-x * x / 2) * (real)0.39894228040143267794;
        at->in_delta[i] += at->out_delta[i] * (normal_below(x) + x * density);
    }
}

/* ---- Stochastic depth ---- */

static real path_factor(const struct passing *at)
{
    const struct layer *layer = at->layer;
    return at->training ? draw_path(at->seed, at->epoch, at->sample, layer->number, layer->spec.rate) : 1;
}

static void drop_path_forward(const struct passing *at)
{
    const real factor = path_factor(at);
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = at->in[i] * factor;
}

static void drop_path_backward(const struct passing *at)
{
    const real factor = path_factor(at);
    for (size_t i = 0; i < at->layer->in_values; i++)
        at->in_delta[i] += at->out_delta[i] * factor;
}

/* ---- The first token ---- */

static void select_forward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->out[i] = at->in[i];
}

static void select_backward(const struct passing *at)
{
    for (size_t i = 0; i < at->layer->out_values; i++)
        at->in_delta[i] += at->out_delta[i];
}

/* ---- Table of layers ---- */

/* Forward and backward pass of one sample. `backward` adds to the gradient of the input, `weights` to the
 * gradients of the layer's parameters; `weights` is NULL if the layer has none. */
static const struct {
    void (*forward)(const struct passing *at), (*backward)(const struct passing *at),
        (*weights)(const struct passing *at);
} kinds[LAYER_KINDS] = {
    [LAYER_CONV] = {conv_forward, conv_backward, conv_weights},
    [LAYER_RELU] = {relu_forward, relu_backward, NULL},
    [LAYER_POOL] = {pool_forward, pool_backward, NULL},
    [LAYER_DROPOUT] = {dropout_forward, dropout_backward, NULL},
    [LAYER_LINEAR] = {linear_forward, linear_backward, linear_weights},
    [LAYER_ADD] = {add_forward, add_backward, NULL},
    [LAYER_MEAN] = {mean_forward, mean_backward, NULL},
    [LAYER_BATCH_NORM] = {batch_norm_forward, batch_norm_backward, NULL},
    [LAYER_PATCHES] = {patches_forward, patches_backward, patches_weights},
    [LAYER_TOKENS] = {tokens_forward, tokens_backward, tokens_weights},
    [LAYER_NORM] = {norm_forward, norm_backward, norm_weights},
    [LAYER_TOKEN_LINEAR] = {linear_forward, linear_backward, linear_weights},
    [LAYER_ATTENTION] = {attention_forward, attention_backward, NULL},
    [LAYER_GELU] = {gelu_forward, gelu_backward, NULL},
    [LAYER_DROP_PATH] = {drop_path_forward, drop_path_backward, NULL},
    [LAYER_SELECT] = {select_forward, select_backward, NULL},
};

#endif
