#include "machine/monitor.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/array.h"
#include "core/file.h"
#include "core/phase.h"
#include "core/timer.h"
#include "machine/device.h"
#include "machine/nvml.h"
#include "machine/ticker.h"

#define COST_MAX   0.01 /* warn if the thread uses more than this share of a core */
#define MISSED_MAX 0.1  /* warn if more than this share of the samples is missed */

/* Rows per write. Limits memory, because a row takes about 2 KiB while it is written. */
#define WRITE_ROWS 16384

/* Maximum wait for the lock of the file. While this program waits, it passes no signals on to the command. */
#define TRY_LOCK_S 1

/* With a shorter period per GPU, the PCIe columns stay empty: NVML measures each direction for 20 ms. */
#define TRAFFIC_PERIOD_MS 50

/* The number of the column of a value. The text column "throttled" is before the values of processes. */
#define FIRST_VALUE                  11
#define COLUMN_OF(value)             (FIRST_VALUE + (value) + ((value) >= MONITOR_CPU_CORES))

#define NVML_REAL(column_unit, text) VALUE_REAL, COMBINE_FIRST, column_unit, .about = "NVML: " text
#define USE_REAL(column_unit, text)  VALUE_REAL, COMBINE_FIRST, column_unit, .about = text

const struct column monitor_columns[] = {
    ORIGIN_COLUMNS("always monitor/2", "start of the run, as in its rows of --out"),
    {"rank", VALUE_INTEGER, COMBINE_FIRST, "", .about = "the rank that samples itself and its GPU"},
    {"gpu", VALUE_INTEGER, COMBINE_FIRST, "", .about = "number of the CUDA device; empty without one"},
    {"device", VALUE_WORD, COMBINE_FIRST, "", .about = "the GPU of this row; without a GPU, the CPU"},
    {"variant", VALUE_WORD, COMBINE_FIRST, "",
     .about = "the variant that runs, or the name of a command or program; empty between variants and while "
              "rank 0 runs alone"},
    {"phase", VALUE_WORD, COMBINE_FIRST, "",
     .about = "what the main thread was doing when the sample began: setup, verify (checking runs, writing "
              "pictures and arrays), warm-up, timed, measure (extra runs that time stages; writing rows), "
              "teardown, or between variants idle; in files of libfdsl, the phase that the program named"},
    {"time_s", VALUE_REAL, COMBINE_FIRST, "s", .about = "time from the start of the monitor to the sample"},
    [COLUMN_OF(MONITOR_GPU_UTILISATION_PERCENT)] =
        {"gpu_utilisation_percent",
         NVML_REAL("%", "share of its own averaging period (1/6 s to 1 s, depending on the GPU) in which any "
                        "CUDA kernel ran; not how many SMs were busy")},
    [COLUMN_OF(MONITOR_GPU_MEMORY_BYTES)] =
        {"gpu_memory_bytes", NVML_REAL("bytes", "memory used on the device by all processes and the driver")},
    [COLUMN_OF(MONITOR_TEMPERATURE_C)] = {"temperature_c", NVML_REAL("°C", "temperature of the GPU")},
    [COLUMN_OF(MONITOR_POWER_W)] =
        {"power_w", NVML_REAL("W", "power of the GPU; on recent GPUs, the mean over the past second")},
    [COLUMN_OF(MONITOR_SM_CLOCK_MHZ)] = {"sm_clock_mhz", NVML_REAL("MHz", "clock of the multiprocessors")},
    [COLUMN_OF(MONITOR_MEMORY_CLOCK_MHZ)] = {"memory_clock_mhz", NVML_REAL("MHz", "clock of the memory")},
    [COLUMN_OF(MONITOR_PCIE_RX_BYTES_PER_S)] =
        {"pcie_rx_bytes_per_s", NVML_REAL("bytes/s", "rate to the device in 20 ms after the sample began; "
                                                     "empty if the sampling period is under 50 ms per GPU")},
    [COLUMN_OF(MONITOR_PCIE_TX_BYTES_PER_S)] = {"pcie_tx_bytes_per_s",
                                                NVML_REAL("bytes/s",
                                                          "rate from the device in 20 ms after these; empty "
                                                          "if the sampling period is under 50 ms per GPU")},
    [COLUMN_OF(MONITOR_CPU_CORES) - 1] = {"throttled", VALUE_WORD, COMBINE_FIRST, "",
                                          .about = "NVML: why the GPU's clocks are throttled"},
    [COLUMN_OF(MONITOR_CPU_CORES)] = {"cpu_cores",
                                      USE_REAL("", "CPU seconds per second since the previous sample, over "
                                                   "all threads of the process, including the monitor's")},
    [COLUMN_OF(MONITOR_RSS_BYTES)] = {"rss_bytes", USE_REAL("bytes", "resident memory of the process")},
    [COLUMN_OF(MONITOR_READ_BYTES_PER_S)] = {"read_bytes_per_s",
                                             USE_REAL("bytes/s",
                                                      "rate of bytes read from storage since the previous "
                                                      "sample; reads from the page cache do not count")},
    [COLUMN_OF(MONITOR_WRITE_BYTES_PER_S)] =
        {"write_bytes_per_s", USE_REAL("bytes/s", "rate of bytes written to storage since the previous "
                                                  "sample; writes count when they enter the page cache")},
    [COLUMN_OF(MONITOR_VALUES)] = {.name = NULL},
};

struct monitor_sample {
    double time_s;
    size_t variant; /* the number of the variant's summary, from 1; 0: none */
    size_t gpu;     /* index in subject.gpus */
    enum phase phase;
    const char *phase_name;
    uint64_t throttle_reasons;
    double values[MONITOR_VALUES]; /* negative if unknown */
};

struct monitor {
    const char *path;
    double period_s;
    struct monitor_subject subject;
    struct ticker *ticker; /* takes the samples */
    double begin_s;        /* start time by timer_now_s() */
    bool traffic;          /* the period is long enough to measure PCIe traffic */

    /* Used only by the thread, and by monitor_stop() after the thread has ended: the time of the latest
     * sample of the processes, and their counters at that time. The counters are negative before the first
     * sample. */
    double looked_s, counters[PROCESS_COUNTERS];
    double cpu_s;  /* CPU time of the thread */
    size_t missed; /* samples that were not taken in time, or lost to a lack of memory */

    /* Shared, protected by the lock */
    pthread_mutex_t lock;
    size_t variant;    /* the number of the current variant's summary, from 1; 0: none */
    const char *phase; /* of monitor_phase(), in `phases`; NULL: that of phase_now() */
    char **phases;
    size_t phase_count;
    struct monitor_sample *samples;
    size_t count;                      /* of `samples`, which are not yet written */
    size_t taken;                      /* since the start */
    struct monitor_summary *summaries; /* one per variant */
    size_t summary_count;
};

/* ---- Taking samples ---- */

/* Samples the processes. A rate covers the time since the last successful sample. */
static void look_at_processes(struct monitor *monitor, struct monitor_sample *sample)
{
    static const enum monitor_value rates[PROCESS_COUNTERS] = {MONITOR_CPU_CORES, MONITOR_READ_BYTES_PER_S,
                                                               MONITOR_WRITE_BYTES_PER_S};
    struct process_use use;
    double now_s = timer_now_s();
    if (!monitor->subject.tree)
        process_use_own(&use);
    else if (!process_tree_use(monitor->subject.tree, &use))
        return;
    for (size_t k = 0; k < PROCESS_COUNTERS; k++) {
        if (monitor->counters[k] >= 0 && use.counters[k] >= 0 && now_s > monitor->looked_s)
            sample->values[rates[k]] = (use.counters[k] - monitor->counters[k]) / (now_s - monitor->looked_s);
        monitor->counters[k] = use.counters[k];
    }
    monitor->looked_s = now_s;
    sample->values[MONITOR_RSS_BYTES] = use.rss_bytes;
}

static void look_at_gpu(const struct monitor *monitor, struct monitor_sample *sample)
{
    struct gpu_state state;
    struct gpu_traffic traffic;
    double *values = sample->values;
    if (sample->gpu >= monitor->subject.gpu_count)
        return;
    const char *pci_bus_id = monitor->subject.gpus[sample->gpu].pci_bus_id;
    if (nvml_gpu_state(pci_bus_id, &state) != STATUS_OK)
        return;
    values[MONITOR_GPU_UTILISATION_PERCENT] = state.utilisation_percent;
    values[MONITOR_GPU_MEMORY_BYTES] = (double)state.memory_used_bytes;
    values[MONITOR_TEMPERATURE_C] = state.temperature_c;
    values[MONITOR_POWER_W] = state.power_w;
    values[MONITOR_SM_CLOCK_MHZ] = state.sm_clock_mhz;
    values[MONITOR_MEMORY_CLOCK_MHZ] = state.memory_clock_mhz;
    sample->throttle_reasons = state.throttle_reasons;
    if (monitor->traffic && nvml_gpu_traffic(pci_bus_id, &traffic) == STATUS_OK) {
        values[MONITOR_PCIE_RX_BYTES_PER_S] = traffic.rx_bytes_per_s;
        values[MONITOR_PCIE_TX_BYTES_PER_S] = traffic.tx_bytes_per_s;
    }
}

/* ---- Storing samples ---- */

static void summarise(struct monitor_summary *summary, const struct monitor_sample *sample)
{
    summary->samples += sample->gpu == 0;
    for (size_t i = 0; i < MONITOR_VALUES; i++) {
        double value = sample->values[i];
        if (value < 0)
            continue;
        summary->of[i].sum += value;
        summary->of[i].max = summary->of[i].count++ ? fmax(summary->of[i].max, value) : value;
    }
}

/* Stores a sample. The caller holds the lock. */
static void keep(struct monitor *monitor, const struct monitor_sample *sample)
{
    if (!array_grow(&monitor->samples, monitor->count, sizeof *monitor->samples)) {
        monitor->missed++;
        return;
    }
    monitor->samples[monitor->count++] = *sample;
    monitor->taken += sample->gpu == 0;
    if (sample->variant && sample->phase == PHASE_TIMED)
        summarise(&monitor->summaries[sample->variant - 1], sample);
}

/* Takes a sample of one GPU. The sample with `gpu` 0 also has the values of the processes, even if there is
 * no GPU. Does not hold the lock during queries, so that the main thread never waits for them. */
static void take_one(struct monitor *monitor, size_t gpu)
{
    struct monitor_sample sample = {
        .time_s = timer_now_s() - monitor->begin_s, .gpu = gpu, .phase = phase_now()};
    pthread_mutex_lock(&monitor->lock);
    sample.variant = monitor->variant;
    sample.phase_name = monitor->phase ? monitor->phase : phase_name(sample.phase);
    pthread_mutex_unlock(&monitor->lock);
    for (size_t i = 0; i < MONITOR_VALUES; i++)
        sample.values[i] = -1;
    if (gpu == 0)
        look_at_processes(monitor, &sample);
    look_at_gpu(monitor, &sample);
    pthread_mutex_lock(&monitor->lock);
    keep(monitor, &sample);
    pthread_mutex_unlock(&monitor->lock);
}

static void take_sample(struct monitor *monitor)
{
    size_t gpu = 0;
    do
        take_one(monitor, gpu++);
    while (gpu < monitor->subject.gpu_count);
}

static void tick(void *context, uint64_t missed)
{
    struct monitor *monitor = context;
    monitor->missed += (size_t)missed;
    take_sample(monitor);
    monitor->cpu_s = timer_clock_s(CLOCK_THREAD_CPUTIME_ID);
}

/* ---- Rows ---- */

/* Writes integers with row_count(), because row_real() keeps 9 digits and byte counts may have more. */
static void value_field(struct row *row, enum monitor_value value, double number)
{
    if (number >= 0 && number == floor(number))
        row_count(row, monitor_columns[COLUMN_OF(value)].name, (unsigned long long)number);
    else
        row_real(row, monitor_columns[COLUMN_OF(value)].name, number < 0 ? NAN : number);
}

static enum status make_row(const struct monitor_subject *subject, const char *variant,
                            const struct monitor_sample *sample, struct row *row)
{
    char throttled[128];
    const struct monitor_gpu *gpu = sample->gpu < subject->gpu_count ? &subject->gpus[sample->gpu] : NULL;
    row_open(row, monitor_columns);
    row_text(row, "schema", "monitor/2");
    row_text(row, "time_utc", subject->env->time_utc);
    row_text(row, "host", subject->env->host);
    row_text(row, "job_id", subject->env->job_id);
    row_text(row, "revision", subject->env->revision);
    row_count(row, "rank", subject->rank);
    if (gpu)
        row_count(row, "gpu", (unsigned long long)gpu->number);
    row_text(row, "device", gpu ? gpu->name : subject->env->cpu_model);
    row_text(row, "variant", variant);
    row_text(row, "phase", sample->phase_name);
    row_real(row, "time_s", sample->time_s);
    row_text(row, "throttled", nvml_throttle_words(sample->throttle_reasons, throttled, sizeof throttled));
    for (enum monitor_value i = 0; i < MONITOR_VALUES; i++)
        value_field(row, i, sample->values[i]);
    return row_check(row);
}

static enum status write_rows(const struct monitor *monitor, const struct monitor_sample *samples,
                              struct row *rows, size_t count)
{
    enum status status = STATUS_OK;
    for (size_t i = 0; status == STATUS_OK && i < count; i++) {
        size_t variant = samples[i].variant;
        status = make_row(&monitor->subject, variant ? monitor->summaries[variant - 1].variant : "",
                          &samples[i], &rows[i]);
    }
    if (status == STATUS_OK)
        status = csv_append(monitor->path, rows, count);
    for (size_t i = 0; i < count; i++)
        row_free(&rows[i]);
    return status;
}

/* Writes `count` samples, starting with number `first`. First copies them under the lock, because the thread
 * may reallocate the array. Writes without the lock, so that the thread does not wait for the disk. */
static enum status write_samples(struct monitor *monitor, size_t first, size_t count)
{
    FREED struct monitor_sample *samples = malloc(count * sizeof *samples);
    FREED struct row *rows = calloc(count, sizeof *rows);
    TRY(ALLOCATED(samples && rows, "%smonitor: out of memory for %zu rows", OPTION_DASHES, count));
    pthread_mutex_lock(&monitor->lock);
    memcpy(samples, monitor->samples + first, count * sizeof *samples);
    pthread_mutex_unlock(&monitor->lock);
    return write_rows(monitor, samples, rows, count);
}

/* Removes samples from memory only after they were written. The thread may append more at the same time. */
enum status monitor_flush(struct monitor *monitor)
{
    if (!monitor)
        return STATUS_OK;
    pthread_mutex_lock(&monitor->lock);
    size_t count = monitor->count, written = 0;
    pthread_mutex_unlock(&monitor->lock);

    enum status status = STATUS_OK;
    while (status == STATUS_OK && written < count) {
        size_t rows = count - written < WRITE_ROWS ? count - written : WRITE_ROWS;
        status = write_samples(monitor, written, rows);
        written += status == STATUS_OK ? rows : 0;
    }
    pthread_mutex_lock(&monitor->lock);
    monitor->count -= written;
    if (written && monitor->count)
        memmove(monitor->samples, monitor->samples + written, monitor->count * sizeof *monitor->samples);
    pthread_mutex_unlock(&monitor->lock);
    return status;
}

enum status monitor_try_flush(struct monitor *monitor)
{
    double usual_s = lock_set_limit(TRY_LOCK_S);
    enum status status = monitor_flush(monitor);
    (void)lock_set_limit(usual_s);
    return status;
}

enum status monitor_check(const char *path)
{
    /* csv_check() compares only the columns, so all values can be empty. */
    const struct env env = {0};
    const struct monitor_subject subject = {.env = &env};
    const struct monitor_sample sample = {.phase_name = ""};
    CLOSED_BY(row_free) struct row row = {0};
    TRY(make_row(&subject, "", &sample, &row));
    return csv_check(path, &row);
}

/* ---- Starting and stopping ---- */

void monitor_find_gpus(int device, struct monitor_gpus *gpus)
{
    int first = device < 0 ? 0 : device, end = device < 0 ? device_count() : device + 1;
    gpus->count = 0;
    for (int i = first; i < end && gpus->count < MONITOR_GPUS_MAX; i++) {
        char *name = gpus->texts[gpus->count].name, *id = gpus->texts[gpus->count].pci_bus_id;
        if (device_pci_bus_id(i, id, sizeof gpus->texts->pci_bus_id) != STATUS_OK) {
            status_warn("%smonitor: no samples of GPU %d: %s", OPTION_DASHES, i, status_text());
            continue;
        }
        if (nvml_gpu_name(id, name, sizeof gpus->texts->name) != STATUS_OK)
            snprintf(name, sizeof gpus->texts->name, "GPU %d", i);
        gpus->list[gpus->count++] = (struct monitor_gpu){i, name, id};
    }
}

enum status monitor_open(const char *path, uint64_t period_ms, const struct monitor_subject *subject,
                         struct monitor **monitor)
{
    struct gpu_state unused;
    struct monitor *new = malloc(sizeof *new);
    TRY(ALLOCATED(new, "%smonitor: out of memory", OPTION_DASHES));
    *new = (struct monitor){.path = path,
                            .period_s = 1e-3 * (double)period_ms,
                            .subject = *subject,
                            .begin_s = timer_now_s(),
                            .traffic = period_ms >= TRAFFIC_PERIOD_MS * subject->gpu_count,
                            .counters = {-1, -1, -1}};
    if (subject->gpu_count > 0 && nvml_gpu_state(subject->gpus[0].pci_bus_id, &unused) != STATUS_OK)
        status_warn("%smonitor: the GPU columns stay empty: %s", OPTION_DASHES, status_text());
    pthread_mutex_init(&new->lock, NULL);
    int error = 0;
    if (subject->variant && monitor_begin(new, subject->variant) != STATUS_OK)
        error = ENOMEM;
    if (!error)
        error = ticker_open(new->period_s, tick, new, &new->ticker);
    if (error) {
        monitor_free(new);
        return status_about(status_set(STATUS_FAILED, "%smonitor: cannot start its thread: %s", OPTION_DASHES,
                                       strerror(error)),
                            "monitor");
    }
    *monitor = new;
    return STATUS_OK;
}

enum status monitor_begin(struct monitor *monitor, const char *variant)
{
    if (!monitor)
        return STATUS_OK;
    pthread_mutex_lock(&monitor->lock);
    bool room = array_grow(&monitor->summaries, monitor->summary_count, sizeof *monitor->summaries);
    if (room) {
        monitor->summaries[monitor->summary_count] = (struct monitor_summary){.variant = variant};
        monitor->variant = ++monitor->summary_count;
    }
    pthread_mutex_unlock(&monitor->lock);
    return ALLOCATED(room, "%smonitor: out of memory", OPTION_DASHES);
}

enum status monitor_phase(struct monitor *monitor, const char *name)
{
    if (!monitor)
        return STATUS_OK;
    size_t i = 0;
    pthread_mutex_lock(&monitor->lock);
    while (i < monitor->phase_count && strcmp(monitor->phases[i], name) != 0)
        i++;
    if (i == monitor->phase_count && array_grow(&monitor->phases, i, sizeof *monitor->phases) &&
        (monitor->phases[i] = strdup(name)))
        monitor->phase_count++;
    bool room = i < monitor->phase_count;
    if (room)
        monitor->phase = monitor->phases[i];
    pthread_mutex_unlock(&monitor->lock);
    return ALLOCATED(room, "%smonitor: out of memory", OPTION_DASHES);
}

size_t monitor_timed_samples(struct monitor *monitor)
{
    if (!monitor)
        return 0;
    pthread_mutex_lock(&monitor->lock);
    size_t samples = monitor->variant ? monitor->summaries[monitor->variant - 1].samples : 0;
    pthread_mutex_unlock(&monitor->lock);
    return samples;
}

enum status monitor_end(struct monitor *monitor)
{
    if (!monitor)
        return STATUS_OK;
    pthread_mutex_lock(&monitor->lock);
    monitor->variant = 0;
    pthread_mutex_unlock(&monitor->lock);
    return monitor_flush(monitor);
}

/* Warns if the monitor used too much CPU time or missed too many samples. Does not warn after only a few
 * samples, because the first sample costs more than the others. */
static void warn_about_itself(const struct monitor *monitor)
{
    double cost = monitor->cpu_s / (timer_now_s() - monitor->begin_s);
    size_t due = monitor->taken + monitor->missed;
    if (due < MONITOR_SAMPLES_MIN)
        return;
    if (cost > COST_MAX)
        status_warn_own("%smonitor took %.1f %% of a core, which may slow down what it watches; use a longer "
                        "period than %.0f ms",
                        OPTION_DASHES, 100 * cost, 1e3 * monitor->period_s);
    if ((double)monitor->missed > MISSED_MAX * (double)due)
        status_warn_own("%smonitor missed %zu of %zu samples; use a longer period than %.0f ms, or reduce "
                        "background load",
                        OPTION_DASHES, monitor->missed, due, 1e3 * monitor->period_s);
}

enum status monitor_stop(struct monitor *monitor)
{
    if (!monitor)
        return STATUS_OK;
    ticker_close(monitor->ticker);
    if (monitor->subject.tree) /* a last sample: rates need two samples, and the command may be short */
        take_sample(monitor);
    warn_about_itself(monitor);
    return monitor_flush(monitor);
}

size_t monitor_summaries(const struct monitor *monitor, const struct monitor_summary **summaries)
{
    *summaries = monitor ? monitor->summaries : NULL;
    return monitor ? monitor->summary_count : 0;
}

void monitor_free(struct monitor *monitor)
{
    if (!monitor)
        return;
    pthread_mutex_destroy(&monitor->lock);
    free(monitor->samples);
    free(monitor->summaries);
    for (size_t i = 0; i < monitor->phase_count; i++)
        free(monitor->phases[i]);
    free(monitor->phases);
    free(monitor);
}
