/* Tests files that another process has locked: the program names that process, gives up in time, and loses no
 * measured row. If the other process has a shared lock, the check before the measurement passes, but the
 * write after the measurement waits. */
#include "program.h"

#include <sys/file.h>

#include "core/portable.h"

TestSuite(lock, .init = start, .fini = stop, .timeout = 60);

/* Creates rows.csv with one row and locks it. Returns the descriptor; closing it releases the lock. */
static int locked_rows(int operation)
{
    run_well(NAIVE " --out rows.csv");
    int fd = open("rows.csv", O_RDONLY | O_CLOEXEC);
    cr_assert(fd >= 0 && flock(fd, operation) == 0);
    return fd;
}

/* Returns "process N" with the test's own process id, because the test holds the lock. */
static const char *own_name(void)
{
    static char name[32];
    snprintf(name, sizeof name, "process %ld (", (long)getpid());
    return name;
}

Test(lock, a_locked_file_is_reported_before_the_measurement)
{
    int fd = locked_rows(LOCK_EX);
    run("--variant naive --loops 1000000000 --out rows.csv --lock-timeout 0.2");
    close(fd);
    expect_error(1, "rows.csv is still locked by ", "--lock-timeout 0.2");
    cr_expect(strstr(err, own_name()) && strstr(err, "--lock-timeout"), "%s", err);
}

Test(lock, rows_that_cannot_be_written_are_printed)
{
    int fd = locked_rows(LOCK_SH);
    run(NAIVE " --out rows.csv --lock-timeout 0.2");
    close(fd);
    cr_expect(status == 1 && strstr(err, own_name()), "exit %d: %s", status, err);
    cr_expect(strstr(err, header) && count_of(strstr(err, header), ",synth,naive,") == 1, "%s", err);
    cr_expect(strstr(out, "naive"), "the table lacks the line of the variant: %s", out);
    cr_expect(lines_of_file("rows.csv") == 2);
}

/* Starts the program while rows.csv is locked. Returns when the program reports that it is waiting. */
static pid_t start_waiting(void)
{
    pid_t pid =
        start_run("--variant naive --res 32 --batch 2 --vertices 20 --orbits 4 --warmups 0 --warmup-time 0 "
                  "--loops 3 --out rows.csv",
                  "err.txt");
    wait_for_text("err.txt", "waiting for process");
    return pid;
}

Test(lock, an_interrupted_wait_loses_no_row)
{
    static const int signals[] = {SIGINT, SIGTERM};
    int fd = locked_rows(LOCK_SH);
    for (size_t i = 0; i < COUNT_OF(signals); i++) {
        expect_ended_by(start_waiting(), signals[i]);
        char *text = get("err.txt", NULL);
        cr_expect(strstr(text, header) && count_of(strstr(text, header), ",synth,naive,") == 1, "%s", text);
        free(text);
    }
    close(fd);
    cr_expect(lines_of_file("rows.csv") == 2);
}

Test(lock, waits_until_the_lock_is_released)
{
    int wait_status, fd = locked_rows(LOCK_SH);
    pid_t pid = start_waiting();
    close(fd);
    cr_assert(waitpid(pid, &wait_status, 0) == pid && wait_status == 0);
    cr_expect(lines_of_file("rows.csv") == 3);
}
