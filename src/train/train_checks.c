/* Checks of the workload `train`: its options, and whether a variant supports them. */
#include <inttypes.h>
#include <string.h>

#include "data/tensor_file.h"
#include "train/augment.h"
#include "train/checkpoint.h"
#include "train/export.h"
#include "train/pipeline.h"
#include "train/step_log.h"
#include "train/train_parts.h"

/* ---- The options alone ---- */

/* Rejects a name whose ending is not .safetensors. A name without an ending is allowed. */
static enum status check_ending(const char *option, const char *path)
{
    static const char ours[] = ".safetensors";
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
    return !dot || dot == name || strcmp(dot, ours) == 0
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--%s %.200s: the file has the format safetensors; name it %.*s%s, and convert "
                            "it if a program needs another format",
                            option, path, (int)(dot - path < 200 ? dot - path : 200), path, ours);
}

/* Rejects output files that cannot be written. Only rank 0 writes files. */
static enum status check_outputs(const struct options *given, const struct train_parameters *parameters,
                                 const struct partition *partition)
{
    static const char *const options[] = {"export", "export-step", "export-data"};
    const char *const paths[] = {parameters->export_path, parameters->step_path, parameters->data_path};
    for (size_t i = 0; i < COUNT_OF(paths); i++)
        if (paths[i])
            TRY(check_ending(options[i], paths[i]));
    if (parameters->step_path && partition->ranks > 1)
        return status_set(STATUS_USAGE, "--export-step writes the samples of one rank; start without mpirun");
    for (size_t i = 0; partition->rank == 0 && i < COUNT_OF(paths); i++)
        if (paths[i])
            TRY(safetensors_check(paths[i]));
    if (parameters->save_batch && partition->rank == 0)
        TRY(export_batch_check(parameters->save_batch));
    if (parameters->log_path && partition->rank == 0)
        TRY(step_log_check(parameters->log_path));
    return parameters->checkpoint && partition->rank == 0
               ? checkpoint_check_folder(parameters->checkpoint, !options_flag(given, "dry-run"))
               : STATUS_OK;
}

/* With --batch max, rejects options that need a known batch. */
static enum status check_largest(const struct train_parameters *parameters)
{
    const char *option = parameters->repeats > 1 ? "repeats" : parameters->save_batch ? "save-batch" : NULL;
    if (option)
        return status_set(STATUS_USAGE, "--%s needs a known batch; give --batch a number", option);
    return parameters->data_path ? status_set(STATUS_USAGE, "--export-data writes its file before --batch "
                                                            "max chooses a batch; give --batch a number")
                                 : STATUS_OK;
}

/* Rejects options that compute images on the host, if these images would differ from the generator's. */
static enum status check_drawn(const struct options *given, const struct train_parameters *parameters)
{
    static const char *const computed[] = {"verify", "export-step", "save-batch"};
    for (size_t i = 0; train_draws_other_bits(parameters) && i < COUNT_OF(computed); i++)
        if (options_given(given, computed[i]))
            return status_set(STATUS_USAGE,
                              "--%s: images of --generator %s differ from those of the reference; use "
                              "--generator fused or omp, or drop --%s",
                              computed[i], train_generators[parameters->generator], computed[i]);
    return STATUS_OK;
}

/* Rejects options that have no effect with the other options, and wrong values of --mean and --std. */
static enum status check_given(const struct options *given, const struct train_parameters *parameters)
{
    static const char *const normalising[] = {"mean", "std"};
    for (size_t i = 0; parameters->raw && i < COUNT_OF(normalising); i++)
        if (options_given(given, normalising[i]))
            return status_set(STATUS_USAGE,
                              "--%s normalises samples, but --raw leaves them as they are; drop one of them",
                              normalising[i]);
    for (size_t i = 0; i < workload_train.option_count; i++) {
        const char *option = workload_train.options[i].name, *needed = train_lacking(parameters, option);
        if (needed && options_given(given, option))
            return status_set(STATUS_USAGE, "--%s needs %s; add that, or drop --%s", option, needed, option);
    }
    if (options_given(given, "verify-steps") && !options_given(given, "verify"))
        return status_set(STATUS_USAGE, "--verify-steps needs --verify; add that, or drop --verify-steps");
    TRY(check_drawn(given, parameters));
    double mean[DATA_CHANNELS_MAX], std[DATA_CHANNELS_MAX];
    if (train_has_mean(parameters))
        TRY(train_read_mean(parameters, parameters->job.out_res ? (uint32_t)parameters->job.channels : 0,
                            mean, std));
    return parameters->largest ? check_largest(parameters) : STATUS_OK;
}

enum status train_check_options(const struct options *given, const struct train_parameters *parameters,
                                const struct partition *partition)
{
    TRY(check_given(given, parameters));
    return check_outputs(given, parameters, partition);
}

/* ---- With the data, the network and the steps ---- */

enum status train_limit_batch(struct train_parameters *all, const struct partition *partition,
                              const struct data *data)
{
    const uint64_t count = data->sets[DATA_TRAIN].count;
    const uint64_t most = count < all->repeats ? count : count - count % all->repeats;
    if (count < partition->ranks)
        return status_set(STATUS_TOO_LARGE,
                          "there are only %" PRIu64 " samples to train on, fewer than the %" PRIu64
                          " ranks; start fewer ranks, or use other data",
                          count, partition->ranks);
    if (all->job.batch > most)
        all->asked_batch = all->job.batch;
    all->job.batch = job_limit_batch(all->job.batch, most, DATA_TRAIN, true);
    return STATUS_OK;
}

/* Rejects a batch that leaves a rank, or a part of a rank's step, without samples. */
static enum status check_batch(const struct train_parameters *all, const struct partition *partition)
{
    if (all->job.batch < partition->ranks)
        return status_set(STATUS_USAGE,
                          "--batch %" PRIu64 " has too few samples for %" PRIu64
                          " ranks; raise --batch, or start fewer ranks",
                          all->job.batch, partition->ranks);
    if (all->accumulate > all->job.batch / partition->ranks)
        return status_set(STATUS_USAGE,
                          "--accumulate %" PRIu64 " is more than the %" PRIu64
                          " samples of a rank's step; lower --accumulate, or raise --batch",
                          all->accumulate, all->job.batch / partition->ranks);
    return STATUS_OK;
}

/* Rejects mixed samples in a pipeline, and impossible numbers of stages and micro-batches. `all` has the
 * global batch. */
static enum status check_pipeline(const struct train_parameters *all, const struct partition *partition)
{
    if (all->parallel != PARALLEL_PIPELINE)
        return STATUS_OK;
    if (all->mixup > 0 || all->cutmix > 0)
        return status_set(STATUS_USAGE,
                          "--parallel pipeline cannot mix samples; use --parallel data, or drop "
                          "--mixup and --cutmix");
    if (all->stages && all->stages != partition->ranks)
        return status_set(STATUS_USAGE,
                          "--stages %" PRIu64 ": each rank holds one stage, and there are %" PRIu64
                          " ranks; start as many ranks as stages, or drop --stages",
                          all->stages, partition->ranks);
    if (all->micros > all->job.batch)
        return status_set(STATUS_USAGE,
                          "--microbatches %" PRIu64 " is more than the %" PRIu64
                          " samples of a step; lower --microbatches, or raise --batch",
                          all->micros, all->job.batch);
    return STATUS_OK;
}

/* Rejects a --shift that reaches the width or the height of a sample, because such a shift could leave only
 * zeros. */
static enum status check_shift(const struct train_parameters *parameters, const struct shape *shape)
{
    uint32_t side = shape->height < shape->width ? shape->height : shape->width;
    return parameters->shift < side
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--shift %" PRIu64 ": these samples are %ux%u; give a smaller shift",
                            parameters->shift, shape->height, shape->width);
}

enum status train_check_data(const struct train_parameters *all, const struct partition *partition,
                             const struct data *data)
{
    TRY(check_batch(all, partition));
    TRY(check_pipeline(all, partition));
    return check_shift(all, &data->shape);
}

enum status train_check_model(const struct train_parameters *all, const struct partition *partition,
                              const struct model *model)
{
    uint32_t most = pipe_pieces(model);
    if (all->parallel == PARALLEL_PIPELINE && model->transformer)
        return status_set(STATUS_USAGE,
                          "--parallel pipeline cannot cut %s, a transformer; use --parallel data, or another "
                          "--model",
                          model->name);
    return all->parallel != PARALLEL_PIPELINE || partition->ranks <= most
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--model %s can be cut into at most %u stages; start at most %u ranks, or use "
                            "another model",
                            model->name, most, most);
}

/* Warns if the run ends before the warm-up, before the first decay of --lr-schedule step, or before the last
 * of --lr-milestones. This is not an error: a later run with a larger --epochs may resume this one. */
static void warn_of_schedule(const struct train_parameters *all, const struct schedule *schedule)
{
    const uint64_t total = schedule->total_steps;
    const uint32_t milestones = schedule->milestone_count;
    if (schedule->warmup_steps >= total && total > 0)
        status_warn("--lr-warmup %g: the learning rate does not reach --lr within %" PRIu64
                    " epoch%s; lower --lr-warmup, or raise --epochs",
                    all->lr_warmup, all->epochs, all->epochs == 1 ? "" : "s");
    if (schedule->kind == SCHEDULE_STEP && schedule->decay_steps >= total)
        status_warn("--lr-step %" PRIu64 ": the learning rate does not decay within %" PRIu64
                    " epoch%s; lower --lr-step, or raise --epochs",
                    all->lr_step, all->epochs, all->epochs == 1 ? "" : "s");
    if (schedule->kind == SCHEDULE_MULTISTEP && schedule->milestones[milestones - 1] >= total)
        status_warn("--lr-milestones %.80s: the last one is not reached within %" PRIu64
                    " epoch%s; lower it, or raise --epochs",
                    all->lr_milestones, all->epochs, all->epochs == 1 ? "" : "s");
}

/* Rejects schedules that leave no steps for the decay, or that would raise the rate. */
static enum status check_schedule(const struct train_parameters *all, const struct train *train)
{
    const struct schedule *schedule = &train->schedule;
    if (!schedule_has_end(schedule->kind)) {
        if (train->rank == 0)
            warn_of_schedule(all, schedule);
        return STATUS_OK;
    }
    if (schedule->warmup_steps >= schedule->total_steps)
        return status_set(STATUS_USAGE,
                          "--lr-warmup %g leaves none of the %" PRIu64
                          " epochs for the decay; lower --lr-warmup",
                          all->lr_warmup, all->epochs);
    if (schedule->cycles > schedule->total_steps - schedule->warmup_steps)
        return status_set(STATUS_USAGE,
                          "--lr-cycles %" PRIu64 ": there are only %" PRIu64
                          " steps after the warm-up; lower --lr-cycles",
                          all->lr_cycles, schedule->total_steps - schedule->warmup_steps);
    if (schedule->least > schedule->rate)
        return status_set(STATUS_USAGE, "--lr-min %g is more than the learning rate %g; lower --lr-min",
                          schedule->least, schedule->rate);
    return STATUS_OK;
}

/* Rejects augmentation that is impossible with these samples. */
static enum status check_augment(const struct train_parameters *all, const struct train *train)
{
    struct augment_plan plan;
    const uint64_t count = train->data->sets[DATA_TRAIN].count;
    if (all->repeats > count)
        return status_set(STATUS_USAGE,
                          "--repeats %" PRIu64 " is more than the %" PRIu64
                          " training samples; lower --repeats",
                          all->repeats, count);
    if (all->job.batch % all->repeats != 0)
        return status_set(STATUS_USAGE,
                          "--repeats %" PRIu64 " does not divide the %" PRIu64
                          " samples of a step; give a --batch that is a multiple of it",
                          all->repeats, all->job.batch);
    if (count * all->repeats > UINT32_MAX)
        return status_set(
            STATUS_USAGE,
            "--repeats %" PRIu64 ": %" PRIu64
            " copies of the training samples are more than 2^32 - 1; lower --repeats or --train-size",
            all->repeats, count * all->repeats);
    return augment_computes(&train->augment) ? augment_plan(train, &plan) : STATUS_OK;
}

enum status train_check_steps(const struct train_parameters *all, const struct train *train)
{
    TRY(check_schedule(all, train));
    return check_augment(all, train);
}

/* ---- Variants ---- */

/* Rejects generators for GPUs in engines that run on a CPU. */
static enum status check_generator(const struct train *train, const struct variant *variant)
{
    const bool for_cpu = !train->generator || strcmp(train->generator, "omp") == 0;
    return for_cpu || strcmp(variant->platform, "cuda") == 0
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "it runs on a CPU, and --generator %s generates images on a GPU; use "
                            "--generator omp or auto",
                            train->generator);
}

/* Rejects augmentation that the engine does not support. */
static enum status check_augments(const struct opened *opened, const struct engine *engine)
{
    const struct augment *augment = &opened->job.train.augment;
    const bool simple = !augment_computes(augment) && augment->erasing <= 0;
    return simple || (engine->augments && !opened->job.pipeline.stages)
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "it augments samples only by --shift and --flip; drop --fit "
                     "random-resized-crop, --rand-augment, --erasing and --repeats, or use train-cuda, "
                     "train-vit, train-omp or train-naive with --parallel data");
}

enum status train_accepts(const void *input, const struct variant *variant)
{
    const struct opened *opened = input;
    const struct train *train = &opened->job.train;
    const struct engine *engine = variant->traits;
    if (engine->accepts) /* first, because another --feed would not help if this fails */
        TRY(engine->accepts(train));
    if (train->checkpoint_activations && !engine->recomputes)
        return status_set(STATUS_USAGE, "--checkpoint-activations works only with train-vit; drop it");
    TRY(check_generator(train, variant));
    if (train->cudnn_benchmark && !engine->benchmarks)
        return status_set(STATUS_USAGE,
                          "--cudnn-benchmark works only with train-cudnn and train-cudnn-tf32; drop it");
    TRY(check_augments(opened, engine));
    if (opened->job.pipeline.stages)
        TRY(pipeline_accepts(engine, opened->data.feed));
    else if (train->ranks > 1)
        TRY(exchange_probe(opened->job.sync, engine, &train->optimizer));
    if (train->ranks > 1 && opened->job.balance == BALANCE_MEASURED &&
        engine->gradients_in == GRADIENTS_IN_GRAPH)
        return status_set(STATUS_USAGE,
                          "its CUDA graph contains the shares and the exchange, so it can neither "
                          "measure speeds nor change shares; use --balance equal, memory or a "
                          "list such as 3:1, or use train-bf16");
    return engine->feeds || opened->data.feed == DATA_STORED
               ? STATUS_OK
               : status_set(STATUS_USAGE, "it needs all training samples in memory; use --feed stored");
}
