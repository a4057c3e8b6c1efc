#include "synth/convert.cuh"

#include "common/check.cuh"
#include "synth/fused_output.cuh"

#define CONVERT_BLOCK 256

/* Returns the weighted sum of the grays that output pixel (y, x) covers. */
static __device__ uint64_t covered_sum(const struct image_input &image, const struct synth_output &output,
                                       uint32_t y, uint32_t x)
{
    uint32_t res = image.res;
    if (output.fit != OUTPUT_RESIZE) {
        struct output_corner corner = {0, 0};
        if (output.fit == OUTPUT_CROP)
            corner = output_crop(image.key, res, output.res);
        return image.pixels[(size_t)(corner.y + y) * res + corner.x + x];
    }
    auto row_at = [&](uint32_t row) {
        const uint8_t *first = image.pixels + (size_t)row * res;
        return [first](uint32_t column) { return (uint32_t)first[column]; };
    };
    return span_sum<uint64_t>(output.res, output_span(y, res, output.res), output_span(x, res, output.res),
                              row_at);
}

/* One thread per output pixel. */
static __global__ void __launch_bounds__(CONVERT_BLOCK)
    convert_kernel(const struct device_input input, const struct synth_output output, const uint64_t *numbers,
                   uint64_t run, uint32_t count, uint8_t *images, int64_t *labels)
{
    uint64_t i = (uint64_t)blockIdx.x * CONVERT_BLOCK + threadIdx.x;
    uint32_t pixels = output.res * output.res;
    if (i >= (uint64_t)count * pixels)
        return;
    uint64_t j = i / pixels;
    uint32_t pixel = (uint32_t)(i - j * pixels), y = pixel / output.res, x = pixel % output.res;
    const struct image_input image =
        image_input_listed(input, input.classes, input.spoke_offset, numbers, run, j);
    size_t bytes = (size_t)pixels * output.channels * dtype_bytes(output.type);
    if (pixel == 0)
        labels[j] = image.class_.id;
    output_store(&output, output_area(output.fit, image.res), covered_sum(image, output, y, x), y, x,
                 images + j * bytes);
}

enum status convert_enqueue(const struct device_input *input, const struct synth_output *output,
                            const uint64_t *numbers, uint64_t run, uint32_t count, void *images,
                            int64_t *labels, cudaStream_t stream)
{
    uint64_t pixels = (uint64_t)count * output->res * output->res;
    convert_kernel<<<(unsigned)((pixels + CONVERT_BLOCK - 1) / CONVERT_BLOCK), CONVERT_BLOCK, 0, stream>>>(
        *input, *output, numbers, run, count, static_cast<uint8_t *>(images), labels);
    CUDA_TRY_LAUNCH("convert_kernel");
    return STATUS_OK;
}
