/* The reports of a training run: columns of its rows, FLOPs and bytes, a line on the terminal, and rows of
 * --log. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/file.h"
#include "core/parallel.h"
#include "core/timer.h"
#include "machine/device.h"
#include "machine/host.h"
#include "machine/nvml.h"
#include "train/pipeline.h"
#include "train/train.h"
#include "train/trainer.h"

const struct column train_columns[] = {
    {"timed_stages", VALUE_WORD, COMBINE_FIRST, "", .about = "the stages that the time of a run includes"},
    {"epoch", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "number of the epoch, from 1; a resumed run continues counting"},
    {"steps", VALUE_INTEGER, COMBINE_FIRST, "", .about = "steps in the epoch"},
    {"parameters", VALUE_INTEGER, COMBINE_FIRST, "", .about = "parameters of the network"},
    {"train_samples", VALUE_INTEGER, COMBINE_FIRST, "", .about = "samples of the training set"},
    {"test_samples", VALUE_INTEGER, COMBINE_FIRST, "", .about = "samples of the test set"},
    {"skipped", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "broken samples that --on-error skip left out of both sets, or --on-error mask of the test "
              "set; empty if the number is unknown"},
    {"train_loss", VALUE_REAL, COMBINE_FIRST, "",
     .about = "mean loss over the training samples of the epoch, computed by the training steps",
     .better = BETTER_LOWER, .of_run = true},
    {"train_acc", VALUE_REAL, COMBINE_FIRST, "",
     .about = "share of the epoch's training samples that the training steps classified correctly",
     .digits = 6, .better = BETTER_HIGHER, .of_run = true},
    {"test_loss", VALUE_REAL, COMBINE_FIRST, "", .about = "mean loss over the test set after the epoch",
     .better = BETTER_LOWER, .of_run = true},
    {"test_acc", VALUE_REAL, COMBINE_FIRST, "",
     .about = "share of the test set that is classified correctly after the epoch", .digits = 6,
     .better = BETTER_HIGHER, .of_run = true},
    {"last_lr", VALUE_REAL, COMBINE_FIRST, "", .about = "learning rate of the epoch's last step"},
    {"trained_s", VALUE_REAL, COMBINE_FIRST, "s",
     .about = "time of all epochs so far, including those before a resumption", .of_run = true},
    {"to_98_s", VALUE_REAL, COMBINE_FIRST, "s",
     .about = "trained_s after the first epoch with a test_acc of at least 0.98", .of_run = true},
    {"to_99_s", VALUE_REAL, COMBINE_FIRST, "s",
     .about = "trained_s after the first epoch with a test_acc of at least 0.99", .of_run = true},
    {"data_share", VALUE_REAL, COMBINE_MAX, "",
     .about = "share of the epoch's time in which training waited for samples or gathered them", .digits = 4},
    {"memory_bytes", VALUE_INTEGER, COMBINE_SUM, "bytes", .about = "memory that the engine allocates",
     .better = BETTER_LOWER},
    {"generate_share", VALUE_REAL, COMBINE_MAX, "",
     .about = "share of the epoch's time in which live samples were generated", .digits = 4},
    {"generated_per_s", VALUE_REAL, COMBINE_SUM, "samples/s",
     .about = "generated samples divided by the time in which samples were generated", .digits = 6},
    {"opening_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time to read or generate the data before the first epoch", .digits = 6},
    {"end_to_end_per_s", VALUE_REAL, COMBINE_SUM, "samples/s",
     .about = "samples trained on in all epochs so far / (opening_s + trained_s): the rate with reading",
     .digits = 6, .better = BETTER_HIGHER},
    {"dim", VALUE_INTEGER, COMBINE_FIRST, "", .about = "values per row; only for rows of embeddings"},
    {"dtype", VALUE_WORD, COMBINE_FIRST, "",
     .about = "element type of the stored values; only for rows of embeddings"},
    {"init", VALUE_WORD, COMBINE_FIRST, "", .about = "hash of the parameters that --init started from"},
    {"skipped_steps", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "steps of the epoch that loss scaling skipped"},
    {"loss_scale_last", VALUE_REAL, COMBINE_FIRST, "", .about = "scale of the loss after the epoch"},
    {"exchange", VALUE_WORD, COMBINE_FIRST, "", .about = "how the ranks add up their gradients"},
    {"exchange_share", VALUE_REAL, COMBINE_MAX, "",
     .about = "share of the epoch's time in which this rank exchanged gradients", .digits = 4},
    {"samples_per_step", VALUE_INTEGER, COMBINE_SUM, "",
     .about = "samples of a step that this rank trains on"},
    {"layers", VALUE_WORD, COMBINE_COMMON, "",
     .about = "first and last layer of this rank's stage of the pipeline"},
    {"bubble", VALUE_REAL, COMBINE_MEAN, "",
     .about = "measured share of a step in which the stage waited for messages", .digits = 4},
    {"bubble_ideal", VALUE_REAL, COMBINE_MEAN, "",
     .about = "simulated bubble if messages took no time and each pass its mean time", .digits = 4},
    {"bubble_formula", VALUE_REAL, COMBINE_FIRST, "",
     .about = "computed bubble with equal stages, by the formula of the schedule", .digits = 4},
    {"batch_probes", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "batches that --batch max tried; empty if --batch is a number"},
    {"gradient_norm", VALUE_REAL, COMBINE_FIRST, "",
     .about = "mean norm of the gradients before clipping, over the steps since the previous row; only with "
              "--clip-norm",
     .digits = 6},
    {"ema_test_loss", VALUE_REAL, COMBINE_FIRST, "",
     .about = "test_loss of the moving average of the parameters"},
    {"ema_test_acc", VALUE_REAL, COMBINE_FIRST, "",
     .about = "test_acc of the moving average of the parameters", .digits = 6},
    {"decoder", VALUE_WORD, COMBINE_FIRST, "",
     .about = "decoder of the JPEG files of --feed load that was used; empty without --feed load"},
    {"device_share", VALUE_REAL, COMBINE_FIRST, "",
     .about = "share of the samples that this decoder takes, if it is on a device; --threads decode the "
              "others"},
    {"masked", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "training samples of the epoch whose image or label is broken and which therefore have weight "
              "0 (--on-error mask), of all ranks; empty without --feed load"},
    {"stall_share", VALUE_REAL, COMBINE_MAX, "",
     .about = "share of the epoch's time in which steps waited for the samples of --feed load", .digits = 4},
    {"decode_share", VALUE_REAL, COMBINE_MEAN, "",
     .about = "time in which the threads of --feed load decoded, mean over the threads, divided by the "
              "epoch's time; it includes samples of later steps, so it can exceed 1",
     .digits = 4},
    {"read_bytes_per_s", VALUE_REAL, COMBINE_SUM, "bytes/s",
     .about = "bytes that --feed load read per second of the epoch", .digits = 6},
    {"cpu_cores", VALUE_REAL, COMBINE_SUM, "",
     .about = "CPU time per second of the epoch, of all threads; only with --feed load", .digits = 4},
    {"resident_samples", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "training samples whose files stay in the memory of each rank after they were read "
              "(--resident-bytes); only with --feed load"},
    {"mix_shares", VALUE_WORD, COMBINE_FIRST, "",
     .about = "share of each source in the steps of --feed mixed, before --mix-weights-at"},
    {"resident_device_samples", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "training samples that are in the memory of the GPU of each rank (--resident-device-bytes); "
              "only with --feed load"},
    {"test_map", VALUE_REAL, COMBINE_FIRST, "",
     .about =
         "mean average precision over the classes that the test set shows; empty unless labels are "
         "multi-hot, and a sample is then classified correctly if it shows the class of its largest logit",
     .digits = 6, .better = BETTER_HIGHER, .of_run = true},
    {"ema_test_map", VALUE_REAL, COMBINE_FIRST, "",
     .about = "test_map of the moving average of the parameters", .digits = 6},
    {"memory_planned_bytes", VALUE_INTEGER, COMBINE_MAX, "bytes",
     .about = "memory that was planned before it was allocated, with the context of the GPU or the rest of "
              "the process; only with --memory, --memory-limit and --parallel auto"},
    {"memory_used_bytes", VALUE_INTEGER, COMBINE_MAX, "bytes",
     .about = "memory in use after the epoch, of all processes on the GPU or of this process; only with "
              "memory_planned_bytes"},
    {"step_planned_s", VALUE_REAL, COMBINE_FIRST, "s",
     .about = "time per step that --parallel auto has measured before the first epoch; empty if it took the "
              "choice from a checkpoint"},
    {"overflow_layers", VALUE_WORD, COMBINE_FIRST, "",
     .about = "of the skipped_steps of this process, the number per layer in which the overflow began, as in "
              "head=2 fc1=1: at most 8 layers; --fp32-layers computes layers in fp32"},
    {.name = NULL},
};

/* Returns the bytes of the parameters, their moving average and their optimizer state, which every step must
 * read and write. Muon has only the momentum of hidden matrices. */
static double updated_bytes(const struct train *train)
{
    const struct optimizer *optimizer = &train->optimizer;
    const bool plain = optimizer->kind == OPTIMIZER_SGD && optimizer->momentum == 0;
    double values = 0;
    for (uint32_t t = 0; t < train->model->tensor_count; t++) {
        const struct model_tensor *tensor = &train->model->tensors[t];
        const int moments = plain ? 0
                            : optimizer->kind == OPTIMIZER_MUON && tensor->hidden
                                ? 1
                                : optimizer_moments(optimizer->kind);
        values += (double)tensor->values * (1 + moments + train_averages(train));
    }
    return values * sizeof(float);
}

/* Returns how many samples this rank trains in `epochs` epochs, the first of which begins with step
 * `skipped`. */
static double samples_of(const struct train *train, uint32_t epochs, uint32_t skipped)
{
    return (double)train_share_of_epoch(train) * epochs -
           (double)((uint64_t)skipped * train_share(train, 0).count);
}

struct work train_work(const void *input, const struct variant *variant)
{
    const struct opened *opened = input;
    const struct train *train = &opened->job.train;
    const struct engine *engine = variant->traits;
    double samples = samples_of(train, 1, opened->skipped);
    double bytes = samples * (double)data_stored_bytes(&opened->data, DATA_TRAIN);
    return (struct work){.items = samples,
                         .bytes = bytes,
                         .least = {.flops = samples * model_flops(&opened->model, &engine->savings),
                                   .unit = engine->unit,
                                   .once_bytes = opened->data.feed == DATA_STORED ? bytes : 0,
                                   .round_bytes = updated_bytes(train),
                                   .rounds = 2.0 * (train_steps(train) - opened->skipped)}};
}

/* Values that are unknown (NaN) leave their column empty. */
static void put_learning(const struct train_epoch *epoch, struct row *row)
{
    row_real(row, "train_loss", epoch->loss);
    row_real(row, "train_acc", epoch->train_accuracy);
    row_real(row, "test_loss", epoch->test.loss);
    row_real(row, "test_acc", epoch->test.accuracy);
    row_real(row, "test_map", epoch->test.precision);
    row_real(row, "gradient_norm", epoch->gradient_norm);
    row_real(row, "ema_test_loss", epoch->ema.loss);
    row_real(row, "ema_test_acc", epoch->ema.accuracy);
    row_real(row, "ema_test_map", epoch->ema.precision);
    row_real(row, "last_lr", epoch->rate);
    row_real(row, "trained_s", epoch->history.trained_s);
    row_real(row, "to_98_s", epoch->history.to_98_s < 0 ? NAN : epoch->history.to_98_s);
    row_real(row, "to_99_s", epoch->history.to_99_s < 0 ? NAN : epoch->history.to_99_s);
}

static void put_pipeline(const struct train_epoch *epoch, const struct pipeline_plan *plan, struct row *row)
{
    row_text(row, "layers", epoch->layers);
    row_real(row, "bubble", epoch->bubble);
    row_real(row, "bubble_ideal", epoch->bubble_ideal);
    row_real(row, "bubble_formula", pipe_bubble(plan->schedule, plan->stages, plan->micros));
}

static void put_stream(const struct train_epoch *epoch, int threads, struct row *row)
{
    row_text(row, "decoder", decoder_names[epoch->decoding.decoder]);
    row_real(row, "device_share", epoch->decoding.share);
    row_count(row, "masked", epoch->totals.masked);
    row_real(row, "stall_share", epoch->totals.stall_s / epoch->epoch_s);
    row_real(row, "decode_share", epoch->totals.decode_s / (epoch->epoch_s * threads));
    row_real(row, "read_bytes_per_s", (double)epoch->totals.read_bytes / epoch->epoch_s);
    row_count(row, "resident_samples", epoch->totals.resident);
    if (epoch->totals.resident_device)
        row_count(row, "resident_device_samples", epoch->totals.resident_device);
    row_real(row, "cpu_cores", epoch->cpu_s / epoch->cpu_span_s);
}

/* Returns the number of samples that this rank generates in an epoch, if it generates any: the first stage of
 * a pipeline generates those of the whole pipeline. */
static uint64_t generated_of(const struct train_job *job)
{
    const uint32_t stages = job->pipeline.stages ? job->pipeline.stages : 1;
    struct train train = job->train;
    train.rank /= stages;
    train.ranks /= stages;
    return train_share_of_epoch(&train);
}

enum status train_measure(const void *input, const struct variant *variant, void *state, struct row *row)
{
    const struct opened *opened = input;
    struct train_epoch epoch;
    char stages[96];
    (void)variant;
    TRY(trainer_finish(state, &epoch));
    snprintf(stages, sizeof stages, "%s%sgather+forward+%sbackward+%supdate",
             opened->data.feed == DATA_LIVE   ? "generate+"
             : opened->data.feed == DATA_LOAD ? "read+decode+"
                                              : "",
             augment_computes(&opened->job.train.augment) ? "augment+" : "",
             opened->job.train.checkpoint_activations ? "recompute+" : "",
             *epoch.exchange ? "exchange+" : "");
    row_text(row, "timed_stages", stages);
    row_count(row, "epoch", epoch.history.epochs);
    row_count(row, "steps", epoch.steps);
    row_count(row, "parameters", opened->model.parameters);
    row_count(row, "train_samples", opened->data.sets[DATA_TRAIN].count);
    row_count(row, "test_samples", opened->data.sets[DATA_TEST].count);
    job_put_skipped(&opened->data, row);
    put_learning(&epoch, row);
    row_real(row, "data_share", epoch.totals.data_s < 0 ? NAN : epoch.totals.data_s / epoch.epoch_s);
    row_count(row, "memory_bytes", epoch.memory_bytes);
    if (opened->data.feed == DATA_LIVE) {
        row_real(row, "generate_share", epoch.totals.generate_s / epoch.epoch_s);
        row_real(row, "generated_per_s",
                 epoch.totals.generate_s > 0 ? (double)generated_of(&opened->job) / epoch.totals.generate_s
                                             : NAN);
    }
    if (opened->data.feed == DATA_LOAD)
        put_stream(&epoch, job_all_threads().threads, row);
    if (opened->data.mixture) {
        char shares[MIXTURE_SOURCES * (MIXTURE_NAME + 12)];
        data_mixture_shares(&opened->data, shares, sizeof shares);
        row_text(row, "mix_shares", shares);
    }
    row_real(row, "opening_s", opened->data.opening_s);
    const uint32_t before = opened->job.begin ? (uint32_t)opened->job.begin->epoch : 0;
    row_real(
        row, "end_to_end_per_s",
        samples_of(&opened->job.train, epoch.history.epochs - before, resume_skipped(&opened->job, before)) /
            (opened->data.opening_s + epoch.history.trained_s));
    if (opened->data.rows) {
        row_count(row, "dim", opened->data.sample_values);
        row_text(row, "dtype", dtype_names[opened->data.type]);
    }
    row_text(row, "init", opened->init);
    if (epoch.scales_loss) {
        row_count(row, "skipped_steps", epoch.totals.skipped);
        row_real(row, "loss_scale_last", epoch.loss_scale);
        row_text(row, "overflow_layers", epoch.overflows);
    }
    row_text(row, "exchange", epoch.exchange);
    if (*epoch.exchange)
        row_real(row, "exchange_share", epoch.exchange_s / epoch.epoch_s);
    if (opened->job.shares)
        row_count(row, "samples_per_step", train_share(&opened->job.train, 0).count);
    if (opened->job.pipeline.stages)
        put_pipeline(&epoch, &opened->job.pipeline, row);
    if (opened->probes)
        row_count(row, "batch_probes", opened->probes);
    if (epoch.planned_bytes) {
        row_count(row, "memory_planned_bytes", epoch.planned_bytes);
        row_count(row, "memory_used_bytes", epoch.used_bytes);
    }
    if (opened->chosen_step_s > 0)
        row_real(row, "step_planned_s", opened->chosen_step_s);
    return STATUS_OK;
}

/* ---- The line on the terminal ---- */

#define INTERVAL_S 0.25

struct display {
    const struct engine *engine;
    const void *state;
    const struct train *train;
    uint32_t epochs;
    _Atomic uint32_t running; /* current epoch, counted from 1; 0: none */
    _Atomic double begin_s;   /* start of the current epoch plus the duration of its pauses */
    /* Sums over the earlier steps of the current epoch, which the engine no longer includes in its sums. */
    _Atomic double passed_loss;
    _Atomic uint64_t passed_correct, passed_samples;
    struct ticker *ticker;
    pthread_mutex_t mutex; /* locked while a line is printed */
};

static void show(struct display *display)
{
    uint32_t epoch = atomic_load(&display->running);
    struct train_progress now;
    if (epoch == 0)
        return;
    display->engine->progress(display->state, &now);
    now.loss += atomic_load(&display->passed_loss);
    now.correct += atomic_load(&display->passed_correct);
    now.samples += atomic_load(&display->passed_samples);
    double elapsed_s = timer_now_s() - atomic_load(&display->begin_s);
    uint64_t part = train_share(display->train, 0).count; /* of this rank */
    if (now.samples == 0 || part == 0)
        return;
    uint64_t step = (now.samples + part - 1) / part;
    fprintf(stderr,
            "\r\033[Ktrain-%s: epoch %u of %u, step %llu of %u, loss %.4f, %.2f %% correct, %.0f samples/s",
            display->engine->name, epoch, display->epochs, (unsigned long long)step,
            train_steps(display->train), now.loss / (double)now.samples,
            100 * (double)now.correct / (double)now.samples, (double)now.samples / elapsed_s);
    fflush(stderr);
}

static void tick(void *context, uint64_t missed)
{
    struct display *display = context;
    (void)missed;
    pthread_mutex_lock(&display->mutex);
    show(display);
    pthread_mutex_unlock(&display->mutex);
}

struct display *display_open(const struct engine *engine, const void *state, const struct train *train,
                             uint32_t epochs)
{
    struct display *display = status_shows_progress() ? calloc(1, sizeof *display) : NULL;
    if (!display)
        return NULL;
    display->engine = engine;
    display->state = state;
    display->train = train;
    display->epochs = epochs;
    pthread_mutex_init(&display->mutex, NULL);
    if (ticker_open(INTERVAL_S, tick, display, &display->ticker) == 0)
        return display;
    display_close(display);
    return NULL;
}

void display_begin(struct display *display, uint32_t epoch)
{
    if (!display)
        return;
    atomic_store(&display->begin_s, timer_now_s());
    atomic_store(&display->running, epoch + 1);
}

void display_pass(struct display *display, const struct train_totals *totals, double epoch_s)
{
    if (!display)
        return;
    atomic_store(&display->passed_loss, totals->loss);
    atomic_store(&display->passed_correct, totals->correct);
    atomic_store(&display->passed_samples, totals->samples);
    atomic_store(&display->begin_s, timer_now_s() - epoch_s);
}

void display_end(struct display *display)
{
    if (display)
        atomic_store(&display->running, 0);
}

void display_wait(struct display *display)
{
    if (!display)
        return;
    pthread_mutex_lock(&display->mutex);
    pthread_mutex_unlock(&display->mutex);
}

void display_close(struct display *display)
{
    if (!display)
        return;
    ticker_close(display->ticker);
    pthread_mutex_destroy(&display->mutex);
    free(display);
}

/* ---- Rows of --log ---- */

#define GPU_NOTE " of the GPU of rank 0 when the row is written; empty on a CPU"

const struct column step_columns[] = {
    ORIGIN_COLUMNS("always steps/1", "time of the row"),
    {"workload", VALUE_WORD, COMBINE_FIRST, "", .about = "always train"},
    {"variant", VALUE_WORD, COMBINE_FIRST, "", .about = "the variant"},
    {"device", VALUE_WORD, COMBINE_FIRST, "", .about = "the GPU or CPU that rank 0 runs on"},
    {"ranks", VALUE_INTEGER, COMBINE_FIRST, "", .about = "number of ranks"},
    {"seed", VALUE_INTEGER, COMBINE_FIRST, "", .about = "value of --seed"},
    {"model", VALUE_WORD, COMBINE_FIRST, "", .about = "the network"},
    {"epoch", VALUE_INTEGER, COMBINE_FIRST, "", .about = "number of the epoch, from 1"},
    {"step", VALUE_INTEGER, COMBINE_FIRST, "", .about = "steps over all epochs"},
    {"samples_seen", VALUE_INTEGER, COMBINE_SUM, "",
     .about = "training samples in these steps, also masked ones"},
    {"loss", VALUE_REAL, COMBINE_MEAN, "",
     .about = "mean over the training samples since the previous row, before each step's update"},
    {"accuracy", VALUE_REAL, COMBINE_MEAN, "",
     .about = "share of the training samples since the previous row that are classified correctly, before "
              "each step's update"},
    {"lr", VALUE_REAL, COMBINE_FIRST, "", .about = "learning rate of this step"},
    {"gradient_norm", VALUE_REAL, COMBINE_FIRST, "",
     .about = "mean, over the steps since the previous row, of the gradients' norm before clipping; empty "
              "without --clip-norm, and if all these steps overflowed and were skipped"},
    {"items_per_s", VALUE_REAL, COMBINE_SUM, "samples/s",
     .about = "training samples per second since the previous row, also masked ones; without tests, "
              "checkpoints and rows"},
    {"gpu_utilisation_percent", VALUE_INTEGER, COMBINE_FIRST, "%", .about = "utilisation" GPU_NOTE},
    {"gpu_memory_bytes", VALUE_INTEGER, COMBINE_FIRST, "bytes", .about = "used memory" GPU_NOTE},
    {"test_loss", VALUE_REAL, COMBINE_FIRST, "",
     .about = "mean loss over the test set; empty if the network was not tested at this step"},
    {"test_acc", VALUE_REAL, COMBINE_FIRST, "",
     .about = "share of the test set that is classified correctly; empty if the network was not tested at "
              "this step"},
    {.name = NULL},
};

struct step_log {
    const char *path;
    const struct train *train;
    int ranks;
    char variant[64];
    struct env env;
    struct device_info device; /* its bus id is empty if the engine trains on the CPU */
};

/* GPU values of rank 0, as --monitor samples them; empty on a CPU and without NVML. */
static void add_gpu(const struct step_log *log, struct row *row)
{
    struct gpu_state gpu = {.utilisation_percent = -1, .memory_used_bytes = -1};
    if (*log->device.pci_bus_id && nvml_gpu_state(log->device.pci_bus_id, &gpu) != STATUS_OK)
        gpu = (struct gpu_state){.utilisation_percent = -1, .memory_used_bytes = -1};
    row_real(row, "gpu_utilisation_percent", gpu.utilisation_percent < 0 ? NAN : gpu.utilisation_percent);
    if (gpu.memory_used_bytes < 0)
        row_text(row, "gpu_memory_bytes", "");
    else
        row_count(row, "gpu_memory_bytes", (unsigned long long)gpu.memory_used_bytes);
}

/* Adds the columns by which figures and other readers of the file distinguish training runs. */
static void add_training(const struct step_log *log, struct row *row)
{
    const struct train *train = log->train;
    row_text(row, "workload", "train");
    row_text(row, "variant", log->variant);
    row_text(row, "device", *log->device.pci_bus_id ? log->device.name : log->env.cpu_model);
    row_count(row, "ranks", (unsigned long long)log->ranks);
    row_count(row, "seed", train ? train->seed : 0);
    row_text(row, "model", train ? train->model->name : "");
}

static void make_row(const struct step_log *log, const struct step_row *step, struct row *row)
{
    const struct train *train = log->train;
    const struct train_totals *totals = &step->totals;
    char time_utc[ENV_TIME_MAX];
    env_time(time_utc);
    row_open(row, step_columns);
    row_text(row, "schema", "steps/1");
    row_text(row, "time_utc", time_utc);
    row_text(row, "host", log->env.host);
    row_text(row, "job_id", log->env.job_id);
    row_text(row, "revision", log->env.revision);
    add_training(log, row);
    row_count(row, "epoch", step->epoch);
    row_count(row, "step", step->step);
    row_count(row, "samples_seen", step->samples_seen);
    row_real(row, "loss", totals->loss / (double)totals->samples);
    row_real(row, "accuracy", (double)totals->correct / (double)totals->samples);
    row_real(row, "lr", train ? schedule_rate(&train->schedule, step->step - 1) : NAN);
    row_real(row, "gradient_norm", totals->normed ? totals->norms / (double)totals->normed : NAN);
    row_real(row, "items_per_s", (double)(totals->samples + totals->masked) / step->steps_s);
    add_gpu(log, row);
    row_real(row, "test_loss", step->test_loss);
    row_real(row, "test_acc", step->test_accuracy);
}

enum status step_log_check(const char *path)
{
    const struct step_log log = {0};
    const struct step_row step = {0};
    CLOSED_BY(row_free) struct row row = {0};
    make_row(&log, &step, &row);
    return status_prefix(csv_check(path, &row), "--log");
}

/* Returns whether row number `number` of a file has the values of `run`. */
static bool is_same_run(const struct table *table, size_t number, const struct row *run)
{
    char text[VALUE_TEXT_MAX];
    bool same = true;
    for (size_t i = 0; i < run->count; i++)
        if (run->values[i].type != VALUE_ABSENT)
            same &= strcmp(table_cell(table, number, table_column(table, run->columns[i].name)),
                           row_cell(run, i, text)) == 0;
    return same;
}

/* Warns if the file has rows of another training run whose columns of add_training() are the same. */
static void warn_of_rows(const struct step_log *log)
{
    CLOSED_BY(row_free) struct row row = {0};
    CLOSED_BY(table_free) struct table table = {0};
    row_open(&row, step_columns);
    add_training(log, &row);
    if (access(log->path, F_OK) != 0 || table_read(log->path, &table) != STATUS_OK)
        return;
    for (size_t i = 0; i < table.rows; i++)
        if (is_same_run(&table, i, &row)) {
            status_warn("--log %s already has rows of another training run with this variant, model and "
                        "seed; name another file, or add --resume to continue that run",
                        log->path);
            return;
        }
}

enum status step_log_open(const char *path, const struct engine *engine, const struct train *train,
                          const struct resources *resources, int ranks, bool resumes, struct step_log **log)
{
    struct step_log *opened = *log = calloc(1, sizeof *opened);
    TRY(ALLOCATED(opened, "out of memory for --log"));
    opened->path = path;
    opened->train = train;
    opened->ranks = ranks;
    snprintf(opened->variant, sizeof opened->variant, "train-%s", engine->name);
    env_capture(&opened->env);
    if (engine->gradients_in == GRADIENTS_IN_DEVICE || engine->gradients_in == GRADIENTS_IN_GRAPH)
        TRY(device_describe(resources->device, &opened->device));
    if (!resumes)
        warn_of_rows(opened);
    return STATUS_OK;
}

enum status step_log_add(struct step_log *log, const struct step_row *step)
{
    CLOSED_BY(row_free) struct row row = {0};
    make_row(log, step, &row);
    file_hold_signals(); /* otherwise a signal could leave half a row */
    enum status status = csv_append(log->path, &row, 1);
    file_release_signals();
    return status_prefix(status, "--log");
}

void step_log_close(struct step_log *log)
{
    free(log);
}
