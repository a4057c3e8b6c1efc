/* --config FILE reads options from an INI file and puts them before the options of the command line. */
#ifndef FDSL_CORE_CONFIG_H
#define FDSL_CORE_CONFIG_H

#include <stdbool.h>

#include "core/status.h"

struct config {
    char **argv; /* owned: program name, options of the file, command line; NULL-terminated */
    int argc;
    const char *path; /* path of the file; points into the arguments of main(); NULL: no file */
    int file_options; /* argv[1] to argv[file_options] come from the file */
    int *lines;       /* owned: argv[i] comes from line lines[i] of the file; NULL without file options */
    bool is_row; /* set by the caller: the command line is a row of --table, with the options for all rows */
    char **command; /* what follows "--" on the command line, NULL-terminated; NULL without "--"; not owned */
};

/* Fills `config` with the command line up to "--". If the command line contains --config, the options of that
 * file come first. A line "name = value" means --name=value, even for a flag. Section headings are ignored.
 * The caller calls config_free(), even after a failure. STATUS_USAGE if the file cannot be read (the message
 * names it) or a line is invalid (the message names file and line). STATUS_UNAVAILABLE in a build without
 * inih. */
enum status config_read(int argc, char *argv[], struct config *config);
void config_free(struct config *config);

#endif
