/* What the engines on a CPU share: the loss of a sample, and totals that other threads may read. */
#ifndef FDSL_TRAIN_HOST_ENGINE_H
#define FDSL_TRAIN_HOST_ENGINE_H

#include <stdatomic.h>

#include "train/engine.h"

/* ---- The loss of a sample. The oracle computes it in double ---- */

/* Returns the binary cross-entropy of one sample. `delta` receives the gradient of the mean loss of `count`
 * samples with respect to the logits. */
static inline train_real sample_loss_binary(const struct train *train, const train_real *logits,
                                            const struct target *target, uint32_t count, train_real *delta)
{
    uint32_t classes = train->model->classes;
    const train_real weight = target_weight(target);
    const uint32_t *const rows = train->data->sets[DATA_TRAIN].multi_hot;
    const train_real divisor = loss_binary_divisor(&train->binary, classes);
    train_real loss = 0;
    for (uint32_t k = 0; k < classes; k++) {
        const train_real wanted = target_of(target, rows, train->smoothing, classes, k);
        loss += loss_binary_class(&train->binary, logits[k], wanted, weight, &delta[k]);
        delta[k] /= divisor * (train_real)count;
    }
    return loss / divisor;
}

/* Returns the loss of one sample. `delta` receives the gradient of the mean loss of `count` samples with
 * respect to the logits. Both are 0 for a masked sample, even if the logits are not finite. */
static inline train_real sample_loss(const struct train *train, const train_real *logits,
                                     const struct target *target, uint32_t count, train_real *delta)
{
    uint32_t classes = train->model->classes;
    const train_real weight = target_weight(target);
    train_real most = logits[0], sum = 0, loss = 0;
    if (weight == 0) {
        memset(delta, 0, classes * sizeof *delta);
        return 0;
    }
    if (train->loss == LOSS_BINARY)
        return sample_loss_binary(train, logits, target, count, delta);
    for (uint32_t k = 1; k < classes; k++)
        most = logits[k] > most ? logits[k] : most;
    for (uint32_t k = 0; k < classes; k++)
        sum += TRAIN_EXP(logits[k] - most);
    for (uint32_t k = 0; k < classes; k++) {
        train_real log_p = logits[k] - most - TRAIN_LOG(sum);
        train_real wanted = target_of(target, NULL, train->smoothing, classes, k);
        loss -= wanted * log_p;
        delta[k] = (weight * TRAIN_EXP(log_p) - wanted) / (train_real)count;
    }
    return loss;
}

/* Returns whether a training sample is classified correctly: it shows the class of the largest logit. */
static inline bool sample_correct(const struct train *train, const train_real *logits,
                                  const struct target *target)
{
    const uint32_t classes = train->model->classes;
    return target_has(train->data->sets[DATA_TRAIN].multi_hot, classes, target->label,
                      largest_logit(logits, classes));
}

/* ---- Progress ---- */

/* A zeroed struct means that no step is done yet. */
struct published {
    _Atomic double loss;
    _Atomic uint64_t correct, samples;
};

static inline void published_store(struct published *published, const struct train_totals *totals)
{
    atomic_store_explicit(&published->loss, totals->loss, memory_order_relaxed);
    atomic_store_explicit(&published->correct, totals->correct, memory_order_relaxed);
    atomic_store_explicit(&published->samples, totals->samples, memory_order_relaxed);
}

static inline void published_load(const struct published *published, struct train_progress *progress)
{
    progress->loss = atomic_load_explicit(&published->loss, memory_order_relaxed);
    progress->correct = atomic_load_explicit(&published->correct, memory_order_relaxed);
    progress->samples = atomic_load_explicit(&published->samples, memory_order_relaxed);
}

#endif
