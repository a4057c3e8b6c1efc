/* What the suites of ranks share: the program under mpirun, in a folder of the test's own. */
#ifndef FDSL_TESTS_MPIRUN_H
#define FDSL_TESTS_MPIRUN_H

#include <criterion/criterion.h>

#include <dirent.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cells.h"
#include "core/portable.h"
#include "core/timer.h"
#include "folder.h"

/* Images that take microseconds, and three samples of them whatever they say. */
#define TINY                                                                                           \
    "--variant " VARIANTS " --res 32 --vertices 20 --orbits 4 --radius 3 --warmups 1 --warmup-time 0 " \
    "--min-samples 3 --min-time 0 --max-time 0 "
#define MIXED \
    "--variant " VARIANTS " --res 32 --warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0 "

enum { TEXT_MAX = 1 << 20 };

static char program[PATH_MAX], folder[] = "/tmp/fdsl-mpi-XXXXXX";
static int status;
static char out[TEXT_MAX], err[TEXT_MAX];

/* ---- Running ---- */

/* A whole file, or nothing where there is none; `text` has room for TEXT_MAX. */
static inline void read_text(const char *path, char *text)
{
    FILE *file = fopen(path, "r");
    size_t bytes = file ? fread(text, 1, TEXT_MAX - 1, file) : 0;
    text[bytes] = '\0';
    if (file)
        fclose(file);
}

/* Runs a shell command. "PROGRAM" in it stands for the program, $PROGRAM. */
static inline void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline void shell(const char *format, ...)
{
    char command[8192];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command - 32, format, arguments);
    va_end(arguments);
    strcat(command, " >stdout.txt 2>stderr.txt");
    FILE *pipe = popen(command, "r");
    cr_assert_not_null(pipe);
    int ended = pclose(pipe);
    status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    read_text("stdout.txt", out);
    read_text("stderr.txt", err);
}

/* Runs the program on that many ranks, or without mpirun for 0. */
static inline void run(int ranks, const char *arguments)
{
    if (ranks)
        shell("timeout 50 mpirun --bind-to none -n %d $PROGRAM %s", ranks, arguments);
    else
        shell("$PROGRAM %s", arguments);
}

static inline void run_well(int ranks, const char *arguments)
{
    run(ranks, arguments);
    cr_assert(status == 0, "%d ranks, %s: exit %d: %s", ranks, arguments, status, err);
}

/* Every test has a folder of its own, and a launcher of its own. What is set makes mpirun start anywhere: as
 * root, with more ranks than cores, and without looking for networks. */
static inline void start(void)
{
    static const char *const foreign[] = {"OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_RANK",
                                          "MV2_COMM_WORLD_SIZE",
                                          "PMI_SIZE",
                                          "PMI_RANK",
                                          "PMIX_RANK",
                                          "SLURM_STEP_NUM_TASKS",
                                          "SLURM_PROCID",
                                          "SLURM_JOB_ID",
                                          "SLURM_JOBID"};
    static const char *const own[][2] = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                         {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                         {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                                         {"OMPI_MCA_pml", "ob1"},
                                         {"OMPI_MCA_btl", "self,vader,tcp"},
                                         {"OMPI_MCA_btl_tcp_if_include", "lo"},
                                         {"OMPI_MCA_oob_tcp_if_include", "lo"}};
#ifndef HAVE_MPI
    cr_skip_test("this build has no MPI");
#endif
    if (system("command -v mpirun >/dev/null") != 0)
        cr_skip_test("mpirun is not installed");
    find_program(program);
    for (size_t i = 0; i < COUNT_OF(foreign); i++)
        unsetenv(foreign[i]);
    for (size_t i = 0; i < COUNT_OF(own); i++)
        setenv(own[i][0], own[i][1], 1);
    setenv("PROGRAM", program, 1);
    /* MPI's parts leave memory behind and are gone when that is reported, so it cannot be told by name. */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
    enter_folder(folder);
}

static inline void stop(void)
{
    leave_folder(folder);
}

/* ---- Ranks that go on by themselves ---- */

/* The process ids of the children of a process that run our program; at most 8. */
static inline int children_of(pid_t parent, pid_t *children)
{
    int count = 0;
    DIR *directory = opendir("/proc");
    cr_assert_not_null(directory);
    for (const struct dirent *entry; (entry = readdir(directory)) && count < 8;) {
        char path[300], line[512] = "", name[64] = "";
        int pid, above;
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        if (fgets(line, sizeof line, file) && sscanf(line, "%d (%63[^)]) %*c %d", &pid, name, &above) == 3 &&
            above == parent && strcmp(name, "fdsl-bench") == 0)
            children[count++] = pid;
        fclose(file);
    }
    closedir(directory);
    return count;
}

/* Starts mpirun on its own, its output in files. */
static inline pid_t start_ranks(const char *ranks, const char *arguments)
{
    char command[4096];
    snprintf(command, sizeof command, "exec mpirun --bind-to none -n %s $PROGRAM %s >stdout.txt 2>stderr.txt",
             ranks, arguments);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    return pid;
}

static inline void nap(void)
{
    nanosleep(&(struct timespec){0, 20000000}, NULL);
}

/* What a process has done: hundredths of a second computed, and how often it went to sleep. */
struct work_done {
    int computed;
    long sleeps;
};

static inline struct work_done work_done(pid_t pid)
{
    static char text[TEXT_MAX];
    char path[64];
    unsigned long user = 0, system_ = 0;
    struct work_done done = {0};
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    read_text(path, text);
    if (sscanf(text, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system_) ==
        2)
        done.computed = (int)(100 * (user + system_) / (unsigned long)sysconf(_SC_CLK_TCK));
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    read_text(path, text);
    const char *sleeps = strstr(text, "\nvoluntary_ctxt_switches:");
    if (sleeps)
        sscanf(sleeps, "\nvoluntary_ctxt_switches: %ld", &done.sleeps);
    return done;
}

/* Waits until a rank other than 0 is being timed: it has started, and computes without going to sleep. While
 * rank 0 runs alone, the others sleep a millisecond at a time. */
static inline void wait_until_timed(pid_t mpirun, int ranks, int rank, pid_t children[8])
{
    struct work_done before = {0};
    for (double begin_s = timer_now_s(); timer_now_s() - begin_s < 90; nap()) {
        if (children_of(mpirun, children) != ranks)
            continue;
        struct work_done now = work_done(children[rank]);
        if (now.sleeps - before.sleeps > 5 || before.computed < 20)
            before = now;
        else if (now.computed - before.computed >= 10)
            return;
    }
    cr_assert_fail("rank %d is not timed", rank);
}

/* Waits at most so long for a process to end. */
static inline bool ends_within(pid_t pid, double limit_s, int *ended)
{
    for (double begin_s = timer_now_s(); timer_now_s() - begin_s < limit_s; nap())
        if (waitpid(pid, ended, WNOHANG) == pid)
            return true;
    return false;
}

#endif
