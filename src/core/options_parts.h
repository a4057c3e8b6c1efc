/* Declarations that options.c (the command line) and options_values.c (values) share. */
#ifndef FDSL_CORE_OPTIONS_PARTS_H
#define FDSL_CORE_OPTIONS_PARTS_H

#include "core/options.h"

/* Parses `text` and stores the value in the struct `values`. Texts are not copied. STATUS_USAGE with a
 * message that begins with the option's name. */
enum status option_set(const struct option_spec *spec, void *values, const char *text);

/* Stores the default of the option. STATUS_FAILED if the table's default is invalid. */
enum status option_set_default(const struct option_spec *spec, void *values);

#endif
