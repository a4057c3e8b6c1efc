/* Macros that define a variant for training or inference from an engine on the CPU. Arguments after the
 * engine initialise further members of struct variant. */
#ifndef FDSL_CPU_TRAIN_VARIANTS_H
#define FDSL_CPU_TRAIN_VARIANTS_H

#include "train/inferrer.h"
#include "train/trainer.h"

#define VARIANT_BY(driver, symbol, engine, ...)                                                           \
    static enum status symbol##_setup(const struct resources *resources, const void *input, void **state) \
    {                                                                                                     \
        return driver##_open(&engine, resources, input, state);                                           \
    }                                                                                                     \
    const struct variant symbol = {.platform = "cpu",                                                     \
                                   .traits = &engine,                                                     \
                                   .setup = symbol##_setup,                                               \
                                   .run = driver##_run,                                                   \
                                   .fetch = driver##_fetch,                                               \
                                   .teardown = driver##_close,                                            \
                                   __VA_ARGS__}

#define TRAINING_BY(symbol, ...)  VARIANT_BY(trainer, symbol, __VA_ARGS__)
#define INFERRING_BY(symbol, ...) VARIANT_BY(inferrer, symbol, __VA_ARGS__)

#endif
