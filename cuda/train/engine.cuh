/* The engine of train-cuda and infer-cuda: fp32, one plain kernel per layer. With GEMMs on tensor cores, it
 * is also the engine of train-tf32, train-bf16 and train-amp (fp16 with loss scaling). */
#ifndef FDSL_CUDA_TRAIN_ENGINE_CUH
#define FDSL_CUDA_TRAIN_ENGINE_CUH

#include <cuda_runtime.h>

#include "train/engine.h"

extern "C" const struct engine engine_cuda, engine_tf32, engine_bf16, engine_amp;
extern "C" const struct engine engine_cudnn,
    engine_cudnn_tf32; /* only with HAVE_CUDNN: convolutions by cuDNN */

/* Device buffers of the batch that every step of DATA_CONSTANT uses. Writing to them on `stream`, between
 * steps, chooses the training batch. Values and labels are those of data->sets[DATA_TRAIN]. `totals` are the
 * running sums of engine->totals(), valid in stream order. */
struct engine_batch {
    cudaStream_t stream; /* default priority, which is the lowest */
    void *values;
    uint32_t *labels;
    const struct train_totals *totals;
};
struct engine_batch engine_batch(const void *state); /* `state` is of an engine above */

#endif
