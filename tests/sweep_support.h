/* Shared by the suites of sweeps: a temporary tree with links to the scripts. */
#ifndef FDSL_TESTS_SWEEP_SUPPORT_H
#define FDSL_TESTS_SWEEP_SUPPORT_H

#include <criterion/criterion.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "command.h"
#include "core/portable.h"
#include "folder.h"

enum { TEXT_MAX = 1 << 18 };

static char root[PATH_MAX], folder[] = "/tmp/fdsl-sweep-XXXXXX";

static inline void put(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file, "%s", path);
    cr_assert(fputs(text, file) >= 0 && fclose(file) == 0);
}

/* Returns the contents of a file, or "" if it does not exist. The next call overwrites them. */
static inline const char *get(const char *path)
{
    static char text[TEXT_MAX];
    FILE *file = fopen(path, "r");
    size_t count = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[count] = '\0';
    if (file)
        fclose(file);
    return text;
}

static inline bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* Each test has its own temporary tree. */
static inline void start(void)
{
    static const char *const links[] = {"scripts", "slurm", "configs"};
    char program[PATH_MAX], target[PATH_MAX + 16];
    find_program(program);
    cr_assert(setenv("FDSL_BENCH", program, 1) == 0 && unsetenv("MPIRUN") == 0);
    cr_assert_not_null(getcwd(root, sizeof root));
    enter_folder(folder);
    for (size_t i = 0; i < COUNT_OF(links); i++) {
        snprintf(target, sizeof target, "%s/%s", root, links[i]);
        cr_assert(symlink(target, links[i]) == 0);
    }
}

static inline void stop(void)
{
    leave_folder(folder);
}

#endif
