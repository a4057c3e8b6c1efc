/* The engine of train-cuda and infer-cuda: fp32, a plain kernel a layer. */
#ifndef FDSL_CUDA_TRAIN_ENGINE_CUH
#define FDSL_CUDA_TRAIN_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_cuda;
extern "C" const struct engine engine_cudnn, engine_cudnn_tf32; /* where HAVE_CUDNN: convolutions by cuDNN */

#endif
