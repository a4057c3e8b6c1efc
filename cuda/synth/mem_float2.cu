/* `mem-float2`: `gbase`, but the noise of x and y is stored as one float2. The threads seek to half as many
 * random-number states as in `gbase`. A float2 takes one memory access instead of two. */
#include "synth/xorwow.cuh"

using step = xorwow_by_sample<noise_float2>;

LADDER_VARIANT(variant_mem_float2, ladder<step>, SYNTH_NOISE_XORWOW)
