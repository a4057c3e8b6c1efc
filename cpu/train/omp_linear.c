/* `train-omp`: linear layers. All threads share the gemms of a layer over the whole batch. */
#include <string.h>

#include "omp_net.h"

/* Parts of a GEMM per thread. There are several parts, so that other threads can help a slow thread. */
#define TILE_SHARES 4

/* Distributes the parts of a GEMM to the threads. Does not end with a barrier. */
static void multiply_by_all(const struct net *net, const struct gemm *gemm)
{
    size_t tiles = net->gemm.tiles(gemm), shares = (size_t)net->threads * TILE_SHARES;
    if (net->threads == 1 || shares > tiles)
        shares = net->threads == 1 ? 1 : tiles;
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < shares; i++) {
        size_t begin = tiles * i / shares, end = tiles * (i + 1) / shares;
        net->gemm.multiply(gemm, begin, end - begin);
    }
}

void net_linear_forward(struct net *net, const struct block *block)
{
    const struct gemm gemm = {
        .a = net_row(net, block - 1, 0),
        .rows = block[-1].row_positions,
        .steps = net->iota,
        .row_count = (size_t)net->count * block->tokens,
        .step_count = block[-1].row_values,
        .b = block->transposed,
        .b_pitch = block->out_vectors,
        .c = net_row(net, block, 0),
        .c_pitch = block->out_pitch,
        .columns = block->out_vectors,
        .bias = net->parameters + block->bias,
        .relu = block->relu,
    };
    multiply_by_all(net, &gemm);
    barrier_wait(&net->barrier);
}

/* Adds up the gradients of the biases. Does not end with a barrier. */
static void sum_rows(const struct net *net, const struct block *block, float *sums)
{
    enum { PART = 64 };
    const size_t values = block->layer->bias_values, rows = (size_t)net->count * block->tokens;
#pragma omp for nowait
    for (size_t first = 0; first < values; first += PART) {
        const size_t part = values - first < PART ? values - first : PART;
        if (!net->adds)
            memset(sums + first, 0, part * sizeof *sums);
        for (size_t row = 0; row < rows; row++)
            net->kernel->add(net_deltas(net, block, 0) + row * block->out_pitch + first, sums + first, part);
    }
}

/* Computes the gradients of weights and biases. Does not end with a barrier. */
static void linear_weights(struct net *net, const struct block *block)
{
    const struct gemm gemm = {
        .a = net_deltas(net, block, 0),
        .rows = net->iota,
        .steps = block->row_positions,
        .row_count = block->layer->bias_values,
        .step_count = (size_t)net->count * block->tokens,
        .b = net_row(net, block - 1, 0),
        .b_pitch = block->in_pitch,
        .c = net->gradients + block->weight,
        .c_pitch = block->in_pitch,
        .columns = block[-1].out_vectors,
        .add = net->adds,
    };
    multiply_by_all(net, &gemm);
    sum_rows(net, block, net->gradients + block->bias);
}

/* Computes the gradient of the input, unless the input is the samples. Does not end with a barrier. */
static void linear_inputs(struct net *net, const struct block *block)
{
    if (block - 1 == &net->blocks[net->flat] && net->flat == 1 && net_begins(net))
        return;
    const struct gemm gemm = {
        .a = net_deltas(net, block, 0),
        .rows = block->row_positions,
        .steps = net->iota,
        .row_count = (size_t)net->count * block->tokens,
        .step_count = block->layer->bias_values,
        .b = net->parameters + block->weight,
        .b_pitch = block->in_pitch,
        .c = net_deltas(net, block - 1, 0),
        .c_pitch = block->in_pitch,
        .columns = block[-1].out_vectors,
        .add = net_adds_to(block, block - 1),
    };
    multiply_by_all(net, &gemm);
}

void net_linear_backward(struct net *net, const struct block *block, enum gradients_of of)
{
    if (of & GRADIENTS_OF_WEIGHTS)
        linear_weights(net, block);
    if (of & GRADIENTS_OF_INPUTS)
        linear_inputs(net, block);
    barrier_wait(&net->barrier);
}
