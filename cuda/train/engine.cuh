/* The engine of train-cuda and infer-cuda: fp32, a plain kernel a layer; and the same engine with the
 * products of tensor cores, of train-tf32, train-bf16 and train-amp (fp16 with a scaled loss). */
#ifndef FDSL_CUDA_TRAIN_ENGINE_CUH
#define FDSL_CUDA_TRAIN_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_cuda, engine_tf32, engine_bf16, engine_amp;
extern "C" const struct engine engine_cudnn, engine_cudnn_tf32; /* where HAVE_CUDNN: convolutions by cuDNN */

#endif
