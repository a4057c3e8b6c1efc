/* Shared by the programs that compare engines on a GPU with the oracle, the reference in double precision: an
 * engine with its state, the errors of its results, and planted faults. A failed call ends the program with
 * status 1. */
#ifndef FDSL_TESTS_GPU_LEARNER_CUH
#define FDSL_TESTS_GPU_LEARNER_CUH

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "train/engine.h"

/* The number of steps in a stretch. After each stretch, the engine continues from the oracle's state, as in
 * --verify. docs/train.md explains why. */
#define STRETCH 5
#define TRIES   32 /* attempts at a step that overflows; each attempt halves the loss scale */

static inline void must(enum status status)
{
    if (status != STATUS_OK) {
        printf("FAILED  %s\n", status_text());
        exit(1);
    }
}

static inline void must(cudaError_t error)
{
    must(cuda_status(error, "a call", __FILE__, __LINE__));
}

static inline void *must_have(void *memory)
{
    if (!memory) {
        printf("FAILED  out of memory\n");
        exit(1);
    }
    return memory;
}

/* An engine and its state. */
struct learner {
    const struct engine *engine;
    void *state;
};

static inline struct learner learner_open(const struct engine *engine, const struct train *train,
                                          const struct train_state *from)
{
    struct learner learner = {engine, NULL};
    const struct resources resources = {.threads = 1, .device = 0};
    must(engine->open(train, &resources, &learner.state));
    must(engine->set(learner.state, from));
    return learner;
}

/* Returns the engine's parameters and moments. The caller frees them. */
static inline struct train_state state_of(const struct learner *learner, size_t values)
{
    struct train_state state;
    if (!train_state_new(values, &state))
        must_have(NULL);
    must(learner->engine->get(learner->state, &state));
    return state;
}

/* Returns a copy of a state, which the caller frees. */
static inline struct train_state copy_of(const struct train_state *state, size_t values)
{
    struct train_state copy;
    if (!train_state_new(values, &copy))
        must_have(NULL);
    memcpy(copy.parameters, state->parameters, values * sizeof(float));
    memcpy(copy.m, state->m, values * sizeof(float));
    memcpy(copy.v, state->v, values * sizeof(float));
    copy.scale = state->scale;
    return copy;
}

/* Returns whether the parameters and moments of two states are bit-identical. */
static inline bool same_arenas(const struct train_state *one, const struct train_state *other, size_t values)
{
    return memcmp(one->parameters, other->parameters, values * sizeof(float)) == 0 &&
           memcmp(one->m, other->m, values * sizeof(float)) == 0 &&
           memcmp(one->v, other->v, values * sizeof(float)) == 0;
}

/* Returns the norm of the difference, divided by the norm of the correct values `right`; 0 if both are equal.
 */
static inline double off_by(const float *mine, const float *right, size_t count)
{
    double off = 0, all = 0;
    for (size_t i = 0; i < count; i++) {
        off += ((double)mine[i] - right[i]) * ((double)mine[i] - right[i]);
        all += (double)right[i] * right[i];
    }
    return off == 0 ? 0 : sqrt(off / all);
}

static inline double worst_of(double a, double b)
{
    return isnan(a) || a > b ? a : b; /* a NaN in either argument is the largest */
}

/* Sets `each` to the relative error of each tensor's gradients in the latest step. Returns the largest. */
static inline double compare_gradients(const struct learner *mine, const struct learner *oracle,
                                       const struct model *model, double each[MODEL_TENSORS_MAX])
{
    size_t bytes = model->arena_values * sizeof(float);
    float *ours = static_cast<float *>(must_have(malloc(bytes)));
    float *right = static_cast<float *>(must_have(malloc(bytes)));
    must(mine->engine->gradients(mine->state, ours));
    must(oracle->engine->gradients(oracle->state, right));
    double worst = 0;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        each[t] = off_by(ours + tensor->first, right + tensor->first, tensor->values);
        worst = worst_of(each[t], worst);
    }
    free(ours);
    free(right);
    return worst;
}

/* Compares the engine's update, `mine` - `from`, with the oracle's update, `right` - `begin`. Returns the
 * largest relative error of a tensor: the norm of the difference of the updates, divided by the norm of the
 * oracle's update. Leaves out idle values (model.h), whose updates are determined by rounding alone. */
static inline double compare_updates(const struct train_state *mine, const struct train_state *from,
                                     const struct train_state *right, const struct train_state *begin,
                                     const struct model *model)
{
    double worst = 0;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        double off = 0, all = 0;
        const struct model_tensor *tensor = &model->tensors[t];
        for (size_t i = tensor->first; i < tensor->first + tensor->values; i++) {
            if (i - tensor->first - tensor->idle_first < tensor->idle_values)
                continue;
            double way = (double)right->parameters[i] - begin->parameters[i];
            off += pow((double)mine->parameters[i] - from->parameters[i] - way, 2);
            all += way * way;
        }
        worst = worst_of(off == 0 ? 0 : sqrt(off / all), worst);
    }
    return worst;
}

/* Returns the relative error of a loss, 0 if both are equal. If the loss per sample is below `floor`, the
 * error is relative to `floor`, because a tiny loss is the difference of large logits. Infinity if the
 * numbers of samples differ. */
static inline double compare_losses(const struct train_totals *mine, const struct train_totals *right,
                                    double floor)
{
    double least = floor * (double)right->samples;
    if (mine->samples != right->samples)
        return INFINITY;
    if (mine->loss == right->loss)
        return 0; /* also if all samples are masked */
    return fabs(mine->loss - right->loss) / (right->loss > least ? right->loss : least);
}

/* Runs step `i`. If the engine skips it because of an overflow, which halves the loss scale, runs it again.
 */
static inline struct train_totals take_step(const struct learner *learner, const struct train *train,
                                            uint32_t i)
{
    struct train_totals totals = {};
    uint32_t steps = train_steps(train);
    for (int tries = 0; tries < TRIES; tries++) {
        must(learner->engine->steps(learner->state, i / steps, i % steps, 1));
        must(learner->engine->totals(learner->state, &totals));
        if (totals.skipped == 0)
            break;
    }
    return totals;
}

/* ---- Planted faults ---- */

enum fault {
    FAULT_NONE,
    FAULT_TAP,
    FAULT_SWAP,
    FAULT_BIAS,
    FAULT_LAST_BIAS,
    FAULT_CHANNEL,
    FAULT_POSITIONS,
    FAULT_HEAD,
    FAULT_NORM,
    FAULT_HIDDEN,
    FAULT_MOVE,
    FAULT_LABEL,
    FAULT_MASK,
    FAULT_PIXELS,
};

static const char *const fault_names[] = {
    "",
    "conv2 without a tap",
    "conv2 with two channels swapped",
    "conv1 without its bias",
    "the last layer without its bias",
    "fc1 without a channel",
    "no positions",
    "a head without its values",
    "a norm without a weight",
    "fc2 without an eighth of its inputs",
    "no shifts",
    "no smoothing",
    "class 0 instead of masked labels",
    "the pixels of the next sample",
};

static inline const struct layer *layer_named(const struct model *model, const char *name)
{
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (strcmp(model->layers[i].name, name) == 0)
            return &model->layers[i];
    printf("FAILED  no layer %s\n", name);
    exit(1);
}

/* Returns whether a network can have the fault. Some faults change a transformer. Other faults change a
 * network that has two convolutions followed by linear layers. FAULT_MASK and FAULT_PIXELS change the labels
 * and the files of a set instead (gpu_train.cu, gpu_graph.cu). */
static inline bool fault_fits(enum fault fault, bool transformer)
{
    if (fault == FAULT_MASK || fault == FAULT_PIXELS)
        return false;
    if (fault == FAULT_NONE || fault == FAULT_MOVE || fault == FAULT_LABEL)
        return true;
    return transformer == (fault >= FAULT_POSITIONS);
}

/* Changes the engine's settings, so that it computes what a CUDA kernel with this fault would compute. The
 * oracle keeps the correct settings. */
static inline void plant(enum fault fault, struct train *train)
{
    if (fault == FAULT_MOVE)
        train->augment = {};
    if (fault == FAULT_LABEL)
        train->smoothing = 0;
}

/* plant() for a transformer. Layer 1 adds the positions; layers 2, 3 and 11 are a norm, qkv and fc2. */
static inline void plant_transformer(enum fault fault, const struct model *model, float *parameters)
{
    const struct layer *positions = &model->layers[1], *norm = &model->layers[2], *qkv = &model->layers[3],
                       *fc2 = &model->layers[11];
    const uint32_t width = positions->out.width, depth = width / model->layers[4].spec.heads;
    if (fault == FAULT_POSITIONS)
        memset(parameters + positions->weight, 0, positions->weight_values * sizeof(float));
    if (fault == FAULT_HEAD)
        memset(parameters + qkv->weight + 2 * width * width, 0, depth * width * sizeof(float));
    if (fault == FAULT_NORM)
        parameters[norm->weight] = 0;
    if (fault == FAULT_HIDDEN)
        for (size_t o = 0; o < width; o++)
            memset(parameters + fc2->weight + o * fc2->in.width, 0, fc2->in.width / 8 * sizeof(float));
}

/* Changes the engine's parameters at the start of a stretch of steps, so that the engine computes what a CUDA
 * kernel with this fault would compute. The oracle keeps the correct parameters. */
static inline void plant(enum fault fault, const struct model *model, float *parameters)
{
    if (model->transformer)
        plant_transformer(fault, model, parameters);
    if (fault == FAULT_NONE || fault == FAULT_MASK || model->transformer)
        return;
    const bool normed = model->normalises; /* biases are those of normalisations, which begin with zeros */
    const struct layer *conv1 = layer_named(model, normed ? "bn1" : "conv1"),
                       *conv2 = layer_named(model, normed ? "layer1.0.conv2" : "conv2"),
                       *fc1 = layer_named(model, normed ? "fc" : "fc1"),
                       *last = &model->layers[model->layer_count - 1];
    size_t taps = conv2->weight_values / ((size_t)conv2->in.channels * conv2->out.channels);
    float *weights = parameters + conv2->weight;
    if (fault == FAULT_TAP)
        for (size_t i = taps - 1; i < conv2->weight_values; i += taps)
            weights[i] = 0;
    if (fault == FAULT_SWAP)
        for (size_t i = 0; i < conv2->weight_values; i += taps * conv2->in.channels)
            for (size_t tap = 0; tap < taps; tap++) {
                float first = weights[i + tap];
                weights[i + tap] = weights[i + taps + tap];
                weights[i + taps + tap] = first;
            }
    for (size_t i = 0; fault == FAULT_BIAS && i < conv1->bias_values; i++)
        parameters[conv1->bias + i] = normed ? 0.5f : 0;
    if (fault == FAULT_LAST_BIAS)
        memset(parameters + last->bias, 0, last->bias_values * sizeof(float));
    if (fault == FAULT_CHANNEL)
        for (size_t o = 0; o < fc1->bias_values; o++)
            memset(parameters + fc1->weight + o * fc1->in_values, 0,
                   fc1->in_values / conv2->out.channels * sizeof(float));
}

/* ---- Steps on both engines, in stretches ---- */

/* The largest relative errors of an engine. `tensors` has the error of each tensor's gradients in the first
 * step, and `gradients` has the largest of these errors. `losses` is over all steps. `updates` is over all
 * tensors, whose updates are compared once per stretch of steps. */
struct distance {
    double tensors[MODEL_TENSORS_MAX], gradients, losses, updates;
};

/* Runs `count` steps on both engines, beginning with step `first`. Both start from the state `begin`, but the
 * planted fault changes the copy for `mine`. Returns the oracle's final state; the caller frees it. */
static inline struct train_state compare_stretch(const struct learner *mine, const struct learner *oracle,
                                                 const struct train *train, enum fault fault, uint32_t first,
                                                 uint32_t count, const struct train_state *begin,
                                                 struct distance *distance)
{
    size_t values = train->model->arena_values;
    struct train_state from = copy_of(begin, values);
    plant(fault, train->model, from.parameters);
    must(mine->engine->set(mine->state, &from));
    must(oracle->engine->set(oracle->state, begin));
    for (uint32_t i = first; i < first + count; i++) {
        struct train_totals own = take_step(mine, train, i), right = take_step(oracle, train, i);
        double off = compare_losses(&own, &right, mine->engine->bounds.floor);
        distance->losses = worst_of(off, distance->losses);
        if (i == 0)
            distance->gradients = compare_gradients(mine, oracle, train->model, distance->tensors);
    }
    struct train_state went = state_of(mine, values), end = state_of(oracle, values);
    distance->updates = worst_of(compare_updates(&went, &from, &end, begin, train->model), distance->updates);
    train_state_free(&from);
    train_state_free(&went);
    return end;
}

/* Runs `steps` steps on both engines. After every STRETCH steps, both continue from the oracle's state. */
static inline struct distance compare_steps(const struct learner *mine, const struct learner *oracle,
                                            const struct train *train, enum fault fault, uint32_t steps,
                                            const struct train_state *begin)
{
    struct distance distance = {};
    struct train_state now = copy_of(begin, train->model->arena_values);
    for (uint32_t first = 0; first < steps; first += STRETCH) {
        uint32_t count = steps - first < STRETCH ? steps - first : STRETCH;
        struct train_state end = compare_stretch(mine, oracle, train, fault, first, count, &now, &distance);
        train_state_free(&now);
        now = end;
    }
    train_state_free(&now);
    return distance;
}

#endif
