/* Tests that a stopped rank is noticed although the other ranks do not communicate. Skipped if the build has
 * no MPI or mpirun is missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "machine/comm.h"
#include "machine/heartbeat.h"
#include "mpirun.h"

TestSuite(mpi_heartbeat, .init = start, .fini = stop, .timeout = 400);

#define ROLE     "FDSL_TEST_HEARTBEAT" /* variable of ranks; its value says what rank 1 does */

#define LIMIT_S  1
#define PAUSE_MS 300

/* Stops this process for PAUSE_MS milliseconds. */
static void pause_self(void)
{
    const pid_t self = getpid(), child = fork();
    if (child == 0) {
        usleep(PAUSE_MS * 1000);
        kill(self, SIGCONT);
        _exit(0);
    }
    kill(self, SIGSTOP);
    waitpid(child, NULL, 0);
}

/* Runs before main() in all processes. A process that is a rank does its work here and exits. */
__attribute__((constructor)) static void be_rank(void)
{
    const char *role = getenv(ROLE);
    struct heartbeat *heartbeat = NULL;
    if (!role)
        return;
    int wrong = comm_open() != STATUS_OK || heartbeat_open(LIMIT_S, &heartbeat) != STATUS_OK ||
                (comm_size() > 1) != (heartbeat != NULL);
    if (comm_rank() == 1 && strcmp(role, "stops") == 0)
        kill(getpid(), SIGSTOP);
    if (comm_rank() == 1 && strcmp(role, "pauses") == 0)
        pause_self();
    if (comm_rank() == 1 && strcmp(role, "leaves") == 0) {
        heartbeat_close(heartbeat);
        heartbeat = NULL;
    }
    sleep(strcmp(role, "stops") == 0 ? 60 : 3 * LIMIT_S); /* like a rank that waits for a GPU */
    heartbeat_close(heartbeat);
    comm_close();
    _exit(wrong);
}

static void run_ranks(int ranks, const char *role)
{
    char self[PATH_MAX] = "";
    cr_assert(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    shell("timeout 150 mpirun --bind-to none -x " ROLE "=%s -n %d %s", role, ranks, self);
}

Test(mpi_heartbeat, a_stopped_rank_ends_all_ranks)
{
    const double begin_s = timer_now_s();
    run_ranks(3, "stops");
    cr_expect(status != 0 && strstr(err, "rank 1 did not answer for 1 s"), "%d: %s", status, err);
    cr_expect_lt(timer_now_s() - begin_s, 30);
}

Test(mpi_heartbeat, ranks_that_pause_or_leave_are_not_reported)
{
    static const char *const roles[] = {"pauses", "leaves", "works"};
    for (size_t i = 0; i < COUNT_OF(roles); i++) {
        run_ranks(3, roles[i]);
        cr_expect_eq(status, 0, "%s: exit %d: %s", roles[i], status, err);
        cr_expect_str_empty(err);
    }
    run_ranks(1, "works");
    cr_expect_eq(status, 0, "%s", err);
}
