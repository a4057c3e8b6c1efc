/* The columns of the rows of the workload `train`, and the work of a run. */
#include <inttypes.h>
#include <math.h>

#include "train/augment.h"
#include "train/pipeline.h"
#include "train/train_parts.h"

const struct measure train_columns[] = {
    {"timed_stages", COMBINE_FIRST},
    {"epoch", COMBINE_SAME},
    {"steps", COMBINE_SAME},
    {"parameters", COMBINE_SAME},
    {"train_samples", COMBINE_SAME},
    {"test_samples", COMBINE_SAME},
    {"skipped", COMBINE_SAME},
    {"train_loss", COMBINE_SAME},
    {"train_acc", COMBINE_SAME},
    {"test_loss", COMBINE_SAME},
    {"test_acc", COMBINE_SAME},
    {"last_lr", COMBINE_SAME},
    {"trained_s", COMBINE_SAME},
    {"to_98_s", COMBINE_SAME},
    {"to_99_s", COMBINE_SAME},
    {"data_share", COMBINE_MAX},
    {"memory_bytes", COMBINE_SUM},
    {"generate_share", COMBINE_MAX},
    {"generated_per_s", COMBINE_SUM_REAL},
    {"opening_s", COMBINE_MAX},
    {"init", COMBINE_FIRST},
    {"skipped_steps", COMBINE_SAME},
    {"loss_scale", COMBINE_SAME},
    {"exchange", COMBINE_FIRST},
    {"exchange_share", COMBINE_MAX},
    {"samples_per_step", COMBINE_SUM},
    {"layers", COMBINE_COMMON},
    {"bubble", COMBINE_MEAN},
    {"bubble_ideal", COMBINE_MEAN},
    {"bubble_formula", COMBINE_SAME},
    {"batch_probes", COMBINE_SAME},
    {"gradient_norm", COMBINE_SAME},
    {"ema_test_loss", COMBINE_SAME},
    {"ema_test_acc", COMBINE_SAME},
    {NULL, COMBINE_FIRST},
};

/* Returns the bytes of the parameters, their moving average and their optimizer state, which every step must
 * read and write. */
static double updated_bytes(const struct train *train)
{
    const struct optimizer *optimizer = &train->optimizer;
    int moments = optimizer->kind != OPTIMIZER_SGD ? 2 : optimizer->momentum > 0 ? 1 : 0;
    const int arrays = 1 + moments + train_averages(train);
    return (double)train->model->parameters * arrays * sizeof(float);
}

struct work train_work(const void *input, const struct variant *variant)
{
    const struct opened *opened = input;
    const struct train *train = &opened->job.train;
    const struct engine *engine = variant->traits;
    double samples = (double)train_share_of_epoch(train);
    double bytes = samples * (double)data_stored_bytes(&opened->data, DATA_TRAIN);
    return (struct work){.items = samples,
                         .bytes = bytes,
                         .least = {.flops = samples * model_flops(&opened->model, &engine->savings),
                                   .unit = engine->unit,
                                   .once_bytes = opened->data.feed == DATA_STORED ? bytes : 0,
                                   .round_bytes = updated_bytes(train),
                                   .rounds = 2.0 * train_steps(train)}};
}

/* Values that are unknown (NaN) leave their column empty. */
static void put_learning(const struct train_epoch *epoch, struct measures *measures)
{
    measures_real(measures, "train_loss", epoch->loss, 9);
    measures_real(measures, "train_acc", epoch->train_accuracy, 6);
    measures_real(measures, "test_loss", epoch->test_loss, 9);
    measures_real(measures, "test_acc", epoch->test_accuracy, 6);
    measures_real(measures, "gradient_norm", epoch->gradient_norm, 6);
    measures_real(measures, "ema_test_loss", epoch->ema_loss, 9);
    measures_real(measures, "ema_test_acc", epoch->ema_accuracy, 6);
    measures_real(measures, "last_lr", epoch->rate, 9);
    measures_real(measures, "trained_s", epoch->history.trained_s, 9);
    measures_real(measures, "to_98_s", epoch->history.to_98_s < 0 ? NAN : epoch->history.to_98_s, 9);
    measures_real(measures, "to_99_s", epoch->history.to_99_s < 0 ? NAN : epoch->history.to_99_s, 9);
}

static void put_pipeline(const struct train_epoch *epoch, const struct pipeline_plan *plan,
                         struct measures *measures)
{
    measures_put(measures, "layers", "%s", epoch->layers);
    measures_real(measures, "bubble", epoch->bubble, 4);
    measures_real(measures, "bubble_ideal", epoch->bubble_ideal, 4);
    measures_real(measures, "bubble_formula", pipe_bubble(plan->schedule, plan->stages, plan->micros), 4);
}

enum status train_measure(const void *input, const struct variant *variant, void *state,
                          struct measures *measures)
{
    const struct opened *opened = input;
    struct train_epoch epoch;
    (void)variant;
    TRY(trainer_finish(state, &epoch));
    measures_put(measures, "timed_stages", "%s%sgather+forward+%sbackward+%supdate",
                 opened->data.feed == DATA_LIVE ? "generate+" : "",
                 augment_computes(&opened->job.train.augment) ? "augment+" : "",
                 opened->job.train.checkpoint_activations ? "recompute+" : "",
                 *epoch.exchange ? "exchange+" : "");
    measures_put(measures, "epoch", "%" PRIu32, epoch.history.epochs);
    measures_put(measures, "steps", "%" PRIu32, epoch.steps);
    measures_put(measures, "parameters", "%zu", opened->model.parameters);
    measures_put(measures, "train_samples", "%" PRIu32, opened->data.sets[DATA_TRAIN].count);
    measures_put(measures, "test_samples", "%" PRIu32, opened->data.sets[DATA_TEST].count);
    job_put_skipped(&opened->data, measures);
    put_learning(&epoch, measures);
    measures_real(measures, "data_share", epoch.data_s < 0 ? NAN : epoch.data_s / epoch.epoch_s, 4);
    measures_put(measures, "memory_bytes", "%" PRIu64, epoch.memory_bytes);
    if (opened->data.feed == DATA_LIVE) {
        measures_real(measures, "generate_share", epoch.generate_s / epoch.epoch_s, 4);
        measures_real(measures, "generated_per_s",
                      (double)train_share_of_epoch(&opened->job.train) / epoch.generate_s, 6);
    }
    measures_real(measures, "opening_s", opened->data.opening_s, 6);
    measures_put(measures, "init", "%s", opened->init);
    if (epoch.scales_loss) {
        measures_put(measures, "skipped_steps", "%" PRIu64, epoch.skipped);
        measures_real(measures, "loss_scale", epoch.loss_scale, 9);
    }
    measures_put(measures, "exchange", "%s", epoch.exchange);
    if (*epoch.exchange)
        measures_real(measures, "exchange_share", epoch.exchange_s / epoch.epoch_s, 4);
    if (opened->job.shares)
        measures_put(measures, "samples_per_step", "%" PRIu64, train_share(&opened->job.train, 0).count);
    if (opened->job.pipeline.stages)
        put_pipeline(&epoch, &opened->job.pipeline, measures);
    if (opened->probes)
        measures_put(measures, "batch_probes", "%" PRIu32, opened->probes);
    return STATUS_OK;
}
