/* Converts canvases (images as drawn, one gray byte per pixel) to output images, for variants that draw only
 * canvases. */
#ifndef FDSL_CUDA_SYNTH_CONVERT_CUH
#define FDSL_CUDA_SYNTH_CONVERT_CUH

#include "synth/batch.cuh"

/* Enqueues the conversion of `count` canvases. The canvases begin at input->pixels. They are the first images
 * of the list `numbers`, which is in device memory, or of run number `run` if `numbers` is NULL. Writes
 * consecutive images in the format `output` to `images`, and their class numbers to `labels`. Both are in
 * device memory; `images` is aligned for its type. STATUS_FAILED if the launch fails. */
enum status convert_enqueue(const struct device_input *input, const struct synth_output *output,
                            const uint64_t *numbers, uint64_t run, uint32_t count, void *images,
                            int64_t *labels, cudaStream_t stream);

#endif
