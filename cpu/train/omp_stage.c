/* `train-omp` as a stage of a pipeline (struct stage_functions). Each micro-batch has its own rows in the
 * arrays of the batch, from net->begin on. Each chunk's sums of gradients accumulate over all micro-batches
 * of a step. */
#include <string.h>

#include "omp_net.h"

/* Makes `micro` the current samples. */
static void choose(struct net *net, const struct micro *micro)
{
    net->begin = micro->slot * net->most;
    net->count = net->step_count = micro->count;
    net->total = micro->total;
    net->adds = micro->index > 0;
    memcpy(net->numbers, micro->numbers, micro->count * sizeof *net->numbers);
}

/* take_rows() copies an array in C order into the current rows of `rows`, an array like block->rows.
 * give_rows() copies the current rows into an array in C order. */
static void take_rows(const struct net *net, const struct block *block, const float *from, float *rows)
{
    const size_t values = shape_values(&block->out);
#pragma omp for nowait
    for (uint32_t j = 0; j < net->count; j++)
        memcpy(rows + (net->begin + j) * block->out_pitch, from + j * values, values * sizeof *rows);
}

static void give_rows(const struct net *net, const struct block *block, const float *rows, float *into)
{
    const size_t values = shape_values(&block->out);
#pragma omp for nowait
    for (uint32_t j = 0; j < net->count; j++)
        memcpy(into + j * values, rows + (net->begin + j) * block->out_pitch, values * sizeof *into);
}

static enum status stage_forward(void *state, const struct micro *micro, const float *inputs, float *outputs)
{
    struct net *net = state;
    const struct block *last = &net->blocks[net->block_count - 1];
    choose(net, micro);
    net->inputs = inputs;
    if (!inputs && micro->training)
        TRY(feed_step(&net->feed, micro->epoch, micro->numbers, micro->count));
#pragma omp parallel num_threads(net->threads)
    {
        net_forward(net, micro->epoch, micro->part, micro->training);
        if (outputs)
            give_rows(net, last, last->rows, outputs);
        else
            net_take_losses(net, micro->step);
    }
    return STATUS_OK;
}

static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of of,
                                  const float *deltas, float *in_deltas)
{
    struct net *net = state;
    const struct block *last = &net->blocks[net->block_count - 1], *flat = &net->blocks[net->flat];
    choose(net, micro);
    net->in_deltas = in_deltas;
#pragma omp parallel num_threads(net->threads)
    {
        if (deltas)
            take_rows(net, last, deltas, last->deltas);
        if (!net->adds && of & GRADIENTS_OF_WEIGHTS)
            net_clear_sums(net);
        barrier_wait(&net->barrier);
        net_backward(net, micro->epoch, of);
        if (in_deltas && net->flat == 1) /* with blocks before FLAT, net_backward() writes in_deltas */
            give_rows(net, flat, flat->deltas, in_deltas);
    }
    return STATUS_OK;
}

static enum status stage_update(void *state, uint64_t step)
{
    struct net *net = state;
#pragma omp parallel num_threads(net->threads)
    {
        if (net->flat > 1)
            net_gather_sums(net, net->chunks);
        net_update(net, step);
    }
    return STATUS_OK;
}

const struct stage_functions net_stages = {
    .live = true, .forward = stage_forward, .backward = stage_backward, .update = stage_update};
