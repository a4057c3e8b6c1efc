/* Suites that run the program from outside: a folder of their own, and shell commands in it.
 *
 * FDSL_BENCH names the program; the default is ./fdsl-bench. */
#ifndef FDSL_TESTS_SHELL_H
#define FDSL_TESTS_SHELL_H

#include <criterion/criterion.h>

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/fdsl-shell-XXXXXX"; /* the test's own */
static char root[PATH_MAX];                      /* where the tests were started */
static char program[PATH_MAX];
static char out[1 << 16]; /* what the latest run() said */

/* Runs a shell command in the test's folder, $P being the program; its output comes into `out`. Returns the
 * exit status. */
__attribute__((format(printf, 1, 2))) static int run(const char *format, ...)
{
    char command[4096], whole[5000];
    int used = snprintf(command, sizeof command, "cd %s && P=%s && ", folder, program);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command + used, sizeof command - (size_t)used, format, arguments);
    va_end(arguments);
    snprintf(whole, sizeof whole, "{ %s\n} 2>&1", command);
    FILE *stream = popen(whole, "r");
    cr_assert_not_null(stream);
    out[fread(out, 1, sizeof out - 1, stream)] = '\0';
    int status = pclose(stream);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

#define EXPECT(status, ...) cr_assert_eq(run(__VA_ARGS__), status, "%s", out)

/* For .init and .fini of a suite. */
static void shell_set_up(void)
{
    const char *given = getenv("FDSL_BENCH");
    cr_assert_not_null(mkdtemp(folder));
    cr_assert_not_null(getcwd(root, sizeof root));
    cr_assert_not_null(realpath(given ? given : "./fdsl-bench", program));
}

static void shell_tear_down(void)
{
    char command[2 * sizeof folder + 64];
    snprintf(command, sizeof command, "chmod -R u+w %s; rm -rf %s", folder, folder);
    cr_assert_eq(system(command), 0);
}

#endif
