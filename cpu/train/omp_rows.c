/* `train-omp`: the blocks whose data are rows: linear layers, and the blocks of transformers. A block of a
 * transformer stores its tokens as rows, `tokens` of them per sample. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "omp_net.h"

#define PART 64 /* columns of a gradient that one thread adds up at a time */

/* ---- Linear layers: all threads share the gemms of a layer over the whole batch ---- */

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

/* ---- Blocks of transformers: all samples of a batch together, token by token ---- */

/* Returns a row of the current samples in an array like block->rows or block->deltas. */
static float *row_of(const struct net *net, const struct block *block, float *rows, size_t row)
{
    return rows + ((size_t)net->begin * block->tokens + row) * block->out_pitch;
}

/* Returns the moments of a row of a LAYER_NORM. */
static float *moments_of(const struct net *net, const struct block *block, size_t row)
{
    return block->moments + 2 * ((size_t)net->begin * block->tokens + row);
}

/* Copies a row to `to`, or, if `adds` is true, adds it. */
static void give_row(const struct net *net, const float *from, float *to, size_t count, bool adds)
{
    if (adds)
        net->kernel->add(from, to, count);
    else
        memcpy(to, from, count * sizeof *to);
}

/* ---- The class token and the positions ---- */

static void tokens_forward(const struct net *net, const struct block *block)
{
    const float *positions = net->parameters + block->weight, *first = net->parameters + block->bias;
    const size_t width = block->row_values;
#pragma omp for nowait
    for (size_t row = 0; row < net->count * (size_t)block->tokens; row++) {
        size_t token = row % block->tokens, sample = row / block->tokens;
        float *out = row_of(net, block, block->rows, row);
        memcpy(out,
               token ? row_of(net, block - 1, block[-1].rows, sample * block[-1].tokens + token - 1) : first,
               width * sizeof *out);
        net->kernel->add(positions + token * width, out, width);
    }
}

static void tokens_backward(const struct net *net, const struct block *block)
{
    float *positions = net->gradients + block->weight, *first = net->gradients + block->bias;
    const size_t width = block->row_values;
#pragma omp for nowait
    for (size_t token = 0; token < block->tokens; token++) {
        float *sums = positions + token * width;
        if (!net->adds)
            memset(sums, 0, width * sizeof *sums);
        for (size_t sample = 0; sample < net->count; sample++) {
            const float *deltas = row_of(net, block, block->deltas, sample * block->tokens + token);
            net->kernel->add(deltas, sums, width);
            if (token > 0)
                give_row(net, deltas,
                         row_of(net, block - 1, block[-1].deltas, sample * block[-1].tokens + token - 1),
                         width, net_adds_to(block, block - 1));
        }
        if (token == 0)
            memcpy(first, sums, width * sizeof *first);
    }
}

/* ---- Layer normalisation ---- */

static void norm_forward(const struct net *net, const struct block *block)
{
#pragma omp for nowait
    for (size_t row = 0; row < net->count * (size_t)block->tokens; row++)
        net->kernel->norm(row_of(net, block - 1, block[-1].rows, row), net->parameters + block->weight,
                          net->parameters + block->bias, row_of(net, block, block->rows, row),
                          block->row_values, moments_of(net, block, row));
}

/* Adds up the gradients of the parameters in columns first .. first + count - 1. */
static void norm_weights(const struct net *net, const struct block *block, size_t first, size_t count)
{
    float *weights = net->gradients + block->weight + first, *biases = net->gradients + block->bias + first;
    if (!net->adds) {
        memset(weights, 0, count * sizeof *weights);
        memset(biases, 0, count * sizeof *biases);
    }
    for (size_t row = 0; row < net->count * (size_t)block->tokens; row++)
        net->kernel->norm_weights(row_of(net, block - 1, block[-1].rows, row) + first,
                                  moments_of(net, block, row), row_of(net, block, block->deltas, row) + first,
                                  weights, biases, count);
}

static void norm_backward(const struct net *net, const struct block *block)
{
    const size_t width = block->row_values;
    const bool adds = net_adds_to(block, block - 1);
#pragma omp for nowait
    for (size_t first = 0; first < width; first += PART)
        norm_weights(net, block, first, width - first < PART ? width - first : PART);
#pragma omp for nowait
    for (size_t row = 0; row < net->count * (size_t)block->tokens; row++)
        net->kernel->norm_backward(row_of(net, block - 1, block[-1].rows, row), moments_of(net, block, row),
                                   net->parameters + block->weight, row_of(net, block, block->deltas, row),
                                   row_of(net, block - 1, block[-1].deltas, row), width, adds);
}

/* ---- Attention: one thread computes one head of one sample ---- */

/* A head of a sample, and the scratch memory of the thread that computes it. */
struct part {
    const struct net *net;
    const struct block *block;
    const struct head *head;
    size_t row, column; /* of the head's first value in the output */
};

/* Copies one of q (0), k (1) and v (2) of a head to `to`. */
static void take_part(const struct part *part, size_t which, float *to)
{
    const struct block *block = part->block, *in = block - 1;
    for (size_t token = 0; token < block->tokens; token++)
        memcpy(to + token * block->depth_pitch,
               row_of(part->net, in, in->rows, part->row + token) + which * block->row_values + part->column,
               block->depth * sizeof *to);
}

/* Writes the head's result to its columns of the rows of `block`, from column `first` on. */
static void give_part(const struct part *part, const struct block *block, float *rows, size_t first,
                      bool adds)
{
    for (size_t token = 0; token < part->block->tokens; token++)
        give_row(part->net, part->head->result + token * part->block->depth_pitch,
                 row_of(part->net, block, rows, part->row + token) + first + part->column, part->block->depth,
                 adds);
}

/* scores = a b^T, for tokens of a head. `room` has space for b^T. */
static void multiply_tokens(const struct part *part, const float *a, const float *b, float *room,
                            float *scores)
{
    const struct block *block = part->block;
    part->net->kernel->transpose(b, block->depth_pitch, block->tokens, block->depth, room,
                                 block->score_pitch);
    const struct gemm gemm = {.a = a,
                              .rows = block->depth_rows,
                              .steps = part->net->iota,
                              .row_count = block->tokens,
                              .step_count = block->depth,
                              .b = room,
                              .b_pitch = block->score_pitch,
                              .c = scores,
                              .c_pitch = block->score_pitch,
                              .columns = block->score_pitch};
    part->net->gemm.multiply(&gemm, 0, part->net->gemm.tiles(&gemm));
}

/* result = scores b or, if `transposed`, scores^T b. */
static void multiply_scores(const struct part *part, const float *scores, bool transposed, const float *b)
{
    const struct block *block = part->block;
    const struct gemm gemm = {.a = scores,
                              .rows = transposed ? part->net->iota : block->score_rows,
                              .steps = transposed ? block->score_rows : part->net->iota,
                              .row_count = block->tokens,
                              .step_count = block->tokens,
                              .b = b,
                              .b_pitch = block->depth_pitch,
                              .c = part->head->result,
                              .c_pitch = block->depth_pitch,
                              .columns = block->depth_pitch};
    part->net->gemm.multiply(&gemm, 0, part->net->gemm.tiles(&gemm));
}

/* Copies q, k and v, and computes the weights of the tokens. */
static void attend(const struct part *part)
{
    const struct block *block = part->block;
    const struct head *head = part->head;
    take_part(part, 0, head->q);
    take_part(part, 1, head->k);
    take_part(part, 2, head->v);
    multiply_tokens(part, head->q, head->k, head->room, head->weights);
    for (size_t token = 0; token < block->tokens; token++)
        part->net->kernel->softmax(head->weights + token * block->score_pitch, block->tokens,
                                   1 / sqrtf((float)block->depth));
}

static void attend_backward(const struct part *part)
{
    const struct block *block = part->block, *in = block - 1;
    const struct head *head = part->head;
    const size_t width = block->row_values;
    const bool adds = net_adds_to(block, in);
    for (size_t token = 0; token < block->tokens; token++)
        memcpy(head->deltas + token * block->depth_pitch,
               row_of(part->net, block, block->deltas, part->row + token) + part->column,
               block->depth * sizeof *head->deltas);
    multiply_scores(part, head->weights, true, head->deltas);
    give_part(part, in, in->deltas, 2 * width, adds);
    multiply_tokens(part, head->deltas, head->v, head->room, head->scores);
    for (size_t token = 0; token < block->tokens; token++)
        part->net->kernel->softmax_backward(head->weights + token * block->score_pitch,
                                            head->scores + token * block->score_pitch, block->tokens,
                                            1 / sqrtf((float)block->depth));
    multiply_scores(part, head->scores, false, head->k);
    give_part(part, in, in->deltas, 0, adds);
    multiply_scores(part, head->scores, true, head->q);
    give_part(part, in, in->deltas, width, adds);
}

static void attention(const struct net *net, const struct block *block, bool back)
{
    const size_t heads = block->layer->spec.heads;
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < net->count * heads; i++) {
        const struct part part = {net, block, &net->workers[omp_get_thread_num()].head,
                                  i / heads * block->tokens, i % heads * block->depth};
        attend(&part);
        if (back) {
            attend_backward(&part);
            continue;
        }
        multiply_scores(&part, part.head->weights, false, part.head->v);
        give_part(&part, block, block->rows, 0, false);
    }
}

/* ---- GELU, addition, selection ---- */

static void gelu(const struct net *net, const struct block *block, bool back)
{
    const struct block *in = block - 1;
#pragma omp for nowait
    for (size_t row = 0; row < net->count * (size_t)block->tokens; row++)
        if (back)
            net->kernel->gelu_backward(row_of(net, in, in->rows, row), row_of(net, block, block->deltas, row),
                                       row_of(net, in, in->deltas, row), block->row_values,
                                       net_adds_to(block, in));
        else
            net->kernel->gelu(row_of(net, in, in->rows, row), row_of(net, block, block->rows, row),
                              block->row_values);
}

static void add(const struct net *net, const struct block *block, bool back)
{
    const struct block *const inputs[] = {block - 1, block->added};
    const size_t width = block->row_values;
#pragma omp for nowait
    for (size_t row = 0; row < net->count * (size_t)block->tokens; row++)
        for (int i = 0; i < 2; i++)
            if (back)
                give_row(net, row_of(net, block, block->deltas, row),
                         row_of(net, inputs[i], inputs[i]->deltas, row), width,
                         net_adds_to(block, inputs[i]));
            else
                give_row(net, row_of(net, inputs[i], inputs[i]->rows, row),
                         row_of(net, block, block->rows, row), width, i > 0);
}

static void select_first(const struct net *net, const struct block *block, bool back)
{
    const struct block *in = block - 1;
    const size_t width = block->row_values;
    const bool adds = net_adds_to(block, in);
#pragma omp for nowait
    for (size_t j = 0; j < net->count; j++) {
        if (!back) {
            memcpy(row_of(net, block, block->rows, j), row_of(net, in, in->rows, j * in->tokens),
                   width * sizeof(float));
            continue;
        }
        float *deltas = row_of(net, in, in->deltas, j * in->tokens);
        if (!adds)
            memset(deltas, 0, in->tokens * in->out_pitch * sizeof *deltas);
        net->kernel->add(row_of(net, block, block->deltas, j), deltas, width);
    }
}

/* ---- Blocks ---- */

void net_tokens(struct net *net, const struct block *block, bool back)
{
    if (block->kind == BLOCK_TOKENS)
        (back ? tokens_backward : tokens_forward)(net, block);
    else if (block->kind == BLOCK_NORM)
        (back ? norm_backward : norm_forward)(net, block);
    else if (block->kind == BLOCK_ATTENTION)
        attention(net, block, back);
    else if (block->kind == BLOCK_GELU)
        gelu(net, block, back);
    else if (block->kind == BLOCK_ADD_ROWS)
        add(net, block, back);
    else
        select_first(net, block, back);
    barrier_wait(&net->barrier);
}

void net_drop_paths(struct net *net, const struct block *block, uint32_t epoch, bool back)
{
    const struct layer *layers = net->train->model->layers;
    float *rows = back ? block->deltas : block->rows;
#pragma omp for nowait
    for (size_t j = 0; j < net->count; j++)
        for (uint32_t i = block->after; i < block->after_end; i++) {
            const float factor =
                draw_path(net->train->seed, epoch, net->numbers[j], layers[i].number, layers[i].spec.rate);
            float *values = row_of(net, block, rows, j * block->tokens);
            for (size_t v = 0; factor != 1 && v < block->tokens * block->out_pitch; v++)
                values[v] *= factor;
        }
    barrier_wait(&net->barrier);
}
