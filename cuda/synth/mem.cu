/* `mem`: MEM of the paper (docs/ladder.md). It is `mem-float2` with noise in half precision. This halves the
 * bytes that the noise stage writes and the vertex stage reads. */
#include "synth/xorwow.cuh"

using step = xorwow_by_sample<noise_half2>;

LADDER_VARIANT(variant_mem, ladder<step>, SYNTH_NOISE_XORWOW)
