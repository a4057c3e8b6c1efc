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
#include "machine/env.h"
#include "machine/nvml.h"
#include "train/epoch_report.h"

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
