/* --table: runs the rows of a table, or checks and lists them. */
#ifndef FDSL_RUN_SWEEP_H
#define FDSL_RUN_SWEEP_H

#include "core/status.h"
#include "run/settings.h"

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
