/* `train-naive` and `infer-naive`: the reference engine of src/train/naive.c as variants. */
#include "train/engine.h"
#include "variants.h"

static const char *instruction_set(void)
{
    return "scalar";
}

TRAINING_BY(variant_train_naive, engine_naive, .instruction_set = instruction_set);
INFERRING_BY(variant_infer_naive, engine_naive, .instruction_set = instruction_set);
