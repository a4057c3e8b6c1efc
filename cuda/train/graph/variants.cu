/* The variants `train-graph` and `infer-graph`. */
#include "machine/device.h"
#include "train/graph/engine.cuh"
#include "train/inferrer.h"
#include "train/trainer.h"

static enum status probe(const struct resources *resources)
{
    return device_probe(resources->device);
}

static enum status train_setup(const struct resources *resources, const void *input, void **state)
{
    return trainer_open(&engine_graph, resources, input, state);
}

static enum status infer_setup(const struct resources *resources, const void *input, void **state)
{
    return inferrer_open(&engine_graph, resources, input, state);
}

extern "C" {
extern const struct variant variant_train_graph, variant_infer_graph;
const struct variant variant_train_graph = {.platform = "cuda",
                                            .threaded = false,
                                            .wants_own_architecture = true,
                                            .traits = &engine_graph,
                                            .probe = probe,
                                            .setup = train_setup,
                                            .run = trainer_run,
                                            .fetch = trainer_fetch,
                                            .teardown = trainer_close};
const struct variant variant_infer_graph = {.platform = "cuda",
                                            .threaded = false,
                                            .wants_own_architecture = true,
                                            .traits = &engine_graph,
                                            .probe = probe,
                                            .setup = infer_setup,
                                            .run = inferrer_run,
                                            .fetch = inferrer_fetch,
                                            .teardown = inferrer_close};
}
