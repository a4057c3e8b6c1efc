/* Continuing a run from the latest checkpoint in the folder of --checkpoint (trainer.h): whether the
 * checkpoint belongs to the run, and what differs if it does not. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/workload.h"
#include "train/job.h"
#include "train/trainer.h"

/* ---- The options of a run and those of a checkpoint ---- */

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

static bool is_named(const char *option, const char *name, int length)
{
    return (int)strlen(option) == length && strncmp(option, name, (size_t)length) == 0;
}

/* Writes how to give an option the value that it has in the checkpoint to `words`. `value` has `bytes` bytes;
 * it is empty if the checkpoint does not have the option. */
static void remedy(const char *name, int length, const char *value, int bytes, char *words, size_t size)
{
    const struct workload *workload = workload_find("train");
    bool flag = false;
    for (size_t i = 0; i < workload->option_count; i++)
        flag |= workload->options[i].kind == OPTION_FLAG && is_named(workload->options[i].name, name, length);
    if (is_named("lr", name, length))
        snprintf(words, size, "give the rate of the checkpoint as --lr, without --lr-scale");
    else if (is_named("batch", name, length))
        snprintf(words, size,
                 "choose --batch so that all ranks together use as many samples per step as before");
    else if (is_named("init", name, length) && bytes > 0)
        snprintf(words, size, "give the --init with which the training run started");
    else if (bytes == 0)
        snprintf(words, size, "drop --%.*s", length, name);
    else if (flag) /* "=no" also overrides a recipe */
        snprintf(words, size, "give --%.*s%s", length, name, *value == '0' ? "=no" : "");
    else
        snprintf(words, size, "give --%.*s %.*s", length, name, bytes, value);
}

/* Returns whether the value of an option in the checkpoint means the same as its value now. Older programs
 * stored lists of numbers as the user wrote them, such as mean=0.50. `now` and `was` are words "name=value".
 */
static bool means_same(const char *now, size_t now_length, const char *was, size_t was_length, size_t name)
{
    const struct workload *workload = workload_find("train");
    char value[256], text[256];
    if (now_length == was_length && strncmp(now, was, now_length) == 0)
        return true;
    snprintf(value, sizeof value, "%.*s", (int)(was_length - name - 1), was + name + 1);
    FREED void *values = calloc(1, workload->parameters_bytes);
    for (size_t i = 0; values && i < workload->option_count; i++) {
        const struct option_spec *spec = &workload->options[i];
        if (!is_named(spec->name, now, (int)name) || option_set(spec, values, value) != STATUS_OK)
            continue;
        if (spec->kind == OPTION_FLAG) /* option_set() sets a flag with any text */
            return false;
        options_text(spec, values, text, sizeof text);
        return strlen(text) == now_length - name - 1 && strncmp(text, now + name + 1, strlen(text)) == 0;
    }
    return false;
}

/* Describes the first option whose value differs between the two strings; returns false if there is none. */
static bool find_other(const char *mine, const char *theirs, char *words, size_t size)
{
    while (*mine) {
        size_t length = strcspn(mine, " "), name = strcspn(mine, "= "), other;
        const char *found = word_of(theirs, mine, name, &other);
        if (found && !means_same(mine, length, found, other, name)) {
            char remedies[128];
            remedy(mine, (int)name, found + name + 1, (int)(other - name - 1), remedies, sizeof remedies);
            snprintf(words, size, "%.*s in the checkpoint, %.*s now; %s", (int)other, found,
                     (int)(length - name - 1), mine + name + 1, remedies);
            return true;
        }
        mine += length + (mine[length] == ' ');
    }
    return false;
}

/* Describes the first option of `some` that `others` lacks; returns false if there is none. `now` is true if
 * `some` has the options of this run, and false if it has those of the checkpoint. */
static bool find_lacking(const char *some, const char *others, bool now, char *words, size_t size)
{
    while (*some) {
        size_t length = strcspn(some, " "), name = strcspn(some, "= "), other;
        if (!word_of(others, some, name, &other)) {
            const char *value = some + name + 1;
            const int bytes = (int)(length - name - 1);
            char remedies[128];
            remedy(some, (int)name, value, now ? 0 : bytes, remedies, sizeof remedies);
            if (now)
                snprintf(words, size, "no %.*s in the checkpoint, %.*s now; %s", (int)name, some, bytes,
                         value, remedies);
            else
                snprintf(words, size, "%.*s in the checkpoint, none now; %s", (int)length, some, remedies);
            return true;
        }
        some += length + (some[length] == ' ');
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

static enum status refuse_model(const struct train_job *job, const struct checkpoint *checkpoint)
{
    return status_set(STATUS_USAGE,
                      "--resume: the checkpoints in %s belong to another model: %s for samples of "
                      "%ux%ux%ux%u (channels, depth, height, width) and %u classes; use this model and "
                      "such samples, or name another folder",
                      job->checkpoints, checkpoint->model, checkpoint->input.channels,
                      checkpoint->input.depth, checkpoint->input.height, checkpoint->input.width,
                      checkpoint->classes);
}

/* Compares the options in `identity` with those of the checkpoint. */
static enum status compare_options(const struct train_job *job, const char *identity,
                                   const struct checkpoint *checkpoint)
{
    char words[384];
    /* If an option is missing, usually the value of another option is the cause. So report differing values
     * first. */
    if (!find_other(identity, checkpoint->identity, words, sizeof words) &&
        !find_lacking(identity, checkpoint->identity, true, words, sizeof words) &&
        !find_lacking(checkpoint->identity, identity, false, words, sizeof words))
        return STATUS_OK;
    if (strncmp(words, "train-samples=", 14) == 0 || strncmp(words, "test-samples=", 13) == 0)
        return refuse_samples(job, checkpoint);
    return status_set(STATUS_USAGE,
                      "--resume: the checkpoints in %s were written with other options: %s, or name another "
                      "folder",
                      job->checkpoints, words);
}

/* Checks that a checkpoint belongs to this training run. If `batch_known` is false, does not compare the
 * options. STATUS_USAGE with a remedy if the model, the samples or an option differs. The message
 * names the model, the options of the samples that differ, or the first other option that differs. */
static enum status check_same(const struct train_job *job, const struct checkpoint *checkpoint,
                              bool batch_known)
{
    const struct model *model = job->train.model;
    if (strcmp(checkpoint->model, model->name) != 0 || checkpoint->arena_values != model->arena_values ||
        checkpoint->classes != model->classes ||
        memcmp(&checkpoint->input, &model->input, sizeof model->input) != 0)
        return refuse_model(job, checkpoint);
    return batch_known ? compare_options(job, job->identity, checkpoint) : STATUS_OK;
}

/* Returns the words of an identity that describe the initial parameters and the samples. They end it. */
static const char *end_of(const char *identity)
{
    size_t length;
    const char *init = word_of(identity, "init=", 4, &length);
    const char *samples = word_of(identity, "train-samples=", 13, &length);
    return init ? init : samples ? samples : identity + strlen(identity);
}

enum status resume_check_options(const struct train_job *job, const char *model)
{
    CLOSED_BY(checkpoint_free) struct checkpoint latest;
    bool found;
    char *identity = NULL;
    TRY(checkpoint_read_latest(job->checkpoints, false, &latest, &found));
    if (!found)
        return STATUS_OK;
    if (strcmp(latest.model, model) != 0)
        return refuse_model(job, &latest);
    if (job->largest)
        return STATUS_OK;
    const int options = (int)(end_of(job->identity) - job->identity);
    if (asprintf(&identity, "%.*s%s", options, job->identity, end_of(latest.identity)) < 0)
        return status_set(STATUS_EXHAUSTED, "out of memory for the options");
    enum status status = compare_options(job, identity, &latest);
    free(identity);
    return status;
}

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

enum status resume_read(const struct train_job *job, bool batch_known, struct checkpoint *latest, bool *found)
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

enum status resume_refuse_full(const struct train_job *job)
{
    bool full;
    TRY(checkpoint_exists(job->checkpoints, &full));
    return !full ? STATUS_OK
                 : status_set(STATUS_USAGE,
                              "--checkpoint %s holds checkpoints already: add --resume to continue, or name "
                              "another folder",
                              job->checkpoints);
}

enum status resume_check_first_step(const struct train_job *job, const struct checkpoint *latest)
{
    return !job->step_path || (latest->history.epochs == 0 && latest->partial.steps == 0)
               ? STATUS_OK
               : status_set(STATUS_USAGE, "--export-step writes the first step, but --resume continues after "
                                          "it; drop one of the two");
}

/* ---- --dry-run ---- */

enum status resume_check_folder(const struct train_job *job)
{
    struct checkpoint latest;
    bool found = false;
    if (!job->resume)
        return resume_refuse_full(job);
    TRY(resume_read(job, !job->largest, &latest, &found));
    if (!found) {
        status_say("--checkpoint %s has no checkpoint: a run begins with the first epoch", job->checkpoints);
        return STATUS_OK;
    }
    const uint32_t epochs = latest.history.epochs, steps = latest.partial.steps;
    enum status status = resume_check_first_step(job, &latest);
    checkpoint_free(&latest);
    if (status == STATUS_OK)
        status_say("--checkpoint %s: %" PRIu32 " of %" PRIu32 " epochs%s are done%s", job->checkpoints,
                   epochs, job->epochs, steps ? " and a part of the next" : "",
                   epochs < job->epochs ? ": a run continues" : ": nothing to do");
    return status;
}
