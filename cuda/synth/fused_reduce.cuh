/* Third kernel of `fused`: resizes whole canvases. It runs only if one output pixel covers more canvas pixels
 * than fit in a tile. */
#ifndef FDSL_CUDA_SYNTH_FUSED_REDUCE_CUH
#define FDSL_CUDA_SYNTH_FUSED_REDUCE_CUH

#include "synth/fused_output.cuh"

#define REDUCE_BLOCK 256

/* One thread per pixel of `output`. The canvases have one gray byte per pixel. */
static __global__ void __launch_bounds__(REDUCE_BLOCK)
    fused_reduce_kernel(const __grid_constant__ fused_job job, const struct synth_output output)
{
    uint64_t i = (uint64_t)blockIdx.x * REDUCE_BLOCK + threadIdx.x;
    uint32_t res = job.input.res, pixels = output.res * output.res;
    if (i >= (uint64_t)job.count * pixels)
        return;
    uint32_t image = (uint32_t)(i / pixels), y = (uint32_t)(i % pixels) / output.res,
             x = (uint32_t)(i % pixels) % output.res;
    const uint8_t *canvas = job.canvases + (size_t)image * res * res;
    size_t bytes = (size_t)pixels * output.channels * dtype_bytes(output.type);
    auto row_at = [&](uint32_t row) {
        const uint8_t *first = canvas + (size_t)row * res;
        return [first](uint32_t column) { return (uint32_t)first[column]; };
    };
    uint64_t sum = span_sum<uint64_t>(output.res, output_span(y, res, output.res),
                                      output_span(x, res, output.res), row_at);
    output_store(&output, output_area(output.fit, res), sum, y, x,
                 fused_call_of(job).images + (job.begin + image) * bytes);
}

#endif
