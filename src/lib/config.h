/* From a configuration of fdsl.h to the input of a variant. */
#ifndef FDSL_LIB_CONFIG_H
#define FDSL_LIB_CONFIG_H

#include "core/variant.h"
#include "lib/fdsl.h"
#include "synth/input.h"

/* Checks all fields of `config` and builds the input; the caller frees it with synth_free(), also after an
 * error. `synth` must be zeroed. STATUS_USAGE names the field. */
enum status config_input(const struct fdsl_config *config, struct synth *synth);

/* Finds the variant that config->generator names for config->device. STATUS_USAGE for an unknown name, or one
 * for the other kind of device; STATUS_UNAVAILABLE if the build lacks it. */
enum status config_variant(const struct fdsl_config *config, const struct variant **variant);

/* Gets the number of CPU threads: config->threads, OMP_NUM_THREADS, or all that the process may use. */
enum status config_threads(const struct fdsl_config *config, int *threads);

#endif
