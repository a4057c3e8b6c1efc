/* The engine of train-graph and infer-graph: `cnn` in bf16, fused, as a CUDA graph. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH
#define FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_graph;

#endif
