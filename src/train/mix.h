/* MixUp (Zhang et al., "mixup: Beyond empirical risk minimization", 2018) and CutMix (Yun et al., "CutMix:
 * Regularization strategy to train strong classifiers with localizable features", 2019), as timm's class
 * Mixup computes them in batch mode.
 *
 * Every step draws one method, one share and, for CutMix, one rectangle. In a step with
 * `total` samples on all ranks, sample i is mixed with its partner, sample total - 1 - i. Therefore the
 * mixtures do not depend on the number of ranks. Both samples are augmented and normalised before they are
 * mixed. */
#ifndef FDSL_TRAIN_MIX_H
#define FDSL_TRAIN_MIX_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "train/model.h"

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
