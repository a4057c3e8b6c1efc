/* Generators (core/generator.h) of VisualAtom images. */
#ifndef FDSL_SYNTH_GENERATOR_H
#define FDSL_SYNTH_GENERATOR_H

#include "core/generator.h"
#include "synth/input.h"

/* Creates a generator: `variant` generates images in the output format of `synth`. The variant's platform
 * must match request->on_device. Sample n of the generator is image number synth->first + n. The tables of
 * `synth` must outlive the generator. The caller closes the generator. STATUS_UNAVAILABLE if the machine
 * cannot run the variant. */
enum status synth_generator_open(const struct synth *synth, const struct variant *variant,
                                 const struct generator_request *request, struct generator **generator);

#endif
