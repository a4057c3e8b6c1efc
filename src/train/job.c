#include "train/job.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/text.h"
#include "core/words.h"
#include "data/remote.h"
#include "train/checkpoint.h"

struct resources job_all_threads(void)
{
#ifdef _OPENMP
    return (struct resources){.threads = omp_get_max_threads()};
#else
    return (struct resources){.threads = 1};
#endif
}

void job_hide_secrets(struct job_parameters *parameters)
{
    static char shown[PATH_MAX];
    if (!parameters->data || !remote_is(parameters->data) || !strchr(parameters->data, '?'))
        return;
    remote_shown(parameters->data, shown, sizeof shown);
    parameters->url = parameters->data;
    parameters->data = shown;
}

enum status job_open_data(const struct job_parameters *parameters, struct data *data)
{
    if (parameters->channels == 2)
        return status_set(STATUS_USAGE, "--channels: '2' is neither 1 nor 3");
    const struct data_request request = {.name = parameters->data,
                                         .url = parameters->url,
                                         .image = parameters->image,
                                         .label = parameters->label,
                                         .train_size = parameters->train_size,
                                         .test_size = parameters->test_size,
                                         .test_share =
                                             isnan(parameters->test_share) ? 0 : parameters->test_share,
                                         .classes = parameters->classes,
                                         .preset = parameters->preset,
                                         .res = parameters->res,
                                         .fit = {.how = (enum fit_how)parameters->fit,
                                                 .res = (uint32_t)parameters->out_res,
                                                 .channels = (uint32_t)parameters->channels},
                                         .batch = parameters->batch,
                                         .feed = parameters->feed,
                                         .fresh = parameters->fresh,
                                         .skip = parameters->on_error > 0,
                                         .test_only = parameters->test_only,
                                         .describe = parameters->describe,
                                         .resources = job_all_threads()};
    *data = (struct data){0};
    return data_open(&request, data);
}

void job_put_skipped(const struct data *data, struct measures *measures)
{
    if (data->skips)
        measures_put(measures, "skipped", "%" PRIu32,
                     data->sets[DATA_TRAIN].skipped + data->sets[DATA_TEST].skipped);
}

const char *job_lacking(const struct job_parameters *parameters, const char *option)
{
    if ((strcmp(option, "fit") == 0 || strcmp(option, "channels") == 0) && !parameters->out_res)
        return "--out-res PIXELS";
    if (strcmp(option, "preset") == 0 && strcmp(parameters->data, "synth") != 0)
        return "--data synth";
    if ((strcmp(option, "on-error") == 0 || strcmp(option, "test-share") == 0) &&
        data_is_generated(parameters->data))
        return "--data DIR";
    return NULL;
}

uint64_t job_limit_batch(uint64_t batch, uint64_t most, enum data_part part, bool says)
{
    if (batch <= most)
        return batch;
    if (says)
        status_say("--batch %" PRIu64 " is more than the %" PRIu64 " sample%s to %s: a batch has %" PRIu64,
                   batch, most, most == 1 ? "" : "s", part == DATA_TRAIN ? "train on" : "test with", most);
    return most;
}

enum status job_stay(void *input, void *parameters, const struct partition *partition)
{
    (void)input, (void)parameters, (void)partition;
    return STATUS_OK;
}

uint64_t job_batch(const void *parameters)
{
    return ((const struct job_parameters *)parameters)->batch;
}

/* ---- The options of the samples in a checkpoint ---- */

struct samples {
    struct job_parameters job;
};

static const struct option_spec sample_options[] = {
    JOB_OPTIONS(struct samples, NULL, "", "", "", "", "", "", NULL, "", "", "", NULL, NULL, NULL),
};

char *job_samples(const struct job_parameters *parameters)
{
    char *all = NULL, text[4096];
    size_t size;
    FILE *stream = open_memstream(&all, &size);
    if (!stream)
        return NULL;
    for (size_t i = 1; i < COUNT_OF(sample_options); i++) { /* 0 is --data */
        const struct option_spec *option = &sample_options[i];
        options_text(option, parameters, text, sizeof text);
        if (*text)
            fprintf(stream, "%s=%s\n", option->name, text);
    }
    if (!text_close(stream)) {
        free(all);
        all = NULL;
    }
    return all;
}

/* Returns whether the option determines the shape of a sample. Networks need this shape with any --data. */
static bool shapes(const char *option)
{
    static const char *const names[] = {"res", "out-res", "fit", "channels", NULL};
    return is_one_of(option, names);
}

enum status job_take_samples(const struct options *given, const struct checkpoint *checkpoint, char **samples,
                             struct job_parameters *parameters)
{
    char *rest = NULL;
    *samples = strdup(checkpoint->samples ? checkpoint->samples : "");
    TRY(ALLOCATED(*samples, "out of memory"));
    if (!options_given(given, "data") && remote_is(checkpoint->data) && strchr(checkpoint->data, '?'))
        return status_set(
            STATUS_USAGE,
            "the checkpoint has its URL %.400s without the secret part; give the whole URL with "
            "--data",
            checkpoint->data);
    if (!options_given(given, "data")) {
        parameters->data = checkpoint->data;
        if (!data_is_generated(checkpoint->data) && !remote_is(checkpoint->data) &&
            access(checkpoint->data, F_OK) != 0)
            return status_set(
                STATUS_USAGE,
                "the checkpoint was trained with --data %.400s, but there is no such folder; if "
                "it was moved, or for other data, give --data DIR",
                checkpoint->data);
    }
    const bool same = strcmp(parameters->data, checkpoint->data) == 0;
    for (char *line = strtok_r(*samples, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *value = strchr(line, '=');
        if (!value)
            return status_set(STATUS_FAILED, "--checkpoint: '%.40s' is not an option with a value", line);
        *value++ = '\0';
        for (size_t i = 1; i < COUNT_OF(sample_options); i++)
            if (strcmp(line, sample_options[i].name) == 0 && !options_given(given, line) &&
                (same || shapes(line)))
                TRY(option_set(&sample_options[i], parameters, value));
    }
    return STATUS_OK;
}

/* Returns the value of an option in a text of job_samples(), and sets its length. If the text lacks the
 * option, returns NULL and a length of 0. */
static const char *value_in(const char *samples, const char *option, size_t *length)
{
    const size_t name = strlen(option);
    for (const char *line = samples; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (strncmp(line, option, name) == 0 && line[name] == '=') {
            *length = strcspn(line, "\n") - name - 1;
            return line + name + 1;
        }
    *length = 0;
    return NULL;
}

/* Adds "--NAME VALUE in the checkpoint, VALUE now" to `words`. `was` or `is` is NULL if the option was not
 * given. */
static void add_difference(const char *name, const char *was, size_t was_length, const char *is,
                           size_t is_length, char *words, size_t size)
{
    static const char none[] = "not given";
    text_join(words, size, "; ", "--%s %.*s in the checkpoint, %.*s now", name,
              (int)(was ? was_length : strlen(none)), was ? was : none, (int)(is ? is_length : strlen(none)),
              is ? is : none);
}

size_t job_differences(const struct checkpoint *checkpoint, const char *data, const char *samples,
                       const char *besides, char *words, size_t size)
{
    size_t count = 0;
    *words = '\0';
    for (size_t i = 0; i < COUNT_OF(sample_options); i++) {
        const char *name = sample_options[i].name, *was = checkpoint->data, *is = data;
        size_t was_length = strlen(was), is_length = strlen(is);
        if (i > 0) { /* 0 is --data */
            was = value_in(checkpoint->samples ? checkpoint->samples : "", name, &was_length);
            is = value_in(samples ? samples : "", name, &is_length);
        }
        const bool same = !was == !is && was_length == is_length && (!was || memcmp(was, is, is_length) == 0);
        if (same || (besides && strcmp(name, besides) == 0))
            continue;
        add_difference(name, was, was_length, is, is_length, words, size);
        count++;
    }
    return count;
}
