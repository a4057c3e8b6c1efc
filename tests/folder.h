/* Finds the program under test, and creates a folder for each test. */
#ifndef FDSL_TESTS_FOLDER_H
#define FDSL_TESTS_FOLDER_H

#include <criterion/criterion.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Stores the absolute path of the program. The environment variable FDSL_BENCH names the program; the default
 * is ./fdsl-bench. */
static inline void find_program(char path[PATH_MAX])
{
    const char *given = getenv("FDSL_BENCH");
    cr_assert_not_null(realpath(given && *given ? given : "./fdsl-bench", path),
                       "build the program first, or set FDSL_BENCH");
}

/* Creates a folder and makes it the current one. `folder` is a template for mkdtemp(), which replaces it with
 * the folder's name. */
static inline void enter_folder(char *folder)
{
    cr_assert_not_null(mkdtemp(folder));
    cr_assert(chdir(folder) == 0);
}

/* Removes the variables of launchers and jobs, because the tests themselves may run under a launcher or in a
 * job. */
static inline void forget_launchers(void)
{
    static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE",
                                            "OMPI_COMM_WORLD_RANK",
                                            "MV2_COMM_WORLD_SIZE",
                                            "MV2_COMM_WORLD_RANK",
                                            "PMI_SIZE",
                                            "PMI_RANK",
                                            "PMIX_RANK",
                                            "SLURM_NTASKS",
                                            "SLURM_STEP_NUM_TASKS",
                                            "SLURM_PROCID",
                                            "SLURM_JOB_ID",
                                            "SLURM_JOBID",
                                            "SLURM_ARRAY_JOB_ID",
                                            "SLURM_ARRAY_TASK_ID"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        unsetenv(variables[i]);
}

static inline void leave_folder(const char *folder)
{
    char command[PATH_MAX];
    snprintf(command, sizeof command, "chmod -R u+w '%s'; rm -rf '%s'", folder, folder);
    cr_assert(chdir("/") == 0 && system(command) == 0);
}

#endif
