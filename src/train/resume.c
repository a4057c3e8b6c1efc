/* Continuing a run from the latest checkpoint in the folder of --checkpoint (trainer.h): whether the
 * checkpoint belongs to the run, and what differs if it does not. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/workload.h"
#include "machine/comm.h"
#include "train/checkpoint.h"
#include "train/job.h"
#include "train/trainer.h"

/* ---- The options of a run and those of a checkpoint ---- */

/* Writes how to give an option the value that it has in the checkpoint to `words`. `was` is NULL if the
 * checkpoint does not have the option. */
static void remedy(const char *name, const struct option_value *was, char *words, size_t size)
{
    char text[80] = "";
    if (was)
        option_value_text(was, text, sizeof text);
    if (strcmp(name, "lr") == 0)
        snprintf(words, size, "give the rate of the checkpoint as --lr, without --lr-scale");
    else if (strcmp(name, "batch") == 0 && was && comm_size() == 1)
        snprintf(words, size, "use --batch %s", text);
    else if (strcmp(name, "batch") == 0)
        snprintf(words, size,
                 "choose --batch so that all ranks together use as many samples per step as before");
    else if (strcmp(name, "ranks") == 0) /* without --sync-batch-norm */
        snprintf(words, size, "start as many ranks as before (%s): each normalises over its own samples",
                 was ? text : "1");
    else if (strncmp(name, "init", 4) == 0 && was)
        snprintf(words, size, "give the --%s with which the training run started", name);
    else if (!was)
        snprintf(words, size, "drop --%s", name);
    else if (was->kind == OPTION_VALUE_FLAG) /* "=no" also overrides a recipe */
        snprintf(words, size, "give --%s%s", name, was->whole ? "" : "=no");
    else
        snprintf(words, size, "give --%s %s", name, text);
}

/* How an engine decodes: options whose values may be known only when it was opened. */
static const struct option_spec decoding_options[] = {
    {"decoder", "NAME", OPTION_CHOICE, .offset = offsetof(struct train_decoding, decoder),
     .choices = decoder_names},
    {"device-share", "S", OPTION_REAL, .offset = offsetof(struct train_decoding, share)}};

/* Returns whether an option may differ before the data are read: they decide the hashes, and a batch that is
 * larger than the training set is reduced. */
static bool may_differ(const struct option_value *is, const struct option_value *was)
{
    return was->kind == OPTION_VALUE_HASH ||
           (is && is->kind == OPTION_VALUE_WHOLE && strcmp(is->name, "batch") == 0 && is->whole > was->whole);
}

static const struct option_spec choice_option = {"parallel-choice", "NAME", OPTION_TEXT,
                                                 .offset = offsetof(struct train_job, choice)};

/* Finds the first option whose value differs, except for those of `decoding_options` and `choice_option` that
 * only the checkpoint has. `*is` and `*was` become its values in this run and in the checkpoint; NULL if it
 * has none there. Returns false if all are equal. If an option is missing, usually the value of another
 * option is the cause, so differing values count first. Whether there is a --feed comes before them, because
 * it decides which other options there are. `early`: the data are not read yet. */
static bool find_difference(const struct option_values *now, const struct option_values *then, bool early,
                            const struct option_value **is, const struct option_value **was)
{
    *is = option_values_find(now, "feed");
    *was = option_values_find(then, "feed");
    if (!*is != !*was)
        return true;
    for (size_t i = 0; i < now->count; i++) {
        *is = &now->of[i];
        *was = option_values_find(then, (*is)->name);
        if (*was && !option_value_same(*is, *was) && !(early && may_differ(*is, *was)))
            return true;
    }
    for (size_t i = 0; i < now->count; i++) {
        *is = &now->of[i];
        *was = option_values_find(then, (*is)->name);
        if (!*was)
            return true;
    }
    *is = NULL;
    for (size_t i = 0; i < then->count; i++) {
        *was = &then->of[i];
        if (!option_values_find(now, (*was)->name) && !(early && may_differ(NULL, *was)) &&
            !option_in_table(decoding_options, COUNT_OF(decoding_options), (*was)->name) &&
            strcmp((*was)->name, choice_option.name) != 0)
            return true;
    }
    return false;
}

/* Names the options of the samples that differ. If none differs, the files or the generator have changed. */
static enum status refuse_samples(const struct train_job *job, const struct checkpoint *checkpoint)
{
    char words[512];
    if (!job_differences(checkpoint, job->data, &job->samples, NULL, words, sizeof words))
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

/* Names an option and its values in this run and in the checkpoint; NULL if it has none there. */
static enum status refuse_option(const struct train_job *job, const struct option_value *is,
                                 const struct option_value *was)
{
    char value[128] = "none", before[128] = "", remedies[256];
    const char *name = is ? is->name : was ? was->name : "";
    if (was)
        option_value_text(was, before, sizeof before);
    if (is)
        option_value_text(is, value, sizeof value);
    remedy(name, was, remedies, sizeof remedies);
    return status_set(STATUS_USAGE,
                      "--resume: the checkpoints in %s were written with other options: %s%s%s%s in the "
                      "checkpoint, %s now; %s, or name another folder",
                      job->checkpoints, was ? "" : "no ", name, was ? "=" : "", before, value, remedies);
}

/* Compares the options of the run with those of the checkpoint. `early`: the data are not read yet. */
static enum status compare_options(const struct train_job *job, const struct checkpoint *checkpoint,
                                   bool early)
{
    const struct option_value *is, *was;
    if (!find_difference(&job->identity, &checkpoint->identity, early, &is, &was))
        return STATUS_OK;
    if (is && is->kind == OPTION_VALUE_HASH && strncmp(is->name, "init", 4) != 0)
        return refuse_samples(job, checkpoint);
    return refuse_option(job, is, was);
}

enum status resume_take_decoding(const struct train_job *job, const struct train_decoding *decoding,
                                 bool resumed, struct option_values *identity)
{
    static const struct train_decoding by_cpu = {DECODER_CPU, 0};
    CLOSED_BY(option_values_free) struct option_values now = {0};
    enum status status = STATUS_OK;
    for (size_t i = 0; i < COUNT_OF(decoding_options); i++) {
        const struct option_spec *spec = &decoding_options[i];
        TRY(option_values_add(&now, spec, decoding));
        if (!option_values_find(identity, spec->name))
            TRY(option_values_add(identity, spec, resumed ? &by_cpu : decoding));
        const struct option_value *is = &now.of[i], *was = option_values_find(identity, spec->name);
        if (status == STATUS_OK && !option_value_same(is, was))
            status = refuse_option(job, is, was);
    }
    return status;
}

const struct option_spec resume_share_option = {
    "mix-share", "N", OPTION_COUNT, .offset = offsetof(struct data_mix_texts, share), .maximum = 1e6};

enum status resume_take_share(struct data_mix_texts *mix, const char *folder)
{
    CLOSED_BY(checkpoint_free)
    struct checkpoint latest = {.data = NULL}; /* without options, if none is found */
    bool found;
    if (!folder || !mix->mix)
        return STATUS_OK;
    TRY(checkpoint_read_latest(folder, false, &latest, &found));
    const struct option_value *share = option_values_find(&latest.identity, "mix-share");
    return share ? option_value_store(share, &resume_share_option, mix) : STATUS_OK;
}

enum status resume_take_choice(const char *folder, char *name, size_t size)
{
    CLOSED_BY(checkpoint_free) struct checkpoint latest = {.data = NULL};
    bool found;
    name[0] = '\0';
    if (folder)
        TRY(checkpoint_read_latest(folder, false, &latest, &found));
    const struct option_value *was = option_values_find(&latest.identity, choice_option.name);
    if (was && was->kind == OPTION_VALUE_WORD)
        snprintf(name, size, "%s", was->word);
    return STATUS_OK;
}

enum status resume_note_choice(const struct train_job *job, struct option_values *identity)
{
    for (size_t i = 0; job->choice && i < identity->count; i++)
        if (strcmp(identity->of[i].name, choice_option.name) == 0) {
            char *word = strdup(job->choice);
            TRY(ALLOCATED(word, "out of memory for the options"));
            free(identity->of[i].word);
            identity->of[i].word = word;
            return STATUS_OK;
        }
    return option_values_add(identity, &choice_option, job);
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
    return batch_known ? compare_options(job, checkpoint, false) : STATUS_OK;
}

enum status resume_check_options(const struct train_job *job, const char *model)
{
    CLOSED_BY(checkpoint_free) struct checkpoint latest;
    bool found;
    TRY(checkpoint_read_latest(job->checkpoints, false, &latest, &found));
    if (!found)
        return STATUS_OK;
    if (strcmp(latest.model, model) != 0)
        return refuse_model(job, &latest);
    if (job->largest)
        return STATUS_OK;
    return compare_options(job, &latest, true);
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

/* ---- Beginning with the state of a stream ---- */

/* Sets the state of the stream at a position. */
static enum status state_at(const struct train *train, uint32_t epochs, uint32_t steps,
                            struct stream_state *state)
{
    TRY(data_stream_state(train->data, state));
    state->epoch = epochs;
    state->sample = (uint64_t)steps * train->batch;
    state->seed = train->seed;
    state->global_batch = train->batch;
    state->drop_last = train->drop_last;
    return STATUS_OK;
}

/* Returns the step with which training begins. */
static uint32_t first_step(const struct train_job *job)
{
    return job->begin ? (uint32_t)(job->begin->sample / job->train.batch) : 0;
}

enum status resume_check_state(const struct train_job *job)
{
    struct stream_state own;
    char name[320];
    if (!job->begin && !job->state_path)
        return STATUS_OK;
    if (job->train.augment.repeats > 1)
        return status_set(STATUS_USAGE,
                          "--repeats: steps of repeated samples have no state of a stream; drop "
                          "--repeats, or --init-state and --export-state");
    const enum status status = state_at(&job->train, 0, 0, &own);
    if (status != STATUS_OK || !job->begin)
        return status_prefix(status, job->begin ? "--init-state" : "--export-state");
    snprintf(name, sizeof name, "--init-state %.300s", job->begin_path);
    TRY(stream_state_check(name, job->begin, &own, train_steps(&job->train), ""));
    return job->begin->epoch < job->epochs
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "%s: it is after epoch %" PRIu64 ", but --epochs is %" PRIu32 "; raise --epochs",
                            name, job->begin->epoch, job->epochs);
}

uint32_t resume_skipped(const struct train_job *job, uint32_t epoch)
{
    return job->begin && job->begin->epoch == epoch ? first_step(job) : 0;
}

uint64_t resume_delivered(const struct train *train, uint32_t epoch, uint32_t steps)
{
    const struct draw_order order = train_order(train, epoch);
    uint64_t sum = 0;
    for (uint32_t step = 0; step < steps; step++) {
        const struct train_pick pick = train_pick(train, &order, step);
        for (uint32_t j = 0; j < train_share(train, step).total; j++)
            sum += data_read_hash(train->data, epoch, train_picked(&pick, j));
    }
    return sum;
}

void resume_skip(const struct train_job *job, struct train_history *history, struct train_partial *done)
{
    const uint32_t steps = first_step(job);
    if (!job->begin)
        return;
    history->epochs = (uint32_t)job->begin->epoch;
    if (steps > 0)
        *done = (struct train_partial){
            .steps = steps,
            .totals = {.delivered = resume_delivered(&job->train, history->epochs, steps),
                       .bad_step = TRAIN_FINE}};
}

enum status resume_write_state(const struct train_job *job, uint32_t epochs, uint32_t steps)
{
    struct stream_state state;
    if (!job->state_path)
        return STATUS_OK;
    TRY(state_at(&job->train, epochs, steps, &state));
    return status_prefix(stream_state_write(job->state_path, &state), "--export-state");
}

/* ---- --dry-run ---- */

enum status resume_check_first_step(const struct train_job *job, const struct checkpoint *latest)
{
    const uint32_t epochs = job->begin ? (uint32_t)job->begin->epoch : 0;
    return !job->step_path || (latest->history.epochs == epochs && latest->partial.steps == first_step(job))
               ? STATUS_OK
               : status_set(STATUS_USAGE, "--export-step writes the first step, but --resume continues after "
                                          "it; drop one of the two");
}

/* Writes what another program needs to continue after the latest checkpoint. */
static enum status write_latest(const struct train_job *job, const struct checkpoint *latest)
{
    if (job->export_path)
        TRY(export_parameters(&job->train, checkpoint_parameters(latest), &job->identity, job->export_path));
    return resume_write_state(job, latest->history.epochs, latest->partial.steps);
}

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
    if (status == STATUS_OK)
        status = write_latest(job, &latest);
    checkpoint_free(&latest);
    if (status == STATUS_OK)
        status_say("--checkpoint %s: %" PRIu32 " of %" PRIu32 " epochs%s are done%s", job->checkpoints,
                   epochs, job->epochs, steps ? " and a part of the next" : "",
                   epochs < job->epochs ? ": a run continues" : ": nothing to do");
    return status;
}
