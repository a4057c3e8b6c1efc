/* Declarations that options.c (the command line) and options_values.c (values) share. */
#ifndef FDSL_CORE_OPTIONS_PARTS_H
#define FDSL_CORE_OPTIONS_PARTS_H

#include "core/options.h"

/* Stores the default of the option. STATUS_FAILED if the table's default is invalid. */
enum status option_set_default(const struct option_spec *spec, void *values);

#endif
