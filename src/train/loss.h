/* The target of a sample and the binary cross-entropy. Host and device share these definitions. */
#ifndef FDSL_TRAIN_LOSS_H
#define FDSL_TRAIN_LOSS_H

#include <math.h>
#include <stdint.h>

#include "core/portable.h"
#include "train/optimizer.h"

#ifdef FDSL_DOUBLE
#define TRAIN_EXP   exp
#define TRAIN_LOG   log
#define TRAIN_LOG1P log1p
#else
#define TRAIN_EXP   expf
#define TRAIN_LOG   logf
#define TRAIN_LOG1P log1pf
#endif

enum loss_kind {
    LOSS_CROSS_ENTROPY, /* softmax cross-entropy */
    LOSS_BINARY         /* mean over the classes of the binary cross-entropy of sigmoid(logit) */
};

/* The classes that a sample belongs to: `label` with weight `share`, `other` with weight 1 - share. A sample
 * that is not mixed has the share 1. */
struct target {
    uint32_t label, other;
    float share;
};

/* Returns the target of class `k`: share * y(label) + (1 - share) * y(other), where y is the one-hot vector
 * of a label with label smoothing. */
FDSL_HD train_real target_of(const struct target *target, float smoothing, uint32_t classes, uint32_t k)
{
    const train_real on = 1 - (train_real)smoothing, share = (train_real)target->share;
    return (train_real)smoothing / (train_real)classes +
           ((k == target->label ? share * on : 0) + (k == target->other ? (1 - share) * on : 0));
}

/* Returns the binary cross-entropy of one class, max(x, 0) - x * wanted + log(1 + exp(-|x|)) for the logit x.
 * Sets `*delta` to its derivative, sigmoid(x) - wanted. Neither computation overflows. */
FDSL_HD train_real loss_binary(train_real logit, train_real wanted, train_real *delta)
{
    const train_real tail = TRAIN_EXP(logit < 0 ? logit : -logit);
    *delta = (logit < 0 ? tail : 1) / (1 + tail) - wanted;
    return (logit > 0 ? logit : 0) - logit * wanted + TRAIN_LOG1P(tail);
}

#endif
