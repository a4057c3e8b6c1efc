/* Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018): the loss's gradient is made
 * larger, so that what follows from it is not lost below the least half; the gradients of parameters are made
 * smaller again. A step whose gradients hold an Inf or a NaN is skipped. The rule, its beginning and its
 * numbers are those of torch.amp.GradScaler, with a floor and a ceiling. One definition
 * for host and device. */
#ifndef FDSL_TRAIN_LOSS_SCALE_H
#define FDSL_TRAIN_LOSS_SCALE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"

/* Powers of two: to scale by them rounds nothing. */
#define LOSS_SCALE_BEGIN  65536.0f
#define LOSS_SCALE_LEAST  1.0f
#define LOSS_SCALE_MOST   16777216.0f /* where gradients are all zeros nothing else ends its growth */
#define LOSS_SCALE_GROWTH 2000        /* steps without an Inf before it doubles */

struct loss_scale {
    float scale;         /* 0: none yet */
    uint32_t good_steps; /* since it last changed */
};

static inline struct loss_scale loss_scale_begin(void)
{
    struct loss_scale begin = {LOSS_SCALE_BEGIN, 0};
    return begin;
}

/* After a step: halved where its gradients overflowed, doubled behind so many that did not. */
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
