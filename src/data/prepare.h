/* --prepare DIR: writes a dataset, as shards or as files, from a source. */
#ifndef FDSL_DATA_PREPARE_H
#define FDSL_DATA_PREPARE_H

#include <stdbool.h>

#include "core/status.h"

/* Does what the command line, which has --prepare, asks for; with several ranks, each makes its units, and
 * the bytes are the same for any number of them. What is finished stays: the same command after a failure or
 * a kill goes on from there. STATUS_USAGE, STATUS_FAILED or STATUS_UNAVAILABLE with one line.
 *
 * `is_option` tells whether the program has an option of that name elsewhere: its refusal says so. */
enum status prepare_run(int argc, char *argv[], bool (*is_option)(const char *name));

#endif
