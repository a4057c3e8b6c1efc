/* fdsl-bench --monitor FILE -- COMMAND: runs a command and samples its processes. */
#include "run/runner.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/phase.h"
#include "core/text.h"
#include "core/timer.h"
#include "machine/host.h"
#include "machine/monitor.h"

#define FLUSH_S       60 /* seconds between writes; a killed monitor loses the samples since the last write */
#define NOT_STARTED   126
#define NOT_FOUND     127
#define SIGNAL_OFFSET 128

/* A command and the state of its monitor. */
struct watch {
    const struct settings *settings;
    const char *name; /* name of the command, without its folder */
    uint64_t rank;
    struct env env;
    struct process_tree *tree;
    struct monitor_gpus gpus;
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

static enum status begin_monitor(struct watch *watch)
{
    const struct settings *settings = watch->settings;
    env_capture(&watch->env);
    monitor_find_gpus(options_given(&settings->options, "device") ? (int)settings->device : -1, &watch->gpus);
    const struct monitor_subject subject = {.env = &watch->env,
                                            .rank = watch->rank,
                                            .gpus = watch->gpus.list,
                                            .gpu_count = watch->gpus.count,
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
