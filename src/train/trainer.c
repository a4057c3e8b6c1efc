#include "train/trainer_parts.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/timer.h"
#include "machine/comm.h"
#include "train/display.h"
#include "train/export.h"

void trainer_close(void *state)
{
    struct trainer *trainer = state;
    display_close(trainer->display);
    if (trainer->state)
        trainer->engine->close(trainer->state);
    step_log_close(trainer->log);
    train_state_free(&trainer->within);
    checkpoint_free(&trainer->now);
    free(trainer->logits);
    checkpoint_unlock(trainer->lock);
    trainer_leave(trainer);
    free(trainer);
}

/* ---- Beginning ---- */

/* Sets trainer->now to the initial parameters, or to the checkpoint to resume. */
static enum status take_beginning(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    const struct model *model = job->train.model;
    struct checkpoint *now = &trainer->now;
    snprintf(now->model, sizeof now->model, "%s", model->name);
    now->input = model->input;
    now->classes = model->classes;
    memcpy(now->scale, job->train.data->scale, sizeof now->scale);
    memcpy(now->offset, job->train.data->offset, sizeof now->offset);
    now->history = (struct train_history){.to_98_s = -1, .to_99_s = -1};
    memcpy(now->hashes, job->train.data->hashes, sizeof now->hashes);
    now->identity = strdup(job->identity);
    now->data = strdup(job->data ? job->data : "");
    now->samples = strdup(job->samples ? job->samples : "");
    now->row = strdup("");
    now->arena_values = model->arena_values;
    trainer->logits = malloc((size_t)job->train.data->sets[DATA_TEST].count * model->classes * sizeof(float));
    bool room = train_state_for(&job->train, &now->state);
    if (job->checkpoints && job->checkpoint_steps)
        room &= train_state_for(&job->train, &trainer->within);
    TRY(ALLOCATED(room && now->identity && now->data && now->samples && now->row && trainer->logits,
                  "out of memory for the parameters"));
    memcpy(now->state.parameters, job->initial, model->arena_values * sizeof *job->initial);
    if (now->state.ema)
        memcpy(now->state.ema, job->initial, model->arena_values * sizeof *job->initial);
    return trainer_take_folder(trainer);
}

/* Opens the engine, and sets its state to the state of rank 0, with which training begins. */
static enum status begin(struct trainer *trainer, const struct resources *resources)
{
    enum status status = trainer_join(trainer, resources);
    if (status == STATUS_OK)
        status = take_beginning(trainer);
    TRY(comm_agree(status));
    TRY(trainer_take_shares(trainer, resources));
    TRY(comm_agree(trainer->engine->open(&trainer->train, resources, &trainer->state)));
    TRY(trainer_share_state(trainer));
    TRY(trainer_set(trainer, &trainer->now.state));
    if (trainer->job->log_path && comm_rank() == 0)
        status = step_log_open(trainer->job->log_path, trainer->engine, &trainer->job->train, resources,
                               comm_size(), trainer->job->resume, &trainer->log);
    return comm_agree(status);
}

enum status trainer_open(const struct engine *engine, const struct resources *resources, const void *job,
                         void **state)
{
    struct trainer *trainer = *state = calloc(1, sizeof *trainer);
    TRY(comm_agree(ALLOCATED(trainer, "out of memory")));
    trainer->job = job;
    trainer->engine = engine;
    trainer->lock = -1;
    TRY(begin(trainer, resources));
    TRY(trainer_check_first_step(trainer->job, &trainer->now));
    if (trainer->job->step_path) {
        TRY(export_step(&trainer->train, engine, trainer->state, &trainer->now.state, trainer->job->identity,
                        trainer->job->step_path));
        status_say("the first step was written to %s", trainer->job->step_path);
    }
    trainer->display = display_open(engine, trainer->state, &trainer->train, trainer->job->epochs);
    return STATUS_OK;
}

/* ---- Running an epoch ---- */

bool trainer_more(const void *input, void *state)
{
    (void)input;
    const struct trainer *trainer = state;
    return trainer->now.history.epochs < trainer->job->epochs;
}

/* Repeats the steps that this run trained in this epoch before `step`. Engines are deterministic, so the
 * state before `step` is the same again. Collective. */
static enum status go_before(struct trainer *trainer, uint32_t epoch, uint32_t step,
                             struct train_state *before)
{
    struct train_totals unused;
    enum status status = ALLOCATED(train_state_new(trainer->train.model->arena_values, before),
                                   "out of memory to find the non-finite values");
    TRY(comm_agree(status));
    TRY(trainer_set(trainer, &trainer->now.state));
    const uint32_t begin = trainer->now.partial.steps;
    if (step > begin)
        TRY(trainer_steps(trainer, epoch, begin, step - begin));
    TRY(trainer->engine->totals(trainer->state, &unused));
    return trainer->engine->get(trainer->state, before);
}

/* Returns whether the reference trains on the same images as the engine. Images of the generators bat and
 * gbase differ from those of the reference. */
static bool has_images_of_reference(const struct train *train)
{
    const char *generator = train->generator ? train->generator : "";
    return strcmp(generator, "bat") != 0 && strcmp(generator, "gbase") != 0;
}

/* Finds the layer that made the loss non-finite. Restores the state before `bad_step`, then uses the
 * reference to find the first layer with a non-finite output. Writes what it found, or why it found nothing,
 * to `found`. Collective. */
static enum status find_bad_layer(struct trainer *trainer, uint64_t bad_step, char *found, size_t size)
{
    const uint32_t steps = train_steps(&trainer->train), epoch = (uint32_t)(bad_step / steps),
                   step = (uint32_t)(bad_step % steps);
    const char *layer = "the loss";
    struct train_state before = {0};
    enum status status = go_before(trainer, epoch, step, &before);
    if (status == STATUS_OK && trainer->own_bad_step == bad_step)
        status = naive_find_bad_layer(&trainer->train, &before, epoch, step, &layer);
    train_state_free(&before);
    if (status == STATUS_OK)
        snprintf(found, size, "first non-finite result: %s; ", layer);
    else
        snprintf(found, size, "the first layer with a non-finite result could not be found (%.400s); ",
                 status_text());
    return status;
}

/* Reports the step whose loss was not finite and, if the reference has the same images, the layer. Returns an
 * error on a rank whose own samples had this loss, or whose search for the layer failed. */
static enum status explain_bad_loss(struct trainer *trainer, uint64_t bad_step)
{
    const struct train *train = &trainer->train;
    const uint32_t steps = train_steps(train);
    enum status status = STATUS_OK;
    char found[512] = "";
    if (has_images_of_reference(train))
        status = find_bad_layer(trainer, bad_step, found, sizeof found);
    if (status == STATUS_OK && trainer->own_bad_step != bad_step)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "epoch %u, step %u of %u: the loss is not finite; %slower --lr, or continue with "
                      "--allow-nan",
                      (uint32_t)(bad_step / steps) + 1, (uint32_t)(bad_step % steps) + 1, steps, found);
}

/* Adds the steps of one call of the engine to the current epoch. */
static void add_part(struct train_partial *done, const struct train_totals *part, uint32_t steps)
{
    struct train_totals *sums = &done->totals;
    if (done->steps == 0) {
        *sums = *part;
    } else {
        sums->loss += part->loss;
        sums->correct += part->correct;
        sums->samples += part->samples;
        sums->skipped += part->skipped;
        sums->norms += part->norms;
        sums->normed += part->normed;
        sums->data_s = sums->data_s < 0 || part->data_s < 0 ? -1 : sums->data_s + part->data_s;
        sums->generate_s += part->generate_s;
        sums->bad_step = part->bad_step < sums->bad_step ? part->bad_step : sums->bad_step;
    }
    done->steps += steps;
}

/* Runs `count` steps of the current epoch in one call of the engine. */
static enum status make_part(struct trainer *trainer, uint32_t count)
{
    struct train_partial *done = &trainer->done;
    struct exchange *exchange = trainer->train.exchange;
    double begin_s = timer_now_s();
    if (exchange)
        exchange->spent_s = 0;
    TRY(trainer_steps(trainer, trainer->now.history.epochs, done->steps, count));
    TRY(trainer_totals(trainer, &trainer->part));
    trainer->part_s = timer_now_s() - begin_s;
    add_part(done, &trainer->part, count);
    done->epoch_s += trainer->part_s;
    display_pass(trainer->display, &done->totals, done->epoch_s);
    done->exchange_s += exchange ? exchange->spent_s : 0;
    if (trainer->part.bad_step != TRAIN_FINE && !trainer->job->allow_nan)
        return comm_agree(explain_bad_loss(trainer, trainer->part.bad_step));
    return STATUS_OK;
}

/* Runs the steps of an epoch, or those that remain after a checkpoint within it. Without stops, they are one
 * call of the engine. */
static enum status make_steps(struct trainer *trainer)
{
    const uint64_t steps = train_steps(&trainer->train), begin = trainer->now.history.epochs * steps;
    const struct train_partial *done = &trainer->done;
    trainer->done = trainer->now.partial;
    for (;;) {
        const uint64_t step = begin + done->steps;
        display_pass(trainer->display, &done->totals, done->epoch_s);
        TRY(make_part(trainer, (uint32_t)(trainer_next_stop(trainer->job, step, begin + steps) - step)));
        if (done->steps == steps)
            return STATUS_OK;
        TRY(trainer_stop(trainer, begin + done->steps));
    }
}

enum status trainer_run(void *state, uint64_t number, struct run_time *time)
{
    struct trainer *trainer = state;
    (void)number;
    double begin_s = timer_now_s();
    trainer_use_shares(trainer);
    display_begin(trainer->display, trainer->now.history.epochs);
    enum status status = make_steps(trainer);
    display_end(trainer->display);
    if (trainer->job->pipeline.stages)
        trainer->piped_epoch = pipeline_measured(trainer->state);
    time->other_s = trainer->done.epoch_s - (timer_now_s() - begin_s);
    return status;
}

enum status trainer_probe(void *state)
{
    struct trainer *trainer = state;
    struct train_totals unused;
    TRY(trainer_steps(trainer, 0, 0, 1));
    return trainer_totals(trainer, &unused);
}

enum status trainer_fetch(void *state, void *result)
{
    (void)state, (void)result;
    return STATUS_OK;
}

/* ---- After an epoch ---- */

/* Tests the averaged parameters: passes them to the engine as its parameters, and afterwards restores the
 * engine's state. */
static enum status test_average(struct trainer *trainer, struct train_epoch *epoch)
{
    struct train_state averaged = trainer->now.state;
    averaged.parameters = averaged.ema;
    TRY(trainer->engine->set(trainer->state, &averaged));
    TRY(trainer_test(trainer, &epoch->ema_loss, &epoch->ema_accuracy));
    return trainer->engine->set(trainer->state, &trainer->now.state);
}

void train_note_epoch(struct train_history *history, double epoch_s, double accuracy)
{
    history->epochs++;
    history->trained_s += epoch_s;
    if (history->to_98_s < 0 && accuracy >= 0.98)
        history->to_98_s = history->trained_s;
    if (history->to_99_s < 0 && accuracy >= 0.99)
        history->to_99_s = history->trained_s;
}

enum status trainer_finish(void *state, struct train_epoch *epoch)
{
    struct trainer *trainer = state;
    const struct train_job *job = trainer->job;
    const struct train_totals *totals = &trainer->done.totals;
    const struct exchange *exchange = trainer->train.exchange;
    struct train_history *history = &trainer->now.history;
    uint32_t steps = train_steps(&job->train);
    uint64_t last = ((uint64_t)history->epochs + 1) * steps - 1;
    display_wait(trainer->display);
    *epoch = (struct train_epoch){.steps = steps,
                                  .loss = totals->loss / (double)totals->samples,
                                  .train_accuracy = (double)totals->correct / (double)totals->samples,
                                  .gradient_norm = totals->norms / (double)totals->normed,
                                  .ema_loss = NAN,
                                  .ema_accuracy = NAN,
                                  .rate = schedule_rate(&job->train.schedule, last),
                                  .scales_loss = trainer->engine->scales_loss,
                                  .skipped = totals->skipped,
                                  .data_s = totals->data_s,
                                  .generate_s = totals->generate_s,
                                  .epoch_s = trainer->done.epoch_s,
                                  .exchange = exchange ? exchange->method->name : "",
                                  .exchange_s = trainer->done.exchange_s,
                                  .memory_bytes = trainer->engine->memory_bytes(trainer->state)};
    double slowest_s = trainer->done.epoch_s;
    enum status status = trainer_test(trainer, &epoch->test_loss, &epoch->test_accuracy);
    TRY(comm_agree(status == STATUS_OK ? trainer_log_part(trainer, epoch) : status));
    TRY(trainer_get(trainer, &trainer->now.state));
    if (trainer->now.state.ema)
        TRY(comm_agree(test_average(trainer, epoch)));
    TRY(trainer_check_parameters(trainer));
    TRY(trainer_rebalance(trainer));
    TRY(trainer_report_stage(trainer, epoch));
    TRY(comm_max(&slowest_s, 1));
    epoch->loss_scale = trainer->now.state.scale.scale;
    train_note_epoch(history, slowest_s, epoch->test_accuracy);
    trainer->now.partial = (struct train_partial){0};
    epoch->history = *history;
    return STATUS_OK;
}

enum status trainer_keep(const void *input, void *state, const char *rows)
{
    (void)input;
    struct trainer *trainer = state;
    const struct train_job *job = trainer->job;
    if (!job->checkpoints)
        return STATUS_OK;
    char *copy = strdup(rows);
    TRY(ALLOCATED(copy, "out of memory for the rows"));
    free(trainer->now.row);
    trainer->now.row = copy;
    TRY(trainer_note_shares(trainer));
    return checkpoint_write(job->checkpoints, job->keep, &trainer->now);
}

const char *trainer_kept(const void *state)
{
    return ((const struct trainer *)state)->now.row;
}

enum status trainer_end(const void *input, void *state, uint64_t runs)
{
    (void)input;
    const struct trainer *trainer = state;
    const struct train_job *job = trainer->job;
    if (job->export_path && comm_rank() == 0)
        TRY(export_parameters(&job->train, checkpoint_parameters(&trainer->now), job->identity,
                              job->export_path));
    if (runs == 0 && trainer->now.history.epochs > job->epochs)
        status_say("the checkpoint already has %u epoch%s, but --epochs is %u%s%s",
                   trainer->now.history.epochs, trainer->now.history.epochs == 1 ? "" : "s", job->epochs,
                   job->export_path ? ": exported to " : ": nothing to do",
                   job->export_path ? job->export_path : "");
    else if (runs == 0)
        status_say("%u of %u epochs are done%s%s", trainer->now.history.epochs, job->epochs,
                   job->export_path ? ": exported to " : ": nothing to do",
                   job->export_path ? job->export_path : "");
    return STATUS_OK;
}
