/* Inside `train-omp` and `infer-omp`: a network as blocks, and the memory that they work in.
 *
 * Convolutions, pooling, additions and means go sample by sample, a thread each, in samples that lie place by
 * place with all channels of a place together ("pitch" floats from place to place: the channels in whole
 * vectors, but for the samples themselves). From the block FLAT on there are rows, one a sample, in the C
 * order that linear layers know. ReLU and dropout work in place, in the output of the block before them: what
 * they left tells which gradients go back. */
#ifndef FDSL_CPU_TRAIN_OMP_NET_H
#define FDSL_CPU_TRAIN_OMP_NET_H

#include "omp_barrier.h"
#include "omp_engine.h"
#include "omp_kernel.h"
#include "train/engine.h"
#include "train/feed.h"
#include "train/published.h"

#define NET_BLOCKS_MAX (MODEL_LAYERS_MAX + 2)
#define NET_CHUNK      4 /* samples at least whose convolutions' gradients are summed by one thread */
#define NET_CHUNKS_MAX                                                                   \
    64 /* so many sums at most, added in their order: the same for any number of threads \
        */

enum block_kind { BLOCK_INPUT, BLOCK_CONV, BLOCK_POOL, BLOCK_ADD, BLOCK_MEAN, BLOCK_FLAT, BLOCK_LINEAR };

/* A convolution's geometry, in floats of its input with the zeros around it. */
struct conv {
    uint32_t kernel[MODEL_AXES], padding[MODEL_AXES];
    bool padded;
    struct shape around;   /* the input with its zeros */
    size_t depth;          /* weights of an output channel, ordered (t, y, x, channel) */
    uint32_t *places;      /* of every output */
    uint32_t *taps;        /* of every weight */
    float *forward;        /* weights [depth][out_pitch] */
    size_t gradient;       /* where [weights][out_pitch of biases] begin in a chunk's sums */
    size_t gradient_count; /* of the weights alone */

    /* Backward, where no pooling follows: a convolution of the gradients with zeros around them. */
    struct shape wide;
    uint32_t *back_places, *back_taps;

    /* Backward from peaks: the kernel's window, in vectors along its rows. */
    uint32_t *runs;
    size_t run_vectors, vectors; /* of a row, of the window */
    size_t band;                 /* windows of pooling whose input stays in the first-level cache */

    float *backward; /* weights, [taps][out channels][in_pitch] or [out channel][vectors] */
};

struct block {
    enum block_kind kind;
    const struct layer *layer; /* of all but INPUT and FLAT */
    const struct layer *pool;  /* the max-pooling that belongs to a convolution, or NULL */
    bool relu;                 /* right behind the layer, before `pool` */
    uint32_t after, after_end; /* these layers work in its output */
    bool is_added;             /* what they leave is taken by some ADD behind */
    const struct block *added; /* of ADD: the earlier block, */
    size_t held;               /* and where worker->held keeps what it shall get back */

    /* What comes in and goes out. FLAT and LINEAR: of one place, and the pitch is that of rows. */
    struct shape in, out;
    size_t in_pitch, out_pitch;
    size_t places;        /* of the output */
    size_t values, peaks; /* where these begin in what is kept of a sample */
    struct pool pooling;
    struct conv conv;

    /* Rows: batch * out_pitch; what the rows of a batch are, in floats. LINEAR: weights [in][out_vectors]. */
    float *rows, *deltas, *turned;
    uint32_t *row_places;
    size_t weight, bias; /* in the net's arenas: of LINEAR rows of in_pitch */
    size_t out_vectors;
};

/* The room of a thread. */
struct worker {
    float *sample, *around, *plain, *wide, *deltas[2], *held;
    uint32_t *list_places, *list_counts;
    float *list_deltas;
    double data_s;
};

struct net {
    const struct train *train;
    const struct net_kernel *kernel;
    struct multiplier by;
    int threads;
    uint32_t batch; /* samples that there is room for */
    struct block blocks[NET_BLOCKS_MAX];
    uint32_t block_count, flat; /* `flat`: the block FLAT */
    uint32_t *numbers;          /* of the samples; 0, 1, 2, ... */
    uint32_t *iota;

    /* Of parameters; biases and rows of weights in whole vectors, zeros behind them. */
    size_t arena_values;
    float *parameters, *gradients, *first, *second;

    /* Kept of every sample; draws: the random bytes of a layer's dropout. */
    size_t kept_values, kept_peaks, kept_draws;
    size_t held_values; /* of a sample's way back: gradients that wait for the block they go to */
    size_t draws_of[MODEL_LAYERS_MAX];
    float *kept;
    uint32_t *peaks;
    uint8_t *draws;

    /* Sums of gradients of convolutions, a row a chunk. */
    size_t chunk_values;
    uint32_t chunks; /* at most */
    float *sums;

    struct feed feed;
    struct worker *workers;
    struct barrier barrier;
    uint32_t count;   /* samples of the batch in work */
    double *losses;   /* of the batch's samples */
    uint8_t *correct; /* whether they were */
    struct train_totals totals;
    struct published published; /* what `totals` were after the latest step */

    void **held; /* all memory */
    uint32_t held_count, held_room;
    bool out_of_memory;
    uint64_t bytes;
};

/* A sample on its way. */
struct passing {
    uint32_t place; /* in the batch */
    uint32_t sample, epoch;
    enum data_part part;
    bool training;
};

/* ---- omp_plan.c ---- */

/* Makes blocks and memory for `net->train`. STATUS_FAILED where memory is out; the caller calls net_free()
 * then, too. */
enum status net_plan(struct net *net);
void net_free(struct net *net);

/* Parameters (or what else is one a parameter) from the arena of model.h into the net's, and back. */
void net_take_arena(const struct net *net, const float *from, float *into);
void net_give_arena(const struct net *net, const float *from, float *into);

/* ---- By all threads of a parallel region together, which have met at the end ---- */

/* Lays weights out as the products want them; after every change of the parameters. */
void net_prepare_weights(struct net *net);

/* Adds the first `chunks` sums and puts them into the gradients. */
void net_gather_sums(struct net *net, uint32_t chunks);

/* ---- omp_sample.c ---- */

/* ReLU and dropout behind a block, and back. `values` are what the block made for a sample. */
void net_after(const struct net *net, const struct block *block, const struct passing *passing,
               float *values);
void net_after_backward(const struct net *net, const struct block *block, const struct passing *passing,
                        const float *values, float *deltas);

/* A sample from the set through all blocks up to FLAT. */
void net_sample_forward(const struct net *net, struct worker *worker, const struct passing *passing);

/* And back: its gradients are added to a chunk's sums. */
void net_sample_backward(const struct net *net, struct worker *worker, const struct passing *passing,
                         float *sums);

#endif
