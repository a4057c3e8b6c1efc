/* Runs shell commands in tests and keeps the output and exit status of the latest one. */
#ifndef FDSL_TESTS_COMMAND_H
#define FDSL_TESTS_COMMAND_H

#include <criterion/criterion.h>

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

static char out[1 << 18]; /* stdout and stderr of the latest command */
static int status;        /* its exit status, or 128 + the signal's number if a signal ended it */

/* Runs a shell command in the current folder. Returns `status`. */
static inline int shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline int shell(const char *format, ...)
{
    char text[8192], command[sizeof text + 16];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cr_assert(length > 0 && (size_t)length < sizeof text, "a command is too long: %.80s", format);
    snprintf(command, sizeof command, "{ %s\n} 2>&1", text);
    FILE *stream = popen(command, "r");
    cr_assert_not_null(stream);
    out[fread(out, 1, sizeof out - 1, stream)] = '\0';
    int ended = pclose(stream);
    status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    return status;
}

/* Returns whether the output of the latest command contains the words. */
static inline bool says(const char *words)
{
    return strstr(out, words) != NULL;
}

/* Runs a shell command, which must exit with status `wanted`. */
#define SHELL(wanted, ...) cr_assert_eq(shell(__VA_ARGS__), wanted, "exit %d: %s", status, out)

/* Expects that the output of the latest command contains each of the words. NULL ends the list. */
static inline void expect_each(const char *const *words)
{
    for (; *words; words++)
        cr_expect(says(*words), "'%s' is not in: %s", *words, out);
}

#define EXPECT_OUT(...) expect_each((const char *const[]){__VA_ARGS__, NULL})

/* Runs a shell command, which must exit with status `wanted` and print `words`. */
#define SHELL_PRINTS(wanted, words, ...) \
    do {                                 \
        SHELL(wanted, __VA_ARGS__);      \
        EXPECT_OUT(words);               \
    } while (0)

/* Expects that the latest command exited with status `wanted` and printed `words`. */
static inline void expect(int wanted, const char *words)
{
    cr_expect(status == wanted, "exit %d, not %d: %s", status, wanted, out);
    cr_expect(says(words), "'%s' is not in: %s", words, out);
}

/* Expects that the latest command exited with status `wanted` and printed a single line, which contains
 * `words`. */
static inline void expect_line(int wanted, const char *words)
{
    expect(wanted, words);
    cr_expect(strchr(out, '\n') == out + strlen(out) - 1, "not one line: %s", out);
}

#endif
