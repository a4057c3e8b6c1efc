/* Mixtures of samples, their targets, the loss, and loss scaling. Host and device share these definitions. */
#ifndef FDSL_TRAIN_LOSS_H
#define FDSL_TRAIN_LOSS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
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

/* The classes that a sample belongs to: `label` with weight `share`, `other` with weight 1 - share. A sample
 * that is not mixed has the share 1. The part of a label that is DATA_MASKED has weight 0 instead, so it
 * contributes nothing to the loss and its gradient. */
struct target {
    uint32_t label, other;
    float share;
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
 * of a label with label smoothing, or zero if the label is masked. The targets of all classes add up to
 * target_weight(). */
FDSL_HD train_real target_of(const struct target *target, float smoothing, uint32_t classes, uint32_t k)
{
    const train_real on = 1 - (train_real)smoothing, share = (train_real)target->share;
    return target_weight(target) * ((train_real)smoothing / (train_real)classes) +
           ((k == target->label ? share * on : 0) + (k == target->other ? (1 - share) * on : 0));
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

/* ---- Mixing samples ----
 *
 * MixUp (Zhang et al., "mixup: Beyond empirical risk minimization", 2018) and CutMix (Yun et al., "CutMix:
 * Regularization strategy to train strong classifiers with localizable features", 2019), as timm's class
 * Mixup computes them in batch mode.
 *
 * Every step draws one method, one share and, for CutMix, one rectangle. In a step with
 * `total` samples on all ranks, sample i is mixed with its partner, sample total - 1 - i. Therefore the
 * mixtures do not depend on the number of ranks. Both samples are augmented and normalised before they are
 * mixed. */

/* The options --mixup and --cutmix: alpha of Beta(alpha, alpha), the distribution of the share; 0: the method
 * is off. If both are on, each step draws one of them with probability 1/2. */
struct mixing {
    double mixup, cutmix;
};

/* The mixing of the samples of a step. */
struct mix {
    float share;                       /* weight of a sample in its mixture, 0 to 1; 1: not mixed */
    bool cut;                          /* CutMix: the rectangle comes from the partner */
    uint32_t top, left, bottom, right; /* the rectangle; `bottom` and `right` are exclusive */
};

/* Returns the value at row y and column x of a mixed sample. */
FDSL_HD float mix_value(const struct mix *mix, uint32_t y, uint32_t x, float own, float partner)
{
    if (mix->cut)
        return y >= mix->top && y < mix->bottom && x >= mix->left && x < mix->right ? partner : own;
    return fmaf(mix->share, own, (1 - mix->share) * partner);
}

FDSL_C_BEGIN

/* Draws how the samples of a step are mixed; at least one member of `mixing` is not 0. The host computes it
 * for all devices. The Philox counter is (0, step, epoch); draws of the share have a larger first word. */
struct mix mix_draw(const struct mixing *mixing, uint64_t seed, uint32_t epoch, uint32_t step,
                    const struct shape *shape);

/* Returns a random number of the distribution Beta(alpha, alpha), alpha > 0. */
double mix_beta(double alpha, uint64_t seed, uint32_t epoch, uint32_t step);

/* Mixes the values of `partner` into `values`. Both are samples of `shape` in C order. */
void mix_samples(const struct mix *mix, const struct shape *shape, const float *partner, float *values);

FDSL_C_END

#endif
