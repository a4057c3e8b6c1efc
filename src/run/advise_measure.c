/* One measurement of `advise`: a run of this program in a child process. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/file.h"
#include "run/advise_parts.h"
#include "run/table.h"

#define ARGUMENTS_MAX 64
#define LOOK_MS       100 /* interval at which pending signals are checked */

/* Runs in the child process. `errors` becomes its stderr. */
static void become(const struct advise_run *run, const char *rows, int errors)
{
    const char *argv[ARGUMENTS_MAX] = {"fdsl-bench", "--workload", run->workload, "--out", rows};
    size_t count = 5;
    for (size_t i = 0; run->arguments[i] && count + 1 < ARGUMENTS_MAX; i++)
        argv[count++] = run->arguments[i];
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM); /* the run ends if this program ends */
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(nothing, STDOUT_FILENO) >= 0 &&
        dup2(errors, STDERR_FILENO) >= 0)
        execv("/proc/self/exe", (char *const *)argv);
    dprintf(errors, "cannot start a run: %s\n", strerror(errno));
    _exit(STATUS_FAILED);
}

/* Reads everything that the child prints to stderr, and copies its last line to `line`. Ends the child if
 * this program receives a signal. */
static void read_last_line(int from, pid_t child, char *line, size_t size)
{
    char text[4096];
    size_t held = 0;
    struct pollfd source = {from, POLLIN, 0};
    while (true) {
        if (file_signal_held())
            kill(child, SIGTERM);
        if (poll(&source, 1, LOOK_MS) <= 0)
            continue;
        ssize_t count = read(from, text + held, sizeof text - 1 - held);
        if (count == 0 || (count < 0 && errno != EINTR))
            break;
        held += count > 0 ? (size_t)count : 0;
        if (held > sizeof text / 2) { /* drop the older text; the last line is needed */
            memmove(text, text + held - sizeof text / 4, sizeof text / 4);
            held = sizeof text / 4;
        }
    }
    while (held > 0 && text[held - 1] == '\n')
        held--;
    text[held] = '\0';
    const char *last = strrchr(text, '\n');
    last = last ? last + 1 : text;
    last += strncmp(last, "fdsl-bench: ", 12) == 0 ? 12 : 0;
    snprintf(line, size, "%.*s", (int)size - 1, last);
}

/* Runs the child and waits for it. */
static enum status run_child(const struct advise_run *run, const char *rows)
{
    char line[512];
    int report[2], outcome = 0;
    if (pipe2(report, O_CLOEXEC) != 0)
        return status_set(STATUS_FAILED, "cannot start a run: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0)
        become(run, rows, report[1]);
    int error = errno;
    close(report[1]);
    if (child > 0)
        read_last_line(report[0], child, line, sizeof line);
    close(report[0]);
    if (child < 0)
        return status_set(STATUS_FAILED, "cannot start a run: %s", strerror(error));
    while (waitpid(child, &outcome, 0) < 0 && errno == EINTR)
        ;
    if (file_signal_held())
        return status_set(STATUS_FAILED, "interrupted");
    if (WIFSIGNALED(outcome))
        return status_set(STATUS_FAILED, "a run was ended by signal %d", WTERMSIG(outcome));
    return WEXITSTATUS(outcome) == STATUS_OK ? STATUS_OK : status_set(STATUS_UNAVAILABLE, "%s", line);
}

static double number(const struct table *table, const char *column)
{
    const char *cell = table_cell(table, table->rows - 1, table_column(table, column));
    char *end;
    double value = strtod(cell, &end);
    return *cell && *end == '\0' ? value : NAN;
}

enum status advise_measure(const struct advise_run *run, struct advise_row *row)
{
    char rows[PATH_MAX];
    CLOSED_BY(table_free) struct table table = {0};
    snprintf(rows, sizeof rows, "%s/%s.csv", run->folder, run->workload);
    TRY(run_child(run, rows));
    TRY(table_read(rows, &table));
    if (table.rows == 0)
        return status_set(STATUS_FAILED, "%s has no rows", rows);
    *row = (struct advise_row){.items_per_s = number(&table, "items_per_s"),
                               .memory_bytes = number(&table, "peak_memory_bytes"),
                               .joules_per_item = number(&table, "energy_j_per_item"),
                               .compute_ms = number(&table, "compute_ms"),
                               .stall_share = number(&table, "stall_share"),
                               .step_s = number(&table, "step_s"),
                               .busy_share = number(&table, "busy_share")};
    return STATUS_OK;
}
