/* MixUp (Zhang et al., "mixup: Beyond empirical risk minimization", 2018) and CutMix (Yun et al., "CutMix:
 * Regularization strategy to train strong classifiers with localizable features", 2019), as timm's class
 * Mixup computes them in batch mode.
 *
 * Every step draws one method, one share and, for CutMix, one rectangle. In a step with `total` samples on
 * all ranks, sample i is mixed with its partner, sample total - 1 - i. Therefore the mixtures do not depend
 * on the number of ranks. Both samples are augmented and normalised before they are mixed. Training and
 * streams, on host and device, share these definitions. */
#ifndef FDSL_DATA_MIXING_H
#define FDSL_DATA_MIXING_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"

/* The options --mixup and --cutmix: alpha of Beta(alpha, alpha), the distribution of the share; 0: the method
 * is off. If both are on, each step draws one of them with probability 1/2. */
struct mixing {
    double mixup, cutmix;
};

FDSL_HD bool mixing_on(const struct mixing *mixing)
{
    return mixing->mixup > 0 || mixing->cutmix > 0;
}

/* The mixing of the samples of a step. */
struct mix {
    float share;                       /* weight of a sample in its mixture, 0 to 1; 1: not mixed */
    bool cut;                          /* CutMix: the rectangle comes from the partner */
    uint32_t top, left, bottom, right; /* the rectangle; `bottom` and `right` are exclusive */
};

/* ---- Multi-hot labels: bit k % 32 of word k / 32 of a row is 1 if the sample shows class k ---- */

/* Returns the number of words per row. */
FDSL_HD uint32_t multi_hot_words(uint32_t classes)
{
    return (classes + 31) / 32;
}

/* Returns whether row `row` of `rows` has class `k`. */
FDSL_HD bool multi_hot_has(const uint32_t *rows, uint32_t classes, uint32_t row, uint32_t k)
{
    return rows[(size_t)row * multi_hot_words(classes) + k / 32] >> k % 32 & 1;
}

/* Packs word `w` of a label that has one byte per class. */
FDSL_HD uint32_t multi_hot_pack(const uint8_t *label, uint32_t classes, uint32_t w)
{
    uint32_t word = 0;
    for (uint32_t k = 32 * w; k < classes && k < 32 * w + 32; k++)
        word |= (uint32_t)(label[k] & 1) << k % 32;
    return word;
}

/* The classes that a sample belongs to: `label` with weight `share`, `other` with weight 1 - share. A sample
 * that is not mixed has the share 1. The label of a masked sample is UINT32_MAX. Its part of a mixture has
 * weight 0 instead, so it contributes nothing to a loss. */
struct target {
    uint32_t label, other;
    float share;
};

/* Returns the weight of class `k`. */
FDSL_HD float mix_weight(const struct target *target, uint32_t k)
{
    return (k == target->label ? target->share : 0) + (k == target->other ? 1 - target->share : 0);
}

/* A rank lists its samples of a step. If their partners belong to other ranks, they follow in the list.
 * Returns the index of the partner of sample `i` of the rank's `own` samples, in a list of `entries`. */
FDSL_HD uint32_t mix_partner(uint32_t own, uint32_t entries, uint32_t i)
{
    return entries > own ? own + i : own - 1 - i;
}

/* Returns whether CutMix takes the pixel at row y and column x from the partner. */
FDSL_HD bool mix_cuts(const struct mix *mix, uint32_t y, uint32_t x)
{
    return y >= mix->top && y < mix->bottom && x >= mix->left && x < mix->right;
}

/* Returns the value at row y and column x of a mixed sample. */
FDSL_HD float mix_value(const struct mix *mix, uint32_t y, uint32_t x, float own, float partner)
{
    if (mix->cut)
        return mix_cuts(mix, y, x) ? partner : own;
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

/* Mixes two images with a depth of 1, whose elements are of type DTYPE_U8, DTYPE_F16, DTYPE_BF16 or
 * DTYPE_F32. `interleaved`: NHWC; otherwise NCHW. Each value is mix_value() of both values in float, rounded
 * to nearest, ties to even. Bytes become integers from 0 to 255. `both`: the image `partner` is mixed with
 * `own`, too; otherwise it does not change. The two may be the same image. */
void mix_images(const struct mix *mix, const struct shape *shape, enum dtype type, bool interleaved,
                bool both, void *own, void *partner);

FDSL_C_END

#endif
