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

/* Properties of LOSS_BINARY, as in timm. All zero: none. */
struct binary_loss {
    bool sums;       /* the loss of a sample is the sum over the classes instead of the mean */
    bool thresholds; /* targets greater than `threshold` become 1, the others 0 */
    float threshold;
    float positive_extra; /* weight of the positive part of each target, minus 1 */
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

/* Returns the index of the largest logit; the first index if several logits are largest. */
static inline uint32_t largest_logit(const train_real *logits, uint32_t classes)
{
    uint32_t best = 0;
    for (uint32_t k = 1; k < classes; k++)
        if (logits[k] > logits[best])
            best = k;
    return best;
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

/* Returns loss_binary_weighted() with the properties of `binary`. The positive part of the loss is
 * wanted * log(1 + exp(-x)); a larger weight of it is a larger target and a larger weight of the sample. */
FDSL_HD train_real loss_binary_class(const struct binary_loss *binary, train_real logit, train_real wanted,
                                     train_real weight, train_real *delta)
{
    const train_real extra = binary->positive_extra;
    if (binary->thresholds)
        wanted = wanted > (train_real)binary->threshold * weight ? weight : 0;
    return loss_binary_weighted(logit, wanted + extra * wanted, weight + extra * wanted, delta);
}

/* Returns the number by which the sum over the classes is divided. */
FDSL_HD train_real loss_binary_divisor(const struct binary_loss *binary, uint32_t classes)
{
    return binary->sums ? 1 : (train_real)classes;
}

/* ---- Loss scaling ----
 *
 * Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018). The gradient of the loss is
 * multiplied by a scale, so that values derived from it do not underflow in half precision. Parameter
 * gradients are divided by the scale. A step whose gradients contain an Inf or a NaN is skipped. The rule and
 * its constants are those of torch.amp.GradScaler, plus a minimum and a maximum. Host and device share this
 * definition. */

/* By default, scales are powers of two, so that scaling causes no rounding. */
#define LOSS_SCALE_BEGIN 65536.0f
#define LOSS_SCALE_LEAST 1.0f
/* Without this limit, the scale would grow forever if all gradients were zero. */
#define LOSS_SCALE_MOST   16777216.0f
#define LOSS_SCALE_GROWTH 2000 /* steps without overflow before the scale grows */

/* How the scale changes; 0 means the default. */
struct loss_scale_rule {
    float begin;    /* first scale, LOSS_SCALE_LEAST to LOSS_SCALE_MOST; default LOSS_SCALE_BEGIN */
    float growth;   /* factor after `interval` steps without overflow, more than 1; default 2 */
    float backoff;  /* factor after an overflow, less than 1; default 1/2 */
    uint32_t steps; /* interval of the growth; default LOSS_SCALE_GROWTH */
};

struct loss_scale {
    float scale;         /* 0: not set yet */
    uint32_t good_steps; /* steps without overflow since the scale last changed */
};

static inline struct loss_scale loss_scale_begin(const struct loss_scale_rule *rule)
{
    struct loss_scale begin = {rule->begin > 0 ? rule->begin : LOSS_SCALE_BEGIN, 0};
    return begin;
}

/* Updates the scale after a step. */
FDSL_HD void loss_scale_step(const struct loss_scale_rule *rule, struct loss_scale *state, bool overflowed)
{
    const float grown = state->scale * (rule->growth > 0 ? rule->growth : 2);
    const float shrunk = state->scale * (rule->backoff > 0 ? rule->backoff : 0.5f);
    if (!overflowed && ++state->good_steps < (rule->steps ? rule->steps : LOSS_SCALE_GROWTH))
        return;
    state->good_steps = 0;
    if (overflowed)
        state->scale = shrunk < LOSS_SCALE_LEAST ? LOSS_SCALE_LEAST : shrunk;
    else if (grown <= LOSS_SCALE_MOST)
        state->scale = grown;
}

#endif
