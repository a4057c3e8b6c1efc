/* Conversion of finished canvases to output images, for variants that draw canvases only. */
#ifndef FDSL_CUDA_SYNTH_CONVERT_CUH
#define FDSL_CUDA_SYNTH_CONVERT_CUH

#include "synth/batch.cuh"

/* Enqueues the conversion of `count` canvases, which are the first images of run number `run` and begin at
 * input->pixels. Writes contiguous images in the format `output`, and their class numbers; `images`, aligned
 * for its type, and `labels` are device memory. STATUS_FAILED if the launch fails. */
enum status convert_enqueue(const struct device_input *input, const struct synth_output *output, uint64_t run,
                            uint32_t count, void *images, int64_t *labels, cudaStream_t stream);

#endif
