/* Opens the input of the workload `train`: data, model, initial parameters, and the job of the trainer. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"
#include "train/export.h"
#include "train/init.h"
#include "train/pipeline.h"
#include "train/train_parts.h"

void train_close(void *input)
{
    struct opened *opened = input;
    data_close(&opened->data);
    free(opened->identity);
    free(opened->samples);
    free(opened->initial);
    free(opened->weights);
    free(opened->shares);
    free(opened);
}

/* ---- The job of the trainer ---- */

/* Returns the value of an option that may be missing. */
static double or_zero(double value)
{
    return isnan(value) ? 0 : value;
}

static struct augment chosen_augment(const struct train_parameters *parameters, const struct shape *shape)
{
    const bool changes = !isnan(parameters->rand_augment);
    return (struct augment){.shift = (uint32_t)parameters->shift,
                            .flip = parameters->flip,
                            .crop = train_crops(parameters),
                            .bicubic = parameters->interpolation == INTERPOLATION_BICUBIC,
                            .operations = changes ? (uint32_t)parameters->rand_augment_ops : 0,
                            .magnitude = changes ? parameters->rand_augment : 0,
                            .repeats = (uint32_t)parameters->repeats,
                            .erasing = (float)parameters->erasing,
                            .height = shape->height,
                            .width = shape->width};
}

static struct optimizer chosen_optimizer(const struct train_parameters *parameters)
{
    return (struct optimizer){.kind = (enum optimizer_kind)parameters->optimizer,
                              .momentum = parameters->momentum,
                              .beta1 = parameters->beta1,
                              .beta2 = parameters->beta2,
                              .epsilon = parameters->epsilon,
                              .weight_decay = parameters->weight_decay,
                              .clip_norm = or_zero(parameters->clip_norm),
                              .average = or_zero(parameters->ema),
                              .layer_decay = parameters->layer_decay};
}

/* `steps` is the number of steps of an epoch. */
static struct schedule chosen_schedule(const struct train_parameters *parameters, uint64_t steps)
{
    return (struct schedule){.kind = (enum schedule_kind)parameters->schedule,
                             .rate = parameters->lr,
                             .warmup_steps = (uint64_t)llround(parameters->lr_warmup * (double)steps),
                             .total_steps = parameters->epochs * steps,
                             .decay_steps = parameters->lr_step * steps,
                             .gamma = parameters->lr_gamma,
                             .least = parameters->lr_min,
                             .power = parameters->lr_power,
                             .cycles = (uint32_t)parameters->lr_cycles};
}

/* Sets opened->job.train, except for the milestones of its schedule. */
static void fill_train(const struct train_parameters *parameters, const struct partition *partition,
                       struct opened *opened)
{
    struct train *train = &opened->job.train;
    *train = (struct train){.model = &opened->model,
                            .data = &opened->data,
                            .seed = parameters->seed,
                            .batch = (uint32_t)parameters->job.batch,
                            .drop_last = parameters->drop_last,
                            .rank = (uint32_t)partition->rank,
                            .ranks = (uint32_t)partition->ranks,
                            .augment = chosen_augment(parameters, &opened->data.shape),
                            .optimizer = chosen_optimizer(parameters),
                            .loss = (enum loss_kind)parameters->loss,
                            .smoothing = (float)parameters->label_smoothing,
                            .mixing = {parameters->mixup, parameters->cutmix},
                            .accumulate = (uint32_t)parameters->accumulate,
                            .checkpoint_activations = parameters->checkpoint_activations,
                            .cudnn_benchmark = parameters->cudnn_benchmark};
    if (parameters->generator != GENERATOR_AUTO)
        train->generator = train_generators[parameters->generator];
    train->schedule = chosen_schedule(parameters, train_steps(train));
}

/* Sets the members of opened->job other than `train`. */
static void fill_job(const struct train_parameters *parameters, const struct partition *partition,
                     struct opened *opened)
{
    struct train_job *job = &opened->job;
    job->initial = opened->initial;
    job->epochs = (uint32_t)parameters->epochs;
    job->verify_steps = (uint32_t)parameters->verify_steps;
    job->checkpoints = parameters->checkpoint;
    job->keep = (uint32_t)parameters->keep;
    job->checkpoint_steps = parameters->checkpoint ? (uint32_t)parameters->checkpoint_steps : 0;
    job->log_path = parameters->log_path;
    job->log_steps = parameters->log_path ? (uint32_t)parameters->log_steps : 0;
    job->test_steps = (uint32_t)parameters->test_steps;
    job->resume = parameters->resume;
    job->largest = parameters->largest;
    job->allow_nan = parameters->allow_nan;
    job->sync = parameters->sync;
    if (parameters->parallel == PARALLEL_PIPELINE)
        job->pipeline = (struct pipeline_plan){.schedule = (enum pipe_schedule)parameters->pipe_schedule,
                                               .stages = (uint32_t)partition->ranks,
                                               .micros = (uint32_t)parameters->micros};
    job->identity = opened->identity;
    job->data = parameters->job.data;
    job->samples = opened->samples;
    job->export_path = parameters->export_path;
    job->step_path = parameters->step_path;
}

/* Reads --balance, and allocates the shares of the ranks. */
static enum status read_balance(const struct train_parameters *parameters, const struct partition *partition,
                                struct opened *opened)
{
    uint32_t ranks = (uint32_t)partition->ranks;
    opened->weights = malloc(ranks * sizeof *opened->weights);
    opened->shares = malloc(ranks * sizeof *opened->shares);
    TRY(ALLOCATED(opened->weights && opened->shares, "out of memory for the shares"));
    return balance_parse(parameters->balance, ranks, &opened->job.balance, opened->weights);
}

/* Sets the shares that the ranks have until trainers change them. */
static void fill_shares(struct opened *opened)
{
    struct train_job *job = &opened->job;
    bool any = job->balance == BALANCE_MEASURED || job->balance == BALANCE_MEMORY;
    if (job->train.ranks <= 1 || job->pipeline.stages)
        return;
    job->weights = opened->weights;
    job->shares = opened->shares;
    partition_divide(job->weights, job->train.ranks, job->train.batch, 0, job->shares);
    job->train.shares = job->balance == BALANCE_EQUAL ? NULL : job->shares;
    job->train.share_max = train_room(&job->train, any);
}

/* Returns the number at the start of `text`, and sets `*end` to the text after it. Returns 0 if there is no
 * number from 1 to UINT32_MAX. */
static uint32_t read_number(const char *text, const char **end)
{
    char *after = NULL;
    errno = 0;
    const uint64_t number = isdigit((unsigned char)*text) ? strtoull(text, &after, 10) : 0;
    *end = after;
    return errno || number > UINT32_MAX ? 0 : (uint32_t)number;
}

/* Reads --lr-milestones: ascending epochs, joined by ':'. */
static enum status read_milestones(const struct train_parameters *all, uint64_t steps,
                                   struct schedule *schedule)
{
    const char *text = all->lr_milestones;
    if (all->schedule != SCHEDULE_MULTISTEP)
        return STATUS_OK;
    if (!text)
        return status_set(STATUS_USAGE, "--lr-schedule multistep needs --lr-milestones E1:E2:...");
    for (uint32_t last = 0; schedule->milestone_count < SCHEDULE_MILESTONES_MAX;) {
        const char *end;
        const uint32_t epoch = read_number(text, &end);
        if (epoch <= last || (*end && *end != ':'))
            break;
        schedule->milestones[schedule->milestone_count++] = epoch * steps;
        if (!*end)
            return STATUS_OK;
        last = epoch;
        text = end + 1;
    }
    return status_set(
        STATUS_USAGE,
        "--lr-milestones %.80s: give at most %d ascending epochs from 1 on, joined by ':', as in "
        "30:60:80",
        all->lr_milestones, SCHEDULE_MILESTONES_MAX);
}

/* Sets opened->job. */
static enum status plan(const struct train_parameters *all, const struct partition *partition,
                        struct opened *opened)
{
    free(opened->identity);
    opened->identity = NULL;
    TRY(train_identify(all, opened));
    fill_train(all, partition, opened);
    fill_job(all, partition, opened);
    fill_shares(opened);
    return read_milestones(all, train_steps(&opened->job.train), &opened->job.train.schedule);
}

/* ---- Opening ---- */

/* Computes the initial parameters. */
static enum status begin(const struct train_parameters *parameters, struct opened *opened)
{
    uint64_t hash;
    opened->initial = malloc(opened->model.arena_values * sizeof *opened->initial);
    TRY(ALLOCATED(opened->initial, "out of memory for the parameters"));
    model_initialise(&opened->model, parameters->seed, opened->initial);
    if (!parameters->init)
        return STATUS_OK;
    TRY(init_take(parameters->init, &opened->model, opened->initial, &hash));
    snprintf(opened->init, sizeof opened->init, "%016" PRIx64, hash);
    return STATUS_OK;
}

/* Returns the parameters of the whole training run: the batch is the global batch, and the learning rate is
 * scaled. */
static struct train_parameters of_all_ranks(const struct train_parameters *parameters,
                                            const struct partition *partition)
{
    struct train_parameters all = *parameters;
    all.job.batch = partition_share(partition, parameters->job.batch).total;
    double factor = (double)all.job.batch / (double)parameters->job.batch;
    if (parameters->lr_scale == LR_SCALE_LINEAR)
        all.lr *= factor;
    if (parameters->lr_scale == LR_SCALE_SQRT)
        all.lr *= sqrt(factor);
    return all;
}

/* Opens the data, the model and the initial parameters of the whole training run. Limits its batch to the
 * training set. */
static enum status open_all(struct train_parameters *all, const struct partition *partition,
                            struct opened *opened)
{
    struct job_parameters job = all->job;
    if (all->largest) /* --feed constant holds one batch in memory; its size is not known yet, so hold all
                         samples */
        job.batch = UINT32_MAX;
    TRY(job_open_data(&job, &opened->data));
    data_warn_of_classes(&opened->data, job.data, !job.classes && !job.train_size && !job.test_size);
    TRY(train_limit_batch(all, partition, &opened->data));
    TRY(train_check_data(all, partition, &opened->data));
    data_normalise(&opened->data, !all->raw);
    if (train_has_mean(all)) {
        double mean[DATA_CHANNELS_MAX], std[DATA_CHANNELS_MAX];
        TRY(train_read_mean(all, opened->data.shape.channels, mean, std));
        data_normalise_by(&opened->data, mean, std);
    }
    TRY(model_build(&model_tables[all->model], opened->data.shape, opened->data.classes, &opened->model));
    TRY(train_check_model(all, partition, &opened->model));
    if (!isnan(all->drop_path) && opened->model.transformer) /* --recipe sets it for any network */
        TRY(model_set_drop_path(&opened->model, all->drop_path));
    TRY(begin(all, opened));
    opened->samples = job_samples(&all->job);
    TRY(ALLOCATED(opened->samples, "out of memory"));
    TRY(plan(all, partition, opened));
    TRY(train_check_steps(all, &opened->job.train));
    if (all->save_batch && partition->rank == 0)
        TRY(export_batch(&opened->job.train, &(struct resources){.threads = 1}, all->save_batch));
    if (!all->data_path || partition->rank > 0)
        return STATUS_OK;
    TRY(export_data(&opened->job.train, opened->initial, opened->identity, all->data_path));
    status_say("the samples and the initial parameters were written to %s", all->data_path);
    return STATUS_OK;
}

/* Returns the smallest value of --batch: every part of a rank's step and every micro-batch needs a sample. */
static uint64_t smallest_batch(const struct train_parameters *parameters, const struct partition *partition)
{
    uint64_t ranks = partition->ranks, parts = ranks * parameters->accumulate;
    uint64_t total =
        parameters->parallel == PARALLEL_PIPELINE && parameters->micros > ranks ? parameters->micros : parts;
    return partition->strong ? total : (total + ranks - 1) / ranks;
}

/* With --resume: refuses other options than those of the checkpoint, before any data are read. */
static enum status check_resumed(const struct train_parameters *all, struct opened *opened)
{
    if (!all->resume)
        return STATUS_OK;
    TRY(train_identify(all, opened));
    const struct train_job job = {
        .checkpoints = all->checkpoint, .identity = opened->identity, .largest = all->largest};
    return trainer_check_options(&job, model_tables[all->model].name);
}

/* Sets the batch in `parameters` to the batch of this rank, because the rows show it. */
enum status train_open(const struct options *given, void *parameters_, const struct partition *partition,
                       void **input)
{
    struct train_parameters *parameters = parameters_;
    struct opened *opened = *input = calloc(1, sizeof *opened);
    TRY(comm_agree(ALLOCATED(opened, "out of memory"))); /* the ranks meet again below */
    job_hide_secrets(&parameters->job);
    if (parameters->job.feed < 0)
        parameters->job.feed = strcmp(parameters->job.data, "synth") == 0 ? DATA_LIVE : DATA_STORED;
    /* --dry-run needs the samples themselves only to compare them with a checkpoint, or to write files. */
    parameters->job.describe = options_flag(given, "dry-run") && !parameters->resume &&
                               !parameters->step_path && !parameters->data_path && !parameters->save_batch;
    parameters->several_ranks = partition->ranks > 1;
    parameters->largest = parameters->job.batch == OPTION_MAX;
    if (parameters->largest)
        parameters->job.batch = smallest_batch(parameters, partition);
    enum status status = train_check_options(given, parameters, partition);
    if (status == STATUS_OK)
        status = read_balance(parameters, partition, opened);
    struct train_parameters all = of_all_ranks(parameters, partition);
    if (status == STATUS_OK && partition->rank == 0)
        status = check_resumed(&all, opened);
    TRY(comm_agree(status));
    TRY(open_all(&all, partition, opened));
    if (!all.job.test_size)
        data_warn_of_few(&opened->data, all.job.data);
    struct partition divided = *partition;
    divided.strong |= all.asked_batch > 0; /* the ranks divide the training set */
    parameters->job.batch =
        partition_share(&divided, all.asked_batch ? all.job.batch : parameters->job.batch).count;
    parameters->stages = partition->ranks;
    return STATUS_OK;
}

/* ---- --batch max ---- */

void train_range(const void *input, const void *parameters, const struct partition *partition,
                 uint64_t *least, uint64_t *most)
{
    uint32_t count = ((const struct opened *)input)->data.sets[DATA_TRAIN].count;
    *least = smallest_batch(parameters, partition);
    *most = partition->strong ? count : count / partition->ranks;
}

enum status train_set_batch(void *input, void *parameters_, const struct partition *partition, uint64_t batch,
                            uint32_t probes)
{
    struct train_parameters *parameters = parameters_;
    struct opened *opened = input;
    parameters->job.batch = batch;
    const struct train_parameters all = of_all_ranks(parameters, partition);
    TRY(plan(&all, partition, opened));
    opened->probes = probes;
    if (probes == 0) {
        opened->job.checkpoints = opened->job.step_path = opened->job.log_path = NULL;
        opened->job.resume = false;
    }
    parameters->job.batch = partition_share(partition, batch).count;
    return STATUS_OK;
}
