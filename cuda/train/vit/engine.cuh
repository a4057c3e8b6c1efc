/* The engine of train-vit and infer-vit: vision transformers in bf16 on tensor cores. Sums, the optimizer and
 * its copy of the parameters are in fp32. */
#ifndef FDSL_CUDA_TRAIN_VIT_ENGINE_CUH
#define FDSL_CUDA_TRAIN_VIT_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_vit;

#endif
