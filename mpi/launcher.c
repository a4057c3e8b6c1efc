#include "machine/comm.h"

#include <dirent.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/portable.h"
#include "core/status.h"

static const struct {
    const char *ranks, *rank;
    long least; /* minimum number of ranks; a smaller number does not prove that a launcher started the
                 * process */
} launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", 1}, /* Open MPI */
    {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", 1},   /* MVAPICH */
    {"PMI_SIZE", "PMI_RANK", 1},                         /* MPICH, Intel MPI, srun --mpi=pmi2 */
    /* srun. With one task, the process may be an interactive shell. SLURM_NTASKS is not used, because Slurm
     * also sets it for a batch script, which is one process. */
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", 2},
};

/* Returns the non-negative integer in an environment variable, or -1. */
static long number_in(const char *variable)
{
    const char *text = getenv(variable);
    char *end;
    if (!text || !*text)
        return -1;
    long number = strtol(text, &end, 10);
    return *end || number < 0 ? -1 : number;
}

bool launcher_find(struct launcher *launcher)
{
    for (size_t i = 0; i < COUNT_OF(launchers); i++) {
        long ranks = number_in(launchers[i].ranks), rank = number_in(launchers[i].rank);
        if (ranks < launchers[i].least || (launchers[i].least > 1 && rank < 0))
            continue;
        *launcher = (struct launcher){launchers[i].ranks, ranks, rank < 0 ? 0 : rank};
        return true;
    }
    /* PMIx gives each process its rank, but not the number of ranks. */
    long rank = number_in("PMIX_RANK");
    *launcher = (struct launcher){rank >= 0 ? "PMIX_RANK" : NULL, 0, rank >= 0 ? rank : 0};
    return rank >= 0;
}

int launcher_rank(void)
{
    struct launcher launcher;
    return launcher_find(&launcher) ? (int)launcher.rank : 0;
}

void launcher_forget(void)
{
    for (size_t i = 0; i < COUNT_OF(launchers); i++)
        unsetenv(launchers[i].ranks);
    unsetenv("PMIX_RANK");
}

void launcher_let_rank_0_print(void)
{
    if (launcher_rank() > 0)
        sleep(1);
}

/* ---- The limit of MPI_Init() ---- */

#define WARN_S  30
#define LIMIT_S 300

struct launcher_watch {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t end;
    bool ended;
    double limit_s;
};

/* Returns the number in an environment variable of another process; -1 if it is not set. */
static long variable_of(const char *pid, const char *name)
{
    char path[300], *entry = NULL;
    size_t room = 0, length = strlen(name);
    long value = -1;
    snprintf(path, sizeof path, "/proc/%s/environ", pid);
    FILE *file = fopen(path, "re");
    while (file && value < 0 && getdelim(&entry, &room, '\0', file) > 0)
        if (strncmp(entry, name, length) == 0 && entry[length] == '=')
            value = strtol(entry + length + 1, NULL, 10);
    free(entry);
    if (file)
        fclose(file);
    return value;
}

static long parent_of(const char *pid)
{
    char path[300];
    long parent = -1;
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    FILE *file = fopen(path, "re");
    if (file && fscanf(file, "%*d (%*[^)]) %*c %ld", &parent) != 1)
        parent = -1;
    if (file)
        fclose(file);
    return parent;
}

/* Marks the ranks that the launcher (the parent process) runs on this machine. Returns true only if all ranks
 * run on this machine and the launcher is Open MPI's. */
static bool find_running(long ranks, bool *running)
{
    const char *local = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    DIR *processes = local && strtol(local, NULL, 10) == ranks ? opendir("/proc") : NULL;
    if (!processes)
        return false;
    for (const struct dirent *entry; (entry = readdir(processes));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9' || parent_of(entry->d_name) != getppid())
            continue;
        long number = variable_of(entry->d_name, "OMPI_COMM_WORLD_RANK");
        if (number >= 0 && number < ranks)
            running[number] = true;
    }
    closedir(processes);
    return true;
}

/* Writes the first missing rank, as in "rank 1", or "another rank" if it is unknown. */
static void name_missing(char *text, size_t bytes)
{
    struct launcher launcher;
    snprintf(text, bytes, "another rank");
    if (!launcher_find(&launcher) || launcher.ranks < 1)
        return;
    bool *running = calloc((size_t)launcher.ranks, sizeof *running);
    if (running && find_running(launcher.ranks, running))
        for (long i = launcher.ranks - 1; i >= 0; i--)
            if (!running[i])
                snprintf(text, bytes, "rank %ld", i);
    free(running);
}

/* Waits at most `wait_s` seconds. Returns whether the watch ended in that time. */
static bool ends_within(struct launcher_watch *watch, double wait_s)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)wait_s;
    until.tv_nsec += (long)(1e9 * (wait_s - (double)(time_t)wait_s));
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&watch->lock);
    while (!watch->ended && pthread_cond_timedwait(&watch->end, &watch->lock, &until) == 0)
        ;
    bool ended = watch->ended;
    pthread_mutex_unlock(&watch->lock);
    return ended;
}

static void *look_on(void *argument)
{
    struct launcher_watch *watch = argument;
    double first_s = watch->limit_s < WARN_S ? watch->limit_s : WARN_S;
    char name[32];
    if (ends_within(watch, first_s))
        return NULL;
    name_missing(name, sizeof name);
    if (first_s < watch->limit_s) {
        status_warn_own(
            "waiting for %s to start MPI; if that rank has ended or runs another program, end this run",
            name);
        if (ends_within(watch, watch->limit_s - first_s))
            return NULL;
        name_missing(name, sizeof name);
    }
    status_warn_own("gave up waiting for %s to start MPI after %g s; give all ranks the same program and "
                    "options, or wait longer with --rank-timeout",
                    name, watch->limit_s);
    _exit(STATUS_FAILED); /* MPI_Init() may never return, and no other work has started */
}

struct launcher_watch *launcher_watch_begin(double limit_s)
{
    struct launcher_watch *watch = malloc(sizeof *watch);
    if (!watch)
        return NULL;
    *watch = (struct launcher_watch){.lock = PTHREAD_MUTEX_INITIALIZER,
                                     .end = PTHREAD_COND_INITIALIZER,
                                     .limit_s = limit_s > 0 ? limit_s : LIMIT_S};
    if (pthread_create(&watch->thread, NULL, look_on, watch) == 0)
        return watch;
    free(watch);
    return NULL;
}

void launcher_watch_end(struct launcher_watch *watch)
{
    if (!watch)
        return;
    pthread_mutex_lock(&watch->lock);
    watch->ended = true;
    pthread_cond_signal(&watch->end);
    pthread_mutex_unlock(&watch->lock);
    pthread_join(watch->thread, NULL);
    free(watch);
}
