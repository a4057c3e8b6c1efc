/* Verifies that an engine trains as the oracle (engine_oracle) does: before the first epoch, and in the timed
 * epochs. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/chance.h"
#include "core/text.h"
#include "machine/comm.h"
#include "train/job.h"
#include "train/trainer_parts.h"

/* Number of steps compared before the oracle's state is copied to the engine; docs/train.md explains why. */
#define STRETCH 5
/* Maximum number of attempts at a step that overflows. More than enough: the loss scale reaches its minimum
 * sooner. */
#define VERIFY_TRIES 32
/* Bound of the error of a moving average after STRETCH steps, relative to its norm: a few roundings of a
 * float. */
#define AVERAGE_ROUNDING 2e-7
#define ASTRAY_LISTED    8 /* maximum number of wrong tensors in a warning */

static uint32_t count_astray(const struct found *found)
{
    uint32_t count = 0;
    for (size_t t = 0; t < MODEL_TENSORS_MAX; t++)
        count += found->astray[t];
    return count;
}

static uint64_t found_wrong(const struct found *found)
{
    return (uint64_t)found->wrong_losses + count_astray(found);
}

/* Arrays of the same values at the beginning of a stretch, in the engine and in the oracle. */
struct compared {
    const float *begin, *mine, *theirs;
};

/* Returns the Euclidean norm of the error of a tensor's change, relative to the norm of the oracle's change;
 * NaN if a value is NaN. With `skips`, leaves out idle values. Leaves out values for which the error of
 * `moments` is as large as the moment, unless `moments` is NULL. */
static double drift_of(const struct model_tensor *tensor, bool skips, const struct compared *of,
                       const struct compared *moments)
{
    const size_t idle = tensor->first + tensor->idle_first;
    double off = 0, way = 0;
    for (size_t i = tensor->first; i < tensor->first + tensor->values; i++) {
        if (skips && i >= idle && i < idle + tensor->idle_values)
            continue;
        if (moments &&
            !(fabs((double)moments->mine[i] - moments->theirs[i]) < fabs((double)moments->theirs[i])))
            continue;
        off += ((double)of->mine[i] - of->theirs[i]) * ((double)of->mine[i] - of->theirs[i]);
        way += ((double)of->theirs[i] - of->begin[i]) * ((double)of->theirs[i] - of->begin[i]);
    }
    return off == 0 ? 0 : sqrt(off / way);
}

/* Returns whether the error of a tensor's moving average is larger than a few roundings. In a few steps, an
 * average changes so little that its own rounding also matters. */
static bool average_is_off(const struct model_tensor *tensor, const struct compared *of)
{
    double off = 0, norm = 0;
    for (size_t i = tensor->first; i < tensor->first + tensor->values; i++) {
        off += ((double)of->mine[i] - of->theirs[i]) * ((double)of->mine[i] - of->theirs[i]);
        norm += (double)of->theirs[i] * of->theirs[i];
    }
    return !(sqrt(off) <= AVERAGE_ROUNDING * sqrt(norm));
}

/* Marks the parameter tensors whose change from `begin` differs too much from the oracle's. Adam and AdamW
 * move idle values by whole steps in a direction that only rounding determines.
 *
 * From moments that are zero, Adam's first step moves each value by the learning rate in the direction of its
 * gradient's sign. Where rounding is larger than a gradient, the sign may differ, and the error is two steps.
 * One such value among the n values of a tensor gives a drift of 2 / sqrt(n): 0.25 for a bias of 64 values,
 * although its gradients may differ by only 1 %. The moments are linear in the gradients, so their error
 * shows whether the gradients are right. If it is within the bound, the values of which not even the sign of
 * the moment is certain do not count. A wrong gradient exceeds the bound of the moments; a wrong update
 * exceeds that of the remaining values. */
static void note_astray(struct trainer *trainer, const struct train_state *begin,
                        const struct train_state *mine, const struct train_state *theirs)
{
    const struct train *train = &trainer->job->train;
    const bool skips = train->optimizer.kind != OPTIMIZER_SGD;
    const double most = trainer->bounds.drift;
    const struct compared parameters = {begin->parameters, mine->parameters, theirs->parameters};
    const struct compared moments = {begin->m, mine->m, theirs->m};
    const struct compared averages = {begin->ema, mine->ema, theirs->ema};
    struct found *found = &trainer->found;
    for (uint32_t t = 0; t < train->model->tensor_count; t++) {
        const struct model_tensor *tensor = &train->model->tensors[t];
        const double drift = drift_of(tensor, skips, &parameters, NULL);
        const double moved = drift_of(tensor, skips, &moments, NULL);
        bool astray = !(drift <= most);
        if (astray && skips)
            astray = !(moved <= most) || !(drift_of(tensor, skips, &parameters, &moments) <= most);
        if (!astray && mine->ema)
            astray = !(drift_of(tensor, skips, &averages, NULL) <= most) && average_is_off(tensor, &averages);
        if (astray && !(found->drift[t] > drift)) {
            found->drift[t] = drift;
            found->moment_drift[t] = moved;
        }
        found->astray[t] |= astray;
    }
}

static void compare_losses(struct trainer *trainer, const struct train_totals *mine,
                           const struct train_totals *exact)
{
    const struct engine_bounds *bounds = &trainer->bounds;
    double scale = fmax(exact->loss, bounds->floor * (double)exact->samples);
    trainer->found.losses++;
    trainer->found.wrong_losses +=
        mine->samples != exact->samples || !(fabs(mine->loss - exact->loss) <= bounds->loss * scale);
}

/* Runs one step of the engine. If the engine skipped the step because of overflow, runs it again with the
 * halved loss scale, because a skipped step cannot be compared. At the minimum scale, the step stays
 * skipped. */
static enum status take_step(struct trainer *trainer, uint32_t epoch, uint32_t step,
                             struct train_totals *totals)
{
    for (int tries = 0; tries < VERIFY_TRIES; tries++) {
        TRY(trainer_steps(trainer, epoch, step, 1));
        TRY(trainer_totals(trainer, totals));
        if (totals->skipped == 0)
            break;
    }
    return STATUS_OK;
}

/* Runs one step of the oracle, which trains on the samples of all ranks. Its loss must be finite. */
static enum status take_exact_step(void *oracle, uint32_t epoch, uint32_t step, uint32_t number,
                                   struct train_totals *totals)
{
    TRY(engine_oracle.steps(oracle, epoch, step, 1));
    TRY(engine_oracle.totals(oracle, totals));
    if (!isfinite(totals->loss))
        return status_set(STATUS_FAILED,
                          "--verify: the reference's own loss at step %" PRIu32
                          " is not finite, so nothing can be compared; lower --lr, or use fewer "
                          "--verify-steps",
                          number);
    return STATUS_OK;
}

/* Runs the same steps on both engines, starting from state `begin`. Compares the losses, marks the tensors
 * that differ, and returns both final states in `mine` and `theirs`. */
static enum status compare_stretch(struct trainer *trainer, void *oracle, uint32_t first, uint32_t count,
                                   const struct train_state *begin, struct train_state *mine,
                                   struct train_state *theirs)
{
    uint32_t steps = train_steps(&trainer->train), epoch = trainer->now.history.epochs;
    TRY(engine_oracle.set(oracle, begin));
    TRY(trainer_set(trainer, begin));
    for (uint32_t i = first; i < first + count; i++) {
        struct train_totals own, exact;
        TRY(take_step(trainer, epoch + i / steps, i % steps, &own));
        TRY(comm_agree(take_exact_step(oracle, epoch + i / steps, i % steps, i + 1, &exact)));
        compare_losses(trainer, &own, &exact);
    }
    TRY(trainer_get(trainer, mine));
    TRY(engine_oracle.get(oracle, theirs));
    note_astray(trainer, begin, mine, theirs);
    return trainer_combine_found(&trainer->found);
}

/* Before the first epoch: compares both engines step by step, in stretches. Each stretch starts with the
 * oracle's state at the end of the previous one. Without these restarts, the comparison would measure how
 * training amplifies rounding (docs/train.md), which is not an error of the engine. */
static enum status compare_steps(struct trainer *trainer, void *oracle, struct train_state *states)
{
    const uint32_t count = trainer->job->verify_steps, done = trainer->now.partial.steps;
    const struct train_state *begin = &trainer->now.state;
    for (uint32_t first = 0; first < count; first += STRETCH) {
        uint32_t left = count - first;
        struct train_state *theirs = &states[1 + first / STRETCH % 2];
        TRY(compare_stretch(trainer, oracle, done + first, left < STRETCH ? left : STRETCH, begin, &states[0],
                            theirs));
        begin = theirs;
    }
    return trainer_set(trainer, &trainer->now.state);
}

/* ---- Verifying a timed epoch ---- */

/* The repeated epoch: steps done, their totals, and the state after them. */
struct replay {
    uint32_t step;
    struct train_totals totals;
    struct train_state *at;
};

/* Returns the beginning of the repetition: the epoch's first step, or the step at which this run resumed. */
static struct replay begin_replay(const struct trainer *trainer, struct train_state *at)
{
    const struct train_partial *begin = &trainer->now.partial;
    return (struct replay){.step = begin->steps, .totals = begin->totals, .at = at};
}

/* Advances the repeated epoch to the state before `step`. If the epoch is already past `step`, restarts it
 * first. Passes at most STRETCH steps to the engine per call. The timed epoch may have run more steps per
 * call; the results must be the same. */
static enum status go_to(struct trainer *trainer, struct replay *replay, uint32_t step)
{
    const struct train_partial *begin = &trainer->now.partial;
    if (step < replay->step)
        *replay = begin_replay(trainer, replay->at);
    TRY(trainer_set(trainer, replay->step > begin->steps ? replay->at : &trainer->now.state));
    while (replay->step < step) {
        struct train_totals more;
        uint32_t left = step - replay->step, count = left < STRETCH ? left : STRETCH;
        TRY(trainer_steps(trainer, trainer->now.history.epochs, replay->step, count));
        TRY(trainer_totals(trainer, &more));
        replay->step += count;
        replay->totals.loss += more.loss;
        replay->totals.samples += more.samples;
    }
    return trainer_get(trainer, replay->at);
}

/* Compares one step with the oracle, starting from the state that the epoch had before this step. After many
 * training steps, rounding occasionally changes a step by more than the bounds (docs/train.md). In that case
 * the neighbouring step decides, because a real fault would show there as well. */
static enum status compare_step(struct trainer *trainer, void *oracle, struct replay *replay, uint32_t step,
                                struct train_state *scratch)
{
    uint32_t steps = train_steps(&trainer->train);
    uint32_t neighbour = step > trainer->now.partial.steps ? step - 1 : step + 1 < steps ? step + 1 : step;
    struct found before = trainer->found;
    TRY(go_to(trainer, replay, step));
    TRY(compare_stretch(trainer, oracle, step, 1, replay->at, &scratch[0], &scratch[1]));
    if (found_wrong(&trainer->found) == found_wrong(&before))
        return STATUS_OK;
    trainer->found = before;
    TRY(go_to(trainer, replay, neighbour));
    return compare_stretch(trainer, oracle, neighbour, 1, replay->at, &scratch[0], &scratch[1]);
}

/* Marks the tensors that are not bit-identical. */
static void note_different(struct trainer *trainer, const struct train_state *one,
                           const struct train_state *other)
{
    const struct model *model = trainer->job->train.model;
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        trainer->found.astray[t] |= memcmp(one->parameters + tensor->first, other->parameters + tensor->first,
                                           tensor->values * sizeof *one->parameters) != 0 ||
                                    (one->ema && memcmp(one->ema + tensor->first, other->ema + tensor->first,
                                                        tensor->values * sizeof *one->ema) != 0);
    }
}

/* Repeats the timed epoch. Engines are deterministic, so the final parameters must be bit-identical. The loss
 * must be the same within bounds.loss, because the replay sums it in other groups of steps. Also compares two
 * steps with the oracle: one drawn at random, and the last one, whose batch may be short. */
static enum status compare_epoch(struct trainer *trainer, void *oracle, struct train_state *states)
{
    const uint32_t steps = train_steps(&trainer->train);
    const uint32_t begin = trainer->now.partial.steps;
    struct replay replay = begin_replay(trainer, &states[1]);
    trainer->drawn = begin + (uint32_t)chance_below(steps - begin);
    TRY(comm_spread(&trainer->drawn, sizeof trainer->drawn));
    display_wait(trainer->display);
    TRY(trainer_get(trainer, &states[0]));
    TRY(compare_step(trainer, oracle, &replay, trainer->drawn, &states[2]));
    TRY(compare_step(trainer, oracle, &replay, steps - 1, &states[2]));
    TRY(go_to(trainer, &replay, steps));
    note_different(trainer, &states[0], replay.at);
    compare_losses(trainer, &trainer->done.totals, &replay.totals);
    TRY(trainer_combine_found(&trainer->found));
    return trainer_set(trainer, &states[0]);
}

enum status trainer_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                           uint64_t *wrong)
{
    (void)input, (void)variant;
    struct trainer *trainer = state;
    const struct train *train = &trainer->train;
    struct train alone = *train; /* the oracle trains on the samples of all ranks */
    const struct resources all = job_all_threads();
    struct train_state states[4] = {{0}};
    bool room = true;
    void *oracle = NULL;
    trainer->found = (struct found){0};
    trainer->drawn = UINT32_MAX;
    alone.rank = alone.ranks = alone.share_max = 0;
    alone.shares = NULL;
    alone.exchange = NULL;
    enum status status = engine_oracle.open(&alone, &all, &oracle);
    for (size_t i = 0; i < COUNT_OF(states); i++)
        room &= train_state_for(train, &states[i]);
    if (status == STATUS_OK && !room)
        status = status_set(STATUS_EXHAUSTED, "out of memory to verify");
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = (number > 0 ? compare_epoch : compare_steps)(trainer, oracle, states);
    *wrong = found_wrong(&trainer->found);
    for (size_t i = 0; i < COUNT_OF(states); i++)
        train_state_free(&states[i]);
    if (oracle)
        engine_oracle.close(oracle);
    return status;
}

/* Warns about the first few tensors whose change was wrong, with their errors. */
static void warn_astray(const struct trainer *trainer)
{
    const struct found *found = &trainer->found;
    char text[512] = "";
    for (uint32_t t = 0, listed = 0; t < trainer->job->train.model->tensor_count && listed < ASTRAY_LISTED;
         t++)
        if (found->astray[t] && found->drift[t] != 0) {
            text_join(text, sizeof text, "; ", "%s %.3g (moments %.3g)",
                      trainer->job->train.model->tensors[t].name, found->drift[t], found->moment_drift[t]);
            listed++;
        }
    if (*text)
        status_warn("--verify: errors of these tensors' changes, relative to the reference's changes, exceed "
                    "%.3g: %s",
                    trainer->bounds.drift, text);
}

void trainer_verdict(const void *input, void *state, char *text, size_t size)
{
    (void)input;
    const struct trainer *trainer = state;
    const struct found *found = &trainer->found;
    char where[80] = "";
    warn_astray(trainer);
    if (trainer->drawn != UINT32_MAX)
        snprintf(where, sizeof where,
                 " of epoch %" PRIu32 " (step %" PRIu32 ", drawn at random, and the last step)",
                 trainer->now.history.epochs + 1, trainer->drawn + 1);
    snprintf(text, size, "%" PRIu32 " of %" PRIu32 " losses and %" PRIu32 " of %" PRIu32 " tensors%s",
             found->wrong_losses, found->losses, count_astray(found), trainer->job->train.model->tensor_count,
             where);
}
