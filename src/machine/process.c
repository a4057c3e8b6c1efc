#include "machine/process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
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
#include "core/timer.h"

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

void process_use_own(struct process_use *use)
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
