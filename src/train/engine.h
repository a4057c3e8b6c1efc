/* An engine: one way to train and to infer. It knows no files, options or rows; the trainer (trainer.h)
 * drives it through epochs, checkpoints and rows. All engines compute the same steps, within rounding:
 *
 * Step i of epoch e takes the samples at places i * batch .. of draw_order(seed, e, count of the training
 * set), wherever they come from (enum data_feed); the last batch of an epoch may be short. Each is moved
 * (draw_move) and normalised (data.h), goes forward with dropout (draw_dropout), and gives the loss of
 * softmax and cross-entropy with label smoothing s: with probabilities p over K classes and label l, -(1 - s)
 * log p[l] - s / K * sum log p. The gradient is that of the mean over the batch, and every parameter takes an
 * optimizer_step() at step e * steps + i. */
#ifndef FDSL_TRAIN_ENGINE_H
#define FDSL_TRAIN_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "core/portable.h"
#include "core/roofline.h"
#include "core/status.h"
#include "core/variant.h"
#include "data/draws.h"
#include "train/data.h"
#include "train/loss_scale.h"
#include "train/model.h"
#include "train/optimizer.h"

/* All that decides what is computed; outlives the engine. */
struct train {
    const struct model *model;
    const struct data *data;
    uint64_t seed;
    uint32_t batch; /* samples, at most those of the training set */
    struct augment augment;
    struct optimizer optimizer;
    struct schedule schedule;
    float smoothing;
    bool forward_only; /* only evaluate() will be called: no gradients, no optimizer */
};

/* Steps of an epoch. */
static inline uint32_t train_steps(const struct train *train)
{
    uint32_t count = train->data->sets[DATA_TRAIN].count;
    return count / train->batch + (count % train->batch != 0);
}

/* The sample at place `first` + `j` of an epoch's order, j being its place in the batch. */
FDSL_HD uint32_t train_sample_at(enum data_feed feed, const struct draw_order *order, uint32_t first,
                                 uint32_t j)
{
    return feed == DATA_CONSTANT ? j : draw_order_at(order, first + j);
}

/* The samples of a step of an epoch; `numbers` has room for a batch. Returns how many there are. */
static inline uint32_t train_batch(const struct train *train, const struct draw_order *order, uint32_t step,
                                   uint32_t *numbers)
{
    uint32_t first = step * train->batch, left = order->count - first;
    uint32_t count = left < train->batch ? left : train->batch;
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = train_sample_at(train->data->feed, order, first, i);
    return count;
}

/* What a network has learnt, on the host: arenas of model->arena_values floats, gaps zero. */
struct train_state {
    float *parameters;
    float *first, *second;   /* the optimizer's, as optimizer_step() has them; of SGD `second` is zero */
    struct loss_scale scale; /* of an engine that scales its loss; others leave it as it is */
};

/* Makes arenas of zeros; false where memory is out, and then too the caller frees. */
static inline bool train_state_new(size_t values, struct train_state *state)
{
    state->parameters = (float *)calloc(values, sizeof(float));
    state->first = (float *)calloc(values, sizeof(float));
    state->second = (float *)calloc(values, sizeof(float));
    state->scale.scale = 0;
    state->scale.good_steps = 0;
    return state->parameters && state->first && state->second;
}

static inline void train_state_free(struct train_state *state)
{
    free(state->parameters);
    free(state->first);
    free(state->second);
}

#define TRAIN_FINE UINT64_MAX /* no step had a bad loss */

/* Sums over the steps since the last look. */
struct train_totals {
    double loss;      /* of the samples, before each one's step */
    uint64_t correct; /* of them, with dropout, before each one's step */
    uint64_t samples;
    uint64_t skipped; /* steps that overflowed and changed no parameters, of an engine that scales its loss */
    double data_s;    /* of the time: how long arithmetic waited for samples; negative: not known */
    double generate_s; /* how long live samples were being made, arithmetic beside it or not; else 0 */
    uint64_t bad_step; /* the first whose loss was no finite number, counted over all epochs; or TRAIN_FINE */
};

/* Sums over the steps since the last totals(), as they were a moment ago. The fields may be from different
 * steps. */
struct train_progress {
    double loss; /* as struct train_totals's */
    uint64_t correct, samples;
};

/* Steps between two updates of train_progress by an engine on a device, where each takes microseconds of its
 * time. */
#define TRAIN_PROGRESS_STEPS 128

/* How far from the oracle an engine may be and count as right: what rounding explains in its number formats,
 * and a wrong kernel does not. */
struct engine_bounds {
    double loss;   /* of the oracle's loss of a step, */
    double floor;  /* but of this much a sample where that is less: then it is what is left of large logits */
    double drift;  /* of the way that a tensor of parameters went, in Euclidean norm */
    double logits; /* of the largest of a batch's */
};

#define ENGINE_BOUNDS_FLOAT                                        \
    {                                                              \
        .loss = 1e-4, .floor = 1e-2, .drift = 1e-2, .logits = 1e-4 \
    }

struct engine {
    const char *name; /* for messages */
    struct engine_bounds bounds;
    bool scales_loss; /* as loss_scale.h has it; a set() without a scale begins with the first */
    bool feeds;       /* knows every enum data_feed; else only DATA_STORED */

    /* For the roofline: the fastest unit that it uses for products, and which of them it may leave out. */
    enum unit unit;
    struct model_savings savings;

    /* Whether it can train this network on these samples: STATUS_OK, or STATUS_USAGE and the reason, which
     * speaks of the engine as "it". May be NULL: always. */
    enum status (*accepts)(const struct train *train);

    /* Makes `*state`. Parameters are undefined until set(). Nothing is left allocated after a failure. */
    enum status (*open)(const struct train *train, const struct resources *resources, void **state);
    void (*close)(void *state);

    /* Takes and gives all of a state, bit for bit; arrays of `from` and `into` are the caller's. With
     * train->forward_only set() takes parameters alone, and get() is not called. */
    enum status (*set)(void *state, const struct train_state *from);
    enum status (*get)(void *state, struct train_state *into);

    /* Makes `count` >= 1 steps of an epoch from step `first` on, all within that epoch. It may return before
     * they are done: totals(), get() and evaluate() wait. */
    enum status (*steps)(void *state, uint32_t epoch, uint32_t first, uint32_t count);
    enum status (*totals)(void *state, struct train_totals *totals);

    /* For a display: reads memory alone, so any thread may call it while steps run, and nothing waits for it.
     */
    void (*progress)(const void *state, struct train_progress *progress);

    /* The gradients of the latest step, before the optimizer's weight decay, as an arena. For tests. */
    enum status (*gradients)(void *state, float *gradients);

    /* The logits of `count` samples of a set from `first` on, in order: count * classes floats. No dropout,
     * no moves. `count` may be any; the engine works in batches. */
    enum status (*evaluate)(void *state, enum data_part part, uint32_t first, uint32_t count, float *logits);

    /* The memory that it holds for parameters, data and activations: of the device where there is one. */
    uint64_t (*memory_bytes)(const void *state);
};

FDSL_C_BEGIN

/* The reference (src/train/naive.c): in float it is the engine of train-naive; in double it is the oracle. */
extern const struct engine engine_naive, engine_oracle;

/* Goes forward from these parameters through the samples of a step, as the reference does, and names the
 * first layer that gives a value which is no finite number; "the loss" where none does. */
enum status naive_find_bad_layer(const struct train *train, const struct train_state *from, uint32_t epoch,
                                 uint32_t step, const char **layer);

FDSL_C_END

#endif
