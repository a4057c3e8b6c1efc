/* Templates for the variants that train or infer with a GPU engine. */
#ifndef FDSL_CUDA_TRAIN_VARIANTS_CUH
#define FDSL_CUDA_TRAIN_VARIANTS_CUH

#include "machine/device.h"
#include "train/trainer.h"

template <const struct engine *ENGINE,
          enum status (*OPEN)(const struct engine *engine, const struct resources *resources, const void *job,
                              void **state)>
static enum status open_by(const struct resources *resources, const void *input, void **state)
{
    return OPEN(ENGINE, resources, input, state);
}

/* `own_architecture`: the value of wants_own_architecture in struct variant. */
template <const struct engine *ENGINE>
static constexpr struct variant
training_by(bool own_architecture = false,
            enum status (*probe)(const struct resources *) = device_probe_variant)
{
    return {.platform = "cuda",
            .wants_own_architecture = own_architecture,
            .traits = ENGINE,
            .probe = probe,
            .setup = open_by<ENGINE, trainer_open>,
            .run = trainer_run,
            .fetch = trainer_fetch,
            .teardown = trainer_close};
}

template <const struct engine *ENGINE>
static constexpr struct variant
inferring_by(bool own_architecture = false,
             enum status (*probe)(const struct resources *) = device_probe_variant)
{
    return {.platform = "cuda",
            .wants_own_architecture = own_architecture,
            .traits = ENGINE,
            .probe = probe,
            .setup = open_by<ENGINE, inferrer_open>,
            .run = inferrer_run,
            .fetch = inferrer_fetch,
            .teardown = inferrer_close};
}

#endif
