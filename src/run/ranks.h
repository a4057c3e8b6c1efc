/* Prepares the ranks of a run: cores, a GPU and the scaling of each, and checks that all have the same
 * options and data. "Collective, like comm_agree()" means: all ranks call the function, and all return the
 * worst status of any rank. */
#ifndef FDSL_RUN_RANKS_H
#define FDSL_RUN_RANKS_H

#include <stdbool.h>
#include <stdint.h>

#include "run/rows.h"

/* Returns whether the run needs a GPU, for a chosen variant or for --compute. */
bool runner_any_on_gpu(const struct settings *settings);

/* STATUS_USAGE if ranks have different options, or run different builds. Collective, like comm_agree(). */
enum status runner_check_alike(const struct settings *settings);

/* STATUS_USAGE if the input files of a rank differ from those of rank 0. Collective, like comm_agree(). */
enum status runner_check_data(const struct runner *runner);

/* STATUS_USAGE if --device or --best-gpu is given to several ranks or together with --rank-device, or if the
 * list of --rank-device is invalid. */
enum status runner_check_no_device(const struct settings *settings, uint64_t ranks);

/* Sets runner->partition.strong from the workload and --scaling. STATUS_USAGE for --scaling weak if the
 * workload does not support it. */
enum status runner_take_scaling(struct runner *runner);

/* Divides the cores of each machine among its ranks (--bind) and sets the number of threads. `*worst` becomes
 * the worst enum cores_outcome of all machines, for runner_warn_about_cores(). Collective, like
 * comm_agree(). */
enum status runner_take_cores(struct settings *settings, double *worst);
void runner_warn_about_cores(const struct settings *settings, double outcome);

/* Returns whether --threads lists 0 and also the number of threads that 0 means. */
bool runner_repeats_threads(const struct settings *settings);

/* Selects the GPU that --rank-device names for this rank. If --rank-device does not name this rank, rank i of
 * a machine uses GPU i modulo the number of GPUs. On a rank that --rank-device assigns to the CPU, replaces
 * GPU variants by the CPU variant of the workload. Not collective. STATUS_USAGE if the GPU does not exist, or
 * if the workload has no CPU variant; STATUS_UNAVAILABLE if the build lacks this variant. The caller frees
 * runner->stand_ins. */
enum status runner_take_device(struct runner *runner);

/* Sets runner->sharers to the number of ranks on this rank's physical device. Warns if ranks share a device.
 * Collective, like comm_agree(). */
enum status runner_count_sharers(struct runner *runner);

#endif
