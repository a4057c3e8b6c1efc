/* The engine of train-graph and infer-graph: `cnn` in bf16 with fused kernels, replayed as a CUDA graph. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH
#define FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_graph;

/* Whether kernels of engines that are opened from now on may overlap the end of the previous kernel. It is
 * false only in the test that both give the same bits, because no sanitizer checks races between kernels. */
extern bool graph_overlaps;

#endif
