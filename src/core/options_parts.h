/* Declarations that the files of the option parser share: options.c (the command line), options_values.c
 * (values), options_explain.c (messages) and options_help.c (--help). */
#ifndef FDSL_CORE_OPTIONS_PARTS_H
#define FDSL_CORE_OPTIONS_PARTS_H

#include "core/options.h"
#include "core/text.h"

/* ---- options.c ---- */

/* Returns spec number `index`, counted over all tables in order, or NULL if there are fewer specs. Sets
 * `*values` to the struct that stores the option's value. */
const struct option_spec *option_spec_at(const struct options *options, size_t index, void **values);
size_t option_spec_count(const struct options *options);

/* Returns whether a table has an option with this name. Sets `*index` to its number if so. */
bool option_has_name(const struct options *options, const char *name, size_t *index);

/* Returns the short option letter, or 0. */
char option_letter(const struct option_spec *spec);

/* ---- options_values.c ---- */

/* Returns whether the option accepts the value "none", which means "not given". Real numbers with the default
 * 0 accept it. Without a default, real numbers and lists of numbers accept it, and so do counts and sizes
 * whose minimum is at least 1. */
bool option_takes_none(const struct option_spec *spec);

/* Stores the default of the option. STATUS_FAILED if the table's default is invalid. */
enum status option_set_default(const struct option_spec *spec, void *values);

/* ---- options_explain.c: STATUS_USAGE with a message that names the option that is probably meant ---- */

/* Sets the message for an ambiguous or unknown option, which getopt_long() refused. */
enum status option_explain_refused(const struct options *options, const char *argument);

/* Accepts an argument that abbreviates the name of `spec`, unless another command has an option with this
 * name: --samples of --prepare must not be read as --samples-out. */
enum status option_explain_abbreviation(const struct options *options, const struct option_spec *spec,
                                        const char *argument);

/* Sets the message for an option without its value. */
enum status option_explain_missing(const struct option_spec *spec);

/* Sets the message for an argument that is not an option. `previous` is the argument before it. */
enum status option_explain_operand(const struct options *options, const char *previous, const char *argument);

/* Completes the message for a value that `spec` refused: if an option with a similar name accepts the value,
 * suggests that option. Returns STATUS_USAGE. */
enum status option_explain_value(const struct options *options, const struct option_spec *spec,
                                 const char *value);

#endif
