#include "train/step_log.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/file.h"
#include "core/record.h"
#include "machine/device.h"
#include "machine/env.h"
#include "machine/nvml.h"

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
    row_real(row, "items_per_s", (double)totals->samples / step->steps_s);
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
    enum status status = csv_check(path, &row);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "--log");
}

/* Warns if the file has rows of another training run whose columns of add_training() are the same. */
static void warn_of_rows(const struct step_log *log)
{
    CLOSED_BY(row_free) struct row row = {0};
    FREED char *text = NULL, *rows = NULL;
    char *found;
    size_t size;
    add_training(log, &row);
    if (access(log->path, F_OK) == 0 && csv_text(&row, 1, &text) == STATUS_OK &&
        file_read(log->path, &rows, &size) == STATUS_OK && (found = strchr(text, '\n'))) {
        *found = text[strlen(text) - 1] = ','; /* ",train,VARIANT,...,MODEL," instead of a line */
        if (strstr(rows, found))
            status_warn("--log %s already has rows of another training run with this variant, model and "
                        "seed; name another file, or add --resume to continue that run",
                        log->path);
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
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "--log");
}

void step_log_close(struct step_log *log)
{
    free(log);
}
