/* The variants `train-cuda` and `infer-cuda`. */
#include "common/device.h"
#include "train/engine.cuh"
#include "train/trainer.h"

static enum status probe(const struct resources *resources)
{
    return device_probe(resources->device);
}

static enum status train_setup(const struct resources *resources, const void *input, void **state)
{
    return trainer_open(&engine_cuda, resources, input, state);
}

static enum status infer_setup(const struct resources *resources, const void *input, void **state)
{
    return inferrer_open(&engine_cuda, resources, input, state);
}

extern "C" {
extern const struct variant variant_train_cuda, variant_infer_cuda;
const struct variant variant_train_cuda = {.platform = "cuda",
                                           .threaded = false,
                                           .traits = &engine_cuda,
                                           .probe = probe,
                                           .setup = train_setup,
                                           .run = trainer_run,
                                           .fetch = trainer_fetch,
                                           .teardown = trainer_close};
const struct variant variant_infer_cuda = {.platform = "cuda",
                                           .threaded = false,
                                           .traits = &engine_cuda,
                                           .probe = probe,
                                           .setup = infer_setup,
                                           .run = inferrer_run,
                                           .fetch = inferrer_fetch,
                                           .teardown = inferrer_close};
}
