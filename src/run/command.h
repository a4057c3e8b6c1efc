/* fdsl-bench --monitor FILE -- COMMAND: samples any command in the way --monitor samples a run. */
#ifndef FDSL_RUN_COMMAND_H
#define FDSL_RUN_COMMAND_H

#include "core/status.h"
#include "run/settings.h"

/* Starts settings->command with this program's stdin, stdout and stderr, and samples it with all its
 * descendants until it ends. Passes on signals. Blocks signals for the rest of the program. Prints a line
 * about the command to stderr and nothing to stdout. Uses no MPI: under mpirun, each rank watches its own
 * command, and `rank` is its number in the rows.
 *
 * `*exit_status` becomes that of the command: 128 + N after signal N, 127 if it is not found, 126 if it
 * cannot be started. Returns STATUS_FAILED or STATUS_USAGE if the samples cannot be written. */
enum status command_run(const struct settings *settings, int rank, int *exit_status);

#endif
