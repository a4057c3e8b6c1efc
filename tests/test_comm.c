/* Tests comm_serial.c (also in a build that links comm_mpi.c), and how the environment variables of launchers
 * are read. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "folder.h"

/* Renames the functions of comm_serial.c, because the build may contain comm_mpi.c, whose functions have the
 * same names. */
#define comm_open         serial_open
#define comm_close        serial_close
#define comm_set_timeout  serial_set_timeout
#define comm_rank         serial_rank
#define comm_size         serial_size
#define comm_local_rank   serial_local_rank
#define comm_local_size   serial_local_size
#define comm_agree        serial_agree
#define comm_vote         serial_vote
#define comm_sum          serial_sum
#define comm_max          serial_max
#define comm_spread       serial_spread
#define comm_gather       serial_gather
#define comm_gather_local serial_gather_local
#include "comm_serial.c"

TestSuite(comm_serial, .init = forget_launchers, .timeout = 60);
TestSuite(launcher, .init = forget_launchers, .timeout = 60);

Test(comm_serial, one_rank_agrees_with_itself)
{
    uint64_t count = 7, counts = 0;
    double value = 1.5;
    cr_assert(comm_open() == STATUS_OK, "%s", status_text());
    cr_expect(comm_rank() == 0 && comm_local_rank() == 0);
    cr_expect(comm_size() == 1 && comm_local_size() == 1);
    cr_expect(comm_agree(STATUS_OK) == STATUS_OK);
    cr_expect(comm_agree(STATUS_WRONG) == STATUS_WRONG);
    cr_expect(comm_vote(STATUS_OK, &value, 1) == STATUS_OK && value == 1.5);
    cr_expect(comm_vote(STATUS_FAILED, &value, 1) == STATUS_FAILED);
    cr_expect(comm_sum(&count, 1) == STATUS_OK && count == 7);
    cr_expect(comm_max(&value, 1) == STATUS_OK && value == 1.5);
    cr_expect(comm_spread(&count, sizeof count) == STATUS_OK && count == 7);
    cr_expect(comm_gather(&count, sizeof count, &counts) == STATUS_OK && counts == 7);
    counts = 0;
    cr_expect(comm_gather_local(&count, sizeof count, &counts) == STATUS_OK && counts == 7);
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
        unsetenv(sizes[i]);
    }
}

Test(comm_serial, refuses_a_nonzero_rank_of_unknown_size)
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
    expect_start("SLURM_NTASKS", "8"); /* tasks that the job may start; srun has started none */
    expect_start("SLURM_PROCID", "0");
}

Test(comm_serial, ignores_malformed_variables)
{
    expect_start("OMPI_COMM_WORLD_SIZE", "");
    expect_start("PMI_SIZE", "many");
    expect_start("PMIX_RANK", "-1");
}

static struct launcher found;

Test(launcher, without_a_launcher_the_rank_is_0)
{
    cr_expect_not(launcher_find(&found));
    cr_expect(launcher_rank() == 0);
}

Test(launcher, finds_the_rank_and_the_number_of_ranks)
{
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    setenv("OMPI_COMM_WORLD_RANK", "3", 1);
    cr_assert(launcher_find(&found));
    cr_expect(found.ranks == 4 && found.rank == 3 && launcher_rank() == 3);
    cr_expect_str_eq(found.variable, "OMPI_COMM_WORLD_SIZE");
}

/* mpirun on several machines of a Slurm job starts its ranks inside a step of srun. */
Test(launcher, mpirun_inside_srun_takes_precedence)
{
    setenv("SLURM_STEP_NUM_TASKS", "2", 1);
    setenv("SLURM_PROCID", "1", 1);
    cr_assert(launcher_find(&found));
    cr_expect(found.ranks == 2 && found.rank == 1);
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    cr_assert(launcher_find(&found));
    cr_expect(found.ranks == 1 && found.rank == 0);
}

Test(launcher, a_shell_started_by_srun_is_no_launcher)
{
    setenv("SLURM_STEP_NUM_TASKS", "1", 1);
    setenv("SLURM_PROCID", "0", 1);
    cr_expect_not(launcher_find(&found));
}

Test(launcher, pmix_provides_only_the_rank)
{
    setenv("PMIX_RANK", "2", 1);
    cr_assert(launcher_find(&found));
    cr_expect(found.ranks == 0 && found.rank == 2);
}
