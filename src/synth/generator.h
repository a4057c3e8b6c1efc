/* Generators (core/generator.h) of VisualAtom images. */
#ifndef FDSL_SYNTH_GENERATOR_H
#define FDSL_SYNTH_GENERATOR_H

#include "core/generator.h"
#include "synth/input.h"

/* Creates a generator of finished images of `synth`; number n is image first + n. The tables of `synth` must
 * outlive the generator; the caller closes it. On the host it uses `omp`, or `naive` if omp is not built; on
 * a device it uses `fused`, and returns STATUS_UNAVAILABLE if fused is not built. */
enum status synth_generator_open(const struct synth *synth, const struct generator_request *request,
                                 struct generator **generator);

#endif
