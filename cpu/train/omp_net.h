/* The network of `train-omp` and `infer-omp`: its blocks and their memory. A block is a layer together with
 * the layers that are fused into it.
 *
 * Convolutions, pooling, additions and means process one sample per thread. Samples are stored position by
 * position with the channels innermost. Consecutive positions are "pitch" floats apart. The pitch is the
 * number of channels, rounded up to whole vectors; input samples may be unpadded. From block FLAT on, data
 * are rows, one per sample, in the C order that linear layers expect. ReLU and dropout run in place, in the
 * output of the block before them. The backward pass of ReLU drops the gradients of outputs that are zero.
 *
 * In a transformer, FLAT follows INPUT directly and has one row per patch; the blocks after it have one row
 * per token. */
#ifndef FDSL_CPU_TRAIN_OMP_NET_H
#define FDSL_CPU_TRAIN_OMP_NET_H

#include <pthread.h>
#include <stdatomic.h>

#include "omp_kernel.h"
#include "train/engine.h"
#include "train/feed.h"
#include "train/host_engine.h"

/* ---- A barrier for the threads of one parallel region ---- */

struct barrier {
    atomic_uint arrived, passed; /* threads that have arrived in the current round; completed rounds */
    pthread_mutex_t mutex;
    pthread_cond_t released;
};

void barrier_init(struct barrier *barrier);

/* Waits until all threads of the current parallel region have called barrier_wait(). */
void barrier_wait(struct barrier *barrier);

/* ---- The network ---- */

#define NET_BLOCKS_MAX (MODEL_LAYERS_MAX + 2)
#define NET_CHUNK      4 /* minimum samples per chunk, except the last; one thread sums a chunk's gradients */
/* Maximum number of chunks. Each chunk has its own sum. The sums are added in order, so the result does not
 * depend on the number of threads. */
#define NET_CHUNKS_MAX 64

enum block_kind {
    BLOCK_INPUT,
    BLOCK_CONV,
    BLOCK_POOL,
    BLOCK_ADD,
    BLOCK_MEAN,
    BLOCK_BATCH_NORM,
    BLOCK_FLAT, /* converts data to rows, one per sample; all later blocks of the network have rows */
    BLOCK_LINEAR,
    BLOCK_TOKENS,
    BLOCK_NORM,
    BLOCK_ATTENTION,
    BLOCK_GELU,
    BLOCK_ADD_ROWS,
    BLOCK_SELECT,
};

/* The inputs of a convolution whose gradients are sums over the same taps: with a stride of 2, those in every
 * second row and column. Their gradients are a convolution of the zero-padded output gradients. */
struct conv_phase {
    uint32_t *rows, *taps; /* offsets in the padded gradients; `taps` inside a window */
    uint32_t *inputs;      /* offsets of the inputs; NULL with stride 1: all inputs, in order */
    size_t row_count, tap_count, first_tap; /* first_tap: index of its first tap in conv->backward */
};

/* Geometry of a convolution. Offsets are in floats of the zero-padded input. */
struct conv {
    uint32_t kernel[MODEL_AXES], padding[MODEL_AXES];
    bool padded;
    struct shape around;   /* shape of the padded input */
    size_t depth;          /* number of weights per output channel; their order is (t, y, x, channel) */
    uint32_t *positions;   /* offset of each output's window */
    uint32_t *taps;        /* offset of each weight inside a window */
    float *forward;        /* weights [depth][out_pitch] */
    size_t gradient;       /* offset in a chunk's sums: gradient_count weights, then biases */
    size_t gradient_count; /* number of weights, padding included, without biases */

    /* For blocks without pooling. `wide` is the shape of the padded output gradients, which begin at
     * wide_before. `order` has the index in `backward` of each tap. */
    struct shape wide;
    uint32_t wide_before[MODEL_AXES];
    struct conv_phase *phases;
    size_t phase_count;
    uint32_t *order;

    /* For blocks with pooling. `runs` has the offsets of the vectors that cover the convolution kernel's
     * window, row by row. */
    uint32_t *runs;
    size_t run_vectors, vectors; /* vectors per row of the window; vectors per window */
    size_t band;                 /* pooling windows processed at a time; their input fits in the L1 cache */

    /* Weights for the backward pass: [taps][out channels][in_pitch]; with pooling,
     * [out channels][vectors * lanes]. */
    float *backward;
};

struct block {
    enum block_kind kind;
    const struct layer *layer; /* NULL for INPUT and FLAT */
    const struct layer *pool;  /* the max-pooling that is fused into a convolution, or NULL */
    bool relu;                 /* ReLU directly after the layer, before `pool` */
    uint32_t after, after_end; /* range of layers that run in place in the block's output */
    bool is_added;             /* a later ADD uses the block's output */
    const struct block *from;  /* the block whose output is the input; NULL for INPUT */
    const struct block *added; /* ADD only: the earlier block */
    size_t kept_delta;         /* CONV only: offset in a sample's part of net->kept_deltas */
    size_t held;               /* ADD only: offset in worker->held of the gradients for the earlier block */

    /* Shapes of input and output. From FLAT on, blocks have one position, and the pitch is the distance
     * between two rows in floats. */
    struct shape in, out;
    size_t in_pitch, out_pitch;
    size_t positions;      /* number of output positions */
    size_t values, argmax; /* offsets of the block's data in the `kept` and `argmax` of a sample */
    struct pool pooling;
    struct conv conv;

    /* From FLAT on. `rows`, `deltas`: batch * tokens * out_pitch floats each. `transposed`: LINEAR weights as
     * [inputs][out_vectors]. `row_positions`: offsets of the rows of a batch, in floats. */
    float *rows, *deltas, *transposed;
    uint32_t *row_positions;
    size_t weight, bias; /* offsets in the net's arenas; LINEAR weights have rows of in_pitch floats */
    size_t out_vectors;  /* row_values, rounded up to whole vectors, in floats */
    uint32_t tokens;     /* rows per sample; 1 except in transformers */
    size_t row_values;   /* values of a row, without padding */

    /* Transformers, and networks that run layer by layer, in which blocks before FLAT also have `deltas`:
     * batch * positions * out_pitch floats. Blocks share the memory of `deltas`. */
    const struct block *writer; /* the block that first writes this block's `deltas`; others add to them */
    float *moments;             /* NORM: two per row. BATCH_NORM: CHANNEL_VALUES arrays of out_pitch floats */
    size_t mean, variance;      /* BATCH_NORM: offsets of the running statistics in the net's arenas */
    size_t band, bands;         /* BATCH_NORM: positions whose sums are floats, and their number per sample */
    /* ATTENTION: width of a head; pitches of its tokens and of its scores, and the offsets of their rows. */
    size_t depth, depth_pitch, score_pitch;
    uint32_t *depth_rows, *score_rows;
};

/* Values of a BATCH_NORM per channel: output = (input - mean) * scale + shift. The gradient of the input is
 * scale * (gradient - fall - (input - mean) * slope). */
enum channel_values {
    CHANNEL_MEAN,
    CHANNEL_INVERSE, /* 1 / sqrt(variance + epsilon) */
    CHANNEL_SCALE,
    CHANNEL_SHIFT,
    CHANNEL_FALL,
    CHANNEL_SLOPE,
    CHANNEL_VALUES
};

/* Scratch memory for one head of one sample: its tokens, b^T for a GEMM, and two matrices of scores. */
struct head {
    float *q, *k, *v, *deltas, *result, *room, *weights, *scores;
};

/* Scratch memory of one thread. `sample`: the gathered sample. `partner`: the sample that is mixed into it,
 * or NULL. `around`: a padded input. `plain`: an output before pooling. `wide`: padded gradients. `strided`:
 * gradients of a conv_phase's inputs. `deltas`: gradients of a block's output and input. `held`: gradients
 * that wait for an earlier block. */
struct worker {
    float *sample, *partner, *around, *plain, *wide, *strided, *deltas[2], *held;
    uint32_t *list_positions, *list_counts;
    float *list_deltas;
    struct head head;
    double data_s;
};

#define NET_PART ((size_t)16384) /* parameters that one thread updates at a time */

/* A part of the net's arenas that is updated in one way. If tensors differ (train_needs_tensors()), a span is
 * one tensor: `rows` rows of `columns` values, `pitch` values apart, with zeros between them. */
struct span {
    size_t first, count, rows, columns, pitch;
    struct tensor_update how;
    bool head;   /* of the last layer */
    float trust; /* update.trust of the step */
};

struct net {
    const struct train *train;
    const struct net_kernel *kernel;
    struct gemm_kernels gemm;
    int threads;
    uint32_t batch; /* capacity in samples: maximum per part of a step (train_part()) or, in a pipeline,
                       maximum kept at a time */
    uint32_t most;  /* maximum samples processed together: `batch` or, in a pipeline, a micro-batch */
    struct block blocks[NET_BLOCKS_MAX];
    uint32_t block_count, flat; /* `flat`: index of block FLAT */
    /* The batch passes through the blocks before FLAT together, block by block, instead of sample by sample:
     * for LAYER_BATCH_NORM, and if a layer has `skipped`. */
    bool by_layer;
    /* Only with by_layer. `arounds`: the padded inputs of a batch for the gradients of weights, around_values
     * per sample. `partial`: sums of a BATCH_NORM, partial_values per sample. */
    float *arounds, *partial;
    size_t around_values, partial_values;
    float *shared;          /* values that the ranks add up (exchange_part_sum()) */
    uint32_t *step_numbers; /* numbers of this rank's samples of a step, and of their partners */
    uint32_t *numbers;      /* numbers of the batch: a part of step_numbers */
    uint32_t *iota;         /* 0, 1, 2, ... */

    /* Arenas of parameters. Tensors and rows of LINEAR weights are padded to whole vectors with zeros. */
    size_t arena_values, trained_values; /* running statistics begin at trained_values */
    float *parameters, *gradients, *m, *v;
    float *ema;      /* moving average of the parameters; NULL: none */
    double *squares; /* sums of squares of NET_PART gradients each, to clip them; NULL: not clipped */
    /* Unless train_needs_tensors(), these are NULL. `adjusted`: gradients as they enter the rule. `muon`:
     * room for two squares and a matrix. */
    float *adjusted, *muon;
    struct span spans[2 * NET_BLOCKS_MAX]; /* all of an arena */
    uint32_t span_count;
    float *common; /* room for an arena in the layout of model.h; NULL: the exchange does not need it */

    /* Data kept per sample for the backward pass. `draws`: random bytes of dropout layers. */
    size_t kept_values, kept_argmax, kept_draws;
    /* Number of values per sample in worker->held: gradients for the earlier blocks that ADD blocks use. They
     * are kept there until the backward pass reaches those blocks. */
    size_t held_values;
    size_t draws_of[MODEL_LAYERS_MAX];
    float *kept;
    uint32_t *argmax;
    uint8_t *draws;

    /* The gradients of the convolutions' outputs, per sample. Only for pipelines that compute the gradients
     * of inputs and those of weights separately; otherwise NULL. */
    size_t kept_delta_values;
    float *kept_deltas;

    /* Sums of convolution gradients, one row per chunk. */
    size_t chunk_values;
    uint32_t chunks; /* maximum number of chunks */
    float *sums;

    struct feed feed;
    struct worker *workers;
    struct barrier barrier;
    uint32_t begin;        /* index in the batch of the current micro-batch's first sample; otherwise 0 */
    uint32_t fed;          /* index in step_numbers of the batch's first sample */
    const float *inputs;   /* input of the current micro-batch in C order; NULL: gather samples */
    float *in_deltas;      /* receives the gradient of `inputs`; NULL: not needed */
    bool accumulates;      /* a step has several micro-batches or parts */
    bool adds;             /* gradients of weights are added to those of earlier micro-batches or parts */
    uint32_t count;        /* samples of this rank in the current batch, or of the current micro-batch */
    uint32_t step_count;   /* samples in step_numbers, without their partners */
    uint32_t total;        /* samples of the whole step, on all ranks */
    struct mix mix;        /* of the current step */
    enum status exchanged; /* status of the latest exchange of gradients */
    double *losses;        /* loss of each sample of the batch */
    uint8_t *correct;      /* whether each sample was classified correctly */
    struct train_totals totals;
    struct published published; /* copy of `totals` after the latest step, for progress() */

    void **held; /* all allocations */
    uint32_t held_count;
    bool out_of_memory;
    enum status refused; /* of memory_take() */
    uint64_t bytes;
    enum memory_part part; /* of the next allocations */
};

static inline size_t positions_of(const struct shape *shape)
{
    return (size_t)shape->depth * shape->height * shape->width;
}

/* Returns whether the input of the network (or of its stage) is the samples. Samples need no gradient. */
static inline bool net_begins(const struct net *net)
{
    return !net->train->stage || net->train->stage->first;
}

/* A sample that passes through the network. */
struct passing {
    uint32_t index; /* index in the batch */
    uint32_t sample, epoch;
    enum data_part part;
    bool training;
};

/* Returns whether the block must add to the gradient of `target`, because an ADD has already written it. */
static inline bool net_adds_to(const struct block *block, const struct block *target)
{
    return target->writer && target->writer != block;
}

/* net_row() returns the first row of current sample `j` in a block; net_deltas() returns the gradient of this
 * row. */
static inline float *net_row(const struct net *net, const struct block *block, uint32_t j)
{
    return block->rows + (net->begin + j) * block->tokens * block->out_pitch;
}

static inline float *net_deltas(const struct net *net, const struct block *block, uint32_t j)
{
    return block->deltas + (net->begin + j) * block->tokens * block->out_pitch;
}

/* Describes current sample `j`. */
static inline struct passing net_passing(const struct net *net, uint32_t j, uint32_t epoch,
                                         enum data_part part, bool training)
{
    return (struct passing){net->begin + j, net->numbers[j], epoch, part, training};
}

/* Returns what a block before FLAT keeps for current sample `j`: its output. */
static inline float *net_values(const struct net *net, const struct block *block, uint32_t j)
{
    return net->kept + (net->begin + j) * net->kept_values + block->values;
}

/* Returns the gradients of the output of a block before FLAT, with net->by_layer. */
static inline float *net_layer_deltas(const struct block *block, uint32_t j)
{
    return block->deltas + j * block->positions * block->out_pitch;
}

/* ---- omp_plan.c ---- */

/* Creates the blocks and allocates memory for net->train. STATUS_EXHAUSTED if memory runs out,
 * STATUS_UNAVAILABLE if the order of the layers is not supported, STATUS_USAGE if the batch is too large. The
 * caller calls net_free(), even after a failure. */
enum status net_plan(struct net *net);
void net_free(struct net *net);

/* Copy an arena (parameters, gradients or moments) from the layout of model.h to the layout of `net`, and
 * back. */
void net_take_arena(const struct net *net, const float *from, float *into);
void net_give_arena(const struct net *net, const float *from, float *into);

/* ---- Parameters: called by all threads of a parallel region ---- */

/* Copies weights into the layouts that the GEMMs use. Call it after every change of the parameters. Ends with
 * a barrier. */
void net_prepare_weights(struct net *net);

/* Clears the sums of all chunks, for the first micro-batch or part of a step. Does not end with a barrier. */
void net_clear_sums(struct net *net);

/* Adds up the sums of the first `chunks` chunks and writes the result to the gradients. Ends with a barrier.
 */
void net_gather_sums(struct net *net, uint32_t chunks);

/* Applies the update of step `number` to all parameters. Ends with a barrier. */
void net_update(struct net *net, uint64_t number);

/* ---- omp_rows.c: called by all threads of a parallel region; each ends with a barrier ---- */

void net_linear_forward(struct net *net, const struct block *block);
void net_linear_backward(struct net *net, const struct block *block, enum gradients_of of);

void net_tokens(struct net *net, const struct block *block, bool back);

/* Applies stochastic depth after a block, forward or backward. */
void net_drop_paths(struct net *net, const struct block *block, uint32_t epoch, bool back);

/* ---- Blocks before FLAT, sample by sample ---- */

/* Apply the in-place ReLU and dropout layers of a block, forward and backward. net_after_backward() also
 * applies the ReLU that is fused into the block. `values` is the block's output for one sample. */
void net_after(const struct net *net, const struct block *block, const struct passing *passing,
               float *values);
void net_after_backward(const struct net *net, const struct block *block, const struct passing *passing,
                        const float *values, float *deltas);

/* Gathers a sample and runs its forward pass through all blocks up to FLAT. */
void net_sample_forward(const struct net *net, struct worker *worker, const struct passing *passing);

/* Runs the backward pass of one sample from FLAT to the first block. Adds the sample's gradients to the sums
 * of its chunk. With GRADIENTS_OF_INPUTS, keeps the gradients that a later call with GRADIENTS_OF_WEIGHTS
 * needs. */
void net_sample_backward(const struct net *net, struct worker *worker, const struct passing *passing,
                         enum gradients_of of, float *sums);

/* ---- Blocks before FLAT, layer by layer: called by all threads of a parallel region; each ends with a
 * barrier ---- */

/* Run the blocks up to FLAT of a net with by_layer. net_layers_idle() is for a rank without samples in a
 * step whose normalisations add up their sums over all ranks. */
void net_layers_forward(struct net *net, uint32_t epoch, enum data_part part, bool training);
void net_layers_backward(struct net *net, uint32_t epoch);
void net_layers_idle(struct net *net);

/* With train.sync_batch_norm: passes the failure of this rank to all ranks, which wait in the first sum of a
 * step. Only the thread that called the engine may call it. */
enum status net_layers_fail(struct net *net, enum status status);

#endif
