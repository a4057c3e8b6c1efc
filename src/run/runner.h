/* Runs the chosen variants in order, or another program, or the runs of a table. */
#ifndef FDSL_RUN_RUNNER_H
#define FDSL_RUN_RUNNER_H

#include <stdbool.h>

#include "core/status.h"
#include "run/report.h"
#include "run/settings.h"

/* Connects this rank with the other ranks (comm_open()). `read` is the status of parsing this rank's command
 * line. If parsing failed on any rank, all ranks return that failure. STATUS_USAGE if some ranks have
 * --prepare and others do not. */
enum status runner_join(const struct settings *settings, enum status read);

/* Sets up, verifies, times, records and reports all chosen variants, for every combination of the lists and
 * ranges. Collective. STATUS_WRONG if the results of a variant differ from the reference; the other variants
 * still run. With --variant all, variants that cannot run here are skipped; with --variant
 * auto, only the first candidate that can run on all ranks runs. Any other failure ends this
 * combination; rows that are already written remain. After STATUS_FAILED, for example a full disk or a broken
 * device, no other combination runs. Returns the most severe status. */
enum status runner_run(struct settings *settings);

/* This environment variable is the number of a socket, with which `advise` keeps training runs open between
 * its measurements. After each epoch and its row, the run writes a byte to it, and waits for a byte before
 * the next epoch. It ends if the socket is closed. */
#define RUNNER_TURNS "FDSL_BENCH_TURNS"

struct report;

/* Runs all variants with the current values of the options. Rank 0 adds the results to `*report`. If
 * `*report` is NULL, rank 0 creates it with report_begin(). The caller calls report_end(), even after a
 * failure. Collective, like comm_agree(). */
enum status runner_combination(struct settings *settings, struct report **report);

/* Returns whether all rows are lost if a signal ends the run: without --out, JSON is printed only at the end.
 */
static inline bool runner_loses_rows(const struct settings *settings)
{
    return !settings->out && settings->format == FORMAT_JSON;
}

/* ---- Another program (command.c) ---- */

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

/* ---- --table (sweep.c): runs the rows of a table, or checks and lists them ---- */

/* Performs one run of the program with these arguments. */
typedef enum status sweep_perform(int argc, char *argv[], int *exit_status);

/* Reads settings->table. With --list, prints one line for each of its runs, or for those of --task; with
 * --dry-run, checks them first. Otherwise performs these runs: one run in this process, several in processes
 * of their own, after all of them were checked. `argc` and `argv` are the command line, whose other options
 * apply to every run. `ranks` is the number of ranks that a launcher started: 1 without one, 0 if unknown.
 * Messages name the file, the line and the option. STATUS_USAGE for an error in the table; else the status of
 * the run, or the most severe status of several runs. */
enum status sweep_run(const struct settings *settings, uint64_t ranks, int argc, char *argv[],
                      sweep_perform *perform, int *exit_status);

#endif
