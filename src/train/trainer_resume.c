/* Resumes a training run from its checkpoint folder, after checks that the checkpoint belongs to the run. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "train/trainer_parts.h"

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

static enum status refuse_samples(const struct train_job *job, const struct checkpoint *checkpoint)
{
    const struct train_samples *samples = &checkpoint->samples;
    char sizes[128] = "";
    if (samples->train_size || samples->test_size)
        snprintf(sizes, sizeof sizes, " with --train-size %" PRIu64 " --test-size %" PRIu64 " (0: all)",
                 samples->train_size, samples->test_size);
    return status_set(STATUS_USAGE,
                      "--resume: the checkpoints in %s belong to other samples: --data %s%s; give the same "
                      "samples, or name another folder with --checkpoint",
                      job->checkpoints, checkpoint->data, sizes);
}

/* Checks that a checkpoint belongs to this training run. */
static enum status check_same(const struct train_job *job, const struct checkpoint *checkpoint)
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

/* Checks that a checkpoint within an epoch is within this training run. */
static enum status check_point(const struct train_job *job, const struct checkpoint *checkpoint)
{
    const uint32_t steps = train_steps(&job->train), done = checkpoint->partial.steps;
    if (done >= steps)
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

static enum status resume(struct trainer *trainer, bool *found)
{
    const struct train_job *job = trainer->job;
    struct checkpoint latest;
    TRY(checkpoint_read_latest(job->checkpoints, true, &latest, found));
    enum status status = *found ? check_same(job, &latest) : STATUS_OK;
    if (*found && status == STATUS_OK)
        status = check_point(job, &latest);
    if (!*found || status != STATUS_OK) {
        checkpoint_free(&latest);
        return status;
    }
    /* Keep this run's --data: the same samples may have moved to another path. */
    free(latest.data);
    latest.data = trainer->now.data;
    latest.samples = job->samples;
    trainer->now.data = NULL;
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
    bool found = false;
    if (!job->checkpoints || comm_rank() > 0)
        return STATUS_OK;
    TRY(checkpoint_lock(job->checkpoints, &trainer->lock));
    if (job->resume)
        return resume(trainer, &found);
    TRY(checkpoint_exists(job->checkpoints, &found));
    return !found ? STATUS_OK
                  : status_set(STATUS_USAGE,
                               "--checkpoint %s holds checkpoints already: add --resume to continue, or name "
                               "another folder",
                               job->checkpoints);
}
