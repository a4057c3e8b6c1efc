/* The engine of train-graph and infer-graph: `cnn` in bf16, fused, as a CUDA graph. */
#ifndef FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH
#define FDSL_CUDA_TRAIN_GRAPH_ENGINE_CUH

#include "train/engine.h"

extern "C" const struct engine engine_graph;

/* Whether kernels of engines that are opened from now on may begin while the ones before them end; true but
 * in the test that without it the same bits come out, as no sanitizer looks across kernels. */
extern bool graph_overlaps;

#endif
