/* The variants `train-graph` and `infer-graph`. */
#include "train/graph/engine.cuh"
#include "train/variants.cuh"

extern "C" {
extern const struct variant variant_train_graph, variant_infer_graph;
const struct variant variant_train_graph = training_by<&engine_graph>(true);
const struct variant variant_infer_graph = inferring_by<&engine_graph>(true);
}
