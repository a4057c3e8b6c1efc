/* Checks and takes the folder of --checkpoint (trainer_parts.h), and the checks of --dry-run (trainer.h). */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "train/export.h"
#include "train/job.h"
#include "train/trainer_parts.h"

/* ---- Whether a checkpoint belongs to this training run ---- */

/* Finds the word "name=value" in `text`, whose words are separated by spaces. Returns NULL if there is none.
 * The name is the first `name_length` bytes of `word`. `*length` becomes the length of "name=value". */
static const char *word_of(const char *text, const char *word, size_t name_length, size_t *length)
{
    while (*text) {
        *length = strcspn(text, " ");
        if (*length > name_length && strncmp(text, word, name_length + 1) == 0)
            return text;
        text += *length + (text[*length] == ' ');
    }
    return NULL;
}

/* Describes the first option whose value differs between the two texts; returns false if there is none. */
static bool find_other(const char *mine, const char *theirs, char *words, size_t size)
{
    while (*mine) {
        size_t length = strcspn(mine, " "), name = strcspn(mine, "= "), other;
        const char *found = word_of(theirs, mine, name, &other);
        if (found && (other != length || strncmp(mine, found, length) != 0)) {
            snprintf(words, size, "%.*s in the checkpoint, %.*s now", (int)other, found,
                     (int)(length - name - 1), mine + name + 1);
            return true;
        }
        mine += length + (mine[length] == ' ');
    }
    return false;
}

/* Describes the first option of `mine` that is missing in `theirs`; returns false if there is none. */
static bool find_lacking(const char *mine, const char *theirs, const char *there, const char *here,
                         char *words, size_t size)
{
    while (*mine) {
        size_t length = strcspn(mine, " "), name = strcspn(mine, "= "), other;
        if (!word_of(theirs, mine, name, &other)) {
            snprintf(words, size, "no %.*s %s, %.*s %s", (int)name, mine, there, (int)length, mine, here);
            return true;
        }
        mine += length + (mine[length] == ' ');
    }
    return false;
}

/* Names the options of the samples that differ. If none differs, the files or the generator have changed. */
static enum status refuse_samples(const struct train_job *job, const struct checkpoint *checkpoint)
{
    char words[512];
    if (!job_differences(checkpoint, job->data, job->samples, NULL, words, sizeof words))
        snprintf(words, sizeof words, "the samples of --data %.400s have changed", job->data);
    return status_set(
        STATUS_USAGE,
        "--resume: the checkpoints in %s belong to other samples: %s; give the same samples, or "
        "name another folder with --checkpoint",
        job->checkpoints, words);
}

/* Checks that a checkpoint belongs to this training run. The options are not compared if the batch is not
 * known yet. */
static enum status check_same(const struct train_job *job, const struct checkpoint *checkpoint,
                              bool batch_known)
{
    const struct model *model = job->train.model;
    char words[256];
    if (strcmp(checkpoint->model, model->name) != 0 || checkpoint->arena_values != model->arena_values ||
        checkpoint->classes != model->classes ||
        memcmp(&checkpoint->input, &model->input, sizeof model->input) != 0)
        return status_set(STATUS_USAGE,
                          "--resume: the checkpoints in %s belong to another model: %s for samples of "
                          "%ux%ux%ux%u (channels, depth, height, width) and %u classes",
                          job->checkpoints, checkpoint->model, checkpoint->input.channels,
                          checkpoint->input.depth, checkpoint->input.height, checkpoint->input.width,
                          checkpoint->classes);
    if (!batch_known)
        return STATUS_OK;
    /* If an option is missing, usually the value of another option is the cause. So report differing values
     * first. */
    if (!find_other(job->identity, checkpoint->identity, words, sizeof words) &&
        !find_lacking(job->identity, checkpoint->identity, "in the checkpoint", "now", words, sizeof words) &&
        !find_lacking(checkpoint->identity, job->identity, "now", "in the checkpoint", words, sizeof words))
        return STATUS_OK;
    if (strncmp(words, "train-samples=", 14) == 0 || strncmp(words, "test-samples=", 13) == 0)
        return refuse_samples(job, checkpoint);
    bool rate = strncmp(words, "lr=", 3) == 0, batch = strncmp(words, "batch=", 6) == 0;
    return status_set(
        STATUS_USAGE, "--resume: the checkpoints in %s were written with other options: %s%s",
        job->checkpoints, words,
        rate    ? "; give the rate of the checkpoint as --lr, without --lr-scale"
        : batch ? "; choose --batch so that all ranks together use as many samples per step as before"
                : "");
}

/* Checks that a checkpoint within an epoch is within this training run. The number
 * of steps is not compared if the batch is not known yet. */
static enum status check_point(const struct train_job *job, const struct checkpoint *checkpoint,
                               bool batch_known)
{
    const uint32_t steps = train_steps(&job->train), done = checkpoint->partial.steps;
    if (batch_known && done >= steps)
        return status_set(STATUS_FAILED,
                          "--resume: the latest checkpoint in %s is damaged: it is after %" PRIu32
                          " steps of an epoch of %" PRIu32 "; delete it",
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
    enum status status = *found ? check_same(job, latest, batch_known) : STATUS_OK;
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
    TRY(checkpoint_lock(job->checkpoints, &trainer->lock));
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

/* Sets up the variant without its other files, which writes the first step. */
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
        TRY(checkpoint_lock(job->checkpoints, &lock));
        enum status status = check_folder(job);
        checkpoint_unlock(lock);
        TRY(status);
    }
    return job->step_path ? write_first_step(job, variant, resources) : STATUS_OK;
}
