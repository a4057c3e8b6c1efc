/* The loss of one sample, for engines that run on a CPU. The oracle computes it in double. */
#ifndef FDSL_TRAIN_SAMPLE_LOSS_H
#define FDSL_TRAIN_SAMPLE_LOSS_H

#include "train/engine.h"

/* Returns the binary cross-entropy of one sample. `delta` receives the gradient of the mean loss of `count`
 * samples with respect to the logits. */
static inline train_real sample_loss_binary(const struct train *train, const train_real *logits,
                                            const struct target *target, uint32_t count, train_real *delta)
{
    uint32_t classes = train->model->classes;
    train_real loss = 0;
    for (uint32_t k = 0; k < classes; k++) {
        loss += loss_binary(logits[k], target_of(target, train->smoothing, classes, k), &delta[k]);
        delta[k] /= (train_real)classes * (train_real)count;
    }
    return loss / (train_real)classes;
}

/* Returns the loss of one sample. `delta` receives the gradient of the mean loss of `count` samples with
 * respect to the logits. */
static inline train_real sample_loss(const struct train *train, const train_real *logits,
                                     const struct target *target, uint32_t count, train_real *delta)
{
    uint32_t classes = train->model->classes;
    train_real most = logits[0], sum = 0, loss = 0;
    if (train->loss == LOSS_BINARY)
        return sample_loss_binary(train, logits, target, count, delta);
    for (uint32_t k = 1; k < classes; k++)
        most = logits[k] > most ? logits[k] : most;
    for (uint32_t k = 0; k < classes; k++)
        sum += TRAIN_EXP(logits[k] - most);
    for (uint32_t k = 0; k < classes; k++) {
        train_real log_p = logits[k] - most - TRAIN_LOG(sum);
        train_real wanted = target_of(target, train->smoothing, classes, k);
        loss -= wanted * log_p;
        delta[k] = (TRAIN_EXP(log_p) - wanted) / (train_real)count;
    }
    return loss;
}

/* Returns the index of the largest logit; the first index if several logits are largest. */
static inline uint32_t largest_logit(const train_real *logits, uint32_t classes)
{
    uint32_t best = 0;
    for (uint32_t k = 1; k < classes; k++)
        if (logits[k] > logits[best])
            best = k;
    return best;
}

#endif
