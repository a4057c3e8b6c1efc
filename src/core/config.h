/* --config FILE: options from an INI file, as if they stood on the command line before all others. */
#ifndef FDSL_CORE_CONFIG_H
#define FDSL_CORE_CONFIG_H

#include "core/status.h"

struct config {
    char **argv; /* the program's name, the options of the file, the command line; NULL-terminated */
    int argc;
    int file_options; /* how many of `argv`, from 1 on, come from the file */
};

/* Fills `config` with the command line and, where that has --config, with the options of the file. A line
 * "name = value" is the option --name=value; the values true, yes and on stand for a flag, false, no and off
 * for none. Sections group lines and mean nothing. The caller frees `config`, also after a failure; `argv`
 * must outlive it. STATUS_USAGE with the file and the line for a line that is no option; STATUS_UNAVAILABLE
 * in a build without inih. */
enum status config_read(int argc, char *argv[], struct config *config);
void config_free(struct config *config);

#endif
