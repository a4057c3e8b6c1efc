#include "comm.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

/* The tests themselves may run under a launcher or in a job. */
static void forget_launchers(void)
{
    static const char *const variables[] = {
        "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE",  "PMI_SIZE",     "PMIX_RANK",
        "SLURM_NTASKS",         "SLURM_STEP_NUM_TASKS", "SLURM_PROCID",
    };
    for (size_t i = 0; i < COUNT_OF(variables); i++)
        unsetenv(variables[i]);
}

TestSuite(comm_serial, .init = forget_launchers, .timeout = 60);

Test(comm_serial, one_rank_agrees_with_itself)
{
    cr_assert(comm_open() == STATUS_OK, "%s", status_text());
    cr_expect(comm_rank() == 0);
    cr_expect(comm_size() == 1);
    cr_expect(comm_barrier() == STATUS_OK);
    cr_expect(comm_agree(STATUS_OK) == STATUS_OK);
    cr_expect(comm_agree(STATUS_WRONG) == STATUS_WRONG);
    comm_close();
}

static void expect_refusal(const char *variable, const char *value)
{
    setenv(variable, value, 1);
    status_set(STATUS_FAILED, "something else");
    cr_expect(comm_open() == STATUS_UNAVAILABLE, "%s=%s", variable, value);
    cr_expect(strstr(status_text(), variable) && strstr(status_text(), value), "%s", status_text());
    cr_expect(!strchr(status_text(), '\n'));
}

static void expect_start(const char *variable, const char *value)
{
    setenv(variable, value, 1);
    cr_expect(comm_open() == STATUS_OK, "%s=%s: %s", variable, value, status_text());
}

Test(comm_serial, refuses_to_be_one_of_several)
{
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        expect_refusal(sizes[i], "4");
        expect_start(sizes[i], "1");
    }
}

Test(comm_serial, refuses_a_rank_above_zero_where_the_size_is_not_told)
{
    expect_start("PMIX_RANK", "0");
    expect_refusal("PMIX_RANK", "3");
}

Test(comm_serial, refuses_several_tasks_of_srun)
{
    expect_start("SLURM_PROCID", "0");
    expect_start("SLURM_STEP_NUM_TASKS", "1");
    expect_refusal("SLURM_STEP_NUM_TASKS", "2");
}

Test(comm_serial, runs_inside_a_batch_script)
{
    expect_start("SLURM_NTASKS", "8"); /* what the job may start, not what was started */
    expect_start("SLURM_PROCID", "0");
}

Test(comm_serial, takes_a_strange_variable_for_none)
{
    expect_start("OMPI_COMM_WORLD_SIZE", "");
    expect_start("PMI_SIZE", "many");
    expect_start("PMIX_RANK", "-1");
}
