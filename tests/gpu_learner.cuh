/* What programs share that hold engines against each other on a GPU: an engine in a place of its training,
 * and how far what it computes is off. Whatever fails ends the program with status 1. */
#ifndef FDSL_TESTS_GPU_LEARNER_CUH
#define FDSL_TESTS_GPU_LEARNER_CUH

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "train/engine.h"

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

/* The caller frees. */
static inline struct train_state state_of(const struct learner *learner, size_t values)
{
    struct train_state state;
    if (!train_state_new(values, &state))
        must_have(NULL);
    must(learner->engine->get(learner->state, &state));
    return state;
}

/* Bit for bit. */
static inline bool same_arenas(const struct train_state *one, const struct train_state *other, size_t values)
{
    return memcmp(one->parameters, other->parameters, values * sizeof(float)) == 0 &&
           memcmp(one->first, other->first, values * sizeof(float)) == 0 &&
           memcmp(one->second, other->second, values * sizeof(float)) == 0;
}

/* The norm of what differs over the norm of what is right; of two zeros 0. */
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
    return isnan(a) || a > b ? a : b; /* a NaN is the worst, on either side */
}

/* How far off the gradients of the latest step are: of each tensor, and the worst, which is returned. */
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

/* How far off a loss is; `floor` is a sample's: below, it is what is left of logits that are not small. */
static inline double compare_losses(const struct train_totals *mine, const struct train_totals *right,
                                    double floor)
{
    double least = floor * (double)right->samples;
    if (mine->samples != right->samples)
        return INFINITY;
    return fabs(mine->loss - right->loss) / (right->loss > least ? right->loss : least);
}

#endif
