#include "train/job.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "core/text.h"
#include "data/remote.h"
#include "data/tensor_file.h"
#include "train/checkpoint.h"

struct resources job_all_threads(void)
{
    return (struct resources){.threads = parallel_threads()};
}

/* If `*data` is a URL with a secret, moves it to `*url`, and writes it without the secret to `shown`. */
static void hide_secret(const char **data, const char **url, char shown[PATH_MAX])
{
    if (!*data || !remote_is(*data) || !strchr(*data, '?'))
        return;
    remote_shown(*data, shown, PATH_MAX);
    *url = *data;
    *data = shown;
}

void job_hide_secrets(struct job_parameters *parameters)
{
    static char shown[PATH_MAX], test_shown[PATH_MAX];
    hide_secret(&parameters->data, &parameters->url, shown);
    hide_secret(&parameters->test_data, &parameters->test_url, test_shown);
}

enum status job_open_data(const struct job_parameters *parameters, struct data *data)
{
    if (parameters->channels == 2)
        return status_option(STATUS_USAGE, "channels", ": '2' is neither 1 nor 3");
    struct crop_range range;
    TRY(crop_read(&parameters->crop, &range));
    const struct data_request request = {
        .name = parameters->data,
        .url = parameters->url,
        .test_name = parameters->test_data,
        .test_url = parameters->test_url,
        .cache_dir = parameters->cache_dir,
        .cache_bytes = parameters->cache_bytes,
        .image = parameters->image,
        .label = parameters->label,
        .tensor = parameters->tensor,
        .labels = parameters->labels,
        .test_labels = parameters->test_labels,
        .train_size = parameters->train_size,
        .test_size = parameters->test_size,
        .test_share = isnan(parameters->test_share) ? 0 : parameters->test_share,
        .classes = parameters->classes,
        .formula = parameters->formula,
        .preset = parameters->preset,
        .preset_file = parameters->preset_file,
        .class_file = parameters->class_file,
        .draw = parameters->draw,
        .min_lit = isnan(parameters->min_lit) ? 0 : parameters->min_lit,
        .res = parameters->res,
        .fit = {.how = (enum fit_how)parameters->fit,
                .res = (uint32_t)parameters->out_res,
                .channels = (uint32_t)parameters->channels,
                .unscaled = parameters->exact_resize,
                .range = range,
                .filter = parameters->feed == DATA_MIXED ? RESAMPLE_BILINEAR
                                                         : (enum resample_choice)parameters->filter},
        .batch = parameters->batch,
        .feed = parameters->feed,
        .mix = &parameters->mix,
        .fresh = parameters->fresh,
        .skip = parameters->on_error == ON_ERROR_SKIP,
        .mask = parameters->on_error == ON_ERROR_MASK,
        .centre = parameters->centre,
        .lanes = (uint32_t)parameters->lanes,
        .shuffle = (uint32_t)parameters->shuffle,
        .ahead = (uint32_t)parameters->ahead,
        .resident_bytes = parameters->resident_bytes,
        .resident_device_bytes = parameters->resident_device_bytes,
        .test_only = parameters->test_only,
        .coarse = parameters->labels_of == 1,
        .keys = parameters->keys,
        .given = parameters->given,
        .describe = parameters->describe,
        .resources = job_all_threads()};
    *data = (struct data){0};
    return data_open(&request, data);
}

/* Returns the number of values in a list. */
static uint32_t count_values(const char *text)
{
    uint32_t count = 1;
    for (; (text = strchr(text, ',')); text++)
        count++;
    return count;
}

enum status job_read_mean(const char *mean, const char *std, uint32_t channels,
                          double means[DATA_CHANNELS_MAX], double deviations[DATA_CHANNELS_MAX])
{
    const char *const texts[] = {mean, std};
    for (int i = 0; i < 2; i++) {
        uint32_t count = channels ? channels : count_values(texts[i]);
        double *values = i ? deviations : means;
        if (count > PARSE_CHANNELS_MAX)
            count = 1; /* lists have at most PARSE_CHANNELS_MAX values */
        TRY(parse_channels(i ? "--std" : "--mean", texts[i], count, i ? 1e-6 : -1e6, 1e6, values));
        for (uint32_t c = PARSE_CHANNELS_MAX; c < DATA_CHANNELS_MAX; c++)
            values[c] = values[0];
    }
    return STATUS_OK;
}

void job_put_skipped(const struct data *data, struct row *row)
{
    if (data->skips)
        row_count(row, "skipped", data->sets[DATA_TRAIN].skipped + data->sets[DATA_TEST].skipped);
}

bool job_generates(const struct job_parameters *parameters)
{
    struct data_mix mix;
    if (parameters->feed != DATA_MIXED || !parameters->mix.mix)
        return strcmp(parameters->data, "synth") == 0;
    const bool generates = data_mix_parse(&parameters->mix, &mix) == STATUS_OK && mix.generated < mix.count;
    data_mix_free(&mix);
    return generates;
}

const char *job_lacking(const struct job_parameters *parameters, const char *option)
{
    if (parameters->given && job_opens_by(option))
        return "samples that the trainer opens itself";
    static const char *const of_fit[] = {"fit", "channels", "exact-resize", NULL};
    if (is_one_of(option, of_fit) && !parameters->out_res)
        return "--out-res PIXELS";
    static const char *const of_synth[] = {"formula", "preset",  "preset-file", "class",
                                           "draw",    "min-lit", NULL};
    if (is_one_of(option, of_synth) && !job_generates(parameters))
        return "--data synth";
    static const char *const of_files[] = {"on-error", "test-share", "test-data", "exact-resize", NULL};
    static const char *const of_rows[] = {"tensor", "labels", "test-labels", NULL};
    if (is_one_of(option, of_files) && data_is_generated(parameters->data))
        return "--data DIR";
    if (is_one_of(option, of_rows) && data_is_generated(parameters->data))
        return "--data with rows of embeddings";
    static const char *const of_shards[] = {"cache-dir", "cache-bytes", NULL};
    const bool orbits = strcmp(parameters->data, "synth") == 0 && strcmp(option, "cache-dir") == 0;
    if (is_one_of(option, of_shards) && data_is_generated(parameters->data) && !orbits)
        return "data at a URL or shards that are compressed";
    if (strcmp(option, "labels-of") == 0) {
        const struct record_format *records = record_format_find(parameters->data);
        return records && records->coarse ? NULL : "--data with the binary files of CIFAR-100";
    }
    if (strcmp(option, "cache-bytes") == 0 && !parameters->cache_dir)
        return "--cache-dir DIR";
    return NULL;
}

uint64_t job_limit_batch(uint64_t batch, uint64_t most, enum data_part part, bool says, bool given)
{
    if (batch <= most)
        return batch;
    if (says)
        status_say("%s %" PRIu64 "%s is more than the %" PRIu64 " sample%s to %s: a batch has %" PRIu64,
                   given ? "--batch" : "the default of --batch,", batch, given ? "" : ",", most,
                   most == 1 ? "" : "s", part == DATA_TRAIN ? "train on" : "test with", most);
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

bool job_opens_by(const char *option)
{
    static const char *const others[] = {
        "device-share",          "decoder",     "lanes",      "prefetch",   "shuffle",      "export-step",
        "export-data",           "save-batch",  "mix-labels", "feed",       "mix-epoch",    "mix",
        "mix-weights-at",        "cache-bytes", "cache-dir",  "test-steps", "repeats",      "resident-bytes",
        "resident-device-bytes", "generator",   "fresh",      "init-state", "export-state", NULL};
    return option_in_table(sample_options, COUNT_OF(sample_options), option) || is_one_of(option, others);
}

enum status job_samples(const struct job_parameters *parameters, struct option_values *samples)
{
    for (size_t i = 1; i < COUNT_OF(sample_options); i++) /* 0 is --data */
        TRY(option_values_add(samples, &sample_options[i], parameters));
    return STATUS_OK;
}

/* Returns whether the option determines the shape of a sample. Networks need this shape with any --data. */
static bool shapes(const char *option)
{
    static const char *const names[] = {"res", "out-res", "fit", "channels", NULL};
    return is_one_of(option, names);
}

/* Sets --data to its value in the checkpoint. */
static enum status take_data(const struct checkpoint *checkpoint, struct job_parameters *parameters)
{
    const bool remote = remote_is(checkpoint->data);
    if (remote && strchr(checkpoint->data, '?'))
        return status_set(
            STATUS_USAGE,
            "the checkpoint has its URL %.400s without the secret part; give the whole URL with --data",
            checkpoint->data);
    const bool list = tensor_file_named(checkpoint->data) && strpbrk(checkpoint->data, ",*?[");
    if (!data_is_generated(checkpoint->data) && !remote && !list && access(checkpoint->data, F_OK) != 0)
        return status_set(STATUS_USAGE,
                          "the checkpoint was trained with --data %.400s, but there is no such folder; if "
                          "it was moved, or for other data, give --data DIR",
                          checkpoint->data);
    parameters->data = checkpoint->data;
    return STATUS_OK;
}

enum status job_take_samples(const struct options *given, const struct checkpoint *checkpoint,
                             struct job_parameters *parameters)
{
    if (!options_given(given, "data"))
        TRY(take_data(checkpoint, parameters));
    const bool same = strcmp(parameters->data, checkpoint->data) == 0;
    for (size_t i = 1; i < COUNT_OF(sample_options); i++) {
        const struct option_spec *option = &sample_options[i];
        const struct option_value *value = option_values_find(&checkpoint->samples, option->name);
        if (value && !options_given(given, option->name) && (same || shapes(option->name)) &&
            option_value_store(value, option, parameters) != STATUS_OK)
            return status_prefix(STATUS_FAILED, "--checkpoint");
    }
    return STATUS_OK;
}

/* Adds "--NAME VALUE in the checkpoint, VALUE now" to `words`. A value is NULL if the option was not given.
 */
static void add_difference(const char *name, const char *was, const char *is, char *words, size_t size)
{
    text_join(words, size, "; ", "--%s %s in the checkpoint, %s now", name, was ? was : "not given",
              is ? is : "not given");
}

size_t job_differences(const struct checkpoint *checkpoint, const char *data,
                       const struct option_values *samples, const char *besides, char *words, size_t size)
{
    size_t count = strcmp(data, checkpoint->data) != 0;
    *words = '\0';
    if (count)
        add_difference("data", checkpoint->data, data, words, size);
    for (size_t i = 1; i < COUNT_OF(sample_options); i++) { /* 0 is --data */
        const char *name = sample_options[i].name;
        const struct option_value *was = option_values_find(&checkpoint->samples, name),
                                  *is = option_values_find(samples, name);
        char before[256], now[256];
        if (option_value_same(is, was) || (besides && strcmp(name, besides) == 0))
            continue;
        if (was)
            option_value_text(was, before, sizeof before);
        if (is)
            option_value_text(is, now, sizeof now);
        add_difference(name, was ? before : NULL, is ? now : NULL, words, size);
        count++;
    }
    return count;
}
