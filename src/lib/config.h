/* Converts a struct fdsl_config (fdsl.h) to the input of a variant. */
#ifndef FDSL_LIB_CONFIG_H
#define FDSL_LIB_CONFIG_H

#include "core/variant.h"
#include "lib/fdsl.h"
#include "synth/input.h"

/* Checks the fields of `config` that describe images, and builds the input. The caller frees the input with
 * synth_free(), even after an error. `synth` must be zeroed. STATUS_USAGE if a field is not valid; the
 * message begins with the name of the field. */
enum status config_input(const struct fdsl_config *config, struct synth *synth);

/* Finds the variant that config->generator names for config->device. STATUS_USAGE if the name is unknown or
 * is for the other kind of device; STATUS_UNAVAILABLE if the build lacks the variant. */
enum status config_variant(const struct fdsl_config *config, const struct variant **variant);

/* Gets the number of CPU threads: config->threads if it is not 0, else OMP_NUM_THREADS if it is valid, else
 * all that the process may use. STATUS_USAGE if config->threads is out of range. */
enum status config_threads(const struct fdsl_config *config, int *threads);

#endif
