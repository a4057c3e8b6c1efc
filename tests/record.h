/* Shared by the suites that write files: a folder for each test, a file in it, and replacements of flock()
 * and fsync() that fail on demand. */
#ifndef FDSL_TESTS_RECORD_H
#define FDSL_TESTS_RECORD_H

#include <criterion/criterion.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/file.h"
#include "core/record.h"

/* ---- A file system that misbehaves on demand ---- */

static int flock_error, fsync_error;

int flock(int fd, int operation)
{
    if (flock_error) {
        errno = flock_error;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}

int fsync(int fd)
{
    if (fsync_error) {
        errno = fsync_error;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

/* ---- A folder for each test ---- */

static char folder[] = "/tmp/fdsl-record-XXXXXX";
static char path[sizeof folder + 16];

static inline void start(void)
{
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/rows.csv", folder);
}

static inline void run_command(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline void run_command(const char *format, ...)
{
    char command[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    cr_assert_eq(system(command), 0, "%s", command);
}

static inline void stop(void)
{
    run_command("rm -rf '%s'", folder);
}

static inline void put(const char *text)
{
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    cr_assert_geq(fputs(text, file), 0);
    cr_assert_eq(fclose(file), 0);
}

/* Returns the contents of the file; the caller frees them. */
static inline char *get(void)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file);
    if (getdelim(&text, &bytes, '\0', file) < 0) {
        free(text);
        text = strdup("");
    }
    fclose(file);
    return text;
}

static inline void expect_file(const char *expected)
{
    char *text = get();
    cr_expect_str_eq(text, expected);
    free(text);
}

static inline void expect_message(const char *part)
{
    cr_expect_not_null(strstr(status_text(), part), "'%s' lacks '%s'", status_text(), part);
    cr_expect_null(strchr(status_text(), '\n'));
}

static inline struct row sample_row(const char *first, const char *second, const char *third)
{
    struct row row = {0};
    row_text(&row, "name", first);
    row_text(&row, "note", second);
    row_number(&row, "wrong", third);
    return row;
}

static inline enum status append_sample(const char *first, const char *second, const char *third)
{
    struct row row = sample_row(first, second, third);
    enum status status = csv_append(path, &row, 1);
    row_free(&row);
    return status;
}

static inline enum status check_sample(const char *where)
{
    struct row row = sample_row("a", "b", "0");
    enum status status = csv_check(where, &row);
    row_free(&row);
    return status;
}

/* Waits for a child process. Returns its exit status, or 128 + the signal's number if a signal ended it. */
static inline int exit_status_of(pid_t child)
{
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Limits the size of files to `bytes`, so that writes fail as on a full disk. 0 removes the limit. */
static inline void limit_file_size(rlim_t bytes)
{
    struct rlimit limit;
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes ? bytes : limit.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

#endif
