/* Linear layers as GEMMs. Weights are (out, in).
 *
 *     forward   out[sample][o]      = sum over i of in[sample][i] * weight[o][i]
 *     backward  in_delta[sample][i] = sum over o of out_delta[sample][o] * weight[o][i]
 *     weights   gradient[o][i]      = sum over samples of out_delta[sample][o] * in[sample][i] */
#include "train/layer_gemm.cuh"

/* A block computes 64 x 64 sums (in fp32, with DOWN x ACROSS warps). With larger tiles, these small matrices
 * would give too few blocks. */
#define DOWN   2
#define ACROSS 1

template <class T, class Out>
static enum status forward(const struct device_layer *layer, const struct pass *pass, Out *values)
{
    const struct layer *linear = layer->layer;
    uint32_t in = (uint32_t)linear->in_values, out = (uint32_t)linear->out_values;
    const matrix<true, T> samples = {static_cast<const T *>(layer->in), in};
    const matrix<true> weights = {pass->parameters + linear->weight, in};
    const struct matrix_out<Out> into = {
        .values = values, .bias = pass->parameters + linear->bias, .stride = out, .relu = layer->relu,
        .above = nullptr
    };
    return multiply_layer<T, DOWN, ACROSS>(pass, samples, weights, into,
                                           {.rows = pass->count, .columns = out, .depth = in});
}

enum status linear_forward(const struct device_layer *layer, const struct pass *pass)
{
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        return layer->logits ? forward<T>(layer, pass, layer->logits)
                             : forward<T>(layer, pass, static_cast<T *>(layer->out));
    });
}

template <class T>
static enum status input_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *linear = layer->layer;
    uint32_t in = (uint32_t)linear->in_values, out = (uint32_t)linear->out_values;
    const matrix<true, T> deltas = {static_cast<const T *>(layer->out_delta), out};
    const matrix<false> weights = {pass->parameters + linear->weight, in};
    const struct matrix_out<T> into = {
        .values = static_cast<T *>(layer->in_delta), .bias = nullptr, .stride = in, .relu = false,
        .above = static_cast<const T *>(layer->relu_before ? layer->in : nullptr)
    };
    return multiply_layer<T, DOWN, ACROSS>(pass, deltas, weights, into,
                                           {.rows = pass->count, .columns = in, .depth = out});
}

template <class T>
static enum status weights_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *linear = layer->layer;
    uint32_t in = (uint32_t)linear->in_values, out = (uint32_t)linear->out_values;
    const matrix<false, T> deltas = {static_cast<const T *>(layer->out_delta), out},
                           samples = {static_cast<const T *>(layer->in), in};
    const struct matrix_out<float> into = {
        .values = pass->gradients + linear->weight, .stride = in
    };
    TRY(bias_backward(layer, pass));
    return multiply_layer<T, DOWN, ACROSS>(pass, deltas, samples, into,
                                           {.rows = out, .columns = in, .depth = pass->count});
}

/* The gradients of the parameters come first, because in_delta may have the memory of `in`. */
enum status linear_backward(const struct device_layer *layer, const struct pass *pass)
{
    return with_stored(pass->precision, [&](auto type) {
        typedef decltype(type) T;
        if (pass->of & GRADIENTS_OF_WEIGHTS)
            TRY(weights_backward<T>(layer, pass));
        return layer->in_delta && pass->of & GRADIENTS_OF_INPUTS ? input_backward<T>(layer, pass) : STATUS_OK;
    });
}
