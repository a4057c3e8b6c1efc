/* The targets of samples and mixtures (data/mixing.h), the loss, and loss scaling. Host and device share
 * these definitions. */
#ifndef FDSL_TRAIN_LOSS_H
#define FDSL_TRAIN_LOSS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "data/mixing.h"
#include "train/data.h"
#include "train/model.h"
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

/* Returns the weight of a sample in the loss: 1, or less if a part of the sample is masked. The loss of the
 * sample is the weighted sum of the losses of its parts. */
FDSL_HD train_real target_weight(const struct target *target)
{
    const train_real share = (train_real)target->share;
    if (target->label != DATA_MASKED && target->other != DATA_MASKED)
        return 1;
    return (target->label != DATA_MASKED ? share : 0) + (target->other != DATA_MASKED ? 1 - share : 0);
}

/* Returns the target of class `k`: share * y(label) + (1 - share) * y(other), where y is the one-hot vector
 * of a label, or its row of `rows` (target_has()), with label smoothing, or zero if the label is masked.
 * Without rows, the targets of all classes add up to target_weight(). */
FDSL_HD train_real target_of(const struct target *target, const uint32_t *rows, float smoothing,
                             uint32_t classes, uint32_t k)
{
    const train_real on = 1 - (train_real)smoothing, share = (train_real)target->share;
    return target_weight(target) * ((train_real)smoothing / (train_real)classes) +
           ((target_has(rows, classes, target->label, k) ? share * on : 0) +
            (target_has(rows, classes, target->other, k) ? (1 - share) * on : 0));
}

/* Returns the binary cross-entropy of one class of a sample with this weight, weight * (max(x, 0) + log(1 +
 * exp(-|x|))) - x * wanted for the logit x. Sets `*delta` to its derivative, weight * sigmoid(x) - wanted.
 * Neither computation overflows. */
FDSL_HD train_real loss_binary_weighted(train_real logit, train_real wanted, train_real weight,
                                        train_real *delta)
{
    const train_real tail = TRAIN_EXP(logit < 0 ? logit : -logit);
    *delta = weight * ((logit < 0 ? tail : 1) / (1 + tail)) - wanted;
    return weight * (logit > 0 ? logit : 0) - logit * wanted + weight * TRAIN_LOG1P(tail);
}

/* The same for a sample of weight 1. */
FDSL_HD train_real loss_binary(train_real logit, train_real wanted, train_real *delta)
{
    return loss_binary_weighted(logit, wanted, 1, delta);
}

/* ---- Loss scaling ----
 *
 * Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018). The gradient of the loss is
 * multiplied by a scale, so that values derived from it do not underflow in half precision. Parameter
 * gradients are divided by the scale. A step whose gradients contain an Inf or a NaN is skipped. The rule and
 * its constants are those of torch.amp.GradScaler, plus a minimum and a maximum. Host and device share this
 * definition. */

/* Powers of two, so that scaling causes no rounding. */
#define LOSS_SCALE_BEGIN 65536.0f
#define LOSS_SCALE_LEAST 1.0f
/* Without this limit, the scale would grow forever if all gradients were zero. */
#define LOSS_SCALE_MOST   16777216.0f
#define LOSS_SCALE_GROWTH 2000 /* steps without overflow before the scale doubles */

struct loss_scale {
    float scale;         /* 0: not set yet */
    uint32_t good_steps; /* steps without overflow since the scale last changed */
};

static inline struct loss_scale loss_scale_begin(void)
{
    struct loss_scale begin = {LOSS_SCALE_BEGIN, 0};
    return begin;
}

/* Updates the scale after a step: halves it on overflow, doubles it after LOSS_SCALE_GROWTH steps without
 * overflow. */
FDSL_HD void loss_scale_step(struct loss_scale *state, bool overflowed)
{
    if (!overflowed && ++state->good_steps < LOSS_SCALE_GROWTH)
        return;
    state->good_steps = 0;
    if (overflowed)
        state->scale = state->scale / 2 < LOSS_SCALE_LEAST ? LOSS_SCALE_LEAST : state->scale / 2;
    else if (state->scale * 2 <= LOSS_SCALE_MOST)
        state->scale *= 2;
}

#endif
