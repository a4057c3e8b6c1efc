/* The engine of train-graph and infer-graph: `cnn` in bf16 with fused kernels, replayed as a CUDA graph. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH
#define FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_graph;

/* Whether kernels may overlap the end of the previous kernel, for engines that are opened from now on. Only a
 * test sets it to false: it requires the same bits with and without overlap, because no sanitizer checks
 * races between kernels. */
extern bool graph_overlaps;

#endif
