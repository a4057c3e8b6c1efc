/* Runs what the settings ask for, variant by variant. */
#ifndef FDSL_RUN_RUNNER_H
#define FDSL_RUN_RUNNER_H

#include "core/status.h"
#include "run/settings.h"

/* Joins the ranks. `read` is what came of reading this rank's command line: its failure ends all ranks, each
 * of which returns it. STATUS_USAGE where some ranks prepare and others run. */
enum status runner_join(const struct settings *settings, enum status read);

/* Sets up, verifies, times, records and reports every chosen variant. STATUS_WRONG when a variant differs
 * from its oracle (the others still run); any other failure ends the runs at once, and the rows written so
 * far stay. */
enum status runner_run(struct settings *settings);

#endif
