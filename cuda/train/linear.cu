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

enum status linear_forward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *linear = layer->layer;
    uint32_t in = (uint32_t)linear->in_values, out = (uint32_t)linear->out_values;
    const matrix<true> samples = {layer->in, in}, weights = {pass->parameters + linear->weight, in};
    const struct matrix_out into = {
        .values = layer->out, .bias = pass->parameters + linear->bias, .stride = out, .relu = layer->relu};
    return multiply_layer<DOWN, ACROSS>(pass, samples, weights, into,
                                        {.rows = pass->count, .columns = out, .depth = in});
}

static enum status input_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *linear = layer->layer;
    uint32_t in = (uint32_t)linear->in_values, out = (uint32_t)linear->out_values;
    const matrix<true> deltas = {layer->out_delta, out};
    const matrix<false> weights = {pass->parameters + linear->weight, in};
    const struct matrix_out into = {
        .values = layer->in_delta, .stride = in, .above = layer->relu_before ? layer->in : nullptr};
    return multiply_layer<DOWN, ACROSS>(pass, deltas, weights, into,
                                        {.rows = pass->count, .columns = in, .depth = out});
}

static enum status weights_backward(const struct device_layer *layer, const struct pass *pass)
{
    const struct layer *linear = layer->layer;
    uint32_t in = (uint32_t)linear->in_values, out = (uint32_t)linear->out_values;
    const matrix<false> deltas = {layer->out_delta, out}, samples = {layer->in, in};
    const struct matrix_out into = {.values = pass->gradients + linear->weight, .stride = in};
    TRY(bias_backward(layer, pass));
    return multiply_layer<DOWN, ACROSS>(pass, deltas, samples, into,
                                        {.rows = out, .columns = in, .depth = pass->count});
}

enum status linear_backward(const struct device_layer *layer, const struct pass *pass)
{
    if (pass->of & GRADIENTS_OF_WEIGHTS)
        TRY(weights_backward(layer, pass));
    return layer->in_delta && pass->of & GRADIENTS_OF_INPUTS ? input_backward(layer, pass) : STATUS_OK;
}
