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

/* Data about the current sample that the layers need. */
struct passing {
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

/* The outputs that one kernel tap contributes to, per axis. */
struct tap {
    struct reach depth, height, width;
};

static struct tap tap(const struct layer *layer, uint32_t t, uint32_t y, uint32_t x)
{
    return (struct tap){reach(layer, 0, t, layer->in.depth, layer->out.depth),
                        reach(layer, 1, y, layer->in.height, layer->out.height),
                        reach(layer, 2, x, layer->in.width, layer->out.width)};
}

/* Returns the start offset of a channel's row at depth t and height y. */
static size_t row_at(const struct shape *shape, uint32_t channel, int64_t t, int64_t y)
{
    return (((size_t)channel * shape->depth + (size_t)t) * shape->height + (size_t)y) * shape->width;
}

static void tap_forward(const struct layer *layer, const struct tap *tap, uint32_t o, uint32_t c, real weight,
                        const real *in, real *out)
{
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *from = in + row_at(&layer->in, c, reached(&tap->depth, t), reached(&tap->height, y));
            real *to = out + row_at(&layer->out, o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                to[x] += weight * from[reached(&tap->width, x)];
        }
}

/* Returns the gradient of one weight. */
static real tap_weight(const struct layer *layer, const struct tap *tap, uint32_t o, uint32_t c,
                       const real *in, const real *out_delta)
{
    double sum = 0; /* double, because rounding errors of a long float sum would accumulate over the steps */
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *from = in + row_at(&layer->in, c, reached(&tap->depth, t), reached(&tap->height, y));
            const real *delta = out_delta + row_at(&layer->out, o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                sum += (double)delta[x] * from[reached(&tap->width, x)];
        }
    return (real)sum;
}

static void tap_backward(const struct layer *layer, const struct tap *tap, uint32_t o, uint32_t c,
                         real weight, const real *out_delta, real *in_delta)
{
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *delta = out_delta + row_at(&layer->out, o, t, y);
            real *to = in_delta + row_at(&layer->in, c, reached(&tap->depth, t), reached(&tap->height, y));
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                to[reached(&tap->width, x)] += weight * delta[x];
        }
}

static void conv_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    const uint32_t *kernel = layer->spec.kernel;
    const real *weight = parameters + layer->weight;
    size_t plane = layer->out_values / layer->out.channels;
    (void)passing;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = layer->spec.no_bias ? 0 : parameters[layer->bias + i / plane];
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
                          const real *in, const real *out_delta, real *in_delta)
{
    const uint32_t *kernel = layer->spec.kernel;
    const real *weight = parameters + layer->weight;
    (void)passing, (void)in;
    for (uint32_t o = 0; o < layer->out.channels; o++)
        for (uint32_t c = 0; c < layer->in.channels; c++)
            for (uint32_t t = 0; t < kernel[0]; t++)
                for (uint32_t y = 0; y < kernel[1]; y++)
                    for (uint32_t x = 0; x < kernel[2]; x++) {
                        struct tap at = tap(layer, t, y, x);
                        tap_backward(layer, &at, o, c, *weight++, out_delta, in_delta);
                    }
}

static void conv_weights(const struct layer *layer, const real *in, const real *out_delta, real *gradients)
{
    const uint32_t *kernel = layer->spec.kernel;
    real *gradient = gradients + layer->weight;
    size_t plane = layer->out_values / layer->out.channels;
    for (size_t i = 0; i < layer->out_values && !layer->spec.no_bias; i++)
        gradients[layer->bias + i / plane] += out_delta[i];
    for (uint32_t o = 0; o < layer->out.channels; o++)
        for (uint32_t c = 0; c < layer->in.channels; c++)
            for (uint32_t t = 0; t < kernel[0]; t++)
                for (uint32_t y = 0; y < kernel[1]; y++)
                    for (uint32_t x = 0; x < kernel[2]; x++) {
                        struct tap at = tap(layer, t, y, x);
                        *gradient++ += tap_weight(layer, &at, o, c, in, out_delta);
                    }
}

/* ---- Linear layers: applied to the whole sample, or to each token ---- */

static void linear_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                           const real *in, real *out)
{
    const real *weight = parameters + layer->weight, *bias = parameters + layer->bias;
    const size_t rows = layer_rows(layer), inputs = layer->in_values / rows, outputs = layer->bias_values;
    (void)passing;
    for (size_t row = 0; row < rows; row++)
        for (size_t o = 0; o < outputs; o++) {
            double sum = bias[o]; /* double, because the sum is long */
            for (size_t i = 0; i < inputs; i++)
                sum += (double)weight[o * inputs + i] * in[row * inputs + i];
            out[row * outputs + o] = (real)sum;
        }
}

static void linear_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                            const real *in, const real *out_delta, real *in_delta)
{
    const size_t rows = layer_rows(layer), inputs = layer->in_values / rows, outputs = layer->bias_values;
    (void)passing, (void)in;
    for (size_t row = 0; row < rows; row++)
        for (size_t o = 0; o < outputs; o++) {
            const real *weight = parameters + layer->weight + o * inputs;
            for (size_t i = 0; i < inputs; i++)
                in_delta[row * inputs + i] += out_delta[row * outputs + o] * weight[i];
        }
}

static void linear_weights(const struct layer *layer, const real *in, const real *out_delta, real *gradients)
{
    const size_t rows = layer_rows(layer), inputs = layer->in_values / rows, outputs = layer->bias_values;
    for (size_t row = 0; row < rows; row++)
        for (size_t o = 0; o < outputs; o++) {
            real *gradient = gradients + layer->weight + o * inputs;
            gradients[layer->bias + o] += out_delta[row * outputs + o];
            for (size_t i = 0; i < inputs; i++)
                gradient[i] += out_delta[row * outputs + o] * in[row * inputs + i];
        }
}

/* ---- ReLU: passes NaN through, as in PyTorch ---- */

static void relu_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[i] <= 0 ? 0 : in[i];
}

static void relu_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->in_values; i++)
        in_delta[i] += in[i] <= 0 ? 0 : out_delta[i];
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

static void pool_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[largest(layer, in, i)];
}

static void pool_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        in_delta[largest(layer, in, i)] += out_delta[i];
}

/* ---- Dropout ---- */

/* Returns the factor for one element: 0 if it is dropped, otherwise the factor that preserves the mean. */
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
                             const real *in, const real *out_delta, real *in_delta)
{
    (void)parameters, (void)in;
    for (size_t i = 0; i < layer->in_values; i++)
        in_delta[i] += out_delta[i] * kept(layer, passing, (uint32_t)i);
}

/* ---- Addition ---- */

static void add_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                        const real *in, real *out)
{
    (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[i] + passing->added[i];
}

static void add_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, const real *out_delta, real *in_delta)
{
    (void)parameters, (void)in;
    for (size_t i = 0; i < layer->out_values; i++) {
        in_delta[i] += out_delta[i];
        passing->added_delta[i] += out_delta[i];
    }
}

/* ---- The mean of each channel ---- */

static void mean_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    size_t positions = layer->in_values / layer->out_values;
    (void)passing, (void)parameters;
    for (size_t c = 0; c < layer->out_values; c++) {
        double sum = 0; /* double, because the sum is long */
        for (size_t i = 0; i < positions; i++)
            sum += in[c * positions + i];
        out[c] = (real)(sum / (double)positions);
    }
}

static void mean_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta)
{
    size_t positions = layer->in_values / layer->out_values;
    (void)passing, (void)parameters, (void)in;
    for (size_t i = 0; i < layer->in_values; i++)
        in_delta[i] += out_delta[i / positions] / (real)positions;
}

/* ---- Batch normalisation. The engine computes what depends on the whole batch ---- */

/* The factor and the summand of a channel: the output is factor * (input - mean) + summand. */
struct channel_norm {
    real mean, inverse; /* `inverse`: 1 / sqrt(variance + epsilon) */
    real factor, summand;
};

static struct channel_norm channel_norm(const struct layer *layer, const struct passing *passing,
                                        const real *parameters, uint32_t channel)
{
    struct channel_norm norm;
    const real variance = parameters[layer->variance + channel];
    norm.mean =
        passing->training ? passing->moments[layer->mean + channel] : parameters[layer->mean + channel];
    norm.inverse = passing->training ? passing->moments[layer->variance + channel]
                                     : 1 / TRAIN_SQRT(variance + (real)BATCH_NORM_EPSILON);
    norm.factor = norm.inverse * parameters[layer->weight + channel];
    norm.summand = parameters[layer->bias + channel];
    return norm;
}

static void batch_norm_forward(const struct layer *layer, const struct passing *passing,
                               const real *parameters, const real *in, real *out)
{
    const size_t plane = layer->out_values / layer->out.channels;
    for (uint32_t c = 0; c < layer->out.channels; c++) {
        const struct channel_norm norm = channel_norm(layer, passing, parameters, c);
        for (size_t i = c * plane; i < (c + 1) * plane; i++)
            out[i] = (in[i] - norm.mean) * norm.factor + norm.summand;
    }
}

/* With the normalised input x, the gradient of an input is factor * (delta - mean(delta) - x *
 * mean(delta * x)), with means over a channel of the batch (Ioffe and Szegedy, 2015, section 3). */
static void batch_norm_backward(const struct layer *layer, const struct passing *passing,
                                const real *parameters, const real *in, const real *out_delta, real *in_delta)
{
    const size_t plane = layer->out_values / layer->out.channels;
    const real count = (real)plane * (real)passing->batch;
    for (uint32_t c = 0; c < layer->out.channels; c++) {
        const struct channel_norm norm = channel_norm(layer, passing, parameters, c);
        const real mean = passing->sums[layer->bias + c] / count;
        const real slope = passing->sums[layer->weight + c] / count * norm.inverse;
        for (size_t i = c * plane; i < (c + 1) * plane; i++)
            in_delta[i] += norm.factor * (out_delta[i] - mean - (in[i] - norm.mean) * slope);
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

static void patches_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                            const real *in, real *out)
{
    const size_t width = layer->out.width, taps = layer->weight_values / width;
    (void)passing;
    for (size_t token = 0; token < layer->out.channels; token++)
        for (size_t o = 0; o < width; o++) {
            double sum = parameters[layer->bias + o]; /* double, because the sum is long */
            for (size_t tap = 0; tap < taps; tap++)
                sum += (double)parameters[layer->weight + o * taps + tap] * in[patch_at(layer, token, tap)];
            out[token * width + o] = (real)sum;
        }
}

static void patches_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                             const real *in, const real *out_delta, real *in_delta)
{
    const size_t width = layer->out.width, taps = layer->weight_values / width;
    (void)passing, (void)in;
    for (size_t token = 0; token < layer->out.channels; token++)
        for (size_t o = 0; o < width; o++)
            for (size_t tap = 0; tap < taps; tap++)
                in_delta[patch_at(layer, token, tap)] +=
                    out_delta[token * width + o] * parameters[layer->weight + o * taps + tap];
}

static void patches_weights(const struct layer *layer, const real *in, const real *out_delta, real *gradients)
{
    const size_t width = layer->out.width, taps = layer->weight_values / width;
    for (size_t token = 0; token < layer->out.channels; token++)
        for (size_t o = 0; o < width; o++) {
            const real delta = out_delta[token * width + o];
            gradients[layer->bias + o] += delta;
            for (size_t tap = 0; tap < taps; tap++)
                gradients[layer->weight + o * taps + tap] += delta * in[patch_at(layer, token, tap)];
        }
}

/* ---- The class token and the positions ---- */

static void tokens_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                           const real *in, real *out)
{
    const size_t width = layer->out.width;
    (void)passing;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = parameters[layer->weight + i] + (i < width ? parameters[layer->bias + i] : in[i - width]);
}

static void tokens_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                            const real *in, const real *out_delta, real *in_delta)
{
    (void)passing, (void)parameters, (void)in;
    for (size_t i = 0; i < layer->in_values; i++)
        in_delta[i] += out_delta[layer->out.width + i];
}

static void tokens_weights(const struct layer *layer, const real *in, const real *out_delta, real *gradients)
{
    (void)in;
    for (size_t i = 0; i < layer->out_values; i++)
        gradients[layer->weight + i] += out_delta[i];
    for (size_t i = 0; i < layer->out.width; i++)
        gradients[layer->bias + i] += out_delta[i];
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

static void norm_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    const size_t width = layer->in.width;
    (void)passing;
    for (size_t first = 0; first < layer->in_values; first += width) {
        const struct moments moments = moments_of(in + first, width);
        for (size_t i = 0; i < width; i++)
            out[first + i] =
                (real)((in[first + i] - moments.mean) * moments.scale) * parameters[layer->weight + i] +
                parameters[layer->bias + i];
    }
}

/* With x' = (x - mean) * scale and g = weight * out_delta, the gradient of x is scale * (g - mean of g - x' *
 * mean of g x'). */
static void norm_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta)
{
    const size_t width = layer->in.width;
    (void)passing;
    for (size_t first = 0; first < layer->in_values; first += width) {
        const struct moments moments = moments_of(in + first, width);
        double mean = 0, along = 0;
        for (size_t i = 0; i < width; i++) {
            double gradient = (double)parameters[layer->weight + i] * out_delta[first + i];
            mean += gradient / (double)width;
            along += gradient * (in[first + i] - moments.mean) * moments.scale / (double)width;
        }
        for (size_t i = 0; i < width; i++) {
            double gradient = (double)parameters[layer->weight + i] * out_delta[first + i];
            double normalised = (in[first + i] - moments.mean) * moments.scale;
            in_delta[first + i] += (real)(moments.scale * (gradient - mean - normalised * along));
        }
    }
}

static void norm_weights(const struct layer *layer, const real *in, const real *out_delta, real *gradients)
{
    const size_t width = layer->in.width;
    for (size_t first = 0; first < layer->in_values; first += width) {
        const struct moments moments = moments_of(in + first, width);
        for (size_t i = 0; i < width; i++) {
            double normalised = (in[first + i] - moments.mean) * moments.scale;
            gradients[layer->weight + i] += (real)(out_delta[first + i] * normalised);
            gradients[layer->bias + i] += out_delta[first + i];
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

static void attention_forward(const struct layer *layer, const struct passing *passing,
                              const real *parameters, const real *in, real *out)
{
    const size_t tokens = layer->in.channels, width = layer->out.width, depth = width / layer->spec.heads;
    real *weights = passing->scratch;
    (void)parameters;
    for (size_t token = 0; token < tokens; token++)
        for (size_t head = 0; head < layer->spec.heads; head++) {
            attend(layer, in, token, head, weights);
            for (size_t i = 0; i < depth; i++) {
                double sum = 0;
                for (size_t j = 0; j < tokens; j++)
                    sum += (double)weights[j] * in[head_at(layer, j, head, 2) + i];
                out[token * width + head * depth + i] = (real)sum;
            }
        }
}

/* The backward pass of one token's output in one head. With weights p and their gradients g, the gradient of
 * score j is p[j] * (g[j] - sum of p g). */
static void attend_backward(const struct layer *layer, const real *in, size_t token, size_t head,
                            const real *out_delta, real *scratch, real *in_delta)
{
    const size_t tokens = layer->in.channels, depth = layer->out.width / layer->spec.heads;
    const size_t query = head_at(layer, token, head, 0);
    const double factor = 1 / sqrt((double)depth);
    real *weights = scratch, *deltas = scratch + tokens;
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

static void attention_backward(const struct layer *layer, const struct passing *passing,
                               const real *parameters, const real *in, const real *out_delta, real *in_delta)
{
    const size_t width = layer->out.width, depth = width / layer->spec.heads;
    (void)parameters;
    for (size_t token = 0; token < layer->in.channels; token++)
        for (size_t head = 0; head < layer->spec.heads; head++)
            attend_backward(layer, in, token, head, out_delta + token * width + head * depth,
                            passing->scratch, in_delta);
}

/* ---- GELU: x P(x), where P is the normal distribution function ---- */

static real normal_below(real x)
{
    return (1 + REAL_ERF(x * (real)0.70710678118654752440)) / 2;
}

static void gelu_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                         const real *in, real *out)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[i] * normal_below(in[i]);
}

static void gelu_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                          const real *in, const real *out_delta, real *in_delta)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->in_values; i++) {
        real density = TRAIN_EXP(-in[i] * in[i] / 2) * (real)0.39894228040143267794;
        in_delta[i] += out_delta[i] * (normal_below(in[i]) + in[i] * density);
    }
}

/* ---- Stochastic depth ---- */

static real path_factor(const struct layer *layer, const struct passing *passing)
{
    return passing->training
               ? draw_path(passing->seed, passing->epoch, passing->sample, layer->number, layer->spec.rate)
               : 1;
}

static void drop_path_forward(const struct layer *layer, const struct passing *passing,
                              const real *parameters, const real *in, real *out)
{
    const real factor = path_factor(layer, passing);
    (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[i] * factor;
}

static void drop_path_backward(const struct layer *layer, const struct passing *passing,
                               const real *parameters, const real *in, const real *out_delta, real *in_delta)
{
    const real factor = path_factor(layer, passing);
    (void)parameters, (void)in;
    for (size_t i = 0; i < layer->in_values; i++)
        in_delta[i] += out_delta[i] * factor;
}

/* ---- The first token ---- */

static void select_forward(const struct layer *layer, const struct passing *passing, const real *parameters,
                           const real *in, real *out)
{
    (void)passing, (void)parameters;
    for (size_t i = 0; i < layer->out_values; i++)
        out[i] = in[i];
}

static void select_backward(const struct layer *layer, const struct passing *passing, const real *parameters,
                            const real *in, const real *out_delta, real *in_delta)
{
    (void)passing, (void)parameters, (void)in;
    for (size_t i = 0; i < layer->out_values; i++)
        in_delta[i] += out_delta[i];
}

/* ---- Table of layers ---- */

/* Forward and backward pass of one sample. `backward` adds to the gradient of the input, `weights` to the
 * gradients of the layer's parameters; `weights` is NULL if the layer has none. */
static const struct {
    void (*forward)(const struct layer *layer, const struct passing *passing, const real *parameters,
                    const real *in, real *out);
    void (*backward)(const struct layer *layer, const struct passing *passing, const real *parameters,
                     const real *in, const real *out_delta, real *in_delta);
    void (*weights)(const struct layer *layer, const real *in, const real *out_delta, real *gradients);
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
