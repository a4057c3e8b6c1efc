/* Shared by the suites that run shell commands. Each test has its own folder.
 *
 * The environment variable FDSL_BENCH names the program; the default is ./fdsl-bench. */
#ifndef FDSL_TESTS_SHELL_H
#define FDSL_TESTS_SHELL_H

#include <criterion/criterion.h>

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "command.h"
#include "core/file.h"
#include "folder.h"

static char folder[] = "/tmp/fdsl-shell-XXXXXX"; /* folder of the current test */
static char root[PATH_MAX];                      /* the folder in which the tests were started */
static char program[PATH_MAX];

/* Runs a shell command in the test's folder; $P is the program. Captures its output in `out`. Returns the
 * exit status. */
__attribute__((format(printf, 1, 2))) static inline int run(const char *format, ...)
{
    char command[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    return shell("cd %s && P=%s && %s", folder, program, command);
}

#define EXPECT(status, ...) cr_assert_eq(run(__VA_ARGS__), status, "%s", out)

/* Runs a command. Expects this exit status, and an output that contains `words`. */
#define EXPECT_PRINTS(status, words, ...) \
    do {                                  \
        EXPECT(status, __VA_ARGS__);      \
        EXPECT_OUT(words);                \
    } while (0)

/* Runs a command. Expects this exit status, and exactly this output. */
#define EXPECT_EXACTLY(status, text, ...) \
    do {                                  \
        EXPECT(status, __VA_ARGS__);      \
        cr_expect_str_eq(out, text);      \
    } while (0)

/* Runs a command. Expects this exit status and one line that contains `words`. */
static inline void expect_refused(int wanted, const char *words, const char *command)
{
    run("%s", command);
    expect_line(wanted, words);
}

/* Writes a file into the test's folder. */
static inline void put(const char *name, const void *bytes, size_t size)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_assert_eq(file_write_atomic(path, bytes, size), STATUS_OK, "%s", status_text());
}

/* Writes a text into the test's folder. */
static inline void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

/* Writes an executable file into the test's folder. */
static inline void put_script(const char *name, const char *text)
{
    put_text(name, text);
    EXPECT(0, "chmod +x %s", name);
}

/* The functions for .init and .fini of a suite. */
static inline void shell_set_up(void)
{
    find_program(program);
    cr_assert_not_null(getcwd(root, sizeof root));
    cr_assert_not_null(mkdtemp(folder));
}

static inline void shell_tear_down(void)
{
    leave_folder(folder);
}

#endif
