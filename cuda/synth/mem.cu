/* `mem`: the paper's MEM. mem-float2 with noise in half precision, which halves the bytes between the
 * stages. */
#include "synth/xorwow.cuh"

using step = xorwow_by_sample<noise_half2>;

static const struct synth_traits traits = {.noise = SYNTH_NOISE_XORWOW,
                                           .half = true,
                                           .racy = true,
                                           .outputs = false,
                                           .timed = "clear+draw",
                                           .fetch_noise = ladder<step>::fetch_noise,
                                           .images = ladder<step>::images,
                                           .stages = ladder<step>::stages};

LADDER_VARIANT(variant_mem, ladder<step>, traits)
