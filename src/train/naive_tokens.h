/* The layers of transformers in naive.c. Included by naive_layers.h, whose rules apply. Tokens are rows of
 * `width` values. */
#ifndef FDSL_TRAIN_NAIVE_TOKENS_H
#define FDSL_TRAIN_NAIVE_TOKENS_H

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

#endif
