/* `mem`: the paper's MEM. It is mem-float2 with noise in half precision, which halves the bytes between the
 * stages. */
#include "synth/xorwow.cuh"

using step = xorwow_by_sample<noise_half2>;

LADDER_VARIANT(variant_mem, ladder<step>, SYNTH_NOISE_XORWOW)
