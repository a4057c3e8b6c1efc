/* Determines which options of the workload `train` have an effect. Builds the identity of a training run from
 * the options that can change its parameters, and from hashes of the data. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "train/train_parts.h"

bool train_crops(const struct train_parameters *parameters)
{
    return parameters->job.out_res && parameters->job.fit == FIT_RANDOM_RESIZED_CROP;
}

bool train_has_mean(const struct train_parameters *parameters)
{
    return !parameters->raw && parameters->mean && parameters->std;
}

/* Returns the number of values in a list. */
static uint32_t count_values(const char *text)
{
    uint32_t count = 1;
    for (; (text = strchr(text, ',')); text++)
        count++;
    return count;
}

enum status train_read_mean(const struct train_parameters *parameters, uint32_t channels,
                            double mean[DATA_CHANNELS_MAX], double std[DATA_CHANNELS_MAX])
{
    const char *const texts[] = {parameters->mean, parameters->std};
    for (int i = 0; i < 2; i++) {
        uint32_t count = channels ? channels : count_values(texts[i]);
        double *values = i ? std : mean;
        if (count > PARSE_CHANNELS_MAX)
            count = 1; /* lists have at most PARSE_CHANNELS_MAX values */
        TRY(parse_channels(i ? "--std" : "--mean", texts[i], count, i ? 1e-6 : -1e6, 1e6, values));
        for (uint32_t c = PARSE_CHANNELS_MAX; c < DATA_CHANNELS_MAX; c++)
            values[c] = values[0];
    }
    return STATUS_OK;
}

bool train_draws_other_bits(const struct train_parameters *parameters)
{
    return parameters->generator == GENERATOR_BAT || parameters->generator == GENERATOR_GBASE;
}

const char *train_lacking(const struct train_parameters *parameters, const char *option)
{
    const bool synth = strcmp(parameters->job.data, "synth") == 0;
    const bool sgd = parameters->optimizer == OPTIMIZER_SGD;
    const bool pipeline = parameters->parallel == PARALLEL_PIPELINE;
    const bool transformer = model_tables[parameters->model].layers[0].kind == LAYER_PATCHES;
    const enum schedule_kind schedule = (enum schedule_kind)parameters->schedule;
    const bool steps = schedule == SCHEDULE_STEP, multistep = schedule == SCHEDULE_MULTISTEP;
    const struct {
        bool there;
        const char *needed, *options[6];
    } needs[] = {
        {sgd, "--optimizer sgd", {"momentum"}},
        {!sgd, "--optimizer adam or adamw", {"beta1", "beta2", "epsilon"}},
        {steps, "--lr-schedule step", {"lr-step"}},
        {steps || multistep, "--lr-schedule step or multistep", {"lr-gamma"}},
        {multistep, "--lr-schedule multistep", {"lr-milestones"}},
        {schedule == SCHEDULE_POLYNOMIAL, "--lr-schedule polynomial", {"lr-power"}},
        {schedule_has_end(schedule), "--lr-schedule cosine or polynomial", {"lr-min", "lr-cycles"}},
        {!parameters->raw, "samples without --raw", {"mean", "std"}},
        {parameters->std != NULL, "--std S", {"mean"}},
        {parameters->mean != NULL, "--mean M", {"std"}},
        {pipeline, "--parallel pipeline", {"stages", "microbatches", "schedule"}},
        {!pipeline, "--parallel data", {"sync", "balance", "clip-norm", "accumulate", "ema"}},
        {transformer, "a transformer, such as --model vit-tiny", {"layer-decay", "drop-path"}},
        {train_crops(parameters), "--fit random-resized-crop", {"interpolation"}},
        {!isnan(parameters->rand_augment), "--rand-augment M", {"rand-augment-ops"}},
        {synth, "--data synth", {"res"}},
        {parameters->job.feed == DATA_LIVE, synth ? "--feed live" : "--data synth", {"fresh", "generator"}},
        {parameters->checkpoint, "--checkpoint DIR", {"resume", "keep", "checkpoint-steps"}},
        {parameters->log_path, "--log FILE", {"log-steps", "test-steps"}},
    };
    for (size_t i = 0; i < COUNT_OF(needs); i++)
        if (!needs[i].there && is_one_of(option, needs[i].options))
            return needs[i].needed;
    return job_lacking(&parameters->job, option);
}

/* --sync, --lr-scale, --balance and --parallel data have no effect with one rank. They are nevertheless
 * accepted, so that the same options can be measured on any number of ranks. */
bool train_applies(const void *parameters, const struct variant *variant, const char *option)
{
    static const char *const of_ranks[] = {"sync", "lr-scale", "balance", "parallel", NULL};
    const struct train_parameters *given = parameters;
    (void)variant;
    return !train_lacking(parameters, option) &&
           (given->several_ranks || given->parallel == PARALLEL_PIPELINE || !is_one_of(option, of_ranks));
}

/* Returns true if the option cannot change the network's parameters at the end of an epoch, except by
 * rounding. Returns true also for options that affect only the data, because the identity contains hashes of
 * the data. */
static bool decides_nothing(const struct train_parameters *parameters, const char *option)
{
    if (strcmp(option, "feed") == 0) /* live and stored samples are bit-identical */
        return parameters->job.feed != DATA_CONSTANT;
    if (strcmp(option, "fresh") == 0)
        return !parameters->job.fresh;
    if (strcmp(option, "generator") == 0)
        return !train_draws_other_bits(parameters);
    if (strcmp(option, "sync") == 0)
        return !exchange_rounds(parameters->sync);
    /* Other ranks, shares, exchanges, pipelines and parts of a step change only the order of sums. --lr-scale
     * changes only --lr. */
    static const char *const others[] = {"data",
                                         "image",
                                         "label",
                                         "on-error",
                                         "preset",
                                         "train-size",
                                         "test-size",
                                         "res",
                                         "lr-scale",
                                         "balance",
                                         "parallel",
                                         "stages",
                                         "microbatches",
                                         "schedule",
                                         "accumulate",
                                         "checkpoint-activations",
                                         NULL};
    if (is_one_of(option, others))
        return true;
    return strcmp(option, "epochs") == 0 && !schedule_has_end((enum schedule_kind)parameters->schedule);
}

enum status train_identify(const struct train_parameters *all, struct opened *opened)
{
    size_t size;
    struct train_parameters asked = *all;
    if (all->asked_batch)
        asked.job.batch = all->asked_batch;
    FILE *stream = open_memstream(&opened->identity, &size);
    TRY(ALLOCATED(stream, "out of memory"));
    for (size_t i = 0; i < workload_train.option_count; i++) {
        const struct option_spec *option = &workload_train.options[i];
        char text[256];
        options_text(option, &asked, text, sizeof text);
        if (option->column && *text && !decides_nothing(all, option->name) &&
            !train_lacking(all, option->name))
            fprintf(stream, "%s=%s ", option->name, text);
    }
    if (*opened->init)
        fprintf(stream, "init=%s ", opened->init);
    fprintf(stream, "train-samples=%016" PRIx64 " test-samples=%016" PRIx64, opened->data.hashes[DATA_TRAIN],
            opened->data.hashes[DATA_TEST]);
    return ALLOCATED(text_close(stream), "out of memory");
}
