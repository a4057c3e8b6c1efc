/* fdsl-bench --monitor FILE -- COMMAND: runs a command and samples its processes. */
#ifndef FDSL_RUN_COMMAND_H
#define FDSL_RUN_COMMAND_H

#include "core/status.h"

struct settings;

/* fdsl-bench --monitor FILE -- COMMAND: runs any command and samples it in the way that --monitor samples a
 * benchmark run. Starts settings->command with this program's stdin, stdout and stderr. Samples the command
 * and all its descendants until the command ends. SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1 and SIGUSR2 are
 * blocked in this program and passed on to the command. Prints a summary line to stderr and nothing to
 * stdout. Does not use MPI: under mpirun, each rank watches its own command, and `rank` is the number of this
 * rank in the rows.
 *
 * `*exit_status` becomes the exit status of the command, or 128 + N if signal N ended it. It becomes 127 if
 * the command is not found, and 126 if it cannot be started for another reason. Returns STATUS_FAILED if the
 * command cannot be started, and STATUS_FAILED or STATUS_USAGE if the samples cannot be written. */
enum status command_run(const struct settings *settings, int rank, int *exit_status);

#endif
