/* Compares the training state in two checkpoints. */
#ifndef FDSL_TESTS_SAME_STATE_H
#define FDSL_TESTS_SAME_STATE_H

#include <criterion/criterion.h>

#include <string.h>

#include "train/checkpoint.h"

/* Expects that both files hold the same number of epochs and, bit for bit, the same parameters, moments and
 * moving average. `averages` says whether there must be a moving average. */
static inline void expect_same_state(const char *one_path, const char *other_path, bool averages)
{
    struct checkpoint one, other;
    cr_assert_eq(checkpoint_read(one_path, &one), STATUS_OK, "%s", status_text());
    cr_assert_eq(checkpoint_read(other_path, &other), STATUS_OK, "%s", status_text());
    const size_t bytes = one.arena_values * sizeof(float);
    cr_assert(one.arena_values == other.arena_values && one.history.epochs == other.history.epochs &&
              one.partial.steps == other.partial.steps);
    cr_assert((one.state.ema != NULL) == averages && (other.state.ema != NULL) == averages,
              "%s: moving average", other_path);
    cr_expect_eq(memcmp(one.state.parameters, other.state.parameters, bytes), 0, "%s: parameters",
                 other_path);
    cr_expect_eq(memcmp(one.state.m, other.state.m, bytes), 0, "%s: m", other_path);
    cr_expect_eq(memcmp(one.state.v, other.state.v, bytes), 0, "%s: v", other_path);
    cr_expect(!averages || memcmp(one.state.ema, other.state.ema, bytes) == 0, "%s: moving average",
              other_path);
    cr_expect(!averages || memcmp(one.state.ema, one.state.parameters, bytes) != 0,
              "%s: the moving average equals the parameters", one_path);
    checkpoint_free(&one);
    checkpoint_free(&other);
}

#endif
