/* An engine is one implementation of training and inference. It knows nothing of files, options or CSV rows;
 * the trainer (trainer.h) handles them. All engines compute the same steps, up to rounding; an engine that
 * scales the loss also skips steps that overflow (struct loss_scale).
 *
 * Step i of epoch e takes the samples at indices i * n to (i + 1) * n - 1 of the epoch's permutation
 * (train_order()), where n is batch / augment.repeats. Each sample occurs in the step augment.repeats times,
 * as different copies (train_pick()). The last batch of an epoch may be short, or is left out (drop_last).
 * Samples come from any source (enum data_feed). A sample that a stream cannot read (DATA_MASKED) keeps its
 * place in the step, but has weight 0: it changes neither loss nor gradients, and is not counted. Each sample
 * is augmented (augment.h), shifted and flipped (draw_move), normalised (data.h), erased (box_erase), mixed
 * with another one (struct mix), and passed forward with dropout (draw_dropout). The loss is softmax
 * cross-entropy, -sum t log p for probabilities p and the target t (loss.h), or the mean of
 * loss_binary_class() over the classes. Gradients are those of the mean loss of the batch. If their norm is
 * too large, optimizer_clip() scales them down. optimizer_apply() then updates every parameter; it counts
 * steps over all epochs. optimizer_average() updates the moving average of the parameters, if there is one.
 *
 * Several ranks divide the batch of each step, equally or by other shares (train_share()). Each rank computes
 * the gradients of its own samples, and an exchange adds up the gradients of all ranks before the update.
 * Each rank divides its gradients by the number of samples of the whole step, so the sums are the gradients
 * of the mean loss of the whole step. A rank may compute its samples in parts (train_part()). */
#ifndef FDSL_TRAIN_ENGINE_H
#define FDSL_TRAIN_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "core/parallel.h"
#include "core/portable.h"
#include "core/roofline.h"
#include "core/status.h"
#include "core/variant.h"
#include "data/random_boxes.h"
#include "data/random_draws.h"
#include "train/data.h"
#include "train/exchange.h"
#include "train/given.h"
#include "train/loss.h"
#include "train/model.h"
#include "train/optimizer.h"

/* ---- The memory of a training run ---- */

/* The memory of a training run: what an engine allocates, by parts, and limits per rank (--memory-limit).
 *
 * An engine adds up what open() allocates in train->memory, if that is not NULL. With `plans` set, open()
 * computes the same sizes by the same code, but allocates nothing large except the generator or the stream of
 * the feed, and the state can only be closed. So the sizes are known before memory is used, and cannot differ
 * from those that are allocated. */

enum memory_part {
    MEMORY_ACTIVATIONS, /* of a batch, and their gradients */
    MEMORY_PARAMETERS,  /* of the network, and their copies in 16 bits */
    MEMORY_GRADIENTS,
    MEMORY_OPTIMIZER, /* moments, moving average, and what updates need besides */
    MEMORY_WORKSPACE, /* scratch memory of kernels and libraries */
    MEMORY_SAMPLES,   /* data sets that are copied to the device */
    MEMORY_STREAM,    /* batches of the feed, augmentation, generator, decoder */
    MEMORY_CONTEXT,   /* on a GPU: CUDA's context and other processes; on a CPU: the rest of this process */
    MEMORY_PARTS
};

/* Bytes that one rank uses. Only open() and steps() of one engine write to it, one thread at a time. */
struct memory_account {
    uint64_t bytes[MEMORY_PARTS];
    uint64_t limit_bytes; /* maximum sum of all parts; 0: no limit */
    bool plans;           /* count, but do not allocate */
};

FDSL_C_BEGIN

/* Adds `bytes` bytes to a part. STATUS_TOO_LARGE, without adding them, if the sum would exceed the limit.
 * Does nothing if `account` is NULL. */
enum status memory_take(struct memory_account *account, enum memory_part part, uint64_t bytes);

/* Returns the sum of all parts. */
uint64_t memory_total(const struct memory_account *account);

/* Prints a table of the parts to stderr: `planned` (before the memory was allocated), and besides, unless
 * `allocated` is NULL, what was allocated and `measured_bytes`, the memory that is in use in all. `title` is
 * the first line. */
void memory_print(const char *title, const struct memory_account *planned,
                  const struct memory_account *allocated, uint64_t measured_bytes);

/* Returns the largest batch that fits into `limit_bytes`, if `large_bytes` are needed for a batch of `large`
 * samples and `small_bytes` for `small` < `large`, and the need grows linearly; 0 if none does. */
uint64_t memory_largest_batch(uint64_t small, uint64_t small_bytes, uint64_t large, uint64_t large_bytes,
                              uint64_t limit_bytes);

/* Parses the value of --memory-limit: one size for all ranks, such as "16G", or one per rank, such as
 * "16G,8G". Sets `limits` to the bytes of each rank. STATUS_USAGE with a remedy if a size is invalid, or if
 * there is neither one size nor one per rank. */
enum status memory_limit_parse(const char *text, uint32_t ranks, uint64_t *limits);

FDSL_C_END

/* ---- Engines ---- */

/* How the JPEG files of a stream are decoded (DATA_LOAD). The caller sets what it wants. An engine that uses
 * feed_stream_open() thereby replaces DECODER_AUTO and a negative share by what it uses; other engines decode
 * with the CPU, and leave both unchanged. */
struct train_decoding {
    enum decoder decoder;
    double share; /* set_stream_request.device_share; negative: the default of the decoder */
};

/* Everything that determines the results of training, except the initial state. The struct must outlive the
 * engine. */
struct train {
    const struct model *model;
    const struct data *data;
    uint64_t seed;
    uint32_t batch;         /* global batch: samples per step of all ranks; at most the training set's size */
    bool drop_last;         /* an epoch leaves out the samples after its last full batch */
    uint32_t rank, ranks;   /* this rank and the number of ranks; 0 ranks mean 1 */
    const uint32_t *shares; /* per rank: samples in a full step, with the sum `batch`; NULL: equal parts. May
                             * change from one epoch to the next, between calls of steps() */
    uint32_t share_max; /* maximum number of samples that this rank ever has in a step; 0: an equal part */
    struct exchange *exchange; /* adds up the gradients of all ranks; NULL: one rank */
    struct augment augment;
    struct optimizer optimizer;
    struct schedule schedule;
    enum loss_kind loss;
    float smoothing;
    struct binary_loss binary;      /* LOSS_BINARY only */
    struct loss_scale_rule scaling; /* only for engines with `scales_loss` */
    /* Number of parts into which this rank divides its samples of a step, to save memory. It computes the
     * gradients of one part after another, which changes only the order of sums. 0 means 1. */
    uint32_t accumulate;
    struct mixing mixing;
    /* LAYER_BATCH_NORM normalises over the samples of all ranks; otherwise each rank over its own. */
    bool sync_batch_norm;
    bool forward_only; /* the caller uses only set() and evaluate(): no gradients, no optimizer */
    /* Saves memory: the backward pass computes the forward pass again, block by block. Changes no result.
     * Only for engines with `recomputes`. */
    bool checkpoint_activations;
    /* The variant of synth that generates live samples for an engine on a device; NULL: the default. With
     * "omp", the host generates them. Engines on a CPU ignore this member; they use omp, or naive if the
     * build lacks omp. */
    const char *generator;
    struct train_decoding *decoding; /* DATA_LOAD only; not owned. NULL: the CPU decodes all samples */
    bool cudnn_benchmark; /* choose cuDNN's algorithms by measurement. Only for engines with `benchmarks` */

    /* Per rank of the whole run: the memory in bytes that it may use (--memory-limit); NULL: no limit. Not
     * owned. */
    const uint64_t *memory_limit_bytes;
    /* Receives what open() and later allocations of the engine need (struct memory_account); NULL: nothing.
     * Not owned. */
    struct memory_account *memory;

    /* Pipelines only (train/pipeline.h). `pipeline` is for the pipeline's own open(). An engine that computes
     * a stage gets `stage`; `model` is then the slice of this stage, and `exchange` is NULL. */
    const struct pipeline_plan *pipeline;
    const struct stage *stage;
};

/* A stage of a pipeline: a rank that holds a slice of the network. */
struct stage {
    bool first, last;  /* whether its inputs are the samples, and its outputs the logits */
    bool splits;       /* whether backward() computes the gradients of inputs and weights separately */
    uint32_t slots;    /* maximum number of micro-batches whose activations it keeps at the same time */
    uint32_t micros;   /* number of micro-batches of a step */
    uint32_t capacity; /* maximum number of samples of a micro-batch */
};

/* A micro-batch: consecutive samples of a step that pass through a pipeline together. */
struct micro {
    uint32_t slot;  /* where the stage keeps its activations, less than stage->slots */
    uint32_t index; /* index of the micro-batch in the step */
    uint32_t epoch;
    uint64_t step; /* number of the step, counted over all epochs */
    enum data_part part;
    bool training;           /* false: no dropout, no augmentation, no loss */
    const uint32_t *numbers; /* numbers of the samples; in training, also of their partners */
    uint32_t first;          /* index of the first sample in the step or, without `training`, in its set */
    uint32_t count;          /* 1 to stage->capacity */
    uint32_t total;          /* number of samples of the whole step */
};

/* The gradients that stage_functions.backward() computes. */
enum gradients_of { GRADIENTS_OF_INPUTS = 1, GRADIENTS_OF_WEIGHTS = 2, GRADIENTS_OF_BOTH = 3 };

/* Identifies memory of a device to another process. */
struct stage_handle {
    char bytes[64];
};

/* The functions that an engine needs in a pipeline, besides those of struct engine. Samples are stored
 * consecutively, each in C order. All arrays are in host memory, except values if there is share(): they may
 * then be in device memory, also of another device. */
struct stage_functions {
    size_t value_bytes; /* size of a value in `inputs`, `deltas`, `in_deltas`, and in `outputs` of all stages
                           but the last */

    /* Runs the forward pass of a micro-batch. `inputs` is NULL in the first stage, which gathers the samples
     * itself. `outputs` receives the activations of the last layer, or the logits in float. In training, the
     * last stage adds the loss to its totals instead, and `outputs` is NULL. In training, the labels of the
     * samples are in train->data before the call or, in the first stage, after it. */
    enum status (*forward)(void *state, const struct micro *micro, const void *inputs, void *outputs);

    /* Runs the backward pass of a micro-batch. If inputs and weights have separate calls, the call for the
     * inputs comes first. `deltas` has the gradients of the outputs (NULL in the last stage, and for
     * GRADIENTS_OF_WEIGHTS alone). `in_deltas` receives the gradients of the inputs (NULL in the first
     * stage). The weight gradients of micro-batch 0 replace those of the previous step; the weight gradients
     * of later micro-batches are added. */
    enum status (*backward)(void *state, const struct micro *micro, enum gradients_of of, const void *deltas,
                            void *in_deltas);

    /* Sets the weight gradients to 0, for a step in which this replica of the pipeline has no samples. */
    enum status (*clear)(void *state);

    /* Call after the last backward pass of a step. Adds up the gradients of all replicas (train->exchange).
     * Engines that scale the loss set `*overflowed` if a gradient is not finite; others leave it as it is. */
    enum status (*sum)(void *state, bool *overflowed);

    /* Updates the parameters. `overflowed`: a stage has overflowed, so all stages skip the update. */
    enum status (*update)(void *state, uint64_t step, bool overflowed);

    /* pin() makes copies between `memory` and a device faster; `memory` contains the arrays that are passed
     * to forward() and backward(). unpin() undoes this. Both are NULL if the engine does not use a device. */
    enum status (*pin)(void *memory, size_t bytes);
    void (*unpin)(void *memory);

    /* share() allocates device memory that other processes can map; map() maps such memory. release() frees
     * or, if `mapped` is true, unmaps it. All are NULL if the engine does not use a device. */
    enum status (*share)(size_t bytes, void **memory, struct stage_handle *handle);
    enum status (*map)(const struct stage_handle *handle, void **memory);
    void (*release)(void *memory, bool mapped);
};

/* Returns how a tensor is updated. */
static inline struct tensor_update train_update_of(const struct train *train,
                                                   const struct model_tensor *tensor)
{
    struct tensor_update of;
    of.share = optimizer_share(&train->optimizer, train->model->depth - tensor->depth);
    of.decays = tensor->decays;
    of.hidden = tensor->hidden;
    of.index = (uint16_t)(tensor - train->model->tensors);
    of.statistic = tensor->is_statistic ? (float)BATCH_NORM_MOMENTUM : 0;
    return of;
}

/* Returns the number of rows of a tensor: the units of optimizer_clip_unit(), and the rows of Muon. */
static inline size_t train_rows_of(const struct model_tensor *tensor)
{
    return tensor->axes > 1 ? (size_t)tensor->shape[0] : 1;
}

/* Returns whether the update needs whole tensors: by the rule of the optimizer, or to clip gradients. */
static inline bool train_needs_tensors(const struct train *train)
{
    return !train->forward_only &&
           (optimizer_needs_tensors(train->optimizer.kind) || train->optimizer.clip_adaptive > 0);
}

/* Returns the number of steps per epoch. */
static inline uint32_t train_steps(const struct train *train)
{
    uint32_t count = train->data->sets[DATA_TRAIN].count;
    return count / train->batch + (count % train->batch != 0 && !train->drop_last);
}

/* Returns the part of a step's batch that belongs to this rank: samples first to first + count - 1 of the
 * `total` samples of the step. The parts of the ranks are consecutive. Without train->shares, they differ by
 * at most one sample. A rank may have no samples, especially in a short last step. */
static inline struct share train_share(const struct train *train, uint32_t step)
{
    const struct partition partition = {.rank = train->rank,
                                        .ranks = train->ranks ? train->ranks : 1,
                                        .strong = true,
                                        .weights = train->shares};
    return partition_step(&partition, train->data->sets[DATA_TRAIN].count, train->batch, step);
}

/* Returns the size of an equal part of a step, rounded up. */
static inline uint32_t train_equal_part(const struct train *train)
{
    uint32_t ranks = train->ranks ? train->ranks : 1;
    return train->batch / ranks + (train->batch % ranks != 0);
}

/* Returns the maximum number of samples that this rank has in a step. */
static inline uint32_t train_share_max(const struct train *train)
{
    return train->share_max ? train->share_max : train_equal_part(train);
}

/* Returns the number of parts of a step. */
static inline uint32_t train_parts(const struct train *train)
{
    return train->accumulate ? train->accumulate : 1;
}

/* Returns the maximum number of samples of a part or, in a stage of a pipeline, of a micro-batch. Engines
 * allocate memory for this number of samples. evaluate() passes at most this number of samples through the
 * network at a time. */
static inline uint32_t train_part_max(const struct train *train)
{
    uint32_t most = train_share_max(train), parts = train_parts(train);
    return train->stage ? train->stage->capacity : most / parts + (most % parts != 0);
}

/* Returns part number `part` of this rank's share of a step. The parts are consecutive and differ by at most
 * one sample. The last parts have no samples if there are more parts than samples. */
static inline struct share train_part(const struct train *train, const struct share *share, uint32_t part)
{
    const struct partition partition = {.rank = part, .ranks = train_parts(train), .strong = true};
    struct share of = partition_share(&partition, share->count);
    of.first += share->first;
    of.total = share->total;
    return of;
}

/* Returns the value of share_max for this rank. If `any` is true, its share may change to any size up to the
 * whole batch. A rank with a small share gets room for an equal part, because evaluate() uses batches of this
 * size. */
static inline uint32_t train_room(const struct train *train, bool any)
{
    uint32_t equal = train_equal_part(train), own = (uint32_t)train_share(train, 0).count;
    return any ? train->batch : own > equal ? own : equal;
}

/* Returns the number of samples that this rank trains on in an epoch. */
static inline uint64_t train_share_of_epoch(const struct train *train)
{
    uint32_t steps = train_steps(train);
    return (steps - 1) * train_share(train, 0).count + train_share(train, steps - 1).count;
}

/* Returns the number of the sample at index `j` of the batch that begins at index `first` of an epoch's
 * order. DATA_CONSTANT ignores the order. */
FDSL_HD uint32_t train_sample_at(enum data_feed feed, const struct draw_order *order, uint32_t first,
                                 uint32_t j)
{
    return feed == DATA_CONSTANT ? j : draw_order_at(order, first + j);
}

/* Returns the order of the training samples in an epoch. */
static inline struct draw_order train_order(const struct train *train, uint32_t epoch)
{
    const struct data *data = train->data;
    const uint32_t count = data->sets[DATA_TRAIN].count;
    if (data->rows && (data->feed != DATA_LOAD || data->shuffle > 0))
        return draw_rows(train->seed, epoch, count);
    return data->feed == DATA_LOAD ? draw_lanes(train->seed, epoch, count, data->lanes, data->shuffle)
                                   : draw_order(train->seed, epoch, count);
}

/* The samples of a step. With repeated augmentation, copy c of sample n has the number n + c * (samples of
 * the training set), so that all its random numbers differ from those of the other copies. */
struct train_pick {
    enum data_feed feed;
    struct draw_order order;
    uint32_t first;    /* index of the step's first sample in the order */
    uint32_t distinct; /* number of different samples in the step */
};

/* Returns the number of the sample at index `j` of the whole step of all ranks. The first copies of all
 * samples come before the second copies. With as many ranks as copies and equal shares, each rank has one
 * copy of every sample of a full step. */
FDSL_HD uint32_t train_picked(const struct train_pick *pick, uint32_t j)
{
    const uint32_t copy = j / pick->distinct, index = j - copy * pick->distinct;
    return train_sample_at(pick->feed, &pick->order, pick->first, index) + copy * pick->order.count;
}

/* Returns the number of the training sample that is copied. `number` is that of the copy, from
 * train_picked(). */
static inline uint32_t train_original(const struct data *data, uint32_t number)
{
    return number % data->sets[DATA_TRAIN].count;
}

/* Returns the samples of a step of an epoch. A step has train->batch / repeats different samples; the last
 * step of an epoch may have fewer. */
static inline struct train_pick train_pick(const struct train *train, const struct draw_order *order,
                                           uint32_t step)
{
    const uint32_t repeats = train->augment.repeats ? train->augment.repeats : 1;
    const uint32_t total = (uint32_t)train_share(train, step).total;
    return (struct train_pick){train->data->feed, *order, step * (train->batch / repeats),
                               (total + repeats - 1) / repeats};
}

/* Returns whether the caller of the library hands over samples that may be mixed already. */
static inline bool train_is_mixed(const struct train *train)
{
    return train->data->given && train->data->given->mixed;
}

static inline bool train_mixes(const struct train *train)
{
    return train->mixing.mixup > 0 || train->mixing.cutmix > 0 || train_is_mixed(train);
}

/* Returns how the samples of a step are mixed. If the caller has mixed their values, an empty rectangle
 * leaves these as they are, and only the targets are mixed. */
static inline struct mix train_mix(const struct train *train, uint32_t epoch, uint32_t step)
{
    const struct mix none = {1, false, 0, 0, 0, 0};
    if (train_is_mixed(train)) {
        const struct mix targets = {train->data->given->share, true, 0, 0, 0, 0};
        return targets;
    }
    return train_mixes(train) ? mix_draw(&train->mixing, train->seed, epoch, step, &train->data->shape)
                              : none;
}

/* Returns the number of entries in the list of `count` samples of this rank. If samples are mixed (struct
 * mix), their partners follow in the list: entry count + i is the partner of entry i. */
static inline uint32_t train_entries(const struct train *train, uint32_t count)
{
    return train_mixes(train) ? 2 * count : count;
}

/* Returns the number of samples that are generated (DATA_LIVE) or augmented (augment_computes()) for `count`
 * samples of this rank. With one rank, the partners are among these samples. With several ranks, and in a
 * micro-batch, the partners are computed as well. */
static inline uint32_t train_generated(const struct train *train, uint32_t count)
{
    return train->ranks > 1 || train->stage ? train_entries(train, count) : count;
}

/* Returns the number of samples that are augmented for the `count` samples of a part of a step, if each part
 * is augmented alone. The partners of these samples may belong to another part, so they are augmented as
 * well. */
static inline uint32_t train_part_augmented(const struct train *train, uint32_t count)
{
    return train_parts(train) > 1 ? train_entries(train, count) : train_generated(train, count);
}

/* ---- Feeds ----
 *
 * A feed delivers the samples of a step of this rank at a time or, in a stage of a pipeline, those of a
 * micro-batch. Either is called a delivery. */

/* Returns the number of deliveries per step. */
static inline uint32_t feed_per_step(const struct train *train)
{
    return train->stage ? train->stage->micros : 1;
}

/* Returns the number of deliveries per epoch. */
static inline uint32_t feed_steps(const struct train *train)
{
    return train_steps(train) * feed_per_step(train);
}

/* Returns the samples of a delivery of an epoch. The last micro-batches of a short step may be empty. */
static inline struct share feed_share(const struct train *train, uint32_t number)
{
    const struct share share = train_share(train, number / feed_per_step(train));
    const struct partition micros = {
        .rank = number % feed_per_step(train), .ranks = feed_per_step(train), .strong = true};
    struct share of = partition_share(&micros, share.count);
    of.first += share.first;
    of.total = share.total;
    return of;
}

/* Returns the maximum number of samples of a delivery. */
static inline uint32_t feed_share_max(const struct train *train)
{
    return train->stage ? train->stage->capacity : train_share_max(train);
}

/* Returns the number of a micro-batch's delivery within its epoch. */
static inline uint32_t feed_micro(const struct train *train, const struct micro *micro)
{
    return (uint32_t)(micro->step % train_steps(train)) * train->stage->micros + micro->index;
}

/* Converts an index in this rank's list of samples to an index in the whole step. */
FDSL_HD uint32_t train_entry(const struct share *share, uint32_t j)
{
    return (uint32_t)(j < share->count ? share->first + j
                                       : share->total - 1 - (share->first + j - share->count));
}

/* Describes the samples in an array of values. If `alone` is false, the array has a whole set. Otherwise it
 * has `count` samples of a step, in the order of the step, followed by their partners if `partners` is true.
 * The current part of the step begins at sample `skipped` of the array. */
struct train_held {
    bool alone, partners;
    uint32_t count, skipped;
};

/* Converts index `j` in a part's list, which has `count` samples and then their partners, to an index in the
 * array that `held` describes. held->alone must be true. An array without `partners` has all samples of the
 * step, so a partner is at the mirrored index. */
FDSL_HD uint32_t train_held_at(const struct train_held *held, uint32_t count, uint32_t j)
{
    const uint32_t at = held->skipped + (j < count ? j : j - count);
    return j < count ? at : held->partners ? held->count + at : held->count - 1 - at;
}

/* Writes the numbers of the samples `share` of a step of an epoch to `numbers`, and after them those of their
 * partners: train_entries() of share->count numbers. */
static inline void train_list(const struct train *train, const struct draw_order *order, uint32_t step,
                              const struct share *share, uint32_t *numbers)
{
    const struct train_pick pick = train_pick(train, order, step);
    const uint32_t entries = train_entries(train, (uint32_t)share->count);
    for (uint32_t i = 0; i < entries; i++)
        numbers[i] = train_picked(&pick, train_entry(share, i));
}

/* Writes the numbers of this rank's samples in a step of an epoch to `numbers`, and after them those of their
 * partners. `numbers` has room for train_entries() of train_share_max() samples. Returns the number of
 * samples, without the partners. */
static inline uint32_t train_batch(const struct train *train, const struct draw_order *order, uint32_t step,
                                   uint32_t *numbers)
{
    const struct share share = train_share(train, step);
    train_list(train, order, step, &share, numbers);
    return (uint32_t)share.count;
}

/* Returns whether a training sample is masked in the step that was read last. */
static inline bool train_masked(const struct train *train, uint32_t number)
{
    return train->data->sets[DATA_TRAIN].labels[train_original(train->data, number)] == DATA_MASKED;
}

/* Returns the target of the sample at index `j` of the `count` samples in `numbers`, which train_batch()
 * wrote. If a step has several parts, the list is still that of the whole step, because the partners follow
 * all samples of this rank. */
static inline struct target train_target(const struct train *train, const struct mix *mix,
                                         const uint32_t *numbers, uint32_t count, uint32_t j)
{
    const uint32_t *labels = train->data->sets[DATA_TRAIN].labels;
    const uint32_t label = labels[train_original(train->data, numbers[j])];
    struct target target = {label, label, mix->share};
    if (mix->share < 1)
        target.other = labels[train_original(train->data, numbers[count + j])];
    return target;
}

/* The training state of a network in host memory. Each array is an arena (model.h): model->arena_values
 * floats. The gaps of an arena are zero. */
struct train_state {
    float *parameters;
    float *m, *v;            /* moments for optimizer_step(); with SGD, `m` is the momentum and `v` is zero */
    struct loss_scale scale; /* used by engines that scale the loss; other engines leave it unchanged */
    float *ema; /* moving average of the parameters; NULL: none. If set() gets none, the average starts with
                 * the parameters; get() fills it only if it is not NULL */
};

/* Allocates zeroed arenas, but no moving average. Returns false if memory runs out; the caller frees in both
 * cases. */
static inline bool train_state_new(size_t values, struct train_state *state)
{
    state->parameters = (float *)calloc(values, sizeof(float));
    state->m = (float *)calloc(values, sizeof(float));
    state->v = (float *)calloc(values, sizeof(float));
    state->scale.scale = 0;
    state->scale.good_steps = 0;
    state->ema = NULL;
    return state->parameters && state->m && state->v;
}

/* Returns whether the engine keeps a moving average of the parameters. */
static inline bool train_averages(const struct train *train)
{
    return !train->forward_only && train->optimizer.average > 0;
}

/* Allocates the arenas that training needs. Returns false if memory runs out; the caller frees in both
 * cases. */
static inline bool train_state_for(const struct train *train, struct train_state *state)
{
    bool whole = train_state_new(train->model->arena_values, state);
    if (whole && train_averages(train))
        state->ema = (float *)calloc(train->model->arena_values, sizeof(float));
    return whole && (state->ema || !train_averages(train));
}

static inline void train_state_free(struct train_state *state)
{
    free(state->parameters);
    free(state->m);
    free(state->v);
    free(state->ema);
}

#define TRAIN_FINE UINT64_MAX /* no step had a non-finite loss */

/* Sums over this rank's samples of the steps since the last call of totals(). */
struct train_totals {
    double loss;       /* sum of the losses of the samples, before the update of their step */
    uint64_t correct;  /* samples classified correctly, with dropout, before the update of their step */
    uint64_t samples;  /* without masked samples */
    uint64_t skipped;  /* steps that overflowed and changed no parameters (engines that scale the loss) */
    double norms;      /* with clip_norm: sum of the gradients' norms before clipping; same on all ranks */
    uint64_t normed;   /* number of summands in `norms`: one per step that was not skipped */
    double data_s;     /* seconds in which arithmetic waited for samples; negative: not known */
    double generate_s; /* seconds spent generating samples (DATA_LIVE), overlapped or not */
    uint64_t bad_step; /* first step with a non-finite loss, counted over all epochs; or TRAIN_FINE */
    /* Set by feed_stream_totals(), for samples of a stream; only for DATA_LOAD on a device: */
    uint64_t masked;          /* broken samples of this rank; not counted in `samples` */
    uint64_t delivered;       /* sum of stream_batch.read of this rank's samples, modulo 2^64 */
    uint64_t read_bytes;      /* read from files, also for later steps */
    uint64_t resident;        /* samples whose files stay in the memory of this rank */
    uint64_t resident_device; /* samples that are in the memory of its device */
    double stall_s, decode_s; /* seconds of waiting for the stream; seconds of decoding, of all threads */
};

/* Sums over the steps since the last call of totals(), possibly slightly out of date. The fields may come
 * from different steps. */
struct train_progress {
    double loss; /* as in struct train_totals */
    uint64_t correct, samples;
};

/* Number of steps between two progress updates of an engine on a device. Each update costs microseconds of
 * device time. */
#define TRAIN_PROGRESS_STEPS 128

/* Largest allowed differences from the oracle, the reference in double. Rounding in the engine's number
 * formats stays below these bounds; a wrong implementation exceeds them. */
struct engine_bounds {
    /* Difference between the engine's and the oracle's loss of a step, relative to the latter. An oracle loss
     * below `floor` per sample counts as `floor`, because a tiny loss is the difference of large logits. */
    double loss;
    double floor;
    double drift;  /* norm of the error of a parameter tensor, relative to the norm of the tensor's change */
    double logits; /* error of a logit, relative to the largest absolute logit of the batch */
};

#define ENGINE_BOUNDS_FLOAT                                        \
    {                                                              \
        .loss = 1e-4, .floor = 1e-2, .drift = 1e-2, .logits = 1e-4 \
    }

/* Bounds of engines that round factors to TF32 or fp16, which have 10 mantissa bits (docs/notes/engines.md).
 * Our kernels round to nearest: the relative error of a factor is at most u = 2^-11. cuDNN may cut bits off
 * instead; its factors may be off by 2u. Losses are off in proportion to u. Changes of tensors are off in
 * proportion to sqrt(u), because most of their error is from inputs of ReLU and pooling whose order changes.
 * So with 2u, the largest errors observed with u become 2 * 2.2e-3 (losses) and sqrt(2) * 0.16 (changes),
 * which are within these bounds. */
#define ENGINE_BOUNDS_TF32                                     \
    {                                                          \
        .loss = 5e-3, .floor = 1, .drift = 0.3, .logits = 1e-2 \
    }

/* Bounds of engines that round gradients or activations to bf16 (docs/notes/engines.md). */
#define ENGINE_BOUNDS_BF16                                     \
    {                                                          \
        .loss = 5e-2, .floor = 1, .drift = 0.5, .logits = 5e-2 \
    }

/* The location of an engine's gradients when it calls train->exchange. */
enum gradients_in {
    GRADIENTS_ALONE,     /* the engine never calls train->exchange, so it trains on one rank only */
    GRADIENTS_IN_HOST,   /* the gradients are in host memory */
    GRADIENTS_IN_DEVICE, /* the gradients are in device memory */
    GRADIENTS_IN_GRAPH,  /* the gradients are in device memory; a CUDA graph captures the calls */
};

/* How an engine of lower precision supports --fp32-layers for a layer. */
enum fp32_layer {
    FP32_NEVER,
    FP32_CHOSEN, /* if layer.fp32 is set */
    FP32_ALWAYS, /* the layer is always computed in fp32 */
};

struct engine {
    const char *name; /* for messages */
    struct engine_bounds bounds;
    bool scales_loss; /* whether the engine uses struct loss_scale; set() replaces a scale of 0 by the initial
                         scale */
    bool feeds;       /* supports every enum data_feed; if false, only DATA_STORED */
    bool loads;       /* supports DATA_LOAD although `feeds` is false */
    bool recomputes;  /* supports train->checkpoint_activations */
    bool benchmarks;  /* supports train->cudnn_benchmark */
    bool augments;    /* supports all of struct augment; if false, only shift and flip */
    enum gradients_in gradients_in; /* where steps() passes the gradients to train->exchange */

    /* Supports an exchange that updates the parameters (exchange_method.updates). */
    bool shares_update;

    /* For the roofline: the fastest unit that the engine uses for matrix products, and the multiplications
     * that it may omit. */
    enum unit unit;
    struct model_savings savings;

    /* Returns STATUS_OK if the engine can train this network on these samples, else STATUS_USAGE with a
     * reason that calls the engine "it". NULL if the engine accepts every network. */
    enum status (*accepts)(const struct train *train);

    /* Returns whether the engine can compute a layer with parameters in fp32 (layer.fp32). NULL: it has one
     * precision for all layers. */
    enum fp32_layer (*keeps_fp32)(const struct layer *layer);

    const struct stage_functions *stages; /* NULL: cannot be a stage of a pipeline */

    /* Creates `*state`, which must be NULL. Parameters are undefined until set(). The caller closes the state
     * unless it is NULL, even after a failure. With train->memory and its member `plans`, only counts the
     * memory: the state can only be closed. */
    enum status (*open)(const struct train *train, const struct resources *resources, void **state);
    void (*close)(void *state);

    /* Copy the whole state in and out, bit for bit; the caller owns the arrays of `from` and `into`. With
     * train->forward_only, set() copies only the parameters, and get() is not called. */
    enum status (*set)(void *state, const struct train_state *from);
    enum status (*get)(void *state, struct train_state *into);

    /* Runs `count` >= 1 steps of an epoch, starting at step `first`; all steps are within that epoch. May
     * return before the steps are done; totals(), get() and evaluate() wait for them. With several ranks, all
     * ranks must call it with the same steps. If a step fails on one rank, it fails on all. */
    enum status (*steps)(void *state, uint32_t epoch, uint32_t first, uint32_t count);
    enum status (*totals)(void *state, struct train_totals *totals);

    /* For the display. Only reads memory and never blocks, so any thread may call progress() while steps
     * run. */
    void (*progress)(const void *state, struct train_progress *progress);

    /* For tests and --export-step: writes the gradients of the latest step, before clipping and weight decay,
     * as an arena. */
    enum status (*gradients)(void *state, float *gradients);

    /* For engines that scale the loss, else NULL: writes, for each layer of the model, the number of skipped
     * steps since the last call, or set(), whose overflow began in this layer. These are the steps in which
     * this layer's gradients, but no later layer's, contain an Inf or a NaN. */
    enum status (*overflows)(void *state, uint32_t *steps);

    /* Writes the logits of samples first .. first + count - 1 of a set, in order: count * classes floats. No
     * dropout, no augmentation. `count` may exceed the batch size; the engine works in batches. */
    enum status (*evaluate)(void *state, enum data_part part, uint32_t first, uint32_t count, float *logits);

    /* Returns the bytes of memory that the engine uses for parameters, data and activations. If the engine
     * runs on a device, this is device memory. */
    uint64_t (*memory_bytes)(const void *state);

    /* Returns the address of the test samples in device memory. NULL: the engine reads them in host memory.
     */
    void *(*test_samples)(const void *state);
};

FDSL_C_BEGIN

/* The reference (src/train/naive.c). In float it is the engine of train-naive; in double it is the oracle. */
extern const struct engine engine_naive, engine_oracle;

/* Returns the sum over the samples of all steps since the last call: the Euclidean norm of the derivatives of
 * the step's mean loss by the logits of the sample. `oracle` is a state of engine_oracle. */
double oracle_slopes(void *oracle);

/* Outputs of layers in a training step that an engine under test has computed. They replace those of the
 * reference, so rounding neither grows from layer to layer nor changes the masks of ReLU: the gradients are
 * then those of these outputs. */
struct oracle_given {
    const float
        *outputs[MODEL_LAYERS_MAX]; /* per layer: those of the step's samples, in C order; NULL: none */
    /* Set by each step: per layer with outputs, the sum of the squared differences between the output that
     * the reference computes from the given inputs and the given output, and the sum of its squares. */
    double off[MODEL_LAYERS_MAX], all[MODEL_LAYERS_MAX];
};

/* For tests, with a state of engine_oracle. oracle_give() is for later steps; `given` is not owned, and NULL
 * ends it. oracle_output() gets the outputs of a layer for the first `count` samples of the latest step. */
void oracle_give(void *oracle, struct oracle_given *given);
void oracle_output(const void *oracle, uint32_t layer, uint32_t count, float *values);

/* Muon: returns the error of a hidden matrix's change, and of the change of its moving average, in one step
 * from state `begin` to state `end` of an engine, relative to the change that follows from the momenta of
 * these states. NaN if memory runs out. */
double oracle_matrix_drift(const struct train *train, const struct model_tensor *tensor, uint64_t step,
                           const struct train_state *begin, const struct train_state *end);

/* Runs the reference's forward pass with the parameters of `from` over the samples of a step. Sets `*layer`
 * to the name of the first layer that outputs a non-finite value, or to "the loss" if none does. */
enum status naive_find_bad_layer(const struct train *train, const struct train_state *from, uint32_t epoch,
                                 uint32_t step, const char **layer);

FDSL_C_END

#endif
