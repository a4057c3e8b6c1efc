/* The engine of train-graph and infer-graph: `cnn` in bf16 with fused kernels, replayed as a CUDA graph. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH
#define FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_graph;

/* Set if a CUDA kernel may overlap the end of the previous kernel. A change applies to engines that are
 * opened afterwards. Only a test sets this variable to false. That test requires the same bits with and
 * without overlap, because no sanitizer detects races between kernels. */
extern bool graph_overlaps;

#endif
