/* `mem-float2`: `gbase` with x and y in one sample. There are half as many states to seek, and a sample takes
 * one memory access instead of two. */
#include "synth/xorwow.cuh"

using step = xorwow_by_sample<noise_float2>;

LADDER_VARIANT(variant_mem_float2, ladder<step>, SYNTH_NOISE_XORWOW)
