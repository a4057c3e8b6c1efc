/* `mem-float2`: gbase with x and y in one sample: half as many states to seek, one access instead of two. */
#include "synth/xorwow.cuh"

using step = xorwow_by_sample<noise_float2>;

static const struct synth_traits traits = {.noise = SYNTH_NOISE_XORWOW,
                                           .half = false,
                                           .racy = true,
                                           .outputs = false,
                                           .timed = "clear+draw",
                                           .fetch_noise = ladder<step>::fetch_noise,
                                           .images = ladder<step>::images,
                                           .stages = ladder<step>::stages};

LADDER_VARIANT(variant_mem_float2, ladder<step>, traits)
