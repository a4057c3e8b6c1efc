/* Checks, locks and reads the folder of --checkpoint (trainer_parts.h). Implements the checks of --dry-run
 * (trainer.h). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "train/export.h"
#include "train/job.h"
#include "train/trainer_parts.h"

/* ---- Whether training can continue from a checkpoint ---- */

/* Checks that a checkpoint within an epoch is within this training run. The number of steps is not
 * compared if the batch is not known yet. */
static enum status check_point(const struct train_job *job, const struct checkpoint *checkpoint,
                               bool batch_known)
{
    const uint32_t steps = train_steps(&job->train), done = checkpoint->partial.steps;
    if (batch_known && done >= steps)
        return status_set(STATUS_FAILED,
                          "--resume: the latest checkpoint in %s is damaged: it was written after %" PRIu32
                          " steps of an epoch that has %" PRIu32 "; delete it",
                          job->checkpoints, done, steps);
    return done == 0 || checkpoint->history.epochs < job->epochs
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--resume: the latest checkpoint in %s is within epoch %" PRIu32
                            ", but --epochs is %" PRIu32 "; raise --epochs, or delete this checkpoint",
                            job->checkpoints, checkpoint->history.epochs + 1, job->epochs);
}

/* Reads the latest checkpoint in the folder, if there is one, and checks that training can continue from it.
 * The caller frees it if `*found` is true. */
static enum status read_latest(const struct train_job *job, bool batch_known, struct checkpoint *latest,
                               bool *found)
{
    TRY(checkpoint_read_latest(job->checkpoints, true, latest, found));
    enum status status = *found ? trainer_check_same(job, latest, batch_known) : STATUS_OK;
    if (*found && status == STATUS_OK)
        status = check_point(job, latest, batch_known);
    if (status != STATUS_OK) {
        checkpoint_free(latest);
        *found = false;
    }
    return status;
}

static enum status refuse_full(const struct train_job *job)
{
    bool full;
    TRY(checkpoint_exists(job->checkpoints, &full));
    return !full ? STATUS_OK
                 : status_set(STATUS_USAGE,
                              "--checkpoint %s holds checkpoints already: add --resume to continue, or name "
                              "another folder",
                              job->checkpoints);
}

/* ---- Runs ---- */

static enum status resume(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    struct checkpoint latest;
    bool found = false;
    TRY(read_latest(job, true, &latest, &found));
    if (!found)
        return STATUS_OK;
    /* Keep this run's --data: the same samples may have moved to another path. */
    free(latest.data);
    free(latest.samples);
    latest.data = trainer->now.data;
    latest.samples = trainer->now.samples;
    trainer->now.data = trainer->now.samples = NULL;
    checkpoint_free(&trainer->now);
    trainer->now = latest;
    if (latest.history.epochs < job->epochs && latest.partial.steps)
        status_say("%u of %u epochs and %u of %u steps are done: continuing", latest.history.epochs,
                   job->epochs, latest.partial.steps, train_steps(&job->train));
    else if (latest.history.epochs < job->epochs)
        status_say("%u of %u epochs are done: continuing", latest.history.epochs, job->epochs);
    return STATUS_OK;
}

enum status trainer_take_folder(struct trainer *trainer)
{
    const struct train_job *job = trainer->job;
    if (!job->checkpoints || comm_rank() > 0)
        return STATUS_OK;
    TRY(checkpoint_lock(job->checkpoints, true, &trainer->lock));
    return job->resume ? resume(trainer) : refuse_full(job);
}

enum status trainer_check_first_step(const struct train_job *job, const struct checkpoint *latest)
{
    return !job->step_path || (latest->history.epochs == 0 && latest->partial.steps == 0)
               ? STATUS_OK
               : status_set(STATUS_USAGE, "--export-step writes the first step, but --resume continues after "
                                          "it; drop one of the two");
}

/* ---- --dry-run ---- */

/* Checks the folder, which the caller has locked. */
static enum status check_folder(const struct train_job *job)
{
    struct checkpoint latest;
    bool found = false;
    if (!job->resume)
        return refuse_full(job);
    TRY(read_latest(job, !job->largest, &latest, &found));
    if (!found) {
        status_say("--checkpoint %s has no checkpoint: a run begins with the first epoch", job->checkpoints);
        return STATUS_OK;
    }
    const uint32_t epochs = latest.history.epochs, steps = latest.partial.steps;
    enum status status = trainer_check_first_step(job, &latest);
    checkpoint_free(&latest);
    if (status == STATUS_OK)
        status_say("--checkpoint %s: %" PRIu32 " of %" PRIu32 " epochs%s are done%s", job->checkpoints,
                   epochs, job->epochs, steps ? " and a part of the next" : "",
                   epochs < job->epochs ? ": a run continues" : ": nothing to do");
    return status;
}

/* Writes the file of --export-step by setting up the variant, with all other files turned off. */
static enum status write_first_step(const struct train_job *job, const struct variant *variant,
                                    const struct resources *resources)
{
    struct train_job alone = *job;
    void *state = NULL;
    alone.checkpoints = alone.log_path = NULL;
    alone.resume = false;
    if (job->largest)
        return status_set(STATUS_USAGE,
                          "--export-step with --dry-run needs a known batch; give --batch a number");
    enum status status = variant->setup(resources, &alone, &state);
    if (state)
        variant->teardown(state);
    return status;
}

enum status trainer_check(const void *input, const struct variant *variant, const struct resources *resources)
{
    const struct train_job *job = input;
    int lock = -1;
    if (job->checkpoints) {
        TRY(checkpoint_lock(job->checkpoints, false, &lock));
        enum status status = check_folder(job);
        checkpoint_unlock(lock);
        TRY(status);
    }
    return job->step_path ? write_first_step(job, variant, resources) : STATUS_OK;
}
