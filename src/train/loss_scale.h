/* Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018). The gradient of the loss is
 * multiplied by a scale, so that values derived from it do not underflow in half precision. Parameter
 * gradients are divided by the scale. A step whose gradients contain an Inf or a NaN is skipped. The rule and
 * its constants are those of torch.amp.GradScaler, plus a minimum and a maximum. Host and device share this
 * definition. */
#ifndef FDSL_TRAIN_LOSS_SCALE_H
#define FDSL_TRAIN_LOSS_SCALE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"

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
