/* The engine of train-cuda and infer-cuda: fp32, a plain kernel a layer; and the same engine with the
 * products of tensor cores, of train-tf32, train-bf16 and train-amp (fp16 with a scaled loss). */
#ifndef FDSL_CUDA_TRAIN_ENGINE_CUH
#define FDSL_CUDA_TRAIN_ENGINE_CUH

#include <cuda_runtime.h>

#include "train/engine.h"

extern "C" const struct engine engine_cuda, engine_tf32, engine_bf16, engine_amp;
extern "C" const struct engine engine_cudnn, engine_cudnn_tf32; /* where HAVE_CUDNN: convolutions by cuDNN */

/* Where the batch lies that every step of DATA_CONSTANT takes, on the device: whoever writes there, on the
 * stream and between steps, decides what is learnt. Values and labels are those of data->sets[DATA_TRAIN],
 * `totals` the sums of engine->totals() as they stand on the stream. */
struct engine_batch {
    cudaStream_t stream; /* of the default priority, which is the lowest */
    void *values;
    uint32_t *labels;
    const struct train_totals *totals;
};
struct engine_batch engine_batch(const void *state); /* of a state of the engines above */

#endif
