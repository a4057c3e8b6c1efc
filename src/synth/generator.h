/* Generators (core/generator.h) of VisualAtom images. */
#ifndef FDSL_SYNTH_GENERATOR_H
#define FDSL_SYNTH_GENERATOR_H

#include "core/generator.h"
#include "synth/input.h"

/* Makes a generator of the finished images of `synth`, whose tables outlive it: number n is image first + n.
 * On the host by `omp`, or `naive` where that is not built; on a device by `fused`, STATUS_UNAVAILABLE where
 * that is not. The caller closes it. */
enum status synth_generator_open(const struct synth *synth, const struct generator_request *request,
                                 struct generator **generator);

#endif
