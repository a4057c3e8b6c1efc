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
};

/* ---- Convolution: stride 1, zero padding ---- */

/* The range of outputs along one axis, begin <= i < end, for which a kernel tap reads inside the input. */
struct reach {
    int64_t begin, end, shift; /* output i reads input i + shift */
};

static struct reach reach(const struct layer *layer, int axis, uint32_t offset, uint32_t in, uint32_t out)
{
    int64_t shift = (int64_t)offset - layer->spec.padding[axis];
    int64_t begin = shift < 0 ? -shift : 0, end = (int64_t)in - shift;
    return (struct reach){begin, end < out ? end : out, shift};
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
            const real *from = in + row_at(&layer->in, c, t + tap->depth.shift, y + tap->height.shift);
            real *to = out + row_at(&layer->out, o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                to[x] += weight * from[x + tap->width.shift];
        }
}

/* Returns the gradient of one weight. */
static real tap_weight(const struct layer *layer, const struct tap *tap, uint32_t o, uint32_t c,
                       const real *in, const real *out_delta)
{
    double sum = 0; /* double, because rounding errors of a long float sum would accumulate over the steps */
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *from = in + row_at(&layer->in, c, t + tap->depth.shift, y + tap->height.shift);
            const real *delta = out_delta + row_at(&layer->out, o, t, y);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                sum += (double)delta[x] * from[x + tap->width.shift];
        }
    return (real)sum;
}

static void tap_backward(const struct layer *layer, const struct tap *tap, uint32_t o, uint32_t c,
                         real weight, const real *out_delta, real *in_delta)
{
    for (int64_t t = tap->depth.begin; t < tap->depth.end; t++)
        for (int64_t y = tap->height.begin; y < tap->height.end; y++) {
            const real *delta = out_delta + row_at(&layer->out, o, t, y);
            real *to = in_delta + row_at(&layer->in, c, t + tap->depth.shift, y + tap->height.shift);
            for (int64_t x = tap->width.begin; x < tap->width.end; x++)
                to[x + tap->width.shift] += weight * delta[x];
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
    for (size_t i = 0; i < layer->out_values; i++)
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

/* Returns the index of the input element that pooling copies to output `at`: the maximum of the output's
 * window. */
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

#include "train/naive_tokens.h"

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
