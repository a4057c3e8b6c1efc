/* Stops of a training run within an epoch and at its end: tests, rows of --log, and checkpoints. */
#include <math.h>
#include <stdlib.h>

#include "machine/comm.h"
#include "train/trainer_parts.h"

void logits_judge(const float *logits, const uint32_t *labels, uint32_t count, uint32_t classes, double *loss,
                  double *accuracy)
{
    uint32_t right = 0;
    *loss = 0;
    for (uint32_t i = 0; i < count; i++) {
        const float *of = logits + (size_t)i * classes;
        uint32_t best = 0;
        double sum = 1; /* exp(0), for the largest logit */
        for (uint32_t k = 1; k < classes; k++)
            if (of[k] > of[best])
                best = k;
        for (uint32_t k = 0; k < classes; k++)
            sum += k == best ? 0 : exp((double)of[k] - of[best]);
        *loss += log(sum) + of[best] - of[labels[i]];
        right += best == labels[i] && !isnan(sum + of[best]); /* a NaN counts as wrong */
    }
    *loss /= count;
    *accuracy = (double)right / count;
}

enum status trainer_test(struct trainer *trainer, double *loss, double *accuracy)
{
    const struct train *train = &trainer->train;
    const struct data_set *set = &train->data->sets[DATA_TEST];
    TRY(trainer->engine->evaluate(trainer->state, DATA_TEST, 0, set->count, trainer->logits));
    logits_judge(trainer->logits, set->labels, set->count, train->model->classes, loss, accuracy);
    return STATUS_OK;
}

enum status trainer_log_part(struct trainer *trainer, const struct train_epoch *tested)
{
    const struct train *train = &trainer->train;
    const uint64_t epochs = trainer->now.history.epochs, steps = train_steps(train),
                   samples = train->data->sets[DATA_TRAIN].count, full = steps * train->batch;
    if (!trainer->log)
        return STATUS_OK;
    const struct step_row row = {.epoch = (uint32_t)epochs + 1,
                                 .step = epochs * steps + trainer->done.steps,
                                 .samples_seen = epochs * (full < samples ? full : samples) +
                                                 trainer->done.totals.samples,
                                 .totals = trainer->part,
                                 .steps_s = trainer->part_s,
                                 .test_loss = tested->test_loss,
                                 .test_accuracy = tested->test_accuracy};
    return step_log_add(trainer->log, &row);
}

/* Writes a checkpoint within the epoch. trainer->now keeps the state with which the epoch began, which
 * --verify and the search for a bad layer need. */
static enum status keep_within(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    trainer->within.scale =
        trainer->now.state.scale; /* engines that do not scale the loss leave it unchanged */
    TRY(trainer_get(trainer, &trainer->within));
    if (comm_rank() > 0)
        return STATUS_OK;
    TRY(trainer_note_shares(trainer));
    struct checkpoint within = trainer->now;
    within.partial = trainer->done;
    within.state = trainer->within;
    return checkpoint_write(job->checkpoints, job->keep, &within);
}

static bool is_due(uint32_t every, uint64_t step)
{
    return every > 0 && step % every == 0;
}

enum status trainer_stop(struct trainer *trainer, uint64_t step)
{
    const struct train_job *job = trainer->job;
    struct train_epoch tested = {.test_loss = NAN, .test_accuracy = NAN};
    enum status status = STATUS_OK;
    if (is_due(job->test_steps, step))
        status = trainer_test(trainer, &tested.test_loss, &tested.test_accuracy);
    TRY(comm_agree(status == STATUS_OK ? trainer_log_part(trainer, &tested) : status));
    return job->checkpoints && is_due(job->checkpoint_steps, step) ? comm_agree(keep_within(trainer))
                                                                   : STATUS_OK;
}

uint64_t trainer_next_stop(const struct train_job *job, uint64_t step, uint64_t end)
{
    const uint32_t every[] = {job->checkpoint_steps, job->test_steps, job->log_steps};
    for (size_t i = 0; i < COUNT_OF(every); i++)
        if (every[i] && (step / every[i] + 1) * every[i] < end)
            end = (step / every[i] + 1) * every[i];
    return end;
}
