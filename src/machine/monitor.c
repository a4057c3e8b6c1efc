/* The monitor, and what it reads about processes. */
#include "machine/monitor.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/parallel.h"
#include "core/phase.h"
#include "core/timer.h"
#include "machine/device.h"
#include "machine/nvml.h"

/* ---- Processes ---- */

#define PID_LIMIT      4194304 /* the largest pid_max of Linux */
#define ATTEMPTS       10      /* maximum number of readings; a reading fails if a process ends during it */
#define RUSAGE_BLOCK   512     /* bytes per block of ru_inblock and ru_oublock */
#define ROUNDING_TICKS 2       /* Linux rounds down the user time and the system time of ended children */

struct process {
    pid_t pid, parent;
    unsigned long long started; /* clock ticks since boot; distinguishes processes that reuse an id */
    bool ended;                 /* a zombie */
    double rss_bytes;
    /* `used` counts the process and its ended children. `inherited` is the part that grows when a child ends.
     * Linux does not count storage of ended children separately, so for storage both are the same. */
    double used[PROCESS_COUNTERS], inherited[PROCESS_COUNTERS];
};

struct processes {
    struct process *items; /* owned */
    size_t count;
};

struct process_tree {
    DIR *proc;
    pid_t root; /* this process; the tree has only its descendants */
    /* Indexed by process id: number of the latest scan that found the process outside the tree (`outside`) or
     * in the tree (`inside`). Most memory pages of these arrays are never touched. */
    uint32_t *outside, *inside, scan;

    pthread_mutex_t lock; /* protects everything below */
    struct processes now, before;
    double collected[PROCESS_COUNTERS];        /* counters of ended children of the root */
    double collected_before[PROCESS_COUNTERS]; /* `collected` at the latest complete reading */
    double lost[PROCESS_COUNTERS];  /* counters of ended processes that no process inherits, because the
                                       parent ignores SIGCHLD */
    double total[PROCESS_COUNTERS]; /* the latest results, so that results never decrease */
    size_t running;
};

/* ---- Files of /proc ---- */

/* Reads a small file of /proc into `text` with a terminating zero. Returns false if it cannot be read. */
static bool read_small(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t bytes = read(fd, text, size - 1);
    close(fd);
    text[bytes > 0 ? bytes : 0] = '\0';
    return bytes > 0;
}

/* Returns the number after `label` in a file of /proc, or -1. */
static double number_after(const char *text, const char *label)
{
    const char *at = strstr(text, label);
    return at ? strtod(at + strlen(label), NULL) : -1;
}

/* Reads a process's storage counters from /proc/PID/io. Leaves `counters` unchanged if it cannot be read. */
static void read_storage(const char *path, double counters[PROCESS_COUNTERS])
{
    char text[512];
    if (!read_small(path, text, sizeof text))
        return;
    counters[PROCESS_READ_BYTES] = number_after(text, "\nread_bytes: ");
    counters[PROCESS_WRITTEN_BYTES] = number_after(text, "\nwrite_bytes: ");
}

static double time_s(const struct timeval *time)
{
    return (double)time->tv_sec + 1e-6 * (double)time->tv_usec;
}

/* Reads what this process uses, with all its threads. Thread safe. */
static void process_use_own(struct process_use *use)
{
    char text[128], *end;
    *use = (struct process_use){.counters = {timer_cpu_s(), -1, -1}, .rss_bytes = -1};
    read_storage("/proc/self/io", use->counters);
    if (read_small("/proc/self/statm", text, sizeof text)) {
        strtoull(text, &end, 10); /* the second number counts resident pages */
        use->rss_bytes = (double)strtoull(end, NULL, 10) * (double)sysconf(_SC_PAGESIZE);
    }
}

/* Returns the CPU time of a process with its threads: the larger of Linux's precise time and `ticks_s`,
 * the time in whole ticks. Returns `ticks_s` if there is no precise time. */
static double own_cpu_s(pid_t pid, double ticks_s)
{
    clockid_t clock;
    double precise_s = clock_getcpuclockid(pid, &clock) == 0 ? timer_clock_s(clock) : -1;
    return fmax(precise_s, ticks_s);
}

/* Reads all fields of a process except its storage traffic. Returns false if the process has ended. */
static bool read_stat(pid_t pid, struct process *process)
{
    char path[64], text[1024], state;
    int parent;
    unsigned long long user, system;
    long long child_user, child_system, pages;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (!read_small(path, text, sizeof text))
        return false;
    const char *fields = strrchr(text, ')'); /* a command's name may contain ')' */
    if (!fields ||
        sscanf(fields + 1,
               " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %lld %lld %*d %*d %*d %*d %llu %*u %lld",
               &state, &parent, &user, &system, &child_user, &child_system, &process->started, &pages) != 8)
        return false;
    const double tick_s = 1.0 / (double)sysconf(_SC_CLK_TCK);
    process->pid = pid;
    process->parent = parent;
    process->ended = state == 'Z';
    process->rss_bytes = (double)pages * (double)sysconf(_SC_PAGESIZE);
    process->inherited[PROCESS_CPU_S] = tick_s * (double)(child_user + child_system);
    process->used[PROCESS_CPU_S] =
        own_cpu_s(pid, tick_s * (double)(user + system)) + process->inherited[PROCESS_CPU_S];
    return state != 'X' && state != 'x'; /* X: the parent is inheriting the counters */
}

/* ---- The processes of the tree ---- */

static const struct process *find(const struct processes *processes, const struct process *wanted)
{
    for (size_t i = 0; i < processes->count; i++)
        if (processes->items[i].pid == wanted->pid && processes->items[i].started == wanted->started)
            return &processes->items[i];
    return NULL;
}

static bool add(struct processes *processes, const struct process *process)
{
    if (!array_grow(&processes->items, processes->count, sizeof *processes->items))
        return false;
    processes->items[processes->count++] = *process;
    return true;
}

/* Adds the new processes whose parent belongs to the tree. The parent may be new as well. If a parent ended
 * during this scan, the next scan decides about its children. Returns false if memory runs out. */
static bool place_new(struct process_tree *tree, struct processes *new)
{
    bool enough = true;
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < new->count; i++) {
            const struct process process = new->items[i];
            bool inside = process.parent == tree->root || tree->inside[process.parent] == tree->scan;
            if (!inside && process.parent != 0 && tree->outside[process.parent] != tree->scan)
                continue;
            (inside ? tree->inside : tree->outside)[process.pid] = tree->scan;
            enough = enough && (!inside || add(&tree->now, &process));
            new->items[i--] = new->items[--new->count];
            changed = true;
        }
    }
    return enough;
}

/* Lists the processes of the tree in tree->now. Returns false if memory runs out. */
static bool list_tree(struct process_tree *tree)
{
    struct processes new = {0};
    const struct dirent *entry;
    bool enough = true;
    tree->scan++;
    tree->now.count = 0;
    rewinddir(tree->proc);
    while ((entry = readdir(tree->proc))) {
        long pid = strtol(entry->d_name, NULL, 10);
        struct process process = {.pid = (pid_t)pid};
        if (pid <= 0 || pid > PID_LIMIT || pid == tree->root)
            continue;
        if (tree->outside[pid] == tree->scan - 1)
            tree->outside[pid] = tree->scan;
        else if (tree->inside[pid] == tree->scan - 1) {
            tree->inside[pid] = tree->scan;
            enough = enough && add(&tree->now, &process);
        } else if (read_stat(process.pid, &process))
            enough = enough && add(&new, &process);
    }
    enough = enough && place_new(tree, &new);
    free(new.items);
    return enough;
}

/* Reads a listed process. Returns false if it has ended, or if its id now belongs to another process. */
static bool read_process(const struct process_tree *tree, struct process *process)
{
    struct process read = {0};
    char path[64];
    if (!read_stat(process->pid, &read))
        return false;
    for (size_t i = 0; i < tree->before.count; i++)
        if (tree->before.items[i].pid == read.pid && tree->before.items[i].started != read.started) {
            tree->inside[read.pid] = 0;
            return false;
        }
    const struct process *before = find(&tree->before, &read);
    for (size_t k = PROCESS_READ_BYTES; before && k < PROCESS_COUNTERS; k++)
        read.used[k] = before->used[k];
    snprintf(path, sizeof path, "/proc/%d/io", (int)read.pid);
    read_storage(path, read.used);
    for (size_t k = PROCESS_READ_BYTES; k < PROCESS_COUNTERS; k++)
        read.inherited[k] = read.used[k];
    *process = read;
    return true;
}

static bool exists(pid_t pid)
{
    return kill(pid, 0) == 0 || errno != ESRCH;
}

/* Reads all listed processes and removes those that have ended from the list. Returns false if any ended
 * during the reading: its counters would be missing or counted twice, depending on whether its parent was
 * read first. */
static bool read_listed(struct process_tree *tree)
{
    struct processes *now = &tree->now;
    size_t count = now->count;
    for (size_t i = 0; i < now->count;)
        if (read_process(tree, &now->items[i]))
            i++;
        else
            now->items[i] = now->items[--now->count];
    for (size_t i = 0; i < now->count;)
        if (exists(now->items[i].pid))
            i++;
        else
            now->items[i] = now->items[--now->count];
    return now->count == count;
}

/* Adds to `lost` the part of the counters of ended processes that neither a parent nor the root has
 * inherited. */
static void find_lost(struct process_tree *tree, enum process_counter k)
{
    double ended = 0, inherited = tree->collected[k] - tree->collected_before[k];
    const double rounding_s = ROUNDING_TICKS / (double)sysconf(_SC_CLK_TCK);
    for (size_t i = 0; i < tree->before.count; i++) {
        const struct process *before = &tree->before.items[i], *now = find(&tree->now, before);
        if (now)
            inherited += now->inherited[k] - before->inherited[k];
        else
            ended += before->used[k] - (k == PROCESS_CPU_S ? rounding_s : 0);
    }
    tree->lost[k] += fmax(0, ended - inherited);
    tree->collected_before[k] = tree->collected[k];
}

/* Sums the counters and memory of the processes that were just read. */
static void sum_up(struct process_tree *tree, struct process_use *use)
{
    *use = (struct process_use){0};
    tree->running = 0;
    for (size_t k = 0; k < PROCESS_COUNTERS; k++) {
        find_lost(tree, k);
        double sum = tree->collected[k] + tree->lost[k];
        for (size_t i = 0; i < tree->now.count; i++)
            sum += tree->now.items[i].used[k];
        use->counters[k] = tree->total[k] = fmax(tree->total[k], sum);
    }
    for (size_t i = 0; i < tree->now.count; i++) {
        use->rss_bytes += tree->now.items[i].rss_bytes;
        tree->running += !tree->now.items[i].ended;
    }
    struct processes earlier = tree->before;
    tree->before = tree->now;
    tree->now = earlier;
}

bool process_tree_use(struct process_tree *tree, struct process_use *use)
{
    bool read = false;
    *use = (struct process_use){{-1, -1, -1}, -1};
    pthread_mutex_lock(&tree->lock);
    bool listed = list_tree(tree);
    for (int i = 0; listed && !read && i < ATTEMPTS; i++)
        read = read_listed(tree);
    if (read)
        sum_up(tree, use);
    pthread_mutex_unlock(&tree->lock);
    return read;
}

size_t process_tree_running(struct process_tree *tree)
{
    pthread_mutex_lock(&tree->lock);
    size_t running = tree->running;
    pthread_mutex_unlock(&tree->lock);
    return running;
}

bool process_tree_collect(struct process_tree *tree, pid_t child, int *wait_status)
{
    bool found = false;
    struct rusage usage;
    int status;
    pid_t pid;
    pthread_mutex_lock(&tree->lock);
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        tree->collected[PROCESS_CPU_S] += time_s(&usage.ru_utime) + time_s(&usage.ru_stime);
        tree->collected[PROCESS_READ_BYTES] += RUSAGE_BLOCK * (double)usage.ru_inblock;
        tree->collected[PROCESS_WRITTEN_BYTES] += RUSAGE_BLOCK * (double)usage.ru_oublock;
        if (pid == child) {
            *wait_status = status;
            found = true;
        }
    }
    if (!found && pid < 0 && errno == ECHILD) {
        *wait_status = W_EXITCODE(EXIT_FAILURE, 0);
        found = true;
        status_warn("the command ended, but its exit status is unknown");
    }
    pthread_mutex_unlock(&tree->lock);
    return found;
}

enum status process_tree_open(struct process_tree **tree)
{
    struct process_tree *new = calloc(1, sizeof *new);
    *tree = new;
    TRY(ALLOCATED(new, "out of memory"));
    pthread_mutex_init(&new->lock, NULL);
    new->root = getpid();
    new->scan = 1; /* 0 in the arrays means that no scan found the process */
    new->outside = calloc(PID_LIMIT + 1, sizeof *new->outside);
    new->inside = calloc(PID_LIMIT + 1, sizeof *new->inside);
    new->proc = opendir("/proc");
    enum status status = STATUS_OK;
    if (!new->outside || !new->inside)
        status = status_set(STATUS_EXHAUSTED, "out of memory");
    else if (!new->proc || prctl(PR_SET_CHILD_SUBREAPER, 1L, 0L, 0L, 0L) != 0)
        status = status_set(STATUS_FAILED, "cannot watch processes: %s", strerror(errno));
    if (status != STATUS_OK) {
        process_tree_free(new);
        *tree = NULL;
    }
    return status;
}

void process_tree_free(struct process_tree *tree)
{
    if (!tree)
        return;
    if (tree->proc)
        closedir(tree->proc);
    pthread_mutex_destroy(&tree->lock);
    free(tree->outside);
    free(tree->inside);
    free(tree->now.items);
    free(tree->before.items);
    free(tree);
}

/* ---- The monitor ---- */

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
