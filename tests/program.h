/* Runs the program and captures its exit status, stdout and stderr. Each test has its own folder.
 *
 * The environment variable FDSL_BENCH names the program; the default is ./fdsl-bench. Nothing here needs a
 * GPU or depends on the speed of the machine. */
#ifndef FDSL_TESTS_PROGRAM_H
#define FDSL_TESTS_PROGRAM_H

#include <criterion/criterion.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "arguments.h"
#include "cells.h"
#include "core/variant.h"
#include "core/workload.h"
#include "folder.h"

/* Options for images that take microseconds, and exactly three samples. */
#define QUICK       "--res 32 --batch 2 --warmups 1 --warmup-time 0 --min-samples 3 --min-time 0 --max-time 0"
#define TINY        QUICK " --vertices 20 --orbits 4 --radius 3"
#define NAIVE       "--variant naive " TINY
#define NAIVE_MIXED "--variant naive " QUICK

/* The documented order of the columns, which scripts depend on. */
static const char header[] =
    "schema,time_utc,host,job_id,revision,workload,variant,device,driver,cuda,ranks,rank,threads,scaling,"
    "ranks_per_device,gpu_others,"
    "batch,res,vertices,orbits,formula,draw,min_lit,random,seed,instance,classes,preset,preset_file,class,"
    "noise,line_width,radius,oval_x,oval_y,freq1,freq2,dtype,channels,layout,out_res,fit,mean,std,"
    "compute,"
    "warmups,samples,settled,median_error,time_min_s,time_median_s,time_mean_s,time_p95_s,time_p99_s,time_sd_"
    "s,wall_s,"
    "items,items_per_s,bytes_per_s,flops,bytes,peak_flops_per_s,peak_bytes_per_s,bound,roofline_share,"
    "time_cv,outliers,throttled,sm_clock_mhz,memory_clock_mhz,energy_j_per_item,instruction_set,speedup,"
    "baseline,"
    "imbalance,efficiency,"
    "timed_stages,noise_s,vertices_s,painting_s,bank_bytes,bank_s,digest,compute_ms,steps,stall_share,first_"
    "batch_s,step_s,"
    "busy_share,"
    "slowdown,"
    "bus_share,bus_slowdown,"
    "cache,verified,wrong";

/* ---- Running the program ---- */

enum { TEXT_MAX = 1 << 20, ARGUMENTS_MAX = 128 };

static char program[PATH_MAX];

/* Settings for the next runs. */
static struct {
    bool terminal_out, terminal_err;
    const char *out_to;     /* redirect stdout to this path; NULL: capture it */
    rlim_t file_bytes_max;  /* RLIMIT_FSIZE; 0: none */
    rlim_t stack_bytes_max; /* RLIMIT_STACK; 0: none */
} how;

/* The result of the latest run. `status` is 128 + the signal if a signal ended it. */
static int status;
static char out[TEXT_MAX], err[TEXT_MAX];

static inline void open_channel(bool terminal, int *ours, int *theirs)
{
    int ends[2];
    if (!terminal) {
        cr_assert(pipe2(ends, O_CLOEXEC) == 0);
        *ours = ends[0];
        *theirs = ends[1];
        return;
    }
    *ours = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*ours < 0)
        cr_skip_test("no pseudo-terminals here"); /* a container without /dev/pts */
    cr_assert(grantpt(*ours) == 0 && unlockpt(*ours) == 0);
    *theirs = open(ptsname(*ours), O_RDWR | O_NOCTTY | O_CLOEXEC);
    cr_assert(*theirs >= 0);
}

/* Reads stdout and stderr concurrently until both end. */
static inline void drain(int out_fd, int err_fd)
{
    struct pollfd channels[2] = {{out_fd, POLLIN, 0}, {err_fd, POLLIN, 0}};
    char *texts[2] = {out, err};
    size_t used[2] = {0};
    while (channels[0].fd >= 0 || channels[1].fd >= 0) {
        cr_assert(poll(channels, 2, -1) > 0);
        for (int i = 0; i < 2; i++) {
            if (channels[i].fd < 0 || !channels[i].revents)
                continue;
            ssize_t got = read(channels[i].fd, texts[i] + used[i], TEXT_MAX - 1 - used[i]);
            if (got <= 0) { /* end of file; EIO from a terminal whose other end is closed */
                close(channels[i].fd);
                channels[i].fd = -1;
            } else
                used[i] += (size_t)got;
        }
    }
    out[used[0]] = err[used[1]] = '\0';
}

static inline void start_program(char *const argv[], int out_fd, int err_fd)
{
    int in_fd = open("/dev/null", O_RDONLY);
    signal(SIGINT, SIG_DFL); /* shells ignore SIGINT in background processes */
    signal(SIGHUP, SIG_DFL);
    if (how.out_to)
        out_fd = open(how.out_to, O_WRONLY);
    if (how.file_bytes_max) {
        struct rlimit limit = {how.file_bytes_max, how.file_bytes_max};
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
            _exit(126);
    }
    if (how.stack_bytes_max) {
        struct rlimit limit = {how.stack_bytes_max, how.stack_bytes_max};
        if (setrlimit(RLIMIT_STACK, &limit) != 0)
            _exit(126);
    }
    if (dup2(in_fd, 0) != 0 || dup2(out_fd, 1) != 1 || dup2(err_fd, 2) != 2)
        _exit(126);
    execvp(argv[0], argv);
    _exit(127);
}

static inline void run_vector(char *const argv[])
{
    int out_ours, out_theirs, err_ours, err_theirs, wait_status;
    open_channel(how.terminal_out, &out_ours, &out_theirs);
    open_channel(how.terminal_err, &err_ours, &err_theirs);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0)
        start_program(argv, out_theirs, err_theirs);
    close(out_theirs);
    close(err_theirs);
    drain(out_ours, err_ours);
    cr_assert(waitpid(pid, &wait_status, 0) == pid);
    status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

/* Sets `argv` to the program and the arguments in `text`, which are separated by blanks. If an option occurs
 * twice, only its last occurrence is kept. */
static inline void split_arguments(char *text, char *argv[ARGUMENTS_MAX])
{
    char *word;
    size_t count = 0;
    argv[0] = program;
    while ((word = strsep(&text, " ")))
        if (*word && count + 2 < ARGUMENTS_MAX)
            argv[++count] = word;
    argv[1 + drop_repeated(argv + 1, count)] = NULL;
}

/* Runs the program with these arguments, which split_arguments() separates. Sets `status`, `out` and `err`.
 */
static inline void run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline void run(const char *format, ...)
{
    static char text[8192];
    char *argv[ARGUMENTS_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    split_arguments(text, argv);
    run_vector(argv);
}

/* Starts the program with these arguments. Discards its stdout, and writes its stderr to the file `err_path`.
 * Returns its process id. */
static inline pid_t start_run(const char *arguments, const char *err_path)
{
    char text[1024], *argv[ARGUMENTS_MAX];
    int fd = open(err_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    pid_t pid = fork();
    cr_assert(fd >= 0 && pid >= 0);
    if (pid == 0) {
        snprintf(text, sizeof text, "%s", arguments);
        split_arguments(text, argv);
        start_program(argv, open("/dev/null", O_WRONLY), fd);
    }
    close(fd);
    return pid;
}

static inline void run_well(const char *arguments)
{
    run("%s", arguments);
    cr_assert(status == 0, "%s: exit %d: %s", arguments, status, err);
}

/* ---- Files ---- */

static char folder[] = "/tmp/fdsl-cli-XXXXXX";

static inline void put(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    cr_assert(fputs(text, file) >= 0 && fclose(file) == 0);
}

/* Returns the contents of a file, which the caller frees. */
static inline char *get(const char *path, size_t *bytes)
{
    char *text = calloc(1, TEXT_MAX);
    FILE *file = fopen(path, "r");
    cr_assert(text && file, "%s: %s", path, strerror(errno));
    size_t count = fread(text, 1, TEXT_MAX - 1, file);
    fclose(file);
    if (bytes)
        *bytes = count;
    return text;
}

static inline void expect_file(const char *path, const char *expected)
{
    char *text = get(path, NULL);
    cr_expect_str_eq(text, expected, "%s has changed", path);
    free(text);
}

/* Returns the number of lines of a file. */
static inline size_t lines_of_file(const char *path)
{
    char *text = get(path, NULL);
    size_t lines = count_of(text, "\n");
    free(text);
    return lines;
}

static inline int count_files(void)
{
    int count = -2; /* . and .. */
    DIR *directory = opendir(".");
    cr_assert_not_null(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* Waits until a file contains these words. */
static inline void wait_for_text(const char *path, const char *words)
{
    for (bool found = false; !found; usleep(1000)) {
        char *text = get(path, NULL);
        found = strstr(text, words) != NULL;
        free(text);
    }
}

/* Sends a signal to a program that start_run() started. Expects that the signal ends it. */
static inline void expect_ended_by(pid_t pid, int number)
{
    int wait_status;
    cr_assert(kill(pid, number) == 0 && waitpid(pid, &wait_status, 0) == pid);
    cr_expect(WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == number, "%x", wait_status);
}

/* Creates the test's folder. Removes variables of launchers, jobs and colours from the environment. */
static inline void start(void)
{
    find_program(program);
    forget_launchers();
    unsetenv("NO_COLOR");
    unsetenv("TERM");
    enter_folder(folder);
}

static inline void stop(void)
{
    leave_folder(folder);
}

/* Skips the test. Calls stop(), because Criterion does not call the fini function of a skipped test. */
#define SKIP(reason)          \
    do {                      \
        stop();               \
        cr_skip_test(reason); \
    } while (0)

/* ---- Texts ---- */

/* Expects nothing on stdout, and one line on stderr. The line must begin with the program's name and contain
 * `words`. */
static inline void expect_error(int expected, const char *words, const char *arguments)
{
    cr_expect(status == expected, "%s: exit %d, not %d: %s", arguments, status, expected, err);
    cr_expect(*out == '\0', "%s: stdout is not empty: %s", arguments, out);
    cr_expect(strncmp(err, "fdsl-bench: ", 12) == 0, "%s: %s", arguments, err);
    cr_expect(strstr(err, words), "%s: '%s' is not in: %s", arguments, words, err);
    cr_expect(count_of(err, "\n") == 1 && err[strlen(err) - 1] == '\n', "%s: not one line: %s", arguments,
              err);
}

/* Runs the program with these arguments. Expects an error with this exit status, which contains `words`. */
static inline void expect_failure(int expected, const char *words, const char *arguments)
{
    run("%s", arguments);
    expect_error(expected, words, arguments);
}

/* Runs the program with these arguments. Expects success, and `words` on stdout. */
static inline void expect_prints(const char *words, const char *arguments)
{
    run_well(arguments);
    cr_expect(strstr(out, words), "%s: '%s' is not in: %s", arguments, words, out);
}

/* Runs a Python script with `path` and `header` as its arguments. If it fails, shows its stderr. */
static inline void check_with_python(const char *script, const char *path)
{
    char *argv[] = {"python3", "-c", (char *)script, (char *)path, (char *)header, NULL};
    run_vector(argv);
    if (status == 127)
        SKIP("python3 is not installed");
    cr_expect(status == 0, "%s: %s", path, err);
}

struct refusal {
    const char *arguments, *words;
};

/* Runs the program with the arguments `before`, followed by those of each case. Expects exit status 2, a
 * one-line error and no new file. */
static inline void expect_refusals(const struct refusal *refusals, size_t count, const char *before)
{
    int files = count_files();
    for (size_t i = 0; i < count; i++) {
        run("%s %s", before, refusals[i].arguments);
        expect_error(2, refusals[i].words, refusals[i].arguments);
        cr_expect(count_files() == files, "%s: a file was created", refusals[i].arguments);
    }
}

#endif
