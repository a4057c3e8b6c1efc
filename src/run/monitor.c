#include "run/monitor.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/phase.h"
#include "core/record.h"
#include "core/text.h"
#include "core/timer.h"
#include "machine/device.h"
#include "machine/env.h"
#include "machine/nvml.h"
#include "machine/ticker.h"
#include "run/settings.h"

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
     .about = "the variant that runs, or the name of a command; empty between variants and while rank 0 runs "
              "alone"},
    {"phase", VALUE_WORD, COMBINE_FIRST, "",
     .about = "what the main thread was doing when the sample began: setup, verify (checking runs, writing "
              "pictures and arrays), warm-up, timed, measure (extra runs that time stages; writing rows), "
              "teardown, or between variants idle"},
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
        {"pcie_rx_bytes_per_s",
         NVML_REAL("bytes/s", "rate to the device in 20 ms after the sample began; empty if the sampling "
                              "period is under 50 ms per GPU")},
    [COLUMN_OF(MONITOR_PCIE_TX_BYTES_PER_S)] =
        {"pcie_tx_bytes_per_s",
         NVML_REAL("bytes/s", "rate from the device in 20 ms after these; empty if the sampling period is "
                              "under 50 ms per GPU")},
    [COLUMN_OF(MONITOR_CPU_CORES) - 1] = {"throttled", VALUE_WORD, COMBINE_FIRST, "",
                                          .about = "NVML: why the GPU's clocks are throttled"},
    [COLUMN_OF(MONITOR_CPU_CORES)] =
        {"cpu_cores",
         USE_REAL("", "CPU seconds per second since the previous sample, over all threads of the "
                      "process, including the monitor's")},
    [COLUMN_OF(MONITOR_RSS_BYTES)] = {"rss_bytes", USE_REAL("bytes", "resident memory of the process")},
    [COLUMN_OF(MONITOR_READ_BYTES_PER_S)] =
        {"read_bytes_per_s", USE_REAL("bytes/s", "rate of bytes read from storage since the previous sample; "
                                                 "reads from the page cache do not count")},
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
    size_t variant; /* the number of the current variant's summary, from 1; 0: none */
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
    row_text(row, "phase", phase_name(sample->phase));
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
    TRY(ALLOCATED(samples && rows, "--monitor: out of memory for %zu rows", count));
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
    double usual_s = lock_set_timeout(TRY_LOCK_S);
    enum status status = monitor_flush(monitor);
    (void)lock_set_timeout(usual_s);
    return status;
}

enum status monitor_check(const char *path)
{
    /* csv_check() compares only the columns, so all values can be empty. */
    const struct env env = {0};
    const struct monitor_subject subject = {.env = &env};
    const struct monitor_sample sample = {0};
    CLOSED_BY(row_free) struct row row = {0};
    TRY(make_row(&subject, "", &sample, &row));
    return csv_check(path, &row);
}

/* ---- Starting and stopping ---- */

enum status monitor_open(const char *path, uint64_t period_ms, const struct monitor_subject *subject,
                         struct monitor **monitor)
{
    struct gpu_state unused;
    struct monitor *new = malloc(sizeof *new);
    TRY(ALLOCATED(new, "--monitor: out of memory"));
    *new = (struct monitor){.path = path,
                            .period_s = 1e-3 * (double)period_ms,
                            .subject = *subject,
                            .begin_s = timer_now_s(),
                            .traffic = period_ms >= TRAFFIC_PERIOD_MS * subject->gpu_count,
                            .counters = {-1, -1, -1}};
    if (subject->gpu_count > 0 && nvml_gpu_state(subject->gpus[0].pci_bus_id, &unused) != STATUS_OK)
        status_warn("--monitor: the GPU columns stay empty: %s", status_text());
    pthread_mutex_init(&new->lock, NULL);
    int error = 0;
    if (subject->variant && monitor_begin(new, subject->variant) != STATUS_OK)
        error = ENOMEM;
    if (!error)
        error = ticker_open(new->period_s, tick, new, &new->ticker);
    if (error) {
        monitor_free(new);
        return status_option(STATUS_FAILED, "monitor", ": cannot start its thread: %s", strerror(error));
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
    return ALLOCATED(room, "--monitor: out of memory");
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
        status_warn_own("--monitor took %.1f %% of a core, which may slow down what it watches; use a longer "
                        "period than %.0f ms",
                        100 * cost, 1e3 * monitor->period_s);
    if ((double)monitor->missed > MISSED_MAX * (double)due)
        status_warn_own(
            "--monitor missed %zu of %zu samples; use a longer period than %.0f ms, or reduce background "
            "load",
            monitor->missed, due, 1e3 * monitor->period_s);
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
    free(monitor);
}

#define GPUS_MAX      64
#define FLUSH_S       60 /* seconds between writes; a killed monitor loses the samples since the last write */
#define NOT_STARTED   126
#define NOT_FOUND     127
#define SIGNAL_OFFSET 128

struct watched_gpu {
    char name[256], pci_bus_id[32];
};

/* A command and the state of its monitor. */
struct watch {
    const struct settings *settings;
    const char *name; /* name of the command, without its folder */
    uint64_t rank;
    struct env env;
    struct process_tree *tree;
    struct watched_gpu gpu_texts[GPUS_MAX];
    struct monitor_gpu gpus[GPUS_MAX];
    size_t gpu_count;
    struct monitor *monitor;
    pid_t child;
    sigset_t before;       /* the signal mask before start_command(); the command gets it */
    void (*on_child)(int); /* the disposition of SIGCHLD before start_command(); the command gets it */
    double begin_s, end_s;
};

/* ---- Starting the command ---- */

/* Signals that are blocked in this program and passed on to the command. SIGTSTP is not among them: Ctrl-Z
 * sends it to the command, too, and must also stop this program. */
static const int passed_on[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

static void collect_signals(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    for (size_t i = 0; i < COUNT_OF(passed_on); i++)
        sigaddset(set, passed_on[i]);
}

/* Runs in the child process: executes the command. If that fails, writes errno to the pipe `report` and
 * exits. */
static void become(const struct watch *watch, int report)
{
    char *const *command = watch->settings->command;
    signal(SIGXFSZ, SIG_DFL); /* this program ignores SIGXFSZ; the command must not */
    signal(SIGCHLD, watch->on_child);
    sigprocmask(SIG_SETMASK, &watch->before, NULL);
    execvp(command[0], command);
    int error = errno;
    (void)file_write_all(report, (const char *)&error, sizeof error);
    _exit(NOT_FOUND);
}

/* Starts the command in this program's process group, so that the terminal's signals reach it. `*error`
 * becomes 0, or the errno of execvp() if it failed. */
static enum status start_command(struct watch *watch, int *error)
{
    char *const *command = watch->settings->command;
    int report[2];
    sigset_t set;
    *error = 0;
    if (pipe2(report, O_CLOEXEC) != 0)
        return status_set(STATUS_FAILED, "cannot start '%s': %s", command[0], strerror(errno));
    collect_signals(&set);
    sigprocmask(SIG_BLOCK, &set, &watch->before);
    /* If this program ignored SIGCHLD, Linux would discard the exit status of the command. */
    watch->on_child = signal(SIGCHLD, SIG_DFL);
    watch->begin_s = timer_now_s();
    watch->child = fork();
    if (watch->child == 0)
        become(watch, report[1]);
    int fork_error = errno;
    close(report[1]);
    if (watch->child > 0 && read(report[0], error, sizeof *error) != (ssize_t)sizeof *error)
        *error = 0; /* exec closed the pipe */
    close(report[0]);
    return watch->child > 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "cannot start '%s': %s", command[0], strerror(fork_error));
}

/* ---- Watching the command ---- */

/* Finds the GPUs that the command can use, or only the GPU of --device. Creates no CUDA context, because a
 * context would take memory that the command may need. */
static void find_gpus(struct watch *watch)
{
    const struct settings *settings = watch->settings;
    bool one = options_given(&settings->options, "device");
    int first = one ? (int)settings->device : 0, end = one ? first + 1 : device_count();
    for (int i = first; i < end && watch->gpu_count < GPUS_MAX; i++) {
        struct watched_gpu *texts = &watch->gpu_texts[watch->gpu_count];
        if (device_pci_bus_id(i, texts->pci_bus_id, sizeof texts->pci_bus_id) != STATUS_OK) {
            status_warn("--monitor: no samples of GPU %d: %s", i, status_text());
            continue;
        }
        if (nvml_gpu_name(texts->pci_bus_id, texts->name, sizeof texts->name) != STATUS_OK)
            snprintf(texts->name, sizeof texts->name, "GPU %d", i);
        watch->gpus[watch->gpu_count++] = (struct monitor_gpu){i, texts->name, texts->pci_bus_id};
    }
}

static enum status begin_monitor(struct watch *watch)
{
    const struct settings *settings = watch->settings;
    env_capture(&watch->env);
    find_gpus(watch);
    const struct monitor_subject subject = {.env = &watch->env,
                                            .rank = watch->rank,
                                            .gpus = watch->gpus,
                                            .gpu_count = watch->gpu_count,
                                            .tree = watch->tree,
                                            .variant = watch->name};
    phase_enter(PHASE_TIMED);
    return monitor_open(settings->monitor, settings->monitor_period_ms, &subject, &watch->monitor);
}

/* Passes a signal on to the command. A signal from the terminal goes to the whole process group, so the
 * command already has it; it is passed on only if the command left the group. */
static void pass_on(const struct watch *watch, const siginfo_t *signal_info)
{
    bool from_terminal = signal_info->si_code == SI_KERNEL;
    if (!from_terminal || getpgid(watch->child) != getpgrp())
        kill(watch->child, signal_info->si_signo);
}

/* Writes the samples so far. If writing fails, the samples stay in memory for the next call or for
 * monitor_stop(). Warns only at the second failure in a row, because another process may hold the lock for a
 * moment. */
static void flush_command(const struct watch *watch, size_t *failures)
{
    *failures = monitor_try_flush(watch->monitor) == STATUS_OK ? 0 : *failures + 1;
    if (*failures == 2)
        status_warn("%s; --monitor keeps the samples in memory and tries again every %d s", status_text(),
                    FLUSH_S);
}

/* Waits until the command ends and returns its wait status. Also reaps orphaned descendants of the command.
 * Writes samples every FLUSH_S seconds, because the command may run for days. */
static int wait_for_end(struct watch *watch)
{
    sigset_t set;
    siginfo_t info;
    int status = 0;
    double flushed_s = timer_now_s();
    size_t failures = 0;
    collect_signals(&set);
    while (!process_tree_collect(watch->tree, watch->child, &status)) {
        const struct timespec most = {FLUSH_S, 0};
        int signal_number = sigtimedwait(&set, &info, &most);
        if (signal_number > 0 && signal_number != SIGCHLD)
            pass_on(watch, &info);
        if (timer_now_s() - flushed_s < FLUSH_S)
            continue;
        flushed_s = timer_now_s();
        flush_command(watch, &failures);
    }
    return status;
}

/* ---- The summary ---- */

/* Appends a size with three digits, in kB, MB, GB or TB, between the strings `before` and `after`. */
static void append_size(char *text, size_t size, const char *before, double bytes, const char *after)
{
    static const char *const units[] = {"kB", "MB", "GB", "TB"};
    size_t unit = 0;
    for (bytes *= 1e-3; bytes >= 999.5 && unit + 1 < COUNT_OF(units); unit++)
        bytes *= 1e-3;
    text_append(text, size, "%s%.3g %s%s", before, bytes, units[unit], after);
}

static void summarise_command(const struct watch *watch, const struct process_use *use)
{
    char text[512] = "";
    const struct monitor_summary *summary;
    double wall_s = watch->end_s - watch->begin_s;
    size_t running = process_tree_running(watch->tree);
    if (monitor_summaries(watch->monitor, &summary) == 0)
        return;
    text_append(text, sizeof text, "%.1f s", wall_s);
    if (use->counters[PROCESS_CPU_S] >= 0)
        text_append(text, sizeof text, ", %.1f s of CPU time (%.2f cores)", use->counters[PROCESS_CPU_S],
                    use->counters[PROCESS_CPU_S] / wall_s);
    if (summary->of[MONITOR_RSS_BYTES].max > 0) /* 0 if the command ended before the first sample */
        append_size(text, sizeof text, ", at most ", summary->of[MONITOR_RSS_BYTES].max, " of memory");
    if (use->counters[PROCESS_READ_BYTES] >= 0) {
        append_size(text, sizeof text, ", ", use->counters[PROCESS_READ_BYTES], " read");
        append_size(text, sizeof text, " and ", use->counters[PROCESS_WRITTEN_BYTES], " written");
    }
    if (summary->of[MONITOR_GPU_UTILISATION_PERCENT].count)
        text_append(text, sizeof text, ", GPU use %.0f %%",
                    summary->of[MONITOR_GPU_UTILISATION_PERCENT].sum /
                        (double)summary->of[MONITOR_GPU_UTILISATION_PERCENT].count);
    if (running)
        text_append(text, sizeof text, "; %zu of its processes still run%s but will not be sampled", running,
                    running == 1 ? "s" : "");
    status_say("%s: %s; %zu samples in %s", watch->name, text, summary->samples, watch->settings->monitor);
}

static enum status watch_command(struct watch *watch, int *exit_status)
{
    struct process_use use;
    int error;
    TRY(start_command(watch, &error));
    if (error) {
        *exit_status = error == ENOENT ? NOT_FOUND : NOT_STARTED;
        waitpid(watch->child, NULL, 0);
        return status_set(STATUS_FAILED, "cannot start '%s': %s", watch->settings->command[0],
                          strerror(error));
    }
    enum status begun = begin_monitor(watch);
    if (begun != STATUS_OK)
        status_print(); /* the command continues without samples */
    int wait_status = wait_for_end(watch);
    watch->end_s = timer_now_s();
    *exit_status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : SIGNAL_OFFSET + WTERMSIG(wait_status);
    enum status written = monitor_stop(watch->monitor);
    if (written == STATUS_OK && process_tree_use(watch->tree, &use))
        summarise_command(watch, &use);
    return begun == STATUS_OK ? written : begun;
}

enum status command_run(const struct settings *settings, int rank, int *exit_status)
{
    struct watch *watch = calloc(1, sizeof *watch);
    TRY(ALLOCATED(watch, "out of memory"));
    const char *slash = strrchr(settings->command[0], '/');
    watch->settings = settings;
    watch->rank = (uint64_t)rank;
    watch->name = slash && slash[1] ? slash + 1 : settings->command[0];
    enum status status = monitor_check(settings->monitor);
    if (status == STATUS_OK)
        status = process_tree_open(&watch->tree);
    if (status == STATUS_OK)
        status = watch_command(watch, exit_status);
    monitor_free(watch->monitor);
    process_tree_free(watch->tree);
    free(watch);
    return status;
}
