/* Engines that compute a network layer by layer. engine_cuda (train-cuda, infer-cuda) computes in fp32.
 * engine_tf32, engine_bf16 (both also infer) and engine_amp (fp16 with loss scaling) run GEMMs on tensor
 * cores. */
#ifndef FDSL_CUDA_TRAIN_ENGINE_CUH
#define FDSL_CUDA_TRAIN_ENGINE_CUH

#include <cuda_runtime.h>

#include "train/engine.h"

extern "C" const struct engine engine_cuda, engine_tf32, engine_bf16, engine_amp;
extern "C" const struct engine engine_cudnn,
    engine_cudnn_tf32; /* only with HAVE_CUDNN: convolutions by cuDNN */

/* If train->data->feed is DATA_CONSTANT, every step reads its batch from `values` and `labels`, which are
 * device buffers. To set the next batch, write to these buffers on `stream` between steps. They initially
 * contain a copy of data->sets[DATA_TRAIN]. `totals` are the sums since the last engine->totals(); read them
 * on `stream`. The engine owns the stream and the memory. */
struct engine_batch {
    cudaStream_t stream; /* default priority, which is the lowest */
    void *values;
    uint32_t *labels;
    const struct train_totals *totals;
};
struct engine_batch engine_batch(const void *state); /* `state` belongs to one of the engines above */

#endif
