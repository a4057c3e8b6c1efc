/* Generators (core/generator.h) of VisualAtom images. */
#ifndef FDSL_SYNTH_GENERATOR_H
#define FDSL_SYNTH_GENERATOR_H

#include "core/generator.h"
#include "synth/input.h"

/* Creates a generator of images in the output format of `synth`. Its sample number n is image
 * synth->first + n. The tables of `synth` must outlive the generator; the caller closes the generator. On the
 * host it runs `omp`, or `naive` if the build lacks omp. On a device it runs `fused`; STATUS_UNAVAILABLE if
 * fused cannot run there. */
enum status synth_generator_open(const struct synth *synth, const struct generator_request *request,
                                 struct generator **generator);

#endif
