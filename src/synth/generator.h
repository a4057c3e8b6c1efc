/* Generators (core/generator.h) of VisualAtom images. */
#ifndef FDSL_SYNTH_GENERATOR_H
#define FDSL_SYNTH_GENERATOR_H

#include "core/generator.h"
#include "synth/input.h"

/* Creates a generator of images in the output format of `synth` by `variant`, whose platform is that of the
 * request. Its sample number n is image synth->first + n. The tables of `synth` must outlive the generator;
 * the caller closes the generator. STATUS_UNAVAILABLE if the machine cannot run the variant. */
enum status synth_generator_open(const struct synth *synth, const struct variant *variant,
                                 const struct generator_request *request, struct generator **generator);

#endif
