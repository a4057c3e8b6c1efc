/* `train-naive` and `infer-naive`: the reference engine of src/train/naive.c as variants. */
#include "train/engine.h"
#include "train/inferrer.h"
#include "train/trainer.h"

static enum status train_setup(const struct resources *resources, const void *input, void **state)
{
    return trainer_open(&engine_naive, resources, input, state);
}

static enum status infer_setup(const struct resources *resources, const void *input, void **state)
{
    return inferrer_open(&engine_naive, resources, input, state);
}

static const char *instruction_set(void)
{
    return "scalar";
}

const struct variant variant_train_naive = {
    .platform = "cpu",
    .instruction_set = instruction_set,
    .traits = &engine_naive,
    .setup = train_setup,
    .run = trainer_run,
    .fetch = trainer_fetch,
    .teardown = trainer_close,
};

const struct variant variant_infer_naive = {
    .platform = "cpu",
    .instruction_set = instruction_set,
    .traits = &engine_naive,
    .setup = infer_setup,
    .run = inferrer_run,
    .fetch = inferrer_fetch,
    .teardown = inferrer_close,
};
