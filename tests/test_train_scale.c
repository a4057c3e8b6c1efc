/* Tests loss scaling without a GPU: the rule that changes the scale, verification with skipped steps, the
 * number of skipped steps that an epoch reports, and the scale in checkpoints. */
#include "train_support.h"

#include <limits.h>
#include <stdio.h>

#include "train/trainer.h"

static const struct shape small = {1, 1, 8, 8};

/* ---- The rule ---- */

static const struct loss_scale_rule rule; /* the default */

static struct loss_scale after(struct loss_scale state, uint32_t steps, bool overflowed)
{
    for (uint32_t i = 0; i < steps; i++)
        loss_scale_step(&rule, &state, overflowed);
    return state;
}

Test(loss_scale, grows_only_after_good_steps)
{
    struct loss_scale state = after(loss_scale_begin(&rule), LOSS_SCALE_GROWTH - 1, false);
    cr_expect(state.scale == 65536 && state.good_steps == LOSS_SCALE_GROWTH - 1);
    struct loss_scale grown = after(state, 1, false), broken = after(state, 1, true);
    cr_expect(grown.scale == 2 * 65536 && grown.good_steps == 0);
    cr_expect(broken.scale == 32768 && broken.good_steps == 0);
    broken = after(broken, LOSS_SCALE_GROWTH, false);
    cr_expect(broken.scale == 65536, "%g", broken.scale);
}

Test(loss_scale, has_a_minimum_and_a_maximum)
{
    struct loss_scale state = after(loss_scale_begin(&rule), 1000, true);
    cr_expect(state.scale == LOSS_SCALE_LEAST && state.good_steps == 0);
    cr_expect(after(state, LOSS_SCALE_GROWTH, false).scale == 2 * LOSS_SCALE_LEAST);
    state = after(state, 100 * LOSS_SCALE_GROWTH, false);
    cr_expect(state.scale == LOSS_SCALE_MOST && state.good_steps == 0);
}

Test(loss_scale, follows_other_rules)
{
    const struct loss_scale_rule other = {.begin = 1024, .growth = 1.5f, .backoff = 0.25f, .steps = 3};
    struct loss_scale state = loss_scale_begin(&other);
    for (uint32_t i = 0; i < 3; i++)
        loss_scale_step(&other, &state, false);
    cr_expect(state.scale == 1536 && state.good_steps == 0, "%g", state.scale);
    loss_scale_step(&other, &state, true);
    cr_expect(state.scale == 384 && state.good_steps == 0, "%g", state.scale);
}

/* ---- The trainer ---- */

/* State of an engine that adds simulated overflow to the reference: the next `left` steps change no parameter
 * and are counted as skipped. */
static struct {
    uint32_t left;
    uint64_t skipped;
    struct loss_scale now, given;
} scaling;

static enum status set_scaled(void *state, const struct train_state *from)
{
    scaling.given = from->scale;
    scaling.now = from->scale.scale > 0 ? from->scale : loss_scale_begin(&rule);
    return engine_naive.set(state, from);
}

static enum status get_scaled(void *state, struct train_state *into)
{
    into->scale = scaling.now;
    return engine_naive.get(state, into);
}

static enum status steps_scaled(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++) {
        bool overflows = scaling.left > 0;
        loss_scale_step(&rule, &scaling.now, overflows);
        scaling.left -= overflows;
        scaling.skipped += overflows;
        if (!overflows)
            TRY(engine_naive.steps(state, epoch, i, 1));
    }
    return STATUS_OK;
}

static enum status totals_scaled(void *state, struct train_totals *totals)
{
    TRY(engine_naive.totals(state, totals));
    totals->skipped = scaling.skipped;
    scaling.skipped = 0;
    return STATUS_OK;
}

static struct engine scaled_engine(void)
{
    struct engine engine = engine_naive;
    engine.scales_loss = true;
    engine.set = set_scaled;
    engine.get = get_scaled;
    engine.steps = steps_scaled;
    engine.totals = totals_scaled;
    return engine;
}

static struct train_job job_of(const struct net *net, uint32_t epochs, const char *folder)
{
    return (struct train_job){.train = net->train,
                              .initial = net->initial,
                              .epochs = epochs,
                              .verify_steps = 6,
                              .checkpoints = folder,
                              .resume = folder != NULL,
                              .keep = 1};
}

static uint64_t wrong_of(const struct engine *engine, const struct net *net, uint32_t overflows)
{
    const struct train_job job = job_of(net, 1, NULL);
    const struct resources resources = {.threads = 1};
    uint64_t wrong;
    void *trainer;
    must(trainer_open(engine, &resources, &job, &trainer));
    scaling.left = overflows;
    must(trainer_verify(NULL, NULL, trainer, 0, &wrong));
    cr_expect(scaling.now.scale == LOSS_SCALE_BEGIN, "verification has changed the scale");
    trainer_close(trainer);
    return wrong;
}

/* Verification must repeat a step that overflows until the step is applied, and then compare it. A step that
 * always overflows must count as wrong. */
Test(loss_scale, verification_compares_applied_steps)
{
    struct net net;
    const struct engine engine = scaled_engine();
    net_open(&net, &engine_naive, &model_tables[1], (struct shape){1, 1, 16, 16}, 4, 40, 9, 0.1f);
    cr_expect_eq(wrong_of(&engine, &net, 0), 0);
    cr_expect_eq(wrong_of(&engine, &net, 5), 0);
    cr_expect_gt(wrong_of(&engine, &net, UINT32_MAX), 0);
    net_close(&net);
}

static struct train_epoch next_epoch(void *trainer)
{
    struct train_epoch epoch;
    struct run_time time;
    must(trainer_run(trainer, 0, &time));
    must(trainer_finish(trainer, &epoch));
    must(trainer_keep(NULL, trainer, ""));
    return epoch;
}

static void *open_trainer(const struct engine *engine, const struct train_job *job)
{
    const struct resources resources = {.threads = 1};
    void *trainer;
    must(trainer_open(engine, &resources, job, &trainer));
    return trainer;
}

Test(loss_scale, epoch_reports_skipped_steps)
{
    struct net net;
    const struct engine engine = scaled_engine();
    net_open(&net, &engine_naive, &model_tables[0], small, 3, 40, 9, 0);
    const struct train_job job = job_of(&net, 2, NULL);
    void *trainer = open_trainer(&engine, &job);
    scaling.left = 3;
    struct train_epoch epoch = next_epoch(trainer);
    cr_expect(epoch.scales_loss && epoch.skipped == 3 && epoch.loss_scale == 8192);
    epoch = next_epoch(trainer);
    cr_expect(epoch.scales_loss && epoch.skipped == 0 && epoch.loss_scale == 8192);
    trainer_close(trainer);
    trainer = open_trainer(&engine_naive, &job);
    epoch = next_epoch(trainer);
    cr_expect(!epoch.scales_loss && epoch.skipped == 0);
    trainer_close(trainer);
    net_close(&net);
}

/* ---- Checkpoints ---- */

#ifdef HAVE_XXHASH

/* The checkpoint stores the scale. An engine with loss scaling resumes with this scale, even if an engine
 * without loss scaling ran in between. */
Test(loss_scale, is_saved_in_checkpoints)
{
    char folder[] = "/tmp/fdsl-scale-XXXXXX", command[PATH_MAX];
    struct net net;
    const struct engine engine = scaled_engine();
    cr_assert_not_null(mkdtemp(folder));
    net_open(&net, &engine_naive, &model_tables[0], small, 3, 40, 9, 0);
    const struct train_job job = job_of(&net, 3, folder);
    void *trainer = open_trainer(&engine, &job);
    cr_expect_eq(scaling.given.scale, 0, "a new run must have no scale");
    scaling.left = 2;
    next_epoch(trainer);
    trainer_close(trainer);
    const struct loss_scale left = scaling.now;
    cr_expect(left.scale == 16384 && left.good_steps == 3);
    trainer = open_trainer(&engine_naive, &job);
    next_epoch(trainer);
    trainer_close(trainer);
    trainer = open_trainer(&engine, &job);
    cr_expect(scaling.given.scale == left.scale && scaling.given.good_steps == left.good_steps);
    trainer_close(trainer);
    net_close(&net);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

#endif
