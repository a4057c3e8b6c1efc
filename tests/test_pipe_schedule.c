/* Tests the schedules of pipelines: their operations, the activations that they keep, and their bubbles. */
#include <criterion/criterion.h>

#include <math.h>

#include "train/pipeline.h"

#define STAGES_MAX 9
#define MICROS_MAX 19

static const uint32_t stage_counts[] = {1, 2, 3, 4, 5, 7, 8, 9};
static const uint32_t micro_counts[] = {1, 2, 3, 5, 7, 8, 11, 16, 19};

typedef void (*expectation)(enum pipe_schedule schedule, uint32_t stages, uint32_t micros);

static void for_each(expectation expect)
{
    for (int schedule = 0; pipe_schedule_names[schedule]; schedule++)
        for (size_t s = 0; s < COUNT_OF(stage_counts); s++)
            for (size_t m = 0; m < COUNT_OF(micro_counts); m++)
                expect((enum pipe_schedule)schedule, stage_counts[s], micro_counts[m]);
}

/* ---- Operations ---- */

static void expect_each_once(enum pipe_schedule schedule, uint32_t stages, uint32_t micros)
{
    for (uint32_t stage = 0; stage < stages; stage++) {
        struct pipe_op ops[3 * MICROS_MAX];
        uint32_t next[PIPE_KINDS] = {0};
        uint32_t count = pipe_ops(schedule, stages, micros, stage, ops);
        for (uint32_t i = 0; i < count; i++)
            cr_assert_eq(ops[i].micro, next[ops[i].kind]++, "micro-batches are not in ascending order");
        cr_expect_eq(next[PIPE_FORWARD], micros);
        cr_expect_eq(next[PIPE_BOTH], pipe_splits(schedule) ? 0 : micros);
        cr_expect_eq(next[PIPE_INPUTS], pipe_splits(schedule) ? micros : 0);
        cr_expect_eq(next[PIPE_WEIGHTS], next[PIPE_INPUTS]);
    }
}

Test(pipe_schedule, has_each_operation_once_in_ascending_order)
{
    for_each(expect_each_once);
}

/* Returns whether all operations that `op` depends on are done. done[stage][kind] counts completed
 * operations. */
static bool may_run(const struct pipe_op *op, uint32_t (*done)[PIPE_KINDS], uint32_t stage, uint32_t stages)
{
    if (op->kind == PIPE_FORWARD)
        return stage == 0 || done[stage - 1][PIPE_FORWARD] > op->micro;
    if (op->kind == PIPE_WEIGHTS)
        return done[stage][PIPE_INPUTS] > op->micro;
    return done[stage][PIPE_FORWARD] > op->micro &&
           (stage + 1 == stages || done[stage + 1][PIPE_INPUTS] + done[stage + 1][PIPE_BOTH] > op->micro);
}

/* Runs all stages one operation at a time. If no stage can continue before all operations are done, the
 * stages deadlock. */
static void expect_no_deadlock(enum pipe_schedule schedule, uint32_t stages, uint32_t micros)
{
    struct pipe_op ops[STAGES_MAX][3 * MICROS_MAX];
    uint32_t counts[STAGES_MAX], next[STAGES_MAX] = {0}, done[STAGES_MAX][PIPE_KINDS] = {{0}}, left = 0;
    for (uint32_t s = 0; s < stages; s++)
        left += counts[s] = pipe_ops(schedule, stages, micros, s, ops[s]);
    for (bool runs = true; runs;) {
        runs = false;
        for (uint32_t s = 0; s < stages; s++)
            if (next[s] < counts[s] && may_run(&ops[s][next[s]], done, s, stages)) {
                done[s][ops[s][next[s]++].kind]++;
                left--;
                runs = true;
            }
    }
    cr_expect_eq(left, 0, "%s, %u stages, %u micro-batches: %u operations wait for each other",
                 pipe_schedule_names[schedule], stages, micros, left);
}

Test(pipe_schedule, stages_never_deadlock)
{
    for_each(expect_no_deadlock);
}

/* ---- Activations ---- */

static void expect_live(enum pipe_schedule schedule, uint32_t stages, uint32_t micros)
{
    for (uint32_t stage = 0; stage < stages; stage++) {
        struct pipe_op ops[3 * MICROS_MAX];
        uint32_t live = 0, most = 0, count = pipe_ops(schedule, stages, micros, stage, ops);
        for (uint32_t i = 0; i < count; i++) {
            live += ops[i].kind == PIPE_FORWARD;
            live -= ops[i].kind == PIPE_WEIGHTS || ops[i].kind == PIPE_BOTH;
            most = live > most ? live : most;
        }
        cr_expect_eq(live, 0);
        cr_expect_eq(most, pipe_live(schedule, stages, micros, stage), "%s, stage %u of %u, %u micro-batches",
                     pipe_schedule_names[schedule], stage, stages, micros);
        cr_expect(schedule != PIPE_1F1B || most <= stages - stage);
        cr_expect(schedule != PIPE_ZB_H1 || most <= stages);
    }
}

Test(pipe_schedule, pipe_live_is_the_number_of_activations)
{
    for_each(expect_live);
}

/* ---- Bubbles ---- */

static void fill_equal(struct pipe_times *times, uint32_t stages)
{
    for (uint32_t s = 0; s < stages; s++)
        times[s] = (struct pipe_times){{1, 1, 1, 2}, 0};
}

static void expect_formula(enum pipe_schedule schedule, uint32_t stages, uint32_t micros)
{
    struct pipe_times times[STAGES_MAX];
    double waits[STAGES_MAX], formula = pipe_bubble(schedule, stages, micros);
    fill_equal(times, stages);
    cr_assert(pipe_simulate(schedule, stages, micros, times, waits));
    for (uint32_t s = 0; s < stages; s++)
        cr_expect(fabs(waits[s] - formula) < 1e-9, "%s, stage %u of %u, %u micro-batches: %g instead of %g",
                  pipe_schedule_names[schedule], s, stages, micros, waits[s], formula);
}

Test(pipe_schedule, formula_equals_the_simulated_bubble)
{
    for_each(expect_formula);
}

Test(pipe_schedule, bubbles_have_their_known_sizes)
{
    cr_expect(fabs(pipe_bubble(PIPE_GPIPE, 4, 8) - 3.0 / 11) < 1e-12);
    cr_expect(fabs(pipe_bubble(PIPE_1F1B, 4, 8) - 3.0 / 11) < 1e-12);
    cr_expect(fabs(pipe_bubble(PIPE_ZB_H1, 4, 8) - 3.0 / 27) < 1e-12); /* Qi et al.: (S - 1)(F + B - W) */
    cr_expect(fabs(pipe_bubble(PIPE_ZB_H1, 4, 1) - 6.0 / 9) < 1e-12);
    for (int schedule = 0; pipe_schedule_names[schedule]; schedule++)
        cr_expect_eq(pipe_bubble((enum pipe_schedule)schedule, 1, 7), 0);
}

/* With one micro-batch, stages do not overlap, so a step takes the sum of the times of all stages. The update
 * takes 3 units, which count neither as waiting nor as part of the step. */
Test(pipe_schedule, simulates_stages_of_unequal_cost)
{
    static const double units_s[] = {1, 1e-6};
    for (int i = 0; i < 2; i++) {
        const double s = units_s[i];
        const struct pipe_times times[] = {{{s, 0, 0, 2 * s}, 3 * s}, {{4 * s, 0, 0, 5 * s}, 0}};
        double waits[2];
        cr_assert(pipe_simulate(PIPE_1F1B, 2, 1, times, waits));
        cr_expect(fabs(waits[0] - 9.0 / 12) < 1e-9, "%g", waits[0]);
        cr_expect(fabs(waits[1] - 6.0 / 15) < 1e-9, "%g", waits[1]);
    }
}

/* The slower stage determines the time of a step if there are many micro-batches. */
Test(pipe_schedule, the_slower_stage_waits_less)
{
    const struct pipe_times times[] = {{{1, 1, 1, 2}, 0}, {{2, 2, 2, 4}, 0}};
    for (int schedule = 0; pipe_schedule_names[schedule]; schedule++) {
        double waits[2];
        cr_assert(pipe_simulate((enum pipe_schedule)schedule, 2, 64, times, waits));
        cr_expect(waits[1] < 0.03 && fabs(waits[0] - 0.5) < 0.03, "%g, %g", waits[0], waits[1]);
    }
}
